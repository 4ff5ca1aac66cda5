"""Vector accesses: the loads and stores of a loop body that V consecutive iterations can combine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.ir.nest import distinct

from rlx.ir.kernel import (  # isort: skip
    Alu, Buffer, Check, Const, Expr, Kernel, Let, Load, Local, Loop, Stmt, Store, Var, coefficient, expressions, walk,
)  # fmt: skip

BYTES = 16  # of one access
MOST = 8  # elements of one thread at once
SHORT_ROW = 64  # elements of a row that is found by a number in memory


def width(stmts: Sequence[Stmt], ends: Sequence[Expr], var: Var, extent: int, accesses: int = 1) -> int:
    """How many consecutive iterations one thread should do at once; 1: no access gains by it. `accesses`: of a load, at most."""
    if any(isinstance(s, Loop) for s in stmts):
        return 1
    for size in sorted({MOST * accesses, MOST, 4, 2}, reverse=True):
        found = [*loads(stmts, ends, var, size), *stores(stmts, var, size)]
        if extent % size == 0 and found and size * min(x.buffer.dtype.itemsize for x in found) <= BYTES * accesses:
            return size
    return 1


def lone(loop: Loop) -> bool:
    """Whether iterations only store, and load elements one by one: a thread does several at once. Those that load an element
    where its own condition holds could store pairs."""
    stored = loop.vector and not loop.reduces and not loop.carries and all(isinstance(s, Let | Store | Check) for s in loop.body)
    read = [x for x in walk(loop.body) if isinstance(x, Load)]
    apart = bool(read) and not any(x.guard is None or steady(x.guard, loop.var, 2) for x in read)
    return stored and width(loop.body, (), loop.var, loop.extent) <= 1 + apart


def loads(stmts: Sequence[Stmt], ends: Sequence[Expr], var: Var, size: int) -> list[Load]:
    """Loads of consecutive elements that start at multiples of `size` elements, all or none of them."""
    found = (x for x in walk((tuple(stmts), tuple(ends))) if isinstance(x, Load) and _known(x, stmts))
    return [x for x in found if in_vector(x, var, size)]


def loads_ahead(stmts: Sequence[Stmt]) -> list[Load]:
    """Loads that may be done before all statements: of memory that is only read, at places that depend on nothing that these
    compute. Those that the places of others depend on come first."""
    own = {s.var for s in stmts if isinstance(s, Let)}
    found = (e for e in distinct(expressions(stmts)) if isinstance(e, Load))
    read = (x for x in found if isinstance(x.buffer, Buffer) and not x.buffer.writable)
    return [x for x in read if own.isdisjoint(walk((x.index, x.guard)))]


def stores(stmts: Sequence[Stmt], var: Var, size: int) -> list[Store]:
    return [s for s in stmts if isinstance(s, Store) and _known(s, stmts) and in_vector(s, var, size)]


def rows_last(kernel: Kernel) -> Kernel:
    """The kernel with the axis last along which rows lie that it finds by numbers in memory, if these are short and all else that
    it loads is the same along them: adjacent threads read adjacent parts of a row, and the places of few rows."""
    plain = not (kernel.limits or kernel.locals) and all(isinstance(s, Let | Store | Check) for s in kernel.body)
    loads = [x for x in walk(kernel.body) if isinstance(x, Load)]
    found = [x for x in loads if any(isinstance(e, Load) for e in walk(x.index))]
    for axis in kernel.grid[:-1] if plain and found else ():
        along = all(coefficient(x.index, axis[0]) == (x in found) for x in loads)
        if along and axis[1] <= SHORT_ROW and axis[1] % MOST == 0:
            return replace(kernel, grid=(*(other for other in kernel.grid if other is not axis), axis))
    return kernel


def _known(x: Load | Store, stmts: Sequence[Stmt]) -> bool:
    """True if its condition depends on nothing that the statements compute."""
    return x.guard is None or {s.var for s in stmts if isinstance(s, Let)}.isdisjoint(walk(x.guard))


def in_vector(x: Load | Store, var: Var, size: int) -> bool:
    whole = x.guard is None or steady(x.guard, var, size)
    stride = coefficient(x.index, var)
    fits = stride == 1 and size & (size - 1) == 0 and aligned(x.index, var, size) if size > 1 else bool(stride)
    return whole and not isinstance(x.buffer, Local) and fits


def steady(e: Expr, var: Var, size: int) -> bool:
    """True if a condition is the same for `size` values of `var` from each multiple of `size` on."""
    if coefficient(e, var) == 0:
        return True
    if not isinstance(e, Alu) or e.op not in ("and", "or", "not", "lt", "le"):
        return False
    if e.op in ("and", "or", "not"):
        return all(steady(a, var, size) for a in e.args)
    varying, fixed = e.args if e.op == "lt" else reversed(e.args)  # var < 8, 8 <= var: true for all of a vector, or for none
    ends = coefficient(varying, var) == 1 and coefficient(fixed, var) == 0
    return ends and aligned(varying, var, size) and aligned(fixed, var, size)


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


__all__ = ["aligned", "in_vector", "loads", "loads_ahead", "lone", "rows_last", "steady", "stores", "width"]
