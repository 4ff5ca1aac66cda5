"""Transposing loops: strided loads done as square tiles, transposed in registers.

Lanes run along the last dimension, as in every loop. If a load is contiguous along another dimension, a tile is loaded in that
direction, so that every cache line is read once, and then shuffled into the order of the lanes. Fused operations do not change.

Tiles follow each other along the rows that are written, a few lines at a time. If those rows are a multiple of 4 KB apart, all
lines of a tile belong to one set of the first-level cache, which pushes out lines that wait for their stores: 1024 x 1024 took
three times as long. Then the tiles of a block go to scratch memory first, and from there row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from rlx.backends.cpu.kernels.tile import transposed
from rlx.backends.cpu.loops import emit_statements, lanes_of
from rlx.backends.cpu.scope import Scope, address
from rlx.backends.shared.nest import distinct
from rlx.host import alu
from rlx.host.emit import Emitter, V, vector
from rlx.ir.kernel import Buffer, Load, Local, Loop, Stmt, Store, Var, coefficient, expressions
from rlx.records import record

TILES, RUN = 32, 4  # most tiles in a block, and in a run along the rows that are written: lines of few rows are read in turn
STREAMED_TILES, STREAMED_RUN = 4, 1  # of what is written past the caches, where nothing is prefetched: few rows are written
STAGED_TILES, STAGED_RUN = 2, 8  # of a part in scratch memory: a third of the first-level cache
SETS = 4096  # bytes between addresses of the same set
KEPT = 1 << 19  # smaller results stay in the second-level cache, where that does not matter
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
    tiles: int = TILES  # most in a block
    run: int = RUN  # tiles of a run
    staged: tuple[Local, ...] = ()  # the scratch memory of each load, if the tiles go there first

    @property
    def block(self) -> int:
        """Number of rows in a block."""
        return self.size * min(self.tiles, self.rows // self.size)

    @property
    def pitch(self) -> int:
        """Elements from row to row in scratch memory: another set for each row."""
        return self.size * (self.run + 1)

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block)


def crossing(
    dims: Sequence[tuple[Var, int]], body: tuple[Stmt, ...], vector_bytes: int,
    streams: Collection[Buffer | Local] = (), prefetched: bool = False,
) -> Crossing | None:
    """The tiles of a loop nest with this body; None if no load is transposed, or one has no constant
    stride. `streams`: buffers that are written past the caches.
    `prefetched`: see rlx.host.processor.fetches_ahead."""
    if len(dims) < 2 or len(body) != 1 or not isinstance(s := body[0], Store) or s.guard is not None:
        return None
    loop = Loop(*dims[-1], body, vector=True)
    loads = [x for x in distinct(expressions(body)) if isinstance(x, Load)]
    across = tuple(x for x in loads if coefficient(x.index, loop.var) not in (0, 1, -1))
    rows = [(v, n) for v, n in dims[:-1] if all(coefficient(x.index, v) == 1 for x in across)]
    size = lanes_of(loop, vector_bytes)
    simple = all(x.guard is None and coefficient(x.index, loop.var) is not None for x in across)
    if not across or not simple or coefficient(s.index, loop.var) != 1 or not rows or min(rows[-1][1], loop.extent) < size:
        return None
    row, itemsize = rows[-1][0], s.buffer.dtype.itemsize
    plain = Crossing(*rows[-1], loop, across, size)
    apart = coefficient(s.index, row)
    if s.buffer in streams:
        return plain if prefetched else replace(plain, tiles=STREAMED_TILES, run=STREAMED_RUN)
    if not apart or apart * itemsize % SETS or s.buffer.size * itemsize <= KEPT:
        return plain
    places = STAGED_TILES * size * size * (STAGED_RUN + 1)
    return replace(plain, run=STAGED_RUN, staged=tuple(Local(f"staged{n}", x.buffer.dtype, places) for n, x in enumerate(across)))


def emit_tiles(x: Crossing, scope: Scope, bounds: tuple[V, V] | None, rest: Rest) -> None:
    """Emit block number `x.row`, along the whole loop or its part in `bounds`. `rest` emits the remainder that no tile covers."""
    e, n = scope.e, x.size
    block = scope.bindings[x.row]  # not through `expr`, which would cache it for the rows as well
    first = e.bin("mul nsw", block, x.block)
    start, stop = bounds or (e.i64(0), e.i64(x.loop.extent))
    middle = e.bin("add nsw", start, e.bin("and", e.bin("sub nsw", stop, start), -n))

    def rows(begin: int, end: int, part: tuple[V, V] | None) -> None:
        with e.loop(begin, end) as at:
            rest(scope.child({x.row: e.bin("add nsw", first, at.index)}), part)

    def tiles(count: int) -> None:
        part = n * (STAGED_TILES if x.staged else count)
        with e.loop(start, middle, x.run * n) as run, e.loop(0, count * n, part, nonempty=True) as group:
            end = e.intrinsic("smin", e.bin("add nsw", run.index, x.run * n), middle)
            top = e.bin("add nsw", first, group.index)
            height = e.intrinsic("smin", e.i64(part), e.bin("sub nsw", e.i64(count * n), group.index))
            down, along = e.loop(0, height, n, nonempty=True), e.loop(run.index, end, n, nonempty=True)
            with along if x.staged else down as outer, down if x.staged else along as inner:  # staged: adjacent lines in turn
                tile, loop = (inner, outer) if x.staged else (outer, inner)
                corner = scope.child({x.row: e.bin("add nsw", top, tile.index)}, vector=x.loop.var, base=loop.index, lanes=n)
                places = [_place(x, scope, m, tile.index, e.bin("sub nsw", loop.index, run.index)) for m in range(len(x.staged))]
                _emit_tile(x, scope, corner, places)
            if x.staged:
                with e.loop(0, height, nonempty=True) as row, e.loop(run.index, end, n, nonempty=True) as loop:
                    here = scope.child({x.row: e.bin("add nsw", top, row.index)}, vector=x.loop.var, base=loop.index, lanes=n)
                    for m, load in enumerate(x.loads):
                        place = _place(x, scope, m, row.index, e.bin("sub nsw", loop.index, run.index))
                        _know(here, load, _vector(e, load, n, place))
                    emit_statements(x.loop.body, here)
        if x.loop.extent % n:
            rows(0, count * n, (middle, stop))

    whole, over = divmod(x.rows, x.block)
    if not over:
        return tiles(x.block // n)
    with e.when(e.cmp("slt", block, whole)):
        tiles(x.block // n)
    with e.when(e.cmp("sge", block, whole)):
        if over >= n:
            tiles(over // n)
        rows(over // n * n, over, bounds)


def _emit_tile(x: Crossing, scope: Scope, corner: Scope, places: Sequence[V]) -> None:
    """Transpose the tile of each load at `corner`, and compute and store its rows, or leave them at `places`."""
    e, n, (row, column) = scope.e, x.size, (corner.scalar.bindings[v] for v in (x.row, x.loop.var))
    squares = {load: transposed(e, _read(x, load, corner), load.buffer.dtype.itemsize) for load in x.loads}
    for place, (load, found) in zip(places, squares.items()):
        itemsize = load.buffer.dtype.itemsize
        for i, vector_of_row in enumerate(found):
            e.store(vector_of_row, e.gep(place, i * x.pitch * itemsize), itemsize)
    for i in range(0 if places else n):
        inner = scope.child({x.row: e.bin("add nsw", row, i)}, vector=x.loop.var, base=column, lanes=n)
        inner.moved(corner, {x.row: i})
        for load, found in squares.items():
            _know(inner, load, found[i])
        emit_statements(x.loop.body, inner)


def _vector(e: Emitter, load: Load, lanes: int, place: V) -> V:
    dtype = load.buffer.dtype
    return e.load(vector(alu.memory_type(dtype), lanes), place, dtype.itemsize)


def _know(scope: Scope, load: Load, raw: V) -> None:
    scope.memo[id(load)] = alu.from_memory(scope.e, raw, load.buffer.dtype)


def _place(x: Crossing, scope: Scope, number: int, row: V, column: V) -> V:
    """The address of an element of staged block `number`."""
    e, panel = scope.e, x.staged[number]
    at = e.bin("add nsw", e.bin("mul nsw", row, x.pitch), column)
    return e.gep(scope.pointers[panel], e.bin("mul nsw", at, panel.dtype.itemsize))


def _read(x: Crossing, load: Load, corner: Scope) -> list[V]:
    """Load the tile at `corner` in memory order: one vector along the rows for each column."""
    e, dtype = corner.e, load.buffer.dtype
    first = e.freeze(address(load.buffer, load.index, corner.scalar))
    step = coefficient(load.index, x.loop.var)
    assert step is not None  # see `crossing`
    return [_vector(e, load, x.size, e.gep(first, j * step * dtype.itemsize)) for j in range(x.size)]


__all__ = ["Crossing", "crossing", "emit_tiles"]
