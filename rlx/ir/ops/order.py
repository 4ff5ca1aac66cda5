"""Sorting, argmax and cumulative sums along an axis.

NaN orders above every number.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.contexts import Applied, Coords, Lowering, Padded, PaddingPass, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import bool_, i32, i64, index_
from rlx.ir.kernel import Carry, Expr, Load, Loop, Loops, Reduce, Store, Var, const, k
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.rules import axis_of, lines, others, static_dim
from rlx.ir.ops.view import slice_axis
from rlx.ir.shape import Shape

BLOCK = 128  # elements per block: the best block is found first, then the position in it
LANES = 16  # shorter loops are not vectorized
COLUMNS = range(512, 4097)  # columns scanned together; reading shorter parts of memory pages is slow
ROWS_AT_ONCE = 4  # rows read per write of the running best


def _is_nan(x: Expr) -> Expr:
    return k.ne(x, x) if x.dtype.kind == "f" else const(False, bool_)


def _precedes(a: Expr, at_a: Expr, b: Expr, at_b: Expr, descending: bool) -> Expr:
    """True where (a, at_a) sorts before (b, at_b): by value, NaN greatest, then by position. A total order."""
    ahead = k.lt(b, a) if descending else k.lt(a, b)
    tie = k.eq(a, b)
    if a.dtype.kind == "f":
        nan_a, nan_b = _is_nan(a), _is_nan(b)
        ahead = k.or_(ahead, k.and_(nan_a, k.not_(nan_b)) if descending else k.and_(nan_b, k.not_(nan_a)))
        tie = k.or_(tie, k.and_(nan_a, nan_b))
    return k.or_(ahead, k.and_(tie, k.lt(at_a, at_b)))


# -- argmax, argmin ------------------------------------------------------------------------------------------------


class ArgAttrs(Attrs):
    axis: int = -1
    keepdims: bool = False


def _arg_shape(attrs: ArgAttrs, x: Shape) -> Shape:
    axis = axis_of(attrs.axis, x.rank)
    if x.dims[axis] == 0:
        raise ShapeError("no element to choose from: the dim is 0")
    return Shape((*x.dims[:axis], *((1,) if attrs.keepdims else ()), *x.dims[axis + 1 :]), i64)


def _arg_rows(attrs: ArgAttrs, operand: int, axis: int, x: Shape) -> int | None:
    at = axis_of(attrs.axis, x.rank)
    return None if axis == at else axis - (axis > at and not attrs.keepdims)


def _best_of_columns(ctx: Lowering, node: Applied[ArgAttrs], axis: int, better: Callable[[Expr, Expr], Expr]) -> Loops:
    """Scans many columns together, row by row, with the best of each in local memory. Each run of columns is a grid point."""
    x, dims = node.inputs[0], ctx.dims(node.inputs[0])
    (grid, at), i, column, run = lines(dims, axis), Var("i"), Var("c"), Var("run")
    share = math.prod(n for _, n in grid) // ctx.threads  # columns per thread
    least, most = COLUMNS[0], max(COLUMNS[0], min(share, COLUMNS[-1]))
    runs = next((n for n in range(-(-dims[-1] // most), dims[-1] // least + 1) if dims[-1] % n == 0), 1)
    width, dtype = dims[-1] // runs, x.dtype.compute
    bests, places = ctx.local(dtype, width), ctx.local(i32, width)
    place_of = lambda row: (*at(row)[:-1], k.add(k.mul(run, const(width)), column))  # noqa: E731

    def rows(first: Expr, count: int, best: Expr | None = None, place: Expr | None = None) -> Loop:
        """Updates the best with `count` rows from `first` on; the very first row has no best before it."""
        for row in (k.add(first, const(n)) for n in range(count)):
            value = ctx.element(x, place_of(row))
            take = None if best is None else better(value, best)
            best, place = (value, const(0, i32)) if take is None else (
                k.select(take, value, best), k.select(take, k.cast(row, i32), place),
            )  # fmt: skip
        assert best is not None and place is not None
        return Loop(column, width, (Store(bests, column, best), Store(places, column, place)), vector=True)

    kept, (rounds, rest) = (Load(bests, column), Load(places, column)), divmod(dims[axis] - 1, ROWS_AT_ONCE)
    more = Loop(i, rounds, (rows(k.add(k.mul(i, const(ROWS_AT_ONCE)), const(1)), ROWS_AT_ONCE, *kept),))
    last = (rows(const(dims[axis] - rest), rest, *kept),) if rest else ()
    out = ctx.store(0, place_of(const(0) if node.attrs.keepdims else None), k.cast(kept[1], i64))
    return (*grid[:-1], (run, runs)), (rows(const(0), 1), more, *last, Loop(column, width, (out,), vector=True))


def _arg(name: str, reference: Callable[..., np.ndarray], op_name: str, fill: str, doc: str) -> Callable[..., Value]:
    def better(value: Expr, best: Expr) -> Expr:
        """True if a later element replaces the best. NaN beats every number, and the first NaN stays."""
        worse = k.le(value, best) if op_name == "max" else k.le(best, value)
        return k.and_(k.not_(worse), k.eq(best, best)) if value.dtype.kind == "f" else k.not_(worse)

    def blocks(ctx: Lowering, x: Value, length: int, at: Callable[[Expr], Coords]) -> tuple[list[Loop], Expr]:
        """The best of each block, vectorized; then the first position of it in the best block."""
        size, dtype = min(length, BLOCK), x.dtype.compute
        block, i, j, found = Var("block"), Var("i"), Var("j"), Var("found", i32)
        parts, best, which = [], ctx.element(x, at(const(0))), const(0)
        for first, count, n in ((0, length // size, size), (length // size, 1, length % size)):
            if n:
                top, carried, held = Var("top", dtype), Var("best", dtype), Var("which")
                here = k.add(const(first), block)
                value = ctx.element(x, at(k.add(k.mul(here, const(size)), i)))
                inner = Loop(i, n, (), vector=True, reduces=(Reduce(top, op_name, value),))
                take = better(top, carried)
                parts.append(Loop(block, count, (inner,), carries=(
                    Carry(carried, best, k.select(take, top, carried)), Carry(held, which, k.select(take, here, held)),
                )))  # fmt: skip
                best, which, block, i = carried, held, Var("block"), Var("i")
        start = k.mul(which, const(size))
        inside = k.lt(k.add(start, j), k.const(length))
        value = ctx.element(x, at(k.add(start, j)), inside if length % size else None)
        match = k.or_(k.eq(value, best), _is_nan(value))  # a block with a NaN has a NaN as its best
        place = k.select(k.and_(match, inside) if length % size else match, k.cast(j, i32), const(size - 1, i32))
        parts.append(Loop(j, size, (), vector=True, reduces=(Reduce(found, "min", place),)))
        return parts, k.add(start, k.cast(found, index_))

    def kernel(ctx: Lowering, node: Applied[ArgAttrs]) -> Loops:
        x, axis = node.inputs[0], axis_of(node.attrs.axis, node.inputs[0].rank)
        dims, length = ctx.dims(x), ctx.dims(x)[axis]
        grid, at = lines(dims, axis)
        to, dtype, i = at(const(0) if node.attrs.keepdims else None), x.dtype.compute, Var("i")
        if axis == x.rank - 1 and length >= 2 * LANES:
            parts, found = blocks(ctx, x, length, at)
            return grid, (*parts, ctx.store(0, to, k.cast(found, i64)))
        wide = axis < x.rank - 1 and dims[-1] >= LANES and not ctx.cut(len(to) - 1)
        if wide and length < 1 << 31:
            return _best_of_columns(ctx, node, axis, better)
        best, found = Var("best", dtype), Var("found")
        value = ctx.element(x, at(i))
        take = better(value, best)
        loop = Loop(i, length, (), carries=(
            Carry(best, ctx.element(x, at(const(0))), k.select(take, value, best)),
            Carry(found, const(0), k.select(take, i, found)),
        ))  # fmt: skip
        return grid, (loop, ctx.store(0, to, k.cast(found, i64)))

    def padded(p: PaddingPass, attrs: ArgAttrs, x: Value) -> Padded:
        axis = axis_of(attrs.axis, x.rank)
        if any(a.outer > 1 for a in p.along(x, axis)):
            return "positions would count rows that hold no data"
        return p.final(made(p.masked(x, axis, fill), axis=axis, keepdims=attrs.keepdims)) if p.along(x, axis) else None

    made = op(
        name, kind=Kind.KERNEL, infer=_arg_shape, attrs=ArgAttrs, dtypes="fiu", kernel=kernel, doc=doc, rows=_arg_rows,
        padded=padded,
        reference=lambda a, x: reference(x, axis=a.axis, keepdims=a.keepdims),
        samples=(
            Sample(((3, 17),)), Sample(((2, 33, 4),), {"axis": 1}), Sample(((5,),), {"axis": 0, "keepdims": True}),
            Sample(((4, 1),)), Sample(((0, 3),)),
        ),
    )  # fmt: skip
    return made


_ARG = "Index (i64) of the {} element along `axis`: the first on ties, the first NaN if there is one."
argmax = _arg("argmax", np.argmax, "max", "least", _ARG.format("greatest"))
argmin = _arg("argmin", np.argmin, "min", "greatest", _ARG.format("least"))


# -- cumsum --------------------------------------------------------------------------------------------------------


class CumsumAttrs(Attrs):
    """`exclusive`: each sum omits its own element. `reverse`: sums start at the end."""

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False


def _cumsum_shape(attrs: CumsumAttrs, x: Shape) -> Shape:
    axis_of(attrs.axis, x.rank)
    return x


def _cumsum_array(attrs: CumsumAttrs, x: np.ndarray) -> np.ndarray:
    x = np.flip(x, attrs.axis) if attrs.reverse else x
    total = np.cumsum(x, axis=attrs.axis, dtype=x.dtype)
    if attrs.exclusive:
        total = np.roll(total, 1, axis=attrs.axis)
        np.moveaxis(total, attrs.axis, 0)[:1] = 0
    return np.flip(total, attrs.axis) if attrs.reverse else total


def _cumsum_padded(p: PaddingPass, attrs: CumsumAttrs, x: Value) -> Padded:
    """Padding counts as 0 where it precedes data."""
    axis = axis_of(attrs.axis, x.rank)
    behind = attrs.reverse or any(a.outer > 1 for a in p.along(x, axis))
    held = p.masked(x, axis, guard=True) if behind else x
    return p.final(cumsum(held, axis=axis, exclusive=attrs.exclusive, reverse=attrs.reverse)) if p.along(x, axis) else None


def _cumsum_partitioned(p: Partitioning, attrs: CumsumAttrs, x: Value) -> Parted:
    split = p.split_of(x)
    return "each element needs those before it" if split and split.axis == axis_of(attrs.axis, x.rank) else None


def _cumsum_kernel(ctx: Lowering, node: Applied[CumsumAttrs]) -> Loops:
    x, attrs = node.inputs[0], node.attrs
    dims, axis = ctx.dims(x), axis_of(attrs.axis, x.rank)
    grid, coords = lines(dims, axis)
    length, dtype, i = dims[axis], x.dtype.compute, Var("i")
    at = coords(k.sub(k.const(length - 1), i) if attrs.reverse else i)
    if axis < x.rank - 1 and dims[-1] >= LANES and not ctx.cut(x.rank - 1):  # row by row, with a total per column
        grid, (column, width) = grid[:-1], grid[-1]
        kept = ctx.local(dtype, width)
        total = Load(kept, column)
        following = k.add(total, ctx.element(x, at))
        row = (ctx.store(0, at, total if attrs.exclusive else following), Store(kept, column, following))
        clear = Loop(column, width, (Store(kept, column, const(0, dtype)),), vector=True)
        return grid, (clear, Loop(i, length, (Loop(column, width, row, vector=True),)))
    total = Var("total", dtype)
    following = k.add(total, ctx.element(x, at))
    store = ctx.store(0, at, total if attrs.exclusive else following)
    carries = (Carry(total, const(0, dtype), following),)
    return grid, (Loop(i, length, (store,), vector=length >= LANES, carries=carries),)


cumsum = op(
    "cumsum", kind=Kind.KERNEL, infer=_cumsum_shape, attrs=CumsumAttrs, dtypes="fiu",
    reference=_cumsum_array, kernel=_cumsum_kernel,
    rows=lambda a, i, axis, x: axis, padded=_cumsum_padded, partitioned=_cumsum_partitioned,
    samples=(
        Sample(((3, 17),)), Sample(((2, 33, 4),), {"axis": 1, "reverse": True}), Sample(((2, 0),)),
        Sample(((5, 3),), {"axis": 0, "exclusive": True}), Sample(((7,),), {"exclusive": True, "reverse": True}),
    ),
    doc="Cumulative sum along `axis`, inclusive unless `exclusive`; integers wrap.",
)  # fmt: skip


# -- top_k, sort ---------------------------------------------------------------------------------------------------


class TopKAttrs(Attrs):
    k: int
    largest: bool = True


class SortAttrs(Attrs):
    descending: bool = False


def _top_k_shapes(attrs: TopKAttrs, x: Shape) -> tuple[Shape, ...]:
    if not x.rank:
        raise ShapeError("the operand needs a dim to choose along")
    if not 0 <= attrs.k <= static_dim(x.dims[-1], "top_k"):
        raise AttributeValueError(f"k is between 0 and the last dim, {x.dims[-1]}, got {attrs.k}")
    out = x.with_dims((*x.dims[:-1], attrs.k))
    return out, out.with_dtype(i64)


def _sorted_arrays(x: np.ndarray, descending: bool) -> tuple[np.ndarray, np.ndarray]:
    if descending:  # a stable sort of the reversed row, so that ties keep their order
        order = x.shape[-1] - 1 - np.flip(np.argsort(np.flip(x, -1), axis=-1, kind="stable"), -1)
    else:
        order = np.argsort(x, axis=-1, kind="stable")
    return np.take_along_axis(x, order, axis=-1), order


def _sort_kernel(ctx: Lowering, node: Applied[SortAttrs]) -> Loops:
    """K. E. Batcher's bitonic network over a power of two of (value, position) pairs in local memory. Positions from n on
    are padding and sort last. One loop over all passes: merges of `size` = 2, 4, 8 …, each in steps `size`/2 … 2, 1."""
    x = node.inputs[0]
    n = ctx.dims(x)[-1]
    grid, coords = lines(ctx.dims(x), x.rank - 1)
    stages = max(n - 1, 0).bit_length()
    full = 1 << stages
    values, places = ctx.local(x.dtype.compute, full), ctx.local(index_, full)
    i, j, t, m = Var("i"), Var("j"), Var("t"), Var("m")
    real = k.lt(i, k.const(n))
    fill = Loop(i, full, (
        Store(values, i, ctx.element(x, coords(i), real)), Store(places, i, i),
    ))  # fmt: skip
    size, step = Var("size"), Var("step")
    low = k.add(k.mul(k.mul(k.const(2), step), k.div(j, step)), k.rem(j, step))
    high = k.add(low, step)
    a, b, at_a, at_b = Load(values, low), Load(values, high), Load(places, low), Load(places, high)
    real_a, real_b = k.lt(at_a, k.const(n)), k.lt(at_b, k.const(n))
    first = lambda v, at, rv, w, at_w, rw: k.select(  # noqa: E731
        k.xor(rv, rw), rv, _precedes(v, at, w, at_w, node.attrs.descending)
    )
    upward = k.eq(k.rem(k.div(low, size), k.const(2)), k.const(0))
    swap = k.select(upward, first(b, at_b, real_b, a, at_a, real_a), first(a, at_a, real_a, b, at_b, real_b))
    exchange = Loop(j, full // 2, (
        Store(values, low, k.select(swap, b, a)), Store(values, high, k.select(swap, a, b)),
        Store(places, low, k.select(swap, at_b, at_a)), Store(places, high, k.select(swap, at_a, at_b)),
    ), vector=True)  # fmt: skip
    ended = k.eq(step, k.const(1))
    passes = Loop(t, stages * (stages + 1) // 2, (exchange,), carries=(
        Carry(size, const(2), k.select(ended, k.mul(size, k.const(2)), size)),
        Carry(step, const(1), k.select(ended, size, k.div(step, k.const(2)))),
    ))  # fmt: skip
    out = Loop(m, n, (ctx.store(0, coords(m), Load(values, m)), ctx.store(1, coords(m), k.cast(Load(places, m), i64))))
    return grid, (fill, passes, out) if stages else (fill, out)


def _sort_shapes(attrs: SortAttrs, x: Shape) -> tuple[Shape, ...]:
    if not x.rank:
        raise ShapeError("the operand needs a dim to sort along")
    return x, x.with_dtype(i64)


SORTS: tuple[Sample, ...] = (
    Sample(((2, 17),)), Sample(((33,),), {"descending": True}, low=-3, high=3), Sample(((2, 2, 5),), low=0, high=3),
    Sample(((2, 1),)), Sample(((2, 0),)),
)  # fmt: skip
sort = op(
    "sort", kind=Kind.KERNEL, infer=_sort_shapes, attrs=SortAttrs, dtypes="fiu", kernel=_sort_kernel, samples=SORTS, rows=others,
    reference=lambda a, x: _sorted_arrays(x, a.descending),
    doc="Stable sort along the last dim: the sorted elements and their original indices (i64).",
)  # fmt: skip
argsort = op(
    "argsort", kind=Kind.COMPOSITE, infer=lambda a, x: _sort_shapes(a, x)[1], attrs=SortAttrs, dtypes="fiu", samples=SORTS,
    reference=lambda a, x: _sorted_arrays(x, a.descending)[1], decompose=lambda a, x: sort(x, descending=a.descending)[1],
    doc="Indices (i64) that sort the last dim; the sort is stable.",
)  # fmt: skip
TOP_K = (
    Sample(((2, 17),), {"k": 5}), Sample(((33,),), {"k": 33, "largest": False}), Sample(((2, 2, 4),), {"k": 1}),
    Sample(((3, 4),), {"k": 0}),
)  # fmt: skip
top_k = op(
    "top_k", kind=Kind.COMPOSITE, infer=_top_k_shapes, attrs=TopKAttrs, dtypes="fiu", samples=TOP_K,
    reference=lambda a, x: tuple(part[..., : a.k] for part in _sorted_arrays(x, a.largest)),
    decompose=lambda a, x: tuple(slice_axis(part, -1, 0, a.k) for part in sort(x, descending=a.largest)),
    doc="The k largest (or smallest) elements along the last dim, sorted, and their indices (i64); ties are ordered by index.",
)  # fmt: skip
