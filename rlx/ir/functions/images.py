"""Images and other regular samples at other places: resize, grid_sample, affine_grid, roi_align and deform_conv."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Literal, TypeVar

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir import ops
from rlx.ir.dtype import i64
from rlx.ir.functions.arrays import moveaxis, tensordot
from rlx.ir.functions.declare import as_value, computed, function, known_dim, one_each, own_axis, widened
from rlx.ir.node import Operand, Value, constant
from rlx.ir.op import as_ints

T = TypeVar("T", Value, np.ndarray)

# -- resize --------------------------------------------------------------------------------------------------------

COORDINATES: dict[str, Callable[..., np.ndarray]] = {  # of results i in an operand of n elements; `wide` is scale * n
    "half_pixel": lambda i, n, scale, wide, box: (i + 0.5) / scale - 0.5,
    "half_pixel_symmetric": lambda i, n, scale, wide, box: (i + 0.5) / scale - 0.5 + n / 2 * (1 - len(i) / wide),
    "pytorch_half_pixel": lambda i, n, scale, wide, box: (i + 0.5) / scale - 0.5 if wide != 1 else i * 0 - 0.5,
    "align_corners": lambda i, n, scale, wide, box: i * (n - 1) / (wide - 1) if wide != 1 else i * 0.0,
    "asymmetric": lambda i, n, scale, wide, box: i / scale,
    "tf_crop_and_resize": lambda i, n, scale, wide, box: (
        box[0] * (n - 1) + (i + (wide == 1) / 2) * (box[1] - box[0]) * (n - 1) / (wide - 1 or 1)
    ),
}
ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round_prefer_floor": lambda x: np.ceil(x - 0.5), "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "floor": np.floor, "ceil": np.ceil,
}  # fmt: skip
MODES = ("nearest", "linear", "cubic")
FEW = 4  # so many elements are gathered one by one; more of them are a product with a matrix


def _named(label: str, name: str, names: Collection[str]) -> None:
    if not isinstance(name, str) or name not in names:
        raise AttributeValueError(f"{label} is one of {', '.join(names)}, got {name!r}")


def _cubic(x: T, a: float, select: Callable[..., T]) -> T:
    """R. Keys' convolution kernel at distance x >= 0."""
    near, far = ((a + 2) * x - (a + 3)) * x * x + 1, ((x * a - 5 * a) * x + 8 * a) * x - 4 * a
    return select(x <= 1, near, select(x < 2, far, x * 0))


def _taps(at: np.ndarray, n: int, scale: float, mode: str, a: float, exclude: bool) -> tuple[np.ndarray, np.ndarray]:
    """Elements [results, taps], some outside 0 … n-1, and their weights. A scale below 1 widens the kernel by its inverse."""
    reach = (1 if mode == "linear" else 2) / scale
    places = np.floor(at)[:, None] + np.arange(math.floor(-reach) + 1, math.ceil(reach) + 1)
    away = (at[:, None] - places) * scale
    weights = np.clip(1 - np.abs(away), 0, 1) if mode == "linear" else _cubic(np.abs(away), a, np.where)
    weights = np.where((places < 0) | (places >= n), 0, weights) if exclude else weights
    total = weights.sum(1, keepdims=True)
    return places, weights / np.where(total == 0, 1, total)


def _interpolated(x: Value, axis: int, places: np.ndarray, weights: np.ndarray) -> Value:
    """Sums of elements along the axis, at places [results, taps] that count as the first or last where they are outside."""
    n = known_dim(x, axis)
    inside = np.clip(places, 0, n - 1).astype(np.int64)
    if places.shape[1] > FEW:
        matrix = np.zeros((len(places), n))
        np.add.at(matrix, (np.arange(len(places))[:, None], inside), weights)
        return moveaxis(tensordot(x, constant(matrix, x.dtype), ([axis], [1])), -1, axis)
    parts = []
    for at, weight in zip(inside.T, weights.T):
        factor = constant(weight.reshape(-1, *(1 for _ in x.dims[axis + 1 :])), x.dtype)
        parts.append(ops.gather(x, constant(at), axis=axis) * factor)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@function
@widened
def resize(
    x: Value, dims: int | Sequence[int], axes: int | Sequence[int] | None = None, scales: Sequence[float] | None = None,
    mode: str = "linear", coordinates: str = "half_pixel", rounding: str = "round_prefer_floor", cubic: float = -0.75,
    exclude_outside: bool = False, antialias: bool = False, box: Sequence[tuple[float, float]] | None = None,
    outside: float = 0.0,
) -> Value:  # fmt: skip
    """x at other sizes along `axes` (all of them): `mode` 'nearest' (of two, by `rounding`), 'linear' or 'cubic' (of coefficient
    `cubic`). `scales`: the exact factors, if not dims / x.dims. `coordinates`: the rule that places results, by ONNX's
    names; for 'tf_crop_and_resize', `box` has first and last place of each axis in 0 … 1, and places outside x give `outside`.
    `antialias`: smaller results average all elements. Elements past an end are the last one, or with `exclude_outside` none."""
    _named("mode", mode, MODES)
    _named("coordinates", coordinates, COORDINATES)
    _named("rounding", rounding, ROUNDINGS)
    own = range(x.rank) if axes is None else [own_axis(x, i) for i in as_ints(axes)]
    sizes, dtype = as_ints(dims), x.dtype
    pairs = one_each(x, "dims of resize", sizes, own)
    scaled = one_each(x, "scales of resize", scales or [size / max(known_dim(x, axis), 1) for size, axis in pairs], own)
    ends = one_each(x, "box of resize", box or [(0.0, 1.0)] * len(sizes), own)
    for (size, axis), (scale, _), ((first, last), _) in zip(pairs, scaled, ends):
        n = known_dim(x, axis)
        if size == n and scale == 1 and (first, last) == (0, 1):
            continue
        if n < 1 or size < 1 or not scale > 0:
            raise ShapeError(f"dim {axis} of {x!r} cannot be resized to {size} by a factor of {scale}")
        computed(f"dim {axis} of {x!r} resized to {size} by {scale}", size * (max(n, 4 / scale) if antialias else FEW))
        at = COORDINATES[coordinates](np.arange(size, dtype=np.float64), n, scale, scale * n, (first, last))
        if mode == "nearest":
            made = ops.gather(x, constant(np.clip(ROUNDINGS[rounding](at), 0, n - 1).astype(np.int64)), axis=axis)
        else:
            wide = x if x.dtype.is_float else x.astype("f32")
            kernel = min(scale, 1.0) if antialias else 1.0
            made = _interpolated(wide, axis, *_taps(at, n, kernel, mode, cubic, exclude_outside))
        far = (at < 0) | (at > n - 1)
        if coordinates == "tf_crop_and_resize" and far.any():
            made = ops.where(constant(far.reshape(-1, *(1 for _ in x.dims[axis + 1 :]))), outside, made)
        x = made
    return x.astype(dtype)


# -- places that are known in a run --------------------------------------------------------------------------------

Tap = tuple[Value, Value]  # index of an element, i64, and its weight


def _reflected(at: Value, size: int, align_corners: bool) -> Value:
    """Places mirrored at the centres of the first and last element, or at their outer edges, until they are within."""
    low, span = (0.0, size - 1.0) if align_corners else (-0.5, float(size))
    return span - ops.abs(span - ops.mod(at - low, 2 * span)) + low if span else at * 0.0


def _sample_taps(at: Value, size: int, mode: str, padding: str, align_corners: bool) -> list[Tap]:
    if mode != "cubic" and padding != "zeros":  # then also an element beside the place is within, or has no weight
        at = ops.clip(_reflected(at, size, align_corners) if padding == "reflection" else at, low=0.0, high=size - 1.0)
    if mode == "nearest":
        found = [(ops.round(at), at * 0 + 1)]
    else:
        base = ops.floor(at)
        part = at - base
        kernel = lambda t: _cubic(abs(part - t), -0.75, ops.where) if mode == "cubic" else 1 - abs(part - t)  # noqa: E731
        found = [(base + t, kernel(t)) for t in ((-1, 0, 1, 2) if mode == "cubic" else (0, 1))]
    taps = []
    for place, weight in found:
        place = _reflected(place, size, align_corners) if padding == "reflection" and mode == "cubic" else place
        if padding == "zeros":
            weight = ops.where(ops.logical_and(place >= 0, place <= size - 1), weight, 0.0)
        taps.append((ops.clip(place, low=0.0, high=size - 1.0).astype(i64), weight))
    return taps


def _corners(rows: Value, first: Value, taps: Sequence[Sequence[Tap]], sizes: Sequence[int]) -> list[Value]:
    """Weighted rows for each choice of one tap along each dim; `first`: the row at which an image begins."""
    made = []
    for chosen in itertools.product(*taps):
        at, weight = first * math.prod(sizes), None
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        for (index, own), stride in zip(chosen, strides):
            at, weight = at + index * stride, own if weight is None else weight * own
        assert weight is not None
        made.append(ops.gather(rows, at) * ops.unsqueeze(weight, axes=-1))
    return made


def _image_rows(x: Value) -> tuple[Value, list[int]]:
    """x [batch, channels, *spatial] as rows of channels, and its spatial dims."""
    sizes = [known_dim(x, i) for i in range(2, x.rank)]
    if not sizes or not all(sizes):
        raise ShapeError(f"images are [batch, channels, *spatial], got {x!r}")
    return ops.reshape(moveaxis(x, 1, -1), dims=(known_dim(x, 0) * math.prod(sizes), x.dims[1])), sizes


@function
@widened
def grid_sample(
    x: Value, grid: Operand, mode: Literal["nearest", "linear", "cubic"] = "linear",
    padding: Literal["zeros", "border", "reflection"] = "zeros", align_corners: bool = False,
) -> Value:  # fmt: skip
    """x [batch, channels, *spatial] at the places of grid [batch, *result, rank], whose last coordinate is of the first spatial
    dim. -1 and 1 are the ends of x: the centres of its first and last elements if `align_corners`, else their outer edges."""
    _named("mode", mode, MODES)
    _named("padding", padding, ("zeros", "border", "reflection"))
    grid = as_value(grid)
    sizes = _image_rows(x)[1]
    if grid.rank != x.rank or grid.dims[-1] != len(sizes) or grid.dims[0] != x.dims[0]:
        raise ShapeError(f"the grid of {x!r} is [{x.dims[0]}, *result, {len(sizes)}], got {grid!r}")
    places = []
    for i, size in enumerate(sizes):
        at = grid[..., len(sizes) - 1 - i] + 1.0
        places.append(at * ((size - 1) / 2) if align_corners else (at * float(size) - 1.0) / 2)
    return sampled(x, places, mode, padding, align_corners)


def sampled(
    x: Value, places: Sequence[Value], mode: str = "linear", padding: str = "zeros", align_corners: bool = False
) -> Value:
    """x [batch, channels, *spatial] at places that count in elements: [batch, *result] for each spatial dim."""
    rows, sizes = _image_rows(x)
    taps = [_sample_taps(at, size, mode, padding, align_corners) for at, size in zip(places, sizes, strict=True)]
    first = ops.reshape(ops.iota(dims=x.dims[0]), dims=(-1, *(1 for _ in sizes)))
    total, *others = _corners(rows, first, taps, sizes)
    for one in others:
        total = total + one
    return moveaxis(total, -1, 1)


@function
def affine_grid(x: Value, dims: int | Sequence[int], align_corners: bool = False) -> Value:
    """The grid [batch, *dims, rank] for grid_sample of the affine maps x [batch, rank, rank + 1]."""
    sizes = as_ints(dims)
    if x.dims[1:] != (len(sizes), len(sizes) + 1):
        raise ShapeError(f"affine maps of {len(sizes)} dims are [batch, {len(sizes)}, {len(sizes) + 1}], got {x!r}")
    ends = [1.0 if align_corners else 1 - 1 / size for size in sizes]
    lines = [np.linspace(-end, end, size) if size > 1 or not align_corners else np.zeros(1) for end, size in zip(ends, sizes)]
    places = np.stack([*np.meshgrid(*lines, indexing="ij")[::-1], np.ones(sizes)], -1).reshape(-1, len(sizes) + 1)
    made = ops.matmul(constant(places, x.dtype), ops.transpose(x, axes=(0, 2, 1)))
    return ops.reshape(made, dims=(x.dims[0], *sizes, len(sizes)))


@function
@widened
def roi_align(
    x: Value, boxes: Operand, batch: Operand, dims: Sequence[int], samples: int, scale: float = 1.0,
    mode: Literal["mean", "max"] = "mean", half_pixel: bool = True,
) -> Value:  # fmt: skip
    """Regions [n, channels, *dims] of x [images, channels, height, width]: each box (x1, y1, x2, y2), times `scale`, of the image
    `batch` is divided into `dims` bins, and a bin is the mean of `samples` x `samples` points in it, interpolated linearly; or
    with 'max' the greatest weighted element at any of them. Without `half_pixel`, places are not moved by half an element, and
    a box is at least of size 1."""
    _named("mode", mode, ("mean", "max"))
    if samples < 1:
        raise AttributeValueError(f"a bin has at least 1 sample, got {samples}: a number that its box decides is not known here")
    boxes, (rows, sizes) = as_value(boxes), _image_rows(x)
    taps = []
    for i, (size, bins) in enumerate(zip(sizes, dims, strict=True)):
        start, end = (boxes[:, j][:, None] * scale - (0.5 if half_pixel else 0.0) for j in (1 - i, 3 - i))
        step = (end - start if half_pixel else ops.maximum(end - start, 1.0)) / float(bins)
        at = start + step * constant((np.arange(bins * samples) + 0.5) / samples, x.dtype)
        inside = ops.logical_and(at >= -1, at <= size)
        at = ops.clip(at, low=0.0, high=size - 1.0)
        low = ops.floor(at)
        pair = (low, low + 1 - at), (ops.minimum(low + 1, size - 1), at - low)
        shape = lambda v: ops.unsqueeze(v, axes=2 - i)  # noqa: B023, E731
        taps.append([(shape(place).astype(i64), shape(ops.where(inside, weight, 0.0))) for place, weight in pair])
    first = ops.reshape(as_value(batch).astype(i64), dims=(-1, 1, 1))
    first = ops.gather(ops.iota(dims=x.dims[0]), first)  # checked, as it becomes part of a larger index
    total, *others = _corners(rows, first, taps, sizes)
    for one in others:
        total = total + one if mode == "mean" else ops.maximum(total, one)
    apart = ops.reshape(total, dims=(boxes.dims[0], dims[0], samples, dims[1], samples, x.dims[1]))
    return moveaxis((ops.mean if mode == "mean" else ops.max)(apart, axis=(2, 4)), -1, 1)


@function
@widened
def deform_conv(
    x: Value, w: Operand, offset: Operand, mask: Operand | None = None, bias: Operand | None = None,
    strides: int | Sequence[int] = 1, low: int | Sequence[int] = 0, high: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1, groups: int = 1, offset_groups: int = 1,
) -> Value:  # fmt: skip
    """conv of x [batch, channels, height, width] where each window reads moved elements, interpolated linearly between pixels, 0
    outside of x. `offset` [batch, offset_groups * places in the window * 2, *result]: down and right, of each place of each
    window, for each of `offset_groups` groups of channels. `mask` [batch, offset_groups * places, *result] weights the elements
    that are read."""
    how = {"strides": strides, "low": low, "high": high, "dilation": dilation, "groups": groups}
    attrs = ops.conv.op.make_attrs(how)  # type: ignore[attr-defined]
    w, offset = as_value(w), as_value(offset)
    mask, bias = (None if v is None else as_value(v) for v in (mask, bias))
    shapes = x.shape, w.shape.with_dtype(x.dtype), *(() if bias is None else (bias.shape.with_dtype(x.dtype),))
    if x.rank != 4:
        raise ShapeError(f"a deformable convolution has 2 spatial dims, got {x!r}")
    ((batch, out, *places),) = (s.dims for s in ops.conv.op.result_shapes(attrs, shapes))  # type: ignore[attr-defined]
    (_, inner, *window), channels, (rows, columns) = w.shape.static, known_dim(x, 1), places
    if offset_groups < 1 or channels % offset_groups:
        raise AttributeValueError(f"{channels} channels are not divided into {offset_groups} offset groups")
    taps, images = math.prod(window), batch * offset_groups
    for name, given, each in (("offset", offset, 2 * taps), ("mask", mask, taps)):
        if given is not None and given.dims != (want := (batch, offset_groups * each, *places)):
            raise ShapeError(f"the {name} must be {list(want)}, got {given!r}")
    at, parts = ops.reshape(offset, dims=(images, taps, 2, *places)), []
    for axis in range(2):
        step, before, apart = (attrs.each(name, 2)[axis] for name in ("strides", "low", "dilation"))
        own = np.indices(places, sparse=True)[axis] * step - before + np.indices(window)[axis].reshape(-1, 1, 1) * apart
        parts.append(ops.reshape(at[:, :, axis] + constant(own, x.dtype), dims=(images, taps * rows, columns)))
    seen = sampled(ops.reshape(x, dims=(images, channels // offset_groups, *x.dims[2:])), parts)
    if mask is not None:
        seen = seen * ops.reshape(mask, dims=(images, 1, taps * rows, columns))
    seen = ops.reshape(seen, dims=(batch, groups, inner * taps, rows * columns))
    made = ops.matmul(ops.reshape(w, dims=(groups, out // groups, inner * taps)), seen)
    made = ops.reshape(made, dims=(batch, out, *places))
    return made if bias is None else made + ops.reshape(bias, dims=(-1, 1, 1))


__all__ = ["affine_grid", "deform_conv", "grid_sample", "resize", "roi_align"]
