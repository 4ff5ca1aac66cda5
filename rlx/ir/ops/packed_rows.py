"""Row look-up in quantised tables, plain or packed.

A look-up can read the panels that a matrix product uses, so a table with both uses (tied embeddings) is stored once
(rlx/compiler/packing.py).
"""

from __future__ import annotations

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.blocks import FORMATS
from rlx.ir.contexts import Applied, Coords, Lowering
from rlx.ir.declare import op
from rlx.ir.dtype import f32
from rlx.ir.kernel import Expr, k
from rlx.ir.op import Kind, Sample
from rlx.ir.ops.index import check_range, picked
from rlx.ir.ops.quant import DequantizeAttrs, check_rows, random_weights
from rlx.ir.ops.quant_pack import panel
from rlx.ir.ops.rules import integer
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
    (w, ids), (*row_at, column) = node.inputs, coords
    row = picked(ctx, ids, row_at, ctx.dims(w)[0])
    if not ctx.dims(w)[0]:  # no row could be read, and the run fails
        return k.const(0.0, f32)
    if not ctx.in_tiles(w):
        return FORMATS[node.attrs.format].element(column, lambda at: ctx.element(w, (row, at)))
    p = panel(w.node.attrs)  # type: ignore[arg-type]
    return p.packed.element(column, lambda at: ctx.stored(w, (k.div(row, p.rows), at)), k.rem(row, p.rows))


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
