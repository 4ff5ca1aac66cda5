"""Ready-to-use models: `load(folder).embed(texts)`, `load(folder_or_gguf).generate(prompt)`."""

from pathlib import Path
from typing import Any

from rlx.errors import (  # isort: skip
    BindingError, CorruptFileError, IndexRangeError, InputDTypeError, InputShapeError, ModelError, NumericsError, OptionError,
    RlxError, Unsupported, known,
)  # fmt: skip
from rlx.frontends.beams import beam_search
from rlx.frontends.embedding import ENCODERS, EmbeddingModel, default_folder
from rlx.frontends.generate import Generator
from rlx.frontends.language import LanguageModel
from rlx.frontends.models.families import FAMILIES
from rlx.frontends.weights import model_path, read_json


def load(path: str | Path, **how: Any) -> Any:
    """Load a Hugging Face folder or .gguf file: an EmbeddingModel for BERT-type encoders, else a LanguageModel.

    `how`: arguments of the model's class. ModelError: a file is missing or the model is unsupported; the message says which.
    """
    path = model_path(path)
    family = read_json(path / "config.json").get("model_type") if path.is_dir() else None
    if family in ENCODERS or not path.exists():
        return EmbeddingModel(path, **how)
    if path.is_dir() and family not in (*FAMILIES,):
        raise ModelError(f"{path}: model_type {family!r} is not supported; supported: {known((*ENCODERS, *FAMILIES))}")
    return LanguageModel(path, **how)


__all__ = [
    "BindingError", "CorruptFileError", "EmbeddingModel", "Generator", "IndexRangeError", "InputDTypeError",
    "InputShapeError", "LanguageModel", "ModelError", "NumericsError", "OptionError", "RlxError", "Unsupported",
    "beam_search", "default_folder", "load",
]  # fmt: skip
