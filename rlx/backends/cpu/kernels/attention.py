"""Fused attention: softmax(q k' * scale + mask) v without a matrix of scores in memory. A Kernel whose body is one Native.

Keys and values are read where they lie, a block of keys at a time; the highest score, the sum of weights and the sums of
weighted values of a block of query rows are carried from block to block (the online softmax of Milakov and Gimelshein,
2018). Query rows are turned once per block of rows, so that a vector runs along rows ("wide"): keys enter as broadcasts
and no step crosses lanes. With few query rows (decoding) a vector runs along the head instead ("narrow"), and the query
heads that share a key head stand side by side as rows.

A row that sees no key gives zeros. A key that a boolean or positional mask hides adds nothing, whatever its bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlx.backends.cpu.emit import ATTRIBUTES, Emitter, Rendered, V, vector
from rlx.backends.cpu.kernels import attention_parts as parts
from rlx.backends.cpu.kernels.attention_parts import F32, Mask, Product, step
from rlx.backends.cpu.kernels.tile import Layout, Tile, stage_rows_function, tile_function
from rlx.ir.dtype import DType, f32
from rlx.ir.graph import Node
from rlx.ir.kernel import Kernel, Native, View
from rlx.ir.target import Target

DTYPES = ("f32", "f16", "bf16")
KEY_BLOCK = 128  # keys at a time, wide: with 32 rows of scores 16 KB, half a first-level cache
NARROW_KEY_BLOCK = 512
NARROW_ROWS = 4  # query rows of one head up to which vectors run along the head
SHARED_ROWS = 8  # rows up to which all query heads of a key head are done together
TURN = 8  # side of the squares that are turned: sixteen would take as long and cost 10 ms more to compile
FEW_ROWS = 128  # from here on a last block of rows that is half empty is not worth lower blocks
GRAIN = 1 << 18  # multiply-adds below which a task is not worth handing over
TASKS_PER_THREAD = 4


def claim(node: Node) -> str | None:
    """None: `render` has a kernel for this node; else why not."""
    for value in node.inputs[:3]:
        if value.dtype.name not in DTYPES:
            return f"fused attention computes {', '.join(DTYPES)}, not {value.dtype.name}"
        if value.rank != 4:
            return f"fused attention takes [batch, heads, sequence, head size], not {value.shape}"
    if 0 in node.inputs[1].dims[2:]:
        return "fused attention needs keys of some size; there are no keys here"
    if len(node.inputs) > 3 and node.inputs[3].dtype.name not in (*DTYPES, "bool"):
        return f"fused attention takes a mask of {', '.join(DTYPES)} or bool, not {node.inputs[3].dtype.name}"
    return None


def render(kernel: Kernel, target: Target, symbol: str) -> Rendered:
    """A module for a kernel whose body is one Native attention: q [b, h, m, d], k [b, g, n, d], v [b, g, n, e] and for some
    masks [b, h, m, n] (dims may be 1), in any strides; o [b, h, m, e], which may share no memory with them."""
    (native,) = kernel.body
    assert isinstance(native, Native), f"kernel {kernel.name} is no native op"
    return _Module(kernel, native, target, symbol).rendered()


@dataclass(frozen=True)
class Tensor:
    """A kernel argument seen as [batch, heads, rows, columns]: strides in elements, 0 where it is broadcast."""

    argument: int
    dtype: DType
    strides: tuple[int, int, int, int]
    offset: int

    @property
    def layout(self) -> Layout:
        return Layout(self.dtype, self.strides[2], self.strides[3])


def _tensor(kernel: Kernel, view: View) -> Tensor:
    dims, strides = (1,) * (4 - len(view.dims)) + view.dims, (0,) * (4 - len(view.dims)) + view.strides
    b, h, r, c = (0 if n == 1 else s for n, s in zip(dims, strides))
    return Tensor(kernel.buffers.index(view.buffer), view.buffer.dtype, (b, h, r, c), view.offset)


def mask_of(attrs: object, rows: int, keys: int) -> Mask:
    """The op's mask kind in terms of what a row sees; the last row stands at the last key."""
    kind = attrs.mask  # type: ignore[attr-defined]
    if kind in ("causal", "sliding_window"):
        above, window = keys - rows, attrs.window or keys  # type: ignore[attr-defined]
        return Mask("band", above - window + 1 if window < keys else None, above)
    return Mask({"custom": "keep", "bias": "add"}.get(kind, "none"))


class _Module:
    """The functions of one attention, each made when first called. Methods that take an Emitter write into it."""

    def __init__(self, kernel: Kernel, native: Native, target: Target, symbol: str) -> None:
        self.symbol = symbol
        self.q, self.k, self.v = (_tensor(kernel, v) for v in native.inputs[:3])
        self.o = _tensor(kernel, native.outputs[0])
        self.batch, self.heads, self.rows, self.size = native.inputs[0].dims
        _, self.key_heads, self.keys, self.width = native.inputs[2].dims
        self.q, self.k = (replace(t, strides=(*t.strides[:3], 1)) if self.size == 1 else t for t in (self.q, self.k))
        self.v, self.o = (replace(t, strides=(*t.strides[:3], 1)) if self.width == 1 else t for t in (self.v, self.o))
        self.group = self.heads // max(1, self.key_heads)
        self.mask = mask_of(native.attrs, self.rows, self.keys)
        self.m = _tensor(kernel, native.inputs[3]) if self.mask.kind in ("keep", "add") else None
        self.scale = native.attrs.scale or self.size**-0.5  # type: ignore[union-attr]
        self.lanes = target.vector_bytes // F32
        self.registers = 32 if target.vector_bytes == 64 or "neon" in target.features else 16
        self.narrow = self.rows <= NARROW_ROWS and self.k.strides[3] == 1 and self.q.strides[3] == 1
        self.shared = self.group if self.narrow and self.group * self.rows <= SHARED_ROWS else 1
        half_empty = 0 < self.rows % (2 * self.lanes) <= self.lanes  # the last block, if blocks are two vectors tall
        self.vectors = 1 if half_empty and self.rows < FEW_ROWS else 2
        self.tall = self.vectors * self.lanes  # query rows of a block
        self.blocks = 1 if self.narrow else -(-self.rows // self.tall)
        self.key_tile = min(self.keys, (self.registers - 1 - self.vectors) // self.vectors, 16 // self.vectors)
        self.key_block = NARROW_KEY_BLOCK if self.narrow else KEY_BLOCK
        self.once = self.keys <= self.key_block and not self.narrow  # all keys in one block: nothing is carried
        self.pitch = -(-self.width // self.lanes) * self.lanes  # floats of a row of sums
        self.threads = target.threads
        self.texts: dict[str, str] = {}
        self.declarations: dict[str, None] = {}
        self.scratch_bytes = 0
        self._lay_out_scratch()

    def _lay_out_scratch(self) -> None:
        rows = self.shared * self.rows if self.narrow else self.tall
        padded = -(-self.size // self.lanes) * self.lanes
        margin = self.lanes if self.narrow else self.key_tile  # a tile that would pass the last key starts earlier
        self.score_pitch = self.key_block + 2 * margin if self.narrow else self.tall
        self.query_at = self._reserve(rows * padded)
        self.score_at = self._reserve(rows * (self.key_block + 2 * margin)) + margin * (1 if self.narrow else rows) * F32
        self.mask_at = self._reserve(rows * self.key_block if self.m is not None and self.m.strides[2] and not self.narrow else 0)
        self.stats_at = self._reserve(3 * rows)
        self.sums_at = self._reserve(rows * self.pitch)
        self.padded = padded

    def _reserve(self, floats: int) -> int:
        """Offset of fresh scratch, on cache lines of its own."""
        at = self.scratch_bytes
        self.scratch_bytes += -(-floats * F32 // 64) * 64
        return at

    def rendered(self) -> Rendered:
        items = self.batch * self.heads // self.shared * self.blocks
        empty = 0 in (items, self.rows, self.width)
        work = items * self.shared * min(self.rows, self.tall) * self.keys * (self.size + self.width)
        tasks = max(1, min(items, max(self.threads * TASKS_PER_THREAD, work // GRAIN), max(1, 4 * work // GRAIN)))
        entry = _returning(Emitter()) if empty else self._entry(items, tasks)
        self.declarations |= entry.declarations
        text = entry.function(self.symbol, "ptr %args, i64 %task, ptr %scratch, ptr %status")
        module = "\n".join([*self.declarations, ATTRIBUTES, *self.texts.values(), text])
        return Rendered(self.symbol, module, 0 if empty else tasks, self.scratch_bytes)

    def _function(self, name: str, params: Sequence[V], make: Callable[[Emitter], None], returns: str = "void") -> str:
        """The name of an internal function whose body `make` writes, made on first use."""
        if name not in self.texts:
            e = Emitter()
            make(e)
            if returns == "void":
                _returning(e)
            self.declarations |= e.declarations
            self.texts[name] = e.function(name, ", ".join(map(str, params)), linkage="internal", returns=returns)
        return name

    # -- the task: a range of items, each some rows of one query head (narrow: of the heads that share a key head)

    def _entry(self, items: int, tasks: int) -> Emitter:
        e = Emitter()
        task = V("%task", "i64")
        ends = task, e.bin("add", task, e.i64(1))
        first, stop = (e.bin("udiv", e.bin("mul", t, e.i64(items)), e.i64(tasks)) for t in ends)
        bases = [self._base(e, t) for t in (self.q, self.k, self.v, self.o, self.m) if t is not None]
        with e.loop(first, stop, nonempty=True) as item:
            block, rest = _divmod(e, item.index, self.blocks)
            head, batch = _divmod(e, rest, self.heads // self.shared)
            head = e.bin("mul", head, e.i64(self.shared))
            _, key_head = _divmod(e, head, self.group)
            heads = (head, key_head, key_head, head, head)
            here = [
                step(e, step(e, base, batch, t.strides[0] * t.dtype.itemsize), h, t.strides[1] * t.dtype.itemsize)
                for base, t, h in zip(bases, (self.q, self.k, self.v, self.o, self.m), heads)
                if t is not None
            ]
            here += [] if self.m else [here[0]]  # no mask: any pointer
            if self.narrow:
                e.call(self._narrow(), "void", *here, V("%scratch", "ptr"))
            else:
                row0 = e.bin("mul", block, e.i64(self.tall))
                rows = e.intrinsic("smin", e.i64(self.tall), e.bin("sub", e.i64(self.rows), row0))
                e.call(self._wide(), "void", *here, V("%scratch", "ptr"), row0, rows)
        return _returning(e)

    def _base(self, e: Emitter, t: Tensor) -> V:
        return e.gep(e.load("ptr", e.gep(V("%args", "ptr"), 8 * t.argument), 8), t.offset * t.dtype.itemsize)

    # -- wide

    def _wide(self) -> str:
        """wide(q, k, v, o, m, scratch, row0, rows): `rows` query rows from row0."""
        q, k, v, o, m, scratch = (V(f"%{x}", "ptr") for x in ("q", "k", "v", "o", "m", "scratch"))
        row0, rows = V("%row0", "i64"), V("%rows", "i64")

        def make(e: Emitter) -> None:
            tall = self.tall
            query, scores, mask, stats, sums = (
                e.gep(scratch, at) for at in (self.query_at, self.score_at, self.mask_at, self.stats_at, self.sums_at)
            )
            start = step(e, q, row0, self.q.layout.byte(1, 0))
            self._turned(e, start, query, rows, e.i64(self.size), self.q, self.scale)
            if not self.once:
                self._cleared(e, stats, sums, tall)
            low, high = self._seen_keys(e, m, row0, rows)
            with e.loop(low, high, self.key_block, nonempty=True) as at:
                key0 = at.index
                stop = e.intrinsic("smin", e.bin("add", key0, e.i64(self.key_block)), high)
                keys = e.bin("sub", stop, key0)
                self._scored(e, k, query, scores, key0, stop)
                partial = self._masked(e, m, mask, scores, key0, keys, row0, rows)
                e.call(self._softmax(), "void", scores, stats, keys)
                values = step(e, v, key0, self.v.layout.byte(1, 0))
                self._weighted(e, scores, values, sums, e.gep(stats, 2 * tall * F32), keys, rows, partial, tall)
            self._finished(e, sums, e.gep(stats, tall * F32), step(e, o, row0, self.o.layout.byte(1, 0)), rows)

        return self._function("wide", [q, k, v, o, m, scratch, row0, rows], make)

    def _turned(self, e: Emitter, start: V, out: V, rows: V, columns: V, t: Tensor, scale: float) -> None:
        """out[column][row] = start[row, column] * scale, square by square."""
        params = V("%from", "ptr"), V("%to", "ptr"), V("%rows", "i64"), V("%columns", "i64")
        pitch, side = self.tall, min(self.lanes, TURN)
        turn = self._function(
            f"turn{t.argument}",
            params,
            lambda e: parts.turn_function(e, *params, t.layout, pitch, side, scale),
        )
        with e.loop(0, columns, side, nonempty=True) as at, e.loop(0, pitch, side) as row:
            source = step(e, step(e, start, at.index, t.layout.byte(0, 1)), row.index, t.layout.byte(1, 0))
            target = step(e, step(e, out, at.index, pitch * F32), row.index, F32)
            e.call(turn, "void", source, target, e.bin("sub", rows, row.index), e.bin("sub", columns, at.index))

    def _cleared(self, e: Emitter, stats: V, sums: V, rows: int) -> None:
        """No key so far: highest scores are -inf, sums are zero."""
        fills = (float("-inf"), rows, stats), (0.0, rows, e.gep(stats, rows * F32)), (0.0, rows * self.pitch, sums)
        for value, count, first in fills:
            lanes = self.lanes if count % self.lanes == 0 else 1
            with e.loop(0, count, lanes) as at:
                e.store(e.const(vector("float", lanes), value), step(e, first, at.index, F32), F32)

    def _seen_keys(self, e: Emitter, m: V, row0: V, rows: V) -> tuple[V, V]:
        """The range of keys that some row of the block may see, at least one key."""
        low, high = e.i64(0), e.i64(self.keys)
        if self.mask.below is not None:
            low = e.intrinsic("smax", low, e.bin("add", row0, e.i64(self.mask.below)))
            low = e.intrinsic("smin", low, e.i64(self.keys - 1))
        if self.mask.above is not None:
            high = e.intrinsic("smin", high, e.bin("add", e.bin("add", row0, rows), e.i64(self.mask.above)))
            high = e.intrinsic("smax", high, e.bin("add", low, e.i64(1)))
        if self.m is not None and self.mask.kind == "keep" and not self.m.strides[2]:
            if self.shared == 1 or not self.m.strides[1]:
                high = parts.last_seen(e, m, self.m.layout, self.keys)  # padding is skipped, not computed and hidden
        return low, high

    def _scored(self, e: Emitter, k: V, query: V, scores: V, key0: V, stop: V) -> None:
        """Scores of keys key0 to stop, tile by tile; the tile at the very end starts earlier rather than reading past it."""
        params = V("%a", "ptr"), V("%b", "ptr"), V("%sums", "ptr")
        pitch, totals = self.tall, self.key_tile * self.vectors
        unroll = 1 if totals >= 8 else 2 if totals >= 4 else 4  # sums apart that hide the latency of one
        shape = Tile(self.key_tile, self.vectors, self.lanes, unroll, 0, f32)
        tile = self._function(
            "tile",
            params,
            lambda e: tile_function(e, *params, shape, self.size, self.k.layout, Layout(f32, pitch, 1)),
        )
        with e.loop(key0, stop, self.key_tile, nonempty=True) as at:
            first = e.intrinsic("smin", at.index, e.i64(self.keys - self.key_tile))
            out = step(e, scores, e.bin("sub", first, key0), pitch * F32)
            e.call(tile, "void", step(e, k, first, self.k.layout.byte(1, 0)), query, out)

    def _masked(self, e: Emitter, m: V, mask: V, scores: V, key0: V, keys: V, row0: V, rows: V) -> V | None:
        """Masks the scores of a block. Whether some of them may be hidden while their values are read; None: none is."""
        if self.mask.kind == "none":
            return None
        params = V("%s", "ptr"), V("%m", "ptr"), V("%n", "i64"), V("%key0", "i64"), V("%row0", "i64")
        uniform = Layout(self.m.dtype, self.m.strides[3], 0) if self.m is not None and not self.m.strides[2] else None
        name = self._function(
            "mask",
            params,
            lambda e: parts.mask_wide_function(e, *params, self.mask, self.vectors, self.lanes, uniform),
        )
        if self.m is not None:
            m = step(e, step(e, m, row0, self.m.layout.byte(1, 0)), key0, self.m.layout.byte(0, 1))
            if uniform is None:
                self._turned(e, m, mask, rows, keys, self.m, 1.0)
                m = mask
            e.call(name, "void", scores, m, keys, key0, row0)
            return e.const("i1", True) if self.mask.kind == "keep" else None
        partial = e.const("i1", False)
        if self.mask.above is not None:
            whole = e.bin("add", row0, e.i64(self.mask.above + 1))
            partial = e.bin("or", partial, e.cmp("sgt", e.bin("add", key0, keys), whole))
        if self.mask.below is not None:
            whole = e.bin("add", e.bin("add", row0, rows), e.i64(self.mask.below - 1))
            partial = e.bin("or", partial, e.cmp("slt", key0, whole))
        with e.when(partial):
            e.call(name, "void", scores, mask, keys, key0, row0)
        return partial

    def _softmax(self) -> str:
        params = V("%s", "ptr"), V("%stats", "ptr"), V("%n", "i64")
        return self._function(
            "softmax",
            params,
            lambda e: parts.softmax_wide_function(e, *params, self.vectors, self.lanes, self.once),
        )

    def _weighted(
        self, e: Emitter, scores: V, values: V, sums: V, factors: V, keys: V, rows: V, partial: V | None, tall: int
    ) -> None:
        """The block's weighted values onto the sums: with care where a hidden value is NaN or infinite."""
        args = scores, values, sums, factors, keys, rows
        if partial is None:
            self._products(e, *args, tall, careful=False)
            return
        params = V("%v", "ptr"), V("%n", "i64")
        finite = self._function(
            "finite",
            params,
            lambda e: parts.finite_function(e, *params, self.v.layout, self.width, self.lanes),
            returns="i1",
        )
        care = e.bin("and", partial, e.bin("xor", e.call(finite, "i1", values, keys), e.const("i1", True)))
        with e.when(care):
            self._products(e, *args, tall, careful=True)
        with e.when(e.bin("xor", care, e.const("i1", True))):
            self._products(e, *args, tall, careful=False)

    def _products(
        self, e: Emitter, scores: V, values: V, sums: V, factors: V, keys: V, rows: V, tall: int, careful: bool
    ) -> None:
        """sums[rows] += weights[rows, keys] @ values[keys], in tiles."""
        weights = Layout(f32, self.score_pitch, 1) if self.narrow else Layout(f32, 1, tall)
        high = tall if self.narrow else 2 if careful else min(tall, 8 if self.registers == 32 else 4)  # care is rare
        params = V("%w", "ptr"), V("%v", "ptr"), V("%sums", "ptr"), V("%factors", "ptr"), V("%n", "i64")
        column = 0
        for vectors in _even_parts(-(-self.width // self.lanes), (self.registers - 2) // (high + 1)):
            tail = max(0, column + vectors * self.lanes - self.width)
            p = Product(
                high,
                vectors,
                self.lanes,
                self.lanes - tail if tail else 0,
                weights,
                self.v.layout,
                self.pitch,
                self.once,
                careful,
            )
            name = self._function(
                f"product_{vectors}_{tail}_{careful:d}", params, lambda e, p=p: parts.product_function(e, *params, p)
            )
            at_values = e.gep(values, self.v.layout.byte(0, column))
            with e.loop(0, rows, high, nonempty=True) as at:
                place = e.gep(step(e, sums, at.index, self.pitch * F32), column * F32)
                at_weights = step(e, scores, at.index, weights.byte(1, 0))
                e.call(name, "void", at_weights, at_values, place, step(e, factors, at.index, F32), keys)
            column += vectors * self.lanes

    def _finished(self, e: Emitter, sums: V, totals: V, out: V, rows: V) -> None:
        params = V("%sums", "ptr"), V("%totals", "ptr"), V("%o", "ptr"), V("%rows", "i64")
        name = self._function(
            "finish",
            params,
            lambda e: parts.finish_function(e, *params, self.o.layout, self.width, self.pitch, self.lanes),
        )
        e.call(name, "void", sums, totals, out, rows)

    # -- narrow

    def _narrow(self) -> str:
        """narrow(q, k, v, o, m, scratch): all query rows of `shared` heads that share a key head."""
        q, k, v, o, m, scratch = (V(f"%{x}", "ptr") for x in ("q", "k", "v", "o", "m", "scratch"))
        high = self.shared * self.rows

        def make(e: Emitter) -> None:
            query, scores, stats, sums = (
                e.gep(scratch, at) for at in (self.query_at, self.score_at, self.stats_at, self.sums_at)
            )
            totals, factors = e.gep(stats, high * F32), e.gep(stats, 2 * high * F32)
            to = Layout(f32, self.padded, 1)
            with e.loop(0, self.shared) as head:
                first = e.bin("mul", head.index, e.i64(self.rows))
                start = step(e, q, head.index, self.q.strides[1] * self.q.dtype.itemsize)
                out = step(e, query, first, to.byte(1, 0))
                stage_rows_function(e, start, out, e.i64(self.rows), self.size, self.q.layout, to, self.lanes)
            self._cleared(e, stats, sums, high)
            low, stop = self._seen_keys(e, m, e.i64(0), e.i64(self.rows))
            with e.loop(low, stop, self.key_block, nonempty=True) as at:
                key0 = at.index
                end = e.intrinsic("smin", e.bin("add", key0, e.i64(self.key_block)), stop)
                keys = e.bin("sub", end, key0)
                self._dotted(e, k, query, scores, key0, end)
                self._softmaxes(e, m, scores, stats, key0, keys)
                values = step(e, v, key0, self.v.layout.byte(1, 0))
                careful = self.mask.kind in ("band", "keep")
                self._products(e, scores, values, sums, factors, keys, e.i64(high), high, careful)
            with e.loop(0, self.shared) as head:
                first = e.bin("mul", head.index, e.i64(self.rows))
                out = step(e, o, head.index, self.o.strides[1] * self.o.dtype.itemsize)
                self._finished(e, step(e, sums, first, self.pitch * F32), step(e, totals, first, F32), out, e.i64(self.rows))

        return self._function("narrow", [q, k, v, o, m, scratch], make)

    def _dotted(self, e: Emitter, k: V, query: V, scores: V, key0: V, stop: V) -> None:
        """Scores of every row for keys key0 to stop, a vector of keys at a time; the last one as in _scored."""
        params = V("%q", "ptr"), V("%k", "ptr"), V("%s", "ptr")
        have = min(self.lanes, self.keys)
        name = self._function(
            "dots", params, lambda e: parts.dots_function(e, *params, self.k.layout, self.size, self.lanes, have)
        )
        with e.loop(key0, stop, self.lanes, nonempty=True) as at:
            first = e.intrinsic("smin", at.index, e.i64(self.keys - have))
            source = step(e, k, first, self.k.layout.byte(1, 0))
            out = step(e, scores, e.bin("sub", first, key0), F32)
            with e.loop(0, self.shared * self.rows) as row:
                place = step(e, out, row.index, self.score_pitch * F32)
                e.call(name, "void", step(e, query, row.index, self.padded * F32), source, place)

    def _softmaxes(self, e: Emitter, m: V, scores: V, stats: V, key0: V, keys: V) -> None:
        """Every row's scores become weights."""
        params = V("%s", "ptr"), V("%m", "ptr"), V("%stats", "ptr"), V("%n", "i64"), V("%key0", "i64"), V("%row", "i64")
        source = self.m.layout if self.m is not None else None
        high = self.shared * self.rows
        name = self._function(
            "softmax",
            params,
            lambda e: parts.softmax_narrow_function(e, *params, self.mask, source, self.lanes, self.scale, high),
        )
        with e.loop(0, self.shared) as head, e.loop(0, self.rows) as row:
            at = e.bin("add", e.bin("mul", head.index, e.i64(self.rows)), row.index)
            mask = m
            if self.m is not None:
                mask = step(e, m, head.index, self.m.strides[1] * self.m.dtype.itemsize)
                mask = step(e, step(e, mask, row.index, self.m.layout.byte(1, 0)), key0, self.m.layout.byte(0, 1))
            line, own = step(e, scores, at, self.score_pitch * F32), step(e, stats, at, F32)
            e.call(name, "void", line, mask, own, keys, key0, row.index)


def _returning(e: Emitter) -> Emitter:
    e.do("ret void")
    return e


def _divmod(e: Emitter, value: V, by: int) -> tuple[V, V]:
    """(value % by, value // by)"""
    if by == 1:
        return e.i64(0), value
    return e.bin("urem", value, e.i64(by)), e.bin("udiv", value, e.i64(by))


def _even_parts(count: int, most: int) -> list[int]:
    """`count` in as few parts as keep each at `most` or less, as equal as can be."""
    parts_needed = -(-count // most)
    return [count // parts_needed + (x < count % parts_needed) for x in range(parts_needed)]
