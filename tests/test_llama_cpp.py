"""The same GGUF file in llama.cpp, where llama-cpp-python is installed (it is no dependency: its wheel is built from source)."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from small_models import VOCAB
from test_language import FILES, TOKENS, make_gguf, off

from rlx.frontends.gguf import build_tokenizer, read_gguf
from rlx.models import load

if importlib.util.find_spec("llama_cpp") is None:
    pytest.skip("llama-cpp-python is not installed", allow_module_level=True)

WORDS = (
    "It's 1234 o'clock: they'll pay $5,600.75 (or so)!  Two  spaces\n\n\tand tabs.\r\nEnd ",
    "x_1 = f(a.b[3], 'c')#comment @home <tag/> ~90% ''quotes''",
    "Grüße, naïve Ætt. ΑΒΓ αβγ Ђж \u0561\u0562 \u10d0\u10d1 \U0001d44e",
    "中文字 かな カナ 한국어 … “curly” ‘marks’ 。、 １２３ ２ ½ ①", "🙂👍🏽 e\u0301 a\u0308 \u00a0 \u2003x   ",
)  # fmt: skip
# Of the largest logit, at the median token. llama.cpp's own f32 logits are 1e-3 away from transformers' (ours 1e-6). Before
# packed weights both round activations to 8 bits, each in blocks of its own; single tokens of a random network take that badly.
FAR = {"f32": 3e-3, "experts in f32": 3e-3}
PACKED = 0.05


class LlamaCpp:
    """Logits after each token, by llama.cpp's C interface."""

    def __init__(self, path: Path, capacity: int) -> None:
        import llama_cpp as lib

        self.lib, self.quiet = lib, lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()
        self.model = lib.llama_model_load_from_file(str(path).encode(), lib.llama_model_default_params())
        assert self.model, f"llama.cpp does not load {path}"
        how = lib.llama_context_default_params()
        how.n_ctx, how.n_threads, how.n_threads_batch = capacity, 1, 1
        how.type_k = how.type_v = lib.GGML_TYPE_F32
        self.context = lib.llama_init_from_model(self.model, how)

    def step(self, tokens: np.ndarray) -> np.ndarray:
        ids = (self.lib.llama_token * len(tokens))(*tokens.tolist())
        assert self.lib.llama_decode(self.context, self.lib.llama_batch_get_one(ids, len(tokens))) == 0
        return np.ctypeslib.as_array(self.lib.llama_get_logits_ith(self.context, -1), (VOCAB,)).copy()

    def close(self) -> None:
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


@pytest.mark.parametrize("which", FILES)
def test_logits_of_the_same_file(which, tmp_path):
    """A prompt in two chunks and 16 single tokens."""
    _, file = make_gguf(which, tmp_path)
    peer, model = LlamaCpp(file, 64), load(file, capacity=64)
    chunks = np.split(TOKENS[0, :29], [7, *range(13, 29)])
    apart = [off(model.step(chunk)[0], peer.step(chunk)) for chunk in chunks]
    peer.close()
    assert np.median(apart) < FAR.get(which, PACKED), apart


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "deepseek-llm", "deepseek-v3"])
def test_tokens_of_the_same_file(pre, tmp_path):
    """Texts in many scripts, split as the metadata says, by a vocabulary of bytes and some merges."""
    import llama_cpp as lib
    from test_gguf import byte_level, small_bpe, write

    made, tokens = small_bpe()
    fill = lambda w: (byte_level(w, tokens, made, pre), w.add_add_bos_token(False))  # noqa: E731
    path = write(tmp_path / "a.gguf", {}, fill=fill)
    how = lib.llama_model_default_params()
    how.vocab_only = True
    quiet = lib.llama_log_callback(lambda *_: None)
    lib.llama_log_set(quiet, None)
    model = lib.llama_model_load_from_file(str(path).encode(), how)
    ours, vocab, ids = build_tokenizer(read_gguf(path)), lib.llama_model_get_vocab(model), (lib.llama_token * 1000)()
    for text in WORDS:
        raw = text.encode()
        count = lib.llama_tokenize(vocab, raw, len(raw), ids, 1000, False, True)
        assert ours.encode(text).ids == list(ids[:count]), text
    lib.llama_model_free(model)
