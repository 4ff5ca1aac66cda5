"""One GPU of this process through the CUDA driver: context, memory, the stream, loaded kernels, graphs.

Importing this module loads no library. Every function of the driver is called through `check`, which turns its error codes into
errors of rlx."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from rlx.driver.device import Device
from rlx.driver.handles import HandleStore
from rlx.errors import DeviceError, DeviceUnavailableError, OutOfMemoryError

OLDEST = 80  # compute capability 8.0: bf16, asynchronous copies
EVENT_WITHOUT_TIME = 2  # CU_EVENT_DISABLE_TIMING
FATAL = frozenset({
    "ILLEGAL_ADDRESS", "LAUNCH_FAILED", "LAUNCH_TIMEOUT", "ECC_UNCORRECTABLE", "MISALIGNED_ADDRESS", "HARDWARE_STACK_ERROR",
    "ILLEGAL_INSTRUCTION", "INVALID_PC", "INVALID_ADDRESS_SPACE", "DEVICE_UNAVAILABLE", "CONTEXT_IS_DESTROYED", "UNKNOWN",
})  # fmt: skip
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
        self._set_current, self._launch_graph = driver.cuCtxSetCurrent, driver.cuGraphLaunch
        self.device = check(driver.cuDeviceGet(index), f"opening cuda:{index}")
        names = driver.CUdevice_attribute
        wanted = {
            "major": "COMPUTE_CAPABILITY_MAJOR", "minor": "COMPUTE_CAPABILITY_MINOR", "multiprocessors": "MULTIPROCESSOR_COUNT",
            "shared_bytes": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN", "l2_bytes": "L2_CACHE_SIZE",
        }  # fmt: skip
        self.facts: dict[str, int] = {}
        for ours, name in wanted.items():
            attribute = getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")
            self.facts[ours] = int(check(driver.cuDeviceGetAttribute(attribute, self.device), f"asking cuda:{index}"))
        self.capability = self.facts["major"] * 10 + self.facts["minor"]
        self._lock, self._recording = threading.Lock(), threading.local()
        self._context: Any = None
        self._stream: Any = None
        self._event: Any = None
        self._held: list[object] = []
        self._several = count() > 1
        self._thread = 0  # where the context was last made current for a graph
        self.allocated = {"count": 0, "live_bytes": 0, "total_bytes": 0}

    @property
    def refusal(self) -> str | None:
        if self.capability < OLDEST:
            return f"its compute capability is {self.capability / 10}; rlx needs {OLDEST / 10} (Ampere) or newer"
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
        """Make the context current in this thread; the stream of all work of this process, or of what this thread records."""
        with self._lock:
            if self._context is None:
                self._context = check(
                    self.driver.cuDevicePrimaryCtxRetain(self.device), f"opening a context on cuda:{self.index}"
                )
        check(self.driver.cuCtxSetCurrent(self._context), f"using cuda:{self.index}")
        with self._lock:
            if self._stream is None:
                self._stream = check(self.driver.cuStreamCreate(1), f"making a stream on cuda:{self.index}")
        return getattr(self._recording, "stream", self._stream)

    def recorded(self, launch: Callable[[], None]) -> Any:
        """The kernels that `launch` queues in this thread as an executable graph. Other threads go on using the GPU."""
        d, doing = self.driver, "recording a run"
        self.use()
        self._recording.stream = stream = check(d.cuStreamCreate(1), doing)
        try:
            check(d.cuStreamBeginCapture(stream, d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED), doing)
            try:
                launch()
            finally:
                graph = check(d.cuStreamEndCapture(stream), doing)
        finally:
            del self._recording.stream
            d.cuStreamDestroy(stream)
        made = check(d.cuGraphInstantiate(graph, 0), doing)
        check(d.cuGraphDestroy(graph), doing)
        return made

    def replay(self, graph: Any) -> None:
        """Queue an instantiated graph. Some CUDA call of this Gpu came before."""
        if self._several or threading.get_ident() != self._thread:
            self._set_current(self._context)
            self._thread = threading.get_ident()
        found = self._launch_graph(graph, self._stream)
        if found[0]:
            check(found, "replaying a run")

    def wait(self) -> None:
        check(self.driver.cuStreamSynchronize(self.use()), f"waiting for cuda:{self.index}")
        self._held.clear()

    def hold(self, owner: object) -> None:
        """Keep memory of another library alive while what is queued from now on may read it."""
        if int(self.driver.cuStreamQuery(self.use())[0]) == 0:
            self._held.clear()
        self._held.append(owner)

    def after(self, stream: int) -> None:
        """Later commands wait for the commands that are queued on a stream of another library."""
        self._order(stream, self.use())

    def before(self, stream: int) -> None:
        """Later commands of another library's stream wait for the commands that are queued here."""
        self._order(self.use(), stream)

    def _order(self, first: Any, then: Any) -> None:
        if self._event is None:
            self._event = check(self.driver.cuEventCreate(EVENT_WITHOUT_TIME), "making an event")
        check(self.driver.cuEventRecord(self._event, first), "ordering streams")
        check(self.driver.cuStreamWaitEvent(then, self._event, 0), "ordering streams")

    # -- memory

    def allocate(self, nbytes: int) -> int:
        """The address of `nbytes` (at least 1) zeroed bytes, aligned to 256. OutOfMemoryError: there is no room."""
        stream = self.use()
        address = int(check(self.driver.cuMemAlloc(max(1, nbytes)), f"cuda:{self.index}: allocating {nbytes} bytes"))
        check(self.driver.cuMemsetD8Async(address, 0, max(1, nbytes), stream), "clearing memory")
        for name, n in (("count", 1), ("live_bytes", nbytes), ("total_bytes", nbytes)):
            self.allocated[name] += n
        return address

    def free(self, address: int, nbytes: int) -> None:
        with suppress(DeviceError):  # after a lost device there is nothing to free
            self.use()
            self.driver.cuMemFree(address)
        self.allocated["live_bytes"] -= nbytes

    def copy_in(self, address: int, source: np.ndarray) -> None:
        """Copy a contiguous host array; it may be changed afterwards."""
        if source.nbytes:
            stream = self.use()
            check(self.driver.cuMemcpyHtoDAsync(address, source.ctypes.data, source.nbytes, stream), "copying to the GPU")

    def copy_out(self, into: np.ndarray, address: int) -> None:
        """Fill a contiguous host array, after all work queued so far."""
        if into.nbytes:
            stream = self.use()
            check(self.driver.cuMemcpyDtoHAsync(into.ctypes.data, address, into.nbytes, stream), "copying from the GPU")
        self.wait()

    def copy(self, goal: int, source: int, nbytes: int) -> None:
        if nbytes:
            check(self.driver.cuMemcpyDtoDAsync(goal, source, nbytes, self.use()), "copying on the GPU")

    def fill(self, address: int, byte: int, nbytes: int) -> None:
        if nbytes:
            check(self.driver.cuMemsetD8Async(address, byte, nbytes, self.use()), "filling memory")

    def pinned(self, nbytes: int) -> np.ndarray:
        """Zeroed bytes of host memory that the GPU reads and writes at the same address, freed with the last view."""
        self.use()
        flags = self.driver.CU_MEMHOSTALLOC_PORTABLE | self.driver.CU_MEMHOSTALLOC_DEVICEMAP
        address = int(check(self.driver.cuMemHostAlloc(max(1, nbytes), flags), f"pinning {nbytes} bytes"))
        held = (ctypes.c_uint8 * nbytes).from_address(address)
        weakref.finalize(held, self.driver.cuMemFreeHost, address).atexit = False
        array = np.ctypeslib.as_array(held)
        array[...] = 0
        return array

    # -- code

    def function(self, image: bytes, name: str, shared: int) -> Any:
        """A kernel of a cubin, loaded. `shared`: bytes of dynamic shared memory of its launches."""
        self.use()
        module = check(self.driver.cuModuleLoadData(image), f"loading {name}")
        found = check(self.driver.cuModuleGetFunction(module, name.encode()), f"loading {name}")
        if shared > 48 << 10:
            attribute = self.driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(self.driver.cuFuncSetAttribute(found, attribute, shared), f"loading {name}")
        return found

    def tensor_map(self, m: Any, base: int) -> Any:
        """The descriptor of a tensor (rlx.backends.cuda.schedule.TensorMap) in the buffer at address `base`, for bulk copies."""
        d = self.driver
        names = d.CUtensorMapDataType
        kinds = {"bf16": names.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, "f16": names.CU_TENSOR_MAP_DATA_TYPE_FLOAT16}
        kinds |= dict.fromkeys(("u8", "i8", "f8e4m3", "f8e5m2"), names.CU_TENSOR_MAP_DATA_TYPE_UINT8)
        kinds["f32"] = names.CU_TENSOR_MAP_DATA_TYPE_TFLOAT32  # the copies round
        wide, narrow = d.cuuint64_t, d.cuuint32_t
        return check(d.cuTensorMapEncodeTiled(
            kinds[m.dtype], len(m.dims), base + m.offset, [wide(n) for n in m.dims], [wide(n) for n in m.strides],
            [narrow(n) for n in m.box], [narrow(1)] * len(m.dims), d.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            d.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B, d.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            d.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ), "describing a tensor")  # fmt: skip

    def launch(
        self, function: Any, blocks: int, threads: int, shared: int, arguments: Sequence[int], maps: Sequence[Any] = (),
        early: bool = False,
    ) -> None:  # fmt: skip
        """Queue a kernel whose arguments are descriptors of tensors, then addresses. `early`: its blocks may start before the
        kernel queued before it ends; each waits for that itself (rlx_begin)."""
        d, config = self.driver, self.driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared, self.use()
        if early and self.capability >= 90:
            attribute = d.CUlaunchAttribute()
            attribute.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values = ((*maps, *arguments), (*(None for _ in maps), *(ctypes.c_void_p for _ in arguments)))
        check(d.cuLaunchKernelEx(config, function, values, 0), "launching a kernel")


@cache
def gpu(index: int) -> Gpu:
    return Gpu(index)


@dataclass(frozen=True, eq=False, slots=True)
class DeviceBlock:
    """Memory of a GPU (rlx.driver.memory.Block). `owner` frees it with its last part."""

    address: int
    nbytes: int
    owner: _Owned

    data = None  # the host does not see it

    def part(self, offset: int, nbytes: int) -> DeviceBlock:
        return DeviceBlock(self.address + offset, nbytes, self.owner)


class _Owned:
    """One allocation, freed once; not at the end of the interpreter, when the driver frees everything."""

    def __init__(self, of: Gpu, address: int, nbytes: int) -> None:
        self.free = weakref.finalize(self, of.free, address, nbytes)
        self.free.atexit = False


class CudaMemory:
    """Memory protocol (rlx.driver.memory). Copies and kernels are ordered by one stream; snapshots are copies on the device."""

    host_visible = False

    def __init__(self, index: int) -> None:
        self.device, self.gpu = Device("cuda", index), gpu(index)
        self._watches: weakref.WeakKeyDictionary[HandleStore, Any] = weakref.WeakKeyDictionary()

    def allocate(self, nbytes: int, alignment: int = 64) -> DeviceBlock:
        address = self.gpu.allocate(nbytes)
        return DeviceBlock(address, nbytes, _Owned(self.gpu, address, nbytes))

    def free(self, block: Any) -> None:
        block.owner.free()

    def copy_in(self, block: Any, source: np.ndarray) -> None:
        self.gpu.copy_in(block.address, source)

    def copy_out(self, block: Any, into: np.ndarray) -> None:
        self.gpu.copy_out(into, block.address)

    def copy(self, goal: Any, source: Any) -> None:
        self.gpu.copy(goal.address, source.address, goal.nbytes)

    def fill(self, block: Any, byte: int) -> None:
        self.gpu.fill(block.address, byte, block.nbytes)

    def watch(self, store: HandleStore, make: Callable[[CudaMemory], Any]) -> Any:
        """The account of failures (rlx.backends.cuda.runs.Watch) of the runs on a store."""
        if store not in self._watches:
            self._watches[store] = make(self)
        return self._watches[store]

    def freeze(self, blocks: Sequence[Any]) -> None:
        """Nothing is shared, so nothing needs to be prepared."""

    def assign(self, goal: Any, source: Any) -> None:
        self.copy(goal, source)


__all__ = ["CudaMemory", "DeviceBlock", "Gpu", "check", "count", "gpu", "refusal"]
