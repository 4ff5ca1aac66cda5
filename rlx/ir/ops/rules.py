"""Type rules and helpers shared by the op families: dtype agreement, axes, monomial division, f32 decompositions."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.contexts import Applied
from rlx.ir.dtype import DType, bool_
from rlx.ir.kernel import Expr, Grid, Var
from rlx.ir.node import Value, apply, constant
from rlx.ir.op import OPS, Attrs, attribute_types
from rlx.ir.shape import Dim, DimLike, Shape, broadcast_dims

MAX_FLOAT = sys.float_info.max


def same_dtype(*shapes: Shape) -> None:
    """Checks that all operands have one dtype; the DTypeError says what to cast."""
    for s in shapes[1:]:
        if s.dtype != (first := shapes[0].dtype):
            to = max(s.dtype, first, key=lambda d: ("buifc".index(d.kind), d.bits))  # the one that loses least
            raise DTypeError(f"operands are {first} and {s.dtype}; cast one of them: x.astype({to.name!r})")


def pointwise(attrs: object, *shapes: Shape) -> Shape:
    """The shape rule of a pointwise op: operands of one dtype, broadcast; the result has that dtype."""
    same_dtype(*shapes)
    return Shape(broadcast_dims(*(s.dims for s in shapes)), shapes[0].dtype)


def comparison(attrs: object, *shapes: Shape) -> Shape:
    """As pointwise, but the result is bool."""
    return pointwise(attrs, *shapes).with_dtype(bool_)


def same(attrs: object, x: Shape, *_: Shape) -> Shape:
    """The result has the shape and dtype of the first operand."""
    return x


def integer(label: str, s: Shape) -> None:
    if not s.dtype.is_int:
        raise DTypeError(f"{label} must be integers, got {s.dtype}; cast them: x.astype('i64')")


def axis_of(axis: int, rank: int) -> int:
    """The axis as a non-negative number."""
    if not -rank <= axis < rank:
        raise AttributeValueError(f"axis {axis} does not exist in {rank} dims")
    return axis % rank


def axes_of(axes: Sequence[int], rank: int) -> tuple[int, ...]:
    """Non-negative, sorted, distinct axes; () means all of them."""
    out = tuple(sorted(axis_of(a, rank) for a in axes)) if axes else tuple(range(rank))
    if len(set(out)) != len(out):
        raise AttributeValueError(f"axes {tuple(axes)} name one dim twice")
    return out


def others(attrs: object, operand: int, axis: int, x: Shape, *_: Shape) -> int | None:
    """OpDef.rows of an op that mixes elements along one axis only: the attribute `axis`, or the last."""
    return None if axis == axis_of(getattr(attrs, "axis", -1), x.rank) else axis


def permuted(attrs: Any, axes: Sequence[int], *shapes: Shape) -> dict[str, Any]:
    """OpDef.permuted of an op with the attribute `axis`."""
    return {"axis": axes.index(axis_of(attrs.axis, len(axes)))}


def lines(dims: Sequence[int], axis: int) -> tuple[Grid, Callable[[Expr | None], tuple[Expr, ...]]]:
    """For a kernel that loops along an axis: a grid over all other dims, and a function from a position on the axis to the
    coords (from None: the coords without that axis)."""
    outer, inner = [Var("o") for _ in dims[:axis]], [Var("n") for _ in dims[axis + 1 :]]
    grid = (*zip(outer, dims[:axis]), *zip(inner, dims[axis + 1 :]))
    return grid, lambda position: (*outer, *(() if position is None else (position,)), *inner)


def held(number: int | float, dtype: DType, label: str) -> int | float:
    """`number` as an element of `dtype`: rounded for floats; for integers exact, else a DTypeError."""
    if not dtype.is_int:
        return float(number) if abs(number) <= MAX_FLOAT or not isinstance(number, int) else math.copysign(math.inf, number)
    limits = np.iinfo(dtype.numpy)
    if number != number or abs(number) == math.inf or int(number) != number or not limits.min <= number <= limits.max:
        raise DTypeError(f"the {label} {number} does not fit {dtype} ({limits.min} … {limits.max})")
    return int(number)


def static_dim(d: DimLike, label: str) -> int:
    if not isinstance(d, int):
        raise ShapeError(f"{label} needs a known size, the dim is {d}; bind it first")
    return d


def divide(total: DimLike, by: DimLike) -> DimLike | None:
    """total / by if that is an integer or a monomial, else None."""
    a = total if isinstance(total, Dim) else Dim((), total)
    b = by if isinstance(by, Dim) else Dim((), by)
    names = list(a.names)
    for n in b.names:
        if n not in names:
            return None
        names.remove(n)
    if b.factor == 0 or a.factor % b.factor:
        return None
    return Dim(names, a.factor // b.factor) if names else a.factor // b.factor


def widened(decompose: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition computed in f32 for 16-bit and 8-bit floats and rounded once at the end, as the reference is."""

    def run(attrs: object, *values: Value) -> Value | tuple[Value, ...]:
        dtype = values[0].dtype
        if dtype.compute == dtype:
            return decompose(attrs, *values)
        out = decompose(attrs, *(v.astype(v.dtype.compute) if v.dtype.is_float else v for v in values))
        return tuple(v.astype(dtype) for v in out) if isinstance(out, tuple) else out.astype(dtype)

    return run


# -- complex numbers as pairs: OpDef.parts -----------------------------------------------------------------------------


def again(node: Applied[Attrs | None], *operands: Value, **changed: Any) -> Any:
    """The node's op on other operands, with these attributes changed."""
    own = {name: getattr(node.attrs, name) for name in attribute_types(type(node.attrs))} if node.attrs else {}
    return apply(node.op, operands, own | changed)


def along(node: Applied[Any], x: Value, *others: Value) -> Value:
    """OpDef.parts of an op that mixes elements along the attribute `axis` only: the same op on the pairs."""
    return again(node, x, *others, axis=axis_of(node.attrs.axis, x.rank - 1))


def halves(x: Value) -> tuple[Value, Value]:
    """The real and imaginary parts of pairs."""
    return x[..., 0], x[..., 1]


def joined(re: Value, im: Value | float) -> Any:
    """Pairs from real and imaginary parts; the imaginary part may be a number."""
    other: Any = apply(OPS["broadcast_to"], (constant(im),), {"dims": re.dims}) if isinstance(im, float) else im
    return apply(OPS["concat"], (re[..., None], other[..., None]), {"axis": -1})
