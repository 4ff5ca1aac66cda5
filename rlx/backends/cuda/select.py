"""The first few elements of sorted rows, without sorting the rows: a sample says which elements may be among them."""

from __future__ import annotations

import math
from itertools import product

from rlx.backends.cuda.schedule import WARP
from rlx.backends.cuda.sorts import SortLaunch, SortWriter, sort_of
from rlx.backends.cuda.vectors import width
from rlx.ir.kernel import Kernel
from rlx.records import record

LEAST = 2048  # elements of a row: a shorter one is sorted as fast
GROUPS, SPANS = (128, 256, 512, 1024, 2048, 4096), (1, 2, 4, 8)  # of a sample; elements of a group
ELEMENT = 2  # times as long as a comparison of two keys in a sort takes an element of a sample
MISSED = 1e-5  # probability that a sample is of no use, about
ROOM, MORE_ROOM = 48 << 10, 128 << 10  # bytes of keys in shared memory of a block; of the blocks of few rows
FEW, MANY = 128, 512  # threads of a block, for rows of at most and more than SHORT elements
SHORT = 16_384
EACH = 2  # keys of a thread in registers: with more, sorts take fewer instructions, and fewer threads sort
RESIDENT = 1536  # threads of a multiprocessor
FLYING = 64  # bytes of a row that a thread loads at once
PART_LEAST = 4096  # elements of a part of a row


@record
class SelectLaunch(SortLaunch):
    """A sample has `groups` groups of `span` elements. Of their first keys, number `rank` is the last of at most `room` that are
    sorted. A thread loads `rounds` vectors of `size` at once."""

    groups: int = 0
    span: int = 1
    rank: int = 0
    room: int = 0
    size: int = 1
    rounds: int = 1


def selected(kernel: Kernel, most: int, multiprocessors: int) -> SelectLaunch | None:
    """`kernel` as a selection; None: it is none, or a sort is as fast."""
    sort = sort_of(kernel)
    if not sort or not LEAST <= sort.n < 1 << 30 or not 0 < sort.kept <= sort.n // 4:
        return None
    n, rows, key = sort.n, math.prod(n for _, n in kernel.grid), 2 * max(4, sort.value.dtype.compute.itemsize)
    threads, size = FEW if n <= SHORT else MANY, width((), (sort.value,), sort.i, n)
    parts = max(1, min(multiprocessors // max(1, rows), n // PART_LEAST))
    part = -(-n // (parts * size)) * size
    parts = -(-n // part)
    plan = _plan(n, sort.kept, min(most, ROOM if parts == 1 else MORE_ROOM) * 8 // (9 * key))
    if not plan:
        return None
    groups, span, rank, room = plan
    turns = -(-part // (threads * size))
    rounds = -(-turns // -(-turns * size * key // (2 * FLYING)))
    held = -(-max(groups, room) // (WARP * EACH)) * WARP * EACH
    scratch = -(-room * key // (16 * parts)) * 16 if parts > 1 else 0
    return SelectLaunch(
        kernel, threads, threads, (held + held // 8) * key, scratch, counters=2 * rows if parts > 1 else 0, parts=parts,
        part=part, adjacent=True, each=EACH, groups=groups, span=span, rank=rank, room=room, size=size, rounds=rounds,
    )  # fmt: skip


def _plan(n: int, kept: int, most: int) -> tuple[int, int, int, int] | None:
    """Groups, span, rank and room of a sample that takes the least time; the room, for `most` keys, is enough even if the
    elements of a group are alike. None: there is none, or a sort is as fast."""
    found = dict[float, tuple[int, int, int, int]]()
    for groups, span in product(GROUPS, SPANS):
        rank = min(_rank(kept * groups * span / n), kept)
        room = math.ceil(n / groups * (rank + 4.3 * math.sqrt(rank) + 6))
        time = _comparisons(groups) + ELEMENT * groups * span + _comparisons(rank * n / (groups * span))
        if rank < groups // 2 and max(groups, room) <= most and groups * span <= n // 2:
            found[time] = groups, span, rank, room
    return found[min(found)] if found and min(found) < _comparisons(n) / 2 else None


def _comparisons(keys: float) -> float:
    """Of a bitonic sort."""
    return keys * math.log2(keys + 1) ** 2 / 4


def _rank(mean: float) -> int:
    """The rank that more keys of a sample have, of those that are kept, with that small probability: a Poisson distribution."""
    chance, rank, left = math.exp(-mean), 0, 1.0
    while left > MISSED and rank < 4 * mean + 20:
        left -= chance
        rank += 1
        chance *= mean / rank
    return rank


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
        sizes = f"{at.team}, {at.each}, {s.n}, {s.kept}, {at.groups}, {at.span}, {at.rank}, {at.room}, {at.parts}, {at.part}"
        line = f"(rlx_key<{value}>*)(rlx_scratch + (size_t)line * {at.parts * at.scratch}), rlx_counters + 2 * line, (int)part"
        self.line(f"; rlx_selection<{sizes}, {order}, {value}> selection = {{keys, {line if at.parts > 1 else '0, 0, 0'}}};")
        self.line(f"if (!selection.run<{at.rounds}, {at.size}>(value, values)) return;")
        self.put(value, order, "0", str(s.kept))


__all__ = ["SelectLaunch", "SelectWriter", "selected"]
