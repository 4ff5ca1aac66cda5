"""Transposed convolution: convolutions whose channels are interleaved, without zeros between elements.

Element q * stride + r of a result, which is in *phase* r, reads the elements of the window that are `stride` apart, from the r-th
on. Phases with as many of them are one convolution, with the channels of each. Where the stride divides the window, all are one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.declare import op
from rlx.ir.dtype import holds
from rlx.ir.node import Value, constant
from rlx.ir.op import Kind, Sample
from rlx.ir.ops.contract import products
from rlx.ir.ops.conv import conv
from rlx.ir.ops.index import concat, gather, pad
from rlx.ir.ops.rules import static_dim
from rlx.ir.ops.view import broadcast_to, reshape, slice, transpose
from rlx.ir.ops.windows import ConvolutionAttrs, Ints, from_last, to_last
from rlx.ir.shape import DimLike, Shape


class ConvTransposeAttrs(ConvolutionAttrs):
    """low, high: elements that are cut off at the ends, or added."""

    def __post_init__(self) -> None:
        if not (self.low and self.high and min((*self.strides, self.groups), default=0) >= 1 <= min(self.dilation, default=0)):
            raise AttributeValueError(f"strides, dilation and groups are at least 1, got {self}")

    def sizes(self, dims: tuple[DimLike, ...], window: Ints) -> Ints:
        """The spatial dims of the result."""
        facts = (self.each(name, len(dims)) for name in ("strides", "dilation", "low", "high"))
        out = []
        for axis, (d, size, stride, dilation, low, high) in enumerate(zip(dims, window, *facts)):
            n = static_dim(d, f"spatial dim {axis}")
            if n < 1 or size < 1 or (n - 1) * stride + (size - 1) * dilation + 1 <= low + high:
                raise ShapeError(f"of spatial dim {axis}, {n} wide, {low} and {high} elements are cut off: nothing is left")
            out.append((n - 1) * stride + (size - 1) * dilation + 1 - low - high)
        return tuple(out)


def _shape(attrs: ConvTransposeAttrs, x: Shape, w: Shape, b: Shape | None = None) -> Shape:
    if x.rank not in (3, 4, 5) or w.rank != x.rank:
        raise ShapeError(f"x and w have 1 to 3 spatial dims, and two others, got {x} and {w}")
    last, groups = attrs.channels_last, attrs.groups
    (inner, out), window = (w.dims[-2:], w.dims[:-2]) if last else (w.dims[:2], w.dims[2:])
    channels, spatial = (x.dims[-1], x.dims[1:-1]) if last else (x.dims[1], x.dims[2:])
    if inner != channels or (groups > 1 and static_dim(inner, "a convolution of groups") % groups):
        raise ShapeError(f"x has {channels} channels, the weights take {inner}, in {groups} groups")
    every, dtype = out * groups, products(x.dtype, w.dtype)
    sizes = attrs.sizes(spatial, tuple(static_dim(d, "a window") for d in window))
    if b is not None and b.dims != (every,):
        raise ShapeError(f"the bias must be [{every}], got {b}")
    if b is not None and not holds(dtype, b.dtype):
        raise DTypeError(f"the result is {dtype}, which does not hold a bias of {b.dtype}; cast it")
    return Shape((x.dims[0], *sizes, every) if last else (x.dims[0], every, *sizes), dtype)


class _Phases(NamedTuple):
    """Phases of one axis that read the same elements of x: `taps[j][i]` is the element of the window that phase `phases[i]`
    multiplies by x[q - back + j * apart]."""

    phases: Ints
    taps: tuple[Ints, ...]
    back: int
    apart: int


def _phases(window: int, stride: int, dilation: int) -> list[_Phases]:
    """The phases 0 … stride - 1 of an axis, together where possible."""
    found: dict[tuple[int, int], list[int]] = {}
    common = math.gcd(stride, dilation)
    own = {r: [k for k in range(window) if k * dilation % stride == r] for r in range(stride)}
    for r, taps in own.items():
        found.setdefault((len(taps), taps[-1] * dilation // stride if taps else 0), []).append(r)
    return [
        _Phases(tuple(rs), tuple(zip(*(own[r][::-1] for r in rs))), back, dilation // common) for (_, back), rs in found.items()
    ]


def _conv_transpose(attrs: ConvTransposeAttrs, x: Value, w: Value, b: Value | None = None) -> Value:
    if not attrs.channels_last:
        made = _last(attrs, 1, x, w, *([] if b is None else [b]))
        assert made is not None
        return made
    (batch, *dims, _), (*window, _, out), count = x.dims, w.shape.static, w.rank - 2
    steps, dilation, low = (attrs.each(name, count) for name in ("strides", "dilation", "low"))
    sizes = attrs.sizes(tuple(dims), tuple(window))
    first = [a // s for a, s in zip(low, steps)]  # of the places that are needed; each has an element of each phase
    places = tuple(-(-(a + size) // s) - f for a, size, s, f in zip(low, sizes, steps, first))
    axes = [_phases(*facts) for facts in zip(window, steps, dilation)]

    def joined(chosen: tuple[_Phases, ...]) -> Value:
        """[batch, *places, group, *phases, out] of the chosen phases of the first axes, and all of the others."""
        if len(chosen) == count:
            return _convolved(attrs.groups, x, w, b, chosen, first, places)
        several, axis = axes[len(chosen)], count + 2 + len(chosen)
        parts = [joined((*chosen, one)) for one in several]
        made = concat(*parts, axis=axis) if len(parts) > 1 else parts[0]
        order = [r for one in several for r in one.phases]
        return made if order == sorted(order) else gather(made, constant(np.argsort(order)), axis=axis)

    beside = chain.from_iterable((1 + i, 2 + count + i) for i in range(count))
    made = transpose(joined(()), axes=(0, *beside, 1 + count, 2 + 2 * count))
    made = reshape(made, dims=(batch, *(n * s for n, s in zip(places, steps)), attrs.groups * out))
    return _cut(made, [a - f * s for a, f, s in zip(low, first, steps)], sizes)


def _convolved(
    groups: int, x: Value, w: Value, b: Value | None, phases: tuple[_Phases, ...], first: Sequence[int], places: Ints
) -> Value:
    """[batch, *places, group, *phases, out]: one convolution, with mirrored weights [*taps, channels / groups, ...]."""
    (batch, *_), (channels, out), count = x.dims, w.shape.static[-2:], len(phases)
    steps, taps = tuple(len(p.phases) for p in phases), tuple(len(p.taps) for p in phases)
    dtype = products(x.dtype, w.dtype)
    bias = constant(0, dtype) if b is None else reshape(b, dims=(groups, *(1,) * count, out)).astype(dtype)
    if 0 in taps:  # nothing is added there
        return broadcast_to(bias, dims=(batch, *places, groups, *steps, out))
    for axis, p in enumerate(phases):
        w = gather(w, constant(np.array(p.taps)), axis=2 * axis)
    w = reshape(w, dims=(*chain.from_iterable(zip(taps, steps)), groups, channels // groups, out))
    order = (*range(0, 2 * count, 2), 2 * count + 1, 2 * count, *range(1, 2 * count, 2), 2 * count + 2)
    w = reshape(transpose(w, axes=order), dims=(*taps, channels // groups, groups * math.prod(steps) * out))
    seen = _cut(x, [f - p.back for f, p in zip(first, phases)], [n + (len(p.taps) - 1) * p.apart for n, p in zip(places, phases)])
    biases: list[Any] = [] if b is None else [reshape(broadcast_to(bias, dims=(groups, *steps, out)), dims=(-1,))]
    made = conv(seen, w, *biases, dilation=tuple(p.apart for p in phases), groups=groups, channels_last=True)
    return reshape(made, dims=(batch, *places, groups, *steps, out))


def _cut(x: Value, first: Sequence[int], sizes: Sequence[int]) -> Value:
    """`sizes` elements of each spatial dim of x [batch, *spatial, channels] from `first` on, zeros where it has none."""
    dims: Any = x.dims[1:-1]
    starts = [min(max(f, 0), d) for f, d in zip(first, dims)]
    stops = [max(start, min(f + n, d)) for start, f, n, d in zip(starts, first, sizes, dims)]
    end = 2**63 - 1
    x = slice(x, starts=(0, *starts, 0), stops=(end, *stops, end))
    low = [min(max(-f, 0), n) for f, n in zip(first, sizes)]
    high = [n - a - (stop - start) for n, a, start, stop in zip(sizes, low, starts, stops)]
    return pad(x, low=(0, *low, 0), high=(0, *high, 0)) if any(low + high) else x


def _last(attrs: ConvTransposeAttrs, step: int, x: Value, w: Value, *b: Value) -> Value | None:
    """OpDef.last: also of the weights."""
    if attrs.channels_last:
        return None
    w = transpose(w, axes=(*range(2, w.rank), 0, 1))
    return from_last(conv_transpose(to_last(x, False), w, *b, **{**vars(attrs), "channels_last": True}), False)


def _array(attrs: ConvTransposeAttrs, x: np.ndarray, w: np.ndarray, b: np.ndarray | None = None) -> np.ndarray:
    """One element of the window after the other is added to the whole result, which is then cut; f64 or integers."""
    dtype = np.float64 if x.dtype.kind == "f" else x.dtype if x.dtype == w.dtype else np.int32
    x, w = x.astype(dtype), w.astype(dtype)
    if not attrs.channels_last:
        x, w = np.moveaxis(x, 1, -1), np.moveaxis(w, (0, 1), (-2, -1))
    (batch, *dims, channels), (*window, _, out), groups = x.shape, w.shape, attrs.groups
    strides, dilation, low, high = (attrs.each(name, len(dims)) for name in ("strides", "dilation", "low", "high"))
    sizes, before = attrs.sizes(tuple(dims), tuple(window)), [max(-n, 0) for n in low]
    room = [size + max(a, 0) + max(c, 0) for size, a, c in zip(sizes, low, high)]
    whole, x = np.zeros((batch, *room, groups * out), dtype), x.reshape(batch, *dims, groups, 1, channels // groups)
    for at in np.ndindex(*window):
        here = (f + i * d for f, i, d in zip(before, at, dilation))
        to = (np.s_[start : start + (n - 1) * s + 1 : s] for start, n, s in zip(here, dims, strides))
        added = x @ w[at].reshape(groups, channels // groups, out)
        whole[:, *to] += added.reshape(batch, *dims, groups * out)
    kept = (np.s_[max(a, 0) : max(a, 0) + size] for a, size in zip(low, sizes))
    whole = whole[:, *kept] + (0 if b is None else b.astype(dtype))
    return whole if attrs.channels_last else np.moveaxis(whole, -1, 1)


conv_transpose = op(
    "conv_transpose", kind=Kind.COMPOSITE, infer=_shape, attrs=ConvTransposeAttrs, arity=(2, 3), dtypes="fiu",
    reference=_array, decompose=_conv_transpose, last=_last,
    samples=(
        Sample(((2, 3, 4, 5), (3, 2, 3, 2), (2,)), {"strides": 2, "low": (1, 0), "high": (0, -1)}),
        Sample(((1, 4, 9), (4, 3, 4), (6,)), {"strides": 3, "groups": 2, "dilation": 2, "low": 5, "high": 2}),
        Sample(((2, 3, 4, 33), (2, 2, 33, 17)), {"strides": 2, "channels_last": True}),
        Sample(((1, 5, 6, 4), (3, 3, 4, 1), (4,)), {"groups": 4, "low": 1, "high": 1, "dilation": (1, 2), "channels_last": True}),
        Sample(((1, 2, 2, 3, 2), (2, 3, 2, 1, 3)), {"strides": (2, 1, 2)}), Sample(((0, 2, 5), (2, 3, 2))),
        Sample(((1, 2, 3), (2, 1, 2)), {"strides": 4, "low": -3, "high": 6}),
    ),
    doc="Transposed convolution over 1 to 3 spatial dims: x [batch, channels, *spatial], w [channels, out / groups, *window], an "
    "optional bias b [out]; with channels_last x [batch, *spatial, channels] and w [*window, channels, out / groups]. The "
    "windows that it adds up are `strides` apart. `low` and `high` elements are cut off before and after each spatial dim; a "
    "negative number adds elements, which have the bias alone. The dtypes are those of conv.",
)  # fmt: skip
