"""Encoders with random weights on one GPU: rlx beside torch.compile (max-autotune, CUDA graphs) and torch eager.

    python benchmarks/cuda_encoder.py [--models minilm bert-base] [--shapes 1x16 8x128] [--dtypes bf16 f32] [--kernels]

Every engine gets the same ids, mask and weights, in the same dtype; embeddings are compared with torch's in f64 first. Times are
medians of wall clock per call, the engines alternate. torch.compile (max-autotune; the engine "default": its default mode) is
recorded as one CUDA graph. `replay` is rlx's CUDA graph alone; `rlx` copies ids, mask and the
embedding between host and device as well, and torch's inputs stay on the device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import rlx
from benchmarks.cuda_measure import header, interleaved, print_kernels, replay, torch_engines
from rlx.frontends.models import bert

MODELS = {
    "minilm": bert.BertConfig(30522, 384, 6, 12, 1536, 512, normalize=True),
    "bert-base": bert.BertConfig(30522, 768, 12, 12, 3072, 512, normalize=True),
}
SHAPES = ("1x16", "8x128", "64x128", "256x128")
LIMIT = {"f32": 1e-4, "bf16": 3e-2}  # of a unit vector's elements, against f64


def weights(config: bert.BertConfig, dtype: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)

    def random(name: str, dims: tuple[int, ...]) -> np.ndarray:
        array = rng.standard_normal(dims, np.float32) * np.float32(0.04 if len(dims) > 1 else 0.1)
        return (array + np.float32("LayerNorm.weight" in name)).astype(rlx.as_dtype(dtype).numpy)

    return {str(p.name): random(str(p.name), p.shape.static) for p in bert.build(config, 1, 1).params}


def torch_network(config: bert.BertConfig, params: dict[str, np.ndarray], dtype: Any) -> Callable[..., Any]:
    """The encoder in torch's own operations: sdpa, linear, layer_norm; as embedding libraries run it."""
    import torch
    import torch.nn.functional as F

    w = {n: torch.from_numpy(np.asarray(a, np.float32)).to("cuda", dtype) for n, a in params.items()}
    heads, hidden = config.num_attention_heads, config.hidden_size

    def norm(name: str, x: Any) -> Any:
        return F.layer_norm(x, (hidden,), w[f"{name}.weight"], w[f"{name}.bias"], config.layer_norm_eps)

    def linear(name: str, x: Any) -> Any:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    for n in range(config.num_hidden_layers):  # one product for query, key and value, as in rlx
        at = f"encoder.layer.{n}.attention.self"
        for part in ("weight", "bias"):
            w[f"{at}.all.{part}"] = torch.cat([w[f"{at}.{name}.{part}"] for name in ("query", "key", "value")])

    def embed(ids: Any, mask: Any) -> Any:
        batch, length = ids.shape
        word, position, kind = (w[f"embeddings.{n}_embeddings.weight"] for n in ("word", "position", "token_type"))
        x = norm("embeddings.LayerNorm", F.embedding(ids, word) + (position[:length] + kind[0]))
        for n in range(config.num_hidden_layers):
            at = f"encoder.layer.{n}"
            q, k, v = linear(f"{at}.attention.self.all", x).view(batch, length, 3, heads, -1).permute(2, 0, 3, 1, 4)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None]).transpose(1, 2).reshape(x.shape)
            x = norm(f"{at}.attention.output.LayerNorm", linear(f"{at}.attention.output.dense", out) + x)
            inner = F.gelu(linear(f"{at}.intermediate.dense", x))
            x = norm(f"{at}.output.LayerNorm", linear(f"{at}.output.dense", inner) + x)
        weight = mask[..., None].float()
        return F.normalize((x.float() * weight).sum(1) / weight.sum(1).clamp(min=1))

    return embed


def calls_of(name: str, shape: str, dtype: str, engines: list[str]) -> tuple[dict[str, Callable[[], object]], Any, float]:
    """The timed calls, the compiled program, and rlx's largest difference from torch in f64."""
    import torch

    config, (batch, length) = MODELS[name], map(int, shape.split("x"))
    params = weights(config, dtype)
    ids = np.random.default_rng(0).integers(1000, 20000, (batch, length)).astype(np.int32)
    mask = np.arange(length) < np.random.default_rng(1).integers(length // 2, length + 1, (batch, 1))
    compiled = rlx.Session("cuda").compile(bert.build(config, batch, length, dtype))
    for p, array in params.items():
        compiled.set_param(p, array)
    compiled.run_slots([ids, mask])
    held, masked = torch.from_numpy(ids).cuda().long(), torch.from_numpy(mask).cuda()
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = min(batch, 8)  # rows are independent
    with torch.inference_mode():
        wanted = torch_network(config, params, torch.float64)(held[:rows], masked[:rows]).cpu().numpy()
    off = float(np.abs(compiled.outputs_view()[0].numpy()[:rows] - wanted).max())
    assert off < LIMIT[dtype], f"{name} {shape} {dtype}: off by {off}"
    embed = torch_network(config, params, {"f32": torch.float32, "bf16": torch.bfloat16}[dtype])
    calls = {"replay": replay(compiled), "rlx": lambda: compiled.run_slots([ids, mask])}
    calls |= torch_engines(embed, (held, masked), engines)
    return calls, compiled, off


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES))
    parser.add_argument("--dtypes", nargs="+", default=["bf16", "f32"], choices=LIMIT)
    parser.add_argument("--engines", nargs="*", default=["torch.compile", "eager"])
    parser.add_argument("--kernels", action="store_true", help="the kernels of each program with their times")
    args = parser.parse_args()
    print(header())
    for name, shape, dtype in ((n, s, d) for n in args.models for d in args.dtypes for s in args.shapes):
        with torch.inference_mode():
            calls, compiled, off = calls_of(name, shape, dtype, args.engines)
            times = interleaved(calls)
        text = ", ".join(f"{engine} {1e3 * t:.3f} ms ({t / times['replay']:.2f})" for engine, t in times.items())
        print(f"{name} {shape} {dtype}: {text}; off by {off:.0e}", flush=True)
        if args.kernels:
            print_kernels(compiled)


if __name__ == "__main__":
    main()
