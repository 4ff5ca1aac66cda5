"""Small kernels in front of a decoding step's attention, run by the blocks of that attention: each block computes its own queries
and the new rows of its own keys and values, and waits for nothing but its own threads.

The blocks of a key head all do so, and write the same numbers. That is right where a *tile* (a key head of a sequence) owns its
points of every kernel: no point reads what points of other tiles write, nor what a later kernel of the launch overwrites. Where
every kernel reads and writes is found by computing its indices for all points.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.backends.cuda.attention import AttentionLaunch, AttentionWriter, native_of
from rlx.backends.cuda.groups import Group, MemberWriter, Stages, may_join, overlaps
from rlx.backends.cuda.schedule import WARP, Launch
from rlx.backends.cuda.vectors import width
from rlx.ir.kernel import Alu, Buffer, Check, Const, Expr, Let, Load, Local, Loop, Stmt, Store, Var, View, walk
from rlx.ir.program import Program, Step

ELEMENTS = 4  # of a vector
MOST = 1 << 20  # iterations of a kernel whose indices are computed
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "min": np.minimum, "max": np.maximum, "cast": lambda a: a,
    "lt": operator.lt, "le": operator.le, "eq": operator.eq, "and": operator.and_, "or": operator.or_,
    "select": lambda c, a, b: np.where(c, a, b),
}  # fmt: skip
Access = tuple[Buffer, bool, np.ndarray]  # a buffer, whether it is written, and the indices by tile; -1 where guarded


class Unknown(Exception):
    """An index that depends on more than the point and one position."""


class Footprint:
    """The reads and writes of the points of each of `tiles` tiles, if every integer that they load is `position`."""

    def __init__(self, launch: Launch, tiles: int, position: int) -> None:
        self.position, self.found = position, list[Access]()
        points = math.prod(n for _, n in launch.kernel.grid)
        if points != launch.points * launch.vector or points % tiles or launch.points % tiles or points > MOST:
            raise Unknown
        self.lets: dict[Var, Expr] = {}
        dims = [n for _, n in launch.kernel.grid]
        at = np.unravel_index(np.arange(points), dims) if dims else ()
        env = {var: x.reshape(tiles, -1) for (var, _), x in zip(launch.kernel.grid, at)}
        self.block(launch.kernel.body, env, (tiles, points // tiles))

    def block(self, body: Sequence[Stmt], env: dict[Var, np.ndarray], shape: tuple[int, int]) -> None:
        for s in body:
            if isinstance(s, Loop):
                if shape[0] * shape[1] * s.extent > MOST:
                    raise Unknown
                inner = {v: np.repeat(x, s.extent, axis=1) for v, x in env.items()}
                inner[s.var] = np.tile(np.arange(s.extent), shape)
                self.reads([r.value for r in s.reduces], inner, inner[s.var].shape)
                self.block(s.body, inner, inner[s.var].shape)
            elif isinstance(s, Let | Check | Store):
                if isinstance(s, Let):
                    self.lets[s.var] = s.value
                self.reads([s], env, shape)
                if isinstance(s, Store):
                    self.touch(s, True, env, shape)
            else:
                raise Unknown

    def reads(self, within: Sequence[Stmt | Expr], env: dict[Var, np.ndarray], shape: tuple[int, int]) -> None:
        for x in walk(tuple(within)):
            if isinstance(x, Load):
                self.touch(x, False, env, shape)

    def touch(self, x: Load | Store, writes: bool, env: dict[Var, np.ndarray], shape: tuple[int, int]) -> None:
        if isinstance(x.buffer, Local):
            raise Unknown
        index = np.broadcast_to(self.value(x.index, env), shape)
        if x.guard is not None:
            index = np.where(np.broadcast_to(self.value(x.guard, env), shape), index, -1)
        self.found.append((x.buffer, writes, index))

    def value(self, e: Expr, env: dict[Var, np.ndarray]) -> Any:
        if isinstance(e, Const):
            return e.value
        if isinstance(e, Var):
            if e in env:
                return env[e]
            if e in self.lets:
                return self.value(self.lets[e], env)
            raise Unknown
        if isinstance(e, Load):
            if e.dtype.kind not in "iu":
                raise Unknown
            return self.position
        assert isinstance(e, Alu)
        if e.op not in OPERATIONS:
            raise Unknown
        return OPERATIONS[e.op](*(self.value(a, env) for a in e.args))


class Fronted(Group):
    """An attention and the stages in front of it, whose points a tile's blocks run by themselves."""

    def __init__(self, keys: Sequence[Sequence[str]], stages: Sequence[Sequence[Launch]]) -> None:
        super().__init__(keys, [[_in_vectors(m) for m in stage] for stage in stages])
        self.last = self.members[-1]
        assert isinstance(self.last, AttentionLaunch)
        at = self.last
        self.threads, self.shared, self.blocks, self.tiles = at.threads, at.shared, at.blocks, at.tiles
        self.scratch, self.counters = at.scratch, at.counters

    def function(self, name: str) -> str:
        texts, parameters, count = list[str](), list[str](), len(self.members) - 1
        for n, m in enumerate(self.members[:-1]):
            texts.append(FrontWriter(m, self.tiles).function(f"{name}_{n}", member=True))
            parameters += self.parameters(n)
        lines = ["const int warp = threadIdx.x / 32;"]
        halts = [f"m{n}_{len(list(self.parameters(n))) - 1}" for n in range(count)]
        lines += [f"const int* const watch = {''.join(f'{h} ? {h} : ' for h in halts)}(const int*)0;"]
        lines += ["const bool stopped = watch && *(const volatile int*)watch;"]
        first = 0
        for stage in self.stages[:-1]:
            items = [FrontWriter(m, self.tiles).items for m in stage]
            lines += ["#pragma unroll 1", f"for (int item = warp; item < {sum(items)}; item += {self.threads // WARP}) {{"]
            for n, count in enumerate(items, first):
                own, begin = [text.rsplit(" ", 1)[1] for text in self.parameters(n)], sum(items[: n - first])
                lines.append(f"  {'else ' * (n > first)}if (item < {begin + count}) {{")
                own[-1] = f"stopped ? {halts[n]} : (const int*)0"
                lines.append(f"    {name}_{n}({', '.join(own)}, own * {count} + item - {begin});")
                lines.append("  }")
            lines += ["}", "__syncthreads();"]
            first += len(stage)
        return "\n".join([*texts, AttentionWriter(self.last).function(name, parameters, lines)])


class FrontWriter(MemberWriter):
    """A kernel as a function that a warp calls: `rlx_block` counts warps, `items` of them for each tile. With `halt` it stores
    nothing: its caller has loaded the flag."""

    stored = "if (!halt) "
    alone_in_launch = False

    def __init__(self, launch: Launch, tiles: int) -> None:
        super().__init__(launch)
        self.own = launch.points // tiles
        self.items = -(-self.own * launch.team // WARP)

    def enter(self) -> Iterator[str]:
        yield from ()

    def first_point(self, text: str) -> str:
        place = f"rlx_block % {self.items}" + f" * {WARP} + threadIdx.x % {WARP}" * (self.launch.team < WARP)
        return f"({place}) < {self.own} ? rlx_block / {self.items} * {self.own} + {place} : {self.launch.points}"


def _in_vectors(m: Launch) -> Launch:
    """With several adjacent points for each thread: a tile has few."""
    if m.team > 1 or not m.kernel.grid or isinstance(m, AttentionLaunch):
        return m
    return replace(m, vector=min(ELEMENTS, width(m.kernel.body, (), *m.kernel.grid[-1])), repeats=1)


def fronted(program: Program, launches: Sequence[Stages], found: Sequence[Launch | None]) -> Sequence[Stages]:
    """The launches with attention's own kernels in front in its launch."""
    out: list[Stages] = []
    share = overlaps(program)
    for stages in launches:
        ((n, *others), *later) = stages
        at = found[n]
        if isinstance(at, AttentionLaunch) and at.cluster and not others and not later:
            members: list[tuple[Step, Launch]] = []
            while out and (more := front_of(out[-1][-1], program, found)):
                if not _apart([*more, *members], program.steps[n], at, share):
                    break
                *left, last = out.pop()
                out += [left] if left else []
                stages, members = [last, *stages], [*more, *members]
        out.append(stages)
    return out


def front_of(stage: Sequence[int], program: Program, found: Sequence[Launch | None]) -> list[tuple[Step, Launch]] | None:
    """The steps of a stage with their launches; None if not every one is of points that warps run, each for itself."""
    out = []
    for n in stage:
        m = found[n]
        if m is None or m.kernel.limits or m.kernel.locals or not may_join(m):
            return None
        if m.team not in (1, WARP) or not m.lanes == m.parts == 1:
            return None
        out.append((program.steps[n], _in_vectors(m)))
    return out


def _apart(members: Sequence[tuple[Step, Launch]], step: Step, at: AttentionLaunch, share: Callable[[int, int], bool]) -> bool:
    """True if tiles own their points, and nothing is read that a later kernel, or another block meanwhile, overwrites."""
    native = native_of(at.kernel)
    assert native is not None
    keys, queries = native.inputs[1].dims[2], native.inputs[0].dims[2]
    try:
        return _in_order([s for s, _ in members] + [step], share) and all(
            _owned(members, step, at, position) for position in sorted({0, min(1, keys - queries), keys - queries})
        )
    except Unknown:
        return False


def _in_order(steps: Sequence[Step], share: Callable[[int, int], bool]) -> bool:
    for n, step in enumerate(steps):
        for later in steps[n:]:
            if any(share(a, b) for a in step.reads for b in later.writes):
                return False
            if later is not step and any(share(a, b) for a in step.writes for b in later.writes):
                return False
    return True


def _owned(members: Sequence[tuple[Step, Launch]], step: Step, at: AttentionLaunch, position: int) -> bool:
    """Whether every element that a tile reads is its own, or no member's, if the first query is at `position`."""
    native = native_of(at.kernel)
    assert native is not None
    _, start = native.attrs.split(native.inputs[3:])  # type: ignore[union-attr]
    buffers = dict(zip(at.kernel.buffers, step.args))
    own = list(_of_views(native.inputs[:3], at, position))
    new = {buffers[b]: rows for b, _, rows in own[1:]}  # of keys and values
    if (set(step.reads) - {buffers[b] for b, _, _ in own}) & {id for s, _ in members for id in s.writes}:
        return False
    owner: dict[int, np.ndarray] = {}
    reads: list[tuple[int, np.ndarray]] = []
    for member, launch in members:
        ids = dict(zip(launch.kernel.buffers, member.args))
        for buffer, writes, index in Footprint(launch, at.tiles, position).found:
            id, there = ids[buffer], index >= 0
            if buffer.dtype.kind in "iu" and not writes:
                if start is None or id != buffers[start.buffer] or not _same_position(index, start, at.tiles):
                    return False
            elif not writes:
                reads.append((id, index))
            else:
                tile = np.broadcast_to(np.arange(at.tiles)[:, None], index.shape)[there]
                known = owner.setdefault(id, np.full(buffer.size, -1))
                if id in new and not np.isin(index[there], new[id]).all():
                    return False
                if index.max(initial=-1) >= buffer.size or ((known[index[there]] >= 0) & (known[index[there]] != tile)).any():
                    return False
                known[index[there]] = tile
                if (known[index[there]] != tile).any():
                    return False
    for id, index in [*reads, *((buffers[b], index) for b, _, index in own)]:
        if id in owner:
            found = owner[id][np.maximum(index, 0)]
            if ((index >= 0) & (found >= 0) & (found != np.arange(len(index))[:, None])).any():
                return False
    return True


def _same_position(index: np.ndarray, start: View, tiles: int) -> bool:
    """Whether the position that each tile loads is that of its first query."""
    stride = start.strides[0] if start.strides else 0
    batch = start.dims[0] if start.dims else 1
    wanted = start.offset + np.arange(tiles) // (tiles // batch) * stride
    return bool((index == wanted[:, None]).all())


def _of_views(views: Sequence[View], at: AttentionLaunch, position: int) -> Iterator[Access]:
    """The queries of each tile, and the rows of its new keys and values."""
    for n, view in enumerate(views):
        index = np.full((1,) * 4, view.offset)
        for axis, (size, stride) in enumerate(zip(view.dims, view.strides)):
            places = np.arange(size)[position : position + views[0].dims[2]] if n and axis == 2 else np.arange(size)
            index = index + (places * stride).reshape([-1 if a == axis else 1 for a in range(4)])
        yield view.buffer, False, index.reshape(at.tiles, -1)


__all__ = ["Footprint", "FrontWriter", "Fronted", "Unknown", "front_of", "fronted"]
