"""Calls as built-in functions of Python whose body is machine code: what is passed is checked, copied in and run without a
step of the interpreter.

Each function looks at its Call, a block of words. Whatever is not the usual case goes to the Python function `slow`, with the
same arguments: it waits, converts, or raises. Nothing is written before it is certain that the run takes place.

Only documented interfaces are used: CPython's C API, the type of an object (ob_type), and numpy's PyArrayObject. They hold
for the versions in SUPPORTED; `refusal` compares them with arrays it knows before the first function is made.

The GIL guards the block. A call that keeps it (a short program that cannot fail) needs no lock: Gate.shut says whether
somebody is inside whom the interpreter interrupted. Others take the executable's lock, if it is free.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import Any

import numpy as np

from rlx import knobs
from rlx.backends.cpu.emit import V
from rlx.backends.cpu.jit import Library, compile_object
from rlx.backends.cpu.pool import MethodDef, builtin, run_address
from rlx.backends.cpu.target import host_target
from rlx.backends.cpu.walker import I64, NULL, Body, Functions, P, fields_of
from rlx.driver.calls import FastCall, Gate
from rlx.errors import OptionError

SUPPORTED = MappingProxyType({"python": ((3, 11), (3, 12), (3, 13), (3, 14)), "numpy": (0x02000000,)})  # numpy: of its C ABI
OB_TYPE = 8  # PyObject; below, PyArrayObject
DATA, NDIM, DIMS, BASE, DESCR, FLAGS = 16, 24, 32, 48, 56, 64
IN_ORDER = 0x101  # flags: C-contiguous, aligned

GIL_NS = 20_000  # a run estimated at more lets other Python threads go on; taking the GIL back may wait for them, milliseconds

METH_NOARGS, METH_FASTCALL, METH_KEYWORDS = 4, 0x80, 2
FORMS = {"list": "rlx_call_list", "dict": "rlx_call_dict", "none": "rlx_call_bound"}  # what is passed -> function


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


class CallBody(Body):
    """Body of a function on a Call."""

    fields = fields_of(Gate, Input, Call)

    def type_of(self, thing: V) -> V:
        return self.load("ptr", self.gep(thing, OB_TYPE), 8)

    def refuse(self, condition: V) -> None:
        """return False where the condition holds"""
        with self.when(condition):
            self.ret(self.const("i1", False))

    def input(self, call: V, index: V) -> V:
        return self.gep(self.get(call, "inputs"), self.bin("mul", index, ctypes.sizeof(Input)))


_functions = Functions()
_native = _functions.native


# -- what was passed -----------------------------------------------------------------------------------------------


@_native("i1", call="ptr", input="ptr")
def fits(e: CallBody, call: V, input: V) -> None:
    """Whether what was given is an array such as the input takes, not in the way of another input."""
    array = e.get(input, "given")
    e.refuse(e.cmp("ne", e.type_of(array), e.get(call, "array_type")))
    e.refuse(e.cmp("ne", e.load("ptr", e.gep(array, DESCR), 8), e.get(input, "descr")))
    flags = e.bin("and", e.load("i32", e.gep(array, FLAGS), 4), IN_ORDER)
    e.refuse(e.cmp("ne", flags, IN_ORDER))
    ndim = e.get(input, "ndim")
    e.refuse(e.cmp("ne", e.convert("zext", e.load("i32", e.gep(array, NDIM), 4), "i64"), ndim))
    found, wanted = e.load("ptr", e.gep(array, DIMS), 8), e.get(input, "dims")
    with e.loop(0, ndim) as each:
        at = e.bin("mul", each.index, 8)
        e.refuse(e.cmp("ne", e.load("i64", e.gep(found, at), 8), e.load("i64", e.gep(wanted, at), 8)))
    data = e.load("ptr", e.gep(array, DATA), 8)
    with e.when(e.cmp("eq", data, e.get(input, "slot"))):
        e.ret(e.const("i1", True))
    e.refuse(e.cmp("ne", e.get(input, "fixed"), 0))
    before = e.cmp("ule", e.gep(data, e.get(input, "nbytes")), e.get(call, "low"))
    e.ret(e.bin("or", before, e.cmp("uge", data, e.get(call, "high"))))


@_native("i1", call="ptr")
def copied_in(e: CallBody, call: V) -> None:
    """Whether all that was given fits; then it is in the slots."""
    count = e.get(call, "count")
    with e.loop(0, count) as each:
        e.refuse(e.cmp("eq", fits(e, call, e.input(call, each.index)), 0))
    with e.loop(0, count) as each:
        input = e.input(call, each.index)
        slot, data = e.get(input, "slot"), e.load("ptr", e.gep(e.get(input, "given"), DATA), 8)
        with e.when(e.cmp("ne", data, slot)):
            size = e.get(input, "nbytes")
            e.intrinsic("memcpy", slot, data, size, e.const("i1", False), suffix=("ptr", "ptr", "i64"), returns="void")
    e.ret(e.const("i1", True))


def _each_item(e: CallBody, call: V, items: V, kind: str) -> None:
    """return whether the list or tuple has an item for each input, which then is given"""
    count = e.get(call, "count")
    e.refuse(e.cmp("ne", e.python(f"Py{kind}_Size", "i64", items), count))
    with e.loop(0, count) as each:
        e.put(e.input(call, each.index), "given", e.python(f"Py{kind}_GetItem", "ptr", items, each.index))
    e.ret(e.const("i1", True))


@_native("i1", call="ptr", items="ptr")
def of_list(e: CallBody, call: V, items: V) -> None:
    for kind in ("List", "Tuple"):
        with e.when(e.cmp("eq", e.type_of(items), e.get(call, f"{kind.lower()}_type"))):
            _each_item(e, call, items, kind)
    e.ret(e.const("i1", False))


@_native("ptr", call="ptr", name="ptr")
def named(e: CallBody, call: V, name: V) -> None:
    """The input of that name, or null. Most often it is the very object; only plain strings are compared."""
    count = e.get(call, "count")
    with e.loop(0, count) as each:
        input = e.input(call, each.index)
        with e.when(e.cmp("eq", e.get(input, "name"), name)):
            e.ret(input)
    with e.when(e.cmp("ne", e.type_of(name), e.get(call, "str_type"))):
        e.ret(NULL)
    with e.loop(0, count) as each:
        input = e.input(call, each.index)
        with e.when(e.cmp("eq", e.python("PyUnicode_Compare", "i32", e.get(input, "name"), name), 0)):
            e.ret(input)
    e.ret(NULL)


@_native("i1", call="ptr", given="ptr")
def of_dict(e: CallBody, call: V, given: V) -> None:
    """No key is hashed or compared by its own methods, which could run any code and free what was given."""
    count = e.get(call, "count")
    at, key, value = (e.op("ptr", f"alloca {ty}, align 8") for ty in ("i64", "ptr", "ptr"))
    e.refuse(e.cmp("ne", e.type_of(given), e.get(call, "dict_type")))
    e.refuse(e.cmp("ne", e.python("PyDict_Size", "i64", given), count))
    e.store(e.i64(0), at, 8)
    with e.loop(0, count):
        e.refuse(e.cmp("eq", e.python("PyDict_Next", "i32", given, at, key, value), 0))
        input = named(e, call, e.load("ptr", key, 8))
        e.refuse(e.cmp("eq", input, NULL))
        e.put(input, "given", e.load("ptr", value, 8))
    e.ret(e.const("i1", True))


# -- the run -------------------------------------------------------------------------------------------------------


@_native("void", call="ptr")
def leave(e: CallBody, call: V) -> None:
    """Let go of the lock, if we hold one. An exception that is set stays."""
    release = e.get(call, "release")
    with e.when(e.cmp("ne", release, NULL)):
        raised = [e.at(call, name) for name in ("error_type", "error", "trace")]
        e.python("PyErr_Fetch", "void", *raised)
        error = [e.load("ptr", place, 8) for place in raised]
        e.put(e.get(call, "gate"), "shut", 0)
        done = e.python("PyObject_CallNoArgs", "ptr", release)
        with e.when(e.cmp("ne", done, NULL)):
            e.python("Py_DecRef", "void", done)
        e.python("PyErr_Restore", "void", *error)


@_native("i1", call="ptr")
def enter(e: CallBody, call: V) -> None:
    """Whether a run can take place now; then we hold the lock, if we need one."""
    gate, acquire = e.get(call, "gate"), e.get(call, "acquire")
    locked = e.cmp("ne", acquire, NULL)
    with e.when(locked):
        got = e.python("PyObject_CallOneArg", "ptr", acquire, e.get(call, "false"))
        with e.when(e.cmp("eq", got, NULL)):
            e.python("PyErr_Clear", "void")
            e.ret(e.const("i1", False))
        e.python("Py_DecRef", "void", got)
        e.refuse(e.cmp("ne", got, e.get(call, "true")))
    shut = e.bin("or", e.get(gate, "shut"), e.get(gate, "queued"))
    stale = e.cmp("ne", e.get(gate, "seen"), e.load("i64", e.get(gate, "changes"), 8))
    with e.when(e.bin("or", stale, e.cmp("ne", shut, 0))):
        with e.when(locked):  # whoever shut it for longer, by a feed, holds no lock
            done = e.python("PyObject_CallNoArgs", "ptr", e.get(call, "release"))
            with e.when(e.cmp("ne", done, NULL)):
                e.python("Py_DecRef", "void", done)
        e.ret(e.const("i1", False))
    with e.when(locked):
        e.put(gate, "shut", 1)
    e.ret(e.const("i1", True))


@_native("ptr", call="ptr", status="i32")
def settled(e: CallBody, call: V, status: V) -> None:
    """The result of a run with that status; null: an exception is set."""
    with e.when(e.cmp("ne", status, 0)):
        number = e.python("PyLong_FromLong", "ptr", e.convert("sext", status, "i64"))
        with e.when(e.cmp("eq", number, NULL)):
            e.ret(NULL)
        done = e.python("PyObject_CallOneArg", "ptr", e.get(call, "settle"), number)
        e.python("Py_DecRef", "void", number)
        with e.when(e.cmp("eq", done, NULL)):
            e.ret(NULL)
        e.python("Py_DecRef", "void", done)
    result = e.get(call, "result")
    with e.when(e.cmp("ne", e.get(call, "makes"), 0)):
        e.ret(e.python("PyObject_CallNoArgs", "ptr", result))
    e.python("Py_IncRef", "void", result)
    e.ret(result)


@_native("ptr", call="ptr")
def run(e: CallBody, call: V) -> None:
    """Run on what is in the slots: the result, or null."""
    gate, walk, table = e.get(call, "gate"), e.get(call, "walk"), e.get(call, "run")
    e.put(gate, "generation", e.bin("add", e.get(gate, "generation"), 1))
    with e.when(e.cmp("ne", e.get(call, "yields"), 0)):
        thread = e.python("PyEval_SaveThread", "ptr")
        status = e.call(walk, "i32", table)
        e.python("PyEval_RestoreThread", "void", thread)
        e.ret(settled(e, call, status))
    e.ret(settled(e, call, e.call(walk, "i32", table)))


@_native("ptr", call="ptr")
def attempt(e: CallBody, call: V) -> None:
    """The result of a run on what is given; null: an exception is set; `call` itself: this is not the usual case."""
    with e.when(e.cmp("eq", enter(e, call), 0)):
        e.ret(call)
    with e.when(e.cmp("eq", copied_in(e, call), 0)):
        leave(e, call)
        e.ret(call)
    result = run(e, call)
    leave(e, call)
    e.ret(result)


# -- entries: functions of CPython, `self` an int, the address of the Call -----------------------------------------


def _entry(e: CallBody, self: V, args: V, count: V, names: V, collect: Callable[..., V]) -> None:
    """One argument by position, which `collect` takes apart."""
    call = e.python("PyLong_AsVoidPtr", "ptr", self)
    plain = e.bin("and", e.cmp("eq", count, 1), e.cmp("eq", names, NULL))
    with e.when(plain), e.when(collect(e, call, e.load("ptr", args, 8))):
        result = attempt(e, call)
        with e.when(e.cmp("ne", result, call)):
            e.ret(result)
    e.ret(e.python("PyObject_Vectorcall", "ptr", e.get(call, "slow"), args, count, names))


@_native("ptr", self="ptr", args="ptr", count="i64", names="ptr")
def rlx_call_list(e: CallBody, self: V, args: V, count: V, names: V) -> None:
    _entry(e, self, args, count, names, of_list)


@_native("ptr", self="ptr", args="ptr", count="i64", names="ptr")
def rlx_call_dict(e: CallBody, self: V, args: V, count: V, names: V) -> None:
    _entry(e, self, args, count, names, of_dict)


@_native("ptr", self="ptr", unused="ptr")
def rlx_call_bound(e: CallBody, self: V, unused: V) -> None:
    call = e.python("PyLong_AsVoidPtr", "ptr", self)
    result = attempt(e, call)
    with e.when(e.cmp("ne", result, call)):
        e.ret(result)
    e.ret(e.python("PyObject_CallNoArgs", "ptr", e.get(call, "slow")))


# -- making them ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    """An input of a call: where its bytes go. `fixed`: they lie there already, and must not move."""

    name: str
    dims: tuple[int, ...]
    dtype: np.dtype
    address: int
    array: np.ndarray | None = None  # what is bound
    fixed: bool = False


class _Kept:
    """All that a call's block points to; the function holds it in the place of its module's name."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __str__(self) -> str:
        return "rlx"


def refusal() -> str | None:
    """Why there are no calls in machine code here; None: there are. OptionError: the knob RLX_CALLS is neither."""
    wanted = knobs.CALLS.get()
    if wanted not in ("native", "python"):
        raise OptionError(f"environment variable {knobs.CALLS.env} is {wanted!r}, expected native or python")
    return "RLX_CALLS is python" if wanted == "python" else _unknown()


@cache
def _unknown() -> str | None:
    """What of this process's Python or numpy is not as these functions need it."""
    if sys.implementation.name != "cpython" or sys.version_info[:2] not in SUPPORTED["python"]:
        return f"{sys.implementation.name} {sys.version_info[0]}.{sys.version_info[1]} is not a known Python"
    if sysconfig.get_config_var("Py_GIL_DISABLED") or ctypes.sizeof(P) != 8:
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
    """Whether the object's bytes say what its attributes say."""
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


_making = threading.Lock()


@cache
def _made(name: str, form: str, doc: str) -> MethodDef:
    """For the life of the process: built-in functions point to it. A text of its own per name, for help()."""
    flags = METH_NOARGS if form == "none" else METH_FASTCALL | METH_KEYWORDS
    text = f"{name}({'' if form == 'none' else '$self, inputs, /'})\n--\n\n{doc}"
    return MethodDef(name.encode(), _library().address(FORMS[form]), flags, text.encode())


@cache
def _library() -> Library:
    text = _functions.module_text(CallBody)
    return Library([compile_object(text, host_target(1), "calls", keep=True)], tuple(FORMS.values()))


def make(
    wanted: FastCall, inputs: Sequence[Slot], taken: tuple[int, int], run: int, settle: Callable[[int], None],
    alone: bool, yields: bool,
) -> Callable[..., Any]:  # fmt: skip
    """The function. `taken`: first address and end of the memory that slots lie in; `run`: address of the pool.Run, which
    `settle` keeps alive; `alone`: to hold the lock meanwhile; `yields`: without the GIL."""
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
    call.gate, call.walk, call.run = ctypes.addressof(wanted.gate), run_address(), run
    call.slow, call.settle, call.result, call.makes = id(wanted.slow), id(settle), id(wanted.result), wanted.makes
    if alone or yields or wanted.makes:
        acquire, release = wanted.lock.acquire, wanted.lock.release
        call.acquire, call.release = id(acquire), id(release)
        kept += [acquire, release]
    call.yields, call.true, call.false = yields, id(True), id(False)
    call.array_type, call.list_type, call.tuple_type = id(np.ndarray), id(list), id(tuple)
    call.dict_type, call.str_type = id(dict), id(str)
    with _making:  # else threads that come together would make several of what must live on
        definition = _made(wanted.name, wanted.form, wanted.doc)
    return builtin(definition, ctypes.addressof(call), _Kept(call, definition, _library(), *kept))
