"""Sub-graphs: the bodies of control flow, as attributes of ops (rlx.ir.ops.control).

A body is a function of its inputs alone. `traced` makes one from a Python function on values: values from outside that it uses
become further inputs, and the values themselves further operands of the op.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property

import numpy as np

from rlx.errors import GraphError
from rlx.ir.attrs import Part
from rlx.ir.building import Building, between, bound, keep, postorder
from rlx.ir.node import CONSTANT, INPUT, TRACING, ConstantAttrs, LeafAttrs, Node, Value, constant
from rlx.ir.op import Kind
from rlx.ir.shape import Shape
from rlx.records import record


@record(eq=False, repr=False)
class Body(Part):
    """A sub-graph. `inputs`: leaves of op `input`. Bodies are equal if they compute the same, whatever their nodes are called."""

    name: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """The inputs, then all other nodes, operands before users."""
        return tuple(postorder(self.outputs, (v.node for v in self.inputs))[0])

    @cached_property
    def digest(self) -> str:
        """A hash of what the body computes, equal in all processes."""
        refs = {node: i for i, node in enumerate(self.nodes)}
        parts = [repr([(refs[v.node], v.index) for v in self.outputs])]
        for node in self.nodes:
            attrs = node.attrs
            shown = hashlib.sha256(attrs.data.tobytes()).hexdigest() if isinstance(attrs, ConstantAttrs) else repr(attrs)
            parts.append(f"{node.op.name} {shown} {node.shapes} {[(refs[v.node], v.index) for v in node.inputs]}")
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def __repr__(self) -> str:
        return f"<body {self.name} {self.digest[:24]}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Body) and other.digest == self.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __getstate__(self) -> dict[str, object]:
        """For pickles: nodes first, operands before users, so that the recursion depth stays at one node."""
        return {"": self.nodes, "name": self.name, "inputs": self.inputs, "outputs": self.outputs}

    def __setstate__(self, state: dict[str, object]) -> None:
        vars(self).update({name: value for name, value in state.items() if name})

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Those of the results."""
        return tuple(v.shape for v in self.outputs)

    def building(self) -> Building:
        """The same nodes as a graph."""
        out = Building(self.name)
        out.inputs = list(self.inputs)
        out.set_outputs(self.outputs, [f"r{i}" for i in range(len(self.outputs))])
        return out

    @staticmethod
    def of(graph: Building) -> Body:
        """The body that a graph without params and states is. GraphError: it has some."""
        if graph.params or graph.handles or graph.assigns or graph.extent:
            raise GraphError(f"the sub-graph {graph.name!r} has inputs and results only, no params, states or assignments")
        return Body(graph.name, tuple(graph.inputs), tuple(graph.outputs))

    def bind(self, binding: Mapping[str, int]) -> Body:
        done = bound(self.nodes, binding)
        return Body(self.name, tuple(done[v] for v in self.inputs), tuple(done[v] for v in self.outputs))

    def inline(self, operands: Sequence[Value]) -> tuple[Value, ...]:
        """The results as values of these operands, in the graph that has them."""
        return between(self.inputs, self.outputs, keep, operands)

    def evaluate(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, ...]:
        """The results in numpy, by the references of the ops."""
        values = dict(zip(self.inputs, arrays, strict=True))
        for node in self.nodes:
            if node.op is not INPUT:
                made = node.op.reference(node.attrs, *(values[v] for v in node.inputs))
                values.update(zip(node.results, made if isinstance(made, tuple) else (np.asarray(made),), strict=True))
        return tuple(values[v] for v in self.outputs)


def every_node(nodes: Iterable[Node]) -> Iterator[Node]:
    """The nodes, and those of the sub-graphs in them."""
    for node in nodes:
        yield node
        if node.op.kind is Kind.CONTROL:
            yield from (n for body in vars(node.attrs).values() if isinstance(body, Body) for n in every_node(body.nodes))


def leaf(name: str, shape: Shape) -> Value:
    """An input of a body."""
    return Value(Node(INPUT, (), LeafAttrs(shape), (shape,), name))


def called(function: Callable[..., object], *given: Value) -> tuple[Value, ...]:
    """The results of a function of values, as a tuple. GraphError: they are no values, numbers or arrays."""
    found = function(*given)
    out = []
    for x in found if isinstance(found, (tuple, list)) else (found,):
        if not isinstance(x, (Value, bool, int, float, np.ndarray, np.generic)):
            raise GraphError(f"a result of {function!r} is a value, a number or an array, got {type(x).__name__}")
        out.append(x if isinstance(x, Value) else constant(x))
    return tuple(out)


class Traced:
    """A body being made from Python functions. `captured`: the values from outside that are operands, in order."""

    def __init__(self, name: str, shapes: Mapping[str, Shape]) -> None:
        self.name = name
        self.inputs = [leaf(n, shape) for n, shape in shapes.items()]
        self.captured: list[Value] = []
        self._made: set[Node] = {v.node for v in self.inputs}

    def call(self, function: Callable[..., object], *given: Value) -> tuple[Value, ...]:
        """The results of a function of values, whose nodes belong to this body."""
        TRACING.made.append(self._made)
        try:
            return called(function, *given)
        finally:
            TRACING.made.pop()

    def body(self, outputs: Sequence[Value]) -> Body:
        """The body with these results. Its inputs are those of this object, then one for each captured value."""
        found: dict[Node, Sequence[Value]] = {}
        outer: dict[Value, Value] = {}

        def now(v: Value) -> Value:
            if v.node in found:
                return found[v.node][v.index]
            if v not in outer:
                outer[v] = leaf(f"outer{len(outer)}", v.shape)
                self.captured.append(v)
            return outer[v]

        own: set[Node] = set()
        outside, todo = dict[Node, None](), [v.node for v in outputs]
        while todo:  # not further than to values from outside: a graph may have many bodies
            node = todo.pop()
            if node in self._made or node.op is CONSTANT:
                todo += [v.node for v in node.inputs if v.node not in own]
                own.add(node)
            else:
                outside[node] = None
        for node in postorder(outputs, outside)[0]:
            if node in own:
                if node.op.collective is not None or node.op.observed:
                    raise GraphError(f"{self.name}: {node.op.name} cannot be in a sub-graph, which may run any number of times")
                found[node] = keep(node, tuple(map(now, node.inputs)))
        results = tuple(map(now, outputs))
        return Body(self.name, (*self.inputs, *outer.values()), results)


__all__ = ["Body", "Traced", "called", "every_node", "leaf"]
