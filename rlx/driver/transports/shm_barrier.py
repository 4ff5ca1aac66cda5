"""Barriers of rlx.driver.transports.shm as machine code.

A rank waits by bounded spinning, then sched_yield, then a shared futex with a timeout. Then the function returns the rank that is
missing, so that the caller can check whether it is alive and call again.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from functools import cache

from rlx.driver.transports.shm_words import CALL_BYTES, LINE_BYTES, WAITING, WORDS, BarrierState, Line
from rlx.forks import Lock
from rlx.host.builtin import METH_NOARGS, MethodDef, address_of, builtin, futex_call
from rlx.host.emit import V
from rlx.host.functions import EVERYBODY, NULL, Body, Functions, fields_of
from rlx.host.jit import Library, compile_object
from rlx.host.processor import host_target

WAIT, WAKE = 0, 1  # futex operations, across processes


class BarrierBody(Body):
    fields = fields_of(Line, BarrierState)


_functions = Functions()
_native = _functions.native


@_native("i1", m="ptr", line="ptr", number="i64")
def arrived(e: BarrierBody, m: V, line: V, number: V) -> None:
    """Whether the rank of `line` has come to barrier `number`, after a bounded wait."""
    there = lambda order: e.cmp("sge", e.get(line, "epoch", order), number)  # noqa: E731
    yes = e.const("i1", True)
    with e.when(there("acquire")):
        e.ret(yes)
    with e.loop(0, e.get(m, "spins")):
        e.pause()
        with e.when(there("acquire")):
            e.ret(yes)
    with e.loop(0, e.get(m, "yields")):
        e.call(e.get(m, "sched_yield"), "i32")
        with e.when(there("acquire")):
            e.ret(yes)
    e.change("add", line, "sleepers", 1)  # before the epoch is read: a rank that changes it later sees this and wakes us
    seen = e.get(line, "epoch", "seq_cst")
    with e.when(e.cmp("slt", seen, number)):
        if e.futex_call:
            futex(e, m, line, WAIT, e.convert("trunc", seen, "i32"), e.at(m, "seconds"))
        else:
            e.call(e.get(m, "wait"), "i32", e.const("i32", 500))
    e.change("sub", line, "sleepers", 1)
    e.ret(there("acquire"))


def futex(e: BarrierBody, m: V, line: V, operation: int, value: V, timeout: V) -> None:
    """A futex operation on the low half of a rank's epoch (little-endian)."""
    args = e.i64(e.futex_call), e.at(line, "epoch"), e.const("i32", operation), value, timeout, NULL, e.i64(0)
    e.call(e.get(m, "wait"), "i64 (i64, ...)", *args)


@_native("i64", m="ptr")
def rlx_ranks_barrier(e: BarrierBody, m: V) -> None:
    """Come to the barrier described by `m` and wait for a bounded time. Returns 0, 1 or 2 + rank; see BarrierState."""
    lines, number = e.get(m, "lines"), e.get(m, "number")
    half = e.bin("mul", e.bin("and", number, 1), CALL_BYTES)
    call = [e.get(m, word) for word in WORDS]

    def words(line: V) -> list[V]:
        begin = e.gep(e.at(line, "calls"), half)
        return [e.gep(begin, 8 * i) for i in range(len(WORDS))]

    mine = e.gep(lines, e.bin("mul", e.get(m, "rank"), LINE_BYTES))
    for value, place in zip(call, words(mine)):
        e.store(value, place, 8)
    e.put(mine, "epoch", number, "seq_cst")
    with e.when(e.cmp("ne", e.get(mine, "sleepers", "seq_cst"), 0)):
        if e.futex_call:
            futex(e, m, mine, WAKE, EVERYBODY, NULL)
    with e.loop(0, e.get(m, "ranks"), carried=[e.i64(0)]) as each:
        line = e.gep(lines, e.bin("mul", each.index, LINE_BYTES))
        with e.when(e.bin("xor", arrived(e, m, line, number), True)):
            e.ret(e.bin("add", each.index, WAITING))
        (differ,) = each.carried
        for value, place in zip(call, words(line)):
            differ = e.bin("or", differ, e.bin("xor", e.load("i64", place, 8), value))
        each.next = [differ]
    e.ret(e.convert("zext", e.cmp("ne", each.results[0], 0), "i64"))


@_native("ptr", self="ptr", unused="ptr")
def rlx_ranks_barrier_py(e: BarrierBody, self: V, unused: V) -> None:
    """rlx_ranks_barrier as a CPython function without arguments. `self`: an int, the BarrierState's address. Releases the GIL."""
    m = e.python("PyLong_AsVoidPtr", "ptr", self)
    thread = e.python("PyEval_SaveThread", "ptr")
    code = rlx_ranks_barrier(e, m)
    e.python("PyEval_RestoreThread", "void", thread)
    e.ret(e.python("PyLong_FromLong", "ptr", code))


_making = Lock()


@cache
def _made() -> tuple[Library, MethodDef]:
    text = _functions.module_text(lambda: BarrierBody(platform.machine(), futex_call()))
    library = Library([compile_object(text, host_target(1), "ranks", keep=True)], ("rlx_ranks_barrier", "rlx_ranks_barrier_py"))
    return library, MethodDef(b"barrier", library.address("rlx_ranks_barrier_py"), METH_NOARGS, b"Come to a barrier.")


def _library() -> tuple[Library, MethodDef]:
    """Made once and kept for the life of the process, because built-in functions point to it."""
    with _making:
        return _made()


def barrier_address() -> int:
    """Address of rlx_ranks_barrier: i64 (ptr state)."""
    return _library()[0].address("rlx_ranks_barrier")


def barrier_of(state: BarrierState) -> Callable[[], int]:
    """rlx_ranks_barrier for a state, which must outlive the function. Also sets the functions of the state for sleeping."""
    libc = ctypes.CDLL(None)
    state.wait = address_of(libc.syscall if futex_call() else libc.usleep)
    state.sched_yield = address_of(libc.sched_yield)
    return builtin(_library()[1], ctypes.addressof(state))


__all__ = ["barrier_address", "barrier_of"]
