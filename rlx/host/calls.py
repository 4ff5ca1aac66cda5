"""Built-in functions of Python whose bodies are machine code: they check the arguments, copy them in and run without the
interpreter.

Each function has a Call structure. It handles the common case only. All other cases go to the Python function `slow` with the
same arguments, which waits, converts or raises. Nothing is written before it is certain that the run takes place.

Only documented interfaces are used: CPython's C API, the type of an object (ob_type), and numpy's PyArrayObject. They hold for
the versions in SUPPORTED; `refusal` checks them on sample arrays before the first function is made.

The GIL guards the structure. A call that keeps the GIL (a short program that cannot fail) needs no lock: Gate.shut says whether
another call was interrupted inside. All other calls take the executable's lock, if it is free.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np

from rlx import knobs
from rlx.errors import OptionError
from rlx.forks import Lock
from rlx.host.abi import BASE, DATA, DESCR, DIMS, FLAGS, IN_ORDER, NDIM, OB_TYPE, Call, Input, P
from rlx.host.builtin import METH_FASTCALL, METH_KEYWORDS, MethodDef, builtin
from rlx.host.gate import FastCall
from rlx.host.jit import Library, kept_object
from rlx.records import record

SUPPORTED = MappingProxyType({"python": ((3, 11), (3, 12), (3, 13), (3, 14)), "numpy": (0x02000000,)})  # numpy: of its C ABI
GIL_NS = 20_000  # runs estimated to take longer release the GIL; taking it back may wait milliseconds for other threads

FORMS = {"list": "rlx_call_list", "dict": "rlx_call_dict", "none": "rlx_call_bound"}  # form of the argument -> function


# -- construction --------------------------------------------------------------------------------------------------


@record
class Slot:
    """An input of a call, and the `address` of its slot. `fixed`: its bytes are there already, and must stay there."""

    name: str
    dims: tuple[int, ...]
    dtype: np.dtype
    address: int
    array: np.ndarray | None = None  # the bound array
    fixed: bool = False


class _Kept:
    """Keeps alive all objects that a Call points to. The built-in function holds it as its __module__."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __str__(self) -> str:
        return "rlx"


def refusal() -> str | None:
    """Why there are no machine code calls in this process. None: there are. OptionError: RLX_CALLS has an invalid value."""
    wanted = knobs.CALLS.get()
    if wanted not in ("native", "python"):
        raise OptionError(f"environment variable {knobs.CALLS.env} is {wanted!r}, expected native or python")
    return "RLX_CALLS is python" if wanted == "python" else _unknown()


@cache
def _unknown() -> str | None:
    """Why this process's Python or numpy is not supported. None: both are."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in SUPPORTED["python"]:
        return f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]} is not a known Python"
    if "t" in getattr(sys, "abiflags", "") or ctypes.sizeof(P) != 8:
        return "a Python without GIL, or of 32 bits"
    if (abi := numpy_abi()) not in SUPPORTED["numpy"]:
        return f"numpy's C interface is version {abi:#x}"
    return None if all(map(_is_laid_out, _samples())) else "arrays are not laid out as numpy documents it"


def numpy_abi() -> int:
    """PyArray_GetNDArrayCVersion(), the first function of numpy's C interface."""
    interface = getattr(import_module("numpy._core._multiarray_umath"), "_ARRAY_API")  # noqa: B009  as import_array() finds it
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = P, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.CFUNCTYPE(ctypes.c_uint)(P.from_address(get(interface, None)).value or 0)()


def _samples() -> list[np.ndarray]:
    whole = np.arange(24, dtype=np.float32)
    fixed, odd = whole.reshape(2, 3, 4), whole.view(np.uint8)[1:9].view("f8")
    fixed.flags.writeable = False
    return [whole, fixed, fixed.T, whole[::2], odd, np.zeros((), np.int64), np.zeros((0, 3), bool)]


def _is_laid_out(array: np.ndarray) -> bool:
    """Whether the fields in the object's memory agree with its attributes."""
    here = id(array)
    word = lambda at: ctypes.c_int64.from_address(here + at).value  # noqa: E731
    half = lambda at: ctypes.c_int32.from_address(here + at).value  # noqa: E731
    in_order = array.flags.c_contiguous and array.flags.aligned
    dims = word(DIMS)
    return (
        (word(OB_TYPE), word(DATA), half(NDIM), word(DESCR)) == (id(type(array)), array.ctypes.data, array.ndim, id(array.dtype))
        and word(BASE) == (0 if array.base is None else id(array.base))
        and (half(FLAGS) & IN_ORDER == IN_ORDER) == in_order
        and all(ctypes.c_int64.from_address(dims + 8 * i).value == n for i, n in enumerate(array.shape))
    )


_making = Lock()


@cache
def _made(name: str, form: str, doc: str) -> MethodDef:
    """Made once and kept for the life of the process, because built-in functions point to it. One per name, for help()."""
    text = f"{name}({'' if form == 'none' else '$self, inputs, /'})\n--\n\n{doc}"
    return MethodDef(name.encode(), library().address(FORMS[form]), METH_FASTCALL | METH_KEYWORDS, text.encode())


def library() -> Library:
    """The machine code of all calls."""
    with _making:
        return _library()


@cache
def _library() -> Library:
    def text() -> str:
        from rlx.host import call_code  # not needed if its code is in the disk cache

        return call_code.module_text()

    return Library([kept_object("calls", text)], tuple(FORMS.values()))


def make(
    wanted: FastCall, inputs: Sequence[Slot], taken: tuple[int, int], run: int, settle: Callable[[int], None],
    alone: bool, yields: bool, walk: int,
) -> Callable[..., Any]:  # fmt: skip
    """Make the function. `taken`: begin and end address of the memory that contains the slots. `walk`: address of the function
    `i32 (ptr run)` that executes a run. `run`: its argument, which `settle` keeps alive. `alone`: hold the lock during the run.
    `yields`: release the GIL during the run."""
    rows = (Input * max(1, len(inputs)))()
    kept: list[Any] = [rows, wanted, settle]
    for row, i in zip(rows, inputs):
        dims, name = (ctypes.c_int64 * max(1, len(i.dims)))(*i.dims), sys.intern(i.name)
        nbytes = i.dtype.itemsize * int(np.prod(i.dims, dtype=np.int64))
        row.descr, row.ndim, row.dims, row.nbytes = id(i.dtype), len(i.dims), ctypes.addressof(dims), nbytes
        row.slot, row.fixed, row.name = i.address, i.fixed, id(name)
        row.given = None if i.array is None else id(i.array)
        kept += [dims, name, i]
    call = Call(inputs=ctypes.addressof(rows), count=len(inputs), low=taken[0], high=taken[1])
    call.gate, call.walk, call.run = ctypes.addressof(wanted.gate), walk, run
    call.slow, call.settle, call.result, call.makes = id(wanted.slow), id(settle), id(wanted.result), wanted.makes
    if alone or yields or wanted.makes:
        acquire, release = wanted.gate.lock.acquire, wanted.gate.lock.release
        call.acquire, call.release = id(acquire), id(release)
        kept += [acquire, release]
    call.yields, call.true, call.false = yields, id(True), id(False)
    call.array_type, call.list_type, call.tuple_type = id(np.ndarray), id(list), id(tuple)
    call.dict_type, call.str_type = id(dict), id(str)
    with _making:  # else concurrent threads would make several, and each must live for ever
        definition = _made(wanted.name, wanted.form, wanted.doc)
    return builtin(definition, ctypes.addressof(call), _Kept(call, definition, library(), *kept))
