"""Decoding one token at a time on one GPU, random weights: rlx, and where asked torch.compile beside it.

    python benchmarks/cuda_decode.py [--shape 0.6b 1b 8b] [--weights bf16 q8_0 q4_k] [--batch 1 8 32] [--context 128 4096]
        [--engines launches torch.compile eager] [--tokens 64] [--layers N] [--kernels]

The likeliest token is fed back on the device. `replay` is the graph of a token alone; `wall` is a token as Python sees it, which
reads every token, once the next one is queued (as `rlx generate` does); torch's wall is the same, with events. TB/s counts the
weights that a token needs, and the share is of the rate at which `torch.sum` reads 4 GB in this run; `cache` is the rate with the
keys and values. `off`: by how many standard deviations of the logits the token that rlx chose first is behind the best one of a
network in f32 with the same weights (torch); 0 where they choose the same.
torch multiplies bf16 weights, also beside packed ones of rlx. `launches` is rlx with a launch for each product, instead of one
for all layers (a chain).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks.cuda_decode_torch import Decoder
from benchmarks.cuda_measure import header, kernel_times, wait_all
from benchmarks.qwen_shape import CONFIG
from rlx.backends.cuda import code
from rlx.frontends.models.decoder import DecoderConfig, build
from rlx.frontends.models.families import config_of
from rlx.ir.blocks import FORMATS
from rlx.ir.ops.quant import random_weights

LLAMA = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
}  # fmt: skip
WIDE = {"hidden_size": 4096, "num_hidden_layers": 32, "head_dim": 128, "intermediate_size": 14336, "tie_word_embeddings": False}
SHAPES = {"0.6b": CONFIG, "1b": LLAMA, "8b": LLAMA | WIDE}
POOL = 256  # distinct rows of a packed matrix, made on the host
LIMIT = 0.2  # of `off`


@dataclass
class Weights:
    """Arrays on the device by param; `plain` gives a matrix as torch multiplies it."""

    arrays: dict[str, torch.Tensor]
    form: str
    pools: dict[str, tuple[torch.Tensor, torch.Tensor]]  # the rows of a packed matrix: decoded ones, and which

    def plain(self, name: str) -> torch.Tensor:
        if name not in self.pools:
            return self.arrays[name]
        decoded, rows = self.pools[name]
        return decoded[rows]

    @property
    def nbytes(self) -> int:
        """Read for one token: all but a table of which only rows are looked up."""
        apart = "lm_head.weight" in self.arrays
        return sum(a.nbytes for n, a in self.arrays.items() if not (apart and n == "model.embed_tokens.weight"))


def made(config: DecoderConfig, form: str) -> Weights:
    """Random weights. Rows of packed matrices are drawn from some that the host makes."""
    torch.manual_seed(0)
    rng, found, pools, known = np.random.default_rng(0), Weights({}, form, {}), {}, {}
    for p in build(config, 1, 1, 1, form).params:
        name, dims = str(p.name), p.shape.static
        if len(dims) == 1:
            array = 1 + 0.1 * torch.randn(dims, device="cuda")
        elif form in FORMATS:
            if dims[1] not in known:
                rows = np.zeros((POOL, dims[1]), np.uint8)
                random_weights(FORMATS[form])(rng, [rows, rows])
                decoded = FORMATS[form].decode_rows(rows)
                known[dims[1]] = torch.from_numpy(rows).cuda(), torch.from_numpy(decoded).cuda()
            rows, decoded = known[dims[1]]
            at = torch.randint(POOL, (dims[0],), device="cuda")
            array, pools[name] = rows[at], (decoded, at)
        else:
            array = torch.empty(dims, device="cuda", dtype=torch.bfloat16).normal_(0, 0.03)
        found.arrays[name] = array
    return replace(found, pools=pools)


class Ours:
    """rlx, from a graph that chooses the likeliest token and feeds it back."""

    def __init__(self, config: DecoderConfig, weights: Weights, network: Decoder, name: str = "") -> None:
        graph = build(config, network.batch, 1, network.capacity, weights.form, cache="bf16", steps=())
        graph.name += name  # a session keeps programs by their graph
        begun = time.perf_counter()
        self.compiled, self.network = rlx.Session("cuda").compile(graph), network
        self.seconds = time.perf_counter() - begun
        self.compiled.set_params(weights.arrays)
        for layer, cache in product(range(config.num_hidden_layers), "kv"):
            self.compiled.bind_handle(f"{cache}.{layer}", network.cache(cache))
        self.begin()
        self.launches = len(self.compiled._executable._whole.launches)  # type: ignore[attr-defined]

    def begin(self) -> None:
        self.compiled.bind_handle("token", self.network.first.int())
        self.compiled.bind_handle("position", np.int32(self.network.context))
        self.waiting = deque[Callable[[], np.ndarray]]()

    def token(self) -> np.ndarray:
        self.compiled.run_slots(())
        return self.compiled.handles.read("token")

    def ahead(self) -> None:
        """Queue a token, and read the one before it."""
        self.compiled.run_slots(())
        self.waiting.append(self.compiled.handles.read_later("token"))
        if len(self.waiting) > 1:
            self.waiting.popleft()()

    def queue(self) -> None:
        self.compiled._executable._whole.queue()  # type: ignore[attr-defined]


def timed(begin: Callable[[], object], step: Callable[[], object], tokens: int, rounds: int = 3) -> float:
    """Seconds of a token: the median round, with one wait at the end of each."""
    times = []
    for _ in range(rounds):
        begin()
        wait_all()
        start = time.perf_counter()
        for _ in range(tokens):
            step()
        wait_all()
        times.append((time.perf_counter() - start) / tokens)
    return statistics.median(times)


def by_launches(config: DecoderConfig, weights: Weights, network: Decoder) -> tuple[Callable[[], object], ...]:
    """As `Decoder.engine`: calls that begin, run and read back a token, of rlx without chains."""
    with patch.object(code, "in_chains", lambda program, launches, *rest: launches):
        ours = Ours(config, weights, network, "_launches")
    return ours.begin, ours.queue, ours.ahead


def one(config: DecoderConfig, shape: str, form: str, batch: int, context: int, read: float, args: Any) -> None:
    weights = made(config, form)
    network = Decoder(config, weights.plain, batch, context, context + args.tokens + 1)
    ours = Ours(config, weights, network)
    off = network.behind(ours.token())
    if not off < LIMIT:
        print(f"{shape} {form} batch {batch}: WRONG, the token is {off:.2f} standard deviations behind the best one", flush=True)
    said = []
    for _ in range(2):
        ours.begin()
        said.append([ours.token() for _ in range(args.tokens)])
    same = np.array_equal(*said)
    replay, wall = (timed(ours.begin, step, args.tokens) for step in (ours.queue, ours.ahead))
    cache = 4 * batch * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * (context + args.tokens // 2)
    rate, whole = weights.nbytes / replay, (weights.nbytes + cache) / replay
    print(
        f"{shape} {form} batch {batch} context {context}: replay {replay * 1e3:.3f} ms, wall {wall * 1e3:.3f}, "
        f"{ours.launches} launches, {rate / 1e12:.2f} TB/s ({rate / read:.0%}), cache {whole / 1e12:.2f} ({whole / read:.0%}), "
        f"{batch / wall:.0f} tokens/s; off {off:.2f}, same tokens twice: {same}; compiled in {ours.seconds:.1f} s",
        flush=True,
    )
    if args.kernels:
        for ops, count, us, *_ in kernel_times(ours.compiled, repeats=5):
            print(f"  {us:9.1f} us  {count:3} x {us / count:8.2f}  {ops[:110]}", flush=True)
    del ours
    for engine in args.engines:
        begun = time.perf_counter()
        begin, step, read_back = by_launches(config, weights, network) if engine == "launches" else network.engine(engine)
        seconds = time.perf_counter() - begun
        alone, whole_step = (timed(begin, call, args.tokens) for call in (step, read_back))
        print(
            f"  {engine}: {alone * 1e3:.3f} ms, wall {whole_step * 1e3:.3f}, {batch / whole_step:.0f} tokens/s; rlx is faster by "
            f"{alone / replay:.2f}, wall {whole_step / wall:.2f}; compiled in {seconds:.0f} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["0.6b"], choices=SHAPES)
    parser.add_argument("--weights", nargs="+", default=["bf16"], choices=("bf16", *FORMATS))
    for name, value in (("batch", 1), ("context", 128)):
        parser.add_argument(f"--{name}", nargs="+", type=int, default=[value])
    for name, value in (("tokens", 64), ("layers", 0)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--engines", nargs="*", default=[], choices=("launches", "torch.compile", "eager"))
    parser.add_argument("--kernels", action="store_true", help="the launches with their times")
    args = parser.parse_args()
    where = header()
    big = torch.ones(1 << 30, device="cuda")
    read = big.nbytes / timed(lambda: None, big.sum, 10)
    del big
    print(f"{where}, read {read / 1e12:.2f} TB/s", flush=True)
    for shape, form, batch, context in product(args.shape, args.weights, args.batch, args.context):
        config = SHAPES[shape] | ({"num_hidden_layers": args.layers} if args.layers else {})
        with torch.no_grad():
            one(config_of(config), shape, form, batch, context, read, args)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
