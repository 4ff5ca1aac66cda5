"""Text generation: prompt in, tokens and text out, one at a time or all at once."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rlx.errors import BindingError, ModelError, OptionError
from rlx.frontends.sampling import Sampler, Sampling, checked_seed

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]  # text, token ids, or messages {"role": …, "content": …}
BROKEN = "\ufffd"  # what bytes decode to that are no, or not yet a, character
CONTEXT = 8  # tokens of the prompt that the first new ones are decoded after
MOST_BYTES = 16  # tokens; a character has at most 4 bytes, so what is broken for longer stays so


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
    """What generation needs of a language model; rlx.frontends.language.LanguageModel is one."""

    @property
    def codec(self) -> Codec: ...
    @property
    def capacity(self) -> int: ...  # positions, prompt and answer together
    @property
    def position(self) -> int: ...  # tokens that the state holds
    def step(self, tokens: Any) -> np.ndarray: ...  # int [n] -> f32 [1, vocab] after the last one
    def reset(self) -> None: ...


class Choices(Protocol):
    """The tokens of one answer."""

    def first(self, prompt: Sequence[int], /) -> int: ...  # after the prompt, which is all that the model then holds
    def next(self) -> int: ...  # after the last one


@runtime_checkable
class ChoosingModel(Protocol):
    """A model that chooses its tokens where it computes, as LanguageModel does."""

    def choices(self, how: Sampling, seed: int, /) -> Choices: ...


class HostChoices:
    """Choices by a model's `step`, from logits that come to the host."""

    def __init__(self, model: Model, how: Sampling, seed: int) -> None:
        self._model, self._how, self._seed = model, how, seed
        self._last = -1

    def first(self, prompt: Sequence[int]) -> int:
        self._model.reset()
        logits = self._model.step(np.array(prompt, np.int32))
        self._sampler = Sampler(self._how, logits.shape[-1], seed=self._seed)
        self._sampler.start(prompt)
        return self._choose(logits)

    def next(self) -> int:
        return self._choose(self._model.step(np.array([self._last], np.int32)))

    def _choose(self, logits: np.ndarray) -> int:
        self._last = int(self._sampler(logits)[0])
        return self._last


class Token(NamedTuple):
    """One step of generation: the token, and the text that is certain since the step before (often a word, or nothing)."""

    id: int
    text: str


@dataclass
class Stats:
    """Counts, and seconds by the clock. The first run of a shape compiles it: prepare takes that out of the numbers."""

    prompt_tokens: int = 0
    new_tokens: int = 0
    prefill_seconds: float = 0.0  # from the first call of step to the first token
    decode_seconds: float = 0.0  # of the tokens after the first

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second, the first one left out."""
        return (self.new_tokens - 1) / self.decode_seconds if self.decode_seconds else 0.0


class Generator:
    """An answer in the making: iterate over it, or call `step`. It owns the model's state until it is finished.

    `tokens`: ids so far, without one that ends the answer. `text`: what has been given out. `finish`: None, or why it is over:
    "end" (the model ended it), "stop" (a stop string), "length". `seed`: the one in use. `stats`: see Stats.
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
        **sampling: Any,
    ) -> None:
        """`prompt`: text, ids, or chat messages, to which the model's chat template is applied. `max_new_tokens` None: until
        the state is full. `stop`: strings that end the answer and are not part of it. `ends`: ids that end it; None: the
        model's own. `on_text` gets the text as it comes. `sampling`: the fields of Sampling.

        OptionError: a value that has no meaning, or a prompt that leaves no room for an answer.
        """
        self.model, self.on_text = model, on_text
        self.prompt = prompt_tokens(model, prompt)
        room = model.capacity - len(self.prompt) + 1  # the last token is not taken in any more
        if not self.prompt or room < 1:
            raise OptionError(f"the prompt has {len(self.prompt)} tokens; it needs 1 to the model's capacity, {model.capacity}")
        if max_new_tokens is not None and (type(max_new_tokens) is not int or max_new_tokens < 1):
            raise OptionError(f"max_new_tokens is a whole number of at least 1, got {max_new_tokens!r}")
        self.limit = room if max_new_tokens is None else min(room, max_new_tokens)
        self.ends = frozenset(model.codec.ends if ends is None else ends if isinstance(ends, Iterable) else (ends,))
        if not all(isinstance(i, (int, np.integer)) for i in self.ends):
            raise OptionError(f"ends are token ids, got {ends!r:.80}")
        self.how, self.seed = _sampling(sampling), checked_seed(seed)
        on_device = isinstance(model, ChoosingModel)
        self._choices: Choices = (model.choices if on_device else partial(HostChoices, model))(self.how, self.seed)
        self._stops = StopStrings((stop,) if isinstance(stop, str) else stop)
        self._decoder = TextDecoder(model.codec, self.prompt)
        self.tokens: list[int] = []
        self.text = ""
        self.finish: str | None = None
        self.stats = Stats(prompt_tokens=len(self.prompt))

    def __iter__(self) -> Iterator[Token]:
        while (token := self.step()) is not None:
            yield token

    def run(self) -> Generator:
        """To the end."""
        for _ in self:
            pass
        return self

    def step(self) -> Token | None:
        """The next token, or None when the answer is over.

        BindingError: the model was run by someone else in between. Errors of the model come as they are.
        """
        if self.finish is not None:
            return None
        begun = time.perf_counter()
        token = self._next() if self.stats.new_tokens else self._choices.first(self.prompt)
        self._count(time.perf_counter() - begun)
        if token in self.ends:
            return self._token(token, self._decoder.rest(), "end")
        self.tokens.append(token)
        full = len(self.tokens) == self.limit
        text = self._decoder.add(token)
        return self._token(token, text + self._decoder.rest() if full else text, "length" if full else None)

    def _next(self) -> int:
        want, found = len(self.prompt) + len(self.tokens) - 1, self.model.position
        if want != found:
            raise BindingError(f"the model holds {found} tokens, this answer needs {want}: it was run or reset in between")
        return self._choices.next()

    def _count(self, spent: float) -> None:
        self.stats.new_tokens += 1
        if self.stats.new_tokens == 1:
            self.stats.prefill_seconds = spent
        else:
            self.stats.decode_seconds += spent

    def _token(self, token: int, text: str, finish: str | None) -> Token:
        """The step's result: `text` as far as no stop string is, or may be, in it."""
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
    """Read the weights of the LanguageModel, and compile all that the answer will run."""
    model: Any = answer.model
    left = len(answer.prompt)
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
    """Ids of a text, of messages by way of the chat template, or as given."""
    if isinstance(prompt, str):
        return model.codec.encode(prompt)
    items = list(prompt) if isinstance(prompt, Iterable) else [None]
    if items and isinstance(items[0], Mapping):
        if model.codec.chat_template is None:
            raise ModelError("the model has no chat template; give the prompt as text")
        return model.codec.encode(render_chat(model.codec.chat_template, items, model.codec.special), special=False)
    if any(isinstance(i, bool) or not isinstance(i, (int, np.integer)) or not 0 <= i < 1 << 31 for i in items):
        raise OptionError("a prompt is a text, a list of token ids, or a list of messages {'role': …, 'content': …}")
    return [int(i) for i in items]  # type: ignore[arg-type]


def render_chat(template: str, messages: Sequence[Any], special: Mapping[str, str], **more: Any) -> str:
    """The text that a Jinja chat template makes of messages, with the opening of an answer. The template runs in a sandbox.

    ModelError: jinja2 is not installed, or the template is broken or refuses the messages.
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
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as e:
        raise ModelError(f"the chat template does not take these messages: {e}") from None


# -- text ------------------------------------------------------------------------------------------------------------


class TextDecoder:
    """Tokens to text as it becomes certain: bytes wait until they are whole characters, and every piece is decoded together
    with some tokens before it, on which its spaces may depend."""

    def __init__(self, codec: Codec, before: Sequence[int] = ()) -> None:
        self._codec, self._ids = codec, list(before[-CONTEXT:])
        self._fresh = len(self._ids)  # tokens before this one are context
        self._shown = len(codec.decode(self._ids))  # characters of the decoded ids that are given out

    def add(self, token: int) -> str:
        """Text that this token made certain."""
        self._ids.append(int(token))
        text = self._codec.decode(self._ids)
        whole = text.rstrip(BROKEN)
        if late := len(self._ids) - self._fresh >= MOST_BYTES:
            whole = text
        piece, self._shown = whole[self._shown :], max(self._shown, len(whole))
        if late or (whole == text and piece):  # this token's end is a good place to start from
            self._ids, self._fresh = self._ids[self._fresh :], len(self._ids) - self._fresh
            self._shown = len(self._codec.decode(self._ids))
        return piece

    def rest(self) -> str:
        """What is left at the end: bytes that never became a character, as the sign for such."""
        piece = self._codec.decode(self._ids)[self._shown :]
        self._shown += len(piece)
        return piece


class StopStrings:
    """Text let through as far as no stop string is in it, wherever the pieces are cut. `found`: one was; the rest is dropped."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops, self._held, self.found = tuple(stops) if isinstance(stops, Iterable) else (stops,), "", False
        if any(not isinstance(s, str) or not s for s in self._stops):
            raise OptionError(f"a stop string is a str that is not empty, got {list(self._stops)!r}")

    def add(self, text: str) -> str:
        """The text that no stop string begins in, or may begin in."""
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
        """What was held back, once nothing follows."""
        held, self._held = self._held, ""
        return held
