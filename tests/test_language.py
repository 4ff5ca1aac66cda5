"""Language models of every family against transformers, step by step; GGUF files against the gguf package's dequantisation;
checkpoints that are not as they should be. Networks are small and random (tests/small_models.py)."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_models
from small_models import FAMILIES, VOCAB, logits, make, write_gguf

from rlx.errors import (
    BindingError,
    CorruptFileError,
    IndexRangeError,
    InputDTypeError,
    InputShapeError,
    ModelError,
    OptionError,
    Unsupported,
)
from rlx.frontends.checkpoint import Checkpoint
from rlx.frontends.gguf import read_gguf
from rlx.frontends.language import LADDER, LanguageModel, load
from rlx.frontends.models import families
from rlx.frontends.models.decoder import build
from rlx.frontends.sampling import Sampling
from rlx.ir.evaluate import evaluate

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
CLOSE = 1e-4  # of the largest logit
SEEDS = {"gemma": 3, "gemma2": 2, "qwen3_moe": 1, "deepseek_v2": 2, "deepseek_v3": 2}  # of networks without a near tie
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 80)).astype(np.int32)
LATENT = {
    "moe_intermediate_size": 256, "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32,
    "v_head_dim": 64, "head_dim": 32,
}  # fmt: skip
# in GGUF: architecture, and types by a part of the matrices' names
FILES = {
    "f32": ("llama", "llama", {"": "F32"}),
    "q8_0 and bias": ("llama-biases-llama3", "llama", {"": "Q8_0"}),
    "q4_0, f16": ("llama", "llama", {"v_proj": "Q8_0", "embed": "F16", "": "Q4_0"}),
    "q4_k, q6_k": ("qwen2-full", "qwen2", {"v_proj": "Q6_K", "down": "Q6_K", "": "Q4_K"}),
    "q5_k": ("qwen3", "qwen3", {"": "Q5_K"}),
    "gemma": ("gemma", "gemma", {"": "Q8_0"}),
    "experts of llama": ("mixtral", "llama", {"": "Q8_0"}),
    "experts in f32": ("olmoe", "olmoe", {"": "F32"}),
    "shared experts": ("qwen2_moe", "qwen2moe", {"shared_expert": "Q8_0", "down": "Q6_K", "ffn_up_exps": "Q5_K", "": "Q4_K"}),
    "experts in bf16": ("qwen3_moe", "qwen3moe", {"": "BF16"}),
    "latents, old": ("deepseek_v2", "deepseek2", {"down": "Q6_K", "": "Q4_K"}),
    "latents": ("deepseek_v3", "deepseek2", {"exps": "Q4_K", "": "Q8_0"}),
}
EVERY_LAYER = {"mlp_only_layers": [], "decoder_sparse_step": 1}
LARGER = {  # sizes that whole blocks divide, and what files of an architecture do not say
    "mixtral": {"sliding_window": None}, "olmoe": {"num_key_value_heads": 4},
    "qwen2_moe": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 512, **EVERY_LAYER},
    "qwen3_moe": {"moe_intermediate_size": 256, **EVERY_LAYER},
    "deepseek_v2": LATENT,
    "deepseek_v3": {**LATENT, "rope_parameters": {**small_models.STRETCHED, "mscale": 0.7}},
}  # fmt: skip


def off(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found - want).max() / np.abs(want).max())


def make_gguf(which: str, folder: Path):
    """The network whose weights are those of the file, and the file."""
    family, arch, kinds = FILES[which]
    plain = {"rope_type": "default", "rope_theta": 1e4}
    more = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64, "rope_parameters": plain}
    network = make(family, folder / "folder", **{**more, **LARGER.get(family, {})})
    write_gguf(network, arch, folder / "model.gguf", kinds, split_latent="old" not in which)
    return network, folder / "model.gguf"


@pytest.fixture(scope="module", params=FAMILIES)
def family(request) -> str:
    """The tests of a family follow each other, and share what they compile."""
    return request.param


@pytest.fixture(scope="module")
def loaded(family, tmp_path_factory) -> tuple[Any, LanguageModel]:
    """A family's network whose layers matter and that has no near tie, by transformers and here."""
    folder = tmp_path_factory.mktemp(family)
    return make(family, folder, seed=SEEDS.get(family, 4), gain=4.0), load(folder, capacity=208)


# -- what the graph means, by the reference evaluator alone: no compiler, no backend


def test_the_graph_computes_what_transformers_does(family, tmp_path):
    """Two sequences in padded chunks, with rubbish in the padding; the state is carried from graph to graph."""
    network = make(family, tmp_path)
    checkpoint = Checkpoint(tmp_path)
    want, state, at = logits(network, TOKENS[:, :30]), {}, 0
    for size, count in ((8, 5), (8, 7), (1, 1), (16, 11), *[(1, 1)] * 6):
        graph = build(checkpoint.config, 2, size, 48, checkpoint.formats)
        chunk = np.full((2, size), VOCAB - 1, np.int32)
        chunk[:, :count] = TOKENS[:, at : at + count]
        params = {str(p.name): checkpoint.read(str(p.name)) for p in graph.params}
        (found,), state = evaluate(graph, {"tokens": chunk, "count": np.array(count, np.int32)}, params, state)
        at += count
        assert off(found, want[:, at - 1]) < 1e-5, f"after {at} tokens"
    assert state["position"] == at == 30


def whole(checkpoint: Checkpoint, tokens: np.ndarray) -> np.ndarray:
    """f32 [batch, length, vocab] by the reference evaluator."""
    graph = build(checkpoint.config, *tokens.shape, tokens.shape[1], checkpoint.formats, all_logits=True)
    params = {str(p.name): checkpoint.read(str(p.name)) for p in graph.params}
    (found,), _ = evaluate(graph, {"tokens": tokens, "count": np.array(tokens.shape[1], np.int32)}, params)
    return found


@pytest.mark.parametrize("which", FILES)
def test_a_gguf_file_means_what_its_blocks_decode_to(which, tmp_path):
    network, file = make_gguf(which, tmp_path)
    checkpoint = Checkpoint(file)
    found, want = set(checkpoint.formats.values()), {k.lower() for k in FILES[which][2].values()}
    assert found == want or (checkpoint.config.experts and found == {*want, "f32"})  # routers and turned matrices are f32
    checkpoint = Checkpoint(file, "f32") if "bf16" in want else checkpoint  # bf16 weights would round what they multiply
    assert off(whole(checkpoint, TOKENS[:, :12]), logits(network, TOKENS[:, :12])) < CLOSE


@pytest.mark.parametrize(("weights", "close"), [("bf16", 0.05), ("f16", 0.01), ("int8", 0.05), ("int4", 0.4)])
def test_narrower_weights(weights, close, tmp_path):
    network = make("llama", tmp_path)
    checkpoint = Checkpoint(tmp_path, weights)
    assert set(checkpoint.formats.values()) == {weights}
    assert 0 < off(whole(checkpoint, TOKENS[:, :12]), logits(network, TOKENS[:, :12])) < close


def test_shards_and_stored_bf16(tmp_path):
    network = make("qwen2", tmp_path / "one")
    network.to(torch.bfloat16).save_pretrained(tmp_path / "many", max_shard_size="10KB")
    assert (tmp_path / "many" / "model.safetensors.index.json").is_file()
    narrow = Checkpoint(tmp_path / "many")
    assert set(narrow.formats.values()) == {"bf16"} and narrow.read("model.norm.weight").dtype == np.float32
    assert 0 < off(whole(narrow, TOKENS[:, :9]), whole(Checkpoint(tmp_path / "one"), TOKENS[:, :9])) < 0.05
    wide = Checkpoint(tmp_path / "many", "f32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many", dtype=torch.float32).eval()
    assert off(whole(wide, TOKENS[:, :9]), logits(again, TOKENS[:, :9])) < 1e-5


# -- compiled


def test_logits_step_by_step(loaded):
    """Prefill in chunks, then 64 decode steps."""
    network, model = loaded
    model.reset()
    want, at = logits(network, TOKENS[:1, :77]), 0
    for count in (5, 7, 1, *[1] * 64):
        found = model.step(TOKENS[0, at : at + count])
        at += count
        assert off(found, want[:, at - 1]) < CLOSE, f"after {at} tokens"
    assert model.position == at == 77


class RoundedCache(transformers.DynamicCache):
    """transformers' cache, of which keys and values are rounded to a dtype as they come."""

    dtype = torch.float32

    def update(self, key_states, value_states, *args, **kwargs):
        rounded = (x.to(self.dtype).float() for x in (key_states, value_states))
        return super().update(*rounded, *args, **kwargs)


@pytest.mark.parametrize(("cache", "off_f32"), [("bf16", 0.02), ("f16", 0.003)])
@pytest.mark.parametrize("name", ["qwen3", "gemma2"])
def test_sixteen_bit_caches(name, cache, off_f32, tmp_path):
    """As transformers with a cache rounded likewise; a number that lies between two may fall to either. Near f32's."""
    network = make(name, tmp_path)
    model = load(tmp_path, capacity=40, cache=cache)
    full, bytes_f32 = load(tmp_path, capacity=40), load(tmp_path, capacity=40).memory()["handles"]
    assert model.memory()["handles"] - 4 == pytest.approx((bytes_f32 - 4) / 2, abs=256)
    past, at = RoundedCache(config=network.config), 0
    past.dtype = getattr(torch, {"bf16": "bfloat16", "f16": "float16"}[cache])
    for count in (9, 5, *[1] * 12):
        chunk = TOKENS[0, at : at + count]
        with torch.no_grad():
            want = network(torch.from_numpy(chunk[None].astype(np.int64)), past_key_values=past).logits[0, -1].numpy()
        found = model.step(chunk)
        assert off(found[0], want) < off_f32 / 10, f"after {at} tokens"
        assert 0 < off(found, full.step(chunk)) < off_f32
        at += count


def test_greedy_tokens_are_the_same_for_200_steps(loaded):
    """Chosen on the device, each from the one before: every one has transformers' largest logit behind those before it, so they
    are what transformers would choose. No step is a near tie: by its logits the runner-up is further behind than twice what the
    logits of both may differ by."""
    (network, model), prompt = loaded, TOKENS[0, :8].tolist()
    model.reset()
    decoding = model.decoding(Sampling(), seed=0)
    found = [decoding.first(prompt), *(decoding.next() for _ in range(199))]
    *scores, last = logits(network, np.array([prompt + found]))[0, 7:]
    second, first = np.sort(scores, axis=-1)[:, -2:].T
    assert ((first - second) / np.abs(scores).max(axis=-1)).min() > 2 * CLOSE and len(set(found)) >= 10
    assert found == np.argmax(scores, axis=-1).tolist()
    assert off(model.step(found[-1:])[0], last) < CLOSE


def test_a_batch_and_a_second_start(tmp_path):
    network = make("llama", tmp_path)
    model = load(tmp_path, capacity=40, batch=2)
    want = logits(network, TOKENS[:, :13])
    for _ in range(2):
        assert model.position == 0
        assert off(model.step(TOKENS[:, :11]), want[:, 10]) < CLOSE
        assert off(model.step(TOKENS[:, 11:13]), want[:, 12]) < CLOSE
        model.reset()


@pytest.mark.parametrize("which", FILES)
def test_a_gguf_file_steps(which, tmp_path):
    """Activations may be rounded to 8 bits on the way into a product with packed weights."""
    network, file = make_gguf(which, tmp_path)
    model = load(file, capacity=32)
    want = logits(network, TOKENS[:1, :12])
    close = CLOSE if which == "f32" else 0.05
    assert off(model.step(TOKENS[0, :10]), want[:, 9]) < close
    assert off(model.step(TOKENS[0, 10:11]), want[:, 10]) < close


def test_one_copy_of_weights_and_state(tmp_path):
    make("qwen3", tmp_path)
    seen: list[tuple[int, int]] = []
    model = load(tmp_path, capacity=40, progress=lambda done, total: seen.append((done, total)))
    model.step(TOKENS[0, :1])
    assert seen and seen[-1][0] == seen[-1][1] and [d for d, _ in seen] == sorted(d for d, _ in seen)
    before = len(seen), model.params.nbytes()
    model.step(TOKENS[0, :20])
    assert len(seen) == before[0] and model.params.nbytes() < 1.01 * before[1]  # a few positions of its own
    assert model.executable(32).handles is model.executable(1).handles and model.position == 21


def test_decoding_allocates_and_compiles_nothing(tmp_path):
    make("gemma3", tmp_path, max_position_embeddings=1100)
    model = load(tmp_path, capacity=1100)
    model.step(TOKENS[0, :9])
    model.step([3])
    compiled = model.executable(1)
    before, places = compiled.allocations(), {n: e.block.address for n, e in model.handles.entries.items()}
    for i in range(1000):
        model.step([i % VOCAB])
    after = compiled.allocations()
    assert (after.native_count, after.native_live_bytes) == (before.native_count, before.native_live_bytes)
    assert {n: e.block.address for n, e in model.handles.entries.items()} == places and model.position == 1010
    ids, count = compiled.input_view("tokens"), compiled.input_view("count")
    blocks = sys.getallocatedblocks()
    for _ in range(50):
        compiled.run_slots((ids, count))
    assert abs(sys.getallocatedblocks() - blocks) < 5


def test_a_fork_goes_its_own_way(tmp_path):
    network = make("qwen2", tmp_path)
    model = load(tmp_path, capacity=40)
    model.step(TOKENS[0, :11])
    trunk, (branch,) = model.handles, model.handles.fork(1)
    first = model.step(TOKENS[0, 11:20])
    model.use_handles(branch)
    assert model.position == 11
    other = np.concatenate([TOKENS[0, :11], TOKENS[1, 11:13]])[None]
    assert off(model.step(TOKENS[1, 11:13]), logits(network, other)[:, -1]) < CLOSE
    model.use_handles(trunk)
    assert model.position == 20 and off(first, logits(network, TOKENS[:1, :20])[:, -1]) < CLOSE


def test_a_state_of_another_model_changes_nothing(tmp_path):
    make("llama", tmp_path)
    model, other = load(tmp_path, capacity=32), load(tmp_path, capacity=64)
    model.step([1, 2, 3])
    other.step([4])
    want = model.handles.fork(1)[0]
    for store in (other.handles, 3, None):
        with pytest.raises(BindingError):
            model.use_handles(store)
        assert model.position == 3
    found = model.step([5])
    model.use_handles(want)
    assert (model.step([5]) == found).all()


def test_memory_is_known_before_and_is_what_is_taken(tmp_path):
    make("qwen3", tmp_path)
    model = load(tmp_path, capacity=40)
    stated = model.memory(prompt=20)
    assert model.params is None and not model.handles.entries
    c = model.config
    assert stated["handles"] >= 2 * 4 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 40
    model.step(TOKENS[0, :20])
    model.step(TOKENS[0, :1])
    assert stated["params"] + stated["prepared"] == pytest.approx(model.params.nbytes(), rel=0.01)
    arenas = sum(model.executable(n).memory_plan().arena_bytes for n in (1, 32))
    assert stated["arena"] == arenas


def test_tokens_that_do_not_fit(tmp_path):
    make("llama", tmp_path)
    model = load(tmp_path, capacity=10)
    first = model.step(TOKENS[0, :9])
    for bad, error in (
        (TOKENS[0, :2], IndexRangeError), ([VOCAB], IndexRangeError), ([-1], IndexRangeError), ([0.5], InputDTypeError),
        ([[1], [2]], InputShapeError), (np.zeros((1, 0), int), InputShapeError),
        ([[1, 2], [3]], InputShapeError), ([], InputShapeError),
    ):  # fmt: skip
        with pytest.raises(error):
            model.step(bad)
        assert model.position == 9
    model.step([3])
    model.reset()
    np.testing.assert_array_equal(model.step(TOKENS[0, :9]), first)


def test_chunks_cover_a_prompt(tmp_path):
    make("llama", tmp_path)
    model = LanguageModel(tmp_path, capacity=256)
    for length in range(1, 257):
        left, room, sizes = length, 256, []
        while left > 0:
            sizes.append(model.chunk_size(left, room))
            assert sizes[-1] in LADDER and sizes[-1] <= room
            count = min(sizes[-1], left)
            left, room = left - count, room - count
        assert sum(sizes) < 2 * length + LADDER[1]
        assert sizes == sorted(sizes, reverse=True) or sum(sizes) <= length + LADDER[1]


# -- checkpoints that are not as they should be


def edit(path: Path, **changes) -> None:
    config = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in {**config, **changes}.items() if v != "absent"}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "mamba"}, ModelError, "model_type 'mamba' is not supported; supported: 'deepseek_v2'"),
        ({"hidden_act": "mish"}, ModelError, "activation 'mish' is not supported; supported: 'gelu'"),
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, ModelError, "rope_type 'spiral' is not supported"),
        ({"rope_parameters": {"rope_type": "longrope", "short_factor": [1, 2, "x", 4]}}, CorruptFileError, "must be 4 positive"),
        ({"rope_parameters": [1]}, CorruptFileError, "rope_parameters must be an object"),
        ({"rope_parameters": {"rope_type": "linear", "factor": -1}}, CorruptFileError, "factor must be a number"),
        ({"quantization_config": {"quant_method": "awq"}}, ModelError, "quantization_config"),
        ({"hidden_size": -1}, CorruptFileError, "hidden_size must be a positive size, at most 2147483647, got -1"),
        ({"num_hidden_layers": 2**30}, CorruptFileError, "num_hidden_layers must be a positive size, at most 1000"),
        ({"head_dim": 2**30}, CorruptFileError, "head_dim must be a positive size"),
        ({"vocab_size": "many"}, CorruptFileError, "vocab_size must be a positive size"),
        ({"vocab_size": "absent"}, CorruptFileError, "vocab_size must be a positive size.* got None"),
        ({"rms_norm_eps": "small"}, CorruptFileError, "rms_norm_eps must be a number"),
        ({"num_key_value_heads": 3}, CorruptFileError, "4 heads fit neither 3 key heads"),
        ({"intermediate_size": 41}, CorruptFileError, r"gate_up_proj.weight' is .*the configuration asks for f32\[82,24\]"),
        ({"num_hidden_layers": 4}, ModelError, "the weights lack"),
        ({"num_hidden_layers": 2}, ModelError, "no use for the tensors 'model.layers.2"),
        ({"attention_bias": True}, ModelError, r"lack .* tensors: .*o_proj.bias"),
        ({"layer_types": ["full_attention"]}, CorruptFileError, "layer_types must name 3 layers"),
        ({"layer_types": ["full_attention", "full_attention", "linear_attention"]}, ModelError, "kind 'linear_attention'"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_config(tmp_path, changes, error, message):
    make("qwen2-full" if "layer_types" in changes else "llama", tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(error, match=message):
        load(tmp_path)


LONG = {"rope_type": "longrope", "short_factor": [1.1, 1.2, 1.4], "long_factor": [2.0, 3.0, 4.0], "rope_theta": 1e4}
SPREAD = {"rope_type": "linear", "factor": 8.0}
# Edits of a config.json: "" takes a key out. Every family gets each of them.
EDITS: list[dict] = [
    *({key: ""} for key in (
        "rope_parameters", "rms_norm_eps", "layer_norm_eps", "hidden_act", "hidden_activation", "sliding_window", "layer_types",
        "query_pre_attn_scalar", "no_rope_layers", "tie_word_embeddings", "attn_logit_softcapping", "final_logit_softcapping",
    )),
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
    {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_parameters": ""},
    {"hidden_act": "gelu", "hidden_activation": "relu"}, {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    {"layer_types": "", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    {"no_rope_layers": [0, 1, 1], "no_rope_layer_interval": 2}, {"partial_rotary_factor": 0.5, "rope_parameters": ""},
    {"query_pre_attn_scalar": 3, "qk_norm": True, "parallel": True, "layer_norm_epsilon": 0.5},
    {"rope_local_base_freq": 3e3, "rope_theta": 5e5, "rope_parameters": "", "rope_scaling": SPREAD, "layer_types": ""},
]  # fmt: skip
# And single ones of one family, with the sizes it is made with.
SINGLE: list[tuple[str, dict, dict]] = [
    ("phi3", {"rope_parameters": LONG}, {}), ("phi3", {"rope_parameters": LONG}, {"original_max_position_embeddings": 8}),
    ("phi3", {"rope_parameters": LONG}, {"rope_parameters": {**LONG, "rope_type": "su", "original_max_position_embeddings": 9}}),
    ("llama", {"head_dim": 6, "rope_parameters": {**LONG, "original_max_position_embeddings": 8, "attention_factor": 1.3}}, {}),
    ("llama", {}, {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e3}}),
    ("phi3", {"hidden_size": 32}, {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 1e3}}),
    ("qwen2", {}, {"layer_types": "", "use_sliding_window": True, "max_window_layers": 0, "sliding_window": 3}),
]


@pytest.mark.parametrize("name", [*(n for n in FAMILIES if "-" not in n and n != "gpt2"), *range(len(SINGLE))])
def test_a_config_is_read_as_transformers_reads_it(name, tmp_path):
    """Missing keys, keys of other families, and old spellings: the same logits, or an error where it has one too."""
    name, sizes, edits = SINGLE[name] if isinstance(name, int) else (name, {}, None)
    network, refused = make(name, tmp_path, **sizes), []
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    seen = [written]
    for changes in EDITS if edits is None else [edits]:
        config = {k: v for k, v in {**written, **changes}.items() if v != ""}
        if config in seen:
            continue  # the keys that go are not there
        seen.append(config)
        path.write_text(json.dumps(config))
        try:
            other = type(network)(type(network.config).from_pretrained(tmp_path)).eval()  # reading weights would take longer
            other.load_state_dict(network.state_dict(), strict=False)
            want = logits(other, TOKENS[:1, :17])
            found = whole(Checkpoint(tmp_path), TOKENS[:1, :17])
        except Exception as e:  # noqa: BLE001  transformers raises whatever its parts raise
            refused.append(e)
        else:
            assert off(found, want) < 1e-5, changes
    assert len(refused) < 5 if edits is None else not refused, refused


def test_what_older_files_leave_out():
    """Layer kinds, rotations and nulls as in the files that the models were published with."""
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 8, "num_attention_heads": 2, "intermediate_size": 8}
    gemma = families.config_of({**sizes, "model_type": "gemma2", "sliding_window": 4, "attn_logit_softcapping": None})
    assert gemma.windows == (4, 0) * 4 and gemma.tied and gemma.head_dim == 256 and gemma.attention_cap == 0
    local = {"model_type": "gemma3_text", "sliding_window": 4, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "head_dim": 4}
    scaling = {"type": "linear", "factor": 8.0, "attention_factor": None}
    found = families.config_of({**sizes, **local, "rope_scaling": scaling})
    assert found.windows == (4, 4, 4, 4, 4, 0, 4, 4)
    assert [r.frequencies[1] for r in found.ropes if r] == pytest.approx([1e-2] * 5 + [1e-3 / 8] + [1e-2] * 2)
    smol = families.config_of({**sizes, "model_type": "smollm3"})
    assert [r is None for r in smol.ropes] == [False, False, False, True] * 2
    phi = families.config_of({**sizes, "model_type": "phi", "partial_rotary_factor": 0.5, "hidden_size": 16})
    assert len(phi.ropes[0].frequencies) == 2 and phi.activation == "gelu_new" and phi.eps == 1e-5


JUNK = (
    None, True, 0, -1, 3, 2**31, -(2**70), 1e308, 1e-308, 0.5, float("inf"), float("nan"), "", "x", "llama3", "yarn", [], [1],
    [None] * 3, {}, {"rope_type": "yarn"}, {"rope_type": "llama3"}, {"a": 1}, ["sliding_attention"] * 3, [[]] * 3,
)  # fmt: skip


@pytest.mark.parametrize("name", ["llama-yarn", "qwen2", "gemma3", "gpt2", "qwen2_moe", "deepseek_v3"])
def test_mutated_configs(name, tmp_path):
    """A network, or an error that says what is wrong with the file; nothing else, and nothing large."""
    make(name, tmp_path)
    rng, path = random.Random(3), tmp_path / "config.json"
    whole, errors = json.loads(path.read_text()), 0
    for _ in range(120):
        config = json.loads(json.dumps(whole))
        inner = config.get("rope_parameters") if rng.random() < 0.3 else None
        target = inner if inner else config
        target[rng.choice([*target, "rope_scaling", "head_dim", "layer_types", "factor", "beta_fast"])] = rng.choice(JUNK)
        path.write_text(json.dumps(config))
        try:
            Checkpoint(tmp_path)
        except ModelError:
            errors += 1
    assert 30 < errors < 115


def test_biases_that_a_network_would_pass_over(tmp_path):
    make("llama-biases-llama3", tmp_path)
    edit(tmp_path / "config.json", attention_bias=False)
    with pytest.raises(ModelError, match="no use for the tensors .*proj.bias"):
        load(tmp_path)


def test_wrong_arguments(tmp_path):
    make("llama", tmp_path)
    with pytest.raises(ModelError, match="weights='int3': choose one of"):
        load(tmp_path, weights="int3")
    for bad in ({"capacity": 0}, {"capacity": 257}, {"capacity": "9"}, {"capacity": True}, {"batch": 0}, {"batch": 1.5}):
        with pytest.raises(OptionError, match="capacity=257: the model has 256 positions|a whole number of at least 1"):
            load(tmp_path, **bad)
    with pytest.raises(OptionError, match="cache='f8': choose one of"):
        load(tmp_path, cache="f8")
    with pytest.raises(ModelError, match="neither a folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        assert load(tmp_path).codec


def test_other_gguf_architectures(tmp_path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="general.architecture 'mamba' is not supported; supported: 'deepseek2'"):
        load(tmp_path / "x.gguf")


def small_gguf(path: Path, **metadata) -> Path:
    """A Llama of one layer; `metadata`: value, or None to leave a key out, by key with "__" for a dot."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
    heads = {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5}
    for key, value in {**sizes, **heads, **{k.replace("__", "."): v for k, v in metadata.items()}}.items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        if value is not None:
            kinds.get(type(value), writer.add_array)(f"llama.{key}", value)
    matrices = {"attn_q": 32, "attn_k": 16, "attn_v": 16, "attn_output": 32, "ffn_gate": 32, "ffn_up": 32, "ffn_down": 32}
    shapes = {"token_embd": (50, 32), "output_norm": (32,), "blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in {**shapes, **{f"blk.0.{n}": (rows, 32) for n, rows in matrices.items()}}.items():
        writer.add_tensor(f"{name}.weight", np.full(shape, 0.1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"block_count": 0}, "num_hidden_layers must be a positive size"),
        ({"attention__head_count": 0}, "num_attention_heads must be a positive size"),
        ({"attention__head_count": [4]}, "num_attention_heads must be a positive size"),
        ({"attention__head_count": "4"}, "num_attention_heads must be a positive size"),
        ({"embedding_length": None}, "hidden_size must be a positive size"),
        ({"attention__layer_norm_rms_epsilon": [1e-5]}, "rms_norm_eps must be a number"),
        ({"rope__freq_base": 0.0}, "with base 0.0 cannot be rotated"), ({"rope__dimension_count": 3}, "3 of 8 elements"),
        ({"rope__scaling__type": [1, 2]}, "rope_type .* is not supported"),
        ({"rope__scaling__type": ["yarn"]}, "rope_type .* is not supported"),
        ({"rope__scaling__type": "longrope"}, "short_factor must be 4 positive numbers"),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, "scaling by 0.0"),
        ({"rope__scale_linear": 4.0}, "llama.rope.scale_linear = 4.0 is not supported"),
        ({"rope__scaling__attn_factor": 0.5}, "attn_factor = 0.5 is not"),
        ({"rope__scaling__yarn_ext_factor": 0.0}, "yarn_ext_factor = 0.0 is not"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_beta_fast": "x"}, "beta_fast must be a number"),
        ({"rope__scaling__type": "yarn", "rope__scaling__yarn_beta_slow": 1e-31}, "beta_slow = .* is too small"),
        ({"expert_count": 8}, "num_experts_per_tok must be a positive size"),
        ({"expert_count": [8, 8]}, "num_experts must be a size or 0"),
        ({"expert_count": 8, "expert_used_count": 2}, "lack the tensor 'model.layers.0.mlp.gate.weight'"),
        ({"expert_count": 8, "expert_used_count": 9}, "9 of 8 experts cannot be chosen"),
        ({"expert_count": 8, "expert_used_count": 2, "expert_gating_func": 2}, "expert_gating_func = 2 is not supported"),
        ({"attention__causal": False}, "causal = False is not"),
        ({"attention__value_length": 4}, "value_length = 4 is not"), ({"logit_scale": 2.0}, "logit_scale = 2.0 is not"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_gguf_metadata(tmp_path, metadata, message):
    assert load(small_gguf(tmp_path / "sound.gguf", attention__causal=True, rope__scale_linear=1.0)).step([1]).shape == (1, 50)
    with pytest.raises(ModelError, match=message):
        load(small_gguf(tmp_path / "wrong.gguf", **metadata))


def test_a_thousand_damaged_language_models(tmp_path):
    """Each gives an error of ours, or a model whose graph can be built and that has room for no more than is usual."""
    path = small_gguf(tmp_path / "a.gguf")
    data = path.read_bytes()
    head = len(data) - sum(t.data.nbytes for t in read_gguf(path).tensors.values())
    rng, refused = random.Random(5), 0
    for _ in range(1000):
        damaged = bytearray(data)
        at = rng.randrange(24, head - 8)
        if rng.random() < 0.3:
            damaged[at : at + 4] = rng.choice([0, 1, 3, 2**31 - 1, 2**32 - 1]).to_bytes(4, "little")
        else:
            damaged[at] = rng.choice([0, 255, damaged[at] ^ 1 << rng.randrange(8), rng.randrange(256)])
        path = tmp_path / "damaged.gguf"
        path.unlink(missing_ok=True)  # an older mapping keeps its own file
        path.write_bytes(damaged)
        try:
            model = load(path)
        except (ModelError, Unsupported):
            refused += 1
        else:
            assert model.graph(1).params and model.capacity <= 4096
    assert refused > 700


def test_text_and_back(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2, "</s>": 3}, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["</s>"])
    make("llama", tmp_path)
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}, "chat_template": "{{ x }}"}))
    codec = load(tmp_path).codec
    assert codec.encode("a b a") == [1, 2, 1] and codec.decode([1, 2, 3]) == "a b" and codec.decode([3], special=True) == "</s>"
    assert codec.ends == {2, 3} and codec.chat_template == "{{ x }}" and codec.special == {"eos_token": "</s>"}
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert load(tmp_path).codec.chat_template == "d"
    (tmp_path / "chat_template.jinja").write_bytes(b"{{ x }}\xff")
    with pytest.raises(CorruptFileError, match="chat_template.jinja is not UTF-8 text: byte 7"):
        _ = load(tmp_path).codec
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 2**31]}))
    with pytest.raises(CorruptFileError, match=rf"generation_config\.json: eos_token_id is {2**31}; ids are below"):
        _ = load(tmp_path).codec
    with pytest.raises(InputDTypeError, match="not valid unicode"):
        codec.encode("\ud800")


def test_every_family_of_the_table_is_tested():
    types = {"gemma3": "gemma3_text"}
    assert {types.get(n.partition("-")[0], n.partition("-")[0]) for n in small_models.FAMILIES} == set(families.FAMILIES)
