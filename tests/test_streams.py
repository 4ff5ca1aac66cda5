"""Large results are written past the caches, and only they; narrow ones are rounded once, by hardware where it is there."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.backends.cpu import render
from rlx.host.processor import host_features

X86 = host_features()[0].startswith("triple=x86")


def compiled(make, *dims, dtype=rlx.f32, threads=2) -> rlx.CompiledGraph:
    g = rlx.Graph("s")
    g.set_outputs([make(*(g.input(f"x{i}", d, dtype) for i, d in enumerate(dims)))])
    return rlx.Session().compile(g, rlx.CompileOptions(threads=threads))


@pytest.mark.parametrize("dims", [(4096,), (70, 64), (33, 17), (5000,), (3, 100)])
@pytest.mark.parametrize("dtype", [rlx.f32, rlx.bf16, rlx.i8, rlx.f64], ids=str)
def test_streamed_values(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, ...], dtype: rlx.DType) -> None:
    """As if every result were large: aligned or not, whole vectors and tails, softmax's rows too."""
    monkeypatch.setattr(render, "STREAMED_BYTES", 1)
    x = np.random.default_rng(1).standard_normal(dims)
    x = (x * 10).astype(dtype.numpy)
    makes = [lambda x, y: x + y] + ([lambda x, y: rlx.softmax(x * y)] if dtype.is_float and len(dims) > 1 else [])
    for make in makes:
        c = compiled(make, dims, dims, dtype=dtype)
        text = "".join(c.report().texts.values())
        assert ("nontemporal" in text) == ("sfence" in text) or not X86
        assert "nontemporal" in text or dims in ((33, 17), (3, 100))
        c._executable.poison()  # type: ignore[attr-defined]
        got = c.run({"x0": x, "x1": x})[0].astype(np.float64)
        wide = x.astype(np.float64)
        wanted = wide + wide
        if make is not makes[0]:
            e = np.exp(wide**2 - np.max(wide**2, axis=-1, keepdims=True))
            wanted = e / e.sum(-1, keepdims=True)
        tolerance = 0.05 if dtype == rlx.bf16 else 1e-5
        np.testing.assert_allclose(got, wanted.astype(np.int8) if dtype == rlx.i8 else wanted, rtol=tolerance, atol=tolerance)


def test_what_fits_a_cache_stays_there() -> None:
    small, large = (compiled(lambda x: x + 1.0, (n,)) for n in (1 << 20, render.STREAMED_BYTES // 4))
    assert ["nontemporal" in "".join(c.report().texts.values()) for c in (small, large)] == [False, True]
    x = np.arange(render.STREAMED_BYTES // 4, dtype=np.float32)
    np.testing.assert_array_equal(large.run({"x0": x})[0], x + np.float32(1))


@pytest.mark.parametrize("n", [1, 5, 16, 33, 4096])
def test_rounding_to_bf16(n: int) -> None:
    """Every kind of f32: subnormal in some lanes or none, infinite, NaN, ties; as ml_dtypes rounds."""
    g = rlx.Graph("s")
    g.set_outputs([rlx.cast(g.input("x", (n,), rlx.f32), dtype=rlx.bf16)])
    c = rlx.Session().compile(g, rlx.CompileOptions(threads=1))
    rng = np.random.default_rng(n)
    odd = np.array(
        [0x1, 0x7FFFFF, 0x80000001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F808000, 0x3F818000, 0], np.uint32
    )
    for trial in range(6):
        bits = rng.integers(0, 1 << 32, n, np.uint32) if trial % 2 else rng.choice(odd, n)
        bits = bits & 0x807FFFFF if trial == 5 else bits  # all of them subnormal
        x = bits.view(np.float32)
        with np.errstate(invalid="ignore"):  # of signalling NaNs, in numpy's cast
            got, wanted = c.run({"x": x})[0], x.astype(ml_dtypes.bfloat16)
        nan = np.isnan(x)
        np.testing.assert_array_equal(got.view(np.uint16)[~nan], wanted.view(np.uint16)[~nan])
        assert np.isnan(got.astype(np.float32))[nan].all()


@pytest.mark.parametrize("name, wanted", [("maximum", np.maximum), ("minimum", np.minimum)])
def test_extremes_with_constants_let_nan_through(name: str, wanted: np.ufunc) -> None:
    x = np.array([np.nan, -1, 0, 2, np.inf, -np.inf] * 11, np.float32)
    for constant in (0.0, 1.5, np.inf, np.nan):
        for make in (lambda v, c=constant: getattr(rlx, name)(v, c), lambda v, c=constant: getattr(rlx, name)(c, v)):
            np.testing.assert_array_equal(compiled(make, x.shape).run({"x0": x})[0], wanted(x, np.float32(constant)))


@pytest.mark.parametrize("dims", [(5, 100), (3, 64), (1, 33)])
def test_rows_fetched_ahead(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int]) -> None:
    """The next row is asked for while the second of three passes computes; past the last one that does no harm."""
    x = np.random.default_rng(2).standard_normal(dims).astype(np.float32)
    monkeypatch.setattr(render, "FETCHED_BYTES", 1)
    monkeypatch.setattr(render, "fetches_ahead", lambda features: False)
    c = compiled(rlx.softmax, dims)
    assert ("prefetch" in "".join(c.report().texts.values())) == (dims[0] > 1)
    scale, offset = np.ones(dims[1], np.float32), np.zeros(dims[1], np.float32)
    for slow in (False, True):  # the second pass of a layer norm is too short, except beside slow memory
        monkeypatch.setattr(render, "fetches_ahead", lambda features, slow=slow: slow)
        few = compiled(lambda v: rlx.layer_norm(v, scale, offset), (dims[0] + 6 * slow, dims[1]))
        assert ("prefetch" in "".join(few.report().texts.values())) == slow
    e = np.exp(x - x.max(-1, keepdims=True))
    np.testing.assert_allclose(c.run({"x0": x})[0], e / e.sum(-1, keepdims=True), rtol=1e-5)
