"""Indexing: gather, concat, pad, iota and copy."""

from __future__ import annotations

import math

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, IndexRangeError, ShapeError
from rlx.ir.contexts import Applied, Coords, Lowering, Padded, PaddingPass, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import DType, as_dtype, bool_, f32, i64, index_
from rlx.ir.kernel import Expr, const, k
from rlx.ir.node import Node, Value
from rlx.ir.op import Attrs, Kind, Number, Sample
from rlx.ir.ops.elementwise import less, less_equal, logical_and, where
from rlx.ir.ops.rules import again, along, axis_of, halves, held, integer, joined, others, permuted, same_dtype, static_dim
from rlx.ir.placement import REPLICATED, Partial, Split
from rlx.ir.shape import DimLike, Shape

INDEX_OUT_OF_RANGE = 1  # kernel.STATUS


class AxisAttrs(Attrs):
    axis: int = 0


def check_range(indices: np.ndarray, size: int, what: str) -> None:
    """Raise IndexRangeError naming the first index outside 0 … size-1."""
    outside = (indices < 0) | (indices >= size)
    if outside.any():
        at = tuple(int(c[0]) for c in np.nonzero(outside)) if indices.ndim else ()
        raise IndexRangeError(f"{what}: index {indices[at]} at {list(at)} is outside 0 … {size - 1}")


# -- gather, embedding --------------------------------------------------------------------------------


def _gather_shape(attrs: AxisAttrs, x: Shape, indices: Shape) -> Shape:
    integer("the indices", indices)
    axis = axis_of(attrs.axis, x.rank)
    return x.with_dims((*x.dims[:axis], *indices.dims, *x.dims[axis + 1 :]))


def _gather_array(attrs: AxisAttrs, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    check_range(indices, x.shape[attrs.axis], "gather")
    return np.take(x, indices.astype(np.int64), axis=attrs.axis)


def in_range(index: Expr, size: int) -> Expr:
    return k.and_(k.le(k.const(0), index), k.lt(index, k.const(size)))


def picked(ctx: Lowering, indices: Value, coords: Coords, size: int) -> Expr:
    """The index at `coords`, clamped to 0 … size-1; an index out of range fails the run."""
    index = k.cast(ctx.element(indices, tuple(coords)), index_)
    ctx.check(in_range(index, size), INDEX_OUT_OF_RANGE)
    return k.min(k.max(index, k.const(0)), k.const(max(size - 1, 0)))


def _gather_element(ctx: Lowering, node: Applied[AxisAttrs], result: int, coords: Coords) -> Expr:
    x, indices = node.inputs
    axis, count = axis_of(node.attrs.axis, x.rank), indices.rank
    size = ctx.dims(x)[axis]
    inside = picked(ctx, indices, coords[axis : axis + count], size)
    guard = None if size else const(False, bool_)
    return ctx.element(x, (*coords[:axis], inside, *coords[axis + count :]), guard)


def _gather_rows(attrs: AxisAttrs, operand: int, axis: int, x: Shape, indices: Shape) -> int | None:
    at = axis_of(attrs.axis, x.rank)
    if operand == 1:
        return at + axis
    return None if axis == at else axis + (indices.rank - 1) * (axis > at)


def _gather_partitioned(p: Partitioning, attrs: AxisAttrs, x: Value, indices: Value) -> Parted:
    """Each rank looks up the indices in its own part and gives zeros for the rest; the sum over ranks is the result."""
    split, axis = p.split_of(x), axis_of(attrs.axis, x.rank)
    if split is None or split.axis != axis:
        return None
    if len(split.parts) > 1 or x.dtype.kind not in "fiu":
        return f"its parts along axis {axis} cannot be summed"
    size, ids = x.shape.static[axis], p.at(indices, REPLICATED).astype(i64)
    ids = gather(iota(dims=(size,)), ids)  # keeps the range check
    own = ids - p.first(size)
    here = logical_and(less_equal(0, own), less(own, size // p.ranks))
    rows = gather(p.at(x, split), where(here, own, 0), axis=axis)
    mask = here.reshape((*indices.dims, *(1 for _ in x.dims[axis + 1 :])))
    return [(where(mask, rows, 0), Partial("sum"))]


def _gather_padded(p: PaddingPass, attrs: AxisAttrs, x: Value, indices: Value) -> Padded:
    """An index of a row that holds no data is out of range, as it is where the axis has just the rows that do."""
    axis = axis_of(attrs.axis, x.rank)
    first, *others = p.along(x, axis) or (None,)
    if first is None:
        return None
    if others or first.outer > 1:
        return "rows that hold data must come before all others along the axis of the indices"
    for own in range(indices.rank):
        indices = p.masked(indices, own, guard=True)
    indices = indices.astype(i64)
    return p.final(gather(x, where(less(indices, p.extent * first.inner), indices, -1), axis=axis))


GATHERS = (
    Sample(((5, 17), (4,)), low=0, high=5, dtypes=("", "i64")),
    Sample(((3, 5, 2), (2, 3)), {"axis": 1}, low=0, high=5, dtypes=("", "i32")),
    Sample(((33, 7), ()), {"axis": -1}, low=0, high=7, dtypes=("", "i64")),
    Sample(((5, 3), (0,)), low=0, high=5, dtypes=("", "i64")),
)
gather = op(
    "gather", kind=Kind.INDEX, infer=_gather_shape, attrs=AxisAttrs, arity=(2, 2), dtypes="fiubc", roles="xi", parts=along,
    reference=_gather_array, element=_gather_element, samples=GATHERS, rows=_gather_rows, partitioned=_gather_partitioned,
    padded=_gather_padded, permuted=lambda a, axes, x, indices: permuted(a, axes, x) if indices.rank == 1 else None,
    doc="Takes slices of x along `axis`, one per index; the result has dims x[:axis] + indices + x[axis+1:]. An index below 0 or "
    "not below the dim is an IndexRangeError on every backend if a result depends on its row; else it may or may not be one.",
)  # fmt: skip


def _embedding_shape(attrs: object, table: Shape, ids: Shape) -> Shape:
    if table.rank != 2:
        raise ShapeError(f"the table is [entries, width], got {table}")
    return _gather_shape(AxisAttrs(0), table, ids)


embedding = op(
    "embedding", kind=Kind.COMPOSITE, infer=_embedding_shape, arity=(2, 2), roles="xi",
    reference=lambda attrs, table, ids: _gather_array(AxisAttrs(0), table, ids),
    decompose=lambda attrs, table, ids: gather(table, ids, axis=0),
    samples=(
        Sample(((7, 33), (2, 3)), low=0, high=7, dtypes=("", "i64")), Sample(((5, 4), (6,)), low=0, high=5, dtypes=("", "i32")),
    ),
    doc="Looks up rows of a table [entries, width], one per id.",
)  # fmt: skip


# -- concat, pad ---------------------------------------------------------------------------------------------------


def _concat_shape(attrs: AxisAttrs, *shapes: Shape) -> Shape:
    same_dtype(*shapes)
    first = shapes[0]
    axis = axis_of(attrs.axis, first.rank)
    total: DimLike = first.dims[axis]
    for s in shapes[1:]:
        if s.rank != first.rank or any(a != b for i, (a, b) in enumerate(zip(s.dims, first.dims)) if i != axis):
            raise ShapeError(f"{s} and {first} differ in more than dim {axis}")
        total = static_dim(total, "concat") + static_dim(s.dims[axis], "concat")
    return first.with_dims((*first.dims[:axis], total, *first.dims[axis + 1 :]))


def _concat_element(ctx: Lowering, node: Applied[AxisAttrs], result: int, coords: Coords) -> Expr:
    """A guarded load from each operand; the first operand that ends past the coordinate is selected."""
    axis = axis_of(node.attrs.axis, len(coords))
    position, start, picks = coords[axis], 0, []
    for value in node.inputs:
        size = ctx.dims(value)[axis]
        own = k.sub(position, k.const(start))
        guard = in_range(own, size)
        if size:
            picks.append((start + size, ctx.element(value, (*coords[:axis], own, *coords[axis + 1 :]), guard)))
        start += size
    if not picks:
        return const(0, node.shapes[0].dtype.compute)
    out = picks[-1][1]
    for end, element in reversed(picks[:-1]):
        out = k.select(k.lt(position, k.const(end)), element, out)
    return out


def _concat_partitioned(p: Partitioning, attrs: AxisAttrs, *operands: Value) -> Parted:
    """Along the split axis, each rank concatenates its own parts."""
    axis = axis_of(attrs.axis, operands[0].rank)
    splits = [p.split_of(v) for v in operands]
    if not any(s is not None and s.axis == axis for s in splits):
        return None
    splits = [s if s is not None and s.axis == axis else Split(axis, (v.shape.static[axis],)) for s, v in zip(splits, operands)]
    parts = tuple(part for s in splits for part in s.parts)
    if any(part % p.ranks for part in parts):
        return f"{p.ranks} ranks cannot share its parts {parts} along axis {axis} equally"
    return [(concat(*map(p.at, operands, splits), axis=axis), Split(axis, parts))]


concat = op(
    "concat", kind=Kind.INDEX, infer=_concat_shape, attrs=AxisAttrs, arity=(1, None), dtypes="fiubc", parts=along,
    reference=lambda attrs, *arrays: np.concatenate(arrays, axis=attrs.axis), element=_concat_element, rows=others,
    partitioned=_concat_partitioned, permuted=permuted,
    samples=(
        Sample(((3, 17), (2, 17))), Sample(((2, 3), (2, 1), (2, 33)), {"axis": -1}), Sample(((4,),)),
        Sample(((2, 3, 4), (2, 0, 4), (2, 2, 4)), {"axis": 1}),
    ),
    doc="Concatenates the operands along `axis`.",
)  # fmt: skip


class PadAttrs(Attrs):
    """Number of elements added before and after each dim, and their value."""

    low: tuple[int, ...]
    high: tuple[int, ...]
    value: Number = 0.0


def _pad_shape(attrs: PadAttrs, x: Shape) -> Shape:
    if not len(attrs.low) == len(attrs.high) == x.rank:
        raise AttributeValueError(f"low and high must have one entry for each of the {x.rank} dims")
    if min((*attrs.low, *attrs.high), default=0) < 0:
        raise AttributeValueError("low and high cannot be negative; use slice to cut")
    held(attrs.value, x.dtype, "value")
    grown = lambda d, extra: static_dim(d, "pad") + extra if extra else d  # noqa: E731
    return x.with_dims(grown(d, a + b) for d, a, b in zip(x.dims, attrs.low, attrs.high))


def _pad_value(attrs: PadAttrs, x: np.ndarray) -> np.ndarray:
    return np.asarray(held(attrs.value, as_dtype(x.dtype), "value")).astype(x.dtype)


def _pad_element(ctx: Lowering, node: Applied[PadAttrs], result: int, coords: Coords) -> Expr:
    attrs, guard, at = node.attrs, None, []
    for c, size, low, high in zip(coords, ctx.dims(node.inputs[0]), attrs.low, attrs.high):
        own = k.sub(c, k.const(low))
        at.append(own)
        tests = ([k.le(k.const(0), own)] if low else []) + ([k.lt(own, k.const(size))] if high else [])
        for test in tests:
            guard = test if guard is None else k.and_(guard, test)
    element = ctx.element(node.inputs[0], tuple(at), guard)
    value = held(attrs.value, node.inputs[0].dtype, "value")
    is_zero = value == 0 and math.copysign(1, value) > 0
    return element if guard is None or is_zero else k.select(guard, element, const(value, element.dtype))


def _pad_parts(node: Applied[PadAttrs], x: Value) -> Value:
    """Real parts are padded with the value, imaginary parts with zeros."""
    a = node.attrs
    if a.value == 0 and math.copysign(1, a.value) > 0:
        return again(node, x, low=(*a.low, 0), high=(*a.high, 0))
    re, im = halves(x)
    return joined(again(node, re), again(node, im, value=0.0))


pad = op(
    "pad", kind=Kind.INDEX, infer=_pad_shape, attrs=PadAttrs, dtypes="fiubc", element=_pad_element, parts=_pad_parts,
    rows=lambda a, i, axis, x: None if a.low[axis] or a.high[axis] else axis,
    permuted=lambda a, axes, x: {"low": tuple(a.low[i] for i in axes), "high": tuple(a.high[i] for i in axes)},
    reference=lambda a, x: np.pad(x, tuple(zip(a.low, a.high)), constant_values=_pad_value(a, x)) if x.ndim else x.copy(),
    samples=(
        Sample(((3, 17),), {"low": (1, 0), "high": (0, 2)}), Sample(((5,),), {"low": (2,), "high": (3,), "value": 7.0}),
        Sample(((2, 3),), {"low": (0, 0), "high": (0, 0)}), Sample(((0, 2),), {"low": (1, 0), "high": (1, 1), "value": 1.0}),
    ),
    doc="Pads every dim with `value`: `low` elements before and `high` elements after.",
)  # fmt: skip


# -- iota ----------------------------------------------------------------------------------------------------------


class IotaAttrs(Attrs):
    dims: tuple[DimLike, ...]
    axis: int = 0
    dtype: DType = i64


def _iota_shape(attrs: IotaAttrs) -> Shape:
    axis_of(attrs.axis, len(attrs.dims))
    if attrs.dtype.kind not in "fiu":
        raise DTypeError(f"positions are numbers, not {attrs.dtype}")
    return Shape(attrs.dims, attrs.dtype)


def _iota_array(attrs: IotaAttrs) -> np.ndarray:
    shape = _iota_shape(attrs).static
    along = [1] * len(shape)
    along[attrs.axis] = shape[attrs.axis]
    return np.broadcast_to(np.arange(shape[attrs.axis]).reshape(along), shape)


iota = op(
    "iota", kind=Kind.INDEX, infer=_iota_shape, attrs=IotaAttrs, arity=(0, 0), reference=_iota_array,
    element=lambda ctx, node, result, coords: k.cast(coords[axis_of(node.attrs.axis, len(coords))], node.attrs.dtype.compute),
    rows=lambda attrs, operand, axis: axis,
    samples=(
        Sample((), {"dims": (17,)}), Sample((), {"dims": (3, 33), "axis": -1, "dtype": f32}),
        Sample((), {"dims": (4, 2), "dtype": as_dtype("i32")}), Sample((), {"dims": (0, 2), "axis": 1}),
    ),
    doc="A tensor of shape `dims` whose elements are their index along `axis`.",
)  # fmt: skip


# -- copy ----------------------------------------------------------------------------------------------------------


def _copy_element(ctx: Lowering, node: Node, result: int, coords: Coords) -> Expr:
    x = node.inputs[0]
    return ctx.element(x, tuple(const(0) if d == 1 else c for d, c in zip(ctx.dims(x), coords)))


copy = op(
    "copy", kind=Kind.INDEX, infer=lambda attrs, x: x, dtypes="fiubc", reference=lambda attrs, x: np.array(x),
    element=_copy_element, own_memory=True, parts=again, rows=lambda attrs, operand, axis, x: axis,
    samples=(Sample(((3, 17),)), Sample(((2, 1, 5),)), Sample(((),)), Sample(((0, 2),))),
    doc="A row-major copy of x, made at every run: never a view of x, and its memory is not shared.",
)  # fmt: skip
