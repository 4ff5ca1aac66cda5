"""The report of a compiled graph as data for JSON: the source of `report.json` and of the page. docs/explain.md is its schema."""

from __future__ import annotations

import hashlib
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlx.compiler.memory import lifetimes, moments
from rlx.compiler.options import CompileOptions
from rlx.explain.profile import Profile, short
from rlx.ir.cost import KernelWork, program_work
from rlx.ir.graph import CONSTANT
from rlx.ir.kernel_text import print_kernel
from rlx.ir.keys import key_facts
from rlx.ir.node import LeafAttrs, Node
from rlx.ir.op import Kind
from rlx.ir.program import Program, Region, Step, kernel_labels
from rlx.records import record

if TYPE_CHECKING:
    from rlx.compiler.origins import Member, Origins

FORMAT, VERSION = "rlx report", 1
LONGEST = 200  # characters of an attribute
FEW, MOST_BLOCKS = 8, 50  # steps of a block without a name, at least; number of those
Data = dict[str, Any]


@record
class Compiled:
    """The parts of a report besides the origins. `regions`: bytes by purpose, as of the executable. `present`: names of the
    params that are in memory. `texts`, `assembly`: label of a kernel -> generated code, machine code as text. `versions`: of what
    made the code; `machine`: the processor."""

    program: Program
    device: str
    options: CompileOptions
    regions: Mapping[str, int]
    present: frozenset[str]
    texts: Mapping[str, str]
    assembly: Mapping[str, str]
    versions: Mapping[str, str]
    machine: str
    compile: Data


def report_data(made: Compiled, origins: Origins, profile: Profile | None = None, unmeasured: str = "") -> Data:
    """The whole report. `unmeasured`: why there is no profile."""
    program = origins.program
    texts = _Texts()
    labels = kernel_labels(program)
    kernels: dict[str, Data] = {}
    for kernel, label in labels.items():
        code, assembly = made.texts.get(label), made.assembly.get(label)
        kernels[label] = {
            "text": texts.add(print_kernel(kernel)), "code": texts.add(code), "assembly": texts.add(assembly),
            "grid": [extent for _, extent in kernel.grid], "ops": list(kernel.origin),
        }  # fmt: skip
    steps = list(_steps(program, origins, labels))
    buffers = list(_buffers(made, program, origins))
    target = program.target
    return {
        "format": FORMAT, "version": VERSION, "name": program.name, "device": made.device,
        "target": {**key_facts(target), "name": target.name, "threads": target.threads},
        "machine": made.machine, "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "versions": dict(made.versions), "options": key_facts(made.options), "compile": made.compile,
        "fingerprint": origins.graph.fingerprint(),
        "memory": {
            "regions": dict(made.regions), "total": sum(made.regions.values()),
            "arena": {
                "bytes": program.plan.size_bytes, "unshared": program.plan.unshared_bytes,
                "lower_bound": program.plan.lower_bound_bytes, "alignment": program.plan.alignment, "peak": _peak(buffers),
            },
        },
        "graph": _graph(origins), "buffers": buffers, "steps": steps, "blocks": _blocks(program), "kernels": kernels,
        "texts": texts.texts, "profile": None if profile is None else profile.data(), "unmeasured": unmeasured,
    }  # fmt: skip


class _Texts:
    """Texts by key, each once."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def add(self, text: str | None) -> str | None:
        if not text:
            return None
        key = hashlib.sha256(text.encode()).hexdigest()[:12]
        self.texts[key] = text
        return key


def _graph(origins: Origins) -> Data:
    number = {node: i for i, node in enumerate(origins.nodes)}
    graph = origins.graph

    def at(v: Any) -> list[int]:
        return [number[v.node], v.index]

    return {
        "nodes": [_node(node, origins.decisions.get(i), [at(v) for v in node.inputs]) for i, node in enumerate(origins.nodes)],
        "outputs": [{"name": name, "value": at(v)} for name, v in zip(graph.output_names, graph.outputs)],
        "assigns": [{"handle": str(handle.name), "value": at(v)} for handle, v in graph.assigns],
    }


def _node(node: Node, decision: tuple[str, str] | None, inputs: list[list[int]]) -> Data:
    leaf = node.op.kind is Kind.LEAF
    how, why = decision or ("leaf" if leaf else "folded", "")
    plain = node.attrs is None or isinstance(node.attrs, LeafAttrs) or node.op is CONSTANT
    attributes = {} if plain else {k: f"{v}"[:LONGEST] for k, v in vars(node.attrs).items()}
    source = None if node.source is None else short(node.source)
    return {
        "op": node.op.name, "name": node.name, "shapes": [str(s) for s in node.shapes], "inputs": inputs,
        "attributes": attributes, "source": source, "how": how, "why": why,
    }  # fmt: skip


def _buffers(made: Compiled, program: Program, origins: Origins) -> Iterator[Data]:
    undo = tuple(step for _, step in program.abort)
    steps = (*program.steps, *program.commit, *undo)
    lives = lifetimes(program.buffers, steps, {o.buffer for o in program.outputs}, "reuse" not in made.options.disable)
    for b in program.buffers:
        life, offset = lives.get(b.id), program.plan.offsets.get(b.id)
        lasting = b.region in (Region.PARAM, Region.PREPARED)
        yield {
            "id": b.id, "region": b.region.value, "name": b.name, "dims": list(b.shape.static), "dtype": b.shape.dtype.name,
            "bytes": b.nbytes, "layout": None if b.layout is None else str(b.layout), "offset": offset,
            "first": None if life is None else life.first, "last": None if life is None else life.last,
            "present": b.name in made.present if lasting else True, "node": origins.buffers.get(b.id),
        }  # fmt: skip


def _peak(buffers: Sequence[Data]) -> Data:
    """The moment at which most bytes of the arena are live, and how many."""
    change: Counter[int] = Counter()
    written: dict[tuple[int, int], int] = {}  # slot -> the last moment of the buffer in it
    for b in sorted((b for b in buffers if b["offset"] is not None and b["first"] <= b["last"]), key=lambda b: b["first"]):
        slot, size = (b["offset"], b["bytes"]), b["bytes"]
        begin = b["first"] + (written.get(slot) == b["first"])  # written over another in place: counted once in that moment
        written[slot] = b["last"]
        change[begin] += size
        change[b["last"] + 1] -= size
    total, found = 0, {"moment": 0, "bytes": 0}
    for moment in sorted(change):
        total += change[moment]
        if total > found["bytes"]:
            found = {"moment": moment, "bytes": total}
    return found


def _steps(program: Program, origins: Origins, labels: Mapping[Any, str]) -> Iterator[Data]:
    run: list[Step] = [*program.steps, *program.commit]
    work: dict[int, KernelWork] = {id(s): w for s, w in zip(run, program_work(program).kernels, strict=True)}
    when = {id(s): at for s, at in zip(run, moments(run))}
    for phase, steps in program.phases.items():
        for index, (step, origin) in enumerate(zip(steps, origins.steps[phase], strict=True)):
            cost = work.get(id(step))
            yield {
                "phase": phase, "index": index, "kernel": labels[step.kernel], "concurrent": step.concurrent,
                "moment": when.get(id(step)), "reads": sorted(step.reads), "writes": sorted(step.writes),
                "nodes": list(origin.nodes), "members": [_member(m) for m in origin.members], "why": origin.why,
                "cost": None if cost is None else {
                    "read_bytes": cost.read_bytes, "written_bytes": cost.written_bytes, "least_bytes": cost.least_bytes,
                    "flops": cost.flops,
                },
            }  # fmt: skip


def _blocks(program: Program) -> list[Data]:
    """The steps of a run in blocks: layers, as the names of the params say that a step reads ("encoder.layer.0"). A step without
    params belongs to the block before it. Without such names: a few steps each."""
    made = {id: names for step, names in zip(program.prepare, program.sources) for id in step.writes}
    own = {b.id: frozenset([b.name]) for b in program.buffers if b.region is Region.PARAM}
    steps = [*program.steps, *program.commit]
    found: list[str] = []
    for step in steps:
        names = sorted(name for id in step.args for name in (own.get(id) or made.get(id) or ()))
        layers = Counter(layer for name in names if (layer := layer_of(name)))
        found.append(layers.most_common(1)[0][0] if layers else found[-1] if found else "")
    if not any(found):
        few = max(FEW, -(-len(steps) // MOST_BLOCKS))
        found = [f"steps {n} to {min(n + few, len(steps)) - 1}" for n in range(0, len(steps), few) for _ in steps[n : n + few]]
    first = next(filter(None, found), "")
    blocks: list[Data] = []
    for n, name in enumerate(found):
        if not blocks or blocks[-1]["name"] != (name or first):
            blocks.append({"name": name or first, "steps": []})
        blocks[-1]["steps"].append(n)
    return blocks


def layer_of(param: str) -> str:
    """A param's name up to its first number, else its first part: "blk.3" of "blk.3.attn.w", "head" of "head.w", "" of "w"."""
    parts = param.split(".")
    at = next((i for i, part in enumerate(parts) if part[-1:].isdigit()), None)
    return ".".join(parts[: at + 1]) if at is not None else parts[0] if len(parts) > 1 else ""


def _member(m: Member) -> Data:
    shapes = [str(s) for s in m.shapes]
    return {"op": m.op, "shapes": shapes, "form": m.form, "node": m.origin, "why": m.why, "inputs": list(m.inputs)}


__all__ = ["FORMAT", "VERSION", "Compiled", "Data", "layer_of", "report_data"]
