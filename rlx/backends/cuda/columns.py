"""Sums down columns: each lane of a warp has adjacent ones, so that the warp reads 256 bytes of a row at once, and blocks share
the rows until the GPU is busy. With one column for a lane, rows of 16-bit elements would be read by half a cache line."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from rlx.backends.cuda.render import CudaWriter, Partial
from rlx.backends.cuda.rows import row_loops
from rlx.backends.cuda.schedule import CLUSTER, FEW_WARPS, MULTIPROCESSORS, PART_WARPS, PARTS, WARP, Launch, lanes_down
from rlx.backends.cuda.vectors import loads, width
from rlx.ir.kernel import EXTREMES, Check, Kernel, Let, Load, Loop, Var, walk
from rlx.ir.nest import joined
from rlx.records import record

ROWS = 16  # of which a thread loads elements before it waits for the first
LANE_BYTES = 8  # of a row that a lane reads at once
MOST_SUMS = 4  # of a lane: more would not fit the shared memory by which warps and blocks exchange them
LEAST_ROWS = 256  # of a part
LEAST = 1 << 22  # elements: fewer keep more threads busy with a column each
BLOCKS = 2 * MULTIPROCESSORS  # that run at once


def _idle(points: int, size: int) -> bool:
    """Whether many of the lanes would have nothing to do."""
    return points % (size * WARP) != 0 and points < FEW_WARPS * size * WARP


@record
class ColumnsLaunch(Launch):
    """A lane has `vector` adjacent columns."""


def columns(kernel: Kernel, clusters: bool) -> ColumnsLaunch | None:
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
    lines = -(-points // (size * WARP))
    parts = max(1, min(BLOCKS // lines, s.extent // LEAST_ROWS, PARTS[-1]))
    if lines * CLUSTER >= MULTIPROCESSORS:
        parts = min(parts, CLUSTER)
    at = ColumnsLaunch(kernel, PART_WARPS, PART_WARPS * WARP, lanes=WARP, vector=size, parts=parts)
    if parts == 1:
        return at
    at = replace(at, part=-(-s.extent // parts), adjacent=True, words=4 * WARP * size * parts * len(s.reduces) + 1)
    together = clusters and parts <= CLUSTER
    return replace(at, clustered=True) if together else replace(at, counters=2 * at.lines * at.words)


class ColumnsWriter(CudaWriter):
    launch: ColumnsLaunch
    unrolled = ROWS

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
            for p, value in zip(parts, values):
                self.line(p.add(value, i))

        start, end = "me", str(s.extent)
        if at.parts > 1:
            start, end = f"part * {at.part} + me", f"min((part + 1) * {at.part}, (rlx_index){s.extent})"
        turn = lambda: self.in_vectors(s.body, ends, column, at.vector, first, combine)  # noqa: E731
        self.turns(s, i, start, end, 1, [p for p in parts if p.near], turn)
        totals = [self.fresh("t") for _ in parts]
        for p, total in zip(parts, totals):
            self.line(f"const auto {total} = {self.combined(p)};")
        if at.parts > 1:
            self.line("all.leave();")
        return [p.result(f"{total}.at[v]") for p, total in zip(parts, totals)]

    def combined(self, p: Partial) -> str:
        """The sums of all warps and blocks."""
        at, kind = self.launch, self.several(p)
        sums = f"for (int v = 0; v < {at.vector}; v++) c.at[v] = {p.combine('a.at[v]', 'b.at[v]')};"
        function = f"[]({kind} a, {kind} b) -> {kind} {{ {kind} c; {sums} return c; }}"
        text = p.name if at.clustered else f"rlx_reduce_down<{at.team}>({p.name}, {function})"
        if at.parts > 1:
            text = f"all.all({self.told}, {text}, {p.name}_none, {function})"
            self.told += 4 * at.lanes * at.vector * at.parts
        return text

    def several(self, p: Partial) -> str:
        return f"rlx_several<{p.type}, {self.launch.vector}>"

    def sum_of_few(self, near: Sequence[Partial], body: Callable[[], object]) -> None:
        for p in near:
            self.line(f"rlx_several<float, {self.launch.vector}> {p.near} = {{}};")
        body()
        for p in near:
            with self.scope(self.each):
                self.line(f"{p.name}.at[v] += {p.near}.at[v];")


__all__ = ["ColumnsLaunch", "ColumnsWriter", "columns"]
