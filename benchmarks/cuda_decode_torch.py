"""The decoding step of benchmarks/cuda_decode.py in torch's own operations: the peer, and in f32 the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from rlx.frontends.models.decoder import DecoderConfig

Call = Callable[[], object]


class Decoder:
    """`plain(name)`: a weight. Keys and values of the first `context` positions are random, the same in every layer."""

    def __init__(
        self, config: DecoderConfig, plain: Callable[[str], torch.Tensor], batch: int, context: int, capacity: int
    ) -> None:
        self.config, self.plain, self.batch, self.context, self.capacity = config, plain, batch, context, capacity
        torch.manual_seed(1)
        self.first = torch.randint(config.vocab_size, (batch,), device="cuda")
        rope = config.ropes[0]
        assert rope is not None
        self.frequencies = torch.tensor(rope.frequencies, device="cuda")

    def cache(self, name: str) -> torch.Tensor:
        c = self.config
        dice = torch.Generator("cuda").manual_seed(ord(name))
        dims = (self.batch, c.num_key_value_heads, self.capacity, c.head_dim)
        return torch.randn(dims, generator=dice, device="cuda", dtype=torch.bfloat16)

    def step(
        self, weight: Callable[[str], torch.Tensor], caches: Callable[[int], list[torch.Tensor]], ids: torch.Tensor,
        position: torch.Tensor, dtype: torch.dtype,
    ) -> torch.Tensor:  # fmt: skip
        """Logits [batch, vocab]; `position` i64 [1]. Keys and values are written to the caches."""
        c, b = self.config, len(ids)
        heads, shared, size = c.num_attention_heads, c.num_key_value_heads, c.head_dim

        def norm(name: str, x: torch.Tensor) -> torch.Tensor:
            return F.rms_norm(x.float(), x.shape[-1:], weight(f"{name}.weight").float(), c.eps).to(dtype)

        def linear(name: str, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, weight(f"{name}.weight").to(dtype))

        angle = position * self.frequencies
        cos, sin = torch.cos(angle), torch.sin(angle)

        def rotated(x: torch.Tensor) -> torch.Tensor:
            one, other = x.float().chunk(2, -1)
            return torch.cat([one * cos - other * sin, other * cos + one * sin], -1).to(dtype)

        seen = (torch.arange(self.capacity, device="cuda") <= position)[None, None, None]
        x = weight("model.embed_tokens.weight")[ids].to(dtype)
        for i in range(c.num_hidden_layers):
            at = f"model.layers.{i}"
            all_ = linear(f"{at}.self_attn.qkv_proj", norm(f"{at}.input_layernorm", x)).view(b, 1, heads + 2 * shared, size)
            q, k, v = all_.transpose(1, 2).split((heads, shared, shared), 1)
            if c.qk_norm:
                q, k = norm(f"{at}.self_attn.q_norm", q), norm(f"{at}.self_attn.k_norm", k)
            held = caches(i)
            for cache, new in zip(held, (rotated(k), v)):
                cache.index_copy_(2, position, new.to(cache.dtype))
            keys, values = (h.to(dtype) for h in held)
            out = F.scaled_dot_product_attention(rotated(q), keys, values, attn_mask=seen, enable_gqa=heads != shared)
            x = x + linear(f"{at}.self_attn.o_proj", out.reshape(b, heads * size))
            gate, up = linear(f"{at}.mlp.gate_up_proj", norm(f"{at}.post_attention_layernorm", x)).chunk(2, -1)
            x = x + linear(f"{at}.mlp.down_proj", F.silu(gate) * up)
        return linear("model.embed_tokens" if c.tied else "lm_head", norm("model.norm", x))

    def behind(self, token: np.ndarray) -> float:
        """By how many standard deviations the first token's logits are behind the best ones, in f32."""
        torch.backends.cuda.matmul.allow_tf32 = False
        position = torch.tensor([self.context], device="cuda")
        logits = self.step(self.plain, lambda i: [self.cache(n) for n in "kv"], self.first, position, torch.float32)
        chosen = torch.from_numpy(np.asarray(token)).cuda().long()
        if bool((chosen < 0).any() or (chosen >= logits.shape[1]).any() or not logits.isfinite().all()):
            return float("nan")
        found = logits.gather(1, chosen[:, None])[:, 0]
        return float(((logits.amax(1) - found) / logits.std(1)).max())

    def engine(self, name: str) -> tuple[Call, Call, Call]:
        """(begin, a step, a step that reads the token before), in bf16: "eager", or "torch.compile" with CUDA graphs, tuned."""
        c = self.config
        held: dict[str, torch.Tensor] = {}
        caches = [[self.cache(n) for n in "kv"] for _ in range(c.num_hidden_layers)]
        ids, position = self.first.clone(), torch.tensor([self.context], device="cuda")

        def weight(name: str) -> torch.Tensor:
            return held[name]

        for p in self.params():
            held[p] = self.plain(p).to(torch.bfloat16)
        for array in (*held.values(), *(a for pair in caches for a in pair)):  # CUDA graphs read and write them where they are
            torch._dynamo.mark_static_address(array)

        def run(ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            return self.step(weight, lambda i: caches[i], ids, position, torch.bfloat16).argmax(-1)

        call: Any = run if name == "eager" else torch.compile(run, mode="max-autotune", dynamic=False, fullgraph=True)

        def begin() -> None:
            ids.copy_(self.first)
            position.fill_(self.context)

        def step() -> torch.Tensor:
            ids.copy_(call(ids, position))
            position.add_(1)
            return ids

        read = [(torch.empty_like(ids, device="cpu", pin_memory=True), torch.cuda.Event()) for _ in range(2)]

        def ahead() -> torch.Tensor:
            """Queue a token, and read the one before it."""
            (host, event), (before, reached) = read
            host.copy_(step(), non_blocking=True)
            event.record()
            reached.synchronize()
            read.reverse()
            return before

        for _ in range(3):
            ahead()
        begin()
        return begin, step, ahead

    def params(self) -> list[str]:
        from rlx.frontends.models.decoder import build

        return [str(p.name) for p in build(self.config, 1, 1, 1, "bf16").params]


__all__ = ["Decoder"]
