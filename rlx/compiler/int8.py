"""precision="int8": contractions of f32 with weights in 8-bit integers, scaled per row and per column.

Activations are quantised dynamically: each row of the left operand is rounded to the nearest of 256 levels from its least to
its largest element, at every run. Each column of the weights is rounded to the nearest of 255 levels around zero, once, when
they are set. Products and their sums are exact integers. The epilogue scales them and adds the zero-point term (the
contribution of the rows' least elements). So a result differs from the exact one by at most
span(x)/510 * sum|w| + max|w|/254 * sum(|x| + span(x)/510), in addition to f32 rounding.

A row with a NaN or an infinity gives NaN everywhere, and so does a column of such weights. Contractions of two activations
(attention), of other dtypes, or with a depth at which sums might exceed 32 bits are unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.compiler.compilation import Compilation
from rlx.compiler.legalise import expand, into_contractions
from rlx.compiler.packing import contraction, is_matrix
from rlx.errors import CompileError, known
from rlx.ir import ops
from rlx.ir.dtype import f32, i8, i32, u8
from rlx.ir.graph import Graph, Node, Value, keep
from rlx.ir.op import Kind
from rlx.ir.program import NodeReport

TINY = 1e-30  # lower bound of a span or magnitude, so that its reciprocal is finite
MOST_DEPTH = 1 << 16  # sums of 255 * 127 stay in 31 bits


def in_int8(graph: Graph, compilation: Compilation, notes: list[NodeReport] | None = None) -> Graph:
    """`graph` with contractions with weights on integers. CompileError: the target lacks the dtypes.

    `notes` receives the changed nodes ("narrowed") and the unchanged contractions with the reason ("kept")."""
    if missing := {"u8", "i8", "i32"} - (target := compilation.target).dtypes:
        raise CompileError(f"precision='int8': no {known(missing)} on {target.name}; it has {known(target.dtypes)}")

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        node = keep(node, inputs)[0].node
        if node.op.kind is Kind.COMPOSITE and node.op.decompose and into_contractions(node) is not None:
            return node.results if compilation.is_native(node) else expand(node, new)
        if node.op.kind is not Kind.CONTRACT or any(v.dtype != f32 for v in inputs) or compilation.is_static(inputs[0].node):
            return node.results
        why = "" if compilation.is_static(inputs[1].node) else "its right operand is not a weight"
        depth = inputs[0].shape.dims[-1] if inputs[0].rank else 0
        if not why and not (is_matrix(facts := contraction(node)) and isinstance(depth, int) and 0 < depth < MOST_DEPTH):
            why = "its weights are not a matrix, or too deep for sums in 32 bits"
        elif not why and len(facts.a_sum) > 1:
            why = "the rows of its left operand overlap: each element would be rounded to several scales"
        if notes is not None:
            notes.append(NodeReport(node.name or "", node.op.name, "kept" if why else "narrowed", "", why or "8-bit integers"))
        return node.results if why else (_product(*inputs),)

    return graph.rebuild(new)


def _product(x: Value, w: Value) -> Value:
    """x [..., k] @ w [k, n] on integers."""
    low, peak = ops.min(x, axis=-1, keepdims=True), ops.max(ops.abs(w), axis=0)
    span = ops.max(x, axis=-1, keepdims=True) - low
    rows = ops.astype(ops.round((x - low) * (255.0 / ops.maximum(span, TINY))), u8)
    columns = ops.astype(ops.round(w * (127.0 / ops.maximum(peak, TINY))), i8)
    sums = ops.astype(ops.int8_matmul(rows, columns), f32)
    ones = ops.astype(ops.sum(ops.astype(columns, i32), axis=0), f32)
    return ops.multiply_add(low, ones, sums * (span * (1 / 255))) * (peak * (1 / 127))


__all__ = ["in_int8"]
