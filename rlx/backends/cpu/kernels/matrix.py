"""Panels of a contraction on the matrix unit (amx.py).

A tile of sums takes four loads of blocks per four products, as many bytes as a core's L2 cache gives in that time. So k is cut
into equal parts of at most MATRIX_DEPTH steps: the panel's part stays in the L1 cache for all row tiles, and only `a` comes from
L2. Between parts the sums are in scratch. The order of additions is that of one loop over k. A long epilogue of a tile runs row
by row between the products of the next one, since the two use different units of the core; a short one waits for the caches as
they do.

Results that are stored as whole lines (tiles.results_in_lines) are rounded two vectors at a time. Short epilogues that read no
other rows run beside products then, too, and k is not cut: the first MATRIX_DEPTH steps of the panel stay in the L1 cache, and
the others pass it by. Large results go past the caches (tiles.past_caches), so their stores wait for none.

A depth that is not whole steps has a last one of which the unit reads copies, with zeros behind k.

If a task has enough panels, its rows of `a` are copied first, or they are computed: as tiles, whose steps are consecutive in
memory. Windows of an image are read where they lie: rows of a tile from one row of the image, steps from one run of its elements.
All tiles of a task have one height, so that the unit is configured once. Those that the plan makes one row lower have an
undefined row at the end, or start a row earlier if `a` is read in place; what is computed for it is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlx.backends.cpu.kernels import amx
from rlx.backends.cpu.kernels.module import SCRATCH, divided, step
from rlx.backends.cpu.kernels.product import Product, is_heavy, reads_rows, row_statements
from rlx.backends.cpu.kernels.tile import Layout, load_line, stage_levels_function
from rlx.backends.cpu.kernels.tiles import MATRIX_DEPTH
from rlx.backends.cpu.loops import emit_statements, hoist
from rlx.backends.cpu.scope import Scope
from rlx.host.emit import Emitter, V, vector
from rlx.ir.kernel import Computed, Local

LINE = 4 * amx.SIDE  # bytes of a row of a block
COPIED = 4  # rows that are copied to a tile at once: their lines of a step adjoin there


class Pending(NamedTuple):
    """Sums whose epilogue is to run: their address, the first row, how many rows, the first column."""

    sums: V
    row: V
    count: V
    column: V

    @staticmethod
    def read(e: Emitter, at: V) -> Pending:
        return Pending(*(e.load(ty, e.gep(at, 8 * n), 8) for n, ty in enumerate(("ptr", "i64", "i64", "i64"))))

    def write(self, e: Emitter, at: V) -> None:
        for n, value in enumerate(self):
            e.store(value, e.gep(at, 8 * n), 8)


class MatrixUnit:
    """The part of a product that runs on the matrix unit. `from_a`: elements of a in memory, `line`: of one contiguous row of
    it; `groups`, `from_b`: a and a panel of b in groups of elements, as one instruction sums them."""

    def __init__(self, product: Product, from_a: Layout, line: Layout, groups: Layout, from_b: Layout) -> None:
        self.product, self.c, self.plan = product, product.c, (p := product.plan)
        self.from_a, self.line, self.groups, self.from_b = from_a, line, groups, from_b
        self.step, groups_of_k = p.matrix, -(-self.c.k // p.group)
        self.steps, self.panel_bytes = -(-groups_of_k // self.step), from_b.byte(groups_of_k, 0)
        self.rest = 0 if p.stage_b else groups_of_k % self.step  # groups of a last step; panels made in the run have zeros behind
        self.tiles = max(1, -(-p.row_tiles // max(1, p.blocks)))  # of a block, at most
        self.step_bytes = LINE * p.rows if p.tiled else 4 * self.step  # from a step of a to the next
        self.tile_bytes = self.steps * self.step_bytes  # of a staged tile of a
        if p.tiled:
            self.groups = Layout(groups.dtype, amx.SIDE)
        lines, self.heavy = bool(product.lines), is_heavy(self.c)
        self.beside = self.heavy or (lines and not reads_rows(self.c))
        cached = self.tiles * p.rows * self.steps * LINE <= amx.L1
        self.levels = not p.tiled and bool(self.groups.col_levels)
        self.streamed = "b" if self.tiles == 1 else "" if cached or self.levels else "a"
        self.keep = MATRIX_DEPTH if lines and self.streamed == "a" else 0  # steps
        self.parts = 1 if self.keep else -(-self.steps // MATRIX_DEPTH)
        self.depth = -(-self.steps // self.parts)  # steps of a part
        each = 1 << (-(-p.rows // self.steps) - 1).bit_length()
        self.rows_beside = each if self.keep else 0  # of each step; 0: known at run time
        self.even = bool(self.keep) and p.tall == (p.in_segment or p.row_tiles) and p.rows % each == 0
        self.sums_bytes = p.rows * 4 * p.columns
        kept = max(2, self.tiles) if self.parts > 1 else 2  # one tile is finished while the next is summed
        self.config_at, self.pending_at = product.reserve(amx.CONFIG_BYTES), product.reserve(4 * 8)
        self.sums_at = product.reserve(kept * self.sums_bytes)
        line_bytes = LINE * (self.steps + (1 if from_a.col_levels else 0))
        self.line_at, self.a_at = (product.reserve(p.tiled * n) for n in (line_bytes, self.tiles * self.tile_bytes))
        self.rest_b_at = product.reserve(from_b.byte(self.step, 0) if self.rest else 0)

    def begin(self, e: Emitter) -> None:
        amx.configure(e, e.gep(SCRATCH, self.config_at), self.plan.rows, self.step)
        e.store(e.i64(0), e.gep(SCRATCH, self.pending_at + 16), 8)
        if self.rest:
            with e.loop(self.from_b.byte(self.rest, 0), self.from_b.byte(self.step, 0), LINE) as at:
                e.store(e.const(vector("i32", amx.SIDE), 0), e.gep(e.gep(SCRATCH, self.rest_b_at), at.index), LINE)

    def staged(self, e: Emitter, scope: Scope, a: V, tiles: tuple[V, V], stop: V) -> V:
        """Copy or compute the rows before `stop` as tiles: [tile][step][row][SIDE groups]. Returns their address."""
        product, source, kept, p = self.product, self.c.a, e.gep(SCRATCH, self.a_at), self.plan
        line = Local("line", source.dtype, self.c.k)
        statements = row_statements(source, line, self.c.k) if isinstance(source, Computed) else ()
        hoist(statements, scope)
        runs = self.from_a.col_levels[:1]  # whole steps in each are copied from where they lie
        whole = self.from_a.column == 1 and not (runs and runs[0][0] % (amx.SIDE * p.group))
        as_it_lies = whole and not isinstance(source, Computed)
        layout, at_once = (self.from_a, COPIED) if as_it_lies else (self.line, 1)
        with e.loop(*tiles) as tile:
            first = product.first_row(e, tile.index)
            out = step(e, kept, e.bin("sub", tile.index, tiles[0]), self.tile_bytes)
            count = e.intrinsic("smin", product.height(e, tile.index), e.bin("sub", stop, first))
            with e.loop(0, count, at_once) as row:
                index, at = e.bin("add", first, row.index), e.gep(SCRATCH, self.line_at)
                if isinstance(source, Computed):
                    emit_statements(statements, scope.child({source.row: index}, pointers={line: at}))
                elif not as_it_lies:
                    after = e.bin("add", index, 1)
                    stage_levels_function(e, a, at, index, after, self.c.k, self.from_a, self.line, p.lanes, p.group)
                rows = [e.intrinsic("smin", e.bin("add", row.index, n), e.bin("sub", count, 1)) for n in range(1, at_once)]
                pairs = [(layout.at(e, a, e.bin("add", first, r)) if as_it_lies else at, r) for r in (row.index, *rows)]
                self._copy_lines(e, [(start, step(e, out, r, LINE)) for start, r in pairs], layout)
        return kept

    def _copy_lines(self, e: Emitter, rows: Sequence[tuple[V, V]], layout: Layout) -> None:
        """Copy rows to tiles, the same step of all of them before the next. `rows`: where each begins, and its line of the first
        step."""
        complete, few = divmod(self.c.k, lanes := amx.SIDE * self.plan.group)
        with e.loop(0, complete) as turn:
            for start, to in rows:
                source_at = layout.at(e, start, 0, e.bin("mul", turn.index, lanes))
                e.store(e.load(vector("i32", amx.SIDE), source_at, 4), step(e, to, turn.index, self.step_bytes), LINE)
        if few:
            for start, to in rows:
                value = load_line(e, e.gep(start, complete * LINE), self.line, lanes, self.line.dtype, few)
                e.store(value, e.gep(to, complete * self.step_bytes), LINE)

    def _copy_panel_rest(self, e: Emitter, b: V) -> V:
        """Copy the last groups of a panel; zeros are behind the copy, whose address is returned."""
        nbytes, out = self.from_b.byte(self.rest, 0), e.gep(SCRATCH, self.rest_b_at)
        with e.loop(0, nbytes, LINE) as at:
            line = e.gep(b, e.bin("add", at.index, self.panel_bytes - nbytes))
            e.store(e.load(vector("i32", amx.SIDE), line, 4), e.gep(out, at.index), LINE)
        return out

    def sweep(self, e: Emitter, scope: Scope, a: V, b: V, tiles: tuple[V, V], i0: V, panel: V, vectors: int, tail: int) -> None:
        """One panel: see Product._sweep."""
        product, p = self.product, self.plan
        b = b if p.stage_b else step(e, b, panel, self.panel_bytes)
        rest_b = self._copy_panel_rest(e, b) if self.rest else b
        share = self.step * -(-self.from_b.byte(1, 0) // self.tiles) if p.ahead and not product.cut else 0
        with e.loop(0, self.steps, self.depth) as part, e.loop(*tiles) as at:
            done, tile = part.index, e.bin("sub", at.index, tiles[0])
            count = e.intrinsic("smin", e.bin("sub", e.i64(self.steps), done), e.i64(self.depth))
            kept, last = e.cmp("ne", done, e.i64(0)), e.cmp("eq", e.bin("add", done, count), e.i64(self.steps))
            sums = step(e, e.gep(SCRATCH, self.sums_at), self._place(e, tiles, tile, panel), self.sums_bytes)
            row = product.first_row(e, at.index)
            first = self._start(e, at.index, row)
            start = step(e, a, tile, self.tile_bytes) if p.tiled else self.groups.at(e, a, first)
            at_b = self.from_b.at(e, b, e.bin("mul", done, e.i64(self.step)))
            depth = e.bin("mul", count, e.i64(self.step))
            places = [start if self.levels else step(e, start, done, self.step_bytes), at_b, sums, depth, kept]
            if self.levels:
                places.append(e.bin("mul", done, e.i64(self.step)))
            if share:  # each tile of a panel prefetches its share of the next
                before = e.bin("add", e.bin("mul", done, e.i64(self.tiles)), e.bin("mul", tile, count))
                places.append(step(e, e.gep(b, self.panel_bytes), before, share))
            places += (last, rest_b) if self.rest else ()
            pending = Pending.read(e, e.gep(SCRATCH, self.pending_at))
            for height, here in self._heights(e, at.index):
                with e.when(here):
                    self._multiply(e, places, pending, product.outside(scope, i0), height, vectors, tail, share)
            sums = step(e, sums, e.bin("sub", row, first), 4 * vectors * p.lanes)
            finished = e.select(last, product.height(e, at.index), e.i64(0))
            after = Pending(sums, row, finished, e.bin("mul", panel, e.i64(p.columns)))
            after.write(e, e.gep(SCRATCH, self.pending_at))
            if not self.beside:
                self.finish(e, scope, i0, vectors, tail)

    def finish(self, e: Emitter, scope: Scope, i0: V, vectors: int, tail: int) -> None:
        """Run the epilogue that is pending."""
        pending = Pending.read(e, e.gep(SCRATCH, self.pending_at))
        with e.when(e.cmp("sgt", pending.count, e.i64(0))):
            self._epilogue(e, pending, e.i64(0), pending.count, self.product.outside(scope, i0), vectors, tail)
        e.store(e.i64(0), e.gep(SCRATCH, self.pending_at + 16), 8)

    def _place(self, e: Emitter, tiles: tuple[V, V], tile: V, panel: V) -> V:
        """Where the sums of a tile are kept: not where those of the tile before are."""
        have = e.bin("sub", tiles[1], tiles[0])
        turn = e.bin("and", e.bin("add", e.bin("mul", panel, have), tile), e.i64(1))
        return e.select(e.cmp("eq", have, e.i64(1)), turn, tile) if self.parts > 1 else turn

    def _start(self, e: Emitter, tile: V, row: V) -> V:
        """The row that a tile is computed from; `row`: its first."""
        p = self.plan
        if p.tiled or p.tall == (p.in_segment or p.row_tiles):
            return row
        tile = divided(e, tile, p.in_segment)[0] if p.segment else tile
        return e.bin("sub", row, e.convert("zext", e.cmp("sge", tile, e.i64(p.tall)), "i64"))

    def _heights(self, e: Emitter, tile: V) -> list[tuple[int, V]]:
        """(rows, whether a tile is computed as so many rows)."""
        if not self.product.cut:
            return [(self.plan.rows, V("true", "i1"))]
        low = e.cmp("ule", self.product.height(e, tile), e.i64(amx.SIDE))
        return [(amx.SIDE, low), (2 * amx.SIDE, e.bin("xor", low, V("true", "i1")))]

    def _multiply(
        self, e: Emitter, places: Sequence[V], pending: Pending, outside: Sequence[V],
        height: int, vectors: int, tail: int, share: int,
    ) -> None:  # fmt: skip
        """Multiply one part of a tile, with the pending epilogue beside it."""

        def body(e: Emitter, *values: V) -> None:
            (a, b, sums, k, kept, *ahead), waiting = values[: len(places)], Pending(*values[len(places) : len(places) + 4])
            first = ahead.pop(0) if self.levels else None
            ahead, rest = (ahead[:-2], ahead[-2:]) if self.rest else (ahead, ())
            steps, own = e.bin("udiv", k, e.i64(self.step)), values[len(places) + 4 :]
            each = e.bin("udiv", e.bin("sub", e.bin("add", waiting.count, steps), 1), steps)
            each = e.i64(self.rows_beside) if self.rows_beside else each

            def beside(at: V) -> None:
                low = e.bin("mul", e.bin("udiv", at, e.i64(self.step)), each)
                left = e.bin("sub", waiting.count, low)
                rows = each if self.even else e.intrinsic("smin", each, left)
                with e.when(e.cmp("sgt", left, e.i64(0))):
                    self._epilogue(e, waiting, low, rows, own, vectors, tail, inside=not self.heavy)

            amx.blocks_function(
                e, a, b, sums, self.steps * self.step if self.keep else k, kept if self.parts > 1 else None, *ahead, rows=height,
                vectors=vectors, group=self.plan.group, from_a=self.groups, from_b=self.from_b, step_a=self.step_bytes,
                share=share, streamed=self.streamed, keep=self.keep * self.step, beside=beside if self.beside else None,
                first=first, step=self.step, rest=rest,
            )  # fmt: skip

        self.product.call(e, f"blocks_{height}x{vectors}_{tail}", body, *places, *pending, *outside)

    def _epilogue(
        self, e: Emitter, pending: Pending, low: V, rows: V, outside: Sequence[V], vectors: int, tail: int, inside: bool = False
    ) -> None:
        """The epilogue of `rows` pending rows from `low` on; `inside`: not as a function."""
        line = step(e, pending.sums, low, 4 * vectors * self.plan.lanes)
        self.product.finish(e, outside, line, e.bin("add", pending.row, low), rows, pending.column, vectors, tail, inside)
