"""From graph to Program: the straight line through the passes, fusion, lowering, the memory plan and its check."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from rlx.compile.check import check_program
from rlx.compile.fuse import Fusion, Group, fuse
from rlx.compile.inplace import inplace_pairs
from rlx.compile.legalise import decisions
from rlx.compile.lower import CHUNK_ELEMENTS, Lowered, lower_group
from rlx.compile.memory import no_pairs, plan_arena
from rlx.compile.options import CompileOptions
from rlx.compile.pipeline import run_passes
from rlx.ir import kernel as K
from rlx.ir.graph import CONSTANT, HANDLE, INPUT, PARAM, Graph, Node, Value
from rlx.ir.kernel import k
from rlx.ir.op import Kind
from rlx.ir.program import BufferDecl, NodeReport, OutputDecl, Program, Region, Step
from rlx.ir.target import Target

LEAF_REGIONS = {INPUT: Region.INPUT, PARAM: Region.PARAM, HANDLE: Region.HANDLE, CONSTANT: Region.CONSTANT}


def lower(graph: Graph, target: Target, options: CompileOptions) -> Program:
    """The checked program of `graph` for `target`. Raises CompileError, VerifyError or OptionError."""
    stages: dict[str, str] = {}
    legal = run_passes(graph, target, options, stages if options.wants_text else None)
    natives = {n for n in legal.nodes() if n.op.name in target.natives and target.natives[n.op.name](n) is None}
    fusion = fuse(legal, target, natives, alone="fuse" in options.disable)
    lowered = {group: lower_group(group, fusion, natives) for group in fusion.groups}
    program = _Assembler(fusion, lowered, target, options).program(
        graph, stages, _reports(graph, target, options, fusion, lowered)
    )
    check_program(program)
    return program


class _Assembler:
    """Numbers the buffers, turns kernels into steps, and plans the arena."""

    def __init__(self, fusion: Fusion, lowered: dict[Group, Lowered], target: Target, options: CompileOptions) -> None:
        self.fusion, self.lowered, self.target, self.options = fusion, lowered, target, options
        graph = fusion.graph
        self.output_bases = {fusion.places.base(v) for v in graph.outputs}
        self.ids: dict[Value, int] = {}
        self.buffers: list[BufferDecl] = []
        self._keys: dict[Node, str] = {}
        for leaf in graph.leaves():
            self.id(leaf)

    def program(self, source: Graph, stages: dict[str, str], reports: tuple[NodeReport, ...]) -> Program:
        graph, places = self.fusion.graph, self.fusion.places
        groups = self.fusion.groups
        prepare = tuple(self.step(self.lowered[g]) for g in groups if g.static)
        steps = tuple(self.step(self.lowered[g]) for g in groups if not g.static)
        commit = tuple(self.commit(handle, value) for handle, value in graph.assigns)
        outputs = tuple(OutputDecl(name, self.id(places.base(v)), v.shape) for name, v in zip(graph.output_names, graph.outputs))
        plan = plan_arena(
            self.buffers,
            steps + commit,
            {o.buffer for o in outputs},
            self.options.alignment or self.target.alignment,
            no_pairs if "inplace" in self.options.disable else inplace_pairs,
            reuse="reuse" not in self.options.disable,
        )
        ids = lambda leaves: tuple(self.id(v) for v in leaves)  # noqa: E731
        return Program(
            name=source.name,
            target=self.target,
            buffers=tuple(self.buffers),
            prepare=prepare,
            steps=steps,
            commit=commit,
            inputs=ids(graph.inputs),
            params=ids(graph.params),
            handles=ids(graph.handles),
            outputs=outputs,
            plan=plan,
            stages=stages,
            nodes=reports,
        )

    def id(self, base: Value) -> int:
        """The number of the buffer that holds `base`."""
        if base not in self.ids:
            node = base.node
            number = self.ids[base] = len(self.buffers)
            region = LEAF_REGIONS.get(node.op) or self.computed_region(base)
            name = (node.name if node.op in (INPUT, PARAM, HANDLE) else None) or f"%{number}"
            if region is Region.PREPARED:
                name = f"{self.key(node)}[{base.index}]"
            data = node.attrs.data if node.op is CONSTANT else None  # type: ignore[union-attr]
            self.buffers.append(BufferDecl(number, region, base.shape, name, data))
        return self.ids[base]

    def computed_region(self, base: Value) -> Region:
        if base.node in self.fusion.static:
            return Region.PREPARED
        return Region.OUTPUT if base in self.output_bases else Region.ARENA

    def step(self, lowered: Lowered) -> Step:
        return Step(lowered.kernel, tuple(self.id(base) for base in lowered.args))

    def commit(self, handle: Value, value: Value) -> Step:
        """The copy of a next state into its handle."""
        return Step(copy_kernel(handle), (self.id(self.fusion.places.base(value)), self.id(handle)))

    def key(self, node: Node) -> str:
        """A name for a value computed from params that says how: the same in every program that computes it so."""
        if node not in self._keys:
            own = [node.op.name, repr(node.attrs) if node.op is not CONSTANT else str(hash_constant(node)), repr(node.shapes)]
            own += [node.name or ""] if node.op is PARAM else []
            own += [f"{self.key(v.node)}[{v.index}]" for v in node.inputs]
            self._keys[node] = f"{node.op.name}:{hashlib.sha256('|'.join(own).encode()).hexdigest()[:24]}"
        return self._keys[node]


def hash_constant(node: Node) -> str:
    data = node.attrs.data  # type: ignore[union-attr]
    return hashlib.sha256(data.tobytes()).hexdigest()


def copy_kernel(handle: Value) -> K.Kernel:
    """Copies a row-major value into a buffer of the same size."""
    size = handle.shape.num_elements
    source, goal = K.Buffer("b0", handle.dtype, size), K.Buffer("b1", handle.dtype, size, writable=True)
    chunks = max(1, -(-size // CHUNK_ELEMENTS))
    chunk, column = K.Var("chunk"), K.Var("c")
    extent = size if chunks == 1 else CHUNK_ELEMENTS
    at = k.add(k.mul(chunk, CHUNK_ELEMENTS), column)
    guard = k.lt(at, size) if size % CHUNK_ELEMENTS and chunks > 1 else None
    body = K.Loop(column, extent, (K.Store(goal, at, K.Load(source, at, guard), guard),), vector=True)
    return K.Kernel("commit", (source, goal), (), ((chunk, chunks),), (body,), ("assign",))


def _reports(
    graph: Graph, target: Target, options: CompileOptions, fusion: Fusion, lowered: dict[Group, Lowered]
) -> tuple[NodeReport, ...]:
    """What became of each node: the pass's decisions on the user's nodes, then the kernel of each node that is left."""
    out = [
        NodeReport(_label(d.node), d.node.op.name, d.how, "", d.why or "") for d in decisions(graph, target) if d.how != "kept"
    ]
    static = fusion.static
    for group in fusion.groups:
        kernel = lowered[group].kernel.name
        for node in group.nodes:
            how = "prepared" if node in static else "native" if isinstance(lowered[group].kernel.body[0], K.Native) else "lowered"
            out.append(NodeReport(_label(node), node.op.name, how, kernel))
    for node in fusion.graph.nodes():
        if node.op.kind is Kind.VIEW and node not in fusion.places.computed:
            out.append(NodeReport(_label(node), node.op.name, "view", ""))
    return tuple(out)


def _label(node: Node) -> str:
    return node.name or f"{node.op.name} {', '.join(map(str, node.shapes))}"


def kernels(steps: Iterable[Step]) -> Sequence[K.Kernel]:
    """The different kernels of some steps, in order of first use."""
    return list({s.kernel.key: s.kernel for s in steps}.values())
