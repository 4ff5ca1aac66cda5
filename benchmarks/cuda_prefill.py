"""Prefill of language models with random weights on one GPU: rlx beside torch.compile, torch eager and JAX.

    python benchmarks/cuda_prefill.py [--shapes 0.6b 1b 8b] [--tokens 512] [--layers 0] [--engines torch.compile jax] [--kernels]

bf16 weights and cache, batch 1, logits of the last token; every engine has the same weights and writes keys and values to a
cache. torch and JAX keep activations in bf16, rlx keeps the residual in f32. Logits are compared with torch's in f64 first, by
the largest difference over the largest logit. Times are medians of wall clock per call, the engines alternate. `replay` is rlx's
CUDA graph alone; `rlx` copies tokens and logits between host and device as well. torch.compile (max-autotune; the engine
"default": its default mode) is recorded as one CUDA graph. The share is that of the rate of a product of 8192 x 8192 x 8192 in
torch, which alternates with them: a GPU at its power limit is slower. It counts the products that rlx computes: behind the keys
and values of the last layer those of one token. TensorRT-LLM and llama.cpp are not run; the last lines say
whether they are installed.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import rlx
from benchmarks.cuda_decode import SHAPES
from benchmarks.cuda_measure import header, interleaved, print_kernels, replay, torch_engines
from rlx.frontends.models import decoder
from rlx.frontends.models.families import config_of

SIZE = 8192  # of the product whose rate is the measure
LIMIT = 5e-2  # of the largest logit
Network = Callable[[Any, Any], Any]


def weights(graph: rlx.Graph) -> dict[str, Any]:
    """torch tensors on the GPU, by param."""
    import torch

    torch.manual_seed(0)

    def random(dims: tuple[int, ...]) -> Any:
        if len(dims) == 1:  # the scale of a norm
            return 1 + 0.1 * torch.randn(dims, device="cuda")
        return torch.empty(dims, device="cuda", dtype=torch.bfloat16).normal_(std=dims[1] ** -0.5)

    return {str(p.name): random(p.shape.static) for p in graph.params}


def torch_network(c: decoder.DecoderConfig, w: Mapping[str, Any], tokens: int, dtype: Any) -> Network:
    """The network in torch's own operations; a product casts its weights, which costs nothing where they have the dtype."""
    import torch
    import torch.nn.functional as F

    heads, shared, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    angle = torch.arange(tokens).double()[:, None] * torch.tensor(c.ropes[0].frequencies).double()  # type: ignore[union-attr]
    cos, sin = (t.to("cuda", dtype) for t in (angle.cos(), angle.sin()))
    caches = [torch.zeros(2, 1, shared, 2 * tokens, size, device="cuda", dtype=dtype) for _ in range(c.num_hidden_layers)]
    scales = {n: t.to(dtype) for n, t in w.items() if t.dim() == 1}

    def linear(name: str, x: Any) -> Any:
        return F.linear(x, w[f"{name}.weight"].to(dtype))

    def norm(name: str, x: Any) -> Any:
        return F.rms_norm(x, x.shape[-1:], scales[f"{name}.weight"], c.eps)

    def rotated(x: Any) -> Any:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def network(ids: Any, last: Any) -> Any:
        x = F.embedding(ids, w["model.embed_tokens.weight"]).to(dtype)
        for n in range(c.num_hidden_layers):
            at = f"model.layers.{n}"
            qkv = linear(f"{at}.self_attn.qkv_proj", norm(f"{at}.input_layernorm", x)).view(1, tokens, -1, size)
            q, k, v = qkv.split((heads, shared, shared), 2)
            if c.qk_norm:
                q, k = norm(f"{at}.self_attn.q_norm", q), norm(f"{at}.self_attn.k_norm", k)
            q, k, v = (t.transpose(1, 2) for t in (q, k, v))
            q, k = rotated(q), rotated(k)
            caches[n][0, :, :, :tokens], caches[n][1, :, :, :tokens] = k, v
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).reshape(1, tokens, -1)
            x = x + linear(f"{at}.self_attn.o_proj", out)
            inner = linear(f"{at}.mlp.gate_up_proj", norm(f"{at}.post_attention_layernorm", x))
            gate, up = inner.chunk(2, -1)
            x = x + linear(f"{at}.mlp.down_proj", F.silu(gate) * up)
        x = norm("model.norm", x[:, last])
        return linear("model.embed_tokens" if c.tied else "lm_head", x)[:, -1]

    return network


def jax_call(c: decoder.DecoderConfig, w: Mapping[str, Any], ids: np.ndarray) -> Callable[[], object]:
    """One jitted function; the caches are among its results."""
    import jax
    import jax.numpy as jnp

    tokens, size = ids.shape[1], c.head_dim
    held = {n: jax.dlpack.from_dlpack(t.bfloat16().contiguous()) for n, t in w.items()}
    angle = np.arange(tokens)[:, None] * np.array(c.ropes[0].frequencies)  # type: ignore[union-attr]
    cos, sin = (jnp.asarray(t[:, None], jnp.bfloat16) for t in (np.cos(angle), np.sin(angle)))

    def norm(scale: Any, x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + c.eps)).astype(x.dtype) * scale

    def rotated(x: Any) -> Any:
        a, b = jnp.split(x, 2, -1)
        return jnp.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    def network(w: Mapping[str, Any], ids: Any) -> Any:
        x, caches = w["model.embed_tokens.weight"][ids[0]], []
        for n in range(c.num_hidden_layers):
            at = f"model.layers.{n}"
            qkv = (norm(w[f"{at}.input_layernorm.weight"], x) @ w[f"{at}.self_attn.qkv_proj.weight"].T).reshape(tokens, -1, size)
            q, k, v = jnp.split(qkv, (c.num_attention_heads, c.num_attention_heads + c.num_key_value_heads), 1)
            if c.qk_norm:
                q, k = (norm(w[f"{at}.self_attn.{p}_norm.weight"], t) for p, t in (("q", q), ("k", k)))
            q, k = rotated(q), rotated(k)
            caches.append((k, v))
            out = jax.nn.dot_product_attention(q[None], k[None], v[None], is_causal=True, implementation="cudnn")
            out = out.reshape(tokens, -1)
            x = x + out @ w[f"{at}.self_attn.o_proj.weight"].T
            inner = norm(w[f"{at}.post_attention_layernorm.weight"], x) @ w[f"{at}.mlp.gate_up_proj.weight"].T
            gate, up = jnp.split(inner, 2, -1)
            x = x + (jax.nn.silu(gate) * up) @ w[f"{at}.mlp.down_proj.weight"].T
        table = w["model.embed_tokens.weight" if c.tied else "lm_head.weight"]
        return norm(w["model.norm.weight"], x[-1:]) @ table.T, caches

    run, given = jax.jit(network), jnp.asarray(ids)
    return lambda: jax.block_until_ready(run(held, given))


def product() -> Callable[[], object]:
    """A large product in torch."""
    import torch

    a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return lambda: torch.mm(a, b)


def calls_of(name: str, tokens: int, layers: int, engines: list[str]) -> tuple[dict[str, Callable[[], object]], Any, float, int]:
    """The timed calls, the compiled program, rlx's largest difference from torch in f64, and the operations of the products."""
    import torch

    config = config_of(SHAPES[name] | ({"num_hidden_layers": layers} if layers else {}))
    graph = decoder.build(config, 1, tokens, 2 * tokens, formats="bf16", cache="bf16")
    graph.assigns = [(h, v) for h, v in graph.assigns if h.node.name != "position"]  # every run processes the same prompt
    w = weights(graph)
    compiled = rlx.Session("cuda").compile(graph)
    for param, value in w.items():
        compiled.set_param(param, value)
    ids = np.random.default_rng(1).integers(0, config.vocab_size, (1, tokens)).astype(np.int32)
    inputs = [ids, np.array(tokens, np.int32)]
    compiled.run_slots(inputs)
    held, last = torch.from_numpy(ids).cuda().long(), torch.tensor([tokens - 1], device="cuda")
    wanted = torch_network(config, w, tokens, torch.float64)(held, last).cpu().numpy()
    off = float(np.abs(compiled.outputs_view()[0].numpy() - wanted).max() / np.abs(wanted).max())
    calls = {"replay": replay(compiled), "rlx": lambda: compiled.run_slots(inputs)}
    network = torch_network(config, w, tokens, torch.bfloat16)
    calls |= torch_engines(network, (held, last), engines)
    if "jax" in engines and find_spec("jax"):
        calls["jax"] = jax_call(config, w, ids)
    table = w["model.embed_tokens.weight"].numel()
    work = sum(t.numel() for t in w.values() if t.dim() == 2) - table * (1 if config.tied else 2)
    last = f"model.layers.{config.num_hidden_layers - 1}."
    of_one = sum(t.numel() for p, t in w.items() if t.dim() == 2 and p.startswith(last) and "qkv_proj" not in p)
    return calls, compiled, off, 2 * (tokens * (work - of_one) + of_one + table)


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=0, help="0: as many as the shape has")
    parser.add_argument("--engines", nargs="*", default=["torch.compile", "eager", "jax"])
    parser.add_argument("--kernels", action="store_true", help="the kernels of each program with their times")
    args = parser.parse_args()
    print(header())
    with torch.inference_mode():
        for name in args.shapes:
            calls, compiled, off, work = calls_of(name, args.tokens, args.layers, args.engines)
            times = interleaved(calls | {"product": product()})
            rate = 2 * SIZE**3 / times.pop("product")
            text = ", ".join(f"{e} {1e3 * t:.3f} ms ({t / times['replay']:.2f})" for e, t in times.items())
            done = work / times["replay"]
            share = f"{done / 1e12:.0f} TFLOP/s, {done / rate:.0%} of {rate / 1e12:.0f}"
            print(f"{name} {args.tokens}: {text}; {share}; off by {off:.1e}", flush=True)
            assert off < LIMIT, f"{name}: off by {off}"
            if args.kernels:
                print_kernels(compiled)
            del calls, compiled
            gc.collect()
            torch.cuda.empty_cache()
    for package in ("jax", "tensorrt_llm", "llama_cpp"):
        if package != "jax" or package in args.engines:
            print(f"{package}: {'installed' if find_spec(package) else 'not installed'}")


if __name__ == "__main__":
    main()
