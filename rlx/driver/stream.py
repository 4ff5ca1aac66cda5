"""Command streams: work submitted to a device in order. Also a recorder of launches and transfers, for tests and traces."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol, runtime_checkable

from rlx.records import record


@runtime_checkable
class Pending(Protocol):
    """A run that the device has accepted. Its status arrives later."""

    def done(self) -> bool:
        """Whether the status is known. Never blocks."""
        ...

    def wait(self) -> None:
        """Wait for the status. Raises the error of the run."""
        ...


@runtime_checkable
class CommandStream(Protocol):
    """An ordered queue of commands of one device, used from one thread."""

    def record(self, name: str, command: Callable[[], object]) -> None:
        """Append a command to the next submission. `name` is for traces. A command that returns a Pending ends with it."""
        ...

    def submit(self) -> None:
        """Submit all recorded commands to the device. Never blocks."""
        ...

    def wait(self) -> None:
        """Wait until all submitted commands have finished. Raises the first error among them."""
        ...

    def submit_and_wait(self) -> None: ...


class SyncStream:
    """The stream of a device without a queue: `wait` runs the submitted commands in the caller's thread.

    If a command raises, `wait` raises its error and drops the commands submitted after it, because they depend on its results.
    """

    def __init__(self) -> None:
        self._recorded: list[tuple[str, Callable[[], object]]] = []
        self._submitted: deque[tuple[str, Callable[[], object]]] = deque()

    def record(self, name: str, command: Callable[[], object]) -> None:
        self._recorded.append((name, command))

    def submit(self) -> None:
        self._submitted.extend(self._recorded)
        self._recorded.clear()

    def wait(self) -> None:
        try:
            while self._submitted:
                name, command = self._submitted.popleft()
                note("launch", name)
                command()
        finally:
            self._submitted.clear()

    def submit_and_wait(self) -> None:
        self.submit()
        self.wait()


@record
class Launch:
    """One command of a device. `kind`: "launch", "copy_in" (host to device) or "copy_out". `nbytes`: size of a copy."""

    kind: str
    name: str
    nbytes: int = 0


_recording: ContextVar[list[Launch] | None] = ContextVar("rlx_recording", default=None)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Within the block, append every launch and transfer of this thread to the list."""
    launches: list[Launch] = []
    token = _recording.set(launches)
    try:
        yield launches
    finally:
        _recording.reset(token)


def note(kind: str, name: str, nbytes: int = 0) -> None:
    """Add a command to the list of `recording`, if it is active. Called by streams and buffers."""
    launches = _recording.get()
    if launches is not None:
        launches.append(Launch(kind, name, nbytes))
