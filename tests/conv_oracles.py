"""Convolutions and pools by torch.nn.functional, in float64 (integers in int64): see op_oracles."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
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


def conv_transpose(attrs: Any, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """The whole result, cut or with zeros around, and the bias."""
    if attrs.channels_last:
        x, w = x.movedim(-1, 1), w.movedim((-2, -1), (0, 1))
    spatial, function = x.ndim - 2, (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[x.ndim - 3]
    each = {"stride": attrs.each("strides", spatial), "dilation": attrs.each("dilation", spatial), "groups": attrs.groups}
    whole = function(x.double(), w.double(), **each)
    ends = [-n for both in reversed([*zip(attrs.each("low", spatial), attrs.each("high", spatial))]) for n in both]
    out = F.pad(F.pad(whole, [max(n, 0) for n in ends]), [min(n, 0) for n in ends]).to(x.dtype)
    out = out if b is None else out + b.reshape(-1, *(1,) * spatial)
    return out.movedim(1, -1) if attrs.channels_last else out


def max_pool(case: Any, attrs: Any, x: np.ndarray) -> np.ndarray:
    """Floats by torch, integers as all windows at once."""
    spatial, integers = x.ndim - 2, x.dtype.kind != "f"
    facts = {name: attrs.each(name, spatial) for name in ("window", "strides", "dilation")}

    def run(attrs: Any, x: Tensor) -> Tensor:
        x = padded(attrs, x, np.iinfo(case.dtype.numpy).min if integers else -math.inf)
        if not integers:
            return (F.max_pool1d, F.max_pool2d, F.max_pool3d)[spatial - 1](
                x, facts["window"], facts["strides"], 0, facts["dilation"])  # fmt: skip
        return windows(SimpleNamespace(axes=range(2, x.ndim), **facts), x).amax(tuple(range(x.ndim, x.ndim + spatial)))

    return channels_first(run)(attrs, torch.from_numpy(np.array(x))).numpy()


def max_pool_indices(case: Any, attrs: Any, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """One window after the other."""
    spatial = x.ndim - 2
    low, strides, dilation, window = (attrs.each(n, spatial) for n in ("low", "strides", "dilation", "window"))
    values = max_pool(case, SimpleNamespace(each=attrs.each, channels_last=False), x)
    indices = np.full(values.shape, -1)
    for at in np.ndindex(*values.shape):
        for offset in np.ndindex(*window):
            where = [p * s - a + o * d for p, s, a, o, d in zip(at[2:], strides, low, offset, dilation)]
            if all(0 <= w < n for w, n in zip(where, x.shape[2:])) and indices[at] < 0:
                found = x[(*at[:2], *where)]
                if found == values[at] or found != found:
                    indices[at] = np.ravel_multi_index((*at[:2], *where), x.shape)
    return values, indices


@channels_first
def avg_pool(attrs: Any, x: Tensor) -> Tensor:
    """A sum of windows, by a convolution, divided by that of ones."""
    spatial, channels = x.ndim - 2, x.shape[1]
    window, zeros = attrs.each("window", spatial), SimpleNamespace(each=lambda name, n: (0,) * n)
    own = SimpleNamespace(each=lambda name, n: tuple(a + b for a, b in zip(attrs.each("high", n), attrs.each("extra", n)))
                          if name == "high" else attrs.each(name, n), groups=channels, channels_last=False)  # fmt: skip
    ones = torch.ones((channels, 1, *window), dtype=torch.float64)
    counted = torch.ones_like(x)
    if attrs.count_padding:
        counted = padded(attrs, counted, 1)
        ends = SimpleNamespace(each=lambda name, n: attrs.each("extra", n) if name == "high" else zeros.each(name, n))
        counted = padded(ends, counted)
        counting = SimpleNamespace(each=lambda name, n: zeros.each(name, n) if name in ("low", "high") else attrs.each(name, n),
                                   groups=channels, channels_last=False)  # fmt: skip
    else:
        counting = own
    return conv(own, x, ones) / conv(counting, counted, ones)


@channels_first
def lp_pool(attrs: Any, x: Tensor) -> Tensor:
    one = SimpleNamespace(each=attrs.each, groups=x.shape[1], channels_last=False)
    ones = torch.ones((x.shape[1], 1, *attrs.each("window", x.ndim - 2)), dtype=torch.float64)
    return conv(one, x.abs() ** attrs.p, ones) ** (1 / attrs.p)


def flatten_matmul(attrs: Any, x: Tensor, w: Tensor) -> Tensor:
    rows, depth = x.shape[attrs.batch : -attrs.axes], math.prod(x.shape[-attrs.axes :])
    out = torch.matmul(x.reshape(*x.shape[: attrs.batch], math.prod(rows), depth), w)
    return out.reshape(*x.shape[: -attrs.axes], w.shape[-1])


ORACLES: dict[str, Callable[..., Any]] = {
    "windows": of_tensors(windows), "flatten_matmul": of_tensors(flatten_matmul), "conv": of_tensors(conv),
    "conv_transpose": of_tensors(conv_transpose),
    "max_pool": max_pool, "max_pool_indices": max_pool_indices, "avg_pool": of_tensors(avg_pool),
    "lp_pool": of_tensors(lp_pool),
}  # fmt: skip
