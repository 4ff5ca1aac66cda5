"""Reductions as they are laid out for speed: values against numpy in double precision, and what was made of them."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from devices import TWO

import rlx
from rlx.backends.cuda.backend import target
from rlx.compiler import lower
from rlx.compiler.compilation import Compilation
from rlx.compiler.pipeline import run_passes
from rlx.compiler.reductions import _parts
from rlx.ir import DTYPES, Target
from rlx.ir import kernel as K
from rlx.ir.evaluate import evaluate
from rlx.ir.kernel_text import print_kernel

CASES = [
    ((37, 1001), (0, 1)), ((512, 600), (0, 1)), ((131, 4000), (0,)), ((5000, 33), (0,)), ((1 << 18,), (0,)), ((131101,), (0,)),
    ((6, 70, 48), (1,)), ((6, 70, 48), (0, 2)), ((40, 3, 50), (0, 1)), ((3, 1, 40, 64), (0, 2)), ((17, 40, 3), (0, 2)),
    ((2, 16, 5000), (1,)), ((9, 100), (0,)), ((1, 5), (0,)), ((4, 0, 3), (1, 2)),
]  # fmt: skip


def compiled(make, *dims, dtype=rlx.f32, threads=2) -> tuple[rlx.CompiledGraph, list[np.ndarray]]:
    g = rlx.Graph("r")
    g.set_outputs([make(*(g.input(f"x{i}", d, dtype) for i, d in enumerate(dims)))])
    rng = np.random.default_rng(len(dims[0]))
    arrays = [(rng.standard_normal(d) + 0.25).astype(dtype.numpy) for d in dims]
    return rlx.Session().compile(g, rlx.CompileOptions(threads=threads)), arrays


def run(c: rlx.CompiledGraph, arrays: list[np.ndarray]) -> np.ndarray:
    c._executable.poison()  # type: ignore[attr-defined]
    return c.run({f"x{i}": a for i, a in enumerate(arrays)})[0].astype(np.float64)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dims, axes", CASES)
def test_values(dims: tuple[int, ...], axes: tuple[int, ...], threads: int) -> None:
    for name in ("sum", "max", "mean") if 0 not in dims else ("sum",):
        for keep in (False, True):
            made = partial(getattr(rlx, name), axis=axes, keepdims=keep)
            c, (x,) = compiled(made, dims, threads=threads)
            wanted = getattr(np, name)(x.astype(np.float64), axis=axes, keepdims=keep)
            got = run(c, [x])
            assert got.shape == wanted.shape
            np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6 * math.prod(dims))
            assert np.array_equal(got, run(c, [x])), "not the same from run to run"


@pytest.mark.parametrize("dims, axes", CASES[:8])
def test_partial_sums_of_narrow_floats_are_not_rounded(dims: tuple[int, ...], axes: tuple[int, ...]) -> None:
    c, (x,) = compiled(lambda v: rlx.sum(v, axis=axes), dims, dtype=rlx.bf16)
    exact = np.sum(x.astype(np.float64), axis=axes)
    np.testing.assert_allclose(run(c, [x]), exact, rtol=2**-8, atol=1e-6 * math.prod(dims))  # one rounding to bf16


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_nan_and_infinity_come_through(axes: tuple[int, ...]) -> None:
    c, (x,) = compiled(lambda v: rlx.max(v, axis=axes), (600, 400))
    for odd in (np.nan, np.inf):
        x[577, 399] = odd
        np.testing.assert_array_equal(run(c, [x]), np.max(x, axis=axes))


@pytest.mark.parametrize("axes", [(0,), (0, 1)])
def test_what_is_summed_is_computed_on_the_way(axes: tuple[int, ...]) -> None:
    """No product is written to memory, and reads go through it in order."""
    c, arrays = compiled(lambda x, y: rlx.sum(x * y, axis=axes), (512, 600), (512, 600))
    wanted = np.sum(arrays[0].astype(np.float64) * arrays[1], axis=axes)
    np.testing.assert_allclose(run(c, arrays), wanted, rtol=1e-4, atol=1e-2)
    program = c.program()
    assert max(b.size for s in program.steps for b in s.kernel.buffers if b.writable) <= 64 * 600
    for step in program.steps:
        for loop in (s for s in K.walk(step.kernel.body) if isinstance(s, K.Loop) and s.vector):
            loads = [e for e in K.walk((loop.body, loop.reduces)) if isinstance(e, K.Load)]
            assert all(K.coefficient(e.index, loop.var) == 1 for e in loads), print_kernel(step.kernel)


@pytest.mark.parametrize("dims, axes", [((1 << 20,), (0,)), ((4096, 512), (0,)), ((1024, 1024), (0, 1))])
def test_large_reductions_have_work_for_all_threads(dims: tuple[int, ...], axes: tuple[int, ...]) -> None:
    c, _ = compiled(lambda v: rlx.sum(v, axis=axes), dims)
    first = c.program().steps[0].kernel
    assert math.prod(n for _, n in first.grid) >= 8, str(first)


def test_rows_whose_elements_are_reductions_are_not_fetched_ahead() -> None:
    """Of a buffer large enough for it: what is read depends on the inner reduction's loop."""
    c, (x,) = compiled(lambda v: rlx.softmax(rlx.sum(v, axis=1)), (300, 8, 384))
    total = x.astype(np.float64).sum(axis=1)
    e = np.exp(total - total.max(axis=-1, keepdims=True))
    np.testing.assert_allclose(run(c, [x]), e / e.sum(axis=-1, keepdims=True), rtol=1e-4, atol=1e-7)


LONG = [(40_000_000, 1), (10_000_001, 2), (100_003, 2), (8193, 1)]


@pytest.mark.parametrize("n, threads", LONG)
def test_long_sums_lose_no_digits(n: int, threads: int) -> None:
    """One number over and over: every addition in f32 would round the same way (2.7e-3 of a sum of 4e7)."""

    def make(v: rlx.Value) -> rlx.Value:
        many = rlx.broadcast_to(v, (n,))  # takes no memory
        return rlx.concat([rlx.sum(many, axis=0, keepdims=True), rlx.mean(many * many, axis=0, keepdims=True)])

    g = rlx.Graph("r")
    g.set_outputs([make(g.input("x0", (1,), rlx.f32))])
    one = np.float32(0.1)
    got = run(rlx.Session().compile(g, rlx.CompileOptions(threads=threads)), [np.full(1, one)])
    np.testing.assert_allclose(got, [np.float64(one) * n, np.float64(one * one)], rtol=1e-6)


TALL = [((100_003, 3), (0,)), ((20_000, 70), (0,)), ((3, 9001, 70), (1,)), ((2, 50, 200), (1, 2))]


@pytest.mark.parametrize("dims, axes", TALL)
@pytest.mark.parametrize("device", TWO)
def test_long_sums_down_columns_lose_no_digits(device: str, dims: tuple[int, ...], axes: tuple[int, ...]) -> None:
    g = rlx.Graph("r")
    g.set_outputs([rlx.sum(g.input("x0", dims, rlx.f32), axis=axes)])
    one = np.float32(0.1)
    (got,) = rlx.Session(device).compile(g, rlx.CompileOptions(threads=1)).run({"x0": np.full(dims, one)})
    np.testing.assert_allclose(got, np.float64(one) * math.prod(dims[a] for a in axes), rtol=1e-6)


@pytest.mark.parametrize("device", TWO)
def test_norms_of_long_rows_lose_no_digits(device: str) -> None:
    g = rlx.Graph("r")
    g.set_outputs([rlx.layer_norm(g.input("x0", (2, 300_001), rlx.f32)), rlx.softmax(g.inputs[0])])
    x = np.full((2, 300_001), 0.1, np.float32)
    x[:, ::2] = 0.7
    norm, soft = rlx.Session(device).compile(g, rlx.CompileOptions(threads=1)).run({"x0": x})
    wide = x.astype(np.float64)
    want = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(norm, want, rtol=3e-6)
    e = np.exp(wide)
    np.testing.assert_allclose(soft, e / e.sum(1, keepdims=True), rtol=2e-6)


def test_short_rows_are_summed_in_one_go() -> None:
    for n, loops in ((8192, 1), (8193, 3)):  # blocks, what is in one, the rest
        c, _ = compiled(lambda v: rlx.sum(v, axis=-1), (4, n), threads=1)
        (step,) = c.program().steps
        assert sum(isinstance(s, K.Loop) for s in K.walk(step.kernel.body)) == loops


@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16"])
def test_of_two_zeros_the_same_operand_is_taken_at_every_position(dtype: str) -> None:
    """In whole vectors, and in the rest behind them."""
    numpy = rlx.as_dtype(dtype).numpy
    zeros, others = np.array([[0.0, -0.0]] * 500, numpy).ravel(), np.array([[-0.0, 0.0]] * 500, numpy).ravel()
    for n in (1, 7, 16, 67, 1000):
        g = rlx.Graph("zeros")
        x, y = g.input("x", (n,), dtype), g.input("y", (n,), dtype)
        g.set_outputs([rlx.maximum(x, y), rlx.minimum(x, y), rlx.relu(x), rlx.maximum(0.0, x), rlx.clip(x, 0.0, 1.0)])
        for found in rlx.compile(g, threads=1)(zeros[:n], others[:n]):
            negative = np.signbit(found.astype(np.float64))
            assert not found.any() and all((negative[at::2] == negative[at]).all() for at in range(min(n, 2)))


@pytest.mark.parametrize("dims, axes", [((1024, 8, 1, 8), (0, 2, 3)), ((8, 8, 8, 7), (0, 1, 3)), ((6, 3, 512, 5, 9), (0, 2, 4))])
def test_short_rows_come_last_where_results_are_few_for_many_threads(dims: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """A thread of a GPU for each result would sum all of its elements."""
    g = rlx.Graph("few")
    g.set_outputs([rlx.sum(g.input("x", dims, "i32"), axis=axes)])
    many, few = (Target("any", frozenset(DTYPES), threads=n, points_per_thread=64 / n) for n in (1 << 18, 2))
    passed = run_passes(g, Compilation(many, rlx.CompileOptions()))
    x = np.random.default_rng(0).integers(-9, 9, dims, np.int32)
    np.testing.assert_array_equal(evaluate(passed, {"x": x})[0][0], x.sum(axes, np.int32))
    found = [n.attrs.axis for n in passed.nodes() if n.op.name == "sum"]  # type: ignore[union-attr]
    assert len(found) >= 2 and all(len(axis) == 1 for axis in found)
    (whole,) = [n for n in run_passes(g, Compilation(few, rlx.CompileOptions())).nodes() if n.op.name == "sum"]
    assert len(whole.attrs.axis) > 1  # type: ignore[union-attr]


def test_parts_begin_where_vectors_do() -> None:
    target = Target("any", frozenset(DTYPES), threads=1 << 18, points_per_thread=99 / (1 << 18), point_elements=4096)
    assert _parts((117 * 111924,), 0, target) == 117  # and not 108, of which each part has an odd number of elements
    assert _parts((1 << 20,), 0, target) == 128


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [rlx.f32, rlx.bf16], ids=str)
@pytest.mark.parametrize("dims, axes", [*CASES, ((0, 3, 4), (0, 2)), ((4, 3, 0), (0, 2)), ((3, 1, 70, 4), (0, 2))])
def test_variances(dims: tuple[int, ...], axes: tuple[int, ...], dtype: rlx.ir.DType, threads: int) -> None:
    """Adjacent axes are one, and unit dims between them do not part them; of nothing it is NaN."""
    for keep in (False, True):
        c, (x,) = compiled(lambda v, keep=keep: rlx.variance(v, axis=axes, keepdims=keep), dims, dtype=dtype, threads=threads)
        with np.errstate(invalid="ignore"):
            wide = x.astype(np.float64)
            centred = wide - wide.sum(axes, keepdims=True) / math.prod(dims[a] for a in axes)
            wanted = (centred**2).sum(axes, keepdims=keep) / np.float64(math.prod(dims[a] for a in axes))
        got = run(c, [x])
        assert got.shape == wanted.shape
        np.testing.assert_allclose(got, wanted, rtol=1e-5 if dtype == rlx.f32 else 2**-8)


def kernels(build, *dims: tuple[int, ...], dtype: str = "bf16") -> list[tuple[str, dict[str, str]]]:
    """(name, dtypes of large buffers) of each kernel for an H200."""
    g = rlx.Graph("r")
    made = build(*(g.input(f"x{i}", d, dtype) for i, d in enumerate(dims)))
    g.set_outputs(made if isinstance(made, list) else [made])
    steps = lower(g, target("sm_90a"), rlx.CompileOptions()).steps
    return [(s.kernel.name, {b.name: b.dtype.name for b in s.kernel.buffers if b.size >= 1 << 16}) for s in steps]


def test_variances_on_a_gpu_read_what_is_stored_narrow() -> None:
    """In one kernel where it may read a row or column again; else by parts of rows, or each step casts for itself."""
    for dims, axes in (((16, 4000), (0, 1)), ((2, 100, 700), (1, 2)), ((4096, 400), (0,))):
        assert len(kernels(lambda v, axes=axes: rlx.variance(v, axis=axes), dims)) == 1
        assert len(kernels(lambda v, axes=axes: rlx.variance(v, axis=axes), dims, dtype="f32")) == 1
    for dims, axes, count in (((4096, 4096), (0, 1), 2), ((400, 4096, 4), (0, 1), 6)):
        several = kernels(lambda v, axes=axes: rlx.variance(v, axis=axes), dims)
        assert len(several) == count and all(set(large.values()) <= {"bf16"} for _, large in several)


@pytest.mark.parametrize(
    "dims, axes", [((60, 400, 16), (0, 1)), ((3, 90_000), (1,)), ((2, 40, 3000), (1, 2)), ((4, 300, 1, 200), (1, 3))]
)
def test_what_is_reduced_in_steps_may_have_operands_along_other_axes(dims: tuple[int, ...], axes: tuple[int, ...]) -> None:
    """They keep their axes where those of the elements are divided or merged."""
    other = tuple(1 if a in axes else d for a, d in enumerate(dims))
    c, (x, y) = compiled(lambda x, y: rlx.sum((x - y) * y, axis=axes), dims, other)
    np.testing.assert_allclose(run(c, [x, y]), ((x.astype(np.float64) - y) * y).sum(axes), rtol=1e-4, atol=1e-2)
    assert max(b.size for s in c.program().steps for b in s.kernel.buffers if b.writable) < math.prod(dims) // 8


def test_several_reductions_compute_an_operand_once() -> None:
    """The narrow value is stored, not computed by each, and not the wide one."""

    def build(v):
        wide = rlx.gelu(rlx.tanh(v)).astype(rlx.f32)
        return [rlx.sum(wide, axis=(0, 1)), rlx.sum(wide * wide, axis=(0, 1)), rlx.max(wide, axis=(0, 1))]

    made = kernels(build, (64, 64, 500))
    assert sum("tanh" in name for name, _ in made) == 1 and all(set(large.values()) <= {"bf16"} for _, large in made)


def test_equal_results_of_one_element_each_are_one_value() -> None:
    """A reduction over dims of 1 leaves its elements as they are. Two values of one computation, prepared from a param, would be
    one buffer, which no kernel may write twice."""

    def kept(y: rlx.Value) -> list[rlx.Value]:
        return [rlx.concat(y, y, rlx.prod(y, axis=0, keepdims=True), axis=0)]

    def dropped(y: rlx.Value) -> list[rlx.Value]:
        a, b = rlx.sum(y, axis=0), rlx.max(y, axis=0)
        return [rlx.concat(a, a, b, axis=0), rlx.sort(b)[0], y]

    for make, wanted in ((kept, ([[1, 2, 0]] * 3,)), (dropped, ([1, 2, 0] * 3, [0, 1, 2], [[1, 2, 0]]))):
        g = rlx.Graph("ones")
        g.set_outputs(make(rlx.cast(rlx.abs(g.param("x", (1, 3), rlx.bf16)), dtype=rlx.f32)))
        c = rlx.compile(g)
        c.set_param("x", np.array([[1, -2, 0]], rlx.bf16.numpy))
        assert [a.tolist() for a in c.run({})] == list(wanted)
        assert str(c.program()).count("  cast(") <= 1
