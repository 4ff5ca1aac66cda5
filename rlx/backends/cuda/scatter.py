"""Sums into the places that indices choose: a block has the sums of some places in shared memory, finds the indices that choose
them, in order, and adds what belongs to these."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.ir.kernel import Alu, Check, Kernel, Load, Loop, Store, Var, walk
from rlx.ir.overlap import may_overlap

THREADS, COLUMNS = 512, 128
SHARED_BYTES = 64 << 10  # of the sums of a block
LEAST = 1 << 14  # additions that are worth a launch of several blocks
Sums = tuple[Loop, list[Loop], Check, Store, Loop]


@dataclass(frozen=True)
class ScatterLaunch(Launch):
    """A block has `rows` places of `columns` adjacent points; `tiles` blocks have all places of these points."""

    rows: int = 0
    columns: int = 0
    tiles: int = 0

    @property
    def blocks(self) -> int:
        return -(-self.points // self.columns) * self.tiles


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
    """`kernel` as sums in shared memory; None: it is something else, or small, or its results may take the place of what it adds,
    which other blocks read."""
    found, points = None if kernel.limits else sums_of(kernel), math.prod(n for _, n in kernel.grid)
    if found is None or points * math.prod(s.extent for s in found[1]) < LEAST:
        return None
    _, _, _, put, end = found
    added = {x.buffer for x in walk(put.value) if isinstance(x, Load)}
    if any(kernel.buffers[read] in added for read, _ in may_overlap(kernel)):
        return None
    columns = min(COLUMNS, 1 << (points - 1).bit_length())
    rows = min(end.extent, SHARED_BYTES // (columns * put.buffer.dtype.itemsize))
    shared = rows * columns * put.buffer.dtype.itemsize
    return ScatterLaunch(kernel, 1, THREADS, shared, rows=rows, columns=columns, tiles=-(-end.extent // rows))


class ScatterWriter(CudaWriter):
    launch: ScatterLaunch

    def coordinates(self) -> Iterator[str]:
        at = self.launch
        yield f"const rlx_index first = (rlx_index)({self.block_number} % {at.tiles}) * {at.rows};"
        yield f"rlx_uindex point = (rlx_uindex)({self.block_number} / {at.tiles}) * {at.columns} + threadIdx.x % {at.columns};"
        yield f"const bool own = point < {at.points};"
        yield "if (!own) point = 0;"
        yield from self.divided()

    def declare_locals(self) -> None:
        """The sums are in shared memory."""

    def body(self) -> None:
        """Functions of a place or an index, which rlx_scatter calls."""
        at, found = self.launch, sums_of(self.kernel)
        assert found
        start, picks, check, put, end = found
        (first,), (out,), (_, added) = start.body, end.body, put.value.args  # type: ignore[union-attr]
        kind = self.type(put.buffer.dtype)
        with self.alone():
            with self.scope([f"const auto begin = [&](rlx_index {self.name(start.var, 'i')}) -> {kind} {{"]):
                self.line(f"return {self.value(first.value)};")  # type: ignore[union-attr]
            with self.scope(["; const auto place = [&](int pick) -> rlx_index {"]):
                self.pick(picks)
                self.statement(check)
                self.line(f"return {self.value(put.value.args[0].guard)} ? {self.value(put.index)} - first : -1;")  # type: ignore[union-attr]
            with self.scope([f"; const auto add = [&](int pick, {kind} sum) -> {kind} {{"]):
                self.pick(picks)
                self.line(f"return {self.dialect.apply('add', ('sum', self.value(added)), added.dtype, added.dtype)};")
            with self.scope([f"; const auto end = [&](rlx_index {self.name(end.var, 'i')}, {kind} sum) {{"]):
                self.memo[id(out.value)] = "sum"  # type: ignore[union-attr]
                self.write([out])  # type: ignore[list-item]
        count, sizes = math.prod(s.extent for s in picks), f"{at.threads}, {at.columns}, {at.rows}"
        self.line(f"; rlx_scatter<{sizes}, {kind}>(first, {end.extent}, {count}, own, begin, place, add, end);")

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
