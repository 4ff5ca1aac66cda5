"""Operands of products in the memory layout that bulk copies and tensor cores take: rows of whole multiples of 16 bytes, better
of 128, and numbers of 8 and of 32 bits along the summed axis only."""

from __future__ import annotations

import math
from typing import Any

from rlx.backends.cuda import fma
from rlx.backends.cuda.tensor import LINE, SECTOR
from rlx.backends.shared.packed import is_known
from rlx.ir.dtype import bf16, f16, f32
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.ops import pack
from rlx.ir.target import Rows

LEAST = 16  # rows and columns of products on tensor cores
ROW = 16  # bytes that bulk copies need
LARGE = 1 << 23  # multiply-adds, from which on copies of both operands take less time than loads by threads
# multiply-adds and rows of the other operand, from which on copies pay where both are given, and rows begin inside sectors
LARGER, OTHERS = 1 << 30, 320
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


def rows(arch: str, node: Node) -> Rows:
    """Target.rows: of products on tensor cores, whose operands bulk copies should bring. They take up to 1.8 times as long where
    rows begin inside a sector of memory."""
    if arch != "sm_90a" or node.op.name != "matmul":
        return Rows()
    (left, right), size = node.inputs, node.shapes[0].num_elements * node.inputs[0].shape.static[-1]
    narrow = left.dtype in (f16, bf16) and right.dtype == left.dtype
    if right.rank < 2 or not narrow or size < LARGE or min(m := _rows(left, right), *right.shape.static[-2:]) < LEAST:
        return Rows()
    row, sector, line = (n // left.dtype.itemsize for n in (ROW, SECTOR, LINE))
    copied = sum(v.shape.num_elements for v in (left, right) if not is_known(v))
    if right.shape.static[-2] < SHORT and copied > FEW:
        return Rows(best=line)
    given = size >= LARGER and not is_known(right)
    of_left, of_right = (sector if given and others >= OTHERS else row for others in (right.shape.static[-1], m))
    return Rows(of_left, of_right, sector, line)


def _rows(left: Value, right: Value) -> int:
    """Of one product."""
    return math.prod(left.shape.static[:-1] if right.rank == 2 else left.shape.static[-2:-1])


__all__ = ["packs", "rows"]
