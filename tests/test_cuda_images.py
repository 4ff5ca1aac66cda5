"""Convolutions whose products read the windows from the image (rlx/backends/cuda/images.py)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.gpu import refusal
from rlx.backends.cuda.images import Image, has_windows, image_of
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.compiler import lower
from rlx.ir.dtype import as_dtype
from rlx.ir.kernel import Operand
from rlx.ir.op import OPS

HOPPER, TOLERANCE = target("sm_90a"), {"bf16": 5e-3, "f16": 1e-3}
on_gpu = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")
SHAPES = {  # channels last: image, window, columns, attributes
    "plain": ((2, 9, 11, 64), (3, 3), 64, {"low": 1, "high": 1}),
    "one image": ((1, 14, 14, 128), (3, 3), 72, {"low": 1, "high": 1}),
    "steps": ((3, 15, 17, 64), (3, 3), 136, {"low": 1, "high": 1, "strides": 2}),
    "uneven steps": ((3, 16, 23, 64), (2, 3), 64, {"strides": (3, 2), "low": (0, 2), "high": (1, 0)}),
    "every other pixel": ((2, 28, 28, 192), (1, 1), 96, {"strides": 2}),
    "dilation": ((2, 19, 13, 64), (3, 3), 64, {"dilation": 2, "low": 2, "high": 2}),
    "uneven dilation": ((1, 21, 25, 128), (3, 2), 200, {"dilation": (3, 2), "strides": (1, 2), "high": (3, 1)}),
    "patches": ((2, 12, 20, 64), (4, 4), 128, {"strides": 4}),
    "patches apart": ((2, 13, 22, 64), (2, 2), 128, {"strides": 3}),
    "rows alone": ((3, 6, 40, 64), (1, 5), 64, {"low": (0, 2), "high": (0, 2)}),
    "columns alone": ((3, 40, 6, 64), (5, 1), 64, {"low": (2, 0), "high": (2, 0)}),
    "one place in rows": ((40, 7, 3, 64), (3, 3), 64, {}),
    "one place in columns": ((20, 3, 9, 64), (3, 3), 64, {}),
    "line": ((3, 77, 128), (5,), 64, {"strides": 2, "low": 2, "high": 2}),
    "cube": ((2, 5, 6, 7, 64), (3, 3, 3), 64, {"low": 1, "high": 1}),
    "one image in patches": ((1, 48, 48, 64), (3, 3), 64, {"strides": 3}),
    "large window": ((2, 40, 41, 64), (7, 7), 64, {"low": 3, "high": 3}),
    "many": ((8, 30, 31, 256), (3, 3), 512, {"low": 1, "high": 1}),
}


def convolution(shape: str, dtype: str = "bf16", end: bool = False) -> rlx.Graph:
    dims, window, n, attrs = SHAPES[shape]
    g = rlx.Graph("conv")
    x, w = g.input("x", dims, dtype), g.param("w", (*window, dims[-1], n), dtype)
    y = rlx.conv(x, w, **attrs, channels_last=True)  # type: ignore[call-arg]
    if end:  # bias, residual, relu
        others = g.param("b", (n,), dtype), g.input("r", y.dims, dtype)
        y = rlx.maximum(sum((v.astype("f32") for v in others), y.astype("f32")), 0.0).astype(dtype)
    g.set_outputs([y])
    return g


def windows_of(x: Image, m: int, k: int) -> np.ndarray:
    """The elements that the boxes bring of each row of the matrix, by the coordinates in the kernel's text: a box begins at a
    window's first pixel, goes from window to window, and has pixels as far behind these as its offsets say."""
    found, tensor, spatial = np.empty((m, k), np.int64), x.tensor(0, 0, "bf16", 64), len(x.axes)
    strides = [1, *(s // 2 for s in tensor.strides)]
    places = [-(-(size + end) // step) for size, end, step in zip(tensor.dims[1:-1], tensor.ends, tensor.steps)]
    for k0 in range(0, k, 64):
        for row in range(m):
            text = x.place(str(row), str(k0)).replace("(uint16_t)", "").replace("/", "//")
            (channel, *at), offsets = (values := eval(f"[{text}]"))[: spatial + 2], values[spatial + 2 :]
            assert all(a % s == 0 and a // s < n for a, s, n in zip(at, tensor.steps, places)) and at[-1] < tensor.dims[-1]
            pixel = [a + o for a, o in zip(at, (*offsets, 0))]
            assert all(p < d for p, d in zip(pixel, tensor.dims[1:])) and channel + 64 <= tensor.dims[0]
            found[row, k0 : k0 + 64] = np.arange(64) + channel + np.dot(pixel, strides[1:])
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_boxes_of_an_image_are_rows_of_windows(shape: str) -> None:
    steps = lower(convolution(shape), HOPPER, rlx.CompileOptions()).steps
    assert all(s.kernel.origin[-1] != "copy" for s in steps), [s.kernel.origin for s in steps]
    made = launch_of(steps[-1].kernel)
    assert isinstance(made, TensorLaunch) and "rlx_load_windows(to" in text_of(made, "kernel")
    c = made.contract
    assert not made.by_threads
    o, m = (c.b, c.n) if made.tiling.swapped else (c.a, c.m)
    assert isinstance(o, Operand)
    stride, rows, column, columns = o.row_stride, o.row_levels, o.col_stride, o.col_levels
    if made.tiling.swapped:
        stride, rows, column, columns = column, columns, stride, rows
    plain = Operand(o.buffer, o.offset, stride, column, row_levels=rows, col_levels=columns)
    image = image_of(plain, m, c.k)
    assert cubin(text_of(made, "kernel"), "sm_90a")
    assert image is not None and image == next(s.image for s in made.sides if s.image)
    if m * c.k < 1 << 22:
        np.testing.assert_array_equal(windows_of(image, m, c.k), places(plain, m, c.k))


def places(o: Operand, m: int, k: int) -> np.ndarray:
    def along(at: np.ndarray, stride: int, levels) -> np.ndarray:
        found = 0
        for count, outer in levels:
            found, at, stride = found + at % count * stride, at // count, outer
        return found + at * stride

    return np.add.outer(along(np.arange(m), o.row_stride, o.row_levels), along(np.arange(k), o.col_stride, o.col_levels))


def test_other_convolutions_copy_their_windows() -> None:
    few = rlx.Graph("few channels")
    x, w = few.input("x", (2, 9, 9, 40), "bf16"), few.param("w", (3, 3, 40, 64), "bf16")
    few.set_outputs([rlx.conv(x, w, channels_last=True)])  # type: ignore[call-arg]
    for g, arch in ((few, "sm_90a"), (convolution("plain", "f32"), "sm_90a"), (convolution("plain"), "sm_80")):
        kernels = [s.kernel for s in lower(g, target(arch), rlx.CompileOptions()).steps]
        assert any("copy" in k.origin for k in kernels)
        assert not any("rlx_load_windows(to" in text_of(launch_of(k, arch), "kernel") for k in kernels)


def test_windows_that_copies_do_not_bring_are_read_by_loops() -> None:
    x, few = SHAPES["plain"], (2, 9, 11, 40)
    for dims, dtype in ((few, "bf16"), (x[0], "f32")):
        g = rlx.Graph("levels")
        seen, w = g.input("x", dims, dtype), g.param("w", (3, 3, dims[-1], 64), dtype)
        g.set_outputs([rlx.conv(seen, w, channels_last=True)])  # type: ignore[call-arg]
        (step,) = lower(g, replace(HOPPER, in_place=lambda *_: True), rlx.CompileOptions()).steps
        made = launch_of(step.kernel)
        assert has_windows(step.kernel) and type(made) is Launch and cubin(text_of(made, "kernel"), "sm_90a")


@on_gpu
@pytest.mark.parametrize("dtype", ("bf16", "f16"))
@pytest.mark.parametrize("shape", SHAPES)
def test_convolutions_of_images(shape: str, dtype: str) -> None:
    for end in (False, True):
        rng, numpy, (dims, window, n, given) = np.random.default_rng(0), as_dtype(dtype).numpy, SHAPES[shape]
        x, w, b = (rng.standard_normal(d).astype(numpy) for d in (dims, (*window, dims[-1], n), (n,)))
        attrs = OPS["conv"].make_attrs({**given, "channels_last": True})
        want = OPS["conv"].reference(attrs, x.astype(np.float64), w.astype(np.float64))
        r = rng.standard_normal(want.shape).astype(numpy)
        compiled = rlx.Session("cuda").compile(convolution(shape, dtype, end))
        for name, value in {"w": w, **({"b": b} if end else {})}.items():
            compiled.set_param(name, value)
        inputs = {"x": x, **({"r": r} if end else {})}
        (found,) = compiled.run(inputs)
        if end:
            want = np.maximum(want + b.astype(np.float64) + r.astype(np.float64), 0)
        np.testing.assert_allclose(found.astype(np.float64), want, rtol=0, atol=TOLERANCE[dtype] * np.abs(want).max())
        assert np.array_equal(found, compiled.run(inputs)[0])
