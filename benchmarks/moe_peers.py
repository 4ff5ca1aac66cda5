"""One MoE layer on rlx and on each peer, through its best public interfaces. `RUNNERS[name](Layer)` returns a callable that takes
the tokens f32 [tokens, WIDTH] (bf16 layers round them first) and returns the layer's result, f32. Peers are imported in their
functions: each runs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

EXPERTS, CHOSEN, WIDTH, INNER = 64, 8, 1024, 512
SETS = 6  # different tokens, run in turn: the experts of one set may stay in the caches
Run = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Layer:
    """y = sum over the chosen experts of weight * down(silu(gate x) * up x); weights: softmax of the router's scores, the largest
    CHOSEN of each token, divided by their sum."""

    tokens: int
    dtype: str
    threads: int

    def _drawn(self, seed: int, *dims: int) -> np.ndarray:
        """Uniform, of variance 1 / the last dim; exact in bf16."""
        found = np.random.default_rng(seed).random(dims, np.float32)
        found -= 0.5
        found *= np.float32((12 / dims[-1]) ** 0.5)
        found.view(np.uint32)[...] &= np.uint32(0xFFFF0000)
        return found

    @cached_property
    def router(self) -> np.ndarray:
        return 2 * self._drawn(0, EXPERTS, WIDTH)

    @cached_property
    def gate_up(self) -> np.ndarray:
        """[expert, gate's rows then up's, WIDTH]"""
        return self._drawn(1, EXPERTS, 2 * INNER, WIDTH)

    @cached_property
    def down(self) -> np.ndarray:
        return self._drawn(2, EXPERTS, WIDTH, INNER)

    @cached_property
    def x(self) -> list[np.ndarray]:
        return [self._drawn(3 + n, self.tokens, WIDTH) * np.float32(WIDTH**0.5) for n in range(SETS)]

    def route(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(experts, weights) [tokens, CHOSEN] in float64."""
        scores = np.exp(x.astype(np.float64) @ self.router.T)
        ids = np.argsort(-scores, axis=1)[:, :CHOSEN]
        weights = np.take_along_axis(scores, ids, 1)
        return ids, weights / weights.sum(1, keepdims=True)

    def expected(self, x: np.ndarray) -> np.ndarray:
        """In float64."""
        ids, weights = self.route(x)
        out = np.zeros_like(x, np.float64)
        for expert in np.unique(ids):
            token, slot = np.nonzero(ids == expert)
            gate, up = np.split(x[token].astype(np.float64) @ self.gate_up[expert].T, 2, axis=1)
            out[token] += (gate / (1 + np.exp(-gate)) * up @ self.down[expert].T) * weights[token, slot][:, None]
        return out

    @property
    def work(self) -> tuple[float, float]:
        """(bytes of the experts in use, multiplies and adds of the products) of one run, the mean over the sets of tokens."""
        one, router = 3 * WIDTH * INNER, WIDTH * EXPERTS
        used = float(np.mean([len(np.unique(self.route(x)[0])) for x in self.x]))
        return (used * one + router) * (2 if self.dtype == "bf16" else 4), 2.0 * self.tokens * (CHOSEN * one + router)


# -- rlx -----------------------------------------------------------------------------------------------------------


def run_rlx(layer: Layer) -> Run:
    import rlx
    from rlx.ir import ops

    kind = rlx.as_dtype(layer.dtype)
    g = rlx.Graph("moe")
    x = g.input("x", (layer.tokens, WIDTH), kind)
    arrays = {"router": layer.router, "gate_up": layer.gate_up, "down": layer.down}
    router, gate_up, down = (g.param(name, array.shape, kind) for name, array in arrays.items())
    ids, weights = ops.route((x @ router.T).astype(rlx.f32), k=CHOSEN, renormalise=True)
    order, place, ends = ops.group_rows(ids.reshape((layer.tokens * CHOSEN,)), groups=EXPERTS)
    rows = ops.gather(x, ops.floor_div(order, CHOSEN))
    inner = ops.segment_matmul(rows, gate_up.transpose(0, 2, 1), ends)
    made = ops.silu(inner[:, :INNER]) * inner[:, INNER:]
    out = ops.segment_matmul(made, down.transpose(0, 2, 1), ends)
    parts = ops.gather(out, place.reshape((layer.tokens, CHOSEN))).astype(rlx.f32)
    g.set_outputs([ops.sum(parts * weights.reshape((layer.tokens, CHOSEN, 1)), axis=1)])
    compiled = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions(threads=layer.threads))
    for name, array in arrays.items():
        compiled.set_param(name, array.astype(kind.numpy))
    view = compiled.input_view("x")

    def run(x: np.ndarray) -> np.ndarray:
        view[...] = x
        compiled.run_slots([view])
        return compiled.outputs_view()[0]

    return run


# -- ONNX Runtime --------------------------------------------------------------------------------------------------


def _session(layer: Layer, nodes: list[Any], weights: dict[str, np.ndarray], opsets: dict[str, int]) -> Run:
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    value = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [layer.tokens, WIDTH])  # noqa: E731
    initialisers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "moe", [value("x")], [value("y")], initialisers)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid(d, v) for d, v in opsets.items()], ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = layer.threads, 3
    session = ort.InferenceSession(made.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding, given = session.io_binding(), ort.OrtValue.ortvalue_from_numpy(layer.x[0])
    out = ort.OrtValue.ortvalue_from_numpy(np.zeros((layer.tokens, WIDTH), np.float32))
    binding.bind_ortvalue_input("x", given)
    binding.bind_ortvalue_output("y", out)

    def run(x: np.ndarray) -> np.ndarray:
        given.update_inplace(x)
        session.run_with_iobinding(binding)
        return out.numpy()

    return run


def run_onnx_op(layer: Layer) -> Run:
    """com.microsoft.MoE: one operator for everything after the router's product."""
    from onnx import helper

    mixed = layer.gate_up.reshape(EXPERTS, 2, INNER, WIDTH).swapaxes(1, 2).reshape(layer.gate_up.shape)
    weights = {"router": layer.router.T.copy(), "fc1": np.ascontiguousarray(mixed), "fc2": layer.down}
    about = {"k": CHOSEN, "activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1}
    about |= {"activation_alpha": 1.0, "activation_beta": 0.0}
    nodes = [
        helper.make_node("MatMul", ["x", "router"], ["scores"]),
        helper.make_node("MoE", ["x", "scores", "fc1", "", "fc2"], ["y"], domain="com.microsoft", **about),
    ]
    return _session(layer, nodes, weights, {"": 20, "com.microsoft": 1})


def run_onnx_experts(layer: Layer) -> Run:
    """Standard operators: for each expert, its tokens are gathered, multiplied, and added to the result."""
    from onnx import helper

    node = helper.make_node
    weights = {"router": layer.router.T.copy(), "k": np.array([CHOSEN]), "last": np.array([-1]), "none": layer.x[0] * 0}
    nodes = [
        node("MatMul", ["x", "router"], ["scores"]),
        node("Softmax", ["scores"], ["shares"]),
        node("TopK", ["shares", "k"], ["best", "ids"]),
        node("ReduceSum", ["best", "last"], ["sum"], keepdims=1),
        node("Div", ["best", "sum"], ["weights"]),
    ]
    total = "none"
    for n in range(EXPERTS):
        gate, up = layer.gate_up[n, :INNER].T.copy(), layer.gate_up[n, INNER:].T.copy()
        weights |= {f"n{n}": np.array(n), f"gate{n}": gate, f"up{n}": up, f"down{n}": layer.down[n].T.copy()}
        after = f"total{n}" if n < EXPERTS - 1 else "y"
        nodes += [
            node("Equal", ["ids", f"n{n}"], [f"mine{n}"]),
            node("NonZero", [f"mine{n}"], [f"at{n}"]),
            node("Split", [f"at{n}"], [f"row{n}", f"slot{n}"], num_outputs=2, axis=0),
            node("Transpose", [f"at{n}"], [f"places{n}"], perm=[1, 0]),
            node("Transpose", [f"row{n}"], [f"rows{n}"], perm=[1, 0]),
            node("GatherND", ["x", f"rows{n}"], [f"x{n}"]),
            node("GatherND", ["weights", f"places{n}"], [f"flat{n}"]),
            node("Unsqueeze", [f"flat{n}", "last"], [f"weight{n}"]),
            node("MatMul", [f"x{n}", f"gate{n}"], [f"g{n}"]),
            node("MatMul", [f"x{n}", f"up{n}"], [f"u{n}"]),
            node("Sigmoid", [f"g{n}"], [f"s{n}"]),
            node("Mul", [f"g{n}", f"s{n}"], [f"a{n}"]),
            node("Mul", [f"a{n}", f"u{n}"], [f"m{n}"]),
            node("MatMul", [f"m{n}", f"down{n}"], [f"d{n}"]),
            node("Mul", [f"d{n}", f"weight{n}"], [f"w{n}"]),
            node("ScatterND", [total, f"rows{n}", f"w{n}"], [after], reduction="add"),
        ]
        total = after
    return _session(layer, nodes, weights, {"": 20})


# -- torch ---------------------------------------------------------------------------------------------------------


def _torch(layer: Layer, block: Callable[..., Any], compiled: bool = False) -> Run:
    """`block(x, router, gate_up, down, ids, weights)`"""
    import torch

    torch.set_num_threads(layer.threads)
    torch.set_grad_enabled(False)
    kind = getattr(torch, {"f32": "float32"}.get(layer.dtype, "bfloat16"))
    router, gate_up, down = (torch.from_numpy(a).to(kind) for a in (layer.router, layer.gate_up, layer.down))

    def forward(x: Any) -> Any:
        shares = torch.softmax((x @ router.T).float(), -1)
        weights, ids = torch.topk(shares, CHOSEN, -1)
        return block(x, gate_up, down, ids, (weights / weights.sum(-1, keepdim=True)).to(kind))

    call = torch.compile(forward) if compiled else forward
    return lambda x: call(torch.from_numpy(x).to(kind)).float().numpy()


def run_torch_grouped(layer: Layer, compiled: bool = False) -> Run:
    """torch.nn.functional.grouped_mm on the rows sorted by expert."""
    import torch
    from torch.nn import functional

    def block(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> Any:
        flat = ids.flatten()
        order = torch.argsort(flat)
        ends = torch.cumsum(torch.bincount(flat, minlength=EXPERTS), 0).to(torch.int32)
        inner = functional.grouped_mm(x[order // CHOSEN], gate_up.transpose(1, 2), offs=ends)
        gate, up = inner.chunk(2, -1)
        out = functional.grouped_mm(functional.silu(gate) * up, down.transpose(1, 2), offs=ends)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order))
        return (out[back].view(*ids.shape, -1) * weights[..., None]).sum(1)

    return _torch(layer, block, compiled)


def run_torch_experts(layer: Layer) -> Run:
    """A loop over the experts that have tokens."""
    import torch
    from torch.nn import functional

    def block(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> Any:
        out = torch.zeros_like(x)
        for expert in torch.unique(ids).tolist():
            token, slot = torch.where(ids == expert)
            gate, up = functional.linear(x[token], gate_up[expert]).chunk(2, -1)
            part = functional.linear(functional.silu(gate) * up, down[expert])
            out.index_add_(0, token, part * weights[token, slot, None])
        return out

    return _torch(layer, block)


# -- OpenVINO ------------------------------------------------------------------------------------------------------


def run_openvino(layer: Layer) -> Run:
    """Every expert on every token, summed with weights that are mostly zero: a pattern that the CPU plugin replaces by products
    with the chosen experts only."""
    import openvino as ov
    from openvino import opset15 as op

    def sizes(*parts: Any) -> Any:
        return op.concat([op.constant(np.array([p])) if isinstance(p, int) else p for p in parts], 0)

    def reshape(x: Any, *parts: Any, zero: bool = False) -> Any:
        return op.reshape(x, sizes(*parts), zero)

    def times(x: Any, weights: np.ndarray) -> Any:
        return op.matmul(x, op.constant(np.ascontiguousarray(weights), shared_memory=True), False, True)

    x = op.parameter([-1, -1, WIDTH], np.float32)
    flat = reshape(x, -1, WIDTH)
    tiled = reshape(op.tile(flat, sizes(EXPERTS, 1)), EXPERTS, -1, WIDTH)
    gate, up = (times(tiled, half) for half in np.split(layer.gate_up, 2, axis=1))
    every = times(op.multiply(op.multiply(gate, op.sigmoid(gate)), up), layer.down)
    best, ids = op.topk(op.softmax(times(flat, layer.router), 1), np.int64(CHOSEN), -1, "max", "value", "i64").outputs()
    weights = op.divide(best, op.reduce_sum(best, sizes(-1), True))
    count = op.gather(op.shape_of(ids), sizes(0), np.array(0))
    zeros = op.broadcast(op.constant(np.zeros(1, np.float32)), sizes(count, EXPERTS))
    spread = op.transpose(op.scatter_elements_update(zeros, ids, weights, np.int64(1)), sizes(1, 0))
    spread = op.unsqueeze(reshape(spread, EXPERTS, count, -1, zero=True), sizes(3))
    total = op.reduce_sum(op.multiply(reshape(every, EXPERTS, count, -1, WIDTH, zero=True), spread), sizes(0), False)
    model = ov.Model([reshape(total, 0, WIDTH, zero=True)], [x], "moe")
    how = {"INFERENCE_NUM_THREADS": layer.threads, "PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": layer.dtype}
    compiled = ov.Core().compile_model(model, "CPU", how)
    if not any(n.get_rt_info()["layerType"].value == "GatherMatmul" for n in compiled.get_runtime_model().get_ops()):
        raise SystemExit("OpenVINO did not find the mixture of experts")
    request = compiled.create_infer_request()

    def run(x: np.ndarray) -> np.ndarray:
        request.infer([x[None]], share_inputs=True)
        return request.get_output_tensor(0).data

    return run


RUNNERS: dict[str, Callable[[Layer], Run]] = {
    "rlx": run_rlx,
    "ONNX Runtime, MoE operator": run_onnx_op,
    "ONNX Runtime, operators per expert": run_onnx_experts,
    "torch grouped_mm": run_torch_grouped,
    "torch grouped_mm, compiled": lambda layer: run_torch_grouped(layer, compiled=True),
    "torch, loop over experts": run_torch_experts,
    "OpenVINO": run_openvino,
}
ONLY = {"ONNX Runtime, MoE operator": "f32", "ONNX Runtime, operators per expert": "f32"}  # engine -> the dtype that it takes
ONLY |= {"torch grouped_mm, compiled": "bf16"}  # torch 2.13 compiles no other
