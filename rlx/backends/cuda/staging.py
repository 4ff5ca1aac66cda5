"""Copies between the host and a GPU through pinned memory, in pieces: the host copies one while the GPU moves others.

The host may read and write its arrays as soon as a function returns. A piece is written again when the copy from it has ended."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np

from rlx.driver import files

SMALL = 64 << 10  # bytes of an array that the driver copies at once, from any memory
PIECE = 4 << 20
PIECES = 8
THREADS = 4  # a thread of the host copies less than the bus moves
ALONE = 2 * PIECE  # bytes up to which other threads do not pay


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


__all__ = ["ALONE", "SMALL", "Staging"]
