"""`rlx.load`: an artifact, or a model's folder or file, as something to run."""

from __future__ import annotations

from os import PathLike
from typing import Any

from rlx.errors import ModelError, Unsupported, known
from rlx.frontends.hub import model_path
from rlx.frontends.weights import read_json


def load(path: str | PathLike[str], **how: Any) -> Any:
    """Load what is at `path`:

    - an artifact (rlx.save, compiled.save, model.save): the CompiledGraph, a mapping of several by name, StoredBuckets, or the
      model, ready to run, without the compiler. `device`, `threads`, `verify`, `trust`: see rlx.runtime.artifact.ArtifactFile. An
      artifact holds machine code: one that another user could have written is an UntrustedFileError, unless `trust` is True.
    - a Hugging Face folder or a .gguf file, or the name of one on the Hub (ORG/NAME, ORG/NAME/FILE.gguf): an EmbeddingModel for
      encoders of BERT type, else a LanguageModel. They compile when they first run. `how`: arguments of the class.

    ModelError: it is none of these, or a file is missing or unsupported; the message says which."""
    from rlx.runtime.artifact import begins_with, load

    if begins_with(path := model_path(path)):
        return load(path, **how)
    if path.suffix == ".onnx":
        raise Unsupported(f"{path}: ONNX files are not read in this version; give a Hugging Face folder, or build the graph")
    if path.is_file() and path.suffix != ".gguf" and not begins_with(path, b"GGUF"):
        raise ModelError(f"{path} is neither an artifact of rlx nor a GGUF file: it begins with neither mark")
    return _model(path, **how)


def _model(path: Any, **how: Any) -> Any:
    from rlx.frontends.embedding import ENCODERS, EmbeddingModel
    from rlx.frontends.language import LanguageModel
    from rlx.frontends.models.families import FAMILIES

    family = read_json(path / "config.json").get("model_type") if path.is_dir() else None
    if family in ENCODERS or not path.exists():
        return EmbeddingModel(path, **how)
    if path.is_dir() and family not in (*FAMILIES,):
        raise ModelError(f"{path}: model_type {family!r} is not supported; supported: {known((*ENCODERS, *FAMILIES))}")
    return LanguageModel(path, **how)


__all__ = ["load"]
