"""Elementwise kernels with transposing loads: tiles of these loads go through shared memory, so that memory is read and
written in whole cache lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.vectors import width
from rlx.ir.dtype import DType
from rlx.ir.kernel import Buffer, Grid, Kernel, Let, Load, Store, Var, coefficient, walk
from rlx.records import record

SIDES = (64, 32)  # of a tile, the largest that fits first
LEAST_SIDE = 8  # shorter axes gain nothing: a line of memory holds more
STATIC_BYTES = 48 << 10  # shared memory of a block, without opting in to more


@record
class TileLaunch(Launch):
    """A block computes `rows` points of grid axis `across` by `columns` of the last. `staged`: the loads that are contiguous
    along `across`."""

    across: int = 0
    rows: int = 0
    columns: int = 0
    staged: tuple[Load, ...] = ()

    @property
    def tiles(self) -> Grid:
        """The grid in tiles."""
        side = {self.across: self.rows, len(self.kernel.grid) - 1: self.columns}
        return tuple((var, -(-n // side.get(axis, 1))) for axis, (var, n) in enumerate(self.kernel.grid))

    @property
    def down(self) -> tuple[Var, int]:
        return self.kernel.grid[self.across]

    @property
    def along(self) -> tuple[Var, int]:
        return self.kernel.grid[-1]

    @property
    def blocks(self) -> int:
        return math.prod(n for _, n in self.tiles)


def in_tiles(at: Launch) -> Launch:
    """`at`, or the kernel in tiles if that reads memory in longer runs."""
    kernel = at.kernel
    plain = kernel.grid and all(isinstance(s, Let | Store) for s in kernel.body)
    if at.team > 1 or not plain or kernel.locals or kernel.limits:
        return at
    strided = [x for x in dict.fromkeys(walk(kernel.body)) if isinstance(x, Load) and _movable(x, kernel)]
    found = Counter(axis for x in strided for axis, (var, _) in enumerate(kernel.grid[:-1]) if coefficient(x.index, var) == 1)
    if not found:
        return at
    across = found.most_common(1)[0][0]
    (down, tall), (along, wide) = kernel.grid[across], kernel.grid[-1]
    staged = tuple(x for x in strided if coefficient(x.index, down) == 1)
    for side in SIDES:
        rows, columns = (min(side, 1 << (n - 1).bit_length()) for n in (tall, wide))
        fits = sum(columns * pitch(rows, x.buffer.dtype) * x.buffer.dtype.itemsize for x in staged) <= STATIC_BYTES
        if fits and min(rows, columns) >= LEAST_SIDE:
            size = width(kernel.body, (), along, wide)
            return TileLaunch(kernel, 1, at.threads, vector=size, across=across, rows=rows, columns=columns, staged=staged)
    return at


def pitch(rows: int, dtype: DType) -> int:
    """Elements between the lines of a tile: an odd number of banks."""
    return rows + max(1, 4 // dtype.itemsize)


def _movable(x: Load, kernel: Kernel) -> bool:
    """True for a load across the last axis that may be done before the others, by another thread."""
    depends = [e for e in walk((x.index, x.guard)) if isinstance(e, Load | Var)]
    return (
        isinstance(x.buffer, Buffer)
        and not x.buffer.writable
        and coefficient(x.index, kernel.grid[-1][0]) not in (None, 0, 1)
        and {v for v, _ in kernel.grid}.issuperset(depends)
    )


class TileTransposer(CudaWriter):
    launch: TileLaunch

    def coordinates(self) -> Iterator[str]:
        """The first point of this block's tile."""
        at = self.launch
        yield "rlx_uindex point = blockIdx.x;"
        for var, n in reversed(at.tiles):
            side = {at.down[0]: at.rows, at.along[0]: at.columns}.get(var, 1)
            yield f"const rlx_index {self.name(var, 'g')}{'_first' * (side > 1)} = point % {n}{f' * {side}' * (side > 1)};"
            yield f"point /= {n};"

    def body(self) -> None:
        at, (var, _), size = self.launch, self.launch.along, self.launch.vector
        row, column = self.y, self.x = self.names[at.down[0]], self.names[var]
        self.places: dict[int, str] = {}
        for x in at.staged:
            self.stage(x)
        self.line("__syncthreads();")
        each = at.columns // size
        with self.each_of(at.rows * each):
            self.line(f"const rlx_index {row} = {row}_first + e / {each}, {column}_0 = {column}_first + e % {each} * {size};")
            self.stop_outside(row, f"{column}_0")
            if size > 1:
                self.in_vectors(self.kernel.body, (), var, size, f"{column}_0")
            else:
                self.line(f"const rlx_index {column} = {column}_0;")
                self.block(self.kernel.body)

    @contextmanager
    def each_of(self, count: int) -> Iterator[None]:
        """A loop over `count` parts of the tile, shared by the threads; `e` is its variable."""
        threads = self.launch.threads
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {-(-count // threads)}; n++) {{"]):
            self.line(f"const int e = n * {threads} + threadIdx.x;")
            if count % threads:
                self.line(f"if (e >= {count}) continue;")
            yield

    def stop_outside(self, row: str, column: str) -> None:
        at = self.launch
        ends = (row, at.down[1], at.rows), (column, at.along[1], at.columns)
        outside = [f"{name} >= {extent}" for name, extent, side in ends if extent % side]
        if outside:
            self.line(f"if ({' || '.join(outside)}) continue;")

    def stage(self, x: Load) -> None:
        """Load a tile, adjacent threads along `across`; lines of the tile have equal last coordinates."""
        at, tile, row, column, element = self.launch, self.fresh("s"), self.y, self.x, CUDA.element(x.buffer.dtype)
        size = width((), (x,), *at.down)
        self.line(f"__shared__ {element} {tile}[{at.columns}][{pitch(at.rows, x.buffer.dtype)}];")
        with self.each_of(at.rows * at.columns // size):
            each = at.rows // size
            self.line(f"const rlx_index {row} = {row}_first + e % {each} * {size}, {column} = {column}_first + e / {each};")
            self.stop_outside(row, column)
            guard = "" if x.guard is None else f"if ({self.value(x.guard)}) "
            self.line(f"{element} got[{size}]{' = {}' * bool(guard)};")
            self.line(f"{guard}rlx_fetch<{size}>(got, {self.names[x.buffer]} + {self.value(x.index)});")
            self.line("#pragma unroll")
            self.line(f"for (int v = 0; v < {size}; v++) {tile}[e / {each}][e % {each} * {size} + v] = got[v];")
        self.places[id(x)] = tile

    def load(self, e: Load) -> str:
        if id(e) not in self.places:
            return super().load(e)
        at = self.launch
        column, row = f"{self.names[at.along[0]]} - {self.x}_first", f"{self.names[at.down[0]]} - {self.y}_first"
        text = CUDA.loads.get(e.buffer.dtype.name, "{0}[{1}]").format(f"{self.places[id(e)]}[{column}]", row)
        return self.fix("x", e.dtype, text)


__all__ = ["TileLaunch", "TileTransposer", "in_tiles"]
