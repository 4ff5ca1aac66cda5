"""The ABI between the executor (rlx.backends.cpu.executor) and Python: shared structs, constants, the record of a kernel's code.

Loading and running cached code needs this module, but no code generator.
"""

from __future__ import annotations

import ctypes

from rlx.host.abi import I32, I64, P
from rlx.records import record

MAX_TASKS = 1 << 31
MAX_CPUS = 1024  # CPUs with higher numbers are never marked as pinned
MAX_PARTS = 64  # of a group's tasks; of more threads, some share a part
LINE = 64  # bytes of a cache line
ATTEND = -1  # returned by a run that succeeded, if `Pool.attend` should be called before the next one


class Step(ctypes.Structure):
    """One step: fn(args, task, scratch, status) for every task in range(tasks). `after`: number of tasks of the later steps in
    its group; JUMP: the run continues after the step whose address fn has stored at args. `ahead`: a Reading for each thread, or
    null. `again`: added to the number of a task if the thread's last task in this group was one of this step: KEPT or 0. `quiet`:
    1 if no thread is woken for the group that this step begins, since it is over before one would be awake; or 0."""

    _fields_ = [("fn", P), ("args", P), ("tasks", I64), ("after", I64), ("ahead", P), ("again", I64), ("quiet", I64)]


class Reading(ctypes.Structure):
    """Memory that a thread will read in order in its tasks of the next two steps that read weights, as far as it fetches them
    ahead: whole cache lines."""

    _fields_ = [("near", P), ("near_bytes", I64), ("later", P), ("later_bytes", I64)]


class Run(ctypes.Structure):
    """A table of steps [first, end) and its surroundings. `scratch`: `stride` bytes per thread. `control`: the pool's
    block, or null to run on one thread. `failed`: the last step started when `status` became nonzero."""

    _fields_ = [("first", P), ("end", P), ("scratch", P), ("stride", I64), ("control", P), ("failed", P), ("status", I32)]


class Control(ctypes.Structure):
    """A pool's shared state. The fields that change in a run are on one cache line, and on one line for each thread: `taken`, how
    many tasks of its part it has taken, and others; `fetching`, the Readings that it has seen last, then the rest of its own. The
    rest is constant. `alone`: number of current runs, apart from the one that uses the workers. `threads`: MAX_PARTS at most.
    `pinned`, by CPU: ATTEND if a worker is pinned to it, else 0."""

    _fields_ = [
        ("ticket", I64), ("step", P), ("run", P), ("done", I32), ("sleepers", I32), ("lock", I32), ("workers", I32),
        ("caller_asleep", I32), ("stop", I32), ("alone", I32), ("threads", I32), ("pad", I32 * 2),
        ("taken", I64 * (LINE // 8 * MAX_PARTS)), ("fetching", I64 * (LINE // 8 * MAX_PARTS)), ("idle_spins", I64),
        ("busy_spins", I64), ("yields", I64), ("wait", P),
        ("sched_yield", P), ("getcpu", P), ("pinned", ctypes.c_int8 * MAX_CPUS),
    ]  # fmt: skip


JUMP = -1
KEPT = 1 << 40  # more than any task's number; see Rendered.keeps
STOP = 1 << 32  # a bit of the ticket: the pool stops
GENERATION = 1 << 33  # one generation of the ticket, and of the words of parts; below are STOP and the number of tasks


@record
class Rendered:
    """One kernel as LLVM IR: the text of a whole module, the symbol to call, and its runtime requirements.

    ABI: void symbol(ptr args, i64 task, ptr scratch, ptr status). args[i] is the address of kernel.buffers[i]; task runs
    over range(tasks), in any order, on any thread; scratch is private to the thread, 64-byte aligned, `scratch_bytes`
    long; a failed Check stores its code in the i32 at status.

    `work_ns`: rough time of all tasks on one core. `may_fail`: 0 if no Check can fail. `streamed`: 1 + the index of a buffer that
    the tasks read from beginning to end, in order and in equal shares, and that should be fetched ahead; 0: there is none.
    `keeps`: KEPT if what a task leaves in the scratch serves the thread's next tasks of the same step, whose numbers then have
    KEPT added; or 0.
    """

    symbol: str
    text: str
    tasks: int
    scratch_bytes: int = 0
    work_ns: int = 0
    may_fail: int = 1
    streamed: int = 0
    keeps: int = 0
