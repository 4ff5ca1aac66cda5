"""Contractions: matmul and its relatives."""

from __future__ import annotations

import math

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.declare import op
from rlx.ir.dtype import DType, holds, i8, i32, product, u8
from rlx.ir.node import Node, Value
from rlx.ir.op import Attrs, Contraction, Kind, Sample
from rlx.ir.ops.rules import halves, joined
from rlx.ir.shape import Shape, broadcast_dims


def _contraction(attrs: object, a: Shape, b: Shape) -> Contraction:
    """numpy's matmul: a 1-D operand has no rows (columns); without batch dims in b, all leading dims of a are rows."""
    a_sum, b_sum = a.rank - 1, max(b.rank - 2, 0)
    columns = (b.rank - 1,) if b.rank > 1 else ()
    batch = max(a.rank - 2, b.rank - 2) if b.rank > 2 else 0
    a_rows = tuple(range(a.rank - 1)) if not batch else (a.rank - 2,) if a.rank > 1 else ()

    def batch_axes(rank: int) -> tuple[int, ...]:
        own = max(rank - 2, 0)
        return tuple(i - (batch - own) if i >= batch - own else -1 for i in range(batch))

    return Contraction(
        a_batch=batch_axes(a.rank), a_rows=a_rows, a_sum=(a_sum,), b_batch=batch_axes(b.rank), b_sum=(b_sum,), b_columns=columns
    )


def _product(a: DType, b: DType) -> DType:
    """The dtype of a product of two, or a DTypeError."""
    if (dtype := product(a, b)) is None:
        raise DTypeError(f"operands are {a} and {b}, which are not multiplied; cast one: x.astype({b.name!r})")
    return dtype


def _matmul_shape(attrs: object, a: Shape, b: Shape) -> Shape:
    dtype = _product(a.dtype, b.dtype)
    if not a.rank or not b.rank:
        raise ShapeError("an operand without dims has nothing to sum over; use mul")
    c = _contraction(attrs, a, b)
    inner = (a.dims[c.a_sum[0]], b.dims[c.b_sum[0]])
    if inner[0] != inner[1]:
        raise ShapeError(f"the last dim of {a} is {inner[0]}, dim {c.b_sum[0]} of {b} is {inner[1]}")
    batch = broadcast_dims(tuple(a.dims[i] for i in c.a_batch if i >= 0), tuple(b.dims[i] for i in c.b_batch if i >= 0))
    return Shape((*batch, *(a.dims[i] for i in c.a_rows), *(b.dims[i] for i in c.b_columns)), dtype)


def _matmul_parts(node: Node, a: Value, b: Value) -> Value:
    (ar, ai), (br, bi) = halves(a), halves(b)
    return joined(matmul(ar, br) - matmul(ai, bi), matmul(ar, bi) + matmul(ai, br))


matmul = op(
    "matmul", kind=Kind.CONTRACT, infer=_matmul_shape, arity=(2, 2), dtypes="fiuc", parts=_matmul_parts,
    reference=lambda attrs, a, b: np.matmul(a, b), contract=_contraction,
    samples=(
        Sample(((3, 17), (17, 5))), Sample(((2, 3, 4), (4, 33))), Sample(((2, 3, 5, 4), (2, 3, 4, 7))),
        Sample(((2, 1, 5, 4), (3, 4, 2))), Sample(((5, 4), (3, 4, 2))), Sample(((17,), (17, 3))), Sample(((3, 17), (17,))),
        Sample(((5,), (5,))), Sample(((4,), (2, 4, 3))), Sample(((2, 3, 4), (4,))), Sample(((1, 33), (33, 49))),
        Sample(((0, 3), (3, 2))), Sample(((2, 0), (0, 3))),
        Sample(((3, 17), (17, 5)), dtypes=("f32", "bf16")), Sample(((2, 3, 33), (33, 49)), dtypes=("f32", "f8e4m3")),
        Sample(((1, 33), (33, 49)), dtypes=("f32", "f16")), Sample(((5, 4), (3, 4, 2)), dtypes=("bf16", "f8e5m2")),
        Sample(((3, 17), (17, 5)), dtypes=("f16", "bf16")), Sample(((9, 6), (6,)), dtypes=("f64", "f32")),
        Sample(((2, 5), (5, 3)), dtypes=("f8e4m3", "f8e5m2")), Sample(((4, 7), (7, 20)), dtypes=("bf16", "f32")),
    ),
    doc="Matrix product as numpy's matmul: [..., m, k] @ [..., k, n], batch dims broadcast. 16-bit floats accumulate in f32; "
    "integers wrap. Mixed float dtypes give the dtype that holds both (f32 if neither does), 8-bit floats f32; a narrow weight "
    "is read in its own dtype.",
)  # fmt: skip


def _int8_shape(attrs: object, a: Shape, b: Shape) -> Shape:
    if (a.dtype, b.dtype) != (u8, i8):
        raise DTypeError(f"the operands are u8 and i8, got {a} and {b}")
    return Shape(_matmul_shape(attrs, a, Shape(b.dims, u8)).dims, i32)


int8_matmul = op(
    "int8_matmul", kind=Kind.CONTRACT, infer=_int8_shape, arity=(2, 2), dtypes="u", contract=_contraction,
    reference=lambda attrs, a, b: np.matmul(a.astype(np.int32), b.astype(np.int32)),
    samples=tuple(
        Sample(dims, dtypes=("u8", "i8"), low=0, high=127)
        for dims in (((3, 17), (17, 5)), ((2, 3, 8), (8, 33)), ((17,), (17, 3)), ((2, 5, 4), (2, 4, 7)), ((2, 0), (0, 3)))
    ),
    doc="Matrix product of u8 by i8 in i32. Sums wrap; they are exact up to a depth of 65,000.",
)  # fmt: skip


class FlattenAttrs(Attrs):
    """The number of last dims of a that are summed, and of leading dims that both operands have."""

    axes: int
    batch: int = 0

    def __post_init__(self) -> None:
        if self.axes < 1 or self.batch < 0:
            raise AttributeValueError(f"axes is at least 1 and batch at least 0, got {self.axes} and {self.batch}")


def _flattened(attrs: FlattenAttrs, a: Shape, b: Shape) -> Contraction:
    batch, rows = tuple(range(attrs.batch)), a.rank - attrs.axes
    return Contraction(
        a_batch=batch, a_rows=tuple(range(attrs.batch, rows)), a_sum=tuple(range(rows, a.rank)),
        b_batch=batch, b_sum=(attrs.batch,), b_columns=(attrs.batch + 1,),
    )  # fmt: skip


def products(a: DType, b: DType) -> DType:
    """The dtype of a product of these: that of matmul, and i32 for u8 with i8."""
    return i32 if (a, b) == (u8, i8) else _product(a, b)


def _flatten_shape(attrs: FlattenAttrs, a: Shape, b: Shape) -> Shape:
    dtype, rows = products(a.dtype, b.dtype), a.rank - attrs.axes
    if rows < attrs.batch or b.rank != attrs.batch + 2:
        raise ShapeError(f"the operands are [batch, rows, k] and [batch, k, columns] with {attrs.batch} batch dims, got {a}, {b}")
    if a.dims[: attrs.batch] != b.dims[: attrs.batch]:
        raise ShapeError(f"the first {attrs.batch} dims of {a} and {b} differ")
    if (depth := math.prod(a.dims[rows:])) != b.dims[attrs.batch]:  # type: ignore[arg-type]
        raise ShapeError(f"the last {attrs.axes} dims of {a} have {depth} elements together, dim {attrs.batch} of {b} has not")
    return Shape((*a.dims[:rows], b.dims[-1]), dtype)


def _flatten_array(attrs: FlattenAttrs, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    rows, (*batch, depth, columns) = a.ndim - attrs.axes, b.shape
    if (a.dtype, b.dtype) == (np.uint8, np.int8):
        a, b = a.astype(np.int32), b.astype(np.int32)
    out = np.matmul(a.reshape(*batch, math.prod(a.shape[attrs.batch : rows]), depth), b)
    return out.reshape(*a.shape[:rows], columns)


flatten_matmul = op(
    "flatten_matmul", kind=Kind.CONTRACT, infer=_flatten_shape, attrs=FlattenAttrs, arity=(2, 2), dtypes="fiu",
    reference=_flatten_array, contract=_flattened,
    samples=(
        Sample(((3, 17, 2), (34, 5)), {"axes": 2}), Sample(((2, 5, 3, 1, 7), (21, 33)), {"axes": 3}),
        Sample(((4, 2, 3, 5, 2), (4, 10, 3)), {"axes": 2, "batch": 1}), Sample(((6, 5), (5, 1)), {"axes": 1}),
        Sample(((2, 3, 9, 4), (2, 3, 36, 4)), {"axes": 2, "batch": 2}),
        Sample(((0, 2, 3), (6, 4)), {"axes": 2}), Sample(((2, 0, 3), (0, 2)), {"axes": 2}),
        Sample(((3, 4, 17), (68, 5)), {"axes": 2}, dtypes=("f32", "bf16")),
        Sample(((3, 4, 17), (68, 5)), {"axes": 2}, dtypes=("u8", "i8"), low=0, high=127),
    ),
    doc="Matrix product of a, with its last `axes` dims as one, and b: [batch, rows, k] by [batch, k, columns], with `batch` "
    "leading dims in both and any number of dims of rows. The flattened dims need no common stride: windows are read where they "
    "lie. The dtypes are those of matmul; u8 with i8 gives i32.",
)  # fmt: skip


def _linear_shape(attrs: object, x: Shape, w: Shape, b: Shape | None = None) -> Shape:
    if w.rank != 2:
        raise ShapeError(f"the weights are [in, out], got {w}")
    out = _matmul_shape(attrs, x, w)
    if b is not None:
        if not holds(out.dtype, b.dtype):
            raise DTypeError(f"x @ w is {out.dtype}, which does not hold a bias of {b.dtype}; cast one of them")
        if b.dims != w.dims[1:]:
            raise ShapeError(f"the bias must be [{w.dims[1]}], got {b}")
    return out


def _linear(attrs: object, x: Value, w: Value, b: Value | None = None) -> Value:
    out = matmul(x, w)
    return out if b is None else out + (b if b.dtype == out.dtype else b.astype(out.dtype))


linear = op(
    "linear", kind=Kind.COMPOSITE, infer=_linear_shape, arity=(2, 3),
    reference=lambda attrs, x, w, b=None: np.matmul(x, w) if b is None else np.matmul(x, w) + b,
    decompose=_linear,
    samples=(Sample(((3, 17), (17, 5), (5,))), Sample(((2, 3, 33), (33, 4))), Sample(((17,), (17, 3), (3,)))),
    doc="x @ w + b, with w [in, out] and an optional bias b [out].",
)  # fmt: skip
