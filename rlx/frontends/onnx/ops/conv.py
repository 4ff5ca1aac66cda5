"""Convolutions. Spatial dims follow batch and channels."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlx.frontends.onnx import quantities
from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.node import Value

Ints = tuple[int, ...]


class Windows(NamedTuple):
    """Where the windows of a node are, by spatial dim. `extra`: padding behind the last window that ceil_mode asks for."""

    window: Ints
    strides: Ints
    low: Ints
    high: Ints
    extra: Ints
    dilation: Ints

    @property
    def facts(self) -> dict[str, Any]:
        """The attributes of rlx's ops, apart from the window."""
        high = tuple(map(sum, zip(self.high, self.extra)))
        return {"strides": self.strides, "low": self.low, "high": high, "dilation": self.dilation}


def spatial(n: Call) -> Ints:
    """The dims of operand 0 behind batch and channels."""
    return tuple(known_dim(n, 0, i) for i in range(2, n.rank(0)))


def windows(n: Call, window: Ints) -> Windows:
    """By the attributes strides, dilations, pads, auto_pad and ceil_mode."""
    count = len(window)
    sizes = spatial(n)
    if tuple(n.attr("kernel_shape", window)) != tuple(window):
        n.refuse(f"kernel_shape {list(n.attr('kernel_shape'))} is not that of the weight, {list(window)}")
    if len(sizes) != count:
        n.refuse(f"the window has {count} dims, the operand has {len(sizes)} spatial dims")
    strides, dilation = tuple(n.attr("strides", (1,) * count)), tuple(n.attr("dilations", (1,) * count))
    spans = [(w - 1) * d + 1 for w, d in zip(window, dilation)]
    how = n.attr("auto_pad", "NOTSET")
    if how in ("SAME_UPPER", "SAME_LOWER"):
        whole = [max(0, (-(-size // s) - 1) * s + span - size) for size, s, span in zip(sizes, strides, spans)]
        small, large = tuple(p // 2 for p in whole), tuple(p - p // 2 for p in whole)
        low, high = (small, large) if how == "SAME_UPPER" else (large, small)
    else:
        pads = n.attr("pads", (0,) * (2 * count)) if how == "NOTSET" else (0,) * (2 * count)
        low, high = tuple(pads[:count]), tuple(pads[count:])
    extra = [0] * count
    for i, (size, s, span) in enumerate(zip(sizes, strides, spans) if n.attr("ceil_mode", 0) else ()):
        room = size + low[i] + high[i] - span
        places = -(-room // s) + 1
        if (places - 1) * s >= size + low[i]:  # a window that starts behind the operand is left out
            places -= 1
        extra[i] = max(0, (places - 1) * s - room)
    return Windows(tuple(window), strides, low, high, tuple(extra), dilation)


@handler("Conv")
def conv(n: Call) -> Value:
    operands: list[Any] = [n.value(i) for i in range(3) if n.has(i)]
    groups, facts = n.attr("group", 1), windows(n, n.sizes(1)[2:]).facts
    found = quantities.conv_of(n, operands[0], operands[1], n.maybe(2), groups, facts)
    return ops.conv(*operands, groups=groups, **facts) if found is None else found


@handler("ConvTranspose")
def conv_transpose(n: Call) -> Value:
    x, window = n.value(0), n.sizes(1)[2:]
    count, sizes = len(window), spatial(n)
    strides, dilation = n.attr("strides", (1,) * count), n.attr("dilations", (1,) * count)
    more = n.attr("output_padding", (0,) * count)
    spans = [(w - 1) * d + 1 for w, d in zip(window, dilation)]
    low, high = _cut(n, [(d - 1) * s + span + m for d, s, span, m in zip(sizes, strides, spans, more)])
    facts: dict[str, Any] = {"strides": strides, "low": low, "high": [a - m for a, m in zip(high, more)], "dilation": dilation}
    operands: list[Any] = [n.value(i) for i in range(1, 3) if n.has(i)]
    return ops.conv_transpose(x, *operands, groups=n.attr("group", 1), **facts)


def _cut(n: Call, whole: list[int]) -> tuple[list[int], list[int]]:
    """The elements that are cut off before and after each spatial dim of the `whole` result of a transposed convolution."""
    count, how = len(whole), n.attr("auto_pad", "NOTSET")
    wanted = n.attr("output_shape", None)
    if wanted is None and how in ("NOTSET", "VALID"):
        pads = n.attr("pads", (0,) * (2 * count)) if how == "NOTSET" else (0,) * (2 * count)
        return list(pads[:count]), list(pads[count:])
    wanted = wanted or [d * s for d, s in zip(spatial(n), n.attr("strides", (1,) * count))]
    total = [w - size for w, size in zip(whole, wanted[-count:])]
    small, large = [t // 2 for t in total], [t - t // 2 for t in total]
    return (small, large) if how == "SAME_UPPER" else (large, small)


@handler("DeformConv", since=19)
def deformable_conv(n: Call) -> Value:
    window = n.sizes(1)[2:]
    if len(window) != 2:
        n.refuse(f"a deformable convolution over {len(window)} dims is not supported: over 2 it is")
    mask, bias = (n.value(i) if n.has(i) else None for i in (4, 3))
    groups = {"groups": n.attr("group", 1), "offset_groups": n.attr("offset_group", 1)}
    return functions.deform_conv(n.value(0), n.value(1), n.value(2), mask, bias, **windows(n, window).facts, **groups)
