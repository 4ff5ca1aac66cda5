"""Algebra that is exact, constants folded, duplicates shared. What nothing needs is gone by construction; leaves stay.

Every rule gives the very bits that the node gave, NaN, infinities and -0.0 included (which NaN, is not said).
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence

from rlx.compile.options import CompileOptions
from rlx.errors import IndexRangeError
from rlx.ir.dtype import c64, holds
from rlx.ir.graph import CONSTANT, ConstantAttrs, Graph, Node, Value, constant, keep
from rlx.ir.layout import Layout
from rlx.ir.op import Kind
from rlx.ir.ops import elementwise as e
from rlx.ir.ops import view as v
from rlx.ir.rewrite import Rule, Var, pattern, rewrite, rule
from rlx.ir.shape import contiguous_strides
from rlx.ir.target import Target

FOLD_BYTES = 1024  # a folded constant may be larger than its operands together up to this size
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


@rule(pattern(v.transpose, pattern(v.transpose, X)))
def merge_transposes(node: Node, x: Value) -> Value:
    """Dims permuted twice are permuted once: result dim i is the inner result's dim outer[i]."""
    inner, outer = (_axes(n) for n in (node.inputs[0].node, node))
    return v.transpose(x, axes=tuple(inner[i] for i in outer))


@rule(pattern(v.reshape, pattern(v.reshape, X)), pattern(v.broadcast_to, pattern(v.broadcast_to, X)))
def keep_outer_dims(node: Node, x: Value) -> Value:
    """The dims between do not change where an element ends up."""
    return Node(node.op, (x,), node.op.attrs(dims=node.shapes[0].dims), node.shapes).results[0]  # type: ignore[misc, call-arg]


@rule()
def drop_view(node: Node) -> Value | None:
    """A view whose every element lies where it lay in its operand is its operand."""
    if node.op.kind is not Kind.VIEW or node.op.strided is None or not node.shapes[0].is_static:
        return None
    x, dims = node.inputs[0], node.shapes[0].dims
    if x.dims != dims:
        return None
    plain = Layout(contiguous_strides(node.shapes[0].static))
    found = node.op.strided(node.attrs, dims, dims, plain)
    moved = found is None or found.offset or any(a != b for a, b, d in zip(found.strides, plain.strides, dims) if d != 1)
    return None if moved else x


@rule(pattern(e.cast, X))
def drop_cast(node: Node, x: Value) -> Value | None:
    """A cast to the operand's own dtype does nothing."""
    return x if x.dtype == node.shapes[0].dtype else None


@rule(pattern(e.cast, pattern(e.cast, X)))
def merge_casts(node: Node, x: Value) -> Value | None:
    """A cast by way of a dtype that holds every value of the first rounds or wraps only at the end."""
    between, to = node.inputs[0].dtype, node.shapes[0].dtype
    return e.cast(x, dtype=to) if holds(between, x.dtype) else None


@rule()
def fold_constants(node: Node) -> Value | None:
    """An op over constants alone has the value that its reference gives. Without operands nothing is folded (iota is
    cheaper computed than read), nor where the result would be a large constant made of small ones."""
    operands = [x.node.attrs for x in node.inputs]
    known = node.op.ahead and all(isinstance(a, ConstantAttrs) for a in operands)
    if not operands or not known or not node.shapes[0].is_static or node.shapes[0].dtype == c64:  # a result keeps its pairs
        return None
    data = [a.data for a in operands if isinstance(a, ConstantAttrs)]
    if node.shapes[0].size_bytes > max(FOLD_BYTES, sum(d.nbytes for d in data)):
        return None
    try:
        return constant(node.op.reference(node.attrs, *data))
    except IndexRangeError:  # the run will say so, if it gets there
        return None


RULES: tuple[Rule, ...] = (
    multiply_by_one, add_negative_zero, add_integer_zero, undo_twice, take_first, take_second, merge_transposes,
    keep_outer_dims, drop_view, drop_cast, merge_casts, fold_constants,
)  # fmt: skip

def _axes(node: Node) -> tuple[int, ...]:
    rank = node.inputs[0].rank
    axes = node.attrs.axes  # type: ignore[union-attr]
    return tuple(a % rank for a in axes) or tuple(reversed(range(rank)))


def share_equal(graph: Graph) -> Graph:
    """`graph` with equal nodes (op, attributes, operands; constants by their bytes) made one."""
    seen: dict[Hashable, Sequence[Value]] = {}

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op is CONSTANT:
            data = node.attrs.data  # type: ignore[union-attr]
            key: Hashable = (node.shapes[0], hashlib.sha256(data.tobytes()).digest())
        else:
            key = (node.op, inputs, repr(node.attrs))  # the text tells -0.0 from 0.0 and 1 from True, equality does not
        return seen.setdefault(key, keep(node, inputs)) if key not in seen else seen[key]

    return graph.rebuild(new)


def canonicalise(graph: Graph, target: Target, options: CompileOptions) -> Graph:
    """`graph` under RULES and without duplicates, until neither changes it."""
    while True:
        graph = rewrite(graph, RULES)
        shared = share_equal(graph)
        if len(shared.nodes()) == len(graph.nodes()):
            return graph
        graph = shared  # a rule may fit now: where(c, x, x)


__all__ = ["RULES", "canonicalise", "share_equal"]
