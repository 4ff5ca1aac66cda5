"""Activations and other elementwise composites."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np

from rlx.errors import AttributeValueError
from rlx.ir.declare import op
from rlx.ir.dtype import DType, as_dtype
from rlx.ir.node import Value
from rlx.ir.op import Attrs, Kind, Number, Sample
from rlx.ir.ops.elementwise import UNARY, abs, equal, erf, exp, log, maximum, minimum, tanh, where
from rlx.ir.ops.rules import held, same, widened
from rlx.ir.shape import Shape

SQRT_HALF = math.sqrt(0.5)
SQRT_2_OVER_PI = math.sqrt(2 / math.pi)
_erfc = np.vectorize(math.erfc, otypes=[np.float64])


def composite(name: str, reference: Any, decompose: Any, **facts: Any) -> Any:
    own = {"reference": reference, "decompose": widened(decompose)}
    return op(name, **{"kind": Kind.COMPOSITE, "infer": same, "samples": UNARY, **own, **facts})


# log1p and expm1 avoid cancellation near 0, expm1 of f64 alone by a division, which takes as long as the rest.


def _log1p(attrs: object, x: Value) -> Value:
    """log(u) + c / u, where u is 1 + x rounded and c what rounding lost: 1 / u is near 2 - u where c counts."""
    u = x + 1.0
    lost = (x - (u - 1.0)) * (2.0 - u)
    return where(equal(u, 1.0), x, log(u) + where(u < 2.0, lost, 0.0))


def _expm1(attrs: object, x: Value) -> Value:
    """tanh(x / 2) (exp(x) + 1). In f64, where log takes less time than tanh, W. Kahan's exp(x) - 1 over its rounding error."""
    u = exp(x)
    if x.dtype.itemsize < 8:
        return where(equal(u, 1.0), x, tanh(x * 0.5) * (u + 1.0))
    d = u - 1.0
    return where(equal(u, 1.0), x, where(equal(d, -1.0), d, where(equal(u, math.inf), u, d * (x / log(u)))))


log1p = composite(
    "log1p", lambda a, x: np.log1p(x), _log1p, doc="Natural logarithm of 1 + x, accurate near 0.",
    samples=(Sample(((3, 17),), low=-0.9, high=2.0), Sample(((33,),), low=-1e-4, high=1e-4), Sample(((),), low=0.5)),
)  # fmt: skip
expm1 = composite(
    "expm1", lambda a, x: np.expm1(x), _expm1, doc="exp(x) - 1, accurate near 0.",
    samples=(Sample(((3, 17),)), Sample(((33,),), low=-1e-4, high=1e-4), Sample(((),))),
)  # fmt: skip


def _sigmoid_array(attrs: object, x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


relu = composite("relu", lambda a, x: np.maximum(x, 0), lambda a, x: maximum(x, 0), dtypes="fi", doc="max(x, 0).")
sigmoid = composite("sigmoid", _sigmoid_array, lambda a, x: 1.0 / (exp(-x) + 1.0), doc="1 / (1 + exp(-x)).")
silu = composite("silu", lambda a, x: x * _sigmoid_array(a, x), lambda a, x: x / (exp(-x) + 1.0), doc="x * sigmoid(x).")
softplus = composite(
    "softplus", lambda a, x: np.logaddexp(x, 0), lambda a, x: maximum(x, 0.0) + log1p(exp(-abs(x))), doc="log(1 + exp(x))."
)


class GeluAttrs(Attrs):
    approximate: Literal["none", "tanh"] = "none"  # "none": exact, with erf; "tanh": the tanh formula

    def __post_init__(self) -> None:
        if self.approximate not in ("none", "tanh"):
            raise AttributeValueError(f"approximate is 'none' or 'tanh', got {self.approximate!r}")


def _gelu_array(attrs: GeluAttrs, x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    if attrs.approximate == "tanh":
        return 0.5 * x * (1 + np.tanh(SQRT_2_OVER_PI * (x + 0.044715 * x**3)))
    return 0.5 * x * _erfc(-x * SQRT_HALF) if x.size else x


def _gelu(attrs: GeluAttrs, x: Value) -> Value:
    if attrs.approximate == "tanh":
        return x * 0.5 * (tanh((x + x * x * x * 0.044715) * SQRT_2_OVER_PI) + 1.0)
    return x * 0.5 * (erf(x * SQRT_HALF) + 1.0)


gelu = composite(
    "gelu", _gelu_array, _gelu, attrs=GeluAttrs,
    samples=(
        Sample(((3, 17),)), Sample(((33,),), {"approximate": "tanh"}, low=-6.0, high=6.0), Sample(((2, 5),), low=-6, high=6),
    ),
    doc="x * Φ(x), with Φ the standard normal CDF. `approximate`: 'none' (exact, with erf) or 'tanh' (the tanh formula).",
)  # fmt: skip


class ClipAttrs(Attrs):
    low: Number = -math.inf
    high: Number = math.inf


def _clip_shape(attrs: ClipAttrs, x: Shape) -> Shape:
    _bounds(attrs, x.dtype)
    return x


def _bounds(attrs: ClipAttrs, dtype: DType) -> tuple[int | float | None, int | float | None]:
    """The bounds as elements of `dtype`; None for a bound that has no effect."""
    low = None if attrs.low == -math.inf else held(attrs.low, dtype, "bound")
    return low, None if attrs.high == math.inf else held(attrs.high, dtype, "bound")


def _clip(attrs: ClipAttrs, x: Value) -> Value:
    low, high = _bounds(attrs, x.dtype)
    x = x if low is None else maximum(x, low)
    return x if high is None else minimum(x, high)


def _clip_array(attrs: ClipAttrs, x: np.ndarray) -> np.ndarray:
    low, high = _bounds(attrs, as_dtype(x.dtype))
    x = x if low is None else np.maximum(x, x.dtype.type(low))
    return x if high is None else np.minimum(x, x.dtype.type(high))


clip = composite(
    "clip", _clip_array, _clip, dtypes="fi", attrs=ClipAttrs, infer=_clip_shape,
    samples=(Sample(((3, 17),), {"low": -1.0, "high": 1.0}), Sample(((33,),), {"low": 0.0}), Sample(((5,),), {"high": 1.0})),
    doc="min(max(x, low), high); NaN stays NaN. Either bound may be omitted.",
)  # fmt: skip
