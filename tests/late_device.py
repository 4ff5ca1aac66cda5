"""A device with memory that the host does not see, and with a queue of its own: nothing is executed before somebody waits for it.

It runs programs as the reference backend does. `installed("late", "late_device:LateBackend")` (device_conformance) adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakSet

import numpy as np

from rlx.backends.ref.backend import RefBackend
from rlx.backends.ref.interpret import run_kernel
from rlx.backends.shared.stepwise import StepwiseExecutable
from rlx.driver.backend import KernelTexts
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.driver.stream import SyncStream
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import RlxError
from rlx.ir.target import Target


@dataclass(frozen=True, eq=False)
class HiddenBlock:
    """Bytes that only HiddenMemory looks at. Its addresses are no addresses of the host."""

    address: int
    hidden: np.ndarray
    data: None = None

    @property
    def nbytes(self) -> int:
        return self.hidden.size

    def part(self, offset: int, nbytes: int) -> HiddenBlock:
        return HiddenBlock(self.address + offset, self.hidden[offset : offset + nbytes])


@dataclass
class HiddenMemory:
    """Memory protocol (rlx.driver.memory). `live`: allocations that were not freed. `copied_in`, `copied_out`: bytes so far."""

    device: Device
    host_visible: bool = False
    live: WeakSet[HiddenBlock] = field(default_factory=WeakSet)
    copied_in: int = 0
    copied_out: int = 0
    _addresses: Iterator[int] = field(default_factory=lambda: count(1 << 20, 1 << 20))

    def allocate(self, nbytes: int, alignment: int = 64) -> HiddenBlock:
        block = HiddenBlock(next(self._addresses), np.zeros(nbytes, np.uint8))
        self.live.add(block)
        return block

    def allocate_all(self, sizes: list[int]) -> list[HiddenBlock]:
        return [self.allocate(nbytes) for nbytes in sizes]

    def free(self, block: HiddenBlock) -> None:
        self.live.discard(block)

    def settle(self) -> None:
        """Called before each use of memory by the host."""

    def copy_in(self, block: HiddenBlock, source: np.ndarray) -> None:
        self.settle()
        assert source.dtype == np.uint8 and source.size == block.nbytes
        block.hidden[...] = source
        self.copied_in += block.nbytes

    def copy_out(self, block: HiddenBlock, into: np.ndarray) -> None:
        self.settle()
        assert into.dtype == np.uint8 and into.size == block.nbytes
        into[...] = block.hidden
        self.copied_out += block.nbytes

    def copy_out_later(self, block: HiddenBlock, into: np.ndarray) -> Callable[[], None]:
        self.copy_out(block, into)
        return lambda: None

    def copy(self, goal: HiddenBlock, source: HiddenBlock) -> None:
        self.settle()
        assert goal.nbytes == source.nbytes
        goal.hidden[...] = source.hidden

    def fill(self, block: HiddenBlock, byte: int) -> None:
        self.settle()
        block.hidden[...] = byte

    def freeze(self, blocks: list[HiddenBlock]) -> None: ...

    def assign(self, goal: HiddenBlock, source: HiddenBlock) -> None:
        self.copy(goal, source)


class LateMemory(HiddenMemory):
    """The memory and the queue of the device. `stream` runs commands only when the host waits; `failed`: stores on which a run
    has failed, until the host has been told."""

    def __init__(self) -> None:
        super().__init__(Device("ref"))
        self.stream, self.busy, self.failed = SyncStream(), False, set[HandleStore]()

    def enqueue(self, command: Callable[[], object]) -> None:
        self.stream.record("late", command)
        self.stream.submit()

    def copy_out_later(self, block: HiddenBlock, into: np.ndarray) -> Callable[[], None]:
        """In its place among the queued commands."""
        self.enqueue(lambda: self.copy_out(block, into))
        return self.settle

    def settle(self) -> None:
        if not self.busy:  # else a command uses the memory
            self.busy = True
            try:
                self.stream.wait()
            finally:
                self.busy = False


MEMORY = LateMemory()


class LateRun:
    """Pending protocol (rlx.driver.stream)."""

    def __init__(self, run: Callable[[], None], store: HandleStore) -> None:
        self._run, self._store, self._done = run, store, False
        self._error: Exception | None = None
        self._first = False  # whether it is the first to fail
        MEMORY.enqueue(self._execute)

    def _execute(self) -> None:
        self._done = True
        if self._store in MEMORY.failed:
            self._error = RlxError("cancelled")
            return
        try:
            self._run()
        except RlxError as e:
            self._error, self._first = e, True
            MEMORY.failed.add(self._store)

    def done(self) -> bool:
        return self._done

    def wait(self) -> None:
        MEMORY.settle()
        if self._first:
            MEMORY.enqueue(lambda: MEMORY.failed.discard(self._store))  # behind the runs that it cancels
        if self._error is not None:
            raise self._error


class LateExecutable(StepwiseExecutable):
    asynchronous = True

    def run(self) -> LateRun:
        return LateRun(super().run, self.handles)

    def write(self, buffer: int, array: np.ndarray) -> None:
        kept = array.copy()
        MEMORY.enqueue(lambda: super(LateExecutable, self).write(buffer, kept))

    def copy(self, goal: int, source: int) -> None:
        MEMORY.enqueue(lambda: None if self.handles in MEMORY.failed else super(LateExecutable, self).copy(goal, source))

    def read_later(self, buffers: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        found: list[np.ndarray] = []
        MEMORY.enqueue(lambda: found.extend(map(self.read, buffers)))
        return lambda: MEMORY.settle() or found

    def prepare(self, steps: Sequence[int], given: Mapping[int, np.ndarray] | None = None, alone: bool = False) -> None:
        MEMORY.settle()
        super().prepare(steps, given, alone)

    def run_steps(self) -> None:
        MEMORY.settle()
        super().run_steps()

    def data(self, buffer: int) -> np.ndarray:
        return self.block(buffer).hidden  # type: ignore[attr-defined]


class LateBackend(RefBackend):
    name = "late"

    def probe(self) -> dict[str, str | None]:
        return {"late:0": None}

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        return super().target(0, threads)

    def load(
        self, artifact: KernelTexts, params: ParamStore | None = None, index: int = 0, handles: HandleStore | None = None,
        transport: SymmetricTransport | None = None,
    ) -> LateExecutable:  # fmt: skip
        return LateExecutable(artifact.program, run_kernel, params, handles, transport, memory=MEMORY)
