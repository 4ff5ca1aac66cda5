"""Fused attention: softmax(q k' * scale + mask) v without a matrix of scores in memory. A Kernel whose body is one Native.

Keys and values are read in place, one block of keys at a time. For a block of query rows, the highest score, the sum of weights
and the sums of weighted values are carried from block to block (the online softmax of Milakov and Gimelshein, 2018). Each block
of query rows is transposed once, so that a vector runs along rows ("wide"): keys are broadcast, and no step crosses lanes. With
few query rows (decoding) a vector runs along the head dimension instead ("narrow"), and the query heads that share a key head are
processed together as rows.

A row that sees no key gives zeros. A key hidden by a boolean or positional mask contributes nothing, whatever its bytes.

With a position for the first query, k and v may be a partly filled cache. The range of keys is then computed at run time, so the
time depends on the number of keys seen, not on the capacity. A single query row then needs no mask.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.kernels import attention_parts as parts
from rlx.backends.cpu.kernels.attention_parts import F32, Mask
from rlx.backends.cpu.kernels.module import ARGS, SCRATCH, STATUS, TASK, Module, axis_limits, divided, outside, share, step
from rlx.backends.cpu.kernels.product import emit_epilogue
from rlx.backends.cpu.kernels.tile import Layout, Tile, stage_rows_function, tile_function, transpose_function
from rlx.backends.cpu.kernels.tiles import DEFAULT_TILING, distinct, other_tasks
from rlx.backends.cpu.loops import hoist
from rlx.backends.cpu.scope import Scope
from rlx.host.emit import Emitter, V, stored, vector
from rlx.ir.dtype import DType, f32
from rlx.ir.graph import Node, Value
from rlx.ir.kernel import Kernel, Native, View
from rlx.ir.ops.attention import AttentionAttrs, PartsAttrs, in_parts
from rlx.ir.ops.index import INDEX_OUT_OF_RANGE
from rlx.ir.target import Target

DTYPES = ("f32", "f16", "bf16")
KEY_BLOCK = 128  # keys per block, wide: the scores of 32 rows take 16 KB, half of an L1 cache
NARROW_KEY_BLOCK = 512
PART_KEY_BLOCK = 128  # blocks that are dealt out to parts: short, so that parts are equal although the cache is not full
NARROW_ROWS = 8  # at most this many query rows of a head: vectors run along the head
SHARED_ROWS = 8  # at most this many rows are formed from the query heads of a key head
TURN = 8  # side of the transposed squares; 16 would be as fast and cost 10 ms more to compile
FEW_ROWS = 128  # from this many rows on, a half-empty last block does not justify lower blocks
GRAIN = 1 << 18  # multiply-adds; smaller tasks are not worth handing to another thread
TASKS_PER_THREAD = 4
AHEAD_BYTES = 1 << 18  # keys and values of the next head, up to this size, are prefetched
UNROLLED = 8  # vectors of a head: up to this many, an epilogue is unrolled
MOST_PARTS = 16  # most parts into which the keys of a head are split
LEAST_KEYS = 512  # fewest keys in a part, when the cache is full


def claim(node: Node) -> str | None:
    """None if `render` has a kernel for this node; else the reason why not."""
    for value in node.inputs[:3]:
        if value.dtype.name not in DTYPES:
            return f"fused attention computes {', '.join(DTYPES)}, not {value.dtype.name}"
        if value.rank != 4:
            return f"fused attention takes [batch, heads, sequence, head size], not {value.shape}"
    if 0 in node.inputs[1].dims[2:]:
        return "fused attention needs keys of some size; there are no keys here"
    assert isinstance(node.attrs, AttentionAttrs)
    if isinstance(node.attrs, PartsAttrs) and node.attrs.block != PART_KEY_BLOCK:
        return f"fused attention deals out blocks of {PART_KEY_BLOCK} keys, not of {node.attrs.block}"
    mask, _ = node.attrs.split(node.inputs[3:])
    if mask is not None and mask.dtype.name not in (*DTYPES, "bool"):
        return f"fused attention takes a mask of {', '.join(DTYPES)} or bool, not {mask.dtype.name}"
    return None


def split(node: Node, threads: int) -> Value | None:
    """A decoding step with its keys split into parts that keep `threads` busy; None if that saves less than 20% of the time."""
    (batch, _, rows, _), (_, key_heads, keys, _) = (v.shape.static for v in node.inputs[:2])
    if rows > NARROW_ROWS or node.inputs[0].dtype != f32:
        return None
    least = {n: -(-batch * key_heads * n // threads) / n for n in range(1, min(MOST_PARTS, keys // LEAST_KEYS) + 1)}
    parts = min(least, key=lambda n: (least[n], n), default=1)
    return in_parts(node, parts, PART_KEY_BLOCK) if parts > 1 and least[parts] <= 0.8 * least[1] else None


def render(kernel: Kernel, target: Target, symbol: str, tiling: Mapping[str, int] = DEFAULT_TILING) -> Rendered:
    """A module for a kernel whose body is one Native attention: q [b, h, m, d], k [b, g, n, d], v [b, g, n, e], for some
    masks [b, h, m, n] (dims may be 1), and with a position [] or [b]; all with any strides. The output o [b, h, m, e], or the
    buffers that the epilogue writes, must not share memory with them."""
    (native,) = kernel.body
    assert isinstance(native, Native), f"kernel {kernel.name} is no native op"
    return _Attention(kernel, native, target, tiling).written(symbol)


def axes(kernel: Kernel, native: Native, target: Target) -> dict[str, tuple[int, ...]]:
    """Tuning parameters: `vectors` (of query rows in a block), `tasks`. Empty if the time depends on a position in the data."""
    default = _Attention(kernel, native, target, DEFAULT_TILING)
    if default.start is not None:
        return {}

    def tiled(tiling: Mapping[str, int]) -> tuple[int, int]:
        made = _Attention(kernel, native, target, tiling)
        made = made if made.narrow or made.dots_apart == default.dots_apart else default
        return 0 if made.narrow else made.vectors, made.tasks()

    own = {"vectors": default.vectors, "tasks": default.tasks()}
    return distinct(own, {"vectors": (1, 2), "tasks": other_tasks(target.threads)}, tiled)


@dataclass(frozen=True)
class Tensor:
    """A kernel argument viewed as [batch, heads, rows, columns]: strides in elements, 0 for broadcast dims."""

    argument: int
    dtype: DType
    strides: tuple[int, int, int, int]
    offset: int

    @property
    def layout(self) -> Layout:
        return Layout(self.dtype, self.strides[2], self.strides[3])

    def head(self, e: Emitter, base: V, head: V) -> V:
        return step(e, base, head, self.strides[1] * self.dtype.itemsize)

    def at(self, e: Emitter, batch: V, head: V, row: V | int = 0) -> V:
        """The address of a row."""
        base = e.gep(e.load("ptr", e.gep(ARGS, 8 * self.argument), 8), self.offset * self.dtype.itemsize)
        return self.layout.at(e, self.head(e, step(e, base, batch, self.strides[0] * self.dtype.itemsize), head), row)


def _tensor(kernel: Kernel, view: View) -> Tensor:
    dims, strides = (1,) * (4 - len(view.dims)) + view.dims, (0,) * (4 - len(view.dims)) + view.strides
    b, h, r, c = (0 if n == 1 else s for n, s in zip(dims, strides))
    return Tensor(kernel.buffers.index(view.buffer), view.buffer.dtype, (b, h, r, c), view.offset)


def mask_of(attrs: AttentionAttrs, keys: int) -> Mask:
    """The op's mask as a Mask: the keys that a row sees."""
    if attrs.mask in ("causal", "sliding_window"):
        return Mask("band", attrs.window if attrs.window < keys else 0)
    return Mask({"custom": "keep", "bias": "add"}.get(attrs.mask, "none"))


class _Attention(Module):
    def __init__(self, kernel: Kernel, native: Native, target: Target, tiling: Mapping[str, int]) -> None:
        super().__init__()
        self.batch, self.heads, self.rows, self.size = native.inputs[0].dims
        _, self.key_heads, self.keys, self.width = native.inputs[2].dims
        self.limits = partial(axis_limits, kernel, native)
        self.q, self.k, self.v = (_tensor(kernel, v) for v in native.inputs[:3])
        assert isinstance(native.attrs, AttentionAttrs)
        self.buffers, self.axes = kernel.buffers, [v for v, _ in native.axes]
        self.acc, self.epilogue = native.acc, native.epilogue
        self.parts, outs, logs = 1, native.outputs[:1], native.outputs[1:]
        if isinstance(native.attrs, PartsAttrs):
            self.parts, self.part_bytes = native.attrs.parts, [v.strides[0] * v.buffer.dtype.itemsize for v in native.outputs]
            outs = [replace(x, dims=x.dims[1:], strides=x.strides[1:]) for x in outs]
            logs = [replace(x, dims=(*x.dims[1:], 1), strides=(*x.strides[1:], 0)) for x in logs]
        self.outs, self.logs = ([_tensor(kernel, x) for x in views] for views in (outs, logs))  # no outs with an epilogue
        self.mask = mask_of(native.attrs, self.keys)
        self.m, self.start = (v and _tensor(kernel, v) for v in native.attrs.split(native.inputs[3:]))
        self.scale, self.cap = native.attrs.scale or self.size**-0.5, native.attrs.cap
        self.scale /= self.cap or 1
        self.group = self.heads // max(1, self.key_heads)
        self.threads, self.lanes, self.features = target.threads, target.vector_bytes // F32, target.features
        self.registers = 32 if target.vector_bytes == 64 or "neon" in target.features else 16
        self.narrow = self.rows <= NARROW_ROWS and self.k.strides[3] == 1 and self.q.strides[3] == 1
        fits = [n for n in range(1, self.group + 1) if self.group % n == 0 and n * self.rows <= SHARED_ROWS]
        self.shared = max(fits, default=1) if self.narrow else 1
        half_empty = 0 < self.rows % (2 * self.lanes) <= self.lanes  # the last block would be, with blocks of two vectors
        self.vectors = tiling.get("vectors", 1 if half_empty and self.rows < FEW_ROWS else 2)
        self.wanted = tiling.get("tasks", 0)
        self.tall = self.shared * self.rows if self.narrow else self.vectors * self.lanes  # rows of a block
        self.blocks = 1 if self.narrow else -(-self.rows // self.tall)
        held = (self.registers - 16) // -(-self.size // self.lanes)  # narrow: rows that stay in registers
        self.height = min(self.tall, held or self.lanes, self.lanes)  # narrow: rows multiplied by a few keys at a time
        self.held = held > 0
        most = min((self.registers - 1 - self.vectors) // self.vectors, 16 // self.vectors)
        most = self.lanes // max(1, self.height) if self.narrow else most
        self.key_tile = min(self.keys, most)
        self.key_block = PART_KEY_BLOCK if self.parts > 1 else NARROW_KEY_BLOCK if self.narrow else KEY_BLOCK
        self.staged = not self.narrow and self.k.dtype != f32  # 16-bit keys are converted to f32 once per block of rows
        self.once = self.keys <= self.key_block and not self.narrow and self.parts == 1  # one block: nothing is carried
        nbytes = self.keys * (self.size * self.k.dtype.itemsize + self.width * self.v.dtype.itemsize)
        dense = all(t.strides[3] == 1 for t in (self.q, self.k, self.v))
        self.ahead = dense and not (self.narrow or self.start) and nbytes <= AHEAD_BYTES < self.batch * self.key_heads * nbytes
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
    def items(self) -> int:
        return self.parts * self.batch * self.heads // self.shared * self.blocks

    @property
    def dots_apart(self) -> int:
        """Wide: the number of partial sums of a score, which hide the latency of an addition."""
        sums = self.key_tile * self.vectors
        return 1 if sums >= 8 else 2 if sums >= 4 else 4

    def tasks(self) -> int:
        items = self.items
        work = items // self.parts * self.shared * min(self.rows, self.tall) * self.keys * (self.size + self.width)
        most = self.wanted or min(max(self.threads * TASKS_PER_THREAD, work // GRAIN), max(1, 4 * work // GRAIN))
        heads = items // max(1, self.blocks)
        if not self.wanted and heads >= 2 * TASKS_PER_THREAD * self.threads:
            most = min(most, heads)  # the task that has read the keys of a head does all its rows
        return 0 if 0 in (items, self.rows, self.width) else min(items, most)

    def written(self, symbol: str) -> Rendered:
        """A task is a range of items, each a block of rows of one query head (narrow: of the heads that share a key head)."""
        items, tasks = self.items, self.tasks()
        e = Emitter(self.features)
        if tasks:
            *_, batches, _, some, _ = self.limits(e)  # only these batch entries and query rows are needed
            asked, blocks = e.i64(self.rows), self.blocks
            if some and not self.narrow:
                asked, (_, blocks) = some, divided(e, e.bin("add", some, self.tall - 1), self.tall)
            items = e.bin("mul", e.bin("mul", batches or e.i64(self.batch), self.heads // self.shared), blocks)
            items = e.bin("mul", items, self.parts)
            start, stop = share(e, TASK, items, tasks)
            scope = self.acc and outside(e, self.buffers, self.lanes * F32)
            with e.loop(start, stop) as item:
                part, rest = divided(e, item.index, self.parts)
                block, rest = divided(e, rest, blocks)
                head, batch = divided(e, rest, self.heads // self.shared)
                head = e.bin("mul", head, e.i64(self.shared))
                _, key_head = divided(e, head, self.group)
                row0 = e.bin("mul", block, e.i64(self.tall))
                q, *outs = (t.at(e, batch, head, row0) for t in (self.q, *self.outs, *self.logs))
                if self.logs:
                    outs = [step(e, at, part, nbytes) for at, nbytes in zip(outs, self.part_bytes)]
                k, v = (t.at(e, batch, key_head) for t in (self.k, self.v))
                m = self.m.at(e, batch, head, row0) if self.m else V("null", "ptr")
                first = self._first_position(e, batch)
                end = e.bin("add", first, self.rows) if self.start else e.i64(self.keys)
                rows = e.intrinsic("smin", e.i64(min(self.rows, self.tall)), e.bin("sub", asked, row0))
                if self.ahead:
                    self._fetched(e, item.index, block)
                row = e.bin("add", first, row0)
                stats, totals, sums = self._block(e, q, k, v, m, row, rows, end, part)
                with e.loop(0, self.shared) as near:
                    first = e.bin("mul", near.index, e.i64(self.rows))
                    own = self.sums.at(e, sums, first), step(e, totals, first, F32)
                    if scope:
                        at = scope.child(dict(zip(self.axes, (batch, e.bin("add", head, near.index)))))
                        self._epilogue(at, *own, row0, rows)
                    for t, at in zip(self.outs, outs):
                        finish = partial(parts.finish_function, source=self.sums, columns=self.width, lanes=self.lanes)
                        self.call(e, "finish", partial(finish, to=t.layout), *own, t.head(e, at, near.index), rows)
                    for t, at in zip(self.logs, outs[1:]):
                        given = step(e, stats, first, F32), own[1], t.head(e, at, near.index), rows
                        self.call(e, "logs", partial(parts.logs_function, to=t.layout), *given)
        return self.rendered(e, symbol, tasks)

    def _fetched(self, e: Emitter, item: V, block: V) -> None:
        """Prefetch this block's part of the head that this thread will probably process next."""
        _, rest = divided(e, e.bin("add", item, e.i64(self.threads * self.blocks)), self.blocks)
        head, batch = divided(e, rest, self.heads)
        _, key_head = divided(e, head, self.group)
        for t, of, columns in ((self.q, head, self.size), (self.k, key_head, self.size), (self.v, key_head, self.width)):
            first, stop = share(e, block, self.rows if t is self.q else self.keys, self.blocks)
            parts.fetch(e, t.at(e, batch, of), t.layout, first, stop, columns)

    def _first_position(self, e: Emitter, batch: V) -> V:
        """The key position of the first query. A position out of range fails the run, and is clamped."""
        last, zero = e.i64(self.keys - self.rows), e.i64(0)
        if self.start is None:
            return last
        place = self.start.layout.at(e, self.start.at(e, zero, zero), 0, batch)
        given = e.load(stored(self.start.dtype), place, self.start.dtype.itemsize)
        given = e.convert("sext", given, "i64") if given.ty != "i64" else given
        inside = e.intrinsic("smin", e.intrinsic("smax", given, zero), last)
        with e.when(e.cmp("ne", given, inside)):
            e.store_atomic(V(str(INDEX_OUT_OF_RANGE), "i32"), STATUS, "monotonic")
        return inside

    def _block(self, e: Emitter, q: V, k: V, v: V, m: V, row0: V, rows: V, end: V, part: V) -> tuple[V, V, V]:
        """`rows` rows of one query head, or all rows of the heads that share a key head; the first row is at key position row0,
        and no row sees key `end` or later. Pointers are to the first row, k and v to key 0. Returns the addresses of the highest
        scores, the sums of weights and the sums of weighted values."""
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
            self._scored(e, near_k, query, scores, key0, stop, end)
            if self.cap and not self.narrow:
                capped = partial(parts.cap_wide_function, vectors=self.vectors, lanes=self.lanes, cap=self.cap)
                self.call(e, "cap", capped, scores, keys)
            product = scores, self.near_v.at(e, near_v, key0), sums, factors, keys
            if self.narrow:
                self._softmax_narrow(e, m, scores, stats, keys, key0, row0)
                self._products(e, *product, rows=e.i64(self.tall), careful=self._own_mask.kind in ("band", "keep"))
            else:
                hidden = self._masked(e, m, mask, scores, key0, keys, row0, rows, holes)
                softmax = partial(parts.softmax_wide_function, rows=self.tall, first=self.once)
                self.call(e, "softmax", softmax, scores, stats, keys)
                self._weighted(e, *product, rows=rows, hidden=hidden)
        return stats, totals, sums

    def _epilogue(self, scope: Scope, sums: V, totals: V, row0: V, rows: V) -> None:
        """The epilogue of the results of a head, whose coordinates `scope` has, from row0 on."""
        e, (*_, row, column), acc = scope.e, self.axes, self.acc
        assert acc is not None
        hoist(self.epilogue, scope)
        with e.loop(0, rows) as at:
            here, line = scope.child({row: e.bin("add", row0, at.index)}), self.sums.at(e, sums, at.index)
            hoist(self.epilogue, here)
            share = parts.share_of(e, totals, at.index, self.lanes)

            def element(c: V) -> V:
                return e.bin("fmul", e.load(share.ty, step(e, line, c, F32), F32), share)

            unrolled = self.width <= UNROLLED * self.lanes
            emit_epilogue(self.epilogue, here, acc, column, element, self.width, self.lanes, e.i64(0), unrolled)

    @contextmanager
    def _key_blocks(self, e: Emitter, low: V, high: V, part: V) -> Iterator[tuple[V, V]]:
        """The loop over blocks of keys, within `part` if the keys are split: (first key, one past the last)."""
        size = self.key_block
        if self.parts == 1:
            with e.loop(low, high, size, nonempty=True) as at:
                yield at.index, e.intrinsic("smin", e.bin("add", at.index, size), high)
            return
        block, stop = e.bin("udiv", low, size), e.bin("udiv", e.bin("add", high, size - 1), size)
        ahead = e.bin("sub", e.bin("add", part, self.parts), e.bin("urem", block, self.parts))
        first = e.bin("add", block, e.bin("urem", ahead, self.parts))
        with e.loop(first, stop, self.parts) as at:
            key0 = e.bin("mul", at.index, size)
            yield e.intrinsic("smax", key0, low), e.intrinsic("smin", e.bin("add", key0, size), high)

    def _turned(
        self, e: Emitter, start: V, out: V, rows: V, first: V, stop: V, columns: int, t: Tensor, scale: float = 1.0
    ) -> None:
        """out[column][row] = start[row, column] * scale"""
        shape = {"height": self.tall, "columns": columns, "side": min(self.lanes, TURN)}
        body = partial(transpose_function, **shape, source=t.layout, to=Layout(f32, self.tall), scale=scale)
        self.call(e, f"turn{t.argument}", body, start, out, rows, first, stop)

    def _cleared(self, e: Emitter, tops: V, totals: V, sums: V) -> None:
        """The initial state, before any key: highest scores are -inf, sums are zero."""
        size = self.sums.byte(self.tall, 0) // F32
        for value, count, first in ((float("-inf"), self.tall, tops), (0.0, self.tall, totals), (0.0, size, sums)):
            lanes = self.lanes if count % self.lanes == 0 else 1
            with e.loop(0, count, lanes) as at:
                e.store(e.const(vector("float", lanes), value), step(e, first, at.index, F32), F32)

    def _seen_keys(self, e: Emitter, m: V, row0: V, rows: V, end: V) -> tuple[V, V, V]:
        """The range of keys that some row of the block may see (at least one key), and whether a mask may hide one of them."""
        low, high, holes = e.i64(0), end, e.const("i1", True)
        if self.mask.window:
            low = e.intrinsic("smax", low, e.bin("sub", row0, self.mask.window - 1))
        if self.mask.kind == "band":
            high = e.bin("add", row0, rows)
        one_head = self.m is not None and (self.shared == 1 or not self.m.strides[1])
        if self.m is not None and self.mask.kind == "keep" and not self.m.strides[2] and one_head:
            high, holes = parts.seen_keys(e, m, self.m.layout, end, self.lanes)  # skips padding instead of masking it
        return low, high, holes

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

    def _scored(self, e: Emitter, k: V, query: V, scores: V, key0: V, stop: V, end: V) -> None:
        """Scores of keys key0 to stop, tile by tile. A tile that would pass the end starts earlier, but not before key 0."""
        have, source = self.key_tile, self.near_k
        latest = e.intrinsic("smax", e.bin("sub", end, have), e.i64(0))
        shape = {"height": self.height, "count": have, "columns": self.size, "lanes": self.lanes, "held": self.held}
        dots = partial(parts.dots_function, source=source, rows=self.query, to=self.scores, **shape)
        t = Tile(have, self.vectors, self.lanes, self.dots_apart, 0, f32, self.tall)
        tile = partial(tile_function, k=self.size, t=t, from_a=source, from_b=Layout(f32, self.tall))
        with e.loop(key0, stop, have, nonempty=True) as at:
            first = e.intrinsic("smin", at.index, latest)
            here, out = source.at(e, k, first), self.scores.at(e, scores, 0, e.bin("sub", first, key0))
            if self.narrow:
                with e.loop(0, self.tall, self.height) as row:
                    start = e.intrinsic("smin", row.index, e.i64(self.tall - self.height))
                    own = self.query.at(e, query, start), e.gep(SCRATCH, self.sums_at), self.scores.at(e, out, start)
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

    def _products(self, e: Emitter, scores: V, values: V, sums: V, factors: V, keys: V, rows: V, careful: bool) -> None:
        """sums[rows] += weights[rows, keys] @ values[keys], in tiles."""
        high, whole, column = min(self.tall, 8 if self.registers == 32 else 4), -(-self.width // self.lanes), 0
        if self.narrow:  # whole rows of values are read from memory once; further rows of weights find them in cache
            most = max(1, (self.registers - 2) // max(1, whole) - 1)
            high = max(n for n in range(1, most + 1) if self.tall % n == 0)
        elif careful:  # rare
            high = 2
        for vectors in _even_parts(whole, (self.registers - 2) // (high + 1)):
            tail = self.width % self.lanes if column + vectors * self.lanes > self.width else 0
            t = Tile(high, vectors, self.lanes, 1, tail, f32, self.sums.row, careful)
            body = partial(tile_function, t=t, from_a=self.scores, from_b=self.near_v)
            with e.loop(0, rows, high, nonempty=True) as at:
                a, b = self.scores.at(e, scores, at.index), self.near_v.at(e, values, 0, column)
                before = () if self.once else (step(e, factors, at.index, F32),)
                out = self.sums.at(e, sums, at.index, column)
                self.call(e, f"product_{vectors}_{tail}_{careful:d}", body, a, b, out, keys, *before)
            column += vectors * self.lanes


def _even_parts(count: int, most: int) -> list[int]:
    """Split `count` into the fewest parts of at most `most` each, as equal as possible."""
    parts_needed = -(-count // most)
    return [count // parts_needed + (x < count % parts_needed) for x in range(parts_needed)]
