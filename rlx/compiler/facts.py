"""Analysis of the legal graph, computed once and used by fusion, lowering, assembly and reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import NamedTuple

from rlx.compiler.compilation import Compilation
from rlx.compiler.layout import Places
from rlx.compiler.padding import active_axes
from rlx.ir.graph import Active, Graph, Node, Value
from rlx.ir.program import Program
from rlx.ir.target import Target
from rlx.ir.updates import run_before
from rlx.records import record


class Part(NamedTuple):
    """A box of a value, with a number in each element or a copy of another value."""

    start: tuple[int, ...]
    dims: tuple[int, ...]
    source: float | int | bool | Value


@record(eq=False)
class Facts:
    """Facts of a legal graph.

    `compilation`: facts of single nodes, such as claims. `places`: memory layouts of values. `active`: the active axis of a
    value; rows past its extent are not needed. `before`: extra ordering edges. `over`: a value written over a handle -> the
    handle.
    """

    graph: Graph
    compilation: Compilation
    nodes: Sequence[Node]
    places: Places
    active: Mapping[Value, Active]
    before: Mapping[Node, Sequence[Node]]
    over: Mapping[Value, Value]
    bodies: dict[str, Program] = field(default_factory=dict)  # sub-programs of control flow lowered so far, by their texts
    fills: dict[Value, Sequence[Part]] = field(default_factory=dict)  # pads and concats -> the parts that nothing else writes

    @property
    def target(self) -> Target:
        return self.compilation.target

    def memory(self, base: Value) -> Value:
        """The value whose buffer holds `base`: `base` itself, the handle that it overwrites, or a value of which it is a part."""
        return self.places.hosts[base][0] if base in self.places.hosts else self.over.get(base, base)


def facts_of(graph: Graph, compilation: Compilation) -> Facts:
    """The facts of a graph after the passes."""
    over = {v: u.handle for u in graph.updates for v in (u.result, u.undo) if v is not None}
    return Facts(graph, compilation, graph.nodes(), Places(graph), active_axes(graph), run_before(graph), over)


__all__ = ["Facts", "Part", "facts_of"]
