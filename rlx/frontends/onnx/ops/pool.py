"""Pools. Spatial dims follow batch and channels."""

from __future__ import annotations

import math
from typing import Any

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.conv import Ints, windows
from rlx.frontends.onnx.ops.shape import padded
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.node import Value, constant


@handler("MaxPool")
def max_pool(n: Call) -> Any:
    """The second result has positions in the whole operand, in row-major order, or in column-major order of the spatial dims."""
    x, at = n.value(0), windows(n, n.attr("kernel_shape"))
    if not n.wants(1):
        return ops.max_pool(x, window=at.window, **at.facts)
    values, places = ops.max_pool_indices(x, window=at.window, **at.facts)
    if n.attr("storage_order", 0):
        places = _column_major(places, n.sizes(0)[2:])
    return values, places


def _column_major(places: Value, sizes: Ints) -> Value:
    image = math.prod(sizes)
    inside, out, stride = places % image, places - places % image, 1
    parts = []
    for size in reversed(sizes):
        parts.insert(0, inside % size)
        inside = inside // size
    for part, size in zip(parts, sizes):
        out, stride = out + part * stride, stride * size
    return out


@handler("AveragePool", since=7)
def average_pool(n: Call) -> Value:
    at = windows(n, n.attr("kernel_shape"))
    facts: dict[str, Any] = at.facts | {"high": at.high, "extra": at.extra}
    return ops.avg_pool(n.value(0), window=at.window, count_padding=bool(n.attr("count_include_pad", 0)), **facts)


@handler("LpPool", since=2)
def lp_pool(n: Call) -> Value:
    at = windows(n, n.attr("kernel_shape"))
    return ops.lp_pool(n.value(0), window=at.window, p=float(n.attr("p", 2)), **at.facts)


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
