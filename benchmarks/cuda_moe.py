"""Layers of experts on an NVIDIA GPU: rlx beside torch's grouped products.

    python benchmarks/cuda_moe.py [--tokens 1 16 128 1024 4096] [--weights bf16 q4_k] [--shape 64,8,2048,1024] [--kernels]

A layer: scores in f32, softmax, the best k experts with weights that sum to 1, gate and up, silu, down, the weighted sum, added
to x. A run has as many layers as asked, each with weights of its own, so that no expert is in the L2 cache from the run before.
rlx and "graph" are CUDA graphs that are replayed; "eager" is the same torch code (torch._grouped_mm, bf16), call by call. "floor"
is the longer one of reading the experts in use at the rate of torch.sum over 1 GiB, and of their products at that of a bf16
product of 8192 x 8192 x 8192; with quantised weights, torch has no peer. Results are compared with f32 arithmetic on the same
weights.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch
import torch.nn.functional as F

import rlx
from benchmarks.cuda_measure import header, interleaved, print_kernels, replay
from rlx.ir.blocks import FORMATS
from rlx.ir.ops.quant import random_weights

ERROR, OTHERS = 4e-2, 0.25  # of the norm of what the layers add; tokens that go to another expert since x is rounded elsewhere
Weights = Mapping[str, torch.Tensor]


class Shape(NamedTuple):
    experts: int = 64
    k: int = 8
    width: int = 2048
    inner: int = 1024

    def __str__(self) -> str:
        return f"{self.experts} experts, top {self.k}, {self.width} x {self.inner}"

    @property
    def products(self) -> int:
        """Multiply-adds of one expert for a token."""
        return 3 * self.width * self.inner


def network(s: Shape, tokens: int, form: str, layers: int) -> rlx.Graph:
    g = rlx.Graph("experts")
    x = g.input("x", (tokens, s.width), "bf16")
    blocks = "" if form == "bf16" else form
    for n in range(layers):
        gate = g.param(f"{n}.gate", (s.experts, s.width), "f32")
        up, down = (weights(g, f"{n}.{name}", s.experts, *dims, form) for name, dims in parts(s).items())
        ids, by = rlx.route(x.astype("f32") @ gate.T, k=s.k, renormalise=True)
        order, place, ends = rlx.group_rows(ids.reshape((tokens * s.k,)), groups=s.experts)
        hidden = rlx.segment_matmul(rlx.gather(x, order // s.k), up, ends, format=blocks)
        hidden = rlx.silu(hidden[:, : s.inner]) * hidden[:, s.inner :]
        made = rlx.gather(rlx.segment_matmul(hidden, down, ends, format=blocks), place.reshape((tokens, s.k)))
        x = x + rlx.sum(made.astype("f32") * by.reshape((tokens, s.k, 1)), axis=1).astype("bf16")
    g.set_outputs([x])
    return g


def parts(s: Shape) -> dict[str, tuple[int, int]]:
    return {"up": (2 * s.inner, s.width), "down": (s.width, s.inner)}


def weights(g: rlx.Graph, name: str, experts: int, n: int, k: int, form: str) -> rlx.Value:
    if form == "bf16":
        return g.param(name, (experts, n, k), "bf16").transpose(0, 2, 1)
    return g.param(name, (experts, n, FORMATS[form].row_bytes(k)), "u8")


def random(s: Shape, form: str, layers: int) -> tuple[dict[str, torch.Tensor | np.ndarray], dict[str, torch.Tensor]]:
    """Params for rlx, and their values on the GPU."""
    given, values = {}, {}
    rng = np.random.default_rng(0)
    for layer in range(layers):
        values[f"{layer}.gate"] = given[f"{layer}.gate"] = torch.randn(s.experts, s.width, device="cuda")
        for part, (n, k) in parts(s).items():
            name, dims = f"{layer}.{part}", (s.experts, n, k)
            if form == "bf16":
                values[name] = given[name] = (torch.randn(dims, device="cuda") * k**-0.5).bfloat16()
                continue
            f = FORMATS[form]
            given[name] = np.zeros((s.experts, n, f.row_bytes(k)), np.uint8)
            one = np.zeros((1, n, f.row_bytes(k)), np.uint8)
            random_weights(f)(rng, [one, one])
            given[name][:] = one
            values[name] = torch.from_numpy(f.decode_rows(one, k).astype(np.float32)).cuda().expand(dims)
    return given, values


def chosen(x: torch.Tensor, gate: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    found, ids = torch.topk(torch.softmax(x.float() @ gate.T, -1), k)
    return ids, found / found.sum(-1, keepdim=True)


def torch_layers(s: Shape, w: Weights, layers: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        groups = torch.arange(s.experts, device="cuda", dtype=torch.int32)
        for n in range(layers):
            ids, by = chosen(x, w[f"{n}.gate"], s.k)
            of, order = torch.sort(ids.flatten().int())
            ends = torch.searchsorted(of, groups, right=True).int()
            hidden = torch._grouped_mm(x[order // s.k], w[f"{n}.up"].transpose(1, 2), offs=ends)
            hidden = F.silu(hidden[:, : s.inner]) * hidden[:, s.inner :]
            made = torch._grouped_mm(hidden, w[f"{n}.down"].transpose(1, 2), offs=ends)
            back = torch.empty_like(made).index_copy_(0, order, made).view(len(x), s.k, s.width)
            x = x + (back.float() * by[..., None]).sum(1).bfloat16()
        return x

    return run


def expected(s: Shape, x: torch.Tensor, w: Weights, layers: int) -> tuple[torch.Tensor, list[int]]:
    """The result in f32, rounded where rlx rounds x, and the number of experts in use of each layer."""
    counts = []
    for n in range(layers):
        ids, by = chosen(x, w[f"{n}.gate"], s.k)
        used, made = ids.unique().tolist(), torch.zeros(len(x), s.width, device="cuda")
        for e in used:
            token, at = (ids == e).nonzero(as_tuple=True)
            hidden = x[token].float() @ w[f"{n}.up"][e].float().T
            hidden = (F.silu(hidden[:, : s.inner]) * hidden[:, s.inner :]).bfloat16().float()
            made.index_add_(0, token, hidden @ w[f"{n}.down"][e].float().T * by[token, at][:, None])
        x = x + made.bfloat16()
        counts.append(len(used))
    return x, counts


def recorded(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(2):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = run()
    return lambda: (graph.replay(), kept)


def rates() -> tuple[float, float]:
    """Bytes read and multiply-adds a second, at most."""
    big, square = torch.ones(1 << 28, device="cuda"), torch.randn(8192, 8192, device="cuda").bfloat16()
    found = interleaved({"read": big.sum, "product": lambda: square @ square})
    return 4 * big.numel() / found["read"], 8192**3 / found["product"]


def measure(s: Shape, form: str, tokens: list[int], layers: int, kernels: bool, fastest: tuple[float, float]) -> None:
    given, values = random(s, form, layers)
    bytes_each = sum(n * (2 * k if form == "bf16" else FORMATS[form].row_bytes(k)) for n, k in parts(s).values())
    for count in tokens:
        x = torch.randn(count, s.width, device="cuda").bfloat16()
        want, used = expected(s, x, values, layers)
        compiled = rlx.Session("cuda").compile(network(s, count, form, layers))
        for name, value in given.items():
            compiled.set_param(name, value)
        bits = compiled.run({"x": x.view(torch.int16).cpu().numpy().view(rlx.as_dtype("bf16").numpy)})[0]
        check("rlx", torch.from_numpy(np.asarray(bits, np.float32)).cuda(), want, x)
        calls: dict[str, Callable[[], object]] = {"rlx": replay(compiled)}
        if form == "bf16":
            run = torch_layers(s, values, layers)
            check("torch", run(x), want, x)
            calls |= {"graph": recorded(lambda run=run, x=x: run(x)), "eager": lambda run=run, x=x: run(x)}
        found = {name: t / layers for name, t in interleaved(calls).items()}
        floor = max(sum(used) / layers * bytes_each / fastest[0], count * s.k * s.products / fastest[1])
        shares = "  ".join(f"{name} {t * 1e6:7.1f} us ({t / found['rlx']:5.2f})" for name, t in found.items() if name != "rlx")
        ours = f"rlx {found['rlx'] * 1e6:7.1f} us, {floor / found['rlx']:4.0%} of the floor"
        print(f"{form:5} {count:5} tokens, {sum(used) / layers:5.1f} experts  {ours}  {shares}", flush=True)
        if kernels:
            print_kernels(compiled)


def check(name: str, got: torch.Tensor, want: torch.Tensor, x: torch.Tensor) -> None:
    error = (got.float() - want.float()).norm(dim=1) / (want.float() - x.float()).norm(dim=1)
    if not float((~(error < ERROR)).float().mean()) <= OTHERS:
        raise SystemExit(f"{name} is wrong: {error.sort().values.tolist()[-8:]} of the norm of what is added")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[1, 16, 128, 1024, 4096])
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=["bf16", *FORMATS])
    parser.add_argument("--shape", type=lambda text: Shape(*map(int, text.split(","))), default=Shape())
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kernels", action="store_true", help="the time of each kernel")
    asked = parser.parse_args()
    where, fastest = header(), rates()
    print(f"{where}; read {fastest[0] / 1e12:.2f} TB/s, products {2 * fastest[1] / 1e12:.0f} TFLOP/s; {asked.shape}", flush=True)
    for form in asked.weights:
        measure(asked.shape, form, asked.tokens, asked.layers, asked.kernels, fastest)


if __name__ == "__main__":
    main()
