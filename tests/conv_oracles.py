"""What convolutions and pools mean according to torch.nn.functional, in float64 (integers in int64): see op_oracles."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

Tensor = torch.Tensor


def of_tensors(fn: Callable[..., Any]) -> Callable[..., Any]:
    """An oracle of torch tensors: fn(attrs, *tensors)."""

    def run(case: Any, attrs: Any, *arrays: np.ndarray) -> Any:
        out = fn(attrs, *(torch.from_numpy(np.array(a)) for a in arrays))
        return tuple(t.numpy() for t in out) if isinstance(out, tuple) else out.numpy()

    return run


def channels_first(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """fn of operands with channels first, for either layout."""

    def run(attrs: Any, x: Tensor, *others: Tensor) -> Tensor:
        if not attrs.channels_last:
            return fn(attrs, x, *others)
        weights = [w.movedim((-1, -2), (0, 1)) if w.ndim > 1 else w for w in others]
        return fn(attrs, x.movedim(-1, 1), *weights).movedim(1, -1)

    return run


def padded(attrs: Any, x: Tensor, value: float = 0) -> Tensor:
    """x with `low` and `high` around its spatial dims."""
    ends = zip(attrs.each("low", x.ndim - 2), attrs.each("high", x.ndim - 2))
    return F.pad(x, [n for both in reversed(list(ends)) for n in both], value=value)


def windows(attrs: Any, x: Tensor) -> Tensor:
    for axis, size, stride, dilation in zip(attrs.axes, attrs.window, attrs.strides, attrs.dilation):
        axis = axis % (x.ndim - attrs.axes.index(axis)) if axis < 0 else axis
        x = x.unfold(axis, (size - 1) * dilation + 1, stride)[..., ::dilation]
    return x


@channels_first
def conv(attrs: Any, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    spatial, function = x.ndim - 2, (F.conv1d, F.conv2d, F.conv3d)[x.ndim - 3]
    each = {"stride": attrs.each("strides", spatial), "dilation": attrs.each("dilation", spatial), "groups": attrs.groups}
    out = function(padded(attrs, x).double(), w.double(), None if b is None else b.double(), **each)
    return out.to(x.dtype)  # sums of integers are exact in f64 here


def flatten_matmul(attrs: Any, x: Tensor, w: Tensor) -> Tensor:
    rows, depth = x.shape[attrs.batch : -attrs.axes], math.prod(x.shape[-attrs.axes :])
    out = torch.matmul(x.reshape(*x.shape[: attrs.batch], math.prod(rows), depth), w)
    return out.reshape(*x.shape[: -attrs.axes], w.shape[-1])


ORACLES: dict[str, Callable[..., Any]] = {
    "windows": of_tensors(windows), "flatten_matmul": of_tensors(flatten_matmul), "conv": of_tensors(conv),
}  # fmt: skip
