"""Partitions a graph over several ranks: propagates splits from marked leaves, and inserts collectives where ranks need each
other's data.

Input: a graph, and for some leaves the split axis. Output: the graph that every rank runs on its shard of each leaf. As in GSPMD
(Xu et al. 2021), the declaration of an op determines how a split propagates: it carries over to the result, or it is summed over
(then the result is partial, and is reduced where it is first needed whole: in a transformer these are the two all_reduces per
layer of Shoeybi et al. 2019), or it ends. A composite is kept if its decomposition on one rank's operands is, node for node, the
partitioned form of its decomposition on the whole operands; else it is replaced by that partitioned form.

A value that cannot stay split is gathered, and the report says why. Params are never gathered, as this would move them at every
run: instead there is a CompileError that names the node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

import rlx.ir.ops as ops
from rlx.compiler.legalise import expand_through
from rlx.compiler.parts import all_parts, own_part
from rlx.errors import CompileError, GraphError, OptionError, UnboundDimError, UnknownRankError, known, whole
from rlx.ir.carried import carried
from rlx.ir.contexts import Partitioning
from rlx.ir.graph import CONSTANT, HANDLE, PARAM, Active, Graph, Node, Value
from rlx.ir.handle import BufferHandle
from rlx.ir.layout import Layout
from rlx.ir.op import Attrs, Kind, attribute_types
from rlx.ir.placement import REPLICATED, Partial, Placement, ReduceName, Replicated, Split
from rlx.ir.shape import DimLike, contiguous_strides
from rlx.ir.verify import where
from rlx.records import record

KINDS: dict[str, ReduceName] = {"add": "sum", "max": "max", "min": "min"}  # Reduction.op -> Partial.kind


class Move(NamedTuple):
    """An inserted collective. `nbytes`: lower bound of the bytes that each rank sends per run; 0: no data moves."""

    op: str
    value: str
    reader: str
    nbytes: int


@record
class PartitionReport:
    """Result of partitioning. `marks`: the marked leaves and outputs; `inferred`: params split because all their readers are;
    `placements`: placement of each node's results; `gathered`: the reasons why values did not stay split."""

    name: str
    ranks: int
    marks: dict[str, Split]
    inferred: dict[str, Split]
    moves: tuple[Move, ...]
    placements: tuple[tuple[str, tuple[Placement, ...]], ...]
    gathered: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        """Lower bound of the bytes that each rank sends per run."""
        return sum(m.nbytes for m in self.moves)

    def __str__(self) -> str:
        lines = [f"{self.name} over {self.ranks} ranks: each sends {self.nbytes} bytes per run"]
        for splits, how in ((self.marks, ""), (self.inferred, ", inferred from their readers")):
            for split in dict.fromkeys(splits.values()):
                lines.append(f"  {split}{how}: {known(n for n, s in splits.items() if s == split)}")
        for move, times in Counter(self.moves).items():
            count = f" ({times} times)" if times > 1 else ""
            lines.append(f"  {move.op}{count} of {move.value} for {move.reader}: {times * move.nbytes} bytes")
        return "\n".join([*lines, *(f"  {why}" for why in self.gathered)])


@record
class Partitioned:
    """`graph`: the graph that every rank runs; its leaves have the dims of one rank's shard. `splits`: of leaves, by name."""

    graph: Graph
    ranks: int
    splits: dict[str, Split]
    report: PartitionReport

    def shard(self, name: str, array: np.ndarray, rank: int) -> np.ndarray:
        """The shard of `rank` of the leaf `name`, from the whole array; a view if it is one piece."""
        if not 0 <= rank < self.ranks:
            raise UnknownRankError(f"rank {rank}; there are {self.ranks}, from 0")
        split = self.splits.get(name)
        return array if split is None else split.share(array, self.ranks, rank)

    def shards(self, arrays: Mapping[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
        """The same for several leaves."""
        return {name: self.shard(name, array, rank) for name, array in arrays.items()}


def partition(graph: Graph, marks: Mapping[str, int | Split | None], ranks: int) -> Partitioned:
    """Partitions `graph` over `ranks`. The marks give the split axis of leaves: {"w1": 1, "w2": 0}.

    A marked output stays split; other outputs are replicated. Handles without a mark are replicated. A node's name marked None:
    its result is made whole at once. The argument is not changed.

    OptionError: a mark names nothing, or no axis. CompileError: ranks cannot share an axis equally, or a param would have to
    be gathered at every run; it names the node and says why.
    """
    ranks = whole("ranks", ranks, 1)
    if not isinstance(graph, Graph) or not isinstance(marks, Mapping):
        raise OptionError(f"partition takes a Graph and {{name: axis}}, got {type(graph).__name__} and {type(marks).__name__}")
    for node in graph.nodes():
        if not all(s.is_static for s in node.shapes):
            raise UnboundDimError(f"graph {graph.name!r}: {where(node)} has named dims; partition takes a graph of known sizes")
        if node.op.collective is not None:
            raise CompileError(f"graph {graph.name!r}: {where(node)} is a collective already; partition a graph without any")
    names = {n.name for n in graph.nodes()}
    if lost := [n for n, mark in marks.items() if mark is None and n not in names]:
        raise OptionError(f"graph {graph.name!r} has no node called {lost[0]!r}")
    given = {name: _checked(graph, name, mark, ranks) for name, mark in marks.items() if mark is not None}
    joined = {n for n, mark in marks.items() if mark is None}
    inferred: dict[str, Split] = {}
    while True:
        made = _Partition(graph, {**given, **inferred} if ranks > 1 else {}, ranks, joined)
        out = made.run()
        found = {name: s for name, (s, *more) in ((n, [*a]) for n, a in made.asked.items()) if not more and isinstance(s, Split)}
        if not found:
            break
        inferred |= found
    report = PartitionReport(
        graph.name, ranks, given, inferred, tuple(made.moves), tuple(made.placements), tuple(dict.fromkeys(made.gathered))
    )
    leaves = {str(v.name) for v in graph.leaves()}
    return Partitioned(out, ranks, {n: s for n, s in {**given, **inferred}.items() if n in leaves}, report)


def _checked(graph: Graph, name: str, mark: Any, ranks: int) -> Split:
    values = dict(zip(graph.output_names, graph.outputs)) | {str(v.name): v for v in graph.leaves()}
    if name not in values:
        raise OptionError(f"graph {graph.name!r} has no leaf or output {name!r} to split; it has {known(values)}")
    value = values[name]
    if isinstance(mark, bool) or not isinstance(mark, (int, Split)):
        raise OptionError(f"{name!r} is split along an axis (an int, or a Split), got {mark!r}")
    split = mark if isinstance(mark, Split) else Split(mark)
    if not -value.rank <= split.axis < value.rank:
        raise OptionError(f"{name!r} is {value.shape}; it has no axis {split.axis} to split")
    size = value.shape.static[split.axis % value.rank]
    split = Split(split.axis % value.rank, split.parts or (size,))
    if sum(split.parts) != size:
        raise OptionError(f"{name!r} is {value.shape}: parts {split.parts} do not add up to dim {split.axis}")
    for part in split.parts:
        if part % ranks:
            which = f"dim {split.axis}" if len(split.parts) == 1 else f"a part of dim {split.axis}"
            left = f"{ranks} ranks cannot share equally: {part % ranks} would be left over"
            raise CompileError(f"graph {graph.name!r}: {where(value.node)} is {value.shape}; {which} is {part}, which {left}")
    return split


class Plan(NamedTuple):
    """A plan for an op on shards: required placements of operands, resulting placements, and its attributes on one rank."""

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    attrs: Attrs | None


@dataclass
class _Partition:
    """The state of partitioning one graph, and the first argument of an op's `partitioned` function.

    `have`: a value of the whole graph -> its available placements on one rank; `home`: the placement in which it was made."""

    graph: Graph
    marks: Mapping[str, Split]
    ranks: int
    joined: set[str]  # names of nodes whose results are made whole
    have: dict[Value, dict[Placement, Value]] = field(default_factory=dict)
    home: dict[Value, Placement] = field(default_factory=dict)
    asked: dict[str, dict[Placement, None]] = field(default_factory=dict)  # placements that readers of unmarked params ask for
    fixed: set[Value] = field(default_factory=set)  # values that depend only on params
    moves: list[Move] = field(default_factory=list)
    placements: list[tuple[str, tuple[Placement, ...]]] = field(default_factory=list)
    gathered: list[str] = field(default_factory=list)
    memory: dict[Any, Plan | None] = field(default_factory=dict)  # plans of composites seen before
    reader: str = ""  # the current node of the user's graph

    def run(self) -> Graph:
        g, out = self.graph, Graph(self.graph.name)
        for leaf in g.leaves():
            split = self.marks.get(str(leaf.name), REPLICATED)
            dims = split.local(leaf.shape.static, self.ranks) if isinstance(split, Split) else leaf.dims
            if leaf.node.op is HANDLE:
                local = out.handle(BufferHandle(str(leaf.name), dims, leaf.dtype))
            else:
                local = (out.param if leaf.node.op is PARAM else out.input)(str(leaf.name), dims, leaf.dtype)
            self.put(leaf, local, split)
        for node in g.nodes():
            self.reader = where(node)
            if node.results[0] not in self.home:
                self.follow(node)
            self.placements.append((self.reader, tuple(self.home[v] for v in node.results)))
        for handle, value in g.assigns:
            self.reader = f"the next state {handle.name!r}"
            out.assign(self.have[handle][self.home[handle]], self.at(value, self.home[handle]))
        out.in_place = set(g.in_place)
        outputs = []
        for value, name in zip(g.outputs, g.output_names):
            self.reader = f"the output {name!r}"
            is_leaf = any(leaf.name == name for leaf in g.leaves())
            outputs.append(self.at(value, REPLICATED if is_leaf else self.marks.get(name, REPLICATED)))
        out.set_outputs(outputs, g.output_names)
        return out

    # -- values and their copies

    def put(self, value: Value, local: Value, placement: Placement) -> None:
        assert local.shape == value.shape.with_dims(self.dims(value, placement)), f"{value!r} {placement} is {local!r}"
        self.have[value], self.home[value] = {placement: local}, placement
        node = value.node
        if node.op is PARAM or (node.inputs and all(v in self.fixed or v.node.op is CONSTANT for v in node.inputs)):
            self.fixed.add(value)

    def at(self, value: Value, to: Placement) -> Value:
        """One rank's part of the value in the placement `to`, made by a collective if necessary."""
        if value.node.op is PARAM and value.name not in self.marks and not isinstance(to, Partial):
            self.asked.setdefault(str(value.name), {})[to] = None
        have = self.have[value]
        if to not in have:
            if self.cost(value, to) == math.inf:
                raise self.refusal(value, "it needs all of it")
            have[to] = self.moved(value, REPLICATED if REPLICATED in have else self.home[value], to)
        return have[to]

    def split_of(self, value: Value) -> Split | None:
        """The split of the value, if it was made in one."""
        home = self.home[value]
        return home if isinstance(home, Split) else None

    def cost(self, value: Value, to: Placement) -> float:
        """Bytes that each rank sends to get the value in this placement."""
        home, n = self.home[value], self.ranks
        if to in self.have[value] or REPLICATED in self.have[value]:
            return 0
        if value in self.fixed and isinstance(home, Split):
            return math.inf
        share = value.shape.size_bytes * (n - 1) // n
        if isinstance(home, Split):
            return share // n if self.direct(home, to) else share
        return share if self.direct(home, to) else 2 * share

    def direct(self, home: Placement, to: Placement) -> bool:
        """True if one collective makes it without gathering the whole value on every rank."""
        one = isinstance(to, Split) and len(to.parts) == 1
        return one and (isinstance(home, Partial) or (isinstance(home, Split) and len(home.parts) == 1 and home.axis != to.axis))  # type: ignore[union-attr]

    def moved(self, value: Value, home: Placement, to: Placement) -> Value:
        local, n = self.have[value][home], self.ranks
        if isinstance(home, Replicated) and isinstance(to, Split):
            return self.note("rank_slice", value, 0, own_part(local, to, n))
        nbytes = int(self.cost(value, to))
        if isinstance(to, Split) and self.direct(home, to):
            if isinstance(home, Partial):
                made = ops.reduce_scatter(local, axis=to.axis, kind=home.kind, ranks=n)
                return self.note("reduce_scatter", value, nbytes, made)
            assert isinstance(home, Split)
            return self.note("all_to_all", value, nbytes, ops.all_to_all(local, n, to.axis, home.axis))
        if isinstance(to, Split):
            return own_part(self.at(value, REPLICATED), to, n)
        if isinstance(home, Partial):
            return self.note("all_reduce", value, nbytes, ops.all_reduce(local, kind=home.kind, ranks=n))
        assert isinstance(home, Split)
        return self.note("all_gather", value, nbytes, all_parts(local, home, n))

    def note(self, op: str, value: Value, nbytes: int, made: Value) -> Value:
        self.moves.append(Move(op, f"{value.name or value.node.op.name} {value.shape}", self.reader, nbytes))
        return made

    def refusal(self, value: Value, why: str) -> CompileError:
        shown = f"{value.name!r} ({value.shape})" if value.name else f"{value.shape}, made of params,"
        return CompileError(
            f"graph {self.graph.name!r}: {self.reader}: {why}, and {shown} is placed as {self.home[value]}; params "
            "are not gathered at every run. Split it along another axis, or replicate it"
        )

    def first(self, size: int) -> Value:
        """i64 (): the start of this rank's part of an axis of this size."""
        return ops.rank_slice(ops.iota(dims=(self.ranks,)), ranks=self.ranks).reshape(()) * (size // self.ranks)

    # -- nodes

    def follow(self, node: Node) -> None:
        """Build the node's computation on one rank."""
        homes = [self.home[v] for v in node.inputs]
        made: Any = None
        if node.op.kind is Kind.LEAF or all(isinstance(h, Replicated) for h in homes):
            made = self.apply(node, Plan(tuple(homes), (REPLICATED,) * len(node.shapes), node.attrs))
        elif node.op.partitioned is not None:
            offered: Partitioning = self
            made = node.op.partitioned(offered, node.attrs, *node.inputs)
        if isinstance(made, str):
            made = self.apply(node, self.whole(node, made))
        elif made is None:
            made = self.composite(node) if node.op.kind is Kind.COMPOSITE else self.apply(node, self.core(node))
        for value, (local, placement) in zip(node.results, made, strict=True):
            self.put(value, local, placement)
            if node.name in self.joined:
                self.put(value, self.at(value, REPLICATED), REPLICATED)

    def apply(self, node: Node, plan: Plan) -> list[tuple[Value, Placement]]:
        if node.op.kind is Kind.LEAF:
            return [(node.results[0], REPLICATED)]
        inputs = tuple(self.at(v, p) for v, p in zip(node.inputs, plan.operands))
        shapes = node.op.result_shapes(plan.attrs, tuple(v.shape for v in inputs))
        return list(zip(Node(node.op, inputs, plan.attrs, shapes, node.name, node.source).results, plan.results))

    def whole(self, node: Node, why: str) -> Plan:
        """Every operand gathered."""
        for v in node.inputs:
            if self.cost(v, REPLICATED) == math.inf:
                raise self.refusal(v, why)
        if any(self.split_of(v) for v in node.inputs):
            self.gathered.append(f"gathered for {self.reader}: {why}")
        return Plan((REPLICATED,) * len(node.inputs), (REPLICATED,) * len(node.shapes), node.attrs)

    def core(self, node: Node) -> Plan:
        """The plan that keeps work split and moves the fewest bytes; else the plan with all operands replicated."""
        if node.op.kind is Kind.VIEW and isinstance(self.home[node.inputs[0]], Partial):
            return Plan((self.home[node.inputs[0]],), (self.home[node.inputs[0]],), node.attrs)
        plans, reasons = [], []
        for i, v in enumerate(node.inputs):
            if (split := self.split_of(v)) is not None:
                plan = self.plan(node, i, split)
                (reasons if isinstance(plan, str) else plans).append(plan)
        if not plans:
            return self.whole(node, "; ".join(dict.fromkeys(reasons)) or "it needs the combined value")
        best = min(plans, key=lambda p: self.total(node, p))
        if self.total(node, best) == math.inf:
            self.whole(node, "operands are split along axes that do not correspond")
        return best

    def total(self, node: Node, plan: Plan) -> float:
        reduced = sum(2 * s.size_bytes for s, p in zip(node.shapes, plan.results) if isinstance(p, Partial))
        return reduced + sum(self.cost(v, p) for v, p in zip(node.inputs, plan.operands))

    def plan(self, node: Node, i: int, split: Split) -> Plan | str:
        """The plan to run the node on parts of operand i; a str: the reason why it is impossible."""
        op, x = node.op, node.inputs[i]
        operands: list[Placement] = [split if v is x else REPLICATED for v in node.inputs]
        results: tuple[Placement | None, ...] = ()
        if op.contract is not None:
            facts = op.contract(node.attrs, *(v.shape for v in node.inputs))
            sums = (facts.a_sum, facts.b_sum)
            if split.axis in sums[i] and len(sums[0]) != len(sums[1]):
                return f"the other operand has the dims that it sums with axis {split.axis} of {x.shape} as one"
            if split.axis in sums[i]:
                operands[i], operands[1 - i] = split, Split(sums[1 - i][sums[i].index(split.axis)], split.parts)
                results = (Partial("sum"),)
        elif op.reduce is not None and split.axis in (facts := op.reduce(node.attrs, x.shape)).axes:
            if facts.op not in KINDS:
                return f"ranks cannot combine values by {facts.op}"
            results = (Partial(KINDS[facts.op]),)
        if not results:
            results = tuple(_carried(node, i, split, r, self.ranks) for r in node.results)
            if not all(results):
                return _mixing(node, i, split, self.ranks)
            operands = [split if j == i else _other_operand(node, j, results[0]) for j in range(len(node.inputs))]  # type: ignore[arg-type]
        return self.sound(node, operands, results)  # type: ignore[arg-type]

    def sound(self, node: Node, operands: Sequence[Placement], results: Sequence[Placement]) -> Plan | str:
        """The plan, if the op's shape rule agrees with it."""
        here = [self.dims(v, p) for v, p in zip(node.inputs, operands)]
        want = tuple(s.with_dims(self.dims(r, p)) for s, r, p in zip(node.shapes, node.results, results))
        attrs = _with_dims(node.attrs, want[0].dims)
        try:
            found = node.op.result_shapes(attrs, tuple(v.shape.with_dims(d) for v, d in zip(node.inputs, here)))
        except GraphError as e:
            return f"not over parts ({e})"
        return Plan(tuple(operands), tuple(results), attrs) if found == want else "its attributes fit the whole operand only"

    def dims(self, value: Value, placement: Placement) -> tuple[int, ...]:
        dims = value.shape.static
        return placement.local(dims, self.ranks) if isinstance(placement, Split) else dims

    # -- composites

    def composite(self, node: Node) -> list[tuple[Value, Placement]]:
        """A composite through its decomposition; kept as a composite on one rank's operands if that is the same."""
        key = (node.op, node.attrs, *((v.shape, self.home[v]) for v in node.inputs))
        if (plan := self.memory.get(key)) is not None:
            return self.apply(node, plan)
        if node.op.decompose is None:
            return self.apply(node, self.whole(node, "it has no decomposition"))
        made = [(self.have[v][self.home[v]], self.home[v]) for v in expand_through(node, self.follow)]
        self.memory[key] = plan = None if key in self.memory else self.kept(node, made)
        return made if plan is None else self.apply(node, plan)

    def kept(self, node: Node, made: Sequence[tuple[Value, Placement]]) -> Plan | None:
        """The plan that keeps the composite, on one rank's operands, if that is the same computation as `made`; else None."""
        forms = {local: (v, p) for v in node.inputs for p, local in self.have[v].items()}
        used: dict[Value, set[Placement]] = {v: set() for v in node.inputs}
        for local in _reached([local for local, _ in made], forms):
            used[forms[local][0]].add(forms[local][1])
        homes = {v: REPLICATED if isinstance(self.home[v], Partial) else self.home[v] for v in node.inputs}
        if any(len(p) > 1 for p in used.values()):
            return None
        plan = self.sound(node, [next(iter(used[v]), homes[v]) for v in node.inputs], [p for _, p in made])
        if isinstance(plan, str) or any(p not in self.have[v] for v, p in zip(node.inputs, plan.operands)):
            return None
        assert node.op.decompose is not None
        again = node.op.decompose(plan.attrs, *(self.have[v][p] for v, p in zip(node.inputs, plan.operands)))
        again = again if isinstance(again, tuple) else (again,)
        seen: set[tuple[Value, Value]] = set()
        return plan if all(_same(a, b, seen) for (a, _), b in zip(made, again)) else None


# -- where splits lead


def _carried(node: Node, operand: int, split: Split, result: Value, ranks: int) -> Split | None:
    """The split of the result for a split operand of a core op. None: the op mixes the parts, or divides them differently."""
    x = node.inputs[operand]
    if node.op.kind is not Kind.VIEW or node.op.rows is not None:
        found = carried(node, operand, Active(split.axis, 1, 1, 1), result)
        return None if found is None else Split(found.axis, split.parts)
    plain, size = contiguous_strides(x.shape.static), x.shape.static[split.axis]
    layout = node.op.strided and node.op.strided(node.attrs, x.shape.static, result.shape.static, Layout(plain))
    if layout is None or not x.shape.num_elements or not result.shape.num_elements:
        return None
    for axis, (step, d) in enumerate(zip(layout.strides, result.shape.static)):
        if (step, d) == (plain[split.axis], size) and d > 1:
            return Split(axis, split.parts)
    if len(set(split.parts)) > 1:
        return None
    active = Active(split.axis, len(split.parts), ranks, split.parts[0] // ranks)
    if (found := carried(node, operand, active, result)) is None:
        return None
    return Split(found.axis, (result.shape.static[found.axis] // found.outer,) * found.outer)


def _other_operand(node: Node, operand: int, result: Split) -> Placement:
    """The required placement of another operand for this split of the (first) result."""
    x = node.inputs[operand]
    for axis, d in enumerate(x.shape.static):
        if d == sum(result.parts) and d != 1:
            found = carried(node, operand, Active(axis, 1, 1, 1), node.results[0])
            if found is not None and found.axis == result.axis:
                return Split(axis, result.parts)
    return REPLICATED


def _mixing(node: Node, operand: int, split: Split, ranks: int) -> str:
    x, result = node.inputs[operand], node.results[0]
    if node.op.kind is Kind.VIEW:
        for d in result.shape.static:
            if d % ranks and 1 < d < x.shape.static[split.axis] and not x.shape.static[split.axis] % d:
                return f"{ranks} ranks cannot share the dim of {d} in its result equally ({d % ranks} left over)"
        return f"the ranks' parts of axis {split.axis} of {x.shape} are not equal parts of a dim of {result.shape}"
    return f"it combines elements along axis {split.axis} of operand {operand} ({x.shape})"


def _with_dims(attrs: Attrs | None, dims: tuple[DimLike, ...]) -> Attrs | None:
    """The attributes with dims replaced by those of the result."""
    return attrs and replace(attrs, **dict.fromkeys(_dim_attributes(attrs), dims))  # type: ignore[type-var]


def _dim_attributes(attrs: Attrs | None) -> list[str]:
    return [n for n, hint in attribute_types(type(attrs)).items() if hint == tuple[DimLike, ...]] if attrs else []


def _same(a: Value, b: Value, seen: set[tuple[Value, Value]]) -> bool:
    """True if two values are computed by equal nodes from identical values."""
    if a is b or (a, b) in seen:
        return True
    m, n = a.node, b.node
    if (m.op, a.index, m.shapes, len(m.inputs)) != (n.op, b.index, n.shapes, len(n.inputs)):
        return False
    own = _dim_attributes(m.attrs)
    if m.attrs != n.attrs and (not own or _with_dims(m.attrs, ()) != _with_dims(n.attrs, ())):
        return False
    seen.add((a, b))
    return all(_same(x, y, seen) for x, y in zip(m.inputs, n.inputs))


def _reached(roots: Iterable[Value], ends: Mapping[Value, Any]) -> set[Value]:
    """The values of `ends` on which the roots depend."""
    todo, done, out = list(roots), set(), set()
    while todo:
        if (v := todo.pop()) in ends:
            out.add(v)
        elif v not in done:
            done.add(v)
            todo += v.node.inputs
    return out
