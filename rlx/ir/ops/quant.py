"""Quantised weights: decoding and the matrix product.

A weight is rows of packed blocks (rlx.ir.quant.FORMATS).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError, known
from rlx.ir.contexts import Applied, Coords, Lowering, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import f16, f32, i8, i32, u8, u16
from rlx.ir.kernel import Expr, k
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Contraction, Kind, Sample
from rlx.ir.ops.contract import matmul
from rlx.ir.ops.rules import others, static_dim
from rlx.ir.ops.view import transpose
from rlx.ir.placement import Split
from rlx.ir.quant import FORMATS, QuantFormat
from rlx.ir.shape import Shape


class FormatAttrs(Attrs):
    """`format`: a name in FORMATS."""

    format: str

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise AttributeValueError(f"no quantised format is called {self.format!r}; known: {known(FORMATS)}")


class DequantizeAttrs(FormatAttrs):
    """`columns`: elements per row; the last block may be longer."""

    columns: int


def check_rows(form: QuantFormat, columns: int, packed: Shape) -> None:
    if packed.dtype != u8 or not packed.rank:
        raise DTypeError(f"packed rows are u8 [..., row bytes], got {packed}")
    want, found = form.row_bytes(columns), static_dim(packed.dims[-1], form.name)
    if found != want:
        raise ShapeError(f"{columns} columns in {form.name} take {want} bytes a row, {packed} has {found}")


def _dequantize_shape(attrs: DequantizeAttrs, packed: Shape) -> Shape:
    if attrs.columns < 0:
        raise AttributeValueError(f"columns cannot be negative, got {attrs.columns}")
    check_rows(FORMATS[attrs.format], attrs.columns, packed)
    return Shape((*packed.dims[:-1], attrs.columns), f32)


# -- one element of a block, as an expression ----------------------------------------------------------------------


class Block:
    """The bytes of the block that contains an element."""

    def __init__(self, byte: Callable[[Expr | int], Expr]) -> None:
        self.byte = byte  # offset in the block (i64 expression) -> u8 expression

    def bits(self, at: Expr | int, shift: Expr | int = 0, mask: int = 255) -> Expr:
        """(byte >> shift) & mask, as i32."""
        raw = k.cast(self.byte(at), i32)
        shift = shift if isinstance(shift, int) else k.cast(shift, i32)
        return k.and_(raw if isinstance(shift, int) and not shift else k.shr(raw, shift), mask)

    def signed(self, at: Expr | int) -> Expr:
        return k.cast(k.cast(self.byte(at), i8), f32)

    def half(self, at: Expr | int) -> Expr:
        """The f16 at an offset, as f32."""
        low, high = (k.cast(self.byte(k.add(at, i)), u16) for i in (0, 1))
        return k.cast(k.bitcast(k.or_(low, k.shl(high, 8)), dtype=f16), f32)


def _q8_0(b: Block, e: Expr) -> Expr:
    return k.mul(b.half(0), b.signed(k.add(e, 2)))


def _q4_0(b: Block, e: Expr) -> Expr:
    q = b.bits(k.add(k.rem(e, 16), 2), k.mul(k.div(e, 16), 4), 15)
    return k.mul(b.half(0), k.cast(k.sub(q, 8), f32))


def _k_value(b: Block, e: Expr, q: Expr) -> Expr:
    """scale * q - minimum of the element's group of 32; rlx.ir.quant describes the layout of the 6-bit pairs."""
    group = k.div(e, 32)
    early, at = k.lt(group, 4), k.rem(group, 4)
    first, second, rest = (k.add(at, offset) for offset in (4, 8, 12))
    high = lambda byte: k.shl(b.bits(byte, 6), 4)  # noqa: E731
    scale = k.select(early, b.bits(first, 0, 63), k.or_(b.bits(rest, 0, 15), high(first)))
    least = k.select(early, b.bits(second, 0, 63), k.or_(b.bits(rest, 4), high(second)))
    scaled = k.mul(k.mul(b.half(0), k.cast(scale, f32)), k.cast(q, f32))
    return k.sub(scaled, k.mul(b.half(2), k.cast(least, f32)))


def _k_low(b: Block, e: Expr, start: int) -> Expr:
    """Four bits: groups 2i and 2i+1 are the low and high halves of 32 bytes."""
    at = k.add(k.mul(k.div(e, 64), 32), k.rem(e, 32))
    return b.bits(k.add(at, start), k.mul(k.rem(k.div(e, 32), 2), 4), 15)


def _q4_k(b: Block, e: Expr) -> Expr:
    return _k_value(b, e, _k_low(b, e, 16))


def _q5_k(b: Block, e: Expr) -> Expr:
    fifth = b.bits(k.add(k.rem(e, 32), 16), k.div(e, 32), 1)
    return _k_value(b, e, k.or_(_k_low(b, e, 48), k.shl(fifth, 4)))


def _q6_k(b: Block, e: Expr) -> Expr:
    half, group, lane = k.div(e, 128), k.rem(k.div(e, 32), 4), k.rem(e, 32)
    low = k.add(k.add(k.mul(half, 64), k.mul(k.rem(group, 2), 32)), lane)
    high = k.add(k.add(k.mul(half, 32), lane), 128)
    q = k.or_(b.bits(low, k.mul(k.div(group, 2), 4), 15), k.shl(b.bits(high, k.mul(group, 2), 3), 4))
    scale = k.mul(b.half(208), b.signed(k.add(k.div(e, 16), 192)))
    return k.mul(scale, k.cast(k.sub(q, 32), f32))


_ELEMENTS: dict[str, Callable[[Block, Expr], Expr]] = {
    "q8_0": _q8_0, "int8": _q8_0, "q4_0": _q4_0, "int4": _q4_0, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k,
}  # fmt: skip


def block_element(form: QuantFormat, column: Expr, byte: Callable[[Expr], Expr]) -> Expr:
    """Element `column` of a row of blocks; byte(offset) loads a byte of the row."""
    start = k.mul(k.div(column, form.block), form.nbytes)
    return _ELEMENTS[form.name](Block(lambda at: byte(k.add(start, at))), k.rem(column, form.block))


def _dequantize_element(ctx: Lowering, node: Applied[DequantizeAttrs], result: int, coords: Coords) -> Expr:
    *row, column = coords
    return block_element(FORMATS[node.attrs.format], column, lambda at: ctx.element(node.inputs[0], (*row, at)))


def _dequantize_partitioned(p: Partitioning, attrs: DequantizeAttrs, packed: Value) -> Parted:
    """A row may be split between ranks at block boundaries."""
    form, split, axis = FORMATS[attrs.format], p.split_of(packed), packed.rank - 1
    if split is None or split.axis != axis:
        return None
    if attrs.columns % form.block or any(part % (form.nbytes * p.ranks) for part in split.parts):
        return f"{p.ranks} ranks cannot share its rows of {attrs.columns} elements in whole {form.name} blocks of {form.block}"
    parts = tuple(part // form.nbytes * form.block for part in split.parts)
    return [(dequantize(p.at(packed, split), attrs.format, attrs.columns // p.ranks), Split(axis, parts))]


dequantize = op(
    "dequantize", kind=Kind.INDEX, infer=_dequantize_shape, attrs=DequantizeAttrs, dtypes="u", rows=others,
    partitioned=_dequantize_partitioned,
    reference=lambda attrs, packed: FORMATS[attrs.format].decode_rows(packed, attrs.columns), element=_dequantize_element,
    samples=tuple(
        Sample(((3, f.row_bytes(columns)),), {"format": f.name, "columns": columns}, low=0, high=256, dtypes=("u8",))
        for f in FORMATS.values() for columns in (f.block * 2, f.block + 17)
    ),
    doc="Decodes rows of quantised blocks, u8 [..., row bytes], to f32 [..., columns].",
)  # fmt: skip


# -- product with packed weights -----------------------------------------------------------------------------------


def _product_shape(attrs: FormatAttrs, x: Shape, packed: Shape) -> Shape:
    if not x.rank or packed.rank != 2:
        raise ShapeError(f"x is [..., k] and the packed weights are [n, row bytes], got {x} and {packed}")
    check_rows(FORMATS[attrs.format], static_dim(x.dims[-1], "dequant_matmul"), packed)
    return x.with_dims((*x.dims[:-1], packed.dims[0]))


def _product(attrs: FormatAttrs, x: np.ndarray, packed: np.ndarray) -> np.ndarray:
    return x @ FORMATS[attrs.format].decode_rows(packed, x.shape[-1]).astype(x.dtype).T


def _product_of(attrs: FormatAttrs, x: Value, packed: Value) -> Value:
    wide = x.dtype.compute
    weights = dequantize(packed, attrs.format, static_dim(x.dims[-1], "dequant_matmul")).astype(wide)
    return matmul(x.astype(wide), transpose(weights)).astype(x.dtype)


def random_weights(form: QuantFormat, operand: int = 1) -> Callable[[np.random.Generator, list[np.ndarray]], None]:
    """Random weights of realistic magnitude: random bytes, with every f16 scale between 2**-13 and 2**-12 in magnitude."""

    def settle(rng: np.random.Generator, operands: list[np.ndarray]) -> None:
        operands[operand][:] = rng.integers(0, 256, operands[operand].shape)
        blocks = operands[operand].reshape(-1, form.nbytes)
        for at in form.scales:
            blocks[:, at + 1] = blocks[:, at + 1] & 0x83 | 0x08

    return settle


def _contraction(attrs: FormatAttrs, x: Shape, packed: Shape) -> Contraction:
    """x [..., k] times the packed weights [n, k] transposed, summed over k."""
    rows = tuple(range(x.rank - 1))
    return Contraction(a_batch=(), a_rows=rows, a_sum=(x.rank - 1,), b_batch=(), b_sum=(1,), b_columns=(0,))


dequant_matmul = op(
    "dequant_matmul", kind=Kind.COMPOSITE, infer=_product_shape, attrs=FormatAttrs, arity=(2, 2), product=_contraction,
    reference=_product, decompose=_product_of, flops=lambda operands, results: 2 * math.prod(results[0]) * operands[0][-1],
    samples=tuple(
        Sample((dims, (n, f.row_bytes(dims[-1]))), {"format": f.name}, dtypes=("", "u8"), settle=random_weights(f))
        for f in FORMATS.values() for dims, n in (((1, f.block), 17), ((2, 3, f.block + 24), 5))
    ),
    doc="Matrix product with quantised weights: x @ dequantize(packed).T, from x [..., k] and packed [n, row bytes] to [..., n] "
    "in x's dtype; sums are f32 (f64 for f64 x).",
)  # fmt: skip
