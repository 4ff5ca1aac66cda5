"""`rlx explain`, and `--trace` of the other commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from explain_pages import report_in

from rlx.cli.main import run
from rlx.explain.page import run_steps
from tests import small_models


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    small_models.talker(place := tmp_path_factory.mktemp("talker"))
    return place


def command(*args: object) -> int:
    try:
        run([str(a) for a in args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_an_encoder_is_explained(tmp_path, capsys):
    page, report, trace = (tmp_path / name for name in ("page.html", "report.json", "trace.json"))
    assert command("explain", "--batch", 2, "--length", 12, "--output", page, "--report", report, "--trace", trace) == 0
    out = capsys.readouterr().out
    assert out.startswith("bert_2x16 on CPU: 35 steps, ") and f"written to {page}" in out
    found = report_in(page.read_text())
    assert found == json.loads(report.read_text()) and found["name"] == "bert_2x16"
    sources = {n["source"].rpartition(":")[0] for n in found["graph"]["nodes"]}
    assert sources == {"rlx/frontends/models/bert.py"} or all(s.endswith("rlx/frontends/models/bert.py") for s in sources)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {e["args"]["step"] for e in events if e["ph"] == "X" and "step" in e["args"]} == set(range(35))


def test_a_step_of_decoding_and_one_of_the_prompt_are_explained(folder, tmp_path, capsys):
    page = tmp_path / "page.html"
    for args, name in (((), "token"), (("--tokens", 8, "--context", 3), "tokens")):
        assert command("explain", folder, "--output", page, "--capacity", 40, *args) == 0, capsys.readouterr().err
        found = report_in(page.read_text())
        layers = {n["name"].split(".")[2] for n in found["graph"]["nodes"] if (n["name"] or "").startswith("model.layers.")}
        assert [b["name"] for b in found["blocks"] if b["name"][-1].isdigit()] == [f"model.layers.{n}" for n in sorted(layers)]
        assert found["profile"] and len(found["profile"]["steps"]) == len(run_steps(found))
        assert name in {n["name"] for n in found["graph"]["nodes"] if n["how"] == "leaf"}
        assert found["memory"]["regions"]["handles"] > 0
    assert command("explain", folder, "--output", page, "--capacity", 40, "--context", 40) == 1
    assert "1 tokens at position 40 do not fit into a capacity of 40" in capsys.readouterr().err


def test_options_of_other_models_are_refused(folder, tmp_path, capsys):
    assert command("explain", folder, "--output", tmp_path / "page.html", "--batch", 2, "--dim", "n=3") == 2
    assert f"--dim, --batch: {folder} is no encoder and no ONNX model" in capsys.readouterr().err
    assert command("explain", "--output", tmp_path / "page.html", "--context", 4, "--cache", "bf16") == 2
    assert "--context, --cache: " in (said := capsys.readouterr().err) and "is an encoder" in said


def test_traces_of_embed_and_generate(folder, tmp_path, capsys):
    trace = tmp_path / "trace.json"
    assert command("embed", "Hello", "--trace", trace) == 0
    events = json.loads(trace.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["bert_1x8 on CPU"]
    for tokens in (3, None):  # None: until the state is full
        limit = () if tokens is None else ("--max-new-tokens", tokens)
        assert command("generate", folder, "the cat", "--capacity", 12, "--trace", trace, *limit) == 0, capsys.readouterr().err
        events = json.loads(trace.read_text())["traceEvents"]
        names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
        assert len(names) == 2 and all(name.endswith(" on CPU") for name in names)  # the prompt, and a step of decoding
        assert {e["pid"] for e in events} == {1, 2}


def test_artifacts_have_times_and_no_page(folder, tmp_path, capsys):
    from rlx.frontends.embedding import default_folder, load
    from rlx.frontends.language import LanguageModel

    encoder, decoder, trace = (tmp_path / name for name in ("encoder.rlx", "decoder.rlx", "trace.json"))
    model = load(default_folder())
    model.embed(["Hello"])
    model.save(encoder)
    LanguageModel(folder, capacity=40).save(decoder)
    for args, programs in ((("embed", "Hello", "--model", encoder), 1), (("generate", decoder, "cat", "--max-new-tokens", 3), 2)):
        assert command(*args, "--trace", trace) == 0, capsys.readouterr().err
        events = json.loads(trace.read_text())["traceEvents"]
        assert sum(e["name"] == "process_name" for e in events) == programs
    for path in (encoder, decoder):
        assert command("explain", path, "--output", tmp_path / "page.html") == 1
        assert "is an artifact, which has programs and no graph" in capsys.readouterr().err


def test_a_device_without_times_has_a_page(tmp_path):
    page = tmp_path / "page.html"
    assert command("explain", "--device", "null", "--length", 8, "--output", page) == 0
    found = report_in(page.read_text())
    assert found["profile"] is None and "without a time for each" in found["unmeasured"]


@pytest.mark.parametrize("option", ["--output", "--report", "--trace"])
def test_files_that_cannot_be_written_are_refused_before_the_work(option, tmp_path, capsys):
    for path, why in ((tmp_path / "none" / "x", "there is no folder"), (tmp_path, "it is a folder")):
        assert command("explain", "no model", option, path) == 1
        assert why in capsys.readouterr().err
