"""The closed set of scalar operations (rlx.ir.kernel.SCALAR_OPS) on numpy arrays, with exactly the meaning stated there.

Registers hold compute dtypes: f16, bf16 and f8 values are held in f32 arrays, rounded where an expression has such a dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.ir.dtype import DType

Array = np.ndarray


def compute(op: str, args: Sequence[tuple[Array, DType]], dtype: DType) -> Array:
    """`op` on arrays (each with the dtype of its expression), as an array of `dtype.compute`."""
    arrays = [a for a, _ in args]
    if op == "cast":
        return convert(convert(arrays[0], args[0][1].compute, dtype), dtype, dtype.compute)
    if op == "bitcast":
        return convert(convert(arrays[0], args[0][1].compute, args[0][1]).view(dtype.numpy), dtype, dtype.compute)
    if op == "select":
        out = np.where(*arrays)
    elif arrays[0].dtype.kind == "f":
        out = _FLOAT[op](*arrays)
    else:
        out = _INTEGER[op](*arrays)
    assert out.dtype == dtype.compute.numpy, (op, out.dtype, dtype)
    return out if dtype == dtype.compute else convert(convert(out, dtype.compute, dtype), dtype, dtype.compute)


def convert(a: Array, source: DType, target: DType) -> Array:
    """Values of `source` as `target`, as the scalar op cast defines it; the result has target's host dtype."""
    if source == target:
        return a
    if target.kind == "b":
        return a != 0
    if source.is_float and target.is_int:
        return _float_to_int(a.astype(np.float64), target)
    return a.astype(target.numpy)


def _float_to_int(a: Array, target: DType) -> Array:
    """Truncated and saturated; NaN gives 0. The bounds are powers of two, so they are exact in f64."""
    info = np.iinfo(target.numpy)
    low, above = float(info.min), float(info.max) + 1 if target.bits < 64 else 2.0 ** (target.bits - (target.kind == "i"))
    inside = (a > low - 1) & (a < above) if target.bits < 64 else (a >= low) & (a < above)
    out = np.where(inside, a, 0.0).astype(target.numpy)
    out = np.where(a >= above, np.array(info.max, target.numpy), out)
    return np.where(a < low, np.array(info.min, target.numpy), out)


def reduce_ufunc(op: str, dtype: np.dtype) -> np.ufunc:
    """The binary ufunc of a reduction with `op`. max and min propagate NaN."""
    return {
        "add": np.logical_or if dtype.kind == "b" else np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum,
        "and": np.bitwise_and, "or": np.bitwise_or,
    }[op]  # fmt: skip


def _wide(f: Callable[..., Array]) -> Callable[..., Array]:
    """A float function computed in f64 and rounded once."""
    return lambda *args: f(*(a.astype(np.float64) for a in args)).astype(args[0].dtype)


_erf = np.frompyfunc(math.erf, 1, 1)


def _int_div(a: Array, b: Array) -> Array:
    by = np.where((b == 0) | _minus_one(b), np.ones_like(b), b)
    quotient = a // by
    rounded_down = (quotient * by != a) & ((a < 0) != (by < 0))
    quotient = np.where(rounded_down, quotient + np.ones_like(quotient), quotient)
    return np.where(b == 0, np.zeros_like(a), np.where(_minus_one(b), np.negative(a), quotient))


def _int_rem(a: Array, b: Array) -> Array:
    by = np.where((b == 0) | _minus_one(b), np.ones_like(b), b)
    return np.where((b == 0) | _minus_one(b), np.zeros_like(a), np.fmod(a, by))


def _minus_one(b: Array) -> Array:
    return b == -1 if b.dtype.kind == "i" else np.zeros(b.shape, bool)


def _int_pow(a: Array, b: Array) -> Array:
    """Wraps; a negative exponent gives the truncated reciprocal (0, or ±1 for a base of ±1)."""
    negative = b < 0
    out = np.power(a, np.where(negative, np.zeros_like(b), b))
    odd_sign = np.where((b & np.ones_like(b)) == 1, a, np.ones_like(a))
    reciprocal = np.where(a == 1, a, np.where(_minus_one(a), odd_sign, np.zeros_like(a)))
    return np.where(negative, reciprocal, out)


_BOTH: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
    "neg": np.negative, "abs": np.abs, "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip
_FLOAT: dict[str, Callable[..., Any]] = _BOTH | {
    "div": np.divide, "rem": np.fmod, "pow": _wide(np.power), "fma": _wide(lambda a, b, c: a * b + c),
    "sqrt": np.sqrt, "exp": _wide(np.exp), "log": _wide(np.log), "sin": _wide(np.sin), "cos": _wide(np.cos),
    "tanh": _wide(np.tanh), "erf": _wide(lambda a: np.asarray(_erf(a)).astype(np.float64)),
    "floor": np.floor, "ceil": np.ceil, "round": np.rint, "trunc": np.trunc, "nearest": lambda a: np.rint(a).astype(np.int32),
}  # fmt: skip
_INTEGER: dict[str, Callable[..., Any]] = _BOTH | {
    "div": _int_div, "rem": _int_rem, "pow": _int_pow, "fma": lambda a, b, c: a * b + c,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
    "shl": np.left_shift, "shr": np.right_shift,
    "floor": np.copy, "ceil": np.copy, "round": np.copy, "trunc": np.copy,
}  # fmt: skip
