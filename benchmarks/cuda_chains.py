"""Elementwise chains, reductions and data movement on one GPU against its copy bandwidth and torch.

    python benchmarks/cuda_chains.py [--shapes 4096x4096 65536x1024 13107x5120 1334x50304 1000x100003] [--only WORD ...]
        [--torch] [--kernels]

Each row: bytes read and written once over the time of a replay, as percent of the rate at which the driver copies as many bytes
(read and written) in the same rounds. Results are compared with torch in f64 first. With --torch, torch.compile's CUDA graph too
(its compile time is long). Sorts are not bound by memory: their time is given, beside torch's.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks.cuda_measure import header, interleaved, kernel_times, replay

MANY = 32  # operands of a concat
SORTS = ("sort", "top 50")
SLACK = {"f32": 2e-5, "bf16": 1e-2}


@dataclass(frozen=True)
class Case:
    """`ours` of rlx values, `theirs(torch, *tensors)`; `dims` of each operand. `below`: the last operand is i64,
    random numbers from 0 to it, or all of them in a random order (`distinct`)."""

    name: str
    ours: Callable[..., Any]
    theirs: Callable[..., Any]
    dims: tuple[tuple[int, ...], ...]
    below: int = 0
    distinct: bool = False

    def operands(self, torch: Any, dtype: str) -> list[Any]:
        kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        held = [torch.randn(d, device="cuda", dtype=kind) for d in self.dims]
        if self.below:
            some = math.prod(self.dims[-1])
            held[-1] = torch.randperm(self.below)[:some].cuda() if self.distinct else torch.randint(self.below, (some,)).cuda()
        return held


def cases(rows: int, cols: int) -> Iterator[Case]:
    full, row = (rows, cols), (cols,)
    yield Case("add", lambda x, y: x + y, lambda t, x, y: x + y, (full, full))
    yield Case("relu(x*y+z)", lambda x, y, z: rlx.relu(x * y + z), lambda t, x, y, z: t.relu(x * y + z), (full,) * 3)
    yield Case("gelu", rlx.gelu, lambda t, x: t.nn.functional.gelu(x), (full,))
    yield Case("x*row+row", lambda x, a, b: x * a + b, lambda t, x, a, b: x * a + b, (full, row, row))
    yield Case("softmax", rlx.softmax, lambda t, x: t.softmax(x, -1), (full,))
    yield Case("layer_norm", rlx.layer_norm, lambda t, x, a, b: t.nn.functional.layer_norm(x, row, a, b), (full, row, row))
    yield Case("rms_norm", rlx.rms_norm, lambda t, x, a: t.nn.functional.rms_norm(x, row, a, 1e-6), (full, row))
    yield Case("log_softmax", rlx.log_softmax, lambda t, x: t.log_softmax(x, -1), (full,))
    yield Case("norm of a sum", lambda x, y, a, b: rlx.layer_norm(x + y, a, b),
               lambda t, x, y, a, b: t.nn.functional.layer_norm(x + y, row, a, b), (full, full, row, row))  # fmt: skip
    yield Case("sum rows", lambda x: rlx.sum(x, axis=(1,)), lambda t, x: x.sum(1), (full,))
    yield Case("sum columns", lambda x: rlx.sum(x, axis=(0,)), lambda t, x: x.sum(0), (full,))
    yield Case("sum all", rlx.sum, lambda t, x: x.sum(), (full,))
    yield Case("max columns", lambda x: rlx.max(x, axis=(0,)), lambda t, x: x.amax(0), (full,))
    yield Case("argmax", lambda x: rlx.argmax(x, axis=1), lambda t, x: x.argmax(1), (full,))
    yield Case("cumsum rows", lambda x: rlx.cumsum(x, axis=1), lambda t, x: x.cumsum(1), (full,))
    yield Case("cumsum columns", lambda x: rlx.cumsum(x, axis=0), lambda t, x: x.cumsum(0), (full,))
    yield Case("softmax columns", lambda x: rlx.softmax(x, axis=0), lambda t, x: t.softmax(x, 0), (full,))
    yield Case("transpose", lambda x: rlx.copy(x.T), lambda t, x: x.T.contiguous(), (full,))
    yield Case("where", lambda x, y, z: rlx.where(x > y, y, z), lambda t, x, y, z: t.where(x > y, y, z), (full,) * 3)
    yield Case("concat rows", lambda x, y: rlx.concat([x, y], axis=0), lambda t, x, y: t.cat([x, y], 0), (full, full))
    yield Case("concat columns", lambda x, y: rlx.concat([x, y], axis=1), lambda t, x, y: t.cat([x, y], 1), (full, full))
    tall, wide = [(max(1, rows // MANY), cols)] * MANY, [(rows, max(1, cols // MANY))] * MANY
    yield Case(f"concat rows of {MANY}", lambda *x: rlx.concat(x, axis=0), lambda t, *x: t.cat(x, 0), (*tall,))
    yield Case(f"concat columns of {MANY}", lambda *x: rlx.concat(x, axis=1), lambda t, *x: t.cat(x, 1), (*wide,))
    moved = partial(Case, below=rows, distinct=True)
    yield moved("take rows", lambda x, i: rlx.gather(x, i, axis=0), lambda t, x, i: x[i], (full, (rows,)))
    yield moved("add to rows", lambda x, u, i: rlx.scatter_add(x, i, u), lambda t, x, u, i: x.index_add(0, i, u),
                (full, (rows // 2, cols), (rows // 2,)))  # fmt: skip
    drawn = lambda key: rlx.random_uniform(key[1:].astype("u32"), key[0].astype("u32"), dims=full)  # noqa: E731
    yield Case("random", lambda x, key: x + drawn(key).astype(x.dtype), _no_peer, (full, (3,)), below=1 << 20)
    yield Case("sort", lambda x: rlx.sort(x)[0], lambda t, x: t.sort(x, 1)[0], (full,))
    yield Case("top 50", lambda x: rlx.top_k(x, k=50)[0], lambda t, x: t.topk(x, 50)[0], (full,))
    yield Case("x+y.T", lambda x, y: x + y.T, lambda t, x, y: x + y.T, (full, full[::-1]))


def _no_peer(torch: Any, *operands: Any) -> None:
    """torch has other random numbers."""


def host(x: Any, dtype: str) -> np.ndarray:
    """A tensor as a numpy array of the dtype."""
    import torch

    return x.cpu().view(torch.int16).numpy().view(rlx.as_dtype(dtype).numpy) if x.dtype == torch.bfloat16 else x.cpu().numpy()


def measured(case: Case, dtype: str, with_torch: bool, kernels: bool) -> str:
    import torch

    g = rlx.Graph("case")
    is_param = lambda d: len(d) == 1 and not case.below  # noqa: E731
    kind = lambda n: "i64" if case.below and n == len(case.dims) - 1 else dtype  # noqa: E731
    leaf = lambda n, d: (g.param if is_param(d) else g.input)(f"x{n}", d, kind(n))  # noqa: E731
    g.set_outputs([case.ours(*(leaf(n, d) for n, d in enumerate(case.dims)))])
    compiled = rlx.Session("cuda").compile(g)
    torch.manual_seed(0)
    held = case.operands(torch, dtype)
    for n, x in enumerate(held):
        if is_param(x.shape):
            compiled.set_param(f"x{n}", host(x, dtype))
    compiled.run_slots([host(x, dtype) for x in held if not is_param(x.shape)])
    result = compiled.outputs_view()[0].numpy()
    note = ""
    if case.theirs is not _no_peer:
        wanted = case.theirs(torch, *(x.double() if x.is_floating_point() else x for x in held)).double()
        off = torch.from_numpy(result.astype(np.float32)).cuda() - wanted
        off = float(off.abs().max() / max(1.0, float(wanted.abs().max())))
        note = "" if off < (SLACK[dtype] if case.name != "argmax" else 1e-9) else f"  WRONG BY {off:.1e}"
    nbytes = sum(x.nbytes for x in held) + result.nbytes
    a, b = (torch.empty(nbytes // 2, dtype=torch.uint8, device="cuda") for _ in range(2))
    calls: dict[str, Callable[[], object]] = {"rlx": replay(compiled), "copy": lambda: b.copy_(a)}
    if case.name in SORTS:
        calls["torch"] = lambda: case.theirs(torch, *held)
    if with_torch and case.theirs is not _no_peer:
        torch._dynamo.reset()  # else it gives up after eight cases
        run = torch.compile(lambda *xs: case.theirs(torch, *xs), dynamic=False)
        run(*held)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = run(*held)
        calls["torch.compile"] = lambda kept=kept: graph.replay()
    times = interleaved(calls)
    text = f"{case.name:16} {dtype:5} {nbytes / times['rlx'] / 1e9:7.0f} GB/s {100 * times['copy'] / times['rlx']:4.0f}%"
    if case.name in SORTS:
        text = f"{case.name:16} {dtype:5} {times['rlx'] * 1e6:7.0f} us, torch {times['torch'] * 1e6:.0f} us"
    if "torch.compile" in times:
        text += f"  torch.compile {100 * times['copy'] / times['torch.compile']:4.0f}%"
    lines = [f"    {us:8.1f} us {count} x {ops}" for ops, count, us, *_ in kernel_times(compiled)] if kernels else []
    return "\n".join([text + note, *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words of case names")
    parser.add_argument("--shapes", nargs="+", default=["4096x4096", "65536x1024", "13107x5120", "1334x50304", "1000x100003"])
    parser.add_argument("--dtypes", nargs="+", default=["f32", "bf16"])
    parser.add_argument("--torch", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    args = parser.parse_args()
    print(header())
    for shape in args.shapes:
        print(shape)
        for case in cases(*map(int, shape.split("x"))):
            if args.only and not any(word in case.name for word in args.only):
                continue
            for dtype in args.dtypes:
                try:
                    print(measured(case, dtype, args.torch, args.kernels), flush=True)
                except rlx.RlxError as e:
                    print(f"{case.name} {dtype}: {type(e).__name__}: {str(e)[:300]}", flush=True)


if __name__ == "__main__":
    main()
