"""resize, grid_sample, affine_grid and roi_align, on the CPU and on the reference: against onnx's own reference implementations
and torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_index_functions import by_onnx, run

import rlx
from rlx.errors import AttributeValueError, ShapeError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((1, 2, 5, 7)).astype(np.float32)
EMPTY = np.array([], np.float32)
COORDINATES = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric")


def same(found: list[np.ndarray], want: list[np.ndarray]) -> None:
    """Within the rounding of the cubic kernel's coefficients, whose sum is smaller than they are."""
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def resized(x: np.ndarray, dims: tuple[int, ...] | None, scales: tuple[float, ...] | None, **attributes: Any) -> np.ndarray:
    arrays = [x, EMPTY, EMPTY if scales is None else np.array(scales, np.float32), np.array(dims or [], np.int64)]
    return by_onnx("Resize", *arrays[: 3 if dims is None else 4], **attributes)[0]


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("mode", ["nearest", "linear", "cubic"])
@pytest.mark.parametrize("dims", [(1, 2, 10, 14), (1, 2, 3, 4), (1, 2, 1, 9), (1, 2, 5, 1)])
def test_resize_to_dims(dims: tuple[int, ...], mode: str, coordinates: str) -> None:
    want = resized(X, dims, None, mode=mode, coordinate_transformation_mode=coordinates)
    same(run(lambda x: rlx.resize(x, dims, mode=mode, coordinates=coordinates), X), [want])


@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize("attributes", [
    {"mode": "linear"}, {"mode": "cubic", "exclude_outside": True}, {"mode": "cubic", "cubic": -0.5},
    {"mode": "linear", "antialias": True}, {"mode": "cubic", "antialias": True, "exclude_outside": True},
    *({"mode": "nearest", "rounding": r} for r in ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")),
], ids=str)  # fmt: skip
def test_resize_by_factors(attributes: dict[str, Any], coordinates: str) -> None:
    """The factors count where the sizes are rounded."""
    theirs = {"cubic": "cubic_coeff_a", "rounding": "nearest_mode"}
    options = {theirs.get(k, k): int(v) if isinstance(v, bool) else v for k, v in attributes.items()}
    for factors, dims in (((0.45, 0.6), (2, 4)), ((2.3, 1.6), (11, 11))):
        factors = tuple(np.float32((1, 1, *factors)).tolist())
        want = resized(X, None, factors, coordinate_transformation_mode=coordinates, **options)
        same(run(lambda x: rlx.resize(x, (1, 2, *dims), scales=factors, coordinates=coordinates, **attributes), X), [want])  # noqa: B023


@pytest.mark.parametrize("dims", [(3, 4), (1, 4)])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_resize_of_a_part(dims: tuple[int, int], mode: str) -> None:
    """One result along a dim is the middle of the part."""
    options = {"mode": mode, "coordinate_transformation_mode": "tf_crop_and_resize", "axes": [2, 3]}
    for roi in (np.array([0.4, 0.6, 0.6, 0.8], np.float32), np.array([0.4, 0.6, 1.2, 1.7], np.float32)):
        (want,) = by_onnx("Resize", X, roi, EMPTY, np.array(dims), extrapolation_value=10.0, **options)
        box = list(zip(roi[:2].tolist(), roi[2:].tolist()))
        how = {"coordinates": "tf_crop_and_resize", "mode": mode, "box": box, "outside": 10.0}
        found = run(lambda x: rlx.resize(x, dims, (2, 3), **how), X)  # type: ignore[arg-type]  # noqa: B023
        same(found, [want])


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_resize_is_that_of_torch(rank: int) -> None:
    dims, x = (9, 4, 6)[:rank], RNG.standard_normal((2, 3, *(5, 6, 4)[:rank])).astype(np.float32)
    for ours, theirs in (("linear", ("linear", "bilinear", "trilinear")[rank - 1]), ("nearest", "nearest-exact")):
        want = F.interpolate(torch.from_numpy(x).double(), dims, mode=theirs).numpy()
        rounding = "round_prefer_ceil"
        same(run(lambda x: rlx.resize(x, dims, range(2, rank + 2), mode=ours, rounding=rounding), x), [want])  # noqa: B023
    if rank == 2:
        want = F.interpolate(torch.from_numpy(x).double(), (2, 3), mode="bicubic", antialias=True).numpy()
        options = {"mode": "cubic", "cubic": -0.5, "antialias": True, "exclude_outside": True}
        same(run(lambda x: rlx.resize(x, (2, 3), (2, 3), **options), x), [want])


def test_narrow_numbers_are_resized_in_f32() -> None:
    x = X.astype(np.float16)
    want = F.interpolate(torch.from_numpy(x).double(), (9, 11), mode="bilinear").numpy()
    (found,) = run(lambda x: rlx.resize(x, (9, 11), (2, 3)), x)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, want, rtol=2**-10, atol=1e-5)


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("rank, mode", [(2, "nearest"), (2, "linear"), (2, "cubic"), (3, "nearest"), (3, "linear")])
def test_samples_of_a_grid(rank: int, mode: Any, padding: Any, align: bool) -> None:
    x = RNG.standard_normal((2, 3, *(5, 6, 4)[:rank])).astype(np.float32)
    grid = (RNG.random((2, *(3, 4, 2)[:rank], rank)) * 5 - 2.5).astype(np.float32)
    grid.reshape(-1)[:3] = -1, 1, 0
    theirs = {"linear": "bilinear", "cubic": "bicubic"}.get(mode, mode)
    want = F.grid_sample(torch.from_numpy(x), torch.from_numpy(grid), theirs, padding, align).numpy()
    (found,) = run(lambda x, g: rlx.grid_sample(x, g, mode=mode, padding=padding, align_corners=align), x, grid)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("align", [False, True])
def test_affine_grids(align: bool) -> None:
    for dims in ((3, 5), (4, 3, 2), (2, 4) if align else (1, 4)):
        maps = RNG.standard_normal((2, len(dims), len(dims) + 1)).astype(np.float32)
        want = F.affine_grid(torch.from_numpy(maps), [2, 3, *dims], align_corners=align).numpy()
        same(run(lambda x: rlx.affine_grid(x, dims, align_corners=align), maps), [want])  # noqa: B023


@pytest.mark.parametrize("half_pixel", [False, True])
@pytest.mark.parametrize("mode, theirs", [("mean", "avg"), ("max", "max")])
def test_regions(mode: Any, theirs: str, half_pixel: bool) -> None:
    x = RNG.standard_normal((2, 3, 10, 12)).astype(np.float32)
    boxes = np.array([[0, 0, 9, 9], [-4, -6, 3.5, 30], [4.2, 3.1, 4.3, 3.15], [5, 2, 25, 24]], np.float32)
    batch = np.array([0, 1, 1, 0])
    options = {"output_height": 3, "output_width": 4, "sampling_ratio": 2, "spatial_scale": 0.5, "mode": theirs}
    pixel = "half_pixel" if half_pixel else "output_half_pixel"
    want = by_onnx("RoiAlign", x, boxes, batch, coordinate_transformation_mode=pixel, **options)
    found = run(
        lambda x, b, i: rlx.roi_align(x, b, i, (3, 4), samples=2, scale=0.5, mode=mode, half_pixel=half_pixel), x, boxes, batch
    )
    same(found, want)


@pytest.mark.parametrize("groups, moved, masked", [(1, 1, False), (2, 1, True), (1, 2, True), (2, 4, False)])
def test_deformed_convolutions(groups: int, moved: int, masked: bool) -> None:
    x, w = (RNG.standard_normal(d).astype(np.float32) for d in ((2, 4, 7, 6), (6, 4 // groups, 3, 2)))
    offset, mask, bias = (RNG.standard_normal(d).astype(np.float32) for d in ((2, moved * 12, 4, 4), (2, moved * 6, 4, 4), (6,)))
    at = {"strides": [2, 1], "pads": [1, 0, 2, 0], "dilations": [1, 2]}
    ours: dict[str, Any] = {"strides": (2, 1), "low": (1, 0), "high": (2, 0), "dilation": (1, 2), "groups": groups}
    ours["offset_groups"] = moved
    operands = [x, w, offset * 2, *([mask] if masked else [])]
    want = by_onnx("DeformConv", x, w, offset * 2, bias, *([mask] if masked else []), group=groups, offset_group=moved, **at)
    found = run(lambda *v: rlx.deform_conv(*v[:-1], bias=v[-1], **ours), *operands, bias, atol=1e-5)  # sums of 24 products
    same(found, want)
    still = run(lambda x, o: rlx.deform_conv(x, w, o, **ours), x, offset * 0, atol=1e-5)  # weights as an array
    del ours["offset_groups"]
    same(still, run(lambda x, w: rlx.conv(x, w, **ours), x, w, atol=1e-5))


WRONG = {
    "a mode": (lambda x: rlx.resize(x, (4, 4), (2, 3), mode="area"), AttributeValueError, "nearest, linear, cubic"),
    "a rule": (lambda x: rlx.resize(x, (4, 4), (2, 3), coordinates="pixel"), AttributeValueError, "half_pixel_symmetric"),
    "no elements": (lambda x: rlx.resize(x, (4, 0), (2, 3)), ShapeError, "cannot be resized to 0"),
    "too many results": (lambda x: rlx.resize(x, (4, 2**40), (2, 3), mode="nearest"), ShapeError, "check the sizes"),
    "too small a factor": (lambda x: rlx.resize(x, 4, 2, scales=[1e-9], antialias=True), ShapeError, "check the sizes"),
    "a grid": (lambda x: rlx.grid_sample(x, np.zeros((1, 3, 3, 3), "f4")), ShapeError, r"\[1, \*result, 2\]"),
    "an offset": (lambda x: rlx.deform_conv(x, x[:, :, :3, :3], x), ShapeError, "the offset must be"),
    "groups of offsets": (
        lambda x: rlx.deform_conv(x, x[:, :, :3, :3], x, offset_groups=0), AttributeValueError, "not divided into 0 offset"),
    "groups": (lambda x: rlx.deform_conv(x, x[:, :, :3, :3], x, groups=1.5), AttributeValueError, "groups is a whole number"),
    "samples of the run": (
        lambda x: rlx.roi_align(x, np.zeros((1, 4), "f4"), np.zeros(1, "i8"), (2, 2), 0), AttributeValueError, "1 sample"),
}  # fmt: skip


@pytest.mark.parametrize("ask, error, message", WRONG.values(), ids=WRONG)
def test_wrong_images_are_errors(ask: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(rlx.Graph("g").input("x", X.shape, "f32"))
