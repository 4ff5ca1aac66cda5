"""What fusion, lowering, assembly and reports need to know of the graph that the passes left, worked out once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlx.compile.layout import Places, static_nodes
from rlx.compile.legalise import decide
from rlx.compile.padding import active_axes
from rlx.ir.graph import Active, Graph, Node, Value
from rlx.ir.target import Target
from rlx.ir.updates import run_before


@dataclass(frozen=True, eq=False)
class Facts:
    """Of a legal graph and a target.

    `places`: where values lie. `claims`: why the target's backend does not compute a node itself, None where it does. `static`:
    nodes known before a run. `active`: the axis of a value past whose extent no rows are needed. `before`: nodes that run before
    another that does not read them. `over`: what is written over a handle -> the handle.
    """

    graph: Graph
    target: Target
    nodes: Sequence[Node]
    places: Places
    claims: Mapping[Node, str | None]
    static: frozenset[Node]
    active: Mapping[Value, Active]
    before: Mapping[Node, Sequence[Node]]
    over: Mapping[Value, Value]

    def is_native(self, node: Node) -> bool:
        """Whether the backend has a kernel of its own for the node."""
        return self.claims[node] is None

    def memory(self, base: Value) -> Value:
        """The value whose buffer holds `base`: itself, or the handle that it is written over."""
        return self.over.get(base, base)


def facts_of(graph: Graph, target: Target) -> Facts:
    """The facts of a graph that went through the passes."""
    nodes = graph.nodes()
    claims = {node: None if how == "native" else why for node in nodes for how, why in [decide(node, target)]}
    over = {v: u.handle for u in graph.updates for v in (u.result, u.undo)}
    static = frozenset(static_nodes(nodes))
    return Facts(graph, target, nodes, Places(graph), claims, static, active_axes(graph), run_before(graph), over)


__all__ = ["Facts", "facts_of"]
