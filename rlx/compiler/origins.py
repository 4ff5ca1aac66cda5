"""Where the nodes of a user's graph went: the steps that compute them, and their bytes in the arena. Computed on request.

Compiles keep no such record, since reports alone need it. The graph is lowered again with a tag as the name and as the source
line of each node. Passes keep names; the nodes they make get the source line of the node they replace; neither changes
anything else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rlx.compiler.assemble import Assembled, assembled
from rlx.compiler.groups import Group
from rlx.compiler.options import CompileOptions
from rlx.errors import CompileError
from rlx.ir.graph import CONSTANT, Graph, Node, Value
from rlx.ir.op import Kind
from rlx.ir.program import Program
from rlx.ir.shape import Shape
from rlx.ir.target import Target
from rlx.records import record

TAG = "@"


@record
class Member:
    """A node that a step computes. `form`: its place in the kernel (rlx.compiler.groups.Group). `origin`: the index of the user's
    node that it was made from. `why`: the reason why the backend has no kernel for the whole of it. `inputs`: the members, by
    position, that it reads."""

    op: str
    shapes: tuple[Shape, ...]
    form: str
    origin: int | None
    why: str = ""
    inputs: tuple[int, ...] = ()


@record
class StepOrigin:
    """The nodes of one step. `why`: the reason why the first is not in the kernel of its operand."""

    members: tuple[Member, ...]
    why: str = ""

    @property
    def nodes(self) -> tuple[int, ...]:
        """The user's nodes, by index, in order."""
        return tuple(sorted({m.origin for m in self.members if m.origin is not None}))


@record(eq=False)
class Origins:
    """`graph`: the user's. `nodes`: its nodes; indices mean these. `program`: with complete kernels, also where the compile came
    from the disk cache. `steps`: by phase. `buffers`: the user's node whose value a buffer holds. `decisions`: (how, why) of
    each node that was not folded or merged with another, as in NodeReport. `offsets`: arena byte offset of each of the user's
    values that a run stores, row-major and in the dtype in which it is computed; values that are fused, folded or merged with
    others, params and states have none."""

    graph: Graph
    nodes: Sequence[Node]
    program: Program
    steps: Mapping[str, Sequence[StepOrigin]]
    buffers: Mapping[int, int]
    decisions: Mapping[int, tuple[str, str]]
    offsets: Mapping[Value, int]

    def checked(self, program: Program) -> Origins:
        """CompileError: `program` is not that of this graph."""
        mine, its = ([(s.kernel.name, s.args) for steps in p.phases.values() for s in steps] for p in (self.program, program))
        if mine != its:
            raise CompileError(f"{program.name}: lowering the graph again gave other steps; was the graph's op table changed?")
        return self


def origins(graph: Graph, target: Target, options: CompileOptions) -> Origins:
    """The origins of a graph's program."""
    nodes = graph.nodes()
    number = {node: i for i, node in enumerate(nodes)}

    def tag(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op is CONSTANT:
            return node.results
        name = f"{TAG}{number[node]}"
        return Node(node.op, inputs, node.attrs, node.shapes, name, name).results

    made = assembled(graph.rebuild(tag), target, replace(options, dump=None, verbose=False))
    origin = _origin_of(made, number)
    steps = {phase: tuple(_step(key, made, origin) for key in keys) for phase, keys in made.made.items()}
    buffers = {id: at for value, id in made.ids.items() if (at := origin.get(value.node)) is not None}
    decisions: dict[int, tuple[str, str]] = {}
    for report in made.program.nodes:
        if _is_tag(report.node):
            decisions.setdefault(int(report.node[len(TAG) :]), (report.how, report.why))
    return Origins(graph, nodes, made.program, steps, buffers, decisions, _offsets(graph, nodes, made, options))


def _is_tag(name: str | None) -> bool:
    return name is not None and name.startswith(TAG) and name[len(TAG) :].isdigit()


def _origin_of(made: Assembled, number: Mapping[Node, int]) -> dict[Node, int]:
    """Node of the legal graph -> index of the user's. A node without a tag belongs to the latest one among its operands."""
    found: dict[Node, int] = {}
    for node in made.facts.graph.nodes():
        if node in number:
            found[node] = number[node]
        elif node.source is not None and _is_tag(node.source):
            found[node] = int(node.source[len(TAG) :])
        elif known := [found[v.node] for v in node.inputs if v.node in found]:
            found[node] = max(known)
    return found


def _step(key: Group | Value, made: Assembled, origin: Mapping[Node, int]) -> StepOrigin:
    if isinstance(key, Value):  # the copy of a next state into its handle
        return StepOrigin((Member("assign", key.node.shapes, "full", origin.get(key.node)),))
    decide, base = made.facts.compilation.decide, made.facts.places.base
    groups = (*key.operands.values(), key)
    forms = {n: "absorbed" if n in group.absorbed else form for group in groups for n, form in group.forms.items()}
    place = {node: i for i, node in enumerate(forms)}
    members = []
    for node, form in forms.items():
        reads = [v.node if v.node in place else base(v).node for v in node.inputs]
        inputs = tuple(place[n] for n in dict.fromkeys(reads) if n in place)
        members.append(Member(node.op.name, node.shapes, form, origin.get(node), decide(node)[1], inputs))
    return StepOrigin(tuple(members), key.why)


def _offsets(graph: Graph, nodes: Sequence[Node], made: Assembled, options: CompileOptions) -> dict[Value, int]:
    program, facts, ids, _ = made
    bound = options.binding
    offsets: dict[Value, int] = {}

    def find(own: Value, made: Value) -> None:
        """`own` became `made`."""
        if facts.places.base(made) not in ids or made in facts.places.tiles:
            return
        base, layout = facts.places.locate(made)
        start = program.plan.offsets.get(ids[base])
        if start is not None and layout.strides == row_major(made.shape.static):
            offsets[own] = start + layout.offset * made.dtype.itemsize

    for node in facts.graph.nodes():
        if node.name is not None and node.op.kind is not Kind.LEAF and _is_tag(node.name):
            for own, now in zip(nodes[int(node.name[len(TAG) :])].results, node.results):
                if own.shape.bind(bound).static == now.shape.static:
                    find(own, now)
    offsets |= {own: program.plan.offsets[id] for own, id in zip(graph.inputs, program.inputs)}
    return offsets | {own: program.plan.offsets[o.buffer] for own, o in zip(graph.outputs, program.outputs)}


def row_major(dims: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(dims[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides[: len(dims)]))
