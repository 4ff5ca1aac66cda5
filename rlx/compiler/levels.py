"""Left operands of contractions that the target does not read where they lie: windows, whose sums run over several strides."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.compiler.compilation import Compilation
from rlx.compiler.layout import Places, one_stride
from rlx.compiler.packing import contraction
from rlx.ir.graph import Graph, Node, Value, keep
from rlx.ir.op import Kind
from rlx.ir.ops import copy


def levels(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with a copy in front of each contraction whose left operand has no common stride along the axes that are summed,
    unless the target reads such operands (Target.levels)."""
    if compilation.target.levels:
        return graph
    places, copies = Places(graph), dict[Value, Value]()

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op.kind is not Kind.CONTRACT or len(axes := contraction(node).a_sum) < 2:
            return keep(node, inputs)
        left = node.inputs[0]
        if one_stride(places.locate(left)[1], left.shape.static, axes):
            return keep(node, inputs)
        copies.setdefault(left, copy(inputs[0]))  # type: ignore[arg-type]
        return keep(node, (copies[left], *inputs[1:]))

    return graph.rebuild(new)


__all__ = ["levels"]
