"""Products of groups of rows with a matrix each (Contract.count), by the kernels of single products.

The rows of a group are cut into tiles. Each tile is a grid point of a product with that many rows; the last tile of a group
has fewer. The groups are known in device memory only, so the grid has the maximum number of tiles: each block counts the tiles
of all groups, and finds the group of its own (segments.h). Blocks without a tile exit. The index of a group's matrix in the
right operand is read from memory, too: `slots` has it, or -1 for a matrix in host memory, at its offset from `far`
(experts.py).

Tensor cores of 9.0 take 64 rows at a time, however few a group has: the product is then bound by reading its weights. Rows
past the end of a tile, which belong to other groups, are multiplied too, but not stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlx.backends.cuda.contract import has_tiles, tiled
from rlx.backends.cuda.gemv import few_rows
from rlx.backends.cuda.gemv_blocks import MOST_PIECES, of_blocks
from rlx.backends.cuda.schedule import Launch, Segments
from rlx.backends.cuda.tensor import on_tensor_cores
from rlx.backends.cuda.warps import on_warps
from rlx.errors import CompileError
from rlx.ir.graph import Node, Value
from rlx.ir.kernel import Alu, Const, Contract, Expr, Kernel, Limit, Operand, Var, const, is_const, k
from rlx.ir.nest import substitute
from rlx.ir.op import Kind

FEW = (1, 2, 4, 8)  # rows of a tile of which each warp has some columns
PACKED = (1, 2, 4, 8, 16, MOST_PIECES)  # the same with quantised weights
LEAST_PACKED = 4  # of those, unless they need too much shared memory
ALONE = 1.2  # rows of a group, up to which a tile has one: that is multiplied as integers
MANY, TALL = (64, 128), 160  # rows of tiles on tensor cores; rows of a group from which on the latter are faster
LEAST = 16  # columns of a product on tensor cores
SPARE = 1.5  # times the rows that a group has on average, if it has any: few have more
Way = Callable[[Kernel, Segments], Launch | None]


def of_groups(kernel: Kernel) -> bool:
    return any(isinstance(s, Contract) and s.count is not None for s in kernel.body)


def in_boxes(node: Node) -> bool:
    """Whether bulk copies can fetch both operands of a segment_matmul, independent of the rest of the graph."""
    left, right, _ = node.inputs
    whole = right.node.op.name == "transpose" and _stored(right.node.inputs[0]) and left.node.op.kind is not Kind.VIEW
    narrow = left.dtype == right.dtype and left.dtype.name in ("f16", "bf16")
    return whole and narrow and left.shape.static[1] % 8 == 0 and node.shapes[0].static[1] >= 2 * LEAST


def in_panels(node: Node) -> bool:
    """Whether tiles have few rows of a segment_matmul with quantised weights."""
    return SPARE * rows_of_group(node.inputs[0].shape.static[0], node.inputs[1].shape.static[0]) <= PACKED[-1]


def _stored(value: Value) -> bool:
    """Whether the value is a leaf with other dims at most."""
    return value.node.op.kind is Kind.LEAF or (value.node.op.name == "reshape" and _stored(value.node.inputs[0]))


def segmented(kernel: Kernel, arch: str, multiprocessors: int, most: int) -> Launch:
    """The launch of a product of groups of rows. `most`: bytes of shared memory of a block. CompileError: a fault of fusion."""
    (c,), ((_, groups),) = kernel.body, kernel.grid
    assert isinstance(c, Contract) and isinstance(c.b, Operand)
    average, capability = SPARE * rows_of_group(c.m, groups), int(arch[3:].rstrip("af"))

    def tensors(cut: Kernel, s: Segments) -> Launch | None:
        return on_tensor_cores(cut, multiprocessors, segments=s)

    def blocks(cut: Kernel, s: Segments) -> Launch | None:
        found = of_blocks(cut, multiprocessors, most - s.shared, segments=s)
        return found if found and found.passes == 1 else None

    def gemv(cut: Kernel, s: Segments) -> Launch | None:
        return few_rows(cut, multiprocessors, most - s.shared, s)

    def warps(cut: Kernel, s: Segments) -> Launch | None:
        return on_warps(cut, capability=capability)

    def plain(cut: Kernel, s: Segments) -> Launch | None:
        return tiled(cut) if has_tiles(cut) else None

    ways: list[tuple[Way, int]] = []
    if arch == "sm_90a" and not (c.b.blocks and average <= PACKED[-1]):
        ways += [(tensors, rows) for rows in _order(MANY, 0 if average <= TALL and not c.b.blocks else MANY[1])]
    if c.b.blocks:
        ways += [(blocks, rows) for rows in _order(PACKED, 1 if average <= SPARE * ALONE else max(average, LEAST_PACKED))]
    elif average > FEW[-1] and isinstance(c.a, Operand):
        ways += [(warps, MANY[1]), (plain, MANY[0])]
    else:
        ways += [*((gemv, rows) for rows in _order(FEW, average)), (plain, MANY[0])]
    for make, rows in ways:
        cut, segments = in_tiles(kernel, rows)
        if (found := make(cut, segments)) is not None:
            return replace(found, segments=segments)
    raise CompileError(f"no kernel for groups of rows takes {kernel.name}")


def _order(sizes: Sequence[int], wanted: float) -> list[int]:
    """The least of the sizes that suffices, or the greatest; then smaller ones, which need less memory."""
    first = next((n for n in sizes if n >= wanted), sizes[-1])
    return [first, *(n for n in reversed(sizes) if n < first)]


def rows_of_group(rows: int, groups: int) -> float:
    """Rows of a nonempty group, if each row belongs to a random group."""
    return rows / used(rows, groups) if rows else 0.0


def used(rows: int, groups: int) -> float:
    """Groups that have rows."""
    return groups * -math.expm1(rows * math.log1p(-1 / groups)) if groups > 1 else 1.0


def in_tiles(kernel: Kernel, rows: int) -> tuple[Kernel, Segments]:
    """The product of a tile of `rows` rows. In the epilogue, c.i is still the row in the group."""
    (c,), ((group, groups),) = kernel.body, kernel.grid
    assert isinstance(c, Contract) and c.count is not None
    row, tile, first, start, a = Var("row"), Var("tile"), Var("first"), (None, 0), c.a
    moved = {c.i: row}
    if isinstance(a, Operand):
        begin, base = _rows(a.offset, a.row_stride)
        start = begin and k.add(begin, first), base
        a = replace(a, offset=k.add(a.offset, k.mul(first, const(a.row_stride))))
    else:
        moved[a.row] = own = Var("row")
        a = replace(a, row=own)
    assert isinstance(c.b, Operand)
    slot = Var("slot")
    b = replace(c.b, offset=substitute(c.b.offset, {group: slot}))
    some = min(groups, c.m)
    most = some + (c.m - some) // rows
    here = used(c.m, groups)
    expected = min(most, max(1, math.ceil(here * max(1.0, c.m / here / rows + 0.5))))
    segments = Segments(group, groups, tile, first, rows, c.count, moved, c.m, *start, expected, b.buffer, slot)
    made = replace(c, i=row, m=rows, a=a, b=b, count=None)
    return replace(kernel, grid=((tile, most),), body=(made,), limits=(Limit(row, k.sub(c.count, first)),)), segments


def _rows(offset: Expr, stride: int) -> tuple[Expr | None, int]:
    """The number of rows of `stride` elements, and of more elements, that make an offset; None: they do not."""
    if isinstance(offset, Const):
        return const(0), int(offset.value)
    if isinstance(offset, Alu) and offset.op == "mul" and is_const(offset.args[1], stride):
        return offset.args[0], 0
    if isinstance(offset, Alu) and offset.op == "add":
        for one, other in (offset.args, offset.args[::-1]):
            if isinstance(one, Const):
                begin, more = _rows(other, stride)
                return begin, more + int(one.value)
    return None, 0


__all__ = ["in_tiles", "of_groups", "rows_of_group", "segmented", "used"]
