"""Host memory for the CPU backend: zeroed regions at fixed addresses, counted from allocation to release.

A region lives as long as anything refers to it or to a numpy view of it, so no view can outlive its bytes. Nothing is
allocated between two calls of `allocate`: a run that calls it zero times allocates nothing, which `allocations` shows.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import mmap
import threading
import weakref
from dataclasses import dataclass

import numpy as np

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
HUGE_PAGE = 2 << 20  # bytes; regions from this size on ask for huge pages (fewer TLB misses on packed weights)
POISON = 0xFF  # a byte that makes every float a NaN and every signed integer -1

_live: dict[int, int] = {}  # allocation number -> bytes, until the memory is given back
_numbers = itertools.count()
_made = [0, 0]  # allocations and bytes, ever
_counting = threading.Lock()


@dataclass(frozen=True, eq=False, slots=True)
class Region:
    """`data`: uint8[nbytes], aligned; it keeps the memory. `address` of its first byte stays the same for life."""

    data: np.ndarray
    address: int

    @property
    def nbytes(self) -> int:
        return self.data.size

    def view(self, offset: int, dims: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A writable row-major array over the bytes from `offset` on (a multiple of the item size)."""
        return self.data[offset : offset + math.prod(dims) * dtype.itemsize].view(dtype).reshape(dims)


def allocate(nbytes: int, alignment: int = ALIGNMENT) -> Region:
    """A region of `nbytes` (0 is fine), zeroed. `alignment`: a power of two.

    From 2 MiB on it is private anonymous memory on huge pages where the system grants them. MemoryError: there is none."""
    if nbytes >= HUGE_PAGE:
        alignment = max(alignment, HUGE_PAGE)
        whole = np.frombuffer(_pages(nbytes + alignment), np.uint8)
    else:
        whole = np.zeros(nbytes + alignment, np.uint8)
    start = -whole.ctypes.data % alignment
    data = whole[start : start + nbytes]
    number = next(_numbers)
    with _counting:
        _made[0], _made[1] = _made[0] + 1, _made[1] + nbytes
    _live[number] = nbytes
    weakref.finalize(whole, _live.pop, number, None).atexit = False
    return Region(data, whole.ctypes.data + start)


def allocations() -> dict[str, int]:
    """Memory of the CPU backend in this process, as asked for: `count` and `total_bytes` so far, `live_bytes` now."""
    return {"count": _made[0], "live_bytes": sum(list(_live.values())), "total_bytes": _made[1]}


def _pages(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    # private: a forked child gets its own copy (Python's default would share the pages, and forbid huge ones)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses the advice; small pages work as well
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
