"""Elements by index: gathers, scatters, masks, and rows of sequences."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import ops
from rlx.ir.dtype import i64
from rlx.ir.node import Value, constant


def counted(indices: Value, size: int) -> Value:
    """Indices, of which those below 0 count from the end."""
    return indices if indices.dtype.kind == "u" else ops.where(ops.less(indices, 0), indices + size, indices)


@handler("Where", since=9)
def where(n: Call) -> Value:
    return ops.where(n.value(0), n.value(1), n.value(2))


@handler("Gather")
def gather(n: Call) -> Value:
    axis = n.axis(0)
    return ops.gather(n.value(0), counted(n.value(1), known_dim(n, 0, axis)), axis=axis)


@handler("GatherElements", since=11)
def gather_elements(n: Call) -> Value:
    axis = n.axis(0)
    return take_along(n.value(0), counted(n.value(1).astype(i64), known_dim(n, 0, axis)), axis)


def take_along(x: Value, indices: Value, axis: int) -> Value:
    """The element of x at each index, with the other coordinates of the index."""
    inner = _strides(x.shape.static)
    at = indices * inner[axis]
    for other, stride in enumerate(inner):
        if other != axis:
            at = at + ops.iota(dims=tuple(d if i == other else 1 for i, d in enumerate(indices.dims)), axis=other) * stride
    return ops.gather(x.reshape((-1,)), at)


def _strides(dims: tuple[int, ...]) -> list[int]:
    return [int(np.prod(dims[i + 1 :], dtype=np.int64)) for i in range(len(dims))]


@handler("GatherND", since=11)
def gather_nd(n: Call) -> Value:
    x, dims, batch = n.value(0), n.sizes(0), n.attr("batch_dims", 0)
    at, depth = _flat(n, n.value(1), dims, batch), known_dim(n, 1, n.rank(1) - 1)
    rest = dims[batch + depth :]
    return ops.gather(x.reshape((-1, *rest)), at)


def _flat(n: Call, indices: Value, dims: tuple[int, ...], batch: int) -> Value:
    """The place of each index tuple among the leading dims of a tensor, in row-major order; the first `batch` of them are those
    of the index tuples."""
    depth = known_dim(n, 1, indices.rank - 1)
    sizes = dims[: batch + depth]
    if len(sizes) < batch + depth:
        n.refuse(f"index tuples of {depth} do not fit {len(dims)} dims, of which {batch} are of the batch")
    inner, parts = _strides(sizes), [indices[..., i].astype(i64) for i in range(depth)]
    at: Any = constant(np.zeros((1,) * (indices.rank - 1), np.int64))
    for axis in range(batch):
        at = at + ops.iota(dims=tuple(d if i == axis else 1 for i, d in enumerate(indices.dims[:-1])), axis=axis) * inner[axis]
    for part, size, stride in zip(parts, sizes[batch:], inner[batch:], strict=True):
        at = at + counted(part, size) * stride
    return ops.broadcast_to(at, dims=indices.dims[:-1])


@handler("ReverseSequence", since=10)
def reverse_sequence(n: Call) -> Value:
    """The first elements of each sequence, as many as its length, in reverse order."""
    x, time, batch = n.value(0), n.attr("time_axis", 0), n.attr("batch_axis", 1)
    time, batch = time % x.rank, batch % x.rank
    lengths = n.value(1).reshape(tuple(-1 if i == batch else 1 for i in range(x.rank)))
    place = ops.iota(dims=tuple(d if i == time else 1 for i, d in enumerate(x.dims)), axis=time)
    at = ops.where(ops.less(place, lengths), lengths - 1 - place, place)
    return take_along(x, ops.broadcast_to(at, dims=x.dims), time)


@handler("TensorScatter", since=24)
def tensor_scatter(n: Call) -> Value:
    """Rows of a cache replaced from a position on; `circular`: past the end, from the start."""
    past, update = n.value(0), n.value(1)
    axis, size, count = n.axis(-2), known_dim(n, 0, n.axis(-2)), known_dim(n, 1, n.axis(-2))
    start: Any = n.value(2).reshape((-1,) + (1,) * (past.rank - 1)) if n.has(2) else 0
    offset = ops.iota(dims=tuple(size if i == axis else 1 for i in range(past.rank)), axis=axis) - start
    if n.attr("mode", "linear") == "circular":
        offset = ops.mod(offset, size)
    inside = ops.logical_and(ops.less_equal(0, offset), ops.less(offset, count))
    at = ops.broadcast_to(ops.where(inside, offset, 0), dims=past.dims)
    return ops.where(inside, take_along(update, at, axis), past)
