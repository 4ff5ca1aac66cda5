"""Transport between processes of one machine over POSIX shared memory. One file in /dev/shm holds a line of words for each rank,
staging areas and the heaps.

    header         HEADER_BYTES
    lines          LINE_BYTES for each rank, written by that rank alone (but for `sleepers`)
    stages         two of STAGE_BYTES for each rank, for small messages
    heaps          heap_size for each rank, rounded up to whole pages

Barriers are numbered. A rank that comes to barrier k writes its call to calls[k & 1] of its line, then k to `epoch` (release),
and waits until every epoch is k or more (acquire). So the calls and stages of barrier k may be read after it, until this rank
comes to barrier k + 1, and the halves k & 1 may be written again for barrier k + 2. Double buffering is enough.

Ranks connect by the file's name. The first rank creates the file, the last one unlinks the name, so that ranks killed later leave
nothing behind. A file whose processes have all ended is removed by the next rank that comes. Only this user may access the file,
but its contents are checked before they are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.driver.barrier import Call, mismatch
from rlx.driver.symmetric import PAGE, TIMEOUT, Copies, Rank, SymmetricHeap

from rlx.driver.transports.shm_words import (  # isort: skip
    ABSENT, DIED, HEADER_BYTES, INTERRUPTED, LEFT, LINE_BYTES, PENDING, SHUT, SILENT, STAGE_BYTES, WAITING, BarrierState,
    Header, Line,
)  # fmt: skip
from rlx.errors import CallMismatchError, OptionError, TransportError, UnknownRankError, whole
from rlx.forks import each_in_child

MAGIC = 0x32736B6E61527872  # the layout's version is its last character
FOLDER = "/dev/shm"
SPINS, CROWDED_SPINS, YIELDS = 2000, 50, 64  # spins (some 20 to 60 ns each) before a rank yields its CPU; number of yields
SLICE = 0.01  # seconds that a rank waits in compiled code before it checks whether the others are alive
WHY = {DIED: "died", LEFT: "left", SILENT: "did not come to a barrier in time", INTERRUPTED: "was interrupted at a barrier"}
WHY[ABSENT] = "ended before it called connect"
STATES = {"T": ", which is stopped", "t": ", which is traced"}


class ShmTransport(Copies):
    """A SymmetricTransport between processes of one machine. All must pass the same name, num_ranks and heap_size (bytes).

    CallMismatchError, on every rank: they pass different sizes. TransportError: a rank does not come within `timeout` seconds,
    or there is not enough shared memory. After a failure every further call raises the same error."""

    def __init__(self, name: str, rank: int, num_ranks: int, heap_size: int, timeout: float = TIMEOUT) -> None:
        self.num_ranks, self.heap_size = whole("num_ranks", num_ranks, 1), whole("heap_size", heap_size, 0)
        self.this_rank, self.timeout = Rank(whole("rank", rank)), timeout
        if not 0 <= rank < num_ranks:
            raise UnknownRankError(f"rank {rank} of {num_ranks}, from 0")
        if not timeout > 0:
            raise OptionError(f"timeout is a positive number of seconds, got {timeout!r}")
        self._why, self._name = "", name
        number = _opened(path := path_of(name), time.monotonic() + timeout)
        try:
            try:
                memory = _joined(number, path, rank, num_ranks, heap_size)
            finally:
                _unlock(number)
            try:
                self._use(memory, rank)
                self.barrier()
                self._hurry()
            except BaseException:
                self.close()
                _forget(number, path)
                raise
        finally:
            os.close(number)

    def _use(self, memory: mmap.mmap, rank: int) -> None:
        stages, heaps, _ = layout(self.num_ranks, self.heap_size)
        self._header = Header.from_buffer(memory)
        self._lines = lines_of(memory, self.num_ranks)
        self._leave = weakref.finalize(self, _leave, self._lines[rank], os.getpid())
        self._leave.atexit = False  # a rank that exits without closing counts as died, once its process is gone
        self.heap = SymmetricHeap(self.num_ranks, self.heap_size, np.frombuffer(memory, np.uint8)[heaps:])
        base = ctypes.addressof(self._header)
        self.state = BarrierState(
            lines=base + HEADER_BYTES, stages=base + stages, heaps=base + heaps, stride=self.heap.stride, rank=rank,
            ranks=self.num_ranks, yields=YIELDS, nanoseconds=round(SLICE * 1e9),
        )  # fmt: skip
        from rlx.driver.transports import shm_barrier  # imports the compiler, which only ranks need

        self._come = shm_barrier.barrier_of(self.state)
        _used.add(self)

    def _hurry(self) -> None:
        """Spin long only if there is a CPU for every rank: else the rank that this one waits for may need this CPU."""
        cpus: set[int] = set()
        with contextlib.suppress(ProcessLookupError, AttributeError):  # one has died already; not Linux
            cpus.update(*(os.sched_getaffinity(line.pid) for line in self._lines))
        self.state.spins = SPINS if self.num_ranks <= len(cpus) else CROWDED_SPINS

    def check(self) -> None:
        """TransportError if the transport is closed or has failed."""
        if self.state.shut:
            self.abandon()
            raise TransportError(self._why)

    @property
    def broken(self) -> str:
        """Why the transport has failed or was closed; empty: it works."""
        if self._lines[self.this_rank.index].fault:  # compiled code may have found that a call was abandoned
            self.abandon()
        return self._why

    def abandon(self) -> None:
        """This rank has left a common operation before it was done. The others cannot go on, and are told."""
        if not self._why:
            self._fail(INTERRUPTED, self.this_rank.index)

    def _wait(self, call: Call) -> None:
        m = self.state
        m.what, m.offset, m.len, m.detail = call
        m.number += 1
        if code := self._come():
            self.settle(code)

    def settle(self, code: int) -> None:
        """Continue a barrier that returned `code`, until all ranks have come with the same call. Raises as barrier does. If this
        is interrupted, the caller must abandon the transport."""
        deadline = time.monotonic() + self.timeout
        while code >= WAITING:
            self._look(deadline)
            code = self._come()
        if code:
            half = self.state.number % 2 * 4
            error = mismatch([Call(*line.calls[half : half + 4]) for line in self._lines])
            self.state.shut &= ~PENDING  # the call ends here, on every rank
            raise error

    # -- plans of collectives (rlx.driver.collective.Compiled)

    def table(self, plan: Any) -> Any:
        from rlx.driver.transports import shm_walk  # imports the compiler, which only collectives need

        return shm_walk.Table(self, plan)

    def memory(self, slow: Callable[..., None], busy: ctypes.c_int64) -> Any:
        from rlx.driver.transports import shm_walk

        return shm_walk.remembered(self, slow, busy)

    def close(self) -> None:
        self._leave()
        self._shut(self._why or f"rank {self.this_rank.index} left")

    def _shut(self, why: str) -> None:
        self._why, self.state.shut = why, SHUT

    def _look(self, deadline: float) -> None:
        """Raises if this barrier cannot complete, or is past its deadline."""
        failure = self._failure(deadline)
        refused = Header.from_buffer_copy(self._header)  # behind the lines: ranks that leave because of it have said so before
        come = sum(line.pid != 0 for line in self._lines) + refused.refusals
        wanted = min(self.num_ranks, refused.its_ranks)
        if refused.refused and (failure or come >= wanted):  # else a rank that comes later would find nobody here
            self._shut(_sizes(refused))
            raise CallMismatchError(self._why)
        if failure:
            raise self._fail(*failure)

    def _failure(self, deadline: float) -> tuple[int, int, str] | None:
        """Why no barrier can complete, the rank at fault, and more to say of it."""
        for rank, line in enumerate(self._lines):
            if fault := line.fault:
                return fault & 255, fault >> 8, f", as rank {rank} found"
        number, late = self.state.number, time.monotonic() > deadline
        gone = [LEFT if line.left else 0 if not line.pid or alive(line.pid, line.started) else DIED for line in self._lines]
        absent = [rank for rank, line in enumerate(self._lines) if line.epoch < number]  # last: a rank may come and leave
        unknown = {rank for rank in absent if not self._lines[rank].pid}
        for rank in _ended(self._name) if unknown else ():  # blame the first: others may have ended because of it
            if rank in unknown:
                return ABSENT, rank, ""
        for rank in absent:
            if gone[rank] and not self._lines[rank].fault:  # else the next look finds the rank at fault
                return gone[rank], rank, ""
        if late and absent:
            others = f" (nor did rank {', '.join(map(str, absent[1:]))})" if len(absent) > 1 else ""
            return SILENT, absent[0], f": {self.timeout:g} s{others}"
        return None

    def _fail(self, why: int, rank: int, more: str = "") -> TransportError:
        """Mark the transport as failed; returns the error."""
        self._lines[self.this_rank.index].fault = why | rank << 8
        pid = self._lines[rank].pid if 0 <= rank < self.num_ranks else 0
        state, _ = process(pid) if pid else ("", 0)
        unknown = "" if why == ABSENT else " (which has not joined)"
        who = f"rank {rank} (process {pid}{STATES.get(state, '')})" if pid else f"rank {rank}{unknown}"
        self._shut(f"{who} {WHY.get(why, 'failed')}{more}")
        return TransportError(self._why)


def _refuse_to_fork(transport: ShmTransport) -> None:
    """In a forked child: a rank is one process, and the parent remains this rank. The shared words are not touched."""
    if not transport._why:
        transport._shut(f"rank {transport.this_rank.index} is the parent of this forked process, which cannot act for it")


_used = each_in_child(_refuse_to_fork)


def layout(num_ranks: int, heap_size: int) -> tuple[int, int, int]:
    """Byte offsets of the stages and of the heaps, and the size of the file."""
    stages = -(-(HEADER_BYTES + num_ranks * LINE_BYTES) // PAGE) * PAGE
    heaps = stages + num_ranks * 2 * STAGE_BYTES
    return stages, heaps, heaps + num_ranks * -(-heap_size // PAGE) * PAGE


def lines_of(memory: mmap.mmap, num_ranks: int) -> list[Line]:
    return [Line.from_buffer(memory, HEADER_BYTES + rank * LINE_BYTES) for rank in range(num_ranks)]


# -- processes


def process(pid: int) -> tuple[str, int]:
    """State of a process (a letter of proc(5), "" if it does not exist) and its start time, in clock ticks since boot."""
    try:
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "", 0
    return fields[0], int(fields[19])


def alive(pid: int, started: int) -> bool:
    """Whether the process with that pid is alive and started at that time."""
    state, began = process(pid)
    return state not in ("", "Z", "X") and began == started


def _leave(line: Line, pid: int) -> None:
    if os.getpid() == pid:  # not in a forked child
        line.left = 1


# -- the file


def path_of(name: str) -> str:
    if not re.fullmatch(r"[\w.-]{1,100}", name, re.ASCII):
        raise OptionError(f"the name of a group of ranks must consist of letters, digits and ._-, got {name!r}")
    if not os.path.isdir(FOLDER):
        raise TransportError(f"there is no {FOLDER} here, which the shared memory of ranks needs")
    return os.path.join(FOLDER, f"rlx-{os.getuid()}-{name}")


def _opened(path: str, deadline: float) -> int:
    """The file, locked."""
    while True:
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as fault:
            raise TransportError(f"{path} cannot be opened: {fault.strerror}") from fault
        try:
            while not _locked(number):
                if time.monotonic() > deadline:
                    raise TransportError(f"{path} stays locked by another rank that joins")
                time.sleep(0.001)
            found = os.fstat(number)
            if found.st_uid != os.getuid() or found.st_mode & 0o077:
                raise TransportError(f"{path} is not of this user alone")
        except BaseException:
            os.close(number)
            raise
        if found.st_nlink:
            return number
        os.close(number)  # it was unlinked meanwhile


def _unlock(number: int) -> None:
    import fcntl

    fcntl.flock(number, fcntl.LOCK_UN)


def _locked(number: int) -> bool:
    import fcntl  # missing on Windows, where path_of raises before a file is opened

    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _joined(number: int, path: str, rank: int, num_ranks: int, heap_size: int) -> mmap.mmap:
    """Map the locked file and register this process as `rank`. The file is made anew if no process that joined it lives."""
    _, _, total = layout(num_ranks, heap_size)
    if not _living(number):
        os.ftruncate(number, 0)
        _sweep()
        _make(number, path, total, Header(MAGIC, num_ranks, heap_size))
    header = Header.from_buffer_copy(os.pread(number, ctypes.sizeof(Header), 0))
    if header.magic != MAGIC:
        raise TransportError(f"{path} was made by another version of rlx, whose processes still run")
    if (header.num_ranks, header.heap_size) != (num_ranks, heap_size):
        if not header.refused:
            header.refused, header.its_ranks, header.its_heap = rank + 1, num_ranks, heap_size
        header.refusals += 1
        os.pwrite(number, bytes(header), 0)
        raise CallMismatchError(_sizes(header))
    if os.fstat(number).st_size != total:
        raise TransportError(f"{path} is damaged: {os.fstat(number).st_size} bytes instead of {total}")
    memory = mmap.mmap(number, total)
    lines, (state, began) = lines_of(memory, num_ranks), process(os.getpid())
    if not state:
        raise TransportError("there is no /proc here, which is needed to see whether other ranks are alive")
    if lines[rank].pid:
        raise TransportError(f"rank {rank} of {path} is taken already, by process {lines[rank].pid}")
    lines[rank].started = began
    lines[rank].pid = os.getpid()
    if all(line.pid for line in lines):
        os.unlink(path)
    return memory


def _make(number: int, path: str, total: int, header: Header) -> None:
    try:
        os.posix_fallocate(number, 0, total)  # now: if memory ran out later, SIGBUS would kill the process
    except (OSError, OverflowError) as fault:
        os.unlink(path)
        folder = os.statvfs(FOLDER)
        free = folder.f_bavail * folder.f_frsize
        raise TransportError(
            f"{FOLDER} has {free} bytes free, {header.num_ranks} ranks with heaps of {header.heap_size} "
            f"bytes need {total} ({fault}): ask for less, or enlarge it (mount -o remount,size=…; docker --shm-size)"
        ) from fault
    os.pwrite(number, bytes(header), 0)


def _sizes(header: Header) -> str:
    return (
        f"rank {header.refused - 1} passed num_ranks {header.its_ranks} and heap_size {header.its_heap}, "
        f"the ranks before it num_ranks {header.num_ranks} and heap_size {header.heap_size}"
    )


def _living(number: int) -> bool:
    """Whether a process that joined this file is alive. The contents of the file are untrusted."""
    raw = os.pread(number, ctypes.sizeof(Header), 0)
    count = Header.from_buffer_copy(raw).num_ranks if len(raw) == ctypes.sizeof(Header) else 0
    raw = os.pread(number, min(max(count, 0), 1 << 16) * LINE_BYTES, HEADER_BYTES)
    lines = (Line.from_buffer_copy(raw, at) for at in range(0, len(raw) - LINE_BYTES + 1, LINE_BYTES))
    return any(line.pid > 0 and alive(line.pid, line.started) for line in lines)


def _forget(number: int, path: str) -> None:
    """Unlink `path`, if it is still this file."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.stat(path), os.fstat(number)):
            os.unlink(path)


def remove(name: str) -> None:
    """Remove the files of ranks that ended before all had joined, if there are any."""
    for path in (path_of(name), _list_of(name)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)


# -- ranks that end without joining. The launcher lists them in a file, which is locked while the launcher lives


def _list_of(name: str) -> str:
    return path_of(name) + ".ended"


def list_ended(name: str, rank: int) -> None:
    """Called by the launcher: this rank has ended. Ranks that wait for it to join are told at once."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    if name not in _lists:
        _lists[name] = os.open(_list_of(name), flags, 0o600)
        _locked(_lists[name])  # so that it is not swept
    os.write(_lists[name], rank.to_bytes(4, "little"))


_lists: dict[str, int] = {}  # name -> descriptor of the list


def _ended(name: str) -> list[int]:
    """The ranks listed by list_ended, in order of exit."""
    try:
        with open(_list_of(name), "rb") as f:
            raw = f.read()
    except FileNotFoundError:
        return []
    return [int.from_bytes(raw[at : at + 4], "little") for at in range(0, len(raw), 4)]


def _sweep() -> None:
    """Remove files of this user's processes that were killed before all ranks had joined."""
    for name in os.listdir(FOLDER):
        if name.startswith(f"rlx-{os.getuid()}-"):
            with contextlib.suppress(OSError):  # another process removed it
                path = os.path.join(FOLDER, name)
                number = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                try:
                    if _locked(number) and not _living(number):
                        _forget(number, path)
                finally:
                    os.close(number)


__all__ = ["Line", "BarrierState", "ShmTransport"]
