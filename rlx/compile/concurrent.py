"""Independent branches side by side: the order of a run's steps, and which of them are in one group, so that threads wait for one
another after all of them and not after each.

Only small steps: a large one keeps all threads busy by itself, and what is computed early takes memory for longer. What a group
may not do is judged by rlx/compile/check.py, which shares no code with this file.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from functools import cache

from rlx.ir.cost import flops
from rlx.ir.kernel import Check, Kernel, Native, walk
from rlx.ir.program import Step

SMALL_NS = 200_000  # of a step on one core, roughly; to wait for all threads takes one or two thousand
FLOPS_PER_NS, BYTES_PER_NS = 50, 10
STEPS_PER_THREAD = 4  # of a group at most: what others wait for is not put off by much that nobody does


def side_by_side(steps: Sequence[Step], threads: int) -> list[tuple[int, bool]]:
    """(which step, whether it is in the group of the one before), in the order of the run. Of two steps that touch one buffer,
    which one of them writes, the first stays before the second. With one thread all stay as they are."""
    if threads == 1:
        return [(i, False) for i in range(len(steps))]
    small = cache(_is_small)
    waits, followers = _dependences(steps)
    ready, order = [i for i, n in enumerate(waits) if not n], []
    while ready:
        group = ready[:1]
        if small(steps[group[0]].kernel):
            group = [i for i in ready if small(steps[i].kernel)][: STEPS_PER_THREAD * threads]
        order += [(i, i != group[0]) for i in group]
        ready = [i for i in ready if i not in group]
        for follower in (f for i in group for f in followers[i]):
            waits[follower] -= 1
            if not waits[follower]:
                insort(ready, follower)
    return order


def _dependences(steps: Sequence[Step]) -> tuple[list[int], list[set[int]]]:
    """How many earlier steps each one waits for, and which ones wait for it."""
    waits, followers = [0] * len(steps), [set[int]() for _ in steps]
    writer: dict[int, int] = {}  # of a buffer: the last one
    readers: dict[int, set[int]] = {}  # since then
    for i, step in enumerate(steps):
        before = {writer[b] for b in step.reads | step.writes if b in writer}
        before |= {r for b in step.writes for r in readers.get(b, ())}
        waits[i] = len(before)
        for j in before:
            followers[j].add(i)
        for b in step.reads:
            readers.setdefault(b, set()).add(i)
        for b in step.writes:
            writer[b], readers[b] = i, set()
    return waits, followers


def _is_small(kernel: Kernel) -> bool:
    """Whether it may be in a group: it takes little time, and it cannot fail, so that a failure is of one step. (An op of its own
    may fail if it is given integers.)"""
    indexed = any(v.buffer.dtype.kind in "iu" for s in kernel.body if isinstance(s, Native) for v in s.inputs)
    if kernel.collective or indexed or any(isinstance(s, Check) for s in walk(kernel.body)):
        return False
    operations, nbytes = flops(kernel), sum(b.size * b.dtype.itemsize for b in kernel.buffers)
    return operations is not None and operations / FLOPS_PER_NS + nbytes / BYTES_PER_NS < SMALL_NS


__all__ = ["side_by_side"]
