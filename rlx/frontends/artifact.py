"""Models in artifact files: an EmbeddingModel or a LanguageModel whose programs, weights and tokenizer come from one file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import ref

from rlx.errors import CorruptFileError, InputShapeError, ModelError, RlxError, Unsupported, known, whole
from rlx.forks import Lock
from rlx.frontends.checkpoint import Checkpoint
from rlx.frontends.codec import TextCodec
from rlx.frontends.embedding import MERGE_TOKENS, Batch, EmbeddingModel, encoder_weights, set_weights
from rlx.frontends.experts import ModelExperts
from rlx.frontends.language import LanguageModel, Steps, program_name
from rlx.frontends.models.bert import BertConfig
from rlx.frontends.models.decoder import DecoderConfig, Experts, Latent, Rope
from rlx.frontends.seconds import Seconds
from rlx.frontends.text import Tokenizer, tokenizer_of
from rlx.frontends.weights import referenced
from rlx.ir.graph import Graph
from rlx.runtime import CompiledGraph, ExpertTiers, Partitioned
from rlx.runtime.artifact import ArtifactFile

T = TypeVar("T")


class StoredEncoder(EmbeddingModel):
    """An EmbeddingModel from an artifact file. It runs the shapes that were saved."""

    def __init__(self, file: ArtifactFile, model: Any = None) -> None:
        """`model`: the folder of the weights, for a file without them; None: where it was."""
        self._file, self.folder, self.device, self._lock = file, file.path, file.device, Lock()
        self.transport, self.ranks, self.rank, self.seconds = None, 1, 0, Seconds()
        with self.seconds.spent("read tokenizer"):
            self.config, self._rows, self._tokenizer = read(file, self._described)
        self._compiled = OrderedDict()
        self.weights = {}
        if (about := file.manifest["model"]).get("files") is not None:
            with self.seconds.spent("read model"):
                self.weights = read(file, lambda _: encoder_weights(self.config, referenced(about, model, str(file.path))))

    def _described(self, about: Mapping[str, Any]) -> tuple[BertConfig, dict[int, list[int]], Tokenizer]:
        """The configuration, the rows of the shapes by length, and the tokenizer."""
        config = BertConfig(**about["config"])
        rows: dict[int, list[int]] = {}
        for count, length in sorted((int(r), int(n)) for r, n in about["shapes"]):
            rows.setdefault(length, []).append(count)
        if {f"{r}x{n}" for n, counts in rows.items() for r in counts} != set(self._file) or min(rows) < 1:
            raise ValueError("the shapes are not those of the programs")
        made = tokenizer_of(self._file.read("tokenizer"), f"{self._file.path}: tokenizer")
        tokenizer = Tokenizer(made, about["lower"] is True, int(about["max_length"]), str(self._file.path))
        if tokenizer.vocab_size > config.vocab_size or tokenizer.max_length > config.max_position_embeddings:
            raise ValueError("the tokenizer has more tokens than the network")
        return config, dict(sorted(rows.items())), tokenizer

    def executable(self, batch: int, length: int) -> CompiledGraph:
        """The executable for up to `batch` texts of up to `length` tokens: the saved shape that runs the first of them."""
        tokens = min(whole("length", length, 1), self.max_length)
        with self._lock:
            planned = self._plan([tokens] * whole("batch", batch, 1), batch)[0]
            return self._compile(planned.rows, planned.length)[0]

    def memory(self, batch: int = 1, length: int | None = None) -> dict[str, int]:
        """As EmbeddingModel.memory, for the smallest saved shape that holds this one, or part of it."""
        return dict(self.executable(batch, self.max_length if length is None else length).memory_plan().regions)

    def save(self, path: Any, shapes: Any = None) -> NoReturn:
        raise Unsupported(f"{self.folder} is a saved model already: copy the file, or save other shapes from the model's folder")

    def _plan(self, lengths: Sequence[int], batch_size: int) -> list[Batch]:
        """As plan_batches, in the shapes of the file. InputShapeError: none holds a text."""
        todo = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        batches, at = [], 0
        while at < len(todo):
            length = next((n for n in self._rows if n >= lengths[todo[at]]), None)
            if length is None:
                raise InputShapeError(
                    f"{self.folder}: a text has {lengths[todo[at]]} tokens, the longest saved shape {max(self._rows)}; save the "
                    "model with longer shapes"
                )
            have = self._rows[length]
            most = max([r for r in have if r <= batch_size] or have[:1])
            near = [i for i in todo[at : at + most] if length - lengths[i] <= MERGE_TOKENS or lengths[i] > length // 2]
            count = max(1, min(len(near), batch_size))
            batches.append(Batch(tuple(todo[at : at + count]), next(r for r in have if r >= count), length))
            at += count
        return batches

    def _compile(self, rows: int, length: int) -> tuple[CompiledGraph, Partitioned | None]:
        with self.seconds.spent("load programs"):
            found = self._file[f"{rows}x{length}"]
        if self.weights:
            with self.seconds.spent("set weights"):
                set_weights(found, self.weights)
        self._compiled[rows, length] = found, None
        return found, None


class StoredDecoder(LanguageModel):
    """A LanguageModel from an artifact file. It runs the chunk sizes and the kinds of sampling that were saved."""

    def __init__(
        self, file: ArtifactFile, model: Any = None, expert_budget: int | str | None = None, expert_policy: str | None = None,
        expert_profile: Any = None, record_experts: Any = None,
    ) -> None:  # fmt: skip
        """`model`: the folder or file of the weights, for an artifact file without them; None: where it was."""
        self._file, self.path, self.device, self._lock = file, file.path, file.device, Lock()
        self.transport, self.ranks, self.seconds, self.splits = None, 1, Seconds(), {}
        self._compiled, self._codec, self._answer, self.params = {}, None, None, None
        self.config, self._about = read(file, self._described)
        how = expert_budget, expert_policy, expert_profile, record_experts
        self._experts = ModelExperts(self.config, self.path.name, *how)
        file.placed = partial(_place, ref(self))
        self._handles = file.handles(program_name(1, None))
        self.checkpoint, self._progress = None, None
        if self._about.get("files") is not None:
            with self.seconds.spent("read model"):
                self.checkpoint = read(file, lambda about: Checkpoint(referenced(about, model, str(file.path)), about["weights"]))

    def _described(self, about: Mapping[str, Any]) -> tuple[DecoderConfig, Mapping[str, Any]]:
        given = dict(about["config"])
        given |= {"ropes": tuple(None if r is None else _rope(r) for r in given["ropes"])}
        given |= {name: tuple(given[name]) for name in ("windows", "biases")}
        if given["experts"] is not None:
            given["experts"] = Experts(**{**given["experts"], "layers": tuple(map(int, given["experts"]["layers"]))})
        given["latent"] = None if given["latent"] is None else Latent(**given["latent"])
        config = DecoderConfig(**given)
        for field in fields(config):
            if field.type == "int" and not (type(v := getattr(config, field.name)) is int and 0 < v < 1 << 31):
                raise ValueError(f"{field.name} is {str(v)[:40]}")
        self.batch, self.capacity = (whole(name, about[name], 1) for name in ("batch", "capacity"))
        self.cache, self.ladder = str(about["cache"]), tuple(whole("ladder", n, 1) for n in about["ladder"])
        self._steps: list[Steps] = [None if s is None else tuple(map(str, s)) for s in about["sampling"]]
        if {program_name(n, s) for n in self.ladder for s in self._steps} != set(self._file) or 1 not in self.ladder:
            raise ValueError("the sizes are not those of the programs")
        return config, about

    def _read_codec(self) -> TextCodec:
        if self._about["ends"] is None:
            raise ModelError(f"{self.path} was saved without a tokenizer, which its model's files did not have")

        def codec(about: Mapping[str, Any]) -> TextCodec:
            made, template = tokenizer_of(self._file.read("tokenizer"), f"{self.path}: tokenizer"), about["chat_template"]
            special = {str(k): str(v) for k, v in about["special"].items()}
            found = TextCodec(made, map(int, about["ends"]), None if template is None else str(template), special)
            if found.vocab_size > self.config.vocab_size:
                raise ValueError("the tokenizer has more tokens than the network")
            return found

        return read(self._file, codec)

    def _made(self, tokens: int, steps: Steps) -> CompiledGraph:
        if steps not in self._steps:
            have = known(", ".join(s) or "temperature 0" for s in self._steps if s is not None)
            raise Unsupported(
                f"{self.path} was not saved for sampling with {', '.join(steps or ()) or 'temperature 0'}, but with {have}; "
                "save the model with sampling=[Sampling(…)] of these settings"
            )
        with self.seconds.spent("load programs"):
            found = self._file[program_name(tokens, steps)]
        if tokens == 1:
            self._experts.check_guesses(found)
        self._experts.join(found, self._most_tokens())
        if self.checkpoint is not None:
            with self.seconds.spent("set weights"):
                self._set_weights(found)
        if found.handles is not self._handles:
            found.use_handles(self._handles)
        return found

    def memory(self, prompt: int = 1, steps: Steps = None) -> dict[str, int]:
        """As LanguageModel.memory; loads the programs, and maps their weights."""
        return self._added_up(prompt, lambda size: self.executable(size, steps).memory_plan().regions)

    def _no_graph(self, *_: object, **__: object) -> NoReturn:
        raise Unsupported(f"{self.path} is a saved model, which has programs and no graphs: load the model's folder or GGUF file")

    def graph(self, tokens: int, all_logits: bool = False, steps: Steps = None) -> Graph:
        self._no_graph()

    whole_graph = partitioned = compile = save = _no_graph


def _place(model: Any, tiers: ExpertTiers) -> None:
    """Most experts leave the memory of a device before weights come to it. `model`: a weak reference, since it has the file."""
    if model() is not None:
        model()._experts.join(tiers, model()._most_tokens())


def _rope(r: Mapping[str, Any]) -> Rope:
    return Rope(tuple(map(float, r["frequencies"])), float(r["scale"]), tuple(map(float, r["far"])), int(r["trained"]))


def read(file: ArtifactFile, make: Callable[[Mapping[str, Any]], T]) -> T:
    """make(description of the model in the file). CorruptFileError: the description is wrong."""
    try:
        return make(file.manifest["model"])
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RlxError) as e:
        if isinstance(e, ModelError) and str(file.path) in str(e):
            raise
        raise CorruptFileError(f"{file.path}: the description of the model is wrong: {e!r:.200}") from e


__all__ = ["StoredDecoder", "StoredEncoder"]
