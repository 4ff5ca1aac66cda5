"""`rlx bench`: what it says about a run is consistent; its times are not judged."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import small_models

import rlx
from benchmarks import generation
from rlx.cli import bench, show
from rlx.cli.main import run


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    small_models.make("qwen3", folder)
    return folder


def benched(capsys, *args: str) -> tuple[int, str, str]:
    code = 0
    try:
        run(["bench", *args, "--seconds", "0"])
    except SystemExit as end:
        code = int(end.code or 0)
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_a_language_model(folder, capsys):
    code, text, _ = benched(capsys, str(folder), "--length", "40", "--new-tokens", "8", "--threads", "1", "--json")
    facts = json.loads(text)
    prefill, decode = facts["results"]
    assert code == 0 and (prefill["what"], decode["what"]) == ("prefill 1 x 40", "decode 1 x 1")
    for result, tokens in ((prefill, 40), (decode, 1)):
        assert result["runs"] == bench.LEAST and 0 < result["median_seconds"] <= result["p90_seconds"]
        assert result["tokens_per_second"] == pytest.approx(tokens / result["median_seconds"])
        assert result["limit_seconds"] > 0 and result["bound"] in ("memory", "arithmetic")
    model = rlx.models.load(folder, capacity=48, session=rlx.Session(threads=1))
    planned = model.memory(40, ())
    assert all(facts["memory_bytes"][name] == planned[name] > 0 for name in ("arena", "handles"))
    assert facts["threads"] == 1 and facts["compile_seconds"] > 0 and facts["cache"] == "off"


def test_several_texts_at_once(folder, capsys):
    facts = json.loads(benched(capsys, str(folder), "--length", "5", "--batch", "3", "--json")[1])
    assert [r["what"] for r in facts["results"]] == ["prefill 3 x 5", "decode 3 x 1"]


def test_options_that_a_model_does_not_have_are_refused(folder, tmp_path, capsys):
    path, encoder = str(tmp_path / "qwen3.rlx"), str(rlx.models.default_folder())
    rlx.load(folder, capacity=16, cache="bf16").save(path, sizes=[1])
    small = ["--length", "4", "--new-tokens", "2"]
    code, text, _ = benched(capsys, path, *small, "--json")
    assert code == 0 and json.loads(text)["batch"] == 1
    for args, said in (
        ([path, "--cache", "f32"], f"--cache: {path} was saved with --batch 1 --cache bf16"),
        ([path, "--batch", "3"], f"--batch: {path} was saved with --batch 1 --cache bf16"),
        ([str(folder), "--dim", "n=2"], f"--dim: {folder} is no ONNX model"),
        ([encoder, "--cache", "bf16", "--new-tokens", "9"], f"--new-tokens, --cache: {encoder} is an encoder"),
    ):
        code, _, err = benched(capsys, *args)
        assert code == 2 and said in " ".join(err.split())


def test_an_encoder_and_its_artifact(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(show._out, "width", 160)
    code, text, err = benched(capsys, str(rlx.models.default_folder()), "--length", "16", "--batch", "2")
    assert code == 0 and err == "" and "encode 2 x 16" in text and "this machine: reads " in text and "memory: arena" in text
    assert "?" not in text
    model = rlx.models.load(rlx.models.default_folder())
    model.save(tmp_path / "mini.rlx", shapes=[(2, 16)])
    code, text, _ = benched(capsys, str(tmp_path / "mini.rlx"), "--length", "16", "--batch", "2")
    assert code == 0 and "cache: artifact" in text and "encode 2 x 16" in text and "? " in text


def test_a_limit_is_the_slower_of_reading_and_computing(monkeypatch):
    g = rlx.Graph("product")
    g.set_outputs([g.input("x", (64, 512), rlx.f32) @ g.input("w", (512, 256), rlx.f32)])
    compiled = rlx.compile(g)
    work = compiled.report().work
    assert work.flops == 2 * 64 * 512 * 256
    for reading, computing, bound in ((1e3, 1e15, "memory"), (1e15, 1e3, "arithmetic")):
        roofline = rlx.ir.cost.Roofline({"f32": computing}, ((1 << 30, reading),))
        monkeypatch.setattr(bench, "roofline_of", lambda compiled, roofline=roofline: roofline)
        seconds, found = bench.limit_of([compiled, compiled])
        assert found == bound and seconds == pytest.approx(2 * max(work.least_bytes / reading, work.flops / computing))


def test_in_a_process_of_its_own(folder):
    command = [sys.executable, "-m", "rlx", "bench", str(folder), "--length", "4", "--seconds", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "140"})
    assert done.returncode == 0 and done.stderr == "" and "decode 1 x 1" in done.stdout, done


@pytest.mark.parametrize(
    "args, code, said",
    [
        (["no-such-model"], 1, "no-such-model"), (["EMPTY"], 1, "has no config.json"),
        (["MODEL", "--length", "300"], 1, "the model has 256 positions"), (["MODEL", "--batch", "0"], 2, "batch"),
        (["MODEL", "--device", "rocm"], 1, "no ROCM backend"), ([], 2, "MODEL"),
    ],
)  # fmt: skip
def test_errors(folder, tmp_path, capsys, args, code, said):
    names = {"EMPTY": tmp_path, "MODEL": folder}
    found, _, err = benched(capsys, *(str(names.get(a, a)) for a in args))
    assert found == code and said in " ".join(err.split())


def test_a_benchmark_leaves_out_the_formats_whose_files_it_cannot_write(tmp_path, monkeypatch, capsys):
    find, compared = importlib.util.find_spec, []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llama_cpp" else find(name))
    monkeypatch.setattr(generation, "compare", lambda form, engines, args: compared.append(form) or [])
    monkeypatch.setattr(sys, "argv", ["generation.py", "--formats", "bf16", "q8_0", "q4_k", "--folder", str(tmp_path)])
    (tmp_path / "model-q4_k.gguf").touch()
    generation.main()
    assert compared == ["bf16", "q4_k"]
    assert "q8_0 is left out: llama.cpp, which writes its file, is not installed" in capsys.readouterr().out
