"""A language model of the shape of Qwen3-30B-A3B (128 experts, each token takes 8) with random weights, as GGUF files. It has 4
of the 48 layers and as small a part of the vocabulary, so that all parts of a step have their share of its time."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.qwen_shape import header_of

LAYERS = 4
CONFIG = {
    "vocab_size": 151936 * LAYERS // 48 // 32 * 32,
    "hidden_size": 2048,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,  # of no layer: all have experts
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
}
WIDTH = 0.03  # standard deviation of the weights


def gguf_file(root: Path, kind: str) -> Path:
    """The GGUF file with matrices of `kind` ("q8_0", "q4_k"), written if it does not exist. Norms and routers are f32."""
    path = root / f"moe-{LAYERS}-{kind}.gguf"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        _write(path.with_suffix(".partial"), kind)
        path.with_suffix(".partial").rename(path)
    return path


def _write(path: Path, kind: str) -> None:
    import gguf

    c = CONFIG
    w = header_of(path, "qwen3moe", c)
    w.add_expert_count(c["num_experts"])
    w.add_expert_used_count(c["num_experts_per_tok"])
    w.add_expert_feed_forward_length(c["moe_intermediate_size"])
    h, d, f, experts = c["hidden_size"], c["head_dim"], c["moe_intermediate_size"], c["num_experts"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (c["vocab_size"], h), "output": (c["vocab_size"], h), "output_norm": (h,)}
    for i in range(LAYERS):
        parts = {
            "attn_q": (q, h), "attn_k": (kv, h), "attn_v": (kv, h), "attn_output": (h, q), "attn_q_norm": (d,),
            "attn_k_norm": (d,), "attn_norm": (h,), "ffn_norm": (h,), "ffn_gate_inp": (experts, h),
            "ffn_gate_exps": (experts, f, h), "ffn_up_exps": (experts, f, h), "ffn_down_exps": (experts, h, f),
        }  # fmt: skip
        shapes |= {f"blk.{i}.{name}": shape for name, shape in parts.items()}
    rng, stored = np.random.default_rng(0), {"q8_0": gguf.GGMLQuantizationType.Q8_0, "q4_k": gguf.GGMLQuantizationType.Q4_K}
    for name, shape in shapes.items():
        if len(shape) == 1:
            w.add_tensor(f"{name}.weight", 1 + np.float32(0.1) * rng.standard_normal(shape, np.float32))
        elif name.endswith("inp"):
            w.add_tensor(f"{name}.weight", np.float32(WIDTH) * rng.standard_normal(shape, np.float32))
        else:
            w.add_tensor(f"{name}.weight", _random_rows(rng, kind, shape), raw_dtype=stored[kind])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _random_rows(rng: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random blocks whose values have mean 0 and deviation WIDTH: u8 [..., bytes of a row]."""
    from rlx.ir.blocks import FORMATS

    form = FORMATS[kind]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // form.block, form.nbytes), np.uint8)
    # q8_0: scale * i8. q4_k: scale * u6 * u4 - factor * u6; the mean of u4 is 7.5
    numbers = [WIDTH / 73.9] if kind == "q8_0" else [WIDTH / 258, 7.5 * WIDTH / 258]
    for at, number in zip(form.numbers, numbers, strict=True):
        blocks[..., at : at + 2] = np.array([number], "<f2").view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
