"""Convolutions. Spatial dims follow batch and channels."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import ops
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


def windows(n: Call, window: Ints) -> Windows:
    """By the attributes strides, dilations, pads, auto_pad and ceil_mode."""
    count = len(window)
    sizes = tuple(known_dim(n, 0, 2 + i) for i in range(n.rank(0) - 2))
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
    return ops.conv(*operands, groups=n.attr("group", 1), **windows(n, n.sizes(1)[2:]).facts)
