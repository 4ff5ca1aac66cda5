"""The first few elements of sorted rows, without sorting the rows: a sample says which elements may be among them."""

from __future__ import annotations

import math
from itertools import product

from rlx.backends.cuda.schedule import WARP
from rlx.backends.cuda.sorts import SortLaunch, SortWriter, key_bytes, sort_of
from rlx.backends.cuda.vectors import width
from rlx.ir.kernel import Kernel, Load
from rlx.records import record

LEAST = 512  # elements of a row: a shorter one is sorted as fast
MOST, MOST_NARROW = 1 / 5, 1 / 8  # of a row's elements that are kept; the latter of keys with two digits, which are sorted faster
GROUPS, SPANS = tuple(1 << n for n in range(7, 14)), (1, 2, 4, 8)  # of a sample; elements of a group
ELEMENT = 2  # times as long as a comparison of two keys in a sort takes an element of a sample
FAR = 4.3  # deviations of a Poisson distribution: with what is added there, one in 100,000 is further away
ROOM, MORE_ROOM = 48 << 10, 128 << 10  # bytes of keys in shared memory of a block; of the blocks of few, or of long rows
RARE = 1 / 32  # of a long row's elements that are kept where its block takes more room
FEW, MANY, SHORT = 128, 512, 16_384  # threads of a block, for rows of at most and more than SHORT elements
EACH, MORE = 4, 8  # keys of a thread in registers; the latter if they are more than all threads have, and of 32 bits
RESIDENT, FEWER = 1536, 1024  # threads of a multiprocessor; the latter if their keys take more than 16 bytes
FLYING, AT_ONCE = 64, 32  # bytes, and elements, that a thread loads at once
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
    if not sort or not LEAST <= sort.n < 1 << 30 or not 0 < sort.kept <= sort.n * (MOST if key_bytes(sort) > 2 else MOST_NARROW):
        return None
    n, rows, key, value = sort.n, math.prod(n for _, n in kernel.grid), 2 * max(4, sort.value.dtype.compute.itemsize), sort.value
    threads, size = FEW if n <= SHORT else MANY, width((), (value,), sort.i, n)
    parts = max(1, min(multiprocessors // max(1, rows), n // PART_LEAST))
    part = -(-n // (parts * size)) * size
    parts = -(-n // part)
    rooms = [ROOM] * (parts == 1) + [MORE_ROOM] * (parts > 1 or (n > SHORT and sort.kept <= n * RARE))
    plans = (_plan(n, sort.kept, min(most, room) * 8 // (9 * key)) for room in rooms)
    if not (plan := next(filter(None, plans), None)):
        return None
    groups, span, rank, room = plan
    each = MORE if key == 8 and max(groups, rank * n / (groups * span)) > threads * EACH else EACH
    turns, itemsize = -(-part // (threads * size)), value.buffer.dtype.itemsize if isinstance(value, Load) else key // 2
    rounds = -(-turns // -(-turns * size // min(AT_ONCE, FLYING // itemsize)))
    held = -(-max(groups, room) // (WARP * each)) * WARP * each
    scratch = -(-room * key // (16 * parts)) * 16 if parts > 1 else 0
    return SelectLaunch(
        kernel, threads, threads, (held + held // 8) * key, scratch, counters=2 * rows if parts > 1 else 0, parts=parts,
        part=part, adjacent=True, each=each, groups=groups, span=span, rank=rank, room=room, size=size, rounds=rounds,
    )  # fmt: skip


def _plan(n: int, kept: int, most: int) -> tuple[int, int, int, int] | None:
    """Groups, span, rank and room of a sample that takes the least time; the room, for `most` keys, is enough even if the
    elements of a group are alike. None: there is none."""
    found = dict[float, tuple[int, int, int, int]]()
    for groups, span in product(GROUPS, SPANS):
        mean = kept * groups * span / n  # of the elements that are kept, how many the sample has
        rank = min(math.ceil(mean + FAR * math.sqrt(mean) + 2.3), kept)
        room = math.ceil(n / groups * (rank + FAR * math.sqrt(rank) + 6))
        time = _comparisons(groups) + ELEMENT * groups * span + _comparisons(rank * n / (groups * span))
        if rank < groups // 2 and max(groups, room) <= most and groups * span <= n // 2:
            found[time] = groups, span, rank, room
    return found[min(found)] if found else None


def _comparisons(keys: float) -> float:
    """Of a bitonic sort."""
    return keys * math.log2(keys + 1) ** 2 / 4


class SelectWriter(SortWriter):
    launch: SelectLaunch
    headers = ("sort.h", "select.h")

    def __init__(self, launch: SelectLaunch) -> None:
        super().__init__(launch)
        keys = launch.each * max(4, launch.sort.value.dtype.compute.itemsize)
        self.occupancy = f", {(RESIDENT if keys <= 16 else FEWER) // launch.threads}"

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
