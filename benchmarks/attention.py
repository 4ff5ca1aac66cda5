"""Fused attention on [batch, rows, heads, size] operands: rlx against torch's scaled_dot_product_attention.

    python benchmarks/attention.py [--threads 1 2] [--rounds 9]

torch's MKL is told to use its fast kernels on AMD processors too. One thread is measured in CPU time of that thread, more
in wall time. The limit is multiply-adds alone; of the softmax's exponentials every kernel pays as well.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import rlx
from benchmarks.measure import Call, fma_call, header, interleaved, share, table
from benchmarks.minilm import favour_amd

SHAPES = [  # batch, heads, query rows, keys, head size, mask
    (1, 12, 16, 16, 32, "none"), (1, 12, 128, 128, 32, "none"), (8, 12, 128, 128, 32, "none"), (1, 12, 128, 128, 64, "none"),
    (1, 12, 256, 256, 64, "none"), (1, 12, 512, 512, 64, "none"), (1, 12, 512, 512, 64, "causal"), (1, 16, 1, 1024, 64, "causal"),
]  # fmt: skip


def rlx_call(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: str, threads: int) -> tuple[Call, np.ndarray]:
    """(call, its result [batch, rows, heads, size]): operands lie so too, and are turned by views alone."""
    g = rlx.Graph("attention")
    leaves = [g.input(name, x.shape, rlx.f32) for name, x in (("q", q), ("k", k), ("v", v))]
    out = rlx.attention(*(x.transpose(0, 2, 1, 3) for x in leaves), mask=mask)
    g.set_outputs([out])
    compiled = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions(threads=threads))
    steps = [step.kernel.origin for step in compiled.program().steps]
    if len(steps) != 1:
        raise SystemExit(f"expected one fused kernel, got {steps}")
    slots = [compiled.input_view(name) for name in ("q", "k", "v")]
    for slot, x in zip(slots, (q, k, v)):
        slot[...] = x
    (result,) = compiled.run({"q": q, "k": k, "v": v})
    return lambda: compiled.run_slots(slots), result.transpose(0, 2, 1, 3)


def torch_call(q: np.ndarray, k: np.ndarray, v: np.ndarray, mask: str, threads: int) -> tuple[Call, np.ndarray]:
    """(call, the result in float64)."""
    import torch

    torch.set_num_threads(threads)
    attend = torch.nn.functional.scaled_dot_product_attention
    operands = [torch.from_numpy(x).transpose(1, 2) for x in (q, k, v)]
    causal = mask == "causal" and q.shape[1] > 1  # torch puts the first query at the first key
    want = attend(*(x.double() for x in operands), is_causal=causal).transpose(1, 2).numpy()

    def call() -> object:
        with torch.inference_mode():
            return attend(*operands, is_causal=causal)

    return call, want


def measure(threads: int, rounds: int) -> None:
    peak, per_call = fma_call()
    rows = []
    for batch, heads, queries, keys, size, mask in SHAPES:
        rng = np.random.default_rng(0)
        q, k, v = (rng.standard_normal((batch, n, heads, size), np.float32) for n in (queries, keys, keys))
        ours, got = rlx_call(q, k, v, mask, threads)
        theirs, want = torch_call(q, k, v, mask, threads)
        error = float(np.abs(got - want).max())
        if not error < 1e-5:
            raise SystemExit(f"wrong by {error} on {queries} x {keys}")
        times = interleaved({"peak": peak, "rlx": ours, "torch": theirs}, rounds, threads=threads)
        pairs = queries * keys if mask == "none" or queries == 1 else sum(keys - queries + i + 1 for i in range(queries))
        rate = 4.0 * batch * heads * pairs * size / times["rlx"]
        limit = threads * per_call / times["peak"]
        cells = [f"{batch} x {heads} x {queries} x {keys} x {size} {mask}", f"{times['rlx'] * 1e6:.1f}", f"{rate / 1e9:.0f}"]
        rows.append([*cells, share(rate, limit), f"{times['torch'] / times['rlx']:.2f}", f"{error:.0e}"])
    print(f"\n{threads} thread(s); {'thread CPU time' if threads == 1 else 'wall time'}")
    heads_of_table = ["batch x heads x rows x keys x size", "us", "GFLOP/s", "of the FMA limit", "torch x", "error"]
    print(table(heads_of_table, rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    favour_amd()
    if os.environ.get("RLX_BENCHMARK_THREADS"):
        measure(int(os.environ["RLX_BENCHMARK_THREADS"]), args.rounds)
        return
    print(header("torch", "numpy", "llvmlite"), flush=True)
    for threads in args.threads:  # torch reads its thread count when first imported
        count = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment = {**os.environ, **count, "RLX_BENCHMARK_THREADS": str(threads)}
        subprocess.run([sys.executable, *sys.argv], env=environment, check=True)


if __name__ == "__main__":
    main()
