"""Updates of indexed destinations, such as sums: a block owns some destinations and finds the indices that select them, in
order; its threads keep their results in registers. Other ways: each destination looks at all of a few updates; of updates that
replace what is there, the last one for each destination is found first (replaced.py); a tensor with few updates is copied, and
patched (patched.py); of lines with many indices of their own, a block has a tile of sums that all updates pass (streamed.py), or
updates are sorted by bins of places first (binned.py). More than 500 lines: the choice among all of these is here, too."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from rlx.backends.cuda.render import WIDE, CudaWriter
from rlx.backends.cuda.schedule import SHARED_BYTES, WARP, Launch
from rlx.backends.cuda.vectors import BYTES, width
from rlx.ir.nest import substitute
from rlx.ir.overlap import may_overlap
from rlx.records import record

from rlx.ir.kernel import (  # isort: skip
    Alu, Carry, Check, Expr, Kernel, Let, Load, Loop, Stmt, Store, Var, alu, coefficient, const, is_const, k, kept, walk,
)  # fmt: skip

THREADS, GROUPS = 256, 128  # of columns of a block, each of a thread
BLOCKS, PLENTY = 4 * 132, 8  # all there at once: each one reads all indices; tiles, of which one less makes little difference
FEW, LONG, MORE = 1024, 32, 4  # indices, and places of a thread, with which 4 times as many blocks share the work more evenly
BUSY = 32 * THREADS  # threads with fewer elements each, if there are no more
MOST = 2048  # places of a block
LARGE, AMPLE, IDLE = 512, 4, 0.07  # threads of a block of many indices without marks; vectors of each, at least; idle, at most
FEW_PICKS = 8  # updates of a line that each of its places looks at
PLACES, ENOUGH = 8, 1 << 15  # of a thread that looks, if there are as many threads
LEAST, PICKS = 1 << 14, 256  # updates, or places, that are worth several blocks; indices that one block takes too long for
MARKED, MARKS = 8192, 1 << 22  # indices from which on a block reads marks of its own in place of all; words of all marks, at most
GRAINS = (1, 2, 4, 8, 16, 32, 64, 128, 256)  # indices of a mark
# Times in µs, fitted to 55 scatters on an H200, of lines with indices of their own
TEAM, LANES, UPDATE = 1, 5, 0.1  # of a team for a line, of one for adjacent lines, and of each update they make
TEAMS = 2048  # that work at once
LOOK, FAR_LOOK = 0.1, 0.3  # of a place at an update that is next to the one before, or far from it
LOOKS = 2.5e6  # of all places, in 1 µs
BLOCK, INDEX = 4, 0.01  # of a block, and of each index it reads
READ, OWN_INDEX = 0.0015, 0.0085  # parts of the latter: of each index, and of those of its own places
APART = 2  # times as long, where elements of a line are not adjacent
TOGETHER = 528  # blocks that work at once
WORDS, WORD = 4, 2e-5  # of a launch with words, and of an update
PLACE = 5e-6  # of a place, in each way
# The same of copies that are patched, from the work that they do: not measured
PATCH, TILE, LOOKED = 3, 1.5e-3, 2e-6  # of one, of each tile, and of each index that a block looks at
FAR_UPDATE, NEAR_UPDATE = 2e-5, 3e-6  # of each element, or adjacent ones, that updates combine; of each vector of these
SPARSE, SPARSE_ROWS = 8, 3  # places for each update of lines with indices of their own, and of whole rows
COPIED = 3.5e6  # bytes in 1 µs
PATCHED, MOSTLY = 1 << 20, 2  # bytes that are worth it; times as long as the copy alone, of one that is chosen unseen
TILES, WAVE = (1 << 13, 1 << 14, 1 << 15, 1 << 16), 132  # bytes of a tile; tiles that the last multiprocessors wait for
ACROSS = 16, 32, 64, 128  # bytes of a row of a tile, where lines have indices of their own
NARROW = {16: 2.0, 32: 1.2}  # times as long, of the least
# The same of updates that pass by tiles of sums, fitted to eight scatters
STREAM, ROUND, MOVED = 8, 0.5, 3e6  # of one, of as many updates as a block has threads, and bytes in 1 µs
STREAM_THREADS, STREAMING, CLAIMS = 512, 264, 4096  # of a block; blocks that work at once; words by which updates of a cell meet
STREAM_ROOM, STREAM_COLUMNS = 72 << 10, (1, 2, 4, 8, 16)  # bytes of sums, and adjacent lines, of a block
STREAMED = 1 << 16  # updates that are worth it
SECTOR = 32  # bytes that are read together
# The same of updates that are sorted by bins of places, fitted to 18 scatters
BINS, BIN_EACH, BIN_MORE, BIN_TILES = 255, 7, 4, 2048  # at most: bins; updates of a thread in a tile, and in a bin; tiles
BIN_ROOM, BIN_MOST = 68 << 10, 144 << 10  # bytes of sums of a block, if two share a multiprocessor, and if one has it
BIN, BIN_UPDATE, BIN_PLACE = 7.5, 2.1e-5, 3.3e-6  # of a launch, of an update, and of a place
BINNED, DENSE = 20_000, 8  # updates, or 64 places for each, that are worth it; updates for each place that are
CLEARLY = 0.9  # of the time of another way, at most
STATIC = 48 << 10  # bytes of shared memory of a block without further ado
TILE_ROOM = 4096  # indices that may select places of a tile, at most: a block lists all, and compares those that select the same
ACROSS_MOST = 1 << 10  # vectors of a row of a tile, which a block adds up by itself if all updates are of one row
COMBINED = ("add", "mul", "max", "min")


@record
class ScatterLaunch(Launch):
    """A block has `rows` places, `at_once` at a time, of `groups` groups of `vector` adjacent points, each of a thread; `tiles`
    blocks have all places of these points. `words_each`: of a block, with marks of the indices that it needs, one for `grain` of
    them; 0: it reads all."""

    words_each: int = 0
    grain: int = 1
    groups: int = 0
    rows: int = 0
    at_once: int = 0
    tiles: int = 0

    @property
    def blocks(self) -> int:
        return -(-self.points // self.groups) * self.tiles


@record(eq=False)
class Scatter:
    """The loop that begins a line of results, the loops over indices, their check and update, and the loop that stores the line.
    `op` combines an update with the value so far; None: it replaces that."""

    start: Loop
    first: Store
    picks: tuple[Loop, ...]
    check: Check
    put: Store
    inside: Expr  # the condition of `put`
    end: Loop
    last: Store
    op: str | None
    update: Expr

    @property
    def count(self) -> int:
        return math.prod(s.extent for s in self.picks)

    @property
    def of_all(self) -> bool:
        """Whether indices are the same for all points."""
        return {s.var for s in self.picks}.issuperset(x for x in walk((self.put.index, self.inside)) if isinstance(x, Var))

    @property
    def read(self) -> set[object]:
        """The memory of indices and updates."""
        return _loaded(self.put.index) | _loaded(self.update)


def scatter_of(kernel: Kernel) -> Scatter | None:
    """None: the kernel is something else."""
    match kernel.body:
        case (Loop(body=(Store() as first,)) as start, Loop() as nest, Loop(body=(Store(value=Load() as held) as last,)) as end):
            picks, line = [nest], held.buffer
        case _:
            return None
    while len(picks[-1].body) == 1 and isinstance(picks[-1].body[0], Loop):
        picks.append(picks[-1].body[0])
    match picks[-1].body:
        case (Check() as check, Store(value=value, guard=Alu() as inside) as put):
            op, update = None, value
        case _:
            return None
    if isinstance(value, Alu) and value.op in COMBINED and isinstance(value.args[0], Load) and value.args[0].buffer is line:
        op, update = value.op, value.args[1]
    own = {first.buffer, line, put.buffer} == {*kernel.locals} and line not in _loaded(update)
    looked = any(isinstance(x, Load) for x in walk(put.index))
    return Scatter(start, first, tuple(picks), check, put, inside, end, last, op, update) if own and looked else None


def _loaded(e: Expr) -> set[object]:
    return {x.buffer for x in walk(e) if isinstance(x, Load)}


@record
class Patch:
    """Tiles of a tensor that is copied: `size` elements that are adjacent, or in rows of `columns`, if not 0. Adjacent places are
    `inner` elements apart. `picks`: indices that a tile looks at, at most. `copy`: µs of the copy alone, of `time`."""

    size: int
    columns: int
    inner: int
    picks: int
    tiles: int
    copy: float
    time: float


def tile_cells(at: Patch, of_all: bool) -> int:
    """The places of a tile, at most: rows that indices select as a whole, or elements."""
    return (at.size - 1) // at.inner + 2 if of_all else at.size


@kept
def patch_of(kernel: Kernel) -> Patch | None:
    """The best tiles of a scatter as a copy with few updates; None: it is small, starts neither from a tensor of its layout nor
    from one number, or has too many updates."""
    found = scatter_of(kernel)
    total, each = (found.last.buffer.size, found.last.buffer.dtype.itemsize) if found else (0, 0)
    if not found or total * each < PATCHED or total >= WIDE // 2 or not (inner := _inner(kernel, found)):
        return None
    if found.count * (SPARSE_ROWS if found.of_all else SPARSE) > found.end.extent:
        return None
    line, updates = found.end.extent * inner, found.count * total // found.end.extent
    vector, copy, updated = BYTES // each, 2 * total * each / COPIED, updates * FAR_UPDATE
    if found.of_all:
        updated = updates / inner * FAR_UPDATE + updates / math.gcd(vector, inner) * NEAR_UPDATE

    def of(size: int, columns: int) -> Patch:
        if columns:
            picks, tiles = found.count * columns, total // line * -(-found.end.extent * columns // size) * -(-inner // columns)
            looked = tiles * picks
        else:
            lines, tiles, own = min((size - 2) // line + 2, total // line), -(-total // size), 1 if found.of_all else inner
            picks = lines * found.count * own
            looked = round(min(tiles * (1 + (size - 1) / line), tiles * lines)) * found.count * own
        slow = (1 + WAVE / tiles) * (1 if not columns or inner % vector == 0 else 2)
        slow *= NARROW.get(columns * each, 1)
        time = PATCH + slow * copy + tiles * TILE + looked * LOOKED + updated
        return Patch(size, columns, inner, picks, tiles, copy, time)

    def fits(at: Patch) -> bool:
        cells, across = tile_cells(at, found.of_all), min(inner, at.size) // math.gcd(vector, inner) if found.of_all else 1
        listed = at.picks + (1 << (at.picks - 1).bit_length())  # the latter of a sort
        room = at.picks <= TILE_ROOM and 8 * (cells // 32 + 1) + 4 * listed + 64 <= STATIC
        return room and across <= ACROSS_MOST and (at.size + 2) * at.picks < 1 << 32

    widths = [0, *(n // each for n in ACROSS if not found.of_all and n // each < inner)]
    sizes = [(n // each, columns) for n in TILES for columns in widths if not columns or n // each <= columns * found.end.extent]
    return min(filter(fits, (of(*x) for x in sizes)), key=lambda x: x.time, default=None)


@record
class Stream:
    """A tile has the sums of `rows` places of `columns` adjacent lines; `tiles` of them have all places of these."""

    columns: int
    rows: int
    tiles: int
    time: float


def stream_of(kernel: Kernel, found: Scatter) -> Stream:
    """The best tiles of a scatter whose lines have indices of their own, if all updates of lines pass by them."""
    places, item, sums = found.end.extent, found.last.buffer.dtype.itemsize, found.put.buffer.dtype.compute.itemsize
    points, along = math.prod(n for _, n in kernel.grid), coefficient(found.last.index, found.end.var) == 1
    near = max([1, *(n for v, n in kernel.grid if not along and coefficient(found.last.index, v) == 1)])
    index = max(x.buffer.dtype.itemsize for x in walk(found.put.index) if isinstance(x, Load))

    def of(columns: int) -> Stream:
        rows = -(-places // -(-places * columns * sums // STREAM_ROOM))
        tiles, least = -(-places // rows), 0 if along else SECTOR // columns  # bytes that are read for one element
        rounds = max(1, -(-points // columns) * tiles / STREAMING) * -(-found.count * columns // STREAM_THREADS)
        moved = found.count * tiles * (max(least, index) + max(least, item)) + 2 * places * max(least, item)
        return Stream(columns, rows, tiles, STREAM + ROUND * rounds + points * moved / MOVED)

    return min((of(n) for n in STREAM_COLUMNS if n <= near and found.count * n < WIDE // 2), key=lambda x: x.time)


@record
class Bins:
    """Each of `bins` has `width` places of all lines. Of the updates of a tile, each of `threads` has `each`; of those of a bin
    it has `more` at a time."""

    threads: int
    each: int
    more: int
    width: int
    bins: int
    tiles: int
    time: float


@kept
def bins_of(kernel: Kernel) -> Bins | None:
    """The bins of a scatter of single elements; None: it is something else, or has too many places or updates."""
    found, points = scatter_of(kernel), math.prod(n for _, n in kernel.grid)
    if not found or (found.of_all and points > 1):
        return None
    places, picks, item = points * found.end.extent, points * found.count, found.put.buffer.dtype.compute.itemsize
    width = -(-places // BINS)
    width = -(-width // SECTOR) * SECTOR if width > SECTOR else width
    threads = STREAM_THREADS * (1 + (width * item > BIN_ROOM))
    at_once = STREAMING * STREAM_THREADS  # threads
    each = -(-picks // (at_once * -(-picks // (at_once * BIN_EACH))))
    tiles, bins = -(-picks // (threads * each)), -(-places // width)
    if width * item > BIN_MOST or tiles > BIN_TILES or max(places, picks) >= WIDE // 2:
        return None
    more = min(BIN_MORE, -(-picks * 5 // (4 * threads * bins)))  # a quarter more than a bin has on average
    return Bins(threads, each, more, width, bins, tiles, BIN + BIN_UPDATE * picks + BIN_PLACE * places)


def _inner(kernel: Kernel, found: Scatter) -> int:
    """The elements between adjacent places, if the result is dense and starts as a tensor of the same dtype and layout, or as one
    number; else 0."""
    out, start, end = found.last, found.first.value, (found.end.var, found.end.extent)
    if not isinstance(start, Load) or start.guard is not None or start.buffer.dtype != out.buffer.dtype or end[1] == 1:
        return 0
    read = out.index if is_const(start.index) else substitute(start.index, {found.start.var: end[0]})
    axes = sorted((x for x in (*kernel.grid, end) if x[1] > 1), key=lambda x: coefficient(out.index, x[0]) or 0)
    steps = [math.prod(n for _, n in axes[:at]) for at in range(len(axes))]
    origin = {v: const(0) for v, _ in (*kernel.grid, end)}
    same = all(coefficient(e, v) == step for (v, _), step in zip(axes, steps) for e in (out.index, read))
    same = same and all(is_const(substitute(e, origin), 0) for e in (out.index, read))
    return steps[axes.index(end)] if same and math.prod(n for _, n in axes) == out.buffer.size else 0


@kept
def way_of(kernel: Kernel) -> tuple[Scatter | None, str]:
    """A scatter, and how it is done: by "blocks" that own places, by "places" that look at all updates of their line, by "words"
    of the last update for each place, as a copy that is "patched", "streamed" by tiles of sums, "binned" once the updates are
    sorted by bins of places, or by a "team" for each line.
    Lines that shared memory has no room for have teams only if nothing else can do them: else they would need as much again."""
    found, points = None if kernel.limits else scatter_of(kernel), math.prod(n for _, n in kernel.grid)
    if not found or 0 in (points, found.count, found.end.extent):
        return None, "team"
    patch = patch_of(kernel)
    count, places, looks = found.count, found.end.extent, found.count * found.end.extent * points
    words = found.op is None and (points == 1 or not found.of_all) and count * points < WIDE // 2 and places * points <= MARKS
    along = coefficient(found.last.index, found.end.var) == 1
    narrow = max(count, places) < WIDE // 2
    together = found.of_all and (max(count, places) * points >= LEAST or count >= PICKS) and narrow
    # with more updates than places, adjacent ones often meet in one place, and wait for each other
    streams = narrow and not found.of_all and count <= places and count * points >= STREAMED
    stream = stream_of(kernel, found) if streams else None
    if patch and patch.time < MOSTLY * (PATCH + patch.copy):
        if count > FEW_PICKS or looks / LOOKS > patch.copy or (together and not along):
            return found, "streamed" if stream and stream.time < patch.time else "patched"
    bins = bins_of(kernel) if narrow else None
    if together:
        sorts = bins and count >= MARKED
        return found, "words" if words else "places" if along and count <= FEW_PICKS else "binned" if sorts else "blocks"
    if count <= FEW_PICKS:
        return found, "places"
    tiles = 1 if found.of_all else -(-places // _rows(found, points, 1, 1)[0])
    apart, copied = 1 if along or found.of_all else APART, PLACE * places * points
    lanes, team, look = (1, TEAM, LOOK) if along else (WARP, LANES, FAR_LOOK)
    times = {"team": (team + UPDATE * count) * max(1, points / (TEAMS * lanes)) + 2 * copied}
    if narrow:
        if places * found.put.buffer.dtype.itemsize * lanes > SHARED_BYTES:
            del times["team"]
        times["blocks"] = max(1, points * tiles / TOGETHER) * (BLOCK + INDEX * count) * apart + copied
    if stream:
        times["streamed"] = stream.time
    if words:
        times["words"] = WORDS + WORD * count * points + copied
    if patch:
        times["patched"] = patch.time
    if len(found.picks) == 1:
        times["places"] = max(look * count, looks / LOOKS)
    best = min(times, key=times.__getitem__)
    least, many = times[best], (count + places // 64) * points >= BINNED or count >= DENSE * places
    if best == "blocks":
        least = max(1, points * tiles / TOGETHER) * (BLOCK + READ * count + OWN_INDEX * count / tiles) + copied
    return found, "binned" if bins and many and best != "patched" and bins.time < CLEARLY * least else best


def _rows(found: Scatter, points: int, vector: int, groups: int, threads: int = THREADS) -> tuple[int, int]:
    """Places of a block, and those that it has at once."""
    places, across, each = found.end.extent, -(-points // (vector * groups)), threads // groups
    many = found.of_all and found.count <= FEW and places * across >= LONG * each * BLOCKS
    blocks = BLOCKS * MORE if many else BLOCKS * THREADS // threads
    tiles = blocks // across  # so few blocks that they are there at once, if that is about as many as could be
    wanted = -(-places // tiles) if tiles >= PLENTY else -(-places * across // blocks)
    rows = min(MOST, -(-wanted // each) * each)
    return rows, min(rows, each * max(2, min(4, (16 if found.count >= MARKED else 24) // vector)))


def scheduled(kernel: Kernel) -> Kernel:
    """Target.schedule: scatters of few updates by places, others as several blocks can do them; other kernels as they are."""
    found, way = way_of(kernel)
    return _by_places(kernel, found) if found and way == "places" else _apart(kernel)


def _by_places(kernel: Kernel, found: Scatter) -> Kernel:
    """Each place looks at all updates of its line, in their order. A point has several places, as far apart as can be, so that
    those of adjacent points are adjacent; of several, no memory is proved to be shared with the old numbers (rlx.ir.overlap)."""
    most, grid = found.end.extent * math.prod(n for _, n in kernel.grid) // ENOUGH, [v for v, n in kernel.grid if n > 1]
    each = next(n for n in range(max(1, min(PLACES, most)), 0, -1) if found.end.extent % n == 0)
    part, apart = Var("part"), found.end.extent // each
    places = [k.add(part, const(n * apart)) for n in range(each)]
    along = grid and coefficient(found.last.index, grid[-1]) == 1
    held: list[Expr] = [substitute(found.first.value, {found.start.var: at}) for at in places]
    body: list[Stmt] = []
    if found.count <= FEW_PICKS:
        for pick in product(*(range(s.extent) for s in found.picks)):
            looked, held = _looked(found, {s.var: const(n) for s, n in zip(found.picks, pick)}, places, held)
            body += looked
    else:
        variables = [Var("held", e.dtype) for e in held]
        looked, after = _looked(found, {}, places, variables)
        carries = tuple(Carry(*x) for x in zip(variables, held, after))
        body, held = [replace(found.picks[0], body=tuple(looked), carries=carries, vector=False)], [*variables]
    for at, value in zip(places, held):
        body.append(replace(found.last, index=substitute(found.last.index, {found.end.var: at}), value=value))
    axis = part, apart
    return replace(kernel, grid=(axis, *kernel.grid) if along else (*kernel.grid, axis), body=tuple(body), locals=())


def _looked(
    found: Scatter, pick: dict[Var, Expr], places: Sequence[Expr], held: Sequence[Expr]
) -> tuple[list[Stmt], list[Expr]]:  # fmt: skip
    """The statements of one update, and the numbers that places hold behind it."""
    parts = found.check, found.inside, found.put.index, found.update
    check, inside, index, update = substitute(parts, pick) if pick else parts
    line, place, value = found.put.buffer.dtype, Var("place"), Var("update", update.dtype)
    after: list[Expr] = []
    for at, before in zip(places, held):
        new = alu(found.op, before, value) if found.op else value
        after.append(k.select(k.eq(place, at), k.cast(k.cast(new, line), line.compute), before))
    return [check, Let(place, k.select(inside, index, const(-1))), Let(value, update)], after


def _apart(kernel: Kernel) -> Kernel:
    """The kernel of a scatter whose results may not take the memory of its indices and updates, which other blocks read: none is
    read at a place that is proved to be that of a result."""
    found, way = way_of(kernel)
    if not found or way == "team":
        return kernel
    if not shares(kernel, found):
        return kernel
    pick = found.picks[-1]
    body: tuple[Stmt, ...] = substitute((found.check, found.put), {pick.var: k.min(pick.var, const(pick.extent - 1))})
    for s in reversed(found.picks):
        body = (replace(s, body=body),)
    return replace(kernel, body=(found.start, *body, found.end))


def unclamped(found: Scatter) -> Scatter:
    """The scatter without the bound that `_apart` has put around the last index."""
    pick = found.picks[-1]
    bounds = (x for x in walk((found.check, found.put)) if isinstance(x, Alu) and x.op == "min" and x.args[0] is pick.var)
    within: dict[int, Expr] = {id(x): pick.var for x in bounds if is_const(x.args[1], pick.extent - 1)}
    check, put, inside, update = substitute((found.check, found.put, found.inside, found.update), {}, within)
    return replace(found, check=check, put=put, inside=inside, update=update)


def shares(kernel: Kernel, found: Scatter) -> bool:
    """Whether its results may take the memory of its indices and updates."""
    return any(kernel.buffers[read] in found.read for read, _ in may_overlap(kernel))


def scattered(kernel: Kernel) -> ScatterLaunch | None:
    """`kernel` as a scatter of several blocks; None: it is something else, or small, or its results may take the place of what it
    adds, which other blocks read."""
    (found, way), points = way_of(kernel), math.prod(n for _, n in kernel.grid)
    if not found or way not in ("blocks", "binned") or shares(kernel, found):
        return None
    places, line = found.end.extent, kernel.grid[-1] if kernel.grid and found.of_all else None
    vector = width(found.end.body, (found.first.value, found.update), *line) if line else 1
    while vector > 1 and points // vector * places < BUSY:
        vector //= 2
    adjacent = points if found.of_all else 1  # that adjacent threads have, but no others if many places are adjacent in memory
    if places >= THREADS:
        adjacent = line[1] if line and coefficient(found.last.index, line[0]) == 1 else 1
    groups = min(GROUPS, 1 << (adjacent // vector - 1).bit_length())
    while found.of_all and groups < GROUPS and -(-places * groups // THREADS) * -(-points // (vector * groups)) < BLOCKS // 8:
        groups *= 2  # fewer places of a block, whose other threads help to find them
    threads, many = THREADS, -(-points // vector)
    if found.of_all and FEW < found.count < MARKED and groups == GROUPS and many * places >= AMPLE * LARGE * BLOCKS:
        threads = LARGE
        groups = next((n for n in (LARGE, LARGE // 2) if -(-many // n) * n <= (1 + IDLE) * many), GROUPS)
    rows, at_once = _rows(found, points, vector, groups, threads)
    at = ScatterLaunch(kernel, 1, threads, vector=vector, groups=groups, rows=rows, at_once=at_once, tiles=-(-places // rows))
    words = {grain: -(-found.count // (32 * grain)) for grain in GRAINS}
    grain = next((n for n in GRAINS if 32 * n * n >= at.tiles and at.blocks * words[n] <= MARKS), None)  # least to read in all
    if not found.of_all or found.count < MARKED or at.tiles == 1 or grain is None:
        return at
    return replace(at, words_each=words[grain], grain=grain, counters=at.blocks * words[grain] + 3)


def name_pick(w: CudaWriter, picks: Sequence[Loop]) -> None:
    """Write the coordinates of the index number `pick`."""
    rest = "pick"
    for s in reversed(picks):
        w.names[s.var] = w.fresh("k")
        w.line(f"const rlx_index {w.names[s.var]} = {rest} % {s.extent};")
        rest = f"({rest} / {s.extent})"


class UpdateWriter(CudaWriter):
    """Writes functions that combine updates with what threads hold in registers, `vector` columns at once from `column` on."""

    column = ""

    def __init__(self, launch: Launch) -> None:
        super().__init__(launch)
        found = scatter_of(self.kernel)
        assert found
        self.found = found

    def declare_locals(self) -> None:
        """The sums are registers."""

    def combined(self) -> str:
        """The function of the number so far and an update."""
        kind = self.type(self.found.update.dtype)
        replaced = f"[]({kind}, {kind} b) -> {kind} {{ return b; }}"
        return self.function_of(self.found.op, self.found.update.dtype) if self.found.op else replaced

    def columns(self, stmts: Sequence[Stmt], ends: Sequence[Expr]) -> None:
        """The statements for each column of the thread; the value of `ends` is held."""
        size = self.launch.vector
        hold = lambda values: [self.line(f"held[v] = {value};") for value in values]  # noqa: E731
        if size > 1:
            return self.in_vectors(stmts, ends, self.kernel.grid[-1][0], size, self.column, hold)
        self.line("const int v = 0;")
        hold(self.block(stmts, ends))


class ScatterWriter(UpdateWriter):
    headers = ("scatter.h",)
    with_seen = False  # whether the function of an update gets its index, too
    launch: ScatterLaunch

    def __init__(self, launch: ScatterLaunch) -> None:
        super().__init__(launch)
        self.occupancy = f", {1024 // launch.threads}"  # blocks of a multiprocessor

    def coordinates(self) -> Iterator[str]:
        at, end = self.launch, self.found.end.extent
        yield f"const int first = {self.block_number} % {at.tiles} * {at.rows};"
        yield f"const int end = first + {at.rows} < {end} ? first + {at.rows} : {end};"
        group = f"(rlx_uindex)({self.block_number} / {at.tiles}) * {at.groups} + threadIdx.x % {at.groups}"
        name = "inside" if at.words_each else "own"
        yield from self.of_point(group, f"const bool {name} = point < {at.points};", f"if (!{name}) point = 0;")

    def begin(self) -> None:
        """Blocks of a halted run mark and clear for the others, too."""
        if not self.launch.words_each:
            return super().begin()
        self.line("rlx_begin();")
        self.line("const bool own = inside && !rlx_halted(halt);")

    def body(self) -> None:
        """Functions of a place or an index, which rlx_scatter calls."""
        at, found = self.launch, self.found
        put, out = found.put, found.last
        self.column = f"{self.names[self.kernel.grid[-1][0]]}_0" if at.vector > 1 else ""
        kind = self.type(put.buffer.dtype)
        row, to = [self.name(s.var, "i") for s in (found.start, found.end)], f"{kind} (&held)[{at.vector}]"
        with self.alone():
            with self.scope([f"const auto begin = [&](rlx_index {row[0]}, {to}) {{"]):
                self.columns((), (found.first.value,))
            index = next(x for x in walk((found.check, put.index)) if isinstance(x, Load))
            seen = self.type(index.dtype)
            with self.scope([f"; const auto look = [&](int pick) -> {seen} {{"]):
                name_pick(self, found.picks)
                self.line(f"return {self.value(index)};")
            with self.scope([f"; const auto place = [&](int pick, {seen} seen) -> rlx_index {{"]):
                name_pick(self, found.picks)
                self.memo[id(index)] = "seen"
                self.statement(found.check)
                self.line(f"return {self.value(found.inside)} ? {self.value(put.index)} : -1;")
            with self.scope([f"; const auto added = [&](int pick, {f'{seen}, ' * self.with_seen}{to}) {{"]):
                name_pick(self, found.picks)
                self.memo[id(found.inside)] = "true"
                self.columns((), (found.update,))
            with self.scope([f"; const auto finish = [&](rlx_index {row[1]}, const {to}) {{"]):
                self.memo[id(out.value)] = "held[v]"
                self.columns((out,), ())
        self.line(";")
        self.call(kind, f"begin, look, place, added, {self.combined()}, finish")

    def call(self, kind: str, functions: str) -> None:
        at = self.launch
        ahead = max(1, 8 // (at.at_once * at.groups // at.threads * at.vector))
        marks = f"rlx_counters + (size_t){self.block_number} * {at.words_each}" if at.words_each else "0"
        if at.words_each:
            blocks = f"{self.block_number}, {at.blocks}, {self.found.count}, {at.rows}, {at.tiles}, {at.blocks // at.tiles}"
            self.line(f"rlx_mark<{at.threads}, {at.words_each}, {at.grain}>(rlx_counters, {blocks}, look, place);")
        looks = 4 if at.words_each else min(8, -(-self.found.count // at.threads))
        sizes = f"{at.threads}, {at.groups}, {at.at_once}, {at.vector}, {ahead}, {looks}, {min(MOST, at.rows)}"
        sizes += f", {at.words_each}, {at.grain}, {kind}"
        self.line(f"rlx_scatter<{sizes}>(first, end, {self.found.count}, {marks}, own, {functions});")


__all__ = [
    "Patch", "ScatterLaunch", "ScatterWriter", "UpdateWriter", "name_pick", "patch_of", "scatter_of", "scattered", "scheduled",
    "shares", "stream_of", "tile_cells", "unclamped", "way_of",
]  # fmt: skip
