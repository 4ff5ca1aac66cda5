"""Ops rewritten as others that suit the GPU: softmax down long columns, top-k of long rows, attention with narrow queries."""

from __future__ import annotations

import math

import rlx.ir.ops as ops
from rlx.backends.cuda.attention import FEW_ROWS, NARROW
from rlx.backends.cuda.schedule import CLUSTER, COLUMN_BYTES, MORE_REGISTERS, PART_THREADS, PART_WARPS, PARTS, REGISTERS
from rlx.backends.cuda.strips import keeps
from rlx.ir.dtype import DType, f32, i64
from rlx.ir.graph import Node, Value
from rlx.ir.ops.attention import by_products
from rlx.ir.ops.rules import axis_of
from rlx.ir.ops.view import transposed_axes

LONG, LARGE = 1 << 16, 1 << 22  # elements from which a softmax of columns that no kernel keeps, or one may, is divided
SHORT = CLUSTER * PART_WARPS * REGISTERS  # rows that a cluster of blocks keeps
LONGEST, PART = PARTS[-1] * PART_THREADS * MORE_REGISTERS, 8192  # elements of a row that blocks keep; of a part of a longer one
NEAR = 128  # rows of a part of columns: those that a multiprocessor works on stay in its cache
WHOLE, SELECTED = 4 << 20, 1 << 18  # bytes of keys of a row of which one sample is taken; elements of a part of a longer one
MOST_KEPT = 1024  # elements that such a row keeps, at most


def softmax(strips: int, node: Node) -> Value | None:
    """Down columns that no kernel keeps: a kernel for the maximum and the sum of each part of a column, one that combines the
    parts, and one for the result, which computes its exponentials again rather than read them. `strips`: bytes of a block that
    may keep a strip of columns, 0 without clusters."""
    (x,), axis = node.inputs, axis_of(node.attrs.axis, node.inputs[0].rank)  # type: ignore[union-attr]
    dims = x.shape.static
    outer, length, inner = math.prod(dims[:axis]), dims[axis], math.prod(dims[axis + 1 :])
    # more blocks than a cluster wait for each other so long that to read whole rows twice is faster
    kept = length * x.dtype.compute.itemsize <= COLUMN_BYTES and (length <= SHORT or math.prod(dims) < LARGE)
    if inner == 1 and length > LONGEST:
        return _of_long_rows(x, outer, length, node.op.name == "log_softmax")
    kept |= keeps(outer, length, inner, x.dtype.itemsize, strips)
    if inner == 1 or kept or math.prod(dims) < LONG:
        return None
    size = next((n for n in range(NEAR, NEAR // 4, -1) if length % n == 0), length)
    rows = ops.transpose(x.reshape(outer, length // size, size, inner), (0, 1, 3, 2))
    most, total = _softened(ops.cast(rows, dtype=x.dtype.compute))
    if size < length:
        parts, weights = (ops.transpose(v, (0, 2, 1, 3)).reshape(outer, inner, length // size) for v in (most, total))
        most, total = _softened(parts, weights)
    log = node.op.name == "log_softmax"
    most, scale = (v.reshape(*dims[:axis], 1, *dims[axis + 1 :]) for v in (most, ops.log(total) if log else 1.0 / total))
    return _result(x, most, scale, log)


def _result(x: Value, most: Value, scale: Value, log: bool) -> Value:
    centred = ops.cast(x, dtype=x.dtype.compute) - most
    return ops.cast(centred - scale if log else ops.exp(centred) * scale, dtype=x.dtype)


def _of_long_rows(x: Value, outer: int, length: int, log: bool) -> Value:
    """The same along rows that no kernel keeps. The last part is padded."""
    parts = -(-length // PART)
    rows = x.reshape(outer, length)
    if length % PART:
        rows = ops.pad(rows, low=(0, 0), high=(0, parts * PART - length), value=-math.inf)
    most, total = _softened(ops.cast(rows.reshape(outer, parts, PART), dtype=x.dtype.compute))
    most, total = _softened(most.reshape(outer, parts), total.reshape(outer, parts))
    most, scale = (v.reshape(*x.shape.static[:-1], 1) for v in (most, ops.log(total) if log else 1.0 / total))
    return _result(x, most, scale, log)


def _softened(rows: Value, weights: Value | float = 1.0) -> tuple[Value, Value]:
    """The maximum of each row and the sum of weights * exp(x - maximum). A part of only -inf adds 0."""
    most = ops.max(rows, axis=(-1,), keepdims=True)
    base = ops.where(most == -math.inf, 0.0, most)
    return most, ops.sum(ops.exp(rows - base) * weights, axis=(-1,), keepdims=True)


def top_k(node: Node) -> tuple[Value, ...] | None:
    """The top k of the top k of a row's parts and of the few elements behind them, since a sample of all would be large, or
    leave too many elements to sort. None: the row is shorter."""
    (x,), k, largest = node.inputs, node.attrs.k, node.attrs.largest  # type: ignore[union-attr]
    *outer, length = x.shape.static
    if length * max(4, x.dtype.compute.itemsize) <= WHOLE or not 0 < k <= MOST_KEPT or 0 in outer:
        return None
    rows, parts = math.prod(outer), -(-length // SELECTED)
    size = length // (8 * parts) * 8  # for vectors
    whole, x = parts * size, x.reshape(rows, length)
    values, places = ops.top_k(x[:, :whole].reshape(rows, parts, size), k=k, largest=largest)
    places = places + ops.iota((parts, 1), axis=0, dtype=i64) * size
    rest = ops.iota((rows, length - whole), axis=1, dtype=i64) + whole
    values, places = (
        ops.concat(v.reshape(rows, parts * k), last, axis=1) if length > whole else v.reshape(rows, parts * k)
        for v, last in ((values, x[:, whole:]), (places, rest))
    )
    best, chosen = ops.top_k(values, k=k, largest=largest)
    at = chosen + ops.iota((rows, 1), axis=0, dtype=i64) * places.shape.static[1]
    return best.reshape(*outer, k), ops.gather(places.reshape(-1), at).reshape(*outer, k)


def attention(node: Node) -> Value | None:
    """Many f32 queries are rounded to the dtype of narrower keys and values, which is that of the tensor cores."""
    q, k, v = node.inputs[:3]
    rows = q.shape.static[1] // max(1, k.shape.static[1]) * q.shape.static[2]
    if q.dtype != f32 or k.dtype != v.dtype or k.dtype.name not in NARROW or rows <= FEW_ROWS:
        return None
    inputs = (_rounded(q, k.dtype), *node.inputs[1:])
    shapes = node.op.result_shapes(node.attrs, tuple(x.shape for x in inputs))
    return Node(node.op, inputs, node.attrs, shapes).results[0].astype(f32)


def large_heads(node: Node) -> Value | None:
    """Attention with more elements of a head than a kernel takes: products that read narrow keys and values as they are."""
    q, k, v = node.inputs[:3]
    narrow = q.dtype in (f32, k.dtype) and k.dtype == v.dtype and k.dtype.name in NARROW
    return by_products(node, _of_narrow) if narrow and 0 not in (*q.dims, *k.dims, *v.dims) else None


def _of_narrow(rows: Value, columns: Value) -> Value:
    """The product in f32, on tensor cores. Few rows of f32 are the sums of two narrow numbers; many are rounded."""
    dtype, count = columns.dtype, rows.shape.static[-2]
    if rows.dtype == dtype or count > FEW_ROWS:
        return ops.matmul(_rounded(rows, dtype), columns).astype(f32)
    high = rows.astype(dtype)
    low = (rows - high.astype(f32)).astype(dtype)
    both = ops.matmul(ops.concat([high, low], axis=-2), columns).astype(f32)
    return both[..., :count, :] + both[..., count:, :]


def _rounded(value: Value, dtype: DType) -> Value:
    """The value in that dtype, rounded in front of a view, by the kernel that computes its operand."""
    if value.node.op.name == "reshape":
        return _rounded(value.node.inputs[0], dtype).reshape(value.dims)
    if value.node.op.name != "transpose":
        return value.astype(dtype)
    axes = transposed_axes(value.node)
    back = [axes.index(a) for a in range(value.rank)]
    return value.transpose(*back).astype(dtype).transpose(*axes)


__all__ = ["attention", "large_heads", "softmax", "top_k"]
