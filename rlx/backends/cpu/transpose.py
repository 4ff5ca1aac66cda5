"""Transposing loops: strided loads done as square tiles, transposed in registers.

Lanes run along the last dimension, as in every loop. If a load is contiguous along another dimension, a tile is loaded in that
direction, so that every cache line is read once, and then shuffled into the order of the lanes. Fused operations do not change.
A tile that would reach past the end starts earlier, if it does no harm that elements are computed twice.

Tiles follow each other along the rows that are read, a few of them side by side. Prefetchers do not follow so many rows, and
rows a multiple of 4 KB apart have their lines in one set of the first-level cache, which takes 10 cycles for each line of one
set, but 2.5 where lines of four sets take turns (Zen 4). So from large operands the lines of the tiles to come are prefetched
into the second-level cache, a few of one row after a few of another.

Where prefetches are worth it in every loop (`fetches_ahead`), a store that waits for its line is what takes longest. There tiles
follow each other along the rows that are written, in strips as high as two lines that are read, and the lines to be written are
prefetched, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rlx.backends.cpu.abi import LINE
from rlx.backends.cpu.kernels.tile import transposed
from rlx.backends.cpu.loops import MAX_LANES, emit_statements, lanes_of
from rlx.backends.cpu.scope import Scope, access, address
from rlx.host import alu
from rlx.host.emit import Emitter, V, vector
from rlx.host.processor import fetches_ahead
from rlx.ir.kernel import Buffer, Load, Local, Loop, Stmt, Store, Var, coefficient, const, expressions
from rlx.ir.nest import distinct, stores, substitute
from rlx.ir.target import Target
from rlx.records import record

LEAST_LANES = 4  # of a tile
MOST_CHANNELS = 4  # that are interleaved, element by element, with one shuffle for each other channel
MOST_LANES = 32  # of one whose results stay in cache: larger ones of bytes take more registers than there are
TILES, RUN = 32, 4  # most tiles in a block, and side by side: lines of few rows are read in turn
PART = 4 * LINE  # bytes of each row that are prefetched together
ROWS, STREAMED_ROWS = 64, 32  # prefetched rows that are read in turn; where the results are written past the caches
FAR_BYTES = 16 << 20  # so many come from memory: parts of rows in vectors below a line are then prefetched several times
STRIP, MOST_STRIP, LEAST_STRIPS = 2 * LINE, 4, 8  # bytes of each row that a strip reads; most tiles in its height; in a row
READ_AHEAD, WRITTEN_AHEAD = 4, 2  # tiles from one of a strip to that whose lines are prefetched
Rest = Callable[[Scope, tuple[V, V] | None], None]  # (scope, bounds): emits the last dimension, or its part in bounds


@record
class Crossing:
    """`loads` are contiguous along `row` (extent `rows`) and strided along `loop`, the last dimension. Tiles are `size` by
    `size`. A block is several adjacent tiles, so that consecutive cache lines are read together."""

    row: Var
    rows: int
    loop: Loop
    loads: tuple[Load, ...]
    size: int
    again: bool  # elements may be computed twice
    run: int = RUN  # tiles side by side
    part: int = 0  # tiles of each row that are prefetched together; 0: nothing is prefetched
    strips: bool = False  # of `part` tiles, along the rows that are written
    channels: int = 0  # instead of tiles: elements of so many rows, or columns, lie interleaved in memory
    splits: bool = False  # those of rows, where they are loaded; else those of columns, where they are stored

    @property
    def tiles(self) -> int:
        """Number of tiles that cover the rows of a block."""
        return min(TILES, -(-self.rows // self.size))

    @property
    def block(self) -> int:
        """Number of rows in a block."""
        return self.size * self.tiles

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block)

    @property
    def whole_lines(self) -> bool:
        """Whether each vector that is stored is a cache line, so that it may go past the caches."""
        (store,) = stores(self.loop.body)
        return self.size * store.buffer.dtype.itemsize == LINE and self.loop.extent % self.size == 0

    def inside(self, e: Emitter, at: V, end: V | int, extent: int) -> V:
        """`at`, or where a tile that ends at `end` starts, if that is earlier. `extent`: of the whole dimension."""
        early = self.again and extent % self.size
        return e.intrinsic("smin", at, e.bin("sub nsw", e.i64(end), self.size)) if early else at


def collapsed(dims: list[tuple[Var, int]], body: tuple[Stmt, ...]) -> tuple[list[tuple[Var, int]], tuple[Stmt, ...]]:
    """The dimensions and the body of a loop nest that only moves elements, with adjacent dimensions as one where every index is
    linear over both: the rows and columns of an image."""
    if len(body) != 1 or not isinstance(s := body[0], Store) or s.guard is not None or not _moves(s):
        return dims, body
    for at in range(len(dims) - 2, -1, -1):
        (high, n), (low, m) = dims[at : at + 2]
        steps = [(coefficient(x.index, high), coefficient(x.index, low)) for x in (s, s.value)]  # type: ignore[union-attr]
        if all(a is not None and b is not None and a == b * m for a, b in steps):
            dims = [*dims[:at], (low, n * m), *dims[at + 2 :]]
            (s,) = body = substitute(body, {high: const(0)})
    return dims, body


def crossing(
    dims: Sequence[tuple[Var, int]], body: tuple[Stmt, ...], target: Target, streams: Collection[Buffer | Local] = ()
) -> Crossing | None:
    """The tiles of a loop nest with this body; None if no load is transposed, or one has no constant
    stride. `streams`: buffers that are written past the caches."""
    if len(dims) < 2 or len(body) != 1 or not isinstance(s := body[0], Store) or s.guard is not None:
        return None
    loop = Loop(*dims[-1], body, vector=True)
    loads = [x for x in distinct(expressions(body)) if isinstance(x, Load)]
    across = tuple(x for x in loads if coefficient(x.index, loop.var) not in (0, 1, -1))
    rows = [(v, n) for v, n in dims[:-1] if all(coefficient(x.index, v) == 1 for x in across)]
    simple = all(x.guard is None and coefficient(x.index, loop.var) is not None for x in across)
    if not across or not simple or coefficient(s.index, loop.var) != 1 or not rows:
        return None
    itemsize, streamed = s.buffer.dtype.itemsize, s.buffer in streams
    wide = min(MAX_LANES, target.vector_bytes // itemsize)
    if channels := _channels(s, rows[-1], loop, wide):
        return Crossing(*rows[-1], loop, across, wide, again=True, channels=channels[0], splits=channels[1])
    lanes, whole = lanes_of(loop, target.vector_bytes), target.vector_bytes // itemsize
    alike = streamed and [x.buffer.dtype.itemsize for x in across] == [itemsize]
    if (alike or _moves(s)) and loop.extent % whole == 0:  # elsewhere most stores of whole lines would be to two of them
        lanes = whole if streamed else min(whole, MOST_LANES)
    while lanes > min(rows[-1][1], loop.extent):
        lanes //= 2
    if lanes < LEAST_LANES:
        return None
    x = Crossing(*rows[-1], loop, across, lanes, again=len(across) == len(loads))
    part = PART // (lanes * itemsize)
    if lanes < part or 2 * s.buffer.size * itemsize <= target.core_cache_bytes:
        return x
    waits = _moves(s) or s.buffer.dtype.compute.itemsize == itemsize  # for memory, rather than for conversions
    waits = waits and x.rows * itemsize >= LEAST_STRIPS * STRIP and not (streamed and x.whole_lines)
    if waits and fetches_ahead(target.features):
        return replace(x, part=min(MOST_STRIP, STRIP // (lanes * itemsize)), run=1, strips=True)
    if lanes < whole and 2 * s.buffer.size * itemsize >= FAR_BYTES and not fetches_ahead(target.features):
        return replace(x, part=2, run=1)
    return replace(x, part=part, run=max(2, (STREAMED_ROWS if streamed else ROWS) // lanes, TILES // x.tiles))


def _channels(s: Store, row: tuple[Var, int], loop: Loop, lanes: int) -> tuple[int, bool] | None:
    """How many rows have their elements interleaved where they are loaded (True), or columns where they are stored (False). None:
    too many, or of fewer pixels than there are lanes, or they are computed."""
    if not _moves(s):
        return None
    loads = row[1], coefficient(s.value.index, loop.var), loop.extent, True  # type: ignore[union-attr]
    both = loads, (loop.extent, coefficient(s.index, row[0]), row[1], False)
    return next(((n, at) for n, step, pixels, at in both if n == step and 1 < n <= MOST_CHANNELS and pixels >= lanes), None)


def _moves(s: Store) -> bool:
    """Whether the store writes the bits that it loads."""
    return isinstance(s.value, Load) and s.value.guard is None and s.value.buffer.dtype == s.buffer.dtype


def emit_tiles(x: Crossing, scope: Scope, bounds: tuple[V, V] | None, rest: Rest) -> None:
    """Emit block number `x.row`, along the whole loop or its part in `bounds`. `rest` emits the remainder that no tile covers."""
    e, n = scope.e, x.size
    block = scope.bindings[x.row]  # not through `expr`, which would cache it for the rows as well
    first = e.bin("mul nsw", block, x.block)
    start, stop = bounds or (e.i64(0), e.i64(x.loop.extent))
    if x.channels:
        last = e.intrinsic("smin", e.bin("add nsw", first, x.block), e.i64(x.rows))
        return _emit_channels(x, scope, *((start, stop) if x.splits else (first, last)))
    height = e.bin("sub nsw", e.i64(x.rows), first) if x.rows % x.block else e.i64(x.block)
    height, emit = e.intrinsic("smin", height, e.i64(x.block)), _emit_strips if x.strips else _emit_block
    if x.again:
        return emit(x, scope, first, height, start, stop)
    whole, middle = e.bin("and", height, -n), e.bin("add nsw", start, e.bin("and", e.bin("sub nsw", stop, start), -n))
    emit(x, scope, first, whole, start, middle)
    remainders = (x.loop.extent % n, e.i64(0), whole, (middle, stop)), (x.rows % n, whole, height, bounds)
    for begin, end, part in (remainder[1:] for remainder in remainders if remainder[0]):
        with e.loop(begin, end) as at:
            rest(scope.child({x.row: e.bin("add nsw", first, at.index)}), part)


def _emit_channels(x: Crossing, scope: Scope, start: V, stop: V) -> None:
    """Move the elements of all channels from `start` to `stop`: as many vectors are loaded as are stored."""
    e, n, count, (load,), (store,) = scope.e, x.size, x.channels, x.loads, stores(x.loop.body)
    splits, itemsize = x.splits, store.buffer.dtype.itemsize
    channel, pixel, pixels = (x.row, x.loop.var, x.loop.extent) if splits else (x.loop.var, x.row, x.rows)
    with e.loop(start, stop, n) as at:
        first = x.inside(e, at.index, stop, pixels)

        def place(a: Load | Store, number: int, together: bool) -> V:
            here = scope.child({channel: e.i64(0 if together else number), pixel: first})
            return e.gep(address(a.buffer, a.index, here), number * n * itemsize if together else 0)

        loaded = [_vector(e, load, n, place(load, k, splits)) for k in range(count)]
        for k in range(count):
            if splits:
                inner = scope.child({channel: e.i64(k)}, vector=pixel, base=first, lanes=n)
                access(store, inner, _picked(e, loaded, [divmod(at, n) for at in range(k, count * n, count)]))
            else:
                picks = [(at % count, at // count) for at in range(n * k, n * k + n)]
                e.store(_picked(e, loaded, picks), place(store, k, True), itemsize)


def _picked(e: Emitter, vectors: Sequence[V], picks: Sequence[tuple[int, int]]) -> V:
    """A vector of the elements at `picks`: (number of the vector, lane)."""
    found, n = vectors[0], len(picks)
    for number, other in enumerate(vectors[1:], 1):
        own = [lane if number == 1 and v == 0 else at for at, (v, lane) in enumerate(picks)]
        found = e.shuffle(found, [n + lane if v == number else kept for (v, lane), kept in zip(picks, own)], other)
    return found


def _emit_block(x: Crossing, scope: Scope, first: V, height: V, start: V, stop: V) -> None:
    """`height` rows from `first` on, along the loop from `start` to `stop`."""
    e, n, part = scope.e, x.size, (x.part or x.tiles) * x.size
    with e.loop(start, stop, x.run * n) as run, e.loop(0, height, part) as group:
        after, right = e.bin("add nsw", group.index, part), e.bin("add nsw", run.index, x.run * n)
        bottom, end = e.intrinsic("smin", after, height), e.intrinsic("smin", right, stop)
        with e.loop(group.index, bottom, n, nonempty=True) as down, e.loop(run.index, end, n, nonempty=True) as along:
            if x.part:
                wraps = e.cmp("sge", after, height)  # to the next run
                row, column = e.select(wraps, 0, after), e.select(wraps, right, run.index)
                tile = e.bin("mul nsw", e.bin("sub nsw", down.index, group.index), x.run)
                tile = e.bin("add nsw", tile, e.bin("sub nsw", along.index, run.index))
                _prefetch(x, scope, e.bin("add nsw", first, row), e.bin("add nsw", column, e.bin("udiv", tile, x.part)))
            _emit_tile(x, scope, e.bin("add nsw", first, down.index), along.index, stop)


def _emit_strips(x: Crossing, scope: Scope, first: V, height: V, start: V, stop: V) -> None:
    """As `_emit_block`, strip by strip, each from `start` to `stop`."""
    e, n, high = scope.e, x.size, x.part * x.size
    with e.loop(0, height, high) as strip, e.loop(start, stop, n) as along:
        after, ahead = e.bin("add nsw", strip.index, high), e.bin("add nsw", along.index, READ_AHEAD * n)
        wraps = e.cmp("sge", ahead, stop)  # to the next strip
        read = e.bin("add nsw", first, e.select(wraps, after, strip.index))
        column = e.select(wraps, e.bin("sub nsw", ahead, e.bin("sub nsw", stop, start)), ahead)
        with e.loop(strip.index, e.intrinsic("smin", after, height), n, nonempty=True) as down:
            part = e.bin("udiv", e.bin("sub nsw", down.index, strip.index), x.part)
            _prefetch(x, scope, read, e.bin("add nsw", column, part))
            row = e.bin("add nsw", first, down.index)
            _prefetch_written(x, scope, row, e.bin("add nsw", along.index, WRITTEN_AHEAD * n))
            _emit_tile(x, scope, row, along.index, stop)


def _prefetch(x: Crossing, scope: Scope, row: V, column: V) -> None:
    """Prefetch what adjacent tiles read together, from `row` on, in as many columns as there are such parts in a tile."""
    e, corner = scope.e, scope.child({x.row: row, x.loop.var: column})
    for load in x.loads:
        first, itemsize = e.freeze(address(load.buffer, load.index, corner)), load.buffer.dtype.itemsize
        for j in range(x.size // x.part):
            line = e.gep(first, j * (coefficient(load.index, x.loop.var) or 0) * itemsize)
            for at in range(0, STRIP if x.strips else PART, LINE):
                e.prefetch(e.gep(line, at), level=2)


def _prefetch_written(x: Crossing, scope: Scope, row: V, column: V) -> None:
    """Prefetch the first line that each row of a tile at row and column is written to."""
    e, (store,) = scope.e, stores(x.loop.body)
    first = e.freeze(address(store.buffer, store.index, scope.child({x.row: row, x.loop.var: column})))
    for i in range(x.size):
        e.prefetch(e.gep(first, i * (coefficient(store.index, x.row) or 0) * store.buffer.dtype.itemsize), writes=True)


def _emit_tile(x: Crossing, scope: Scope, row: V, column: V, stop: V) -> None:
    """Transpose the tile of each load at row and column, or where one that ends there starts; compute and store its rows."""
    e, n = scope.e, x.size
    row, column = x.inside(e, row, x.rows, x.rows), x.inside(e, column, stop, x.loop.extent)
    lanes = n if _moves(*stores(x.loop.body)) else min(n, lanes_of(x.loop, scope.vector_bytes))
    corner = scope.child({x.row: row}, vector=x.loop.var, base=column, lanes=n)
    squares = [_square(x, load, corner) for load in x.loads]
    for i in range(n):
        below = {x.row: e.bin("add nsw", row, i)}
        for at in range(0, n, lanes):
            inner = scope.child(below, vector=x.loop.var, base=e.bin("add nsw", column, at) if at else column, lanes=lanes)
            parts = [square[i] if lanes == n else e.shuffle(square[i], range(at, at + lanes)) for square in squares]
            _store(x, inner.moved(corner, {x.row: i, x.loop.var: at}), parts)


def _square(x: Crossing, load: Load, corner: Scope) -> list[V]:
    """The rows of the tile at `corner`, loaded in memory order, one vector along the rows for each column, and transposed."""
    e, itemsize = corner.e, load.buffer.dtype.itemsize
    first, step = e.freeze(address(load.buffer, load.index, corner.scalar)), coefficient(load.index, x.loop.var)
    assert step is not None  # see `crossing`
    return transposed(e, [_vector(e, load, x.size, e.gep(first, j * step * itemsize)) for j in range(x.size)], itemsize)


def _vector(e: Emitter, load: Load, lanes: int, place: V) -> V:
    return e.load(vector(alu.memory_type(load.buffer.dtype), lanes), place, load.buffer.dtype.itemsize)


def _store(x: Crossing, scope: Scope, loaded: Sequence[V]) -> None:
    """Compute and store a vector from those loaded, one of each load."""
    (store,) = stores(x.loop.body)
    if _moves(store):
        access(store, scope, loaded[0])
        return
    for load, raw in zip(x.loads, loaded):
        scope.memo[id(load)] = alu.from_memory(scope.e, raw, load.buffer.dtype)
    emit_statements(x.loop.body, scope)


__all__ = ["Crossing", "collapsed", "crossing", "emit_tiles"]
