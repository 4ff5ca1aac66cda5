"""Contractions of f16, bf16, 8-bit floats and integers, and f32 that may be rounded (TF32) on the tensor cores of compute
capability 9.0.

A block has one producer warp group and two consumers. The producer keeps a ring of tiles in shared memory full with bulk
tensor copies. Each consumer multiplies half of the rows of a tile, or they alternate whole tiles, so that one runs the
epilogue while the other multiplies (`Tiling.turns`), or alternate stages where there are few rows (`Tiling.alternate`). Blocks
are persistent; leftover tiles are shared: the blocks of a cluster split the summed axis, and add their sums in a fixed order.
Results without an epilogue may be stored by bulk copies (`Tiling.queued`). Instructions take 64 rows, but any multiple of 8
columns: where rows of a tile would be idle, the transposed product is computed (`Tiling.swapped`). Multicast to pairs of
blocks with the same columns made few products faster, by 3% at most, and others slower.

More than 500 lines: a tiling, its cost and its choice are read together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from rlx.backends.cuda.blocks import turn_of
from rlx.backends.cuda.images import Image, image_of
from rlx.backends.cuda.schedule import Launch, Segments, TensorMap, busy_points
from rlx.backends.cuda.tensor_rows import LEAST_COLUMNS, LEAST_ROWS, PART, Parts, factor_of, parts_of, unscaled
from rlx.backends.cuda.vectors import aligned, width
from rlx.ir.dtype import as_dtype, f32
from rlx.ir.kernel import Alu, Computed, Const, Contract, Expr, Kernel, Operand, Store, Var, coefficient, const, walk
from rlx.ir.nest import substitute
from rlx.records import record

KINDS = {  # dtypes of the operands and of the sums, and their names in the instruction
    ("f16", "f16", "f32"): "f32.f16.f16", ("bf16", "bf16", "f32"): "f32.bf16.bf16", ("tf32", "tf32", "f32"): "f32.tf32.tf32",
    ("u8", "i8", "i32"): "s32.u8.s8", ("i8", "i8", "i8"): "s32.s8.s8", ("u8", "u8", "u8"): "s32.u8.u8",
    **{(f"f8{a}", f"f8{b}", "f32"): f"f32.{a}.{b}" for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")},
}  # fmt: skip
RAW = 3  # stages of an operand that threads make tiles of, in flight
PROMOTED = 192  # columns of a tile of 8-bit floats, whose sums are kept twice
LINE = 128  # bytes of the summed axis in a stage: a swizzled row
GROUP = 128  # threads of a warp group
CHUNK = 64  # columns staged at once by the epilogue, at most
WARPS = 8  # that multiply
STAGED = 16 * CHUNK * 4  # bytes of a warp: 16 rows
SHARED = 227 << 10
OF_GROUPS = (64, 96, 128, 192, 256)  # columns of tiles of groups that were measured
STAGES, MANY_STAGES = 8, 10  # of a ring, at most
SOME_STEPS, MANY_STEPS = 16, 32  # of sums that swapped or tall tiles, and many stages, were measured to suit
HALF, TALL = 64, 256  # rows, of tiles with 128
STREAMED = 40 << 20  # bytes of weights, from which on they leave the L2 cache before the next run
AT_WORK = 8  # tiles of rows, or columns, that are walked together, so that blocks at work share operands in the L2 cache

# Costs in clock cycles of a multiprocessor, fitted to the times of 91 products in 4 to 20 tilings each on an H200: the choice
# takes 2% longer than the best of them on average.
FLOPS = 4096  # multiply-adds of 16-bit floats count as two
BYTES, LOADED = 58, 8  # by bulk copies and by threads, while all multiprocessors fetch
ACROSS = 0.385  # of the bytes of boxes that begin inside a line of memory, in addition
SECTOR = 32  # bytes that memory gives at once
BETWEEN_LINES, BETWEEN_SECTORS = (1.17, 1.69), (2.15, 4.2)  # times as long for boxes whose rows begin there: short, long sums
PASSED = 133  # bytes to and from shared memory
LATENCY = 2320  # of a bulk copy, beside others
EPILOGUE = 4.5, 2.4  # elements, of both multiplying groups and of one
QUEUED, WRITTEN = 14.2, 5.1  # the same of results that leave by bulk copies, and of those copies
COSTLY = 3.0  # times as long with an exponential or the like
SINGLE = 2.4  # times as long for one group, of elements that are stored one by one
START = 5000  # of a launch, before the first product
NEXT = 1570  # from tile to tile
EXCHANGE, GIVEN = 645, 3.45  # of sums between blocks: at least, and bytes
HALVES = 2400  # of sums between groups, at least
SWAPPED = 1.35  # times as long for swapped tiles
NARROW = 0.19  # how much longer than all that says: swapped tiles, the more the narrower
CLUSTERED = 7 / 8  # of the multiprocessors that clusters of more than 2 blocks take at once


@record
class Side:
    """One operand of the product. `along`: the contiguous axis of its tile is the summed one. `tensor`: where bulk copies can
    fetch it, with the grid variables `axes` that select a matrix; else threads load its elements one by one. `last`: that with
    boxes of what the last tile has of it, if that is less. `raw`: they fetch it as it is in memory, and threads make the tile of
    that: they widen 8-bit floats, or exchange the axes of f32."""

    along: bool
    tensor: TensorMap | None = None
    last: TensorMap | None = None
    axes: tuple[Var, ...] = ()
    raw: bool = False
    start: Expr | None = None  # the first row
    image: Image | None = None  # of whose windows the matrix is made


@record
class Tiling:
    """`rows` x `columns` of a tile. `turns`: the multiplying groups take whole tiles in turns. `parts`: blocks of a
    cluster that share the summed axis of a tile. Of a tile of 64 rows without turns, the groups share it, too. `queued`: bulk
    copies store results while the next tile is multiplied. `swapped`: the tile's rows are columns of the product, so that few
    rows of it, or some more than a tile has, take tiles of as many columns."""

    rows: int = 128
    columns: int = 256
    turns: bool = False
    parts: int = 1
    queued: bool = False
    swapped: bool = False
    deep: bool = False  # whether the ring may have many stages
    spare: int = 0  # columns that copies fetch beside those of the tile
    raw: int = 0  # bytes of the right operand's part of a stage, as it is in memory
    held: int = 0  # bytes of a block for other purposes
    factors: int = 0  # bytes for the factors of rows

    @property
    def alternate(self) -> bool:
        """Whether the groups take stages in turns, and add their sums."""
        return self.rows == HALF and not self.turns

    @property
    def shares(self) -> int:
        """Parts of the summed axis of a tile that is shared: each has the sums of as many columns in the end."""
        return self.parts * (2 if self.alternate else 1)

    @property
    def slabs(self) -> int:
        """Times 64 rows that one group multiplies."""
        return self.rows // 64 // (1 if self.turns or self.alternate else 2)

    @property
    def stage(self) -> int:
        """Bytes of a stage: a tile of each operand."""
        return (self.rows + self.columns + self.spare) * LINE

    @property
    def pitch(self) -> int:
        """Bytes of a warp for results that it stages, 16 rows at a time, or queues."""
        if self.queued:
            return max(STAGED, self.slabs * 16 * self.columns * 2)
        return STAGED // 2 if self.swapped else STAGED

    @property
    def stages(self) -> int:
        """An even number for groups that alternate: each stage is one's own."""
        limit = MANY_STAGES if self.deep and not self.alternate else STAGES
        most = min(limit, (SHARED - WARPS * self.pitch - self.held - self.factors - RAW * (self.raw + 8)) // (self.stage + 16))
        return most - most % 2 if self.alternate else most

    @property
    def ring(self) -> int:
        """Bytes of all stages, and of data waiting to become one."""
        return self.stages * self.stage + RAW * self.raw

    @property
    def shared(self) -> int:
        return self.ring + WARPS * self.pitch + 16 * self.stages + 8 * RAW + self.factors

    @property
    def scaled(self) -> int:
        """Rows of the product in a tile."""
        return self.columns if self.swapped else self.rows

    @property
    def shared_columns(self) -> int:
        """Columns of a shared tile whose sums a group has in the end."""
        return self.columns // self.shares

    def tiles(self, c: Contract) -> tuple[int, int]:
        return -(-c.m // self.rows), -(-c.width // self.columns)

    @property
    def caution(self) -> float:
        """How much longer it takes than `cost` says, which was fitted to other tilings."""
        return 1 + NARROW * max(0.0, 1 - self.columns / 128) if self.swapped else 1.0

    def cost(self, c: Contract, points: int, multiprocessors: int, by_threads: bool = False) -> float:
        """An estimate in cycles: waves of tiles on all multiprocessors, and the parts that do not overlap with them."""
        _, rounds, shared = self.rounds(points * math.prod(self.tiles(c)), multiprocessors)
        inside = 1 - math.gcd(self.columns, CHUNK) / CHUNK if self.spare else 0  # of the tiles
        columns = (min(self.columns, c.width) + self.spare) * (1 + ACROSS * inside)
        fetched = (min(self.rows, c.m) * slowness(c, c.a) + columns * slowness(c, c.b)) * LINE
        read = (self.rows + self.columns * self.rows // 64) * LINE  # 64 rows at once
        copied = fetched / LOADED if by_threads else max(fetched / BYTES, LATENCY / max(1, self.stages - 1))
        # as many cycles for any size of elements
        step = max(self.rows * self.columns * LINE / FLOPS, copied, (self.stage + read) / PASSED)
        steps, end = -(-c.k // depth(c)), self.end(c)
        main, area, later = step * steps, self.rows * self.columns, 0.0
        if self.alternate:
            end = end / 2 + HALVES + 4 * area / PASSED
        last = end
        if self.queued:
            later, end = area / WRITTEN, area / QUEUED
        if shared:  # by all parts, at the end
            return START + rounds * (main + end + NEXT) + step * -(-steps // self.parts) + last / self.parts + self.exchange
        if not self.turns:
            return START + rounds * (main + end + NEXT) + later
        both = main + end  # of one group; the other one begins when the first products are done
        return later + START + rounds * NEXT + max(rounds * main + end, -(-rounds // 2) * both, main + rounds // 2 * both)

    def rounds(self, tiles: int, multiprocessors: int) -> tuple[int, int, int]:
        """Blocks at once, rounds in which each of them has a tile of its own, and tiles that clusters share then."""
        if self.parts == 1:
            return multiprocessors, -(-tiles // multiprocessors), 0
        most = multiprocessors if self.parts == 2 else int(multiprocessors * CLUSTERED)
        blocks = most - most % self.parts
        return blocks, *divmod(tiles, blocks)

    @property
    def exchange(self) -> float:
        """Cycles in which blocks give each other the sums of their shares."""
        return EXCHANGE + 4 * self.rows * self.columns * (self.parts - 1) / self.parts / GIVEN

    def adjacent(self, c: Contract) -> tuple[Var, int]:
        """The axis whose elements are adjacent in the result, and its extent."""
        return (c.i, c.m) if self.swapped else (c.j, c.n)

    def end(self, c: Contract) -> float:
        """Cycles of the epilogue of a tile."""
        costly = any(isinstance(e, Alu) and e.op in ("erf", "exp", "tanh") for e in walk(c.epilogue))
        single = self.turns and width(c.epilogue, (), *self.adjacent(c)) == 1
        columns = SWAPPED * self.columns if self.swapped else -(-self.columns // CHUNK) * CHUNK
        elements = self.rows * columns * c.n / max(1, c.width)
        return (COSTLY if costly else 1) * (SINGLE if single else 1) * elements / EPILOGUE[self.turns]


def itemsize(c: Contract) -> int:
    """Bytes of an element of both operands in shared memory."""
    return 4 if kind(c)[0] == "tf32" else as_dtype(kind(c)[0]).itemsize


def depth(c: Contract) -> int:
    """Elements of the summed axis in a stage."""
    return LINE // itemsize(c)


def slowness(c: Contract, o: Operand | Computed) -> float:
    """How many times as long copies of an operand's boxes take as those of whole lines."""
    if not isinstance(o, Operand) or 1 not in (o.row_stride, o.col_stride):
        return 1
    pitch = o.dtype.itemsize * max(o.row_stride, o.col_stride)
    long = -(-c.k // depth(c)) >= SOME_STEPS
    return BETWEEN_SECTORS[long] if pitch % SECTOR else BETWEEN_LINES[long] if pitch % LINE else 1


def promoted(c: Contract) -> bool:
    """Whether the sums of a stage are added to others outside the tensor cores, which keep 14 bits of sums of 8-bit floats."""
    return kind(c)[0].startswith("f8")


def _is_tiling(t: Tiling) -> bool:
    """Whether groups and blocks have parts of the columns that they can exchange, and registers for the sums."""
    if t.turns and (t.parts > 1 or t.rows * t.columns > 128 * 128):
        return False
    if t.alternate and (t.queued or t.columns not in ((32, 64, 96, 128) if t.swapped else (64, 128))):
        return False
    if t.rows == TALL and (t.turns or t.queued or t.columns > 168 or (t.parts > 1 and 4 * t.rows * t.columns > t.ring)):
        return False
    if t.swapped and (t.queued or t.parts not in ((1, 2) if t.alternate else (1, 2, 4))):
        return False
    if t.parts > 1 and (t.columns % (8 * t.shares) or t.columns // t.parts < (8 if t.swapped else 16)):
        return False
    if t.parts > 1 and t.columns % 16 and not t.swapped:
        return False
    return not (t.queued and t.columns % CHUNK)


TILINGS = tuple(
    t
    for t in (
        Tiling(rows, columns, turns, parts, queued, swapped)
        for swapped, rows, turns, parts, queued in product(
            (False, True), (HALF, 128, TALL), (False, True), (1, 2, 3, 4, 6, 8), (False, True)
        )
        for columns in range(16 if swapped else 64, 257, 8)
    )
    if _is_tiling(t)
)


@record
class TensorLaunch(Launch):
    tiling: Tiling = Tiling()
    sides: tuple[Side, ...] = ()
    multiprocessors: int = 132
    results: Side | None = None  # where queued results go
    parts_of_rows: Parts | None = None

    @property
    def contract(self) -> Contract:
        c = _contract(self.kernel)
        assert c is not None
        return unscaled(exchanged(c) if self.tiling.swapped else c)

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        found = [x for side in self.sides for x in (side.tensor, side.last)]
        far = len(self.kernel.buffers) + 1  # behind the buffers and `slots`
        if self.segments and self.sides[1].tensor:
            found.append(replace(self.sides[1].tensor, argument=far))
        return tuple(x for x in (*found, self.results and self.results.tensor) if x)

    @property
    def boxes_far(self) -> bool:
        """Whether bulk copies fetch weights of host memory, too."""
        return self.segments is not None and self.sides[1].tensor is not None

    def copied(self, number: int, of_last: bool = False) -> int:
        """Bytes of a stage that bulk copies bring of an operand."""
        side, t = self.sides[number], self.tiling
        if side.tensor is None or side.raw:
            return 0
        found, size = (side.last or side.tensor) if of_last else side.tensor, (t.rows, t.columns + t.spare)[number]
        if not side.along:
            return LINE * size
        boxes = size // (CHUNK // 2) if number and self.contract.also is not None else 1
        return LINE * boxes * found.box[1]

    def is_streamed(self, number: int) -> bool:
        """Whether an operand is many weights, each of which one block reads once: the L2 cache keeps other things then."""
        c, t, side = self.contract, self.tiling, self.sides[number]
        if number == t.swapped or side.axes or self.segments or t.tiles(c)[1 - number] > 1:
            return False
        return (c.m, c.width)[number] * c.k * itemsize(c) >= STREAMED

    @property
    def by_threads(self) -> bool:
        return any(side.tensor is None or side.raw for side in self.sides)

    @property
    def copying(self) -> int:
        """Groups that copy."""
        return 1 if all(side.tensor for side in self.sides) else 2

    @property
    def early(self) -> int | None:
        """The buffer whose first tiles are copied before earlier kernels end, if no kernel of a run writes it."""
        c = _contract(self.kernel)
        assert c is not None and isinstance(c.b, Operand)
        ready = not self.by_threads and not self.kernel.limits
        return self.kernel.buffers.index(c.b.buffer) if ready else None

    @property
    def count(self) -> int:
        """Tiles of all grid points."""
        return math.prod(n for _, n in self.kernel.grid) * math.prod(self.tiling.tiles(self.contract))

    @property
    def blocks(self) -> int:
        most, rounds, shared = self.rounds
        return min(most, self.count) if rounds else shared * self.tiling.parts

    @property
    def rounds(self) -> tuple[int, int, int]:
        return self.tiling.rounds(self.count, self.multiprocessors)


def exchanged(c: Contract) -> Contract:
    """The transposed product: rows are the columns of the right operand."""
    assert isinstance(c.a, Operand) and isinstance(c.b, Operand)
    return replace(c, i=c.j, j=c.i, m=c.n, n=c.m, a=_turned(c.b), b=_turned(c.a))


def _turned(o: Operand) -> Operand:
    return replace(o, row_stride=o.col_stride, col_stride=o.row_stride, row_levels=o.col_levels, col_levels=o.row_levels)


def _contract(kernel: Kernel) -> Contract | None:
    return next((s for s in kernel.body if isinstance(s, Contract)), None)


def on_tensor_cores(
    kernel: Kernel, multiprocessors: int = 132, tiling: Tiling | None = None, segments: Segments | None = None
) -> TensorLaunch | None:
    """The launch of a kernel on tensor cores; None: it is no contraction of narrow floats that is worth it."""
    c = _contract(kernel)
    if c is None or (kernel.locals and not c.rows) or len(kernel.grid) > 3 or c.m < 16 or c.n < 16:
        return None
    parts = parts_of(kernel, c) if c.rows else None
    if (c.rows and parts is None) or (c.before and (factor_of(c) is None or kernel.limits or kernel.grid or segments)):
        return None
    c = unscaled(c)
    if not (isinstance(c.a, Operand) and isinstance(c.b, Operand)) or kind(c) not in KINDS:
        return None
    if c.a.row_levels + c.a.col_levels and (segments or not _side_of_image(kernel, c, c.a, 64).image):
        return None
    if c.a.panel or c.b.panel or (c.b.blocks and not _rounded(kernel, c.a, c.b)):
        return None
    if any(x.var is not c.i for x in kernel.limits):
        return None
    tiling = tiling or _tiling(kernel, c, multiprocessors, segments, parts)
    if tiling is None:
        return None
    deep = _is_deep(c) and not segments
    c = exchanged(c) if tiling.swapped else c
    assert isinstance(c.a, Operand) and isinstance(c.b, Operand)
    a = _side(kernel, c, c.a, c.m, c.a.row_stride, c.a.col_stride, tiling.rows, segments)
    b = _side(kernel, c, c.b, c.width, c.b.col_stride, c.b.row_stride, tiling.columns if c.also is None else CHUNK // 2, segments)
    results = _results(kernel, c, segments) if tiling.queued and a.tensor and b.tensor and not b.raw else None
    tiling = replace(_held(tiling, b, segments, deep, bool(c.before)), queued=results is not None)
    copied = a.tensor is not None and b.tensor is not None and not b.raw
    if (segments and not (c.b.blocks or copied)) or (c.before and not copied):
        return None
    if (c.also is not None and not (b.tensor and b.along and not b.raw)) or (is_widened(c) and not b.tensor):
        return None
    tiling = replace(tiling, raw=tiling.columns * depth(c) * c.b.dtype.itemsize * b.raw)
    threads, shared = GROUP * (3 if a.tensor and b.tensor else 4), tiling.shared
    return TensorLaunch(
        kernel, threads, threads, shared=shared, tiling=tiling, sides=(a, b), multiprocessors=multiprocessors, segments=segments,
        results=results, parts_of_rows=parts,
    )  # fmt: skip


def kind(c: Contract) -> tuple[str, str, str]:
    """Dtypes of the operands of the product, and of its sums. Decoded weights have that of the left operand, f32 becomes bf16; so
    have 8-bit floats beside one of 16 bits."""
    if c.tf32:
        return "tf32", "tf32", c.acc.dtype.name
    a = "bf16" if blocks_of(c) and c.a.dtype == f32 else c.a.dtype.name
    return a, a if blocks_of(c) or is_widened(c) else c.b.dtype.name, c.acc.dtype.name


def blocks_of(c: Contract) -> str:
    """The format of the right operand, if its elements are decoded from quantised blocks."""
    return c.b.blocks if isinstance(c.b, Operand) else ""


def is_widened(c: Contract) -> bool:
    """Whether the copying warps make 16-bit floats of the right operand's 8-bit ones."""
    return c.a.dtype.name in ("f16", "bf16") and c.b.dtype.name.startswith("f8")


def _rounded(kernel: Kernel, a: Operand, b: Operand) -> bool:
    """Whether a product with quantised weights is one of narrow floats: both operands are rounded to them."""
    wide = a.dtype == f32 and a.row_stride % 4 == 0 and aligned(a.offset, None, 4)
    return not b.exact and a.col_stride == 1 and turn_of(b.blocks).exact and (wide or a.dtype != f32)


def _tiling(
    kernel: Kernel, c: Contract, multiprocessors: int, segments: Segments | None = None, parts: Parts | None = None
) -> Tiling | None:
    """The cheapest tiling. The summed axis is shared only by the last tile of each block; not with `segments`, whose tiles have
    as many rows as the product."""
    assert isinstance(c.a, Operand) and isinstance(c.b, Operand)
    points = busy_points(kernel, segments)
    a = _side(kernel, c, c.a, 64, c.a.row_stride, c.a.col_stride, 64, segments)
    b = _side(kernel, c, c.b, 64, c.b.col_stride, c.b.row_stride, 64, segments)
    copied = a.tensor is not None and b.tensor is not None
    queues = copied and not b.raw and _results(kernel, c, segments) is not None
    most = 128 if not copied else 192 if c.tf32 else 256  # columns, where threads take part
    plain = copied and not b.raw and not segments and _is_plain(kernel, c)
    long = -(-c.k // depth(c)) >= SOME_STEPS
    of = (c, exchanged(c) if plain else c)

    def fits(t: Tiling) -> bool:
        if not (plain and long) and (t.swapped or t.rows == TALL):
            return False
        if (not plain and t.columns % 16) or (parts and not has_parts(t)):
            return False
        c = of[t.swapped]
        if segments and (t.parts > 1 or t.rows != segments.rows or t.columns not in OF_GROUPS):
            return False
        blocks, whole, shared = t.rounds(points * math.prod(t.tiles(c)), multiprocessors)
        once = whole + (shared > 0)  # tiles of a block, at most
        if t.shares > 1 and -(-c.k // depth(c)) < 2 * t.shares:
            return False
        if t.queued and not (queues and whole):
            return False
        if t.parts > 1 and not 0 < shared * t.parts <= blocks:
            return False
        # blocks would exchange the sums of tiles that are half empty; where `plain and long`, there are lower tiles
        if t.parts > 1 and plain and long and c.m <= HALF < t.rows:
            return False
        if t.alternate and (segments or not copied or b.raw or promoted(c) or once > 1):
            return False
        if (t.shares > 1 and c.acc.dtype != f32) or (c.also is not None and t.columns // t.shares % CHUNK):
            return False
        if t.columns % (CHUNK if not copied else CHUNK // 2 if b.raw else 1):  # loaded or transposed by threads
            return False
        if promoted(c) and (t.turns or t.slabs * t.columns > PROMOTED):  # one group adds while the other multiplies
            return False
        return (copied and not b.raw) or (t.columns <= most and not t.turns and t.parts <= 4)  # for want of registers

    def order(t: Tiling) -> tuple[float, int]:  # of tiles that cost the same, the taller ones
        return t.caution * t.cost(of[t.swapped], points, multiprocessors, not copied), -t.rows

    held = (_held(t, b, segments, _is_deep(c), bool(c.before)) for t in TILINGS)
    return min(filter(fits, held), key=order, default=None)


def has_parts(t: Tiling) -> bool:
    """Whether a warp has whole parts of a row at once, and all of its lanes have elements of them."""
    return not (t.swapped or t.queued or t.columns % PART or t.shared_columns % PART)


def pays_to_scale(product: Kernel, reader: Kernel) -> bool:
    """Target.factors: where both kernels are computed in tiles that are copied in bulk, of many rows."""
    c = _contract(product)
    large = c is not None and c.m >= LEAST_ROWS and c.n >= LEAST_COLUMNS
    return large and all((found := on_tensor_cores(x)) is not None and not found.by_threads for x in (product, reader))


def _is_plain(kernel: Kernel, c: Contract) -> bool:
    """Whether all kinds of tilings suit the product: one of 16-bit floats, of all rows, whose results are stored by vectors."""
    whole = not kernel.limits and c.count is None and c.also is None
    return whole and itemsize(c) == 2 and c.acc.dtype == f32 and width(c.epilogue, (), c.j, c.n) > 1


def _is_deep(c: Contract) -> bool:
    """Whether the weights of a product of few rows come as fast as memory gives them."""
    return c.m <= HALF and itemsize(c) == 2 and -(-c.k // depth(c)) >= MANY_STEPS


def _results(kernel: Kernel, c: Contract, segments: Segments | None) -> Side | None:
    """Boxes of 16 rows by 64 columns of the result, if that is the sums, rounded to 16 bits, of all rows."""
    s = c.epilogue[0] if len(c.epilogue) == 1 else None
    if not isinstance(s, Store) or s.value is not c.acc or s.guard is not None or s.buffer.dtype.name not in ("f16", "bf16"):
        return None
    stride = coefficient(s.index, c.i)
    if coefficient(s.index, c.j) != 1 or stride is None or itemsize(c) != 2 or c.acc.dtype != f32:
        return None
    if kernel.limits or segments or c.count is not None or c.also is not None:
        return None
    to = Operand(s.buffer, substitute(s.index, {c.i: const(0), c.j: const(0)}), stride, 1)  # type: ignore[arg-type]
    found = _side(kernel, replace(c, k=c.n), to, c.m, stride, 1, 16)
    return found if found.tensor else None


def _held(t: Tiling, b: Side, segments: Segments | None, deep: bool, factors: bool = False) -> Tiling:
    """The tiling with the memory that it takes beside its tiles. Copies of columns that are not `along` are 64 wide."""
    spare = 0 if b.along or t.swapped else -t.columns % CHUNK
    own = (2 if t.turns else 1) * 4 * t.scaled + 4 * 8 if factors else 0  # and of barriers
    return replace(t, spare=spare, deep=deep and not segments, held=segments.shared if segments else 0, factors=own)


def _side(
    kernel: Kernel, c: Contract, o: Operand, size: int, stride: int, step: int, tile: int, segments: Segments | None = None
) -> Side:
    """`size` rows (or columns) `stride` elements apart, of elements `step` apart."""
    start, grid = None, kernel.grid
    if segments and o is c.a and segments.start is not None:
        start, size, o = segments.start, segments.all_rows, replace(o, offset=const(segments.base))
    elif segments:
        grid = segments.axes
    if o.row_levels or o.col_levels:
        return _side_of_image(kernel, c, o, tile)
    along = step == 1 and c.k > 1
    turned = not along and itemsize(c) != 2  # the instruction takes other sizes along the summed axis only
    raw = o is c.b and (is_widened(c) or (c.tf32 and turned))
    if o.blocks or (not raw and (turned or o.dtype.itemsize != itemsize(c))):
        return Side(True)
    axes = [(v, n, coefficient(o.offset, v)) for v, n in grid]
    if (not along and stride != 1) or any(f is None for _, _, f in axes):
        return Side(along or stride != 1 or turned)
    first = _constant(o.offset, [(v, f or 0) for v, _, f in axes])
    item, outer = o.dtype.itemsize, stride if along else step
    used = [(v, n, f or 0) for v, n, f in axes if f and n > 1]
    strides = (outer * item, *(f * item for _, _, f in used))
    if first is None or first < 0 or first * item % 16 or any(s % 16 or not 0 < s < 1 << 40 for s in strides):
        return Side(along or turned)
    dims = (c.k, size) if along else (size, c.k)
    # rows outside the matrix take a bulk copy longer than others: boxes have few of them
    box = (depth(c), tile if raw else min(tile, -(-size // 8) * 8)) if along else (min(64, LINE // item), depth(c))
    if any(d >= 1 << 31 for d in dims):
        return Side(along or turned)
    argument = kernel.buffers.index(o.buffer)
    box_of_axes = (1,) * len(used)
    tensor = TensorMap(argument, first * item, o.dtype.name, (*dims, *(n for _, n, _ in used)), strides, (*box, *box_of_axes))
    ends = along and not raw and not segments and c.also is None and tile < size and size % tile > 0
    last = replace(tensor, box=(depth(c), -(-(size % tile) // 8) * 8, *box_of_axes)) if ends else None
    return Side(along or turned, tensor, last, tuple(v for v, _, _ in used), raw, start)


def _side_of_image(kernel: Kernel, c: Contract, o: Operand, tile: int) -> Side:
    """That of an operand whose rows, or columns if it is the right one, are the windows of an image."""
    rows, size = (o, c.m) if o is c.a else (_turned(o), c.n)
    image, first = image_of(rows, size, c.k), _constant(o.offset, [])
    if image is None or first is None or first * o.dtype.itemsize % 16:
        return Side(True)
    tensor = image.tensor(kernel.buffers.index(o.buffer), first * o.dtype.itemsize, o.dtype.name, min(tile, -(-size // 8) * 8))
    ends = tile < size and size % tile > 0
    last = replace(tensor, box=(tensor.box[0], -(-(size % tile) // 8) * 8)) if ends else None
    return Side(True, tensor, last, image=image)


def _constant(offset: Expr, terms: Sequence[tuple[Var, int]]) -> int | None:
    """The constant part of an affine offset."""
    values = dict.fromkeys((v for v, _ in terms), 0)

    def at(e: Expr) -> int | None:
        if isinstance(e, Const):
            return int(e.value)
        if isinstance(e, Var):
            return values.get(e)
        if not hasattr(e, "args") or e.op not in ("add", "sub", "mul"):  # type: ignore[union-attr]
            return None
        a, b = (at(x) for x in e.args)  # type: ignore[union-attr]
        if a is None or b is None:
            return None
        return a + b if e.op == "add" else a - b if e.op == "sub" else a * b  # type: ignore[union-attr]

    return at(offset)


__all__ = [
    "LINE", "SECTOR", "TILINGS", "Side", "TensorLaunch", "Tiling", "depth", "has_parts", "is_widened", "itemsize", "kind",
    "on_tensor_cores", "pays_to_scale", "promoted",
]  # fmt: skip
