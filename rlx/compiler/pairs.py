"""Rewrites complex ops to pairs: every op on c64 [...] becomes ops on f32 [..., 2], so that kernels need no c64.

Leaves and results keep their dtype, since the bytes are the same: a c64 leaf is read through `view_as_real`, and an output
or a next state is `view_as_complex` of pairs. Each op declares its form on pairs (OpDef.parts).
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.compiler.compilation import Compilation
from rlx.compiler.legalise import expand
from rlx.errors import CompileError
from rlx.ir.dtype import c64, f32
from rlx.ir.graph import CONSTANT, Graph, Node, Value, constant, keep
from rlx.ir.ops.complex import view_as_complex, view_as_real
from rlx.ir.verify import where

FROM_PAIRS, TO_PAIRS = view_as_complex.op, view_as_real.op  # type: ignore[attr-defined]


def pairs(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with c64 only at its leaves and results. CompileError: an op with complex operands declares no form on pairs."""
    if not any(shape.dtype == c64 for node in graph.nodes() for shape in node.shapes):
        return graph

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        results = keep(node, inputs)
        node = results[0].node
        if node.op in (FROM_PAIRS, CONSTANT) or not any(v.dtype == c64 for v in (*inputs, *results)):
            return results
        if node.op is TO_PAIRS:
            return (_pairs(inputs[0]),)
        if node.op.decompose is not None:
            return expand(node, new)
        if node.op.parts is None:
            raise CompileError(f"graph {graph.name!r}: {where(node)} has no form for complex numbers")
        made = node.op.parts(node, *(_pairs(v) if v.dtype == c64 else v for v in inputs))
        return (view_as_complex(made) if results[0].dtype == c64 else made,)

    out = graph.rebuild(new)
    out.outputs = [_result(v) for v in out.outputs]
    out.assigns = [(h, _result(v)) for h, v in out.assigns]
    return out


def _pairs(value: Value) -> Value:
    """The pairs, f32 [..., 2], of a c64 value."""
    if value.node.op is FROM_PAIRS:
        return value.node.inputs[0]
    if value.node.op is CONSTANT:
        data = value.node.attrs.data  # type: ignore[union-attr]
        return constant(data.reshape((*data.shape, 1)).view(f32.numpy))
    return view_as_real(value)


def _result(value: Value) -> Value:
    return view_as_complex(_pairs(value)) if value.dtype == c64 else value


__all__ = ["FROM_PAIRS", "pairs"]
