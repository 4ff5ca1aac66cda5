"""Sums into the places that indices choose: a block finds the indices that choose some places, in order, and its threads have the
sums of these in registers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlx.backends.cuda.render import WIDE, CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.vectors import width
from rlx.ir.kernel import Alu, Check, Expr, Kernel, Load, Loop, Stmt, Store, Var, walk
from rlx.ir.overlap import may_overlap
from rlx.records import record

THREADS, GROUPS = 256, 128  # of columns of a block, each of a thread
BLOCKS = 4 * 132  # all there at once: each one reads all indices
MOST = 2048  # places of a block
LEAST = 1 << 14  # additions that are worth a launch of several blocks
Sums = tuple[Loop, list[Loop], Check, Store, Loop]


@record
class ScatterLaunch(Launch):
    """A block has `rows` places, `at_once` at a time, of `groups` groups of `vector` adjacent points, each of a thread; `tiles`
    blocks have all places of these points."""

    groups: int = 0
    rows: int = 0
    at_once: int = 0
    tiles: int = 0

    @property
    def blocks(self) -> int:
        return -(-self.points // self.groups) * self.tiles


def sums_of(kernel: Kernel) -> Sums | None:
    """The loop that begins a line of sums, the loops over indices, their check and sum, and the loop that stores the line; None:
    the kernel is something else."""
    match kernel.body:
        case (Loop(body=(Store() as first,)) as start, Loop() as nest, Loop(body=(Store(value=Load() as last),)) as end):
            picks = [nest]
        case _:
            return None
    while len(picks[-1].body) == 1 and isinstance(picks[-1].body[0], Loop):
        picks.append(picks[-1].body[0])
    match picks[-1].body:
        case (Check() as check, Store(value=Alu(op="add", args=(Load(guard=Alu() as inside), _))) as put):
            own = {first.buffer, last.buffer, put.buffer} == {*kernel.locals}
            chosen = {x for x in walk((put.index, inside)) if isinstance(x, Var)}
            return (start, picks, check, put, end) if own and {s.var for s in picks}.issuperset(chosen) else None
    return None


def scattered(kernel: Kernel) -> ScatterLaunch | None:
    """`kernel` as sums of several blocks; None: it is something else, or small, or its results may take the place of what it
    adds, which other blocks read."""
    found, points = None if kernel.limits else sums_of(kernel), math.prod(n for _, n in kernel.grid)
    looked = found and any(isinstance(x, Load) for x in walk(found[3].index))
    if not found or not looked or points * math.prod(s.extent for s in found[1]) < LEAST:
        return None
    _, _, _, put, end = found
    added = {x.buffer for x in walk(put.value) if isinstance(x, Load)}
    if any(kernel.buffers[read] in added for read, _ in may_overlap(kernel)):
        return None
    if max(end.extent, math.prod(s.extent for s in found[1])) >= WIDE // 2:
        return None
    vector = width(end.body, ends_of(found), *kernel.grid[-1]) if kernel.grid else 1
    groups = min(GROUPS, 1 << (points // vector - 1).bit_length())
    at_once = THREADS // groups * max(2, min(4, 16 // vector))
    wanted = -(-end.extent * -(-points // (vector * groups)) // BLOCKS)
    rows = min(MOST, -(-wanted // at_once) * at_once)
    tiles = -(-end.extent // rows)
    return ScatterLaunch(kernel, 1, THREADS, vector=vector, groups=groups, rows=rows, at_once=at_once, tiles=tiles)


def ends_of(found: Sums) -> tuple[Expr, Expr]:
    """The first value of a place, and what is added to it."""
    (first,), added = found[0].body, found[3].value.args[1]  # type: ignore[union-attr]
    return first.value, added  # type: ignore[union-attr]


class ScatterWriter(CudaWriter):
    occupancy = ", 4"  # blocks of a multiprocessor
    launch: ScatterLaunch

    def coordinates(self) -> Iterator[str]:
        at, end = self.launch, sums_of(self.kernel)[-1].extent  # type: ignore[index]
        yield f"const int first = {self.block_number} % {at.tiles} * {at.rows};"
        yield f"const int end = first + {at.rows} < {end} ? first + {at.rows} : {end};"
        group = f"(rlx_uindex)({self.block_number} / {at.tiles}) * {at.groups} + threadIdx.x % {at.groups}"
        yield from self.of_point(group, f"const bool own = point < {at.points};", "if (!own) point = 0;")

    def declare_locals(self) -> None:
        """The sums are registers."""

    def body(self) -> None:
        """Functions of a place or an index, which rlx_scatter calls."""
        at, found = self.launch, sums_of(self.kernel)
        assert found
        start, picks, check, put, end = found
        (out,), (first, added) = end.body, ends_of(found)
        self.column = f"{self.names[self.kernel.grid[-1][0]]}_0" if at.vector > 1 else ""
        kind, adds = self.type(put.buffer.dtype), self.function_of("add", added.dtype)
        row, to = [self.name(s.var, "i") for s in (start, end)], f"{kind} (&held)[{at.vector}]"
        with self.alone():
            with self.scope([f"const auto begin = [&](rlx_index {row[0]}, {to}) {{"]):
                self.columns((), (first,))
            index = next(x for x in walk((check, put.index)) if isinstance(x, Load))
            seen = self.type(index.dtype)
            with self.scope([f"; const auto look = [&](int pick) -> {seen} {{"]):
                self.pick(picks)
                self.line(f"return {self.value(index)};")
            with self.scope([f"; const auto place = [&](int pick, {seen} seen) -> rlx_index {{"]):
                self.pick(picks)
                self.memo[id(index)] = "seen"
                self.statement(check)
                self.line(f"return {self.value(put.value.args[0].guard)} ? {self.value(put.index)} : -1;")  # type: ignore[union-attr]
            with self.scope([f"; const auto added = [&](int pick, {to}) {{"]):
                self.pick(picks)
                self.columns((), (added,))
            with self.scope([f"; const auto finish = [&](rlx_index {row[1]}, const {to}) {{"]):
                self.memo[id(out.value)] = "held[v]"  # type: ignore[union-attr]
                self.columns((out,), ())
        sizes = f"{at.threads}, {at.groups}, {at.at_once}, {at.vector}, {min(MOST, at.rows)}, {kind}"
        count = math.prod(s.extent for s in picks)
        self.line(f"; rlx_scatter<{sizes}>(first, end, {count}, own, begin, look, place, added, {adds}, finish);")

    def columns(self, stmts: Sequence[Stmt], ends: Sequence[Expr]) -> None:
        """The statements for each column of the thread; the value of `ends` is held."""
        size = self.launch.vector
        hold = lambda values: [self.line(f"held[v] = {value};") for value in values]  # noqa: E731
        if size > 1:
            return self.in_vectors(stmts, ends, self.kernel.grid[-1][0], size, self.column, hold)
        self.line("const int v = 0;")
        hold(self.block(stmts, ends))

    def pick(self, picks: list[Loop]) -> None:
        """The coordinates of the index number `pick`."""
        rest = "pick"
        for s in reversed(picks):
            self.names[s.var] = self.fresh("k")
            self.line(f"const rlx_index {self.names[s.var]} = {rest} % {s.extent};")
            rest = f"({rest} / {s.extent})"

    def function(self, name: str) -> str:
        return (Path(__file__).parent / "scatter.h").read_text() + super().function(name)


__all__ = ["ScatterLaunch", "ScatterWriter", "scattered"]
