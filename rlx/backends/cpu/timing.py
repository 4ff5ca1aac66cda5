"""A run with times: each task of each step stands behind a function that reads the clock before and after it.

The executor runs such a table as any other one: the same machine code, threads and groups. Nothing of this exists in a run
that is not measured. A clock reading takes some 25 ns.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from rlx.backends.cpu.abi import KEPT
from rlx.host.emit import V
from rlx.host.functions import Body, Functions
from rlx.host.jit import Library, kept_object

MONOTONIC = 1  # clock_gettime's CLOCK_MONOTONIC on Linux: that of time.perf_counter
SPAN = 5  # words: the address of the thread's scratch, then seconds and nanoseconds of begin and end
HEAD = 2  # words in front of a kernel's arguments: its function, and the span of its task 0

_functions = Functions()


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_timed(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    """A kernel (rlx.backends.cpu.abi.Rendered) that runs the one in front of its arguments and writes the span of the task."""
    kernel, spans = e.load("ptr", args, 8), e.load("ptr", e.gep(args, 8), 8)
    span = e.gep(spans, e.bin("mul", e.bin("and", task, KEPT - 1), 8 * SPAN))
    e.store(scratch, span, 8)
    clock = V(str(MONOTONIC), "i32")
    e.external("clock_gettime", "i32", clock, e.gep(span, 8))
    e.call(kernel, "void", e.gep(args, 8 * HEAD), task, scratch, status)
    e.external("clock_gettime", "i32", clock, e.gep(span, 24))


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_span_begin(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    """A row in front of several that have one span."""
    span = e.load("ptr", args, 8)
    e.store(scratch, span, 8)
    e.external("clock_gettime", "i32", V(str(MONOTONIC), "i32"), e.gep(span, 8))


@_functions.native("void", args="ptr", task="i64", scratch="ptr", status="ptr")
def rlx_span_end(e: Body, args: V, task: V, scratch: V, status: V) -> None:
    e.external("clock_gettime", "i32", V(str(MONOTONIC), "i32"), e.gep(e.load("ptr", args, 8), 24))


@cache
def library() -> Library:
    image = kept_object("timed step", lambda: _functions.module_text(Body))
    return Library([image], ["rlx_timed", "rlx_span_begin", "rlx_span_end"])


class Spans:
    """Room for the spans of one run, and what they say."""

    def __init__(self, tasks: list[int], scratch: int, stride: int) -> None:
        """`tasks` of each step. Thread t has its scratch at `scratch` + t * `stride`."""
        self.step = np.repeat(np.arange(len(tasks)), tasks)
        self._words = np.zeros((len(self.step), SPAN), np.int64)
        self._first = np.cumsum([0, *tasks])
        self._scratch, self._stride = scratch, stride
        self.function = library().address("rlx_timed")
        self.around = library().address("rlx_span_begin"), library().address("rlx_span_end")

    def address(self, step: int) -> int:
        """The span of the step's task 0."""
        return self._words.ctypes.data + 8 * SPAN * int(self._first[step])

    def rows(self) -> np.ndarray:
        """(step, thread, begin, end) of every task, in nanoseconds."""
        scratch, *times = self._words.T
        begin, end = (times[at] * 1_000_000_000 + times[at + 1] for at in (0, 2))
        return np.stack([self.step, (scratch - self._scratch) // self._stride, begin, end], axis=1)


__all__ = ["HEAD", "Spans"]
