"""Ranks as processes of one or several hosts, over MPI: one-sided windows (MPI 3.1, chapter 11) through mpi4py.

MPI has no timeouts, and a call that waits for a lost host never returns. So operations that may block are either polled
(requests) or made by a helper thread that can be abandoned. A job that lost a rank skips MPI_Finalize, which would wait too.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import numpy as np

from rlx.driver.barrier import HELLO, Call, mismatch
from rlx.driver.symmetric import TIMEOUT, Rank, SymmetricBuffer, Transport
from rlx.errors import CollectiveError, TransportError, whole

PIECE = 16 << 20  # bytes per timeout: a link of 1 MB/s is slow, not dead
SPIN = 200e-6  # seconds of polling before a rank begins to sleep between polls
NAP = 100e-6  # seconds
GRACE = 1.0  # seconds for other ranks to report the error: launchers kill a job when one rank exits without MPI_Finalize
SEGMENTS = "/dev/shm/mpich_shm_"
LEFT, FAILED = -2, -3  # values of Call.what used only here: the rank leaves; the rank has failed


class MpiTransport(Transport):
    """A SymmetricTransport over the ranks of an MPI communicator. All of them must make it together.

    `heap_size`: bytes of each rank's heap. `comm`: an mpi4py communicator, which is duplicated (None: COMM_WORLD).
    TransportError: MPI is not available, or a rank does not come. CallMismatchError: another rank has another heap size.

    Without asynchronous progress in MPI, `put` and `get` only proceed while their target rank calls the transport (a barrier
    is enough)."""

    def __init__(self, heap_size: int, timeout: float = TIMEOUT, comm: Any = None) -> None:
        self.heap_size, self.timeout = whole("heap_size", heap_size, 0), float(timeout)
        self._mpi = _load()
        comm = self._mpi.COMM_WORLD if comm is None else comm
        self.this_rank, self.num_ranks = Rank(comm.Get_rank()), comm.Get_size()
        self._broken: str | None = None
        self._window: Any = None
        self._work: SimpleQueue[Any] = SimpleQueue()
        self._idle = threading.Event()  # set while the helper thread is not in a call
        self._idle.set()
        threading.Thread(target=_serve, args=(self._work,), daemon=True, name="rlx-mpi").start()
        self._peers = [r for r in range(self.num_ranks) if r != self.this_rank.index]
        self._comm = self._timed(comm.Dup, self._peers)
        self._comm.Set_errhandler(self._mpi.ERRORS_RETURN)
        self._calls = np.zeros((self.num_ranks, len(Call._fields)), np.int64)  # by rank; this rank sends its own row
        self._receives = [self._comm.Recv_init(self._calls[r], r) for r in self._peers]
        self._sends = [self._comm.Send_init(self._calls[self.this_rank.index], r) for r in self._peers]
        self.barrier(Call(HELLO, 0, self.heap_size))
        self._window = self._timed(self._open, self._peers)
        self._own = np.frombuffer(self._window.tomemory(), np.uint8) if self.heap_size else np.zeros(0, np.uint8)
        self._own[...] = 0
        _OPEN.append(self)
        self.barrier()

    # -- the protocol

    def put(self, target: SymmetricBuffer, source: np.ndarray) -> None:
        data = self.checked(target, source, written=False)
        if target.rank == self.this_rank:
            self._own[target.offset : target.offset + target.len] = data
            return
        peer, window = target.rank.index, self._window
        for start in range(0, target.len, PIECE):
            piece = data[start : start + PIECE].copy()  # an abandoned helper thread may still read it

            def send(piece: np.ndarray = piece, at: int = target.offset + start) -> None:
                window.Put([piece, self._mpi.BYTE], peer, at)
                window.Flush(peer)

            self._timed(send, [peer])

    def get(self, source: SymmetricBuffer, into: np.ndarray) -> None:
        data = self.checked(source, into, written=True)
        if source.rank == self.this_rank:
            data[...] = self._own[source.offset : source.offset + source.len]
            return
        peer = source.rank.index
        for start in range(0, source.len, PIECE):
            piece = np.empty(min(PIECE, source.len - start), np.uint8)  # late data must not reach the caller's array
            at = source.offset + start
            request = self._try(lambda piece=piece, at=at: self._window.Rget([piece, self._mpi.BYTE], peer, at), [peer])
            self._poll(request.Test, "did not answer", [peer])
            data[start : start + piece.size] = piece

    def abandon(self) -> None:
        """This rank has left a common operation before it was done. The others cannot go on, and are told."""
        with suppress(TransportError):
            self.check()
            self._fail(f"rank {self.this_rank.index} was interrupted at a barrier", [self.this_rank.index])

    def _wait(self, call: Call) -> None:
        if self.num_ranks == 1:
            return
        self._calls[self.this_rank.index] = call
        self._fence()
        waiting = dict(zip(self._peers, self._receives))
        self._try(lambda: self._mpi.Prequest.Startall([*self._receives, *self._sends]))

        def arrived() -> bool:
            peers = list(waiting)
            for i in self._mpi.Request.Testsome(list(waiting.values())) or ():
                del waiting[peers[i]]
                self._refuse(peers[i], call)
            return not waiting and self._mpi.Request.Testall(self._sends)

        self._poll(arrived, "did not come to a barrier", waiting)
        self._fence()
        calls = [Call(*map(int, row)) for row in self._calls]
        if len(set(calls)) > 1:
            raise mismatch(calls)

    def close(self) -> None:
        """As in the protocol. If all ranks close, this returns as soon as all have; else after at most the timeout."""
        if self._broken is None:
            try:
                self.barrier(Call(LEFT))
                self._own = np.zeros(0, np.uint8)
                self._timed(self._free)
                _OPEN.remove(self)
            except CollectiveError:  # the others make another call, and get an error for it
                _LOST.append(self)
            self._work.put(None)
        self._broken = self._broken or f"rank {self.this_rank.index} closed this transport"

    # -- waits and failures

    def _open(self) -> Any:
        window = self._mpi.Win.Allocate(self.heap_size, 1, comm=self._comm)
        window.Set_errhandler(self._mpi.ERRORS_RETURN)
        window.Lock_all(self._mpi.MODE_NOCHECK)
        return window

    def _free(self) -> None:
        self._window.Unlock_all()
        self._window.Free()
        for request in (*self._receives, *self._sends):
            request.Free()
        self._comm.Free()

    def _fence(self) -> None:
        if self._window is not None:
            self._try(self._window.Sync)

    def check(self) -> None:
        if self._broken is not None:
            raise TransportError(self._broken)

    def _refuse(self, peer: int, call: Call) -> None:
        """TransportError if the call from `peer` says that it leaves or has failed."""
        what, lost = int(self._calls[peer][0]), int(self._calls[peer][3])
        if what == LEFT != call.what:
            self._fail(f"rank {peer} left", [peer])
        if what == FAILED:
            self._fail(f"rank {lost} was lost, as rank {peer} reports", [lost])

    def _fail(self, why: str, lost: Iterable[int]) -> NoReturn:
        """Mark the transport as broken and tell the ranks that are still there."""
        self._broken = why
        _LOST.append(self)
        self._last = np.array(Call(FAILED, detail=min(lost, default=self.this_rank.index)), np.int64)  # kept for pending sends
        if self._idle.is_set():  # else the helper thread is stuck in an MPI call and may hold MPI's lock
            with suppress(self._mpi.Exception):  # lost ranks need not be told
                self._farewell = [self._comm.Isend(self._last, r) for r in self._peers]
        raise TransportError(why)

    def _try(self, call: Callable[[], Any], lost: Iterable[int] = ()) -> Any:
        try:
            return call()
        except self._mpi.Exception as e:
            self._fail(f"{self._names(lost)}: {e}", lost)

    def _names(self, ranks: Iterable[int]) -> str:
        return f"rank {', '.join(map(str, ranks))}" if list(ranks) else "the other ranks"

    def _poll(self, done: Callable[[], Any], failing: str, whom: Iterable[int] = ()) -> None:
        """Wait until `done()`. After the timeout, TransportError: the ranks that are in `whom` at that time, and what they are
        `failing` to do."""
        start = time.monotonic()
        while not self._try(done, whom):
            waited = time.monotonic() - start
            if waited > self.timeout:
                self._fail(f"{self._names(whom)} {failing} within {self.timeout:g} s", whom)
            if waited > SPIN:
                time.sleep(NAP)

    def _timed(self, call: Callable[[], Any], whom: Iterable[int] = ()) -> Any:
        """The result of `call()`, made by the helper thread. After the timeout, TransportError, and the thread is abandoned."""
        answer: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._idle.clear()
        self._work.put((call, answer))
        try:
            value, error = answer.get(timeout=self.timeout)
        except Empty:
            self._fail(f"{self._names(whom)} did not answer within {self.timeout:g} s", whom)
        self._idle.set()
        if error is not None:
            self._try(partial(_throw, error), whom)
        return value


_OPEN: list[MpiTransport] = []
_LOST: list[MpiTransport] = []  # transports that failed: MPI_Finalize would wait for ever


def _throw(error: BaseException) -> NoReturn:
    raise error


def _serve(work: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None]) -> None:
    """The helper thread: makes the calls of `work`, one after another, until a None."""
    while (job := work.get()) is not None:
        call, answer = job
        try:
            answer.put((call(), None))
        except BaseException as e:  # noqa: BLE001  raised in the thread that requested the call
            answer.put((None, e))


@cache
def _load() -> Any:
    """mpi4py.MPI. If this module is the first to import it, this module also finalises MPI."""
    first = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if first:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except (ImportError, RuntimeError) as e:
        raise TransportError(f"MPI cannot be loaded ({e}): pip install 'rlx[mpi]', and an MPI library (pip install mpich)") from e
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # MPICH's launcher signals the death of a rank with it
    atexit.register(_leave, MPI, first)
    return MPI


def _sweep() -> None:
    """Unlink MPICH's shared memory files that this process has mapped. MPI_Finalize would do it, but is not called."""
    with suppress(OSError), open("/proc/self/maps") as maps:
        for path in {line.split(maxsplit=5)[5].removesuffix(" (deleted)\n").strip() for line in maps if SEGMENTS in line}:
            with suppress(OSError):
                os.unlink(path)


def _leave(mpi: Any, first: bool) -> None:
    """At exit: close open transports, then finalise MPI."""
    for transport in list(_OPEN):
        transport.close()
    if _LOST:
        _sweep()
        time.sleep(GRACE)
    if first and not _LOST and not mpi.Is_finalized():
        mpi.Finalize()
    elif _LOST and not first:
        mpi.COMM_WORLD.Abort(1)  # else the importer of MPI would wait in MPI_Finalize
