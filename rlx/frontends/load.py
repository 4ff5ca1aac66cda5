"""`rlx.load`: an artifact file, or a model's folder or file, as something to run."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from os import PathLike
from typing import TYPE_CHECKING, Any

from rlx.errors import ModelError, OptionError, Unsupported, known, reading
from rlx.frontends.hub import model_path
from rlx.frontends.weights import read_json
from rlx.runtime.artifact import ArtifactFile, begins_with, graphs_of

if TYPE_CHECKING:
    from rlx.frontends.embedding import EmbeddingModel
    from rlx.frontends.language import LanguageModel
    from rlx.ir.graph import Graph

OF_EXPERTS = ("expert_budget", "expert_policy", "expert_profile", "record_experts")  # arguments of the models
FROM_FILE = ("device", "threads", "trust", "verify")  # arguments of ArtifactFile


@reading()
def load(path: str | PathLike[str], **how: Any) -> Any:
    """Load what is at `path`:

    - an artifact file (rlx.save, compiled.save, model.save): the CompiledGraph, a mapping of several by name, StoredBuckets, or
      the model, ready to run, without the compiler. `device`, `threads`, `verify`, `trust`: see rlx.runtime.artifact. `model`:
      where the weights are, for a model saved without them. The file holds machine code: one that another user could have
      written is an UntrustedFileError, unless `trust` is True.
    - an .onnx file: an OnnxModel, which compiles for the dims of its inputs when they first come. `how`: arguments of the class.
    - a Hugging Face folder or a .gguf file, or the name of one on the Hub (ORG/NAME, ORG/NAME/FILE.gguf): an EmbeddingModel for
      encoders of BERT type, else a LanguageModel. They compile when they first run. `how`: arguments of the class.

    `device` and `threads` stand for `session=rlx.Session(device, threads=threads)`.

    ModelError: it is none of these, or a file is missing or unsupported; the message says which."""
    if begins_with(path := model_path(path)):
        return _stored(path, **how)
    if path.suffix == ".onnx":
        return _made(_package(str(path)).OnnxModel, path, how)
    if path.is_file() and path.suffix != ".gguf" and not begins_with(path, b"GGUF"):
        raise ModelError(f"{path} is neither an artifact of rlx nor a GGUF file: it begins with neither mark")
    from rlx.frontends.embedding import ENCODERS, EmbeddingModel
    from rlx.frontends.language import LanguageModel
    from rlx.frontends.models.families import FAMILIES

    if not path.exists():
        raise ModelError(
            f"there is no file or folder {path}; a model folder holds config.json, model.safetensors and tokenizer.json. A .gguf "
            "file, an artifact file, and a name on the Hub (ORG/NAME) are models too"
        )
    family = read_json(path / "config.json").get("model_type") if path.is_dir() else None
    if family in ENCODERS:
        return _made(EmbeddingModel, path, how)
    if path.is_dir() and family not in (*FAMILIES,):
        raise ModelError(f"{path}: model_type {family!r} is not supported; supported: {known((*ENCODERS, *FAMILIES))}")
    return _made(LanguageModel, path, how)


def _made(kind: Any, path: Any, how: dict[str, Any]) -> Any:
    """`device` and `threads` are those of a new session. OptionError: models of this kind do not take an argument."""
    if how:
        from inspect import signature  # slow to import

        from rlx.runtime.session import Session

        _, *takes = signature(kind).parameters
        if placed := {name: how.pop(name) for name in ("device", "threads") if name in how}:
            if how.get("session") is not None:
                raise OptionError(f"{path}: {known(placed)} and a session were given: the session has both")
            how["session"] = Session(**placed)
        if extra := how.keys() - takes:
            raise OptionError(f"{path}: {kind.__name__} has no argument {known(extra)}; it has {known({*takes, *FROM_FILE[:2]})}")
    return kind(path, **how)


def from_onnx(model: Any, dims: Mapping[str, int] | None = None, values: Mapping[str, Any] | None = None) -> Graph:
    """The graph of an ONNX model: a path, the bytes of a file, or an onnx.ModelProto. Its weights are set when it is compiled.

    `dims`: sizes of named dims; the others stay names, where the model's operators allow that. `values`: contents of inputs that
    must be known before a run (axes, sizes); a Shape for an input without declared dims, a list of them for a sequence.

    ModelError: the file is damaged, or contradicts itself. Unsupported: lists every node that is refused."""
    return _package("the model").from_onnx(model, dims, values)


def _package(asked: str) -> Any:
    try:
        return import_module("rlx.frontends.onnx")
    except ModuleNotFoundError as e:
        if e.name != "onnx":
            raise
        raise Unsupported(f"{asked} is read with the package onnx, which is not installed: pip install 'rlx[onnx]'") from None


@reading()
def load_encoder(path: str | PathLike[str], **how: Any) -> EmbeddingModel:
    """An EmbeddingModel from a folder, an .onnx file or an artifact file. `how`: its arguments; for an artifact, `session` and
    `options` may set device and threads. ModelError: it holds something else."""
    from rlx.frontends.embedding import EmbeddingModel

    place = model_path(path)
    if place.suffix == ".onnx":
        _package(str(place))
        from rlx.frontends.onnx.encoder import OnnxEncoder

        return OnnxEncoder(place, **how)
    return _stored(place, "encoder", **how) if begins_with(place) else EmbeddingModel(place, **how)


@reading()
def load_decoder(path: str | PathLike[str], **how: Any) -> LanguageModel:
    """A LanguageModel from a folder, a .gguf file or an artifact file, as load_encoder."""
    from rlx.frontends.language import LanguageModel

    place = model_path(path)
    if place.suffix == ".onnx":
        raise Unsupported(
            f"{place} is an ONNX model, which has no tokenizer: `rlx run` runs it on arrays; in Python, "
            "rlx.load(path, states=2048) keeps its past and present between runs"
        )
    return _stored(place, "decoder", **how) if begins_with(place) else LanguageModel(place, **how)


def _stored(
    path: Any, kind: str = "", session: Any = None, options: Any = None, progress: object = None, model: Any = None, **how: Any
) -> Any:
    """The contents of an artifact file, of this kind if it is given. `session` and `options` set device and threads. Options
    that were fixed when the file was saved can be given again, but not otherwise (OptionError)."""
    of_file = {name: how.pop(name) for name in FROM_FILE if name in how}
    if session is not None or options is not None:
        from rlx.runtime.session import session_of, with_more  # with the compiler, which only their owners need

        options = with_more(options)
    if session is not None:
        of_file |= {"device": session_of(session).device, "threads": session.threads}
        if session.transport is not None and session.transport.num_ranks > 1:
            raise Unsupported(f"{path} holds programs of one process: load the model's folder on several ranks")
    if options is not None:
        if options.tune:
            raise OptionError(f"{path}: tune={options.tune!r} is for compiles; the programs of an artifact file are compiled")
        of_file["threads"] = options.threads or of_file.get("threads")
    file = ArtifactFile(path, **of_file)
    if kind and file.kind != kind:
        raise ModelError(f"{path} holds {file.kind!r}, and {kind!r} is needed here")
    if model is not None and not (isinstance(about := file.manifest.get("model"), Mapping) and about.get("files")):
        raise OptionError(f"{path} needs no other files, got model={model!r:.60}: that is for a model saved without its weights")
    if file.kind == "encoder":
        from rlx.frontends.artifact import StoredEncoder

        found: Any = StoredEncoder(file, model)
    elif file.kind == "decoder":
        from rlx.frontends.artifact import StoredDecoder

        found = StoredDecoder(file, model, **{name: how.pop(name) for name in OF_EXPERTS if name in how})
    else:
        found = graphs_of(file)
    for name, value in how.items():
        if value is not None and getattr(found, name, None) != value:
            raise OptionError(f"{path}: {name}={value!r} is not as in the artifact file; save the model with this value")
    return found


__all__ = ["from_onnx", "load", "load_decoder", "load_encoder"]
