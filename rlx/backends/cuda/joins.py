"""Joins of many parts, as a concat: each block computes elements of one part. In one function for all parts, each element would
ask for every part whether it lies in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from rlx.backends.cuda.edges import edges_along, part_of
from rlx.backends.cuda.groups import chosen
from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch, of_a_thread
from rlx.ir.kernel import Kernel, Load, Loop, Store, Var, coefficient, walk
from rlx.ir.nest import changed, stores, substitute
from rlx.records import record

LEAST = 5  # parts: an element asks for fewer sooner than its block finds its part
RUN, PLACE = 32, 16  # bytes of a part that lie together, at least; those of which places of vectors are multiples
FEW = 1 << 14  # elements of all parts: fewer are computed beside other kernels


@record
class Part:
    """The launch for one part, whose stores count from element `first` of the result."""

    launch: Launch
    first: int


@record
class JoinLaunch(Launch):
    members: tuple[Part, ...] = ()

    @property
    def blocks(self) -> int:
        return sum(m.launch.blocks for m in self.members)


def joined(kernel: Kernel, launch: Callable[[Kernel], Launch]) -> JoinLaunch | None:
    """None if it is no join of many parts, or one of parts that are not points of threads. `launch` makes that of a part."""
    if len(kernel.body) != 1 or kernel.limits or kernel.locals:
        return None
    axes, (s,) = [*kernel.grid], kernel.body
    if isinstance(s, Loop) and len(s.body) == 1 and not (s.reduces or s.carries):
        axes, (s,) = [*axes, (s.var, s.extent)], s.body
    points = math.prod(n for _, n in axes)
    if not isinstance(s, Store) or points < FEW:
        return None
    found = {v: edges_along((s,), v, n) for v, n in axes}
    var = max(found, key=lambda v: len(found[v]))
    if len(ends := found[var]) <= LEAST:
        return None
    parts = [_part(kernel, launch, var, low, high - low) for low, high in zip(ends, ends[1:])]
    if not all(type(p.launch) is Launch and _plain(p.launch) for p in parts):
        return None
    parts = [replace(p, launch=_beside(p.launch, points)) for p in parts]
    return JoinLaunch(kernel, 1, max(p.launch.threads for p in parts), members=tuple(parts))


def _part(kernel: Kernel, launch: Callable[[Kernel], Launch], var: Var, first: int, extent: int) -> Part:
    own, (store,) = Var(var.name), stores(kernel.body)
    body, step = part_of(kernel.body, var, first, extent, own), coefficient(store.index, var) or 0
    begin = first * step if first * step * store.buffer.dtype.itemsize % PLACE == 0 else 0
    if begin:  # parts of one shape are one function
        index = substitute(store.index, {var: own})
        body = changed(body, lambda s: [replace(s, index=index)] if isinstance(s, Store) else None)
    used = {x.buffer for x in walk(body) if isinstance(x, Load | Store)}
    grid = tuple((own, extent) if v is var else (v, n) for v, n in kernel.grid)
    return Part(launch(replace(kernel, grid=grid, body=body, buffers=tuple(b for b in kernel.buffers if b in used))), begin)


def _plain(at: Launch) -> bool:
    """True if its blocks need nothing but their number, and threads store vectors or adjacent elements."""
    (s,), (last, n) = stores(at.kernel.body), at.kernel.grid[-1] if at.kernel.grid else (None, 1)
    run = n * s.buffer.dtype.itemsize if last is not None and coefficient(s.index, last) == 1 else 0
    return at.team == at.parts == 1 and not (at.scratch or at.counters or at.shared or at.peel) and run >= RUN


def _beside(at: Launch, points: int) -> Launch:
    """With as many points of a thread as beside so many points of other parts."""
    vector, repeats = of_a_thread(at.kernel, points)
    return replace(at, vector=vector, repeats=repeats)


class JoinWriter(CudaWriter):
    """Functions of the parts, each once, and the kernel whose blocks call them."""

    launch: JoinLaunch

    def function(self, name: str, member: bool = False) -> str:
        assert not member
        names, texts, calls, end = dict[str, str](), list[str](), list[tuple[int, str]](), 0
        for part in self.launch.members:
            text = _PartWriter(part.launch).function("part", member=True)
            if text not in names:
                names[text] = f"{name}_{len(names)}"
                texts.append(text.replace("part(", f"{names[text]}(", 1))
            given = [f"{self.name(b, 'b')}{f' + {part.first}' * b.writable}" for b in part.launch.kernel.buffers]
            calls.append((end + part.launch.blocks, f"{names[text]}({', '.join([*given, 'halt', f'blockIdx.x - {end}'])})"))
            end += part.launch.blocks
        how = f'extern "C" __global__ void __launch_bounds__({self.launch.threads})'
        head = [f"// {' '.join(self.kernel.origin)}", how, f"{name}({', '.join(self.arguments())}) {{"]
        self.begin()
        return "\n".join([*texts, *head, *self.lines, "  const unsigned block = blockIdx.x;", *chosen(calls), "}", ""])


class _PartWriter(CudaWriter):
    def enter(self) -> Iterator[str]:
        yield f"if (threadIdx.x >= {self.launch.threads}) return;"


__all__ = ["JoinLaunch", "JoinWriter", "joined"]
