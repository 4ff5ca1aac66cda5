"""Experts in two tiers on an NVIDIA GPU: tokens per second by how many of them are resident, random weights.

    python benchmarks/cuda_residency.py [--layers 8] [--weights bf16 q4_k q8_0] [--shares 100 75 50 25] [--tokens 200]
        [--policy hysteresis] [--masks]

The shape is that of Qwen3-30B-A3B (128 experts, each token takes 8) with some of its 48 layers. The likeliest token is fed back
on the device, and read after each step. Random routers choose each expert about as often as any other, the worst case for every
policy: hits are about the share of experts that are resident. "driver" is the memory that the model takes, by the GPU's driver;
"experts" the part of it that the resident ones need. The limit of a share is the time with all experts resident and, for the
experts that were missing, that of copies of their bytes through the bus at the measured rate. Tokens are compared with those of
the first share. --masks: a fresh random mask of a half of the experts before every step, instead of a pool.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

import rlx
from benchmarks.qwen_moe_shape import CONFIG
from rlx.backends.cuda.gpu import check, gpu
from rlx.driver.experts import ExpertSource
from rlx.frontends.models.decoder import build
from rlx.frontends.models.families import config_of
from rlx.ir.blocks import FORMATS
from rlx.ir.ops.quant import random_weights
from rlx.runtime.policies import policy_of

CONTEXT = 1024
WARM = 20  # steps that are not timed


def free() -> int:
    """Bytes that the driver has left."""
    found = gpu(0)
    found.wait()
    return int(check(found.driver.cuMemGetInfo(), "asking for memory")[0])


def array(rng: np.random.Generator, dims: tuple[int, ...], form: str) -> np.ndarray:
    if len(dims) == 1:
        return (1 + 0.1 * rng.standard_normal(dims)).astype(np.float32)
    if form in FORMATS:
        made = np.zeros(dims, np.uint8)
        random_weights(FORMATS[form])(rng, [made, made])
        return made
    return (0.03 * rng.standard_normal(dims, np.float32)).astype(rlx.as_dtype("bf16").numpy)


def weights(compiled: rlx.CompiledGraph, experts: int, form: str) -> dict[str, Any]:
    """Each expert has the rows of one, shifted."""
    rng, found = np.random.default_rng(0), dict[str, Any]()
    ours = {name for r in compiled.program().routers for name in r.params}
    for p in compiled.params:
        dims = p.shape.static
        if p.name in ours:
            apart = dims[1:] if dims[0] == experts else (dims[0] // experts, *dims[1:])
            one = array(rng, apart, form)
            read = partial(lambda one, e: np.roll(one, 7 * e + 1, axis=0), one)
            found[p.name] = ExpertSource(read, p.name)
        else:
            found[p.name] = array(rng, dims, form if p.dtype == rlx.u8 else "").astype(p.dtype.numpy, copy=False)
    return found


class Model:
    def __init__(self, layers: int, form: str, lookahead: bool) -> None:
        config = config_of({**CONFIG, "model_type": "qwen3_moe", "norm_topk_prob": True, "num_hidden_layers": layers})
        assert config.experts is not None
        graph = build(config, 1, 1, CONTEXT, form, cache="bf16", steps=(), lookahead=lookahead)
        self.compiled, self.experts = rlx.Session("cuda").compile(graph), config.experts.count
        self._form, program = form, self.compiled.program()
        self._states = [program.buffers[at] for at in program.handles]

    def load(self) -> None:
        for name, value in weights(self.compiled, self.experts, self._form).items():
            self.compiled.set_params({name: value})

    def tokens(self, count: int, before: Callable[[], object] = lambda: None) -> tuple[list[int], list[float]]:
        """From an empty state: the tokens, and the seconds of each."""
        for state in self._states:
            self.compiled.bind_handle(state.name, np.zeros(state.shape.static, state.shape.dtype.numpy))
        found, times = [], []
        for _ in range(count):
            before()
            begun = time.perf_counter()
            self.compiled.run_slots(())
            found.append(int(self.compiled.handles.read("token").reshape(-1)[0]))
            times.append(time.perf_counter() - begun)
        return found, times


def one_share(layers: int, form: str, share: int, args: Any, first: dict[str, Any]) -> None:
    gc.collect()  # the model before this one
    before, begun = free(), time.perf_counter()
    model = Model(layers, form, policy_of(args.policy).guesses)
    count, tiers = model.experts * layers, model.compiled.expert_tiers()
    pool = rlx.ExpertPool(model.compiled, count * share // 100, args.policy) if share < 100 else None
    model.load()
    loaded, taken = time.perf_counter() - begun, before - free()
    each = tiers.layers[0].nbytes
    if args.masks:
        rng = np.random.default_rng(1)
        half = lambda: rng.permutation(model.experts) < model.experts // 2  # noqa: E731
        if pool is not None:
            pool.close()
        place = model.compiled.set_moe_resident_experts_per_layer
        found, times = model.tokens(args.tokens, lambda: place([half() for _ in range(layers)]))
    else:
        found, times = model.tokens(args.tokens)
    seconds = statistics.median(times[WARM:])
    first.setdefault("tokens", found)
    first.setdefault("seconds", seconds)
    stats = model.compiled.take_moe_residency_stats()
    slow = stats.offloaded
    uses = max(1, stats.resident.experts + slow.experts)
    limit = first["seconds"] + (slow.seconds / args.tokens)
    print(
        f"{form} {layers} layers, {share:3}% of {count} experts: {1 / seconds:7.1f} tokens/s ({seconds * 1e3:.3f} ms), "
        f"{limit / seconds:4.0%} of the limit; hits {stats.resident.experts / uses:.1%}, missing "
        f"{slow.bytes / args.tokens / 1e6:.1f} MB a token; driver {taken / 1e6:.0f} MB, "
        f"experts {count * each * share // 100 / 1e6:.0f} of {count * each / 1e6:.0f}; "
        f"loaded in {loaded:.1f} s; same tokens: {found == first['tokens']}",
        flush=True,
    )
    if pool is not None:
        print(f"    {pool.report()}; bus {tiers.rate(near=False) / 1e9:.1f} GB/s", flush=True)  # type: ignore[attr-defined]
        pool.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--weights", nargs="+", default=["bf16", "q4_k"], choices=("bf16", *FORMATS))
    parser.add_argument("--shares", nargs="+", type=int, default=[100, 75, 50, 25])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--policy", default="hysteresis")
    parser.add_argument("--masks", action="store_true")
    args = parser.parse_args()
    print(gpu(0).title, flush=True)
    for form in args.weights:
        first: dict[str, Any] = {}
        for share in args.shares:
            one_share(args.layers, form, share, args, first)


if __name__ == "__main__":
    main()
