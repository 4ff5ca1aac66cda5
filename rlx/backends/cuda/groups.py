"""Small independent kernels of a run as one launch, with a range of blocks for each: a launch costs more than they do.

A kernel may move in front of others that it shares no memory with; buffers share memory where the plan gives them the same bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import Launch
from rlx.ir.program import Program

MOST = 8  # kernels of a launch
AHEAD = 16  # steps that a kernel may move forward
SMALL = 64  # blocks


class Group:
    """Launches of kernels that run as one. `keys`: equal for equal kernels."""

    def __init__(self, keys: Sequence[str], members: Sequence[Launch]) -> None:
        self.keys, self.members = keys, members
        self.blocks, self.threads = sum(m.blocks for m in members), max(m.threads for m in members)
        self.shared = max(m.shared for m in members)

    def function(self, name: str) -> str:
        """The functions of the members, each kernel once, and the kernel that calls them."""
        texts, names = [], {}
        for key, m in zip(self.keys, self.members):
            if key not in names:
                names[key] = f"{name}_{len(names)}"
                texts.append(CudaWriter(m).function(names[key], member=True))
        parameters, calls, first = [], [], 0
        for n, (key, m) in enumerate(zip(self.keys, self.members)):
            types = [text.rsplit(" ", 1)[0] for text in CudaWriter(m).arguments()]
            own = [f"m{n}_{i}" for i in range(len(types))]
            parameters += [f"{t.replace('__restrict__', '').strip()} {x}" for t, x in zip(types, own)]
            inside = f"rlx_block < {first + m.blocks}"
            call = f"{names[key]}({', '.join([*own, f'rlx_block - {first}'])})"
            calls.append(f"  {'else ' * (n > 0)}if ({inside}) {call};")
            first += m.blocks
        head = f'extern "C" __global__ void __launch_bounds__({self.threads})\n{name}({", ".join(parameters)}) {{'
        return "\n".join([*texts, head, "  const unsigned rlx_block = blockIdx.x;", *calls, "}", ""])


def may_join(launch: Launch) -> bool:
    return type(launch) is Launch and not launch.scratch and launch.blocks <= SMALL


def groups(program: Program, small: Sequence[bool]) -> list[tuple[int, ...]]:
    """The launches of a run as numbers of its steps. `small[n]`: step n may be in a group."""
    atoms = _atoms(program)
    access = [(_union(atoms, s.reads | s.writes), _union(atoms, s.writes)) for s in program.steps]
    left, out = list(range(len(program.steps))), []
    while left:
        group = [left[0]]
        if small[group[0]]:
            touched, written = map(set, access[group[0]])
            for n in left[1:AHEAD]:
                if program.steps[n].kernel.collective:
                    break
                uses, writes = access[n]
                if small[n] and len(group) < MOST and writes.isdisjoint(touched) and uses.isdisjoint(written):
                    group.append(n)
                touched |= uses
                written |= writes
        out.append(tuple(group))
        left = [n for n in left if n not in group]
    return out


def _atoms(program: Program) -> dict[int, frozenset[int]]:
    """For each buffer, the pieces of memory it has: two buffers share memory if they have a piece in common."""
    plan = program.plan.offsets
    spans = {b.id: (plan[b.id], plan[b.id] + max(1, b.nbytes)) for b in program.buffers if b.id in plan}
    edges = sorted({edge for span in spans.values() for edge in span})
    pieces = {id: frozenset(range(bisect_left(edges, low), bisect_left(edges, high))) for id, (low, high) in spans.items()}
    return {b.id: pieces.get(b.id, frozenset([-1 - b.id])) for b in program.buffers}


def _union(atoms: dict[int, frozenset[int]], buffers: Iterable[int]) -> frozenset[int]:
    return frozenset().union(*(atoms[b] for b in buffers))


__all__ = ["Group", "groups", "may_join"]
