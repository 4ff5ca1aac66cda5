"""MiniLM-L6 on rlx, ONNX Runtime and torch, alternating in one process: `python benchmarks/minilm.py [--write]`.

Every peer gets the same ids and mask and returns the same normalised embeddings, which are compared first. Times are
medians and 99th percentiles of single runs. The ONNX model is built here from the same weights, twice: of standard operators,
for its optimiser to fuse, and of ONNX Runtime's own fused operators. Neither is always the faster.
The FMA limit is the time that the model's multiply-adds take at the peak of one core, measured in the same rounds, times the
threads.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks.measure import fma_call, header
from rlx.frontends.models import bert
from rlx.models import EmbeddingModel, default_folder, load

SHAPES = ((1, 16), (1, 128), (8, 128))
Run = Callable[[], np.ndarray]


def flops(config: bert.BertConfig, batch: int, length: int) -> float:
    """Multiplies and adds of the contractions of one run."""
    h, inner = config.hidden_size, config.intermediate_size
    token = 2 * (4 * h * h + 2 * h * inner) + 4 * length * h
    return float(batch * length * config.num_hidden_layers * token)


def run_rlx(model: EmbeddingModel, ids: np.ndarray, mask: np.ndarray, threads: int) -> Run:
    graph = bert.build(model.config, *ids.shape)
    compiled = rlx.Session().compile(graph, rlx.CompileOptions(threads=threads))
    for name, array in model.weights.items():
        compiled.set_param(name, np.asarray(array, np.float32))
    compiled.input_view("input_ids")[...] = ids
    compiled.input_view("attention_mask")[...] = mask
    inputs = [compiled.input_view("input_ids"), compiled.input_view("attention_mask")]

    def run() -> np.ndarray:
        compiled.run_slots(inputs)
        return compiled.outputs_view()[0].numpy()

    return run


def run_torch(folder: Path, ids: np.ndarray, mask: np.ndarray, threads: int) -> Run:
    import torch
    from transformers import AutoModel

    network = AutoModel.from_pretrained(folder, attn_implementation="sdpa").eval()
    tids, tmask = torch.tensor(ids, dtype=torch.int64), torch.tensor(mask, dtype=torch.int64)

    def run() -> np.ndarray:
        torch.set_num_threads(threads)
        with torch.inference_mode():
            x = network(input_ids=tids, attention_mask=tmask).last_hidden_state
            weight = tmask[..., None].float()
            pooled = (x * weight).sum(1) / weight.sum(1)
            return torch.nn.functional.normalize(pooled).numpy()

    return run


def run_onnx(model: EmbeddingModel, ids: np.ndarray, mask: np.ndarray, threads: int, fused: bool) -> Run:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    made = onnx_model(model.config, model.weights, fused).SerializeToString()
    session = ort.InferenceSession(made, options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = [ort.OrtValue.ortvalue_from_numpy(x) for x in (ids.astype(np.int32), mask.astype(np.int32))]
    out = ort.OrtValue.ortvalue_from_numpy(np.zeros((len(ids), model.dim), np.float32))
    for name, value in zip(("input_ids", "attention_mask"), values):
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output("embedding", out)

    def run() -> np.ndarray:
        session.run_with_iobinding(binding)
        return out.numpy()

    return run


def onnx_model(config: bert.BertConfig, weights: dict[str, np.ndarray], fused: bool):
    """The network as an ONNX model of standard operators, or of ONNX Runtime's fused ones."""
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
    length = node("Slice", node("Shape", "input_ids"), *(const(f"i{i}", np.array([i])) for i in (1, 2)))
    table = "embeddings.{}_embeddings.weight"
    where = node("Slice", weight(table.format("position")), const("i0", np.array([0])), length, const("i0", np.array([0])))
    kind = const("kind", np.asarray(weights[table.format("token_type")][0], np.float32))
    words = node("Gather", weight(table.format("word")), "input_ids")
    x = norm("embeddings.LayerNorm", node("Add", node("Add", words, where), kind))
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
    inputs = [helper.make_tensor_value_info(n, TensorProto.INT32, ["b", "n"]) for n in ("input_ids", "attention_mask")]
    outputs = [helper.make_tensor_value_info("embedding", TensorProto.FLOAT, ["b", config.hidden_size])]
    graph = helper.make_graph(nodes, "minilm", inputs, outputs, initializer=list(constants.values()))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(made)
    return made


def measure(runs: Mapping[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Seconds per run of each peer: blocks of a few runs in turn, with a rest so that no peer's spinning threads disturb."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    once = {}
    for name, run in runs.items():
        for _ in range(3):
            begun = time.perf_counter()
            run()
            once[name] = time.perf_counter() - begun
    block = {name: max(3, int(0.05 / t)) for name, t in once.items()}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 30:
        for name, run in runs.items():
            time.sleep(0.003)
            run()
            for _ in range(block[name]):
                begun = time.perf_counter()
                run()
                times[name].append(time.perf_counter() - begun)
    return times


def favour_amd() -> None:
    """Restart with a library that lets torch's MKL use its fast kernels on AMD processors, where a C compiler is at hand."""
    compiler = shutil.which("cc")
    if "AuthenticAMD" not in Path("/proc/cpuinfo").read_text() or "RLX_BENCH_MKL" in os.environ or not compiler:
        return
    folder = tempfile.mkdtemp()
    source, library = Path(folder, "mkl.c"), Path(folder, "libmkl_amd.so")
    source.write_text("int mkl_serv_intel_cpu_true(void) { return 1; }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    os.environ.update(LD_PRELOAD=str(library), RLX_BENCH_MKL="1")
    os.execv(sys.executable, [sys.executable, *sys.argv])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for each row")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--write", action="store_true", help="append the table to docs/benchmarks.md")
    args = parser.parse_args()
    favour_amd()
    folder = default_folder()
    model = load(folder)
    about = header("onnxruntime", "torch", "llvmlite")
    rows = ["| shape | threads | peer | median, ms | p99, ms | of the FMA limit | rlx is faster by | max abs difference |"]
    rows.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    print(about, *rows, sep="\n")
    for batch, length in SHAPES:
        rng = np.random.default_rng(0)
        ids = rng.integers(1000, 20000, (batch, length)).astype(np.int32)
        ids[:, 0], ids[:, -1] = 101, 102
        mask = np.ones((batch, length), np.bool_)
        for threads in args.threads:
            runs = {
                "rlx": run_rlx(model, ids, mask, threads),
                "ONNX Runtime": run_onnx(model, ids, mask, threads, fused=False),
                "ONNX Runtime, its fused operators": run_onnx(model, ids, mask, threads, fused=True),
                "torch": run_torch(folder, ids, mask, threads),
            }
            rows += compare(runs, batch, length, threads, flops(model.config, batch, length), args.seconds)
    if args.write:
        path = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"
        head = f"\n## MiniLM-L6, {time.strftime('%Y-%m-%d')}, `make bench`\n\n{about}\n\n"
        with path.open("a", encoding="utf-8") as f:
            f.write(head + "\n".join(rows) + "\n")


def compare(runs: dict[str, Run], batch: int, length: int, threads: int, work: float, seconds: float) -> list[str]:
    """Table rows of one shape. Raises SystemExit if a peer's result is another."""
    want = runs["rlx"]().copy()
    apart = {name: float(np.abs(run() - want).max()) for name, run in runs.items()}
    if max(apart.values()) > 1e-4:
        raise SystemExit(f"{batch} x {length}: the peers disagree: {apart}")
    fma, fma_work = fma_call(steps=20_000)
    times = measure({**runs, "fma": fma}, seconds)
    limit = work / (fma_work / statistics.median(times.pop("fma"))) / threads
    ours = statistics.median(times["rlx"])
    rows = []
    for name, taken in times.items():
        median, p99 = statistics.median(taken), float(np.quantile(taken, 0.99))
        ratio = "" if name == "rlx" else f"{median / ours:.2f}"
        rows.append(
            f"| {batch} × {length} | {threads} | {name} | {median * 1e3:.3f} | {p99 * 1e3:.3f} "
            f"| {limit / median:.0%} | {ratio} | {apart[name]:.1e} |"
        )
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
