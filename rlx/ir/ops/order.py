"""Sorting, argmax and cumulative sums along an axis.

NaN orders above every number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.contexts import Applied, Lowering, Padded, PaddingPass, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import f32, i32, i64, index_
from rlx.ir.kernel import Carry, Expr, Let, Loop, Loops, Reduce, Sort, Var, const, k
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.rules import axis_of, lines, others, static_dim
from rlx.ir.shape import Shape

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


def _arg(name: str, reference: Callable[..., np.ndarray], fill: str, doc: str) -> Callable[..., Value]:
    def kernel(ctx: Lowering, node: Applied[ArgAttrs]) -> Loops:
        x, axis = node.inputs[0], axis_of(node.attrs.axis, node.inputs[0].rank)
        grid, at = lines(ctx.dims(x), axis)
        i, found = Var("i"), Var("found")
        loop = Loop(i, ctx.dims(x)[axis], (), vector=True, reduces=(Reduce(found, name, ctx.element(x, at(i))),))
        return grid, (loop, ctx.store(0, at(const(0) if node.attrs.keepdims else None), k.cast(found, i64)))

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
argmax = _arg("argmax", np.argmax, "least", _ARG.format("greatest"))
argmin = _arg("argmin", np.argmin, "greatest", _ARG.format("least"))


# -- cumsum, cumprod -----------------------------------------------------------------------------------------------


class RunningAttrs(Attrs):
    """`exclusive`: each result omits its own element. `reverse`: they start at the end."""

    axis: int = -1
    exclusive: bool = False
    reverse: bool = False


def _running_shape(attrs: RunningAttrs, x: Shape) -> Shape:
    axis_of(attrs.axis, x.rank)
    return x


def _running_partitioned(p: Partitioning, attrs: RunningAttrs, x: Value) -> Parted:
    split = p.split_of(x)
    return "each element needs those before it" if split and split.axis == axis_of(attrs.axis, x.rank) else None


def _running(name: str, scalar: str, unit: int, reference: Callable[..., np.ndarray], doc: str) -> Callable[..., Value]:
    """Totals along an axis, each combined from the one before it and an element; they begin with `unit`."""

    def arrays(attrs: RunningAttrs, x: np.ndarray) -> np.ndarray:
        x = np.flip(x, attrs.axis) if attrs.reverse else x
        total = reference(x, axis=attrs.axis, dtype=x.dtype)
        if attrs.exclusive:
            total = np.roll(total, 1, axis=attrs.axis)
            np.moveaxis(total, attrs.axis, 0)[:1] = unit
        return np.flip(total, attrs.axis) if attrs.reverse else total

    def padded(p: PaddingPass, attrs: RunningAttrs, x: Value) -> Padded:
        """Padding counts as the unit where it precedes data."""
        axis = axis_of(attrs.axis, x.rank)
        behind = attrs.reverse or any(a.outer > 1 for a in p.along(x, axis))
        held = p.masked(x, axis, str(unit), guard=True) if behind else x
        return p.final(made(held, axis=axis, exclusive=attrs.exclusive, reverse=attrs.reverse)) if p.along(x, axis) else None

    def kernel(ctx: Lowering, node: Applied[RunningAttrs]) -> Loops:
        x, attrs = node.inputs[0], node.attrs
        dims, axis = ctx.dims(x), axis_of(attrs.axis, x.rank)
        grid, coords = lines(dims, axis)
        length, dtype, i = dims[axis], x.dtype.compute, Var("i")
        at = coords(k.sub(k.const(length - 1), i) if attrs.reverse else i)
        total = Var("total", dtype)
        following = getattr(k, scalar)(total, ctx.element(x, at))
        store = ctx.store(0, at, total if attrs.exclusive else following)
        carries = (Carry(total, const(unit, dtype), following),)
        return grid, (Loop(i, length, (store,), vector=True, carries=carries),)

    made = op(
        name, kind=Kind.KERNEL, infer=_running_shape, attrs=RunningAttrs, dtypes="fiu", reference=arrays, kernel=kernel,
        rows=lambda a, i, axis, x: axis, padded=padded, partitioned=_running_partitioned,
        samples=(
            Sample(((3, 17),)), Sample(((2, 33, 4),), {"axis": 1, "reverse": True}), Sample(((2, 0),)),
            Sample(((5, 3),), {"axis": 0, "exclusive": True}), Sample(((7,),), {"exclusive": True, "reverse": True}),
        ),
        doc=doc,
    )  # fmt: skip
    return made


cumsum = _running("cumsum", "add", 0, np.cumsum, "Cumulative sum along `axis`, inclusive unless `exclusive`; integers wrap.")
cumprod = _running(
    "cumprod", "mul", 1, np.cumprod, "Cumulative product along `axis`, inclusive unless `exclusive`; integers wrap."
)


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


def best_of(line: np.ndarray, count: int) -> np.ndarray:
    """Indices of the greatest elements, in order."""
    return _sorted_arrays(line, True)[1][:count]


def _sorted(ctx: Lowering, x: Value, count: int, descending: bool) -> Loops:
    """The first `count` elements of each sorted row, and their indices."""
    i, to, origin, held = Var("i"), Var("to"), Var("origin"), Var("held", x.dtype.compute)
    grid, at = lines(ctx.dims(x), x.rank - 1)
    if ctx.dims(x)[-1] == count == 1:
        first = at(k.const(0))
        return grid, (ctx.store(0, first, ctx.element(x, first)), ctx.store(1, first, k.cast(k.const(0), i64)))
    stores = ctx.store(0, at(to), held), ctx.store(1, at(to), k.cast(origin, i64))
    return grid, (Sort(i, ctx.dims(x)[-1], count, ctx.element(x, at(i)), descending, to, held, origin, stores),)


def _sort_kernel(ctx: Lowering, node: Applied[SortAttrs]) -> Loops:
    return _sorted(ctx, node.inputs[0], ctx.dims(node.inputs[0])[-1], node.attrs.descending)


def _sort_shapes(attrs: SortAttrs, x: Shape) -> tuple[Shape, ...]:
    if not x.rank:
        raise ShapeError("the operand needs a dim to sort along")
    return x, x.with_dtype(i64)


SORTS: tuple[Sample, ...] = (
    Sample(((2, 17),)), Sample(((33,),), {"descending": True}, low=-3, high=3), Sample(((2, 2, 5),), low=0, high=3),
    Sample(((2, 1),)), Sample(((1,),)), Sample(((2, 0),)),
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
    Sample(((3, 4),), {"k": 0}), Sample(((1,),), {"k": 1}),
)  # fmt: skip
top_k = op(
    "top_k", kind=Kind.KERNEL, infer=_top_k_shapes, attrs=TopKAttrs, dtypes="fiu", samples=TOP_K, rows=others,
    kernel=lambda ctx, node: _sorted(ctx, node.inputs[0], node.attrs.k, node.attrs.largest),
    reference=lambda a, x: tuple(part[..., : a.k] for part in _sorted_arrays(x, a.largest)),
    doc="The k largest (or smallest) elements along the last dim, sorted, and their indices (i64); ties are ordered by index.",
)  # fmt: skip


# -- a few of few --------------------------------------------------------------------------------------------------

LEAST = -(2**63)


class FewAttrs(Attrs):
    k: int


def _few_shapes(attrs: FewAttrs, x: Shape) -> tuple[Shape, ...]:
    values, ids = _top_k_shapes(TopKAttrs(attrs.k), x)
    if x.dtype.compute != f32:
        raise DTypeError(f"floats of at most 32 bits are ordered, got {x}; use top_k")
    return values, ids.with_dtype(i32)


def ranked(number: Expr, index: Expr) -> Expr:
    """An i64 key whose greatest is the greatest f32, of equal ones that of the least index: the number's place in the order of
    numbers (all NaN are one, and so are zeros), then its index from the end."""
    number = k.add(number, const(0, f32))  # -0.0 becomes 0.0
    bits = k.bitcast(number, dtype=i32)
    ordered = k.select(k.lt(bits, const(0, i32)), k.xor(bits, const(2**31 - 1, i32)), bits)
    ordered = k.select(k.ne(number, number), const(2**31 - 1, i32), ordered)
    return k.or_(k.shl(k.cast(ordered, i64), const(32, i64)), k.cast(k.sub(const(2**31 - 1), index), i64))


def ranked_index(key: Expr) -> Expr:
    return k.cast(k.sub(const(2**31 - 1, i64), k.and_(key, const(2**32 - 1, i64))), index_)


def _few_kernel(ctx: Lowering, node: Applied[FewAttrs]) -> Loops:
    """k passes over a row, each for the greatest key below the last one."""
    x, i, t = node.inputs[0], Var("i"), Var("t")
    grid, at = lines(ctx.dims(x), x.rank - 1)
    last, best, found = Var("last", i64), Var("best", i64), Var("found")
    key = ranked(ctx.element(x, at(i)), i)
    open_ = k.select(k.lt(key, last), key, const(LEAST, i64))
    one = Loop(i, ctx.dims(x)[-1], (), vector=True, reduces=(Reduce(best, "max", open_),))
    index = ranked_index(best)
    stores = ctx.store(0, at(t), ctx.element(x, at(found))), ctx.store(1, at(t), k.cast(found, i32))
    return grid, (Loop(t, node.attrs.k, (one, Let(found, index), *stores), carries=(Carry(last, const(2**63 - 1, i64), best),)),)


top_few = op(
    "top_few", kind=Kind.KERNEL, infer=_few_shapes, attrs=FewAttrs, dtypes="f", kernel=_few_kernel, rows=others,
    reference=lambda a, x: tuple(part[..., : a.k] for part in _sorted_arrays(x, True)),
    samples=tuple(
        Sample(dims, {"k": n}, dtypes=(d,)) for dims, n, d in (
            (((2, 17),), 5, "f32"), (((33,),), 33, "f16"), (((2, 3, 4),), 1, "bf16"), (((3, 4),), 0, "f32"),
            (((2, 64),), 8, "f32"),
        )
    ),
    doc="top_k, with the greatest first and indices in i32, by k passes over the row: for a few elements of short rows.",
)  # fmt: skip
