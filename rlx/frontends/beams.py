"""Beam search over forks of a model's state: the forks of a beam share its state copy-on-write.

Candidates, scores and the end of the search are those of transformers' generate(num_beams=…, early_stopping=False).
"""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Real
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlx.errors import OptionError, whole
from rlx.frontends.generate import Model, Prompt, TextDecoder, end_tokens, prompt_tokens


class BranchingModel(Model, Protocol):
    """A model whose state can be forked and replaced, like LanguageModel."""

    handles: Any  # a HandleStore

    def use_handles(self, store: Any, /) -> None: ...


class Beam(NamedTuple):
    """An answer: its ids without the end token, its text, and its sum of log probabilities / length ** length_penalty."""

    tokens: list[int]
    text: str
    score: float


class _Running(NamedTuple):
    tokens: tuple[int, ...]
    total: float  # sum of log probabilities
    store: Any
    logits: np.ndarray  # f32 [vocab]


def beam_search(
    model: BranchingModel,
    prompt: Prompt,
    *,
    beams: int,
    max_new_tokens: int,
    length_penalty: float = 1.0,
    ends: Iterable[int] | None = None,
) -> list[Beam]:
    """The best answers found, at most `beams`, best first. `ends`: ids that end an answer, the model's own if None.

    Resets the model's state. OptionError: an invalid number, or one that exceeds the model's capacity.
    """
    ids, state, stop = prompt_tokens(model, prompt), model.handles, end_tokens(model, ends)
    beams, max_new_tokens = whole("beams", beams, 1), whole("max_new_tokens", max_new_tokens, 1)
    if isinstance(length_penalty, bool) or not isinstance(length_penalty, Real) or not -100 <= length_penalty <= 100:
        raise OptionError(f"length_penalty is a number from -100 to 100, got {length_penalty!r}")
    if not ids or len(ids) + max_new_tokens - 1 > model.capacity:
        raise OptionError(f"{len(ids)} tokens of prompt and {max_new_tokens} new ones; the model's capacity is {model.capacity}")
    try:
        model.reset()
        running = [_Running((), 0.0, state, model.step(np.array(ids, np.int32))[0])]
        found = _search(model, running, beams, max_new_tokens, length_penalty, stop)
    finally:
        model.use_handles(state)
        model.reset()
    return [Beam(tokens, _text(model, ids, tokens), score) for score, tokens in found]


def _search(
    model: BranchingModel, running: list[_Running], beams: int, limit: int, penalty: float, stop: frozenset[int]
) -> list[tuple[float, list[int]]]:
    """(score, tokens) of the finished answers, best first."""
    finished: list[tuple[float, list[int]]] = []
    keep = max(2, 1 + len(stop)) * beams  # enough for `beams` of them to continue
    for length in range(1, limit + 1):
        on: list[tuple[_Running, int, float]] = []
        for rank, (beam, token, total) in enumerate(_best(running, keep)):
            if token in stop or length == limit:
                if rank < beams:
                    finished.append((total / length**penalty, [*beam.tokens, *(() if token in stop else (token,))]))
            elif len(on) < beams:
                on.append((beam, token, total))
        finished = sorted(finished, key=lambda f: -f[0])[:beams]
        if not on or (len(finished) == beams and on[0][2] / length**penalty <= finished[-1][0]):
            break
        running = _branch(model, on)
    return finished


def _best(running: list[_Running], count: int) -> list[tuple[_Running, int, float]]:
    """The `count` likeliest continuations by one token: (beam, token, new total), best first."""
    rows = np.stack([b.logits for b in running]).astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    totals = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True)) + np.array([[b.total] for b in running])
    flat = totals.reshape(-1)
    count = min(count, flat.size)
    best = np.argpartition(-flat, count - 1)[:count]
    best = best[np.argsort(-flat[best], kind="stable")]
    return [(running[i // rows.shape[1]], int(i % rows.shape[1]), float(flat[i])) for i in best]


def _branch(model: BranchingModel, on: list[tuple[_Running, int, float]]) -> list[_Running]:
    """Extend every beam by its token, each with a separate state: the first child of a beam takes its state, others a fork."""
    stores: dict[int, list[Any]] = {}
    for beam, _, _ in on:
        if id(beam) not in stores:
            children = sum(other is beam for other, _, _ in on)
            stores[id(beam)] = [beam.store, *beam.store.fork(children - 1)]
    out = []
    for beam, token, total in on:
        store = stores[id(beam)].pop()
        model.use_handles(store)
        out.append(_Running((*beam.tokens, token), total, store, model.step(np.array([token], np.int32))[0]))
    return out


def _text(model: Model, prompt: list[int], tokens: list[int]) -> str:
    decoder = TextDecoder(model.codec, prompt)
    return "".join(decoder.add(t) for t in tokens) + decoder.rest()
