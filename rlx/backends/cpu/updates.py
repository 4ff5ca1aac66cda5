"""Kernels that copy lines to local memory, update elements of them and store them, as scatters do. On a CPU they update the
result itself, into which many lines are copied at once: few updates cost no second copy, and short rows no loops of their own.

This is done when code is made, not by the schedule: until then no kernel reads what it writes, as the memory plan assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from rlx.backends.cpu.schedule_lines import LANES, same_rows
from rlx.backends.shared.nest import joined, substitute

from rlx.ir.kernel import (  # isort: skip
    Buffer, Check, Expr, Kernel, Load, Local, Loop, Stmt, Store, Var, coefficient, const, k, walk,
)  # fmt: skip
from rlx.ir.overlap import may_overlap
from rlx.ir.target import Target


def updated_in_place(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with elements of its result in place of those of its Local, if that gives the same bits."""
    if not _is_copied_updated_stored(kernel):
        return kernel
    copy, updates, (row, out) = kernel.body[0], kernel.body[1], _stored(kernel)
    assert isinstance(copy, Loop) and isinstance(updates, Loop) and isinstance(copy.body[0], Store)
    at: Callable[[Expr], Expr] = lambda place: substitute(out.index, {row: place})  # noqa: E731
    copied = Store(out.buffer, at(copy.var), copy.body[0].value)
    changed = _of_buffer(updates.body, out.buffer, at)
    if not kernel.grid or coefficient(out.index, row) == 1:
        body = (replace(copy, body=(copied,), vector=True), replace(updates, body=changed))
        return replace(kernel, locals=(), body=body)
    *grid, (column, columns) = kernel.grid
    if coefficient(out.index, column) != 1 or coefficient(out.index, row) != columns:
        return kernel
    width = _width(columns, math.prod(n for _, n in grid), target.threads)
    whole = _whole(copied, copy, column, columns) if width == columns else None
    if whole is None and width < LANES:
        return kernel
    run, here = Var("run"), Var("c")
    to = {column: here if width == columns else k.add(k.mul(run, const(width)), here)}
    rows = whole or replace(copy, body=(Loop(here, width, substitute((copied,), to), vector=True),))
    checks = tuple(s for s in changed if isinstance(s, Check)) if same_rows(updates.body, column) else ()
    each = Loop(here, width, substitute(tuple(s for s in changed if s not in checks), to), vector=bool(checks))
    grid = grid if width == columns else [*grid, (run, columns // width)]
    return replace(kernel, locals=(), grid=tuple(grid), body=(rows, replace(updates, body=(*checks, each))))


def with_long_runs(kernel: Kernel) -> Kernel:
    """A kernel with a Local for each line, with adjacent dims of its grid as one where every index is linear over both, and its
    loops along contiguous lines in lanes if nothing but their own element is read."""
    if len(kernel.locals) != 1 or kernel.limits or not all(isinstance(s, Loop) for s in kernel.body):
        return kernel
    grid, body = joined(kernel.grid, kernel.body)
    made = [replace(s, vector=s.vector or _moves_elements(s)) if isinstance(s, Loop) else s for s in body]
    return replace(kernel, grid=tuple(grid), body=tuple(made))


def _moves_elements(loop: Loop) -> bool:
    """Whether an iteration stores the element of one buffer at its own place in the other."""
    match loop.body:
        case (Store(_, index, Load(_, place, None), None),):
            return not loop.reduces and not loop.carries and coefficient(index, loop.var) == coefficient(place, loop.var) == 1
    return False


def _stored(kernel: Kernel) -> tuple[Var, Store]:
    """The row of the last loop, and its store."""
    last = kernel.body[-1]
    assert isinstance(last, Loop) and isinstance(last.body[0], Store)
    return last.var, last.body[0]


def _is_copied_updated_stored(kernel: Kernel) -> bool:
    """Whether three loops fill a Local, update it and store it, and the result may take its place: the result rounds as the Local
    does, or nothing reads what was updated but one element once, and no memory that is read later may be shared with it."""
    loops = [s for s in kernel.body if isinstance(s, Loop) and not s.reduces and not s.carries]
    if len(loops) != 3 or len(kernel.body) != 3 or len(kernel.locals) != 1 or kernel.limits:
        return False
    (first, updates, last), (line,) = loops, kernel.locals
    match first.body, last.body:
        case (Store(filled, place, _, None),), (Store(Buffer() as result, _, Load(read, index, None), None),):
            whole = filled is read is line and first.extent == last.extent == line.size
            whole = whole and place is first.var and index is last.var
        case _:
            return False
    found = list(walk(updates.body))
    loads = {x.buffer for x in found if isinstance(x, Load)}
    written = {s.buffer for s in updates.body if isinstance(s, Store)}
    if not whole or written != {line} or any(not isinstance(s, Store | Check) for s in updates.body):
        return False
    places = {b: n for n, b in enumerate(kernel.buffers)}
    shared = any((places[b], places[result]) in may_overlap(kernel) for b in loads if isinstance(b, Buffer))
    return not shared and (line.dtype == result.dtype or line not in loads or updates.extent == 1)


def _of_buffer(body: tuple[Stmt, ...], buffer: Buffer | Local, at: Callable[[Expr], Expr]) -> tuple[Stmt, ...]:
    """The statements with elements of this buffer in place of those of the Local."""
    memo: dict[int, Expr] = {}
    for x in walk(body):
        if isinstance(x, Load) and isinstance(x.buffer, Local):
            memo[id(x)] = Load(buffer, at(x.index), x.guard)
    made = substitute(body, {}, memo)
    return tuple(replace(s, buffer=buffer, index=at(s.index)) if isinstance(s, Store) else s for s in made)


def _width(columns: int, others: int, threads: int) -> int:
    """Columns of a task: all, or so few that every thread has a task."""
    runs = [n for n in range(1, columns // LANES + 1) if columns % n == 0 and n * others >= threads]
    return columns // runs[0] if runs else columns


def _whole(copied: Store, copy: Loop, column: Var, columns: int) -> Loop | None:
    """The copy of all rows as one loop over adjacent elements."""
    source, flat = copied.value, Var("f")
    if not isinstance(source, Load) or source.guard is not None:
        return None
    if (coefficient(source.index, column), coefficient(source.index, copy.var)) != (1, columns):
        return None
    body = substitute((copied,), {column: flat, copy.var: const(0)})
    return Loop(flat, copy.extent * columns, body, vector=True)
