"""Which arguments of a kernel may be one memory: proved from its loops, never guessed.

`inplace_pairs(kernel)` gives the (read, written) argument pairs for which overwriting the read buffer while the kernel
runs cannot change a result. The argument, for a read buffer r and a written one w of equal size:

1. every store to w has one affine index, injective over the grid and the loops around it: each element of w is written
   by one grid point in one iteration;
2. every load of r has, in each place, the index of every store, with the loops that only the load is in standing for
   those that only the store is in: what an iteration of the common loops overwrites is what it alone reads;
3. the load comes first: in the store's own statement, in an earlier one, or in an earlier loop beside the store's.

So no element of r is read after it was overwritten, whatever the order of grid points. What is not proved is no pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlx.ir.kernel import Alu, Buffer, Check, Const, Contract, Expr, Kernel, Let, Load, Local, Loop, Native, Stmt, Store, Var


@dataclass(frozen=True)
class _Scope:
    """One loop around an access (a Contract's i and j count as loops). `order`: which child of its parent it is."""

    var: Var
    extent: int
    order: int


@dataclass(frozen=True)
class _Access:
    buffer: Buffer | Local
    index: Expr
    scopes: tuple[_Scope, ...]
    order: int  # which child of the innermost scope


@dataclass(frozen=True)
class _Affine:
    """offset + sum of coefficient * var; no zero coefficients."""

    terms: dict[Var, int]
    offset: int


def inplace_pairs(kernel: Kernel) -> frozenset[tuple[int, int]]:
    """(read argument, written argument) pairs that may share one memory. Arguments are positions in kernel.buffers."""
    loads: dict[Buffer | Local, list[_Access]] = {}
    stores: dict[Buffer | Local, list[_Access]] = {}
    opaque: set[Buffer | Local] = set()
    _Reader(loads, stores, opaque).block(kernel.body, ())
    found = set()
    for w, written in enumerate(kernel.buffers):
        if not written.writable or written in opaque or written in loads or not _writes_once(kernel, stores.get(written, [])):
            continue
        for r, read in enumerate(kernel.buffers):
            if read.writable or read in opaque or (read.size, read.dtype.itemsize) != (written.size, written.dtype.itemsize):
                continue
            if all(_safe(load, store) for load in loads.get(read, []) for store in stores[written]):
                found.add((r, w))
    return frozenset(found)


class _Reader:
    """Lists what a body loads and stores. `opaque`: buffers touched in a way that has no element-wise description."""

    def __init__(
        self, loads: dict[Buffer | Local, list[_Access]], stores: dict[Buffer | Local, list[_Access]], opaque: set[Buffer | Local]
    ) -> None:
        self.loads, self.stores, self.opaque = loads, stores, opaque

    def block(self, body: Sequence[Stmt], scopes: tuple[_Scope, ...]) -> None:
        for order, stmt in enumerate(body):
            self.stmt(stmt, scopes, order)

    def stmt(self, s: Stmt, scopes: tuple[_Scope, ...], order: int) -> None:
        if isinstance(s, Let):
            self.exprs((s.value,), scopes, order)
        elif isinstance(s, Store):
            self.exprs((s.index, s.value, s.guard), scopes, order)
            self.stores.setdefault(s.buffer, []).append(_Access(s.buffer, s.index, scopes, order))
        elif isinstance(s, Check):
            self.exprs((s.ok,), scopes, order)
        elif isinstance(s, Loop):
            self.exprs([c.init for c in s.carries], scopes, order)
            inside = (*scopes, _Scope(s.var, s.extent, order))
            self.block(s.body, inside)
            self.exprs([r.value for r in s.reduces] + [c.next for c in s.carries], inside, len(s.body))
        elif isinstance(s, Contract):
            self.opaque |= {s.a.buffer, s.b.buffer}
            self.exprs((s.a.offset, s.b.offset), scopes, order)
            row = (*scopes, _Scope(s.i, s.m, order))
            self.block(s.epilogue, (*row, _Scope(s.j, s.n, 0)))
            for at, inner in enumerate(s.rows):
                self.stmt(inner, row, 1 + at)
        elif isinstance(s, Native):
            self.opaque |= {v.buffer for v in s.inputs + s.outputs}

    def exprs(self, es: Sequence[Expr | None], scopes: tuple[_Scope, ...], order: int) -> None:
        for load in _loads(es):
            self.loads.setdefault(load.buffer, []).append(_Access(load.buffer, load.index, scopes, order))


def _loads(es: Sequence[Expr | None]) -> Iterator[Load]:
    todo, seen = list(es), set()
    while todo:
        e = todo.pop()
        if e is None or id(e) in seen:
            continue
        seen.add(id(e))
        if isinstance(e, Load):
            yield e
            todo += [e.index, e.guard]
        elif isinstance(e, Alu):
            todo += e.args


def _affine(e: Expr) -> _Affine | None:
    """`e` as a sum of multiples of variables, or None."""
    if isinstance(e, Const):
        return _Affine({}, int(e.value))
    if isinstance(e, Var):
        return _Affine({e: 1}, 0)
    if isinstance(e, Load) or len(e.args) != 2 or e.op not in ("add", "sub", "mul"):
        return None
    a, b = (_affine(x) for x in e.args)
    if a is None or b is None:
        return None
    if e.op == "mul":
        if a.terms and b.terms:
            return None
        scale, other = (b.offset, a) if a.terms else (a.offset, b)
        return _combine(_Affine({}, 0), other, scale)
    return _combine(a, b, 1 if e.op == "add" else -1)


def _combine(a: _Affine, b: _Affine, scale: int) -> _Affine:
    terms = dict(a.terms)
    for var, c in b.terms.items():
        terms[var] = terms.get(var, 0) + scale * c
    return _Affine({v: c for v, c in terms.items() if c}, a.offset + scale * b.offset)


def _writes_once(kernel: Kernel, stores: list[_Access]) -> bool:
    """Point 1: each store's index is affine and injective over the grid and its loops."""
    for s in stores:
        form = _affine(s.index)
        around = {**dict(kernel.grid), **{x.var: x.extent for x in s.scopes}}
        if form is None or not form.terms.keys() <= around.keys():
            return False
        reach = 0  # of the smaller coefficients together
        for size, extent in sorted((abs(form.terms.get(v, 0)), n) for v, n in around.items() if n > 1):
            if size <= reach:
                return False
            reach += size * (extent - 1)
    return bool(stores)


def _safe(load: _Access, store: _Access) -> bool:
    """Points 2 and 3."""
    common = 0
    while common < min(len(load.scopes), len(store.scopes)) and load.scopes[common] == store.scopes[common]:
        common += 1
    mine, its = load.scopes[common:], store.scopes[common:]
    if [s.extent for s in mine] != [s.extent for s in its]:
        return False
    if mine:
        first = mine[0].order < its[0].order
    else:
        first = load.order <= store.order
    a, b = _affine(load.index), _affine(store.index)
    if not first or a is None or b is None:
        return False
    rename = {x.var: y.var for x, y in zip(mine, its)}
    return a.offset == b.offset and {rename.get(v, v): c for v, c in a.terms.items()} == b.terms


__all__ = ["inplace_pairs"]
