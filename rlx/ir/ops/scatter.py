"""Elements of one tensor written, or combined, into places of another that indices choose."""

from __future__ import annotations

import math
from functools import reduce
from typing import Literal, get_args

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.contexts import Applied, Coords, Lowering, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import bool_, index_
from rlx.ir.kernel import Check, Expr, Load, Loop, Loops, Store, Var, const, k
from rlx.ir.node import Value
from rlx.ir.op import Kind, Sample
from rlx.ir.ops.index import INDEX_OUT_OF_RANGE, AxisAttrs, check_range, in_range, picked
from rlx.ir.ops.rules import along, axis_of, integer, lines, same_dtype
from rlx.ir.ops.view import broadcast_to, reshape
from rlx.ir.shape import DimLike, Shape

# -- gather_elements -----------------------------------------------------------------------------------------------


def _element_dims(axis: int, x: Shape, indices: Shape) -> None:
    integer("the indices", indices)
    fits = [a == b or (isinstance(a, int) and isinstance(b, int) and b < a) for a, b in zip(x.dims, indices.dims)]
    if x.rank != indices.rank or not all(ok for i, ok in enumerate(fits) if i != axis):
        raise ShapeError(f"the indices have at most the dims of x in all but dim {axis}, got {indices} for {x}")


def _rows(attrs: AxisAttrs, operand: int, axis: int, x: Shape, *others: Shape) -> int | None:
    return None if axis == axis_of(attrs.axis, x.rank) or others[0].dims[axis] != x.dims[axis] else axis


def _gather_elements_shape(attrs: AxisAttrs, x: Shape, indices: Shape) -> Shape:
    _element_dims(axis_of(attrs.axis, x.rank), x, indices)
    return x.with_dims(indices.dims)


def _gather_elements_array(attrs: AxisAttrs, x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    check_range(indices, x.shape[attrs.axis], "gather_elements")
    axis = attrs.axis % x.ndim
    part = x[tuple(slice(None) if i == axis else slice(n) for i, n in enumerate(indices.shape))]
    return np.take_along_axis(part, indices.astype(np.int64), axis)


def _gather_elements_element(ctx: Lowering, node: Applied[AxisAttrs], result: int, coords: Coords) -> Expr:
    x, indices = node.inputs
    axis = axis_of(node.attrs.axis, x.rank)
    size = ctx.dims(x)[axis]
    inside = picked(ctx, indices, coords, size)
    return ctx.element(x, (*coords[:axis], inside, *coords[axis + 1 :]), None if size else const(False, bool_))


def _gather_elements_partitioned(p: Partitioning, attrs: AxisAttrs, x: Value, indices: Value) -> Parted:
    """Split along another axis than that of the indices, a rank needs the same rows of x: its share only if they are as many."""
    split = p.split_of(indices)
    if split is None or split.axis == axis_of(attrs.axis, x.rank) or x.dims[split.axis] == indices.dims[split.axis]:
        return None
    return f"the indices have {indices.dims[split.axis]} rows along axis {split.axis}, and x has {x.dims[split.axis]}"


gather_elements = op(
    "gather_elements", kind=Kind.INDEX, infer=_gather_elements_shape, attrs=AxisAttrs, arity=(2, 2), dtypes="fiubc", roles="xi",
    parts=lambda node, x, indices: along(node, x, broadcast_to(indices[..., None], dims=(*indices.dims, 2))),
    reference=_gather_elements_array, element=_gather_elements_element,
    rows=lambda a, i, axis, x, indices: axis if i else _rows(a, i, axis, x, indices),
    partitioned=_gather_elements_partitioned,
    samples=(
        Sample(((5, 17), (4, 17)), low=0, high=5, dtypes=("", "i64")),
        Sample(((3, 5, 2), (3, 7, 2)), {"axis": 1}, low=0, high=5, dtypes=("", "i32")),
        Sample(((33, 7), (31, 1)), {"axis": -1}, low=0, high=7, dtypes=("", "i64")),
        Sample(((5, 3), (0, 3)), low=0, high=5, dtypes=("", "i64")),
    ),
    doc="Element by element, takes x at an index along `axis` and at its own place in all other dims, which may be "
    "fewer than of x. An index out of range is an IndexRangeError.",
)  # fmt: skip

# -- scatter_elements, scatter_add ---------------------------------------------------------------------------------

Mode = Literal["replace", "add", "mul", "max", "min"]
_UFUNCS = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}


class ScatterAttrs(AxisAttrs):
    mode: Mode = "replace"

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise AttributeValueError(f"mode is one of {', '.join(get_args(Mode))}, got {self.mode!r}")


def _scatter_shape(attrs: ScatterAttrs, x: Shape, indices: Shape, updates: Shape) -> Shape:
    same_dtype(x, updates)
    _element_dims(axis_of(attrs.axis, x.rank), x, indices)
    if indices.dims != updates.dims:
        raise ShapeError(f"each update has an index; got {updates} and {indices}")
    if x.dtype.kind == "b" and attrs.mode != "replace":
        raise DTypeError(f"bools are replaced, not combined by {attrs.mode!r}; cast them: x.astype('i32')")
    return x


def _scatter_array(attrs: ScatterAttrs, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """In row-major order, which along one line is that of the updates."""
    check_range(indices, x.shape[attrs.axis], "scatter_elements")
    out = np.array(x)
    axis = attrs.axis % x.ndim
    at = tuple(indices.astype(np.int64) if i == axis else own for i, own in enumerate(np.indices(indices.shape)))
    if attrs.mode != "replace":
        _UFUNCS[attrs.mode].at(out, at, updates)
        return out
    for place, value in zip(zip(*(a.reshape(-1) for a in at)), updates.reshape(-1)):
        out[place] = value
    return out


def _scatter_kernel(ctx: Lowering, node: Applied[ScatterAttrs]) -> Loops:
    """For each line of x along the axis: copy it to local memory, apply the updates in order, write it out."""
    x, indices, updates = node.inputs
    axis = axis_of(node.attrs.axis, x.rank)
    grid, at = lines(ctx.dims(x), axis)
    size, i, j, pick = ctx.dims(x)[axis], Var("i"), Var("j"), Var("s")
    line = ctx.local(x.dtype.compute, size)
    parts = zip(at(pick), ctx.dims(indices), ctx.dims(x))
    few = [k.lt(c, k.const(n)) for place, (c, n, whole) in enumerate(parts) if place != axis and n < whole]
    here = reduce(k.and_, few) if few else None  # whether this line has updates
    index = k.cast(ctx.element(indices, at(pick), here), index_)
    right = in_range(index, size)
    inside = right if here is None else k.and_(here, right)
    safe = k.select(inside, index, k.const(0))
    value = ctx.element(updates, at(pick), here)
    if node.attrs.mode != "replace":
        value = getattr(k, node.attrs.mode)(Load(line, safe, inside), value)
    copy_in = Loop(i, size, (Store(line, i, ctx.element(x, at(i))),))
    apply = Loop(pick, ctx.dims(indices)[axis], (Check(right, INDEX_OUT_OF_RANGE), Store(line, safe, value, inside)))
    copy_out = Loop(j, size, (ctx.store(0, at(j), Load(line, j)),))
    return grid, (copy_in, apply, copy_out)


scatter_elements = op(
    "scatter_elements", kind=Kind.KERNEL, infer=_scatter_shape, attrs=ScatterAttrs, arity=(3, 3), dtypes="fiub", roles="xix",
    reference=_scatter_array, kernel=_scatter_kernel, rows=_rows,
    samples=(
        Sample(((5, 17), (4, 17), (4, 17)), low=0, high=5, dtypes=("", "i64", "")),
        Sample(((3, 5, 2), (3, 7, 2), (3, 7, 2)), {"axis": 1, "mode": "max"}, low=0, high=5, dtypes=("bf16", "i32", "bf16")),
        Sample(((7,), (33,), (33,)), {"mode": "min"}, low=0, high=7, dtypes=("i32", "i64", "i32")),
        Sample(((4, 3), (0, 3), (0, 3)), {"mode": "add"}, low=0, high=4, dtypes=("f16", "i64", "f16")),
        Sample(((4, 3), (4, 5), (4, 5)), {"axis": -1, "mode": "mul"}, low=0, high=3, dtypes=("f32", "i64", "f32")),
        Sample(((4, 3, 5), (3, 4, 2), (3, 4, 2)), {"axis": 1}, low=0, high=3, dtypes=("f32", "i64", "f32")),
        Sample(((2, 3), (2, 5), (2, 5)), {"axis": 1}, low=0, high=3, dtypes=("bool", "i64", "bool")),
    ),
    doc="Writes each update to a copy of x, at its index along `axis` and at its own place in all other dims, which may be "
    "fewer than of x. `mode`: 'replace' (of several, the last one stays), or what combines it with the element there. An index "
    "out of range is an IndexRangeError.",
)  # fmt: skip


def _scatter_add_shape(attrs: AxisAttrs, x: Shape, indices: Shape, updates: Shape) -> Shape:
    same_dtype(x, updates)
    integer("the indices", indices)
    axis = axis_of(attrs.axis, x.rank)
    want = x.with_dims((*x.dims[:axis], *indices.dims, *x.dims[axis + 1 :]))
    if updates.dims != want.dims:
        raise ShapeError(f"the updates must be {want}, got {updates}")
    return x


def _scatter_add_array(attrs: AxisAttrs, x: np.ndarray, indices: np.ndarray, updates: np.ndarray) -> np.ndarray:
    axis = attrs.axis % x.ndim
    check_range(indices, x.shape[axis], "scatter_add")
    out = np.array(np.moveaxis(x, axis, 0))
    moved = np.moveaxis(updates, tuple(range(axis, axis + indices.ndim)), tuple(range(indices.ndim)))
    np.add.at(out, indices.astype(np.int64), moved)
    return np.moveaxis(out, 0, axis)


def _scatter_add(attrs: AxisAttrs, x: Value, indices: Value, updates: Value) -> Value:
    axis = axis_of(attrs.axis, x.rank)
    before, after = x.dims[:axis], x.dims[axis + 1 :]
    count: DimLike = math.prod(indices.dims)  # type: ignore[arg-type]
    dims = (*before, count, *after)
    each = broadcast_to(reshape(indices, dims=(count, *(1 for _ in after))), dims=dims)
    return scatter_elements(x, each, reshape(updates, dims=dims), axis=axis, mode="add")


scatter_add = op(
    "scatter_add", kind=Kind.COMPOSITE, infer=_scatter_add_shape, attrs=AxisAttrs, arity=(3, 3), dtypes="fiu", roles="xix",
    reference=_scatter_add_array, decompose=_scatter_add,
    samples=(
        Sample(((5, 17), (4,), (4, 17)), low=0, high=5, dtypes=("", "i64", "")),
        Sample(((3, 5, 2), (2, 3), (3, 2, 3, 2)), {"axis": 1}, low=0, high=5, dtypes=("", "i32", "")),
        Sample(((7,), (33,), (33,)), low=0, high=7, dtypes=("", "i64", "")),
        Sample(((4, 3), (0,), (0, 3)), low=0, high=4, dtypes=("", "i64", "")),
    ),
    doc="Adds `updates` to a copy of x at the given indices along `axis`; updates have the dims of gather(x, indices). An index "
    "may repeat.",
)  # fmt: skip
