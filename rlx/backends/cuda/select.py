"""The first few elements of sorted rows, without sorting the rows: a sample says which elements may be among them."""

from __future__ import annotations

import math

from rlx.backends.cuda.schedule import WARP
from rlx.backends.cuda.sorts import SortLaunch, SortWriter, sort_of
from rlx.backends.cuda.vectors import width
from rlx.ir.kernel import Kernel
from rlx.records import record

LEAST = 2048  # elements of a row: a shorter one is sorted as fast
SAMPLES = (128, 256, 512, 1024, 2048, 4096)  # elements of a sample
MISSED = 1e-5  # probability that a sample is of no use, about
ROOM = 128 << 10  # bytes of keys in shared memory
FEW, MANY = 256, 512  # threads of a block, for rows of at most and more than SHORT elements
SHORT = 16_384
EACH, EACH_APART = 8, 2  # keys of a thread in registers: with few, more threads sort; with many, they take fewer instructions
RESIDENT = 1024  # threads of a multiprocessor
FLYING = 64  # bytes of a row that a thread loads at once
BLOCKS = 4  # for each multiprocessor, that share few rows
PART_LEAST = 4096  # elements of a part of a row


@record
class SelectLaunch(SortLaunch):
    """Key number `rank` of `sample` is the last of at most `room` that are sorted. A thread loads `rounds` vectors of `size` at once."""

    sample: int = 0
    rank: int = 0
    room: int = 0
    size: int = 1
    rounds: int = 1


def selected(kernel: Kernel, most: int, multiprocessors: int) -> SelectLaunch | None:
    """`kernel` as a selection; None: it is none, or a sort is as fast."""
    sort = sort_of(kernel)
    if not sort or not LEAST <= sort.n < 1 << 30 or not sort.kept:
        return None
    n, rows, itemsize = sort.n, math.prod(n for _, n in kernel.grid), max(4, sort.value.dtype.compute.itemsize)
    sample, rank, room = min((_plan(n, sort.kept, x) for x in SAMPLES), key=lambda x: x[0] + x[1] * n // x[0])
    if max(sample, room) * 2 * itemsize > min(most, ROOM) or sample + rank * n // sample > n // 2:
        return None
    threads, size = FEW if n <= SHORT else MANY, width((), (sort.value,), sort.i, n)
    parts = max(1, min(BLOCKS * multiprocessors // max(1, rows), n // PART_LEAST))
    part = -(-n // (parts * size)) * size
    parts = -(-n // part)
    each = EACH if parts == 1 else EACH_APART
    turns = -(-part // (threads * size))
    rounds = -(-turns // -(-turns * size * itemsize // FLYING))
    chunk = WARP * each
    held = -(-max(sample, room) // chunk) * chunk
    scratch = -(-room * 2 * itemsize // (16 * parts)) * 16 if parts > 1 else 0
    return SelectLaunch(
        kernel, threads, threads, (held + held // 8) * 2 * itemsize, scratch, counters=2 * rows if parts > 1 else 0, parts=parts,
        part=part, adjacent=True, each=each, sample=sample, rank=rank, room=room, size=size, rounds=rounds,
    )  # fmt: skip


def _plan(n: int, kept: int, sample: int) -> tuple[int, int, int]:
    """`sample`, the rank in it by which at least `kept` of n elements are found, and room for those."""
    mean = kept * sample / n
    chance, rank, left = math.exp(-mean), 0, 1.0  # of `rank` elements among the first; of as many, or more
    while left > MISSED and rank < sample:
        left -= chance
        rank += 1
        chance *= mean / rank
    rank = min(rank, kept)
    return sample, rank, math.ceil(n / sample * (rank + 4.3 * math.sqrt(rank) + 6))


class SelectWriter(SortWriter):
    launch: SelectLaunch
    headers = ("sort.h", "select.h")

    def __init__(self, launch: SelectLaunch) -> None:
        super().__init__(launch)
        self.occupancy = f", {RESIDENT // launch.threads}"

    def keys(self, value: str, order: str) -> None:
        at, s = self.launch, self.launch.sort
        with self.scope([f"const auto values = [&](rlx_index first, {value} (&x)[{at.size}]) {{"]):
            self.in_vectors((), (s.value,), s.i, at.size, "first", lambda found: self.line(f"x[v] = {found[0]};"))
        sizes = f"{at.team}, {at.each}, {s.n}, {s.kept}, {at.sample}, {at.rank}, {at.room}, {at.parts}, {at.part}"
        line = f"(rlx_key<{value}>*)(rlx_scratch + (size_t)line * {at.parts * at.scratch}), rlx_counters + 2 * line, (int)part"
        self.line(f"; rlx_selection<{sizes}, {order}, {value}> selection = {{keys, {line if at.parts > 1 else '0, 0, 0'}}};")
        self.line(f"if (!selection.run<{at.rounds}, {at.size}>(value, values)) return;")
        self.put(value, order, "0", str(s.kept))


__all__ = ["SelectLaunch", "SelectWriter", "selected"]
