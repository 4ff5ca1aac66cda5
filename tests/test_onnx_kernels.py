"""Encoders from ONNX, by both exporters of torch: the same kernels as from rlx's own network, and torch's results."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest

import rlx
from rlx.compiler import lower
from rlx.frontends.models import bert
from rlx.frontends.onnx import OnnxModel
from rlx.ir.kernel_text import kernel_key

torch = pytest.importorskip("torch")
SIZES = {
    "vocab_size": 100, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 96,
    "max_position_embeddings": 32,
}  # fmt: skip
IDS, MASK = np.arange(24).reshape(2, 12), np.array([[1] * 12, [1] * 7 + [0] * 5])


@pytest.fixture(scope="module")
def network():
    """BERT with random weights, in torch."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bert = BertModel(BertConfig(**SIZES), add_pooling_layer=False)
            for p in self.parameters():
                torch.nn.init.normal_(p, std=0.1)

        def forward(self, input_ids, attention_mask):
            return self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state

    return Encoder().eval()


@pytest.fixture(scope="module", params=[False, True], ids=["TorchScript", "dynamo"])
def file(request, network, tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "bert.onnx"
    names = ["input_ids", "attention_mask"]
    how = {"input_names": names, "output_names": ["hidden"], "dynamo": request.param}
    if not request.param:
        how["dynamic_axes"] = {name: {0: "batch", 1: "tokens"} for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, (torch.tensor(IDS), torch.tensor(MASK)), path, **how)
    return path


def test_results_are_those_of_torch(file, network):
    found = OnnxModel(file).run({"input_ids": IDS, "attention_mask": MASK})["hidden"]
    with torch.no_grad():
        want = network(torch.tensor(IDS), torch.tensor(MASK)).numpy()
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)


def test_the_layers_are_the_kernels_of_the_own_network(file):
    """All kernels of the layers; embeddings and masks are written in other ways."""
    session, options = rlx.Session("cpu"), rlx.CompileOptions()
    own = lower(bert.build(bert.BertConfig(**SIZES), *IDS.shape), session.target(), options)
    graph = OnnxModel(file).imported({"input_ids": IDS, "attention_mask": MASK}).graph
    made = lower(graph, session.target(), options)
    layers = [kernel_key(s.kernel) for s in own.steps if s.kernel.name.startswith(("matmul", "attention"))]
    found = [kernel_key(s.kernel) for s in made.steps if s.kernel.name.startswith(("matmul", "attention"))]
    assert len(layers) == 2 * 5 and found == layers
    assert len(made.steps) <= len(own.steps)


def test_weights_take_the_memory_that_they_take_in_the_own_network(file):
    graph = OnnxModel(file).imported({"input_ids": IDS, "attention_mask": MASK}).graph
    plans = [rlx.Session("cpu").plan(g).regions for g in (graph, bert.build(bert.BertConfig(**SIZES), *IDS.shape))]
    made, own = (sum(plan[r] for r in ("params", "prepared", "constants")) for plan in plans)
    assert made < 1.05 * own


# -- texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small encoder as a Hugging Face folder, and in it the same network as onnx/model.onnx."""
    import shutil

    from transformers import BertConfig, BertModel

    place, source = tmp_path_factory.mktemp("encoder"), rlx.models.default_folder()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, place)
    torch.manual_seed(1)
    net = BertModel(BertConfig(**{**SIZES, "vocab_size": 30522}), add_pooling_layer=False).eval()
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.1)  # equal params would be one initialiser
    net.save_pretrained(place)

    class Hidden(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, input_ids, attention_mask, token_type_ids):
            return self.net(input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids)[0]

    (place / "onnx").mkdir()
    names = ["input_ids", "attention_mask", "token_type_ids"]
    given = tuple(torch.ones(1, 4, dtype=torch.int64) for _ in names)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Hidden().eval(), given, place / "onnx" / "model.onnx", input_names=names, dynamo=False,
            output_names=["last_hidden_state"], dynamic_axes={name: {0: "batch", 1: "tokens"} for name in names},
        )  # fmt: skip
    return place


def test_only_embeddings_and_pooling_differ_from_the_kernels_of_the_folder(folder):
    """ids of the file are i64 and may count from the end, its token types are an input, its mask is i64, and its tokens have no
    reshape between them and the kernels before and behind: norm of the embeddings, product with the mask."""
    from rlx.frontends.load import load_encoder

    session, options = rlx.Session("cpu"), rlx.CompileOptions()
    own, file = load_encoder(folder), load_encoder(folder / "onnx" / "model.onnx")
    steps = [lower(g, session.target(), options).steps for g in (bert.build(own.config, 2, 8), file._graph(2, 8))]
    keys = [[kernel_key(s.kernel) for s in found] for found in steps]
    each = zip(steps, keys, keys[::-1])
    named = [[s.kernel.name for s, k in zip(found, mine) if k not in other] for found, mine, other in each]
    assert named[0] == ["gather_add", "sum_div_sub_mul_add_rsqrt", "cast", "mul_sum_div"]
    ends = ["matmul_add_sum_div_sub_mul_rsqrt", "sum_div"]
    assert named[1] == ["less_add_where", "less_add_where", "cast", "gather_add_sum_div_sub_mul_rsqrt", *ends]
    assert len(steps[1]) == len(steps[0]) + 1


def test_texts_are_embedded_as_by_the_folder_of_the_model(folder, capsys):
    from rlx.frontends.load import load_encoder
    from tests.sentences import sentences

    texts = [t[:60] for t in sentences(12)]
    own, onnx_file = load_encoder(folder), load_encoder(folder / "onnx" / "model.onnx")
    assert onnx_file.dim == own.dim == 64 and onnx_file.max_length == own.max_length == 32
    np.testing.assert_allclose(onnx_file.embed(texts), own.embed(texts), rtol=1e-4, atol=1e-5)
    assert onnx_file.memory(1, 8)["arena"] > 0
    with pytest.raises(rlx.errors.Unsupported, match="keeps its executables"):
        onnx_file.save("file")


def test_the_command_embeds_with_onnx_models(folder, capsys):
    from rlx.cli.main import run

    with pytest.raises(SystemExit) as done:
        run(["embed", "--model", str(folder / "onnx" / "model.onnx"), "one text", "another"])
    assert not done.value.code and "2 texts -> float32 [2, 64]" in capsys.readouterr().out


def test_models_that_are_no_encoders_are_refused(folder, tmp_path):
    from rlx.frontends.onnx.encoder import OnnxEncoder
    from tests.test_onnx import linear

    onnx.save(linear()[0], tmp_path / "net.onnx")
    with pytest.raises(rlx.errors.ModelError, match="has the inputs 'x': an encoder has input_ids"):
        OnnxEncoder(tmp_path / "net.onnx")
    (tmp_path / "model.onnx").write_bytes((folder / "onnx" / "model.onnx").read_bytes())
    with pytest.raises(rlx.errors.ModelError, match=r"needs a tokenizer\.json, in its folder or the one above"):
        OnnxEncoder(tmp_path / "model.onnx")
