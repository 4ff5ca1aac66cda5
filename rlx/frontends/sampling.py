"""Sampling of the next token, as a graph: logits in, token out. Seed, step and the tokens seen so far are state on the device.

The steps and their order are those of transformers' generate: repetition penalty (N. S. Keskar et al. 2019, CTRL), temperature,
top-k, top-p (A. Holtzman et al. 2020), min-p (M. Nguyen et al. 2024), a draw by the Gumbel-max trick. Nothing is sorted: tokens
below a threshold (rlx.threshold) are dropped. The set of steps is fixed at compile time; their parameters are state.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import fields
from functools import lru_cache
from numbers import Integral, Real
from typing import Any

import numpy as np

import rlx.ir.ops as ops
from rlx.errors import NumericsError, OptionError, known
from rlx.ir.dtype import DTYPES
from rlx.ir.graph import Graph, Value
from rlx.ir.handle import BufferHandle
from rlx.ir.ops.random import gumbel, seed_key, threshold
from rlx.records import record
from rlx.runtime import CompiledGraph, CompileOptions, Session


@record
class Sampling:
    """Settings of sampling. `temperature` 0: the likeliest token. `top_k` 0, `top_p` 1, `min_p` 0, `repetition_penalty` 1: off.
    Raises OptionError for an invalid value."""

    temperature: float = 0.0
    top_k: int = 0  # keep only the k likeliest
    top_p: float = 1.0  # keep the smallest set of likeliest tokens with this share of the probability
    min_p: float = 0.0  # keep only tokens with at least this share of the highest probability
    repetition_penalty: float = 1.0  # positive logits of seen tokens are divided by it, negative ones multiplied

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, Integral if field.name == "top_k" else Real) and not isinstance(value, bool)
            low, high = LIMITS[field.name]
            if not number or not low <= value <= high:
                kind = "whole number" if field.name == "top_k" else "number"
                raise OptionError(f"{field.name} is a {kind} from {low} to {high}, got {value!r}")

    @property
    def steps(self) -> tuple[str, ...]:
        """The fields that have an effect. top_k, top_p and min_p have none if the likeliest token is taken anyway."""
        draws = ("temperature", *DROPPING) if self.temperature else ()
        off = {f.name: f.default for f in fields(self)}
        return tuple(n for n in ("repetition_penalty", *draws) if getattr(self, n) != off[n])


GROUP = 128  # tokens in a group of the two-level draw
LEAST = -3e38  # below any logit that is not dropped
DROPPING = ("top_k", "top_p", "min_p")  # steps that drop tokens
LIMITS = {
    "temperature": (0.0, 1e4), "top_k": (0, 1 << 24), "top_p": (0.0, 1.0), "min_p": (0.0, 1.0), "repetition_penalty": (1e-4, 1e4),
}  # fmt: skip


# -- steps, over logits f32 [batch, vocab] ---------------------------------------------------------------------------


def penalised(logits: Value, seen: Value, penalty: Value) -> Value:
    """`seen`: bool [batch, vocab]; `penalty`: f32 ()."""
    return ops.where(seen, ops.where(logits < 0.0, logits * penalty, logits / penalty), logits)


def only_top_k(logits: Value, count: Value, whole: bool = False) -> Value:
    """Set all but the `count` (f32 ()) greatest to -inf; ties with the last of them stay. `whole`: the result has no groups."""
    kept = logits if whole else _in_groups(logits)
    return _from(threshold(logits, count), kept, kept)


def only_top_p(kept: Value, share: Value, logits: Value) -> Value:
    """Set `logits` to -inf except the smallest set of greatest ones whose probabilities sum to at least `share` (f32 ()). Those
    that earlier steps dropped are -inf in `kept`: their probability is 0, so that nothing else needs to know them."""
    chances = ops.softmax(kept, axis=-1)
    least, chances = threshold(chances, share, weighted=True), _in_groups(chances)
    dropped = ops.less(chances, _for_each(least, chances)) | ops.equal(chances, 0.0)
    return ops.where(dropped, -math.inf, _in_groups(logits))


def only_min_p(logits: Value, share: Value, most: Value) -> Value:
    """Set logits to -inf if their probability is below `share` (f32 ()) times that of the greatest one, `most` (f32 [batch])."""
    logits = _in_groups(logits)
    return ops.where(ops.less(logits - _for_each(most, logits), ops.log(share)), -math.inf, logits)


def _from(bound: Value, measure: Value, logits: Value) -> Value:
    """Set logits to -inf where `measure` is below the bound of its row. NaN stays, so that it is detected."""
    return ops.where(ops.less(measure, _for_each(bound, measure)), -math.inf, logits)


def _for_each(row: Value, elements: Value) -> Value:
    """A number of each row, beside the elements of the rows."""
    return row.reshape(*row.dims, *[1] * (elements.rank - row.rank))


def _in_groups(logits: Value) -> Value:
    """[batch, groups, GROUP] if a row has whole groups: one kernel drops tokens and adds up the groups to draw from then."""
    batch, *dims = logits.shape.static
    return logits if len(dims) > 1 or dims[0] % GROUP else logits.reshape(batch, dims[0] // GROUP, GROUP)


def greatest(scores: Value) -> Value:
    """i32 [batch]: index of the first greatest in each row, or the row length if it has a NaN. Two vectorised reductions."""
    n = scores.shape.static[-1]
    places = ops.where(ops.equal(scores, ops.max(scores, axis=-1, keepdims=True)), ops.iota((n,), dtype=DTYPES["i32"]), n)
    return ops.min(places, axis=-1)


def drawn(logits: Value, key: Value, counter: Value, vocab: int) -> Value:
    """i32 [batch]: a draw from the softmax of each row, or the row length `vocab` if it has a NaN. Draws a group of GROUP tokens
    by its total, then a token of that group: the distribution is the same, and fewer random numbers are needed."""
    batch, groups = logits.shape.static[0], -(-vocab // GROUP)
    if vocab % GROUP:
        logits = ops.pad(logits, low=(0, 0), high=(0, groups * GROUP - vocab), value=-math.inf)
    parts = logits.reshape(batch, groups, GROUP)
    top = ops.maximum(ops.max(parts, axis=-1, keepdims=True), LEAST)  # finite even if all tokens are dropped
    sums = ops.log(ops.sum(ops.exp(parts - top), axis=-1)) + top.reshape(batch, groups)
    group = greatest(sums + gumbel(key, counter * 2, dims=(batch, groups)))
    at = ops.iota((batch,), dtype=DTYPES["i32"]) * groups + ops.minimum(group, groups - 1)
    row = ops.gather(parts.reshape(batch * groups, GROUP), at, axis=0)
    place = greatest(row + gumbel(key, counter * 2 + 1, dims=(batch, GROUP)))
    return ops.minimum(group * GROUP + place, vocab)  # with a NaN, group * GROUP is past the last token


def choose(g: Graph, logits: Value, steps: tuple[str, ...]) -> Value:
    """i32 [batch], chosen by `steps` (Sampling.steps), or the row length if it has a NaN. Adds the state that the steps need to
    `g`: the parameter of each, f32 () (see `settings`), "random.key" u32 [2], "random.counter" u32 (), and "seen" bool
    [batch, vocab], to which the chosen tokens are added."""
    value = {name: g.handle(BufferHandle(f"sampling.{name}", (), "f32")) for name in steps}
    (batch, vocab), most, given = logits.shape.static, logits, logits
    seen: Any = g.handle(BufferHandle("seen", (batch, vocab), "bool")) if "repetition_penalty" in steps else None
    drops, whole = [name for name in steps if name in DROPPING], "top_p" in steps
    apply = {
        "repetition_penalty": lambda x, p: penalised(x, seen, p), "temperature": lambda x, t: x / t,
        "top_k": lambda x, k: only_top_k(x, k, whole), "top_p": lambda x, p: only_top_p(x, p, given),
        "min_p": lambda x, p: only_min_p(x, p, most),
    }  # fmt: skip
    for name in steps:
        if name in ("top_p", *drops[: not whole]):
            most = ops.max(logits, axis=-1)  # no step drops it, and the softmax of top-p has it, too
        given = logits if name in drops[:1] else given
        logits = apply[name](logits, value[name])
    if "temperature" in steps:
        key = g.handle(BufferHandle("random.key", (2,), "u32"))
        counter = g.handle(BufferHandle("random.counter", (), "u32"))
        token = drawn(logits, key, counter, vocab)
        g.assign(counter, counter + 1)
    else:
        token = greatest(logits)
    if seen is not None:
        g.assign(seen, seen | ops.equal(ops.iota((batch, vocab), axis=1, dtype=DTYPES["i32"]), token.reshape(batch, 1)))
    return token


def beginning(how: Sampling, seed: int, seen: Any, batch: int, vocab: int) -> dict[str, np.ndarray]:
    """Initial values of the states that `choose` adds, by handle name. `seen`: tokens that count as seen."""
    mask = np.zeros((batch, vocab), np.bool_)
    mask[:, np.asarray(seen, np.int64)] = True
    numbers = {f"sampling.{name}": np.array(getattr(how, name), np.float32) for name in how.steps}
    return {**numbers, "seen": mask, "random.key": seed_key(seed), "random.counter": np.zeros((), np.uint32)}


def checked_how(how: Any) -> Sampling:
    if not isinstance(how, Sampling):
        raise OptionError(f"settings of sampling are rlx.models.Sampling(...), got {type(how).__name__} {how!r:.60}")
    return how


def checked_steps(steps: Any) -> tuple[str, ...] | None:
    """`steps`. OptionError: they are neither Sampling.steps nor None."""
    try:
        if steps is None or (isinstance(steps, tuple) and LIMITS.keys() >= set(steps)):
            return steps
    except TypeError:  # elements without a hash
        pass
    raise OptionError(f"steps are a tuple of some of {known(LIMITS)}, as Sampling.steps, or None; got {steps!r:.60}")


def checked_tokens(tokens: np.ndarray, vocab: int) -> np.ndarray:
    """The tokens that `choose` returned, checked. NumericsError: the logits held a NaN."""
    if tokens.max() >= vocab:
        raise NumericsError("the logits of the next token hold NaN: the weights, or the numbers they make, are out of range")
    return tokens


def checked_seed(seed: int | None) -> int:
    """The seed, 0 … 2^64 - 1; None: a random one. OptionError: not such a number."""
    if seed is None:
        return secrets.randbits(64)
    if isinstance(seed, bool) or not isinstance(seed, Integral) or not 0 <= seed < 1 << 64:
        raise OptionError(f"a seed is a whole number from 0 to 2^64 - 1, got {seed!r}")
    return int(seed)


# -- on logits of the host -------------------------------------------------------------------------------------------


@lru_cache(16)
def _compiled(steps: tuple[str, ...], batch: int, vocab: int) -> CompiledGraph:
    g = Graph(f"choose_{'_'.join(steps) or 'greatest'}_{batch}x{vocab}")
    g.set_outputs([choose(g, g.input("logits", (batch, vocab), "f32"), steps)], names=["token"])
    return Session().compile(g, CompileOptions(threads=1))  # the other threads wait for the model's next step


class Sampler:
    """One stream of tokens sampled from logits on the host. Equal seeds, settings and logits give the same tokens as a model
    whose graph ends in `choose`."""

    def __init__(self, how: Sampling, vocab: int, batch: int = 1, seed: int | None = None) -> None:
        self.how, self.vocab, self.batch, self.seed = how, vocab, batch, checked_seed(seed)
        self._compiled = _compiled(how.steps, batch, vocab).clone()
        self.start(())

    def start(self, seen: Any) -> None:
        """Restart the stream. `seen`: tokens that count as seen, in every row."""
        for name, array in beginning(self.how, self.seed, seen, self.batch, self.vocab).items():
            self._compiled.bind_handle(name, array)

    def __call__(self, logits: np.ndarray) -> np.ndarray:
        """i32 [batch] for logits f32 [batch, vocab]. NumericsError: the logits hold a NaN."""
        self._compiled.run_slots((logits,))
        return checked_tokens(np.array(self._compiled.outputs_view()[0]), self.vocab)
