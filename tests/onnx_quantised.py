"""Static quantisation of an ONNX network of convolutions to Q/DQ form, and such networks in float64 by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper, numpy_helper

from rlx.frontends.onnx import OnnxModel

QUANTISED = ("Conv", "Gemm", "Add", "MaxPool", "GlobalAveragePool", "ReduceMean")


def quantised(model: onnx.ModelProto, image: np.ndarray) -> onnx.ModelProto:
    """Operands of convolutions, products, sums and pools in u8, by their range for an image; weights in i8 with a scale for each
    output channel; bias in i32 with the scale of the sums."""
    graph, weights = model.graph, {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    ranges = _ranges(model, image)
    made: dict[str, str] = {}  # value -> the same value, rounded
    nodes: list[onnx.NodeProto] = []
    consts: dict[str, np.ndarray] = {}

    def const(name: str, value: Any) -> str:
        consts[name] = np.asarray(value)
        return name

    def rounded(name: str) -> str:
        if name not in made:
            low, high = min(ranges[name].min(), 0), max(ranges[name].max(), 0)
            scale = np.float32((high - low) / 255)
            facts = [const(f"{name}.scale", scale), const(f"{name}.zero", np.uint8(np.rint(-low / scale)))]
            nodes.append(helper.make_node("QuantizeLinear", [name, *facts], [f"{name}.q"]))
            nodes.append(helper.make_node("DequantizeLinear", [f"{name}.q", *facts], [f"{name}.dq"]))
            made[name] = f"{name}.dq"
        return made[name]

    def decoded(name: str, array: np.ndarray, scale: np.ndarray, kind: Any) -> str:
        q = np.rint(array / scale.reshape(-1, *(1,) * (array.ndim - 1))).astype(kind)
        operands = [const(f"{name}.i", q), const(f"{name}.s", scale.astype(np.float32))]
        nodes.append(helper.make_node("DequantizeLinear", operands, [f"{name}.dq"], axis=0))
        return f"{name}.dq"

    for node in graph.node:
        new = onnx.NodeProto.FromString(node.SerializeToString())
        if node.op_type in QUANTISED:
            for i, name in enumerate(node.input):
                new.input[i] = name if name in weights else rounded(name)
        if node.op_type in ("Conv", "Gemm"):
            w = weights[node.input[1]]
            scale = np.abs(w).reshape(len(w), -1).max(1) / 127
            new.input[1] = decoded(node.input[1], w, scale, np.int8)
            sums = scale.astype(np.float32) * consts[f"{node.input[0]}.scale"]
            new.input[2] = decoded(node.input[2], weights[node.input[2]], sums, np.int32)
        nodes.append(new)
    used = {name for node in nodes for name in node.input}
    inits = [numpy_helper.from_array(v, k) for k, v in {**weights, **consts}.items() if k in used]
    out = helper.make_graph(nodes, "quantised", graph.input, graph.output, inits)
    return helper.make_model(out, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)


def _ranges(model: onnx.ModelProto, image: np.ndarray) -> dict[str, np.ndarray]:
    """Every value that a node makes."""
    whole = onnx.ModelProto.FromString(model.SerializeToString())
    shown = {o.name for o in whole.graph.output}
    names = [name for node in whole.graph.node for name in node.output if name not in shown and node.op_type != "Constant"]
    whole.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    return {model.graph.input[0].name: image, **OnnxModel(whole).run({model.graph.input[0].name: image})}


def in_float64(model: onnx.ModelProto, image: np.ndarray) -> np.ndarray:
    """The results of such a network, node by node."""
    values = {t.name: torch.from_numpy(numpy_helper.to_array(t).astype(np.float64)) for t in model.graph.initializer}
    values[model.graph.input[0].name] = torch.from_numpy(image.astype(np.float64))
    each: Callable[..., Any] = lambda v, axis, x: v if not v.ndim else v.reshape(-1, *(1,) * (x.ndim - axis - 1))  # noqa: E731
    for node in model.graph.node:
        x, *more = (values[name] for name in node.input if name)
        a = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if node.op_type == "QuantizeLinear":
            found = torch.clamp(torch.round(x / more[0]) + more[1], 0, 255)
        elif node.op_type == "DequantizeLinear":
            zero = each(more[1], a.get("axis", 1), x) if len(more) > 1 else 0
            found = (x - zero) * each(more[0], a.get("axis", 1), x)
        elif node.op_type == "Conv":
            found = F.conv2d(x, more[0], more[1], a["strides"], a["pads"][:2], a["dilations"], a["group"])
        elif node.op_type == "Gemm":
            found = x @ (more[0].T if a.get("transB") else more[0]) + more[1]
        elif node.op_type == "MaxPool":
            found = F.max_pool2d(x, a["kernel_shape"], a["strides"], a["pads"][:2])
        else:
            simple = {"Relu": F.relu, "Add": torch.add, "Flatten": lambda v: v.flatten(1), "Identity": lambda v: v}
            found = simple.get(node.op_type, lambda v, *_: v.mean((2, 3), keepdim=True))(x, *more)
        values[node.output[0]] = found
    return values[model.graph.output[0].name].numpy()
