"""Calls in machine code: they do what the Python bodies do, on everything; they keep what they use, leak nothing, never crash."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_runs import fenced

import rlx
from rlx import knobs
from rlx.backends.cpu import cost, memory
from rlx.errors import (
    BindingError,
    IndexRangeError,
    InputDTypeError,
    InputShapeError,
    MissingInputError,
    MissingParamError,
    NumericsError,
    OptionError,
    RlxError,
    StaleViewError,
)
from rlx.host import calls

F = np.float32
MODES = ("native", "python")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[str]:
    with knobs.override(RLX_CALLS=request.param):
        yield request.param


def compiled(build: Callable[[rlx.Graph], list[Any]], device: str = "cpu", threads: int = 1, **options: Any) -> rlx.CompiledGraph:
    g = rlx.Graph("g")
    g.set_outputs(build(g))
    return rlx.Session(device).compile(g, rlx.CompileOptions(threads=threads, **options))


def sums(**options: Any) -> rlx.CompiledGraph:
    """x + y, x * y"""

    def build(g: rlx.Graph) -> list[Any]:
        x, y = g.input("x", (2, 3), "f32"), g.input("y", (2, 3), "f32")
        return [x + y, x * y]

    return compiled(build, **options)


def layers(count: int, size: int = 64, **options: Any) -> rlx.CompiledGraph:
    def build(g: rlx.Graph) -> list[Any]:
        h = g.input("x", (size, size), "f32")
        for i in range(count):
            h = h @ g.param(f"w{i}", (size, size), "f32")
        return [h]

    made = compiled(build, **options)
    for i in range(count):
        made.set_param(f"w{i}", np.eye(size, dtype=F) * 2)
    return made


def picker(**options: Any) -> rlx.CompiledGraph:
    """total += table[i]; a row past 3 is an IndexRangeError."""

    def build(g: rlx.Graph) -> list[Any]:
        table, i = g.constant(np.arange(4, dtype=F) + 1), g.input("i", (), "i32")
        total = g.handle(rlx.BufferHandle("total", (), "f32"))
        row = rlx.gather(table, i)
        g.assign(total, total + row)
        return [row, total + row]

    return compiled(build, **options)


def values(slots: tuple[tuple[int, int], ...], made: rlx.CompiledGraph) -> list[np.ndarray]:
    assert [n for _, n in slots] == [np.asarray(v).size for v in made.outputs_view()]
    return [np.array(v) for v in made.outputs_view()]


def forms(made: rlx.CompiledGraph, arrays: list[np.ndarray]) -> dict[str, Callable[[], list[np.ndarray]]]:
    """Each way to run on these arrays, giving copies of the outputs."""
    named = {d.name: a for d, a in zip(made._inputs, arrays)}
    own = made.bound(arrays)
    return {
        "run_slots": lambda: values(made.run_slots(arrays), made),
        "of a tuple": lambda: values(made.run_slots(tuple(arrays)), made),
        "run": lambda: made.run(named),
        "run, by keyword": lambda: made.run(inputs=dict(reversed(named.items()))),
        "run_raw": lambda: values(tuple(made.run_raw(named)), made),
        "bound": lambda: [np.array(v) for v in own()],
        "bound by name": lambda: [np.array(v) for v in made.bound(named)()],
    }


# -- what is made --------------------------------------------------------------------------------------------------


def test_this_python_and_numpy_are_known():
    assert calls.refusal() is None and calls.numpy_abi() in calls.SUPPORTED["numpy"]
    made = sums()
    x = np.ones((2, 3), F)
    for function in (made.run_slots, made.run, made.run_raw, made.bound([x, x])):
        assert type(function) is types.BuiltinFunctionType and function.__doc__
    assert made.run_slots is made.run_slots and "arrays by position" in (rlx.CompiledGraph.run_slots.__doc__ or "")


@pytest.mark.parametrize("how", ["knob", "layout", "abi", "version"])
def test_without_them_python_does_it(how, monkeypatch):
    calls._unknown.cache_clear()
    try:
        if how == "layout":
            monkeypatch.setattr(calls, "DESCR", calls.BASE)
        elif how == "abi":
            monkeypatch.setattr(calls, "numpy_abi", lambda: 0x03000000)
        elif how == "version":
            monkeypatch.setattr(sys, "version_info", (3, 99, 0))
        with knobs.override(RLX_CALLS="python" if how == "knob" else "native"):
            assert calls.refusal()
            made, x = sums(), np.ones((2, 3), F)
            assert isinstance(made.run_slots, types.MethodType) and isinstance(made.bound([x, x]), types.FunctionType)
            for call in forms(made, [x, x]).values():
                np.testing.assert_array_equal(call(), [x + 1, x])
    finally:
        calls._unknown.cache_clear()


def test_the_knob_takes_two_words():
    with knobs.override(RLX_CALLS="fast"), pytest.raises(OptionError, match="native or python"):
        _ = sums().run_slots


def test_other_devices_bind_in_python():
    made, x = sums(device="ref"), np.ones((2, 3), F)
    own = made.bound([x, x])
    x[...] = 3
    np.testing.assert_array_equal(own(), [x + x, x * x])


def test_estimates_tell_short_from_long():
    ns = lambda made: sum(cost.estimated_ns(s.kernel, made.program().target) for s in made.program().steps)  # noqa: E731
    assert ns(sums()) < ns(layers(3)) < calls.GIL_NS * 4 < ns(layers(4, 512))
    assert not any(cost.may_fail(s.kernel) for s in sums().program().steps)
    assert any(cost.may_fail(s.kernel) for s in picker().program().steps)


# -- the same as Python --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8", "bool"])
@pytest.mark.parametrize("dims", [(), (5,), (2, 3, 1, 4), (0,), (3, 0)], ids=str)
def test_every_dtype_and_dims(mode, dtype, dims):
    made = compiled(lambda g: [rlx.where(g.input("c", dims, "bool"), g.input("x", dims, dtype), g.input("y", dims, dtype))])
    rng = np.random.default_rng(0)
    kind = ml_dtypes.bfloat16 if dtype == "bf16" else rlx.ir.dtype.as_dtype(dtype).numpy
    arrays = [rng.integers(0, 2, dims).astype(t) for t in (bool, kind, kind)]
    arrays = [np.asarray(a) for a in arrays]
    for name, call in forms(made, arrays).items():
        for _ in range(2):
            (found,) = call()
            np.testing.assert_array_equal(found, np.where(*arrays), err_msg=name)


def odd_arrays() -> dict[str, Any]:
    """Arguments for f32 [2, 3]: usual, unusual, wrong."""
    plain = np.arange(6, dtype=F).reshape(2, 3)
    frozen = plain.copy()
    frozen.flags.writeable = False
    misaligned = np.zeros(25, np.uint8)[1:].view(F).reshape(2, 3)
    misaligned[...] = plain

    class Sub(np.ndarray):
        pass

    class Array:
        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            return plain

    return {
        "plain": plain, "frozen": frozen, "misaligned": misaligned, "strided": np.arange(12, dtype=F).reshape(2, 6)[:, ::2],
        "transposed": np.arange(6, dtype=F).reshape(3, 2).T, "reversed": plain[::-1], "broadcast": np.broadcast_to(F(3), (2, 3)),
        "subclass": plain.view(Sub), "masked": np.ma.array(plain), "recarray": plain.view(np.recarray),
        "swapped": plain.astype(">f4"), "with metadata": plain.astype(np.dtype("f4", metadata={"a": 1})),
        "converts": Array(), "of other dims": plain.reshape(3, 2), "flat": plain.ravel(), "longer": np.zeros((2, 4), F),
        "of 3 dims": plain.reshape(2, 3, 1), "empty": np.zeros((0, 3), F), "scalar": F(1), "0-d": np.array(1, F),
        "f64": plain.astype("f8"), "i32": plain.astype("i4"), "objects": plain.astype(object), "text": np.full((2, 3), "a"),
        "fields": np.zeros((2, 3), "f4,i4"), "list": plain.tolist(), "ragged": [[1], [1, 2, 3]], "none": None, "number": 3,
        "bytes": b"1234", "type": np.ndarray, "self": calls, "buffer": memoryview(plain), "datetime": np.zeros((2, 3), "M8[s]"),
    }  # fmt: skip


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return [np.asarray(v).tolist() for v in call()]
    except Exception as e:  # noqa: BLE001  any, to compare
        return type(e), str(e)


def every_call(made: rlx.CompiledGraph, pair: list[Any]) -> list[Any]:
    """The outcome of each way to run on these."""
    named = dict(zip("xy", pair))
    return [
        outcome(lambda: values(made.run_slots(pair), made)), outcome(lambda: made.run(named)),
        outcome(lambda: values(tuple(made.run_raw(named)), made)), outcome(lambda: made.bound(pair)()),
        outcome(lambda: made.bound(named)()),
    ]  # fmt: skip


@pytest.mark.parametrize("name", odd_arrays())
def test_odd_arrays_have_one_outcome(name):
    found: dict[str, list[Any]] = {}
    for mode in MODES:
        with knobs.override(RLX_CALLS=mode):
            made, odd, plain = sums(), odd_arrays()[name], np.ones((2, 3), F)
            made.run_slots([plain, plain])
            pairs = [odd, plain], [plain, odd], [odd, odd], [plain, plain]
            found[mode] = [every_call(made, list(pair)) for pair in pairs]
    assert found["native"] == found["python"] and found["native"][3][0] == [np.full((2, 3), n).tolist() for n in (2, 1)]


def test_odd_arguments_have_one_outcome():
    x = np.ones((2, 3), F)

    class Name(str):
        pass

    class Dict(dict):
        pass

    class Evil(str):
        def __hash__(self) -> int:
            return hash("x")

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("compared")

    given: list[Any] = [[], [x], [x, x], [x, x, x], (x,), (x, x), {"x": x, "y": x}, {}]
    given += [{"y": x, "x": x}, {"x": x}, {"x": x, "z": x}]
    given += [{"x": x, "y": x, "z": x}, {1: x, 2: x}, {Name("x"): x, "y": x}, Dict(x=x, y=x), {Evil("x"): x, "y": x}]
    given += [{"".join("x"): x, ("y " * 2)[:1]: x}, types.MappingProxyType({"x": x, "y": x})]
    given += [None, 3, "xy", range(2), np.stack([x, x])]
    found = {}
    for mode in MODES:
        with knobs.override(RLX_CALLS=mode):
            made = sums()
            found[mode] = [[kind_of(outcome(partial(call, g))) for call in ways(made)] for g in given]
            wrong = [made.run_slots, partial(made.run_slots, [x, x], 1), partial(made.run, 1, 2)]
            for call in (*wrong, partial(made.run_slots, arrays=[x, x])):
                with pytest.raises(TypeError):
                    call()
            for call in (partial(made.bound([x, x]), x), partial(made.bound([x, x]), y=x)):
                with pytest.raises(BindingError, match="a bound call takes no arguments.*call the compiled graph"):
                    call()
            assert made.run(inputs={"x": x, "y": x})[0][0, 0] == 2 and made.run_slots(inputs=[x, x])
            with pytest.raises(MissingInputError):
                made.run()
    assert found["native"] == found["python"] and list in found["native"][2] and all(TypeError not in f for f in found["native"])


def ways(made: rlx.CompiledGraph) -> list[Callable[[Any], Any]]:
    return [made.run_slots, made.run, made.run_raw, lambda given: made.bound(given)()]


def kind_of(found: Any) -> type:
    """list: it went well. Else the error."""
    return list if isinstance(found, list) else found[0]


def test_random_histories_have_one_outcome():
    """The same operations on twins, one in machine code: equal values, errors, and states at every point."""
    rng = np.random.default_rng(1)
    twins = []
    for mode in MODES:
        with knobs.override(RLX_CALLS=mode):
            made, array = picker(), np.array(1, np.int32)
            _ = made.run, made.run_slots, made.run_raw
            twins.append((made, array, made.bound([array])))
    for _ in range(400):
        what, i = rng.integers(0, 9), int(rng.integers(0, 5))
        found = [(outcome(partial(step, *twin, what, i)), twin[0].handles.entries["total"].array.tolist()) for twin in twins]
        assert found[0][0] == found[1][0], what
        if twins[0][0].handles.queue.last is None:
            assert found[0][1] == found[1][1], what


def step(made: rlx.CompiledGraph, array: np.ndarray, own: Callable[[], Any], what: int, i: int) -> Any:
    array[...] = i
    fresh = np.array(i, np.int32)
    if what < 2:
        return own()
    if what == 2:
        return values(made.run_slots([fresh]), made)
    if what == 3:
        return made.run({"i": fresh})
    if what == 4:
        return values(tuple(made.run_raw({"i": fresh})), made)
    if what == 5:
        return made.commit_no_wait({"i": fresh}) or []
    if what == 6:
        return made.sync_pending() or []
    if what == 7:
        return [made.bind_handle("total", np.array(i, F))]
    return made.run_pipelined([{"i": np.array(0, np.int32)}] * 2)[1]


# -- semantics that a run has --------------------------------------------------------------------------------------


def test_weights_set_anywhere_are_used(mode):
    a = layers(1, 4)
    x = np.ones((4, 4), F)
    g = rlx.Graph("other")
    g.set_outputs([g.input("x", (4, 4), "f32") @ g.param("w0", (4, 4), "f32")])
    b = rlx.Session("cpu").compile(g, params=a.params)
    runs = [c for made in (a, b) for c in forms(made, [x]).values()]
    for scale in (2, 3, 5):
        (a if scale == 3 else b).set_param("w0", np.eye(4, dtype=F) * scale)
        for call in runs:
            np.testing.assert_array_equal(call()[0], x * scale)
    fresh = compiled(lambda g: [g.input("x", (4,), "f32") + g.param("p", (4,), "f32")])
    for call in forms(fresh, [x[0]]).values():
        with pytest.raises(MissingParamError):
            call()
    fresh.set_param("p", x[0])
    np.testing.assert_array_equal(fresh.run_slots([x[0]]) and fresh.outputs_view()[0], [2, 2, 2, 2])


def test_feeds_queues_and_stores_are_seen(mode):
    made = compiled(lambda g: [g.handle(rlx.BufferHandle("h", (3,), "f32")) * 2.0 + g.input("x", (3,), "f32")])
    x = np.ones(3, F)
    own = made.bound([x])
    own()
    made.set_gpu_handle_feed("h", 0)
    for want in (1, 3, 7, 15):
        own()
        np.testing.assert_array_equal(made.read_handle("h"), [want] * 3)
    made.set_gpu_handle_feed("h", None)
    np.testing.assert_array_equal(own()[0], [31] * 3)
    np.testing.assert_array_equal(made.run_slots([x]) and made.read_handle("h"), [15] * 3)
    there = rlx.driver.handles.HandleStore()
    made.use_handles(there)
    np.testing.assert_array_equal(own()[0], [1] * 3)
    made.bind_handle("h", x * 5)
    np.testing.assert_array_equal(own()[0], [11] * 3)
    counter = picker()
    one = np.array(0, np.int32)
    own = counter.bound([one])
    for n in range(5):
        for _ in range(10):
            counter.commit_no_wait({"i": one})
        assert own()[1] == 11 * (n + 1)  # after what was queued
    counter.commit_no_wait({"i": np.array(7, np.int32)})
    with pytest.raises(IndexRangeError, match="queued run 0 of 1"):
        own()
    assert own()[1] == 56


def test_a_failed_run_changes_no_state(mode):
    made = picker()
    for name, call in forms(made, [index := np.array(2, np.int32)]).items():
        index[...] = 2
        call()
        before = float(made.read_handle("total"))
        for wrong in (4, -1, 2**31 - 1):
            index[...] = wrong
            for _ in range(2):
                with pytest.raises(IndexRangeError):
                    call()
        assert float(made.read_handle("total")) == before, name
        index[...] = 0
        assert call()[0] == 1 and float(made.read_handle("total")) == before + 1


def test_checked_and_debug_modes(mode):
    made = compiled(lambda g: [rlx.log(g.input("x", (2,), "f32"))], checked=True)
    bad = np.array([1, -1], F)
    for call in forms(made, [bad]).values():
        with pytest.raises(NumericsError):
            call()
    debug = sums(debug=True)
    x = np.ones((2, 3), F)
    own = debug.bound([x, x])
    named = {"x": x, "y": x}
    for again in (own, lambda: debug.run_slots([x, x]), lambda: debug.run(named), lambda: debug.run_raw(named)):
        view = own()[0]
        np.testing.assert_array_equal(view, x + x)
        again()
        with pytest.raises(StaleViewError):
            np.asarray(view)


def test_an_active_extent_counts(mode):
    g = rlx.Graph("rows")
    g.set_outputs([rlx.sum(g.input("x", (rlx.Dim("n"), 3), "f32"), axis=0)])
    made = rlx.Session("cpu").compile(g, rlx.CompileOptions().bind_extent("n", 8))
    x = np.ones((8, 3), F)
    own = made.bound([x])
    for n in (8, 3, 5):
        made.set_active_extent((n, 8))
        for call in (own, lambda: made.run({"x": x}), lambda: made.run_slots([x]) and made.outputs_view()):
            np.testing.assert_array_equal(call()[0], [n] * 3)


# -- what is bound -------------------------------------------------------------------------------------------------


def test_bound_arrays_are_read_at_each_call(mode):
    made = sums()
    x, y = np.ones((2, 3), F), np.arange(12, dtype=F).reshape(2, 6)[:, ::2]
    own = made.bound({"y": y, "x": x})
    first = own()
    for value in (2, 7):
        x[...], y[...] = value, value + 1
        again = own()
        assert all(a is b for a, b in zip(first, again)) and not first[0].flags.writeable
        np.testing.assert_array_equal(first, [x + y, x * y])
    ours = made.input_view("x")
    own = made.bound([ours, x])
    ours[...] = 4
    np.testing.assert_array_equal(own()[0], x + 4)
    with pytest.raises(BindingError, match="in another input.s slot"):
        made.bound([x, ours])
    for wrong in ([x.tolist(), x], {"x": x, "y": x.tolist()}):
        with pytest.raises(BindingError, match="got list"):
            made.bound(wrong)
    with pytest.raises(InputShapeError):
        made.bound([x, x.T])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="unreadable pages by mprotect")
@pytest.mark.parametrize("at_end", [False, True])
def test_nothing_beside_bound_arrays_is_read(at_end):
    """Arrays that end where memory does, or start there, in graphs of each kind of kernel."""
    rng = np.random.default_rng(0)
    kinds: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
        "pointwise": (lambda x, y: x * y + rlx.exp(x), ((3, 37), (3, 37))), "broadcast": (lambda x, y: x + y, ((5, 7, 9), (9,))),
        "matmul": (lambda x, y: rlx.gelu(x @ y), ((33, 67), (67, 51))), "one row": (lambda x, y: x @ y, ((1, 129), (129, 63))),
        "batches": (lambda x, y: x @ y.T, ((7, 31), (13, 31))), "softmax": (lambda x, y: rlx.softmax(x) - y, ((3, 101), (3, 1))),
        "reduce": (lambda x, y: rlx.sum(x, axis=0) * y, ((17, 19), (19,))),
        "join": (lambda x, y: rlx.concat(x.T, y[::2], axis=1), ((3, 5), (10, 7))),
    }  # fmt: skip
    for name, (function, dims) in kinds.items():
        for threads in (1, 2):
            build = lambda g, f=function, d=dims: [f(g.input("x", d[0], "f32"), g.input("y", d[1], "f32"))]  # noqa: E731
            made = compiled(build, threads=threads)
            plain = [rng.standard_normal(d).astype(F) for d in dims]
            held = [fenced(a.nbytes, at_end).view(F).reshape(a.shape) for a in plain]
            for goal, source in zip(held, plain):
                goal[...] = source
            np.testing.assert_array_equal(made.bound(held)()[0], made.run({"x": plain[0], "y": plain[1]})[0], err_msg=name)


def test_outputs_may_be_bound(mode):
    """A run that reads what it wrote last time, and what another graph wrote."""

    def turned(g: rlx.Graph) -> list[Any]:
        x = g.input("x", (64,), "f32")
        return [rlx.concat(x[32:], x[:32], axis=0) + 1.0]

    made = compiled(turned)
    x = np.zeros(64, F)
    x[0] = 1
    last = made.bound([x])()[0]
    loop = made.bound([last])
    for n in range(2, 6):
        found = loop()[0].copy()
        assert found.max() == n + 1 and found.min() == n and found.argmax() == (0 if n % 2 == 0 else 32)
    chain = compiled(lambda g: [g.input("x", (64,), "f32") * 2.0, g.input("y", (64,), "f32")]).bound([last, last])
    np.testing.assert_array_equal(chain(), [last * 2, last])


def test_bound_arrays_that_move_are_refused(mode):
    made = sums()
    y = np.ones((2, 3), F)
    for change in ("shape", "dtype", "larger", "smaller"):
        x = np.arange(6, dtype=F).reshape(2, 3)
        x = x.copy()
        own = made.bound([x, y])
        np.testing.assert_array_equal(own()[0], x + 1)
        if change == "dtype":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # from numpy 2.5 on
                x.dtype = np.int32
        else:
            x.resize({"shape": (3, 2), "larger": (1 << 18,), "smaller": (3,)}[change], refcheck=False)
        with pytest.raises(InputDTypeError if change == "dtype" else InputShapeError):
            own()
    x = np.zeros((2, 3), F)
    own = made.bound([x, y])
    for n in range(3):  # elsewhere, and back at its dims: read from where it is now
        x.resize((1 << 20,), refcheck=False)
        held = np.full(6, 99, F)
        x.resize((2, 3), refcheck=False)
        x[...] = n
        np.testing.assert_array_equal(own()[0], y + n)
    del held


# -- threads -------------------------------------------------------------------------------------------------------


def together(*jobs: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as e:  # noqa: BLE001  for the thread that waits
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors, errors


@pytest.mark.parametrize("count, size, runs", [(1, 4, 2000), (3, 256, 30)], ids=["short", "long"])
@pytest.mark.parametrize("threads", [1, 2])
def test_threads_get_what_is_theirs(mode, count, size, runs, threads):
    made = layers(count, size, threads=threads)
    eye = np.eye(size, dtype=F)

    def job(value: int, form: str) -> None:
        x = eye * value
        for _ in range(runs):
            if form == "run":
                assert made.run({"x": x})[0][-1, -1] == value * 2**count
            elif form == "read":
                assert made.run_read_outputs({"x": x}, [0])[0][-1, -1] == value * 2**count
            elif form == "bound":
                made.bound([x])()
            elif form == "slots":
                made.run_slots([x])
            else:
                made.set_param("w0", eye * 2)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        together(*(lambda v=v, f=f: job(v, f) for v, f in enumerate(("run", "run", "read", "bound", "slots", "set"), 1)))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("long", [False, True])
def test_who_is_inside_is_waited_for(long):
    """A thread in the middle of a slow call keeps calls in machine code out until it leaves."""
    made = layers(3, 256) if long else layers(1, 4)
    x = np.ones(made._inputs[0].shape.static, F)
    calls_ = [lambda: made.run_slots([x]), made.bound([x]), lambda: made.run({"x": x})]
    for call in calls_:
        call()
        generation = made._gate.generation
        with made._lock, made._gate:
            thread = threading.Thread(target=call)
            thread.start()
            thread.join(0.05)
            assert thread.is_alive() and made._gate.generation == generation
        thread.join()
        assert made._gate.generation == generation + 1 and not made._gate.shut and not made._lock.locked()


def test_long_runs_let_other_threads_go_on():
    """No thread is made to let go of the GIL; another one proceeds during a call only if the call lets go of it."""
    turns, ends = [0], threading.Event()

    def count() -> None:
        while not ends.is_set():
            turns[0] += 1
            time.sleep(0)  # lets go of the GIL, and gets it back when the calling thread does

    def proceeds(made: rlx.CompiledGraph, seconds: float) -> bool:
        """Whether the other thread does during some of the calls. Where the cores are busy, it takes many to get one."""
        call = made.bound([np.ones(made._inputs[0].shape.static, F)])
        call()
        before, end = turns[0], time.monotonic() + seconds
        while turns[0] == before and time.monotonic() < end:
            call()
        return turns[0] != before

    long, short = layers(4, 512), layers(1, 4)
    before = sys.getswitchinterval()
    thread = threading.Thread(target=count)
    thread.start()
    sys.setswitchinterval(1000)
    try:
        assert not proceeds(short, 0.5) and proceeds(long, 60)
    finally:
        ends.set()
        sys.setswitchinterval(before)
        thread.join()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs interval timers")
@pytest.mark.parametrize("long", [False, True])
def test_an_interrupt_leaves_nothing_held(mode, long):
    """An exception from a signal's handler, at any moment of any call: the next calls find the lock free."""
    made = layers(3, 128) if long else layers(1, 4)
    x = np.ones(made._inputs[0].shape.static, F)
    own, seen = made.bound([x]), 0

    class Interrupt(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for turn in range(150):
            call = [own, lambda: made.run({"x": x}), lambda: made.run_slots([x]), lambda: made.run_slots([x[::-1]])][turn % 4]
            try:
                signal.setitimer(signal.ITIMER_REAL, 3e-4 + 1e-6 * turn)
                while True:
                    call()
            except Interrupt:
                seen += 1
            assert not made._lock.locked()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    generation = made._gate.generation
    for call in forms(made, [x]).values():
        call()
    assert seen == 150 and made._gate.generation > generation and not made._gate.shut


# -- lifetimes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_functions_keep_what_they_use_and_no_more(no_collector):
    before = memory.allocations()["live_bytes"]
    made = layers(2, 16)
    x = np.eye(16, dtype=F)
    run, slots, own = made.run, made.run_slots, made.bound([x])
    alive, array = weakref.ref(made._executable), weakref.ref(x)
    made.run({"x": x})
    del made
    np.testing.assert_array_equal(run({"x": x})[0], x * 4)
    np.testing.assert_array_equal(own()[0], x * 4)
    with pytest.raises(InputShapeError):
        slots([x[:3]])
    view = own()[0]
    del run, slots, x
    gc.collect()  # passing frames of the raised error
    assert alive() is not None and array() is not None and own()[0][0, 0] == 4
    del own
    assert alive() is None and array() is None and view[0, 0] == 4
    del view
    gc.collect()
    assert memory.allocations()["live_bytes"] == before


@pytest.mark.parametrize("fails", [False, True])
def test_counts_of_references_stay(fails):
    made = picker()
    index = np.array(9 if fails else 1, np.int32)
    own, slots, named = made.bound([index]), [index], {"i": index}
    made.run_slots([np.array(1, np.int32)])
    held: list[Any] = [None, True, False, index, slots, named, "i", index.dtype, made._slots, made._lock, made._executable]
    held += [made, own, made._core, np.ndarray, list, dict, 0, 1, -1, IndexRangeError, *made._output_views]

    def turn() -> None:
        for call in (own, lambda: made.run_slots(slots), lambda: made.run(named), lambda: made.run_raw(named)):
            try:
                call()
            except IndexRangeError:
                assert fails
        for wrong in ([], [None], [index.astype("f4")], [index.reshape(1)]):
            with pytest.raises(RlxError):
                made.run_slots(wrong)

    rounds = 100 if fails else 1000
    for _ in range(20):
        turn()
    before = [sys.getrefcount(x) for x in held]
    for _ in range(rounds):
        turn()
    grown = [sys.getrefcount(x) - b for x, b in zip(held, before)]
    assert max(grown) < rounds // 4, list(zip(grown, held))
    if not fails:
        before = [sys.getrefcount(x) for x in held]
        for _ in range(100_000):
            own()
            made.run_slots(slots)
        assert max(abs(sys.getrefcount(x) - b) for x, b in zip(held, before)) < 1000


AFTER = """
import os, sys, threading
import numpy as np
import rlx
g = rlx.Graph("g")
h = x = g.input("x", (256, 256), "f32")
for _ in range(3): h = h @ x
g.set_outputs([h])
made = rlx.Session("cpu").compile(g, rlx.CompileOptions(threads={threads}))
x = np.eye(256, dtype=np.float32)
own = made.bound([x]); slots = made.run_slots; run = made.run
own(); slots([x]); run({{"x": x}})
{then}
"""
FORK = """
child = os.fork()
if not child:
    x *= 2
    ok = own()[0][0, 0] == 16 and run({"x": x})[0][1, 1] == 16 and slots([x]) == slots([x])
    del made, own
    os._exit(0 if ok else 1)
_, status = os.waitpid(child, 0)
assert status == 0 and own()[0][0, 0] == 1
"""
LATE = """
import atexit
atexit.register(own)
class Late:
    def __del__(self): own(); slots([x])
late = Late()
def forever():
    while True: own()
for _ in range(2): threading.Thread(target=forever, daemon=True).start()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("then", [FORK, LATE], ids=["fork", "exit"])
def test_forks_and_exits(threads, then):
    code = AFTER.format(threads=threads, then=then)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
