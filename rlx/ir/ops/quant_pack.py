"""Packed quantised weights.

`pack_quant` interleaves the blocks of several rows in panels (rlx.ir.blocks.Panel), for kernels that stream weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.blocks import FORMATS, Integers, Panel
from rlx.ir.contexts import Applied, Lowering
from rlx.ir.declare import op
from rlx.ir.dtype import u8
from rlx.ir.kernel import Expr, Loop, Loops, Var, k
from rlx.ir.layout import TiledLayout
from rlx.ir.op import Kind, Sample
from rlx.ir.ops.quant import FormatAttrs
from rlx.ir.ops.rules import static_dim
from rlx.ir.shape import Shape


class PackAttrs(FormatAttrs):
    """`rows` of a panel, and the elements in a `step` of its kernel's innermost loop, as the backend asks for."""

    rows: int
    step: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if fault := panel(self).fault():
            raise AttributeValueError(f"no panels of {self.format!r}: {fault}")


def panel(attrs: PackAttrs) -> Panel:
    return Panel(FORMATS[attrs.format], attrs.rows, attrs.step)


def _shape(attrs: PackAttrs, w: Shape) -> Shape:
    each = FORMATS[attrs.format].nbytes
    nbytes = static_dim(w.dims[-1], "packing") if w.rank in (2, 3) else -1
    if w.dtype != u8 or nbytes < 0 or nbytes % each:
        raise ShapeError(f"{attrs.format} weights are u8[rows, multiple of {each}], or several of these, got {w}")
    return w


def _tiled(attrs: PackAttrs, w: Shape) -> TiledLayout:
    """Panels of rows; within a panel the blocks follow each other, each with all rows of the panel."""
    p, (*groups, rows, nbytes) = panel(attrs), w.static
    at = len(groups)
    parts = (*((axis, 1) for axis in range(at)), (at, p.rows), (at + 1, 1))
    return TiledLayout((*groups, rows, nbytes // p.plain.nbytes), parts, p.packed.nbytes)


def _kernel(ctx: Lowering, node: Applied[PackAttrs]) -> Loops:
    """One grid point per row of each block of a panel: it reads contiguous bytes."""
    w, p = node.inputs[0], panel(node.attrs)
    f, (*groups, rows, nbytes) = p.plain, ctx.dims(w)
    at_panel, block, row, turn = Var("panel"), Var("block"), Var("row"), Var("turn")
    group = tuple(Var("group") for _ in groups)
    grid = (*zip(group, groups), (at_panel, -(-rows // p.rows)), (block, nbytes // f.nbytes), (row, p.rows))
    source = k.add(k.mul(at_panel, p.rows), row)
    guard = k.lt(source, rows) if rows % p.rows else None

    def byte(at: Expr) -> Expr:
        return ctx.element(w, (*group, source, k.add(k.mul(block, f.nbytes), at)), guard)

    def stored(at: Expr | int, unit: int, value: Callable[[Expr], Expr]) -> Loop:
        """`unit` bytes of this row, in a field that begins at offset `at` of this block of the panel."""
        i, place = Var("i"), k.add(k.add(k.mul(block, p.packed.nbytes), at), k.mul(row, unit))
        return Loop(i, unit, (ctx.store(0, (*group, at_panel, k.add(place, i)), value(i)),), vector=True)

    def small(integers: Integers, number: int) -> Callable[[Expr], Expr]:
        return lambda _: integers.load(byte, k.add(k.mul(turn, p.each(integers)), number), u8)

    def dword(part: int, first: int) -> Callable[[Expr], Expr]:
        bits, flip = f.q.parts[part], 0 if part else p.flip

        def value(i: Expr) -> Expr:
            found = [bits.load(byte, k.add(i, first + 4 * n), u8, turn, p.step) for n in range(8 // bits.bits)]
            found = [k.xor(q, flip) if flip else q for q in found]
            return reduce(k.or_, (k.shl(q, n * bits.bits) if n else q for n, q in enumerate(found)))

        return value

    numbers = [stored(to, 2, lambda i, at=at: byte(k.add(i, at))) for at, to in zip(f.numbers, p.packed.numbers)]
    lines = [(1, small(x, i)) for x in (f.scales, f.mins) if x for i in range(p.each(x))] + [(4, dword(*x)) for x in p.dwords]
    at, body = p.turns_at, []
    for unit, value in lines:
        body.append(stored(k.add(k.mul(turn, p.turn_bytes), at), unit, value))
        at += unit * p.rows
    return grid, (*numbers, Loop(turn, f.block // p.step, tuple(body)))


pack_quant = op(
    "pack_quant", kind=Kind.KERNEL, infer=_shape, attrs=PackAttrs, dtypes="u", kernel=_kernel, tiled=_tiled,
    reference=lambda attrs, w: np.asarray(w), rows=lambda attrs, operand, axis, w: axis,
    samples=tuple(
        Sample(((n, blocks * FORMATS[f].nbytes),), {"format": f, "rows": 32, "step": 32}, low=0, high=256, dtypes=("u8",))
        for f, n, blocks in (("q8_0", 5, 2), ("q4_0", 33, 2), ("q4_k", 32, 1), ("q5_k", 3, 1), ("q6_k", 2, 2))
    )
    + (Sample(((2, 33, 36),), {"format": "q4_0", "rows": 32, "step": 32}, low=0, high=256, dtypes=("u8",)),),
    doc="Weights of quantised blocks u8[n, row bytes], or several of these, stored as panels u8[ceil(n / rows), panel bytes] in "
    "the order in which a backend's dequant_matmul reads them (rlx.ir.blocks.Panel); missing rows are zeros. In a user's graph, "
    "the same as w.",
)  # fmt: skip
