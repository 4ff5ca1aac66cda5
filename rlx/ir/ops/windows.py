"""Sliding windows over some axes, as a view, and what convolutions and pools share: their attributes, and padded windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.contexts import Applied, Coords, Lowering
from rlx.ir.declare import op
from rlx.ir.kernel import Expr, k
from rlx.ir.layout import Layout
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Kind, Number, Sample
from rlx.ir.ops.index import pad
from rlx.ir.ops.rules import axis_of, static_dim
from rlx.ir.ops.view import transpose
from rlx.ir.shape import DimLike, Shape

Ints = tuple[int, ...]


class WindowsAttrs(Attrs):
    """For each of `axes` the elements of a window, the distance of two windows, and that of two elements of one."""

    window: Ints
    axes: Ints
    strides: Ints = ()  # (): 1
    dilation: Ints = ()  # (): 1

    def __post_init__(self) -> None:
        for name in ("strides", "dilation"):
            object.__setattr__(self, name, getattr(self, name) or (1,) * len(self.axes))
        for name, values in (("window", self.window), ("strides", self.strides), ("dilation", self.dilation)):
            if len(values) != len(self.axes) or min(values, default=1) < 1:
                raise AttributeValueError(f"{name} must have {len(self.axes)} numbers of at least 1, one per axis, got {values}")


def positions(size: DimLike, window: int, stride: int, dilation: int, label: str) -> int:
    """The number of windows of this many elements in a dim of `size`; ShapeError if there is no place for one."""
    if window < 1:
        raise ShapeError(f"{label} has no elements")
    span = (window - 1) * dilation + 1
    if (room := static_dim(size, label) - span) < 0:
        raise ShapeError(f"{label} spans {span} elements, the dim has {size}")
    return room // stride + 1


def _axes(attrs: WindowsAttrs, rank: int) -> Ints:
    axes = tuple(axis_of(a, rank) for a in attrs.axes)
    if len(set(axes)) != len(axes):
        raise AttributeValueError(f"axes {attrs.axes} name one dim twice")
    return axes


def _windows_shape(attrs: WindowsAttrs, x: Shape) -> Shape:
    dims = list(x.dims)
    for axis, size, stride, dilation in zip(_axes(attrs, x.rank), attrs.window, attrs.strides, attrs.dilation):
        dims[axis] = positions(dims[axis], size, stride, dilation, f"a window along axis {axis}")
    return x.with_dims((*dims, *attrs.window))


def _windows_array(attrs: WindowsAttrs, x: np.ndarray) -> np.ndarray:
    spans = tuple((w - 1) * d + 1 for w, d in zip(attrs.window, attrs.dilation))
    every = np.lib.stride_tricks.sliding_window_view(x, spans, axis=attrs.axes)
    pick = [slice(None)] * x.ndim
    for axis, stride in zip(_axes(attrs, x.ndim), attrs.strides):
        pick[axis] = slice(None, None, stride)
    return every[(*pick, *(slice(None, None, d) for d in attrs.dilation))]


def _windows_element(ctx: Lowering, node: Applied[WindowsAttrs], result: int, coords: Coords) -> Expr:
    attrs, (x,) = node.attrs, node.inputs
    at = list(coords[: x.rank])
    for axis, stride, dilation, inside in zip(_axes(attrs, x.rank), attrs.strides, attrs.dilation, coords[x.rank :]):
        at[axis] = k.add(k.mul(at[axis], k.const(stride)), k.mul(inside, k.const(dilation)))
    return ctx.element(x, tuple(at))


def _windows_strided(attrs: WindowsAttrs, dims: Sequence[int], out: Sequence[int], layout: Layout, result: int = 0) -> Layout:
    strides, axes = list(layout.strides), _axes(attrs, len(dims))
    inside = [layout.strides[a] * d for a, d in zip(axes, attrs.dilation)]
    for axis, stride in zip(axes, attrs.strides):
        strides[axis] *= stride
    return Layout((*strides, *inside), layout.offset)


windows = op(
    "windows", kind=Kind.VIEW, infer=_windows_shape, attrs=WindowsAttrs, dtypes="fiub", reference=_windows_array,
    element=_windows_element, strided=_windows_strided,
    samples=(
        Sample(((2, 9, 17, 3),), {"window": (3, 2), "axes": (1, 2)}), Sample(((33,),), {"window": 4, "axes": 0, "strides": 4}),
        Sample(((3, 17),), {"window": (3,), "axes": (-1,), "strides": (2,), "dilation": (5,)}),
        Sample(((5, 2, 7),), {"window": (5, 1), "axes": (0, 2), "strides": (1, 3)}), Sample(((0, 4),), {"window": 2, "axes": 1}),
        Sample(((),), {"window": (), "axes": ()}),
    ),
    doc="Sliding windows along `axes`: each of these dims counts the windows, which are `strides` apart, and new last dims, one "
    "per axis, hold the elements of a window, which are `dilation` apart. A dim too small for a window is refused.",
)  # fmt: skip


# -- for convolutions and pools ------------------------------------------------------------------------------------


class SlidingAttrs(Attrs):
    """Attributes with one number for each spatial dim, or one for all."""

    def __post_init__(self) -> None:
        for name, least in {"window": 1, "strides": 1, "low": 0, "high": 0, "extra": 0, "dilation": 1}.items():
            if min(values := getattr(self, name, (least,)), default=-1) < least:
                raise AttributeValueError(f"{name} has numbers of at least {least}, got {values}")

    def each(self, name: str, spatial: int) -> Ints:
        """The attribute with one number for each spatial dim."""
        values: Ints = getattr(self, name)
        if len(values) not in (1, spatial):
            raise AttributeValueError(f"{name} must be one number, or one for each of the {spatial} spatial dims, got {values}")
        return values * spatial if len(values) == 1 else values

    def padding(self, spatial: int) -> tuple[Ints, Ints]:
        """The padding before and after each spatial dim."""
        return self.each("low", spatial), self.each("high", spatial)

    def positions(self, dims: Sequence[DimLike], window: Ints) -> Ints:
        """The number of windows along each spatial dim, its padding included."""
        facts = (*self.padding(len(dims)), self.each("strides", len(dims)), self.each("dilation", len(dims)))
        out = []
        for axis, (d, size, low, high, stride, dilation) in enumerate(zip(dims, window, *facts)):
            whole = static_dim(d, f"spatial dim {axis}") + low + high
            out.append(positions(whole, size, stride, dilation, f"the window along spatial dim {axis}, {size} wide,"))
        return tuple(out)


class ConvolutionAttrs(SlidingAttrs):
    """One number of strides, low, high or dilation counts for each spatial dim."""

    strides: Ints = (1,)
    low: Ints = (0,)
    high: Ints = (0,)
    dilation: Ints = (1,)
    groups: int = 1
    channels_last: bool = False


def to_last(x: Value, channels_last: bool) -> Value:
    """[batch, channels, *spatial] as [batch, *spatial, channels]."""
    return x if channels_last else transpose(x, axes=(0, *range(2, x.rank), 1))


def from_last(x: Value, channels_last: bool) -> Value:
    """The inverse of to_last."""
    return x if channels_last else transpose(x, axes=(0, x.rank - 1, *range(1, x.rank - 1)))


def windowed(attrs: SlidingAttrs, x: Value, window: Ints, first: int, value: Number = 0.0) -> Value:
    """The windows of the spatial dims, which begin with axis `first`: the axes of a window are in front of the last axis, which
    is read in order. `value` is in the padding."""
    spatial, rank = len(window), x.rank
    (low, high), rest = attrs.padding(spatial), (0,) * (rank - first - spatial)
    if any(low + high):
        x = pad(x, low=(*(0,) * first, *low, *rest), high=(*(0,) * first, *high, *rest), value=value)
    strides, dilation = attrs.each("strides", spatial), attrs.each("dilation", spatial)
    seen = windows(x, window=window, axes=tuple(range(first, first + spatial)), strides=strides, dilation=dilation)
    return transpose(seen, axes=(*range(rank - 1), *range(rank, seen.rank), rank - 1))


def taps(attrs: SlidingAttrs, x: np.ndarray, window: Ints, value: float = 0.0) -> Iterator[tuple[Ints, np.ndarray]]:
    """For references: each place in a window, and what all windows of x [batch, *spatial, ...] have there."""
    low, high = attrs.padding(len(window))
    places = attrs.positions(x.shape[1 : len(window) + 1], window)
    x = np.pad(x, ((0, 0), *zip(low, high), *((0, 0) for _ in x.shape[len(window) + 1 :])), constant_values=value)
    strides, dilation = attrs.each("strides", len(window)), attrs.each("dilation", len(window))
    for at in np.ndindex(*window):
        firsts = [i * d for i, d in zip(at, dilation)]
        yield at, x[:, *(np.s_[f : f + (n - 1) * s + 1 : s] for f, n, s in zip(firsts, places, strides))]
