"""Schedule of the CPU: reductions of columns read memory row by row, and long sums are in blocks. Loops along lines that choose
or carry something are in schedule_lines.py.

A plain kernel reduces each column on its own. Here all columns of a run are reduced together, in a Local of totals, so that each
row is read in order; runs are grid points.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rlx.backends.cpu.schedule_lines import LANES, along_lines, columns_together
from rlx.backends.cpu.sorting import sorts
from rlx.backends.cpu.updates import short_lines_together, updated_in_place, with_long_runs
from rlx.backends.shared.lines import in_loops
from rlx.backends.shared.long_sums import in_f64, long_sums
from rlx.ir import kernel as K
from rlx.ir.dtype import f64
from rlx.ir.kernel import Check, Expr, Kernel, Let, Load, Local, Loop, Stmt, Store, Var, alu, coefficient, const, k, walk
from rlx.ir.nest import renamed, substitute
from rlx.ir.target import Target

LEAST_RUN = 1024  # columns of a run: a few KB of each row
LEAST_COLUMNS = 64
ROWS_AT_ONCE = 4  # rows from as many parts of the axis, each part read in order; adjacent rows were up to four times slower


def schedule(kernel: Kernel, target: Target) -> Kernel:
    """The kernel in the order in which a CPU runs it."""
    lines = along_lines(long_sums(column_walks(rows_in_lanes(kernel), target.run_columns)), target)
    lines = short_lines_together(with_long_runs(lines), target)
    in_place = updated_in_place(lines, target) is not lines  # when it is rendered
    return in_loops(sorts(lines if in_place else columns_together(lines, target)))


def column_walks(kernel: Kernel, most: int) -> Kernel:
    """A kernel that reduces columns, row by row instead of column by column, in runs of at most `most` columns: their totals stay
    in the first-level cache."""
    loop, *others = kernel.body or (None,)
    if others or not isinstance(loop, Loop) or not loop.vector or loop.reduces or any(x.var is loop.var for x in kernel.limits):
        return kernel
    walked = [s for s in loop.body if isinstance(s, Loop) and walks(s, loop)]
    if not walked:
        return kernel
    runs, columns, column, grid = _runs(loop.extent, most), loop.extent, Var("c"), kernel.grid
    at: Callable[[Expr], Expr] = lambda c: c  # noqa: E731
    if runs > 1:
        run, columns = Var("run"), columns // runs
        grid, at = (*grid, (run, runs)), lambda c: k.add(k.mul(run, columns), c)
    totals: dict[Var, Local] = {}
    made: list[Stmt] = []
    for number, inner in enumerate(walked, len(kernel.locals)):
        reduce = inner.reduces[0]
        wide = f64 if in_f64(reduce.op, reduce.result.dtype, inner.extent) else reduce.result.dtype
        totals[reduce.result] = total = Local(f"l{number}", wide, columns)
        made += walk_of(inner, loop.var, columns, at, total)
    here: dict[Var, Expr] = {v: k.cast(Load(x, column), v.dtype) for v, x in totals.items()}
    rest = substitute(tuple(s for s in loop.body if s not in walked), {loop.var: at(column), **here})
    made.append(replace(loop, var=column, extent=columns, body=rest))
    return replace(kernel, locals=(*kernel.locals, *totals.values()), grid=grid, body=tuple(made))


def rows_in_lanes(kernel: Kernel) -> Kernel:
    """A kernel that reduces columns which lie in memory as rows do, with lanes along them."""
    loop, *others = kernel.body or (None,)
    if others or not isinstance(loop, Loop) or not loop.vector or loop.reduces or any(x.var is loop.var for x in kernel.limits):
        return kernel
    rows = [s for s in loop.body if isinstance(s, Loop)]
    plain = all(isinstance(s, Let | Store | Loop) for s in loop.body)
    if not rows or not plain or not all(_lies_in_a_row(s, loop) for s in rows):
        return kernel
    body = tuple(replace(s, vector=True) if isinstance(s, Loop) else s for s in loop.body)
    return replace(kernel, grid=(*kernel.grid, (loop.var, loop.extent)), body=body)


def _lies_in_a_row(inner: Loop, around: Loop) -> bool:
    """Whether a reduction reads adjacent elements, other ones in each iteration of the loop around it."""
    if inner.vector or inner.carries or not inner.reduces or inner.extent < LANES:
        return False
    strides = [(coefficient(x.index, inner.var), coefficient(x.index, around.var)) for x in walk(inner) if isinstance(x, Load)]
    along = [across for stride, across in strides if stride == 1]
    row = bool(along) and all(stride in (0, 1) for stride, _ in strides) and all(across not in (None, 1) for across in along)
    return row and all(isinstance(s, Let) for s in inner.body)


def _runs(columns: int, most: int) -> int:
    """The number of equal runs of at most `most` columns; 1 if none is long enough."""
    return next((n for n in range(-(-columns // most), columns // LEAST_RUN + 1) if columns % n == 0), 1)


def walks(inner: Loop, around: Loop) -> bool:
    """True if this reduction, of one column in each iteration of the loop around it, is better computed row by row."""
    if inner.vector or inner.carries or len(inner.reduces) != 1 or inner.reduces[0].op not in K.RUNNING:
        return False
    large = around.extent >= LEAST_COLUMNS and inner.extent >= 2 * ROWS_AT_ONCE
    if not large or not all(isinstance(s, Let | Check) for s in inner.body):
        return False
    parts, others = list(walk(inner)), renamed(around.body).keys() - renamed(inner).keys()
    loads, stored = [x for x in parts if isinstance(x, Load)], {x.buffer for x in walk(around.body) if isinstance(x, Store)}
    if not others.isdisjoint(x for x in parts if isinstance(x, Var)) or any(x.buffer in stored for x in loads):
        return False  # it needs what the rest of the iteration computes
    return any(coefficient(x.index, around.var) == 1 for x in loads)


def walk_of(inner: Loop, column: Var, columns: int, at: Callable[[Expr], Expr], total: Local) -> list[Stmt]:
    """The reduction `inner` of each column in the elements of `total`, a few rows at a time."""
    (reduce,) = inner.reduces
    wide, narrow = total.dtype, reduce.result.dtype

    def combined(parts: list[Expr]) -> Expr:
        while len(parts) > 1:
            parts = [alu(reduce.op, *parts[n : n + 2]) if n + 1 < len(parts) else parts[n] for n in range(0, len(parts), 2)]
        return parts[0]

    def rows(first: Expr, apart: int, count: int, begins: bool = False) -> Loop:
        here, body, parts = Var("c"), list[Stmt](), list[Expr]()
        element = substitute((inner.body, reduce.value), {column: at(here)})
        for n in range(count):
            new = {**renamed(inner.body), inner.var: k.add(first, n * apart)}
            statements, value = substitute(element, new)
            body += [s for s in statements if s not in body]
            parts.append(value)
        if wide != narrow:
            parts = [k.cast(combined(parts), wide)]
        parts += [] if begins else [Load(total, here)]
        return Loop(here, columns, (*body, Store(total, here, combined(parts))), vector=True)

    at_once = ROWS_AT_ONCE if wide == narrow else 2 * ROWS_AT_ONCE  # f64 sums cost more loads and stores
    row, (each, rest) = Var("rows"), divmod(inner.extent, at_once)
    more = rows(k.add(row, 1), each, at_once)
    last = [rows(const(inner.extent - rest), 1, rest)] if rest else []
    return [rows(const(0), each, at_once, begins=True), Loop(row, each - 1, (more,)), *last]
