"""Exact algebraic simplification, constant folding and common subexpression elimination. Dead nodes disappear by construction;
leaves stay.

Every rule keeps the bits of the result, including NaN, infinities and -0.0 (the payload of a NaN may differ).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable, Sequence

from rlx.compiler.compilation import Compilation
from rlx.errors import IndexRangeError
from rlx.ir.dtype import c64, holds
from rlx.ir.graph import CONSTANT, ConstantAttrs, Graph, Node, Value, constant, keep
from rlx.ir.layout import Layout
from rlx.ir.op import Kind
from rlx.ir.ops import activation
from rlx.ir.ops import elementwise as e
from rlx.ir.ops import state as s
from rlx.ir.ops import view as v
from rlx.ir.ops.index import concat, gather
from rlx.ir.ops.order import argmax, argmin
from rlx.ir.ops.pool import max_pool
from rlx.ir.ops.rules import axis_of
from rlx.ir.rewrite import Rule, Var, pattern, rewrite, rule
from rlx.ir.shape import Shape, contiguous_strides

MOST_JOINED = 64  # operands of a kernel's concats: each is code of its own, or a question of each element
FOLD_BYTES = 1024  # up to this size a folded constant may be larger than all its operands together
CAST, CONCAT = e.cast.op, concat.op  # type: ignore[attr-defined]
ADDS = tuple(op.op for op in (e.add, e.maximum, e.minimum))  # type: ignore[attr-defined]
MUL, SUB, RELU, CLIP = (op.op for op in (e.mul, e.sub, activation.relu, activation.clip))  # type: ignore[attr-defined]
X, Y, C = Var("x"), Var("y"), Var("c")


@rule(pattern(e.mul, X, 1), pattern(e.mul, 1, X), pattern(e.div, X, 1))
def multiply_by_one(node: Node, x: Value) -> Value:
    """x * 1 and x / 1 are x in every dtype."""
    return x


@rule(pattern(e.add, X, -0.0), pattern(e.add, -0.0, X), pattern(e.sub, X, 0))
def add_negative_zero(node: Node, x: Value) -> Value:
    """x + -0.0 and x - 0.0 are x, also for x = -0.0; x + 0.0 is not. On integers x - 0 is x."""
    return x


@rule(pattern(e.add, X, 0), pattern(e.add, 0, X))
def add_integer_zero(node: Node, x: Value) -> Value | None:
    """On integers x + 0 is x."""
    return x if x.dtype.is_int else None


@rule(pattern(e.neg, pattern(e.neg, X)), pattern(e.logical_not, pattern(e.logical_not, X)))
def undo_twice(node: Node, x: Value) -> Value:
    """Negation and not are their own inverses; integer negation wraps both ways."""
    return x


@rule(pattern(e.where, True, X, Y), pattern(e.where, C, X, X))
def take_first(node: Node, x: Value, y: Value | None = None, c: Value | None = None) -> Value:
    """where(True, x, y) is x, and so is where(c, x, x)."""
    return x


@rule(pattern(e.where, False, X, Y))
def take_second(node: Node, x: Value, y: Value) -> Value:
    """where(False, x, y) is y."""
    return y


@rule(
    pattern(e.logical_and, X, True), pattern(e.logical_and, True, X), pattern(e.logical_or, X, False),
    pattern(e.logical_or, False, X),
)  # fmt: skip
def drop_neutral(node: Node, x: Value) -> Value:
    """x and True, x or False are x, with the dims of the result."""
    return x if x.dims == node.shapes[0].dims else v.broadcast_to(x, dims=node.shapes[0].dims)


@rule(pattern(v.reshape, pattern(v.transpose, pattern(v.reshape, X))))
def split_again(node: Node, x: Value) -> Value | None:
    """A transpose of the last dims between a reshape that merges the others and one that splits them again is a transpose."""
    merged, axes = node.inputs[0].node.inputs[0], v.transposed_axes(node.inputs[0].node)
    lead = next((i for i, a in enumerate(axes) if i != a), 0)  # dims that stay in front
    last = merged.rank - lead
    if not lead or x.rank < last or x.dims[x.rank - last :] != merged.dims[lead:]:
        return None
    first = x.rank - last
    made = v.transpose(x, axes=(*range(first), *(a - lead + first for a in axes[lead:])))
    return made if made.dims == node.shapes[0].dims else None


@rule(pattern(v.transpose, pattern(v.transpose, X)))
def merge_transposes(node: Node, x: Value) -> Value:
    """Two permutations of dims are one: result dim i is the inner result's dim outer[i]."""
    inner, outer = (v.transposed_axes(n) for n in (node.inputs[0].node, node))
    return v.transpose(x, axes=tuple(inner[i] for i in outer))


@rule(pattern(v.reshape, pattern(v.reshape, X)), pattern(v.broadcast_to, pattern(v.broadcast_to, X)))
def keep_outer_dims(node: Node, x: Value) -> Value:
    """Two reshapes, or two broadcasts, are one to the last dims."""
    return Node(node.op, (x,), node.op.attrs(dims=node.shapes[0].dims), node.shapes).results[0]  # type: ignore[misc, call-arg]


@rule()
def drop_view(node: Node) -> Value | None:
    """A view that leaves every element at its position is the operand."""
    if node.op.kind is not Kind.VIEW or node.op.strided is None or not node.shapes[0].is_static:
        return None
    x, dims = node.inputs[0], node.shapes[0].dims
    if x.dims != dims:
        return None
    plain = Layout(contiguous_strides(node.shapes[0].static))
    found = node.op.strided(node.attrs, dims, dims, plain)
    moved = found is None or found.offset or any(a != b for a, b, d in zip(found.strides, plain.strides, dims) if d != 1)
    return None if moved else x


@rule(pattern(s.take_rows, X, C))
def take_known_rows(node: Node, x: Value, c: Value) -> Value | None:
    """Rows at a known position are a slice, which needs no copy."""
    if not isinstance(c.node.attrs, ConstantAttrs) or not x.shape.is_static:
        return None
    first, count, axis = int(c.node.attrs.data), node.attrs.count, node.attrs.axis % x.rank  # type: ignore[union-attr]
    if not 0 <= first <= x.shape.static[axis] - count:  # an IndexRangeError of the run, which may not reach it
        return None
    ends = {"starts": first, "stops": first + count, "steps": 1}
    whole = {"starts": 0, "stops": v.END, "steps": 1}
    return v.slice(x, **{k: tuple(ends[k] if a == axis else whole[k] for a in range(x.rank)) for k in ends})


@rule(pattern(e.cast, X))
def drop_cast(node: Node, x: Value) -> Value | None:
    """A cast to the operand's own dtype does nothing."""
    return x if x.dtype == node.shapes[0].dtype else None


@rule(pattern(e.cast, pattern(e.cast, X)))
def merge_casts(node: Node, x: Value) -> Value | None:
    """A first cast to a dtype that holds every value of the source can be dropped: only the second one rounds or wraps."""
    between, to = node.inputs[0].dtype, node.shapes[0].dtype
    return e.cast(x, dtype=to) if holds(between, x.dtype) else None


@rule(pattern(e.cast, X))
def merge_casts_around_views(node: Node, x: Value) -> Value | None:
    """So it can in front of views, which then move the source's elements."""
    views: list[Node] = []
    while x.node.op.kind is Kind.VIEW and len(x.node.shapes) == len(x.node.inputs) == 1 and x.node.inputs[0].dtype == x.dtype:
        views.append(x.node)
        x = x.node.inputs[0]
    if not views or x.node.op is not CAST or not holds(x.dtype, x.node.inputs[0].dtype):
        return None
    (source,) = x.node.inputs
    for view in reversed(views):
        (source,) = Node(view.op, (source,), view.attrs, (Shape(view.shapes[0].dims, source.dtype),)).results
    return e.cast(source, dtype=node.shapes[0].dtype)


@rule(pattern(max_pool, X))
def pool_narrow(node: Node, x: Value) -> Value | None:
    """A max pool of values computed from narrower integers by steps that keep their order, as dequantised ones, pools these."""
    attrs, steps, cast = node.attrs, list[tuple[Node, int]](), 0
    spatial = x.rank - 2
    sides = (attrs.each(name, spatial) for name in ("low", "high", "window", "dilation"))  # type: ignore[union-attr]
    if any(max(low, high) >= window or (apart > 1 and low + high) for low, high, window, apart in zip(*sides)):
        return None  # a window may have no elements
    while (at := _rises(x.node)) is not None:
        steps.append((x.node, at))
        x = x.node.inputs[at]
        if x.dtype.is_int and x.dtype.itemsize < node.shapes[0].dtype.itemsize:
            cast = len(steps)
    if not cast:
        return None
    last, at = steps[cast - 1]
    pooled = max_pool(last.inputs[at], **vars(attrs))
    for step, at in reversed(steps[:cast]):
        inputs = (*step.inputs[:at], pooled, *step.inputs[at + 1 :])
        (pooled,) = Node(step.op, inputs, step.attrs, (pooled.shape.with_dtype(step.shapes[0].dtype),), None, step.source).results
    return pooled


def _rises(node: Node) -> int | None:
    """The operand with which the result rises, or stays, beside one number that is known; None: it is another op."""
    if node.op in (RELU, CLIP):
        return 0
    if node.op is CAST:
        source, to = node.inputs[0].dtype, node.shapes[0].dtype
        return 0 if source.is_int and (to.is_float or holds(to, source)) else None
    known = [getattr(v.node.attrs, "data", None) for v in node.inputs] if len(node.inputs) == 2 else []
    numbers = [i for i, data in enumerate(known) if data is not None and data.size == 1]
    if len(numbers) != 1 or node.inputs[1 - numbers[0]].dims != node.shapes[0].dims:
        return None
    (i,) = numbers
    number, x = known[i].item(), node.inputs[1 - i]  # type: ignore[union-attr]
    if x.dtype.is_int and node.op not in (e.maximum.op, e.minimum.op):  # type: ignore[attr-defined]
        source = x.node.inputs[0].dtype if x.node.op is CAST else x.dtype
        wide = x.dtype.kind == "i" and source.is_int and x.dtype.bits > source.bits + 1
        if node.op is MUL or not wide or abs(number) >= 1 << source.bits:
            return None  # sums and products of integers wrap around
    fits = node.op in ADDS or (node.op is SUB and i == 1) or (node.op is MUL and 0 < number < math.inf)
    return 1 - i if fits else None


@rule(pattern(gather, X, C))
def slice_known_rows(node: Node, x: Value, c: Value) -> Value | None:
    """A gather of some equally spaced positions that are known and exist is a slice, which needs no copy."""
    axis, at = axis_of(node.attrs.axis, x.rank), getattr(c.node.attrs, "data", None)  # type: ignore[union-attr]
    if at is None or at.ndim > 1 or not isinstance(size := x.dims[axis], int) or not 0 < at.size < size:
        return None
    start, *more = map(int, at.reshape(-1))
    step = more[0] - start if more else 1
    stop = start + step * at.size
    if step < 1 or not 0 <= start <= stop - step < size or [start, *more] != list(range(start, stop, step)):
        return None
    return v.slice_axis(x, axis, start, stop, step).reshape(node.shapes[0].dims)


@rule()
def join_by_parts(node: Node) -> Value | None:
    """A concat of many operands is one of concats of few."""
    parts = -(-len(node.inputs) // MOST_JOINED)
    if node.op is not CONCAT or parts <= 1:
        return None
    axis, ends = node.attrs.axis, [len(node.inputs) * i // parts for i in range(parts + 1)]  # type: ignore[union-attr]
    return concat(*(concat(*node.inputs[a:b], axis=axis) for a, b in zip(ends, ends[1:])), axis=axis)


@rule(pattern(argmax, X), pattern(argmin, X))
def choose_the_only_one(node: Node, x: Value) -> Value | None:
    """The greatest and the least of one element are element 0."""
    axis, result = axis_of(node.attrs.axis, x.rank), node.shapes[0]  # type: ignore[union-attr]
    return v.broadcast_to(constant(0, result.dtype), dims=result.dims) if x.dims[axis] == 1 else None


@rule()
def fold_constants(node: Node) -> Value | None:
    """An op on constants only is replaced by the result of its reference. Ops without operands are not folded (computing an
    iota is cheaper than reading it), nor are ops that make a large constant from small ones."""
    data = [attrs.data for x in node.inputs if isinstance(attrs := x.node.attrs, ConstantAttrs)]
    known = len(data) == len(node.inputs) > 0 and node.op.ahead and node.shapes[0].is_static
    if not known or node.shapes[0].dtype == c64:  # a result keeps its pairs
        return None
    if node.shapes[0].size_bytes > max(FOLD_BYTES, sum(d.nbytes for d in data)):
        return None
    try:
        return constant(node.op.reference(node.attrs, *data))
    except IndexRangeError:  # left to the run, which may not reach it
        return None


RULES: tuple[Rule, ...] = (
    multiply_by_one, add_negative_zero, add_integer_zero, undo_twice, take_first, take_second, drop_neutral, split_again,
    merge_transposes,
    keep_outer_dims, drop_view, drop_cast, merge_casts, merge_casts_around_views, pool_narrow,
    take_known_rows, slice_known_rows, join_by_parts, choose_the_only_one, fold_constants,
)  # fmt: skip

def share_equal(graph: Graph) -> Graph:
    """`graph` with equal nodes (op, attributes, operands; constants by their bytes) merged."""
    seen: dict[Hashable, Sequence[Value]] = {}

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op is CONSTANT:
            data = node.attrs.data  # type: ignore[union-attr]
            key: Hashable = (node.shapes[0], hashlib.sha256(data.tobytes()).digest())
        else:
            key = (node.op, inputs, repr(node.attrs))  # unlike ==, repr distinguishes -0.0 from 0.0 and 1 from True
        return seen.setdefault(key, keep(node, inputs)) if key not in seen else seen[key]

    return graph.rebuild(new)


def canonicalise(graph: Graph, compilation: Compilation) -> Graph:
    """Applies RULES and merges duplicates until neither changes the graph."""
    fired, settled = list[str](), set[Node]()
    graph = rewrite(graph, RULES, fired, settled)
    while len((shared := share_equal(graph)).nodes()) < len(graph.nodes()):
        before = len(fired)
        graph = rewrite(shared, RULES, fired, settled)  # a rule may match now: where(c, x, x)
        if len(fired) == before:
            break
    return graph


__all__ = ["MOST_JOINED", "RULES", "canonicalise", "share_equal"]
