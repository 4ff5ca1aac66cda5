"""Prefill and decoding of a language model with random weights: rlx, llama.cpp and OpenVINO, each in a separate process.

    python benchmarks/generation.py [--threads 2] [--formats f32 bf16 q8_0 q4_k] [--context 128] [--rounds 7] [--write]
    python benchmarks/generation.py --shape 30b-a3b --formats q8_0 q4_k

Shapes: Qwen3-0.6B, or some layers of Qwen3-30B-A3B, a mixture of experts (qwen_moe_shape.py; GGUF only, rlx and llama.cpp).

In each round the engines alternate: the state is reset, the prompt is processed (prefill), then `steps` tokens are decoded one by
one. The other engines wait on a pipe, so that no idle worker spins. Times are medians over rounds (prefill) and over all steps
(decode), wall time of the public call, including Python. The read rate is that of generated code that only reads, with as many
threads. It is measured just before and after each engine's turn, since it varies from second to second on shared machines. The
share is the median over rounds of the turn's rate divided by the mean of those two. Decoding counts the stored bytes of every
matrix (of experts: as many as a token takes) once, and the keys and values: f32 with f32 weights, else f16 (OpenVINO: its own
choice). The multiply-add rate is that of one core. Files are written once, in --folder (5 GB), those of q8_0 and q4_k
by llama.cpp. Peers that are not installed, and formats without a file, are omitted and listed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks import qwen_moe_shape, qwen_shape
from benchmarks.measure import append

SHAPES: dict[str, Any] = {"0.6b": qwen_shape, "30b-a3b": qwen_moe_shape}
NAMES = {"0.6b": "Qwen3-0.6B shape", "30b-a3b": f"Qwen3-30B-A3B shape, {qwen_moe_shape.LAYERS} layers"}
ENGINES = {"rlx": "llvmlite", "llama.cpp": "llama_cpp", "OpenVINO": "openvino"}  # engine -> the module it needs
FORMATS = ("f32", "bf16", "q8_0", "q4_k")
BITS = {"f32": 32, "bf16": 16, "q8_0": 8.5, "q4_k": 4.5, "int8": 8, "int4": 4.25}  # per weight, including its share of the scales
OPENVINO = {"q8_0": "int8", "q4_k": "int4"}  # its closest formats: a scale per row, a scale per 64 weights
CACHE = {"f32": "f32"}  # dtype of keys and values by weights; f16 with other weights
PEAK = {"f32": 1, "bf16": 2, "q8_0": 4, "q4_k": 4}  # multiply-adds per instruction, relative to f32
Step = Callable[[np.ndarray, int], np.ndarray]  # i32 [n] tokens at that position -> f32 [vocab]


# -- engines: each in its own process ------------------------------------------------------------------------------------


def run_rlx(shape: Any, root: Path, form: str, threads: int, capacity: int) -> Step:
    import rlx
    from rlx.models import load

    path = shape.folder(root) if form in ("f32", "bf16") else shape.gguf_file(root, form)
    weights = form if form in ("f32", "bf16") else None
    options = rlx.CompileOptions(threads=threads)
    model: Any = load(path, weights=weights, capacity=capacity, cache=CACHE.get(form, "f16"), options=options)

    def step(tokens: np.ndarray, at: int) -> np.ndarray:
        if at == 0:
            model.reset()
        return model.step(tokens)[0]

    return step


def run_llama(shape: Any, root: Path, form: str, threads: int, capacity: int) -> Step:
    import llama_cpp as lib

    lib.llama_log_set(_quiet := lib.llama_log_callback(lambda *_: None), None)
    lib.llama_backend_init()
    model = lib.llama_model_load_from_file(str(shape.gguf_file(root, form)).encode(), lib.llama_model_default_params())
    how = lib.llama_context_default_params()
    how.n_ctx, how.n_batch, how.n_ubatch, how.n_threads, how.n_threads_batch = capacity, 512, 512, threads, threads
    how.type_k = how.type_v = lib.GGML_TYPE_F32 if form in CACHE else lib.GGML_TYPE_F16
    context = lib.llama_init_from_model(model, how)
    memory = lib.llama_get_memory(context)

    def step(tokens: np.ndarray, at: int, keep: object = _quiet) -> np.ndarray:
        if at == 0:
            lib.llama_memory_clear(memory, True)
        for low in range(0, len(tokens), 512):
            part = tokens[low : low + 512]
            ids = (lib.llama_token * len(part))(*part.tolist())
            if lib.llama_decode(context, lib.llama_batch_get_one(ids, len(part))):
                raise SystemExit("llama_decode failed")
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), (shape.CONFIG["vocab_size"],))

    return step


def run_openvino(shape: Any, root: Path, form: str, threads: int, capacity: int) -> Step:
    from benchmarks.openvino_qwen import compile_model

    model = compile_model(shape.CONFIG, shape.tensors(), OPENVINO.get(form, form), threads)
    request, beams = model.create_infer_request(), np.zeros(1, np.int32)

    def step(tokens: np.ndarray, at: int) -> np.ndarray:
        if at == 0:
            request.reset_state()
        places = np.arange(at, at + len(tokens), dtype=np.int32)
        mask = np.where(np.arange(at + len(tokens)) <= places[:, None], np.float32(0), np.float32(-np.inf))[None, None]
        request.infer([tokens[None], mask, places, beams], share_inputs=True)
        return request.get_output_tensor(0).data.reshape(-1)

    return step


class Limits:
    """Read and multiply-add rates of this machine, measured like an engine."""

    def __init__(self, threads: int) -> None:
        from benchmarks.gemv import read_calls
        from benchmarks.measure import fma_call

        self.read, self.nbytes = read_calls(threads, times=6)  # long enough to make the start of the threads negligible
        self.fma, self.flops = fma_call(steps=50_000)

    def round(self) -> dict[str, Any]:
        begun = time.perf_counter()
        self.read()
        middle = time.perf_counter()
        for _ in range(5):
            self.fma()
        return {"read": self.nbytes / (middle - begun), "fma": 5 * self.flops / (time.perf_counter() - middle)}


def round_of(step: Step, vocab: int, context: int, steps: int) -> dict[str, Any]:
    """One round's seconds, and the last logits."""
    tokens = np.random.default_rng(1).integers(0, vocab, context + steps).astype(np.int32)
    begun = time.perf_counter()
    step(tokens[:context], 0)
    prefill, decode, logits = time.perf_counter() - begun, [], np.zeros(0)
    for at in range(context, context + steps):
        begun = time.perf_counter()
        logits = step(tokens[at : at + 1], at)
        decode.append(time.perf_counter() - begun)
    return {"prefill": prefill, "decode": decode, "logits": logits[:4096].tolist()}


def worker(engine: str, form: str, args: argparse.Namespace) -> None:
    """Answers each line on stdin with a round's result."""
    answers, sys.stdout = sys.stdout, sys.stderr
    runs = {"rlx": run_rlx, "llama.cpp": run_llama, "OpenVINO": run_openvino}
    shape = SHAPES[args.shape]
    if engine == "limits":
        turn = Limits(args.threads).round
    else:
        step = runs[engine](shape, args.folder, form, args.threads, args.context + args.steps + 64)
        turn = lambda: round_of(step, shape.CONFIG["vocab_size"], args.context, args.steps)  # noqa: E731
    turn()
    print("ready", file=answers, flush=True)
    for _ in sys.stdin:
        print(json.dumps(turn()), file=answers, flush=True)


# -- the table -----------------------------------------------------------------------------------------------------------


class NotStarted(Exception):
    """An engine's process ended before it was ready."""


class Engine:
    """A worker process, connected by two pipes."""

    def __init__(self, name: str, form: str, args: argparse.Namespace) -> None:
        how = {"shape": args.shape, "threads": args.threads, "context": args.context, "steps": args.steps, "folder": args.folder}
        options = [part for key, value in how.items() for part in (f"--{key}", str(value))]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        command = [sys.executable, __file__, "--worker", name, form, *options]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        self.results: list[dict[str, Any]] = []
        assert self.process.stdin and self.process.stdout
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        if self.stdout.readline() != "ready\n":
            raise NotStarted(f"{name} ends with an error at its first steps in {form}")

    def turn(self) -> None:
        print(file=self.stdin, flush=True)
        self.results.append(json.loads(self.stdout.readline()))

    def end(self) -> None:
        self.stdin.close()
        self.process.wait()


def work(c: dict[str, Any], form: str, context: int, steps: int) -> tuple[float, float]:
    """(bytes read per decoded token, operations of the prefill)."""
    heads, kv, size = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    inner = c.get("num_experts_per_tok", 1) * c.get("moe_intermediate_size", c["intermediate_size"])
    layer = c["hidden_size"] * (2 * heads * size + 2 * kv * size + 3 * inner)
    router = c["hidden_size"] * c.get("num_experts", 0)  # f32
    table, layers = c["vocab_size"] * c["hidden_size"], c["num_hidden_layers"]
    cache = 2 * layers * kv * size * (4 if form in CACHE else 2) * (context + steps / 2)
    attention = layers * 4 * heads * size * context * (context + 1) / 2
    nbytes = (layers * layer + table) * BITS[form] / 8 + 4 * layers * router + cache
    return nbytes, 2.0 * (layers * (layer + router) * context + table) + attention


def compare(form: str, engines: list[str], args: argparse.Namespace) -> list[str]:
    """Table rows of one format, and notes. A peer that does not start is left out: OpenVINO crashes in q4_k on some CPUs."""
    running, notes = {}, []
    for name in engines:
        try:
            running[name] = Engine(name, form, args)
        except NotStarted as why:
            if name == "rlx":
                raise
            notes.append(str(why))
            print(why, flush=True)
    limits = Engine("limits", form, args)
    limits.turn()
    for _ in range(args.rounds):
        for engine in running.values():
            time.sleep(0.05)
            engine.turn()
            limits.turn()
    for engine in (*running.values(), limits):
        engine.end()
    reads = [r["read"] for r in limits.results]
    nbytes, operations = work(SHAPES[args.shape].CONFIG, form, args.context, args.steps)
    shares = {}
    for at, (name, engine) in enumerate(running.items()):
        turns = range(at, len(reads) - 1, len(running))  # reads[turn] was measured before it, reads[turn + 1] after
        rates = [nbytes / statistics.median(r["decode"]) for r in engine.results]
        shares[name] = statistics.median(rate / (reads[t] + reads[t + 1]) * 2 for rate, t in zip(rates, turns, strict=True))
    read, fma = statistics.median(reads), statistics.median(r["fma"] for r in limits.results)
    prefill = {n: statistics.median(r["prefill"] for r in e.results) for n, e in running.items()}
    decode = {n: statistics.median(t for r in e.results for t in r["decode"]) for n, e in running.items()}
    ours = np.array(running["rlx"].results[-1]["logits"])
    rows = []
    for name, engine in running.items():
        apart = np.abs(np.array(engine.results[-1]["logits"]) - ours).max() / np.abs(ours).max()
        limit = operations / (fma * PEAK[form] * args.threads)
        cells = [
            form, args.threads, name, f"{1 / decode[name]:.1f}", f"{shares[name]:.0%}", f"{decode[name] / decode['rlx']:.2f}",
            f"{prefill[name] * 1e3:.0f}", f"{limit / prefill[name]:.0%}", f"{prefill[name] / prefill['rlx']:.2f}", f"{apart:.0e}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(map(str, cells))} |")
        print(rows[-1], flush=True)
    note = f"{form}: read rate {read / 1e9:.1f} GB/s on {args.threads} thread(s), multiply-adds {fma / 1e9:.0f} GFLOP/s on one"
    print(note, flush=True)
    return [*rows, note, *notes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="0.6b", choices=SHAPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--formats", nargs="+", default=FORMATS, choices=FORMATS)
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=ENGINES)
    parser.add_argument("--context", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--steps", type=int, default=16, help="tokens decoded after it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "rlx-qwen3"))
    parser.add_argument("--write", action="store_true", help="append the table to docs/benchmarks.md")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(*args.worker, args)
        return
    from benchmarks.measure import header

    if args.shape != "0.6b":
        args.engines = [e for e in args.engines if e != "OpenVINO"]
        args.formats = [f for f in args.formats if f not in ("f32", "bf16")]
    lacking = [f for f in args.formats if args.shape == "0.6b" and not qwen_shape.can_write(args.folder, f)]
    engines = [e for e in args.engines if importlib.util.find_spec(ENGINES[e])]
    packages = {"llama.cpp": "llama-cpp-python", "OpenVINO": "openvino", "rlx": "llvmlite"}
    about = header(*(packages[e] for e in engines))
    about += "".join(f"; {e} is not installed" for e in args.engines if e not in engines)
    about += "".join(f"; {f} is left out: llama.cpp, which writes its file, is not installed" for f in lacking)
    heads = ["format", "threads", "engine", "decode, tokens/s", "of read rate", "rlx is faster by", "prefill, ms", "of peak"]
    heads += ["rlx is faster by", "logits differ"]
    head = [f"| {' | '.join(heads)} |", "|" + " --- |" * len(heads)]
    print(about, *head, sep="\n", flush=True)
    lines = [line for form in args.formats if form not in lacking for line in compare(form, engines, args)]
    if args.write:
        command = f"python benchmarks/generation.py --shape {args.shape} --threads {args.threads} --context {args.context}"
        append(f"Generation, {NAMES[args.shape]}, {time.strftime('%Y-%m-%d')}, `{command}`", about, [*head, *lines])


if __name__ == "__main__":
    main()
