"""Attention by multiply-adds on vectors of f32, in two forms.

Each block of query rows is transposed once, so that a vector runs along rows ("wide"): keys are broadcast, and no step crosses
lanes. With few query rows (decoding) a vector runs along the head dimension instead ("narrow"), and the query heads that share a
key head are processed together as rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from rlx.backends.cpu.kernels import attention_parts as parts
from rlx.backends.cpu.kernels.attention_items import PART_KEY_BLOCK, Attention, Tensor
from rlx.backends.cpu.kernels.attention_parts import F32, NEAR_KEYS, Mask
from rlx.backends.cpu.kernels.module import SCRATCH, step
from rlx.backends.cpu.kernels.tile import LINE, Layout, Tile, stage_rows_function, tile_function, transpose_function
from rlx.host.emit import Emitter, V
from rlx.host.processor import fetches_ahead
from rlx.ir.dtype import f32
from rlx.ir.kernel import Kernel, Native
from rlx.ir.target import Target

KEY_BLOCK = 128  # keys per block, wide: the scores of 32 rows take 16 KB, half of an L1 cache
NARROW_KEY_BLOCK = 512
FETCHED_KEY_BLOCK = 128  # the values of one block and the keys of the next wait in the L2 cache
NARROW_ROWS = 8  # at most this many query rows of a head: vectors run along the head
SHARED_ROWS = 8  # at most this many rows are formed from the query heads of a key head
TURN = 8  # side of the transposed squares; 16 would be as fast and cost 10 ms more to compile
FEW_ROWS = 128  # from this many rows on, a half-empty last block does not justify lower blocks


class VectorAttention(Attention):
    def __init__(self, kernel: Kernel, native: Native, target: Target, tiling: Mapping[str, int]) -> None:
        super().__init__(kernel, native, target, tiling)
        self.narrow = self.rows <= NARROW_ROWS and self.k.strides[3] == 1 and self.q.strides[3] == 1
        fits = [n for n in range(1, self.group + 1) if self.group % n == 0 and n * self.rows <= SHARED_ROWS]
        self.shared = max(fits, default=1) if self.narrow else 1
        half_empty = 0 < self.rows % (2 * self.lanes) <= self.lanes  # the last block would be, with blocks of two vectors
        usual = 1 if half_empty and self.rows < FEW_ROWS else 2
        self.vectors = usual if self.narrow else tiling.get("vectors", usual)
        self.tall = self.shared * self.rows if self.narrow else self.vectors * self.lanes  # rows of a block
        self.blocks = 1 if self.narrow else -(-self.rows // self.tall)
        held = (self.registers - 16) // -(-self.size // self.lanes)  # narrow: rows that stay in registers
        self.height = min(self.tall, held or self.lanes, self.lanes)  # narrow: rows multiplied by a few keys at a time
        self.held = held > 0
        most = min((self.registers - 1 - self.vectors) // self.vectors, 16 // self.vectors)
        most = self.lanes // max(1, self.height) if self.narrow else most
        self.key_tile = min(self.keys, most)
        self.fetches = self.narrow and self.v.strides[3] == 1 and fetches_ahead(target.features)
        usual = FETCHED_KEY_BLOCK if self.fetches else NARROW_KEY_BLOCK if self.narrow else KEY_BLOCK
        self.key_block = PART_KEY_BLOCK if self.parts > 1 else usual
        self.staged = not self.narrow and self.k.dtype != f32  # 16-bit keys are converted to f32 once per block of rows
        self.once = self.keys <= self.key_block and not self.narrow and self.parts == 1  # one block: nothing is carried
        self.cut, self.ahead = not self.narrow, self.ahead and not self.narrow
        self.order = 0 if self.narrow else self.dots_apart
        self._lay_out_scratch()

    def _lay_out_scratch(self) -> None:
        """Scores and mask have a margin on both sides, since a tile that would pass the last key starts earlier."""
        padded, pitch = (-(-x // self.lanes) * self.lanes for x in (self.size, self.width))
        margin = max(self.lanes, self.key_tile)
        with_margins = self.key_block + 2 * margin
        self.query = Layout(f32, padded) if self.narrow else Layout(f32, 1, self.tall)
        self.scores = Layout(f32, with_margins) if self.narrow else Layout(f32, 1, self.tall)
        self.sums = Layout(f32, pitch)
        turned = self.m is not None and self.m.strides[2] and not self.narrow
        query_at = self.reserve(self.tall * padded * F32)
        score_at = self.reserve(self.tall * with_margins * F32) + self.scores.byte(0, margin)
        mask_at = self.reserve(self.tall * with_margins * F32 if turned else 0) + self.scores.byte(0, margin)
        near = Layout(f32, padded), Layout(f32, pitch)
        self.near_k, self.near_v = near if self.staged else (self.k.layout, self.v.layout)
        self.staged_at = [self.reserve(x.byte(self.key_block + margin, 0) if self.staged else 0) for x in near]
        self.sums_at = self.reserve(self.lanes * self.lanes * F32 if self.narrow else 0)
        self.places = query_at, score_at, mask_at, self.reserve(3 * self.tall * F32), self.reserve(self.tall * pitch * F32)

    @property
    def dots_apart(self) -> int:
        """Wide: the number of partial sums of a score, which hide the latency of an addition."""
        sums = self.key_tile * self.vectors
        return 1 if sums >= 8 else 2 if sums >= 4 else 4

    def _block(self, e: Emitter, q: V, k: V, v: V, m: V, row0: V, rows: V, end: V, part: V) -> tuple[V, V, V]:
        query, scores, mask, stats, sums = (e.gep(SCRATCH, at) for at in self.places)
        totals, factors = (e.gep(stats, n * self.tall * F32) for n in (1, 2))
        if self.narrow:
            with e.loop(0, self.shared) as head:
                start, out = self.q.head(e, q, head.index), step(e, query, head.index, self.query.byte(self.rows, 0))
                stage_rows_function(e, start, out, rows, self.size, self.q.layout, self.query, self.lanes)
        else:
            self._turned(e, q, query, rows, e.i64(0), e.i64(self.size), self.size, self.q, self.scale)
        if not self.once:
            self._cleared(e, stats, totals, sums)
        low, high, holes = self._seen_keys(e, m, row0, rows, end)
        with self._key_blocks(e, low, high, part) as (key0, stop):
            keys = e.bin("sub", stop, key0)
            near_k, near_v = self._staged(e, k, v, key0, stop, end) if self.staged else (k, v)
            self._scored(e, near_k, v, query, scores, key0, stop, end)
            if self.cap and not self.narrow:
                capped = partial(parts.cap_wide_function, vectors=self.vectors, lanes=self.lanes, cap=self.cap)
                self.call(e, "cap", capped, scores, keys)
            product = scores, self.near_v.at(e, near_v, key0), sums, factors, keys
            if self.narrow:
                self._softmax_narrow(e, m, scores, stats, keys, key0, row0)
                careful, after = self._own_mask.kind in ("band", "keep"), None
                if self.fetches:
                    following = stop if self.parts == 1 else e.bin("add", key0, self.parts * self.key_block)
                    more = e.cmp("slt", following, high)  # keys that no row sees are not read
                    after = e.select(more, *(self.k.layout.at(e, x, row) for x, row in ((k, following), (self.upcoming, low))))
                self._products(e, *product, rows=e.i64(self.tall), careful=careful, after=after)
            else:
                hidden = self._masked(e, m, mask, scores, key0, keys, row0, rows, holes)
                softmax = partial(parts.softmax_wide_function, rows=self.tall, first=self.once)
                self.call(e, "softmax", softmax, scores, stats, keys)
                self._weighted(e, *product, rows=rows, hidden=hidden)
        return stats, totals, sums

    def _turned(
        self, e: Emitter, start: V, out: V, rows: V, first: V, stop: V, columns: int, t: Tensor, scale: float = 1.0
    ) -> None:
        """out[column][row] = start[row, column] * scale"""
        shape = {"height": self.tall, "columns": columns, "side": min(self.lanes, TURN)}
        body = partial(transpose_function, **shape, source=t.layout, to=Layout(f32, self.tall), scale=scale)
        self.call(e, f"turn{t.argument}", body, start, out, rows, first, stop)

    @property
    def _own_mask(self) -> Mask:
        """The mask to apply in narrow form: none if the loop covers only the band of a single row."""
        return Mask("none") if self.mask.kind == "band" and self.rows == 1 else self.mask

    def _staged(self, e: Emitter, k: V, v: V, key0: V, stop: V, end: V) -> tuple[V, V]:
        """Copy keys and values from key0 (or the first that `_scored` may start at) to `stop` as f32. Returns the addresses that
        key 0 would have."""
        first = e.intrinsic("smin", key0, e.intrinsic("smax", e.bin("sub", end, self.key_tile), e.i64(0)))
        out = []
        for name, base, t, to, columns, at in zip(
            "kv", (k, v), (self.k, self.v), (self.near_k, self.near_v), (self.size, self.width), self.staged_at
        ):
            body = partial(stage_rows_function, columns=columns, source=t.layout, to=to, lanes=self.lanes)
            near = e.gep(SCRATCH, at)
            self.call(e, f"stage_{name}", body, t.layout.at(e, base, first), near, e.bin("sub", stop, first))
            out.append(step(e, near, e.bin("sub", e.i64(0), first), to.byte(1, 0)))
        return out[0], out[1]

    def _scored(self, e: Emitter, k: V, v: V, query: V, scores: V, key0: V, stop: V, end: V) -> None:
        """Scores of keys key0 to stop, tile by tile. A tile that would pass the end starts earlier, but not before key 0. The
        keys' values may be fetched meanwhile."""
        have, source = self.key_tile, self.near_k
        latest = e.intrinsic("smax", e.bin("sub", end, have), e.i64(0))
        shape = {"height": self.height, "count": have, "columns": self.size, "lanes": self.lanes, "held": self.held}
        calls = -(-self.tall // self.height)  # with the same keys; each fetches a part of their values
        part = -(-self.v.layout.byte(0, self.width) // (calls * LINE)) * LINE
        beside = (self.v.layout, part) if self.fetches else None
        dots = partial(parts.dots_function, source=source, rows=self.query, to=self.scores, beside=beside, **shape)
        t = Tile(have, self.vectors, self.lanes, self.dots_apart, 0, f32, self.tall)
        tile = partial(tile_function, k=self.size, t=t, from_a=source, from_b=Layout(f32, self.tall))
        with e.loop(key0, stop, have, nonempty=True) as at:
            first = e.intrinsic("smin", at.index, latest)
            here, out = source.at(e, k, first), self.scores.at(e, scores, 0, e.bin("sub", first, key0))
            if self.narrow:
                with e.loop(0, self.tall, self.height) as row:
                    start = e.intrinsic("smin", row.index, e.i64(self.tall - self.height))
                    own = [self.query.at(e, query, start), e.gep(SCRATCH, self.sums_at), self.scores.at(e, out, start)]
                    if beside:
                        call = e.bin("udiv", row.index, self.height)
                        own.append(step(e, self.v.layout.at(e, v, first), call, part))
                    self.call(e, "dots", dots, here, *own)
            else:
                self.call(e, "tile", tile, here, query, out)

    def _masked(self, e: Emitter, m: V, mask: V, scores: V, key0: V, keys: V, row0: V, rows: V, holes: V) -> V | None:
        """Mask the scores of a block. Returns whether some keys may be hidden though their values are read; None: no key is."""
        if self.mask.kind == "none":
            return None
        hidden, source = holes, None
        if self.m is not None and self.m.strides[2]:
            start, stop = self.m.layout.at(e, m, 0), e.bin("add", key0, keys)
            self._turned(e, start, mask, rows, key0, stop, self.keys, self.m)
            source = Layout(f32, self.tall)
        elif self.m is not None:  # the same mask for all rows
            mask, source = self.m.layout.at(e, m, 0, key0), Layout(self.m.dtype, self.m.strides[3], 0)
        if self.mask.kind == "band":
            hidden = e.cmp("sgt", e.bin("add", key0, keys), e.bin("add", row0, 1))
        if self.mask.window:
            whole = e.bin("sub", e.bin("add", row0, rows), self.mask.window)
            hidden = e.bin("or", hidden, e.cmp("slt", key0, whole))
        body = partial(parts.mask_wide_function, m=self.mask, source=source, vectors=self.vectors, lanes=self.lanes)
        with e.when(hidden):
            self.call(e, "mask", body, scores, mask, keys, key0, row0)
        return None if self.mask.kind == "add" else hidden

    def _softmax_narrow(self, e: Emitter, m: V, scores: V, stats: V, keys: V, key0: V, row0: V) -> None:
        """Turn the scores of every row into weights."""
        source, softmax = self.m.layout if self.m else None, parts.softmax_narrow_function
        how = {"lanes": self.lanes, "scale": self.scale, "cap": self.cap, "rows": self.tall}
        body = partial(softmax, m=self._own_mask, source=source, **how)
        with e.loop(0, self.shared) as head, e.loop(0, self.rows) as row:
            at = e.bin("add", e.bin("mul", head.index, e.i64(self.rows)), row.index)
            mask = self.m.layout.at(e, self.m.head(e, m, head.index), row.index, key0) if self.m is not None else m
            own = self.scores.at(e, scores, at), mask, step(e, stats, at, F32)
            self.call(e, "softmax", body, *own, keys, key0, e.bin("add", row0, row.index))

    def _weighted(self, e: Emitter, scores: V, values: V, sums: V, factors: V, keys: V, rows: V, hidden: V | None) -> None:
        """Add the block's weighted values to the sums. Uses `careful` tiles if a hidden value may be NaN or infinite."""
        args = scores, values, sums, factors, keys, rows
        if hidden is None:
            self._products(e, *args, careful=False)
            return
        body = partial(parts.finite_function, source=self.near_v, columns=self.width, lanes=self.lanes)
        finite = self.call(e, "finite", body, values, keys)
        care = e.bin("and", hidden, e.bin("xor", finite, e.const("i1", True)))
        for careful, condition in ((True, care), (False, e.bin("xor", care, e.const("i1", True)))):
            with e.when(condition):
                self._products(e, *args, careful=careful)

    def _products(
        self, e: Emitter, scores: V, values: V, sums: V, factors: V, keys: V, rows: V, careful: bool, after: V | None = None
    ) -> None:
        """sums[rows] += weights[rows, keys] @ values[keys], in tiles. As many keys from `after` on are fetched meanwhile."""
        high, whole, column = min(self.tall, 8 if self.registers == 32 else 4), -(-self.width // self.lanes), 0
        if self.narrow:  # whole rows of values are read from memory once; further rows of weights find them in cache
            most = max(1, (self.registers - 2) // max(1, whole) - 1)
            high = max(n for n in range(1, most + 1) if self.tall % n == 0)
        elif careful:  # rare
            high = 2
        for vectors in _even_parts(whole, (self.registers - 2) // (high + 1)):
            tail = self.width % self.lanes if column + vectors * self.lanes > self.width else 0
            share, of = 0 if after is None or column else self.k.layout.byte(1, 0), self.k.layout.byte(0, self.size)
            fetched = (after,) if after is not None and share else ()  # not if all keys lie in one place
            near = NEAR_KEYS if fetched else 0
            t = Tile(high, vectors, self.lanes, 1, tail, f32, self.sums.row, careful, ahead=share, ahead_of=of, near=near)
            body = partial(tile_function, t=t, from_a=self.scores, from_b=self.near_v)
            with e.loop(0, rows, high, nonempty=True) as at:
                a, b = self.scores.at(e, scores, at.index), self.near_v.at(e, values, 0, column)
                before = () if self.once else (step(e, factors, at.index, F32),)
                out = self.sums.at(e, sums, at.index, column)
                name = f"product_{vectors}_{tail}_{careful:d}" + "_fetching" * len(fetched)
                self.call(e, name, body, a, b, out, keys, *before, *fetched)
            column += vectors * self.lanes


def _even_parts(count: int, most: int) -> list[int]:
    """Split `count` into the fewest parts of at most `most` each, as equal as possible."""
    parts_needed = -(-count // most)
    return [count // parts_needed + (x < count % parts_needed) for x in range(parts_needed)]
