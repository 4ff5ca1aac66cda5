"""Rows of a larger tensor at a position known only at run time: what KV-caches and other growing state are made of.

`update_rows` is a value like any other: the state with some rows replaced. Where the result becomes the state's next value the
compiler writes just those rows, in place (rlx/compile/state.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import IndexRangeError, ShapeError
from rlx.ir.dtype import i64
from rlx.ir.kernel import Check, Loop, Var, k
from rlx.ir.op import Attrs, Kind, Sample, op
from rlx.ir.ops.index import INDEX_OUT_OF_RANGE
from rlx.ir.ops.rules import axis_of, integer, same_dtype
from rlx.ir.shape import Shape

ANY = "fiub"


class RowsAttrs(Attrs):
    axis: int = 0


class TakeRowsAttrs(Attrs):
    count: int
    axis: int = 0


def _position(at: Shape) -> None:
    integer("the position", at)
    if at.rank:
        raise ShapeError(f"the position is one integer of dims (), got {at}")


def _update_shape(attrs: RowsAttrs, state: Shape, rows: Shape, at: Shape) -> Shape:
    same_dtype(state, rows)
    _position(at)
    axis = axis_of(attrs.axis, state.rank)
    rest = lambda s: s.dims[:axis] + s.dims[axis + 1 :]  # noqa: E731
    if rows.rank != state.rank or rest(rows) != rest(state):
        raise ShapeError(f"the rows must be like {state} in every dim but {axis}, got {rows}")
    return state


def _start(at: np.ndarray, count: int, size: int) -> int:
    start = int(at)
    if start < 0 or start + count > size:
        raise IndexRangeError(f"rows {start} to {start + count} of {size}")
    return start


def _update_array(attrs: RowsAttrs, state: np.ndarray, rows: np.ndarray, at: np.ndarray) -> np.ndarray:
    out = np.moveaxis(np.array(state), attrs.axis, 0)
    start = _start(at, rows.shape[attrs.axis], len(out))
    out[start : start + rows.shape[attrs.axis]] = np.moveaxis(rows, attrs.axis, 0)
    return np.moveaxis(out, 0, attrs.axis)


def _take_array(attrs: TakeRowsAttrs, state: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.take(state, _start(at, attrs.count, state.shape[attrs.axis]) + np.arange(attrs.count), axis=attrs.axis)


def _range(ctx: Any, at: Any, count: int, size: int) -> tuple[Any, Any]:
    """The position, and whether `count` rows from it lie inside `size`."""
    start = k.cast(ctx.element(at, ()), i64)
    return start, k.and_(k.le(k.const(0), start), k.le(start, k.const(size - count)))


def _along(coords: Sequence[Any], axis: int, at: Any) -> tuple[Any, ...]:
    return (*coords[:axis], at, *coords[axis + 1 :])


def _update_element(ctx: Any, node: Any, result: int, coords: Sequence[Any]) -> Any:
    state, rows, at = node.inputs
    axis = axis_of(node.attrs.axis, state.rank)
    count = ctx.dims(rows)[axis]
    start, inside = _range(ctx, at, count, ctx.dims(state)[axis])
    ctx.check(inside, INDEX_OUT_OF_RANGE)
    row = k.sub(coords[axis], start)
    new = k.and_(inside, k.and_(k.le(k.const(0), row), k.lt(row, k.const(count))))
    return k.select(new, ctx.element(rows, _along(coords, axis, row), new), ctx.element(state, coords))


def _update_in_place(ctx: Any, node: Any) -> Any:
    """The rows alone, written where they belong; nothing is written if they do not all fit."""
    state, rows, at = node.inputs
    axis = axis_of(node.attrs.axis, state.rank)
    dims = ctx.dims(rows)
    *outer, last = coords = [Var("o") for _ in dims]
    start, inside = _range(ctx, at, dims[axis], ctx.dims(state)[axis])
    store = ctx.store(0, _along(coords, axis, k.add(coords[axis], start)), ctx.element(rows, coords), inside)
    return tuple(zip(outer, dims)), (Check(inside, INDEX_OUT_OF_RANGE), Loop(last, dims[-1], (store,), vector=True))


def _take_element(ctx: Any, node: Any, result: int, coords: Sequence[Any]) -> Any:
    state, at = node.inputs
    axis = axis_of(node.attrs.axis, state.rank)
    start, inside = _range(ctx, at, node.attrs.count, ctx.dims(state)[axis])
    ctx.check(inside, INDEX_OUT_OF_RANGE)
    return ctx.element(state, _along(coords, axis, k.add(coords[axis], start)), inside)


def _take_shape(attrs: TakeRowsAttrs, state: Shape, at: Shape) -> Shape:
    _position(at)
    axis = axis_of(attrs.axis, state.rank)
    size = state.dims[axis]
    if isinstance(size, int) and not 0 <= attrs.count <= size:
        raise ShapeError(f"{attrs.count} rows of {state} along dim {axis}")
    return state.with_dims((*state.dims[:axis], attrs.count, *state.dims[axis + 1 :]))


update_rows = op(
    "update_rows", kind=Kind.INDEX, infer=_update_shape, attrs=RowsAttrs, arity=(3, 3), dtypes=ANY, roles="xxi",
    reference=_update_array, element=_update_element, update=_update_in_place,
    samples=(
        Sample(((5, 17), (2, 17), ()), low=0, high=4, dtypes=("", "", "i64")),
        Sample(((2, 3, 9, 4), (2, 3, 1, 4), ()), {"axis": 2}, low=0, high=9, dtypes=("", "", "i32")),
        Sample(((4,), (4,), ()), low=0, high=1, dtypes=("", "", "i32")),
        Sample(((3, 2), (0, 2), ()), low=0, high=4, dtypes=("", "", "i32")),
    ),
    doc="`state` with `rows` put in from position `at` (an integer of dims ()) along `axis`. Rows that do not all fit are an "
    "IndexRangeError.",
)  # fmt: skip
take_rows = op(
    "take_rows", kind=Kind.INDEX, infer=_take_shape, attrs=TakeRowsAttrs, arity=(2, 2), dtypes=ANY, roles="xi",
    reference=_take_array, element=_take_element,
    samples=(
        Sample(((5, 17), ()), {"count": 2}, low=0, high=4, dtypes=("", "i64")),
        Sample(((2, 9, 4), ()), {"count": 1, "axis": 1}, low=0, high=9, dtypes=("", "i32")),
    ),
    doc="`count` rows of `state` from position `at` (an integer of dims ()) along `axis`. Rows that are not all there are an "
    "IndexRangeError.",
)  # fmt: skip
