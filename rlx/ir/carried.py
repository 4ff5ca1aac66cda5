"""Where the rows of an operand lie in the results of an op: the axis along which index i of a result depends on index i alone."""

from __future__ import annotations

from rlx.ir.building import Active
from rlx.ir.layout import Layout
from rlx.ir.node import Node, Value
from rlx.ir.op import Kind
from rlx.ir.shape import contiguous_strides


def carried(node: Node, operand: int, active: Active, result: Value) -> Active | None:
    """The active axis of the result for an active axis of an operand of a core op. None: it ends there, or its rows are mixed."""
    op, x = node.op, node.inputs[operand]
    if op.kind is Kind.POINTWISE:
        return active._replace(axis=active.axis + result.rank - x.rank)
    if op.kind is Kind.VIEW and op.rows is None:
        return _viewed(node, active, result)
    axis: int | None = None
    if op.reduce is not None:
        facts = op.reduce(node.attrs, x.shape)
        axis = active.axis - (0 if facts.keepdims else sum(a < active.axis for a in facts.axes))
        axis = None if active.axis in facts.axes else axis
    elif op.contract is not None:
        facts = op.contract(node.attrs, *(v.shape for v in node.inputs))
        batch, rows = len(facts.a_batch), len(facts.a_rows)
        own = [facts.a_batch, facts.b_batch][operand]
        outer = (*own, *((-1,) * rows if operand else facts.a_rows), *(facts.b_columns if operand else ()))
        assert len(own) == batch
        axis = outer.index(active.axis) if active.axis in outer else None
    elif op.rows is not None:
        found = op.rows(node.attrs, operand, active.axis, *(v.shape for v in node.inputs))
        axis = found[result.index] if isinstance(found, tuple) else found
    return None if axis is None else active._replace(axis=axis)


def _viewed(node: Node, active: Active, result: Value) -> Active | None:
    """The same for a view, from its strides: the rows of a row-major operand are `stride` elements apart."""
    x, out = node.inputs[0].shape.static, result.shape.static
    plain = contiguous_strides(x)
    layout = node.op.strided and node.op.strided(node.attrs, x, out, Layout(plain))
    if layout is None or 0 in x or 0 in out:
        return None
    start = layout.offset // plain[active.axis] % x[active.axis]
    if start % (active.upper * active.inner):
        return None
    stride = plain[active.axis] * active.inner
    for axis, (step, size) in enumerate(zip(layout.strides, out)):
        if size > 1 and step and stride % step == 0 and size % (active.upper * (stride // step)) == 0:
            inner = stride // step
            return Active(axis, size // (active.upper * inner), active.upper, inner)
    return None
