"""The routers of a legal graph: which values choose experts, and which params hold the weights of those experts."""

from __future__ import annotations

from collections.abc import Callable

from rlx.compiler.facts import Facts
from rlx.compiler.packing import contraction
from rlx.ir.graph import PARAM, Node, Value


def routers(facts: Facts) -> list[tuple[Value, tuple[str, ...]]]:
    """Every router, operands first, with the names of the params, in order, that only products in groups by its ids read."""
    observed = [n for n in facts.nodes if n.op.observed]
    is_static, readers = facts.compilation.is_static, dict[Node, set[Node | None]]()  # of params; None: any other reader
    params = {n: _before(n, lambda node: False) for n in facts.nodes if observed and is_static(n)}
    for node in facts.nodes if observed else ():
        for at, value in enumerate(node.inputs if not is_static(node) else ()):
            by = _choosing(node) if at == 1 else []
            for param in params.get(value.node, ()):
                readers.setdefault(param, set()).update(by or [None])
    for root in facts.graph.roots():
        for param in params.get(root.node, ()):
            readers.setdefault(param, set()).add(None)
    names = {n: [p.name or "" for p, by in readers.items() if p.op is PARAM and by == {n}] for n in observed}
    return [(n.results[0], tuple(names[n])) for n in observed]


def _choosing(node: Node) -> list[Node]:
    """The routers whose ids order the rows of a product in groups."""
    if (node.op.product or node.op.contract) is None or contraction(node).group < 0:
        return []
    return [n for n in _before(node.inputs[2].node, lambda n: n.op.observed) if n.op.observed]


def _before(start: Node, ends: Callable[[Node], bool]) -> list[Node]:
    """The node and those that it depends on, back to those where `ends` is true."""
    seen, todo = {start: None}, [start]
    while todo:
        node = todo.pop()
        new = {} if ends(node) else {v.node: None for v in node.inputs if v.node not in seen}
        seen |= new
        todo += new
    return list(seen)


__all__ = ["routers"]
