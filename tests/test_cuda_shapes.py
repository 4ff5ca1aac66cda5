"""Shapes that no benchmark has: few columns, odd counts, short axes, long sorts, scatters. Each needs threads enough."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")

from test_cuda import HOPPER, graph, kernels, on_gpu, one

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.binned import BinLaunch
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.direct import DirectLaunch
from rlx.backends.cuda.scatter import ScatterLaunch
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.select import SelectLaunch
from rlx.backends.cuda.sorts import DigitLaunch, SortLaunch
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.backends.cuda.thresholds import FEW, ThresholdLaunch
from rlx.backends.cuda.warps import WarpLaunch
from rlx.compiler import lower
from rlx.compiler.compilation import Compilation
from rlx.compiler.pipeline import run_passes
from rlx.ir.evaluate import evaluate
from rlx.ir.overlap import may_overlap
from tests.cuda_kernels import reports

MAPPED = {  # kernels whose shapes once had a few threads: expression, dims of its operands, then team, lanes, parts, repeats
    "few long columns": (lambda x: rlx.argmax(x, axis=0), [(9_508_423, 2)], (512, 1, 117, 1)),
    "some long columns": (lambda x: rlx.argmax(x, axis=0), [(100_000, 40)], (16, 32, 32, 1)),
    "sums of few long columns, an odd count": (lambda x: x.sum(axis=0), [(263_003, 5)], (256, 1, 43, 1)),
    "sums of columns, an odd count": (lambda x: x.sum(axis=0), [(263_003, 64)], (16, 32, 32, 1)),
    "one long row": (lambda x: rlx.argmax(x, axis=0), [(9_807_577,)], (512, 1, 240, 1)),
    "totals of few columns": (lambda x: rlx.cumsum(x, axis=0), [(4096, 3)], (16, 32, 8, 1)),
    "totals of many columns": (lambda x: rlx.cumsum(x, axis=0), [(4096, 4096)], (8, 32, 16, 1)),
    "totals down long rows": (lambda x: rlx.cumsum(x, axis=0), [(1334, 40_000)], (16, 32, 6, 1)),
    "many short columns": (lambda x: rlx.softmax(x, axis=0), [(3, 100_000)], (1, 1, 1, 1)),
    "many rows of 16": (lambda x: rlx.softmax(x), [(200_000, 16)], (1, 1, 1, 1)),
    "many rows of one": (lambda x: rlx.argsort(x), [(500_000, 1)], (1, 1, 1, 1)),
    "few short rows": (lambda x: rlx.softmax(x), [(100, 29)], (32, 1, 1, 1)),
    "odd rows": (lambda x, y: x + y, [(19_241, 129), (129,)], (1, 1, 1, 4)),
    "a small odd count": (lambda x: rlx.gelu(x), [(19_441,)], (1, 1, 1, 1)),
    "a long product": (lambda x, y: x @ y.T, [(1, 19_868), (1, 19_868)], (256, 1, 5, 1)),
    "few long products": (lambda x, y: x @ y.T, [(20, 19_868), (3, 19_868)], (256, 1, 4, 1)),
    "products of few columns": (lambda x, y: x @ y, [(27_876, 416), (416, 3)], (32, 1, 1, 1)),
    "columns by few": (lambda x, y: x.T @ y, [(512, 12_544), (512, 3)], (4, 32, 1, 1)),
}


@pytest.mark.parametrize("name", MAPPED)
def test_odd_shapes_have_threads_enough(name):
    build, dims, wanted = MAPPED[name]
    found = launch_of(one(lambda g: build(*(g.input(f"x{n}", d, "f32") for n, d in enumerate(dims)))), "sm_90a")
    assert type(found) is Launch and (found.team, found.lanes, found.parts, found.repeats) == wanted
    text = text_of(found, "kernel")
    assert cubin(text, "sm_90a") and ("float q0[4] = {};" in text) == (found.repeats == 4)


ENDS = {  # elementwise kernels of counts that end within a vector: expression, count, dtype, elements of a vector
    "bf16": (lambda x: rlx.relu(x - 2), 1_944_259, "bf16", 8),
    "a multiple of half a vector": (lambda x: x * 3, 6_930_900, "f16", 8),
    "f32": (lambda x: x * x - 1, 1_944_259, "f32", 4),
    "checked": (lambda x: x // (x % 5), 2_500_001, "i32", 4),
    "looked up": (lambda x: rlx.gather(rlx.cast(x, dtype="f32"), rlx.cast(x, dtype="i64")), 1_200_001, "i32", 4),
}


@pytest.mark.parametrize("name", ENDS)
def test_odd_counts_end_within_a_vector(name):
    build, count, dtype, vector = ENDS[name]
    made = list(kernels(graph(lambda g: build(g.input("x", (count,), dtype)))))[-1]
    found = launch_of(made, "sm_90a")
    assert (found.vector, found.repeats, found.points) == (vector, 1, -(-count // vector))
    text = text_of(found, "kernel")
    assert f" <= {count - vector})" in text and f"< {count}; i" in text and cubin(text, "sm_90a")


@on_gpu
@pytest.mark.parametrize("name", ENDS)
def test_odd_counts_are_right_to_the_last_element(name):
    build, count, dtype, _ = ENDS[name]
    for n in (count, count + 1, count + 3):
        made = graph(lambda g: build(g.input("x", (n,), dtype)))  # noqa: B023
        x = np.random.default_rng(n).integers(1, 5, n).astype(rlx.as_dtype(dtype).numpy)
        np.testing.assert_array_equal(rlx.Session("cuda").compile(made).run({"x": x})[0], evaluate(made, {"x": x})[0][0])


TURNED = {  # kernels that exchange axes, rows of whose results begin anywhere: expression, dims of its operands
    "two axes": (lambda x: rlx.copy(x.T), [(1334, 6400)]),
    "the middle one stays": (lambda x: rlx.copy(rlx.transpose(x, (2, 1, 0))), [(1001, 3, 2400)]),
    "batches": (lambda x: rlx.copy(rlx.transpose(x, (0, 2, 1))), [(3, 1003, 2400)]),
    "beside another": (lambda x, y: x + y.T, [(6400, 1337), (1337, 6400)]),
    "two of them": (lambda x, y: x.T * y.T, [(1337, 6400), (1337, 6400)]),
    "wider": (lambda x: rlx.cast(x.T, "f32"), [(1337, 6400)]),
    "narrower": (lambda x: rlx.cast(x.T, "i8"), [(1337, 6400)]),
    "from within": (lambda x: rlx.copy(x.T[8:, 5:-2]), [(1340, 6400)]),
    "in a frame": (lambda x: rlx.pad(x.T, (8, 3), (8, 6)), [(1337, 6400)]),
}


@on_gpu
@pytest.mark.parametrize("dtype", ["bf16", "f32", "i32"])
@pytest.mark.parametrize("name", TURNED)
def test_transposed_rows_that_begin_anywhere_are_right(name, dtype):
    build, dims = TURNED[name]
    made = graph(lambda g: build(*(g.input(f"x{n}", d, dtype) for n, d in enumerate(dims))))
    rng = np.random.default_rng(0)
    given = {f"x{n}": rng.integers(-8, 9, d).astype(rlx.as_dtype(dtype).numpy) for n, d in enumerate(dims)}
    np.testing.assert_array_equal(rlx.Session("cuda").compile(made).run(given)[0], evaluate(made, given)[0][0])


@on_gpu
@pytest.mark.parametrize("dtype", ["bf16", "f32", "i32", "i8"])
@pytest.mark.parametrize("dims", [(1334, 4000), (1334, 33_000), (700, 6401), (4099, 4096), (2049, 130)])
def test_totals_down_columns_are_right_to_the_last_row(dims, dtype):
    """Whole numbers, so few that bf16 has all sums."""
    made = graph(lambda g: rlx.cumsum(g.input("x", dims, dtype), axis=0))
    x = (np.random.default_rng(0).integers(0, dims[0] // 100, dims) == 0).astype(rlx.as_dtype(dtype).numpy)
    np.testing.assert_array_equal(rlx.Session("cuda").compile(made).run({"x": x})[0], evaluate(made, {"x": x})[0][0])


def test_products_of_two_terms_are_loops():
    kernel = one(lambda g: g.input("x", (384, 256, 1), "f32") @ g.input("y", (384, 1, 300), "f32"))
    found = launch_of(kernel, "sm_90a")
    assert type(found) is Launch and found.vector == 4 and "for (rlx_index" not in text_of(found, "kernel").split("extern")[1]


def odd_product(left, right, dtype="bf16", kind="param", turned=False):
    def build(g):
        w = (g.param if kind == "param" else g.input)("w", right, dtype)
        return g.input("x", left, dtype) @ (rlx.transpose(w, (1, 0)) if turned else w)

    return graph(build)


ODD = {  # products whose rows bulk copies take slowly or not at all: arguments of odd_product, copies in each run, before runs
    "both known and given": (((65, 1001), (1001, 205)), 1, 1),
    "both given": (((65, 1001), (1001, 205), "f16", "input"), 2, 0),
    "transposed": (((65, 1001), (205, 1001), "f16", "param", True), 1, 1),
    "the right one alone": (((65, 1000), (1000, 205), "bf16", "input"), 1, 0),
    "the left one alone": (((65, 1001), (1001, 208), "bf16", "input"), 1, 0),
    "the right one known: its axes are exchanged": (((65, 1000), (1000, 205)), 0, 1),
    "batches": (((3, 65, 501), (3, 501, 205), "bf16", "input"), 2, 0),
    "neither": (((65, 1000), (1000, 256)), 0, 0),
    "neither of two that are given": (((65, 1000), (1000, 208), "bf16", "input"), 0, 0),
    "the right one known: its rows begin between lines": (((65, 1000), (1000, 208)), 0, 1),
    "the same, transposed": (((65, 1000), (256, 1000), "f16", "param", True), 0, 1),
    "a short sum, the right one known": (((4096, 72), (72, 208)), 0, 1),
    "large, the left one": (((1300, 1000), (1000, 1024), "bf16", "input"), 1, 0),
    "large, both": (((1300, 1000), (1024, 1000), "bf16", "input", True), 2, 0),
    "few other rows": (((40, 1000), (40000, 1000), "bf16", "input", True), 1, 0),
}


@pytest.mark.parametrize("name", ODD)
def test_rows_that_bulk_copies_do_not_take_are_copied(name):
    args, each, before = ODD[name]
    program = lower(odd_product(*args), HOPPER, rlx.CompileOptions())
    *copies, product = (launch_of(s.kernel, "sm_90a") for s in program.steps)
    assert isinstance(product, TensorLaunch) and not product.by_threads
    assert (len(copies), len(program.prepare)) == (each, before)


def integers(*values):
    rng = np.random.default_rng(0)
    return {str(v.name): rng.integers(-3, 4, v.shape.static).astype(v.dtype.numpy) for v in values}


@pytest.mark.parametrize("name", ODD)
def test_copied_rows_keep_the_product(name):
    made = odd_product(*ODD[name][0])
    given, passed = (integers(*made.inputs), integers(*made.params)), run_passes(made, Compilation(HOPPER, rlx.CompileOptions()))
    np.testing.assert_array_equal(evaluate(passed, *given)[0][0], evaluate(made, *given)[0][0])


def test_an_elementwise_kernel_stores_rows_for_the_product():
    made = graph(lambda g: rlx.relu(g.input("x", (65, 1000), "bf16")) @ g.input("w", (1000, 208), "bf16"))
    relu, product = lower(made, HOPPER, rlx.CompileOptions()).steps
    assert relu.kernel.origin != product.kernel.origin and product.kernel.buffers[0].size == 65 * 1024
    given, passed = integers(*made.inputs), run_passes(made, Compilation(HOPPER, rlx.CompileOptions()))
    np.testing.assert_array_equal(evaluate(passed, given)[0][0], evaluate(made, given)[0][0])


NO_PADS = {  # copies of a result would be a kernel of their own: an epilogue stores it, or others read it too
    "an epilogue": lambda x, a, b: rlx.gelu(x @ a) @ b,
    "an output": lambda x, a, b: (r := rlx.relu(rlx.transpose(b, (1, 0))), x @ r),
    "a norm": lambda x, a, b: rlx.rms_norm(rlx.transpose(b, (1, 0)), rlx.sum(x, axis=(0,))[:1000]) @ b,
}


@pytest.mark.parametrize("name", NO_PADS)
def test_results_are_not_copied_into_other_rows(name):
    def build(g):
        made = NO_PADS[name](*(g.input(n, d, "bf16") for n, d in (("x", (512, 1024)), ("a", (1024, 1000)), ("b", (1000, 1024)))))
        return made if isinstance(made, tuple) else (made,)

    g = rlx.Graph("products")
    g.set_outputs(build(g))
    assert not [s for s in lower(g, HOPPER, rlx.CompileOptions()).steps if "pad" in s.kernel.origin]


def test_a_param_that_others_read_is_not_kept_in_other_rows():
    g = rlx.Graph("tied")
    table = g.param("table", (30_000, 1000), "bf16")
    x, rows = g.input("x", (512, 1000), "bf16"), rlx.gather(table, g.input("i", (4,), "i64"))
    g.set_outputs([rows, x @ rlx.transpose(table, (1, 0))])
    assert not lower(g, HOPPER, rlx.CompileOptions()).prepare


def test_rows_are_not_copied_where_that_gains_nothing():
    def copies(g, arch=HOPPER, **options):
        program = lower(g, arch, rlx.CompileOptions(**options))
        return [s for steps in program.phases.values() for s in steps if "pad" in s.kernel.origin]

    given = (65, 1001), (1001, 205)
    for left, right, dtype in (((15, 1001), (1001, 4001), "bf16"), ((33, 65), (65, 205), "bf16"), (*given, "f32")):
        assert not copies(odd_product(left, right, dtype))
    assert not copies(odd_product(*given), target("sm_80"))
    state = odd_product(*given)
    state.assign(total := state.handle(rlx.BufferHandle("total", (4,), rlx.f32)), total + 1)
    assert not copies(state), "programs of fewer rows read the weights as they lie"
    state = odd_product(*given, kind="input")
    state.assign(total := state.handle(rlx.BufferHandle("total", (4,), rlx.f32)), total + 1)
    assert len(copies(state)) == 2


@on_gpu
@pytest.mark.parametrize("name", ODD)
def test_products_of_copied_rows_are_right(name):
    made = odd_product(*ODD[name][0])
    given, params = integers(*made.inputs), integers(*made.params)
    compiled = rlx.Session("cuda").compile(made)
    compiled.set_params(params)
    np.testing.assert_array_equal(compiled.run(given)[0], evaluate(made, given, params)[0][0])


CONVOLUTIONS = {  # dims of image and weights, channels last, dtypes of both and the bias, strides; channels, places and shares
    "for each channel": ((8, 56, 56, 96), (7, 7, 1, 96), True, "f32", 1, (4, 8, 1)),
    "for each of a small image": ((1, 14, 14, 96), (7, 7, 1, 96), True, "f16", 2, (1, 1, 1)),
    "for each, channels first": ((1, 96, 112, 112), (192, 1, 7, 7), False, "bf16", 2, (1, 8, 1)),
    "for each of a line": ((16, 64, 1254), (64, 1, 3), False, "bf16", 1, (1, 4, 1)),
    "to few": ((1, 128, 128, 320), (3, 3, 320, 3), True, "bf16", 1, (8, 4, 32)),
    "to few, channels first": ((4, 32, 96, 96), (3, 32, 7, 7), False, "f16", 1, (1, 4, 4)),
    "for each of a volume": ((2, 12, 14, 15, 16), (24, 1, 5, 3, 5), False, "f16", 1, (1, 2, 1)),
    "for each of a volume, channels last": ((1, 17, 20, 21, 64), (3, 5, 3, 1, 64), True, "f32", 2, (1, 1, 1)),
    "to few of a volume": ((1, 16, 12, 13, 14), (2, 16, 3, 3, 3), False, "bf16", 1, (1, 1, 8)),
    "mixed, for each channel": ((8, 56, 56, 96), (7, 7, 1, 96), True, "bf16 f32 f32", 1, (4, 8, 1)),
    "mixed, for each, channels first": ((1, 33, 30, 41), (66, 1, 3, 3), False, "f16 f32 bf16", 2, (1, 1, 1)),
    "mixed, to few": ((2, 30, 31, 64), (3, 3, 64, 5), True, "bf16 f32 f32", 1, (4, 1, 16)),
    "mixed, to few, channels first": ((2, 16, 40, 33), (3, 16, 5, 5), False, "f32 bf16 bf16", 1, (1, 1, 8)),
}


def convolution(name):
    image, weights, last, dtypes, stride, _ = CONVOLUTIONS[name]
    out, channels = (weights[-1], image[-1]) if last else (weights[0], image[1])
    groups = channels if weights[-2 if last else 1] == 1 else 1
    how = {"strides": stride, "low": 1, "high": 2, "groups": groups, "channels_last": last}
    how["dilation"] = (1, 2, 1)[: len(image) - 2]
    x, w, b = [*zip("xwb", (image, weights, (out,)), dtypes.split() * (1 if " " in dtypes else 3))]
    return graph(lambda g: rlx.relu(rlx.conv(g.input(*x), g.param(*w), g.param(*b), **how)))


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_read_the_image_as_it_lies(name):
    image, weights, last, dtypes, stride, mapped = CONVOLUTIONS[name]
    channels, (dtype, other) = image[-1] if last else image[1], (dtypes.split() * 2)[:2]
    groups = channels if weights[-2 if last else 1] == 1 else 1
    how = {"strides": stride, "low": 1, "high": 1, "groups": groups, "channels_last": last}
    made = graph(lambda g: rlx.conv(g.input("x", image, dtype), g.param("w", weights, other), **how))  # type: ignore[arg-type]
    (found,) = [at for at in map(launch_of, kernels(made)) if isinstance(at, DirectLaunch)]
    assert (found.channels, found.places, found.shares) == mapped
    assert cubin(text_of(found, "kernel"), "sm_80")
    assert (found.deep.taps > 1) == (len(image) == 5)


@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if "mixed" in name])
def test_convolutions_take_a_bias_of_another_dtype(name):
    found = [at for at in map(launch_of, kernels(convolution(name))) if isinstance(at, DirectLaunch)]
    assert len(found) == 1 and cubin(text_of(found[0], "kernel"), "sm_80")


@on_gpu
@pytest.mark.parametrize("name", [name for name in CONVOLUTIONS if "volume" in name or "mixed" in name])
def test_convolutions_that_read_the_image_are_right(name):
    made, rng = convolution(name), np.random.default_rng(0)
    drawn = lambda values: {v.node.name: rng.standard_normal(v.dims).astype(v.dtype.numpy) for v in values}  # noqa: E731
    given, params = drawn(made.inputs), drawn(made.params)
    compiled = rlx.Session("cuda").compile(made)
    compiled.set_params(params)
    (found,), ((wanted,), _) = compiled.run(given), evaluate(made, given, params)
    bound = 1e-5 if found.dtype == np.float32 else 2e-2  # sums of f32, or rounded to 16 bits
    found, wanted = found.astype(np.float32), wanted.astype(np.float32)
    np.testing.assert_allclose(found, wanted, rtol=bound, atol=bound * float(np.abs(wanted).mean()))


@pytest.mark.parametrize("batch, columns, tensor", [(96, 7, True), (96, 3, False), (1, 7, False), (1, 8, True)])
def test_few_columns_take_tensor_cores_where_tiles_are_many(batch, columns, tensor):
    made = one(lambda g: rlx.matmul(g.input("x", (batch, 96, 981), "bf16"), g.input("y", (batch, 981, columns), "bf16")))
    found = launch_of(made, "sm_90a")
    assert isinstance(found, WarpLaunch) == tensor and cubin(text_of(found, "kernel"), "sm_90a")


@pytest.mark.parametrize("terms, count", [(8, 1), (9, 2), (2048, 2)])
def test_long_sums_leave_rows_to_another_kernel(terms, count):
    """Else each thread would load both operands of each term, where tiles share them."""
    made = graph(lambda g: rlx.softmax(g.input("x", (4096, terms), "f32") @ g.param("w", (terms, 64), "f32")))
    assert len([*kernels(made)]) == count


@pytest.mark.parametrize("mode", ["mul", "max", "min"])
def test_blocks_share_the_places_of_other_updates(mode):
    build = lambda g: rlx.scatter_elements(  # noqa: E731
        g.input("x", (30_000,), "f32"), g.input("i", (30_000,), "i64"), g.input("u", (30_000,), "f32"), axis=0, mode=mode
    )
    found = launch_of(kernel := one(build), "sm_90a")
    assert isinstance(found, BinLaunch) and found.blocks >= 100 and cubin(text_of(found, "kernel"), "sm_90a")
    # as many updates as places: if their memory were that of the results, another block would read it too late
    assert {kernel.buffers[read].name for read, _ in may_overlap(kernel)} == {"b3"}


def test_results_do_not_take_the_memory_of_indices():
    """Indices as wide as the elements, and as many: other blocks read them when a block stores."""
    given = lambda g: (g.input(name, (6_000,), "i64") for name in "xiu")  # noqa: E731
    made = one(lambda g: rlx.scatter_elements(*given(g), axis=0, mode="add"))
    assert isinstance(launch_of(made, "sm_90a"), ScatterLaunch) and may_overlap(made) == {(3, 0)}


@pytest.mark.parametrize("length, dtype, parts", [(30_000, "f32", 15), (60_000, "i64", 30)])
def test_blocks_merge_parts_of_long_rows(length, dtype, parts):
    found = launch_of(one(lambda g: rlx.sort(g.input("x", (2, length), dtype))[1]), "sm_90a")
    assert type(found) is SortLaunch and (found.parts, found.part) == (parts, found.team * found.each)
    assert found.blocks == 2 * parts <= 2 * 132 and found.counters == 2 and cubin(text_of(found, "kernel"), "sm_90a")


DIGITS = {  # of each: bytes of a key, keys of a thread, tiles and blocks of a row
    "a block": ((70, 3000), "f32", 4, 6, 1, 1), "two rows": ((2, 300_000), "i64", 8, 5, 1, 118),
    "bytes": ((1_000_000,), "f8e4m3", 2, 8, 1, 245), "tiles": ((4_194_304,), "f32", 4, 11, 3, 249),
    "many rows": ((500, 20_000), "f32", 4, 14, 1, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", DIGITS)
def test_longer_rows_are_sorted_by_digits(name):
    dims, dtype, *expected = DIGITS[name]
    found = launch_of(one(lambda g: rlx.sort(g.input("x", dims, dtype))[1]), "sm_90a")
    assert isinstance(found, DigitLaunch) and [found.key, found.each, found.tiles, found.parts] == expected
    assert (found.parts - 1) * found.part < dims[-1] <= found.parts * max(found.part, found.team * found.each)
    assert found.waiting == (found.parts if found.parts > 1 else 0) <= 2 * 132
    for arch in ("sm_80", "sm_90a"):
        assert cubin(text_of(found, "kernel"), arch)


SELECTED = {  # of each: blocks of a row, threads of a block, keys of a thread, elements in a vector
    "vocabulary": ((1, 151_936), "f32", 50, 37, 512, 4, 4), "odd rows": ((64, 50_257), "bf16", 8, 2, 512, 4, 1),
    "many rows": ((1334, 50_304), "bf16", 1024, 1, 512, 8, 8), "short": ((4096, 4096), "f64", 50, 1, 128, 4, 2),
    "a very long one": ((1_000_000,), "i32", 512, 132, 512, 8, 4), "long ones": ((100, 400_000), "f64", 512, 1, 512, 4, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SELECTED)
def test_a_few_of_a_long_row_are_selected(name):
    dims, dtype, kept, *expected = SELECTED[name]
    found = launch_of(one(lambda g: rlx.top_k(g.input("x", dims, dtype), k=kept)[1]), "sm_90a")
    assert isinstance(found, SelectLaunch) and [found.parts, found.threads, found.each, found.size] == expected
    assert found.part * (found.parts - 1) < dims[-1] <= found.part * found.parts and found.part % found.size == 0
    rows = int(np.prod(dims[:-1]))
    assert found.counters == (2 * rows if found.parts > 1 else 0) and found.size * found.rounds <= 32
    assert found.scratch * found.parts >= (found.room * (16 if dtype == "f64" else 8) if found.parts > 1 else 0)
    if name != "a very long one":
        assert cubin(text_of(found, "kernel"), "sm_80" if name == "short" else "sm_90a")


def threshold_of(dims, weighted: bool):
    return one(lambda g: rlx.threshold(g.input("x", dims, "f32"), g.input("amount", (), "f32"), weighted=weighted))


THRESHOLDS = {  # of each: blocks of a row, elements of a vector, vectors of a thread at once
    "vocabulary": ((1, 151_936), 38, 4, 2), "some rows": ((32, 151_936), 8, 4, 4), "odd rows": ((8, 50_257), 13, 1, 8),
    "many rows": ((2, 300, 5001), 1, 1, 10), "a very long row": ((1, 1 << 22), 132, 4, 4), "a short row": ((2048,), 1, 4, 1),
}  # fmt: skip


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", THRESHOLDS)
def test_blocks_share_the_threshold_of_a_long_row(name, weighted):
    dims, *expected = THRESHOLDS[name]
    found = launch_of(threshold_of(dims, weighted), "sm_90a")
    assert isinstance(found, ThresholdLaunch) and [found.parts, found.size, found.rounds] == expected
    assert found.part * (found.parts - 1) < dims[-1] <= found.part * found.parts and found.part % found.size == 0
    assert found.counters == (int(np.prod(dims[:-1])) * found.words if found.parts > 1 else 0) and found.words % 4 == 0
    assert found.scratch * found.parts >= 4 * FEW * (found.parts > 1)
    for arch in ("sm_80", "sm_90a"):
        (report,) = reports(text_of(found, "kernel"), arch).values()
        assert report.spilled == report.stack == 0 and report.shared <= 48 << 10


@pytest.mark.parametrize("dims", [(64, 2047), (1, (1 << 22) + 1), (3, 0)])
def test_other_rows_look_for_a_threshold_bit_by_bit(dims):
    assert type(launch_of(threshold_of(dims, False), "sm_90a")) is Launch


@pytest.mark.parametrize("dims, dtype, kept", [((100, 64), "f32", 8), ((9, 4096), "f32", 1024), ((9, 4096), "bf16", 600)])
def test_short_rows_and_many_of_a_row_are_sorted(dims, dtype, kept):
    found = launch_of(one(lambda g: rlx.top_k(g.input("x", dims, dtype), k=kept)[1]), "sm_90a")
    assert isinstance(found, SortLaunch) and not isinstance(found, SelectLaunch)


@pytest.mark.parametrize("n, kept", [(512, 8), (5120, 1), (5120, 50), (5120, 1000), (50_304, 50), (151_936, 1024)])
@pytest.mark.parametrize("order", ["random", "falling", "random runs"])
def test_samples_find_as_many_elements_as_there_is_room_for(n, kept, order):
    """Also where the elements of a group are alike."""
    found = launch_of(one(lambda g: rlx.top_k(g.input("x", (400, n), "f32"), k=kept)[1]), "sm_90a")
    assert isinstance(found, SelectLaunch)
    rng, tries = np.random.default_rng(0), 300
    for _ in range(tries):
        places = rng.permutation(n) if order == "random" else np.arange(n)
        if order == "random runs":
            places = places[: n // 16 * 16].reshape(-1, 16)[rng.permutation(n // 16)].reshape(-1)
        starts = (np.arange(found.groups) + rng.random(found.groups)) * (len(places) - found.span + 1) // found.groups
        firsts = np.min(places[starts.astype(int)[:, None] + np.arange(found.span)], axis=1)
        assert kept <= np.sort(firsts)[found.rank - 1] + 1 <= found.room


def test_blocks_that_sort_a_row_fit_at_once():
    """On a GPU that has room for one on each multiprocessor, a row has no more parts than multiprocessors."""
    made = one(lambda g: rlx.sort(g.input("x", (4_194_304,), "f32"))[1])
    for arch, most in (("sm_86", 99 << 10), ("sm_80", 163 << 10), ("sm_90a", 227 << 10)):
        found = launch_of(made, arch, multiprocessors=82)
        room = (most + 1024) // (found.shared + 2048)
        assert 0 < found.waiting <= min(2, room) * 82


@on_gpu
@pytest.mark.parametrize("mode", ["replace", "mul", "max", "min"])
@pytest.mark.parametrize("places, chosen", [(30_000, 30_000), (50, 3000), (7, 5)])
def test_updates_by_index_keep_their_order(mode, places, chosen):
    rng = np.random.default_rng(0)
    x, u = (rng.normal(size=n).astype(np.float32) for n in (places, chosen))
    i = rng.integers(0, places, chosen)
    g = rlx.Graph("g")
    given = {"x": x, "i": i, "u": u}
    g.set_outputs([rlx.scatter_elements(*(g.input(n, a.shape, str(a.dtype)) for n, a in given.items()), axis=0, mode=mode)])
    np.testing.assert_array_equal(rlx.Session("cuda").compile(g).run(given)[0], evaluate(g, given)[0][0])


@on_gpu
@pytest.mark.parametrize("dims, dtype", [((2, 40_000), "f32"), ((30_000,), "i64"), ((1_541_299,), "f32")])
def test_merged_parts_of_long_rows_keep_the_order_of_equal_ones(dims, dtype):
    x = np.random.default_rng(0).integers(-3000, 3000, dims).astype(dtype.replace("f", "float").replace("i", "int"))
    g = rlx.Graph("g")
    g.set_outputs([rlx.argsort(g.input("x", dims, dtype))])
    np.testing.assert_array_equal(rlx.Session("cuda").compile(g).run({"x": x})[0], np.argsort(x, axis=-1, kind="stable"))


def test_long_computations_are_compared_without_repeating_them():
    """Each step reads the one before four times: a walk of all paths would not end."""

    def deep(g):
        x = g.input("x", (64, 96), "f32")
        for _ in range(40):
            x = rlx.where(x < 0.5, rlx.softplus(x) - x, x + x * 0.25)
        return x

    assert all("rlx_fetch" in text_of(launch_of(kernel, "sm_90a"), "kernel") for kernel in kernels(graph(deep)))


def test_a_short_axis_is_inside_the_long_one_that_a_team_shares():
    for op in (rlx.sum, rlx.max):
        found = launch_of(one(lambda g, op=op: op(g.input("x", (265, 1784, 2), "f32"), axis=(0, 2))), "sm_90a")
        assert (found.team, found.lanes) == (32, 32) and cubin(text_of(found, "kernel"), "sm_90a")


@pytest.mark.parametrize("lines, length, part", [(4455, 28, 32), (869, 21, 32), (2000, 100, 128), (300, 1000, 1024)])
def test_running_totals_of_short_lines_take_a_warp_each(lines, length, part):
    found = launch_of(one(lambda g: rlx.cumsum(g.input("x", (lines, length), "bf16"), axis=1)), "sm_90a")
    assert found.team >= 32 and (found.part, found.parts) == (part, 1) and cubin(text_of(found, "kernel"), "sm_90a")


@pytest.mark.parametrize(
    "lines, length, team", [(67_583, 31, 32), (67_584, 31, 1), (67_584, 99, 1), (67_584, 113, 32), (9, 16, 32), (9, 15, 1)]
)
def test_running_totals_of_many_or_very_short_lines_have_a_thread_each(lines, length, team):
    assert launch_of(one(lambda g: rlx.cumsum(g.input("x", (lines, length), "f32"), axis=1)), "sm_90a").team == team


@pytest.mark.parametrize("columns, dtype, size", [(8, "f16", 8), (4, "f32", 4), (12, "f32", 4), (16, "bf16", 8), (13, "f16", 1)])
def test_a_thread_has_a_short_row_in_vectors(columns, dtype, size):
    found = launch_of(one(lambda g: rlx.softmax(g.input("x", (303_914, columns), dtype), axis=1)), "sm_90a")
    text = text_of(found, "kernel")
    body = text[text.index("kernel(") :]
    assert found.team == found.vector == 1 and (f"rlx_put<{size}>" in body) == (f"rlx_fetch<{size}>" in body) == (size > 1)
    (report,) = reports(text, "sm_90a").values()
    assert not report.stack and not report.spilled


@pytest.mark.parametrize("m, n, k", [(64, 17, 2354), (33, 17, 5000)])
def test_blocks_share_long_sums_of_few_rows_by_odd_columns(m, n, k):
    made = one(lambda g: g.input("x", (m, k), "f16") @ g.input("y", (k, n), "f16"))
    found = launch_of(made, "sm_90a")
    assert isinstance(found, TensorLaunch) and found.tiling.parts == found.blocks == 4
    assert cubin(text_of(found, "kernel"), "sm_90a")


SHORT = {
    "sums of pairs": lambda g: rlx.sum(g.input("x", (265, 1784, 2), "f32"), axis=(0, 2)),
    "largest of pairs": lambda g: rlx.max(g.input("x", (300, 77, 3), "bf16"), axis=(0, 2)),
    "running totals of 28": lambda g: rlx.cumsum(g.input("x", (99, 45, 28), "f32"), axis=2),
    "running totals of 16 backwards": lambda g: rlx.cumsum(g.input("x", (500, 16), "f32"), axis=1, reverse=True),
    "running totals of 1,000": lambda g: rlx.cumsum(g.input("x", (30, 1000), "i32"), axis=1),
    "sums of rows of 8": lambda g: rlx.sum(g.input("x", (9001, 8), "bf16"), axis=1),
    "rows of 12 below their largest": lambda g: (x := g.input("x", (8200, 12), "f32")) - rlx.max(x, axis=1, keepdims=True),
    "rows of 16 above their least": lambda g: (x := g.input("x", (8200, 16), "i16")) - rlx.min(x, axis=1, keepdims=True),
    "odd columns": lambda g: g.input("x", (64, 2354), "f16") @ rlx.transpose(g.input("y", (17, 2354), "f16"), (1, 0)),
}


@on_gpu
@pytest.mark.parametrize("name", SHORT)
def test_short_axes_are_right(name):
    made = graph(SHORT[name])
    given = integers(*made.inputs)
    np.testing.assert_array_equal(rlx.Session("cuda").compile(made).run(given)[0], evaluate(made, given)[0][0])
