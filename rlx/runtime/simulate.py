"""Simulation: a recorded trace replayed against policies, for the hit rate and the tokens per second of each.

The time of a forward is that of its computation with all experts resident, plus the reads of missing experts before their
layer, plus the part of prefetches that takes longer than the layer that they overlap.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlx.errors import OptionError
from rlx.records import record
from rlx.runtime.policies import POLICIES, Budget, Policy, policy_of
from rlx.runtime.traces import Forward, TraceFile

COPIED = 64 << 20  # bytes of the copy that is measured


@record
class Rates:
    """`resident`: tokens per second with every expert resident, or None: as in the trace. `slow`: bytes per second of experts
    read from the slow tier. `sources`: where both are from."""

    resident: float | None
    slow: float
    sources: Mapping[str, str]

    @classmethod
    def of(cls, trace: Iterable[Forward], resident: float | None = None, slow: float | None = None) -> Rates:
        """Rates not given are taken from the trace. A slow rate that is not there is measured on this machine, as a copy in
        memory: that of files that the system has cached. OptionError: a rate is not positive, or there is none of computing."""
        for name, rate in (("resident", resident), ("slow", slow)):
            if rate is not None and not 0 < rate < float("inf"):
                raise OptionError(f"the {name} rate is a positive number, got {rate!r}")
        sources = {"resident": f"{resident} tokens/s (given)", "slow": "given"}
        if resident is None or slow is None:
            timed = spent = nbytes = tokens = 0.0
            for f in trace:
                timed, spent, nbytes = timed + f.seconds, spent + f.slow_seconds, nbytes + f.slow_bytes
                tokens += len(f.chosen[0])
            if resident is None:
                if not timed > spent:
                    raise OptionError("the trace has no times of forwards: give the tokens per second with all experts resident")
                sources["resident"] = f"{tokens / (timed - spent):.1f} tokens/s (as in the trace)"
            if slow is None and spent and nbytes:
                slow, sources["slow"] = nbytes / spent, "as in the trace"
            elif slow is None:
                slow, sources["slow"] = copy_rate(), "measured: a copy in memory"
        assert slow is not None
        return cls(resident, slow, sources)


def copy_rate() -> float:
    """Bytes per second of a copy in memory: the best of three."""
    source, goal, best = np.ones(COPIED, np.uint8), np.ones(COPIED, np.uint8), float("inf")
    for _ in range(3):
        begun = time.perf_counter()
        np.copyto(goal, source)
        best = min(best, time.perf_counter() - begun)
    return COPIED / best


@dataclass
class Outcome:
    """A policy on a trace. `read`, `fetched`: bytes of missing experts, and of those read beside the computation."""

    policy: str
    hit_rate: float
    tokens: int
    seconds: float
    read: int
    fetched: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else float("inf")


class Replay:
    """One policy, and the time that its choices would take."""

    def __init__(self, policy: Policy, rates: Rates) -> None:
        self.policy, self.rates = policy, rates
        self.tokens = self.read = self.fetched = 0
        self.seconds = 0.0

    def forward(self, forward: Forward) -> None:
        layers, tokens, slow = self.policy.layers, len(forward.chosen[0]), self.rates.slow
        whole = max(0.0, forward.seconds - forward.slow_seconds)
        computing = (whole if self.rates.resident is None else tokens / self.rates.resident) / len(layers)
        for at, chosen in enumerate(forward.chosen):
            ahead = forward.ahead[at] if forward.ahead is not None and at < len(forward.ahead) else None
            change = self.policy.routed(at, chosen, ahead)
            fetched = sum(layers[layer].nbytes for layer, _ in change.fetched)
            self.seconds += max(computing, fetched / slow) + change.read / slow
            self.read, self.fetched = self.read + change.read, self.fetched + fetched
        self.tokens += tokens

    def outcome(self, name: str) -> Outcome:
        rate = self.policy.hits / max(1, self.policy.uses)
        return Outcome(name, rate, self.tokens, self.seconds, self.read, self.fetched)


def simulate(
    trace: TraceFile, budget: Budget | int | str, rates: Rates, policies: Sequence[str] = tuple(POLICIES), refresh: int = 1,
    profile: Sequence[np.ndarray] | None = None,
) -> list[Outcome]:  # fmt: skip
    """Replay the trace against each policy, the largest rate of tokens first. Policies that use guesses are left out if the trace
    has none. `profile`: see Policy. OptionError: the budget is too small; it names the least."""
    most, guesses = 0, False
    for forward in trace:
        most, guesses = max(most, len(forward.chosen[0])), guesses or forward.ahead is not None
    if not most:
        raise OptionError(f"{trace.path} has no forwards")
    made = Budget.of(budget)
    asked = {name: policy_of(name) for name in policies}
    replays = {
        name: Replay(kind(trace.layers, made, refresh, profile, most), rates)
        for name, kind in asked.items()
        if guesses or not kind.guesses
    }
    for forward in trace:
        for replay in replays.values():
            replay.forward(forward)
    return sorted((r.outcome(name) for name, r in replays.items()), key=lambda o: (o.seconds, -o.hit_rate))


__all__ = ["Outcome", "Rates", "Replay", "simulate"]
