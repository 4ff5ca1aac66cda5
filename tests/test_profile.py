"""CompiledGraph.profile: times that add up, spans, source lines, the roofline, and the trace file."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import knobs
from rlx.backends import backend_of
from rlx.driver import Device
from rlx.driver.backend import Roofed, Timeline
from rlx.errors import InputShapeError, MissingParamError, OptionError, Unsupported
from rlx.explain.profile import profile_of, spent
from rlx.ir.cost import Roofline

F = np.float32


@pytest.fixture
def folder(tmp_path):
    """A cache on disk of the test's own."""
    with knobs.override(RLX_CACHE=1, RLX_CACHE_DIR=str(tmp_path / "kept")):
        yield


def two_layers(rows: int = 64, wide: int = 96) -> rlx.Graph:
    g = rlx.Graph("two layers")
    x, w = g.input("x", (rows, wide), rlx.f32), g.param("w", (wide, wide), rlx.f32)
    hidden = rlx.gelu(x @ w)
    g.set_outputs([rlx.softmax(hidden @ w, axis=1)])
    return g


def compiled(graph: rlx.Graph, device: str = "cpu", **options) -> rlx.CompiledGraph:
    made = rlx.Session(device).compile(graph, **options)
    rng = np.random.default_rng(0)
    made.set_params({p.name: rng.standard_normal(p.shape.static).astype(F) for p in made.params})
    return made


@pytest.mark.parametrize("device,threads", [("cpu", 1), ("cpu", 3), ("ref", None)])
def test_steps_and_overhead_add_up_to_the_run(device, threads):
    made = compiled(two_layers(), device, threads=threads)
    p = made.profile(np.ones((64, 96), F), runs=4)
    assert len(p.steps) == len(made.program().steps) and 1 < p.runs <= 4 and p.threads == made.program().target.threads
    assert sum(s.seconds for s in p.steps) + p.overhead_seconds == pytest.approx(p.seconds) and p.overhead_seconds >= 0
    assert all(s.seconds > 0 for s in p.steps) and p.unmeasured_seconds > 0
    begin, end, spans = p.timeline
    assert sorted(set(spans[:, 0].tolist())) == list(range(len(p.steps)))
    assert (spans[:, 2] <= spans[:, 3]).all() and begin <= spans[:, 2].min() and spans[:, 3].max() <= end
    for thread in set(spans[:, 1].tolist()):
        own = spans[spans[:, 1] == thread]
        own = own[np.argsort(own[:, 2])]
        assert (own[1:, 2] >= own[:-1, 3]).all()  # a thread does one thing at a time
    assert spans[:, 1].min() >= 0 and spans[:, 1].max() < p.threads


def test_every_task_of_a_step_has_its_span():
    made = compiled(two_layers(512, 256), threads=2)
    spans = made.profile(runs=1).timeline.spans
    tasks = [code.tasks for _, code in made._executable._code.artifact.coded["steps"]]  # type: ignore[attr-defined]
    assert max(tasks) > 1
    assert np.bincount(spans[:, 0]).tolist() == tasks


def test_disturbances_of_different_steps_add_up_too():
    """Each run is disturbed in another step. The quickest eighth counts, at least three runs."""
    made = compiled(two_layers(), "ref")
    program, steps = made.program(), len(made.program().steps)

    def run(disturbed: int, by: int) -> Timeline:
        at, rows = 5, []
        for n in range(steps):
            rows.append((n, 0, at, at + 10 + by * (n == disturbed)))
            at = rows[-1][3] + 2
        return Timeline(0, at, np.array(rows))

    timelines = [run(n % steps, 90 if n < 3 else 1000) for n in range(12)]
    found = profile_of(program, made._origins(), made.report().work, "REF", timelines, [1.0] * 12, None)
    assert found.runs == 12 and found.seconds * 1e9 == pytest.approx(5 + 12 * steps + 90)
    assert sum(s.seconds for s in found.steps) * 1e9 == pytest.approx(10 * steps + 90)
    assert found.overhead_seconds * 1e9 == pytest.approx(5 + 2 * steps)


def test_a_run_that_is_not_measured_has_no_clock():
    """The table of ordinary runs calls the kernels themselves, before and after a profile; the measured one does not."""
    made = compiled(two_layers(), threads=1)
    made.profile(runs=1)
    executable = made._executable
    library, codes = executable._code.library, executable._code.artifact.coded["steps"]  # type: ignore[attr-defined]
    kernels = [library.address(code.symbol) for _, code in codes]
    assert executable._whole._steps[: len(kernels), 0].tolist() == kernels  # type: ignore[attr-defined]
    from rlx.backends.cpu.timing import library as clocked

    assert clocked().address("rlx_timed") not in kernels


def test_an_instant_belongs_to_the_steps_that_threads_are_in():
    spans = np.array([[0, 0, 10, 20], [0, 1, 10, 30], [1, 0, 40, 50], [2, 1, 40, 60]])  # steps 1 and 2 at the same time
    times = spent(Timeline(0, 100, spans), 4)
    assert times.tolist() == [20, 5, 15, 0]  # step 3 has no span; 60 of the 100 ns are overhead
    assert spent(Timeline(0, 1, np.zeros((0, 4), np.int64)), 1).tolist() == [0]


def test_the_share_of_the_roofline_is_the_least_time_by_the_time():
    roof = Roofline({"f32": 100.0, "i8": 400.0}, ((10, 50.0), (100, 10.0)))
    assert roof.least(10, 0, "f32") == (0.2, "memory")
    assert roof.least(11, 0, "f32") == (1.1, "memory") and roof.least(1000, 0, "f32") == (100.0, "memory")
    assert roof.least(10, 1000, "f32") == (10.0, "arithmetic") and roof.least(10, 1000, "i8") == (2.5, "arithmetic")
    assert roof.least(0, 100, "c64") == (1.0, "arithmetic")  # an unknown kind counts as f32
    p = compiled(two_layers()).profile(runs=2)
    for step in p.steps:
        assert step.share is not None and step.share > 0 and step.bound in ("memory", "arithmetic")
    assert compiled(two_layers(), "ref").profile(runs=1).steps[0].share is None


def test_the_roofline_is_measured_once(monkeypatch, folder):
    from rlx.backends.cpu import roofline

    roofline._known.clear()
    backend = backend_of(Device.CPU)
    assert isinstance(backend, Roofed)
    target = backend.target(0, 1)
    found = backend.roofline(target)
    monkeypatch.setattr(roofline, "_measured", lambda target: pytest.fail("measured again"))
    assert backend.roofline(target) is found
    roofline._known.clear()
    assert backend.roofline(target) == found  # from the disk
    assert found.operations["f32"] == 2 * found.operations["f64"] > 0 and all(rate > 0 for _, rate in found.reading)
    assert [n for n, _ in found.reading] == sorted(n for n, _ in found.reading)


def test_steps_name_the_users_lines(folder):
    line = inspect.currentframe().f_lineno + 2  # type: ignore[union-attr]
    g = rlx.Graph("lines")
    x = g.input("x", (8, 8), rlx.f32)
    y = rlx.softmax(x @ np.ones((8, 8), F))
    g.set_outputs([y.sum()], names=["total"])
    here = [f"test_profile.py:{line + n}" for n in (1, 2)]
    for _ in range(2):  # compiled, then from the disk cache
        nodes = [n for s in rlx.Session("cpu").compile(g).profile(runs=1).steps for n in s.nodes]
        assert any(n.startswith("softmax at") and n.endswith(here[0]) for n in nodes)
        assert any(n.startswith("matmul at") and n.endswith(here[0]) for n in nodes)
        assert any(n.startswith("sum at") and n.endswith(here[1]) for n in nodes)


def test_lines_of_the_user_are_in_no_key(folder):
    def made(shift: int) -> rlx.Graph:
        source = "\n" * shift + "g = rlx.Graph('moved'); x = g.input('x', (40,), rlx.f32); g.set_outputs([rlx.exp(x) * 3 - x])"
        space: dict = {"rlx": rlx}
        exec(compile(source, "moved.py", "exec"), space)
        return space["g"]

    first, second = made(0), made(7)
    assert first.fingerprint() == second.fingerprint()
    rlx.Session("cpu").compile(first)
    again = rlx.Session("cpu").compile(second)
    assert again.report().cache.state == "cached"
    assert {n for s in again.profile(runs=1).steps for n in s.nodes} >= {"exp at moved.py:8", "sub at moved.py:8"}


def test_nodes_that_passes_make_have_the_line_of_the_node_they_replace():
    seen: list[str | None] = []
    g = rlx.Graph("again")
    x = g.input("x", (3,), rlx.f32)
    g.set_outputs([rlx.exp(x)])

    def new(node, inputs):
        made = inputs[0] + 1.0
        seen.append(made.node.source)
        return [made]

    g.rebuild(new)
    assert seen == [g.outputs[0].node.source] and seen[0] is not None
    assert (x + 1.0).node.source != seen[0]  # outside a pass: the caller's line


def test_inputs_by_position_by_name_as_a_mapping_or_none():
    made = compiled(two_layers())
    x = np.full((64, 96), 0.5, F)
    want = made(x)
    for inputs, named in (((x,), {}), ((), {"x": x}), (({"x": x},), {})):
        made.profile(*inputs, runs=1, **named)
        np.testing.assert_array_equal(made.outputs_view()[0], want)
    made(2 * x)
    last = made(x)
    made.profile(runs=1)  # those of the last run
    np.testing.assert_array_equal(made.outputs_view()[0], last)
    compiled(two_layers()).profile(runs=1)  # typical ones


def test_states_are_as_before():
    g = rlx.Graph("counter")
    total = g.handle(rlx.BufferHandle("total", (4,), rlx.f32))
    g.assign(total, total + g.input("delta", (4,), rlx.f32))
    g.set_outputs([total * 2.0])
    for device in ("cpu", "ref"):
        made = rlx.Session(device).compile(g)
        made.bind_handle("total", np.full(4, 7, F))
        p = made.profile(np.ones(4, F), runs=3)
        assert made.read_handle("total").tolist() == [7, 7, 7, 7]  # type: ignore[union-attr]
        assert [s.phase for s in p.steps][-1] == ("commit" if made.program().commit else "steps")


def test_profile_says_what_it_cannot_do():
    made = compiled(two_layers())
    with pytest.raises(InputShapeError, match="x"):
        made.profile(np.ones((2, 2), F))
    with pytest.raises(OptionError, match="runs is a whole number of at least 1"):
        made.profile(runs=0)
    with pytest.raises(MissingParamError, match="'w'"):
        rlx.Session("cpu").compile(two_layers()).profile()
    with pytest.raises(Unsupported, match="a time for each"):
        rlx.Session("null").compile(two_layers()).profile()
    with pytest.raises(OptionError, match="cannot write"):
        made.profile(runs=1).trace("/nowhere/at all/trace.json")


def test_a_failing_run_leaves_states_and_raises():
    g = rlx.Graph("gather")
    kept = g.handle(rlx.BufferHandle("kept", (4,), rlx.f32))
    row = rlx.gather(g.param("t", (3, 4), rlx.f32), g.input("i", (1,), rlx.i64), axis=0).reshape(4)
    g.assign(kept, kept + row)
    g.set_outputs([row])
    for device in ("cpu", "ref"):
        made = compiled(g, device)
        made.bind_handle("kept", np.full(4, 2, F))
        with pytest.raises(rlx.errors.IndexRangeError):
            made.profile(np.array([5]), runs=1)
        assert made.read_handle("kept").tolist() == [2, 2, 2, 2]  # type: ignore[union-attr]
        made.profile(np.array([1]), runs=1)


def test_a_trace_is_chromes_json(tmp_path: Path):
    made = compiled(two_layers(), threads=2)
    p = made.profile(runs=3)
    p.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert spans[0]["name"] == "run" and spans[0]["ts"] == 0
    assert len(spans) == 1 + len(p.timeline.spans)
    for e in spans[1:]:
        assert e["name"] == p.steps[e["args"]["step"]].label and e["dur"] >= 0 and e["pid"] == 1
        assert e["ts"] >= 0 and e["ts"] + e["dur"] <= spans[0]["dur"] * (1 + 1e-9)
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert "two layers on CPU" in names and "thread 0" in names


def test_a_profile_shows_itself():
    g = rlx.Graph("<b>")
    x = g.input("x", (8,), rlx.f32)
    g.set_outputs([rlx.exp(x)])
    p = rlx.Session("cpu").compile(g).profile(runs=1)
    assert repr(p).startswith("<Profile of '<b>' on CPU: ") and "1 step, 1 runs" in repr(p)
    assert "overhead" in str(p) and "exp at" in str(p)
    page = p._repr_html_()
    assert page.startswith("<table>") and "&lt;b&gt;" in page and "<b>" not in page


def test_clones_and_other_states_are_measured_where_they_are():
    g = rlx.Graph("own state")
    s = g.handle(rlx.BufferHandle("s", (4,), rlx.f32))
    g.assign(s, s + 1.0)
    g.set_outputs([s + 0.0])
    made = rlx.Session("cpu").compile(g)
    fork = made.fork_handles(1)[0]
    made.bind_handle("s", np.full(4, 9, F))
    made.use_handles(fork)
    made.profile(runs=1)
    assert made.read_handle("s").tolist() == [0] * 4  # type: ignore[union-attr]
    twin = made.clone()
    assert len(twin.profile(runs=1).steps) == len(made.program().steps) + len(made.program().commit)


def test_an_artifact_is_measured_too(tmp_path: Path):
    made = compiled(two_layers())
    made.save(tmp_path / "two.rlx")
    loaded = rlx.load(tmp_path / "two.rlx")
    x = np.ones((64, 96), F)
    p, q = made.profile(x, runs=1), loaded.profile(x, runs=1)
    assert [(s.phase, s.flops, s.least_bytes) for s in p.steps] == [(s.phase, s.flops, s.least_bytes) for s in q.steps]
    assert q.steps[0].nodes[0] == "matmul"  # the names of ops: an artifact knows no lines
