"""Groups of concurrent steps: reorders the steps of a run and groups independent ones, with one barrier per group instead of one
per step.

Only small steps are grouped: a large one keeps all threads busy, and results computed early occupy memory for longer. Groups
are validated by rlx/compiler/check.py, which shares no code with this file.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from functools import cache

from rlx.ir.cost import flops
from rlx.ir.kernel import Check, Kernel, Native, parts_of
from rlx.ir.program import Step
from rlx.ir.target import Target

SMALL = 100  # estimated time of a small step on one thread, at most, in barriers


def group_concurrent(steps: Sequence[Step], target: Target) -> list[tuple[int, bool]]:
    """(step index, True if it joins the group of the previous step), in execution order. Two steps that access the same buffer,
    at least one of them writing, keep their order. With one thread nothing changes."""
    if target.threads == 1:
        return [(i, False) for i in range(len(steps))]
    small = cache(lambda kernel: _is_small(kernel, target))
    waits, followers = _dependences(steps)
    ready, order = [i for i, n in enumerate(waits) if not n], []
    while ready:
        group = ready[:1]
        if small(steps[group[0]].kernel):
            group = [i for i in ready if small(steps[i].kernel)][: target.points]  # more would delay steps that others wait for
        order += [(i, i != group[0]) for i in group]
        ready = [i for i in ready if i not in group]
        for follower in (f for i in group for f in followers[i]):
            waits[follower] -= 1
            if not waits[follower]:
                insort(ready, follower)
    return order


def _dependences(steps: Sequence[Step]) -> tuple[list[int], list[set[int]]]:
    """For each step, the number of earlier steps it depends on, and the steps that depend on it."""
    waits, followers = [0] * len(steps), [set[int]() for _ in steps]
    writer: dict[int, int] = {}  # last writer of a buffer
    readers: dict[int, set[int]] = {}  # readers of a buffer since its last write
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


def _is_small(kernel: Kernel, target: Target) -> bool:
    """True if the step may be in a group: it is short and cannot fail, so that a failure belongs to one step, unless each step
    reports for itself. (A Native with integer operands may fail.)"""
    indexed = any(v.buffer.dtype.kind in "iu" for s in kernel.body if isinstance(s, Native) for v in s.inputs)
    may_fail = indexed or any(isinstance(s, Check) for s in parts_of(kernel))
    if kernel.collective or kernel.flow or (may_fail and not target.status_late):
        return False
    operations, nbytes = flops(kernel), sum(b.size * b.dtype.itemsize for b in kernel.buffers)
    limit = SMALL * target.sync_ns
    return operations is not None and operations / target.flops_per_ns + nbytes / target.bytes_per_ns < limit


__all__ = ["group_concurrent"]
