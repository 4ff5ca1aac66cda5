"""Experts in two tiers on a GPU: the same bits whatever is resident, memory that falls, choices that the GPU logs, and pools.

With a fake driver (fake_cuda), whose memory that is given back holds garbage, and on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import expert_graphs
import numpy as np
import pytest
import small_models
from fake_cuda import FakeDriver, installed

import rlx
from rlx.backends.cuda import backend
from rlx.backends.cuda.gpu import refusal
from rlx.backends.cuda.regions import Region
from rlx.driver.experts import ExpertSource
from rlx.errors import BindingError, CorruptFileError, IndexRangeError, InputShapeError, OutOfMemoryError
from rlx.ir.blocks import FORMATS
from rlx.ir.ops.quant import random_weights
from rlx.runtime import CompiledGraph
from rlx.runtime.policies import Hysteresis
from rlx.runtime.pool import ExpertPool

T, E, K, D, FFN, LAYERS = 3, 8, 2, 64, 32, 2
MASKS = [[[False] * E] * LAYERS, [[True, False] * (E // 2)] * LAYERS, [[True] * E, [False] * (E - 1) + [True]]]
FORMS = ["f32", "bf16", "q8_0"]


@pytest.fixture(params=["fake", "gpu"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver | None]:
    """The fake driver; None: a GPU."""
    if request.param == "gpu":
        if (why := refusal()) is not None:
            pytest.skip(f"no GPU: {why}")
        yield None
        return
    with installed(driver := FakeDriver(), monkeypatch):
        yield driver


def compiled_layers(form: str = "f32", tokens: int = T, **more: Any) -> CompiledGraph:
    dtype, packed = ("f32", form) if form in FORMATS else (form, "")
    return rlx.Session("cuda").compile(expert_graphs.layers(tokens, D, FFN, E, K, dtype, packed, count=LAYERS), **more)


def params_of(compiled: CompiledGraph, form: str = "f32", seed: int = 0) -> dict[str, np.ndarray]:
    rng, found = np.random.default_rng(seed), {}
    for p in compiled.params:
        dims = p.shape.static
        found[p.name] = (rng.standard_normal(dims) / np.sqrt(dims[-1])).astype(p.dtype.numpy)
        if p.dtype == rlx.u8:
            random_weights(FORMATS[form])(rng, [found[p.name], found[p.name]])
    return found


def outputs(compiled: CompiledGraph, count: int = 3, tokens: int = T) -> np.ndarray:
    rng, dtype = np.random.default_rng(1), compiled.inputs[0].dtype.numpy
    return np.stack([compiled.run({"x": rng.standard_normal((tokens, D)).astype(dtype)})[0] for _ in range(count)])


def of_experts(name: str) -> bool:
    return not name.endswith(".gate")


def one(array: np.ndarray, expert: int) -> np.ndarray:
    rows = len(array) // E
    return array[expert * rows : (expert + 1) * rows]


# A form decides what an expert's bytes are, which arrays and sources bring; the order of calls moves whatever bytes there are.
GIVEN = [*((form, given) for form in FORMS for given in ("arrays", "sources")), ("f32", "masks first"), ("f32", "arrays again")]


@pytest.mark.parametrize(("form", "given"), GIVEN)
def test_results_are_the_same_bits_whatever_is_resident(form: str, given: str, cuda: FakeDriver | None) -> None:
    compiled, other = compiled_layers(form), compiled_layers(form)
    arrays = params_of(compiled, form)
    compiled.set_params(arrays)
    expected = outputs(compiled)
    if given == "masks first":
        other.set_moe_resident_experts_per_layer(MASKS[1])
    if given == "sources":
        made = {n: ExpertSource(partial(one, a), n) if of_experts(n) else a for n, a in arrays.items()}
        other.set_params(made)
    else:
        other.set_params(arrays)
    for masks in (*MASKS, [[True] * E] * LAYERS, *MASKS[::-1]):
        other.set_moe_resident_experts_per_layer(masks)
        np.testing.assert_array_equal(outputs(other), expected)
        if given == "arrays again":
            other.set_params(params_of(other, form, seed=5))
            assert (outputs(other) != expected).any()
            other.set_params(arrays)
            np.testing.assert_array_equal(outputs(other), expected)


def test_a_mask_takes_hold_of_calls_that_were_bound_before(cuda: object) -> None:
    """Their graphs held the addresses of weights in order."""
    compiled = compiled_layers()
    compiled.set_params(params_of(compiled))
    x = np.random.default_rng(1).standard_normal((T, D)).astype(np.float32)
    bound, slots = compiled.bound([x]), compiled.run_slots
    before, again = np.array(bound()[0]), compiled.clone()
    slots([x])
    for masks in (*MASKS, [[True] * E] * LAYERS):
        compiled.set_moe_resident_experts_per_layer(masks)
        for _ in range(3):
            np.testing.assert_array_equal(bound()[0], before)
            slots([x])
            np.testing.assert_array_equal(compiled.read_output_row(0, 1, D), before[1])
            np.testing.assert_array_equal(again.run({"x": x})[0], before)
    stats = compiled.take_moe_residency_stats()
    assert stats.resident.tokens + stats.offloaded.tokens == 4 * 6 * LAYERS * T * K
    for tier, near in ((stats.resident, True), (stats.offloaded, False)):
        assert tier.seconds == tier.bytes / compiled.expert_tiers().rate(near) > 0


def test_experts_that_leave_while_a_call_begins(cuda: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool makes the first table between a call's look at its graph and the launch: the old graph reads slots in order."""
    compiled = compiled_layers()
    compiled.set_params(params_of(compiled))
    x = np.random.default_rng(1).standard_normal((T, D)).astype(np.float32)
    (before,) = compiled.run({"x": x})
    bound, gpu, masks = compiled.bound([x]), backend.memory_of(0).gpu, [MASKS[1], MASKS[0]]
    plain = gpu.await_readers

    def interrupted() -> None:
        plain()
        while masks:
            compiled.expert_tiers().set(masks.pop())

    monkeypatch.setattr(gpu, "await_readers", interrupted)
    np.testing.assert_array_equal(bound()[0], before)
    assert not masks
    np.testing.assert_array_equal(bound()[0], before)


def test_memory_falls_with_the_experts_that_leave(cuda: FakeDriver | None) -> None:
    compiled = compiled_layers()
    compiled.set_params(params_of(compiled))
    gpu = backend.memory_of(0).gpu
    plan, live = compiled.memory_plan(), gpu.allocated["live_bytes"]
    compiled.set_moe_resident_experts([True] * 2 + [False] * 6)
    each = [layer.nbytes for layer in compiled.expert_tiers().layers]
    assert compiled.memory_plan().offloaded == 6 * sum(each) == plan.total_bytes - compiled.memory_plan().total_bytes
    given_back = live - gpu.allocated["live_bytes"]
    if cuda is not None:  # whose granule is small
        assert given_back >= 4 * sum(each)
        free = cuda.free
        compiled.set_moe_resident_experts([True] * E)
        assert free - cuda.free >= 4 * sum(each)
    tiers = compiled.expert_tiers()
    compiled.set_moe_resident_experts([True] * E)
    held = gpu.allocated["live_bytes"]
    for expert in range(6):
        tiers.demote(0, expert)
    assert gpu.allocated["live_bytes"] < held if cuda is not None else gpu.allocated["live_bytes"] <= held


def test_weights_need_no_more_memory_than_their_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts come one by one, and the GPU has no room for all of them."""
    with installed(driver := FakeDriver(), monkeypatch):
        compiled = compiled_layers()
        arrays = params_of(compiled)
        each = sum(a.nbytes // E for n, a in arrays.items() if of_experts(n))
        compiled.set_moe_resident_experts([True] * 2 + [False] * 6)
        outputs_fit = driver.free
        driver.free = 3 * each + (96 << 10)
        compiled.set_params({n: ExpertSource(partial(one, a), n) if of_experts(n) else a for n, a in arrays.items()})
        found = outputs(compiled)
        with pytest.raises(OutOfMemoryError):
            compiled.set_moe_resident_experts([True] * E)
        np.testing.assert_array_equal(outputs(compiled), found)
        driver.free = outputs_fit
        compiled.set_moe_resident_experts([True] * E)
        np.testing.assert_array_equal(outputs(compiled), found)


def test_experts_leave_while_weights_are_set_in_part(cuda: object) -> None:
    """The first mask copies the memory that is there."""
    compiled = compiled_layers()
    arrays = params_of(compiled)
    name = next(filter(of_experts, arrays))

    def first(expert: int) -> np.ndarray:
        if expert > 1:
            raise OSError("no such file")
        return one(arrays[name], expert)

    with pytest.raises(CorruptFileError):
        compiled.set_params({name: ExpertSource(first, name)})
    compiled.set_moe_resident_experts([True] + [False] * (E - 1))
    compiled.set_params(arrays)
    found = outputs(compiled)
    compiled.set_moe_resident_experts([True] * E)
    np.testing.assert_array_equal(outputs(compiled), found)


@pytest.mark.parametrize("form", FORMS)
def test_params_are_read_back_and_saved_from_both_tiers(form: str, cuda: FakeDriver | None, tmp_path: Path) -> None:
    compiled = compiled_layers(form)
    compiled.set_params(params_of(compiled, form))
    expected = outputs(compiled)
    compiled.set_moe_resident_experts_per_layer(MASKS[2])
    if cuda is None:
        compiled.save(tmp_path / "saved.rlx")
        loaded = rlx.load(tmp_path / "saved.rlx", device="cuda")
        np.testing.assert_array_equal(outputs(loaded), expected)
        loaded.set_moe_resident_experts_per_layer(MASKS[1])
        np.testing.assert_array_equal(outputs(loaded), expected)


def test_statistics_count_each_choice_once(cuda: object) -> None:
    compiled = compiled_layers()
    compiled.set_params(params_of(compiled))
    assert compiled.take_moe_residency_stats().resident.tokens == 0  # nothing is counted while all are resident
    compiled.set_moe_resident_experts([True] * 4 + [False] * 4)
    given = ({"x": np.random.default_rng(seed).standard_normal((T, D)).astype(np.float32)} for seed in range(3))
    expert_graphs.checked_statistics(compiled, given, K, 4, 3 * LAYERS * T * K)


def test_more_runs_than_a_log_has_room_for_are_all_counted(cuda: object) -> None:
    compiled = compiled_layers()
    compiled.set_params(params_of(compiled))
    compiled.set_moe_resident_experts([False] * E)
    x = np.ones((T, D), np.float32)
    for _ in range(150):
        compiled.commit_no_wait({"x": x})
    compiled.sync_pending()
    assert compiled.take_moe_residency_stats().offloaded.tokens == 150 * LAYERS * T * K


@pytest.mark.parametrize("policy", ["static", "lru", "lfu", "hysteresis", "predict"])
def test_a_pool_keeps_its_budget_and_the_bits(policy: str, cuda: object) -> None:
    compiled = compiled_layers(tokens=1)
    compiled.set_params(params_of(compiled))
    expected = outputs(compiled, 20, tokens=1)
    with ExpertPool(compiled, 6, policy) as pool:
        landing = policy == "predict"  # else nothing is set aside
        assert pool.policy.quotas == [3 - landing] * 2 and pool.landing == [landing] * 2
        np.testing.assert_array_equal(outputs(compiled, 20, tokens=1), expected)
        for _ in range(5):
            outputs(compiled, 4, tokens=1)
            pool.settle()
            for layer in range(LAYERS):
                np.testing.assert_array_equal(pool.tiers.resident(layer), pool.policy.resident[layer])
                assert pool.tiers.resident(layer).sum() <= 3
        report = pool.report()
        assert report.forwards == 40 and report.uses == 40 * LAYERS * K and 0 < report.hits < report.uses
        if policy in ("lru", "lfu", "hysteresis"):
            assert pool.policy.hits > 0
    np.testing.assert_array_equal(outputs(compiled, 20, tokens=1), expected)


# -- guesses of the next layer's experts

GUESSED = 3  # layers


def guessing() -> CompiledGraph:
    g = expert_graphs.layers(1, D, FFN, E, K, count=GUESSED, lookahead=True)
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_params(params_of(compiled))
    return compiled


def drifted(count: int) -> list[np.ndarray]:
    """Inputs of which each is like the one before it."""
    rng, x, found = np.random.default_rng(2), np.zeros((1, D), np.float32), []
    for _ in range(count):
        x = 0.7 * x + rng.standard_normal((1, D), np.float32)
        found.append(x)
    return found


def test_an_expert_that_was_guessed_is_resident_for_the_next_layer_of_the_same_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(FakeDriver(), monkeypatch):
        compiled, inputs = guessing(), drifted(20)
        expected = [compiled.run({"x": x})[0] for x in inputs]
        with ExpertPool(compiled, 4 * GUESSED, "predict") as pool:
            assert pool.policy.quotas == [3] * GUESSED and pool.landing == [1] * GUESSED
            for x, y in zip(inputs, expected):
                compiled.commit_no_wait({"x": x})
                while pool.tiers.going():  # the pool follows the run: each of its looks lets a command pass
                    time.sleep(1e-4)
                compiled.sync_pending()
                np.testing.assert_array_equal(compiled.read_output_row(0, 0, D), y[0])
                pool.settle()
            report, stats = pool.report(), compiled.take_moe_residency_stats()
        assert report.forwards == 20 and report.uses == 20 * GUESSED * K
        assert report.hits == report.predicted == stats.resident.experts  # all came in time, and were used where they are
        late = Hysteresis(pool.layers, pool.budget, tokens=0, lands=True)
        for x in inputs:
            compiled.enable_moe_topk_capture(K)
            compiled.run({"x": x})
            for layer, ids in enumerate(compiled.take_moe_topk_capture()):
                late.routed(layer, ids)
        assert report.hits > late.hits + 10


def test_a_guess_that_comes_too_late_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed(FakeDriver(), monkeypatch):
        compiled, inputs = guessing(), drifted(20)
        with ExpertPool(compiled, 4 * GUESSED, "predict") as pool:
            late = Hysteresis(pool.layers, pool.budget, tokens=0, lands=True)
            for x in inputs:
                with pool._ready:  # its thread comes when the run has ended
                    compiled.enable_moe_topk_capture(K)
                    compiled.run({"x": x})
                    for layer, ids in enumerate(compiled.take_moe_topk_capture()):
                        late.routed(layer, ids)
                pool.settle()
            report = pool.report()
        assert report.hits == report.predicted == late.hits


def test_only_a_policy_that_reads_ahead_makes_runs_tell_of_each_router(cuda: object) -> None:
    compiled = guessing()
    x, rings = drifted(1)[0], list[int]()
    (expected,) = compiled.run({"x": x})
    bound = compiled.bound([x])
    for policy in ("hysteresis", "predict", "lru", "predict"):
        with ExpertPool(compiled, 4 * GUESSED, policy):
            for _ in range(3):
                np.testing.assert_array_equal(bound()[0], expected)
                np.testing.assert_array_equal(compiled.run({"x": x})[0], expected)
            with compiled.settled() as executable:
                rings.append(len(executable.experts.log.rings))
    assert rings == [1, GUESSED, 1, GUESSED]
    np.testing.assert_array_equal(bound()[0], expected)
    stats = compiled.take_moe_residency_stats()
    assert stats.resident.tokens + stats.offloaded.tokens == (4 * 6 + 1) * GUESSED * K


def test_a_pool_that_follows_runs_keeps_its_budget_and_the_bits(cuda: object) -> None:
    compiled, inputs = guessing(), drifted(10 if cuda else 400)
    expected = [compiled.run({"x": x})[0] for x in inputs]
    with ExpertPool(compiled, 4 * GUESSED, "predict") as pool:
        for x, y in zip(inputs, expected):
            np.testing.assert_array_equal(compiled.run({"x": x})[0], y)
            assert all(slots.count <= 4 for slots in pool.tiers.slots.values())  # type: ignore[attr-defined]
        pool.settle()
        for layer in range(GUESSED):
            np.testing.assert_array_equal(pool.tiers.resident(layer), pool.policy.resident[layer])
        report = pool.report()
        assert report.uses == len(inputs) * GUESSED * K and 0 < report.hits < report.uses
        stats = compiled.take_moe_residency_stats()
        assert report.hits == stats.resident.experts


def test_a_run_that_fails_logs_no_choice(cuda: object) -> None:
    """Rings of routers stay in step: the next run's choices are those of each layer."""
    g = expert_graphs.layers(1, D, FFN, E, K, count=GUESSED, lookahead=True)
    g.set_outputs([*g.outputs, rlx.gather(g.input("table", (4,), "f32"), g.input("at", (1,), "i32"))])
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_params(params_of(compiled))
    given = {"x": drifted(1)[0], "table": np.ones(4, np.float32)}
    with ExpertPool(compiled, 4 * GUESSED, "predict") as pool:
        for at in (0, 9, 1, 9, 2):
            if at == 9:
                with pytest.raises(IndexRangeError):
                    compiled.run({**given, "at": np.array([at], np.int32)})
            else:
                compiled.run({**given, "at": np.array([at], np.int32)})
            pool.settle()
        forwards = pool.policy.clock
        assert all(3 <= n <= 5 for n in forwards) and forwards == sorted(forwards, reverse=True)
        stats = compiled.take_moe_residency_stats()
        assert stats.resident.tokens + stats.offloaded.tokens == sum(forwards) * K


def test_promotions_beside_runs_never_change_a_result(cuda: object) -> None:
    compiled = compiled_layers()
    compiled.set_params(params_of(compiled))
    expected, tiers = outputs(compiled, 10), compiled.expert_tiers()
    compiled.set_moe_resident_experts_per_layer(MASKS[1])
    with expert_graphs.moving(tiers, LAYERS, E, movers=2):
        for _ in range(10 if cuda else 40):
            np.testing.assert_array_equal(outputs(compiled, 10), expected)


def test_weights_that_are_set_beside_promotions_reach_both_tiers(cuda: object) -> None:
    compiled = compiled_layers()
    params = params_of(compiled)
    compiled.set_params(params)
    expected, tiers = outputs(compiled), compiled.expert_tiers()
    compiled.set_moe_resident_experts_per_layer(MASKS[1])
    with expert_graphs.moving(tiers, LAYERS, E, movers=1, demoted=0.5):
        for _ in range(5):
            for seed in (*range(1, 15), 0):
                compiled.set_params(params_of(compiled, seed=seed))
            np.testing.assert_array_equal(outputs(compiled), expected)


def test_an_executable_that_joins_later_finds_the_store_as_it_is(cuda: object) -> None:
    compiled = compiled_layers()
    compiled.set_moe_resident_experts_per_layer(MASKS[1])
    compiled.set_params(params_of(compiled))  # experts that are not resident are in the store alone
    one = expert_graphs.layers(1, D, FFN, E, K, "f32", count=LAYERS)
    wanted = rlx.Session("cuda").compile(one)
    wanted.set_params(params_of(wanted))
    later = rlx.Session("cuda").compile(one, params=compiled.params)
    np.testing.assert_array_equal(outputs(later, tokens=1), outputs(wanted, tokens=1))
    later.set_moe_resident_experts_per_layer([[not near for near in mask] for mask in MASKS[1]])
    np.testing.assert_array_equal(outputs(later, tokens=1), outputs(wanted, tokens=1))


def test_wrong_masks_change_nothing(cuda: object) -> None:
    compiled = compiled_layers()
    compiled.set_params(params_of(compiled))
    compiled.set_moe_resident_experts([False] + [True] * (E - 1))
    for mask, error in (([True] * (E - 1), InputShapeError), ([1] * E, BindingError)):
        with pytest.raises(error, match="mask"):
            compiled.set_moe_resident_experts(mask)  # type: ignore[arg-type]
    assert compiled.expert_tiers().resident(1).tolist() == [False] + [True] * (E - 1)


on_gpu = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    path = tmp_path_factory.mktemp("moe")
    small_models.make("qwen3_moe", path, gain=4.0, decoder_sparse_step=1, num_experts=16, moe_intermediate_size=32)
    return path


def greedy(model: Any, steps: int, before: Any = lambda: None) -> list[int]:
    model.reset()
    tokens = [int(model.step([1, 5, 9, 7, 30]).argmax())]
    while len(tokens) < steps:
        before()
        tokens.append(int(model.step(tokens[-1:]).argmax()))
    return tokens


@pytest.mark.parametrize("policy", ["lru", "hysteresis"])
def test_a_model_within_a_budget_gives_the_same_tokens(policy: str, folder: Path, cuda: object) -> None:
    steps = 200 if cuda is None else 12
    expected = greedy(rlx.models.load(folder, session=rlx.Session("cuda"), capacity=256), steps)
    model: Any = rlx.models.load(folder, session=rlx.Session("cuda"), capacity=256, expert_budget=20, expert_policy=policy)
    assert greedy(model, steps) == expected
    model.pool.settle()
    assert sum(int(model.pool.tiers.resident(n).sum()) for n in range(3)) <= 20
    assert "20 experts resident" in str(model.pool.report())


@on_gpu
def test_masks_that_change_at_every_step_change_no_token(folder: Path) -> None:
    model: Any = rlx.models.load(folder, session=rlx.Session("cuda"))
    expected, rng = greedy(model, 250), np.random.default_rng(0)
    tiers = model.expert_tiers()
    assert greedy(model, 250, lambda: tiers.set([rng.random(16) < 0.5 for _ in tiers.layers])) == expected


@on_gpu
def test_a_saved_model_within_a_budget_never_has_all_experts_on_the_gpu(folder: Path, tmp_path: Path) -> None:
    session = rlx.Session("cuda")
    expected = greedy(rlx.models.load(folder, session=session, capacity=80), 60)
    rlx.models.load(folder, session=session, capacity=80).save(tmp_path / "m.rlx", sizes=[1, 8], sampling=())
    held, most = Region.hold, list[int]()

    def noted(self: Region, nbytes: int) -> None:
        held(self, nbytes)
        most.append(nbytes)

    with pytest.MonkeyPatch.context() as within:
        within.setattr(Region, "hold", noted)
        model: Any = rlx.load(tmp_path / "m.rlx", device="cuda", expert_budget=20, expert_policy="lru")
        assert greedy(model, 60) == expected
    each = max(part.nbytes for layer in model.expert_tiers().layers for part in layer.parts.values())
    assert 0 < max(most) <= 8 * each
