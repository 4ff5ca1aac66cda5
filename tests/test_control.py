"""Control flow: sub-graphs traced from functions, their text and rules, and what devices compute, beside loops in numpy."""

from __future__ import annotations

import gc
import os
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

import rlx
from rlx import knobs
from rlx.compiler import control, lower
from rlx.compiler.check import program_faults
from rlx.compiler.options import CompileOptions
from rlx.errors import (
    DTypeError,
    GraphError,
    IndexRangeError,
    ParseError,
    ShapeError,
    Unsupported,
    VerifyError,
)
from rlx.ir import body as bodies
from rlx.ir.attrs import FlowAttrs
from rlx.ir.body import Body
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph
from rlx.ir.kernel import Kernel
from rlx.ir.node import Node
from rlx.ir.program import Program, Step, print_program
from rlx.ir.program_parse import digest_of, parse_program

RNG = np.random.default_rng(7)


def nested() -> tuple[Graph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A scan, a conditional in a conditional, a while and a counted loop, with values from outside."""
    g = Graph("nested")
    x, go, w = g.input("x", (5, 3), rlx.f32), g.input("go", (), rlx.bool_), g.param("w", (3, 3), rlx.f32)

    def step(h: rlx.Value, row: rlx.Value) -> tuple[rlx.Value, ...]:
        h = rlx.tanh(h @ w + row)
        return h, h * 2.0

    (h,), (rows,) = rlx.scan(step, rlx.zeros((3,)), x, reverse=True)
    (a,) = rlx.cond(go, lambda v: v + x[0], lambda v: v * rlx.cond(go, lambda: x[1], lambda: x[2])[0], h)
    n, b = rlx.while_loop(lambda n, v: (v * v).sum() < 100.0, lambda n, v: (n + 1, v * 2.0), rlx.constant(0), a)
    (c,), (seen,), count = rlx.counted_loop(lambda i, go, v: (i < 3, v + 1.0, v), b, limit=6)
    g.set_outputs([h, rows, a, n, b, c, seen, count])
    rng = np.random.default_rng(7)  # the same numbers for each test: in c they may cancel
    given = {"x": rng.normal(size=(5, 3)).astype(np.float32), "go": np.array(False)}
    return g, given, {"w": rng.normal(size=(3, 3)).astype(np.float32)}


def in_numpy(x: np.ndarray, go: bool, w: np.ndarray) -> list[np.ndarray]:
    h, rows = np.zeros(3, np.float32), np.zeros((5, 3), np.float32)
    for i in reversed(range(5)):
        h = np.tanh(h @ w + x[i])
        rows[i] = h * 2
    a = h + x[0] if go else h * x[2]
    n, b = 0, a
    while (b * b).sum() < 100:
        n, b = n + 1, b * 2
    seen = np.concatenate([[b + i for i in range(4)], np.zeros((2, 3), np.float32)])
    return [h, rows, a, np.int64(n), b, b + 4, seen, np.int64(4)]


@pytest.mark.parametrize("go", [False, True])
def test_references_are_loops_in_numpy(go: bool) -> None:
    g, given, params = nested()
    found, _ = evaluate(g, given | {"go": np.array(go)}, params)
    for have, want in zip(found, in_numpy(given["x"], go, params["w"]), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_a_graph_with_sub_graphs_reads_back_unchanged() -> None:
    g, given, params = nested()
    g.verify()
    text = str(g)
    again = Graph.parse(text)
    assert str(again) == text and again.fingerprint() == g.fingerprint()
    copied = pickle.loads(pickle.dumps(g))
    assert str(copied) == text
    assert text.count("graph @") == 7 and "  graph @2 else\n    input x0 : f32[3]" in text
    for have, want in zip(evaluate(again, given, params)[0], evaluate(g, given, params)[0]):
        np.testing.assert_array_equal(have, want)


def test_a_change_in_a_body_changes_the_fingerprint() -> None:
    def made(factor: float) -> Graph:
        g = Graph("g")
        g.set_outputs(rlx.cond(g.input("p", (), "bool"), lambda v: v * factor, lambda v: v, g.input("x", (3,), rlx.f32)))
        return g

    assert made(2.0).fingerprint() == made(2.0).fingerprint() != made(3.0).fingerprint()
    one, two, other = (made(f).outputs[0].node.attrs for f in (2.0, 2.0, 3.0))
    assert one == two != other and hash(one) == hash(two) and repr(one) != repr(other)


@pytest.mark.parametrize(
    "text, message",
    [
        ("graph g\n  graph @0 b\n    param w : f32[]\n    return r0 = %w\n  return", "inputs and results only"),
        ("graph g\n  input p : bool[]\n  %0 = branch(%p, then_body=@0, else_body=@1) : f32[]", "no sub-graph @0 stands above"),
        ("graph g\n  graph @0 b\n    return\n  graph @0 b\n    return\n  return", "two sub-graphs @0"),
        ("graph g\n" + "graph @0 b\n" * 20, "16 deep at most"),
        ("graph g\n  input x : f32[]\n  graph @0 b\n    return r0 = %x", "no leaf 'x' is declared above"),
        ("graph g\n  graph @0 b\n    return", "expected return"),
    ],
)
def test_bad_texts_of_sub_graphs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        Graph.parse(text)


def test_carried_values_keep_shape_and_dtype() -> None:
    g = Graph("g")
    x = g.input("x", (4,), rlx.f32)
    with pytest.raises(ShapeError, match=r"carried value x0 is f32\[4\], its next value is f32\[2\]"):
        rlx.scan(lambda h: h[:2], x, length=3)
    with pytest.raises(DTypeError, match=r"carried value x0 is f32\[4\], its next value is f64\[4\]"):
        rlx.while_loop(lambda h: h.sum() < 1.0, lambda h: h.astype("f64"), x)
    with pytest.raises(ShapeError, match="gives 2 values"):
        rlx.while_loop(lambda h: h.sum() < 1.0, lambda h: (h, h), x)
    with pytest.raises(ShapeError, match=r"gives a bool \(\), got bool\[4\]"):
        rlx.while_loop(lambda h: h < 1.0, lambda h: h, x)
    with pytest.raises(DTypeError, match=r"carried value go is bool\[\], its next value is f32\[\]"):
        rlx.counted_loop(lambda i, go, v: (2.5, v), x, limit=3)
    with pytest.raises(ShapeError, match="the branches give different results"):
        rlx.cond(g.input("p", (), "bool"), lambda: x, lambda: x[:2])
    with pytest.raises(ShapeError, match="scan needs one length"):
        rlx.scan(lambda h, a, b: h, x, [x, x[:2]])


def test_a_body_assigns_no_state_and_has_no_collective() -> None:
    g = Graph("g")
    x, h = g.input("x", (4,), rlx.f32), g.handle(rlx.BufferHandle("h", (4,), rlx.f32))

    def assigning(v: rlx.Value) -> rlx.Value:
        g.assign(h, v)
        return v

    with pytest.raises(GraphError, match="in the body of control flow.*Carry the value"):
        rlx.scan(assigning, x, length=2)
    assert not g.assigns
    with pytest.raises(GraphError, match="all_reduce cannot be in a sub-graph"):
        rlx.cond(g.input("p", (), "bool"), lambda: rlx.all_reduce(x, ranks=2), lambda: x)
    (out,), _ = rlx.scan(lambda v: v + h, x, length=2)  # a state may be read
    g.assign(h, out)
    g.set_outputs([out])
    g.verify()


def test_a_value_of_another_body_is_refused() -> None:
    g = Graph("g")
    x, kept = g.input("x", (4,), rlx.f32), []
    rlx.scan(lambda v: kept.append(v) or v, x, length=2)
    g.set_outputs([x + kept[0]])
    with pytest.raises(VerifyError, match="the graph does not declare input 'x0'"):
        g.verify()


def test_verify_looks_into_sub_graphs() -> None:
    g = Graph("g")
    x = g.input("x", (4,), rlx.f32)
    (y,), _ = rlx.scan(lambda v: v * 2.0, x, length=2)
    loop = y.node
    body = loop.attrs.body
    mul = body.outputs[0].node
    broken = Node(mul.op, mul.inputs, mul.attrs, (rlx.Shape((5,), rlx.f32),), mul.name)
    attrs = type(loop.attrs)(Body(body.name, body.inputs, broken.results), 1, 2)
    g.set_outputs([Node(loop.op, loop.inputs, attrs, loop.shapes).results[1]])
    with pytest.raises(VerifyError, match=r"sub-graph 'scan': mul.*is f32\[5\], its shape rule gives f32\[4\]"):
        g.verify()


# -- devices

DEVICES = ["ref", "ref:1", "cpu"]


def compiled_with(g: Graph, params: dict[str, np.ndarray], device: str = "cpu", **options: object) -> rlx.CompiledGraph:
    made = rlx.Session(device).compile(g, **options)
    for name, array in params.items():
        made.set_param(name, array)
    return made


@pytest.mark.parametrize("disable", [(), ("canonicalise", "tidy", "fuse"), ("inplace", "reuse", "concurrent")])
@pytest.mark.parametrize("device", DEVICES)
def test_devices_run_nested_control_flow(device: str, disable: tuple[str, ...]) -> None:
    g, given, params = nested()
    made = compiled_with(g, params, device, disable=disable)
    for go in (True, False, True):
        found = made.run(given | {"go": np.array(go)})
        for have, want in zip(found, in_numpy(given["x"], go, params["w"]), strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)


def limited_loops() -> Graph:
    g = Graph("limited")
    x, go, most = g.input("x", (5, 3), rlx.f32), g.input("go", (), "bool"), g.input("most", (), rlx.f32)
    (h,), (rows,) = rlx.scan(lambda h, r: (h * 0.5 + r, h), rlx.zeros((3,)), x)
    (a,), (seen, small), n = rlx.counted_loop(lambda i, _, v: (v.sum() < most, v + 1.0, v, v < 2.0), h * h, limit=4, go=go)
    g.set_outputs([h, rows, *rlx.cond(go, lambda v: v * 2.0, lambda v: v - 1.0, h), a, seen, small, n])
    return g


@pytest.mark.parametrize("go,most", [(True, 100.0), (True, -1.0), (True, 6.0), (False, 100.0)])
def test_without_control_flow_iterations_and_branches_are_written_out(go: bool, most: float) -> None:
    g, x = limited_loops(), np.linspace(-1, 1, 15, dtype=np.float32).reshape(5, 3)
    made, given = compiled_with(g, {}, disable=("control",)), {"x": x, "go": np.array(go), "most": np.array(most, np.float32)}
    assert not made.program().bodies
    for have, want in zip(made.run(given), evaluate(g, given)[0], strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6)


def test_a_loop_without_a_limit_needs_control_flow() -> None:
    g, _, _ = nested()
    with pytest.raises(Unsupported, match="number of its iterations depends on data.*give a limit"):
        rlx.Session("cpu").compile(g, disable=("control",))
    for flags in ({"length": 5000}, {"limit": 5000}):
        g = Graph("long")
        x = g.input("x", (3,), rlx.f32)
        loop = rlx.scan(lambda h: h + 1.0, x, **flags) if "length" in flags else rlx.while_loop(
            lambda h: h.sum() < 1.0, lambda h: h + 1.0, x, **flags)  # fmt: skip
        g.set_outputs(loop[0] if "length" in flags else loop)
        with pytest.raises(Unsupported, match="it has up to 5000 iterations, and without control flow at most 1024"):
            rlx.Session("cpu").compile(g, disable=("control",))


def test_a_counted_loop_whose_test_always_holds_tests_nothing() -> None:
    g = Graph("fixed")
    x = g.input("x", (3,), rlx.f32)
    (a,), (rows,), n = rlx.counted_loop(lambda i, go, v: (go, v + i.astype("f32"), v), x, limit=3)
    assert not n.node.attrs.tests
    with pytest.raises(GraphError, match="does not end"):
        rlx.counted_loop(lambda i, go, v: (go, v), x, limit=None)
    g.set_outputs([a, rows, n])
    given = {"x": np.ones(3, np.float32)}
    found = compiled_with(g, {}).run(given)
    assert found[0].tolist() == [4.0] * 3 and found[1][:, 0].tolist() == [1.0, 1.0, 2.0] and found[2] == 3


@pytest.mark.parametrize("device", DEVICES)
def test_loops_without_iterations_give_what_they_were_given(device: str) -> None:
    g = Graph("none")
    x, rows, go = g.input("x", (3,), rlx.f32), g.input("rows", (0, 3), rlx.f32), g.input("go", (), "bool")
    (h,), (seen,) = rlx.scan(lambda h, r: (h + r, h), x, rows)
    (a,) = rlx.while_loop(lambda v: v.sum() < -1e9, lambda v: v * 0.0, x)
    (b,), (none,), n = rlx.counted_loop(lambda i, go, v: (go, v + 1.0, v), x, limit=0)
    (c,), (zero,), m = rlx.counted_loop(lambda i, go, v: (go, v + 1.0, v), x, limit=2, go=go)
    g.set_outputs([h, seen, a, b, none, n, c, zero, m])
    x_ = np.arange(3, dtype=np.float32)
    found = compiled_with(g, {}, device).run({"x": x_, "rows": np.zeros((0, 3), np.float32), "go": np.array(False)})
    shapes = [(3,), (0, 3), (3,), (3,), (0, 3), (), (3,), (2, 3), ()]
    assert [f.shape for f in found] == shapes
    for i in (0, 2, 3, 6):
        np.testing.assert_array_equal(found[i], x_)
    assert found[5] == found[8] == 0 and not found[7].any()


@pytest.mark.parametrize("device", DEVICES)
def test_carried_values_that_change_places(device: str) -> None:
    """Each next value needs the old one of the other, so that none can be written where the old one lies."""
    g = Graph("swap")
    a, b, c = (g.input(n, (4,), rlx.f32) for n in "abc")
    found, _ = rlx.scan(lambda a, b, c: (b, a, a + b + c), [a, b, c], length=5)
    g.set_outputs(found)
    given = {n: RNG.normal(size=4).astype(np.float32) for n in "abc"}
    for have, want in zip(compiled_with(g, {}, device).run(given), evaluate(g, given)[0], strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_the_initial_value_is_also_captured_and_given_twice(device: str) -> None:
    g = Graph("twice")
    x = g.input("x", (4,), rlx.f32) * 2.0
    (a, b), _ = rlx.scan(lambda a, b: (a + x, b * a), [x, x], length=3)
    g.set_outputs([a, b, x])
    given = {"x": RNG.normal(size=4).astype(np.float32)}
    for have, want in zip(compiled_with(g, {}, device).run(given), evaluate(g, given)[0], strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_a_carried_buffer_with_rows_replaced_is_not_copied() -> None:
    g = Graph("rows")
    cache, x = g.input("cache", (64, 8), rlx.f32), g.input("x", (16, 8), rlx.f32)

    def step(n: rlx.Value, go: rlx.Value, cache: rlx.Value) -> tuple[rlx.Value, ...]:
        return n < 15, rlx.update_rows(cache, rlx.take_rows(x, n, count=1) * 3.0, n)

    g.set_outputs(rlx.counted_loop(step, cache, limit=16)[0])
    given = {"cache": np.ones((64, 8), np.float32), "x": RNG.normal(size=(16, 8)).astype(np.float32)}
    made = compiled_with(g, {})
    (body,) = made.program().bodies
    assert body.plan.size_bytes < 64 * 8 * 4 and not body.commit
    np.testing.assert_allclose(made.run(given)[0][:16], given["x"] * 3, rtol=1e-6)
    assert (made.run(given)[0][16:] == 1).all()


def recurrence() -> tuple[Graph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    g = Graph("recurrence")
    x, w = g.input("x", (6, 4, 48), rlx.f32), g.param("w", (48, 48), rlx.f32)
    (h,), (rows,) = rlx.scan(lambda h, r: ((h := rlx.tanh(h @ w + r)), h), rlx.zeros((4, 48)), x)
    g.set_outputs([h, rows])
    given = {"x": RNG.normal(size=(6, 4, 48)).astype(np.float32)}
    return g, given, {"w": (RNG.normal(size=(48, 48)) / 7).astype(np.float32)}


def test_weights_of_a_body_are_packed_when_they_are_set() -> None:
    g, given, params = recurrence()
    made = compiled_with(g, params)
    program = made.program()
    assert [s.kernel.name for s in program.prepare] == ["pack"] and "w" not in program.kept
    (body,) = program.bodies
    assert not body.prepare and any("matmul" in s.kernel.name for s in body.steps)
    assert [s.kernel.buffers[0].size for s in body.commit] == [4 * 48]  # the product reads all of the state: it is copied
    for _ in range(2):
        for have, want in zip(made.run(given), evaluate(g, given, params)[0], strict=True):
            np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
        params["w"] = -params["w"]
        made.set_param("w", params["w"])


def test_weights_that_bodies_and_the_graph_read_are_packed_once() -> None:
    g = Graph("shared")
    x, w = g.input("x", (2, 48), rlx.f32), g.param("w", (48, 48), rlx.f32)
    (a,), _ = rlx.scan(lambda h: rlx.tanh(h @ w), x, length=3)
    (b,) = rlx.cond(a.sum() > 0.0, lambda v: rlx.scan(lambda h: h @ w * 0.1, v, length=2)[0], lambda v: v @ w, a)
    g.set_outputs([b, x @ w])
    given, params = {"x": RNG.normal(size=(2, 48)).astype(np.float32)}, {"w": RNG.normal(size=(48, 48)).astype(np.float32)}
    made = compiled_with(g, params)
    assert [s.kernel.name for s in made.program().prepare] == ["pack"]
    for have, want in zip(made.run(given), evaluate(g, given, params)[0], strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-3, atol=1e-3)


def test_several_threads_and_one_give_the_same_bits() -> None:
    g, given, params = recurrence()
    one, two = (compiled_with(g, params, threads=n).run(given) for n in (1, 2))
    for a, b in zip(one, two):
        np.testing.assert_array_equal(a, b)


def test_an_index_out_of_range_in_a_body_leaves_states_as_they_were() -> None:
    for device in DEVICES:
        g = Graph("range")
        rows, state = g.input("rows", (3,), "i64"), g.handle(rlx.BufferHandle("s", (5,), rlx.f32))
        (h,), _ = rlx.scan(lambda h, i: h + rlx.gather(rlx.constant(np.arange(5, dtype=np.float32)), i), rlx.zeros(()), rows)
        g.assign(state, rlx.update_rows(state, h[None], rlx.constant(1)))
        g.set_outputs([h])
        made = rlx.Session(device).compile(g)
        made.bind_handle("s", np.ones(5, np.float32))
        with pytest.raises(IndexRangeError, match="index out of range in .*gather.*nothing was committed"):
            made.run({"rows": np.array([1, 9, 2])})
        assert (made.read_handle("s") == 1).all()
        (found,) = made.run({"rows": np.array([1, 4, 2])})
        assert found == 7 and made.read_handle("s").tolist() == [1, 7, 1, 1, 1]


def test_a_branch_that_is_not_taken_raises_nothing() -> None:
    g = Graph("lazy")
    i, x = g.input("i", (), "i64"), g.input("x", (4,), rlx.f32)
    g.set_outputs(rlx.cond(i < 4, lambda: rlx.gather(x, i), lambda: x.sum()))
    made = compiled_with(g, {})
    x_ = np.arange(4, dtype=np.float32)
    assert made.run({"i": np.array(9), "x": x_})[0] == 6 and made.run({"i": np.array(3), "x": x_})[0] == 3


def test_states_read_in_a_body_follow_their_store() -> None:
    g = Graph("state")
    x, state = g.input("x", (4,), rlx.f32), g.handle(rlx.BufferHandle("s", (4,), rlx.f32))
    (h,), _ = rlx.scan(lambda h: h + state, x, length=3)
    g.assign(state, h)
    g.set_outputs([h])
    made = compiled_with(g, {})
    made.bind_handle("s", np.ones(4, np.float32))
    other = made.fork_handles(1)[0]
    assert made.run({"x": np.zeros(4, np.float32)})[0].tolist() == [3] * 4
    assert made.run({"x": np.zeros(4, np.float32)})[0].tolist() == [9] * 4
    made.use_handles(other)
    assert made.run({"x": np.zeros(4, np.float32)})[0].tolist() == [3] * 4


def test_cache_artifact_clone_and_slots(tmp_path: Path) -> None:
    g, given, params = nested()
    want = in_numpy(given["x"], False, params["w"])
    with knobs.override(RLX_CACHE=1, RLX_CACHE_DIR=str(tmp_path / "cache")):
        first, second = (compiled_with(g, params) for _ in range(2))
    assert (first.report().cache.state, second.report().cache.state) == ("compiled", "cached")
    second.save(tmp_path / "a.rlx")
    loaded = rlx.load(tmp_path / "a.rlx")
    for made in (first, second, second.clone(), loaded, loaded.clone()):
        for have, right in zip(made.run(given), want, strict=True):
            np.testing.assert_allclose(have, right, rtol=1e-5)
    for found in second.bound([given["x"], given["go"]])(), loaded(given["x"], given["go"]):
        np.testing.assert_allclose(found[2], want[2], rtol=1e-5)
    for name in ("x", "go"):
        second.input_view(name)[...] = given[name]
    assert len(second.run_slots([second.input_view("x"), second.input_view("go")])) == 8
    with pytest.raises(Unsupported, match="has control flow, which a C library has not"):
        second.export_c(tmp_path)


def test_the_work_for_a_body_does_not_grow_with_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    printed, visited, whole, text = [], [], bodies.postorder, control.print_program
    monkeypatch.setattr(control, "print_program", lambda p: printed.append(p) or text(p))
    monkeypatch.setattr(bodies, "postorder", lambda *given: (made := whole(*given), visited.append(len(made[0])))[0])
    g = Graph("many")
    v, go = g.input("x", (3,), rlx.f32), g.input("go", (), "bool")
    for i in range(12):
        (v,) = rlx.cond(go, lambda a, i=i: a * (i + 1.5), lambda a, i=i: a + (i + 0.5), v)
    assert max(visited) < 6
    g.set_outputs([v])
    compiled_with(g, {}, "ref")
    assert len(printed) == 24


def test_reports_show_the_steps() -> None:
    g, given, params = nested()
    made = compiled_with(g, params)
    assert "arena of loop" in str(made.memory_plan())
    profile = str(made.profile(given))
    assert "loop@2" in profile and "branch" in profile
    steps = {step.kernel.name for steps in made.program().every_phase.values() for step in steps}
    assert "update_rows" in steps and set(made.report().texts) >= {"branch", "loop@3", "update_rows"}


def rss() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_iterations_take_no_memory() -> None:
    g = Graph("many")
    x, n = g.input("x", (64,), rlx.f32), g.input("n", (), "i64")
    found = rlx.while_loop(lambda i, v: i < n, lambda i, v: (i + 1, v * 0.999 + 1.0), rlx.constant(0), x)
    g.set_outputs(found)
    made = compiled_with(g, {})
    given = {"x": np.zeros(64, np.float32), "n": np.array(10_000)}
    made.run(given)
    gc.collect()
    before, held = made.allocations(), rss()
    for _ in range(20):
        made.run_slots([made.input_view("x"), made.input_view("n")])
    after = made.allocations()
    assert (after.native_count, after.native_live_bytes) == (before.native_count, before.native_live_bytes)
    assert rss() - held < 1 << 20
    count, v = made.run(given)
    assert count == 10_000 and np.allclose(v, 1000, rtol=1e-3)


def test_jit_functions_use_control_flow() -> None:
    @rlx.jit
    def root(x: rlx.Value) -> rlx.Value:
        """Newton's method."""
        return rlx.while_loop(lambda r: rlx.abs(r * r - x).max() > 1e-4, lambda r: (r + x / r) * 0.5, x, limit=100)[0]

    np.testing.assert_allclose(root(np.array([2.0, 9.0], np.float32)), [2**0.5, 3], rtol=1e-5)
    np.testing.assert_allclose(root(np.full(3, 16.0, np.float32)), [4] * 3, rtol=1e-5)


def test_named_dims_are_bound_in_bodies() -> None:
    g = Graph("named")
    x = g.input("x", (4, "n"), rlx.f32)
    g.set_outputs(rlx.scan(lambda h, r: h * 0.5 + r, x.sum(axis=0), x)[0])
    for n in (3, 5):
        given = {"x": RNG.normal(size=(4, n)).astype(np.float32)}
        (found,) = rlx.Session("cpu").compile(g, dims={"n": n}).run(given)
        np.testing.assert_allclose(found, evaluate(g, given)[0][0], rtol=1e-6)


# -- programs


@pytest.mark.parametrize("device", DEVICES)
def test_programs_with_bodies_read_back_unchanged(device: str) -> None:
    g, given, params = nested()
    program = compiled_with(g, params, device).program()
    constants = {digest_of(b.data): b.data for b in program.buffers if b.data is not None}
    again = parse_program(print_program(program), program.target, constants)
    assert print_program(again) == print_program(program) and len(again.bodies) == len(program.bodies) > 3
    assert again.bodies[2].bodies and not program_faults(again)


def mutated(program: Program, **changes: object) -> Program:
    """With other attributes of its first loop or, where `test` changes, of its branch."""
    kind = "branch" if "test" in changes else "loop"
    at = next(i for i, s in enumerate(program.steps) if s.kernel.name == kind)
    step = program.steps[at]
    native = step.kernel.body[0]
    flow = replace(native.attrs, **{k: v(native.attrs) if callable(v) else v for k, v in changes.items()})
    kernel: Kernel = replace(step.kernel, body=(replace(native, attrs=flow),))
    made: Step = replace(step, kernel=kernel)
    return replace(program, steps=(*program.steps[:at], made, *program.steps[at + 1 :]))


def swapped(flow: FlowAttrs) -> tuple[tuple[int, ...], ...]:
    (first, second, *rest), *others = flow.wires
    return ((second, first, *rest), *others)


@pytest.mark.parametrize(
    "changes, fault",
    [
        ({"wires": swapped}, "wired to"),
        ({"wires": lambda f: (f.wires[0][:-1],)}, "for 4 wires"),
        ({"copies": ()}, "which nothing has written"),
        ({"limit": 0}, "a result that may stay unwritten"),
        ({"copies": lambda f: tuple((b, a) for a, b in f.copies)}, "cannot be copied"),
        ({"bodies": lambda f: f.bodies[::-1], "wires": lambda f: f.wires[::-1], "test": 0}, "not one bool"),
        ({"wires": lambda f: (f.wires[0], f.wires[0]), "test": lambda f: f.test}, "for "),
        ({"scratch": -1}, "has an arena and the step none"),
        ({"scratch": 99}, "is not among the"),
        ({"count": -1}, "a loop has one and a branch two"),
        ({"bodies": (77,)}, "a loop has one and a branch two"),
        ({"limit": -1}, "neither a test nor a limit ends it"),
        ({"test": 0}, "not one bool"),
    ],
)
def test_wrong_wires_are_found(changes: dict[str, object], fault: str) -> None:
    g, _, _ = nested()
    program = lower(g, rlx.Session("cpu").target(), CompileOptions())
    assert not program_faults(program)
    found = program_faults(mutated(program, **changes))
    assert any(fault in f for f in found), found


def test_wrong_plans_of_bodies_are_found() -> None:
    g, _, _ = nested()
    program = lower(g, rlx.Session("ref").target(), CompileOptions())
    body = program.bodies[0]
    at = sorted(body.plan.offsets)
    for offsets in ({**body.plan.offsets, at[1]: body.plan.offsets[at[0]], at[2]: body.plan.offsets[at[0]]}, {}):
        bad = replace(body, plan=replace(body.plan, offsets=offsets))
        found = program_faults(replace(program, bodies=(bad, *program.bodies[1:])))
        assert found and all("body 0, scan: " in fault for fault in found)
    short = replace(body, plan=replace(body.plan, size_bytes=body.plan.size_bytes * 4))
    assert any("the arena of body 0 takes" in f for f in program_faults(replace(program, bodies=(short, *program.bodies[1:]))))


# -- bodies at random

MARGIN = 0.0123
STEPS = ("add", "mul", "neighbour", "where", "outer", "index", "product", "swap", "sum", "branch", "inner")


def stepped(name: str, n: rlx.Value, values: list[rlx.Value], pick: int, outer: rlx.Value, w: rlx.Value) -> list[rlx.Value]:
    """The carried values after one more operation. All stay between -1 and 1. Comparisons have a margin: sums that are 0 but for
    rounding would fall to either side."""
    i, j = pick % len(values), (pick // 3) % len(values)
    a, b = values[i], values[j]
    made = {
        "add": lambda: (a + b) * 0.5,
        "mul": lambda: a * b,
        "neighbour": lambda: rlx.roll(a, 1) - b * 0.1,
        "where": lambda: rlx.where(a < b + MARGIN, b, -a),
        "outer": lambda: a * 0.5 + outer * 0.25,
        "index": lambda: a * (n % 3).astype("f32") * 0.5,
        "product": lambda: rlx.tanh(a @ w),
        "sum": lambda: a - a.mean(),
        "branch": lambda: rlx.cond(a.sum() > b.sum() + MARGIN, lambda v: a * 0.9 + outer * 0.1, lambda v: rlx.tanh(v @ w), b)[0],
        "inner": lambda: rlx.scan(lambda h: h * 0.5 + a * 0.25, b, length=pick % 4)[0][0],
        "swap": lambda: b,
    }[name]()
    out = list(values)
    out[i] = rlx.clip(made, -1.0, 1.0)
    if name == "swap":
        out[j] = a
    return out


@settings(max_examples=int(os.environ.get("RLX_EXAMPLES", "12")), deadline=None)
@drawn(st.data())
def test_bodies_at_random(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 8)), min_size=1, max_size=6))
    count, limit = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 5))
    stop, tests = data.draw(st.integers(0, 6)), data.draw(st.booleans())
    g = Graph("random")
    outer, w = g.input("outer", (9,), rlx.f32), g.param("w", (9, 9), rlx.f32)
    first = [g.input(f"x{i}", (9,), rlx.f32) for i in range(count)]

    def body(n: rlx.Value, go: rlx.Value, *now: rlx.Value) -> tuple[rlx.Value, ...]:
        values = list(now)
        for name, pick in names:
            values = stepped(name, n, values, pick, outer, w)
        return n + 1 < stop if tests else go, *values, values[0] * 2.0

    carried, rows, n = rlx.counted_loop(body, *first, limit=limit)
    g.set_outputs([*carried, *rows, n, first[0] + 1.0])
    given = {v.name: RNG.uniform(-1, 1, 9).astype(np.float32) for v in (outer, *first)}
    params = {"w": (RNG.normal(size=(9, 9)) / 3).astype(np.float32)}
    want, _ = evaluate(g, given, params)
    for device in ("ref:1", "cpu"):
        made = compiled_with(g, params, device)
        for _ in range(2):
            for have, right in zip(made.run(given), want, strict=True):
                np.testing.assert_allclose(have, right, rtol=1e-3, atol=1e-4)
