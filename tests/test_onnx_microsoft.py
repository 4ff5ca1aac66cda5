"""Operators of ONNX Runtime's domain, against formulas of torch, and against ONNX Runtime where it is installed."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto

import rlx
from rlx.errors import Unsupported
from rlx.frontends.onnx import OnnxModel
from tests.onnx_models import runtime

RNG = np.random.default_rng(7)


def normal(*dims):
    return RNG.normal(size=dims).astype(np.float32)


def made(op, inputs, attrs=None, outputs=1, consts=()):
    """A model of one node. `inputs`: arrays by name, in order; "" for an operand that is left out."""
    info = onnx.helper.make_tensor_value_info
    kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(x.dtype) for name, x in inputs.items() if x is not None}
    node = onnx.helper.make_node(
        op, [k if x is not None else "" for k, x in inputs.items()], [f"y{i}" for i in range(outputs)], domain="com.microsoft",
        **(attrs or {}),
    )  # fmt: skip
    given = [info(k, kinds[k], inputs[k].shape) for k in kinds if k not in consts]
    inits = [onnx.numpy_helper.from_array(inputs[k], k) for k in consts]
    results = [info(name, TensorProto.FLOAT, None) for name in node.output]
    graph = onnx.helper.make_graph([node], "net", given, results, inits)
    domains = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=domains, ir_version=10)


def check(op, inputs, attrs, expected, consts=(), atol=2e-5, outputs=0):
    """The first results of rlx are the expected ones, and ONNX Runtime's."""
    model = made(op, inputs, attrs, outputs or len(expected), consts)
    feeds = {k: x for k, x in inputs.items() if x is not None and k not in consts}
    found = list(OnnxModel(model).run(feeds).values())
    judges = [[np.asarray(x) for x in expected], runtime(model, feeds) or []]
    for judge in judges:
        for got, want in zip(found[: len(expected)], judge):
            np.testing.assert_allclose(got, want, rtol=2e-5, atol=atol)
    return found


X, BIAS, SCALE, SHIFT = normal(2, 3, 8), normal(8), normal(8), normal(8)
T = torch.from_numpy
RMS = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * SCALE  # noqa: E731
SMALL = {
    "Gelu": ({"x": X}, {}, F.gelu(T(X))),
    "BiasGelu": ({"x": X, "b": BIAS}, {}, F.gelu(T(X + BIAS))),
    "FastGelu": ({"x": X, "b": BIAS}, {}, F.gelu(T(X + BIAS), approximate="tanh")),
    "QuickGelu": ({"x": X}, {"alpha": 1.5}, T(X) * torch.sigmoid(1.5 * T(X))),
    "FusedMatMul": ({"x": X, "y": normal(2, 3, 5)}, {"transA": 1, "alpha": 0.5}, None),
    "SkipLayerNormalization": (
        {"x": X, "s": X[::-1].copy(), "g": SCALE, "b": SHIFT, "c": BIAS}, {"epsilon": 1e-5},
        F.layer_norm(T(X + X[::-1] + BIAS), (8,), T(SCALE), T(SHIFT)),
    ),
    "SkipSimplifiedLayerNormalization": ({"x": X, "s": X[::-1].copy(), "g": SCALE}, {"epsilon": 1e-5}, RMS(X + X[::-1])),
}  # fmt: skip


@pytest.mark.parametrize("op", SMALL)
def test_activations_norms_and_products(op):
    inputs, attrs, expected = SMALL[op]
    expected = 0.5 * np.swapaxes(inputs["x"], 1, 2) @ inputs["y"] if expected is None else expected
    check(op, inputs, attrs, [expected])


@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_the_simplified_norm_gives_the_inverse_deviation_too(domain):
    model = made("SimplifiedLayerNormalization", {"x": X, "g": SCALE}, {"axis": -1, "epsilon": 1e-5, "stash_type": 1}, 2)
    model.graph.node[0].domain = domain
    found = OnnxModel(model)(X, SCALE)
    judge = runtime(model, {"x": X, "g": SCALE}) if not domain else None  # ONNX Runtime has it in ONNX's own domain
    for want in ((RMS(X), 1 / np.sqrt((X * X).mean(-1, keepdims=True) + 1e-5)), judge or ()):
        for mine, theirs in zip(found, want):
            np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize("placed", [False, True])
def test_embeddings_of_words_places_and_segments_are_summed_and_normalised(segments, placed):
    ids, of = RNG.integers(0, 11, (2, 5)).astype(np.int32), RNG.integers(0, 2, (2, 5)).astype(np.int32)
    at = RNG.integers(0, 7, (2, 5)).astype(np.int32) if placed else None
    mask = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32) if placed else None
    words, places, kinds = normal(11, 8), normal(7, 8), normal(2, 8)
    total = words[ids] + (places[at] if placed else places[:5]) + (kinds[of] if segments else 0)
    expected = F.layer_norm(T(total), (8,), T(SCALE), T(SHIFT), 1e-12)
    inputs = {"i": ids, "t": of if segments else None, "w": words, "p": places, "k": kinds if segments else None}
    inputs |= {"g": SCALE, "b": SHIFT, "m": mask, "at": at}
    while inputs[last := [*inputs][-1]] is None:
        del inputs[last]
    model = made("EmbedLayerNormalization", inputs, {"epsilon": 1e-12, "mask_index_type": int(placed)}, 3)
    model.graph.output[1].type.tensor_type.elem_type = TensorProto.INT32
    feeds = {k: v for k, v in inputs.items() if v is not None}
    want = expected, mask.sum(1) if placed else np.zeros(2), total
    for judge in (want, runtime(model, feeds) or ()):
        for mine, theirs in zip(OnnxModel(model).run(feeds).values(), judge):
            np.testing.assert_allclose(mine, theirs, rtol=2e-5, atol=2e-5)


def test_a_split_gelu_multiplies_the_left_half():
    x, b = normal(2, 3, 16), normal(16)
    left, right = np.split(x + b, 2, -1)
    found = OnnxModel(made("BiasSplitGelu", {"x": x, "b": b}, {}))(x, b)
    np.testing.assert_allclose(found, left * F.gelu(T(right)).numpy(), rtol=2e-5, atol=2e-5)


def test_a_fused_gemm_activates():
    a, b, c = normal(5, 3), normal(4, 5), normal(4)
    attrs = {"transA": 1, "transB": 1, "alpha": 0.5, "beta": 2.0, "activation": "LeakyRelu", "activation_alpha": 0.2}
    expected = F.leaky_relu(T(0.5 * a.T @ b.T + 2 * c), 0.2)
    check("FusedGemm", {"a": a, "b": b, "c": c}, attrs, [expected])


def test_a_fused_convolution_adds_and_activates():
    x, w, z = normal(1, 2, 5, 5), normal(3, 2, 3, 3), normal(1, 3, 5, 5)
    inputs = {"x": x, "w": w, "b": None, "z": z}
    expected = F.leaky_relu(F.conv2d(T(x), T(w), padding=1) + T(z), 0.2)
    model = made("FusedConv", inputs, {"pads": [1] * 4, "activation": "LeakyRelu", "activation_params": [0.2]})
    np.testing.assert_allclose(OnnxModel(model)(x, w, z), expected, rtol=1e-5, atol=1e-5)


# -- attention -----------------------------------------------------------------------------------------------------------


def split(x, heads):
    return T(x).reshape(x.shape[0], x.shape[1], heads, -1).transpose(1, 2)


def joined(x):
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1).numpy()


@pytest.mark.parametrize("causal", [0, 1])
def test_multi_head_attention_has_bias_masks_and_a_past(causal):
    q, k, v, bias = normal(2, 3, 16), normal(2, 3, 16), normal(2, 3, 16), normal(48)
    past = normal(2, 4, 2, 4), normal(2, 4, 2, 4)
    mask = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]], np.int32)
    extra = normal(1, 4, 3, 5)
    qh, kh, vh = (split(x + bias[i * 16 :][:16], 4) for i, x in enumerate((q, k, v)))
    kh, vh = torch.cat([T(past[0]), kh], 2), torch.cat([T(past[1]), vh], 2)
    seen = T(mask).bool()[:, None, None, :] & (torch.ones(3, 5).tril(2).bool() if causal else True)
    scores = T(extra).expand(2, 4, 3, 5).masked_fill(~seen, -10000.0)
    expected = F.scaled_dot_product_attention(qh, kh, vh, attn_mask=scores, scale=0.3)
    inputs = {"q": q, "k": k, "v": v, "b": bias, "m": mask, "e": extra, "pk": past[0], "pv": past[1]}
    attrs = {"num_heads": 4, "scale": 0.3, "unidirectional": causal, "mask_filter_value": -10000.0}
    check("MultiHeadAttention", inputs, attrs, [joined(expected), kh, vh])


def test_attention_projects_with_one_matrix():
    x, w, b = normal(2, 3, 8), normal(8, 24), normal(24)
    lengths = np.array([3, 2], np.int32)
    q, k, v = (split((x @ w + b)[..., i * 8 :][..., :8], 2) for i in range(3))
    seen = (torch.arange(3)[None, :] < T(lengths)[:, None])[:, None, None, :]
    expected = joined(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    check("Attention", {"x": x, "w": w, "b": b, "m": lengths}, {"num_heads": 2}, [expected], consts=("w", "b"))


@pytest.mark.parametrize("rows,keys,past", [(1, 5, 0), (3, 5, 0), (1, 1, 4), (2, 2, 3)])
def test_lengths_hide_keys_of_the_past_and_of_other_sequences(rows, keys, past):
    q, k, v, old = normal(2, rows, 16), normal(2, keys, 16), normal(2, keys, 16), [normal(2, 4, past, 4) for _ in range(2)]
    lengths = np.array([5, 2], np.int32)
    kh, vh = (torch.cat([T(before), split(x, 4)], 2) for before, x in zip(old, (k, v)))
    seen = (torch.arange(5)[None, :] < T(lengths)[:, None])[:, None, None, :]
    expected = joined(F.scaled_dot_product_attention(split(q, 4), kh, vh, attn_mask=seen))
    inputs = {"q": q, "k": k, "v": v, "b": None, "m": lengths} | ({"e": None, "pk": old[0], "pv": old[1]} if past else {})
    check("MultiHeadAttention", inputs, {"num_heads": 4}, [expected], outputs=3)


def test_lengths_hide_keys_of_the_past_where_a_matrix_projects():
    x, w, past, lengths = normal(2, 1, 8), normal(8, 24), normal(2, 2, 2, 4, 4), np.array([5, 3], np.int32)
    q, k, v = (split((x @ w)[..., i * 8 :][..., :8], 2) for i in range(3))
    k, v = (torch.cat([T(before), part], 2) for before, part in zip(past, (k, v)))
    seen = (torch.arange(5)[None, :] < T(lengths)[:, None])[:, None, None, :]
    expected = joined(F.scaled_dot_product_attention(q, k, v, attn_mask=seen))
    inputs = {"x": x, "w": w, "b": None, "m": lengths, "p": past}
    check("Attention", inputs, {"num_heads": 2}, [expected, torch.stack([k, v])], consts=("w",))


def test_values_may_have_other_columns_than_keys():
    x, w, b = normal(2, 3, 8), normal(8, 20), normal(20)
    q, k, v = (split(part, 2) for part in np.split(x @ w + b, (4, 8), -1))
    expected = joined(F.scaled_dot_product_attention(q, k, v))
    inputs, attrs = {"x": x, "w": w, "b": b}, {"num_heads": 2, "qkv_hidden_sizes": [4, 4, 12]}
    check("Attention", inputs, attrs, [expected], consts=("w", "b"))


def test_masks_add_their_own_value_and_later_keys_have_no_weight():
    q, k, v = normal(2, 4, 16), normal(2, 4, 16), normal(2, 4, 16)
    mask = np.array([[1, 1, 1, 1], [0, 1, 1, 0]], np.int32)
    shift = torch.where(T(mask).bool(), 0.0, -1.5)[:, None, None, :]
    heads = [split(x, 4) for x in (q, k, v)]
    inputs = {"q": q, "k": k, "v": v, "b": None, "m": mask}
    expected = joined(F.scaled_dot_product_attention(*heads, attn_mask=shift))
    check("MultiHeadAttention", inputs, {"num_heads": 4, "mask_filter_value": -1.5}, [expected])
    low = np.where(np.eye(4) > 0, -3e4, 0).astype(np.float32)[None, None]  # for a place beside itself
    later = T(low).masked_fill(~torch.ones(4, 4).tril().bool(), -np.inf)
    expected = joined(F.scaled_dot_product_attention(*heads, attn_mask=later))
    check("MultiHeadAttention", inputs | {"m": None, "e": low}, {"num_heads": 4, "unidirectional": 1}, [expected])


def rotated(x, at, cos, sin, paired):
    """x [batch, heads, rows, head_dim], positions [batch, rows]."""
    c, s = (T(table)[T(at)][:, None] for table in (cos, sin))
    a, b = (x[..., 0::2], x[..., 1::2]) if paired else x.chunk(2, -1)
    parts = a * c - b * s, a * s + b * c
    return torch.stack(parts, -1).flatten(-2) if paired else torch.cat(parts, -1)


ANGLES = np.arange(32)[:, None] * 0.5 ** np.arange(8)
TABLES = np.cos(ANGLES).astype(np.float32), np.sin(ANGLES).astype(np.float32)


@pytest.mark.parametrize("paired", [False, True])
def test_rotary_embedding_counts_from_the_first_position(paired):
    x, first = normal(2, 3, 32), np.array([5], np.int64)
    expected = joined(rotated(split(x, 2), np.tile([5, 6, 7], (2, 1)), *TABLES, paired))
    inputs = {"x": x, "p": first, "c": TABLES[0], "s": TABLES[1]}
    check("RotaryEmbedding", inputs, {"interleaved": int(paired)}, [expected], consts=("c", "s"))


@pytest.mark.parametrize("window", [-1, 3])
@pytest.mark.parametrize("batch,rows,past,lengths", [
    (1, 4, 0, [4]), (1, 1, 5, [6]), (2, 1, 5, [6, 4]), (2, 4, 0, [4, 4]), (1, 1, 8, [6]),
])  # fmt: skip
def test_group_query_attention_places_new_keys_behind_those_of_each_row(batch, rows, past, lengths, window):
    q, k, v = normal(batch, rows, 64), normal(batch, rows, 32), normal(batch, rows, 32)
    old = [normal(batch, 2, past, 16) for _ in range(2)]
    total = max(lengths)
    at = np.stack([np.arange(n - rows, n) for n in lengths])
    qh, kh = (rotated(split(x, h), at, *TABLES, False) for x, h in ((q, 4), (k, 2)))
    vh, size = split(v, 2), max(total, past)
    full = [torch.zeros(batch, 2, size, 16) for _ in range(2)]
    for b, n in enumerate(lengths):
        for to, before, fresh in zip(full, old, (kh, vh)):
            to[b, :, :past] = T(before[b])
            to[b, :, n - rows : n] = fresh[b]
    place = torch.arange(size)[None, None, None, :]
    behind = T(at)[:, None, :, None] - place
    seen = (behind >= 0) & ((behind < window) if window > 0 else True)
    every = [x.repeat_interleave(2, 1) for x in full]
    expected = joined(F.scaled_dot_product_attention(qh, *every, attn_mask=seen))
    inputs = {"q": q, "k": k, "v": v, "pk": old[0], "pv": old[1], "n": np.array(lengths, np.int32) - 1,
              "t": np.array(total, np.int32), "c": TABLES[0], "s": TABLES[1]}  # fmt: skip
    if not past and batch > 1:  # else without rows
        inputs |= {"pk": None, "pv": None}
    attrs = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "local_window_size": window}
    found = check("GroupQueryAttention", inputs, attrs, [expected], consts=("t", "c", "s"), outputs=3)
    for b, n in enumerate(lengths):
        np.testing.assert_allclose(found[1][b, :, :n], full[0][b, :, :n], rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(found[2][b, :, :n], full[1][b, :, :n])


@pytest.mark.parametrize("heads", [1, 4])
def test_a_bias_of_scores_is_for_the_keys_that_there_are_where_the_past_has_room_for_more(heads):
    q, k, v, old, lengths = normal(2, 1, 64), normal(2, 1, 32), normal(2, 1, 32), normal(2, 2, 2, 9, 16), [6, 4]
    bias = normal(1, heads, 1, 6)
    for b, n in enumerate(lengths):
        old[:, b, :, n - 1] = k[b].reshape(2, 16), v[b].reshape(2, 16)
    seen = (torch.arange(9)[None, :] < torch.tensor(lengths)[:, None])[:, None, None, :]
    scores = T(np.pad(bias, ((0, 0), (0, 0), (0, 0), (0, 3)))).expand(2, 4, 1, 9).masked_fill(~seen, -np.inf)
    expected = joined(F.scaled_dot_product_attention(split(q, 4), *(T(x).repeat_interleave(2, 1) for x in old), attn_mask=scores))
    inputs = {"q": q, "k": k, "v": v, "pk": old[0], "pv": old[1], "n": np.array(lengths, np.int32) - 1}
    inputs |= {"t": np.array(6, np.int32), "c": None, "s": None, "p": None, "b": bias}
    check("GroupQueryAttention", inputs, {"num_heads": 4, "kv_num_heads": 2}, [expected], consts=("t",), outputs=3)


# -- weights in blocks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0, 2])
@pytest.mark.parametrize("bits,zeros", [(4, False), (4, True), (8, False), (8, True)])
def test_products_with_weights_in_blocks_read_packed_weights(bits, zeros, level):
    k, n, block = 96, 10, 32
    q = RNG.integers(0, 1 << bits, (n, k // block, block)).astype(np.uint8)
    raw = q if bits == 8 else q[..., 0::2] | q[..., 1::2] << 4
    scales = RNG.uniform(0.01, 0.02, (n, k // block)).astype(np.float32 if level == 0 else np.float16).astype(np.float32)
    zero = RNG.integers(0, 1 << bits, (n, 3)).astype(np.uint8)
    kept = zero if bits == 8 else np.stack([zero[:, 0] | zero[:, 1] << 4, zero[:, 2]], 1)
    weight = (q.astype(np.float64) - (zero[..., None] if zeros else 1 << (bits - 1))) * scales[..., None]
    x = normal(2, 3, k)
    inputs = {"x": x, "w": raw, "s": scales.reshape(-1)} | ({"z": kept.reshape(-1)} if zeros else {})
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": level}
    expected = x @ weight.reshape(n, k).T
    consts = tuple(inputs)[1:]
    check("MatMulNBits", inputs, attrs, [expected], consts, atol=1e-4)
    ops = {node.op.name for node in rlx.from_onnx(made("MatMulNBits", inputs, attrs, 1, consts)).nodes()}
    assert ("dequant_matmul" in ops) == (level == 2)


@pytest.mark.parametrize("bits,k,block,level,zeros", [
    (4, 160, 128, 0, False), (2, 64, 32, 0, False), (4, 48, 16, 2, False), (8, 40, 64, 4, False), (4, 80, 32, 2, True),
    (8, 40, 128, 2, True),
])  # fmt: skip
def test_products_with_weights_in_blocks_of_any_size(bits, k, block, level, zeros):
    n, groups = 6, -(-k // block)
    q = RNG.integers(0, 1 << bits, (n, groups * block)).astype(np.uint8)
    scales = RNG.uniform(1, 2, (n, groups)).astype(np.float16).astype(np.float32)
    scales = scales if level != 4 else scales * np.float32(1e-9)  # too small for f16
    raw = sum(q[:, i :: 8 // bits].astype(int) << i * bits for i in range(8 // bits)).astype(np.uint8)
    zero = RNG.uniform(0, 1 << bits, (n, groups)).astype(np.float32) if zeros else np.full((n, groups), 1 << bits - 1, np.float32)
    weight = ((q.astype(np.float64) - np.repeat(zero, block, 1)) * np.repeat(scales, block, 1))[:, :k]
    x = normal(3, k)
    inputs = {"x": x, "w": raw.reshape(n, groups, -1), "s": scales.reshape(-1)} | ({"z": zero} if zeros else {})
    attrs = {"K": k, "N": n, "bits": bits, "block_size": block, "accuracy_level": level}
    found = OnnxModel(made("MatMulNBits", inputs, attrs, 1, tuple(inputs)[1:]))(x)
    np.testing.assert_allclose(found, x @ weight.T, rtol=1e-5, atol=1e-5 * np.abs(weight).max())


WRONG = {
    "block": ("MatMulNBits", {"block_size": 0}, "block_size 0 is no number of columns"),
    "columns": ("MatMulNBits", {"K": 128}, r"operand 2 has scales of dims \[8\], and \[4, 4\] are needed"),
    "rows": ("MatMulNBits", {"N": 5}, r"operand 2 has scales of dims \[8\], and \[5, 2\] are needed"),
    "both": ("MatMulNBits", {"N": 8, "K": 32}, r"operand 1 has dims \[3, 2, 16\], and 8 rows of 32 integers of 4 bits are"),
    "one row": ("MatMulNBits", {"N": 1, "K": 256}, r"operand 1 has dims \[3, 2, 16\], and 1 rows of 256 integers of 4 bits are"),
    "table": ("GatherBlockQuantized", {"block_size": -32}, "block_size -32 is no number of columns"),
    "scales": ("GatherBlockQuantized", {"block_size": 16}, r"operand 2 has scales of dims \[8\], and \[3, 2, 2\] are needed"),
    "axis": ("GatherBlockQuantized", {"quantize_axis": 5}, "quantize_axis 5 is out of range for 3 dims"),
    "zeros": ("MatMulNBits", {}, r"operand 3 has zero points of dims \[8\], and \[4, 1\] are needed"),
    "zeros of rows": ("GatherBlockQuantized", {}, r"operand 3 has zero points of dims \[4\], and \[4, 2, 1\] are needed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_blocks_that_do_not_fit_weights_and_scales_are_refused_with_the_dims_that_are_needed(case):
    op, attrs, message = WRONG[case]
    rows = 3 if case in ("both", "one row", "scales") else 4
    q, table = RNG.integers(0, 256, (rows, 2, 16)).astype(np.uint8), op == "GatherBlockQuantized"
    x, s = normal(2, attrs.get("K", 64)), np.ones(8, np.float32)
    inputs = {"w": q, "i": np.array([0]), "s": s} if table else {"x": x, "w": q, "s": s}
    inputs |= {"z": np.zeros(4 if table else 8, np.uint8)} if "zeros" in case else {}
    attrs = {"bits": 4, "block_size": 32, **({"quantize_axis": 2} if table else {"K": 64, "N": 4}), **attrs}
    with pytest.raises(Unsupported, match=message):
        rlx.from_onnx(made(op, inputs, attrs, 1, [name for name in inputs if name not in "xi"]))


def test_weights_of_the_same_integers_with_other_scales_are_apart():
    q, x = RNG.integers(0, 256, (4, 1, 16)).astype(np.uint8), normal(2, 32)
    inputs = {"x": x, "w": q, "s": np.full(4, 0.5, np.float32)}
    model = made("MatMulNBits", inputs, {"K": 32, "N": 4, "bits": 4, "block_size": 32}, consts=("w", "s"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.full(4, 2, np.float32), "t"))
    other = onnx.NodeProto.FromString(model.graph.node[0].SerializeToString())
    other.input[2], other.output[0] = "t", "y1"
    model.graph.node.append(other)
    model.graph.output.append(onnx.helper.make_tensor_value_info("y1", TensorProto.FLOAT, None))
    one, two = OnnxModel(model)(x)
    np.testing.assert_allclose(two, one * 4, rtol=1e-6)


@pytest.mark.parametrize("kind", ["bytes", "INT4", "UINT4", "bytes8"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_rows_of_a_table_in_blocks_are_decoded(kind, zeros, half):
    """From packed weights, or from integers of four bits: the table is not decoded as a whole."""
    rows, at, bits = 70, np.array([[3, 0], [-1, 6]]), 8 if kind == "bytes8" else 4
    q = RNG.integers(0, 1 << bits, (rows, 64)).astype(np.uint8)
    zero = RNG.integers(0, 1 << bits, (rows, 2)).astype(np.uint8)
    scales = RNG.uniform(0.01, 0.02, (rows, 2)).astype(np.float32)
    scales = scales.astype(np.float16).astype(np.float32) if half else scales
    true, least = (v.astype(int) - (8 if kind == "INT4" else 0) for v in (q, zero))
    least = least if zeros else 0 * least + ((1 << bits - 1) if "bytes" in kind else 0)
    expected = ((true - np.repeat(least, 32, 1)) * np.repeat(scales, 32, 1)).astype(np.float32)[at]
    whole = lambda v: v if bits == 8 else v[:, 0::2] | v[:, 1::2] << 4  # noqa: E731
    inputs = {"w": whole(q), "i": at, "s": scales} | ({"z": whole(zero)} if zeros else {})
    attrs = {"block_size": 32, "bits": bits, "quantize_axis": 1}
    model = made("GatherBlockQuantized", inputs, attrs, 1, ("w", "s", "z")[: 2 + zeros])
    for tensor in model.graph.initializer:
        if tensor.name in "wz" and "INT" in kind:
            raw = ((q if tensor.name == "w" else zero) ^ (8 if kind == "INT4" else 0)).reshape(-1)
            dims = (rows, 64 if tensor.name == "w" else 2)
            packed = (raw[0::2] | raw[1::2] << 4).tobytes()
            tensor.CopyFrom(onnx.helper.make_tensor(tensor.name, TensorProto.DataType.Value(kind), dims, packed, raw=True))
    net = OnnxModel(model)
    np.testing.assert_allclose(net(at), expected, rtol=1e-6)
    regions = net.executable({"i": at}).memory_plan().regions
    assert regions["params"] + regions["prepared"] + regions["constants"] < rows * 64 * (1.3 if bits == 8 else 0.8)
    if (judge := runtime(model, {"i": at})) is not None:
        np.testing.assert_allclose(judge[0], expected, rtol=1e-6)


def test_weights_in_blocks_are_packed_once_for_all_dims(monkeypatch):
    scales = np.full(8, 0.0625, np.float32)
    inputs = {"x": normal(1, 32), "w": RNG.integers(0, 256, (8, 1, 16)).astype(np.uint8), "s": scales}
    proto = made("MatMulNBits", inputs, {"K": 32, "N": 8, "bits": 4, "block_size": 32, "accuracy_level": 2}, consts=("w", "s"))
    proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param = "rows"
    from rlx.frontends.onnx.ops import blocks

    calls, unpack = [], blocks.unpacked
    monkeypatch.setattr(blocks, "unpacked", lambda *args: calls.append(args) or unpack(*args))
    model = OnnxModel(proto)
    for rows in (1, 3, 2):
        x = normal(rows, 32)
        weight = (unpack(inputs["w"].reshape(8, -1), 4).astype(np.float32) - 8) * 0.0625
        np.testing.assert_allclose(model(x), x @ weight.T, rtol=1e-4, atol=1e-4)
    assert len(model.reasons) == 3 and len(calls) == 1


# -- refusals ------------------------------------------------------------------------------------------------------------


def test_operands_and_attributes_that_are_not_known_are_refused():
    """These operators have no schema in the onnx package that would find them."""
    x, norm = normal(1, 2, 64), normal(16)
    inputs = {"q": x, "k": x, "v": x, "pk": None, "pv": None, "n": np.array([1], np.int32), "t": np.array(2, np.int32)}
    attrs = {"num_heads": 4, "kv_num_heads": 4}
    for more, found in (({"sliding_window_cache": 1}, "attribute 'sliding_window_cache'"), ({"causal": 0}, "later keys")):
        with pytest.raises(Unsupported, match=found):
            rlx.from_onnx(made("GroupQueryAttention", inputs, attrs | more, 3, ("t",)))
    more = dict.fromkeys(("c", "s", "p", "b", "h")) | {"ks": normal(1), "vs": normal(1)}
    with pytest.raises(Unsupported, match="not supported: operand 12, operand 13"):
        rlx.from_onnx(made("GroupQueryAttention", inputs | more, attrs, 3, ("t",)))
    more |= {"ks": None, "vs": None, "qn": norm, "kn": norm}
    model = made("GroupQueryAttention", inputs | more, attrs, 3, ("t",))
    turn = lambda y: F.rms_norm(split(y, 4), (16,), T(norm), 1e-6)  # noqa: E731
    expected = F.scaled_dot_product_attention(turn(x), turn(x), split(x, 4), is_causal=True)
    found = OnnxModel(model).run({k: v for k, v in (inputs | more).items() if v is not None and k != "t"})
    np.testing.assert_allclose(found["y0"], joined(expected), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("op,inputs,attrs,why", [
    ("RotaryEmbedding", {"x": normal(2, 3, 32), "p": np.array([5]), "c": TABLES[0], "s": TABLES[1]},
     {"num_heads": 2, "rotary_embedding_dim": 8}, "tables of 8 angles are for 16 columns of a head, and 8 are to be turned"),
    ("MultiHeadAttention", {"q": normal(1, 3, 8), "k": normal(1, 5, 8), "v": normal(1, 5, 8)},
     {"num_heads": 2, "unidirectional": 1}, "unidirectional attention of 3 queries to 5 keys, 0 of them past"),
    ("GroupQueryAttention", {"q": normal(1, 2, 8), "k": normal(1, 2, 8), "v": normal(1, 2, 8), "pk": None, "pv": None,
                             "n": np.array([1], np.int32), "t": np.array(2, np.int32)},
     {"num_heads": 2, "kv_num_heads": 2, "local_window_size": 0}, "windows of 0 keys"),
])  # fmt: skip
def test_attention_that_is_not_supported_says_why(op, inputs, attrs, why):
    with pytest.raises(Unsupported, match=why):
        rlx.from_onnx(made(op, inputs, attrs, 3 if "Attention" in op else 1, [name for name in inputs if name in "tcs"]))
