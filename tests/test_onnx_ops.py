"""Handlers of ONNX operators where ONNX's own cases have none: old opsets, dtypes, negative axes, named dims, state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper, numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from rlx.errors import Unsupported  # noqa: E402
from rlx.frontends.onnx import from_onnx  # noqa: E402
from rlx.frontends.onnx.model import OnnxModel  # noqa: E402

RNG = np.random.default_rng(3)
Arrays = dict[str, np.ndarray]


def model_of(nodes: list[Any], inputs: dict[str, Any], outputs: list[str], opset: int, known: Arrays | None = None) -> Any:
    """A model of nodes; an input is an array, for its dtype and dims, or (dtype, dims)."""
    infos = []
    for name, x in inputs.items():
        dtype, dims = x if isinstance(x, tuple) else (x.dtype, x.shape)
        infos.append(helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims))
    results = [helper.make_empty_tensor_value_info(name) for name in outputs]
    stored = [numpy_helper.from_array(x, name) for name, x in (known or {}).items()]
    graph = helper.make_graph(nodes, "g", infos, results, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def node_model(op: str, inputs: Arrays, opset: int, outputs: int = 1, known: tuple[str, ...] = (), **attrs: Any) -> Any:
    names = [f"out{i}" for i in range(outputs)]
    node = helper.make_node(op, list(inputs), names, **attrs)
    free = {n: x for n, x in inputs.items() if n not in known}
    return model_of([node], free, names, opset, {n: inputs[n] for n in known})


def results(op: str, inputs: Arrays, opset: int, device: str = "cpu", **facts: Any) -> list[np.ndarray]:
    """The outputs of one node."""
    known = facts.get("known", ())
    model = OnnxModel(node_model(op, inputs, opset, **facts), device=device)
    return list(model.run({n: x for n, x in inputs.items() if n not in known}).values())


def floats(*dims: int, dtype: Any = np.float32, low: float = -2.0, high: float = 2.0) -> np.ndarray:
    return RNG.uniform(low, high, dims).astype(dtype)


def whole(*dims: int, low: int = -9, high: int = 10, dtype: Any = np.int64) -> np.ndarray:
    return RNG.integers(low, high, dims).astype(dtype)


# operator, operands, opset, attributes: compared with ONNX's reference in the same opset
REFERENCE: list[tuple[str, Arrays, int, dict[str, Any]]] = [
    ("DFT", {"x": floats(2, 9, 2), "length": np.array(7)}, 17, {"known": ("length",), "axis": -2}),
    ("DFT", {"x": floats(2, 9, 1), "n": np.array(20), "axis": np.array(1)}, 20, {"onesided": 1, "known": ("n", "axis")}),
    ("STFT", {"x": floats(2, 50, 1), "step": np.array(8), "window": floats(16)}, 17, {"known": ("step", "window")}),
    ("Clip", {"x": floats(3, 5)}, 6, {"min": -0.5, "max": 1.0}),
    ("Clip", {"x": whole(4, 3, dtype=np.uint8, low=0, high=255), "lo": np.uint8(9), "hi": np.uint8(99)}, 13, {}),
    ("Squeeze", {"x": floats(1, 3, 1, 2)}, 11, {"axes": [0, -2]}),
    ("Unsqueeze", {"x": floats(3, 2)}, 11, {"axes": [0, 3]}),
    ("Slice", {"x": floats(5, 6)}, 9, {"starts": [1, -4], "ends": [2147483647, -1], "axes": [0, 1]}),
    ("Slice", {"x": floats(5, 6), "s": np.array([4, -1]), "e": np.array([-9, 0]), "a": np.array([-2, -1]),
               "t": np.array([-2, -1])}, 13, {}),
    ("Slice", {"x": floats(3, 2), "s": np.array([1]), "e": np.array([-(2**62)]), "a": np.array([0])}, 13, {}),
    ("ReduceSum", {"x": floats(2, 3, 4)}, 11, {"axes": [-1, 0], "keepdims": 0}),
    ("ReduceMean", {"x": whole(3, 5, dtype=np.int32)}, 13, {"axes": [1]}),
    ("ReduceMax", {"x": floats(2, 3, 4)}, 13, {"axes": [-2]}),
    ("ReduceL2", {"x": floats(2, 3, 4, dtype=np.float64)}, 13, {"axes": [-1]}),
    ("ReduceMin", {"x": whole(3, 4) > 0, "axes": np.array([1])}, 20, {}),
    ("ArgMin", {"x": whole(3, 7, high=2, low=0)}, 13, {"axis": -1, "select_last_index": 1, "keepdims": 0}),
    ("TopK", {"x": floats(3, 7)}, 9, {"k": 3, "axis": 0, "outputs": 2}),
    ("TopK", {"x": whole(2, 5, 3), "k": np.array([2])}, 11, {"axis": 1, "largest": 0, "outputs": 2}),
    ("Split", {"x": floats(2, 7)}, 11, {"axis": -1, "split": [3, 4], "outputs": 2}),
    ("Split", {"x": floats(7, 2)}, 18, {"num_outputs": 3, "outputs": 3}),
    ("Pad", {"x": floats(3, 4)}, 2, {"pads": [1, 0, 0, 2], "value": 1.5}),
    ("Pad", {"x": floats(3, 4), "p": np.array([2, 1]), "v": np.float32(0), "axes": np.array([-1])}, 19, {"mode": "wrap"}),
    ("CumSum", {"x": whole(3, 4, dtype=np.int32), "axis": np.array(-1)}, 14, {"exclusive": 1, "reverse": 1}),
    ("Gather", {"x": floats(3, 4), "i": np.array([[-1, 0], [2, -4]])}, 13, {"axis": -1}),
    ("GatherElements", {"x": floats(3, 4), "i": np.array([[-1, 0], [2, -4], [1, 1]])}, 13, {"axis": 1}),
    ("GatherND", {"x": floats(2, 3, 4), "i": np.array([[[-1]], [[1]]])}, 13, {"batch_dims": 1}),
    ("Mod", {"x": whole(9), "y": np.array([-3, 4, 2, -5, 7, 1, -1, 6, 3])}, 13, {}),
    ("Mod", {"x": floats(9), "y": floats(9)}, 13, {"fmod": 1}),
    ("Pow", {"x": np.array([-3, -1, 0, 1, 2, 3, -1, 1]), "y": np.array([3, 5, 0, 9, 62, 39, 70, 99])}, 15, {}),
    ("Pow", {"x": floats(4, low=0.5), "y": whole(4, low=-3, high=4)}, 15, {}),
    ("BitShift", {"x": whole(4, low=0, high=255, dtype=np.uint8), "n": np.array([0, 1, 7, 3], np.uint8)}, 11,
     {"direction": "LEFT"}),
    ("Hardmax", {"x": floats(2, 3, 4)}, 13, {"axis": -2}),
    ("Einsum", {"a": floats(3, 2, 2), "b": floats(3)}, 12, {"equation": "bii,b->i"}),
    ("Einsum", {"a": floats(3, 4), "b": floats(4, 3)}, 12, {"equation": "ij,ji"}),
    ("Gemm", {"a": whole(3, 2, dtype=np.int32), "b": whole(4, 2, dtype=np.int32), "c": whole(4, dtype=np.int32)}, 11,
     {"transB": 1}),
    ("MatMul", {"a": floats(3), "b": floats(2, 3, 4)}, 13, {}),
    ("MatMul", {"a": floats(2, 4, 3), "b": floats(3)}, 13, {}),
    ("DepthToSpace", {"x": floats(2, 8, 3, 2)}, 11, {"blocksize": 2, "mode": "CRD"}),
    ("OneHot", {"i": np.array([[-1, 2], [9, 0]]), "d": np.array(4), "v": np.array([5, 7], np.int32)}, 11, {"axis": 0}),
    ("Range", {"a": np.float32(1), "b": np.float32(-2), "c": np.float32(-0.75)}, 11, {}),
    ("LRN", {"x": floats(5, 5, 3, 2)}, 13, {"size": 4, "alpha": 0.1, "beta": 0.6, "bias": 2.0}),
    ("MeanVarianceNormalization", {"x": floats(2, 3, 4, 2)}, 13, {"axes": [0, -1]}),
    ("Trilu", {"x": whole(4, 5), "k": np.array(-1)}, 14, {"upper": 0}),
    ("DeformConv", {"x": floats(2, 4, 6, 5), "w": floats(6, 2, 3, 2), "offset": floats(2, 24, 3, 4), "b": floats(6),
                    "mask": floats(2, 12, 3, 4)}, 19,
     {"group": 2, "offset_group": 2, "strides": [2, 1], "pads": [1, 0, 1, 1], "dilations": [1, 2]}),
    ("ReverseSequence", {"x": floats(3, 4, 2), "n": np.array([4, 1, 2])}, 10, {"time_axis": 1, "batch_axis": 0}),
]  # fmt: skip


@pytest.mark.parametrize("op, inputs, opset, attrs", REFERENCE, ids=[f"{c[0]}-{c[2]}-{i}" for i, c in enumerate(REFERENCE)])
def test_operators_of_old_opsets_and_other_dtypes_are_those_of_the_reference(
    op: str, inputs: Arrays, opset: int, attrs: dict[str, Any]
) -> None:
    want = ReferenceEvaluator(node_model(op, inputs, opset, **attrs)).run(None, inputs)
    for device in ("ref", "cpu"):
        for found, expected in zip(results(op, inputs, opset, device, **attrs), want, strict=True):
            expected = np.asarray(expected)
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("op, function", [("Softmax", F.softmax), ("LogSoftmax", F.log_softmax)])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_before_opset_13_is_over_all_later_dims_together(op: str, function: Any, axis: int) -> None:
    x = floats(2, 3, 4)
    (found,) = results(op, {"x": x}, 12, axis=axis)
    want = function(torch.from_numpy(x).flatten(axis % 3), -1).reshape(x.shape)
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", ["constant", "reflect", "edge"])
def test_padding_below_zero_cuts(mode: str) -> None:
    x = floats(5, 6)
    (found,) = results("Pad", {"x": x, "p": np.array([-1, 2, 2, -3])}, 13, mode=mode)
    np.testing.assert_array_equal(found, np.pad(x[1:, :-3], ((0, 2), (2, 0)), mode=mode))  # type: ignore[call-overload]


def test_a_slice_backwards_starts_at_the_first_element_if_its_start_is_before_it() -> None:
    inputs = {"x": floats(3, 2), "s": np.array([-9]), "e": np.array([-99]), "a": np.array([0]), "t": np.array([-1])}
    np.testing.assert_array_equal(results("Slice", inputs, 13)[0], inputs["x"][:1])


def test_determinants_are_those_of_numpy_for_singular_and_permuted_matrices() -> None:
    x = np.concatenate([floats(3, 5, 5, dtype=np.float64), np.eye(5)[None, [2, 0, 1, 4, 3]], np.ones((1, 5, 5))])
    (found,) = results("Det", {"x": x}, 22)
    np.testing.assert_allclose(found, np.linalg.det(x), rtol=1e-12, atol=1e-12)


def test_integer_powers_wrap_and_negative_powers_of_others_than_one_are_zero() -> None:
    (found,) = results("Pow", {"x": np.array([7, -1, 1, 5, 2]), "y": np.array([90, -3, -4, -2, 64])}, 15)
    assert found.tolist() == [(7**90 + 2**63) % 2**64 - 2**63, -1, 1, 0, 0]


def test_batch_normalisation_of_old_opsets_has_statistics_per_element() -> None:
    x, *params = floats(2, 3, 4), *(floats(3, 4, low=0.5) for _ in range(4))
    names = dict(zip(("x", "scale", "bias", "mean", "var"), (x, *params)))
    (found,) = results("BatchNormalization", names, 7, spatial=0)
    scale, bias, mean, variance = params
    np.testing.assert_allclose(found, (x - mean) / np.sqrt(variance + 1e-5) * scale + bias, rtol=1e-5)


def test_group_normalisation_before_opset_21_has_a_scale_per_group() -> None:
    x, scale, bias = floats(2, 6, 4), floats(3), floats(3)
    (found,) = results("GroupNormalization", {"x": x, "scale": scale, "bias": bias}, 18, num_groups=3)
    per_channel = (torch.from_numpy(v.repeat(2)) for v in (scale, bias))
    want = F.group_norm(torch.from_numpy(x), 3, *per_channel)
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-4, atol=1e-5)


def test_a_named_batch_stays_open_through_views_norms_and_products() -> None:
    nodes = [
        helper.make_node("LayerNormalization", ["x", "scale"], ["n"]), helper.make_node("MatMul", ["n", "w"], ["y"]),
        helper.make_node("Reshape", ["y", "dims"], ["r"]), helper.make_node("Softmax", ["r"], ["s"]),
        helper.make_node("Transpose", ["s"], ["t"], perm=[0, 2, 1]),
        helper.make_node("Slice", ["t", "from", "to", "axes"], ["out"]),
    ]  # fmt: skip
    known = {
        "scale": floats(6), "w": floats(6, 8), "dims": np.array([0, 2, -1]), "from": np.array([1]), "to": np.array([99]),
        "axes": np.array([1]),
    }  # fmt: skip
    model = model_of(nodes, {"x": (np.float32, ["batch", 6])}, ["out"], 17, known)
    graph = from_onnx(model)
    assert str(graph.outputs[0].shape) == "f32[batch,3,2]"
    x = floats(5, 6)
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(OnnxModel(model).run({"x": x})["out"], want, rtol=1e-5, atol=1e-6)


def test_a_named_batch_stays_open_through_convolutions_and_pools() -> None:
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"]), helper.make_node("MaxPool", ["a"], ["b"], kernel_shape=[2, 2]),
        helper.make_node("ConvTranspose", ["b", "t"], ["c"], strides=[2, 2]),
        helper.make_node("ConvTranspose", ["c", "t"], ["d"]),
        helper.make_node("GlobalAveragePool", ["d"], ["e"]), helper.make_node("Flatten", ["e"], ["out"]),
    ]  # fmt: skip
    known = {"w": floats(4, 3, 3, 3), "t": floats(4, 4, 2, 2)}
    model = model_of(nodes, {"x": (np.float32, ["batch", 3, 9, 9])}, ["out"], 17, known)
    assert str(from_onnx(model).outputs[0].shape) == "f32[batch,4]"
    x = floats(3, 3, 9, 9)
    (want,) = ReferenceEvaluator(model).run(None, {"x": x})
    np.testing.assert_allclose(OnnxModel(model).run({"x": x})["out"], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("past, queries", [(0, 5), (3, 2)])
def test_attention_with_a_causal_mask_and_grouped_heads_is_that_of_torch(past: int, queries: int) -> None:
    q, k, v = floats(2, 4, queries, 8), floats(2, 2, queries, 8), floats(2, 2, queries, 6)
    inputs = {"q": q, "k": k, "v": v, "": np.zeros(0), "pk": floats(2, 2, past, 8), "pv": floats(2, 2, past, 6)}
    inputs = inputs if past else {n: inputs[n] for n in "qkv"}
    node = helper.make_node("Attention", list(inputs), ["y", "keys", "values"], is_causal=1)
    model = model_of([node], {n: x for n, x in inputs.items() if n}, ["y", "keys", "values"], 23)
    found = OnnxModel(model).run({n: x for n, x in inputs.items() if n})
    keys, values = (np.concatenate([inputs[p], x], 2) if past else x for p, x in (("pk", k), ("pv", v)))
    mask = torch.ones(queries, past + queries, dtype=torch.bool).tril(past)
    want = F.scaled_dot_product_attention(*map(torch.from_numpy, (q, keys, values)), attn_mask=mask, enable_gqa=True)
    np.testing.assert_allclose(found["y"], want.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found["keys"], keys)
    np.testing.assert_array_equal(found["values"], values)


def test_random_numbers_differ_from_run_to_run_and_repeat_with_the_program() -> None:
    node = helper.make_node("RandomNormal", [], ["out"], shape=[4, 500], mean=3.0, scale=2.0, dtype=TensorProto.DOUBLE)
    first, second = OnnxModel(model_of([node], {}, ["out"], 22)), OnnxModel(model_of([node], {}, ["out"], 22))
    a, b = first.run({})["out"], first.run({})["out"]
    assert a.dtype == np.float64 and a.shape == (4, 500) and not (a == b).any()
    assert abs(a.mean() - 3) < 0.2 and abs(a.std() - 2) < 0.2
    np.testing.assert_array_equal(second.run({})["out"], a)


@pytest.mark.parametrize("op", ["RandomUniform", "RandomUniformLike", "RandomNormalLike"])
def test_random_numbers_have_the_dims_and_the_spread_that_are_asked_for(op: str) -> None:
    like = op.endswith("Like")
    spread = {"low": -1.0, "high": 3.0} if "Uniform" in op else {"mean": 1.0, "scale": 1.2}
    more = {} if like else {"shape": [3, 700]}
    (found,) = results(op, {"x": np.zeros((3, 700), np.float16)} if like else {}, 22, seed=2.0, **spread, **more)
    assert found.shape == (3, 700) and found.dtype == (np.float16 if like else np.float32)
    wide = found.astype(np.float64)
    assert abs(wide.mean() - 1) < 0.15 and abs(wide.std() - 4 / np.sqrt(12)) < 0.1
    assert "Normal" in op or (wide.min() >= -1 and wide.max() <= 3)


def test_a_global_pool_of_powers_is_a_norm() -> None:
    x = floats(2, 3, 4, 5)
    (found,) = results("GlobalLpPool", {"x": x}, 22, p=3)
    np.testing.assert_allclose(found, (np.abs(x) ** 3).sum((2, 3), keepdims=True) ** (1 / 3), rtol=1e-5)
    (found,) = results("GlobalLpPool", {"x": x}, 22)
    np.testing.assert_allclose(found, np.linalg.norm(x, axis=(2, 3), keepdims=True), rtol=1e-5)


def test_classes_are_drawn_by_their_logarithmic_probabilities() -> None:
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.0, 0.5, 0.5]], np.float32) + 1e-30)
    (found,) = results("Multinomial", {"x": logits}, 22, sample_size=2000, seed=5.0)
    shares = np.stack([(found == i).mean(1) for i in range(3)], 1)
    np.testing.assert_allclose(shares, np.exp(logits), atol=0.05)
    assert found.dtype == np.int32


def test_dropout_in_training_scales_what_it_keeps() -> None:
    x = floats(20, 50, low=1.0)
    inputs = {"x": x, "ratio": np.float32(0.25), "train": np.array(True)}
    y, kept = results("Dropout", inputs, 22, outputs=2)
    np.testing.assert_allclose(y, np.where(kept, x / 0.75, 0), rtol=1e-6)
    assert 0.65 < kept.mean() < 0.85
    (same,) = results("Dropout", {"x": x}, 7, ratio=0.9)
    np.testing.assert_array_equal(same, x)


# -- images, convolutions and pools: compared with torch ----------------------------------------------------------------


@pytest.mark.parametrize("auto_pad, strides", [("SAME_UPPER", 2), ("SAME_LOWER", 3), ("VALID", 1)])
def test_convolutions_pad_by_rule(auto_pad: str, strides: int) -> None:
    x, w, b = floats(2, 4, 7, 10), floats(6, 2, 3, 2), floats(6)
    (found,) = results("Conv", {"x": x, "w": w, "b": b}, 11, known=("w", "b"), auto_pad=auto_pad, strides=[strides] * 2, group=2)
    pads = [max(0, (-(-d // strides) - 1) * strides + k - d) if auto_pad != "VALID" else 0 for d, k in ((10, 2), (7, 3))]
    low = [p - p // 2 if auto_pad == "SAME_LOWER" else p // 2 for p in pads]
    wide = F.pad(torch.from_numpy(x), [v for p, a in zip(pads, low) for v in (a, p - a)])
    want = F.conv2d(wide, torch.from_numpy(w), torch.from_numpy(b), stride=strides, groups=2)
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-4, atol=1e-5)


def test_images_of_columns_are_those_of_torch() -> None:
    x = floats(2, 3 * 6, 12)
    inputs = {"x": x, "image": np.array([7, 9]), "block": np.array([3, 2])}
    (found,) = results("Col2Im", inputs, 18, dilations=[1, 3], pads=[1, 0, 0, 1], strides=[2, 2])
    want = F.fold(F.pad(torch.from_numpy(x), (0, 0)), (8, 10), (3, 2), dilation=(1, 3), stride=(2, 2))
    np.testing.assert_allclose(found, want.numpy()[:, :, 1:, :-1], rtol=1e-5, atol=1e-6)


def test_regions_are_pooled_bin_by_bin() -> None:
    x = floats(2, 3, 8, 9)
    regions = np.array([[0, 0, 0, 8, 7], [1, 2, 3, 5, 3], [1, 6, 6, 20, 20]], np.float32)
    (found,) = results("MaxRoiPool", {"x": x, "regions": regions}, 9, pooled_shape=[2, 3])
    for got, (image, *ends) in zip(found, regions.astype(int)):
        height, width = ends[3] - ends[1] + 1, ends[2] - ends[0] + 1
        for i, j in np.ndindex(2, 3):
            rows = slice(ends[1] + i * height // 2, ends[1] - (-(i + 1) * height // 2))
            columns = slice(ends[0] + j * width // 3, ends[0] - (-(j + 1) * width // 3))
            part = x[image, :, rows, columns]
            np.testing.assert_array_equal(got[:, i, j], part.max((1, 2)) if part.size else 0)


@pytest.mark.parametrize("op, opset", [("Upsample", 7), ("Upsample", 9), ("Resize", 10)])
@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_resizing_before_opset_11_places_elements_asymmetrically(op: str, opset: int, mode: str) -> None:
    x, scales = floats(1, 2, 4, 5), [1.0, 1.0, 2.0, 3.0]
    attrs = {"scales": scales} if opset == 7 else {}
    inputs = {"x": x} if opset == 7 else {"x": x, "scales": np.array(scales, np.float32)}
    (found,) = results(op, inputs, opset, mode=mode, **attrs)
    want = x
    for axis, scale in ((2, 2), (3, 3)):
        at = np.arange(x.shape[axis] * scale) / scale
        low = np.floor(at).astype(int)
        part = 0 if mode == "nearest" else np.expand_dims(at - low, tuple(range(1, 4 - axis)))
        want = want.take(low, axis) * (1 - part) + want.take(np.minimum(low + 1, x.shape[axis] - 1), axis) * part
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attrs", [
    {"strides": [2, 3], "pads": [1, 0, 0, 2], "output_padding": [1, 2], "dilations": [1, 2]}, {"output_shape": [9, 7]}, {},
])  # fmt: skip
def test_transposed_convolutions_are_gradients_of_convolutions(attrs: dict[str, Any]) -> None:
    x, w, b = floats(2, 4, 5, 3), floats(4, 3, 3, 2), floats(6)
    strides = [2, 3] if "strides" in attrs else [2, 2]
    (found,) = results("ConvTranspose", {"x": x, "w": w, "b": b}, 11, group=2, **({"strides": strides} | attrs))
    more, dilation = attrs.get("output_padding", [1, 2]), attrs.get("dilations", [1, 1])
    want = F.conv_transpose2d(*map(torch.from_numpy, (x, w, b)), strides, 0, 0, 2, dilation)
    wide = F.pad(want - torch.from_numpy(b)[:, None, None], (0, more[1], 0, more[0])) + torch.from_numpy(b)[:, None, None]
    if "pads" in attrs:
        wide = wide[:, :, 1:, : wide.shape[3] - 2]
    elif "output_shape" in attrs:  # 11 rows without padding: one is cut before, as one behind; 6 columns: one is added
        wide = F.pad(want - torch.from_numpy(b)[:, None, None], (0, 1))[:, :, 1:-1] + torch.from_numpy(b)[:, None, None]
    else:
        wide = want
    np.testing.assert_allclose(found, wide.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dims", [(6, 7), (5, 8), (4, 4, 5)])
@pytest.mark.parametrize("count_padding", [0, 1])
def test_pools_with_ceil_mode_are_those_of_torch(dims: tuple[int, ...], count_padding: int) -> None:
    x, n = floats(2, 3, *dims), len(dims)
    attrs: dict[str, Any] = {"kernel_shape": [3] * n, "strides": [2] * n, "pads": [1] * (2 * n), "ceil_mode": 1}
    average, greatest = (F.avg_pool2d, F.max_pool2d) if n == 2 else (F.avg_pool3d, F.max_pool3d)
    (found,) = results("AveragePool", {"x": x}, 19, count_include_pad=count_padding, **attrs)
    want = average(torch.from_numpy(x), 3, 2, 1, ceil_mode=True, count_include_pad=bool(count_padding))
    np.testing.assert_allclose(found, want.numpy(), rtol=1e-5, atol=1e-6)
    values, places = results("MaxPool", {"x": x}, 12, outputs=2, **attrs)
    want, at = greatest(torch.from_numpy(x), 3, 2, 1, ceil_mode=True, return_indices=True)
    image = np.arange(6).reshape(2, 3, *(1,) * n) * int(np.prod(dims))
    np.testing.assert_array_equal(values, want.numpy())
    np.testing.assert_array_equal(places, at.numpy() + image)


def test_gradients_are_those_of_torch() -> None:
    text = """agraph (float[3,4] a, float[4] b, float[3,1] c) => (float[3,4] y, float[3,4] da, float[4] db, float[3,1] dc) {
      p = Mul (a, b)  q = Sub (p, c)  r = Div (q, b)  s = Tanh (r)  t = Exp (c)  u = Neg (s)  y = Mul (u, t)
      da, db, dc = ai.onnx.preview.training.Gradient <xs = ["a", "b", "c"], y = "y"> (a, b, c)
    }"""
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>\n' + text)
    given = [floats(3, 4), floats(4, low=0.5), floats(3, 1)]
    a, b, c = (torch.from_numpy(x).double().requires_grad_() for x in given)
    y = -torch.tanh((a * b - c) / b) * torch.exp(c)
    y.sum().backward()
    for found, expected in zip(OnnxModel(model)(*given), (y, a.grad, b.grad, c.grad)):
        np.testing.assert_allclose(found, expected.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("graph,why", [
    ("(float[4] a) => (float[4] d) { b, c = Split <num_outputs = 2> (a)  y = Mul (c, c)", "derivative of split is not supported"),
    ("() => (float[1] d) <float[1] a = {2.0}> { y = Mul (a, a)", "a value that is known when the model is imported"),
])  # fmt: skip
def test_derivatives_that_are_not_supported_say_why(graph: str, why: str) -> None:
    text = f'agraph {graph} d = ai.onnx.preview.training.Gradient <xs = ["a"], y = "y"> (a) }}'
    model = onnx.parser.parse_model('<ir_version: 10, opset_import: ["" : 21, "ai.onnx.preview.training" : 1]>\n' + text)
    with pytest.raises(Unsupported, match=why):
        from_onnx(model)
