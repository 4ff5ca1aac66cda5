"""The tiling of a contraction into register tiles, blocks and tasks: plain numbers from shapes, dtypes and the Target.

A tile is `rows` x `vectors` accumulators, kept in registers over the whole k. The columns of one full-width tile are a panel. A
task is one block of rows times one group of panels. Nothing here depends on time, on the current machine or on the assignment of
tasks to threads: equal inputs give the same tiling, and the same tiling gives the same bits. A caller may choose other values
that `axes` lists; they change the tiling but not the order of additions.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from itertools import pairwise
from math import gcd, prod

from rlx.backends.cpu.dots import SUMS as SUM_DTYPES
from rlx.backends.cpu.dots import Dot, dot_of
from rlx.backends.cpu.kernels import amx
from rlx.backends.cpu.kernels.tile import LINE
from rlx.backends.cpu.scope import remainder
from rlx.host.processor import fetches_ahead
from rlx.ir.kernel import Buffer, Computed, Contract, Kernel, Local, Operand, Store, coefficient, loaded_buffers, walk
from rlx.ir.target import Target
from rlx.records import record

MAX_ROWS = 8  # most rows of a tile; with 3 vectors of 16 lanes, 5 of AVX-512's 32 registers are left for operands
ROWS_OF_ONE, DEEP = 14, 256  # the same with one vector, from so many steps of k on: loads of b count, beside one for each row
BLOCK_ROWS = 128  # most rows of a task's block: their part of `a` stays in the L2 cache
FEWEST_ROWS = 4  # fewer rows take about as long, since reading `b` is the bottleneck
GRAIN = 1 << 17  # multiply-adds; smaller tasks are not worth handing over (about a microsecond)
EVEN = 32  # tasks of a thread: with so many, the last one does not count
LEAST_TILES = 4  # of rows, in a block that is made lower
TASKS_PER_THREAD = 4  # enough to balance threads of unequal speed
SCRATCH = 1 << 20  # most bytes of converted rows of `a` and per-row locals of a task
COMPUTED_ROWS = 32  # with lower blocks, reading all of `b` for each takes longer than computing rows of `a` twice
AHEAD_ROWS = 4  # lower tiles of a group of rows only wait for memory: they do not ask for the next panel
NEAR = 9 << 10  # bytes from where the only tile of a panel is to where it prefetches
COLD = 1 << 22  # bytes of `b` that the caches do not keep from one run to the next, among others of the same size
IN_PLACE_TILES = 8  # up to this many row tiles read an unpacked `b` in place; with more, each panel is copied first
MATRIX_ROWS = 8  # fewer leave most of the matrix unit idle, where rows are copied for it, or come in groups
UNIT_ROWS = {2: 2, 4: 4}  # elements of a group -> rows from which on the unit is faster than vectors, whose sums of two are slow
MATRIX_DEPTH = 2 * amx.L1 // 3 // (2 * amx.BLOCK)  # steps of k: two thirds of the L1 cache hold a panel's part
MATRIX_BLOCK_ROWS = 512  # most rows of a block on the matrix unit, for which L3 is slow; several threads may share an L2 cache
KEPT_CACHES = 2  # results up to so many second-level caches are near enough for their reader
TILED_PANELS = 20  # with fewer panels, copying rows of `a` as tiles costs more than it gains
TILED_COLUMNS = 8 * 2 * amx.SIDE  # the same of windows, whose rows are in pieces
RAGGED_TASKS = 16  # per thread, if rows are spread over grid points in ways that are known at run time only
PART = 1 << 17  # bytes of a panel's part, at most, and at most an eighth of the L2 cache: it stays there beside the next one
GROUP_PART = 24 << 10  # of that of a group of rows, which are few: reading and arithmetic take turns in the L1 cache
FAR_ROWS = 1 << 18  # bytes of rows of `a` that are not near the core when a kernel begins
FEW_PANELS = 24  # with more, waiting for rows in the first one does not count
SUMS, SUMS_OF_ONE = 8, 12  # independent accumulators that hide the latency of a multiply-add; in tiles of one vector
LOW_UNIT = (1024, 1536), (128, 3072)  # rows, depth: up to there, several threads multiply bf16 faster with 16 rows a tile
LOW_ROWS = 3  # rows of the lowest tile that is worth trying
DEFAULT_TILING: Mapping[str, int] = {}


@record
class Plan:
    """Rows: `row_tiles` tiles, the first `tall` of them `rows` high and the others one lower. Columns: `panels` of
    `vectors` x `lanes`. Tasks: `batch_groups` x `blocks` of row tiles x `groups` of panels.

    `group`: number of interleaved rows of b, for an instruction that sums as many products; a tile's step of k is then a group.
    `stage_a`, `stage_b`: the operand is copied to scratch first, in the accumulator's dtype or, for groups, unconverted.
    `stage_b` names the method: "rows" and "columns" follow b's unit stride, "any" has none, "computed" evaluates b there,
    "groups" interleaves its rows, "" reads it in place. Narrow floats are widened in the tile, which measured faster than a
    widened copy. `matrix`: tiles run on the matrix unit (amx.py), in steps of so many groups; 0: none do. `ahead`: each tile
    of a panel prefetches its share of the next panel. `depth`: steps of k that all tiles of a panel take before any takes the
    next ones, so that this part of the panel stays in a cache; 0: all. `tiled`: a is staged as tiles of the matrix unit.
    `segment`: rows that are one stride apart, if not all are; no tile reaches into the next segment. Each has `in_segment`
    tiles, of which the first `tall` are the high ones. `rows_ahead`: each tile prefetches the rows of the next one.
    """

    lanes: int
    vectors: int
    rows: int
    tall: int
    row_tiles: int
    panels: int
    batch: int
    batch_groups: int
    blocks: int
    groups: int
    group: int
    stage_a: bool
    stage_b: str
    registers: int
    matrix: int
    ahead: bool
    depth: int = 0
    tiled: bool = False
    segment: int = 0
    in_segment: int = 0
    rows_ahead: bool = False

    @property
    def columns(self) -> int:
        return self.vectors * self.lanes

    @property
    def tasks(self) -> int:
        return self.batch_groups * self.blocks * self.groups

    def first_row(self, tile: int) -> int:
        """The first row of a row tile."""
        before, tile = divmod(tile, self.in_segment) if self.segment else (0, tile)
        return before * self.segment + tile * (self.rows - 1) + min(tile, self.tall)

    @property
    def block_rows(self) -> int:
        """Rows of the largest block."""
        starts = [self.first_row(b * self.row_tiles // max(1, self.blocks)) for b in range(self.blocks + 1)]
        return max((after - before for before, after in pairwise(starts)), default=0)

    def unroll(self, rows: int, vectors: int) -> int:
        """The number of steps of k with separate sums: low tiles have too few accumulators to hide a multiply-add's latency."""
        steps = 1
        least = SUMS_OF_ONE if vectors == 1 else SUMS
        while rows * vectors * steps < least and 2 * rows * vectors * steps + vectors < self.registers:
            steps *= 2
        return steps


def plan(kernel: Kernel, c: Contract, target: Target, tiling: Mapping[str, int] = DEFAULT_TILING) -> Plan:
    """The tiling of this contraction for this target. `tiling` overrides values (see `axes`)."""
    lanes = target.vector_bytes // max(4, c.acc.dtype.itemsize)
    registers = registers_of(target)
    panel, group = panel_of(c.b)[0], group_of(c, target)
    while panel % lanes:
        lanes //= 2
    matrix = _step(c, group, target) if c.count is None and c.m >= UNIT_ROWS.get(group, MATRIX_ROWS) else 0
    vectors = panel // lanes or (2 if matrix else tiling.get("vectors", _panel_vectors(c, registers)))
    summed = 2 * vectors if (dot := dot_in(c, target)) and dot.signed else 0  # registers of b's own sums, and of constants
    highest = tiling.get("rows", _highest(c, vectors, lanes, registers - summed, group if matrix else 0, target.threads))
    if c.count is not None:
        return _ragged(kernel, c, target, tiling, highest, lanes, vectors, registers)
    panels, stage_a = -(-c.n // (vectors * lanes)), _stage_a(c, group, matrix)
    segment = 0 if stage_a else _segment(c)
    in_segment = -(-(segment or c.m) // highest)
    rows = -(-(segment or c.m) // max(1, in_segment))
    tall = (segment or c.m) - in_segment * (rows - 1)
    row_tiles = in_segment * (c.m // segment if segment else 1)
    batch = prod(extent for _, extent in kernel.grid)
    row_bytes = sum(x.size * x.dtype.itemsize for x in kept_locals(kernel, c))
    row_bytes += c.k * (c.a if group > 1 else c.acc).dtype.itemsize if stage_a or matrix else 0
    most, room = BLOCK_ROWS, SCRATCH
    if matrix and target.threads == 1:
        most, room = MATRIX_BLOCK_ROWS, target.core_cache_bytes * 3 // 8  # panels and results pass by
        far, whole = c.k * c.n * c.b.dtype.itemsize > target.core_cache_bytes, target.core_cache_bytes * 4 // 5
        if c.rows and far and c.m * row_bytes <= whole:
            room = whole  # sums of whole rows fill most of it; for each block, the weights are read again
    fit = min(most, room // row_bytes if row_bytes else most)
    blocks = -(-row_tiles // max(1, fit // max(1, rows)))
    wanted = tiling.get("tasks", _wanted_tasks(c, batch, target.threads))
    asked = min(row_tiles, tiling.get("blocks", 0))
    if asked and panels and batch:
        blocks = max(asked, blocks if row_bytes else 1)
        groups, batch_groups = 1, batch if blocks > 1 else min(batch, max(wanted, 1))
    else:
        by_rows = bool(c.rows) or (matrix > 0 and batch == 1 and _by_rows(c, target.threads))
        blocks, groups, batch_groups = _tasks(c, batch, row_tiles, blocks, panels, target.threads, wanted, by_rows)
        if matrix and groups > 1 and row_tiles < LEAST_TILES * blocks:  # blocks of whole rows read all of b each
            blocks = _of_one_height(row_tiles, blocks, groups * batch_groups, target.threads)
    tiles = -(-row_tiles // blocks) if blocks else 0
    stage_b = "groups" if group > 1 and not panel else _stage_b(c.b, c, tiles)
    cached = tiles * rows * c.k * c.a.dtype.itemsize <= amx.L1  # such a block is read from there, in any layout
    windows = isinstance(c.a, Operand) and c.a.col_levels  # read again and again from caches that do not hold copies of them
    tiled = matrix == amx.SIDE and (stage_a or (groups == 1 and panels >= TILED_PANELS and not cached and not windows))
    depth = _depth(c, group, vectors * lanes, matrix, stage_a, target)
    alike = bool(c.rows) and target.threads > 1  # all threads read all of b; else one tile of the unit is quick
    ahead = tiling.get("ahead", tiles > 1 or alike if matrix else _fetches_ahead(c, rows, tiles, target))
    return Plan(
        lanes, vectors, rows, tall, row_tiles, panels, batch, batch_groups, blocks, groups, group, stage_a or tiled, stage_b,
        registers, matrix, bool(ahead) and stage_b != "groups", depth, tiled, segment,
        in_segment if segment else 0, _fetches_rows(c, group, -(-panels // groups) if groups else 0, depth, stage_a or tiled),
    )  # fmt: skip


def _ragged(
    kernel: Kernel, c: Contract, target: Target, tiling: Mapping[str, int], highest: int, lanes: int, vectors: int, registers: int
) -> Plan:
    """The tiling of a contraction whose grid points have a number of rows of their own: a task has some of the panels of some
    points; the rows of a point are cut at run time, into blocks of at most `block_rows` and tiles of `rows` or fewer."""
    _, group = panel_of(c.b)
    matrix = amx.SIDE if c.m > MATRIX_ROWS and _step(c, group, target) else 0
    rows = 2 * amx.SIDE if matrix else max(1, min(highest, c.m))
    stage_a = _stage_a(c, group, matrix) or matrix > 0  # the matrix unit reads whole blocks, with rows that a group does not have
    row_bytes = c.k * (c.a if group > 1 else c.acc).dtype.itemsize if stage_a else 0
    row_bytes += sum(x.size * x.dtype.itemsize for x in kept_locals(kernel, c))
    fit = min(c.m, BLOCK_ROWS, max(1, SCRATCH // row_bytes) if row_bytes else BLOCK_ROWS)
    row_tiles, panels, batch = -(-fit // rows), -(-c.n // (vectors * lanes)), prod(extent for _, extent in kernel.grid)
    wanted = tiling.get("tasks", _ragged_wanted(c, target.threads))
    groups, batch_groups = ragged_tasks(panels, batch, c.m, wanted, target.threads)
    return Plan(
        lanes, vectors, rows, row_tiles, row_tiles, panels, batch, batch_groups, 1, groups, group, stage_a,
        _stage_b(c.b, c, -(-c.m // max(1, batch * rows))), registers, matrix, _fetches_ahead(c, rows, 1, target),
        _depth(c, group, vectors * lanes, matrix, stage_a, target), tiled=matrix > 0,
    )  # fmt: skip


def _ragged_wanted(c: Contract, threads: int) -> int:
    return _wanted_tasks(c, 1, threads, RAGGED_TASKS)


def ragged_tasks(panels: int, batch: int, m: int, wanted: int, threads: int) -> tuple[int, int]:
    """(groups of panels, groups of points). Every group of panels reads or computes the rows again, so there are only as many as
    it takes to keep the threads busy with the points that may have rows, and two, so that no point is one thread's alone."""
    enough = -(-TASKS_PER_THREAD * threads // max(1, min(batch, m)))
    groups = max(1, min(panels, wanted, threads, max(2, enough)))
    return groups, max(1, min(batch, -(-wanted // groups)))


def axes(kernel: Kernel, c: Contract, target: Target) -> dict[str, tuple[int, ...]]:
    """Tuning parameters of this contraction: name -> the default of `plan`, then other values with the same order of additions.

    `rows`: most rows of a tile; `vectors`: of a panel, if b is not packed; `ahead`: whether the next panel is prefetched;
    `tasks`: the number to aim for; `blocks`: split the rows into this many, and the columns not at all (0: as `plan` does)."""
    default = plan(kernel, c, target)
    if c.count is not None:
        usual, other = {"tasks": _ragged_wanted(c, target.threads)}, {"tasks": other_tasks(target.threads)}
        return distinct(usual, other, lambda tiling: plan(kernel, c, target, tiling))
    wanted = _wanted_tasks(c, default.batch, target.threads)
    unit = default.group if default.matrix else 0
    highest = _highest(c, default.vectors, default.lanes, default.registers, unit, target.threads)
    tile: dict[str, Iterable[int]] = {"vectors": (1, 2, 3, 4)}
    if panel_of(c.b)[0]:
        heights = (amx.SIDE, 2 * amx.SIDE) if default.matrix else range(highest - 1, LOW_ROWS - 1, -1)
        tile = {"rows": heights, "ahead": (not default.ahead,)}
    some = default.blocks // 2, 2 * default.blocks, 4 * default.blocks
    asked = {**tile, "tasks": other_tasks(target.threads), "blocks": {*some, *other_tasks(target.threads)} - {0}}
    own = {"rows": highest, "vectors": default.vectors, "ahead": int(default.ahead), "tasks": wanted, "blocks": 0}
    order = _order(c, default)

    def tiled(tiling: Mapping[str, int]) -> Plan:
        made = plan(kernel, c, target, tiling)
        one = len(order) == 1 or (made.rows, made.vectors) == (default.rows, default.vectors)  # else the order depends on the row
        return made if one and _order(c, made) == order else default

    return distinct(own, asked, tiled) if default.tasks else {}


def distinct(
    own: Mapping[str, int], asked: Mapping[str, Iterable[int]], tiled: Callable[[Mapping[str, int]], Hashable]
) -> dict[str, tuple[int, ...]]:
    """Keep the asked values whose tiling differs from the default and from each other: name -> (the default, *these)."""
    found: dict[str, tuple[int, ...]] = {}
    for name, values in asked.items():
        different: dict[Hashable, int] = {}
        for value in sorted(map(int, values)):
            different.setdefault(tiled({name: value}), value)
        different.pop(tiled(DEFAULT_TILING), None)
        if different:
            found[name] = own[name], *different.values()
    return found


def other_tasks(threads: int) -> tuple[int, ...]:
    """Numbers of tasks to try in tuning."""
    return () if threads == 1 else (1, threads, 2 * threads, 4 * threads, 8 * threads)


def _order(c: Contract, p: Plan) -> set[tuple[int, int]]:
    """The order of additions over all tiles, as (partial sums of an element, steps of k after which they are combined)."""
    heights = (p.rows, p.rows - 1)[: 1 + (p.tall < (p.in_segment or p.row_tiles))]
    widths = {p.vectors if c.n >= p.columns else 0, -(-(c.n % p.columns) // p.lanes)} - {0}
    unrolled = {1} if p.matrix else {p.unroll(height, width) for height in heights for width in widths}
    return {(steps, p.depth if steps > 1 else 0) for steps in unrolled}


def _highest(c: Contract, vectors: int, lanes: int, registers: int, unit: int, threads: int) -> int:
    """Most rows of a tile. `unit`: elements in a group if it is one of the matrix unit, else 0."""
    if not unit:
        vectors = max(1, min(vectors, -(-c.n // lanes)))  # that a tile has
        most = ROWS_OF_ONE if vectors == 1 and c.k >= DEEP else MAX_ROWS
        return max(1, min(most, (registers - 1 - vectors) // vectors))
    plain = isinstance(c.a, Operand) and not c.a.row_levels + c.a.col_levels
    low = unit == 2 and threads > 1 and any(c.m <= rows and c.k <= depth for rows, depth in LOW_UNIT)
    few = bool(c.rows) and -(-c.m // (2 * amx.SIDE)) < threads  # tasks own whole rows: some threads would have none
    return amx.SIDE if plain and (low or few) else 2 * amx.SIDE


def _panel_vectors(c: Contract, registers: int) -> int:
    """Vectors of an unpacked panel: more if few rows share each vector."""
    wide = 8 if c.m == 1 else 6 if c.m == 2 else 3
    return wide if registers == 32 else min(wide, 4 if c.m <= 2 else 2)


def registers_of(target: Target) -> int:
    """Vector registers."""
    return 32 if target.vector_bytes == 64 or "neon" in target.features else 16


def panel_of(b: Operand | Computed) -> tuple[int, int]:
    """(columns of a packed panel, interleaved rows) of a right operand; 0 columns: it is not packed."""
    return (b.panel, b.group) if isinstance(b, Operand) else (0, 1)


def group_of(c: Contract, target: Target) -> int:
    """Rows of a right operand that are summed together: those that its panels interleave, or that are interleaved in the kernel
    where it is made in the run."""
    (panel, group), b, dot = panel_of(c.b), c.b, dot_of(target, _operands(c))
    plain = not panel and isinstance(b, Operand) and 1 in (b.row_stride, b.col_stride) and c.count is None
    fits = dot and target.vector_bytes == 64 and c.m >= MATRIX_ROWS and c.n >= dot.lanes and c.k >= dot.group
    return dot.group if dot and plain and fits and SUM_DTYPES[dot.operands] == c.acc.dtype.name else group


def _operands(c: Contract) -> str:
    """Its dtypes, as dots.py names them."""
    return c.a.dtype.name if c.a.dtype == c.b.dtype else f"{c.a.dtype} {c.b.dtype}"


def dot_in(c: Contract, target: Target) -> Dot | None:
    """The instruction that sums interleaved rows of a right operand; None: they are not."""
    group = group_of(c, target)
    dot = dot_of(target, _operands(c)) if group > 1 else None
    summed = dot and SUM_DTYPES[dot.operands] == c.acc.dtype.name
    assert group == (dot.group if dot and summed else 1), f"groups of {group} of {_operands(c)}"
    return dot


def kept_locals(kernel: Kernel, c: Contract) -> tuple[Local, ...]:
    """Locals with a separate copy for every row of a block: the epilogue writes them, and finished rows read them. Others are
    reused from row to row."""
    used = {x for x in walk(c.epilogue) if isinstance(x, Local)}
    return tuple(x for x in kernel.locals if x.per_row and x in used)


def _stage_a(c: Contract, group: int, matrix: int) -> bool:
    a = c.a
    if isinstance(a, Computed) or (group == 1 and a.dtype != c.acc.dtype):
        return True
    if 0 < _segment(c) < (MATRIX_ROWS if matrix else LOW_ROWS):
        return True  # rows of a tile are one stride apart, and so few share too little of b
    run = a.col_levels[0][0] if a.col_levels else c.k
    if matrix and (run % (matrix * group) or (a.row_levels and not a.col_levels and c.n >= TILED_COLUMNS)):
        return True  # the unit reads whole steps; for many panels, rows that are not windows are better adjacent
    if group == 1:
        return False
    runs = [n for n, _ in a.col_levels[:1]] + [s for _, s in a.row_levels + a.col_levels]
    return not (a.col_stride == 1 and (a.row_stride % group == 0 or c.m == 1) and not any(n % group for n in (c.k, *runs)))


def _step(c: Contract, group: int, target: Target) -> int:
    """Groups of a step of the matrix unit, 0: it cannot be used. A depth that is not whole steps has a last one of which copies
    are read, with zeros behind; shorter steps that divide it are better if there are not more of them. Only full steps are
    copied or computed, and windows that are read in place are whole steps."""
    groups, runs = -(-c.k // group), [n for n, _ in c.a.col_levels[:1]] if isinstance(c.a, Operand) else []
    if groups < amx.LEAST_STEP or not amx.multiplies(target.features, group):
        return 0
    step = amx.step_of(target.features, group, gcd(c.k, *runs))
    whole = step and (runs or groups // step <= -(-groups // amx.SIDE))
    return step if whole and not _stage_a(c, group, step) else amx.SIDE


def _segment(c: Contract) -> int:
    """Rows of a that are one stride apart; 0: all of them."""
    rows = c.a.row_levels[0][0] if isinstance(c.a, Operand) and c.a.row_levels else c.m
    return rows if rows < c.m else 0


def _stage_b(b: Operand | Computed, c: Contract, tiles: int) -> str:
    if isinstance(b, Computed):
        return "computed"
    if b.panel:
        return ""
    if b.col_stride == 1 or c.n == 1:
        return "rows" if tiles > IN_PLACE_TILES else ""
    return "columns" if b.row_stride == 1 or c.k == 1 else "any"


def _fetches_ahead(c: Contract, rows: int, tiles: int, target: Target) -> bool:
    """Whether prefetching gains. It costs low tiles up to a third if `b` is in a cache, and one row a tenth on processors that
    run far enough ahead by themselves."""
    cold = isinstance(c.b, Operand) and c.b.buffer.size * c.b.dtype.itemsize >= COLD
    return rows >= 6 or min(c.m, rows * tiles) >= 10 or (cold and (rows > 1 or fetches_ahead(target.features)))


def _fetches_rows(c: Contract, group: int, panels: int, depth: int, staged: bool) -> bool:
    """Whether tiles prefetch rows of a: they come from a far cache or from memory, and few panels share the time that takes. The
    processor itself prefetches along rows, not the first elements of the next ones."""
    a = c.a
    if not isinstance(a, Operand) or staged or depth or panels > FEW_PANELS or a.col_stride != 1:
        return False
    adjoin = group == 1 if a.col_levels else a.row_stride == c.k
    return adjoin and c.m * a.row_stride * a.dtype.itemsize >= FAR_ROWS


def _depth(c: Contract, group: int, columns: int, matrix: int, stage_a: bool, target: Target) -> int:
    """Steps of k (of `group` elements) in a part of a panel: parts of one size if possible. 0, all, if they are fewer
    than three parts, or if one row tile reads the panel, once. Columns of a that lie in levels and are read in place: a part is
    whole runs of the innermost one, or a run is whole parts."""
    steps, most = -(-c.k // group), PART if c.count is None else GROUP_PART
    most = max(1, min(most, target.core_cache_bytes // 8) // (columns * group * c.b.dtype.itemsize))
    if matrix or c.m <= MAX_ROWS or steps < 3 * most:
        return 0
    if isinstance(c.a, Operand) and c.a.col_levels and not stage_a:
        run = c.a.col_levels[0][0] // group
        if run > most:
            return next(run // parts for parts in range(-(-run // most), run + 1) if run % parts == 0)
        runs = steps // run
        return run * -(-runs // -(-runs // (most // run)))
    least = -(-steps // most)
    return -(-steps // next((parts for parts in range(least, 2 * least) if steps % parts == 0), least))


def _wanted_tasks(c: Contract, batch: int, threads: int, each: int = TASKS_PER_THREAD) -> int:
    worth = max(1, batch * max(c.m, FEWEST_ROWS) * c.n * max(1, c.k) // GRAIN)
    return tasks_of(worth, threads, each)


def tasks_of(worth: int, threads: int, each: int = TASKS_PER_THREAD) -> int:
    """The number of tasks to aim for, if so many are worth handing over: `each` for each thread, at most."""
    return 1 if threads == 1 else whole_rounds(min(worth, threads * each), threads)


def _tasks(
    c: Contract, batch: int, row_tiles: int, blocks: int, panels: int, threads: int, wanted: int, by_rows: bool
) -> tuple[int, int, int]:
    """(blocks of rows, groups of panels, groups of batch entries): at least `blocks` blocks, and work for every thread."""
    if not (row_tiles and panels and batch):
        return 0, 0, 0
    groups = 1
    shares = c.n * c.acc.dtype.itemsize % LINE != 0  # groups of columns would write to the same cache lines
    if shares and wanted > batch * blocks and row_tiles >= 8 * threads:
        blocks = -(-max(blocks, 2 * threads) // threads) * threads
    elif wanted > batch * blocks and not by_rows:
        if isinstance(c.a, Computed):  # every group of columns recomputes its rows; a thread computes those of one block once
            blocks = max(blocks, min(-(-wanted // batch), c.m // COMPUTED_ROWS))
            most = threads if batch * blocks > 1 else max(threads, panels)
            wanted = min(wanted, most) if wanted > batch * blocks else wanted
        groups = max(1, min(panels, -(-wanted // (batch * blocks))))
    if wanted > batch * blocks * groups:  # a task owns whole rows, or there are few columns: lower blocks
        most = max(threads, row_tiles // 4)
        blocks = min(row_tiles, max(blocks, min(most, -(-wanted // (batch * groups)))))
    batch_groups = batch if blocks * groups > 1 else min(batch, max(wanted, 1))
    times = groups * batch_groups
    step = threads // gcd(threads, times)
    even = -(-blocks // step) * step  # with so many blocks, tasks are whole rounds of the threads
    lower = whole_rounds(blocks * times, threads) > blocks * times and LEAST_TILES * even <= row_tiles
    return even if lower else blocks, groups, batch_groups


def _of_one_height(row_tiles: int, blocks: int, times: int, threads: int) -> int:
    """At least `blocks` blocks, of `times` tasks each: blocks of one height if the threads end sooner then. They have few tiles,
    since those of the matrix unit are high."""
    equal = next(n for n in range(blocks, row_tiles + 1) if row_tiles % n == 0)
    before, after = (-(-n * times // threads) * -(-row_tiles // n) for n in (blocks, equal))
    return equal if after < before else blocks


def results_in_lines(kernel: Kernel, c: Contract, columns: int) -> frozenset[Buffer]:
    """Results of the matrix unit, in panels of so many columns, of which each panel's part of a row is whole lines."""
    known = c.count is None and not kernel.limits  # how many rows there are
    read = loaded_buffers(kernel)
    stores = [s for s in c.epilogue if isinstance(s, Store) and s.buffer not in read and known and s.guard is None]

    def in_lines(s: Store) -> bool:
        line = LINE // s.buffer.dtype.itemsize
        return columns % line == 0 and coefficient(s.index, c.j) == 1 and remainder(s.index, c.j, line) == 0

    return frozenset(s.buffer for s in stores if isinstance(s.buffer, Buffer) and in_lines(s))


def past_caches(b: Buffer, target: Target) -> bool:
    """Whether a result is written past the caches, so that no line is read to be written: a thread's share is more than
    KEPT_CACHES."""
    return b.size * b.dtype.itemsize > target.threads * target.core_cache_bytes * KEPT_CACHES


def _by_rows(c: Contract, threads: int) -> bool:
    """Whether threads of a product on the matrix unit divide the rows of one block, not the columns: if the results are as many
    bytes as the weights that all threads but one then read again. With some of the columns, a thread writes lines that others
    have read, and reads in the next kernel what they wrote."""
    stored = sum(s.buffer.dtype.itemsize for s in walk(c.epilogue) if isinstance(s, Store) and isinstance(s.buffer, Buffer))
    again = (threads - 1) * c.k * c.b.dtype.itemsize
    packed = isinstance(c.a, Operand) and panel_of(c.b)[0] > 0
    return packed and 2 * amx.SIDE * threads <= c.m <= BLOCK_ROWS and 0 < again <= c.m * stored


def whole_rounds(tasks: int, threads: int) -> int:
    """At least `tasks` tasks: few of them are a multiple of the threads, which then end together."""
    return -(-tasks // threads) * threads if threads < tasks < EVEN * threads else tasks
