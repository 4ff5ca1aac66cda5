"""The structure of an ONNX model: names, order of nodes, arity, attributes and versions. All faults are listed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import onnx

OLDEST = 7  # opset that handlers know
_GRAPHS = onnx.AttributeProto.GRAPH
DEEP = 64  # graphs inside each other


def faults(model: onnx.ModelProto) -> list[str]:
    """Contradictions in a model, and versions that are too new or too old, as messages with places."""
    if not model.graph.node and not model.graph.output:
        return ["it has no graph, so it is no ONNX model"]
    return [*_versions(model), *_graph(model, model.graph, frozenset(), "", 0), *_functions(model)]


def opsets(proto: onnx.ModelProto | onnx.FunctionProto) -> dict[str, int]:
    """The version of each domain."""
    return {"" if o.domain == "ai.onnx" else o.domain: o.version for o in proto.opset_import}


def _versions(model: onnx.ModelProto) -> Iterator[str]:
    newest = onnx.defs.onnx_opset_version()
    if model.ir_version > onnx.IR_VERSION:
        yield f"IR version {model.ir_version} is newer than {onnx.IR_VERSION}, the newest of onnx {onnx.__version__}: update onnx"
    if not model.opset_import:
        yield "the model does not say which opset it is of"
    for o in (*model.opset_import, *(o for f in model.functions for o in f.opset_import)):
        if not 0 < o.version < 1 << 31:
            yield f"the opset {o.version} of domain {o.domain!r} is no version"
        if o.domain in ("", "ai.onnx") and o.version > newest:
            yield f"opset {o.version} is newer than {newest}, the newest of onnx {onnx.__version__}: update onnx"


def _graph(model: onnx.ModelProto, graph: onnx.GraphProto, outer: frozenset[str], place: str, depth: int) -> Iterator[str]:
    if depth > DEEP:
        yield f"{place}more than {DEEP} graphs are inside each other"
        return
    yield from (f"{place}two inputs are called {n!r}" for n in _twice(i.name for i in graph.input))
    initial = [t.name for t in graph.initializer] + [t.values.name for t in graph.sparse_initializer]
    yield from (f"{place}two initialisers are called {n!r}" for n in _twice(initial))
    for info in (*graph.input, *graph.output):
        yield from _type(info, place)
    makers: dict[str, int] = {}
    for at, node in enumerate(graph.node):
        for name in node.output:
            makers.setdefault(name, at)
    known = {"", *outer, *(i.name for i in graph.input), *initial}
    own = {i.name for i in graph.input} | set(initial)
    for at, node in enumerate(graph.node):
        where = f"{place}node {at} {node.op_type}" + (f" {node.name!r}" if node.name else "")
        if not all(isinstance(s, str) for s in (node.op_type, node.domain, *node.input, *node.output)):
            yield f"{where} has names that are no UTF-8 text"  # protobuf gives them as bytes
            continue
        for name in (n for n in dict.fromkeys(node.input) if n not in known):
            late = f"node {makers[name]} makes, which is not before it" if name in makers else "no node and no input makes"
            yield f"{where} reads {name!r}, which {late}"
        yield from _arity(model, node, where)
        for a in node.attribute:
            for i, inner in enumerate([a.g] if a.type == _GRAPHS else a.graphs):
                yield from _graph(model, inner, frozenset(known), f"{where}, {a.name}{f' {i}' if i else ''}: ", depth + 1)
        for name in filter(None, node.output):
            if name in own:
                yield f"{where} makes {name!r}, which is made already"
            own.add(name)
        known.update(node.output)
    yield from (f"{place}the output {o.name!r} is made by no node" for o in graph.output if o.name not in known or not o.name)
    if not depth:
        yield from (f"two outputs are called {n!r}" for n in _twice(o.name for o in graph.output))


def _functions(model: onnx.ModelProto) -> Iterator[str]:
    keys = [(f.domain, f.name, f.overload) for f in model.functions]
    yield from (f"two functions are called {'.'.join(filter(None, k))}" for k in _twice(keys))
    for f in model.functions:
        if not all(isinstance(s, str) for n in f.node for s in (n.op_type, n.domain, *n.input, *n.output)):
            yield f"function {f.domain}.{f.name} has nodes with names that are no UTF-8 text"
            continue
        known, place = {"", *f.input}, f"function {f.domain}.{f.name}, "
        for at, node in enumerate(f.node):
            where = f"{place}node {at} {node.op_type}"
            yield from (f"{where} reads {n!r}, which is made by no node before it" for n in node.input if n not in known)
            known.update(node.output)
        yield from (f"{place}the output {n!r} is made by no node" for n in f.output if n not in known)


def _type(info: onnx.ValueInfoProto, place: str) -> Iterator[str]:
    if info.type.tensor_type.elem_type not in onnx.TensorProto.DataType.values():
        yield f"{place}{info.name!r} has elements of type {info.type.tensor_type.elem_type}, which onnx does not know"
    for axis, d in enumerate(info.type.tensor_type.shape.dim):
        if d.HasField("dim_value") and d.dim_value < 0:
            yield f"{place}dim {axis} of {info.name!r} is {d.dim_value}"


def _arity(model: onnx.ModelProto, node: onnx.NodeProto, where: str) -> Iterator[str]:
    """Operands, results and attributes that the operator does not have."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    if any(f.name == node.op_type and f.domain == node.domain for f in model.functions):
        return
    yield from (f"{where} has two attributes {n!r}" for n in _twice(a.name for a in node.attribute))
    version = opsets(model).get(domain, 1)
    schema = schema_of(node.op_type, version, domain)
    if schema is None:  # the importer says so; but onnx, which converts old models, crashes on operators of later versions
        if not domain and version < OLDEST:
            yield f"{where} is no operator of opset {version}"
        return
    for label, count, least, most in (
        ("operands", len(node.input), schema.min_input, schema.max_input),
        ("results", len(node.output), schema.min_output, schema.max_output),
    ):
        if not least <= count <= most:
            wanted = str(least) if least == most else f"{least} to {most}" if most < 1 << 30 else f"at least {least}"
            yield f"{where} has {count} {label}, and the operator {wanted}"
    for a in node.attribute:
        found = schema.attributes.get(a.name)
        if found is None:
            yield f"{where} has an attribute {a.name!r}, which the operator does not have"
        elif a.type != found.type.value and not a.ref_attr_name:
            kinds = onnx.AttributeProto.AttributeType
            named = kinds.Name(a.type) if a.type in kinds.values() else str(a.type)
            yield f"{where}: attribute {a.name!r} is of type {named}, the operator's {kinds.Name(found.type.value)}"
    given = {a.name for a in node.attribute}
    for name, found in schema.attributes.items():
        if found.required and name not in given:
            yield f"{where}: the attribute {name!r} is missing"


def schema_of(op: str, version: int, domain: str) -> Any:
    """ONNX's schema of an operator in an opset; None: it has none."""
    try:
        return onnx.defs.get_schema(op, version, domain) if 0 < version < 1 << 31 else None
    except onnx.defs.SchemaError:
        return None


def _twice(names: Iterable[Any]) -> list[Any]:
    seen: set[Any] = set()
    return list(dict.fromkeys(n for n in names if n in seen or seen.add(n)))


__all__ = ["OLDEST", "faults", "opsets", "schema_of"]
