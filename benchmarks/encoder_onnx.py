"""BERT-type encoders as ONNX models, for the peers that read ONNX."""

from __future__ import annotations

import numpy as np

from rlx.frontends.models import bert


def onnx_model(config: bert.BertConfig, weights: dict[str, np.ndarray], dims: tuple[int, int], fused: bool):
    """The network for ids [batch, length], as an ONNX model of standard operators, or of ONNX Runtime's fused ones."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes, constants = [], {}

    def const(name: str, array: np.ndarray) -> str:
        constants.setdefault(name, numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def node(op: str, *inputs: str, out: str = "", domain: str = "", **attrs) -> str:
        out = out or f"{op}_{len(nodes)}"
        nodes.append(helper.make_node(op, list(inputs), [out], domain=domain, **attrs))
        return out

    def weight(name: str) -> str:
        return const(name, np.asarray(weights[name], np.float32))

    def matrix(name: str) -> str:
        return const(name + ".T", np.asarray(weights[name + ".weight"], np.float32).T)

    def linear(name: str, x: str) -> str:
        return node("Add", node("MatMul", x, matrix(name)), weight(name + ".bias"))

    def norm(name: str, x: str) -> str:
        return node("LayerNormalization", x, weight(name + ".weight"), weight(name + ".bias"), epsilon=eps, axis=-1)

    def join(name: str, norm_name: str, x: str, skip: str) -> str:
        if not fused:
            return norm(norm_name, node("Add", linear(name, x), skip))
        scale, bias = weight(norm_name + ".weight"), weight(norm_name + ".bias")
        product = node("MatMul", x, matrix(name))
        return node(
            "SkipLayerNormalization", product, skip, scale, bias, weight(name + ".bias"), domain="com.microsoft", epsilon=eps
        )

    def attention(layer: str, x: str) -> str:
        parts = [f"{layer}.attention.self.{p}" for p in ("query", "key", "value")]
        if fused:
            w = np.concatenate([np.asarray(weights[p + ".weight"], np.float32).T for p in parts], axis=1)
            b = np.concatenate([np.asarray(weights[p + ".bias"], np.float32) for p in parts])
            wb = const(layer + ".qkv", w), const(layer + ".qkv_bias", b)
            return node("Attention", x, *wb, "attention_mask", domain="com.microsoft", num_heads=heads)
        split = const("split_heads", np.array([0, 0, heads, size]))
        q, k, v = (node("Transpose", node("Reshape", linear(p, x), split), perm=[0, 2, 1, 3]) for p in parts)
        scores = node("Div", node("MatMul", q, node("Transpose", k, perm=[0, 1, 3, 2])), scale_by)
        seen = node("MatMul", node("Softmax", node("Add", scores, bias4), axis=-1), v)
        merged = const("merge_heads", np.array([0, 0, config.hidden_size]))
        return node("Reshape", node("Transpose", seen, perm=[0, 2, 1, 3]), merged)

    eps, heads, size = config.layer_norm_eps, config.num_attention_heads, config.head_size
    scale_by = const("scale", np.array(size**0.5, np.float32))
    float_mask = node("Cast", "attention_mask", to=TensorProto.FLOAT)
    if not fused:
        inverse = node("Sub", const("one", np.array(1, np.float32)), float_mask)
        bias4 = node("Mul", node("Unsqueeze", inverse, const("axes", np.array([1, 2]))), const("low", np.array(-1e9, np.float32)))
    table = "embeddings.{}_embeddings.weight"
    kind = np.asarray(weights[table.format("token_type")][0], np.float32)
    where = const("place", np.asarray(weights[table.format("position")][: dims[1]], np.float32) + kind)
    words = node("Gather", weight(table.format("word")), "input_ids")
    x = norm("embeddings.LayerNorm", node("Add", words, where))
    for i in range(config.num_hidden_layers):
        layer = f"encoder.layer.{i}"
        x = join(f"{layer}.attention.output.dense", f"{layer}.attention.output.LayerNorm", attention(layer, x), x)
        inner = linear(f"{layer}.intermediate.dense", x)
        inner = node("Gelu", inner, domain="com.microsoft") if fused else node("Gelu", inner)
        x = join(f"{layer}.output.dense", f"{layer}.output.LayerNorm", inner, x)
    mask3 = node("Unsqueeze", float_mask, const("last", np.array([2])))
    one = const("i1", np.array([1]))
    total = node("ReduceSum", node("Mul", x, mask3), one, keepdims=0)
    mean = node("Div", total, node("ReduceSum", mask3, one, keepdims=0))
    node("LpNormalization", mean, out="embedding", axis=-1, p=2)
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT32, dims) for n in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, [dims[0], config.hidden_size])]
    graph = helper.make_graph(nodes, "encoder", inputs, outputs, initializer=list(constants.values()))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(made)
    return made


def quantised(model, inputs: dict[str, np.ndarray], operators: tuple[str, ...] = ("MatMul",)):
    """The model with these products by constant weights in bytes (a scale for each column of the weights, one for all
    activations), calibrated with these inputs, in the form of QuantizeLinear and DequantizeLinear nodes that both readers of ONNX
    fuse."""
    import logging
    import tempfile
    from pathlib import Path

    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    logging.getLogger().setLevel(logging.ERROR)  # it recommends a pass over models from elsewhere

    class Once(CalibrationDataReader):
        def __init__(self) -> None:
            self.left = [inputs]

        def get_next(self) -> dict[str, np.ndarray] | None:
            return self.left.pop() if self.left else None

    with tempfile.TemporaryDirectory() as place:
        path = Path(place, "quantised.onnx")
        quantize_static(
            model, path, Once(), quant_format=QuantFormat.QDQ, op_types_to_quantize=[*operators], per_channel=True,
            activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, extra_options={"MatMulConstBOnly": True},
        )  # fmt: skip
        return onnx.load(path)
