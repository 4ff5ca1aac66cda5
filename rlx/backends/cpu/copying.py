"""Copies of large results by all threads of a run: each line is in the cache of the thread that wrote it, and one core reads the
caches of others far more slowly than its own."""

from __future__ import annotations

from functools import cache

import numpy as np

from rlx.backends.cpu.abi import LINE
from rlx.backends.cpu.table import Rows, Surroundings, Table
from rlx.host.emit import V
from rlx.host.functions import Body, Functions
from rlx.host.jit import Library, kept_object

LEAST_BYTES = 1 << 18  # one thread copies less in about the time that it takes to share the work
LEAST_THREADS = 4  # two threads of one core have the same caches

_functions = Functions()


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_copy_part(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    """args: goal, source, bytes, number of parts. Copies part number `task`, in whole lines; the last one has the rest."""
    goal, source = (e.load("ptr", e.gep(args, 8 * i), 8) for i in range(2))
    nbytes, parts = (e.load("i64", e.gep(args, 8 * i), 8) for i in (2, 3))
    each = e.bin("mul", e.bin("udiv", e.bin("udiv", nbytes, LINE), parts), LINE)
    start = e.bin("mul", task, each)
    size = e.select(e.cmp("eq", e.bin("add", task, 1), parts), e.bin("sub", nbytes, start), each)
    no = e.const("i1", False)
    e.intrinsic("memcpy", e.gep(goal, start), e.gep(source, start), size, no, suffix=("ptr", "ptr", "i64"), returns="void")


@cache
def _library() -> Library:
    return Library([kept_object("copies", lambda: _functions.module_text(Body))], ["rlx_copy_part"])


class Copies:
    """Copies on the threads of `surroundings`, one at a time."""

    def __init__(self, name: str, surroundings: Surroundings) -> None:
        _, _, pool = surroundings
        assert pool is not None
        rows = Rows()
        rows.moving += [(n, n) for n in range(3)]
        rows.add(-1, _library().address("rlx_copy_part"), 0, 0, 0, pool.threads, tasks=pool.threads)
        self._table = Table(name, rows, surroundings)

    def copy(self, goal: np.ndarray, source: int) -> None:
        """Fill `goal`, contiguous, with the bytes at the address `source`."""
        self._table.move({0: goal.ctypes.data, 1: source, 2: goal.nbytes})
        self._table()
