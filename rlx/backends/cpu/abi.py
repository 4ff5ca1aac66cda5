"""Words that the executor (rlx.backends.cpu.executor) and the Python around it share, and what is known of a kernel's code.

Loading and running what was compiled before needs these, but not what writes code.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from rlx.host.abi import I32, I64, P

MAX_THREADS = 1024
MAX_TASKS = 1 << 31
MAX_CPUS = 1024  # those with higher numbers are never marked as pinned
ATTEND = -1  # what a run returns when all went well, but `Pool.attend` should be called before the next


class Step(ctypes.Structure):
    """One kernel call: fn(args, task, scratch, status) for every task in range(tasks). `after`: tasks of the steps that follow it
    in its group."""

    _fields_ = [("fn", P), ("args", P), ("tasks", I64), ("after", I64)]


class Run(ctypes.Structure):
    """A table of steps [first, end) and its surroundings. `scratch`: `stride` bytes per thread. `control`: the pool's
    block, or null to walk alone. `failed`: the last step begun when `status` became nonzero."""

    _fields_ = [
        ("first", P), ("end", P), ("scratch", P), ("stride", I64), ("control", P), ("failed", P), ("status", I32),
    ]  # fmt: skip


class Control(ctypes.Structure):
    """A pool's shared words. All that changes in a run lies on one cache line; the rest is constant. `alone`: runs at the moment
    besides the one that has the workers. `pinned`, by CPU:
    ATTEND where a worker is pinned to it, else 0."""

    _fields_ = [
        ("ticket", I64), ("step", P), ("run", P), ("done", I32), ("sleepers", I32), ("lock", I32), ("workers", I32),
        ("caller_asleep", I32), ("stop", I32), ("alone", I32), ("pad", I32 * 3),
        ("idle_spins", I64), ("busy_spins", I64), ("yields", I64), ("wait", P), ("sched_yield", P), ("getcpu", P),
        ("pinned", ctypes.c_int8 * MAX_CPUS),
    ]  # fmt: skip


BIAS = 1 << 16  # threads that come too late subtract from this; at most two per thread and generation
END = 1 << 15  # low half between runs
GENERATION = 1 << 32  # one of them, in the high half


@dataclass(frozen=True)
class Rendered:
    """One kernel as LLVM IR: a whole module's text, the symbol to call, and what the runtime must give it.

    ABI: void symbol(ptr args, i64 task, ptr scratch, ptr status). args[i] is the address of kernel.buffers[i]; task runs
    over range(tasks), in any order, on any thread; scratch is private to the thread, 64-byte aligned, `scratch_bytes`
    long; a failed Check stores its code in the i32 at status.

    `work_ns`: roughly, of all tasks on one core. `may_fail`: 0 where no Check can.
    """

    symbol: str
    text: str
    tasks: int
    scratch_bytes: int = 0
    work_ns: int = 0
    may_fail: int = 1
