"""Schedules of loops along one axis that choose the best element or carry a running total.

Contiguous lines: argmax and argmin find the best block first, in vectors, then the position in it. Contiguous columns: many
adjacent lines are scanned together, row by row, with the best or the total of each in a Local.
"""

from __future__ import annotations

import math
from dataclasses import replace

from rlx.backends.cpu.loops import contiguity
from rlx.backends.shared.lines import better, is_nan
from rlx.backends.shared.nest import substitute
from rlx.ir.dtype import i32
from rlx.ir.kernel import EXTREMES, Carry, Expr, Kernel, Load, Local, Loop, Reduce, Stmt, Store, Var, const, k

BLOCK = 128  # elements per block: the best block is found first, then the position in it
LANES = 16  # shorter loops are not vectorized
COLUMNS = range(512, 4097)  # columns scanned together; reading shorter parts of memory pages is slow
ROWS_AT_ONCE = 4  # rows read per write of the running best


def along_lines(kernel: Kernel, threads: int) -> Kernel:
    """The kernel with its loop along lines scheduled, if its body is one such loop and statements that use the result."""
    loop = next(iter(kernel.body), None)
    if not isinstance(loop, Loop) or kernel.locals or any(not isinstance(s, Store) for s in (*loop.body, *kernel.body[1:])):
        return kernel
    last, size = kernel.grid[-1] if kernel.grid else (loop.var, 1)
    down = kernel.grid and contiguity(loop, last) > contiguity(loop, loop.var)  # a line is a column of contiguous rows
    together = down and size >= LANES and not any(x.var is last for x in kernel.limits)
    if loop.carries and not loop.reduces:
        if together and len(loop.carries) == 1:
            return _totals_of_columns(kernel, loop)
        return replace(kernel, body=(replace(loop, vector=loop.vector and loop.extent >= LANES), *kernel.body[1:]))
    if loop.carries or loop.body or len(loop.reduces) != 1 or loop.reduces[0].op not in EXTREMES or not loop.extent:
        return kernel
    if together and loop.extent < 1 << 31:
        return _best_of_columns(kernel, loop, loop.reduces[0], threads)
    return kernel if down or loop.extent < 2 * LANES else _best_of_blocks(kernel, loop, loop.reduces[0])


def _totals_of_columns(kernel: Kernel, loop: Loop) -> Kernel:
    """Row by row, with a total per column."""
    *grid, (column, width) = kernel.grid
    (carry,) = loop.carries
    kept = Local("totals", carry.var.dtype, width)
    body, rest, following = substitute((loop.body, kernel.body[1:], carry.next), {carry.var: Load(kept, column)})
    clear = Loop(column, width, (Store(kept, column, carry.init),), vector=True)
    rows = Loop(loop.var, loop.extent, (Loop(column, width, (*body, Store(kept, column, following)), vector=True),))
    after = (Loop(column, width, rest, vector=True),) if rest else ()
    return replace(kernel, locals=(kept,), grid=tuple(grid), body=(clear, rows, *after))


def _best_of_columns(kernel: Kernel, loop: Loop, chosen: Reduce, threads: int) -> Kernel:
    """Row by row, with the best of each column in local memory. Each run of columns is a grid point."""
    *grid, (line, lines) = kernel.grid
    share = math.prod(n for _, n in kernel.grid) // threads  # columns per thread
    least, most = COLUMNS[0], max(COLUMNS[0], min(share, COLUMNS[-1]))
    runs = next((n for n in range(-(-lines // most), lines // least + 1) if lines % n == 0), 1)
    width, column, run, i = lines // runs, Var("c"), Var("run"), Var("i")
    bests, places = Local("bests", chosen.value.dtype, width), Local("places", i32, width)

    def rows(first: Expr, count: int, kept: tuple[Expr, ...] = ()) -> Loop:
        """Updates the best with `count` rows from `first` on; the very first row has no best before it."""
        for row in (k.add(first, const(n)) for n in range(count)):
            value = substitute(chosen.value, {loop.var: row, line: k.add(k.mul(run, const(width)), column)})
            take = better(chosen.op, value, kept[0]) if kept else value
            kept = (k.select(take, value, kept[0]), k.select(take, k.cast(row, i32), kept[1])) if kept else (value, const(0, i32))
        return Loop(column, width, (Store(bests, column, kept[0]), Store(places, column, kept[1])), vector=True)

    kept, (rounds, rest) = (Load(bests, column), Load(places, column)), divmod(loop.extent - 1, ROWS_AT_ONCE)
    more = Loop(i, rounds, (rows(k.add(k.mul(i, const(ROWS_AT_ONCE)), const(1)), ROWS_AT_ONCE, kept),))
    last = (rows(const(loop.extent - rest), rest, kept),) if rest else ()
    to = {chosen.result: k.cast(kept[1], chosen.result.dtype), line: k.add(k.mul(run, const(width)), column)}
    out = Loop(column, width, substitute(kernel.body[1:], to), vector=True)
    return replace(kernel, locals=(bests, places), grid=(*grid, (run, runs)), body=(rows(const(0), 1), more, *last, out))


def _best_of_blocks(kernel: Kernel, loop: Loop, chosen: Reduce) -> Kernel:
    """The best of each block, vectorized; then the first position of it in the best block."""
    length, dtype = loop.extent, chosen.value.dtype
    size = min(length, BLOCK)
    block, i, j, found = Var("block"), Var("i"), Var("j"), Var("found", i32)
    parts: list[Stmt] = []
    best, which = substitute(chosen.value, {loop.var: const(0)}), const(0)
    for first, count, n in ((0, length // size, size), (length // size, 1, length % size)):
        if n:
            top, carried, held = Var("top", dtype), Var("best", dtype), Var("which")
            here = k.add(const(first), block)
            value = substitute(chosen.value, {loop.var: k.add(k.mul(here, const(size)), i)})
            inner = Loop(i, n, (), vector=True, reduces=(Reduce(top, chosen.op.removeprefix("arg"), value),))
            take = better(chosen.op, top, carried)
            parts.append(Loop(block, count, (inner,), carries=(
                Carry(carried, best, k.select(take, top, carried)), Carry(held, which, k.select(take, here, held)),
            )))  # fmt: skip
            best, which, block, i = carried, held, Var("block"), Var("i")
    start = k.mul(which, const(size))
    inside = k.lt(k.add(start, j), k.const(length)) if length % size else None
    value = substitute(chosen.value, {loop.var: k.add(start, j)}, guard=inside)
    match = k.or_(k.eq(value, best), is_nan(value))  # a block with a NaN has a NaN as its best
    place = k.select(match if inside is None else k.and_(match, inside), k.cast(j, i32), const(size - 1, i32))
    parts.append(Loop(j, size, (), vector=True, reduces=(Reduce(found, "min", place),)))
    rest = substitute(kernel.body[1:], {chosen.result: k.add(start, k.cast(found, chosen.result.dtype))})
    return replace(kernel, body=(*parts, *rest))
