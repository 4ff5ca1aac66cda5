"""Sums down columns: each lane of a warp has adjacent ones, so that the warp reads 256 bytes of a row at once. With one column
for a lane, rows of 16-bit elements would be read by half a cache line. Blocks share the rows, no more than run at once. None
waits: the last one of a line to tell its sums adds those of all."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter, Partial
from rlx.backends.cuda.rows import row_loops
from rlx.backends.cuda.schedule import FEW_WARPS, MULTIPROCESSORS, PART_WARPS, PARTS, WARP, Launch, lanes_down
from rlx.backends.cuda.vectors import loads, width
from rlx.ir.kernel import EXTREMES, Check, Kernel, Let, Load, Loop, Var, walk
from rlx.ir.nest import identity, joined
from rlx.records import record

ROWS = 16  # of which a thread loads elements before it waits for the first
LANE_BYTES = 8  # of a row that a lane reads at once
MOST_SUMS = 4  # of a lane: more would not fit the shared memory by which warps and blocks exchange them
LEAST = 1 << 22  # elements: fewer keep more threads busy with a column each
BLOCKS = 2 * MULTIPROCESSORS  # that run at once


def _idle(points: int, size: int) -> bool:
    """Whether many of the lanes would have nothing to do."""
    return points % (size * WARP) != 0 and points < FEW_WARPS * size * WARP


@record
class ColumnsLaunch(Launch):
    """A lane has `vector` adjacent columns."""


def columns(kernel: Kernel) -> ColumnsLaunch | None:
    """The launch of a kernel of loops, if it is reductions down columns by one loop."""
    if not kernel.grid or kernel.locals or len(row_loops(kernel)) != 1:
        return None
    grid, body = joined(kernel.grid, kernel.body)
    kernel = replace(kernel, grid=grid, body=body)
    (s,), points, column = row_loops(kernel), math.prod(n for _, n in grid), grid[-1]
    if points * s.extent < LEAST:
        return None
    before = kernel.body[: kernel.body.index(s)]
    plain = all(isinstance(x, Let) for x in (*before, *s.body)) and not any(isinstance(x, Check) for x in kernel.body)
    if not plain or not s.reduces or any(r.op in EXTREMES for r in s.reduces) or not lanes_down(kernel, [s]):
        return None
    if column[0] in walk(before):
        return None
    ends = [r.value for r in s.reduces]
    found = [x for x in walk((s.body, *ends)) if isinstance(x, Load)]
    widest = max(x.buffer.dtype.itemsize for x in found)
    size = min(width(s.body, ends, *column), LANE_BYTES // widest, MOST_SUMS // len(s.reduces))
    while size > 1 and (_idle(points, size) or -(-points // (size * WARP)) * PARTS[-1] < MULTIPROCESSORS):
        size //= 2
    if size <= 1 or len(loads(s.body, ends, column[0], size)) < len(found):
        return None
    lines, turn = -(-points // (size * WARP)), ROWS * PART_WARPS
    at = ColumnsLaunch(kernel, PART_WARPS, PART_WARPS * WARP, lanes=WARP, vector=size)
    if lines >= BLOCKS or s.extent <= turn:
        return at
    part = -(-s.extent // (min(BLOCKS // lines, PARTS[-1]) * turn)) * turn
    if part >= s.extent:
        return at
    parts = -(-s.extent // part)
    words = 4 * WARP * size * parts * len(s.reduces) + 1
    at = replace(at, parts=parts, part=part, adjacent=True, leaving=True, words=words)
    return replace(at, counters=2 * at.lines * at.words)


class ColumnsWriter(CudaWriter):
    launch: ColumnsLaunch
    inside = ""  # the condition on which a row is one of the thread's

    def __init__(self, launch: ColumnsLaunch) -> None:
        super().__init__(launch)
        self.each = ["#pragma unroll", f"for (int v = 0; v < {launch.vector}; v++) {{"]

    def body(self) -> None:
        at, (column, _), stmts = self.launch, self.kernel.grid[-1], self.kernel.body
        (loop,) = row_loops(self.kernel)
        n, first = stmts.index(loop), f"{self.names[column]}_0"
        self.line_of_parts()
        self.block(stmts[:n])
        totals = self.sums(loop, column, first)
        with self.scope(self.each):
            self.names[column] = name = self.fresh("i")
            self.line(f"const rlx_index {name} = {first} + v;")
            for r, text in zip(loop.reduces, totals):
                self.names[r.result] = self.fix("r", r.result.dtype, text)
            self.block(stmts[n + 1 :])
        if at.parts > 1:
            self.line("all.forget();")

    def sums(self, s: Loop, column: Var, first: str) -> list[str]:
        """The loop over the rows; returns texts of its results for column number v of a lane."""
        at, i, ends = self.launch, self.name(s.var, "i"), [r.value for r in s.reduces]
        parts = [self.partial(r, s.extent, ".at[v]") for r in s.reduces]
        for p in parts:
            self.line(f"{self.several(p)} {p.name};")
            with self.scope(self.each):
                self.line(f"{p.name}.at[v] = {p.init};")
            self.line(f"const auto {p.name}_none = {p.name};")

        def combine(values: list[str]) -> None:
            for r, p, value in zip(s.reduces, parts, values):
                none = CUDA.literal(identity(r.op, r.value.dtype.compute), r.value.dtype.compute)
                self.line(p.add(f"({self.inside} ? {value} : {none})" if self.inside else value, i))

        start, end = "me", str(s.extent)
        if at.parts > 1:
            start, end = f"part * {at.part} + me", f"min((part + 1) * {at.part}, (rlx_index){end})"
        self.line(f"const rlx_index end = {end};")
        self.rows(s, i, start, parts, lambda: self.in_vectors(s.body, ends, column, at.vector, first, combine))
        totals, functions = [f"{p.name}_all" for p in parts], [self.added(p) for p in parts]
        for p, total, function in zip(parts, totals, functions):
            text = f"rlx_reduce_down<{at.team}>({p.name}, {function})"
            each = 4 * at.lanes * at.vector * at.parts * self.told
            self.line(f"all.give({each}, {text});" if at.parts > 1 else f"const auto {total} = {text};")
            self.told += 1
        if at.parts > 1:
            self.line("if (!all.last()) return;")
            for n, (p, total, function) in enumerate(zip(parts, totals, functions)):
                each = 4 * at.lanes * at.vector * at.parts * n
                self.line(f"const auto {total} = all.gather({each}, {p.name}_none, {function});")
        return [p.result(f"{total}.at[v]") for p, total in zip(parts, totals)]

    def rows(self, s: Loop, i: str, start: str, parts: Sequence[Partial], turn: Callable[[], None]) -> None:
        """The loop over the rows of a thread, ROWS at a time, whose loads come first. The last rows are fewer; others then
        read the last one again, and add nothing: the compiler would make a turn of each, which waits for its load."""
        step, near = self.launch.team, [p for p in parts if p.near]
        self.line(f"rlx_index {i}s = {start};")
        inner = ["#pragma unroll", f"for (int u = 0; u < {ROWS}; u++) {{"]
        whole = f"for (; {i}s + {(ROWS - 1) * step} < end; {i}s += {ROWS * step}) {{"
        for head, place in ((whole, f"{i}s + u * {step}"), (f"if ({i}s < end) {{", f"min({i}s + u * {step}, end - 1)")):
            if head != whole and s.extent % (ROWS * step) == 0 and self.launch.part % (ROWS * step) == 0:
                continue
            self.inside = "" if head == whole else f"{i}s + u * {step} < end"
            with self.scope([head]), self.alone():
                for p in near:
                    self.line(f"rlx_several<float, {self.launch.vector}> {p.near} = {{}};")
                with self.scope([*inner, f"const rlx_index {i} = {place};"]):
                    turn()
                with self.scope(self.each):
                    for p in near:
                        self.line(f"{p.name}.at[v] += {p.near}.at[v];")

    def added(self, p: Partial) -> str:
        """The function that combines the values of all columns of a lane."""
        kind = self.several(p)
        sums = f"for (int v = 0; v < {self.launch.vector}; v++) c.at[v] = {p.combine('a.at[v]', 'b.at[v]')};"
        return f"[]({kind} a, {kind} b) -> {kind} {{ {kind} c; {sums} return c; }}"

    def several(self, p: Partial) -> str:
        return f"rlx_several<{p.type}, {self.launch.vector}>"


__all__ = ["ColumnsLaunch", "ColumnsWriter", "columns"]
