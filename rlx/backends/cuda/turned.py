"""Right operands of products, transposed in memory: tensor cores take numbers of 8 and of 32 bits along the summed axis only,
and bulk copies take rows of whole multiples of 16 bytes."""

from __future__ import annotations

import math
from typing import Any

from rlx.backends.cuda import fma
from rlx.backends.shared.packed import is_known
from rlx.ir.dtype import f32
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.ops import pack

LEAST = 16  # rows and columns of products on tensor cores
MANY = 1 << 32  # multiply-adds, from which on a kernel that exchanges axes in each run takes less than it saves


def packs(arch: str, node: Node, graph: Graph, options: Any) -> Value | None:
    """The right operand [..., k, n] as [..., n, k] in memory. None: it is so, or tensor cores and bulk copies take it as it
    lies; or it is known before runs, and programs of fewer rows share it, which read the other order."""
    (left, right), (*_, depth, n) = node.inputs, (0, 0, *node.inputs[1].shape.static)
    item, m = right.dtype.itemsize, math.prod(left.shape.static[:-1] if right.rank == 2 else left.shape.static[-2:-1])
    narrow = item == 1 or (item == 2 and n % 8) or (options.precision == "tf32" and right.dtype == f32)
    fits = arch == "sm_90a" and min(m, n, depth) >= LEAST and depth * item % 16 == 0 and left.dtype.itemsize == item
    worth = not graph.handles if is_known(right) else m * right.shape.num_elements >= MANY
    if not (narrow and fits and worth) or right.node.op.name == "transpose":
        return fma.packs(node, graph, options) if node.op.name == "matmul" else None
    axes = (*range(right.rank - 2), right.rank - 1, right.rank - 2)
    return pack(right, layout=tuple((axis, 1) for axis in axes))  # type: ignore[return-value]


__all__ = ["packs"]
