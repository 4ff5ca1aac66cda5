"""Vector accesses: the loads and stores of a loop body that V consecutive iterations can do at once."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.kernel import Alu, Const, Expr, Load, Local, Loop, Stmt, Store, Var, coefficient, walk

BYTES = 16  # of one access
MOST = 8  # elements of one thread at once


def width(stmts: Sequence[Stmt], ends: Sequence[Expr], var: Var, extent: int) -> int:
    """How many consecutive iterations one thread should do at once; 1: no access gains by it."""
    if any(isinstance(s, Loop) for s in stmts):
        return 1
    for size in (MOST, 4, 2):
        found = [*loads(stmts, ends, var, size), *stores(stmts, var, size)]
        if extent % size == 0 and found and size * min(x.buffer.dtype.itemsize for x in found) <= BYTES:
            return size
    return 1


def loads(stmts: Sequence[Stmt], ends: Sequence[Expr], var: Var, size: int) -> list[Load]:
    """Unconditional loads of consecutive elements that start at multiples of `size` elements."""
    found = (x for x in walk((tuple(stmts), tuple(ends))) if isinstance(x, Load) and x.guard is None)
    return [x for x in found if in_vector(x, var, size)]


def stores(stmts: Sequence[Stmt], var: Var, size: int) -> list[Store]:
    return [s for s in stmts if isinstance(s, Store) and s.guard is None and in_vector(s, var, size)]


def in_vector(x: Load | Store, var: Var, size: int) -> bool:
    return not isinstance(x.buffer, Local) and coefficient(x.index, var) == 1 and aligned(x.index, var, size)


def aligned(e: Expr, var: Var | None, size: int) -> bool:
    """True if `e` is a multiple of `size` wherever `var` (if there is one) is."""
    if e is var:
        return True
    if isinstance(e, Const):
        return int(e.value) % size == 0
    if not isinstance(e, Alu):
        return False
    if e.op in ("add", "sub"):
        return all(aligned(a, var, size) for a in e.args)
    return e.op == "mul" and any(aligned(a, var, size) for a in e.args)


__all__ = ["aligned", "loads", "stores", "width"]
