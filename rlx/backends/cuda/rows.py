"""Rows kept in registers: each thread of a team keeps its elements of a row between the loops over the row, so that the row is
read once and no loop waits for shared memory."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import product

from rlx.backends.cuda.vectors import BYTES, MOST, loads, stores, width
from rlx.ir.dtype import f64, index_
from rlx.ir.nest import distinct, operands, postorder, substitute
from rlx.ir.overlap import may_overlap
from rlx.records import record

from rlx.ir.kernel import (  # isort: skip
    Alu, Buffer, Check, Const, Expr, Kernel, Let, Load, Local, Loop, Store, Var, expressions, is_const, kept, walk,
)  # fmt: skip

AGAIN = 8  # operations of an element that are worth computing again, of those of which each takes a few instructions
CHEAP = frozenset("add sub mul neg max min abs exp cast select lt le eq ne and or not".split())
SMALL = 4  # elements that a thread takes at once, at least, if that deals out the row evenly
PLACES = 28  # registers for elements at most, where loads are short, and their places take more
Key = tuple[object, ...]


@record
class Row:
    """`extent` elements: thread t of a team has `size` from (n * team + t) * size on, for n in range(rounds), counted from the
    first one of its part. `locals` are registers, and so are the loads with these `keys`, which several loops do. `packed`: two
    elements share a register."""

    extent: int
    size: int
    rounds: int
    locals: frozenset[Local]
    keys: frozenset[Key]
    packed: bool = False

    @property
    def large(self) -> bool:
        """Whether a thread of a packed row has more than 64 registers."""
        return self.packed and self.rounds * self.size * len(self.keys) > 64


def row_loops(kernel: Kernel, carries: bool = False) -> list[Loop]:
    """The loops of a kernel that does nothing but loops over the same row; else none. `carries`: running totals count, too."""
    loops = [s for s in kernel.body if isinstance(s, Loop)]
    if not loops or kernel.limits or not all(isinstance(s, Let | Store | Check | Loop) for s in kernel.body):
        return []
    extent = loops[0].extent
    down = len(loops) == 1 and _only_reduces(loops[0])  # with more loops, what they keep would take too many registers
    fits = (s.extent == extent and _flat(s) and (carries if s.carries else s.vector or down) for s in loops)
    return loops if all(fits) else []


def row_of(
    kernel: Kernel, teams: tuple[int, ...], registers: int, parts: tuple[int, ...] = (1,), packed: bool = False
) -> tuple[int, Row] | None:
    """The first team that can keep its row, or its part of one, in that many registers of a thread, and the row; None if there
    is nothing to keep, or no room. `packed`: only if that is vectors of 16-bit elements."""
    if not (loops := row_loops(kernel)):
        return None
    extent = loops[0].extent
    widths = [width(s.body, [r.value for r in s.reduces], s.var, extent) for s in loops]
    most = min((n for n in widths if n > 1), default=1)
    wide = max((x.buffer.dtype.itemsize for s in loops for x in [*_loads(s, most), *stores(s.body, s.var, most)]), default=1)
    while most > SMALL and most * wide > BYTES:  # threads that are more than 16 bytes apart read a bank of the cache in turn
        most //= 2
    kept = repeated(loops, most)
    own = own_locals(kernel, loops)
    if len(own) < len(kernel.locals) or not (own or kept):
        return None
    held = [[x.dtype.bits for x in own], [k[0].dtype.bits for k in kept]]  # type: ignore[attr-defined]
    if packed and (most < SMALL or own or {*held[1]} != {16}):
        return None
    read = [n for n, s in enumerate(loops) if not kept.isdisjoint(key_of(x, s.var) for x in _loads(s, most))]
    made = [n for n, s in enumerate(loops) if not {x.buffer for x in s.body if isinstance(x, Store)}.isdisjoint(own)]
    taken = sum if read and made and read[-1] > made[0] else max  # else the elements take the places of those they are made of
    # narrow elements count as the f32 that they become: longer parts leave too few teams to overlap reading and writing
    for least, team, count in product((16,) if packed else (32, 16), teams, parts):
        sizes = [n for n in (most, most // 2) if n >= min(most, SMALL) and extent % (team * n) == 0]
        size = sizes[0] if sizes else most
        while size > 1 and extent < team * size:
            size //= 2
        rounds = -(-extent // (count * team * size))
        room = min(registers, PLACES) if packed and size < MOST else registers
        if rounds * size * taken(sum(max(least, bits) for bits in kind) for kind in held) <= 32 * room:
            return team, Row(extent, size, rounds, frozenset(own), repeated(loops, size), packed)
    return None


def recomputed(kernel: Kernel, narrow: bool = True) -> Kernel | None:
    """The kernel without Locals of whole rows: loops compute their elements again from those of memory, `narrow` ones of 16 bits,
    of which a thread keeps twice as many. None: there are none, that takes too many operations or loads, or a result may have
    the memory of what is loaded again (ir/overlap.py)."""
    loops = row_loops(kernel)
    made = {x.buffer: (s.var, x.value) for s in loops for x in s.body if isinstance(x, Store) and isinstance(x.buffer, Local)}
    plain = all(isinstance(x, Store) for s in loops for x in s.body)
    if not made or not {*own_locals(kernel, loops)} == {*kernel.locals} == {*made} or not plain:
        return None
    inside = [*distinct(value for _, value in made.values())]
    given = [x for x in inside if isinstance(x, Load)]
    fits = all(isinstance(x.buffer, Buffer) and (x.buffer.dtype.itemsize == 2 or not narrow) for x in given)
    keys = {key_of(x, var) for var, value in made.values() for x in walk(value) if isinstance(x, Load)}
    work = [e for e in inside if isinstance(e, Alu) and e.dtype != index_]
    cheap = len(work) <= AGAIN and all(e.op in CHEAP and e.dtype != f64 for e in work)
    if not fits or not cheap or (narrow and len(keys) > 1):
        return None

    def again(s: Loop) -> Loop:
        memo: dict[int, Expr] = {}
        for x in [x for x in distinct(expressions([s])) if isinstance(x, Load) and x.buffer in made]:
            var, value = made[x.buffer]  # type: ignore[index]
            memo[id(x)] = substitute(value, {var: s.var})
        body = tuple(x for x in s.body if isinstance(x, Store) and x.buffer not in made)
        return replace(s, body=substitute(body, {}, memo), reduces=substitute(s.reduces, {}, memo))

    found = replace(kernel, body=tuple(again(s) if isinstance(s, Loop) else s for s in kernel.body), locals=())
    return found if may_overlap(found) >= may_overlap(kernel) else None


def is_exp(e: Expr) -> bool:
    return isinstance(e, Alu) and e.op == "exp"


@kept
def only_added(kernel: Kernel) -> bool:
    """Whether each exponential is that of a number less the greatest of such numbers in its row, so that a sum of them is 1 at
    least, and nothing else is made of them than sums, and products with one number of the row. Then it shows nowhere but in
    results below 2^-126 whether those that are below that are 0."""
    loops = [s for s in kernel.body if isinstance(s, Loop)]
    tops = {r.result: expr_key(r.value, s.var) for s in loops for r in s.reduces if r.op == "max"}
    values = {s.var: s.value for s in kernel.body if isinstance(s, Let)}
    for var, e in values.items():  # 0 in place of the greatest one, where that is -inf, and so are all
        if isinstance(e, Alu) and e.op == "select" and e.args[2] in tops and is_const(e.args[1], 0):
            none = values.get(e.args[0])  # type: ignore[call-overload]
            if isinstance(none, Alu) and none.op == "eq" and none.args[0] is e.args[2] and is_const(none.args[1], -math.inf):
                tops[var] = tops[e.args[2]]  # type: ignore[index]
    held = {x.buffer for s in loops for x in s.body if isinstance(x, Store) and isinstance(x.buffer, Local)}
    made = dict[int, Expr]()  # exponentials, and products of them
    for s in loops:
        for e in distinct(expressions([s])):
            if is_exp(e):
                (x,) = e.args  # type: ignore[attr-defined]
                if not isinstance(x, Alu) or x.op != "sub" or tops.get(x.args[1]) != expr_key(x.args[0], s.var):  # type: ignore[call-overload]
                    return False
            elif isinstance(e, Load) and e.buffer in held:
                pass
            elif all(id(x) not in made for x in operands(e)):
                continue
            elif not isinstance(e, Alu) or not e.dtype.is_float or not _keeps_zero(e, made):
                return False
            made[id(e)] = e
    sums = [r.value for s in loops for r in s.reduces if r.op != "max"]
    alone = not any(is_exp(e) for e in distinct(expressions([s for s in kernel.body if not isinstance(s, Loop)])))
    return alone and all(map(is_exp, sums)) and all(isinstance(x, Store | Check) for s in loops for x in s.body)


def stores_in_loops(kernel: Kernel) -> bool:
    """Whether a row has results for each element, and not only for itself."""
    return any(isinstance(x, Store) for s in kernel.body if isinstance(s, Loop) for x in walk((s,)))


def _keeps_zero(e: Alu, made: dict[int, Expr]) -> bool:
    """Whether it only casts one of the numbers in `made`, or multiplies or divides it by one number of the row."""
    first, *others = sorted(e.args, key=lambda x: id(x) not in made) if e.op == "mul" else e.args
    return e.op in ("mul", "div", "cast") and id(first) in made and all(isinstance(x, Var | Const) for x in others)


def repeated(loops: list[Loop], size: int, along: Var | None = None) -> frozenset[Key]:
    """The loads that several loops do, in vectors of `size`: of elements of the row, or `along` another axis."""
    found = Counter(k for s in loops for k in {key_of(x, along or s.var) for x in _loads(s, size, along)})
    return frozenset(k for k, n in found.items() if n > 1)


def _loads(s: Loop, size: int, along: Var | None = None) -> list[Load]:
    return [x for x in loads(s.body, [r.value for r in s.reduces], along or s.var, size) if x.guard is None]


def _only_reduces(loop: Loop) -> bool:
    """Whether iterations are independent but for the reductions: a loop down columns, in one of several columns at once."""
    return bool(loop.reduces) and not any(isinstance(s, Store) for s in loop.body)


def _flat(loop: Loop) -> bool:
    return all(isinstance(s, Let | Store | Check) for s in loop.body)


def own_locals(kernel: Kernel, loops: list[Loop]) -> list[Local]:
    """The Locals of which a thread uses only its own elements."""
    shared = {x.buffer for s in kernel.body if not isinstance(s, Loop) for x in walk((s,)) if _touches(x)}
    for s in loops:
        shared |= {x.buffer for x in walk((s,)) if _touches(x) and x.index is not s.var}
    return [x for x in kernel.locals if x not in shared and x.size >= loops[0].extent]


def _touches(x: object) -> bool:
    return isinstance(x, Load | Store) and isinstance(x.buffer, Local)


def key_of(x: Load, var: Var) -> Key:
    """Equal for loads of the same elements by loops over the row, whose variable is `var`."""
    return x.buffer, *(expr_key(e, var) for e in operands(x))


def expr_key(e: Expr, var: Var) -> Key:
    """Equal for the same values in loops over the row, whose variable is `var`."""
    known: dict[int, Key] = {}
    for x in postorder(e, known):
        known[id(x)] = _key(x, var, known)
    return known[id(e)]


def _key(e: Expr, var: Var, known: dict[int, Key]) -> Key:
    if e is var:
        return ("own",)
    if isinstance(e, Const):
        return ("const", e.value)
    parts = tuple(known[id(a)] for a in operands(e))
    return ("load", e.buffer, *parts) if isinstance(e, Load) else (e.op, *parts) if isinstance(e, Alu) else (e,)


__all__ = [
    "Row", "expr_key", "key_of", "only_added", "own_locals", "recomputed", "repeated", "row_loops", "row_of", "stores_in_loops",
]  # fmt: skip
