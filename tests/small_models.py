"""Small random language models by transformers, saved as folders, and as GGUF files by the gguf package's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

VOCAB = 199
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": True,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "rope_theta": 5e3, "factor": 2.5}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 14, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 9,
}  # fmt: skip
STRETCHED = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.9,
    "mscale_all_dim": 0.7,
}  # fmt: skip
# name -> (transformers' class prefix, what differs from SIZES)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 8}),
    "llama-biases-llama3": (
        "Llama",
        {"rope_parameters": LLAMA3, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama-yarn": ("Llama", {"rope_parameters": YARN, "head_dim": 16}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR, "num_key_value_heads": 1}),
    "mistral": ("Mistral", {"sliding_window": 7}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen2-full": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 10, "tie_word_embeddings": True}),
    "gemma": ("Gemma", {"head_dim": 10}),
    "gemma2": ("Gemma2", {"head_dim": 10, "sliding_window": 5, "query_pre_attn_scalar": 17, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3", {"head_dim": 10, "sliding_window": 5, "layer_types": MIXED}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1]}),
    "phi3": ("Phi3", {"sliding_window": 9}),
    "phi": ("Phi", {"hidden_size": 32}),
    "gpt2": ("GPT2", {}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "sliding_window": 7}),
    "qwen2_moe": ("Qwen2Moe", {**MOE, "num_experts_per_tok": 3, "shared_expert_intermediate_size": 20, "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3Moe", {**MOE, "head_dim": 10, "norm_topk_prob": True, "decoder_sparse_step": 2}),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2", {**MLA, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}),
    "deepseek_v2-greedy": ("DeepseekV2", {**MLA, "q_lora_rank": None, "rope_parameters": STRETCHED}),
    "deepseek_v3": ("DeepseekV3", {**MLA, "n_group": 2, "topk_group": 1, "rope_parameters": STRETCHED, "n_shared_experts": 1}),
}


def make(name: str, folder: Path, seed: int = 0, gain: float = 1.0, **more: Any) -> Any:
    """The network, in evaluation mode, saved to `folder`. Every weight is random, norms and biases too. `gain`: of what the
    layers add to the embeddings; at 1 they add so little that many networks repeat one token for ever."""
    import torch
    import transformers

    prefix, own = FAMILIES[name]
    sizes = {**SIZES, **own, **more}
    if prefix == "GPT2":
        sizes = {"vocab_size": VOCAB, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 256}
    config = getattr(transformers, {"Gemma3": "Gemma3Text"}.get(prefix, prefix) + "Config")(**sizes)
    config._attn_implementation = "eager"  # some versions of transformers take torch's fused attention, which leaves out caps
    torch.manual_seed(seed)
    network = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(prefix, prefix + "ForCausalLM"))(config).eval()
    with torch.no_grad():
        for part, p in network.named_parameters():
            p.copy_(p + 0.1 * torch.randn_like(p) if p.ndim == 1 else 0.7 * p.shape[-1] ** -0.5 * torch.randn_like(p))
            if gain != 1 and not any(word in part for word in ("embed", "lm_head", "wte", "wpe")):
                p.copy_(p * gain if p.ndim > 1 else p + gain if "post_feed" in part else p)
        for part, p in network.named_buffers():
            if "correction_bias" in part:
                p.copy_(0.2 * torch.randn_like(p))
    network.save_pretrained(folder)
    return network


CHATML = (
    "{% for m in messages %}{{ '<|user|>' + m['role'] + '\n' + m['content'] + '<|end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|user|>assistant\n' }}{% endif %}"
)


def talker(folder: Path, template: str | None = CHATML, **more: Any) -> Any:
    """A random Qwen3 with a tokenizer of bytes, and a chat template. Its answers are long and make no sense."""
    import tokenizers
    import transformers

    network = make("qwen3", folder, vocab_size=300, gain=4.0, **more)
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    how = {"vocab_size": 290, "special_tokens": ["<|end|>", "<|user|>"], "show_progress": False}
    made.train_from_iterator(["some text"], tokenizers.trainers.BpeTrainer(initial_alphabet=alphabet, **how))
    words = transformers.PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")
    words.chat_template = template
    words.save_pretrained(folder)
    return network


def logits(network: Any, tokens: np.ndarray) -> np.ndarray:
    """f32 [batch, length, vocab] after every token, from one pass over all of them."""
    import torch

    with torch.inference_mode():
        return network(torch.tensor(tokens, dtype=torch.int64)).logits.numpy()


def greedy(network: Any, prompt: list[int], steps: int, **more: Any) -> list[int]:
    import torch

    how = {"max_new_tokens": steps, "do_sample": False, "eos_token_id": None, "pad_token_id": 0, **more}
    with torch.inference_mode():
        out = network.generate(torch.tensor([prompt]), **how)
    return out[0, len(prompt) :].tolist()


def write_gguf(network: Any, arch: str, path: Path, kinds: dict[str, str]) -> None:
    """The network as a GGUF file, its matrices in the type that `kinds` has for a part of their name ("" for the others);
    and the network's own weights become what the file then holds."""
    import gguf
    import torch

    c = network.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_key_length(size := getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], c.num_hidden_layers)
    with torch.no_grad():
        for name, p in network.named_parameters():
            array = p.numpy().astype(np.float32)
            order = None
            if arch == "llama" and (".q_proj." in name or ".k_proj." in name):  # halves of a head become pairs
                order = np.arange(len(array)).reshape(-1, 2, size // 2).swapaxes(1, 2).reshape(-1)
                array = array[order]
            kind = next(k for part, k in kinds.items() if part in name) if array.ndim == 2 else "F32"
            packed = _packed(array, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(names.get_name(name, (".weight", ".bias")), packed, raw_dtype=gguf.GGMLQuantizationType[kind])
            array = gguf.dequantize(packed, gguf.GGMLQuantizationType[kind]).reshape(array.shape)
            if order is not None:
                array = array[np.argsort(order)]
            p.copy_(torch.from_numpy(array + (0 if arch != "gemma" or p.ndim > 1 else -1)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _packed(array: np.ndarray, kind: Any) -> np.ndarray:
    """In the bytes of a type. The gguf package packs no k-quants: those get random bytes with scales of common size."""
    import gguf

    if not kind.name.endswith("_K"):
        return gguf.quantize(array, kind)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    packed = np.random.default_rng(7).integers(0, 256, (len(array), array.shape[1] // block, nbytes), dtype=np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]:
        packed[..., at : at + 2] = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    return packed.reshape(len(array), -1)
