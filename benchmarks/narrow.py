"""Contractions and MiniLM in bf16 and int8: correct against numpy, against the machine's own limits, and against torch.

    python benchmarks/narrow.py [--threads 1] [--kinds bf16 int8] [--rounds 7] [--alone] [--no-model]

"int8" quantises x inside the run; "u8 x i8" is its integer product alone. If the CPU has AMX, everything runs twice, without and
with the matrix unit (RLX_AMX=1), each in a separate process. Limits are generated loops of the instruction itself on registers.
One thread is measured in CPU time, more threads in wall time. torch's bf16 has its weight in oneDNN's own packed format,
its int8 is _int_mm of i8 by i8.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import ml_dtypes
import numpy as np

import rlx
from benchmarks.measure import Call, dot_call, header, interleaved, share, table
from rlx.backends.cpu.target import host_target
from rlx.frontends.models import bert
from rlx.models import default_folder, load

SHAPES = [(16, 384, 384), (128, 384, 384), (128, 1536, 384), (128, 384, 1536), (512, 3072, 768), (1024, 1024, 1024),
          (4096, 1024, 1024), (512, 1024, 1536), (33, 1000, 1024), (100, 383, 385), (7, 384, 384), (4, 1024, 1024),
          (1, 4096, 4096)]  # fmt: skip
WIDTHS = {"f32": 1, "bf16": 2, "int8": 4, "u8 x i8": 4}


def rlx_call(kind: str, shape: tuple[int, int, int], threads: int) -> Call:
    """x @ w, checked. Bounds: f32 sums of k rounded terms; for int8 the bound stated in rlx.compiler.int8; integers are exact."""
    m, n, k = shape
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32) / np.float32(k**0.5)
    g = rlx.Graph("narrow")
    if kind == "u8 x i8":
        x, w = rng.integers(0, 256, (m, k)).astype(np.uint8), rng.integers(-128, 128, (k, n)).astype(np.int8)
        g.set_outputs([rlx.ir.ops.int8_matmul(g.input("x", (m, k), "u8"), g.param("w", (k, n), "i8"))])
        want, allowed = x.astype(np.float64) @ w.astype(np.float64), np.zeros(())
    elif kind == "bf16":
        x, w = x.astype(ml_dtypes.bfloat16), w.astype(ml_dtypes.bfloat16)
        g.set_outputs([g.input("x", (m, k), rlx.bf16) @ g.param("w", (k, n), rlx.bf16)])
        left, right = x.astype(np.float64), w.astype(np.float64)
        want = left @ right
        allowed = 2.0**-8 * np.abs(want) + k**0.5 * 2.0**-22 * (np.abs(left) @ np.abs(right))
    else:
        g.set_outputs([g.input("x", (m, k), rlx.f32) @ g.param("w", (k, n), rlx.f32)])
        want, span = x.astype(np.float64) @ w, (x.max(1) - x.min(1))[:, None]
        allowed = span / 510 * np.abs(w).sum(0) + np.abs(w).max(0) / 254 * (np.abs(x).sum(1)[:, None] + k * span / 510) + 1e-5
    options = rlx.CompileOptions(threads=threads, precision="int8" if kind == "int8" else "f32")
    compiled = rlx.Session(rlx.Device.CPU).compile(g, options)
    compiled.set_param("w", w)
    error = np.abs(compiled.run({"x": x})[0].astype(np.float64) - want)
    if not (error <= allowed).all():
        raise SystemExit(f"{kind} {shape} is wrong by {error.max()}; {np.max(allowed)} is allowed at most")
    slot = [compiled.input_view("x")]
    slot[0][...] = x
    return lambda: compiled.run_slots(slot)


def torch_call(kind: str, shape: tuple[int, int, int], threads: int) -> Call | None:
    import torch

    torch.set_num_threads(threads)
    torch.set_grad_enabled(False)
    m, n, k = shape
    if kind == "bf16":
        x, w = torch.randn(m, k).bfloat16(), torch.randn(n, k).bfloat16()
        packed = torch.ops.mkldnn._reorder_linear_weight(w, m)
        return lambda: torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
    if kind == "u8 x i8":
        a, b = (torch.randint(-127, 127, dims, dtype=torch.int8) for dims in ((m, k), (k, n)))
        return lambda: torch._int_mm(a, b)  # type: ignore[attr-defined]
    return None


def rows_of(kind: str, threads: int, rounds: int, peers: bool) -> list[list[str]]:
    rows, (peak, per_call) = [], dot_call(WIDTHS[kind])
    for shape in SHAPES:
        calls = {"peak": peak, "rlx": rlx_call(kind, shape, threads)}
        if peers and (other := torch_call(kind, shape, threads)):
            calls["torch"] = other
        times = interleaved(calls, rounds, threads=threads)
        rate, limit = 2.0 * shape[0] * shape[1] * shape[2] / times["rlx"], per_call / times["peak"] * threads
        ratio = f"{times['torch'] / times['rlx']:.2f}" if "torch" in times else "-"
        name = f"{kind}: {', '.join(map(str, shape))}"
        rows.append([name, f"{rate / 1e9:.0f}", f"{limit / 1e9:.0f}", share(rate, limit), ratio])
    return rows


def model_rows(threads: int, rounds: int) -> list[list[str]]:
    """MiniLM: milliseconds per policy and shape."""
    model, rows = load(default_folder()), []
    for shape in ((1, 16), (1, 128), (8, 128)):
        calls: dict[str, Call] = {}
        for policy in ("f32", "bf16", "int8"):
            options = rlx.CompileOptions(threads=threads, precision=policy)
            compiled = rlx.Session().compile(bert.build(model.config, *shape), options)
            for name, array in model.weights.items():
                compiled.set_param(name, np.asarray(array, np.float32))
            slots = [compiled.input_view("input_ids"), compiled.input_view("attention_mask")]
            slots[0][...], slots[1][...] = np.random.default_rng(0).integers(1000, 20000, shape), 1
            calls[policy] = lambda compiled=compiled, slots=slots: compiled.run_slots(slots)
        times = interleaved(calls, rounds, threads=threads)
        cells = [f"{1e3 * t:.2f} ms, {times['f32'] / t:.2f} x" for t in times.values()]
        rows.append([f"{shape[0]} x {shape[1]}", *cells])
    return rows


def error_rows() -> list[list[str]]:
    """Embeddings of 200 sentences compared with those of f32."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    from sentences import sentences  # type: ignore[import-not-found]

    texts, rows = sentences(200), []
    want = load(default_folder()).embed(texts)
    for policy in ("bf16", "int8"):
        found = load(default_folder(), options=rlx.CompileOptions(precision=policy)).embed(texts)
        cosines = (found * want).sum(1)
        alike = np.abs(found @ found.T - want @ want.T).max()
        worst = np.abs(found - want).max()
        rows.append([policy, f"{worst:.4f}", f"{cosines.min():.5f}", f"{cosines.mean():.5f}", f"{alike:.4f}"])
    return rows


def measure(args: argparse.Namespace) -> None:
    unit = "with the matrix unit" if "amx-tile" in host_target(1).features else "without a matrix unit"
    for threads in args.threads:
        clock = "thread CPU time" if threads == 1 else "wall time"
        print(f"\n{threads} thread(s), {unit}; {clock}, GOP/s; torch: its time / rlx's")
        peers = not args.alone and importlib.util.find_spec("torch") is not None
        rows = [row for kind in args.kinds for row in rows_of(kind, threads, args.rounds, peers)]
        print(table(["m, n, k", "rlx", "limit", "share", "torch x"], rows), flush=True)
        if not args.no_model:
            print("\n" + table(["MiniLM", "f32", "bf16", "int8"], model_rows(threads, args.rounds)), flush=True)
    if not args.no_model:
        print("\n" + table(["embeddings", "max abs error", "least cosine", "mean cosine", "similarity off by"], error_rows()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--kinds", nargs="+", choices=["bf16", "int8", "u8 x i8"], default=["bf16", "u8 x i8", "int8"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--alone", action="store_true", help="without torch")
    parser.add_argument("--no-model", action="store_true", help="contractions only")
    args = parser.parse_args()
    if "RLX_BENCHMARK_CHILD" in os.environ:
        measure(args)
        return
    print(header("numpy", "llvmlite", *(["torch"] if importlib.util.find_spec("torch") else [])), flush=True)
    has = " amx_tile" in Path("/proc/cpuinfo").read_text()
    for amx in ("0", "1")[: 1 + has]:
        environment = {**os.environ, "RLX_AMX": amx, "RLX_BENCHMARK_CHILD": "1", "OMP_NUM_THREADS": str(max(args.threads))}
        subprocess.run([sys.executable, *sys.argv], env=environment, check=True)


if __name__ == "__main__":
    main()
