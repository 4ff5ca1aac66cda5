"""Symmetric memory: every rank owns a heap of the same size, and (offset, length) is a valid location in each of them.

A rank writes to another's heap (`put`) or reads from it (`get`) without the other taking part. Barriers synchronise all ranks.
This is the model of SHMEM (OpenSHMEM 1.5) and of MPI's one-sided windows (MPI 3.1, chapter 11). Bytes put before a barrier are
visible to all ranks after it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from rlx.driver.barrier import PLAIN, Call, as_call, mismatch
from rlx.driver.memory import aligned_bytes, bytes_of
from rlx.errors import CallMismatchError, CollectiveError, HeapBoundsError, TransportError, UnknownRankError, whole
from rlx.forks import each_in_child
from rlx.records import record

TIMEOUT = 30.0  # default, in seconds, for each wait for other ranks
Result = TypeVar("Result")
PAGE = 4096  # bytes; every heap begins at a multiple, so that an offset has the same alignment in all of them


@dataclass(frozen=True, order=True)
class Rank:
    """One of the processes or threads that work together, counted from 0."""

    index: int

    def __index__(self) -> int:
        return self.index


@record
class SymmetricBuffer:
    """`len` bytes at `offset` of a rank's heap. The same (offset, len) is valid on every rank."""

    rank: Rank
    offset: int
    len: int

    def __post_init__(self) -> None:
        for name in ("offset", "len"):
            if type(value := getattr(self, name)) is not int:
                if not hasattr(value, "__index__"):
                    raise HeapBoundsError(f"{name} is a whole number of bytes, got {value!r}")
                object.__setattr__(self, name, value.__index__())  # numpy integers could overflow

    def on(self, rank: Rank) -> SymmetricBuffer:
        """The same offset and length in another rank's heap."""
        return SymmetricBuffer(rank, self.offset, self.len)


@runtime_checkable
class SymmetricTransport(Protocol):
    """The interface of a transport. One object per rank, used by one thread at a time. A wait takes at most `timeout` seconds."""

    num_ranks: int
    this_rank: Rank
    heap_size: int  # bytes, of each rank
    timeout: float  # seconds

    def put(self, target: SymmetricBuffer, source: np.ndarray) -> None:
        """Copy the C-contiguous `source` to `target`. HeapBoundsError, UnknownRankError, CallMismatchError (the lengths differ),
        TransportError."""
        ...

    def get(self, source: SymmetricBuffer, into: np.ndarray) -> None:
        """Copy from `source` to the writable C-contiguous `into`. Raises as put does."""
        ...

    def barrier(self, call: Call = PLAIN) -> None:
        """Wait until every rank has come to the barrier. CallMismatchError, on every rank: the ranks announced different calls.
        CollectiveError, on every rank: some of them announced GAVE_UP, others did not.
        TransportError, on every rank that waits: another one died, left or did not come in time; the message names it."""
        ...

    def close(self) -> None:
        """Leave. Other ranks that wait for this one get a TransportError. Closing again does nothing."""
        ...


@runtime_checkable
class SharedMemory(Protocol):
    """A SymmetricTransport whose heaps all lie in this process's memory."""

    heap: SymmetricHeap


class SymmetricHeap:
    """The heaps of all ranks in one address space: `heap_size` bytes each, `stride` bytes apart.

    `memory`: a writable uint8 array of at least num_ranks * stride bytes to use instead of fresh zeros."""

    def __init__(self, num_ranks: int, heap_size: int, memory: np.ndarray | None = None) -> None:
        self.num_ranks, self.heap_size = whole("num_ranks", num_ranks, 1), whole("heap_size", heap_size, 0)
        self.stride = -(-self.heap_size // PAGE) * PAGE
        total = self.num_ranks * self.stride
        memory = aligned_bytes(total) if memory is None else memory
        self._memory = memory[:total].reshape(self.num_ranks, self.stride)

    def bytes(self, buffer: SymmetricBuffer) -> np.ndarray:
        """The buffer's bytes, shared and writable. HeapBoundsError, UnknownRankError."""
        check_bounds(buffer, self.num_ranks, self.heap_size)
        return self._memory[buffer.rank.index, buffer.offset : buffer.offset + buffer.len]

    def view(self, buffer: SymmetricBuffer, dtype: Any, shape: Sequence[int] | int = -1) -> np.ndarray:
        """The buffer's bytes as an array of that dtype and shape, without a copy. CallMismatchError: the sizes do not fit."""
        raw = self.bytes(buffer)
        try:
            return raw.view(dtype).reshape(shape)
        except ValueError:
            raise CallMismatchError(f"{buffer} is no array of {np.dtype(dtype)} {shape}") from None


def check_bounds(buffer: SymmetricBuffer, num_ranks: int, heap_size: int) -> None:
    """UnknownRankError or HeapBoundsError unless `buffer` is a part of one of `num_ranks` heaps of `heap_size` bytes."""
    if not isinstance(buffer, SymmetricBuffer) or not isinstance(buffer.rank, Rank):
        raise UnknownRankError(f"expected SymmetricBuffer(Rank(…), offset, len), got {buffer!r}")
    if not 0 <= buffer.rank.index < num_ranks:
        raise UnknownRankError(f"rank {buffer.rank.index} of {buffer}; there are {num_ranks}, from 0")
    if buffer.offset < 0 or buffer.len < 0 or buffer.offset + buffer.len > heap_size:
        raise HeapBoundsError(f"bytes {buffer.offset} to {buffer.offset + buffer.len} of a heap of {heap_size} bytes ({buffer})")


def check_copy(buffer: SymmetricBuffer, array: np.ndarray, num_ranks: int, heap_size: int, written: bool) -> None:
    """check_bounds. CallMismatchError unless `array` is C-contiguous, has the buffer's size and, if `written`, is writable."""
    check_bounds(buffer, num_ranks, heap_size)
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous or array.dtype.hasobject:
        what = f"{array.dtype} with strides {array.strides}" if isinstance(array, np.ndarray) else type(array).__name__
        raise CallMismatchError(f"expected a C-contiguous numpy array of numbers for {buffer}, got {what}")
    if written and not array.flags.writeable:
        raise CallMismatchError(f"the array to copy {buffer} into is read-only")
    if array.nbytes != buffer.len:
        raise CallMismatchError(f"an array of {array.nbytes} bytes for {buffer}")


class _ThreadBarrier:
    """The barrier of ranks that are threads. It is reusable, because arrivals are counted per generation."""

    def __init__(self, num_ranks: int) -> None:
        self.condition = threading.Condition()
        self.generation = 0
        self.calls: list[Call | None] = [None] * num_ranks
        self.last: list[Call] = []  # the calls of the last generation
        self.broken: str | None = None  # why the barrier cannot be used any more
        _barriers.add(self)

    def in_child(self) -> None:
        """After a fork: threads of the parent that were at this barrier do not exist in the child."""
        if any(c is not None for c in self.calls) or not self.condition.acquire(blocking=False):
            self.broken = self.broken or "this process was forked while ranks, threads of its parent, were at a barrier"
            self.condition = threading.Condition()
        else:
            self.condition.release()


_barriers = each_in_child(_ThreadBarrier.in_child)


def together(transport: Any, act: Callable[..., Result], *args: Any) -> Result:
    """Call act(*args), an operation of all ranks. If it is interrupted on this rank, abandon the transport: the operation is half
    done, and its barriers would be mistaken for those of the next one."""
    try:
        return act(*args)
    except CollectiveError:
        raise
    except BaseException:
        abandon(transport)
        raise


def abandon(transport: Any) -> None:
    """Leave an operation of all ranks before it is done, and tell the others."""
    getattr(transport, "abandon", transport.close)()


class Transport:
    """The part that all transports share."""

    num_ranks: int
    this_rank: Rank
    heap_size: int
    timeout: float
    check: Callable[..., None]  # raises TransportError if the transport is closed or has failed
    _wait: Callable[[Call], None]  # a barrier

    def barrier(self, call: Call = PLAIN) -> None:
        self.check()
        together(self, self._wait, as_call(call))

    def checked(self, buffer: SymmetricBuffer, array: np.ndarray, written: bool) -> np.ndarray:
        """The bytes of the array to copy to or from `buffer`. Raises as put and get do."""
        check_copy(buffer, array, self.num_ranks, self.heap_size, written)
        self.check()
        return bytes_of(array)


class Copies(Transport):
    """A transport whose heaps are all in this process's memory."""

    heap: SymmetricHeap

    def put(self, target: SymmetricBuffer, source: np.ndarray) -> None:
        self.heap.bytes(target)[...] = self.checked(target, source, written=False)

    def get(self, source: SymmetricBuffer, into: np.ndarray) -> None:
        self.checked(source, into, written=True)[...] = self.heap.bytes(source)


class LocalTransport(Copies):
    """A SymmetricTransport between threads of one process. Made by `fan_out`."""

    def __init__(self, rank: Rank, heap: SymmetricHeap, barrier: _ThreadBarrier, timeout: float) -> None:
        self.this_rank, self.heap, self._barrier, self.timeout = rank, heap, barrier, timeout
        self.num_ranks, self.heap_size = heap.num_ranks, heap.heap_size

    @staticmethod
    def fan_out(num_ranks: int, heap_size: int, timeout: float = TIMEOUT) -> list[LocalTransport]:
        """One transport per rank, each for a thread of its own. `heap_size`: bytes of each rank's heap."""
        heap, barrier = SymmetricHeap(num_ranks, heap_size), _ThreadBarrier(num_ranks)
        return [LocalTransport(Rank(i), heap, barrier, timeout) for i in range(num_ranks)]

    def check(self) -> None:
        if self._barrier.broken:
            raise TransportError(self._barrier.broken)

    def _wait(self, call: Call) -> None:
        m, me, deadline = self._barrier, self.this_rank.index, time.monotonic() + self.timeout
        with m.condition:
            self.check()
            generation, m.calls[me] = m.generation, call
            if all(c is not None for c in m.calls):
                m.last, m.generation = [c for c in m.calls if c], generation + 1
                m.calls[:] = [None] * self.num_ranks
                m.condition.notify_all()
            while m.generation == generation and not m.broken:
                if not m.condition.wait(deadline - time.monotonic()) and m.generation == generation and not m.broken:
                    absent = ", ".join(str(r) for r, c in enumerate(m.calls) if c is None)
                    m.broken = f"rank {absent} did not come to a barrier within {self.timeout:g} s"
                    m.condition.notify_all()
            if m.generation == generation:
                raise TransportError(m.broken or "")
            if len(set(m.last)) > 1:
                raise mismatch(m.last)

    def close(self) -> None:
        with self._barrier.condition:
            self._barrier.broken = self._barrier.broken or f"rank {self.this_rank.index} left"
            self._barrier.condition.notify_all()
