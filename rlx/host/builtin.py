"""Makes built-in functions of CPython from the addresses of generated functions. Does not use LLVM."""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable
from typing import Any

FUTEX_CALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98}  # syscall numbers, Linux
METH_NOARGS, METH_KEYWORDS, METH_FASTCALL = 4, 2, 0x80  # flags of a MethodDef


def futex_call() -> int:
    """The number of the futex system call. 0: none, or not known on this platform."""
    return FUTEX_CALL.get(platform.machine(), 0) if sys.platform == "linux" and sys.maxsize > 1 << 32 else 0


def address_of(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


class MethodDef(ctypes.Structure):
    """PyMethodDef of CPython's stable ABI. It must outlive the functions made from it."""

    _fields_ = [("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p)]


def builtin(definition: MethodDef, itself: Any, module: Any = None) -> Callable[..., Any]:
    """A built-in function with `itself` as first argument. It keeps `itself` and `module` (its __module__, any object) alive."""
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p]
    return make(ctypes.addressof(definition), itself, None if module is None else id(module))
