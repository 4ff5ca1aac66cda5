"""GPU memory as described by DLPack capsules and `__cuda_array_interface__`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.driver.foreign import DeviceArray
from rlx.errors import InputDTypeError, TransferError
from rlx.ir.dtype import DTYPES, as_dtype

# DLPack's type codes: integers, unsigned integers, floats, bfloat, complex, bool, and the two f8 that rlx has
_LETTERS = {0: "i", 1: "u", 2: "f", 5: "c"}
_NAMES = {(4, 16): "bf16", (6, 8): "bool", (10, 8): "f8e4m3", (12, 8): "f8e5m2"}


class _Tensor(ctypes.Structure):
    """DLTensor of dlpack.h."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("kind", ctypes.c_int32), ("index", ctypes.c_int32), ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("offset", ctypes.c_uint64),
    ]  # fmt: skip


_TO_VERSIONED = 32  # bytes before the tensor of a versioned capsule: version, context, deleter, flags
_api = ctypes.pythonapi
_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))


def from_capsule(capsule: Any) -> DeviceArray:
    """The tensor of a DLPack capsule, which is kept instead of being consumed. TransferError: it is not C-contiguous."""
    name = _name_of(id(capsule))
    shift = _TO_VERSIONED if name == b"dltensor_versioned" else 0
    t = _Tensor.from_address((_pointer_of(id(capsule), name) or 0) + shift)
    shape = tuple(t.shape[: t.ndim])
    found = _NAMES.get((t.code, t.bits))
    if t.lanes != 1 or (found is None and t.code not in _LETTERS):
        raise InputDTypeError(f"DLPack type {t.code} of {t.bits} bits, {t.lanes} lanes, is none of {', '.join(DTYPES)}")
    dtype = as_dtype(found).numpy if found else np.dtype(f"{_LETTERS[t.code]}{t.bits // 8}")
    _check_strides(shape, t.strides[: t.ndim] if t.strides else None, 1)
    return DeviceArray((t.data or 0) + t.offset, shape, dtype, capsule)


def from_interface(array: Any, interface: dict[str, Any]) -> DeviceArray:
    """From `__cuda_array_interface__`. TransferError: it is not C-contiguous."""
    shape, dtype = tuple(interface["shape"]), np.dtype(interface["typestr"])
    _check_strides(shape, interface.get("strides"), dtype.itemsize)
    if interface.get("mask") is not None:
        raise TransferError("an array with a mask cannot be shared; fill in its elements first")
    return DeviceArray(int(interface["data"][0]), shape, dtype, array)


def _check_strides(shape: Sequence[int], strides: Sequence[int] | None, unit: int) -> None:
    want = unit
    for n, stride in zip(reversed(shape), reversed(strides or ())):
        if n > 1 and stride != want and 0 not in shape:
            raise TransferError(f"an array with strides {list(strides or ())} is not C-contiguous; give a contiguous copy of it")
        want *= n


class _Exported:
    """The elements as numpy sees them: unsigned integers of the same size. It does not look at them."""

    def __init__(self, array: DeviceArray) -> None:
        self._owner = array
        self.__array_interface__ = {
            "version": 3, "shape": array.shape, "typestr": f"<u{array.dtype.itemsize}", "data": (array.address, False),
        }  # fmt: skip


def to_capsule(array: DeviceArray, kind: int, index: int) -> Any:
    """A DLPack capsule over the elements, which keeps `owner` alive. `kind`, `index`: the device in DLPack's terms.

    numpy makes the capsule, and device and type are then put right. So C code frees it, also in any thread and while an exception
    is raised (a consumer refuses it), where no Python code may run."""
    dtype = as_dtype(array.dtype)
    code = next((c for (c, _), name in _NAMES.items() if name == dtype.name), None)
    capsule = np.asarray(_Exported(array)).__dlpack__()
    t = _Tensor.from_address(_pointer_of(id(capsule), b"dltensor") or 0)
    t.data, t.kind, t.index = array.address, kind, index
    t.code = next(c for c, letter in _LETTERS.items() if letter == array.dtype.kind) if code is None else code
    return capsule


__all__ = ["from_capsule", "from_interface", "to_capsule"]
