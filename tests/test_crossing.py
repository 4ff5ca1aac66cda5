"""Transposes, alone and fused, in tiles turned in registers: all sizes around a tile's, dtypes, threads."""

from __future__ import annotations

import numpy as np
import pytest

import rlx

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


def test_rows_that_are_a_multiple_of_4_kb_apart_go_through_scratch_memory() -> None:
    """Two loads of different dtypes are transposed, and a third is not; the rows end in part of a tile, and so do the columns."""
    rng = np.random.default_rng(0)
    x, z = (rng.integers(-100, 100, (1024, 201)).astype(t) for t in (np.float32, np.int8))
    y = rng.standard_normal((201, 1024), np.float32)
    make = lambda a, b, c: rlx.relu(a.T * c) + rlx.cast(b, rlx.f32).T  # noqa: E731
    want = np.maximum(x.T * y, 0) + z.T
    for threads in (1, 3):
        got, text = run(make, x, z, y, threads=threads)
        np.testing.assert_array_equal(got, want)
        assert "getelementptr i8, ptr %scratch" in text
    less = run(make, x[:1000], z[:1000], np.ascontiguousarray(y[:, :1000]))
    np.testing.assert_array_equal(less[0], want[:, :1000])
    assert "getelementptr i8, ptr %scratch" not in less[1]


@pytest.mark.parametrize("dims", [(48, 64), (37, 53)])
def test_what_is_fused_around_a_transpose(dims: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    x, y, row = (rng.standard_normal(d).astype(np.float32) for d in (dims, dims[::-1], dims[:1]))
    got, _ = run(lambda a, b, c: rlx.relu(rlx.transpose(a * 2.0, axes=(1, 0)) * b + c), x, y, row, threads=2)
    np.testing.assert_allclose(got, np.maximum((x * 2).T * y + row, 0), rtol=1e-6)
    got, _ = run(lambda a: rlx.transpose(a, axes=(1, 0)) + a, x[:, :1] + x[:, :1].T)
    np.testing.assert_allclose(got, (x[:, :1] + x[:, :1].T).T + x[:, :1] + x[:, :1].T, rtol=1e-6)
