"""Convolutions on the CPU: contractions that read the windows of an image where they lie, in rows and columns of levels."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import kernel_runs
import numpy as np
import pytest
import test_cpu_contract as plain
from test_cpu_contract import TARGETS

import rlx
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.kernels import contract, tiles
from rlx.backends.cpu.kernels.grouped import claim
from rlx.backends.cpu.kernels.tiles import Plan, plan
from rlx.backends.cpu.target import target_for
from rlx.backends.ref.interpret import run_kernel
from rlx.compiler import lower
from rlx.ir.dtype import DType, bf16, f16, f32, f64, i8, i32, i64, u8
from rlx.ir.evaluate import evaluate
from rlx.ir.kernel import Buffer, Contract, Kernel, Levels, Limit, Load, Loop, Native, Operand, Store, Var, const, linear
from rlx.ir.ops import conv
from rlx.ir.target import Target


class Shape(NamedTuple):
    """Of a convolution: `rows` and `columns` of the result, without padding."""

    images: int
    rows: int
    columns: int
    inputs: int
    outputs: int
    high: int
    wide: int
    stride: int = 1
    dilation: int = 1


F32 = (f32, f32, f32)
SHAPES = [Shape(*numbers) for numbers in (
    (1, 7, 7, 32, 64, 3, 3), (2, 13, 19, 5, 49, 3, 3), (1, 14, 14, 8, 17, 3, 3, 2), (1, 5, 11, 3, 50, 7, 7, 2),
    (3, 4, 9, 7, 48, 1, 1, 2), (2, 6, 8, 4, 33, 3, 2, 1, 2), (1, 9, 3, 6, 20, 2, 5, 3, 3), (5, 2, 2, 16, 40, 3, 3),
    (1, 1, 23, 9, 30, 1, 4), (2, 23, 1, 1, 30, 4, 1), (1, 28, 17, 1, 3, 3, 3), (2, 3, 5, 40, 96, 1, 1),
)]  # fmt: skip
DEEP = [Shape(2, 3, 8, 12, 96, 3, 3), Shape(1, 2, 9, 30, 48, 3, 4, 1, 2), Shape(1, 3, 16, 5, 64, 7, 7, 2)]


def levels(axes: list[tuple[int, int]]) -> tuple[int, Levels]:
    """(count, stride) of axes, innermost first, as the stride and the levels of an Operand."""
    found: list[tuple[int, int]] = []
    for count, stride in axes:
        if found and stride == found[-1][0] * found[-1][1]:
            found[-1] = found[-1][0] * count, found[-1][1]
        elif count > 1:
            found.append((count, stride))
    return (found[0][1] if found else 0), tuple((count, stride) for (count, _), (_, stride) in zip(found, found[1:]))


def convolution(shape: Shape, target: Target, dtypes: plain.DTypes = F32, limit: bool = False) -> Kernel:
    """c = the windows of a, channels last, @ b in panels."""
    images, rows, columns, inputs, outputs, high, wide, stride, dilation = shape
    tall, width = (rows - 1) * stride + (high - 1) * dilation + 1, (columns - 1) * stride + (wide - 1) * dilation + 1
    m, k = images * rows * columns, high * wide * inputs
    panel, group = target.panel("u8 i8" if dtypes[0] == u8 else dtypes[1].name, outputs)
    group = group if dtypes in ((bf16, bf16, f32), (u8, i8, i32)) else 1
    row, outer = levels([(columns, stride * inputs), (rows, stride * width * inputs), (images, tall * width * inputs)])
    column, inner = levels([(inputs, 1), (wide, dilation * inputs), (high, dilation * width * inputs)])
    a = Buffer("a", dtypes[0], images * tall * width * inputs)
    b = Buffer("b", dtypes[1], -(-outputs // panel) * panel * -(-k // group) * group)
    c, count, acc = Buffer("c", dtypes[2], m * outputs, True), Buffer("count", i64, 1), Var("acc", dtypes[2])
    i, j = Var("i"), Var("j")
    left = Operand(a, const(0), row, column, row_levels=outer, col_levels=inner)
    store = Store(c, linear([(i, outputs), (j, 1)]), acc)
    body = Contract(i, j, m, outputs, k, left, Operand(b, const(0), 0, 0, panel, group), acc, (store,))
    limits = (Limit(i, Load(count, const(0))),) if limit else ()
    return Kernel("mm", (a, b, c, count) if limit else (a, b, c), (), (), (body,), limits=limits)


def plan_of(kernel: Kernel, target: Target) -> Plan:
    (c,) = kernel.body
    assert isinstance(c, Contract)
    return plan(kernel, c, target)


@pytest.mark.parametrize("cpu", TARGETS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_windows_are_read_where_they_lie(shape: Shape, cpu: str) -> None:
    target = TARGETS[cpu]
    kernel = convolution(shape, target)
    plain.check_product(kernel, target)
    found = plan_of(kernel, target)
    assert found.stage_a == (shape.columns == 2)  # segments of two rows are copied together
    if not found.stage_a and found.segment:
        starts = {found.first_row(tile) for tile in range(found.row_tiles)}
        segments = range(0, shape.images * shape.rows * shape.columns, found.segment)
        assert starts.issuperset(segments), "a tile reaches into the next segment"


@pytest.mark.parametrize(
    "dtypes", [(f64,) * 3, (bf16, bf16, f32), (u8, i8, i32), (f16, f16, f32), (f32, bf16, f32), (bf16, f32, f32)], ids=str
)
@pytest.mark.parametrize("shape", [SHAPES[n] for n in (0, 1, 3, 5, 7)], ids=str)
def test_windows_of_every_dtype(shape: Shape, dtypes: plain.DTypes) -> None:
    """In place where channels are whole groups of the instruction that sums them, else by a copy of the windows of a block."""
    target = TARGETS["host"]
    kernel = convolution(shape, target, dtypes)
    plain.check_product(kernel, target)
    group = kernel.body[0].b.group  # type: ignore[union-attr]
    narrow = dtypes[0] != dtypes[2] if group == 1 else shape.inputs % group != 0
    found = plan_of(kernel, target)
    if not found.matrix:  # the matrix unit reads whole steps: test_cpu_amx.py
        assert found.stage_a == (narrow or shape.columns == 2)


@pytest.mark.parametrize("shape", DEEP, ids=str)
@pytest.mark.parametrize("part", [1, 5, 13, 30])
def test_parts_of_a_deep_panel_are_runs_of_channels(shape: Shape, part: int) -> None:
    """A part of k ends where a run of elements does, or a run is whole parts; the bits are those of one loop over k."""
    target, outputs = TARGETS["host"], shape.outputs
    kernel, panel = convolution(shape, target), target.panel("f32", outputs)[0]
    values = {"a": plain.numbers(kernel.buffers[0].size, f32, 0), "b": plain.numbers(kernel.buffers[1].size, f32, 1)}
    whole = plain.run(kernel, target, values)["c"]
    low = replace(target, core_cache_bytes=8 * 4 * panel * part)
    depth, run = plan_of(kernel, low).depth, shape.inputs * (shape.wide if shape.dilation == 1 else 1)
    assert 0 < depth < kernel.body[0].k and (depth % run == 0 or run % depth == 0)  # type: ignore[union-attr]
    plain.check_product(kernel, low)
    got = plain.run(kernel, low, values)["c"].reshape(-1, outputs)
    same = slice(outputs // panel * panel)  # tiles of the last panel are narrow, and have separate sums
    np.testing.assert_array_equal(got[:, same], whole.reshape(-1, outputs)[:, same])


@pytest.mark.parametrize("shape", [SHAPES[n] for n in (1, 2, 7)], ids=str)
def test_rows_past_the_limit_are_spared(shape: Shape) -> None:
    target = TARGETS["host"]
    kernel = convolution(shape, target, limit=True)
    m, n = shape.images * shape.rows * shape.columns, shape.outputs
    values = {"a": plain.numbers(kernel.buffers[0].size, f32, 0), "b": plain.numbers(kernel.buffers[1].size, f32, 1)}
    whole = plain.run(kernel, target, values | {"count": np.array([m], np.int64)})["c"].reshape(m, n)
    most = tiles.MAX_ROWS
    for rows in (0, 1, shape.columns, shape.columns + 1, m // 2, m - 1):
        got = plain.run(kernel, target, values | {"count": np.array([rows], np.int64)})["c"].reshape(m, n)
        np.testing.assert_array_equal(got[:rows], whole[:rows])
        assert np.isnan(got[rows + most :]).all()


@pytest.mark.parametrize("shape", [SHAPES[n] for n in (0, 1, 2, 3)], ids=str)
def test_every_tiling_gives_the_same_bits(shape: Shape) -> None:
    for threads in (1, 4):
        target = replace(TARGETS["host"], threads=threads)
        kernel = convolution(shape, target)
        (c,) = kernel.body
        assert isinstance(c, Contract)
        values = {"a": plain.numbers(kernel.buffers[0].size, f32, 0), "b": plain.numbers(kernel.buffers[1].size, f32, 1)}
        want = plain.run(kernel, target, values)["c"].tobytes()
        for name, others in tiles.axes(kernel, c, target).items():
            for value in others:
                assert plain.run(kernel, target, values, tiling={name: value})["c"].tobytes() == want, (name, value)


def test_an_image_of_few_channels_is_padded_and_read_by_rows() -> None:
    """Not pixel by pixel, as the view with its channels last would have it; a padded view that is a result stays as it is."""
    g = rlx.Graph("image")
    x, w = g.input("x", (2, 3, 18, 20), f32), g.param("w", (3, 3, 3, 24), f32)
    seen = rlx.transpose(x, axes=(0, 2, 3, 1))
    first = conv(seen, w, strides=2, low=1, high=1, channels_last=True)
    last = g.input("last", (2, 18, 21, 3), f32)
    g.set_outputs([first, rlx.pad(seen, low=(0, 0, 1, 0), high=(0,) * 4), conv(last, w, low=1, high=1, channels_last=True)])
    found = lower(g, with_natives(TARGETS["host"]), rlx.CompileOptions())
    loops = [s.kernel.body[0] for s in found.steps if s.kernel.origin == ("pad",)]
    assert sorted(loop.extent for loop in loops if isinstance(loop, Loop)) == [3, 22, 3 * 23]
    product, _ = (s.kernel.body[0] for s in found.steps if isinstance(s.kernel.body[0], Contract))
    assert (product.a.col_stride, product.a.col_levels) == (1, ((3, 22), (3, 20 * 22)))  # row by row, not channel by channel
    given = {v.node.name: plain.numbers(v.shape.static, f32, n) for n, v in enumerate(g.inputs)}
    weights = {"w": plain.numbers((3, 3, 3, 24), f32, 1)}
    compiled = rlx.Session("cpu").compile(g)
    compiled.set_param("w", weights["w"])
    for got, want in zip(compiled.run(given), evaluate(g, given, weights)[0]):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_rows_that_come_from_afar_are_prefetched() -> None:
    """In products with few panels, also where rows lie in runs of a padded image, or are windows that overlap; the address may be
    outside of all memory."""
    target = TARGETS["host"]
    for m, window, far in ((33, 1, True), (9, 1, False), (33, 3, True), (9, 3, False)):
        shape = Shape(1, m, 35, 64, 70, window, window)
        kernel = convolution(shape, target)
        assert plan_of(kernel, target).rows_ahead == far
        plain.check_product(kernel, target)


def test_panels_of_a_convolution_are_of_equal_width() -> None:
    """Of 64 columns where one of 16 would be left over; products of other kinds have one width for any number of columns."""
    target = target_for("x86_64-unknown-linux-gnu", "x86-64-v4")
    found = plan_of(convolution(SHAPES[0], target), target)
    assert [target.panel("f32", n)[0] for n in (0, 48, 64, 96, 128, 256, 512)] == [48, 48, 64, 48, 48, 64, 48]
    assert (found.vectors, found.panels, found.rows) == (4, 1, 4)  # 7 rows of an image in tiles of 4 and 3
    g = rlx.Graph("both")
    x, w = g.input("x", (1, 14, 14, 64), f32), g.param("w", (1, 1, 64, 64), f32)
    g.set_outputs([conv(x, w, channels_last=True), x.reshape((-1, 64)) @ w.reshape((64, 64))])
    bodies = [s.kernel.body[0] for s in lower(g, target, rlx.CompileOptions()).steps]
    assert sorted(c.b.panel for c in bodies if isinstance(c, Contract)) == [48, 64]


def test_results_that_go_to_memory_are_prefetched() -> None:
    """The same columns of the next tile's rows, with each vector of a large result; of a small one nothing."""
    target = replace(TARGETS["host"], core_cache_bytes=1 << 20)
    for m, far in ((3500, True), (350, False)):
        kernel = plain.product(m, 300, 8, panel=target.panel("f32")[0])
        ahead = plan_of(kernel, target).rows * 300 * 4
        fetched = re.findall(rf"(%\w+) = getelementptr i8, ptr %\w+, i64 {ahead}\n  call void @llvm.prefetch.p0\(ptr \1",
                             contract.render(kernel, target, "mm").text)  # fmt: skip
        assert bool(fetched) == far
        plain.check_product(kernel, target)


# -- groups of few channels ------------------------------------------------------------------------------------------------


class Grouped(NamedTuple):
    """Of a convolution in groups of `group` channels: x is [batch, *spatial, channels]."""

    x: tuple[int, ...]
    window: tuple[int, ...]
    strides: tuple[int, ...] = (1,)
    dilation: tuple[int, ...] = (1,)
    low: tuple[int, ...] = (0,)
    high: tuple[int, ...] = (0,)
    group: int = 1


GROUPED = [
    Grouped((2, 7, 7, 96), (3, 3), low=(1,), high=(1,)), Grouped((1, 9, 33, 33), (3, 3), (2,), low=(1,), high=(1,)),
    Grouped((1, 14, 20, 24), (5, 5), (2, 1), low=(2,), high=(1, 3)), Grouped((1, 5, 6, 7), (3, 2), (1,), (1, 2)),
    Grouped((2, 4, 30, 48), (7, 7), (1,), (2,), (6,), (6,)), Grouped((3, 31, 40), (4,), (3,), (1,), (0,), (5,)),
    Grouped((1, 2, 2, 17), (3, 3), low=(3,), high=(4,)), Grouped((1, 3, 1, 130), (1, 1), (2,)),
    Grouped((1, 1, 50, 3), (1, 9), low=(0, 8)), Grouped((2, 5, 9, 22), (3, 3), low=(1,), high=(1,), group=2),
    Grouped((1, 9, 7, 44), (3, 2), (2, 1), high=(0, 1), group=4), Grouped((1, 6, 19, 56), (3, 3), low=(1,), high=(1,), group=8),
    Grouped((1, 4, 8, 48), (3, 3), (1,), (2,), (2,), (2,), group=16), Grouped((1, 5, 6, 96), (2, 2), group=32),
    Grouped((2, 4, 5, 9, 40), (3, 3, 3), low=(1,), high=(1,)),
    Grouped((1, 2, 3, 6, 18), (2, 3, 3), (1, 2, 1), (1, 1, 2), (3, 0, 2), (2, 1, 4)),
    Grouped((2, 7, 3, 5, 24), (3, 2, 2), (2, 1, 2), (2, 1, 1), (1, 0, 1), (0, 1, 0), group=4),
]  # fmt: skip


def graph_of(shape: Grouped, dtypes: tuple[DType, DType], epilogue: Callable[[rlx.Value], rlx.Value], turned: bool) -> rlx.Graph:
    """conv with a bias, then `epilogue`. `turned`: x is a view of channels-first memory."""
    g, channels, rank = rlx.Graph("grouped"), shape.x[-1], len(shape.x)
    x = g.input("x", (shape.x[0], channels, *shape.x[1:-1]) if turned else shape.x, dtypes[0])
    x = rlx.transpose(x, axes=(0, *range(2, rank), 1)) if turned else x
    w = g.param("w", (*shape.window, shape.group, channels), dtypes[1])
    b = g.param("b", (channels,), i32 if dtypes[0] == u8 else dtypes[0])
    how = {"strides": shape.strides, "dilation": shape.dilation, "low": shape.low, "high": shape.high}
    g.set_outputs([epilogue(conv(x, w, b, groups=channels // shape.group, channels_last=True, **how))])
    return g


def run_grouped(g: rlx.Graph, target: Target) -> tuple[np.ndarray, np.ndarray]:
    """(the result behind unreadable pages, the reference), where the only step is the kernel of the whole convolution."""
    given = {v.node.name: plain.numbers(v.shape.static, v.dtype, n) for n, v in enumerate((*g.inputs, *g.params))}
    as_it_is = replace(with_natives(replace(target, channels_last=False)), splits={})
    found = lower(g, as_it_is, rlx.CompileOptions())
    (step,) = found.steps
    (native,) = step.kernel.body
    assert isinstance(native, Native) and native.op == "conv", f"not claimed: {step.kernel}"
    memory = {b.id: np.zeros(b.shape.num_elements, b.shape.dtype.numpy) for b in found.buffers}
    memory |= {id: given[v.node.name].reshape(-1) for id, v in zip((*found.inputs, *found.params), (*g.inputs, *g.params))}
    for s in found.prepare:
        run_kernel(s.kernel, [memory[a] for a in s.args])
    values = [None if b.writable else memory[a] for a, b in zip(step.args, step.kernel.buffers)]
    (got,), status = kernel_runs.run(step.kernel, values, target)
    assert status == 0
    names = [{v.node.name: given[v.node.name] for v in some} for some in (g.inputs, g.params)]
    want = evaluate(g, *names)[0][0]
    return got.reshape(want.shape), want


def six(x: rlx.Value) -> rlx.Value:
    return rlx.clip(x, 0.0, 6.0)


@pytest.mark.parametrize("cpu", kernel_runs.TARGETS)
@pytest.mark.parametrize("epilogue", [rlx.relu, rlx.silu], ids=["relu", "silu"])
@pytest.mark.parametrize("shape", GROUPED, ids=str)
def test_groups_of_channels(shape: Grouped, epilogue: Callable[[rlx.Value], rlx.Value], cpu: str) -> None:
    """By the kernel for whole convolutions, with what follows it; light epilogues are unrolled, silu is a loop."""
    got, want = run_grouped(graph_of(shape, (f32, f32), epilogue, turned=False), kernel_runs.TARGETS[cpu])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("dtypes", "digits"), [((f64, f64), 1e-12), ((bf16, bf16), 2e-2), ((f16, f16), 2e-3), ((u8, i8), 0), ((i32, i32), 0)]
)
@pytest.mark.parametrize("shape", [GROUPED[n] for n in (1, 5, 10, 11, 16)], ids=str)
def test_groups_of_channels_of_every_dtype(shape: Grouped, dtypes: tuple[DType, DType], digits: float) -> None:
    got, want = run_grouped(graph_of(shape, dtypes, lambda x: x, turned=False), TARGETS["host"])
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=digits, atol=8 * digits)


@pytest.mark.parametrize("x, w, given", [
    ((2, 3, 9, 11), (2, 3, 3, 3), {"low": 1, "high": 1}),
    ((1, 2, 23), (1, 2, 5), {}),
    ((1, 2, 7, 40), (4, 2, 3, 2), {"strides": 2}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [f32, bf16, i32], ids=str)
def test_few_results_are_sums_of_lines(x: tuple, w: tuple, given: dict, dtype: DType) -> None:
    """Lanes of a line of the image, for one channel of the result after the other: neither windows nor products are stored."""
    g = rlx.Graph("few")
    g.set_outputs([conv(g.input("x", x, dtype), g.input("w", w, dtype), **given)])
    kernels = [step.kernel for step in lower(g, with_natives(TARGETS["host"]), rlx.CompileOptions()).steps]
    (line,) = [one for one in kernels if "mul" in one.name]
    assert {"mul", "sum"} <= set(line.origin)
    batch, _, *lines = g.outputs[0].shape.static
    assert max(buffer.size for one in kernels for buffer in one.buffers) < batch * math.prod(lines) * math.prod(w[1:])
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(-9, 9, dims).astype(dtype.numpy) for name, dims in (("x", x), ("w", w))}
    np.testing.assert_array_equal(rlx.compile(g).run(arrays)[0], evaluate(g, arrays)[0][0])


@pytest.mark.parametrize("x, w, dtype, whole", [
    ((8, 64, 14, 14), (1, 64, 7, 7), f32, True), ((2, 32, 9, 9), (1, 32, 7, 7), f32, False),
    ((2, 32, 9, 9), (1, 32, 7, 7), bf16, True), ((8, 64, 14, 14), (1, 64, 7, 7), i32, False),
    ((4, 32, 12, 12, 12), (1, 32, 5, 5, 5), f32, True), ((16, 512, 7, 7), (1, 512, 7, 7), f32, False),
], ids=str)  # fmt: skip
def test_one_result_of_windows_apart_is_a_product(x: tuple, w: tuple, dtype: DType, whole: bool) -> None:
    """Their sums would store all products first, which pays for few of them and for integers."""
    g = rlx.Graph("windows")
    g.set_outputs([rlx.conv(g.input("x", x, dtype), g.param("w", w, dtype), strides=2, low=1, high=1)])
    steps = lower(g, with_natives(TARGETS["host"]), rlx.CompileOptions()).steps
    assert any(isinstance(s, Contract) for step in steps for s in step.kernel.body) == whole


def test_few_channels_are_adjacent_where_products_of_pairs_are_summed() -> None:
    """An even number of them: runs of columns are those of a row of a window. The results are those in f64."""
    target = target_for("x86_64-unknown-linux-gnu", "x86-64-v4", ("avx512bf16",))
    rng, made = np.random.default_rng(8), {1: 2, 2: 2, 3: 4, 4: 4}
    for channels, image in itertools.product(made, ((9,), (7, 9), (5, 6, 7))):
        g, dims = rlx.Graph("few"), ((2, channels, *image), (6, channels, *(3 for _ in image)))
        given = {name: rng.standard_normal(d).astype(bf16.numpy) for name, d in zip("xw", dims)}
        g.set_outputs([rlx.conv(*(g.input(name, d, bf16) for name, d in zip("xw", dims)), low=1, high=1, strides=2)])
        steps = lower(g, target, rlx.CompileOptions()).steps
        (product,) = [s for step in steps for s in step.kernel.body if isinstance(s, Contract)]
        assert isinstance(product.a, Operand) and product.a.col_stride == 1
        assert product.k == made[channels] * 3 ** len(image) and all(n == 3 * made[channels] for n, _ in product.a.col_levels[:1])
        (got,), want = rlx.Session("cpu").compile(g).run(given), evaluate(g, given)[0][0]
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_many_results_of_each_channel_are_products(dtype: DType) -> None:
    g = rlx.Graph("several")
    g.set_outputs([conv(g.input("x", (1, 2, 9, 12), dtype), g.input("w", (12, 1, 3, 3), dtype), groups=2, low=1, high=1)])
    steps = lower(g, with_natives(TARGETS["host"]), rlx.CompileOptions()).steps
    assert any(isinstance(s, Contract) for step in steps for s in step.kernel.body)
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(-9, 9, dims).astype(dtype.numpy) for name, dims in (("x", (1, 2, 9, 12)), ("w", (12, 1, 3, 3)))}
    np.testing.assert_array_equal(rlx.compile(g).run(arrays)[0], evaluate(g, arrays)[0][0])


@pytest.mark.parametrize("x, w, given", [
    ((2, 5, 9, 11), (10, 1, 3, 3), {"low": 1}),
    ((1, 20, 23), (60, 1, 4), {"strides": 2, "high": 3}),
    ((1, 2, 4, 5, 6), (4, 1, 2, 3, 1), {"dilation": (2, 1, 1)}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("dtype", [f32, bf16, i32], ids=str)
def test_a_few_results_of_each_channel_are_groups_of_one(x: tuple, w: tuple, given: dict, dtype: DType) -> None:
    """Of a copy that has the channel as often: neither windows nor products are stored."""
    g = rlx.Graph("few of each")
    b = g.input("b", (w[0],), dtype)
    g.set_outputs([conv(g.input("x", x, dtype), g.input("w", w, dtype), b, groups=x[1], **given)])
    natives = [s for step in lower(g, with_natives(TARGETS["host"]), rlx.CompileOptions()).steps for s in step.kernel.body]
    assert [s.op for s in natives if isinstance(s, Native)] == ["conv"]
    rng = np.random.default_rng(0)
    dims = {"b": (w[0],), "x": x, "w": w}
    arrays = {name: rng.integers(-9, 9, d).astype(dtype.numpy) for name, d in dims.items()}
    np.testing.assert_array_equal(rlx.compile(g).run(arrays)[0], evaluate(g, arrays)[0][0])


@pytest.mark.parametrize("x, w, groups, given", [
    ((2, 32, 9, 11), (16, 8, 3, 3), 4, {"low": 1, "high": 1}), ((1, 6, 23), (3, 2, 4), 3, {"strides": 2, "high": 3}),
    ((1, 8, 4, 5, 6), (6, 4, 2, 3, 1), 2, {"dilation": (2, 1, 1)}), ((2, 16, 5, 7), (10, 8, 3, 3), 2, {}),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [f32, bf16, i32], ids=str)
def test_groups_with_fewer_results_than_channels_are_padded(
    x: tuple, w: tuple, groups: int, given: dict, biased: bool, dtype: DType
) -> None:
    g, dims = rlx.Graph("fewer"), {"x": x, "w": w, **({"b": (w[0],)} if biased else {})}
    g.set_outputs([conv(*(g.input(name, d, dtype) for name, d in dims.items()), groups=groups, **given)])
    natives = [s for step in lower(g, with_natives(TARGETS["host"]), rlx.CompileOptions()).steps for s in step.kernel.body]
    assert [s.op for s in natives if isinstance(s, Native)] == ["conv"]
    rng = np.random.default_rng(0)
    arrays = {name: rng.integers(-3, 4, d).astype(dtype.numpy) for name, d in dims.items()}
    np.testing.assert_array_equal(rlx.compile(g).run(arrays)[0], evaluate(g, arrays)[0][0])


@pytest.mark.parametrize("w, groups", [((32, 4, 1, 1), 16), ((32, 32, 3, 3), 2), ((16, 8, 3, 3), 8)], ids=str)
def test_groups_that_are_faster_as_products_are_not_padded(w: tuple, groups: int) -> None:
    g = rlx.Graph("products")
    g.set_outputs([conv(g.input("x", (1, 64, 9, 9), f32), g.param("w", w, f32), groups=groups)])
    steps = lower(g, with_natives(TARGETS["host"]), rlx.CompileOptions()).steps
    assert any(isinstance(s, Contract) for step in steps for s in step.kernel.body)


@pytest.mark.parametrize("x, w, groups", [
    ((8, 2, 5, 6, 7), (4, 1, 1, 1, 1), 2), ((2, 3, 9, 11), (3, 1, 1, 1), 3), ((1, 1, 23), (5, 1, 1), 1),
    ((0, 2, 4, 4), (2, 1, 1, 1), 2),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtypes", [(f32, f32), (bf16, bf16), (i32, i32), (u8, i8)], ids=str)
def test_channels_that_are_only_scaled_are_no_product(
    x: tuple, w: tuple, groups: int, biased: bool, dtypes: tuple[DType, DType]
) -> None:
    g, rng = rlx.Graph("scales"), np.random.default_rng(0)
    of = {"x": (x, dtypes[0]), "w": (w, dtypes[1]), **({"b": ((w[0],), i32 if dtypes[0] == u8 else dtypes[0])} if biased else {})}
    g.set_outputs([conv(*(g.input(name, *given) for name, given in of.items()), groups=groups)])
    steps = lower(g, with_natives(TARGETS["host"]), rlx.CompileOptions()).steps
    assert not any(isinstance(s, Contract | Native) for step in steps for s in step.kernel.body)
    arrays = {name: rng.integers(0, 4, dims).astype(dtype.numpy) for name, (dims, dtype) in of.items()}
    np.testing.assert_array_equal(rlx.compile(g).run(arrays)[0], evaluate(g, arrays)[0][0])


def test_groups_of_channels_in_other_strides() -> None:
    got, want = run_grouped(graph_of(GROUPED[2], (f32, f32), six, turned=True), TARGETS["host"])
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def test_groups_of_channels_that_lie_first_are_copied_once() -> None:
    """Where the graph has them first, so that the kernel loads vectors of channels."""
    found = lower(graph_of(GROUPED[2], (f32, f32), six, turned=True), with_natives(TARGETS["host"]), rlx.CompileOptions())
    assert [step.kernel.name for step in found.steps] == ["copy", "conv_maximum_minimum"]


@pytest.mark.parametrize("dtype", [bf16, f16], ids=str)
@pytest.mark.parametrize("each, widened", [(2, False), (4, False), (8, True), (16, True)])
def test_narrow_floats_of_large_groups_are_widened_once(each: int, widened: bool, dtype: DType) -> None:
    """The image before the kernel, the weights before runs; results are rounded in it, to the same numbers."""
    g, dims, window = rlx.Graph("groups"), (1, 9, 10, 32), (3, 3, each, 32)
    x, w, b = g.input("x", dims, dtype), g.param("w", window, dtype), g.param("b", (32,), dtype)
    g.set_outputs([rlx.relu(conv(x, w, b, groups=32 // each, channels_last=True, low=1, high=1))])
    program = lower(g, with_natives(TARGETS["host"]), rlx.CompileOptions())
    (native,) = [s for step in program.steps for s in step.kernel.body if isinstance(s, Native)]
    assert {v.buffer.dtype for v in native.inputs} == {f32 if widened else dtype}
    rng = np.random.default_rng(each)
    arrays = {n: rng.standard_normal(d).astype(dtype.numpy) for n, d in {"x": dims, "w": window, "b": (32,)}.items()}
    compiled = rlx.compile(g)
    compiled.set_params({"w": arrays["w"], "b": arrays["b"]})
    (got,), ((want,), _) = compiled.run({"x": arrays["x"]}), evaluate(g, {"x": arrays["x"]}, {n: arrays[n] for n in "wb"})
    assert got.dtype == want.dtype == dtype.numpy
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=1e-2, atol=3e-2)


@pytest.mark.parametrize("each, results", [(1, 1), (1, 3), (2, 8), (4, 16), (8, 9), (9, 8), (9, 9), (16, 1)])
def test_a_bias_is_added_before_narrow_sums_are_rounded(each: int, results: int) -> None:
    """1.0078125² is 1.015625 + 2^-14, which has too many digits for bf16: only with the bias in f32 is something left."""
    g, groups, number = rlx.Graph("bias"), 4, 1.0078125
    given = {"x": np.zeros((1, groups * each, 3)), "w": np.full((groups * results, each, 3), number)}
    given["x"][:, ::each, 0], given["b"] = number, np.full(groups * results, -1.015625)
    arrays = {name: a.astype(bf16.numpy) for name, a in given.items()}
    g.set_outputs([conv(*(g.input(name, a.shape, bf16) for name, a in arrays.items()), groups=groups)])
    for device in ("cpu", "ref"):
        (got,) = rlx.compile(g, device=device).run(arrays)
        np.testing.assert_array_equal(got.astype(np.float64), 2.0**-14)


def test_a_residual_is_added_to_groups_of_channels() -> None:
    """With the same bits at any number of threads, which share rows and channels."""
    shape, seen = GROUPED[0], []
    for threads in (1, 2, 16):
        g = graph_of(shape, (f32, f32), lambda x: x, turned=False)
        y = g.outputs[0] + g.inputs[0]
        g.set_outputs([y])
        got, want = run_grouped(g, replace(TARGETS["host"], threads=threads))
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)
        seen.append(got.tobytes())
    assert len(set(seen)) == 1


@pytest.mark.parametrize(
    ("x", "w", "given", "reason"),
    [((1, 5, 5, 8), (3, 3, 8, 4), {}, "a product of windows"), ((1, 8, 5, 5), (8, 1, 3, 3), {"groups": 8}, "channels"),
     ((1, 5, 5, 8), (3, 3, 2, 16), {"groups": 4, "channels_last": True}, "groups of"),
     ((1, 9999, 4), (1000, 1, 4), {"groups": 4, "channels_last": True}, "1000 elements of 1 channels are too many")],
)  # fmt: skip
def test_other_convolutions_say_why_they_are_not_claimed(x: tuple, w: tuple, given: dict, reason: str) -> None:
    g = rlx.Graph("other")
    given = {"channels_last": not given} | given
    why = claim(conv(g.input("x", x, f32), g.param("w", w, f32), **given).node)
    assert why and reason in why


def test_claimed_ops_of_an_empty_batch_have_an_epilogue() -> None:
    """Strides of no elements tell no axes apart: the compile ended in an AssertionError."""
    g = rlx.Graph("empty")
    x, q = g.input("x", (0, 8, 5, 5), "f32"), g.input("q", (0, 2, 4, 8), "f32")
    w = g.param("w", (8, 1, 3, 3), "f32")
    g.set_outputs([rlx.relu(rlx.conv(x, w, groups=8)), rlx.relu(rlx.attention(q, q, q))])
    compiled = rlx.compile(g)
    compiled.set_param("w", np.ones((8, 1, 3, 3), np.float32))
    found = compiled.run({"x": np.zeros((0, 8, 5, 5), np.float32), "q": np.zeros((0, 2, 4, 8), np.float32)})
    assert [a.shape for a in found] == [(0, 8, 3, 3), (0, 2, 4, 8)]
