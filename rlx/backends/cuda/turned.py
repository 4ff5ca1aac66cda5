"""Operands of products in the memory layout that bulk copies and tensor cores take: rows of whole multiples of 16 bytes, and
numbers of 8 and of 32 bits along the summed axis only."""

from __future__ import annotations

import math
from typing import Any

from rlx.backends.cuda import fma
from rlx.backends.shared.packed import is_known
from rlx.ir.dtype import bf16, f16, f32
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.ops import pack

LEAST = 16  # rows and columns of products on tensor cores
ROW = 8  # elements of 16 bits
LARGE = 1 << 23  # multiply-adds, from which on copies of both operands take less time than loads by threads
SHORT, FEW = 128, 1 << 17  # products of a sum, for fewer of which no more elements than that are copied in a run
MANY = 1 << 32  # multiply-adds, from which on a kernel that exchanges axes in each run takes less than it saves


def packs(arch: str, node: Node, graph: Graph, options: Any) -> Value | None:
    """The right operand [..., k, n] as [..., n, k] in memory. None: it is so, or tensor cores and bulk copies take it as it
    lies; or it is known before runs, and programs of fewer rows share it, which read the other order."""
    (left, right), (*_, depth, n) = node.inputs, (0, 0, *node.inputs[1].shape.static)
    item, m = right.dtype.itemsize, _rows(left, right)
    narrow = item == 1 or (item == 2 and n % 8) or (options.precision == "tf32" and right.dtype == f32)
    fits = arch == "sm_90a" and min(m, n, depth) >= LEAST and depth * item % 16 == 0 and left.dtype.itemsize == item
    worth = not graph.handles if is_known(right) else m * right.shape.num_elements >= MANY
    if not (narrow and fits and worth) or right.node.op.name == "transpose":
        return fma.packs(node, graph, options) if node.op.name == "matmul" else None
    axes = (*range(right.rank - 2), right.rank - 1, right.rank - 2)
    return pack(right, layout=tuple((axis, 1) for axis in axes))  # type: ignore[return-value]


def row_multiple(arch: str, node: Node) -> int:
    """Target.row_multiple: of products on tensor cores whose operands threads would have to load."""
    if arch != "sm_90a" or node.op.name != "matmul":
        return 1
    (left, right), size = node.inputs, node.shapes[0].num_elements * node.inputs[0].shape.static[-1]
    narrow = left.dtype in (f16, bf16) and right.dtype == left.dtype
    if right.rank < 2 or not narrow or size < LARGE or min(_rows(left, right), *right.shape.static[-2:]) < LEAST:
        return 1
    copied = sum(v.shape.num_elements for v in (left, right) if not is_known(v))
    return 1 if right.shape.static[-2] < SHORT and copied > FEW else ROW


def _rows(left: Value, right: Value) -> int:
    """Of one product."""
    return math.prod(left.shape.static[:-1] if right.rank == 2 else left.shape.static[-2:-1])


__all__ = ["packs", "row_multiple"]
