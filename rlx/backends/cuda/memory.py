"""The memory of a GPU: blocks, and copies that its stream orders."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.backends.cuda.gpu import Gpu, gpu
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore
from rlx.records import record


@record(eq=False, slots=True)
class DeviceBlock:
    """Memory of a GPU (rlx.driver.memory.Block). `owner` frees it with its last part."""

    address: int
    nbytes: int
    owner: Any  # its `free` does so at once

    data = None  # the host does not see it

    def part(self, offset: int, nbytes: int) -> DeviceBlock:
        return DeviceBlock(self.address + offset, nbytes, self.owner)


class _Owned:
    """One allocation, freed once; not at the end of the interpreter, when the driver frees everything."""

    def __init__(self, of: Gpu, address: int, nbytes: int) -> None:
        self.free = weakref.finalize(self, of.free, address, nbytes)
        self.free.atexit = False


class CudaMemory:
    """Memory protocol (rlx.driver.memory). Copies and kernels are ordered by one stream; snapshots are copies on the device."""

    host_visible = False

    def __init__(self, index: int) -> None:
        self.device, self.gpu = Device("cuda", index), gpu(index)
        self._watches: weakref.WeakKeyDictionary[HandleStore, Any] = weakref.WeakKeyDictionary()

    def allocate(self, nbytes: int, alignment: int = 64) -> DeviceBlock:
        address = self.gpu.allocate(nbytes)
        return DeviceBlock(address, nbytes, _Owned(self.gpu, address, nbytes))

    def allocate_all(self, sizes: Sequence[int]) -> list[DeviceBlock]:
        return [self.allocate(nbytes) for nbytes in sizes]

    def free(self, block: Any) -> None:
        block.owner.free()

    def copy_in(self, block: Any, source: np.ndarray) -> None:
        self.gpu.copy_in(block.address, source)

    def copy_out(self, block: Any, into: np.ndarray) -> None:
        self.gpu.copy_out(into, block.address)

    def copy_out_later(self, block: Any, into: np.ndarray) -> Callable[[], None]:
        return self.gpu.copy_out_later(into, block.address)

    def copy(self, goal: Any, source: Any) -> None:
        self.gpu.copy(goal.address, source.address, goal.nbytes)

    def fill(self, block: Any, byte: int) -> None:
        self.gpu.fill(block.address, byte, block.nbytes)

    def watch(self, store: HandleStore, make: Callable[[CudaMemory], Any]) -> Any:
        """The account of failures (rlx.backends.cuda.runs.Watch) of the runs on a store."""
        if store not in self._watches:
            self._watches[store] = make(self)
        return self._watches[store]

    def freeze(self, blocks: Sequence[Any]) -> None:
        """Nothing is shared, so nothing needs to be prepared."""

    def assign(self, goal: Any, source: Any) -> None:
        self.copy(goal, source)


__all__ = ["CudaMemory", "DeviceBlock"]
