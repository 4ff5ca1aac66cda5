"""Reads a checkpoint's configuration as a DecoderConfig, and maps its tensor names to params of rlx.frontends.models.decoder.

`config_of` reads a Hugging Face config.json; `config_of_gguf` first translates GGUF metadata to the same keys. `param_name` is
the one table from the names in Hugging Face and GGUF files to the names of params.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from rlx.errors import CorruptFileError, ModelError, known
from rlx.frontends.models.decoder import DecoderConfig, Experts, Latent, Rope

LAYER_NORMS = {"norm": "layer", "gated": False}
GEMMA = {"norm_offset": 1.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "tie_word_embeddings": True}
GEMMA_2 = {
    **GEMMA, "post_norms": True, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096
}  # fmt: skip
QWEN = {"sliding_window": 4096, "max_window_layers": 28}
# Fixed properties of each model_type, and defaults of keys that its config.json may omit.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4096},
    "qwen2": {**QWEN, "biases": ("qkv_proj",)},
    "qwen3": {**QWEN, "qk_norm": True, "head_dim": 128},
    "smollm3": {"tie_word_embeddings": True, "rope_theta": 2e6},
    "phi3": {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
    "phi": {**LAYER_NORMS, "parallel": True, "biases": ("qkv_proj", "o_proj", "mlp", "lm_head"), "partial_rotary_factor": 0.5},
    "gpt2": {**LAYER_NORMS, "learned_positions": True, "biases": ("qkv_proj", "o_proj", "mlp"), "tie_word_embeddings": True,
             "max_position_embeddings": 1024},
    "gemma": GEMMA,
    "gemma2": {**GEMMA_2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {**GEMMA_2, "qk_norm": True},
    "mixtral": {"rms_norm_eps": 1e-5, "rope_theta": 1e6, "scoring_func": "top_k_softmax"},
    "qwen2_moe": {**QWEN, "scoring_func": "softmax", "qkv_bias": True},
    "qwen3_moe": {**QWEN, "scoring_func": "softmax", "qk_norm": True},
    "olmoe": {"rms_norm_eps": 1e-5, "scoring_func": "softmax", "wide_qk_norm": True},
    "deepseek_v2": {"scoring_func": "softmax", "interleaved": True, "topk_method": "greedy"},
    "deepseek_v3": {"scoring_func": "sigmoid", "interleaved": True, "topk_method": "noaux_tc", "norm_topk_prob": True,
                    "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
}  # fmt: skip
QWEN_MOE, DEEPSEEK = ("qwen2_moe", "qwen3_moe"), ("deepseek_v2", "deepseek_v3")
# Keys that only these families' networks read; other families ignore them.
READ_BY: dict[str, tuple[str, ...]] = {
    "layer_types": ("qwen2", "qwen3", "smollm3", "gemma2", "gemma3_text", "qwen2_moe"), "no_rope_layers": ("smollm3",),
    "partial_rotary_factor": ("phi", "phi3"), "original_max_position_embeddings": ("phi3",),
    "hidden_activation": ("gemma2", "gemma3_text"), "attn_logit_softcapping": ("gemma2",),
    "final_logit_softcapping": ("gemma2", "gemma3_text"),
    **dict.fromkeys(("decoder_sparse_step", "mlp_only_layers"), QWEN_MOE), "shared_expert_intermediate_size": ("qwen2_moe",),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_freq", "routed_scaling_factor", "n_shared_experts", "n_group",
                     "topk_group", "topk_method", "scoring_func"), DEEPSEEK),
    "qkv_bias": ("qwen2_moe",), "norm_topk_prob": (*QWEN_MOE, "olmoe", *DEEPSEEK),
    "moe_intermediate_size": (*QWEN_MOE, *DEEPSEEK),
}  # fmt: skip
GPT2_KEYS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings", "activation_function": "hidden_act", "layer_norm_epsilon": "layer_norm_eps",
}  # fmt: skip
MOE_KEYS = {"num_local_experts": "num_experts", "n_routed_experts": "num_experts"}
# Unsupported switches that change the arithmetic, with the values that have no effect.
REFUSED: dict[str, tuple[Any, ...]] = {
    "qk_layernorm": (None, False), "use_bidirectional_attention": (None, False), "scale_attn_by_inverse_layer_idx": (None, False),
    "scale_attn_weights": (None, True), "add_cross_attention": (None, False),
}  # fmt: skip
PLAIN = {"attention_bias": (None, False), "mlp_bias": (None, False)}
REFUSED_OF: dict[str, dict[str, tuple[Any, ...]]] = {  # and those of one family
    "olmoe": {"clip_qkv": (None,)},
    # DeepSeek's own code and transformers differ in how V2 renormalises
    "deepseek_v2": {**PLAIN, "norm_topk_prob": (None, False), "scoring_func": ("softmax",),
                    "topk_method": ("greedy", "group_limited_greedy")},
    "deepseek_v3": {**PLAIN, "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
}  # fmt: skip
ROPES = ("default", "dynamic", "linear", "llama3", "yarn", "longrope")
_FACTS = (
    "norm", "gated", "parallel", "post_norms", "qk_norm", "wide_qk_norm", "learned_positions", "norm_offset", "interleaved",
    "biases",
)  # fmt: skip
_MOST = {"num_hidden_layers": 1000, **dict.fromkeys(("head_dim", "qk_rope_head_dim", "num_experts"), 1 << 16)}  # lengths of lists


def config_of(config: Mapping[str, Any], **facts: Any) -> DecoderConfig:
    """From the contents of config.json. `facts`: values that override those of Hugging Face checkpoints of the family.

    ModelError: an unsupported family or option; CorruptFileError: a bad size.
    """
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise ModelError(f"configuration: model_type {family!r} is not supported; supported: {known(FAMILIES)}")
    names = GPT2_KEYS if family == "gpt2" else MOE_KEYS
    given = {names.get(k, k): v for k, v in config.items() if k not in _FACTS}
    given = {k: v for k, v in given.items() if family in READ_BY.get(k, (family,))}
    c: dict[str, Any] = {k: v for k, v in {**FAMILIES[family], **given, **facts}.items() if v is not None}
    for key, allowed in {**REFUSED, **REFUSED_OF.get(family, {})}.items():
        if c.get(key) not in allowed:
            raise ModelError(f"configuration: {key} = {c.get(key)!r} is not supported for {family}")
    hidden, layers, heads = (_size(c, k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    shared = _size(c, "num_key_value_heads", heads)
    if heads % shared or ("head_dim" not in c and hidden % heads):
        raise CorruptFileError(f"configuration: {heads} heads fit neither {shared} key heads nor a hidden_size of {hidden}")
    size, latent = _size(c, "head_dim", hidden // heads), _latent(c, family)
    kinds = _layer_types(c, family, layers)
    ropes = _ropes(c, family, kinds, size if latent is None else latent.rotated)
    scale = 1 / math.sqrt(_size(c, "query_pre_attn_scalar")) if family in ("gemma2", "gemma3_text") else 0.0
    if latent is not None:
        shared, size = 1, latent.plain + latent.rotated
        scale = _latent_gain(c) ** 2 / math.sqrt(size)
    if family == "deepseek_v3" and c.get("rope_interleave") is False:
        c["interleaved"] = False
    c["biases"] = (*c.get("biases", ()), *("qkv_proj", "o_proj") * (c.get("attention_bias") is True))
    c["biases"] += ("mlp",) * (c.get("mlp_bias") is True) + ("qkv_proj",) * (c.get("qkv_bias") is True)
    return DecoderConfig(
        family=family, vocab_size=_size(c, "vocab_size"), hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=shared, head_dim=size, intermediate_size=_size(c, "intermediate_size", 4 * hidden),
        max_position_embeddings=_size(c, "max_position_embeddings", 2048), ropes=ropes,
        windows=tuple(_size(c, "sliding_window") if kind == "sliding_attention" else 0 for kind in kinds),
        eps=_number(c, "rms_norm_eps", _number(c, "layer_norm_eps", 1e-5 if c.get("norm") == "layer" else 1e-6)),
        activation=_activation(c, family),
        tied=c.get("tie_word_embeddings") is True, attention_scale=scale, attention_cap=_number(c, "attn_logit_softcapping", 0.0),
        logit_cap=_number(c, "final_logit_softcapping", 0.0),
        embedding_scale=math.sqrt(hidden) if family.startswith("gemma") else 1.0,
        experts=_experts(c, family, layers), latent=latent, **{f: c[f] for f in _FACTS if f in c},
    )  # fmt: skip


def _activation(c: Mapping[str, Any], family: str) -> str:
    name = str(c.get("hidden_activation") or c.get("hidden_act", "silu" if c.get("gated", True) else "gelu_new"))
    return "gelu_pytorch_tanh" if (family, name) == ("gemma", "gelu") else name  # early files say "gelu" but mean this one


def _size(c: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value, most = c.get(key, default), _MOST.get(key, 2**31 - 1)
    if type(value) is not int or not least <= value <= most:
        size = "a positive size" if least else "a size or 0"
        raise CorruptFileError(f"configuration: {key} must be {size}, at most {most}, got {value!r:.80}")
    return value


def _number(c: Mapping[str, Any], key: str, default: float) -> float:
    value = c.get(key, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e30:
        raise CorruptFileError(f"configuration: {key} must be a number from 0 to 1e30, got {value!r:.80}")
    return float(value)


def _layer_types(c: Mapping[str, Any], family: str, layers: int) -> list[str]:
    """The kind of each layer, "full_attention" or "sliding_attention"; older files imply them by a pattern."""
    kinds = c.get("layer_types")
    if kinds is None:
        window = c.get("sliding_window") is not None
        if family in ("gemma2", "gemma3_text"):
            every = _size(c, "sliding_window_pattern", 2 if family == "gemma2" else 6)  # last of a group: full attention
            kinds = ["full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
        elif family in ("qwen2", "qwen3", "smollm3"):
            first, rotary = _number(c, "max_window_layers", 0), _rotary_layers(c, family, layers)
            window = window and c.get("use_sliding_window") is True
            slides = [window and (not rotary[i] if family == "smollm3" else i >= first) for i in range(layers)]
            kinds = ["sliding_attention" if slide else "full_attention" for slide in slides]
        elif family == "qwen2_moe":
            most = _number(c, "max_window_layers", 0) if window and c.get("use_sliding_window") is True else 0
            kinds = ["sliding_attention" if i % 2 == 0 and i < most else "full_attention" for i in range(layers)]
        else:
            slides = family in ("mistral", "phi3", "mixtral") or (family == "qwen3_moe" and c.get("use_sliding_window") is True)
            kinds = ["sliding_attention" if window and slides else "full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CorruptFileError(f"configuration: layer_types must name {layers} layers, got {str(kinds)[:80]}")
    if other := set(map(str, kinds)) - {"full_attention", "sliding_attention"}:
        raise ModelError(f"configuration: layers of the kind {known(other)} are not supported")
    return kinds


# -- experts and latent attention


def _experts(c: Mapping[str, Any], family: str, layers: int) -> Experts | None:
    """The layers with experts, by one rule for all families, and how a token chooses among the experts."""
    if "scoring_func" not in FAMILIES[family] or (count := _size(c, "num_experts", least=0)) == 0:
        return None
    first, period = _size(c, "first_k_dense_replace", 0, least=0), _size(c, "moe_layer_freq", 1)
    step = _size(c, "decoder_sparse_step", 1)
    dense = c.get("mlp_only_layers", [])
    if not isinstance(dense, list):
        raise CorruptFileError(f"configuration: mlp_only_layers must be a list of layers, got {dense!r:.80}")
    used, grouped = _size(c, "num_experts_per_tok"), c.get("topk_method", "greedy") != "greedy"
    groups, top_groups = (_size(c, k, 1, least=0) or 1 if grouped else 1 for k in ("n_group", "topk_group"))
    members = count // groups
    if count % groups or top_groups > groups or used > top_groups * members or (c["scoring_func"] == "sigmoid" and members < 2):
        raise CorruptFileError(f"configuration: {used} of {count} experts cannot be chosen from {top_groups} of {groups} groups")
    width = _size(c, "moe_intermediate_size" if family in READ_BY["moe_intermediate_size"] else "intermediate_size")
    shared = _size(c, "n_shared_experts", 0, least=0) * width
    if family == "qwen2_moe":
        shared = _size(c, "shared_expert_intermediate_size")
    return Experts(
        layers=tuple(i for i in range(first, layers) if i % period == 0 and (i + 1) % step == 0 and i not in dense),
        count=count, used=used, width=width, scoring=c["scoring_func"], renormalise=c.get("norm_topk_prob") is True,
        scale=_number(c, "routed_scaling_factor", 1.0), groups=groups, top_groups=top_groups, bias=family == "deepseek_v3",
        shared=shared, shared_gate=family == "qwen2_moe",
    )  # fmt: skip


def _latent(c: Mapping[str, Any], family: str) -> Latent | None:
    if family not in DEEPSEEK:
        return None
    rank, plain, rotated, value = (_size(c, k) for k in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    return Latent(rank, plain, rotated, value, q_rank=_size(c, "q_lora_rank") if "q_lora_rank" in c else 0)


def _latent_gain(c: Mapping[str, Any]) -> float:
    """DeepSeek's factor of queries and of keys for positions that yarn has stretched."""
    p = {k: v for k, v in _object(c.get("rope_scaling") or c.get("rope_parameters") or {}).items() if v is not None}
    scaled = p.get("rope_type", p.get("type", "default")) != "default"
    return _gain(_number(p, "factor", 1.0), _number(p, "mscale_all_dim", 0.0)) if scaled else 1.0


# -- rotary positions


def _ropes(c: Mapping[str, Any], family: str, kinds: list[str], size: int) -> tuple[Rope | None, ...]:
    if c.get("learned_positions"):
        return (None,) * len(kinds)
    rope, scaling = c.get("rope_parameters", {}), c.get("rope_scaling", {})
    if not isinstance(rope, dict) or not isinstance(scaling, dict):
        raise CorruptFileError(f"configuration: rope_parameters must be an object, got {str(rope or scaling)[:80]}")
    if family == "gemma3_text":  # scaling and rope_theta apply to layers with full attention
        far = {"rope_theta": c.get("rope_theta", 1e6), **_object(rope.get("full_attention", {})), **scaling}
        near = {"rope_theta": c.get("rope_local_base_freq", 1e4), **_object(rope.get("sliding_attention", {}))}
        by_kind = {"full_attention": far, "sliding_attention": near}
    else:
        by_kind = {kind: _object((scaling or rope).get(kind, scaling or rope)) for kind in set(kinds)}
    made = {kind: _rope(c, p, family, size) for kind, p in by_kind.items()}
    return tuple(made[kind] if on else None for kind, on in zip(kinds, _rotary_layers(c, family, len(kinds))))


def _object(x: Any) -> dict[str, Any]:
    if not isinstance(x, dict):
        raise CorruptFileError("configuration: rope_parameters of each kind of layer must be an object")
    return x


def _rotary_layers(c: Mapping[str, Any], family: str, layers: int) -> list[Any]:
    """For each layer, whether it uses rotary positions."""
    skip = _size(c, "no_rope_layer_interval", 4) if family == "smollm3" else layers + 1
    rotary = c.get("no_rope_layers", [(i + 1) % skip for i in range(layers)])
    if not isinstance(rotary, list) or len(rotary) != layers:
        raise CorruptFileError(f"configuration: no_rope_layers must have {layers} entries")
    return rotary


def _rope(c: Mapping[str, Any], p: Mapping[str, Any], family: str, size: int) -> Rope:
    """Frequencies after the scaling that `p` names: linear (Chen et al. 2023), llama3 (Llama 3.1), yarn (Peng et al. 2023),
    longrope (Ding et al. 2024), and dynamic, which only acts past max_position_embeddings, a length not reached here."""
    p = {k: v for k, v in p.items() if k != "partial_rotary_factor" or family in READ_BY[k]}
    own = {k: v for k, v in {**{k: c.get(k) for k in ("rope_theta", "partial_rotary_factor")}, **p}.items() if v is not None}
    kind = own.get("rope_type", own.get("type", "default"))
    kind = "longrope" if family == "phi3" and kind in ("su", "yarn") else kind  # older names
    theta, share = _number(own, "rope_theta", 10000.0), _number(own, "partial_rotary_factor", 1.0)
    width = int(size * min(share, 2.0))
    if width % 2 or not 2 <= width <= size or theta <= 1:
        raise CorruptFileError(f"configuration: {width} of {size} elements with base {theta} cannot be rotated in pairs")
    f = theta ** -(np.arange(0, width, 2) / width)
    if "rope_factors" in c:  # GGUF keeps llama3's scaling as divisors
        f = f / _divisors(c["rope_factors"], "rope_freqs", len(f))
    scale, most = 1.0, float(_size(c, "max_position_embeddings", 2048))
    if kind not in ROPES:
        raise ModelError(f"configuration: rope_type {kind!r} is not supported; supported: {', '.join(ROPES)}")
    if kind not in ROPES[:2]:
        top = {k: c[k] for k in ("original_max_position_embeddings",) if k in c}
        trained = _number({**own, **top}, "original_max_position_embeddings", most)
        factor = _number(own, "factor", max(most / max(trained, 1), 1.0) if kind == "longrope" else 1.0)
        if factor < 1 or trained < 1:
            raise CorruptFileError(f"configuration: rope scaling by {factor} from {trained} positions has no meaning")
        if kind == "linear":
            f = f / factor
        elif kind == "llama3":
            low, high = _number(own, "low_freq_factor", 1.0), _number(own, "high_freq_factor", 4.0)
            smooth = np.clip((trained * f / (2 * math.pi) - low) / max(high - low, 1e-9), 0, 1)
            f = (1 - smooth) * f / factor + smooth * f
        elif kind == "longrope":
            gain = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 and trained > 1 else 1.0
            near, far = (f / _divisors(own.get(key), key, len(f)) for key in ("short_factor", "long_factor"))
            return Rope(_singles(near), _number(own, "attention_factor", gain), _singles(far), int(trained))
        else:
            f, scale = _yarn(own, f, factor, trained, theta)
    return Rope(_singles(f), scale)


def _singles(f: np.ndarray) -> tuple[float, ...]:
    return tuple(float(x) for x in f.astype(np.float32))


def _divisors(given: Any, name: str, count: int) -> np.ndarray:
    try:
        found = np.asarray(given, np.float64)
    except (TypeError, ValueError, OverflowError):
        found = np.empty(0)
    if found.shape != (count,) or not ((found > 0) & np.isfinite(found)).all():
        raise CorruptFileError(f"configuration: {name} must be {count} positive numbers, got {str(given)[:80]}")
    return found


def _yarn(p: Mapping[str, Any], f: np.ndarray, factor: float, trained: float, theta: float) -> tuple[np.ndarray, float]:
    """(frequencies, scale of cosine and sine): high frequencies stay, low ones are interpolated, with a ramp in between."""
    ends, width = [], 2 * len(f)
    for key, default, rounded in (("beta_fast", 32.0, math.floor), ("beta_slow", 1.0, math.ceil)):
        rotations = _number(p, key, default) or default
        if rotations < 1e-30:
            raise CorruptFileError(f"configuration: {key} = {rotations} is too small a number of rotations")
        at = width * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        ends.append(rounded(at) if p.get("truncate", True) else at)
    low, high = max(ends[0], 0), min(ends[1], width - 1)
    ramp = np.clip((np.arange(width // 2) - low) / ((high - low) or 0.001), 0, 1)

    both = _number(p, "mscale", 0.0), _number(p, "mscale_all_dim", 0.0)
    scale = _gain(factor, both[0]) / _gain(factor, both[1]) if all(both) else _gain(factor)
    return f / factor * ramp + f * (1 - ramp), _number(p, "attention_factor", scale)


def _gain(factor: float, m: float = 1.0) -> float:
    return 0.1 * m * math.log(factor) + 1 if factor > 1 else 1.0


# -- GGUF

ARCHITECTURES = {  # general.architecture -> model_type
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "smollm3": "smollm3", "phi3": "phi3", "phi2": "phi", "gpt2": "gpt2",
    "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "olmoe": "olmoe", "deepseek2": "deepseek_v2",
}  # fmt: skip
GGUF_KEYS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "context_length": "max_position_embeddings", "rope.freq_base": "rope_theta",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps", "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size", "expert_weights_norm": "norm_topk_prob",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size", "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace", "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim",
}  # fmt: skip
GGUF_SCALING = {
    "type": "rope_type", "factor": "factor", "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip
GGUF_SOFTMAX, GGUF_GATING = 1, {"deepseek_v3": 2}  # expert_gating_func, of all others and by family
GGUF_DEEPSEEK = {"norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
REFUSED_GGUF: dict[str, tuple[Any, ...]] = {  # as REFUSED, for keys without the architecture's prefix
    "attention.causal": (True,), "attention.clamp_kqv": (0.0,), "attention.scale": (0.0,),
    "logit_scale": (1.0, 0.0), "residual_scale": (1.0, 0.0), "embedding_scale": (1.0, 0.0), "rope.scale_linear": (1.0,),
    "rope.scaling.attn_factor": (1.0,), "rope.scaling.yarn_attn_factor": (1.0,), "rope.scaling.yarn_ext_factor": (1.0, -1.0),
}  # fmt: skip


def config_of_gguf(metadata: Mapping[str, Any], names: Collection[str], vocab: int, factors: np.ndarray | None) -> DecoderConfig:
    """From GGUF metadata. `names`: the params that the file has; `vocab`: number of rows of the embedding table; `factors`: the
    tensor rope_freqs, divisors of the frequencies."""
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in ARCHITECTURES:
        raise ModelError(f"general.architecture {arch!r} is not supported; supported: {known(ARCHITECTURES)}")
    family, c = _family_and_keys(metadata, arch)
    c |= {"model_type": family, "vocab_size": vocab, "tie_word_embeddings": "lm_head.weight" not in names}
    own = {"qkv_proj": r"self_attn\.q\w*_proj", "o_proj": r"self_attn\.o_proj", "mlp": r"mlp\.down_proj", "lm_head": "lm_head"}
    biases = tuple(b for b, name in own.items() if any(re.search(rf"{name}\.bias$", n) for n in names))
    facts: dict[str, Any] = {"norm_offset": 0.0, "biases": biases, "rope_factors": factors}
    facts["interleaved"] = arch in ("llama", "deepseek2")
    refused, mixed = dict(REFUSED_GGUF), "scoring_func" in FAMILIES[family]
    refused |= {"expert_gating_func": (GGUF_GATING.get(family, GGUF_SOFTMAX),)} if mixed else {"expert_count": (0,)}
    if family not in DEEPSEEK:
        refused["attention.value_length"] = (c["head_dim"],)
        if "qk_rope_head_dim" in c:
            facts["partial_rotary_factor"] = _number(c, "qk_rope_head_dim", 0) / _size(c, "head_dim")
    for key, allowed in refused.items():
        if str(found := metadata.get(f"{arch}.{key}", allowed[0])) not in map(str, allowed):  # the value may be an array
            raise ModelError(f"metadata {arch}.{key} = {str(found)[:80]} is not supported")
    scaling = {new: metadata[key] for old, new in GGUF_SCALING.items() if (key := f"{arch}.rope.scaling.{old}") in metadata}
    if str(scaling.get("rope_type", "none")) != "none":
        c["rope_scaling"] = {**scaling, "rope_type": str(scaling["rope_type"])}
        if family in DEEPSEEK:  # the file has a tenth of mscale_all_dim; cosine and sine are not scaled
            tenth = _number(metadata, f"{arch}.rope.scaling.yarn_log_multiplier", 0.0)
            c["rope_scaling"] |= {"attention_factor": 1.0, "mscale_all_dim": 10 * tenth}
    if arch in ("gemma2", "gemma3"):
        # 27B models scale scores by hidden_size / heads, which is not in the file; all others by the head size
        large = c.get("num_hidden_layers") == (46 if arch == "gemma2" else 62)
        c["query_pre_attn_scalar"] = _size(c, "hidden_size") // _size(c, "num_attention_heads") if large else c["head_dim"]
    return config_of(c, **facts)


def _family_and_keys(metadata: Mapping[str, Any], arch: str) -> tuple[str, dict[str, Any]]:
    """The model_type that an architecture stands for in this file, and the keys of its config.json."""
    c: dict[str, Any] = {new: metadata[f"{arch}.{old}"] for old, new in GGUF_KEYS.items() if f"{arch}.{old}" in metadata}
    family = ARCHITECTURES[arch]
    if family == "llama" and str(c.get("num_experts", 0)) != "0":
        family = "mixtral"
    if family != "deepseek_v2":
        if "head_dim" not in c:  # a family's own default is for Hugging Face files
            c["head_dim"] = _size(c, "hidden_size") // _size(c, "num_attention_heads")
        return family, {"norm_topk_prob": family == "qwen3_moe", "qkv_bias": False, **c}
    if str(metadata.get(f"{arch}.expert_gating_func")) == str(GGUF_GATING["deepseek_v3"]):
        family = "deepseek_v3"
    elif str(c.get("n_group", 1)) not in ("0", "1"):
        c["topk_method"] = "group_limited_greedy"
    # Sizes of a head: newer files call them so, and give those of the latent space as key_length, value_length and head_count_kv
    own = {k: metadata.get(f"{arch}.attention.{k}") for k in ("key_length", "value_length", "key_length_mla", "value_length_mla")}
    key, value = (own[k] if own[f"{k}_mla"] is None else own[f"{k}_mla"] for k in ("key_length", "value_length"))
    c |= {"qk_nope_head_dim": _size({"key_length": key}, "key_length") - _size(c, "qk_rope_head_dim"), "v_head_dim": value}
    c |= {"num_key_value_heads": c.get("num_attention_heads"), "head_dim": c["qk_rope_head_dim"]}
    return family, {**GGUF_DEEPSEEK, **c}


_LAYER = re.compile(r"(?:blk|h|model\.layers)\.(\d+)\.(.+)")
_NAMES = {  # the part after the layer number; other names are those of Llama
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "token_embd": "model.embed_tokens", "position_embd": "model.embed_positions", "output_norm": "model.norm",
    "output": "lm_head",
    "ln_1": "input_layernorm", "ln_2": "post_attention_layernorm", "attn.c_attn": "self_attn.qkv_proj",
    "attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj",
    "wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm",
    "ffn_gate_inp": "mlp.gate", "exp_probs_b": "mlp.gate", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj", "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj", "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj", "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "attn_q_a": "self_attn.q_a_proj", "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_b": "self_attn.kv_b_proj", "attn_k_b": "self_attn.k_b_proj", "attn_v_b": "self_attn.v_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm", "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj",
    "model.final_layernorm": "model.norm",
}  # fmt: skip
_OWN_NAMES = {  # by model_type, before _NAMES
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3_text": {"ffn_norm": "pre_feedforward_layernorm"},
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
}


_EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")
_PARTS_OF_EXPERTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def param_name(name: str, family: str) -> str:
    """The param for the tensor `name` in a checkpoint of `family` (a model_type), or the part of a param: one projection of one
    expert, `….mlp.experts.E.gate_proj.weight`."""
    stem, _, kind = name.removeprefix("transformer.").rpartition(".")
    table = {**_NAMES, **_OWN_NAMES.get(family, {})}
    if stem.endswith(".experts"):  # all experts in one tensor
        stem, kind = f"{stem}.{kind}", "weight"
    kind = kind.replace("e_score_correction_bias", "bias")
    if inner := _LAYER.fullmatch(stem):
        part = table.get(inner[2], inner[2]).replace("block_sparse_moe.", "mlp.").replace("shared_expert.", "shared_experts.")
        if of := _EXPERT.fullmatch(part):
            part = f"mlp.experts.{of[1]}.{_PARTS_OF_EXPERTS.get(of[2], of[2])}"
        return f"model.layers.{inner[1]}.{part}.{kind}"
    return f"{table.get(stem, stem)}.{kind}"
