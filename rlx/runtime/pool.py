"""ExpertPool: keeps the experts that a policy selects in the fast tier, within a budget, while the model runs.

The policy is called at each router (rlx.runtime.policies). Missing experts that stay are read once, by the run that needs
them. A background thread demotes experts and prefetches others, in pairs: it makes the tiers equal to the policy's masks,
evictions first. The simulator uses the same policy, so both count the same hits. On a GPU, where kernels read missing experts
in place (ExpertTiers.in_place), the thread learns of the routers after their run, and promotes all experts that stay. With a
policy that reads ahead, it follows runs in flight: it learns of each router at once, and promotes guessed experts as far as
they arrive in time (Arrivals).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from os import PathLike
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.errors import BindingError, OptionError, Unsupported, whole
from rlx.forks import each_in_child
from rlx.ir.shown import Shown, counted, sized
from rlx.records import record
from rlx.runtime.policies import DEFAULT, Budget, policy_of, profile_of
from rlx.runtime.traces import MoELayer, TraceFile

IDLE = 1.0  # seconds after which a thread without work ends; the next work starts another
Profile = str | PathLike[str] | Sequence[np.ndarray]


class Tiers(Protocol):
    """The fast and the slow tier of a model's experts: rlx.driver.experts.ExpertTiers."""

    advisor: Any
    in_place: bool

    @property
    def layers(self) -> Sequence[Any]: ...
    def resident(self, layer: int) -> np.ndarray: ...
    def tell_hits(self, layer: int) -> None: ...
    def drain(self, wait: bool = False) -> None: ...
    def promote(self, layer: int, expert: int) -> None: ...
    def demote(self, layer: int, expert: int) -> None: ...
    def slots_at(self, layer: int) -> Any: ...
    def news(self) -> bool: ...
    def going(self) -> bool: ...
    def follow(self) -> None: ...
    def set(self, masks: Sequence[np.ndarray]) -> None: ...


@runtime_checkable
class HasExperts(Protocol):
    """A CompiledGraph, or a LanguageModel."""

    def expert_tiers(self) -> Any: ...


@record
class PoolReport:
    """`hits` of `uses`: distinct experts that forwards chose in their layers, found in the fast tier. `predicted`: hits that the
    policy counted, as a simulation of the same forwards does."""

    policy: str
    budget: Budget
    quotas: tuple[int, ...]
    nbytes: int
    forwards: int
    uses: int
    hits: int
    predicted: int

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.uses)

    @property
    def predicted_rate(self) -> float:
        return self.predicted / max(1, self.uses)

    def __str__(self) -> str:
        held = f"{sum(self.quotas)} experts resident, {sized(self.nbytes)}, within {self.budget}"
        if not self.uses:
            return f"{held}; policy {self.policy}"
        rates = f"{self.hit_rate:.1%} of {self.uses} uses were hits, {self.predicted_rate:.1%} predicted"
        return f"{held}; policy {self.policy}: {rates}, {counted(self.forwards, 'forward')}"


class Arrivals:
    """How many guessed experts of each layer come before it runs, where no run waits for them: as many as came of those that were
    needed last, and then one more each time. Where none came, one is tried at every RETRY-th forward. `latest`: the layer for
    which experts were guessed last."""

    RETRY = 16

    def __init__(self, layers: int) -> None:
        self._most, self._coming, self._since, self.latest = [1] * layers, [frozenset[int]()] * layers, [0] * layers, -1

    def most(self, layer: int) -> int:
        self._since[layer] += 1
        return 1 if not self._most[layer] and self._since[layer] % self.RETRY == 0 else self._most[layer]

    def coming(self, layer: int, experts: Iterable[int]) -> None:
        self.latest, self._coming[layer] = layer, frozenset(experts)

    def router(self, layer: int, used: np.ndarray, there: np.ndarray) -> None:
        """The layer runs and needs these experts; `there`: which of them were resident."""
        coming, self._coming[layer] = self._coming[layer], frozenset()
        if came := [bool(found) for expert, found in zip(used.tolist(), there) if expert in coming]:
            self._most[layer] = len(coming) + 1 if all(came) else sum(came)


class ExpertPool(Shown):
    """Keeps experts of a model resident within a budget. A context manager; `close` ends it, and resident experts stay so."""

    def __init__(
        self, of: HasExperts, budget: Budget | int | str, policy: str = DEFAULT, refresh: int = 1,
        profile: Profile | None = None, tokens: int = 1,
    ) -> None:  # fmt: skip
        """`of`: a CompiledGraph or LanguageModel; the pool serves all executables that share its weights. `budget`: "2GB", or a
        number of experts: those that are resident and those in use. `policy`: "static", "lru", "lfu", "hysteresis" or "predict".
        `refresh`: forwards between changes. `profile`: a trace, or how often each expert of each layer was used: the experts to
        begin with. `tokens`: of the largest forward.

        OptionError: a wrong argument, or a budget that does not hold one layer's experts in use. BindingError: there is a pool
        already. Unsupported: no experts, or a device without a slow tier."""
        if not isinstance(of, HasExperts):
            raise BindingError(f"an ExpertPool is of a CompiledGraph or a model, got {type(of).__name__}")
        self.tiers: Tiers = of.expert_tiers()
        if self.tiers.advisor is not None:
            raise BindingError("these weights have an ExpertPool already: close it first")
        self.layers = tuple(MoELayer(x.name, x.experts, x.top_k, x.nbytes) for x in self.tiers.layers)
        if not self.layers:
            raise Unsupported("no experts can leave memory: others read their weights too, or they are not apart")
        self.name, self.budget = policy, Budget.of(budget)
        start = _counts_of(profile, self.layers)
        kind, in_use = policy_of(policy), whole("tokens", tokens, 1) if not self.tiers.in_place else 0
        self.policy = kind(self.layers, self.budget, refresh, start, in_use, lands=kind.guesses and self.tiers.in_place)
        self.each = self.policy.guesses  # guesses are of use at once, hits are not
        self.landing, self._follows = self.policy.landing, self.each and self.tiers.in_place
        self._at_once = self.tiers.in_place and not self._follows  # whether all that come to a layer are promoted together
        self._arrivals = Arrivals(len(self.layers))
        self._ready = threading.Condition()
        self._thread: threading.Thread | None = None
        self._demote, self._promote = set[int](), set[int]()  # layers with work
        self._releasing, self._promoting = False, -1  # the thread's current work; the layer of which it reads an expert
        self._reading: tuple[int, frozenset[int]] = (-1, frozenset())  # a layer, and the experts that its run reads and keeps
        self._told = False  # runs have been queued, of whose routers the thread learns
        self._error: BaseException | None = None
        self._uses = self._hits = 0
        self.tiers.set([mask.copy() for mask in self.policy.resident])
        self.tiers.advisor = self
        _pools.add(self)

    def _line(self) -> str:
        return str(self.report())

    def __enter__(self) -> ExpertPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def report(self) -> PoolReport:
        """The resident experts, and the rates of hits so far."""
        for layer in range(len(self.layers)):
            self.tiers.tell_hits(layer)
        policy = self.policy
        nbytes = sum(n * x.nbytes for n, x in zip(policy.quotas, self.layers))
        forwards = max(policy.clock)
        return PoolReport(self.name, self.budget, tuple(policy.quotas), nbytes, forwards, self._uses, self._hits, policy.hits)

    def close(self) -> None:
        """End it: from now on nothing is promoted or demoted. Raises an error of the background thread that no run has raised."""
        if self.tiers.advisor is self:
            self.tiers.advisor = None  # without the lock: a thread that tells of routers needs it
        with self._ready:
            self._demote.clear()
            self._promote.clear()
            while self._releasing or self._promoting >= 0:
                self._wait()
            self._raise()

    def queued(self) -> None:
        """A run has been queued on a device that reports the choices of its routers later."""
        self._told = True
        if self._ready.acquire(blocking=False):  # else the thread is at work, and looks for it later
            try:
                self._start()
            finally:
                self._ready.release()

    # -- called by a run, after each router

    def routed(
        self, layer: int, ids: np.ndarray, ahead: np.ndarray | None = None, resident: np.ndarray | None = None
    ) -> Sequence[int]:
        """The router of `layer` chose `ids`, int [tokens, top_k]. Returns those that stay resident once they are in memory.
        Raises an error of the background thread. `resident`: see rlx.driver.experts.Advisor."""
        with self._ready:
            self._raise()
            if self.tiers.advisor is not self:  # closed meanwhile
                return ()
            while self._promoting == layer and not self.tiers.in_place:  # one of those chosen, most likely
                self._wait()
            before = self.tiers.resident(layer)
            used = np.unique(ids)
            used = used[: np.searchsorted(used, len(before))]  # numbers past the last expert are padding
            there = before[used] if resident is None else np.isin(used, resident)
            if self._follows:
                self._arrivals.router(layer, used, there)
            most = self._may_come(layer) if self._follows and ahead is not None else None
            change = self.policy.routed(layer, ids, ahead, most)
            self._uses, self._hits = self._uses + change.uses, self._hits + int(np.count_nonzero(there))
            kept = used[self.policy.resident[layer][used]].tolist()
            if not there.all() and not self.tiers.in_place:
                self._settle()  # experts that earlier routers demoted: their memory is needed now
            coming = [x for x, _ in change.fetched]
            if self.tiers.in_place:
                if guessed := [expert for x, expert in change.fetched if x == layer + 1]:
                    self._arrivals.coming(layer + 1, guessed)
                coming += [layer] * bool(change.kept)
            else:
                self._reading = layer, frozenset(kept)
            # those, too, that another thread's run read after the policy had given them up
            going = [x for x, _ in change.demoted] + [layer] * bool((before & ~self.policy.resident[layer]).any())
            if going or coming:
                self._demote.update(going)
                self._promote.update(coming)
                self._start()
            if change.made_room:
                self._settle()
            return kept

    def _may_come(self, layer: int) -> int:
        """Experts of the next layer that can be promoted before it runs."""
        later = layer + 1
        return min(self._arrivals.most(later), self.tiers.slots_at(later).open()) if later < len(self.layers) else 0

    def hits(self, layer: int, ids: np.ndarray) -> None:
        """Choices, int [forwards, tokens, top_k], that were all resident."""
        with self._ready:
            for chosen in ids:
                uses = self.policy.hit(layer, chosen)
                self._uses, self._hits = self._uses + uses, self._hits + uses

    def settle(self) -> None:
        """Wait until the tiers are as the policy wants them. Raises an error of the background thread."""
        if self.tiers.in_place:
            self.tiers.drain(wait=True)
        with self._ready:
            self._demote.update(range(len(self.layers)))
            while (self._demote or self._promote or self._releasing or self._promoting >= 0) and self._error is None:
                self._start()
                self._wait()
            self._raise()

    # -- the background thread

    def _settle(self) -> None:
        """Wait until all is released that the policy does not want: a run is about to use the memory."""
        while (self._demote or self._releasing) and self._error is None:
            self._start()
            self._wait()
        self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _wait(self) -> None:
        self._ready.wait(IDLE)

    def _start(self) -> None:
        """With the lock held: there is work."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="rlx experts", daemon=True)
            self._thread.start()
        self._ready.notify_all()

    def _work(self) -> None:
        while True:
            layer, error = 0, None
            try:
                if (job := self._job()) is None:
                    return
                act, layer, experts = job
                for expert in experts:
                    act(layer, expert)
            except BaseException as e:  # noqa: BLE001  raised by the next forward
                error = e
            with self._ready:
                self._releasing, self._promoting = False, -1
                if error is not None:
                    self._error = error
                    self._demote.add(layer)  # nothing to do, if it was not releases that failed
                self._ready.notify_all()

    def _job(self) -> tuple[Callable[[int, int], None], int, list[int]] | None:
        """The next work: what routers chose; releases, of a whole layer; then one expert to read. None: there was none for a
        while."""
        with self._ready:
            while True:
                if (self._told or (self._follows and self.tiers.news())) and self._error is None:
                    self._told, self._releasing = False, True
                    return lambda *_: self.tiers.drain(), 0, [0]
                while self._demote and self._error is None:
                    layer = self._demote.pop()
                    if going := np.flatnonzero(self.tiers.resident(layer) & ~self.policy.resident[layer]).tolist():
                        self._releasing = True
                        return self.tiers.demote, layer, going
                if self._error is None and (found := self._coming()) is not None:
                    self._promoting, coming = found
                    return self.tiers.promote, self._promoting, coming if self._at_once else coming[:1]
                self._ready.notify_all()
                if self._follows and self._error is None and self.tiers.advisor is self:
                    if self.tiers.going():
                        self._releasing = True
                        return lambda *_: self.tiers.follow(), 0, [0]
                    if self._promote:  # the run has just ended
                        continue
                if not self._ready.wait(IDLE) and not ((self._told or self._demote or self._promote) and self._error is None):
                    self._thread = None
                    return None

    def _coming(self) -> tuple[int, list[int]] | None:
        """A layer with experts to read: one for which they were guessed, else the first. While a run is followed, none for which
        its end must be waited for."""
        follows = self._follows and self.tiers.going()
        for layer in sorted(self._promote, key=lambda layer: (layer != self._arrivals.latest, layer)):
            wanted = np.flatnonzero(self.policy.resident[layer] & ~self.tiers.resident(layer)).tolist()
            read_by_run = self._reading[1] if self._reading[0] == layer else ()
            coming = [e for e in wanted if e not in read_by_run]
            if not coming:
                self._promote.discard(layer)
            elif not (follows and self.tiers.slots_at(layer).waits()):
                return layer, coming
        return None

    def _in_child(self) -> None:
        """In a forked child: the thread does not exist there, and may have held the lock."""
        self._ready, self._thread, self._releasing, self._promoting = threading.Condition(), None, False, -1


def _counts_of(profile: Profile | None, layers: Sequence[MoELayer]) -> Sequence[np.ndarray] | None:
    if not isinstance(profile, str | PathLike):
        return profile
    trace = TraceFile(profile)
    if [(x.experts, x.top_k) for x in trace.layers] != [(x.experts, x.top_k) for x in layers]:
        raise OptionError(f"{trace.path} is a trace of {trace.model!r}, which has other layers of experts than this model")
    return profile_of(trace, layers)


_pools = each_in_child(ExpertPool._in_child)

__all__ = ["ExpertPool", "PoolReport"]
