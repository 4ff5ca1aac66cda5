"""Attention on one GPU beside torch's scaled_dot_product_attention with the fastest of its backends.

    python benchmarks/cuda_attention.py [--only WORD ...]

Times are medians of replays of CUDA graphs, alternating. Rates count every pair of a query and a key, half of them with a causal
mask. The result of one head is compared with f64 first.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks.cuda_measure import header, interleaved, replay

ALLOWED = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}  # of the norm of the f64 result


@dataclass(frozen=True)
class Case:
    """`queries`: other than `length`, the number of keys; 0: as many. `window`: of keys that a query sees, itself among them."""

    batch: int
    heads: int
    shared: int
    length: int
    size: int
    dtype: str = "bf16"
    causal: bool = False
    queries: int = 0
    window: int = 0

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.shared}" if self.heads != self.shared else f"{self.heads}"
        rows = f"{self.queries} of " * (self.queries > 0) + f"{self.length}"
        mask = f" window {self.window}" if self.window else " causal" * self.causal
        return f"{self.batch}x{heads} {rows} d {self.size} {self.dtype}{mask}"

    @property
    def rows(self) -> int:
        return self.queries or self.length

    @property
    def flops(self) -> float:
        pairs = self.rows * self.length * (0.5 if self.causal else 1)
        if self.window:
            pairs = self.window * self.length - self.window**2 / 2
        return 4 * self.batch * self.heads * pairs * self.size

    @property
    def dims(self) -> dict[str, tuple[int, int, int, int]]:
        heads = {"q": (self.heads, self.rows), "k": (self.shared, self.length), "v": (self.shared, self.length)}
        return {n: (self.batch, *of, self.size) for n, of in heads.items()}


PREFILL = tuple(Case(1, 32, 8, n, 128, causal=True) for n in (512, 1024, 2048, 4096, 8192))
SHAPES = ((4, 16, 16, 4096, 128), (4, 32, 8, 2048, 64), (4, 16, 16, 2048, 96), (2, 16, 16, 2048, 256), (8, 12, 12, 512, 64))
SMALL = (
    (32, 12, 12, 128, 64), (32, 12, 12, 128, 32), (64, 12, 12, 197, 64), (1, 12, 12, 197, 64), (16, 16, 16, 577, 64),
    (1, 16, 16, 577, 64), (2, 10, 10, 4096, 64), (2, 8, 8, 4096, 40), (1, 24, 24, 4608, 128),
)  # fmt: skip
CAUSAL = (
    (4, 32, 8, 2048, 128), (64, 12, 12, 77, 64), (8, 32, 32, 1024, 64), (1, 32, 32, 2048, 96), (1, 8, 4, 2048, 256),
    (16, 32, 8, 300, 128),
)  # fmt: skip
WINDOWS = (Case(1, 32, 8, 8192, 128, window=4096), Case(1, 8, 4, 4096, 256, window=1024))
ROWS = (
    Case(2, 10, 10, 77, 64, queries=4096), Case(1, 32, 8, 8192, 128, queries=4), Case(1, 32, 8, 8192, 128, queries=16),
    Case(1, 32, 8, 8192, 128, queries=64), Case(1, 32, 8, 8192, 128, queries=100), Case(1, 32, 8, 8192, 128, queries=256),
    Case(1, 32, 8, 32768, 128, queries=16), Case(1, 32, 8, 2048, 128, queries=64), Case(16, 32, 8, 4096, 128, queries=16),
    Case(4, 16, 2, 4096, 128, queries=64), Case(1, 16, 16, 4096, 64, queries=16),
    Case(4, 32, 8, 4096, 128, queries=8), Case(1, 8, 4, 4096, 256, queries=32),
    Case(1, 32, 8, 4096, 128, queries=1), Case(1, 32, 8, 32768, 128, queries=1), Case(16, 32, 8, 4096, 128, queries=1),
    Case(64, 32, 8, 2048, 128, queries=1), Case(64, 32, 32, 1024, 64, queries=1),
)  # fmt: skip
SINGLE = (
    (256, 12, 12, 128, 64), (8, 12, 12, 128, 64), (64, 12, 12, 197, 64), (8, 12, 12, 512, 64), (1, 16, 16, 4096, 64),
    (64, 12, 12, 128, 32), (4, 8, 8, 1024, 80), (16, 16, 16, 512, 96), (2, 16, 16, 2048, 128), (1, 8, 8, 2048, 256),
)  # fmt: skip
SINGLE_CAUSAL = (
    (4, 12, 12, 1024, 64), (4, 32, 8, 512, 64), (16, 8, 8, 77, 64), (8, 8, 8, 1024, 128), (1, 32, 8, 2048, 128),
    (1, 8, 4, 2048, 256),
)  # fmt: skip
CASES = (
    *PREFILL, *(Case(*shape, causal=causal) for shape in SHAPES for causal in (False, True)), *(Case(*shape) for shape in SMALL),
    *(Case(*shape, causal=True) for shape in CAUSAL), Case(4, 16, 16, 2048, 128, "f16"), Case(4, 16, 16, 2048, 128, "f16", True),
    *WINDOWS, *ROWS,
    *(Case(*shape, "f32") for shape in SINGLE), *(Case(*shape, "f32", True) for shape in SINGLE_CAUSAL),
)  # fmt: skip


def torch_calls(case: Case, q: Any, k: Any, v: Any) -> dict[str, Callable[[], object]]:
    """torch's backends that take the case, each as a CUDA graph. The keys of a window are a mask of pairs there."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    calls: dict[str, Callable[[], object]] = {}
    mask = None
    if case.window:
        pairs = torch.ones(case.length, case.length, dtype=torch.bool, device="cuda")
        mask = pairs.tril() & ~pairs.tril(-case.window)
    for name, backend in (("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION"), ("memory", "EFFICIENT_ATTENTION")):
        grouped = case.heads != case.shared and name != "memory"
        repeats = 1 if grouped else case.heads // case.shared
        keys, values = (x if repeats == 1 else x.repeat_interleave(repeats, 1) for x in (k, v))
        call = partial(
            torch.nn.functional.scaled_dot_product_attention, q, keys, values, mask, is_causal=case.causal, enable_gqa=grouped
        )
        try:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                call()
                torch.cuda.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    call()
        except RuntimeError:  # the backend has no kernel for this
            continue
        calls[name] = lambda graph=graph, call=call: graph.replay()  # keeps what the graph reads
    return calls


def exact(case: Case, q: Any, k: Any, v: Any) -> Any:
    """The last head of the last batch in f64."""
    q, k, v = (x[-1, -1].double() for x in (q, k, v))
    scores = q @ k.T * case.size**-0.5
    if case.causal or case.window:
        scores.masked_fill_(scores.new_ones(scores.shape).triu(1).bool(), float("-inf"))
    if case.window:
        scores.masked_fill_(scores.new_ones(scores.shape).tril(-case.window).bool(), float("-inf"))
    return scores.softmax(-1) @ v


def tensors_of(case: Case) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[case.dtype]
    return {n: torch.randn(dims, device="cuda", dtype=kind) for n, dims in case.dims.items()}


def compiled_of(case: Case) -> Any:
    g = rlx.Graph("attention")
    inputs = [g.input(n, dims, case.dtype) for n, dims in case.dims.items()]
    mask = "sliding_window" if case.window else "causal" if case.causal else "none"
    g.set_outputs([rlx.attention(*inputs, mask=mask, window=case.window)])
    return rlx.Session("cuda").compile(g)


def check(case: Case, compiled: Any, tensors: dict[str, Any]) -> None:
    import torch

    compiled.run_slots([*tensors.values()])
    found = torch.from_dlpack(compiled.outputs_view()[0])[-1, -1].double()
    want = exact(case, *tensors.values())
    if not (found - want).norm() <= ALLOWED[case.dtype] * want.norm():
        raise SystemExit(f"{case}: the result differs by {(found - want).abs().max()}")


def run(case: Case) -> str:
    tensors, compiled = tensors_of(case), compiled_of(case)
    check(case, compiled, tensors)
    times = interleaved({"rlx": replay(compiled), **torch_calls(case, *tensors.values())})
    mine = times.pop("rlx")
    best = min(times, key=lambda n: times[n])
    rates = f"{mine * 1e6:9.1f} {case.flops / mine / 1e12:8.0f} {times[best] * 1e6:9.1f} {case.flops / times[best] / 1e12:8.0f}"
    return f"{case!s:38} {rates}  {best:7} {times[best] / mine:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention on one GPU beside torch")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose line has one of the words")
    only = parser.parse_args().only
    print(header())
    print(f"{'heads, length, head size':38} {'rlx us':>9} {'TFLOP/s':>8} {'torch us':>9} {'TFLOP/s':>8}  {'backend':7} ratio")
    for case in CASES:
        if not only or any(word in str(case) for word in only):
            print(run(case), flush=True)


if __name__ == "__main__":
    main()
