"""Products of few rows by 16-bit weights that no ring takes (fragments.py): how they are shared out, and results on a GPU. There
also divisions of short integers, and running totals of a line of many parts."""

from __future__ import annotations

import re

import numpy as np
import pytest
from cuda_kernels import reports
from test_cuda import on_gpu, one

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import launch_of, text_of
from rlx.backends.cuda.fragments import FragmentLaunch
from rlx.backends.cuda.gemv import GemvLaunch
from rlx.backends.cuda.gemv_ring import RingLaunch
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.compiler import lower
from rlx.ir.kernel import Computed

CASES = [  # matrices, rows, terms, columns
    (128, 8, 1190, 128), (3, 2, 77, 130), (20, 4, 64, 777), (4, 15, 1000, 96), (1, 12, 4096, 512),
    (50, 5, 33, 17), (2, 9, 40, 2048), (999, 4, 32, 64), (999, 7, 64, 32), (300, 3, 100, 40), (32, 1, 4096, 128),
]  # fmt: skip


def product(g: rlx.Graph, case: tuple[int, int, int, int], order: str, dtype: str) -> rlx.Value:
    many, m, k, n = case
    x, w = g.input("x", (many, m, k), dtype), g.input("w", (many, k, n) if order == "rows" else (many, n, k), dtype)
    return rlx.matmul(x, w if order == "rows" else rlx.transpose(w, (0, 2, 1)))


@pytest.mark.parametrize("case", CASES)
def test_all_weights_are_of_one_warp_each(case):
    many, _, k, n = case
    found = launch_of(one(lambda g: product(g, case, "rows", "bf16")))
    assert isinstance(found, FragmentLaunch) and not found.along
    assert found.each * found.across >= n and found.batches * found.ahead * found.down * found.deep * found.shares >= k
    assert found.blocks == many * found.each * found.shares
    for arch in ("sm_80", "sm_90a"):
        (report,) = reports(text_of(found, "kernel"), arch).values()
        assert not report.stack and not report.spilled


def test_loads_are_as_wide_as_rows_or_columns_allow():
    rows, columns = {(1190, 128): 8, (1190, 100): 4}, {(64, 130): 8, (1190, 128): 2}
    for order, sizes in (("rows", rows), ("columns", columns)):
        for (k, n), size in sizes.items():
            found = launch_of(one(lambda g, case=(128, 8, k, n), order=order: product(g, case, order, "f16")))
            assert isinstance(found, FragmentLaunch) and found.size == size
    odd = launch_of(one(lambda g: product(g, (64, 8, 1191, 128), "columns", "f16")))
    assert type(odd) is GemvLaunch, "columns of odd lengths are read element by element"


def test_blocks_of_small_matrices_have_few_warps():
    for order, case in (("columns", (4000, 4, 32, 64)), ("rows", (4000, 4, 64, 32))):
        found = launch_of(one(lambda g, case=case, order=order: product(g, case, order, "bf16")))
        assert isinstance(found, FragmentLaunch) and found.threads == 32 and found.resident == 16
    few = launch_of(one(lambda g: product(g, (16, 4, 333, 128), "rows", "bf16")))
    assert isinstance(few, FragmentLaunch) and few.size == 4 and few.blocks == 64, "shorter loads, so that more blocks have some"


def normalised(g: rlx.Graph, k: int, n: int) -> rlx.Value:
    return rlx.matmul(rlx.rms_norm(g.input("x", (2, k), "bf16"), g.input("scale", (k,), "bf16")), g.input("w", (k, n), "bf16"))


def test_few_warps_compute_all_elements_of_rows():
    g = rlx.Graph("normalised")
    g.set_outputs([normalised(g, 40, 16)])
    kernels = [s.kernel for s in lower(g, target("sm_90a"), rlx.CompileOptions()).steps]
    (found,) = [at for at in map(launch_of, kernels) if isinstance(at, FragmentLaunch)]
    loops = re.findall(r"for \(int (\w+) = .*; \1 < (\d+); \1 \+= (\d+)\)", text_of(found, "kernel").split('extern "C"')[1])
    assert found.threads == 32 and isinstance(found.contract.a, Computed)
    assert {("40", "32"), (str(found.pitch), "32")} == {x[1:] for x in loops}


@on_gpu
@pytest.mark.parametrize("k", [33, 40, 48])
def test_few_warps_multiply_rows_of_a_norm(k):
    rng, kind = np.random.default_rng(0), rlx.as_dtype("bf16").numpy
    g = rlx.Graph("normalised")
    g.set_outputs([normalised(g, k, 16)])
    x, w = (rng.standard_normal(dims).astype(kind) for dims in ((2, k), (k, 16)))
    given = {"x": x, "w": w, "scale": np.ones(k, kind)}
    found, wanted = (rlx.Session(device).compile(g).run(given)[0].astype(np.float32) for device in ("cuda", "ref"))
    np.testing.assert_allclose(found, wanted, rtol=0.02, atol=0.1)


def test_fragments_are_for_batches_and_few_rows():
    def kind(case, order="rows"):
        return type(launch_of(one(lambda g: product(g, case, order, "bf16"))))

    assert kind((128, 1, 128, 1024), "columns") is FragmentLaunch and kind((1, 1, 128, 1024), "columns") is RingLaunch
    assert kind((32, 1, 4096, 128)) is FragmentLaunch, "too few blocks, if they do not share sums"
    assert kind((256, 1, 1024, 128)) is GemvLaunch
    assert kind((256, 15, 1024, 128)) is FragmentLaunch and kind((256, 16, 1024, 128)) is TensorLaunch


@on_gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_sums_of_whole_numbers_are_exact(case, order, dtype):
    many, m, k, n = case
    rng, kind = np.random.default_rng(0), rlx.as_dtype(dtype).numpy
    g = rlx.Graph("product")
    g.set_outputs([product(g, case, order, dtype).astype("f32")])
    x, w = rng.integers(-1, 2, (many, m, k)), rng.integers(-1, 2, (many, k, n))
    given = {"x": x.astype(kind), "w": np.ascontiguousarray(w if order == "rows" else w.transpose(0, 2, 1)).astype(kind)}
    compiled = rlx.Session("cuda").compile(g)
    for found in (compiled.run(given)[0], compiled.run(given)[0]):
        wanted = (x @ w).astype(np.float32)
        np.testing.assert_array_equal(found, wanted.astype(kind).astype(np.float32))


@on_gpu
@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "u16"])
def test_short_integers_are_divided_exactly(dtype):
    """All pairs of 8 bits; of 16 bits, those next to multiples."""
    kind, rng = rlx.as_dtype(dtype).numpy, np.random.default_rng(0)
    low, high = np.iinfo(kind).min, np.iinfo(kind).max
    if np.iinfo(kind).bits == 8:
        x, y = (a.ravel() for a in np.meshgrid(np.arange(low, high + 1), np.arange(low, high + 1)))
    else:
        y = rng.integers(low, high + 1, 1 << 20)
        x = np.clip(y * rng.integers(-3, 40_000, y.shape) // 1 + rng.integers(-1, 2, y.shape), low, high)
        near = y * (rng.integers(low, high + 1, y.shape) // np.where(y == 0, 1, y)) + rng.integers(-1, 2, y.shape)
        x, y = np.concatenate([x, np.clip(near, low, high)]), np.concatenate([y, y])
    x, y = x.astype(kind), y.astype(kind)
    g = rlx.Graph("divided")
    a, b = g.input("a", x.shape, dtype), g.input("b", x.shape, dtype)
    g.set_outputs([a % b, a // b])
    cuda, reference = (rlx.Session(device).compile(g).run({"a": x, "b": y}) for device in ("cuda", "ref"))
    for found, wanted in zip(cuda, reference):
        np.testing.assert_array_equal(found, wanted)


@on_gpu
@pytest.mark.parametrize("size", [300_001, 1_000_000, 3_000_000, 12_345_678])
def test_a_line_of_hundreds_or_thousands_of_parts_adds_up(size):
    x = np.random.default_rng(0).integers(-(1 << 20), 1 << 20, size).astype(np.int32)
    g = rlx.Graph("totals")
    g.set_outputs([rlx.cumsum(g.input("x", x.shape, "i32"), axis=0)])
    compiled = rlx.Session("cuda").compile(g)
    for found in (compiled.run({"x": x})[0], compiled.run({"x": x})[0]):
        np.testing.assert_array_equal(found, np.cumsum(x, dtype=np.int32))
