"""Parts of a vector loop in which conditions on its variable hold throughout or nowhere (index set splitting): where one
operand of a concat ends, or padding begins, no lane has to ask which side it is on."""

from __future__ import annotations

from bisect import bisect_left

from rlx.backends.cpu.scope import Scope
from rlx.backends.shared.nest import distinct
from rlx.ir.kernel import FOLD, Alu, Const, Expr, Loop, Var, coefficient, expressions

MOST = 8  # conditions that a loop is taken apart for
LEAST_VECTORS = 4  # of a part, on average

Part = tuple[int, int, dict[int, bool]]  # start, stop, and what is known there of expressions, by their ids


def parts(loop: Loop, lanes: int, scope: Scope) -> list[Part]:
    """The loop's iterations in order. Parts start at multiples of `lanes`; what changes inside a vector is not known there."""
    n = loop.extent
    turns = {id(e): _turn(e, loop) for e in distinct(expressions([loop])) if _is_threshold(e, loop.var, scope)}
    cuts = {cut for cut, _ in turns.values() if 0 < cut < n}
    if not cuts or len(cuts) > MOST or n < LEAST_VECTORS * lanes * (len(cuts) + 1):
        return [(0, n, {})]
    edges = sorted({0, n, *(c // lanes * lanes for c in cuts), *(min(-(-c // lanes) * lanes, n) for c in cuts)})
    return [
        (start, stop, {e: first != (cut <= start) for e, (cut, first) in turns.items() if not start < cut < stop})
        for start, stop in zip(edges, edges[1:])
    ]


def _is_threshold(e: Expr, var: Var, scope: Scope) -> bool:
    """Whether `e` compares whole numbers that grow or fall evenly with `var`, and depends on nothing else."""
    if not isinstance(e, Alu) or e.op not in ("lt", "le") or list(scope.names_in(e)) != [var]:
        return False
    return all(a.dtype.is_int and coefficient(a, var) is not None for a in e.args)


def _turn(e: Expr, loop: Loop) -> tuple[int, bool]:
    """(first iteration at which a threshold is not what it is at the start: the extent if there is none, what it is there)."""
    first = _value(e, loop.var, 0)
    return bisect_left(range(loop.extent), True, key=lambda i: _value(e, loop.var, i) != first), bool(first)


def _value(e: Expr, var: Var, at: int) -> int:
    if isinstance(e, Const):
        return int(e.value)
    if e is var:
        return at
    assert isinstance(e, Alu)
    a, b = (_value(x, var, at) for x in e.args)
    return {"lt": a < b, "le": a <= b}[e.op] if e.op in ("lt", "le") else FOLD[e.op](a, b)
