"""Variances of large tensors that read the elements once: a kernel has the mean of each part of a row or column, which registers
hold, and the sum of squares from there; these are combined (Chan, Golub and LeVeque, 1983).

The means are rounded. So the sum of what the elements are away from a mean, which would be 0, is computed too, and any number
that they are near would do for a mean: the result is right where it is small beside the square of the mean.
"""

from __future__ import annotations

import math

import rlx.ir.ops as ops
from rlx.backends.cuda.schedule import COLUMN_BYTES, FEW_COLUMNS, MOST
from rlx.backends.cuda.splits import LARGE, LONG, LONGEST, PART
from rlx.ir.graph import Node, Value
from rlx.ir.ops.rules import axes_of
from rlx.ir.ops.view import slice_axis
from rlx.records import record

LEAST = 32  # elements of a row or column: of shorter ones, the means would be many
COLUMN = 512  # elements of a part of a column, which a block keeps


@record
class Cut:
    """Reduced axes from `first` on are one run of `length` elements, in parts of `size`; `inner` elements of other axes are
    behind it. Of the axes before, `others` are reduced, too, and those of `kept` are not."""

    first: int
    length: int
    inner: int
    size: int
    others: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def behind(self) -> tuple[int, ...]:
        return (self.inner,) if self.inner > 1 else ()

    @property
    def rest(self) -> int:
        """Elements of a run that are in no part."""
        return self.length % self.size


def split(node: Node) -> Value | None:
    """None: one kernel keeps each row or column, or there is little to read."""
    (x,), axes = node.inputs, axes_of(node.attrs.axis, node.inputs[0].rank)  # type: ignore[union-attr]
    dims, wide = x.shape.static, x.dtype.compute
    if (cut := _cut(dims, axes, wide.itemsize)) is None:
        return None
    lead, count, size = dims[: cut.first], float(math.prod(dims[a] for a in axes)), float(cut.size)
    runs = x.reshape(*lead, cut.length, *cut.behind)
    axis = cut.first
    whole = slice_axis(runs, axis, 0, cut.length - cut.rest) if cut.rest else runs
    parts = ops.cast(whole.reshape(*lead, cut.length // cut.size, cut.size, *cut.behind), dtype=wide)
    means = ops.sum(parts, axis=(axis + 1,), keepdims=True) / size
    off = parts - means
    sums = [ops.sum(v, axis=(axis + 1,), keepdims=True) for v in (off, off * off)]
    means, away, squares = (_together(v.reshape(*lead, cut.length // cut.size, *cut.behind), cut) for v in (means, *sums))
    left = slice_axis(runs, axis, cut.length - cut.rest, cut.length) if cut.rest else None
    left = ops.cast(_together(left, cut), dtype=wide) if left is not None else None
    mean = _total(means) * size
    mean = (mean if left is None else mean + _total(left)) / count
    off = means - mean
    away, squares = _total(away + off * size), _total(squares + off * 2.0 * (away + off * (size / 2)))
    if left is not None:
        off = left - mean
        away, squares = away + _total(off), squares + _total(off * off)
    free = max(count - node.attrs.correction, 0.0)  # type: ignore[union-attr]
    found = ops.maximum(squares - away * (away / count), 0.0) / free
    return ops.cast(found, dtype=x.dtype).reshape(*node.shapes[0].dims)


def _cut(dims: tuple[int, ...], axes: tuple[int, ...], itemsize: int) -> Cut | None:
    end = max((a + 1 for a in axes if dims[a] > 1), default=0)
    first = next((n for n in range(end, 0, -1) if dims[n - 1] != 1 and n - 1 not in axes), 0)
    length, inner, others = math.prod(dims[first:end]), math.prod(dims[end:]), tuple(a for a in axes if a < first)
    several, part = any(dims[a] > 1 for a in others), PART if inner == 1 else COLUMN
    longest = LONGEST if inner == 1 else COLUMN_BYTES // itemsize
    if math.prod(dims) < LONG or length < LEAST or 1 < inner < FEW_COLUMNS or (length <= longest and not several):
        return None
    # equal parts, of vectors; else of vectors, with few elements left
    size = min(range(part, part // 4, -1), key=lambda n: (length % n > 0, n % MOST > 0, length % n))
    size = length if length <= 2 * part or (length % size and length <= longest) else size
    if length % size and not several and math.prod(dims) < LARGE:  # more kernels would take longer than to read once more
        return None
    return Cut(first, length, inner, size, others, tuple(a for a in range(first) if a not in others))


def _together(v: Value, cut: Cut) -> Value:
    """With all that is reduced as the last axis."""
    behind = range(cut.first + 1, v.rank)
    order = (*cut.kept, *behind, *cut.others, cut.first)
    kept = [v.shape.static[a] for a in (*cut.kept, *behind)]
    return ops.transpose(v, order).reshape(*kept, math.prod(v.shape.static) // math.prod(kept))


def _total(v: Value) -> Value:
    return ops.sum(v, axis=(-1,), keepdims=True)


__all__ = ["split"]
