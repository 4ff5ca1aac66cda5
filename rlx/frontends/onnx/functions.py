"""Bodies of operators that are functions: of the model's own functions, and of ONNX's schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from rlx.frontends.onnx.call import Call, Refused
from rlx.frontends.onnx.structure import opsets, schema_of
from rlx.frontends.onnx.table import find
from rlx.ir.node import Value


class Body(NamedTuple):
    """A function body, the opsets of its nodes, and the attributes that they may refer to."""

    proto: onnx.FunctionProto
    opsets: Mapping[str, int]
    attrs: Mapping[str, onnx.AttributeProto]


def of_model(model: onnx.ModelProto, call: Call) -> Body | None:
    """The model's function of this name, which goes before operators of that name."""
    for f in model.functions:
        if (f.name, "" if f.domain == "ai.onnx" else f.domain) == (call.op, call.domain) and f.overload == call.overload:
            return _body(f, call, opsets(model))
    return None


def of_schema(call: Call) -> Body | None:
    """The body that the operator's schema gives for these operands."""
    schema = schema_of(call.op, call.opset, call.domain)
    if schema is None:
        return None
    defaults = {name: a.default_value for name, a in schema.attributes.items() if a.default_value.name}
    around = {name: call.scope.opset(name) for name in ("", "ai.onnx.ml")}
    if schema.has_function:
        return _body(schema.function_body, call, {**around, call.domain: schema.since_version}, defaults)
    if not schema.has_context_dependent_function:
        return None
    versions = schema.context_dependent_function_opset_versions
    version = max((v for v in versions if v <= call.opset), default=versions[0])
    node = onnx.NodeProto(op_type=call.op, domain=call.domain, output=call.outputs)
    node.input.extend("" if x is None else f"input{i}" for i, x in enumerate(call.inputs))
    node.attribute.extend(_protos(call).values())
    types = [_type(x).SerializeToString() for x in call.inputs]
    found = schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), types)
    return _body(onnx.FunctionProto.FromString(found), call, {**around, call.domain: version}, defaults) if found else None


def check_known(model: onnx.ModelProto, call: Call) -> None:
    """Refused: no operands make the operator one that can be imported."""
    schema = schema_of(call.op, call.opset, call.domain)
    made = schema is not None and (schema.has_function or schema.has_context_dependent_function)
    if not made and find(call.domain, call.op, call.opset) is None and of_model(model, call) is None:
        raise unknown(call)


def unknown(call: Call) -> Refused:
    """The refusal of an operator without handler and body."""
    name = f"{call.domain}.{call.op}" if call.domain else call.op
    if not onnx.defs.has(call.op, call.domain):
        return Refused(f"{call.where}: operator {name} is neither of ONNX {onnx.__version__} nor a function of the model")
    return Refused(f"{call.where}: operator {name} of opset {call.opset} is not supported")


def _body(
    proto: onnx.FunctionProto, call: Call, around: Mapping[str, int], defaults: Mapping[str, onnx.AttributeProto] | None = None
) -> Body:
    own = {a.name: a for a in proto.attribute_proto}
    return Body(proto, {**around, **opsets(proto)}, {**(defaults or {}), **own, **_protos(call)})


def _protos(call: Call) -> dict[str, onnx.AttributeProto]:
    """The attributes of a call as protos; those that another handler gave are made."""
    return call.protos if call.protos is not None else {name: _made(name, x) for name, x in call.attrs.items()}


def _made(name: str, x: Any) -> onnx.AttributeProto:
    return onnx.helper.make_attribute(name, numpy_helper.from_array(x) if isinstance(x, np.ndarray) else x)


def _type(x: Any) -> onnx.TypeProto:
    if isinstance(x, list):
        return onnx.helper.make_sequence_type_proto(_type(x[0])) if x else onnx.TypeProto()
    if x is None:
        return onnx.TypeProto()
    kind = x.dtype.numpy if isinstance(x, Value) else x.dtype
    dims = x.dims if isinstance(x, Value) else x.shape
    named = [d if isinstance(d, int) else str(d) for d in dims]
    return onnx.helper.make_tensor_type_proto(onnx.helper.np_dtype_to_tensor_dtype(kind), named)
