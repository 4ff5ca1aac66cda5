"""Mapping of the points and loops of a kernel to blocks and threads. All decisions are here, which makes it more than 500 lines;
render.py carries them out.

A *team* of T threads runs one grid point. T is 1 (a point per thread), 32 (a warp), or a whole block. The statements of a
point run in every thread of the team with the same values; the iterations of its vector loops are shared out among the
threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import is_

from rlx.backends.cuda.edges import cut_at_edges
from rlx.backends.cuda.peel import Peel, peeled
from rlx.backends.cuda.points import in_rows, merged
from rlx.backends.cuda.rows import Row, recomputed, row_loops, row_of
from rlx.backends.cuda.vectors import BYTES, MOST, loads, loads_ahead, lone, rows_last, stores, width
from rlx.backends.shared.contract_loops import without_contract
from rlx.backends.shared.lines import in_loops
from rlx.backends.shared.long_sums import long_sums
from rlx.ir.nest import nested
from rlx.ir.overlap import may_overlap, unaliased
from rlx.records import record

from rlx.ir.kernel import (  # isort: skip
    EXTREMES, Alu, Buffer, Check, Contract, Expr, Kernel, Let, Load, Local, Loop, Stmt, Store, Var, coefficient, walk,
)  # fmt: skip

THREADS = 256  # of a block of small teams
WARP, HALF_WARP = 32, 16
BLOCK_SIZES = (64, 128, 256, 512, 1024)
PER_THREAD = 8  # elements of a row for each thread of its team, at least; 4 times as many, or 16 narrow ones, of many points
FEW_POINTS = 2048  # with fewer points than this, a point gets a larger team: not every multiprocessor is busy otherwise
MANY_POINTS = 8192  # with as many points, adjacent ones in adjacent threads read columns at full rate
REGISTERS, MORE_REGISTERS = 32, 64  # of a thread for elements of its row; the latter where a row has no room otherwise
FEW_REGISTERS = 16  # where points are few: then more threads share a row
BUSY_THREADS = 132 * 512  # threads that keep a large GPU busy
WAITING_THREADS = 132 * 4096  # twice as many as a large GPU runs at once
MOVING_THREADS = 132 * 128  # threads that do so where they compute nothing
PART_BYTES = 64  # read by a thread of a running total; twice as many down columns, and of long lines, whose parts wait longer
PART_THREADS, PART_TEAMS, PART_WARPS = 256, (256, 512), 16  # of a block, at most
PART_FEW, PART_FEW_WIDE = 64, 256  # parts of columns, of 32-bit ones, up to which blocks have half as many warps: more read
LANE_BYTES, LONG_LANE, LONG_ROW = 4, 8, 1 << 17  # bytes that a lane reads of a row; of one of 32-bit elements that is so long
SECTOR, SEVERAL = 32, 1 << 24  # bytes: lanes read more of rows that are no multiples of it, whose sectors blocks share; elements
PARTS = (2, 4, 8, 16, 32)  # of a row: a GPU runs many more blocks at once, so that all parts of a row run
PACKED = (256, REGISTERS), (256, 40), (512, REGISTERS)  # threads of a block, and registers that hold two elements of a row each
EVEN_ROUNDS = 4  # vectors of 16-bit elements of a thread, in rows of more than 8,192
PART_LEAST = 4096  # elements of a row
COLUMN_BYTES = 4 * PARTS[-1] * PART_WARPS * REGISTERS  # of a column that all parts keep
FLYING = 128  # bytes of a long row that a thread has on their way, in elements of the least dtype
FEW_LINES = 132  # rows: with as many, each block has one
FEW_WARPS = 8  # whose lanes have adjacent columns: the last lanes may be idle if there are as many
FEW_COLUMNS = 8  # of all lines: with fewer, the lanes of a warp would have nothing to do, and run along a line, too
CLUSTER = 8  # blocks: as many as every GPU with clusters has
SHORT = 16  # iterations that a thread does by itself
LARGEST = 227 << 10  # bytes of shared memory of a block, at most, of the GPUs that have the most
NEAR = 8  # elements between those that adjacent lanes read down columns, at most: other loads of them read what is between
RESERVED = 1 << 10  # bytes of shared memory that the driver takes for each block
ALIGNED = 128  # bytes: copies to shared memory take longer where blocks keep it from another place on
WORD = 4  # bytes
RESIDENT = 4  # blocks of a multiprocessor from which on their number does not matter
SHARED_BYTES = 96 << 10  # Locals of a block that still let two blocks share a multiprocessor; larger ones go to global memory

COPIED = 128  # bytes: bulk copies to places in shared memory that are no multiples of it take longer
FOLLOWED = 2  # vectors of a thread where one load waits for another
MULTIPROCESSORS = 132  # of the GPUs that kernels are made for
FOUND = 120  # of these, where clusters of 4 and 8 find room
# shared memory of blocks of products (gemv_ring.py): a multiprocessor has one of the first two, and beside ALONE one of either
# kind with less; with the less of the first kind there is room for a block of a decoding step's attention, too
ALONE, LONG = 114 << 10, 116 << 10
BESIDE = {ALONE: 101 << 10, LONG: 110 << 10}


@record
class TensorMap:
    """A tensor for bulk copies: buffer argument, first byte, dims, byte strides of all but the innermost axis, and the box that
    one copy fetches. The innermost axis comes first. With `ends`, it is an image (images.py), and
    a box has channels of windows, `steps` pixels apart; their first pixels lie so far before the ends of the spatial dims."""

    argument: int
    offset: int
    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    ends: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


@record(eq=False)
class Segments:
    """Rows of `groups` groups in tiles of `rows` (segments.py). Block or grid point `tile` finds its `group`, and `first`, its
    first row in that. `count`: rows of the group. `moved`: variables that count from the group's first row, and those that count
    from the tile's. `start`: the tile's first row in the left operand, which has `all_rows` from element `base` on; None if
    that is computed. `expected`: tiles. `weights`: the right operand's buffer, where the group's matrix is number `slot`."""

    group: Var
    groups: int
    tile: Var
    first: Var
    rows: int
    count: Expr
    moved: Mapping[Var, Var]
    all_rows: int
    start: Expr | None
    base: int
    expected: int
    weights: Buffer
    slot: Var

    @property
    def axes(self) -> tuple[tuple[Var, int], ...]:
        return ((self.slot, self.groups),)

    @property
    def shared(self) -> int:
        """Bytes of a block, including alignment."""
        return 4 * (2 * self.groups + 1) + 1024


def busy_points(kernel: Kernel, segments: Segments | None) -> int:
    """Grid points that have something to do, at least 1."""
    return segments.expected if segments else max(1, math.prod(n for _, n in kernel.grid))


@record
class Launch:
    """`kernel`: with vector loops moved into the grid. `team` and `threads` of a block; a block has threads // team points.
    `vector`: adjacent points of each thread, of which the last may have fewer; `repeats`: such vectors, or points, a block apart.
    `row`: the part of a row that a thread keeps in registers.
    `lanes`: 32 if the threads of a team are in different warps; the lanes of a warp then run adjacent points, a team each.
    `scratch`: bytes of global memory that each block needs, as for Locals that are not in shared memory (`shared` bytes).
    `counters`: 32-bit words of global memory that are zero before and after the launch.
    `parts`: blocks that share each line of a running total or of reductions, `part` elements of it each; they tell each other
    totals in `words` of 64 bits for each line, of which the last one is a counter. `adjacent`: they all wait for each other, and
    start together; else for those of earlier parts only. `clustered`: they are a cluster, whose blocks read each other's shared
    memory in place of words. `leaving`: no block waits; the last one of a line that tells its totals goes on with those of
    all, the others leave. `segments`: the grid points are tiles of rows of groups. `peel`: of rows that begin anywhere."""

    kernel: Kernel
    team: int
    threads: int
    shared: int = 0
    scratch: int = 0
    vector: int = 1
    counters: int = 0
    lanes: int = 1
    row: Row | None = None
    parts: int = 1
    part: int = 0
    words: int = 0
    adjacent: bool = False
    clustered: bool = False
    leaving: bool = False
    segments: Segments | None = None
    repeats: int = 1
    peel: Peel | None = None

    @property
    def unaliased(self) -> tuple[bool, ...]:
        """The arguments that C's restrict holds for."""
        return unaliased(self.peel.kernel if self.peel else self.kernel)

    @property
    def points(self) -> int:
        """Threads or teams: points of the grid over `vector`."""
        return -(-math.prod(n for _, n in self.kernel.grid) // self.vector)

    @property
    def lines(self) -> int:
        """Blocks, without those that share a line."""
        return -(-self.points // (self.threads // self.team * self.repeats))

    @property
    def blocks(self) -> int:
        return self.lines * self.parts

    @property
    def waiting(self) -> int:
        """Blocks that wait for one another, if the GPU must have room for more than one on each multiprocessor."""
        return 0

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        """Tensors that the kernel copies in bulk: their descriptors are its first arguments."""
        return ()


@record
class Tiled(Launch):
    """A contraction: a block computes a tile of `rows` x `columns` elements of one point of the grid."""

    rows: int = 64
    columns: int = 64

    @property
    def contract(self) -> Contract:
        (found,) = self.kernel.body
        assert isinstance(found, Contract)
        return found

    @property
    def tiles(self) -> tuple[int, int]:
        return -(-self.contract.m // self.rows), -(-self.contract.n // self.columns)

    @property
    def blocks(self) -> int:
        return self.points * math.prod(self.tiles)


def apart(at: Launch, multiprocessors: int, most: int) -> int:
    """Bytes of shared memory by which no multiprocessor takes more blocks of a launch than it must (`most`: of a block): where a
    kernel is placed while the one in front leaves, they would all go to the multiprocessors that are free first."""
    each = -(-at.blocks // multiprocessors)
    return max(at.shared, (most + RESERVED) // (each + 1) if each < RESIDENT else 0)


def as_loops(kernel: Kernel) -> Kernel:
    """The kernel as loops, with vector loops moved into the grid."""
    return _long_outside(_flattened(cut_at_edges(in_loops(without_contract(kernel), extremes=False), apart=False)))


def launch(kernel: Kernel, clusters: bool = True) -> Launch:
    """The mapping of a kernel `as_loops`. `clusters`: the GPU has clusters of blocks."""
    if found := _running(kernel):
        return found
    if kernel.locals and _serial(kernel):
        return _with_memory(Launch(kernel, 1, WARP, lanes=WARP))
    points = math.prod(n for _, n in kernel.grid)
    short = all(s.extent <= SHORT for s in _of_a_point(kernel.body)) and points >= MANY_POINTS
    loops, shared = row_loops(kernel), may_overlap(kernel)
    if not short and loops and lanes_down(kernel, loops) and (found := _in_parts(kernel, clusters, shared)):
        return found
    if (warps := _warps(kernel)) > 1:
        return _with_memory(Launch(kernel, warps, warps * WARP, lanes=WARP))
    kernel = cut_at_edges(kernel)
    packs = not kernel.locals or recomputed(kernel) is not None  # asked here: a peeled kernel shows no results in given memory
    if found := peeled(kernel, row_loops(kernel)):
        at = _of_rows(found[0], clusters, shared, packs, THREADS if found[1].busy else 2 * THREADS)
        if at.team > 1 and (at.row and at.row.packed if found[1].busy else at.row or not kernel.locals):
            return replace(at, peel=found[1])
    return _of_whole_warps(kernel) or _of_rows(kernel, clusters, shared, packs)


def _of_rows(
    kernel: Kernel, clusters: bool, shared: frozenset[tuple[int, int]], packs: bool, most: int = 2 * THREADS
) -> Launch:
    """Points of which a thread, or a team, has each, or several blocks if these are long rows. `shared`: by may_overlap. `packs`:
    two elements of a row may share a register, if it has more than `most` threads otherwise."""
    team, points = _team(kernel), math.prod(n for _, n in kernel.grid)
    budgets = (FEW_REGISTERS,) if points < FEW_POINTS else (REGISTERS, MORE_REGISTERS)
    found = next(filter(None, (row_of(kernel, (WARP, *BLOCK_SIZES), n) for n in budgets)), None) if team > 1 else None
    packs = packs and team > WARP and (not found or found[0] > most)
    if packs and (packed := _in_parts(kernel, clusters, shared, packed=True)):
        if not found or packed.parts <= 2:
            return packed
    if found:
        return Launch(kernel, found[0], THREADS if found[0] == WARP else found[0], row=found[1])
    if team > WARP and (parted := _in_parts(kernel, clusters, shared)) and parted.parts > 1:
        return parted
    threads = THREADS if team <= WARP else team
    if team > WARP and not kernel.locals and all(lone(s) for s in kernel.body if isinstance(s, Loop)):
        parts = -(-max(s.extent for s in kernel.body if isinstance(s, Loop)) // (THREADS * MOST))
        return Launch(kernel, THREADS, THREADS, parts=parts, adjacent=True)  # adjacent blocks go on along a row
    if team == 1:
        kernel = rows_last(in_loops(long_sums(kernel)))
        vector, repeats = of_a_thread(kernel)
        return Launch(kernel, 1, threads, vector=vector, repeats=repeats)
    return _with_memory(Launch(kernel, team, threads))


def _of_whole_warps(kernel: Kernel) -> Launch | None:
    """Rows of 16-bit elements, of which each thread of a block has EVEN_ROUNDS vectors: of 2^n threads up to a half would have
    fewer, and a multiprocessor room for fewer blocks."""
    loops, points = row_loops(kernel), math.prod(n for _, n in kernel.grid)
    if not loops or points < FEW_POINTS or any(x.buffer.dtype.itemsize != 2 for s in loops for x in _memory_loads(s)):
        return None
    team = -(-loops[0].extent // (MOST * EVEN_ROUNDS * WARP)) * WARP
    found = row_of(kernel, (team,), MORE_REGISTERS) if THREADS < team <= 2 * THREADS else None
    if not found or found[1].size < MOST or _team(kernel) <= WARP:
        return None
    return Launch(kernel, team, team, row=found[1])


def _running(kernel: Kernel) -> Launch | None:
    """A running total, which is the only work of its kernel; None: there is none, or a thread does as well."""
    *before, last = kernel.body or (None,)
    if not isinstance(last, Loop) or len(last.carries) != 1 or not last.in_lanes or not _independent(last) or kernel.locals:
        return None
    simple = all(isinstance(s, Let) for s in before) and all(isinstance(s, Let | Store) for s in last.body)
    strides, down = [coefficient(x.index, last.var) for x in _memory_loads(last)], _down(kernel, [last])
    least = WARP if down or math.prod(n for _, n in kernel.grid) >= BUSY_THREADS else HALF_WARP
    limited = {x.var for x in kernel.limits}.intersection(v for v, _ in kernel.grid)  # lanes that leave tell no totals
    if last.extent < least or not simple or not (down or {1, -1} & {*strides}) or (down and limited):
        return None
    peel, extent = None, last.extent
    if not down and not kernel.limits and (found := peeled(kernel, [last])):
        (kernel, peel), extent = found, extent + found[1].size - 1
    own = last.carries[0].var.dtype.compute.itemsize
    vector = _beside(kernel, last) if down and extent > WARP else 1
    item = max([2, *(x.buffer.dtype.itemsize for x in _memory_loads(last))])
    each = min((PART_BYTES << down) // max(item, own // 2) // vector, 32)
    if not down:
        each = min(each, 1 << (-(-extent // WARP) - 1).bit_length())
        each = min(2 * each, 32) if extent > PART_THREADS**2 * each else each  # more parts than one block hears of at once
    blocks = math.prod(n for _, n in kernel.grid) // (vector * WARP) * (extent // (PART_WARPS * each))
    uneven = down and kernel.grid[-1][1] * item % SECTOR > 0
    few = PART_FEW_WIDE if vector == 1 and item == WORD and not uneven else PART_FEW
    narrow = vector * item <= LANE_BYTES or (uneven and vector > 1)
    several = narrow and blocks >= 2 * FEW_LINES and extent <= few * PART_WARPS // 2 * each
    team, most = (1, PART_WARPS // (1 + several)) if down else (WARP, PART_THREADS)
    while team < most and team * each < extent:
        team *= 2
    parts = -(-extent // (team * each))
    if parts > 1:
        size = 1 if down else running_size(kernel.body[-1], peel, each)  # type: ignore[arg-type]
        parts, each = _even_parts(extent, team, each, size, not peel and vector == 1)
    threads, lanes = team * WARP if down else THREADS if team == WARP else team, WARP if down else 1
    groups = -(-parts // team) if down or parts <= team else -(-parts // WARP) + -(-parts // WARP**2)
    words = -(-own // 4) * vector * lanes * (parts + groups + 1) + 1  # totals of parts and of groups of parts
    at = Launch(kernel, team, threads, lanes=lanes, vector=vector, parts=parts, part=team * each, words=words, peel=peel)
    return _counted(at)


def _beside(kernel: Kernel, s: Loop) -> int:
    """Adjacent columns of a lane in a running total down columns: of 16-bit elements, a warp reads a whole line of the cache."""
    (column, extent), (carry,) = kernel.grid[-1], s.carries
    assert carry.added is not None
    before, inside = (*kernel.body[:-1], carry.init), [x for x in walk((s.body, carry.added)) if isinstance(x, Load)]
    items, points = {x.buffer.dtype.itemsize for x in inside}, math.prod(n for _, n in kernel.grid)
    row = extent * max(items, default=1)
    long = (items == {4} and row >= LONG_ROW) or (items <= {2, 4} and row % SECTOR and points * s.extent >= SEVERAL)
    beside = LONG_LANE if long else LANE_BYTES
    size = max(1, beside // max(items)) if len(items) == 1 and column not in walk(before) else 1
    while size > 1:
        whole = extent % size == 0 and {*map(id, inside)} == {id(x) for x in loads(s.body, (carry.added,), column, size)}
        if whole and (points % (size * WARP) == 0 or points >= FEW_WARPS * size * WARP):
            break
        size //= 2
    return size


def running_size(s: Loop, peel: Peel | None, each: int) -> int:
    """Adjacent elements of a thread along a line, of the `each` that it has in all."""
    added = s.carries[0].added
    assert added is not None
    return min(each, width(s.body, (added,), s.var, peel.whole if peel else s.extent))


def _even_parts(extent: int, team: int, each: int, size: int, more: bool) -> tuple[int, int]:
    """Parts of a line, and elements of a thread, about `each`, so that few threads are behind its end; `more` than that only if
    there are registers. A part takes the time of an eighth of a vector besides."""
    found = [(-(-extent // (team * n * size)), n) for n in range(max(1, each // size - 1), each // size + 1 + more)]
    parts, _ = min(found, key=lambda x: x[0] * (x[1] + 1 / MOST))
    return parts, -(-extent // (parts * team * size)) * size


def _in_parts(kernel: Kernel, clusters: bool, shared: frozenset[tuple[int, int]], packed: bool = False) -> Launch | None:
    """Rows, or columns, that registers of one block or of several keep; and rows that are too few to keep the GPU busy. `packed`:
    only rows of 16-bit elements, two of which share a register."""
    kernel = (packed and recomputed(kernel)) or kernel
    loops, points = row_loops(kernel), math.prod(n for _, n in kernel.grid)
    single = len(loops) == 1 and not kernel.locals
    if not loops or not parted(kernel, shared):
        return None
    extent, down = loops[0].extent, lanes_down(kernel, loops)
    leaving = single and not down and _only_results(kernel)
    near = PARTS[: PARTS.index(CLUSTER) + 1] if clusters and points * CLUSTER >= FEW_LINES else ()
    if packed:
        found = next(filter(None, (row_of(kernel, (team,), n, (1, *near), packed=True) for team, n in PACKED)), None)
        parts = -(-extent // (found[1].rounds * found[1].size * found[0])) if found else 0
        if not found or points * parts < RESIDENT * MULTIPROCESSORS:  # few rows: more threads for each
            return None
        if parts == 1:
            return Launch(kernel, found[0], found[0], row=found[1])
    elif down:
        found = row_of(kernel, (4, 8, PART_WARPS), REGISTERS) or row_of(kernel, (PART_WARPS,), REGISTERS, PARTS)
    else:
        found = row_of(kernel, PART_TEAMS, REGISTERS, near) or row_of(kernel, (PART_THREADS,), REGISTERS, PARTS)
        found = found or row_of(kernel, (PART_THREADS,), MORE_REGISTERS, PARTS)
    team, row = found or (PART_THREADS, None)
    if row:
        part = row.rounds * row.size * team
    elif not kernel.locals and (lines := -(-points // WARP) if down else points) < FEW_LINES:
        least = PART_LEAST // WARP if down else PART_LEAST
        part = max(least, -(-extent * lines // (2 * FEW_LINES)), 0 if leaving else -(-extent // PARTS[-1]))
        team = PART_WARPS if down else PART_TEAMS[-1] if part >= 2 * PART_TEAMS[-1] * MOST else team
        each = [team * n // least_bytes(loops[0]) for n in (FLYING, FLYING // 2, FLYING // 4)] if leaving else []
        whole = next((n for n in each if part >= 4 * n), team * MOST)
        part = -(-part // whole) * whole
        if down and part >= extent:
            return None
    else:
        return None
    parts, lanes = -(-extent // part), WARP if down else 1
    words = 4 * lanes * parts * sum(len(s.reduces) for s in loops) + 1
    at = Launch(kernel, team, team * lanes, lanes=lanes, row=row, parts=parts, part=part, words=words)
    together = clusters and 1 < parts <= CLUSTER and at.lines * CLUSTER >= FEW_LINES
    if together:
        return replace(at, adjacent=True, clustered=True)
    return _counted(replace(at, adjacent=parts > 1, leaving=leaving and parts > 1))


def parted(kernel: Kernel, shared: frozenset[tuple[int, int]]) -> bool:
    """Whether several blocks may have a row of loops: none reads what another one writes. `shared`: by may_overlap."""
    inside, loops = list(walk(kernel.body)), row_loops(kernel)
    stored, loaded = ({x.buffer for x in inside if isinstance(x, kind)} for kind in (Store, Load))
    if not stored.isdisjoint(loaded.difference(kernel.locals)) or any(isinstance(x, Check) for x in inside):
        return False
    tops, single = {s.buffer for s in kernel.body if isinstance(s, Store)}, len(loops) == 1 and not kernel.locals
    return single or not any(kernel.buffers[written] in tops for _, written in shared)  # another block may read it later


def _only_results(kernel: Kernel) -> bool:
    """Whether nothing but values and stores of results comes with one reduction: one block does what needs the totals."""
    *before, loop = (s for s in kernel.body[: next(i for i, s in enumerate(kernel.body) if isinstance(s, Loop)) + 1])
    return bool(loop.reduces) and not any(isinstance(x, Store) for x in (*before, *walk((loop,))))  # type: ignore[union-attr]


def _counted(at: Launch) -> Launch:
    return replace(at, counters=2 * at.lines * at.words) if at.parts > 1 else at


def _with_memory(at: Launch) -> Launch:
    """Room for the Locals of a block."""
    held = sum(-(-max(1, x.size) * x.dtype.itemsize // 16) * 16 for x in at.kernel.locals) * (at.threads // at.team)
    return replace(at, shared=held) if held <= SHARED_BYTES else replace(at, scratch=held)


def _serial(kernel: Kernel) -> bool:
    """True if most iterations run in order, so that more threads than one for a point would wait for each other."""
    shared = sum(s.extent for s in _of_a_point(kernel.body))
    return sum(_in_order(kernel.body)) > max(WARP, shared)


def _in_order(body: tuple[Stmt, ...]) -> Iterator[int]:
    """The extents of the loops that neither a team shares nor contain such a loop."""
    for s in body:
        if isinstance(s, Loop) and not is_shared(s):
            yield from _in_order(s.body) if _of_a_point(s.body) else (s.extent,)


def _warps(kernel: Kernel) -> int:
    """Warps of a block that share the rows of 32 adjacent columns; 1: the loops do not run down columns, or points suffice."""
    shared = [s for s in _of_a_point(kernel.body) if s.extent >= WARP]
    if not shared or not kernel.grid or kernel.limits:
        return 1
    if not lanes_down(kernel, shared):
        return 1
    points = math.prod(n for _, n in kernel.grid)
    most = min(WARP, max(s.extent for s in shared) // PER_THREAD)
    wanted = 1
    while wanted < most and points * wanted < BUSY_THREADS * 2:
        wanted *= 2
    return wanted


def lanes_down(kernel: Kernel, loops: list[Loop]) -> bool:
    """True if each lane of a warp should have a column."""
    return math.prod(n for _, n in kernel.grid) >= FEW_COLUMNS and _down(kernel, loops)


def _down(kernel: Kernel, loops: list[Loop]) -> bool:
    """True if the loops run down columns that are adjacent in memory."""
    if not kernel.grid:
        return False
    *others, (column, columns) = kernel.grid

    def along(x: Load, s: Loop) -> bool:
        """Whether a warp reads adjacent elements better along the loop: of other rows, it would read a few columns at a time."""
        rows = columns < WARP and any(coefficient(x.index, v) != 0 for v, n in others if n > 1)
        return coefficient(x.index, s.var) == 1 and (rows or coefficient(x.index, column) != 0)

    found = [(x, s) for s in loops for x in _memory_loads(s)]
    across = any(0 < (coefficient(x.index, column) or 0) <= NEAR and coefficient(x.index, s.var) != 0 for x, s in found)
    return across and not any(along(x, s) for x, s in found)


def _memory_loads(s: Loop) -> list[Load]:
    return [x for x in walk((s,)) if isinstance(x, Load) and not isinstance(x.buffer, Local)]


def least_bytes(s: Loop) -> int:
    """Bytes of the smallest elements that it loads."""
    return min((x.buffer.dtype.itemsize for x in _memory_loads(s)), default=1)


def _flattened(kernel: Kernel) -> Kernel:
    """A vector loop without results whose siblings are values only becomes the fastest axis of the grid."""
    *before, last = kernel.body or (None,)
    if kernel.locals or not isinstance(last, Loop) or not all(isinstance(s, Let | Check) for s in before):
        return kernel
    if not last.vector or last.reduces or last.carries:
        return kernel
    one_by_one = width(last.body, (), last.var, last.extent) == 1 and not kernel.limits
    if one_by_one and last.extent >= THREADS and math.prod(n for _, n in kernel.grid) >= FEW_LINES and _places(kernel):
        return kernel  # else each element would look for its row
    return in_rows(merged(replace(kernel, grid=(*kernel.grid, (last.var, last.extent)), body=(*before, *last.body))))


def _long_outside(kernel: Kernel) -> Kernel:
    """The kernel with a short loop that only combines the results of a long one inside that, which a team shares then."""

    def exchanged(s: Stmt) -> Stmt:
        match s:
            case Loop(body=(Loop(reduces=(each,), carries=()) as t,), reduces=(both,), carries=()) if (
                s.extent < WARP <= t.extent and both.value is each.result and both.op == each.op and both.op not in EXTREMES
            ):
                short = replace(s, vector=False, body=t.body, reduces=t.reduces)
                return replace(t, vector=True, body=(short,), reduces=s.reduces)
        return s

    body = tuple(map(exchanged, kernel.body))
    return kernel if all(map(is_, body, kernel.body)) else replace(kernel, body=body)


def _team(kernel: Kernel) -> int:
    loops, points = _of_a_point(kernel.body), math.prod(n for _, n in kernel.grid)
    shared = [s for s in loops if s.extent >= WARP]
    if not shared:
        return _short_team(kernel, loops, points)
    longest, work = max(s.extent for s in shared), max(map(_work, shared))
    narrow = all(x.buffer.dtype.itemsize <= 2 for s in shared for x in _memory_loads(s))
    if not kernel.locals and points >= MANY_POINTS and kernel.grid:
        across = any(_across(s, kernel.grid[-1][0]) for s in shared)
        if not any(_contiguous(s) for s in shared) and (across or points >= BUSY_THREADS):
            return 1
        if across and longest < 2 * WARP and points >= BUSY_THREADS:  # a warp would have too little to do
            return 1
    each = PER_THREAD * (1 if points < FEW_POINTS else 16 if narrow else 4)
    if work <= WARP * each:
        return WARP
    searched = any(r.op in EXTREMES for s in shared for r in s.reduces)  # a search gains nothing by threads that wait for room
    most = BLOCK_SIZES[-2] if searched and points * BLOCK_SIZES[-2] >= WAITING_THREADS else BLOCK_SIZES[-1]
    return next((n for n in BLOCK_SIZES if n * each >= work or n >= min(longest, most)), most)


def _short_team(kernel: Kernel, loops: list[Loop], points: int) -> int:
    """Of points whose loops are shorter than a warp: few points with long rows have one, and so have Locals, unless there are
    many points and the Locals are registers."""
    if kernel.locals:
        inside = list(walk(kernel.body))
        counted = all(isinstance(x.index, Var) for x in inside if isinstance(x, Load | Store) and isinstance(x.buffer, Local))
        small = counted or all(x.size <= SHORT for x in kernel.locals)
        short = small and all(s.extent <= SHORT for s in inside if isinstance(s, Loop))
        return 1 if short and points >= MANY_POINTS else WARP
    long = any(s.extent > SHORT and _contiguous(s) for s in loops) and not any(_in_order(kernel.body))
    return WARP if long and points < MANY_POINTS else 1


def _across(loop: Loop, column: Var) -> bool:
    """True if it loads elements along no axis that are adjacent for adjacent points."""
    return any(coefficient(x.index, loop.var) not in (0, 1) and coefficient(x.index, column) != 0 for x in _memory_loads(loop))


def _work(loop: Loop) -> int:
    """Iterations of the loop, those of the loops inside included."""
    return loop.extent * max([1, *(_work(s) for s in loop.body if isinstance(s, Loop))])


def of_a_thread(kernel: Kernel, beside: int = 0) -> tuple[int, int]:
    """Points of the last axis that a thread computes at once, and how many times it does: as many as leave every multiprocessor
    busy, with so many points of other kernels `beside`."""
    vector = _vector(kernel, beside)
    whole = vector > 1 and kernel.grid[-1][1] % vector == 0 and not _at_position(kernel)
    repeats = _vectors_apart(kernel, vector, beside) if whole else _repeats(kernel, beside)
    return (vector, repeats) if whole else (1, repeats) if repeats > 2 * vector or vector == 1 else (vector, 1)


def _vector(kernel: Kernel, beside: int) -> int:
    """Points of the last axis that a thread computes at once."""
    if not kernel.grid or any(x.var is kernel.grid[-1][0] for x in kernel.limits):
        return 1
    (var, extent), points = kernel.grid[-1], math.prod(n for _, n in kernel.grid)
    moves = not any(isinstance(e, Alu) and e.dtype.is_float for e in walk(kernel.body))
    # an axis without others may end within a vector; a thread that waits for the place of its rows, and then for them, moves more
    size = width(kernel.body, (), var, 0 if extent == points else extent, 2 if moves and _at_position(kernel) else 1)
    stored = max(1, sum(isinstance(s, Store) for s in kernel.body))  # elements of a point
    while size > 1 and (points * stored + beside) // size < (MOVING_THREADS if moves else BUSY_THREADS):
        size //= 2
    return size


def _vectors_apart(kernel: Kernel, vector: int, beside: int) -> int:
    """Vectors of a thread: with one that is short, or that waits for its place, too few bytes are on their way. As many as have
    room in registers."""
    plain = not kernel.limits and all(isinstance(s, Let | Store | Check) for s in kernel.body)
    if kernel.locals or not plain:
        return 1
    var, points = kernel.grid[-1][0], (math.prod(n for _, n in kernel.grid) + beside) // vector
    read = loads(kernel.body, (), var, vector)
    widest = max(x.buffer.dtype.itemsize for x in [*read, *stores(kernel.body, var, vector)])
    size = max(1, BYTES // (vector * widest)) * (FOLLOWED if _places(kernel) else 1)
    held = sum(x.buffer.dtype.itemsize for x in read) * vector // 4  # registers of one vector
    while size > 1 and (points // size < BUSY_THREADS or size * held > REGISTERS):
        size //= 2
    return size


def _repeats(kernel: Kernel, beside: int) -> int:
    """Points of a thread that loads elements one by one: with one, too few bytes are on their way."""
    plain = not kernel.limits and all(isinstance(s, Let | Store | Check) for s in kernel.body)
    if kernel.locals or not plain or not (found := loads_ahead(kernel.body)):
        return 1
    points, widest = math.prod(n for _, n in kernel.grid) + beside, max(b.dtype.itemsize for b in kernel.buffers)
    size = min(MOST, BYTES // widest, FEW_REGISTERS // len(found))
    while size > 1 and points // size < 2 * BUSY_THREADS:
        size //= 2
    return max(1, size)


def _places(kernel: Kernel) -> list[Load]:
    """The loads by which it finds the place of others."""
    return [e for x in walk(kernel.body) if isinstance(x, Load) for e in walk(x.index) if isinstance(e, Load)]


def _at_position(kernel: Kernel) -> bool:
    """Whether it reads rows from a place on that is one number in memory."""
    return any(not any(isinstance(v, Var) for v in walk(e.index)) for e in _places(kernel))


def checked_late(at: Launch) -> Sequence[Stmt]:
    """The statements of a kernel, with checks of what it does not write behind the others if they are plain ones: a failure only
    sets flags, and no load should wait for it."""
    kernel = at.kernel
    if not all(isinstance(s, Let | Store | Check | Loop) for s in kernel.body):
        return kernel.body
    read = {b for b, free in zip(kernel.buffers, at.unaliased) if free and not b.writable}

    def late(s: Stmt) -> bool:
        return isinstance(s, Check) and all(x.buffer in read for x in walk((s,)) if isinstance(x, Load))

    return sorted(kernel.body, key=late)


def _of_a_point(body: tuple[Stmt, ...]) -> list[Loop]:
    """The loops whose iterations a team shares: the outermost vector loops."""
    out: list[Loop] = []
    for s in body:
        if isinstance(s, Loop):
            out += [s] if is_shared(s) else _of_a_point(s.body)
    return out


def is_shared(loop: Loop) -> bool:
    """True if the team shares the iterations: they are independent except for reductions."""
    if not loop.vector:
        return not loop.carries and all(isinstance(s, Let | Check | Store) for s in loop.body) and _apart(loop)
    return not loop.carries


def _apart(loop: Loop) -> bool:
    """True if no iteration reads or writes an element that another writes."""
    stores = [s for s in loop.body if isinstance(s, Store)]
    place = {s.buffer: s.index for s in stores}
    touched = [x for x in walk((loop,)) if isinstance(x, Load | Store) and x.buffer in place]
    return all(coefficient(e, loop.var) for e in place.values()) and all(x.index is place[x.buffer] for x in touched)


def _independent(loop: Loop) -> bool:
    """True if the addends of the running totals depend on nothing that the body computes."""
    own = {s.var for s in nested(loop.body) if isinstance(s, Let)}
    own |= {r.result for s in nested(loop.body) if isinstance(s, Loop) for r in s.reduces}
    return all(own.isdisjoint(walk(c.added)) for c in loop.carries)


def _contiguous(loop: Loop) -> bool:
    """True if consecutive iterations load consecutive elements."""
    return any(coefficient(x.index, loop.var) == 1 for x in _memory_loads(loop))
