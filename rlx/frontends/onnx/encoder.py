"""Sentence encoders in ONNX: `rlx embed --model model.onnx`, with the tokenizer.json beside the file or one folder up."""

from __future__ import annotations

from collections import OrderedDict
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rlx.errors import ModelError, Unsupported, known
from rlx.forks import Lock
from rlx.frontends.embedding import EmbeddingModel, read_pooling
from rlx.frontends.models.bert import pool
from rlx.frontends.onnx.model import OnnxModel
from rlx.frontends.seconds import Seconds
from rlx.frontends.text import folder_tokenizer
from rlx.frontends.weights import read_json
from rlx.ir.graph import Graph
from rlx.ir.node import constant
from rlx.runtime import CompiledGraph, CompileOptions, Partitioned, Session
from rlx.runtime.session import session_of, with_more

IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
POSITIONS = 512  # tokens of a text, if no config.json beside the model says otherwise


class OnnxEncoder(EmbeddingModel):
    """An EmbeddingModel whose network is an ONNX file. If it gives a vector for each token, these are pooled as modules.json
    says (the mean, without that file)."""

    def __init__(
        self, path: str | PathLike[str], *, session: Session | None = None, options: CompileOptions | None = None
    ) -> None:
        """ModelError: the file is no encoder of token ids, or there is no tokenizer.json beside it."""
        self._session, self._options = session_of(session), with_more(options)
        self.device, self.transport, self.ranks, self.rank = self._session.device, None, 1, 0
        self.seconds, self._lock, self._compiled = Seconds(), Lock(), OrderedDict()
        self.folder = Path(path)
        with self.seconds.spent("read model"):
            self._net = OnnxModel(path, session=self._session, options=self._options)
            names = [i.name for i in self._net.inputs]
            if IDS not in names or set(names) - {IDS, MASK, TYPES}:
                raise ModelError(f"{path} has the inputs {known(names)}: an encoder has {IDS}, {MASK} and perhaps {TYPES}")
        with self.seconds.spent("read tokenizer"):
            near = self.folder.absolute().parents[:2]
            place = next((f for f in near if (f / "tokenizer.json").is_file()), None)
            if place is None:
                raise ModelError(f"{path} needs a tokenizer.json, in its folder or the one above")
            about = read_json(place / "config.json") if (place / "config.json").is_file() else {}
            self._tokenizer = folder_tokenizer(place, int(about.get("max_position_embeddings", POSITIONS)))
            self._pad, self._pooling = int(about.get("pad_token_id") or 0), read_pooling(place)
        self._dim = self._graph(1, 8).outputs[0].shape.static[1]

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def pad_token_id(self) -> int:
        return self._pad

    def save(self, path: Any, shapes: Any = None, weights: bool = True) -> NoReturn:
        raise Unsupported(f"{self.folder} is an ONNX file: rlx save keeps its executables, without the tokenizer")

    def _feeds(self, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        made = {IDS: ids, MASK: mask, TYPES: np.zeros_like(ids)}
        return {i.name: made[i.name].astype(i.shape.dtype.numpy if i.shape else np.int64) for i in self._net.inputs}

    def _graph(self, rows: int, length: int) -> Graph:
        """The network with its pooling."""
        shape = (rows, length)
        graph = self._net.imported(self._feeds(np.zeros(shape, np.int32), np.ones(shape, np.bool_))).graph
        outputs = dict(zip(graph.output_names, graph.outputs))
        tokens = next((v for v in graph.outputs if v.rank == 3 and v.dims[:2] == shape), None)
        whole = outputs.get("sentence_embedding") or next((v for v in graph.outputs if v.rank == 2 and v.dims[0] == rows), None)
        if tokens is not None and "sentence_embedding" not in outputs:
            mask = next((v.astype("bool") for v in graph.inputs if v.name == MASK), constant(np.ones(shape, np.bool_)))
            whole = pool(tokens, mask, *self._pooling)
        if whole is None:
            raise ModelError(f"{self.folder} has no output of a vector for each text or for each token")
        graph.set_outputs([whole.astype("f32")], ["embedding"])
        return graph

    def _made(self, rows: int, length: int) -> tuple[CompiledGraph, Partitioned | None]:
        with self.seconds.spent("build graph"):
            graph = self._graph(rows, length)
        return self._net.compiled(graph), None


__all__ = ["OnnxEncoder"]
