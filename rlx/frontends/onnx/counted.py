"""Values whose size depends on data: an upper bound, and a count that is known at run time.

NonZero gives indices for as many elements as its operand has; the first `count` of them are data, the others undefined. Ops that
keep rows apart pass this on to their results. Ops that would mix data with undefined rows are refused.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple

from rlx.errors import GraphError
from rlx.ir.carried import carried
from rlx.ir.graph import Active
from rlx.ir.node import Node, Value
from rlx.ir.op import Kind


class Bound(NamedTuple):
    """The first `count` (i64 ()) indices of `axis` are data."""

    axis: int
    count: Value


def follow(value: Value, bounds: MutableMapping[Value, Bound]) -> Bound | None:
    """The bound of a value that is computed from values with bounds, which is recorded. GraphError: an op mixes rows."""
    seen: set[Value] = set()
    todo = [value]
    while todo:
        node = todo[-1].node
        if todo[-1] in bounds or todo[-1] in seen:
            todo.pop()
        elif missing := [v for v in node.inputs if v not in seen and v not in bounds]:
            todo += missing
        else:
            _node(node, bounds)
            seen.update(node.results)
    return bounds.get(value)


def _node(node: Node, bounds: MutableMapping[Value, Bound]) -> None:
    """Records the bounds of the results of one node."""
    given = {i: bounds[v] for i, v in enumerate(node.inputs) if v in bounds}
    if not given:
        return
    if node.op.kind is Kind.COMPOSITE and node.op.decompose is not None:
        made = node.op.decompose(node.attrs, *node.inputs)
        inner: dict[Value, Bound] = {v: bounds[v] for v in node.inputs if v in bounds}
        for result, value in zip(node.results, made if isinstance(made, tuple) else (made,)):
            if (found := follow(value, inner)) is not None:
                bounds[result] = found
        return
    for result in node.results:
        found = {_result(node, i, bound, result) for i, bound in given.items()}
        if len(found) > 1:
            raise GraphError(f"{node.op.name} joins values whose sizes depend on data in different ways")
        bounds[result] = found.pop()


def _result(node: Node, operand: int, bound: Bound, result: Value) -> Bound:
    x = node.inputs[operand]
    size = x.dims[bound.axis]
    if isinstance(size, int) and result.shape.is_static and x.shape.is_static:
        active = carried(node, operand, Active(bound.axis, 1, size, 1), result)
        if active is not None and (active.outer, active.inner) == (1, 1) and result.dims[active.axis] == size:
            return Bound(active.axis, bound.count)
    raise GraphError(
        f"{node.op.name} mixes elements along axis {bound.axis} of its operand {x.shape}, whose size depends on data: at most "
        f"{size} are there, and the others are undefined"
    )


__all__ = ["Bound", "follow"]
