"""Words that calls in machine code and the Python around them share: offsets in Python objects, and blocks both read."""

from __future__ import annotations

import ctypes

# Offsets of the words of a numpy array that calls read
OB_TYPE = 8  # PyObject; below, PyArrayObject
DATA, NDIM, DIMS, BASE, DESCR, FLAGS = 16, 24, 32, 48, 56, 64
IN_ORDER = 0x101  # flags: C-contiguous, aligned

P, I64, I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Input(ctypes.Structure):
    """What an input must be, and the `slot` its bytes go to, unless they lie there. `fixed`: they must. `given`: what was
    passed, or is bound."""

    _fields_ = [
        ("descr", P), ("ndim", I64), ("dims", P), ("nbytes", I64), ("slot", P), ("fixed", I64), ("name", P), ("given", P),
    ]  # fmt: skip


class Call(ctypes.Structure):
    """One function. `walk(run)` is the run; memory [low, high) holds slots. Python objects: `slow`; `settle`, called with a
    status that is not 0; `result`, to be called first if `makes`; `acquire` and `release` of a lock to hold, or null.
    `yields`: the GIL is released meanwhile."""

    _fields_ = [
        ("inputs", P), ("count", I64), ("low", P), ("high", P), ("gate", P), ("walk", P), ("run", P), ("slow", P), ("settle", P),
        ("result", P), ("makes", I64), ("acquire", P), ("release", P), ("yields", I64),
        ("array_type", P), ("list_type", P), ("tuple_type", P), ("dict_type", P), ("str_type", P), ("true", P), ("false", P),
        ("error_type", P), ("error", P), ("trace", P),
    ]  # fmt: skip
