"""The routers of a legal graph: which values choose experts, and which params hold the weights of those experts."""

from __future__ import annotations

from collections.abc import Iterator

from rlx.compiler.facts import Facts
from rlx.compiler.packing import contraction
from rlx.ir.graph import PARAM, Node, Value


def routers(facts: Facts) -> Iterator[tuple[Value, tuple[str, ...]]]:
    """Every router, operands first, with the names of the params that products in groups by its ids multiply by, in order."""
    found: dict[Node, dict[str, None]] = {n: {} for n in facts.nodes if n.op.observed}
    products = [n for n in facts.nodes if found and (n.op.product or n.op.contract)]
    for node in (n for n in products if contraction(n).group >= 0):
        for chosen in _before(node.inputs[2].node):
            if chosen in found:
                found[chosen] |= {n.name or "": None for n in _before(node.inputs[1].node) if n.op is PARAM}
    for node, names in found.items():
        yield node.results[0], tuple(names)


def _before(start: Node) -> list[Node]:
    """The node and those that it depends on, back to routers."""
    seen, todo = {start: None}, [start]
    while todo:
        node = todo.pop()
        new = {} if node.op.observed else {v.node: None for v in node.inputs if v.node not in seen}
        seen |= new
        todo += new
    return list(seen)


__all__ = ["routers"]
