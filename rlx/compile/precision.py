"""The precision policy as casts around contractions; everything else, and every input and output, keeps its dtype.

A contraction of f32 operands gets them in the policy's dtype, accumulates in f32 as every contraction of narrow operands
does, and its result is widened again. Norms, softmax and other reductions stay f32. "auto" is bf16 where the target says
that it is fast at it, else nothing. A composite with contractions inside (attention) is narrowed whole if the target
claims the narrow form, kept if it claims only the f32 one, and otherwise decomposed so that its parts can be narrowed.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.compile.legalise import expand
from rlx.compile.options import CompileOptions
from rlx.errors import CompileError, GraphError, known
from rlx.ir.dtype import DTYPES, DType, f32
from rlx.ir.graph import CONSTANT, Graph, Node, Value, keep
from rlx.ir.op import Kind
from rlx.ir.program import NodeReport
from rlx.ir.target import Target


def precision(graph: Graph, target: Target, options: CompileOptions) -> Graph:
    """`graph` under options.precision. CompileError: the target does not have that dtype."""
    return _narrowed(graph, target, options, [])


def precision_report(graph: Graph, target: Target, options: CompileOptions) -> tuple[NodeReport, ...]:
    """The nodes whose dtype the policy changes ("narrowed"), or that it leaves for a stated reason ("kept")."""
    notes: list[NodeReport] = []
    _narrowed(graph, target, options, notes)
    return tuple(notes)


def _policy(target: Target, options: CompileOptions) -> DType | None:
    wanted = options.precision
    if wanted == "auto":
        fast = "bf16" in target.dtypes and any("bf16" in feature for feature in target.features)
        return DTYPES["bf16"] if fast else None
    if wanted == "f32":
        return None
    if wanted not in target.dtypes:
        raise CompileError(f"precision={wanted!r}: no {wanted} on {target.name}; it has {known(target.dtypes)}")
    return DTYPES[wanted]


def _narrowed(graph: Graph, target: Target, options: CompileOptions, notes: list[NodeReport]) -> Graph:
    narrow = _policy(target, options)
    if narrow is None:
        return graph

    def note(node: Node, how: str, why: str) -> None:
        notes.append(NodeReport(node.name or "", node.op.name, how, "", why))

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        results = keep(node, inputs)
        node = results[0].node
        if node.op.kind is Kind.CONTRACT and all(v.dtype == f32 for v in inputs):
            note(node, "narrowed", f"{narrow} operands and result, f32 accumulation")
            return _on(node, narrow, range(len(inputs)))
        into = _into_contractions(node) if node.op.kind is Kind.COMPOSITE else None
        if into is None or node.op.decompose is None:
            return results
        claim = target.natives.get(node.op.name)
        slim = _on(node, narrow, into) if claim else None
        if claim and slim and claim(_core(slim[0])) is None:
            note(node, "narrowed", f"native in {narrow}")
            return slim
        if claim and claim(node) is None:
            note(node, "kept", f"native in f32, not in {narrow}")
            return results
        return expand(node, new)

    return graph.rebuild(new)


def _on(node: Node, narrow: DType, at: Sequence[int]) -> Sequence[Value]:
    """The node with f32 operands `at` cast to `narrow` and its results cast back; nothing if the op does not allow it."""
    inputs = tuple(v.astype(narrow) if i in at and v.dtype == f32 else v for i, v in enumerate(node.inputs))
    try:
        shapes = node.op.result_shapes(node.attrs, tuple(v.shape for v in inputs))
    except GraphError:
        return ()
    made = Node(node.op, inputs, node.attrs, shapes, node.name, node.source)
    return tuple(v if v.dtype == want.dtype else v.astype(want.dtype) for v, want in zip(made.results, node.shapes))


def _core(value: Value) -> Node:
    """The node under the cast that _on may have put on its result."""
    return value.node if value.node.name is not None or len(value.node.inputs) != 1 else value.node.inputs[0].node


def _into_contractions(node: Node) -> list[int] | None:
    """Operands of a composite that go into a contraction of it as they are, moved or scaled; None: it has no contraction."""
    operands = set(node.inputs)
    found: set[Value] = set()
    contracts = False

    def visit(inner: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        nonlocal contracts
        results = keep(inner, inputs)
        if inner.op.kind is Kind.COMPOSITE and inner.op.decompose is not None:
            return expand(results[0].node, visit)
        if inner.op.kind is Kind.CONTRACT:
            contracts = True
            todo = list(inputs)
            while todo:
                v = todo.pop()
                if v in operands:
                    found.add(v)
                elif v.node.op.kind in (Kind.VIEW, Kind.POINTWISE):
                    varying = [x for x in v.node.inputs if x.node.op is not CONSTANT]
                    todo += varying if len(varying) == 1 else []
        return results

    expand(node, visit)
    return [i for i, v in enumerate(node.inputs) if v in found] if contracts else None


__all__ = ["precision", "precision_report"]
