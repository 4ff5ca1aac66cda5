"""precision="int8": contractions of f32 with weights in 8-bit integers, scaled per row and per column.

Activations are quantised dynamically: each row of the left operand is rounded to the nearest of 256 levels from its least to
its largest element, at every run. Each column of the weights is rounded to the nearest of 255 levels around zero, once, when
they are set. Products and their sums are exact integers. The epilogue scales them and adds the zero-point term (the
contribution of the rows' least elements). The rows of a convolution overlap: their elements, with the padding, are rounded
between the least and the largest of their image. So a result differs from the exact one by at most
span(x)/510 * sum|w| + max|w|/254 * sum(|x| + span(x)/510), in addition to f32 rounding.

A row with a NaN or an infinity gives NaN everywhere, and so does a column of such weights. Contractions of two activations
(attention), of other dtypes, or with a depth at which sums might exceed 32 bits are unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.compiler.compilation import Compilation
from rlx.compiler.layout import seen_through
from rlx.compiler.legalise import expand, into_contractions
from rlx.compiler.packing import contraction, is_matrix
from rlx.errors import CompileError, known
from rlx.ir import ops
from rlx.ir.dtype import f32, i8, i32, u8
from rlx.ir.graph import Graph, Node, Value, keep
from rlx.ir.layout import Layout
from rlx.ir.op import Kind
from rlx.ir.program import NodeReport
from rlx.ir.shape import contiguous_strides

TINY = 1e-30  # lower bound of a span or magnitude, so that its reciprocal is finite
FEW_CHANNELS = 4  # of a colour image
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
        facts = contraction(node)
        depth = math.prod(inputs[0].shape.static[axis] for axis in facts.a_sum)
        if not why and not (is_matrix(facts) and 0 < depth < MOST_DEPTH):
            why = "its weights are not a matrix, or too deep for sums in 32 bits"
        image, views = (inputs[0], []) if len(facts.a_sum) == 1 else _image(inputs[0])
        if not why and image is None:
            why = "its rows are not windows of images that lie one after another"
        elif not why and few_channels(node):
            why = "its images have few channels: to gather their bytes in fours takes longer than to multiply f32"
        if notes is not None:
            notes.append(NodeReport(node.name or "", node.op.name, "kept" if why else "narrowed", "", why or "8-bit integers"))
        return node.results if why or image is None else (_product(node, image, views, inputs[1]),)

    return graph.rebuild(new)


def few_channels(node: Node) -> bool:
    """True for a contraction of windows of images with few channels, which instructions for narrow dtypes would sum in groups."""
    return len(contraction(node).a_sum) > 1 and node.inputs[0].shape.static[-1] <= FEW_CHANNELS


def _image(x: Value) -> tuple[Value | None, list[Node]]:
    """(the images of which `x` [images, …] is a view, the views, outermost first); None: an image is not one part of them."""
    views, image = list[Node](), x
    while image.node.op.kind is Kind.VIEW and len(image.node.shapes) == 1:
        views.append(image.node)
        image = image.node.inputs[0]
    layout = Layout(contiguous_strides(image.shape.static))
    for view in reversed(views):
        found = seen_through(view.results[0], layout) if layout else None
        layout = found
    if layout is None or not x.rank or not image.rank or x.dims[0] != image.dims[0]:
        return None, views
    apart = math.prod(image.shape.static[1:])
    inside = sum((d - 1) * stride for d, stride in zip(x.shape.static[1:], layout.strides[1:]))
    return (image if layout.strides[0] == apart and layout.offset + inside < apart else None), views


def _product(node: Node, x: Value, views: Sequence[Node], w: Value) -> Value:
    """The contraction on integers: of x [..., k], or of `views` of the images x, by w [k, n]."""
    axes = tuple(range(1, x.rank)) if views else (x.rank - 1,)
    low, peak = ops.min(x, axis=axes, keepdims=True), ops.max(ops.abs(w), axis=0)
    span = ops.max(x, axis=axes, keepdims=True) - low
    rows = ops.astype(ops.round((x - low) * (255.0 / ops.maximum(span, TINY))), u8)
    for view in reversed(views):
        rows = keep(view, (rows,))[0]
    columns = ops.astype(ops.round(w * (127.0 / ops.maximum(peak, TINY))), i8)
    sums = ops.astype(keep(node, (rows, columns))[0] if views else ops.int8_matmul(rows, columns), f32)
    if views:
        low, span = (ops.reshape(v, dims=(x.dims[0], *(1,) * (sums.rank - 1))) for v in (low, span))
    ones = ops.astype(ops.sum(ops.astype(columns, i32), axis=0), f32)
    return ops.multiply_add(low, ones, sums * (span * (1 / 255))) * (peak * (1 / 127))


__all__ = ["in_int8"]
