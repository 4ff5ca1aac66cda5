"""The base of products with quantised weights in panels (rlx.ir.blocks.Panel): their tasks, and what is in a panel's bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

from rlx.backends.cpu.kernels.module import step
from rlx.backends.cpu.kernels.product import Product
from rlx.backends.cpu.kernels.tile import LINE, Layout, prefetch
from rlx.backends.shared.packed import PANEL, STEP, panel
from rlx.host import math
from rlx.host.emit import Emitter, V, vector
from rlx.host.processor import fetches_ahead
from rlx.ir.blocks import Bits
from rlx.ir.dtype import f32
from rlx.ir.kernel import Computed, Contract, Kernel, Operand
from rlx.ir.target import Target

from rlx.backends.cpu.kernels.tiles import (  # isort: skip
    BLOCK_ROWS, RAGGED_TASKS, Plan, kept_locals, ragged_tasks, registers_of,
)  # fmt: skip

SCRATCH_BYTES = 1 << 18  # most rounded rows of x that a task keeps
TASK_BYTES = 1 << 18  # weights; with few rows, a smaller task is not worth handing over to the other one of two threads
SHARED_BYTES = 1 << 16  # the same of more threads, which else would not all have as much, or no task at all
GRAIN = 1 << 22  # products; with many rows, a smaller task is not worth handing over
TASKS_PER_THREAD = 4
AHEAD = 6 << 10  # bytes: how far panels are prefetched; a processor starts anew at every page, and stays too close
NEAR = 3 << 10  # how far into the L1 cache, on processors that `fetches_ahead` names: else each load waits for the L2 cache


class PanelProduct(Product):
    """A product whose right operand is quantised blocks in panels."""

    most_scratch = SCRATCH_BYTES
    tasks_per_thread = TASKS_PER_THREAD

    def __init__(
        self, kernel: Kernel, c: Contract, target: Target, tiling: Mapping[str, int], highest: int, row_bytes: int
    ) -> None:
        """`highest`: most rows of a tile; `row_bytes`: bytes of scratch per row of a block."""
        assert isinstance(c.b, Operand)
        self.p = panel(c.b.blocks)
        self.f = self.p.packed
        self.k, self.n = c.k, c.n
        self.panel_bytes = self.k // self.f.block * self.f.nbytes
        self.lanes, self.threads = target.vector_bytes // 4, target.threads
        self.vectors = PANEL // self.lanes
        row_bytes += sum(x.size * x.dtype.itemsize for x in kept_locals(kernel, c))
        panels, batch = -(-c.n // PANEL), prod(extent for _, extent in kernel.grid)
        nbytes, products = panels * self.panel_bytes, c.m * c.n * c.k
        least = TASK_BYTES if target.threads <= 2 else SHARED_BYTES
        work, each = batch * max(nbytes // least, products // GRAIN), self.tasks_per_thread
        if c.count is not None:
            work, each = max(1, min(batch, c.m) * nbytes // TASK_BYTES, products // GRAIN), RAGGED_TASKS
        default = 1 if target.threads == 1 else min(work, target.threads * each)
        self.wanted = tiling.get("tasks", default)
        super().__init__(kernel, c, target, self._cut(c, target, highest, row_bytes, panels, batch))
        self.line = Layout(c.a.dtype, 0, c.a.col_stride) if isinstance(c.a, Operand) else Layout(f32, 0)

    def _cut(self, c: Contract, target: Target, highest: int, row_bytes: int, panels: int, batch: int) -> Plan:
        if c.count is not None:
            return self._ragged(c, target, highest, row_bytes, panels, batch)
        row_tiles = -(-c.m // highest)
        rows = -(-c.m // max(1, row_tiles))
        fit = max(1, self.most_scratch // row_bytes // max(1, rows))
        blocks, wanted = -(-row_tiles // fit), self.wanted
        if isinstance(c.a, Computed) and batch * blocks > 1:
            wanted = min(wanted, max(target.threads, batch * blocks))  # each group of columns recomputes its rows
        if c.rows:  # a task must own whole rows
            blocks = min(row_tiles, max(blocks, -(-wanted // batch)))
        each = max(1, batch * blocks)
        groups = 1 if c.rows else max(1, min(panels, -(-wanted // each)))
        batch_groups = batch if blocks * groups > 1 else min(batch, max(wanted, 1))
        if not (c.m and c.n and batch):
            blocks = groups = batch_groups = 0
        registers = registers_of(target)
        tall = c.m - row_tiles * (rows - 1)
        return Plan(
            self.lanes, self.vectors, rows, tall, row_tiles, panels, batch, batch_groups, blocks, groups, 1, True, "", registers,
            False, False,
        )  # fmt: skip

    def _ragged(self, c: Contract, target: Target, highest: int, row_bytes: int, panels: int, batch: int) -> Plan:
        """As tiles.plan has it for grid points with a number of rows of their own."""
        rows = max(1, min(highest, c.m))
        fit = min(c.m, self.most_scratch // row_bytes, BLOCK_ROWS)
        row_tiles = max(1, fit // rows)
        groups, batch_groups = ragged_tasks(panels, batch, c.m, self.wanted, self.threads)
        registers = registers_of(target)
        return Plan(
            self.lanes, self.vectors, rows, row_tiles, row_tiles, panels, batch, batch_groups, 1, groups, 1, True, "", registers,
            False, False,
        )  # fmt: skip

    # -- a panel's bytes; `across`: the vectors of columns that are wanted, all of them if it is empty

    @contextmanager
    def each_turn(self, e: Emitter, weights: V, length: int) -> Iterator[tuple[V, V, list[list[V]]]]:
        """A loop over the turns of `length` elements of a panel's rows: index of the turn, its address, numbers of its block."""
        inner = self.f.block // STEP
        with e.loop(0, length // self.f.block, nonempty=True) as block:
            at = step(e, weights, block.index, self.f.nbytes)
            numbers = self.numbers(e, at)
            with e.loop(0, inner) as turn:
                index = e.bin("add", e.bin("mul", block.index, e.i64(inner)), turn.index)
                yield index, self.at_turn(e, at, turn.index), numbers

    def numbers(self, e: Emitter, block: V, across: range = range(0)) -> list[list[V]]:
        """The f16 numbers of a block as f32: a list of vectors for each."""
        half, across = vector("half", self.lanes), across or range(self.vectors)
        return [
            [math.f16_value(e, e.load(half, e.gep(block, a + 2 * self.lanes * v), 2)) for v in across]
            for a in self.f.numbers
        ]

    def small(self, e: Emitter, at: V, signed: bool, by: Sequence[V], across: range) -> list[V]:
        """One byte per weight row, converted to f32 and multiplied by `by`."""
        out = []
        for v, factor in zip(across, by):
            raw = e.load(vector("i8", self.lanes), e.gep(at, v * self.lanes), 1)
            wide = e.convert("sext" if signed else "zext", raw, "i32")
            out.append(e.bin("fmul", e.convert("sitofp", wide, "float"), factor))
        return out

    def scales(self, e: Emitter, at: V, numbers: list[list[V]], across: range = range(0)) -> tuple[list[list[V]], list[V]]:
        """For the run of STEP elements at `at`: (the scales of each group, the mins if there are any)."""
        f, count, across = self.f, self.p.each(self.f.scales), across or range(self.vectors)
        if f.scales is None:
            return [numbers[0]], []
        scales = [self.small(e, e.gep(at, PANEL * g), f.scales.signed, numbers[0], across) for g in range(count)]
        return scales, self.small(e, e.gep(at, PANEL * count), f.mins.signed, numbers[1], across) if f.mins else []

    def words(self, e: Emitter, at: V, across: range = range(0)) -> Iterator[list[V]]:
        """For the run at `at`: vectors that hold four elements (one dword) of each weight row."""
        p, ty, across = self.p, vector("i32", self.lanes), across or range(self.vectors)
        high: list[tuple[list[V], int, Bits]] = []  # (dwords, their first element, their part of q)

        def bits(raw: list[V], left: int, mask: int) -> list[V]:
            raw = [e.bin("shl", x, left) if left > 0 else e.bin("lshr", x, -left) if left else x for x in raw]
            return [e.bin("and", x, mask * 0x01010101) for x in raw]

        for n, (part, first) in enumerate(p.dwords):
            plane = p.plain.q.parts[part]
            raw = [e.load(ty, e.gep(at, p.dwords_at + 4 * (n * PANEL + self.lanes * v)), 4) for v in across]
            if part:
                high = [(raw, first, plane)]
                continue
            for four in range(8 // plane.bits):
                out = bits(raw, -four * plane.bits, plane.mask) if plane.bits < 8 else raw
                for above, start, other in high:
                    left = plane.bits - other.bits * ((first - start) // 4 + four)
                    more = bits(above, left, other.mask << plane.bits)
                    out = [e.bin("or", a, b) for a, b in zip(out, more)]
                yield out

    def fetch(self, e: Emitter, at: V, nbytes: int, part: int = 0, parts: int = 1) -> None:
        """Prefetch what is AHEAD bytes behind so many bytes of a panel: this part of the lines."""
        lines = -(-nbytes // LINE)
        start, stop = (LINE * (n * lines // parts) for n in (part, part + 1))
        prefetch(e, [e.gep(at, AHEAD + start)], stop - start)
        if fetches_ahead(self.features):
            prefetch(e, [e.gep(at, NEAR + start)], stop - start, level=1)

    def fetching(self, e: Emitter, turn: V, words: Iterable[list[V]]) -> Iterator[list[V]]:
        """The words of a run, with a part of its prefetches beside each of them. All of them at once take every place that a
        core has for lines on their way, and the loads of the run wait behind them."""
        for part, vectors in enumerate(words):
            self.fetch(e, turn, self.p.turn_bytes, part, STEP // 4)
            yield vectors

    def at_turn(self, e: Emitter, block: V, turn: V) -> V:
        return step(e, e.gep(block, self.p.turns_at), turn, self.p.turn_bytes)
