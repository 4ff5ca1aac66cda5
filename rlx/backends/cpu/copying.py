"""Copies of large results by all threads of a run: each line is in the cache of the thread that wrote it, and one core reads the
caches of others far more slowly than its own."""

from __future__ import annotations

import numpy as np

from rlx.backends.cpu.pool import copy_address
from rlx.backends.cpu.table import Rows, Surroundings, Table
from rlx.forks import Lock

LEAST_BYTES = 1 << 18  # one thread copies less in about the time that it takes to share the work
LEAST_THREADS = 4  # two threads of one core have the same caches


class Copies:
    """Copies on the threads of `surroundings`, one at a time."""

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        _, _, pool = surroundings
        assert pool is not None
        rows = Rows()
        rows.moving += [(n, n) for n in range(3)]
        rows.add(-1, copy_address(), 0, 0, 0, pool.threads, tasks=pool.threads)
        self._table, self._lock = Table(name, rows, surroundings), Lock()

    def copy(self, goal: np.ndarray, source: int) -> None:
        """Fill `goal`, contiguous, with the bytes at the address `source`."""
        with self._lock:  # threads may copy results of one run
            self._table.move({0: goal.ctypes.data, 1: source, 2: goal.nbytes})
            self._table()
