"""Dynamic reads and updates of rows, for KV caches and other growing state.

The position is an operand, known only at run time. `update_rows` is a pure op: its result is the state with some rows replaced.
If the result becomes the state's next value, the compiler writes only those rows, in place (rlx/compiler/state.py).
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from rlx.errors import AttributeValueError, IndexRangeError, ShapeError
from rlx.ir.contexts import Applied, Coords, Lowering, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import DType, as_dtype, index_
from rlx.ir.kernel import Check, Expr, Loop, Loops, Var, const, k
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.index import INDEX_OUT_OF_RANGE
from rlx.ir.ops.rules import again, along, axis_of, halves, integer, joined, others, same_dtype, static_dim
from rlx.ir.shape import Shape

ANY = "fiub"
Fill = Literal["0", "1", "least", "greatest"]  # identity elements of add, mul, max and min
FILLS = get_args(Fill)


class RowsAttrs(Attrs):
    axis: int = 0


class ValidRowsAttrs(Attrs):
    """Dim `axis` has size outer * upper * inner; the index into the middle factor is the row (`upper` 0: the whole dim).
    `fill`: one of FILLS. `guard`: any defined fill will do, because no result that is used depends on it."""

    axis: int = 0
    upper: int = 0
    inner: int = 1
    fill: Fill = "0"
    guard: bool = False

    def __post_init__(self) -> None:
        if self.fill not in FILLS:
            raise AttributeValueError(f"fill is one of {', '.join(FILLS)}, got {self.fill!r}")

    def rows(self, size: int) -> int:
        return self.upper or size // self.inner

    def value(self, dtype: DType) -> int | float | bool:
        """The fill value as a number of the dtype."""
        if self.fill in ("0", "1"):
            return dtype.numpy.type(int(self.fill)).item()
        high = self.fill == "greatest"
        if dtype.kind in "iu":
            return int(np.iinfo(dtype.numpy).max if high else np.iinfo(dtype.numpy).min)
        if dtype.kind == "b":
            return high
        end = np.asarray(np.inf).astype(dtype.numpy).item()  # NaN where the dtype has no infinity
        if end != end:
            from ml_dtypes import finfo

            end = float(finfo(dtype.numpy).max)
        return end if high else -end


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


def _range(ctx: Lowering, at: Value, count: int, size: int) -> tuple[Expr, Expr]:
    """(position, condition that `count` rows from it are inside `size`)."""
    start = k.cast(ctx.element(at, ()), index_)
    return start, k.and_(k.le(k.const(0), start), k.le(start, k.const(size - count)))


def _along(coords: Coords, axis: int, at: Expr) -> tuple[Expr, ...]:
    return (*coords[:axis], at, *coords[axis + 1 :])


def _update_element(ctx: Lowering, node: Applied[RowsAttrs], result: int, coords: Coords) -> Expr:
    state, rows, at = node.inputs
    axis = axis_of(node.attrs.axis, state.rank)
    count = ctx.dims(rows)[axis]
    start, inside = _range(ctx, at, count, ctx.dims(state)[axis])
    ctx.check(inside, INDEX_OUT_OF_RANGE)
    row = k.sub(coords[axis], start)
    new = k.and_(inside, k.and_(k.le(k.const(0), row), k.lt(row, k.const(count))))
    return k.select(new, ctx.element(rows, _along(coords, axis, row), new), ctx.element(state, coords))


def _update_in_place(ctx: Lowering, node: Applied[RowsAttrs]) -> Loops:
    """Writes only the updated rows; writes nothing if they do not all fit."""
    state, rows, at = node.inputs
    axis = axis_of(node.attrs.axis, state.rank)
    dims = ctx.dims(rows)
    *outer, last = coords = [Var("o") for _ in dims]
    start, inside = _range(ctx, at, dims[axis], ctx.dims(state)[axis])
    store = ctx.store(0, _along(coords, axis, k.add(coords[axis], start)), ctx.element(rows, coords), inside)
    return tuple(zip(outer, dims)), (Check(inside, INDEX_OUT_OF_RANGE), Loop(last, dims[-1], (store,), vector=True))


def _take_element(ctx: Lowering, node: Applied[TakeRowsAttrs], result: int, coords: Coords) -> Expr:
    state, at = node.inputs
    axis = axis_of(node.attrs.axis, state.rank)
    start, inside = _range(ctx, at, node.attrs.count, ctx.dims(state)[axis])
    ctx.check(inside, INDEX_OUT_OF_RANGE)
    return ctx.element(state, _along(coords, axis, k.add(coords[axis], start)), inside)


def _valid_shape(attrs: ValidRowsAttrs, x: Shape, extent: Shape) -> Shape:
    _position(extent)
    size = static_dim(x.dims[axis_of(attrs.axis, x.rank)], "valid_rows")
    if attrs.inner < 1 or attrs.upper < 0 or size % (max(attrs.upper, 1) * attrs.inner):
        raise AttributeValueError(f"a dim of {size} is not a multiple of {attrs.upper} rows of {attrs.inner}")
    return x


def _valid_array(attrs: ValidRowsAttrs, x: np.ndarray, extent: np.ndarray) -> np.ndarray:
    size = x.shape[attrs.axis]
    along = [1] * x.ndim
    along[attrs.axis] = size
    row = np.arange(size) // attrs.inner % max(attrs.rows(size), 1)
    return np.where((row < extent).reshape(along), x, np.asarray(attrs.value(as_dtype(x.dtype))).astype(x.dtype))


def _valid_rows(attrs: ValidRowsAttrs, operand: int, axis: int, x: Shape, extent: Shape) -> int | None:
    return axis if attrs.guard or axis != axis_of(attrs.axis, x.rank) else None


def _valid_partitioned(p: Partitioning, attrs: ValidRowsAttrs, x: Value, extent: Value) -> Parted:
    split = p.split_of(x)
    return "rows are counted from the first" if split and split.axis == axis_of(attrs.axis, x.rank) else None


def _valid_element(ctx: Lowering, node: Applied[ValidRowsAttrs], result: int, coords: Coords) -> Expr:
    x, extent = node.inputs
    axis = axis_of(node.attrs.axis, x.rank)
    row = k.rem(k.div(coords[axis], k.const(node.attrs.inner)), k.const(node.attrs.rows(ctx.dims(x)[axis])))
    if ctx.dims(x)[axis] == node.attrs.rows(ctx.dims(x)[axis]):
        row = coords[axis]
    valid = k.lt(row, k.cast(ctx.element(extent, ()), index_))
    value = ctx.element(x, coords, valid)
    return value if node.attrs.fill == "0" else k.select(valid, value, const(node.attrs.value(x.dtype), value.dtype))


def _take_shape(attrs: TakeRowsAttrs, state: Shape, at: Shape) -> Shape:
    _position(at)
    axis = axis_of(attrs.axis, state.rank)
    size = state.dims[axis]
    if isinstance(size, int) and not 0 <= attrs.count <= size:
        raise ShapeError(f"{attrs.count} rows of {state} along dim {axis}")
    return state.with_dims((*state.dims[:axis], attrs.count, *state.dims[axis + 1 :]))


update_rows = op(
    "update_rows", kind=Kind.INDEX, infer=_update_shape, attrs=RowsAttrs, arity=(3, 3), dtypes=ANY, parts=along, roles="xxi",
    reference=_update_array, element=_update_element, update=_update_in_place, rows=others,
    samples=(
        Sample(((5, 17), (2, 17), ()), low=0, high=4, dtypes=("", "", "i64")),
        Sample(((2, 3, 9, 4), (2, 3, 1, 4), ()), {"axis": 2}, low=0, high=9, dtypes=("", "", "i32")),
        Sample(((4,), (4,), ()), low=0, high=1, dtypes=("", "", "i32")),
        Sample(((3, 2), (0, 2), ()), low=0, high=4, dtypes=("", "", "i32")),
    ),
    doc="Replaces rows of `state` by `rows`, starting at position `at` (an integer of dims ()) along `axis`. Rows that do not "
    "all fit are an IndexRangeError.",
)  # fmt: skip
take_rows = op(
    "take_rows", kind=Kind.INDEX, infer=_take_shape, attrs=TakeRowsAttrs, arity=(2, 2), dtypes=ANY, parts=along, roles="xi",
    reference=_take_array, element=_take_element, rows=others,
    samples=(
        Sample(((5, 17), ()), {"count": 2}, low=0, high=4, dtypes=("", "i64")),
        Sample(((2, 9, 4), ()), {"count": 1, "axis": 1}, low=0, high=9, dtypes=("", "i32")),
    ),
    doc="Takes `count` rows of `state`, starting at position `at` (an integer of dims ()) along `axis`. Rows out of range are an "
    "IndexRangeError.",
)  # fmt: skip
def _valid_parts(node: Applied[ValidRowsAttrs], x: Value, extent: Value) -> Value:
    axis, (re, im) = axis_of(node.attrs.axis, x.rank - 1), halves(x)
    return joined(again(node, re, extent, axis=axis), again(node, im, extent, axis=axis, fill="0"))


valid_rows = op(
    "valid_rows", kind=Kind.INDEX, infer=_valid_shape, attrs=ValidRowsAttrs, arity=(2, 2), dtypes=ANY, roles="xi",
    reference=_valid_array, as_stored=True, element=_valid_element, rows=_valid_rows, partitioned=_valid_partitioned,
    parts=_valid_parts,
    samples=(
        Sample(((5, 17), ()), low=1, high=5, dtypes=("", "i64")),
        Sample(((2, 9, 4), ()), {"axis": 1, "fill": "least"}, low=1, high=9, dtypes=("", "i32")),
        Sample(((3, 30), ()), {"axis": -1, "upper": 5, "inner": 2, "fill": "greatest"}, low=1, high=5, dtypes=("", "i64")),
        Sample(((33,), ()), {"inner": 3, "fill": "1"}, low=1, high=11, dtypes=("", "i64")),
    ),
    doc="Replaces the rows of x from index `extent` (an integer of dims ()) on, along `axis`, by `fill`: '0', '1', or the "
    "'least' or 'greatest' number of the dtype.",
)  # fmt: skip
