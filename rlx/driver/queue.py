"""RunQueue: the stream of runs on one HandleStore. It executes them asynchronously, in order.

All executables on the same states share it, so that their runs keep their order. Runs that return when they are finished go to a
worker thread. It starts with the first of them and ends with the queue. A device with a queue of its own returns a Pending for
each run instead. At exit the interpreter waits for queued runs. A fork waits for them too, and the child starts with an empty
queue: it has the states, but not the thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING
from weakref import WeakSet

from rlx.driver.stream import Pending
from rlx.errors import RlxError
from rlx.host.gate import Gate, new_lock

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

DEPTH = 64  # maximum number of queued commands; each holds its inputs


class Ended:
    """The future of a command that was executed at once."""

    def result(self) -> None: ...


ENDED = Ended()


@cache
def _pends(kind: type) -> bool:
    """Whether it is a Pending; isinstance takes as long as the start of a run."""
    return issubclass(kind, Pending)


class RunQueue:
    """A CommandStream. If a command raises, later ones are cancelled, because they depend on its results, until `wait` has raised
    the error. `last`: the future of the newest command; None: nothing to wait for."""

    def __init__(self) -> None:
        self.last: Future[None] | Ended | None = None
        self.gates: WeakSet[Gate] = WeakSet()  # of the executables that use this queue; `queued` tells them to wait
        self._room, self._lock = threading.Semaphore(DEPTH), new_lock()
        self._worker: ThreadPoolExecutor | None = None
        self._recorded: list[Callable[[], object]] = []
        self._pending: deque[tuple[int, Pending]] = deque()  # commands whose status has not arrived, by number
        self._count = 0
        self._failed: tuple[int, BaseException | None] = (0, None)  # the first command that failed
        _queues.add(self)

    def tell(self, queued: bool) -> None:
        """Set whether generated functions must leave runs to Python, which waits for the queue."""
        for gate in list(self.gates):
            gate.queued = queued

    def record(self, name: str, command: Callable[[], object]) -> None:
        """As in CommandStream. Waits for room if DEPTH commands are queued already."""
        self._room.acquire()
        self._recorded.append(command)

    def submit(self) -> None:
        from concurrent.futures import ThreadPoolExecutor  # imports logging and more: too slow for `import rlx`

        with self._lock:
            self._worker = self._worker or ThreadPoolExecutor(1, thread_name_prefix="rlx-queue")
            while self._recorded:
                self.tell(True)
                self.last = self._worker.submit(self._in_worker, self._number(), self._recorded.pop(0))

    def at_once(self, command: Callable[[], object]) -> None:
        """Execute a command now, in the caller's thread. As for queued commands, its error is raised by `wait`."""
        with self._lock:
            at = self._number()
            self.last = ENDED
        while self._pending and (len(self._pending) >= DEPTH or self._pending[0][1].done()):
            self._settle()
        try:
            self._do(at, command)
        except Exception as e:  # noqa: BLE001  for `wait`
            self._fail(at, e)

    @property
    def failed(self) -> bool:
        """Whether a command is known to have failed, so that new ones would be cancelled."""
        return self._failed[1] is not None

    @property
    def busy(self) -> bool:
        """Whether generated functions must leave runs to Python, which waits: commands are queued here, or one has failed. A
        device with a queue of its own takes runs behind those under way."""
        return self.failed or self.last not in (None, ENDED)

    def _fail(self, at: int, error: BaseException) -> None:
        self._failed = at, error
        self.tell(True)

    def _number(self) -> int:
        self._count += 1
        return self._count - 1

    def _in_worker(self, at: int, command: Callable[[], object]) -> None:
        try:
            self._do(at, command)
        except BaseException as e:  # noqa: BLE001  for `wait`, in the caller's thread
            self._fail(at, e)
        finally:
            self._room.release()

    def _do(self, at: int, command: Callable[[], object]) -> None:
        if not self.failed and (later := command()) is not None and _pends(type(later)):
            self._pending.append((at, later))  # type: ignore[arg-type]

    def _settle(self) -> None:
        """Wait for the oldest command whose status has not arrived."""
        at, later = self._pending[0]
        try:
            later.wait()
        except Exception as e:  # noqa: BLE001  for `wait`
            if not self.failed or at < self._failed[0]:  # those after the first to fail were cancelled
                self._fail(at, e)
        self._pending.popleft()

    def wait(self) -> None:
        """Wait until the queue is empty. Raises the error of the command that failed, with its index since the last wait."""
        with self._lock:
            if self.last is not None:
                self.last.result()
            while self._pending:
                self._settle()
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

    def submit_and_wait(self) -> None:
        self.submit()
        self.wait()


_queues: WeakSet[RunQueue] = WeakSet()
_held: list[RunQueue] = []  # while the process forks


def _before_fork() -> None:
    for queue in list(_queues):
        queue._lock.acquire()  # the next command waits
        _held.append(queue)
        if queue.last is not None:
            queue.last.result()


def _after_fork(child: bool) -> None:
    while _held:
        queue = _held.pop()
        if child:
            queue._worker, queue.last, queue._count, queue._failed = None, None, 0, (0, None)
            queue._pending.clear()
            queue.tell(False)
            queue._room = threading.Semaphore(DEPTH)
        queue._lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=lambda: _after_fork(child=False), after_in_child=lambda: _after_fork(child=True)
    )
