"""Elements chosen by indices, and those whose number is known only in a run: results of an upper bound, and a count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rlx.errors import AttributeValueError, ShapeError, whole
from rlx.ir import ops
from rlx.ir.dtype import DType, i64
from rlx.ir.functions.arrays import full, moveaxis, zeros
from rlx.ir.functions.declare import as_value, function, known_dim, one_each, own_axis
from rlx.ir.node import Operand, Value, constant
from rlx.ir.op import as_ints
from rlx.ir.shape import DimLike

# -- places in several dims ----------------------------------------------------------------------------------------


def _places(indices: Value, sizes: Sequence[int]) -> Value:
    """Row-major positions, i64, from indices [..., len(sizes)]. A run checks each index by its own dim."""
    at: Value = full(indices.dims[:-1], 0, i64)
    for i, size in enumerate(sizes):
        at = at * size + ops.gather(ops.iota(dims=size), indices[..., i])
    return at


def _indexed_dims(x: Value, indices: Value, batch_dims: int) -> list[int]:
    count = known_dim(indices, -1) if indices.rank else 0
    if not 1 <= count <= x.rank - batch_dims or x.dims[:batch_dims] != indices.dims[:batch_dims] or batch_dims >= indices.rank:
        raise ShapeError(f"indices [..., n] are positions in n dims of {x!r} after {batch_dims} common ones, got {indices!r}")
    return [known_dim(x, batch_dims + i) for i in range(count)]


@function
def gather_nd(x: Value, indices: Operand, batch_dims: int = 0) -> Value:
    """Slices of x at positions [..., n] in n dims, after the first `batch_dims`, which x and the indices have in common. An
    index out of range is an IndexRangeError."""
    indices = as_value(indices)
    sizes = _indexed_dims(x, indices, batch_dims)
    outer, space = [known_dim(x, i) for i in range(batch_dims)], math.prod(sizes)
    at = _places(indices, sizes)
    if batch_dims:
        own = ops.reshape(ops.iota(dims=math.prod(outer)), dims=(*outer, *(1 for _ in at.dims[batch_dims:])))
        at = at + own * space
    rest = x.dims[batch_dims + len(sizes) :]
    return ops.gather(ops.reshape(x, dims=(math.prod(outer) * space, *rest)), at)


@function
def scatter_nd(
    x: Value, indices: Operand, updates: Operand, mode: Literal["replace", "add", "mul", "max", "min"] = "replace"
) -> Value:
    """A copy of x with slices at positions [..., n] in its first n dims replaced by `updates`, or combined with them as in
    scatter_elements. Updates of one place are taken in order: the last one stays. An index out of range is an IndexRangeError."""
    indices, updates = as_value(indices), as_value(updates)
    sizes = _indexed_dims(x, indices, 0)
    rest = x.dims[len(sizes) :]
    if updates.dims != (*indices.dims[:-1], *rest):
        raise ShapeError(f"updates of {x!r} at {indices!r} have dims {(*indices.dims[:-1], *rest)}, got {updates!r}")
    count = math.prod(known_dim(indices, i) for i in range(indices.rank - 1))
    width = math.prod(known_dim(x, len(sizes) + i) for i in range(len(rest)))
    rows, more = ops.reshape(x, dims=(math.prod(sizes), width)), ops.reshape(updates, dims=(count, width))
    at = ops.reshape(_places(indices, sizes), dims=(count, 1))
    if mode == "replace" and width > 1 and count:  # rows are found once, and then copied side by side
        last = ops.scatter_elements(full((math.prod(sizes), 1), -1, i64), at, ops.iota(dims=(count, 1)))
        chosen = ops.gather(more, ops.maximum(ops.reshape(last, dims=-1), 0))
        return ops.reshape(ops.where(ops.less(last, 0), rows, chosen), dims=x.dims)
    return ops.reshape(ops.scatter_elements(rows, ops.broadcast_to(at, dims=more.dims), more, mode=mode), dims=x.dims)


@function
def one_hot(x: Value, depth: int, axis: int = -1, on: Operand = 1, off: Operand = 0, dtype: DType | str = "f32") -> Value:
    """`on` where the index along a new axis is x, else `off`; of an x outside 0 … depth-1, `off` everywhere."""
    at = own_axis(x, axis, 1)
    places = ops.iota(dims=(depth, *(1 for _ in range(x.rank - at))), dtype=x.dtype if x.dtype.bits > 16 else i64)
    hit = ops.equal(ops.unsqueeze(x, axes=at).astype(places.dtype), places)
    on, off = (v if isinstance(v, Value) else constant(v, dtype) for v in (on, off))
    return ops.where(hit, on, off)


@function
def reverse_sequence(x: Value, lengths: Operand, axis: int = 0, batch_axis: int = 1) -> Value:
    """Along `axis`, the first `lengths[b]` elements of batch entry b in reverse order, and the others as they are."""
    at, batch = own_axis(x, axis), own_axis(x, batch_axis)
    if at == batch or as_value(lengths).dims != (x.dims[batch],):
        raise ShapeError(f"a length for each index of dim {batch} of {x!r}, apart from dim {at}, got {lengths!r}")
    along = lambda v, i: ops.reshape(v, dims=tuple(-1 if d == i else 1 for d in range(x.rank)))  # noqa: E731
    place, ends = along(ops.iota(dims=x.dims[at]), at), along(as_value(lengths).astype(i64), batch)
    order = ops.where(ops.less(place, ends), ends - 1 - place, place)
    return ops.gather_elements(x, ops.broadcast_to(order, dims=x.dims), axis=at)


# -- as many as a run finds ----------------------------------------------------------------------------------------


def _kept(mask: Value, size: int | None) -> tuple[Value, Value]:
    """Positions, i64 [size], of the True elements of a mask [n], in order, then zeros; and their number."""
    n = known_dim(mask, 0)
    size = n if size is None else whole("size", size, 0, AttributeValueError)
    place = ops.cumsum(mask.astype(i64), exclusive=True)
    to = ops.where(ops.logical_and(mask, ops.less(place, size)), place, size)
    found = ops.scatter_elements(zeros(size + 1, i64), to, ops.iota(dims=n))[:size]
    count = ops.sum(mask.astype(i64))
    held = ops.less(ops.iota(dims=size), count)  # the last place took those that have none
    return ops.where(held, found, 0), ops.minimum(count, size)


def _padded_rows(x: Value, at: Value, count: Value, axis: int) -> Value:
    """x at these positions along the axis, zeros from `count` on."""
    rows = ops.gather(x, at, axis=axis)
    held = ops.less(ops.iota(dims=at.dims[0]), count)
    held = ops.reshape(held, dims=(-1, *(1 for _ in x.dims[axis + 1 :])))
    return ops.where(held, rows, False if x.dtype.kind == "b" else 0)


@function
def nonzero(x: Value, size: int | None = None) -> tuple[Value, Value]:
    """Positions of the elements that are not zero, i64 [x.rank, size], in row-major order, then zeros; and their number, i64 ().
    Without `size`, there is room for all; else those that have none are left out."""
    flat, places = ops.reshape(x, dims=-1), []
    at, count = _kept(flat if x.dtype.kind == "b" else ops.not_equal(flat, 0), size)
    for axis in reversed(range(x.rank)):
        places.insert(0, at % max(known_dim(x, axis), 1))
        at = at // max(known_dim(x, axis), 1)
    return (ops.concat([p[None] for p in places]) if places else zeros((0, at.dims[0]), i64)), count


@function
def compress(x: Value, condition: Operand, axis: int | None = None, size: int | None = None) -> tuple[Value, Value]:
    """The slices of x along `axis` (without it: the elements) where the condition, [n], is True, in order, then zeros; and their
    number, i64 (). A condition may be shorter than the dim. Without `size`, there is room for all."""
    if axis is None:
        return compress(ops.reshape(x, dims=-1), condition, 0, size)
    at = own_axis(x, axis)
    positions, count = _kept(as_value(condition), size)
    return _padded_rows(x, positions, count, at), count


@function
def unique(
    x: Value, axis: int | None = None, sorted: bool = True, size: int | None = None
) -> tuple[Value, Value, Value, Value, Value]:
    """The different elements of x (along an axis: slices), zeros behind; the index at which each comes first; the place of each
    element of x among them; how often each occurs; and their number, i64 (). Without `sorted`, in the order of first indices."""
    if axis is None:
        return unique(ops.reshape(x, dims=-1), 0, sorted, size)
    at = own_axis(x, axis)
    n = known_dim(x, at)
    size = n if size is None else size
    columns = ops.reshape(moveaxis(x, at, 0), dims=(n, math.prod(known_dim(x, i) for i in range(x.rank) if i != at)))
    columns = columns.astype("u8") if x.dtype.kind == "b" else columns
    order = ops.iota(dims=n)
    for i in reversed(range(known_dim(columns, 1))):  # stable sorts, from the last column to the first
        order = ops.gather(order, ops.argsort(ops.gather(columns[:, i], order)))
    rows = ops.gather(columns, order)
    before = ops.concat([rows[:1], rows[:-1]])
    same = ops.equal(rows, before)
    if x.dtype.is_float:
        same = ops.logical_or(same, ops.logical_and(ops.is_nan(rows), ops.is_nan(before)))
    new = ops.logical_or(ops.logical_not(ops.all(same, axis=1)), ops.equal(ops.iota(dims=n), 0))
    starts, count = _kept(new, size)
    group = ops.cumsum(new.astype(i64)) - 1
    inverse = ops.scatter_elements(zeros(n, i64), order, group)
    held = ops.less(ops.iota(dims=size), count)
    first = ops.where(held, ops.gather(order, starts), n)
    inside = ops.less(group, size)
    counts = ops.scatter_add(zeros(size + 1, i64), ops.where(inside, group, size), inside.astype(i64))[:size]
    if not sorted:
        by_place = ops.argsort(first)
        rank = ops.scatter_elements(zeros(size, i64), by_place, ops.iota(dims=size))
        first, counts = ops.gather(first, by_place), ops.gather(counts, by_place)
        inverse = ops.gather(rank, ops.minimum(inverse, size - 1))
    first = ops.where(held, first, 0)
    return _padded_rows(x, first, count, at), first, inverse, counts, count


@function
def best_boxes(
    boxes: Operand, scores: Operand, most: int, overlap: float = 0.5, least: float = -math.inf, size: int | None = None
) -> tuple[Value, Value]:
    """The choice of non_max_suppression as rows (batch, class, box), i64 [size, 3], by batch and class, best first, then zeros;
    and their number, i64 (). Without `size`, there is room for all."""
    ids, _ = ops.non_max_suppression(boxes, scores, most=most, overlap=overlap, least=least)
    dims = [known_dim(ids, i) for i in range(3)]
    flat = ops.reshape(ids, dims=-1)
    at, count = _kept(ops.less_equal(0, flat), size)
    rows = [at // max(dims[1] * dims[2], 1), at // max(dims[2], 1) % max(dims[1], 1), ops.gather(flat, at)]
    held = ops.less(ops.iota(dims=(at.dims[0], 1)), count)
    return ops.where(held, ops.concat([ops.unsqueeze(r, axes=1) for r in rows], axis=1), 0), count


# -- blocks and windows of images ----------------------------------------------------------------------------------


def _image(x: Value, block: int) -> tuple[DimLike, ...]:
    """The dims of an image that has blocks of so many pixels."""
    whole("block", block, 1, AttributeValueError)
    if x.rank != 4:
        raise ShapeError(f"an image is [batch, channels, height, width], got {x!r}")
    return x.dims


@function
def depth_to_space(x: Value, block: int, order: Literal["dcr", "crd"] = "dcr") -> Value:
    """x [batch, channels, height, width] with channels moved into blocks of pixels. The channels are (block, block, depth) with
    'dcr', and (depth, block, block) with 'crd'."""
    b, c, h, w = _image(x, block)
    if not isinstance(c, int) or c % block**2 or order not in ("dcr", "crd"):
        raise AttributeValueError(f"channels of {x!r} in blocks of {block} x {block}, order 'dcr' or 'crd', got {order!r}")
    depth = c // block**2
    dims, axes = ((block, block, depth), (3, 4, 1, 5, 2)) if order == "dcr" else ((depth, block, block), (1, 4, 2, 5, 3))
    moved = ops.transpose(ops.reshape(x, dims=(b, *dims, h, w)), axes=(0, *axes))
    return ops.reshape(moved, dims=(b, depth, h * block, w * block))


@function
def space_to_depth(x: Value, block: int, order: Literal["dcr", "crd"] = "dcr") -> Value:
    """x [batch, channels, height, width] with each block of pixels moved into the channels, in the order of depth_to_space."""
    b, c, h, w = _image(x, block)[0], *(known_dim(x, i) for i in (1, 2, 3))
    if h % block or w % block or order not in ("dcr", "crd"):
        raise AttributeValueError(f"whole blocks of {block} x {block} of {x!r}, order 'dcr' or 'crd', got {order!r}")
    apart = ops.reshape(x, dims=(b, c, h // block, block, w // block, block))
    axes = (0, 3, 5, 1, 2, 4) if order == "dcr" else (0, 1, 3, 5, 2, 4)
    return ops.reshape(ops.transpose(apart, axes=axes), dims=(b, c * block**2, h // block, w // block))


@function
def center_crop_pad(x: Value, dims: int | Sequence[int], axes: int | Sequence[int] | None = None) -> Value:
    """x with these dims: the centre of it, or it in the centre of zeros. Of an odd difference, the larger part is at the end."""
    sizes, low, high = as_ints(dims), [0] * x.rank, [0] * x.rank
    part = [slice(None)] * x.rank
    own = range(x.rank) if axes is None else as_ints(axes)
    for size, axis in one_each(x, "dims of center_crop_pad", sizes, own):
        at = own_axis(x, axis)
        more = size - known_dim(x, at)
        if more < 0:
            part[at] = slice(-more // 2, -more // 2 + size)
        low[at], high[at] = max(more, 0) // 2, max(more, 0) - max(more, 0) // 2
    return ops.pad(x[tuple(part)], low=low, high=high)


__all__ = [
    "best_boxes", "center_crop_pad", "compress", "depth_to_space", "gather_nd", "nonzero", "one_hot", "reverse_sequence",
    "scatter_nd", "space_to_depth", "unique",
]  # fmt: skip
