"""Files mapped into memory, and copies of what lies in them that do not touch the mapping.

A mapped page that another program has cut off since kills the process that touches it; a read of it only comes back short.
A read also leaves no page of the file resident here. So what is copied out of arrays over mapped files is read, and what is only
packed from there is read first where that costs nothing: larger arrays would go through memory twice, and are used in place.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rlx.errors import CorruptFileError

READ = 1 << 30  # bytes that one call reads; Linux stops at 2 GiB
SMALL = 8 << 20  # bytes of an array whose copy stays in a cache until it is packed


@dataclass(frozen=True)
class _Mapped:
    path: Path
    number: int  # of the open file
    nbytes: int


_mapped: dict[int, _Mapped] = {}  # address -> the file there, until nothing refers to it


def map_file(path: Path) -> memoryview:
    """The bytes of a file, which has some, read-only."""
    with path.open("rb") as file:
        mapped = np.memmap(file, np.uint8, mode="r")
        _mapped[mapped.ctypes.data] = _Mapped(path, os.dup(file.fileno()), mapped.nbytes)
    weakref.finalize(mapped, _forget, mapped.ctypes.data).atexit = False
    return mapped.data


def _forget(address: int) -> None:
    os.close(_mapped.pop(address).number)


def _place(array: np.ndarray) -> tuple[_Mapped, int] | None:
    """The file that an array lies in, row after row, and where it begins there."""
    if not _mapped or not array.flags.c_contiguous or not hasattr(os, "preadv"):
        return None
    start = array.ctypes.data
    for address, m in list(_mapped.items()):
        if address <= start and start + array.nbytes <= address + m.nbytes:
            return m, start - address
    return None


def check(array: np.ndarray) -> None:
    """CorruptFileError: the array lies in a file that has been cut off before its end."""
    if (place := _place(array)) is not None and os.fstat(place[0].number).st_size < place[1] + array.nbytes:
        raise CorruptFileError(f"{place[0].path} was cut off after it was opened; load the model again")


def copy(goal: np.ndarray, source: np.ndarray) -> None:
    """Copy an array to one of its shape and dtype that lies row after row. CorruptFileError as `check` says, midway."""
    if (place := _place(source)) is None:
        return np.copyto(goal, source)
    room, (file, offset), at = goal.reshape(-1).view(np.uint8), place, 0
    while at < room.size:
        count = os.preadv(file.number, [room[at : at + READ].data], offset + at)
        if not count:
            check(source)
            raise CorruptFileError(f"{file.path} cannot be read at byte {offset + at}")
        at += count


def in_memory(array: np.ndarray) -> np.ndarray:
    """The array; or a copy, if it is SMALL and lies in a mapped file. CorruptFileError as `copy` says."""
    if array.nbytes > SMALL or _place(array) is None:
        return array
    made = np.empty_like(array)
    copy(made, array)
    return made


def in_threads(jobs: Sequence[Callable[[], None]], threads: int) -> None:
    """Do all jobs, each in the thread that is free first, this one among them. The first error ends it, and is raised."""
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
    with contextlib.suppress(RuntimeError):  # the system grants no more threads
        for helper in helpers:
            helper.start()
    work()
    for helper in helpers:
        if helper.ident is not None:
            helper.join()
    if failed:
        raise failed[0]


__all__ = ["check", "copy", "in_memory", "in_threads", "map_file"]
