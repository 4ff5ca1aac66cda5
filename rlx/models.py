"""Ready-to-use models: `load(folder).embed(texts)`, `load(folder_or_gguf).generate(prompt)`; the same for artifacts."""

from rlx.errors import (  # isort: skip
    BindingError, CorruptFileError, DownloadError, GraphError, IndexRangeError, InputDTypeError, InputShapeError, ModelError,
    NumericsError, OptionError, RlxError, Unsupported,
)  # fmt: skip
from rlx.frontends.beams import beam_search
from rlx.frontends.chat import Chat
from rlx.frontends.embedding import EmbeddingModel, default_folder
from rlx.frontends.generate import Generator
from rlx.frontends.language import LanguageModel
from rlx.frontends.load import load
from rlx.frontends.sampling import Sampling

__all__ = [
    "BindingError", "Chat", "CorruptFileError", "DownloadError", "EmbeddingModel", "Generator", "GraphError", "IndexRangeError",
    "InputDTypeError", "InputShapeError", "LanguageModel", "ModelError", "NumericsError", "OptionError", "RlxError", "Sampling",
    "Unsupported", "beam_search", "default_folder", "load",
]  # fmt: skip
