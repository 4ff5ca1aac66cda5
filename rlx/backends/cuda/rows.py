"""Rows kept in registers: each thread of a team keeps its elements of a row between the loops over the row, so that the row is
read once and no loop waits for memory that the threads share."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from rlx.backends.cuda.vectors import loads, width
from rlx.backends.shared.nest import operands, postorder
from rlx.ir.kernel import Alu, Check, Const, Expr, Kernel, Let, Load, Local, Loop, Store, Var, walk

SMALL = 4  # elements that a thread takes at once, at least, if that deals out the row evenly
Key = tuple[object, ...]


@dataclass(frozen=True)
class Row:
    """`extent` elements: thread t of a team has `size` from (n * team + t) * size on, for n in range(rounds). `locals` are
    registers, and so are the loads with these `keys`, which several loops do."""

    extent: int
    size: int
    rounds: int
    locals: frozenset[Local]
    keys: frozenset[Key]


def row_of(kernel: Kernel, teams: tuple[int, ...], registers: int) -> tuple[int, Row] | None:
    """The smallest team that can keep its row in that many registers of a thread, and the row; None if there is nothing to keep,
    or no room."""
    loops = [s for s in kernel.body if isinstance(s, Loop)]
    if not loops or kernel.limits or not all(isinstance(s, Let | Store | Check | Loop) for s in kernel.body):
        return None
    extent = loops[0].extent
    if not all(s.vector and not s.carries and s.extent == extent and _flat(s) for s in loops):
        return None
    most = max(width(s.body, [r.value for r in s.reduces], s.var, extent) for s in loops)
    kept = _repeated(loops, most)
    own = _own_locals(kernel, loops)
    if len(own) < len(kernel.locals) or not (own or kept):
        return None
    bits = sum(max(16, x.dtype.bits) for x in own) + sum(max(16, k[0].dtype.bits) for k in kept)  # type: ignore[attr-defined]
    for team in teams:
        sizes = [n for n in (most, most // 2) if n >= min(most, SMALL) and extent % (team * n) == 0]
        size = sizes[0] if sizes else most
        while size > 1 and extent < team * size:
            size //= 2
        rounds = -(-extent // (team * size))
        if rounds * size * bits <= 32 * registers:
            return team, Row(extent, size, rounds, frozenset(own), _repeated(loops, size))
    return None


def _repeated(loops: list[Loop], size: int) -> frozenset[Key]:
    """The loads that several loops do, in vectors of `size`."""
    found = Counter(k for s in loops for k in {key_of(x, s.var) for x in _loads(s, size)})
    return frozenset(k for k, n in found.items() if n > 1)


def _loads(s: Loop, size: int) -> list[Load]:
    return loads(s.body, [r.value for r in s.reduces], s.var, size)


def _flat(loop: Loop) -> bool:
    return all(isinstance(s, Let | Store | Check) for s in loop.body)


def _own_locals(kernel: Kernel, loops: list[Loop]) -> list[Local]:
    """The Locals of which a thread uses only its own elements."""
    shared = {x.buffer for s in kernel.body if not isinstance(s, Loop) for x in walk((s,)) if _touches(x)}
    for s in loops:
        shared |= {x.buffer for x in walk((s,)) if _touches(x) and x.index is not s.var}
    return [x for x in kernel.locals if x not in shared and x.size == loops[0].extent]


def _touches(x: object) -> bool:
    return isinstance(x, Load | Store) and isinstance(x.buffer, Local)


def key_of(x: Load, var: Var) -> Key:
    """Equal for loads of the same elements by loops over the row, whose variable is `var`."""
    known: dict[int, Key] = {}
    for e in postorder(x, known):
        known[id(e)] = _key(e, var, known)
    return x.buffer, *known[id(x)][2:]


def _key(e: Expr, var: Var, known: dict[int, Key]) -> Key:
    if e is var:
        return ("own",)
    if isinstance(e, Const):
        return ("const", e.value)
    parts = tuple(known[id(a)] for a in operands(e))
    return ("load", e.buffer, *parts) if isinstance(e, Load) else (e.op, *parts) if isinstance(e, Alu) else (e,)


__all__ = ["Row", "key_of", "row_of"]
