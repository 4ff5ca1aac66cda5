"""Tangent, and inverse trigonometric and hyperbolic functions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.ir.node import Value
from rlx.ir.op import Sample
from rlx.ir.ops.activation import composite, expm1, log1p
from rlx.ir.ops.elementwise import UNARY, abs, cos, exp, less, log, sign, sin, sqrt, where

WITHIN_ONE = (Sample(((3, 17),), low=-1.0, high=1.0), Sample(((33,),), low=-1e-3, high=1e-3), Sample(((5,),), low=0.99, high=1.0))
WIDE = (*UNARY, Sample(((33,),), low=-3e4, high=3e4), Sample(((7,),), low=-1e-3, high=1e-3))
FAR = 1e9  # from here on x² + 1 is x² in f64, and its square is finite in f32


# (f(x) / x - 1) / x² as polynomials in x², lowest degree first, which agree with it at Chebyshev's points of the ranges below
ASIN = (0.16666666337, 0.07500094544, 0.04459940152, 0.03110066276, 0.01714923828, 0.03369084729)
ATAN = (-0.33333331761, 0.19999540483, -0.14263955595, 0.10743731472, -0.06451928162)


def _by(coefficients: Sequence[float], x: Value, square: Value) -> Value:
    """x + x³ times the polynomial; -0.0 for -0.0."""
    made = square * coefficients[-1] + coefficients[-2]
    for c in coefficients[-3::-1]:
        made = made * square + c
    return (made * square + 0.0) * x + x


def _atan(x: Value) -> Value:
    """In f32 atan |x| = π/4 + atan((|x| - 1) / (|x| + 1)) and π/2 - atan 1/|x|, so that the polynomial's |x| < sqrt(2) - 1."""
    if x.dtype.bits == 64:
        return _atan_64(x)
    size = abs(x)
    some, large = less(math.sqrt(2) - 1, size), less(math.sqrt(2) + 1, size)
    top, bottom = where(large, -1.0, where(some, size - 1.0, x)), where(large, size, where(some, size + 1.0, 1.0))
    t = top / bottom
    angle = _by(ATAN, t, t * t)
    return where(some, _like(x, where(large, math.pi / 2, math.pi / 4) + angle), angle)


def _asin_parts(x: Value) -> tuple[Value, Value]:
    """|x| > 1/2, and there asin(sqrt((1 - |x|) / 2)), else asin x, in f32."""
    size = abs(x)
    far = less(0.5, size)
    square = where(far, (1.0 - size) * 0.5, size * size)
    return far, _by(ASIN, where(far, sqrt(square), x), square)


def _asin(attrs: object, x: Value) -> Value:
    """In f32 asin |x| = π/2 - 2 asin(sqrt((1 - |x|) / 2)) above 1/2."""
    if x.dtype.bits == 64:
        return _atan(x / sqrt((1.0 - x) * (1.0 + x)))
    far, angle = _asin_parts(x)
    return where(far, _like(x, math.pi / 2 - angle * 2.0), angle)


def _acos(attrs: object, x: Value) -> Value:
    if x.dtype.bits == 64:
        return _atan(sqrt((1.0 - x) / (1.0 + x))) * 2.0
    far, angle = _asin_parts(x)
    return where(far, where(less(x, 0.0), math.pi - angle * 2.0, angle * 2.0), math.pi / 2 - angle)


def _atan_64(x: Value) -> Value:
    """atan x = π/2 - atan 1/x, and atan x = 2 atan(x / (1 + sqrt(1 + x²))): twice, so that |x| < 0.2; then the power series."""
    near = less(abs(x), 1.0)
    t = where(near, x, 1.0 / x)
    for _ in range(2):
        t = t / (sqrt(t * t + 1.0) + 1.0)
    square, terms = t * t, 13
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
    "asin", lambda a, x: np.arcsin(x), _asin, samples=WITHIN_ONE, doc="Angle in -π/2 … π/2 whose sine is x; NaN if |x| > 1.",
)  # fmt: skip
acos = composite(
    "acos", lambda a, x: np.arccos(x), _acos, samples=WITHIN_ONE, doc="Angle in 0 … π whose cosine is x; NaN if |x| > 1.",
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
