"""Attention of bf16 by instructions that sum products of pairs: on the matrix unit (AMX), or on vectors (AVX512-BF16).

A block of keys is packed once for a block of query rows: keys as panels of their transpose, values as pairs of rows. Both are
right operands as a contraction's weights are, so the tiles are those of contractions. `sub` query rows are then taken through
all steps: their scores go to a buffer that stays in the L1 cache, [row][key]; masks are applied there, and weights, rounded to
bf16, replace scores in place. Sums of weights, and of weighted values, are f32.

The sums of a row do not depend on the rows that are computed with it: blocks of keys begin at multiples of their size.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rlx.backends.cpu.dots import DOTS
from rlx.backends.cpu.kernels import amx
from rlx.backends.cpu.kernels.attention_items import Attention
from rlx.backends.cpu.kernels.attention_parts import F32, Mask, across_lines, finite_or_zero, highest, lanes_of, masked
from rlx.backends.cpu.kernels.attention_vectors import NARROW_ROWS
from rlx.backends.cpu.kernels.interleave import interleave_columns, interleave_rows
from rlx.backends.cpu.kernels.module import SCRATCH, step
from rlx.backends.cpu.kernels.tile import Layout, Tile, load_line, stage_rows_function, tile_function
from rlx.host.emit import Emitter, V, vector
from rlx.host.math import LOG2_E, polynomial, tanh
from rlx.ir.dtype import bf16, f32, u16, u32
from rlx.ir.kernel import Kernel, Native
from rlx.ir.target import Target

DOT = DOTS["x86.avx512bf16.dpbf16ps.512"]
FEATURES = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16"}
LANES = 16  # f32 in a vector; pairs of bf16
PANEL = 32  # keys of a panel; columns of values that a tile takes
DEPTH = 32  # elements of a row that one instruction of the matrix unit sums over
KEY_BLOCK = 256  # keys of a block: the scores of 32 rows take 32 KB
PAD = LANES  # behind a row of scores, so that rows are not a power of two apart, where loads wait for stores 4 KB away
SUB = 32  # rows that are taken through all steps together
MOST_SUBS = 8  # of these in a block of rows: sums of 256 rows with heads of 128 take 128 KB of the L2 cache
PACKING = 0.5  # time to pack a block of keys and values, in units of what `sub` rows need with them
TILE_ROWS = 8  # of a tile on vectors
TOGETHER = 2  # rows whose weights are computed together; with four it takes up to 1.16 times as long on a Xeon
CAREFUL_ROWS, CAREFUL_VECTORS = 2, 4  # of a tile that skips weights of zero
EXP2 = (0.07802454, 0.2260672, 0.69583349, 0.99992523)  # 2^x for 0 <= x < 1, relative error below 8e-5
FLOOR = "9"  # of vreduceps: subtract the floor, raise no exceptions


def in_pairs(native: Native, target: Target) -> bool:
    """Whether PairAttention computes this problem on this target. Else VectorAttention does."""
    q, k, v, *_ = native.inputs
    pairs = all(x.buffer.dtype == bf16 and (x.strides[-1] == 1 or x.dims[-1] == 1) for x in (q, k, v))
    return pairs and q.dims[2] > NARROW_ROWS and len(native.outputs) < 2 and set(target.features) >= FEATURES


class PairAttention(Attention):
    def __init__(self, kernel: Kernel, native: Native, target: Target, tiling: Mapping[str, int]) -> None:
        super().__init__(kernel, native, target, tiling)
        self.matrix = amx.multiplies(target.features, 2)
        self.sub = SUB if self.rows > SUB // 2 else SUB // 2
        self.tall = self.sub * self._subs(-(-self.rows // self.sub))
        self.blocks = -(-self.rows // self.tall)
        self.key_block = min(KEY_BLOCK, _padded(self.keys, PANEL))
        self.pitch = self.key_block + PAD
        self.once = self.keys <= self.key_block  # one block: nothing is carried
        self.depth, self.columns = _padded(self.size, DEPTH), _padded(self.width, LANES)
        self.sums = Layout(f32, self.columns)
        self.plain = self.scale > 0 and not self.cap and self.mask.kind != "add"  # the scale is applied with the exponential
        self.rate = (self.scale if self.plain else 1.0) * LOG2_E
        even = all(x % 2 == 0 for x in (*self.q.strides[:3], self.q.offset))
        self.direct = even and self.depth == self.size and self.rows % self.sub == 0  # no row of queries has to be copied
        self.query = Layout(u32, self.q.strides[2] // 2 if self.direct else self.depth // 2)
        self.config_at = self.reserve(amx.CONFIG_BYTES)
        query = self.reserve(0 if self.direct else self.tall * self.depth * 2)
        keys, values = (self.reserve(self.key_block * n * 2) for n in (self.depth, self.columns))
        scores, work = self.reserve(self.sub * self.pitch * F32), self.reserve(self.sub * (2 + LANES) * F32)
        stats, sums = self.reserve(2 * self.tall * F32), self.reserve(self.tall * self.columns * F32)
        products = sums if self.once else self.reserve(self.sub * self.columns * F32)
        self.places = query, keys, values, scores, work, products, stats, sums

    def _subs(self, most: int) -> int:
        """How many times `sub` rows are a block: many share the packed keys, few give every thread a block."""
        heads = self.batch * self.heads

        def turns(n: int) -> tuple[float, int]:
            return -(-heads * -(-most // n) // self.threads) * (n + PACKING), -n

        return min(range(1, min(most, MOST_SUBS) + 1), key=turns, default=1)

    def _begin(self, e: Emitter) -> None:
        if self.matrix:
            amx.configure(e, e.gep(SCRATCH, self.config_at), self.sub)

    def _end(self, e: Emitter) -> None:
        if self.matrix:
            amx.release(e)

    def _block(self, e: Emitter, q: V, k: V, v: V, m: V, row0: V, rows: V, end: V, part: V) -> tuple[V, V, V]:
        query, *_, stats, sums = (e.gep(SCRATCH, at) for at in self.places)
        totals = e.gep(stats, self.tall * F32)
        if self.direct:
            query = q
        else:
            near = {"source": Layout(u16, self.q.strides[2]), "to": Layout(u16, self.depth), "lanes": DEPTH}
            self.call(e, "query", partial(stage_rows_function, columns=self.size, **near), q, query, rows)
        if not self.once:
            self._cleared(e, stats, totals, sums)
        low, high, holes = self._seen_keys(e, m, row0, rows, end)
        with self._key_blocks(e, e.bin("and", low, -KEY_BLOCK), high, part) as (key0, stop):
            values = v, self._packed(e, k, v, key0, stop)
            with e.loop(0, rows, self.sub, nonempty=True) as at:
                here, first = e.intrinsic("smin", e.bin("sub", rows, at.index), e.i64(self.sub)), e.bin("add", row0, at.index)
                own = e.intrinsic("smin", stop, e.bin("add", first, here)) if self.mask.kind == "band" else stop
                seen = e.cmp("slt", key0, own)
                if self.mask.window:
                    seen = e.bin("and", seen, e.cmp("sgt", own, e.bin("sub", first, self.mask.window - 1)))
                with e.when(seen):
                    near = self.query.at(e, query, at.index)
                    self._rows(e, near, (at.index, here, first), key0, e.bin("sub", own, key0), m, holes, values)
        return stats, totals, sums

    def _packed(self, e: Emitter, k: V, v: V, key0: V, stop: V) -> V:
        """Pack keys key0 to `stop` and their values, up to a whole panel. Returns whether all values are finite."""
        keys, values = (e.gep(SCRATCH, at) for at in self.places[1:3])
        packs = partial(interleave_columns, k=self.size, source=Layout(u16, 1, self.k.strides[2]), group=2, to=Layout(u32, PANEL))
        with e.loop(key0, stop, PANEL, nonempty=True) as at:
            line, out = self.k.layout.at(e, k, at.index), step(e, keys, e.bin("sub", at.index, key0), self.depth * 2)
            have = e.intrinsic("smin", e.bin("sub", stop, at.index), e.i64(PANEL))
            self.call(e, "panel", packs, line, out, have)
        how = {"columns": self.width, "group": 2, "to": Layout(u32, self.columns), "check": self.mask.kind in ("band", "keep")}
        paired = partial(interleave_rows, source=Layout(u16, self.v.strides[2]), **how)
        return self.call(e, "pairs", paired, self.v.layout.at(e, v, key0), values, e.bin("sub", stop, key0))

    def _rows(self, e: Emitter, query: V, which: tuple[V, V, V], key0: V, keys: V, m: V, holes: V, values: tuple[V, V]) -> None:
        """All steps of a few rows with `keys` keys from key0 on. `which`: the first of these rows in the block, their number, and
        the key position of the first. `values`: their address in memory, and whether those of this block of keys are finite."""
        _, panels, pairs, scores, work, products, stats, sums = (e.gep(SCRATCH, at) for at in self.places)
        (row, rows, _), end = which, _panels(e, keys)
        stats, sums = step(e, stats, row, F32), self.sums.at(e, sums, row)
        out, tile = sums if self.once else products, {"height": self.sub, "matrix": self.matrix}
        scored = partial(scores_function, depth=self.depth // 2, source=self.query, pitch=self.pitch, **tile)
        self.call(e, "scores", scored, query, panels, scores, end)
        hidden = self._masked(e, m, scores, which, key0, keys, end, holes)
        how = {"rate": self.rate, "pitch": self.pitch, "sub": self.sub, "once": self.once}
        self.call(e, "tops", partial(tops_function, **how), scores, stats, work, end, rows)
        self.call(e, "weights", partial(weights_function, tall=self.tall, **how), scores, stats, work, end, rows)
        care = e.bin("and", hidden, e.bin("xor", values[1], e.const("i1", True)))
        weighted = partial(values_function, columns=self.columns, pitch=self.pitch, **tile)
        with e.when(e.bin("xor", care, e.const("i1", True))):
            self.call(e, "values", weighted, scores, pairs, out, end)
        if self.mask.kind in ("band", "keep"):
            careful = partial(careful_function, source=self.v.layout, to=self.sums, width=self.width, pitch=self.pitch)
            with e.when(care):
                self.call(e, "careful", careful, scores, self.v.layout.at(e, values[0], key0), out, keys, rows)
        if not self.once:
            self.call(e, "added", partial(added_function, columns=self.columns, sub=self.sub), products, work, sums, rows)

    def _masked(self, e: Emitter, m: V, scores: V, which: tuple[V, V, V], key0: V, keys: V, end: V, holes: V) -> V:
        """Mask the scores, also those past the last key; scale and cap them if they are not `plain`. Returns whether keys may be
        hidden though their values are read."""
        (row, rows, first), zero = which, e.i64(0)
        hidden, begin = e.const("i1", False), zero
        if self.mask.kind == "keep":
            hidden = holes
        if self.mask.kind == "band":
            hidden = e.cmp("sgt", e.bin("add", key0, keys), e.bin("add", first, 1))
            begin = zero if self.mask.window else e.intrinsic("smax", e.bin("sub", first, key0), zero)
        if self.mask.window:
            whole = e.bin("sub", e.bin("add", first, rows), self.mask.window)
            hidden = e.bin("or", hidden, e.cmp("slt", key0, whole))
        begin = e.bin("and", e.select(hidden, begin, keys), -LANES) if self.plain else zero
        source, place = None, m
        if self.m is not None:
            source, place = self.m.layout, self.m.layout.at(e, m, row, key0)
        how = {"scale": 1.0 if self.plain else self.scale, "cap": self.cap, "pitch": self.pitch}
        body = partial(mask_rows_function, m=self.mask, source=source, **how)
        with e.when(e.cmp("slt", begin, end)):
            self.call(e, "mask", body, scores, place, rows, first, key0, keys, begin, end)
        return hidden


def _padded(count: int, to: int) -> int:
    return -(-count // to) * to


def _panels(e: Emitter, keys: V) -> V:
    """`keys` rounded up to whole panels."""
    return e.bin("and", e.bin("add", keys, PANEL - 1), -PANEL)


# -- functions of the kernel. Scores are f32 [row][pitch]; weights are bf16 in the first half of each row ------------


def _product(
    e: Emitter, a: V, b: V, out: V, k: V | int, from_a: Layout, from_b: Layout,
    pitch: int, vectors: int, height: int, matrix: bool,
) -> None:  # fmt: skip
    """out[height][vectors * LANES] = a @ b over k pairs, a multiple of LANES."""
    if matrix:
        amx.blocks_function(e, a, b, out, k, rows=height, vectors=vectors, group=2, from_a=from_a, from_b=from_b, pitch=pitch)
        return
    t = Tile(TILE_ROWS, vectors, LANES, 1, 0, f32, pitch, dot=DOT)
    with e.loop(0, height, TILE_ROWS) as row:
        place = Layout(f32, pitch).at(e, out, row.index)
        tile_function(e, from_a.at(e, a, row.index), b, place, k, t=t, from_a=from_a, from_b=from_b)


def scores_function(
    e: Emitter, query: V, keys: V, out: V, end: V, *, depth: int, source: Layout, pitch: int, height: int, matrix: bool
) -> None:
    """out[height][end] = query[height, depth] @ keys, panel by panel; `depth` in pairs."""
    with e.loop(0, end, PANEL, nonempty=True) as at:
        panel, place = step(e, keys, at.index, 4 * depth), step(e, out, at.index, F32)
        _product(e, query, panel, place, depth, source, Layout(u32, PANEL), pitch, PANEL // LANES, height, matrix)


def values_function(
    e: Emitter, weights: V, values: V, out: V, end: V, *, columns: int, pitch: int, height: int, matrix: bool
) -> None:
    """out[height][columns] = weights[height, end] @ values[end, columns]."""
    a, b, pairs = Layout(u32, pitch), Layout(u32, columns), e.bin("lshr", end, 1)
    for c in range(0, columns, PANEL):
        vectors = min(PANEL, columns - c) // LANES
        _product(e, weights, b.at(e, values, 0, c), e.gep(out, c * F32), pairs, a, b, columns, vectors, height, matrix)


def careful_function(
    e: Emitter, weights: V, values: V, out: V, keys: V, rows: V, *, source: Layout, to: Layout, width: int, pitch: int
) -> None:
    """out[rows][width] = weights[rows, keys] @ values in memory, some of which are not finite: a weight of zero adds nothing."""
    a = Layout(bf16, 2 * pitch)
    with e.loop(0, rows, CAREFUL_ROWS, nonempty=True) as row:
        for c in range(0, width, CAREFUL_VECTORS * LANES):
            have = min(CAREFUL_VECTORS * LANES, width - c)
            t = Tile(CAREFUL_ROWS, -(-have // LANES), LANES, 1, have % LANES, f32, to.row, careful=True)
            at = a.at(e, weights, row.index), source.at(e, values, 0, c), to.at(e, out, row.index, c)
            tile_function(e, *at, keys, t=t, from_a=a, from_b=source)


def mask_rows_function(
    e: Emitter, scores: V, mask: V, rows: V, first: V, key0: V, keys: V, begin: V, end: V,
    *, m: Mask, source: Layout | None, scale: float, cap: float, pitch: int,
) -> None:  # fmt: skip
    """Scale, cap and mask the scores of columns `begin` to `end`; those of columns from `keys` on become -inf. `mask`: the mask's
    element of the first row and the key of column 0."""
    with e.loop(0, rows, nonempty=True) as row:
        line, position = Layout(f32, pitch).at(e, scores, row.index), lanes_of(e, e.bin("add", first, row.index), LANES)
        with e.loop(begin, end, LANES, nonempty=True) as at:
            place = step(e, line, at.index, F32)
            score = e.load(vector("float", LANES), place, F32)
            score = e.bin("fmul", score, scale) if scale != 1.0 else score
            score = e.bin("fmul", tanh(e, score), cap) if cap else score
            valid = e.cmp("slt", e.iota(LANES, "i32"), lanes_of(e, e.bin("sub", keys, at.index), LANES))
            key = e.bin("add", lanes_of(e, e.bin("add", key0, at.index), LANES), e.iota(LANES, "i32"))
            term = source and load_line(e, source.at(e, mask, row.index, at.index), source, LANES, f32, mask=valid)
            score = masked(e, m, score, key, position, term)
            e.store(e.select(valid, score, e.const(score.ty, -float("inf"))), place, F32)


def _exp2(e: Emitter, x: V) -> V:
    """2^x for x <= 0, and 0 for -inf; relative error below 8e-5, a thirtieth of the rounding to bf16."""
    every, keep = V("-1", "i16"), V("zeroinitializer", x.ty)
    part = e.external("llvm.x86.avx512.mask.reduce.ps.512", x.ty, x, V(FLOOR, "i32"), keep, every, V("4", "i32"))
    return e.external("llvm.x86.avx512.mask.scalef.ps.512", x.ty, polynomial(e, part, EXP2), x, keep, every, V("4", "i32"))


def tops_function(
    e: Emitter, scores: V, stats: V, work: V, end: V, rows: V, *, rate: float, pitch: int, sub: int, once: bool
) -> None:
    """Update the highest scores in `stats`. `work`: per row, the negated one in units of exponents (`rate` for 1), and the factor
    for what earlier blocks summed."""
    ty = vector("float", LANES)
    lowest = e.const(ty, -float("inf"))
    with e.loop(0, rows, LANES, nonempty=True) as row:
        line = Layout(f32, pitch).at(e, scores, row.index)
        with e.loop(0, end, LANES, carried=[lowest] * LANES, nonempty=True) as at:
            lines = [e.load(ty, Layout(f32, pitch).at(e, line, r, at.index), F32) for r in range(LANES)]
            at.next = [highest(e, score, found) for score, found in zip(lines, at.carried)]
        top = across_lines(e, at.results, partial(highest, e))
        here, near = step(e, stats, row.index, F32), step(e, work, row.index, F32)
        before = lowest if once else e.load(ty, here, F32)
        top = highest(e, top, before)
        shift = finite_or_zero(e, top)
        e.store(top, here, F32)
        e.store(e.bin("fmul", shift, -rate), near, F32)
        if not once:
            shrink = _exp2(e, e.bin("fmul", e.bin("fsub", before, shift), rate))
            e.store(shrink, e.gep(near, sub * F32), F32)


def weights_function(
    e: Emitter, scores: V, stats: V, work: V, end: V, rows: V, *, rate: float, pitch: int, sub: int, tall: int, once: bool
) -> None:
    """Replace scores by weights, and add those of each row to its sum in `stats`."""
    ty, pairs = vector("float", LANES), vector("bfloat", 2 * LANES)
    every, sums = Layout(f32, pitch), e.gep(work, 2 * sub * F32)
    with e.loop(0, rows, TOGETHER, nonempty=True) as row:
        line, near = every.at(e, scores, row.index), step(e, work, row.index, F32)
        shifts = [e.splat(e.load("float", e.gep(near, r * F32), F32), LANES) for r in range(TOGETHER)]
        with e.loop(0, end, 2 * LANES, carried=[e.const(ty, 0.0)] * TOGETHER, nonempty=True) as at:
            for r, total in enumerate(at.carried):
                place = every.at(e, line, r, at.index)
                scored = [e.load(ty, e.gep(place, n * LANES * F32), F32) for n in range(2)]
                low, high = (_exp2(e, e.fma(rate, x, shifts[r])) for x in scored)
                both = e.external("llvm.x86.avx512bf16.cvtne2ps2bf16.512", pairs, high, low)
                e.store(e.convert("bitcast", both, "i16"), step(e, every.at(e, line, r), at.index, 2), 2)
                at.next.append(e.bin("fadd", total, e.bin("fadd", low, high)))
        for r, total in enumerate(at.results):
            e.store(total, step(e, sums, e.bin("add", row.index, r), LANES * F32), F32)
    with e.loop(0, rows, LANES, nonempty=True) as row:
        lines = [e.load(ty, step(e, sums, e.bin("add", row.index, r), LANES * F32), F32) for r in range(LANES)]
        total = across_lines(e, lines, partial(e.bin, "fadd"))
        here = e.gep(step(e, stats, row.index, F32), tall * F32)
        if not once:
            total = e.fma(e.load(ty, here, F32), e.load(ty, e.gep(step(e, work, row.index, F32), sub * F32), F32), total)
        e.store(total, here, F32)


def added_function(e: Emitter, products: V, work: V, sums: V, rows: V, *, columns: int, sub: int) -> None:
    """sums[rows][columns] = sums * the rows' factors + products."""
    ty, layout = vector("float", LANES), Layout(f32, columns)
    with e.loop(0, rows, nonempty=True) as row:
        factor = e.splat(e.load("float", e.gep(step(e, work, row.index, F32), sub * F32), F32), LANES)
        old, new = (layout.at(e, x, row.index) for x in (sums, products))
        for c in range(0, columns, LANES):
            at = e.gep(old, c * F32)
            e.store(e.fma(e.load(ty, at, F32), factor, e.load(ty, e.gep(new, c * F32), F32)), at, F32)
