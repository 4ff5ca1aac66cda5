"""Kernel to LLVM IR: the function, its tasks, the walk over grid points. Contractions and claimed ops have files of their own.

A task is a run of grid points, or a run of the last grid dimension at one point of the others. The last dimension is a
loop, so that its variable is never recovered by division; it becomes lanes where the body has no vector loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlx.backends.cpu.emit import ATTRIBUTES, Emitter, Rendered, V
from rlx.backends.cpu.loops import MAX_LANES, emit_serial_loop, emit_statements, emit_vector_loop, hoist, prefers_inner, weight
from rlx.backends.cpu.scope import Scope, expr
from rlx.ir.kernel import Buffer, Contract, Kernel, Local, Loop, Native, Stmt, Var
from rlx.ir.target import Target

__all__ = ["Scope", "emit_statements", "expr", "hoist", "render", "scratch_layout"]

PARAMETERS = "ptr %args, i64 %task, ptr %scratch, ptr %status"
GRAIN_NS = 12_000  # estimated work of a task, at the least: waking a thread costs a few hundred ns, a sleeping one 47 µs
TASKS_PER_THREAD = 6  # at most, so that a thread that lost its core for a while does not hold up the others
WEIGHT_NS = 0.35  # one vector operation with its share of loads and stores


def render(kernel: Kernel, target: Target, symbol: str) -> Rendered:
    """The kernel as one LLVM module that defines `symbol` (ABI: rlx.backends.cpu.emit.Rendered)."""
    if any(isinstance(s, Contract) for s in kernel.body):
        from rlx.backends.cpu.kernels import contract

        return contract.render(kernel, target, symbol)
    if any(isinstance(s, Native) for s in kernel.body):
        from rlx.backends.cpu.kernels import attention

        return attention.render(kernel, target, symbol)
    return _render_loops(kernel, target, symbol)


def _render_loops(kernel: Kernel, target: Target, symbol: str) -> Rendered:
    e = Emitter()
    offsets, scratch_bytes = scratch_layout(kernel.locals)
    pointers: dict[Buffer | Local, V] = {x: e.gep(V("%scratch", "ptr"), offset) for x, offset in offsets.items()}
    for buffer, address in argument_pointers(e, kernel.buffers).items():
        pointers[buffer] = address
    scope = Scope(e, pointers, V("%status", "ptr"), vector_bytes=target.vector_bytes)
    space = Space.of(kernel)
    tasks = 1
    if 0 not in space.extents:
        hoist(space.body, scope)
        tasks = _emit_tasks(space, scope, target)
    e.do("ret void")
    return Rendered(symbol, module_text(e, symbol), tasks, scratch_bytes)


def argument_pointers(e: Emitter, buffers: Sequence[Buffer]) -> dict[Buffer, V]:
    """The address behind each buffer, read from the argument table."""
    table = V("%args", "ptr")
    return {b: e.load("ptr", e.gep(table, 8 * i), 8) for i, b in enumerate(buffers)}


def module_text(e: Emitter, symbol: str) -> str:
    """A whole module: declarations, then the emitter's lines as the kernel function `symbol`."""
    return "\n".join(e.declarations) + "\n" + e.function(symbol, PARAMETERS) + ATTRIBUTES


def scratch_layout(locals_: Sequence[Local]) -> tuple[dict[Local, int], int]:
    """Byte offset of each Local (64-byte aligned) in a thread's scratch, and the bytes they take together."""
    offsets, at = {}, 0
    for x in locals_:
        offsets[x] = at
        at += -(-x.size * x.dtype.itemsize // 64) * 64
    return offsets, at


# -- the grid ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Space:
    """The points that a kernel visits: its grid and the independent loops that are its whole body. `vector`: the last
    dimension may run in lanes."""

    vars: tuple[Var, ...]
    extents: tuple[int, ...]
    body: tuple[Stmt, ...]
    vector: bool

    @staticmethod
    def of(kernel: Kernel) -> Space:
        dims, body, vector = list(kernel.grid), kernel.body, False
        while not kernel.locals and not vector and len(body) == 1 and isinstance(body[0], Loop) and _independent(body[0]):
            loop = body[0]
            dims.append((loop.var, loop.extent))
            vector, body = not prefers_inner(loop), loop.body
        if not dims:
            return Space((), (), body, False)
        if not kernel.locals and not any(isinstance(s, Loop) and _has_vector(s) for s in body):
            vector = True
        return Space(tuple(v for v, _ in dims), tuple(n for _, n in dims), body, vector)

    def weight_ns(self, target: Target) -> float:
        """Estimated time of all points on one thread."""
        lanes = min(MAX_LANES, target.vector_bytes // 4)
        inner = sum(_weight(s, lanes) for s in self.body if isinstance(s, Loop))
        own = weight([s for s in self.body if not isinstance(s, Loop)]) / (lanes if self.vector else 1)
        return math.prod(self.extents) * (own + inner / (lanes if self.vector else 1)) * WEIGHT_NS


def _independent(loop: Loop) -> bool:
    return loop.vector and not loop.reduces and not loop.carries


def _has_vector(loop: Loop) -> bool:
    return (loop.vector and loop.extent > 1) or any(isinstance(s, Loop) and _has_vector(s) for s in loop.body)


def _weight(loop: Loop, lanes: int) -> float:
    return weight([loop]) / (lanes if _has_vector(loop) else 1)


def task_count(work_ns: float, threads: int) -> int:
    """How many tasks to aim for: several per thread where there is work enough, each of GRAIN_NS at least."""
    return 1 if threads == 1 else max(1, min(int(work_ns / GRAIN_NS), TASKS_PER_THREAD * threads))


def _emit_tasks(space: Space, scope: Scope, target: Target) -> int:
    """The code of task %task. Returns how many tasks there are."""
    e, task = scope.e, V("%task", "i64")
    outer, last = math.prod(space.extents[:-1]), space.extents[-1] if space.extents else 1
    wanted = task_count(space.weight_ns(target), target.threads)
    if outer >= wanted or 2 * outer > wanted:  # runs of outer points, whole last dimensions
        per = -(-outer // wanted)
        tasks = -(-outer // per)
        if per == 1:
            _emit_point(space, scope, task if tasks > 1 else e.i64(0), None)
            return tasks
        start = e.bin("mul nsw", task, e.i64(per)) if tasks > 1 else e.i64(0)
        stop = e.i64(outer) if tasks == 1 else e.intrinsic("smin", e.bin("add nsw", start, e.i64(per)), e.i64(outer))
        with e.loop(start, stop, nonempty=True) as loop:
            _emit_point(space, scope.child(), loop.index, None)
        return tasks
    step = 64 if space.vector else 1
    size = -(-last // -(-wanted // outer))
    size = -(-size // step) * step
    chunks = -(-last // size)
    point, chunk = (task, e.i64(0)) if chunks == 1 else (e.i64(0), task)
    if outer > 1 and chunks > 1:
        point, chunk = e.bin("udiv", task, e.i64(chunks)), e.bin("urem", task, e.i64(chunks))
    start = e.bin("mul nsw", chunk, e.i64(size))
    stop = e.intrinsic("smin", e.bin("add nsw", start, e.i64(size)), e.i64(last))
    _emit_point(space, scope, point, None if chunks == 1 else (start, stop))
    return outer * chunks


def _emit_point(space: Space, scope: Scope, point: V, bounds: tuple[V, V] | None) -> None:
    """All of the last dimension (or its part in `bounds`) at flat point `point` of the other ones."""
    e = scope.e
    if not space.vars:
        emit_statements(space.body, scope)
        return
    for at in range(len(space.vars) - 2, -1, -1):
        extent = e.i64(space.extents[at])
        if at == 0 or math.prod(space.extents[:at]) == 1:
            scope.bind(space.vars[at], point)
            point = e.i64(0)
            continue
        scope.bind(space.vars[at], e.bin("urem", point, extent))
        point = e.bin("udiv", point, extent)
    loop = Loop(space.vars[-1], space.extents[-1], space.body, vector=space.vector)
    if space.vector and loop.extent > 1:
        emit_vector_loop(loop, scope, bounds)
    elif bounds is None:
        emit_serial_loop(loop, scope)
    else:
        hoist([loop], scope)
        with e.loop(*bounds, nonempty=True) as state:
            emit_statements(space.body, scope.child({loop.var: state.index}))
