"""One row times fixed weights in each storage format: the share of the machine's read bandwidth that decoding reaches.

    python benchmarks/gemv.py [--threads 1 2] [--rounds 9] [--rows 1]

Weights are stored in several copies, more than the caches hold, and a run reads every copy once; GB/s counts the packed bytes.
The bandwidth is that of generated code that only reads, with as many threads, in the same rounds. One thread is measured in its
CPU time, more threads in wall time: run those on a quiet machine. torch has f32, bf16, int8 (one scale per row) and 4 bits in
groups of 32, all but f32 with bf16 activations; the number is its time over rlx's.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import rlx
from benchmarks.measure import Call, header, interleaved, read_call, share, table
from rlx.ir.blocks import FORMATS
from rlx.ir.ops import dequant_matmul

SHAPES = [(4096, 4096), (1024, 3072), (151936, 1024)]  # n, k
STORED = ("f32", "bf16", "q8_0", "q4_0", "q4_k", "q5_k", "q6_k")
TOTAL = 192 << 20  # least bytes of weights: six times the last-level cache


def read_calls(threads: int, times: int = 1) -> tuple[Call, float]:
    """(call, bytes per call): `threads` threads read memory concurrently, `times` times."""
    calls, nbytes = zip(*(read_call(TOTAL // threads) for _ in range(threads)))
    if threads == 1:
        return lambda: [calls[0]() for _ in range(times)], times * nbytes[0]
    cpus, together = sorted(os.sched_getaffinity(0)), Barrier(threads)
    pool = ThreadPoolExecutor(threads, initializer=lambda: os.sched_setaffinity(0, {cpus.pop()}))  # pins only that thread

    def one(call: Call) -> None:
        together.wait()
        for _ in range(times):
            call()

    return lambda: list(pool.map(one, calls)), times * sum(nbytes)


def random_rows(stored: str, n: int, k: int) -> np.ndarray:
    """Weights [n, k], or rows of blocks [n, row bytes]."""
    rng = np.random.default_rng(0)
    if stored not in FORMATS:
        return (rng.standard_normal((n, k), np.float32) / np.sqrt(k)).astype(rlx.as_dtype(stored).numpy)
    form = FORMATS[stored]
    blocks = rng.integers(0, 256, (n, k // form.block, form.nbytes), np.uint8)
    for at in form.numbers:
        blocks[..., at : at + 2] = np.array([1e-3], np.float16).view(np.uint8)
    return blocks.reshape(n, -1)


def rlx_call(stored: str, rows: int, n: int, k: int, threads: int) -> tuple[Call, float]:
    """(call, bytes of prepared weights that it reads)."""
    weights = random_rows(stored, n, k)
    copies = -(-TOTAL // weights.nbytes)
    dtype = rlx.bf16 if stored == "bf16" else rlx.f32
    g = rlx.Graph("gemv")
    x = g.input("x", (rows, k), dtype)
    params = [g.param(f"w{i}", weights.shape, rlx.as_dtype(weights.dtype)) for i in range(copies)]
    g.set_outputs([dequant_matmul(x, w, format=stored) if stored in FORMATS else x @ w.T for w in params])
    compiled = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions(threads=threads))
    for i in range(copies):
        compiled.set_param(f"w{i}", weights)
    row = np.random.default_rng(1).standard_normal((rows, k), np.float32).astype(dtype.numpy)
    got = compiled.run({"x": row})[0].astype(np.float64)
    exact = (FORMATS[stored].decode_rows(weights) if stored in FORMATS else weights).astype(np.float32)
    error = float(np.abs(got - row.astype(np.float32) @ exact.T).max() / np.abs(got).max())
    if not error < 0.02:
        raise SystemExit(f"{stored} {n} x {k} is wrong by {error}")
    slot = [compiled.input_view("x")]
    slot[0][...] = row
    nbytes = sum(b.nbytes for b in compiled.program().buffers if b.region.value == "prepared")
    return lambda: compiled.run_slots(slot), float(nbytes)


def torch_call(stored: str, rows: int, n: int, k: int, copies: int) -> Call | None:
    """torch's own kernel on as many copies; None if it has none."""
    import torch

    torch.set_grad_enabled(False)
    x = torch.randn(rows, k, dtype=torch.float32 if stored == "f32" else torch.bfloat16)
    call: Callable
    if stored in ("f32", "bf16"):
        weights, call = torch.randn(n, k, dtype=x.dtype), torch.nn.functional.linear
    elif stored == "q8_0":
        weights, ones = torch.randint(-127, 128, (n, k), dtype=torch.int8), torch.ones(n, dtype=torch.bfloat16)
        call = lambda x, w: torch.ops.aten._weight_int8pack_mm(x, w, ones)  # noqa: E731
    elif stored == "q4_0":
        plain = torch.randint(0, 16, (n, k), dtype=torch.int32)
        weights, scales = torch.ops.aten._convert_weight_to_int4pack_for_cpu(plain, 1), torch.ones(k // 32, n, 2, dtype=x.dtype)
        call = lambda x, w: torch.ops.aten._weight_int4pack_mm_for_cpu(x, w, 32, scales)  # noqa: E731
    else:
        return None
    every = [weights.clone() for _ in range(copies)]
    return lambda: [call(x, w) for w in every]


def measure(threads: int, rows: int, rounds: int) -> None:
    lines = []
    reading, nbytes = read_calls(threads)
    has_torch = importlib.util.find_spec("torch") is not None
    for n, k in SHAPES:
        for stored in STORED:
            call, total = rlx_call(stored, rows, n, k, threads)
            calls: dict[str, Call] = {"rlx": call, "read": reading}
            peer = torch_call(stored, rows, n, k, -(-TOTAL // random_bytes(stored, n, k))) if has_torch else None
            if peer:
                import torch

                torch.set_num_threads(threads)
                calls["torch"] = peer
            times = interleaved(calls, rounds, threads=threads)
            rate, limit = total / times["rlx"], nbytes / times["read"]
            beside = f"{times['torch'] / times['rlx']:.2f}" if "torch" in times else "-"
            lines.append([f"{n} x {k} {stored}", f"{rate / 1e9:.1f}", f"{limit / 1e9:.1f}", share(rate, limit), beside])
    print(f"\n{threads} thread(s), {rows} row(s); {'thread CPU time' if threads == 1 else 'wall time'}")
    print(table(["weights", "GB/s", "read GB/s", "share", "torch x"], lines), flush=True)


def random_bytes(stored: str, n: int, k: int) -> int:
    """Bytes of weights [n, k] as they are stored."""
    return n * (FORMATS[stored].row_bytes(k) if stored in FORMATS else k * rlx.as_dtype(stored).itemsize)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    if os.environ.get("RLX_BENCHMARK_THREADS"):
        measure(int(os.environ["RLX_BENCHMARK_THREADS"]), args.rows, args.rounds)
        return
    print(header("numpy", "llvmlite", *(["torch"] if importlib.util.find_spec("torch") else [])), flush=True)
    for threads in args.threads:  # torch reads its thread count when first imported
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "RLX_BENCHMARK_THREADS": str(threads)}
        subprocess.run([sys.executable, *sys.argv], env=environment, check=True)


if __name__ == "__main__":
    main()
