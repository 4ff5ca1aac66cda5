"""Models by their name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B: from the local cache, else downloaded.

The cache is the one of huggingface_hub and transformers: models--ORG--NAME/refs/main names a commit, snapshots/COMMIT has its
files. It is read without that package; a download needs it. Only weights (safetensors, or one GGUF file), JSON and chat templates
are downloaded: no pickles and no Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from textwrap import shorten
from typing import Any

from rlx import knobs
from rlx.errors import CorruptFileError, DownloadError, ModelError
from rlx.frontends.weights import read_json

_NAME = r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:/([\w./-]+\.gguf))?"
WANTED = ["*.json", "*.jinja", "*.safetensors"]
UNWANTED = ["*/*.safetensors", "consolidated*", "onnx/*", "openvino/*"]  # the same weights for other programs


def model_path(path: Any) -> Path:
    """The folder or .gguf file of a model: `path` itself, or what the Hub has under that name (ORG/NAME, or ORG/NAME/FILE.gguf).

    ModelError: not a path. DownloadError: a name of the Hub that is not in the local cache, and cannot be downloaded."""
    if not isinstance(path, (str, PathLike)):
        raise ModelError(f"a model is the path of a folder or a .gguf file, or a name on the Hub, got {path!r:.60}")
    found = Path(path)
    name = re.fullmatch(_NAME, str(path), re.ASCII)
    try:
        if found.exists() or not name or name[1].endswith((".gguf", ".onnx")):
            return found
    except OSError as e:
        raise ModelError(f"{path!s:.200} cannot be opened: {e.strerror}") from e
    return _of_hub(*name.groups())


def _of_hub(name: str, gguf: str | None) -> Path:
    folder = Path(knobs.hub_folder()) / f"models--{name.replace('/', '--')}"
    snapshot = _snapshot(folder)
    lacks = _lacks(snapshot, gguf) if snapshot else ["every file"]
    if snapshot and not lacks:
        return snapshot / (gguf or "")
    try:
        snapshot = _downloaded(name, gguf, f"{folder} lacks {', '.join(lacks)}")
    except DownloadError:
        if snapshot and lacks == ["tokenizer.json"]:  # some models have none
            return snapshot
        raise
    lacks = _lacks(snapshot, gguf)
    if lacks and lacks != ["tokenizer.json"]:
        hint = "" if gguf else f"; name a GGUF file, if it has one, as {name}/FILE.gguf"
        raise DownloadError(f"the model {name} on the Hub has no {', '.join(lacks)}{hint}")
    return snapshot / (gguf or "")


def _snapshot(folder: Path) -> Path | None:
    """The cached files of the latest commit that was downloaded."""
    ref = folder / "refs" / "main"
    commit = ref.read_text("ascii", "replace").strip() if ref.is_file() else ""
    found = folder / "snapshots" / commit
    return found if re.fullmatch(r"[0-9A-Za-z]+", commit) and found.is_dir() else None


def _lacks(snapshot: Path, gguf: str | None) -> list[str]:
    """The files that a model needs and the folder has not, since other programs download only those that they need."""
    if gguf is not None:
        return [] if (snapshot / gguf).is_file() else [gguf]
    needed = ["config.json", "model.safetensors"]
    if (index := snapshot / "model.safetensors.index.json").is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict):
            raise CorruptFileError(f"{index}: 'weight_map' must map tensor names to file names")
        needed = ["config.json", *sorted(set(map(str, shards.values())))]
    return [file for file in (*needed, "tokenizer.json") if not (snapshot / file).is_file()]


def _downloaded(name: str, gguf: str | None, why: str) -> Path:
    instead = "or give the path of a folder"
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        raise DownloadError(
            f"there is no file or folder {name}, and {why}; to download it: pip install 'rlx[hub]', {instead}"
        ) from None
    try:
        with _bars_on_terminals_only():
            return Path(snapshot_download(name, allow_patterns=gguf or WANTED, ignore_patterns=None if gguf else UNWANTED))
    except GatedRepoError as e:
        raise DownloadError(f"{name} asks for consent: accept its terms at huggingface.co/{name}, then hf auth login") from e
    except RepositoryNotFoundError as e:
        raise DownloadError(
            f"there is no file or folder {name}, and no such model on the Hub (a private one needs: hf auth login)"
        ) from e
    except Exception as e:
        reason = shorten(str(e), 300) or type(e).__name__
        raise DownloadError(
            f"there is no file or folder {name}, {why}, and it cannot be downloaded ({reason}): connect to the network, {instead}"
        ) from e


@contextmanager
def _bars_on_terminals_only() -> Iterator[None]:
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silence = not sys.stderr.isatty() and not are_progress_bars_disabled()
    if silence:
        disable_progress_bars()
    try:
        yield
    finally:
        if silence:
            enable_progress_bars()
