"""Contractions: a Kernel whose body is one Contract, as LLVM IR.

A task owns a block of rows and a group of panels (see tiles.py) of some grid points. For each panel, each tile of rows is
multiplied into a small buffer of sums, which `finish` then takes through the epilogue; once all panels of a block are
done, its rows get the statements `rows`. The functions of a module, outermost first:

    symbol          task -> grid points -> panels; stages a, runs the rows
    sweep           one panel: stages b, then tile and finish for every tile of rows in the block
    tile            sums = a @ b for one register tile (tile.py)
    finish          the epilogue for one tile's sums
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.emit import ATTRIBUTES, Emitter, Rendered, V, stored, vector
from rlx.backends.cpu.kernels.tile import Layout, Tile, lane_mask, stage_panel_function, stage_rows_function, tile_function
from rlx.backends.cpu.kernels.tiles import plan
from rlx.backends.cpu.loops import emit_statements, hoist, weight
from rlx.backends.cpu.scope import Scope, expr
from rlx.ir.kernel import Buffer, Contract, Kernel, Local, Operand
from rlx.ir.target import Target

UNROLLED_EPILOGUE = 24  # operations up to which an epilogue is repeated for each vector of a tile instead of looped over


def render(kernel: Kernel, target: Target, symbol: str) -> Rendered:
    """A module for a kernel whose body is one Contract. Tasks, cuts and the order of every sum depend on the kernel and
    the target alone."""
    (contract,) = kernel.body
    assert isinstance(contract, Contract), f"kernel {kernel.name} is no contraction"
    return _Module(kernel, contract, target, symbol).rendered()


class _Module:
    """The functions of one contraction, each made when first called. Methods that take an Emitter write into it."""

    def __init__(self, kernel: Kernel, contract: Contract, target: Target, symbol: str) -> None:
        self.kernel, self.c, self.symbol = kernel, contract, symbol
        self.vector_bytes = target.vector_bytes
        self.plan = p = plan(kernel, contract, target)
        self.acc = contract.acc.dtype
        self.texts: dict[str, str] = {}
        self.declarations: dict[str, None] = {}
        a, b = contract.a, contract.b
        self.from_a = Layout(a.buffer.dtype, a.row_stride, a.col_stride)
        self.from_b = Layout(b.buffer.dtype, b.panel or b.row_stride, 1 if b.panel or contract.n == 1 else b.col_stride)
        pitch = -(-contract.k // p.lanes) * p.lanes
        self.a = Layout(self.acc, pitch, 1) if p.stage_a else self.from_a
        self.scratch_bytes = 0
        self.sums_at = self._reserve(p.rows * p.columns * self.acc.itemsize)
        self.a_at = self._reserve(p.block_rows * pitch * self.acc.itemsize if p.stage_a else 0)
        self.b_at = self._reserve(contract.k * p.columns * self.acc.itemsize if p.stage_b else 0)
        self.local_at = {x: self._reserve((p.block_rows if x.per_row else 1) * x.size * x.dtype.itemsize) for x in kernel.locals}
        self.context = [V("%args", "ptr"), V("%scratch", "ptr"), V("%status", "ptr")]  # then the grid's indices
        self.context += [V(f"%grid{x}", "i64") for x in range(len(kernel.grid))]

    def _reserve(self, nbytes: int) -> int:
        """Offset of fresh scratch, on cache lines of its own."""
        at = self.scratch_bytes
        self.scratch_bytes += -(-nbytes // 64) * 64
        return at

    def rendered(self) -> Rendered:
        entry = self._entry() if self.plan.tasks else _finished(Emitter())  # no rows or no columns: nothing to compute
        self.declarations |= entry.declarations
        text = entry.function(self.symbol, "ptr %args, i64 %task, ptr %scratch, ptr %status")
        module = "\n".join([*self.declarations, ATTRIBUTES, *self.texts.values(), text])
        return Rendered(self.symbol, module, self.plan.tasks, self.scratch_bytes)

    def _function(self, name: str, params: Sequence[V], make: Callable[[Emitter], None]) -> str:
        """The name of an internal function whose body `make` writes, made on first use."""
        if name not in self.texts:
            e = Emitter()
            make(e)
            self.declarations |= e.declarations
            self.texts[name] = _finished(e).function(name, ", ".join(map(str, params)), linkage="internal")
        return name

    # -- the task

    def _entry(self) -> Emitter:
        e, p = Emitter(), self.plan
        group, rest = _divmod(e, V("%task", "i64"), p.groups)
        block, batch_group = _divmod(e, rest, p.blocks)
        tiles = [_share(e, block, p.row_tiles, p.blocks, end) for end in (0, 1)]
        panels = [_share(e, group, p.panels, p.groups, end) for end in (0, 1)]
        points = [_share(e, batch_group, p.batch, p.batch_groups, end) for end in (0, 1)]
        with e.loop(points[0], points[1], nonempty=True) as point:
            self._point(e, point.index, tiles, panels)
        return _finished(e)

    def _point(self, e: Emitter, point: V, tiles: list[V], panels: list[V]) -> None:
        """One grid point: the task's rows and panels of one pair of matrices."""
        c, p = self.c, self.plan
        indices: list[V] = []
        for _, extent in reversed(self.kernel.grid):
            index, point = _divmod(e, point, extent)
            indices.insert(0, index)
        context = [*self.context[:3], *indices]
        i0, i1 = (self._first_row(e, t) for t in tiles)
        scope = self._scope(e, context)
        a, b = (_address(e, scope, o) for o in (c.a, c.b))
        if p.stage_a:
            a = self._staged_a(e, a, i0, i1)
        panel_bytes = c.b.panel * c.k * c.b.buffer.dtype.itemsize if c.b.panel else self.from_b.byte(0, p.columns)

        def sweep(panel: V, vectors: int, tail: int) -> None:
            args = [a, _step(e, b, panel, panel_bytes), *tiles, i0, e.bin("mul", panel, e.i64(p.columns))]
            e.call(self._sweep(vectors, tail), "void", *context, *args)

        whole, odd = divmod(c.n, p.columns)
        if whole:
            with e.loop(panels[0], e.intrinsic("smin", panels[1], e.i64(whole))) as panel:
                sweep(panel.index, p.vectors, 0)
        if odd:
            with e.when(e.cmp("eq", panels[1], e.i64(p.panels))):
                sweep(e.i64(whole), -(-odd // p.lanes), odd % p.lanes)
        if c.rows:
            hoist(c.rows, scope)
            with e.loop(i0, i1) as row:
                emit_statements(c.rows, self._at_row(e, scope, i0, row.index))

    def _staged_a(self, e: Emitter, a: V, i0: V, i1: V) -> V:
        """The block's rows of a, in the dtype of the sums; where row 0 would be."""
        params = V("%from", "ptr"), V("%to", "ptr"), V("%rows", "i64")
        stage = self._function(
            "stage_a", params, lambda e: stage_rows_function(e, *params, self.c.k, self.from_a, self.a, self.plan.lanes)
        )
        kept = e.gep(self.context[1], self.a_at)
        e.call(stage, "void", _step(e, a, i0, self.from_a.byte(1, 0)), kept, e.bin("sub", i1, i0))
        return _step(e, kept, i0, -self.a.byte(1, 0))

    def _first_row(self, e: Emitter, tile: V) -> V:
        """Plan.first_row, at run time."""
        p = self.plan
        if not p.tall:
            return e.bin("mul", tile, e.i64(p.rows))
        return e.bin("add", e.bin("mul", tile, e.i64(p.rows - 1)), e.intrinsic("smin", tile, e.i64(p.tall)))

    # -- one panel

    def _sweep(self, vectors: int, tail: int) -> str:
        """sweep(…, a, b, t0, t1, i0, j0): row tiles t0 to t1 of a block that starts at row i0, columns from j0."""
        a, b = V("%a", "ptr"), V("%b", "ptr")
        t0, t1, i0, j0 = (V(f"%{x}", "i64") for x in ("first_tile", "end_tile", "block_row", "column"))
        p = self.plan
        masked = 0 if self.c.b.panel else tail  # panels are padded
        tall = p.tall or p.row_tiles

        def make(e: Emitter) -> None:
            at_b, layout = b, self.from_b
            if p.stage_b:
                layout = Layout(self.acc, vectors * p.lanes, 1)
                at_b = self._staged_b(e, b, Tile(0, vectors, p.lanes, 1, masked, self.acc))
            sums = e.gep(self.context[1], self.sums_at)
            spans = [(p.rows, t0, e.intrinsic("smin", t1, e.i64(tall)))]
            if tall < p.row_tiles:
                spans.append((p.rows - 1, e.intrinsic("smax", t0, e.i64(tall)), t1))
            for height, start, stop in spans:
                t = Tile(height, vectors, p.lanes, p.unroll(height, vectors), 0 if p.stage_b else masked, self.acc)
                with e.loop(start, stop) as at:
                    row = self._first_row(e, at.index)
                    e.call(self._tile(t, layout), "void", _step(e, a, row, self.a.byte(1, 0)), at_b, sums)
                    e.call(self._finish(vectors, tail), "void", *self.context, sums, i0, row, e.i64(height), j0)

        return self._function(f"sweep_{vectors}_{tail}", [*self.context, a, b, t0, t1, i0, j0], make)

    def _tile(self, t: Tile, b: Layout) -> str:
        params = V("%a", "ptr"), V("%b", "ptr"), V("%sums", "ptr")
        name = f"tile_{t.rows}x{t.vectors}_{t.tail}"
        return self._function(name, params, lambda e: tile_function(e, *params, t, self.c.k, self.a, b))

    def _staged_b(self, e: Emitter, b: V, t: Tile) -> V:
        params = V("%from", "ptr"), V("%to", "ptr")
        stage = self._function(
            f"stage_b_{t.vectors}_{t.tail}",
            params,
            lambda e: stage_panel_function(e, *params, self.plan.stage_b, self.c.k, t, self.from_b),
        )
        kept = e.gep(self.context[1], self.b_at)
        e.call(stage, "void", b, kept)
        return kept

    # -- statements

    def _finish(self, vectors: int, tail: int) -> str:
        """finish(…, sums, i0, row, count, j0): the epilogue for `count` rows from `row`, columns from j0."""
        sums = V("%sums", "ptr")
        i0, first, count, j0 = (V(f"%{x}", "i64") for x in ("block_row", "row", "rows", "column"))
        c, lanes, size = self.c, self.plan.lanes, self.acc.itemsize
        whole = vectors - (tail > 0)

        def make(e: Emitter) -> None:
            scope = self._scope(e, self.context)
            hoist(c.epilogue, scope)
            with e.loop(0, count, nonempty=True) as rows:
                at_row = self._at_row(e, scope, i0, e.bin("add", first, rows.index))
                hoist(c.epilogue, at_row)
                line = _step(e, sums, rows.index, vectors * lanes * size)

                def epilogue(column: V, valid: int) -> None:
                    acc = e.load(vector(stored(self.acc), lanes), _step(e, line, column, size), size)
                    mask = lane_mask(lanes, valid) if valid else None
                    j = e.bin("add", j0, column)
                    emit_statements(c.epilogue, at_row.child({c.acc: acc}, vector=c.j, base=j, lanes=lanes, mask=mask))

                if weight(c.epilogue) <= UNROLLED_EPILOGUE:
                    for v in range(whole):
                        epilogue(e.i64(v * lanes), 0)
                elif whole:
                    with e.loop(0, whole * lanes, lanes) as columns:
                        epilogue(columns.index, 0)
                if tail:
                    epilogue(e.i64(whole * lanes), tail)

        return self._function(f"finish_{vectors}_{tail}", [*self.context, sums, i0, first, count, j0], make)

    def _scope(self, e: Emitter, context: Sequence[V]) -> Scope:
        """Statements at one grid point, outside of any row."""
        args, scratch, status, *indices = context
        pointers: dict[Buffer | Local, V] = {x: e.load("ptr", e.gep(args, 8 * n), 8) for n, x in enumerate(self.kernel.buffers)}
        pointers |= {x: e.gep(scratch, at) for x, at in self.local_at.items()}
        bindings = dict(zip((var for var, _ in self.kernel.grid), indices))
        return Scope(e, pointers, status, bindings, vector_bytes=self.vector_bytes)

    def _at_row(self, e: Emitter, scope: Scope, i0: V, row: V) -> Scope:
        """Statements at one row of the block that starts at i0: of a per-row local, this row's part."""
        inside = e.bin("sub", row, i0)
        kept = [x for x in self.local_at if x.per_row]
        parts: dict[Buffer | Local, V] = {x: _step(e, scope.pointers[x], inside, x.size * x.dtype.itemsize) for x in kept}
        return scope.child({self.c.i: row}, pointers=parts)


def _address(e: Emitter, scope: Scope, o: Operand) -> V:
    """Where an operand's matrix starts at one grid point."""
    return _step(e, scope.pointers[o.buffer], expr(o.offset, scope), o.buffer.dtype.itemsize)


def _finished(e: Emitter) -> Emitter:
    e.do("ret void")
    return e


def _step(e: Emitter, base: V, count: V, nbytes: int) -> V:
    """base + count * nbytes"""
    return e.gep(base, e.bin("mul", count, e.i64(nbytes))) if nbytes else base


def _divmod(e: Emitter, value: V, by: int) -> tuple[V, V]:
    """(value % by, value // by)"""
    if by == 1:
        return e.i64(0), value
    return e.bin("urem", value, e.i64(by)), e.bin("udiv", value, e.i64(by))


def _share(e: Emitter, index: V, items: int, parts: int, end: int) -> V:
    """Where part `index` of `items` cut into `parts` starts (end 0) or stops (end 1); parts differ by one item at most."""
    if parts == 1:
        return e.i64(items * end)
    index = e.bin("add", index, e.i64(end)) if end else index
    return e.bin("udiv", e.bin("mul", index, e.i64(items)), e.i64(parts))
