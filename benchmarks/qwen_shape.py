"""A language model of Qwen3-0.6B's shape with random weights, in the file formats of the engines: a Hugging Face folder
(safetensors, bf16) and GGUF files (f32, bf16, q8_0, and q4_K from llama.cpp's own quantiser), all with the same weights."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def tensors() -> Iterator[tuple[str, np.ndarray]]:
    """(name, bf16 array) of every weight, the same at every call."""
    c = CONFIG
    h, d, f = c["hidden_size"], c["head_dim"], c["intermediate_size"]
    q, kv = c["num_attention_heads"] * d, c["num_key_value_heads"] * d
    shapes = {"model.embed_tokens": (c["vocab_size"], h), "model.norm": (h,)}
    for i in range(c["num_hidden_layers"]):
        parts = {
            "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h), "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q),
            "self_attn.q_norm": (d,), "self_attn.k_norm": (d,), "input_layernorm": (h,), "post_attention_layernorm": (h,),
            "mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in parts.items()}
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        if len(shape) == 1:
            made = 1 + 0.1 * rng.standard_normal(shape, np.float32)
        else:
            made = rng.standard_normal(shape, np.float32) * np.float32(0.03)
        yield f"{name}.weight", made.astype(ml_dtypes.bfloat16)


def folder(root: Path) -> Path:
    """The Hugging Face folder, written if it does not exist."""
    from safetensors.numpy import save_file

    made = root / "hf"
    if not (made / "config.json").exists():
        made.mkdir(parents=True, exist_ok=True)
        save_file(dict(tensors()), made / "model.safetensors")
        (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def can_write(root: Path, kind: str) -> bool:
    """Whether `gguf_file` has the file or can write it: quantised ones need llama.cpp."""
    quantised = kind not in ("f32", "bf16")
    return not quantised or _gguf(root, kind).exists() or importlib.util.find_spec("llama_cpp") is not None


def _gguf(root: Path, kind: str) -> Path:
    return root / f"model-{kind}.gguf"


def gguf_file(root: Path, kind: str) -> Path:
    """The GGUF file with matrices of `kind` ("f32", "bf16", "q8_0", "q4_k"), written if it does not exist."""
    path = _gguf(root, kind)
    if path.exists():
        return path
    root.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    if kind in ("f32", "bf16"):
        _write(partial, kind)
    else:
        _quantise(gguf_file(root, "f32"), partial, kind)
    partial.rename(path)
    return path


def header_of(path: Path, family: str, c: Mapping[str, Any]) -> Any:
    """A gguf.GGUFWriter with the sizes of a model without a tokenizer, of a configuration with the names of Hugging Face."""
    import gguf

    w = gguf.GGUFWriter(path, family)
    w.add_block_count(c["num_hidden_layers"])
    w.add_context_length(c["max_position_embeddings"])
    w.add_embedding_length(c["hidden_size"])
    w.add_feed_forward_length(c["intermediate_size"])
    w.add_head_count(c["num_attention_heads"])
    w.add_head_count_kv(c["num_key_value_heads"])
    w.add_key_length(c["head_dim"])
    w.add_value_length(c["head_dim"])
    w.add_rope_freq_base(c["rope_theta"])
    w.add_layer_norm_rms_eps(c["rms_norm_eps"])
    w.add_vocab_size(c["vocab_size"])
    w.add_tokenizer_model("no_vocab")
    return w


def _write(path: Path, kind: str) -> None:
    import gguf

    w = header_of(path, "qwen3", CONFIG)
    for name, array in tensors():
        name = name.removesuffix(".weight").removeprefix("model.")
        if name.startswith("layers."):
            _, layer, part = name.split(".", 2)
            name = f"blk.{layer}.{GGUF_NAMES[part]}"
        else:
            name = {"embed_tokens": "token_embd", "norm": "output_norm"}[name]
        if array.ndim == 1 or kind == "f32":
            w.add_tensor(f"{name}.weight", array.astype(np.float32))
        else:
            w.add_tensor(f"{name}.weight", array.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def _quantise(source: Path, goal: Path, kind: str) -> None:
    """Quantise every matrix to that one format."""
    import llama_cpp

    types = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_S}
    ggml = {"q8_0": llama_cpp.GGML_TYPE_Q8_0, "q4_k": llama_cpp.GGML_TYPE_Q4_K}
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype, how.nthread, how.pure = types[kind], 2, True
    how.token_embedding_type = how.output_tensor_type = ggml[kind]
    if llama_cpp.llama_model_quantize(str(source).encode(), str(goal).encode(), how):
        raise SystemExit(f"llama.cpp could not quantise {source} to {kind}")
