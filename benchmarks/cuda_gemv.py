"""Products of a few rows on an NVIDIA GPU: rlx beside the bandwidth of memory and products of bf16 (torch).

    python benchmarks/cuda_gemv.py [--formats q8_0 q4_k bf16] [--rows 1 8 512] [--dtype bf16]

One run multiplies x by several weights in turn, so that none of them is in the L2 cache; it is one CUDA graph, replayed.
"read" is the rate of torch.sum over 1 GiB; the share of it counts the bytes of weights as they are.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import rlx
from benchmarks.cuda_measure import header
from rlx.backends.cuda.gpu import gpu
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import as_dtype
from rlx.ir.ops.quant import random_weights

SHAPES = ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (32000, 4096))  # columns, elements of a sum
COLD = 200_000_000  # bytes of weights in one run, about


def least(run: Callable[[], object], count: int = 10, rounds: int = 5) -> float:
    """Seconds of one run, the least of some rounds."""
    run()
    times = []
    for _ in range(rounds):
        wait()
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait()
        times.append((time.perf_counter() - start) / count)
    return min(times)


def wait() -> None:
    gpu(0).wait()
    torch.cuda.synchronize()


def weights(rng: np.random.Generator, form: str, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random ones [n, k], and the first 64 rows as numbers."""
    if form not in FORMATS:
        w = rng.standard_normal((n, k), np.float32).astype(as_dtype(form).numpy)
        return w, w[:64].astype(np.float32)
    w = np.zeros((n, FORMATS[form].row_bytes(k)), np.uint8)
    random_weights(FORMATS[form])(rng, [w, w])
    return w, FORMATS[form].decode_rows(w[:64], k)


def ours(form: str, m: int, n: int, k: int, dtype: str) -> float:
    """Seconds of one product."""
    rng = np.random.default_rng(n + k)
    w, decoded = weights(rng, form, n, k)
    g, copies = rlx.Graph("products"), max(2, min(8, COLD // w.nbytes + 1))
    x = g.input("x", (m, k), dtype)
    params = [g.param(f"w{i}", w.shape, w.dtype) for i in range(copies)]
    if form in FORMATS:
        g.set_outputs([rlx.dequant_matmul(x, p, format=form) for p in params])
    else:
        g.set_outputs([rlx.cast(x, form) @ p.T for p in params])
    compiled = rlx.Session("cuda").compile(g)
    for i in range(copies):
        compiled.set_param(f"w{i}", w)
    values = rng.standard_normal((m, k)).astype(as_dtype(dtype).numpy)
    (found, *_) = compiled.run({"x": values})
    want = values.astype(np.float64) @ decoded.astype(np.float64).T
    error = np.abs(np.asarray(found)[:, :64].astype(np.float64) - want).max() / np.abs(want).max()
    if not error < 1e-2:
        raise SystemExit(f"{form} {m} x {n} x {k} is wrong by {error}")
    parts = compiled._executable._steps
    return least(lambda: [part.run() for part in parts]) / copies


def peer(m: int, n: int, k: int) -> float:
    """Seconds of one product of bf16 by torch, in a CUDA graph."""
    copies = max(2, min(8, COLD // (2 * n * k) + 1))
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
    for w in weights:
        x @ w.T
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for w in weights:
            x @ w.T
    return least(graph.replay) / copies


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--formats", nargs="+", default=["q8_0", "q4_k"], choices=[*FORMATS, "bf16", "f16"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 512])
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "f16", "f32"))
    asked = parser.parse_args()
    where = header()
    big = torch.ones(1 << 28, device="cuda")
    read = 4 * big.numel() / least(big.sum)
    print(f"{where}, read {read / 1e12:.2f} TB/s", flush=True)
    for m in asked.rows:
        for n, k in SHAPES:
            bf16 = peer(m, n, k)
            for form in asked.formats:
                t = ours(form, m, n, k, asked.dtype)
                held = n * (FORMATS[form].row_bytes(k) if form in FORMATS else 2 * k)
                rate = f"{held / t / 1e12:5.2f} TB/s {held / t / read:4.0%} {2 * m * n * k / t / 1e12:5.0f} TFLOP/s"
                print(f"{form:5} {m:4} x {n:6} x {k:6}  {t * 1e6:8.2f} us {rate}  torch bf16 {bf16 * 1e6:8.2f} us", flush=True)


if __name__ == "__main__":
    main()
