"""Generated code for the reductions of collectives (rlx.driver.collective). It combines the arrays of all ranks element by
element, in rank order.

One function for each dtype and kind, compiled on first use:

    void rank_reduce(ptr out, ptr sources, i64 count, i64 elements, i64 ranks)

sources[i] is the address of `elements` elements, for i < count. No address needs to be aligned. `out` may be one of the sources.
`ranks`: the divisor of a mean.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from rlx.driver.reduction import Form, ReduceKind, Reduction, accumulator
from rlx.host import alu
from rlx.host.emit import ATTRIBUTES, Emitter, V, vector
from rlx.host.jit import Library, compile_object
from rlx.host.processor import host_target
from rlx.ir.dtype import DType
from rlx.ir.target import Target

COPIES = 4  # accumulator registers per iteration: loads of one overlap with adds of another
OP = {ReduceKind.SUM: "add", ReduceKind.MEAN: "add", ReduceKind.MAX: "max", ReduceKind.MIN: "min"}
OUT, SOURCES, COUNT, ELEMENTS, RANKS = (V(f"%{name}", ty) for name, ty in (
    ("out", "ptr"), ("sources", "ptr"), ("count", "i64"), ("elements", "i64"), ("ranks", "i64"),
))  # fmt: skip
SYMBOL = "rank_reduce"


def module_text(form: Form, target: Target) -> str:
    """The function as LLVM IR."""
    e = Emitter(target.features)
    wide = accumulator(form.dtype)
    if not (form.carried or form.carries) and form.dtype.is_int and form.kind != ReduceKind.MEAN:
        wide = form.dtype  # integers wrap: narrow arithmetic gives the same bits as wide arithmetic truncated at the end
    lanes = target.vector_bytes // wide.itemsize
    done: int | V = 0
    for width, copies in ((lanes, COPIES), (lanes, 1), (1, 1)):
        step = width * copies
        until = e.bin("and", ELEMENTS, -step) if step > 1 else ELEMENTS
        with e.loop(done, until, step) as loop:
            _block(e, form, wide, loop.index, width, copies)
        done = until
    e.ret()
    body = e.function(SYMBOL, ", ".join(map(str, (OUT, SOURCES, COUNT, ELEMENTS, RANKS))))
    return "\n".join([*e.declarations, ATTRIBUTES, body])


def _block(e: Emitter, form: Form, wide: DType, first: V, lanes: int, copies: int) -> None:
    """Code for the elements [first, first + copies * lanes)."""

    def place(base: V, dtype: DType, copy: int) -> V:
        at = e.bin("add nsw", first, copy * lanes) if copy else first
        return e.op("ptr", f"getelementptr {alu.memory_type(dtype)}, {base}, {at}")

    def load(source: V, dtype: DType) -> list[V]:
        raw = [e.load(vector(alu.memory_type(dtype), lanes), place(source, dtype, c), 1) for c in range(copies)]
        values = [alu.from_memory(e, r, dtype) for r in raw]
        return values if dtype.compute == wide else [alu.cast(e, v, dtype, wide) for v in values]

    begin = load(e.load("ptr", SOURCES, 8), wide if form.carried else form.dtype)
    with e.loop(1, COUNT, carried=begin) as each:
        source = e.load("ptr", e.gep(SOURCES, e.bin("mul", each.index, 8)), 8)
        each.next = [alu.combine(e, OP[form.kind], wide, a, b) for a, b in zip(each.carried, load(source, form.dtype))]
    goal = wide if form.carries else form.dtype
    for c, value in enumerate(each.results):
        if form.kind == ReduceKind.MEAN and not form.carries:
            value = _divided(e, value, wide)
        value = value if goal.compute == wide else alu.cast(e, value, wide, goal)
        e.store(alu.to_memory(e, value, goal), place(OUT, goal, c), 1)


def _divided(e: Emitter, total: V, wide: DType) -> V:
    """`total` divided by `ranks`, which is at least 1. Integers round towards zero."""
    if wide.is_float:
        return e.bin("fdiv", total, e.splat(e.convert("sitofp", RANKS, total.scalar), total.lanes))
    return e.bin("sdiv" if wide.kind == "i" else "udiv", total, e.splat(RANKS, total.lanes))


@cache
def _library(dtype: DType, kind: ReduceKind, carried: bool, carries: bool) -> Library:
    target = host_target(1)
    text = module_text(Form(kind, dtype, 1, carried, carries), target)
    return Library([compile_object(text, target, f"rank_reduce of {dtype}", keep=True)], (SYMBOL,))


def library(form: Form) -> Library:
    """The compiled reduction. It stays loaded for the life of the process."""
    kind = ReduceKind.SUM if form.kind == ReduceKind.MEAN and form.carries else form.kind  # only the last step divides
    return _library(form.dtype, kind, form.carried, form.carries)


def function(form: Form) -> Callable[..., None]:
    """The compiled reduction as a ctypes function, which releases the GIL."""
    arguments = (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    return library(form).function(SYMBOL, None, *arguments)


@cache
def reduction(form: Form) -> Reduction:
    """The compiled reduction as a function of byte arrays."""
    call, itemsize = function(form), form.dtype.itemsize

    def run(out: np.ndarray, sources: Sequence[np.ndarray]) -> None:
        table = (ctypes.c_void_p * len(sources))(*(s.ctypes.data for s in sources))
        call(out.ctypes.data, ctypes.addressof(table), len(sources), sources[-1].nbytes // itemsize, form.ranks)

    return run


__all__ = ["SYMBOL", "function", "library", "module_text", "reduction"]
