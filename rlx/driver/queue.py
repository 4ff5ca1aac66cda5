"""RunQueue: runs that wait for their turn while the caller goes on.

One queue per HandleStore: runs of all executables on the same states keep their order. One worker thread per queue: it starts
with the first job, ends with its queue, and at exit the interpreter waits for the jobs that are queued. A fork waits too, and
the child begins with an empty queue: it has the states, but not the thread.
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

DEPTH = 64  # jobs that wait at most; each holds its inputs


class RunQueue:
    """Jobs in order. One that raises ends the line: those behind it, which were to see its results, are not run, until `wait`
    has raised the error. `last`: of the newest job; None: `wait` has nothing to do."""

    def __init__(self) -> None:
        self.last: Future[None] | None = None
        self.gates: WeakSet[Gate] = WeakSet()  # of the executables whose runs come here; `queued` tells them to wait
        self._room, self._lock = threading.Semaphore(DEPTH), threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._count = 0
        self._failed: tuple[int, BaseException | None] = (0, None)  # the job that ended the line
        _queues.add(self)

    def tell(self, queued: bool) -> None:
        """Whether calls in machine code must leave the run to Python, which waits."""
        for gate in list(self.gates):
            gate.queued = queued

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job. Returns at once, unless DEPTH jobs wait."""
        from concurrent.futures import ThreadPoolExecutor  # with it come logging and more: not for `import rlx`

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
        """A job that is done when this returns, in the caller's thread; its error is for `wait`, like those of the others."""
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
        """Return when nothing is queued any more. Raises the error of the job that failed, with its index since the last wait."""
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
