"""Routers without a model: choices of experts that are skewed, that drift, or that come in bursts.

A router's choice is drawn without replacement with probabilities softmax(logits) (Gumbel noise, the best k). Every seed and every
setting may be used: none was picked for a policy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rlx.runtime.traces import Forward, MoELayer


def layers(count: int = 4, experts: int = 64, top_k: int = 8, nbytes: int = 1000) -> list[MoELayer]:
    return [MoELayer(f"model.layers.{i}.mlp", experts, top_k, nbytes) for i in range(count)]


def drawn(rng: np.random.Generator, logits: Sequence[np.ndarray], of: Sequence[MoELayer], tokens: int = 1) -> Forward:
    """One forward."""
    noise = [rng.gumbel(size=(tokens, x.experts)) for x in of]
    return Forward([np.argsort(-(a + n), axis=1)[:, : x.top_k].astype(np.int32) for a, n, x in zip(logits, noise, of)])


def skewed(seed: int, of: Sequence[MoELayer], forwards: int, skew: float = 1.0) -> Iterator[Forward]:
    """Some experts are always used more than others: Zipf's law."""
    rng = np.random.default_rng(seed)
    logits = [-skew * np.log1p(rng.permutation(x.experts)) for x in of]
    return (drawn(rng, logits, of) for _ in range(forwards))


def drifting(seed: int, of: Sequence[MoELayer], forwards: int, step: float = 0.05, skew: float = 2.5) -> Iterator[Forward]:
    """Choices whose popular experts change a little at every forward, and wholly in the course of some hundred."""
    rng = np.random.default_rng(seed)
    logits = [rng.normal(size=x.experts) for x in of]
    for _ in range(forwards):
        logits = [np.sqrt(1 - step**2) * a + step * rng.normal(size=len(a)) for a in logits]
        yield drawn(rng, [skew * a for a in logits], of)


def bursty(
    seed: int, of: Sequence[MoELayer], forwards: int, length: float = 40.0, topics: int = 8, skew: float = 2.0
) -> Iterator[Forward]:  # fmt: skip
    """Topics with experts of their own, each for some tokens, then another or the same again."""
    rng = np.random.default_rng(seed)
    each = [[skew * rng.normal(size=x.experts) for x in of] for _ in range(topics)]
    left, now = 0, each[0]
    for _ in range(forwards):
        if not left:
            left, now = int(rng.geometric(1 / length)), each[rng.integers(topics)]
        left -= 1
        yield drawn(rng, now, of)


KINDS = {"skewed": skewed, "drifting": drifting, "bursty": bursty}


def guessed(forward: Forward, rng: np.random.Generator, right: float = 0.8) -> Forward:
    """The forward with guesses, of which this share is right."""
    ahead = []
    for chosen in forward.chosen[1:]:
        wrong = rng.random(chosen.shape) > right
        ahead.append(np.where(wrong, rng.integers(0, chosen.max() + 1, chosen.shape), chosen).astype(np.int32))
    return forward._replace(ahead=ahead)
