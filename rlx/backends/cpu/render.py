"""Kernel to LLVM IR: the function, its tasks, the loops over grid points. Contractions and claimed ops are in other files.

A task is a range of grid points, or a range of the last grid dimension at one point of the others. The last dimension is always
a loop, so that its variable needs no division. It is vectorised if the body has no vector loop.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache, partial, reduce
from typing import Any

from rlx.backends.cpu import kernels
from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.bits import moved_as_bits
from rlx.backends.cpu.boxes import Boxes, in_boxes, one_by_one
from rlx.backends.cpu.kernels import contract, tiles
from rlx.backends.cpu.kernels.module import SCRATCH, STATUS, TASK, Module, argument_pointers, divided
from rlx.backends.cpu.kernels.tiles import DEFAULT_TILING, other_tasks

from rlx.backends.cpu.loops import (  # isort: skip
    TASKS_PER_THREAD, emit_serial_loop, emit_statements, emit_vector_loop, hoist, prefers_inner, weight,
)  # fmt: skip
from rlx.backends.cpu.scope import Prefetch, Scope, expr, limit_of
from rlx.backends.cpu.transpose import Crossing, collapsed, crossing, emit_tiles
from rlx.backends.cpu.updates import updated_in_place
from rlx.backends.shared.contract_loops import without_contract
from rlx.backends.shared.rounding import in_fewer
from rlx.host.emit import Emitter, V
from rlx.host.processor import fetches_ahead
from rlx.ir.nest import Dims, distinct, joined, nested, stores
from rlx.records import record

from rlx.ir.kernel import (  # isort: skip
    Buffer, Contract, Kernel, Load, Local, Loop, Native, Operand, Stmt, Store, Var,
    coefficient, expressions, loaded_buffers, walk,
)  # fmt: skip
from rlx.ir.target import Target

GRAIN_NS = 6_000  # least estimated work of a task, where a thread has several: a handover takes 0.2 µs
SHARE_NS = 1_500  # the same where a thread has one: it begins within 0.5 µs of the others
MOST_APART = 16  # boxes with loops of their own, one of which is tiled: each is code of its own, and small ones are one task
SHARED_NS = 7_500  # least estimated work of a loop of several tasks: no thread is woken for small ones (table.WAKING_NS)
STREAMED_BYTES = 32 << 20  # a kernel that touches this much uses non-temporal stores: the results would not stay in cache
FETCHED_AHEAD = 1024  # bytes from an access to what is prefetched with it
FETCHED_BYTES = 1 << 20  # an operand this large does not fit a core's private caches
FETCHED_WEIGHT = 12  # of an element of a pass, with an exp for example, that leaves memory idle
STREAMED_SHARE = 8  # non-temporal only if the kernel touches at most this many times the result's size
WEIGHT_NS = 0.35  # one vector operation with its share of loads and stores

Limits = Sequence[V | None]  # the active extent of each dimension; None: all of it


def render(kernel: Kernel, target: Target, symbol: str, tiling: Mapping[str, int] = DEFAULT_TILING) -> Rendered:
    """The kernel as one LLVM module that defines `symbol` (ABI: rlx.host.emit.Rendered). `tiling`: see `axes`."""
    kernel = _as_rendered(kernel, target)
    module = _module(next(iter(kernel.body), None))
    return (module.render if module else _render_loops)(kernel, target, symbol, tiling)


def _as_rendered(kernel: Kernel, target: Target) -> Kernel:
    """The kernel in the form in which the code below takes it."""
    if any(isinstance(s, Contract) and s.before for s in kernel.body):  # of kernels for other targets
        kernel = without_contract(kernel)
    return moved_as_bits(in_fewer(updated_in_place(kernel, target)))


def axes(kernel: Kernel, target: Target) -> dict[str, tuple[int, ...]]:
    """The tuning parameters of the kernel's code: name -> values, the default first. None of them changes a result."""
    kernel = _as_rendered(kernel, target)
    first: Any = next(iter(kernel.body), None)
    module = _module(first, tiles)
    if module or isinstance(first, Native):
        return module.axes(kernel, first, target) if module else {}
    default = task_count(work_ns(kernel, target), target.threads)
    others = [n for n in other_tasks(target.threads) if n != default]
    return {"tasks": (default, *others)} if others and 0 not in Space.of(kernel).extents else {}


def _module(first: Stmt | None, plain: Any = contract) -> Any:
    """The module for a kernel of this statement, `plain` for products of floats; None: loops, or a claimed op without code."""
    if isinstance(first, Contract):
        return kernels.writer("dequant_matmul") if isinstance(first.b, Operand) and first.b.blocks else plain
    return kernels.writer(first.op) if isinstance(first, Native) and first.op in kernels.CLAIMED else None


def _render_loops(kernel: Kernel, target: Target, symbol: str, tiling: Mapping[str, int]) -> Rendered:
    module, e = Module(), Emitter(target.features)
    pointers = {x: e.gep(SCRATCH, module.reserve(x.size * x.dtype.itemsize)) for x in kernel.locals}
    scope = Scope(e, {**pointers, **argument_pointers(e, kernel.buffers)}, STATUS, vector_bytes=target.vector_bytes)
    nbytes = {b: b.size * b.dtype.itemsize for b in kernel.buffers}
    touched = sum(nbytes.values())
    large = {b for b in kernel.buffers if b.writable and STREAMED_BYTES <= touched <= STREAMED_SHARE * nbytes[b]}
    twice = {s.buffer for s in stores(kernel.body) if any(isinstance(x, Load) for x in walk(s.index))}  # copied, then updated
    scope.streams = frozenset(large - loaded_buffers(kernel) - twice)
    slow = fetches_ahead(target.features)  # memory, beside which the passes of a row are short
    scope.far = {b: FETCHED_AHEAD for b, n in nbytes.items() if slow and n >= FETCHED_BYTES}
    space = Space.of(kernel)
    scope.ahead = fetched(space.body, space.vars[-1], 0 if slow else FETCHED_WEIGHT) if space.vars and not space.vector else None
    tasks = 1
    if 0 not in space.extents:
        limits = [limit_of(v, n, kernel, scope) for v, n in zip(space.vars, space.extents)]
        wanted = tiling.get("tasks", task_count(work_ns(kernel, target), target.threads))
        spaces = [x if kernel.limits else x.joined() for x in spaces_of(kernel, target, wanted)]
        works = [x.weight_ns(target) for x in spaces]
        tasks = _emit_spaces([x.tiled(kernel, target, scope.streams) for x in spaces], works, scope, wanted, limits)
    return module.rendered(e, symbol, tasks)


# -- the grid ------------------------------------------------------------------------------------------------------


@record
class Space:
    """The iteration space of a kernel: its grid, and the independent loops that make up its whole body. `vector`: the last
    dimension may be vectorised."""

    vars: tuple[Var, ...]
    extents: tuple[int, ...]
    body: tuple[Stmt, ...]
    vector: bool
    crossing: Crossing | None = None  # transposing tiles; one dimension then counts blocks of them

    @staticmethod
    def of(kernel: Kernel) -> Space:
        dims, body, vector = list(kernel.grid), kernel.body, False
        while not kernel.locals and not vector and len(body) == 1 and isinstance(loop := body[0], Loop):
            if not loop.vector or loop.reduces or loop.carries:
                break
            dims.append((loop.var, loop.extent))
            vector, body = not prefers_inner(loop), loop.body
        vector = vector or not (kernel.locals or _has_vector(body))
        return Space(tuple(v for v, _ in dims), tuple(n for _, n in dims), body, vector and bool(dims))

    @staticmethod
    def around(dims: Dims, body: tuple[Stmt, ...]) -> Space:
        """The space of independent loops: these dims and the loops that make up the whole body."""
        dims, vector = list(dims), False
        while len(body) == 1 and isinstance(loop := body[0], Loop):
            dims.append((loop.var, loop.extent))
            vector, body = loop.vector, loop.body
        return Space(tuple(v for v, _ in dims), tuple(n for _, n in dims), body, vector)

    def joined(self) -> Space:
        """The same space with adjacent dims as one where all memory is contiguous over both, and without dims of 1."""
        if not self.vector or not all(isinstance(s, Store) for s in self.body):
            return self
        dims, body = joined(list(zip(self.vars, self.extents)), self.body)
        return replace(self, vars=tuple(v for v, _ in dims), extents=tuple(n for _, n in dims), body=body)

    def tiled(self, kernel: Kernel, target: Target, streams: Collection[Buffer | Local] = ()) -> Space:
        """The same space, tiled if the kernel is a transposing loop."""
        if not self.vector or kernel.limits:
            return self
        dims, body = collapsed(list(zip(self.vars, self.extents)), self.body)
        x = crossing(dims, body, target, streams)
        if x is None:
            return self
        extents = tuple(x.blocks if v is x.row else n for v, n in dims)
        return replace(self, vars=tuple(v for v, _ in dims), extents=extents, body=body, crossing=x)

    @property
    def sizes(self) -> tuple[int, int]:
        """The number of outer points, and the extent of the last dimension."""
        return math.prod(self.extents[:-1]), self.extents[-1] if self.extents else 1

    def shares(self, wanted: int) -> tuple[int, int]:
        """The share of each of about `wanted` tasks: the number of outer points, and of elements of the last dimension at each. 0
        outer points: a task has a part of the last dimension at one of them."""
        outer, last = self.sizes
        if 2 * outer > wanted:
            return -(-outer // wanted), last
        step = 64 if self.vector else 1
        size = -(-last // -(-wanted // outer))
        return 0, -(-size // step) * step

    def tasks(self, wanted: int) -> int:
        """The number of tasks."""
        (outer, last), (per, size) = self.sizes, self.shares(wanted)
        return -(-outer // per) if per else outer * -(-last // size)

    def weight_ns(self, target: Target) -> float:
        """As `work_ns`, of these points."""
        lanes = target.vector_bytes // 4
        loops = [s for s in self.body if isinstance(s, Loop)]
        work = weight([s for s in self.body if not isinstance(s, Loop)])
        work += sum(weight([s]) / (lanes if _has_vector([s]) else 1) for s in loops)
        return math.prod(self.extents) * work / (lanes if self.vector else 1) * WEIGHT_NS


@lru_cache(16)
def _boxes(kernel: Kernel, vector_bytes: int) -> Boxes | None:
    """The boxes of the kernel's space; None if it is not divided. Its estimates and its code need them, one after the other."""
    space = Space.of(kernel)
    dims = list(zip(space.vars, space.extents))
    return in_boxes(dims, space.body, vector_bytes) if space.vector and not kernel.limits else None


def spaces_of(kernel: Kernel, target: Target, wanted: int = 1) -> list[Space]:
    """The spaces of the kernel: one for each box of indices, or one for all boxes of a point of the dims that are not divided, if
    these dims are enough for the wanted tasks. A few boxes of which one is tiled share no loop."""
    found = _boxes(kernel, target.vector_bytes)
    if found is None:
        return [Space.of(kernel)]
    single = [Space.around(found.outer, (s,)) for s in one_by_one(found.nest)]
    if len(single) <= MOST_APART and any(x.tiled(kernel, target).crossing for x in single):
        return single
    together = math.prod(n for _, n in found.outer) >= wanted
    return [Space.around(found.outer, nest) for nest in ([found.nest] if together else [(s,) for s in found.nest])]


def work_ns(kernel: Kernel, target: Target) -> float:
    """Estimated time of all points on one thread."""
    return sum(space.weight_ns(target) for space in spaces_of(kernel, target))


def fetched(body: Sequence[Stmt], row: Var, least: int) -> Prefetch | None:
    """Prefetch for bodies with two passes over a row. While the second pass computes and memory is idle, the next row's data of
    the first pass is prefetched, if it comes from a large buffer. None: no such body, or a second pass with a weight below
    `least` for each element, which this would delay (the variance of a layer norm)."""
    passes = [s for s in body if isinstance(s, Loop) and s.in_lanes and s.extent > 1]
    if len(passes) < 2:
        return None
    (first, second, *_), loads = passes, []
    if weight([second]) < least * second.extent or any(isinstance(s.buffer, Buffer) for s in stores([second])):
        return None
    for x in distinct(expressions([first])):
        if isinstance(x, Load) and isinstance(x.buffer, Buffer) and x.guard is None and coefficient(x.index, first.var) == 1:
            nbytes = (coefficient(x.index, row) or 0) * x.buffer.dtype.itemsize
            if nbytes > 0 and x.buffer.size * x.buffer.dtype.itemsize >= FETCHED_BYTES:
                loads.append((x, nbytes))
    return Prefetch(second, first.var, tuple(loads)) if loads else None


def _has_vector(stmts: Sequence[Stmt]) -> bool:
    return any(isinstance(s, Loop) and s.in_lanes and s.extent > 1 for s in nested(stmts))


def task_count(work_ns: float, threads: int) -> int:
    """The number of tasks to aim for: at most one for each thread, each of about SHARE_NS at least, or if there is work enough a
    multiple of `threads`, each of about GRAIN_NS."""
    tasks = max(2, min(int(work_ns / SHARE_NS), threads), min(int(work_ns / GRAIN_NS), TASKS_PER_THREAD * threads))
    return 1 if threads == 1 or work_ns < SHARED_NS else tasks if tasks < threads else -(-tasks // threads) * threads


def _emit_spaces(spaces: Sequence[Space], works: Sequence[float], scope: Scope, wanted: int, limits: Limits) -> int:
    """Emit the code of task TASK, one of a range of tasks for each space, about `wanted` in all. Small spaces are done by the
    first task. Returns the number of tasks. `works`: estimated times; `limits` are those of the only space."""
    if len(spaces) == 1:
        return _emit_tasks(spaces[0], scope, wanted, limits, TASK)
    e, first = scope.e, 0
    shares = [round(wanted * work / max(sum(works), 1)) if wanted > 1 else 0 for work in works]
    for space, share in zip(spaces, shares):
        if share:
            own = e.bin("sub nsw", TASK, first)
            with e.when(e.cmp("ult", own, space.tasks(share))):
                first += _emit_tasks(space, scope.child(), share, (), own)
    with e.when(e.cmp("eq", TASK, 0)) if first else nullcontext():
        for space in (space for space, share in zip(spaces, shares) if not share):
            _emit_tasks(space, scope.child(), 1, (), e.i64(0))
    return max(first, 1)


def _emit_tasks(space: Space, scope: Scope, wanted: int, limits: Limits, task: V) -> int:
    """Emit the code of this task of a space. Returns the number of its tasks, close to `wanted`."""
    hoist(space.body, scope)
    if space.crossing and not space.crossing.whole_lines:
        scope.streams = frozenset()
    limits = limits or [None] * len(space.vars)
    e = scope.e
    (outer, last), (per, size), tasks = space.sizes, space.shares(wanted), space.tasks(wanted)
    if per:
        if per == 1:
            _emit_point(space, scope, task if tasks > 1 else e.i64(0), None, limits)
            return tasks
        with e.loop(*_run(e, task, per, outer), nonempty=True) as loop:
            _emit_point(space, scope.child(), loop.index, None, limits)
        return tasks
    chunks = -(-last // size)
    chunk, point = divided(e, task, chunks) if outer > 1 else (task, e.i64(0))
    _emit_point(space, scope, point, None if chunks == 1 else _run(e, chunk, size, last), limits)
    return tasks


def _run(e: Emitter, index: V, size: int, total: int) -> tuple[V, V]:
    """[start, stop) of range number `index`. Ranges have `size` elements; the last one ends at `total`."""
    if size >= total:
        return e.i64(0), e.i64(total)
    start = e.bin("mul nsw", index, size)
    return start, e.intrinsic("smin", e.bin("add nsw", start, size), e.i64(total))


def _emit_point(space: Space, scope: Scope, point: V, bounds: tuple[V, V] | None, limits: Limits) -> None:
    """Emit the last dimension (or its part in `bounds`) at flat index `point` of the others, up to the limits."""
    e = scope.e
    if not space.vars:
        emit_statements(space.body, scope)
        return
    for at in range(len(space.vars) - 2, -1, -1):
        if math.prod(space.extents[:at]) == 1:  # the remaining index is this coordinate
            place, point = point, e.i64(0)
        else:
            place, point = divided(e, point, space.extents[at])
        scope.bind(space.vars[at], place)
    inside = [e.cmp("slt", expr(v, scope), limit) for v, limit in zip(space.vars[:-1], limits) if limit]
    if limits[-1]:
        start, stop = bounds or (e.i64(0), limits[-1])
        bounds = start, e.intrinsic("smax", start, e.intrinsic("smin", stop, limits[-1]))
    with e.when(reduce(partial(e.bin, "and"), inside)) if inside else nullcontext():
        _emit_last(space, scope, bounds)


def _emit_last(space: Space, scope: Scope, bounds: tuple[V, V] | None) -> None:
    e = scope.e
    if space.crossing:
        emit_tiles(space.crossing, scope, bounds, partial(_emit_last, replace(space, crossing=None)))
        return
    loop = Loop(space.vars[-1], space.extents[-1], space.body, vector=space.vector)
    if space.vector and loop.extent > 1:
        emit_vector_loop(loop, scope, bounds)
    elif bounds is None:
        emit_serial_loop(loop, scope)
    else:
        hoist([loop], scope)
        with e.loop(*bounds) as state:
            emit_statements(space.body, scope.child({loop.var: state.index}))
