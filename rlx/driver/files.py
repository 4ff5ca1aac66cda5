"""Memory-mapped files, and copies out of them that do not touch the mapping.

If another program truncates a mapped file, a process that touches a missing page is killed by SIGBUS, but read(2) only returns
fewer bytes. read(2) also leaves no page of the file resident in this process. Therefore copies out of arrays over mapped files
use read(2), also for views with strides. Arrays that are only packed are first read into memory if they have at most SMALL bytes.
Larger ones would pass through memory twice, so they are packed from the mapping. This is the one limitation: `check` looks at
the file before, but truncating it while such an array is packed kills the process.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.errors import CorruptFileError
from rlx.records import record

if TYPE_CHECKING:
    from pathlib import Path

READ = 1 << 30  # bytes per read(2); Linux reads at most 2 GiB
SMALL = 8 << 20  # bytes whose copy stays in a cache until it is packed


@record
class Mapped:
    """A file whose bytes from `offset` on are mapped. `stamp`: identity, size and time of its last change when it was opened.
    `private`: what this process has written to the mapping is not in the file."""

    path: Path
    number: int  # file descriptor
    nbytes: int
    offset: int
    stamp: tuple[int, ...]
    private: bool = False


_mapped: dict[int, Mapped] = {}  # address -> the file mapped there, until the last reference to the mapping is gone


def map_file(path: Path) -> memoryview:
    """The bytes of a non-empty file, read-only."""
    with path.open("rb") as file:
        mapped = np.memmap(file, np.uint8, mode="r")
        register(mapped, path, file.fileno())
    return mapped.data


def register(mapped: np.ndarray, path: Path, number: int, offset: int = 0, private: bool = False) -> None:
    """Record that this array is a mapping of a file from `offset` on, until the last reference to the array is gone."""
    _mapped[mapped.ctypes.data] = Mapped(path, os.dup(number), mapped.nbytes, offset, _stamp(os.fstat(number)), private)
    weakref.finalize(mapped, _forget, mapped.ctypes.data).atexit = False


def _stamp(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _forget(address: int) -> None:
    os.close(_mapped.pop(address).number)


def mapping(array: np.ndarray, private: bool = False) -> tuple[Mapped, int, int] | None:
    """The mapped file that contains an array, the file offset of the array's lowest byte, and the bytes that its elements span.
    None: the array is not in a mapped file. `private`: also of those that this process may have written to."""
    if not _mapped or not array.size or not hasattr(os, "preadv"):
        return None
    reach = [(n - 1) * step for n, step in zip(array.shape, array.strides)]
    start = array.ctypes.data + sum(min(r, 0) for r in reach)
    nbytes = sum(map(abs, reach)) + array.itemsize
    for address, m in list(_mapped.items()):
        if address <= start and start + nbytes <= address + m.nbytes and (private or not m.private):
            return m, start - address + m.offset, nbytes
    return None


def check(array: np.ndarray) -> None:
    """CorruptFileError: the array is in a mapped file that has been truncated before the array's end."""
    if (place := mapping(array)) is not None and os.fstat(place[0].number).st_size < place[1] + place[2]:
        raise CorruptFileError(f"{place[0].path} was truncated after it was opened; load the model again")


def check_same(file: Mapped) -> None:
    """CorruptFileError: a mapped file is no longer what it was when it was opened. Stricter than `check`: for files that are read
    for as long as a model runs."""
    try:
        now = os.fstat(file.number)
        same = _stamp(os.stat(file.path)) == _stamp(now) == file.stamp
        how = "truncated" if now.st_size < file.stamp[2] else "changed or replaced"
    except OSError as e:
        same, how = False, f"moved away ({e.strerror})"
    if not same:
        raise CorruptFileError(f"{file.path} was {how} after it was opened; put it back, or load the model again")


def copy(goal: np.ndarray, source: np.ndarray) -> None:
    """Copy an array to one of its shape and dtype. CorruptFileError as in `check`; `goal` may be partly written then."""
    if (place := mapping(source)) is None:
        return np.copyto(goal, source)
    file, offset, nbytes = place
    if source.flags.c_contiguous and goal.flags.c_contiguous:
        return read(file, offset, goal.reshape(-1).view(np.uint8))
    if nbytes > SMALL:  # split the axis that spans the most bytes
        axis = max(range(source.ndim), key=lambda i: (source.shape[i] - 1) * abs(source.strides[i]))
        for part in (slice(source.shape[axis] // 2), slice(source.shape[axis] // 2, None)):
            copy(goal[at := (slice(None),) * axis + (part,)], source[at])
        return None
    room = np.empty(nbytes, np.uint8)
    read(file, offset, room)
    first = sum(max(0, (1 - n) * step) for n, step in zip(source.shape, source.strides))  # below it: negative strides
    np.copyto(goal, np.ndarray(source.shape, source.dtype, room.data, first, source.strides))


def read(file: Mapped, offset: int, room: np.ndarray) -> None:
    """Fill `room` with bytes of the file from `offset` on. CorruptFileError: they are not there."""
    at = 0
    while at < room.size:
        count = os.preadv(file.number, [room[at : at + READ].data], offset + at)
        if not count:
            raise CorruptFileError(f"{file.path} was truncated after it was opened; load the model again")
        at += count


def in_memory(array: np.ndarray) -> np.ndarray:
    """The array itself, or a C-contiguous copy if it is not C-contiguous, or is in a mapped file and has at most SMALL bytes.
    CorruptFileError as in `copy`."""
    if array.flags.c_contiguous and (array.nbytes > SMALL or mapping(array) is None):
        return array
    made = np.empty(array.shape, array.dtype)
    copy(made, array)
    return made


def drop_pages(array: np.ndarray) -> None:
    """Give back the memory of a mapped file's pages that hold this array. Pages that are touched later are read again."""
    found = map_of(array)
    if found is not None and (place := mapping(array)) is not None and hasattr(mmap, "MADV_DONTNEED"):
        first = place[1] // mmap.PAGESIZE * mmap.PAGESIZE
        found.madvise(mmap.MADV_DONTNEED, first, place[1] + place[2] - first)


def map_of(array: np.ndarray) -> mmap.mmap | None:
    """The memory map that contains an array, or None."""
    base: object = array
    while base is not None and not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    return base


def in_threads(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    """Run all jobs on `threads` threads, the calling one included. The first error stops the others and is raised."""
    todo, failed = iter(jobs), []

    def work() -> None:
        try:
            for job in todo:
                if failed:
                    return
                job()
        except BaseException as fault:  # noqa: BLE001  (raised below)
            failed.append(fault)

    helpers = [threading.Thread(target=work, name="rlx files", daemon=True) for _ in range(threads - 1)]
    with contextlib.suppress(RuntimeError):  # the system allows no more threads
        for helper in helpers:
            helper.start()
    work()
    for helper in helpers:
        if helper.ident is not None:
            helper.join()
    if failed:
        raise failed[0]


__all__ = [
    "Mapped", "check", "check_same", "copy", "drop_pages", "in_memory", "in_threads", "map_file", "map_of", "mapping", "read",
    "register",
]  # fmt: skip
