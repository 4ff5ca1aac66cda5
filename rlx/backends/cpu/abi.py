"""The ABI between the executor (rlx.backends.cpu.executor) and Python: shared structs, constants, the record of a kernel's code.

Loading and running cached code needs this module, but no code generator.
"""

from __future__ import annotations

import ctypes

from rlx.host.abi import I32, I64, P
from rlx.records import record

MAX_THREADS = 1024
MAX_TASKS = 1 << 31
MAX_CPUS = 1024  # CPUs with higher numbers are never marked as pinned
MAX_PARTS = 8  # of a group's tasks; more threads take them in order, as their words would pass between many caches at each step
PART_BYTES = 64  # a cache line, for the numbers that belong to one
ATTEND = -1  # returned by a run that succeeded, if `Pool.attend` should be called before the next one


class Step(ctypes.Structure):
    """One step: fn(args, task, scratch, status) for every task in range(tasks). `after`: number of tasks of the later steps in
    its group; JUMP: the run continues after the step whose address fn has stored at args."""

    _fields_ = [("fn", P), ("args", P), ("tasks", I64), ("after", I64)]


class Run(ctypes.Structure):
    """A table of steps [first, end) and its surroundings. `scratch`: `stride` bytes per thread. `control`: the pool's
    block, or null to run on one thread. `failed`: the last step started when `status` became nonzero."""

    _fields_ = [
        ("first", P), ("end", P), ("scratch", P), ("stride", I64), ("control", P), ("failed", P), ("status", I32),
    ]  # fmt: skip


class Control(ctypes.Structure):
    """A pool's shared state. The fields that change in a run are on one cache line, and `taken`, on one line for each part of a
    group's tasks: how many of them its own thread has taken (low half), and other threads (high half). `parts`: their number; 0:
    tasks are taken in order. The rest is constant. `alone`: number of current runs, apart from the one that uses the workers.
    `pinned`, by CPU: ATTEND if a worker is pinned to it, else 0."""

    _fields_ = [
        ("ticket", I64), ("step", P), ("run", P), ("done", I32), ("sleepers", I32), ("lock", I32), ("workers", I32),
        ("caller_asleep", I32), ("stop", I32), ("alone", I32), ("parts", I32), ("pad", I32 * 2),
        ("taken", I64 * (PART_BYTES // 8 * MAX_PARTS)), ("idle_spins", I64), ("busy_spins", I64), ("yields", I64), ("wait", P),
        ("sched_yield", P), ("getcpu", P), ("pinned", ctypes.c_int8 * MAX_CPUS),
    ]  # fmt: skip


JUMP = -1
BIAS = 1 << 16  # late threads subtract from this; at most two per thread and generation
END = 1 << 15  # low half between runs
GENERATION = 1 << 32  # one generation, in the high half


@record
class Rendered:
    """One kernel as LLVM IR: the text of a whole module, the symbol to call, and its runtime requirements.

    ABI: void symbol(ptr args, i64 task, ptr scratch, ptr status). args[i] is the address of kernel.buffers[i]; task runs
    over range(tasks), in any order, on any thread; scratch is private to the thread, 64-byte aligned, `scratch_bytes`
    long; a failed Check stores its code in the i32 at status.

    `work_ns`: rough time of all tasks on one core. `may_fail`: 0 if no Check can fail.
    """

    symbol: str
    text: str
    tasks: int
    scratch_bytes: int = 0
    work_ns: int = 0
    may_fail: int = 1
