"""Worker threads for runs: Python daemon threads that stay inside the executor's machine code
(rlx.backends.cpu.executor) and sleep there.

One pool per process and thread count, shared by all executables. A forked child starts its own workers at its
first run; at exit the workers are woken and joined.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import os
import platform
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from rlx.backends.cpu.abi import ATTEND, MAX_CPUS, MAX_PARTS, MAX_TASKS, Control, Run, Step
from rlx.backends.cpu.memory import allocate
from rlx.errors import OptionError
from rlx.forks import Lock, each_in_child
from rlx.host.builtin import METH_NOARGS, MethodDef, address_of, builtin, futex_call
from rlx.host.jit import Library, kept_object
from rlx.host.processor import MAX_THREADS, usable_cpus

# How long a thread spins before it sleeps, between runs and within one: no longer than a wake-up takes. Spinning uses up the
# thread's share of the CPU, so that the system may preempt it later, in the middle of a task.
IDLE_SPIN_US, BUSY_SPIN_US = 100, 50
YIELDS = 8  # sched_yield calls between spinning and sleeping
__all__ = ["ATTEND", "MAX_TASKS", "Pool", "Run", "Step", "callable_of", "copy_address", "pool", "run_address", "worker_cpus"]


@cache
def _made() -> tuple[Library, MethodDef]:
    machine, futex = platform.machine(), futex_call()

    def text() -> str:
        from rlx.backends.cpu import executor  # not needed if its code is cached on disk

        return executor.module_text(machine, futex)

    image = kept_object(f"worker pool {machine} {futex}", text)
    library = Library([image], ("rlx_run", "rlx_run_py", "rlx_work", "rlx_stop", "rlx_spin", "rlx_copy_part"))
    return library, MethodDef(b"run", library.address("rlx_run_py"), METH_NOARGS, b"The whole run.")


def _walker() -> tuple[Library, MethodDef]:
    """The executor's machine code, and rlx_run_py as a Python method. Both live as long as the process, since workers stay
    inside the code and built-in functions point to it."""
    with _making:  # with a cache alone, concurrent threads could each load one, and all but one would be freed
        return _made()


_making = Lock()


def _library() -> Library:
    return _walker()[0]


def run_address() -> int:
    """The address of rlx_run: i32 (ptr run)."""
    return _library().address("rlx_run")


def copy_address() -> int:
    """The address of a kernel that copies (executor.rlx_copy_part)."""
    return _library().address("rlx_copy_part")


def callable_of(run: Run) -> Callable[[], int]:
    """A built-in function that performs `run` without the GIL, at a third of the cost of a ctypes call. `run` must outlive it.

    It returns 0, a status, or ATTEND; after ATTEND, call `Pool.attend`."""
    return builtin(_walker()[1], ctypes.addressof(run))


class Pool:
    """`threads` - 1 workers, and the threads that call runs. Workers are daemon threads that sleep between runs.

    One run at a time uses the workers. A concurrent run executes its table in its own thread, with the same result.
    `address`: address of the Control block, for Run.control."""

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= MAX_THREADS:
            raise OptionError(f"threads must be from 1 to {MAX_THREADS}, got {threads}")
        self.threads = threads
        self._memory = allocate(ctypes.sizeof(Control))
        self.address = self._memory.address
        self._control = Control.from_address(self.address)
        self._reset()
        _all.add(self)

    def start(self) -> None:
        """Start the workers, unless they run already. If the system refuses a thread, runs use the workers that did start."""
        with self._starting:
            if self._started:
                return
            self._started = True
            if self.threads <= usable_cpus():  # otherwise spinning would take CPU time from other threads
                self._control.idle_spins = IDLE_SPIN_US * _spins_per_us()
                self._control.busy_spins = BUSY_SPIN_US * _spins_per_us()
            cpus = worker_cpus(self.threads - 1)
            self._pins = {cpu for cpu in cpus if cpu is not None}
            for tid, cpu in enumerate(cpus, 1):
                worker = threading.Thread(target=self._work, args=(tid, cpu), name=f"rlx-worker-{tid}", daemon=True)
                try:
                    worker.start()
                except RuntimeError as fault:  # a limit on threads, or the interpreter is shutting down
                    warnings.warn(f"rlx runs on {tid} of {self.threads} threads: {fault}", RuntimeWarning, stacklevel=3)
                    break
                self.workers += (worker,)
            self._control.workers = len(self.workers)
            self._mark(self._pins)

    def attend(self) -> None:
        """After a run returned ATTEND: start the workers, or move this thread off a CPU that a worker is pinned to."""
        if not self._started:
            return self.start()
        if not self._pins:  # closed, or no thread was granted
            return None
        allowed = os.sched_getaffinity(0)
        free = allowed - self._pins
        if free:  # move this thread now; the scheduler takes some 10 ms to notice that two threads share a CPU
            os.sched_setaffinity(0, free)
            os.sched_setaffinity(0, allowed)
            return None
        for worker in self.workers:  # this thread may use no other CPU: unpin the workers instead
            if worker.native_id is not None and worker.is_alive():
                os.sched_setaffinity(worker.native_id, allowed | self._pins)
        return self._mark(set())

    def close(self) -> None:
        """Wake the workers and wait until they have left. Later runs use only their own thread, and `start` does nothing."""
        with self._starting:
            self._started = True
            self._control.workers = 0
            _library().function("rlx_stop", None, ctypes.c_void_p)(self.address)
            for worker in self.workers:
                worker.join()
            self.workers, self._pins = (), set()

    def _mark(self, cpus: set[int]) -> None:
        """Record in the Control block which CPUs have a worker pinned to them."""
        ctypes.memset(self._control.pinned, 0, MAX_CPUS)
        for cpu in cpus:
            if cpu < MAX_CPUS:
                self._control.pinned[cpu] = ATTEND
                self._control.getcpu = address_of(ctypes.CDLL(None).sched_getcpu)

    def _work(self, tid: int, cpu: int | None) -> None:
        if cpu is not None:
            with contextlib.suppress(OSError):  # this CPU is no longer allowed; any other will do
                os.sched_setaffinity(0, {cpu})  # 0: this thread only
        _library().function("rlx_work", None, ctypes.c_void_p, ctypes.c_int64)(self.address, tid)

    def _reset(self) -> None:
        """Initial state: no worker, no run. Also used in a forked child, which does not have its parent's threads."""
        ctypes.memset(self.address, 0, ctypes.sizeof(Control))
        libc = ctypes.CDLL(None)
        self._control.threads, self._control.yields = min(self.threads, MAX_PARTS), YIELDS
        self._control.wait = address_of(libc.syscall if futex_call() else libc.usleep)
        self._control.sched_yield = address_of(libc.sched_yield)
        self.workers: tuple[threading.Thread, ...] = ()
        self._pins: set[int] = set()
        self._started = False
        self._starting = threading.Lock()


_pools: dict[int, Pool] = {}
_pools_lock = Lock()


def pool(threads: int) -> Pool:
    """The process's pool with `threads` threads, started."""
    with _pools_lock:
        if threads not in _pools:
            _pools[threads] = Pool(threads)
            atexit.register(_pools[threads].close)
    _pools[threads].start()
    return _pools[threads]


_all = each_in_child(Pool._reset)


# -- CPUs ----------------------------------------------------------------------------------------------------------


def worker_cpus(count: int) -> Sequence[int | None]:
    """A separate CPU for each worker, from those this thread may use: first cores other than the current one, then their
    second hardware threads. All None (not pinned) if there are too few, or if threads cannot be pinned."""
    if not hasattr(os, "sched_setaffinity") or count >= len(os.sched_getaffinity(0)):
        return [None] * count
    here = ctypes.CDLL(None).sched_getcpu()
    seen: dict[str, int] = {}  # core -> number of its hardware threads used so far
    rank: dict[int, int] = {}
    for cpu in sorted(os.sched_getaffinity(0), key=lambda cpu: (cpu != here, cpu)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        core = siblings.read_text() if siblings.exists() else str(cpu)
        rank[cpu] = seen[core] = seen.get(core, -1) + 1
    rank.pop(here, None)
    return sorted(rank, key=lambda cpu: (rank[cpu], cpu))[:count]


@cache
def _spins_per_us() -> int:
    """Iterations of the spin loop per microsecond: the best of a few short trials, since other threads may use the CPU."""
    spin = _library().function("rlx_spin", ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
    control = allocate(ctypes.sizeof(Control))
    seconds, spins = [], 500
    for _ in range(4):
        start = time.perf_counter()
        spin(control.address, spins)
        seconds.append(time.perf_counter() - start)
    return max(1, round(spins / (min(seconds) * 1e6)))
