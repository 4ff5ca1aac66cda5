"""Results of the CUDA backend on a GPU, beside f64, the reference and the CPU; without one skipped. Conformance runs all ops."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import device_conformance as conformance
import numpy as np
import pytest
from test_cuda import SOME_TILINGS, graph, kernels, on_gpu

import rlx
from rlx import backends
from rlx.backends.cuda import code, fma
from rlx.backends.cuda.fma import SIZES, FmaLaunch, Size, by_fma
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.select import SelectLaunch
from rlx.backends.cuda.tensor import Tiling, on_tensor_cores
from rlx.errors import IndexRangeError
from rlx.ir.evaluate import evaluate
from rlx.ir.kernel import Kernel


@on_gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
@pytest.mark.parametrize(
    "m, n, depth", [(512, 1024, 3072), (2048, 2048, 256), (300, 1000, 520), (1001, 1003, 205), (33, 40, 2000), (100, 99, 98)]
)
def test_products_agree_with_f64(m, n, depth, dtype):
    rng, host = np.random.default_rng(0), getattr(rlx, dtype).numpy
    x, y, r = (rng.standard_normal(shape).astype(host) for shape in ((m, depth), (n, depth), (m, n)))
    g = rlx.Graph("product")
    names = g.input("x", x.shape, dtype), g.input("y", y.shape, dtype), g.input("r", r.shape, dtype)
    g.set_outputs([names[0] @ rlx.transpose(names[1], (1, 0)) + names[2], names[0] @ rlx.reshape(names[1], (depth, n))])
    compiled = rlx.Session("cuda").compile(g)
    for got in (compiled.run({"x": x, "y": y, "r": r}), compiled.run({"x": x, "y": y, "r": r})):
        wide = [a.astype(np.float64) for a in (x, y, r)]
        for found, want in zip(got, (wide[0] @ wide[1].T + wide[2], wide[0] @ wide[1].reshape(depth, n))):
            error = np.linalg.norm(found.astype(np.float64) - want) / np.linalg.norm(want)
            assert error < (4e-6 if dtype == "f32" else 2.0 ** -(8 if dtype == "bf16" else 11))


@on_gpu
def test_gelu_keeps_its_digits_far_below_zero():
    """Where tanh rounds to -1, its sum with 1 has none of them."""
    x = np.linspace(-6, 6, 4001).astype(np.float32)
    g = graph(lambda g: rlx.gelu(g.input("x", x.shape, "f32"), approximate="tanh"))
    (found,) = rlx.Session("cuda").compile(g).run({"x": x})
    wide = x.astype(np.float64)
    u = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    np.testing.assert_allclose(found, wide / (1 + np.exp(-2 * u)), rtol=8e-6)


def fixed(monkeypatch, name: str, chosen: Callable[[Kernel], Launch | None]) -> None:
    """All products of the test are launched so, and compiled for it: code that the process or the disk keeps is of others."""
    monkeypatch.setenv("RLX_CACHE", "0")
    monkeypatch.setattr(backends.get("cuda"), "_codes", {})
    monkeypatch.setattr(code, name, lambda kernel, *args, **more: chosen(kernel))


@on_gpu
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("m, n, depth", [(13, 37, 29), (130, 260, 68), (257, 300, 1001)])
def test_every_size_of_f32_tiles_agrees_with_f64(monkeypatch, size, m, n, depth):
    """Tiles larger than the matrices, and those at an edge, which begin earlier than their neighbours end."""
    fixed(monkeypatch, "by_fma", lambda kernel: by_fma(kernel, size=size))
    test_products_agree_with_f64(m, n, depth, "f32")


@on_gpu
@pytest.mark.parametrize("m, n, depth", [(2048, 2181, 200), (2600, 2100, 1001), (3100, 2600, 333)])
def test_f32_tiles_that_blocks_share_agree_with_f64(monkeypatch, m, n, depth):
    """24, 93 and 261 tiles behind the first 264. The bits do not depend on which block is first."""
    launched: list[FmaLaunch | None] = []

    def large(kernel: Kernel) -> FmaLaunch | None:
        launched.append(by_fma(kernel, size=Size(128, 128, 8, 8)))
        return launched[-1]

    monkeypatch.setattr(fma, "HANDED", 0)
    fixed(monkeypatch, "by_fma", large)
    test_products_agree_with_f64(m, n, depth, "f32")
    rng = np.random.default_rng(0)
    given = {"x": rng.standard_normal((m, depth), np.float32), "y": rng.standard_normal((depth, n), np.float32)}
    g = graph(lambda g: g.input("x", (m, depth), "f32") @ g.input("y", (depth, n), "f32"))
    compiled = rlx.Session("cuda").compile(g)
    assert launched and all(x and x.shares for x in launched)
    first = compiled.run(given)[0].tobytes()
    assert all(compiled.run(given)[0].tobytes() == first for _ in range(10))


@on_gpu
def test_tiles_that_two_blocks_share_agree_with_f64(monkeypatch):
    """Of 192 tiles, 132 are of one block."""
    tiling = Tiling(128, 256, parts=2)
    fixed(monkeypatch, "on_tensor_cores", lambda kernel: on_tensor_cores(kernel, tiling=tiling))
    test_products_agree_with_f64(1536, 4096, 328, "bf16")


@on_gpu
@pytest.mark.parametrize("tiling", SOME_TILINGS, ids=str)
def test_every_kind_of_tiling_agrees_with_f64(monkeypatch, tiling):
    fixed(monkeypatch, "on_tensor_cores", lambda kernel: on_tensor_cores(kernel, tiling=tiling))
    test_products_agree_with_f64(136, 200, 1040, "bf16")


@on_gpu
@pytest.mark.parametrize("tiling", [Tiling(128, 192, queued=True), Tiling(128, 128, turns=True, queued=True)], ids=str)
def test_results_that_wait_for_others_agree_with_f64(monkeypatch, tiling):
    """Blocks have several tiles, some of them at edges."""
    fixed(monkeypatch, "on_tensor_cores", lambda kernel: on_tensor_cores(kernel, tiling=tiling))
    test_products_agree_with_f64(3001, 3080, 200, "bf16")


@on_gpu
@pytest.mark.parametrize("m, n, depth", [(300, 80, 160), (512, 1024, 3072), (16, 2000, 48)])
def test_integer_products_are_exact(m, n, depth):
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (m, depth), np.uint8), rng.integers(-128, 128, (n, depth), np.int8)
    compiled = rlx.Session("cuda").compile(
        graph(lambda g: rlx.int8_matmul(g.input("x", x.shape, "u8"), rlx.transpose(g.input("y", y.shape, "i8"), (1, 0))))
    )
    np.testing.assert_array_equal(compiled.run({"x": x, "y": y})[0], x.astype(np.int32) @ y.T.astype(np.int32))


@on_gpu
@pytest.mark.parametrize("name", ["add", "softmax", "matmul", "attention", "cumsum", "sort", "argmax", "take_rows"])
def test_ops_agree_with_the_reference(name):
    conformance.check_op("cuda", name)


@on_gpu
def test_random_numbers_have_the_bits_of_the_cpu():
    g = rlx.Graph("g")
    key, counter = g.input("key", (2,), "u32"), g.input("counter", (), "u32")
    g.set_outputs([rlx.random_bits(key, counter, dims=(3, 1001)), rlx.random_uniform(key, counter, dims=(1001,))])
    given = {"key": np.array([7, 1 << 31], np.uint32), "counter": np.array(5, np.uint32)}
    for ours, wanted in zip(rlx.Session("cuda").compile(g).run(given), rlx.Session("cpu").compile(g).run(given)):
        np.testing.assert_array_equal(np.asarray(ours).view(np.uint32), np.asarray(wanted).view(np.uint32))


SHAPES = {  # with odd sizes, so that threads and lanes are left over
    "transpose": (lambda x: rlx.copy(rlx.transpose(x, (1, 0))) * 2.0, (67, 131)),
    "running totals of rows": (lambda x: rlx.cumsum(x, axis=1), (5, 3001)),
    "running totals of columns": (lambda x: rlx.cumsum(x, axis=0, reverse=True), (517, 45)),
    "long running totals": (lambda x: rlx.cumsum(x, axis=1), (1, 1_000_003)),
    "divided running totals": (lambda x: rlx.cumsum(x, axis=1), (2, 1 << 18)),
    "running totals in many parts": (lambda x: rlx.cumsum(x, axis=1, exclusive=True), (2, 2_500_001)),
    "running totals of long columns": (lambda x: rlx.cumsum(x, axis=0), (9001, 77)),
    "running totals of columns that share sectors": (lambda x: rlx.cumsum(x, axis=0), (9001, 2004)),
    "running totals of integers": (lambda x: rlx.cumsum(x.astype("i64"), axis=1), (3, 70_000)),
    "column sums": (lambda x: rlx.sum(x, axis=(0,)), (1003, 77)),
    "greatest of columns": (lambda x: rlx.argmax(x, axis=0), (1003, 77)),
    "greatest of rows": (lambda x: rlx.argmax(x, axis=1), (77, 1003)),
    "greatest of vectors": (lambda x: rlx.argmax(x.astype("bf16"), axis=1), (77, 4096)),
    "softmax": (lambda x: rlx.softmax(x) * 64.0, (9, 1001)),
    "softmax of columns": (lambda x: rlx.softmax(x, axis=0) * 640.0, (2100, 130)),
    "softmax between axes": (lambda x: rlx.softmax(x, axis=1) * 64.0, (3, 70, 50)),
    "softmax of long columns": (lambda x: rlx.softmax(x, axis=0) * 17000.0, (17_000, 33)),
    "softmax of long rows": (lambda x: rlx.softmax(x) * 50_001.0, (3, 50_001)),
    "softmax of many long rows": (lambda x: rlx.softmax(x) * 50_001.0, (150, 50_001)),
    "softmax of longer rows": (lambda x: rlx.softmax(x) * 600_001.0, (2, 600_001)),
    "softmax of many columns": (lambda x: rlx.softmax(x, axis=0) * 640.0, (2100, 600)),
    "norm of long rows": (lambda x: x - rlx.mean(x * x, axis=1, keepdims=True), (2, 200_000)),
    "greatest of long rows": (lambda x: rlx.argmax(x * 1.0, axis=1), (3, 50_001)),
    "least of one row": (lambda x: rlx.argmin(x, axis=0), (2_300_001,)),
    "sum of everything": (lambda x: rlx.sum(x * x), (3, 7, 11, 30_011)),
    "product of few rows": (lambda x: rlx.prod(x * 0 + 1, axis=1), (5, 400_002)),
    "pad of rows": (lambda x: rlx.pad(x, low=(0, 1, 0, 1), high=(0, 3, 3, 1), value=2), (26, 3, 28, 241)),
    "pad of long rows": (lambda x: rlx.pad(x.astype("i8"), low=(3, 1), high=(1, 1)), (150, 2303)),
    "pad of axes that are one": (lambda x: rlx.pad(x.astype("bf16"), low=(0, 1, 0, 0), high=(0, 3, 0, 0)), (26, 3, 128, 241)),
    "pad of short rows": (lambda x: rlx.pad(x, low=(1, 0, 1, 0), high=(0, 3, 0, 1), value=2), (26, 30, 128, 50)),
    "rows side by side": (lambda x: rlx.concat([x, x[:, :, 5:], x], axis=2), (40, 90, 81)),
    "sort of short rows": (lambda x: rlx.sort(x, descending=True)[1], (70, 77)),
    "sort of rows": (lambda x: rlx.sort(x)[1], (5, 3000)),
    "sort of wide elements": (lambda x: rlx.sort(x.astype("i64"), descending=True)[1], (3, 1500)),
    "sort of a block": (lambda x: rlx.sort(x)[1], (2, 20_000)),
    "sort beyond shared memory": (lambda x: rlx.sort(x)[1], (2, 40_000)),
    "top k of long rows": (lambda x: rlx.top_k(x, k=9)[1], (2, 50_001)),
}


@on_gpu
@pytest.mark.parametrize("name", SHAPES)
def test_awkward_shapes_agree_with_the_reference(name):
    build, dims = SHAPES[name]
    g = graph(lambda g: build(g.input("x", dims, "f32")))
    x = np.random.default_rng(3).integers(-4, 5, dims).astype(np.float32)  # sums are exact, and many elements are equal
    (found,), ((wanted,), _) = rlx.Session("cuda").compile(g).run({"x": x}), evaluate(g, {"x": x})
    np.testing.assert_allclose(found, wanted, rtol=0 if "softmax" not in name else 1e-5)


@on_gpu
@pytest.mark.parametrize("dims, axes", [
    ((6_506_843,), (0,)), ((3, 1, 700_000), (2,)), ((64, 20, 300), (0, 2)), ((32, 64, 56, 56), (0, 2, 3)),
    ((2, 3, 600_011), (0, 2)), ((40, 90, 1033), (0, 1, 2)), ((20, 9, 700, 33), (0, 2)), ((40_003, 41), (0,)),
    ((128, 51, 7, 7), (0, 2, 3)),
])  # fmt: skip
@pytest.mark.parametrize("mean, spread, dtype", [(0.5, 1.0, "f32"), (123_456.789, 0.3, "f32"), (3.0, 1.0, "bf16")])
def test_large_variances_agree_with_f64(dims, axes, mean, spread, dtype):
    x = (np.random.default_rng(0).standard_normal(dims) * spread + mean).astype(getattr(rlx, dtype).numpy)
    compiled = rlx.Session("cuda").compile(graph(lambda g: rlx.variance(g.input("x", dims, dtype), axis=axes)))
    (found,), (again,) = compiled.run({"x": x}), compiled.run({"x": x})
    wanted = np.var(x.astype(np.float64), axis=axes)
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=2.0**-8 if dtype == "bf16" else 1e-6)
    assert found.tobytes() == again.tobytes()


LONG = {  # op, rows, columns: a block of 256, two, four and eight, of 512; rows that begin anywhere; none that share registers
    "one block": (rlx.softmax, 600, 13_003), "two": (rlx.softmax, 300, 20_000), "two of odd rows": (rlx.log_softmax, 300, 30_522),
    "four": (rlx.softmax, 140, 50_257), "seven": (rlx.log_softmax, 80, 100_003), "ten rounds": (rlx.softmax, 67, 151_936),
    "blocks of 512": (rlx.log_softmax, 67, 250_000), "a norm": (rlx.rms_norm, 300, 20_004), "a warp": (rlx.softmax, 600, 1000),
    "a block": (rlx.log_softmax, 600, 5003), "few": (rlx.softmax, 9, 50_257),
    "columns": (lambda x: rlx.softmax(x, axis=0), 3000, 77), "a block that ends early": (rlx.softmax, 2100, 7000),
    "whole warps": (rlx.softmax, 2100, 14_000), "blocks that stay": (rlx.softmax, 4301, 5120),
    "two that stay": (rlx.softmax, 1301, 16_384), "and of unequal parts": (rlx.log_softmax, 1101, 20_008),
}  # fmt: skip


@on_gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("name", LONG)
def test_long_rows_of_16_bits_agree_with_f64(name, dtype):
    """With rows of equal numbers, of one number among infinite ones, and of the largest numbers: infinite numbers of rms_norm
    would be NaN."""
    op, rows, columns = LONG[name]
    kind = rlx.as_dtype(dtype).numpy
    x = (np.random.default_rng(0).normal(size=(rows, columns)) * 4).astype(kind)
    x[1], x[2, ::3] = 7.0, 60.0
    if op is not rlx.rms_norm:
        x[3], x[3, columns // 2], x[4] = -np.inf, 2.0, 6e4
    g = graph(lambda g: op(g.input("x", (rows, columns), dtype)))
    wide = graph(lambda g: op(g.input("x", (rows, columns), "f64")))
    compiled = rlx.Session("cuda").compile(g)
    first = compiled.run({"x": x})[0]
    wanted = evaluate(wide, {"x": x.astype(np.float64)})[0][0]
    exact = {"bf16": 2.0**-8, "f16": 2.0**-10}[dtype]
    np.testing.assert_allclose(first.astype(np.float64), wanted, rtol=exact, atol=2.0**-24 if dtype == "f16" else 2.0**-120)
    np.testing.assert_array_equal(compiled.run({"x": x})[0].view(np.uint16), first.view(np.uint16))


ALIKE = {  # op of x, y and vectors a, b; rows, columns of blocks or clusters
    "a block": (lambda x, y, a, b: rlx.layer_norm(x, a, b), 3001, 5120),
    "eight": (lambda x, y, a, b: rlx.layer_norm(x, a, b), 301, 50_304),
    "whole warps": (lambda x, y, a, b: rlx.layer_norm(x, a, b), 2101, 9000),
    "whole warps, of a sum": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), 2101, 10_000),
    "one total": (lambda x, y, a, b: rlx.rms_norm(x, a), 701, 50_304),
    "a sum": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), 901, 20_000),
    "ends early": (lambda x, y, a, b: rlx.layer_norm(x, a, b), 901, 20_004),
    "parts that are not equal": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), 407, 50_312),
    "more than one row": (lambda x, y, a, b: rlx.rms_norm(x + y, a), 301, 100_000),
    "a maximum": (lambda x, y, a, b: rlx.softmax(x + a) * y, 301, 50_304),
    "a block that stays": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), 3001, 4104),
    "two that stay, with vectors of 8 bytes": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), 1203, 12_004),
    "no vectors": (lambda x, y, a, b: rlx.layer_norm(x), 1801, 12_288),
    "exponentials": (lambda x, y, a, b: rlx.log_softmax(x + a), 803, 20_008),
    "sixteen that stay": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), 61, 151_936),
    "vectors that have no room": (lambda x, y, a, b: rlx.layer_norm(x + y, a, b), 47, 250_004),
    "long rows": (lambda x, y, a, b: rlx.softmax(x), 221, 90_004),
    "two waits": (lambda x, y, a, b: rlx.softmax(x * a) * rlx.rsqrt(rlx.mean(x * x, axis=1, keepdims=True)), 901, 12_288),
}  # fmt: skip


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("name", ALIKE)
def test_rows_that_read_the_same_vectors_agree_with_f64(name, dtype):
    op, rows, columns = ALIKE[name]
    rng, kind = np.random.default_rng(0), rlx.as_dtype(dtype).numpy
    given = {n: rng.normal(size=(rows, columns) if n in "xy" else columns).astype(kind) for n in "xyab"}
    given["x"][1], given["x"][2, 4:900], given["x"][3, :9] = 7, -9, 400
    given["y"][1], given["x"][4] = 0, given["x"][4] + kind.type(20)

    def build(dtype):
        return graph(lambda g: op(*(g.input(n, v.shape, dtype) for n, v in given.items())))

    compiled = rlx.Session("cuda").compile(build(dtype))
    first, again = (compiled.run(given)[0] for _ in range(2))
    wanted = evaluate(build("f64"), {n: v.astype(np.float64) for n, v in given.items()})[0][0]
    near = 2.0**-7 if dtype == "bf16" else 1e-5
    np.testing.assert_allclose(first.astype(np.float64), wanted, rtol=near, atol=near)
    assert first.tobytes() == again.tobytes()


SHORT = {  # op of x, a param w and y, columns
    "softmax": (lambda x, w, y: rlx.softmax(x), 49), "of 16 bits in step": (lambda x, w, y: rlx.log_softmax(x), 50),
    "padded": (lambda x, w, y: rlx.softmax(x), 64), "eleven": (lambda x, w, y: rlx.softmax(x), 11),
    "a norm": (lambda x, w, y: rlx.layer_norm(x, w, w), 41), "of a sum": (lambda x, w, y: rlx.rms_norm(x + y, w), 33),
    "maximum": (lambda x, w, y: rlx.max(x.reshape(7, 10_001, 19), axis=2), 19), "sums": (lambda x, w, y: rlx.sum(x, axis=1), 151),
    "and the sum itself": (lambda x, w, y: [x + y, rlx.softmax(x + y)], 112),
    "in place": (lambda x, w, y: rlx.softmax(rlx.sort(x)[0]), 49),
    "the greatest": (lambda x, w, y: rlx.argmax(x, axis=1), 41), "totals": (lambda x, w, y: rlx.cumsum(x, axis=1), 41),
    "totals before": (lambda x, w, y: rlx.cumsum(x, axis=1, exclusive=True), 12),
    "masked": (lambda x, w, y: rlx.softmax(x * 0.5 + w), 32), "wider": (lambda x, w, y: rlx.softmax(x.astype("f32")), 24),
}  # fmt: skip


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", SHORT)
def test_short_rows_agree_with_f64(name, dtype):
    """The last block has rows for some of its threads."""
    build, columns = SHORT[name]
    rng, kind = np.random.default_rng(0), rlx.as_dtype(dtype).numpy
    x, y = (rng.normal(size=(70_007, columns)).astype(kind) for _ in range(2))
    w = rng.normal(size=columns).astype(kind)
    if "softmax" in name or name == "padded":
        x[1], x[2], x[3, 1:] = 7.0, 6e4, -np.inf

    given = {"x": x, "w": w, "y": y}

    def made(wide: str) -> rlx.Graph:
        g = rlx.Graph("g")
        out = build(*(g.input(n, a.shape, wide) for n, a in given.items()))
        g.set_outputs(out if isinstance(out, list) else [out])
        return g

    found = rlx.Session("cuda").compile(made(dtype)).run(given)
    wanted, _ = evaluate(made("f64"), {n: a.astype(np.float64) for n, a in given.items()})
    near = {"f32": 1e-5, "bf16": 2.0**-7, "f16": 2.0**-9}[dtype]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a.astype(np.float64), b, rtol=near, atol=near * np.nanmean(np.abs(b)))


@on_gpu
@pytest.mark.parametrize("dims, chosen, axis", [((100, 64), (5000,), 0), ((3, 90, 70), (50, 4), 1), ((9000,), (20_000,), 0)])
def test_sums_by_index_keep_their_order(dims, chosen, axis):
    rng = np.random.default_rng(0)
    x, i = rng.normal(size=dims).astype(np.float32), rng.integers(0, dims[axis], chosen)
    u = rng.normal(size=(*dims[:axis], *chosen, *dims[axis + 1 :])).astype(np.float32)
    g = rlx.Graph("g")
    g.set_outputs([rlx.scatter_add(*(g.input(n, a.shape, str(a.dtype)) for n, a in zip("xiu", (x, i, u))), axis=axis)])
    compiled = rlx.Session("cuda").compile(g)
    given = {"x": x, "i": i, "u": u}
    np.testing.assert_array_equal(compiled.run(given)[0], rlx.Session("cpu").compile(g).run(given)[0])
    with pytest.raises(IndexRangeError):
        compiled.run({**given, "i": np.full(chosen, dims[axis])})
    same = {**given, "i": np.full(chosen, dims[axis] - 1)}  # more than a block has room for
    np.testing.assert_array_equal(compiled.run(same)[0], rlx.Session("cpu").compile(g).run(same)[0])


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16", "f8e4m3", "i8", "u32"])
@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("dims", [(3, 1100), (3, 5000), (2, 150_000)])  # by comparisons; by digits: a block, several blocks
def test_sorts_keep_values_and_the_order_of_equal_ones(dtype, descending, dims):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 120, dims).astype(rlx.as_dtype(dtype).numpy)
    if rlx.as_dtype(dtype).is_float:
        least = -448 if dtype == "f8e4m3" else -np.inf
        x[:, ::7], x[:, ::11], x[:, 5::13], x[1, ::50], x[0, :9] = 0.0, -0.0, -3.5, np.nan, least
    g = rlx.Graph("g")
    g.set_outputs(list(rlx.sort(g.input("x", x.shape, dtype), descending=descending)))
    for found, wanted in zip(rlx.Session("cuda").compile(g).run({"x": x}), evaluate(g, {"x": x})[0], strict=True):
        found, wanted = found.astype(np.float64), wanted.astype(np.float64)
        np.testing.assert_array_equal(found, wanted)
        assert (np.signbit(found) == np.signbit(wanted))[found == found].all()


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16", "f8e4m3", "i8", "u32", "i64"])
@pytest.mark.parametrize("dims, kept", [((9, 2049), 7), ((7, 20_001), 300), ((140, 5120), 50), ((6, 60_000), 1000)])
def test_selected_elements_are_the_first_of_a_sort(dtype, dims, kept):
    """Rows of equal numbers, in order, of NaN and infinite ones; and rows whose first samples are of no use."""
    rng, kind = np.random.default_rng(0), rlx.as_dtype(dtype)
    x = (rng.standard_normal(dims) * 40).clip(-100 if kind.is_float or dtype[0] == "i" else 0, 100).astype(np.float32)
    x[0], x[1], x[2] = 3, np.sort(x[1]), -np.sort(-x[2])
    if kind.is_float and dtype != "f8e4m3":
        x[3, ::3], x[3, 1::3], x[3, 5::9], x[4, ::2] = np.nan, np.inf, -np.inf, -0.0
    x = x.astype(kind.numpy)
    for largest in (True, False):
        g, sorting = rlx.Graph("g"), rlx.Graph("sorting")
        g.set_outputs(list(rlx.top_k(g.input("x", dims, dtype), k=kept, largest=largest)))
        wide = "f64" if kind.is_float else dtype  # numpy sorts NaN of narrow floats elsewhere
        sorting.set_outputs([rlx.top_k(sorting.input("x", dims, wide), k=kept, largest=largest)[1]])
        (kernel,) = kernels(g)
        at = code.launch_of(kernel, "sm_90a")
        assert isinstance(at, SelectLaunch)
        given, compiled = x.copy(), rlx.Session("cuda").compile(g)
        starts = sampled(at.groups, dims[1] - at.span + 1)
        given[5, starts[:, None] + np.arange(1 if largest else at.span)] = 110  # one turn finds too few, or too many
        order = evaluate(sorting, {"x": given.astype(rlx.as_dtype(wide).numpy)})[0][0]
        wanted = np.take_along_axis(given, order, -1).astype(np.float64)
        for _ in range(2):  # what blocks have told one another is forgotten
            values, places = compiled.run({"x": given})
            np.testing.assert_array_equal(places, order)
            np.testing.assert_array_equal(values.astype(np.float64), wanted)
            assert (np.signbit(values.astype(np.float64)) == np.signbit(wanted))[wanted == wanted].all()


@on_gpu
@pytest.mark.parametrize("dims, dtype, kept", [((2, 1_100_003), "f32", 50), ((1 << 21,), "bf16", 999), ((70, 300_000), "f64", 8)])
def test_long_rows_have_the_first_elements_of_a_sort(dims, dtype, kept):
    """Rows that are divided, and some whose blocks take more room."""
    g = rlx.Graph("g")
    g.set_outputs(list(rlx.top_k(g.input("x", dims, dtype), k=kept)))
    x = (np.random.default_rng(0).standard_normal(dims, np.float32) * 40).astype(rlx.as_dtype(dtype).numpy)
    x[..., -1], x[..., 5] = 1000, np.inf
    for found, wanted in zip(rlx.Session("cuda").compile(g).run({"x": x}), evaluate(g, {"x": x})[0], strict=True):
        np.testing.assert_array_equal(found, wanted)


@on_gpu
@pytest.mark.parametrize("n", [2048, 5001, 20_000, 50_257, 151_936])
@pytest.mark.parametrize("weighted", [False, True])
def test_thresholds_are_those_of_the_reference(n, weighted):
    """Also of rows most of which is in one bin of the first digits, or in none, and of one row that many blocks share."""
    rng = np.random.default_rng(n)
    x = rng.standard_normal(n).astype(np.float32) * 3
    soft = np.exp(x - x.max())
    near, below = 1 + rng.random(n) * 1e-3, -1 - rng.random(n)
    rows = [x, soft, np.where(np.arange(n) % 7, 0, soft), np.full(n, 0.25), near, np.sort(x), below]
    odd, tiny = x.copy(), np.where(np.arange(n) % 3, 0.0, -0.0)
    odd[::5], odd[1::5], odd[2::5], odd[7], tiny[5] = np.nan, -np.inf, -0.0, np.inf, 1e-40
    given = np.stack([*rows, odd, tiny, np.full(n, 3e38), np.full(n, np.nan), np.full(n, -np.inf)]).astype(np.float32)
    g = rlx.Graph("thresholds")
    amount = g.input("amount", (), "f32")
    g.set_outputs([rlx.threshold(g.input(f"x{len(d)}", d, "f32"), amount, weighted=weighted) for d in (given.shape, (n,))])
    compiled = rlx.Session("cuda").compile(g)
    counts = (1, 50, 2.5, 5000, n / 2, n * 0.61, n - 1, n, n + 1, 0, -3, np.nan, np.inf)
    sums = (1e-30, 0.1, 0.25, 0.9, 12.5, 1000.3, n * 0.25, 1e38, 0, -3, np.nan, np.inf)
    for some in map(np.float32, sums if weighted else counts):
        feed = {"x2": given, "x1": given[1], "amount": some}
        found, alone = compiled.run(feed)
        want, _ = evaluate(g, feed)[0]
        if weighted:  # where a sum is beside the amount, rounding decides
            parts, wide = np.maximum(given, 0), given.astype(np.float64)
            sums_of = [np.nansum(np.where(above(wide, np.asarray(found)[:, None]), parts, 0), axis=-1, dtype=np.float64)
                       for above in (np.greater_equal, np.greater)]  # fmt: skip
            near = (sums_of[0] >= some * (1 - 1e-6)) & (sums_of[1] < max(some, 2.0**-126) * (1 + 1e-6))
            assert ((found == want) | near).all(), (some, found, want)
        else:
            np.testing.assert_array_equal(found, want)
        np.testing.assert_array_equal(found[1], alone)


def sampled(groups, starts):
    """Where the groups of the first sample begin, as in select.h."""
    n, low = np.arange(groups, dtype=np.uint64), np.uint64(0xFFFFFFFF)
    found = (n + np.uint64(1)) * np.uint64(0x9E3779B1) & low
    found = (found ^ found >> np.uint64(15)) * np.uint64(0x85EBCA6B) & low
    found ^= found >> np.uint64(13)
    return ((n * np.uint64(starts) + (found * np.uint64(starts) >> np.uint64(32))) // np.uint64(groups)).astype(np.int64)


RANGES = {  # digits of numbers: all of them, one and a sign, none, some that are left out
    "all": (-(2**63), 2**63 - 1), "a sign": (-4, 4), "more than a byte": (-129, 200), "one number": (-7, -6),
    "far from zero": (2**40, 2**40 + 300),
}  # fmt: skip


@on_gpu
@pytest.mark.parametrize("name", RANGES)
@pytest.mark.parametrize("dims", [(3, 3000), (300_001,), (2_500_000,)])  # a block, several blocks, several tiles of each
def test_digits_that_are_the_same_in_all_numbers_are_left_out(name, dims):
    x = np.random.default_rng(0).integers(*RANGES[name], dims)
    g = rlx.Graph("g")
    g.set_outputs(list(rlx.sort(g.input("x", x.shape, "i64"))))
    compiled, order = rlx.Session("cuda").compile(g), np.argsort(x, axis=-1, kind="stable")
    for _ in range(2):  # what the blocks have told one another is forgotten
        found = compiled.run({"x": x})
        np.testing.assert_array_equal(found[1], order)
        np.testing.assert_array_equal(found[0], np.take_along_axis(x, order, -1))


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("dims", [(150, 3003), (37, 20_001), (40, 100_003), (150, 50_007)])
def test_rows_that_begin_anywhere_leave_others_alone(dtype, dims):
    build = lambda g: (x := g.input("x", dims, dtype)) - rlx.max(x, axis=1, keepdims=True)  # noqa: E731
    g = graph(build)
    x = np.random.default_rng(0).integers(-100, 100, dims).astype(rlx.as_dtype(dtype).numpy)
    (found,) = rlx.Session("cuda").compile(g).run({"x": x})
    np.testing.assert_array_equal(found.astype(np.float32), x.astype(np.float32) - x.astype(np.float32).max(1, keepdims=True))


TALL = {  # down columns: op, dims
    "sums": (lambda x: rlx.sum(x, axis=0), (270, 20_000)),
    "of a cluster": (lambda x: rlx.sum(x, axis=0), (1101, 4096)),
    "of blocks": (lambda x: rlx.sum(x, axis=0), (4100, 1108)),
    "of few columns": (lambda x: rlx.sum(x, axis=0), (204_800, 41)),
    "of squares of two": (lambda x: rlx.sum(x * x - 1, axis=(0, 2)), (1100, 1028, 4)),
    "of matrices": (lambda x: rlx.sum(x, axis=1) * 2, (3, 1024, 2056)),
    "least": (lambda x: rlx.min(x, axis=0), (4099, 1032)),
    "totals": (lambda x: rlx.cumsum(x, axis=0), (3001, 1030)),
    "totals of whole parts": (lambda x: rlx.cumsum(x, axis=0), (1024, 512)),
    "totals from the end": (lambda x: rlx.cumsum(x, axis=1, exclusive=True, reverse=True), (3, 533, 258)),
    "totals of odd columns": (lambda x: rlx.cumsum(x + 1, axis=0), (40_003, 33)),
    "totals of one part": (lambda x: rlx.cumsum(x, axis=0), (77, 640)),
    "in place": (lambda x: rlx.cumsum(rlx.sort(x)[0], axis=0), (1500, 128)),
}


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "i32", "i8"])
@pytest.mark.parametrize("name", TALL)
def test_sums_and_totals_down_columns_are_exact(name, dtype):
    build, dims = TALL[name]
    g, wide = (graph(lambda g: build(g.input("x", dims, d))) for d in (dtype, "f64"))  # noqa: B023
    kind = rlx.as_dtype(dtype).numpy
    x = np.random.default_rng(0).integers(-1 if dtype == "i8" else -4, 2 if dtype == "i8" else 5, dims).astype(kind)
    compiled = rlx.Session("cuda").compile(g)
    found = compiled.run({"x": x})[0]
    wanted = evaluate(g if dtype.startswith("i") else wide, {"x": x if dtype.startswith("i") else x.astype(np.float64)})[0][0]
    np.testing.assert_array_equal(found, np.asarray(wanted, np.float32).astype(kind))
    np.testing.assert_array_equal(compiled.run({"x": x})[0].view(np.uint8), found.view(np.uint8))


STRIPS = {  # columns that shared memory keeps: op along axis -2, dims; clusters of 2 to 16 blocks, vectors of 4 to 16 bytes
    "rows just too many for a block": (lambda x: x - rlx.max(x, axis=0, keepdims=True), (513, 4200)),
    "two": (lambda x: x - rlx.max(x, axis=0, keepdims=True), (2001, 3004)),
    "four": (lambda x: x - rlx.min(x, axis=1, keepdims=True), (3, 3999, 2050)),
    "eight": (lambda x: x * rlx.sum(x, axis=0, keepdims=True), (9001, 1032)),
    "two sums": (lambda x: x * rlx.sum(x * x, axis=0, keepdims=True) - rlx.sum(x, axis=0, keepdims=True), (1025, 4104)),
    "and the greatest": (lambda x: [x - rlx.max(x, axis=0, keepdims=True), rlx.max(x, axis=0)], (1025, 4104)),
    "no other column": (lambda x: [x - rlx.max(x, axis=0, keepdims=True), rlx.max(x, axis=0)], (1025, 4096)),
    "in place": (lambda x: (y := rlx.sort(x)[0]) - rlx.max(y, axis=0, keepdims=True), (4097, 1032)),
}


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("name", STRIPS)
def test_strips_of_columns_are_exact(name, dtype):
    build, dims = STRIPS[name]
    g, wide = rlx.Graph("strips"), rlx.Graph("wide")
    for at, d in ((g, dtype), (wide, "f64")):
        made = build(at.input("x", dims, d))
        at.set_outputs(made if isinstance(made, list) else [made])
    kind = rlx.as_dtype(dtype).numpy
    rng = np.random.default_rng(0)
    x = (rng.integers(-1, 2, dims) * (rng.random(dims) < 0.01)).astype(kind)  # few are not 0, so that sums are exact
    compiled = rlx.Session("cuda").compile(g)
    for found, wanted in zip(compiled.run({"x": x}), evaluate(wide, {"x": x.astype(np.float64)})[0]):
        np.testing.assert_array_equal(found, np.asarray(wanted, np.float32).astype(kind))


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(
    "dims", [(700, 3000), (4096, 1024), (4091, 4100), (2501, 8452), (13_107, 520), (13_107, 1036), (3000, 1030), (27_000, 520)]
)
def test_softmax_of_strips_of_columns(dims, dtype):
    kind = rlx.as_dtype(dtype).numpy
    x = (np.random.default_rng(0).normal(size=dims) * 4).astype(kind)
    x[3], x[:, 5], x[7, 9], x[:-1, 11] = -np.inf, 2.0, np.nan, -np.inf
    compiled = rlx.Session("cuda").compile(graph(lambda g: rlx.softmax(g.input("x", dims, dtype), axis=0)))
    found = compiled.run({"x": x})[0]
    (wanted,), _ = evaluate(graph(lambda g: rlx.softmax(g.input("x", dims, "f64"), axis=0)), {"x": x.astype(np.float64)})
    np.testing.assert_allclose(found.astype(np.float64), wanted, rtol=1e-5 if dtype == "f32" else 1e-2, atol=1e-30)
    np.testing.assert_array_equal(compiled.run({"x": x})[0].view(np.uint8), found.view(np.uint8))


@on_gpu
@pytest.mark.parametrize("rows, columns", [(20_000, 10_000), (100_000, 40), (8200, 70_000)])
def test_long_sums_down_many_columns_lose_no_digits(rows, columns):
    g = graph(lambda g: rlx.sum(rlx.broadcast_to(g.input("x", (1, columns), "f32"), (rows, columns)), axis=0))
    (found,) = rlx.Session("cuda").compile(g).run({"x": np.full((1, columns), 0.1, np.float32)})
    np.testing.assert_allclose(found, np.float64(np.float32(0.1)) * rows, rtol=1e-6)


@on_gpu
def test_a_bad_index_leaves_every_state_as_it_was():
    conformance.check_states("cuda")
    compiled = rlx.Session("cuda").compile(graph(lambda g: rlx.gather(g.input("x", (5,), "f32"), g.input("i", (2,), "i32"))))
    with pytest.raises(IndexRangeError):
        compiled.run({"x": np.zeros(5, np.float32), "i": np.array([0, 7], np.int32)})
    wide = rlx.Session("cuda").compile(graph(lambda g: rlx.gather(g.input("x", (5,), "f32"), g.input("i", (2,), "i64"))))
    with pytest.raises(IndexRangeError):  # positions have 32 bits
        wide.run({"x": np.zeros(5, np.float32), "i": np.array([0, 1 << 32], np.int64)})
    (good,) = compiled.run({"x": np.arange(5, dtype=np.float32), "i": np.array([4, 1], np.int32)})
    assert good.tolist() == [4, 1]


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "i64", "u8", "bool", "c64", "f64"])
def test_torch_shares_an_output_where_it_lies_and_keeps_it(dtype):
    torch = pytest.importorskip("torch")
    x = np.random.default_rng(0).integers(0, 2, (5, 7)).astype(rlx.ir.as_dtype(dtype).numpy)
    compiled = rlx.Session("cuda").compile(graph(lambda g: rlx.copy(g.input("x", x.shape, dtype))))
    ((address, _),) = compiled.run_raw({"x": x})
    shared = torch.from_dlpack(compiled.outputs_view()[0])
    del compiled
    assert shared.is_cuda and shared.data_ptr() == address and tuple(shared.shape) == x.shape
    np.testing.assert_array_equal(shared.cpu().to(torch.complex128).numpy(), x.astype(np.complex128))


LOSE = """
import numpy as np
import rlx
g = rlx.Graph("g")
g.set_outputs([g.input("x", (4,), "f32") + 1.0])
compiled = rlx.Session("cuda").compile(g)
compiled.run({"x": np.zeros(4, np.float32)})
compiled._executable.move(4096, 8192, 64)  # addresses of nothing
for _ in range(2):
    try:
        compiled.run({"x": np.zeros(4, np.float32)})
    except rlx.errors.DeviceError as e:
        print(e)
"""


@on_gpu
def test_a_lost_context_is_said_at_every_call_and_the_process_ends_in_peace():
    done = subprocess.run([sys.executable, "-c", LOSE], capture_output=True, text=True, timeout=100, env=dict(os.environ))
    assert (done.returncode, done.stderr) == (0, "") and len(lines := done.stdout.splitlines()) == 2
    assert all("the CUDA driver says ILLEGAL_ADDRESS: the GPU" in line and "new process" in line for line in lines)
