"""Policies, their simulation, and the pool that asks the same policies while a model runs."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from expert_choices import KINDS, bursty, drifting, guessed, layers, skewed

from rlx.cli.main import run
from rlx.errors import BindingError, OptionError
from rlx.runtime.policies import POLICIES, Budget, profile_of
from rlx.runtime.pool import ExpertPool
from rlx.runtime.simulate import Rates, Replay, simulate
from rlx.runtime.traces import Forward, MoELayer, TraceFile, TraceWriter

FREE = Rates(1.0, 1e12, {})


class FakeTiers:
    """Tiers without memory: what they hold, how much it was at most, and the runs of a model whose routers choose as told."""

    in_place = False

    def __init__(self, of: Sequence[MoELayer]) -> None:
        self.layers, self.advisor = tuple(of), None
        self.masks = [np.zeros(x.experts, bool) for x in of]
        self.lock, self.most, self.read, self.promoted = threading.Lock(), 0, 0, 0
        self.fails: BaseException | None = None
        self.logged: list[list[np.ndarray]] = [[] for _ in of]
        self.threads: set[str] = set()

    def expert_tiers(self) -> FakeTiers:
        return self

    def resident(self, layer: int) -> np.ndarray:
        return self.masks[layer].copy()

    def tell_hits(self, layer: int) -> None:
        found, self.logged[layer] = self.logged[layer], []
        if found and self.advisor is not None:
            self.advisor.hits(layer, np.stack(found))

    def promote(self, layer: int, expert: int) -> None:
        self._set(layer, expert, True)
        self.promoted += 1

    def demote(self, layer: int, expert: int) -> None:
        self._set(layer, expert, False)

    def _set(self, layer: int, expert: int, resident: bool) -> None:
        self.threads.add(threading.current_thread().name)
        if self.fails is not None:
            raise self.fails
        with self.lock:
            self.masks[layer][expert] = resident
            self.most = max(self.most, self.held())

    def set(self, masks: Sequence[np.ndarray]) -> None:
        self.masks = list(masks)
        self.most = self.held()

    def held(self) -> int:
        return sum(int(m.sum()) * x.nbytes for m, x in zip(self.masks, self.layers))

    def forward(self, forward: Forward, pool: ExpertPool | None = None) -> None:
        """A run. `pool`: its thread is always done before the next layer begins, as if that took long enough."""
        for at, (x, chosen) in enumerate(zip(self.layers, forward.chosen)):
            ahead = forward.ahead[at] if forward.ahead is not None and at < len(forward.ahead) else None
            kept: Sequence[int] = ()
            if self.advisor is not None and not self.advisor.each and self.masks[at][chosen].all():
                self.logged[at].append(chosen)
            elif self.advisor is not None:
                self.tell_hits(at)
                kept = self.advisor.routed(at, chosen, ahead)
            with self.lock:
                missing = set(np.unique(chosen).tolist()) - set(np.flatnonzero(self.masks[at]).tolist())
                self.most, self.read = max(self.most, self.held() + len(missing) * x.nbytes), self.read + len(missing) * x.nbytes
                self.masks[at][list(missing.intersection(kept))] = True
            if pool is not None:
                pool.settle()


def hit_rate(policy: str, forwards: Iterable[Forward], of: Sequence[MoELayer], budget: Any, **how: Any) -> float:
    """In percent."""
    replay = Replay(POLICIES[policy](of, Budget.of(budget), **how), FREE)
    for forward in forwards:
        replay.forward(forward)
    return 100 * replay.outcome(policy).hit_rate


# -- budgets


@pytest.mark.parametrize("given,amount,in_bytes", [
    (64, 64, False), ("64", 64, False), ("2GB", 2_000_000_000, True), ("1.5 GiB", 3 << 29, True), ("300kB", 300_000, True),
    ("10 B", 10, True), (np.int64(5), 5, False),
])  # fmt: skip
def test_budgets_are_bytes_or_experts(given, amount, in_bytes):
    assert Budget.of(given) == Budget(amount, in_bytes)


@pytest.mark.parametrize("given", ["", "GB", "2 G", "-1GB", "0", "0GB", 0, -3, 1.5, "1.5", None, True, "1e9", "2GBs", "９GB", []])
def test_other_budgets_are_refused(given):
    with pytest.raises(OptionError, match="a budget of experts is"):
        Budget.of(given)


def test_a_budget_that_does_not_hold_one_layers_experts_names_the_least():
    of = [MoELayer("a", 16, 2, 1000), MoELayer("b", 8, 3, 5000)]
    with pytest.raises(OptionError, match=r"in use by 1 token: at least 15\.0 kB"):
        Budget.of("14999B").quotas(of)
    assert Budget.of("15000B").quotas(of) == [0, 0]
    with pytest.raises(OptionError, match=r"by 9 tokens: at least 40\.0 kB"):  # 9 * 3 experts are all 8 of them
        Budget.of("39kB").quotas(of, 9)
    assert Budget.of("41kB").quotas(of) == [6, 4]  # the same number of each, then what still fits
    assert Budget.of(3).quotas(of) == [0, 0] and Budget.of(10).quotas(of) == [4, 3] and Budget.of(100).quotas(of) == [16, 8]


# -- policies


def test_places_for_guessed_experts_to_land_are_within_the_budget():
    of = [MoELayer("a", 64, 8, 1000), MoELayer("b", 8, 2, 1000)]
    made = POLICIES["predict"](of, Budget.of(48), tokens=0, lands=True)
    assert (made.quotas, made.landing) == ([35, 8], [5, 0])  # no expert of the second layer can be missing
    with pytest.raises(OptionError, match="beside one of each layer: at least 4 experts"):
        POLICIES["predict"](of, Budget.of(3), tokens=0, lands=True)
    assert POLICIES["predict"](of, Budget.of(4), tokens=0, lands=True).quotas == [1, 1]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_never_exceeds_its_budget(policy, kind):
    of, rng = [MoELayer("a", 24, 4, 700), MoELayer("b", 32, 2, 1900), MoELayer("c", 24, 4, 700)], np.random.default_rng(0)
    for budget, tokens, refresh in ((40_000, 1, 1), (62_000, 16, 1), (62_000, 16, 3), (30, 8, 1), (30, 1, 2)):
        budget = Budget(budget, budget > 99)
        made = POLICIES[policy](of, budget, refresh=refresh)
        for at, forward in enumerate(KINDS[kind](3, of, 60)):
            if at % 20 == 10:  # many tokens at once
                chosen = [rng.integers(0, min(x.experts, tokens * 2), (tokens, x.top_k)) for x in of]
                forward = Forward(chosen)
            forward = guessed(forward, rng, 0.5)
            for layer, chosen in enumerate(forward.chosen):
                missing = set(np.unique(chosen)) - set(np.flatnonzero(made.resident[layer]))
                change = made.routed(layer, chosen, forward.ahead[layer] if layer < 2 else None)  # type: ignore[index]
                held = sum(int(m.sum()) * size for m, size in zip(made.resident, made.sizes))
                transient = len(missing - set(change.kept)) * made.sizes[layer]
                assert made.held == held and held + transient <= budget.amount
                assert set(change.kept) <= missing and change.read == len(missing) * of[layer].nbytes
                assert change.hits == change.uses - len(missing)
                assert all(not made.resident[at][e] for at, e in change.demoted if (at, e) not in change.fetched)
                assert all(made.resident[at][e] for at, e in change.fetched)
                assert all(int(m.sum()) <= n for m, n in zip(made.resident, made.quotas))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("refresh", [1, 2, 3])
def test_experts_in_use_that_do_not_stay_are_within_the_budget_too(policy, refresh):
    """Also those that a change at this forward demotes, which its run still needs."""
    rng = np.random.default_rng(3)
    for budget in range(12, 60, 4):
        of = layers(3, 24, 4)
        running = POLICIES[policy](of, Budget.of(budget), refresh, None, 2)
        for forward in drifting(budget, of, 60):
            for layer, chosen in enumerate(forward.chosen):
                if rng.random() < 0.3:
                    chosen = np.concatenate([chosen, rng.permutation(24)[None, :4]])
                running.routed(layer, chosen)
                missing = np.count_nonzero(~running.resident[layer][np.unique(chosen)])
                assert running.held + missing <= budget


def test_promotions_and_demotions_are_pairs_of_one_layer():
    of = layers(3, 32, 4)
    for policy in ("lru", "lfu", "hysteresis"):
        made, pairs = POLICIES[policy](of, Budget.of(40)), 0
        for forward in drifting(1, of, 100):
            for layer, chosen in enumerate(forward.chosen):
                change = made.routed(layer, chosen)
                assert len(change.kept) == len(change.demoted) and {at for at, _ in change.demoted} <= {layer}
                pairs += len(change.kept)
        assert pairs > 50


def test_what_each_policy_keeps():
    """One layer of 4 experts, one at a time, two of which stay."""
    of = [MoELayer("a", 4, 1, 1)]

    def kept(policy: str, used: str, **how: Any) -> list[int]:
        made = POLICIES[policy](of, Budget.of(3), **how)
        assert made.quotas == [2]
        for e in used:
            made.routed(0, np.array([[int(e)]]))
        return np.flatnonzero(made.resident[0]).tolist()

    assert kept("lru", "000012") == [1, 2] and kept("lru", "00001230") == [0, 3]
    assert kept("lfu", "0000233") == [0, 3] and kept("lfu", "000023" + "1" * 9) == [0, 1]
    assert kept("static", "2", profile=[np.array([5, 0, 1, 9])]) == [0, 3]
    assert kept("static", "3231" * 20 + "0" * 90) == [2, 3]  # what the first forwards used
    assert kept("hysteresis", "3" * 30 + "2" * 30 + "101") == [1, 2]
    assert kept("lru", "2", profile=[np.array([5, 0, 1, 9])]) == [2, 3]


def test_an_expert_that_has_just_come_stays_for_the_dwell():
    of = [MoELayer("a", 8, 1, 1)]
    made, since = POLICIES["hysteresis"](of, Budget.of(3)), {}
    for at, e in enumerate(np.random.default_rng(0).integers(0, 8, 300)):
        change = made.routed(0, np.array([[e]]))
        assert all(at - since.get(gone, -9) >= 2 for _, gone in change.demoted)
        since |= dict.fromkeys(change.kept, at)
    assert len(since) == 8


def test_experts_change_only_at_every_nth_forward():
    of = layers(2, 32, 4)
    made = POLICIES["lfu"](of, Budget.of(30), refresh=5)
    fetched = 0
    for at, forward in enumerate(drifting(2, of, 100), 1):
        changes = [made.routed(layer, chosen) for layer, chosen in enumerate(forward.chosen)]
        assert at % 5 == 0 or not any(c.kept or c.demoted or c.fetched for c in changes)
        fetched += sum(len(c.fetched) for c in changes)
    assert fetched  # used at one of the forwards in between


def test_experts_that_a_long_prompt_displaced_come_back():
    of = layers(2, 16, 2)
    profile = [np.arange(16)[::-1], np.arange(16)[::-1]]
    made = POLICIES["static"](of, Budget.of(20), profile=profile, tokens=8)
    assert made.quotas == [9, 9]
    assert made.routed(1, np.arange(16).reshape(8, 2)).made_room
    assert np.flatnonzero(made.resident[0]).tolist() == [0, 1, 2, 3]
    change = made.routed(0, np.array([[0, 15]]))
    assert (change.kept, change.fetched, change.demoted) == ([], [(0, e) for e in range(4, 9)], [])


def test_numbers_that_are_no_experts_are_padding():
    of = layers(1, 16, 2)
    made = POLICIES["lru"](of, Budget.of(6))
    change = made.routed(0, np.array([[9, 8], [2**31 - 1, 2**31 - 1]], np.int32))
    assert (change.uses, sorted(change.kept)) == (2, [8, 9])


def test_a_forward_that_uses_more_than_the_budget_is_an_error_and_changes_nothing():
    of = layers(2, 16, 2)
    made = POLICIES["lru"](of, Budget.of(6))
    before = [m.copy() for m in made.resident]
    with pytest.raises(OptionError, match="4 tokens use 8 experts of layer 'model.layers.1.mlp' at once.*at least 8 experts"):
        made.routed(1, np.arange(8).reshape(4, 2))
    assert all(map(np.array_equal, before, made.resident)) and made.clock == [0, 0] and made.uses == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("share", [0.2, 0.4])
@pytest.mark.parametrize("kind,how", [
    (skewed, {}), (skewed, {"skew": 0.6}), (drifting, {}), (drifting, {"step": 0.01}), (drifting, {"step": 0.1}),
    (bursty, {}), (bursty, {"length": 100, "skew": 3}), (bursty, {"length": 15}),
])  # fmt: skip
def test_hysteresis_is_never_worse_than_lru_and_better_where_routing_drifts(kind, how, share, seed):
    of = layers(2)
    forwards = list(kind(seed, of, 500, **how))
    budget = 8 + round(share * 64) * 2
    ahead = hit_rate("hysteresis", forwards, of, budget) - hit_rate("lru", forwards, of, budget)
    assert ahead > (0 if kind is drifting else -1.0)


def test_each_policy_is_the_best_somewhere():
    """So that the choice by measurement is a choice."""
    of = layers(2)
    rates = {}
    for kind, made in KINDS.items():
        forwards = list(made(0, of, 600))
        rates[kind] = {policy: hit_rate(policy, forwards, of, 40) for policy in ("static", "lru", "lfu", "hysteresis")}
    best = {kind: max(found, key=found.__getitem__) for kind, found in rates.items()}
    assert best["skewed"] in ("static", "lfu") and best["bursty"] == "hysteresis"
    assert rates["drifting"]["hysteresis"] > rates["drifting"]["static"] + 10


def test_guesses_that_are_right_become_hits():
    of, rng = layers(3), np.random.default_rng(1)
    forwards = [guessed(f, rng, 0.9) for f in drifting(5, of, 300)]
    assert hit_rate("predict", forwards, of, 60) > hit_rate("hysteresis", forwards, of, 60) + 5


# -- simulation


def test_the_time_of_a_forward_is_computing_reading_and_what_fetching_takes_longer():
    of = layers(2, 8, 1, 100)
    trace = [Forward([np.array([[7]]), np.array([[6]])], [np.array([[5]])], 2.0, 1.0, 0)]
    policy = POLICIES["predict"](of, Budget.of(5))
    replay = Replay(policy, Rates(None, 50.0, {}))
    for forward in trace:
        replay.forward(forward)
    # two layers compute for 0.5 s each, and both experts are read for 2 s; beside layer 0 the guess is read, 2 s instead of 0.5 s
    assert replay.seconds == pytest.approx(2.0 + 2.0 + 0.5 + 2.0)
    outcome = replay.outcome("predict")
    assert (outcome.read, outcome.fetched, outcome.tokens, outcome.hit_rate) == (200, 100, 1, 0)
    assert Replay(POLICIES["lru"](of, Budget.of(5)), Rates(4.0, 1.0, {})).outcome("lru").tokens_per_second == float("inf")


def test_rates_come_from_the_trace_unless_given():
    timed = [Forward([np.zeros((2, 1), int)], None, 3.0, 1.0, 500)]
    rates = Rates.of(timed)
    assert (rates.resident, rates.slow) == (None, 500.0) and rates.sources["resident"] == "1.0 tokens/s (as in the trace)"
    assert Rates.of(timed, 7.0, 9.0) == Rates(7.0, 9.0, {"resident": "7.0 tokens/s (given)", "slow": "given"})
    measured = Rates.of([timed[0]._replace(slow_bytes=0)])
    assert measured.slow > 1e6 and measured.sources["slow"] == "measured: a copy in memory"
    with pytest.raises(OptionError, match="no times of forwards"):
        Rates.of([timed[0]._replace(seconds=0.0)])
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(OptionError, match="resident rate is a positive number"):
            Rates.of(timed, wrong)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path, of = tmp_path_factory.mktemp("traces") / "some.moe", layers(3, 32, 4, 1_000_000)
    with TraceWriter(path, "a model", of) as writer:
        for forward in drifting(0, of, 200):
            writer.add(forward._replace(seconds=0.01))
    return path


def test_simulate_replays_every_policy(trace):
    file = TraceFile(trace)
    outcomes = simulate(file, "30MB", Rates.of(file, slow=1e9))
    assert {o.policy for o in outcomes} == set(POLICIES) - {"predict"}  # there are no guesses
    assert [o.seconds for o in outcomes] == sorted(o.seconds for o in outcomes)
    for o in outcomes:
        assert o.hit_rate == pytest.approx(hit_rate(o.policy, file, file.layers, "30MB") / 100)
        assert o.tokens_per_second == pytest.approx(200 / (2.0 + o.read / 1e9))
    with pytest.raises(OptionError, match="no policy is called 'best'; there are 'hysteresis'"):
        simulate(file, "30MB", FREE, ["best"])
    with pytest.raises(OptionError, match="at least 4.0 MB"):
        simulate(file, "3MB", FREE)
    with pytest.raises(OptionError, match="a profile has a number for each expert"):
        simulate(file, "30MB", FREE, profile=[np.zeros(3)])


def command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    code = 0
    try:
        run(list(args))
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capsys.readouterr()


def test_the_command_prints_a_table_and_json(trace, tmp_path, capsys):
    rates = "--slow-rate", "2GB", "--resident-rate", "50"
    code, out, _ = command(capsys, "moe", "simulate", str(trace), "--budget", "30MB", *rates)
    assert code == 0 and "a model: 3 layers with experts; a budget of 30.0 MB: 26 of 96 experts resident" in out
    assert "26.0 MB of 96.0 MB" in out and "all resident: 50.0 tokens/s (given); slow tier: 2.0 GB/s (given)" in out
    assert all(p in out for p in ("static", "lru", "lfu", "hysteresis")) and "predict" not in out
    how = "--budget", "26", "--slow-rate", "2GB", "--json", "--profile", str(trace), "--policy", "lru", "--refresh", "3"
    code, out, _ = command(capsys, "moe", "simulate", str(trace), *how)
    found = json.loads(out)
    assert code == 0 and found["quotas"] == [8, 7, 7] and [p["policy"] for p in found["policies"]] == ["lru"]
    profile = profile_of(TraceFile(trace), TraceFile(trace).layers)
    expected = hit_rate("lru", TraceFile(trace), TraceFile(trace).layers, 26, refresh=3, profile=profile)
    assert found["policies"][0]["hit_rate"] == pytest.approx(expected / 100)
    code, out, error = command(capsys, "moe", "simulate", str(trace), "--budget", "1MB")
    assert (code, out) == (1, "") and "at least 4.0 MB" in error
    assert "as 1.5GB, got '7'" in command(capsys, "moe", "simulate", str(trace), "--budget", "30MB", "--slow-rate", "7")[2]
    with TraceWriter(other := tmp_path / "other", "b", layers(2)):
        pass
    error = command(capsys, "moe", "simulate", str(trace), "--budget", "30MB", "--profile", str(other))[2]
    assert "is a trace of 'b' with other layers than those of 'a model'" in error
    assert "has no forwards" in command(capsys, "moe", "simulate", str(other), "--budget", "9", *rates)[2]


# -- the running pool


@pytest.mark.parametrize("policy", ["static", "lru", "lfu", "hysteresis", "predict"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_rate_of_a_run_is_the_one_that_a_simulation_predicts(kind, policy):
    of, rng = layers(3, 32, 4), np.random.default_rng(0)
    forwards = [guessed(f, rng) for f in KINDS[kind](7, of, 150)]
    tiers = FakeTiers(of)
    with ExpertPool(tiers, "34kB", policy) as pool:
        for forward in forwards:
            tiers.forward(forward, pool)
        report = pool.report()
        assert all(map(np.array_equal, tiers.masks, pool.policy.resident))
    predicted = hit_rate(policy, forwards, of, "34kB")
    assert 100 * report.predicted_rate == pytest.approx(predicted)
    assert abs(100 * report.hit_rate - predicted) < 2
    assert report.forwards == 150 and report.nbytes <= 34_000
    assert tiers.most <= 34_000


def test_the_report_reads_as_a_line():
    tiers = FakeTiers(layers(2, 16, 2))
    with ExpertPool(tiers, "12kB", "lru") as pool:
        assert str(pool.report()) == "10 experts resident, 10.0 kB, within 12.0 kB; policy lru"
        tiers.forward(Forward([np.array([[0, 9]]), np.array([[0, 1]])]))
        text = "policy lru: 75.0% of 4 uses were hits, 75.0% predicted, 1 forward"
        assert str(pool.report()).endswith(text) and text in repr(pool)


def test_demotions_happen_in_a_thread_of_their_own():
    tiers = FakeTiers(layers(2, 16, 2))
    with ExpertPool(tiers, 12, "lru") as pool:
        for forward in drifting(0, tiers.layers, 30):
            tiers.forward(forward)
        pool.settle()
    assert tiers.threads == {"rlx experts"}


def test_an_error_of_the_thread_is_raised_by_the_next_forward_and_then_it_goes_on():
    tiers = FakeTiers(layers(2, 16, 2))
    forwards = list(drifting(0, tiers.layers, 60))
    pool = ExpertPool(tiers, 12, "lru")
    tiers.fails = OSError("the file is gone")
    with pytest.raises(OSError, match="the file is gone"):
        for forward in forwards[:30]:
            tiers.forward(forward)
            time.sleep(0.001)
    tiers.fails = None
    for forward in forwards[30:]:
        tiers.forward(forward)
    pool.settle()
    assert all(map(np.array_equal, tiers.masks, pool.policy.resident)) and tiers.most <= 12_000
    tiers.fails = OSError("again")
    pool._demote.add(0)
    tiers.masks[0][:] = True
    with pytest.raises(OSError, match="again"):
        pool.settle()
    pool._error = OSError("at the end")
    with pytest.raises(OSError, match="at the end"):
        pool.close()
    pool.close()


def test_one_pool_at_a_time_and_wrong_arguments_change_nothing():
    tiers = FakeTiers(layers(2, 16, 2))
    profiles = [np.zeros(2)], [np.full(16, np.nan)] * 2, [np.full(16, -1)] * 2, [np.zeros((16, 1))] * 2, ["a" * 16] * 2, 5
    others = {"budget": 1}, {"policy": "fifo"}, {"refresh": 0}, {"tokens": 5}, {"tokens": 0}, {"tokens": -1}
    for wrong in (*others, *({"profile": p} for p in profiles)):
        with pytest.raises(OptionError):
            ExpertPool(tiers, **{"budget": 9, **wrong})
        assert tiers.advisor is None and not tiers.held()
    with ExpertPool(tiers, 9) as pool:
        with pytest.raises(BindingError, match="have an ExpertPool already"):
            ExpertPool(tiers, 9)
        assert tiers.advisor is pool and tiers.held() == 7_000
    assert tiers.advisor is None and tiers.held() == 7_000
    ExpertPool(tiers, 9).close()


def test_a_trace_is_a_profile(trace, tmp_path):
    file = TraceFile(trace)
    tiers = FakeTiers(file.layers)
    with ExpertPool(tiers, 30, "static", profile=trace):
        for mask, count in zip(tiers.masks, profile_of(file, file.layers)):
            assert count[mask].min() >= count[~mask].max()
    with pytest.raises(OptionError, match="other layers of experts than this model"):
        ExpertPool(FakeTiers(layers(2)), 30, profile=trace)


def test_a_pool_that_is_dropped_leaves_no_thread():
    tiers = FakeTiers(layers(2, 16, 2))
    pool = ExpertPool(tiers, 12, "lru")
    for forward in drifting(0, tiers.layers, 20):
        tiers.forward(forward)
    pool.settle()
    gone, thread = weakref.ref(pool), pool._thread
    tiers.advisor = None
    del pool
    if thread is not None:
        thread.join(20)
    gc.collect()
    assert gone() is None


def test_a_forked_child_goes_on_with_a_thread_of_its_own():
    tiers = FakeTiers(layers(2, 16, 2))
    with ExpertPool(tiers, 12, "lru") as pool:
        forwards = list(drifting(0, tiers.layers, 40))
        for forward in forwards[:20]:
            tiers.forward(forward)
        pool.settle()
        child = os.fork()
        if not child:
            code = 1
            try:
                for forward in forwards[20:]:
                    tiers.forward(forward)
                pool.settle()
                code = 0 if all(map(np.array_equal, tiers.masks, pool.policy.resident)) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
