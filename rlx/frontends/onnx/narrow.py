"""Element types that rlx keeps in a wider dtype: integers of 2 and 4 bits, and floats of 4 to 8 bits that it does not have.

`rounded` gives the elements that a cast to such a type has, as values of the wider dtype.
"""

from __future__ import annotations

import math

from onnx import TensorProto

from rlx.ir import ops
from rlx.ir.dtype import DType, bool_, f32, f64, i8, i32, i64, u8
from rlx.ir.node import Value

_CODES = dict(TensorProto.DataType.items())  # of the installed onnx
INTEGERS = {_CODES[n]: x for n, x in {"INT4": (-8, 7), "UINT4": (0, 15), "INT2": (-2, 1), "UINT2": (0, 3)}.items() if n in _CODES}
_FLOATS = {  # bits of the mantissa, the exponent of the smallest normal number, the greatest number, and whether there is a NaN
    "FLOAT4E2M1": (1, 0, 6.0, False), "FLOAT6E2M3": (3, 0, 7.5, False), "FLOAT6E3M2": (2, -2, 28.0, False),
    "FLOAT8E4M3FNUZ": (3, -7, 240.0, True), "FLOAT8E5M2FNUZ": (2, -15, 57344.0, True),
}  # fmt: skip
FLOATS = {_CODES[n]: x for n, x in _FLOATS.items() if n in _CODES}
POWERS = _CODES.get("FLOAT8E8M0")
KINDS = {*INTEGERS, *FLOATS, POWERS}


def kept(code: int) -> DType:
    """The dtype in which elements are kept."""
    return (i8 if INTEGERS[code][0] else u8) if code in INTEGERS else f32


def rounded(x: Value, code: int, saturate: bool = True, mode: str = "up") -> Value:
    """x as elements of type `code`. Floats that are out of range become the greatest one of their sign; unless `saturate`, NaN
    if the type has it. Integers wrap. `mode`, for powers of two: nearest, up or down."""
    x = x.astype(u8) if x.dtype == bool_ else x
    if code in INTEGERS:
        return _integer(x, *INTEGERS[code]).astype(kept(code))
    x = x if x.dtype in (f32, f64) else x.astype(f32)
    return _power(x.astype(f32), saturate, mode) if code == POWERS else _float(x, code, saturate)


def _integer(x: Value, low: int, high: int) -> Value:
    """The low bits, of floats without their fraction."""
    return ops.bitwise_and(x.astype(i32) - low, high - low) + low


def _float(x: Value, code: int, saturate: bool) -> Value:
    """Rounded to a multiple of the last place, which the exponent of x gives; ties to even."""
    mantissa, least, greatest, has_nan = FLOATS[code]
    whole, exponent = (i64, 0x7FF0 << 48) if x.dtype == f64 else (i32, 0x7F800000)
    power = ops.bitcast(ops.bitwise_and(ops.bitcast(x, dtype=whole), exponent), dtype=x.dtype)
    place = ops.clip(power, low=2.0**least, high=2.0**16) * 2.0**-mantissa
    out = ops.round(x / place) * place
    beyond = ops.less(greatest, ops.abs(out))
    if saturate or not has_nan:
        out = ops.clip(out, low=-greatest, high=greatest)
        out = out if has_nan else ops.where(ops.is_nan(x), -0.0, out)
    else:
        out = ops.where(beyond, math.nan, out)
    out = ops.where(ops.equal(out, 0.0), 0.0, out) if has_nan else out  # these have no -0
    return out.astype(f32)


def _power(x: Value, saturate: bool, mode: str) -> Value:
    """A power of two by its exponent alone; the sign is dropped."""
    bits = ops.bitwise_and(ops.bitcast(x, dtype=i32), 0x7FFFFFFF)
    exponent, fraction = ops.shift_right(bits, 23), ops.bitwise_and(bits, 0x7FFFFF)
    if mode == "nearest":  # a tie rounds up, but for the least power
        up = ops.less(0x400000, fraction) | (ops.equal(fraction, 0x400000) & ops.less(0, exponent))
    else:
        up = ops.less(0, fraction) & (mode == "up")
    more = exponent + up.astype(i32)
    more = ops.minimum(more, 254) if saturate else more
    made = ops.where(ops.equal(more, 0), 0x400000, ops.shift_left(more, 23))
    return ops.bitcast(ops.where(ops.equal(exponent, 255) | ops.equal(more, 255), 0x7FC00000, made), dtype=f32)
