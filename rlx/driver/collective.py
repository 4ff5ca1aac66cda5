"""Collectives over any transport: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all.

All ranks call the same collective with the same sizes, and with scratch of `array.nbytes` bytes at the same offset of their
heaps. Afterwards the contents of the scratch are undefined. If ranks make different calls, each of them gets a CallMismatchError
before any array has changed. An invalid call (HeapBoundsError, UnknownRankError, or CallMismatchError if array and scratch do not
fit) is refused at once, on that rank alone.

Reductions (rlx.driver.reduce_code) combine elements in rank order. 16- and 8-bit floats accumulate in f32, integers in 64 bits,
and the result is rounded once. Every algorithm (rlx.driver.schedule), transport and size gives the same bits on all ranks, except
for the payloads of NaNs.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.driver.barrier import Call, detail_of
from rlx.driver.reduction import Form, ReduceKind, accumulator

from rlx.driver.schedule import (  # isort: skip
    ALGORITHMS, MINE, OUT, SMALL, Address, Algorithm, Figures, Job, Step, What, choose, possible, schedule,
)  # fmt: skip
from rlx.driver.symmetric import Rank, SharedMemory, SymmetricBuffer, SymmetricHeap, SymmetricTransport, check_bounds, together
from rlx.errors import CallMismatchError, CollectiveError, UnknownRankError, known
from rlx.ir.dtype import DTYPES, DType, as_dtype

IN_PLACE = (What.ALL_REDUCE, What.BROADCAST)  # the result overwrites the operand
PLANS = 256  # prepared calls kept for each transport
PROBE = 1 << 20  # bytes read to measure the time per byte


class Table(Protocol):
    """A plan, ready to be executed."""

    def run(self, array: np.ndarray, out: np.ndarray) -> None:
        """Execute the plan on these bytes."""
        ...


class Memory(Protocol):
    """Fast all_reduce of one transport. `function` (buffer, array, kind) recognises the calls that were passed to `remember`."""

    function: Callable[..., None]

    def remember(self, buffer: SymmetricBuffer, kind: ReduceKind, array: np.ndarray, table: Any) -> None: ...


@runtime_checkable
class Compiled(Protocol):
    """A transport with its own machine code for plans. `memory`: None if this Python is not supported. `busy`: the word
    Collectives.busy."""

    def table(self, plan: Plan) -> Table: ...
    def memory(self, slow: Callable[..., None], busy: ctypes.c_int64) -> Memory | None: ...


# -- plans ---------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """The steps of a collective on arrays of one size and dtype. `call`: what all ranks must announce at its barriers."""

    call: Call
    steps: Sequence[Step]
    dtype: DType
    kind: ReduceKind | None
    job: Job

    def form(self, step: Step) -> Form:
        assert self.kind is not None
        return Form(self.kind, self.dtype, self.job.ranks, step.carried, step.op == "carry")

    def sizes(self, step: Step) -> tuple[int, list[int]]:
        """Bytes of a step's result and of its sources."""
        wide = step.nbytes // self.job.itemsize * self.job.wide
        sources = [wide if step.carried and i == 0 else step.nbytes for i, _ in enumerate(step.sources)]
        return wide if step.op == "carry" else step.nbytes, sources


class Steps:
    """Executes a plan by put, get and barrier. It accesses the heaps directly if they are in this process's memory (`heap`)."""

    def __init__(self, transport: SymmetricTransport, heap: SymmetricHeap | None, plan: Plan) -> None:
        self.transport, self.heap, self.plan = transport, heap, plan

    def run(self, array: np.ndarray, out: np.ndarray) -> None:
        together(self.transport, self._run, array, out)

    def _run(self, array: np.ndarray, out: np.ndarray) -> None:
        from rlx.driver.reduce_code import reduction  # imports the compiler, which only ranks need

        own = {MINE: array, OUT: out}
        for step in self.plan.steps:
            if step.op == "barrier":
                self.transport.barrier(self.plan.call)
                continue
            nbytes, sizes = self.plan.sizes(step)
            inputs = [self._read(source, size, own) for source, size in zip(step.sources, sizes)]
            goal = self._bytes(step.out, nbytes, own)
            result = np.empty(nbytes, np.uint8) if goal is None else goal
            if step.op == "copy":
                result[...] = inputs[0]
            else:
                reduction(self.plan.form(step))(result, inputs)
            if goal is None:
                self.transport.put(self._buffer(step.out, nbytes), result)

    def _buffer(self, place: Address, nbytes: int) -> SymmetricBuffer:
        return SymmetricBuffer(Rank(place.where), self.plan.call.offset + place.at, nbytes)

    def _bytes(self, place: Address, nbytes: int, own: Mapping[int, np.ndarray]) -> np.ndarray | None:
        """The bytes at `place`, shared. None: they are in a heap outside this process."""
        if place.where < 0:
            return own[place.where][place.at : place.at + nbytes]
        return self.heap.bytes(self._buffer(place, nbytes)) if self.heap else None

    def _read(self, place: Address, nbytes: int, own: Mapping[int, np.ndarray]) -> np.ndarray:
        found = self._bytes(place, nbytes, own)
        if found is None:
            found = np.empty(nbytes, np.uint8)
            self.transport.get(self._buffer(place, nbytes), found)
        return found


class Collectives:
    """State of one transport: measured figures, plans, and code. Stored in its attribute `collectives`."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.me, self.ranks = transport, transport.this_rank.index, transport.num_ranks
        self.heap = transport.heap if isinstance(transport, SharedMemory) else None
        self.base = self.heap.bytes(SymmetricBuffer(Rank(0), 0, 0)).ctypes.data if self.heap else 0  # where the heaps begin
        self.figures: Figures | None = None
        self.plans: OrderedDict[Any, Table] = OrderedDict()
        self.busy = ctypes.c_int64()  # the id of the thread or program that uses this transport now; 0: none
        self.loaded = 0  # number of programs loaded so far
        self.memory = transport.memory(self.all_reduce, self.busy) if isinstance(transport, Compiled) else None
        self.fast = self.memory.function if self.memory else self.all_reduce

    def claim(self, who: int) -> None:
        """Only `who` may use the transport until it calls `release`. CollectiveError: it is in use already."""
        if self.busy.value not in (0, who):
            raise CollectiveError("another thread is using this transport; only one thread at a time may use it")
        self.busy.value = who

    def release(self, who: int) -> None:
        if self.busy.value == who:
            self.busy.value = 0

    def all_reduce(self, buffer: Any, array: Any, kind: Any, algorithm: Algorithm | None = None) -> None:
        table = self.run(What.ALL_REDUCE, buffer, array, array, kind, 0, algorithm)
        if self.memory and not algorithm and not self._is_scratch(buffer, array):  # `memory` makes all tables of its transport
            self.memory.remember(buffer, kind, array, table)

    def run(
        self, what: What, buffer: Any, array: Any, out: Any, kind: Any = None, root: int = 0, algorithm: Algorithm | None = None
    ) -> Table:
        dtype = self._check(buffer, array, kind, root, what)
        if algorithm is not None and not isinstance(algorithm, str):
            raise CallMismatchError(f"there is no algorithm {algorithm!r}; there are {known(ALGORITHMS)}")
        in_place = self._is_scratch(buffer, array)
        if what not in IN_PLACE:
            self._check_out(out, array, buffer)
        key = what, buffer.offset, array.shape, dtype, kind, root, algorithm, in_place
        self.claim(me := threading.get_ident())
        try:
            found = self.plans.get(key)
            if found is None:
                found = self.plans[key] = self.prepare(what, buffer, array, dtype, kind, root, algorithm, in_place)
                if len(self.plans) > PLANS:
                    self.plans.popitem(last=False)
            found.run(array.reshape(-1).view(np.uint8), out.reshape(-1).view(np.uint8))
        finally:
            self.release(me)
        return found

    # -- checks of arguments

    def _check(self, buffer: Any, array: Any, kind: Any, root: Any, what: What) -> DType:
        check_bounds(buffer, self.ranks, self.transport.heap_size)
        if buffer.rank.index != self.me:
            raise CallMismatchError(f"scratch must be in the caller's own heap, that of rank {self.me}; got {buffer}")
        if not _is_plain(array) or not array.flags.c_contiguous:
            raise CallMismatchError(f"expected a C-contiguous numpy array, got {_described(array)}")
        if array.nbytes != buffer.len:
            raise CallMismatchError(f"scratch of {buffer.len} bytes for an array of {array.nbytes}: both must be equally long")
        if what in IN_PLACE and not array.flags.writeable:
            raise CallMismatchError("the array is read-only, but this collective writes its result in place")
        dtype = as_dtype(array.dtype)
        if what in (What.ALL_REDUCE, What.REDUCE_SCATTER):
            accumulator(dtype)
            if not isinstance(kind, ReduceKind):
                raise CallMismatchError(f"{kind!r} is not a ReduceKind; there are {known(k.name for k in ReduceKind)}")
        if not 0 <= root < self.ranks:
            raise UnknownRankError(f"root is rank {root}; there are {self.ranks}, from 0")
        return dtype

    def _check_out(self, out: Any, array: np.ndarray, buffer: SymmetricBuffer) -> None:
        if not (_is_plain(out) and out.flags.c_contiguous and out.flags.writeable):
            raise CallMismatchError(f"expected a writable C-contiguous numpy array for the result, got {_described(out)}")
        if np.may_share_memory(out, array) or self._whose_scratch(out, buffer):
            raise CallMismatchError("the result's array overlaps the operand's, or the scratch of a rank")

    def _is_scratch(self, buffer: SymmetricBuffer, array: np.ndarray) -> bool:
        """Whether the array is this rank's scratch. CallMismatchError: it overlaps a part of it, or another rank's scratch."""
        ranks = self._whose_scratch(array, buffer)
        if self.heap and ranks and (ranks != [self.me] or array.ctypes.data != self.heap.bytes(buffer).ctypes.data):
            raise CallMismatchError(f"the array overlaps a part of the scratch, {buffer}, or the scratch of another rank")
        return bool(ranks)

    def _whose_scratch(self, array: np.ndarray, buffer: SymmetricBuffer) -> list[int]:
        """The ranks whose scratch overlaps a contiguous array."""
        if self.heap is None or not array.size:
            return []
        first, stride = array.ctypes.data - self.base, self.heap.stride
        end = first + array.nbytes
        if end <= 0 or first >= self.ranks * stride:
            return []
        starts = (r * stride + buffer.offset for r in range(self.ranks))
        return [r for r, start in enumerate(starts) if first < start + buffer.len and start < end]

    # -- plans

    def prepare(
        self, what: What, buffer: SymmetricBuffer, array: np.ndarray, dtype: DType, kind: Any, root: int, algorithm: Any,
        in_place: bool,
    ) -> Table:  # fmt: skip
        wide = accumulator(dtype).itemsize if kind else dtype.itemsize
        job = Job(what, self.ranks, self.me, array.size, dtype.itemsize, wide, root, in_place)
        way = 1 + list(ALGORITHMS).index(algorithm) if algorithm in ALGORITHMS else 0
        which = list(DTYPES).index(dtype.name)
        detail = detail_of(dtype=which, kind=kind.value if kind else 0, way=way, in_place=in_place, root=root)
        call = Call(what, buffer.offset, buffer.len, detail)
        ways = possible(job)
        if algorithm is not None and algorithm not in ways:
            raise CallMismatchError(f"algorithm {algorithm!r} cannot do this; there are {known(ways)}")
        if algorithm is None and len(ways) > 1 and job.nbytes > SMALL and self.figures is None:
            self.figures = together(self.transport, self._measure, call, buffer)
        shared = self.heap is not None
        algorithm = algorithm or choose(job, self.figures if job.nbytes > SMALL else None, shared)
        plan = Plan(call, schedule(job, algorithm, shared), dtype, kind, job)
        return self.table(plan)

    def table(self, plan: Plan) -> Table:
        """The plan as the transport's own machine code, or as Steps."""
        code: Any = self.transport
        return code.table(plan) if isinstance(code, Compiled) else Steps(self.transport, self.heap, plan)

    # -- figures

    def _measure(self, call: Call, scratch: SymmetricBuffer) -> Figures:
        """Rank 0's figures, on all ranks, so that all choose the same algorithm. All ranks read at once, as in a collective."""
        barrier, get = self.transport.barrier, self.transport.get
        barrier(call)
        size = min(PROBE, self.transport.heap_size)
        whole, few = np.empty(size, np.uint8), np.empty(min(64, size), np.uint8)

        def took(act: Callable[[], None]) -> float:
            times = []
            for _ in range(5):
                start = time.perf_counter()
                act()
                times.append(time.perf_counter() - start)
                barrier(call)
            return sorted(times)[len(times) // 2]

        def read(by: int, into: np.ndarray) -> float:
            source = SymmetricBuffer(Rank((self.me + by) % self.ranks), 0, into.nbytes)
            return took(lambda: get(source, into))

        delay = 0.0 if self.heap else read(1, few)  # shared memory is read without a message
        near, far = ((read(by, whole) - delay) / size for by in (1, max(1, self.ranks // 2)))
        found = np.array([took(lambda: barrier(call)), delay, max(near, 1e-13), max(far, 1e-13)])
        first = SymmetricBuffer(Rank(0), scratch.offset, found.nbytes)
        kept = np.empty_like(found)
        if self.me == 0:  # the scratch may be the array itself
            get(first, kept)
            self.transport.put(first, found)
        barrier(call)
        get(first, found)
        barrier(call)
        if self.me == 0:
            self.transport.put(first, kept)
        return Figures(*found.tolist())


def _is_plain(array: Any) -> bool:
    """Whether it is a plain array of numbers. Subclasses such as masked arrays are not."""
    return type(array) is np.ndarray or isinstance(array, np.memmap)


def _described(array: Any) -> str:
    return f"an array with strides {array.strides}" if _is_plain(array) else type(array).__name__


def collectives_of(transport: Any) -> Collectives:
    """The Collectives of a transport, made on first use."""
    found = getattr(transport, "collectives", None)
    if found is None:
        found = transport.collectives = Collectives(transport)
    return found


# -- public functions ----------------------------------------------------------------------------------------------


def all_reduce(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, kind: ReduceKind = ReduceKind.SUM,
    algorithm: Algorithm | None = None,
) -> None:  # fmt: skip
    """Combine the arrays of all ranks in rank order; every rank gets the result in place. `array`: any shape; it may be the
    scratch itself.

    `algorithm`: use this one instead of the one predicted to be fastest. The bits are the same."""
    if algorithm is None:
        try:
            fast = transport.collectives.fast  # pyright: ignore
        except AttributeError:
            fast = None  # first call on this transport
        (fast or collectives_of(transport).fast)(buffer, array, kind)
    else:
        collectives_of(transport).all_reduce(buffer, array, kind, algorithm)


def all_gather(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """The arrays of all ranks, [ranks, *array.shape], on every rank. `out`: write to this array instead of a fresh one."""
    out = _result(array, (transport.num_ranks, *_shape(array)), out)
    collectives_of(transport).run(What.ALL_GATHER, buffer, array, out)
    return out


def reduce_scatter(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, kind: ReduceKind = ReduceKind.SUM,
    out: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """This rank's part of the result of all_reduce: [ranks * d, …] -> [d, …], part r for rank r."""
    dims = _parted(transport.num_ranks, array)
    out = _result(array, (dims[0] // transport.num_ranks, *dims[1:]), out)
    collectives_of(transport).run(What.REDUCE_SCATTER, buffer, array, out, kind)
    return out


def broadcast(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, root: int | Rank = 0,
    algorithm: Algorithm | None = None,
) -> None:  # fmt: skip
    """Copy the array of rank `root` to all ranks, in place. `array` may be the scratch itself. `algorithm`: as in all_reduce."""
    try:
        whose = index(root)
    except TypeError:
        raise UnknownRankError(f"root must be the number of a rank, got {root!r}") from None
    collectives_of(transport).run(What.BROADCAST, buffer, array, array, None, whose, algorithm)


def all_to_all(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """[ranks * d, …] -> the same shape. Part r of the array goes to rank r; part r of the result came from rank r."""
    _parted(transport.num_ranks, array)
    out = _result(array, _shape(array), out)
    collectives_of(transport).run(What.ALL_TO_ALL, buffer, array, out)
    return out


def _shape(array: Any) -> tuple[int, ...]:
    if not _is_plain(array):
        raise CallMismatchError(f"expected a C-contiguous numpy array, got {_described(array)}")
    return array.shape


def _parted(ranks: int, array: Any) -> tuple[int, ...]:
    dims = _shape(array)
    if not dims or dims[0] % ranks:
        raise CallMismatchError(f"the first dim of an array of shape {dims} cannot be split evenly over {ranks} ranks")
    return dims


def _result(array: Any, dims: tuple[int, ...], out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return np.empty(dims, array.dtype)
    if not _is_plain(out) or out.shape != dims or out.dtype != array.dtype:
        raise CallMismatchError(f"the result is {array.dtype} {dims}, `out` is {_described(out)}: {getattr(out, 'shape', '')}")
    return out
