"""Arrays of other libraries on a GPU (DLPack, `__cuda_array_interface__`): inputs from them, outputs for them, in order."""

from __future__ import annotations

from typing import Any

from rlx.backends.cuda.dlpack import from_capsule, from_interface, to_capsule
from rlx.backends.cuda.gpu import Gpu
from rlx.driver.foreign import DeviceArray
from rlx.errors import TransferError

CUDA, MANAGED = 2, 13  # devices of DLPack


def adopt(gpu: Gpu, array: Any) -> DeviceArray | None:
    """The elements of an array on this GPU. What is queued from now on comes after what its library has queued. None: it is not
    on a GPU. TransferError: it is on another one, is not C-contiguous, or cannot be shared."""
    interface = None
    try:
        if hasattr(array, "__dlpack_device__"):
            kind, index = array.__dlpack_device__()
            if kind not in (CUDA, MANAGED):
                return None
            if kind == CUDA and index != gpu.index:
                raise TransferError(f"an array is on cuda:{index}, the executable on cuda:{gpu.index}; copy it there first")
            found = from_capsule(array.__dlpack__(stream=int(gpu.use())))
        elif (interface := getattr(array, "__cuda_array_interface__", None)) is not None:
            found = from_interface(array, interface)
            if (stream := interface.get("stream")) is not None:
                gpu.after(int(stream))
        else:
            return None
    except (BufferError, RuntimeError, ValueError) as e:
        raise TransferError(f"{type(array).__name__} does not share its memory: {e}") from e
    gpu.hold(found.owner)
    return found


class Export:
    """Memory of a GPU as other libraries read it: `torch.from_dlpack(x)`, `cupy.asarray(x)`."""

    def __init__(self, gpu: Gpu, array: DeviceArray) -> None:
        self._gpu, self._array = gpu, array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        a = self._array
        return {
            "version": 3, "shape": a.shape, "typestr": a.dtype.str, "data": (a.address, True), "strides": None,
            "stream": int(self._gpu.use()),
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._gpu.index

    def __dlpack__(self, *, stream: Any = None, dl_device: Any = None, copy: bool | None = None, **request: Any) -> Any:
        """`stream`: of the consumer; it waits for the runs queued so far. None: the default stream; -1: it takes care itself.
        BufferError: a copy, or another device, is asked for."""
        if copy or dl_device not in (None, self.__dlpack_device__()):
            where = f"cuda:{self._gpu.index}"
            raise BufferError(f"the array is shared where it lies, on {where}, without a copy; np.asarray copies it to the host")
        if stream != -1:
            self._gpu.before(int(stream or 1))
        return to_capsule(self._array, CUDA, self._gpu.index)


__all__ = ["Export", "adopt"]
