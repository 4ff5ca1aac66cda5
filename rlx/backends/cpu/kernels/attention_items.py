"""The items of an attention kernel, whatever computes them: the problem as tensors, tasks, the range of keys, results.

An item is a block of query rows of one head (or of the heads that share a key head). A subclass sets the height of blocks and
computes one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.kernels import attention_parts as parts
from rlx.backends.cpu.kernels.attention_parts import F32, Mask
from rlx.backends.cpu.kernels.module import ARGS, STATUS, TASK, Module, axis_limits, divided, outside, share, step
from rlx.backends.cpu.kernels.product import emit_epilogue
from rlx.backends.cpu.kernels.tile import Layout
from rlx.backends.cpu.kernels.tiles import registers_of
from rlx.backends.cpu.loops import hoist
from rlx.backends.cpu.scope import Scope
from rlx.host.emit import Emitter, V, stored, vector
from rlx.ir.dtype import DType
from rlx.ir.kernel import Kernel, Native, View
from rlx.ir.ops.attention import AttentionAttrs, PartsAttrs
from rlx.ir.ops.index import INDEX_OUT_OF_RANGE
from rlx.ir.target import Target
from rlx.records import record

PART_KEY_BLOCK = 128  # blocks that are dealt out to parts: short, so that parts are equal although the cache is not full
GRAIN = 1 << 18  # multiply-adds; smaller tasks are not worth handing to another thread
TASKS_PER_THREAD = 4
AHEAD_BYTES = 1 << 18  # keys and values of the next head, up to this size, are prefetched
UNROLLED = 8  # vectors of a head: up to this many, an epilogue is unrolled


@record
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


class Attention(Module):
    """`shared`: query heads that an item has the rows of. `tall`: rows of a block; `blocks`: of a head; `cut`: there may be
    several. `sums`: layout of the weighted values of a block. `vectors` may be tuned, unless `order` (of additions) changes.
    `fetches`: keys are prefetched while values of a block are read, at last those of the head `upcoming`."""

    shared = 1
    cut = True
    fetches = False
    vectors = 0
    order = 0
    tall: int
    blocks: int
    key_block: int
    sums: Layout
    upcoming: V

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
        self.registers = registers_of(target)
        self.wanted = tiling.get("tasks", 0)
        nbytes = self.keys * (self.size * self.k.dtype.itemsize + self.width * self.v.dtype.itemsize)
        dense = all(t.strides[3] == 1 for t in (self.q, self.k, self.v))
        self.ahead = dense and not self.start and nbytes <= AHEAD_BYTES < self.batch * self.key_heads * nbytes

    @property
    def items(self) -> int:
        return self.parts * self.batch * self.heads // self.shared * self.blocks

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
            if some and self.cut:
                asked, (_, blocks) = some, divided(e, e.bin("add", some, self.tall - 1), self.tall)
            items = e.bin("mul", e.bin("mul", batches or e.i64(self.batch), self.heads // self.shared), blocks)
            items = e.bin("mul", items, self.parts)
            start, stop = share(e, TASK, items, tasks)
            self._begin(e)
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
                if self.fetches:
                    self.upcoming = self._upcoming(e, item.index, items, k) if self.parts == 1 else k
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
            self._end(e)
        return self.rendered(e, symbol, tasks)

    def _fetched(self, e: Emitter, item: V, block: V) -> None:
        """Prefetch this block's part of the head that this thread will probably process next."""
        _, rest = divided(e, e.bin("add", item, e.i64(self.threads * self.blocks)), self.blocks)
        head, batch = divided(e, rest, self.heads)
        _, key_head = divided(e, head, self.group)
        for t, of, columns in ((self.q, head, self.size), (self.k, key_head, self.size), (self.v, key_head, self.width)):
            first, stop = share(e, block, self.rows if t is self.q else self.keys, self.blocks)
            parts.fetch(e, t.at(e, batch, of), t.layout, first, stop, columns)

    def _upcoming(self, e: Emitter, item: V, items: V | int, k: V) -> V:
        """The keys of the next item, if it is in the thread's own part of the tasks (executor.py), else `k`."""
        tasks, following = self.tasks(), e.bin("add", item, 1)
        threads = min(self.threads, tasks)
        own = e.bin("udiv", e.bin("sub", e.bin("mul", e.bin("add", TASK, 1), threads), 1), tasks)
        _, last = share(e, own, tasks, threads)
        _, end = share(e, e.bin("sub", last, 1), items, tasks)
        head, batch = divided(e, following, self.heads // self.shared)
        _, key_head = divided(e, e.bin("mul", head, self.shared), self.group)
        return e.select(e.cmp("slt", following, end), self.k.at(e, batch, key_head), k)

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

    def _begin(self, e: Emitter) -> None:
        """Emitted before the items of a task."""

    def _end(self, e: Emitter) -> None:
        """Emitted after the items of a task."""

    def _block(self, e: Emitter, q: V, k: V, v: V, m: V, row0: V, rows: V, end: V, part: V) -> tuple[V, V, V]:
        """`rows` rows of one query head, or all rows of the heads that share a key head; the first row is at key position row0,
        and no row sees key `end` or later. Pointers are to the first row, k and v to key 0. Returns the addresses of the highest
        scores, the sums of weights and the sums of weighted values."""
        raise AssertionError("abstract")

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
        size: int | V = self.key_block
        if self.parts == 1:
            if self.fetches:  # blocks of equal size: as many keys are fetched with the values of a block as the next one has
                keys = e.bin("sub", high, low)
                blocks = e.bin("udiv", e.bin("add", keys, size - 1), size)
                size = e.bin("udiv", e.bin("sub", e.bin("add", keys, blocks), 1), blocks)
            with e.loop(low, high, size, nonempty=True) as at:
                yield at.index, e.intrinsic("smin", e.bin("add", at.index, size), high)
            return
        block, stop = e.bin("udiv", low, size), e.bin("udiv", e.bin("add", high, size - 1), size)
        ahead = e.bin("sub", e.bin("add", part, self.parts), e.bin("urem", block, self.parts))
        first = e.bin("add", block, e.bin("urem", ahead, self.parts))
        with e.loop(first, stop, self.parts) as at:
            key0 = e.bin("mul", at.index, size)
            yield e.intrinsic("smax", key0, low), e.intrinsic("smin", e.bin("add", key0, size), high)

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
