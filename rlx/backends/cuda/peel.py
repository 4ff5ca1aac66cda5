"""Rows whose length is not a multiple of a vector start unaligned. Their loops use vectors from a row's first aligned element
on; the few iterations before and after are peeled off, one per thread."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from rlx.backends.cuda.rows import expr_key
from rlx.backends.cuda.vectors import BYTES, MOST, aligned, in_vector
from rlx.ir.kernel import EXTREMES, Expr, Kernel, Let, Load, Local, Loop, Stmt, Store, Var, coefficient, const, k, walk
from rlx.ir.nest import substitute
from rlx.records import record

LEAST, REDUCED = 512, 128  # elements of a row that gains, and of one that is only reduced
COMPUTED = 4  # elements of a vector, at most, where results are computed from them: this takes longer than to load more
HEAD, ORIGIN = Var("head"), Var("origin")  # the iteration that the first vector of a row begins with; its place, in vectors


@record(eq=False)
class Peel:
    """A row begins at element `start`. Its loops count from HEAD on: `whole` iterations are in vectors of `size` elements, and
    `beside` others before and behind them. `kernel`: with loops that count from the row's first element on. `busy`: a row that
    gains only if two of its elements share a register."""

    start: Expr
    size: int
    whole: int
    beside: int
    kernel: Kernel
    busy: bool


def peeled(kernel: Kernel, loops: list[Loop]) -> tuple[Kernel, Peel] | None:
    """`kernel`, whose `loops` run over the same row, with loops that count from HEAD on. Running totals keep their extent: they
    begin with the vector that the row's first element is in. None: they have vectors, or no adjacent elements."""
    extent, stored = loops[0].extent if loops else 0, any(isinstance(x, Store) for s in loops for x in s.body)
    touched = [(x, s.var) for s in loops for x in walk((s.body, s.reduces, s.carries)) if isinstance(x, Load | Store)]
    found = [(x, var) for x, var in touched if in_vector(x, var, 1) and coefficient(x.index, var) == 1]
    if extent < (LEAST if stored else REDUCED) or not found or not any(s.reduces or s.carries for s in loops):
        return None
    ((common, _),) = Counter(expr_key(x.index, var) for x, var in found).most_common(1)
    same = [(x, var) for x, var in found if expr_key(x.index, var) == common]
    start = substitute(same[0][0].index, {same[0][1]: const(0)})
    size = min(MOST, BYTES // min(x.buffer.dtype.itemsize for x, _ in same))
    known = {v for v, _ in kernel.grid}.issuperset(x for x in walk(start) if isinstance(x, Var | Load))
    busy = stored and size > COMPUTED and not any(s.carries for s in loops)
    fits = extent % (size // 2) == 0 and aligned(start, None, size // 2) if size > 1 else True
    if fits or not known or (busy and len(same) < len(found)):
        return None
    whole = (extent - size + 1) // size * size
    places = {id(x.index): k.add(k.mul(ORIGIN, size), var) for x, var in same}
    body = tuple(x for s in kernel.body for x in (_from_head(s, whole, dict(places)) if any(s is x for x in loops) else (s,)))
    return replace(kernel, body=body), Peel(start, size, whole, extent - whole, kernel, busy)


def _from_head(s: Stmt, whole: int, memo: dict[int, Expr]) -> tuple[Stmt, ...]:
    """The loop with a variable that counts from HEAD on, and the positions that it finds. `memo`: indices, by id."""
    assert isinstance(s, Loop)
    own = lambda x: isinstance(x, Load | Store) and isinstance(x.buffer, Local) and x.index is s.var  # noqa: E731
    to, memo = {s.var: k.add(HEAD, s.var)}, memo | {id(x): x for x in walk((s.body, s.reduces)) if own(x)}
    body = [replace(x, value=substitute(x.value, to, memo)) if own(x) else substitute(x, to, memo) for x in s.body]  # type: ignore[union-attr]
    places = {r.result: Var("at") for r in s.reduces if r.op in EXTREMES}
    reduces = [replace(r, result=places.get(r.result, r.result), value=substitute(r.value, to, memo)) for r in s.reduces]
    carries, extent = substitute(s.carries, to, memo), s.extent if s.carries else whole
    loop = replace(s, extent=extent, body=tuple(body), reduces=tuple(reduces), carries=carries)
    return loop, *(Let(place, k.add(HEAD, at)) for place, at in places.items())


__all__ = ["HEAD", "ORIGIN", "Peel", "peeled"]
