"""Products with few columns, one row or a depth of 1, whose tiles would leave most lanes of their vectors empty or multiply once.

They are sums of products element by element where both operands are read along the depth, as are two rows by a right operand
that stays near, and else, where rows of the left operand are adjacent, the transposed product: its columns are these rows.
Windows of an image are summed line by line, of a copy where it is padded or its planes would share sets of the cache.
"""

from __future__ import annotations

from builtins import sum as builtin_sum
from math import gcd, prod

from rlx.ir.dtype import DType, bf16, f32
from rlx.ir.graph import HANDLE, INPUT, Node, Value, keep
from rlx.ir.layout import is_line, one_stride
from rlx.ir.op import OPS, Contraction, Kind
from rlx.ir.ops import broadcast_to, copy, pad, slice, sum, transpose
from rlx.ir.ops.view import seen, transposed_axes
from rlx.ir.shape import Shape, contiguous_strides

FEW, LONG = 4, 64  # columns for each of which rows are read again, if these are single runs of so many elements
SEVERAL, READS = 4, 8  # columns for each of which windows are summed along lines of an image; columns times the lanes' distance
MANY_PLANES, SOME_PLANES = 32, 128  # of an image whose lines are summed: more than a set of the cache has; for many columns
STORED = 2 << 20  # bytes of products of windows that stay in a cache until they are summed
NEAR, DEEP = 1 << 20, 256  # bytes of a right operand that two rows read one after the other, at most; depth, at least
PAGE = 4096  # bytes of a line of all sets of the first-level cache
NARROW, WIDE = 8, 64  # at most columns, at least rows of a product that is transposed


def split(node: Node) -> Value | None:
    """The product in other ops where these are faster; None: its own kernel is."""
    a, b = node.inputs
    c: Contraction = node.op.contract(node.attrs, a.shape, b.shape)  # type: ignore[misc]
    rows, columns, depth = _size(a, c.a_rows), _size(b, c.b_columns), _size(a, c.a_sum)
    few = columns <= FEW and (columns == 1 or depth >= LONG) and _in_line(a, c.a_sum)
    if columns == 1 and not few:  # windows whose products are stored before they are summed
        stored = prod(node.shapes[0].static) * depth * node.shapes[0].dtype.compute.itemsize
        few = a.dtype.is_int or (a.dtype != bf16 and (stored <= STORED or rows <= WIDE))
    if 0 < columns <= SEVERAL and (lines := _in_lines(a, c, columns)) is not None:
        return _by_row(lines, b, node.shapes[0], c)
    if depth == 1:
        return _of_one_term(node, c)
    if few and adjacent(a, c.a_sum):
        return _by_element(node, c)
    if 0 < columns <= NARROW and rows >= WIDE and adjacent(a, c.a_rows) and _in_line(a, c.a_sum):
        return _transposed(node, c)
    given = seen(b)[0].node.op in (INPUT, HANDLE)  # weights are packed
    again = rows == 2 and depth >= DEEP and a.dtype == f32 and b.shape.size_bytes <= NEAR
    return _by_element(node, c) if (rows == 1 or again) and given and adjacent(b, c.b_sum) else None


def _of_one_term(node: Node, c: Contraction) -> Value:
    """a[batch, rows, 1] * b[batch, 1, columns]."""
    (a, b), out = node.inputs, node.shapes[0]
    rows, columns = (tuple(v.dims[i] for i in axes) for v, axes in ((a, c.a_rows), (b, c.b_columns)))
    left = _ordered(a, c.a_batch, c.a_rows + c.a_sum, (*rows, *[1] * len(columns)))
    right = _ordered(b, c.b_batch, c.b_columns + c.b_sum, (*[1] * len(rows), *columns))
    return (left.astype(out.dtype) * right.astype(out.dtype)).reshape(out.dims)


def _by_element(node: Node, c: Contraction) -> Value:
    """The sum of a[batch, rows, 1, depth] * b[batch, 1, columns, depth]."""
    (a, b), out = node.inputs, node.shapes[0]
    rows, columns, depth = (tuple(v.dims[i] for i in axes) for v, axes in ((a, c.a_rows), (b, c.b_columns), (a, c.a_sum)))
    last = tuple(range(-len(depth), 0))
    left = _ordered(a, c.a_batch, c.a_rows + c.a_sum, (*rows, *[1] * len(columns), *depth))
    right = _ordered(b, c.b_batch, c.b_columns + c.b_sum, (*[1] * len(rows), *columns, *depth))
    if 1 < _size(b, c.b_columns) <= FEW:
        left = _for_each(left, right, len(c.a_batch), (*rows, *columns, *depth), out.dtype.compute)
    right = right if adjacent(right, last) else copy(right)  # type: ignore[assignment]
    made = sum(left.astype(out.dtype.compute) * right.astype(out.dtype.compute), axis=last)
    return made.reshape(out.dims).astype(out.dtype)  # type: ignore[union-attr]


def _by_row(a: Value, b: Value, out: Shape, c: Contraction) -> Value:
    """The sum of a[batch, 1, rows, depth] * b[batch, columns, 1, depth], transposed: vectors of rows, column by column."""
    rows, columns, depth = (tuple(v.dims[i] for i in axes) for v, axes in ((a, c.a_rows), (b, c.b_columns), (a, c.a_sum)))
    lead, last = len(c.a_batch), tuple(range(-len(depth), 0))
    left = _ordered(a, c.a_batch, c.a_rows + c.a_sum, (*[1] * len(columns), *rows, *depth))
    right = _ordered(b, c.b_batch, c.b_columns + c.b_sum, (*columns, *[1] * len(rows), *depth))
    left = _for_each(left, right, lead, (*columns, *rows, *depth), out.dtype.compute)
    made = sum(left.astype(out.dtype.compute) * right.astype(out.dtype.compute), axis=last)
    behind = range(lead + len(columns), lead + len(columns) + len(rows))
    made = made.transpose(*range(lead), *behind, *range(lead, lead + len(columns)))  # type: ignore[union-attr]
    return made.reshape(out.dims).astype(out.dtype)


def _for_each(left: Value, right: Value, lead: int, dims: tuple[object, ...], compute: DType) -> Value:
    """`left` for each column, if it is narrower than `compute`: it is converted on the way, again for each, and not stored."""
    if left.dtype == compute:
        return left
    batch = (x if y == 1 else y for x, y in zip(left.shape.static[:lead], right.shape.static[:lead]))
    return broadcast_to(left, dims=(*batch, *dims))  # type: ignore[return-value]


def _in_lines(a: Value, c: Contraction, columns: int) -> Value | None:
    """`a` where lines of an image are fast to sum for so many columns; None: nowhere, or tiles of channels last are faster."""
    first = _padded_first(a) if a.dtype.is_float else a
    if not _rows_in_lanes(first, c, READS // columns):
        return None
    base, layout = seen(first)
    stride, planes = max((layout.strides[i], first.shape.static[i]) for i in c.a_sum)
    if not _pays(columns, planes, first is not a, a.dtype):
        return None
    # a slice of a much larger value is read where it lies
    span = [(n - 1) * s for n, s in zip(first.shape.static, layout.strides) if s < stride]
    images = prod(n for n, s in zip(first.shape.static, layout.strides) if s > stride)
    seldom = base.shape.num_elements > 2 * images * planes * (1 + builtin_sum(span))
    many = planes >= MANY_PLANES and _meet(stride * a.dtype.itemsize)
    return _apart(first, base, stride) if many and not seldom else first


def _pays(columns: int, planes: int, padded: bool, dtype: DType) -> bool:
    """Whether lines of so many planes take less time than tiles, from measurements on Zen 5."""
    if padded and dtype == bf16:  # tiles add up pairs of a copy with channels last
        return columns == 1 or (columns == 2 and planes <= SOME_PLANES)
    if columns > (SEVERAL - 1 if padded else SEVERAL):
        return False
    return columns <= 2 or dtype.itemsize == 2 or planes * (columns - 2) ** 2 <= SOME_PLANES


def _padded_first(x: Value) -> Value:
    """`x`, a view of a padded transpose, as a view of the padded operand, whose axes are in the order of memory."""
    node = x.node
    if node.op is OPS["pad"] and (inner := node.inputs[0].node).op is OPS["transpose"]:
        axes, attrs = transposed_axes(inner), node.attrs
        low, high = (tuple(given[axes.index(i)] for i in range(x.rank)) for given in (attrs.low, attrs.high))  # type: ignore[union-attr]
        return transpose(pad(inner.inputs[0], low=low, high=high, value=attrs.value), axes=axes)  # type: ignore[union-attr, return-value]
    return keep(node, (_padded_first(node.inputs[0]),))[0] if node.op.kind is Kind.VIEW and len(node.inputs) == 1 else x


def _meet(stride: int) -> bool:
    """Whether planes so many bytes apart share a few sets of the first-level cache."""
    return gcd(stride, PAGE) >= PAGE // 4


def _apart(x: Value, base: Value, stride: int) -> Value:
    """`x`, a view of `base`, as one of a copy whose planes are a little longer, so that they do not share sets of the cache;
    `x` itself if a few rows or elements do not help."""
    if x is not base:
        inner = _apart(x.node.inputs[0], base, stride)
        return keep(x.node, (inner,))[0]
    dims, none = x.shape.static, (0,) * x.rank
    strides = contiguous_strides(dims)
    inside = [axis for axis, s in enumerate(strides) if s < stride and dims[axis] > 1]
    longer = ((axis, n) for axis in inside for n in range(1, 9))
    found = next((at for at in longer if not _meet(stride // dims[at[0]] * (dims[at[0]] + at[1]) * x.dtype.itemsize)), None)
    if stride not in strides or found is None:
        return x
    copied = pad(x, low=none, high=tuple(found[1] * (axis == found[0]) for axis in range(x.rank)))
    return slice(copied, starts=none, stops=dims, steps=(1,) * x.rank)  # type: ignore[return-value]


def _rows_in_lanes(a: Value, c: Contraction, most: int) -> bool:
    """True for windows, at most so far apart, of an image with few channels, or channels first: rows are lines, no sum is."""
    real = [axis for axis in c.a_rows if a.dims[axis] != 1]
    if len(c.a_sum) < 2 or not real or _in_line(a, c.a_sum):
        return False
    distance = seen(a)[1].strides[real[-1]]
    return distance <= most and is_line(a.shape.static[real[-1]], distance)


def _transposed(node: Node, c: Contraction) -> Value | None:
    """b[columns, depth] @ a[depth, rows], transposed. Rows without a common stride with the last ones are a batch dim."""
    (a, b), out = node.inputs, node.shapes[0]
    apart = next(n for n in range(len(c.a_rows) + 1) if _in_line(a, c.a_rows[n:]))
    lead, last = c.a_rows[:apart], c.a_rows[apart:]
    if _size(a, last) < WIDE or not a.dtype == b.dtype == out.dtype or not out.dtype.is_float:
        return None
    left = _ordered(b, c.b_batch, c.b_columns + c.b_sum, (*[1] * apart, _size(b, c.b_columns), -1))
    right = _ordered(a, c.a_batch, lead + c.a_sum + last, (*(a.dims[i] for i in lead), -1, _size(a, last)))
    return (left @ right).swapaxes(-1, -2).reshape(out.dims)


def _ordered(x: Value, batch: tuple[int, ...], others: tuple[int, ...], dims: tuple[object, ...]) -> Value:
    """`x` with these axes in this order; `dims`: of those behind `batch`, then."""
    return x.transpose(*(a for a in batch if a >= 0), *others).reshape((*(x.dims[a] if a >= 0 else 1 for a in batch), *dims))


def _size(x: Value, axes: tuple[int, ...]) -> int:
    return prod(x.shape.static[axis] for axis in axes)


def adjacent(x: Value, axes: tuple[int, ...]) -> bool:
    """True if elements along the last of these axes are adjacent."""
    real = [axis for axis in axes if x.dims[axis] != 1]
    return not real or seen(x)[1].strides[real[-1]] == 1


def _in_line(x: Value, axes: tuple[int, ...]) -> bool:
    return one_stride(seen(x)[1], x.shape.static, axes)
