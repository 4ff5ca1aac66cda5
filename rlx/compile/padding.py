"""Rows that hold no data: which values have them, and what must be done so that they never count.

One named dim may be bound to its upper bound and stay *active* (CompileOptions.extent): a run says how many of its rows, the
extent, hold data. Row by row ops need nothing. An op that mixes rows of an active axis gets the rows past the extent replaced
by what leaves its result alone, or what it needs by its own declaration (OpDef.padded); else it is a CompileError.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.compile.legalise import expand
from rlx.ir.graph import Active, Graph, Node, Value
from rlx.ir.op import Kind
from rlx.ir.ops import valid_rows
from rlx.ir.program import Layout
from rlx.ir.shape import contiguous_strides

Actives = tuple[Active, ...]  # of one value: factors of its axes, outermost first


def active_axes(graph: Graph) -> dict[Value, Active]:
    """The outermost active axis of each value of a compiled graph that has one: nothing reads its rows past the extent
    (graph.extent.leaf), so that no kernel need compute them. A value absent from this is needed whole."""
    found = Rows(graph)
    values = (v for node in graph.nodes() if node.op is not valid_rows.op for v in node.results)  # type: ignore[attr-defined]
    return {v: found.of(v)[0] for v in values if found.of(v)}


class Rows:
    """Active axes of the values of a graph, followed from its inputs. `actives[value]` is () or missing where there are none."""

    def __init__(self, graph: Graph) -> None:
        self.actives: dict[Value, Actives] = {} if graph.extent is None else dict(graph.extent.inputs)
        if graph.extent is not None:
            for node in graph.nodes():
                self.follow(node)

    def of(self, value: Value) -> Actives:
        return self.actives.get(value, ())

    def follow(self, node: Node) -> None:
        """Note the active axes of the node's results."""
        if not any(map(self.of, node.inputs)):
            return
        if node.op.kind is Kind.COMPOSITE:
            self.through(node)
        else:
            self.actives.update((v, self.results(node, v)) for v in node.results)

    def through(self, node: Node) -> None:
        """The same of a composite, by what it is made of."""

        def new(inner: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
            results = Node(inner.op, inputs, inner.attrs, inner.shapes, inner.name, inner.source).results
            self.follow(results[0].node)
            return results

        made = expand(node, new)
        self.actives.update((v, self.of(w)) for v, w in zip(node.results, made))

    def results(self, node: Node, result: Value) -> Actives:
        """Active axes of one result of a core op."""
        found = {a for i, v in enumerate(node.inputs) for active in self.of(v) if (a := carried(node, i, active, result))}
        return tuple(sorted(found, key=lambda a: (a.axis, -a.inner)))


def carried(node: Node, operand: int, active: Active, result: Value) -> Active | None:
    """Where an active axis of an operand of a core op lies in the result. None: it ends there, or its rows are mixed."""
    op, x = node.op, node.inputs[operand]
    if op.kind is Kind.POINTWISE:
        return active._replace(axis=active.axis + result.rank - x.rank)
    if op.kind is Kind.VIEW:
        return _viewed(node, active, result)
    axis: int | None = None
    if op.reduce is not None:
        facts = op.reduce(node.attrs, x.shape)
        axis = active.axis - (0 if facts.keepdims else sum(a < active.axis for a in facts.axes))
        axis = None if active.axis in facts.axes else axis
    elif op.contract is not None:
        facts = op.contract(node.attrs, *(v.shape for v in node.inputs))
        batch, rows = len(facts.a_batch), len(facts.a_rows)
        own = [facts.a_batch, facts.b_batch][operand]
        outer = (*own, *((-1,) * rows if operand else facts.a_rows), *(facts.b_columns if operand else ()))
        assert len(own) == batch
        axis = outer.index(active.axis) if active.axis in outer else None
    elif op.rows is not None:
        axis = op.rows(node.attrs, operand, active.axis, *(v.shape for v in node.inputs))
    return None if axis is None else active._replace(axis=axis)


def _viewed(node: Node, active: Active, result: Value) -> Active | None:
    """The same under a view, by where its strides lead: the rows of an operand that lies row-major are `stride` apart."""
    x, out = node.inputs[0].shape.static, result.shape.static
    plain = contiguous_strides(x)
    layout = node.op.strided and node.op.strided(node.attrs, x, out, Layout(plain))
    if layout is None or 0 in x or 0 in out:
        return None
    start = layout.offset // plain[active.axis] % x[active.axis]
    if start % (active.upper * active.inner):
        return None
    stride = plain[active.axis] * active.inner
    for axis, (step, size) in enumerate(zip(layout.strides, out)):
        if size > 1 and step and stride % step == 0 and size % (active.upper * (stride // step)) == 0:
            inner = stride // step
            return Active(axis, size // (active.upper * inner), active.upper, inner)
    return None
