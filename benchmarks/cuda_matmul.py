"""Products alone on an NVIDIA GPU: rlx beside cuBLAS (through torch) and torch.compile.

    python benchmarks/cuda_matmul.py [--rounds 5] [--compile default|max-autotune|none] [--seed 0]
        [--only alone gelu f32 encoders odd few random]

Each side is one CUDA graph of many runs, so that small products are not measured by their dispatch. Sides alternate; the time is
the least of the rounds. Inputs are random, and results are compared with float64. A product with "gelu" adds a bias and applies
gelu (tanh) before it is stored; torch.compile may fuse both. The right operand is a param, which
no run changes: rlx copies its first tiles before the product in front has ended. "t": it is stored transposed. "encoders": those
of MiniLM and BERT-base at 16 to 32,768 rows. "others": few and odd rows and columns, long and short sums. "odd": rows that
are no multiples of 16 bytes. "few": batches of a few rows, such as those of attention. "random": sides drawn by --seed, of which
columns and sums are multiples of 8. "tf32": both sides may round f32. Products of 8-bit floats give bf16, beside
torch._scaled_mm without its fast sums.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

import rlx
from benchmarks.cuda_measure import header
from rlx.backends.cuda.executable import Replay


class Shape(NamedTuple):
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    transposed: bool = False
    gelu: bool = False
    batch: int = 0  # matrices, if any

    def __str__(self) -> str:
        several = f"{self.batch} of " if self.batch else ""
        return f"{several}{self.m} x {self.n} x {self.k}{' t' * self.transposed}{' gelu' * self.gelu} {self.dtype}"


SHAPES = (
    Shape(8192, 8192, 8192), Shape(4096, 4096, 4096, transposed=True), Shape(2048, 2048, 2048), Shape(1024, 1024, 1024),
    Shape(512, 4096, 4096, transposed=True), Shape(512, 14336, 4096), Shape(512, 4096, 14336),
    Shape(512, 1024, 3072, transposed=True),
    Shape(16384, 384, 384, transposed=True), Shape(300, 1000, 520), Shape(2000, 2000, 2000), Shape(1001, 1005, 1003),
)  # fmt: skip
WITH_GELU = (
    Shape(4096, 4096, 1024, transposed=True, gelu=True), Shape(16384, 1536, 384, transposed=True, gelu=True),
    Shape(2048, 3072, 768, gelu=True), Shape(512, 14336, 4096, transposed=True, gelu=True),
)  # fmt: skip
OTHER_SINGLE = (
    (3000, 3000, 3000), (5000, 2000, 1000), (2048, 8192, 1024), (6000, 1000, 4000), (2500, 4000, 1200), (512, 14336, 4096),
)  # fmt: skip
SINGLE = (
    Shape(4096, 4096, 4096, "f32"), Shape(4096, 4096, 4096, "f32", transposed=True), Shape(1024, 1024, 1024, "f32"),
    Shape(2000, 2000, 2000, "f32"), Shape(1001, 1005, 1003, "f32"), Shape(300, 1000, 520, "f32", transposed=True),
    *(Shape(*dims, "f32", transposed=True) for dims in OTHER_SINGLE),
)  # fmt: skip
BY_ROWS = (
    (17, 4096, 4096), (48, 3072, 768), (48, 4096, 4096), (64, 11008, 4096), (96, 5120, 5120), (128, 3584, 18944),
    (128, 18944, 3584), (200, 2880, 2880), (200, 1152, 6912), (256, 5120, 13824), (256, 32000, 4096), (384, 8960, 1536),
    (384, 1536, 8960), (512, 512, 512), (512, 512, 11008), (640, 3072, 3072), (777, 768, 768), (1024, 3584, 3584),
    (1024, 50257, 768), (1536, 1536, 1536), (2048, 2048, 64), (2048, 11008, 4096), (3000, 1280, 1280), (3000, 1280, 5120),
    (4096, 4096, 100), (4097, 2560, 2560), (10000, 1152, 1152), (10000, 512, 512), (10000, 768, 3072),
)  # fmt: skip
BY_COLUMNS = (
    (64, 2560, 2560), (96, 13824, 5120), (128, 768, 3072), (128, 50257, 768), (256, 1280, 5120), (777, 2560, 6912),
    (1000, 1000, 257), (1024, 1152, 1152), (1536, 8960, 1536), (4096, 4096, 64), (4097, 1024, 4096),
)  # fmt: skip
OTHER_GELU = ((128, 3072, 768), (384, 5120, 1280), (1024, 3072, 768), (3000, 5120, 1280), (10000, 4304, 1152))
OTHERS = (
    *(Shape(*dims, transposed=True) for dims in BY_ROWS), *(Shape(*dims) for dims in BY_COLUMNS),
    *(Shape(*dims, transposed=True, gelu=True) for dims in OTHER_GELU), Shape(2048, 6912, 1152, gelu=True),
)  # fmt: skip
ROWS, WEIGHTS = (16, 128, 1024, 8192, 32768), ((384, 384), (1536, 384), (384, 1536), (768, 768), (3072, 768), (768, 3072))
ENCODERS = tuple(Shape(m, n, k, dtype, transposed=True) for dtype in ("bf16", "f32") for m in ROWS for n, k in WEIGHTS)
NARROW = tuple(
    Shape(m, n, k, dtype, transposed=True)
    for dtype in ("f8e4m3", "tf32")
    for m, n, k in ((8192, 8192, 8192), (4096, 4096, 4096), (2048, 2048, 2048), (512, 14336, 4096), (512, 4096, 14336))
)
ODD_BY_COLUMNS = (
    (4095, 4097, 4099), (4100, 4100, 4100), (2047, 2047, 2047), (1001, 1005, 1003), (1000, 2002, 3006), (512, 4097, 4099),
    (512, 3072, 772), (512, 512, 1025), (300, 600, 777), (256, 256, 4001), (197, 768, 197), (128, 1024, 2049), (100, 1000, 100),
    (64, 4001, 4001), (33, 5732, 1765),
)  # fmt: skip
ODD_BY_ROWS = ((1000, 2002, 3006), (512, 4099, 4097), (64, 4001, 4001), (64, 2048, 2049), (20, 4096, 4099))
ODD = (*(Shape(*dims) for dims in ODD_BY_COLUMNS), *(Shape(*dims, transposed=True) for dims in ODD_BY_ROWS))
FEW = tuple(
    Shape(m, n, k, transposed=transposed, batch=batch)
    for batch, n, k, transposed in (
        (128, 128, 1190, False), (128, 128, 1190, True), (256, 1024, 128, True), (256, 128, 1024, False), (1024, 777, 64, True),
        (1024, 64, 777, False), (32, 128, 4096, False), (16, 333, 128, True), (4000, 64, 32, True), (4000, 32, 64, False),
    )
    for m in (1, 4, 8, 12)
)  # fmt: skip
RANDOM = 24


def drawn(seed: int) -> tuple[Shape, ...]:
    """Random products of 2^30 to 2^37 multiply-adds."""
    rng, found = np.random.default_rng(seed), list[Shape]()
    while len(found) < RANDOM:
        m, n, k = (int(np.exp(rng.uniform(np.log(low), np.log(5000)))) for low in (64, 256, 128))
        s = Shape(m, n // 8 * 8, k // 8 * 8, transposed=bool(rng.integers(2)))
        found += [s] * (1 << 30 <= s.m * s.n * s.k <= 1 << 37)
    return tuple(found)


SETS = {
    "alone": SHAPES, "gelu": WITH_GELU, "f32": SINGLE, "encoders": ENCODERS, "narrow": NARROW, "others": OTHERS, "odd": ODD,
    "few": FEW,
}  # fmt: skip
TORCH = {"bf16": torch.bfloat16, "f32": torch.float32, "tf32": torch.float32, "f8e4m3": torch.float8_e4m3fn}
ERROR = {"f32": 1e-5, "tf32": 5e-4}  # others: of the bf16 result
RUNS_SECONDS = 2e-3  # of one replay, about
RATE = {"f8e4m3": 1e15, "bf16": 5e14, "tf32": 3e14, "f32": 4e13}  # expected, for the number of runs in a replay


class Problem:
    """Random operands on the GPU, and the result in float64."""

    def __init__(self, s: Shape) -> None:
        self.shape, dtype = s, TORCH[s.dtype]
        of_all = (s.batch,) * bool(s.batch)
        make = lambda *dims: torch.randn(*of_all, *dims, device="cuda").to(dtype)  # noqa: E731
        self.one = torch.ones((), device="cuda")
        self.x, self.stored, self.bias = make(s.m, s.k), make(s.n, s.k) if s.transposed else make(s.k, s.n), make(s.n)
        self.w = self.stored.mT if s.transposed else self.stored
        want = self.x.double() @ self.w.double()
        self.want = torch.nn.functional.gelu(want + self.bias.double(), approximate="tanh") if s.gelu else want
        self.runs = max(3, min(200, int(RUNS_SECONDS * RATE[s.dtype] / (2 * max(1, s.batch) * s.m * s.n * s.k))))

    def eager(self) -> torch.Tensor:
        if self.shape.dtype == "f8e4m3":
            return torch._scaled_mm(self.x, self.w, scale_a=self.one, scale_b=self.one, out_dtype=torch.bfloat16)
        if not self.shape.gelu:
            return torch.matmul(self.x, self.w)
        return torch.nn.functional.gelu(torch.addmm(self.bias, self.x, self.w), approximate="tanh")

    def check(self, name: str, got: torch.Tensor) -> None:
        error = float((got.double() - self.want).norm() / self.want.norm())
        if not error < ERROR.get(self.shape.dtype, 5e-3):
            raise SystemExit(f"{name} is wrong by {error} on {self.shape}")


def rlx_replay(p: Problem) -> Callable[[], None]:
    s, dtype = p.shape, rlx.as_dtype("f32" if p.shape.dtype == "tf32" else p.shape.dtype)
    g = rlx.Graph("product")
    x, w = g.input("x", tuple(p.x.shape), dtype), g.param("w", tuple(p.stored.shape), dtype)
    y = x @ (rlx.transpose(w, (0, 2, 1) if s.batch else (1, 0)) if s.transposed else w)
    y = y.astype("bf16") if dtype.bits == 8 else y
    g.set_outputs([rlx.gelu(y + g.input("bias", (s.n,), dtype), approximate="tanh") if s.gelu else y])
    precision = "tf32" if s.dtype == "tf32" else "f32"
    compiled = rlx.Session("cuda").compile(g, rlx.CompileOptions(precision=precision))
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.float32}[dtype.itemsize]  # numpy has no bf16
    given = {"x": p.x, "w": p.stored, **({"bias": p.bias} if s.gelu else {})}
    arrays = {name: t.view(bits).cpu().numpy().view(dtype.numpy) for name, t in given.items()}
    compiled.set_param("w", arrays.pop("w"))
    (got,) = compiled.run(arrays)
    p.check("rlx", torch.from_numpy(np.asarray(got, np.float32)).cuda())
    executable = compiled._executable
    many = Replay(executable, [*executable.run_launches()] * p.runs)
    return lambda: (many.run(), executable.gpu.wait())[0]


def torch_replay(p: Problem, call: Callable[[], torch.Tensor], name: str) -> Callable[[], None]:
    with torch.cuda.stream(torch.cuda.Stream()):
        p.check(name, call())
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(p.runs):
            call()
    return lambda: (graph.replay(), torch.cuda.synchronize())[0]


def measure(s: Shape, rounds: int, compile_mode: str) -> dict[str, float]:
    """Least seconds of one run, by side."""
    torch.backends.cuda.matmul.allow_tf32 = s.dtype == "tf32"
    p = Problem(s)
    calls = {"rlx": rlx_replay(p), "cuBLAS": torch_replay(p, p.eager, "torch")}
    if compile_mode != "none":
        mode = None if compile_mode == "default" else "max-autotune-no-cudagraphs"
        calls["torch.compile"] = torch_replay(p, torch.compile(p.eager, mode=mode), "torch.compile")
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = time.perf_counter()
            call()
            best[name] = min(best[name], (time.perf_counter() - start) / p.runs)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", choices=("default", "max-autotune", "none"), default="default")
    parser.add_argument("--only", nargs="+", choices=(*SETS, "random"), default=list(SETS))
    parser.add_argument("--seed", type=int, default=0, help="of random sides")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{header()}\n")
    print("| m x n x k | rlx, µs | TFLOP/s | cuBLAS, µs | torch.compile, µs | cuBLAS / rlx | torch.compile / rlx |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for s in (s for name in args.only for s in (drawn(args.seed) if name == "random" else SETS[name])):
        found = measure(s, args.rounds, args.compile if s.gelu else "none")
        own, cublas, compiled = found["rlx"], found["cuBLAS"], found.get("torch.compile")
        rate = 2 * max(1, s.batch) * s.m * s.n * s.k / own / 1e12
        more = (f"{compiled * 1e6:.1f}", f"{compiled / own:.2f}") if compiled else ("", "")
        cells = (s, f"{own * 1e6:.1f}", f"{rate:.0f}", f"{cublas * 1e6:.1f}", more[0], f"{cublas / own:.2f}", more[1])
        print("|", *(f"{cell} |" for cell in cells), flush=True)


if __name__ == "__main__":
    main()
