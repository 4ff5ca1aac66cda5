"""Language models shared by ranks, against the same model on one: logits, greedy tokens, and what each rank reads of the files.
Small random networks of several families, made by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_ranks import on_ranks

import rlx
from rlx.driver import LocalTransport
from rlx.errors import CallMismatchError, ModelError, OptionError
from rlx.frontends.beams import beam_search
from rlx.frontends.checkpoint import Checkpoint
from rlx.frontends.embedding import EmbeddingModel, default_folder
from rlx.frontends.language import LanguageModel
from rlx.frontends.sampling import Sampling

ONE = rlx.CompileOptions(threads=1)
PROMPT = [5, 17, 3, 44, 101, 9, 63, 2, 88, 21, 7]
# family -> what differs; 199 tokens cannot be shared by two ranks, so that the tables are split by width
CASES = {
    "llama": {"vocab_size": 200}, "llama-biases-llama3": {}, "llama-linear": {"vocab_size": 200}, "qwen3": {"vocab_size": 200},
    "gemma2": {"vocab_size": 200}, "phi3": {}, "phi": {"vocab_size": 200, "num_key_value_heads": 4}, "gpt2": {},
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        from small_models import make

        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            make(name, made[name], gain=3.0, num_hidden_layers=2, **CASES.get(name, {}))
        return made[name]

    return get


def chosen(model: LanguageModel, steps: int, seed: int = 0, **how: Any) -> list[int]:
    """The tokens of an answer to the prompt, chosen in the graph."""
    decoding = model.decoding(Sampling(**how), seed)
    return [decoding.first(PROMPT), *(decoding.next() for _ in range(steps - 1))]


def answers(path: Path, steps: int, ranks: int = 1, **how: Any) -> list[tuple[np.ndarray, list[int], LanguageModel]]:
    """Per rank: logits after the prompt in two chunks, greedy tokens, the model."""

    def run(transport: Any) -> Any:
        model = LanguageModel(path, capacity=128, options=ONE, transport=transport, **how)
        model.step(PROMPT[:3])
        logits = model.step(PROMPT[3:])
        return logits, chosen(model, steps), model

    return on_ranks(ranks, run) if ranks > 1 else [run(None)]


def due(part: LanguageModel) -> float:
    """Bytes of the files that a rank should read: its part of what is split, all of the rest."""
    whole, total = Checkpoint(part.path, part.checkpoint.weights, part.ranks), 0.0
    for p in part.whole_graph(1).params:
        whole.nbytes = 0
        whole.read(str(p.name))
        total += whole.nbytes / (part.ranks if p.name in part.splits else 1)
    return total


@pytest.mark.parametrize("name", CASES)
def test_families(folder: Any, name: str) -> None:
    steps = 100 if name in ("llama", "qwen3", "gpt2") else 20
    ((logits, tokens, model),) = answers(folder(name), steps)
    assert len(set(tokens)) > 5
    for found, own, part in answers(folder(name), steps, ranks=2):
        np.testing.assert_allclose(found, logits, atol=1e-4)
        assert own == tokens
        assert part.checkpoint.nbytes == due(part) < 0.7 * model.checkpoint.nbytes


QUANTISED = {
    "llama-q8": ("llama", {"": "Q8_0"}, {"hidden_size": 64, "head_dim": 16, "intermediate_size": 128}),
    "qwen3-mixed": (
        "qwen3", {"embed": "Q6_K", "v_proj": "Q6_K", "": "Q4_K"},
        {"hidden_size": 256, "head_dim": 128, "intermediate_size": 512},
    ),
}  # fmt: skip


FORMS = [("llama-q8", None), ("llama-q8", "f32"), ("qwen3-mixed", None), ("qwen3-mixed", "int8")]


@pytest.mark.parametrize(("which", "weights"), FORMS)
def test_gguf(which: str, weights: str | None, tmp_path: Path) -> None:
    from small_models import make, write_gguf

    family, kinds, sizes = QUANTISED[which]
    network = make(family, tmp_path, gain=3.0, vocab_size=200, **sizes)
    write_gguf(network, family, tmp_path / "model.gguf", kinds)
    ((logits, tokens, model),) = answers(tmp_path / "model.gguf", 10, weights=weights)
    for found, own, part in answers(tmp_path / "model.gguf", 10, ranks=2, weights=weights):
        np.testing.assert_allclose(found, logits, atol=2e-3 * np.abs(logits).max())
        assert len(own) == 10 and (weights != "f32" or own == tokens)
        assert part.checkpoint.nbytes == due(part) < 0.55 * model.checkpoint.nbytes


def test_four_ranks_and_narrow_weights_and_caches(folder: Any) -> None:
    ((logits, _, model),) = answers(folder("phi"), 5, weights="bf16", cache="f16")
    for found, _, part in answers(folder("phi"), 5, ranks=4, weights="bf16", cache="f16"):
        np.testing.assert_allclose(found, logits, atol=0.03)
        caches = [e.shape for n, e in part.handles.entries.items() if n[:2] in ("k.", "v.")]
        assert {s.dims[1] for s in caches} == {1} and part.splits["k.0"].axis == 1
        whole, own = model.memory(), part.memory()
        assert own["handles"] < whole["handles"] * 0.3 and own["params"] + own["prepared"] < 0.5 * (  # panels are filled up
            whole["params"] + whole["prepared"]
        )


def test_every_rank_draws_the_same(folder: Any) -> None:
    """Though each has a seed of its own; and as the whole model does."""
    how = {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2}

    def run(transport: Any) -> list[int]:
        model = LanguageModel(folder("llama"), capacity=64, options=ONE, transport=transport)
        return chosen(model, 40, 7 if transport is None or transport.this_rank.index == 0 else 8, **how)

    one, two = on_ranks(2, run)
    assert one == two == run(None) and len(set(one)) > 10


def test_ranks_that_disagree(folder: Any) -> None:
    def run(transport: Any) -> None:
        model = LanguageModel(folder("llama"), capacity=64, options=ONE, transport=transport)
        decoding = model.decoding(Sampling(), 0)
        decoding.first(PROMPT if transport.this_rank.index else PROMPT[1:])

    with pytest.raises(CallMismatchError, match="disagree"):
        on_ranks(2, run)


def test_what_cannot_be_shared(folder: Any, tmp_path: Path) -> None:
    from small_models import make, write_gguf

    for ranks, words in ((3, "num_attention_heads=4 equally: 1 would"), (8, "num_attention_heads=4 equally: 4 would")):
        with pytest.raises(ModelError, match=words):
            on_ranks(ranks, lambda t: LanguageModel(folder("llama"), transport=t))
    with pytest.raises(ModelError, match="4 ranks cannot share num_key_value_heads=2 equally: 2 would be left over"):
        on_ranks(4, lambda t: LanguageModel(folder("llama"), transport=t))
    network = make("llama", tmp_path, hidden_size=256, head_dim=64, intermediate_size=256)
    write_gguf(network, "llama", tmp_path / "model.gguf", {"": "Q4_K"})
    with pytest.raises(ModelError, match="o_proj.*rows of 256 elements, in whole blocks of 256"):
        on_ranks(2, lambda t: LanguageModel(tmp_path / "model.gguf", transport=t))


def test_beams(folder: Any) -> None:
    class Plain:
        ends, chat_template, special = (), None, {}

        def decode(self, ids: Any) -> str:
            return " ".join(map(str, ids))

    path = folder("qwen3")  # made before the ranks ask for it

    def run(transport: Any) -> Any:
        model = LanguageModel(path, capacity=64, options=ONE, transport=transport)
        model._codec = Plain()  # type: ignore[assignment]
        return [b.tokens for b in beam_search(model, PROMPT, beams=3, max_new_tokens=8, ends=())]

    assert on_ranks(2, run) == [run(None)] * 2


# -- encoders: the batch is split


TEXTS = ["a", "two words", "the third text is longer than the two before it", "", "another one", "six", "and the seventh"]


def test_embeddings_of_a_split_batch() -> None:
    """One row for each rank and fillers for the rest; every rank gets all of them, as one gets alone."""
    folder = default_folder()
    want = EmbeddingModel(folder, options=ONE).embed(TEXTS, batch_size=4)

    def run(transport: Any) -> np.ndarray:
        model = EmbeddingModel(folder, options=ONE, transport=transport)
        found = model.embed(TEXTS, batch_size=4)
        assert all(rows % 3 == 0 for rows, _ in model.shapes)
        return found

    for found in on_ranks(3, run):
        np.testing.assert_allclose(found, want, atol=1e-5)
    with pytest.raises(CallMismatchError):
        on_ranks(2, lambda t: EmbeddingModel(folder, transport=t).embed(TEXTS[t.this_rank.index :]))


def test_a_session_has_its_own_transport() -> None:
    with pytest.raises(OptionError, match="not the session's"):
        EmbeddingModel(default_folder(), session=rlx.Session(), transport=LocalTransport.fan_out(1, 0)[0])
