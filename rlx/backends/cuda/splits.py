"""Ops as others that suit the GPU: running totals in two steps, the top k of parts, attention with narrow queries."""

from __future__ import annotations

import math

import numpy as np

import rlx.ir.ops as ops
from rlx.backends.cuda.attention import FEW_ROWS, NARROW
from rlx.ir.dtype import DType, as_dtype, f32
from rlx.ir.graph import Node, Value
from rlx.ir.ops.rules import axis_of

LONG = 1 << 16  # elements of a row from which a running total is divided
SORTED = 2048  # elements that a block sorts in shared memory


def cumsum(blocks: int, node: Node) -> Value | None:
    """Each part of the axis starts with the sum of the parts before it; None if lines are short, or enough for all blocks."""
    (x,), dims, axis = node.inputs, node.shapes[0].static, axis_of(node.attrs.axis, node.inputs[0].rank)  # type: ignore[union-attr]
    reverse, exclusive = node.attrs.reverse, node.attrs.exclusive  # type: ignore[union-attr]
    length, lines = dims[axis], math.prod(dims) // max(1, dims[axis])
    wanted = min(-(-4 * blocks // max(1, lines)), length // (LONG // 16))
    parts = next((n for n in range(wanted, 8 * wanted) if length % n == 0), 1)
    if length < LONG or wanted < 2 or parts < 2:
        return None
    own = ops.cast(x, dtype=x.dtype.compute).reshape(*dims[:axis], parts, length // parts, *dims[axis + 1 :])
    before = ops.cumsum(ops.sum(own, axis=(axis + 1,), keepdims=True), axis=axis, exclusive=True, reverse=reverse)
    total = ops.cumsum(own, axis=axis + 1, exclusive=exclusive, reverse=reverse) + before
    return ops.cast(total.reshape(*dims), dtype=x.dtype)


def top_k(node: Node) -> tuple[Value, ...] | None:
    """The top k of the top k of parts that a block sorts in shared memory; None if a row is such a part."""
    (x,), k, largest = node.inputs, node.attrs.k, node.attrs.largest  # type: ignore[union-attr]
    *outer, length = x.shape.static
    if length <= SORTED or not 0 < k <= SORTED // 4 or 0 in outer:
        return None
    rows, parts = math.prod(outer), -(-length // SORTED)
    wide = ops.pad(x.reshape(rows, length), low=(0, 0), high=(0, parts * SORTED - length), value=_last(x.dtype, largest))
    values, places = ops.top_k(wide.reshape(rows, parts, SORTED), k=k, largest=largest)
    places = places + ops.iota((parts, 1), axis=0, dtype=as_dtype("i64")) * SORTED
    best, chosen = ops.top_k(values.reshape(rows, parts * k), k=k, largest=largest)
    at = chosen + ops.iota((rows, 1), axis=0, dtype=as_dtype("i64")) * (parts * k)
    return best.reshape(*outer, k), ops.gather(places.reshape(rows * parts * k), at).reshape(*outer, k)


def attention(node: Node) -> Value | None:
    """Many f32 queries are rounded to the dtype of narrower keys and values, which is that of the tensor cores."""
    q, k, v = node.inputs[:3]
    rows = q.shape.static[1] // max(1, k.shape.static[1]) * q.shape.static[2]
    if q.dtype != f32 or k.dtype != v.dtype or k.dtype.name not in NARROW or rows <= FEW_ROWS:
        return None
    inputs = (_rounded(q, k.dtype), *node.inputs[1:])
    shapes = node.op.result_shapes(node.attrs, tuple(x.shape for x in inputs))
    return Node(node.op, inputs, node.attrs, shapes).results[0].astype(f32)


def _rounded(value: Value, dtype: DType) -> Value:
    """The value in that dtype, rounded in front of a transposition, by the kernel that computes its operand."""
    if value.node.op.name != "transpose":
        return value.astype(dtype)
    axes = [a % value.rank for a in value.node.attrs.axes]  # type: ignore[union-attr]
    back = [axes.index(a) for a in range(value.rank)]
    return value.transpose(*back).astype(dtype).transpose(*axes)


def _last(dtype: DType, largest: bool) -> float | int:
    """A value that no element sorts behind, except equal ones before it."""
    if dtype.is_float:
        return -math.inf if largest else math.nan
    info = np.iinfo(dtype.numpy)
    return int(info.min if largest else info.max)


__all__ = ["attention", "cumsum", "top_k"]
