"""Reports on compiles, allocations and memory plans: plain records with a readable text form."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from rlx.ir.cost import ProgramWork
from rlx.ir.program import NodeReport, Program
from rlx.ir.shown import Shown, counted, sized
from rlx.ir.tuning import NOT_TUNED, Tuning
from rlx.records import record

if TYPE_CHECKING:
    from rlx.explain.profile import Profile


class Texts(Mapping[str, str]):
    """Label of a kernel -> generated code, read lazily."""

    def __init__(self, read: Callable[[], Mapping[str, str]]) -> None:
        self._read = read

    @cached_property
    def _texts(self) -> Mapping[str, str]:
        return self._read()

    def __getitem__(self, name: str) -> str:
        return self._texts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@record
class CacheNote:
    """How a compile used the disk cache. `state`: "cached" (loaded from it), "compiled" (compiled and stored in it) or "off".
    `key`: the entry's name. `path`: its file. `why`: the reason of a miss, or of "off"."""

    state: str = "off"
    key: str = ""
    path: str = ""
    why: str = ""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"cache: {self.state}{why}{': ' if self.path else ''}{self.path}"


@record(repr=False)
class CompileReport(Shown):
    """The report of a compile. `nodes`: how each was compiled. `seconds`: by stage. `texts`: label of a kernel (NAME, or
    NAME@2 for the second of that name) -> generated code. `stages`: graph text by pass. `cache`: use of the disk cache.
    `tuning`: the tilings of steps. `work`: bytes and FLOPs of a run, counted lazily. `describe`: makes `data`."""

    name: str
    device: str
    nodes: tuple[NodeReport, ...]
    steps: int
    seconds: Mapping[str, float]
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)
    stages: Mapping[str, str] = field(default_factory=dict, repr=False)
    cache: CacheNote = CacheNote()
    tuning: Tuning = NOT_TUNED
    count: Callable[[], ProgramWork] = field(default=lambda: ProgramWork((), 0), repr=False, compare=False)
    describe: Callable[[Any, str], dict[str, Any]] = field(default=lambda profile, why: {}, repr=False, compare=False)

    def data(self, profile: Profile | None = None, unmeasured: str = "") -> dict[str, Any]:
        """The whole report as data for JSON; docs/explain.md is its schema. Lowers the graph once more. `profile`: the times to
        show; else `unmeasured` says why there are none."""
        return self.describe(profile, unmeasured)

    def save(self, path: str | os.PathLike[str], profile: Profile | None = None) -> None:
        """Write `data` as JSON. OptionError: the file cannot be written."""
        from rlx.explain.profile import write  # not needed by most programs

        write(path, json.dumps(self.data(profile), indent=1))

    def _line(self) -> str:
        made = f"{self.cache.state} in {sum(self.seconds.values()):.2g} s"
        return f"{self.name!r} on {self.device}: {counted(self.steps, 'step')}, {counted(self.kernels, 'kernel')}, {made}"

    @property
    def kernels(self) -> int:
        """The number of different kernels."""
        return len(self.texts)

    @cached_property
    def work(self) -> ProgramWork:
        return self.count()

    def __str__(self) -> str:
        times = ", ".join(f"{name} {value * 1e3:.1f} ms" for name, value in self.seconds.items())
        head = f"{self.name} on {self.device}: {self.steps} steps, {self.kernels} different kernels; {times}"
        lines = [head, f"  {self.cache}"]
        width = max((len(n.node) for n in self.nodes), default=0)
        for n in self.nodes:
            where = f" in {n.kernel}" if n.kernel else ""
            lines.append(f"  {n.node:{width}}  {n.how}{where}{': ' + n.why if n.why else ''}")
        return "\n".join([*lines, *([f"  {self.tuning}"] if self.tuning.steps else []), str(self.work)])


@record
class Allocations:
    """Counters of this process: blocks held by Python's allocator, the number of allocations that rlx has made on the device, and
    the bytes of those still live. The difference of two readings is what the runs between them allocated."""

    python_blocks: int
    native_count: int
    native_live_bytes: int


def expert_bytes(program: Program) -> int:
    """Bytes of the weights of experts, packed where they are."""
    params, decls = {name for r in program.routers for name in r.params}, {b.id: b for b in program.buffers}
    packed = {id for step, names in zip(program.prepare, program.sources) if names and names <= params for id in step.writes}
    kept = {id for id in program.params if decls[id].name in params & program.kept}
    return sum(decls[id].nbytes for id in packed | kept)


@record(repr=False)
class MemoryPlan(Shown):
    """Memory of an executable, known at compile time. `regions`: bytes by purpose. `slots`: arena buffer -> (offset, bytes).
    `offloaded`: bytes of experts that are not resident; `regions` is without them. `expert_bytes`: of all experts."""

    arena_bytes: int
    unshared_bytes: int
    lower_bound_bytes: int
    alignment: int
    regions: Mapping[str, int]
    slots: Mapping[str, tuple[int, int]]
    offloaded: int = 0
    expert_bytes: int = 0

    @staticmethod
    def of(program: Program, regions: Mapping[str, int], offloaded: int = 0) -> MemoryPlan:
        plan = program.plan
        slots = {
            f"%{b.id} {b.region.value} {b.name}": (plan.offsets[b.id], b.nbytes) for b in program.buffers if b.id in plan.offsets
        }
        sizes = plan.size_bytes, plan.unshared_bytes, plan.lower_bound_bytes, plan.alignment
        return MemoryPlan(*sizes, regions, slots, offloaded, expert_bytes(program))

    def _line(self) -> str:
        parts = ", ".join(f"{name} {sized(n)}" for name, n in self.regions.items() if n)
        return f"of {sized(self.total_bytes)}: {parts}" + f"; experts not resident {sized(self.offloaded)}" * (self.offloaded > 0)

    @property
    def total_bytes(self) -> int:
        return sum(self.regions.values())

    def __str__(self) -> str:
        head = f"arena {self.arena_bytes} bytes (without sharing {self.unshared_bytes}, least possible {self.lower_bound_bytes})"
        parts = [f"  {name}: {n} bytes" for name, n in self.regions.items()]
        parts += [f"  experts not resident: {self.offloaded} bytes more"] if self.offloaded else []
        slots = [f"  {at:>10} +{n:<10} {name}" for name, (at, n) in sorted(self.slots.items(), key=lambda s: s[1])]
        return "\n".join([head, *parts, "slots:", *slots])
