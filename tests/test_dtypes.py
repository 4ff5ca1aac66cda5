"""Narrow floats and complex numbers wherever values go; contractions of two dtypes, whose weights stay narrow."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
from devices import TWO as DEVICES

import rlx
from rlx import knobs
from rlx.errors import DTypeError
from rlx.ir.dtype import DTYPES, DType, as_dtype, index_
from rlx.ir.graph import Graph, Value

F8 = ("f8e4m3", "f8e5m2")
RNG = np.random.default_rng(3)


def run(build, device: str = "cpu", **inputs: np.ndarray) -> list[np.ndarray]:
    """The outputs of `build` over these inputs."""
    g = Graph("dtypes")
    made = build(*(g.input(name, a.shape, as_dtype(a.dtype)) for name, a in inputs.items()))
    g.set_outputs(made if isinstance(made, (list, tuple)) else [made])
    return rlx.Session(device).compile(g, rlx.CompileOptions(threads=2)).run(inputs)


def every(dtype: str) -> np.ndarray:
    """All 256 values of an 8-bit float."""
    return np.arange(256, dtype=np.uint8).view(as_dtype(dtype).numpy)


def same(found: np.ndarray, want: np.ndarray) -> None:
    """Equal bits, but for the payload of a NaN."""
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of comparing NaN
        raw = [np.ascontiguousarray(a).view(f"u{a.itemsize}") for a in (found, want)]
        assert ((raw[0] == raw[1]) | ((found != found) & (want != want))).all()


# -- 8 bits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*rlx.DTYPES.values(), index_], ids=repr)
def test_copies_of_a_dtype_are_the_same_object(dtype: rlx.DType) -> None:
    """Each dtype is one object, so that the compiler may compare them by identity."""
    assert copy.copy(dtype) is copy.deepcopy(dtype) is pickle.loads(pickle.dumps(dtype)) is dtype


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_a_dtype_equals_its_name_and_its_numpy_form(dtype: DType) -> None:
    for form in (dtype.name, dtype.numpy, dtype.numpy.type):
        assert dtype == form and form == dtype, form
    others = [other for other in DTYPES.values() if other is not dtype]
    assert not any(dtype == form or form == dtype for other in others for form in (other, other.name, other.numpy))
    assert dtype != "number" and dtype != "" and dtype != 32 and dtype is not None and dtype not in (None, [], object)
    assert len({dtype, *DTYPES.values()}) == len(DTYPES)



@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", F8)
def test_f32_becomes_f8_as_ml_dtypes_rounds_it(dtype: str, device: str) -> None:
    """Every value, the ones half way between two, their neighbours, what is too large, and NaN."""
    values = every(dtype).astype(np.float32)
    with np.errstate(all="ignore"):
        finite = np.unique(values[np.isfinite(values)])
        half = (finite[1:] + finite[:-1]) / 2
        odd = np.array([np.nan, -np.nan, np.inf, -np.inf, 1e30, -1e30, 448, 464, 465, 480, 57344, 61440, 61439, 1e-12, -1e-12])
        x = np.concatenate([values, half, np.nextafter(half, np.inf), np.nextafter(half, -np.inf), odd]).astype(np.float32)
        want = x.astype(as_dtype(dtype).numpy)
        there, back = run(lambda x: [(y := x.astype(dtype)), y.astype("f32")], device, x=x)
        same(there, want)
        same(back, want.astype(np.float32))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", F8)
def test_f8_through_views_and_states(dtype: str, device: str) -> None:
    """Ops that only move values keep them; a NaN stays a NaN."""
    x = every(dtype).reshape(4, 64)
    g = Graph("moves")
    v, handle = g.input("x", (4, 64), dtype), rlx.BufferHandle("state", (4, 64), dtype)
    old = g.handle(handle)
    g.assign(old, rlx.where(rlx.is_nan(old), v, v))
    g.set_outputs([v.T, rlx.concat([v, old]), v[::-1, 3:9], rlx.pad(v, (1, 0), (0, 2), value=0.4), rlx.gather(v, [3, 0, 3])])
    compiled = rlx.Session(device).compile(g, rlx.CompileOptions().bind_handle(handle))
    state = every(dtype)[::-1].reshape(4, 64).copy()
    compiled.bind_handle("state", state)
    turned, joined, cut, padded, picked = compiled.run({"x": x})
    found = [turned, joined, cut, picked, padded[0], padded[1:, :64], compiled.read_handle("state")]
    want = [x.T, np.concatenate([x, state]), x[::-1, 3:9], x[[3, 0, 3]], np.full(66, 0.4).astype(x.dtype), x, x]
    for a, b in zip(found, want, strict=True):
        same(a, b)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", F8)
def test_arithmetic_on_f8_computes_in_f32_and_rounds_its_result(dtype: str, device: str) -> None:
    host = as_dtype(dtype).numpy
    a, b = (RNG.normal(0, 2, (3, 37)).astype(host) for _ in range(2))
    x, y = a.astype(np.float32), b.astype(np.float32)
    found = run(lambda x, y: [x + y, x * y, rlx.maximum(x, y), rlx.less(x, y), rlx.sum(x, axis=-1), -x / 3], device, x=a, y=b)
    for got, want in zip(found, [x + y, x * y, np.maximum(x, y), x < y, x.sum(-1), -x / 3], strict=True):
        same(got, want if want.dtype == bool else want.astype(host))


@pytest.mark.parametrize("device", ["ref", "ref:1", "cpu"])
@pytest.mark.parametrize("other", F8)
@pytest.mark.parametrize("dtype", F8)
@pytest.mark.parametrize("m", [1, 3, 70])
def test_products_of_f8_are_f32_and_take_scales(dtype: str, other: str, device: str, m: int) -> None:
    """As training in 8 bits does: x / s rounds to f8, the product of two is scaled back."""
    x, w = RNG.normal(0, 100, (m, 96)).astype(np.float32), RNG.normal(0, 0.01, (96, 80)).astype(np.float32)
    g = Graph("scaled")
    v, scale = g.input("x", x.shape, "f32"), g.param("scale", (80,), "f32")
    y = (v / 50.0).astype(dtype) @ g.param("w", w.shape, other)
    assert y.dtype == rlx.f32
    g.set_outputs([rlx.gelu(y * scale * 50.0)])
    compiled = rlx.Session(device).compile(g, rlx.CompileOptions(threads=2))
    scales = np.abs(w).max(0) / 4
    narrow = (w / scales).astype(as_dtype(other).numpy)
    compiled.set_param("w", narrow)
    compiled.set_param("scale", scales)
    a = (x / np.float32(50)).astype(as_dtype(dtype).numpy).astype(np.float64)
    exact = a @ narrow.astype(np.float64) * scales * 50
    want = exact * 0.5 * (1 + np.vectorize(math.erf)(exact / math.sqrt(2)))
    np.testing.assert_allclose(compiled.run({"x": x})[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", F8)
def test_f8_in_text_and_on_disk(dtype: str, tmp_path: Path) -> None:
    g = Graph("kept")
    x = g.input("x", (5, 256), dtype)
    g.set_outputs([rlx.maximum(x, rlx.constant(every(dtype)[np.isfinite(every(dtype).astype(np.float32))][:1])), x + 1.5])
    again = Graph.parse(str(g))
    assert str(again) == str(g) and again.fingerprint() == g.fingerprint()
    assert again.fingerprint() != Graph.parse(str(g).replace(dtype, F8[1 - F8.index(dtype)])).fingerprint()
    feed = {"x": np.tile(every(dtype), (5, 1))}
    with knobs.override(RLX_CACHE=1, RLX_CACHE_DIR=str(tmp_path)):
        first = rlx.Session("cpu").compile(g)
        second = rlx.Session("cpu").compile(again)
        assert (first.report().cache.state, second.report().cache.state) == ("compiled", "cached")
        for a, b in zip(first.run(feed), second.run(feed)):
            assert (a.view(np.uint8) == b.view(np.uint8)).all()


# -- two dtypes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["ref", "ref:1", "cpu"])
@pytest.mark.parametrize("narrow", ["bf16", "f16", *F8])
@pytest.mark.parametrize("m", [1, 5, 100])
def test_a_narrow_weight_is_the_widened_one(narrow: str, device: str, m: int) -> None:
    """The same bits as of the weight in f32: it is converted on its way into the tile, and nothing else changes."""
    x = RNG.normal(size=(m, 65)).astype(np.float32)
    w = RNG.normal(size=(65, 70)).astype(as_dtype(narrow).numpy)
    results = []
    for weight, dtype in ((w, narrow), (w.astype(np.float32), "f32")):
        g = Graph("mixed")
        g.set_outputs([rlx.relu(g.input("x", x.shape, "f32") @ g.param("w", weight.shape, dtype) + 1.0)])
        compiled = rlx.Session(device).compile(g, rlx.CompileOptions(threads=2))
        compiled.set_param("w", weight)
        results += compiled.run({"x": x})
    assert results[0].dtype == np.float32 and (results[0] == results[1]).all()
    np.testing.assert_allclose(results[0], np.maximum(x @ w.astype(np.float32) + 1, 0), rtol=1e-5, atol=1e-4)


def test_a_narrow_weight_takes_its_own_bytes_only() -> None:
    """Nowhere is it widened: the plan holds one packed copy of its size, and set_param_typed brings no other."""
    sizes = {}
    for narrow in ("f32", "bf16", "f16", *F8):
        g = Graph("plan")
        g.set_outputs([g.input("x", (4, 480), "f32") @ g.param("w", (480, 960), narrow)])
        compiled = rlx.Session("cpu").compile(g)
        w = RNG.normal(size=(480, 960)).astype(as_dtype(narrow).numpy)
        compiled.set_param_typed("w", w.tobytes(), narrow)
        compiled.run({"x": np.ones((4, 480), np.float32)})
        sizes[narrow] = sum(compiled.memory_plan().regions[name] for name in ("arena", "params", "prepared"))
    plain = 4 * (480 * 4 + 960 * 4)
    for narrow, bits in (("f32", 32), ("bf16", 16), ("f16", 16), ("f8e4m3", 8), ("f8e5m2", 8)):
        assert 480 * 960 * bits // 8 <= sizes[narrow] <= 480 * 960 * bits // 8 + plain + 4096, sizes


def test_which_dtypes_are_multiplied() -> None:
    g = Graph("rule")

    def times(a: str, b: str) -> Value:
        n = len(g.inputs)
        return g.input(f"x{n}", (2, 2), a) @ g.input(f"x{n + 1}", (2, 2), b)

    for a, b, want in (
        ("f32", "bf16", "f32"), ("f16", "f32", "f32"), ("f64", "f16", "f64"), ("bf16", "f16", "f32"), ("bf16", "f8e4m3", "bf16"),
        ("f16", "f8e5m2", "f16"), ("f8e5m2", "f8e4m3", "f32"), ("f8e4m3", "f8e4m3", "f32"), ("bf16", "bf16", "bf16"),
        ("i8", "i8", "i8"),
    ):  # fmt: skip
        assert times(a, b).dtype.name == want
    for a, b in (("f32", "i8"), ("u8", "i8"), ("i32", "i64")):
        with pytest.raises(DTypeError, match=f"{a} and {b}.*cast one"):
            times(a, b)


# -- complex numbers -----------------------------------------------------------------------------------------------


def draw(*dims: int) -> np.ndarray:
    return (RNG.normal(size=dims) + 1j * RNG.normal(size=dims)).astype(np.complex64)


@pytest.mark.parametrize("device", ["ref", "ref:1", "cpu"])
def test_complex_numbers_in_inputs_params_states_and_outputs(device: str) -> None:
    x, w, s = draw(3, 5), draw(5, 4), draw(3, 4)
    g = Graph("complex")
    v, handle = g.input("x", (3, 5), "c64"), rlx.BufferHandle("state", (3, 4), "c64")
    old, y = g.handle(handle), v @ g.param("w", (5, 4), "c64")
    g.assign(old, old * 2.0 + y)
    parts = rlx.complex(rlx.real(v), 2.0 * rlx.imag(v))
    fixed = rlx.constant(np.array([1 + 2j, -3j], np.complex64))
    g.set_outputs([y, v, v, old, parts, fixed, rlx.conj(v).T, rlx.view_as_real(y), y, rlx.exp(v) / v, -v[::-1, 1:], rlx.abs(y)])
    compiled = rlx.Session(device).compile(g, rlx.CompileOptions(threads=2).bind_handle(handle))
    compiled.set_param_typed("w", w.tobytes(), "c64")
    compiled.bind_handle("state", s)
    product = x @ w
    pairs = np.stack([np.real(product), np.imag(product)], -1)
    moved = [product, x, x, s, np.real(x) + 2j * np.imag(x), np.array([1 + 2j, -3j]), x.conj().T]
    want = [*moved, pairs, product, np.exp(x) / x, -x[::-1, 1:], np.abs(product)]
    found = compiled.run({"x": x})
    assert [a.dtype.name for a in found] == ["complex64"] * 7 + ["float32"] + ["complex64"] * 3 + ["float32"]
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.asarray(compiled.read_handle("state")), 2 * s + product, rtol=1e-5, atol=1e-5)
    for view, b in zip(compiled.outputs_view(), want, strict=True):
        np.testing.assert_allclose(np.asarray(view), b, rtol=1e-5, atol=1e-5)
    (raw, dtype), *_ = compiled.run_typed({"x": (x.tobytes(), "c64")})
    assert dtype == rlx.c64 and raw == found[0].tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_complex_arithmetic_far_from_one(device: str) -> None:
    """Quotients and magnitudes whose squares overflow or vanish, and what infinities and zeros give."""
    x = np.array([1e30 + 1e30j, 3e-30 - 4e-30j, 2e38 + 1e38j, 1e-40 + 0j, 5 + 0j, 0 + 7j], np.complex64)
    y = np.array([2e30 - 1e30j, 1e-30 + 2e-30j, 2e38 + 1e38j, 1 + 1j, 0 + 2j, -3 + 0j], np.complex64)
    quotient, size, back = run(
        lambda x, y: [x / y, rlx.abs(x), rlx.exp(rlx.view_as_complex(rlx.view_as_real(x) * 0.0))], device, x=x, y=y
    )
    np.testing.assert_allclose(quotient, (x.astype(np.complex128) / y).astype(np.complex64), rtol=1e-6)
    np.testing.assert_allclose(size, np.abs(x.astype(np.complex128)), rtol=1e-6)
    assert (back == 1).all()
    odd = np.array([np.inf + 1j, complex(-np.inf, np.nan), 0, np.nan, complex(1, -np.inf)], np.complex64)
    sizes, real = run(lambda x: [rlx.abs(x), rlx.exp(rlx.cast(rlx.real(x), "c64"))], device, x=odd)
    np.testing.assert_array_equal(sizes, [np.inf, np.inf, 0, np.nan, np.inf])
    np.testing.assert_array_equal(real[[0, 2]], np.array([np.inf + 0j, 1 + 0j], np.complex64))


def test_a_complex_graph_on_disk_and_with_an_extent(tmp_path: Path) -> None:
    g = Graph("kept")
    x = g.input("x", ("n", 4), "c64")
    g.set_outputs([x * x + rlx.constant(1j), rlx.sum(x, axis=0)])
    assert str(Graph.parse(str(g))) == str(g)
    z = draw(3, 4)
    want = [z * z + 1j, z.sum(0)]
    with knobs.override(RLX_CACHE=1, RLX_CACHE_DIR=str(tmp_path)):
        made = [rlx.Session("cpu").compile(h, rlx.CompileOptions(dims={"n": 3})) for h in (g, Graph.parse(str(g)))]
    assert [c.report().cache.state for c in made] == ["compiled", "cached"]
    for compiled in made:
        for a, b in zip(compiled.run({"x": z}), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    buckets = rlx.BucketedCompileCache(g, dim="n", ladder=rlx.power_of_two_ladder(8, 16))
    for a, b in zip(buckets.run_padded({"x": z}), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_ops_that_take_no_complex_numbers_say_so() -> None:
    g = Graph("refused")
    x = g.input("x", (3,), "c64")
    for build in (rlx.tanh, rlx.max, lambda x: x < x, rlx.argmax):
        with pytest.raises(DTypeError, match=r"c64.*it takes"):
            build(x)
    with pytest.raises(DTypeError, match="real and imaginary part are f32"):
        rlx.complex(rlx.real(x).astype("f64"), 0.0)
