"""Computed operands of contractions: which producers qualify, and the facts for the target's decision.

A loop group (a norm, a cast, a chain of pointwise ops, a gather of rows) that only the contraction reads can be evaluated where
the contraction reads its elements, instead of being written to memory by another kernel. Rows may then be computed more than
once, by every task that has some of the columns, so the target decides when this is faster (Target.computes).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from rlx.compiler.layout import Places
from rlx.ir import kernel as K
from rlx.ir.dtype import DType
from rlx.ir.graph import Node, Value
from rlx.ir.op import Attrs, Contraction, Kind, OpDef
from rlx.ir.shape import contiguous_strides
from rlx.ir.target import Producer

EXPENSIVE = frozenset({"exp", "log", "sin", "cos", "tanh", "erf", "pow", "div", "sqrt", "rem"})
EXPENSIVE_WORK = 12  # cost of one expensive operation, in additions


def is_expensive(node: Node) -> bool:
    """True if one element of a pointwise node lowers to more than a few instructions."""
    return not EXPENSIVE.isdisjoint(_operations(node))


def work(node: Node) -> int:
    """Cost of one element of a node, in additions; a small default if the op does not declare it."""
    return sum(EXPENSIVE_WORK if op in EXPENSIVE else 1 for op in _operations(node)) if node.op.scalar else 2


def _operations(node: Node) -> Sequence[str]:
    return _scalar_operations(node.op, node.attrs, tuple(v.dtype for v in node.inputs))


@lru_cache(1024)
def _scalar_operations(op: OpDef, attrs: Attrs | None, dtypes: tuple[DType, ...]) -> Sequence[str]:
    assert op.scalar is not None
    made = op.scalar(K.k, attrs, *(K.Var("x", dtype.compute) for dtype in dtypes))
    return [e.op for e in K.walk(made) if isinstance(e, K.Alu)]


def computable(value: Value, forms: dict[Node, str], places: Places, walked: tuple[int, ...], side: int) -> bool:
    """True if the nodes of a loop group (with their forms) compute the operand element by element, in memory order.

    `walked`: the axes of the operand along its rows. A left operand may have row reductions, if its rows are the group's rows."""
    base = places.base(value)
    if forms.get(base.node) != "full" or not places.is_row_major(value) or walked != (value.rank - 1,):
        return False
    reductions = [n for n in forms if n.op.kind is Kind.REDUCE]
    if reductions and (side or any(forms[n] == "full" for n in reductions) or value.dims[-1] != base.dims[-1]):
        return False  # such a node would be recomputed for each element
    read = (v for n in forms if n.op.kind in (Kind.POINTWISE, Kind.REDUCE) for v in n.inputs if v.rank and v.node not in forms)
    return all(places.locate(v)[1].strides[-1] in (0, 1) or v.dims[-1] == 1 for v in read)


def row_axes(places: Places, value: Value, forms: Mapping[Node, str]) -> list[int | None] | None:
    """For the axes of a row program's result but that of its rows, the axis of its view `value` that walks each (None: of extent
    1); None if the view does more than to order them."""
    base, layout = places.locate(value)
    dims = base.shape.static
    if forms.get(base.node) != "full" or layout.offset or value.dims[-1:] != dims[-1:] or layout.strides[-1] != 1:
        return None
    if any(n.op.kind is Kind.REDUCE and form == "full" for n, form in forms.items()):
        return None
    walked = {(stride, d): a for a, (stride, d) in enumerate(zip(layout.strides, value.shape.static)) if d != 1}
    found = [None if d == 1 else walked.get((stride, d), -1) for stride, d in zip(contiguous_strides(dims), dims)][:-1]
    return None if -1 in found or value.shape.num_elements != base.shape.num_elements else found


def producer(node: Node, facts: Contraction, side: int, nodes: Iterable[Node]) -> Producer:
    """Facts of an operand (0: left, 1: right) of a contraction, computed by `nodes`."""
    left, dims = node.inputs[0], node.shapes[0].static
    n = math.prod(dims[len(dims) - len(facts.b_columns) :])
    depth = math.prod(left.shape.static[a] for a in facts.a_sum)
    batch = math.prod(dims[: len(facts.a_batch)])
    m = math.prod(dims) // max(1, batch * n)
    operand = node.inputs[side]
    own = math.prod(operand.shape.static[a] for a in (facts.a_batch, facts.b_batch)[side] if a >= 0)
    elements = max(1, operand.shape.num_elements)
    total = sum(work(x) * (x.inputs[0].shape if x.op.kind is Kind.REDUCE else x.shapes[0]).num_elements for x in nodes)
    return Producer(side, m, n, depth, batch, batch // max(1, own), operand.dtype, total / elements)
