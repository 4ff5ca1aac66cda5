"""Memory of a GPU as DLPack capsules and `__cuda_array_interface__` describe it."""

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


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


_TO_VERSIONED = 32  # bytes before the tensor of a versioned capsule: version, context, deleter, flags
_api = ctypes.pythonapi
_name_of = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_GetName", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, _Destructor)(("PyCapsule_New", _api))
_exported: dict[int, tuple[Any, ...]] = {}  # by address of the _Managed: what must live until its deleter is called


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
    return DeviceArray(int(interface["data"][0]), shape, dtype, array)


def _check_strides(shape: Sequence[int], strides: Sequence[int] | None, unit: int) -> None:
    want = unit
    for n, stride in zip(reversed(shape), reversed(strides or ())):
        if n > 1 and stride != want and 0 not in shape:
            raise TransferError(f"an array with strides {list(strides or ())} is not C-contiguous; copy it first")
        want *= n


def to_capsule(array: DeviceArray, kind: int, index: int) -> Any:
    """A DLPack capsule over the elements, which keeps `owner` alive. `kind`, `index`: the device in DLPack's terms."""
    rank = len(array.shape)
    dims = (ctypes.c_int64 * max(rank, 1))(*array.shape)
    dtype = as_dtype(array.dtype)
    known = next((key for key, name in _NAMES.items() if name == dtype.name), None)
    code, bits = known or (next(c for c, letter in _LETTERS.items() if letter == array.dtype.kind), array.dtype.itemsize * 8)
    tensor = _Tensor(array.address, kind, index, rank, code, bits, 1, dims, None, 0)
    made = _Managed(tensor, None, _delete)
    _exported[ctypes.addressof(made)] = made, dims, array
    return _new(ctypes.addressof(made), b"dltensor", _unused)


@_Deleter
def _delete(address: int) -> None:
    _exported.pop(address, None)


@_Destructor
def _unused(capsule: int) -> None:
    """A capsule that nobody consumed (its name is then still the first one)."""
    if _name_of(capsule) == b"dltensor":
        _exported.pop(_pointer_of(capsule, b"dltensor") or 0, None)


__all__ = ["from_capsule", "from_interface", "to_capsule"]
