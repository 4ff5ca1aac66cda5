"""RunQueue: executes runs asynchronously, in order.

There is one queue per HandleStore, so that runs of all executables on the same states keep their order. Each queue has one worker
thread. It starts with the first job and ends with the queue. At exit the interpreter waits for queued jobs. A fork waits for them
too, and the child starts with an empty queue: it has the states, but not the thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakSet

from rlx.errors import RlxError
from rlx.host.gate import Gate

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

DEPTH = 64  # maximum number of queued jobs; each holds its inputs


class RunQueue:
    """Jobs in order. If a job raises, later jobs are cancelled, because they depend on its results, until `wait` has raised the
    error. `last`: the future of the newest job; None: nothing to wait for."""

    def __init__(self) -> None:
        self.last: Future[None] | None = None
        self.gates: WeakSet[Gate] = WeakSet()  # of the executables that use this queue; `queued` tells them to wait
        self._room, self._lock = threading.Semaphore(DEPTH), threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._count = 0
        self._failed: tuple[int, BaseException | None] = (0, None)  # the job that failed
        _queues.add(self)

    def tell(self, queued: bool) -> None:
        """Set whether generated functions must leave runs to Python, which waits for the queue."""
        for gate in list(self.gates):
            gate.queued = queued

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. Returns at once, unless DEPTH jobs are queued already."""
        from concurrent.futures import ThreadPoolExecutor  # imports logging and more: too slow for `import rlx`

        self._room.acquire()
        try:
            with self._lock:
                self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="rlx-queue")
                self.last = self._worker.submit(self._do, self._count, job)
                self.tell(True)
                self._count += 1
        except BaseException:
            self._room.release()
            raise

    def at_once(self, job: Callable[[], None]) -> None:
        """Run a job now, in the caller's thread. As for queued jobs, its error is raised by `wait`."""
        from concurrent.futures import Future

        with self._lock:
            at, self._count = self._count, self._count + 1
            self.tell(True)
            self.last = Future()
            self.last.set_result(None)
        if self._failed[1] is None:
            try:
                job()
            except Exception as e:  # noqa: BLE001  for `wait`
                self._failed = at, e

    def _do(self, at: int, job: Callable[[], None]) -> None:
        try:
            if self._failed[1] is None:
                job()
        except BaseException as e:  # noqa: BLE001  for `wait`, in the caller's thread
            self._failed = at, e
        finally:
            self._room.release()

    def wait(self) -> None:
        """Wait until the queue is empty. Raises the error of the job that failed, with its index since the last wait."""
        with self._lock:
            if self.last is not None:
                self.last.result()
            (at, error), count = self._failed, self._count
            self.last, self._failed, self._count = None, (0, None), 0
            self.tell(False)
        if error is not None:
            told = f"queued run {at} of {count}: {error}"
            told += f"; the {count - at - 1} behind it were not run" if at + 1 < count else ""
            if isinstance(error, RlxError):
                raise type(error)(told) from error
            error.add_note(told)
            raise error


_queues: WeakSet[RunQueue] = WeakSet()
_held: list[RunQueue] = []  # while the process forks


def _before_fork() -> None:
    for queue in list(_queues):
        queue._lock.acquire()  # the next job waits
        _held.append(queue)
        if queue.last is not None:
            queue.last.result()


def _after_fork(child: bool) -> None:
    while _held:
        queue = _held.pop()
        if child:
            queue._worker, queue.last, queue._count, queue._failed = None, None, 0, (0, None)
            queue.tell(False)
            queue._room = threading.Semaphore(DEPTH)
        queue._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=lambda: _after_fork(child=False), after_in_child=lambda: _after_fork(child=True)
    )
