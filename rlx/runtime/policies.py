"""Policies: which experts stay in the fast tier. The simulator and the running pool call the same objects in the same order.

Each layer has a quota of resident experts, from the budget. A policy sees the choices of a layer's router before the experts
are read. It selects the missing experts that stay, each with the expert of the same layer that it replaces, so memory does not
grow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import OptionError, items, known, whole
from rlx.ir.shown import counted, sized
from rlx.records import record
from rlx.runtime.traces import Forward, MoELayer

UNITS = {"B": 0, "KB": 1, "MB": 2, "GB": 3, "TB": 4}
DEFAULT = "hysteresis"
LANDING = 8  # see Policy
Pairs = list[tuple[int, int]]  # (layer, expert)
WARM_UP = 32  # forwards that a static profile is made from, if none is given


@record
class Budget:
    """The most that resident experts and those in use may take: bytes, or a number of experts."""

    amount: int
    in_bytes: bool

    @classmethod
    def of(cls, given: Budget | int | str, what: str = "a budget of experts") -> Budget:
        """From "2GB", "1.5GiB" (bytes), or 64, "64" (experts). OptionError: neither."""
        if isinstance(given, Budget):
            return given
        if not isinstance(given, str):
            return cls(whole(what, given, 1), False)
        found = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*(?:([kKMGT]?)(i?)B)?\s*", given, re.ASCII)
        if found is None or (found[2] is None and "." in found[1]) or not float(found[1]):
            raise OptionError(f'{what} is bytes, as "2GB" or "1.5GiB", or a number, got {given!r}')
        if found[2] is None:
            return cls(int(found[1]), False)
        return cls(int(float(found[1]) * (1024 if found[3] else 1000) ** UNITS[f"{found[2].upper()}B"]), True)

    def __str__(self) -> str:
        return sized(self.amount) if self.in_bytes else counted(self.amount, "expert")

    def sizes(self, layers: Sequence[MoELayer]) -> list[int]:
        """One expert of each layer, in the unit of the budget."""
        return [x.nbytes if self.in_bytes else 1 for x in layers]

    def quotas(self, layers: Sequence[MoELayer], tokens: int = 1) -> list[int]:
        """Experts of each layer that may be resident: what is left beside those that one token uses in one layer, the same number
        in each layer as far as possible. OptionError: a layer's experts in use by `tokens` tokens at once do not fit; it names
        the least budget. `tokens` 0: nothing is set aside for experts in use."""
        sizes = self.sizes(layers)
        least = max(min(x.experts, x.top_k * tokens) * size for x, size in zip(layers, sizes))
        if self.amount < least:
            need = Budget(least, self.in_bytes)
            used = f"one layer's experts in use by {counted(tokens, 'token')}"
            raise OptionError(f"a budget of {self} does not hold {used}: at least {need}")
        left = self.amount - max(min(1, tokens) * x.top_k * size for x, size in zip(layers, sizes))
        quotas, open_ = [0] * len(layers), True
        while open_:
            open_ = False
            for i, (x, size) in enumerate(zip(layers, sizes)):
                if quotas[i] < x.experts and size <= left:
                    quotas[i], left, open_ = quotas[i] + 1, left - size, True
        return quotas


class Change(NamedTuple):
    """Answer to one router. `hits` of `uses`: distinct experts chosen that were resident. `read`: bytes of the others; `kept`: of
    these, the experts that stay. `demoted`: (layer, expert). `fetched`: (layer, expert) to be read beside the computation."""

    uses: int
    hits: int
    read: int
    kept: Sequence[int] = ()
    demoted: Sequence[tuple[int, int]] = ()
    fetched: Sequence[tuple[int, int]] = ()
    made_room: bool = False  # whether the experts in use need the memory of demoted ones


class Policy:
    """Base of the policies: state and pairs. A subclass defines the worth of an expert (`_learn` changes `worth`)."""

    guesses = False  # whether it uses the guesses of a forward

    def __init__(
        self, layers: Sequence[MoELayer], budget: Budget, refresh: int = 1, profile: Sequence[np.ndarray] | None = None,
        tokens: int = 1, lands: bool = False,
    ) -> None:  # fmt: skip
        """`refresh`: forwards between changes. `profile`: how often each expert was chosen, per layer: the start; else the first
        experts of each layer are. `tokens`: of the largest forward; 0: experts in use need no memory if they are not
        resident. `lands`: an eighth of each quota, where not all experts are resident, is `landing`: memory for guessed experts
        that come before what they replace can be overwritten. OptionError: the budget is too small for that."""
        self.layers, self.budget, self.refresh = tuple(layers), budget, whole("refresh", refresh, 1)
        self.sizes, self.quotas = budget.sizes(layers), budget.quotas(layers, whole("tokens", tokens, 0))
        self.landing = [min(x.top_k, max(1, n // LANDING)) * (lands and n < x.experts) for x, n in zip(self.layers, self.quotas)]
        if lands and any(n <= landing for n, landing in zip(self.quotas, self.landing)):
            need = Budget(2 * sum(self.sizes), self.budget.in_bytes)
            raise OptionError(f"a budget of {budget} has no room for guessed experts beside one of each layer: at least {need}")
        self.quotas = [n - landing for n, landing in zip(self.quotas, self.landing)]
        self.in_use = tokens > 0
        self.clock = [0] * len(self.layers)  # forwards of each layer
        self.uses = self.hits = 0
        self.profiled = profile is not None
        counts = [np.zeros(x.experts) for x in self.layers] if profile is None else _checked(profile, layers)
        # how likely a token uses the expert
        self.worth = [np.asarray(c) * (x.top_k / max(1.0, float(np.sum(c)))) for c, x in zip(counts, self.layers)]
        self.resident = [np.zeros(x.experts, bool) for x in self.layers]
        for resident, worth, n in zip(self.resident, self.worth, self.quotas):
            resident[np.argsort(-worth, kind="stable")[:n]] = True
        self.held = sum(n * size for n, size in zip(self.quotas, self.sizes))

    def routed(self, layer: int, chosen: np.ndarray, ahead: np.ndarray | None = None, most: int | None = None) -> Change:
        """The router of `layer` chose experts, int [tokens, top_k], and guessed those of the next layer, of which at most `most`
        can be read before that runs. Numbers that are no experts stand for none. OptionError: the experts in use exceed the
        budget; then nothing changes."""
        x, resident, size = self.layers[layer], self.resident[layer], self.sizes[layer]
        counts = _counts(chosen, x.experts)
        uses = int(np.count_nonzero(counts))
        if self.in_use and uses * size > self.budget.amount:
            need = Budget(uses * size, self.budget.in_bytes)
            used = f"{counted(len(chosen), 'token')} use {counted(uses, 'expert')} of layer {x.name!r} at once"
            raise OptionError(f"{used}, which a budget of {self.budget} does not hold: at least {need}")
        self.clock[layer] += 1
        self._learn(layer, counts, len(chosen))
        missing = np.flatnonzero((counts > 0) & ~resident)
        misses = len(missing)
        self.uses, self.hits = self.uses + uses, self.hits + uses - misses
        demoted: list[tuple[int, int]] = []
        fetched: list[tuple[int, int]] = []
        kept: list[int] = []
        made_room = False
        if misses:
            self._make_room(layer, counts, misses * size * self.in_use, demoted)
            made_room = bool(demoted)
            if self.clock[layer] % self.refresh == 0:
                kept, fetched = self._swap(layer, counts, missing, demoted)
        if ahead is not None and self.guesses and layer + 1 < len(self.layers):
            spare = self.budget.amount - self.held - (misses - len(kept)) * size
            fetched += self._fetch(layer + 1, _counts(ahead, self.layers[layer + 1].experts), spare, demoted, most)
        return Change(uses, uses - misses, misses * x.nbytes, kept, demoted, fetched, made_room)

    def hit(self, layer: int, chosen: np.ndarray) -> int:
        """As `routed`, where the experts were all in memory: nothing changes. Returns how many they are."""
        counts = _counts(chosen, self.layers[layer].experts)
        uses = int(np.count_nonzero(counts))
        self.clock[layer] += 1
        self._learn(layer, counts, len(chosen))
        self.uses, self.hits = self.uses + uses, self.hits + int(np.count_nonzero(self.resident[layer] & (counts > 0)))
        return uses

    def _learn(self, layer: int, counts: np.ndarray, tokens: int) -> None:
        raise TypeError(f"{type(self).__name__} is no policy")

    def _beats(self, layer: int, expert: int, victim: int) -> bool:
        """Whether a missing expert takes the place of a resident one."""
        return bool(self.worth[layer][expert] > self.worth[layer][victim])

    def _swap(
        self, layer: int, counts: np.ndarray, missing: np.ndarray, demoted: list[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """The missing experts that stay, and others to fetch, the most valuable first: each in a free place or in place of the
        least valuable. Others come back to places that a larger forward took; if experts change only at some forwards, others
        also take the place of a resident one."""
        worth, resident, size = self.worth[layer], self.resident[layer], self.sizes[layer]
        free, spare = self.quotas[layer] - int(resident.sum()), self.budget.amount - self.held - len(missing) * size
        wanted = missing
        if self.refresh > 1 or free > len(missing):
            wanted = np.flatnonzero(~resident & ((worth > 0) | (counts > 0)))
        # one in use that leaves stays in memory for this run: only a newcomer that is in use too has room for that
        inside = np.flatnonzero(resident & (counts == 0)) if self.refresh > 1 else np.flatnonzero(resident)
        victims = iter(inside[np.argsort(worth[inside], kind="stable")].tolist())
        kept, fetched = list[int](), list[tuple[int, int]]()
        for expert in wanted[np.argsort(-worth[wanted], kind="stable")].tolist():
            used = counts[expert] > 0
            if free > 0 and (used or spare >= size):
                free, spare = free - 1, spare - (0 if used else size)
            elif free > 0 or not (used or self.refresh > 1):
                continue
            else:
                victim = next((v for v in victims if self._free_to_go(layer, v)), None)
                if victim is None or not self._beats(layer, expert, victim):
                    break
                self._put(layer, victim, False)
                demoted.append((layer, victim))
            self._put(layer, expert, True)
            kept.append(expert) if used else fetched.append((layer, expert))
        return kept, fetched

    def _free_to_go(self, layer: int, expert: int) -> bool:
        """Whether a resident expert may be demoted for another of its layer."""
        return True

    def _put(self, layer: int, expert: int, resident: bool) -> None:
        self.resident[layer][expert] = resident
        self.held += self.sizes[layer] * (1 if resident else -1)

    def _make_room(self, layer: int, counts: np.ndarray, need: int, demoted: list[tuple[int, int]]) -> None:
        """Demote experts until `need` more fit: first those of the layers that have just run, which are needed last."""
        n = len(self.layers)
        for other in ((layer - i) % n for i in range(1, n + 1)):
            if self.held + need <= self.budget.amount:
                return
            going = np.flatnonzero(self.resident[other] & (counts == 0) if other == layer else self.resident[other])
            for expert in going[np.argsort(self.worth[other][going], kind="stable")].tolist():
                if self.held + need <= self.budget.amount:
                    return
                self._put(other, expert, False)
                demoted.append((other, expert))

    def _fetch(self, layer: int, guessed: np.ndarray, spare: int, demoted: Pairs, most: int | None) -> Pairs:
        """The guessed experts to read before their layer runs, each in a free place or in place of one that was not guessed.
        `guessed`: how many tokens want each expert."""
        resident, worth, fetched = self.resident[layer], self.worth[layer], list[tuple[int, int]]()
        inside = np.flatnonzero(resident & (guessed == 0))
        victims = iter(inside[np.argsort(worth[inside], kind="stable")].tolist())
        free = min(self.quotas[layer] - int(resident.sum()), spare // max(1, self.sizes[layer]))
        missing = np.flatnonzero((guessed > 0) & ~resident)
        for expert in missing[np.argsort(-guessed[missing], kind="stable")][:most].tolist():
            if free > 0:
                free -= 1
            elif (victim := next(victims, None)) is not None:
                self._put(layer, victim, False)
                demoted.append((layer, victim))
            else:
                break
            self._put(layer, expert, True)
            fetched.append((layer, expert))
        return fetched


class Static(Policy):
    """The experts of the profile, which never change; without one, those that the first 32 forwards used most."""

    def _learn(self, layer: int, counts: np.ndarray, tokens: int) -> None:
        if not self.profiled and self.clock[layer] <= WARM_UP:
            self.worth[layer] += counts / tokens


class LRU(Policy):
    """The experts that were used last."""

    def _learn(self, layer: int, counts: np.ndarray, tokens: int) -> None:
        self.worth[layer][counts > 0] = self.clock[layer]


class LFU(Policy):
    """The experts that are used most, where older uses count less: half as much after HALF tokens."""

    HALF = 128.0

    def _learn(self, layer: int, counts: np.ndarray, tokens: int) -> None:
        fade = 0.5 ** (tokens / self.HALF)
        self.worth[layer] *= fade  # a forward of many tokens counts as many forwards of one
        self.worth[layer] += counts * ((1 - fade) / tokens)


class Hysteresis(Policy):
    """The experts that are used most, where older uses count less, on three time scales at once: how recent a use is decides
    among few uses, how frequent they are among many. A newcomer must be worth clearly more than the expert whose place it takes,
    and stays for at least DWELL forwards."""

    MARGIN, DWELL = 1.05, 2
    HALVES = np.array([[1.0], [4.0], [24.0]])  # tokens
    WEIGHTS = np.array([1.0, 0.2, 0.03])
    FADES = 0.5 ** (1 / HALVES)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.since = [np.full(x.experts, -self.DWELL) for x in self.layers]
        self.memory = [worth / (1 - self.FADES) for worth in self.worth]  # the steady-state sum of uses at this frequency

    def _learn(self, layer: int, counts: np.ndarray, tokens: int) -> None:
        memory, fade = self.memory[layer], self.FADES**tokens
        memory *= fade
        memory += counts * ((1 - fade) / (1 - self.FADES) / tokens)
        self.worth[layer] = self.WEIGHTS @ memory

    def _free_to_go(self, layer: int, expert: int) -> bool:
        return bool(self.clock[layer] - self.since[layer][expert] >= self.DWELL)

    def _beats(self, layer: int, expert: int, victim: int) -> bool:
        return bool(self.worth[layer][expert] > self.MARGIN * self.worth[layer][victim])

    def _put(self, layer: int, expert: int, resident: bool) -> None:
        super()._put(layer, expert, resident)
        if resident:
            self.since[layer][expert] = self.clock[layer]


class Predict(Hysteresis):
    """Hysteresis, and the experts that a layer's router input says the next layer will choose are read before it runs."""

    guesses = True


def _counts(chosen: np.ndarray, experts: int) -> np.ndarray:
    """How often each expert is among those chosen."""
    flat = chosen.reshape(-1)
    if flat.max(initial=0) >= experts:  # padding
        flat = flat[flat < experts]
    return np.bincount(flat, minlength=experts)


def _checked(profile: Any, layers: Sequence[MoELayer]) -> list[np.ndarray]:
    """OptionError: not one number, 0 or more, for each expert of each layer."""
    counts = [np.asarray(c) for c in items("a profile has numbers for each layer", profile, OptionError)]
    found = [f"{c.dtype}{list(c.shape)}" for c in counts]
    if [c.shape for c in counts] != [(x.experts,) for x in layers] or any(c.dtype.kind not in "iuf" for c in counts):
        raise OptionError(f"a profile has a number for each expert of each layer, got {', '.join(found)[:200]}")
    if not all(np.all(np.isfinite(c) & (c >= 0)) for c in counts):
        raise OptionError("the numbers of a profile say how often each expert was used: they are finite, and 0 or more")
    return counts


POLICIES: dict[str, type[Policy]] = {"static": Static, "lru": LRU, "lfu": LFU, "hysteresis": Hysteresis, "predict": Predict}


def policy_of(name: str) -> type[Policy]:
    """OptionError: there is no policy of that name."""
    if not isinstance(name, str) or name not in POLICIES:
        raise OptionError(f"no policy is called {name!r}; there are {known(POLICIES)}")
    return POLICIES[name]


def profile_of(forwards: Iterable[Forward], layers: Sequence[MoELayer]) -> list[np.ndarray]:
    """How often each expert of each layer was chosen."""
    counts = [np.zeros(x.experts) for x in layers]
    for forward in forwards:
        for count, chosen, x in zip(counts, forward.chosen, layers):
            count += np.bincount(chosen.reshape(-1), minlength=x.experts)
    return counts


__all__ = ["POLICIES", "Budget", "Change", "Policy", "policy_of", "profile_of"]
