"""Quantised weights on the matrix unit (amx.py): x and the weights are rounded to bf16.

A task copies its rows of x as tiles: the blocks that the unit loads, step after step of k. Panels are unpacked in chunks of k,
into two buffers in turn: while the row tiles multiply one chunk, the vector ports fill the other. Sums are kept in scratch from
one chunk to the next.

A byte q of a panel becomes the f32 number 256 + q by one shift and one logical operation; one multiply-add takes off the 256,
the zero point and the least value. Its constants are exact, so that it rounds once. The bits of the sum are then rounded to bf16,
with ties away from zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from rlx.backends.cpu.kernels import amx
from rlx.backends.cpu.kernels.amx import BLOCK, SIDE, do
from rlx.backends.cpu.kernels.module import SCRATCH, divided, step
from rlx.backends.cpu.kernels.product import row_statements
from rlx.backends.cpu.kernels.quant_panels import PanelProduct
from rlx.backends.cpu.kernels.tile import Layout, load_line
from rlx.backends.cpu.loops import emit_statements, hoist
from rlx.backends.cpu.scope import Scope
from rlx.backends.shared.packed import PANEL, STEP
from rlx.host.emit import Emitter, V, vector
from rlx.ir.dtype import bf16, f32
from rlx.ir.kernel import Computed, Contract, Kernel, Local
from rlx.ir.target import Target

ROWS = 2 * SIDE  # of a tile
TURNS = 8  # of a chunk: two chunks, and what a tile reads of x meanwhile, fit the L1 cache
SHARES = 1, 2, 4, 8  # how many tiles may unpack a chunk together
ABOVE = 256  # added to q: its bits are then the highest eight of the mantissa
_BITS, _MASK = 0x43800000, 0x7F8000  # of 256 as f32; of q in 256 + q
_AT = 15  # the lowest bit of q in 256 + q


class MatrixProduct(PanelProduct):
    most_scratch = 1 << 20  # a panel is unpacked once per block of rows, which stay in the L2 cache
    tasks_per_thread = 1  # each copies its rows of x

    def __init__(self, kernel: Kernel, c: Contract, target: Target, tiling: Mapping[str, int]) -> None:
        super().__init__(kernel, c, target, tiling, ROWS, 2 * c.k + 4 * PANEL)
        self.inner = self.f.block // STEP  # turns of a block
        self.turns = max(self.inner, TURNS // self.inner * self.inner)
        self.chunks, self.rest = divmod(self.k // STEP, self.turns)
        p = self.plan
        tiles = -(-p.row_tiles // max(1, p.blocks))  # of a block, at most
        least = tiles if self.limited or c.count is not None else max(1, p.row_tiles // max(1, p.blocks))
        self.share = max(n for n in SHARES if n <= least and self.turns % n == 0)  # blocks of fewer tiles do one thing at a time
        self.chunk_bytes, self.tile_bytes, self.sums_bytes = 2 * BLOCK * self.turns, 2 * ROWS * self.k, 4 * ROWS * PANEL
        self.config_at = self.reserve(amx.CONFIG_BYTES)
        self.sums_at, self.tiles_at = self.reserve(self.sums_bytes * tiles), self.reserve(self.tile_bytes * tiles)
        self.chunks_at, self.now_at = self.reserve(2 * self.chunk_bytes), self.reserve(8)  # offset of the chunk that comes next
        self.line_at = self.reserve(2 * self.k if isinstance(c.a, Computed) else 0)
        self.reserve_locals()
        self.tiles = self.panels = (V("0", "i64"), V("0", "i64"))  # of the block

    def _begin(self, e: Emitter) -> None:
        amx.configure(e, e.gep(SCRATCH, self.config_at), ROWS)

    def _end(self, e: Emitter) -> None:
        amx.release(e)

    # -- rows of x

    def _block(self, e: Emitter, scope: Scope, a: V, b: V, tiles: tuple[V, V], panels: tuple[V, V], rows: tuple[V, V, V]) -> None:
        self.tiles, self.panels = tiles, panels
        e.store(e.i64(0), e.gep(SCRATCH, self.now_at), 8)
        if self.chunks:
            self._unpack(e, step(e, b, panels[0], self.panel_bytes), e.gep(SCRATCH, self.chunks_at), self.turns)
        super()._block(e, scope, a, b, tiles, panels, rows)

    def _staged_a(self, e: Emitter, scope: Scope, a: V, i0: V, i1: V, stop: V, tiles: tuple[V, V]) -> V:
        """[tile][step of k][row][32 bf16], for tiles of ROWS; those past the rows of x are undefined."""
        x, kept, line = self.c.a, e.gep(SCRATCH, self.tiles_at), e.gep(SCRATCH, self.line_at)
        local, source = Local("line", bf16, self.k), Layout(bf16, 0)
        statements = row_statements(x, local, self.k) if isinstance(x, Computed) else ()
        hoist(statements, scope)
        with e.loop(*tiles) as tile:
            first = self.first_row(e, tile.index)
            to = step(e, kept, e.bin("sub", tile.index, tiles[0]), self.tile_bytes)
            with e.loop(0, e.intrinsic("smin", self.height(e, tile.index), e.bin("sub", stop, first))) as row:
                index, at = e.bin("add", first, row.index), line
                if isinstance(x, Computed):
                    emit_statements(statements, scope.child({x.row: index}, pointers={local: line}))
                else:
                    source = Layout(x.dtype, x.row_stride, x.col_stride)
                    at = source.at(e, a, index)
                self.call(e, "moved", partial(self._moved, source=source), at, step(e, to, row.index, 64))
        return kept

    def _moved(self, e: Emitter, at: V, to: V, *, source: Layout) -> None:
        """Store a row of x in the blocks of a tile, as bf16. Subnormals become zeros, which is how the unit reads them."""
        with e.loop(0, self.k // STEP, nonempty=True) as turn:
            here, place = step(e, at, turn.index, source.byte(0, STEP)), step(e, to, turn.index, 2 * BLOCK)
            if whole := source.dtype == bf16 and source.column == 1:
                e.store(e.load(vector("i16", STEP), here, 2), place, 64)
            for n in range(0 if whole else 2):
                value = load_line(e, source.at(e, here, 0, SIDE * n), source, SIDE, f32)
                narrow = e.intrinsic("x86.avx512bf16.cvtneps2bf16.512", value, suffix=(), returns=vector("bfloat", SIDE))
                e.store(e.convert("bitcast", narrow, "i16"), e.gep(place, 32 * n), 32)

    # -- panels

    def _unpack(self, e: Emitter, weights: V, to: V, turns: int) -> None:
        def body(e: Emitter, weights: V, to: V) -> None:
            with e.loop(0, turns, nonempty=True) as turn:
                for _ in self._pieces(e, weights, to, turn.index):
                    pass

        self.call(e, f"unpacked{turns}", body, weights, to)

    def _pieces(self, e: Emitter, weights: V, to: V, turn: V) -> Iterator[None]:
        """to[turn][half of the panel][STEP / 2][SIDE pairs] = the weights of one turn of a chunk, in STEP / 4 pieces."""
        at, block = divided(e, turn, self.inner)
        start = step(e, weights, block, self.f.nbytes)
        here, line = self.at_turn(e, start, at), step(e, to, turn, 2 * BLOCK)
        self.fetch(e, here, -(-self.f.nbytes * STEP // self.f.block))  # with its share of a block's numbers
        numbers = [[e.select(e.cmp("uno", x, x), math.nan, x) for x in vectors] for vectors in self.numbers(e, start)]
        scales, least = self.scales(e, here, numbers)  # `pairs` rounds: all digits of another NaN would carry into the sign
        shifts = [offsets(e, s, least, self.f.zero) for s in scales]
        for n, vectors in enumerate(self.words(e, here)):
            group = 4 * n * len(scales) // STEP
            for v, dwords in enumerate(vectors):
                for half, value in enumerate(pairs(e, dwords, scales[group][v], shifts[group][v])):
                    e.store(value, e.gep(line, v * BLOCK + 64 * (2 * n + half)), 64)
            yield

    def _sweep(self, e: Emitter, scope: Scope, a: V, b: V, tiles: tuple[V, V], i0: V, panel: V, vectors: int, tail: int) -> None:
        chunks, cell, weights = e.gep(SCRATCH, self.chunks_at), e.gep(SCRATCH, self.now_at), step(e, b, panel, self.panel_bytes)
        chunk_of_panel = self.turns // self.inner * self.f.nbytes
        if self.chunks:
            with e.loop(0, self.chunks, nonempty=True) as chunk:
                now = e.load("i64", cell, 8)
                other = e.store(e.bin("xor", now, e.i64(self.chunk_bytes)), cell, 8)
                last = e.cmp("eq", chunk.index, e.i64(self.chunks - 1))
                after = step(e, weights, e.bin("add", chunk.index, 1), chunk_of_panel)
                after = e.select(last, e.gep(weights, self.panel_bytes), after)
                more = e.bin("or", e.bin("xor", last, True), e.cmp("slt", e.bin("add", panel, 1), self.panels[1]))
                x, kept = step(e, a, chunk.index, 2 * BLOCK * self.turns), e.cmp("sgt", chunk.index, e.i64(0))
                self._chunk(e, x, e.gep(chunks, now), kept, self.turns, (after, e.gep(chunks, other), more))
        if self.rest:
            now = e.gep(chunks, e.bin("xor", e.load("i64", cell, 8), e.i64(self.chunk_bytes)))
            self._unpack(e, e.gep(weights, self.chunks * chunk_of_panel), now, self.rest)
            x = e.gep(a, 2 * BLOCK * self.turns * self.chunks)
            self._chunk(e, x, now, e.const("i1", bool(self.chunks)), self.rest, None)
        with e.loop(*tiles) as at:
            sums = step(e, e.gep(SCRATCH, self.sums_at), e.bin("sub", at.index, tiles[0]), self.sums_bytes)
            rows, first = (self.first_row(e, at.index), self.height(e, at.index)), e.bin("mul", panel, e.i64(PANEL))
            self.finish_rows(e, scope.child(), self.c.epilogue, sums, i0, *rows, first, self.columns(vectors, tail), PANEL)

    def _chunk(self, e: Emitter, x: V, weights: V, kept: V, turns: int, following: tuple[V, V, V] | None) -> None:
        """The tiles of the block times one chunk. `following`: the next chunk's place in a panel, its buffer, and whether it is
        needed: the first tiles unpack it meanwhile. `kept`: the sums of earlier chunks are added."""
        first, stop = self.tiles
        number = e.bin("sub", stop, first)
        low = e.bin("and", e.cmp("eq", number, e.i64(1)), e.cmp("ule", self.height(e, first), e.i64(SIDE)))
        high, beside, share = e.bin("xor", low, True), e.const("i1", False), self.share
        if following:
            beside = e.bin("and", e.bin("and", following[2], high), e.cmp("sge", number, e.i64(share)))
        with e.loop(0, number, nonempty=True) as tile:
            sums = step(e, e.gep(SCRATCH, self.sums_at), tile.index, self.sums_bytes)
            args = step(e, x, tile.index, self.tile_bytes), weights, sums, kept
            unpacks = e.bin("and", beside, e.cmp("slt", tile.index, e.i64(share)))
            plain = e.bin("xor", unpacks, True)
            for rows, here in ((SIDE, low), (ROWS, high)):
                with e.when(e.bin("and", plain, here)):
                    self.call(e, f"multiply{rows}_{turns}", partial(self._multiply, rows=rows, turns=turns), *args)
            if following:
                with e.when(unpacks):
                    own = e.bin("mul", tile.index, turns // share), *following[:2]
                    self.call(e, "multiply_unpacking", partial(self._multiply, rows=ROWS, turns=turns, share=share), *args, *own)
        if following:
            after, buffer, more = following
            with e.when(e.bin("and", more, e.bin("xor", beside, True))):
                self._unpack(e, after, buffer, turns)

    def _multiply(self, e: Emitter, a: V, b: V, sums: V, kept: V, *unpacked: V, rows: int, turns: int, share: int = 1) -> None:
        """sums[rows][PANEL] = a[rows, k] @ b[k, PANEL] for a chunk. `unpacked`: a turn of the next chunk, where its panel has it,
        and its buffer: unpack turns / share turns from that one on, each during `share` steps."""
        above, line = range(-(-rows // SIDE)), e.i64(64)
        places = amx.begin_sums(e, sums, above, range(2), PANEL, kept)

        def multiplied(number: V) -> None:
            at_a, at_b = (step(e, x, number, 2 * BLOCK) for x in (a, b))
            for i in above:
                do(e, "tileloaddt164", amx.A[i], e.gep(at_a, i * BLOCK), line)
            for j in range(2):
                do(e, "tileloadd64", amx.B[j], e.gep(at_b, j * BLOCK), line)
                for i in above:
                    do(e, "tdpbf16ps", amx.SUMS[i][j], amx.A[i], amx.B[j])

        with e.loop(0, turns // share, nonempty=True) as loop:
            pieces = iter(list[None]())
            if unpacked:
                turn, weights, to = unpacked
                pieces = self._pieces(e, weights, to, e.bin("add", turn, loop.index))
            for s in range(share):
                multiplied(e.bin("add", e.bin("mul", loop.index, share), s))
                for _ in range(STEP // 4 // share):
                    next(pieces, None)
            for _ in pieces:
                pass
        for tile, place in places.items():
            do(e, "tilestored64", tile, place, e.i64(4 * PANEL))


def offsets(e: Emitter, scales: Sequence[V], least: Sequence[V], zero: int) -> list[V]:
    """-(256 + zero) * scale - least: what `pairs` adds to (256 + q) * scale."""
    out = [e.bin("fmul", s, -float(ABOVE + zero)) for s in scales]
    return [e.bin("fsub", x, y) for x, y in zip(out, least)] if least else out


def pairs(e: Emitter, dwords: V, scale: V, offset: V) -> tuple[V, V]:
    """The four elements in each dword as bf16: dwords with the first two, and with the others."""
    ty = vector("float", dwords.lanes)
    rounded: list[V] = []
    for i in range(4):
        left = _AT - 8 * i
        q = e.bin("shl", dwords, left) if left > 0 else e.bin("lshr", dwords, -left)
        q = e.bin("or", e.bin("and", q, _MASK), _BITS)
        value = e.fma(e.op(ty, f"bitcast {q} to {ty}"), scale, offset)
        rounded.append(e.bin("add", e.convert("bitcast", value, "i32"), 0x8000))
    first, second = (
        e.bin("or", e.bin("lshr", low, 16), e.bin("and", high, -0x10000)) for low, high in (rounded[:2], rounded[2:])
    )
    return first, second
