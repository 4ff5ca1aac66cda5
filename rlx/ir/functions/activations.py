"""Activations made of other ops. Narrow floats are computed in f32 and rounded once."""

from __future__ import annotations

from rlx.ir import ops
from rlx.ir.functions.declare import function, widened
from rlx.ir.node import Operand, Value


@function
@widened
def leaky_relu(x: Value, slope: float = 0.01) -> Value:
    """x where x > 0, else x * slope."""
    return ops.where(x > 0, x, x * slope)


@function
@widened
def prelu(x: Value, slope: Operand) -> Value:
    """x where x > 0, else x * slope; the slope broadcasts, and may be an operand of the same dtype."""
    return ops.where(x < 0, x * slope, x)


@function
@widened
def elu(x: Value, alpha: float = 1.0) -> Value:
    """x where x > 0, else alpha * (exp(x) - 1)."""
    return ops.where(x > 0, x, ops.expm1(ops.minimum(x, 0)) * alpha)


@function
@widened
def selu(x: Value, alpha: float = 1.6732632423543772, gamma: float = 1.0507009873554805) -> Value:
    """gamma * elu(x, alpha), by default with the constants that keep mean 0 and variance 1."""
    return elu(x, alpha) * gamma


@function
@widened
def celu(x: Value, alpha: float = 1.0) -> Value:
    """x where x > 0, else alpha * (exp(x / alpha) - 1)."""
    return ops.where(x > 0, x, ops.expm1(ops.minimum(x, 0) / alpha) * alpha)


@function
@widened
def hard_sigmoid(x: Value, alpha: float = 1 / 6, beta: float = 0.5) -> Value:
    """clip(alpha * x + beta, 0, 1)."""
    return ops.clip(x * alpha + beta, low=0.0, high=1.0)


@function
@widened
def hard_swish(x: Value) -> Value:
    """x * hard_sigmoid(x)."""
    return x * hard_sigmoid(x)


@function
@widened
def swish(x: Value, alpha: float = 1.0) -> Value:
    """x * sigmoid(alpha * x); with 1.702 for alpha, an approximation of gelu."""
    return x / (ops.exp(x * -alpha) + 1.0)


@function
@widened
def mish(x: Value) -> Value:
    """x * tanh(softplus(x)); tanh(log(1 + u)) is (u * u + 2 * u) / (u * u + 2 * u + 2), here with powers of exp(-|x|) <= 1."""
    e, positive = ops.exp(-ops.abs(x)), x >= 0.0
    part = ops.where(positive, 2.0 * e + 1.0, e * (e + 2.0))
    return x * (part / (part + ops.where(positive, 2.0 * e * e, 2.0)))


@function
@widened
def softsign(x: Value) -> Value:
    """x / (1 + |x|)."""
    return x / (ops.abs(x) + 1.0)


@function
@widened
def shrink(x: Value, threshold: float = 0.5, bias: float = 0.0) -> Value:
    """x moved towards zero by `bias`; 0 where |x| <= threshold."""
    return ops.where(x < -threshold, x + bias, ops.where(x > threshold, x - bias, 0.0))


@function
def thresholded_relu(x: Value, threshold: float = 1.0) -> Value:
    """x where x > threshold, else 0."""
    return ops.where(x > threshold, x, 0.0)


__all__ = [
    "celu", "elu", "hard_sigmoid", "hard_swish", "leaky_relu", "mish", "prelu", "selu", "shrink", "softsign", "swish",
    "thresholded_relu",
]  # fmt: skip
