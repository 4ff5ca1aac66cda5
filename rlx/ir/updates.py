"""In-place state updates of a graph, and the order of execution that they require.

    assign total = %2
    update total = %2 saved %3 undo %4

`%2` is `total` with a part replaced (OpDef.update), written in the memory of `total`; `%3` saves the old part, and `%4` restores
it, only if a run fails. All other readers of `total` run before `%2`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rlx.ir.building import Building, Update
from rlx.ir.node import Node, Value, postorder, same_values
from rlx.ir.op import Kind


def readers(graph: Building, results: Mapping[Value, Node]) -> dict[Node, list[Node]]:
    """By update node: the other nodes that read the old state, directly or through views, in graph order. `results`: the node
    that updates each handle."""
    old: dict[Value, Node] = dict(results)  # the handle and its views -> the node that updates it
    out: dict[Node, list[Node]] = {update: [] for update in results.values()}
    if not old:
        return out
    for node in (n for n in graph.nodes() if not old.keys().isdisjoint(n.inputs)):
        for update in dict.fromkeys(old[v] for v in node.inputs if v in old):
            if node is update:
                continue
            out[update].append(node)
            if node.op.kind is Kind.VIEW:
                old.update(dict.fromkeys(node.results, update))
    return out


def run_before(graph: Building) -> dict[Node, list[Node]]:
    """Extra ordering edges: the readers of a state must run before its in-place update, which does not read them."""
    return readers(graph, {u.handle: u.result.node for u in graph.updates})


def update_faults(graph: Building) -> Iterator[str]:
    """Broken rules of the updates of a graph whose nodes are sound, one sentence each."""
    seen, assigns = set[Value](), set(graph.assigns)
    for u in graph.updates:
        update = f"update of {u.handle.name!r}"
        if u.handle in seen:
            yield f"{update}: it is updated twice"
        seen.add(u.handle)
        if (u.handle, u.result) not in assigns:
            yield f"{update}: {u.result!r} is not the assigned value of the handle"
        if u.result.node.op.update is None or u.result.node.inputs[0] is not u.handle:
            yield f"{update}: {u.result!r} does not replace a part of the handle"
        elif u.undo is not None and not _restores(u, u.undo):
            yield f"{update}: {u.undo!r} does not restore {u.saved!r}"
    if graph.updates and (late := postorder(graph.roots(), before=run_before(graph))[1]) is not None:
        yield f"{late!r} reads a state that is updated in place, but depends on the new state"


def _restores(u: Update, undo: Value) -> bool:
    """True if `undo` is the same op on the result, with the saved part."""
    return undo.node.op is u.result.node.op and u.saved is not None and same_values(undo.node.inputs[:2], (u.result, u.saved))


__all__ = ["readers", "run_before", "update_faults"]
