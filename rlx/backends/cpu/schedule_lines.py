"""Schedules of loops along one axis that choose the best element or carry a running total.

Contiguous lines: argmax and argmin find the best block first, in vectors, then the position in it. Contiguous columns: many
adjacent lines are scanned together, row by row, with the best or the total of each in a Local.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlx.backends.cpu.loops import TASKS_PER_THREAD, contiguity
from rlx.backends.shared.lines import better, is_nan
from rlx.backends.shared.long_sums import long_totals, totals_in_blocks
from rlx.host.processor import fetches_ahead
from rlx.ir.dtype import i32, index_
from rlx.ir.nest import substitute

from rlx.ir.kernel import (  # isort: skip
    EXTREMES, Carry, Check, Expr, Kernel, Let, Load, Local, Loop, Reduce, Stmt, Store, Var, coefficient, const, k, walk,
)  # fmt: skip
from rlx.ir.target import Target

ROWS_OF_BLOCK = 4  # vectors of which the best is found before it is compared with the best so far
LINES_TOGETHER = 8  # whose best elements are searched at once
LONG_COLUMN = 64  # elements from which it pays to search the best block of a column again, by gathers
LANES = 16  # shorter loops are not vectorized
COLUMNS = range(512, 4097)  # columns scanned together; reading shorter parts of memory pages is slow
SHORTEST_RUN = 128  # of columns, where more than two threads make good for such short parts
LOCALS, MOST_LOCALS = 256 << 10, 4 << 20  # bytes of the Locals of columns together: wanted, and if their number has no divisor
ROWS_AT_ONCE = 4  # see _rows_at_once


def along_lines(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with its loop along lines scheduled, if its body is one such loop and statements that use the result."""
    loop = next(iter(kernel.body), None)
    if not isinstance(loop, Loop) or kernel.locals or any(not isinstance(s, Store) for s in (*loop.body, *kernel.body[1:])):
        return kernel
    last, size = kernel.grid[-1] if kernel.grid else (loop.var, 1)
    down = kernel.grid and contiguity(loop, last) > contiguity(loop, loop.var)  # a line is a column of contiguous rows
    together = down and size >= LANES and not any(x.var is last for x in kernel.limits)
    if loop.carries and not loop.reduces:
        if together and len(loop.carries) == 1:
            return _totals_of_columns(long_totals(kernel), target)
        lanes = replace(loop, vector=loop.vector and loop.extent >= LANES)
        made = (lanes, *kernel.body[1:]) if kernel.body[1:] else totals_in_blocks(lanes)
        return long_totals(replace(kernel, body=made))
    if loop.carries or loop.body or len(loop.reduces) != 1 or loop.reduces[0].op not in EXTREMES or not loop.extent:
        return kernel
    if together and loop.extent < 1 << 31:
        return _best_of_columns(kernel, loop, loop.reduces[0], target)
    lanes = min(LANES, target.vector_bytes // max(4, loop.reduces[0].value.dtype.itemsize))  # positions are i32
    return kernel if down or loop.extent < 2 * LANES else _best_of_blocks(kernel, loop, loop.reduces[0], lanes, target.threads)


def columns_together(kernel: Kernel, target: Target) -> Kernel:
    """Loops over each of many adjacent columns, in Locals, run over a few columns at a time, row by row."""
    if not kernel.grid or not kernel.locals or any(x.var is kernel.grid[-1][0] for x in kernel.limits):
        return kernel
    *grid, (column, lines) = kernel.grid
    loops = [s for s in kernel.body if isinstance(s, Loop) and not s.reduces and not s.carries]
    plain = len(loops) == len(kernel.body) and all(isinstance(s, Store | Check) for loop in loops for s in loop.body)
    if not plain or sum(contiguity(loop, column) for loop in loops) <= 0:
        return kernel
    share, run = math.prod(n for _, n in kernel.grid) // target.threads, Var("run")
    nbytes = sum(x.size * x.dtype.itemsize for x in kernel.locals)
    widths = [lines // n for n in range(1, lines // LANES + 1) if lines % n == 0]
    fitting = [n for n in widths if n <= share and n * nbytes <= LOCALS]
    width = max(fitting) if fitting else min(widths, default=0)
    if not width or width * nbytes > MOST_LOCALS:
        return kernel
    wide = {x: Local(x.name, x.dtype, x.size * width) for x in kernel.locals}

    def of_columns(stmts: tuple[Stmt, ...], together: bool) -> tuple[Stmt, ...]:
        """The statements for each column of the run. A row that is looked up for all columns `together` is looked up once."""
        here, rows, memo = Var("c"), dict[int, tuple[Var, Expr]](), dict[int, Expr]()
        to = {column: k.add(k.mul(run, const(width)), here)}

        def place(index: Expr) -> Expr:
            row = rows.setdefault(id(index), (Var("row"), index))[0] if together else substitute(index, to, memo)
            return k.add(k.mul(row, const(width)), here)

        for x in walk(stmts):
            if isinstance(x, Load) and x.buffer in wide:
                memo[id(x)] = Load(wide[x.buffer], place(x.index), x.guard and substitute(x.guard, to, memo))
        made = [
            replace(new, buffer=wide[s.buffer], index=place(s.index)) if isinstance(s, Store) and s.buffer in wide else new
            for s, new in zip(stmts, substitute(stmts, to, memo))
        ]  # fmt: skip
        return *(Let(*x) for x in rows.values()), Loop(here, width, tuple(made), vector=together)

    def each(loop: Loop) -> Loop:
        if not same_rows(loop.body, column):
            return replace(loop, body=of_columns(loop.body, False))
        parts = [of_columns((s,), True) if isinstance(s, Store) else (s,) for s in loop.body]
        return replace(loop, body=tuple(s for part in parts for s in part))

    body = tuple(each(loop) for loop in loops)
    return replace(kernel, locals=tuple(wide.values()), grid=(*grid, (run, lines // width)), body=body)


def same_rows(body: Sequence[Stmt], column: Var) -> bool:
    """Whether all columns check the same, and access the same rows of Locals."""
    rows = [x.index for x in walk(tuple(body)) if isinstance(x, Load | Store) and isinstance(x.buffer, Local)]
    return all(coefficient(e, column) == 0 for e in (*rows, *(s.ok for s in body if isinstance(s, Check))))


def _totals_of_columns(kernel: Kernel, target: Target) -> Kernel:
    """A few rows at a time, with a total per column. Each run of columns is a grid point."""
    loop = kernel.body[0]
    assert isinstance(loop, Loop)
    *grid, (column, lines) = kernel.grid
    run, runs = _runs_of_columns(kernel, lines, target.threads) if target.threads > 2 else (Var("run"), 1)
    width, here = lines // runs, Var("c")
    at = k.add(k.mul(run, const(width)), here)
    (carry,), at_once = loop.carries, _rows_at_once(target)
    kept = Local("totals", carry.var.dtype, width)

    def rows(first: Expr, count: int) -> Loop:
        """Adds `count` rows from `first` on to the totals: all their loads, then all stores, which would hold up a load of a row
        below whose address has the same low 12 bits."""
        body, total = list[Stmt](), Load(kept, here)
        for n in range(count):
            new = {loop.var: k.add(first, const(n)), carry.var: total, column: at}
            statements, total = substitute((loop.body, carry.next), new)
            body += statements
        return Loop(here, width, (*body, Store(kept, here, total)), vector=True)

    i, (rounds, rest) = Var("i"), divmod(loop.extent, at_once)
    clear = Loop(here, width, (Store(kept, here, substitute(carry.init, {column: at})),), vector=True)
    more = Loop(i, rounds, (rows(k.mul(i, const(at_once)), at_once),))
    last = (rows(const(loop.extent - rest), rest),) if rest else ()
    after = substitute(kernel.body[1:], {carry.var: Load(kept, here), column: at})
    out = (Loop(here, width, after, vector=True),) if after else ()
    return replace(kernel, locals=(kept,), grid=(*grid, (run, runs)), body=(clear, more, *last, *out))


def _rows_at_once(target: Target) -> int:
    """Rows read per write of the running best or total: a few on Intel's cores, where a load waits for a store at the same low 12
    bits of the address. On Zen 5 the order of memory is 1.2 to 1.4 times as fast."""
    return ROWS_AT_ONCE if fetches_ahead(target.features) else 1


def _runs_of_columns(kernel: Kernel, lines: int, threads: int) -> tuple[Var, int]:
    """A grid variable over equal runs of the last dimension, and their number: long ones, but enough for the threads."""
    share = math.prod(n for _, n in kernel.grid) // threads  # columns per thread
    least = COLUMNS[0] if threads <= 2 else min(max(share, SHORTEST_RUN), COLUMNS[0])
    most = max(least, min(share, COLUMNS[-1]))
    return Var("run"), next((n for n in range(-(-lines // most), lines // least + 1) if lines % n == 0), 1)


def _best_of_columns(kernel: Kernel, loop: Loop, chosen: Reduce, target: Target) -> Kernel:
    """A few rows at a time, with the best of each column in local memory. Each run of columns is a grid point. Of long columns
    the number of the best rows is kept, and which of them it was is found out at the end."""
    *grid, (line, lines) = kernel.grid
    run, runs = _runs_of_columns(kernel, lines, target.threads)
    width, column, i = lines // runs, Var("c"), Var("i")
    bests, places = Local("bests", chosen.value.dtype, width), Local("places", i32, width)
    long, at_once = loop.extent >= LONG_COLUMN, _rows_at_once(target)

    def value(row: Expr) -> Expr:
        return substitute(chosen.value, {loop.var: row, line: k.add(k.mul(run, const(width)), column)})

    def rows(first: Expr, count: int, number: Expr, kept: tuple[Expr, ...] = ()) -> Loop:
        """Updates the best with `count` rows from `first` on; the very first ones have no best before them."""
        each = [k.add(first, const(n)) for n in range(count)]
        for block, place in [(each, number)] if long else [([row], row) for row in each]:
            kept = _updated(chosen.op, [value(row) for row in block], k.cast(place, i32), kept)
        return Loop(column, width, (Store(bests, column, kept[0]), Store(places, column, kept[1])), vector=True)

    begin = at_once if long else 1
    kept, (rounds, rest) = (Load(bests, column), Load(places, column)), divmod(loop.extent - begin, at_once)
    more = Loop(i, rounds, (rows(k.add(k.mul(i, const(at_once)), const(begin)), at_once, k.add(i, const(1)), kept),))
    last = (rows(const(loop.extent - rest), rest, const(rounds + 1), kept),) if rest else ()
    place: Expr = k.cast(kept[1], index_)
    if long:
        top, first = kept[0], k.mul(place, const(at_once))
        inside = [k.min(k.add(first, const(n)), const(loop.extent - 1)) for n in range(at_once)]
        place = inside[-1]
        for row in reversed(inside[:-1]):
            place = k.select(_is_best(value(row), top), row, place)
    to = {chosen.result: k.cast(place, chosen.result.dtype), line: k.add(k.mul(run, const(width)), column)}
    out = Loop(column, width, substitute(kernel.body[1:], to), vector=True)
    body = (rows(const(0), begin, const(0)), more, *last, out)
    return replace(kernel, locals=(bests, places), grid=(*grid, (run, runs)), body=body)


def _best_of_blocks(kernel: Kernel, loop: Loop, chosen: Reduce, lanes: int, threads: int) -> Kernel:
    """Each lane keeps the best of its elements and the number of the block it was in; then the first position of the best of all
    lanes in its block. That is a long chain of operations, so it is done for several lines, whose chains overlap."""
    together, grid = 1, kernel.grid
    if grid and not any(x.var is grid[-1][0] for x in kernel.limits):
        most = min(LINES_TOGETHER, math.prod(n for _, n in grid) // (TASKS_PER_THREAD * threads))
        together = max(n for n in range(1, max(most, 1) + 1) if grid[-1][1] % n == 0)
    bests, places = Local("bests", chosen.value.dtype, together * lanes), Local("places", i32, together * lanes)
    line, at, after = Var("line"), k.const(0), kernel.body[1:]
    if together > 1:
        (last, lines), group, at = grid[-1], Var("group"), k.mul(line, const(lanes))
        loop, chosen, after = substitute((loop, chosen, after), {last: k.add(k.mul(group, const(together)), line)})
        grid = (*grid[:-1], (group, lines // together))
    walked = _best_of_lanes(loop.extent, loop.var, chosen, lanes, bests, places, at)
    found = _position_of_best(loop.extent, loop.var, chosen, lanes, bests, places, at, after)
    body = (Loop(line, together, (walked,)), Loop(line, together, found)) if together > 1 else (walked, *found)
    return replace(kernel, locals=(bests, places), grid=grid, body=body)


def _best_of_lanes(n: int, i: Var, chosen: Reduce, lanes: int, bests: Local, places: Local, at: Expr) -> Loop:
    """Stores, for each lane, the best of elements i = lane, lane + lanes, …, and the number of the block it is in. The first
    block with a NaN is remembered on its own, so that a block waits for one comparison with the best before it, not for three."""
    lane, size, dtype = Var("lane"), lanes * ROWS_OF_BLOCK, chosen.value.dtype
    blocks, rest = divmod(n, size)
    never = const(n, i32)
    kept: tuple[Expr, ...] = substitute(chosen.value, {i: lane}), const(0, i32)
    kept += (k.select(is_nan(kept[0]), kept[1], never),) if dtype.kind == "f" else ()

    def after(start: Expr, rows: int, here: Expr, kept: Sequence[Expr], inside: Expr | None = None) -> list[Expr]:
        places = [k.add(start, k.add(const(row * lanes), lane)) for row in range(rows)]
        values = [substitute(chosen.value, {i: place}, guard=inside) for place in places]
        top = _best_number(chosen.op, values)
        take, bad = _beats(chosen.op, top, kept[0]), _any_nan(values)
        if inside is not None:
            take, bad = k.and_(take, inside), k.and_(bad, inside)
        new = [k.select(take, top, kept[0]), k.select(take, here, kept[1])]
        return [*new, *(k.min(x, k.select(bad, here, never)) for x in kept[2:])]

    body: list[Stmt] = []
    for first, count, rows in ((0, blocks, ROWS_OF_BLOCK), (blocks, 1, rest // lanes)):
        if count and rows:
            block, names = Var("block"), [Var("kept", x.dtype) for x in kept]
            here = k.add(const(first), block)
            then = after(k.mul(here, const(size)), rows, k.cast(here, i32), names)
            body.append(Loop(block, count, (), carries=tuple(Carry(*x) for x in zip(names, kept, then))))
            kept = tuple(names)
    if tail := n % lanes:
        kept = tuple(after(const(n - tail), 1, const(blocks, i32), kept, k.lt(lane, const(tail))))
    best, place = kept[:2]
    for first_nan in kept[2:]:
        bad = k.lt(first_nan, never)
        best, place = k.select(bad, const(math.nan, dtype), best), k.select(bad, first_nan, place)
    to = k.add(at, lane)
    return Loop(lane, lanes, (*body, Store(bests, to, best), Store(places, to, place)), vector=True)


def _position_of_best(
    n: int, i: Var, chosen: Reduce, lanes: int, bests: Local, places: Local, at: Expr, after: tuple[Stmt, ...]
) -> tuple[Stmt, ...]:
    """From the best of each lane the best of all, the first block that has it, and its position there; then `after`."""
    lane, size = Var("lane"), lanes * ROWS_OF_BLOCK
    top, where, found = Var("top", chosen.value.dtype), Var("where", i32), Var("found", i32)
    best = Load(bests, k.add(at, lane))
    first = k.select(_is_best(best, top), Load(places, k.add(at, lane)), const(n // size, i32))
    start, place = k.mul(k.cast(where, index_), const(size)), const(size - 1, i32)
    for row in reversed(range(ROWS_OF_BLOCK)):
        j = k.add(const(row * lanes), lane)
        inside = k.lt(k.add(start, j), const(n)) if n % size else None
        match = _is_best(substitute(chosen.value, {i: k.add(start, j)}, guard=inside), top)
        place = k.select(match if inside is None else k.and_(match, inside), k.cast(j, i32), place)
    return (
        Loop(lane, lanes, (), vector=True, reduces=(Reduce(top, chosen.op.removeprefix("arg"), best),)),
        Loop(lane, lanes, (), vector=True, reduces=(Reduce(where, "min", first),)),
        Loop(lane, lanes, (), vector=True, reduces=(Reduce(found, "min", place),)),
        *substitute(after, {chosen.result: k.add(start, k.cast(found, chosen.result.dtype))}),
    )


def _beats(op: str, a: Expr, b: Expr) -> Expr:
    """Whether a is a better number than b; no if one of them is NaN."""
    return k.lt(b, a) if op == "argmax" else k.lt(a, b)


def _best_number(op: str, values: list[Expr]) -> Expr:
    """The best of some values if none is NaN: one instruction each, where a maximum that keeps NaN takes three."""
    return _tree(lambda a, b: k.select(_beats(op, b, a), b, a), values)


def _any_nan(values: list[Expr]) -> Expr:
    """Whether one of the values is NaN: an instruction for every two of them."""
    return _tree(k.or_, [k.or_(is_nan(a), is_nan(b)) for a, b in zip(values[::2], values[1::2] + values[-1:])])


def _tree(combine: Callable[[Expr, Expr], Expr], parts: list[Expr]) -> Expr:
    while len(parts) > 1:
        parts = [combine(*parts[n : n + 2]) if n + 1 < len(parts) else parts[n] for n in range(0, len(parts), 2)]
    return parts[0]


def _updated(op: str, values: list[Expr], place: Expr, kept: tuple[Expr, ...]) -> tuple[Expr, Expr]:
    """The best so far and its place, after `values`, which are in a later place."""
    value = _best_number(op, values)
    if len(values) > 1 and value.dtype.kind == "f":
        value = k.select(_any_nan(values), const(math.nan, value.dtype), value)
    take = better(op, value, kept[0]) if kept else None
    return (k.select(take, value, kept[0]), k.select(take, place, kept[1])) if take is not None else (value, place)


def _is_best(value: Expr, top: Expr) -> Expr:
    """Whether the value is the best one, `top`: if that is NaN, whether the value is."""
    return k.or_(k.eq(value, top), is_nan(value))  # where there is a NaN, the best is NaN
