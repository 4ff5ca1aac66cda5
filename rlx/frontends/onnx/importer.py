"""From an ONNX model to a graph: walks the nodes and calls the handler of each operator.

What is known at import is computed at import: a node whose operands are all known is evaluated by the references of the ops that
its handler made. Nodes without a handler are replaced by the function body that the model, or ONNX's schema, has for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from rlx.errors import GraphError, Unsupported
from rlx.frontends.onnx.call import Call, NotKnown, Operand, Refused
from rlx.frontends.onnx.table import find
from rlx.ir.dtype import as_dtype
from rlx.ir.evaluate import evaluate_node
from rlx.ir.graph import CONSTANT, Graph
from rlx.ir.node import Value, constant, postorder

FEW = 64  # initialisers of at most this many elements are known at import: constants; larger ones are params


class _Missing:
    """The result of a refused node: nodes that read it are skipped."""


MISSING = _Missing()


class GraphScope:
    """The names of one graph, with those of the graphs around it."""

    def __init__(self, importer: Importer, outer: GraphScope | None, opsets: Mapping[str, int]) -> None:
        self.importer, self.outer, self.opsets = importer, outer, opsets
        self.names: dict[str, Any] = {"": None}

    def __getitem__(self, name: str) -> Any:
        if name in self.names:
            return self.names[name]
        if self.outer is None:
            raise GraphError(f"no node and no input makes {name!r}, which is read")
        return self.outer[name]

    def opset(self, domain: str) -> int:
        return self.opsets.get("" if domain == "ai.onnx" else domain, 1)

    def contents(self, value: Value) -> np.ndarray | None:
        """The array of a constant or of an initialiser; None: known at run time only."""
        return self.importer.contents(value)

    def graph(self, proto: onnx.GraphProto, operands: Sequence[Operand] | None = None) -> list[Any]:
        """The outputs of a graph."""
        for tensor in proto.initializer:
            self.names[tensor.name] = self.importer.initialiser(tensor)
        if operands is not None:
            self.names.update(zip((i.name for i in proto.input), operands, strict=True))
        for at, node in enumerate(proto.node):
            self.node(node, at)
        return [self[o.name] for o in proto.output]

    def inner(self, proto: onnx.GraphProto, operands: Sequence[Operand]) -> list[Any]:
        return GraphScope(self.importer, self, self.opsets).graph(proto, operands)

    def node(self, node: onnx.NodeProto, at: int) -> None:
        inputs = [self[name] for name in node.input]
        where = f"node {at} {node.op_type}" + (f" {node.name!r}" if node.name else "")
        if any(x is MISSING for x in inputs):
            results: Sequence[Any] = [MISSING] * len(node.output)
        else:
            try:
                attrs = {a.name: _attribute(a) for a in node.attribute}
                domain = "" if node.domain == "ai.onnx" else node.domain
                results = self.apply(node.op_type, domain, self.opset(domain), inputs, list(node.output), attrs, where)
            except (Refused, GraphError, Unsupported) as e:
                self.importer.refusals.append(str(e) if isinstance(e, Refused) else f"{where}: {e}")
                results = [MISSING] * len(node.output)
        for name, x in zip(node.output, results, strict=True):
            if name:
                self.names[name] = x

    def apply(
        self, op: str, domain: str, opset: int, inputs: Sequence[Operand], outputs: Sequence[str],
        attrs: dict[str, Any], where: str,
    ) -> list[Any]:  # fmt: skip
        """The results of one operator, as many as `outputs`."""
        call = Call(self, op, domain, opset, inputs, outputs, attrs, where)
        handle = find(domain, op, opset)
        if handle is None:
            raise Refused(f"{where}: no handler")  # function bodies
        made = handle(call)
        results = list(made) if isinstance(made, tuple) else [made]
        results += [None] * (len(outputs) - len(results))
        return [self.importer.folded(x) for x in results[: len(outputs)]]


def _attribute(proto: onnx.AttributeProto) -> Any:
    found = onnx.helper.get_attribute_value(proto)
    if isinstance(found, bytes):
        return found.decode("utf-8", "replace")
    if isinstance(found, onnx.TensorProto):
        return numpy_helper.to_array(found)
    if isinstance(found, Iterable) and not isinstance(found, str) and not isinstance(found, onnx.GraphProto):
        return tuple(x.decode("utf-8", "replace") if isinstance(x, bytes) else x for x in found)
    return found


class Importer:
    """One import: sizes of named dims, contents of inputs that must be known, and the graph."""

    def __init__(self, model: onnx.ModelProto, dims: Mapping[str, int], values: Mapping[str, np.ndarray]) -> None:
        self.model, self.dims, self.known = model, dims, values
        self.graph = Graph(model.graph.name or "onnx")
        self.weights: dict[str, np.ndarray] = {}
        self.refusals: list[str] = []

    def run(self) -> Graph:
        proto = self.model.graph
        scope = GraphScope(self, None, {"" if o.domain == "ai.onnx" else o.domain: o.version for o in self.model.opset_import})
        own = {t.name for t in proto.initializer}
        for info in proto.input:
            if info.name not in own:
                scope.names[info.name] = self.known[info.name] if info.name in self.known else self.input(info)
        outputs = scope.graph(proto)
        if self.refusals:
            raise Unsupported(f"{len(self.refusals)} nodes are refused: " + "; ".join(self.refusals))
        self.graph.set_outputs([constant(x) if isinstance(x, np.ndarray) else x for x in outputs], [o.name for o in proto.output])
        return self.graph

    def input(self, info: onnx.ValueInfoProto) -> Value:
        tensor = info.type.tensor_type
        dims = [d.dim_value if d.HasField("dim_value") else self.dims.get(d.dim_param, d.dim_param) for d in tensor.shape.dim]
        return self.graph.input(info.name, tuple(dims), as_dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)))

    def initialiser(self, tensor: onnx.TensorProto) -> Operand:
        array = numpy_helper.to_array(tensor)
        if array.size <= FEW:
            return array
        self.weights[tensor.name] = array
        return self.graph.param(tensor.name, array.shape, as_dtype(array.dtype))

    def contents(self, value: Value) -> np.ndarray | None:
        if value.node.op is CONSTANT:
            return evaluate_node(value.node, ())[0]
        return self.weights.get(value.name or "") if value in set(self.graph.params) else None

    def folded(self, x: Any) -> Any:
        """`x` as an array if it depends on constants alone."""
        if isinstance(x, list):
            return [self.folded(e) for e in x]
        if not isinstance(x, Value) or any(v.node.op is not CONSTANT for v in leaves(x)):
            return x
        found: dict[Value, np.ndarray] = {}
        for node in postorder([x], ())[0]:
            found.update(zip(node.results, evaluate_node(node, tuple(found[v] for v in node.inputs)), strict=True))
        return found[x]


def leaves(x: Value) -> list[Value]:
    """The leaves that a value is computed from."""
    return [n.results[0] for n in postorder([x], ())[0] if not n.inputs]


def from_onnx(
    model: onnx.ModelProto | str | PathLike[str], dims: Mapping[str, int] | None = None, values: Mapping[str, Any] | None = None
) -> Graph:
    """The graph of an ONNX model. `dims`: sizes of its named dims. `values`: contents of inputs that must be known at import.

    Unsupported: lists every node that is refused."""
    proto = model if isinstance(model, onnx.ModelProto) else onnx.load(model)
    try:
        return Importer(proto, dims or {}, {k: np.asarray(v) for k, v in (values or {}).items()}).run()
    except NotKnown as e:
        names = sorted(v.name or "" for v in leaves(e.value) if v.node.op is not CONSTANT)
        raise Unsupported(f"{e}, and it depends on {', '.join(names)}: give values={{...}}") from None
