"""Mixed precision: casts around contractions. All other ops, and all inputs and outputs, keep their dtype.

The f32 operands of a contraction are cast to the policy's dtype (narrower operands are unchanged), accumulation is in f32 as in
every contraction of narrow operands, and the result is cast back to f32. Norms, softmax and other reductions stay f32. "auto"
means bf16 if the target is fast at it, else no change. A composite with contractions inside (attention) is narrowed as a whole
if the target claims the narrow form, kept if it claims only the f32 form, and otherwise decomposed so that its parts can be
narrowed. "int8" is implemented in rlx.compiler.int8.

Images are narrow in memory: an f32 value that a convolution reads is rounded where it is computed, and all that read it read the
rounded value. Views, concatenations, padding with zeros and max pools move rounded values. Where it is computed from the sum of
two convolutions element by element, the first of these is rounded too, since only the other is added where it is computed.
Depthwise convolutions sum f32 products of rounded images and f32 weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.compiler.compilation import Compilation
from rlx.compiler.int8 import few_channels, in_int8, widened
from rlx.compiler.legalise import expand, into_contractions
from rlx.compiler.pixels import whole_pixels
from rlx.errors import CompileError, GraphError, known
from rlx.ir.dtype import DTYPES, DType, f32
from rlx.ir.graph import Graph, Node, Value, keep, same_values
from rlx.ir.op import OPS, Kind
from rlx.ir.ops.index import PadAttrs
from rlx.ir.program import NodeReport

ADD, CAST, CONV = OPS["add"], OPS["cast"], OPS["conv"]
ACTIVATIONS = tuple(OPS[name] for name in ("relu", "clip"))
MOST_AROUND = 8  # a smaller part of a value is cast by itself: the kernel of the whole would store more than it saves


def precision(graph: Graph, compilation: Compilation, notes: list[NodeReport] | None = None) -> Graph:
    """`graph` with options.precision applied. CompileError: the target does not support that dtype.

    `notes` receives the nodes whose dtype changes ("narrowed"), and those that keep it for a stated reason ("kept").
    """
    integers = compilation.options.precision == "int8"
    narrow = _policy(compilation, "auto" if integers else compilation.options.precision)

    def native(node: Node, into: Sequence[int]) -> Node | None:
        slim = None if narrow is None else _on(node, narrow, into)
        return slim if slim is not None and compilation.is_native(slim) else None

    if integers:
        return in_int8(graph, compilation, native, notes)

    def whole(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        node = keep(node, inputs)[0].node
        return ((node.op is CONV and _whole_pixels(node, compilation, narrow)) or node).results

    if narrow is None:
        return graph.rebuild(whole) if any(n.op is CONV for n in graph.nodes()) else graph
    images = _images(graph, compilation)

    def note(node: Node, how: str, why: str) -> None:
        if notes is not None:
            notes.append(NodeReport(node.name or "", node.op.name, how, "", why))

    def stored(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if images.isdisjoint(node.results):
            return new(node, inputs)
        if _moves_images(node):
            return [v.astype(f32) for v in keep(node, tuple(_in(narrow, v) for v in inputs))]
        return [v.astype(narrow).astype(f32) if own in images else v for own, v in zip(node.results, new(node, inputs))]

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op is CONV and node.inputs[0] in images and node.attrs.groups > 1:  # type: ignore[union-attr]
            inputs = (_in(narrow, inputs[0]), *inputs[1:])
        results = keep(node, inputs)
        node = results[0].node
        if node.op is CONV and (wide := _whole_pixels(node, compilation, narrow)):
            node = wide
        if node.op.kind is Kind.CONTRACT and node.shapes[0].dtype == f32 and any(v.dtype == f32 for v in inputs):
            if compilation.target.levels and few_channels(node) and inputs[0].dtype == f32:
                note(node, "kept", f"its images have few channels: gathering {narrow} numbers takes longer than f32 products")
                return keep(node, tuple(_narrowed(v, narrow, f32) if v.dtype == f32 else v for v in inputs))
            note(node, "narrowed", f"{narrow} operands and result, f32 accumulation")
            slim = _on(node, narrow, range(len(inputs)))
            assert slim is not None, f"{node} takes no narrow operands"
            return widened(slim, node)
        into = into_contractions(node, compilation) if node.op.kind is Kind.COMPOSITE and node.op.decompose else None
        if into is None:
            return results
        if (slim := native(node, into)) is not None:
            note(node, "narrowed", f"native in {narrow}")
            return widened(slim, node)
        if compilation.is_native(node):
            note(node, "kept", f"native in f32, not in {narrow}")
            return results
        other = compilation.target.unclaimed.get(node.op.name)
        return expand(node, new, other and other(node))

    return graph.rebuild(stored)


def _in(dtype: DType, v: Value) -> Value:
    """`v` cast to `dtype`; of a cast from it, the operand."""
    return v.node.inputs[0] if v.node.op is CAST and v.node.inputs[0].dtype == dtype else v.astype(dtype)


def _images(graph: Graph, compilation: Compilation) -> set[Value]:
    """The f32 values that are rounded where they are computed."""
    found: set[Value] = set()
    todo = [n.inputs[0] for n in graph.nodes() if n.op is CONV]
    while todo:
        v = todo.pop()
        if v not in found and v.dtype == f32 and v.node.op.kind is not Kind.LEAF and not compilation.is_static(v.node):
            found.add(v)
            if _moves_images(v.node):
                todo += v.node.inputs
            elif (made := _origin(v, compilation).node).op is ADD:
                if all(x.dims == v.dims and _origin(x, compilation).node.op is CONV for x in made.inputs):
                    todo.append(made.inputs[0])
    return found


def _origin(v: Value, compilation: Compilation) -> Value:
    """The value from which `v` is computed element by element, beside values known before a run."""
    while (node := v.node).op.kind is Kind.POINTWISE or node.op in ACTIVATIONS:
        varying = [x for x in node.inputs if not compilation.is_static(x.node)]
        if len(varying) != 1 or varying[0].dims != v.dims:
            break
        (v,) = varying
    return v


def _moves_images(node: Node) -> bool:
    """True for ops whose results are elements of their operands, or of padding: rounding before them gives the same."""
    made = all(_as_view(v) is not v for v in node.results)
    return made or _moves(node) or node.op in (OPS["concat"], OPS["max_pool"])


def _whole_pixels(node: Node, compilation: Compilation, narrow: DType | None) -> Node | None:
    """A convolution of images of three channels on whole pixels. None: it is another, or the target has no such products."""
    x = node.inputs[0]
    dtype = narrow if x.dtype == f32 and narrow else x.dtype
    found = whole_pixels(node, compilation, dtype, _in(dtype, x) if x.node.op is CAST else x)
    return None if found is None else found.conv(found.image.astype(dtype), *node.inputs[2:])


def _policy(compilation: Compilation, wanted: str) -> DType | None:
    """The dtype of contraction operands; None: as declared."""
    target = compilation.target
    if wanted == "auto":
        fast = "bf16" in target.dtypes and any("bf16" in name for name in (*target.features, *target.quick))
        return DTYPES["bf16"] if fast else None
    if wanted in ("f32", "tf32"):  # the latter is a permission (Contract.tf32)
        return None
    if wanted not in target.dtypes:
        raise CompileError(f"precision={wanted!r}: no {wanted} on {target.name}; it has {known(target.dtypes)}")
    return DTYPES[wanted]


def _on(node: Node, narrow: DType, at: Sequence[int]) -> Node | None:
    """The node with f32 operands `at` cast to `narrow`; None if the op does not allow it."""
    inputs = tuple(_narrowed(v, narrow) if i in at and v.dtype == f32 else v for i, v in enumerate(node.inputs))
    try:
        shapes = node.op.result_shapes(node.attrs, tuple(v.shape for v in inputs))
    except GraphError:
        return None
    return Node(node.op, inputs, node.attrs, shapes, node.name, node.source)


def _narrowed(v: Value, narrow: DType, stored: DType | None = None) -> Value:
    """`v` cast to `narrow`: in front of views and padding of a computed value, so that its kernel rounds what it stores, once for
    all. `stored`: the dtype in which it is kept, if it is another."""

    def cast(x: Value) -> Value:
        return x.astype(narrow).astype(stored) if stored else x.astype(narrow)

    views: list[Node] = []
    root = _as_view(v)
    while _moves(root.node):
        views.append(root.node)
        root = _as_view(root.node.inputs[0])
    more = root.shape.num_elements / max(1, v.shape.num_elements)  # a view with windows repeats elements
    if (root.node.op.kind is Kind.LEAF and more >= 1) or more > MOST_AROUND:
        return cast(v)
    moved = cast(root)
    for view in reversed(views):
        (moved,) = Node(view.op, (moved,), view.attrs, (view.shapes[0].with_dtype(moved.dtype),), view.name, view.source).results
    return moved


def _moves(node: Node) -> bool:
    """True for a view, or padding with zeros."""
    zeros = isinstance(node.attrs, PadAttrs) and node.attrs.value == 0
    return (zeros or node.op.kind is Kind.VIEW) and len(node.inputs) == len(node.shapes) == 1


def _as_view(v: Value) -> Value:
    """A result of a composite that is made of views, such as split, as a view; any other value as it is."""
    node = v.node
    if node.op.kind is not Kind.COMPOSITE or node.op.decompose is None or len(node.inputs) != 1:
        return v
    made = node.op.decompose(node.attrs, *node.inputs)
    value = made if isinstance(made, Value) else made[v.index]
    return value if value.node.op.kind is Kind.VIEW and same_values(value.node.inputs, node.inputs) else v


__all__ = ["precision"]
