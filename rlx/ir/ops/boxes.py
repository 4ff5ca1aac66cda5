"""Boxes around objects in an image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.contexts import Applied, Lowering
from rlx.ir.declare import op
from rlx.ir.dtype import f32, i64
from rlx.ir.kernel import Carry, Expr, Let, Load, Loop, Loops, Reduce, Stmt, Store, Var, const, k
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.order import LEAST, ranked, ranked_index
from rlx.ir.ops.rules import same_dtype, static_dim
from rlx.ir.shape import Shape


class SuppressionAttrs(Attrs):
    """`most`: of each class so many boxes at most. `overlap`: of two boxes with a greater ratio of intersection to union, the one
    with the lower score goes. `least`: so do boxes whose score is not above it."""

    most: int
    overlap: float = 0.5
    least: float = -math.inf

    def __post_init__(self) -> None:
        if self.most < 0:
            raise AttributeValueError(f"most is a number of boxes, got {self.most}")


def _shapes(attrs: SuppressionAttrs, boxes: Shape, scores: Shape) -> tuple[Shape, Shape]:
    same_dtype(boxes, scores)
    if boxes.dtype.compute != f32:
        raise DTypeError(f"boxes are floats of at most 32 bits, got {boxes}; cast them: x.astype('f32')")
    if boxes.rank != 3 or scores.rank != 3 or boxes.dims != (scores.dims[0], scores.dims[2], 4):
        raise ShapeError(f"boxes are [batch, n, 4] and scores [batch, classes, n], got {boxes} and {scores}")
    count = scores.with_dtype(i64).with_dims(scores.dims[:2])
    return count.with_dims((*scores.dims[:2], min(attrs.most, static_dim(scores.dims[2], "non_max_suppression")))), count


def _arrays(attrs: SuppressionAttrs, boxes: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    batch, classes, n = scores.shape
    ids, counts = np.full((batch, classes, min(attrs.most, n)), -1), np.zeros((batch, classes), np.int64)
    low, high = np.minimum(boxes[..., :2], boxes[..., 2:]), np.maximum(boxes[..., :2], boxes[..., 2:])
    area = np.prod(high - low, axis=-1)
    for b, c in np.ndindex(batch, classes):
        left = scores[b, c] > attrs.least
        while left.any() and counts[b, c] < ids.shape[2]:
            best = int(np.argmax(np.where(left, scores[b, c], -np.inf)))
            if scores[b, c, best] == -np.inf:
                break
            ids[b, c, counts[b, c]] = best
            counts[b, c] += 1
            common = np.prod(np.maximum(np.minimum(high[b], high[b, best]) - np.maximum(low[b], low[b, best]), 0), axis=-1)
            with np.errstate(invalid="ignore", divide="ignore"):
                ratio = common / (area[b] + area[b, best] - common)
            left &= ~((common > 0) & (area[b] > 0) & (area[b, best] > 0) & (ratio > boxes.dtype.type(attrs.overlap)))
            left[best] = False
    return ids, counts


def _corners(ctx: Lowering, node: Applied[SuppressionAttrs], b: Var, i: Expr) -> list[Expr]:
    """The lowest and the highest place of box i along both axes, then its area."""
    ends = [ctx.element(node.inputs[0], (b, i, k.const(n))) for n in range(4)]
    low, high = ([of(ends[n], ends[n + 2]) for n in (0, 1)] for of in (k.min, k.max))
    return [*low, *high, k.mul(k.sub(high[0], low[0]), k.sub(high[1], low[1]))]


def _overlaps(x: Sequence[Expr], y: Sequence[Expr], limit: float) -> Expr:
    zero = const(0, x[0].dtype)
    sides = [k.max(k.sub(k.min(x[n + 2], y[n + 2]), k.max(x[n], y[n])), zero) for n in (0, 1)]
    common = k.mul(*sides)
    ratio = k.div(common, k.sub(k.add(x[4], y[4]), common))
    some = k.and_(k.lt(zero, common), k.and_(k.lt(zero, x[4]), k.lt(zero, y[4])))
    return k.and_(some, k.lt(const(limit, ratio.dtype), ratio))


def _kernel(ctx: Lowering, node: Applied[SuppressionAttrs]) -> Loops:
    """For each class: takes the box with the greatest key that is left, then drops it and those that it overlaps too much."""
    scores = node.inputs[1]
    batch, classes, n = ctx.dims(scores)
    b, c, i, j, t, best = (Var(name) for name in (*"bcijt", "best"))
    first, top, following, some, count = (Var(name, i64) for name in ("first", "top", "following", "some", "count"))
    left, *sides = (ctx.local(dtype, max(n, 1)) for dtype in (i64, f32, f32, f32, f32, f32))
    score, none = ctx.element(scores, (b, c, i)), const(LEAST, i64)
    key = k.select(k.lt(const(node.attrs.least, f32), score), ranked(score, i), none)
    copies = [Store(side, i, value) for side, value in zip(sides, _corners(ctx, node, b, i))]
    begin = Loop(i, n, (*copies, Store(left, i, key)), vector=True, reduces=(Reduce(first, "max", key),))
    held = [Var(f"h{side}", f32) for side in range(5)]
    chosen: list[Stmt] = [Let(best, k.min(ranked_index(top), const(max(n - 1, 0))))]
    chosen += [Let(some, k.select(k.lt(none, top), const(1, i64), const(0, i64)))]
    chosen += [Let(var, Load(side, best)) for var, side in zip(held, sides)]
    out = k.select(k.lt(none, top), k.cast(best, i64), const(-1, i64))
    drop = k.or_(k.eq(j, best), _overlaps([Load(side, j) for side in sides], held, node.attrs.overlap))
    rest = k.select(drop, none, Load(left, j))
    clear = Loop(j, n, (Store(left, j, rest),), vector=True, reduces=(Reduce(following, "max", rest),))
    carries = Carry(top, first, following), Carry(count, const(0, i64), k.add(count, some))
    take = Loop(t, min(node.attrs.most, n), (*chosen, ctx.store(0, (b, c, t), out), clear), carries=carries)
    return ((b, batch), (c, classes)), (begin, take, ctx.store(1, (b, c), count))


non_max_suppression = op(
    "non_max_suppression", kind=Kind.KERNEL, infer=_shapes, attrs=SuppressionAttrs, arity=(2, 2), reference=_arrays,
    kernel=_kernel, rows=lambda attrs, operand, axis, boxes, scores: axis if axis <= operand else None,
    samples=(
        Sample(((2, 17, 4), (2, 3, 17)), {"most": 5, "overlap": 0.37}, dtypes=("f32", "f32")),
        Sample(((1, 33, 4), (1, 2, 33)), {"most": 33, "overlap": 0.11, "least": 0.3}, dtypes=("f32", "f32")),
        Sample(((2, 33, 4), (2, 1, 33)), {"most": 9, "overlap": 0.24, "least": 0.0}, dtypes=("bf16", "bf16")),
        Sample(((1, 7, 4), (1, 1, 7)), {"most": 0}, dtypes=("f16", "f16")),
        Sample(((3, 0, 4), (3, 1, 0)), {"most": 5}, dtypes=("f32", "f32")),
    ),
    doc="The best of boxes [batch, n, 4], each of two opposite corners, by scores [batch, classes, n]: (ids i64 [batch, "
    "classes, min(most, n)], best first, then -1; their number i64 [batch, classes]). Of two boxes that overlap too much, the "
    "one with the lower score goes.",
)  # fmt: skip
