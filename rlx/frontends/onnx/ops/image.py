"""Images at other sizes and places: Resize, GridSample, regions, and images from columns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.dtype import i64
from rlx.ir.node import Value, constant

_OLD: dict[str, Any] = {"coordinates": "asymmetric", "rounding": "floor"}  # Upsample, and Resize before opset 11


@handler("Upsample", "Resize")
def resize_by_factors(n: Call) -> Value:
    """Factors are an operand from opset 9 on."""
    factors = n.known(1).tolist() if n.has(1) else n.attr("scales")
    dims = tuple(int(d * s) for d, s in zip(n.sizes(0), factors))
    return functions.resize(n.value(0), dims, scales=factors, mode=_mode(n), **_OLD)


def _mode(n: Call) -> Any:
    return {"bilinear": "linear", "bicubic": "cubic"}.get(mode := n.attr("mode", "nearest"), mode)


@handler("Resize", since=11)
def resize(n: Call) -> Value:
    """Sizes, or else factors, of some axes; a policy may ask for one factor for all of them."""
    axes = tuple(a % n.rank(0) for a in n.attr("axes", range(n.rank(0))))
    own = [known_dim(n, 0, a) for a in axes]
    factors = n.known(2, np.zeros(0)).tolist()
    if not factors:
        dims, policy = n.ints(3), n.attr("keep_aspect_ratio_policy", "stretch")
        factors = [size / d for size, d in zip(dims, own, strict=True)]
        if policy != "stretch":
            factor = (min if policy == "not_larger" else max)(factors)
            factors, dims = [factor] * len(own), tuple(int(factor * d + 0.5) for d in own)
    else:
        dims = tuple(int(d * s) for d, s in zip(own, factors, strict=True))
    how, box = n.attr("coordinate_transformation_mode", "half_pixel"), None
    if how == "tf_crop_and_resize":
        ends = n.known(1).tolist()
        box = list(zip(ends[: len(axes)], ends[len(axes) :]))
    return functions.resize(
        n.value(0), dims, axes=axes, scales=factors, mode=_mode(n), coordinates=how, box=box,
        rounding=n.attr("nearest_mode", "round_prefer_floor"), cubic=n.attr("cubic_coeff_a", -0.75),
        exclude_outside=bool(n.attr("exclude_outside", 0)), antialias=bool(n.attr("antialias", 0)),
        outside=n.attr("extrapolation_value", 0.0),
    )  # fmt: skip


@handler("GridSample", since=16)
def grid_sample(n: Call) -> Value:
    facts: dict[str, Any] = {"mode": n.attr("mode", "linear"), "padding": n.attr("padding_mode", "zeros")}
    facts["mode"] = {"bilinear": "linear", "bicubic": "cubic"}.get(facts["mode"], facts["mode"])
    return functions.grid_sample(n.value(0), n.value(1), align_corners=bool(n.attr("align_corners", 0)), **facts)


@handler("AffineGrid", since=20)
def affine_grid(n: Call) -> Value:
    return functions.affine_grid(n.value(0), n.ints(1)[2:], align_corners=bool(n.attr("align_corners", 0)))


@handler("RoiAlign", since=10)
def roi_align(n: Call) -> Value:
    samples = n.attr("sampling_ratio", 0)
    if samples < 1:
        n.refuse("sampling_ratio of 0, where each box decides the number of samples, is not supported: give a number")
    dims, how = (n.attr("output_height", 1), n.attr("output_width", 1)), n.attr("mode", "avg")
    return functions.roi_align(
        n.value(0), n.value(1), n.value(2), dims, samples, scale=n.attr("spatial_scale", 1.0),
        mode="mean" if how == "avg" else how,
        half_pixel=n.attr("coordinate_transformation_mode", "half_pixel" if n.opset >= 16 else "") == "half_pixel",
    )  # fmt: skip


@handler("MaxRoiPool")
def max_roi_pool(n: Call) -> Value:
    """The greatest element of each bin of a region: rows of (image, x1, y1, x2, y2); 0 for bins without elements."""
    x, regions = n.value(0), n.value(1)
    ends = ops.floor(regions[:, 1:] * n.attr("spatial_scale", 1.0) + 0.5)
    seen = ops.gather(x, regions[:, 0].astype(i64))
    for axis, (size, bins) in enumerate(zip(n.sizes(0)[2:], n.attr("pooled_shape"))):
        start, end = (ends[:, i].reshape((-1, 1, 1)) for i in (1 - axis, 3 - axis))
        step = ops.maximum(end - start + 1.0, 1.0) / float(bins)
        number, place = (ops.iota(dims=d, axis=i, dtype=x.dtype) for d, i in (((1, bins, 1), 1), ((1, 1, size), 2)))
        low, high = ops.floor(number * step) + start, ops.ceil((number + 1.0) * step) + start
        inside = ops.unsqueeze(ops.logical_and(ops.less_equal(low, place), ops.less(place, high)), axes=(1, 2))
        lines = ops.unsqueeze(functions.moveaxis(seen, 2 + axis, -1), axes=(3,))
        seen = functions.moveaxis(ops.max(ops.where(inside, lines, -math.inf), axis=-1), -1, 2 + axis)
    return ops.where(ops.equal(seen, -math.inf), constant(0, x.dtype), seen)


@handler("Col2Im", since=18)
def col2im(n: Call) -> Value:
    """The sum of the columns of sliding blocks [batch, channels * block, blocks], at their places in the image."""
    x, image, block = n.value(0), n.ints(1), n.ints(2)
    rank = len(image)
    strides, dilation = n.attr("strides", (1,) * rank), n.attr("dilations", (1,) * rank)
    pads = n.attr("pads", (0,) * (2 * rank))
    whole = [d + pads[i] + pads[rank + i] for i, d in enumerate(image)]
    at = np.zeros((), np.int64)
    for size, b, s, d in zip(whole, block, strides, dilation):  # adds a dim for the place in a block, and one for the block
        own = np.arange(b)[:, None] * d + np.arange((size - d * (b - 1) - 1) // s + 1) * s
        at = at[..., None, None] * size + own
    at = at.transpose(*range(0, 2 * rank, 2), *range(1, 2 * rank, 2))
    batch, channels = x.dims[0], known_dim(n, 0, 1) // math.prod(block)
    columns = x.reshape((batch, channels, at.size))
    empty = ops.broadcast_to(constant(0, x.dtype), dims=(batch, channels, math.prod(whole)))
    made = ops.scatter_add(empty, constant(at.reshape(-1)), columns, axis=2).reshape((batch, channels, *whole))
    inside = (slice(pads[i], size - pads[rank + i]) for i, size in enumerate(whole))
    return made[(slice(None), slice(None), *inside)]
