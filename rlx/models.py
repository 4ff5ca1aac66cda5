"""Ready-to-use models: `load(folder).embed(texts)`, `load(folder_or_gguf).generate(prompt)`; the same for artifacts."""

from rlx.errors import (  # isort: skip
    BindingError, CorruptFileError, DeviceError, DownloadError, DTypeError, FormatError, GraphError, IndexRangeError,
    InputDTypeError, InputShapeError, MissingInputError, ModelError, NumericsError, OptionError, RlxError, UnknownNameError,
    Unsupported,
)  # fmt: skip
from rlx.frontends.beams import beam_search
from rlx.frontends.chat import Chat
from rlx.frontends.embedding import EmbeddingModel, default_folder
from rlx.frontends.generate import Generator
from rlx.frontends.language import LanguageModel
from rlx.frontends.load import load
from rlx.frontends.sampling import Sampling

__all__ = [
    "BindingError", "Chat", "CorruptFileError", "DTypeError", "DeviceError", "DownloadError", "EmbeddingModel", "FormatError",
    "Generator", "GraphError", "IndexRangeError", "InputDTypeError", "InputShapeError", "LanguageModel", "MissingInputError",
    "ModelError", "NumericsError", "OptionError", "RlxError", "Sampling", "UnknownNameError", "Unsupported", "beam_search",
    "default_folder", "load",
]  # fmt: skip
