"""GPU memory that grows and shrinks at its end, at addresses that do not change."""

from __future__ import annotations

import threading
import weakref

from rlx.backends.cuda.gpu import Gpu, check
from rlx.backends.cuda.memory import DeviceBlock

DOING = "changing the memory of experts"


class Region:
    """Addresses for `nbytes`, of which the first `held` are memory. It comes in pieces of at least `piece` bytes; they are not
    cleared."""

    def __init__(self, gpu: Gpu, nbytes: int, piece: int) -> None:
        d, self.gpu = gpu.driver, gpu
        gpu.use()
        self._kind = d.CUmemAllocationProp()
        self._kind.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = d.CUmemAccessDesc()
        self._access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for place in (self._kind.location, self._access.location):
            place.type, place.id = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, gpu.index
        smallest = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(check(d.cuMemGetAllocationGranularity(self._kind, smallest), DOING))
        self.piece = -(-max(1, piece) // unit) * unit
        self.size = -(-max(1, nbytes) // self.piece) * self.piece
        self.address = int(check(d.cuMemAddressReserve(self.size, 0, 0, 0), DOING))
        self._pieces, self._lock = list[int](), threading.Lock()  # their addresses
        self.free = weakref.finalize(self, _free, gpu, self.address, self.size, self.piece, self._pieces)
        self.free.atexit = False

    def block(self, nbytes: int) -> DeviceBlock:
        """The first `nbytes`, whether they are memory or not."""
        return DeviceBlock(self.address, nbytes, self)

    @property
    def held(self) -> int:
        return len(self._pieces) * self.piece

    def hold(self, nbytes: int) -> None:
        """Have at least `nbytes`. OutOfMemoryError: there is no room."""
        with self._lock:
            self.gpu.use()
            while self.held < nbytes:
                self._grow()

    def _grow(self) -> None:
        d, at = self.gpu.driver, self.address + self.held
        made = check(d.cuMemCreate(self.piece, self._kind, 0), f"cuda:{self.gpu.index}: allocating {self.piece} bytes")
        try:
            check(d.cuMemMap(at, self.piece, 0, made, 0), DOING)
        finally:
            d.cuMemRelease(made)  # mapped memory stays alive
        self._pieces.append(at)
        self.gpu.account(self.piece)
        try:
            check(d.cuMemSetAccess(at, self.piece, [self._access], 1), DOING)
        except BaseException:
            _unmap(self.gpu, self._pieces.pop(), self.piece)
            raise

    def cut(self, nbytes: int) -> None:
        """Give back all pieces behind `nbytes`. Nothing that is queued uses them."""
        with self._lock:
            while self.held - self.piece >= nbytes and self._pieces:
                _unmap(self.gpu, self._pieces.pop(), self.piece)


def _unmap(gpu: Gpu, address: int, piece: int) -> None:
    check(gpu.driver.cuMemUnmap(address, piece), DOING)
    gpu.account(-piece)


def _free(gpu: Gpu, address: int, size: int, piece: int, pieces: list[int]) -> None:
    with gpu.at_the_end(wait=True):  # for launches that read it
        for at in pieces:
            _unmap(gpu, at, piece)
        check(gpu.driver.cuMemAddressFree(address, size), DOING)


__all__ = ["Region"]
