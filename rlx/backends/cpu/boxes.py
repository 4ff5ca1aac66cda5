"""Loops whose conditions each depend on one index, as those of a concat or a pad, as a nest of loops over boxes of indices.

In a box every condition is constant, so it has one source (or the constant of a pad), and the loops over it have no guards.
Adjacent dims of a box become one loop where memory is contiguous over both: whole images of a concat of channels are one copy.

    pad of [20, 21] to [23, 28]:    rows 0 to 1      one loop over 28 constants
                                    rows 1 to 21     3 constants, a loop over 21 elements that are copied, 4 constants
                                    rows 21 to 23    one loop over 56 constants
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from rlx.backends.cpu.index_split import is_threshold, switch
from rlx.backends.cpu.loops import lanes_of, weight
from rlx.backends.cpu.scope import remainder
from rlx.ir.dtype import bool_
from rlx.ir.nest import Dims, distinct, joined, operands, postorder, stores, substitute
from rlx.records import record

from rlx.ir.kernel import (  # isort: skip
    Alu, Const, Expr, Load, Loop, Stmt, Store, Var, alu, coefficient, const, expressions, is_const, k,
)  # fmt: skip

MOST, MOST_PARTS = 64, 512  # most boxes, as each is code of its own; most parts of the indices, of which a box may have several
LEAST_ALIGNED = 4  # vectors, from which it pays to begin with an aligned one


@record
class Boxes:
    """Loops over boxes, inside the dims `outer`, which no condition divides."""

    outer: Dims
    nest: tuple[Stmt, ...]


def in_boxes(dims: Dims, body: tuple[Stmt, ...], vector_bytes: int) -> Boxes | None:
    """The loops over `dims` around this body, the last one in lanes, as boxes. None if no condition divides them, or the boxes
    are so narrow that all their vectors take longer."""
    edges = _edges(dims, body) if all(isinstance(s, Store) for s in body) else {}
    if not edges or math.prod(len(x) + 1 for x in edges.values()) > MOST_PARTS:
        return None
    outer = next(n for n, (v, _) in enumerate(dims) if v in edges)
    work, whole = _Work(vector_bytes), Loop(*dims[-1], body, vector=True)
    nest = _Nest(vector_bytes).of(dims[outer:], body)
    before = math.prod(n for _, n in dims[outer:-1]) * work.of_vectors(whole, _hoisted(whole, work.lanes(whole)))
    return Boxes(dims[:outer], nest) if len(stores(nest)) <= MOST and work.of(nest) < before else None


def one_by_one(nest: Sequence[Stmt]) -> Iterator[Stmt]:
    """The loops of each box, which share none."""
    for s in nest:
        if isinstance(s, Loop) and not s.vector:
            yield from (replace(s, body=(inner,)) for inner in one_by_one(s.body))
        else:
            yield s


def _edges(dims: Dims, body: tuple[Stmt, ...]) -> dict[Var, list[int]]:
    """The indices at which a condition changes, of each dim that has some."""
    found = {v: sorted({at for at, _ in switches.values() if 0 < at < n}) for v, n, switches in _switches(dims, body)}
    return {v: edges for v, edges in found.items() if edges}


def _switches(dims: Dims, body: tuple[Stmt, ...]) -> Iterator[tuple[Var, int, dict[int, tuple[int, bool]]]]:
    """Each dim with its extent and the conditions on it, by id: the index at which one changes, and its value before."""
    compared = [e for e in distinct(expressions(body)) if isinstance(e, Alu) and e.op in ("lt", "le")]
    for v, n in dims:
        yield v, n, {id(e): switch(e, v, n) for e in compared if is_threshold(e, v)}


@record
class _Nest:
    vector_bytes: int

    def of(self, dims: Dims, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Loops over the dims around the body, each divided where one of its conditions changes."""
        divided = _edges(dims, body)
        if not divided:
            return self.plain(dims, body)
        (var, extent), *inner = dims
        if var not in divided:
            return (Loop(var, extent, self.of(inner, body)),)
        (_, _, switches), made, edges = next(_switches(dims, body)), list[Stmt](), [0, *divided[var], extent]
        for start, stop in zip(edges, edges[1:]):
            here, truths = Var(var.name), {e: first != (at <= start) for e, (at, first) in switches.items()}
            box = _known(body, {var: k.add(here, const(start))}, truths)
            made += self.of([(here, stop - start), *inner], box)
        return tuple(made)

    def plain(self, dims: Dims, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        """Loops over the dims, which no condition divides, in lanes along the last one: from an aligned element on if it is
        long."""
        truths = {e: first for _, _, switches in _switches(dims, body) for e, (_, first) in switches.items()}
        dims, body = joined(dims, _known(body, {}, truths))
        *outer, (var, extent) = dims
        head = _unaligned(body, var, self.vector_bytes)
        if head and extent * _itemsize(body) >= LEAST_ALIGNED * self.vector_bytes:
            here = Var(var.name)
            rest = substitute(body, {var: k.add(here, const(head))})
            body = Loop(var, head, body, vector=True), Loop(here, extent - head, rest, vector=True)
        else:
            body = (Loop(var, extent, body, vector=True),)
        for v, n in reversed(outer):
            body = (Loop(v, n, body),)
        return body


def _unaligned(body: tuple[Stmt, ...], var: Var, vector_bytes: int) -> int:
    """The elements before the first one that is aligned to vectors in all rows; 0 if there is no such element."""
    (first, *_), lanes = stores(body), vector_bytes // _itemsize(body)
    at = remainder(first.index, var, lanes)
    return -at % lanes if at is not None and coefficient(first.index, var) == 1 else 0


def _itemsize(body: tuple[Stmt, ...]) -> int:
    return stores(body)[0].buffer.dtype.itemsize


def _known(body: tuple[Stmt, ...], to: Mapping[Var, Expr], truths: Mapping[int, bool]) -> tuple[Stmt, ...]:
    """The statements where these conditions are constant, with expressions in place of variables."""
    memo: dict[int, Expr] = {}
    for root in expressions(body):
        for e in postorder(root, memo):
            known = truths.get(id(e))
            memo[id(e)] = _folded(e, [memo[id(x)] for x in operands(e)], to) if known is None else const(known, bool_)
    made = [substitute(s, {}, memo) for s in body]
    return tuple(_unguarded(s) for s in made if isinstance(s, Store) and not (s.guard and is_const(s.guard, False)))


def _unguarded(s: Store) -> Store:
    return replace(s, guard=None) if s.guard and is_const(s.guard, True) else s


def _folded(e: Expr, parts: Sequence[Expr], to: Mapping[Var, Expr]) -> Expr:
    """The expression with these operands, without what constant conditions decide."""
    if isinstance(e, Var | Const):
        return to.get(e, e) if isinstance(e, Var) else e
    if isinstance(e, Load):
        index, *guards = parts
        if any(is_const(x, False) for x in guards):
            return const(0, e.dtype)
        return Load(e.buffer, index, *(x for x in guards if not is_const(x, True)))
    if e.op == "select" and isinstance(parts[0], Const):
        return parts[1] if parts[0].value else parts[2]
    if e.op in ("and", "or") and e.dtype == bool_:
        neutral = e.op == "and"
        rest = [x for x in parts if not is_const(x, neutral)]
        if len(rest) < 2 or any(is_const(x, not neutral) for x in rest):
            return next((x for x in rest if is_const(x, not neutral)), rest[0] if rest else const(neutral, bool_))
    return alu(e.op, *parts, dtype=e.dtype)


# -- what boxes save -----------------------------------------------------------------------------------------------


@record
class _Work:
    """Operations on vectors."""

    vector_bytes: int

    def lanes(self, loop: Loop) -> int:
        return lanes_of(loop, self.vector_bytes)

    def of(self, nest: tuple[Stmt, ...]) -> int:
        loops = [s for s in nest if isinstance(s, Loop)]
        return sum(self.of_vectors(s, s.body) if s.vector else s.extent * self.of(s.body) for s in loops)

    def of_vectors(self, loop: Loop, body: tuple[Stmt, ...]) -> int:
        """All vectors of a loop with this body. A masked store, and the end of a loop, take up to twice as long as a load."""
        return -(-loop.extent // self.lanes(loop)) * (weight(body) + 2 * (loop.extent > 1))


def _hoisted(loop: Loop, lanes: int) -> tuple[Stmt, ...]:
    """The body without what is computed once for all rows: the conditions of a row that is one vector."""
    if loop.extent > lanes:
        return loop.body
    found = [e for e in distinct(expressions(loop.body)) if is_threshold(e, loop.var)]
    return substitute(loop.body, {}, {id(e): Var("known", bool_) for e in found})
