"""A device whose memory the host does not see."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakSet

import numpy as np

from rlx.driver.device import Device


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

    def free(self, block: HiddenBlock) -> None:
        self.live.discard(block)

    def copy_in(self, block: HiddenBlock, source: np.ndarray) -> None:
        assert source.dtype == np.uint8 and source.size == block.nbytes
        block.hidden[...] = source
        self.copied_in += block.nbytes

    def copy_out(self, block: HiddenBlock, into: np.ndarray) -> None:
        assert into.dtype == np.uint8 and into.size == block.nbytes
        into[...] = block.hidden
        self.copied_out += block.nbytes

    def copy(self, goal: HiddenBlock, source: HiddenBlock) -> None:
        assert goal.nbytes == source.nbytes
        goal.hidden[...] = source.hidden

    def fill(self, block: HiddenBlock, byte: int) -> None:
        block.hidden[...] = byte

    def freeze(self, blocks: list[HiddenBlock]) -> None: ...

    def assign(self, goal: HiddenBlock, source: HiddenBlock) -> None:
        self.copy(goal, source)
