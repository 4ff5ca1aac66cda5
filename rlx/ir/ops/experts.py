"""Mixture of experts: routing of tokens, rows grouped by expert, and products of groups of rows with a matrix each.

A block of experts: `route` chooses experts for each token, `group_rows` orders the choices by expert, rows of tokens are gathered
in that order, `segment_matmul` multiplies each group by its expert's weights, and the results, back in the order of tokens, are
summed by their weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar, get_args

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, IndexRangeError, ShapeError, known
from rlx.ir.blocks import FORMATS
from rlx.ir.contexts import Applied, Coords, Lowering, Padded, PaddingPass, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import f32, i32, index_
from rlx.ir.kernel import Carry, Check, Expr, Loop, Loops, Reduce, Var, const, k
from rlx.ir.node import ConstantAttrs, Value
from rlx.ir.op import Attrs, Contraction, Kind, Sample
from rlx.ir.ops.activation import sigmoid
from rlx.ir.ops.contract import matmul
from rlx.ir.ops.elementwise import equal, exp, less_equal, minimum, where
from rlx.ir.ops.index import INDEX_OUT_OF_RANGE, check_range, concat, gather, iota
from rlx.ir.ops.order import best_of, top_few, top_k
from rlx.ir.ops.quant import check_rows, dequantize, random_weights
from rlx.ir.ops.reduce import any as any_of
from rlx.ir.ops.reduce import max as max_of
from rlx.ir.ops.reduce import softmax
from rlx.ir.ops.reduce import sum as sum_of
from rlx.ir.ops.rules import integer, static_dim
from rlx.ir.ops.view import transpose
from rlx.ir.placement import REPLICATED, Partial, Split
from rlx.ir.shape import Shape

T = TypeVar("T", Value, np.ndarray)
NO_GROUP = 2**31 - 1  # the id of rows that belong to no group

# -- routing -------------------------------------------------------------------------------------------------------


class RouterAttrs(Attrs):
    """`experts`: ids are below this number. `ahead`: so many rows at the end are no choice, but a guess of what the next router
    will choose."""

    experts: int
    ahead: int = 0


def _ids(label: str, ids: Shape) -> None:
    if ids.dtype != i32:
        raise DTypeError(f"{label} are i32, got {ids}; cast them: x.astype('i32')")


def _router_shape(attrs: RouterAttrs, ids: Shape) -> Shape:
    _ids("the ids of experts", ids)
    if ids.rank != 2:
        raise ShapeError(f"the ids of experts are [tokens, k], got {ids}")
    if attrs.ahead and not 0 < attrs.ahead < static_dim(ids.dims[0], "router"):
        raise AttributeValueError(f"ahead={attrs.ahead} is not some of the {ids.dims[0]} rows")
    return ids


def _router_element(ctx: Lowering, node: Applied[RouterAttrs], result: int, coords: Coords) -> Expr:
    return ctx.element(node.inputs[0], tuple(const(0) if d == 1 else c for d, c in zip(ctx.dims(node.inputs[0]), coords)))


router = op(
    "router", kind=Kind.INDEX, infer=_router_shape, attrs=RouterAttrs, dtypes="i", reference=lambda attrs, ids: np.array(ids),
    element=_router_element, own_memory=True, observed=True, rows=lambda attrs, operand, axis, ids: axis,
    samples=(
        Sample(((3, 2),), {"experts": 5}, low=0, high=5, dtypes=("i32",)),
        Sample(((1, 8),), {"experts": 64}, low=0, high=64, dtypes=("i32",)),
        Sample(((0, 2),), {"experts": 4}, dtypes=("i32",)),
        Sample(((4, 2),), {"experts": 4, "ahead": 2}, low=0, high=4, dtypes=("i32",)),
    ),
    doc="Marks the choice of experts, i32 [tokens, k]: the result is ids, in memory of its own, where the runtime finds it "
    "after a run. `route` has one inside.",
)  # fmt: skip

Scoring = Literal["softmax", "top_k_softmax", "sigmoid"]


class RouteAttrs(Attrs):
    """`scoring`: weights are the softmax over all experts, over the chosen ones, or the sigmoid of each score. `renormalise`: the
    weights of a token sum to 1; `scale` multiplies them. `groups`: experts are in so many equal groups, and chosen from the best
    `top_groups` of them; a group counts by its best score, with `sigmoid` by the sum of its two best."""

    k: int
    scoring: Scoring = "softmax"
    renormalise: bool = False
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1

    def __post_init__(self) -> None:
        if self.scoring not in get_args(Scoring):
            raise AttributeValueError(f"scoring is one of {', '.join(get_args(Scoring))}, got {self.scoring!r}")
        if self.k < 1 or not 1 <= self.top_groups <= self.groups:
            raise AttributeValueError(
                f"a token takes at least one expert, from 1 to {self.groups} groups; got k={self.k}, top_groups={self.top_groups}"
            )


def _route_shapes(attrs: RouteAttrs, scores: Shape, *more: Shape) -> tuple[Shape, Shape]:
    if scores.rank != 2:
        raise ShapeError(f"the scores are [tokens, experts], got {scores}")
    experts = static_dim(scores.dims[1], "route")
    each, odd = divmod(experts, attrs.groups)
    if odd or attrs.k > each * attrs.top_groups or (attrs.groups > 1 and attrs.scoring == "sigmoid" and each < 2):
        raise AttributeValueError(
            f"{attrs.k} of {experts} experts cannot be chosen from {attrs.top_groups} of {attrs.groups} equal groups"
        )
    chosen, bias = scores.with_dims((scores.dims[0], attrs.k)), scores.with_dims(scores.dims[1:])
    ids = chosen.with_dtype(i32)
    if more and more not in ((bias,), (ids,), (bias, ids)):
        raise ShapeError(f"after the scores come a bias {bias}, or a guess {ids}, or both; got {', '.join(map(str, more))}")
    return ids, chosen.with_dtype(scores.dtype.compute)


def _best(x: Value, count: int) -> tuple[Value, Value]:
    """The greatest of each row, and their indices in i32."""
    if x.dtype.compute == f32:
        return top_few(x, k=count)
    found, ids = top_k(x, k=count)
    return found, ids.astype(i32)


def _activated(attrs: RouteAttrs, scores: Value) -> Value:
    return sigmoid(scores) if attrs.scoring == "sigmoid" else softmax(scores, axis=-1)


def _of_best_groups(attrs: RouteAttrs, choice: Value) -> Value:
    """The scores by which experts are chosen, -inf in all groups but the best."""
    tokens, experts = choice.dims[0], static_dim(choice.dims[1], "route")
    groups = choice.reshape((tokens, attrs.groups, experts // attrs.groups))
    best = sum_of(_best(groups, 2)[0], axis=-1) if attrs.scoring == "sigmoid" else max_of(groups, axis=-1)
    chosen = _best(best, attrs.top_groups)[1].reshape((tokens, 1, attrs.top_groups))
    here = any_of(equal(chosen, iota(dims=(attrs.groups, 1), dtype=i32)), axis=-1)
    return where(here.reshape((tokens, attrs.groups, 1)), groups, -math.inf).reshape((tokens, experts))


def _apart(more: Sequence[T]) -> tuple[T | None, T | None]:
    """The bias and the guess among the operands after the scores."""
    bias = more[0] if more and len(more[0].shape) == 1 else None
    return bias, None if not more or more[-1] is bias else more[-1]


def _route(attrs: RouteAttrs, scores: Value, *more: Value) -> tuple[Value, Value]:
    """Softmax and sigmoid keep the order of scores, so that experts are chosen by the scores themselves where these are not
    added to anything."""
    bias, guess = _apart(more)
    scores, choice = scores.astype(scores.dtype.compute), scores.astype(scores.dtype.compute)
    tokens, experts, summed = scores.dims[0], scores.dims[1], attrs.scoring == "sigmoid" and attrs.groups > 1
    if bias is not None or summed:
        choice = _activated(attrs, scores)
        choice = choice if bias is None else choice + bias.astype(choice.dtype)
    found, ids = _best(choice if attrs.groups == 1 else _of_best_groups(attrs, choice), attrs.k)
    if bias is not None or summed:  # the scores of the chosen: those of all others count as 0
        mine = equal(ids.reshape((tokens, attrs.k, 1)), iota(dims=(experts,), dtype=i32))
        found = sum_of(where(mine, scores.reshape((tokens, 1, experts)), 0.0), axis=-1)
    if attrs.scoring == "sigmoid":
        weights = sigmoid(found)
        weights = weights / (sum_of(weights, axis=-1, keepdims=True) + 1e-20) if attrs.renormalise else weights
    elif attrs.renormalise or attrs.scoring == "top_k_softmax":
        weights = softmax(found, axis=-1)
    else:
        top = max_of(scores, axis=-1, keepdims=True)
        weights = exp(found - top) / sum_of(exp(scores - top), axis=-1, keepdims=True)
    weights = weights * attrs.scale if attrs.scale != 1.0 else weights
    if guess is None:
        return router(ids, experts=experts), weights
    rows = static_dim(tokens, "route")
    return router(concat(ids, guess, axis=0), experts=experts, ahead=rows)[:rows], weights


def _route_arrays(attrs: RouteAttrs, scores: np.ndarray, *more: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One token after the other."""
    bias = _apart(more)[0]
    ids, weights = (np.zeros((len(scores), attrs.k), dtype) for dtype in (np.int32, np.float64))
    is_sigmoid, least = attrs.scoring == "sigmoid", 1e-20 if attrs.scoring == "sigmoid" else 0.0
    for token, line in enumerate(scores.astype(np.float64)):
        e = np.exp(line - np.max(line))
        probability = 1 / (1 + np.exp(-line)) if is_sigmoid else e / np.sum(e)
        choice = line if bias is None and (attrs.groups == 1 or not is_sigmoid) else probability + (0 if bias is None else bias)
        parts = np.sort(choice.reshape(attrs.groups, -1), axis=1)
        best = parts[:, -2:].sum(1) if is_sigmoid and attrs.groups > 1 else parts[:, -1]
        allowed = np.isin(np.arange(len(line)) // parts.shape[1], best_of(best, attrs.top_groups))
        ids[token] = best_of(np.where(allowed, choice, -np.inf), attrs.k)
        weights[token] = probability[ids[token]]
        if attrs.renormalise or attrs.scoring == "top_k_softmax":
            weights[token] /= np.sum(weights[token]) + least
    return ids, weights * attrs.scale


route = op(
    "route", kind=Kind.COMPOSITE, infer=_route_shapes, attrs=RouteAttrs, arity=(1, 3),
    reference=_route_arrays, decompose=_route,
    samples=(
        Sample(((3, 17),), {"k": 4}), Sample(((5, 8),), {"k": 2, "renormalise": True}),
        Sample(((2, 8),), {"k": 8, "scoring": "top_k_softmax"}), Sample(((4, 6),), {"k": 3, "scoring": "sigmoid", "scale": 2.5}),
        Sample(((3, 16), (16,)), {"k": 4, "scoring": "sigmoid", "renormalise": True, "groups": 4, "top_groups": 2}),
        Sample(((3, 12),), {"k": 3, "groups": 3, "top_groups": 2, "scale": 16.0}), Sample(((1, 1),), {"k": 1}),
        Sample(((3, 8), (8,)), {"k": 2}), Sample(((0, 4),), {"k": 2}),
    ),
    doc="Chooses k experts for each token by scores [tokens, experts]: (ids i32 [tokens, k], best first; their weights "
    "[tokens, k]). A bias [experts] is added to the softmax or sigmoid for the choice, and not to the weights. Ties are "
    "ordered by id. A guess of what the next router will choose, i32 [tokens, k], is kept beside the choice for the runtime.",
)  # fmt: skip

# -- grouping ------------------------------------------------------------------------------------------------------


class GroupsAttrs(Attrs):
    groups: int


def _group_shapes(attrs: GroupsAttrs, ids: Shape) -> tuple[Shape, ...]:
    _ids("the ids", ids)
    if ids.rank != 1 or attrs.groups < 1:
        raise ShapeError(f"the ids are [rows], in at least one group, got {ids} and {attrs.groups} groups")
    return ids, ids, ids.with_dims((attrs.groups,))


def _group_arrays(attrs: GroupsAttrs, ids: np.ndarray) -> tuple[np.ndarray, ...]:
    check_range(ids[ids != NO_GROUP], attrs.groups, "group_rows")
    order = np.argsort(ids, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(ids))
    return order, place, np.searchsorted(ids[order], np.arange(attrs.groups), side="right")


def _group_kernel(ctx: Lowering, node: Applied[GroupsAttrs]) -> Loops:
    """A grid point for each group, and one for the rows of none: it counts the rows of earlier groups, then places its own."""
    (ids,), groups = node.inputs, node.attrs.groups
    rows, group, i, j, first, at = ctx.dims(ids)[0], Var("group"), Var("i"), Var("j"), Var("first"), Var("at")
    there, here = (k.cast(ctx.element(ids, (c,)), index_) for c in (i, j))
    known_id = k.or_(k.and_(k.le(k.const(0), there), k.lt(there, groups)), k.eq(there, NO_GROUP))
    one = lambda test: k.select(test, k.const(1), k.const(0))  # noqa: E731
    last = k.const(groups)
    before = Reduce(first, "add", one(k.lt(there, group)))
    count = Loop(i, rows, (Check(known_id, INDEX_OUT_OF_RANGE),), vector=True, reduces=(before,))
    mine = k.or_(k.eq(here, group), k.and_(k.eq(group, last), k.lt(last, here)))
    stores = ctx.store(0, (at,), k.cast(j, i32), mine), ctx.store(1, (j,), k.cast(at, i32), mine)
    place = Loop(j, rows, stores, carries=(Carry(at, first, k.add(at, one(mine))),))
    return ((group, groups + 1),), (count, place, ctx.store(2, (group,), k.cast(at, i32), k.lt(group, last)))


def _group_padded(p: PaddingPass, attrs: GroupsAttrs, ids: Value) -> Padded:
    """Rows that hold no data belong to no group: they come last, in the order and in memory."""
    if any(a.outer > 1 for a in p.along(ids, 0)):
        return "rows that hold data must come before all others"
    made = group_rows(p.masked(ids, 0, "greatest", guard=True), groups=attrs.groups)
    return p.final(made) if p.along(ids, 0) else None


group_rows = op(
    "group_rows", kind=Kind.KERNEL, infer=_group_shapes, attrs=GroupsAttrs, dtypes="i", reference=_group_arrays,
    kernel=_group_kernel, rows=lambda attrs, operand, axis, ids: (0, 0, None), padded=_group_padded,
    partitioned=lambda p, attrs, ids: "each rank needs all ids",
    samples=tuple(
        Sample(((rows,),), {"groups": groups}, low=0, high=high, dtypes=("i32",))
        for rows, groups, high in ((17, 5, 5), (33, 64, 64), (9, 4, 1), (8, 1, 1), (0, 3, 1))
    ),
    doc="Groups rows by id, i32 [rows]: (order i32 [rows]: the row at each place, stable; place i32 [rows]: its inverse; ends "
    "i32 [groups]: the end of each group). An id is below `groups`, or 2**31 - 1: a row of no group, which comes last. "
    "Other ids are an IndexRangeError.",
)  # fmt: skip


class EndsAttrs(Attrs):
    rows: int


def _ends_shape(attrs: EndsAttrs, sizes: Shape) -> Shape:
    _ids("the sizes of groups", sizes)
    if sizes.rank != 1:
        raise ShapeError(f"the sizes are [groups], got {sizes}")
    return sizes


def _ends_array(attrs: EndsAttrs, sizes: np.ndarray) -> np.ndarray:
    if np.any(sizes < 0) or int(np.sum(sizes, dtype=np.int64)) != attrs.rows:
        raise IndexRangeError(f"group_ends: the sizes of groups must be at least 0 and sum to {attrs.rows}, got {sizes}")
    return np.cumsum(sizes, dtype=np.int64)


def _ends_kernel(ctx: Lowering, node: Applied[EndsAttrs]) -> Loops:
    sizes, i, total = node.inputs[0], Var("i"), Var("total")
    size = k.cast(ctx.element(sizes, (i,)), index_)
    end = k.add(total, size)
    body = Check(k.le(k.const(0), size), INDEX_OUT_OF_RANGE), ctx.store(0, (i,), k.cast(end, i32))
    loop = Loop(i, ctx.dims(sizes)[0], body, carries=(Carry(total, const(0), end),))
    return (), (loop, Check(k.eq(total, k.const(node.attrs.rows)), INDEX_OUT_OF_RANGE))


def _two_groups(rng: np.random.Generator, operands: list[np.ndarray]) -> None:
    """Random sizes of groups that sum to the rows of operand 0 (a product), or to 9."""
    sizes = operands[-1]
    rows = len(operands[0]) if len(operands) > 1 else 9
    sizes[:] = np.bincount(rng.integers(0, len(sizes), rows), minlength=len(sizes))


group_ends = op(
    "group_ends", kind=Kind.KERNEL, infer=_ends_shape, attrs=EndsAttrs, dtypes="i", reference=_ends_array, kernel=_ends_kernel,
    partitioned=lambda p, attrs, sizes: "each end depends on all sizes before it",
    padded=lambda p, attrs, sizes: "the sizes sum to all rows" if p.of(sizes) else None,
    samples=(
        Sample(((5,),), {"rows": 9}, dtypes=("i32",), settle=_two_groups),
        Sample(((1,),), {"rows": 9}, dtypes=("i32",), settle=_two_groups),
    ),
    doc="Ends of groups, i32 [groups], from their sizes. Sizes below 0, or that do not sum to `rows`, are an IndexRangeError.",
)  # fmt: skip

# -- products ------------------------------------------------------------------------------------------------------


class SegmentAttrs(Attrs):
    """`format`: weights are quantised blocks of this format in FORMATS; "": they are numbers. `exact`: see dequant_matmul."""

    format: str = ""
    exact: bool = False

    def __post_init__(self) -> None:
        if self.format and self.format not in FORMATS:
            raise AttributeValueError(f"no quantised format is called {self.format!r}; known: {known(FORMATS)}")


def _segment_shape(attrs: SegmentAttrs, x: Shape, w: Shape, ends: Shape) -> Shape:
    integer("the ends of groups", ends)
    if x.rank != 2 or w.rank != 3 or ends.dims != w.dims[:1] or w.dims[0] == 0:
        weights = "[groups, n, row bytes]" if attrs.format else "[groups, k, n]"
        raise ShapeError(f"x is [rows, k], the weights are {weights}, one integer for each group; got {x}, {w} and {ends}")
    if attrs.format:
        check_rows(FORMATS[attrs.format], static_dim(x.dims[1], "segment_matmul"), w)
        return x.with_dims((x.dims[0], w.dims[1]))
    return matmul.op.infer(None, x, w.with_dims(w.dims[1:]))  # type: ignore[attr-defined]


def _segment_array(attrs: SegmentAttrs, x: np.ndarray, w: np.ndarray, ends: np.ndarray) -> np.ndarray:
    if attrs.format:
        w = np.swapaxes(FORMATS[attrs.format].decode_rows(w, x.shape[1]), 1, 2)
    out, start = np.zeros((len(x), w.shape[2]), np.result_type(x, w)), 0
    for group, end in enumerate(ends):
        end = len(x) if group == len(w) - 1 else min(max(int(end), start), len(x))
        out[start:end] = x[start:end] @ w[group].astype(out.dtype)
        start = end
    return out


def _segment_product(attrs: SegmentAttrs, x: Shape, w: Shape, ends: Shape) -> Contraction:
    b_sum, columns = (2, 1) if attrs.format else (1, 2)
    return Contraction(a_batch=(), a_rows=(0,), a_sum=(1,), b_batch=(), b_sum=(b_sum,), b_columns=(columns,), group=0)


def _segment_padded(p: PaddingPass, attrs: SegmentAttrs, x: Value, w: Value, ends: Value) -> Padded:
    """Rows that hold no data come last, so they are in the last group, if in any."""
    if p.of(w) or p.of(ends) or any(a.axis or a.outer > 1 for a in p.of(x)):
        return "of its operands only x may have rows that hold no data, after all others"
    return p.final(segment_matmul(x, w, ends, format=attrs.format, exact=attrs.exact)) if p.of(x) else None


def _segment_partitioned(p: Partitioning, attrs: SegmentAttrs, x: Value, w: Value, ends: Value) -> Parted:
    """Ranks may share the columns of every expert, or the elements that are summed, of packed weights in whole blocks."""
    of_x, of_w, (summed, columns) = p.split_of(x), p.split_of(w), (2, 1) if attrs.format else (1, 2)
    size, block = (FORMATS[attrs.format].nbytes, FORMATS[attrs.format].block) if attrs.format else (1, 1)
    own_x, own_w, result = REPLICATED, of_w, None
    if of_w is not None and of_w.axis == columns:
        result = Split(1, of_w.parts)
    elif of_w is not None and of_w.axis == summed and not any(part % (size * p.ranks) for part in of_w.parts):
        own_x, result = Split(1, tuple(part // size * block for part in of_w.parts)), Partial("sum")
    elif of_w is None and of_x is not None and of_x.axis == 1 and not any(part % (block * p.ranks) for part in of_x.parts):
        own_x, own_w = of_x, Split(summed, tuple(part // block * size for part in of_x.parts))
        result = Partial("sum")
    if own_w is None or result is None:
        return "each rank needs all experts and all rows" + (", and whole blocks of weights" if attrs.format else "")
    made = segment_matmul(p.at(x, own_x), p.at(w, own_w), p.at(ends, REPLICATED), format=attrs.format, exact=attrs.exact)
    return [(made, result)]


def _segment_flops(operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], attrs: object) -> int:
    return 2 * math.prod(operands[0]) * results[0][-1]


def _segment(attrs: SegmentAttrs, x: Value, w: Value, ends: Value) -> Value:
    """One product for each row, with the weights of its group; or one for each group, if all are known to have as many rows."""
    (rows, depth), groups, given = x.shape.static, w.shape.static[0], ends.node.attrs
    width, mine, lead = w.shape.static[1 if attrs.format else 2], w, (rows, 1)
    if isinstance(given, ConstantAttrs) and np.array_equal(given.data.astype(int) * groups, rows * np.arange(1, groups + 1)):
        lead = (groups, rows // groups)
    else:
        before = less_equal(ends.astype(i32), iota(dims=(rows, 1), dtype=i32)).astype(i32)
        mine = gather(w, minimum(sum_of(before, axis=1), groups - 1))
    if attrs.format:
        wide = x.dtype.compute
        mine = transpose(dequantize(mine, attrs.format, depth).astype(wide), axes=(0, 2, 1))
        return matmul(x.astype(wide).reshape((*lead, depth)), mine).reshape((rows, width)).astype(x.dtype)
    return matmul(x.reshape((*lead, depth)), mine).reshape((rows, width))


Settle: TypeAlias = "Callable[[np.random.Generator, list[np.ndarray]], None]"  # a string: np.random takes 7 ms to import


def _settled(form: str) -> Settle:
    def settle(rng: np.random.Generator, operands: list[np.ndarray]) -> None:
        _two_groups(rng, operands)
        operands[-1][:] = np.cumsum(operands[-1])
        if form:
            random_weights(FORMATS[form])(rng, operands)

    return settle


SEGMENTS = ((17, 5, 33, 4), (3, 16, 49, 8), (9, 7, 5, 1), (1, 33, 3, 2), (0, 3, 2, 2))
segment_matmul = op(
    "segment_matmul", kind=Kind.COMPOSITE, infer=_segment_shape, attrs=SegmentAttrs, arity=(3, 3), dtypes="f", roles="xxi",
    reference=_segment_array, decompose=_segment, product=_segment_product, flops=_segment_flops,
    padded=_segment_padded, partitioned=_segment_partitioned,
    samples=(
        *(Sample(((m, c), (e, c, n), (e,)), dtypes=("", "", "i32"), settle=_settled("")) for m, c, n, e in SEGMENTS),
        *(
            Sample(((m, f.block), (e, n, f.nbytes), (e,)), {"format": f.name}, dtypes=("", "u8", "i32"), settle=_settled(f.name))
            for f, m, n, e in ((FORMATS["q8_0"], 7, 33, 3), (FORMATS["q4_k"], 5, 32, 2), (FORMATS["q6_k"], 2, 5, 4))
        ),
    ),
    doc="Product of groups of rows with a matrix each: rows ends[g - 1] to ends[g] of x [rows, k] times w[g] of w [groups, k, "
    "n]; the last group has all rows that are left. `ends`, i32 [groups], must ascend. With a `format`, the weights are "
    "quantised blocks, u8 [groups, n, row bytes], as in dequant_matmul.",
)  # fmt: skip


def _grouped(attrs: SegmentAttrs, x: Value, w: Value, sizes: Value) -> Value:
    return segment_matmul(x, w, group_ends(sizes, rows=x.shape.static[0]), format=attrs.format, exact=attrs.exact)


def _grouped_array(attrs: SegmentAttrs, x: np.ndarray, w: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    return _segment_array(attrs, x, w, _ends_array(EndsAttrs(len(x)), sizes))


grouped_matmul = op(
    "grouped_matmul", kind=Kind.COMPOSITE, infer=_segment_shape, attrs=SegmentAttrs, arity=(3, 3), dtypes="f", roles="xxi",
    reference=_grouped_array, decompose=_grouped,
    samples=tuple(Sample(((m, c), (e, c, n), (e,)), dtypes=("", "", "i32"), settle=_two_groups) for m, c, n, e in SEGMENTS),
    doc="Product of groups of rows with a matrix each: the first sizes[0] rows of x [rows, k] times w[0], the next sizes[1] "
    "times w[1], and so on, with w [groups, k, n] and sizes i32 [groups]; a group may be empty. Sizes that do not sum to "
    "the rows are an IndexRangeError. `format`: as in segment_matmul.",
)  # fmt: skip
