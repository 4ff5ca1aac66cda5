"""Program: the compiler's output for a backend. Buffers with their locations, and steps that read and write them.

`prepare` computes derived params (packed, transposed, folded) and runs again when a param is set; `steps` is one run; `commit`
moves next states into handles, and runs only if the steps succeeded; `abort` undoes in-place writes to handles if a step
failed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import field
from enum import Enum
from functools import cached_property

import numpy as np

from rlx.ir.graph import Active
from rlx.ir.kernel import Kernel, Native, loaded_buffers
from rlx.ir.kernel_text import print_kernel
from rlx.ir.layout import TiledLayout
from rlx.ir.shape import Shape
from rlx.ir.shown import Shown, counted
from rlx.ir.target import Target
from rlx.ir.tokens import constant_text, name_text
from rlx.records import record


class Region(Enum):
    """Owner and lifetime of a buffer's bytes."""

    ARENA = "arena"  # planned; valid between its first write and last read within one run
    INPUT = "input"  # in the arena, never shared: keeps the data that the caller wrote
    OUTPUT = "output"  # in the arena, never shared once written: valid until the next run
    PARAM = "param"  # as the user set it
    PREPARED = "prepared"  # computed from params by `prepare`
    CONSTANT = "constant"  # bytes in the program
    HANDLE = "handle"  # outlives runs


NEVER_WRITTEN = (Region.PARAM, Region.PREPARED, Region.CONSTANT)  # by the kernels of a run


@record
class BufferDecl:
    """One buffer of the program. `shape`: its value's dims, or with a `layout` the dims of the tiles in memory. Program.plan has
    its offset (arena regions)."""

    id: int
    region: Region
    shape: Shape
    name: str  # input, param, handle or output name; "%7" for others
    data: np.ndarray | None = field(default=None, compare=False)  # CONSTANT
    layout: TiledLayout | None = None

    @property
    def nbytes(self) -> int:
        return self.shape.size_bytes


@record
class Step:
    """One kernel launch. `args[i]` is the buffer bound to kernel.buffers[i], whose `writable` marks outputs.
    `concurrent`: the step is in the group of the previous step; steps of a group may run at the same time."""

    kernel: Kernel
    args: tuple[int, ...]
    concurrent: bool = False

    @cached_property
    def reads(self) -> frozenset[int]:
        """Buffers that the step reads: all but the write-only ones. A writable buffer counts as read if the kernel loads it."""
        loaded = loaded_buffers(self.kernel)
        return frozenset(a for a, b in zip(self.args, self.kernel.buffers) if b in loaded)

    @cached_property
    def writes(self) -> frozenset[int]:
        return frozenset(a for a, b in zip(self.args, self.kernel.buffers) if b.writable)


@record
class ArenaPlan:
    """Byte offset of each arena buffer (regions ARENA, INPUT, OUTPUT) and the arena's size. `alignment` in bytes."""

    offsets: dict[int, int]
    size_bytes: int
    alignment: int
    unshared_bytes: int  # the size without memory reuse
    lower_bound_bytes: int  # peak of live bytes over the steps: no plan can be smaller


@record
class OutputDecl:
    """An output: its buffer and its shape. Outputs are contiguous and row-major; several may share a buffer. `active`: its active
    axes, which may have padding."""

    name: str
    buffer: int
    shape: Shape
    active: tuple[Active, ...] = ()


@record
class RouterDecl:
    """A choice of experts, i32 [tokens, k], whose buffer keeps it until the next run. Ids are below `experts`. `params`: the
    weights of these experts, one after the other along the first axis of each. `active`: as of an output. `ahead`: so many rows
    at the end of the buffer guess what the next router will choose."""

    buffer: int
    shape: Shape
    experts: int
    params: tuple[str, ...]
    active: tuple[Active, ...] = ()
    ahead: int = 0

    @property
    def tokens(self) -> int:
        """Rows of the choice."""
        return self.shape.static[0] - self.ahead


@record(repr=False)
class Program(Shown):
    name: str
    target: Target
    buffers: tuple[BufferDecl, ...]
    prepare: tuple[Step, ...]
    steps: tuple[Step, ...]
    commit: tuple[Step, ...]
    inputs: tuple[int, ...]  # buffers, in declaration order
    params: tuple[int, ...]
    handles: tuple[int, ...]
    outputs: tuple[OutputDecl, ...]
    plan: ArenaPlan
    abort: tuple[tuple[int, Step], ...] = ()  # (n, step): undoes an update in place when a run fails after steps[n]
    routers: tuple[RouterDecl, ...] = ()  # operands first: the layers in forward order
    extent: int | None = None  # if set, the last of `inputs`: i64 (), the number of valid rows of the active axes
    bodies: tuple[Program, ...] = ()  # sub-programs, which steps run (Kernel.flow). See `body_faults` in rlx.compiler.check
    stages: dict[str, str] = field(default_factory=dict, compare=False, repr=False)  # pass name -> text after it
    nodes: tuple[NodeReport, ...] = field(default=(), compare=False, repr=False)

    def _line(self) -> str:
        return f"{self.name!r} for {self.target.name}: {counted(len(self.steps), 'step')}, {len(self.prepare)} before runs"

    @cached_property
    def collectives(self) -> tuple[Native, ...]:
        """The collectives of the steps, in order."""
        return tuple(found for step in self.steps if (found := step.kernel.collective))

    @property
    def phases(self) -> dict[str, tuple[Step, ...]]:
        """The steps of each phase by its name."""
        undo = tuple(step for _, step in self.abort)
        return {"prepare": self.prepare, "steps": self.steps, "commit": self.commit, "abort": undo}

    @property
    def every_phase(self) -> dict[str, tuple[Step, ...]]:
        """The steps of each phase, those of the bodies too: "body0.steps", "body0.body1.commit"."""
        inner = {f"body{i}.{name}": s for i, b in enumerate(self.bodies) for name, s in b.every_phase.items()}
        return self.phases | inner

    @cached_property
    def sources(self) -> tuple[frozenset[str], ...]:
        """For each prepare step, the params it depends on."""
        out: list[frozenset[str]] = []
        feeds = {b.id: frozenset([b.name]) for b in self.buffers if b.region is Region.PARAM}
        for step in self.prepare:
            out.append(frozenset().union(*(feeds.get(id, ()) for id in step.reads)))
            feeds.update(dict.fromkeys(step.writes, out[-1]))
        return tuple(out)

    @cached_property
    def kept(self) -> frozenset[str]:
        """Params whose own bytes must be kept: those read by a run, or prepared together with others."""
        name = {id: self.buffers[id].name for id in self.params}
        read = (name[id] for step in self.steps + self.commit for id in step.reads if id in name)
        return frozenset(read).union(*(names for names in self.sources if len(names) > 1))

    def __str__(self) -> str:
        return print_program(self, full=False)


@record
class NodeReport:
    """Report on one node of the user's graph."""

    node: str
    op: str
    how: str  # "native", "decomposed", "lowered", "folded", "prepared", "view"
    kernel: str  # the kernel that computes it ("" if none)
    why: str = ""  # the reason for a refusal


def received_bytes(kernel: Kernel) -> int:
    """Lower bound of the bytes that each rank receives from others, if the kernel is a collective."""
    if not (op := kernel.collective):
        return 0
    x = op.inputs[0].buffer
    return op.attrs.moved(x.size * x.dtype.itemsize)  # type: ignore[union-attr]


def _moved(kernel: Kernel) -> str:
    return f"{kernel.collective.attrs}, {received_bytes(kernel)} bytes to each" if kernel.collective else ""


def _active_text(axes: tuple[Active, ...]) -> str:
    return "".join(f" active ({', '.join(map(str, a))})" for a in axes)


def kernel_labels(program: Program) -> dict[Kernel, str]:
    """A label for each kernel of a program: NAME, or NAME@2 for the second of that name. Kernels of equal text share a label."""
    labels: dict[str, str] = {}  # by text
    count: Counter[str] = Counter()
    kernels = dict.fromkeys(s.kernel for steps in program.every_phase.values() for s in steps)
    texts = {kernel: print_kernel(kernel) for kernel in kernels}
    for kernel, text in texts.items():
        if text not in labels:
            count[kernel.name] += 1
            labels[text] = f"{kernel.name}@{count[kernel.name]}" if count[kernel.name] > 1 else kernel.name
    return {kernel: labels[text] for kernel, text in texts.items()}


def print_program(program: Program, full: bool = True, labels: dict[Kernel, str] | None = None) -> str:
    """The text of a program: buffers with their locations, kernels, and the steps of each phase. `parse_program` (in
    rlx.ir.program_parse) reads it back, given the large constants. Not `full`: without kernels and constant data. `labels`: of
    the kernels of the program around this one."""
    plan = program.plan
    lines = [f"program {name_text(program.name)} for {name_text(program.target.name)}"]
    least = f"unshared {plan.unshared_bytes}, at least {plan.lower_bound_bytes}"
    lines.append(f"arena {plan.size_bytes} bytes, alignment {plan.alignment}, {least}")
    for b in program.buffers:
        place = f" @ {plan.offsets[b.id]}" if b.id in plan.offsets else ""
        tiles = f" in {b.layout}" if b.layout else ""
        data = "" if b.data is None or not full else f" = {constant_text(b.data, digest=True)}"
        lines.append(f"  %{b.id} {b.region.value} {name_text(b.name)} {b.shape}{tiles}{place}{data}")
    for role, ids in (("inputs", program.inputs), ("params", program.params), ("handles", program.handles)):
        lines.append(f"{role} {', '.join(f'%{id}' for id in ids)}".rstrip())
    if program.extent is not None:
        lines.append(f"extent %{program.extent}")
    for o in program.outputs:
        lines.append(f"output {name_text(o.name)} = %{o.buffer} {o.shape}{_active_text(o.active)}")
    for r in program.routers:
        params = f" of {', '.join(map(name_text, r.params))}" if r.params else ""
        ahead = f" ahead {r.ahead}" if r.ahead else ""
        lines.append(f"router %{r.buffer} {r.shape}{_active_text(r.active)} experts {r.experts}{ahead}{params}")
    labels = kernel_labels(program) if labels is None else labels
    lines += dict.fromkeys(map(print_kernel, labels)) if full else ()
    for body in program.bodies:
        lines += [f"  {line}" for line in print_program(body, full=False, labels=labels).split("\n")]
    for phase, steps in program.phases.items():
        lines.append(f"{phase}:")
        for n, s in enumerate(steps):
            after = f"after {program.abort[n][0]} " if phase == "abort" else ""
            args = ", ".join(f"{'out ' if b.writable else ''}%{a}" for a, b in zip(s.args, s.kernel.buffers))
            name = name_text(s.kernel.name) + labels[s.kernel].removeprefix(s.kernel.name)
            note = _moved(s.kernel) or " ".join(s.kernel.origin)
            lines.append(f"  {'| ' * s.concurrent}{after}{name}({args})  # {note}".rstrip(" #"))
    return "\n".join(lines)
