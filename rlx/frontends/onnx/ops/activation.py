"""Activation functions, softmax and its relatives."""

from __future__ import annotations

from typing import Any

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.shape import elements
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.node import Value

# By operator: the function, and its attributes with their names there and defaults, in order.
_ACTIVATIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Relu": (ops.relu, {}),
    "Sigmoid": (ops.sigmoid, {}),
    "Softplus": (ops.softplus, {}),
    "Softsign": (functions.softsign, {}),
    "Mish": (functions.mish, {}),
    "HardSwish": (functions.hard_swish, {}),
    "Gelu": (ops.gelu, {"approximate": "none"}),
    "Swish": (functions.swish, {"alpha": 1.0}),
    "LeakyRelu": (functions.leaky_relu, {"alpha": 0.01}),
    "Elu": (functions.elu, {"alpha": 1.0}),
    "Celu": (functions.celu, {"alpha": 1.0}),
    "Selu": (functions.selu, {"alpha": 1.6732632423543772, "gamma": 1.0507009873554805}),
    "HardSigmoid": (functions.hard_sigmoid, {"alpha": 0.2, "beta": 0.5}),
    "ThresholdedRelu": (functions.thresholded_relu, {"alpha": 1.0}),
    "Shrink": (functions.shrink, {"lambd": 0.5, "bias": 0.0}),
}


@handler(*_ACTIVATIONS, since=6)
def activation(n: Call) -> Value:
    function, attrs = _ACTIVATIONS[n.op]
    return function(n.value(0), *(n.attr(name, default) for name, default in attrs.items()))


@handler("PRelu", since=7)
def prelu(n: Call) -> Value:
    """The conversion from opset 6 leaves the slopes per channel as they are."""
    x, slope = n.value(0), n.value(1)
    per_channel = n.scope.importer.source.converted and x.rank > 1
    return functions.prelu(x, slope.reshape((-1, *(1,) * (x.rank - 2))) if per_channel else slope)


_ALONG = {"Softmax": ops.softmax, "LogSoftmax": ops.log_softmax}


@handler("Softmax", "LogSoftmax", "Hardmax", since=13)
def along_axis(n: Call) -> Value:
    return _normalised(n.op, n.value(0), n.axis(-1))


@handler("Softmax", "LogSoftmax", "Hardmax")
def along_matrix(n: Call) -> Value:
    """Before opset 13: over all dims from `axis` on, together."""
    x, axis = n.value(0), n.axis(1)
    flat = x.reshape((*x.dims[:axis], elements(x.dims[axis:])))
    return _normalised(n.op, flat, axis).reshape(x.dims)


def _normalised(op: str, x: Value, axis: int) -> Value:
    if op != "Hardmax":
        return _ALONG[op](x, axis=axis)
    place = ops.iota(dims=x.dims, axis=axis)
    return ops.equal(place, ops.argmax(x, axis=axis, keepdims=True)).astype(x.dtype)
