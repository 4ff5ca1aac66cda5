"""Processes of one machine over POSIX shared memory: one file in /dev/shm holds a line of words for each rank, staging areas
and the heaps.

    header         HEADER_BYTES
    lines          LINE_BYTES for each rank, written by that rank alone (but for `sleepers`)
    stages         two of STAGE_BYTES for each rank, for small messages
    heaps          heap_size for each rank, rounded up to whole pages

A meeting (a barrier) has a number. Who comes to meeting k writes its call to calls[k & 1] of its line, then k to `epoch`
(release), and waits until every epoch is k or more (acquire). So calls and stages of meeting k may be read after it
until one comes to k + 1, and those of k & 1 may be written again for meeting k + 2: two of each are enough.
"""

from __future__ import annotations

import ctypes

HEADER_BYTES, LINE_BYTES, STAGE_BYTES = 4096, 256, 16 << 10

P, I64, I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Header(ctypes.Structure):
    """Of the file. `magic` is written last."""

    _fields_ = [("magic", I64), ("version", I64), ("num_ranks", I64), ("heap_size", I64)]


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
        ("fault", I64),  # not 0: why this rank can meet no more; see Fault
        ("gap3", I64 * 12),
    ]  # fmt: skip


class Meeting(ctypes.Structure):
    """What a rank's compiled code is given; private memory of its process.

    rlx.backends.cpu.ranks: `i64 rlx_ranks_meet(ptr meeting)` comes to meeting `number` with the call what, offset, len, detail,
    and waits for a while. 0: all are here with the same call. 1: all are here, calls differ. 2 + r: rank r is not here yet;
    then it may be called again (`ShmTransport.settle` does so until all are here or an error is raised).

    So a collective in one piece: number += 1; write the call; write to stages + (2 * rank + (number & 1)) * STAGE_BYTES; meet;
    0: read the stages of all ranks at (2 * r + (number & 1)) * STAGE_BYTES."""

    _fields_ = [
        ("lines", P), ("stages", P), ("heaps", P), ("stride", I64),  # rank r's heap: heaps + r * stride
        ("rank", I64), ("ranks", I64), ("number", I64), ("what", I64), ("offset", I64), ("len", I64), ("detail", I64),
        ("spins", I64), ("yields", I64), ("seconds", I64), ("nanoseconds", I64), ("wait", P), ("sched_yield", P),
    ]  # fmt: skip
