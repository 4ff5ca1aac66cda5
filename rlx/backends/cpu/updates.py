"""Kernels that copy lines to local memory, update elements of them and store them, as scatters do. On a CPU they update the
result itself, into which many lines are copied at once: few updates cost no second copy, and short rows no loops of their own.

This is done when code is made, not by the schedule: until then no kernel reads what it writes, as the memory plan assumes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from rlx.backends.cpu.schedule_lines import LANES, same_rows
from rlx.ir.nest import Dims, changed, joined, nested, substitute

from rlx.ir.kernel import (  # isort: skip
    Buffer, Check, Expr, Kernel, Load, Local, Loop, Stmt, Store, Var, coefficient, const, k, walk,
)  # fmt: skip
from rlx.ir.overlap import may_overlap
from rlx.ir.target import Target

SHORT_LINE = 128  # elements; longer ones are worth loops of their own
SEVERAL, MOST_SEVERAL = 4096, 1 << 16  # elements that are updated together, of several lines and of all columns


def updated_in_place(kernel: Kernel, target: Target) -> Kernel:
    """The kernel with elements of its result in place of those of its Local, if that gives the same bits."""
    if (found := _copied_updated_stored(kernel)) is None:
        return kernel
    copy, updates, last = found
    row, out = last.var, last.body[0]
    assert isinstance(copy.body[0], Store) and isinstance(out, Store) and isinstance(out.buffer, Buffer)
    if not _may_be_in_place(kernel, updates, out.buffer):
        return kernel
    at: Callable[[Expr], Expr] = lambda place: substitute(out.index, {row: place})  # noqa: E731
    copied = Store(out.buffer, at(copy.var), copy.body[0].value)
    body = _with_buffer(updates.body, kernel.locals[0], out.buffer, at)
    if not kernel.grid or coefficient(out.index, row) == 1:
        return replace(kernel, locals=(), body=(replace(copy, body=(copied,), vector=True), replace(updates, body=body)))
    *grid, (column, columns) = kernel.grid
    if coefficient(out.index, column) != 1 or coefficient(out.index, row) != columns:
        return kernel
    width = _width(columns, math.prod(n for _, n in grid), target.threads)
    run, here = Var("run"), Var("c")
    to = {column: here if width == columns else k.add(k.mul(run, const(width)), here)}
    rows = as_they_lie([(copy.var, copy.extent), (here, width)], substitute((copied,), to))
    if rows.var is copy.var and width < LANES:
        return kernel
    checks = tuple(s for s in body if isinstance(s, Check)) if same_rows(updates.body, column) else ()
    each = Loop(here, width, substitute(tuple(s for s in body if s not in checks), to), vector=bool(checks))
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


def short_lines_together(kernel: Kernel, target: Target) -> Kernel:
    """A kernel that updates short lines, or few columns, with a Local for many of them as they lie in memory: they are copied and
    stored in vectors."""
    found = _copied_updated_stored(kernel)
    if found is None or not kernel.grid:
        return kernel
    (copy, updates, last), (*grid, (column, lines)), (line,) = found, kernel.grid, kernel.locals
    place = last.body[0].index  # type: ignore[union-attr]
    across, along = coefficient(place, column), coefficient(place, last.var)
    if along == 1 and line.size and across == line.size < SHORT_LINE:
        most = min(SEVERAL // line.size, lines // target.threads)
        count = next((n for n in range(most, 0, -1) if lines % n == 0), 1)
    else:
        count = lines if (across, along) == (1, lines) and lines < LANES and lines * line.size <= MOST_SEVERAL else 1
    if count < 2:
        return kernel
    several, run = Local(line.name, line.dtype, count * line.size), Var("run")

    def each(loop: Loop) -> tuple[Dims, tuple[Stmt, ...]]:
        """The loop for all lines, in the order in which they lie."""
        here = Var("line")
        at = lambda row: k.add(k.mul(row, const(along)), k.mul(here, const(across)))  # noqa: E731
        body = substitute(_with_buffer(loop.body, line, several, at), {column: k.add(k.mul(run, const(count)), here)})
        dims = [(here, count), (loop.var, loop.extent)]
        return dims if along == 1 else dims[::-1], body

    (outer, inner), body = each(updates)
    parts = as_they_lie(*each(copy)), Loop(*outer, (Loop(*inner, body),)), as_they_lie(*each(last))
    return replace(kernel, locals=(several,), grid=(*grid, (run, lines // count)), body=parts)


def as_they_lie(dims: Dims, body: tuple[Stmt, ...]) -> Loop:
    """The loops over dims as one over adjacent elements where they are, the innermost in lanes."""
    dims, body = joined(dims, body)
    *around, (var, size) = dims
    loop = Loop(var, size, body, vector=True)
    for var, size in reversed(around):
        loop = Loop(var, size, (loop,))
    return loop


def _moves_elements(loop: Loop) -> bool:
    """Whether an iteration stores the element of one buffer at its own place in the other."""
    match loop.body:
        case (Store(_, index, Load(_, place, None), None),):
            return not loop.reduces and not loop.carries and coefficient(index, loop.var) == coefficient(place, loop.var) == 1
    return False


def _copied_updated_stored(kernel: Kernel) -> tuple[Loop, Loop, Loop] | None:
    """The loops of a kernel that fill a Local, update it and store it."""
    loops = tuple(s for s in kernel.body if isinstance(s, Loop) and not s.reduces and not s.carries)
    if len(loops) != 3 or len(kernel.body) != 3 or len(kernel.locals) != 1 or kernel.limits:
        return None
    (first, updates, last), (line,) = loops, kernel.locals
    match first.body, last.body:
        case (Store(filled, place, _, None),), (Store(Buffer(), _, Load(read, index, None), None),):
            whole = filled is read is line and first.extent == last.extent == line.size
            whole = whole and place is first.var and index is last.var
        case _:
            return None
    inside = [s for s in nested(updates.body) if not isinstance(s, Loop)]
    plain = all(isinstance(s, Check) or (isinstance(s, Store) and s.buffer is line) for s in inside)
    return loops if whole and plain and any(isinstance(s, Store) for s in inside) else None


def _may_be_in_place(kernel: Kernel, updates: Loop, result: Buffer) -> bool:
    """Whether the result may take the place of the Local: it rounds as the Local does, or nothing reads what was updated but one
    element once, and no memory that is read later may be shared with it."""
    (line,), places = kernel.locals, {b: n for n, b in enumerate(kernel.buffers)}
    loads = {x.buffer for x in walk(updates.body) if isinstance(x, Load)}
    shared = any((places[b], places[result]) in may_overlap(kernel) for b in loads if isinstance(b, Buffer))
    once = updates.extent == 1 and not isinstance(updates.body[0], Loop)
    return not shared and (line.dtype == result.dtype or line not in loads or once)


def _with_buffer(body: tuple[Stmt, ...], line: Local, to: Buffer | Local, at: Callable[[Expr], Expr]) -> tuple[Stmt, ...]:
    """The statements with elements of this buffer in place of those of the Local."""

    def stored(s: Stmt) -> tuple[Stmt, ...] | None:
        return (replace(s, buffer=to, index=at(s.index)),) if isinstance(s, Store) and s.buffer is line else None

    loads = [x for x in walk(body) if isinstance(x, Load) and x.buffer is line]
    return changed(substitute(body, {}, {id(x): Load(to, at(x.index), x.guard) for x in loads}), stored)


def _width(columns: int, others: int, threads: int) -> int:
    """Columns of a task: all, or so few that every thread has a task."""
    runs = [n for n in range(1, columns // LANES + 1) if columns % n == 0 and n * others >= threads]
    return columns // runs[0] if runs else columns
