"""precision="int8": contractions of f32 with weights in 8-bit integers, scaled per row and per column.

Activations are quantised dynamically: each row of the left operand is rounded to the nearest of 256 levels from its least to
its largest element, at every run. Each column of the weights is rounded to the nearest of 255 levels around zero, once, when
they are set. Products and their sums are exact integers. The epilogue scales them and adds the zero-point term (the
contribution of the rows' least elements). The rows of a convolution overlap, unless a window is one pixel: their elements, with
the padding, are rounded between the least and the largest of their image. So a result differs from the exact one by at most
span(x)/510 * sum|w| + max|w|/254 * sum(|x| + span(x)/510), in addition to f32 rounding.

A row with a NaN or an infinity gives NaN everywhere, and so does a column of such weights. Attention is narrowed as by "auto", to
bf16 operands where the target is fast at it. Other contractions of two activations, those of other dtypes, or with a depth at
which sums might exceed 32 bits are unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlx.compiler.compilation import Compilation
from rlx.compiler.layout import seen_through
from rlx.compiler.legalise import expand, into_contractions
from rlx.compiler.packing import contraction, is_matrix
from rlx.compiler.pixels import Pixels, whole_pixels
from rlx.errors import CompileError, known
from rlx.ir import ops
from rlx.ir.dtype import f32, i8, i32, u8
from rlx.ir.graph import Graph, Node, Value, keep
from rlx.ir.layout import Layout
from rlx.ir.op import OPS, Kind
from rlx.ir.ops.conv import ConvAttrs
from rlx.ir.program import NodeReport
from rlx.ir.shape import contiguous_strides

CAST = OPS["cast"]
TINY = 1e-30  # lower bound of a span or magnitude, so that its reciprocal is finite
FEW_CHANNELS = 4  # of a colour image
MOST_DEPTH = 1 << 16  # sums of 255 * 127 stay in 31 bits


Slim = Callable[[Node, Sequence[int]], Node | None]


def in_int8(graph: Graph, compilation: Compilation, slim: Slim, notes: list[NodeReport] | None = None) -> Graph:
    """`graph` with contractions with weights on integers. CompileError: the target lacks the dtypes.

    `slim`: a composite with those operands, which go into contractions, in a narrow float; None: the target has no such kernel.
    `notes` receives the changed nodes ("narrowed") and the unchanged contractions with the reason ("kept")."""
    if missing := {"u8", "i8", "i32"} - (target := compilation.target).dtypes:
        raise CompileError(f"precision='int8': no {known(missing)} on {target.name}; it has {known(target.dtypes)}")

    def note(node: Node, why: str = "", dtype: str = "8-bit integers") -> None:
        if notes is not None:
            notes.append(NodeReport(node.name or "", node.op.name, "kept" if why else "narrowed", "", why or dtype))

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        node = keep(node, inputs)[0].node
        if isinstance(node.attrs, ConvAttrs) and node.inputs[0].dtype == node.inputs[1].dtype == f32:
            if (pixels := whole_pixels(node, compilation, u8, node.inputs[0])) is not None:
                note(node)
                return (_of_pixels(pixels, *node.inputs[2:]),)
        into = into_contractions(node, compilation) if node.op.kind is Kind.COMPOSITE and node.op.decompose else None
        if into is not None:
            if (made := slim(node, into)) is not None:
                note(node, dtype=f"native in {made.inputs[0].dtype}")
                return widened(made, node)
            return node.results if compilation.is_native(node) else expand(node, new)
        if node.op.kind is not Kind.CONTRACT or any(v.dtype != f32 for v in inputs) or compilation.is_static(inputs[0].node):
            return node.results
        why = "" if compilation.is_static(inputs[1].node) else "its right operand is not a weight"
        facts = contraction(node)
        depth = math.prod(inputs[0].shape.static[axis] for axis in facts.a_sum)
        if not why and not (is_matrix(facts) and 0 < depth < MOST_DEPTH):
            why = "its weights are not a matrix, or too deep for sums in 32 bits"
        image, views = (inputs[0], []) if len(facts.a_sum) == 1 else _pixels(node) or _image(inputs[0])
        if not why and image is None:
            why = "its rows are not windows of images that lie one after another"
        elif not why and few_channels(node):
            why = "its images have few channels: to gather their bytes in fours takes longer than to multiply f32"
        note(node, why)
        return node.results if why or image is None else (_product(node, image, views, inputs[1], target.threads == 1),)

    return graph.rebuild(new)


def widened(slim: Node, node: Node) -> Sequence[Value]:
    """The results of the narrowed node, cast to the dtypes of the original node."""
    return tuple(v if v.dtype == want.dtype else v.astype(want.dtype) for v, want in zip(slim.results, node.shapes))


def few_channels(node: Node) -> bool:
    """True for a contraction of windows of images with few channels, which instructions for narrow dtypes would sum in groups."""
    return len(contraction(node).a_sum) > 1 and node.inputs[0].shape.static[-1] <= FEW_CHANNELS


def _pixels(node: Node) -> tuple[Value, list[Node]] | None:
    """(the left operand as a matrix, no views) if its windows are one pixel each."""
    x, depth = node.inputs[0], len(contraction(node).a_sum)
    dims = (*x.dims[: x.rank - depth], x.dims[-1])
    return None if math.prod(x.shape.static[-depth:-1]) > 1 else (ops.reshape(x, dims=dims), [])


def _viewed(x: Value) -> tuple[Value, list[Node]]:
    """(the value of which `x` is a view, the views, outermost first)."""
    views = list[Node]()
    while x.node.op.kind is Kind.VIEW and len(x.node.shapes) == 1:
        views.append(x.node)
        x = x.node.inputs[0]
    return x, views


def _seen_by(views: Sequence[Node], x: Value) -> Value:
    """Another value through the same views."""
    for view in reversed(views):
        (x,) = keep(view, (x,))
    return x


def _image(x: Value) -> tuple[Value | None, list[Node]]:
    """(the images of which `x` [images, …] is a view, the views, outermost first); None: an image is not one part of them."""
    image, views = _viewed(x)
    layout = Layout(contiguous_strides(image.shape.static))
    for view in reversed(views):
        found = seen_through(view.results[0], layout) if layout else None
        layout = found
    if layout is None or not x.rank or not image.rank or x.dims[0] != image.dims[0]:
        return None, views
    apart = math.prod(image.shape.static[1:])
    inside = sum((d - 1) * stride for d, stride in zip(x.shape.static[1:], layout.strides[1:]))
    return (image if layout.strides[0] == apart and layout.offset + inside < apart else None), views


def _with(found: Value, way: Callable[..., Value], around: float | None) -> Value:
    """The least or the largest element, of the padding too."""
    return found if around is None else (ops.minimum if way is ops.min else ops.maximum)(found, around)


def _bytes(x: Value, low: Value, span: Value) -> Value:
    """Elements in 256 levels from the least one on."""
    return ops.astype(ops.round((x - low) * (255.0 / ops.maximum(span, TINY))), u8)


def _uncast(x: Value) -> Value:
    """`x` before a cast of a narrower float to f32, also in front of views: rows are read, and compared, as they are stored."""
    root, views = _viewed(x)
    if root.node.op is not CAST or not (moved := root.node.inputs[0]).dtype.is_float or moved.dtype.itemsize >= f32.itemsize:
        return x
    return _seen_by(views, moved)


def _columns(w: Value) -> tuple[Value, Value]:
    """(weights in 255 levels around zero, the magnitude that is 127, by column)."""
    peak = ops.max(ops.abs(w), axis=tuple(range(w.rank - 1)))
    return ops.astype(ops.round(w * (127.0 / ops.maximum(peak, TINY))), i8), peak


def _scaled(sums: Value, low: Value, span: Value, columns: Value, peak: Value) -> Value:
    """The floats of sums over rows with these levels. Of images: one level for all rows of each."""
    if low.shape.num_elements == sums.shape.static[0] and sums.rank > 2:
        low, span = (ops.reshape(v, dims=(sums.dims[0], *(1,) * (sums.rank - 1))) for v in (low, span))
    ones = ops.astype(ops.sum(ops.astype(columns, i32), axis=tuple(range(columns.rank - 1))), f32)
    return ops.multiply_add(low, ones, ops.astype(sums, f32) * (span * (1 / 255))) * (peak * (1 / 127))


def _product(node: Node, x: Value, views: Sequence[Node], w: Value, alone: bool) -> Value:
    """The contraction on integers: of x [..., k], or of `views` of the images x, by w [k, n]. `alone`: one thread computes an
    image as one row, in one kernel; several share its elements in kernels of their own."""
    each = ops.reshape(x, dims=(x.dims[0], math.prod(x.shape.static[1:]))) if views and alone else _uncast(x)
    axes = tuple(range(1, each.rank)) if views else (-1,)
    low, most = (way(each, axis=axes, keepdims=True).astype(f32) for way in (ops.min, ops.max))
    rows, (columns, peak) = _bytes(each.astype(f32), low, span := most - low), _columns(w)
    rows = ops.reshape(rows, dims=x.dims)
    rows = _seen_by(views, rows)
    sums = keep(node, (rows, columns))[0] if views else ops.int8_matmul(rows, columns)
    return _scaled(sums, low, span, columns, peak)


def _of_pixels(pixels: Pixels, bias: Value | None = None) -> Value:
    """The convolution on integers. Numbers that only weights of zero meet need not be among the levels."""
    x, inside = pixels.image, pixels.image.node.inputs[0]
    axes = tuple(range(1, x.rank))
    low, most = (_with(way(inside, axis=axes, keepdims=True), way, pixels.around) for way in (ops.min, ops.max))
    rows, (columns, peak) = _bytes(x, low, span := most - low), _columns(pixels.weights)
    (sums,) = pixels.conv(rows, weights=columns).results
    made = _scaled(sums, low, span, columns, peak)
    return made if bias is None else made + bias


__all__ = ["few_channels", "in_int8", "widened"]
