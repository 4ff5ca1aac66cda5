"""Normalisations, dropout, and losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.elementwise import dtype_of
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.node import Value


@handler("BatchNormalization", since=7)
def batch_normalization(n: Call) -> Any:
    """In training mode, from opset 14 on, by the batch's own mean and variance, with the running ones as results. Statistics per
    element of a sample (`spatial` of 0 in opsets below 9) are those of one long row of channels."""
    x, momentum, eps = n.value(0), n.attr("momentum", 0.9), n.attr("epsilon", 1e-5)
    scale, bias, mean, variance = (n.value(i).astype(n.dtype(3)) for i in range(1, 5))
    if n.opset < 14 and any(n.wants(i) for i in range(1, 5)):
        n.refuse(f"training in opset {n.opset} is not supported: from opset 14 on the attribute training_mode says what is meant")
    running: tuple[Value, ...] = ()
    if n.attr("training_mode", 0):
        axes, wide = tuple(i for i in range(x.rank) if i != 1), x.astype(mean.dtype)
        found = ops.mean(wide, axis=axes), ops.variance(wide, axis=axes)
        running = tuple(old * momentum + new * (1 - momentum) for old, new in zip((mean, variance), found))
        mean, variance = found
    rows = x if mean.rank == 1 else x.reshape((x.dims[0], -1))
    params = (v.reshape((-1,)) for v in (scale, bias, mean, variance))
    return ops.batch_norm(rows.astype(mean.dtype), *params, axis=1, eps=eps).reshape(x.dims).astype(x.dtype), *running


@handler("LayerNormalization", since=17)
def layer_normalization(n: Call) -> Any:
    """Computed in f32 at least, whatever `stash_type` says, which is the dtype of the mean and the inverse deviation."""
    x, axis, eps = n.value(0), n.axis(-1), n.attr("epsilon", 1e-5)
    out = _normed(ops.layer_norm, x, [n.value(i) for i in (1, 2) if n.has(i)], axis=axis, eps=eps)
    if not n.wants(1) and not n.wants(2):
        return out
    axes, wide = tuple(range(axis, x.rank)), x.astype(dtype_of(n, n.attr("stash_type", 1)))
    spread = ops.variance(wide, axis=axes, keepdims=True)
    return out, ops.mean(wide, axis=axes, keepdims=True), ops.rsqrt(spread + eps)


@handler("RMSNormalization", since=23)
def rms_normalization(n: Call) -> Value:
    return _normed(ops.rms_norm, n.value(0), [n.value(1)], axis=n.axis(-1), eps=n.attr("epsilon", 1e-5))


def _normed(norm: Callable[..., Value], x: Value, affine: list[Value], axis: int, eps: float) -> Value:
    """The norm with scale and bias, which may have another dtype, and dims that only broadcast."""
    if all(v.dims == x.dims[axis:] and v.dtype == x.dtype for v in affine):
        return norm(x, *affine, axis=axis, eps=eps)
    out = norm(x.astype(x.dtype.compute), axis=axis, eps=eps)
    for v, join in zip(affine, (ops.mul, ops.add)):
        out = join(out, v.astype(out.dtype))
    return out.astype(affine[0].dtype)


@handler("InstanceNormalization", since=6)
def instance_normalization(n: Call) -> Value:
    return functions.instance_norm(*n.values(), eps=n.attr("epsilon", 1e-5))


@handler("GroupNormalization", since=18)
def group_normalization(n: Call) -> Value:
    """Scale and bias are per group before opset 21."""
    x, scale, bias = n.values()
    groups, channels = n.attr("num_groups"), known_dim(n, 0, 1)
    if n.opset < 21:
        each = np.repeat(np.arange(groups), channels // groups)
        scale, bias = ops.gather(scale, each), ops.gather(bias, each)
    return ops.group_norm(x, scale, bias, groups=groups, eps=n.attr("epsilon", 1e-5))


@handler("LpNormalization")
def lp_normalization(n: Call) -> Value:
    return functions.lp_normalize(n.value(0), p=n.attr("p", 2), axis=n.axis(-1))


@handler("MeanVarianceNormalization", since=9)
def mean_variance_normalization(n: Call) -> Value:
    x, axes = n.value(0), n.attr("axes", (0, 2, 3))
    centred = x - ops.mean(x, axis=axes, keepdims=True)
    return centred / (ops.sqrt(ops.variance(x, axis=axes, keepdims=True)) + 1e-9)


@handler("LRN")
def local_response(n: Call) -> Value:
    alpha, beta, k = n.attr("alpha", 1e-4), n.attr("beta", 0.75), n.attr("bias", 1.0)
    return functions.local_response_norm(n.value(0), n.attr("size"), alpha=alpha, beta=beta, k=k)


# -- losses ------------------------------------------------------------------------------------------------------------


@handler("NegativeLogLikelihoodLoss")
def likelihood_loss(n: Call) -> Value:
    return _loss(n, n.value(0))


@handler("SoftmaxCrossEntropyLoss")
def cross_entropy(n: Call) -> tuple[Value, Value]:
    logs = ops.log_softmax(n.value(0), axis=1)
    return _loss(n, logs), logs


def _loss(n: Call, logs: Value) -> Value:
    ignore, reduction = n.attr("ignore_index", None), n.attr("reduction", "mean")
    return functions.nll_loss(logs, n.value(1), n.maybe(2), ignore=ignore, reduction=reduction)
