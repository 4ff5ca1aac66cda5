"""Reductions, and composites built on one reduction.

`axis`: an int, ints, or () for all axes.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.ir.contexts import Applied, Padded, PaddingPass
from rlx.ir.declare import op
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Kind, Reduction, Sample
from rlx.ir.ops.elementwise import exp, log, maximum, sub
from rlx.ir.ops.rules import again, axes_of, axis_of, same, widened
from rlx.ir.shape import Shape


class ReduceAttrs(Attrs):
    axis: tuple[int, ...] = ()
    keepdims: bool = False


class VarianceAttrs(ReduceAttrs):
    correction: int = 0  # Bessel's correction: the sum of squares is divided by n - correction


class AxisAttrs(Attrs):
    axis: int = -1


def _reduced(attrs: ReduceAttrs, x: Shape) -> Shape:
    axes = axes_of(attrs.axis, x.rank)
    if attrs.keepdims:
        return x.with_dims(1 if i in axes else d for i, d in enumerate(x.dims))
    return x.with_dims(d for i, d in enumerate(x.dims) if i not in axes)


def _over(attrs: ReduceAttrs, x: np.ndarray) -> dict[str, Any]:
    return {"axis": axes_of(attrs.axis, x.ndim), "keepdims": attrs.keepdims}


def _wide(x: np.ndarray) -> np.ndarray:
    """Floats as f64, so that the reference itself adds no rounding error to a comparison."""
    return x.astype(np.float64) if x.dtype.kind == "f" else x


SAMPLES = (
    Sample(((3, 17),), {"axis": (1,)}), Sample(((3, 17),), {"axis": (0,), "keepdims": True}),
    Sample(((2, 33, 5),), {"axis": (0, 2)}), Sample(((2, 3, 4),)), Sample(((4, 1),), {"axis": (-1,)}),
    Sample(((0, 3),), {"axis": (0,)}),
)  # fmt: skip


def reduction(
    name: str, combine: np.ufunc, scalar: str, doc: str, dtypes: str = "fiu", parts: Callable[..., Value] | None = None
) -> Callable[..., Value]:
    def reference(attrs: ReduceAttrs, x: np.ndarray) -> np.ndarray:
        x = _wide(x)
        initial = _extreme(x, scalar) if combine.identity is None else combine.identity
        return combine.reduce(x, dtype=x.dtype, initial=initial, **_over(attrs, x))

    return op(
        name, kind=Kind.REDUCE, infer=_reduced, attrs=ReduceAttrs, reference=reference, dtypes=dtypes, samples=SAMPLES, doc=doc,
        parts=parts, reduce=lambda attrs, x: Reduction(scalar, axes_of(attrs.axis, x.rank), attrs.keepdims),
    )  # fmt: skip


def _pair_sums(node: Applied[ReduceAttrs], x: Value) -> Value:
    """Sums of pairs over the same axes; if none are given, over all but the last, which holds the pair."""
    axes = axes_of(node.attrs.axis, x.rank - 1)
    return again(node, x, axis=axes) if axes else x


def _extreme(x: np.ndarray, scalar: str) -> float:
    """The result of max or min over no elements: its identity element."""
    if x.dtype.kind == "f":
        return -np.inf if scalar == "max" else np.inf
    return np.iinfo(x.dtype).min if scalar == "max" else np.iinfo(x.dtype).max


_SUM = "Sum; 0 if empty. Integers wrap. Long f32 sums are computed in blocks: off by less than 2e-4, usually 1e-7, at any length."
_MAX = "Maximum; NaN if any element is NaN; of 0 and -0 either one. If empty: -inf, or the least integer."
_MIN = "Minimum; NaN if any element is NaN; of 0 and -0 either one. If empty: inf, or the greatest integer."
sum = reduction("sum", np.add, "add", _SUM, dtypes="fiuc", parts=_pair_sums)
prod = reduction("prod", np.multiply, "mul", "Product; 1 if empty.")
max = reduction("max", np.maximum, "max", _MAX)
min = reduction("min", np.minimum, "min", _MIN)
any = reduction("any", np.logical_or, "or", "True if any element is True; False if empty.", dtypes="b")
all = reduction("all", np.logical_and, "and", "True if all elements are True; True if empty.", dtypes="b")


def _count(attrs: ReduceAttrs, x: Value) -> int:
    return math.prod(x.shape.static[i] for i in axes_of(attrs.axis, x.rank))


def _mean(attrs: ReduceAttrs, x: Value, count: Value | None = None) -> Value:
    return sum(x, axis=attrs.axis, keepdims=attrs.keepdims) / (float(_count(attrs, x)) if count is None else count)


def _variance(attrs: VarianceAttrs, x: Value, count: Value | None = None) -> Value:
    d = x - mean(x, axis=attrs.axis, keepdims=True)
    least = builtins.max if count is None else maximum
    free = least((float(_count(attrs, x)) if count is None else count) - attrs.correction, 0.0)
    return sum(d * d, axis=attrs.axis, keepdims=attrs.keepdims) / free


def _of_rows(attrs: VarianceAttrs, x: Value) -> Value:
    """The variance over adjacent axes as over one, whose dim is kept until the end: one kernel can read a row or column again."""
    dims, axes = x.shape.static, axes_of(attrs.axis, x.rank)
    rows, along = x, axes
    if len(axes) > 1 and builtins.all(d == 1 or i in axes for i, d in enumerate(dims) if axes[0] < i < axes[-1]):
        rows = x.reshape((*dims[: axes[0]], _count(attrs, x), *dims[axes[-1] + 1 :]))
        along = axes[:1]
    found = widened(_variance)(replace(attrs, axis=along, keepdims=True), rows)
    return found if found.shape == (wanted := _reduced(attrs, x.shape)) else found.reshape(wanted.dims)


def _counted(decompose: Callable[..., Value]) -> Callable[..., Padded]:
    """OpDef.padded for ops that divide by the number of elements."""

    def padded(p: PaddingPass, attrs: ReduceAttrs, x: Value) -> Padded:
        count = p.count(x, axes_of(attrs.axis, x.rank), x.dtype.compute)
        return None if count is None else widened(lambda attrs, x: decompose(attrs, x, count))(attrs, x)

    return padded


mean = op(
    "mean", kind=Kind.COMPOSITE, infer=_reduced, attrs=ReduceAttrs, decompose=widened(_mean), samples=SAMPLES,
    padded=_counted(_mean),
    reference=lambda a, x: np.sum(_wide(x), **_over(a, x)) / np.float64(math.prod(x.shape[i] for i in axes_of(a.axis, x.ndim))),
    doc="Arithmetic mean; NaN if empty.",
)  # fmt: skip
variance = op(
    "variance", kind=Kind.COMPOSITE, infer=_reduced, attrs=VarianceAttrs, decompose=_of_rows,
    padded=_counted(_variance),
    reference=lambda a, x: _variance_array(a, _wide(x)),
    samples=(
        *SAMPLES[:4], Sample(((3, 17),), {"axis": (1,), "correction": 1}), Sample(((3, 1),), {"axis": (1,)}, low=100, high=101),
        Sample(((3, 1, 5, 4),), {"axis": (0, 2), "keepdims": True}),
    ),
    doc="Variance, computed in two passes; the divisor is n - correction.",
)  # fmt: skip


def _variance_array(attrs: VarianceAttrs, x: np.ndarray) -> np.ndarray:
    axes = axes_of(attrs.axis, x.ndim)
    count = math.prod(x.shape[i] for i in axes)
    centred = x - np.sum(x, axis=axes, keepdims=True) / np.float64(count)
    return np.sum(centred**2, axis=axes, keepdims=attrs.keepdims) / np.float64(builtins.max(count - attrs.correction, 0))


def _along(attrs: AxisAttrs, x: Shape) -> Shape:
    axis_of(attrs.axis, x.rank)
    return same(attrs, x)


def _softmax_array(attrs: AxisAttrs, x: np.ndarray) -> np.ndarray:
    e = np.exp(x - np.max(x, axis=attrs.axis, keepdims=True, initial=-np.inf))
    return e / np.sum(e, axis=attrs.axis, keepdims=True)


def _softmax(attrs: AxisAttrs, x: Value) -> Value:
    e = exp(sub(x, max(x, axis=attrs.axis, keepdims=True)))
    return e * (1.0 / sum(e, axis=attrs.axis, keepdims=True))  # one division per row; the sum is between 1 and the length


def _log_softmax(attrs: AxisAttrs, x: Value) -> Value:
    centred = sub(x, max(x, axis=attrs.axis, keepdims=True))
    return centred - log(sum(exp(centred), axis=attrs.axis, keepdims=True))


def _log_softmax_array(attrs: AxisAttrs, x: np.ndarray) -> np.ndarray:
    centred = x - np.max(x, axis=attrs.axis, keepdims=True, initial=-np.inf)
    return centred - np.log(np.sum(np.exp(centred), axis=attrs.axis, keepdims=True))


ROWS = (
    Sample(((3, 17),)), Sample(((2, 33, 5),), {"axis": 1}), Sample(((2, 3),), {"axis": 0}, low=-200.0, high=200.0),
    Sample(((4, 1),)), Sample(((0, 3),)),
)  # fmt: skip
softmax = op(
    "softmax", kind=Kind.COMPOSITE, infer=_along, attrs=AxisAttrs, decompose=widened(_softmax),
    reference=lambda a, x: _softmax_array(a, _wide(x)), samples=ROWS,
    doc="exp(x) / sum(exp(x)) along `axis`, stable: the maximum is subtracted first. A row of only -inf is NaN.",
)  # fmt: skip
log_softmax = op(
    "log_softmax", kind=Kind.COMPOSITE, infer=_along, attrs=AxisAttrs, decompose=widened(_log_softmax),
    reference=lambda a, x: _log_softmax_array(a, _wide(x)), samples=ROWS,
    doc="log(softmax(x)) along `axis`, computed without loss of precision.",
)  # fmt: skip
