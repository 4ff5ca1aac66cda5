"""The start of a run as machine code: copies inputs to the ring, then launches a graph through the driver. For rlx.host.calls."""

from __future__ import annotations

import ctypes
from functools import cache

from rlx.host.abi import I64, P
from rlx.host.emit import V
from rlx.host.functions import NULL, Body, Functions, fields_of
from rlx.host.jit import Library, kept_object

AGAIN, STARTED = -1, -2  # statuses: the host has something to do first; it has to keep account of the run, which can fail


class Start(ctypes.Structure):
    """`host`: where the caller has put the inputs, laid out as a slot. `turn`: of the ring; `taken`: slots that the GPU has read.
    `reading`: not 0 if other streams read outputs. `graph` null: this is not up to date. `use(context)` and `replay(graph,
    stream)` are functions of the driver. `watched`: a run can fail."""

    _fields_ = [
        ("host", P), ("turn", P), ("taken", P), ("ring", P), ("slots", I64), ("slot_bytes", I64), ("reading", P),
        ("graph", P), ("stream", P), ("context", P), ("use", P), ("replay", P), ("watched", I64),
    ]  # fmt: skip


class StartBody(Body):
    fields = fields_of(Start)


_functions = Functions()


@_functions.native("i32", start="ptr")
def rlx_start(e: StartBody, start: V) -> None:
    """Returns 0, STARTED if `watched`, AGAIN (nothing has changed), or the driver's error."""
    place, graph = e.get(start, "turn"), e.get(start, "graph")
    with e.when(e.cmp("eq", graph, NULL)):
        e.ret(e.const("i32", AGAIN))
    turn, taken = e.load("i64", place, 8), e.load("i64", e.get(start, "taken"), 8)
    full = e.cmp("sge", e.bin("sub", turn, taken), e.get(start, "slots"))
    read = e.cmp("ne", e.load("i64", e.get(start, "reading"), 8), 0)
    with e.when(e.bin("or", full, read)):
        e.ret(e.const("i32", AGAIN))
    status = e.call(e.get(start, "use"), "i32", e.get(start, "context"))
    with e.when(e.cmp("ne", status, 0)):
        e.ret(status)
    size = e.get(start, "slot_bytes")
    at = e.bin("mul", e.bin("and", turn, e.bin("sub", e.get(start, "slots"), 1)), size)
    goal, source = e.gep(e.get(start, "ring"), at), e.get(start, "host")
    e.intrinsic("memcpy", goal, source, size, e.const("i1", False), suffix=("ptr", "ptr", "i64"), returns="void")
    e.store(e.bin("add", turn, 1), place, 8)
    status = e.call(e.get(start, "replay"), "i32", graph, e.get(start, "stream"))
    quiet = e.bin("or", e.cmp("ne", status, 0), e.cmp("eq", e.get(start, "watched"), 0))
    e.ret(e.select(quiet, status, e.const("i32", STARTED)))


@cache
def start_address() -> int:
    """The address of rlx_start, which lives as long as the process."""
    return _library().address("rlx_start")


@cache
def _library() -> Library:
    return Library([kept_object("cuda start", lambda: _functions.module_text(StartBody))], ("rlx_start",))


__all__ = ["AGAIN", "Start", "start_address"]
