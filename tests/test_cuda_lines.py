"""Lines in memory: long rows that all blocks reduce, variances that are read once, pads, sums and running totals down columns."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")

from cuda_kernels import reports
from test_cuda import graph, kernels, one

import rlx
from rlx.backends.cuda import variances
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import cubin, is_wide, launch_of, text_of
from rlx.backends.cuda.columns import ColumnsLaunch
from rlx.backends.cuda.staying import StayingLaunch
from rlx.backends.cuda.strips import WIDEST, StripsLaunch
from rlx.compiler import lower
from rlx.ir.kernel import Loop

FEW_ROWS = {  # reductions of one or few long rows that nothing divides evenly: build, dims, dtype, the least number of blocks
    "product": (rlx.prod, (56_057_884,), "bf16", 240),
    "least": (lambda x: rlx.argmin(x, axis=0), (33_554_432,), "f32", 240),
    "of all axes": (rlx.min, (2, 25, 1888, 127), "f32", 240),
    "rows that begin anywhere": (lambda x: rlx.max(x, axis=1), (3, 5_061_281), "f32", 230),
    "sums of what is computed": (lambda x: rlx.sum(rlx.exp(x) * x, axis=(1, 2)), (5, 20_000, 100), "f32", 240),
    "two in one": (lambda x: rlx.sum(x) / rlx.max(x), (5_061_281,), "f32", 240),
}


@pytest.mark.parametrize("name", FEW_ROWS)
def test_all_multiprocessors_reduce_a_long_row_and_none_waits(name):
    """The block that is last to tell its total combines them, in an order that is not that of time."""
    build, dims, dtype, blocks = FEW_ROWS[name]
    at = launch_of(one(lambda g: build(g.input("x", dims, dtype))), "sm_90a")
    text, turns = text_of(at, "kernel"), at.part // at.team
    assert at.leaving and at.blocks >= blocks and at.part * at.parts * at.lines >= math.prod(dims) and cubin(text, "sm_90a")
    assert text.count("all.last()) return;") == 1 and "all.all(" not in text and "all.leave" not in text
    assert turns % 8 == 0 and at.counters == 2 * at.words * at.lines


VARIANCES = {  # dims, axes, then the kernels, of which the first one alone reads the elements, and the rows that it keeps
    "a row": ((8_000_000,), (0,), 2, (1000, 8000)),
    "a row that nothing divides": ((6_506_843,), (0,), 4, (1509, 4312)),
    "rows that begin anywhere": ((2, 6_506_846), (1,), 2, (2494, 5218)),
    "images": ((32, 64, 56, 56), (0, 2, 3), 2, (2048, 3136)),
    "columns": ((400, 4096, 64), (0, 1), 2, (3200 * 64, 512)),
    "images of few pixels": ((128, 512, 7, 7), (0, 2, 3), 2, (128 * 512, 49)),
    "all axes": ((3, 18, 341, 512), (0, 1, 2, 3), 2, (1152, 8184)),
}


@pytest.mark.parametrize("name", VARIANCES)
def test_a_large_variance_reads_its_elements_once(name):
    dims, axes, count, (rows, size) = VARIANCES[name]
    first, *others = kernels(graph(lambda g: rlx.variance(g.input("x", dims, "bf16"), axis=axes)))
    at, size_of = launch_of(first, "sm_90a"), lambda kernel: max(b.size for b in kernel.buffers if not b.writable)
    assert len(others) == count - 1 and at.row and at.row.keys and math.prod(n for _, n in at.kernel.grid) == rows
    assert len([b for b in first.buffers if b.writable]) == 3 and size_of(first) == math.prod(dims)
    assert at.row.extent in range(size - 15, size + 1) and cubin(text_of(at, "kernel"), "sm_90a")
    few = [kernel for kernel in others if size_of(kernel) == math.prod(dims)]  # elements that are left over
    assert all(s.extent < 100 for kernel in few for s in kernel.body if isinstance(s, Loop)) and len(few) == (count > 2)


@pytest.mark.parametrize(
    "dims, axes",
    [((4_500_011,), (0,)), ((64, 20, 300), (0, 2)), ((3, 700_000), (1,)), ((2, 3, 600_011), (0, 2)), ((20, 9, 700, 33), (2, 0))],
)
@pytest.mark.parametrize("mean, spread", [(0.5, 1.0), (123_456.789, 0.3), (12_345.678, 0.0)])
def test_the_parts_of_a_variance_lose_no_digits(dims, axes, mean, spread):
    """The mean of a part, and that of all, is rounded: squares are of distances from there, and know it."""
    x = (np.random.default_rng(0).standard_normal(dims) * spread + mean).astype(np.float32)
    g = rlx.Graph("variance")
    whole = rlx.variance(g.input("x", dims, "f32"), axis=axes, keepdims=True, correction=1)
    parts = variances.split(whole.node)
    assert parts is not None and parts.shape == whole.shape
    g.set_outputs([parts])
    (found,) = rlx.Session("cpu").compile(g).run({"x": x})
    wanted = np.var(x.astype(np.float64), axis=axes, keepdims=True, ddof=1)
    np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=(mean * 1e-9) ** 2)


def test_rows_of_places_that_are_checked_are_reduced_in_steps():
    """A block that sees a failure would tell nothing."""
    found = kernels(graph(lambda g: rlx.sum(rlx.gather(g.input("x", (99,), "f32"), g.input("i", (1 << 20,), "i64")))))
    assert [launch_of(kernel).blocks >= 99 for kernel in found] == [True, True, False]


PADS = {  # dims, dtype, low, high, then the grid, team and vector that move them
    "rows": ((26, 3, 128, 241), "i32", (0, 1, 0, 1), (0, 3, 3, 1), (26, 7, 131), 32, 1),
    "pairs": ((64, 3, 224, 224), "f32", (0, 0, 3, 3), (0, 0, 3, 3), (192, 230), 32, 1),
    "axes as one": ((26, 3, 128, 241), "i32", (0, 1, 0, 0), (0, 3, 0, 0), (26, 7, 30_848), 1, 4),
    "short rows": ((26, 30, 128, 50), "bf16", (1, 0, 1, 0), (0, 3, 0, 1), (27, 33, 129, 51), 1, 1),
    "long rows": ((10, 15, 2303), "f32", (0, 3, 1), (0, 1, 1), (10, 19), 256, 1),
    "one axis of rows": ((150, 2303), "f32", (3, 1), (1, 1), (154, 2305), 1, 1),
    "vectors": ((64, 3, 224, 224), "f32", (0, 0, 4, 4), (0, 0, 4, 4), (192, 232, 232), 1, 4),
}


@pytest.mark.parametrize("name", PADS)
def test_a_pad_divides_little(name):
    dims, dtype, low, high, grid, team, vector = PADS[name]
    at = launch_of(one(lambda g: rlx.pad(g.input("x", dims, dtype), low=low, high=high)), "sm_90a")
    assert (tuple(n for _, n in at.kernel.grid), at.team, at.vector) == (grid, team, vector)
    text = text_of(at, "kernel")
    assert cubin(text, "sm_90a") and ("b0[point_v] = " in text) == (at.repeats > 1)


def test_columns_are_reduced_by_adjacent_lanes():
    running, extreme = (lambda x: rlx.cumsum(x, axis=0)), (lambda x: rlx.argmax(x, axis=0))
    for build, lines in ((lambda x: rlx.sum(x, axis=(0,)), 64), (running, 128), (extreme, 128)):
        found = launch_of(one(lambda g, build=build: build(g.input("x", (4096, 4096), "f32"))), "sm_90a")
        assert found.lanes == 32 and found.lines == lines
        assert cubin(text_of(found, "kernel"), "sm_90a")
    assert launch_of(one(lambda g: rlx.sum(g.input("x", (4096, 4096), "f32"), axis=(1,))), "sm_90a").lanes == 1


WIDE_SUMS = {  # build, dims, dtype; columns of a lane and blocks of a line, 0: a column for each lane
    "blocks that leave": (lambda x: rlx.sum(x, axis=0), (13_107, 5120), "bf16", 4, 6),
    "one block": (lambda x: rlx.sum(x, axis=0), (1334, 50_304), "f32", 2, 1),
    "few lines": (lambda x: rlx.max(x, axis=0), (8192, 1024), "f16", 4, 8),
    "short columns": (lambda x: rlx.sum(x, axis=0), (300, 20_000), "bf16", 4, 1),
    "two axes": (lambda x: rlx.sum(x * x, axis=1), (4, 4096, 1024), "i8", 4, 8),
    "odd columns": (lambda x: rlx.sum(x, axis=0), (4096, 5001), "bf16", 0, 1),
    "of 64 bits": (lambda x: rlx.sum(x, axis=0), (4096, 5120), "f64", 0, 1),
    "little": (lambda x: rlx.sum(x, axis=0), (1000, 3000), "bf16", 0, 1),
    "an extreme": (lambda x: rlx.argmax(x, axis=0), (4096, 5120), "bf16", 0, 1),
}


@pytest.mark.parametrize("name", WIDE_SUMS)
def test_lanes_have_adjacent_columns(name):
    build, dims, dtype, size, parts = WIDE_SUMS[name]
    first, *_ = kernels(graph(lambda g: build(g.input("x", dims, dtype))))
    found = launch_of(first, "sm_90a")
    assert isinstance(found, ColumnsLaunch) == (size > 0) and found.lanes == 32
    assert (found.vector, found.parts) == (max(size, 1), parts)
    if size:
        assert f"rlx_fetch<{size}>" in text_of(found, "kernel")
        for arch in ("sm_80", "sm_90a"):
            (report,) = reports(text_of(launch_of(found.kernel, arch), "kernel"), arch).values()
            assert not report.spilled


def test_the_last_rows_of_a_column_are_loaded_at_once():
    """The compiler would give each of them a turn of a loop, which waits for its load."""
    for rows, ends in ((13_107, True), (16_384, False)):
        found = launch_of(one(lambda g, rows=rows: rlx.sum(g.input("x", (rows, 5120), "bf16"), axis=0)), "sm_90a")
        text = text_of(found, "kernel")
        assert ("end - 1)" in text) == ends and text.count("for (int u = 0; u < 16; u++)") == 1 + ends


@pytest.mark.parametrize("dims", [(20_001, 120_000), (1_200_001, 2000)])
def test_sums_down_columns_of_more_than_2_to_31_elements_compile(dims):
    found = next(at for k in kernels(graph(lambda g: rlx.sum(g.input("x", dims, "bf16"), axis=0)))
                 if isinstance(at := launch_of(k, "sm_90a"), ColumnsLaunch))  # fmt: skip
    assert is_wide(found) and cubin(text_of(found, "kernel"), "sm_90a")


def softmax(x):
    return rlx.softmax(x, axis=0)


STRIPS = {  # build, dims, dtype; elements of a vector, vectors of a strip, blocks that share it; None: not kept there
    "a cluster": (softmax, (4096, 8192), "bf16", (8, 8, 8)),
    "more blocks, for fewer rounds": (softmax, (4096, 4096), "bf16", (8, 4, 8)),
    "of two": (softmax, (1000, 100_000), "bf16", (8, 8, 2)),
    "of sixteen, narrow": (softmax, (13_107, 5120), "bf16", (8, 4, 16)),
    "of sixteen, f32": (softmax, (13_107, 5120), "f32", (4, 8, 16)),
    "as many rows as are fused": (softmax, (16_384, 4096), "f32", (4, 4, 16)),
    "wide": (softmax, (1334, 50_304), "f32", (4, 16, 8)),
    "wide, two at once": (softmax, (2500, 20_480), "f32", (4, 16, 8)),
    "few of them": (softmax, (2500, 4096), "f32", (4, 8, 8)),
    "too small for two": (softmax, (2400, 20_480), "f32", (4, 8, 8)),
    "fewer idle multiprocessors than with registers": (softmax, (4096, 4096), "f32", (4, 8, 8)),
    "rows of 8 bytes": (softmax, (3000, 3004), "bf16", (4, 16, 8)),
    "rows of 4 bytes": (softmax, (3000, 3002), "bf16", (2, 32, 8)),
    "between axes": (lambda x: rlx.softmax(x, axis=1), (12, 1334, 1024, 3), "bf16", (8, 8, 4)),
    "two": (lambda x: (y := rlx.sort(x)[0]) * rlx.sum(x * y, axis=0, keepdims=True) - x, (1024, 40_000), "f16", (8, 8, 4)),
    "few columns": (softmax, (3000, 520), "bf16", (8, 4, 8)),
    "of f32": (softmax, (4096, 5120), "f32", None),
    "of f32, in one round": (softmax, (4096, 1024), "f32", None),
    "of f32, half as many": (softmax, (2048, 8192), "f32", None),
    "odd columns of f32": (softmax, (5000, 5002), "f32", None),
    "an idle round of f32": (softmax, (13_107, 520), "f32", None),
    "one block": (softmax, (512, 100_000), "bf16", None),
    "odd columns": (softmax, (4096, 5001), "bf16", None),
    "short columns": (softmax, (32, 200_000), "bf16", None),
    "long columns": (softmax, (40_000, 1024), "bf16", None),
    "of 64 bits": (softmax, (9000, 1024), "f64", None),
    "little": (softmax, (300, 1000), "bf16", None),
    "too few columns": (softmax, (10_000, 200), "bf16", None),
}


@pytest.mark.parametrize("name", STRIPS)
def test_shared_memory_keeps_strips_of_columns(name):
    build, dims, dtype, expected = STRIPS[name]
    *_, last = kernels(graph(lambda g: build(g.input("x", dims, dtype))))
    found = launch_of(last, "sm_90a")
    assert isinstance(found, StripsLaunch) == (expected is not None)
    if isinstance(found, StripsLaunch):
        assert (found.vector, found.across, found.parts) == expected and found.clustered == (found.parts > 1)
        text, nbytes = text_of(found, "kernel"), found.vector * last.buffers[0].dtype.itemsize
        (report,) = reports(text, "sm_90a").values()
        wide = found.across * nbytes == WIDEST
        assert not report.spilled and f"rlx_copy{'' if wide else '_near'}<{nbytes}>" in text
        assert text.count("rlx_copies_wait<") == text.count("rlx_copies_end();")
        assert found.at_once * (found.shared + report.shared + 1024) <= 228 << 10
        assert found.parts * found.part >= last.body[0].extent and found.rounds * found.rows >= found.part  # type: ignore[union-attr]


@pytest.mark.parametrize("columns", [4096, 4104])
def test_numbers_of_whole_strips_are_stored_once(columns):
    """The last strip of 4,104 columns has lanes behind the last one."""
    g = rlx.Graph("g")
    x = g.input("x", (1024, columns), "bf16").astype("f32")
    most = rlx.max(x, axis=0, keepdims=True)
    g.set_outputs([most, rlx.sum(rlx.exp(x - rlx.where(most == -np.inf, 0.0, most)), axis=0)])
    found = launch_of(next(iter(kernels(g))), "sm_90a")
    text = text_of(found, "kernel")
    assert isinstance(found, StripsLaunch) and "if (me == 0 && part == 0 && !spare) {" in text and cubin(text, "sm_90a")
    assert "rlx_exp_17_flushed(" in text, "a sum is 1 at least, or 0"


def test_a_row_of_a_strip_is_copied_and_stored_once():
    """Lanes behind the last column read it again, and store nothing; nor are there rows behind the last one."""
    found = launch_of(one(lambda g: softmax(g.input("x", (3000, 3004), "bf16"))), "sm_90a")
    text = text_of(found, "kernel")
    assert isinstance(found, StripsLaunch) and found.points % found.across and "if (!spare) {" in text
    assert found.rows * found.rounds > found.part and "min((part + 1) * 375, (rlx_index)3000)" in text and " < end) {" in text
    small = launch_of(found.kernel, "sm_120")
    assert isinstance(small, StripsLaunch) and small.across < found.across and cubin(text_of(small, "kernel"), "sm_120")
    assert not isinstance(launch_of(found.kernel, "sm_80"), StripsLaunch)
    long = graph(lambda g: softmax(g.input("x", (13_107, 5120), "bf16")))
    counts = {arch: len(lower(long, target(arch), rlx.CompileOptions()).steps) for arch in ("sm_80", "sm_90a", "sm_120")}
    assert counts == {"sm_80": 3, "sm_90a": 1, "sm_120": 3}, "blocks of fewer bytes cannot keep them"


@pytest.mark.parametrize("dims", [(32, 128), (3, 32, 64), (33, 128), (16, 128), (2000, 62)])
def test_totals_of_16_bits_down_columns_compile(dims):
    """Of 32 rows a thread has one column; of more, two."""
    found = launch_of(one(lambda g: rlx.cumsum(g.input("x", dims, "bf16"), axis=len(dims) - 2)), "sm_90a")
    assert cubin(text_of(found, "kernel"), "sm_90a") and found.vector == 1 + (dims[-2] > 32 and dims[-1] % 64 == 0)


@pytest.mark.parametrize("dtype, dims, lane, threads", [
    ("bf16", (60_000, 1500), 8, 512), ("f32", (25_000, 2002), 8, 512), ("f32", (8192, 5004), 8, 256),
    ("f32", (3000, 1500), 4, 512), ("bf16", (65_536, 1024), 4, 512), ("f32", (65_536, 1024), 4, 256),
    ("f32", (20_000, 2_000), 4, 256),
])  # fmt: skip
def test_lanes_of_totals_read_more_of_rows_whose_sectors_are_shared(dtype, dims, lane, threads):
    found = launch_of(one(lambda g: rlx.cumsum(g.input("x", dims, dtype), axis=0)), "sm_90a")
    assert cubin(text_of(found, "kernel"), "sm_90a")
    assert (found.vector * rlx.as_dtype(dtype).itemsize, found.threads) == (lane, threads)


def test_totals_down_columns_that_are_dynamic_have_no_parts():
    g = rlx.Graph("g")
    g.set_outputs([rlx.cumsum(g.input("x", (2000, "n"), "bf16"), axis=0)])
    (step,) = lower(g, target("sm_90a"), rlx.CompileOptions().bind_extent("n", 640)).steps
    found = launch_of(step.kernel, "sm_90a")
    assert found.parts == 1 and cubin(text_of(found, "kernel"), "sm_90a")


def test_rows_that_end_near_2_to_31_have_positions_of_64_bits():
    (kernel,) = kernels(graph(lambda g: rlx.max(g.input("x", (2**31 - 8,), "i8"), axis=0)))
    assert is_wide(launch_of(kernel, "sm_90a"))


def test_spare_lanes_of_a_cluster_store_nothing():
    found = launch_of(one(lambda g: rlx.sum(g.input("x", (4096, 4108), "f64"), axis=0)), "sm_90a")
    assert found.clustered and found.points % 32 and "&& !spare" in text_of(found, "kernel")


def of_squares(x):
    """Two variances, the second one of what the first one adds."""
    off = x - rlx.mean(x, axis=(1,), keepdims=True)
    mean = rlx.mean(off * off, axis=(1,), keepdims=True)
    other = off * off - mean
    return off * rlx.rsqrt(mean + rlx.mean(other * other, axis=(1,), keepdims=True))


NORMS = {  # of long rows: op, dims, dtype; exchanges of a row; None: no cluster stays
    "a norm": (lambda x, y, a, b: rlx.layer_norm(x, a, b), (1334, 50_304), "bf16", 1),
    "of a sum": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), (1334, 50_304), "f32", 1),
    "parts that are not equal": (lambda x, y, a, b: rlx.layer_norm(x, a, b), (1334, 50_312), "f32", 1),
    "a sum of squares": (lambda x, y, a, b: rlx.rms_norm(x + y, a), (1334, 50_304), "bf16", 1),
    "one operand": (lambda x, y, a, b: rlx.rms_norm(x, a), (8000, 4096), "bf16", 1),
    "a block": (lambda x, y, a, b: rlx.layer_norm(x, a, b), (6000, 11_264), "bf16", 1),
    "that the cache keeps": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), (1000, 8192), "bf16", None),
    "long, and the cache keeps them": (lambda x, y, a, b: rlx.layer_norm(x, a, b), (300, 50_304), "bf16", 1),
    "params that sixteen have room for": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), (200, 151_936), "f32", 1),
    "params that they have no room for": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), (140, 250_000), "f32", 1),
    "too long for sixteen": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), (100, 320_000), "f32", None),
    "a maximum and a sum": (lambda x, y, a, b: rlx.softmax(x + a), (1334, 50_304), "f32", 1),
    "a variance of squares": (lambda x, y, a, b: of_squares(x) * a + b, (1334, 50_304), "f32", 2),
    "few rows": (lambda x, y, a, b: rlx.layer_norm(x, a, b), (30, 50_304), "bf16", None),
    "short rows": (lambda x, y, a, b: rlx.layer_norm(x, a, b), (30_000, 2560), "bf16", None),
    "vectors of too few bytes": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), (1334, 50_305), "bf16", None),
    "and of few": (lambda x, y, a, b: rlx.layer_norm(x, a, b), (5000, 16_386), "bf16", None),
    "rows that begin anywhere": (lambda x, y, a, b: rlx.layer_norm(x, a, b), (1334, 50_257), "f32", None),
    "no params": (lambda x, y, a, b: rlx.layer_norm(x), (5000, 12_288), "bf16", 1),
    "no params, and 32 bits": (lambda x, y, a, b: rlx.softmax(x), (5000, 12_288), "f32", None),
    "long ones": (lambda x, y, a, b: rlx.softmax(x), (400, 90_000), "f32", 1),
    "long ones with sums alone": (lambda x, y, a, b: rlx.layer_norm(x), (400, 90_000), "f32", None),
    "longer ones": (lambda x, y, a, b: rlx.softmax(x), (300, 110_000), "f32", None),
    "longer than clusters keep otherwise": (lambda x, y, a, b: rlx.softmax(x), (300, 151_936), "f32", 1),
    "two waits, and no params": (lambda x, y, a, b: x / rlx.max(x, axis=1, keepdims=True) - rlx.sum(x, axis=1, keepdims=True),
                                 (5000, 12_288), "f32", None),
    "only a number of each row": (lambda x, y, a, b: rlx.variance(x, axis=1), (5000, 12_288), "f32", None),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_clusters_stay_for_long_rows(name):
    build, dims, dtype, exchanges = NORMS[name]
    leaf = lambda g, n: g.input(n, dims, dtype) if n in "xy" else g.param(n, dims[1:], dtype)  # noqa: E731
    *_, last = kernels(graph(lambda g: build(*(leaf(g, n) for n in "xyab"))))
    found = launch_of(last, "sm_90a")
    assert isinstance(found, StayingLaunch) == (exchanges is not None)
    assert not any(isinstance(launch_of(last, arch), StayingLaunch) for arch in ("sm_80", "sm_120"))
    if isinstance(found, StayingLaunch):
        text, loads = text_of(found, "kernel"), [*found.given.values(), *found.kept.values()]
        (report,) = reports(text, "sm_90a").values()
        waits = len(re.findall(r"= (?:all\.moments|all\.exponentials|\(\w+\)all\.all)\(", text))
        assert not report.spilled and waits == exchanges and found.threads * found.at_once <= 1024
        assert text.count("rlx_bring<") == len(loads) and text.count("copy(next);") == 1
        assert text.count("extern __shared__") == text.count("extern __shared__ __align__(128)") == 1
        assert text.count("all.draw();") == text.count("all.forget(") == 1 and found.counters == 2
        assert found.shared >= found.part * sum(x.buffer.dtype.itemsize for x, _ in loads)
        assert found.blocks % found.parts == 0 and found.blocks < found.points * found.parts
        assert (found.parts - 1) * found.part < found.row.extent <= found.parts * found.part


def test_a_variance_is_not_taken_for_another_sum_of_squares():
    """The differences are from the mean of something else, or not squared."""
    means = {
        "of others": lambda x, y: (x - rlx.mean(y, axis=(1,), keepdims=True)) ** 2,
        "a product": lambda x, y: (x - rlx.mean(x, axis=(1,), keepdims=True)) * (y - rlx.mean(x, axis=(1,), keepdims=True)),
    }
    for name, squares in means.items():
        g = rlx.Graph("g")
        x, y, a, b = (g.input(n, (1334, 50_304), "f32") if n in "xy" else g.param(n, (50_304,), "f32") for n in "xyab")
        g.set_outputs([(x + y) * rlx.rsqrt(rlx.mean(squares(x, y), axis=(1,), keepdims=True) + 1e-5) * a + b])
        texts = [text_of(launch_of(s.kernel, "sm_90a"), "kernel") for s in lower(g, target("sm_90a"), rlx.CompileOptions()).steps]
        assert not any("all.moments(" in text.split('extern "C"')[1] for text in texts), name


def test_blocks_of_a_search_leave_room_for_others():
    """All threads that run at once would come to the end of their rows together."""
    team = lambda rows: launch_of(one(lambda g: rlx.argmax(g.input("x", (rows, 50_304), "bf16"), axis=1)), "sm_90a").team  # noqa: E731
    assert [team(rows) for rows in (600, 1334)] == [1024, 512]


@pytest.mark.parametrize("operands", [1, 2])
@pytest.mark.parametrize("columns, team", [(7000, None), (9000, 288), (10_000, 320), (12_288, 384), (16_384, 512)])
def test_rows_of_16_bits_have_threads_for_four_vectors_each(columns, team, operands):
    """All of a thread's vectors are loaded before it uses one. On GPUs without clusters, as none stay there."""

    def build(g):
        x, *others = (g.input(n, (2100, columns), "bf16") for n in "xy"[:operands])
        return rlx.layer_norm(sum(others, x), g.param("a", (columns,), "bf16"), g.param("b", (columns,), "bf16"))

    found = launch_of(one(build), "sm_80")
    text, row = text_of(found, "kernel"), found.row
    assert found.parts == 1 and (team is None or (found.threads, row.rounds, row.size) == (team, 4, 8))
    ends = columns < row.rounds * row.size * found.team
    assert text.count("rlx_together(q") == operands * ends and cubin(text, "sm_80")
    body = text.split("kernel(")[1]
    assert not ends or body.rindex("rlx_stream<8>") < body.index("rlx_together(q") < body.index("rlx_wide_bf16(")


@pytest.mark.parametrize("dtype, rows", [("f32", 2100), ("bf16", 1900)])
def test_other_rows_have_blocks_of_powers_of_two(dtype, rows):
    found = launch_of(one(lambda g: rlx.rms_norm(g.input("x", (rows, 9000), dtype), g.param("a", (9000,), dtype))), "sm_80")
    assert found.team & (found.team - 1) == 0


@pytest.mark.parametrize("op", [rlx.softmax, rlx.log_softmax])
def test_rows_of_16_bits_that_begin_anywhere_still_share_registers(op):
    found = launch_of(one(lambda g: op(g.input("x", (3000, 13_003), "bf16"))), "sm_90a")
    assert found.peel and found.row.packed and found.row.size == 8


def test_parts_of_narrow_columns_lie_side_by_side():
    first, last = kernels(graph(lambda g: rlx.sum(g.input("x", (818_400, 41), "bf16"), axis=0)))
    found = launch_of(first, "sm_90a")
    assert isinstance(found, ColumnsLaunch) and found.kernel.grid[-1][1] % 41 == 0 and found.points * found.vector >= 4096
    assert math.prod(n for _, n in last.grid) == 41 or last.grid == ()


@pytest.mark.parametrize("leaf", ["input", "param"])
def test_a_norm_reads_a_narrow_scale_as_it_is(leaf):
    build = lambda g: rlx.rms_norm(g.input("x", (600, 512), "bf16"), getattr(g, leaf)("w", (512,), "bf16"))  # noqa: E731
    assert all(b.dtype.name == "bf16" for b in one(build).buffers)


def test_a_norm_reads_no_scale_that_is_overwritten_before_it():
    g = rlx.Graph("g")
    h, rows, at = g.handle(rlx.BufferHandle("h", (100, 512), "bf16")), g.input("u", (2, 512), "bf16"), g.input("i", (), "i64")
    scale, new = h[0].astype("f32"), rlx.update_rows(h, rows, at)
    g.assign(h, new)
    g.set_outputs([rlx.rms_norm(g.input("x", (600, 512), "f32") + new[1].astype("f32"), scale)])
    names = [s.kernel.origin for s in lower(g, target("sm_90a"), rlx.CompileOptions()).steps]
    assert names.index(("cast",)) < names.index(("update_rows",)) < len(names) - 1


def test_sums_of_exponentials_need_fewer_digits():
    def build(g):
        x = g.input("x", (1334, 20_000), "f32")
        top = rlx.max(x, axis=(1,), keepdims=True)
        return rlx.log(rlx.sum(rlx.exp(x - top), axis=(1,), keepdims=True)) + top

    assert "= rlx_exp_17_flushed(" in text_of(launch_of(one(build), "sm_90a"), "kernel")
    softmax = one(lambda g: rlx.softmax(g.input("x", (1334, 20_000), "f32")))
    assert "= rlx_exp_17" not in text_of(launch_of(softmax, "sm_90a"), "kernel")
