"""Arena plan: lifetimes of buffers over the steps of one run, in-place sharing, and byte offsets.

Input: buffers and steps (commit steps last). Output: an ArenaPlan. It does not use the graph; `pairs` gives the arguments that
may share memory within a step. rlx/compiler/check.py checks the result and shares no code with this file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate

import numpy as np

from rlx.ir.kernel import Kernel
from rlx.ir.program import ArenaPlan, BufferDecl, Region, Step
from rlx.records import record

REST = 4  # steps
PLANNED = (Region.ARENA, Region.INPUT, Region.OUTPUT)
Pairs = Callable[[Kernel], AbstractSet[tuple[int, int]]]


def no_pairs(kernel: Kernel) -> AbstractSet[tuple[int, int]]:
    """No pairs: used when the in-place pass is off."""
    return frozenset()


@record
class Lifetime:
    """Lifetime of a buffer in steps: `first` to `last`, both included. first > last: never live."""

    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


@record(repr=False, eq=False, frozen=False)
class _Slot:
    """Buffers that share one slot in succession, each written in place over the previous one."""

    members: list[int]
    nbytes: int
    life: Lifetime


def moments(steps: Iterable[Step]) -> list[int]:
    """The time of each step: steps of a group run at the same time."""
    return list(accumulate((not s.concurrent for s in steps), initial=-1))[1:]


def lifetimes(
    buffers: Iterable[BufferDecl], steps: Sequence[Step], outputs: Collection[int], reuse: bool = True, rest_bytes: int = 0
) -> dict[int, Lifetime]:
    """Lifetime of every arena buffer. `outputs`: ids that must live until the next run.

    Inputs are always live (-1: written before the first step); with `reuse` off, so are all other buffers. `rest_bytes`: as in
    Target.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for at, step in zip(moments(steps), steps):
        for arg in step.args:
            first.setdefault(arg, at)
            last[arg] = at
    end = len(steps)
    lives = {}
    for b in buffers:
        if b.region is Region.INPUT or (b.region in PLANNED and not reuse):
            lives[b.id] = Lifetime(-1, end)
        elif b.region is Region.OUTPUT or (b.region is Region.ARENA and b.id in outputs):
            lives[b.id] = Lifetime(first.get(b.id, -1), end)
        elif b.region is Region.ARENA:
            rest = REST if b.id in last and b.nbytes <= rest_bytes else 0
            lives[b.id] = Lifetime(first.get(b.id, 0), min(end, last.get(b.id, -1) + rest))
    return lives


def plan_arena(
    buffers: Sequence[BufferDecl],
    steps: Sequence[Step],
    outputs: Collection[int],
    alignment: int,
    pairs: Pairs = no_pairs,
    reuse: bool = True,
    rest_bytes: int = 0,
) -> ArenaPlan:
    """Offsets of all buffers of the regions ARENA, INPUT and OUTPUT. The same arguments give the same plan.

    `steps`: those of a run followed by those of its commit. `outputs`: ids of buffers that are outputs. `alignment`: bytes,
    a power of two. `pairs(kernel)`: (read argument, written argument) that may share memory, see rlx/ir/overlap.py.
    Offsets are chosen greedily, best fit; the better of two orders (by size; by first use) is kept.
    """
    lives = lifetimes(buffers, steps, outputs, reuse, rest_bytes)
    decls = {b.id: b for b in buffers if b.id in lives}
    taken_over = _take_overs(decls, steps, lives, pairs) if reuse else {}
    slots = _slots(decls, lives, taken_over)
    placed, size = _place(sorted(slots, key=lambda s: (-s.nbytes, s.life.first, s.members[0])), alignment)
    if size > _most_live(slots, len(steps), alignment):  # else no order needs less
        by_time = sorted(slots, key=lambda s: (s.life.first, -s.nbytes, s.members[0]))
        placed, size = min((placed, size), _place(by_time, alignment), key=lambda placed: placed[1])
    offsets = {b: placed[slot.members[0]] for slot in slots for b in slot.members}
    return ArenaPlan(
        offsets=dict(sorted(offsets.items())),
        size_bytes=size,
        alignment=alignment,
        unshared_bytes=sum(_round_up(b.nbytes, alignment) for b in decls.values()),
        lower_bound_bytes=_most_live(slots, len(steps)),
    )


def _take_overs(decls: dict[int, BufferDecl], steps: Sequence[Step], lives: dict[int, Lifetime], pairs: Pairs) -> dict[int, int]:
    """written buffer -> the buffer that it overwrites in place: one whose last use is the step that first writes it."""
    found: dict[int, int] = {}
    when = moments(steps)
    for at, step in zip(when, steps):
        if bisect_right(when, at) - bisect_left(when, at) > 1:
            continue  # another step of its group may read it meanwhile
        gone: set[int] = set()
        allowed: AbstractSet[tuple[int, int]] | None = None
        for w, written in enumerate(step.args):
            if not step.kernel.buffers[w].writable or written not in decls or lives[written].first != at or written in found:
                continue
            for read in step.args:
                fits = read in decls and read not in gone and decls[read].region is Region.ARENA and lives[read].last == at
                if not fits or lives[read].first >= at or not 0 < decls[read].nbytes == decls[written].nbytes:
                    continue
                allowed = pairs(step.kernel) if allowed is None else allowed
                # one buffer may be bound to several arguments; each of them must be safe
                if all((i, w) in allowed for i, arg in enumerate(step.args) if arg == read):
                    found[written] = read
                    gone.add(read)
                    break
    return found


def _slots(decls: dict[int, BufferDecl], lives: dict[int, Lifetime], taken_over: dict[int, int]) -> list[_Slot]:
    slots: list[_Slot] = []
    slot_of: dict[int, _Slot] = {}
    for b in sorted(decls, key=lambda b: (lives[b].first, b)):  # a buffer comes after the one it takes over from
        if b in taken_over:
            slot = slot_of[taken_over[b]]
            slot.members.append(b)
            slot.life = Lifetime(slot.life.first, lives[b].last)
        else:
            slot = _Slot([b], decls[b].nbytes, lives[b])
            slots.append(slot)
        slot_of[b] = slot
    return slots


def _place(order: Sequence[_Slot], alignment: int) -> tuple[dict[int, int], int]:
    """Offset of each slot (by its first member), and the bytes needed. Best fit: each slot goes into the smallest gap between
    the slots that are live at the same time."""
    offsets: dict[int, int] = {}
    placed = np.zeros((4, len(order)), np.int64)  # start, end (rounded up), first and last moment; by start
    size = count = 0
    for slot in order:
        starts, ends, first, last = placed[:, :count]
        live = np.flatnonzero((first <= slot.life.last) & (last >= slot.life.first))
        cursors = np.concatenate(([0], np.maximum.accumulate(ends[live])))  # before each of them, and behind all
        gaps = starts[live] - cursors[:-1]
        fits = np.flatnonzero(gaps >= slot.nbytes)
        at = int(cursors[fits[np.argmin(gaps[fits])]] if len(fits) else cursors[-1])
        offsets[slot.members[0]] = at
        if slot.nbytes:
            here = int(np.searchsorted(starts, at))
            placed[:, here + 1 : count + 1] = placed[:, here:count]
            placed[:, here] = at, _round_up(at + slot.nbytes, alignment), slot.life.first, slot.life.last
            count += 1
            size = max(size, at + slot.nbytes)
    return offsets, _round_up(size, alignment)


def _most_live(slots: Iterable[_Slot], steps: int, alignment: int = 1) -> int:
    """The most bytes that are live at a time, of slots that are rounded up."""
    change = [0] * (steps + 3)  # index 0 is "before the first step"
    for s in slots:
        if s.life.first <= s.life.last:
            nbytes = _round_up(s.nbytes, alignment)
            change[s.life.first + 1] += nbytes
            change[s.life.last + 2] -= nbytes
    most = live = 0
    for c in change:
        live += c
        most = max(most, live)
    return most


def _round_up(n: int, to: int) -> int:
    return -(-n // to) * to
