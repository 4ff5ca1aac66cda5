"""Operators of ONNX Runtime (com.microsoft) that exporters and its optimiser write: norms, activations, fused products."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.table import handler
from rlx.ir import ops
from rlx.ir.dtype import i32
from rlx.ir.node import Value, constant

MS = "com.microsoft"


@handler("SimplifiedLayerNormalization")
@handler("SimplifiedLayerNormalization", domain=MS)
def simplified_layer_norm(n: Call) -> Any:
    """Computed in f32 at least, whatever `stash_type` says."""
    x, axis, eps, _ = n.value(0), n.axis(-1), n.attr("epsilon", 1e-5), n.attr("stash_type", 1)
    out = ops.rms_norm(x, n.value(1), axis=axis, eps=eps)
    if not n.wants(1):
        return out
    wide = x.astype(x.dtype.compute)
    return out, ops.rsqrt(ops.mean(wide * wide, axis=tuple(range(axis, x.rank)), keepdims=True) + eps)


@handler("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", domain=MS)
def skip_layer_norm(n: Call) -> Any:
    """Operands: x, what is added to it, scale, bias of the norm (not of the simplified one), bias of the sum. Results: the norm,
    its statistics, the sum."""
    simple = n.op.startswith("SkipSimplified")
    x, eps, bias = n.value(0) + n.value(1), n.attr("epsilon", 1e-12), 3 if simple else 4
    x = x + n.value(bias) if n.has(bias) else x
    if n.wants(1) or n.wants(2):
        n.refuse("mean and deviation are not given as results")
    if simple:
        return ops.rms_norm(x, n.value(2), eps=eps), None, None, x
    shift = n.value(3) if n.has(3) else constant(np.zeros(n.sizes(2), n.dtype(2).numpy))
    return ops.layer_norm(x, n.value(2), shift, eps=eps), None, None, x


@handler("EmbedLayerNormalization", domain=MS)
def embed_layer_norm(n: Call) -> Any:
    """The sum of embeddings of words, positions and segments, normalised; the number of tokens of each row; the sum."""
    ids, (batch, length), _ = n.value(0), n.dims(0), n.attr("mask_index_type", 0)  # the type of a result that may be left out
    at = n.value(8) if n.has(8) else ops.broadcast_to(ops.iota(dims=(1, length), axis=1), dims=(batch, length))
    x = ops.gather(n.value(2), ids) + ops.gather(n.value(3), at)
    x = x + ops.gather(n.value(4), n.value(1)) if n.has(4) else x
    out = ops.layer_norm(x, n.value(5), n.value(6), eps=n.attr("epsilon", 1e-12))
    given = n.value(7).astype(i32) if n.has(7) else ops.broadcast_to(constant(0, i32), dims=(batch, 1))
    return out, ops.sum(given, axis=1), x


_GELUS: dict[str, Any] = {"Gelu": "none", "BiasGelu": "none", "FastGelu": "tanh"}


@handler(*_GELUS, domain=MS)
def gelu(n: Call) -> Value:
    return ops.gelu(n.value(0) + n.value(1) if n.has(1) else n.value(0), approximate=_GELUS[n.op])


@handler("QuickGelu", domain=MS)
def quick_gelu(n: Call) -> Value:
    return n.value(0) * ops.sigmoid(n.value(0) * n.attr("alpha", 1.702))


@handler("BiasSplitGelu", domain=MS)
def bias_split_gelu(n: Call) -> Value:
    """The first half of the columns times the gelu of the second one."""
    left, right = ops.split(n.value(0) + n.value(1), parts=2, axis=-1)
    return left * ops.gelu(right)


@handler("FusedMatMul", domain=MS)
def fused_matmul(n: Call) -> Value:
    """A product with transposed operands; `transBatch` moves the batch dims behind the rows before that."""
    made = []
    for i, name in enumerate("AB"):
        x = n.value(i)
        x = ops.transpose(x, axes=(*range(1, x.rank - 1), 0, x.rank - 1)) if n.attr(f"transBatch{name}", 0) else x
        made.append(ops.transpose(x, axes=(*range(x.rank - 2), x.rank - 1, x.rank - 2)) if n.attr(f"trans{name}", 0) else x)
    out, alpha = n.run("MatMul", *made), n.attr("alpha", 1.0)
    return out if alpha == 1 else out * alpha


@handler("FusedGemm", domain=MS)
def fused_gemm(n: Call) -> Any:
    names = {f"activation_{k}": k for k in ("alpha", "beta", "gamma")}
    numbers = {names[k]: v for k, v in n.attrs.items() if k in names}
    return n.run(n.attr("activation"), n.run("Gemm", *n.inputs, **n.others("activation", *names)), **numbers)


_PARAMS = {"LeakyRelu": ("alpha",), "Clip": ("min", "max"), "HardSigmoid": ("alpha", "beta")}


@handler("FusedConv", domain=MS)
def fused_conv(n: Call) -> Any:
    """A convolution, the sum with operand 3, and an activation with its numbers."""
    out, name = n.run("Conv", *n.inputs[:3], **n.others("activation", "activation_params")), n.attr("activation", "")
    out = n.run("Add", out, n.inputs[3]) if n.has(3) else out
    numbers = n.attr("activation_params", ())
    if name == "Clip":
        return n.run(name, out, *(np.asarray(x, np.float32) for x in numbers))
    return n.run(name, out, **dict(zip(_PARAMS.get(name, ()), numbers))) if name else out
