"""Collectives: ops that move data between ranks.

Every rank runs the same graph on its own data, with the same collectives in the same order. A result depends on the operands
of all ranks, so the reference takes all of them (`OpDef.collective`). `exchange` is the core op, without axes; the others are
views around an exchange.

The loss is the sum of the losses of all ranks, so the derivative of a collective (`OpDef.vjp`) is the transposed collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.attrs import CollectiveAttrs
from rlx.ir.contexts import Applied
from rlx.ir.declare import op
from rlx.ir.graph import constant
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.elementwise import cast, div, equal, where
from rlx.ir.ops.rules import again, axis_of, divide
from rlx.ir.ops.view import reshape, transpose
from rlx.ir.placement import ReduceName
from rlx.ir.shape import DimLike, Shape

ANY = "fiubc"
Arrays = Sequence[np.ndarray]  # one per rank
Rule = Callable[..., Any]


# -- the core op ---------------------------------------------------------------------------------------------------


def _ranks(ranks: int) -> int:
    if ranks < 1:
        raise AttributeValueError(f"ranks is at least 1, got {ranks}")
    return ranks


class ExchangeAttrs(CollectiveAttrs):
    """`kind`: the combination, for reductions. `root`: the source rank, for broadcast."""

    what: Literal["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "rank_part"]
    ranks: int
    kind: ReduceName = "sum"
    root: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.root < _ranks(self.ranks):
            raise AttributeValueError(f"root is one of ranks 0 to {self.ranks - 1}, got {self.root}")

    @property
    def in_place(self) -> bool:
        """True if the result may be written in place over the operand."""
        return self.what in ("all_reduce", "broadcast")

    def elements(self, operand: int) -> int:
        """Number of elements of the result for an operand of this many."""
        parts = operand // self.ranks
        return {"all_gather": operand * self.ranks, "reduce_scatter": parts, "rank_part": parts}.get(self.what, operand)

    def moved(self, nbytes: int) -> int:
        """Lower bound of the bytes that each rank receives for an operand of `nbytes`."""
        part = nbytes * (self.ranks - 1) // self.ranks
        whole = {"all_reduce": 2 * part, "all_gather": nbytes * (self.ranks - 1), "rank_part": 0}
        return whole.get(self.what, nbytes * (self.ranks > 1) if self.what == "broadcast" else part)

    def __str__(self) -> str:
        kind = f" {self.kind}" if "reduce" in self.what else f" from {self.root}" if self.what == "broadcast" else ""
        return f"{self.what}{kind}, {self.ranks} ranks"


def _exchange_shape(attrs: ExchangeAttrs, x: Shape) -> Shape:
    ranks = attrs.ranks
    if "reduce" in attrs.what and x.dtype.kind not in "fiu":
        raise DTypeError(f"the operand is {x.dtype}, a reduction takes floats and integers; cast it first")
    if attrs.what == "all_gather":
        return x.with_dims((ranks, *x.dims))
    if attrs.what in ("all_reduce", "broadcast"):
        return x
    if x.dims[:1] != (ranks,):
        raise ShapeError(f"the first dim counts the ranks, {ranks}, got {x}")
    return x if attrs.what == "all_to_all" else x.with_dims(x.dims[1:])


def combined(kind: str, arrays: Arrays) -> np.ndarray:
    """Elementwise combination in rank order: floats in their dtype, integers in 64 bits, wrapped at the end."""
    dtype = arrays[0].dtype
    wide = {"i": np.dtype(np.int64), "u": np.dtype(np.uint64)}.get(dtype.kind, dtype)
    better = {"max": np.greater, "min": np.less}.get(kind)  # of two zeros the first stays, and NaN wins

    def combine(total: np.ndarray, x: np.ndarray) -> np.ndarray:
        return total + x if better is None else np.where(better(x, total) | (x != x), x, total)

    total = functools.reduce(combine, (a.astype(wide) for a in arrays))
    if kind == "mean":
        count = wide.type(len(arrays))
        total = total / count if dtype.kind == "f" else total // count + ((total < 0) & (total % count != 0))
    return np.asarray(total).astype(dtype)


def _exchanged(attrs: ExchangeAttrs, xs: Arrays) -> Arrays:
    every = range(attrs.ranks)
    if attrs.what in ("all_reduce", "reduce_scatter"):
        total = combined(attrs.kind, xs)
        return [total if attrs.what == "all_reduce" else total[r] for r in every]
    if attrs.what in ("all_gather", "broadcast"):
        return [np.stack(xs) if attrs.what == "all_gather" else xs[attrs.root]] * attrs.ranks
    return [np.stack([x[r] for x in xs]) if attrs.what == "all_to_all" else xs[r][r] for r in every]


def _alone(collective: Callable[..., Arrays]) -> Callable[..., np.ndarray]:
    """OpDef.reference of a collective, for a single rank. rlx.ir.evaluate.evaluate_ranks evaluates several ranks."""

    def run(attrs: Any, x: np.ndarray) -> np.ndarray:
        if attrs.ranks != 1:
            raise AttributeValueError(f"one operand for a collective of {attrs.ranks} ranks; evaluate_ranks takes all of them")
        return collective(attrs, [x])[0]

    return run


def _exchange_rows(attrs: ExchangeAttrs, operand: int, axis: int, x: Shape) -> int | None:
    first = attrs.what in ("reduce_scatter", "rank_part", "all_to_all")  # the dim that counts ranks
    moved = {"all_gather": 1, "reduce_scatter": -1, "rank_part": -1}.get(attrs.what, 0)
    return None if first and axis == 0 else axis + moved


exchange = op(
    "exchange", kind=Kind.COLLECTIVE, infer=_exchange_shape, attrs=ExchangeAttrs, dtypes=ANY, rows=_exchange_rows,
    collective=_exchanged, reference=_alone(_exchanged), parts=again,
    samples=(
        Sample(((3, 7),), {"what": "broadcast", "ranks": 1}),
        Sample(((5,),), {"what": "all_gather", "ranks": 1}),
        Sample(((1, 9),), {"what": "all_to_all", "ranks": 1}), Sample(((1, 3),), {"what": "rank_part", "ranks": 1}),
    ),
    doc="The core collective, on row-major operands. all_gather adds a leading dim of size `ranks`, all_to_all keeps it, "
    "reduce_scatter and rank_part (which moves no data) remove it; all_reduce and broadcast keep the operand's dims.",
)  # fmt: skip


# -- the ops people write ------------------------------------------------------------------------------------------


def _parts(x: Value, axis: int, ranks: int) -> Value:
    """x [.., ranks * d, ..] as [ranks, .., d, ..]."""
    split = reshape(x, dims=(*x.dims[:axis], ranks, divide(x.dims[axis], ranks), *x.dims[axis + 1 :]))
    return transpose(split, axes=(axis, *(a for a in range(split.rank) if a != axis)))


def _whole(parts: Value, axis: int) -> Value:
    """[ranks, .., d, ..] as [.., ranks * d, ..]."""
    ranks, *dims = parts.dims
    order = (*range(1, axis + 1), 0, *range(axis + 1, parts.rank))
    return reshape(transpose(parts, axes=order), dims=(*dims[:axis], ranks * dims[axis], *dims[axis + 1 :]))


def _scaled(x: Shape, axis: int, times: int = 1, by: int = 1) -> Shape:
    """The shape with one dim multiplied by `times` and divided by `by`."""
    axis, d = axis_of(axis, x.rank), x.dims[axis_of(axis, x.rank)]
    part: DimLike | None = divide(d, by)
    if part is None:
        raise ShapeError(f"dim {axis} is {d}, which {by} ranks cannot share equally")
    return x.with_dims((*x.dims[:axis], part * times, *x.dims[axis + 1 :]))


def _is_mine(owner: int, ranks: int) -> Value:
    """bool [1]: True on rank `owner`."""
    return exchange(constant(np.eye(ranks, dtype=np.bool_)[owner].reshape(ranks, 1)), what="rank_part", ranks=ranks)


def _declare(
    name: str, doc: str, attrs: type[Attrs], infer: Rule, collective: Rule, decompose: Rule, vjp: Rule, **facts: Any
) -> Rule:
    def shape(a: Any, x: Shape) -> Shape:
        _ranks(a.ranks)
        return infer(a, x)

    return op(
        name, kind=Kind.COMPOSITE, infer=shape, attrs=attrs, collective=collective, reference=_alone(collective), doc=doc,
        vjp=vjp, decompose=lambda a, x: x if a.ranks == 1 else decompose(a, x), **facts,
    )  # fmt: skip


class AllReduceAttrs(Attrs):
    ranks: int
    kind: ReduceName = "sum"


class AxisAttrs(Attrs):
    ranks: int
    axis: int = 0


class ReduceScatterAttrs(Attrs):
    ranks: int
    axis: int = 0
    kind: ReduceName = "sum"


class RootAttrs(Attrs):
    ranks: int
    root: int = 0


class AllToAllAttrs(Attrs):
    ranks: int
    split_axis: int = 0
    concat_axis: int = 0


def _all_reduce_vjp(node: Applied[AllReduceAttrs], g: Value) -> Value:
    """Sum and mean are their own transposes. For max and min, the ranks that hold the result share its gradient equally."""
    attrs, x, y = node.attrs, node.inputs[0], node.results[0]
    if attrs.kind in ("sum", "mean"):
        return all_reduce(g, ranks=attrs.ranks, kind=attrs.kind)
    due, holds = all_reduce(g, ranks=attrs.ranks), equal(x, y)
    return where(holds, div(due, all_reduce(cast(holds, dtype=x.dtype), ranks=attrs.ranks)), 0)


def _reduce_scatter_vjp(node: Applied[ReduceScatterAttrs], g: Value) -> Value:
    if node.attrs.kind in ("max", "min"):
        raise AttributeValueError(f"reduce_scatter of kind {node.attrs.kind} has no derivative; use all_reduce and rank_slice")
    whole = all_gather(g, ranks=node.attrs.ranks, axis=node.attrs.axis)
    return div(whole, node.attrs.ranks) if node.attrs.kind == "mean" else whole


def _rank_slice_vjp(node: Applied[AxisAttrs], g: Value) -> Value:
    """Zeros, with `g` at this rank's part."""
    ranks, axis = node.attrs.ranks, axis_of(node.attrs.axis, node.inputs[0].rank)
    mine = exchange(constant(np.eye(ranks, dtype=np.bool_)[:, :, None]), what="rank_part", ranks=ranks)
    mine = reshape(mine, dims=(ranks, *(1 for _ in g.dims)))
    return _whole(where(mine, reshape(g, dims=(1, *g.dims)), 0), axis)


def _all_to_all_shape(a: AllToAllAttrs, x: Shape) -> Shape:
    return _scaled(_scaled(x, a.split_axis, by=a.ranks), a.concat_axis, times=a.ranks)


def _all_to_all_arrays(a: AllToAllAttrs, xs: Arrays) -> Arrays:
    parts = [np.split(x, a.ranks, a.split_axis) for x in xs]
    return [np.concatenate([p[r] for p in parts], a.concat_axis) for r in range(a.ranks)]


def _all_to_all(a: AllToAllAttrs, x: Value) -> Value:
    split, joined = axis_of(a.split_axis, x.rank), axis_of(a.concat_axis, x.rank)
    return _whole(exchange(_parts(x, split, a.ranks), what="all_to_all", ranks=a.ranks), joined)


all_reduce = _declare(
    "all_reduce", "Combines the operands of all ranks elementwise in rank order (sum, mean, max or min) and gives every rank the "
    "result. 16-bit and 8-bit floats are summed in f32 and integers in 64 bits; a mean of integers is truncated.",
    AllReduceAttrs, lambda a, x: x, lambda a, xs: [combined(a.kind, xs)] * a.ranks,
    lambda a, x: exchange(x, what="all_reduce", kind=a.kind, ranks=a.ranks), _all_reduce_vjp,
    dtypes="fiu", rows=lambda a, operand, axis, x: axis,
    samples=(Sample(((3, 7),), {"ranks": 1}), Sample(((33,),), {"kind": "max", "ranks": 1}), Sample(((),), {"ranks": 1})),
)  # fmt: skip
all_gather = _declare(
    "all_gather", "Concatenates the operands of all ranks along `axis` in rank order, on every rank.",
    AxisAttrs, lambda a, x: _scaled(x, a.axis, times=a.ranks), lambda a, xs: [np.concatenate(xs, a.axis)] * a.ranks,
    lambda a, x: _whole(exchange(x, what="all_gather", ranks=a.ranks), axis_of(a.axis, x.rank)),
    lambda node, g: reduce_scatter(g, ranks=node.attrs.ranks, axis=node.attrs.axis), dtypes=ANY,
    samples=(Sample(((3, 7),), {"axis": -1, "ranks": 1}), Sample(((5,),), {"ranks": 1})),
)  # fmt: skip
reduce_scatter = _declare(
    "reduce_scatter", "Splits the all_reduce result into equal parts along `axis` and gives part r to rank r.",
    ReduceScatterAttrs, lambda a, x: _scaled(x, a.axis, by=a.ranks),
    lambda a, xs: np.split(combined(a.kind, xs), a.ranks, a.axis),
    lambda a, x: exchange(_parts(x, axis_of(a.axis, x.rank), a.ranks), what="reduce_scatter", kind=a.kind, ranks=a.ranks),
    _reduce_scatter_vjp, dtypes="fiu",
    samples=(Sample(((3, 7),), {"axis": 1, "ranks": 1}), Sample(((9,),), {"kind": "mean", "ranks": 1})),
)  # fmt: skip
broadcast_rank = _declare(
    "broadcast_rank", "Copies the operand of rank `root` to every rank.",
    RootAttrs, lambda a, x: _exchange_shape(ExchangeAttrs("broadcast", a.ranks, root=a.root), x),
    lambda a, xs: [xs[a.root]] * a.ranks,
    lambda a, x: exchange(x, what="broadcast", root=a.root, ranks=a.ranks),
    lambda node, g: where(_is_mine(node.attrs.root, node.attrs.ranks), all_reduce(g, ranks=node.attrs.ranks), 0),
    dtypes=ANY, rows=lambda a, operand, axis, x: axis,
    samples=(Sample(((3, 7),), {"ranks": 1}), Sample(((5,),), {"root": 0, "ranks": 1})),
)  # fmt: skip
all_to_all = _declare(
    "all_to_all", "Splits every rank's operand into equal parts along `split_axis` and sends part r to rank r, which "
    "concatenates the received parts along `concat_axis` in rank order.",
    AllToAllAttrs, _all_to_all_shape, _all_to_all_arrays, _all_to_all,
    lambda node, g: all_to_all(g, node.attrs.ranks, node.attrs.concat_axis, node.attrs.split_axis), dtypes=ANY,
    samples=(Sample(((3, 7),), {"split_axis": 1, "concat_axis": 0, "ranks": 1}), Sample(((5,),), {"ranks": 1})),
)  # fmt: skip
rank_slice = _declare(
    "rank_slice", "Splits the operand into equal parts along `axis` and keeps part r on rank r. No data moves between ranks.",
    AxisAttrs, lambda a, x: _scaled(x, a.axis, by=a.ranks),
    lambda a, xs: [np.split(x, a.ranks, a.axis)[r] for r, x in enumerate(xs)],
    lambda a, x: exchange(_parts(x, axis_of(a.axis, x.rank), a.ranks), what="rank_part", ranks=a.ranks),
    _rank_slice_vjp, dtypes=ANY,
    samples=(Sample(((3, 7),), {"axis": -1, "ranks": 1}), Sample(((5,),), {"ranks": 1})),
)  # fmt: skip
