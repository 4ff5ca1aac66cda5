"""Conversations: messages in, answers out. Keys and values of the earlier messages stay in the model's state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.errors import ModelError, OptionError
from rlx.frontends.generate import Generator, render_chat
from rlx.frontends.language import LanguageModel
from rlx.ir.shown import Shown, counted


class Chat(Shown):
    """A conversation with a language model. `messages`: {"role": …, "content": …} of all that was said so far.

    Only the tokens that a message adds are processed, unless the model's template rewrites earlier messages, or the model ran
    something else in between. Such an answer may differ by rounding from one to the whole conversation at once."""

    def __init__(
        self, model: LanguageModel, system: str | None = None, on_text: Callable[[str], Any] | None = None, **options: Any
    ) -> None:
        """`system`: instructions that stand before the first message. `options`: those of Generator, for every answer.

        ModelError: the model has no chat template."""
        if not isinstance(model, LanguageModel):
            raise OptionError(f"a Chat is with a LanguageModel, got {type(model).__name__}")
        if model.codec.chat_template is None:
            raise ModelError(f"{model.path} has no chat template: it continues text, and was not trained to chat")
        self.model, self._system, self._on_text, self._options = model, system, on_text, options
        self.reset()
        first = self._render([*self._said, {"role": "user", "content": "Hello"}])  # some templates reject a system prompt,
        model.codec.encode(first, special=False)  # and some text is no text

    def reset(self) -> None:
        """Begin a new conversation."""
        self._said = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._answer: Generator | None = None
        self._rendered = self._asked = ""

    def _line(self) -> str:
        return f"with {self.model!r}: {counted(len(self.messages), 'message')}"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The system prompt, questions and answers. An answer that was stopped is in it as far as it came."""
        if self._answer is None or not self._answer.text:
            return list(self._said)
        asked, answer = {"role": "user", "content": self._asked}, {"role": "assistant", "content": self._answer.text}
        return [*self._said, asked, answer]

    def ask(self, text: str) -> Generator:
        """The answer to a message, to be run by the caller; whatever of it is generated belongs to the conversation.

        OptionError: the conversation does not fit into the model's capacity. It is then as before."""
        messages = [*self.messages, {"role": "user", "content": text}]
        rendered = self._render(messages)
        ids = self._tokens(rendered)
        if len(ids) > (room := self.model.capacity):
            raise OptionError(f"the context is full: with this message the conversation has {len(ids)} tokens, the model {room}")
        answer = Generator(self.model, ids, on_text=self._on_text, reuse=True, **self._options)
        self._said, self._answer, self._rendered, self._asked = messages[:-1], answer, rendered, text
        return answer

    def _render(self, messages: list[dict[str, str]]) -> str:
        codec = self.model.codec
        return render_chat(str(codec.chat_template), messages, codec.special)

    def _tokens(self, rendered: str) -> list[int]:
        """The tokens of a prompt. The last answer in it is the tokens that the model chose, which may differ from those that the
        tokenizer makes of its text."""
        encode, last = self.model.codec.encode, self._answer
        ids = encode(rendered, special=False)
        if last is not None and last.finish in ("end", "length") and rendered.startswith(before := self._rendered + last.text):
            rest = encode(rendered[len(before) :], special=False)
            if rest and ids[-len(rest) :] == rest:  # the tokenizer, too, begins a token there
                return [*last.prompt, *last.tokens, *rest]
        return ids
