"""The decoding of one answer: network and sampling as one graph, a token ahead of the host where the device allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rlx.errors import BindingError, IndexRangeError, NumericsError, flag
from rlx.frontends.generate import check_position
from rlx.frontends.sampling import Sampling, beginning, checked_how, checked_seed, checked_tokens
from rlx.runtime import CompiledGraph


class Decoding:
    """The decoding of one answer of a LanguageModel with batch 1. Network and sampling are one graph. Each step after the first
    is a run without inputs: it reads its token from the state that the previous run wrote. The host reads one number.

    On an asynchronous device the run of the next token is queued before the host waits for this one, so the device does not wait
    for the host. It leaves the states a token ahead, until the next token is asked for or `take_back` is called.

    An interrupt (Ctrl-C) may leave runs whose tokens were not returned (`_unread`); `next` then goes on where the answer was."""

    def __init__(self, model: Any, how: Sampling, seed: int, reuse: bool = False) -> None:
        """`model`: the LanguageModel (rlx.frontends.language)."""
        self._model, self._how, self._steps = model, checked_how(how), how.steps
        self._seed, self._reuse = checked_seed(seed), flag("reuse", reuse)
        # Prompt and answer, of which the state `store` has the first `position`: an array, as a step allocates nothing
        self.ids = np.zeros(model.capacity + 1, np.int32)
        self.store, self.reused, self._count, self._prompt = model.handles, 0, 0, 0
        self._one: CompiledGraph | None = None  # it may be compiled for the second token
        self._ahead: Callable[[], np.ndarray] | None = None  # waits for the token of a run that is queued
        self._unread = False  # whether a run was begun whose token was not returned, other than that of `_ahead`

    def first(self, prompt: Sequence[int], more: bool = False) -> int:
        """The token after the prompt. Resets the model's state first, or cuts it to the tokens that are reused. `more`: another
        token is likely to be asked for."""
        model, tokens = self._model, self._model._checked(prompt)
        with model._lock:
            self._seed = model.agreed(self._seed, self._how, tokens.tolist())
            self.reused = model.held(prompt) if self._reuse else 0
            model._cut(self.reused)
            runs = model._chunks(tokens[:, self.reused :], self._steps)
            compiled = next(runs)  # set states before the last run, since earlier chunks have sampled too
            for name, array in beginning(self._how, self._seed, prompt, model.batch, model.config.vocab_size).items():
                compiled.bind_handle(name, array)
            next(runs)
            self.store, self._count, self._prompt, self._ahead = model.handles, len(prompt), len(prompt), None
            self.ids[: self._count] = prompt
            self._one, model._answer = model._compiled.get((1, self._steps)), self
            return self._token(self.store.read_later("token"), more)

    def next(self, more: bool = False) -> int:
        """The next token; `more` as for `first`. BindingError: the model was run or reset by other code in between."""
        model = self._model
        with model._lock:
            if model._answer is not self:
                raise BindingError("the model's state no longer belongs to this answer: it was run or reset in between")
            with model.seconds.spent("decode"):
                if self._unread:
                    self.take_back()
                return self._token(self._ahead or self._begun() or self._run(), more)

    def take_back(self) -> None:
        """Leave the states as the last token that was returned found them."""
        if self._ahead is None and not (self._unread and self._restores):
            return
        finish, self._ahead, self._unread = self._ahead, None, True  # until all is done, as the host may be interrupted here
        if finish is not None:
            finish()
        entries, drawn = self.store.entries, self._count - self._prompt
        for name, value in (("position", self._count - 1), ("token", self.ids[self._count - 1]), ("random.counter", drawn)):
            if name in entries:
                self.store.write(name, np.full(entries[name].shape.static, value, entries[name].shape.dtype.numpy))
        self._unread = False

    def _begun(self) -> Callable[[], np.ndarray] | None:
        """The token of the next run if that is done already, since the host was interrupted before it had the token.
        BindingError: the state is not that of this answer."""
        want, found = self._count - 1, int(self.store.read("position"))
        if self._unread and found == want + 1:
            return self.store.read_later("token")
        check_position(found, want)
        return None

    def _run(self) -> Callable[[], np.ndarray]:
        self._unread = True
        if self._one is None:
            self._one = self._model.executable(1, self._steps)
        self._model._experts.run(self._one, (), 1, 1)
        return self.store.read_later("token")

    def _token(self, wait: Callable[[], np.ndarray], more: bool) -> int:
        """The token of a run, once the run of the next one is queued."""
        self._unread = True
        self._ahead = self._run() if more and self._count + 1 < self._model.capacity and self._restores else None
        try:
            token = int(checked_tokens(wait(), self._model.config.vocab_size)[0])
        except NumericsError:
            self._drop()
            raise
        self.ids[self._count] = token
        self._count, self._unread = self._count + 1, False
        return token

    def _drop(self) -> None:
        """Forget the run that is queued. It fails, as it cannot look the token up; the next use of the model would raise that."""
        finish, self._ahead = self._ahead, None
        if finish is not None and self._one is not None:
            finish()
            with suppress(IndexRangeError):
                self._one.sync_pending()

    @property
    def _restores(self) -> bool:
        """Whether a token can be queued ahead and taken back: not on a device that runs it at once, not where ranks must agree or
        experts are fetched and recorded, and not if tokens that were seen are part of the state."""
        one = self._one
        if one is None or not one.asynchronous or self._model.ranks > 1:
            return False
        return not one.program().routers and "repetition_penalty" not in self._steps
