"""Index set splitting: splits a vector loop into parts in which each condition on its variable is constant. So no lane tests
on which side of the end of a concat operand, or of the start of padding, it is."""

from __future__ import annotations

from bisect import bisect_left

from rlx.ir.kernel import FOLD, Alu, Const, Expr, Loop, Var, coefficient, expressions
from rlx.ir.nest import distinct

MOST = 8  # most conditions that a loop is split for
LEAST_VECTORS = 4  # least average number of vectors in a part

Part = tuple[int, int, dict[int, bool]]  # start, stop, and known truth values of expressions there, by id


def parts(loop: Loop, lanes: int) -> list[Part]:
    """The loop's iterations in order. Parts start at multiples of `lanes`.

    A condition that changes inside a vector is unknown there."""
    n = loop.extent
    switches = {id(e): switch(e, loop.var, n) for e in distinct(expressions([loop])) if is_threshold(e, loop.var)}
    splits = {at for at, _ in switches.values() if 0 < at < n}
    if not splits or len(splits) > MOST or n < LEAST_VECTORS * lanes * (len(splits) + 1):
        return [(0, n, {})]
    edges = sorted({0, n, *(s // lanes * lanes for s in splits), *(min(-(-s // lanes) * lanes, n) for s in splits)})
    return [
        (start, stop, {e: first != (at <= start) for e, (at, first) in switches.items() if not start < at < stop})
        for start, stop in zip(edges, edges[1:])
    ]


def is_threshold(e: Expr, var: Var) -> bool:
    """Whether `e` compares integers that are linear in `var`, and depends on no other variable."""
    if not isinstance(e, Alu) or e.op not in ("lt", "le"):
        return False
    return all(_is_known(a, var) and a.dtype.is_int and coefficient(a, var) is not None for a in e.args)


def _is_known(e: Expr, var: Var) -> bool:
    """Whether `_value` evaluates `e`: other ops may stand in what is the same for all iterations, as those of i % 1 do."""
    return e is var or isinstance(e, Const) or (isinstance(e, Alu) and e.op in FOLD and all(_is_known(a, var) for a in e.args))


def switch(e: Expr, var: Var, extent: int) -> tuple[int, bool]:
    """(first iteration at which a threshold condition differs from its initial value, or the extent if none; its value there)."""
    first = _value(e, var, 0)
    return bisect_left(range(extent), True, key=lambda i: _value(e, var, i) != first), bool(first)


def _value(e: Expr, var: Var, at: int) -> int:
    if isinstance(e, Const):
        return int(e.value)
    if e is var:
        return at
    assert isinstance(e, Alu)
    a, b = (_value(x, var, at) for x in e.args)
    return {"lt": a < b, "le": a <= b}[e.op] if e.op in ("lt", "le") else FOLD[e.op](a, b)
