"""Data layout shared by Python and machine code calls: offsets in Python objects, and C structures."""

from __future__ import annotations

import ctypes

# Offsets of the fields of a numpy array that calls read
OB_TYPE = 8  # PyObject; below, PyArrayObject
DATA, NDIM, DIMS, BASE, DESCR, FLAGS = 16, 24, 32, 48, 56, 64
IN_ORDER = 0x101  # flags: C-contiguous, aligned

P, I64, I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class Input(ctypes.Structure):
    """The required dtype and dims of an input, and the `slot` that its bytes are copied to, unless they are there already.
    `fixed`: they must be there already. `given`: the array that was passed or bound."""

    _fields_ = [("descr", P), ("ndim", I64), ("dims", P), ("nbytes", I64), ("slot", P), ("fixed", I64), ("name", P), ("given", P)]


class Call(ctypes.Structure):
    """The data of one generated function. `walk(run)` executes a run. Memory [low, high) holds slots. Python objects: `slow`, the
    fallback; `settle`, called with a status other than 0; `result`, or if `makes` a function that returns the result; `acquire`
    and `release` of a lock to hold, or null. `yields`: release the GIL during the run."""

    _fields_ = [
        ("inputs", P), ("count", I64), ("low", P), ("high", P), ("gate", P), ("walk", P), ("run", P), ("slow", P), ("settle", P),
        ("result", P), ("makes", I64), ("acquire", P), ("release", P), ("yields", I64),
        ("array_type", P), ("list_type", P), ("tuple_type", P), ("dict_type", P), ("str_type", P), ("true", P), ("false", P),
        ("error_type", P), ("error", P), ("trace", P),
    ]  # fmt: skip
