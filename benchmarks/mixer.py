"""An MLP mixer (Tolstikhin et al., 2021) of odd sizes with random weights, on rlx and every installed peer, measured as in
encoder.py.

    python benchmarks/mixer.py [--threads 1 2] [--shapes 1x49 8x49] [--write]

x [batch, tokens, channels]; every layer mixes tokens, x + (gelu(norm(x)' a) b)', then channels, x + gelu(norm(x) c) d; at the end
norm, mean over tokens, and 1,000 classes. No size but those 1,000 is a multiple of a vector. "rlx, tuned" is
CompileOptions(tune=…); its time is excluded, as is the compile time of every engine.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.encoder import Workload, main
from benchmarks.encoder_peers import Run, keep_to, onnx_session, openvino_request

WIDTHS = {49: (257, 91, 500), 197: (500, 257, 1001)}  # tokens -> channels, inner width of token mixing, of channel mixing
LAYERS, CLASSES, EPSILON = 8, 1000, 1e-5
SHAPES = {"mixer": ("1x49", "8x49", "1x197", "4x197")}
TUNE_SECONDS = 30.0


@dataclass(frozen=True)
class Task:
    precision: ClassVar[str] = "f32"
    model: str
    batch: int
    length: int  # tokens
    threads: int

    @cached_property
    def weights(self) -> dict[str, np.ndarray]:
        """Matrices as [in, out]."""
        rng, tokens = np.random.default_rng(0), self.length
        channels, narrow, wide = WIDTHS[tokens]
        shapes: dict[str, tuple[int, ...]] = {}
        for i in range(LAYERS):
            for name, ins, outs in (("a", tokens, narrow), ("b", narrow, tokens), ("c", channels, wide), ("d", wide, channels)):
                shapes |= {f"{i}.{name}": (ins, outs), f"{i}.{name}.bias": (outs,)}
            shapes |= {f"{i}.{norm}.{end}": (channels,) for norm in ("tokens", "channels") for end in ("scale", "shift")}
        shapes |= {"end.scale": (channels,), "end.shift": (channels,), "head": (channels, CLASSES), "head.bias": (CLASSES,)}
        drawn = {name: rng.standard_normal(dims, np.float32) for name, dims in shapes.items()}
        small = {name: w / np.float32(len(w) ** 0.5 if w.ndim > 1 else 10) for name, w in drawn.items()}
        return {name: w + np.float32(name.endswith("scale")) for name, w in small.items()}

    @cached_property
    def x(self) -> np.ndarray:
        return np.random.default_rng(1).standard_normal((self.batch, self.length, WIDTHS[self.length][0]), np.float32)

    @property
    def flops(self) -> float:
        """Multiplies and adds of the contractions of one run."""
        channels, narrow, wide = WIDTHS[self.length]
        layer = 4 * channels * self.length * narrow + 4 * self.length * channels * wide
        return float(self.batch * (LAYERS * layer + 2 * channels * CLASSES))


def run_rlx(task: Task, tune: float = 0.0) -> Run:
    import rlx

    g = rlx.Graph("mixer")
    w = {name: g.param(name, array.shape, rlx.f32) for name, array in task.weights.items()}
    x = g.input("x", task.x.shape, rlx.f32)

    def linear(x: Any, name: str) -> Any:
        return x @ w[name] + w[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        return rlx.layer_norm(x, w[f"{name}.scale"], w[f"{name}.shift"], eps=EPSILON)

    def turned(x: Any) -> Any:
        return rlx.transpose(x, axes=(0, 2, 1))

    y: Any = x
    for i in range(LAYERS):
        y = y + turned(linear(rlx.gelu(linear(turned(norm(y, f"{i}.tokens")), f"{i}.a")), f"{i}.b"))
        y = y + linear(rlx.gelu(linear(norm(y, f"{i}.channels"), f"{i}.c")), f"{i}.d")
    g.set_outputs([linear(rlx.mean(norm(y, "end"), axis=1), "head")])
    compiled = rlx.Session().compile(g, rlx.CompileOptions(threads=task.threads, tune=tune))
    for name, array in task.weights.items():
        compiled.set_param(name, array)
    if tune:
        print(compiled.report().tuning, file=sys.stderr)
    inputs = [compiled.input_view("x")]
    inputs[0][...] = task.x

    def run() -> np.ndarray:
        compiled.run_slots(inputs)
        return compiled.outputs_view()[0].numpy()

    return run


def run_rlx_tuned(task: Task) -> Run:
    return run_rlx(task, TUNE_SECONDS)


def run_torch(task: Task) -> Run:
    import torch
    from torch.nn.functional import gelu, layer_norm
    from torch.nn.functional import linear as product

    torch.set_num_threads(task.threads)
    w = {name: torch.tensor(np.ascontiguousarray(array.T)) for name, array in task.weights.items()}
    x = torch.tensor(task.x)

    def linear(x: Any, name: str) -> Any:
        return product(x, w[name], w[f"{name}.bias"])

    def norm(x: Any, name: str) -> Any:
        return layer_norm(x, x.shape[-1:], w[f"{name}.scale"], w[f"{name}.shift"], EPSILON)

    def run() -> np.ndarray:
        with torch.inference_mode():
            y = x
            for i in range(LAYERS):
                y = y + linear(gelu(linear(norm(y, f"{i}.tokens").transpose(1, 2), f"{i}.a")), f"{i}.b").transpose(1, 2)
                y = y + linear(gelu(linear(norm(y, f"{i}.channels"), f"{i}.c")), f"{i}.d")
            return linear(norm(y, "end").mean(1), "head").numpy()

    return run


def run_jax(task: Task) -> Run:
    keep_to(task.threads)
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax
    import jax.numpy as jnp

    def mixer(w: Any, x: Any) -> Any:
        def linear(x: Any, name: str) -> Any:
            return x @ w[name] + w[f"{name}.bias"]

        def norm(x: Any, name: str) -> Any:
            x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + EPSILON)
            return x * w[f"{name}.scale"] + w[f"{name}.shift"]

        def gelu(x: Any) -> Any:
            return jax.nn.gelu(x, approximate=False)

        for i in range(LAYERS):
            x = x + linear(gelu(linear(norm(x, f"{i}.tokens").swapaxes(1, 2), f"{i}.a")), f"{i}.b").swapaxes(1, 2)
            x = x + linear(gelu(linear(norm(x, f"{i}.channels"), f"{i}.c")), f"{i}.d")
        return linear(norm(x, "end").mean(1), "head")

    weights, x = {name: jnp.asarray(array) for name, array in task.weights.items()}, jnp.asarray(task.x)
    compiled = jax.jit(mixer).lower(weights, x).compile()
    return lambda: np.asarray(compiled(weights, x))


def onnx_model(task: Task) -> Any:
    """Standard operators only."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []

    def node(op: str, *inputs: str, **attrs: Any) -> str:
        nodes.append(helper.make_node(op, list(inputs), [f"{op}_{len(nodes)}"], **attrs))
        return nodes[-1].output[0]

    def linear(x: str, name: str) -> str:
        return node("Add", node("MatMul", x, name), f"{name}.bias")

    def norm(x: str, name: str) -> str:
        return node("LayerNormalization", x, f"{name}.scale", f"{name}.shift", epsilon=EPSILON, axis=-1)

    def turned(x: str) -> str:
        return node("Transpose", x, perm=[0, 2, 1])

    y = "x"
    for i in range(LAYERS):
        y = node("Add", y, turned(linear(node("Gelu", linear(turned(norm(y, f"{i}.tokens")), f"{i}.a")), f"{i}.b")))
        y = node("Add", y, linear(node("Gelu", linear(norm(y, f"{i}.channels"), f"{i}.c")), f"{i}.d"))
    last = linear(node("ReduceMean", norm(y, "end"), "axis", keepdims=0), "head")
    constants = {**task.weights, "axis": np.array([1])}
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, task.x.shape)
    found = helper.make_tensor_value_info(last, TensorProto.FLOAT, (task.batch, CLASSES))
    kept = [numpy_helper.from_array(np.ascontiguousarray(array), name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "mixer", [given], [found], initializer=kept)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.checker.check_model(made)
    return made


def run_onnx(task: Task) -> Run:
    made = onnx_model(task)
    return onnx_session(made, task.threads, {"x": task.x}, (made.graph.output[0].name, (task.batch, CLASSES)))


def run_openvino(task: Task) -> Run:
    return openvino_request(onnx_model(task), task.threads, [task.x])


RUNNERS = {
    "rlx": run_rlx,
    "rlx, tuned": run_rlx_tuned,
    "ONNX Runtime": run_onnx,
    "OpenVINO": run_openvino,
    "JAX": run_jax,
    "torch": run_torch,
}

if __name__ == "__main__":
    title, engines = "MLP mixer of odd sizes, `python benchmarks/mixer.py`", {"f32": tuple(RUNNERS)}
    main(Workload(__file__, title, SHAPES, RUNNERS, Task, engines), __doc__ or "")
