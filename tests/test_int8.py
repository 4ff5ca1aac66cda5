"""precision="int8": within the stated bound of the f64 product; NaN keeps to its row or column; one kernel per contraction."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import TARGETS
from sentences import sentences

import rlx
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.target import target_for
from rlx.compiler.channels_last import channels_last
from rlx.compiler.compilation import Compilation
from rlx.compiler.precision import precision
from rlx.errors import CompileError
from rlx.ir import ops
from rlx.ir.evaluate import evaluate
from rlx.ir.target import Target
from rlx.models import default_folder, load

INT8 = rlx.CompileOptions(precision="int8", threads=1)
SHAPES = [(1, 1, 1), (1, 100, 33), (5, 7, 9), (8, 48, 64), (33, 97, 385), (16, 50, 2), (130, 49, 66), (3, 200, 1023)]  # m, n, k


def product(m: int, n: int, k: int, options: rlx.CompileOptions = INT8) -> rlx.CompiledGraph:
    g = rlx.Graph("product")
    x, w = g.input("x", (m, k), rlx.f32), g.param("w", (k, n), rlx.f32)
    g.set_outputs([x @ w])
    return rlx.Session(rlx.Device.CPU).compile(g, options)


def run(compiled: rlx.CompiledGraph, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    compiled.set_param("w", w)
    return compiled.run({"x": x})[0]


def bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """As rlx.compiler.int8 says; and of f32, eight roundings of terms no larger than the largest sum."""
    x, w = x.astype(np.float64), w.astype(np.float64)
    span, peak = (x.max(1) - x.min(1))[:, None], np.abs(w).max(0)
    rounded = span / 510 * np.abs(w).sum(0) + peak / 254 * (np.abs(x).sum(1)[:, None] + x.shape[1] * span / 510)
    return rounded + 8 * 2.0**-24 * x.shape[1] * peak * (span + np.abs(x).max(1)[:, None])


def data(m: int, n: int, k: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k), np.float32), rng.standard_normal((k, n), np.float32)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_within_the_bound(shape):
    compiled, (x, w) = product(*shape), data(*shape)
    for rows in (x, np.abs(x), x * 1e20, x * 1e-20, x + 100, np.where(x > 2, 50 * x, x)):  # one sign, sizes, an offset, outliers
        error = np.abs(run(compiled, rows, w) - rows.astype(np.float64) @ w)
        assert (error <= bound(rows, w)).all(), error.max()


def test_it_is_not_the_f32_product():
    x, w = data(8, 48, 64)
    assert np.abs(run(product(8, 48, 64), x, w) - x.astype(np.float64) @ w).max() > 1e-3


def test_values_that_integers_can_hold_are_exact():
    """Rows of whole numbers from 0 to 255, columns from -127 to 127, each with both ends: only f32 roundings are left."""
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 256, (9, 70)).astype(np.float32), rng.integers(-127, 128, (70, 50)).astype(np.float32)
    x[:, 0], x[:, 1], w[2] = 0, 255, 127
    np.testing.assert_allclose(run(product(9, 50, 70), x, w), x.astype(np.float64) @ w, rtol=1e-6, atol=1)  # sums reach 1e6


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_in_its_row_and_column(bad):
    compiled, (x, w) = product(20, 50, 33), data(20, 50, 33)
    plain = run(compiled, x, w)
    x[7, 5] = bad
    found = run(compiled, x, w)
    assert np.isnan(found[7]).all() and (np.delete(found, 7, 0) == np.delete(plain, 7, 0)).all()
    x, w = data(20, 50, 33)
    w[3, 11] = bad
    found = run(compiled, x, w)
    assert np.isnan(found[:, 11]).all() and (np.delete(found, 11, 1) == np.delete(plain, 11, 1)).all()


def test_rows_and_columns_without_a_span():
    x, w = data(5, 50, 33)
    x[0], x[1], x[2], w[:, 4] = 0, 1.5, 1e-38, 0
    found = run(product(5, 50, 33), x, w)
    assert (found[0] == 0).all() and (found[:, 4] == 0).all()
    assert (np.abs(found - x.astype(np.float64) @ w) <= bound(x, w)).all()


def test_same_bits_at_any_thread_count():
    x, w = data(150, 97, 70)
    bits = {run(product(150, 97, 70, INT8.replace(threads=n)), x, w).tobytes() for n in (1, 2, 3)}
    assert len(bits) == 1


def test_a_layer_quantises_in_the_stores_of_contractions():
    """Two contractions with gelu between them: one kernel that rounds x, and one for each contraction."""
    g = rlx.Graph("layer")
    x, w, v = g.input("x", (12, 40), rlx.f32), g.param("w", (40, 60), rlx.f32), g.param("v", (60, 40), rlx.f32)
    b = g.param("b", (60,), rlx.f32)
    g.set_outputs([rlx.gelu(x @ w + b) @ v + x])
    compiled = rlx.Session(rlx.Device.CPU).compile(g, INT8)
    steps = compiled.program().steps
    assert [s.kernel.origin.count("int8_matmul") for s in steps] == [0, 1, 1]
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(dims, np.float32) for name, dims in (("w", (40, 60)), ("v", (60, 40)), ("b", (60,)))}
    for name, array in arrays.items():
        compiled.set_param(name, array)
    rows = rng.standard_normal((12, 40), np.float32)
    plain = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions(threads=1))
    for name, array in arrays.items():
        plain.set_param(name, array)
    found, want = compiled.run({"x": rows})[0], plain.run({"x": rows})[0]
    assert 0 < np.abs(found - want).max() < 0.02 * np.abs(want).max()


def test_only_contractions_by_weights_change():
    g = rlx.Graph("some")
    x, y, w = g.input("x", (4, 8), rlx.f32), g.input("y", (8, 3), rlx.f32), g.param("w", (8, 3), rlx.f32)
    wide, deep = g.param("wide", (8, 3), rlx.f64), g.param("deep", (1 << 16, 2), rlx.f32)
    stack, column = g.param("stack", (2, 8, 3), rlx.f32), g.param("column", (8,), rlx.f32)
    large = g.input("large", (1, 1 << 16), rlx.f32)
    empty, none = g.input("empty", (4, 0), rlx.f32), g.param("none", (0, 3), rlx.f32)
    made = [x @ w, x @ y, x.astype(rlx.f64) @ wide, large @ deep, x @ stack, x @ column, empty @ none, w.T @ w]
    g.set_outputs(made)
    notes: list = []
    found = precision(g, Compilation(TARGETS["host"], INT8), notes)
    assert [n.op.name for n in found.nodes() if n.op.name.endswith("matmul")].count("int8_matmul") == 1
    assert [r.how for r in notes] == ["narrowed"] + ["kept"] * 5
    assert {r.why for r in notes[1:2]} == {"its right operand is not a weight"}


IMAGES = [
    ((2, 7, 9, 8), (3, 3, 8, 20), {"low": 1, "high": 1}), ((3, 6, 6, 64), (1, 1, 64, 33), {"strides": 2}),
    ((2, 9, 17, 5), (2, 3, 5, 70), {"dilation": (2, 1)}), ((1, 11, 40), (4, 40, 9), {"strides": 3}),
]  # fmt: skip


@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
@pytest.mark.parametrize(("dims", "kernel", "how"), IMAGES, ids=str)
def test_convolutions_are_within_the_bound_of_their_image(dims, kernel, how, first):
    """Whatever the sizes of other images; a NaN makes all of its image NaN, and no other. Windows of one pixel are rows of
    their own: there it makes the pixel NaN."""
    rng, g, spatial = np.random.default_rng(0), rlx.Graph("images"), tuple(range(1, len(dims) - 1))
    images, weights = rng.standard_normal(dims, np.float32), rng.standard_normal(kernel, np.float32)
    images *= 10.0 ** np.arange(dims[0]).reshape(-1, *(1,) * (len(dims) - 1))
    x, w = g.input("x", np.moveaxis(images, -1, 1).shape if first else dims, rlx.f32), g.param("w", kernel, rlx.f32)
    turned = w.transpose(len(dims) - 1, len(dims) - 2, *(a - 1 for a in spatial)) if first else w
    y = ops.conv(x, turned, channels_last=not first, **how)
    g.set_outputs([y.transpose(0, *(a + 1 for a in spatial), 1) if first else y])
    compiled = rlx.Session(rlx.Device.CPU).compile(g, INT8)
    compiled.set_param("w", weights)

    def given(x):
        return {"x": np.ascontiguousarray(np.moveaxis(x, -1, 1)) if first else x}

    def exact(x, w):
        return evaluate(g, given(x), {"w": w})[0][0].astype(np.float64)

    got = compiled.run(given(images))[0]
    span = np.ptp(images.reshape(dims[0], -1), axis=1).reshape(-1, *(1,) * (len(dims) - 1))
    peak, total = np.abs(weights).reshape(-1, kernel[-1]).max(0), np.abs(weights).reshape(-1, kernel[-1]).sum(0)
    sums = exact(np.abs(images), np.ones_like(weights)) + weights[..., 0].size * span / 510
    error = np.abs(got - exact(images, weights))
    assert (error <= 1.001 * (span / 510 * total + peak / 254 * sums)).all() and error.max() > 1e-4
    if dims[0] > 1:
        images[0, 2, 2] = np.nan
        after = compiled.run(given(images))[0]
        if kernel[0] > 1:
            assert np.isnan(after[0]).all()
            np.testing.assert_array_equal(after[1:], got[1:])
        else:
            assert np.isnan(after[0, 1, 1]).all()
            after[0, 1, 1] = got[0, 1, 1]
            np.testing.assert_array_equal(after, got)


@pytest.mark.parametrize("policy", ["int8", "bf16"])
def test_images_of_few_channels_stay_f32(policy):
    notes, g = [], rlx.Graph("image")
    x, w = g.input("x", (1, 3, 20, 20), rlx.f32), g.param("w", (8, 3, 3, 3), rlx.f32)
    g.set_outputs([ops.conv(x, w)])
    precision(g, Compilation(TARGETS["host"], INT8.replace(precision=policy)), notes)
    assert [r.how for r in notes] == ["kept"] and "few channels" in notes[0].why


@pytest.mark.parametrize("low", [0, 1])
@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
def test_images_of_three_channels_get_a_fourth_one(first, low):
    """Where instructions sum products of four bytes. Images far from zero keep all levels, unless there are zeros around them."""
    dims, (high, wide) = (2, 11, 13, 3), (3, 5)
    rng, g = np.random.default_rng(0), rlx.Graph("images")
    images = rng.uniform(90, 110, dims).astype(np.float32)
    weights = rng.standard_normal((64, 3, high, wide), np.float32)
    given = np.ascontiguousarray(np.moveaxis(images, -1, 1)) if first else images
    x, w, b = g.input("x", given.shape, rlx.f32), g.param("w", weights.shape, rlx.f32), g.param("b", (64,), rlx.f32)
    g.set_outputs([ops.conv(x if first else x.transpose(0, 3, 1, 2), w, b, low=low, high=low, strides=2)])
    target = target_for("x86_64-unknown-linux-gnu", "x86-64-v4", ("avx512vnni",))
    notes: list = []
    narrowed = precision(channels_last(g, Compilation(target, INT8)), Compilation(target, INT8), notes)
    assert [r.how for r in notes] == ["narrowed"]
    assert [n.inputs[0].dtype.name for n in narrowed.nodes() if n.op.name == "conv"] == ["u8"]
    params = {"w": weights, "b": rng.standard_normal(64, np.float32)}
    exact, found = (evaluate(graph, {"x": given}, params)[0][0].astype(np.float64) for graph in (g, narrowed))
    span = 20 if low == 0 else 110
    total, peak = np.abs(weights).reshape(64, -1).sum(1), np.abs(weights).reshape(64, -1).max(1)
    bound = span / 510 * total + peak / 254 * 3 * high * wide * (110 + span / 510)
    error = np.abs(found - exact).max((0, 2, 3))
    assert (error <= 1.001 * bound).all() and error.max() > 1e-3
    compiled = rlx.Session(rlx.Device.CPU).compile(g, INT8)
    for name, array in params.items():
        compiled.set_param(name, array)
    assert (np.abs(compiled.run({"x": given})[0] - exact).max((0, 2, 3)) <= 1.001 * bound).all()


def test_an_attention_layer_keeps_its_attention():
    g = rlx.Graph("layer")
    x, w = g.input("x", (2, 4, 8), rlx.f32), g.param("w", (8, 8), rlx.f32)
    h = ops.linear(x, w).reshape((2, 4, 2, 4)).transpose(0, 2, 1, 3)
    g.set_outputs([ops.attention(h, h, h)])
    claimed = rlx.Session(rlx.Device.CPU).compile(g, INT8).program()
    assert [s.kernel.origin[0] for s in claimed.steps if "attention" in s.kernel.origin] == ["attention"]


@pytest.mark.parametrize(("features", "narrow"), [(("avx512bf16",), True), ((), False)])
def test_attention_is_narrow_where_the_target_is_fast_at_it(features, narrow):
    target = with_natives(target_for("x86_64-linux-gnu", "x86-64-v4", features))
    g = rlx.Graph("layer")
    x, w = g.input("x", (2, 40, 8), rlx.f32), g.param("w", (8, 32), rlx.f32)
    h = ops.linear(x, w).reshape((2, 40, 2, 16)).transpose(0, 2, 1, 3)
    g.set_outputs([ops.attention(h, h, h)])
    notes: list = []
    found = precision(g, Compilation(target, INT8), notes)
    (node,) = (n for n in found.nodes() if n.op.name == "attention")
    assert {v.dtype for v in node.inputs} == {rlx.bf16 if narrow else rlx.f32}
    assert [(r.op, r.how, r.why) for r in notes] == [
        ("matmul", "narrowed", "8-bit integers"), *[("attention", "narrowed", "native in bf16")] * narrow,
    ]  # fmt: skip
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((2, 40, 8), np.float32)}, {"w": rng.standard_normal((8, 32), np.float32)}
    made, want = (evaluate(graph, *given)[0][0] for graph in (found, g))
    assert made.dtype == np.float32 and np.abs(made - want).max() < 0.05 * np.abs(want).max()


@pytest.mark.parametrize("leaf", ["input", "param"])
def test_a_long_chain_before_a_product_does_not_end_in_a_recursion_error(leaf):
    g = rlx.Graph("deep")
    x, w = getattr(g, leaf)("x", (4, 8), rlx.f32), g.param("w", (8, 3), rlx.f32)
    for _ in range(3000):
        x = ops.neg(x)
    g.set_outputs([x @ w])
    found = precision(g, Compilation(TARGETS["host"], INT8))
    assert [n.op.name for n in found.nodes()].count("int8_matmul") == (leaf == "input")  # two weights are not narrowed


def test_a_target_without_the_integers_is_refused():
    with pytest.raises(CompileError, match="precision='int8': no 'i32', 'u8' on small; it has 'f32', 'i8'"):
        g = rlx.Graph("g")
        g.set_outputs([g.input("x", (2, 2), rlx.f32) @ g.param("w", (2, 2), rlx.f32)])
        precision(g, Compilation(Target("small", frozenset({"f32", "i8"})), INT8))


@pytest.mark.parametrize(("policy", "cosine", "apart"), [("bf16", 0.9998, 0.004), ("int8", 0.985, 0.05)])
def test_embeddings_stay_close(policy, cosine, apart):
    """MiniLM over sentences: about twice the errors measured over 200 of them, which docs/benchmarks.md lists. Each of six
    layers rounds four operands to 2^-9 (bf16) or to half of 1/255 of their span; the errors add up from layer to layer."""
    texts = sentences(60, longest=40)
    want = load(default_folder()).embed(texts)
    found = load(default_folder(), options=rlx.CompileOptions(precision=policy)).embed(texts)
    assert 1e-5 < np.abs(found - want).max() < apart
    assert (found * want).sum(1).min() > cosine
