"""In-place updates of states: which assignments need no copy, why the others do, and how a failed run is undone.

`assign(h, v)` is done in place if v is h with a part replaced (OpDef.update) and all other readers of the old h can run first.
The overwritten part is saved to the arena first; if the run fails, the same op restores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlx.compiler.compilation import Compilation
from rlx.errors import CompileError
from rlx.ir.building import Update
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Kind
from rlx.ir.ops import take_rows, update_rows
from rlx.ir.updates import readers
from rlx.ir.verify import where


def state(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with the assignments that need no copy as in-place updates (Graph.updates). CompileError, with the reason, if the
    user asked for an in-place update that is impossible."""
    out = graph.copy()
    out.updates = []  # a graph parsed from a later stage has some: they are found again
    found = readers(out, {h: v.node for h, v in graph.assigns if v.node.op.update is not None})
    accepted: dict[Node, Sequence[Node]] = {}  # update -> nodes that run before it
    for handle, value in graph.assigns:
        reason = _refusal(graph, handle, value, found.get(value.node, ()), accepted)
        if reason is None:
            accepted[value.node] = found[value.node]
            out.updates.append(Update(handle, value, None, None) if compilation.nested else _update(handle, value))
        elif handle.name in graph.in_place:
            raise CompileError(f"graph {graph.name!r}: handle {handle.name!r} cannot be updated in place: {reason}")
    return out


def _refusal(
    graph: Graph, handle: Value, value: Value, before: Sequence[Node], accepted: Mapping[Node, Sequence[Node]]
) -> str | None:
    """Why the next state needs memory of its own, or None. `before`: nodes that read the old state."""
    node = value.node
    if node.op.update is None:
        return f"its next value comes from {where(node)}, not from an op that updates a part of it (update_rows)"
    if node.inputs[0] is not handle:
        return f"{where(node)} updates {node.inputs[0]!r}, not the handle"
    if sum(v is value for _, v in graph.assigns) > 1:
        return "its next value is assigned to another handle too"
    if any(v is handle or (v.node in before and v.node.op.kind is Kind.VIEW) for v in node.inputs[1:]):
        return f"{where(node)} computes its new rows from the old state"
    late = _first_after(before, node, accepted)
    return None if late is None else f"{where(late)} reads the old state, but depends on the new state"


def _first_after(nodes: Sequence[Node], goal: Node, accepted: Mapping[Node, Sequence[Node]]) -> Node | None:
    """The first of `nodes` that is `goal` or depends on it, by operands or by the ordering edges of `accepted` updates."""
    seen: set[Node] = set()
    for first in nodes:
        todo = [first]
        while todo:
            node = todo.pop()
            if node is goal:
                return first
            if node not in seen:
                seen.add(node)
                todo += [v.node for v in node.inputs]
                todo += accepted.get(node, ())
    return None


def _update(handle: Value, value: Value) -> Update:
    rows, at = value.node.inputs[1:]
    axis = value.node.attrs.axis  # type: ignore[union-attr]
    saved = take_rows(handle, at, count=rows.shape.static[axis], axis=axis)
    return Update(handle, value, saved, update_rows(value, saved, at, axis=axis))


__all__ = ["state"]
