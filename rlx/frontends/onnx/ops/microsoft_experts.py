"""Mixtures of experts of ONNX Runtime (com.microsoft): rows of tokens are grouped by expert, and multiplied by its weights."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops import blocks
from rlx.frontends.onnx.ops.shape import elements, known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import ops
from rlx.ir.node import Value

MS = "com.microsoft"
_ACTIVATIONS: dict[str, Callable[[Value], Value]] = {
    "relu": ops.relu, "silu": ops.silu, "identity": lambda x: x, "gelu": lambda x: ops.gelu(x, approximate="tanh"),
    "relu2": lambda x: ops.relu(x) * ops.relu(x),
}  # fmt: skip


@handler("MoE", domain=MS)
def mixture(n: Call) -> Value:
    """Operands: tokens, scores of experts, then the weights [experts, out, in] and biases of fc1, fc2 and fc3."""

    def product(x: Value, part: int, ends: Value) -> Value:
        return ops.segment_matmul(x, ops.transpose(n.value(2 + 2 * part), axes=(0, 2, 1)).astype(x.dtype), ends)

    return _mixed(n, product, [3, 5, 7], n.has(6))


@handler("QMoE", domain=MS)
def quantised_mixture(n: Call) -> Value:
    """The same with weights, scales and a bias for each of fc1, fc2 and fc3; their zero points; and weights of experts in
    place of those that the scores give."""
    if n.attr("quant_type", "int") != "int" or n.attr("weights_prepacked", -1) == 1:
        n.refuse("weights in floats of 4 or 8 bits, and weights in the order of a device, are not supported")
    bits, level, block = n.attr("expert_weight_bits", 4), n.attr("accuracy_level", 0), n.attr("block_size", 0)
    own = [n.attr(f"fc{i}_expert_weight_bits", bits) for i in (1, 2, 3)]
    if not {2, 4, 8}.issuperset(own):
        n.refuse(f"weights of {own} bits are not supported: of 2, 4 or 8 bits they are")

    def product(x: Value, part: int, ends: Value) -> Value:
        raw = n.value(2 + 3 * part)
        (experts, rows, _), columns, bits = n.sizes(2 + 3 * part), x.shape.static[1], own[part]
        own_block = max(block, 0) or columns
        scales = blocks.scales_of(n, 3 + 3 * part, experts, rows, *([-(-columns // own_block)] if block > 0 else []))
        zeros = blocks.zeros_of(n, 11 + part, scales, bits)
        blocks.check_dims(n, 2 + 3 * part, "weights", blocks.in_whole_bytes((experts, rows, columns), bits))
        w = blocks.Weight(
            blocks.named(n, raw, n.value(3 + 3 * part)),
            lambda: blocks.unpacked(n.known(2 + 3 * part), bits).reshape(experts * rows, -1)[:, :columns],
            scales.reshape(experts * rows, -1), zeros.reshape(experts * rows, -1), bits, columns, own_block,
        )  # fmt: skip
        if not w.fits(rounded=level == 4):
            whole = blocks.decoded(raw, n.value(3 + 3 * part), w).reshape((experts, rows, columns))
            return ops.segment_matmul(x, ops.transpose(whole, axes=(0, 2, 1)).astype(x.dtype), ends)
        whole = blocks.packed(n, w).reshape((experts, rows, -1))
        out = ops.segment_matmul(x, whole, ends, format=blocks.FORMAT[bits], exact=level != 4)
        if (lean := blocks.lean(w)) is None:
            return out
        more = ops.transpose(lean.reshape((experts, rows, -1)), axes=(0, 2, 1)).astype(x.dtype)
        return out + ops.segment_matmul(blocks.block_sums(x, w), more, ends)

    return _mixed(n, product, [4, 7, 10], n.has(8), 14)


def _mixed(n: Call, product: Callable[[Value, int, Value], Value], biases: list[int], third: bool, weighted: int = -1) -> Value:
    """Every token through its experts. `biases`: operands of fc1, fc2 and fc3. `weighted`: operand with weights of experts."""
    used, even = n.attr("k", 4), bool(n.attr("normalize_routing_weights", 0))
    wide = n.value(0).dtype.compute
    x = n.value(0).reshape((elements(n.sizes(0)[:-1]), n.sizes(0)[-1])).astype(wide)
    tokens, experts = known_dim(n, 1, 0), known_dim(n, 1, 1)
    ids, weights = ops.route(n.value(1).astype(wide), k=used, renormalise=even)
    if weighted > 0 and n.has(weighted):
        weights = ops.gather_elements(n.value(weighted).astype(wide), ids, axis=1)
        weights = weights / ops.sum(weights, axis=1, keepdims=True) if even else weights
    flat = ids.reshape((tokens * used,))
    order, place, ends = ops.group_rows(flat, groups=experts)
    mine = ops.gather(flat, order)

    def linear(rows: Value, part: int) -> Value:
        out = product(rows, part, ends)
        if not n.has(bias := biases[part]):
            return out
        if n.sizes(bias) != (needed := (experts, out.shape.static[1])):
            n.refuse(f"operand {bias}, the bias of fc{part + 1}, has dims {list(n.sizes(bias))}, and {list(needed)} are needed")
        return out + ops.gather(n.value(bias).astype(wide), mine)

    rows = ops.gather(x, order // used)
    out = linear(_activated(n, linear(rows, 0), linear(rows, 2) if third else None), 1)
    found = ops.gather(out, place.reshape((tokens, used))) * ops.unsqueeze(weights, axes=(2,))
    return ops.sum(found, axis=1).reshape(n.dims(0)).astype(n.dtype(0))


def _activated(n: Call, x: Value, up: Value | None) -> Value:
    """The activation of fc1, times `up`, the result of fc3, if there is one; gates may lie in fc1 beside what they multiply."""
    name, fusion = n.attr("activation_type", "relu"), n.attr("swiglu_fusion", 0)
    alpha, beta, limit = n.attr("activation_alpha", 1.0), n.attr("activation_beta", 0.0), n.attr("swiglu_limit", math.inf)
    gated, half = name in ("swiglu", "geglu"), x.shape.static[1] // 2
    if gated and up is None and fusion in (1, 2):
        x, up = (x[:, 0::2], x[:, 1::2]) if fusion == 1 else (x[:, :half], x[:, half:])
    elif name not in _ACTIVATIONS and not (name == "swiglu" and up is not None and not fusion):
        n.refuse(f"activation {name!r} with swiglu_fusion {fusion} and {'no ' if up is None else ''}fc3 is not supported")
    if name == "swiglu" and up is not None:
        x, up = (ops.minimum(x, limit), ops.clip(up, low=-limit, high=limit)) if limit < math.inf else (x, up)
        return x * ops.sigmoid(x * alpha) * (up + beta)
    out = _ACTIVATIONS["gelu" if gated else name](x)
    return out if up is None else out * up
