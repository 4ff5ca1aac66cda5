"""The memory of one device: blocks at fixed addresses, copies into them, out of them and within, and snapshots of them.

One protocol for host and device memory. Buffers, states and the regions of a loaded program are blocks of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.driver.arena import aligned_bytes
from rlx.driver.device import TEST_NAMES, Device
from rlx.errors import DeviceUnavailableError

ALIGNMENT = 64  # bytes: a cache line, and the widest vector of a CPU


class Block(Protocol):
    """`nbytes` bytes at `address` of the device, for the block's life. `data`: the same bytes as a flat uint8 array of the host,
    None where it does not see them."""

    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def data(self) -> np.ndarray | None: ...


@runtime_checkable
class Memory(Protocol):
    """Supplied by the backend of a device."""

    device: Device
    host_visible: bool  # whether blocks have `data`

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> Block:
        """A zeroed block of `nbytes` (0 is fine). `alignment`: a power of two. MemoryError: there is no room."""
        ...

    def free(self, block: Block) -> None:
        """Give the memory back; the block is not used any more. Host memory goes with the last view of it instead."""
        ...

    def copy_in(self, block: Block, source: np.ndarray, offset: int = 0) -> None:
        """Copy a flat uint8 array of the host to the block, from byte `offset` on; finished when it returns."""
        ...

    def copy_out(self, block: Block, into: np.ndarray, offset: int = 0) -> None:
        """Fill a flat uint8 array of the host from byte `offset` of the block on; finished when it returns."""
        ...

    def copy(self, goal: Block, source: Block) -> None:
        """Give `goal` the bytes of `source`, of the same size, on the device."""
        ...

    def freeze(self, blocks: Sequence[Block]) -> None:
        """Make these blocks cheap to `assign` from: a snapshot. Contents and addresses stay. MemoryError: there is no room; the
        contents stay even so."""
        ...

    def assign(self, goal: Block, source: Block) -> None:
        """As `copy`; of a frozen block pages may be shared until either is written."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class HostBlock:
    """Bytes in host memory; they live as long as the block or a view of `data` does."""

    data: np.ndarray

    @property
    def address(self) -> int:
        return self.data.ctypes.data

    @property
    def nbytes(self) -> int:
        return self.data.size


class HostMemory:
    """Memory of a device that computes where the host does, in numpy arrays. Snapshots are copies."""

    host_visible = True

    def __init__(self, device: Device) -> None:
        self.device = device

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> HostBlock:
        return HostBlock(aligned_bytes(nbytes, alignment))

    def free(self, block: Any) -> None:
        """Nothing to do: views of the block that the caller still holds keep it alive."""

    def copy_in(self, block: Any, source: np.ndarray, offset: int = 0) -> None:
        block.data[offset : offset + source.size] = source

    def copy_out(self, block: Any, into: np.ndarray, offset: int = 0) -> None:
        into[:] = block.data[offset : offset + into.size]

    def copy(self, goal: Any, source: Any) -> None:
        np.copyto(goal.data, source.data)

    def freeze(self, blocks: Sequence[Any]) -> None:
        """Nothing is shared, so nothing needs to be prepared."""

    def assign(self, goal: Any, source: Any) -> None:
        self.copy(goal, source)


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


__all__ = ["ALIGNMENT", "MEMORIES", "Block", "HostBlock", "HostMemory", "Memory", "memory_of"]
