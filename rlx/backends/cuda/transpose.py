"""Elementwise kernels with transposing loads: tiles of these loads go through shared memory, so that memory is read and
written in whole cache lines. Where rows of a result begin anywhere, a tile has a later part of some than of others, so that each
part begins with a sector of memory, and is stored in vectors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from rlx.backends.cuda.dialect import CUDA
from rlx.backends.cuda.peel import HEAD, LEAST, ORIGIN
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.rows import expr_key
from rlx.backends.cuda.schedule import MULTIPROCESSORS, Launch
from rlx.backends.cuda.vectors import BYTES, width
from rlx.ir.dtype import DType
from rlx.ir.kernel import Buffer, Expr, Grid, Kernel, Let, Load, Stmt, Store, Var, coefficient, const, k, walk
from rlx.ir.nest import substitute
from rlx.records import record

SIDES = (64, 32)  # of a tile, the largest that fits first
LENGTHS = (256, 128)  # of a tile of rows that begin anywhere, the longest that fits first
ENOUGH = 2 * MULTIPROCESSORS  # such tiles: of smaller tensors, more of the others are on their way at once
SECTOR, LINE = 32, 128  # bytes of memory that are written together, and that threads of a warp read of a row
NEAR = 8  # lanes that store adjacent vectors of a row that begins anywhere; the others have other rows
LOADS, WORDS = 16, 40  # of a thread at once, at most, and registers of them
LEAST_SIDE = 8  # shorter axes gain nothing: a line of memory holds more
STATIC_BYTES = 48 << 10  # shared memory of a block, without opting in to more


@record(eq=False)
class Shift:
    """Rows of a result that begin at element `start`. `body`: with a last coordinate that counts from HEAD on, at most `most`
    elements in front of a row, where a sector begins. `size`: elements of a vector. `packed`: of 32 bits."""

    start: Expr
    body: tuple[Stmt, ...]
    most: int
    size: int
    packed: int


@record
class TileLaunch(Launch):
    """A block computes `rows` points of grid axis `across` by `columns` of the last. `staged`: the loads that are contiguous
    along `across`."""

    across: int = 0
    rows: int = 0
    columns: int = 0
    staged: tuple[Load, ...] = ()
    shift: Shift | None = None

    @property
    def tall(self) -> int:
        """Lines of a tile, of equal last coordinates."""
        return self.columns + self.ahead

    @property
    def ahead(self) -> int:
        return self.shift.most if self.shift else 0

    def pitch(self, dtype: DType) -> tuple[int, int]:
        """Elements from a line of a tile to the next, and how many more where a vector of a thread ends: their lanes then read
        other banks."""
        if self.vector * dtype.itemsize < BYTES:
            return self.rows + max(1, 4 // dtype.itemsize), 0
        return self.rows, BYTES // dtype.itemsize

    def tile_size(self, dtype: DType) -> int:
        line, more = self.pitch(dtype)
        return self.tall * line + self.tall // self.vector * more

    @property
    def tiles(self) -> Grid:
        """The grid in tiles."""
        side, last = {self.across: self.rows, len(self.kernel.grid) - 1: self.columns}, self.along[0]
        counts = [(var, n + max(0, self.ahead - 1) * (var is last)) for var, n in self.kernel.grid]
        return tuple((var, -(-n // side.get(axis, 1))) for axis, (var, n) in enumerate(counts))

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
    shift, item = _shifted(kernel, staged, across), max(x.buffer.dtype.itemsize for x in staged)
    for side, moved in [*((n, shift) for n in LENGTHS if shift), *((n, None) for n in SIDES)]:
        most, size = (LINE // item, moved.size) if moved else (side, width(kernel.body, (), along, wide))
        rows, columns = (min(n, 1 << (extent - 1).bit_length()) for n, extent in ((most, tall), (side, wide)))
        sides = {"vector": size, "across": across, "rows": rows, "columns": columns, "shift": moved}
        found = TileLaunch(kernel, 1, at.threads, staged=staged, **sides)
        fits = sum(found.tile_size(x.buffer.dtype) * x.buffer.dtype.itemsize for x in staged) <= STATIC_BYTES
        if fits and min(rows, columns) >= LEAST_SIDE and (not moved or found.blocks >= ENOUGH):
            return found
    return at


def _shifted(kernel: Kernel, staged: tuple[Load, ...], across: int) -> Shift | None:
    """None: rows of results are short, or in vectors without more ado, or loads are not, which then take longer than stores."""
    (var, extent), inside = kernel.grid[-1], list(walk(kernel.body))
    touched = [x for x in inside if isinstance(x, Load | Store) and coefficient(x.index, var) == 1]
    stored = [x for x in touched if isinstance(x, Store)]
    if extent < LEAST or not stored:
        return None
    place = expr_key(stored[0].index, var)
    same = [x for x in touched if expr_key(x.index, var) == place]
    start, items = substitute(stored[0].index, {var: const(0)}), [x.buffer.dtype.itemsize for x in same]
    size = BYTES // max(items)
    known = {v for v, _ in kernel.grid}.issuperset(x for x in walk(start) if isinstance(x, Var | Load))
    read = all(width((), (x,), *kernel.grid[across]) * x.buffer.dtype.itemsize >= BYTES for x in staged)
    if not known or not read or size == 1 or width(kernel.body, (), var, extent) >= size:
        return None
    memo: dict[int, Expr] = {id(x.index): k.add(k.mul(ORIGIN, size), var) for x in same} | {id(x): x for x in staged}
    body = substitute(kernel.body, {var: k.add(HEAD, var)}, memo)
    return Shift(start, body, SECTOR // min(items), size, max(1, 4 // max(x.buffer.dtype.itemsize for x in staged)))


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
        with self.each_of(at.rows * each, -(-at.rows * each // at.threads)):
            if at.shift:
                return self.shifted(at.shift)
            self.line(f"const rlx_index {row} = {row}_first + e / {each}, {column}_0 = {column}_first + e % {each} * {size};")
            self.stop_outside(row, f"{column}_0")
            self.point_into_tiles(f"{column}_0 - {column}_first")
            if size > 1:
                self.in_vectors(self.kernel.body, (), var, size, f"{column}_0")
            else:
                self.line(f"const rlx_index {column} = {column}_0;")
                self.block(self.kernel.body)

    def shifted(self, s: Shift) -> None:
        """Adjacent lanes have some adjacent vectors, of rows in different banks."""
        at, (var, extent), size, row, first = self.launch, self.launch.along, s.size, self.y, f"{self.x}_0"
        lanes, packed = min(NEAR, at.columns // size), s.packed if at.rows % (4 * s.packed) == 0 else 1
        self.line(f"const unsigned of = e / {lanes} % {at.rows}, near = e % {lanes} + e / {lanes * at.rows} * {lanes};")
        place = f"of / {4 * packed} * {4 * packed} + of % 4 * {packed} + of / 4 % {packed}" if packed > 1 else "of"
        self.line(f"const rlx_index {row} = {row}_first + {place}, {first} = {self.x}_first + near * {size};")
        if at.down[1] % at.rows:
            self.line(f"if ({row} >= {at.down[1]}) continue;")
        self.line(f"const rlx_index start = {self.value(s.start)}, head = -(start & {s.most - 1});")
        self.line(f"const rlx_index origin = (start + head) / {size};")
        self.names[HEAD], self.names[ORIGIN] = "head", "origin"
        self.point_into_tiles(f"near * {size} + head + {s.most}")
        with self.scope([f"if ({first} + head >= 0 && {first} + head <= {extent - size}) {{"]):
            self.in_vectors(s.body, (), var, size, first)
        self.names[var] = name = self.fresh("i")
        inside = f"{name} < {first} + {size} && {name} + head < {extent}"
        loop = f"for (rlx_index {name} = max({first}, -head); {inside}; {name}++) {{"
        with self.scope(["else {", "#pragma unroll 1", loop], 2):
            self.block(s.body)

    def point_into_tiles(self, line: str) -> None:
        """Pointers to the elements at a thread's first coordinates, in line number `line`."""
        at = self.launch
        self.line(f"const unsigned line = {line};")
        for x in at.staged:
            tile, step = self.places[id(x)], at.pitch(x.buffer.dtype)[0]
            self.line(f"const auto* const {tile}_0 = {tile} + line * {step} + ({self.y} - {self.y}_first);")

    @contextmanager
    def each_of(self, count: int, turns: int, first: str = "") -> Iterator[None]:
        """A loop over `turns` parts of a tile's `count` for each thread; `e` is its variable."""
        threads = self.launch.threads
        with self.scope(["#pragma unroll", f"for (int n = 0; n < {turns}; n++) {{"]):
            self.line(f"const unsigned e = {f'({first}n)' if first else 'n'} * {threads} + threadIdx.x;")
            if count % threads or first:
                self.line(f"if (e >= {count}) continue;")
            yield

    def stop_outside(self, row: str, column: str) -> None:
        at = self.launch
        ends = (row, at.down[1], at.rows), (column, at.along[1], at.columns)
        outside = [f"{name} >= {extent}" for name, extent, side in ends if extent % side or (at.shift and name == column)]
        outside += [f"{column} < 0"] if at.shift else []
        if outside:
            self.line(f"if ({' || '.join(outside)}) continue;")

    def stage(self, x: Load) -> None:
        """Load a tile, adjacent threads along `across`; lines of the tile have equal last coordinates. A thread issues some loads
        before it waits for the first."""
        at, tile, row, column, element = self.launch, self.fresh("s"), self.y, self.x, CUDA.element(x.buffer.dtype)
        (line, more), size = at.pitch(x.buffer.dtype), math.gcd(width((), (x,), *at.down), at.rows)
        each, count = at.rows // size, at.rows * at.tall // size
        turns = -(-count // at.threads)
        times = -(-turns // min(LOADS, WORDS // max(1, size * x.buffer.dtype.itemsize // 4)))
        turns, first = -(-turns // times), f"t * {-(-turns // times)} + " if times > 1 else ""
        self.line(f"__shared__ __align__({BYTES}) {element} {tile}[{at.tile_size(x.buffer.dtype)}];")
        with self.scope(["#pragma unroll 1", f"for (int t = 0; t < {times}; t++) {{"] if times > 1 else ["{"]):
            self.line(f"{element} got[{turns}][{size}]{' = {}' * (x.guard is not None)};")
            with self.each_of(count, turns, first):
                self.line(f"const rlx_index {row} = {row}_first + e % {each} * {size};")
                self.line(f"const rlx_index {column} = {column}_first{f' - {at.ahead}' * bool(at.ahead)} + e / {each};")
                self.stop_outside(row, column)
                guard = "" if x.guard is None else f"if ({self.value(x.guard)}) "
                self.line(f"{guard}rlx_fetch<{size}>(got[n], {self.names[x.buffer]} + {self.value(x.index)});")
            with self.each_of(count, turns, first):
                to = f"{tile} + e / {each} * {line}{f' + e / {each * at.vector} * {more}' * bool(more)} + e % {each} * {size}"
                one = f"for (int v = 0; v < {size}; v++) ({to})[v] = got[n][v];"
                self.line(f"rlx_put<{size}>({to}, got[n]);" if line % size == more % size == 0 else one)
        self.places[id(x)] = tile

    def load(self, e: Load) -> str:
        if id(e) not in self.places:
            return super().load(e)
        (step, more), by = self.launch.pitch(e.buffer.dtype), f"{self.names[self.launch.along[0]]} - {self.x}_0"
        place = f"({by}) * {step}"
        if more:
            place += f" + (line + ({by})) / {self.launch.vector} * {more}"
        text = CUDA.loads.get(e.buffer.dtype.name, "{0}[{1}]").format(f"{self.places[id(e)]}_0", place)
        return self.fix("x", e.dtype, text)


__all__ = ["TileLaunch", "TileTransposer", "in_tiles"]
