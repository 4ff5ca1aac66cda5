"""Alias analysis of kernel arguments, proved from the kernel's loops. The planner reuses memory in place by this rule, and a
renderer uses it to declare arguments as not aliased.

`may_overlap(kernel)` gives the (read, written) argument pairs for which overwriting the read buffer while the kernel
runs cannot change a result. The proof, for a read buffer r and a written buffer w of equal size:

1. every store to w has one affine index, injective over the grid and the loops around it: each element of w is written
   by one grid point in one iteration;
2. every load of r has the same index as every store, once the loops that enclose only the load are renamed to those that
   enclose only the store: an iteration of the common loops overwrites only elements that no other iteration reads;
3. the load comes first: in the store's own statement, in an earlier one, or in an earlier loop of the same body.

So no element of r is read after it was overwritten, in any order of grid points. Pairs without a proof are left out.
A collective declares whether it works in place.
"""

from __future__ import annotations

from rlx.ir.access import Access, accesses
from rlx.ir.kernel import Const, Expr, Kernel, Load, Var, kept
from rlx.records import record


@record
class _Affine:
    """offset + sum of coefficient * var; no zero coefficients."""

    terms: dict[Var, int]
    offset: int


@kept
def may_overlap(kernel: Kernel) -> frozenset[tuple[int, int]]:
    """(read argument, written argument) pairs that may share memory. Arguments are positions in kernel.buffers."""
    if kernel.collective:
        return frozenset({(0, 1)} if kernel.collective.attrs.in_place else ())  # type: ignore[union-attr]
    if kernel.flow:
        return kernel.flow.in_place
    found = accesses(kernel)
    opaque = {a.buffer for a in found if a.index is None or a.again}  # the order of accesses to its elements is unknown
    pairs = set()
    for w, written in enumerate(kernel.buffers):
        stores = [a for a in found if a.buffer is written]
        if not written.writable or written in opaque or not all(a.stores for a in stores) or not _writes_once(kernel, stores):
            continue
        for r, read in enumerate(kernel.buffers):
            if read.writable or read in opaque or (read.size, read.dtype.itemsize) != (written.size, written.dtype.itemsize):
                continue
            if all(_safe(load, store) for load in found if load.buffer is read for store in stores):
                pairs.add((r, w))
    return frozenset(pairs)


def unaliased(kernel: Kernel) -> tuple[bool, ...]:
    """For each argument, True if C's restrict holds for it, except towards other arguments that are only read."""
    shared = {argument for pair in may_overlap(kernel) for argument in pair}
    return tuple(n not in shared for n in range(len(kernel.buffers)))


def _affine(e: Expr | None) -> _Affine | None:
    """`e` as a sum of multiples of variables, or None."""
    if isinstance(e, Const):
        return _Affine({}, int(e.value))
    if isinstance(e, Var):
        return _Affine({e: 1}, 0)
    if e is None or isinstance(e, Load) or e.op not in ("add", "sub", "mul"):
        return None
    a, b = (_affine(x) for x in e.args)
    if a is None or b is None or (e.op == "mul" and a.terms and b.terms):
        return None
    if e.op == "mul":
        scale, other = (b.offset, a) if a.terms else (a.offset, b)
        return _combine(_Affine({}, 0), other, scale)
    return _combine(a, b, 1 if e.op == "add" else -1)


def _combine(a: _Affine, b: _Affine, scale: int) -> _Affine:
    terms = dict(a.terms)
    for var, c in b.terms.items():
        terms[var] = terms.get(var, 0) + scale * c
    return _Affine({v: c for v, c in terms.items() if c}, a.offset + scale * b.offset)


def _writes_once(kernel: Kernel, stores: list[Access]) -> bool:
    """Point 1: each store's index is affine and injective over the grid and its loops."""
    for s in stores:
        form = _affine(s.index)
        around = {**dict(kernel.grid), **dict(s.loops)}
        if form is None or not form.terms.keys() <= around.keys():
            return False
        reach = 0  # largest sum that the smaller coefficients give
        for size, extent in sorted((abs(form.terms.get(v, 0)), n) for v, n in around.items() if n > 1):
            if size <= reach:
                return False
            reach += size * (extent - 1)
    return bool(stores)


def _safe(load: Access, store: Access) -> bool:
    """Points 2 and 3."""
    common = 0
    while common < min(len(load.loops), len(store.loops)) and load.path[common] == store.path[common]:
        common += 1
    mine, its = load.loops[common:], store.loops[common:]
    before, after = load.path[common], store.path[common]
    a, b = _affine(load.index), _affine(store.index)
    first = before < after or (before == after and not mine)
    if not first or [n for _, n in mine] != [n for _, n in its] or a is None or b is None:
        return False
    rename = {x: y for (x, _), (y, _) in zip(mine, its)}
    return a.offset == b.offset and {rename.get(v, v): c for v, c in a.terms.items()} == b.terms


__all__ = ["may_overlap", "unaliased"]
