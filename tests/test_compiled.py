"""CompiledGraph: the public surface of spec.md on every device that computes, and each binding error."""

from __future__ import annotations

import inspect
import os
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from devices import DEVICES

import rlx
from rlx import knobs
from rlx.driver import files
from rlx.errors import (
    BindingError,
    DuplicateNameError,
    IndexRangeError,
    InputDTypeError,
    InputShapeError,
    MissingInputError,
    MissingParamError,
    NumericsError,
    OptionError,
    StaleViewError,
    UnknownNameError,
)

F = np.float32
HOST = 1  # kDLCPU of DLPack


@pytest.fixture(params=DEVICES)
def session(request: pytest.FixtureRequest) -> rlx.Session:
    return rlx.Session(request.param)


def gelu(x: np.ndarray) -> np.ndarray:
    import math

    return np.vectorize(lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))))(x.astype(np.float64)).astype(F)


def example() -> rlx.Graph:
    g = rlx.Graph("matmul_bias_gelu")
    x = g.input("x", (2, 4), rlx.f32)
    w = g.param("w", (4, 3), rlx.f32)
    b = g.param("b", (3,), rlx.f32)
    g.set_outputs([rlx.gelu(x @ w + b)])
    return g


def counter() -> tuple[rlx.Graph, rlx.BufferHandle]:
    g = rlx.Graph("counter")
    total = rlx.BufferHandle("total", (4,), rlx.f32)
    state = g.handle(total)
    delta = g.input("delta", (4,), rlx.f32)
    g.assign(state, state + delta)
    g.set_outputs([state + delta])
    return g, total


def test_the_example_of_the_specification(session: rlx.Session) -> None:
    compiled = session.compile(example())
    bias = np.array([0.5, -0.5, 0.0], F)
    compiled.set_param("w", np.eye(4, 3, dtype=F))
    compiled.set_param("b", bias)
    x = np.zeros((2, 4), F)
    x[0, 0] = x[1, 1] = 1
    (y,) = compiled.run({"x": x})
    np.testing.assert_allclose(y, gelu(np.array([[1.5, -0.5, 0.0], [0.5, 0.5, 0.0]])), atol=1e-6)
    (again,) = compiled.run({"x": np.zeros((2, 4), F)})
    np.testing.assert_allclose(again, np.tile(gelu(bias), (2, 1)), atol=1e-6)
    np.testing.assert_allclose(y, gelu(np.array([[1.5, -0.5, 0.0], [0.5, 0.5, 0.0]])), atol=1e-6)  # its own array


def test_tensors_of_torch_are_inputs_and_weights() -> None:
    """Also those that record derivatives, and of dtypes that numpy has not."""
    torch = pytest.importorskip("torch")
    for dtype, other in (("f32", torch.float32), ("bf16", torch.bfloat16), ("f16", torch.float16)):
        g = rlx.Graph("net")
        g.set_outputs([g.input("x", (3, 8), dtype) @ g.param("w", (8, 4), dtype)])
        net = rlx.compile(g, threads=1)
        x, w = (torch.nn.Parameter(torch.randn(*dims, generator=torch.manual_seed(0)).to(other)) for dims in ((3, 8), (8, 4)))
        net.set_param("w", w)
        want = (x.double() @ w.double()).detach().numpy()
        for found in (net(x), net(x=x), net.run({"x": x})[0]):
            np.testing.assert_allclose(found.astype(np.float64), want, rtol=1e-2, atol=3e-2)
        with pytest.raises(InputDTypeError):
            net(x.double())


def test_state_outlives_runs(session: rlx.Session) -> None:
    g, total = counter()
    compiled = session.compile(g, rlx.CompileOptions().bind_handle(total))
    assert compiled.bind_handle("total", np.zeros(4, F))
    for _ in range(5):
        (out,) = compiled.run({"delta": np.ones(4, F)})
    np.testing.assert_array_equal(out, np.full(4, 5, F))
    np.testing.assert_array_equal(compiled.read_handle("total"), np.full(4, 5, F))
    assert compiled.bind_handle("totals", np.zeros(4, F)) is False
    assert compiled.read_handle("totals") is None and not compiled.has_gpu_handle("totals")
    with pytest.raises(InputShapeError):
        compiled.bind_handle("total", np.zeros(5, F))
    np.testing.assert_array_equal(compiled.read_gpu_handle("total"), np.full(4, 5, F))


def test_states_that_swap(session: rlx.Session) -> None:
    g = rlx.Graph("swap")
    a, b = g.handle(rlx.BufferHandle("a", (3,), rlx.f32)), g.handle(rlx.BufferHandle("b", (3,), rlx.f32))
    g.assign(a, b)
    g.assign(b, a)
    g.set_outputs([a + b])
    compiled = session.compile(g)
    compiled.bind_handle("a", np.array([1, 2, 3], F))
    compiled.bind_handle("b", np.array([4, 5, 6], F))
    compiled.run({})
    np.testing.assert_array_equal(compiled.read_handle("a"), [4, 5, 6])
    np.testing.assert_array_equal(compiled.read_handle("b"), [1, 2, 3])


def test_outputs_that_are_leaves_views_and_twins(session: rlx.Session) -> None:
    g = rlx.Graph("aliases")
    x, p = g.input("x", (2, 3), rlx.f32), g.param("p", (3,), rlx.f32)
    y = x * 2.0
    g.set_outputs([x, x.T, y, y, y.T, y.reshape(6), p, p * 3.0, g.constant(np.arange(4, dtype=F))])
    compiled = session.compile(g)
    compiled.set_param("p", np.array([1, 2, 3], F))
    data = np.arange(6, dtype=F).reshape(2, 3)
    out = compiled.run({"x": data})
    want = [data, data.T, 2 * data, 2 * data, 2 * data.T, 2 * data.reshape(6), [1, 2, 3], [3, 6, 9], np.arange(4)]
    for found, expected in zip(out, want, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_slots_views_rows_and_raw_bytes(session: rlx.Session) -> None:
    g = rlx.Graph("slots")
    x = g.input("x", (4, 3), rlx.f32)
    g.set_outputs([x + 1.0, rlx.sum(x, axis=1)])
    compiled = session.compile(g)
    data = np.arange(12, dtype=F).reshape(4, 3)
    slots = compiled.run_slots([data])
    assert [n for _, n in slots] == [12, 4]
    np.testing.assert_array_equal(compiled.outputs_view()[0], data + 1)
    view = compiled.input_view("x")
    view[...] = 7
    compiled.run_slots([view])
    sums = compiled.outputs_view()[1]
    if sums.__dlpack_device__()[0] == HOST:
        np.testing.assert_array_equal(np.from_dlpack(sums), np.full(4, 21, F))
    else:
        with pytest.raises((BufferError, RuntimeError), match="[Uu]nsupported device"):  # by numpy; it depends on its version
            np.from_dlpack(sums)
        with pytest.raises(BufferError, match="np.asarray copies it to the host"):
            sums.__dlpack__(dl_device=(HOST, 0))
    assert float(sums[0]) == sums.copy()[3] == (sums + 1.0).max() - 1 == 21 and sums.tolist() == [21] * 4 and sums.T.ndim == 1
    with pytest.raises(ValueError, match="read-only"):
        sums += 1
    assert (sums == 21).all() and not np.any(sums - sums) and not hasattr(sums, "colour")
    np.testing.assert_array_equal(compiled.read_output_row(0, 2, 3), [8, 8, 8])
    with pytest.raises(InputShapeError):
        compiled.read_output_row(0, 4, 3)
    (only,) = compiled.run_read_outputs({"x": data}, [1])
    np.testing.assert_array_equal(only, data.sum(1))
    (typed, _) = compiled.run_typed({"x": (data.tobytes(), "f32")})
    np.testing.assert_array_equal(np.frombuffer(typed[0], F).reshape(4, 3), data + 1)
    assert typed[1] == rlx.f32
    with pytest.raises(InputShapeError):
        compiled.run_typed({"x": (data.tobytes()[:-4], "f32")})
    raw = compiled.run_raw({"x": data})
    assert [n for _, n in raw] == [12, 4]


def test_the_arena_pointer_and_offsets_name_the_outputs() -> None:
    import ctypes

    g = rlx.Graph("raw")
    x = g.input("x", (5,), rlx.f32)
    g.set_outputs([x * 3.0])
    compiled = rlx.Session("cpu").compile(g)
    ((offset, count),) = compiled.run_slots([np.arange(5, dtype=F)])
    found = (ctypes.c_float * count).from_address(compiled.arena_ptr() + offset)
    assert list(found) == [0, 3, 6, 9, 12]
    ((address, _),) = compiled.run_raw({"x": np.ones(5, F)})
    assert address == compiled.arena_ptr() + offset


def test_wrong_inputs_change_nothing(session: rlx.Session) -> None:
    compiled = session.compile(example())
    with pytest.raises(MissingParamError, match="'b', 'w'"):
        compiled.run({"x": np.zeros((2, 4), F)})
    with pytest.raises(UnknownNameError, match="no param is called 'W'"):
        compiled.set_param("W", np.zeros((4, 3), F))
    with pytest.raises(InputShapeError):
        compiled.set_param("w", np.zeros((4, 4), F))
    with pytest.raises(InputDTypeError, match="astype"):
        compiled.set_param("w", np.zeros((4, 3)))
    compiled.set_param("w", np.eye(4, 3, dtype=F))
    with pytest.raises(InputShapeError):
        compiled.set_param_typed("b", b"\0" * 16, "f32")
    compiled.set_param_typed("b", np.zeros(3, F).tobytes(), rlx.f32)
    x = np.ones((2, 4), F)
    (want,) = compiled.run({"x": x})
    for error, inputs in (
        (MissingInputError, {}),
        (UnknownNameError, {"x": x, "y": x}),
        (UnknownNameError, {"X": x}),
        (InputShapeError, {"x": np.zeros((4, 2), F)}),
        (InputShapeError, {"x": np.zeros(9, F)}),
        (InputDTypeError, {"x": np.zeros((2, 4))}),
        (InputDTypeError, {"x": [[1, 2, 3, 4]] * 2}),
        (BindingError, [x]),
    ):
        with pytest.raises(error):
            compiled.run(inputs)
    for error, slots in (
        (MissingInputError, []),
        (BindingError, [x, x]),
        (InputShapeError, [x[:1]]),
        (InputDTypeError, [x.astype(np.int32)]),
    ):
        with pytest.raises(error):
            compiled.run_slots(slots)
    np.testing.assert_array_equal(compiled.input_view("x"), x)
    assert compiled.input_view("x") is compiled.input_view("x")
    np.testing.assert_array_equal(compiled.run({"x": x})[0], want)


def test_a_rebound_weight_reaches_every_packed_copy(session: rlx.Session) -> None:
    rng = np.random.default_rng(0)
    g = rlx.Graph("qkv")
    x = g.input("x", (5, 8), rlx.f32)
    parts = [g.param(n, (6, 8), rlx.f32) for n in "qkv"]
    both = rlx.concat(*(p.T for p in parts), axis=1)
    g.set_outputs([x @ both, x @ parts[0].T, parts[1] + 0.5])
    compiled = session.compile(g)
    data = rng.standard_normal((5, 8)).astype(F)
    weights = {n: rng.standard_normal((6, 8)).astype(F) for n in "qkv"}
    for n, w in weights.items():
        compiled.set_param(n, w)
    for changed in ("", "q", "k", "v"):
        if changed:
            weights[changed] = rng.standard_normal((6, 8)).astype(F)
            compiled.set_param(changed, weights[changed])
        joined = np.concatenate([weights[n].T for n in "qkv"], axis=1)
        out = compiled.run({"x": data})
        for found, want in zip(out, [data @ joined, data @ weights["q"].T, weights["k"] + F(0.5)], strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_weights_are_shared_between_compiles(session: rlx.Session) -> None:
    def build(rows: int) -> rlx.Graph:
        g = rlx.Graph("shared")
        x, w = g.input("x", (rows, 4), rlx.f32), g.param("w", (4, 3), rlx.f32)
        g.set_outputs([x @ w])
        return g

    small = session.compile(build(2))
    small.set_param("w", np.eye(4, 3, dtype=F))
    large = session.compile(build(5), params=small.params)
    assert large.missing_params() == []
    np.testing.assert_array_equal(large.run({"x": np.ones((5, 4), F)})[0], np.ones((5, 3)))
    small.set_param("w", 2 * np.eye(4, 3, dtype=F))
    np.testing.assert_array_equal(large.run({"x": np.ones((5, 4), F)})[0], np.full((5, 3), 2))


def shared_sums(session: rlx.Session) -> tuple[list[rlx.CompiledGraph], dict[str, np.ndarray]]:
    """Two executables on one store: x @ a + b, whose a is packed, and whose b is read by runs."""
    g = rlx.Graph("sums")
    g.set_outputs([g.input("x", (2, 64), rlx.f32) @ g.param("a", (64, 32), rlx.f32) + g.param("b", (2, 32), rlx.f32)])
    first = session.compile(g)
    return [first, session.compile(g, params=first.params)], {"a": np.ones((64, 32), F), "b": np.ones((2, 32), F)}


@pytest.mark.parametrize("call", ["run", "bound", "clone"])
def test_a_run_begun_while_others_set_shared_weights_waits_for_all_of_them(
    session: rlx.Session, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    (first, second), weights = shared_sums(session)
    x = np.ones((2, 64), F)
    first.set_params(weights)
    run = {"run": partial(second.run, {"x": x}), "bound": second.bound([x]), "clone": partial(first.clone().run, {"x": x})}[call]
    np.testing.assert_array_equal(run()[0], np.full((2, 32), 65))  # all that it reads was current
    found: list[np.ndarray] = []
    other = threading.Thread(target=lambda: found.append(run()[0].copy()))

    def pausing(jobs, threads):
        jobs[0]()
        other.start()
        other.join(0.2)  # long enough for a run that does not wait
        for job in jobs[1:]:
            job()

    monkeypatch.setattr(files, "in_threads", pausing)
    first.set_params({name: 2 * array for name, array in weights.items()})
    other.join()
    np.testing.assert_array_equal(found[0], np.full((2, 32), 130))


def test_shared_weights_that_were_set_halfway_are_missing(session: rlx.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second), weights = shared_sums(session)
    x = np.ones((2, 64), F)
    first.set_params(weights)
    call = second.bound([x])
    call()

    def failing(jobs, threads):
        jobs[0]()
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(files, "in_threads", failing)
        with pytest.raises(KeyboardInterrupt):
            first.set_params({name: 2 * array for name, array in weights.items()})
    for attempt in (call, partial(second.run, {"x": x}), partial(first.run, {"x": x})):
        with pytest.raises(MissingParamError, match="param 'a', 'b' not set"):
            attempt()
    second.set_params(weights)
    for attempt in (call, partial(first.run, {"x": x})):
        np.testing.assert_array_equal(attempt()[0], np.full((2, 32), 65))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system forks no processes")
def test_a_child_forked_while_weights_are_set_does_not_wait_for_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second), weights = shared_sums(rlx.Session("ref"))  # which has no threads of its own
    first.set_params(weights)
    said: list[int] = []

    def forking(jobs, threads):
        jobs[0]()
        if not (child := os.fork()):
            try:
                second.run({"x": np.ones((2, 64), F)})
            except MissingParamError:
                os._exit(7)
            os._exit(1)
        said.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        for job in jobs[1:]:
            job()

    monkeypatch.setattr(files, "in_threads", forking)
    first.set_params(weights)
    assert said == [7]


def test_non_contiguous_inputs(session: rlx.Session) -> None:
    g = rlx.Graph("strided")
    x = g.input("x", (3, 4), rlx.f32)
    g.set_outputs([x * 2.0])
    compiled = session.compile(g)
    data = np.arange(24, dtype=F).reshape(4, 6)
    for view in (data[:, :3].T, data[::-1, ::2].T, np.broadcast_to(F(2), (3, 4))):
        np.testing.assert_array_equal(compiled.run({"x": view})[0], view * 2)
        compiled.run_slots([view])
        np.testing.assert_array_equal(compiled.outputs_view()[0], view * 2)


def test_an_index_out_of_range_is_an_error_and_keeps_state(session: rlx.Session) -> None:
    g = rlx.Graph("lookup")
    table, ids = g.param("table", (10, 4), rlx.f32), g.input("ids", (3,), rlx.i32)
    seen = g.handle(rlx.BufferHandle("seen", (3, 4), rlx.f32))
    rows = rlx.embedding(table, ids)
    g.assign(seen, rows)
    g.set_outputs([rows])
    compiled = session.compile(g)
    compiled.set_param("table", np.arange(40, dtype=F).reshape(10, 4))
    compiled.run({"ids": np.array([0, 9, 3], np.int32)})
    before = compiled.read_handle("seen")
    for bad in ([0, 10, 1], [-1, 0, 0], [2**31 - 1, 0, 0]):
        with pytest.raises(IndexRangeError):
            compiled.run({"ids": np.array(bad, np.int32)})
        np.testing.assert_array_equal(compiled.read_handle("seen"), before)
    np.testing.assert_array_equal(compiled.run({"ids": np.array([1, 1, 1], np.int32)})[0][2], [4, 5, 6, 7])


def test_checked_mode_refuses_nan_before_state_changes(session: rlx.Session) -> None:
    g, total = counter()
    compiled = session.compile(g, rlx.CompileOptions(checked=True))
    compiled.run({"delta": np.ones(4, F)})
    with pytest.raises(NumericsError, match="total|output0"):
        compiled.run({"delta": np.array([1, np.nan, 1, 1], F)})
    np.testing.assert_array_equal(compiled.read_handle("total"), np.ones(4, F))


def test_stale_views_raise_in_debug_mode(session: rlx.Session) -> None:
    g = rlx.Graph("view")
    x = g.input("x", (2,), rlx.f32)
    g.set_outputs([x + 1.0])
    compiled = session.compile(g, rlx.CompileOptions(debug=True))
    with pytest.raises(BindingError, match="not run"):
        compiled.outputs_view()
    compiled.run_slots([np.zeros(2, F)])
    (view,) = compiled.outputs_view()
    np.testing.assert_array_equal(view, [1, 1])
    assert np.asarray(view, np.float64).tolist() == [1, 1] and np.asarray(view, np.float64).dtype == np.float64
    with pytest.raises(ValueError, match="avoid copy"):
        np.asarray(view, np.float64, copy=False)
    compiled.run_slots([np.ones(2, F)])
    for use in (np.asarray, np.from_dlpack, lambda v: v[0]):
        with pytest.raises(StaleViewError):
            use(view)
    np.testing.assert_array_equal(compiled.outputs_view()[0], [2, 2])


def test_feeds_move_outputs_into_state(session: rlx.Session) -> None:
    g = rlx.Graph("feed")
    h = g.handle(rlx.BufferHandle("h", (3,), rlx.f32))
    x = g.input("x", (3,), rlx.f32)
    g.set_outputs([h * 2.0 + x, x])
    compiled = session.compile(g)
    compiled.set_gpu_handle_feed("h", 0)
    for _ in range(3):
        compiled.run({"x": np.ones(3, F)})
    np.testing.assert_array_equal(compiled.read_handle("h"), [7, 7, 7])
    compiled.set_gpu_handle_feed("h", None)
    got = compiled.run_feed_gpu_handle({"x": np.ones(3, F)}, "h", 1)
    np.testing.assert_array_equal(got, [1, 1, 1])
    np.testing.assert_array_equal(compiled.read_handle("h"), [1, 1, 1])
    for output in (2, True, -1):
        with pytest.raises(UnknownNameError, match="no output"):
            compiled.set_gpu_handle_feed("h", output)
    assert len(compiled.run_read_outputs({"x": np.ones(3, F)}, np.arange(2))) == 2
    assert compiled.set_gpu_handle_feed("h", 0) is compiled.set_gpu_handle_feed("h", None) is True
    assert compiled.set_gpu_handle_feed("g", 0) is compiled.set_gpu_handle_feed("g", None) is False


def test_snapshots_restore_state(session: rlx.Session) -> None:
    g, _ = counter()
    compiled = session.compile(g)
    compiled.run({"delta": np.ones(4, F)})
    snapshot = compiled.snapshot_handles()
    first = compiled.run({"delta": np.ones(4, F)})[0]
    compiled.run({"delta": np.ones(4, F)})
    compiled.restore_handles(snapshot)
    np.testing.assert_array_equal(compiled.run({"delta": np.ones(4, F)})[0], first)


def test_queued_runs_keep_every_output(session: rlx.Session) -> None:
    compiled = session.compile(counter()[0])
    sets = [{"delta": np.full(4, i, F)} for i in range(1, 6)]
    out = compiled.run_pipelined(sets)
    assert [int(run[0][0]) for run in out] == [1, 3, 6, 10, 15]
    array = np.ones(4, F)
    compiled.commit_no_wait({"delta": array})
    array[...] = 100  # the queue has its own copy
    compiled.sync_pending()
    np.testing.assert_array_equal(compiled.read_handle("total"), np.full(4, 16, F))
    with pytest.raises(MissingInputError):
        compiled.run_pipelined([{"delta": array}, {}])
    np.testing.assert_array_equal(compiled.read_handle("total"), np.full(4, 16, F))


def test_clones_run_at_once(session: rlx.Session) -> None:
    compiled = session.compile(example())
    compiled.set_param("w", np.eye(4, 3, dtype=F))
    compiled.set_param("b", np.zeros(3, F))
    wrong: list[int] = []

    def work(seed: int) -> None:
        own = compiled.clone()
        rng = np.random.default_rng(seed)
        for _ in range(50):
            x = rng.standard_normal((2, 4)).astype(F)
            if not np.allclose(own.run({"x": x})[0], gelu(x[:, :3]), atol=1e-5):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_clone_owns_its_state(session: rlx.Session) -> None:
    compiled = session.compile(counter()[0])
    compiled.run({"delta": np.ones(4, F)})
    twin = compiled.clone()
    twin.run({"delta": np.ones(4, F)})
    np.testing.assert_array_equal(compiled.read_handle("total"), np.ones(4, F))
    np.testing.assert_array_equal(twin.read_handle("total"), np.full(4, 2, F))


def test_options_must_fit_the_graph(session: rlx.Session) -> None:
    g, total = counter()
    with pytest.raises(OptionError):
        session.compile(g, rlx.CompileOptions().bind_handle(rlx.BufferHandle("other", (4,), rlx.f32)))
    with pytest.raises(OptionError):
        session.compile(g, rlx.CompileOptions().bind_handle(rlx.BufferHandle("total", (5,), rlx.f32)))
    with pytest.raises(DuplicateNameError):
        g.input("delta", (4,), rlx.f32)


def test_plan_program_and_report_can_be_read(session: rlx.Session) -> None:
    compiled = session.compile(example())
    assert "matmul" in str(compiled.program()) and "arena" in str(compiled.memory_plan())
    assert any(n.op == "gelu" and n.how == "decomposed" for n in compiled.report().nodes)
    assert compiled.memory_plan().total_bytes >= compiled.memory_plan().arena_bytes > 0


def test_knobs_print_and_dump_what_options_do_not_say(tmp_path, capsys) -> None:
    g = rlx.Graph("seen")
    g.set_outputs([rlx.exp(g.input("x", (3,), rlx.f32)) * 2.0])
    session = rlx.Session("cpu")
    shown = []
    for level in range(4):
        with knobs.override(RLX_DEBUG=level, RLX_DUMP=str(tmp_path / "knob")):
            session.compile(g, rlx.CompileOptions(dump=tmp_path / "own") if level == 0 else None)
        shown.append(capsys.readouterr().out)
        assert (tmp_path / "own").is_dir() and (tmp_path / "knob").exists() == (level > 0)
    assert shown[0] == "" and "different kernels" in shown[1] and "graph seen" not in shown[1]
    assert "graph seen" in shown[2] and "define " not in shown[2] and "define " in shown[3]
    session.compile(g, rlx.CompileOptions(verbose=True))
    assert "different kernels" in capsys.readouterr().out


# -- arguments of a wrong type ---------------------------------------------------------------------------------------

JUNK = (None, 0, -1, True, 1.5, "x", "", b"x", [], [None], [[]], (), {}, {"x": None}, {None: 1}, {"x": (None, None)}, set())


def everything(session: rlx.Session) -> rlx.CompiledGraph:
    g = rlx.Graph("everything")
    x, w, h = g.input("x", (2,), "f32"), g.param("w", (2,), "f32"), g.handle(rlx.BufferHandle("h", (2,), "f32"))
    g.set_outputs([x + w, h * 2.0])
    compiled = session.compile(g)
    compiled.set_param("w", np.zeros(2, F))
    return compiled


def test_arguments_of_any_type_are_taken_or_refused_by_an_error_of_ours(
    session: rlx.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every public method, called with each kind of junk for each of its arguments; some of it is the name of a file."""
    monkeypatch.chdir(tmp_path)
    compiled = everything(session)
    fine = {"inputs": {"x": np.ones(2, F)}, "name": "h", "handle": "h", "output_index": 0, "output": 0, "row": 0, "row_inner": 1}
    fine |= {"data": bytes(8), "dtype": "f32", "array": np.zeros(2, F), "indices": [0], "k": 1, "store": compiled.handles}
    compiled.run(fine["inputs"])
    called, refused = 0, 0
    for method in (name for name in dir(rlx.CompiledGraph) if not name.startswith("_")):
        if isinstance(vars(rlx.CompiledGraph).get(method), property):
            continue
        made = getattr(type(compiled), method)
        names = [n for n in inspect.signature(getattr(made, "__wrapped__", made)).parameters if n != "self"]
        for wrong in names:
            for junk in JUNK:
                arguments = [junk if name == wrong else fine.get(name, junk) for name in names]
                called += 1
                try:
                    getattr(compiled, method)(*arguments)
                except rlx.RlxError as e:
                    refused += 1
                    assert len(str(e)) > 10, (method, wrong, junk, e)
                except BaseException as e:
                    raise AssertionError(f"{method}({wrong}={junk!r}): {e!r}") from e
    assert called > 300 and refused > called // 2
    np.testing.assert_array_equal(compiled.run(fine["inputs"])[0], [1, 1])


@pytest.mark.parametrize("call,said", [
    (lambda c: c.run_pipelined(None), "run_pipelined takes a sequence of {name: array}, one for each run; got NoneType"),
    (lambda c: c.run_read_outputs({"x": np.ones(2, F)}, 0), "indices are those of outputs, or None for all; got int"),
    (lambda c: c.bind_handle(["h"], np.ones(2, F)), r"the name of a handle must be a string, got \['h'\]"),
    (lambda c: c.set_params({1: np.ones(2, F)}), "the name of a param must be a string, got 1"),
    (lambda c: c.set_param("w", None), "param 'w' is f32.2.; got NoneType None, which holds no numbers: give an array of f32"),
    (lambda c: c.run({"x": np.array(["a", "b"])}), "input 'x' is f32.2.; got an array of <U1, which holds no numbers"),
])  # fmt: skip
def test_what_to_pass_instead_is_said(call, said) -> None:
    with pytest.raises(BindingError, match=said):
        call(everything(rlx.Session("cpu")))


def test_all_outputs_are_read_where_no_indices_are_given(session: rlx.Session) -> None:
    compiled = everything(session)
    found = compiled.run_read_outputs({"x": np.ones(2, F)}, None)
    assert [a.tolist() for a in found] == [a.tolist() for a in compiled.run({"x": np.ones(2, F)})] and len(found) == 2
    assert [a.tolist() for a in compiled.run_read_outputs({"x": np.ones(2, F)}, iter([1, 0]))] == [[0, 0], [1, 1]]


# -- places in the arena ---------------------------------------------------------------------------------------------


def test_values_lie_where_byte_offset_says(session: rlx.Session) -> None:
    """Every value that has a slot, read from there after a run in which no slot is used twice."""
    g = rlx.Graph("places")
    x, w, h = g.input("x", (4, 8), "f32"), g.param("w", (8, 6), "f32"), g.handle(rlx.BufferHandle("h", (6,), "f32"))
    product = x @ w
    scaled = product * 3.0
    norm = rlx.softmax(scaled)
    turned = rlx.transpose(norm, (1, 0))
    y = turned @ rlx.cos(x)
    summed = rlx.sum(product, axis=0)
    g.assign(h, h + summed)
    g.set_outputs([y, summed, x * 2.0])
    compiled = session.compile(g, rlx.CompileOptions(disable=("reuse",)))
    rng = np.random.default_rng(0)
    given, weight = rng.standard_normal((4, 8)).astype(F), rng.standard_normal((8, 6)).astype(F)
    compiled.set_param("w", weight)
    (expected, *_) = compiled.run({"x": given})
    executable, arena = compiled._executable, np.empty(compiled.memory_plan().arena_bytes, np.uint8)
    executable.device_memory.copy_out(executable.arena.block, arena)
    soft = np.exp(given @ weight * 3) / np.exp(given @ weight * 3).sum(1, keepdims=True)
    values = {x: given, product: given @ weight, scaled: given @ weight * 3, norm: soft, turned: soft.T, y: expected}
    values |= {summed: (given @ weight).sum(0), rlx.constant(1.0): None, w: None, h: None}
    found = 0
    for value, array in values.items():
        at = compiled.byte_offset(value)
        assert compiled.has_buffer(value) == compiled.has_buffer(value.node) == (at is not None)
        if at is not None:
            there = arena[at:][: array.nbytes].view(F).reshape(array.shape)
            np.testing.assert_allclose(there, array, rtol=1e-5, atol=1e-6)
            found += 1
    assert all(compiled.has_buffer(v) for v in (x, y, summed)) and not any(map(compiled.has_buffer, (w, h)))
    assert found > 3 and None in map(compiled.byte_offset, (product, scaled, norm, turned))  # some are fused away
    assert compiled.clone().byte_offset(y) == compiled.byte_offset(y) == compiled.run_slots([given])[0][0]
    with pytest.raises(BindingError, match="takes a value or a node of the graph, got str"):
        compiled.byte_offset("x")


# -- as a function -----------------------------------------------------------------------------------------------------


def called(session: rlx.Session) -> rlx.CompiledGraph:
    g = rlx.Graph("g")
    x, n = g.input("x", (2, 2), rlx.f32), g.input("n", (), rlx.i32)
    g.set_outputs([x * g.param("w", (2,), rlx.f32), n + 1])
    compiled = session.compile(g, threads=1)
    compiled.set_param("w", np.array([1, 2], F))
    return compiled


def test_a_compiled_graph_is_called_with_arrays_numbers_and_lists(session: rlx.Session) -> None:
    compiled = called(session)
    rows = [[1.0, 2.0], [3.0, 4.0]]
    for x, n in compiled([[1, 2], [3, 4]], 5), compiled(rows, n=np.int32(5)), compiled(n=5, x=((1, 2), (3, 4))):
        assert x.tolist() == [[1, 4], [3, 8]] and n == 6 and n.dtype == np.int32
    g = example()
    one = session.compile(g)
    one.set_params({"w": np.ones((4, 3), F), "b": np.zeros(3, F)})
    np.testing.assert_array_equal(one(np.ones((2, 4), F)), one.run({"x": np.ones((2, 4), F)})[0])


def test_what_a_compiled_graph_declares(session: rlx.Session) -> None:
    compiled = called(session)
    assert [(d.name, d.shape, d.dtype) for d in compiled.inputs] == [("x", (2, 2), rlx.f32), ("n", (), rlx.i32)]
    assert [(d.name, d.shape, d.dtype) for d in compiled.outputs] == [("output0", (2, 2), rlx.f32), ("output1", (), rlx.i32)]
    assert [(d.name, d.shape, d.dtype) for d in compiled.params] == [("w", (2,), rlx.f32)]
    assert compiled.options.threads == 1
    again = called(session)
    g = rlx.Graph("other")
    g.set_outputs([g.param("w", (2,), rlx.f32) + 1.0])
    assert session.compile(g, params=again.params).params.store is again.params.store


WRONG_CALLS = {
    "too many": (lambda f: f([[1, 2], [3, 4]], 5, 6), BindingError, "got 3 by position"),
    "a dict": (lambda f: f({"x": [[1, 2], [3, 4]]}), BindingError, r"got a dict: call run\(inputs\), or unpack it"),
    "twice": (lambda f: f([[1, 2], [3, 4]], x=1), BindingError, "'x' is given by position and by name"),
    "unknown": (lambda f: f([[1, 2], [3, 4]], m=1), UnknownNameError, "'m'"),
    "missing": (lambda f: f(n=1), MissingInputError, "'x'"),
    "a float for an integer": (lambda f: f([[1, 2], [3, 4]], 5.0), InputDTypeError, "does not hold"),
    "too large": (lambda f: f([[1, 2], [3, 4]], 1 << 40), InputDTypeError, "i32"),
    "ragged": (lambda f: f([[1, 2], [3]], 5), InputDTypeError, "x"), "text": (lambda f: f("x", 5), InputDTypeError, "x"),
    "dims": (lambda f: f([1, 2], 5), InputShapeError, "dims"),
    "an array of another dtype": (lambda f: f(np.ones((2, 2)), 5), InputDTypeError, "astype"),
}  # fmt: skip


@pytest.mark.parametrize("ask, error, message", WRONG_CALLS.values(), ids=WRONG_CALLS)
def test_wrong_calls(ask, error, message) -> None:
    compiled = called(rlx.Session("cpu"))
    with pytest.raises(error, match=message):
        ask(compiled)
    assert compiled([[1, 2], [3, 4]], 5)[1] == 6


def test_options_by_name() -> None:
    session = rlx.Session("cpu")
    both = rlx.CompileOptions(threads=2, checked=True)
    assert session.compile(example(), rlx.CompileOptions(threads=2), checked=True).options == both
    cache = rlx.CompileCache()
    assert cache.compile(session, example(), threads=1) is cache.compile(session, example(), rlx.CompileOptions(threads=1))
    with pytest.raises(OptionError, match="treads"):
        session.compile(example(), treads=1)
