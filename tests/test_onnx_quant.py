"""Quantised ONNX models: narrow element types, Q/DQ graphs on integers, and ONNX Runtime's quantised operators."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto

import rlx
from rlx.errors import Unsupported
from rlx.frontends.onnx import OnnxModel
from rlx.frontends.onnx.narrow import rounded
from tests.onnx_models import runtime

RNG = np.random.default_rng(5)
NARROW = ["FLOAT4E2M1", "FLOAT6E2M3", "FLOAT6E3M2", "FLOAT8E4M3FNUZ", "FLOAT8E5M2FNUZ", "INT4", "UINT4", "INT2", "UINT2"]


def evaluated(x, make):
    graph = rlx.Graph("cast")
    graph.set_outputs([make(graph.input("x", x.shape, x.dtype))])
    return rlx.Session("ref").compile(graph).run({"x": x})[0]


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_casts_to_narrow_types_round_as_ml_dtypes(name, dtype):
    code = dict(TensorProto.DataType.items()).get(name)
    if code is None:
        pytest.skip(f"onnx {onnx.__version__} has no {name}")
    kind = onnx.helper.tensor_dtype_to_np_dtype(code)
    halves = np.arange(-4096, 4096) / 64
    x = np.concatenate([halves, RNG.normal(size=4096) * 4, RNG.normal(size=512) * 1e-3]).astype(dtype)
    if "INT" not in name:
        x = np.concatenate([x, np.array([np.nan, -0.0, 1e-30, 6e4, -6e4], dtype)])
    with np.errstate(all="ignore"):
        expected = x.astype(kind).astype(np.float32)
        np.testing.assert_array_equal(evaluated(x, lambda v: rounded(v, code, saturate=False)).astype(np.float32), expected)
        if "FLOAT8" in name:
            expected = onnx.numpy_helper.saturate_cast(x, kind).astype(np.float32)
            np.testing.assert_array_equal(evaluated(x, lambda v: rounded(v, code)), expected)


@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
@pytest.mark.parametrize("saturate", [True, False])
def test_casts_to_powers_of_two_round_as_onnx_says(mode, saturate):
    bits = np.concatenate([np.arange(0, 2**31, 99_991), [0, 1, 0x400000, 0x7F7FFFFF, 0x7F800000]]).astype(np.uint32)
    x = bits.view(np.float32)
    expected = onnx.numpy_helper.to_float8e8m0(x, saturate, mode).astype(np.float32)
    found = evaluated(x, lambda v: rounded(v, TensorProto.FLOAT8E8M0, saturate, mode))
    np.testing.assert_array_equal(found, expected)


# -- products on integers ------------------------------------------------------------------------------------------------

def quantised_network(x_type, w_type, per_column, gemm):
    """y = QDQ(x) @ DQ(w), and what exact integers give."""
    k, n = 24, 10
    w = RNG.integers(*((0, 256) if w_type == np.uint8 else (-128, 128)), (k, n)).astype(w_type)
    ws = np.asarray(RNG.uniform(0.01, 0.02, n if per_column else ()), np.float32)
    wz = np.asarray((128 if w_type == np.uint8 else 0) + RNG.integers(0, 3, ws.shape)).astype(w_type)
    xs, xz, ys, yz = np.float32(0.05), x_type(100 if x_type == np.uint8 else -3), np.float32(0.2), np.uint8(120)
    consts = {"w": w.T if gemm else w, "ws": ws, "wz": wz, "xs": xs, "xz": xz, "ys": ys, "yz": yz}
    nodes = [
        onnx.helper.make_node("QuantizeLinear", ["x", "xs", "xz"], ["xq"]),
        onnx.helper.make_node("DequantizeLinear", ["xq", "xs", "xz"], ["xd"]),
        onnx.helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0 if gemm else 1),
        onnx.helper.make_node("Gemm" if gemm else "MatMul", ["xd", "wd"], ["h"], **({"transB": 1} if gemm else {})),
        onnx.helper.make_node("QuantizeLinear", ["h", "ys", "yz"], ["y"]),
    ]

    def expected(x):
        info = np.iinfo(x_type)
        q = np.clip(np.rint(x / xs) + float(xz), info.min, info.max).astype(np.int64) - int(xz)
        sums = q @ (w.astype(np.int64) - wz.astype(np.int64))
        return np.clip(np.rint((sums.astype(np.float32) * (xs * ws)) / ys) + 120, 0, 255).astype(np.uint8)

    return network(nodes, consts, ["m", k], TensorProto.UINT8), expected


def network(nodes, consts, dims, out=TensorProto.FLOAT, opset=21, kind=TensorProto.FLOAT):
    make = onnx.helper.make_tensor_value_info
    rank = len(dims)
    inits = [onnx.numpy_helper.from_array(np.asarray(v), k) for k, v in consts.items()]
    results = [make(nodes[-1].output[0], out, [f"o{i}" for i in range(rank)])]
    graph = onnx.helper.make_graph(nodes, "net", [make("x", kind, dims)], results, inits)
    domains = [onnx.helper.make_opsetid("", opset), onnx.helper.make_opsetid("com.microsoft", 1)]
    return onnx.helper.make_model(graph, opset_imports=domains, ir_version=10)


@pytest.mark.parametrize("gemm", [False, True])
@pytest.mark.parametrize("per_column", [False, True])
@pytest.mark.parametrize("x_type,w_type", [(np.uint8, np.int8), (np.int8, np.int8), (np.uint8, np.uint8), (np.int8, np.uint8)])
def test_products_of_dequantised_tensors_are_exact_integers(x_type, w_type, per_column, gemm):
    model, expected = quantised_network(x_type, w_type, per_column, gemm)
    x = RNG.normal(size=(7, 24)).astype(np.float32) * 4
    np.testing.assert_array_equal(OnnxModel(model)(x), expected(x))
    ops = {node.op.name for node in rlx.from_onnx(model).nodes()}
    assert "int8_matmul" in ops and "matmul" not in ops


def convolved(x, w, groups, padding):
    """Sums of a convolution of integers, i64."""
    import torch

    made = torch.nn.functional.conv2d(torch.from_numpy(x).double(), torch.from_numpy(w).double(), groups=groups, padding=padding)
    return made.numpy().astype(np.int64)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("x_type,w_type", [(np.uint8, np.int8), (np.int8, np.int8), (np.uint8, np.uint8)])
def test_convolutions_of_dequantised_tensors_are_exact_integers(x_type, w_type, groups):
    w = RNG.integers(0, 100, (8, 4 // groups, 3, 3)).astype(w_type)
    ws, wz = RNG.uniform(0.01, 0.02, 8).astype(np.float32), (RNG.integers(0, 3, 8) * (groups > 1)).astype(w_type)
    xs, xz, ys, yz = np.float32(0.05), x_type(7), np.float32(0.5), np.int8(4)
    bias = RNG.integers(-900, 900, 8).astype(np.int32)
    consts = {"w": w, "ws": ws, "wz": wz, "xs": xs, "xz": xz, "ys": ys, "yz": yz, "b": bias, "bs": xs * ws}
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xd"]),
        onnx.helper.make_node("DequantizeLinear", ["w", "ws", "wz"], ["wd"], axis=0),
        onnx.helper.make_node("DequantizeLinear", ["b", "bs"], ["bd"], axis=0),
        onnx.helper.make_node("Conv", ["xd", "wd", "bd"], ["h"], group=groups, pads=[1, 1, 1, 1]),
        onnx.helper.make_node("QuantizeLinear", ["h", "ys", "yz"], ["y"]),
    ]
    kind = TensorProto.UINT8 if x_type == np.uint8 else TensorProto.INT8
    model = network(nodes, consts, [2, 4, 9, 7], TensorProto.INT8, kind=kind)
    x = RNG.integers(0, 120, (2, 4, 9, 7)).astype(x_type)
    sums = convolved(x.astype(np.int64) - 7, w.astype(np.int64) - wz.astype(np.int64).reshape(-1, 1, 1, 1), groups, 1)
    exact = (sums + bias.reshape(-1, 1, 1)) * (np.float64(xs) * ws.astype(np.float64)).reshape(-1, 1, 1) / ys
    found = OnnxModel(model)(x).astype(np.int64)
    clear = np.abs(exact - np.floor(exact) - 0.5) > 1e-4  # apart from ties, which rounding in f32 may turn
    np.testing.assert_array_equal(found[clear], np.clip(np.rint(exact) + 4, -128, 127).astype(np.int64)[clear])
    assert clear.mean() > 0.99
    nodes = rlx.from_onnx(model).nodes()
    ops = [node for node in nodes if node.op.name == "conv"]
    assert ops and all(node.inputs[0].dtype == rlx.u8 and node.inputs[1].dtype == rlx.i8 for node in ops)
    floats = [node.op.name for node in nodes if node.shapes[0].dtype == rlx.f32 and node.shapes[0].dims == (2, 8, 9, 7)]
    assert floats == ["cast", "mul", "round", "add", "clip"]  # one factor, and the bias is in the sums


@pytest.mark.parametrize("why", ["scale", "zero", "range"])
def test_a_bias_that_sums_cannot_take_is_added_in_floats(why):
    """With a scale of its own, a zero point, or a number that would leave 32 bits."""
    w = RNG.integers(-100, 100, (8, 4, 3, 3)).astype(np.int8)
    bias = RNG.integers(-900, 900, 8).astype(np.int32)
    bias[3] = 2**31 - 1 if why == "range" else 300
    consts = {"w": w, "ws": np.float32(0.02), "xs": np.float32(0.05), "xz": np.uint8(7), "b": bias}
    consts |= {"bs": np.float32(0.001 * (1.25 if why == "scale" else 1)), "bz": np.int32(50 * (why == "zero"))}
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["x", "xs", "xz"], ["xd"]),
        onnx.helper.make_node("DequantizeLinear", ["w", "ws"], ["wd"]),
        onnx.helper.make_node("DequantizeLinear", ["b", "bs", "bz"], ["bd"]),
        onnx.helper.make_node("Conv", ["xd", "wd", "bd"], ["h"]),
    ]
    model = network(nodes, consts, [1, 4, 6, 6], kind=TensorProto.UINT8)
    x = RNG.integers(0, 256, (1, 4, 6, 6)).astype(np.uint8)
    sums = convolved(x.astype(np.int64) - 7, w.astype(np.int64), 1, 0)
    added = (bias.astype(np.float64) - float(consts["bz"])) * float(consts["bs"])
    np.testing.assert_allclose(OnnxModel(model)(x), sums * 0.001 + added.reshape(-1, 1, 1), rtol=1e-5, atol=1e-3)
    assert any(n.op.name == "add" and n.shapes[0].dtype == rlx.f32 for n in rlx.from_onnx(model).nodes())


@pytest.mark.parametrize("form", ["rows", "columns", "turned"])
@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", ["INT4", "UINT4", "INT8", "UINT8"])
def test_weights_that_are_dequantised_in_blocks_stay_packed(kind, zeros, form):
    """The product reads 4 or 8 bits for each element."""
    n, k, bits = 24, 128, 4 if "4" in kind else 8
    low = -(1 << bits - 1) if kind.startswith("I") else 0
    q, z = (RNG.integers(low, low + (1 << bits), (n, d)) for d in (k, 2))
    s = RNG.uniform(0.01, 0.02, (n, 2)).astype(np.float16).astype(np.float32)
    turn = (lambda v: v) if form != "columns" else np.transpose
    code = TensorProto.DataType.Value(kind)
    make = lambda name, v: onnx.helper.make_tensor(name, code, turn(v).shape, turn(v).reshape(-1).tolist())  # noqa: E731
    attrs = {"axis": int(form != "columns"), "block_size": 64}
    nodes = [onnx.helper.make_node("DequantizeLinear", ["w", "s", "z"][: 2 + zeros], ["d"], **attrs)]
    if form == "rows":
        nodes.append(onnx.helper.make_node("Gemm", ["x", "d"], ["y"], transB=1))
    else:
        nodes += [onnx.helper.make_node("Transpose", ["d"], ["t"])] if form == "turned" else []
        nodes.append(onnx.helper.make_node("MatMul", ["x", "t" if form == "turned" else "d"], ["y"]))
    model = network(nodes, {"s": np.ascontiguousarray(turn(s))}, [3, k])
    model.graph.initializer.extend([make("w", q)] + ([make("z", z)] if zeros else []))
    x = RNG.normal(size=(3, k)).astype(np.float32)
    weight = (q - np.repeat(z if zeros else 0 * z, 64, 1)) * np.repeat(s, 64, 1).astype(np.float64)
    net = OnnxModel(model)
    np.testing.assert_allclose(net(x), x @ weight.T, rtol=1e-5, atol=1e-4)
    assert "dequant_matmul" in {node.op.name for node in rlx.from_onnx(model).nodes()}
    regions = net.executable({"x": x}).memory_plan().regions
    rows = 32  # panels
    assert regions["params"] + regions["prepared"] + regions["constants"] <= rows * k * (bits / 8 + 2 / 32) + 1024


def test_a_dequantised_table_that_is_looked_up_and_multiplied_is_stored_once_in_four_bits():
    q, s = RNG.integers(-8, 8, (70, 64)), RNG.uniform(0.01, 0.02, (70, 2)).astype(np.float16).astype(np.float32)
    nodes = [
        onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=1, block_size=32),
        onnx.helper.make_node("Gather", ["d", "x"], ["h"]),
        onnx.helper.make_node("Transpose", ["d"], ["t"]),
        onnx.helper.make_node("MatMul", ["h", "t"], ["y"]),
    ]
    model = network(nodes, {"s": s}, [3], kind=TensorProto.INT64)
    model.graph.initializer.append(onnx.helper.make_tensor("w", TensorProto.INT4, q.shape, q.reshape(-1).tolist()))
    table, at, net = q * np.repeat(s, 32, 1).astype(np.float64), np.array([5, -1, 69]), OnnxModel(model)
    np.testing.assert_allclose(net(at), table[at] @ table.T, rtol=1e-4, atol=1e-5)
    regions = net.executable({"x": at}).memory_plan().regions
    assert regions["params"] + regions["prepared"] + regions["constants"] < 96 * 64 * 0.6 + 64  # panels of 32 rows


@pytest.mark.parametrize("op", ["DequantizeLinear", "MatMulNBits", "GatherBlockQuantized"])
def test_a_wrong_number_of_scales_is_refused(op):
    q, ms = RNG.integers(0, 256, (8, 2, 16)).astype(np.uint8), {"domain": "com.microsoft"}
    consts = {"w": q, "s": np.full((8, 3), 0.5, np.float32)}
    if op == "DequantizeLinear":
        consts["w"] = q.reshape(8, 32).repeat(2, 1)
        node = onnx.helper.make_node(op, ["w", "s"], ["d"], axis=1, block_size=32)
        model = network([node, onnx.helper.make_node("MatMul", ["x", "d"], ["y"])], consts, [3, 8])
    elif op == "MatMulNBits":
        model = network([onnx.helper.make_node(op, ["x", "w", "s"], ["y"], K=64, N=8, block_size=32, **ms)], consts, [3, 64])
    else:
        consts["w"] = q.reshape(8, 32)
        node = onnx.helper.make_node(op, ["w", "x", "s"], ["y"], block_size=32, quantize_axis=1, bits=4, **ms)
        model = network([node], consts, [3], kind=TensorProto.INT64)
    with pytest.raises(Unsupported, match=op):
        rlx.from_onnx(model)


@pytest.mark.parametrize("why", ["axis", "scales", "rounded"])
def test_weights_that_packed_ones_would_change_are_decoded(why):
    """Blocks of rows, scales that are no f16, and values that were rounded to f16."""
    kind = np.float16 if why == "rounded" else np.float32
    q = RNG.integers(-8, 8, (64, 64))
    s = RNG.uniform(0.01, 0.02, (64, 2) if why == "axis" else (2, 64)).astype(np.float32 if why == "scales" else np.float16)
    node = onnx.helper.make_node("DequantizeLinear", ["w", "s"], ["d"], axis=int(why == "axis"), block_size=32)
    code = TensorProto.FLOAT16 if why == "rounded" else TensorProto.FLOAT
    nodes = [node, onnx.helper.make_node("MatMul", ["x", "d"], ["y"])]
    model = network(nodes, {"s": s.astype(kind)}, [3, 64], code, kind=code)
    model.graph.initializer.append(onnx.helper.make_tensor("w", TensorProto.INT4, q.shape, q.reshape(-1).tolist()))
    x = RNG.normal(size=(3, 64)).astype(kind)
    weight = (q * np.repeat(s.astype(np.float64), 32, int(why == "axis"))).astype(kind)
    near = 1e-2 if why == "rounded" else 1e-4
    np.testing.assert_allclose(OnnxModel(model)(x), x.astype("f8") @ weight.astype("f8"), rtol=near, atol=1e-3)
    assert "dequant_matmul" not in {node.op.name for node in rlx.from_onnx(model).nodes()}


# -- ONNX Runtime's operators --------------------------------------------------------------------------------------------

SCALES = {"s": np.float32(0.02), "z": np.uint8(110), "t": np.float32(0.03), "u": np.uint8(128)}
# Weights of seven bits: on processors with AVX2 alone ONNX Runtime adds two products of u8 and i8 in 16 bits, which saturate.
W = RNG.integers(-64, 65, (6, 5)).astype(np.int8)
Q = RNG.integers(0, 256, (3, 6)).astype(np.uint8)
BIAS = RNG.integers(-500, 500, 5).astype(np.int32)
X, W_WIDE = (Q.astype(np.float64) - 110) * 0.02, W.astype(np.float64) * 0.03


def u8_of(y, scale=0.03, zero=128):
    return np.clip(np.rint(y / np.float32(scale)) + zero, 0, 255).astype(np.uint8)


# operator, its operands and attributes, and the result for x = X (or, in integers, Q)
RUNTIME = {
    "QLinearAdd": ("x s z x s z t u", {}, u8_of(X + X)),
    "QLinearMul": ("x s z x s z t u", {}, u8_of(X * X)),
    "QLinearSigmoid": ("x s z t u", {}, u8_of(1 / (1 + np.exp(-X)))),
    "QLinearLeakyRelu": ("x s z t u", {"alpha": 0.1}, u8_of(np.where(X < 0, 0.1 * X, X))),
    "QLinearConcat": ("t u x s z x s z", {"axis": 1}, u8_of(np.concatenate([X, X], 1))),
    "QGemm": ("x s z w t i b t u", {"alpha": 0.5}, u8_of((X @ W_WIDE + BIAS * 0.0006) * 0.5)),
    "MatMulIntegerToFloat": ("x w s t z i", {}, (X @ W_WIDE).astype(np.float32)),
}


@pytest.mark.parametrize("op", RUNTIME)
def test_quantised_operators_of_onnx_runtime(op):
    names, attrs, expected = RUNTIME[op]
    consts = {**SCALES, "w": W, "i": np.int8(0), "b": BIAS}
    consts = {k: v for k, v in consts.items() if k in names.split()}
    node = onnx.helper.make_node(op, names.split(), ["y"], domain="com.microsoft", **attrs)
    out = TensorProto.FLOAT if expected.dtype == np.float32 else TensorProto.UINT8
    model = network([node], consts, [3, 6], out, kind=TensorProto.UINT8)
    found = OnnxModel(model)(Q)
    if expected.dtype == np.float32:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert np.abs(found.astype(int) - expected.astype(int)).max() <= 1  # ties
        assert (found == expected).mean() > 0.9
    if (judge := runtime(model, {"x": Q})) is not None:
        assert np.abs(found.astype(np.float64) - judge[0]).max() <= (1e-4 if found.dtype == np.float32 else 1)


IMAGE = RNG.integers(0, 256, (2, 3, 6, 6)).astype(np.uint8)
KERNEL, WIDE = RNG.integers(-64, 65, (4, 3, 3, 3)).astype(np.int8), (IMAGE.astype(np.float64) - 110) * 0.02
MEANS = WIDE.reshape(2, 3, 3, 2, 3, 2).mean((3, 5))


def rows_of_softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


# operator, its operands and attributes, and the result for x = WIDE
IMAGES = {
    "QLinearConv": ("x s z w t i y u b", {"kernel_shape": [3, 3]}, lambda: u8_of(
        (convolved(IMAGE.astype(np.int64) - 110, KERNEL.astype(np.int64), 1, 0) + BIAS[:4].reshape(-1, 1, 1)) * 0.0006, 0.9)),
    "QLinearAveragePool": ("x s z t u", {"kernel_shape": [2, 2], "strides": [2, 2]}, lambda: u8_of(MEANS)),
    "QLinearGlobalAveragePool": ("x s z t u", {}, lambda: u8_of(WIDE.mean((2, 3), keepdims=True))),
    "QLinearSoftmax": ("x s z r o", {"axis": -1, "opset": 13}, lambda: u8_of(rows_of_softmax(WIDE), 1 / 256, 0)),
    "DequantizeLinear": ("x s z", {}, lambda: WIDE.astype(np.float32)),
}  # fmt: skip


@pytest.mark.parametrize("op,last", [(op, last) for op in IMAGES for last in (False, True) if not last or "Pool" in op])
def test_quantised_operators_on_images(op, last):
    names, attrs, expected = IMAGES[op]
    consts = {**SCALES, "w": KERNEL, "i": np.int8(0), "b": BIAS[:4]}
    consts |= {"r": np.float32(1 / 256), "o": np.uint8(0), "y": np.float32(0.9)}
    consts = {k: v for k, v in consts.items() if k in names.split()}
    x, want = IMAGE, expected()
    if last:
        x, want, attrs = x.transpose(0, 2, 3, 1), want.transpose(0, 2, 3, 1), attrs | {"channels_last": 1}
    node = onnx.helper.make_node(op, names.split(), ["v"], domain="com.microsoft", **attrs)
    out = TensorProto.FLOAT if want.dtype == np.float32 else TensorProto.UINT8
    model = network([node], consts, list(x.shape), out, kind=TensorProto.UINT8)
    found = OnnxModel(model)(x)
    assert np.abs(found.astype(np.float64) - want).max() <= (1e-5 if op == "DequantizeLinear" else 1)  # ties
    if (judge := runtime(model, {"x": x})) is not None:
        assert np.abs(found.astype(np.float64) - judge[0]).max() <= 1


def test_activations_are_quantised_at_run_time():
    x = RNG.normal(size=(4, 6)).astype(np.float32)
    node = onnx.helper.make_node("DynamicQuantizeMatMul", ["x", "w", "t"], ["y"], domain="com.microsoft")
    model = network([node], {"w": W, "t": np.float32(0.03)}, [4, 6])
    least, most = min(x.min(), 0), max(x.max(), 0)
    scale = (most - least) / np.float32(255)
    zero = np.rint(np.clip(-least / scale, 0, 255))
    q = np.clip(np.rint(x / scale) + zero, 0, 255) - zero
    np.testing.assert_allclose(OnnxModel(model)(x), (q @ W.astype(np.float64)) * scale * 0.03, rtol=1e-5, atol=1e-5)


# -- a network -----------------------------------------------------------------------------------------------------------


class Residual:
    """A residual network in Q/DQ form."""

    def __init__(self):
        self.nodes, self.consts = [], {}

    def node(self, op, inputs, **attrs):
        self.nodes.append(onnx.helper.make_node(op, inputs, [f"v{len(self.nodes)}"], **attrs))
        return f"v{len(self.nodes) - 1}"

    def const(self, name, array):
        self.consts[name] = np.asarray(array)
        return name

    def quantised(self, x, scale, zero):
        at = len(self.nodes)
        facts = [self.const(f"s{at}", np.float32(scale)), self.const(f"z{at}", np.uint8(zero))]
        return self.node("DequantizeLinear", [self.node("QuantizeLinear", [x, *facts]), *facts])

    def weight(self, rows, *rest):
        at = len(self.nodes)
        self.const(f"w{at}", RNG.integers(-64, 65, (rows, *rest)).astype(np.int8))
        self.const(f"ws{at}", (RNG.uniform(0.5, 1, rows) / 64 / np.sqrt(np.prod(rest))).astype(np.float32))
        return self.node("DequantizeLinear", [f"w{at}", f"ws{at}"], axis=0)

    def model(self):
        h = self.quantised("x", 0.03, 128)
        a = self.node("Relu", [self.node("Conv", [h, self.weight(16, 3, 3, 3)], pads=[1] * 4, strides=[2, 2])])
        a = self.quantised(a, 0.012, 0)
        b = self.node("Conv", [a, self.weight(16, 1, 3, 3)], pads=[1] * 4, group=16)
        b = self.quantised(b, 0.02, 120)
        b = self.node("Conv", [b, self.weight(16, 16, 1, 1)])
        h = self.quantised(self.node("Relu", [self.node("Add", [a, b])]), 0.015, 0)
        h = self.node("MaxPool", [h], kernel_shape=[2, 2], strides=[2, 2])
        h = self.node("Flatten", [self.node("GlobalAveragePool", [h])])
        y = self.node("Gemm", [self.quantised(h, 0.01, 0), self.weight(10, 16)], transB=1)
        return network([*self.nodes, onnx.helper.make_node("Identity", [y], ["y"])], self.consts, [2, 3, 16, 16])


def test_a_residual_network_in_qdq_form_is_that_of_its_floats(monkeypatch):
    model = Residual().model()
    x = RNG.normal(size=(2, 3, 16, 16)).astype(np.float32)
    found = OnnxModel(model)(x)
    conv = [node for node in rlx.from_onnx(model).nodes() if node.op.name == "conv"]
    assert len(conv) == 3 and all(node.inputs[0].dtype == rlx.u8 for node in conv)
    monkeypatch.setattr("rlx.frontends.onnx.quantities._eight", lambda n, v: None)  # products of floats
    floats = OnnxModel(model)(x)
    assert not any(n.inputs[0].dtype == rlx.u8 for n in rlx.from_onnx(model).nodes() if n.op.name == "conv")
    np.testing.assert_allclose(found, floats, atol=0.02 * np.abs(floats).max())  # single steps of the integers between them
    if (judge := runtime(model, {"x": x})) is not None:
        np.testing.assert_allclose(found, judge[0], atol=0.02 * np.abs(floats).max())
