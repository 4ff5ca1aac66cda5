"""The overhead of a call: an addition of 16 floats, and a perceptron of three layers of 64 on one row.

    python benchmarks/calls.py --write         # every installed peer, 1 and 2 threads; about a minute

Wall time of a call from Python, on existing arrays. Each peer is called through its cheapest public interface, ONNX Runtime and
rlx also through others. A sample is a block of calls of about 20 microseconds (reading the clock takes as long as one call).
Blocks alternate between the peers; the table has medians and 99th percentiles. Every output is compared with numpy in f64.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import rlx
from benchmarks.measure import DOCUMENT, header
from rlx import knobs

MARK = "## Calls, `python benchmarks/calls.py`"
PEERS = ("numpy", "torch", "onnxruntime", "openvino", "jax")
BLOCK_NS = 20_000
LAYERS, WIDTH = 3, 64

Call = Callable[[], Any]
Calls = dict[str, tuple[Call, Call]]  # peer -> (timed call, call that returns its output)


class Case:
    """Inputs, and weights if there are any; one method per peer expresses the same computation."""

    def __init__(self, name: str) -> None:
        rng = np.random.default_rng(0)
        dims = (16,) if name == "add" else (1, WIDTH)
        self.name = name
        self.inputs = [rng.standard_normal(dims).astype(np.float32) for _ in range(2 if name == "add" else 1)]
        count = 0 if name == "add" else LAYERS
        self.weights = [(rng.standard_normal((WIDTH, WIDTH)) / 8).astype(np.float32) for _ in range(count)]
        self.biases = [rng.standard_normal(WIDTH).astype(np.float32) for _ in self.weights]

    def wanted(self) -> np.ndarray:
        x = [a.astype(np.float64) for a in self.inputs]
        if self.name == "add":
            return x[0] + x[1]
        h = x[0]
        for i, (w, b) in enumerate(zip(self.weights, self.biases)):
            h = h @ w + b
            h = np.maximum(h, 0) if i + 1 < LAYERS else h
        return h


def rlx_calls(case: Case, threads: int) -> Calls:
    g = rlx.Graph(case.name)
    names = [f"x{i}" for i in range(len(case.inputs))]
    values = [g.input(n, a.shape, "f32") for n, a in zip(names, case.inputs)]
    ws = [g.param(f"w{i}", w.shape, "f32") for i, w in enumerate(case.weights)]
    bs = [g.param(f"b{i}", b.shape, "f32") for i, b in enumerate(case.biases)]

    def function(weights: Any, biases: Any, *xs: Any) -> Any:
        if case.name == "add":
            return xs[0] + xs[1]
        h = xs[0]
        for i, (w, b) in enumerate(zip(weights, biases)):
            h = h @ w + b
            h = rlx.relu(h) if i + 1 < LAYERS else h
        return h

    g.set_outputs([function(ws, bs, *values)])
    session, options = rlx.Session("cpu"), rlx.CompileOptions(threads=threads)
    made, plain = session.compile(g, options), session.compile(g, options)
    for i, (w, b) in enumerate(zip(case.weights, case.biases)):
        for compiled in (made, plain):
            compiled.set_param(f"w{i}", w)
            compiled.set_param(f"b{i}", b)
    named, view = dict(zip(names, case.inputs)), lambda c=made: c.outputs_view()[0].numpy()
    bound, slots, run = made.bound(case.inputs), made.run_slots, made.run
    constants = [rlx.constant(w) for w in case.weights], [rlx.constant(b) for b in case.biases]
    jitted = rlx.jit(lambda *xs: function(*constants, *xs), threads=threads)
    with knobs.override(RLX_CALLS="python"):
        slowly, plainly, runs = plain.bound(case.inputs), plain.run_slots, plain.run
    return {
        "rlx bound": (bound, lambda: bound()[0]), "rlx run_slots": (lambda: slots(case.inputs), view),
        "rlx run": (lambda: run(named), lambda: run(named)[0]),
        "rlx.jit": (lambda: jitted(*case.inputs), lambda: jitted(*case.inputs)),
        "rlx bound, in Python": (slowly, lambda: slowly()[0]),
        "rlx run_slots, in Python": (lambda: plainly(case.inputs), lambda: view(plain)),
        "rlx run, in Python": (lambda: runs(named), lambda: runs(named)[0]),
    }  # fmt: skip


def numpy_calls(case: Case) -> Calls:
    held = [np.empty_like(case.inputs[0]) for _ in range(max(1, len(case.weights)))]
    if case.name == "add":
        x, y = case.inputs
        return {"numpy, out=": (lambda: np.add(x, y, out=held[0]), lambda: held[0])}
    layers = list(zip(case.weights, case.biases, held))

    def call() -> np.ndarray:
        h = case.inputs[0]
        for i, (w, b, out) in enumerate(layers):
            h = np.matmul(h, w, out=out)
            np.add(h, b, out=h)
            if i + 1 < LAYERS:
                np.maximum(h, 0, out=h)
        return h

    return {"numpy, out=": (call, call)}


def torch_calls(case: Case, threads: int) -> Calls:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    xs, ws, bs = ([torch.from_numpy(a) for a in arrays] for arrays in (case.inputs, case.weights, case.biases))
    ws = [w.T.contiguous() for w in ws]
    if case.name == "add":
        out, (x, y) = torch.empty(16), xs
        return {"torch eager, out=": (lambda: torch.add(x, y, out=out), out.numpy)}

    def call() -> Any:
        h, linear = xs[0], torch.nn.functional.linear
        for i in range(LAYERS):
            h = linear(h, ws[i], bs[i])
            h = h.relu_() if i + 1 < LAYERS else h
        return h

    return {"torch eager": (call, lambda: call().numpy())}


def onnx_model(case: Case) -> bytes:
    from onnx import TensorProto, helper, numpy_helper

    value = lambda n, a: helper.make_tensor_value_info(n, TensorProto.FLOAT, a.shape)  # noqa: E731
    constants = {f"w{i}": w for i, w in enumerate(case.weights)} | {f"b{i}": b for i, b in enumerate(case.biases)}
    if case.name == "add":
        nodes = [helper.make_node("Add", ["x0", "x1"], ["out"])]
    else:
        nodes, at = [], "x0"
        for i in range(LAYERS):
            last = i + 1 == LAYERS
            nodes.append(helper.make_node("Gemm", [at, f"w{i}", f"b{i}"], ["out" if last else f"h{i}"]))
            if not last:
                nodes.append(helper.make_node("Relu", [f"h{i}"], [at := f"r{i}"]))
    inputs = [value(f"x{i}", a) for i, a in enumerate(case.inputs)]
    held = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "g", inputs, [value("out", case.wanted())], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()


def onnxruntime_calls(case: Case, threads: int) -> Calls:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = threads, 3
    session = ort.InferenceSession(onnx_model(case), options, providers=["CPUExecutionProvider"])
    binding, out = session.io_binding(), ort.OrtValue.ortvalue_from_numpy(case.wanted().astype(np.float32))
    for i, a in enumerate(case.inputs):
        binding.bind_ortvalue_input(f"x{i}", ort.OrtValue.ortvalue_from_numpy(a))
    binding.bind_ortvalue_output("out", out)
    feed = {f"x{i}": a for i, a in enumerate(case.inputs)}
    return {
        "ONNX Runtime, I/O binding": (lambda: session.run_with_iobinding(binding), out.numpy),
        "ONNX Runtime, run": (lambda: session.run(None, feed), lambda: session.run(None, feed)[0]),
    }


def openvino_calls(case: Case, threads: int) -> Calls:
    import openvino as ov

    core = ov.Core()
    options = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(core.read_model(onnx_model(case)), "CPU", options).create_infer_request()
    for i, a in enumerate(case.inputs):
        request.set_input_tensor(i, ov.Tensor(a, shared_memory=True))
    return {"OpenVINO, shared tensors": (lambda: request.infer(share_outputs=True), lambda: request.get_output_tensor(0).data)}


def jax_calls(case: Case, threads: int) -> Calls:
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    xs, ws, bs = ([jnp.asarray(a) for a in arrays] for arrays in (case.inputs, case.weights, case.biases))

    def function(*xs: Any) -> Any:
        if case.name == "add":
            return xs[0] + xs[1]
        h = xs[0]
        for i in range(LAYERS):
            h = h @ ws[i] + bs[i]
            h = jnp.maximum(h, 0) if i + 1 < LAYERS else h
        return h

    compiled = jax.jit(function)
    call = lambda: compiled(*xs).block_until_ready()  # noqa: E731
    return {"JAX, jit": (call, lambda: np.asarray(call()))}


def alternating(calls: Mapping[str, Call], seconds: float) -> dict[str, list[float]]:
    """Nanoseconds per call of each block."""
    clock, counts = time.perf_counter_ns, {}
    for name, call in calls.items():
        for _ in range(200):
            call()
        start = clock()
        for _ in range(50):
            call()
        counts[name] = range(max(1, round(BLOCK_NS * 50 / (clock() - start))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            call()  # brings its code and data back into the L1 cache
            start = clock()
            for _ in counts[name]:
                call()
            times[name].append((clock() - start) / len(counts[name]))
    return times


def measure(case: Case, threads: int, seconds: float, peers: tuple[str, ...]) -> list[str]:
    makers: dict[str, Callable[[], Calls]] = {
        "numpy": lambda: numpy_calls(case), "torch": lambda: torch_calls(case, threads),
        "onnxruntime": lambda: onnxruntime_calls(case, threads), "openvino": lambda: openvino_calls(case, threads),
        "jax": lambda: jax_calls(case, threads),
    }  # fmt: skip
    made = rlx_calls(case, threads)
    for peer in peers:
        made |= makers[peer]()
    wanted, differences = case.wanted(), {}
    for name, (call, output) in made.items():
        call()
        differences[name] = float(np.abs(np.asarray(output()) - wanted).max())
        if differences[name] > 1e-4:
            raise SystemExit(f"{name} is wrong by {differences[name]}")
    times = alternating({name: call for name, (call, _) in made.items()}, seconds)
    ours = statistics.median(times["rlx bound"])
    rows = []
    for name, found in times.items():
        median, late = statistics.median(found), sorted(found)[int(len(found) * 0.99)]
        ratio = "" if name == "rlx bound" else f"{median / ours:.1f}"
        rows.append(f"| {case.name} | {threads} | {name} | {median:.0f} | {late:.0f} | {ratio} | {differences[name]:.0e} |")
    return rows


def write(text: str) -> None:
    """Put the results under this benchmark's heading of docs/benchmarks.md."""
    before, _, after = DOCUMENT.read_text().partition(MARK)
    rest = after.partition("\n## ")
    DOCUMENT.write_text(f"{before.rstrip()}\n\n{MARK}\n\n{text}\n" + (f"\n## {rest[2]}" if rest[1] else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=5, help="of measurement per table part")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--write", action="store_true", help="write the table into docs/benchmarks.md")
    args = parser.parse_args()
    peers = () if args.alone else tuple(p for p in PEERS if importlib.util.find_spec(p))
    if inner := os.environ.get("RLX_BENCHMARK_THREADS"):
        for name in ("add", "mlp"):
            print("\n".join(measure(Case(name), int(inner), args.seconds, peers)), flush=True)
        return
    rows = ["| case | threads | call | median, ns | p99, ns | its time / rlx bound | max abs difference |", "| --- " * 7 + "|"]
    for threads in args.threads:  # numpy, torch and jax read their thread counts when first imported
        count: Mapping[str, str] = {n: str(threads) for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        one = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1" if threads == 1 else ""
        environment = {**os.environ, **count, "RLX_BENCHMARK_THREADS": str(threads), "XLA_FLAGS": one, "JAX_PLATFORMS": "cpu"}
        done = subprocess.run([sys.executable, *sys.argv], env=environment, check=True, stdout=subprocess.PIPE, text=True)
        rows += done.stdout.strip().splitlines()
    text = "\n\n".join([header("numpy", "llvmlite", *(p for p in peers if p != "numpy")), "\n".join(rows)])
    print(text)
    if args.write:
        write(text)


if __name__ == "__main__":
    main()
