"""Ops along an axis in lanes: cumsum, argmax and argmin, and loops cut where an operand of a concat or a padding ends."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import rlx
from rlx.backends import get
from rlx.backends.cpu.index_split import parts
from rlx.backends.cpu.render import render
from rlx.backends.cpu.sorting import merge_exchange
from rlx.backends.cpu.target import host_target, target_for
from rlx.backends.cpu.updates import updated_in_place
from rlx.backends.ref.interpret import run_kernel
from rlx.backends.shared.lines import in_loops
from rlx.compiler import lower
from rlx.ir.evaluate import evaluate
from rlx.ir.kernel import EXTREMES, Buffer, Kernel, Load, Loop, Reduce, Sort, Store, Var, const, k, walk
from rlx.ir.nest import substitute
from rlx.ir.target import Target
from tests.kernel_runs import run as run_on_cpu
from tests.test_crossing import run as compiled
from tests.test_ref_backend import extremes_kernel, sort_kernel

KINDS = {d.numpy.name: d for d in (rlx.f32, rlx.f64, rlx.f16, rlx.i8, rlx.i32, rlx.i64, rlx.u8)}
SHAPES = [((3, 17), 1), ((3, 1000), 1), ((2, 9, 65), 1), ((70, 33), 0), ((257,), 0), ((3, 129), -1), ((5, 3), 0), ((1, 1), 1)]
RNG = np.random.default_rng(3)


def schedule(kernel: Kernel, threads: int) -> Kernel:
    return host_target(threads).schedule(kernel)


def run(make, *arrays: np.ndarray, threads: int = 1) -> np.ndarray:
    g = rlx.Graph("t")
    g.set_outputs([make(*(g.input(f"x{i}", a.shape, KINDS[a.dtype.name]) for i, a in enumerate(arrays)))])
    c = rlx.Session().compile(g, rlx.CompileOptions(threads=threads))
    c._executable.poison()  # type: ignore[attr-defined]
    return c.run({f"x{i}": a for i, a in enumerate(arrays)})[0]


Made = Callable[[Any, int], Any]  # of an operand and an axis


def each(makes: Sequence[Made], shapes: Sequence[tuple[tuple[int, ...], int]], dtype: str) -> Callable[..., list[np.ndarray]]:
    """The results, shape by shape, of each of `makes` on an operand of its own, compiled together for two threads."""
    g = rlx.Graph("each")
    cases = list(itertools.product(enumerate(shapes), makes))
    g.set_outputs([make(g.input(f"x{i}", dims, KINDS[dtype]), axis) for i, ((_, (dims, axis)), make) in enumerate(cases)])
    c = rlx.Session().compile(g, rlx.CompileOptions(threads=2))

    def results(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        c._executable.poison()  # type: ignore[attr-defined]
        return c.run({f"x{i}": arrays[n] for i, ((n, _), _) in enumerate(cases)})

    return results


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("exclusive, reverse", list(itertools.product((False, True), repeat=2)))
def test_cumsum(dtype: str, exclusive: bool, reverse: bool) -> None:
    shapes = [*SHAPES, ((0, 3), 1), ((3, 0), 1)]
    xs = [(RNG.standard_normal(dims) * 3).astype(dtype) for dims, _ in shapes]
    results = each([lambda v, axis: rlx.cumsum(v, axis=axis, exclusive=exclusive, reverse=reverse)], shapes, dtype)
    for x, got, (_, axis) in zip(xs, results(xs), shapes, strict=True):
        wide = (np.flip(x, axis) if reverse else x).astype(np.float64 if x.dtype.kind == "f" else x.dtype)
        wanted = np.cumsum(wide, axis=axis, dtype=wide.dtype)
        if exclusive and x.size:
            wanted = wanted - wide
        wanted = np.flip(wanted, axis) if reverse else wanted
        if x.dtype.kind == "f":
            slack = {"float16": 4e-3, "float32": 1e-5, "float64": 1e-12}[dtype]
            np.testing.assert_allclose(got, wanted, rtol=slack, atol=slack * 20)
        else:
            np.testing.assert_array_equal(got, wanted)  # they wrap


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_long_running_totals_are_those_in_f64(device: str) -> None:
    """Of rows and columns, from both ends: sums of equal numbers round to the same side, errors of products multiply."""
    dims = [((1, 20_001), 1), ((1, 2 * 8192), 1), ((9_000, 20), 0)] if device == "cpu" else [((1, 9_000), 1)]
    ways = [{}] if device == "ref" else [{}, {"reverse": True}, {"exclusive": True, "reverse": True}]
    for (shape, axis), way, (op, unit) in itertools.product(dims, ways, (("cumsum", 0), ("cumprod", 1))):
        x = (np.full(shape, 0.1) if op == "cumsum" else 1 + 0.001 * RNG.standard_normal(shape)).astype(np.float32)
        wide = np.moveaxis(x, axis, -1)[..., :: -1 if way else 1].astype(np.float64)
        wanted = getattr(np, op)(wide, axis=-1)
        if "exclusive" in way:
            wanted = np.concatenate([np.full_like(wanted[..., :1], unit), wanted[..., :-1]], -1)
        g = rlx.Graph("totals")
        g.set_outputs([getattr(rlx, op)(g.input("x", shape, "f32"), axis=axis, **way)])
        got = np.moveaxis(np.asarray(rlx.Session(device).compile(g).run({"x": x})[0]), axis, -1)[..., :: -1 if way else 1]
        np.testing.assert_allclose(got, wanted, rtol=6e-5, atol=0)  # a block adds up to 8192 / 8 vectors in f32


def test_totals_stay_finite_where_the_sum_of_a_block_alone_is_not() -> None:
    x = np.zeros((1, 10_240), np.float32)
    x[0, :2048], x[0, 2048:4096] = -1.4e35, 2.5e35
    np.testing.assert_allclose(run(lambda v: rlx.cumsum(v), x), np.cumsum(x.astype(np.float64), axis=1), atol=1e34)


@pytest.mark.parametrize("shape", [(64, 0), (1, 9, 0), (2, 3, 0), (4, 64, 0), (0, 5)], ids=str)
def test_nothing_is_scattered(shape: tuple[int, ...]) -> None:
    """Empty lines, and no lines, along each axis."""
    for axis in range(len(shape)):
        g = rlx.Graph("nothing")
        x, at, u = g.input("x", shape, "f32"), g.input("at", shape, "i32"), g.input("u", shape, "f32")
        g.set_outputs([rlx.scatter_elements(x, at, u, axis=axis)])
        given = {"x": np.zeros(shape, np.float32), "at": np.zeros(shape, np.int32), "u": np.zeros(shape, np.float32)}
        assert rlx.Session("cpu").compile(g).run(given)[0].shape == shape


def test_cumsum_goes_by_shuffles_and_lets_no_value_back() -> None:
    """A NaN or an infinity changes no element before it."""
    x = np.ones((2, 100), np.float32)
    x[0, 37], x[1, 50], x[1, 70] = np.nan, np.inf, -np.inf
    got = run(lambda v: rlx.cumsum(v), x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, np.cumsum(x, axis=1))
    got, text = compiled(lambda v: rlx.cumsum(v), x)
    assert host_target(1).vector_bytes < 32 or "shufflevector" in text


ARG_SHAPES = [*SHAPES, ((2, 128), 1), ((2, 384), 1), ((1, 100), 0), ((1, 40), 1), ((7, 1536), 0)]
ARGS = list(itertools.product(("argmax", "argmin"), (False, True)))  # op, keepdims


@cache
def args_of(dtype: str) -> Callable[..., list[np.ndarray]]:
    return each(
        [lambda v, axis, op=op, keep=keep: getattr(rlx, op)(v, axis=axis, keepdims=keep) for op, keep in ARGS], ARG_SHAPES, dtype
    )


def some_of(kind: str, dims: tuple[int, ...], dtype: str) -> np.ndarray:
    x = RNG.integers(0, 3, dims).astype(dtype) if kind == "ties" else (RNG.standard_normal(dims) * 3).astype(dtype)
    flat = x.reshape(-1)
    if kind == "nan":
        flat[RNG.integers(0, flat.size, 3)] = np.nan
    elif kind == "infinite":
        flat[...] = -np.inf
        flat[RNG.integers(0, flat.size, 2)] = np.inf
    elif kind == "zeros":
        flat[...] = np.where(RNG.integers(0, 2, flat.size), 0.0, -0.0)
    return x


@pytest.mark.parametrize("dtype", list(KINDS))
@pytest.mark.parametrize("kind", ["normal", "ties", "nan", "infinite", "zeros"])
def test_arg(dtype: str, kind: str) -> None:
    """The first of equals, -0 and 0 among them; the first NaN."""
    if np.dtype(dtype).kind != "f" and kind in ("nan", "infinite", "zeros"):
        return
    xs = [some_of(kind, dims, dtype) for dims, _ in ARG_SHAPES]
    found = iter(args_of(dtype)(xs))
    for x, (dims, axis) in zip(xs, ARG_SHAPES, strict=True):
        for op, keepdims in ARGS:
            wanted = getattr(np, op)(x, axis=axis, keepdims=keepdims)
            np.testing.assert_array_equal(next(found), wanted, f"{op} of {dims} {axis}")


@pytest.mark.parametrize("dims, tasks", [((300, 1024), 2), ((300, 1021), 1), ((2, 300, 4096), 2)])
def test_threads_share_the_columns(dims: tuple[int, ...], tasks: int) -> None:
    x = RNG.integers(0, 100, dims).astype(np.float32)
    axis = len(dims) - 2
    for threads in (1, 2):
        np.testing.assert_array_equal(run(lambda v: rlx.argmax(v, axis=axis), x, threads=threads), np.argmax(x, axis=axis))
    g = rlx.Graph("t")
    g.set_outputs([rlx.argmax(g.input("x", dims, rlx.f32), axis=axis)])
    step = lower(g, host_target(2), rlx.CompileOptions()).steps[0]
    assert render(step.kernel, host_target(2), "f").tasks == tasks


@pytest.mark.parametrize("dims", [(4, 300), (3, 16), (2, 1025), (5, 7)])
@pytest.mark.parametrize("op", ["max", "min"])
def test_the_greatest_and_least_let_nan_through(dims: tuple[int, int], op: str) -> None:
    x = RNG.standard_normal(dims).astype(np.float32)
    x[0, -1], x[1, 0], x[-1, 2] = np.nan, np.inf, -np.inf
    got = run(lambda v: getattr(rlx, op)(v, axis=1), x)
    np.testing.assert_array_equal(got, getattr(np, op)(x, axis=1))
    for at in range(dims[1]):
        x[1, :] = -np.inf
        x[1, at] = np.nan
        if at % 37 < 3:
            assert np.isnan(run(lambda v: getattr(rlx, op)(v, axis=1), x)[1])


SIZES = [(1000, 1000), (1000, 1001, 3), (64, 64), (7, 300, 5), (64, 0, 128), (100,) * 9, (33, 500), (300,) * 8, (16,) * 4]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_concat(sizes: tuple[int, ...], threads: int) -> None:
    for dtype in ("float32", "int8", "float64"):
        for rows in (1, 3):
            xs = [RNG.integers(0, 100, (rows, n)).astype(dtype) for n in sizes]
            np.testing.assert_array_equal(run(lambda *v: rlx.concat(*v, axis=1), *xs, threads=threads), np.concatenate(xs, 1))
        flat = [x[0] for x in xs]
        np.testing.assert_array_equal(run(lambda *v: rlx.concat(*v, axis=0) * 2, *flat), np.concatenate(flat) * 2)


def test_where_a_loop_is_cut() -> None:
    """At whole vectors; what changes inside one is not known there."""
    i, x, y = Var("i"), Buffer("x", rlx.f32, 400), Buffer("y", rlx.f32, 400, True)
    early, late = k.lt(i, const(128)), k.le(const(250), i)
    loop = Loop(i, 400, (Store(y, i, k.select(early, Load(x, i), k.select(late, Load(x, i), const(0, rlx.f32)))),), vector=True)
    true_false = [(True, False), (False, False), (False, None), (False, True)]
    edges = [(0, 128), (128, 240), (240, 256), (256, 400)]
    found = [(a, b, (known.get(id(early)), known.get(id(late)))) for a, b, known in parts(loop, 16)]
    assert found == [(*edge, known) for edge, known in zip(edges, true_false)]
    assert parts(replace(loop, extent=128), 16) == [(0, 128, {})]


@pytest.mark.parametrize("low, high", [(5, 0), (0, 700), (64, 64), (3, 500), (0, 0)])
@pytest.mark.parametrize("threads", [1, 2])
def test_pad(low: int, high: int, threads: int) -> None:
    for n in (1000, 100_003):
        x = RNG.standard_normal((2, n)).astype(np.float32)
        got = run(lambda v: rlx.pad(v, (0, low), (1, high), 7.0), x, threads=threads)
        np.testing.assert_array_equal(got, np.pad(x, ((0, 1), (low, high)), constant_values=7))
        got = run(lambda v: rlx.pad(v, (low,), (high,)), x[0], threads=threads)
        np.testing.assert_array_equal(got, np.pad(x[0], (low, high)))


@pytest.mark.parametrize("cut", [1, 70, 368, 5000])
@pytest.mark.parametrize("front", [False, True])
def test_a_cut_loop_in_tasks_works_in_place(cut: int, front: bool) -> None:
    """Each task does its own elements once, wherever the cut lies: an element done twice would be seen."""
    n = 1 << 18
    x, a = np.ones(n, np.float32), np.ones(cut, np.float32)
    pad = ((n - cut,), (0,)) if front else ((0,), (n - cut,))
    expected = np.cumsum(x) + np.pad(a, (pad[0][0], pad[1][0]))
    for threads in (1, 2, 3, 8):
        np.testing.assert_array_equal(run(lambda v, w: rlx.cumsum(v) + rlx.pad(w, *pad), x, a, threads=threads), expected)


# -- plain kernels and their schedule ------------------------------------------------------------------------------

OPS: dict[str, Callable[[Any, int, bool], Any]] = {
    "argmax": lambda x, axis, flag: rlx.argmax(x, axis=axis, keepdims=flag),
    "argmin": lambda x, axis, flag: rlx.argmin(x, axis=axis, keepdims=flag),
    "cumsum": lambda x, axis, flag: rlx.cumsum(x, axis=axis, reverse=flag),
    "sums before": lambda x, axis, flag: rlx.cumsum(x, axis=axis, reverse=flag, exclusive=True),
    "sort": lambda x, axis, flag: rlx.sort(x, descending=flag),
    "top_k": lambda x, axis, flag: rlx.top_k(x, k=min(3, x.dims[-1]), largest=flag),
}
PLAIN = Target("plain", frozenset(d.name for d in KINDS.values()))  # leaves every kernel as lowered


def plain_kernel(make: Callable[[Any], Any], dims: Sequence[int], dtype: rlx.DType) -> Kernel:
    g = rlx.Graph("plain")
    made = make(g.input("x", dims, dtype))
    g.set_outputs(made if isinstance(made, tuple) else [made])
    (step,) = lower(g, PLAIN, rlx.CompileOptions()).steps
    return step.kernel


def on_ref(kernel: Kernel, x: np.ndarray) -> list[np.ndarray]:
    arrays = [np.full(b.size, 77, b.dtype.numpy) if b.writable else x.reshape(-1) for b in kernel.buffers]
    assert run_kernel(kernel, arrays) == 0
    return [a for a, b in zip(arrays, kernel.buffers) if b.writable]


def is_plain(kernel: Kernel) -> bool:
    return any(isinstance(s, Sort) or (isinstance(s, Reduce) and s.op in EXTREMES) for s in walk(kernel.body))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(OPS)), st.booleans(), st.sampled_from(list(KINDS)), st.sampled_from([1, 2, 16]),
    st.sampled_from(["normal", "ties", "nan", "zeros"]), st.integers(0, 2), st.integers(1, 3), st.integers(1, 300),
    st.sampled_from([1, 3, 15, 16, 33, 1024, 1030]),
)  # fmt: skip
def test_a_schedule_changes_no_result(
    name: str, flag: bool, dtype: str, threads: int, kind: str, axis: int, outer: int, length: int, inner: int
) -> None:
    """Dims with the op's axis first, in the middle or last; lengths around a block, a vector and a run of columns."""
    sorts = name in ("sort", "top_k")  # along the last axis: many short rows, or a few
    inner = min(inner, 40) if sorts else inner
    dims = {0: (min(length, 9), inner), 1: (outer, min(length, 4 if sorts else 40), inner), 2: (outer, length)}[axis]
    axis = len(dims) - 1 if sorts else axis if axis < 2 else 1
    assume(dims[axis] > 1 or not (sorts or "arg" in name))  # nothing is searched or sorted
    kind = kind if np.dtype(dtype).kind == "f" or kind == "ties" else "normal"
    kernel = plain_kernel(lambda x: OPS[name](x, axis, flag), dims, KINDS[dtype])
    scheduled, loops = schedule(kernel, threads), in_loops(kernel)
    intel = target_for("x86_64-unknown-linux-gnu", "x86-64-v4", ("avx512fp16",), threads).schedule(kernel)  # a few rows at once
    assert is_plain(kernel) == (sorts or "arg" in name) and not is_plain(scheduled) and not is_plain(loops)
    assert scheduled.buffers == loops.buffers == kernel.buffers
    x = some_of(kind, dims, dtype)
    want = on_ref(kernel, x)
    for other in (scheduled, loops, intel):
        for a, b in zip(on_ref(other, x), want, strict=True):
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("columns", [1, 8, 33])
def test_code_of_extremes_and_sorts_inside_loops(columns: int) -> None:
    x = some_of("ties", (6, columns), "float32")  # sums are exact
    x[1:, 1::3] = np.nan
    for kernel in (extremes_kernel(6, columns), sort_kernel(6, columns, False), sort_kernel(6, columns, True)):
        found, status = run_on_cpu(schedule(kernel, 1), [x.reshape(-1), None, None])
        arrays = [x.reshape(-1).copy(), *(np.zeros(b.size, b.dtype.numpy) for b in kernel.buffers[1:])]
        assert status == run_kernel(kernel, arrays) == 0
        for a, b in zip(found, arrays[1:], strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_schedule_depends_on_where_memory_is_contiguous() -> None:
    """Columns are scanned together, rows in blocks; a transposed operand turns one into the other, an extent keeps its axis."""
    down = plain_kernel(lambda x: rlx.argmax(x, axis=0), (50, 2048), rlx.f32)
    assert len(schedule(down, 2).locals) == 2 and [n for _, n in schedule(down, 2).grid] == [2]
    assert [n for _, n in schedule(down, 1).grid] == [1] and schedule(down, 1).body != down.body
    across = plain_kernel(lambda x: rlx.argmax(x, axis=1), (50, 2048), rlx.f32)
    assert schedule(across, 16).grid == across.grid and len(schedule(across, 16).body) == 5
    assert [n for _, n in schedule(across, 1).grid] == [10]  # a few lines together, where there are enough for the threads
    turned = plain_kernel(lambda x: rlx.argmax(x.T, axis=0), (50, 2048), rlx.f32)
    assert len(schedule(turned, 16).body) == 5
    totals = plain_kernel(lambda x: rlx.cumsum(x, axis=0), (50, 40), rlx.f32)
    assert [x.size for x in schedule(totals, 2).locals] == [40] and [n for _, n in schedule(totals, 2).grid] == [1]
    pointwise = plain_kernel(lambda x: rlx.exp(x), (50, 40), rlx.f32)
    assert schedule(pointwise, 2) is pointwise
    g = rlx.Graph("some columns")
    g.set_outputs([rlx.cumsum(g.input("x", (5, "n"), rlx.f32), axis=0)])
    (step,) = lower(g, PLAIN, rlx.CompileOptions().bind_extent("n", 64)).steps
    assert step.kernel.limits and schedule(step.kernel, 2).grid == step.kernel.grid and not schedule(step.kernel, 2).locals


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i8", "u64"])
def test_rows_are_sorted_by_every_schedule(dtype: str) -> None:
    """All or a few elements of short and of long rows, and of many, with ties, NaN, zeros of both signs, and the greatest
    integers."""
    kind, g, inputs = rlx.as_dtype(dtype), rlx.Graph("sorts"), {}
    outputs: list[rlx.Value] = []
    for n, rows in ((1, 2), (2, 2), (33, 2), (64, 2), (100, 2), (1000, 2), (3, 19), (40, 9)):
        x = (RNG.standard_normal((rows, n)) * 30).astype(np.int8).astype(kind.numpy)
        if kind.is_float:
            x[0, ::3], x[1, ::2], x[1, 1::5] = np.nan, -0.0, np.inf
        else:
            x[1, 2:] = np.iinfo(x.dtype).max
        inputs[f"x{n} {rows}"] = x
        v = g.input(f"x{n} {rows}", x.shape, kind)
        for count in {1, min(n, 5), n // 2, n} if rows == 2 else {2, n}:
            outputs += [part for largest in (False, True) for part in rlx.top_k(v, k=count, largest=largest)]
    g.set_outputs(outputs)
    c = rlx.Session().compile(g)
    c._executable.poison()  # type: ignore[attr-defined]
    for found, want in zip(c.run(inputs), evaluate(g, inputs)[0], strict=True):
        assert found.tobytes() == want.tobytes()


def test_exchanges_sort_zeros_and_ones() -> None:
    """And therefore all numbers (D. E. Knuth, 5.3.4, theorem Z)."""
    for n in range(1, 13):
        x = np.array(list(itertools.product((0, 1), repeat=n)))
        for run, count, j, length, item, apart in merge_exchange(n):
            for at in itertools.product(range(count), range(length)):
                i = substitute(item, dict(zip((run, j), map(const, at))))
                pair = [i.value, i.value + apart]  # type: ignore[attr-defined]
                x[:, pair] = np.sort(x[:, pair], axis=1)
        assert (np.diff(x, axis=1) >= 0).all(), n


@pytest.mark.parametrize("mode", ["add", "replace", "mul"])
def test_scatters_update_their_result(mode: str) -> None:
    """Few columns with indices of their own; a narrow dtype, which is rounded once; one line; fewer lines of updates; as many
    updates as elements; columns that are two dims; a narrow line, which fills its Local in lanes; one update of each narrow
    line."""
    g, inputs, target = rlx.Graph("few"), {}, get("cpu").target(threads=2)
    outputs: list[rlx.Value] = []
    kinds = ["f32", "bf16", "f64", "f32", "f32", "i32", "f16", "f16"]
    dims = [(3, 90, 4), (40, 6, 5), (4000,), (8, 20, 3), (2, 5, 3), (30, 8, 1, 3), (900,), (3, 90, 8)]
    some = [(3, 8, 4), (30, 9, 5), (9,), (5, 3, 3), (2, 5, 3), (30, 2, 1, 3), (9,), (3, 1, 8)]
    for n, kind in enumerate(kinds):
        axis, number = min(1, len(dims[n]) - 1), rlx.as_dtype(kind).numpy
        inputs |= {f"x{n}": RNG.integers(-3, 4, dims[n]).astype(number), f"u{n}": RNG.integers(1, 3, some[n]).astype(number)}
        inputs[f"at{n}"] = RNG.integers(0, dims[n][axis], some[n])
        x, at, u = (g.input(name, inputs[name].shape, inputs[name].dtype) for name in (f"x{n}", f"at{n}", f"u{n}"))
        outputs.append(rlx.scatter_elements(x if n else x + 1.0, at, u, axis=axis, mode=mode))
    g.set_outputs(outputs)
    steps = lower(g, target, rlx.CompileOptions(threads=2)).steps
    kernels = [step.kernel for step in steps if step.kernel.locals]
    copied = [n for n, kernel in enumerate(kernels) if updated_in_place(kernel, target).locals]
    assert copied == ([] if mode == "replace" else [1, 6, 7])
    for threads in (1, 2):
        c = rlx.Session().compile(g, rlx.CompileOptions(threads=threads))
        c._executable.poison()  # type: ignore[attr-defined]
        for found, want in zip(c.run(inputs), evaluate(g, inputs)[0], strict=True):
            np.testing.assert_array_equal(found, want)
    with pytest.raises(rlx.errors.IndexRangeError):
        c.run(inputs | {"at0": inputs["at0"] - 91})


@pytest.mark.parametrize("mode", ["add", "replace", "max"])
def test_rows_scattered_to_rows_are_looked_up_once_for_many_columns(mode: str) -> None:
    """Numbers of columns with a divisor that suits, with none, and too few; what is scattered is small whole numbers."""
    g, inputs = rlx.Graph("rows"), {}
    outputs: list[rlx.Value] = []
    for n, (rows, columns, count) in enumerate([(70, 96, 90), (900, 37, 60), (4, 33, 1), (6, 7, 20)]):
        x, u = (RNG.integers(-9, 9, (2, r, columns)).astype(np.float32) for r in (rows, count))
        inputs |= {f"x{n}": x, f"u{n}": u, f"at{n}": RNG.integers(0, rows, (1, count, 1))}
        a, at, b = (g.input(name, inputs[name].shape, inputs[name].dtype) for name in (f"x{n}", f"at{n}", f"u{n}"))
        outputs.append(rlx.scatter_elements(a, rlx.broadcast_to(at, dims=u.shape), b, axis=1, mode=mode))
    g.set_outputs(outputs)
    for threads in (1, 3):
        c = rlx.Session().compile(g, rlx.CompileOptions(threads=threads))
        c._executable.poison()  # type: ignore[attr-defined]
        for found, want in zip(c.run(inputs), evaluate(g, inputs)[0], strict=True):
            np.testing.assert_array_equal(found, want)
    with pytest.raises(rlx.errors.IndexRangeError):
        c.run(inputs | {"at1": inputs["at1"] + 900})


@pytest.mark.parametrize("f", [lambda x: rlx.sum(x, axis=1), lambda x: rlx.var(x, axis=1)], ids=["sum", "variance"])
def test_columns_that_lie_as_rows_do_have_lanes_along_them(f: Callable[[rlx.Value], rlx.Value]) -> None:
    """A variance reads a mean of each column besides. Short ones, and those apart in memory, stay as they were."""
    for dims, along in [((5, 40, 1), 40), ((70, 40, 1), 40), ((5, 8, 1), 5), ((5, 40, 7), None)]:
        g = rlx.Graph("columns")
        g.set_outputs([f(g.input("x", dims, "f32"))])
        for step in lower(g, PLAIN, rlx.CompileOptions()).steps:
            loops = [s for s in walk(schedule(step.kernel, 2).body) if isinstance(s, Loop) and s.vector]
            assert along is None or all(s.extent == along for s in loops)
            assert along is None or ([n for _, n in schedule(step.kernel, 2).grid] == [dims[0]]) == (along == 40)
        x = RNG.standard_normal(dims).astype(np.float32)
        np.testing.assert_allclose(rlx.compile(g).run({"x": x})[0], evaluate(g, {"x": x})[0][0], rtol=1e-5, atol=1e-6)
