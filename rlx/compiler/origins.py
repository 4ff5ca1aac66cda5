"""Where the nodes of a user's graph went: the steps that compute them, and their bytes in the arena. Computed on request.

Compiles keep no such record, since reports alone need it. The graph is lowered again with a tag as the name and as the source
line of each node. Passes keep names; the nodes they make get the source line of the node they replace; neither changes
anything else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rlx.compiler.assemble import Assembled, assembled
from rlx.compiler.groups import Group
from rlx.compiler.options import CompileOptions
from rlx.errors import CompileError
from rlx.ir.graph import CONSTANT, Graph, Node, Value
from rlx.ir.op import Kind
from rlx.ir.program import Program
from rlx.ir.shape import Shape, contiguous_strides
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


@record
class Place:
    """Where a value is in the arena: with its axes in any order, and perhaps inside of a larger value. `offset`: in bytes.
    `strides`: in elements. `row_major`: its elements are adjacent, in order."""

    offset: int
    strides: tuple[int, ...]
    row_major: bool


@record(eq=False)
class Origins:
    """`graph`: the user's. `nodes`: its nodes; indices mean these. `program`: with complete kernels, also where the compile came
    from the disk cache. `steps`: by phase. `buffers`: the user's node whose value a buffer holds. `decisions`: (how, why) of
    each node that was not folded or merged with another, as in NodeReport. `places`: of each of the user's values that a run
    stores, in the dtype in which it is computed; values that are fused, folded or merged with others, params and states have
    none."""

    graph: Graph
    nodes: Sequence[Node]
    program: Program
    steps: Mapping[str, Sequence[StepOrigin]]
    buffers: Mapping[int, int]
    decisions: Mapping[int, tuple[str, str]]
    places: Mapping[Value, Place]

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

    def tagged(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op is CONSTANT:
            return node.results
        name = f"{TAG}{number[node]}"
        return Node(node.op, inputs, node.attrs, node.shapes, name, name).results

    made = assembled(graph.rebuild(tagged), target, replace(options, dump=None, verbose=False))
    origin = _origin_of(made, number)
    steps = {phase: tuple(_step(key, made, origin) for key in keys) for phase, keys in made.made.items()}
    buffers = {id: at for value, id in made.ids.items() if (at := origin.get(value.node)) is not None}
    decisions: dict[int, tuple[str, str]] = {}
    for report in made.program.nodes:
        if (tag := _tag(report.node)) is not None:
            decisions.setdefault(tag.node, (report.how, report.why))
    return Origins(graph, nodes, made.program, steps, buffers, decisions, _places(graph, nodes, made, options))


class _Tag(NamedTuple):
    node: int
    axes: tuple[int, ...]  # empty: the value is not transposed


def _tag(name: str | None) -> _Tag | None:
    """The node that a name stands for, and how its value is transposed (rlx.compiler.channels_last)."""
    found = re.fullmatch(rf"{TAG}(\d+)(?:\.transpose\(([\d,]+)\))?", name or "")
    return _Tag(int(found[1]), tuple(map(int, re.findall(r"\d+", found[2] or "")))) if found else None


def _origin_of(made: Assembled, number: Mapping[Node, int]) -> dict[Node, int]:
    """Node of the legal graph -> index of the user's. A node without a tag belongs to the latest one among its operands."""
    found: dict[Node, int] = {}
    for node in made.facts.graph.nodes():
        if node in number:
            found[node] = number[node]
        elif (tag := _tag(node.source)) is not None:
            found[node] = tag.node
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


def _places(graph: Graph, nodes: Sequence[Node], made: Assembled, options: CompileOptions) -> dict[Value, Place]:
    program, facts, ids, _ = made
    bound = options.binding
    found: dict[Value, Place] = {}

    def find(own: Value, made: Value, axes: Sequence[int]) -> None:
        """`own`, transposed by `axes`, became `made`."""
        dims = own.shape.bind(bound).static
        if [dims[a] for a in axes] != list(made.shape.static):
            return
        base = facts.places.base(made)
        held, _ = facts.places.hosts.get(base, (base, None))
        if held not in ids or made in facts.places.tiles or base in facts.places.finer:
            return
        start, layout = program.plan.offsets.get(ids[held]), facts.places.locate(made)[1]
        strides = tuple(layout.strides[axes.index(a)] for a in range(len(axes)))
        wide = [(s, n) for s, n in zip(strides, dims) if n != 1]
        in_order = wide == [(s, n) for s, n in zip(contiguous_strides(dims), dims) if n != 1]
        if start is not None and (in_order or (own.node.op.kind is not Kind.VIEW and _are_apart(sorted(wide)))):
            found[own] = Place(start + layout.offset * made.dtype.itemsize, strides, in_order)

    for node in facts.graph.nodes():
        if (tag := None if node.op.kind is Kind.LEAF else _tag(node.name)) is not None:
            for own, now in zip(nodes[tag.node].results, node.results):
                find(own, now, tag.axes or range(own.rank))
    ends = zip((*graph.inputs, *graph.outputs), (*program.inputs, *(o.buffer for o in program.outputs)))
    rows = ((own, program.plan.offsets[id], own.shape.bind(bound).static) for own, id in ends)
    return found | {own: Place(at, contiguous_strides(dims), True) for own, at, dims in rows}


def _are_apart(axes: Sequence[tuple[int, int]]) -> bool:
    """True if all elements of axes with these strides and sizes, the innermost first, are different ones."""
    span = 1
    for stride, n in axes:
        if stride < span:
            return False
        span += (n - 1) * stride
    return True
