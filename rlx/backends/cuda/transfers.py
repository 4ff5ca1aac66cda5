"""Transfers of large inputs and outputs during other runs: dedicated copy streams, and staging areas on the GPU.

A run reads its inputs and leaves its outputs at fixed addresses, so a copy between those and the host would wait for the runs
around it. A copy within the GPU takes a fiftieth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate

import numpy as np

from rlx.backends.cuda.runs import Owner
from rlx.driver.memory import bytes_of

AREAS = 3  # runs whose outputs are on their way; an input has as many


class Areas:
    """`nbytes` bytes in each of several areas, used in turn, each with an event."""

    def __init__(self, owner: Owner, nbytes: int) -> None:
        self.owner, self.gpu, self._turn = owner, owner.gpu, 0
        self._areas = [(owner.device_memory.allocate(nbytes), owner.gpu.event()) for _ in range(AREAS)]
        self.gpu.before(self.gpu.up)  # they have been cleared

    @property
    def nbytes(self) -> int:
        return sum(area.nbytes for area, _ in self._areas)

    def next(self) -> tuple[int, int, int]:
        """The number of the next area, its address, and its event."""
        self._turn += 1
        area, event = self._areas[self._turn % AREAS]
        return self._turn % AREAS, area.address, event


class Upload(Areas):
    """One input on its way to the arena."""

    def write(self, buffer: int, source: np.ndarray) -> None:
        """Flat bytes of the host, which may change once this has returned."""
        gpu, (_, area, event) = self.gpu, self.next()
        gpu.await_event(event, gpu.up)  # the run that used the area has taken it
        gpu.copy_in(area, source, gpu.up)
        gpu.after(gpu.up)
        self.owner.move(self.owner.address(buffer), area, source.size)
        gpu.record(event, gpu.use())


class Download(Areas):
    """Some buffers on their way to the host, as they are after each run. A thread fetches them."""

    def __init__(self, owner: Owner, buffers: Sequence[int]) -> None:
        self._decls = [owner.decls[b] for b in buffers]
        sizes = [-(-d.nbytes // 16) * 16 for d in self._decls]
        self._places, self._pending = list(accumulate(sizes, initial=0)), dict[int, Future[list[np.ndarray]]]()
        super().__init__(owner, sum(sizes))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rlx outputs")

    def begin(self) -> Callable[[], list[np.ndarray]]:
        """The function waits for the copies, and returns fresh arrays."""
        gpu, (k, area, event) = self.gpu, self.next()
        if k in self._pending:
            wait([self._pending[k]])
        for d, place in zip(self._decls, self._places):
            gpu.copy(area + place, self.owner.address(d.id), d.nbytes)
        gpu.record(event, gpu.use())
        self._pending[k] = found = self._thread.submit(self._fetch, area, event)
        return found.result

    def _fetch(self, area: int, event: int) -> list[np.ndarray]:
        gpu, arrays = self.gpu, [np.empty(d.shape.static, d.shape.dtype.numpy) for d in self._decls]
        gpu.use()
        gpu.await_event(event, gpu.down)
        for array, place in zip(arrays, self._places):
            gpu.copy_out(bytes_of(array), area + place, gpu.down)
        return arrays


__all__ = ["Download", "Upload"]
