"""x @ dequantize(packed).T with weights in panels (rlx.ir.blocks.Panel): a Kernel whose body is one Contract.

With integer dot products (dots.py: VNNI with 512 bits, usdot, sdot), a task first rounds its rows of x to int8: in each run of
STEP elements to the nearest of 127 steps up to the largest magnitude. Products and sums of a group are then exact integers,
scaled and summed in f32. So the result differs from the exact one by at most sum over runs of max|x| / 254 * sum|w|, plus the
rounding of f32 sums. Runs whose largest magnitude is below TINY count as zeros. With few rows the panel is read in place, at
memory bandwidth; with more rows it is unpacked to scratch once per block of rows.

With AMX, products with many rows go to its matrix unit (quant_matrix.py), in bf16.

Without these, or if x has to keep its precision, chunks of a panel are converted to f32 in scratch, for the register tile of
contractions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from itertools import chain

from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.dots import dot_of
from rlx.backends.cpu.kernels import amx
from rlx.backends.cpu.kernels.module import SCRATCH, step
from rlx.backends.cpu.kernels.product import BESIDE, row_statements
from rlx.backends.cpu.kernels.quant_matrix import MatrixProduct
from rlx.backends.cpu.kernels.quant_panels import SCRATCH_BYTES, PanelProduct
from rlx.backends.cpu.kernels.tile import Layout, Tile, load_line, prefetch, stage_rows_function, tile_function
from rlx.backends.cpu.kernels.tiles import DEFAULT_TILING, distinct, other_tasks, registers_of
from rlx.backends.cpu.loops import emit_statements, hoist
from rlx.backends.cpu.scope import Scope
from rlx.backends.shared.packed import PANEL, STEP, claim, claim_segments, packs, panel
from rlx.host.emit import Emitter, V, vector
from rlx.ir.dtype import bf16, f32
from rlx.ir.graph import Node, Value
from rlx.ir.kernel import Computed, Contract, Kernel, Local, Operand
from rlx.ir.ops.quant import ProductAttrs, dequant_matmul
from rlx.ir.target import Target

SUMS = {16: 12, 4: 8}  # lanes -> most vectors of sums of a tile; as many integer sums, x and a panel's columns fit 32 registers
MOST_VECTORS = 4  # most vectors of columns that a tile of several rows takes
DIRECT_TILES = 2  # up to this many tiles read the panel in place; with more, it is unpacked to scratch first
MATRIX_ROWS = 32  # with fewer rows, unpacking a panel takes longer than multiplying it
TINY = 2.0**-100  # below it a reciprocal could overflow
CHUNK = 256  # elements of a panel converted to f32 at a time: 32 KB, an L1 cache
MAGIC = 0x4B400000  # bits of 1.5 * 2**23: adding a small float to it leaves the nearest integer in the low bits


def split(node: Node, target: Target) -> Value | None:
    """The product of x in bf16, if its kernel would round x to that: what computes x then stores it so, once."""
    (x, w), attrs = node.inputs, node.attrs
    assert isinstance(attrs, ProductAttrs)
    if x.dtype != f32 or attrs.exact or math.prod(x.shape.static[:-1]) < MATRIX_ROWS or not on_matrix(target):
        return None
    return dequant_matmul(x.astype(bf16), w, format=attrs.format, wide=True)  # type: ignore[return-value]


def on_matrix(target: Target) -> bool:
    """Whether the target has what quant_matrix.py uses."""
    return "avx512bf16" in target.features and amx.multiplies(target.features, 2)


def render(kernel: Kernel, target: Target, symbol: str, tiling: Mapping[str, int] = DEFAULT_TILING) -> Rendered:
    """A module for a kernel whose body is one Contract, whose right operand is quantised blocks in panels."""
    (contract,) = kernel.body
    assert isinstance(contract, Contract), f"kernel {kernel.name} is no contraction"
    return _made(kernel, contract, target, tiling).written(symbol)


def axes(kernel: Kernel, contract: Contract, target: Target) -> dict[str, tuple[int, ...]]:
    """Tuning parameters: `rows`, the most rows of a tile of integers; `tasks`, the number to aim for."""
    default = _made(kernel, contract, target, DEFAULT_TILING)
    rows = SUMS[default.lanes] // default.most if isinstance(default, _Integer) else 0
    own = {"rows": rows, "tasks": default.wanted}
    asked = {"rows": (5, 4, 3), "tasks": other_tasks(target.threads)}
    return distinct(own, asked, lambda tiling: _made(kernel, contract, target, tiling).plan) if contract.m else {}


def _made(kernel: Kernel, contract: Contract, target: Target, tiling: Mapping[str, int]) -> PanelProduct:
    assert isinstance(contract.b, Operand)
    if contract.b.exact:
        return _Float(kernel, contract, target, tiling)
    points = 1 if contract.count is None else math.prod(extent for _, extent in kernel.grid)  # that share the rows
    if contract.m >= MATRIX_ROWS * points and on_matrix(target):
        return MatrixProduct(kernel, contract, target, tiling)
    return (_Integer if dot_of(target, "u8 i8", side=1) else _Float)(kernel, contract, target, tiling)


class _Integer(PanelProduct):
    """The variant with x rounded to int8. `q`: its integers. `factors`: its scales, per run of STEP. `shifts`: minus the zero
    point times the sum of the integers, per group. `least`: minus the scaled sum of the integers, per run; multiplied by the
    mins."""

    stages_once = True

    def __init__(self, kernel: Kernel, c: Contract, target: Target, tiling: Mapping[str, int]) -> None:
        assert isinstance(c.b, Operand)
        p, turns = panel(c.b.blocks), c.k // STEP
        self.groups_of_turn = p.each(p.plain.scales) or 1
        row_bytes = c.k + 4 * turns * (1 + self.groups_of_turn + bool(p.plain.mins))
        dot = dot_of(target, "u8 i8", side=1)
        assert dot
        self.dot, self.most = dot, min(PANEL // dot.lanes, MOST_VECTORS)
        super().__init__(kernel, c, target, tiling, tiling.get("rows", SUMS[dot.lanes] // self.most), row_bytes)
        self.bytes_of_vector, self.turns = 4 * self.lanes, turns
        self.offset = 128 if dot.signed and p.plain.q.parts[0].bits == 8 else 0  # subtracted from elements, to make them signed
        self.zero = self.f.zero - self.offset
        tiles = self.plan.row_tiles if c.count is None else -(-c.m // (self.plan.batch * self.plan.rows))
        self.staged = tiles > DIRECT_TILES and p.plain.q.parts[0].bits < 8
        rows = self.block_rows
        self.pitches = self.k, 4 * turns, 4 * turns * self.groups_of_turn, 4 * turns
        used = True, True, self.f.zero, self.f.mins
        self.q_at, self.factors_at, self.shifts_at, self.least_at = (
            self.reserve(rows * pitch if here else 0) for pitch, here in zip(self.pitches, used)
        )
        self.sums_at = self.reserve(4 * PANEL * self.plan.rows)
        self.turn_bytes = STEP, 4, 4 * self.groups_of_turn, 4  # bytes per run of q, factors, shifts, least
        self.staged_bytes = STEP * PANEL, 4 * PANEL * self.groups_of_turn, 4 * PANEL  # bytes per run of elements, scales, mins
        keep = self.staged, self.staged, self.staged and self.f.mins
        self.words_at, self.scales_at, self.mins_at = (
            self.reserve(turns * n if here else 0) for n, here in zip(self.staged_bytes, keep)
        )
        self.row_at = self.reserve(4 * self.k if isinstance(c.a, Computed) else 0)
        self.reserve_locals()

    def _staged_a(self, e: Emitter, scope: Scope, a: V, i0: V, i1: V, stop: V, tiles: tuple[V, V]) -> V:
        with self.staging(e, scope) as inside:
            self._round(e, inside, a, i0, stop)
        return a

    def _round(self, e: Emitter, scope: Scope, a: V, i0: V, stop: V) -> None:
        """Round rows i0 to `stop` of x."""
        x, kept, statements = self.c.a, e.gep(SCRATCH, self.row_at), ()
        line = Local("line", f32, self.k)
        if isinstance(x, Computed):
            statements = row_statements(x, line, self.k)
            hoist(statements, scope)
        with e.loop(i0, stop) as row:
            if isinstance(x, Computed):
                emit_statements(statements, scope.child({x.row: row.index}, pointers={line: kept}))
                source = kept
            else:
                source = step(e, a, row.index, x.row_stride * x.dtype.itemsize)
            after = scope.beside and [e.gep(scope.beside.first, BESIDE * self.k)]  # what is in front: while the row was computed
            self.call(e, "rounded", self._rounded, source, *self._of_row(e, e.bin("sub", row.index, i0)), *(after or ()))

    def _rounded(self, e: Emitter, source: V, q: V, factors: V, shifts: V, least: V, beside: V | None = None) -> None:
        """Round one row of x. Memory from `beside` on, if given, is prefetched meanwhile."""
        line, lanes, ints = self.line, self.lanes, vector("i32", self.lanes)
        with e.loop(0, self.turns, nonempty=True) as turn:
            if beside:
                prefetch(e, [step(e, beside, turn.index, BESIDE * STEP)], BESIDE * STEP)
            at = step(e, source, turn.index, line.byte(0, STEP))
            x = [load_line(e, line.at(e, at, 0, n), line, lanes, f32) for n in range(0, STEP, lanes)]
            bits = [e.bin("and", e.convert("bitcast", v, "i32"), 0x7FFFFFFF) for v in x]
            peak = e.intrinsic("vector.reduce.umax", reduce(partial(e.intrinsic, "umax"), bits), returns="i32", suffix=(ints,))
            top = e.convert("bitcast", peak, "float")  # NaN is largest
            tiny = e.cmp("olt", top, TINY)
            factor = e.select(tiny, e.const("float", 0.0), e.bin("fmul", top, 1 / 127))
            by = e.splat(e.select(tiny, e.const("float", 0.0), e.bin("fdiv", e.const("float", 127.0), top)), lanes)
            e.store(factor, step(e, factors, turn.index, 4), 4)
            sums = []
            magic = e.op(x[0].ty, f"bitcast {e.const(ints, MAGIC)} to {x[0].ty}")
            for n, v in enumerate(x):
                near = e.convert("bitcast", e.bin("fadd", e.bin("fmul", v, by), magic), "i32")
                e.store(e.convert("trunc", near, "i8"), e.gep(step(e, q, turn.index, STEP), lanes * n), lanes)
                sums.append(e.bin("sub", near, e.const(ints, MAGIC)))
            each = len(sums) // self.groups_of_turn
            sums = [reduce(partial(e.bin, "add"), sums[n : n + each]) for n in range(0, len(sums), each)]
            totals = [e.intrinsic("vector.reduce.add", s, returns="i32", suffix=(ints,)) for s in sums]
            if self.zero:
                for n, total in enumerate(totals):
                    at = e.gep(step(e, shifts, turn.index, 4 * self.groups_of_turn), 4 * n)
                    e.store(e.bin("mul", total, -self.zero), at, 4)
            if self.f.mins:
                sum_of_x = e.bin("fmul", e.convert("sitofp", totals[0], "float"), factor)
                e.store(e.op("float", f"fneg {sum_of_x}"), step(e, least, turn.index, 4), 4)

    def _sweep(self, e: Emitter, scope: Scope, a: V, b: V, tiles: tuple[V, V], i0: V, panel: V, vectors: int, tail: int) -> None:
        sums = e.gep(SCRATCH, self.sums_at)
        source = [step(e, b, panel, self.panel_bytes)]
        if self.staged:
            unpacked = [e.gep(SCRATCH, at) for at in (self.words_at, self.scales_at, self.mins_at)]
            self.call(e, "unpacked", self._unpacked, *source, *unpacked)
            source = unpacked
        with e.loop(*tiles) as at:
            row = self.first_row(e, at.index)
            places = self._of_row(e, e.bin("sub", row, i0))
            for height, here in self.heights(e, at.index):
                with e.when(here):
                    self._tiles(e, height, sums, *places, *source)
            count, first = self.height(e, at.index), e.bin("mul", panel, e.i64(PANEL))
            self.finish_rows(e, scope.child(), self.c.epilogue, sums, i0, row, count, first, self.columns(vectors, tail), PANEL)

    def _of_row(self, e: Emitter, row: V) -> list[V]:
        """The addresses of q, factors, shifts and least for a row of the block."""
        places = self.q_at, self.factors_at, self.shifts_at, self.least_at
        return [step(e, e.gep(SCRATCH, at), row, pitch) for at, pitch in zip(places, self.pitches)]

    def _unpacked(self, e: Emitter, weights: V, words: V, scales: V, mins: V) -> None:
        """Unpack a panel into the layout that staged tiles read."""
        with self.each_turn(e, weights, self.k) as (index, here, numbers):
            factors, least = self.scales(e, here, numbers)
            found = self.words(e, here), factors, [least]
            for base, nbytes, lines in zip((words, scales, mins), self.staged_bytes, found):
                place = step(e, base, index, nbytes)
                for n, value in enumerate(chain.from_iterable(lines)):
                    e.store(value, e.gep(place, self.bytes_of_vector * n), self.bytes_of_vector)

    def _tiles(self, e: Emitter, rows: int, *args: V) -> None:
        """Tiles of so many rows for all columns of a panel."""
        width = self.vectors if rows == 1 else self.most
        for first in range(0, self.vectors, width):
            name = f"tile{rows}" + (f"_{first}" if width < self.vectors else "")
            self.call(e, name, partial(self._tile, rows=rows, across=range(first, first + width)), *args)

    def _tile(self, e: Emitter, sums: V, *places: V, rows: int, across: range) -> None:
        """sums[rows][PANEL] of the vectors `across`. `places`: q, factors, shifts, least of the first row; then the panel, or its
        staged copy."""
        ty, words_ty, size = vector("float", self.lanes), vector("i32", self.lanes), self.bytes_of_vector
        of_x, weights = list(places[:4]), list(places[4:])
        totals = [V("zeroinitializer", ty)] * (rows * len(across))
        if self.staged:

            def line(base: V, n: int, ty: str) -> list[V]:
                return [e.load(ty, e.gep(base, size * (self.vectors * n + v)), size) for v in across]

            with e.loop(0, self.turns, carried=[*of_x, *weights, *totals], nonempty=True) as loop:
                words, scales, mins = loop.carried[4:7]
                lines = (line(words, n, words_ty) for n in range(STEP // 4))
                factors = [line(scales, g, ty) for g in range(self.groups_of_turn)]
                least = line(mins, 0, ty) if self.f.mins else []
                found = self._turn(e, rows, loop.carried[:4], lines, factors, least, loop.carried[7:])
                loop.next = [e.gep(a, n) for a, n in zip(loop.carried[:7], (*self.turn_bytes, *self.staged_bytes))] + found
            totals = loop.results[7:]
        else:
            inner = self.f.block // STEP
            with e.loop(0, self.turns // inner, carried=[*of_x, *weights, *totals], nonempty=True) as loop:
                block = loop.carried[4]
                numbers = self.numbers(e, block, across)
                if not across.start:  # once, if a panel is read in parts; so are its turns
                    self.fetch(e, block, self.p.turns_at)
                with e.loop(0, inner, carried=[*loop.carried[:4], *loop.carried[5:]]) as turn:
                    here = self.at_turn(e, block, turn.index)
                    factors, least = self.scales(e, here, numbers, across)
                    lines = self.words(e, here, across)
                    lines = lines if across.start else self.fetching(e, here, lines)
                    found = self._turn(e, rows, turn.carried[:4], lines, factors, least, turn.carried[4:])
                    turn.next = [e.gep(a, n) for a, n in zip(turn.carried[:4], self.turn_bytes)] + found
                loop.next = [*turn.results[:4], e.gep(block, self.f.nbytes), *turn.results[4:]]
            totals = loop.results[5:]
        for n, total in enumerate(totals):
            r, v = divmod(n, len(across))
            e.store(total, e.gep(sums, size * (r * self.vectors + across[v])), size)

    def _turn(
        self, e: Emitter, rows: int, of_x: Sequence[V], words: Iterable[list[V]], scales: Sequence[list[V]],
        mins: Sequence[V], totals: Sequence[V],
    ) -> list[V]:  # fmt: skip
        """`totals` [rows][vectors] plus the products of one run of STEP elements."""
        q, factors, shifts, least = of_x
        totals, ints, width = list(totals), vector("i32", self.lanes), len(totals) // rows
        each = STEP // 4 // self.groups_of_turn

        def of_row(base: V, place: int, r: int, ty: str, offset: int = 0) -> V:
            return e.splat(e.load(ty, e.gep(base, r * self.pitches[place] + offset), 4), self.lanes)

        parts, held = list[V](), list[V]()
        by_lane = self.lanes == 4  # aarch64 multiplies by a lane of x; a load to all lanes would cost as much as a product
        for n, vectors in enumerate(words):
            group = n // each
            if n % each == 0:
                start = [of_row(shifts, 2, r, "i32", 4 * group) if self.zero else V("zeroinitializer", ints) for r in range(rows)]
                parts = [s for s in start for _ in vectors]
            weights = [self.dot.operand(e, e.bin("xor", w, -0x7F7F7F80) if self.offset else w) for w in vectors]
            if by_lane and n % self.lanes == 0:
                held = [e.load(ints, e.gep(q, r * self.pitches[0] + 4 * n), 4) for r in range(rows)]
            for r in range(rows):
                x = e.shuffle(held[r], [n % self.lanes] * self.lanes) if by_lane else of_row(q, 0, r, "i32", 4 * n)
                x = self.dot.operand(e, x)
                for v, w in enumerate(weights):
                    parts[r * width + v] = self.dot.add(e, parts[r * width + v], w, x)
            if (n + 1) % each == 0:
                for at, part in enumerate(parts):
                    r, v = divmod(at, width)
                    scale = e.bin("fmul", scales[group][v], of_row(factors, 1, r, "float"))
                    totals[at] = e.fma(e.convert("sitofp", part, "float"), scale, totals[at])
        for at in range(len(totals) if mins else 0):
            r, v = divmod(at, width)
            totals[at] = e.fma(mins[v], of_row(least, 3, r, "float"), totals[at])
        return totals


class _Float(PanelProduct):
    """The variant that converts weights to f32 one chunk at a time; x is copied to scratch as f32."""

    most_scratch = 4 * SCRATCH_BYTES  # weights are converted once per block of rows; of a block, a chunk is used at a time

    def __init__(self, kernel: Kernel, c: Contract, target: Target, tiling: Mapping[str, int]) -> None:
        self.stages_once = isinstance(c.a, Computed)
        registers = registers_of(target)
        vectors = PANEL * 4 // target.vector_bytes
        highest = min(8, max(1, (registers - 1 - vectors) // vectors))
        super().__init__(kernel, c, target, tiling, highest, 4 * (c.k + PANEL))
        self.chunk = max(self.f.block, min(CHUNK, self.k) // self.f.block * self.f.block)
        self.rows_of_x, self.sums = Layout(f32, self.k), Layout(f32, PANEL)
        self.rows_at = self.reserve(self.block_rows * self.k * 4)
        self.sums_at = self.reserve(self.block_rows * PANEL * 4)
        self.weights_at = self.reserve(self.chunk * PANEL * 4)
        self.ones_at = self.reserve(4 * self.plan.rows)
        self.reserve_locals()

    def _staged_a(self, e: Emitter, scope: Scope, a: V, i0: V, i1: V, stop: V, tiles: tuple[V, V]) -> V:
        for r in range(self.plan.rows):
            e.store(e.const("float", 1.0), e.gep(SCRATCH, self.ones_at + 4 * r), 4)
        x, kept = self.c.a, e.gep(SCRATCH, self.rows_at)
        if isinstance(x, Computed):
            self._computed_rows(e, scope, x, kept, i0, stop)
        else:
            source = Layout(x.dtype, x.row_stride, x.col_stride)
            stage_rows_function(e, source.at(e, a, i0), kept, e.bin("sub", i1, i0), self.k, source, self.rows_of_x, self.lanes)
        return kept

    def _computed_rows(self, e: Emitter, scope: Scope, x: Computed, to: V, i0: V, stop: V) -> None:
        """Compute rows i0 to `stop` of x."""
        line = Local("line", f32, self.k)
        statements = row_statements(x, line, self.k)
        with self.staging(e, scope) as inside:
            hoist(statements, inside)
            with e.loop(i0, stop) as row:
                at = self.rows_of_x.at(e, to, e.bin("sub", row.index, i0))
                emit_statements(statements, inside.child({x.row: row.index}, pointers={line: at}))

    def _sweep(self, e: Emitter, scope: Scope, a: V, b: V, tiles: tuple[V, V], i0: V, panel: V, vectors: int, tail: int) -> None:
        sums, chunk, ones = (e.gep(SCRATCH, at) for at in (self.sums_at, self.weights_at, self.ones_at))
        weights = step(e, b, panel, self.panel_bytes)
        whole, rest = divmod(self.k, self.chunk)
        block = tiles, i0
        self._chunk(e, weights, a, sums, chunk, None, block, min(self.chunk, self.k))
        blocks = self.chunk // self.f.block
        if whole > 1:
            with e.loop(1, whole) as at:
                place = step(e, weights, at.index, blocks * self.f.nbytes)
                self._chunk(e, place, step(e, a, at.index, 4 * self.chunk), sums, chunk, ones, block, self.chunk)
        if whole and rest:
            place = e.gep(weights, whole * blocks * self.f.nbytes)
            self._chunk(e, place, e.gep(a, 4 * whole * self.chunk), sums, chunk, ones, block, rest)
        count = e.bin("sub", self.first_row(e, tiles[1]), i0)
        columns, j0 = self.columns(vectors, tail), e.bin("mul", panel, e.i64(PANEL))
        self.finish_rows(e, scope.child(), self.c.epilogue, sums, i0, i0, count, j0, columns, PANEL)

    def _chunk(
        self, e: Emitter, weights: V, x: V, sums: V, chunk: V, ones: V | None, block: tuple[tuple[V, V], V], length: int
    ) -> None:
        """Compute the part of every row's sums from `length` elements. `ones`: add it to the earlier parts. `block`: its tiles
        and first row."""
        self.call(e, f"decoded{length}", partial(self._decoded, length=length), weights, chunk)
        tiles, i0 = block
        with e.loop(*tiles) as at:
            row = e.bin("sub", self.first_row(e, at.index), i0)
            places = self.rows_of_x.at(e, x, row), chunk, self.sums.at(e, sums, row)
            args = [*places, e.i64(length), *filter(None, [ones])]
            for rows, here in self.heights(e, at.index):
                t = Tile(rows, self.vectors, self.lanes, 1, 0, f32, PANEL)
                body = partial(tile_function, t=t, from_a=self.rows_of_x, from_b=self.sums)
                with e.when(here):
                    self.call(e, f"tile{rows}_{len(args)}", body, *args)

    def _decoded(self, e: Emitter, weights: V, to: V, *, length: int) -> None:
        """to[length][PANEL] = the next `length` elements of each row"""
        with self.each_turn(e, weights, length) as (index, here, numbers):
            scales, least = self.scales(e, here, numbers)
            line = step(e, to, index, STEP * PANEL * 4)
            for n, vectors in enumerate(self.words(e, here)):
                for i in range(4):
                    for v, dwords in enumerate(vectors):
                        q = e.bin("and", e.bin("lshr", dwords, 8 * i), 255)
                        value = e.convert("sitofp", e.bin("sub", q, self.f.zero), "float")
                        value = e.bin("fmul", value, scales[4 * n * len(scales) // STEP][v])
                        value = e.bin("fsub", value, least[v]) if least else value
                        e.store(value, e.gep(line, 4 * ((4 * n + i) * PANEL + v * self.lanes)), 4)


__all__ = ["axes", "claim", "claim_segments", "packs", "panel", "render", "split"]
