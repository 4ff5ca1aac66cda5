"""OpenVINO's side of benchmarks/generation.py: the Qwen3 network in its opset, in the form that its exporters produce for
language models: keys and values as variables, weights compressed in the graph, attention as its fused operator."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import openvino as ov
from openvino import opset15 as op
from openvino.op.util import Variable, VariableInfo

GROUP = 64  # columns that share a scale in 4 bits


def compile_model(config: dict, tensors: Iterable[tuple[str, np.ndarray]], stored: str, threads: int) -> ov.CompiledModel:
    """`stored`: "f32", "bf16", "int8" (a scale per row) or "int4" (a scale per GROUP columns; the table int8)."""
    precision = "bf16" if stored == "bf16" else "f32"
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": precision, "PERFORMANCE_HINT": "LATENCY"}
    if stored in ("int8", "int4"):
        settings |= {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 32, "KV_CACHE_PRECISION": "u8"}
    return ov.Core().compile_model(_Network(config, dict(tensors), stored).model(), "CPU", settings)


class _Network:
    def __init__(self, config: dict, tensors: dict[str, np.ndarray], stored: str) -> None:
        self.c, self.tensors, self.stored = config, tensors, stored
        self.states: list = []

    def model(self) -> ov.Model:
        c = self.c
        ids, mask = op.parameter([1, -1], np.int32, "tokens"), op.parameter([1, 1, -1, -1], np.float32, "mask")
        places, self.beams = op.parameter([-1], np.int32, "positions"), op.parameter([1], np.int32, "beams")
        frequencies = c["rope_theta"] ** (-np.arange(0, c["head_dim"], 2, dtype=np.float32) / c["head_dim"])
        angle = op.multiply(op.unsqueeze(op.convert(places, "f32"), _i64(1)), op.constant(frequencies[None]))
        angle = op.unsqueeze(op.unsqueeze(op.concat([angle, angle], -1), _i64(0)), _i64(0))
        self.cos, self.sin, self.mask = op.cos(angle), op.sin(angle), mask
        table = self.weight("model.embed_tokens")
        x = op.gather(table, ids, _i64(0))
        for i in range(c["num_hidden_layers"]):
            x = self.layer(i, f"model.layers.{i}", x)
        last = op.slice(x, _i64([-1]), _i64([2**31]), _i64([1]), _i64([1]))
        logits = op.matmul(self.norm("model.norm", last), table, False, True)
        return ov.Model([op.result(logits)], self.states, [ids, mask, places, self.beams], "qwen3")

    def weight(self, name: str):
        array = np.asarray(self.tensors[f"{name}.weight"], np.float32)
        if self.stored == "f32":
            return op.constant(array, dtype=np.float32)
        if self.stored == "bf16":
            return op.convert(op.constant(array, dtype=ov.Type.bf16), "f32")
        if self.stored == "int8" or "embed" in name:  # its gather does not support 4 bits
            scale = np.maximum(np.abs(array).max(1, keepdims=True) / 127, 1e-8)
            whole = np.round(array / scale).astype(np.int8)
            return op.multiply(op.convert(op.constant(whole), "f32"), op.constant(scale.astype(np.float32)))
        groups = array.reshape(len(array), -1, GROUP)
        scale = np.maximum(np.abs(groups).max(2, keepdims=True) / 7, 1e-8)
        whole = np.clip(np.round(groups / scale), -8, 7).astype(np.int8).reshape(-1, 2) & 15
        packed = (whole[:, 0] | whole[:, 1] << 4).astype(np.uint8)
        kept = op.constant(ov.Tensor(packed, list(groups.shape), ov.Type.i4))
        made = op.multiply(op.convert(kept, "f16"), op.constant(scale.astype(np.float16)))
        return op.convert(op.reshape(made, _i64(array.shape), False), "f32")

    def linear(self, name: str, x):
        return op.matmul(x, self.weight(name), False, True)

    def norm(self, name: str, x):
        squares = op.reduce_mean(op.power(x, op.constant(np.float32(2))), _i64([-1]), True)
        root = op.divide(op.constant(np.float32(1)), op.sqrt(op.add(squares, op.constant(np.float32(self.c["rms_norm_eps"])))))
        return op.multiply(op.constant(np.asarray(self.tensors[f"{name}.weight"], np.float32)), op.multiply(x, root))

    def layer(self, i: int, name: str, x):
        x = op.add(x, self.attention(i, f"{name}.self_attn", self.norm(f"{name}.input_layernorm", x)))
        inner = self.norm(f"{name}.post_attention_layernorm", x)
        gate, up = (self.linear(f"{name}.mlp.{part}_proj", inner) for part in ("gate", "up"))
        return op.add(x, self.linear(f"{name}.mlp.down_proj", op.multiply(op.swish(gate), up)))

    def attention(self, i: int, name: str, x):
        c = self.c
        heads, shared, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]

        def part(which: str, n: int):
            return op.reshape(self.linear(f"{name}.{which}_proj", x), _i64([0, 0, n, size]), True)

        swap = _i64([0, 2, 1, 3])
        q = self.turned(op.transpose(self.norm(f"{name}.q_norm", part("q", heads)), swap))
        k = self.turned(op.transpose(self.norm(f"{name}.k_norm", part("k", shared)), swap))
        v = op.transpose(part("v", shared), swap)
        k, v = (self.state(f"{s}.{i}", rows, heads, shared, size) for s, rows in (("k", k), ("v", v)))
        out = op.scaled_dot_product_attention(q, k, v, self.mask, causal=False)
        return self.linear(f"{name}.o_proj", op.reshape(op.transpose(out, swap), _i64([0, 0, heads * size]), True))

    def turned(self, x):
        a, b = op.variadic_split(x, _i64(3), _i64([self.c["head_dim"] // 2, -1])).outputs()
        other = op.concat([op.multiply(b, op.constant(np.full((1, 1, 1, 1), -1, np.float32))), a], -1)
        return op.add(op.multiply(x, self.cos), op.multiply(other, self.sin))

    def state(self, name: str, rows, heads: int, shared: int, size: int):
        """The variable with `rows` appended, each head repeated for the queries that share it."""
        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = ov.PartialShape([-1, shared, -1, size]), ov.Type.f32, name
        variable = Variable(info)
        empty = op.constant(np.zeros((1, shared, 0, size), np.float32))
        past = op.gather(op.read_value(empty, variable), self.beams, _i64(0))
        whole = op.concat([past, rows], 2)
        self.states.append(op.assign(whole, variable))
        if heads == shared:
            return whole
        many = op.unsqueeze(whole, _i64(2))
        dims = op.concat([_i64([1, 1]), _i64([heads // shared]), _i64([1, 1])], 0)
        return op.reshape(op.broadcast(many, dims, None, "BIDIRECTIONAL"), _i64([0, heads, -1, size]), True)


def _i64(value):
    return op.constant(np.array(value, np.int64))
