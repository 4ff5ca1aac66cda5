"""The words of a shared file of ranks (rlx.driver.transports.shm): its layout, as Python and machine code read it."""

from __future__ import annotations

import ctypes

from rlx.driver.symmetric import PAGE

HEADER_BYTES, LINE_BYTES, STAGE_BYTES = PAGE, 256, 16 << 10
CALL_BYTES, WORDS = 32, ("what", "offset", "len", "detail")
DIFFER, WAITING = 1, 2  # what a meeting returns: see Meeting
SHUT = 1
PENDING = 2  # a collective in compiled code has come to a meeting and waits to go on: if another begins, this one was abandoned

P, I64, I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Header(ctypes.Structure):
    """Of the file. `magic` is written last. `refused` - 1 is a rank that came with other sizes: `its_ranks`, `its_heap`."""

    _fields_ = [
        ("magic", I64), ("num_ranks", I64), ("heap_size", I64), ("refused", I64), ("its_ranks", I64), ("its_heap", I64),
    ]  # fmt: skip


class Line(ctypes.Structure):
    """A rank's words. The first 128 bytes change at each meeting, the others when it joins, fails or leaves."""

    _fields_ = [
        ("epoch", I64),  # the meeting this rank came to last; its low half is a futex
        ("sleepers", I32),  # ranks that sleep until it changes
        ("gap", I32 * 5),
        ("calls", I64 * 8),  # what, offset, len, detail of the last two meetings
        ("gap2", I64 * 4),
        ("pid", I64),  # 0: has not joined
        ("started", I64),  # when the process began: tells it from a later one of the same number
        ("left", I64),  # 1: has closed its transport
        ("fault", I64),  # not 0: why this rank meets nobody any more, a key of WHY, and above its low byte the rank at fault
        ("gap3", I64 * 12),
    ]  # fmt: skip


class Meeting(ctypes.Structure):
    """What a rank's compiled code is given; private memory of its process.

    rlx.driver.transports.shm_meet: `i64 rlx_ranks_meet(ptr meeting)` comes to meeting `number` with the call what, offset, len,
    detail, and waits for a while. 0: all are here with the same call. 1: all are here, calls differ. 2 + r: rank r is not here
    yet; then it may be called again (`ShmTransport.settle` does so until all are here or an error is raised).

    So a collective in one piece: number += 1; write the call; write to stages + (2 * rank + (number & 1)) * STAGE_BYTES; meet;
    0: read the stages of all ranks at (2 * r + (number & 1)) * STAGE_BYTES."""

    _fields_ = [
        ("lines", P), ("stages", P), ("heaps", P), ("stride", I64),  # rank r's heap: heaps + r * stride
        ("rank", I64), ("ranks", I64), ("number", I64), ("what", I64), ("offset", I64), ("len", I64), ("detail", I64),
        ("spins", I64), ("yields", I64), ("seconds", I64), ("nanoseconds", I64), ("wait", P), ("sched_yield", P),
        ("shut", I64),  # not 0: nothing may begin. SHUT: the transport is closed, or has failed; PENDING: see there
    ]  # fmt: skip


DIED, LEFT, SILENT, INTERRUPTED, ABSENT = 1, 2, 3, 4, 5
