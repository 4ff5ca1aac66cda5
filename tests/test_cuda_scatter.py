"""Scatters on a GPU. Of few updates a line, the kernel in which each place looks at all updates, interpreted, against numpy; how
other scatters are done, and on a GPU their results."""

from __future__ import annotations

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.binned import BinLaunch
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.gpu import refusal
from rlx.backends.cuda.patched import PatchLaunch
from rlx.backends.cuda.replaced import ReplaceLaunch
from rlx.backends.cuda.scatter import FEW_PICKS, LARGE, MARKED, MARKS, ScatterLaunch, scatter_of
from rlx.backends.cuda.streamed import StreamLaunch
from rlx.backends.ref.interpret import run_kernel
from rlx.compiler import lower
from rlx.ir.kernel import Kernel, Loop
from tests.cuda_kernels import reports

on_gpu = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")
FUNCTIONS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "replace": lambda old, new: new, "add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
}  # fmt: skip
DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "i32": np.int32}
CASES = [
    ((40, 6), 0, 3), ((3, 16, 33), 1, FEW_PICKS), ((5, 37), 1, 20), ((19, 64), 0, 1), ((64, 5, 2), 0, 12), ((300,), 0, 35),
    ((1024, 4, 16), 0, 2),
]  # fmt: skip


def kernel_of(dims: tuple[int, ...], axis: int, count: int, mode: str, dtype: str) -> Kernel:
    """`mode` "rows": sums by the same indices for all lines."""
    some, rows = (*dims[:axis], count, *dims[axis + 1 :]), mode == "rows"
    g = rlx.Graph("scatter")
    x, at, u = g.input("x", dims, dtype), g.input("at", (count,) if rows else some, "i64"), g.input("u", some, dtype)
    g.set_outputs([rlx.scatter_add(x, at, u, axis=axis) if rows else rlx.scatter_elements(x, at, u, axis=axis, mode=mode)])
    (step,) = lower(g, target("sm_90a"), rlx.CompileOptions()).steps
    return step.kernel


def run(kernel: Kernel, x: np.ndarray, at: np.ndarray, u: np.ndarray) -> tuple[int, np.ndarray]:
    given = {(a.size, a.dtype): a.ravel() for a in (at, u, x)}
    made = [np.zeros(b.size, b.dtype.numpy) if b.writable else given[b.size, b.dtype.numpy].copy() for b in kernel.buffers]
    code = run_kernel(kernel, made)
    return code, next(a for a, b in zip(made, kernel.buffers) if b.writable).reshape(x.shape)


def wanted(x: np.ndarray, at: np.ndarray, u: np.ndarray, axis: int, mode: str) -> np.ndarray:
    """Updates one after the other, each rounded to the dtype."""
    out = np.moveaxis(x.copy(), axis, 0)
    at, u = np.moveaxis(at, axis, 0), np.moveaxis(u, axis, 0)
    for n in range(len(at)):
        for place in np.ndindex(at.shape[1:]):
            to = (at[n][place], *place)
            out[to] = FUNCTIONS[mode](out[to], u[n][place])
    return np.moveaxis(out, 0, axis)


@pytest.mark.parametrize("dims, axis, count", CASES)
@pytest.mark.parametrize("mode", list(FUNCTIONS))
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_each_place_looks_at_few_updates(dims, axis, count, mode, dtype):
    kernel, rng = kernel_of(dims, axis, count, mode, dtype), np.random.default_rng(count)
    assert scatter_of(kernel) is None and not kernel.locals
    assert any(isinstance(s, Loop) for s in kernel.body) == (count > FEW_PICKS)
    some = (*dims[:axis], count, *dims[axis + 1 :])
    x, u = (rng.integers(-4, 5, d).astype(DTYPES[dtype]) for d in (dims, some))
    at = rng.integers(0, dims[axis], some)  # some of them twice
    code, found = run(kernel, x, at, u)
    assert code == 0
    np.testing.assert_array_equal(found, wanted(x, at, u, axis, mode))


@pytest.mark.parametrize("dims, axis, count", CASES)
def test_indices_out_of_range_fail(dims, axis, count):
    kernel = kernel_of(dims, axis, count, "add", "f32")
    some = (*dims[:axis], count, *dims[axis + 1 :])
    for wrong in (-1, dims[axis]):
        at = np.zeros(some, np.int64)
        at[(-1,) * len(dims)] = wrong
        assert run(kernel, np.zeros(dims, np.float32), at, np.ones(some, np.float32))[0] == 1


def test_many_updates_of_long_lines_are_not_looked_at():
    assert scatter_of(kernel_of((1 << 14, 256), 0, 64, "add", "f32"))


@pytest.mark.parametrize("dims, count, grain", [((8192, 2), 8192, 2), ((1 << 21, 2), 1 << 19, 8), ((1 << 24,), 1 << 22, 256)])
def test_marks_of_many_updates_are_of_some_together(dims: tuple[int, ...], count: int, grain: int) -> None:
    found = launch_of(kernel_of(dims, 0, count, "rows", "f32"))
    assert isinstance(found, ScatterLaunch) and found.grain == grain and found.blocks * found.words_each <= MARKS


@pytest.mark.parametrize("dims, count", [((3, 0), 0), ((768, 0), 768), ((0, 3), 0), ((700, 3), 0)])
def test_nothing_is_scattered_into_nothing(dims: tuple[int, ...], count: int) -> None:
    assert not isinstance(launch_of(kernel_of(dims, 0, count, "add", "f32")), ScatterLaunch)


def test_blocks_share_lines_with_indices_of_their_own() -> None:
    pytest.importorskip("cuda.core")
    found = launch_of(kernel_of((8, 1, 5000), 2, 100, "add", "f32"))
    assert type(found) is ScatterLaunch and found.blocks == 160 and found.groups == found.vector == 1
    for arch in ("sm_90a", "sm_100"):
        (report,) = reports(text_of(found, "kernel"), arch).values()
        assert not found.words_each and not report.spilled
    assert type(launch_of(kernel_of((463, 7752), 0, 90, "add", "f32"))) is not ScatterLaunch, "lines for all blocks"
    assert type(launch_of(kernel_of((4, 1 << 20), 1, 5, "add", "f32"))) is not ScatterLaunch, "places look at few updates"


MANY = [  # columns of a block, and tiles of a line
    ((2, 4096, 37, 8), 1, 4000, 4, 1), ((300, 5000), 1, 5000, 1, 1), ((200, 9001), 1, 3000, 1, 1), ((9000, 1100), 0, 3000, 4, 2),
]  # fmt: skip


@pytest.mark.parametrize("dims, axis, count, columns, tiles", MANY)
def test_many_updates_pass_by_tiles_of_sums(dims: tuple[int, ...], axis: int, count: int, columns: int, tiles: int) -> None:
    pytest.importorskip("cuda.core")
    for dtype in ("f32", "bf16"):
        found = launch_of(kernel_of(dims, axis, count, "add", dtype))
        assert isinstance(found, StreamLaunch) and found.rows * found.tiles >= dims[axis]
        assert found.shared == 4 * found.rows * found.groups <= 72 << 10
        if dtype == "f32":
            assert (found.groups, found.tiles) == (columns, tiles)
        for arch in ("sm_80", "sm_90a"):
            (report,) = reports(text_of(found, "kernel"), arch).values()
            assert not report.stack and not report.spilled


@pytest.mark.parametrize(
    "dims, axis, count, near",
    [((1 << 20,), 0, 5000, False), ((60, 900), 1, 400, True), ((3, 700, 40), 1, 300, False), ((3, 5000), 1, 5000, True)],
)
def test_the_last_of_updates_that_replace_is_found_by_words(dims: tuple[int, ...], axis: int, count: int, near: bool) -> None:
    pytest.importorskip("cuda.core")
    found = launch_of(kernel_of(dims, axis, count, "replace", "bf16"))
    lines = math.prod(dims) // dims[axis]
    assert isinstance(found, ReplaceLaunch) and (found.places, found.picks) == (math.prod(dims), lines * count)
    assert found.counters == found.places + 3
    text = text_of(found, "kernel")
    assert (f"line = id / {count};" in text) == near or lines == 1  # adjacent threads read adjacent indices
    assert f"% {count};" in text and "min_index" not in text
    for arch in ("sm_80", "sm_90a", "sm_100"):
        (report,) = reports(text, arch).values()
        assert not report.stack and not report.spilled
    for other in ("add", "mul", "max", "min"):
        assert not isinstance(launch_of(kernel_of(dims, axis, count, other, "bf16")), ReplaceLaunch)


@pytest.mark.parametrize("dims, axis, count", [((200, 200), 0, 200), ((1000, 300), 0, 5000)])
def test_few_updates_and_more_than_places_do_not_pass_by_tiles(dims: tuple[int, ...], axis: int, count: int) -> None:
    """Of adjacent updates many would meet in one place."""
    assert isinstance(found := launch_of(kernel_of(dims, axis, count, "add", "f32")), ScatterLaunch)
    assert not isinstance(found, StreamLaunch)


def test_more_places_than_words_are_not_replaced_by_them() -> None:
    assert isinstance(launch_of(kernel_of((MARKS,), 0, 5000, "replace", "f32")), ReplaceLaunch)
    assert isinstance(launch_of(kernel_of((MARKS + 1,), 0, 5000, "replace", "f32")), ScatterLaunch)


FEW = [
    ((1_000_003,), 0, 300), ((9, 70_001), 1, 90), ((3, 90_000, 5), 1, 300), ((5000, 232), 0, 200), ((5000, 233), 0, 200),
    ((2, 3000, 37, 8), 1, 70), ((500, 3000), 1, 9), ((34505, 232), 0, 465),
]  # fmt: skip
ROWS = [((600_001, 4), 0, 300), ((8, 64, 2331), 0, 2), ((40_000, 33), 0, 9), ((12, 40_000, 3), 1, 50), ((3000, 512), 0, 900)]


def patched(dims: tuple[int, ...], axis: int, count: int, mode: str = "add", dtype: str = "bf16") -> PatchLaunch:
    found = launch_of(kernel_of(dims, axis, count, mode, dtype))
    assert isinstance(found, PatchLaunch) and found.patch
    p, elements = found.patch, math.prod(dims)
    assert p.inner == math.prod(dims[axis + 1 :])
    columns = -(-p.inner // p.columns) if p.columns else 1
    rows = elements // p.inner // dims[axis] * -(-dims[axis] // (p.size // p.columns)) if p.columns else -(-elements // p.size)
    assert found.blocks == columns * rows
    return found


def test_few_updates_of_a_large_tensor_patch_a_copy() -> None:
    """Tiles are flat where lines are adjacent. Of other lines with indices of their own, a tile has few, and looks at theirs."""
    patch = patched((5_000_000, 4), 0, 300).patch
    assert patch and patch.columns == 0 and patch.picks == 300 * 4
    patch = patched((1024, 8192), 1, 8).patch
    assert patch and patch.columns == 0 and patch.picks <= 3 * 8
    for dims in ((34505, 232), (2, 4096, 37, 8)):
        patch = patched(dims, dims.index(max(dims)), 60, "replace").patch
        assert patch and patch.columns in (16, 32, 64) and patch.picks == 60 * patch.columns
        many = launch_of(kernel_of(dims, dims.index(max(dims)), 513, "replace", "bf16"))
        assert not isinstance(many, PatchLaunch), "a block has no room for all that may select places of its tile"


@pytest.mark.parametrize(
    "dims, count, vector", [((1 << 24,), 28, 1), ((2_000_000, 4), 318, 4), ((8, 512, 1167), 2, 8), ((40_000, 33), 9, 1)]
)
def test_rows_of_updates_are_read_in_vectors(dims: tuple[int, ...], count: int, vector: int) -> None:
    pytest.importorskip("cuda.core")
    found = patched(dims, 0, count, "rows")
    assert found.vector == vector and found.patch and found.patch.picks == count
    text = text_of(found, "kernel")
    inner = math.prod(dims[1:])
    assert (f"return (first + e) / {inner} - row;" in text) == (inner % 8 == 0), "some vectors are of two rows, and copied"
    assert "rlx_patch<" in text and "stays = (const void*)b3 == (const void*)b0;" in text, "the result may have the memory of x"
    for arch in ("sm_80", "sm_90a", "sm_100"):
        (report,) = reports(text, arch).values()
        assert not report.stack and not report.spilled


def test_the_lists_of_a_tile_fit_its_static_shared_memory() -> None:
    pytest.importorskip("cuda.core")
    for dims, count, mode in (((1 << 24,), 4000, "rows"), ((100_000, 1000), 62, "add")):
        assert cubin(text_of(patched(dims, 0, count, mode, "i8"), "kernel"), "sm_80")
    assert not isinstance(launch_of(kernel_of((3000, 33_333), 0, 1024, "rows", "f32")), PatchLaunch), "rows of odd lengths"


def test_updates_whose_results_are_compared_on_a_gpu_are_patched() -> None:
    assert all(patched(*case, mode, "f32") for case in FEW for mode in ("add", "max"))
    assert all(patched(*case, "rows", dtype) for case in ROWS for dtype in ("f32", "bf16", "i8"))


def test_tensors_that_are_small_or_have_many_updates_are_not_patched() -> None:
    for dims, count in (((30_000,), 20), ((1 << 22,), 1 << 20), ((16, 1 << 18), 8)):
        assert not isinstance(launch_of(kernel_of(dims, 0, count, "add", "f32")), PatchLaunch)
    g = rlx.Graph("scatter")
    x, at, u = g.input("x", (1 << 22,), "f32"), g.input("at", (4, 30), "i64"), g.input("u", (4, 30), "f32")
    g.set_outputs([rlx.scatter_elements(rlx.broadcast_to(x, dims=(4, 1 << 22)), at, u, axis=1)])
    (step,) = lower(g, target("sm_90a"), rlx.CompileOptions()).steps
    assert not isinstance(launch_of(step.kernel), PatchLaunch), "it starts from a tensor of another layout"
    for count, way in ((1200, PatchLaunch), (2048, ScatterLaunch)):
        assert type(launch_of(kernel_of((4096, 512), 0, count, "rows", "f32"))) is way, "most rows would be copied in vain"


@on_gpu
@pytest.mark.parametrize("dims, axis, count", FEW)
@pytest.mark.parametrize("mode", ["replace", "add", "max"])
def test_patches_are_made_in_order(dims: tuple[int, ...], axis: int, count: int, mode: str) -> None:
    """Random numbers, so that another order of sums shows; of copies, and of results in the memory of what they start from. Of
    other than random indices, a tile has more updates than a block keeps: of few places, of one, or one for each."""
    some, rng = (*dims[:axis], count, *dims[axis + 1 :]), np.random.default_rng(0)
    g = rlx.Graph("scatter")
    x, at, u = g.input("x", dims, "f32"), g.input("i", some, "i64"), g.input("u", some, "f32")
    g.set_outputs([rlx.scatter_elements(base, at, u, axis=axis, mode=mode) for base in (x, x * 2.0)])
    given: dict[str, np.ndarray] = {n: rng.standard_normal(d).astype(np.float32) for n, d in (("x", dims), ("u", some))}
    along = np.arange(count).reshape([-1 if n == axis else 1 for n in range(len(dims))])
    compiled, cpu = rlx.Session("cuda").compile(g), rlx.Session("cpu").compile(g)
    indices = [rng.integers(0, most, some) for most in (dims[axis], count, 1)]
    for given["i"] in (*indices, np.broadcast_to(along, some).copy()):
        for found, wanted in zip(compiled.run(given), cpu.run(given)):
            np.testing.assert_array_equal(found, wanted)


@on_gpu
@pytest.mark.parametrize("dims, axis, count", [case[:3] for case in MANY])
@pytest.mark.parametrize("mode", ["add", "max", "replace"])
def test_updates_pass_by_in_order(dims: tuple[int, ...], axis: int, count: int, mode: str) -> None:
    """Random numbers, of random indices, of few, and of equal ones."""
    some, rng = (*dims[:axis], count, *dims[axis + 1 :]), np.random.default_rng(0)
    g = rlx.Graph("scatter")
    x, at, u = g.input("x", dims, "f32"), g.input("i", some, "i64"), g.input("u", some, "f32")
    g.set_outputs([rlx.scatter_elements(base, at, u, axis=axis, mode=mode) for base in (x, x * 2.0)])
    given: dict[str, np.ndarray] = {n: rng.standard_normal(d).astype(np.float32) for n, d in (("x", dims), ("u", some))}
    compiled, cpu = rlx.Session("cuda").compile(g), rlx.Session("cpu").compile(g)
    for indices in (rng.integers(0, dims[axis], some), rng.integers(0, 40, some), np.full(some, dims[axis] - 1)):
        for found, wanted in zip(compiled.run({**given, "i": indices}), cpu.run({**given, "i": indices})):
            np.testing.assert_array_equal(found, wanted)
    with pytest.raises(rlx.RlxError, match="out of range"):
        compiled.run({**given, "i": np.full(some, dims[axis])})


BINNED = [  # the last: twice as many threads
    ((1_000_003,), 0, 100_000), ((4, 100), 1, 3000), ((20, 9001), 1, 9000), ((9000, 90), 0, 2000), ((77,), 0, 20_000),
    ((5, 700, 33), 1, 9000), ((64, 100_000), 1, 10_000),
]  # fmt: skip


def bins_of_updates(dims: tuple[int, ...], axis: int, count: int, mode: str = "add", dtype: str = "f32") -> BinLaunch:
    found = launch_of(kernel_of(dims, axis, count, mode, dtype))
    assert isinstance(found, BinLaunch) and found.bins
    b = found.bins
    assert b.width * b.bins >= math.prod(dims) > b.width * (b.bins - 1)
    size, updates = b.threads * b.each, math.prod(dims) // dims[axis] * count
    assert size * b.tiles >= updates > size * (b.tiles - 1)
    assert found.scratch * found.blocks >= 8 * size * b.tiles + 4 * b.bins * b.tiles
    return found


@pytest.mark.parametrize("dims, axis, count", BINNED)
def test_many_updates_of_single_elements_are_sorted_by_bins(dims: tuple[int, ...], axis: int, count: int) -> None:
    """Each dtype and architecture meets each other one at some of the shapes."""
    pytest.importorskip("cuda.core")
    dtypes, turn = ("f32", "bf16", "f64", "i8") if math.prod(dims) < 1 << 22 else ("f32",), BINNED.index((dims, axis, count))
    for i, dtype in enumerate(dtypes):
        found = bins_of_updates(dims, axis, count, dtype=dtype)
        (report,) = reports(text_of(found, "kernel"), ("sm_80", "sm_90a", "sm_100")[(i + turn) % 3]).values()
        assert not report.stack and not report.spilled
    assert (found.threads == 1024) == (math.prod(dims) > 1 << 22)


def test_what_is_not_sorted_by_bins() -> None:
    kernel = kernel_of((8_000_000,), 0, 2_000_000, "add", "f32")
    assert isinstance(launch_of(kernel), BinLaunch)
    assert type(launch_of(kernel, "sm_86")) is ScatterLaunch, "a block has too little shared memory"
    assert type(launch_of(kernel_of((1 << 24,), 0, 1 << 22, "add", "f32"))) is ScatterLaunch, "too many places"
    assert type(launch_of(kernel_of((100_000, 2), 0, 50_000, "rows", "f32"))) is ScatterLaunch, "rows"
    assert type(launch_of(kernel_of((5000,), 0, MARKED - 1, "rows", "f32"))) is ScatterLaunch, "few updates"
    for case in (((101, 101), 0, 101), ((16, 4000), 1, 1000), ((200, 200), 0, 200)):
        assert type(launch_of(kernel_of(*case, "max", "f32"))) is ScatterLaunch, "few updates for each block"


@on_gpu
@pytest.mark.parametrize("dims, axis, count", BINNED)
@pytest.mark.parametrize("mode", ["add", "mul", "replace"])
@pytest.mark.parametrize("dtype, index", [("f32", "i64"), ("f64", "i32")])
def test_updates_sorted_by_bins_are_in_order(
    dims: tuple[int, ...], axis: int, count: int, mode: str, dtype: str, index: str
) -> None:  # fmt: skip
    """Random numbers, of random indices, of few, of equal ones, and of all in turn; of lines of which one has no updates."""
    some, rng = [*dims[:axis], count, *dims[axis + 1 :]], np.random.default_rng(0)
    some[axis - 1] -= len(dims) > 1
    g = rlx.Graph("scatter")
    x, at, u = g.input("x", dims, dtype), g.input("i", tuple(some), index), g.input("u", tuple(some), dtype)
    g.set_outputs([rlx.scatter_elements(base, at, u, axis=axis, mode=mode) for base in (x, x * 2.0)])
    kind = rlx.as_dtype(dtype).numpy
    given: dict[str, np.ndarray] = {"x": rng.standard_normal(dims).astype(kind), "u": (1 + rng.random(some) / 99).astype(kind)}
    compiled, cpu = rlx.Session("cuda").compile(g), rlx.Session("cpu").compile(g)
    along = np.arange(count).reshape([-1 if n == axis else 1 for n in range(len(dims))]) % dims[axis]
    indices = [rng.integers(0, most, some) for most in (dims[axis], min(dims[axis], 40))]
    for held in (*indices, np.full(some, dims[axis] - 1), np.broadcast_to(along, some)):
        given["i"] = np.ascontiguousarray(held.astype(index.replace("i", "int")))
        for _ in range(2):
            for found, wanted in zip(compiled.run(given), cpu.run(given)):
                np.testing.assert_array_equal(found, wanted)
    for wrong in (dims[axis], -1):
        bad = given["i"].copy()
        bad[tuple(n // 2 for n in some)] = wrong
        with pytest.raises(rlx.RlxError, match="out of range"):
            compiled.run({**given, "i": bad})
        np.testing.assert_array_equal(compiled.run(given)[0], cpu.run(given)[0])


@on_gpu
@pytest.mark.parametrize("dtype", ["bf16", "i8", "i64"])
def test_bins_of_other_dtypes(dtype: str) -> None:
    """Whole numbers, of indices of which many are the same."""
    for dims, axis, count in BINNED[:5]:
        some, rng, kind = (*dims[:axis], count, *dims[axis + 1 :]), np.random.default_rng(0), rlx.as_dtype(dtype).numpy
        g = rlx.Graph("scatter")
        x, at, u = g.input("x", dims, dtype), g.input("i", some, "i64"), g.input("u", some, dtype)
        g.set_outputs([rlx.scatter_elements(x, at, u, axis=axis, mode=mode) for mode in ("add", "max")])
        given = {"x": rng.integers(-9, 9, dims).astype(kind), "u": (rng.integers(0, 40, some) == 0).astype(kind)}
        given["i"] = rng.integers(0, dims[axis], some) // 3
        for found, wanted in zip(rlx.Session("cuda").compile(g).run(given), rlx.Session("cpu").compile(g).run(given)):
            np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))


@on_gpu
@pytest.mark.parametrize("dims, axis, count", ROWS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "i8"])
def test_rows_are_patched_in_order(dims: tuple[int, ...], axis: int, count: int, dtype: str) -> None:
    """With indices of which several are the same; into a tensor, and into zeros."""
    some, rng, kind = (*dims[:axis], count, *dims[axis + 1 :]), np.random.default_rng(0), rlx.as_dtype(dtype).numpy
    g = rlx.Graph("scatter")
    x, at, u = g.input("x", dims, dtype), g.input("i", (count,), "i64"), g.input("u", some, dtype)
    g.set_outputs([rlx.scatter_add(base, at, u, axis=axis) for base in (x, rlx.broadcast_to(rlx.constant(0, dtype), dims=dims))])
    given: dict[str, np.ndarray] = {n: (4 * rng.standard_normal(d)).astype(kind) for n, d in (("x", dims), ("u", some))}
    given["i"] = rng.integers(0, max(1, dims[axis] // 400), count)
    compiled, cpu = rlx.Session("cuda").compile(g), rlx.Session("cpu").compile(g)
    for found, wanted in zip(compiled.run(given), cpu.run(given)):
        np.testing.assert_array_equal(found.astype(np.float64), wanted.astype(np.float64))
    with pytest.raises(rlx.RlxError, match="out of range"):
        compiled.run({**given, "i": np.full(count, dims[axis])})


@pytest.mark.parametrize("dims, count", [((3000, 264), 2000), ((1334, 50_304), 667), ((9000, 72), 9001), ((4097, 4096), 2048)])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_updates_of_many_rows_stay_in_registers(dims: tuple[int, ...], count: int, dtype: str) -> None:
    """Also beside the indices that are found."""
    pytest.importorskip("cuda.core")
    found = launch_of(kernel_of(dims, 0, count, "rows", dtype))
    (report,) = reports(text_of(found, "kernel"), "sm_90a").values()
    assert isinstance(found, ScatterLaunch) and not report.spilled
    assert (found.threads == LARGE) == (dims == (4097, 4096))


@on_gpu
@pytest.mark.parametrize(
    "dims, count", [((3000, 264), 2000), ((1334, 50_304), 667), ((9000, 72), 9001), ((41, 3000), 300), ((4097, 4100), 2049)]
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_many_rows_are_updated_by_blocks(dims: tuple[int, ...], count: int, dtype: str) -> None:
    """Whole numbers; of other than random indices, a block has more updates than it lists."""
    kernel, rng = kernel_of(dims, 0, count, "rows", dtype), np.random.default_rng(0)
    found = launch_of(kernel)
    assert isinstance(found, ScatterLaunch) and found.at_once <= found.rows and (found.words_each > 0) == (count > 9000)
    g = rlx.Graph("scatter")
    x, at, u = g.input("x", dims, dtype), g.input("i", (count,), "i64"), g.input("u", (count, dims[1]), dtype)
    g.set_outputs([rlx.scatter_add(x, at, u)])
    parts = ("x", dims, 30), ("u", (count, dims[1]), 2)
    given = {n: rng.integers(-most, most, d).astype(rlx.as_dtype(dtype).numpy) for n, d, most in parts}
    given["u"] *= rng.integers(0, 40, (count, 1)) == 0  # so few that bf16 has all sums
    compiled = rlx.Session("cuda").compile(g)
    for given["i"] in (rng.integers(0, dims[0], count), rng.permutation(dims[0])[:count] % dims[0], np.arange(count) % 3):
        given["i"] = np.resize(given["i"], count)
        result = given["x"].astype(np.float32)
        np.add.at(result, given["i"], given["u"].astype(np.float32))
        np.testing.assert_array_equal(compiled.run(given)[0].astype(np.float32), result)


@on_gpu
def test_an_index_out_of_range_leaves_no_words() -> None:
    dims, count = (3, 5000), 700
    g = rlx.Graph("scatter")
    x, at, u = g.input("x", dims, "f32"), g.input("i", (3, count), "i64"), g.input("u", (3, count), "f32")
    g.set_outputs([rlx.scatter_elements(x, at, u, axis=1)])
    compiled, rng = rlx.Session("cuda").compile(g), np.random.default_rng(0)
    given: dict[str, np.ndarray] = {"x": rng.random(dims, np.float32), "u": rng.random((3, count), np.float32)}
    given["i"] = rng.integers(0, 5000, (3, count))
    wrong: dict[str, np.ndarray] = {**given, "i": given["i"][:, ::-1].copy()}
    wrong["i"][1, 350] = 5000
    for _ in range(3):
        with pytest.raises(rlx.RlxError, match="out of range"):
            compiled.run(wrong)
        np.testing.assert_array_equal(compiled.run(given)[0], wanted(given["x"], given["i"], given["u"], 1, "replace"))


SIZES = [
    ((1_300_000,), 0, 200_000), ((3, 700_000), 1, 9000), ((100_000, 8), 0, 50_000), ((300, 5000), 1, 5000), ((40, 96), 1, 4096),
    ((5, 900, 33), 1, 400), ((2000, 50), 1, 64), ((1, 256), 1, 256),
]  # fmt: skip


@on_gpu
@pytest.mark.parametrize("dims, axis, count", SIZES)
@pytest.mark.parametrize("mode", ["replace", "add"])
def test_many_updates_of_many_places_are_right(dims: tuple[int, ...], axis: int, count: int, mode: str) -> None:
    """Of the first, more blocks wait for marks than a GPU has at once."""
    some, rng = (*dims[:axis], count, *dims[axis + 1 :]), np.random.default_rng(0)
    g = rlx.Graph("scatter")
    x, at, u = g.input("x", dims, "f32"), g.input("i", some, "i64"), g.input("u", some, "f32")
    g.set_outputs([rlx.scatter_elements(x, at, u, axis=axis, mode=mode)])
    given = {"x": rng.integers(-9, 10, dims).astype(np.float32), "u": rng.integers(-9, 10, some).astype(np.float32)}
    given["i"] = rng.integers(0, dims[axis], some)
    wanted, places = given["x"].copy(), list(np.indices(some))
    places[axis] = given["i"]
    if mode == "add":
        np.add.at(wanted, tuple(places), given["u"])
    else:
        wanted[tuple(places)] = given["u"]  # the last of equal ones
    compiled = rlx.Session("cuda").compile(g)
    for _ in range(2):
        np.testing.assert_array_equal(compiled.run(given)[0], wanted)


@pytest.mark.parametrize("dims, axis, count", CASES)
def test_they_compile_without_local_memory(dims, axis, count):
    pytest.importorskip("cuda.core")
    (report,) = reports(text_of(launch_of(kernel_of(dims, axis, count, "add", "f32")), "kernel"), "sm_90a").values()
    assert not report.stack and not report.spilled
