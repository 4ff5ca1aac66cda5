"""`x[...]` as in numpy, made of slice, reshape and gather."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any, SupportsIndex

import numpy as np

from rlx.errors import DTypeError, GraphError, IndexRangeError, ShapeError
from rlx.ir.dtype import i64
from rlx.ir.methods import FUNCTIONS
from rlx.ir.node import CONSTANT, Value, constant
from rlx.records import record

from rlx.ir.ops import cast, gather, less, reshape, slice as slice_, transpose, where  # isort: skip
from rlx.ir.shape import DimLike

END = 2**63 - 1
ALL = slice(None)


def indexed(x: Value, keys: tuple[object, ...]) -> Value:
    """x[keys]. Integers beside arrays count as arrays of one element, as in numpy."""
    keys = tuple(one for key in keys for one in _plain(key))
    keys = _without_ellipsis(x, keys)
    if not any(isinstance(key, (np.ndarray, Value, _Positions)) for key in keys):
        return _sliced(x, keys)
    whole = _sliced(x, [key if key is None or isinstance(key, slice) else ALL for key in keys])
    by: dict[int, Any] = {}
    for axis, key in enumerate(keys):  # of `whole`, too: each key has one
        if isinstance(key, _Positions) and key.size != whole.dims[axis]:
            raise ShapeError(f"{x!r} indexed by a mask with a dim of {key.size} for one of {whole.dims[axis]}")
        if key is not None and not isinstance(key, slice):
            by[axis] = key.array if isinstance(key, _Positions) else key if isinstance(key, Value) else np.asarray(key)
    return _gathered(whole, by)


def _plain(key: object) -> Sequence[object]:
    """A key as an int, a slice, None, ..., an array or a Value of integers; a mask as the indices of its elements."""
    if key is None or key is Ellipsis or isinstance(key, slice) or (isinstance(key, SupportsIndex) and not _is_array(key)):
        return [key]
    if isinstance(key, Value):
        if key.node.op is CONSTANT:
            return _plain(key.node.attrs.data)  # type: ignore[union-attr]
        if not key.dtype.is_int:
            hint = "; the size of a mask's result is not known before a run: use rlx.where" if key.dtype.kind == "b" else ""
            raise DTypeError(f"an index is of integers, got {key!r}{hint}")
        return [key]
    try:
        array = np.asarray(key)
    except (ValueError, GraphError) as e:
        raise GraphError(f"an index cannot be made of {key!r:.60}: {e}") from None
    if array.dtype.kind == "b" and array.ndim:
        return [_Positions(found, size) for found, size in zip(np.nonzero(array), array.shape)]
    if array.dtype.kind not in "iu" and array.size:
        raise DTypeError(f"an index is of integers, got an array of {array.dtype}")
    return [array.astype(np.int64)]


@record
class _Positions:
    """The indices of a mask's elements along one of its axes, and the size of that axis."""

    array: np.ndarray
    size: int


def _is_array(key: object) -> bool:
    return isinstance(key, (np.ndarray, bool, np.bool_, Value))


def _without_ellipsis(x: Value, keys: tuple[object, ...]) -> tuple[object, ...]:
    dots = [i for i, key in enumerate(keys) if key is Ellipsis]
    missing = x.rank - sum(key is not None and key is not Ellipsis for key in keys)
    if missing < 0 or len(dots) > 1:
        raise ShapeError(f"{x!r} has {x.rank} dims, indexed by {len(keys)} keys of which {len(dots)} are ...")
    at = dots[0] if dots else len(keys)
    return (*keys[:at], *(ALL,) * missing, *keys[at + 1 :])


def _sliced(x: Value, keys: Sequence[object]) -> Value:
    """A slice of x, then a reshape that drops the dims indexed by an int and adds a dim for each None."""
    ranges: list[tuple[int, int, int]] = []
    kept: list[int | None] = []  # dims of the result: an axis of the slice, or None for a dim of 1
    for key in keys:
        if isinstance(key, slice):
            if values := [v for v in (key.start, key.stop, key.step) if isinstance(v, Value)]:
                index(values[0])  # type: ignore[arg-type]  GraphError: it is no number of Python's
            step = 1 if key.step is None else key.step
            start = key.start if key.start is not None else 0 if step > 0 else END
            kept.append(len(ranges))
            ranges.append((start, key.stop if key.stop is not None else END if step > 0 else -END, step))
        elif key is None:
            kept.append(None)
        else:
            i, dim = index(key), x.dims[len(ranges)]  # type: ignore[arg-type]
            if isinstance(dim, int) and not -dim <= i < dim:
                raise IndexRangeError(f"index {i} of {x!r}: dim {len(ranges)} is {dim}")
            ranges.append((i, i + 1 if i != -1 else END, 1))
    starts, stops, steps = zip(*ranges) if ranges else ((), (), ())
    part = x if all(r == (0, END, 1) for r in ranges) else slice_(x, starts=starts, stops=stops, steps=steps)
    if kept == list(range(x.rank)):
        return part
    return reshape(part, dims=tuple(1 if i is None else part.dims[i] for i in kept))


def _gathered(x: Value, by: dict[int, Any]) -> Value:
    """x indexed at the axes of `by` by arrays or Values, which broadcast. The dims of the indices come where the first axis was
    if the axes are adjacent, else first."""
    axes = sorted(by)
    if len(axes) == 1:
        return gather(x, _wrapped(x, axes[0], by[axes[0]], False), axis=axes[0])
    others = [i for i in range(x.rank) if i not in by]
    sizes = [_static(x, axis) for axis in axes]
    rows = reshape(transpose(x, axes=(*axes, *others)), dims=(math.prod(sizes), *(x.dims[i] for i in others)))
    at: Any = 0
    for axis, size in zip(axes, sizes):
        at = at * size + _wrapped(x, axis, by[axis], True)
    found = gather(rows, at, axis=0)
    count = found.rank - len(others)
    if axes != list(range(axes[0], axes[0] + len(axes))):
        return found
    order = (*range(count, count + axes[0]), *range(count), *range(count + axes[0], found.rank))
    return transpose(found, axes=order)


def _static(x: Value, axis: int) -> int:
    dim = x.dims[axis]
    if not isinstance(dim, int):
        raise GraphError(f"{x!r} indexed by several arrays: dim {dim} must be known")
    return dim


def _wrapped(x: Value, axis: int, at: Value | np.ndarray, checked: bool) -> Any:
    """An index with negative numbers counted from the end. `checked`: those of a Value are compared with the dim here, since
    they become part of a larger index."""
    dim: DimLike = x.dims[axis]
    if isinstance(at, Value):
        if not isinstance(dim, int):
            return at
        signed = at if at.dtype.kind == "u" else where(less(at, 0), at + dim, at)
        return gather(constant(np.arange(dim), i64), signed) if checked else cast(signed, dtype=i64)
    if not isinstance(dim, int):
        if (at < 0).any():
            raise GraphError(f"{x!r}: an index from the end of dim {dim}, which is not known")
        return at
    if at.size and not (-dim <= at.min() and at.max() < dim):
        wrong = at[(at < -dim) | (at >= dim)][0]
        raise IndexRangeError(f"index {wrong} of {x!r}: dim {axis} is {dim}")
    return np.where(at < 0, at + dim, at)


FUNCTIONS["indexed"] = indexed

__all__ = ["indexed"]
