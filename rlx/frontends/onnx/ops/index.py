"""Elements by index: gathers, scatters, masks, and rows of sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops import blocks
from rlx.frontends.onnx.ops.shape import counted, known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.dtype import i64
from rlx.ir.node import Value


@handler("Where", since=9)
def where(n: Call) -> Value:
    return ops.where(n.value(0), n.value(1), n.value(2))


@handler("Gather")
def gather(n: Call) -> Value:
    axis = n.axis(0)
    ids = counted(n.value(1), known_dim(n, 0, axis))
    rows = None if axis else blocks.rows_of(n, n.value(0), ids)
    return ops.gather(n.value(0), ids, axis=axis) if rows is None else rows


@handler("GatherElements", since=11)
def gather_elements(n: Call) -> Value:
    axis = n.axis(0)
    return ops.gather_elements(n.value(0), counted(n.value(1), known_dim(n, 0, axis)), axis=axis)


def _tuples(n: Call, batch: int = 0) -> Value:
    """Index tuples in the dims of operand 0 behind the first `batch`."""
    sizes = [known_dim(n, 0, batch + i) for i in range(known_dim(n, 1, n.rank(1) - 1))]
    return counted(n.value(1).astype(i64), np.array(sizes, np.int64))


@handler("GatherND", since=11)
def gather_nd(n: Call) -> Value:
    batch = n.attr("batch_dims", 0)
    return functions.gather_nd(n.value(0), _tuples(n, batch), batch_dims=batch)


_MODES = {"none": "replace", "add": "add", "mul": "mul", "max": "max", "min": "min"}


def _mode(n: Call) -> Any:
    how = n.attr("reduction", "none")
    return _MODES[how] if how in _MODES else n.refuse(f"reduction {how!r} is none of {', '.join(_MODES)}")


@handler("Scatter", "ScatterElements", since=9)
def scatter_elements(n: Call) -> Value:
    axis = n.axis(0)
    indices = counted(n.value(1), known_dim(n, 0, axis))
    return ops.scatter_elements(n.value(0), indices, n.value(2), axis=axis, mode=_mode(n))


@handler("ScatterND", since=11)
def scatter_nd(n: Call) -> Value:
    return functions.scatter_nd(n.value(0), _tuples(n), n.value(2), mode=_mode(n))


@handler("ReverseSequence", since=10)
def reverse_sequence(n: Call) -> Value:
    time, batch = n.axis(0, name="time_axis"), n.axis(1, name="batch_axis")
    return functions.reverse_sequence(n.value(0), n.value(1), axis=time, batch_axis=batch)


@handler("TensorScatter", since=24)
def tensor_scatter(n: Call) -> Value:
    """Rows of a cache replaced from a position on; `circular`: past the end, from the start."""
    return written(n.value(0), n.value(1), n.maybe(2), n.axis(-2), n.attr("mode", "linear") == "circular")


def written(past: Value, rows: Value, start: Value | None, axis: int, circular: bool = False) -> Value:
    """`past` with rows from the position `start` [batch] of each entry of the batch on, along the axis."""
    size = past.shape.static[axis]
    offset = ops.iota(dims=tuple(size if i == axis else 1 for i in range(past.rank)), axis=axis)
    offset = offset if start is None else offset - start.reshape((-1,) + (1,) * (past.rank - 1))
    offset = ops.mod(offset, size) if circular else offset
    inside = ops.logical_and(ops.less_equal(0, offset), ops.less(offset, rows.shape.static[axis]))
    at = ops.broadcast_to(ops.where(inside, offset, 0), dims=past.dims)
    return ops.where(inside, ops.gather_elements(rows, at, axis=axis), past)


# -- results whose size depends on data: as many as there can be, and the number of those that are ------------------------


@handler("NonZero", since=9)
def nonzero(n: Call) -> Value:
    x = n.inputs[0]
    if isinstance(x, np.ndarray):
        return functions.nonzero(n.value(0), size=int(np.count_nonzero(x)))[0]
    places, count = functions.nonzero(n.value(0))
    return n.bounded(places, 1, count)


@handler("Compress", since=9)
def compress(n: Call) -> Value:
    """Without an axis, of the elements in row-major order."""
    x, condition, axis = n.value(0), n.inputs[1], n.attr("axis", None)
    axis = None if axis is None else n.axis()
    if isinstance(condition, np.ndarray):
        return ops.gather(x.reshape((-1,)) if axis is None else x, np.flatnonzero(condition), axis=axis or 0)
    rows, count = functions.compress(x, n.value(1), axis=axis)
    return n.bounded(rows, axis or 0, count)


@handler("NonMaxSuppression", since=10)
def non_max_suppression(n: Call) -> Any:
    """Rows of (image, class, box). Boxes are two corners, or with `center_point_box` a centre and a size."""
    boxes, (most, overlap, least) = n.value(0), (float(np.asarray(n.known(i, d)).reshape(())) for i, d in _LIMITS)
    if n.attr("center_point_box", 0):
        centre, half = boxes[..., :2], boxes[..., 2:] * 0.5
        boxes = ops.concat(centre - half, centre + half, axis=-1)
    most = max(0, min(int(most), known_dim(n, 0, 1)))
    rows, count = functions.best_boxes(boxes, n.value(1), most=most, overlap=overlap, least=least)
    return n.bounded(rows, 0, count)


_LIMITS = ((2, 0), (3, 0.0), (4, -math.inf))  # operands of NonMaxSuppression, and their defaults


@handler("Unique", since=11)
def unique(n: Call) -> tuple[Value, ...]:
    """The different elements or slices, their first places, the place of each element among them, and how often each occurs."""
    x, axis = n.inputs[0], None if n.attr("axis", None) is None else n.axis()
    known = isinstance(x, np.ndarray)
    size = np.unique(x, axis=axis).shape[axis or 0] if known else None  # type: ignore[arg-type]
    values, first, inverse, counts, count = functions.unique(n.value(0), axis=axis, sorted=bool(n.attr("sorted", 1)), size=size)
    if known:
        return values, first, inverse, counts
    return n.bounded(values, axis or 0, count), n.bounded(first, 0, count), inverse, n.bounded(counts, 0, count)
