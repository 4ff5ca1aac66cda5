"""Rewrite rules: a pattern over ops, and a function that builds the replacement.

    @rule(pattern(ops.mul, X, 1), pattern(ops.mul, 1, X))
    def mul_by_one(node, x):
        "x * 1 is x, also for NaN and -0."
        return x

The engine rewrites bottom-up, applies rules to each node until none matches, and repeats until the graph no longer changes. A
replacement whose shape or dtype differs from the node's is discarded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from rlx.ir.graph import CONSTANT, Graph, Node, Value, keep
from rlx.ir.op import Kind, OpDef
from rlx.records import record

_MOST_ROUNDS = 100  # a rule set that still changes the graph after this many rounds does not terminate


@record
class Var:
    """Matches any operand; every occurrence of a Var must match the same Value."""

    name: str


@record
class Pattern:
    """An op on operands: Vars, Patterns, or numbers. A number matches a constant whose elements all equal it: an int one of
    integer or float dtype, a float one of float dtype, a bool one of dtype bool. -0.0 does not match 0.0."""

    op: OpDef
    args: tuple[Operand, ...]


Operand = Var | Pattern | int | float | bool


@record
class Rule:
    """`make(node, **operands by Var)` returns the replacement, or None if the rule does not apply. Without patterns it is tried
    on every node."""

    name: str
    patterns: tuple[Pattern, ...]
    make: Callable[..., Value | None]
    why: str


def pattern(build: Callable[..., object], *args: Operand) -> Pattern:
    """A pattern from an op's constructor, as pattern(ops.mul, X, 1)."""
    return Pattern(build.op, args)  # type: ignore[attr-defined]


def rule(*patterns: Pattern) -> Callable[[Callable[..., Value | None]], Rule]:
    """Decorator: the function's name is the name of the rule, and its docstring says why the rule is sound."""

    def declare(make: Callable[..., Value | None]) -> Rule:
        assert make.__doc__, f"rule {make.__name__} does not say why it is sound"
        return Rule(make.__name__, patterns, make, make.__doc__)

    return declare


def match(wanted: Operand, value: Value, found: dict[str, Value]) -> bool:
    """True if `value` matches; `found` receives the operand of each Var."""
    if isinstance(wanted, Var):
        return found.setdefault(wanted.name, value) is value
    if not isinstance(wanted, Pattern):
        return _is_number(value, wanted)
    node = value.node
    return (
        node.op is wanted.op
        and len(node.inputs) == len(wanted.args)
        and all(match(w, v, found) for w, v in zip(wanted.args, node.inputs))
    )


def _is_number(value: Value, number: int | float | bool) -> bool:
    if value.node.op is not CONSTANT:
        return False
    dtype, data = value.dtype, value.node.attrs.data  # type: ignore[union-attr]
    if isinstance(number, bool) != (dtype.kind == "b") or (isinstance(number, float) and not dtype.is_float):
        return False
    if data.size == 0 or data.flat[0] != number or not (data == data.flat[0]).all():
        return False
    return number != 0 or not dtype.is_float or bool((np.signbit(data) == (math.copysign(1, number) < 0)).all())


def rewrite(graph: Graph, rules: Sequence[Rule], fired: list[str] | None = None, settled: set[Node] | None = None) -> Graph:
    """`graph` with the rules applied until none matches. `fired` receives the name of each applied rule, in order. `settled`:
    nodes to which none of the rules applies, to be added to; nodes are immutable, so none will."""
    fired, settled = [] if fired is None else fired, set() if settled is None else settled
    tries = cache(lambda op: [(r, p) for r in rules for p in r.patterns or (None,) if p is None or p.op is op])

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        results = keep(node, inputs)
        for _ in range(_MOST_ROUNDS):
            inner = results[0].node
            if inner in settled:
                return results
            if len(inner.shapes) > 1 or (made := _first(tries(inner.op), results[0], fired)) is None:
                settled.add(inner)
                return results
            results = (made,)
        raise AssertionError(f"rules go in circles: {fired[-8:]}")

    for _ in range(_MOST_ROUNDS):
        graph = graph.rebuild(new)
        if all(node in settled for node in graph.nodes() if node.op.kind is not Kind.LEAF):  # also operands that rules made
            return graph
    raise AssertionError(f"rules go in circles: {fired[-8:]}")


def _first(tries: Iterable[tuple[Rule, Pattern | None]], value: Value, fired: list[str]) -> Value | None:
    """The replacement by the first rule that applies."""
    for r, p in tries:
        found: dict[str, Value] = {}
        if p is not None and not match(p, value, found):
            continue
        made = r.make(value.node, **found)
        if made is None or made is value or made.shape != value.shape:
            continue
        fired.append(r.name)
        return made if made.node in _around(value.node, 3) else inherit(made, value.node)
    return None


def _around(node: Node, depth: int) -> set[Node]:
    """The node and its operands, to the depth of the deepest pattern: existing nodes, which a rule did not make."""
    return {node}.union(*(_around(v.node, depth - 1) for v in node.inputs)) if depth else {node}


def inherit(made: Value, old: Node) -> Value:
    """`made`, a result of a node without other users, with the name and source line of the node it replaces."""
    return Value(replace(made.node, name=old.name, source=old.source), made.index)


__all__ = ["Pattern", "Rule", "Var", "inherit", "match", "pattern", "rewrite", "rule"]
