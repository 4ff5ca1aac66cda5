"""Collectives over any transport: all_reduce, all_gather, reduce_scatter, broadcast, all_to_all.

All ranks call the same one with the same sizes, and with scratch of `array.nbytes` bytes at the same place of their heaps, which
is theirs again afterwards (with what is anybody's guess in it). Ranks that call different things get a CallMismatchError,
each of them, before any array has changed; a call that is wrong in itself (HeapBoundsError, UnknownRankError, and
CallMismatchError where array and scratch do not fit) is refused on that rank alone, at once.

A reduction means rlx.driver.reduction.combine: elements in rank order, 16- and 8-bit floats carried in f32, integers in 64
bits, rounded once. Every algorithm (rlx.driver.schedule), transport and size gives these bits, on all ranks; any NaN counts as
any other. Machine code does the same, numpy where there is none.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import index
from statistics import median
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from rlx import host
from rlx.driver.barrier import Call, detail_of
from rlx.driver.reduction import Form, ReduceKind, Reduction, accumulator, numpy_reduction
from rlx.driver.schedule import (
    ALGORITHMS,
    MINE,
    OUT,
    SMALL,
    Algorithm,
    Figures,
    Job,
    Place,
    Step,
    What,
    choose,
    possible,
    schedule,
)
from rlx.driver.symmetric import Rank, SharedMemory, SymmetricBuffer, SymmetricHeap, SymmetricTransport, check_place
from rlx.errors import CallMismatchError, CollectiveError, UnknownRankError, known
from rlx.ir.dtype import DTYPES, DType, as_dtype

IN_PLACE = (What.ALL_REDUCE, What.BROADCAST)  # the result is where the operand was
PLANS = 256  # prepared calls kept for each transport
PROBE = 1 << 20  # bytes read to learn what a byte takes


Result = TypeVar("Result")


class Table(Protocol):
    def run(self, array: np.ndarray, out: np.ndarray) -> None:
        """A plan's steps on these bytes."""
        ...


class Memory(Protocol):
    """Calls of all_reduce over one transport: `function` (buffer, array, kind) knows those that were remembered."""

    function: Callable[..., None]

    def remember(self, buffer: SymmetricBuffer, kind: ReduceKind, array: np.ndarray, table: Any) -> None: ...


@runtime_checkable
class Compiled(Protocol):
    """A transport with machine code of its own for plans. None: not in this process. `busy`: of Collectives."""

    def table(self, plan: Plan) -> Table | None: ...
    def memory(self, slow: Callable[..., None], busy: ctypes.c_int64) -> Memory | None: ...


@cache
def reduction(form: Form) -> Reduction:
    """In machine code where it can be made, else in numpy: the same bits."""
    if not host.available():
        return numpy_reduction(form)
    from rlx.driver import reduce_code  # compiles, which only ranks need

    return reduce_code.reduction(form)


# -- plans ---------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """A collective on arrays of one size and dtype: what is to be done. `call`: what all ranks must come with."""

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


def together(transport: SymmetricTransport, act: Callable[..., Result], *args: Any) -> Result:
    """act(*args), which all ranks do: whoever is interrupted has left it half done, would mix it up with the next one, and is of
    no use to the others from then on."""
    try:
        return act(*args)
    except CollectiveError:
        raise
    except BaseException:
        abandon(transport)
        raise


def abandon(transport: SymmetricTransport) -> None:
    """Leave what the others are about to do, or have done in part; they are told."""
    getattr(transport, "abandon", transport.close)()


class Steps:
    """A plan's steps by put, get and barrier; in place where the heaps lie in this memory (`heap`)."""

    def __init__(self, transport: SymmetricTransport, heap: SymmetricHeap | None, plan: Plan) -> None:
        self.transport, self.heap, self.plan = transport, heap, plan

    def run(self, array: np.ndarray, out: np.ndarray) -> None:
        together(self.transport, self._run, array, out)

    def _run(self, array: np.ndarray, out: np.ndarray) -> None:
        own = {MINE: array, OUT: out}
        for step in self.plan.steps:
            if step.op == "meet":
                self.transport.barrier(self.plan.call)
                continue
            nbytes, sizes = self.plan.sizes(step)
            inputs = [self._read(source, size, own) for source, size in zip(step.sources, sizes)]
            goal = self._place(step.out, nbytes, own)
            result = np.empty(nbytes, np.uint8) if goal is None else goal
            if step.op == "copy":
                result[...] = inputs[0]
            else:
                reduction(self.plan.form(step))(result, inputs)
            if goal is None:
                self.transport.put(self._buffer(step.out, nbytes), result)

    def _buffer(self, place: Place, nbytes: int) -> SymmetricBuffer:
        return SymmetricBuffer(Rank(place.where), self.plan.call.offset + place.at, nbytes)

    def _place(self, place: Place, nbytes: int, own: Mapping[int, np.ndarray]) -> np.ndarray | None:
        """The bytes themselves; None: in a heap that lies elsewhere."""
        if place.where < 0:
            return own[place.where][place.at : place.at + nbytes]
        return self.heap.bytes(self._buffer(place, nbytes)) if self.heap else None

    def _read(self, place: Place, nbytes: int, own: Mapping[int, np.ndarray]) -> np.ndarray:
        found = self._place(place, nbytes, own)
        if found is None:
            found = np.empty(nbytes, np.uint8)
            self.transport.get(self._buffer(place, nbytes), found)
        return found


class Collectives:
    """What is known of one transport: its figures, plans, and code. Kept in its attribute `collectives`."""

    def __init__(self, transport: Any) -> None:
        self.transport, self.me, self.ranks = transport, transport.this_rank.index, transport.num_ranks
        self.heap = transport.heap if isinstance(transport, SharedMemory) else None
        self.base = self.heap.bytes(SymmetricBuffer(Rank(0), 0, 0)).ctypes.data if self.heap else 0  # where the heaps begin
        self.figures: Figures | None = None
        self.plans: OrderedDict[Any, Table] = OrderedDict()
        self.busy = ctypes.c_int64()  # not 0: who is at work with this transport
        self.loaded = 0  # programs so far
        self.memory = transport.memory(self.all_reduce, self.busy) if isinstance(transport, Compiled) else None
        self.fast = self.memory.function if self.memory else self.all_reduce

    def claim(self, who: int) -> None:
        """Until its release only `who` is at work. CollectiveError: another one is."""
        if self.busy.value not in (0, who):
            raise CollectiveError("another thread is at work with this transport, which is used by one thread at a time")
        self.busy.value = who

    def release(self, who: int) -> None:
        if self.busy.value == who:
            self.busy.value = 0

    def all_reduce(self, buffer: Any, array: Any, kind: Any, algorithm: Algorithm | None = None) -> None:
        table = self.run(What.ALL_REDUCE, buffer, array, array, kind, 0, algorithm)
        if self.memory and not algorithm and not self._is_scratch(buffer, array):  # it knows all tables of its transport
            self.memory.remember(buffer, kind, array, table)

    def run(
        self, what: What, buffer: Any, array: Any, out: Any, kind: Any = None, root: int = 0, algorithm: Algorithm | None = None
    ) -> Table:
        dtype = self._check(buffer, array, kind, root, what)
        if algorithm is not None and not isinstance(algorithm, str):
            raise CallMismatchError(f"algorithm {algorithm!r} is none; there are {known(ALGORITHMS)}")
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

    # -- what was passed

    def _check(self, buffer: Any, array: Any, kind: Any, root: Any, what: What) -> DType:
        check_place(buffer, self.ranks, self.transport.heap_size)
        if buffer.rank.index != self.me:
            raise CallMismatchError(f"scratch is a place in this rank's own heap, that of rank {self.me}; got {buffer}")
        if not _is_plain(array) or not array.flags.c_contiguous:
            raise CallMismatchError(f"expected a C-contiguous numpy array, got {_described(array)}")
        if array.nbytes != buffer.len:
            raise CallMismatchError(f"scratch of {buffer.len} bytes ({buffer}) for an array of {array.nbytes} bytes")
        if what in IN_PLACE and not array.flags.writeable:
            raise CallMismatchError("the array is changed in place, and this one is read-only")
        dtype = as_dtype(array.dtype)
        if what in (What.ALL_REDUCE, What.REDUCE_SCATTER):
            accumulator(dtype)
            if not isinstance(kind, ReduceKind):
                raise CallMismatchError(f"{kind!r} is no ReduceKind; there are {known(k.name for k in ReduceKind)}")
        if not 0 <= root < self.ranks:
            raise UnknownRankError(f"root is rank {root}; there are {self.ranks}, from 0")
        return dtype

    def _check_out(self, out: Any, array: np.ndarray, buffer: SymmetricBuffer) -> None:
        if not (_is_plain(out) and out.flags.c_contiguous and out.flags.writeable):
            raise CallMismatchError(f"expected a writable C-contiguous numpy array for the result, got {_described(out)}")
        if np.may_share_memory(out, array) or self._whose_scratch(out, buffer):
            raise CallMismatchError("the result's array lies over the operand's, or over the scratch of a rank")

    def _is_scratch(self, buffer: SymmetricBuffer, array: np.ndarray) -> bool:
        """Whether the array is this rank's scratch. CallMismatchError: it lies over a part of that, or over another rank's."""
        ranks = self._whose_scratch(array, buffer)
        if self.heap and ranks and (ranks != [self.me] or array.ctypes.data != self.heap.bytes(buffer).ctypes.data):
            raise CallMismatchError(f"the array lies over a part of the scratch, {buffer}, or over that of another rank")
        return bool(ranks)

    def _whose_scratch(self, array: np.ndarray, buffer: SymmetricBuffer) -> list[int]:
        """The ranks over whose scratch a contiguous array lies."""
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
        """The plan in the transport's own code, or by its copies and barriers."""
        code: Any = self.transport
        made = code.table(plan) if isinstance(code, Compiled) else None
        return made or Steps(self.transport, self.heap, plan)

    # -- figures

    def _measure(self, call: Call, scratch: SymmetricBuffer) -> Figures:
        """Rank 0's figures, on all ranks: they choose alike. All read at once, as they do in a collective."""
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
            return median(times)

        def read(by: int, into: np.ndarray) -> float:
            source = SymmetricBuffer(Rank((self.me + by) % self.ranks), 0, into.nbytes)
            return took(lambda: get(source, into))

        delay = 0.0 if self.heap else read(1, few)  # what lies in this memory is read without a message
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
    """An array of numbers and nothing else, as those with masks are not."""
    return type(array) is np.ndarray or isinstance(array, np.memmap)


def _described(array: Any) -> str:
    return f"one of strides {array.strides}" if _is_plain(array) else type(array).__name__


def collectives_of(transport: Any) -> Collectives:
    """What is known of the transport; made when first asked for."""
    found = getattr(transport, "collectives", None)
    if found is None:
        found = transport.collectives = Collectives(transport)
    return found


# -- what people call ----------------------------------------------------------------------------------------------


def all_reduce(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, kind: ReduceKind = ReduceKind.SUM,
    algorithm: Algorithm | None = None,
) -> None:  # fmt: skip
    """Every rank's array combined in rank order, in place, on every rank. `array`: any shape; it may be the scratch itself.

    `algorithm`: not the one that is thought to be fastest but this one. The bits are the same."""
    if algorithm is None:
        try:
            fast = transport.collectives.fast  # pyright: ignore
        except AttributeError:
            fast = None  # the first one
        (fast or collectives_of(transport).fast)(buffer, array, kind)
    else:
        collectives_of(transport).all_reduce(buffer, array, kind, algorithm)


def all_gather(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """Every rank's array, [ranks, *array.shape], on every rank. `out`: where to put it, instead of a fresh array."""
    out = _result(array, (transport.num_ranks, *_shape(array)), out)
    collectives_of(transport).run(What.ALL_GATHER, buffer, array, out)
    return out


def reduce_scatter(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, kind: ReduceKind = ReduceKind.SUM,
    out: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """This rank's part of what all_reduce gives: [ranks * d, …] -> [d, …], part r for rank r."""
    dims = _parted(transport.num_ranks, array)
    out = _result(array, (dims[0] // transport.num_ranks, *dims[1:]), out)
    collectives_of(transport).run(What.REDUCE_SCATTER, buffer, array, out, kind)
    return out


def broadcast(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, root: int | Rank = 0,
    algorithm: Algorithm | None = None,
) -> None:  # fmt: skip
    """The array of rank `root`, in place, on every rank. `array` may be the scratch itself; `algorithm` as of all_reduce."""
    try:
        whose = index(root)
    except TypeError:
        raise UnknownRankError(f"root is the number of a rank, got {root!r}") from None
    collectives_of(transport).run(What.BROADCAST, buffer, array, array, None, whose, algorithm)


def all_to_all(
    transport: SymmetricTransport, buffer: SymmetricBuffer, array: np.ndarray, out: np.ndarray | None = None
) -> np.ndarray:
    """[ranks * d, …] -> the same shape: part r goes to rank r, and of the result part r came from rank r."""
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
        raise CallMismatchError(f"{ranks} ranks cannot share the first dim of an array of shape {dims} equally")
    return dims


def _result(array: Any, dims: tuple[int, ...], out: np.ndarray | None) -> np.ndarray:
    if out is None:
        return np.empty(dims, array.dtype)
    if not _is_plain(out) or out.shape != dims or out.dtype != array.dtype:
        raise CallMismatchError(f"the result is {array.dtype} {dims}, `out` is {_described(out)}: {getattr(out, 'shape', '')}")
    return out
