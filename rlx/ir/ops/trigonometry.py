"""Tangent, and inverse trigonometric and hyperbolic functions."""

from __future__ import annotations

import math

import numpy as np

from rlx.ir.node import Value
from rlx.ir.op import Sample
from rlx.ir.ops.activation import composite, expm1, log1p
from rlx.ir.ops.elementwise import UNARY, abs, cos, exp, less, log, sign, sin, sqrt, where

WITHIN_ONE = (Sample(((3, 17),), low=-1.0, high=1.0), Sample(((33,),), low=-1e-3, high=1e-3), Sample(((5,),), low=0.99, high=1.0))
WIDE = (*UNARY, Sample(((33,),), low=-3e4, high=3e4), Sample(((7,),), low=-1e-3, high=1e-3))
FAR = 1e9  # from here on x² + 1 is x² in f64, and its square is finite in f32


def _atan(x: Value) -> Value:
    """atan x = π/2 - atan 1/x, and atan x = 2 atan(x / (1 + sqrt(1 + x²))): twice, so that |x| < 0.2; then the power series."""
    near = less(abs(x), 1.0)
    t = where(near, x, 1.0 / x)
    for _ in range(2):
        t = t / (sqrt(t * t + 1.0) + 1.0)
    square, terms = t * t, 13 if x.dtype.bits == 64 else 6
    series = square * 0.0 + 1.0 / (2 * terms - 1)
    for n in range(2 * terms - 3, 0, -2):
        series = 1.0 / n - series * square
    angle = series * t * 4.0
    return where(near, angle, sign(x) * (math.pi / 2) - angle)


def _like(x: Value, size: Value) -> Value:
    """`size`, a function of |x| that is odd in x, with the sign of x."""
    return where(less(x, 0.0), -size, size)


def _sinh(attrs: object, x: Value) -> Value:
    """From exp(|x| / 2), whose square is infinite only where the result is; below 1 from expm1, without cancellation."""
    half, near = exp(abs(x) * 0.5), expm1(abs(x))
    return _like(x, where(less(abs(x), 1.0), (near + near / (near + 1.0)) * 0.5, half * 0.5 * half - 0.5 / half / half))


def _cosh(attrs: object, x: Value) -> Value:
    half = exp(abs(x) * 0.5)
    return half * 0.5 * half + 0.5 / half / half


def _asinh(attrs: object, x: Value) -> Value:
    size = abs(x)
    near = log1p(size + size * size / (sqrt(size * size + 1.0) + 1.0))
    return _like(x, where(less(size, FAR), near, log(size) + math.log(2)))


def _acosh(attrs: object, x: Value) -> Value:
    over = x - 1.0
    return where(less(x, FAR), log1p(over + sqrt(over) * sqrt(over + 2.0)), log(x) + math.log(2))


def _atanh(attrs: object, x: Value) -> Value:
    return _like(x, log1p(abs(x) * 2.0 / (1.0 - abs(x))) * 0.5)


tan = composite("tan", lambda a, x: np.tan(x), lambda a, x: sin(x) / cos(x), doc="Tangent; x is in radians.")
asin = composite(
    "asin", lambda a, x: np.arcsin(x), lambda a, x: _atan(x / sqrt((1.0 - x) * (1.0 + x))), samples=WITHIN_ONE,
    doc="Angle in -π/2 … π/2 whose sine is x; NaN if |x| > 1.",
)  # fmt: skip
acos = composite(
    "acos", lambda a, x: np.arccos(x), lambda a, x: _atan(sqrt((1.0 - x) / (1.0 + x))) * 2.0, samples=WITHIN_ONE,
    doc="Angle in 0 … π whose cosine is x; NaN if |x| > 1.",
)  # fmt: skip
atan = composite(
    "atan", lambda a, x: np.arctan(x), lambda a, x: _atan(x), samples=WIDE, doc="Angle in -π/2 … π/2 whose tangent is x.",
)  # fmt: skip
sinh = composite("sinh", lambda a, x: np.sinh(x), _sinh, samples=(*UNARY, WIDE[-1]), doc="Hyperbolic sine.")
cosh = composite("cosh", lambda a, x: np.cosh(x), _cosh, doc="Hyperbolic cosine.")
asinh = composite("asinh", lambda a, x: np.arcsinh(x), _asinh, samples=WIDE, doc="Inverse hyperbolic sine.")
acosh = composite(
    "acosh", lambda a, x: np.arccosh(x), _acosh,
    samples=(Sample(((3, 17),), low=1.0, high=9.0), Sample(((33,),), low=1.0, high=3e4), Sample(((5,),), low=1.0, high=1.01)),
    doc="Inverse hyperbolic cosine, at least 0; NaN if x < 1.",
)  # fmt: skip
atanh = composite(
    "atanh", lambda a, x: np.arctanh(x), _atanh, samples=WITHIN_ONE, doc="Inverse hyperbolic tangent; NaN if |x| > 1.",
)  # fmt: skip
