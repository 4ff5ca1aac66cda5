"""Experts in two tiers on a GPU (rlx.driver.slots): slots in its memory, and a store in pinned host memory, which kernels read
through the bus."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx.backends.cuda.code import CudaCode
from rlx.backends.cuda.gpu import Functions, check
from rlx.backends.cuda.memory import CudaMemory
from rlx.backends.cuda.regions import Region
from rlx.driver import files
from rlx.driver.expert_source import ExpertRows
from rlx.driver.memory import Block, bytes_of
from rlx.driver.slots import FAR, SlotPart, Slots, SlotTiers
from rlx.ir.program import BufferDecl, Step


class Packer:
    """The kernel that packs one expert on the GPU, and its memory."""

    def __init__(self, memory: CudaMemory, functions: Functions, code: CudaCode, step: Step, into: int, rows: int) -> None:
        """`into`, `rows`: bytes of a packed expert, and of its rows."""
        self._memory, self._functions, self._code = memory, functions, code
        self._packed, self._rows, self._lock = memory.allocate(into), memory.allocate(rows), threading.Lock()
        places = (self._packed if b.writable else self._rows for b in step.kernel.buffers)
        self._arguments = [*(place.address for place in places), *(0 for _ in code.more[0])]

    def __call__(self, rows: np.ndarray, take: Callable[[int], None]) -> None:
        """`take` queues copies from where the packed expert is."""
        code, gpu = self._code, self._memory.gpu
        with self._lock:
            self._memory.copy_in(self._rows, rows)
            gpu.launch(self._functions[code.name], code.blocks, code.threads, code.shared, self._arguments)
            take(self._packed.address)
            gpu.wait()


class CudaPart(SlotPart):
    """A part in the memory of a GPU."""

    def __init__(
        self, region: Region, name: str, param: BufferDecl, slots: CudaSlots, nbytes: int, packer: Packer | None
    ) -> None:
        self.region, self.name, self.param, self.nbytes = region, name, param.name, nbytes
        self.store: np.ndarray | None = None
        self.slots, self._gpu, self._packer, self.experts = slots, region.gpu, packer, len(slots.of)
        self._rows = ExpertRows.of(param, self.experts)

    def fill(self, expert: int, array: np.ndarray) -> None:
        self._rows.check(array)
        if self._packer is None:
            return self.put(expert, bytes_of(array))
        slot, stream = self._begin(expert), self._gpu.use()

        def take(source: int) -> None:
            if self.store is not None:
                self._gpu.enqueue("cuMemcpyDtoHAsync", self.held(expert).ctypes.data, source, self.nbytes, stream)
            if slot != FAR:
                self._gpu.enqueue("cuMemcpyDtoDAsync", self._address(slot), source, self.nbytes, stream)

        return self._packer(bytes_of(array), take)

    def put(self, expert: int, packed: np.ndarray) -> None:
        """Set one expert to its bytes in the buffer."""
        slot = self._begin(expert)
        if self.store is None:
            return self._gpu.copy_in(self._address(slot), packed)
        files.copy(self.held(expert), packed)
        return self._copy(expert, slot, self._gpu.use()) if slot != FAR else None

    def _begin(self, expert: int) -> int:
        """The slot of an expert that is about to be written."""
        slot = int(self.slots.of[expert])
        self.region.hold((slot + 1) * self.nbytes)
        if self.store is not None:
            self._gpu.wait()  # runs that are queued may read the store
        return slot

    def _address(self, slot: int) -> int:
        return self.region.address + slot * self.nbytes

    def _copy(self, expert: int, slot: int, stream: Any) -> None:
        self._gpu.enqueue("cuMemcpyHtoDAsync", self._address(slot), self.held(expert).ctypes.data, self.nbytes, stream)

    def held(self, expert: int) -> np.ndarray:
        assert self.store is not None
        return self.store[expert * self.nbytes : (expert + 1) * self.nbytes]

    def begin(self) -> None:
        gpu, size = self._gpu, self.experts * self.nbytes
        self.store = gpu.pinned(size, clear=False)
        if there := min(size, self.region.held):  # less than all, if weights have been set in part
            gpu.enqueue("cuMemcpyDtoHAsync", self.store.ctypes.data, self.region.address, there, gpu.use())
            gpu.wait()

    def bring(self, expert: int, slot: int) -> None:
        self.region.hold((slot + 1) * self.nbytes)
        self._copy(expert, slot, self.slots.copies(slot))

    def move(self, slot: int, to: int) -> None:
        if self.region.held >= (slot + 1) * self.nbytes:  # else no weights have been set
            self._gpu.copy(self._address(to), self._address(slot), self.nbytes)

    def cut(self, slots: int) -> None:
        self.region.cut(slots * self.nbytes)


class CudaSlots(Slots):
    def __init__(self, memory: CudaMemory, experts: int) -> None:
        super().__init__(experts)
        self._memory, self._gpu = memory, memory.gpu
        self.table: Block | None = None
        self.wanted = self.of  # once there is a table, in pinned memory: the kernel that logs a router within a run copies it
        self._left = dict[int, int]()  # by slot: an event
        weakref.finalize(self, self._gpu.destroy, self._left.values()).atexit = False

    def make_table(self) -> None:
        self.wanted = self._gpu.pinned(self.of.nbytes).view(np.int32)
        self.wanted[:] = self.of
        self.table = self._memory.allocate(self.of.nbytes)
        self._memory.copy_in(self.table, bytes_of(self.of))

    def tell(self, expert: int) -> None:
        if self.table is not None:
            self.wanted[expert] = self.of[expert]
            place, value = self.table.address + 4 * expert, int(self.of[expert]) & 0xFFFFFFFF
            check(self._gpu.driver.cuMemsetD32Async(place, value, 1, self._gpu.use()), "placing an expert")

    def left(self, slot: int) -> None:
        stream = self._gpu.use()
        self._left[slot] = self._left.get(slot) or self._gpu.event()
        self._gpu.record(self._left[slot], stream)

    def ready(self, slot: int) -> bool:
        return slot not in self._left or self._gpu.has_passed(self._left[slot])

    def copies(self, slot: int) -> Any:
        """The stream of copies to a slot, which waits for runs that may still read the previous expert there."""
        self._gpu.use()
        if slot in self._left:
            self._gpu.await_event(self._left[slot], self._gpu.beside)
        return self._gpu.beside


class CudaTiers(SlotTiers):
    def __init__(self, memory: CudaMemory, versions: Mapping[str, int]) -> None:
        super().__init__(versions)
        self.memory = memory

    def make_slots(self, experts: int) -> CudaSlots:
        return CudaSlots(self.memory, experts)

    def wait(self, for_copies: bool) -> None:
        gpu = self.memory.gpu
        stream = gpu.use()
        check(gpu.driver.cuStreamSynchronize(gpu.beside if for_copies else stream), "waiting for experts")

    def until(self, reached: Callable[[], bool]) -> None:
        self.memory.gpu.until(reached)

    def copying(self, nbytes: int, near: bool) -> Callable[[], object]:
        gpu, goal = self.memory.gpu, self.memory.allocate(nbytes)
        source: Any = self.memory.allocate(nbytes) if near else gpu.pinned(nbytes)
        start = source.address if near else source.ctypes.data
        copied = "cuMemcpyDtoDAsync" if near else "cuMemcpyHtoDAsync", goal.address, start, nbytes, gpu.use()
        return lambda keep=(goal, source): (gpu.enqueue(*copied), gpu.wait())


__all__ = ["CudaPart", "CudaSlots", "CudaTiers", "Packer"]
