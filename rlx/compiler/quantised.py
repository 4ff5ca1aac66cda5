"""Products with decoded weights: x @ dequantize(w).T becomes dequant_matmul where the target claims it.

The decoded weight is then in no memory: its kernel decodes blocks where it multiplies them. x keeps its precision. So does a
product with weights behind an exact cast from 8-bit floats read the 8-bit floats, where the target widens them (Target.widens).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.compiler.compilation import Compilation
from rlx.ir.dtype import holds, product
from rlx.ir.graph import Graph, Node, Value, keep
from rlx.ir.op import OPS, Kind
from rlx.ir.ops import dequant_matmul
from rlx.ir.ops.view import transposed_axes


def quantised(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with claimed products in place of products with decoded weights."""

    widens = compilation.target.widens

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if widens and node.op.kind is Kind.CONTRACT:
            inputs = inputs[0], _narrow(inputs[0], inputs[1], widens)
        made = _product(*inputs) if node.op is OPS["matmul"] else None
        if made is None or made.shape != node.shapes[0] or not compilation.is_native(made.node):
            return keep(node, inputs)
        return replace(made.node, name=node.name, source=node.source).results

    used = {OPS["dequantize"], *([OPS["cast"]] if widens else [])}
    return graph.rebuild(new) if any(n.op in used for n in graph.nodes()) else graph


def _narrow(x: Value, right: Value, widens: frozenset[str]) -> Value:
    """`right`, without the cast behind its views if products of x with the narrower elements are the same."""
    views, source = list[Node](), right
    while source.node.op.kind is Kind.VIEW:
        views.append(source.node)
        source = source.node.inputs[0]
    if source.node.op is not OPS["cast"]:
        return right
    narrow = source.node.inputs[0]
    if f"{x.dtype} {narrow.dtype}" not in widens or not holds(source.dtype, narrow.dtype):
        return right
    if product(x.dtype, narrow.dtype) != product(x.dtype, source.dtype):
        return right
    for view in reversed(views):
        (narrow,) = keep(view, (narrow,))
    return narrow


def _product(x: Value, right: Value) -> Value | None:
    """x @ right from the packed weights, if `right` is the transpose of decoded ones."""
    if right.node.op is not OPS["transpose"] or right.rank != 2 or transposed_axes(right.node) != (1, 0):
        return None
    weights = right.node.inputs[0].node
    if weights.op is not OPS["dequantize"] or x.dims[-1:] != weights.shapes[0].dims[-1:]:
        return None
    return dequant_matmul(x, weights.inputs[0], format=weights.attrs.format, exact=True)  # type: ignore[union-attr, return-value]
