"""Machine code for collectives over shared memory (rlx.driver.transports.shm). The steps of a plan (rlx.driver.schedule) become a
table that machine code executes without the interpreter. all_reduce is a built-in function that finds the table by its arguments.

Data that fits a stage is exchanged there instead of in the scratch. Each rank has two stages (double buffering), so one barrier
is enough: it separates reuse. If a barrier does not complete in time, Python handles it (ShmTransport.settle finds ranks that
died or are late), and execution continues after it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from rlx.driver import reduce_code
from rlx.driver.barrier import detail_of
from rlx.driver.collective import Plan
from rlx.driver.schedule import MINE, OUT, Address
from rlx.driver.symmetric import together
from rlx.driver.transports.shm_barrier import barrier_address
from rlx.driver.transports.shm_words import INTERRUPTED, LINE_BYTES, PENDING, STAGE_BYTES, BarrierState, Line
from rlx.forks import Lock
from rlx.host import calls
from rlx.host.abi import DATA, DESCR, DIMS, FLAGS, I64, NDIM, OB_TYPE, P
from rlx.host.builtin import METH_FASTCALL, MethodDef, builtin
from rlx.host.emit import V
from rlx.host.functions import NULL, Body, Functions, fields_of
from rlx.host.jit import Library, compile_object
from rlx.host.processor import host_target

ENTRIES = 32  # calls of all_reduce that the built-in function of a transport remembers
USABLE = 0x501  # required flags of an array: C-contiguous, aligned, writable
STAGED = detail_of(staged=1)
COPY, REDUCE, BARRIER = 0, 1, 2


class Row(ctypes.Structure):
    """A step. `goal_from`, `source_from`: the base of an address, 0 (absolute), 1 (the array) or 2 (the result's array). For a
    reduction, `source` is a table of `sources` addresses. Entry `own`, if not negative, is set to byte `own_at` of the array."""

    _fields_ = [
        ("op", I64), ("goal", I64), ("goal_from", I64), ("source", I64), ("source_from", I64), ("amount", I64), ("sources", I64),
        ("own", I64), ("own_at", I64), ("divisor", I64), ("fn", P),
    ]  # fmt: skip


class Walk(ctypes.Structure):
    """The steps of a plan. If stages are used, there are two tables, for barriers with even and with odd numbers. `next`: the row
    to continue with."""

    _fields_ = [
        ("even", P), ("odd", P), ("end", I64), ("next", P), ("until", P), ("zero", P), ("array", P), ("result", P),
        ("state", P), ("barrier", P), ("call", I64 * 4),
    ]  # fmt: skip


class Entry(ctypes.Structure):
    """A remembered call: its arguments (objects, by address), and its Walk."""

    _fields_ = [("buffer", P), ("kind", P), ("descr", P), ("ndim", I64), ("dims", P), ("nbytes", I64), ("walk", P)]


class Known(ctypes.Structure):
    """The data of a transport's built-in function. [low, high): the heaps. `busy`: the word Collectives.busy; read and written
    under the GIL."""

    _fields_ = [
        ("entries", P), ("known", I64), ("low", P), ("high", P), ("shared", P), ("slow", P), ("settle", P), ("none", P),
        ("array_type", P), ("busy", P),
    ]  # fmt: skip


class WalkBody(Body):
    fields = {
        **fields_of(Row, Walk, Entry, Known),
        **{k: v for k, v in fields_of(BarrierState).items() if k in ("number", "what", "shut", "lines", "rank")},
        **{k: v for k, v in fields_of(Line).items() if k == "fault"},
    }


_functions = Functions()
_native = _functions.native


@_native("i64", w="ptr")
def rlx_ranks_walk(e: WalkBody, w: V) -> None:
    """Continue from row `next`. Returns 0 when done, else the result of a barrier; `next` is then the row after it."""
    state, until, bases = e.get(w, "state"), e.get(w, "until"), e.at(w, "zero")

    def based(address: V, base: V) -> V:
        return e.gep(e.load("ptr", e.op("ptr", f"getelementptr ptr, {bases}, {base}"), 8), address)

    with e.loop(0, None, carried=[e.get(w, "next")]) as each:
        (row,) = each.carried
        with e.when(e.cmp("eq", row, until)):
            e.ret(e.i64(0))
        following, op = e.gep(row, ctypes.sizeof(Row)), e.get(row, "op")
        each.next = [following]
        with e.when(e.cmp("eq", op, BARRIER)):
            e.put(state, "number", e.bin("add", e.get(state, "number"), 1))
            size = ctypes.sizeof(ctypes.c_int64 * 4)
            e.intrinsic("memcpy", e.at(state, "what"), e.at(w, "call"), e.i64(size), e.const("i1", False),
                        suffix=("ptr", "ptr", "i64"), returns="void")  # fmt: skip
            code = e.call(e.get(w, "barrier"), "i64", state)
            with e.when(e.cmp("ne", code, 0)):
                e.put(w, "next", following)
                e.put(state, "shut", e.bin("or", e.get(state, "shut"), PENDING))
                e.ret(code)
        with e.when(e.cmp("ne", op, BARRIER)):
            goal, amount = based(e.get(row, "goal"), e.get(row, "goal_from")), e.get(row, "amount")
            with e.when(e.cmp("eq", op, COPY)):
                source = based(e.get(row, "source"), e.get(row, "source_from"))
                e.intrinsic("memcpy", goal, source, amount, e.const("i1", False), suffix=("ptr", "ptr", "i64"), returns="void")
            with e.when(e.cmp("eq", op, REDUCE)):
                table, own = e.gep(NULL, e.get(row, "source")), e.get(row, "own")
                with e.when(e.cmp("sge", own, 0)):
                    place = e.op("ptr", f"getelementptr ptr, {table}, {own}")
                    e.store(e.gep(e.get(w, "array"), e.get(row, "own_at")), place, 8)
                e.call(e.get(row, "fn"), "void", goal, table, e.get(row, "sources"), amount, e.get(row, "divisor"))
    e.do("unreachable")


@_native("i64", w="ptr", array="ptr", result="ptr")
def rlx_ranks_begin(e: WalkBody, w: V, array: V, result: V) -> None:
    """Execute a plan from the first row."""
    number = e.get(e.get(w, "state"), "number")
    first = e.select(e.cmp("eq", e.bin("and", number, 1), 0), e.get(w, "odd"), e.get(w, "even"))  # of the next barrier
    e.put(w, "next", first)
    e.put(w, "until", e.gep(first, e.get(w, "end")))
    e.put(w, "array", array)
    e.put(w, "result", result)
    e.ret(rlx_ranks_walk(e, w))


@_native("i64", w="ptr")
def rlx_ranks_go_on(e: WalkBody, w: V) -> None:
    """Continue after a barrier that Python has settled."""
    state = e.get(w, "state")
    e.put(state, "shut", e.bin("and", e.get(state, "shut"), ~PENDING))
    e.ret(rlx_ranks_walk(e, w))


@_native("i1", one="ptr", k="ptr", args="ptr")
def is_known(e: WalkBody, one: V, k: V, args: V) -> None:
    """Whether (buffer, array, kind) match the entry. The array's address may differ."""

    def unless(condition: V) -> None:
        with e.when(e.bin("xor", condition, True)):
            e.ret(e.const("i1", False))

    unless(e.cmp("eq", e.get(one, "buffer"), e.load("ptr", args, 8)))
    unless(e.cmp("eq", e.get(one, "kind"), e.load("ptr", e.gep(args, 16), 8)))
    array = e.load("ptr", e.gep(args, 8), 8)
    unless(e.cmp("eq", e.load("ptr", e.gep(array, OB_TYPE), 8), e.get(k, "array_type")))
    unless(e.cmp("eq", e.load("ptr", e.gep(array, DESCR), 8), e.get(one, "descr")))
    unless(e.cmp("eq", e.bin("and", e.load("i32", e.gep(array, FLAGS), 4), USABLE), USABLE))
    ndim = e.get(one, "ndim")
    unless(e.cmp("eq", e.convert("zext", e.load("i32", e.gep(array, NDIM), 4), "i64"), ndim))
    found, wanted = e.load("ptr", e.gep(array, DIMS), 8), e.get(one, "dims")
    with e.loop(0, ndim) as each:
        at = e.bin("mul", each.index, 8)
        unless(e.cmp("eq", e.load("i64", e.gep(found, at), 8), e.load("i64", e.gep(wanted, at), 8)))
    data = e.load("ptr", e.gep(array, DATA), 8)
    before = e.cmp("ule", e.gep(data, e.get(one, "nbytes")), e.get(k, "low"))
    e.ret(e.bin("or", before, e.cmp("uge", data, e.get(k, "high"))))


@_native("ptr", self="ptr", args="ptr", count="i64")
def rlx_all_reduce(e: WalkBody, self: V, args: V, count: V) -> None:
    """(buffer, array, kind) -> None, as a CPython function. `self`: an int, the address of a Known."""
    k = e.python("PyLong_AsVoidPtr", "ptr", self)
    busy = e.get(k, "busy")
    sound = e.cmp("eq", e.bin("or", e.get(e.get(k, "shared"), "shut"), e.load("i64", busy, 8)), 0)
    with e.when(e.bin("and", sound, e.cmp("eq", count, 3))):
        known, entries = e.get(k, "known"), e.get(k, "entries")
        with e.loop(0, known) as each:
            entry = e.gep(entries, e.bin("mul", each.index, ctypes.sizeof(Entry)))
            with e.when(is_known(e, entry, k, args)):
                walk = e.get(entry, "walk")
                data = e.load("ptr", e.gep(e.load("ptr", e.gep(args, 8), 8), DATA), 8)
                e.store(e.i64(1), busy, 8)
                thread = e.python("PyEval_SaveThread", "ptr")
                code = rlx_ranks_begin(e, walk, data, data)
                e.python("PyEval_RestoreThread", "void", thread)
                with e.when(e.cmp("ne", code, 0)):
                    result = settled(e, k, walk, code)
                    e.store(e.i64(0), busy, 8)
                    e.ret(result)
                e.store(e.i64(0), busy, 8)
                none = e.get(k, "none")
                e.python("Py_IncRef", "void", none)
                e.ret(none)
    e.ret(e.python("PyObject_Vectorcall", "ptr", e.get(k, "slow"), args, count, NULL))


@_native("ptr", k="ptr", walk="ptr", code="i64")
def settled(e: WalkBody, k: V, walk: V, code: V) -> None:
    """Let Python settle the barrier and finish the call. Returns None, or null if it raised. Ctrl-C may raise before its first
    line."""
    address = e.python("PyLong_FromVoidPtr", "ptr", walk)
    number = e.python("PyLong_FromLong", "ptr", code)
    args = e.op("ptr", "alloca ptr, i64 2, align 8")
    for i, value in enumerate((address, number)):
        e.store(value, e.gep(args, 8 * i), 8)
    result = e.python("PyObject_Vectorcall", "ptr", e.get(k, "settle"), args, e.i64(2), NULL)
    for value in (address, number):
        e.python("Py_DecRef", "void", value)
    state = e.get(k, "shared")
    abandoned = e.cmp("ne", e.bin("and", e.get(state, "shut"), PENDING), 0)
    with e.when(e.bin("and", e.cmp("eq", result, NULL), abandoned)):
        rank = e.get(state, "rank")
        line = e.gep(e.get(state, "lines"), e.bin("mul", rank, LINE_BYTES))
        e.put(line, "fault", e.bin("or", e.bin("shl", rank, 8), INTERRUPTED))
    e.ret(result)


# -- construction --------------------------------------------------------------------------------------------------


Made = tuple[Callable[..., int], Callable[..., int], MethodDef, Library]


@cache
def _make() -> Made:
    symbols = ("rlx_ranks_go_on", "rlx_ranks_begin", "rlx_all_reduce")
    library = Library([compile_object(_functions.module_text(WalkBody), host_target(1), "collectives", keep=True)], symbols)
    document = b"all_reduce($self, buffer, array, kind, /)\n--\n\nEvery rank's array combined, in place."
    definition = MethodDef(b"all_reduce", library.address("rlx_all_reduce"), METH_FASTCALL, document)
    begin, go_on = library.function("rlx_ranks_begin", I64, P, P, P), library.function("rlx_ranks_go_on", I64, P)
    return begin, go_on, definition, library


_making = Lock()


def _made() -> Made:
    """rlx_ranks_begin and rlx_ranks_go_on (both release the GIL), the definition of all_reduce, and the library. Made once and
    kept for the life of the process."""
    with _making:
        return _make()


def begin_address() -> int:
    """Address of rlx_ranks_begin: i64 (ptr walk, ptr array, ptr result). A result other than 0 is passed to Table.settle."""
    return _made()[3].address("rlx_ranks_begin")


class Table:
    """A plan over one transport as rows. Keeps alive the memory that they point to."""

    def __init__(self, transport: Any, plan: Plan) -> None:
        self.transport, self.plan, self.kept = transport, plan, []
        self.seen: Any = None  # the buffer of the last call
        steps, staged = plan.steps, self._may_be_staged()
        if staged:
            steps = steps[:-1]  # no last barrier: the scratch was not used
            plan.call = plan.call._replace(detail=plan.call.detail | STAGED)
        self.steps = steps
        tables = [self._rows(half if staged else None) for half in (0, 1)] if staged else [self._rows(None)] * 2
        self.walk = Walk(even=ctypes.addressof(tables[0]), odd=ctypes.addressof(tables[1]), end=ctypes.sizeof(tables[0]))
        self.walk.state, self.walk.barrier = ctypes.addressof(transport.state), barrier_address()
        self.walk.call[:] = list(plan.call)
        self.kept += [tables, transport.state]
        self.address = ctypes.addressof(self.walk)
        self._begin, self._go_on, *_ = _made()

    def run(self, array: np.ndarray, out: np.ndarray) -> None:
        """`array`, `out`: their bytes."""
        self.transport.check()
        together(self.transport, self._run, array.ctypes.data, out.ctypes.data)

    def _run(self, array: int, out: int) -> None:
        self.settle(self._begin(self.address, array, out))

    def settle(self, code: int) -> None:
        while code:
            self.transport.settle(code)
            code = self._go_on(self.address)

    def _may_be_staged(self) -> bool:
        steps = self.plan.steps
        return self.plan.job.nbytes <= STAGE_BYTES and [s.op for s in steps].count("barrier") == 2 and not self.plan.job.in_place

    def _rows(self, half: int | None) -> Any:
        m = self.transport.state

        def address(place: Address) -> int:
            if place.where < 0:
                return place.at
            if half is None:
                return m.heaps + place.where * m.stride + self.plan.call.offset + place.at
            return m.stages + (2 * place.where + half) * STAGE_BYTES + place.at

        rows = (Row * len(self.steps))()
        for row, step in zip(rows, self.steps):
            row.op = {"barrier": BARRIER, "copy": COPY}.get(step.op, REDUCE)
            row.goal, row.goal_from, row.amount, row.own = address(step.out), _base(step.out), step.nbytes, -1
            if row.op == COPY:
                row.source, row.source_from = address(step.sources[0]), _base(step.sources[0])
            elif row.op == REDUCE:
                table = (P * len(step.sources))(*(None if s.where < 0 else address(s) for s in step.sources))
                for i, s in enumerate(step.sources):
                    if s.where < 0:
                        row.own, row.own_at = i, s.at
                library = reduce_code.library(form := self.plan.form(step))
                row.source, row.sources, row.amount = ctypes.addressof(table), len(table), step.nbytes // self.plan.job.itemsize
                row.divisor, row.fn = form.ranks, library.address(reduce_code.SYMBOL)
                self.kept += [table, library]
        return rows


def _base(place: Address) -> int:
    return {MINE: 1, OUT: 2}.get(place.where, 0)


class Remembered:
    """all_reduce of one transport as a built-in function that recognises remembered calls. All others go to `slow`."""

    def __init__(self, transport: Any, slow: Callable[..., Any], busy: ctypes.c_int64) -> None:
        self.entries, self.count = (Entry * ENTRIES)(), 0
        self.tables: list[Any] = [None] * ENTRIES
        m, total = transport.state, transport.num_ranks * transport.state.stride
        known = Known(entries=ctypes.addressof(self.entries), low=m.heaps, high=m.heaps + total, shared=ctypes.addressof(m))
        settle = self._settle
        known.slow, known.settle, known.none, known.array_type = id(slow), id(settle), id(None), id(np.ndarray)
        known.busy = ctypes.addressof(busy)
        self.known = known
        definition = _made()[2]
        kept = calls._Kept(known, self, slow, settle, m, definition, busy)
        self.function = builtin(definition, ctypes.addressof(known), kept)

    def remember(self, buffer: Any, kind: Any, array: np.ndarray, table: Table) -> None:
        """Remember a call, from its second time on: callers that make a new buffer for each call would evict all others."""
        if table.seen is not buffer:
            table.seen = buffer
            return
        at = self.count % ENTRIES
        dims = (I64 * max(1, array.ndim))(*array.shape)
        entry, last = self.entries[at], self.tables[at]
        self.tables[at] = (table, buffer, kind, array.dtype, dims)
        entry.buffer, entry.kind, entry.descr, entry.ndim = id(buffer), id(kind), id(array.dtype), array.ndim
        entry.dims, entry.nbytes, entry.walk = ctypes.addressof(dims), array.nbytes, table.address
        self.count += 1
        self.known.known = min(self.count, ENTRIES)
        del last  # only now is it unreferenced

    def _settle(self, walk: int, code: int) -> None:
        table = next(kept[0] for kept in self.tables if kept and kept[0].address == walk)
        table.settle(code)


def remembered(transport: Any, slow: Callable[..., None], busy: ctypes.c_int64) -> Remembered | None:
    """The Remembered of a transport. None: generated built-in functions do not support this Python or numpy."""
    return Remembered(transport, slow, busy) if calls.refusal() is None else None
