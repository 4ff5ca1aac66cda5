"""Control flow to steps that run sub-programs.

A sub-graph is compiled as a graph of its own, with fusion, packing and a memory plan. The carried and stacked values of a loop,
and the results of a branch, are handles of the sub-program, wired to the results of the step: a next value that no earlier one
needs is computed where the old one lies, others are copied behind each iteration (its commit). Captured values are handles too,
or params where the value is known before a run: all that follows from these alone is computed when the params are set, by steps
of the outermost program. The arena of the bodies is one buffer of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rlx.compiler.facts import Facts
from rlx.compiler.groups import Group
from rlx.compiler.lowering import Extra, Lowered, Place
from rlx.ir import kernel as K
from rlx.ir.attrs import FLOW, FlowAttrs
from rlx.ir.body import Body
from rlx.ir.dtype import u8
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.handle import BufferHandle
from rlx.ir.ops import unsqueeze, update_rows
from rlx.ir.ops.control import LoopAttrs
from rlx.ir.overlap import may_overlap
from rlx.ir.program import ArenaPlan, BufferDecl, Program, Region, Step, print_program
from rlx.ir.shape import Shape, contiguous_strides


class Preparing(NamedTuple):
    """A step of a sub-program that depends on params alone: it belongs to those that prepare the outer program."""

    kernel: K.Kernel
    args: tuple[Place, ...]


class Flow(NamedTuple):
    """A step that runs sub-programs."""

    lowered: Lowered
    ahead: tuple[Preparing, ...]


Compile = Callable[[Graph, Mapping[str, str]], Program]  # a sub-graph, compiled; the names of its params' values (_Keys)


class Inner(NamedTuple):
    """A sub-graph to compile. `wires`: what each of its leaves is outside; `keys`: the names of values known before runs."""

    graph: Graph
    wires: dict[str, Place]
    keys: dict[str, str]


def lower_control(group: Group, facts: Facts, compile_body: Compile, key: Callable[[Node], str]) -> Flow:
    """The step of a control op. Its sub-programs are added to facts.bodies. `key`: a name for a value known before runs."""
    assert group.anchor is not None
    return _Lowering(group.anchor, facts, compile_body, key).flow()


class _Lowering:
    def __init__(self, node: Node, facts: Facts, compile_body: Compile, key: Callable[[Node], str]) -> None:
        self.node, self.facts, self.compile_body, self.key = node, facts, compile_body, key
        self.args: dict[Place, int] = {}
        self.written: set[Place] = set()
        self.ahead: list[Preparing] = []
        self.arena = 0

    def place(self, value: Value) -> Place:
        return self.facts.places.base(value)

    def arg(self, place: Place, written: bool = False) -> int:
        if written:
            self.written.add(place)
        return self.args.setdefault(place, len(self.args))

    def flow(self) -> Flow:
        node, attrs = self.node, self.node.attrs
        results = [self.arg(v, written=True) for v in node.results]
        if isinstance(attrs, LoopAttrs):
            count, *rest = results
            body = self.body(self.loop_graph(attrs))
            copies = tuple((self.arg(self.place(v)), to) for v, to in zip(node.inputs[: attrs.carried], rest))
            zeroed = tuple(rest[attrs.carried :]) if attrs.tests else ()
            made = FlowAttrs((body[0],), (body[1],), copies, zeroed, rest[0] if attrs.tests else -1, count, attrs.limit)
        else:
            bodies = [self.body(self.branch_graph(b)) for b in vars(attrs).values() if isinstance(b, Body)]
            made = FlowAttrs(*zip(*bodies), test=self.arg(self.place(node.inputs[0])))  # type: ignore[arg-type]
        if self.arena:
            scratch = Extra(Region.ARENA, Shape((self.arena,), u8), f"arena of {node.op.name}")
            made = replace(made, scratch=self.arg(scratch, written=True))
        return self.kernel(made)

    def kernel(self, made: FlowAttrs) -> Flow:
        buffers = []
        for place, number in self.args.items():
            dtype, size = K.in_kernels(place.shape.dtype, _elements(place))
            buffers.append(K.Buffer(f"b{number}", dtype, size, place in self.written))
        views = [K.View(b, (b.size,), contiguous_strides((b.size,))) for b in buffers]
        native = K.Native(
            FLOW, made, tuple(v for v in views if not v.buffer.writable), tuple(v for v in views if v.buffer.writable)
        )
        kernel = K.Kernel(self.node.op.name, tuple(buffers), (), (), (native,), (self.node.op.name,))
        return Flow(Lowered(kernel, tuple(self.args)), tuple(self.ahead))

    # -- sub-graphs

    def captured(self, inner: Inner, leaf: Value, operand: Value) -> Value:
        """A value from outside, as a leaf of the sub-graph."""
        name = str(leaf.name)
        inner.wires[name] = self.place(operand)
        if self.facts.compilation.is_static(operand.node):
            inner.keys[name] = self.key(operand.node) + (f"[{operand.index}]" if operand.index else "")
            return inner.graph.param(name, leaf.dims, leaf.dtype)
        return inner.graph.handle(BufferHandle(name, leaf.dims, leaf.dtype))

    def branch_graph(self, body: Body) -> Inner:
        inner = Inner(Graph(body.name), {}, {})
        found = body.inline([self.captured(inner, x, v) for x, v in zip(body.inputs, self.node.inputs[1:])])
        for i, (made, result) in enumerate(zip(found, self.node.results)):
            inner.wires[f"result.{i}"] = result
            inner.graph.assign(inner.graph.handle(BufferHandle(f"result.{i}", result.dims, result.dtype)), made)
        return inner

    def loop_graph(self, attrs: LoopAttrs) -> Inner:
        """The iteration: carried values and rows of what is stacked are states that get a next value."""
        inner = Inner(Graph(attrs.body.name), {}, {})
        graph, wires, _ = inner
        number, *inputs = attrs.body.inputs
        count, *results = self.node.results
        wires[str(number.name)] = count
        at = graph.handle(BufferHandle(str(number.name), (), number.dtype))
        now = []
        for leaf, result in zip(inputs[: attrs.carried], results):
            wires[str(leaf.name)] = result
            now.append(graph.handle(BufferHandle(str(leaf.name), leaf.dims, leaf.dtype)))
        operands = self.node.inputs[attrs.carried :]
        given = [self.captured(inner, x, v) for x, v in zip(inputs[attrs.carried :], operands)]
        made = attrs.body.inline([at, *now, *given])
        for handle, value in zip(now, made):
            if value is not handle or len(made) == 1:
                graph.assign(handle, value)
        for i, (row, result) in enumerate(zip(made[attrs.carried :], results[attrs.carried :])):
            stack = graph.handle(BufferHandle(f"stacked.{i}", result.dims, result.dtype))
            wires[f"stacked.{i}"] = result
            graph.assign(stack, update_rows(stack, unsqueeze(row, 0), at))
        return inner

    # -- sub-programs

    def body(self, inner: Inner) -> tuple[int, tuple[int, ...]]:
        """Compiles a sub-graph: its number in facts.bodies, and the argument that is each of its outer buffers."""
        program = self.compile_body(inner.graph, inner.keys)
        places = self.places(program, inner.wires)
        for step in program.prepare:
            self.ahead.append(Preparing(step.kernel, tuple(places[a] for a in step.args)))
        body, outer = _normal(program, {b.id for b in program.buffers if b.id in places and places[b.id] in self.written})
        self.arena = max(self.arena, body.plan.size_bytes)
        self.facts.bodies.setdefault(text := print_program(body), body)
        return [*self.facts.bodies].index(text), tuple(self.arg(places[id]) for id in outer)

    def places(self, program: Program, wires: Mapping[str, Place]) -> dict[int, Place]:
        """Each buffer of a sub-program outside it, but for those in its arena."""
        found: dict[int, Place] = {}
        for b in program.buffers:
            if b.region in (Region.PARAM, Region.HANDLE):
                found[b.id] = wires[b.name]
            elif b.region in (Region.PREPARED, Region.CONSTANT):
                found[b.id] = Extra(b.region, b.shape, b.name, b.data, b.layout)
        return found


def _elements(place: Place) -> int:
    return place.shape.num_elements


def _normal(program: Program, written: set[int]) -> tuple[Program, list[int]]:
    """The program with steps and commit only, whose buffers lie in its arena or are params (read) and handles (written), and the
    old numbers of params and handles, in this order."""
    steps = (*program.steps, *program.commit)
    used = dict.fromkeys(sorted({a for s in steps for a in s.args}))
    new = {id: i for i, id in enumerate(used)}
    buffers = []
    for id in used:
        b = program.buffers[id]
        region = b.region if b.region is Region.ARENA else Region.HANDLE if id in written else Region.PARAM
        name = f"%{new[id]}" if region is Region.ARENA else b.name
        buffers.append(BufferDecl(new[id], region, b.shape, name, None, b.layout))
    outer = {r: [id for id in used if buffers[new[id]].region is r] for r in (Region.PARAM, Region.HANDLE)}
    old = program.plan
    offsets = {new[id]: at for id, at in old.offsets.items() if id in new}
    plan = ArenaPlan(offsets, old.size_bytes if offsets else 0, old.alignment, old.unshared_bytes, old.lower_bound_bytes)
    made = Program(
        program.name, program.target, tuple(buffers), (), _renumbered(program.steps, new), _renumbered(program.commit, new), (),
        tuple(new[id] for id in outer[Region.PARAM]), tuple(new[id] for id in outer[Region.HANDLE]), (), plan,
        bodies=program.bodies,
    )  # fmt: skip
    return made, outer[Region.PARAM] + outer[Region.HANDLE]


def _renumbered(steps: Iterable[Step], new: Mapping[int, int]) -> tuple[Step, ...]:
    return tuple(replace(s, args=tuple(new[a] for a in s.args)) for s in steps)


# -- next values in place ------------------------------------------------------------------------------------------


def carried_in_place(
    steps: Sequence[Step], commit: Sequence[Step], buffers: Sequence[BufferDecl], when: Callable[[Sequence[Step]], list[int]]
) -> tuple[list[Step], list[Step]]:
    """The steps of an iteration and its commit, without the copies of next values that can be computed where the old value lies:
    one step makes the value, and the old one has no later reader. `when`: the moment of each step."""
    steps, left, moments = list(steps), list(commit), when(steps)
    for copy in reversed(range(len(commit))):
        (made, carried), others = left[copy].args, left[:copy] + left[copy + 1 :]
        writers = [i for i, s in enumerate(steps) if made in s.writes]
        plain = buffers[made].region is Region.ARENA and buffers[made].nbytes == buffers[carried].nbytes
        if not plain or len(writers) != 1 or any(carried in s.args for s in others) or any(carried in s.writes for s in steps):
            continue
        (at,) = writers
        fits = (_over(s, i == at, moments[i] < moments[at], made, carried) for i, s in enumerate(steps))
        if made in steps[at].reads or not all(fits):
            continue
        steps, left = ([replace(s, args=tuple(carried if a == made else a for a in s.args)) for s in p] for p in (steps, others))
    return steps, left


def _over(step: Step, makes: bool, earlier: bool, made: int, carried: int) -> bool:
    """True if the step does not need the old value any more when the new one is written over it."""
    if carried not in step.args:
        return True
    if not makes:
        return earlier
    pairs = may_overlap(step.kernel)
    (to,) = (i for i, a in enumerate(step.args) if a == made)
    return all((i, to) in pairs for i, a in enumerate(step.args) if a == carried)


__all__ = ["Flow", "Preparing", "carried_in_place", "lower_control"]
