"""Text generation: prompt in, tokens and text out, one at a time or all at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rlx.errors import BindingError, ModelError, OptionError, called, flag, items, whole
from rlx.frontends.sampling import Sampler, Sampling, checked_seed
from rlx.ir.shown import Shown

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or messages {"role": …, "content": …}
BROKEN = "\ufffd"  # decoded in place of bytes that are not, or not yet, a character
CONTEXT = 8  # tokens of the prompt decoded before the first new ones, as context
MOST_BYTES = 16  # tokens; a character has at most 4 bytes, so a longer broken sequence stays broken


class Codec(Protocol):
    """Text to tokens and back."""

    @property
    def ends(self) -> Iterable[int]: ...
    @property
    def chat_template(self) -> str | None: ...
    @property
    def special(self) -> Mapping[str, str]: ...
    def encode(self, text: str, special: bool = True) -> list[int]: ...
    def decode(self, ids: Iterable[int]) -> str: ...


class Model(Protocol):
    """The interface that generation needs; rlx.frontends.language.LanguageModel implements it."""

    @property
    def codec(self) -> Codec: ...
    @property
    def capacity(self) -> int: ...  # positions, prompt and answer together
    @property
    def position(self) -> int: ...  # number of tokens in the state
    def step(self, tokens: Any) -> np.ndarray: ...  # int [n] -> f32 [1, vocab] after the last one
    def reset(self) -> None: ...


class Decoding(Protocol):
    """The decoding of one answer, token by token."""

    reused: int  # tokens at the start of the prompt that were in the state already

    # the token after the prompt; the state then holds only the prompt. `more`: the next token may be computed ahead
    def first(self, prompt: Sequence[int], /, more: bool = False) -> int: ...
    def next(self, more: bool = False) -> int: ...  # the next token. BindingError: the state is not that of this answer


@runtime_checkable
class SamplingModel(Protocol):
    """A model that samples on its own device, like LanguageModel. `reuse`: keep what the state has of the prompt."""

    def decoding(self, how: Sampling, seed: int, reuse: bool, /) -> Decoding: ...


def check_position(found: int, want: int) -> None:
    """BindingError: a model holds another number of tokens than an answer needs."""
    if want != found:
        raise BindingError(f"the model holds {found} tokens, this answer needs {want}: it was run or reset in between")


class HostDecoding:
    """Samples on the host, from the logits that a model's `step` returns."""

    reused = 0

    def __init__(self, model: Model, how: Sampling, seed: int) -> None:
        self._model, self._how, self._seed = model, how, seed
        self._last, self._position = -1, 0

    def first(self, prompt: Sequence[int], more: bool = False) -> int:
        self._model.reset()
        logits = self._model.step(np.array(prompt, np.int32))
        self._sampler = Sampler(self._how, logits.shape[-1], seed=self._seed)
        self._sampler.start(prompt)
        self._position = len(prompt)
        return self._choose(logits)

    def next(self, more: bool = False) -> int:
        check_position(self._model.position, self._position)
        token = self._choose(self._model.step(np.array([self._last], np.int32)))
        self._position += 1  # not before: an interrupted step must not pass for a finished one
        return token

    def _choose(self, logits: np.ndarray) -> int:
        self._last = int(self._sampler(logits)[0])
        return self._last


class Token(NamedTuple):
    """One step of generation: the token, and the text that became final in it (often a word, or nothing)."""

    id: int
    text: str


@dataclass
class Stats:
    """Counts, and wall-clock seconds. The first run of a shape compiles it; call `prepare` first to exclude that time."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of the prompt, that were in the state already
    new_tokens: int = 0
    prefill_seconds: float = 0.0  # from the first call of step to the first token
    decode_seconds: float = 0.0  # for the tokens after the first

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens processed per second."""
        return (self.prompt_tokens - self.reused_tokens) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second, without the first one."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


class Generator(Shown):
    """An answer being generated: iterate over it, or call `step`. It uses the model's state until it is finished.

    `tokens`: ids so far, without the end token. `text`: the text returned so far. `finish`: None, or the reason for the end:
    "end" (the model ended it), "stop" (a stop string), "length". `seed`: the one in use.
    `room`: the most tokens that the model's state has room for. `stats`: see Stats.
    """

    def __init__(
        self,
        model: Model,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        stop: str | Iterable[str] = (),
        ends: Iterable[int] | None = None,
        seed: int | None = None,
        on_text: Callable[[str], Any] | None = None,
        reuse: bool = False,
        **sampling: Any,
    ) -> None:
        """`prompt`: text, ids, or chat messages, to which the model's chat template is applied. `max_new_tokens` None: until
        the state is full. `stop`: strings that end the answer and are not part of it. `ends`: ids that end it; None: the
        model's own. `on_text` gets the text as it comes. `reuse`: process only what follows those first tokens of the prompt that
        a LanguageModel still has in its state from its last answer. `sampling`: the fields of Sampling.

        OptionError: an invalid value, or a prompt that leaves no room for an answer.
        """
        self.model, self.on_text = model, called("on_text", on_text, "pieces of text")
        self.prompt = prompt_tokens(model, prompt)
        room = self.room = model.capacity - len(self.prompt) + 1  # the last token is not processed
        if not self.prompt or room < 1:
            raise OptionError(f"the prompt has {len(self.prompt)} tokens; it needs 1 to the model's capacity, {model.capacity}")
        self.limit = room if max_new_tokens is None else min(room, whole("max_new_tokens", max_new_tokens, 1))
        self.ends = end_tokens(model, ends)
        self.how, self.seed = _sampling(sampling), checked_seed(seed)
        self.reuse, args = flag("reuse", reuse), (self.how, self.seed)
        if reuse and not isinstance(model, SamplingModel):
            raise OptionError(f"reuse needs a LanguageModel, got {type(model).__name__}")
        on_device = isinstance(model, SamplingModel)
        self._decoding: Decoding = model.decoding(*args, reuse) if on_device else HostDecoding(model, *args)
        self._stops = StopStrings((stop,) if isinstance(stop, str) else stop)
        self._decoder = TextDecoder(model.codec, self.prompt)
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self.stats = Stats(prompt_tokens=len(self.prompt))

    def _line(self) -> str:
        return f"of {self.model!r}: {len(self.tokens)} of at most {self.limit} tokens, {self.finish or 'not finished'}"

    def __iter__(self) -> Iterator[Token]:
        while (token := self.step()) is not None:
            yield token

    def run(self) -> Generator:
        """Generate to the end."""
        for _ in self:
            pass
        return self

    def step(self) -> Token | None:
        """The next token, or None when the answer is over.

        BindingError: the model was run or reset by other code in between. Errors of the model are passed on.
        """
        if self.finish is not None:
            return None
        if len(self.tokens) >= self.limit:  # an interrupt came between the last token and its text
            return self._token(self.tokens[-1], self._decoder.rest(), "length")
        begun = time.perf_counter()
        more = len(self.tokens) + 1 < self.limit
        token = self._decoding.next(more) if self.stats.new_tokens else self._decoding.first(self.prompt, more)
        self.stats.reused_tokens = self._decoding.reused
        self._count(time.perf_counter() - begun)
        if token in self.ends:
            return self._token(token, self._decoder.rest(), "end")
        self.tokens.append(token)
        full = len(self.tokens) == self.limit
        text = self._decoder.add(token)
        return self._token(token, text + self._decoder.rest() if full else text, "length" if full else None)

    def _count(self, spent: float) -> None:
        self.stats.new_tokens += 1
        if self.stats.new_tokens == 1:
            self.stats.prefill_seconds = spent
        else:
            self.stats.decode_seconds += spent

    def _token(self, token: int, text: str, finish: str | None) -> Token:
        """The step's result, with the part of `text` that cannot belong to a stop string."""
        text = self._stops.add(text)
        if self._stops.found:
            finish = "stop"
        elif finish is not None:
            text += self._stops.rest()
        self.text, self.finish = self.text + text, finish
        if text and self.on_text is not None:
            self.on_text(text)
        return Token(token, text)


def prepare(answer: Generator) -> None:
    """Read the weights of the LanguageModel, and compile every graph that the answer will run."""
    model: Any = answer.model
    left = len(answer.prompt) - (model.held(answer.prompt) if answer.reuse else 0)
    while left > 0:
        model.executable(size := model.chunk_size(left, model.capacity - len(answer.prompt) + left), answer.how.steps)
        left -= size
    model.executable(1, answer.how.steps)


def _sampling(given: dict[str, Any]) -> Sampling:
    try:
        return Sampling(**given)
    except TypeError:
        unknown, names = set(given) - set(Sampling.__dataclass_fields__), Sampling.__dataclass_fields__
        raise OptionError(f"no option is called {', '.join(sorted(unknown))}; sampling has {', '.join(names)}") from None


# -- prompts ---------------------------------------------------------------------------------------------------------


def prompt_tokens(model: Model, prompt: Prompt) -> list[int]:
    """Token ids of a text, or of messages (through the chat template); ids are returned as they are."""
    if not hasattr(model, "capacity"):
        raise OptionError(f"text is generated by a LanguageModel, got {type(model).__name__}")
    if isinstance(prompt, str):
        return model.codec.encode(prompt)
    wanted = "a prompt is a text, a list of token ids, or a list of messages {'role': …, 'content': …}"
    given = items(wanted, prompt, OptionError)
    if given and isinstance(given[0], Mapping):
        if model.codec.chat_template is None:
            raise ModelError("the model has no chat template; give the prompt as text")
        return model.codec.encode(render_chat(model.codec.chat_template, given, model.codec.special), special=False)
    if wrong := [i for i in given if isinstance(i, bool) or not isinstance(i, (int, np.integer)) or not 0 <= i < 1 << 31]:
        raise OptionError(f"{wanted}; got {wrong[0]!r:.60} in a list")
    return [int(i) for i in given]


def end_tokens(model: Model, ends: Iterable[int] | int | None) -> frozenset[int]:
    """The ids that end an answer: `ends`, or the model's own if it is None."""
    given = (ends,) if isinstance(ends, int) else model.codec.ends if ends is None else ends
    found = items("ends are a list of tokens", given, OptionError)
    return frozenset(whole("a token that ends the answer", i) for i in found)


def render_chat(template: str, messages: Sequence[Any], special: Mapping[str, str], **more: Any) -> str:
    """Render messages with a Jinja chat template, including the opening of an answer. The template runs in a sandbox.

    ModelError: jinja2 is not installed, or the template is invalid or rejects the messages.
    """
    try:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as e:
        raise ModelError("chat templates need the package `jinja2`: pip install jinja2") from e

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def as_json(x: Any, indent: int | None = None, **how: Any) -> str:
        return json.dumps(x, ensure_ascii=False, indent=indent, **how)

    loops = "jinja2.ext.loopcontrols"
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loops])
    environment.filters["tojson"] = as_json
    environment.globals.update(raise_exception=refuse, strftime_now=time.strftime)
    names = {"add_generation_prompt": True, "tools": None, **special, **more}
    try:
        return environment.from_string(template).render(messages=list(messages), **names)
    except Exception as e:  # noqa: BLE001  a template may raise whatever an expression of Python does
        raise ModelError(f"the chat template rejects these messages: {str(e) or type(e).__name__}") from None


# -- text ------------------------------------------------------------------------------------------------------------


class TextDecoder:
    """Streaming conversion of tokens to text. Bytes are held back until they form whole characters. Every piece is decoded
    together with some earlier tokens, since its spaces may depend on them."""

    def __init__(self, codec: Codec, before: Sequence[int] = ()) -> None:
        self._codec, self._ids = codec, list(before[-CONTEXT:])
        self._fresh = len(self._ids)  # tokens before this one are context
        self._shown = len(codec.decode(self._ids))  # characters of the decoded ids already returned

    def add(self, token: int) -> str:
        """The text that became final with this token."""
        self._ids.append(int(token))
        text = self._codec.decode(self._ids)
        whole = text.rstrip(BROKEN)
        if late := len(self._ids) - self._fresh >= MOST_BYTES:
            whole = text
        piece, self._shown = whole[self._shown :], max(self._shown, len(whole))
        if late or (whole == text and piece):  # decoding can start after this token
            self._ids, self._fresh = self._ids[self._fresh :], len(self._ids) - self._fresh
            self._shown = len(self._codec.decode(self._ids))
        return piece

    def rest(self) -> str:
        """The rest at the end: incomplete characters, as replacement characters."""
        piece = self._codec.decode(self._ids)[self._shown :]
        self._shown += len(piece)
        return piece


class StopStrings:
    """Passes text on up to the first stop string, however the text is split into pieces. `found`: there was one; the rest is
    dropped."""

    def __init__(self, stops: Iterable[str]) -> None:
        said = "a stop string is a str that is not empty"
        self._stops, self._held, self.found = items(said, stops, OptionError), "", False
        if any(not isinstance(s, str) or not s for s in self._stops):
            raise OptionError(f"{said}, got {self._stops!r:.80}")

    def add(self, text: str) -> str:
        """The text before the first position at which a stop string begins, or may begin."""
        if self.found:
            return ""
        text = self._held + text
        ends = [at for s in self._stops if (at := text.find(s)) >= 0]
        self.found = bool(ends)
        longest = max((n for s in self._stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)
        cut = min(ends) if ends else len(text) - longest
        self._held = "" if ends else text[cut:]
        return text[:cut]

    def rest(self) -> str:
        """The text held back, when no more follows."""
        held, self._held = self._held, ""
        return held
