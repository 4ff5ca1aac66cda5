"""Convolutions: a view of sliding windows, and a contraction that sums over the elements of each.

All of them are computed channels last: with channels first, between transposed views.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.declare import op
from rlx.ir.dtype import DType, holds
from rlx.ir.node import Value
from rlx.ir.op import Kind, Sample
from rlx.ir.ops.contract import flatten_matmul, products
from rlx.ir.ops.index import copy, pad
from rlx.ir.ops.reduce import sum
from rlx.ir.ops.rules import static_dim
from rlx.ir.ops.view import reshape, transpose
from rlx.ir.ops.windows import ConvolutionAttrs, Ints, from_last, taps, to_last, windowed
from rlx.ir.shape import DimLike, Shape

FEW = 4  # channels
LONG_ROW = 7  # elements of a row of a window, which are copied together where channels are first
SEVERAL = 4  # results of one channel, from which they are columns of a product


class ConvAttrs(ConvolutionAttrs):
    """low, high: padding before and after each spatial dim."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.groups < 1:
            raise AttributeValueError(f"groups is at least 1, got {self.groups}")


# -- conv ----------------------------------------------------------------------------------------------------------


def _kernel(attrs: ConvAttrs, w: Shape) -> tuple[Ints, DimLike, DimLike]:
    """(window, channels of a group, channels of the result) of the weights."""
    inner, out, window = (*w.dims[-2:], w.dims[:-2]) if attrs.channels_last else (w.dims[1], w.dims[0], w.dims[2:])
    return tuple(static_dim(d, "a window") for d in window), inner, out


def _conv_shape(attrs: ConvAttrs, x: Shape, w: Shape, b: Shape | None = None) -> Shape:
    if x.rank not in (3, 4, 5) or w.rank != x.rank:
        raise ShapeError(f"x and w have 1 to 3 spatial dims, and two others, got {x} and {w}")
    window, inner, out = _kernel(attrs, w)
    channels, spatial = (x.dims[-1], x.dims[1:-1]) if attrs.channels_last else (x.dims[1], x.dims[2:])
    if inner * attrs.groups != channels:
        raise ShapeError(f"x has {channels} channels, the weights take {inner} in each of {attrs.groups} groups")
    if attrs.groups > 1 and static_dim(out, "a convolution of groups") % attrs.groups:
        raise ShapeError(f"{out} channels of the result are not divided into {attrs.groups} groups")
    places, dtype = attrs.positions(spatial, window), products(x.dtype, w.dtype)
    if b is not None and b.dims != (out,):
        raise ShapeError(f"the bias must be [{out}], got {b}")
    if b is not None and not holds(dtype, b.dtype):
        raise DTypeError(f"the result is {dtype}, which does not hold a bias of {b.dtype}; cast it")
    return Shape((x.dims[0], *places, out) if attrs.channels_last else (x.dims[0], out, *places), dtype)


def _conv(attrs: ConvAttrs, x: Value, w: Value, b: Value | None = None) -> Value:
    x = to_last(x, attrs.channels_last)
    w = w if attrs.channels_last else transpose(w, axes=(*range(2, w.rank), 1, 0))
    *window, inner, out = w.shape.static
    dtype = products(x.dtype, w.dtype)
    if attrs.groups == 1:
        w = reshape(w, dims=(math.prod(window) * inner, out))
        made = flatten_matmul(windowed(attrs, x, tuple(window), 1), w, axes=len(window) + 1).astype(dtype)
        made = made if b is None else made + b.astype(dtype)
    elif inner == 1 and out < SEVERAL * attrs.groups:
        made = _depthwise(attrs, x, w, dtype.compute)
        made = (made if b is None else made + b.astype(dtype.compute)).astype(dtype)
    else:
        made = _grouped(attrs, x, w, None if b is None else b.astype(dtype)).astype(dtype)
    return from_last(made, attrs.channels_last)


def _last(attrs: ConvAttrs, step: int, x: Value, w: Value, *b: Value) -> Value | None:
    """OpDef.last: also of the weights. Few channels are padded as they are: elements of a line stay adjacent. Where two
    products are summed in a step, few channels are copied to be adjacent themselves, an even number of them, unless the elements
    of a long row are adjacent anyway. Channels that are only scaled stay first."""
    if attrs.channels_last:
        return None
    strides, paddings = attrs.each("strides", w.rank - 2), (*attrs.each("low", w.rank - 2), *attrs.each("high", w.rank - 2))
    if {*w.shape.static[1:], *strides} == {1} and not any(paddings):
        return _scaled(attrs, x, w, *b)
    w, how = transpose(w, axes=(*range(2, w.rank), 1, 0)), {**vars(attrs), "channels_last": True}
    low, high = (attrs.each(name, w.rank - 2) for name in ("low", "high"))
    channels, (row, _, out) = x.shape.static[1], w.shape.static[-3:]
    odd, apart = channels % 2, attrs.each("dilation", w.rank - 2)[-1] > 1
    if step == 2 and channels <= FEW and attrs.groups == 1 and out > FEW and (not odd or row < LONG_ROW or apart):
        x = to_last(x, False)
        if odd:
            x = pad(x, low=(0,) * x.rank, high=(*(0 for _ in x.dims[1:]), 1))
            w = pad(w, low=(0,) * w.rank, high=(*(0 for _ in w.dims[2:]), 1, 0))
        return from_last(conv(copy(x), w, *b, **how), False)
    if channels <= FEW and any(low + high):
        x = pad(x, low=(0, 0, *low), high=(0, 0, *high))
        how |= {"low": 0, "high": 0}
    return from_last(conv(to_last(x, False), w, *b, **how), False)


def _scaled(attrs: ConvAttrs, x: Value, w: Value, *b: Value) -> Value:
    """Windows of one element of one channel: channels, first, times numbers."""
    dtype, groups, spatial, out = products(x.dtype, w.dtype), attrs.groups, x.dims[2:], w.shape.static[0]
    apart = (groups, *(() if out == groups else (out // groups,)))  # a reshape would keep transposes from passing
    made = x if out == groups else reshape(x, dims=(x.dims[0], groups, 1, *spatial))
    own = (*apart, *(1 for _ in spatial))
    made = made.astype(dtype.compute) * reshape(w, dims=own).astype(dtype.compute)
    for bias in b:
        made = made + reshape(bias, dims=own).astype(dtype.compute)
    made = made.astype(dtype)
    return made if out == groups else reshape(made, dims=(x.dims[0], out, *spatial))


def _depthwise(attrs: ConvAttrs, x: Value, w: Value, compute: DType) -> Value:
    """Each channel by its own windows: products element by element, and their sum."""
    spatial, (*window, _, out) = w.rank - 2, w.shape.static
    seen = windowed(attrs, x, tuple(window), 1).astype(compute)
    w, several = w.astype(compute), (attrs.groups, out // attrs.groups)
    if several[1] != 1:
        seen, w = reshape(seen, dims=(*seen.dims, 1)), reshape(w, dims=(*window, *several))
    else:
        w = reshape(w, dims=(*window, out))
    made = sum(seen * w, axis=tuple(range(spatial + 1, 2 * spatial + 1)))
    return reshape(made, dims=(*made.dims[: spatial + 1], out))


def _grouped(attrs: ConvAttrs, x: Value, w: Value, b: Value | None) -> Value:
    """[group, batch, *positions, *window, channels] by [group, k, channels of the result]. The bias is added before the groups
    are put together: sums of narrow floats that are stored in between would be rounded twice."""
    (*window, inner, out), groups, spatial = w.shape.static, attrs.groups, w.rank - 2
    seen = windowed(attrs, reshape(x, dims=(*x.dims[:-1], groups, inner)), tuple(window), 1)
    seen = transpose(seen, axes=(spatial + 1, *range(spatial + 1), *range(spatial + 2, seen.rank)))
    w = transpose(reshape(w, dims=(*window, inner, groups, out // groups)), axes=(spatial + 1, *range(spatial + 1), spatial + 2))
    made = flatten_matmul(seen, reshape(w, dims=(groups, math.prod(window) * inner, out // groups)), axes=spatial + 1, batch=1)
    if b is not None:
        made = made + reshape(b, dims=(groups, *(1,) * (spatial + 1), out // groups))
    made = transpose(made, axes=(*range(1, spatial + 2), 0, spatial + 2))
    return reshape(made, dims=(*made.dims[: spatial + 1], out))


def _conv_array(attrs: ConvAttrs, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
    """One element of the windows after the other, in f64 or the integers of the result."""
    dtype = np.float64 if x.dtype.kind == "f" else x.dtype if x.dtype == w.dtype else np.int32
    x, w = x.astype(dtype), w.astype(dtype)
    if not attrs.channels_last:
        x, w = np.moveaxis(x, 1, -1), np.moveaxis(w, (1, 0), (-2, -1))
    (*window, inner, out), groups = w.shape, attrs.groups
    made: Any = 0
    for at, seen in taps(attrs, x, tuple(window)):
        seen = seen.reshape(*seen.shape[:-1], groups, 1, inner)
        made = made + (seen @ np.moveaxis(w[at].reshape(inner, groups, out // groups), 1, 0))[..., 0, :]
    made = made.reshape(*made.shape[:-2], out) + (0 if b is None else b.astype(dtype))
    return made if attrs.channels_last else np.moveaxis(made, -1, 1)


def _conv_flops(operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]], attrs: ConvAttrs) -> int:
    """Elements of the padding count, as of a matrix product. The weights may be packed."""
    out = results[0][-1 if attrs.channels_last else 1]
    return 2 * math.prod(results[0]) * (math.prod(operands[1]) // max(1, out))


SAMPLES = (
    Sample(((2, 3, 7, 9), (5, 3, 3, 2), (5,))), Sample(((1, 4, 17), (6, 2, 3)), {"groups": 2, "strides": 2, "low": 1, "high": 2}),
    Sample(((2, 4, 5, 6), (8, 1, 3, 3), (8,)), {"groups": 4, "low": 1, "high": 1}),
    Sample(((2, 6, 5, 33), (3, 3, 1, 33), (33,)), {"groups": 33, "dilation": (1, 2), "low": (0, 2), "channels_last": True}),
    Sample(((1, 9, 8, 6), (3, 2, 3, 8)), {"groups": 2, "strides": (2, 1), "low": (1, 0), "high": (2, 1), "channels_last": True}),
    Sample(((2, 5, 17, 4), (1, 1, 4, 33), (33,)), {"strides": 2, "channels_last": True}),
    Sample(((1, 2, 4, 5, 3), (3, 2, 2, 2, 2)), {"dilation": (2, 1, 1), "high": (1, 0, 0)}), Sample(((0, 2, 5), (3, 2, 2))),
    Sample(((2, 3, 5, 5), (4, 3, 3, 3), (4,)), {"low": 1}, dtypes=("u8", "i8", "i32"), low=0, high=127),
    Sample(((2, 3, 5), (4, 3, 2)), dtypes=("f32", "bf16")),
)  # fmt: skip
conv = op(
    "conv", kind=Kind.COMPOSITE, infer=_conv_shape, attrs=ConvAttrs, arity=(2, 3), dtypes="fiu", reference=_conv_array,
    decompose=_conv, last=_last, samples=SAMPLES, flops=_conv_flops,
    doc="Convolution (cross-correlation) over 1 to 3 spatial dims: x [batch, channels, *spatial], w [out, channels / groups, "
    "*window], an optional bias b [out]; with channels_last x [batch, *spatial, channels] and w [*window, channels / groups, "
    "out]. `low` and `high` are the zeros before and after each spatial dim. The dtypes are those of matmul; u8 with i8 weights "
    "gives i32. Narrow floats are summed in f32.",
)  # fmt: skip
