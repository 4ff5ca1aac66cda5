"""Analysis of the legal graph, computed once and used by fusion, lowering, assembly and reports."""

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
    """Facts of a legal graph for a target.

    `places`: memory layouts of values. `claims`: None for a node that the backend computes by its own kernel, else the reason why
    not. `static`: nodes known before a run. `active`: the active axis of a value; rows past its extent are not needed. `before`:
    extra ordering edges. `over`: a value written over a handle -> the handle.
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
        """True if the backend has its own kernel for the node."""
        return self.claims[node] is None

    def memory(self, base: Value) -> Value:
        """The value whose buffer holds `base`: `base` itself, or the handle that it overwrites."""
        return self.over.get(base, base)


def facts_of(graph: Graph, target: Target) -> Facts:
    """The facts of a graph after the passes."""
    nodes = graph.nodes()
    claims = {node: None if how == "native" else why for node in nodes for how, why in [decide(node, target)]}
    over = {v: u.handle for u in graph.updates for v in (u.result, u.undo)}
    static = frozenset(static_nodes(nodes))
    return Facts(graph, target, nodes, Places(graph), claims, static, active_axes(graph), run_before(graph), over)


__all__ = ["Facts", "facts_of"]
