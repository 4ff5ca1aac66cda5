"""Arrays of other libraries on a GPU (DLPack, `__cuda_array_interface__`): inputs from them, outputs for them, with stream
ordering."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from rlx.backends.cuda.dlpack import from_capsule, from_interface, to_capsule
from rlx.backends.cuda.gpu import Gpu
from rlx.driver.foreign import DeviceArray
from rlx.errors import TransferError
from rlx.ir.dtype import DTYPES

CUDA, MANAGED = 2, 13  # devices of DLPack
DEFAULT, PER_THREAD = 1, 2  # the default streams


def adopt(gpu: Gpu, array: Any) -> DeviceArray | None:
    """The elements of an array on this GPU. Commands queued from now on come after what its library has queued. The caller keeps
    it until its commands are queued, and then has Gpu.hold keep it. None: it is not on a GPU. TransferError: it is on another
    one, is not C-contiguous, or cannot be shared."""
    if (found := _of_torch(gpu, array)) is not None:
        return found
    try:
        if hasattr(array, "__dlpack_device__"):
            kind, index = array.__dlpack_device__()
            if kind not in (CUDA, MANAGED):
                return None
            if kind == CUDA:
                _check_place(gpu, index)
            return from_capsule(array.__dlpack__(stream=int(gpu.use())))
        if (interface := getattr(array, "__cuda_array_interface__", None)) is None:
            return None
        found = from_interface(array, interface)
    except (BufferError, RuntimeError, ValueError, TypeError) as e:
        raise TransferError(f"{type(array).__name__} does not share its memory: {e}") from e
    if found.nbytes:
        _check_place(gpu, gpu.device_of(found.address))
    if (stream := interface.get("stream", DEFAULT)) is not None:  # before version 3 it says nothing of streams
        gpu.after(int(stream))
    return found


def _check_place(gpu: Gpu, index: int | None) -> None:
    if index != gpu.index:
        place = "memory of the host" if index is None else f"cuda:{index}"
        raise TransferError(f"an array is in {place}, the executable on cuda:{gpu.index}; copy it there first")


def _of_torch(gpu: Gpu, array: Any) -> DeviceArray | None:
    """As adopt: DLPack of torch takes thirty microseconds. None: it is not a plain tensor on this GPU; DLPack says why."""
    torch = sys.modules.get("torch")
    if torch is None or type(array) is not torch.Tensor or not array.is_cuda or array.get_device() != gpu.index:
        return None
    odd = array.requires_grad or array.is_complex() or array.is_neg() or array.layout is not torch.strided
    if odd or (dtype := _dtype_of(array.dtype)) is None or not array.is_contiguous():
        return None
    gpu.after(_torch_stream()(gpu.index) or DEFAULT)
    return DeviceArray(array.data_ptr(), tuple(array.shape), dtype, array.untyped_storage())


@cache
def _torch_stream() -> Callable[[int], int]:
    """The current stream of a GPU. torch's public function makes an object, and takes longer than all the rest."""
    torch = sys.modules["torch"]
    return getattr(torch._C, "_cuda_getCurrentRawStream", None) or (lambda index: torch.cuda.current_stream(index).cuda_stream)


@cache
def _dtype_of(dtype: Any) -> np.dtype | None:
    """The rlx dtype of a torch dtype."""
    found = next((d for d in DTYPES.values() if d.numpy.name == str(dtype).removeprefix("torch.")), None)
    return found and found.numpy


def _lasts(stream: int, index: int) -> bool:
    """Whether a stream of another library is never destroyed: the default ones, and those of torch's pool."""
    if stream in (DEFAULT, PER_THREAD) or (torch := sys.modules.get("torch")) is None or not torch.cuda.is_initialized():
        return stream in (DEFAULT, PER_THREAD)
    current = torch.cuda.current_stream(index)
    return current.cuda_stream == stream != current.stream_id  # that of a stream from outside is its address


class Export:
    """Memory of a GPU as other libraries read it: `torch.from_dlpack(x)`, `cupy.asarray(x)`."""

    def __init__(self, gpu: Gpu, array: DeviceArray) -> None:
        self._gpu, self._array = gpu, array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        a = self._array
        if a.dtype.kind == "V":
            raise AttributeError(f"__cuda_array_interface__ has no {a.dtype}; DLPack has")
        return {
            "version": 3, "shape": a.shape, "typestr": a.dtype.str, "data": (a.address, True), "strides": None,
            "stream": int(self._gpu.use()),
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._gpu.index

    def __dlpack__(self, *, stream: Any = None, dl_device: Any = None, copy: bool | None = None, **request: Any) -> Any:
        """`stream`: of the consumer (Gpu.lend). None: the default stream; -1: the consumer takes care of the order. BufferError:
        a copy, or another device, is asked for."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            where = f"cuda:{self._gpu.index}"
            raise BufferError(f"the array is shared where it lies, on {where}, without a copy; np.asarray copies it to the host")
        if stream != -1:
            self._gpu.lend(number := int(stream or DEFAULT), _lasts(number, self._gpu.index))
        return to_capsule(self._array, CUDA, self._gpu.index)


__all__ = ["Export", "adopt"]
