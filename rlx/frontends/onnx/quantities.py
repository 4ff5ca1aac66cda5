"""Quantised tensors: integers with scales and zero points, and their products in exact integer arithmetic.

A product of 8-bit integers is computed as u8 by i8 in i32, which backends have instructions for: i8 on the left and u8 on the
right are shifted by 128 with their zero points. Zero points enter by sums of rows and columns, after the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from rlx.frontends.onnx.call import Call, Refused
from rlx.frontends.onnx.ops.shape import padded
from rlx.ir import functions, ops
from rlx.ir.dtype import DType, f32, i8, i32, u8
from rlx.ir.node import Value
from rlx.ir.op import OPS

MOST_PRODUCT = 255 * 255  # of two bytes without their zero points
SAME = 2.0**-22  # part by which two scales may differ that were rounded in different ways
_TRANSPOSE = OPS["transpose"]
_convolved: Callable[..., Value] = ops.conv  # the bias may be left out


class Quantity(NamedTuple):
    """(integers - zero) * scale. Scale and zero point (None: 0) have no dims, or one along `axis`, or with a `block` all dims,
    for so many indices of `axis` each."""

    integers: Value
    scale: Value
    zero: Value | None = None
    axis: int = 0
    block: int = 0


def spread(v: Value, x: Value, axis: int, block: int = 0) -> Value:
    """A scale or zero point with dims that broadcast to x: one for all, one per index of `axis`, or per `block` of them."""
    if block:
        size, count = x.shape.static[axis], v.shape.static[axis]
        if count != -(-size // block):
            raise Refused(f"dim {axis} of {size} elements has {-(-size // block)} blocks of {block}, got scales of {count}")
        wide = functions.repeat(v, block, axis)
        return wide if wide.dims[axis] == size else wide[(slice(None),) * axis + (slice(0, size),)]
    if v.rank == 0 or v.dims == (1,):
        return v.reshape(())
    return v.reshape(tuple(-1 if i == axis else 1 for i in range(x.rank)))


def is_zero(n: Call, zero: Value | None) -> bool:
    """True if a zero point is known to be 0."""
    found = None if zero is None else n.scope.contents(zero)
    return zero is None or (found is not None and not np.asarray(found).any())


def _left(x: Value, zero: Value | None) -> tuple[Value, Any]:
    """u8, from u8 or i8, and the zero point in i32."""
    wide = None if zero is None else zero.astype(i32)
    if x.dtype != i8:
        return x, wide
    return ops.bitwise_xor(ops.bitcast(x, dtype=u8), 128), 128 if wide is None else wide + 128


def _right(w: Value, zero: Value | None) -> tuple[Value, Any]:
    """i8, from u8 or i8, and the zero point in i32."""
    wide = None if zero is None else zero.astype(i32)
    if w.dtype != u8:
        return w, wide
    return ops.bitcast(ops.bitwise_xor(w, 128), dtype=i8), -128 if wide is None else wide - 128


def _bytes(*values: Value) -> bool:
    return all(v.dtype in (u8, i8) for v in values)


def _centred(x: Value, zero: Value | None) -> Value:
    return x.astype(i32) if zero is None else x.astype(i32) - zero.astype(i32)


def _absent(n: Call, zero: Any) -> bool:
    return zero is None or (isinstance(zero, Value) and is_zero(n, zero))


def _each(zero: Any, dims: tuple[int, ...], dtype: DType = i32) -> Any:
    """A zero point with these dims, if it has any; a number as it is."""
    if not isinstance(zero, Value):
        return zero
    return (zero.reshape(dims) if zero.rank else zero).astype(dtype)


def matmul(n: Call, a: Value, b: Value, a_zero: Value | None = None, b_zero: Value | None = None) -> Value:
    """The sums of (a - a_zero) * (b - b_zero), i32. Zero points broadcast: to rows of a, to columns of b."""
    if not _bytes(a, b):
        return ops.matmul(_centred(a, a_zero), _centred(b, b_zero))
    (a, za), (b, zb) = _left(a, a_zero), _right(b, b_zero)
    out, depth = ops.int8_matmul(a, b), b.dims[-2]
    if not _absent(n, za):
        out = out - ops.sum(b.astype(i32), axis=-2, keepdims=True) * za
    if not _absent(n, zb):
        rows = ops.sum(a.astype(i32), axis=-1, keepdims=True)
        out = out - (rows if _absent(n, za) else rows - depth * za) * zb
    return out


def conv(
    n: Call, x: Value, w: Value, x_zero: Value | None, w_zero: Value | None, groups: int, facts: dict[str, Any],
    bias: Value | None = None,
) -> Value:  # fmt: skip
    """The sums of (x - x_zero) * (w - w_zero), i32; padding is x_zero. `w_zero`: without dims, or per output channel, as `bias`,
    i32, is."""
    per_channel = tuple(-1 if i == 0 else 1 for i in range(w.rank - 1))
    bias = None if bias is None else bias.reshape(per_channel)
    if not _bytes(x, w):
        w_zero = w_zero if w_zero is None or w_zero.rank == 0 else w_zero.reshape((*per_channel, 1))
        out = _convolved(_centred(x, x_zero), _centred(w, w_zero), groups=groups, **facts)
        return out if bias is None else out + bias
    (x, zx), (w, zw) = _left(x, x_zero), _right(w, w_zero)
    zw = _each(zw, per_channel)
    if any((*facts["low"], *facts["high"])) and not _absent(n, zx):
        known = n.scope.contents(zx) if isinstance(zx, Value) else zx
        around = int(np.asarray(known).item()) if known is not None else _each(zx, (), u8)
        x = padded(n, x, [0, 0, *facts["low"]], [0, 0, *facts["high"]], "constant", around)
        facts = facts | {"low": (0,), "high": (0,)}
    out = _convolved(x, w, groups=groups, **facts)
    if not _absent(n, zx):
        ahead = ops.sum(w.astype(i32), axis=tuple(range(1, w.rank))).reshape(per_channel) * zx
        out = out - ahead if bias is None else out + (bias - ahead)
    elif bias is not None:
        out = out + bias
    if not _absent(n, zw):
        ones = functions.full((groups, *w.dims[1:]), 1, i8)
        total = functions.repeat(_convolved(x, ones, groups=groups, **facts), w.shape.static[0] // groups, 1)
        depth = int(np.prod(w.shape.static[1:]))
        out = out - (total if _absent(n, zx) else total - depth * zx) * zw
    return out


# -- products of tensors that DequantizeLinear made ----------------------------------------------------------------------


def matmul_of(n: Call, x: Value, w: Value, turned: tuple[bool, bool] = (False, False)) -> Value | None:
    """The product of two values on integers, if both were dequantised from 8 bits. `turned`: matrices to be transposed."""
    (x, x_turned), (w, w_turned) = origin(n, x), origin(n, w)
    a, b, turned = _eight(n, x), _eight(n, w), (turned[0] != x_turned, turned[1] != w_turned)
    if a is None or b is None or x.rank < 2 or w.rank < 2:
        return None
    depth = w.dims[-1 if turned[1] else -2]
    if not _fits(depth) or not _one(a) or not (_one(b) or b.axis == (0 if turned[1] else w.rank - 1)):
        return None
    left, right = (q.integers.T if t else q.integers for q, t in zip((a, b), turned))
    sums = matmul(n, left, right, _plain(a.zero, a), _plain(b.zero, b))
    return (sums.astype(f32) * _factor(a, b)).astype(x.dtype)


def conv_of(n: Call, x: Value, w: Value, bias: Value | None, groups: int, facts: dict[str, Any]) -> Value | None:
    """The convolution of two values on integers, if both were dequantised from 8 bits. A bias that was dequantised with the scale
    of the sums is added to them."""
    a, b = _eight(n, x), _eight(n, w)
    depth = int(np.prod(w.shape.static[1:]))
    if a is None or b is None or not _fits(depth) or not _one(a) or not (_one(b) or b.axis == 0):
        return None
    per_channel, factor = (-1, *(1,) * (w.rank - 2)), _factor(a, b)
    whole = None if bias is None else _bias(n, bias, factor, depth)
    sums = conv(n, a.integers, b.integers, _plain(a.zero, a), _plain(b.zero, b), groups, facts, whole)
    factor = factor.reshape(per_channel) if factor.rank else factor
    out = (sums.astype(f32) * factor).astype(x.dtype)
    if bias is not None and whole is None:
        return out + bias.reshape(per_channel)
    if x.dtype == f32:
        n.scope.importer.scaled[out] = sums, factor
    return out


def _bias(n: Call, bias: Value, factor: Value, depth: int) -> Value | None:
    """The integers that a bias was dequantised from, if their scale is that of the sums, and they fit beside those."""
    found = n.scope.importer.quantities.get(bias)
    if found is None or found.block or found.integers.dtype != i32 or found.integers.rank != 1 or not is_zero(n, found.zero):
        return None
    integers, scale, scales = (n.scope.contents(v) for v in (found.integers, found.scale, factor))
    if integers is None or scale is None or scales is None:
        return None
    most = int(np.abs(np.asarray(integers, np.int64)).max(initial=0))
    same = np.allclose(scale, scales, rtol=SAME, atol=0)
    return found.integers if same and depth * MOST_PRODUCT + most < 1 << 31 else None


def origin(n: Call, v: Value) -> tuple[Value, bool]:
    """A matrix that was dequantised, and whether `v` is its transpose; else v itself."""
    turned = False
    while v.rank == 2 and v.node.op is _TRANSPOSE and v not in n.scope.importer.quantities:
        v, turned = v.node.inputs[0], turned != (v.node.attrs.axes == (1, 0))  # type: ignore[union-attr]
    return v, turned


def _eight(n: Call, v: Value) -> Quantity | None:
    """The 8-bit integers that a value was dequantised from, with scales that are not by block."""
    found = n.scope.importer.quantities.get(v)
    return found if found is not None and not found.block and _bytes(found.integers) else None


def _fits(depth: Any) -> bool:
    """True if sums of so many products fit 32 bits."""
    return isinstance(depth, int) and depth < 1 << 16


def _plain(v: Value | None, q: Quantity) -> Value | None:
    """A scale or zero point without dims, if there is one for all."""
    return v.reshape(()) if v is not None and _one(q) else v


def _factor(a: Quantity, b: Quantity) -> Value:
    """The product of the scales, in f32."""
    left, right = _plain(a.scale, a), _plain(b.scale, b)
    return left.astype(f32) * right.astype(f32)  # type: ignore[union-attr]


def _one(q: Quantity) -> bool:
    """True if there is one scale for all."""
    return q.scale.rank == 0 or q.scale.dims == (1,)


# -- between floats and integers -----------------------------------------------------------------------------------------


def quantised(x: Value, scale: Value, zero: Value | None, low: int, high: int, dtype: DType) -> Value:
    """round(x / scale) + zero, in low..high; ties to even."""
    return to_integers(x / scale, zero, low, high, dtype)


def to_integers(x: Value, zero: Value | None, low: int, high: int, dtype: DType) -> Value:
    out = ops.round(x).astype(f32) if x.dtype != f32 else ops.round(x)
    out = out if zero is None else out + zero.astype(f32)
    return ops.clip(out, low=float(low), high=float(high)).astype(dtype)


def requantised(sums: Value, factor: Value, zero: Value | None, dtype: DType | None = None) -> Value:
    """Sums, i32, times a factor, as integers; their dtype is that of the zero point if there is one."""
    dtype = dtype or zero.dtype  # type: ignore[union-attr]
    return to_integers(sums.astype(f32) * factor.astype(f32), zero, *bounds(dtype), dtype)


def bounds(dtype: DType) -> tuple[int, int]:
    found = np.iinfo(dtype.numpy)
    return int(found.min), int(found.max)


def dequantised(q: Quantity) -> Value:
    """The floats, in f32."""
    x = q.integers.astype(f32)
    if q.zero is not None:
        x = x - spread(q.zero, x, q.axis, q.block).astype(f32)
    return x * spread(q.scale, x, q.axis, q.block).astype(f32)
