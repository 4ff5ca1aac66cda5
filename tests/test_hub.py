"""Models by their name on the Hub: a fake cache folder, laid out as huggingface_hub does, and downloads that are played."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import DownloadError, ModelError
from rlx.frontends import hub
from rlx.frontends.hub import model_path

huggingface_hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an empty cache. Nothing is downloaded."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setenv("HF_HUB_CACHE", str(folder))
    monkeypatch.chdir(tmp_path)
    return folder


def keep(cache: Path, name: str, files: tuple[str, ...] = FILES) -> Path:
    """A cached snapshot with these files, empty."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True, exist_ok=True)
    (folder / "refs").mkdir(exist_ok=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for file in files:
        (snapshot / file).parent.mkdir(parents=True, exist_ok=True)
        (snapshot / file).write_text("{}")
    return snapshot


def play(monkeypatch: pytest.MonkeyPatch, result: Any) -> list[tuple[str, dict[str, Any]]]:
    """Downloads call `result(name)` instead of the network. Returns their arguments."""
    calls: list[tuple[str, dict[str, Any]]] = []

    def download(name: str, **how: Any) -> str:
        calls.append((name, how))
        return str(result(name))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def test_a_cached_model_is_found_without_the_package(cache, monkeypatch):
    snapshot = keep(cache, "org/net-1.5")
    keep(cache, "org/packed", ("a/net.q4_k.gguf",))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert model_path("org/net-1.5") == snapshot
    assert model_path(Path("org/packed/a/net.q4_k.gguf")).name == "net.q4_k.gguf"
    with pytest.raises(DownloadError, match=r"no file or folder org/other, .* lacks every file; .*pip install 'rlx\[hub\]'"):
        model_path("org/other")


def test_a_folder_here_comes_first(cache, tmp_path):
    keep(cache, "org/net")
    (tmp_path / "org" / "net").mkdir(parents=True)
    assert model_path("org/net") == Path("org/net")


NO_NAMES = ("no/such/folder", "net", "models/net.gguf", "mini/model.onnx", "../org/net", "/org/net", "org/net/x.bin", "org/../x")


@pytest.mark.parametrize("path", ["a\0b", "a" * 5000])
def test_a_path_that_no_file_can_have(path):
    with pytest.raises(ModelError, match="there is no file or folder|cannot be opened: File name too long"):
        rlx.load(path)


@pytest.mark.parametrize("path", NO_NAMES)
def test_what_is_no_name_of_the_hub_is_a_path(cache, monkeypatch, path):
    calls = play(monkeypatch, lambda name: pytest.fail("downloaded"))
    assert model_path(path) == Path(path) and not calls


def test_the_cache_is_where_its_own_variables_say(monkeypatch, tmp_path):
    from rlx.knobs import hub_folder

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub_folder() == str(tmp_path / ".cache/huggingface/hub")
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert hub_folder() == str(tmp_path / "hf/hub")
    monkeypatch.setenv("HF_HUB_CACHE", "$HOME/cached")
    assert hub_folder() == str(tmp_path / "cached")


def test_only_weights_and_json_are_downloaded(cache, monkeypatch):
    calls = play(monkeypatch, lambda name: keep(cache, name))
    assert model_path("org/net").is_dir() and model_path("org/net").is_dir()
    ((name, how),) = calls  # the second time it is cached
    wanted = list(huggingface_hub.utils.filter_repo_objects(REPOSITORY, **how))
    assert name == "org/net" and wanted == [f for f in REPOSITORY if REPOSITORY[f]]


REPOSITORY = {  # a file -> whether it is needed
    "config.json": True, "model.safetensors": True, "model-00001-of-00002.safetensors": True, "tokenizer.json": True,
    "model.safetensors.index.json": True, "1_Pooling/config.json": True, "chat_template.jinja": True, "modules.json": True,
    "pytorch_model.bin": False, "modeling_net.py": False, "original/model.safetensors": False, "consolidated.safetensors": False,
    "tf_model.h5": False, "onnx/model.onnx": False, "onnx/config.json": False, "README.md": False, "net.gguf": False,
    "training_args.bin": False, "tokenizer.pkl": False,
}  # fmt: skip


def test_a_gguf_file_is_downloaded_alone(cache, monkeypatch):
    calls = play(monkeypatch, lambda name: keep(cache, name, ("q8_0.gguf",)))
    assert model_path("org/net/q8_0.gguf").is_file()
    assert calls == [("org/net", {"allow_patterns": "q8_0.gguf", "ignore_patterns": None})]


def test_an_incomplete_snapshot_is_completed(cache, monkeypatch):
    snapshot = keep(cache, "org/net", ("config.json", "tokenizer.json"))
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}')
    (snapshot / "one.safetensors").touch()
    calls = play(monkeypatch, lambda name: keep(cache, name, ("two.safetensors",)))
    assert model_path("org/net") == snapshot and len(calls) == 1
    assert model_path("org/net") == snapshot and len(calls) == 1


def test_a_model_without_a_tokenizer_is_used_offline(cache, monkeypatch):
    snapshot = keep(cache, "org/net", FILES[:2])
    calls = play(monkeypatch, lambda name: (_ for _ in ()).throw(OSError("offline")))
    assert model_path("org/net") == snapshot and len(calls) == 1


def test_offline_says_so(cache):
    """By the package itself, which does not use the network here."""
    with pytest.raises(DownloadError, match=r"no file or folder org/net, .*cannot be downloaded \(.*disabled.*\): connect"):
        model_path("org/net")


def test_what_the_hub_refuses_is_said(cache, monkeypatch):
    for error, text in (("GatedRepoError", "accept its terms"), ("RepositoryNotFoundError", "no such model on the Hub")):
        kind = getattr(huggingface_hub.errors, error)
        fault = kind.__new__(kind, "refused")  # without the response of a server
        play(monkeypatch, lambda name, fault=fault: (_ for _ in ()).throw(fault))
        with pytest.raises(DownloadError, match=text):
            model_path("org/net")
    play(monkeypatch, lambda name: keep(cache, name, ("config.json", "tokenizer.json")))
    with pytest.raises(DownloadError, match=r"has no model.safetensors; name a GGUF file, if it has one, as org/net/FILE\.gguf"):
        model_path("org/net")


@pytest.mark.parametrize("ref", ["../../..", "", "a/b", "x" * 40])
def test_a_strange_reference_is_no_snapshot(cache, ref):
    keep(cache, "org/net")
    (cache / "models--org--net" / "refs" / "main").write_text(ref)
    assert hub._snapshot(cache / "models--org--net") is None


def test_no_bar_where_stderr_is_no_terminal(cache, monkeypatch):
    from huggingface_hub.utils import are_progress_bars_disabled

    silent = []

    def download(name: str) -> Path:
        silent.append(are_progress_bars_disabled())
        return keep(cache, name)

    play(monkeypatch, download)
    model_path("org/one")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    model_path("org/two")
    assert silent == [True, False] and not are_progress_bars_disabled()


def test_every_loader_takes_a_name(cache):
    source = rlx.models.default_folder()
    shutil.copytree(source, keep(cache, "org/mini"), dirs_exist_ok=True)
    model = rlx.models.load("org/mini")
    np.testing.assert_array_equal(model.embed(["Hello"]), rlx.models.load(source).embed(["Hello"]))
    with pytest.raises(ModelError, match="'bert' is not"):
        rlx.models.LanguageModel("org/mini")
