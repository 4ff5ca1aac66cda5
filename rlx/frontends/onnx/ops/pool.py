"""Pools. Spatial dims follow batch and channels."""

from __future__ import annotations

import math

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.shape import padded
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.node import Value, constant


@handler("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(n: Call) -> Value:
    x, axes = n.value(0), tuple(range(2, n.rank(0)))
    if n.op == "GlobalLpPool":
        p = float(n.attr("p", 2))
        return ops.pow(ops.sum(ops.pow(ops.abs(x), constant(p, x.dtype)), axis=axes, keepdims=True), constant(1 / p, x.dtype))
    return (ops.mean if n.op == "GlobalAveragePool" else ops.max)(x, axis=axes, keepdims=True)


@handler("MaxUnpool", since=9)
def max_unpool(n: Call) -> Value:
    """Elements back at the positions that MaxPool gave, and zeros elsewhere."""
    x, window = n.value(0), n.attr("kernel_shape")
    count = len(window)
    strides, pads = n.attr("strides", (1,) * count), n.attr("pads", (0,) * (2 * count))
    own = [(d - 1) * s - pads[i] - pads[count + i] + w for i, (d, s, w) in enumerate(zip(n.sizes(0)[2:], strides, window))]
    dims = (*n.sizes(0)[:2], *own)
    flat = functions.zeros((math.prod(dims),), x.dtype)
    made = ops.scatter_elements(flat, n.value(1).reshape((-1,)), x.reshape((-1,)), axis=0).reshape(dims)
    wanted = n.ints(2, None, dims)
    return padded(n, made, [0] * len(dims), [w - d for w, d in zip(wanted, dims)], "constant")
