"""LanguageModel: loads a Hugging Face folder or a GGUF file as a function from tokens to the logits of the next one.

Graphs for a few chunk sizes (a ladder) share one copy of the weights and one state: keys and values of `capacity` positions,
filled up to `position`. A long prompt is processed in chunks; the last one is padded, and the cache entries of the padding are
overwritten by the tokens that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.forks import Lock
from rlx.frontends.checkpoint import Checkpoint
from rlx.frontends.codec import TextCodec, folder_codec, gguf_codec
from rlx.frontends.decoding import Decoding
from rlx.frontends.experts import ModelExperts, expert_params, source_of
from rlx.frontends.generate import Generator, Prompt
from rlx.frontends.hub import model_path
from rlx.frontends.models.decoder import build
from rlx.frontends.parallel import decoder_marks, shared_session, together
from rlx.frontends.sampling import Sampling, checked_how, checked_steps
from rlx.frontends.seconds import Seconds
from rlx.frontends.weights import reference, weight_files
from rlx.ir.graph import Graph
from rlx.ir.placement import Split
from rlx.ir.shown import Shown
from rlx.runtime.saving import save
from rlx.runtime.session import with_more

from rlx.errors import (  # isort: skip
    BindingError, CorruptFileError, IndexRangeError, InputDTypeError, InputShapeError, ModelError, OptionError, Unsupported,
    called, check_apart, flag, items, known, reading, whole,
)  # fmt: skip
from rlx.runtime import (  # isort: skip
    CompiledGraph, CompileOptions, ExpertPool, ExpertTiers, HandleStore, ParamStore, Partitioned, Session, SymmetricTransport,
    agreed, partition,
)  # fmt: skip

if TYPE_CHECKING:
    from rlx.runtime import Profile

LADDER = (1, 8, 32, 128, 512)  # tokens of a chunk; each size used is compiled once
DEFAULT_CAPACITY = 4096  # positions, if the model allows as many
CACHES = ("f32", "bf16", "f16")
DECODER = "decoder"  # kind of artifact file
SAVED_SAMPLING = (Sampling(temperature=0.8), Sampling(temperature=0.8, top_p=0.95))  # in an artifact file, by default
Steps = tuple[str, ...] | None  # Sampling.steps of graphs that sample; None: graphs that return logits


def program_name(tokens: int, steps: Steps) -> str:
    """The name of an executable in an artifact file."""
    return f"{tokens} {'logits' if steps is None else ' '.join(('sampled', *steps))}"


class LanguageModel(Shown):
    """Returned by `load`. Run it on one thread at a time. Weights are read, and memory is allocated, at the first step."""

    @reading()
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
        expert_budget: int | str | None = None,
        expert_policy: str | None = None,
        expert_profile: str | PathLike[str] | None = None,
        record_experts: str | PathLike[str] | None = None,
    ) -> None:
        """`weights`: format of matrices in memory: "f32", "bf16", "f16", "int8", "int4", or None: as in the file. `capacity`:
        positions, prompt and answer together. `batch`: sequences that step together. `cache`: format of keys and values, "f32",
        or rounded to "bf16" or "f16", which halves the bytes of them that a step reads. `progress(done, total)` counts bytes of
        weights as they are read. `transport` (or the session's own): connects the ranks that share the model. Each rank creates a
        LanguageModel, then calls the same methods with the same arguments. It reads its part of the weights, holds its part of
        the state, and gets complete results.

        For models with experts (docs/experts.md): `expert_budget`, "2GB" or a number of experts, bounds their memory. The others
        are read from the model's files when a router chooses them; `expert_policy` decides which stay ("hysteresis").
        `expert_profile`: a trace, whose most used experts are resident at first. `record_experts`: a file for a trace.

        Raises ModelError saying what is missing or unsupported, CorruptFileError for a damaged file.
        """
        self.seconds = Seconds()  # time spent, by phase
        self._session, self._options = shared_session(session, transport), with_more(options)
        if not isinstance(cache, str) or cache not in CACHES:
            raise OptionError(f"cache={cache!r:.60}: choose one of {known(CACHES)}")
        self.path, self.batch = model_path(path), whole("batch", batch, 1)
        self.device = self._session.device
        self.transport, self.ranks, rank = together(self._session)
        with self.seconds.spent("read model"):
            self.checkpoint = Checkpoint(self.path, weights, self.ranks, rank)
        self.config = self.checkpoint.config
        longest = self.config.max_position_embeddings
        self.capacity = min(DEFAULT_CAPACITY, longest) if capacity is None else whole("capacity", capacity, 1)
        if self.capacity > longest:
            raise OptionError(f"capacity={capacity}: the model has {longest} positions")
        self.cache, self.ladder = cache, LADDER
        self.params: ParamStore | None = None  # shared by every graph
        self._handles = HandleStore()  # the state; also shared by every graph
        self._progress = called("progress", progress, "(done, total)")
        how = expert_budget, expert_policy, expert_profile, record_experts
        self._experts = ModelExperts(self.config, self.path.name, *how)
        self.splits: dict[str, Split] = {}  # split of params and states among ranks
        if self.ranks > 1:
            self.splits = self.partitioned(self.whole_graph(1)).splits
        self._compiled: dict[tuple[int, Steps], CompiledGraph] = {}
        self._codec: TextCodec | None = None
        self._answer: Decoding | None = None  # the answer that owns the state
        self._lock = Lock()

    def _line(self) -> str:
        size = f"{self.config.num_hidden_layers} layers of {self.config.hidden_size}, {self.config.vocab_size} tokens"
        return f"{self.path.name!r} on {self.device}: {size}, {self.capacity} positions"

    @property
    def codec(self) -> TextCodec:
        """Text to tokens and back. Raises ModelError if the files hold no tokenizer."""
        if self._codec is None:
            self._codec = self._read_codec()
        return self._codec

    @reading()
    def _read_codec(self) -> TextCodec:
        gguf = self.checkpoint.gguf
        codec = folder_codec(self.path) if gguf is None else gguf_codec(gguf)
        if codec.vocab_size > self.config.vocab_size:
            found = f"{codec.vocab_size} tokens, the network's vocab_size is {self.config.vocab_size}"
            raise ModelError(f"{self.path}: the tokenizer has {found}")
        return codec

    # -- running

    @property
    def handles(self) -> HandleStore:
        """The state, which every graph shares. The token that an answer computes ahead is taken back first."""
        with self._lock:
            if self._answer is not None:
                self._answer.take_back()
            return self._handles

    @property
    def position(self) -> int:
        """The number of tokens in the state."""
        return int(self.handles.read("position")) if "position" in self.handles.entries else 0

    def step(self, tokens: Any) -> np.ndarray:
        """Process `tokens`, int [n] or [batch, n] with n of at least 1. Returns f32 [batch, vocab], the logits after the last
        one.

        IndexRangeError: they exceed the capacity, or one is not a valid id. The state is then as it was before the chunk
        that failed.
        """
        chunk = self._checked(tokens)
        with self._lock:
            *_, compiled = self._chunks(chunk)
            return np.array(compiled.outputs_view()[0])

    def _chunks(self, tokens: np.ndarray, steps: Steps = None) -> Iterator[CompiledGraph]:
        """Process i32 [batch, n] chunk by chunk. Yields the executable before the last run, and again after it."""
        start, length, at = self.position, tokens.shape[1], 0
        if start + length > self.capacity:
            raise IndexRangeError(f"{length} tokens at position {start} do not fit into a capacity of {self.capacity}")
        self._answer = None
        while at < length:
            size = self.chunk_size(length - at, self.capacity - start - at)
            compiled, count = self.executable(size, steps), min(size, length - at)
            piece, at = tokens[:, at : at + count], at + count
            if at == length:
                yield compiled
            with self.seconds.spent("decode" if size == 1 else "prefill"):
                if steps is not None and size == 1:
                    compiled.bind_handle("token", piece[:, 0])
                    self._experts.run(compiled, (), self.batch, count)
                else:
                    ids, valid = compiled.input_view("tokens"), compiled.input_view("count")
                    ids[:, :count], ids[:, count:], valid[()] = piece, 0, count
                    self._experts.run(compiled, (ids, valid), self.batch, count)
        yield compiled

    def decoding(self, how: Sampling, seed: int, reuse: bool = False) -> Decoding:
        """The decoding of one answer, sampled on the device. `reuse`: process only what follows `held` tokens of the prompt."""
        return Decoding(self, how, seed, reuse)

    def held(self, prompt: Sequence[int]) -> int:
        """How many tokens at the start of `prompt`, its last one excepted, the state has from the last answer."""
        last = self._answer
        if last is None or last.store is not self.handles:
            return 0
        ids = self._checked(prompt)[0]
        most = min(self.position, len(ids) - 1)
        differ = last.ids[:most] != ids[:most]
        return int(differ.argmax()) if differ.any() else most

    def agreed(self, seed: int, *call: object) -> int:
        """Rank 0's seed. CallMismatchError: the ranks pass a different `call`, the description of their next operation."""
        return seed if self.transport is None else agreed(self.transport, seed, *call)

    def reset(self) -> None:
        """Reset the state to no tokens."""
        self._cut(0)

    def _cut(self, tokens: int) -> None:
        """Keep the first tokens of the state; those that follow are overwritten."""
        store, self._answer = self.handles, None
        if entry := store.entries.get("position"):
            store.write("position", np.full(entry.shape.static, tokens, entry.shape.dtype.numpy))

    def move(self, position: int, room: int = 0) -> None:
        """Set the number of tokens in the state, whose contents stay. IndexRangeError: with `room` more, the capacity is too
        small."""
        if whole("position", position) < 0 or position + whole("room", room, 0) > self.capacity:
            raise IndexRangeError(f"{room} tokens at position {position} do not fit into a capacity of {self.capacity}")
        self._cut(position)

    def profiles(self) -> list[Profile]:
        """The time of each step of every executable (CompiledGraph.profile), from the state before its tokens."""
        found, here = [], self.position
        for (tokens, _), compiled in self._compiled.items():
            self.move(max(0, here - tokens))
            found.append(compiled.profile())
        self.move(here)
        return found

    def use_handles(self, store: HandleStore) -> None:
        """Continue from another state, such as a fork of `handles`. Nothing is copied. BindingError: not a HandleStore, or that
        of a model with other sizes; then nothing changes."""
        if not isinstance(store, HandleStore):
            raise BindingError(f"use_handles takes a HandleStore, got {type(store).__name__}")
        with self._lock:
            before = self.handles
            try:
                for compiled in self._compiled.values():
                    compiled.use_handles(store)
            except BindingError:
                for compiled in self._compiled.values():
                    compiled.use_handles(before)
                raise
            self._handles, self._answer = store, None

    def generate(self, prompt: Prompt, **options: Any) -> Generator:
        """A complete answer to a text, token ids or chat messages; options as for Generator. See `.text`, `.tokens`, `.stats`."""
        return Generator(self, prompt, **options).run()

    def save(
        self, path: str | Path, sizes: Iterable[int] | None = None, sampling: Iterable[Sampling] = SAVED_SAMPLING,
        weights: bool = True,
    ) -> int:  # fmt: skip
        """Write this model to an artifact file: machine code, weights, tokenizer, sizes of the state. `rlx.load(path)` then
        generates without the compiler and without the model's files. Returns the size of the file.

        `sizes`: tokens of a chunk to compile, 1 included; None: all that the capacity holds. `sampling`: settings to compile for;
        after a load, other values of the same fields can be used. Temperature 0 is always there. `weights` False: the file names
        the model's weight files, with their checksums, and a load reads them."""
        check_apart(self.path, path)
        ladder = tuple(n for n in self.ladder if n <= self.capacity)
        if sizes is not None:
            given = {whole("a size", n) for n in items(f"sizes are some of {known(ladder)}", sizes, OptionError)}
            if extra := given - set(ladder):
                raise OptionError(f"sizes are some of {known(ladder)}, got {min(extra)}")
            ladder = tuple(sorted({1, *given}))
        if self.ranks > 1:
            raise Unsupported("a model that several ranks share cannot be saved: save it on one rank")
        kinds = [checked_how(s).steps for s in items("sampling is a list of rlx.models.Sampling(...)", sampling, OptionError)]
        how = list(dict.fromkeys([None, (), *kinds] if self.batch == 1 else [None]))
        graphs = {program_name(n, steps): self.executable(n, steps) for n in ladder for steps in how}
        about = {"config": asdict(self.config), "batch": self.batch, "capacity": self.capacity, "cache": self.cache}
        about |= {"ladder": ladder, "sampling": how}
        about |= {"ends": None} if (codec := self._codec_if_any()) is None else codec.described()
        content = {} if codec is None else {"tokenizer": codec.to_json()}
        if not flag("weights", weights):
            config = [self.path / "config.json"] if self.path.is_dir() else []
            about |= reference(self.path, [*config, *weight_files(self.path)]) | {"weights": self.checkpoint.weights}
        return save(path, graphs, weights=weights, facts={"kind": DECODER, "model": about}, sections=content)

    def _codec_if_any(self) -> TextCodec | None:
        try:
            return self.codec
        except CorruptFileError:
            raise
        except ModelError:  # a model without a tokenizer takes ids
            return None

    def chunk_size(self, tokens: int, room: int) -> int:
        """The chunk size (from the ladder) for the next of `tokens` tokens, with `room` free positions: the smallest that
        holds all of them, unless more than half of it would be padding; a few tokens cost little more than one."""
        tokens, room = whole("tokens", tokens, 0), whole("room", room, 1)
        rungs = [n for n in self.ladder if n <= min(room, self.capacity)]
        above = next((n for n in rungs if n >= tokens), None)
        if above is not None and (above <= LADDER[1] or 2 * tokens >= above):
            return above
        return max(n for n in rungs if n <= max(tokens, 1))

    # -- executables

    def graph(self, tokens: int, all_logits: bool = False, steps: Steps = None) -> Graph:
        """A graph of `tokens` positions over this model's weights and state (see decoder.build). Extend it as needed, then
        `compile` it."""
        graph = self.whole_graph(tokens, all_logits, steps)
        return graph if self.ranks == 1 else self.partitioned(graph).graph

    def whole_graph(self, tokens: int, all_logits: bool = False, steps: Steps = None) -> Graph:
        """The same graph, before it is partitioned among ranks."""
        how = self.checkpoint.formats, flag("all_logits", all_logits), self.cache, checked_steps(steps), self._experts.guesses
        return build(self.config, self.batch, whole("tokens", tokens, 1), self.capacity, *how)

    def partitioned(self, graph: Graph) -> Partitioned:
        """Partition a whole graph over this model's weights and state for its ranks; `.report` lists their communication."""
        if not isinstance(graph, Graph):
            raise OptionError(f"partitioned takes a Graph, got {type(graph).__name__}")
        return partition(graph, decoder_marks(graph, self.config, self.ranks, self.checkpoint.block), self.ranks)

    def executable(self, tokens: int, steps: Steps = None) -> CompiledGraph:
        """The executable for a chunk of `tokens` tokens, cached or compiled now. It returns logits or, with `steps`
        (Sampling.steps), the next token."""
        tokens, steps = whole("tokens", tokens, 1), checked_steps(steps)
        with self._lock:
            if (tokens, steps) not in self._compiled:
                self._compiled[tokens, steps] = self._made(tokens, steps)
            return self._compiled[tokens, steps]

    def _made(self, tokens: int, steps: Steps) -> CompiledGraph:
        with self.seconds.spent("build graph"):
            graph = self.graph(tokens, steps=steps)
        return self.compile(graph)

    def compile(self, graph: Graph) -> CompiledGraph:
        """An executable that shares this model's weights and state."""
        with self._lock:
            compiled = self._session.compile(graph, self._options, params=self.params, handles=self.handles)
            for stage, seconds in compiled.report().seconds.items():
                self.seconds[f"compile: {stage}"] += seconds
            with self.seconds.spent("set weights"):
                self._experts.join(compiled, self._most_tokens())
                self._set_weights(compiled)
            self.params = compiled.params.store
            return compiled

    def _most_tokens(self) -> int:
        """Of all sequences in the largest chunk."""
        return self.batch * max(n for n in self.ladder if n <= self.capacity)

    @property
    def pool(self) -> ExpertPool | None:
        """The pool that keeps the experts within their budget, from the first step on. None: there is no budget."""
        return self._experts.pool

    def expert_tiers(self) -> ExpertTiers:
        """As CompiledGraph.expert_tiers."""
        return self.executable(self.ladder[0]).expert_tiers()

    def _set_weights(self, compiled: CompiledGraph) -> None:
        one_by_one, share = expert_params(compiled), self._experts.share
        sizes = {p.name: int(p.shape.size_bytes * (share if p.name in one_by_one else 1)) for p in compiled.params}
        missing, done = compiled.missing_params(), 0
        total = sum(sizes[name] for name in missing)
        for name in sorted(missing, key=lambda n: -sizes[n]):  # largest first: the temporary memory of packing is reused
            if name in one_by_one:
                compiled.set_params({name: source_of(self.checkpoint, name)})
            else:
                compiled.set_param(name, self.checkpoint.read(name, self.splits.get(name)))
            self.checkpoint.release()
            done += sizes[name]
            if self._progress is not None:
                self._progress(done, total)

    def memory(self, prompt: int = 1, steps: Steps = None) -> dict[str, int]:
        """Bytes by purpose for a prompt of `prompt` tokens and the decoding after it; `steps`: includes sampling. The sum is the
        peak memory of the process; `process` is its memory without the model, plus that of compiling. Nothing is allocated
        for this estimate."""
        experts = self.config.experts.count * len(self.config.experts.layers) if self.config.experts else 0

        def regions(size: int) -> dict[str, int]:
            return self._experts.within(self._session.plan(self.graph(size, steps=steps), self._options), experts)

        total = self._added_up(prompt, regions)
        return total | {"process": self._session.process_bytes()}

    def _added_up(self, prompt: int, regions: Callable[[int], Mapping[str, int]]) -> dict[str, int]:
        """Bytes by purpose of the programs of all sizes of chunk that a prompt needs. `regions`: those of one size."""
        sizes, left = {1}, whole("prompt", prompt, 0)
        if left > self.capacity:
            raise OptionError(f"prompt={prompt}: the model's capacity is {self.capacity}")
        while left > 0:
            sizes.add(size := self.chunk_size(left, self.capacity))
            left -= size
        total: dict[str, int] = {}
        for size in sorted(sizes):
            for purpose, n in regions(size).items():
                shared = purpose in ("params", "prepared", "handles")  # among all sizes
                total[purpose] = max(total.get(purpose, 0), n) if shared else total.get(purpose, 0) + n
        return total

    # -- inside

    def _checked(self, tokens: Any) -> np.ndarray:
        """i32 [batch, n]."""
        try:
            chunk = np.asarray(tokens)
        except ValueError as e:
            raise InputShapeError(f"tokens are [{self.batch}, n], each row as long: {e}") from None
        if chunk.dtype.kind not in "iu" and chunk.size:  # numpy takes [] for floats
            raise InputDTypeError(f"tokens are integers, got {chunk.dtype}")
        chunk = chunk[None] if chunk.ndim == 1 and self.batch == 1 else chunk
        if chunk.ndim != 2 or chunk.shape[0] != self.batch or not chunk.shape[1]:
            raise InputShapeError(f"tokens are [{self.batch}, n] with n of at least 1, got {list(chunk.shape)}")
        if outside := chunk[(chunk < 0) | (chunk >= self.config.vocab_size)].tolist():
            raise IndexRangeError(f"token {outside[0]} is outside 0 … {self.config.vocab_size - 1}")
        return chunk.astype(np.int32)


def load(path: str | Path, **how: Any) -> LanguageModel:
    """The language model in a Hugging Face folder or a .gguf file; arguments as for LanguageModel."""
    return LanguageModel(path, **how)
