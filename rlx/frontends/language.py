"""LanguageModel: a Hugging Face folder or a GGUF file made into a function from tokens to the logits of the next one.

Graphs for a few chunk sizes (a ladder) share one copy of the weights and one state: keys and values of `capacity` positions,
filled as far as `position` says. A long prompt goes through in chunks; the last one is padded, and what stands in the padding
is overwritten by the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import BindingError, IndexRangeError, InputDTypeError, InputShapeError, ModelError, OptionError, known, whole
from rlx.forks import Lock
from rlx.frontends.checkpoint import Checkpoint
from rlx.frontends.codec import TextCodec, folder_codec, gguf_codec
from rlx.frontends.generate import Generator, Prompt
from rlx.frontends.models.decoder import build
from rlx.frontends.parallel import decoder_marks, shared_session, together
from rlx.frontends.sampling import Sampling, beginning, checked_tokens
from rlx.frontends.seconds import Seconds
from rlx.frontends.weights import model_path
from rlx.ir.graph import Graph
from rlx.ir.placement import Split
from rlx.runtime import (
    CompiledGraph,
    CompileOptions,
    HandleStore,
    ParamStore,
    Partitioned,
    Session,
    SymmetricTransport,
    agreed,
    partition,
)  # fmt: skip

LADDER = (1, 8, 32, 128, 512)  # tokens of a chunk; each size that is used is compiled once
DEFAULT_CAPACITY = 4096  # positions, where the model allows as many
CACHES = ("f32", "bf16", "f16")
Steps = tuple[str, ...] | None  # Sampling.steps of graphs that choose, None of those that give logits


class LanguageModel:
    """Made by `load`. One thread at a time runs it. Weights are read, and memory is taken, at the first step."""

    def __init__(
        self,
        path: str | Path,
        *,
        weights: str | None = None,
        capacity: int | None = None,
        batch: int = 1,
        cache: str = "f32",
        session: Session | None = None,
        options: CompileOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
        transport: SymmetricTransport | None = None,
    ) -> None:
        """`weights`: how matrices are kept: "f32", "bf16", "f16", "int8", "int4", or None: as they are stored. `capacity`:
        positions, prompt and answer together. `batch`: sequences that step together. `cache`: how keys and values are kept,
        "f32", or rounded to "bf16" or "f16", which halves what a step reads of them. `progress(done, total)` counts bytes of
        weights as they are read. `transport` (or the session's own): to ranks that share the model. Each makes one, and then
        calls the same methods with the same arguments; it reads its part of the weights, holds its part of the state, and gets
        the whole results.

        Raises ModelError saying what is missing or unsupported, CorruptFileError for a damaged file.
        """
        self.seconds = Seconds()  # where the time went, by phase
        self.path, self.batch = model_path(path), whole("batch", batch, 1)
        self._session = shared_session(session, transport)
        self.transport, self.ranks, rank = together(self._session)
        with self.seconds.spent("read model"):
            self.checkpoint = Checkpoint(path, weights, self.ranks, rank)
        self.config = self.checkpoint.config
        longest = self.config.max_position_embeddings
        self.capacity = min(DEFAULT_CAPACITY, longest) if capacity is None else whole("capacity", capacity, 1)
        if self.capacity > longest:
            raise OptionError(f"capacity={capacity}: the model has {longest} positions")
        if cache not in CACHES:
            raise OptionError(f"cache={cache!r}: choose one of {known(CACHES)}")
        self.cache = cache
        self.params: ParamStore | None = None  # shared by every graph
        self.handles = HandleStore()  # the state; shared likewise
        self._options, self._progress = options or CompileOptions(), progress
        self.splits: dict[str, Split] = {}  # of params and states, where ranks share them
        if self.ranks > 1:
            self.splits = self.partitioned(self.whole_graph(1)).splits
        self._compiled: dict[tuple[int, Steps], CompiledGraph] = {}
        self._codec: TextCodec | None = None
        self._answer: Choices | None = None  # that the state belongs to
        self._lock = Lock()

    @property
    def codec(self) -> TextCodec:
        """Text to tokens and back. Raises ModelError if the files hold no tokenizer."""
        if self._codec is None:
            self._codec = self._read_codec()
        return self._codec

    def _read_codec(self) -> TextCodec:
        gguf = self.checkpoint.gguf
        codec = folder_codec(self.path) if gguf is None else gguf_codec(gguf)
        if codec.vocab_size > self.config.vocab_size:
            found = f"{codec.vocab_size} tokens, the network's vocab_size is {self.config.vocab_size}"
            raise ModelError(f"{self.path}: the tokenizer has {found}")
        return codec

    # -- running

    @property
    def position(self) -> int:
        """Tokens that the state holds."""
        entry = self.handles.entries.get("position")
        return int(entry.array) if entry else 0

    def step(self, tokens: Any) -> np.ndarray:
        """Take in `tokens`, int [n] or [batch, n] with n of at least 1; f32 [batch, vocab], the logits after the last one.

        IndexRangeError: they do not fit into the capacity, or one is no token; the state is then as it was before the
        chunk that failed.
        """
        chunk = self._checked(tokens)
        with self._lock:
            *_, compiled = self._chunks(chunk)
            return np.array(compiled.outputs_view()[0])

    def _chunks(self, tokens: np.ndarray, steps: Steps = None) -> Iterator[CompiledGraph]:
        """Take in i32 [batch, n] chunk by chunk; yields the executable before the last run, and after it."""
        self._answer = None
        start, length, at = self.position, tokens.shape[1], 0
        if start + length > self.capacity:
            raise IndexRangeError(f"{length} tokens at position {start} do not fit into a capacity of {self.capacity}")
        while at < length:
            size = self.chunk_size(length - at, self.capacity - start - at)
            compiled, count = self.executable(size, steps), min(size, length - at)
            piece, at = tokens[:, at : at + count], at + count
            if at == length:
                yield compiled
            with self.seconds.spent("decode" if size == 1 else "prefill"):
                if steps is not None and size == 1:
                    compiled.bind_handle("token", piece[:, 0])
                    compiled.run_slots(())
                else:
                    ids, valid = compiled.input_view("tokens"), compiled.input_view("count")
                    ids[:, :count], ids[:, count:], valid[()] = piece, 0, count
                    compiled.run_slots((ids, valid))
        yield compiled

    def choices(self, how: Sampling, seed: int) -> Choices:
        """The tokens of one answer, chosen on the device."""
        return Choices(self, how, seed)

    def agreed(self, seed: int, *what: object) -> int:
        """Rank 0's seed. CallMismatchError: `what` the ranks are about to do is not the same."""
        return seed if self.transport is None else agreed(self.transport, seed, *what)

    def reset(self) -> None:
        """Forget every token."""
        self._answer = None
        if entry := self.handles.entries.get("position"):
            entry.array[...] = 0

    def use_handles(self, store: HandleStore) -> None:
        """Go on from another state, such as a fork of `handles`. Nothing is copied. BindingError, and nothing has changed: it is
        no HandleStore, or that of a model of other sizes."""
        if not isinstance(store, HandleStore):
            raise BindingError(f"use_handles takes a HandleStore, got {type(store).__name__}")
        with self._lock:
            try:
                for compiled in self._compiled.values():
                    compiled.use_handles(store)
            except BindingError:
                for compiled in self._compiled.values():
                    compiled.use_handles(self.handles)
                raise
            self.handles = store

    def generate(self, prompt: Prompt, **options: Any) -> Generator:
        """A whole answer to a text, token ids or chat messages; options as Generator takes them. `.text`, `.tokens`, `.stats`."""
        return Generator(self, prompt, **options).run()

    def chunk_size(self, tokens: int, room: int) -> int:
        """The rung of the ladder that takes the next of `tokens` tokens where `room` positions are free: the least that
        holds them all, unless more than half of it would be padding; a few tokens cost little more than one."""
        rungs = [n for n in LADDER if n <= min(room, self.capacity)]
        above = next((n for n in rungs if n >= tokens), None)
        if above is not None and (above <= LADDER[1] or 2 * tokens >= above):
            return above
        return max(n for n in rungs if n <= max(tokens, 1))

    # -- executables

    def graph(self, tokens: int, all_logits: bool = False, steps: Steps = None) -> Graph:
        """A graph of `tokens` positions over this model's weights and state (see llama.build); add to it what you need, then
        `compile` it."""
        graph = self.whole_graph(tokens, all_logits, steps)
        return graph if self.ranks == 1 else self.partitioned(graph).graph

    def whole_graph(self, tokens: int, all_logits: bool = False, steps: Steps = None) -> Graph:
        """The same, not yet parted among ranks."""
        return build(self.config, self.batch, tokens, self.capacity, self.checkpoint.formats, all_logits, self.cache, steps)

    def partitioned(self, graph: Graph) -> Partitioned:
        """A whole graph over this model's weights and state as its ranks run it; `.report` says what they exchange."""
        return partition(graph, decoder_marks(graph, self.config, self.ranks, self.checkpoint.block), self.ranks)

    def executable(self, tokens: int, steps: Steps = None) -> CompiledGraph:
        """The executable for a chunk of that many tokens, which gives logits or, by `steps` (Sampling.steps), the next token;
        from the cache or made now."""
        with self._lock:
            if (tokens, steps) not in self._compiled:
                with self.seconds.spent("build graph"):
                    graph = self.graph(tokens, steps=steps)
                self._compiled[tokens, steps] = self.compile(graph)
            return self._compiled[tokens, steps]

    def compile(self, graph: Graph) -> CompiledGraph:
        """An executable that shares this model's weights and state."""
        with self._lock:
            compiled = self._session.compile(graph, self._options, params=self.params, handles=self.handles)
            for stage, seconds in compiled.report().seconds.items():
                self.seconds[f"compile: {stage}"] += seconds
            with self.seconds.spent("set weights"):
                self._set_weights(compiled)
            self.params = compiled.params
            return compiled

    def _set_weights(self, compiled: CompiledGraph) -> None:
        sizes = {p.name: p.shape.size_bytes for p in self.graph(1).params}
        missing, done = compiled.missing_params(), 0
        total = sum(sizes[name] for name in missing)
        for name in sorted(missing, key=lambda n: -sizes[n]):  # what a large one takes while it is packed is free again later
            compiled.set_param(name, self.checkpoint.read(name, self.splits.get(name)))
            self.checkpoint.release()
            done += sizes[name]
            if self._progress is not None:
                self._progress(done, total)

    def memory(self, prompt: int = 1, steps: Steps = None) -> dict[str, int]:
        """Bytes by purpose that a prompt of that many tokens and the decoding after it take; `steps`: the choosing of tokens
        included. Their sum is the most that the process will hold at once: `process` is what it holds without the model, and
        what compiling adds to that. Nothing is allocated for this."""
        sizes, left = {1}, whole("prompt", prompt, 0)
        while left > 0:
            sizes.add(size := self.chunk_size(left, self.capacity))
            left -= size
        total: dict[str, int] = {}
        for size in sorted(sizes):
            for purpose, n in self._session.plan(self.graph(size, steps=steps), self._options).regions.items():
                shared = purpose in ("params", "prepared", "handles")  # by all sizes
                total[purpose] = max(total.get(purpose, 0), n) if shared else total.get(purpose, 0) + n
        return total | {"process": self._session.process_bytes()}

    # -- inside

    def _checked(self, tokens: Any) -> np.ndarray:
        """i32 [batch, n]."""
        chunk = np.asarray(tokens)
        if chunk.dtype.kind not in "iu":
            raise InputDTypeError(f"tokens are integers, got {chunk.dtype}")
        chunk = chunk[None] if chunk.ndim == 1 and self.batch == 1 else chunk
        if chunk.ndim != 2 or chunk.shape[0] != self.batch or not chunk.shape[1]:
            raise InputShapeError(f"tokens are [{self.batch}, n] with n of at least 1, got {list(chunk.shape)}")
        if outside := chunk[(chunk < 0) | (chunk >= self.config.vocab_size)].tolist():
            raise IndexRangeError(f"token {outside[0]} is outside 0 … {self.config.vocab_size - 1}")
        return chunk.astype(np.int32)


class Choices:
    """The tokens of one answer of a LanguageModel of batch 1. Prompt, network and choice are one graph; a step after the first
    is a run without inputs, which finds its token where the run before left it. The host reads one number."""

    def __init__(self, model: LanguageModel, how: Sampling, seed: int) -> None:
        self._model, self._how, self._steps, self._seed = model, how, how.steps, seed

    def first(self, prompt: Sequence[int]) -> int:
        """The token after the prompt; the model forgets what it held."""
        model, tokens = self._model, self._model._checked(prompt)
        with model._lock:
            self._seed = model.agreed(self._seed, self._how, tokens.tolist())
            model.reset()
            runs = model._chunks(tokens, self._steps)
            compiled = next(runs)  # before the last run: what chunks before that chose is undone by a beginning
            for name, array in beginning(self._how, self._seed, prompt, model.batch, model.config.vocab_size).items():
                compiled.bind_handle(name, array)
            next(runs)
            model._answer = self
            return self._chosen()

    def next(self) -> int:
        """The token after the last one. BindingError: the model was run by someone else in between."""
        model = self._model
        with model._lock:
            if model._answer is not self:
                raise BindingError("the model is in the middle of something else: it was run or reset in between")
            compiled = model.executable(1, self._steps)
            with model.seconds.spent("decode"):
                compiled.run_slots(())
            return self._chosen()

    def _chosen(self) -> int:
        return int(checked_tokens(self._model.handles.entries["token"].array, self._model.config.vocab_size)[0])


def load(path: str | Path, **how: Any) -> LanguageModel:
    """The language model in a Hugging Face folder or a .gguf file; arguments as LanguageModel takes them."""
    return LanguageModel(path, **how)
