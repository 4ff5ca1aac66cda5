"""Fusion: which nodes share a kernel. Legalised graph in, groups in execution order out; no kernel is written here.

A group iterates over one space, `dims`. Nodes join the group of a producer when every element they need is the one just
computed (pointwise), or a reduction over the last axis of it (row programs: softmax, norms). The producer may be a
contraction: then the pointwise nodes become its epilogue and the reductions run on each finished row. Nodes read at other
coordinates (under a view, a gather, a reduction over another axis) are absorbed when they have no other reader, and are
recomputed where they are read; otherwise they are written to memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rlx.compile.place import Places, static_nodes
from rlx.ir.graph import Graph, Node, Value, apply
from rlx.ir.op import OPS, Kind
from rlx.ir.ops import pack_panels
from rlx.ir.target import Target

MAX_ROW_COLUMNS = 8192  # longer rows of a contraction do not stay in cache between its panels
MIN_ROWS_PER_THREAD = 8  # fewer, and giving each thread whole rows leaves threads idle


@dataclass(eq=False)
class Group:
    """Nodes of one kernel. `forms`: how each node's result lies in the space `dims`: "full", "row" (last dim 1),
    "dropped" (last dim gone). `absorbed` nodes are recomputed at whatever coordinates they are read."""

    dims: tuple[int, ...]
    static: bool
    anchor: Node | None = None  # the contraction, native op or whole-op kernel it grew from
    forms: dict[Node, str] = field(default_factory=dict)  # in topological order
    absorbed: set[Node] = field(default_factory=set)
    reads: set[Group] = field(default_factory=set)
    stores: list[Value] = field(default_factory=list)  # results written to memory

    @property
    def nodes(self) -> list[Node]:
        return list(self.forms)

    @property
    def closed(self) -> bool:
        """Takes no further nodes: natives and whole-op kernels."""
        return self.anchor is not None and self.anchor.op.kind is not Kind.CONTRACT

    def row_reductions(self) -> list[Node]:
        return [n for n in self.forms if n.op.kind is Kind.REDUCE and self.forms[n] != "full"]


@dataclass
class Fusion:
    """Groups in execution order, where values lie, and the packed right operand of each contraction that has one."""

    graph: Graph
    places: Places
    groups: list[Group]
    static: set[Node]
    packed: dict[Node, Value]


def fuse(graph: Graph, target: Target, natives: set[Node], alone: bool = False) -> Fusion:
    """Group the nodes of a legalised graph. `natives`: nodes the target claimed. `alone`: one node per group."""
    graph, copies = _own_outputs(graph)
    packed = _packed_operands(graph, target, natives)
    places = Places(graph, copies)
    fuser = _Fuser(graph, target, natives, places, packed, copies)
    fuser.alone = alone
    groups = fuser.run()
    return Fusion(graph, places, groups, fuser.static, packed)


def _own_outputs(graph: Graph) -> tuple[Graph, set[Node]]:
    """Give every output and next state memory of its own, row-major: what would be a leaf, known before the run, or a
    window on something else becomes a copy, made by a computed reshape to the same dims."""
    places, static = Places(graph, ()), static_nodes(graph.nodes())
    copies: dict[Value, Value] = {}

    def own(value: Value) -> Value:
        base = places.base(value)
        if base.node.op.kind is not Kind.LEAF and base.node not in static and places.is_row_major(value):
            return value
        if value not in copies:
            copy = apply(OPS["reshape"], (value,), {"dims": value.shape.static})
            assert isinstance(copy, Value)
            copies[value] = copy
        return copies[value]

    out = graph.rebuild(lambda node, inputs: node.results)
    out.outputs = [own(v) for v in graph.outputs]
    out.assigns = [(h, own(v)) for h, v in graph.assigns]
    return out, {v.node for v in copies.values()}


def _packed_operands(graph: Graph, target: Target, natives: set[Node]) -> dict[Node, Value]:
    """The packed form of each contraction's right operand that is known before a run."""
    static = static_nodes(graph.nodes())
    made: dict[tuple[Value, int], Value] = {}
    out: dict[Node, Value] = {}
    for node in graph.nodes():
        if node.op.kind is not Kind.CONTRACT or node in natives or node in static or node.inputs[1].node not in static:
            continue
        right = node.inputs[1]
        facts = contraction(node)
        width = target.panel(right.dtype.name)
        if not width or facts.b_batch or facts.b_sum != (0,) or facts.b_columns != (1,):
            continue
        if (right, width) not in made:
            made[right, width] = pack_panels(right, panel=width)
        out[node] = made[right, width]
    return out


def contraction(node: Node):
    """The Contraction facts of a contraction node."""
    assert node.op.contract is not None
    return node.op.contract(node.attrs, *(v.shape for v in node.inputs))


class _Fuser:
    """Walks the nodes once, operands before users, and keeps the groups acyclic."""

    def __init__(self, graph: Graph, target: Target, natives: set[Node], places: Places, packed: dict[Node, Value], copies: set[Node]) -> None:
        self.graph, self.target, self.natives, self.places, self.packed = graph, target, natives, places, packed
        self.nodes = _with_packs(graph, packed)
        self.order = {n: i for i, n in enumerate(self.nodes)}
        self.static = static_nodes(self.nodes) - copies
        self.group_of: dict[Node, Group] = {}
        self.groups: list[Group] = []
        self.alone = False
        self.readers: dict[Value, set[Node]] = {}  # result -> the nodes that read it, through views too
        for node in self.nodes:
            for value in self.operands(node):
                self.readers.setdefault(value, set()).add(node)
                if self.is_alias(value.node):
                    self.readers.setdefault(places.base(value), set()).add(node)
        self.roots = {places.base(v) for v in graph.roots()}

    def run(self) -> list[Group]:
        for node in self.nodes:
            if node.op.kind is not Kind.LEAF and not self.is_alias(node):
                self.place(node)
        ordered = self.ordered()
        for group in ordered:
            group.stores = [v for n in group.nodes if n not in group.absorbed for v in n.results if self.is_stored(v, group)]
        return [g for g in ordered if g.stores]

    def is_alias(self, node: Node) -> bool:
        return node.op.kind is Kind.VIEW and node not in self.places.computed

    def operands(self, node: Node) -> tuple[Value, ...]:
        """What the node's kernel reads: a packed right operand in place of the plain one."""
        if self.is_alias(node):
            return ()
        return (node.inputs[0], self.packed[node]) if node in self.packed else node.inputs

    # -- placing one node

    def place(self, node: Node) -> None:
        kind = node.op.kind
        if node in self.natives or kind in (Kind.KERNEL, Kind.CONTRACT):
            self.start(node, node.shapes[0].static, anchor=node)
            return
        if kind is Kind.REDUCE and self.join_as_reduction(node):
            return
        if kind is Kind.POINTWISE and not self.alone:
            for group in self.candidates(node):
                form = self.fitting_form(group, node)
                if form and self.acyclic(group, node):
                    self.add(group, node, form)
                    self.merge_siblings(group, node)
                    return
        group = self.start(node, node.shapes[0].static)
        if not self.alone:
            self.absorb(group, node)

    def start(self, node: Node, dims: tuple[int, ...], anchor: Node | None = None, form: str = "full") -> Group:
        group = Group(dims, node in self.static, anchor)
        self.groups.append(group)
        self.add(group, node, form)
        return group

    def add(self, group: Group, node: Node, form: str) -> None:
        group.forms[node] = form
        self.group_of[node] = group
        for value in self.operands(node):
            producer = self.group_of.get(self.places.base(value).node)
            if producer is not None and producer is not group:
                group.reads.add(producer)

    def candidates(self, node: Node) -> list[Group]:
        """Groups of operands read at the very element computed, latest first."""
        found: dict[Group, None] = {}
        for value in node.inputs:
            group = self.group_of.get(value.node)
            if group is not None and not group.closed and group.static == (node in self.static):
                found[group] = None
        return sorted(found, key=self.groups.index, reverse=True)

    def fitting_form(self, group: Group, node: Node) -> str | None:
        """The form under which a pointwise node fits the group's space, or None."""
        dims = node.shapes[0].static
        own = {group.forms[v.node] for v in node.inputs if v.node in group.forms}
        if "dropped" in own:
            inside = own == {"dropped"} and dims == group.dims[:-1]
            return "dropped" if inside else None
        if dims == group.dims and (own != {"row"} or group.dims[-1:] == (1,) or self.rows_allowed(group)):
            return "full"
        if own == {"row"} and dims == (*group.dims[:-1], 1):
            return "row"
        return None

    def join_as_reduction(self, node: Node) -> bool:
        """A reduction over the last axis joins, or starts, a row program."""
        assert node.op.reduce is not None
        value = node.inputs[0]
        facts = node.op.reduce(node.attrs, value.shape)
        if facts.axes != (value.rank - 1,):
            return False
        form = "row" if facts.keepdims else "dropped"
        group = self.group_of.get(value.node)
        if (
            group is not None
            and not self.alone
            and not group.closed
            and group.static == (node in self.static)
            and group.forms.get(value.node) == "full"
            and self.rows_allowed(group)
        ):
            self.add(group, node, form)
        else:
            self.start(node, value.shape.static, form=form)
        return True

    def rows_allowed(self, group: Group) -> bool:
        """Whether whole rows may be given to one thread: always without a contraction; else if enough rows remain."""
        if group.anchor is None:
            return True
        rows = 1
        for d in group.dims[:-1]:
            rows *= d
        enough = self.target.threads == 1 or rows >= MIN_ROWS_PER_THREAD * self.target.threads
        return enough and len(contraction(group.anchor).b_columns) == 1 and group.dims[-1] <= MAX_ROW_COLUMNS

    def acyclic(self, group: Group, node: Node) -> bool:
        """Whether no operand from outside the group depends on the group."""
        for value in self.operands(node):
            producer = self.group_of.get(self.places.base(value).node)
            if producer is group and value.node not in group.forms:
                return False  # read under a view: other elements than the one at hand
            if producer is not None and producer is not group and self.reaches(producer, group):
                return False
        return True

    def reaches(self, start: Group, goal: Group) -> bool:
        """Whether `start` depends on `goal`."""
        seen, todo = {start}, [start]
        while todo:
            group = todo.pop()
            if goal in group.reads:
                return True
            todo += group.reads - seen
            seen |= group.reads
        return False

    # -- merging and absorbing

    def merge_siblings(self, group: Group, node: Node) -> None:
        """Operands computed over the same space by loop groups of their own join too."""
        for value in node.inputs:
            other = self.group_of.get(value.node)
            if other is None or other is group or other.anchor is not None or other.dims != group.dims or other.static != group.static:
                continue
            others = [g for g in other.reads if g is not group and self.reaches(g, group)]
            between = [g for g in group.reads if g is not other and self.reaches(g, other)]
            if others or between or group in other.reads or (group.anchor is not None and other.row_reductions()):
                continue
            self.take_over(group, other, absorbed=other.absorbed)
            group.forms = dict(sorted(group.forms.items(), key=lambda item: self.order[item[0]]))

    def absorb(self, group: Group, node: Node) -> None:
        """Recompute, inside the reader, loop groups that only this node reads at coordinates of its own. A pointwise
        reader is not one: it would read the same element under a broadcast, or two different ones, and pay for each."""
        for value in node.inputs if node.op.kind is not Kind.POINTWISE else ():
            base = self.places.base(value)
            other = self.group_of.get(base.node)
            if other is None or other is group or other.anchor is not None or other.static != group.static or other.row_reductions():
                continue
            only_reader = all(
                reader is node or reader in other.forms for n in other.nodes for v in n.results for reader in self.readers.get(v, ())
            )
            rooted = any(v in self.roots for n in other.nodes for v in n.results)
            bigger = node.shapes[0].num_elements > 2 * base.shape.num_elements
            if only_reader and not rooted and not bigger:
                self.take_over(group, other, absorbed=set(other.nodes))
                group.forms = {**{n: "full" for n in other.nodes}, **group.forms}

    def take_over(self, group: Group, other: Group, absorbed: set[Node]) -> None:
        for n, form in other.forms.items():
            group.forms[n] = form
            self.group_of[n] = group
        group.absorbed |= absorbed
        group.reads |= other.reads
        for g in self.groups:
            if other in g.reads:
                g.reads.discard(other)
                g.reads.add(group)
        group.reads.discard(group)
        self.groups.remove(other)

    # -- results

    def is_stored(self, value: Value, group: Group) -> bool:
        """Whether anything outside the group reads the value."""
        return value in self.roots or any(self.group_of.get(reader) is not group for reader in self.readers.get(value, ()))

    def ordered(self) -> list[Group]:
        """Groups so that each comes after those it reads; ties in graph order."""
        done: dict[Group, None] = {}

        def visit(group: Group) -> None:
            stack = [(group, iter(sorted(group.reads, key=self.groups.index)))]
            while stack:
                top, todo = stack[-1]
                nxt = next((g for g in todo if g not in done), None)
                if nxt is None:
                    done[stack.pop()[0]] = None
                else:
                    stack.append((nxt, iter(sorted(nxt.reads, key=self.groups.index))))

        for group in self.groups:
            if group not in done:
                visit(group)
        return list(done)


def _with_packs(graph: Graph, packed: dict[Node, Value]) -> list[Node]:
    """The graph's nodes with each packing node ahead of the contraction that reads it."""
    out: dict[Node, None] = {}
    for node in graph.nodes():
        if node in packed:
            out[packed[node].node] = None
        out[node] = None
    return list(out)


def stored_values(groups: Iterable[Group]) -> set[Value]:
    return {v for g in groups for v in g.stores}
