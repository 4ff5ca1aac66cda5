"""Small kernels of a run as one launch, since a launch costs more than they do.

Independent ones are a *stage*: each has a range of blocks. Stages that follow each other are run by one cluster of blocks, with
a barrier of the cluster between them. A kernel may move in front of others that it shares no memory with; buffers share memory
where the plan gives them the same bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence

from rlx.backends.cuda.render import CudaWriter
from rlx.backends.cuda.schedule import WARP, Launch
from rlx.ir.kernel import Buffer, Store
from rlx.ir.program import Program

ARGUMENTS = 500  # of a launch: 4 KB
AHEAD = 96  # steps that a kernel may move forward
SMALL = 4096  # blocks of a kernel
CLUSTER = 8  # blocks: as many as every GPU with clusters has
ROUNDS = 4  # of the cluster in a stage, at most
STAGES = 8

Stages = Sequence[Sequence[int]]  # steps of a launch


class Group:
    """`stages`: launches of kernels that run as one. `keys`: equal for equal kernels."""

    def __init__(self, keys: Sequence[Sequence[str]], stages: Sequence[Sequence[Launch]]) -> None:
        self.keys, self.stages = keys, stages
        self.members = [m for stage in stages for m in stage]
        self.threads, self.shared = max(m.threads for m in self.members), max(m.shared for m in self.members)
        self.scratch = self.counters = 0
        self.blocks = CLUSTER if len(stages) > 1 else sum(m.blocks for m in self.members)

    def function(self, name: str) -> str:
        """The functions of the members, each kernel once, and the kernel that calls them."""
        names: dict[str, str] = {}
        texts: list[str] = []
        for key, m in zip([key for stage in self.keys for key in stage], self.members):
            if key not in names:
                names[key] = f"{name}_{len(names)}"
                texts.append(self.writer(m).function(names[key], member=True))
        parameters = [", ".join(self.parameters(n)) for n in range(len(self.members))]
        cluster = f"__cluster_dims__({CLUSTER}) " if len(self.stages) > 1 else ""
        texts.append(f'extern "C" __global__ void {cluster}__launch_bounds__({self.threads})\n{name}({", ".join(parameters)}) {{')
        return "\n".join([*texts, "  rlx_begin();", *self.body(names), "}", ""])

    def parameters(self, n: int) -> Iterator[str]:
        for i, text in enumerate(self.writer(self.members[n]).arguments()):
            yield f"{text.rsplit(' ', 1)[0]} m{n}_{i}"

    def writer(self, member: Launch) -> MemberWriter:
        made = MemberWriter(member)
        made.alone_in_launch = len(self.stages) == 1  # independent kernels; those of stages read what others write
        return made

    def body(self, names: dict[str, str]) -> Iterator[str]:
        member = 0
        for at, (keys, stage) in enumerate(zip(self.keys, self.stages)):
            count = sum(m.blocks for m in stage)
            if at:
                yield "  rlx_cluster_barrier();"
            yield f"  for (unsigned block = blockIdx.x; block < {count}; block += gridDim.x) {{"
            first, calls = 0, list[tuple[int, str]]()
            for key, m in zip(keys, stage):
                own = [text.rsplit(" ", 1)[1] for text in self.parameters(member)]
                call = f"{names[key]}({', '.join([*own, f'block - {first}'])})"
                calls.append((first + m.blocks, call))
                first, member = first + m.blocks, member + 1
            yield from (f"    {line}" for line in chosen(calls))
            if len(self.stages) > 1 and self.shared:
                yield "    __syncthreads();"  # the next round uses the same shared memory
            yield "  }"


def chosen(calls: Sequence[tuple[int, str]]) -> list[str]:
    """The call whose blocks, which end before a number, have this block among them: found by halves."""
    if len(calls) == 1:
        return [f"{calls[0][1]};"]
    half = len(calls) // 2
    low, high = chosen(calls[:half]), chosen(calls[half:])
    return [f"if (block < {calls[half - 1][0]}) {{", *low, "} else {", *high, "}"]


class MemberWriter(CudaWriter):
    """A kernel as a function for one block. Where a run has failed it stores nothing; the flag is loaded while the operands
    are."""

    stored = "if (!stopped) "

    def enter(self) -> Iterator[str]:
        yield "const bool stopped = halt && *(const volatile int*)halt;"
        yield f"if (threadIdx.x >= {self.launch.threads}) return;"

    def store(self, s: Store, value: str) -> str:
        return (self.stored if isinstance(s.buffer, Buffer) and id(s) not in self.vector_stores else "") + super().store(s, value)


def may_join(launch: Launch) -> bool:
    return type(launch) is Launch and not (launch.scratch or launch.counters or launch.clustered) and launch.blocks <= SMALL


def grouped(program: Program, small: Sequence[Launch | None], clusters: bool) -> Sequence[Stages]:
    """The launches of a run. `small[n]`: the launch of step n, if it may be in a group."""
    out: list[list[Sequence[int]]] = []
    for stage in _stages(program, small):
        before = out[-1] if out else []
        fits = len(before) < STAGES and sum(_arguments(program, x) for x in [*before, stage]) <= ARGUMENTS
        if clusters and before and fits and _follows(*([small[n] for n in x] for x in (before[-1], stage))):
            out[-1].append(stage)
        else:
            out.append([stage])
    return out


def _arguments(program: Program, steps: Iterable[int]) -> int:
    """At most so many arguments: the buffers, scratch, status, halt."""
    return sum(len(program.steps[n].args) + 3 for n in steps)


def _follows(*stages: Sequence[Launch | None]) -> bool:
    """True if a cluster can run both stages."""
    members = [m for stage in stages for m in stage]
    if not all(members):
        return False
    fit = all(sum(m.blocks for m in stage if m) <= CLUSTER * ROUNDS for stage in stages)
    apart = all(m.team <= WARP and m.lanes == 1 for m in members if m)  # no barrier of a block that some threads have left
    return fit and apart and len({m.threads for m in members if m}) == 1


def _stages(program: Program, small: Sequence[Launch | None]) -> Iterator[tuple[int, ...]]:
    atoms = _atoms(program)
    access = [(_union(atoms, s.reads | s.writes), _union(atoms, s.writes)) for s in program.steps]
    left = list(range(len(program.steps)))
    while left:
        group = [left[0]]
        if small[group[0]]:
            touched, written = map(set, access[group[0]])
            for n in left[1:AHEAD]:
                if program.steps[n].kernel.collective:
                    break
                uses, writes = access[n]
                fits = _arguments(program, [*group, n]) <= ARGUMENTS
                if small[n] and fits and writes.isdisjoint(touched) and uses.isdisjoint(written):
                    group.append(n)
                touched |= uses
                written |= writes
        yield tuple(group)
        left = [n for n in left if n not in group]


def _atoms(program: Program) -> dict[int, frozenset[int]]:
    """For each buffer, the pieces of memory it has: two buffers share memory if they have a piece in common."""
    plan = program.plan.offsets
    spans = {b.id: (plan[b.id], plan[b.id] + max(1, b.nbytes)) for b in program.buffers if b.id in plan}
    edges = sorted({edge for span in spans.values() for edge in span})
    pieces = {id: frozenset(range(bisect_left(edges, low), bisect_left(edges, high))) for id, (low, high) in spans.items()}
    return {b.id: pieces.get(b.id, frozenset([-1 - b.id])) for b in program.buffers}


def overlaps(program: Program) -> Callable[[int, int], bool]:
    """Whether two buffers share memory."""
    atoms = _atoms(program)
    return lambda a, b: not atoms[a].isdisjoint(atoms[b])


def _union(atoms: dict[int, frozenset[int]], buffers: Iterable[int]) -> frozenset[int]:
    return frozenset().union(*(atoms[b] for b in buffers))


__all__ = ["Group", "Stages", "grouped", "may_join", "overlaps"]
