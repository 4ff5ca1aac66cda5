"""Products with quantised weights (rlx.ir.blocks.Panel) and few rows, bound by reading the weights once.

A block processes panels of 32 columns, one after the other, for some rows. Its warps share the summed axis, and so do several
blocks if panels are few and long: these send their sums to one block through words in global memory, and it adds them in a
fixed order. A block has a ring of stages: a bulk copy brings the pieces of several warps ahead of their use, also before
earlier kernels have ended, and across panels; the last warp that has used a stage starts the next copy to it. For one row a
block has one copy in flight until earlier kernels have ended; the others are issued after the loads of the row, since these,
and all remaining traffic of the earlier kernels, would queue behind them.

Weights are converted to bf16 exactly: they are integers of at most 8 bits, those of fewer bits with 128 added; the products of
this offset with sums of the left operand are subtracted afterwards. The left operand is in shared memory as bf16 numbers that
add up to it exactly, each in its own column of a tensor-core product, so products and sums have f32 accuracy; many rows of f32
are rounded to bf16, unless that is forbidden. The sums of each step are scaled in f32. One row is multiplied as integers
(blocks.h).
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

from rlx.backends.cuda.blocks import turn_of
from rlx.backends.cuda.render import may_fail
from rlx.backends.cuda.schedule import COPIED, MULTIPROCESSORS, Launch, Segments, TensorMap, busy_points
from rlx.backends.shared.packed import PANEL, STEP
from rlx.ir.blocks import Panel
from rlx.ir.dtype import f32
from rlx.ir.kernel import Const, Contract, Kernel, Operand
from rlx.records import record

WARPS = 8
ZEROS = 256  # bytes: of the most turns that a warp takes at a time
DIGITS, RUN, MOST_RUNS = 3, 8, 7  # columns of a row as integers; elements that a thread has in a row, and how often at most
SCALED = 32 * RUN  # elements of a row that are multiples of the same power of two
LINE, LINES_AT = 128, 1024  # bytes of a row of plain weights that a copy fetches; a multiple of which its place is
PLAIN_ROWS, MOST_PLAIN, ROUNDED_ROWS = 4, 8, 32  # rows of plain weights that are multiplied here; of f32 that is rounded
THREADS = 32 * WARPS
PIECES = {"bf16": 1, "f16": 2, "f32": 3}  # bf16 numbers that add up to one
WHOLE_ROWS = 2  # of f32 that are not rounded: they fit into one tile of a product
MOST_PIECES = 32  # of all rows of a block: four tiles of a product
SHARED_BYTES, RESERVED = 228 << 10, 2 << 10  # of the blocks on a multiprocessor; of these, for other purposes in each
RESIDENT, SHARES = (2, 1), (1, 2, 4, 8)  # blocks of a multiprocessor; blocks that share the summed axis of a panel
AT_ONCE, TEAMS = (8, 4, 2, 1), (1, 2)  # turns of a warp's piece of a stage; teams of warps that take stages by turns
RING_BYTES, SLOTS, MOST_SLOTS = 96 << 10, 4, 8  # of a ring; its stages, from which copies do not wait for each other, and at most
EARLY_BYTES = 60 << 10  # copied before the left operand is there, which more would delay
UNROLLED = 4  # turns, with one tile
# Times in turns of a warp: of a panel and of a stage besides their turns, of sums that blocks tell each other (at all, and for
# each panel), of eight elements of the left operand as digits.
PANEL_TURNS, STAGE_TURNS, TOLD_TURNS, RUN_TURNS = 1, 0.5, (5, 1), 4


@record
class BlocksLaunch(Launch):
    """`rows` of a block. `shares`: blocks that share the summed axis of a panel, `turns` of it each. `at_once`: turns of a warp's
    piece of a stage; `teams` of warps take stages by turns. `slots`: stages of the ring. `each`: blocks, or groups of them that
    share panels, for the panels of some rows. `resident`: blocks of a multiprocessor."""

    rows: int = 1
    shares: int = 1
    turns: int = 1
    at_once: int = 1
    teams: int = 1
    slots: int = 2
    each: int = 1
    resident: int = 2

    @property
    def contract(self) -> Contract:
        return next(s for s in self.kernel.body if isinstance(s, Contract))

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def early(self) -> int:
        """The weights are read before earlier kernels have ended."""
        return self.kernel.buffers.index(weights(self.contract).buffer)

    @property
    def both(self) -> int:
        """2: an epilogue reads the sums of columns j and j + n; panels of the former and of the latter take turns. Else 1."""
        return self.contract.width // self.contract.n

    @property
    def panels(self) -> int:
        """The number of panels of results."""
        return -(-self.contract.n // PANEL)

    @property
    def first_slots(self) -> int:
        """Stages that may be copied before the left operand is there."""
        return self.slots if self.digits else min(self.slots, max(1, EARLY_BYTES // self.stage))

    @property
    def stages(self) -> int:
        """Stages of a panel in one block."""
        return -(-self.turns // self.whole)

    @property
    def passes(self) -> int:
        return -(-self.contract.m // self.rows)

    @property
    def blocks(self) -> int:
        return math.prod(n for _, n in self.kernel.grid) * self.passes * self.each * self.shares

    @property
    def columns(self) -> int:
        """Columns of the tensor-core product."""
        return self.rows * self.pieces

    @property
    def pieces(self) -> int:
        """Columns of a row: numbers that add up to an element."""
        return DIGITS if self.digits else _pieces(self.contract)

    @property
    def added(self) -> int:
        """Columns whose sums meet in shared memory: those of a row as integers are added in registers."""
        return 1 if self.digits else self.columns

    @property
    def digits(self) -> bool:
        """Whether the one row is multiplied as digits of integers. A thread keeps its part of the row in registers."""
        b = weights(self.contract)
        return bool(b.blocks) and self.contract.m == 1 and not b.exact and self.runs <= MOST_RUNS

    @property
    def runs(self) -> int:
        """Runs of a row per thread."""
        return -(-self.turns * STEP // (RUN * self.threads))

    @property
    def scales(self) -> int:
        """Powers of two of an integer row."""
        return -(-self.turns * STEP // SCALED)

    @property
    def spread(self) -> int:
        """Units with a scale each whose columns are side by side in a tile of the product."""
        return min(2, self.at_once * self.groups) if self.digits else 1

    @property
    def at_once_added(self) -> bool:
        """Whether the epilogue adds the sums of warps: shared memory holds those of two panels."""
        return self.columns <= 8

    @property
    def plain(self) -> bool:
        """The weights are f16 or bf16, and no blocks."""
        return not weights(self.contract).blocks

    @property
    def maps(self) -> tuple[TensorMap, ...]:
        found = _lines(self.kernel, self.contract, self.whole) if self.plain else None
        return (found,) if found else ()

    @property
    def whole(self) -> int:
        """Turns of a stage."""
        return self.warps // self.teams * self.at_once

    @property
    def stage(self) -> int:
        """Bytes of a stage: whole blocks, or lines."""
        return self.whole // self.inner * (PANEL * LINE if self.plain else self.panel.packed.nbytes)

    @property
    def slot(self) -> int:
        """Bytes of the ring for a stage."""
        return -(-self.stage // COPIED) * COPIED

    @property
    def panel(self) -> Panel:
        return turn_of(weights(self.contract).blocks).panel

    @property
    def inner(self) -> int:
        """Turns of a block; of 128 bytes of plain rows."""
        return LINE // 2 // STEP if self.plain else self.panel.plain.block // STEP

    @property
    def tiles(self) -> int:
        return -(-self.columns // 8)

    @property
    def pitch(self) -> int:
        """Bytes between columns in shared memory, chosen so that the eight lanes that read at once have no bank conflicts."""
        if self.digits:
            return self.scales * SCALED + 32
        return -(-self.turns * STEP * 2 // 128) * 128 + (16 if self.plain else 64)

    @property
    def bytes(self) -> int:
        """The left operand, sums of each warp, those of a panel and the one before it, the ring, its barriers and counters."""
        return self.ring_at + self.slots * (self.slot + 16) + 16 * self.digits + LINES_AT * self.plain

    @property
    def ring_at(self) -> int:
        """Where the ring begins in shared memory."""
        locals_ = sum(-(-max(1, x.size) * x.dtype.itemsize // 16) * 16 for x in self.kernel.locals)
        return -(-(locals_ + self.held) // COPIED) * COPIED

    @property
    def held(self) -> int:
        """Bytes of the left operand with some zeros, and of sums."""
        turns = 2 * self.both  # of memory for the sums of a panel
        sums = turns * self.warps * PANEL if self.at_once_added else self.warps * self.sum_pitch + turns * PANEL
        return self.columns * self.pitch + self.added * sums * 4 + ZEROS + self.totals

    @property
    def sum_pitch(self) -> int:
        """Sums of a warp between columns: lanes store theirs without bank conflicts."""
        return PANEL + 4 * (self.plain and self.columns > 8)

    @property
    def totals(self) -> int:
        """Bytes of the powers of two of an integer row, and of its sums in each unit."""
        return 16 * -(-self.scales * (1 + SCALED // STEP * self.groups) // 4) if self.digits else 0

    @property
    def groups(self) -> int:
        """Units of a turn: those elements that have a scale."""
        return turn_of(weights(self.contract).blocks).groups

    @property
    def told(self) -> int:
        """Words for sums that blocks exchange."""
        return self.blocks // self.each * self.panels * self.rows * PANEL * self.both if self.shares > 1 else 0

    @property
    def cost(self) -> float:
        """Turns of a warp, one after the other."""
        own = self.at_once + STAGE_TURNS * (SLOTS / min(SLOTS, self.slots)) ** 2
        start = RUN_TURNS * self.runs * self.digits + TOLD_TURNS[0] * (self.told > 0)
        panel = -(-self.stages // self.teams) * own + PANEL_TURNS + TOLD_TURNS[1] * (self.shares > 1)
        once = start + -(-self.panels // self.each) * self.both * panel
        if self.segments is None:
            return once
        return once * max(1, self.segments.expected * self.each * self.shares / (self.resident * MULTIPROCESSORS))


def takes(m: int, k: int) -> bool:
    """True if a product of m rows with k plain elements is computed here, where the columns of weights are adjacent in memory."""
    return PLAIN_ROWS <= m <= MOST_PLAIN and k % (LINE // 2) == 0


def weights(c: Contract) -> Operand:
    assert isinstance(c.b, Operand)
    return c.b


def _pieces(c: Contract) -> int:
    b = weights(c)
    rounded = c.a.dtype == f32 and WHOLE_ROWS < c.m <= ROUNDED_ROWS and not b.exact
    return 1 if rounded or not b.blocks else PIECES[c.a.dtype.name]


def _lines(kernel: Kernel, c: Contract, whole: int = WARPS) -> TensorMap | None:
    """Lines of 64 elements of plain weights, for bulk copies of the lines of 32 rows in `whole` turns; None: these cannot fetch
    them."""
    b = weights(c)
    if b.panel or b.row_stride != 1 or c.a.dtype != b.dtype or b.dtype.name not in ("f16", "bf16"):
        return None
    if b.col_stride % 8 or c.n < PANEL or not isinstance(b.offset, Const) or b.offset.value % 8 or len(kernel.grid):
        return None
    dims, box = (LINE // 2, c.width, c.k // (LINE // 2)), (LINE // 2, PANEL, whole // (LINE // 2 // STEP))
    first = 2 * int(b.offset.value)
    return TensorMap(kernel.buffers.index(b.buffer), first, b.dtype.name, dims, (2 * b.col_stride, LINE), box)


def of_blocks(
    kernel: Kernel, multiprocessors: int = 132, most: int = SHARED_BYTES - RESERVED, boxes: bool = True,
    segments: Segments | None = None,
) -> BlocksLaunch | None:
    """The launch of a product with quantised weights, or of a few rows with plain ones; None: it is none. `most`: bytes of shared
    memory of a block. `boxes`: the GPU has bulk copies of tensors."""
    c = next((s for s in kernel.body if isinstance(s, Contract)), None)
    if c is None or c.rows or not isinstance(c.b, Operand) or c.acc.dtype != f32 or 0 in (c.m, c.n, c.k):
        return None
    if c.also and c.n % PANEL:
        return None
    if c.a.dtype.name not in PIECES or any(x.var is not c.i for x in kernel.limits):
        return None
    if not (turn_of(c.b.blocks).exact if c.b.blocks else boxes and takes(c.m, c.k) and _lines(kernel, c)):
        return None
    rows = -(-c.m // -(-c.m // (MOST_PIECES // _pieces(c))))
    shares = (1,) if may_fail(kernel) else SHARES  # a block that fails tells others nothing
    while rows:
        for resident in RESIDENT:
            ways = (BlocksLaunch(kernel, THREADS, THREADS, rows=rows, resident=resident, segments=segments), multiprocessors)
            found = [_shared_out(*ways, *how) for how in product(shares, AT_ONCE, TEAMS)]
            room = min(most, SHARED_BYTES // resident - RESERVED - (segments.shared if segments else 0))
            fits = [x for x in found if x and x.bytes <= room]
            if fits and (resident == 1 or fits[0].tiles == 1):
                best = min(fits, key=lambda x: x.cost)
                return replace(best, shared=best.bytes, counters=2 * best.told)
        rows //= 2
    return None


def _shared_out(at: BlocksLaunch, multiprocessors: int, shares: int, at_once: int, teams: int) -> BlocksLaunch | None:
    """The launch with as many blocks as may be at once, if turns can be divided in this way."""
    at = replace(at, shares=shares, at_once=at_once, teams=teams)
    turns, inner = at.contract.k // STEP, at.inner
    if turns % at_once or at.whole % inner:
        return None
    each = max(1, at.resident * multiprocessors // (busy_points(at.kernel, at.segments) * at.passes * at.shares))
    each = -(-at.panels // -(-at.panels // each))  # as few as take the panels in as many rounds
    whole = at.whole if at.plain else max(at_once, inner)
    at = replace(at, turns=-(-turns // (shares * whole)) * whole, each=each, slots=0)
    if at.turns * (shares - 1) >= turns:  # a block would have no part
        return None
    left = min(RING_BYTES, SHARED_BYTES // at.resident - RESERVED - at.bytes)
    slots = min(MOST_SLOTS, max(2, left // (at.slot + 16)))
    return replace(at, slots=slots // teams * teams)  # a stage of the ring is of one team


__all__ = ["BlocksLaunch", "of_blocks", "weights"]
