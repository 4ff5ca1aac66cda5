"""Models end to end on a GPU, against transformers; the same bits in every run. Without a GPU they are skipped."""

from __future__ import annotations

import numpy as np
import pytest
from small_models import FAMILIES, VOCAB, greedy, logits, make

import rlx
from rlx.backends.cuda.gpu import refusal
from rlx.frontends.beams import beam_search
from rlx.frontends.embedding import set_weights
from rlx.frontends.generate import HostDecoding
from rlx.frontends.language import load
from rlx.frontends.models import bert
from rlx.frontends.sampling import Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")
CLOSE = 1e-4  # of the largest logit
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (2, 80)).astype(np.int32)


def off(found: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(found - want).max() / np.abs(want).max())


def steps(folder, counts: tuple[int, ...], **how) -> np.ndarray:
    model, found, at = load(folder, capacity=208, session=rlx.Session("cuda"), **how), [], 0
    for count in counts:
        found.append(model.step(TOKENS[: model.batch, at : at + count]))
        at += count
    return np.stack(found)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_step_by_step(family, tmp_path):
    network, counts = make(family, tmp_path), (5, 7, 1, 40, *[1] * 20)
    want, ends = logits(network, TOKENS[:, : sum(counts)]), np.cumsum(counts) - 1
    found = steps(tmp_path, counts)
    assert off(found[:, 0], want[0, ends]) < CLOSE
    np.testing.assert_array_equal(found, steps(tmp_path, counts))
    assert off(steps(tmp_path, counts[:4], batch=2), want[:, ends[:4]].swapaxes(0, 1)) < CLOSE


@pytest.mark.parametrize(("weights", "cache", "close"), [("bf16", "bf16", 0.05), ("f16", "f16", 0.01), ("int8", "f32", 0.05)])
@pytest.mark.parametrize("family", FAMILIES)
def test_narrower_weights(family, weights, cache, close, tmp_path):
    """Prefill in chunks of few and of many tokens, then single ones."""
    network, counts = make(family, tmp_path), (5, 7, 1, 20, 1)
    want = logits(network, TOKENS[:1, : sum(counts)])[0, np.cumsum(counts) - 1]
    assert 0 < off(steps(tmp_path, counts, weights=weights, cache=cache)[:, 0], want) < close


@pytest.mark.parametrize("which", ["f32", "q8_0 and bias", "q4_0, f16", "q4_k, q6_k", "q5_k", "gemma"])
def test_a_gguf_file_steps(which, tmp_path):
    pytest.importorskip("gguf")
    from test_language import FILES, make_gguf

    assert which in FILES
    network, file = make_gguf(which, tmp_path)
    counts = (20, 1, 5, 1)
    want = logits(network, TOKENS[:1, : sum(counts)])[0, np.cumsum(counts) - 1]
    assert off(steps(file, counts)[:, 0], want) < (CLOSE if which == "f32" else 0.05)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_200_steps_are_those_of_transformers(family, tmp_path):
    """The networks and the prompt of test_language, where no step is a near tie."""
    network = make(family, tmp_path, seed={"gemma": 3, "gemma2": 2}.get(family, 4), gain=4.0)
    model, prompt = load(tmp_path, capacity=208, session=rlx.Session("cuda")), TOKENS[0, :8].tolist()
    decoding = model.decoding(Sampling(), seed=0)
    found = [decoding.first(prompt), *(decoding.next() for _ in range(199))]
    assert found == greedy(network, prompt, 200) and len(set(found)) >= 10


def test_answers_are_those_of_transformers_and_of_the_seed(tmp_path):
    network, prompt = make("qwen3", tmp_path, gain=3.0), [3, 9, 11, 20]
    model = load(tmp_path, capacity=64, session=rlx.Session("cuda"))

    def answer(**how) -> list[int]:
        return model.generate(prompt, max_new_tokens=24, ends=(), **how).tokens

    model._codec = WithoutText()  # pyright: ignore[reportAttributeAccessIssue]
    assert answer() == greedy(network, prompt, 24)
    drawn = [answer(temperature=1.0, top_p=0.95, seed=seed) for seed in (5, 5, 6)]
    assert drawn[0] == drawn[1] != drawn[2]
    there = load(tmp_path, capacity=64)
    there._codec = WithoutText()  # pyright: ignore[reportAttributeAccessIssue]
    assert there.generate(prompt, max_new_tokens=24, ends=(), temperature=1.0, top_p=0.95, seed=5).tokens == drawn[0]


@pytest.mark.parametrize("given", [
    {"repetition_penalty": 1.4}, {"temperature": 1.5, "top_p": 0.8}, {"temperature": 2.0, "min_p": 0.02},
    {"temperature": 1.5, "top_k": 7},
    {"temperature": 1.2, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2},
], ids=str)  # fmt: skip
def test_tokens_chosen_on_the_gpu_are_those_chosen_from_its_logits(given, tmp_path):
    make("qwen3", tmp_path, gain=3.0)
    model, how = load(tmp_path, capacity=80, session=rlx.Session("cuda")), Sampling(**given)
    for prompt in (TOKENS[0, :5].tolist(), TOKENS[1, :33].tolist()):
        host, device = HostDecoding(model, how, 11), model.decoding(how, 11)
        want = [host.first(prompt), *(host.next() for _ in range(30))]
        assert [device.first(prompt), *(device.next() for _ in range(30))] == want


def test_beams_are_those_of_the_cpu(tmp_path):
    """Forked states on the GPU, several stores for one executable."""
    make("gemma3", tmp_path, gain=3.0)
    models = [load(tmp_path, capacity=40, session=rlx.Session(device)) for device in ("cuda", "cpu")]
    for model in models:
        model._codec = WithoutText()  # pyright: ignore[reportAttributeAccessIssue]
    found = [beam_search(model, TOKENS[0, :9].tolist(), beams=3, max_new_tokens=10, ends=()) for model in models]
    assert [b.tokens for b in found[0]] == [b.tokens for b in found[1]]
    np.testing.assert_allclose([b.score for b in found[0]], [b.score for b in found[1]], rtol=1e-4)


class WithoutText:
    """Stands in for a tokenizer: prompts are ids, and the text of an answer is not looked at."""

    ends, chat_template, special = (), None, {}

    def encode(self, text, special=True):
        return []

    def decode(self, ids):
        return ""


@pytest.mark.parametrize(("precision", "close"), [("f32", 1e-5), ("bf16", 5e-3)])
def test_an_encoder_of_the_default_model_s_shape(precision, close):
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536, "vocab_size": 1000}
    torch.manual_seed(0)
    network = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    config = bert.BertConfig.parse(network.config.to_dict(), "mean", True)
    for rows, length in ((1, 16), (3, 48)):
        ids = np.random.default_rng(1).integers(0, 1000, (rows, length)).astype(np.int32)
        mask = np.ones((rows, length), np.bool_)
        mask[-1, length // 3 :] = False
        compiled = rlx.Session("cuda").compile(bert.build(config, rows, length), rlx.CompileOptions(precision=precision))
        set_weights(compiled, {k: v.numpy() for k, v in network.state_dict().items()})
        (found,), (again,) = (compiled.run({"input_ids": ids, "attention_mask": mask}) for _ in range(2))
        with torch.inference_mode():
            hidden = network(torch.tensor(ids).long(), attention_mask=torch.tensor(mask).long()).last_hidden_state.numpy()
        want = (hidden * mask[..., None]).sum(1) / mask.sum(1)[:, None]
        assert off(found, want / np.linalg.norm(want, axis=1, keepdims=True)) < close
        np.testing.assert_array_equal(found, again)
