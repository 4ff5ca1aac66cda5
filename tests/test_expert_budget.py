"""Language models with more experts than their budget of memory holds: the same tokens, predicted hits, traces, the commands."""

from __future__ import annotations

import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO, TextIOWrapper
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expert_choices import KINDS, bursty, layers
from small_models import make, talker, write_gguf

import rlx
from rlx.cli.main import run
from rlx.errors import BindingError, CorruptFileError, OptionError, RlxError, Unsupported
from rlx.models import Generator, LanguageModel
from rlx.runtime.policies import profile_of
from rlx.runtime.simulate import Rates, simulate
from rlx.runtime.traces import MoELayer, TraceFile, TraceWriter

PROMPT = [1, 5, 9, 7, 30]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    make("qwen3_moe", path, gain=4.0, decoder_sparse_step=1, num_experts=16, moe_intermediate_size=32)
    return path


def greedy(model: LanguageModel, steps: int = 60) -> list[int]:
    model.reset()
    tokens = [int(model.step(PROMPT).argmax())]
    while len(tokens) < steps:
        tokens.append(int(model.step(tokens[-1:]).argmax()))
    return tokens


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[int]:
    return greedy(LanguageModel(folder))


@pytest.mark.parametrize("policy", ["static", "lru", "lfu", "hysteresis", "predict"])
def test_a_budget_changes_no_token_and_hits_are_predicted(folder, expected, policy, tmp_path):
    model = LanguageModel(folder, expert_budget=20, expert_policy=policy, record_experts=tmp_path / "t")
    assert model.pool is None  # nothing is read before the first step
    assert greedy(model) == expected
    assert model.pool is not None
    model.pool.settle()
    report, resident = model.pool.report(), [model.pool.tiers.resident(n) for n in range(3)]
    assert [int(m.sum()) for m in resident] == [6, 6, 6] and sum(report.quotas) + 2 == 20
    assert all(map(np.array_equal, resident, model.pool.policy.resident))
    (predicted,) = simulate(TraceFile(tmp_path / "t"), 20, Rates(1.0, 1e9, {}), [policy])
    assert 0 < report.hit_rate < 1 and abs(report.predicted_rate - predicted.hit_rate) < 0.02
    late = 1 if policy == "predict" else 0.02  # a layer this small is done before the experts of the next one are read
    assert -0.02 < predicted.hit_rate - report.hit_rate < late


def told_what_to_choose(of: list[MoELayer], width: int = 32) -> rlx.Graph:
    """One token through layers whose routers choose what they are given."""
    g = rlx.Graph("told")
    h = g.input("x", (1, width), "f32")
    for i, x in enumerate(of):
        ids = rlx.router(g.input(f"ids{i}", (1, x.top_k), "i32"), experts=x.experts)
        order, place, ends = rlx.group_rows(ids.reshape((x.top_k,)), groups=x.experts)
        w = g.param(f"w{i}", (x.experts * width, width), "f32").reshape((x.experts, width, width)).transpose(0, 2, 1)
        rows = rlx.segment_matmul(rlx.gather(h, order // x.top_k), w, ends)
        h = rlx.tanh(rlx.sum(rlx.gather(rows, place), axis=0, keepdims=True))
    g.set_outputs([h])
    return g


@pytest.mark.parametrize("policy", ["static", "lru", "lfu", "hysteresis"])
@pytest.mark.parametrize("kind", KINDS)
def test_predicted_hits_are_those_that_the_device_counts(kind, policy, tmp_path):
    """On three kinds of traces. The device's own statistics know nothing of policies."""
    of, rng = layers(2, 32, 4, 4096), np.random.default_rng(0)
    compiled = rlx.compile(told_what_to_choose(of), threads=1)
    compiled.set_params({p.name: rng.standard_normal(p.shape.static, np.float32) / 8 for p in compiled.params})
    forwards = list(KINDS[kind](3, of, 150))
    inputs = [{"x": np.ones((1, 32), np.float32)} | {f"ids{i}": c for i, c in enumerate(f.chosen)} for f in forwards]
    expected = [compiled.run(x)[0] for x in inputs]
    with TraceWriter(tmp_path / "t", "told", of) as trace:
        for forward in forwards:
            trace.add(forward)
    (predicted,) = simulate(TraceFile(tmp_path / "t"), 24, Rates(1.0, 1e9, {}), [policy])
    with rlx.ExpertPool(compiled, 24, policy) as pool:
        compiled.take_moe_residency_stats()
        found = [compiled.run(x)[0] for x in inputs]
        stats = compiled.take_moe_residency_stats()
    assert all(map(np.array_equal, found, expected))
    measured = stats.resident.experts / (stats.resident.experts + stats.offloaded.experts)
    assert abs(measured - predicted.hit_rate) < 0.02 and 0.1 < measured < 0.95
    assert abs(pool.report().hit_rate - measured) < 0.02


@pytest.mark.parametrize("policy", ["lru", "hysteresis"])
def test_executables_on_several_threads_share_a_pool(policy):
    of, rng = layers(2, 32, 4), np.random.default_rng(0)
    compiled = rlx.compile(told_what_to_choose(of), threads=1)
    compiled.set_params({p.name: rng.standard_normal(p.shape.static, np.float32) / 8 for p in compiled.params})
    inputs = [
        {"x": rng.standard_normal((1, 32), np.float32)} | {f"ids{i}": c for i, c in enumerate(f.chosen)}
        for f in bursty(1, of, 120)
    ]  # fmt: skip
    expected = [compiled.run(x)[0] for x in inputs]
    with rlx.ExpertPool(compiled, 24, policy) as pool, ThreadPoolExecutor(3) as threads:
        clones = [compiled.clone() for _ in range(3)]
        each = list(threads.map(lambda clone: [clone.run(x)[0] for x in inputs], clones))
        pool.settle()
        assert all(int(m.sum()) <= n for m, n in zip(pool.policy.resident, pool.policy.quotas))
        assert all(np.array_equal(m, pool.tiers.resident(n)) for n, m in enumerate(pool.policy.resident))
    assert all(np.array_equal(a, b) for found in each for a, b in zip(found, expected))
    assert pool.report().forwards == 360


def test_what_a_run_reads_after_it_was_given_up_leaves_again():
    """A router's answer names experts that stay; until the run has read them, that of another thread may take their place."""
    of, rng = layers(2, 32, 4), np.random.default_rng(0)
    compiled = rlx.compile(told_what_to_choose(of), threads=1)
    compiled.set_params({p.name: rng.standard_normal(p.shape.static, np.float32) / 8 for p in compiled.params})
    (forward,) = bursty(1, of, 1)
    x = {"x": rng.standard_normal((1, 32), np.float32)} | {f"ids{i}": c for i, c in enumerate(forward.chosen)}
    with rlx.ExpertPool(compiled, 24, "lru") as pool:
        for end in (pool.settle, lambda: (compiled.run(x), compiled.run(x), pool.settle())):
            for layer, wanted in enumerate(pool.policy.resident):
                pool.tiers.promote(layer, int(np.flatnonzero(~wanted)[-1]))
            end()
            assert all(np.array_equal(m, pool.tiers.resident(n)) for n, m in enumerate(pool.policy.resident))


def test_a_trace_has_what_the_routers_chose(folder, tmp_path):
    model = LanguageModel(folder, record_experts=tmp_path / "t")
    model.step(PROMPT)  # a chunk of 8, of which 3 are padding
    compiled = model.executable(1)
    compiled.enable_moe_topk_capture(2)
    model.step([3])
    with pytest.raises(BindingError, match="no capture is enabled"):  # the recorder took it
        compiled.take_moe_topk_capture()
    file = TraceFile(tmp_path / "t")
    prompt, one = file
    assert prompt.ahead is None and one.ahead is not None  # many tokens use most experts: a guess is no help
    assert [a.shape for a in one.ahead] == [(1, 2)] * 2
    assert file.model == folder.name and [(x.experts, x.top_k) for x in file.layers] == [(16, 2)] * 3
    assert [c.shape for c in prompt.chosen] == [(5, 2)] * 3 and [c.shape for c in one.chosen] == [(1, 2)] * 3
    again = LanguageModel(folder)
    again.executable(8).enable_moe_topk_capture(2)
    again.step(PROMPT)
    assert all(np.array_equal(a, b[:5]) for a, b in zip(prompt.chosen, again.executable(8).take_moe_topk_capture()))
    assert 0 < one.seconds < 10 and one.slow_bytes == 0
    assert file.layers[0].nbytes >= 3 * 24 * 32 * 4


def test_recorded_times_and_bytes_are_rates_for_a_simulation(folder, tmp_path):
    greedy(LanguageModel(folder, expert_budget=16, record_experts=tmp_path / "t"), 20)
    rates = Rates.of(TraceFile(tmp_path / "t"))
    assert rates.sources["slow"] == "as in the trace" and rates.slow > 1e3


def test_wrong_budgets_are_errors_before_anything_is_read(folder, tmp_path):
    with pytest.raises(OptionError, match="a budget of experts is"):
        LanguageModel(folder, expert_budget="much")
    with pytest.raises(OptionError, match="no policy is called 'best'"):
        LanguageModel(folder, expert_budget=20, expert_policy="best")
    with pytest.raises(OptionError, match="expert_policy='lru' needs an expert_budget"):
        LanguageModel(folder, expert_policy="lru")
    with pytest.raises(OptionError, match="expert_profile='t' needs an expert_budget"):
        LanguageModel(folder, expert_profile="t")
    small = LanguageModel(folder, expert_budget=9)
    with pytest.raises(OptionError, match="in use by 128 tokens: at least 16 experts"):
        small.step(PROMPT)
    assert LanguageModel(folder, expert_budget=2, capacity=1).step([3]).shape == (1, 199)  # one token uses two experts of a layer
    make("qwen3", tmp_path / "dense")
    with pytest.raises(OptionError, match="has no experts: expert_budget and record_experts cannot be used with it"):
        LanguageModel(tmp_path / "dense", expert_budget=20, record_experts=tmp_path / "t")


@pytest.mark.parametrize("room", [6, 4096])
def test_a_run_of_resident_experts_asks_no_python(folder, monkeypatch, tmp_path, room):
    """Their choices are logged, in a ring of so many, and counted later."""
    monkeypatch.setattr("rlx.backends.cpu.experts.LOGGED", room)
    model = LanguageModel(folder, expert_budget=48, record_experts=tmp_path / "t", expert_policy="lru")
    model.step(PROMPT)
    assert model.pool is not None
    asked: list[int] = []
    routed = model.pool.routed
    monkeypatch.setattr(model.pool, "routed", lambda layer, *given: asked.append(layer) or routed(layer, *given))
    before, resident = model.pool.report(), sum(int(model.pool.tiers.resident(n).sum()) for n in range(3))
    model.pool.tiers.set([np.ones(16, bool)] * 3)
    for m in model.pool.policy.resident:
        m[:] = True
    for token in range(30):
        model.step([token])
    report = model.pool.report()
    assert resident < 48 and (report.uses - before.uses, report.hits - before.hits) == (180, 180)
    assert report.forwards == before.forwards + 30
    assert len(asked) == (3 * (30 // 4) if room == 6 else 0)  # every fourth forward finds three in the ring


def test_a_pool_for_a_model_that_is_loaded(folder, expected):
    model = LanguageModel(folder)
    greedy(model, 5)
    with rlx.ExpertPool(model, 20, "lru") as pool:
        assert greedy(model) == expected
        assert pool.report().hits < pool.report().uses
        with pytest.raises(BindingError, match="have an ExpertPool already"):
            rlx.ExpertPool(model.executable(1), 20)
    assert greedy(model) == expected and pool.report().forwards == 60


def test_an_artifact_file_runs_within_a_budget(folder, expected, tmp_path):
    LanguageModel(folder, capacity=80).save(tmp_path / "m.rlx", sizes=[1, 8], sampling=())
    model = rlx.load(tmp_path / "m.rlx", expert_budget=20, record_experts=tmp_path / "t")
    assert greedy(model) == expected
    assert 0 < model.pool.report().hit_rate < 1 and len(list(TraceFile(tmp_path / "t"))) == 60
    with pytest.raises(Unsupported, match="saved without guesses, which the policy 'predict' needs"):
        rlx.load(tmp_path / "m.rlx", expert_budget=20, expert_policy="predict").step([3])


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_a_gguf_file_runs_within_a_budget(tmp_path, kind):
    network = make("olmoe", tmp_path / "m", gain=4.0, hidden_size=256, intermediate_size=256, num_hidden_layers=2)
    write_gguf(network, "olmoe", path := tmp_path / "m.gguf", {"": kind})
    model = LanguageModel(path, expert_budget=10, capacity=80)
    assert greedy(model, 40) == greedy(LanguageModel(path, capacity=80), 40)
    assert model.pool is not None and 0 < model.pool.report().hit_rate < 1


def test_a_model_begins_with_the_experts_of_a_profile(folder, tmp_path):
    greedy(LanguageModel(folder, record_experts=tmp_path / "t"))
    model = LanguageModel(folder, expert_budget=20, expert_policy="static", expert_profile=tmp_path / "t", capacity=16)
    model.step(PROMPT[:1])
    file = TraceFile(tmp_path / "t")
    assert model.pool is not None
    for mask, count in zip(model.pool.policy.resident, profile_of(file, file.layers)):
        assert count[mask].min() >= count[~mask].max()


def test_a_file_that_is_cut_meanwhile_is_an_error_and_the_state_stays(folder, expected, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    model, file = LanguageModel(copy, expert_budget=20), copy / "model.safetensors"
    model.step(PROMPT)
    whole, times = file.read_bytes(), os.stat(file)
    os.truncate(file, len(whole) // 3)
    with pytest.raises(CorruptFileError, match=r"expert \d+ of 'model\.layers.*model\.safetensors"):
        for token in range(100):
            before = model.position
            model.step([token])
    assert model.position == before
    file.write_bytes(whole)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert greedy(model) == expected


@pytest.mark.parametrize("budget,most", [(20, 276_480 + 2 * 15_360), ("300kB", 300_000), (48, 10**9), ("1GB", 10**9)])
def test_memory_is_known_before_anything_is_read_and_holds(folder, budget, most):
    whole = LanguageModel(folder, capacity=16).memory()
    model = LanguageModel(folder, capacity=16, expert_budget=budget)
    planned = model.memory()
    assert planned.keys() == whole.keys()
    assert (planned["prepared"] < whole["prepared"]) == (most < 10**9)
    model.step(PROMPT[:1])
    assert model.pool is not None
    model.pool.settle()
    (compiled,) = model._compiled.values()
    held = compiled.memory_plan()
    assert held.regions["prepared"] + held.regions["params"] <= planned["prepared"] + planned["params"]
    assert sum(int(model.pool.tiers.resident(n).sum()) * x.nbytes for n, x in enumerate(model.pool.layers)) <= most


# -- the commands


@pytest.fixture(scope="module")
def speaking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("talker")
    talker(path, family="qwen3_moe", decoder_sparse_step=1)
    return path


def command(capfd: Any, *args: object) -> tuple[int, str, str]:
    code = 0
    try:
        run([str(a) for a in args])
    except SystemExit as end:
        code = int(end.code or 0)
    return code, *capfd.readouterr()


def test_generate_and_chat_run_within_a_budget_and_record(speaking, tmp_path, capfd, monkeypatch):
    how = "--max-new-tokens", "30", "--capacity", "100"
    code, plain, _ = command(capfd, "generate", speaking, "hello", *how)
    assert code == 0
    more = "--expert-budget", "12", "--expert-policy", "lru", "--record-experts", tmp_path / "t", "--stats"
    code, text, told = command(capfd, "generate", speaking, "hello", *how, *more)
    assert (code, text) == (0, plain)
    assert "rlx: 10 experts resident" in told and "within 12 experts; policy lru" in told
    assert re.search(r"experts: .* of \d+ uses were hits, .*% predicted, \d+ forwards", told)
    code, table, _ = command(capfd, "moe", "simulate", tmp_path / "t", "--budget", "12")
    assert code == 0 and "lru" in table
    code, _, error = command(capfd, "generate", speaking, "hello", *how, "--expert-budget", "3")
    assert code == 1 and "at least 8 experts" in error
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO(b"hello\nagain\n")))
    code, _, told = command(capfd, "chat", speaking, *how, "--expert-budget", "12", "--expert-profile", tmp_path / "t")
    assert code == 0 and told.count("rlx: 10 experts resident") == 1


def test_progress_counts_only_what_is_read(folder):
    counts: dict[Any, list[tuple[int, int]]] = {}
    for budget in (None, 20):
        seen = counts[budget] = []
        progress = lambda done, total, seen=seen: seen.append((done, total))  # noqa: E731
        LanguageModel(folder, expert_budget=budget, progress=progress).step(PROMPT)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen) and seen[-1][0] == seen[-1][1]
    assert counts[20][-1][1] < counts[None][-1][1]




@pytest.mark.parametrize("how", ["truncated", "replaced"])
def test_a_model_file_that_changes_during_an_answer(how, folder, tmp_path):
    """The error names file and expert, the state is as before the step, and the answer goes on once the file is back."""
    shutil.copytree(folder, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    given, whole = LanguageModel(tmp_path / "model", expert_budget=16), LanguageModel(folder)
    tokens = [int(given.step(PROMPT).argmax())]
    assert tokens == [int(whole.step(PROMPT).argmax())]
    stamp, content, position = path.stat(), path.read_bytes(), given.position
    if how == "truncated":
        os.truncate(path, 4096)
    else:
        os.rename(path, tmp_path / "original")
        path.write_bytes(content)
    for _ in range(2):
        with pytest.raises(CorruptFileError, match=rf"expert \d+ of 'model.layers.*model.safetensors was (changed or )?{how}"):
            given.step(tokens[-1:])
        assert given.position == position
    if how == "truncated":
        path.write_bytes(content)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    else:
        os.rename(tmp_path / "original", path)
    for _ in range(20):
        token = int(given.step(tokens[-1:]).argmax())
        assert token == int(whole.step(tokens[-1:]).argmax())
        tokens.append(token)


ODD: list[Any] = [True, -1, 0.5, b"x", "\ud800", [1], {"a": 1}, {1: 2}, object(), np.zeros(3), np.array(None), slice(1, 2), 1j]
ARGUMENTS = (
    "weights", "capacity", "batch", "cache", "session", "options", "progress", "transport", "expert_budget", "expert_policy",
    "expert_profile", "record_experts",
)  # fmt: skip


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_wrong_type_are_refused_before_the_first_step(name: str, folder: Path) -> None:
    for odd in ODD:
        with pytest.raises(RlxError) as caught:
            given = {"expert_budget": 20} if name in ("expert_policy", "expert_profile") else {}
            LanguageModel(folder, **{**given, name: odd}).executable(1)
        assert len(str(caught.value)) > 20, odd


def test_what_a_model_is_asked_for_is_checked(folder: Path) -> None:
    model = LanguageModel(folder, capacity=64)
    for odd in ODD:
        for call, *given in ((model.move, odd), (model.move, 0, odd), (model.memory, odd)):
            with pytest.raises(RlxError):
                call(*given)
    with pytest.raises(OptionError, match="prompt=1180591620717411303424: the model's capacity is 64"):
        model.memory(2**70)  # added up chunk by chunk, it did not end
    with pytest.raises(OptionError, match="text is generated by a LanguageModel, got str"):
        Generator("model", [1])  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="the path of a trace is text or a pathlib.Path, got 5"):
        TraceFile(5)  # type: ignore[arg-type]
