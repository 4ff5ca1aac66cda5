"""The tuner: every candidate computes the same bits, what is chosen is kept and repeated, and nothing is measured unasked."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx import knobs
from rlx.backends import get
from rlx.backends.cpu import backend, memory
from rlx.compiler import lower
from rlx.errors import OptionError
from rlx.host import disk
from rlx.ir.tuning import step_key
from rlx.runtime import CompileOptions, Session, tune

RNG = np.random.default_rng(11)
ENOUGH = 3600.0  # seconds of a budget: more than any of these compiles takes


@pytest.fixture
def folder(tmp_path):
    """An empty cache in a folder of its own."""
    with knobs.override(RLX_CACHE=1, RLX_CACHE_DIR=str(tmp_path / "kept")):
        disk._opened.cache_clear()
        yield tmp_path / "kept"
    disk._opened.cache_clear()


@pytest.fixture
def unkept():
    with knobs.override(RLX_CACHE=0):
        yield


def product(m: int, n: int, k: int, dtype=rlx.f32, batch: int = 0, weights: bool = True, rows: bool = False) -> rlx.Graph:
    """gelu(x @ w + b), where asked for as softmax of its rows. Without `weights` nobody packs w."""
    g = rlx.Graph("product")
    x = g.input("x", (batch, m, k) if batch else (m, k), dtype)
    dims = (batch, k, n) if batch else (k, n)
    w = g.param("w", dims, dtype) if weights else g.input("w", dims, dtype)
    y = rlx.gelu(rlx.cast(x @ w, rlx.f32) + g.input("b", (n,), rlx.f32))
    g.set_outputs([rlx.softmax(y) if rows else y])
    return g


def attended(rows: int, keys: int, causal: bool = False) -> rlx.Graph:
    g = rlx.Graph("attended")
    q = g.input("x", (2, 6, rows, 24), rlx.f32)
    k, v = g.input("k", (2, 3, keys, 24), rlx.f32), g.input("v", (2, 3, keys, 17), rlx.f32)
    g.set_outputs([rlx.attention(q, k, v, mask="causal" if causal else "none")])
    return g


def blocks(m: int, n: int, k: int) -> rlx.Graph:
    g = rlx.Graph("blocks")
    packed = np.random.default_rng(3).integers(0, 255, (n, k // 32, 34), np.uint8)
    packed[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    g.set_outputs([rlx.dequant_matmul(g.input("x", (m, k), rlx.f32), rlx.constant(packed.reshape(n, -1)), format="q8_0")])
    return g


def chain(m: int, n: int) -> rlx.Graph:
    g = rlx.Graph("chain")
    x = g.input("x", (m, n), rlx.f32)
    g.set_outputs([rlx.exp(-x) + rlx.sin(x), rlx.sum(x * x, axis=1)])
    return g


GRAPHS = {
    "odd m, n, k": product(33, 91, 49), "tall": product(197, 257, 30), "two tails": product(49, 500, 91),
    "low": product(5, 97, 64), "one row": product(1, 257, 91), "rows": product(37, 97, 33, rows=True),
    "batch": product(13, 50, 9, batch=3), "unpacked": product(49, 197, 50, weights=False),
    "unpacked batch": product(33, 97, 130, batch=2, weights=False), "bf16": product(50, 91, 64, rlx.bf16),
    "attention": attended(197, 197), "causal": attended(65, 65, True), "few queries": attended(3, 197),
    "few keys": attended(40, 5), "blocks": blocks(7, 910, 960), "more blocks": blocks(40, 130, 256), "chain": chain(197, 1001),
}  # fmt: skip


def offered(graph: rlx.Graph, threads: int) -> dict[str, dict[str, tuple[int, ...]]]:
    """Step key -> the tuning axes."""
    cpu = get("cpu")
    program = lower(graph, cpu.target(0, threads), CompileOptions())
    kernels = [s.kernel for s in (*program.steps, *program.commit)]
    return {step_key(kernel, program.target): dict(cpu.axes(kernel, program.target)) for kernel in kernels}


def data(graph: rlx.Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    values = (*graph.inputs, *graph.params)
    return {str(v.name): rng.standard_normal(v.shape.static).astype(v.dtype.numpy) for v in values}


def outputs(graph: rlx.Graph, threads: int, **options) -> list[np.ndarray]:
    compiled, given = Session(threads=threads).compile(graph, CompileOptions(**options)), data(graph)
    for name in compiled.missing_params():
        compiled.set_param(name, given[name])
    compiled._executable.poison()
    return compiled.run({str(v.name): given[str(v.name)] for v in graph.inputs})


def expected(name: str, graph: rlx.Graph) -> np.ndarray | None:
    """By numpy in double precision, for graphs of products."""
    if graph.name != "product":
        return None
    from scipy.special import erf, softmax

    x, w, b = (data(graph)[n].astype(np.float64) for n in "xwb")
    y = x @ w + b
    y = 0.5 * y * (1 + erf(y / np.sqrt(2)))
    return softmax(y, -1) if name == "rows" else y


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_every_candidate_computes_the_same_bits(unkept, name, threads):
    graph = GRAPHS[name]
    usual, axes = outputs(graph, threads), offered(graph, threads)
    right = expected(name, graph)
    if right is not None:
        tolerance = 0.05 if data(graph)["x"].dtype == ml_dtypes.bfloat16 else 2e-5
        np.testing.assert_allclose(usual[0], right, rtol=tolerance, atol=tolerance)
    assert threads == 1 or any(axes.values()), "several threads can always be given other tasks"
    tilings = [{key: {n: v}} for key, found in axes.items() for n, values in found.items() for v in values]
    last = {key: {n: values[-1] for n, values in found.items()} for key, found in axes.items() if found}
    for tiling in [*tilings, last]:
        for one, other in zip(usual, outputs(graph, threads, tune=tiling)):
            assert one.tobytes() == other.tobytes(), tiling


def test_the_default_value_comes_first_and_is_the_default_code(unkept):
    for graph, threads in itertools.product(GRAPHS.values(), (1, 2)):
        first = {key: {n: values[0] for n, values in found.items()} for key, found in offered(graph, threads).items()}
        assert all(len(set(values)) == len(values) > 1 for found in offered(graph, threads).values() for values in found.values())
        assert code(graph, threads, tune=first) == code(graph, threads)


# -- choosing, with races whose outcome is known ---------------------------------------------------------------------


def compiled(graph: rlx.Graph, threads: int = 1, progress=None, **options) -> rlx.CompiledGraph:
    return Session(threads=threads, progress=progress).compile(graph, CompileOptions(**options))


def code(graph: rlx.Graph, threads: int = 1, **options) -> tuple[bytes, ...]:
    return compiled(graph, threads, **options)._executable._code.artifact.objects


class Races:
    """Stands in for measurements: the time of a tiling is what `time` says. `seen`: tilings of each race."""

    def __init__(self, monkeypatch, time=lambda tiling: 1.0):
        self.seen: list[list[dict[str, int]]] = []
        self.time = time
        monkeypatch.setattr(tune._Trial, "_race", lambda trial, tilings, rounds: self.race(tilings, rounds))

    def race(self, tilings, rounds):
        self.seen.append([dict(c) for c in tilings])
        return [[self.time(c)] * rounds for c in tilings]


GRAPH = GRAPHS["two tails"]


def axis() -> tuple[str, int, int]:
    """Of the tilings that this processor has for GRAPH: a choice, its default, and the value that stands in for a faster one."""
    ((_, axes),) = offered(GRAPH, 1).items()
    name = "rows" if "rows" in axes else "blocks"
    return name, axes[name][0], 5 if name == "rows" else axes[name][-1]


def faster(gain: float = 0.1):
    """A time of tilings of GRAPH by which one value of a choice gains so much."""
    name, default, better = axis()
    return lambda tiling: 1.0 - gain * (tiling.get(name, default) == better)


def test_what_wins_is_chosen_and_reported(folder, monkeypatch):
    name, default, better = axis()
    Races(monkeypatch, faster())
    (step,) = compiled(GRAPH, tune=ENOUGH).report().tuning.steps
    assert step.how == "measured" and (dict(step.tiling)[name], dict(step.default)[name]) == (better, default) and step.tried >= 3
    assert "contract 49x500x91 f32 f32 f32" in step.key and f"{name} {better} for {default}" in str(step)
    assert (step.default_ns, step.tiling_ns) == (10**9, 9 * 10**8)
    assert f"{name} {better} for {default}" in str(compiled(GRAPH, tune=ENOUGH).report())
    assert code(GRAPH, tune=ENOUGH) != code(GRAPH)


@pytest.mark.parametrize("gain", [0.02, 0.0])
def test_what_gains_less_than_repeating_varies_is_not_chosen(folder, monkeypatch, gain):
    Races(monkeypatch, faster(gain))
    tuned = compiled(GRAPH, tune=ENOUGH)
    assert tuned.report().tuning.steps[0].tiling == tuned.report().tuning.steps[0].default
    assert tuned._executable._code.artifact.objects == code(GRAPH)


def test_a_win_must_be_repeated(folder, monkeypatch):
    races, time = Races(monkeypatch), faster()
    races.time = lambda tiling: time(tiling) if len(races.seen[-1]) > 2 else 1.0  # of two: the final race
    (step,) = compiled(GRAPH, tune=ENOUGH).report().tuning.steps
    assert step.tiling == step.default and len(races.seen[-1]) == 2


def test_a_second_compile_measures_nothing_and_gives_the_same_code(folder, monkeypatch):
    races = Races(monkeypatch, faster())
    first = compiled(GRAPH, tune=ENOUGH)
    count = len(races.seen)
    assert count and compiled(GRAPH, tune=ENOUGH).report().cache.state == "cached"
    assert compiled(GRAPH, tune=ENOUGH).report().tuning == first.report().tuning
    for entry in folder.glob("program-*"):
        entry.unlink()
    backend._compiled.cache_clear()
    races.time = lambda tiling: 1.0  # measuring again would choose otherwise
    again = compiled(GRAPH, tune=ENOUGH)
    assert len(races.seen) == count and again.report().cache.state == "compiled"
    assert [s.how for s in again.report().tuning.steps] == ["kept"]
    assert again.report().tuning.tilings == first.report().tuning.tilings
    assert again._executable._code.artifact.objects == first._executable._code.artifact.objects


def spoil_bytes(entry: Path) -> None:
    content = bytearray(entry.read_bytes())
    content[-3] ^= 1
    entry.write_bytes(content)


def unknown_value(entry: Path) -> None:
    disk.disk_cache()[0].put(entry.name, [json.dumps([[["rows", 99]], 1, 1, 1, 9]).encode()])  # type: ignore[union-attr]


def no_tiling(entry: Path) -> None:
    disk.disk_cache()[0].put(entry.name, [b'{"rows": [1'])  # type: ignore[union-attr]


def too_deep(entry: Path) -> None:
    disk.disk_cache()[0].put(entry.name, [b"[" * 100_000])  # type: ignore[union-attr]


@pytest.mark.parametrize("spoil", [spoil_bytes, unknown_value, no_tiling, too_deep])
def test_a_damaged_choice_is_measured_again(folder, monkeypatch, spoil):
    races = Races(monkeypatch, faster())
    first = compiled(GRAPH, tune=ENOUGH).report().tuning
    (entry,) = folder.glob("tuning-*")
    spoil(entry)
    for other in folder.glob("program-*"):
        other.unlink()
    count = len(races.seen)
    assert compiled(GRAPH, tune=ENOUGH).report().tuning == first and len(races.seen) == 2 * count


def test_tilings_of_another_machine_are_not_used(folder, monkeypatch):
    races = Races(monkeypatch)
    compiled(GRAPH, tune=ENOUGH)
    count = len(races.seen)
    monkeypatch.setattr(backend.CpuBackend, "machine", lambda self: "another")
    compiled(GRAPH, tune=ENOUGH + 1)
    assert len(races.seen) == 2 * count


def test_tilings_travel_in_a_report_a_mapping_and_a_file(folder, monkeypatch, tmp_path):
    Races(monkeypatch, faster())
    made = compiled(GRAPH, tune=ENOUGH)
    report = made.report().tuning
    with pytest.raises(OptionError, match="cannot write .*none.*: No such file"):
        report.save(tmp_path / "none" / "tilings.json")
    report.save(tmp_path / "tilings.json")
    for given in (report, report.tilings, str(tmp_path / "tilings.json"), tmp_path / "tilings.json"):
        again = compiled(GRAPH, tune=given)
        assert again._executable._code.artifact.objects == made._executable._code.artifact.objects
        assert [s.how for s in again.report().tuning.steps] == ["given"] and again.report().tuning.tilings == report.tilings
    assert CompileOptions(tune=report) == CompileOptions(tune=report.tilings) != CompileOptions(tune=ENOUGH)
    assert hash(CompileOptions(tune=report)) == hash(CompileOptions(tune=tmp_path / "tilings.json"))
    assert str(CompileOptions(tune=report)) == str(CompileOptions(tune=report.tilings)) != str(CompileOptions(tune={}))


def test_a_budget_that_is_spent_leaves_default_tilings(unkept):
    for step in compiled(GRAPH, tune=1e-9).report().tuning.steps:
        assert step.how == "not measured: out of time" and not step.tiling
    assert code(GRAPH, tune=1e-9) == code(GRAPH)


def test_an_interrupted_compile_keeps_what_it_found(folder, monkeypatch):
    races, g = Races(monkeypatch, faster()), two_products()

    def interrupt(done: int, total: int, step: str) -> None:
        if done == 1 and step.startswith("tuning"):
            raise KeyboardInterrupt

    compiled(GRAPH, tune=ENOUGH)  # what stays, stays from here on
    live, count = memory.allocations()["live_bytes"], len(races.seen)
    with pytest.raises(KeyboardInterrupt):
        compiled(g, tune=ENOUGH, progress=interrupt)
    assert memory.allocations()["live_bytes"] <= live and len(races.seen) > count
    steps = []
    watched = compiled(g, tune=ENOUGH, progress=lambda done, total, step: steps.append((step.split()[0], done, total)))
    tuning = watched.report().tuning
    assert sorted(s.how for s in tuning.steps) == ["kept", "measured"] and steps[:2] == [("tuning", 0, 1), ("tuning", 1, 1)]
    assert steps[2:] == [("compiling", n, len(steps) - 3) for n in range(len(steps) - 2)] and len(steps) > 4


def two_products() -> rlx.Graph:
    g = rlx.Graph("two")
    x = g.input("x", (33, 91), rlx.f32)
    g.set_outputs([rlx.gelu(x @ g.param("a", (91, 257), rlx.f32)) @ g.param("b", (257, 50), rlx.f32)])
    return g


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_a_compile_that_ran_out_of_time_is_gone_on_with(folder, monkeypatch, at_once):
    """Each race is run once, however many compiles it takes; until all have been, no program is kept."""
    races, graph = Races(monkeypatch, faster()), two_products()
    with knobs.override(RLX_CACHE=0):
        want = compiled(graph, tune=ENOUGH).report().tuning
    in_all, races.seen = len(races.seen), []
    assert in_all > 3
    run, left = races.race, [0]

    def limited(tilings, rounds):
        if not left[0]:
            raise tune._OutOfTime
        left[0] -= 1
        return run(tilings, rounds)

    monkeypatch.setattr(races, "race", limited)
    for done in range(at_once, in_all + at_once, at_once):
        left[0] = at_once
        report = compiled(graph, tune=ENOUGH).report()
        assert len(races.seen) == min(done, in_all)
        if done < in_all:
            assert "not measured: out of time" in [s.how for s in report.tuning.steps]
            assert (report.cache.state, report.cache.path) == ("off", "") and "the next compile" in report.cache.why
            assert not list(folder.glob("program-*")) and report.cache.why in str(report)
    assert report.cache.state == "compiled" and report.tuning.tilings == want.tilings
    assert [s.tried for s in report.tuning.steps] == [s.tried for s in want.steps]
    again = compiled(graph, tune=ENOUGH).report()
    assert again.cache.state == "cached" and again.tuning.tilings == want.tilings and len(races.seen) == in_all


def test_a_budget_that_is_too_small_for_any_race_is_not_spent_again(folder, monkeypatch):
    """But by compiles that get farther: what one spends its time on is code, which the next finds on disk."""
    monkeypatch.setattr(tune._Trial, "_race", spent)
    said = [compiled(two_products(), tune=budget).report() for budget in (ENOUGH, ENOUGH, ENOUGH, ENOUGH + 1, ENOUGH + 1)]
    assert [r.cache.state for r in said] == ["off", "compiled", "cached", "off", "compiled"]
    assert [{s.how for s in r.tuning.steps} for r in said[:2]] == [
        {"not measured: out of time"}, {"not measured: takes longer than the time given"}
    ]  # fmt: skip


def spent(*_):
    raise tune._OutOfTime


def test_a_race_that_cannot_end_in_time_is_not_begun(unkept, monkeypatch):
    program = lower(GRAPH, get("cpu").target(0, 1), CompileOptions())
    trial = tune._Trial(tune._Tuner(get("cpu"), 0, program, CompileOptions(tune=600), None), program.steps[0])
    monkeypatch.setattr(tune._Trial, "_seconds", lambda self, run, count: run() or 50.0 * count)
    with pytest.raises(tune._OutOfTime):
        trial._race([{}] * 3, 5)
    assert len(trial._race([{}], 5)[0]) == 5


def test_steps_are_really_measured(unkept):
    seen = []
    made = compiled(GRAPHS["two tails"], 2, lambda *args: seen.append(args), tune=ENOUGH)
    (step,) = made.report().tuning.steps
    assert step.how == "measured" and step.tried > 2 and seen[0][:2] == (0, 1) and (1, 1, "tuning") in seen
    assert "tune" in made.report().seconds
    usual = outputs(GRAPHS["two tails"], 2)[0]
    assert outputs(GRAPHS["two tails"], 2, tune=made.report().tuning)[0].tobytes() == usual.tobytes()


@pytest.mark.parametrize("name", ["attention", "blocks", "chain", "unpacked batch"])
def test_every_kind_of_step_can_be_measured(unkept, name, monkeypatch):
    races = Races(monkeypatch)  # the races alone are not run
    compiled(GRAPHS[name], 2, tune=ENOUGH)
    assert races.seen


def test_a_step_over_active_rows_is_measured_with_all_of_them(unkept):
    g = rlx.Graph("rows")
    g.set_outputs([rlx.gelu(g.input("x", ("seq", 91), rlx.f32) @ g.param("w", (91, 257), rlx.f32))])
    options = CompileOptions().bind_extent("seq", 49).replace(tune=ENOUGH)
    program = lower(g, get("cpu").target(0, 1), options)
    step = next(s for s in program.steps if program.extent in s.args)
    trial = tune._Trial(tune._Tuner(get("cpu"), 0, program, options, None), step)
    made = trial._variant(())
    (place,) = (b.id for b in trial._alone.buffers if b.name == str(program.extent))
    assert made.read(place) == 49


# -- not asked for, or not possible --------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [False, 0, 0.0])
def test_without_tuning_nothing_is_measured(unkept, monkeypatch, value):
    monkeypatch.setattr(tune, "_Trial", None)
    tuning = compiled(GRAPH, tune=value).report().tuning
    assert not tuning.steps and tuning.why == "not asked for" and "tune" not in compiled(GRAPH).report().seconds
    assert CompileOptions(tune=value) == CompileOptions() and "tune" not in str(CompileOptions(tune=value))


def test_true_is_a_budget():
    assert CompileOptions(tune=True) == CompileOptions(tune=np.int64(10)) == CompileOptions(tune=10) != CompileOptions(tune=11)
    assert "tune=10.0" in str(CompileOptions(tune=True))


@pytest.mark.parametrize("device", ["ref", "null"])
def test_devices_without_tilings_say_so(device):
    graph = chain(3, 5)
    tuning = Session(device).compile(graph, CompileOptions(tune=True)).report().tuning
    assert tuning.why == f"the device {device} has one tiling for each step"
    with pytest.raises(OptionError, match="'chain' has no step 'loops of old'"):
        Session(device).compile(graph, CompileOptions(tune={"loops of old": {"tasks": 2}}))


@pytest.mark.parametrize(
    "value, says",
    [
        (-1, "tune=-1: give the seconds to spend, True for 10, or tilings"),
        (float("nan"), "tune=nan: give the seconds"),
        (float("inf"), "tune=inf: give the seconds"),
        ([1], r"tune maps step keys to tilings.*got '\[1\]'"),
        (None, "tune maps step keys to tilings"),
        ({"step": 3}, "tune maps step keys to tilings"),
        ({"step": {"rows": 2.5}}, "a tiling maps names to whole numbers; step 'step' has {'rows': 2.5}"),
        ({3: {}}, "a tiling maps names to whole numbers; step 3 has"),
        ("no such file", "tune='no such file': cannot read tilings from there"),
    ],
)
def test_values_without_meaning_are_refused(value, says):
    with pytest.raises(OptionError, match=says):
        CompileOptions(tune=value)


BAD_FILES = [
    "", "[]", "{}", "[" * 100_000, "\udc80", '{"rlx tuning": 2, "steps": {}}', '{"rlx tuning": true, "steps": {}}',
    '{"rlx tuning": 1.0, "steps": {}}', '{"rlx tuning": 1, "steps": 4}',
]  # fmt: skip


@pytest.mark.parametrize("text", BAD_FILES, ids=range(len(BAD_FILES)))
def test_files_that_hold_no_tilings_are_refused(tmp_path, text):
    path = tmp_path / "tilings"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(OptionError, match="cannot read tilings from there|is no file of tilings, format 1"):
        CompileOptions(tune=path)


def test_tilings_that_do_not_fit_are_refused_by_name(unkept):
    ((key, axes),) = offered(GRAPH, 1).items()
    others = offered(GRAPH, 2)
    with pytest.raises(OptionError, match=r"'product' has no step 'contract 49x500x91 .*2 threads.*number of threads \(1 here\)"):
        compiled(GRAPH, tune={k: {} for k in others})
    name, default, _ = axis()
    with pytest.raises(OptionError, match=rf"cannot have {name}=99; it offers .*{name} of '"):
        compiled(GRAPH, tune={key: {name: 99}})
    with pytest.raises(OptionError, match="cannot have colour=1; it offers"):
        compiled(GRAPH, tune={key: {"colour": 1}})
    assert axes[name][0] == default
