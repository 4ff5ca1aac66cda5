"""The machine code of calls (rlx.host.calls): functions on a Call. Each decorated Python function here emits one of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from rlx.host.abi import DATA, DESCR, DIMS, FLAGS, IN_ORDER, NDIM, OB_TYPE, Call, Input
from rlx.host.emit import V
from rlx.host.functions import NULL, Body, Functions, fields_of
from rlx.host.gate import Gate


class CallBody(Body):
    """The body of a function on a Call."""

    fields = fields_of(Gate, Input, Call)

    def type_of(self, thing: V) -> V:
        return self.load("ptr", self.gep(thing, OB_TYPE), 8)

    def refuse(self, condition: V) -> None:
        """return False if the condition holds"""
        with self.when(condition):
            self.ret(self.const("i1", False))

    def input(self, call: V, index: V) -> V:
        return self.gep(self.get(call, "inputs"), self.bin("mul", index, ctypes.sizeof(Input)))


_functions = Functions()
_native = _functions.native


# -- checks of arguments -------------------------------------------------------------------------------------------


@_native("i1", call="ptr", input="ptr")
def fits(e: CallBody, call: V, input: V) -> None:
    """Whether the given object is an array of the input's dtype and dims that does not overlap the slots of other inputs."""
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
    """Check all given arrays and, if they fit, copy them to the slots. Returns whether they fit."""
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
    """return whether the list or tuple has one item per input; then these are set as `given`"""
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
    """The input of that name, or null. Usually the string objects are identical. Otherwise only plain strings are compared."""
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
    """As of_list, for a dict. Keys' own hash and comparison methods are not called: they could run any code and free arrays."""
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
    """Release the lock, if this call holds one. A pending exception is kept."""
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
    """Whether a run can take place now. If so, this call holds the lock, if it needs one."""
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
        with e.when(locked):  # a gate shut by a feed is shut without the lock
            done = e.python("PyObject_CallNoArgs", "ptr", e.get(call, "release"))
            with e.when(e.cmp("ne", done, NULL)):
                e.python("Py_DecRef", "void", done)
        e.ret(e.const("i1", False))
    with e.when(locked):
        e.put(gate, "shut", 1)
    e.ret(e.const("i1", True))


@_native("ptr", call="ptr", status="i32")
def settled(e: CallBody, call: V, status: V) -> None:
    """The result of a run that returned `status`. null: an exception is set."""
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
    """Run on the contents of the slots. Returns the result, or null with an exception set."""
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
    """Run on the given arrays. Returns the result; null: an exception is set; `call` itself: this is not the common case."""
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
    """A function with one positional argument. `collect`: sets its items as `given`."""
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


@_native("ptr", self="ptr", args="ptr", count="i64", names="ptr")
def rlx_call_bound(e: CallBody, self: V, args: V, count: V, names: V) -> None:
    call = e.python("PyLong_AsVoidPtr", "ptr", self)
    with e.when(e.bin("and", e.cmp("eq", count, 0), e.cmp("eq", names, NULL))):
        result = attempt(e, call)
        with e.when(e.cmp("ne", result, call)):
            e.ret(result)
    e.ret(e.python("PyObject_Vectorcall", "ptr", e.get(call, "slow"), args, count, names))


def module_text() -> str:
    """The module of all functions, as LLVM IR."""
    return _functions.module_text(CallBody)
