"""Runs one loop kernel on the CPU: every buffer ends at, or starts after, an unreadable page; outputs are poisoned."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

import rlx
from rlx.backends.cpu.kernels.tiles import DEFAULT_TILING
from rlx.backends.cpu.render import render
from rlx.backends.cpu.target import host_target, target_for
from rlx.compiler import lower
from rlx.host import jit
from rlx.host.processor import machine_of, missing_features
from rlx.ir.dtype import DType, as_dtype
from rlx.ir.kernel import Buffer, Expr, Kernel, Load, Loop, Store, Var
from rlx.ir.target import Target

Function = Callable[..., Expr]
PAGE, POISON = mmap.PAGESIZE, 0xCB
PROTECT = ctypes.CDLL(None).mprotect  # making a CDLL makes a class, too
TRIPLE = machine_of(host_target(1))[0]
TARGETS: dict[str, Target] = {"host": host_target(1)}  # and a narrower CPU whose code this one can run
if TRIPLE.startswith("x86_64") and not missing_features(target_for(TRIPLE, "x86-64-v3").features):
    TARGETS["x86-64-v3"] = target_for(TRIPLE, "x86-64-v3", threads=8)


def fenced(nbytes: int, at_end: bool) -> np.ndarray:
    """Poisoned bytes with an unreadable page right after them, or right before."""
    pages = max(1, -(-nbytes // PAGE))
    whole = np.frombuffer(mmap.mmap(-1, (pages + 2) * PAGE), np.uint8)
    whole[:] = POISON
    for page in (0, pages + 1):
        assert PROTECT(ctypes.c_void_p(whole.ctypes.data + page * PAGE), PAGE, 0) == 0
    start = (pages + 1) * PAGE - nbytes if at_end else PAGE
    return whole[start : start + nbytes]


@cache
def _function(text: str, target: Target) -> Any:
    library = jit.load([jit.compile_object(text, target)], ["kernel"], target)
    return library.function("kernel", None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)


def run(
    kernel: Kernel, values: Sequence[np.ndarray | None], target: Target | None = None, same: tuple[int, int] | None = None,
    spoiled: Sequence[int] = (), tasks: int | None = None,
) -> tuple[list[np.ndarray], int]:  # fmt: skip
    """(the writable buffers, in order, after a run; the status). `values`: one per buffer, None for poison. `same`: two
    buffers in one memory, the first of them written. `spoiled`: buffers that are poisoned behind the first task of those that
    keep its rows. `tasks`: about so many.

    Runs twice, behind the two kinds of fence and with the tasks in opposite orders, first each with a scratch of its own, then
    with what one leaves there to the next (Rendered.keeps): the bits must agree."""
    target = target or TARGETS["host"]
    rendered = render(kernel, target, "kernel", {"tasks": tasks} if tasks else DEFAULT_TILING)
    function = _function(rendered.text, target)
    seen: list[list[np.ndarray]] = []
    status = ctypes.c_int32(0)
    for at_end in (True, False):
        held = [fenced(b.size * b.dtype.itemsize, at_end) for b in kernel.buffers]
        for b, memory, value in zip(kernel.buffers, held, values, strict=True):
            if value is not None:
                memory.view(b.dtype.numpy)[:] = value.reshape(-1)
        if same is not None:
            held[same[0]] = held[same[1]]
        table = (ctypes.c_void_p * max(1, len(held)))(*(m.ctypes.data for m in held))
        scratch = fenced(-(-rendered.scratch_bytes // 64) * 64, at_end)
        status.value = 0
        for turn, task in enumerate(range(rendered.tasks) if at_end else reversed(range(rendered.tasks))):
            again = 0 if at_end or turn == 0 else rendered.keeps
            scratch[: 0 if again else None] = POISON
            for i in spoiled if again else ():
                held[i][:] = POISON
            function(table, task + again, ctypes.c_void_p(scratch.ctypes.data), ctypes.byref(status))
        for i, (b, memory, value) in enumerate(zip(kernel.buffers, held, values, strict=True)):
            unknown = b.writable or same or i in spoiled or value is None
            assert unknown or memory.tobytes() == value.tobytes(), f"{b.name} was written"
        seen.append([m.view(b.dtype.numpy).copy() for b, m in zip(kernel.buffers, held) if b.writable])
    for one, two in zip(*seen):
        assert one.tobytes() == two.tobytes(), "the result depends on the order of tasks or on addresses"
    return seen[0], status.value


def pointwise(functions: Sequence[Function], results: Sequence[DType], *operands: tuple[DType, int]) -> Kernel:
    """out_n[i] = functions[n](*(operand[i])), of dtype results[n], over 1-D buffers. `operands`: (dtype, size)."""
    size, i = operands[0][1], Var("i")
    inputs = [Buffer(f"in{n}", dtype, size) for n, (dtype, _) in enumerate(operands)]
    outs = [Buffer(f"out{n}", dtype, size, True) for n, dtype in enumerate(results)]
    stores = tuple(Store(out, i, f(*(Load(b, i) for b in inputs))) for f, out in zip(functions, outs, strict=True))
    return Kernel("pointwise", (*inputs, *outs), (), (), (Loop(i, size, stores, vector=True),))


def apply_all(
    functions: Sequence[Function], results: Sequence[DType], *arrays: np.ndarray, target: Target | None = None
) -> list[np.ndarray]:
    """Each function, written with rlx.ir.kernel.k, of the arrays' elements; all in one kernel."""
    kernel = pointwise(functions, results, *((as_dtype(a.dtype), a.size) for a in arrays))
    return run(kernel, [*arrays, *(None for _ in functions)], target)[0]


def apply(function: Function, result: DType, *arrays: np.ndarray, target: Target | None = None) -> np.ndarray:
    return apply_all([function], [result], *arrays, target=target)[0]


def kernel_of(make: Callable[..., rlx.Value], arrays: Sequence[np.ndarray], target: Target) -> Kernel:
    """The only kernel of a graph of one op or several on these operands."""
    g = rlx.Graph("t")
    g.set_outputs([make(*(g.input(f"x{n}", a.shape, as_dtype(a.dtype)) for n, a in enumerate(arrays)))])
    (step,) = lower(g, target, rlx.CompileOptions(disable=("within",))).steps
    return step.kernel


def check(make: Callable[..., rlx.Value], wanted: np.ndarray, arrays: Sequence[np.ndarray], target: Target) -> None:
    """The only kernel of a graph gives these bits, in one task or several."""
    kernel, left = kernel_of(make, arrays, target), list(arrays)
    values: list[np.ndarray | None] = []
    for b in kernel.buffers:  # operands come in the order in which they are read
        found = next((n for n, a in enumerate(left) if (a.size, a.dtype) == (b.size, b.dtype.numpy)), 0)
        values.append(None if b.writable else np.ascontiguousarray(left.pop(found)))
    for tasks in (1, 7):
        (got,), status = run(kernel, values, target, tasks=tasks)
        same = status == 0 and got.tobytes() == np.ascontiguousarray(wanted).tobytes()
        assert same, f"{[a.shape for a in arrays]} {wanted.dtype}, {tasks} tasks"
