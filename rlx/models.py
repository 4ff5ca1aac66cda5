"""Models ready to use: `load(folder).embed(texts)`, `load(folder_or_gguf).generate(prompt)`."""

from pathlib import Path
from typing import Any

from rlx.frontends.beams import beam_search
from rlx.frontends.embedding import EmbeddingModel, default_folder
from rlx.frontends.generate import Generator
from rlx.frontends.language import LanguageModel
from rlx.frontends.models.families import FAMILIES
from rlx.frontends.weights import read_json


def load(path: str | Path, **how: Any) -> Any:
    """The model in a Hugging Face folder or a .gguf file: a LanguageModel, or an EmbeddingModel for BERT-type encoders.

    `how`: as the model's class takes it. Raises ModelError saying what is missing or unsupported.
    """
    path = Path(path)
    if path.is_file() or (path.is_dir() and read_json(path / "config.json").get("model_type") in tuple(FAMILIES)):
        return LanguageModel(path, **how)
    return EmbeddingModel(path, **how)


__all__ = ["EmbeddingModel", "Generator", "LanguageModel", "beam_search", "default_folder", "load"]
