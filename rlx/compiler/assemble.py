"""Compiles a graph to a Program: passes, fusion, lowering, the schedule, the memory plan and its check, in this order."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rlx.compiler.alike import Alike
from rlx.compiler.check import check_program
from rlx.compiler.compilation import Compilation
from rlx.compiler.concurrent import group_concurrent
from rlx.compiler.factors import factored, may_scale
from rlx.compiler.facts import Facts, facts_of
from rlx.compiler.fuse import fuse
from rlx.compiler.groups import Group, print_groups
from rlx.compiler.lowering import Extra, Lowered, Place
from rlx.compiler.memory import moments, no_pairs, plan_arena
from rlx.compiler.options import CompileOptions, Foresee
from rlx.compiler.pipeline import keep_text, run_passes
from rlx.compiler.routers import routers
from rlx.compiler.within import within
from rlx.errors import VerifyError
from rlx.ir import kernel as K
from rlx.ir.graph import CONSTANT, HANDLE, INPUT, PARAM, Graph, Node, Value
from rlx.ir.kernel_text import print_kernel
from rlx.ir.layout import TiledLayout
from rlx.ir.op import Kind
from rlx.ir.overlap import may_overlap
from rlx.ir.program import BufferDecl, NodeReport, OutputDecl, Program, Region, RouterDecl, Step
from rlx.ir.shape import Shape
from rlx.ir.target import Target

if TYPE_CHECKING:
    from rlx.compiler.control import Flow

LEAF_REGIONS = {INPUT: Region.INPUT, PARAM: Region.PARAM, HANDLE: Region.HANDLE, CONSTANT: Region.CONSTANT}


class Assembled(NamedTuple):
    """A checked program, the facts of the legal graph, and the buffer of each of its values that has one. `made`: by phase, the
    group of each step, or for a step of the commit the assigned handle."""

    program: Program
    facts: Facts
    ids: dict[Value, int]
    made: dict[str, list[Group | Value]]


def assembled(
    graph: Graph, target: Target, options: CompileOptions, outer: Mapping[str, str] | None = None, foresee: Foresee | None = None
) -> Assembled:
    """The program of `graph`. Raises CompileError, VerifyError or OptionError. `outer`: it is a sub-graph (Compilation.nested),
    and these are the names of what its params are outside. `foresee`: see rlx.compiler.lower."""
    nested = outer is not None
    stages: dict[str, str] = {}
    graphs: dict[str, Graph] = {}
    compilation, key = Compilation(target, options, nested), _Keys(outer or {})
    facts = facts_of(run_passes(graph, compilation, stages if options.wants_text else None, graphs=graphs), compilation)
    groups = fuse(facts)
    if options.wants_text:
        keep_text(stages, "groups", facts.graph.name, print_groups(groups, facts.graph), options)
    groups = within(groups, facts)
    inner = replace(options, dims={}, extent=None, handles=(), verbose=False, dump=None)
    flows = _flows(groups, facts, lambda body, keys: assembled(body, target, inner, keys, foresee).program, key)
    alike = Alike(facts)
    slowest_first = sorted(groups, key=lambda g: _effort(g.anchor, facts), reverse=True)
    run: Iterable[tuple[Group, Lowered]] = ((g, flows[g].lowered if g in flows else alike.lowered(g)) for g in slowest_first)
    if any(may_scale(g, facts) for g in groups):
        run = factored(dict(run), facts).items()
    bases = ((handle, facts.places.base(v)) for handle, v in facts.graph.assigns if facts.memory(v) is v)
    copies = ((handle, Lowered(copy_kernel(handle), (base, handle))) for handle, base in bases)
    made = _scheduled(chain[tuple[Group | Value, Lowered]](run, copies), facts, stages, foresee)
    lowered = {group: made[group] for group in groups if group in made}
    reports = _reports(graphs["bind_dims"], facts, lowered)
    commit = {key: x for key, x in made.items() if isinstance(key, Value)}
    assembler = _Assembler(facts, lowered, commit, key, flows)
    program = assembler.program(graph, stages, reports)
    check_program(program, nested)
    ids = {v: number for v, number in assembler.ids.items() if isinstance(v, Value)}
    return Assembled(program, facts, ids, assembler.made)


def _flows(
    groups: Sequence[Group], facts: Facts, compiled: Callable[[Graph, Mapping[str, str]], Program], key: _Keys
) -> dict[Group, Flow]:
    """Those of the groups that run sub-programs."""
    if not (found := [g for g in groups if g.anchor is not None and g.anchor.op.kind is Kind.CONTROL]):
        return {}
    from rlx.compiler.control import lower_control  # imported late: few programs have any

    return {g: lower_control(g, facts, compiled, key.of) for g in found}


def _effort(anchor: Node | None, facts: Facts) -> int:
    """The greater, the longer it takes to make the code of the kernel that grew from this node: a backend that is told of it
    first makes it beside the rest of the lowering."""
    if anchor is None:
        return 0
    return 2 if facts.compilation.is_native(anchor) else int(anchor.op.kind is Kind.CONTRACT)


class _Assembler:
    """Numbers the buffers, turns kernels into steps, and plans the arena."""

    def __init__(
        self, facts: Facts, lowered: dict[Group, Lowered], commit: dict[Value, Lowered], key: _Keys, flows: dict[Group, Flow]
    ) -> None:
        """`lowered`: the groups in execution order, each with its kernel. `commit`: copies of next states into handles. `flows`:
        those of the groups that run sub-programs."""
        self.facts, self.lowered, self.commit, self.target = facts, lowered, commit, facts.target
        self.options = facts.compilation.options
        self.output_bases = {facts.places.base(v) for v in facts.graph.outputs}
        self.ids: dict[Place, int] = {}
        self.buffers: list[BufferDecl] = []
        self.made: dict[str, list[Group | Value]] = {}
        self.key, self.flows = key.of, flows
        self.prepared: dict[str, int] = {}  # by name

    def program(self, source: Graph, stages: dict[str, str], reports: tuple[NodeReport, ...]) -> Program:
        graph, places = self.facts.graph, self.facts.places
        inputs, params, handles = (tuple(map(self.id, leaves)) for leaves in (graph.inputs, graph.params, graph.handles))
        undo = {u.undo.node: u for u in graph.updates if u.undo is not None}
        groups = [g for g in self.lowered if g.anchor not in undo]
        prepare, made = (tuple(self.step(self.lowered[g]) for g in groups if g.static is ahead) for ahead in (True, False))
        lifted = self.lifted(prepare)
        prepare = (*prepare, *(step for _, step in lifted))
        apart = "concurrent" in self.options.disable
        order = [(i, False) for i in range(len(made))] if apart else group_concurrent(made, self.target)
        steps = tuple(replace(made[i], concurrent=concurrent) for i, concurrent in order)
        commit = tuple(map(self.step, self.commit.values()))
        if self.facts.compilation.nested:
            from rlx.compiler.control import carried_in_place

            steps, commit = map(tuple, carried_in_place(steps, commit, self.buffers, moments))
        run = [g for g in groups if not g.static]
        run = [run[i] for i, _ in order]
        ahead: list[Group | Value] = [*(g for g in groups if g.static), *(g for g, _ in lifted)]
        self.made = {"prepare": ahead, "steps": [*run], "commit": [*self.commit]}
        self.made["abort"] = [g for g in self.lowered if g.anchor in undo]
        saving = {v: i for i, g in enumerate(run) for v in g.stores}
        undone = ((undo[g.anchor].saved, x) for g, x in self.lowered.items() if g.anchor in undo)
        abort = tuple((saving[saved], self.step(x)) for saved, x in undone if saved is not None)
        chosen = tuple(self.router(v, params) for v, params in routers(self.facts))
        named = zip(graph.output_names, graph.outputs, graph.output_actives, strict=True)
        outputs = tuple(OutputDecl(name, self.id(places.base(v)), v.shape, a) for name, v, a in named)
        plan = plan_arena(
            self.buffers,
            steps + commit + tuple(s for _, s in abort),
            {o.buffer for o in outputs},
            self.options.alignment or self.target.alignment,
            no_pairs if "inplace" in self.options.disable else may_overlap,
            reuse="reuse" not in self.options.disable,
            rest_bytes=self.target.rest_bytes,
        )
        return Program(
            source.name, self.target, tuple(self.buffers), prepare, steps, commit, inputs, params, handles, outputs, plan,
            abort, chosen, None if graph.extent is None else self.id(graph.extent.leaf), tuple(self.facts.bodies.values()),
            stages, reports,
        )  # fmt: skip

    def lifted(self, prepare: Sequence[Step]) -> list[tuple[Group, Step]]:
        """The steps of sub-programs that depend on params alone, without those that are among `prepare` or others of them."""
        found: list[tuple[Group, Step]] = []
        for group, flow in self.flows.items():
            for kernel, args in flow.ahead:
                step = Step(kernel, tuple(map(self.id, args)))
                if not any(step.writes & other.writes for other in (*prepare, *(s for _, s in found))):
                    found.append((group, step))
        return found

    def declared(
        self, region: Region, shape: Shape, name: str, data: np.ndarray | None = None, layout: TiledLayout | None = None
    ) -> int:
        """The number of a new buffer, or of the one that is prepared under that name."""
        if region is Region.PREPARED and name in self.prepared:
            return self.prepared[name]
        number = len(self.buffers)
        if region is Region.PREPARED:
            self.prepared[name] = number
        self.buffers.append(BufferDecl(number, region, shape, name, data, layout))
        return number

    def id(self, base: Place) -> int:
        """The number of the buffer that holds `base`."""
        if base not in self.ids and isinstance(base, Extra):
            self.ids[base] = self.declared(base.region, base.shape, base.name, base.data, base.layout)
        elif base not in self.ids and isinstance(base, Value):
            node = base.node
            region = LEAF_REGIONS.get(node.op) or self.computed_region(base)
            name = (node.name if node.op in (INPUT, PARAM, HANDLE) else None) or f"%{len(self.buffers)}"
            if region is Region.PREPARED:
                name = f"{self.key(node)}[{base.index}]"
            data = node.attrs.data if node.op is CONSTANT else None  # type: ignore[union-attr]
            tiles = self.facts.places.tiles.get(base)
            shape = base.shape if tiles is None else base.shape.with_dims(tiles.dims)
            self.ids[base] = self.declared(region, shape, name, data, tiles)
        return self.ids[base]

    def computed_region(self, base: Value) -> Region:
        if self.facts.compilation.is_static(base.node):
            return Region.PREPARED
        return Region.OUTPUT if base in self.output_bases or base.node.op.observed else Region.ARENA

    def router(self, value: Value, params: tuple[str, ...]) -> RouterDecl:
        active = self.facts.active.get(value)
        experts, ahead = value.node.attrs.experts, value.node.attrs.ahead  # type: ignore[union-attr]
        return RouterDecl(self.id(value), value.shape, experts, params, () if active is None else (active,), ahead)

    def step(self, lowered: Lowered) -> Step:
        return Step(lowered.kernel, tuple(map(self.id, lowered.args)))


class _Keys:
    """A name for a value computed from params, made of its computation: equal in all programs that compute it alike. `outer`: the
    names of params of a sub-graph, as of what they are outside."""

    def __init__(self, outer: Mapping[str, str]) -> None:
        self._keys: dict[Node, str] = {}
        self._outer = outer

    def of(self, node: Node) -> str:
        if node.op is PARAM and node.name in self._outer:
            return self._outer[str(node.name)]
        if node not in self._keys:
            is_data = node.op is CONSTANT
            attrs = hashlib.sha256(node.attrs.data.tobytes()).hexdigest() if is_data else repr(node.attrs)  # type: ignore[union-attr]
            own = [node.op.name, attrs, repr(node.shapes), *([node.name or ""] if node.op is PARAM else [])]
            own += [f"{self.of(v.node)}[{v.index}]" for v in node.inputs]
            self._keys[node] = f"{node.op.name}:{hashlib.sha256('|'.join(own).encode()).hexdigest()[:24]}"
        return self._keys[node]


def _scheduled(
    made: Iterable[tuple[Group | Value, Lowered]], facts: Facts, stages: dict[str, str], foresee: Foresee | None
) -> dict[Group | Value, Lowered]:
    """The kernels as the target orders them, equal ones as one object: all that follows looks once at what the layers of a
    network have in common. The texts of those that the target changes are two stages: "lower" and "schedule"."""
    known: dict[str, K.Kernel] = {}
    changed: list[tuple[K.Kernel, K.Kernel]] = []
    out: dict[Group | Value, Lowered] = {}
    for key, x in made:
        text = print_kernel(x.kernel)
        if text not in known:
            known[text] = ordered = x.kernel if x.kernel.flow else facts.target.schedule(x.kernel)
            changed += [(x.kernel, ordered)] if ordered is not x.kernel else []
            if foresee is not None:
                foresee(ordered, isinstance(key, Group) and key.static)
        out[key] = x._replace(kernel=known[text])
    for before, after in changed:
        if after.buffers != before.buffers:
            raise VerifyError(
                f"{facts.graph.name}: the schedule of target {facts.target.name!r} changed the arguments of a kernel, which "
                f"must stay. Before:\n{print_kernel(before)}\nafter:\n{print_kernel(after)}"
            )
    if changed and (options := facts.compilation.options).wants_text:
        for name, kernels in zip(("lower", "schedule"), zip(*changed)):
            keep_text(stages, name, facts.graph.name, "\n".join(map(print_kernel, kernels)), options)
    return out


def copy_kernel(handle: Value) -> K.Kernel:
    """Copies a row-major value into a buffer of the same size."""
    dtype, size = K.in_kernels(handle.dtype, handle.shape.num_elements)
    source, goal = K.Buffer("b0", dtype, size), K.Buffer("b1", dtype, size, writable=True)
    at = K.Var("c")
    body = K.Loop(at, size, (K.Store(goal, at, K.Load(source, at)),), vector=True)
    return K.Kernel("commit", (source, goal), (), (), (body,), ("assign",))


def _reports(source: Graph, facts: Facts, lowered: dict[Group, Lowered]) -> tuple[NodeReport, ...]:
    """A report per node: the decisions about those of the user's graph `source`, then the kernel of each remaining node."""

    def report(node: Node, how: str, kernel: str = "", why: str = "") -> NodeReport:
        return NodeReport(node.name or f"{node.op.name} {', '.join(map(str, node.shapes))}", node.op.name, how, kernel, why)

    decide = facts.compilation.decide
    decided = ((n, *decide(n)) for n in source.nodes() if n.op.kind is Kind.COMPOSITE)
    out = [report(n, how, why=why) for n, how, why in decided if how == "decomposed"]
    views = {n: None for n in facts.nodes if n.op.kind is Kind.VIEW and n not in facts.places.computed}
    for group, (kernel, _) in lowered.items():
        whole = isinstance(kernel.body[0], K.Native) and kernel.flow is None
        native = "collective" if kernel.collective else "native" if whole else "lowered"
        for i, node in enumerate(n for n in group.nodes if n not in views):
            how = "prepared" if group.static else native if node is group.anchor else "lowered"
            out.append(report(node, how, kernel.name, decide(node)[1] or group.why * (i == 0)))
    kept = {n for group in lowered for n in group.nodes}
    views |= {host.node: None for host, _ in facts.places.hosts.values() if host.node not in kept}  # all parts lie in place
    return (*out, *(report(node, "view") for node in views))
