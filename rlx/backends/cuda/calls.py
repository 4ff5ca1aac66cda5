"""`run_slots` and `bound` with low host overhead (rlx.host.gate.FastCalls): arrays are copied to the ring, one graph is
launched, and nothing is allocated. Machine code does this for small host arrays.

These functions handle the common case and leave all others, and every error, to the methods of CompiledGraph.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np

from rlx.backends.cuda import start_code
from rlx.backends.cuda.runs import SLOTS, Owner, Replay
from rlx.host import calls
from rlx.host.gate import FastCall

ALIGNED = 16  # bytes: the widest vectors, and the tensors of bulk copies


def fast_call(own: Owner, wanted: FastCall) -> Callable[..., Any] | None:
    if own.program.collectives or wanted.form == "dict":
        return None
    if all(isinstance(a, np.ndarray) for a in wanted.arrays):
        return _in_machine_code(own, wanted)
    return _in_place(own, wanted)


def _in_machine_code(own: Owner, wanted: FastCall) -> Callable[..., Any] | None:
    """None: some inputs do not pass through the ring, or this process has no such calls."""
    decls = [own.decls[b] for b in own.program.inputs if b != own.program.extent]
    if calls.refusal() is not None or {b.id for b in decls} != own.ring.inputs.keys():
        return None
    start = Starter(own)
    bound = wanted.arrays if wanted.form == "none" else [None] * len(decls)
    low = start.host.ctypes.data
    slots = [
        calls.Slot(b.name, b.shape.static, b.shape.dtype.numpy, low + own.ring.inputs[b.id], a) for b, a in zip(decls, bound)
    ]
    taken, call = (low, low + start.host.nbytes), ctypes.addressof(start.block)
    return calls.make(wanted, slots, taken, call, start.settle, alone=True, yields=False, walk=start.address)


class Starter:
    """A Start of an executable (rlx.backends.cuda.start_code), kept up to date."""

    def __init__(self, own: Owner) -> None:
        self._own = own
        self.host = np.zeros(max(own.ring.slot_bytes, 1), np.uint8)
        self.block, self.address = start_code.Start(host=self.host.ctypes.data), start_code.start_address()
        self._call = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self.address)
        own.starters.add(self)

    def stale(self) -> None:
        """The graph and the ring of the executable will change."""
        self.block.graph = None

    def settle(self, status: int) -> None:
        """After a status other than 0. DeviceError: it is the driver's."""
        own = self._own
        gpu, ring, block = own.gpu, own.ring, self.block
        if status == start_code.AGAIN:
            replay = own.first_replay
            replay.graph()
            block.turn, block.taken = ctypes.addressof(ring.turns), ring.taken.ctypes.data
            block.ring, block.slot_bytes = ring.memory.ctypes.data, ring.slot_bytes
            block.slots = SLOTS if ring.inputs else 1 << 62  # nothing counts the slots that are taken
            block.reading, block.stream, block.context = ctypes.addressof(gpu.reading), int(gpu.use()), int(gpu.context)
            block.use, block.replay, block.watched = gpu.entry("cuCtxSetCurrent"), gpu.entry("cuGraphLaunch"), replay.watched
            gpu.await_readers()
            if ring.inputs:
                ring.room()
            with own.experts.queueing(True) if own.experts else nullcontext():
                block.graph = int(replay.graph())  # another one, if a table of experts has been made since
                status = self._call(ctypes.addressof(block))
            if own.experts and own.experts.log:
                block.graph = None  # before each run, there must be room in the log
        if status == start_code.STARTED:
            own.watch.started += 1
            own.started(own.watch.started)
        else:
            gpu.check(status, "replaying a run")


def _in_place(own: Owner, wanted: FastCall) -> Callable[[], Any] | None:
    """For a run whose kernels read the arrays of other libraries where they are. None: an array is one of the host, lies at an
    odd address, or is read when a failed run is undone."""
    order = [b for b in own.program.inputs if b != own.program.extent]
    found = [None if isinstance(a, np.ndarray) else own.adopt(a) for a in wanted.arrays]
    given = {b: x.address for b, x in zip(order, found) if x is not None and x.address % ALIGNED == 0}
    if len(given) < len(order) or own.kept.intersection(given):
        return None
    replay, gate, changes, watch = Replay(own, own.run_launches(), given=given), wanted.gate, own.params.changes, own.watch
    arrays, adopt, acquire, release = list(wanted.arrays), own.adopt, gate.lock.acquire, gate.lock.release
    slow, result = wanted.slow, wanted.result
    lent = [x for x in found if x is not None]
    weakref.finalize(replay, own.gpu.hold, *lent).atexit = False  # they live until its last run has ended

    def run() -> Any:
        if gate.shut or gate.queued or gate.seen != changes.value or own.watch is not watch or not acquire(False):
            return slow()
        try:
            for array, known in zip(arrays, lent):
                now = adopt(array)  # after the work that its library has queued
                if now is None or (now.address, now.shape, now.dtype) != (known.address, known.shape, known.dtype):
                    break
            else:
                gate.generation += 1
                own.started(replay.queue())
                return result
        finally:
            release()
        return slow()

    return run


__all__ = ["fast_call"]
