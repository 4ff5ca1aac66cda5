"""Images of three channels with a fourth one of zeros, so that windows are read where they lie: those of integers as wide as the
target's products sum at a time."""

from __future__ import annotations

from rlx.compiler.compilation import Compilation
from rlx.ir.dtype import DType, f32, i8, u8
from rlx.ir.graph import Node, Value, apply
from rlx.ir.op import OPS
from rlx.ir.ops import copy, pad, transpose
from rlx.ir.ops.conv import ConvAttrs
from rlx.ir.ops.index import PadAttrs
from rlx.ir.ops.view import transposed_axes
from rlx.records import record

CONV = OPS["conv"]
FEWEST_PRODUCTS = 1 << 11  # of a window in step: with fewer, copying an image with another channel takes longer


@record
class Pixels:
    """`image`: padded; `axes`: those of it in the order [batch, *spatial, channels]; `around`: the number in its padding that
    windows meet, None where weights of zero do. `weights`: with those rows; `how`: the attributes of a convolution without
    padding."""

    image: Value
    axes: tuple[int, ...]
    around: float | None
    weights: Value
    how: dict[str, object]

    def conv(self, image: Value, *bias: Value, weights: Value | None = None) -> Node:
        """The convolution of the image, rounded to another dtype."""
        turned = transpose(image, axes=self.axes)
        turned = turned if self.axes == tuple(range(image.rank)) else copy(turned)
        return apply(CONV, (turned, self.weights if weights is None else weights, *bias), self.how).node  # type: ignore[union-attr]


def whole_pixels(node: Node, compilation: Compilation, dtype: DType, x: Value) -> Pixels | None:
    """A convolution of `x`, its first operand, whose products are of `dtype`. None: it has other channels, or the target has no
    such products."""
    w, attrs = node.inputs[1], node.attrs
    assert isinstance(attrs, ConvAttrs)
    if not attrs.channels_last or attrs.groups > 1 or x.dims[-1] != 3 or attrs.each("dilation", x.rank - 2)[-1] > 1:
        return None
    step = compilation.target.step("u8 i8" if dtype == u8 and w.dtype in (i8, f32) else dtype.name)
    if w.shape.num_elements * (step - 1) < FEWEST_PRODUCTS or not compilation.is_static(w.node):
        return None
    spatial, whole = x.rank - 2, dtype.is_int  # a weight of 0 times an infinite pixel would be NaN
    more = -w.shape.static[-3] % max(1, step // 4) if whole else 0
    low, high = ([0, *attrs.each(name, spatial), 0] for name in ("low", "high"))
    around = 0.0 if any(low + high) else None
    high[-2:] = high[-2] + more, 1
    axes = tuple(range(x.rank))
    if x.node.op is OPS["transpose"]:
        axes, x = transposed_axes(x.node), x.node.inputs[0]
    low, high = ([side[axes.index(axis)] for axis in range(x.rank)] for side in (low, high))
    value = 0.0
    if isinstance(given := x.node.attrs, PadAttrs) and (given.value == 0 or (whole and not any(attrs.low + attrs.high))):
        value = around = given.value
        low, high = ([a + b for a, b in zip(*sides)] for sides in ((low, given.low), (high, given.high)))
        x = x.node.inputs[0]
    w = pad(w, low=(0,) * w.rank, high=(*(0,) * (spatial - 1), more, 1, 0))
    how: dict[str, object] = {"strides": attrs.strides, "dilation": attrs.dilation, "channels_last": True}
    return Pixels(pad(x, low=low, high=high, value=value), axes, around, w, how)


__all__ = ["Pixels", "whole_pixels"]
