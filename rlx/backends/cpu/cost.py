"""Estimates from a kernel's IR: its rough run time, and whether it can fail."""

from __future__ import annotations

import math

from rlx.backends.cpu.render import work_ns
from rlx.ir.cost import points
from rlx.ir.kernel import Check, Contract, Kernel, Native, parts_of
from rlx.ir.op import OPS
from rlx.ir.target import Target

MULTIPLY_NS = 0.02  # per multiply-add of f32, one core
BYTE_NS = 0.02  # per byte of arguments


def may_fail(kernel: Kernel) -> bool:
    """Whether the kernel has a Check. Claimed ops count as having one."""
    return any(isinstance(part, (Check, Native)) for part in parts_of(kernel))


def estimated_ns(kernel: Kernel, target: Target) -> int:
    """The time of all grid points on one core; right within a factor of a few."""
    moved = sum(b.size * b.dtype.itemsize for b in kernel.buffers) * BYTE_NS
    for s in kernel.body:
        if isinstance(s, Contract):
            return round(moved + points(kernel) * s.m * s.n * s.k * MULTIPLY_NS)
        if isinstance(s, Native):  # each element of the largest output depends on a row of some input
            rows = max((max(v.dims, default=1) for v in s.inputs), default=1)
            multiplied = max(map(math.prod, s.results)) * rows
            if (count := OPS[s.op].flops) is not None:
                multiplied = min(multiplied, count([v.dims for v in s.inputs], s.results, s.attrs) // 2)
            return round(moved + multiplied * MULTIPLY_NS)
    return round(max(moved, work_ns(kernel, target)))
