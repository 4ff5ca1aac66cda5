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
    "mscale_all_dim": 0.7, "beta_fast": 5.0, "beta_slow": 0.5,
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
    "deepseek_v2": (
        "DeepseekV2", {**MLA, "q_lora_rank": None, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
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


def talker(folder: Path, template: str | None = CHATML, family: str = "qwen3", **more: Any) -> Any:
    """A random network of a family with a tokenizer of bytes, and a chat template. Its answers are long and make no sense."""
    import tokenizers
    import transformers

    network = make(family, folder, vocab_size=300, gain=4.0, **more)
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


def write_gguf(network: Any, arch: str, path: Path, kinds: dict[str, str], split_latent: bool = True) -> None:
    """The network as a GGUF file, its matrices in the type that `kinds` has for a part of their name ("" for the others);
    and the network's own weights become what the file then holds. `split_latent`: DeepSeek's projections of latents are split
    and transposed, as in files since 2025."""
    import gguf
    import torch

    c = network.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_rope_freq_base(c.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    size = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    if arch != "deepseek2":
        writer.add_head_count_kv(c.num_key_value_heads)
        writer.add_key_length(size)
    _write_experts(writer, c, split_latent)
    names = gguf.get_tensor_name_map(next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == arch), c.num_hidden_layers)
    with torch.no_grad():
        for name, p in [*network.named_parameters(), *(b for b in network.named_buffers() if "correction" in b[0])]:
            for part, own in _written_apart(name, p, c, split_latent):
                array = own.numpy().astype(np.float32)
                order = None
                if arch == "llama" and (".q_proj." in name or ".k_proj." in name):  # halves of a head become pairs
                    order = np.arange(len(array)).reshape(-1, 2, size // 2).swapaxes(1, 2).reshape(-1)
                    array = array[order]
                plain = array.ndim < 2 or name.endswith("mlp.gate.weight")
                kind = gguf.GGMLQuantizationType["F32" if plain else next(k for of, k in kinds.items() if of in part)]
                packed = _packed(array, kind)
                writer.add_tensor(names.get_name(part, (".weight", ".bias")) or part, packed, raw_dtype=kind)
                array = gguf.dequantize(packed, kind).reshape(array.shape)
                if order is not None:
                    array = array[np.argsort(order)]
                own.copy_(torch.from_numpy(array + (0 if arch != "gemma" or p.ndim > 1 else -1)))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_experts(writer: Any, c: Any, split_latent: bool) -> None:
    """The keys of models with experts and of latent attention."""
    import gguf

    if not (count := next((n for k in ("n_routed_experts", "num_local_experts", "num_experts") if (n := getattr(c, k, 0))), 0)):
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(c.num_experts_per_tok)
    if hasattr(c, "moe_intermediate_size"):
        writer.add_expert_feed_forward_length(c.moe_intermediate_size)
    if hasattr(c, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if (rank := getattr(c, "kv_lora_rank", 0)) == 0:
        return
    sigmoid = c.model_type == "deepseek_v3"
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    writer.add_expert_weights_norm(sigmoid)
    writer.add_expert_weights_scale(c.routed_scaling_factor)
    writer.add_expert_shared_count(c.n_shared_experts)
    writer.add_leading_dense_block_count(c.first_k_dense_replace)
    writer.add_expert_group_count(c.n_group)
    writer.add_expert_group_used_count(c.topk_group)
    writer.add_kv_lora_rank(rank)
    if c.q_lora_rank is not None:
        writer.add_q_lora_rank(c.q_lora_rank)
    rope, key = c.rope_parameters, c.qk_nope_head_dim + c.qk_rope_head_dim
    writer.add_rope_dimension_count(c.qk_rope_head_dim)
    writer.add_head_count_kv(1 if split_latent else c.num_attention_heads)
    writer.add_key_length(rank + c.qk_rope_head_dim if split_latent else key)
    writer.add_value_length(rank if split_latent else c.v_head_dim)
    if split_latent:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(c.v_head_dim)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])


def _written_apart(name: str, p: Any, c: Any, split_latent: bool) -> list[tuple[str, Any]]:
    """The tensors that a file has for a parameter, as views of it: gate and up, keys and values are apart."""
    layer = name.split(".")[2] if ".layers." in name else ""
    if name.endswith("experts.gate_up_proj"):
        gate, up = p.chunk(2, dim=1)
        return [(f"blk.{layer}.ffn_gate_exps.weight", gate), (f"blk.{layer}.ffn_up_exps.weight", up)]
    if name.endswith("experts.down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.weight", p)]
    if "correction" in name:
        return [(f"blk.{layer}.exp_probs_b.bias", p)]
    if "shared_expert_gate" in name:
        return [(name, p[0])]
    if "kv_b_proj" in name and split_latent:
        heads = p.view(c.num_attention_heads, c.qk_nope_head_dim + c.v_head_dim, c.kv_lora_rank)
        key, value = heads.split((c.qk_nope_head_dim, c.v_head_dim), dim=1)
        return [(f"blk.{layer}.attn_k_b.weight", key.transpose(1, 2)), (f"blk.{layer}.attn_v_b.weight", value)]
    return [(name, p)]


def _packed(array: np.ndarray, kind: Any) -> np.ndarray:
    """In the bytes of a type. The gguf package packs no k-quants: those get random bytes with scales of common size."""
    import gguf

    if not kind.name.endswith("_K"):
        return gguf.quantize(np.ascontiguousarray(array), kind)
    block, nbytes = gguf.GGML_QUANT_SIZES[kind]
    *rows, columns = array.shape
    packed = np.random.default_rng(7).integers(0, 256, (*rows, columns // block, nbytes), dtype=np.uint8)
    for at in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind.name]:
        packed[..., at : at + 2] = np.frombuffer(np.float16(2e-4).tobytes(), np.uint8)
    return packed.reshape(*rows, -1)
