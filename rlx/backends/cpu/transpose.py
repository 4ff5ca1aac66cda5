"""Transposing loops: strided loads done as square tiles, transposed in registers.

Lanes run along the last dimension, as in every loop. If a load is contiguous along another dimension, a tile is loaded in that
direction, so that every cache line is read once, and then shuffled into the order of the lanes. Fused operations do not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.backends.cpu.loops import emit_statements, lanes_of
from rlx.backends.cpu.scope import Scope, address
from rlx.backends.shared.nest import distinct
from rlx.host import alu
from rlx.host.emit import Emitter, V, vector
from rlx.ir.kernel import Load, Loop, Stmt, Store, Var, coefficient, expressions
from rlx.records import record

TILES = 4  # most tiles in a block
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

    @property
    def block(self) -> int:
        """Number of rows in a block."""
        return self.size * min(TILES, self.rows // self.size)

    @property
    def blocks(self) -> int:
        return -(-self.rows // self.block)


def crossing(dims: Sequence[tuple[Var, int]], body: tuple[Stmt, ...], vector_bytes: int) -> Crossing | None:
    """The tiles of a loop nest with this body; None if no load is transposed, or one has no constant
    stride."""
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
    return Crossing(*rows[-1], loop, across, size)


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
        with e.loop(start, middle, n) as loop, e.loop(0, count * n, n, nonempty=True) as tile:
            row = e.bin("add nsw", first, tile.index)
            corner = scope.child({x.row: row}, vector=x.loop.var, base=loop.index, lanes=n)
            blocks = {load: min(n, 16 // load.buffer.dtype.itemsize) for load in x.loads}
            transposed = {load: _transposed(e, _read(x, load, corner), block) for load, block in blocks.items()}
            for i in range(n):
                inner = scope.child({x.row: e.bin("add nsw", row, i)}, vector=x.loop.var, base=loop.index, lanes=n)
                inner.moved(corner, {x.row: i})
                for load, found in transposed.items():
                    inner.memo[id(load)] = alu.from_memory(e, found[i], load.buffer.dtype)
                emit_statements(x.loop.body, inner)
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


def _read(x: Crossing, load: Load, corner: Scope) -> list[V]:
    """Load the tile at `corner` in memory order: one vector along the rows for each column."""
    e, dtype = corner.e, load.buffer.dtype
    ty, first = vector(alu.memory_type(dtype), x.size), e.freeze(address(load.buffer, load.index, corner.scalar))
    step = coefficient(load.index, x.loop.var)
    assert step is not None  # see `crossing`
    return [e.load(ty, e.gep(first, j * step * dtype.itemsize), dtype.itemsize) for j in range(x.size)]


def _transposed(e: Emitter, rows: list[V], block: int) -> list[V]:
    """Transpose a square tile of blocks of `block` lanes (128 bits): first elements are interleaved inside the blocks, then whole
    blocks are exchanged. Each of these shuffles is one instruction, of a kind that LLVM recognises soon."""
    n, step, rows = len(rows), 1, list(rows)
    columns = [list(range(n)) for _ in rows]  # of the lanes of each row
    while step < n:
        half = block // 2
        starts = [b + g for b in range(0, n, block) for g in range(0, half, step)] if step < block else range(0, n, 2 * block)
        length, apart = (step, half) if step < block else (block, block)
        runs = [[s + n * second + i for i in range(length)] for s in starts for second in (0, 1)]
        if step >= block:
            runs.sort()  # all blocks of the first row before those of the second
        low = [i for run in runs for i in run]
        for r in (r for r in range(n) if not r & step):
            a, b, both = rows[r], rows[r + step], columns[r] + columns[r + step]
            for at, picks in ((r, low), (r + step, [i + apart for i in low])):
                rows[at], columns[at] = e.shuffle(a, picks, b), [both[i] for i in picks]
        step *= 2
        if step == block < n:
            rows = [e.fence(row) for row in rows]
    return [row for _, row in sorted(zip((c[0] for c in columns), rows), key=lambda found: found[0])]


__all__ = ["Crossing", "crossing", "emit_tiles"]
