"""Mixtures of experts of ONNX Runtime's domain, against its schema's text in float64, and against ONNX Runtime where it can."""

from __future__ import annotations

import math

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import rlx
from rlx.errors import Unsupported
from rlx.frontends.onnx import OnnxModel
from tests.onnx_models import runtime
from tests.onnx_networks import blocked

RNG = np.random.default_rng(3)
TOKENS, WIDTH, INNER, EXPERTS = 7, 64, 32, 5


def normal(*dims):
    return (RNG.normal(size=dims) * 0.3).astype(np.float32)


def made(op, inputs, attrs):
    info = onnx.helper.make_tensor_value_info
    names = [k if x is not None else "" for k, x in inputs.items()]
    while not names[-1]:
        names.pop()
    node = onnx.helper.make_node(op, names, ["y"], domain="com.microsoft", **attrs)
    inits = [onnx.numpy_helper.from_array(x, k) for k, x in inputs.items() if x is not None and k not in ("x", "r", "rw")]
    given = [info(k, TensorProto.FLOAT, x.shape) for k, x in inputs.items() if x is not None and k in ("x", "r", "rw")]
    graph = onnx.helper.make_graph([node], "net", given, [info("y", TensorProto.FLOAT, None)], inits)
    domains = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=domains, ir_version=10)


def activated(kind, g, up, alpha=1.0, beta=0.0, limit=math.inf):
    if kind == "swiglu":
        g, up = np.minimum(g, limit), np.clip(up, -limit, limit)
        return g / (1 + np.exp(-alpha * g)) * (up + beta)
    tanh = lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))  # noqa: E731
    makers = {"relu": lambda x: np.maximum(x, 0), "silu": lambda x: x / (1 + np.exp(-x)), "identity": lambda x: x}
    out = makers.get(kind, tanh)(g)
    return out if up is None else out * up


def mixed(x, r, parts, k, kind, even=0, fusion=0, rw=None, **facts):
    """parts: (weight [experts, out, in], bias or None) of fc1, fc2, fc3 (or None)."""
    out = np.zeros((len(r), parts[1][0].shape[1]))
    linear = lambda v, part, e: v @ part[0][e].T + (0 if part[1] is None else part[1][e])  # noqa: E731
    for t, (row, scores) in enumerate(zip(x.reshape(len(r), -1).astype(np.float64), r.astype(np.float64))):
        chosen = np.argsort(-scores, kind="stable")[:k]
        p = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum() if rw is None else rw[t]
        weights = p[chosen] / (p[chosen].sum() if even else 1)
        for e, weight in zip(chosen, weights):
            h, up = linear(row, parts[0], e), None if parts[2] is None else linear(row, parts[2], e)
            if fusion:
                h, up = (h[0::2], h[1::2]) if fusion == 1 else np.split(h, 2)
            out[t] += weight * linear(activated(kind, h, up, **facts), parts[1], e)
    return out.reshape(*x.shape[:-1], -1)


CASES = {  # activation, fusion, fc3, whether ONNX Runtime has it on a CPU
    "relu": ("relu", 0, False, True), "gelu": ("gelu", 0, False, True), "silu-fc3": ("silu", 0, True, False),
    "swiglu": ("swiglu", 0, True, False), "swiglu-interleaved": ("swiglu", 1, False, True),
    "swiglu-halves": ("swiglu", 2, False, False), "geglu": ("geglu", 2, False, False),
}  # fmt: skip
FACTS = {"activation_alpha": 1.5, "activation_beta": 0.5, "swiglu_limit": 0.4}


def weights_of(fusion, third, biased):
    first = INNER * (2 if fusion else 1)
    dims = [(first, WIDTH), (WIDTH, INNER), (INNER, WIDTH)][: 3 if third else 2]
    parts = [(normal(EXPERTS, *d), normal(EXPERTS, d[0]) if biased else None) for d in dims]
    return parts + [None] * (3 - len(parts))


@pytest.mark.parametrize("even", [0, 1])
@pytest.mark.parametrize("case", CASES)
def test_a_mixture_of_experts_is_that_of_its_schema(case, even):
    kind, fusion, third, judged = CASES[case]
    parts = weights_of(fusion, third, biased=True)
    x, r = normal(1, TOKENS, WIDTH), normal(TOKENS, EXPERTS) * 4
    inputs = {"x": x, "r": r}
    for i, part in enumerate(parts):
        inputs |= {f"w{i}": part and part[0], f"b{i}": part and part[1]}
    attrs = {"k": 2, "activation_type": kind, "swiglu_fusion": fusion, "normalize_routing_weights": even}
    attrs |= FACTS if kind == "swiglu" else {}
    model = made("MoE", inputs, attrs)
    facts = {"alpha": 1.5, "beta": 0.5, "limit": 0.4} if kind == "swiglu" else {}
    found = OnnxModel(model)(x, r)
    np.testing.assert_allclose(found, mixed(x, r, parts, 2, kind, even, fusion, **facts), rtol=1e-4, atol=1e-5)
    if judged and (judge := runtime(model, {"x": x, "r": r})) is not None:
        np.testing.assert_allclose(found, judge[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("bits,block,zeros,half", [
    (4, 32, False, True), (4, 32, True, True), (8, 0, False, True), (8, 32, True, True), (4, 32, True, False),
    (2, 16, False, True),
])  # fmt: skip
def test_a_mixture_of_quantised_experts_reads_packed_weights(bits, block, zeros, half):
    parts = weights_of(1, False, biased=True)
    x, r, middle = normal(TOKENS, WIDTH), normal(TOKENS, EXPERTS) * 4, 1 << bits - 1
    inputs, whole, more = {"x": x, "r": r}, [], {}
    for i, part in enumerate(parts[:2]):
        w, bias = part
        q, scales = blocked(w.reshape(-1, w.shape[2]), bits, block or w.shape[2])
        scales = scales if half else scales * np.float32(1.0001)
        least = RNG.integers(0, 1 << bits, scales.shape) if zeros else np.full(scales.shape, middle)
        raw = (q.astype(int) + middle).astype(np.uint8)
        values = ((raw - np.repeat(least, block or w.shape[2], 1)) * np.repeat(scales, block or w.shape[2], 1)).reshape(w.shape)
        whole.append((values.astype(np.float64), bias))
        pack = lambda v: sum(v[..., j :: 8 // bits].astype(int) << j * bits for j in range(8 // bits)).astype(np.uint8)  # noqa: E731
        inputs |= {f"w{i}": pack(raw).reshape(EXPERTS, w.shape[1], -1)}
        inputs |= {f"s{i}": scales.reshape(EXPERTS, w.shape[1], -1) if block else scales.reshape(EXPERTS, -1), f"b{i}": bias}
        odd = np.pad(least, ((0, 0), (0, least.shape[1] % 2)))
        more |= {f"z{i}": pack(odd if bits < 8 else least).reshape(EXPERTS, w.shape[1], -1) if zeros else None}
    inputs |= {"w2": None, "s2": None, "b2": None} | more
    attrs = {"k": 2, "activation_type": "swiglu", "swiglu_fusion": 1, "expert_weight_bits": bits, "normalize_routing_weights": 1}
    attrs |= ({"block_size": block} if block else {}) | FACTS
    model = made("QMoE", inputs, attrs)
    net = OnnxModel(model)
    found = net(x, r)
    want = mixed(x, r, [*whole, None], 2, "swiglu", 1, 1, alpha=1.5, beta=0.5, limit=0.4)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    formats = {node.attrs.format for node in rlx.from_onnx(model).nodes() if node.op.name == "segment_matmul"}
    assert bool(formats - {""}) == (half and bits > 2)
    if (judge := runtime(model, {"x": x, "r": r})) is not None:
        np.testing.assert_allclose(found, judge[0], rtol=0.05, atol=0.03 * np.abs(want).max())  # activations in 8 bits


def test_experts_may_be_chosen_by_one_score_and_weighted_by_another():
    parts = weights_of(0, False, biased=False)
    x, r, rw = normal(TOKENS, WIDTH), normal(TOKENS, EXPERTS) * 4, np.abs(normal(TOKENS, EXPERTS))
    inputs, whole = {"x": x, "r": r}, []
    for i, (w, _) in enumerate(parts[:2]):
        q, scales = blocked(w.reshape(-1, w.shape[2]), 8, w.shape[2])
        whole.append(((q * scales.astype(np.float64)).reshape(w.shape), None))
        raw = (q.astype(int) + 128).astype(np.uint8).reshape(w.shape)
        inputs |= {f"w{i}": raw, f"s{i}": scales.reshape(EXPERTS, -1), f"b{i}": None}
    inputs |= dict.fromkeys(("w2", "s2", "b2", "z0", "z1", "z2")) | {"rw": rw}
    attrs = {"k": 3, "activation_type": "silu", "expert_weight_bits": 8}
    for even in (0, 1):
        model = made("QMoE", inputs, attrs | {"normalize_routing_weights": even})
        found = OnnxModel(model)(x, r, rw)
        np.testing.assert_allclose(found, mixed(x, r, [*whole, None], 3, "silu", even, rw=rw), rtol=1e-4, atol=1e-5)
        if (judge := runtime(model, {"x": x, "r": r, "rw": rw})) is not None:
            np.testing.assert_allclose(found, judge[0], rtol=0.05, atol=0.03 * np.abs(found).max())


@pytest.mark.parametrize("attrs,why", [
    ({"use_sparse_mixer": 1}, "attribute 'use_sparse_mixer'"), ({"activation_type": "swiglu"}, "swiglu_fusion 0 and no fc3"),
    ({"activation_type": "tanh"}, "activation 'tanh'"),
])  # fmt: skip
def test_mixtures_that_are_not_supported_say_why(attrs, why):
    parts = weights_of(0, False, biased=False)
    inputs = {"x": normal(TOKENS, WIDTH), "r": normal(TOKENS, EXPERTS), "w0": parts[0][0], "b0": None, "w1": parts[1][0]}
    with pytest.raises(Unsupported, match=why):
        rlx.from_onnx(made("MoE", inputs, {"k": 2, "activation_type": "relu"} | attrs))


@pytest.mark.parametrize("dims", [(3, 6), (5, 6), (4, 1)])
def test_a_bias_that_does_not_fit_the_experts_is_refused(dims):
    inputs = {"x": normal(3, 8), "r": normal(3, 4), "w1": normal(4, 6, 8), "b1": normal(*dims), "w2": normal(4, 8, 6)}
    with pytest.raises(Unsupported, match=r"bias of fc1, has dims .* and \[4, 6\] are needed"):
        rlx.from_onnx(made("MoE", inputs, {"k": 2}))


@pytest.mark.parametrize("wrong,message", [
    ({"w0": np.zeros((2, 6, 8), np.uint8)}, r"operand 2 has weights of dims \[2, 6, 8\], and \[2, 6, 4\] are needed"),
    ({"z0": np.zeros((2, 6), np.uint8)}, r"operand 11 has zero points of dims \[2, 6\], and \[2, 3\] are needed"),
    ({"s0": np.ones((2, 8), np.float32)}, r"operand 3 has scales of dims \[2, 8\], and \[2, 6\] are needed"),
])  # fmt: skip
def test_quantised_experts_that_do_not_fit_are_refused_with_the_dims_that_are_needed(wrong, message):
    inputs = {"x": normal(3, 8), "r": normal(3, 2), "w0": np.zeros((2, 6, 4), np.uint8), "s0": np.ones((2, 6), np.float32)}
    inputs |= {"b0": None, "w1": np.zeros((2, 8, 3), np.uint8), "s1": np.ones((2, 8), np.float32)}
    inputs |= dict.fromkeys(("b1", "w2", "s2", "b2", "z0"))
    assert OnnxModel(made("QMoE", inputs, {"k": 2}))(inputs["x"], inputs["r"]).shape == (3, 8)
    with pytest.raises(Unsupported, match=message):
        rlx.from_onnx(made("QMoE", inputs | wrong, {"k": 2}))
