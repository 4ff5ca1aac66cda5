"""The memory of one device: blocks at fixed addresses, copies into them, out of them and within, and snapshots of them.

One protocol for host and device memory. Buffers, arenas, weights, constants and states are blocks of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.driver import files
from rlx.driver.device import TEST_NAMES, Device
from rlx.errors import DeviceUnavailableError, OutOfMemoryError
from rlx.records import record

ALIGNMENT = 64  # bytes: a cache line, and the widest vector of a CPU


class Block(Protocol):
    """`nbytes` bytes at `address` of the device. `data`: the same bytes as a flat uint8 array of the host, None where it does not
    see them. The address never changes. The memory lives as long as a reference to the block, to a part of it, or to `data`."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data(self) -> np.ndarray | None: ...

    def part(self, offset: int, nbytes: int) -> Block:
        """The bytes [offset, offset + nbytes) as a block over the same memory."""
        ...


@runtime_checkable
class Memory(Protocol):
    """Supplied by the backend of a device. Where the device has a queue, copies come after the runs enqueued before them."""

    device: Device
    host_visible: bool  # whether blocks have `data`

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> Block:
        """A zeroed block of `nbytes` (0 is fine). `alignment`: a power of two. MemoryError: there is no room."""
        ...

    def allocate_all(self, sizes: Sequence[int]) -> Sequence[Block]:
        """A zeroed block of each size, which are used together. MemoryError: there is no room for all of them."""
        ...

    def free(self, block: Block) -> None:
        """Give the memory back now; the block is not used any more. Host memory that has views is freed with the last of them."""
        ...

    def copy_in(self, block: Block, source: np.ndarray) -> None:
        """Copy a flat uint8 array of the host, of the block's size, to the block. `source` may change as soon as this returns. It
        may be in a mapped file: see rlx.driver.files.copy, also for the error."""
        ...

    def copy_out(self, block: Block, into: np.ndarray) -> None:
        """Copy the block to a flat uint8 array of the host, of the block's size; finished when it returns."""
        ...

    def copy_out_later(self, block: Block, into: np.ndarray) -> Callable[[], None]:
        """As `copy_out`, of the block as the work queued so far leaves it. Finished when the function returned, which is to be
        called once, returns; it does not wait for work queued since."""
        ...

    def copy(self, goal: Block, source: Block) -> None:
        """Give `goal` the bytes of `source`, of the same size, on the device."""
        ...

    def fill(self, block: Block, byte: int) -> None:
        """Set every byte of the block."""
        ...

    def freeze(self, blocks: Sequence[Block]) -> None:
        """Make these blocks cheap to `assign` from: a snapshot. Contents and addresses stay. MemoryError: there is no room; the
        contents stay even so."""
        ...

    def assign(self, goal: Block, source: Block) -> None:
        """As `copy`; of a frozen block pages may be shared until either is written."""
        ...


@record(eq=False, slots=True)
class HostBlock:
    """Bytes in host memory."""

    data: np.ndarray

    @property
    def address(self) -> int:
        return self.data.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.data.size

    def part(self, offset: int, nbytes: int) -> HostBlock:
        return HostBlock(self.data[offset : offset + nbytes])


class HostMemory:
    """Memory of a device that computes where the host does, in numpy arrays. Snapshots are copies."""

    host_visible = True

    def __init__(self, device: Device) -> None:
        self.device = device

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> Any:
        return HostBlock(aligned_bytes(nbytes, alignment))

    def allocate_all(self, sizes: Sequence[int]) -> Sequence[Any]:
        return [self.allocate(nbytes) for nbytes in sizes]

    def free(self, block: Any) -> None:
        """Nothing to do: views of the block that the caller still holds keep it alive."""

    def copy_in(self, block: Any, source: np.ndarray) -> None:
        files.copy(block.data, source)

    def copy_out(self, block: Any, into: np.ndarray) -> None:
        np.copyto(into, block.data)

    def copy_out_later(self, block: Any, into: np.ndarray) -> Callable[[], None]:
        self.copy_out(block, into)
        return lambda: None

    def copy(self, goal: Any, source: Any) -> None:
        np.copyto(goal.data, source.data)

    def fill(self, block: Any, byte: int) -> None:
        block.data[...] = byte

    def freeze(self, blocks: Sequence[Any]) -> None:
        """Nothing is shared, so nothing needs to be prepared."""

    def assign(self, goal: Any, source: Any) -> None:
        self.copy(goal, source)


def aligned_bytes(nbytes: int, alignment: int = ALIGNMENT) -> np.ndarray:
    """Zeroed uint8 array. The address of its first byte is a multiple of `alignment`. OutOfMemoryError: there is no room."""
    try:
        raw = np.zeros(nbytes + alignment, np.uint8)
    except (MemoryError, ValueError) as e:  # ValueError: more than an array can have
        raise OutOfMemoryError(f"there is no room for {nbytes} bytes: {e}") from None
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


def bytes_of(array: np.ndarray) -> np.ndarray:
    """A C-contiguous array's bytes as a flat uint8 array that shares them."""
    return array.reshape(-1).view(np.uint8)


_HOST_NAMES = ("cpu", *TEST_NAMES)
# Memories by device. Those of host devices are made on demand; rlx.backends adds a discrete one when it loads its backend.
MEMORIES: dict[Device, Memory] = {}


def memory_of(device: Device | str) -> Memory:
    """The memory of a device. DeviceUnavailableError where no backend has supplied one."""
    device = Device.parse(device)
    if device.name in _HOST_NAMES and device not in MEMORIES:
        MEMORIES[device] = HostMemory(device)
    if device not in MEMORIES:
        usable = ", ".join(map(str, dict.fromkeys([Device.CPU, *MEMORIES])))
        raise DeviceUnavailableError(f"{device} has no memory here: no backend for it is loaded. Usable: {usable}")
    return MEMORIES[device]


__all__ = ["ALIGNMENT", "MEMORIES", "Block", "HostBlock", "HostMemory", "Memory", "aligned_bytes", "bytes_of", "memory_of"]
