"""The functions that benchmarks/chains.py uses, under the same names for numpy, JAX, rlx, torch and ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import rlx

Dims = tuple[int, ...]

class Numpy:
    """In the dtype of the operands: the oracle in f64, the peer in f32."""

    def __init__(self, np: Any = np) -> None:
        self.np = np

    def relu(self, x: Any) -> Any:
        return self.np.maximum(x, 0)

    def exp(self, x: Any) -> Any:
        return self.np.exp(x)

    def tanh(self, x: Any) -> Any:
        return self.np.tanh(x)

    def gelu(self, x: Any) -> Any:
        from scipy.special import erf

        return 0.5 * x * (1 + erf(x * math.sqrt(0.5)))

    def silu(self, x: Any) -> Any:
        return x / (1 + self.np.exp(-x))

    def softmax(self, x: Any) -> Any:
        e = self.np.exp(x - self.np.max(x, axis=-1, keepdims=True))
        return e / self.np.sum(e, axis=-1, keepdims=True)

    def layer_norm(self, x: Any, w: Any, b: Any) -> Any:
        d = x - self.np.mean(x, axis=-1, keepdims=True)
        return d / self.np.sqrt(self.np.mean(d * d, axis=-1, keepdims=True) + 1e-5) * w + b

    def rms_norm(self, x: Any, w: Any) -> Any:
        return x / self.np.sqrt(self.np.mean(x * x, axis=-1, keepdims=True) + 1e-6) * w

    def reduce(self, name: str, x: Any, axes: tuple[int, ...]) -> Any:
        return getattr(self.np, name)(x, axis=axes)

    def argmax(self, x: Any, axis: int) -> Any:
        return self.np.argmax(x, axis=axis)

    def cumsum(self, x: Any, axis: int) -> Any:
        return self.np.cumsum(x, axis=axis)

    def top(self, x: Any, count: int) -> Any:
        return -self.np.sort(-x, axis=-1)[..., :count]

    def transpose(self, x: Any, perm: tuple[int, ...]) -> Any:
        made = self.np.transpose(x, perm)
        return self.np.ascontiguousarray(made) if self.np is np else made

    def concat(self, x: Any, y: Any, axis: int) -> Any:
        return self.np.concatenate((x, y), axis=axis)


class Jax(Numpy):
    def gelu(self, x: Any) -> Any:
        import jax

        return jax.nn.gelu(x, approximate=False)

    def top(self, x: Any, count: int) -> Any:
        import jax

        return jax.lax.top_k(x, count)[0]


class Rlx:
    """The functions of rlx under the same names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(rlx, name)

    def reduce(self, name: str, x: Any, axes: tuple[int, ...]) -> Any:
        return getattr(rlx, name)(x, axis=axes)

    def argmax(self, x: Any, axis: int) -> Any:
        return rlx.argmax(x, axis=axis)

    def cumsum(self, x: Any, axis: int) -> Any:
        return rlx.cumsum(x, axis=axis)

    def top(self, x: Any, count: int) -> Any:
        return rlx.top_k(x, k=count)[0]

    def transpose(self, x: Any, perm: tuple[int, ...]) -> Any:
        return rlx.transpose(x, axes=perm)

    def concat(self, x: Any, y: Any, axis: int) -> Any:
        return rlx.concat(x, y, axis=axis)


class Torch:
    def __init__(self) -> None:
        import torch

        self.torch, self.f = torch, torch.nn.functional

    def __getattr__(self, name: str) -> Any:
        return getattr(self.f if hasattr(self.f, name) else self.torch, name)

    def exp(self, x: Any) -> Any:
        return self.torch.exp(x)

    def tanh(self, x: Any) -> Any:
        return self.torch.tanh(x)

    def softmax(self, x: Any) -> Any:
        return self.torch.softmax(x, -1)

    def layer_norm(self, x: Any, w: Any, b: Any) -> Any:
        return self.f.layer_norm(x, w.shape, w, b)

    def rms_norm(self, x: Any, w: Any) -> Any:
        return self.f.rms_norm(x, w.shape, w, 1e-6)

    def reduce(self, name: str, x: Any, axes: tuple[int, ...]) -> Any:
        return getattr(self.torch, "amax" if name == "max" else name)(x, axes)

    def argmax(self, x: Any, axis: int) -> Any:
        return self.torch.argmax(x, axis)

    def cumsum(self, x: Any, axis: int) -> Any:
        return self.torch.cumsum(x, axis)

    def top(self, x: Any, count: int) -> Any:
        return self.torch.topk(x, count)[0]

    def transpose(self, x: Any, perm: tuple[int, ...]) -> Any:
        return x.permute(perm).contiguous()

    def concat(self, x: Any, y: Any, axis: int) -> Any:
        return self.torch.cat((x, y), axis)


class Onnx:
    """Builds a model; values are `Named` objects that refer to it."""

    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.constants: list[Any] = []

    def node(self, op: str, *inputs: Any, also: tuple[str, ...] = (), **attrs: Any) -> Named:
        """The first result of a node. `also`: names of others, which nothing reads."""
        from onnx import helper

        out = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, [self.name_of(x) for x in inputs], [out, *also], **attrs))
        return Named(self, out)

    def name_of(self, x: Any) -> str:
        from onnx import numpy_helper

        if isinstance(x, Named):
            return x.name
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(x, np.int64 if isinstance(x, tuple) else np.float32), name))
        return name

    def __getattr__(self, name: str) -> Any:
        op = {"relu": "Relu", "exp": "Exp", "tanh": "Tanh", "gelu": "Gelu", "softmax": "Softmax"}[name]
        return lambda x: self.node(op, x)

    def silu(self, x: Any) -> Any:
        return x * self.node("Sigmoid", x)

    def layer_norm(self, x: Any, w: Any, b: Any) -> Any:
        return self.node("LayerNormalization", x, w, b, axis=-1, epsilon=1e-5)

    def rms_norm(self, x: Any, w: Any) -> Any:
        mean = self.node("ReduceMean", x * x, (-1,), keepdims=1)
        return self.node("Div", x, self.node("Sqrt", mean + 1e-6)) * w

    def reduce(self, name: str, x: Any, axes: tuple[int, ...]) -> Any:
        return self.node(f"Reduce{name.title()}", x, axes, keepdims=0)

    def argmax(self, x: Any, axis: int) -> Any:
        return self.node("ArgMax", x, axis=axis, keepdims=0)

    def cumsum(self, x: Any, axis: int) -> Any:
        return self.node("CumSum", x, (axis,))

    def top(self, x: Any, count: int) -> Any:
        return self.node("TopK", x, (count,), also=("places",))

    def transpose(self, x: Any, perm: tuple[int, ...]) -> Any:
        return self.node("Transpose", x, perm=perm)

    def concat(self, x: Any, y: Any, axis: int) -> Any:
        return self.node("Concat", x, y, axis=axis)

    def model(self, make: Callable[..., Any], operands: Sequence[Dims], dims: Dims, dtype: np.dtype) -> bytes:
        """The model of `make` with f32 operands of these dims; its result has `dims`."""
        from onnx import TensorProto, helper

        names = [f"x{i}" for i in range(len(operands))]
        out = make(self, *(Named(self, n) for n in names))
        value = helper.make_tensor_value_info
        kind = TensorProto.INT64 if dtype.kind == "i" else TensorProto.FLOAT
        inputs = [value(n, TensorProto.FLOAT, d) for n, d in zip(names, operands)]
        graph = helper.make_graph(self.nodes, "case", inputs, [value(out.name, kind, dims)], self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9).SerializeToString()


@dataclass
class Named:
    model: Onnx
    name: str

    def __mul__(self, other: Any) -> Named:
        return self.model.node("Mul", self, other)

    def __add__(self, other: Any) -> Named:
        return self.model.node("Add", self, other)
