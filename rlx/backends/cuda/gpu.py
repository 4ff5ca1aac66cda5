"""One GPU of this process through the CUDA driver: context, memory, the stream, loaded kernels, graphs.

Importing this module loads no library. Every function of the driver is called through `check`, which turns its error codes into
errors of rlx."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import numpy as np

from rlx.backends.cuda.staging import ALONE, LATER, SHORT, SMALL, ShortReads, Staging
from rlx.driver import files
from rlx.driver.foreign import DeviceArray
from rlx.errors import DeviceError, DeviceUnavailableError, OutOfMemoryError
from rlx.ir.dtype import as_dtype

OLDEST = 80  # compute capability 8.0: bf16, asynchronous copies
PORTABLE = 8  # blocks of a cluster, at most, that every GPU with clusters runs
PAUSE = 20e-6  # seconds between two looks at a GPU that is at work
FEWEST = 16  # multiprocessors
EVENT_WITHOUT_TIME = 2  # CU_EVENT_DISABLE_TIMING
FATAL = frozenset({
    "ILLEGAL_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ECC_UNCORRECTABLE", "MISALIGNED_ADDRESS", "HARDWARE_STACK_ERROR",
    "ILLEGAL_INSTRUCTION", "INVALID_PC", "INVALID_ADDRESS_SPACE", "DEVICE_UNAVAILABLE", "CONTEXT_IS_DESTROYED", "UNKNOWN",
})  # fmt: skip
DIRECT = {"cuEventRecord": 2, "cuStreamWaitEvent": 3, "cuStreamQuery": 1, "cuEventQuery": 1}  # function -> arguments
NOT_READY = 600  # CUDA_ERROR_NOT_READY
HELD, HELD_BYTES = 64, 1 << 20  # arrays of other libraries, and bytes of one, from which it is asked whether they are still read
ENTRIES = 12000  # CUDA version of the functions that machine code calls
LOST = "the GPU or this process's context on it is lost; what was in its memory is gone. Start a new process"


def refusal() -> str | None:
    """The reason why no CUDA device can be used; None if there is one."""
    try:
        from cuda.bindings import driver  # type: ignore[reportAttributeAccessIssue]
    except ImportError:
        return "it needs the packages cuda-core and nvidia-cuda-nvrtc: pip install rlx[cuda]"
    except Exception as e:  # noqa: BLE001  the bindings refuse the platform
        return f"the package cuda-bindings does not load: {e}"
    try:
        status = driver.cuInit(0)[0]
    except RuntimeError:  # the bindings found no library
        return "no NVIDIA driver is installed (libcuda.so.1 is missing)"
    if status != 0:
        return f"the NVIDIA driver does not start: {status.name}"
    return None if count() else "there is no NVIDIA GPU"


@cache
def count() -> int:
    from cuda.bindings import driver  # type: ignore[reportAttributeAccessIssue]

    return int(check(driver.cuDeviceGetCount(), "counting the GPUs"))


def check(answer: tuple[Any, ...], doing: str) -> Any:
    """The results of a driver call. OutOfMemoryError, DeviceError: it failed."""
    status, *found = answer
    if int(status) == 0:
        return found[0] if len(found) == 1 else tuple(found)
    name = status.name.removeprefix("CUDA_ERROR_")
    if name == "OUT_OF_MEMORY":
        raise OutOfMemoryError(f"{doing}: the GPU has no room left")
    raise DeviceError(f"{doing}: the CUDA driver says {name}" + (f": {LOST}" if name in FATAL else ""))


class Gpu:
    """GPU number `index`. Facts need no context; the first use of memory makes one (the primary context, shared with torch)."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver  # type: ignore[reportAttributeAccessIssue]

        if (why := refusal()) is not None:
            raise DeviceUnavailableError(f"cuda:{index} cannot be used: {why}")
        if not 0 <= index < count():
            raise DeviceUnavailableError(f"there is no cuda:{index}; there are {count()} GPUs, from cuda:0")
        self.index, self.driver = index, driver
        self._launch_graph = driver.cuGraphLaunch
        self.device = check(driver.cuDeviceGet(index), f"opening cuda:{index}")
        names = driver.CUdevice_attribute
        wanted = {
            "major": "COMPUTE_CAPABILITY_MAJOR", "minor": "COMPUTE_CAPABILITY_MINOR", "multiprocessors": "MULTIPROCESSOR_COUNT",
            "shared_bytes": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "l2_bytes": "L2_CACHE_SIZE",
            "virtual": "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
        }  # fmt: skip
        self.facts: dict[str, int] = {}
        for ours, name in wanted.items():
            attribute = getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")
            self.facts[ours] = int(check(driver.cuDeviceGetAttribute(attribute, self.device), f"asking cuda:{index}"))
        self.capability = self.facts["major"] * 10 + self.facts["minor"]
        self._lock = threading.RLock()  # the garbage collector may come back to a Gpu at any place
        self._here = threading.local()  # of a thread: whether the context is current, and the stream that it records
        self.context: Any = None
        self._stream: Any = None
        self._event: Any = None
        self._held: list[DeviceArray] = []
        self._staging: Staging | None = None
        self.short: ShortReads | None = None
        self._record, self._await, self._query, self._reached = (self.direct(*f) for f in DIRECT.items())
        self.up: Any = None  # streams for copies from the host, and to it
        self.down: Any = None
        self.beside: Any = None  # for copies of experts, beside runs
        self.reading = ctypes.c_int64()  # streams of other libraries that read outputs: the next run waits for them
        self._readers: list[int] = []
        self._several = count() > 1
        self.allocated = {"count": 0, "live_bytes": 0, "total_bytes": 0}

    @property
    def refusal(self) -> str | None:
        if self.capability < OLDEST:
            return f"its compute capability is {self.capability / 10}; rlx needs {OLDEST / 10} (Ampere) or newer"
        if self.facts["multiprocessors"] < FEWEST:  # the blocks of a line (schedule.PARTS), two at a time on each
            return f"it has {self.facts['multiprocessors']} multiprocessors; rlx needs {FEWEST}"
        return None

    @property
    def title(self) -> str:
        """Its name, memory and compute capability."""
        name = check(self.driver.cuDeviceGetName(128, self.device), "asking a GPU").split(b"\0")[0].decode()
        room = int(check(self.driver.cuDeviceTotalMem(self.device), "asking a GPU"))
        return f"{name}, {room / (1 << 30):.0f} GiB, compute capability {self.capability / 10}"

    @property
    def arch(self) -> str:
        return f"sm_{self.capability}" + "a" * (self.capability >= 90)

    def use(self) -> Any:
        """Make the context current in this thread; the stream of the process, or the one that this thread captures."""
        if self._several or not getattr(self._here, "current", False):
            d, where = self.driver, f"on cuda:{self.index}"
            with self._lock:
                context = self.context or check(d.cuDevicePrimaryCtxRetain(self.device), f"opening a context {where}")
                check(d.cuCtxSetCurrent(context), f"using a context {where}")
                if self._stream is None:
                    made = (check(d.cuStreamCreate(1), f"making a stream {where}") for _ in range(4))
                    self._stream, self.up, self.down, self.beside = made
                self.context, self._here.current = context, True
        return getattr(self._here, "stream", self._stream)

    def recorded(self, launch: Callable[[], None]) -> Any:
        """The kernels that `launch` queues in this thread as an executable graph. Other threads go on using the GPU."""
        d, doing = self.driver, "recording a run"
        self.use()
        self._here.stream = stream = check(d.cuStreamCreate(1), doing)
        try:
            check(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED), doing)
            try:
                launch()
            finally:
                graph = check(d.cuStreamEndCapture(stream), doing)
        finally:
            del self._here.stream
            d.cuStreamDestroy(stream)
        made = check(d.cuGraphInstantiate(graph, 0), doing)
        check(d.cuGraphDestroy(graph), doing)
        return made

    def replay(self, graph: Any) -> None:
        """Queue an instantiated graph."""
        stream = self.use()
        if self._readers:
            self.await_readers()
        found = self._launch_graph(graph, stream)
        if found[0]:
            check(found, "replaying a run")

    def entry(self, name: str) -> int:
        """The address of a function of the driver."""
        return int(check(self.driver.cuGetProcAddress(name.encode(), ENTRIES, 0), f"looking for {name}")[0])

    def direct(self, name: str, arguments: int) -> Callable[..., int]:
        """A function of the driver that returns at once, without the bindings, which take a microsecond or more."""
        return ctypes.PYFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * arguments)(self.entry(name))

    def check(self, status: int, doing: str) -> None:
        if status:
            check((self.driver.CUresult(status),), doing)

    def wait(self) -> None:
        stream = self.use()
        with self._lock:
            ended, self._held = self._held, []
        self.finish(stream)
        del ended

    def finish(self, stream: Any) -> None:
        """Wait for all that is queued on a stream."""
        check(self.driver.cuStreamSynchronize(stream), f"waiting for cuda:{self.index}")

    def until(self, reached: Callable[[], bool]) -> None:
        """Wait until a kernel has told the host so, or nothing is queued. Later commands go on meanwhile."""
        while not (reached() or self.idle()):
            time.sleep(PAUSE)

    def idle(self) -> bool:
        """Whether all that was queued has ended. DeviceError: it failed."""
        return self._over(self._query(int(self.use())))

    def hold(self, *arrays: DeviceArray) -> None:
        """Keep memory of other libraries alive until what has been queued so far, which may read it, has ended; if it is little,
        until some time later."""
        with self._lock:
            self._held += arrays
            much = len(self._held) > HELD or any(a.nbytes > HELD_BYTES for a in arrays)
            ended, self._held = (self._held, []) if much and self.idle() else ([], self._held)
        del ended  # without the lock: this may run any code

    def event(self) -> Any:
        return int(check(self.driver.cuEventCreate(EVENT_WITHOUT_TIME), "making an event"))

    def after(self, stream: int) -> None:
        """Later commands wait for the commands that are queued on a stream of another library."""
        self._order(stream, self.use())

    def before(self, stream: int) -> None:
        """Later commands of another library's stream wait for the commands that are queued here."""
        self._order(self.use(), stream)

    def lend(self, stream: int, lasting: bool) -> None:
        """Another library reads outputs in this stream: it waits for the runs queued here. If it is there for ever, the next run
        waits for what it has queued by then."""
        self.before(stream)
        if lasting:
            self._readers = list({*self._readers, stream})
            self.reading.value = 1

    def await_readers(self) -> None:
        readers, self._readers, self.reading.value = self._readers, [], 0
        for stream in readers:
            self.after(stream)

    def _order(self, first: Any, then: Any) -> None:
        with self._lock:  # another thread may not record the event before it is waited for
            self._event = self._event or self.event()
            self.record(self._event, first)
            self.await_event(self._event, then)

    def record(self, event: Any, stream: Any) -> None:
        """Record `event` after the work queued on the stream so far."""
        self.check(self._record(event, int(stream)), "ordering streams")

    def await_event(self, event: Any, stream: Any) -> None:
        """Later commands of the stream wait for the event as it was last recorded."""
        self.check(self._await(int(stream), event, 0), "ordering streams")

    def has_passed(self, event: Any) -> bool:
        """Whether the work queued before an event has ended."""
        self.use()
        return self._over(self._reached(event))

    def _over(self, status: int) -> bool:
        if status != NOT_READY:
            self.check(status, f"waiting for cuda:{self.index}")
        return status != NOT_READY

    def destroy(self, events: Iterable[Any]) -> None:
        for event in events:
            self.driver.cuEventDestroy(event)

    def passed(self, event: Any) -> None:
        """Wait for an event as it was last recorded."""
        check(self.driver.cuEventSynchronize(event), f"waiting for cuda:{self.index}")

    def device_of(self, address: int) -> int | None:
        """The GPU that an address of another library belongs to. None: it is none of a GPU."""
        kind = self.driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        self.use()
        status, found = self.driver.cuPointerGetAttribute(kind, address)
        return int(found) if int(status) == 0 and int(found) >= 0 else None

    # -- memory

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` (at least 1) zeroed bytes, aligned to 256. OutOfMemoryError: there is no room."""
        stream = self.use()
        address = int(check(self.driver.cuMemAlloc(max(1, nbytes)), f"cuda:{self.index}: allocating {nbytes} bytes"))
        check(self.driver.cuMemsetD8Async(address, 0, max(1, nbytes), stream), "clearing memory")
        self.account(nbytes)
        return address

    def account(self, nbytes: int) -> None:
        """Keep account of an allocation; negative: of its end."""
        self.allocated["live_bytes"] += nbytes
        if nbytes >= 0:
            self.allocated["count"] += 1
            self.allocated["total_bytes"] += nbytes

    def free(self, address: int, nbytes: int) -> None:
        with self.at_the_end():
            self.driver.cuMemFree(address)
        self.account(-nbytes)

    @contextmanager
    def at_the_end(self, wait: bool = False) -> Iterator[None]:
        """Give something back. After a lost device there is nothing. `wait`: for all that is queued; perhaps this thread is
        recording."""
        with suppress(DeviceError):
            self.use()
            if wait:
                self.driver.cuStreamSynchronize(self._stream)
            yield

    @property
    def staging(self) -> Staging:
        with self._lock:
            self._staging = self._staging or Staging(self)
        return self._staging

    def enqueue(self, copy: str, goal: int, source: int, nbytes: int, stream: Any) -> None:
        """Queue a copy by this function of the driver."""
        if nbytes:
            check(getattr(self.driver, copy)(goal, source, nbytes, stream), "copying to, from or on the GPU")

    def copy_in(self, address: int, source: np.ndarray, stream: Any = None) -> None:
        """Copy flat bytes of the host, which may be in a mapped file; they may be changed afterwards."""
        ours = self.use()
        if source.nbytes > SMALL:
            self.staging.copy(source, address, ours if stream is None else stream, out=False)
        else:
            held = files.in_memory(source)
            self.enqueue("cuMemcpyHtoDAsync", address, held.ctypes.data, held.nbytes, ours if stream is None else stream)

    def copy_out(self, into: np.ndarray, address: int, stream: Any = None) -> None:
        """Fill flat bytes of the host, after all work queued so far (in `stream`, if it is given)."""
        ours = self.use()
        if self.short is not None and stream is None and into.nbytes <= SHORT:
            self.short.read(into, address, ours)
        elif into.nbytes > ALONE:
            self.staging.copy(into, address, ours if stream is None else stream, out=True)
        else:  # the driver is as fast as one thread of ours
            self.enqueue("cuMemcpyDtoHAsync", into.ctypes.data, address, into.nbytes, ours if stream is None else stream)
            self.finish(ours if stream is None else stream)

    def copy_out_later(self, into: np.ndarray, address: int) -> Callable[[], None]:
        """As copy_out of the bytes as they are now in the stream; the function waits for them."""
        if self.short is not None and into.nbytes <= LATER:
            return self.short.later(into, address, self.use())
        self.copy_out(into, address)
        return lambda: None

    def copy(self, goal: int, source: int, nbytes: int) -> None:
        self.enqueue("cuMemcpyDtoDAsync", goal, source, nbytes, self.use())

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        if nbytes:
            check(self.driver.cuMemsetD8Async(address, byte, nbytes, self.use()), "filling memory")

    def pinned(self, nbytes: int, clear: bool = True) -> np.ndarray:
        """Zeroed bytes of host memory that the GPU reads and writes at the same address, freed with the last view. `clear` False:
        undefined ones."""
        self.use()
        flags = self.driver.CU_MEMHOSTALLOC_PORTABLE | self.driver.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(check(self.driver.cuMemHostAlloc(max(1, nbytes), flags), f"pinning {nbytes} bytes"))
        held = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(held, self.driver.cuMemFreeHost, address).atexit = False
        array = np.ctypeslib.as_array(held)
        if clear:
            array[...] = 0
        return array

    # -- code

    def function(self, image: bytes, name: str, shared: int, owner: Functions | None, carved: bool = False) -> Any:
        """A kernel of a cubin, loaded for as long as `owner` exists; None: the process. `shared`: bytes of dynamic shared memory
        of its launches. `carved`: a multiprocessor keeps as much as it can for shared memory. That does not change while it has
        blocks, so those of the next kernel can only be beside them if it is the same for both."""
        self.use()
        module = check(self.driver.cuModuleLoadData(image), f"loading {name}")
        if owner is not None:
            weakref.finalize(owner, self._unload, module).atexit = False
        found = check(self.driver.cuModuleGetFunction(module, name.encode()), f"loading {name}")
        names = self.driver.CUfunction_attribute
        wanted = {names.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: 100} if carved else {}
        if shared:  # with the static shared memory of the kernel, even less than 48 KB may exceed the default limit of a launch
            wanted[names.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = shared
        if self.capability >= 90 and self.width(found) > PORTABLE:
            wanted[names.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED] = 1
        for attribute, value in wanted.items():
            check(self.driver.cuFuncSetAttribute(found, attribute, value), f"loading {name}")
        return found

    def width(self, function: Any) -> int:
        """Blocks of its clusters; less than 2: it has none."""
        wanted = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH
        return check(self.driver.cuFuncGetAttribute(wanted, function), "looking for the clusters of a kernel")

    def in_clusters(self, function: Any, threads: int, shared: int) -> int | None:
        """Blocks that run at once of a kernel whose blocks are clusters; None: they are not."""
        d, doing = self.driver, "looking for room for a kernel"
        if (width := self.width(function)) < 2:
            return None
        config, attribute = self._config(width, threads, shared), d.CUlaunchAttribute()
        attribute.id, size = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, attribute.value.clusterDim
        size.x, size.y, size.z = width, 1, 1
        config.attrs, config.numAttrs = [attribute], 1
        return width * check(d.cuOccupancyMaxActiveClusters(function, config), doing)

    def resident(self, function: Any, threads: int, shared: int) -> int:
        """Blocks of a kernel that a multiprocessor runs at once."""
        room = self.driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, shared)
        return check(room, "looking for room for a kernel")

    def _unload(self, module: Any) -> None:
        with self.at_the_end(wait=True):  # for launches of its kernels
            self.driver.cuModuleUnload(module)

    def tensor_map(self, m: Any, base: int) -> Any:
        """The descriptor of a tensor (rlx.backends.cuda.schedule.TensorMap) in the buffer at address `base`, for bulk copies."""
        d = self.driver
        names = d.CUtensorMapDataType
        kinds = {"bf16": names.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "f16": names.CU_TENSOR_MAP_DATA_TYPE_FLOAT16}
        kinds |= dict.fromkeys(("u8", "i8", "f8e4m3", "f8e5m2"), names.CU_TENSOR_MAP_DATA_TYPE_UINT8)
        kinds["f32"] = names.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32  # the copies round
        wide, narrow, swizzles = d.cuuint64_t, d.cuuint32_t, d.CUtensorMapSwizzle
        lines = as_dtype(m.dtype).itemsize * m.box[0] == 128  # read by the tensor cores; threads read the others
        swizzle = swizzles.CU_TENSOR_MAP_SWIZZLE_128B if lines else swizzles.CU_TENSOR_MAP_SWIZZLE_NONE
        memory = kinds[m.dtype], len(m.dims), base + m.offset, [wide(n) for n in m.dims], [wide(n) for n in m.strides]
        plain, zeros = d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE, d.CUtensorMapFloatOOBfill
        promotion = d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B
        how = plain, swizzle, promotion, zeros.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
        if m.ends:
            steps = [narrow(n) for n in (1, *m.steps, 1)]
            made = d.cuTensorMapEncodeIm2col(*memory, [0] * len(m.ends), list(m.ends), *m.box, steps, *how)
        else:
            made = d.cuTensorMapEncodeTiled(*memory, [narrow(n) for n in m.box], [narrow(1)] * len(m.dims), *how)
        return check(made, "describing a tensor")

    def launch(
        self, function: Any, blocks: int, threads: int, shared: int, arguments: Sequence[int], maps: Sequence[Any] = (),
        early: bool = False,
    ) -> None:  # fmt: skip
        """Queue a kernel whose arguments are descriptors of tensors, then addresses. `early`: its blocks may start before the
        kernel queued before it ends; each waits for that itself (rlx_begin)."""
        d, config = self.driver, self._config(blocks, threads, shared)
        if early and self.capability >= 90:
            attribute = d.CUlaunchAttribute()
            attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values = ((*maps, *arguments), (*(None for _ in maps), *(ctypes.c_void_p for _ in arguments)))
        check(d.cuLaunchKernelEx(config, function, values, 0), "launching a kernel")

    def _config(self, blocks: int, threads: int, shared: int) -> Any:
        config = self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, self.use()
        return config


class Functions(dict[str, Any]):
    """Loaded kernels by name. Their code is unloaded with the last executable, or graph, that launches them."""


@cache
def gpu(index: int) -> Gpu:
    return Gpu(index)


__all__ = ["Functions", "Gpu", "check", "count", "gpu", "refusal"]
