"""Transposes, alone and fused, in tiles turned in registers: all sizes around a tile's, dtypes, threads."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx import backends
from rlx.backends.cpu import transpose
from rlx.host import processor

WHOLE = backends.get("cpu").target().vector_bytes >= 64  # a vector is a line: else tiles are others (AVX2, NEON)
WRITES = "i32 1, i32 3, i32 1)"  # the operands of a prefetch of a line to be written
DIMS = [(16, 16), (17, 33), (15, 40), (40, 15), (64, 1), (100, 70), (300, 129), (2, 2000), (256, 512), (1024, 140)]


def run(make, *arrays: np.ndarray, threads: int = 1) -> tuple[np.ndarray, str]:
    g = rlx.Graph("t")
    kinds = {"float32": rlx.f32, "float64": rlx.f64, "int8": rlx.i8, "int64": rlx.i64, "bfloat16": rlx.bf16}
    g.set_outputs([make(*(g.input(f"x{i}", a.shape, kinds[a.dtype.name]) for i, a in enumerate(arrays)))])
    c = rlx.Session().compile(g, rlx.CompileOptions(threads=threads))
    c._executable.poison()  # type: ignore[attr-defined]
    return c.run({f"x{i}": a for i, a in enumerate(arrays)})[0], "".join(c.report().texts.values())



@pytest.mark.parametrize("dims", DIMS)
@pytest.mark.parametrize("dtype", [rlx.f32, rlx.bf16, rlx.f64, rlx.i8, rlx.i64], ids=str)
def test_transposes(dims: tuple[int, int], dtype: rlx.DType) -> None:
    x = np.random.default_rng(0).integers(-100, 100, dims).astype(dtype.numpy)
    for threads in (1, 2):
        got, text = run(lambda v: rlx.transpose(v, axes=(1, 0)), x, threads=threads)
        np.testing.assert_array_equal(got.astype(np.float64), x.T.astype(np.float64))
        assert min(dims) < 16 or "masked.gather" not in text or any(d % 16 for d in dims)


@pytest.mark.parametrize("axes", [(2, 1, 0), (1, 0, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)])
def test_transposes_of_three_dims(axes: tuple[int, ...]) -> None:
    x = np.arange(18 * 35 * 50, dtype=np.float32).reshape(18, 35, 50)
    for threads in (1, 2):
        np.testing.assert_array_equal(run(lambda v: rlx.transpose(v, axes=axes), x, threads=threads)[0], x.transpose(axes))


def test_large_operands_are_prefetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two loads of different dtypes are transposed, and a third is not; the rows end in part of a tile, and so do the columns."""
    monkeypatch.setattr(processor, "core_cache_bytes", lambda: 1 << 20)
    rng = np.random.default_rng(0)
    x, z = (rng.integers(-100, 100, (1024, 201)).astype(t) for t in (np.float32, np.int8))
    y = rng.standard_normal((201, 1024), np.float32)
    make = lambda a, b, c: rlx.relu(a.T * c) + rlx.cast(b, rlx.f32).T  # noqa: E731
    want = np.maximum(x.T * y, 0) + z.T
    for threads in (1, 3):
        got, text = run(make, x, z, y, threads=threads)
        np.testing.assert_array_equal(got, want)
        assert "llvm.prefetch" in text
    less = run(make, x[:600], z[:600], np.ascontiguousarray(y[:, :600]))
    np.testing.assert_array_equal(less[0], want[:, :600])
    assert "llvm.prefetch" not in less[1]


@pytest.mark.parametrize(
    "dims, dtype", [((1001, 703), rlx.f32), ((519, 805), rlx.f64), ((1101, 1207), rlx.bf16), ((1301, 1999), rlx.i8)]
)
def test_strips(monkeypatch: pytest.MonkeyPatch, dims: tuple[int, int], dtype: rlx.DType) -> None:
    """Where lines to be written are prefetched, too: strips of a few tiles, of which the last are fewer or start earlier."""
    monkeypatch.setattr(transpose, "fetches_ahead", lambda features: True)
    monkeypatch.setattr(processor, "core_cache_bytes", lambda: 1 << 20)
    x = np.random.default_rng(0).integers(-100, 100, dims).astype(dtype.numpy)
    for threads in (1, 3):
        got, text = run(lambda v: rlx.transpose(v, axes=(1, 0)), x, threads=threads)
        np.testing.assert_array_equal(got.astype(np.float64), x.T.astype(np.float64))
        assert WRITES in text or not WHOLE
    if dtype == rlx.f32:  # one operand is not transposed, so that no element is computed twice
        y = x.T + np.float32(1)
        got, text = run(lambda a, b: rlx.relu(a.T * b), x, y, threads=2)
        np.testing.assert_array_equal(got, np.maximum(x.T * y, 0))
        assert WRITES in text or not WHOLE
    if dtype == rlx.bf16:  # conversions take longer than memory
        assert WRITES not in run(lambda v: rlx.relu(v.T * 2.0), x)[1]


@pytest.mark.parametrize("dtype", [rlx.f32, rlx.bf16, rlx.f64, rlx.i8], ids=str)
@pytest.mark.parametrize("dims", [(700, 333), (65, 9000), (9000, 65), (3, 21, 127, 130)])
def test_tiles_past_the_end_start_earlier(dims: tuple[int, ...], dtype: rlx.DType) -> None:
    """Whatever the threads, every element is written, also where the last rows and columns are fewer than those of a tile."""
    x = np.random.default_rng(0).integers(-100, 100, dims).astype(dtype.numpy)
    axes = (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2)
    for threads in (1, 2, 5):
        got, text = run(lambda v: rlx.transpose(v, axes=axes), x, threads=threads)
        np.testing.assert_array_equal(got.astype(np.float32), x.transpose(axes).astype(np.float32))
        assert "masked" not in text


@pytest.mark.parametrize("dtype", [rlx.f32, rlx.bf16, rlx.i8], ids=str)
@pytest.mark.parametrize("dims", [(2, 24, 7, 9), (1, 70, 56, 56), (2, 16, 13, 1)])
def test_images_are_moved_as_one_row_of_pixels(dims: tuple[int, ...], dtype: rlx.DType) -> None:
    x = np.random.default_rng(0).integers(-100, 100, dims).astype(dtype.numpy)
    for axes in ((0, 2, 3, 1), (0, 3, 1, 2)):
        for threads in (1, 2):
            got, _ = run(lambda v, axes=axes: rlx.transpose(v, axes=axes), x, threads=threads)
            np.testing.assert_array_equal(got.astype(np.float32), x.transpose(axes).astype(np.float32))


@pytest.mark.parametrize("dtype", [rlx.f32, rlx.bf16, rlx.i8, rlx.f64], ids=str)
@pytest.mark.parametrize("channels", [2, 3, 4])
def test_few_channels_are_interleaved(channels: int, dtype: rlx.DType) -> None:
    """Channels first to channels last and back: neither gathers nor masks, also where pixels do not fill vectors."""
    for pixels in ((4, 16), (5, 113), (1, 9000)):
        for dims, axes in (((2, channels, *pixels), (0, 2, 3, 1)), ((2, *pixels, channels), (0, 3, 1, 2))):
            x = np.random.default_rng(0).integers(-100, 100, dims).astype(dtype.numpy)
            for threads in (1, 2):
                got, text = run(lambda v, axes=axes: rlx.transpose(v, axes=axes), x, threads=threads)
                np.testing.assert_array_equal(got.astype(np.float32), x.transpose(axes).astype(np.float32))
                assert "masked" not in text


def test_results_past_the_caches() -> None:
    """Whole vectors are streamed where they are aligned; other rows, and elements that are computed, are as exact."""
    rng = np.random.default_rng(0)
    for dims, dtype, streams in (((4096, 2048), rlx.bf16, True), ((2048, 4500), rlx.f32, True), ((4500, 2041), rlx.f32, False)):
        x = rng.integers(-100, 100, dims).astype(dtype.numpy)
        got, text = run(lambda v: rlx.transpose(v, axes=(1, 0)), x, threads=2)
        np.testing.assert_array_equal(got.astype(np.float32), x.T.astype(np.float32))
        assert ("nontemporal" in text) == streams or not WHOLE
    x = rng.integers(-100, 100, (4096, 2048)).astype(rlx.bf16.numpy)
    got, text = run(lambda v: rlx.relu(rlx.transpose(v, axes=(1, 0)) * 2.0), x)
    np.testing.assert_array_equal(got.astype(np.float32), np.maximum(x.T.astype(np.float32) * 2, 0))
    assert "nontemporal" in text or not WHOLE  # halves of a line are computed, and leave together


def test_narrow_tiles_of_large_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are no whole lines, from memory: one tile side by side, and two in a part."""
    monkeypatch.setattr(transpose, "fetches_ahead", lambda features: False)
    x = np.random.default_rng(0).integers(0, 256, (2001, 2107), np.uint16)
    for threads in (1, 3):
        got, text = run(lambda v: rlx.transpose(v, axes=(1, 0)), x.view(rlx.bf16.numpy), threads=threads)
        np.testing.assert_array_equal(got.view(np.uint16), x.T)
        assert ("llvm.prefetch" in text or not WHOLE) and WRITES not in text


def test_bits_that_are_only_moved_stay() -> None:
    """NaNs with a payload, in a type that is computed as another one."""
    bits = np.arange(0x7F80, 0x7F80 + 40 * 36, dtype=np.uint16).reshape(40, 36)
    got, _ = run(lambda v: rlx.transpose(v, axes=(1, 0)), bits.view(rlx.bf16.numpy))
    np.testing.assert_array_equal(got.view(np.uint16), bits.T)


@pytest.mark.parametrize("dims", [(48, 64), (37, 53)])
def test_what_is_fused_around_a_transpose(dims: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x, y, row = (rng.standard_normal(d).astype(np.float32) for d in (dims, dims[::-1], dims[:1]))
    got, _ = run(lambda a, b, c: rlx.relu(rlx.transpose(a * 2.0, axes=(1, 0)) * b + c), x, y, row, threads=2)
    np.testing.assert_allclose(got, np.maximum((x * 2).T * y + row, 0), rtol=1e-6)
    got, _ = run(lambda a: rlx.transpose(a, axes=(1, 0)) + a, x[:, :1] + x[:, :1].T)
    np.testing.assert_allclose(got, (x[:, :1] + x[:, :1].T).T + x[:, :1] + x[:, :1].T, rtol=1e-6)
