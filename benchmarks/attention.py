"""Fused attention: rlx against torch's scaled_dot_product_attention, and against the machine's limits.

    python benchmarks/attention.py [--threads 1 2] [--rounds 9] [--only WORD …]

"whole" cases have as many keys as queries, all of one dtype, operands as [batch, rows, heads, size]; "chunk" and "decode" cases
have the shape of Qwen3-0.6B (16 query heads, 8 key heads, head size 128) over a cache. A decode case cycles through several KV
caches, more than the processor's caches hold, as a model's layers do. Its limit is the memory read bandwidth. The limit of all
other cases is the rate of multiply-adds, of bf16 that of the instruction that sums products of pairs (every kernel also computes
the exponentials).

torch reads the same memory, only the visible keys; with 16-bit keys its queries must be 16-bit too. Its MKL is told to use its
fast kernels on AMD processors. One thread is measured in CPU time of that thread, more threads in wall time.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import rlx
from benchmarks.gemv import TOTAL, read_calls
from benchmarks.measure import Call, dot_call, fma_call, header, interleaved, share, table
from benchmarks.mkl import favour_amd


@dataclass(frozen=True)
class Case:
    """`start`: position of the first query in a cache of `keys` keys, the last of which is that of the last query; None: no
    cache."""

    heads: int
    rows: int
    keys: int
    size: int
    mask: str = "none"
    batch: int = 1
    key_heads: int = 0
    cache: str = "f32"
    start: int | None = None

    @property
    def kind(self) -> str:
        return "whole" if self.start is None else "decode" if self.rows == 1 else "chunk"

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.key_heads}" if self.key_heads else str(self.heads)
        where = f"{self.cache} cache" if self.start is not None else f"{self.cache} {self.mask}"
        return f"{self.kind} {self.batch} x {heads} x {self.rows} x {self.keys} x {self.size} {where}"

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values, which are read at least once."""
        return 2 * self.batch * (self.key_heads or self.heads) * self.keys * self.size * rlx.as_dtype(self.cache).itemsize

    @property
    def copies(self) -> int:
        return -(-TOTAL // self.cache_bytes) if self.kind == "decode" else 1

    @property
    def flops(self) -> float:
        """Multiplications and additions with visible keys."""
        pairs = self.rows * self.keys if self.mask == "none" else sum(self.keys - i for i in range(self.rows))
        return 4.0 * self.batch * self.heads * pairs * self.size


def _over_cache(rows: int, keys: int, cache: str = "f32", heads: int = 16, key_heads: int = 8) -> Case:
    return Case(heads, rows, keys, 128, "causal", key_heads=key_heads, cache=cache, start=keys - rows)


CASES = [
    Case(12, 16, 16, 32), Case(12, 128, 128, 32), Case(12, 128, 128, 32, batch=8), Case(12, 128, 128, 64), Case(12, 256, 256, 64),
    Case(12, 512, 512, 64), Case(12, 512, 512, 64, "causal"),
    *(Case(12, 128, 128, size, batch=batch, cache="bf16") for size in (32, 64) for batch in (1, 8)),
    Case(12, 512, 512, 64, batch=8, cache="bf16"), Case(16, 512, 512, 128, "causal", key_heads=8, cache="bf16"),
    *(_over_cache(rows, 4096, cache) for rows in (512, 128) for cache in ("f32", "f16")),
    *(_over_cache(1, keys, cache) for cache in ("f32", "f16", "bf16") for keys in (128, 1024, 4096)),
    _over_cache(1, 4096, heads=4, key_heads=1),
]  # fmt: skip


def operands(case: Case) -> tuple[list[np.ndarray], bool]:
    """q, k and v in memory, and whether the head axis is inside the row axis."""
    rng, c = np.random.default_rng(0), case
    key_heads, inside = c.key_heads or c.heads, case.start is None
    shapes = [(c.batch, heads, n, c.size) for heads, n in ((c.heads, c.rows), (key_heads, c.keys), (key_heads, c.keys))]
    shapes = [(b, n, h, d) for b, h, n, d in shapes] if inside else shapes
    made = [rng.standard_normal(s, np.float32) for s in shapes]
    narrow = rlx.as_dtype(c.cache).numpy
    return [made[0].astype(narrow) if inside else made[0], *(x.astype(narrow) for x in made[1:])], inside


def rlx_call(case: Case, threads: int) -> tuple[Call, np.ndarray, list[np.ndarray]]:
    """(call, its first result [batch, heads, rows, size], views of all operands: q, k, v, k, v …)."""
    arrays, inside = operands(case)
    g = rlx.Graph("attention")

    def leaf(name: str, x: np.ndarray) -> rlx.Value:
        made = g.input(name, x.shape, rlx.as_dtype(x.dtype))
        return made.transpose(0, 2, 1, 3) if inside else made

    q = leaf("q", arrays[0])
    caches = [(leaf(f"k{i}", arrays[1]), leaf(f"v{i}", arrays[2])) for i in range(case.copies)]
    at = () if case.start is None else (g.input("start", (), "i32"),)
    g.set_outputs([rlx.attention(q, k, v, *at, mask=case.mask, positioned=bool(at)) for k, v in caches])
    compiled = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions(threads=threads))
    views = [compiled.input_view(str(x.name)) for x in g.inputs]
    for view, x in zip(views, [arrays[0], *arrays[1:] * case.copies, *(np.array(case.start, np.int32) for _ in at)], strict=True):
        view[...] = x
    compiled.run_slots(views)
    got = np.array(compiled.outputs_view()[0]).astype(np.float64)
    return lambda: compiled.run_slots(views), got, views[: 1 + 2 * case.copies]


def torch_call(case: Case, views: list[np.ndarray], threads: int) -> tuple[Call, np.ndarray]:
    """(call, the first result in float64)."""
    import torch

    torch.set_num_threads(threads)
    attend = torch.nn.functional.scaled_dot_product_attention

    def tensor(x: np.ndarray) -> torch.Tensor:
        t = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype.itemsize == 2 else torch.from_numpy(x)
        t = t.view(torch.float16) if case.cache == "f16" and x.dtype.itemsize == 2 else t
        return t.transpose(1, 2) if case.start is None else t

    q, *caches = map(tensor, views)
    mask = None
    if case.mask == "causal" and case.rows > 1:  # torch's own mask aligns the first query with the first key
        mask = torch.ones(case.rows, case.keys, dtype=torch.bool).tril(case.keys - case.rows)
    grouped = bool(case.key_heads)
    want = attend(q.double(), caches[0].double(), caches[1].double(), mask, enable_gqa=grouped).numpy()
    narrow, causal = q.to(caches[0].dtype), mask is not None and case.rows == case.keys

    def call() -> None:
        with torch.inference_mode():
            for k, v in zip(caches[::2], caches[1::2]):
                attend(narrow, k, v, None if causal else mask, is_causal=causal, enable_gqa=grouped)

    return call, want


def measure(threads: int, rounds: int, only: list[str]) -> None:
    peaks = {"f32": fma_call()}
    reading, nbytes = read_calls(threads)
    rows = []
    for case in CASES:
        if only and not any(word in str(case) for word in only):
            continue
        pairs = case.cache == "bf16" and case.start is None
        if pairs and "bf16" not in peaks:
            peaks["bf16"] = dot_call(2)
        peak, per_call = peaks["bf16" if pairs else "f32"]
        ours, got, views = rlx_call(case, threads)
        theirs, want = torch_call(case, views, threads)
        error = float(np.abs(got - want).max())
        if not error < (2e-2 if pairs else 1e-5):
            raise SystemExit(f"wrong by {error} on {case}")
        decode = case.kind == "decode"
        times = interleaved({"limit": reading if decode else peak, "rlx": ours, "torch": theirs}, rounds, threads=threads)
        rate = (case.cache_bytes * case.copies if decode else case.flops) / times["rlx"]
        limit = (nbytes if decode else threads * per_call) / times["limit"]
        cells = [str(case), f"{times['rlx'] / case.copies * 1e6:.1f}", f"{rate / 1e9:.1f} {'GB/s' if decode else 'GFLOP/s'}"]
        rows.append([*cells, share(rate, limit), f"{times['torch'] / times['rlx']:.2f}", f"{error:.0e}"])
    print(f"\n{threads} thread(s); {'thread CPU time' if threads == 1 else 'wall time'}")
    print(table(["batch x heads x rows x keys x size", "us", "rate", "of the limit", "torch x", "error"], rows), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", nargs="+", default=[], help="cases with one of these words in their name")
    args = parser.parse_args()
    favour_amd()
    if os.environ.get("RLX_BENCHMARK_THREADS"):
        measure(int(os.environ["RLX_BENCHMARK_THREADS"]), args.rounds, args.only)
        return
    print(header("torch", "numpy", "llvmlite"), flush=True)
    for threads in args.threads:  # torch reads its thread count when first imported
        count = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment = {**os.environ, **count, "RLX_BENCHMARK_THREADS": str(threads)}
        subprocess.run([sys.executable, *sys.argv], env=environment, check=True)


if __name__ == "__main__":
    main()
