"""Quantised weights: decoding and the matrix product.

A weight is rows of packed blocks (rlx.ir.blocks.FORMATS).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError, known
from rlx.ir.blocks import FORMATS, Format
from rlx.ir.contexts import Applied, Coords, Lowering, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import DType, as_dtype, f32, u8
from rlx.ir.kernel import Expr
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Contraction, Kind, Sample
from rlx.ir.ops.contract import matmul
from rlx.ir.ops.rules import others, static_dim
from rlx.ir.ops.view import transpose
from rlx.ir.placement import Split
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


def check_rows(form: Format, columns: int, packed: Shape) -> None:
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


def _dequantize_element(ctx: Lowering, node: Applied[DequantizeAttrs], result: int, coords: Coords) -> Expr:
    *row, column = coords
    return FORMATS[node.attrs.format].element(column, lambda at: ctx.element(node.inputs[0], (*row, at)))


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


class ProductAttrs(FormatAttrs):
    """`exact`: x keeps its precision. Otherwise a backend may round it to 8 bits, in runs with a scale each. `wide`: the result
    is of the dtype of the sums, f32 for bf16 and f16."""

    exact: bool = False
    wide: bool = False

    def result(self, x: DType) -> DType:
        return x.compute if self.wide else x


def _product_shape(attrs: ProductAttrs, x: Shape, packed: Shape) -> Shape:
    if not x.rank or packed.rank != 2:
        raise ShapeError(f"x is [..., k] and the packed weights are [n, row bytes], got {x} and {packed}")
    check_rows(FORMATS[attrs.format], static_dim(x.dims[-1], "dequant_matmul"), packed)
    return Shape((*x.dims[:-1], packed.dims[0]), attrs.result(x.dtype))


def _product(attrs: ProductAttrs, x: np.ndarray, packed: np.ndarray) -> np.ndarray:
    x = x.astype(attrs.result(as_dtype(x.dtype)).numpy)
    return x @ FORMATS[attrs.format].decode_rows(packed, x.shape[-1]).astype(x.dtype).T


def _product_of(attrs: ProductAttrs, x: Value, packed: Value) -> Value:
    wide = x.dtype.compute
    weights = dequantize(packed, attrs.format, static_dim(x.dims[-1], "dequant_matmul")).astype(wide)
    return matmul(x.astype(wide), transpose(weights)).astype(attrs.result(x.dtype))


def random_weights(form: Format, operand: int = 1) -> Callable[[np.random.Generator, list[np.ndarray]], None]:
    """Random weights of realistic magnitude: random bytes, with every f16 scale between 2**-13 and 2**-12 in magnitude."""

    def settle(rng: np.random.Generator, operands: list[np.ndarray]) -> None:
        operands[operand][:] = rng.integers(0, 256, operands[operand].shape)
        blocks = operands[operand].reshape(-1, form.nbytes)
        for at in form.numbers:
            blocks[:, at + 1] = blocks[:, at + 1] & 0x83 | 0x08

    return settle


def _contraction(attrs: ProductAttrs, x: Shape, packed: Shape) -> Contraction:
    """x [..., k] times the packed weights [n, k] transposed, summed over k."""
    rows = tuple(range(x.rank - 1))
    return Contraction(a_batch=(), a_rows=rows, a_sum=(x.rank - 1,), b_batch=(), b_sum=(1,), b_columns=(0,))


dequant_matmul = op(
    "dequant_matmul", kind=Kind.COMPOSITE, infer=_product_shape, attrs=ProductAttrs, arity=(2, 2), product=_contraction,
    reference=_product, decompose=_product_of, flops=lambda operands, results, attrs: 2 * math.prod(results[0]) * operands[0][-1],
    samples=tuple(
        Sample((dims, (n, f.row_bytes(dims[-1]))), {"format": f.name}, dtypes=("", "u8"), settle=random_weights(f))
        for f in FORMATS.values() for dims, n in (((1, f.block), 17), ((2, 3, f.block + 24), 5))
    )
    + (
        Sample(((3, 64), (5, 68)), {"format": "q8_0", "wide": True}, dtypes=("", "u8"), settle=random_weights(FORMATS["q8_0"])),
    ),
    doc="Matrix product with quantised weights: x @ dequantize(packed).T, from x [..., k] and packed [n, row bytes] to [..., n] "
    "in x's dtype, or in that of the sums if wide; sums are f32 (f64 for f64 x). Unless exact, the CPU rounds x to 8 bits where "
    "it has integer dot products; for products with many rows, a CPU with AMX and a GPU round f32 x and the weights to bf16.",
)  # fmt: skip
