"""Language models with experts and latent attention: files in every layout, one expert at a time, the state, and configurations
that are not as they should be. Logits and tokens of each family are compared in tests/test_language.py."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from small_models import greedy, logits, make, talker, write_gguf
from test_language import CLOSE, TOKENS, edit, off, whole

import rlx
from rlx.cli import show
from rlx.cli.main import run
from rlx.driver import files
from rlx.errors import CorruptFileError, ModelError
from rlx.frontends.checkpoint import Checkpoint
from rlx.frontends.language import load
from rlx.frontends.models.decoder import build
from rlx.frontends.models.families import config_of
from rlx.frontends.parallel import decoder_marks
from rlx.frontends.weights import read_weights
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph
from rlx.ir.placement import Split

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.numpy")
EXPERTS = "model.layers.1.mlp.experts"
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}


def all_in_one(folder: Path) -> None:
    """Rewrite a folder so that the experts of a layer are one tensor, without ".weight", as in some newer files."""
    found, apart = dict(read_weights(folder)), {}
    for name in [n for n in found if ".experts." in n]:
        layer, _, rest = name.partition(".experts.")
        expert, part, _ = rest.split(".")
        apart.setdefault((layer, part), {})[int(expert)] = found.pop(name)
    for layer in {layer for layer, _ in apart}:
        gate, up, down = (apart[layer, part] for part in ("gate_proj", "up_proj", "down_proj"))
        found[f"{layer}.experts.gate_up_proj"] = np.stack([np.concatenate([gate[e], up[e]]) for e in range(len(gate))])
        found[f"{layer}.experts.down_proj"] = np.stack([down[e] for e in range(len(down))])
    safetensors.save_file({n: np.array(a) for n, a in found.items()}, folder / "model.safetensors")


def test_experts_all_in_one_tensor(tmp_path):
    make("qwen2_moe", tmp_path, mlp_only_layers=[])
    apart = Checkpoint(tmp_path)
    want = {name: apart.read(name) for name in apart.parts}
    all_in_one(tmp_path)
    together = Checkpoint(tmp_path)
    assert together.formats == apart.formats and set(together.parts) == set(want)
    assert all((together.read(name) == array).all() for name, array in want.items())
    edit(tmp_path / "config.json", num_experts=9)
    with pytest.raises(CorruptFileError, match=r"experts\.\w+\.weight' has 8 experts, the configuration says 9"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(("name", "weights"), [("mixtral", None), ("deepseek_v3", "bf16"), ("olmoe", "int8"), ("q4_k", None)])
def test_one_expert_is_read_as_all_are(name, weights, tmp_path):
    path = tmp_path
    if name == "q4_k":
        network = make("olmoe", tmp_path, hidden_size=256, intermediate_size=256, num_hidden_layers=2)
        write_gguf(network, "olmoe", path := tmp_path / "model.gguf", {"": "Q4_K"})
    else:
        make(name, tmp_path)
    checkpoint = Checkpoint(path, weights)
    count = checkpoint.config.experts.count
    for param in (f"{EXPERTS}.gate_up_proj.weight", f"{EXPERTS}.down_proj.weight"):
        every = checkpoint.read(param)
        rows = len(every) // count
        for expert in (0, 3, count - 1):
            checkpoint.nbytes = 0
            one = checkpoint.read_expert(param, expert)
            assert one.dtype == every.dtype and (one == every[expert * rows : (expert + 1) * rows]).all()
            assert checkpoint.nbytes == sum(checkpoint.tensors[p].data.nbytes for p in checkpoint.parts[param]) // count
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is not a param of experts"):
        checkpoint.read_expert("model.norm.weight", 0)


def scaled(folder: Path, block: tuple[int, int], plain: Path) -> None:
    """Rewrite a folder with matrices in fp8 and factors of their blocks, and write what they stand for, f32, to `plain`."""
    import ml_dtypes

    found, meant = {}, {}
    for name, array in read_weights(folder).items():
        found[name] = meant[name] = np.array(array)
        if array.ndim < 2 or any(word in name for word in ("embed", "norm", "mlp.gate.weight", "lm_head")):
            continue
        rows, columns = (np.arange(n) // size for n, size in zip(array.shape, block))
        most = np.zeros((rows[-1] + 1, columns[-1] + 1), np.float32)
        np.maximum.at(most, (rows[:, None], columns), np.abs(array))
        factors = most / np.float32(448)
        spread = factors[rows][:, columns]
        found[name] = (array / spread).astype(ml_dtypes.float8_e4m3fn)
        found[f"{name}_scale_inv"], meant[name] = factors, found[name].astype(np.float32) * spread
    plain.mkdir()
    (plain / "config.json").write_bytes((folder / "config.json").read_bytes())
    safetensors.save_file(meant, plain / "model.safetensors")
    tensors = {n: torch.from_numpy(a.view(np.uint8)).view(torch.float8_e4m3fn) if a.dtype.itemsize == 1 else torch.from_numpy(a)
               for n, a in found.items()}  # fmt: skip
    pytest.importorskip("safetensors.torch").save_file(tensors, folder / "model.safetensors")
    edit(folder / "config.json", quantization_config=FP8 | {"weight_block_size": list(block)})


@pytest.mark.parametrize(("family", "block"), [("deepseek_v3", (16, 8)), ("qwen3_moe", (7, 5)), ("qwen2_moe", (128, 128))])
def test_a_folder_in_fp8_with_factors_of_blocks(family, block, tmp_path):
    make(family, tmp_path)
    scaled(tmp_path, block, tmp_path / "plain")
    for weights in ("f32", "bf16"):
        want, found = (Checkpoint(folder, weights) for folder in (tmp_path / "plain", tmp_path))
        assert found.formats == want.formats and set(found.parts) == set(want.parts)
        for name in want.parts:
            np.testing.assert_array_equal(found.read(name), want.read(name))
    name = next(n for n in found.parts if n.endswith(".experts.down_proj.weight"))
    assert Checkpoint(tmp_path).formats[name] == "bf16"
    one, every = found.read_expert(name, 5), found.read(name)
    np.testing.assert_array_equal(one, every[5 * len(one) : 6 * len(one)])


def test_a_model_in_fp8_runs_within_a_budget(tmp_path):
    make("deepseek_v3", tmp_path, num_hidden_layers=2)
    scaled(tmp_path, (16, 8), tmp_path / "plain")
    for more in ({}, {"expert_budget": 5}):
        steps = [load(folder, capacity=4, weights="f32", **more).step(TOKENS[0, :1]) for folder in (tmp_path, tmp_path / "plain")]
        np.testing.assert_array_equal(*steps)


def test_the_share_of_a_rank_is_cut_out_of_blocks(tmp_path):
    make("qwen3", tmp_path)
    scaled(tmp_path, (16, 9), tmp_path / "plain")
    name = "model.layers.0.self_attn.o_proj.weight"
    for split in (Split(0, (24,)), Split(1, (40,))):
        for rank in range(2):
            want, found = (Checkpoint(folder, "f32", 2, rank) for folder in (tmp_path / "plain", tmp_path))
            np.testing.assert_array_equal(found.read(name, split), want.read(name, split))


def test_factors_that_do_not_fit_are_refused(tmp_path):
    make("qwen3_moe", tmp_path)
    scaled(tmp_path, (16, 8), tmp_path / "plain")
    for block, message in (([8, 8], "blocks of 8 x 8 need f32"), (None, "config.json has no quantization_config")):
        edit(tmp_path / "config.json", quantization_config=block and FP8 | {"weight_block_size": block})
        with pytest.raises(CorruptFileError, match=message):
            Checkpoint(tmp_path)


@pytest.mark.parametrize("weights", [None, "bf16"])
def test_an_expert_of_a_truncated_file_is_an_error(weights, tmp_path):
    """Not a SIGBUS: the last tensors of the file are read after it was cut."""
    make("olmoe", tmp_path)
    checkpoint = Checkpoint(tmp_path, weights)
    (file,) = tmp_path.glob("*.safetensors")
    os.truncate(file, 4096)
    count = checkpoint.config.experts.count
    for name in (n for n in checkpoint.parts if ".experts." in n):
        with pytest.raises(CorruptFileError, match="model.safetensors was truncated"):
            [files.in_memory(checkpoint.read_expert(name, e)) for e in range(count)]


def test_routers_are_never_packed(tmp_path):
    make("qwen3_moe", tmp_path, decoder_sparse_step=1)
    for weights, want in (("int4", "f32"), ("bf16", "f32")):
        formats = Checkpoint(tmp_path, weights).formats
        assert formats.pop("model.layers.0.mlp.gate.weight") == want
        assert formats[f"{EXPERTS}.down_proj.weight"] == weights


def routers(graph: Graph) -> Graph:
    """The graph with the choices of its routers as outputs."""
    found = [n for n in graph.nodes() if n.op.name == "route"]
    graph.set_outputs([n.results[0] for n in found])
    return graph


def test_padding_takes_no_expert_of_its_own(tmp_path):
    make("olmoe", tmp_path)
    checkpoint = Checkpoint(tmp_path)
    graph = routers(build(checkpoint.config, 2, 8, 16, checkpoint.formats))
    params = {str(p.name): checkpoint.read(str(p.name)) for p in graph.params}
    chunk = np.where(np.arange(8) < 5, TOKENS[:, :8], TOKENS[:, 20:28]).astype(np.int32)
    found, _ = evaluate(graph, {"tokens": chunk, "count": np.array(5, np.int32)}, params)
    assert len(found) == 3 and all(ids.shape == (16, 2) for ids in found)
    for ids in found:
        by_token = ids.reshape(2, 8, 2)
        assert (by_token[:, 5:] == by_token[:, 4:5]).all() and len(np.unique(by_token[:, :5])) > 2


@pytest.mark.parametrize(
    ("weights", "cache", "size", "close"),
    [("f32", "f32", 4, CLOSE), ("int8", "bf16", 2, 0.07), ("int4", "f16", 2, 0.4)],
)
def test_a_state_of_latents_alone(weights, cache, size, close, tmp_path):
    """One row of latent and rotated key for each position and layer; also in 16 bits, and with packed weights."""
    network = make("deepseek_v3", tmp_path)
    want = logits(network, TOKENS[:1, :10])
    model = load(tmp_path, capacity=40, weights=weights, cache=cache)
    assert model.memory()["handles"] == 40 * (14 + 6) * 3 * size + 4
    assert off(model.step(TOKENS[0, :9]), want[:, 8]) < close
    assert off(model.step(TOKENS[0, 9:10]), want[:, 9]) < close


def test_chunks_of_all_sizes_share_the_packed_projections_of_latents(tmp_path):
    """Also in sizes that no kernel of packed weights takes: the same are prepared for all chunks, and not some for each row."""
    network = make("deepseek_v3", tmp_path, num_hidden_layers=2)
    model, want, at = load(tmp_path, capacity=40, weights="int8"), logits(network, TOKENS[:1, :24]), 0
    for count in (1, 8, 1, 12, 2):
        assert off(model.step(TOKENS[0, at : at + count]), want[:, at + count - 1]) < 0.05
        at += count
    most = [sum(model.executable(n).memory_plan().regions[k] for k in ("params", "prepared")) for n in (1, 8, 32)]
    assert max(most) < 1.1 * min(most)


def test_an_artifact_file_of_a_model_with_experts(tmp_path):
    network = make("deepseek_v2", tmp_path)
    model = load(tmp_path, capacity=32)
    model.save(tmp_path / "model.rlx", sizes=(1, 8), sampling=())
    stored = rlx.load(tmp_path / "model.rlx")
    assert stored.config == model.config
    for at in range(0, 16, 8):
        found = stored.step(TOKENS[0, at : at + 8])
    assert off(found, logits(network, TOKENS[:1, :16])[:, 15]) < CLOSE


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path):
    network = make("deepseek_v3", tmp_path)
    found = {n: np.array(a) for n, a in read_weights(tmp_path).items()}
    more = {n.replace("layers.2.", "layers.3."): a + 1 for n, a in found.items() if "layers.2." in n}
    more |= {"model.layers.3.eh_proj.weight": np.ones((24, 48), np.float32)}
    safetensors.save_file({**found, **more}, tmp_path / "model.safetensors")
    assert off(whole(Checkpoint(tmp_path), TOKENS[:, :9]), logits(network, TOKENS[:, :9])) < 1e-5
    edit(tmp_path / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ModelError, match=r"no use for the tensors 'model\.layers\.3"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "error", "message"),
    [
        ("mixtral", {"num_local_experts": 4}, ModelError, "no use for the tensors .*experts"),
        ("mixtral", {"num_local_experts": 2**30}, CorruptFileError, "num_experts must be a size or 0, at most 65536"),
        ("mixtral", {"num_experts_per_tok": 6}, CorruptFileError, "6 of 5 experts cannot be chosen"),
        ("mixtral", {"num_experts_per_tok": 0}, CorruptFileError, "num_experts_per_tok must be a positive size"),
        ("qwen2_moe", {"mlp_only_layers": 1}, CorruptFileError, "mlp_only_layers must be a list of layers, got 1"),
        ("qwen2_moe", {"mlp_only_layers": []}, ModelError, r"lack the tensor 'model\.layers\.1\.mlp\.gate\.weight'"),
        ("qwen2_moe", {"decoder_sparse_step": 0}, CorruptFileError, "decoder_sparse_step must be a positive size"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 21}, CorruptFileError, "shared_experts.gate_up_proj.weight"),
        ("qwen3_moe", {"moe_intermediate_size": None}, CorruptFileError, "moe_intermediate_size must be a positive size"),
        ("olmoe", {"clip_qkv": 8.0}, ModelError, "clip_qkv = 8.0 is not supported for olmoe"),
        ("deepseek_v2", {"norm_topk_prob": True}, ModelError, "norm_topk_prob = True is not supported for deepseek_v2"),
        ("deepseek_v2", {"scoring_func": "sigmoid"}, ModelError, "scoring_func = 'sigmoid' is not supported"),
        ("deepseek_v2", {"topk_method": None}, ModelError, "topk_method = None is not supported for deepseek_v2"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, ModelError, "topk_method = 'noaux_tc' is not supported"),
        ("deepseek_v2", {"topk_group": 5}, CorruptFileError, "3 of 8 experts cannot be chosen from 5 of 4 groups"),
        ("deepseek_v3", {"n_group": 3}, CorruptFileError, "3 of 8 experts cannot be chosen from 1 of 3 groups"),
        ("deepseek_v3", {"n_group": 8}, CorruptFileError, "3 of 8 experts cannot be chosen from 1 of 8 groups"),
        ("deepseek_v3", {"attention_bias": True}, ModelError, "attention_bias = True is not supported"),
        ("deepseek_v3", {"kv_lora_rank": "14"}, CorruptFileError, "kv_lora_rank must be a positive size"),
        ("deepseek_v3", {"v_head_dim": 8}, CorruptFileError, r"kv_b_proj.weight' is \(76, 14\), the configuration has other"),
        ("deepseek_v3", {"q_lora_rank": None}, ModelError, "no use for the tensors .*q_a_layernorm"),
        ("deepseek_v3", {"moe_layer_freq": 2}, ModelError, r"lack the tensor .*layers\.1\.mlp\.gate_proj"),
        ("deepseek_v3", {"quantization_config": FP8 | {"activation_scheme": "static"}}, ModelError, "quantization_config = "),
        ("deepseek_v3", {"quantization_config": FP8 | {"weight_block_size": [128, 0]}}, ModelError, "each block of a matrix"),
    ],
    ids=str,
)
def test_wrong_config(tmp_path, family, changes, error, message):
    make(family, tmp_path)
    edit(tmp_path / "config.json", **changes)
    with pytest.raises(error, match=message):
        Checkpoint(tmp_path)


def test_the_published_configurations():
    """The keys of the models' own config.json, some of them null."""
    sizes = {"vocab_size": 9, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16, "intermediate_size": 99}
    yarn = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    lite = {
        **sizes, "model_type": "deepseek_v2", "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6,
        "moe_intermediate_size": 1408, "moe_layer_freq": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy",
        "rope_scaling": {**yarn, "mscale": 0.707, "mscale_all_dim": 0.707}, "max_position_embeddings": 163840,
    }  # fmt: skip
    found = config_of(lite)
    assert found.experts.layers == (1, 2, 3) and found.experts.shared == 2816 and found.latent.q_rank == 0
    assert found.attention_scale == pytest.approx(192**-0.5 * (0.0707 * np.log(40) + 1) ** 2) and found.ropes[0].scale == 1.0
    large = {
        **lite, "model_type": "deepseek_v3", "q_lora_rank": 1536, "n_routed_experts": 256, "n_shared_experts": 1, "n_group": 8,
        "topk_group": 4, "num_experts_per_tok": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 1,
    }  # fmt: skip
    m = config_of(large).experts
    assert (m.scoring, m.groups, m.top_groups, m.bias, m.renormalise, m.scale) == ("sigmoid", 8, 4, True, True, 2.5)
    qwen = {
        **sizes, "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1, "head_dim": 128, "num_key_value_heads": 4,
    }  # fmt: skip
    assert config_of(qwen).experts.layers == (0, 1, 2, 3) and config_of({**qwen, "num_experts": 0}).experts is None


def test_commands_take_them_like_any_other_model(tmp_path, capsys, monkeypatch):
    """inspect names experts and latents; generate gives the greedy tokens of transformers."""
    network = talker(tmp_path, family="deepseek_v3", num_hidden_layers=2, hidden_size=32)
    monkeypatch.setattr(show._out, "width", 200)

    def shown(command: str, *args: str) -> str:
        with pytest.raises(SystemExit, match="^0$"):
            run([command, str(tmp_path), *args])
        return capsys.readouterr().out

    text = shown("inspect", "--files")
    assert "experts: layers 1, count 8, used 3, width 16, scoring sigmoid" in text
    assert "latent attention: rank 14, plain 10" in text
    codec = load(tmp_path).codec
    want = codec.decode(greedy(network, codec.encode("Hello"), 12))
    assert shown("generate", "Hello", "--max-new-tokens", "12", "--temperature", "0").strip().endswith(want.strip())


def test_on_one_rank(tmp_path):
    for family in ("mixtral", "deepseek_v2"):
        make(family, folder := tmp_path / family)
        checkpoint = Checkpoint(folder)
        graph = build(checkpoint.config, 1, 1, 8, checkpoint.formats)
        with pytest.raises(ModelError, match=f"{family} runs on one rank: experts and latent attention are not split"):
            decoder_marks(graph, checkpoint.config, 2, checkpoint.block)
