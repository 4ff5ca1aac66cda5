"""Mixed precision: casts around contractions. All other ops, and all inputs and outputs, keep their dtype.

The f32 operands of a contraction are cast to the policy's dtype (narrower operands are unchanged), accumulation is in f32 as in
every contraction of narrow operands, and the result is cast back to f32. Norms, softmax and other reductions stay f32. "auto"
means bf16 if the target is fast at it, else no change. A composite with contractions inside (attention) is narrowed as a whole
if the target claims the narrow form, kept if it claims only the f32 form, and otherwise decomposed so that its parts can be
narrowed. "int8" is implemented in rlx.compiler.int8.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.compiler.compilation import Compilation
from rlx.compiler.int8 import few_channels, in_int8
from rlx.compiler.legalise import expand, into_contractions
from rlx.errors import CompileError, GraphError, known
from rlx.ir.dtype import DTYPES, DType, f32
from rlx.ir.graph import Graph, Node, Value, keep
from rlx.ir.op import Kind
from rlx.ir.ops.index import PadAttrs
from rlx.ir.program import NodeReport

MOST_AROUND = 8  # a smaller part of a value is cast by itself: the kernel of the whole would store more than it saves


def precision(graph: Graph, compilation: Compilation, notes: list[NodeReport] | None = None) -> Graph:
    """`graph` with options.precision applied. CompileError: the target does not support that dtype.

    `notes` receives the nodes whose dtype changes ("narrowed"), and those that keep it for a stated reason ("kept").
    """
    if compilation.options.precision == "int8":
        return in_int8(graph, compilation, notes)
    narrow = _policy(compilation)
    if narrow is None:
        return graph

    def note(node: Node, how: str, why: str) -> None:
        if notes is not None:
            notes.append(NodeReport(node.name or "", node.op.name, how, "", why))

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        results = keep(node, inputs)
        node = results[0].node
        if node.op.kind is Kind.CONTRACT and node.shapes[0].dtype == f32 and any(v.dtype == f32 for v in inputs):
            if compilation.target.levels and few_channels(node):  # windows are read where they lie in f32, and would be copied
                note(node, "kept", f"its images have few channels: gathering {narrow} in groups takes longer than f32")
                return results
            note(node, "narrowed", f"{narrow} operands and result, f32 accumulation")
            return _widened(_on(node, narrow, range(len(inputs))), node)
        into = into_contractions(node) if node.op.kind is Kind.COMPOSITE and node.op.decompose else None
        if into is None:
            return results
        slim = _on(node, narrow, into)
        if slim is not None and compilation.is_native(slim):
            note(node, "narrowed", f"native in {narrow}")
            return _widened(slim, node)
        if compilation.is_native(node):
            note(node, "kept", f"native in f32, not in {narrow}")
            return results
        return expand(node, new)

    return graph.rebuild(new)


def _policy(compilation: Compilation) -> DType | None:
    """The dtype of contraction operands; None: as declared."""
    target, wanted = compilation.target, compilation.options.precision
    if wanted == "auto":
        fast = "bf16" in target.dtypes and any("bf16" in feature for feature in target.features)
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


def _narrowed(v: Value, narrow: DType) -> Value:
    """`v` cast to `narrow`: in front of views and padding of a computed value, so that its kernel rounds what it stores, once for
    all."""
    views: list[Node] = []
    root = _as_view(v)
    while _moves(root.node):
        views.append(root.node)
        root = _as_view(root.node.inputs[0])
    more = root.shape.num_elements / max(1, v.shape.num_elements)  # a view with windows repeats elements
    if (root.node.op.kind is Kind.LEAF and more >= 1) or more > MOST_AROUND:
        return v.astype(narrow)
    moved = root.astype(narrow)
    for view in reversed(views):
        (moved,) = Node(view.op, (moved,), view.attrs, (view.shapes[0].with_dtype(narrow),), view.name, view.source).results
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
    return value if value.node.op.kind is Kind.VIEW and value.node.inputs == node.inputs else v


def _widened(slim: Node | None, node: Node) -> Sequence[Value]:
    """The results of the narrowed node, cast to the dtypes of the original node."""
    assert slim is not None, f"{node} takes no narrow operands"
    return tuple(v if v.dtype == want.dtype else v.astype(want.dtype) for v, want in zip(slim.results, node.shapes))


__all__ = ["precision"]
