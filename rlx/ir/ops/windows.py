"""Sliding windows over some axes, as a view; the base of convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.contexts import Applied, Coords, Lowering
from rlx.ir.declare import op
from rlx.ir.kernel import Expr, k
from rlx.ir.layout import Layout
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.rules import axis_of, static_dim
from rlx.ir.shape import DimLike, Shape


class WindowsAttrs(Attrs):
    """For each of `axes` the elements of a window, the distance of two windows, and that of two elements of one."""

    window: tuple[int, ...]
    axes: tuple[int, ...]
    strides: tuple[int, ...] = ()  # (): 1
    dilation: tuple[int, ...] = ()  # (): 1

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


def _axes(attrs: WindowsAttrs, rank: int) -> tuple[int, ...]:
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
