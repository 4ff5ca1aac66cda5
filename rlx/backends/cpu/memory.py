"""Host memory for the CPU backend: zeroed regions at fixed addresses, counted from allocation to release.

A region lives as long as there is a reference to it or to a numpy view of it, so no view can outlive its bytes. All memory comes
from `allocate`: a run that does not call it allocates nothing, which `allocations` shows.

Regions can share bytes until they are written, page by page (`freeze`, `assign`): they map one anonymous file privately,
and the operating system copies a page at the first write to it.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from rlx.driver.device import Device
from rlx.driver.memory import ALIGNMENT, HostMemory
from rlx.forks import Lock
from rlx.records import record

HUGE_PAGE = 2 << 20  # bytes; regions from this size on ask for huge pages (fewer TLB misses on packed weights)
PAGE = mmap.PAGESIZE
OWN_PAGES = 1 << 16  # bytes; regions from this size on have pages of their own, which can be shared
POISON = 0xFF  # a byte that makes every float a NaN and every signed integer -1
MAP_FIXED = 0x10  # value on Linux; not used elsewhere

_live: dict[int, Pages] = {}  # allocation number -> its pages, until the memory is freed
_numbers = itertools.count()
_made = [0, 0]  # total allocations and bytes
_counting = Lock()


class File:
    """Bytes shared copy-on-write by regions: written once, then only mapped; closed with the last region that maps it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.number = os.memfd_create("rlx")
        weakref.finalize(self, os.close, self.number).atexit = False
        os.ftruncate(self.number, nbytes)
        _count(nbytes)


@record(eq=False, slots=True, frozen=False)
class Pages:
    """The location of a region's bytes: its own memory, or (`file`) a file from `offset` on, except for pages written since."""

    address: int
    nbytes: int
    file: File | None = None
    offset: int = 0


@record(eq=False, slots=True)
class Region:
    """`data`: uint8[nbytes], aligned; it keeps the memory alive. `address`: of its first byte; never changes."""

    data: np.ndarray
    address: int
    pages: Pages

    @property
    def nbytes(self) -> int:
        return self.data.size

    def part(self, offset: int, nbytes: int) -> Region:
        return Region(self.data[offset : offset + nbytes], self.address + offset, self.pages)


def allocate(nbytes: int, alignment: int = ALIGNMENT) -> Region:
    """A region of `nbytes` (0 is fine), zeroed. `alignment`: a power of two.

    From 2 MiB on it is private anonymous memory, on huge pages if the system grants them. MemoryError: out of memory."""
    if nbytes >= OWN_PAGES:
        alignment = max(alignment, HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE)
        whole = np.frombuffer(_pages(nbytes + alignment), np.uint8)
    else:
        whole = np.zeros(nbytes + alignment, np.uint8)
    return _region(whole, -whole.ctypes.data % alignment, nbytes)


def allocate_all(sizes: Sequence[int]) -> list[Region]:
    """Regions that are read together, each on pages of its own: together they get huge pages that one of them would not."""
    starts = [0, *itertools.accumulate(map(_whole_pages, sizes))]
    if starts[-1] < HUGE_PAGE:
        return [allocate(nbytes) for nbytes in sizes]
    whole = np.frombuffer(_pages(starts[-1] + HUGE_PAGE), np.uint8)
    first = -whole.ctypes.data % HUGE_PAGE
    return [_region(whole, first + start, nbytes) for start, nbytes in zip(starts, sizes)]


def _region(whole: np.ndarray, start: int, nbytes: int) -> Region:
    pages = Pages(whole.ctypes.data + start, nbytes)
    number = next(_numbers)
    _count(nbytes)
    _live[number] = pages
    weakref.finalize(whole, _live.pop, number, None).atexit = False
    return Region(whole[start : start + nbytes], pages.address, pages)


def allocations() -> dict[str, int]:
    """Memory of the CPU backend in this process, in requested bytes: `count` and `total_bytes` so far, `live_bytes` now.

    For regions that share a file, the file counts once, plus the pages that each region has written since."""
    live = list(_live.values())
    files = {p.file: p.file.nbytes for p in live if p.file}
    own = sum(p.nbytes if p.file is None else len(_written(p)) * PAGE for p in live)
    return {"count": _made[0], "live_bytes": own + sum(files.values()), "total_bytes": _made[1]}


def holds(address: int, nbytes: int) -> bool:
    """Whether any of these bytes belong to a region."""
    return any(address < p.address + p.nbytes and p.address < address + nbytes for p in list(_live.values()))


def release(address: int, nbytes: int) -> None:
    """Give the whole pages among these bytes back to the system. They are zero then, or as in the file that is mapped there."""
    first, end = -(-address // PAGE) * PAGE, (address + nbytes) // PAGE * PAGE
    if first < end:
        _advise(first, end - first, mmap.MADV_DONTNEED)


def in_small_pages(address: int, nbytes: int) -> None:
    """No huge pages for these bytes from now on: they would make bytes resident beside those that are written."""
    first = address // PAGE * PAGE
    with contextlib.suppress(OSError):  # a system without huge pages rejects the advice
        _advise(first, address + nbytes - first, getattr(mmap, "MADV_NOHUGEPAGE", 15))


def _advise(address: int, nbytes: int, advice: int) -> None:
    if _madvise()(address, nbytes, advice):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


@lru_cache(1)
def _madvise() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


def resident() -> int:
    """Resident bytes of this process; 0 if the system does not report them."""
    try:
        with open("/proc/self/statm") as f:
            return int(f.read().split()[1]) * PAGE
    except OSError:
        return 0


def _count(nbytes: int) -> None:
    with _counting:
        _made[0], _made[1] = _made[0] + 1, _made[1] + nbytes


# -- sharing until written


def freeze(regions: Sequence[Region]) -> None:
    """Make these regions cheap to `assign` from: their bytes move to a file, which they map in place. Contents and
    addresses stay the same. Regions that are in a file already, and have written little since, stay there.

    MemoryError: the system refuses the memory; the contents are still intact."""
    changed = [r for r in regions if r.nbytes >= OWN_PAGES and _shares() and _is_worn(r.pages)]
    if not changed:
        return
    with _refused_is_memory_error():
        starts = [0, *itertools.accumulate(_whole_pages(r.nbytes) for r in changed)]
        file = File(starts[-1])
        for region, start in zip(changed, starts):
            for first, end in _runs(_written(region.pages)) if region.pages.file is None else [(0, region.nbytes)]:
                end = min(end, region.nbytes)
                while first < end:  # one call writes 2 GiB at most
                    first += os.pwrite(file.number, region.data[first:end].data, start + first)
        for region, start in zip(changed, starts):
            _map(region.pages, file, start)


def assign(goal: Region, source: Region) -> None:
    """Give `goal` the bytes of `source`, of the same size. If `source` is frozen, only pages written since are copied."""
    pages = source.pages
    if pages.file is None or goal.nbytes < OWN_PAGES:
        np.copyto(goal.data, source.data)
    else:
        with _refused_is_memory_error():
            _map(goal.pages, pages.file, pages.offset)
        for first, end in _runs(_written(pages)):
            goal.data[first:end] = source.data[first:end]


@lru_cache(1)
def _shares() -> bool:
    """Whether this system supports all that sharing needs; tested once, on two pages."""
    if not hasattr(os, "memfd_create"):
        return False
    try:
        file, region = File(2 * PAGE), allocate(OWN_PAGES + 2 * PAGE)
        trial = Pages(region.address, 2 * PAGE)
        _map(trial, file, 0)
        unwritten = _written(trial).tolist()
        region.data[PAGE] = 1
        return not unwritten and _written(trial).tolist() == [1] and not region.data[0]
    except (OSError, AttributeError):
        return False


def _is_worn(pages: Pages) -> bool:
    """Whether so much was written since the freeze that copying it for each fork costs more than freezing again."""
    return pages.file is None or len(_written(pages)) * PAGE * 4 > pages.nbytes


def _written(pages: Pages) -> np.ndarray:
    """Numbers of the private pages: in a file mapping, those written since it was mapped; otherwise all that were touched.

    See pagemap in the Linux kernel's documentation: bits 62 and 63: the page is swapped or present; 61: it belongs to a file."""
    fd = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        flags = np.frombuffer(os.pread(fd, _whole_pages(pages.nbytes) // PAGE * 8, pages.address // PAGE * 8), np.uint64)
    finally:
        os.close(fd)
    return np.flatnonzero((flags >= 1 << 62) & (flags & (1 << 61) == 0))


def _runs(pages: np.ndarray) -> Iterable[tuple[int, int]]:
    """Ranges of consecutive pages as (first byte, end)."""
    gaps = np.flatnonzero(np.diff(pages) > 1)
    firsts, lasts = np.append(pages[:1], pages[gaps + 1]), np.append(pages[gaps], pages[-1:])
    return zip((firsts * PAGE).tolist(), ((lasts + 1) * PAGE).tolist())


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _map(pages: Pages, file: File, offset: int) -> None:
    """Map the file privately over the region's pages. Python's mmap object still owns the address range."""
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED
    if _mmap()(pages.address, _whole_pages(pages.nbytes), protection, flags, file.number, offset) != pages.address:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pages.file, pages.offset = file, offset


@lru_cache(1)
def _mmap() -> Callable[..., int]:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    return function


@contextlib.contextmanager
def _refused_is_memory_error() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise MemoryError(f"the system has no memory or mappings left for states to share: {e}") from e


def _pages(nbytes: int) -> mmap.mmap:
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    # private: a forked child gets its own copy (Python's default would share the pages, and forbid huge ones)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and nbytes >= HUGE_PAGE:
        with contextlib.suppress(OSError):  # a system without huge pages rejects the advice; small pages work as well
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


class CpuMemory(HostMemory):
    """rlx.driver.memory.Memory in these regions: snapshots share pages until they are written."""

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> Region:
        return allocate(nbytes, alignment)

    def allocate_all(self, sizes: Sequence[int]) -> list[Region]:
        return allocate_all(sizes)

    def freeze(self, blocks: Sequence[Any]) -> None:
        freeze(blocks)

    def assign(self, goal: Any, source: Any) -> None:
        assign(goal, source)


MEMORY = CpuMemory(Device.CPU)
