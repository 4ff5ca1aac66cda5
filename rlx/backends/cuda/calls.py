"""`run_slots` and `bound` with little time on the host (rlx.host.gate.FastCalls): arrays are copied to the ring, one graph is
launched, and nothing is allocated.

These functions handle the common case and leave all others, and every error, to the methods of CompiledGraph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.backends.cuda.runs import CudaRun, Owner, Replay
from rlx.host.gate import FastCall

ALIGNED = 16  # bytes: the widest vectors, and the tensors of bulk copies


def fast_call(own: Owner, wanted: FastCall) -> Callable[..., Any] | None:
    if own.program.collectives or wanted.form == "dict":
        return None
    slow, result = wanted.slow, wanted.result
    if wanted.form == "none" and any(not isinstance(a, np.ndarray) for a in wanted.arrays):
        in_place = _in_place(own, wanted)
        return in_place and (lambda: result if in_place() else slow())
    run = _run_of(own, wanted)
    if wanted.form == "none":
        arrays = list(wanted.arrays)
        return lambda: result if run(arrays) else slow()
    given = [(d.shape.dtype.numpy, d.shape.static) for d in (own.decls[b] for b in own.program.inputs if b != own.program.extent)]

    def run_slots(inputs: Sequence[np.ndarray]) -> Any:
        if (type(inputs) is not list and type(inputs) is not tuple) or len(inputs) != len(given):
            return slow(inputs)
        for array, (dtype, shape) in zip(inputs, given):
            if type(array) is not np.ndarray or array.dtype != dtype or array.shape != shape:
                return slow(inputs)
        return result if run(inputs) else slow(inputs)

    run_slots.__doc__ = wanted.doc
    return run_slots


def _run_of(own: Owner, wanted: FastCall) -> Callable[[Sequence[np.ndarray]], bool]:
    """A function that starts a run on checked arrays. False: it is not the common case, and nothing has changed."""
    gate, changes = wanted.gate, own.params.changes
    acquire, release, copyto = gate.lock.acquire, gate.lock.release, np.copyto
    order = [b for b in own.program.inputs if b != own.program.extent]

    def run(arrays: Sequence[np.ndarray]) -> bool:
        if gate.shut or gate.seen != changes.value or (gate.queued and own.handles.blocked) or not acquire(False):
            return False
        try:
            ring, slot = own.ring, own.ring.room()
            if len(ring.inputs) == len(arrays):
                for to, array in zip(slot, arrays):
                    copyto(to, array)
            else:
                for buffer, array in zip(order, arrays):
                    own.write(buffer, np.ascontiguousarray(array))
            gate.generation += 1
            number = own.start()
        finally:
            release()
        if number is not None:
            own.handles.queue.at_once(lambda: CudaRun(own, number))
        return True

    return run


def _in_place(own: Owner, wanted: FastCall) -> Callable[[], bool] | None:
    """A function that starts a run whose kernels read the arrays of other libraries where they are. None: an array is one of the
    host, lies at an odd address, or is read when a failed run is undone."""
    order = [b for b in own.program.inputs if b != own.program.extent]
    found = [None if isinstance(a, np.ndarray) else own.adopt(a) for a in wanted.arrays]
    given = {b: x.address for b, x in zip(order, found) if x is not None and x.address % ALIGNED == 0}
    if len(given) < len(order) or own.kept.intersection(given):
        return None
    replay, gate, changes, watch = Replay(own, own.run_launches(), given=given), wanted.gate, own.params.changes, own.watch
    arrays, adopt, acquire, release = list(wanted.arrays), own.adopt, gate.lock.acquire, gate.lock.release

    def run() -> bool:
        if gate.shut or gate.seen != changes.value or own.watch is not watch or (gate.queued and own.handles.blocked):
            return False
        if not acquire(False):
            return False
        try:
            for array in arrays:  # behind what their libraries have queued
                adopt(array)
            gate.generation += 1
            number = replay.queue()
        finally:
            release()
        if number is not None:
            own.handles.queue.at_once(lambda: CudaRun(own, number))
        return True

    return run


__all__ = ["fast_call"]
