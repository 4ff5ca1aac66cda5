"""Layout of the shared file of ranks (rlx.driver.transports.shm), for Python and machine code."""

from __future__ import annotations

import ctypes

from rlx.driver.symmetric import PAGE

HEADER_BYTES, LINE_BYTES, STAGE_BYTES = PAGE, 256, 16 << 10
CALL_BYTES, WORDS = 32, ("what", "offset", "len", "detail")
DIFFER, WAITING = 1, 2  # results of a barrier: see BarrierState
SHUT = 1
PENDING = 2  # a collective in compiled code waits at a barrier; if another one begins meanwhile, this one was abandoned

P, I64, I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Header(ctypes.Structure):
    """Header of the file. `magic` is written last. `refused` - 1: the first rank that passed other sizes, `its_ranks` and
    `its_heap`. `refusals`: how many ranks did."""

    _fields_ = [
        ("magic", I64), ("num_ranks", I64), ("heap_size", I64), ("refused", I64), ("its_ranks", I64), ("its_heap", I64),
        ("refusals", I64),
    ]  # fmt: skip


class Line(ctypes.Structure):
    """A rank's words. The first 128 bytes change at each barrier, the others when the rank joins, fails or leaves."""

    _fields_ = [
        ("epoch", I64),  # the last barrier that this rank came to; its low half is a futex
        ("sleepers", I32),  # number of ranks that sleep until `epoch` changes
        ("gap", I32 * 5),
        ("calls", I64 * 8),  # what, offset, len, detail of the last two barriers
        ("gap2", I64 * 4),
        ("pid", I64),  # 0: has not joined
        ("started", I64),  # start time of the process, which tells it from a later one with the same pid
        ("left", I64),  # 1: has closed its transport
        ("fault", I64),  # not 0: this rank has failed. Low byte: the reason, a key of WHY; above it: the rank at fault
        ("gap3", I64 * 12),
    ]  # fmt: skip


class BarrierState(ctypes.Structure):
    """The argument of a rank's compiled code. Private memory of its process.

    `i64 rlx_ranks_barrier(ptr state)` (rlx.driver.transports.shm_barrier) comes to barrier `number` with the call (what, offset,
    len, detail) and waits for a bounded time. Results: 0: all ranks came with the same call. 1: all came, but the calls differ.
    2 + r: rank r has not come yet; call again (`ShmTransport.settle` repeats it until all have come or an error is raised).

    A collective that fits one stage: number += 1; write the call; write to stages + (2 * rank + (number & 1)) * STAGE_BYTES; call
    rlx_ranks_barrier; if it returns 0, read the stages of all ranks r at (2 * r + (number & 1)) * STAGE_BYTES."""

    _fields_ = [
        ("lines", P), ("stages", P), ("heaps", P), ("stride", I64),  # rank r's heap: heaps + r * stride
        ("rank", I64), ("ranks", I64), ("number", I64), ("what", I64), ("offset", I64), ("len", I64), ("detail", I64),
        ("spins", I64), ("yields", I64), ("seconds", I64), ("nanoseconds", I64), ("wait", P), ("sched_yield", P),
        ("shut", I64),  # not 0: no call may start. SHUT: the transport is closed or has failed. PENDING: see above
    ]  # fmt: skip


DIED, LEFT, SILENT, INTERRUPTED, ABSENT = 1, 2, 3, 4, 5
