"""The same encoder on rlx and on each peer, through its best public interface. `RUNNERS[name](Task)` returns a callable that runs
it once and returns the normalised embeddings, f32 [batch, hidden]. Peers are imported in their functions: each runs alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlx.frontends.models import bert

Run = Callable[[], np.ndarray]
BASE = bert.BertConfig(30522, 768, 12, 12, 3072, 512, normalize=True)  # BERT-base, Devlin et al. (2018)


@dataclass(frozen=True)
class Task:
    """One model ("minilm" with its weights, "bert-base" with random ones; "minilm bf16": in that precision) at one shape."""

    model: str
    batch: int
    length: int
    threads: int

    @property
    def precision(self) -> str:
        return (self.model.split() + ["f32"])[1]

    @cached_property
    def loaded(self) -> tuple[bert.BertConfig, dict[str, np.ndarray]]:
        if self.model.startswith("minilm"):
            from rlx.models import default_folder, load

            found = load(default_folder())
            return found.config, {name: np.asarray(w, np.float32) for name, w in found.weights.items()}
        rng = np.random.default_rng(0)

        def random(name: str, dims: tuple[int, ...]) -> np.ndarray:
            array = rng.standard_normal(dims, np.float32) * np.float32(0.04 if len(dims) > 1 else 0.1)
            return array + np.float32("LayerNorm.weight" in name)

        return BASE, {p.name: random(p.name, p.shape.static) for p in bert.build(BASE, 1, 1).params}

    @property
    def config(self) -> bert.BertConfig:
        return self.loaded[0]

    @property
    def weights(self) -> dict[str, np.ndarray]:
        return self.loaded[1]

    @cached_property
    def ids(self) -> np.ndarray:
        ids = np.random.default_rng(0).integers(1000, 20000, (self.batch, self.length)).astype(np.int32)
        ids[:, 0], ids[:, -1] = 101, 102
        return ids

    @property
    def mask(self) -> np.ndarray:
        return np.ones((self.batch, self.length), np.int32)

    @property
    def flops(self) -> float:
        return flops(self.config, self.batch, self.length)


def flops(config: bert.BertConfig, batch: int, length: int) -> float:
    """Multiplies and adds of the contractions of one run."""
    h, inner = config.hidden_size, config.intermediate_size
    token = 2 * (4 * h * h + 2 * h * inner) + 4 * length * h
    return float(batch * length * config.num_hidden_layers * token)


def run_rlx(task: Task) -> Run:
    import rlx

    graph = bert.build(task.config, task.batch, task.length)
    compiled = rlx.Session().compile(graph, rlx.CompileOptions(threads=task.threads, precision=task.precision))
    for name, array in task.weights.items():
        compiled.set_param(name, array)
    inputs = [compiled.input_view("input_ids"), compiled.input_view("attention_mask")]
    for view, array in zip(inputs, (task.ids, task.mask)):
        view[...] = array

    def run() -> np.ndarray:
        compiled.run_slots(inputs)
        return compiled.outputs_view()[0].numpy()

    return run


def _torch_network(task: Task) -> Callable[[], Any]:
    import torch
    from transformers import BertConfig, BertModel

    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size", "layer_norm_eps")
    config = BertConfig(**{n: getattr(task.config, n) for n in (*names, "max_position_embeddings", "type_vocab_size")})
    config._attn_implementation = "sdpa"
    network = BertModel(config, add_pooling_layer=False).eval()
    network.load_state_dict({name: torch.tensor(w) for name, w in task.weights.items()}, strict=False)
    ids, mask = torch.tensor(task.ids, dtype=torch.int64), torch.tensor(task.mask, dtype=torch.int64)
    torch.set_num_threads(task.threads)
    if task.precision == "bf16":
        network = network.bfloat16()
    if task.precision == "int8":
        network = torch.ao.quantization.quantize_dynamic(network, {torch.nn.Linear}, dtype=torch.qint8)

    def embed() -> Any:
        x = network(input_ids=ids, attention_mask=mask).last_hidden_state.float()
        weight = mask[..., None].float()
        return torch.nn.functional.normalize((x * weight).sum(1) / weight.sum(1))

    return embed


def run_torch(task: Task, compiled: bool = False) -> Run:
    import torch

    embed = _torch_network(task)
    embed = torch.compile(embed) if compiled else embed

    def run() -> np.ndarray:
        with torch.inference_mode():
            return embed().numpy()

    return run


def run_torch_compile(task: Task) -> Run:
    return run_torch(task, compiled=True)


def onnx_session(made: Any, threads: int, inputs: Mapping[str, np.ndarray], output: tuple[str, tuple[int, ...]]) -> Run:
    """An ONNX model in ONNX Runtime, bound to these inputs. `output`: its name and shape, f32."""
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    out = ort.OrtValue.ortvalue_from_numpy(np.zeros(output[1], np.float32))
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(value))
    binding.bind_ortvalue_output(output[0], out)

    def run() -> np.ndarray:
        session.run_with_iobinding(binding)
        return out.numpy()

    return run


def _onnx_model(task: Task, fused: bool = False) -> Any:
    from benchmarks.encoder_onnx import onnx_model, quantised

    made = onnx_model(task.config, task.weights, task.ids.shape, fused)
    return quantised(made, {"input_ids": task.ids, "attention_mask": task.mask}) if task.precision == "int8" else made


def run_onnx(task: Task, fused: bool = False) -> Run:
    made = _onnx_model(task, fused)
    inputs = {"input_ids": task.ids, "attention_mask": task.mask}
    return onnx_session(made, task.threads, inputs, ("embedding", (task.batch, task.config.hidden_size)))


def run_onnx_fused(task: Task) -> Run:
    return run_onnx(task, fused=True)


def run_openvino(task: Task) -> Run:
    precision = "f32" if task.precision == "f32" else "bf16"  # bytes: of the products; the rest in what is fastest
    return openvino_request(_onnx_model(task), task.threads, [task.ids, task.mask], precision)


def openvino_request(made: Any, threads: int, inputs: Sequence[np.ndarray], precision: str = "f32") -> Run:
    """An ONNX model in OpenVINO, bound to these inputs."""
    import io

    import openvino as ov

    core = ov.Core()
    how = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": precision}
    request = core.compile_model(core.read_model(io.BytesIO(made.SerializeToString())), "CPU", how).create_infer_request()
    for i, array in enumerate(inputs):
        request.set_input_tensor(i, ov.Tensor(array))

    def run() -> np.ndarray:
        request.infer()
        return request.get_output_tensor(0).data

    return run


def run_jax(task: Task) -> Run:
    keep_to(task.threads)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    c, (batch, length) = task.config, task.ids.shape
    heads, size = c.num_attention_heads, c.head_size

    def linear(w: Any, name: str, x: Any) -> Any:
        return x @ w[name + ".weight"] + w[name + ".bias"]

    def norm(w: Any, name: str, x: Any) -> Any:
        x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + c.layer_norm_eps)
        return x * w[name + ".weight"] + w[name + ".bias"]

    def embed(w: Any, ids: Any, mask: Any) -> Any:
        words, places, kinds = (w[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
        x = norm(w, "embeddings.LayerNorm", words[ids] + places[:length] + kinds[0]).reshape(batch * length, -1)
        for i in range(c.num_hidden_layers):
            layer = f"encoder.layer.{i}"
            q, k, v = jnp.moveaxis(linear(w, layer + ".qkv", x).reshape(batch, length, 3, heads, size), 2, 0)
            scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * size**-0.5
            weights = jax.nn.softmax(jnp.where(mask[:, None, None] != 0, scores, -1e9))
            seen = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch * length, -1)
            x = norm(w, f"{layer}.attention.output.LayerNorm", x + linear(w, f"{layer}.attention.output.dense", seen))
            inner = jax.nn.gelu(linear(w, f"{layer}.intermediate.dense", x), approximate=False)
            x = norm(w, f"{layer}.output.LayerNorm", x + linear(w, f"{layer}.output.dense", inner))
        x, weight = x.reshape(batch, length, -1), mask[..., None].astype(jnp.float32)
        pooled = (x * weight).sum(1) / weight.sum(1)
        return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)

    weights = {name: jnp.asarray(w) for name, w in turned(task).items()}
    compiled = jax.jit(embed).lower(weights, task.ids, task.mask).compile()
    ids, mask = jnp.asarray(task.ids), jnp.asarray(task.mask)
    return lambda: np.asarray(compiled(weights, ids, mask))


def run_max(task: Task) -> Run:
    keep_to(task.threads)
    from max import driver, engine
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    c, (batch, length), w, cpu = task.config, task.ids.shape, turned(task), DeviceRef.CPU()
    heads, size = c.num_attention_heads, c.head_size

    def const(array: np.ndarray) -> Any:
        return ops.constant(np.ascontiguousarray(array, np.float32), DType.float32, cpu)

    def linear(name: str, x: Any) -> Any:
        return x @ const(w[name + ".weight"]) + const(w[name + ".bias"])

    def norm(name: str, x: Any) -> Any:
        return ops.layer_norm(x, const(w[name + ".weight"]), const(w[name + ".bias"]), c.layer_norm_eps)

    kind = TensorType(DType.int32, (batch, length), cpu)
    with Graph("encoder", input_types=[kind, kind]) as graph:
        ids, mask = (value.tensor for value in graph.inputs)
        weight = ops.cast(mask, DType.float32)
        hidden = ops.reshape((weight - 1.0) * 1e9, (batch, 1, 1, length))
        words, places, kinds = (w[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
        x = norm("embeddings.LayerNorm", ops.gather(const(words), ids, 0) + const(places[:length] + kinds[0]))
        x = ops.reshape(x, (batch * length, c.hidden_size))
        for i in range(c.num_hidden_layers):
            layer = f"encoder.layer.{i}"
            parts = ops.split(linear(f"{layer}.qkv", x), [c.hidden_size] * 3, -1)
            q, k, v = (ops.permute(ops.reshape(p, (batch, length, heads, size)), [0, 2, 1, 3]) for p in parts)
            seen = ops.softmax(q @ ops.transpose(k, -1, -2) * size**-0.5 + hidden) @ v
            seen = ops.reshape(ops.permute(seen, [0, 2, 1, 3]), (batch * length, c.hidden_size))
            x = norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", seen))
            inner = ops.gelu(linear(f"{layer}.intermediate.dense", x))
            x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", inner))
        kept = ops.reshape(weight, (batch, length, 1))
        total = ops.sum(ops.reshape(x, (batch, length, c.hidden_size)) * kept, 1) / ops.sum(kept, 1)
        pooled = ops.reshape(total, (batch, c.hidden_size))
        graph.output(pooled * ops.rsqrt(ops.sum(pooled * pooled, -1)))
    model = engine.InferenceSession(devices=[driver.CPU()]).load(graph)
    inputs = [driver.Buffer.from_numpy(x) for x in (task.ids, task.mask)]
    return lambda: model.execute(*inputs)[0].to_numpy()


def keep_to(threads: int) -> None:
    """Pin this process to as many CPUs, for engines that have no option for the number of threads."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])


def turned(task: Task) -> dict[str, np.ndarray]:
    """Weights transposed to [in, out], with the three projections of an attention concatenated as layer.qkv."""
    tables = {name for name in task.weights if "_embeddings." in name}
    out = {name: w if name in tables or w.ndim == 1 else w.T for name, w in task.weights.items()}
    for i in range(task.config.num_hidden_layers):
        names = [f"encoder.layer.{i}.attention.self.{part}" for part in ("query", "key", "value")]
        for end in (".weight", ".bias"):
            out[f"encoder.layer.{i}.qkv{end}"] = np.concatenate([out.pop(name + end) for name in names], axis=-1)
    return out


RUNNERS = {
    "rlx": run_rlx,
    "ONNX Runtime": run_onnx,
    "ONNX Runtime, its fused operators": run_onnx_fused,
    "OpenVINO": run_openvino,
    "MAX": run_max,
    "JAX": run_jax,
    "torch": run_torch,
    "torch.compile": run_torch_compile,
}
ENGINES = {  # that have a way to compute in this precision
    "f32": tuple(RUNNERS),
    "bf16": ("rlx", "OpenVINO", "torch", "torch.compile"),
    "int8": ("rlx", "ONNX Runtime", "OpenVINO", "torch"),
}
