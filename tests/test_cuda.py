"""The CUDA backend: kernels and launches, which need no GPU to be made and compiled (results on one: test_cuda_results.py)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import device_conformance as conformance
import numpy as np
import pytest
from cuda_kernels import assembled
from op_cases import cases

import rlx
from rlx.backends.cuda import attention, binned, scatter, streamed, vectors
from rlx.backends.cuda.backend import CudaBackend, target
from rlx.backends.cuda.chain import Chain
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.code import launches_of as found_launches
from rlx.backends.cuda.contract import Tile
from rlx.backends.cuda.fma import SIZES, FmaLaunch, by_fma
from rlx.backends.cuda.fragments import FragmentLaunch
from rlx.backends.cuda.gemv import GemvLaunch
from rlx.backends.cuda.gpu import refusal
from rlx.backends.cuda.groups import Stages, may_join
from rlx.backends.cuda.render import CudaWriter, arguments_of
from rlx.backends.cuda.rows import recomputed
from rlx.backends.cuda.scatter import ScatterLaunch
from rlx.backends.cuda.schedule import COLUMN_BYTES, Launch
from rlx.backends.cuda.select import SelectLaunch
from rlx.backends.cuda.sorts import SortLaunch
from rlx.backends.cuda.staged import StagedLaunch
from rlx.backends.cuda.tensor import TILINGS, TensorLaunch, Tiling, on_tensor_cores
from rlx.backends.cuda.transpose import TileLaunch
from rlx.compiler import lower
from rlx.compiler.compilation import Compilation
from rlx.compiler.legalise import legalise
from rlx.errors import DeviceUnavailableError
from rlx.ir.evaluate import evaluate
from rlx.ir.kernel import Buffer, Kernel, Load, Loop, Store, Var, const, k, linear
from rlx.ir.overlap import may_overlap
from rlx.ir.program import Program, kernel_labels
from rlx.ir.target import Rows

HOPPER = target("sm_90a")
nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")
on_gpu = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")


def kernels(*graphs: rlx.Graph) -> Iterator[Kernel]:
    for g in graphs:
        for steps in lower(g, HOPPER, rlx.CompileOptions()).phases.values():
            yield from (s.kernel for s in steps if not s.kernel.collective)


def launches_of(program: Program, arch: str) -> list[Stages]:
    """Of programs without chains (test_cuda_chain.py)."""
    found = found_launches(program, arch)
    return [x for x in found if not isinstance(x, Chain)]


def graph(build) -> rlx.Graph:
    g = rlx.Graph("g")
    g.set_outputs([build(g)])
    return g


def one(build) -> Kernel:
    (found,) = kernels(graph(build))
    return found


# -- kernels --------------------------------------------------------------------------------------------------------

PRODUCTS = {
    "bf16": (TensorLaunch, lambda g: g.input("x", (256, 512), "bf16") @ g.input("y", (512, 384), "bf16")),
    "odd strides": (TensorLaunch, lambda g: g.input("x", (101, 103), "f16") @ g.input("y", (103, 105), "f16")),
    "epilogue": (TensorLaunch, lambda g: rlx.gelu(g.input("x", (64, 64), "bf16") @ g.input("y", (64, 64), "bf16"))),
    "f32": (FmaLaunch, lambda g: g.input("x", (64, 64), "f32") @ g.input("y", (64, 64), "f32")),
    "f32, odd strides": (FmaLaunch, lambda g: g.input("x", (3, 201, 103), "f32") @ g.input("y", (3, 103, 205), "f32")),
    "f64": (Tile, lambda g: g.input("x", (64, 64), "f64") @ g.input("y", (64, 64), "f64")),
    "u8 by s8": (
        TensorLaunch,
        lambda g: rlx.int8_matmul(g.input("x", (64, 160), "u8"), rlx.transpose(g.input("y", (80, 160), "i8"), (1, 0))),
    ),
    "s8, columns apart": (TensorLaunch, lambda g: rlx.int8_matmul(g.input("x", (64, 160), "u8"), g.input("y", (160, 80), "i8"))),
    "one row": (GemvLaunch, lambda g: g.input("x", (1, 64), "bf16") @ g.input("y", (64, 64), "bf16")),
    "a few rows": (FragmentLaunch, lambda g: g.input("x", (5, 64), "bf16") @ g.input("y", (64, 64), "bf16")),
    "norm": (
        GemvLaunch,
        lambda g: rlx.rms_norm(g.input("x", (2, 64), "f32"), g.input("s", (64,), "f32")) @ g.input("y", (64, 64), "f32"),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_take_their_kernel(name):
    kind, build = PRODUCTS[name]
    found = launch_of(one(build), "sm_90a")
    assert type(found) is kind
    assert cubin(text_of(found, "kernel"), "sm_90a")


def product(m: int, n: int, depth: int, dtype: str = "bf16") -> Kernel:
    return one(lambda g: g.input("x", (m, depth), dtype) @ rlx.transpose(g.input("y", (n, depth), dtype), (1, 0)))


def unaligned(m: int, n: int, depth: int) -> Kernel:
    """A product whose operands lie in rows that bulk copies cannot take, as where another program shares the weights."""
    made = graph(lambda g: g.input("x", (m, depth), "bf16") @ rlx.transpose(g.input("y", (n, depth), "bf16"), (1, 0)))
    (step,) = lower(made, replace(HOPPER, rows=lambda node: Rows()), rlx.CompileOptions()).steps
    return step.kernel


# one of each kind, the widest, and some whose columns are no chunks
KINDS_OF_TILINGS = {(t.rows, t.turns, t.parts, t.queued, t.swapped): t for t in TILINGS}
SOME_TILINGS = [t for t in KINDS_OF_TILINGS.values() if t.parts <= 2 or not (t.swapped or t.rows == 256)]
SOME_TILINGS += [Tiling(64, 80, turns=True), Tiling(128, 208), Tiling(128, 80, parts=2), Tiling(128, 144, parts=3)]
SOME_TILINGS += [Tiling(64, 88, turns=True), Tiling(128, 32, parts=4, swapped=True), Tiling(256, 96, parts=4)]


def test_kinds_of_tilings_compile():
    """A third of them; test_cuda_factors.py has the others, and the tests of a GPU have all."""
    assert not any(t.turns and t.parts > 1 for t in TILINGS)  # the sums are exchanged by both groups at once
    tensor = [on_tensor_cores(product(512, 1024, 2048), tiling=t) for t in SOME_TILINGS[::3]]
    fma = [by_fma(product(512, 1024, 2048, "f32"), size=s) for s in SIZES[::2]]
    for found in (*tensor, *fma):
        assert found and cubin(text_of(found, "kernel"), "sm_90a")


def test_tilings_fill_the_gpu():
    """One tile a block where that leaves multiprocessors idle, the summed axis is shared or tiles get smaller."""
    few = on_tensor_cores(product(512, 1024, 3072))
    assert few and few.blocks >= 100
    large = on_tensor_cores(product(8192, 8192, 8192))
    assert large and large.blocks == 132 and large.tiling.columns >= 128
    odd = on_tensor_cores(unaligned(1001, 1005, 1003))
    assert odd and odd.by_threads and odd.copying == 2 and odd.tiling.parts == 2


def test_results_leave_by_bulk_copies_if_they_are_nothing_but_sums():
    found = on_tensor_cores(product(32768, 768, 768))
    assert found and found.tiling.queued and found.maps[-1].box == (64, 16) and found.maps[-1].dims == (768, 32768)
    assert "rlx_store_box(&map_out" in text_of(found, "kernel")
    added = one(lambda g: g.input("x", (3072, 768), "bf16") @ g.input("y", (768, 768), "bf16") + 1)
    for kernel in (added, product(3072, 772, 768)):  # of the latter, rows are no multiples of 16 bytes
        other = on_tensor_cores(kernel, tiling=Tiling(128, 192, queued=True))
        assert other and not other.tiling.queued and "map_out" not in text_of(other, "kernel")


def test_few_rows_share_the_summed_axis():
    found = on_tensor_cores(product(48, 4096, 4096))
    assert found and found.tiling.alternate and found.tiling.parts == 2 and found.blocks == 128
    assert found.tiling.stages % 2 == 0


def test_tiles_that_are_left_over_are_shared():
    """448 tiles are three for each multiprocessor and 52, each of which two blocks share."""
    found = on_tensor_cores(product(512, 28672, 4096), tiling=Tiling(parts=2))
    assert found and found.rounds == (132, 3, 52) and found.tiling.parts == 2 and found.blocks == 132
    text = text_of(found, "kernel")
    assert "round < 3 + (blockIdx.x / 2 < 52)" in text and "shared ? 396 + blockIdx.x / 2 : round * 132 + blockIdx.x" in text


def test_only_weights_are_copied_before_the_kernel_in_front_ends():
    """Not where threads copy, or where the number of rows is in memory that another kernel writes."""
    found = on_tensor_cores(product(512, 1024, 2048))
    assert found and found.early == 1 and arguments_of(found)[-1] == "early"
    assert "if (early && threadIdx.x == 0)" in text_of(found, "kernel")
    odd = on_tensor_cores(unaligned(1001, 1005, 1003))
    assert odd and odd.early is None and "early" not in text_of(odd, "kernel")


@pytest.mark.parametrize(
    ("m", "n", "depth", "shares"),
    [(32768, 768, 768, (216, 264)), (4096, 4096, 4096, (232, 264)), (2048, 2048, 2048, None), (32768, 2304, 768, None)],
)
def test_leftover_tiles_of_f32_products_are_shared(m, n, depth, shares):
    """Where they would take most of a round. The memory for their sums is of the blocks that share, not of all."""
    found = by_fma(product(m, n, depth, "f32"))
    assert found and found.shares == shares and bool(found.scratch) == bool(found.counters) == bool(shares)
    assert "0 bytes spill stores" in assembled(text_of(found, "kernel"), "sm_90a")
    if shares:
        tiles, nbytes = math.prod(found.tiles), 4 * found.rows * found.columns * shares[1]
        assert found.blocks == tiles - shares[0] + shares[1] and nbytes <= found.scratch * found.blocks < 1.01 * nbytes


def test_tiles_are_not_shared_where_a_block_may_leave_or_there_is_none():
    """A block that fails, or that no launch has, leaves no sums, for which another one would wait."""
    none = one(lambda g: g.input("x", (0, 4096, 512), "f32") @ g.input("y", (0, 512, 4096), "f32"))
    found = by_fma(none)
    assert found and found.shares is None and found.blocks == 0

    def looked_up(g: rlx.Graph) -> rlx.Value:
        rows = rlx.gather(g.input("t", (9, 4096), "f32"), g.input("i", (4096,), "i32"))
        return g.input("x", (4096, 512), "f32") @ g.input("y", (512, 4096), "f32") + rows

    taken = graph(looked_up)
    (kernel,) = (k for k in kernels(taken) if "matmul" in k.origin)
    found = by_fma(kernel)
    assert found and found.shares is None


@pytest.mark.parametrize(("m", "n", "depth"), [(16, 384, 384), (16, 768, 3072), (128, 1536, 384), (1024, 1024, 1024)])
def test_f32_tiles_fill_the_gpu(m, n, depth):
    """Few rows share the summed axis among blocks, where the GPU has clusters of them."""
    kernel = product(m, n, depth, "f32")
    found, plain = by_fma(kernel), by_fma(kernel, clusters=False, most=99 << 10)
    assert found and (found.blocks >= 90 or found.size.parts > 1)
    assert (found.shared + 1024) * (-(-found.blocks // 132) + 1) > 228 << 10  # none has two blocks where another has none
    assert plain and plain.size.parts == 1 and plain.shared <= 99 << 10 and cubin(text_of(plain, "kernel"), "sm_86")


@pytest.mark.parametrize(
    "dtype, size, mask", [("bf16", 128, "causal"), ("f16", 256, "none"), ("f32", 64, "causal"), ("f32", 8, "none")]
)
def test_attention_compiles(dtype, size, mask):
    shape = (1, 2, 40, size)
    found = launch_of(one(lambda g: rlx.attention(*(g.input(n, shape, dtype) for n in "qkv"), mask=mask)), "sm_90a")
    assert isinstance(found, attention.AttentionLaunch) and found.tensor == (dtype != "f32")
    assert cubin(text_of(found, "kernel"), "sm_90a")


def test_expressions_take_their_shorter_forms():
    """1 + tanh(x) is one function, and a value is rounded once, by the store."""
    text = text_of(launch_of(one(lambda g: rlx.gelu(g.input("x", (64, 64), "bf16"), approximate="tanh")), "sm_90a"), "kernel")
    text = text[text.index("kernel(") :]
    (plus_one,) = re.findall(r"float (t\d+) = rlx_tanh_plus_1\(", text)
    (product,) = re.findall(rf"float (t\d+) = t\d+ \* {plus_one};", text)
    assert f" = rlx_near_bf16({product});" in text
    other = text_of(launch_of(one(lambda g: rlx.tanh(g.input("x", (64,), "f32")) + 2.0), "sm_90a"), "kernel")
    assert "tanhf(" in other and "rlx_tanh_plus_1" not in other[other.index("kernel(") :]


# -- the mapping to threads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["i8", "i32", "i64", "u32"])
def test_stores_keep_the_casts_that_are_more_than_a_rounding(dtype: str) -> None:
    """The store's own conversion, of C, does not saturate and makes no 0 of NaN."""
    text = text_of(launch_of(one(lambda g: rlx.cast(g.input("x", (64,), "f32"), dtype=dtype)), "sm_90a"), "kernel")
    (cast,) = re.findall(rf"(t\d+) = rlx_to_{dtype}\(", text)
    assert f"] = {cast};" in text


def test_elements_take_a_thread_and_rows_a_team():
    wide = launch_of(one(lambda g: g.input("x", (4096, 4096), "f32") + 1.0), "sm_90a")
    assert (wide.team, wide.vector, wide.blocks * wide.threads * 4) == (1, 4, 4096 * 4096)
    rows = launch_of(one(lambda g: rlx.softmax(g.input("x", (4096, 512), "f32"))), "sm_90a")
    assert rows.team == 32 and rows.points == 4096
    assert rows.row and (rows.row.rounds, rows.row.size, rows.shared) == (4, 4, 0)  # kept in registers
    long = launch_of(one(lambda g: rlx.softmax(g.input("x", (3, 50_000), "f32"))), "sm_90a")
    assert (long.team, long.parts, long.blocks) == (256, 7, 21) and long.row and long.row.rounds == 7  # a part for each block


ROWS = {
    "even": ((64, 1024), "bf16", 1),  # launches of the loops; loads of x in them
    "ragged": ((64, 1000), "f32", 1),
    "unaligned": ((64, 1001), "f32", 1),
    "few": ((3, 4096), "f32", 1),
}


@pytest.mark.parametrize("name", ROWS)
def test_rows_in_registers_are_loaded_once(name):
    dims, dtype, count = ROWS[name]
    found = launch_of(one(lambda g: rlx.softmax(g.input("x", dims, dtype))), "sm_90a")
    text = text_of(found, "kernel")
    fetch = "rlx_stream<" if dtype == "bf16" else "rlx_fetch<"  # narrow rows leave the L1 cache to what all rows read
    assert found.row and text.split("kernel(")[1].count(fetch) == count
    assert cubin(text, "sm_90a")


@pytest.mark.parametrize("dtype, size", [("f32", 4), ("bf16", 8)])
def test_rows_that_begin_anywhere_take_vectors_from_their_first_aligned_element_on(dtype, size):
    def text(build, dims):
        found = launch_of(one(lambda g: build(g.input("x", dims, dtype))), "sm_90a")
        made = text_of(found, "kernel")
        assert cubin(made, "sm_90a")
        return found, made.split("kernel(")[1]

    for build in (lambda x: rlx.sum(x, axis=1), lambda x: rlx.argmax(x, axis=1), lambda x: rlx.cumsum(x, axis=1)):
        found, body = text(build, (9000, 2003))
        assert (p := found.peel) and (p.whole + p.beside, p.size) == (2003, size) and f"rlx_fetch<{size}>" in body
    for other in ("u8", "i16", "f64"):
        assert cubin(text_of(launch_of(one(lambda g: rlx.cumsum(g.input("x", (64, 2003), other), axis=1))), "kernel"), "sm_90a")  # noqa: B023
    kept, _ = text(rlx.softmax, (64, 2003))
    assert bool(kept.peel) == (dtype == "f32")  # as many bf16 elements take longer to compute than to load
    assert not text(lambda x: rlx.sum(x, axis=1), (64, 2000))[0].peel and not text(rlx.softmax, (64, 301))[0].peel


LONG = {  # of 16-bit elements: op, rows, columns, dtype; threads, parts, vectors of a thread, whether they begin anywhere
    "a block": (rlx.softmax, 600, 20_000, "bf16", (256, 2, 5, False)),
    "anywhere": (rlx.softmax, 600, 13_003, "f16", (256, 1, 7, True)),
    "of words": (rlx.log_softmax, 140, 50_257, "bf16", (256, 4, 7, True)),
    "the longest of a block of 256": (rlx.softmax, 67, 151_936, "bf16", (256, 8, 10, False)),
    "longer": (rlx.softmax, 67, 250_000, "bf16", (512, 8, 8, False)),
    "a norm": (rlx.rms_norm, 300, 20_000, "bf16", (256, 2, 5, False)),
}


@pytest.mark.parametrize("name", LONG)
def test_elements_of_16_bits_share_registers_in_long_rows(name):
    op, rows, columns, dtype, wanted = LONG[name]
    found = launch_of(one(lambda g: op(g.input("x", (rows, columns), dtype))), "sm_90a")
    text = text_of(found, "kernel")
    row, body = found.row, text.split("kernel(")[1]
    assert row.packed and row.size == 8 and not found.kernel.locals  # exponentials are computed again
    assert (found.threads, found.parts, row.rounds, bool(found.peel)) == wanted
    loops = sum(isinstance(s, Loop) for s in found.kernel.body)
    assert body.count("rlx_stream<8>(") == 1 and body.count("rlx_again(") == loops - 1
    assert body.index("rlx_stream<8>(") < body.index("rlx_wide_")  # all loads come first
    assert "expf(" not in body and cubin(text, "sm_90a")


def test_rows_that_are_few_or_wide_have_registers_of_their_own_and_those_of_two_tensors_share_them():
    build = lambda rows, columns, dtype: lambda g: rlx.softmax(g.input("x", (rows, columns), dtype))  # noqa: E731
    for rows, columns, dtype in ((65, 50_257, "bf16"), (600, 20_000, "f32"), (4000, 5120, "bf16"), (9000, 5003, "bf16")):
        assert not launch_of(one(build(rows, columns, dtype)), "sm_90a").row.packed
    assert launch_of(one(build(4000, 20_000, "bf16")), "sm_80").row.packed  # a block has a row: no cluster
    both = one(lambda g: rlx.rms_norm(g.input("x", (600, 20_000), "bf16") + g.input("y", (600, 20_000), "bf16")))
    found = launch_of(both, "sm_90a").row
    assert found.packed and len(found.keys) == 2


def test_rows_are_not_computed_again_from_memory_that_a_result_may_have():
    """The result `o` may take the place of `x`, from which `e` would be computed after `o` is stored."""

    def build(g):
        x = g.input("x", (600, 13_003), "bf16").astype("f32")
        e = rlx.exp(x - rlx.max(x, axis=(1,), keepdims=True))
        o = (e / rlx.sum(e, axis=(1,), keepdims=True)).astype("bf16")
        return o, (e * rlx.sum(o.astype("f32"), axis=(1,), keepdims=True)).astype("bf16")

    g = rlx.Graph("g")
    g.set_outputs(list(build(g)))
    (step,) = lower(g, target("sm_90a"), rlx.CompileOptions()).steps
    assert may_overlap(step.kernel) and recomputed(step.kernel) is None
    assert launch_of(step.kernel, "sm_90a").kernel.locals and launch_of(one(lambda g: build(g)[0]), "sm_90a").row.packed


@pytest.mark.parametrize("name", ["pow", "f64", "two tensors"])
def test_rows_that_take_long_are_not_computed_again(name):
    def build(g):
        x = g.input("x", (600, 16_384), "bf16").astype("f64" if name == "f64" else "f32")
        y = x ** 2.5 if name == "pow" else x + g.input("m", (16_384,), "bf16").astype("f32") if name == "two tensors" else x
        return rlx.softmax(y).astype("bf16")

    *_, kernel = kernels(graph(build))
    assert kernel.locals and recomputed(kernel) is None


STAGED = {  # build, dims of its operands; whether a block copies rows
    "softmax": (lambda x: rlx.softmax(x), [(100_000, 49)], True),
    "a norm with parameters": (rlx.layer_norm, [(70_001, 19), (19,), (19,)], True),
    "maximum": (lambda x: rlx.max(x, axis=2), [(35_000, 2, 41)], True),
    "a sum of two": (lambda x, y: rlx.softmax(x + y), [(70_001, 33), (70_001, 33)], True),
    "rows in vectors": (lambda x: rlx.softmax(x), [(100_000, 8)], False),
    "running totals": (lambda x: rlx.cumsum(x, axis=1), [(70_001, 41)], True),
    "of few columns": (lambda x: rlx.cumsum(x, axis=1), [(70_001, 16)], True),
    "from the end": (lambda x: rlx.cumsum(x, axis=1, reverse=True), [(70_001, 41)], False),
    "few": (lambda x: rlx.softmax(x), [(60_000, 49)], False),
    "long": (lambda x: rlx.softmax(x), [(100_000, 197)], False),
    "few elements to sum": (lambda x: rlx.sum(x, axis=1), [(100_000, 11)], False),
    "columns": (lambda x: rlx.softmax(x, axis=0), [(49, 100_000)], False),
    "the place of the greatest": (lambda x: rlx.argmax(x, axis=1), [(70_001, 41)], False),
    "a bias for each head": (lambda x, y: rlx.softmax(x + y), [(512, 6, 49, 49), (6, 49, 49)], False),
    "rows of another tensor": (lambda x: rlx.sum(x.T, axis=1), [(49, 100_000)], False),
}


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", STAGED)
def test_short_rows_pass_through_shared_memory(name, dtype):
    build, dims, copied = STAGED[name]
    *_, kernel = kernels(graph(lambda g: build(*(g.input(f"x{n}", d, dtype) for n, d in enumerate(dims)))))
    found = launch_of(kernel, "sm_90a")
    assert isinstance(found, StagedLaunch) == copied
    if copied:
        text = text_of(found, "kernel")
        rows, size = [row for _, row, _, _ in found.rows], dims[0][-1]
        assert {row.size for row in rows} == {size} and found.shared <= 400 * found.threads
        assert text.split("kernel(")[1].count("rlx_stage<") == sum(d[-1] == size and len(d) > 1 for d in dims)
        assert dtype == "f32" or "expf(" not in text.split("kernel(")[1]
        for arch in ("sm_80", "sm_90a"):
            assert cubin(text, arch)


def shares(x):
    """Each element of its row's sum."""
    return x / rlx.sum(x, axis=1, keepdims=True)


EXPONENTIALS = {  # build; the function for results of 16 bits
    "softmax": (lambda x: rlx.softmax(x), "rlx_exp_17_flushed("),
    "its logarithm": (lambda x: rlx.log(rlx.softmax(x)), "rlx_exp_17("),
    "without the maximum": (lambda x: shares(rlx.exp(x)), "rlx_exp_17("),
    "less another maximum": (lambda x: shares(rlx.exp(x * 0.5 - rlx.max(x, axis=1, keepdims=True))), "rlx_exp_17("),
    "its root": (lambda x: rlx.sqrt(rlx.softmax(x)), "rlx_exp_17("),
    "what is not 0": (lambda x: rlx.where(rlx.softmax(x) > 0.0, 1.0, 0.0), "rlx_exp_17("),
    "times others": (lambda x: rlx.softmax(x) * x, "rlx_exp_17("),
    "of some": (lambda x: (lambda e: e / rlx.sum(e * x, axis=1, keepdims=True))(rlx.exp(x - rlx.max(x, axis=1, keepdims=True))),
                "rlx_exp_17("),
}  # fmt: skip


@pytest.mark.parametrize("rows, columns", [(600, 2000), (140, 50_304), (70_000, 33)])
@pytest.mark.parametrize("name", EXPONENTIALS)
def test_only_results_of_16_bits_have_short_exponentials(name, rows, columns):
    """Those are flushed to 0 where nothing can tell."""
    build, function = EXPONENTIALS[name]
    for dtype in ("bf16", "f32"):
        *_, kernel = kernels(graph(lambda g: build(g.input("x", (rows, columns), "bf16").astype("f32")).astype(dtype)))  # noqa: B023
        text = text_of(launch_of(kernel, "sm_90a"), "kernel").split("kernel(")[1]
        assert {*re.findall(r"\w*exp\w*\(", text)} == {function if dtype == "bf16" else "expf("}


@pytest.mark.parametrize("axes", [(1, 0), (2, 1, 0), (0, 2, 1)])
def test_transposes_go_through_shared_memory(axes):
    dims = (64, 96, 80)[: len(axes)]
    moved = one(lambda g: rlx.copy(rlx.transpose(g.input("x", dims, "bf16"), axes)))
    mixed = one(lambda g: g.input("x", tuple(dims[a] for a in axes), "f32") + rlx.transpose(g.input("y", dims, "f32"), axes))
    for found in (launch_of(moved, "sm_90a"), launch_of(mixed, "sm_90a")):
        assert isinstance(found, TileLaunch) and len(found.staged) == 1
        assert cubin(text_of(found, "kernel"), "sm_90a")


@pytest.mark.parametrize("dtype, sector", [("bf16", 16), ("f32", 8)])
def test_transposed_rows_that_begin_anywhere_are_stored_in_vectors_from_a_sector_on(dtype, sector):
    made = lambda rows, cols: launch_of(one(lambda g: rlx.copy(rlx.transpose(g.input("x", (rows, cols), dtype)))), "sm_90a")  # noqa: E731
    found = made(1334, 6400)
    text = text_of(found, "kernel")
    assert isinstance(found, TileLaunch) and found.shift and found.shift.most == sector
    assert f"head = -(start & {sector - 1})" in text and f"rlx_put<{sector // 2}>(b0" in text and cubin(text, "sm_90a")
    plain = made(1336 - 8 * (dtype == "f32"), 6400), made(1335, 6401), made(1334, 640)  # in vectors; read in none; of few tiles
    assert all(isinstance(each, TileLaunch) and not each.shift for each in plain)


def test_tiles_are_read_only_where_the_kernel_reads():
    """Rows of one part of a concat are outside the memory of the other."""
    joined = one(lambda g: rlx.copy(rlx.transpose(rlx.concat(*(g.input(n, (48, 96), "f32") for n in "xy"), axis=0), (1, 0))))
    found = launch_of(joined, "sm_90a")
    text = text_of(found, "kernel").split("kernel(")[1]
    assert isinstance(found, TileLaunch) and text.count("rlx_fetch<4>(got") == 2
    assert all("if (t" in line for line in text.splitlines() if "rlx_fetch<4>(got" in line)


def test_an_index_beyond_32_bits_stays_out_of_range():
    kernel = one(lambda g: rlx.gather(g.input("x", (5,), "f32"), g.input("i", (2,), "i64")))
    text = text_of(launch_of(kernel, "sm_90a"), "kernel")
    assert "rlx_position(x0)" in text and cubin(text, "sm_90a")


def test_sums_by_index_take_a_lane_for_each_column():
    given = lambda g: (g.input(n, (many, 40_000), t) for n, many, t in (("x", 10, "f32"), ("i", 100, "i32"), ("u", 100, "f32")))  # noqa: E731
    found = launch_of(one(lambda g: rlx.scatter_elements(*given(g), axis=0, mode="add")), "sm_90a")
    assert (found.team, found.lanes, found.threads, found.blocks) == (1, 32, 32, 1250)
    text = text_of(found, "kernel")
    assert "__sync" not in text.split("kernel(")[1] and cubin(text, "sm_90a")


@pytest.mark.parametrize("dims, chosen, axis", [((100, 64), (500,), 0), ((3, 90, 70), (50, 4), 1), ((15_000, 2), (20_000,), 0)])
def test_blocks_share_the_places_of_sums_by_index(dims, chosen, axis):
    def build(g, count=chosen):
        more = g.input("u", (*dims[:axis], *count, *dims[axis + 1 :]), "bf16")
        return rlx.scatter_add(g.input("x", dims, "bf16"), g.input("i", count, "i64"), more, axis=axis)

    found = launch_of(one(build), "sm_90a")
    assert isinstance(found, ScatterLaunch) and found.rows >= found.at_once
    groups = math.prod(dims) // dims[axis] // found.vector
    assert math.gcd(8, *dims[1:][-1:]) % found.vector == 0 and found.blocks >= 25
    assert found.blocks == -(-dims[axis] // found.rows) * -(-groups // found.groups)
    marks = -(-math.prod(chosen) // (32 * found.grain)) if math.prod(chosen) >= 8192 else 0  # of each block, of some indices each
    assert (found.words_each, found.counters) == (marks, found.blocks * marks + 3 if marks else 0)
    assert cubin(text_of(found, "kernel"), "sm_80")


def test_long_rows_are_divided():
    counts = lambda build: [launch_of(kernel, "sm_90a").blocks for kernel in kernels(graph(build))]  # noqa: E731
    assert counts(lambda g: rlx.cumsum(g.input("x", (1, 1_000_003), "f32"), axis=1)) == [245]
    assert counts(lambda g: rlx.cumsum(g.input("x", (1, 8_000_003), "f32"), axis=1)) == [977], "longer parts, where they are many"
    assert counts(lambda g: rlx.cumsum(g.input("x", (1024, 4096), "f32"), axis=1)) == [1024]
    assert max(counts(lambda g: rlx.top_k(g.input("x", (1, 151_936), "f32"), k=50)[0])) >= 32
    assert len(counts(lambda g: rlx.top_k(g.input("x", (64, 1000), "f32"), k=5)[0])) == 1


def test_few_numbers_of_a_long_sum_are_f64():
    """A multiprocessor converts 16 in a clock: a thread adds some in f32 first."""
    for axis, total, few in ((0, "rlx_several<double, 4> p0;", "s0.at[v] += x0;"), (1, "double p0 = ", "s0 += x0;")):
        kernel = one(lambda g: rlx.sum(g.input("x", (20_000, 20_000), "bf16"), axis=(axis,)))  # noqa: B023
        text = text_of(launch_of(kernel, "sm_90a"), "kernel")
        assert text.count(total) == 1 and few in text and "(double)x0" not in text and cubin(text, "sm_90a")


PARTED = {  # build, dims, parts, whether they wait for each other
    "a running total": (lambda x: rlx.cumsum(x, axis=1), (3, 100_003), 33, False),
    "of columns": (lambda x: rlx.cumsum(x, axis=0, reverse=True), (65_536, 1024), 256, False),
    "a row to keep": (rlx.softmax, (1000, 100_003), 7, True),
    "few long rows": (rlx.softmax, (4, 151_936), 30, True),
    "a row to reduce": (lambda x: rlx.argmax(x, axis=1), (2, 151_936), 38, True),
}


@pytest.mark.parametrize("name", PARTED)
def test_lines_are_divided_among_blocks(name):
    build, dims, parts, adjacent = PARTED[name]
    kernel = one(lambda g: build(g.input("x", dims, "f32")))
    found, older = launch_of(kernel, "sm_90a"), launch_of(kernel, "sm_80")
    assert (found.parts, found.adjacent, found.blocks) == (parts, adjacent, found.lines * parts)
    assert found.clustered == (found.lines >= 17 and adjacent) and not older.clustered  # a block for every multiprocessor
    for at, arch in ((found, "sm_90a"), (older, "sm_80")):
        assert at.part * at.parts >= max(dims) > at.part * (at.parts - 1)
        assert at.counters == (0 if at.clustered else 2 * at.words * at.lines) and not may_join(at)
        assert cubin(text_of(at, "kernel"), arch)


@pytest.mark.parametrize("dims, axis, parts", [((4096, 512), 0, 8), ((8, 70, 50), 1, 1), ((3, 2000, 70), 1, 4)])
def test_a_softmax_along_any_axis_is_one_kernel(dims, axis, parts):
    found = launch_of(one(lambda g: rlx.softmax(g.input("x", dims, "bf16"), axis=axis)), "sm_90a")
    assert found.row and (found.lanes, found.parts) == (32, parts)
    assert cubin(text_of(found, "kernel"), "sm_90a")


def test_a_line_with_a_check_or_for_one_block_is_not_divided():
    for build, dims in ((lambda x: rlx.softmax(x), (4, 4096)), (lambda x: rlx.argmax(x, axis=1), (2000, 151_936))):
        assert launch_of(one(lambda g: build(g.input("x", dims, "f32"))), "sm_90a").parts == 1  # noqa: B023
    assert launch_of(one(lambda g: rlx.cumsum(g.input("x", (40, 4000), "f32"), axis=1)), "sm_90a").parts == 1


@pytest.mark.parametrize("dtype", ["f32", "f64", "bf16", "i64", "u8"])
@pytest.mark.parametrize("length", [2, 77, 1024, 9000])
def test_rows_are_sorted_in_shared_memory(dtype, length):
    """A dtype decides how a value becomes a key of 4 or 8 bytes, and a length with the bytes of a key everything else. So each
    length is compiled for both, and each dtype at one length."""
    found = launch_of(one(lambda g: rlx.sort(g.input("x", (70, length), dtype), descending=True)[1]), "sm_90a")
    assert isinstance(found, SortLaunch)
    text = text_of(found, "kernel")
    if dtype in ("f32", "f64") or length == 77:
        assert cubin(text, "sm_80" if found.shared < 99 << 10 else "sm_90a")


def test_rows_are_stored_before_their_cast_and_read_so():
    def build(g):
        x = g.input("x", (8192, 384), "bf16")
        y = x @ g.input("w", (384, 384), "bf16") + x
        return rlx.layer_norm(y, g.input("a", (384,), "bf16"), g.input("b", (384,), "bf16")) + y

    (product,) = [kernel for kernel in kernels(graph(build)) if "matmul" in kernel.origin]
    assert [b.dtype.name for b in product.buffers if b.writable] == ["bf16"]


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dims, dtype", [((2, 1_048_603), "f32"), (((1 << 19) + 40,), "i64"), (((1 << 20) + 16,), "i16")])
def test_top_k_of_longer_rows_is_divided(dims, dtype, largest):
    """Also where the first ones are behind all parts, or too few numbers for k are finite."""
    g, kind = rlx.Graph("g"), rlx.as_dtype(dtype)
    g.set_outputs(list(rlx.top_k(g.input("x", dims, dtype), k=7, largest=largest)))
    made = legalise(g, Compilation(HOPPER, rlx.CompileOptions()))
    assert len(made.nodes()) > len(g.nodes())
    x = np.random.default_rng(0).integers(-9, 9, dims).astype(kind.numpy)  # many ties
    x[..., -2:] = 20 if largest else -20
    if kind.is_float:
        x[0], x[0, 77777::300_000], x[1, ::100_000] = -np.inf if largest else np.nan, 3, np.nan
    for found, wanted in zip(evaluate(made, {"x": x})[0], evaluate(g, {"x": x})[0], strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dims, dtype", [((1 << 24,), "f32"), ((3, 3_000_001), "bf16"), ((99, 600_000), "i64"), ((2**30,), "u8")])
@pytest.mark.parametrize("kept", [1, 512])
def test_long_rows_are_not_sorted_for_a_few_elements(dims, dtype, kept):
    found = [launch_of(x, "sm_90a") for x in kernels(graph(lambda g: rlx.top_k(g.input("x", dims, dtype), k=kept)[1]))]
    sorts = [x for x in found if isinstance(x, SortLaunch)]
    assert len(sorts) > 1 and all(isinstance(x, SelectLaunch) or x.sort.n < 8192 for x in sorts)


@pytest.mark.parametrize("op", [rlx.softmax, rlx.log_softmax])
@pytest.mark.parametrize("dims, axis", [((2, 17_000, 4), 1), ((16_400, 5), 0), ((16_411, 5), 0)])  # a prime
def test_softmax_down_columns_is_divided(op, dims, axis):
    g = rlx.Graph("g")
    g.set_outputs([op(g.input("x", dims, "f32"), axis=axis)])
    made = legalise(g, Compilation(HOPPER, rlx.CompileOptions()))
    assert len(made.nodes()) > len(g.nodes())
    x = np.random.default_rng(0).normal(size=dims).astype(np.float32) * 30
    column = x.reshape(-1, *dims[axis:])[0]
    assert 4 * column.shape[0] > COLUMN_BYTES  # no kernel keeps it
    column[:100, 0] = -np.inf  # whole parts
    column[:, 1], column[3, 2], column[5, 3] = -np.inf, np.inf, np.nan
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(evaluate(made, {"x": x})[0][0], evaluate(g, {"x": x})[0][0], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("op", [rlx.softmax, rlx.log_softmax])
@pytest.mark.parametrize("length", [600_001, 1 << 20])
def test_softmax_of_a_row_that_no_kernel_keeps_is_divided(op, length):
    g = rlx.Graph("g")
    g.set_outputs([op(g.input("x", (4, length), "f32"))])
    first, *_, last = lower(g, HOPPER, rlx.CompileOptions()).steps
    assert launch_of(first.kernel).blocks > 64 and launch_of(last.kernel).blocks > 64
    made = legalise(g, Compilation(HOPPER, rlx.CompileOptions()))
    x = np.random.default_rng(0).normal(size=(4, length)).astype(np.float32) * 30
    x[0, :9000] = -np.inf  # a whole part
    x[1], x[2, 3], x[3, 5] = -np.inf, np.inf, np.nan
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(evaluate(made, {"x": x})[0][0], evaluate(g, {"x": x})[0][0], rtol=2e-6, atol=1e-6)


def test_no_tile_where_whole_lines_are_read():
    for build in (
        lambda g: rlx.copy(rlx.transpose(g.input("x", (8, 128, 12, 64), "f32"), (0, 2, 1, 3))),
        lambda g: g.input("x", (64, 64), "f32") * g.input("y", (64, 1), "f32"),
        lambda g: rlx.copy(rlx.transpose(g.input("x", (4096, 3), "f32"), (1, 0))),
    ):
        assert type(launch_of(one(build), "sm_90a")) is Launch


def test_a_team_has_read_what_one_of_its_threads_overwrites(monkeypatch):
    for module in (scatter, streamed, binned):
        monkeypatch.setattr(module, "way_of", lambda kernel: (scatter.scatter_of(kernel), "team"))
    given = lambda g: (g.input(n, (99, many), t) for n, many, t in (("x", 9000, "f32"), ("i", 2000, "i32"), ("u", 2000, "f32")))  # noqa: E731
    text = text_of(launch_of(one(lambda g: rlx.scatter_elements(*given(g), axis=1, mode="add")), "sm_90a"), "kernel")
    lines = [line.strip() for line in text[text.index("extern") :].splitlines()]
    (added,) = [n for n, line in enumerate(lines) if line.startswith("if (t") and "l0[" in line]
    begun = lines.index("if (me == 0) {")  # all updates, by one thread
    ended = lines.index("__syncthreads();", begun)
    assert lines[begun - 1] == "__syncthreads();" and begun < added < ended and {*lines[added + 1 : ended]} == {"}"}


def test_vectors_need_aligned_accesses_of_all_elements_or_none():
    kernel = one(lambda g: g.input("x", (64, 64), "bf16") * 2.0)
    (buffer, *_), v, row = [b for b in kernel.buffers if not b.writable], Var("v"), Var("row")
    load = lambda index, guard=None: Load(buffer, index, guard)  # noqa: E731
    at = k.add(k.mul(row, const(64)), v)
    assert vectors.loads((), (load(at),), v, 8)
    assert not vectors.loads((), (load(k.add(at, const(1))),), v, 8)  # starts between two vectors
    assert not vectors.loads((), (load(k.mul(v, const(2))),), v, 8)  # every other element
    assert not vectors.loads((), (load(at, k.lt(v, const(3))),), v, 8)
    assert vectors.loads((), (load(at, k.lt(v, const(16))),), v, 8)
    assert vectors.width((), (load(at),), v, 64) == 8 and vectors.width((), (load(at),), v, 63) == 1


def test_few_rows_of_attention_are_one_launch_with_the_keys_in_parts():
    q, kv = (2, 16, 1, 128), (2, 8, 4096, 128)
    build = lambda g: rlx.attention(  # noqa: E731
        g.input("q", q, "f32"), g.input("k", kv, "bf16"), g.input("v", kv, "bf16"), g.input("at", (), "i32"),
        mask="causal", positioned=True,
    )  # fmt: skip
    found = launch_of(one(build), "sm_80")
    assert isinstance(found, attention.AttentionLaunch) and found.lanes == 16
    assert found.blocks == 16 * found.parts and found.counters == 16 and found.parts == 16
    assert cubin(text_of(found, "kernel"), "sm_80")


def test_split_keys_fill_the_gpu_only_when_heads_do_not():
    parts = lambda batch, keys: math.prod(s.blocks for s in _attentions(batch, keys))  # noqa: E731
    assert parts(1, 8192) >= 100 and parts(64, 8192) == 64 * 8 and parts(1, 100) == 8


def _attentions(batch: int, keys: int) -> list[attention.AttentionLaunch]:
    q, kv = (batch, 16, 1, 64), (batch, 8, keys, 64)
    g = graph(lambda g: rlx.attention(g.input("q", q, "bf16"), g.input("k", kv, "bf16"), g.input("v", kv, "bf16")))
    found = [launch_of(kernel, "sm_80") for kernel in kernels(g)]
    return [x for x in found if isinstance(x, attention.AttentionLaunch)]


# -- launches of a run ---------------------------------------------------------------------------------------------


def small_steps(arch: str = "sm_90a") -> Program:
    """Two independent kernels, then one that reads both, then a product, then one more."""
    g = rlx.Graph("g")
    x, y = g.input("x", (4, 64), "f32"), g.input("y", (4, 32), "f32")
    both = rlx.concat([rlx.softmax(x), rlx.softmax(y)], axis=1)
    out = rlx.softmax(both * 2.0)
    g.set_outputs([rlx.softmax(out @ g.input("w", (96, 4096), "f32")), out])
    return lower(g, target(arch), rlx.CompileOptions())


def test_small_kernels_are_stages_of_one_launch_in_the_order_of_their_values():
    program = small_steps()
    launches = launches_of(program, "sm_90a")
    stages = [stage for stages in launches for stage in stages]
    assert sorted(n for stage in stages for n in stage) == list(range(len(program.steps)))
    made, done = frozenset().union(*(s.writes for s in program.steps)), set()
    for stage in stages:
        steps = [program.steps[n] for n in stage]
        assert all(s.reads & made <= done for s in steps), "a value is read before the stage that makes it has ended"
        done |= frozenset().union(*(s.writes for s in steps))
    assert [len(stages) for stages in launches] == [2, 1, 1] and len(stages[0]) == 2
    assert all(len(stages) == 1 for stages in launches_of(program, "sm_80")), "no clusters there"


def test_small_states_are_committed_by_one_launch_and_large_ones_by_their_own():
    g = rlx.Graph("g")
    x = g.input("x", (4, 64), "f32")
    states = [g.handle(rlx.BufferHandle(name, shape, "f32")) for name, shape in zip("abc", [(4, 64), (64,), (4096, 4096)])]
    for state, value in zip(states, [x + states[0], states[1] * 2.0, rlx.transpose(states[2]) + 1.0]):
        g.assign(state, value)
    g.set_outputs([x])
    program = lower(g, HOPPER, rlx.CompileOptions())
    launches = CudaBackend().compile(program).launches["commit"]
    names = [sorted(program.buffers[b].name or "" for n in steps for b in program.commit[n].writes) for steps in launches]
    assert sorted(names) == [["a", "b"], ["c"]]


def test_a_kernel_does_not_move_in_front_of_one_whose_memory_it_reuses():
    program = small_steps()
    shared = replace(program, plan=replace(program.plan, offsets=dict.fromkeys(program.plan.offsets, 0)))
    stages = [stage for stages in launches_of(shared, "sm_90a") for stage in stages]
    assert stages == [(n,) for n in range(len(program.steps))]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_launches_of_several_kernels_compile(arch):
    program = small_steps(arch)
    artifact = CudaBackend().compile(program)
    several = [code for code in artifact.codes if len(code.more) > 1]
    assert several and all(code.cubin for code in several)
    assert set(artifact.texts()) == set(kernel_labels(program).values())


# -- without a GPU -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(refusal() is None, reason="there is a GPU")
def test_a_machine_without_a_gpu_says_what_is_missing():
    (reason,) = CudaBackend().probe().values()
    assert reason and not rlx.is_available("cuda")
    with pytest.raises(DeviceUnavailableError, match="cuda"):
        rlx.Session("cuda").compile(graph(lambda g: g.input("x", (3,), "f32") + 1.0))


GRIDS = [(1, 3), (3, 1), (1, 1), (2, 1, 3), (1, 4, 1, 5, 1), (2, 3), (1, 1, 64), (7, 1, 1), (1, 24, 32), (5, 1, 16), (1, 1 << 20)]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_thread_has_its_own_point_of_the_grid_also_along_axes_of_one(grid):
    out = Buffer("out", rlx.f32, math.prod(grid), writable=True)
    axes = [Var(f"a{n}", rlx.ir.dtype.index_) for n in range(len(grid))]
    place = linear([(v, math.prod(grid[n + 1 :])) for n, v in enumerate(axes)])
    at = launch_of(Kernel("k", (out,), (), tuple(zip(axes, grid)), (Store(out, place, const(1.0, rlx.f32)),)), "sm_90a")
    writer, found = CudaWriter(at), []
    lines = [re.sub(r"const rlx_index |const int |rlx_uindex |[(]rlx_uindex[)]|;", "", line) for line in writer.coordinates()]
    wanted = sorted({0, 1, at.points - 1, *np.random.default_rng(0).integers(0, at.points, 50).tolist()} - {at.points})
    for n in wanted:
        values = {"blockIdx": SimpleNamespace(x=n // at.threads), "threadIdx": SimpleNamespace(x=n % at.threads)}
        for line in (x for x in lines if not x.startswith("if")):
            exec(line.replace("/=", "//="), {}, values)
        found.append(tuple(values[name] if (name := writer.name(v, "g")) in values else values[f"{name}_0"] for v in axes))
    assert found == [tuple(map(int, np.unravel_index(n * at.vector, grid))) for n in wanted]


def test_the_greatest_of_a_long_row_is_found_by_many_blocks():
    g = rlx.Graph("greatest")
    g.set_outputs([rlx.max(g.input("x", (1, 151936), "f32"), axis=-1), rlx.min(g.input("y", (4096, 64), "f32"), axis=-1)])
    found = [launch_of(s.kernel) for s in lower(g, target("sm_90a"), rlx.CompileOptions()).steps]
    assert sorted((at.blocks, at.parts) for at in found) == [(38, 38), (512, 1)]


@pytest.mark.parametrize("name", ["matmul", "dequant_matmul", "segment_matmul"])
def test_products_of_every_shape_lower_for_a_gpu(name: str):
    """Of two vectors, without rows, without anything to sum: with a pointwise op behind each."""
    whole, _ = conformance.together(name, [c for c in cases(awkward=False, dtypes=HOPPER.dtypes) if c.op.name == name])
    whole.set_outputs([rlx.abs(v) for v in whole.outputs])
    assert sum(1 for _ in kernels(whole))
