"""Pools: reductions of sliding windows over 1 to 3 spatial dims. A pool over everything is a plain reduction."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.contexts import Padded, PaddingPass
from rlx.ir.declare import op
from rlx.ir.dtype import DType, as_dtype, f32, i64
from rlx.ir.node import Value, constant
from rlx.ir.op import Kind, Sample
from rlx.ir.ops.elementwise import abs, equal, is_nan, less, logical_and, logical_or, pow, sqrt, where
from rlx.ir.ops.index import iota
from rlx.ir.ops.reduce import max, min, sum
from rlx.ir.ops.view import reshape
from rlx.ir.ops.windows import Ints, SlidingAttrs, from_last, taps, to_last, windowed
from rlx.ir.shape import Shape


class IndexPoolAttrs(SlidingAttrs):
    """One number of any of these counts for each spatial dim. low, high: padding before and after."""

    window: Ints
    strides: Ints = (1,)
    low: Ints = (0,)
    high: Ints = (0,)
    dilation: Ints = (1,)

    @property
    def first(self) -> int:
        """The first spatial axis."""
        return 1 if getattr(self, "channels_last", False) else 2


class PoolAttrs(IndexPoolAttrs):
    channels_last: bool = False


class AvgPoolAttrs(IndexPoolAttrs):
    """`count_padding`: padding counts in the divisor. `extra`: more padding after each dim, which never does."""

    count_padding: bool = False
    extra: Ints = (0,)
    channels_last: bool = False

    def padding(self, spatial: int) -> tuple[Ints, Ints]:
        low, high = super().padding(spatial)
        return low, tuple(a + b for a, b in zip(high, self.each("extra", spatial)))


class LpPoolAttrs(IndexPoolAttrs):
    p: float = 2.0
    channels_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.p < np.inf:
            raise AttributeValueError(f"p is a positive number, got {self.p}")


def _pooled(attrs: IndexPoolAttrs, x: Shape) -> Shape:
    if x.rank not in (3, 4, 5):
        raise ShapeError(f"x has 1 to 3 spatial dims, and two others, got {x}")
    spatial = x.dims[attrs.first : attrs.first + x.rank - 2]
    places = attrs.positions(spatial, attrs.each("window", x.rank - 2))
    return x.with_dims((*x.dims[: attrs.first], *places, *x.dims[attrs.first + x.rank - 2 :]))


def _windows(attrs: IndexPoolAttrs, x: Value, value: float = 0.0) -> tuple[Value, Ints]:
    """The windows, and the axes in which their elements are."""
    return windowed(attrs, x, attrs.each("window", x.rank - 2), attrs.first, value), tuple(range(x.rank - 1, 2 * x.rank - 3))


def _last(build: Callable[..., Value], attrs: IndexPoolAttrs, x: Value) -> Value | None:
    """OpDef.last of a pool with this constructor."""
    how = {**vars(attrs), "channels_last": True}
    return None if attrs.first == 1 else from_last(build(to_last(x, False), **how), False)


def _spatial_first(attrs: IndexPoolAttrs, x: np.ndarray) -> np.ndarray:
    """[batch, *spatial, channels], for references."""
    return x if attrs.first == 1 else np.moveaxis(x, 1, -1)


def _as_given(attrs: IndexPoolAttrs, x: np.ndarray) -> np.ndarray:
    return x if attrs.first == 1 else np.moveaxis(x, -1, 1)


# -- max -----------------------------------------------------------------------------------------------------------


def _least(dtype: DType) -> float:
    return -np.inf if dtype.is_float else int(np.iinfo(dtype.numpy).min)


def _with_infinity(x: Value) -> Value:
    """8-bit floats as f32: not all of them have an infinity."""
    return x.astype(f32) if x.dtype.is_float and x.dtype.bits == 8 else x


def _max_pool(attrs: IndexPoolAttrs, x: Value) -> Value:
    wide = _with_infinity(x)
    seen, axes = _windows(attrs, wide, _least(wide.dtype))
    return max(seen, axis=axes).astype(x.dtype)


def _max_array(attrs: IndexPoolAttrs, x: np.ndarray) -> np.ndarray:
    least = _least(as_dtype(x.dtype))
    found = taps(attrs, _spatial_first(attrs, x), attrs.each("window", x.ndim - 2), least)
    return _as_given(attrs, np.max([seen for _, seen in found], axis=0, initial=least))


def _indices_shape(attrs: IndexPoolAttrs, x: Shape) -> tuple[Shape, Shape]:
    out = _pooled(attrs, x)
    return out, out.with_dtype(i64)


def _max_indices(attrs: IndexPoolAttrs, x: Value, every: Value | None = None) -> tuple[Value, Value]:
    """The least index among the elements that equal the maximum, or are NaN: positions rise within a window. `every`: the number
    of channels, where not all of x hold data."""
    wide, (batch, channels, *spatial) = _with_infinity(x), x.dims
    seen, axes = _windows(attrs, wide, _least(wide.dtype))
    greatest = max(seen, axis=axes, keepdims=True)
    total, ones = math.prod(spatial), (1,) * len(spatial)  # type: ignore[arg-type]
    own, _ = _windows(attrs, reshape(iota(dims=(total,)), dims=(1, 1, *spatial)), -1)
    here = logical_or(equal(seen, greatest), is_nan(seen)) if x.dtype.is_float else equal(seen, greatest)
    place = min(where(logical_and(less(-1, own), here), own, total), axis=axes)
    image = iota(dims=(batch, 1, *ones)) * (channels if every is None else every) + iota(dims=(1, channels, *ones), axis=1)
    return reshape(greatest, dims=place.dims).astype(x.dtype), where(less(place, total), place + image * total, -1)


def _indices_padded(p: PaddingPass, attrs: IndexPoolAttrs, x: Value) -> Padded:
    """Positions are those in an array without channels that hold no data."""
    active = p.along(x, 1)
    if len(active) > 1 or any(a.outer * a.inner > 1 for a in active):
        return "positions in x depend on how many channels hold data, and these are only some of the rows of the axis"
    return _max_indices(attrs, x, p.extent) if active else None


def _indices_array(attrs: IndexPoolAttrs, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    values, window = _max_array(attrs, x), attrs.each("window", x.ndim - 2)
    greatest, found = np.moveaxis(values, 1, -1), np.moveaxis(np.full(values.shape, -1), 1, -1)
    numbers = np.moveaxis(np.arange(x.size).reshape(x.shape), 1, -1)
    both = taps(attrs, np.moveaxis(x, 1, -1), window), taps(attrs, numbers, window, -1)
    for (_, seen), (_, own) in zip(*both):
        best = (own >= 0) & (found < 0) & ((seen == greatest) | (seen != seen))
        found = np.where(best, own, found)
    return values, np.moveaxis(found, -1, 1)


POOLS = (
    Sample(((2, 3, 7, 9),), {"window": (3, 2), "strides": 2, "low": (1, 0), "high": (1, 1)}),
    Sample(((2, 5, 17),), {"window": 3, "dilation": 2}), Sample(((1, 2, 4, 5, 6),), {"window": 2, "strides": (2, 1, 2)}),
    Sample(((2, 9, 8, 33),), {"window": 3, "strides": (1, 2), "low": 1, "high": 1, "channels_last": True}),
    Sample(((0, 2, 5),), {"window": 2}), Sample(((1, 2, 3),), {"window": 2, "low": 3, "high": 1}),
)  # fmt: skip
max_pool = op(
    "max_pool", kind=Kind.COMPOSITE, infer=_pooled, attrs=PoolAttrs, dtypes="fiu", reference=_max_array, decompose=_max_pool,
    last=lambda a, step, x: _last(max_pool, a, x), samples=POOLS,
    doc="The greatest element of each window of x [batch, channels, *spatial], or with channels_last [batch, *spatial, "
    "channels]; NaN if one is. Padding is -inf, or the least integer. Windows are `strides` apart, by default 1.",
)  # fmt: skip
max_pool_indices = op(
    "max_pool_indices", kind=Kind.COMPOSITE, infer=_indices_shape, attrs=IndexPoolAttrs, dtypes="fiu",
    reference=_indices_array, decompose=_max_indices, padded=_indices_padded,
    samples=tuple(s for s in POOLS if "channels_last" not in (s.attrs or {})),
    doc="max_pool of x [batch, channels, *spatial], and the i64 position of each maximum in x, row-major: of the first of "
    "several that are equal, or of the first NaN; -1 for a window of padding alone.",
)  # fmt: skip


# -- averages and norms --------------------------------------------------------------------------------------------


def _counts(attrs: AvgPoolAttrs, dims: Ints) -> np.ndarray:
    """The divisor of each window: [*positions]."""
    window, counted = attrs.each("window", len(dims)), np.ones(dims)
    if attrs.count_padding:
        low, high = (attrs.each(name, len(dims)) for name in ("low", "high"))
        counted = np.pad(counted, tuple(zip(low, high)), constant_values=1)
        attrs = AvgPoolAttrs(window, attrs.strides, (0,), attrs.extra, attrs.dilation)
    return np.sum([seen for _, seen in taps(attrs, counted[None], window)], axis=0)[0]


def _avg_pool(attrs: AvgPoolAttrs, x: Value) -> Value:
    seen, axes = _windows(attrs, x)
    counts = _counts(attrs, x.shape.static[attrs.first : attrs.first + x.rank - 2])
    counts = counts.reshape(1) if counts.size == 1 else counts[..., None] if attrs.first == 1 else counts
    if (counts == counts.flat[0]).all():
        counts = counts.flat[0]
    compute = x.dtype.compute
    return (sum(seen.astype(compute), axis=axes) / constant(np.asarray(counts, compute.numpy))).astype(x.dtype)


def _avg_array(attrs: AvgPoolAttrs, x: np.ndarray) -> np.ndarray:
    x = _spatial_first(attrs, x).astype(np.float64)
    window = attrs.each("window", x.ndim - 2)
    total = np.sum([seen for _, seen in taps(attrs, x, window)], axis=0)
    with np.errstate(invalid="ignore"):
        return _as_given(attrs, total / _counts(attrs, x.shape[1:-1])[..., None])


def _lp_pool(attrs: LpPoolAttrs, x: Value) -> Value:
    seen, axes = _windows(attrs, x)
    seen = seen.astype(x.dtype.compute)
    if attrs.p == 2:
        out = sqrt(sum(seen * seen, axis=axes))
    elif attrs.p == 1:
        out = sum(abs(seen), axis=axes)
    else:
        out = pow(sum(pow(abs(seen), attrs.p), axis=axes), 1 / attrs.p)
    return out.astype(x.dtype)


def _lp_array(attrs: LpPoolAttrs, x: np.ndarray) -> np.ndarray:
    x = np.abs(_spatial_first(attrs, x).astype(np.float64)) ** attrs.p
    total = np.sum([seen for _, seen in taps(attrs, x, attrs.each("window", x.ndim - 2))], axis=0)
    return _as_given(attrs, total ** (1 / attrs.p))


avg_pool = op(
    "avg_pool", kind=Kind.COMPOSITE, infer=_pooled, attrs=AvgPoolAttrs, reference=_avg_array, decompose=_avg_pool,
    last=lambda a, step, x: _last(avg_pool, a, x),
    samples=(
        *POOLS[:5], Sample(((2, 3, 6, 9),), {"window": (3, 2), "strides": 2, "low": 1, "high": 1, "count_padding": True}),
        Sample(((1, 2, 6),), {"window": 3, "strides": 2, "low": 1, "high": 1, "extra": 1, "count_padding": True}),
    ),
    doc="The mean of each window, as max_pool takes them. Padding is 0, and does not count in the divisor unless "
    "`count_padding` says so. `extra` is more padding after each dim, which never counts: for windows that begin in the padding. "
    "A window in which nothing counts is NaN.",
)  # fmt: skip
lp_pool = op(
    "lp_pool", kind=Kind.COMPOSITE, infer=_pooled, attrs=LpPoolAttrs, reference=_lp_array, decompose=_lp_pool,
    last=lambda a, step, x: _last(lp_pool, a, x),
    samples=(*POOLS[:4], Sample(((1, 2, 6),), {"window": 3, "p": 1.0}), Sample(((1, 2, 6),), {"window": 3, "p": 3.0})),
    doc="The p-norm of each window, as max_pool takes them: the p-th root of the sum of |x| to the p. Padding is 0.",
)  # fmt: skip
