"""Copies between the host and a GPU through pinned memory, in pieces: the host copies one piece while the GPU transfers
others.

The host may read and write its arrays as soon as a function returns. A piece is reused when the copy from it has ended.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from queue import SimpleQueue
from typing import Any

import numpy as np

from rlx.driver import files

SMALL = 64 << 10  # bytes of an array that the driver copies at once, from any memory
PIECE = 4 << 20
PIECES = THREADS = 8  # a thread of the host copies an eighth of what the bus moves
ALONE = 2 * PIECE  # bytes up to which other threads do not pay
SHORT = 64 << 10  # bytes that one block of a kernel moves to the host sooner than the copy engine
READERS, WARP, MOVED = 1024, 32, 16  # threads of that block, at most, and at least; bytes that each moves at once
LATER = 64  # bytes of a read that is waited for later
LOOKS = 16  # polls of the words that a kernel writes, per query to the driver, which takes longer


class Staging:
    """Pinned pieces of one GPU (rlx.backends.cuda.gpu.Gpu), for all its streams."""

    def __init__(self, gpu: Any) -> None:
        self._gpu, memory = gpu, gpu.pinned(PIECES * PIECE)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="rlx copies")
        self._free: SimpleQueue[tuple[np.ndarray, Any]] = SimpleQueue()  # the one unused for longest first
        for k in range(PIECES):
            self._free.put((memory[k * PIECE :][:PIECE], gpu.event()))

    def copy(self, host: np.ndarray, address: int, stream: Any, out: bool) -> None:
        """Flat bytes to the GPU, which may be in a mapped file, or `out`: from the GPU, after all work of the stream."""

        def one(at: int) -> None:
            self._gpu.use()
            piece, event = self._free.get()
            part = host[at : at + PIECE]
            here = piece[: part.size]
            try:
                self._gpu.passed(event)
                if out:
                    self._gpu.enqueue("cuMemcpyDtoHAsync", here.ctypes.data, address + at, part.size, stream)
                else:
                    files.copy(here, part)
                    self._gpu.enqueue("cuMemcpyHtoDAsync", address + at, here.ctypes.data, part.size, stream)
                self._gpu.record(event, stream)
                if out:
                    self._gpu.passed(event)
                    np.copyto(part, here)
            finally:
                self._free.put((piece, event))

        for done in (map if host.size <= ALONE else self._threads.map)(one, range(0, host.size, PIECE)):
            assert done is None


class Told:
    """Pinned memory that a kernel (rlx_tell in support.h) fills behind all work of the stream. The kernel then tells the host so.
    The copy engine and a wait for the stream would each take several microseconds."""

    def __init__(self, gpu: Any, function: Any, nbytes: int) -> None:
        self._gpu, memory = gpu, gpu.pinned(nbytes + 64)
        self._bytes, self._told = memory[:nbytes], ctypes.c_int64.from_buffer(memory[nbytes:])
        # arguments of rlx_tell: where to, where from, bytes, where it tells the number of the read, that number
        self._values = (ctypes.c_int64 * 5)(memory.ctypes.data, 0, 0, memory.ctypes.data + nbytes, 0)
        self._arguments = (ctypes.c_void_p * 5)(*(ctypes.addressof(self._values) + 8 * n for n in range(5)))
        self._function, self._launch = int(function), gpu.direct("cuLaunchKernel", 11)

    def begin(self, address: int, nbytes: int, stream: Any) -> None:
        self._values[1], self._values[2], self._values[4] = address, nbytes, self._values[4] + 1
        threads = min(READERS, max(1, -(-nbytes // (WARP * MOVED))) * WARP)
        grid = 1, 1, 1, threads, 1, 1, 0
        status = self._launch(self._function, *grid, int(stream), ctypes.addressof(self._arguments), None)
        self._gpu.check(status, "copying from the GPU")

    @property
    def ended(self) -> bool:
        return self._told.value == self._values[4]

    def end(self, into: np.ndarray) -> None:
        """Looks all the time, since a sleep takes fifty microseconds; other threads run in between."""
        for look in count(1):
            if self.ended or (look % LOOKS == 0 and self._gpu.idle()):
                break
            os.sched_yield()
        np.copyto(into, self._bytes[: into.nbytes])


class Later:
    """A read under way, to be called once."""

    def __init__(self, told: Told, into: np.ndarray) -> None:
        self._told, self._into = told, into

    def __call__(self) -> None:
        self._told.end(self._into)


class ShortReads:
    """Reads of a little memory of one GPU."""

    def __init__(self, gpu: Any, function: Any) -> None:
        self._made = partial(Told, gpu, function)
        self._lock, self._now = threading.Lock(), self._made(SHORT)
        # Each with its read, if that is still wanted. None goes back to the system: a kernel may be about to write it
        self._later: list[tuple[Told, weakref.ref[Later]]] = []

    def read(self, into: np.ndarray, address: int, stream: Any) -> None:
        with self._lock:
            self._now.begin(address, into.nbytes, stream)
            self._now.end(into)

    def later(self, into: np.ndarray, address: int, stream: Any) -> Callable[[], None]:
        """Read up to LATER bytes as they are behind the work queued so far. The function, to be called once, waits for them and
        fills `into`; work queued since goes on."""
        with self._lock:
            free = next((n for n, (told, read) in enumerate(self._later) if read() is None and told.ended), None)
            told = self._made(LATER) if free is None else self._later.pop(free)[0]
            self._later.append((told, weakref.ref(read := Later(told, into))))
            told.begin(address, into.nbytes, stream)
        return read


__all__ = ["ALONE", "LATER", "SHORT", "SMALL", "ShortReads", "Staging"]
