"""State that is updated where it lies: which assignments need no copy, why the others do, and how a failed run is undone.

`assign(h, v)` is in place when v is h with a part replaced (OpDef.update) and everything else that reads the old h can run
before. The part that is overwritten is read first, into the arena; if the run then fails, it is put back by the same op.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.errors import CompileError
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Kind
from rlx.ir.ops import take_rows, update_rows
from rlx.ir.verify import where


@dataclass(frozen=True)
class InPlace:
    """One state updated in place. `result` lies in the memory of `handle`; `saved` holds the old rows, and `undo` is the
    state with them put back; `readers` read the old state and run before `result` is made."""

    handle: Value
    result: Value
    saved: Value
    undo: Value
    readers: tuple[Node, ...]


def in_place_updates(graph: Graph) -> list[InPlace]:
    """The assignments that need no copy. CompileError with the reason for one that was asked to and does."""
    out = []
    for handle, value in graph.assigns:
        reason = _refusal(graph, handle, value)
        if reason is None:
            out.append(_update(graph, handle, value))
        elif handle.name in graph.in_place:
            raise CompileError(f"graph {graph.name!r}: handle {handle.name!r} cannot be updated in place: {reason}")
    return out


def _refusal(graph: Graph, handle: Value, value: Value) -> str | None:
    """Why the next state needs memory of its own, or None."""
    node = value.node
    if node.op.update is None:
        return f"its next value comes from {where(node)}, not from an op that replaces a part of it (update_rows)"
    if node.inputs[0] != handle:
        return f"{where(node)} replaces a part of {node.inputs[0]!r}, not of the handle itself"
    if sum(v == value for _, v in graph.assigns) > 1:
        return "its next value is also another handle's"
    readers = _readers(graph, handle, node)
    if any(v == handle or (v.node in readers and v.node.op.kind is Kind.VIEW) for v in node.inputs[1:]):
        return f"{where(node)} takes its new rows from the old state itself"
    for reader in readers:
        if _depends(reader, node):
            return f"{where(reader)} reads the old state, but needs the new one first"
    return None


def _readers(graph: Graph, handle: Value, update: Node) -> tuple[Node, ...]:
    """Nodes that read the old state, under views too."""
    seen, out = {handle}, []
    for node in graph.nodes():
        if node is not update and any(v in seen for v in node.inputs):
            if node.op.kind is Kind.VIEW:
                seen |= set(node.results)
            out.append(node)
    return tuple(out)


def _depends(node: Node, goal: Node) -> bool:
    """Whether `node` is `goal` or needs it."""
    seen: set[Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n is goal:
            return True
        if n not in seen:
            seen.add(n)
            todo += [v.node for v in n.inputs]
    return False


def _update(graph: Graph, handle: Value, value: Value) -> InPlace:
    rows, at = value.node.inputs[1:]
    axis = value.node.attrs.axis  # type: ignore[union-attr]
    saved = take_rows(handle, at, count=rows.shape.static[axis], axis=axis)
    undo = update_rows(value, saved, at, axis=axis)
    return InPlace(handle, value, saved, undo, (*_readers(graph, handle, value.node), saved.node))
