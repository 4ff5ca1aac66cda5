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
    batch: int
    heads: int
    shared: int
    length: int
    size: int
    dtype: str = "bf16"
    causal: bool = False

    def __str__(self) -> str:
        heads = f"{self.heads}/{self.shared}" if self.heads != self.shared else f"{self.heads}"
        return f"{self.batch}x{heads} {self.length} d {self.size} {self.dtype}{' causal' * self.causal}"

    @property
    def flops(self) -> float:
        return 4 * self.batch * self.heads * self.length**2 * self.size * (0.5 if self.causal else 1)


SHAPES = ((4, 16, 16, 4096, 128), (4, 32, 8, 2048, 64), (4, 16, 16, 2048, 96), (2, 16, 16, 2048, 256), (8, 12, 12, 512, 64))
SMALL = ((32, 12, 12, 128, 64), (32, 12, 12, 128, 32))
SINGLE = (
    (256, 12, 12, 128, 64), (8, 12, 12, 128, 64), (64, 12, 12, 197, 64), (8, 12, 12, 512, 64), (1, 16, 16, 4096, 64),
    (64, 12, 12, 128, 32), (4, 8, 8, 1024, 80), (16, 16, 16, 512, 96), (2, 16, 16, 2048, 128), (1, 8, 8, 2048, 256),
)  # fmt: skip
SINGLE_CAUSAL = ((4, 12, 12, 1024, 64), (4, 32, 8, 512, 64), (16, 8, 8, 77, 64), (8, 8, 8, 1024, 128))
CASES = (
    *(Case(*shape, causal=causal) for shape in SHAPES for causal in (False, True)), *(Case(*shape) for shape in SMALL),
    *(Case(*shape, "f32") for shape in SINGLE), *(Case(*shape, "f32", True) for shape in SINGLE_CAUSAL),
)  # fmt: skip


def torch_calls(case: Case, q: Any, k: Any, v: Any) -> dict[str, Callable[[], object]]:
    """torch's backends that take the case, each as a CUDA graph."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    calls: dict[str, Callable[[], object]] = {}
    for name, backend in (("cudnn", "CUDNN_ATTENTION"), ("flash", "FLASH_ATTENTION"), ("memory", "EFFICIENT_ATTENTION")):
        grouped = case.heads != case.shared and name != "memory"
        keys, values = (k, v) if grouped else (x.repeat_interleave(case.heads // case.shared, 1) for x in (k, v))
        call = partial(
            torch.nn.functional.scaled_dot_product_attention, q, keys, values, is_causal=case.causal, enable_gqa=grouped
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
        calls[name] = graph.replay
    return calls


def exact(case: Case, q: Any, k: Any, v: Any) -> Any:
    """The last head of the last batch in f64."""
    q, k, v = (x[-1, -1].double() for x in (q, k, v))
    scores = q @ k.T * case.size**-0.5
    if case.causal:
        scores += scores.new_full((case.length, case.length), float("-inf")).triu(1)
    return scores.softmax(-1) @ v


def run(case: Case) -> str:
    import torch

    torch.manual_seed(0)
    kind = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[case.dtype]
    tensors = {
        n: torch.randn(case.batch, h, case.length, case.size, device="cuda").to(kind)
        for n, h in (("q", case.heads), ("k", case.shared), ("v", case.shared))
    }
    g = rlx.Graph("attention")
    inputs = [g.input(n, tuple(x.shape), case.dtype) for n, x in tensors.items()]
    g.set_outputs([rlx.attention(*inputs, mask="causal" if case.causal else "none")])
    compiled = rlx.Session("cuda").compile(g)
    numpy = rlx.as_dtype(case.dtype).numpy
    (found,) = compiled.run({n: x.float().cpu().numpy().astype(numpy) for n, x in tensors.items()})
    want = exact(case, *tensors.values()).cpu().numpy()
    error = abs(found[-1, -1].astype("f8") - want)
    if not (error**2).sum() ** 0.5 <= ALLOWED[case.dtype] * (want**2).sum() ** 0.5:
        raise SystemExit(f"{case}: the result differs by {error.max()}")
    times = interleaved({"rlx": replay(compiled), **torch_calls(case, *tensors.values())})
    mine = times.pop("rlx")
    best = min(times, key=lambda n: times[n])
    rates = f"{mine * 1e6:9.1f} {case.flops / mine / 1e12:8.0f} {times[best] * 1e6:9.1f} {case.flops / times[best] / 1e12:8.0f}"
    return f"{case!s:32} {rates}  {best:7} {times[best] / mine:5.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Attention on one GPU beside torch")
    parser.add_argument("--only", nargs="*", default=[], metavar="WORD", help="cases whose line has one of the words")
    only = parser.parse_args().only
    print(header())
    print(f"{'heads, length, head size':32} {'rlx us':>9} {'TFLOP/s':>8} {'torch us':>9} {'TFLOP/s':>8}  {'backend':7} ratio")
    for case in CASES:
        if not only or any(word in str(case) for word in only):
            print(run(case), flush=True)


if __name__ == "__main__":
    main()
