"""Contractions: a Kernel whose body is one Contract, as LLVM IR.

A task owns a block of rows and a group of panels (see tiles.py) of some grid points. For each panel, each row tile is multiplied
into a small buffer of sums (tile.py), and the epilogue is applied to the sums. When all panels of a block are done, the
statements `rows` run for each of its rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod

from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.kernels import amx
from rlx.backends.cpu.kernels.interleave import interleave_columns, interleave_rows
from rlx.backends.cpu.kernels.matrix import MatrixUnit
from rlx.backends.cpu.kernels.module import SCRATCH, step
from rlx.backends.cpu.kernels.product import Product, row_statements, stored_to
from rlx.backends.cpu.kernels.tiles import AHEAD_ROWS, DEFAULT_TILING, MAX_ROWS, NEAR, dot_in, panel_of, plan
from rlx.backends.cpu.loops import emit_statements, emit_vector_loop, hoist, prefers_inner
from rlx.backends.cpu.scope import Scope
from rlx.host.emit import Emitter, V, stored, vector
from rlx.host.processor import fetches_ahead
from rlx.ir.dtype import u8, u16
from rlx.ir.kernel import Computed, Contract, Kernel, Local, Loop, Operand
from rlx.ir.target import Target

from rlx.backends.cpu.kernels.tile import (  # isort: skip
    LINE, Layout, Tile, stage_levels_function, stage_rows_function, tile_function, transpose_function,
)  # fmt: skip


def render(kernel: Kernel, target: Target, symbol: str, tiling: Mapping[str, int] = DEFAULT_TILING) -> Rendered:
    """A module for a kernel whose body is one Contract. The order of every sum depends only on the kernel and the target. So
    do tasks and tiling, except for the tuning parameters in `tiling` (see tiles.axes)."""
    (contract,) = kernel.body
    assert isinstance(contract, Contract), f"kernel {kernel.name} is no contraction"
    return _Contraction(kernel, contract, target, tiling).written(symbol)


LONG_TILE = 1 << 14  # multiply-adds, beside which the time of the code around a tile does not count
Width = tuple[Layout, int, int]  # of a panel: layout, vectors, and columns of the last vector if others are not in memory


class _Contraction(Product):
    def __init__(self, kernel: Kernel, contract: Contract, target: Target, tiling: Mapping[str, int]) -> None:
        self.stages_once = isinstance(contract.a, Computed)
        super().__init__(kernel, contract, target, plan(kernel, contract, target, tiling))
        p, block_rows = self.plan, self.block_rows
        a, b = contract.a, contract.b
        self.dot = dot_in(contract, target)
        raw = {1: u8, 2: u16}[a.dtype.itemsize] if self.dot else None  # to move elements of a group; nothing is computed in it
        self.panel, _ = panel_of(b)
        self.from_a = self.from_b = Layout(self.acc, 0)  # for computed operands, which are not in memory
        if isinstance(a, Operand):
            self.from_a = Layout(raw or a.dtype, a.row_stride, a.col_stride, a.row_levels, a.col_levels)
        if isinstance(b, Operand):
            self.from_b = Layout(raw or b.dtype, b.panel or b.row_stride, 1 if b.panel or contract.n == 1 else b.col_stride)
        self.whole = max(p.lanes, p.group)  # elements of staged rows that are moved at once
        beyond = self.whole if self.from_a.col_levels else 0  # runs of columns are copied in whole vectors
        self.staged = Layout(raw or self.acc, -(-contract.k // self.whole) * self.whole + beyond)
        self.a = self.staged if p.stage_a else self.from_a
        self.steps = -(-contract.k // p.group)
        self.b = self.from_b
        if self.dot:  # from here on, one element is a whole group
            self.a, self.b = self.a.in_groups(self.dot.word, p.group), Layout(self.dot.word, self.panel or p.columns)
        self.panel_bytes = self.b.byte(self.steps, 0) if self.panel else 0
        self.run = self.a.col_levels[0][0] if self.a.col_levels else self.steps  # steps of k without a jump in a
        size = self.acc.itemsize
        self.unit = MatrixUnit(self, self.from_a, self.staged, self.a, self.b) if p.matrix else None
        self.sums_at = self.reserve(0 if p.matrix else (block_rows if p.depth else p.rows) * p.columns * size)
        self.a_at = self.reserve(block_rows * self.staged.byte(1, 0) if p.stage_a and not p.matrix else 0)
        words = {"": 0, "groups": self.steps + -self.steps % p.lanes}.get(p.stage_b, contract.k)
        self.b_at = self.reserve(words * p.columns * size)
        self.reserve_locals()
        copies = p.matrix or p.stage_a or p.stage_b  # in loops of the kernel itself
        self.around = not copies and contract.k * p.rows * p.columns >= LONG_TILE

    def _begin(self, e: Emitter) -> None:
        if self.unit:
            self.unit.begin(e)

    def _end(self, e: Emitter) -> None:
        if self.unit:
            amx.release(e)

    def _swept(self, e: Emitter, scope: Scope, i0: V, vectors: int, tail: int) -> None:
        if self.unit:
            self.unit.finish(e, scope, i0, vectors, tail)

    def _staged_a(self, e: Emitter, scope: Scope, a: V, i0: V, i1: V, stop: V, tiles: tuple[V, V]) -> V:
        c, p = self.c, self.plan
        if not p.stage_a:
            return a
        if self.unit:
            return self.unit.staged(e, scope, a, tiles, stop)
        kept = e.gep(SCRATCH, self.a_at)
        if isinstance(c.a, Computed):
            self._computed_a(e, scope, c.a, kept, i0, stop)
        elif self.from_a.row_levels or self.from_a.col_levels:
            stage_levels_function(e, a, kept, i0, i1, c.k, self.from_a, self.staged, self.whole, p.group)
        else:
            source, rows = self.from_a.at(e, a, i0), e.bin("sub", i1, i0)
            stage_rows_function(e, source, kept, rows, c.k, self.from_a, self.staged, self.whole, p.group)
        return step(e, kept, i0, -self.staged.byte(1, 0))  # where row 0 would be

    def _computed_a(self, e: Emitter, scope: Scope, a: Computed, to: V, start: V, stop: V) -> None:
        """Compute rows `start` to `stop` of a in scratch, in the layout of stage_rows_function."""
        depth, p = self.c.k, self.plan
        line = Local("line", a.dtype if p.group > 1 else self.acc, self.staged.row)
        statements = row_statements(a, line, depth)
        with self.staging(e, scope) as inside:
            hoist(statements, inside)
            with e.loop(start, stop) as row:
                at = step(e, to, e.bin("sub", row.index, start), self.staged.byte(1, 0))
                emit_statements(statements, inside.child({a.row: row.index}, pointers={line: at}))
                for column in range(depth, -(-depth // p.group) * p.group):
                    e.store(e.const(stored(self.staged.dtype), 0), self.staged.at(e, at, 0, column), self.staged.dtype.itemsize)

    def _computed_b(self, e: Emitter, scope: Scope, b: Computed, to: V, panel: V, pitch: Layout) -> None:
        """Compute the columns of one panel of b in scratch, as [k][panel]."""
        c, p = self.c, self.plan
        first = e.bin("mul", panel, e.i64(p.columns))
        bounds = first, e.intrinsic("smin", e.bin("add", first, p.columns), e.i64(c.n))
        line = Local("line", self.acc, c.n)
        loop = Loop(b.column, c.n, (*b.body, stored_to(line, b)), vector=True)
        hoist((*b.before, loop), scope)
        with e.loop(0, c.k) as row:
            at = step(e, pitch.at(e, to, row.index), first, -self.acc.itemsize)  # where column 0 would be
            inside = scope.child({b.row: row.index}, pointers={line: at})
            emit_statements(b.before, inside)
            if loop.extent > 1 and loop.in_lanes and not prefers_inner(loop):
                emit_vector_loop(loop, inside, bounds)
            else:
                with e.loop(*bounds) as column:
                    emit_statements(loop.body, inside.child({b.column: column.index}))

    def _sweep(self, e: Emitter, scope: Scope, a: V, b: V, tiles: tuple[V, V], i0: V, panel: V, vectors: int, tail: int) -> None:
        """One panel: the task's row tiles, of a block that starts at row i0."""
        if self.plan.stage_b == "groups":
            b = self._interleaved_b(e, b, panel, (vectors - 1) * self.plan.lanes + (tail or self.plan.lanes))
        if self.unit:
            self.unit.sweep(e, scope, a, b, tiles, i0, panel, vectors, tail)
            return
        p, layout = self.plan, self.b
        if p.stage_b != "groups":
            b = step(e, b, panel, self.panel_bytes or layout.byte(0, p.columns))
        masked = 0 if self.panel or p.stage_b else tail  # panels are padded
        if p.stage_b not in ("", "groups"):
            kept, layout = e.gep(SCRATCH, self.b_at), Layout(self.acc, vectors * p.lanes)
            if isinstance(self.c.b, Computed):
                self._computed_b(e, scope.child(), self.c.b, kept, panel, layout)
            else:
                self._staged_b(e, b, kept, (vectors - 1) * p.lanes + (tail or p.lanes), layout)
            b = kept
        sums, width = e.gep(SCRATCH, self.sums_at), (layout, vectors, masked)
        if p.depth:
            self._parts(e, a, b, sums, tiles, i0, width)
            count = e.bin("sub", self.first_row(e, tiles[1]), i0)
            self.finish(e, self.outside(scope, i0), sums, i0, count, e.bin("mul", panel, e.i64(p.columns)), vectors, tail)
            return
        with e.loop(*tiles) as at:
            row = self.first_row(e, at.index)
            high = self._row_tile(e, a, row, b, sums, tiles, at.index, width, self.steps)
            count = self.height(e, at.index, high)
            self.finish(e, self.outside(scope, i0), sums, row, count, e.bin("mul", panel, e.i64(p.columns)), vectors, tail)

    def _parts(self, e: Emitter, a: V, b: V, sums: V, tiles: tuple[V, V], i0: V, width: Width) -> None:
        """The sums of all row tiles of a block, from one part of k after the other."""
        (layout, vectors, _), whole = width, self.steps // self.plan.depth
        zero, pitch = V("zeroinitializer", vector(stored(self.acc), self.plan.lanes)), Layout(self.acc, vectors * self.plan.lanes)
        with e.loop(i0, self.first_row(e, tiles[1])) as row:
            for v in range(vectors):
                e.store(zero, pitch.at(e, sums, e.bin("sub", row.index, i0), v * self.plan.lanes), self.acc.itemsize)

        def part(first: V, steps: int) -> None:
            at_a, at_b = self.a.at(e, a, 0, first) if steps <= self.run else a, layout.at(e, b, first)
            with e.loop(*tiles) as at:
                row = self.first_row(e, at.index)
                kept = pitch.at(e, sums, e.bin("sub", row, i0))
                self._row_tile(e, at_a, row, at_b, kept, tiles, at.index, width, steps, first)

        with e.loop(0, whole * self.plan.depth, self.plan.depth) as at:
            part(at.index, self.plan.depth)
        if rest := self.steps % self.plan.depth:
            part(e.i64(self.steps - rest), rest)

    def _row_tile(
        self, e: Emitter, a: V, row: V, b: V, sums: V, tiles: tuple[V, V], tile: V, width: Width, steps: int,
        first: V | None = None,
    ) -> V:  # fmt: skip
        """One row tile, which begins at `row`, over `steps` of k from `first` on. Returns whether it is one of the high ones."""
        p, (layout, vectors, masked), ahead = self.plan, width, list[V]()
        every = max(1, -(-p.row_tiles // p.blocks))  # tiles per panel: each prefetches its share of the next panel
        share = -(-layout.byte(1, 0) // every) if p.ahead and self.panel else 0
        jumps = [first or e.i64(0)] if steps > self.run else []  # where a begins if its columns lie in levels
        if share and not self.cut:
            after = NEAR if every == 1 else layout.byte(steps, 0)
            ahead = [step(e, e.gep(b, after), e.bin("sub", tile, tiles[0]), steps * share)]
        for height, here in (heights := self.heights(e, tile)):
            shape = height, vectors, p.lanes, p.unroll(height, vectors), masked
            t = Tile(*shape, self.acc, vectors * p.lanes, dot=self.dot, ahead=share, adds=steps < self.steps)
            with e.when(here):
                if self.cut and share:
                    self._cut_tile(e, t, self.a.at(e, a, row), b, sums, layout, steps, tile, tiles[1])
                else:
                    name = f"tile_{height}x{vectors}_{masked}"
                    at_a, rows = self.a.at(e, a, row), list[V]()
                    if p.rows_ahead and self.a.col_levels:
                        self._fetch_windows(e, at_a, height)
                    elif p.rows_ahead:  # each tile prefetches the rows of the next
                        t, rows = replace(t, rows_ahead=self.a.byte(height, 0) // steps), [self.a.at(e, at_a, height)]
                    self._tile(e, t, name, at_a, b, sums, layout, steps, *jumps, *ahead, *rows)
        return heights[0][1]

    def _fetch_windows(self, e: Emitter, a: V, height: int) -> None:
        """Prefetch the rows of the next tile where windows overlap: of their outermost level the last part alone is new."""
        source, counts = self.a, [count for count, _ in self.a.col_levels]
        parts, stride = self.steps // prod(counts), source.col_levels[-1][1]
        new = source.at(e, e.gep(a, (parts - 1) * stride * source.dtype.itemsize), height)
        beyond = max(0, counts[0] * source.dtype.itemsize - source.byte(1, 0))  # the last row is as long as its run

        def fetched(e: Emitter, new: V, nbytes: V) -> None:
            with e.loop(0, nbytes, LINE) as at:
                e.prefetch(step(e, new, at.index, 1), level=2)

        self.call(e, "fetch", fetched, new, e.i64(source.byte(height, 0) + beyond))

    def _tile(self, e: Emitter, t: Tile, name: str, a: V, b: V, sums: V, layout: Layout, steps: int, *other: V) -> None:
        """`other`: the column of a at which k begins, if it jumps, and the places to prefetch from, if there are any."""
        if self._suits_others(t, steps):
            self._shared_tile(e, t, name, a, b, sums, layout, steps, *other)
            return

        def body(e: Emitter, a: V, b: V, sums: V, *other: V) -> None:
            first, ahead = (other[0], other[1:]) if steps > self.run else (None, other)
            tile_function(e, a, b, sums, steps, None, *ahead, t=t, from_a=self.a, from_b=layout, first=first)

        self.call(e, name if steps in (self.steps, self.plan.depth) else f"{name}_last", body, a, b, sums, *other)

    def _suits_others(self, t: Tile, steps: int) -> bool:
        """Whether the code of a tile is made for products of any size: strides take registers, and steps are whole turns."""
        parts = (steps, self.run) if steps > self.run else (steps,)
        plain = len(self.a.col_levels) <= 1 and t.rows <= MAX_ROWS and not t.ahead_of
        return self.around and plain and not any(n % t.unroll for n in parts)

    def _shared_tile(self, e: Emitter, t: Tile, name: str, a: V, b: V, sums: V, layout: Layout, steps: int, *other: V) -> None:
        """As `_tile`, with sizes as parameters."""
        jumps = steps > self.run
        if jumps:
            a, other = self.a.at(e, a, 0, other[0]), other[1:]
        runs = (self.run, self.a.col_levels[0][1] * self.a.dtype.itemsize) if jumps else ()
        numbers = steps, self.a.byte(1, 0), *runs, *(n * t.unroll for n in (t.ahead, t.rows_ahead) if n)

        def body(e: Emitter, a: V, b: V, sums: V, *more: V) -> None:
            ahead, (k, pitch, *sizes) = more[: -len(numbers)], more[-len(numbers) :]
            runs, paces = (tuple(sizes[:2]), sizes[2:]) if jumps else (None, sizes)
            from_a = self.a.with_pitch(e, pitch, t.rows)
            tile_function(e, a, b, sums, k, None, *ahead, t=t, from_a=from_a, from_b=layout, runs=runs, paces=paces)

        self.call(e, f"{name}_sized", body, a, b, sums, *other, *map(e.i64, numbers))

    def _cut_tile(self, e: Emitter, t: Tile, a: V, b: V, sums: V, layout: Layout, steps: int, tile: V, tiles: V) -> None:
        """Tile number `tile` of `tiles`, known at run time: each prefetches its share of the next panel, a third if there are
        more than three. Low ones prefetch nothing, or from a little further on in their own, where that gains; so do then those
        of a narrow panel, whose columns are a part of what lies in memory."""
        name, near = f"tile_{t.rows}x{t.vectors}_{t.tail}", fetches_ahead(self.features)
        if t.rows < AHEAD_ROWS or (near and t.vectors < self.plan.vectors):
            t = replace(t, ahead=layout.byte(1, 0) if near else 0, ahead_of=layout.byte(0, t.vectors * t.lanes))
            self._tile(e, t, name, a, b, sums, layout, steps, *([e.gep(b, NEAR)] if near else []))
            return
        after = e.gep(b, layout.byte(steps, 0))
        for order, few in (("eq", 1), ("eq", 2), ("ugt", 2)):
            share = -(-layout.byte(1, 0) // (few + (order == "ugt")))
            with e.when(e.cmp(order, tiles, e.i64(few))):
                here = step(e, after, tile, steps * share)
                self._tile(e, replace(t, ahead=share), f"{name}_{share}", a, b, sums, layout, steps, here)

    def _interleaved_b(self, e: Emitter, b: V, panel: V, columns: int) -> V:
        """A panel of b in groups of rows, in scratch."""
        p, kept, start = self.plan, e.gep(SCRATCH, self.b_at), step(e, b, panel, self.from_b.byte(0, self.plan.columns))
        how = {"source": self.from_b, "group": p.group, "to": self.b}
        rows = self.from_b.column == 1
        body = partial(interleave_rows, columns=columns, **how) if rows else partial(interleave_columns, k=self.c.k, **how)
        self.call(e, f"interleave_{columns}", body, start, kept, e.i64(self.c.k if rows else columns))
        return kept

    def _staged_b(self, e: Emitter, b: V, to: V, columns: int, layout: Layout) -> None:
        """A panel of b in the dtype of the sums; see Plan.stage_b. Columns past the edge of the matrix are undefined;
        their lanes reach no result."""
        k, source, p = self.c.k, self.from_b, self.plan
        if p.stage_b != "columns":
            stage_rows_function(e, b, to, e.i64(k), columns, source, layout, p.lanes)
        elif k:
            transposed = Layout(source.dtype, source.column, source.row)
            transpose_function(e, b, to, e.i64(columns), e.i64(0), e.i64(k), layout.row, k, transposed, layout, p.lanes)
