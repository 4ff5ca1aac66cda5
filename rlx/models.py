"""Models ready to use: `rlx.models.load(folder).embed(texts)`."""

from rlx.frontends.embedding import EmbeddingModel, default_folder, load

__all__ = ["EmbeddingModel", "default_folder", "load"]
