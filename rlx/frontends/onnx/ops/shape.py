"""Shapes and layout: views, joins, parts, padding, and tensors that depend on shapes alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.frontends.onnx.call import Call, Operand
from rlx.frontends.onnx.ops.elementwise import dtype_of
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.dtype import as_dtype
from rlx.ir.node import Value, constant
from rlx.ir.shape import DimLike, broadcast_dims

# -- sizes, and tensors made of them -----------------------------------------------------------------------------------


@handler("Shape")
def shape(n: Call) -> np.ndarray:
    """`start` and `end`, from opset 15 on, choose dims."""
    chosen = range(n.rank(0))[n.attr("start", 0) : n.attr("end", None)]
    return np.array([known_dim(n, 0, i) for i in chosen], np.int64)


@handler("Size")
def size(n: Call) -> np.ndarray:
    return np.array(math.prod(n.sizes(0)), np.int64)


def known_dim(n: Call, i: int, axis: int) -> int:
    """Dim `axis` of operand i, which must be an integer."""
    dim = n.dims(i)[axis]
    return dim if isinstance(dim, int) else n.refuse(f"dim {dim} of operand {i} must be known: give its size at import")


def counted(indices: Value, sizes: Any) -> Value:
    """Indices, of which those below 0 count from the end; `sizes` broadcasts."""
    return indices if indices.dtype.kind == "u" else ops.where(ops.less(indices, 0), indices + sizes, indices)


@handler("Constant")
def constant_(n: Call) -> np.ndarray:
    for name, dtype in (("value", None), ("value_float", np.float32), ("value_floats", np.float32), ("value_int", np.int64),
                        ("value_ints", np.int64)):  # fmt: skip
        if (found := n.attr(name, None)) is not None:
            return np.asarray(found, dtype)
    n.refuse(f"the constant is in none of the supported attributes, it has {', '.join(n.attrs) or 'none'}")


@handler("ConstantOfShape")
def constant_of_shape(n: Call) -> Value:
    value = n.attr("value", np.zeros(1, np.float32))
    return ops.broadcast_to(constant(value.reshape(())), dims=n.ints(0))


@handler("EyeLike")
def eye_like(n: Call) -> np.ndarray:
    dtype = dtype_of(n, n.attr("dtype")) if "dtype" in n.attrs else n.dtype(0)
    n.check_size(math.prod(n.sizes(0)))
    return np.eye(*n.sizes(0), k=n.attr("k", 0)).astype(dtype.numpy)


@handler("Range")
def range_(n: Call) -> np.ndarray:
    start, limit, step = (np.asarray(n.known(i)).reshape(()) for i in range(3))
    if not step:
        n.refuse("its step is 0")
    wide = np.float64 if as_dtype(start.dtype).is_float else np.int64
    count = max(0, math.ceil((limit.astype(wide) - start.astype(wide)) / step.astype(wide)))
    n.check_size(count)
    return (start.astype(wide) + np.arange(count, dtype=wide) * step.astype(wide)).astype(start.dtype)


@handler("OneHot")
def one_hot(n: Call) -> Value:
    """Indices below 0 count from the end; rows of indices out of range have no hot element."""
    depth, values = int(np.asarray(n.known(1)).reshape(())), n.value(2)
    axis = n.axis(-1, rank=n.rank(0) + 1)
    indices = n.value(0).astype("i64")
    indices = ops.where(ops.less(indices, 0), indices + depth, indices)
    return functions.one_hot(indices, depth, axis=axis, on=values[1], off=values[0])


@handler("Trilu")
def trilu(n: Call) -> Value:
    x, k = n.value(0), n.value(1).reshape(()) if n.has(1) else 0
    row, column = (ops.iota(dims=x.dims[-2:], axis=axis) for axis in (0, 1))
    distance = column - row
    kept = ops.less_equal(k, distance) if n.attr("upper", 1) else ops.less_equal(distance, k)
    return ops.where(kept, x, constant(0, x.dtype))


# -- views -------------------------------------------------------------------------------------------------------------


@handler("Identity")
def identity(n: Call) -> Operand:
    return n.inputs[0]


@handler("Reshape", since=5)
def reshape(n: Call) -> Value:
    """A dim of 0 is copied from the operand, unless `allowzero`."""
    dims: list[DimLike] = list(n.ints(1))
    if not n.attr("allowzero", 0):
        dims = [n.dims(0)[i] if d == 0 else d for i, d in enumerate(dims)]
    if -1 in dims and 0 in n.dims(0):  # -1 of no elements is not determined by their number
        dims[dims.index(-1)] = 0
    return n.value(0).reshape(tuple(dims))


@handler("Flatten")
def flatten(n: Call) -> Value:
    dims = n.dims(0)
    axis = n.attr("axis", 1)
    axis = axis + len(dims) if axis < 0 else axis
    return n.value(0).reshape((elements(dims[:axis]), elements(dims[axis:])))


def elements(dims: tuple[DimLike, ...]) -> DimLike:
    """The product of dims, which may be named."""
    out: DimLike = 1
    for d in dims:
        out = out * d
    return out


@handler("Transpose")
def transpose(n: Call) -> Value:
    return ops.transpose(n.value(0), axes=n.attr("perm", tuple(reversed(range(n.rank(0))))))


@handler("Squeeze")
def squeeze(n: Call) -> Value:
    """Axes are an operand from opset 13 on."""
    axes = n.ints(1, "axes", tuple(i for i, d in enumerate(n.dims(0)) if d == 1))
    return ops.squeeze(n.value(0), axes=axes) if axes else n.value(0)


@handler("Unsqueeze")
def unsqueeze(n: Call) -> Value:
    axes = n.ints(1, "axes", ())
    return ops.unsqueeze(n.value(0), axes=axes) if axes else n.value(0)


@handler("Expand")
def expand(n: Call) -> Value:
    return ops.broadcast_to(n.value(0), dims=broadcast_dims(n.dims(0), n.ints(1)))


@handler("Tile", since=6)
def tile(n: Call) -> Value:
    return functions.tile(n.value(0), n.ints(1))


@handler("Slice")
def slice_(n: Call) -> Value:
    """Bounds are operands from opset 10 on. They are clamped as Python's are, but a start before the first element is the first
    also for steps below 0."""
    x, starts, ends = n.value(0), n.ints(1, "starts"), n.ints(2, "ends")
    axes, steps = n.ints(3, "axes", range(len(starts))), n.ints(4, None, (1,) * len(starts))
    parts = [slice(None)] * x.rank
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step < 0 and isinstance(size := x.dims[axis], int):
            start = max(start, -size)
        past = end >= _FAR if step > 0 else end <= -_FAR
        parts[axis] = slice(None if start == 0 and step > 0 else start, None if past else end, step)
    return x[tuple(parts)]


_FAR = 2**31 - 1  # exporters write an end past every dim as the greatest i32 or i64


@handler("Split")
def split(n: Call) -> tuple[Value, ...]:
    """Into parts of given sizes, else as many parts as the node has outputs: the last one may be smaller."""
    axis, count = n.axis(0), n.attr("num_outputs", len(n.outputs))
    parts = n.ints(1, "split")
    if parts is None:
        total = known_dim(n, 0, axis)
        each = -(-total // count)
        parts = tuple(min(each, max(0, total - i * each)) for i in range(count))
    return ops.split(n.value(0), parts=parts, axis=axis)


@handler("Concat")
def concat(n: Call) -> Value:
    return ops.concat(*n.values(), axis=n.axis())


@handler("DepthToSpace")
def depth_to_space(n: Call) -> Value:
    order: Any = n.attr("mode", "DCR").lower()
    return functions.depth_to_space(n.value(0), n.attr("blocksize"), order=order)


@handler("SpaceToDepth")
def space_to_depth(n: Call) -> Value:
    """`mode`, from opset 28 on, is that of DepthToSpace."""
    order: Any = n.attr("mode", "DCR").lower()
    return functions.space_to_depth(n.value(0), n.attr("blocksize"), order=order)


# -- padding -----------------------------------------------------------------------------------------------------------


@handler("Pad")
def pad(n: Call) -> Value:
    """Amounts are an attribute before opset 11; from 18 on they may be for some axes. Below 0 they cut."""
    amounts, mode, rank = n.ints(1, "pads"), n.attr("mode", "constant"), n.rank(0)
    axes = [a % rank for a in n.ints(3, None, range(rank))]
    if len(amounts) != 2 * len(axes):
        n.refuse(f"{len(axes)} axes take {2 * len(axes)} amounts, got {len(amounts)}")
    low, high = [0] * rank, [0] * rank
    for i, axis in enumerate(axes):
        low[axis], high[axis] = amounts[i], amounts[len(axes) + i]
    return padded(n, n.value(0), low, high, mode, n.maybe(2) if n.opset >= 11 else n.attr("value", 0.0))


def padded(n: Call, x: Value, low: list[int], high: list[int], mode: str, value: Any = None) -> Value:
    """x with elements before and after each dim, by ONNX's mode; amounts below 0 cut."""
    x = x[tuple(slice(max(0, -a), None if b >= 0 else b) for a, b in zip(low, high))]
    before, after = [max(0, a) for a in low], [max(0, b) for b in high]
    if mode == "constant":
        if not isinstance(value, Value):
            return ops.pad(x, low=before, high=after, value=value or 0)
        inside = ops.pad(ops.broadcast_to(constant(True), dims=x.dims), low=before, high=after)
        return ops.where(inside, ops.pad(x, low=before, high=after), value.reshape(()))
    if mode not in ("reflect", "edge", "wrap"):
        n.refuse(f"mode {mode!r} is not constant, reflect, edge or wrap")
    for axis, (a, b) in enumerate(zip(before, after)):
        if a or b:
            size = x.dims[axis]
            if not isinstance(size, int) or not size:
                n.refuse(f"mode {mode!r} pads dim {axis}, which is {size}")
            x = ops.gather(x, np.pad(np.arange(size), (a, b), mode=mode), axis=axis)  # type: ignore[call-overload]
    return x


@handler("CenterCropPad")
def center_crop_pad(n: Call) -> Value:
    return functions.center_crop_pad(n.value(0), n.ints(1), axes=n.attr("axes", None))
