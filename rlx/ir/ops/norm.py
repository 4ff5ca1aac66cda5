"""Normalisations.

Scale and bias have the operand's dtype and are optional. Sums are accumulated in at least f32.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.declare import op
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.elementwise import rsqrt
from rlx.ir.ops.reduce import mean
from rlx.ir.ops.rules import axis_of, divide, same_dtype, widened
from rlx.ir.shape import Shape

Tensor = TypeVar("Tensor", Value, np.ndarray)


class LayerNormAttrs(Attrs):
    axis: int = -1  # the first of the normalised dims
    eps: float = 1e-5


class RmsNormAttrs(LayerNormAttrs):
    eps: float = 1e-6


class GroupNormAttrs(Attrs):
    groups: int
    eps: float = 1e-5


class BatchNormAttrs(Attrs):
    axis: int = 1  # of the channels
    eps: float = 1e-5


def _norm_shape(attrs: LayerNormAttrs, x: Shape, *affine: Shape) -> Shape:
    same_dtype(x, *affine)
    dims = x.dims[axis_of(attrs.axis, x.rank) :]
    for s in affine:
        if s.dims != dims:
            raise ShapeError(f"scale and bias must be [{','.join(map(str, dims))}], got {s}")
    return x


def _axes(attrs: LayerNormAttrs, x: Value | np.ndarray) -> tuple[int, ...]:
    rank = x.ndim if isinstance(x, np.ndarray) else x.rank
    return tuple(range(axis_of(attrs.axis, rank), rank))


def _affine(x: Tensor, scale: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    x = x if scale is None else x * scale
    return x if bias is None else x + bias


def _layer_norm(attrs: LayerNormAttrs, x: Value, *affine: Value) -> Value:
    axes = _axes(attrs, x)
    d = x - mean(x, axis=axes, keepdims=True)
    return _affine(d * rsqrt(mean(d * d, axis=axes, keepdims=True) + attrs.eps), *affine)


def _rms_norm(attrs: RmsNormAttrs, x: Value, *affine: Value) -> Value:
    return _affine(x * rsqrt(mean(x * x, axis=_axes(attrs, x), keepdims=True) + attrs.eps), *affine)


def _layer_norm_array(attrs: LayerNormAttrs, x: np.ndarray, *affine: np.ndarray) -> np.ndarray:
    axes, x = _axes(attrs, x), x.astype(np.float64)
    d = x - np.mean(x, axis=axes, keepdims=True)
    return _affine(d / np.sqrt(np.mean(d * d, axis=axes, keepdims=True) + attrs.eps), *affine)


def _rms_norm_array(attrs: RmsNormAttrs, x: np.ndarray, *affine: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return _affine(x / np.sqrt(np.mean(x * x, axis=_axes(attrs, x), keepdims=True) + attrs.eps), *affine)


layer_norm = op(
    "layer_norm", kind=Kind.COMPOSITE, infer=_norm_shape, attrs=LayerNormAttrs, arity=(1, 3),
    reference=_layer_norm_array, decompose=widened(_layer_norm),
    samples=(
        Sample(((3, 17), (17,), (17,))), Sample(((2, 3, 33), (33,)), {"eps": 1e-12}), Sample(((5, 4),)),
        Sample(((2, 3, 5), (3, 5), (3, 5)), {"axis": 1}), Sample(((0, 4), (4,), (4,))), Sample(((3, 1), (1,), (1,))),
    ),
    doc="Layer normalisation over the dims from `axis` to the last: (x - mean) / sqrt(variance + eps) * scale + bias.",
)  # fmt: skip
rms_norm = op(
    "rms_norm", kind=Kind.COMPOSITE, infer=_norm_shape, attrs=RmsNormAttrs, arity=(1, 2),
    reference=_rms_norm_array, decompose=widened(_rms_norm),
    samples=(
        Sample(((3, 17), (17,))), Sample(((2, 3, 33),), {"eps": 1e-5}), Sample(((2, 3, 5), (3, 5)), {"axis": -2}),
        Sample(((4, 1), (1,))),
    ),
    doc="RMS normalisation over the dims from `axis` to the last: x / sqrt(mean(x²) + eps) * scale.",
)  # fmt: skip


def _group_norm_shape(attrs: GroupNormAttrs, x: Shape, *affine: Shape) -> Shape:
    same_dtype(x, *affine)
    if x.rank < 2:
        raise ShapeError(f"the operand is [batch, channels, …], got {x}")
    if attrs.groups < 1 or divide(x.dims[1], attrs.groups) is None:
        raise AttributeValueError(f"{x.dims[1]} channels cannot form {attrs.groups} equal groups")
    for s in affine:
        if s.dims != x.dims[1:2]:
            raise ShapeError(f"scale and bias must be [{x.dims[1]}], got {s}")
    return x


def _group_norm(attrs: GroupNormAttrs, x: Value, *affine: Value) -> Value:
    dims = x.shape.static
    grouped = x.reshape((dims[0], attrs.groups, math.prod(dims[1:]) // attrs.groups))
    d = grouped - mean(grouped, axis=-1, keepdims=True)
    out = (d * rsqrt(mean(d * d, axis=-1, keepdims=True) + attrs.eps)).reshape(dims)
    return _affine(out, *(v.reshape((dims[1],) + (1,) * (len(dims) - 2)) for v in affine))


def _group_norm_array(attrs: GroupNormAttrs, x: np.ndarray, *affine: np.ndarray) -> np.ndarray:
    parts = [_layer_norm_array(LayerNormAttrs(1, attrs.eps), part) for part in np.split(x, attrs.groups, axis=1)]
    return _affine(np.concatenate(parts, axis=1), *(v.reshape((-1,) + (1,) * (x.ndim - 2)) for v in affine))


group_norm = op(
    "group_norm", kind=Kind.COMPOSITE, infer=_group_norm_shape, attrs=GroupNormAttrs, arity=(1, 3), reference=_group_norm_array,
    decompose=widened(_group_norm),
    samples=(
        Sample(((2, 6, 5), (6,), (6,)), {"groups": 3}), Sample(((2, 4, 3, 3), (4,)), {"groups": 2}),
        Sample(((3, 4),), {"groups": 1}), Sample(((2, 3, 17), (3,), (3,)), {"groups": 3}),
    ),
    doc="Group normalisation of x [batch, channels, …] over each group of channels and all later dims; scale and bias are per "
    "channel.",
)  # fmt: skip


def _batch_norm_shape(attrs: BatchNormAttrs, x: Shape, scale: Shape, bias: Shape, mean: Shape, variance: Shape) -> Shape:
    same_dtype(x, *(params := (scale, bias, mean, variance)))
    axis = axis_of(attrs.axis, x.rank)
    for s in params:
        if s.dims != x.dims[axis : axis + 1]:
            raise ShapeError(f"scale, bias, mean and variance must be [{x.dims[axis]}], got {s}")
    return x


def _batch_norm(attrs: BatchNormAttrs, x: Value, scale: Value, bias: Value, mean: Value, variance: Value) -> Value:
    dims = (-1, *(1 for _ in x.dims[axis_of(attrs.axis, x.rank) + 1 :]))
    return (x - mean.reshape(dims)) * (scale * rsqrt(variance + attrs.eps)).reshape(dims) + bias.reshape(dims)


def _batch_norm_array(attrs: BatchNormAttrs, x: np.ndarray, *params: np.ndarray) -> np.ndarray:
    dims = (-1, *(1 for _ in x.shape[axis_of(attrs.axis, x.ndim) + 1 :]))
    scale, bias, mean, variance = (v.astype(np.float64).reshape(dims) for v in params)
    return (x - mean) / np.sqrt(variance + attrs.eps) * scale + bias


batch_norm = op(
    "batch_norm", kind=Kind.COMPOSITE, infer=_batch_norm_shape, attrs=BatchNormAttrs, arity=(5, 5), reference=_batch_norm_array,
    decompose=widened(_batch_norm),
    samples=(
        Sample(((2, 6, 5), (6,), (6,), (6,), (6,)), low=0.1), Sample(((2, 3, 4, 17), *((17,),) * 4), {"axis": -1}, low=0.1),
        Sample(((3, 33), *((33,),) * 4), {"eps": 0.1}, low=0.0), Sample(((0, 2, 3), *((2,),) * 4), low=0.1),
    ),
    doc="Batch normalisation with known statistics, each [x.dims[axis]]: (x - mean) / sqrt(variance + eps) * scale + bias.",
)  # fmt: skip
