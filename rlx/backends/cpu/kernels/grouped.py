"""Convolutions in groups of few channels (depthwise: of one), channels last: a Kernel whose body is one Native conv.

Vectors run over channels, and a tile of adjacent positions of one row of the result has its sums in registers. For each row of
the window, an element of x is loaded once for all positions of the tile that read it. A vector has the channels of several
groups: the channels that its lanes multiply by are that vector of x with its lanes moved inside each group, or single channels
spread over the lanes of their group, where a group is large. Padding is not stored: rows of a window
that lie outside are left out at run time; columns are known when code is generated: tiles at an edge have code of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from math import prod

from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.kernels.module import SCRATCH, TASK, Module, divided, outside, share, step
from rlx.backends.cpu.kernels.product import emit_epilogue
from rlx.backends.cpu.kernels.thin import adjacent
from rlx.backends.cpu.kernels.tile import Layout, lane_mask, load_line
from rlx.backends.cpu.kernels.tiles import DEFAULT_TILING, GRAIN, distinct, other_tasks, registers_of, tasks_of
from rlx.backends.cpu.loops import emit_statements, hoist, weight
from rlx.backends.cpu.scope import Scope
from rlx.host.emit import Emitter, V, stored, vector
from rlx.ir.dtype import bf16, f16, f32
from rlx.ir.graph import Node, Value
from rlx.ir.kernel import Kernel, Native, Store, Var, View, linear
from rlx.ir.ops import cast, conv, copy, pack, pad
from rlx.ir.ops.conv import SEVERAL, ConvAttrs
from rlx.ir.ops.view import broadcast_to, reshape, slice_axis, unsqueeze
from rlx.ir.target import Target
from rlx.records import record

GROUPS = (1, 2, 4, 8, 16, 32)  # channels of a group; more are products, of a matrix for each group
SPREAD = 8  # channels of a group whose channels are spread one by one, in a loop
FEW_OF_FLOATS, FEW_OF_INTEGERS = 16, 8  # channels of a group whose results are padded
MOST_ACROSS = 16  # positions of a tile
MOST_PRODUCTS = 1 << 13  # multiply-adds in the code of a kernel: with more it takes seconds to compile
HEAVY = 6  # weight of an epilogue that is a loop over the tile's positions, instead of a copy for each
MULTIPLY_GRAIN = GRAIN // 4  # multiply-adds of a task: each loads more than those of a product


def claim(node: Node) -> str | None:
    """None if `render` has a kernel for this convolution; else the reason why not."""
    attrs, (x, w) = node.attrs, node.inputs[:2]
    assert isinstance(attrs, ConvAttrs)
    if attrs.groups == 1:
        return "a convolution that sums over all channels is a product of windows"
    if not attrs.channels_last:
        return f"the direct kernel takes [batch, *spatial, channels], not {x.shape}"
    if w.dims[-2] not in GROUPS or (w.dims[-1] != x.dims[-1] and not several(node) and not fewer(node)):
        return f"the direct kernel has groups of {GROUPS} channels in x and in the result, not {w.shape} in {attrs.groups} groups"
    wide, channels = w.shape.static[-3], min(w.shape.static[-2], SPREAD)
    edges = 2 * wide + 3 if attrs.each("dilation", x.rank - 2)[-1] > 1 else 5  # tiles with code of their own
    if edges * MOST_ACROSS * wide * channels > MOST_PRODUCTS:
        return f"the direct kernel unrolls a row of the window, and {wide} elements of {channels} channels are too many"
    return None


def several(node: Node) -> int:
    """Results of each channel, if they are a few; 0: they are one, or a group has several channels."""
    (*_, inner, out), channels = node.inputs[1].shape.static, node.inputs[0].shape.static[-1]
    return out // channels if inner == 1 and channels < out < SEVERAL * channels else 0


def fewer(node: Node) -> int:
    """Results of a group, if they are padded to as many as its channels: fewer, but at least half as many, of windows of several
    elements and of so few channels that this is faster than a product for each group; else 0."""
    attrs, (*window, inner, out) = node.attrs, node.inputs[1].shape.static
    assert isinstance(attrs, ConvAttrs)
    each, most = out // attrs.groups, FEW_OF_FLOATS if node.inputs[1].dtype.is_float else FEW_OF_INTEGERS
    return each if each < inner <= min(most, 2 * each) and prod(window) > 1 else 0


def _padded(x: Value, groups: int, each: int) -> Value:
    """Groups of results, along the last axis, with zeros behind them: `each` of a group."""
    own = x.shape.static[-1] // groups
    apart = reshape(x, dims=(*x.dims[:-1], groups, own))
    low = (0,) * apart.rank
    return reshape(pad(apart, low=low, high=(*low[:-1], each - own)), dims=(*x.dims[:-1], groups * each))


def split(node: Node) -> Value | None:
    """The convolution of a copy of x: with each channel as often as it has results, or with channels last, if x is a view without
    (lanes would be gathered for each row of a window). Or that with as many results in a group as channels: some are zeros, and
    not kept. Or that of f32, if narrow floats of x and of the weights are read for SPREAD channels and more: they would be
    widened each time."""
    x, w, *bias = node.inputs
    if few := fewer(node):
        groups, inner = node.attrs.groups, w.shape.static[-2]  # type: ignore[union-attr]
        w, *bias = (_padded(v, groups, inner) for v in (w, *bias))
        made: Value = conv(x, w, *bias, **vars(node.attrs))  # type: ignore[arg-type]
        apart = reshape(made, dims=(*made.dims[:-1], groups, inner))
        return reshape(slice_axis(apart, apart.rank - 1, 0, few), dims=(*made.dims[:-1], groups * few))
    if many := several(node):
        wide = broadcast_to(unsqueeze(x, axes=x.rank), dims=(*x.dims, many))
        x = reshape(wide, dims=(*x.dims[:-1], w.dims[-1]))
        return conv(copy(x), w, *bias, **(vars(node.attrs) | {"groups": w.dims[-1]}))  # type: ignore[return-value]
    if x.dtype in (f16, bf16) and w.shape.static[-2] >= SPREAD:
        widened: Value = conv(*(cast(v, dtype=f32) for v in (x, w, *bias)), **vars(node.attrs))  # type: ignore[arg-type]
        return cast(widened, dtype=x.dtype)  # type: ignore[return-value]
    return None if adjacent(x, (x.rank - 1,)) else conv(copy(x), w, *bias, **vars(node.attrs))  # type: ignore[return-value]


def packs(node: Node, *_: object) -> Value:
    """The weights in row-major order, as they may be a view of another."""
    w = node.inputs[1]
    return pack(w, layout=tuple((axis, 1) for axis in range(w.rank)))  # type: ignore[return-value]


def render(kernel: Kernel, target: Target, symbol: str, tiling: Mapping[str, int] = DEFAULT_TILING) -> Rendered:
    """A module for a kernel whose body is one Native conv that `claim` accepts; views may have any strides."""
    (native,) = kernel.body
    assert isinstance(native, Native), f"kernel {kernel.name} is no native op"
    return _Grouped(kernel, native, target, tiling).written(symbol)


def axes(kernel: Kernel, native: Native, target: Target) -> dict[str, tuple[int, ...]]:
    """Tuning parameters: `tasks`."""
    default = _Grouped(kernel, native, target, DEFAULT_TILING)
    asked = {"tasks": other_tasks(target.threads)}
    return distinct({"tasks": default.tasks}, asked, lambda tiling: _Grouped(kernel, native, target, tiling).tasks)


@record
class _Side:
    """One spatial dim: elements of x, of the result and of a window; the distance of two windows, and of two elements of one; the
    padding before x."""

    size: int
    out: int
    window: int
    stride: int
    dilation: int
    low: int

    def rows(self, e: Emitter, place: V) -> tuple[V, tuple[V, V]]:
        """The row of x at the first row of the window of a row of the result, and which rows of the window are inside x."""
        top = e.bin("sub", e.bin("mul", place, self.stride), self.low)
        above, below = e.intrinsic("smax", e.bin("sub", e.i64(0), top), e.i64(0)), e.bin("sub", e.i64(self.size), top)
        start, stop = (e.bin("sdiv", e.bin("add", n, self.dilation - 1), self.dilation) for n in (above, below))
        return top, (start, e.intrinsic("smin", stop, e.i64(self.window)))


ONE = _Side(1, 1, 1, 1, 1, 0)


class _Grouped(Module):
    """`across`: positions of a tile; `vectors`: of channels. `chunks`: parts of the channels that tasks may share a row by."""

    def __init__(self, kernel: Kernel, native: Native, target: Target, tiling: Mapping[str, int]) -> None:
        super().__init__()
        self.kernel, attrs, (x, self.w, *self.bias) = kernel, native.attrs, native.inputs
        assert isinstance(attrs, ConvAttrs)
        result = native.results[0]
        assert self.w.dims[-1] == x.dims[-1], "split gives each channel of the result one of x"
        self.batch, *places, self.channels = result
        facts = (attrs.each(name, len(places)) for name in ("strides", "dilation", "low"))
        sides = [_Side(*numbers) for numbers in zip(x.dims[1:-1], places, self.w.dims, *facts)]
        self.deep, self.high, self.wide = [ONE, ONE, *sides][-3:]
        self.x, self.image = x, Layout(x.buffer.dtype, ([0, *x.strides[1:-1]])[-2], x.strides[-2])
        self.plane = x.strides[1] * x.buffer.dtype.itemsize  # bytes, of an image of three dims
        self.axes = [v for v, _ in native.axes] or [Var("n") for _ in result]
        acc = native.acc or Var("acc", native.outputs[0].buffer.dtype.compute)
        self.acc, self.epilogue = acc, native.epilogue
        if native.acc is None:
            out = native.outputs[0]
            self.epilogue = (Store(out.buffer, linear(zip(self.axes, out.strides), out.offset), acc),)
        self.vector_bytes, self.features = target.vector_bytes, target.features
        self.lanes = target.vector_bytes // max(4, acc.dtype.itemsize)
        self.group = self.w.dims[-2]
        sums = min(MOST_ACROSS, registers_of(target) // 2)
        self.across = -(-self.wide.out // -(-self.wide.out // sums)) if self.wide.out else 1
        self.vectors = max(1, min(sums // self.across, self.channels // self.lanes))
        self.blocks = self.channels // (self.vectors * self.lanes)
        self.rows = self.batch * self.deep.out * self.high.out
        work = self.rows * self.wide.out * self.channels * prod(self.w.dims[:-1])
        wanted = tiling.get("tasks", tasks_of(work // MULTIPLY_GRAIN, target.threads))
        self.chunks = max(1, min(self.blocks, -(-wanted // max(1, self.rows)))) if wanted > self.rows else 1
        self.tasks = max(1, min(wanted, self.rows * self.chunks)) if prod(result) else 0
        self.heavy = weight(self.epilogue) >= HEAVY
        self.sums_at = self.reserve(self.across * self.vectors * self.lanes * acc.dtype.itemsize if self.heavy else 0)

    def written(self, symbol: str) -> Rendered:
        e = Emitter(self.features)
        if self.tasks:
            scope = outside(e, self.kernel.buffers, self.vector_bytes)
            hoist(self.epilogue, scope)
            with e.loop(*share(e, TASK, self.rows * self.chunks, self.tasks), nonempty=True) as at:
                chunk, row = divided(e, at.index, self.chunks)
                place, depth, image = self._places(e, row)
                inside = scope.child(dict(zip(self.axes, (image, *(depth, place)[5 - len(self.axes) :]))))
                hoist(self.epilogue, inside)
                self._row(e, inside, chunk, (depth, place), self._address(e, scope, self.x, image))
        return self.rendered(e, symbol, self.tasks)

    def _places(self, e: Emitter, row: V) -> tuple[V, V, V]:
        """Row, plane and image of a row of the result, by its number."""
        place, rest = divided(e, row, self.high.out)
        return (place, *divided(e, rest, self.deep.out)) if self.deep is not ONE else (place, e.i64(0), rest)

    def _address(self, e: Emitter, scope: Scope, view: View, first: V | None = None) -> V:
        """Where a view begins, at index `first` of its first dim."""
        base = e.gep(scope.pointers[view.buffer], view.offset * view.buffer.dtype.itemsize)
        return base if first is None else step(e, base, first, view.strides[0] * view.buffer.dtype.itemsize)

    def _row(self, e: Emitter, scope: Scope, chunk: V, places: tuple[V, V], image: V) -> None:
        """The chunk's channels of one row of the result, at (plane, row)."""
        planes = None
        if self.deep is not ONE:
            first, planes = self.deep.rows(e, places[0])
            image = step(e, image, first, self.plane)
        top, rows = self.high.rows(e, places[1])
        line = self.image.at(e, image, top)
        channels = share(e, chunk, self.blocks, self.chunks)
        last = e.cmp("eq", chunk, e.i64(self.chunks - 1))
        whole = self.vectors * self.lanes
        for shape, tiles in groupby(self._tiles(), key=lambda tile: tile[1:]):
            starts = [start for start, *_ in tiles]
            with e.loop(starts[0], starts[-1] + 1, self.across) as tile:
                at = line, (planes, rows), tile.index, shape
                if self.blocks:
                    with e.loop(*channels) as block:
                        self._tile(e, scope, *at, e.bin("mul", block.index, whole), self.vectors, 0)
                if odd := self.channels - self.blocks * whole:
                    with e.when(last):
                        self._tile(e, scope, *at, e.i64(self.blocks * whole), -(-odd // self.lanes), odd % self.lanes)

    def _tiles(self) -> list[tuple[int, int, frozenset[tuple[int, int]]]]:
        """(first position, positions, (position, element of the window) pairs that are outside of x) of the tiles of a row."""
        side, out = self.wide, []
        for first in range(0, side.out, self.across):
            have = min(self.across, side.out - first)
            start = first * side.stride - side.low
            missing = ((t, q) for column, t, q in self._reads(have) if not 0 <= start + column < side.size)
            out.append((first, have, frozenset(missing)))
        return out

    def _reads(self, have: int) -> list[tuple[int, int, int]]:
        """(column of x, position, element of the window) of all reads of a tile, in the order of memory; columns count from that
        of its first window."""
        side = self.wide
        return sorted((t * side.stride + q * side.dilation, t, q) for t in range(have) for q in range(side.window))

    def _tile(
        self, e: Emitter, scope: Scope, line: V, seen: tuple[tuple[V, V] | None, tuple[V, V]], first: V,
        shape: tuple[int, frozenset[tuple[int, int]]], channel: V, vectors: int, tail: int,
    ) -> None:  # fmt: skip
        """Positions from `first` on, and `vectors` of channels; the last has `tail` channels (0: all). `seen`: planes and rows of
        the window that are inside x."""
        have, ty = shape[0], vector(stored(self.acc.dtype), self.lanes)
        tails = [0] * (vectors - 1) + [tail]
        start = [V("zeroinitializer", ty)] * vectors
        if self.bias:
            view, source = self.bias[0], Layout(self.bias[0].buffer.dtype, 0, self.bias[0].strides[0])
            place = source.at(e, self._address(e, scope, view), 0, channel)
            start = [self._load(e, source, source.at(e, place, 0, v * self.lanes), few) for v, few in enumerate(tails)]
        weights = self.w.buffer.dtype
        w = step(e, self._address(e, scope, self.w), channel, weights.itemsize)
        column = e.bin("sub", e.bin("mul", first, self.wide.stride), self.wide.low)
        x, each = self.image.at(e, line, 0, column), self.x.strides[-1] * self.x.buffer.dtype.itemsize
        firsts = [e.bin("add", channel, v * self.lanes) for v in range(vectors)]
        if self.group >= self.lanes:
            firsts = [e.bin("and", first, -self.group) for first in firsts]  # of the group
        planes, rows = seen
        each_row = self.wide.window * self.group * self.channels * weights.itemsize

        def summed(x: V, w: V, sums: Sequence[V]) -> list[V]:
            with e.loop(*rows, carried=sums) as loop:
                here = self.image.at(e, x, e.bin("mul", loop.index, self.high.dilation))
                of_row = step(e, w, loop.index, each_row)
                loop.next = self._taps(e, [step(e, here, first, each) for first in firsts], of_row, loop.carried, shape, tails)
            return loop.results

        if planes is None:
            totals = summed(x, w, start * have)
        else:
            with e.loop(*planes, carried=start * have) as loop:
                here = step(e, x, e.bin("mul", loop.index, self.deep.dilation), self.plane)
                loop.next = summed(here, step(e, w, loop.index, self.high.window * each_row), loop.carried)
            totals = loop.results
        if self.heavy:
            self._finish_in_turn(e, scope, totals, first, channel, have, tails)
            return
        for n, total in enumerate(totals):
            (t, v), mask = divmod(n, vectors), lane_mask(self.lanes, tail) if tail and n % vectors == vectors - 1 else None
            at = scope.child({self.axes[-2]: e.bin("add", first, t)})
            base = e.bin("add", channel, v * self.lanes)
            inside = at.child({self.acc: total}, vector=self.axes[-1], base=base, lanes=self.lanes, mask=mask)
            emit_statements(self.epilogue, inside)

    def _taps(
        self, e: Emitter, xs: Sequence[V], w: V, sums: Sequence[V], shape: tuple[int, frozenset[tuple[int, int]]],
        tails: Sequence[int],
    ) -> list[V]:  # fmt: skip
        """One row of the window, added to all sums. `xs`: where the channels of each vector begin."""
        how = shape, tails
        if self.group < SPREAD:
            return self._products(e, xs, w, sums, *how, range(self.group), self._moved)
        with e.loop(0, self.group, carried=sums) as loop:
            here = [step(e, x, loop.index, self.x.strides[-1] * self.x.buffer.dtype.itemsize) for x in xs]
            of_channel = step(e, w, loop.index, self.channels * self.w.buffer.dtype.itemsize)
            loop.next = self._products(e, here, of_channel, loop.carried, *how, range(1), self._spread)
        return loop.results

    def _products(
        self, e: Emitter, xs: Sequence[V], w: V, sums: Sequence[V], shape: tuple[int, frozenset[tuple[int, int]]],
        tails: Sequence[int], channels: range, values: Callable[[Emitter, V, int], list[V]],
    ) -> list[V]:  # fmt: skip
        """One row of the window and these channels of each group: elements of x in the order of memory."""
        (have, missing), out, of_w = shape, list(sums), Layout(self.w.buffer.dtype, self.channels)
        taps = [tap for tap in self._reads(have) if tap[1:] not in missing]
        for v, (x, few) in enumerate(zip(xs, tails)):
            rows = sorted({q * self.group + i for _, _, q in taps for i in channels})
            factors = {row: self._load(e, of_w, of_w.at(e, w, row, v * self.lanes), few) for row in rows}
            for column, readers in groupby(taps, key=lambda tap: tap[0]):
                places = [(t * len(tails) + v, q) for _, t, q in readers]
                for i, value in enumerate(values(e, self.image.at(e, x, 0, column), few)):
                    for n, q in places:
                        factor = factors[q * self.group + i]
                        if self.acc.dtype.is_float:
                            out[n] = e.intrinsic("fmuladd", value, factor, out[n])
                        else:
                            out[n] = e.bin("add", out[n], e.bin("mul", value, factor))
        return out

    def _moved(self, e: Emitter, at: V, few: int) -> list[V]:
        """For each channel of a group, its element of x in all lanes of the group, by moving lanes."""
        source = Layout(self.x.buffer.dtype, 0, self.x.strides[-1])
        whole = self._load(e, source, at, few)
        lanes = range(self.lanes)
        moved = ([lane - lane % self.group + i for lane in lanes] for i in range(self.group))
        return [whole] if self.group == 1 else [e.shuffle(whole, picks) for picks in moved]

    def _spread(self, e: Emitter, at: V, few: int) -> list[V]:
        """The same for the first channel of the groups that begin at `at`, by loading it into all lanes."""
        source, stride = Layout(self.x.buffer.dtype, 0, 0), self.x.strides[-1] * self.x.buffer.dtype.itemsize
        value = self._load(e, source, at, 0)
        for first in range(self.group, few or self.lanes, self.group):
            before = lane_mask(self.lanes, first)
            value = e.select(before, value, self._load(e, source, e.gep(at, first * stride), 0))
        return [value]

    def _load(self, e: Emitter, source: Layout, at: V, tail: int) -> V:
        return load_line(e, at, source, self.lanes, self.acc.dtype, tail)

    def _finish_in_turn(
        self, e: Emitter, scope: Scope, totals: Sequence[V], first: V, channel: V, have: int, tails: Sequence[int]
    ) -> None:
        """The epilogue as a loop over the tile's positions, whose sums are in scratch."""
        size, kept, vectors = self.acc.dtype.itemsize, e.gep(SCRATCH, self.sums_at), len(tails)
        for n, total in enumerate(totals):
            e.store(total, e.gep(kept, n * self.lanes * size), self.lanes * size)
        columns = vectors * self.lanes - (self.lanes - tails[-1] if tails[-1] else 0)
        with e.loop(0, have) as t:
            at = scope.child({self.axes[-2]: e.bin("add", first, t.index)})
            hoist(self.epilogue, at)
            line = step(e, kept, t.index, vectors * self.lanes * size)

            def element(c: V, line: V = line) -> V:
                return e.load(totals[0].ty, step(e, line, c, size), size)

            emit_epilogue(self.epilogue, at, self.acc, self.axes[-1], element, columns, self.lanes, channel, unroll=True)
