"""Row look-up in quantised tables, plain or packed.

A look-up can read the panels that a matrix product uses, so a table with both uses (tied embeddings) is stored once
(rlx/compile/packing.py).
"""

from __future__ import annotations

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.contexts import Applied, Coords, Lowering
from rlx.ir.declare import op
from rlx.ir.dtype import f32
from rlx.ir.kernel import Expr, k
from rlx.ir.op import Kind, Sample
from rlx.ir.ops.index import check_range, picked
from rlx.ir.ops.quant import Block, DequantizeAttrs, block_element, check_rows, random_weights
from rlx.ir.ops.quant_pack import PACKINGS, PANEL, STEP, Packing
from rlx.ir.ops.rules import integer
from rlx.ir.quant import FORMATS
from rlx.ir.shape import Shape


def _shape(attrs: DequantizeAttrs, w: Shape, ids: Shape) -> Shape:
    integer("the ids", ids)
    if w.rank != 2:
        raise ShapeError(f"the table is u8[entries, row bytes], got {w}")
    check_rows(FORMATS[attrs.format], attrs.columns, w)
    return Shape((*ids.dims, attrs.columns), f32)


def _array(attrs: DequantizeAttrs, w: np.ndarray, ids: np.ndarray) -> np.ndarray:
    check_range(ids, len(w), "quant_rows")
    return FORMATS[attrs.format].decode_rows(w.astype(np.uint8)[ids.astype(np.int64)], attrs.columns)


def _element(ctx: Lowering, node: Applied[DequantizeAttrs], result: int, coords: Coords) -> Expr:
    w, ids = node.inputs
    row = picked(ctx, ids, coords[:-1], ctx.dims(w)[0])
    if ctx.in_tiles(w):
        return _packed_element(ctx, node, row, coords[-1])
    return block_element(FORMATS[node.attrs.format], coords[-1], lambda at: ctx.element(w, (row, at)))


def _packed_element(ctx: Lowering, node: Applied[DequantizeAttrs], row: Expr, column: Expr) -> Expr:
    """The element from packed panels (see quant_pack)."""
    p, packed = PACKINGS[node.attrs.format], node.inputs[0]
    lane, start = k.rem(row, PANEL), k.mul(k.div(column, p.block), p.panel_bytes)
    b = Block(lambda at: ctx.stored(packed, (k.div(row, PANEL), k.add(start, at))))
    turn, e = k.div(k.rem(column, p.block), STEP), k.rem(column, STEP)
    at = k.add(k.mul(turn, p.turn_bytes), p.turns_at)  # where the turn begins
    q = _bits(p, b, k.add(at, p.dwords_at), lane, e)
    scale = b.half(k.mul(lane, 2))
    if p.scales:
        place = k.add(k.add(at, k.mul(k.div(e, p.group), PANEL)), lane)
        scale = k.mul(scale, b.signed(place) if p.signed else k.cast(b.bits(place), f32))
    value = k.mul(scale, k.cast(k.sub(q, p.zero), f32))
    if not p.mins:
        return value
    least = b.bits(k.add(k.add(at, PANEL * (STEP // p.group)), lane))
    return k.sub(value, k.mul(b.half(k.add(k.mul(lane, 2), 2 * PANEL)), k.cast(least, f32)))


def _bits(p: Packing, b: Block, start: Expr, lane: Expr, e: Expr) -> Expr:
    """The integer of element e of a turn whose dwords begin at `start`, as i32."""
    out: Expr | None = None
    for plane, other in ((p.low, p.high), (p.high, p.low)):
        if plane is None:
            continue
        each = 32 // plane.bits  # elements per dword
        dword = k.div(e, each)
        if other is not None:  # skip the dwords of the other plane before it: high bits come first
            before = 32 // other.bits
            dword = k.add(dword, k.add(k.div(e, before), 1) if plane is p.low else k.div(k.mul(dword, each), before))
        place = k.add(k.add(k.mul(dword, 4 * PANEL), k.mul(lane, 4)), k.rem(e, 4))
        q = b.bits(k.add(start, place), k.mul(k.div(k.rem(e, each), 4), plane.bits), (1 << plane.bits) - 1)
        out = q if plane is p.low else k.or_(out, k.shl(q, p.low.bits))
    return out


def _sample(format: str, entries: int, blocks: int, ids: tuple[int, ...], cut: int = 0) -> Sample:
    form = FORMATS[format]
    shape, attrs = (entries, blocks * form.nbytes), {"format": format, "columns": blocks * form.block - cut}
    return Sample((shape, ids), attrs, low=0, high=entries, dtypes=("u8", "i32"), settle=random_weights(form, 0))


quant_rows = op(
    "quant_rows", kind=Kind.INDEX, infer=_shape, attrs=DequantizeAttrs, arity=(2, 2), dtypes="u", roles="xi",
    reference=_array, element=_element, rows=lambda attrs, operand, axis, w, ids: axis if operand == 1 else None,
    samples=(
        _sample("q8_0", 33, 2, (5,)), _sample("q4_0", 70, 2, (2, 3), 5), _sample("q4_k", 32, 1, (4,)),
        _sample("q5_k", 3, 2, (3,), 100), _sample("q6_k", 40, 1, (6,)),
    ),
    doc="Looks up and decodes rows of a quantised table, one per id: dequantize(gather(w, ids)), u8 [entries, row bytes] -> f32 "
    "[ids..., columns]. The table may be w or pack_quant(w).",
)  # fmt: skip
