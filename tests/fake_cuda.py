"""A CUDA driver without a GPU: memory of the host, streams that run nothing before somebody waits for them, events between them,
graphs, interpreted kernels.

It shows what the executable asks of a driver, and in which order; it says nothing about generated code.

`installed(driver)` puts it where rlx looks for the real one. `driver.answers[function]` is the status of its next calls.
"""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache, partial, wraps
from inspect import unwrap
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rlx.backends import get
from rlx.backends.cuda import backend, gpu
from rlx.backends.cuda.code import CudaCode, Kernels
from rlx.backends.cuda.render import may_fail
from rlx.backends.cuda.segments import of_groups
from rlx.backends.ref.interpret import run_kernel
from rlx.backends.shared.packed import panel
from rlx.driver.memory import MEMORIES
from rlx.ir.blocks import Panel
from rlx.ir.dtype import f32, u8
from rlx.ir.kernel import Buffer, Contract, Kernel, Load, Operand, Store, Var, k

Status = IntEnum("Status", {
    "CUDA_SUCCESS": 0, "CUDA_ERROR_INVALID_VALUE": 1, "CUDA_ERROR_OUT_OF_MEMORY": 2, "CUDA_ERROR_NO_DEVICE": 100,
    "CUDA_ERROR_NOT_READY": 600, "CUDA_ERROR_ILLEGAL_ADDRESS": 700,
})  # fmt: skip
OK = Status.CUDA_SUCCESS
GRANULE = 4096  # bytes of the smallest piece of memory


class Names:
    """An enumeration whose members are their own names."""

    def __getattr__(self, name: str) -> str:
        return name


class Loaded(str):
    """A kernel by its name; as a pointer, its number."""

    def __new__(cls, name: str, number: int) -> Loaded:
        found = super().__new__(cls, name)
        found.number = number
        return found

    def __int__(self) -> int:
        return self.number


def counted(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """A function of the driver: one thread at a time, counted, and with the answer that a test has set for it."""
    name = function.__name__

    @wraps(function)
    def call(self: FakeDriver, *given: Any) -> tuple[Any, ...]:
        with self._lock:
            self.calls[name] += 1
            status: Any = self.answers.get(name, OK)
            return function(self, *given) if status == OK else (status,)

    return call


class FakeDriver:
    """`devices`: compute capability of each GPU. `memory`: bytes of a GPU. `kernels`: by name. `calls`: number by function.
    `grants`: how many allocations succeed from now on; None: all that there is room for."""

    CU_MEMHOSTALLOC_PORTABLE, CU_MEMHOSTALLOC_DEVICEMAP = 1, 2
    CUdevice_attribute = CUfunction_attribute = CUstreamCaptureMode = CUpointer_attribute = Names()

    def __init__(self, devices: Sequence[int] = (90,), memory: int = 1 << 30) -> None:
        self.devices, self.free, self.kernels = list(devices), memory, dict[str, Sequence[Kernel]]()
        self.answers: dict[str, Status] = {}
        self.calls: Counter[str] = Counter()
        self.attributes: dict[tuple[str, str], int] = {}  # by function and name
        self.clusters: dict[str, int] = {}  # blocks of a cluster, by kernel
        self.most_clusters = 66
        self.waited: list[int] = []  # streams
        self.order: list[tuple[str, Any]] = []  # of events on streams
        self.passed: dict[int, int] = {}  # by event with a time: when it was last reached, in nanoseconds
        self.blocks: dict[int, Any] = {}
        self.grants: int | None = None
        self.pinned: set[int] = set()
        self.reserved, self.mapped = set[int](), dict[int, int]()  # addresses; memory at some of them, with its bytes
        self._queued: dict[int, deque[Callable[[], Any]]] = defaultdict(deque)  # by stream
        self._tickets: dict[int, tuple[int, list[bool]]] = {}  # by event: the stream that records it, whether it has passed
        self._graphs: dict[int, list[Callable[[], None]]] = {}
        self.loaded: list[str] = []  # kernels
        self._given: list[int] = []  # memory to free behind the queues
        self._running = False
        self._entries: list[Any] = []
        self._lock = threading.RLock()
        self._recording: dict[str, list[Callable[[], None]]] = {}  # by stream

    # -- devices

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return (OK,)

    def cuDeviceGetCount(self) -> tuple[Any, ...]:
        return OK, len(self.devices)

    def cuDeviceGet(self, index: int) -> tuple[Any, ...]:
        return OK, index

    def cuDeviceGetName(self, length: int, device: int) -> tuple[Any, ...]:
        return OK, b"Fake GPU\0\0"

    def cuDeviceTotalMem(self, device: int) -> tuple[Any, ...]:
        return OK, self.free

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> tuple[Any, ...]:
        major, minor = divmod(self.devices[device], 10)
        return OK, major if attribute.endswith("_MAJOR") else minor if attribute.endswith("_MINOR") else 132

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[Any, ...]:
        return OK, 100 + device

    def cuCtxSetCurrent(self, context: int) -> tuple[Any, ...]:
        return (OK,)

    # -- memory

    def _take(self, nbytes: int) -> tuple[Any, ...]:
        if nbytes > self.free or self.grants == 0:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY,)
        self.grants = None if self.grants is None else self.grants - 1
        block = (ctypes.c_uint8 * (nbytes + 256))(*[0xEE] * 0)
        address = ctypes.addressof(block)
        self.blocks[address := address + -address % 256] = block, nbytes
        self.free -= nbytes
        return OK, address

    def _give(self, address: int) -> tuple[Any, ...]:
        """Freed behind the commands that are queued; by the garbage collector perhaps in the middle of one of them."""
        self._given.append(address)
        self.run()
        return (OK,)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, ...]:
        return self._take(nbytes)

    def cuMemFree(self, address: int) -> tuple[Any, ...]:
        return self._give(address)

    def cuMemHostAlloc(self, nbytes: int, flags: int) -> tuple[Any, ...]:
        free, self.free = self.free, nbytes  # it is not the GPU's
        status, *found = self._take(nbytes)
        self.free = free
        self.pinned.update(found)
        return status, *found

    def cuMemFreeHost(self, address: int) -> tuple[Any, ...]:
        return self._give(address)

    # -- addresses whose memory comes in pieces

    CUmemAllocationType = CUmemAccess_flags = CUmemLocationType = CUmemAllocationGranularity_flags = Names()

    def CUmemAllocationProp(self) -> SimpleNamespace:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuMemGetAllocationGranularity(self, kind: Any, which: Any) -> tuple[Any, ...]:
        return OK, GRANULE

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple[Any, ...]:
        free, self.free = self.free, nbytes  # addresses are no memory
        status, *found = self._take(nbytes)
        self.free = free
        self.reserved.update(found)
        return status, *found

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple[Any, ...]:
        assert not any(address <= at < address + nbytes for at in self.mapped)
        self.reserved.discard(address)
        self.pinned.add(address)  # gives no memory back
        return self._give(address)

    def cuMemCreate(self, nbytes: int, kind: Any, flags: int) -> tuple[Any, ...]:
        if nbytes > self.free or nbytes % GRANULE:
            return (Status.CUDA_ERROR_OUT_OF_MEMORY,)
        self.free -= nbytes
        return OK, 1 + self.calls["cuMemCreate"]

    def cuMemMap(self, address: int, nbytes: int, offset: int, made: int, flags: int) -> tuple[Any, ...]:
        assert address not in self.mapped
        self.mapped[address] = nbytes
        ctypes.memset(address, 0xCB, nbytes)
        return (OK,)

    def cuMemRelease(self, made: int) -> tuple[Any, ...]:
        return (OK,)

    def cuMemSetAccess(self, address: int, nbytes: int, access: Any, count: int) -> tuple[Any, ...]:
        return (OK,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple[Any, ...]:
        assert self.mapped.pop(address) == nbytes
        ctypes.memset(address, 0xCB, nbytes)  # a kernel that reads it now would fault
        self.free += nbytes
        return (OK,)

    def cuMemGetInfo(self) -> tuple[Any, ...]:
        return OK, self.free, 1 << 30

    def cuMemsetD8Async(self, address: int, byte: int, nbytes: int, stream: Any) -> tuple[Any, ...]:
        return self._queue(stream, lambda: ctypes.memset(address, byte, nbytes))

    def cuMemsetD32Async(self, address: int, value: int, count: int, stream: Any) -> tuple[Any, ...]:
        return self._queue(stream, lambda: words(address, count, np.uint32).fill(value))

    def cuMemcpyHtoDAsync(self, to: int, source: int, nbytes: int, stream: Any) -> tuple[Any, ...]:
        assert self._is_there(to, nbytes)
        if self._is_pinned(source):
            return self._queue(stream, lambda: ctypes.memmove(to, source, nbytes))
        held = ctypes.string_at(source, nbytes)  # pageable memory is read before the call returns
        return self._queue(stream, lambda: ctypes.memmove(to, held, nbytes))

    def cuMemcpyDtoHAsync(self, to: int, source: int, nbytes: int, stream: Any) -> tuple[Any, ...]:
        assert self._is_there(source, nbytes)
        self._queue(stream, lambda: ctypes.memmove(to, source, nbytes))
        if not self._is_pinned(to):  # pageable memory has been written when the call returns
            self.run(stream)
        return (OK,)

    def _is_there(self, address: int, nbytes: int) -> bool:
        """Whether reserved addresses have memory."""
        begins = [a for a in self.reserved if a <= address < a + self.blocks[a][1]]
        there = sum(max(0, min(a + n, address + nbytes) - max(a, address)) for a, n in self.mapped.items())
        return not begins or there == nbytes

    def _is_pinned(self, address: int) -> bool:
        return any(a <= address < a + self.blocks[a][1] for a in self.pinned)

    def cuPointerGetAttribute(self, attribute: str, address: int) -> tuple[Any, ...]:
        own = any(a <= address < a + n for a, (_, n) in self.blocks.items()) and not self._is_pinned(address)
        return (OK, 0) if own else (Status.CUDA_ERROR_INVALID_VALUE, None)

    def cuMemcpyDtoDAsync(self, to: int, source: int, nbytes: int, stream: Any) -> tuple[Any, ...]:
        assert self._is_there(source, nbytes) and self._is_there(to, nbytes)
        return self._queue(stream, lambda: ctypes.memmove(to, source, nbytes))

    # -- streams and graphs

    def _queue(self, stream: int, command: Callable[[], Any]) -> tuple[Any, ...]:
        (self._recording[stream] if stream in self._recording else self._queued[stream]).append(command)
        return (OK,)

    def run(self, *streams: int) -> None:
        """Until nothing is queued in these streams, and in those that they wait for. None: in all."""
        if self._running:
            return
        with self._lock:
            self._running = True
            try:
                for stream in streams or list(self._queued):
                    while self._queued[stream]:
                        self._next(stream)
            finally:
                self._running = False
        while self._given and not any(self._queued.values()):
            address = self._given.pop()
            nbytes = self.blocks.pop(address)[1]
            self.free += 0 if address in self.pinned else nbytes
            self.pinned.discard(address)

    def _next(self, stream: int) -> None:
        """Run one command to its end: the garbage collector may free memory within it, and `run` comes back later."""
        running, self._running = self._running, True
        try:
            self._queued[stream].popleft()()
        except BaseException:  # what is behind it would run on memory that its error frees
            self._queued.clear()
            raise
        finally:
            self._running = running

    def _until(self, stream: int, passed: list[bool]) -> None:
        with self._lock:
            while not passed[0]:
                self._next(stream)

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        number = self.calls["cuStreamCreate"]
        return OK, 7 if number == 1 else 100 + number

    def cuStreamDestroy(self, stream: int) -> tuple[Any, ...]:
        return (OK,)

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any, ...]:
        self.waited.append(stream)
        self.run(stream)
        return (OK,)

    def cuStreamQuery(self, stream: Any) -> tuple[Any, ...]:
        """A look at it lets a command pass."""
        with self._lock:
            if not self._queued[stream]:
                return (OK,)
            self._next(stream)
        return (Status.CUDA_ERROR_NOT_READY,)

    def cuEventCreate(self, flags: int) -> tuple[Any, ...]:
        return OK, self.calls["cuEventCreate"]

    def cuEventRecord(self, event: int, stream: int) -> tuple[Any, ...]:
        self.order.append(("record", stream))
        self._tickets[event] = stream, (passed := [False])
        return self._queue(stream, lambda: passed.__setitem__(0, True))

    def cuEventRecordWithFlags(self, event: int, stream: int, flags: int) -> tuple[Any, ...]:
        """As a node of the graph that is recorded: it notes the time at which it passes."""
        assert flags == 1 and stream in self._recording
        return self._queue(stream, lambda: self.passed.__setitem__(event, time.perf_counter_ns()))

    def cuEventElapsedTime(self, first: int, last: int) -> tuple[Any, ...]:
        return OK, (self.passed[last] - self.passed[first]) / 1e6

    def cuEventDestroy(self, event: int) -> tuple[Any, ...]:
        self.passed.pop(event, None)
        return (OK,)

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> tuple[Any, ...]:
        self.order.append(("wait", stream))
        ticket = self._tickets.get(event, (0, [True]))
        return self._queue(stream, lambda: self._until(*ticket))

    def cuEventQuery(self, event: int) -> tuple[Any, ...]:
        return (OK if self._tickets.get(event, (0, [True]))[1][0] else Status.CUDA_ERROR_NOT_READY,)

    def cuEventSynchronize(self, event: int) -> tuple[Any, ...]:
        self._until(*self._tickets.get(event, (0, [True])))
        return (OK,)

    def cuStreamBeginCapture(self, stream: Any, mode: Any) -> tuple[Any, ...]:
        self._recording[stream] = []
        return (OK,)

    def cuStreamEndCapture(self, stream: Any) -> tuple[Any, ...]:
        return OK, self._recording.pop(stream)

    def cuGraphInstantiate(self, graph: Any, flags: int) -> tuple[Any, ...]:
        self._graphs[number := self.calls["cuGraphInstantiate"]] = list(graph)
        return OK, number

    def cuGraphDestroy(self, graph: Any) -> tuple[Any, ...]:
        return (OK,)

    def cuGraphExecDestroy(self, graph: Any) -> tuple[Any, ...]:
        return (OK,)

    def cuGraphLaunch(self, graph: int, stream: int) -> tuple[Any, ...]:
        self._queued[stream].extend(self._graphs[graph])
        return (OK,)

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[Any, ...]:
        """For machine code, with handles as pointers."""
        count = unwrap(getattr(type(self), name.decode())).__code__.co_argcount - 1
        call = lambda *given: int(getattr(self, name.decode())(*given)[0])  # noqa: E731
        made = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * count)(call)
        self._entries.append(made)
        return OK, ctypes.cast(made, ctypes.c_void_p).value, 0

    CUresult = Status

    # -- kernels

    def cuModuleLoadData(self, image: bytes) -> tuple[Any, ...]:
        return OK, image

    def cuModuleUnload(self, module: Any) -> tuple[Any, ...]:
        return (OK,)

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[Any, ...]:
        self.loaded.append(name.decode())
        return OK, Loaded(name.decode(), len(self.loaded))

    def cuFuncSetAttribute(self, function: str, attribute: str, value: int) -> tuple[Any, ...]:
        self.attributes[function, attribute] = value
        return (OK,)

    def CUlaunchConfig(self) -> SimpleNamespace:
        return SimpleNamespace()

    def CUlaunchAttribute(self) -> SimpleNamespace:
        return SimpleNamespace(value=SimpleNamespace(clusterDim=SimpleNamespace()))

    def cuOccupancyMaxActiveClusters(self, function: str, config: SimpleNamespace) -> tuple[Any, ...]:
        (cluster,) = config.attrs
        width = self.clusters[function]
        assert config.numAttrs == 1 and cluster.id == self.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        assert (cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z) == (width, 1, 1)
        return OK, self.most_clusters

    def cuFuncGetAttribute(self, attribute: str, function: str) -> tuple[Any, ...]:
        assert attribute == self.CUfunction_attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
        return OK, self.clusters.get(function, 0)

    CUlaunchAttributeID = Names()

    def cuLaunchKernelEx(self, config: Any, name: str, values: Any, extra: int) -> tuple[Any, ...]:
        perform = getattr(self, name, None)
        if name == "rlx_log":
            perform = partial(self.rlx_log, config.gridDimX)
        return self._queue(
            config.hStream, lambda: perform(*values[0]) if perform else self._group(self.kernels[name], list(values[0]))
        )

    def cuLaunchKernel(
        self, function: int, x: int, y: int, z: int, across: int, down: int, deep: int, shared: int, stream: int, arguments: int,
        extra: int,
    ) -> tuple[Any, ...]:  # fmt: skip
        """With a number for the kernel, and pointers to its arguments, which are read before the call returns."""
        perform = getattr(self, self.loaded[function - 1])
        values = [int(words(at, 1)[0]) for at in words(arguments, perform.__code__.co_argcount - 1).tolist()]
        return self._queue(stream, lambda: perform(*values))

    def _group(self, kernels: Sequence[Kernel], values: list[int]) -> None:
        for kernel in kernels:
            tiered = 2 * of_groups(kernel)
            count = len(kernel.buffers) + tiered + fails(kernel) + 1
            self._kernel(kernel, values[:count], *values[len(kernel.buffers) :][:tiered])
            values = values[count:]

    def _kernel(self, kernel: Kernel, values: Sequence[int], slots: int = 0, far: int = 0) -> None:
        """`slots`, `far`: where the matrices of groups are (rlx.backends.cuda.experts)."""
        addresses, more, halt = values[: len(kernel.buffers)], values[len(kernel.buffers) : -1], values[-1]
        if halt and words(halt, 1, np.int32)[0]:
            return
        arrays = [words(a, b.size, b.dtype.numpy) for a, b in zip(addresses, kernel.buffers, strict=True)]
        if slots:
            _, groups = kernel.grid[0]
            at = experts_of(kernel)
            held, there = arrays[at].reshape(groups, -1), words(far, arrays[at].size, arrays[at].dtype).reshape(groups, -1)
            of = words(slots, groups, np.int32)
            arrays[at] = np.concatenate([there[e] if slot < 0 else held[slot] for e, slot in enumerate(of)])
        more = more[2 * of_groups(kernel) :]
        if (code := run_kernel(*in_numbers(kernel, arrays))) and more[0]:
            words(more[0], 1, np.int32)[0] = code
            flag = words(int(words(more[0] + 8, 1)[0]), 1, np.int32)
            flag[0] = flag[0] or 1

    def rlx_end(self, watch: int, statuses: int, count: int, report: int) -> None:
        halt, runs, told, status = words(watch, 1, np.int32), words(watch, 2), words(report, 4), words(statuses, 2 * count)
        runs[1] += 1
        if halt[0] == 1:
            first = int(np.flatnonzero(status[::2])[0])
            told[:3] = runs[1], first, status[2 * first] & 0xFFFFFFFF
        if halt[0]:
            status[::2], halt[0] = 0, 2
        told[3] = runs[1]

    def rlx_feed(self, parts: int, count: int, turn: int, ring: int, slot: int, slots: int, taken: int, halt: int) -> None:
        turns, stay = words(turn, 1), words(halt, 1, np.int32)[0]
        for to, source, nbytes, kept in words(parts, 4 * count).reshape(-1, 4).tolist():
            if not (stay and kept):
                ctypes.memmove(to, ring + int(turns[0]) % slots * slot + source, nbytes)
        turns[0] += 1
        if turns[0] % (slots // 4) == 1:
            words(taken, 1)[0] = turns[0]

    def rlx_log(
        self, blocks: int, routers: int, turn: int, ring: int, entry: int, entries: int, told: int, halt: int
    ) -> None:  # fmt: skip
        now, out = words(turn, 1), []
        for ids, slots, wanted, chosen, count, experts in words(routers, 6 * blocks).reshape(-1, 6).tolist():
            found = words(ids, count, np.int32).copy()
            found[:] = 2**31 - 1 if words(halt, 1, np.int32)[0] else found
            if wanted:
                ctypes.memmove(slots, wanted, 4 * experts)
            of = words(slots, experts, np.int32) if slots else np.zeros(experts, np.int32)
            for i in range(chosen):
                if 0 <= found[i] < experts and of[found[i]] < 0:
                    found[i] |= 1 << 30
            out.append(found)
        ctypes.memmove(ring + int(now[0]) % entries * entry, np.concatenate(out).ctypes.data, entry)
        now += 1
        words(told, 1)[0] = now[0]

    def rlx_copy(self, to: int, source: int, nbytes: int, halt: int) -> None:
        if not words(halt, 1, np.int32)[0]:
            ctypes.memmove(to, source, nbytes)

    def rlx_tell(self, to: int, source: int, nbytes: int, told: int, now: int) -> None:
        ctypes.memmove(to, source, nbytes)
        words(told, 1)[0] = now


for _name, _function in list(vars(FakeDriver).items()):
    if _name.startswith("cu"):
        setattr(FakeDriver, _name, counted(_function))


fails = lru_cache(1024)(may_fail)  # asked again at every launch


def in_numbers(kernel: Kernel, arrays: list[np.ndarray]) -> tuple[Kernel, list[np.ndarray]]:
    """The kernel with its weights in panels of quantised blocks decoded to f32: the interpreter multiplies numbers only."""
    body, buffers = list(kernel.body), list(kernel.buffers)
    for at, s in enumerate(body):
        if isinstance(s, Contract) and isinstance(s.b, Operand) and s.b.blocks:
            p, panels = panel(s.b.blocks), s.b.buffer
            row_bytes = s.k // p.plain.block * p.packed.nbytes  # of a whole panel
            group = -(-s.width // p.rows) * row_bytes
            dims = panels.size // group, s.width, s.k
            decoded = decode(p, dims, group, row_bytes, arrays[buffers.index(panels)].tobytes())
            numbers = Buffer("numbers", f32, decoded.size, True)
            offset = k.mul(k.div(s.b.offset, group), s.width * s.k)
            body[at] = replace(s, b=Operand(numbers, offset, row_stride=1, col_stride=s.k))
            buffers, arrays = [*buffers, numbers], [*arrays, decoded]
    return replace(kernel, body=tuple(body), buffers=tuple(buffers)), arrays


@lru_cache(64)  # most runs have the weights of the run before
def decode(p: Panel, dims: tuple[int, int, int], group_bytes: int, row_bytes: int, held: bytes) -> np.ndarray:
    """numbers[group, row, column], of what panels hold; `row_bytes`: of a panel."""
    panels, numbers = Buffer("panels", u8, len(held)), Buffer("numbers", f32, math.prod(dims), True)
    at = group, row, column = Var("group"), Var("row"), Var("column")
    start = k.add(k.mul(group, group_bytes), k.mul(k.div(row, p.rows), row_bytes))
    value = p.packed.element(column, lambda byte: Load(panels, k.add(start, byte)), k.rem(row, p.rows))
    to = k.add(k.mul(k.add(k.mul(group, dims[1]), row), dims[2]), column)
    made = np.empty(numbers.size, np.float32)
    decoding = Kernel("decode", (panels, numbers), (), tuple(zip(at, dims)), (Store(numbers, to, value),))
    run_kernel(decoding, [np.frombuffer(held, np.uint8), made])
    return made


def experts_of(kernel: Kernel) -> int:
    """The buffer with a matrix for each group."""
    c = next(s for s in kernel.body if isinstance(s, Contract))
    assert isinstance(c.b, Operand)
    return kernel.buffers.index(c.b.buffer)


def words(address: int, count: int, dtype: Any = np.int64) -> np.ndarray:
    raw = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)  # type: ignore[call-overload]


@contextmanager
def installed(driver: FakeDriver | None, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """`driver` as cuda.bindings.driver; None: the package is not installed."""
    bindings = ModuleType("cuda.bindings")
    if driver is not None:
        bindings.driver = driver  # type: ignore[attr-defined]

    # it runs kernels one by one, in numbers: blocks that wait for one another are the GPU's (test_cuda_chain.py)
    patch.setattr("rlx.backends.cuda.code.in_chains", lambda program, launches, *rest: launches)

    def compiled(launches: Sequence[tuple[str, Kernels]], arch: str, count: int) -> list[CudaCode]:
        made = []
        for n, (_, stages) in enumerate(launches, len(driver.kernels) if driver else 0):
            kernels = [kernel for stage in stages for kernel in stage]
            more = tuple((*["slots", "far"] * of_groups(k), *["status"] * may_fail(k), "halt") for k in kernels)
            experts = (experts_of(kernels[0]),) if of_groups(kernels[0]) else ()
            blocks = 0 if kernels[0].collective else 1
            sizes = tuple(map(len, stages))
            how = blocks, 1, 0, 0, 0, more
            made.append(CudaCode(f"kernel{n}", "// interpreted", b"fake", *how, stages=sizes, experts=experts))
            assert driver is not None
            driver.kernels[f"kernel{n}"] = kernels
        return made

    caches = (gpu.count, gpu.gpu, backend.memory_of, get)
    with patch.context() as within:
        within.setitem(sys.modules, "cuda", SimpleNamespace(bindings=bindings))  # type: ignore[arg-type]
        within.setitem(sys.modules, "cuda.bindings", bindings)
        within.delitem(sys.modules, "cuda.bindings.driver", raising=False)  # imported by another test
        within.setattr(backend, "compile_kernels", compiled)
        within.setattr(backend, "support", lambda arch: b"fake")
        for cached in caches:
            cached.cache_clear()
        try:
            yield
        finally:
            for cached in caches:
                cached.cache_clear()
            for device in [d for d in MEMORIES if d.name == "cuda"]:
                del MEMORIES[device]
