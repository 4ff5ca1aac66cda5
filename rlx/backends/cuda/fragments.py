"""Products of up to 15 rows by weights of the same 16-bit float, bound by reading the weights once, where no ring takes them:
those of many small matrices (attention over a batch of heads), and those whose rows are contiguous.

Weights go from memory right into the registers that tensor cores take as the tall operand, in loads of up to 16 bytes; the rows
are in shared memory. Warps of a block, and several blocks, share the summed axis where columns are few. Sums are added in a fixed
order. Blocks of small matrices have no more warps than these have columns for.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from rlx.backends.cuda.gemv import (
    RESIDENT,
    SHARED_BYTES,
    THREADS,
    WARPS,
    GemvLaunch,
    GemvWriter,
    contract_of,
)
from rlx.backends.cuda.render import may_fail
from rlx.backends.cuda.schedule import WARP, busy_points
from rlx.backends.cuda.vectors import aligned
from rlx.ir.dtype import bf16, f16
from rlx.ir.kernel import Computed, Contract, Kernel, Operand
from rlx.records import record

MOST_ROWS = 15  # of more, tensor.py has whole tiles
LEAST = 16  # columns, and terms of a sum, that are worth it
LEAST_SIZE = {False: 1, True: 2}  # elements of a load, where rows of weights are contiguous, and where columns are
FLIGHT = 64  # elements of weights that a lane loads before it uses the first
WIDE = 8, 4, 2  # columns of a lane
ROUNDS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64  # of columns that a block may have
SHARES = 1, 2, 4, 8, 16, 32  # blocks that may share the summed axis
# Times of as many fragments of 16 x 64 weights: the start of a block, sums that meet in shared memory, those that blocks tell
# each other (at all, and for each block). Not fitted to measurements.
STARTED, COMBINED, TOLD = 2, 0.5, (2, 0.25)
NARROWER = 1.25  # times as long, where loads are shorter than they could be (not measured)
SKEW = {False: 16, True: 32}  # elements past a multiple of 64 of a row's pitch: lanes then read different banks


@record
class FragmentLaunch(GemvLaunch):
    """`columns` of a warp at a time, `ahead` fragments of each in flight, `batches` times; `down` warps share the summed axis."""

    down: int = 1

    @property
    def deep(self) -> int:
        """Elements of the summed axis in a fragment."""
        return 32 if self.along else 16

    @property
    def wide(self) -> int:
        """Columns of a lane."""
        return self.columns // 8

    @property
    def pitch(self) -> int:
        span = self.batches * self.ahead * self.down * self.deep
        return -(-(span - SKEW[self.along]) // 64) * 64 + SKEW[self.along]

    @property
    def across(self) -> int:
        """Columns of a block at a time."""
        return self.warps // self.down * self.columns

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def resident(self) -> int:
        """Blocks of a multiprocessor."""
        return RESIDENT * WARPS // self.warps


def in_fragments(kernel: Kernel, multiprocessors: int = 132, most: int = SHARED_BYTES) -> FragmentLaunch | None:
    """The launch of a product with few rows of 16-bit floats; None: it is none. `most`: bytes of shared memory of a block."""
    c = contract_of(kernel, MOST_ROWS)
    if c is None or not isinstance(c.b, Operand) or min(c.n, c.k) < LEAST:
        return None
    if c.a.dtype != c.b.dtype or c.a.dtype not in (bf16, f16):
        return None
    along = c.b.row_stride == 1
    if not along and c.b.col_stride != 1:
        return None
    stride, extent = (c.b.col_stride, c.k) if along else (c.b.row_stride, c.n)
    sizes = [n for n in WIDE if extent % n == 0 and stride % n == 0 and aligned(c.b.offset, None, n)]
    short = 8 if c.k <= 32 else 4 if c.k <= 64 else 2
    wides = [n for n in WIDE if 8 * n <= c.n] or [2]
    wides, size = [min(short, wides[0])] if along else wides[:2], max(sizes, default=1)
    if size < LEAST_SIZE[along]:
        return None
    whole = kernel.limits or isinstance(c.a, Computed) or may_fail(kernel)  # a block that fails tells nothing
    at = FragmentLaunch(kernel, THREADS, THREADS, along=along, size=size)
    ways = product(wides, (1, 2, 4, 8), ROUNDS, SHARES[: 1 if whole else None])
    found = [x for way in ways if (x := _shared_out(at, c, *way))]
    best = min(found, key=lambda x: _cost(x, c, multiprocessors))
    if c.m == 1 and not along and best.shares == 1:
        return None  # gemv.py takes less, if it has enough blocks
    points, told = busy_points(kernel, None), best.shares * c.m * c.n if best.shares > 1 else 0
    held = sum(-(-x.size * x.dtype.itemsize // 16) * 16 for x in kernel.locals) + 2 * c.m * best.pitch
    staged = 4 * best.warps * c.m * (best.columns + 1)
    return replace(best, shared=held, counters=2 * points * told) if held + staged <= min(most, SHARED_BYTES) else None


def _shared_out(at: FragmentLaunch, c: Contract, wide: int, down: int, rounds: int, shares: int) -> FragmentLaunch | None:
    """The launch whose blocks and warps share columns and the summed axis so; None: some would have none."""
    threads = WARP * min(WARPS, down << (-(-c.n // (8 * wide)) - 1).bit_length())
    size = at.size if at.along else min(at.size, wide)
    at = replace(at, down=down, columns=8 * wide, size=size, threads=threads, team=threads)
    each = -(-c.n // (at.across * rounds))
    span = -(-c.k // (shares * down * at.deep)) * down * at.deep
    if (rounds > 1 and each == 1 and c.n <= at.across * (rounds - 1)) or -(-c.k // span) != shares:
        return None
    steps, ahead = span // (down * at.deep), FLIGHT // ((8 if at.along else 4) * at.wide)
    batches = -(-steps // ahead)
    return replace(at, each=each, shares=shares, span=c.k if shares == 1 else span, batches=batches, ahead=-(-steps // batches))


def _cost(at: FragmentLaunch, c: Contract, multiprocessors: int) -> float:
    """Fragments of 16 x 64 weights of a warp, one after the other, in all rounds of blocks."""
    rounds = -(-at.blocks // (at.resident * multiprocessors))
    narrower = not at.along and at.size == at.wide < min(c.n // 8, WIDE[0])
    once = at.batches * at.ahead * at.deep * at.columns / 1024 * (NARROWER if narrower else 1) + COMBINED * (1 + (at.down > 1))
    once += (TOLD[0] + TOLD[1] * at.shares) * (at.shares > 1)
    return rounds * (once * -(-c.n // (at.each * at.across)) + STARTED)


class FragmentWriter(GemvWriter):
    launch: FragmentLaunch
    headers = ("fragments.h",)
    element, staged = "uint16_t", 8

    @property
    def occupancy(self) -> str:  # type: ignore[override]
        return f", {self.launch.resident}"

    @property
    def together(self) -> bool:
        return isinstance(self.launch.contract.a, Operand)

    def at(self, step: str) -> str:
        return step

    def keep(self, values: list[str]) -> None:
        self.line(f"staged[v] = rlx_near_{self.launch.contract.b.dtype}({values[0]});")

    def before(self, c: Contract) -> None:
        """A function that is called when the first weights are on their way."""
        with self.lambda_("const auto stage = [&]() {"):
            self.stage(c)

    def multiply(self, c: Contract, o: Operand, many: str) -> None:
        at = self.launch
        how = f"{c.m}, {c.n}, {at.pitch}, {str(at.along).lower()}, {at.size}, {at.wide}, {at.warps}, {at.down}"
        how += f", {at.ahead}, {at.batches}, {str(o.dtype == f16).lower()}"
        start, step = f"slot * {at.across}", at.each * at.across
        self.line(f"rlx_fragments<{how}>(rows, {many}, stage, from, put, {start}, {step});")


__all__ = ["FragmentLaunch", "FragmentWriter", "in_fragments"]
