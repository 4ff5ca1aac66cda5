"""Windows of images that products of the CUDA backend read where they lie, and the numbers that are filled in around images."""

from __future__ import annotations

import math
import operator

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")

from test_cuda import on_gpu

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.fills import spread
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.backends.cuda.windows import windows
from rlx.compiler import lower
from rlx.ir.evaluate import evaluate
from rlx.ir.kernel import Const, Contract, Store, Var

CASES = {  # dims of the image and the weights, attributes of the convolution, and dtype; channels last
    "padded": ((2, 30, 31, 64), (3, 3, 64, 64), {"low": 1, "high": 1}, "f32"),
    "not padded": ((3, 40, 29, 128), (3, 3, 128, 24), {}, "f32"),
    "dilated": ((1, 70, 53, 64), (3, 3, 64, 40), {"low": 2, "high": 2, "dilation": 2}, "f32"),
    "wide": ((2, 33, 40, 192), (2, 5, 192, 72), {"low": (0, 3), "high": (1, 1)}, "f16"),
    "a volume": ((1, 20, 30, 31, 64), (3, 3, 3, 64, 16), {"low": 1, "high": 1}, "f32"),
    "many columns": ((1, 40, 41, 64), (3, 3, 64, 520), {"low": 1, "high": 1}, "f32"),
    "large": ((8, 64, 64, 128), (3, 3, 128, 256), {"low": 1, "high": 1}, "bf16"),
    "a residual sum": ((2, 36, 37, 64), (3, 3, 64, 64), {"low": 1, "high": 1}, "f32"),
    "of a concat": ((2, 28, 30, 64), (3, 3, 128, 64), {"low": 1, "high": 1}, "f32"),
    "of a convolution": ((2, 30, 28, 64), (3, 3, 64, 64), {"low": 1, "high": 1}, "f32"),
}
OTHERS = {
    "a stride": ((2, 60, 61, 64), (3, 3, 64, 64), {"low": 1, "high": 1, "strides": 2}, "f32"),
    "few channels": ((2, 30, 31, 48), (3, 3, 48, 64), {"low": 1, "high": 1}, "f32"),
    "small images": ((32, 7, 7, 64), (3, 3, 64, 64), {"low": 1, "high": 1}, "f32"),
    "few windows": ((1, 20, 20, 64), (3, 3, 64, 64), {"low": 1, "high": 1}, "f32"),
    "a line": ((2, 3000, 64), (7, 64, 64), {"low": 3, "high": 3}, "f32"),
    "odd columns": ((2, 30, 31, 64), (3, 3, 64, 63), {"low": 1, "high": 1}, "f32"),
}


def network(name: str) -> rlx.Graph:
    image, weights, how, dtype = {**CASES, **OTHERS}[name]
    g = rlx.Graph("g")
    x, w, b = g.input("x", image, dtype), g.param("w", weights, dtype), g.param("b", (weights[-1],), dtype)
    seen = rlx.concat([x, g.input("y", image, dtype)], axis=-1) if "concat" in name else x
    for _ in range(2 if "convolution" in name else 1):
        made = rlx.relu(rlx.conv(seen, w, b, channels_last=True, **how)) + (x if "residual" in name else 0)
        seen = rlx.minimum(made, 3.0)
    g.set_outputs([made])
    return g


def steps(name: str, arch: str = "sm_90a"):
    return [s.kernel for s in lower(network(name), target(arch), rlx.CompileOptions(precision="bf16")).steps]


@pytest.mark.parametrize("name", CASES)
def test_products_read_windows_where_they_lie(name):
    found = [launch_of(kernel) for kernel in steps(name)]
    products = [at for at in found if isinstance(at, TensorLaunch)]
    assert [at.sides[0].windows is not None for at in products] == [True] * (2 if "convolution" in name else 1)
    assert "copy" not in {name for at in found for name in at.kernel.origin}
    assert all(cubin(text_of(at, "kernel"), "sm_90a") for at in products)


@pytest.mark.parametrize("name, arch", [*((name, "sm_90a") for name in OTHERS), ("padded", "sm_80"), ("large", "sm_100")])
def test_other_windows_are_copied(name, arch):
    for kernel in steps(name, arch):
        for s in kernel.body:
            assert not isinstance(s, Contract) or not s.a.row_levels + s.a.col_levels  # type: ignore[union-attr]


def test_other_kernels_take_windows_as_loops():
    """None is lost, should a program have them for a GPU whose products do not read them."""
    (kernel,) = [x for x in steps("padded") if isinstance(x.body[0], Contract)]
    found = launch_of(kernel, "sm_80")
    assert not isinstance(found.kernel.body[0], Contract) and cubin(text_of(found, "kernel"), "sm_80")


@pytest.mark.parametrize("seed", range(40))
def test_boxes_of_positions_are_those_of_windows(seed):
    """What the copies of a stage bring, by the same sums as the kernel's, against numpy's windows."""
    rng = np.random.default_rng(seed)
    spatial = int(rng.integers(1, 4))
    batch, *sizes = (int(n) for n in rng.integers(4, 14, spatial + 1))
    taps, apart = [int(n) for n in rng.integers(1, 4, spatial)], int(rng.integers(1, 3))
    image = np.arange(batch * math.prod(sizes) * 64).reshape(batch, *sizes, 64)
    outs = [n - (t - 1) * apart for n, t in zip(sizes, taps)]
    if min(outs) < 1:
        return
    strides = [s // image.itemsize for s in image.strides]
    rows = [*zip((batch, *outs), strides)][::-1]
    terms = [*zip((*taps, 64), (*(s * apart for s in strides[1:-1]), 1))][::-1]
    if (found := windows(rows, terms, 0)) is None:
        return
    flat = image.reshape(-1, 64)
    assert found.positions <= len(flat) and found.covered <= 1.4 * batch * math.prod(outs)
    wanted = np.lib.stride_tricks.as_strided(
        image, (batch, *outs, *taps, 64), (image.strides[0], *image.strides[1:-1], *(s * apart for s in image.strides[1:-1]), 8)
    ).reshape(batch * math.prod(outs), -1)
    for k0 in range(0, wanted.shape[1], 64):
        inside, behind = k0 % found.run, found.run
        shift = inside // 64
        for count, step in found.terms:
            shift += k0 // behind % count * step
            behind *= count
        seen = []
        for position in range(found.covered):
            row, rest, there = 0, position, True
            for count, step in reversed(found.rows):
                at, rest = divmod(rest, step)
                row, there = row * count + at, there and at < count
            if there:
                assert row == len(seen)
                seen.append(flat[position + shift, inside % 64 :][:64])
        np.testing.assert_array_equal(seen, wanted[:, k0 : k0 + 64])


def test_all_numbers_around_an_image_are_one_axis():
    """The kernel stores what the loops of the parts would."""
    (loops,) = [x for x in steps("of a convolution") if x.origin == ("pad",) and isinstance(x.body[0], Store)][-1:]
    (store,) = loops.body
    (g, images), (e, count) = loops.grid
    padded, whole = np.ones((2, 32, 30, 64)), np.zeros((2, 32, 30, 64))
    padded[:, 1:-1, 1:-1] = 0
    for n in range(images):
        for at in range(count):
            whole.reshape(-1)[_at(store.index, {g: n, e: at})] += 1
    np.testing.assert_array_equal(whole, padded)
    assert spread(loops) is loops  # which has no parts


def _at(e, known: dict[Var, int]) -> int:
    if isinstance(e, Const):
        return int(e.value)
    if isinstance(e, Var):
        return known[e]
    args = [_at(x, known) for x in e.args]
    ops = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.floordiv, "rem": operator.mod}
    return ops.get(e.op, {"lt": operator.lt, "select": lambda c, a, b: a if c else b}.get(e.op))(*args)


@on_gpu
@pytest.mark.parametrize("name", {**CASES, **OTHERS})
def test_convolutions_agree_with_the_reference(name):
    """Of small whole numbers, whose sums are exact."""
    made, rng = network(name), np.random.default_rng(0)
    drawn = lambda values: {v.node.name: rng.integers(-2, 3, v.dims).astype(v.dtype.numpy) for v in values}  # noqa: E731
    given, params = drawn(made.inputs), drawn(made.params)
    compiled = rlx.Session("cuda").compile(made, rlx.CompileOptions(precision="bf16"))
    compiled.set_params(params)
    (found,), ((wanted,), _) = compiled.run(given), evaluate(made, given, params)
    found, wanted = np.float32(found), np.float32(wanted)
    if made.outputs[0].dtype == rlx.f32:
        np.testing.assert_array_equal(found, wanted)
    else:  # rounded once, or at each op
        np.testing.assert_allclose(found, wanted, rtol=2**-6, atol=2)

