"""f32 matrix products with fixed weights: rlx against numpy, torch and ONNX Runtime, and against the machine's own limits.

    python benchmarks/gemm.py [--threads 1 2] [--epilogue none|gelu] [--rounds 9]

Peers run in their best form: oneDNN with a weight in its own packed format, ONNX Runtime with bound inputs and outputs. torch's
`mm` is MKL as installed (on AMD it picks slower kernels unless configured otherwise, which is not done here). Each thread count
runs in a separate process. One thread is measured in CPU time of that thread, more threads in wall time. Table rows in which the
code of the limit did not have its cores to itself are withheld: other programs, or spinning workers of a peer in this process,
make such wall times meaningless.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import rlx
from benchmarks.measure import Call, fma_call, header, interleaved, read_call, share, table

KNOWN = [(128, 384, 384), (128, 1536, 384), (16, 384, 384), (512, 3072, 768), (1024, 1024, 1024)]  # m, n, k
ODD = [(33, 1024, 4096), (100, 384, 384), (7, 768, 768), (197, 1000, 768), (64, 1001, 2048), (129, 383, 385)]
STREAMED = (1, 4096, 4096)  # memory-bound: reads the weights
PEERS = ("numpy", "torch", "onnxruntime")


class Problem:
    """y = x @ w, or gelu(x @ w + bias); random, checked against float64."""

    def __init__(self, m: int, n: int, k: int, gelu: bool) -> None:
        rng = np.random.default_rng(0)
        self.shape, self.gelu = (m, n, k), gelu
        self.x = rng.standard_normal((m, k), np.float32)
        self.w = (rng.standard_normal((k, n)) / np.sqrt(k)).astype(np.float32)
        self.bias = rng.standard_normal(n).astype(np.float32)

    def check(self, name: str, got: np.ndarray) -> None:
        want = self.x.astype(np.float64) @ self.w
        if self.gelu:
            from scipy.special import erf

            want = (want + self.bias) * 0.5 * (1 + erf((want + self.bias) / np.sqrt(2)))
        error = float(np.abs(got - want).max())
        if not error < 1e-4:
            raise SystemExit(f"{name} is wrong by {error} on {self.shape}")


def rlx_call(p: Problem, threads: int) -> Call:
    m, n, k = p.shape
    g = rlx.Graph("gemm")
    x, w = g.input("x", (m, k), rlx.f32), g.param("w", (k, n), rlx.f32)
    y = rlx.gelu(x @ w + g.param("bias", (n,), rlx.f32)) if p.gelu else x @ w
    g.set_outputs([y])
    compiled = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions(threads=threads))
    compiled.set_param("w", p.w)
    if p.gelu:
        compiled.set_param("bias", p.bias)
    p.check("rlx", compiled.run({"x": p.x})[0])
    slot = [compiled.input_view("x")]
    slot[0][...] = p.x
    return lambda: compiled.run_slots(slot)


def numpy_call(p: Problem, threads: int) -> Call:
    out = np.empty((p.shape[0], p.shape[1]), np.float32)
    return lambda: np.matmul(p.x, p.w, out=out)


def torch_calls(p: Problem, threads: int) -> dict[str, Call]:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    x, w, bias = torch.from_numpy(p.x), torch.from_numpy(p.w), torch.from_numpy(p.bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(w.t().contiguous(), p.shape[0])
    linear = torch.ops.mkldnn._linear_pointwise.default
    args = (bias, "gelu", [], "none") if p.gelu else (None, "none", [], "")

    def one_dnn() -> object:
        return linear(x, packed, *args)

    def mkl() -> object:
        return torch.nn.functional.gelu(torch.addmm(bias, x, w)) if p.gelu else torch.mm(x, w)

    p.check("torch oneDNN", one_dnn().numpy())  # type: ignore[attr-defined]
    return {"torch mm": mkl, "oneDNN packed": one_dnn}


def onnxruntime_call(p: Problem, threads: int) -> Call:
    import onnxruntime as ort
    from onnx import TensorProto, helper, numpy_helper

    m, n, k = p.shape
    nodes, weights = [helper.make_node("MatMul", ["x", "w"], ["h" if p.gelu else "y"])], [numpy_helper.from_array(p.w, "w")]
    if p.gelu:
        nodes += [helper.make_node("Add", ["h", "bias"], ["s"]), helper.make_node("Gelu", ["s"], ["y"])]
        weights.append(numpy_helper.from_array(p.bias, "bias"))
    value = lambda name, dims: helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)  # noqa: E731
    graph = helper.make_graph(nodes, "gemm", [value("x", [m, k])], [value("y", [m, n])], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    out = np.empty((m, n), np.float32)
    bound = session.io_binding()
    bound.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(p.x))
    bound.bind_output("y", "cpu", 0, np.float32, out.shape, out.ctypes.data)
    session.run_with_iobinding(bound)
    p.check("onnxruntime", out)
    return lambda keep=(out, p): session.run_with_iobinding(bound)


def calls_of(p: Problem, threads: int) -> dict[str, Call]:
    calls = {"rlx": rlx_call(p, threads)}
    if "--alone" in sys.argv:
        return calls
    if not p.gelu:
        calls["numpy"] = numpy_call(p, threads)
    if importlib.util.find_spec("torch"):
        calls |= torch_calls(p, threads)
    if importlib.util.find_spec("onnxruntime") and importlib.util.find_spec("onnx"):
        calls["onnxruntime"] = onnxruntime_call(p, threads)
    return calls


def rows_of(shapes: list[tuple[int, int, int]], threads: int, gelu: bool, rounds: int, limit: Callable) -> list[list[str]]:
    """One line per shape: rlx's rate and share of the limit, then the time of each peer over that of rlx."""
    rows = []
    for shape in shapes:
        m, n, k = shape
        peak, per_call = limit(shape)
        calls = calls_of(Problem(m, n, k, gelu), threads)
        times = interleaved({"peak": peak, **calls}, rounds, threads=threads)
        one_core = per_call / times["peak"]
        alone = interleaved({"peak": peak}, 3)["peak"]  # CPU time of the limit's code on an undisturbed core
        if threads > 1 and times["peak"] > 1.05 * alone:
            text = f"disturbed: {100 - 100 * alone / times['peak']:.0f}% of the core went elsewhere"
            rows.append([f"{m}, {n}, {k}", text, *["-"] * (2 + len(NAMES))])
            continue
        work = 4.0 * k * n if shape == STREAMED else 2.0 * m * n * k  # bytes of weights, or operations
        rate = work / times["rlx"]
        unit = "GB/s" if shape == STREAMED else "GFLOP/s"
        cells = [f"{m}, {n}, {k}", f"{rate / 1e9:.1f} {unit}", f"{one_core / 1e9:.1f}", share(rate, one_core * threads)]
        cells += [f"{times[name] / times['rlx']:.2f}" if name in times else "-" for name in NAMES]
        rows.append(cells)
    return rows


NAMES = ("numpy", "torch mm", "oneDNN packed", "onnxruntime")


def measure(threads: int, gelu: bool, rounds: int) -> None:
    heads = ["m, n, k", "rlx", "limit, 1 core", "share", *(f"{name} x" for name in NAMES)]
    peak = fma_call()
    rows = rows_of(KNOWN + ODD, threads, gelu, rounds, lambda shape: peak)
    rows += rows_of([STREAMED], threads, gelu, rounds, lambda shape: read_call(4 * shape[1] * shape[2]))
    clock = "thread CPU time" if threads == 1 else f"wall time; shares are of {threads} x one core's limit"
    print(f"\n{threads} thread(s), {'gelu(x @ w + bias)' if gelu else 'x @ w'}; {clock}; peers: their time / rlx's")
    print(table(heads, rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--epilogue", choices=["none", "gelu"], default="none")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--alone", action="store_true", help="without peers, whose idle workers spin and take a core from rlx's")
    args = parser.parse_args()
    if os.environ.get("RLX_BENCHMARK_THREADS"):
        measure(int(os.environ["RLX_BENCHMARK_THREADS"]), args.epilogue == "gelu", args.rounds)
        return
    print(header("numpy", "llvmlite", *(p for p in PEERS[1:] if importlib.util.find_spec(p))), flush=True)
    for threads in args.threads:  # numpy and torch read their thread counts when first imported
        count = {name: str(threads) for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        environment = {**os.environ, **count, "RLX_BENCHMARK_THREADS": str(threads)}
        subprocess.run([sys.executable, *sys.argv], env=environment, check=True)


if __name__ == "__main__":
    main()
