"""The base of all products, independent of their tiles: tasks over grid points, blocks of rows and groups of panels; computed
operands; the epilogue of finished sums, and the statements that run per finished row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from rlx.backends.cpu.abi import KEPT, Rendered
from rlx.backends.cpu.kernels.module import ARGS, SCRATCH, STATUS, TASK, Module, argument_pointers, divided, share, step
from rlx.backends.cpu.kernels.tile import LINE, lane_mask
from rlx.backends.cpu.kernels.tiles import Plan, kept_locals, past_caches, results_in_lines
from rlx.backends.cpu.loops import emit_statements, hoist, weight
from rlx.backends.cpu.scope import Beside, Scope, expr, limit_of
from rlx.host.emit import Emitter, V, stored, vector
from rlx.host.processor import fetches_ahead
from rlx.ir.nest import substitute

from rlx.ir.kernel import (  # isort: skip
    Alu, Buffer, Computed, Const, Contract, Expr, Kernel, Load, Local, Loop, Operand, Stmt, Store, Var, coefficient, k,
)  # fmt: skip
from rlx.ir.kernel import walk as parts_of
from rlx.ir.target import Target

BESIDE = 4  # bytes of the first panel that are fetched for each element of a that is computed or rounded: a line for each vector
HEAVY = 12  # weight of an epilogue
FAR = 4 << 20  # bytes of a buffer that the caches do not keep from one kernel to the next


class Product(Module):
    """A kernel whose body is one Contract, tiled according to `plan`. A subclass stages rows of a and multiplies panels."""

    def __init__(self, kernel: Kernel, contract: Contract, target: Target, plan: Plan) -> None:
        super().__init__()
        self.kernel, self.c, self.plan, self.acc = kernel, contract, plan, contract.acc.dtype
        self.vector_bytes, self.features = target.vector_bytes, target.features
        self.kept = kept_locals(kernel, contract)
        self.limited = any(x.var is contract.i for x in kernel.limits)
        blocks = -(-plan.row_tiles // max(1, plan.blocks)) * plan.rows
        self.block_rows = blocks if self.limited else plan.block_rows
        self.local_at: Mapping[Local, int] = {}
        self.far = {} if plan.matrix else _far(contract, plan)
        self.lines = results_in_lines(kernel, contract, plan.columns) if plan.matrix else frozenset()
        self.streams = frozenset(b for b in self.lines if past_caches(b, target))
        if not self.streams and (contract.rows or reads_rows(contract) or is_heavy(contract)):
            self.lines = self.streams  # their time is not that of stores
        self.streamed = 0  # Rendered.streamed
        if plan.tasks == plan.groups and fetches_ahead(self.features):  # not among blocks of rows or grid points
            self.streamed = _streamed(kernel, contract)
        shared = plan.tasks == plan.groups > 1 and contract.count is None and not plan.matrix  # all tasks have the same rows
        self.keeps = KEPT if shared and self.stages_once else 0
        self.fresh: V | None = None  # whether this task stages rows of a; None: each does
        self.cut: tuple[V, V, V] | None = None  # first row, height of the high tiles and their number: of a block cut at run time

    def reserve_locals(self) -> None:
        sizes = {x: (self.block_rows if x in self.kept else 1) * x.size * x.dtype.itemsize for x in self.kernel.locals}
        self.local_at = {x: self.reserve(nbytes) for x, nbytes in sizes.items()}

    # -- supplied by a subclass

    panel_bytes = 0  # of b, if its panels are streamed
    stages_once = False  # whether rows of a that `staging` is around stay in scratch for the thread's next tasks

    def _begin(self, e: Emitter) -> None:
        """Emitted before the grid points of a task."""

    def _end(self, e: Emitter) -> None:
        """Emitted after the grid points of a task."""

    def _staged_a(self, e: Emitter, scope: Scope, a: V, i0: V, i1: V, stop: V, tiles: tuple[V, V]) -> V:
        """Prepare rows i0 to i1 of a for `tiles`; only rows before `stop` are needed. Returns the address of row 0."""
        raise AssertionError("abstract")

    def _sweep(self, e: Emitter, scope: Scope, a: V, b: V, tiles: tuple[V, V], i0: V, panel: V, vectors: int, tail: int) -> None:
        """One panel: the task's row tiles, of a block that starts at row i0."""
        raise AssertionError("abstract")

    def _swept(self, e: Emitter, scope: Scope, i0: V, vectors: int, tail: int) -> None:
        """Emitted after panels of that size."""

    # -- tasks and grid points

    def written(self, symbol: str) -> Rendered:
        e, p = Emitter(self.features), self.plan
        if p.tasks:  # 0: no rows or no columns, so nothing to compute
            task = TASK
            if self.keeps:
                self.fresh, task = e.cmp("slt", TASK, KEPT), e.bin("and", TASK, KEPT - 1)
            group, rest = divided(e, task, p.groups)
            block, batch_group = divided(e, rest, p.blocks)
            pointers: dict[Buffer | Local, V] = {**argument_pointers(e, self.kernel.buffers)}
            pointers |= {x: e.gep(SCRATCH, at) for x, at in self.local_at.items()}
            scope = Scope(e, pointers, STATUS, vector_bytes=self.vector_bytes)
            limits = {v: limit_of(v, n, self.kernel, scope) for v, n in self.kernel.grid}
            last = limit_of(self.c.i, self.c.m, self.kernel, scope)
            tiles = share(e, block, self._row_tiles(e, last), p.blocks) if self.c.count is None else None
            panels = share(e, group, p.panels, p.groups)
            start, stop = share(e, batch_group, p.batch, p.batch_groups)
            self._begin(e)
            with e.loop(start, stop, nonempty=True) as at, ExitStack() as inside:
                point, scope = at.index, scope.child()
                for var, extent in reversed(self.kernel.grid):
                    place, point = divided(e, point, extent)
                    scope.bind(var, place)
                    if limit := limits[var]:
                        inside.enter_context(e.when(e.cmp("slt", place, limit)))
                if tiles is None:
                    self._ragged_point(e, scope, panels)
                else:
                    if self.limited:
                        inside.enter_context(e.when(e.cmp("slt", *tiles)))
                    self._point(e, scope, tiles, panels, last)
            self._end(e)
        return replace(self.rendered(e, symbol, p.tasks), streamed=self.streamed, keeps=self.keeps)

    @contextmanager
    def staging(self, e: Emitter, scope: Scope) -> Iterator[Scope]:
        """Around the code that stages rows of a, which a thread runs once for all of its tasks if they share the rows."""
        if self.fresh is None:
            yield scope
            return
        with e.when(self.fresh):
            yield scope.child()

    def _point(self, e: Emitter, scope: Scope, tiles: tuple[V, V], panels: tuple[V, V], limit: V | None) -> None:
        """One grid point: the task's rows and panels of one pair of matrices. Results of rows from `limit` on are not needed."""
        c = self.c
        a, b = (self._start(e, scope, o) for o in (c.a, c.b))
        i0, i1 = (self.first_row(e, t) for t in tiles)
        stop = e.intrinsic("smin", i1, limit) if isinstance(c.a, Computed) and limit is not None else i1
        self._block(e, scope, a, b, tiles, panels, (i0, i1, stop))
        if c.rows:
            self.call(e, "rows", self._finished, i1, *self.outside(scope, i0))

    def _finished(self, e: Emitter, i1: V, args: V, scratch: V, status: V, i0: V, *point: V) -> None:
        """The statements for finished rows."""
        scope = self.within(e, args, scratch, status, *point)
        hoist(self.c.rows, scope)
        with e.loop(i0, i1) as row:
            emit_statements(self.c.rows, self._at_row(e, scope, i0, row.index))

    def _ragged_point(self, e: Emitter, scope: Scope, panels: tuple[V, V]) -> None:
        """One grid point with a number of rows of its own (Contract.count), in blocks of tiles of nearly equal height."""
        c, rows = self.c, self.plan.rows
        assert c.count is not None and not c.rows
        count = expr(c.count, scope)
        with e.loop(0, count, self.block_rows) as block:
            inside = scope.child()
            a, b = (self._start(e, inside, o) for o in (c.a, c.b))
            i0 = block.index
            i1 = e.intrinsic("smin", e.bin("add", i0, self.block_rows), count)
            have = e.bin("sub", i1, i0)
            tiles = e.bin("udiv", e.bin("add", have, rows - 1), rows)
            height = e.bin("udiv", e.bin("sub", e.bin("add", have, tiles), 1), tiles)
            high = e.bin("sub", have, e.bin("mul", tiles, e.bin("sub", height, 1)))
            self.cut = i0, height, high
            self._block(e, inside, a, b, (e.i64(0), tiles), panels, (i0, i1, i1))
            self.cut = None

    def _block(self, e: Emitter, scope: Scope, a: V, b: V, tiles: tuple[V, V], panels: tuple[V, V], rows: tuple[V, V, V]) -> None:
        """The task's panels of a block of rows: the first, the last, and that from which on none is needed."""
        c, p, i0 = self.c, self.plan, rows[0]
        if self.streamed:
            during = c.a.column if isinstance(c.a, Computed) else None
            scope.beside = Beside(during, step(e, b, panels[0], self.panel_bytes), BESIDE)
        a = self._staged_a(e, scope, a, *rows, tiles)
        operands = e, scope, a, b, tiles, i0
        whole, odd = divmod(c.n, p.columns)
        if whole:
            with e.loop(panels[0], e.intrinsic("smin", panels[1], e.i64(whole))) as panel:
                self._sweep(*operands, panel.index, p.vectors, 0)
            self._swept(e, scope, i0, p.vectors, 0)
        if odd:
            with e.when(e.cmp("eq", panels[1], e.i64(p.panels))):
                self._sweep(*operands, e.i64(whole), -(-odd // p.lanes), odd % p.lanes)
                self._swept(e, scope, i0, -(-odd // p.lanes), odd % p.lanes)

    def _row_tiles(self, e: Emitter, limit: V | None) -> V | int:
        """The number of tiles that hold the rows before the limit."""
        p = self.plan
        if limit is None:
            return p.row_tiles
        if p.segment:
            limit, whole = divided(e, limit, p.segment)
            whole = e.bin("mul", whole, p.in_segment)
        tall, low = e.intrinsic("smin", limit, e.i64(p.tall * p.rows)), max(1, p.rows - 1)
        tiles = e.bin("udiv", e.bin("add", tall, p.rows - 1), p.rows)
        tiles = e.bin("add", tiles, e.bin("udiv", e.bin("add", e.bin("sub", limit, tall), low - 1), low))
        return e.bin("add", whole, tiles) if p.segment else tiles

    def first_row(self, e: Emitter, tile: V) -> V:
        """Plan.first_row, at run time."""
        if self.cut:
            i0, height, high = self.cut
            low = e.bin("mul", tile, e.bin("sub", height, 1))
            return e.bin("add", e.bin("add", i0, low), e.intrinsic("smin", tile, high))
        tile, segments = divided(e, tile, self.plan.in_segment) if self.plan.segment else (tile, None)
        tall = e.intrinsic("smin", tile, e.i64(self.plan.tall))
        row = e.bin("add", e.bin("mul", tile, e.i64(self.plan.rows - 1)), tall)
        return row if segments is None else e.bin("add", row, e.bin("mul", segments, self.plan.segment))

    def heights(self, e: Emitter, tile: V) -> list[tuple[int, V]]:
        """(rows, whether the tile has this height) for each height that occurs."""
        p = self.plan
        if self.cut:
            found = self.height(e, tile)
            return [(rows, e.cmp("eq", found, e.i64(rows))) for rows in range(1, p.rows + 1)]
        tile = divided(e, tile, p.in_segment)[0] if p.segment else tile
        tall, low = (e.cmp(order, tile, e.i64(p.tall)) for order in ("slt", "sge"))
        return [(p.rows, tall), (p.rows - 1, low)][: 1 + (p.tall < (p.in_segment or p.row_tiles))]

    def height(self, e: Emitter, tile: V, tall: V | None = None) -> V:
        """The rows of a tile. `tall`: whether it is one of the high ones, if that is known."""
        if self.cut:
            return e.select(e.cmp("slt", tile, self.cut[2]), self.cut[1], e.bin("sub", self.cut[1], 1))
        p = self.plan
        tile = divided(e, tile, p.in_segment)[0] if p.segment and tall is None else tile
        return e.select(tall or e.cmp("slt", tile, e.i64(p.tall)), e.i64(p.rows), e.i64(p.rows - 1))

    def _start(self, e: Emitter, scope: Scope, o: Operand | Computed) -> V:
        """The address of the operand's element (0, 0); for a computed operand, any address."""
        if isinstance(o, Computed):
            return SCRATCH
        return step(e, scope.pointers[o.buffer], expr(o.offset, scope), o.buffer.dtype.itemsize)

    def outside(self, scope: Scope, i0: V) -> tuple[V, ...]:
        """The values that a function needs to run the epilogue."""
        return ARGS, SCRATCH, STATUS, i0, *(expr(var, scope) for var, _ in self.kernel.grid)

    def within(self, e: Emitter, args: V, scratch: V, status: V, *point: V) -> Scope:
        """The scope of a grid point in a function that has these values of `outside`."""
        pointers: dict[Buffer | Local, V] = {**argument_pointers(e, self.kernel.buffers, args)}
        pointers |= {x: e.gep(scratch, at) for x, at in self.local_at.items()}
        bindings = {var: at for (var, _), at in zip(self.kernel.grid, point)}
        return Scope(e, pointers, status, bindings, vector_bytes=self.vector_bytes)

    def finish(
        self, e: Emitter, outside: Sequence[V], sums: V, first: V, rows: V, column: V, vectors: int, tail: int,
        inside: bool = False,
    ) -> None:  # fmt: skip
        """The epilogue for `rows` rows from `first`, columns from `column`, in a function or `inside` of this one. `outside`: see
        there."""
        columns, pitch = self.columns(vectors, tail), vectors * self.plan.lanes
        (stmts, sizes), any_width = self.sized() if self.around else (self.c.epilogue, {}), self.around and not tail

        def body(e: Emitter, sums: V, first: V, rows: V, column: V, args: V, scratch: V, status: V, i0: V, *more: V) -> None:
            scope, more = self.within(e, args, scratch, status, *more), more[len(self.kernel.grid) :]
            for var, value in zip(sizes.values(), more):
                scope.bind(var, value)
            width = (more[-1], more[-1]) if any_width else (columns, pitch)
            self.finish_rows(e, scope, stmts, sums, i0, first, rows, column, *width)

        values = sums, first, rows, column, *outside, *map(e.i64, (*sizes, columns) if any_width else sizes)
        if inside:
            body(e, *values)
        else:
            self.call(e, "finish" if any_width else f"finish_{vectors}_{tail}", body, *values)

    def columns(self, vectors: int, tail: int) -> int:
        """The columns of so many vectors, of which the last one has `tail`; 0: all of its lanes."""
        return (vectors - (tail > 0)) * self.plan.lanes + tail

    def sized(self) -> tuple[tuple[Stmt, ...], dict[int, Var]]:
        """The epilogue with variables for the numbers that a row is multiplied by: products of other sizes have the same code."""
        c, sizes, memo = self.c, dict[int, Var](), dict[int, Expr]()
        for x in parts_of(c.epilogue):
            if isinstance(x, Alu) and x.op == "mul" and x.args[0] is c.i and isinstance(n := x.args[1], Const):
                memo[id(x)] = k.mul(c.i, sizes.setdefault(int(n.value), Var("size")))
        return substitute(c.epilogue, {}, memo), sizes

    def finish_rows(
        self, e: Emitter, scope: Scope, epilogue: tuple[Stmt, ...], sums: V, i0: V, first: V, count: V, j0: V,
        columns: int | V, pitch: int | V,
    ) -> None:  # fmt: skip
        """The statements of the epilogue for `count` rows from `first`, `columns` from j0; the sums of consecutive rows are
        `pitch` apart. A number of columns that is known at run time only is whole vectors."""
        c, lanes, size = self.c, self.plan.lanes, self.acc.itemsize
        lines = self.lines if columns == self.plan.columns else frozenset()
        wide = max([lanes, *(LINE // b.dtype.itemsize for b in lines)])
        hoist(epilogue, scope)
        with e.loop(0, count, nonempty=True) as rows:
            at_row = self._at_row(e, scope, i0, e.bin("add", first, rows.index))
            at_row.far, at_row.streams = self.far, self.streams & lines
            hoist(epilogue, at_row)
            line = e.gep(sums, e.bin("mul", rows.index, e.bin("mul", e.i64(pitch), size)))

            def summed(column: V) -> V:
                return e.load(vector(stored(self.acc), wide), step(e, line, column, size), size)

            few = self.plan.matrix > 0  # two vectors at most
            emit_epilogue(epilogue, at_row, c.acc, c.j, summed, columns, wide, j0, unroll=few)

    def _at_row(self, e: Emitter, scope: Scope, i0: V, row: V) -> Scope:
        """The scope of one row of the block that starts at i0. Per-row locals refer to this row's part."""
        inside = e.bin("sub", row, i0)
        parts: dict[Buffer | Local, V] = {x: step(e, scope.pointers[x], inside, x.size * x.dtype.itemsize) for x in self.kept}
        return scope.child({self.c.i: row}, pointers=parts)


def emit_epilogue(
    stmts: tuple[Stmt, ...], scope: Scope, acc: Var, j: Var, element: Callable[[V], V], columns: int | V, lanes: int, j0: V,
    unroll: bool = False,
) -> None:  # fmt: skip
    """The statements for `columns` elements of a row, from j0 on, in vectors; the last one may be masked if the number is known.
    `element`: the vector from a column (relative to j0) on."""
    e, tail = scope.e, 0 if isinstance(columns, V) else columns % lanes
    whole = columns if isinstance(columns, V) else columns - tail
    stmts, runs = _in_runs(stmts, j, lanes)

    def vectors(column: V, valid: int) -> None:
        value = element(column)
        mask = lane_mask(lanes, valid) if valid else None
        base = e.bin("add", j0, column)
        known = {acc: value, **{run: e.bin("udiv", base, n) for n, run in runs.items()}}
        emit_statements(stmts, scope.child(known, vector=j, base=base, lanes=lanes, mask=mask))

    if unroll and isinstance(whole, int):
        for column in range(0, whole, lanes):
            vectors(e.i64(column), 0)
    elif whole:
        with e.loop(0, whole, lanes, nonempty=True) as at:
            vectors(at.index, 0)
    if tail:
        vectors(e.i64(whole), tail)


def _in_runs(stmts: tuple[Stmt, ...], j: Var, lanes: int) -> tuple[tuple[Stmt, ...], dict[int, Var]]:
    """The statements with a variable for j div n, by n, where n is whole vectors: it is one number for each of them."""
    runs, memo = dict[int, Var](), dict[int, Expr]()
    for x in parts_of(stmts):
        if isinstance(x, Alu) and x.op in ("div", "rem") and x.args[0] is j and isinstance(n := x.args[1], Const):
            if int(n.value) % lanes == 0:
                run = runs.setdefault(int(n.value), Var("run"))
                memo[id(x)] = run if x.op == "div" else k.sub(j, k.mul(run, int(n.value)))
    return (substitute(stmts, {}, memo) if memo else stmts), runs


def _far(c: Contract, plan: Plan) -> dict[Buffer | Local, int]:
    """Buffers of the epilogue that come from memory, and how far the same columns of the next tile's rows are, in bytes: the
    processor itself prefetches along rows, of which a panel has a part."""
    seen = [x for x in parts_of(c.epilogue) if isinstance(x, (Load, Store)) and x.buffer.size * x.buffer.dtype.itemsize >= FAR]
    steps = {x.buffer: coefficient(x.index, c.i) for x in seen if coefficient(x.index, c.j) == 1}
    return {b: plan.rows * stride * b.dtype.itemsize for b, stride in steps.items() if stride}


def is_heavy(c: Contract) -> bool:
    """Whether the epilogue takes as long as the products of a shallow tile of the matrix unit."""
    return weight(c.epilogue) >= HEAVY


def reads_rows(c: Contract) -> bool:
    """Whether the epilogue reads other values for each row: the unit would wait for them."""
    return any(isinstance(x, Load) and coefficient(x.index, c.i) != 0 for x in parts_of(c.epilogue))


def _streamed(kernel: Kernel, c: Contract) -> int:
    """Rendered.streamed of a product whose tasks are ranges of panels."""
    b = c.b
    whole = isinstance(b, Operand) and (b.panel or b.blocks) and isinstance(b.offset, Const) and not b.offset.value
    return 1 + kernel.buffers.index(b.buffer) if whole and c.count is None else 0  # type: ignore[union-attr]


def row_statements(a: Computed, line: Local, depth: int) -> tuple[Stmt, ...]:
    """Statements that compute a row of a computed left operand into `line`."""
    return (*a.before, Loop(a.column, depth, (*a.body, stored_to(line, a)), vector=True))


def stored_to(line: Local, o: Computed) -> Store:
    """The store of one element of a computed operand, rounded to the operand's dtype."""
    value: Expr = o.value
    if line.dtype != o.dtype:
        value = k.cast(k.cast(value, o.dtype), line.dtype)
    return Store(line, o.column, value)
