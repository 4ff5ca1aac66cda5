"""Arrays of other libraries, not copied: in the memory of the host, and in that of a device, as backends make them
(Executable.adopt)."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from rlx.ir.dtype import DType, as_dtype
from rlx.records import record

DLPACK_CPU = (1, 0)
DLPACK_CODES = {"bf16": 4, "f8e4m3": 10, "f8e5m2": 12}  # types that DLPack knows and numpy does not
CODE_NAMES = {code: name for name, code in DLPACK_CODES.items()}


@record(eq=False)
class DeviceArray:
    """C-contiguous elements at `address` of a device. `owner` keeps them alive."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype
    owner: object
    base = None  # as of a numpy array: it is no view of another one

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def detached(array: Any) -> Any:
    """A tensor that records derivatives, such as a Parameter, without that."""
    return array.detach() if getattr(array, "requires_grad", False) else array


def on_host(array: Any) -> np.ndarray:
    """Anything array-like of the host as an ndarray, without a copy if it shares its memory. Otherwise raises as numpy does."""
    if isinstance(array, np.ndarray):
        return array
    array = detached(array)
    shares = hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] == DLPACK_CPU[0]
    return of_dlpack(array) if shares else np.asarray(array)


def of_dlpack(producer: Any) -> np.ndarray:
    capsule = _Capsule(producer)
    array = np.from_dlpack(capsule)  # type: ignore[arg-type]
    return array if capsule.dtype is None else array.view(capsule.dtype.numpy)


class _Capsule:
    """Wraps a DLPack producer and presents bf16 and f8 as unsigned integers, because numpy does not know these types.

    `dtype` is the true type if it is one of them, else None."""

    def __init__(self, producer: Any) -> None:
        self.producer = producer
        self.dtype: DType | None = None

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.producer.__dlpack_device__()

    def __dlpack__(self, **request: Any) -> Any:
        capsule = self.producer.__dlpack__(**request)
        code = dtype_code(capsule)
        if code.value in CODE_NAMES:
            self.dtype = as_dtype(CODE_NAMES[code.value])
            code.value = 1  # unsigned integer
        return capsule


def dtype_code(capsule: Any) -> ctypes.c_uint8:
    """The type code inside a capsule's tensor. Offsets are those of the DLPack ABI (dlpack.h): DLTensor begins with the
    data pointer (8), device (8) and rank (4); the versioned struct puts version (8), context (8), deleter (8) and flags (8)
    before it."""
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    valid = ctypes.pythonapi.PyCapsule_IsValid
    valid.restype, valid.argtypes = ctypes.c_int, [ctypes.py_object, ctypes.c_char_p]
    versioned = bool(valid(capsule, b"dltensor_versioned"))
    base = get(capsule, b"dltensor_versioned" if versioned else b"dltensor")
    return ctypes.c_uint8.from_address(base + (32 if versioned else 0) + 20)
