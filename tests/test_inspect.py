"""`rlx inspect`: what it shows is what the files, the checkpoint and the compiler say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_models

import rlx
from rlx.cli import show
from rlx.cli.main import run


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    small_models.talker(folder / "talker")
    packed = small_models.make("llama", folder / "wide", hidden_size=256, intermediate_size=256, head_dim=64)
    small_models.write_gguf(packed, "llama", folder / "packed.gguf", {"mlp": "Q4_K", "": "Q8_0"})
    return folder


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(show._out, "width", 200)


def inspected(capsys, *args: str) -> tuple[int, str, str]:
    code = 0
    try:
        run(["inspect", *args])
    except SystemExit as end:
        code = int(end.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def rows(text: str, title: str) -> list[list[str]]:
    """The cells of a table."""
    part = text.split(f"{title}", 1)[1].split("└")[0]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in part.splitlines() if line.startswith("│")]


def test_an_encoder(capsys):
    code, text, _ = inspected(capsys, str(rlx.models.default_folder()), "--threads", "1", "--params")
    assert code == 0 and "hidden_size 384" in text and "longest text 256 tokens" in text and "pooling mean" in text
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = numpy.load_file(rlx.models.default_folder() / "model.safetensors")
    listed = {row[0]: row[3] for row in rows(text, "\ntensors")}
    assert all(listed[n] == "x".join(map(str, arrays[n if n in arrays else f"bert.{n}"].shape)) for n in listed)
    total = sum(arrays[n if n in arrays else f"bert.{n}"].size for n in listed)
    assert rows(text, "\nweights")[-1][2:4] == [str(len(listed)), f"{total:,}"]
    planned = rows(text, "what would be compiled for CPU")
    assert [row[0] for row in planned] == ["bert_1x16", "bert_1x128", "bert_32x128"]
    model = rlx.models.load(rlx.models.default_folder(), session=rlx.Session(threads=1))
    compiled, _ = model._compile(1, 16)
    assert int(planned[0][2]) == len(compiled.program().steps) > int(planned[0][3])


def test_language_models(models, capsys):
    code, text, _ = inspected(capsys, str(models / "talker"))
    assert code == 0 and "family qwen3" in text and "chat template yes" in text and "ends [0, 2]" in text
    assert [row[0] for row in rows(text, "what would be compiled")] == ["qwen3_1x1", "qwen3_1x32"]
    code, text, _ = inspected(capsys, str(models / "packed.gguf"), "--files")
    kept = {row[0]: row for row in rows(text, "\nweights")}
    assert code == 0 and "tokenizer: " in text and "no_vocab" in text and "would be compiled" not in text
    assert kept["q4_k"][2] == "9" and kept["q8_0"][1] == "q8_0" and kept["f32"][1] == "f32"
    assert kept["q4_k"][3] == f"{9 * 256 * 256:,}"


def test_artifacts_are_read_and_not_executed(models, capsys, tmp_path):
    g = rlx.Graph("net")
    g.set_outputs([rlx.softmax(g.input("x", (2, 3), rlx.f32) @ g.param("w", (3, 4), rlx.f32))])
    compiled = rlx.compile(g)
    compiled.set_param("w", np.ones((3, 4), np.float32))
    compiled.save(tmp_path / "net.rlx")
    os.chmod(tmp_path / "net.rlx", 0o666)  # loading it would be refused: another user could have written it
    with pytest.raises(rlx.errors.UntrustedFileError):
        rlx.load(tmp_path / "net.rlx")
    code, text, _ = inspected(capsys, str(tmp_path / "net.rlx"))
    assert code == 0 and f"saved by rlx {rlx.__version__}" in text
    assert [row[:2] for row in rows(text, "\nprograms") if row[0]] == [["net", "cpu"]] and "triple=" in text
    raw = (tmp_path / "net.rlx").read_bytes()
    (tmp_path / "net.rlx").write_bytes(raw[:-100])
    code, _, err = inspected(capsys, str(tmp_path / "net.rlx"))
    assert code == 1 and err.count("\n") == 1


def test_in_a_process_of_its_own(models):
    command = [sys.executable, "-m", "rlx", "inspect", str(models / "packed.gguf")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "160"})
    assert done.returncode == 0 and done.stderr == "" and re.search(r"llama_1x32 +│", done.stdout), done


FAULTS = [("no-such-model", "no-such-model"), ("EMPTY", "has no config.json"), ("FILE", "neither an artifact")]


@pytest.mark.parametrize("name, said", FAULTS)
def test_errors(tmp_path, capsys, name, said):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.bin").write_text("text")
    paths = {"EMPTY": tmp_path / "empty", "FILE": tmp_path / "file.bin"}
    code, out, err = inspected(capsys, str(paths.get(name, name)))
    assert (code, out) == (1, "") and said in err and err.count("\n") == 1
