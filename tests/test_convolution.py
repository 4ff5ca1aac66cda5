"""Convolutions and pools on the devices, against torch.nn.functional in float64: many shapes, layouts, dtypes; refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import Generator

import rlx
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.target import target_for
from rlx.compiler import lower
from rlx.compiler.compilation import Compilation
from rlx.compiler.precision import precision
from rlx.errors import AttributeValueError, DTypeError, RlxError, ShapeError
from rlx.ir.dtype import DTYPES, as_dtype
from rlx.ir.evaluate import evaluate
from rlx.ir.kernel import Contract, Operand
from rlx.ir.program import Region
from rlx.ir.target import Target
from tests import conv_oracles

SESSIONS = {device: rlx.Session(device) for device in ("cpu", "ref:0", "ref:1")}
AMX = target_for("x86_64-linux-gnu", "x86-64-v4", ("avx512bf16", "avx512vnni", "amx-tile", "amx-bf16", "amx-int8"))
ULPS = {"f64": 2.0**-50, "f32": 2.0**-21, "f16": 2.0**-9, "bf16": 2.0**-6}  # of a result, relative to the sum of magnitudes


def run(g: rlx.Graph, feeds: dict[str, np.ndarray], device: str = "cpu", **options: Any) -> list[np.ndarray]:
    return SESSIONS[device].compile(g, rlx.CompileOptions(**options)).run(feeds)


def array(rng: Generator, dims: tuple[int, ...], dtype: str) -> np.ndarray:
    if (d := as_dtype(dtype)).is_int:
        return rng.integers(-9 if d.kind == "i" else 0, 9, dims).astype(d.numpy)
    return rng.normal(size=dims).astype(d.numpy)


def wide(x: np.ndarray) -> torch.Tensor:
    """In float64, or int64."""
    return torch.from_numpy(x.astype(np.int64 if np.issubdtype(x.dtype, np.integer) else np.float64))


def sizes(rng: Generator, spatial: int) -> dict[str, tuple[int, ...]]:
    """Random strides, padding and dilation."""
    ends = {"strides": (1, 4), "low": (0, 4), "high": (0, 4), "dilation": (1, 3)}
    return {name: tuple(map(int, rng.integers(*ends[name], spatial))) for name in ends}


def random_conv(seed: int) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Attributes, and the dims of x, w and b."""
    rng = np.random.default_rng(seed)
    spatial, groups = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3]))
    inner, each = int(rng.choice([1, 2, 3, 8])), int(rng.choice([1, 2, 5, 16]))
    attrs = sizes(rng, spatial) | {"groups": groups, "channels_last": bool(rng.random() < 0.5)}
    window = tuple(map(int, rng.integers(1, 4, spatial)))
    least = [max(1, (k - 1) * d + 1 - a - b) for k, d, a, b in zip(window, *(attrs[n] for n in ("dilation", "low", "high")))]
    dims = tuple(int(n + rng.integers(0, 7)) for n in least)
    batch, channels, out = int(rng.integers(0 if seed % 7 == 0 else 1, 4)), groups * inner, groups * each
    if attrs["channels_last"]:
        return attrs, [(batch, *dims, channels), (*window, inner, out), (out,)]
    return attrs, [(batch, channels, *dims), (out, inner, *window), (out,)]


def conv_graph(attrs: dict[str, Any], dims: list[tuple[int, ...]], dtypes: list[str], bias: bool) -> rlx.Graph:
    g = rlx.Graph("conv")
    operands = [g.input(name, d, t) for name, d, t in zip("xwb" if bias else "xw", dims, dtypes)]
    g.set_outputs([rlx.conv(*operands, **attrs)])
    return g


def attributes(g: rlx.Graph) -> Any:
    return g.outputs[0].node.attrs


def check_against_torch(
    g: rlx.Graph, feeds: dict[str, np.ndarray], oracle: Callable[..., torch.Tensor], ulps: float, devices: Iterable[str]
) -> None:
    operands = [wide(a) for a in feeds.values()]
    want = oracle(attributes(g), *operands).numpy()
    bound = oracle(attributes(g), *map(torch.abs, operands)).numpy() * ulps
    for device in devices:
        (found,) = run(g, feeds, device)
        assert found.shape == want.shape and found.dtype == feeds["x"].dtype
        assert (np.abs(found.astype(want.dtype) - want) <= bound).all(), device


# -- conv ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(60))
def test_convolutions_are_those_of_torch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    attrs, dims = random_conv(seed)
    dtype = str(rng.choice(["f32", "f32", "f64", "f16", "bf16", "i32"]))
    g = conv_graph(attrs, dims, [dtype] * 3, bias=seed % 2 == 0)
    feeds = {name: array(rng, d, dtype) for name, d in zip("xwb"[: len(g.inputs)], dims)}
    check_against_torch(g, feeds, conv_oracles.conv, ULPS.get(dtype, 0), ("cpu", "ref:0") if seed % 3 else SESSIONS)


@pytest.mark.parametrize("device", SESSIONS)
@pytest.mark.parametrize("groups", [1, 3, 6])
def test_bytes_give_exact_sums_of_32_bits(groups: int, device: str) -> None:
    rng = np.random.default_rng(groups)
    x = rng.integers(0, 256, (2, 6, 9, 7)).astype(np.uint8)
    w = rng.integers(-128, 128, (12, 6 // groups, 3, 3)).astype(np.int8)
    g = conv_graph({"low": 1, "high": 1, "groups": groups}, [x.shape, w.shape], ["u8", "i8"], bias=False)
    (found,) = run(g, {"x": x, "w": w}, device)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, conv_oracles.conv(attributes(g), wide(x), wide(w)).numpy())


@pytest.mark.parametrize("precision", ["bf16", "int8", "tf32"])
def test_a_precision_narrows_a_convolution(precision: str) -> None:
    rng = np.random.default_rng(1)
    x, w = array(rng, (1, 9, 9, 8), "f32"), array(rng, (3, 3, 8, 16), "f32")
    g = rlx.Graph("conv")
    g.set_outputs([rlx.conv(g.input("x", x.shape, "f32"), g.param("w", w.shape, "f32"), channels_last=True)])
    compiled = SESSIONS["cpu"].compile(g, rlx.CompileOptions(precision=precision))
    compiled.set_params({"w": w})
    (found,) = compiled.run({"x": x})
    want = conv_oracles.conv(attributes(g), wide(x), wide(w)).numpy()
    assert found.dtype == np.float32 and np.abs(found - want).max() < 0.1 * np.abs(want).max()
    assert (np.abs(found - want).max() > 1e-4) == (precision in ("bf16", "int8"))  # on a CPU, tf32 is f32


def test_a_cast_stands_in_front_of_the_windows() -> None:
    """Nine copies of each element would be rounded, one is."""
    g = rlx.Graph("conv")
    g.set_outputs([rlx.conv(g.input("x", (1, 9, 9, 8), "f32"), g.param("w", (3, 3, 8, 16), "f32"), channels_last=True)])
    casts = [s.kernel for s in SESSIONS["ref:1"].compile(g, rlx.CompileOptions(precision="bf16")).program().steps]
    assert [b.size for k in casts for b in k.buffers if b.dtype.name == "bf16" and b.writable] == [9 * 9 * 8]


@pytest.mark.parametrize(
    ("width", "strides", "rows"), [(28, 2, [(2 * 14 * 14,)]), (28, 1, [(2 * 28 * 28,)]), (200, 2, [(2, 14, 100)])]
)
def test_pixels_that_a_stride_takes_apart_are_one_matrix(width: int, strides: int, rows: list[tuple[int, ...]]) -> None:
    """Where a target reads one stride of rows, a product of each short row of an image would read all weights again."""
    g = rlx.Graph("conv")
    x, w = g.input("x", (2, 28, width, 8), "f32"), g.param("w", (1, 1, 8, 16), "f32")
    g.set_outputs([rlx.conv(x, w, strides=strides, channels_last=True)])
    steps = lower(g, Target("any", frozenset(DTYPES), channels_last=True), rlx.CompileOptions()).steps
    contracts = [(s.kernel, c) for s in steps for c in s.kernel.body if isinstance(c, Contract)]
    assert [(*(n for _, n in kernel.grid), c.m) for kernel, c in contracts] == rows
    assert len(steps) == 1 + (rows == [(2 * 14 * 14,)])


@pytest.mark.parametrize(("few", "names"), [(True, ["pad copy"]), (False, ["pad", "copy"])])
def test_windows_are_copied_out_of_the_image_without_padding(few: bool, names: list[str]) -> None:
    g = rlx.Graph("conv")
    x, w = g.input("x", (2, 14, 14, 8), "f32"), g.param("w", (3, 3, 8, 16), "f32")
    g.set_outputs([rlx.conv(x, w, low=1, high=1, channels_last=True)])
    made = lower(g, Target("any", frozenset(DTYPES), channels_last=True, few_kernels=few), rlx.CompileOptions())
    assert [" ".join(s.kernel.origin) for s in made.steps[:-1]] == names


def test_a_batch_may_have_a_name_and_be_part_of_a_bucket() -> None:
    rng = np.random.default_rng(0)
    x, w, b = (array(rng, d, "f32") for d in ((3, 4, 7, 8), (6, 2, 3, 3), (6,)))
    g = conv_graph({"groups": 2, "strides": 2, "low": 1}, [("n", 4, 7, 8), w.shape, b.shape], ["f32"] * 3, bias=True)  # type: ignore[list-item]
    want = conv_oracles.conv(attributes(g), wide(x), wide(w), wide(b)).numpy()
    (found,) = run(g, {"x": x, "w": w, "b": b}, dims={"n": 3})
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    compiled = SESSIONS["cpu"].compile(g, rlx.CompileOptions().bind_extent("n", 8))
    compiled.set_active_extent((3, 8))
    (found,) = compiled.run({"x": np.concatenate([x, np.full((5, *x.shape[1:]), np.nan, np.float32)]), "w": w, "b": b})
    np.testing.assert_allclose(found[:3], want, rtol=1e-4, atol=1e-5)


def test_a_traced_function_may_convolve() -> None:
    rng = np.random.default_rng(0)
    x, w = array(rng, (1, 3, 8, 8), "f32"), array(rng, (4, 3, 3, 3), "f32")
    attrs = {"low": (1, 0), "high": (1, 2)}
    found = rlx.jit(lambda x, w: rlx.relu(rlx.conv(x, w, **attrs)))(x, w)
    g = conv_graph(attrs, [x.shape, w.shape], ["f32"] * 2, bias=False)
    want = conv_oracles.conv(attributes(g), wide(x), wide(w)).clamp(min=0).numpy()
    np.testing.assert_allclose(np.asarray(found), want, rtol=1e-4, atol=1e-5)


REFUSED: dict[str, tuple[type[RlxError], str, list[Any], dict[str, Any]]] = {
    "a window larger than the padded input": (
        ShapeError, "spatial dim 1, 3 wide, spans 5 elements, the dim has 4", [(1, 2, 5, 3), (4, 2, 3, 3)],
        {"low": (0, 1), "dilation": (1, 2)},
    ),
    "other channels": (ShapeError, "x has 3 channels, the weights take 2 in each of 2", [(1, 3, 5), (4, 2, 3)], {"groups": 2}),
    "groups that do not divide the result": (ShapeError, "5 channels of the result", [(1, 4, 5), (5, 2, 3)], {"groups": 2}),
    "another rank": (ShapeError, "1 to 3 spatial dims", [(1, 3, 5, 5), (4, 3, 3)], {}),
    "no spatial dims": (ShapeError, "1 to 3 spatial dims", [(1, 3), (4, 3)], {}),
    "a bias of another length": (ShapeError, r"the bias must be \[4\]", [(1, 3, 5), (4, 3, 3), (3,)], {}),
    "a spatial dim without a size": (ShapeError, "spatial dim 0 needs a known size, the dim is n", [(1, 3, "n"), (4, 3, 3)], {}),
    "too many strides": (AttributeValueError, "strides must be one number, or one for each of the 1", [(1, 3, 5), (4, 3, 3)],
                         {"strides": (1, 2)}),
    "a stride of 0": (AttributeValueError, "strides has numbers of at least 1", [(1, 3, 5), (4, 3, 3)], {"strides": 0}),
    "negative padding": (AttributeValueError, "low has numbers of at least 0", [(1, 3, 5), (4, 3, 3)], {"low": -1}),
    "no groups": (AttributeValueError, "groups is at least 1", [(1, 3, 5), (4, 3, 3)], {"groups": 0}),
    "no elements in a window": (ShapeError, "spatial dim 0, 0 wide, has no elements", [(1, 3, 5), (4, 3, 0)], {}),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_convolution_says_what_is_wrong(name: str) -> None:
    error, text, dims, attrs = REFUSED[name]
    with pytest.raises(error, match=text):
        conv_graph(attrs, dims, ["f32"] * 3, bias=len(dims) == 3)


def test_operands_of_other_dtypes_are_refused() -> None:
    with pytest.raises(DTypeError, match="not multiplied"):
        conv_graph({}, [(1, 3, 5), (4, 3, 3)], ["f32", "i32"], bias=False)
    with pytest.raises(DTypeError, match="does not hold a bias of f64"):
        conv_graph({}, [(1, 3, 5), (4, 3, 3), (4,)], ["f32", "f32", "f64"], bias=True)


@pytest.mark.parametrize("device", SESSIONS)
@pytest.mark.parametrize(("op", "x", "w", "attrs", "found"), [
    ("conv", (2, 3, 7, 9), (0, 3, 3, 2), {}, (2, 0, 5, 8)), ("conv", (2, 4, 9), (0, 1, 3), {"groups": 4}, (2, 0, 7)),
    ("conv", (2, 4, 9), (0, 2, 3), {"groups": 2}, (2, 0, 7)), ("conv_transpose", (1, 2, 5), (2, 0, 2), {}, (1, 0, 6)),
    ("conv_transpose", (2, 0, 4, 5), (0, 3, 2, 2), {}, (2, 3, 5, 6)), ("conv", (2, 0, 7), (3, 0, 3), {}, (2, 3, 5)),
])  # fmt: skip
def test_no_channels_are_convolved(device: str, op: str, x: Any, w: Any, attrs: dict[str, Any], found: tuple[int, ...]) -> None:
    g = rlx.Graph("none")
    g.set_outputs([getattr(rlx, op)(g.input("x", x, "f32"), g.input("w", w, "f32"), **attrs)])
    (got,) = SESSIONS[device].compile(g).run({"x": np.ones(x, np.float32), "w": np.ones(w, np.float32)})
    assert got.shape == found and not got.any()


def test_dims_beyond_any_memory_are_refused() -> None:
    g = conv_graph({"low": 1 << 61}, [(1, 2, 5), (4, 2, 1)], ["f32"] * 2, bias=False)
    with pytest.raises(RlxError, match="more than any memory"):
        run(g, {"x": np.zeros((1, 2, 5), np.float32), "w": np.zeros((4, 2, 1), np.float32)})


# -- conv_transpose ------------------------------------------------------------------------------------------------


def random_conv_transpose(seed: int) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Attributes, and the dims of x, w and b."""
    rng = np.random.default_rng(seed)
    spatial, groups = int(rng.integers(1, 4)), int(rng.choice([1, 1, 2, 3]))
    window, dims = (tuple(map(int, rng.integers(1, most, spatial))) for most in (5, 6))
    attrs: dict[str, Any] = sizes(rng, spatial) | {"groups": groups, "channels_last": bool(rng.random() < 0.5)}
    spans = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(dims, attrs["strides"], window, attrs["dilation"])]
    attrs["low"] = tuple(int(rng.integers(-2, span)) for span in spans)
    attrs["high"] = tuple(int(rng.integers(-2, span - low)) for span, low in zip(spans, attrs["low"]))
    batch, inner, out = int(rng.integers(0 if seed % 7 == 0 else 1, 3)), int(rng.choice([1, 2, 5])), int(rng.choice([1, 3]))
    channels, every = inner * groups, out * groups
    if attrs["channels_last"]:
        return attrs, [(batch, *dims, channels), (*window, channels, out), (every,)]
    return attrs, [(batch, channels, *dims), (channels, out, *window), (every,)]


@pytest.mark.parametrize("seed", range(40))
def test_transposed_convolutions_are_those_of_torch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    attrs, dims = random_conv_transpose(seed)
    dtype = str(rng.choice(["f32", "f32", "f64", "bf16", "i32"]))
    g = rlx.Graph("conv_transpose")
    names = "xwb" if seed % 2 else "xw"
    g.set_outputs([rlx.conv_transpose(*(g.input(name, d, dtype) for name, d in zip(names, dims)), **attrs)])
    feeds = {name: array(rng, d, dtype) for name, d in zip(names, dims)}
    check_against_torch(g, feeds, conv_oracles.conv_transpose, ULPS.get(dtype, 0), ("cpu", "ref:0") if seed % 3 else SESSIONS)


def test_nothing_is_multiplied_by_zeros_between_elements() -> None:
    """Nine products for each element of x in a window of 3 x 3, and one convolution where the stride divides the window."""
    for window, kernels in ((3, 4), (2, 1), (4, 1)):
        g = rlx.Graph("up")
        x, w = g.input("x", (1, 16, 16, 8), "f32"), g.param("w", (window, window, 8, 5), "f32")
        g.set_outputs([rlx.conv_transpose(x, w, strides=2, channels_last=True)])
        compiled = SESSIONS["ref:0"].compile(g)
        found = [c for s in compiled.program().steps for c in s.kernel.body if isinstance(c, Contract)]
        products = sum(c.m * c.n * c.k for c in found)
        assert len(found) == kernels
        border = (1 + (window - 1) / 2 / 16) ** 2 + 0.1  # places around x
        assert products <= 16 * 16 * 8 * 5 * window**2 * border


def test_infinities_stay_where_the_window_takes_them() -> None:
    g = rlx.Graph("up")
    g.set_outputs([rlx.conv_transpose(g.input("x", (1, 1, 3), "f32"), g.input("w", (1, 1, 3), "f32"), strides=2)])
    (found,) = run(g, {"x": np.array([[[1, np.inf, 1]]], np.float32), "w": np.ones((1, 1, 3), np.float32)})
    np.testing.assert_array_equal(found, [[[1, 1, np.inf, np.inf, np.inf, 1, 1]]])


def test_a_refused_transposed_convolution_says_what_is_wrong() -> None:
    g = rlx.Graph("g")
    x, w = g.input("x", (1, 4, 5), "f32"), g.input("w", (4, 2, 3), "f32")
    with pytest.raises(ShapeError, match="of spatial dim 0, 5 wide, 4 and 3 elements are cut off: nothing is left"):
        rlx.conv_transpose(x, w, low=4, high=3)
    with pytest.raises(ShapeError, match="x has 4 channels, the weights take 3"):
        rlx.conv_transpose(x, g.input("v", (3, 2, 3), "f32"))
    with pytest.raises(ShapeError, match=r"the bias must be \[2\]"):
        rlx.conv_transpose(x, w, g.input("b", (4,), "f32"))
    with pytest.raises(AttributeValueError, match="strides, dilation and groups are at least 1"):
        rlx.conv_transpose(x, w, strides=0)


# -- windows -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", SESSIONS)
def test_windows_over_views_are_read_in_place_or_copied_once(device: str) -> None:
    """Of a slice, a transpose, a reverse (which no stride expresses), and windows of windows."""
    x = np.arange(5 * 12.0, dtype=np.float32).reshape(5, 12)
    g = rlx.Graph("views")
    v = g.input("x", x.shape, "f32")
    views = [v[1:4, ::2], v.T, v[::-1, 3:], rlx.windows(v, (3,), (1,))[:, ::3]]
    g.set_outputs([rlx.windows(y, (2, 3), (0, 1), strides=(1, 2)) + 1.0 for y in views])
    arrays = [x[1:4, ::2], x.T, x[::-1, 3:], np.lib.stride_tricks.sliding_window_view(x, 3, 1)[:, ::3]]
    for y, found in zip(arrays, run(g, {"x": x}, device)):
        attrs = SimpleNamespace(window=(2, 3), axes=(0, 1), strides=(1, 2), dilation=(1, 1))
        np.testing.assert_array_equal(found, conv_oracles.windows(attrs, torch.from_numpy(y.copy())).numpy() + 1)


def test_refused_windows_say_what_is_wrong() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (5, "n"), "f32")
    with pytest.raises(ShapeError, match="a window along axis 0 spans 7 elements, the dim has 5"):
        rlx.windows(x, (3,), (0,), dilation=(3,))
    with pytest.raises(ShapeError, match="a window along axis 1 needs a known size"):
        rlx.windows(x, (3,), (1,))
    with pytest.raises(AttributeValueError, match="name one dim twice"):
        rlx.windows(x, (2, 2), (0, -2))
    with pytest.raises(AttributeValueError, match="window must have 2 numbers"):
        rlx.windows(x, (2,), (0, 1))


# -- pools ---------------------------------------------------------------------------------------------------------


def random_pool(seed: int, name: str) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Attributes, and the dims of x."""
    rng = np.random.default_rng(seed)
    spatial = int(rng.integers(1, 4))
    attrs: dict[str, Any] = {"window": tuple(map(int, rng.integers(1, 4, spatial))), **sizes(rng, spatial)}
    spans = [(k - 1) * d + 1 for k, d in zip(attrs["window"], attrs["dilation"])]
    attrs["low"], attrs["high"] = (tuple(min(n, s - 1) for n, s in zip(attrs[end], spans)) for end in ("low", "high"))
    dims = tuple(int(s + rng.integers(0, 6)) for s in spans)
    batch, channels = int(rng.integers(0 if seed % 7 == 0 else 1, 3)), int(rng.choice([1, 3, 17]))
    if name != "max_pool_indices":
        attrs["channels_last"] = bool(rng.random() < 0.5)
    if name == "avg_pool":
        attrs |= {"count_padding": bool(rng.random() < 0.5), "extra": tuple(map(int, rng.integers(0, 2, spatial)))}
    if name == "lp_pool":
        attrs["p"] = float(rng.choice([1, 2, 3, 0.5]))
    return attrs, (batch, *dims, channels) if attrs.get("channels_last") else (batch, channels, *dims)


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("name", ["max_pool", "max_pool_indices", "avg_pool", "lp_pool"])
def test_pools_are_those_of_torch(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    attrs, dims = random_pool(seed, name)
    dtype = str(rng.choice(["f32", "f64", "f16", "bf16"] + ["i8", "u8", "i32"] * name.startswith("max")))
    g = rlx.Graph("pool")
    made = getattr(rlx, name)(g.input("x", dims, dtype), **attrs)
    g.set_outputs(list(made) if isinstance(made, tuple) else [made])
    x = array(rng, dims, dtype)
    if seed % 2 and as_dtype(dtype).is_float and x.size:
        x.reshape(-1)[rng.integers(0, x.size, 2)] = np.nan, -np.inf
    with np.errstate(invalid="ignore"):
        want = conv_oracles.ORACLES[name](SimpleNamespace(dtype=as_dtype(dtype)), attributes(g), wide(x).numpy())
    want = want if isinstance(want, tuple) else (want,)
    rtol = 0 if name.startswith("max") else 64 * ULPS[dtype]
    for device in ("cpu", "ref:0") if seed % 3 else SESSIONS:
        for found, expected in zip(run(g, {"x": x}, device), want, strict=True):
            np.testing.assert_allclose(found.astype(expected.dtype), expected, rtol=rtol, atol=rtol)


def test_the_last_window_may_begin_in_the_padding() -> None:
    """ONNX's ceil_mode: the padding that was asked for counts, the rest of such a window does not; as torch does it."""
    x = np.arange(1.0, 7.0, dtype=np.float32).reshape(1, 1, 6)
    for counted in (False, True):
        want = torch.nn.functional.avg_pool1d(torch.from_numpy(x), 3, 2, 1, ceil_mode=True, count_include_pad=counted).numpy()
        g = rlx.Graph("pool")
        g.set_outputs([rlx.avg_pool(g.input("x", x.shape, "f32"), 3, 2, 1, 1, extra=1, count_padding=counted)])
        np.testing.assert_allclose(run(g, {"x": x})[0], want, rtol=1e-6)


def test_maxima_that_are_equal_or_nan_have_the_first_position() -> None:
    g = rlx.Graph("pool")
    g.set_outputs(list(rlx.max_pool_indices(g.input("x", (2, 1, 6), "f32"), 3, 3, 0, 0)))
    x = np.array([[[1, 1, 0, 0, np.nan, np.nan]], [[-np.inf] * 6]], np.float32)
    values, indices = run(g, {"x": x})
    np.testing.assert_array_equal(values, [[[1, np.nan]], [[-np.inf, -np.inf]]])
    np.testing.assert_array_equal(indices, [[[0, 4]], [[6, 9]]])
    g = rlx.Graph("padding")
    g.set_outputs(list(rlx.max_pool_indices(g.input("x", (1, 1, 2), "f32"), 2, 2, 2, 0)))
    values, indices = run(g, {"x": np.full((1, 1, 2), -np.inf, np.float32)})
    np.testing.assert_array_equal(values, [[[-np.inf, -np.inf]]])
    np.testing.assert_array_equal(indices, [[[-1, 0]]])


def test_a_refused_pool_says_what_is_wrong() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (1, 2, 5), "f32")
    with pytest.raises(ShapeError, match="spatial dim 0, 3 wide, spans 7 elements, the dim has 5"):
        rlx.max_pool(x, 3, dilation=3)
    with pytest.raises(ShapeError, match="1 to 3 spatial dims"):
        rlx.avg_pool(g.input("y", (2, 5), "f32"), 3)
    with pytest.raises(AttributeValueError, match="window has numbers of at least 1"):
        rlx.max_pool(x, 0)
    with pytest.raises(AttributeValueError, match="p is a positive number, got 0.0"):
        rlx.lp_pool(x, 3, p=0)
    with pytest.raises(AttributeValueError, match="extra has numbers of at least 0"):
        rlx.avg_pool(x, 3, extra=-1)
    with pytest.raises(DTypeError, match="cast it first"):
        rlx.avg_pool(g.input("z", (1, 2, 5), "i32"), 3)


def residual() -> tuple[rlx.Graph, dict[str, np.ndarray], np.ndarray]:
    """A convolution of a colour image, a max pool, and two blocks, one with a shortcut of its own; params; an image."""
    rng, g, params = np.random.default_rng(0), rlx.Graph("residual"), dict[str, np.ndarray]()

    def convolved(x: rlx.Value, out: int, window: int, **how: Any) -> rlx.Value:
        name, inner = f"w{len(params)}", x.dims[1] // how.get("groups", 1)
        params[name] = array(rng, (out, inner, window, window), "f32") / np.float32((inner * window**2) ** 0.5)
        params["b" + name] = array(rng, (out,), "f32")
        weights, around = [g.param(n, params[n].shape, "f32") for n in (name, "b" + name)], (window // 2,) * 2
        return rlx.conv(x, *weights, low=around, high=around, **how)

    x = rlx.relu(convolved(g.input("x", (1, 3, 21, 19), "f32"), 32, 7, strides=2))
    x = rlx.max_pool(x, window=3, strides=2, low=1, high=1)
    x = rlx.relu(convolved(rlx.relu(convolved(x, 32, 3)), 64, 1) + convolved(x, 64, 1))
    x = rlx.relu(convolved(rlx.relu(convolved(x, 64, 3, groups=64)), 64, 1) + x)
    g.set_outputs([convolved(x, 16, 1)])
    return g, params, array(rng, (1, 3, 21, 19), "f32")


def test_images_are_rounded_where_they_are_computed() -> None:
    """In bf16 each value that a convolution reads is stored in bf16, and read so by sums and pools; backends round the same."""
    g, params, x = residual()
    found, options = {}, rlx.CompileOptions(precision="bf16")
    for device in ("cpu", "ref:1"):
        compiled = SESSIONS[device].compile(g, options)
        compiled.set_params(params)
        (found[device],) = compiled.run({"x": x})
    np.testing.assert_allclose(found["cpu"], found["ref:1"], rtol=2**-6, atol=1e-3)
    exact = SESSIONS["ref:0"].compile(g)
    exact.set_params(params)
    (want,) = exact.run({"x": x})
    assert 1e-4 < np.abs(want - found["cpu"]).max() < 6e-2
    program = lower(g, with_natives(AMX), options)
    wide = [b.shape.dims for b in program.buffers if b.region is Region.ARENA and b.shape.dtype.name == "f32"]
    assert wide == [(1, 6, 5, 16)], "the sums of the last convolution alone, before they are transposed"


def test_other_results_of_an_op_that_computes_an_image_keep_their_dtypes() -> None:
    """Positions of the greatest elements, and the number of a loop's iterations."""
    x = np.random.default_rng(0).integers(-8, 8, (1, 8, 8, 8)).astype(np.float32)
    for build in (
        lambda x: rlx.top_k(x, 8),
        lambda x: (lambda kept, rows, n: (*kept, n))(*rlx.counted_loop(lambda i, go, c: (i < 2, c + 1.0), x, limit=4)),
    ):
        g = rlx.Graph("several")
        image, other = build(g.input("x", x.shape, "f32"))
        g.set_outputs([rlx.conv(image, rlx.constant(np.ones((1, 1, 8, 8), np.float32)), channels_last=True), other])
        found, (want, _) = run(g, {"x": x}, precision="bf16"), evaluate(g, {"x": x}, {})
        assert [a.dtype for a in found] == [a.dtype for a in want] == [np.float32, np.int64]
        np.testing.assert_array_equal(found[1], want[1])


def test_a_dequantised_value_is_computed_where_it_is_added() -> None:
    """Of the bytes that a product reads too, not by the kernel that stores them, in f32."""
    g = rlx.Graph("quantised")
    product = g.input("x", (40, 64), "f32") @ g.param("w", (64, 64), "f32")
    q = rlx.clip(rlx.round(product) + 128.0, low=0.0, high=255.0).astype("u8")
    added = (q.astype("f32") - 128.0) * 0.5
    sums = rlx.int8_matmul(q, g.param("v", (64, 64), "i8")).astype("f32")
    g.set_outputs([sums * 0.25 + added])
    program = lower(g, with_natives(AMX), rlx.CompileOptions())
    assert [b.shape.dtype.name for b in program.buffers if b.region is Region.ARENA] == ["u8"]
    rng = np.random.default_rng(0)
    feeds, weights = {"x": array(rng, (40, 64), "f32")}, {"w": array(rng, (64, 64), "f32"), "v": array(rng, (64, 64), "i8")}
    compiled = SESSIONS["cpu"].compile(g)
    compiled.set_params(weights)
    np.testing.assert_allclose(compiled.run(feeds)[0], evaluate(g, feeds, weights)[0][0], atol=2.6)  # one unit of q at a tie


@pytest.mark.parametrize("dtypes", [("f32", "f32"), ("u8", "i8"), ("bf16", "bf16")], ids=str)
@pytest.mark.parametrize(
    "attrs",
    [{"strides": 2, "low": 3, "high": (3, 2)}, {"channels_last": True, "low": 1}, {"dilation": (2, 1), "low": 2}],
    ids=str,
)
def test_images_of_three_channels_are_read_in_whole_pixels(attrs: dict[str, Any], dtypes: tuple[str, str]) -> None:
    """With a fourth channel of zeros, and windows of bytes as wide as one step of the target's products, which read them in
    place."""
    rng = np.random.default_rng(0)
    last = attrs.get("channels_last", False)
    x = array(rng, (2, 19, 23, 3) if last else (2, 3, 19, 23), dtypes[0])
    w = array(rng, (7, 5, 3, 32) if last else (32, 3, 7, 5), dtypes[1])
    g = rlx.Graph("image")
    g.set_outputs([rlx.conv(g.input("x", x.shape, dtypes[0]), g.param("w", w.shape, dtypes[1]), **attrs)])
    options = rlx.CompileOptions(precision="bf16" if dtypes[0] == "f32" else "f32")
    compiled = SESSIONS["cpu"].compile(g, options)
    compiled.set_params({"w": w})
    (found,) = compiled.run({"x": x})
    want = conv_oracles.conv(attributes(g), wide(x), wide(w)).numpy()
    np.testing.assert_allclose(found.astype(want.dtype), want, atol=0 if dtypes[0] == "u8" else 0.02 * np.abs(want).max())
    program = lower(g, with_natives(AMX), options)
    (a,) = (s.kernel.body[0].a for s in program.steps if isinstance(s.kernel.body[0], Contract))
    assert isinstance(a, Operand) and a.col_levels[0][0] == (64 if dtypes[0] == "u8" else 4 * w.shape[1 if last else 3])


@pytest.mark.parametrize("axes", [(), (-1, -3, -2, 0), (3, 1, 2, 0)], ids=str)
def test_a_transposed_image_of_three_channels(axes: tuple[int, ...]) -> None:
    """Axes that are left out, and those that count from the end."""
    rng = np.random.default_rng(0)
    x, w = array(rng, (3, 12, 14, 2), "bf16"), array(rng, (5, 5, 3, 64), "bf16")
    g = rlx.Graph("image")
    image = rlx.transpose(g.input("x", x.shape, "bf16"), axes=axes)
    g.set_outputs([rlx.conv(image, g.param("w", w.shape, "bf16"), channels_last=True)])
    made = precision(g, Compilation(with_natives(AMX), rlx.CompileOptions()))
    assert any(v.dims[-1] == 4 for n in made.nodes() for v in n.inputs)
    found, want = (evaluate(graph, {"x": x}, {"w": w})[0][0].astype(np.float32) for graph in (made, g))
    np.testing.assert_allclose(found, want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("size", [3, 5, 7])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_an_infinite_pixel_is_in_its_windows_alone(dtype: str, size: int) -> None:
    """Channels and pixels that the compiler adds have weights of 0, and 0 times an infinite number is NaN."""
    rng, side = np.random.default_rng(0), (0, 1, 1, 0)
    x, w = array(rng, (1, 9, 24, 3), dtype), array(rng, (size, size, 3, 32), dtype)
    x[0, 4, 12, 1] = np.inf
    options = rlx.CompileOptions(precision="bf16" if dtype == "f32" else "f32")
    for value in (0.0, -np.inf):
        g = rlx.Graph("image")
        image = rlx.pad(g.input("x", x.shape, dtype), low=side, high=side, value=value)
        g.set_outputs([rlx.conv(image, g.param("w", w.shape, dtype), channels_last=True)])
        made = precision(g, Compilation(with_natives(AMX), options))
        assert any(v.dims[-1] == 4 for n in made.nodes() for v in n.inputs)
        found, want = (np.isfinite(evaluate(graph, {"x": x}, {"w": w})[0][0]) for graph in (made, g))
        np.testing.assert_array_equal(found, want)


def test_bytes_are_pooled_before_they_are_dequantised() -> None:
    """By steps that keep their order; not where a window has padding alone, or a factor turns the order."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, (1, 4, 9, 8)).astype(np.uint8)
    for factor, low, narrow in ((0.5, 1, True), (-0.5, 1, False), (0.5, 3, False)):
        g = rlx.Graph("pool")
        wide = rlx.relu(rlx.minimum((g.input("x", x.shape, "u8").astype("f32") - 128.0) * factor, 9.25))
        g.set_outputs([rlx.max_pool(wide, window=3, strides=2, low=low, high=1)])
        program = SESSIONS["cpu"].compile(g).program()
        pooled = max(b.size for s in program.steps for b in s.kernel.buffers if b.dtype.name == "f32")
        assert (pooled == 4 * 5 * 4) == narrow
        (found,), (want,) = run(g, {"x": x}), evaluate(g, {"x": x}, {})[0]
        np.testing.assert_array_equal(found, want)


def test_bytes_that_wrap_around_or_windows_without_elements_are_not_pooled_narrow() -> None:
    """Sums and products of bytes do not keep the order; with steps between elements a window may lie in the padding."""
    rng, narrow = np.random.default_rng(0), {"window": 2, "strides": 2}
    apart = {"window": 2, "dilation": 2, "low": 1, "high": 1}
    for build, dims, how in (
        (lambda x: x + rlx.constant(np.uint8(200)), (1, 2, 4, 4), narrow),
        (lambda x: x * rlx.constant(np.uint8(3)), (1, 2, 4, 4), narrow),
        (lambda x: x.astype("i32") + (2**31 - 100), (1, 2, 4, 4), narrow),
        (lambda x: x, (1, 2, 1, 1), apart),
    ):
        g, x = rlx.Graph("pool"), rng.integers(0, 256, dims).astype(np.uint8)
        g.set_outputs([rlx.max_pool(build(g.input("x", dims, "u8")).astype("f32") * 0.5, **how)])
        (found,), (want,) = run(g, {"x": x}), evaluate(g, {"x": x}, {})[0]
        np.testing.assert_array_equal(found, want)
