"""Operators on elements: arithmetic, comparisons, logic, bits, casts."""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
import onnx

from rlx.errors import DTypeError
from rlx.frontends.onnx import narrow
from rlx.frontends.onnx.call import Call, is_text
from rlx.frontends.onnx.ops import text
from rlx.frontends.onnx.table import handler
from rlx.ir import ops
from rlx.ir.dtype import DType, as_dtype, bool_, f8e4m3, f64, u8
from rlx.ir.node import Value, constant

_ONE = {
    "Abs": ops.abs, "Neg": ops.neg, "Exp": ops.exp, "Log": ops.log, "Sqrt": ops.sqrt, "Sin": ops.sin, "Cos": ops.cos,
    "Tan": ops.tan, "Asin": ops.asin, "Acos": ops.acos, "Atan": ops.atan, "Sinh": ops.sinh, "Cosh": ops.cosh, "Tanh": ops.tanh,
    "Asinh": ops.asinh, "Acosh": ops.acosh, "Atanh": ops.atanh, "Erf": ops.erf, "Floor": ops.floor, "Ceil": ops.ceil,
    "Round": ops.round, "Sign": ops.sign, "Reciprocal": ops.reciprocal, "IsNaN": ops.is_nan, "Not": ops.logical_not,
    "BitwiseNot": ops.bitwise_not,
}  # fmt: skip
_TWO = {
    "Add": ops.add, "Sub": ops.sub, "Mul": ops.mul, "Div": ops.div, "And": ops.logical_and, "Or": ops.logical_or,
    "Xor": ops.logical_xor, "BitwiseAnd": ops.bitwise_and, "BitwiseOr": ops.bitwise_or, "BitwiseXor": ops.bitwise_xor,
    "Less": ops.less, "LessOrEqual": ops.less_equal, "Greater": lambda x, y: ops.less(y, x),
    "GreaterOrEqual": lambda x, y: ops.less_equal(y, x), "Equal": ops.equal,
}  # fmt: skip
_MANY = {"Max": ops.maximum, "Min": ops.minimum, "Sum": ops.add, "Mean": ops.add}


@handler(*_ONE)
def one_operand(n: Call) -> Value:
    return _ONE[n.op](n.value(0))


@handler(*_TWO, since=7)
def two_operands(n: Call) -> Value:
    return _TWO[n.op](n.value(0), n.value(1))


@handler(*_MANY, since=6)
def many_operands(n: Call) -> Value:
    total = reduce(_MANY[n.op], n.values())
    return total * (1 / len(n.inputs)) if n.op == "Mean" else total


@handler("Mod")
def mod(n: Call) -> Value:
    """Floats ask for the sign of the dividend by `fmod`."""
    return (ops.rem if n.attr("fmod", 0) else ops.mod)(n.value(0), n.value(1))


@handler("BitShift")
def bit_shift(n: Call) -> Value:
    shift = {"LEFT": ops.shift_left, "RIGHT": ops.shift_right}.get(n.attr("direction"))
    return shift(n.value(0), n.value(1)) if shift else n.refuse(f"direction {n.attr('direction')!r} is not LEFT or RIGHT")


@handler("Pow", since=7)
def power(n: Call) -> Value:
    """The result has the dtype of the base. Small whole powers are products."""
    x, given = n.value(0), n.inputs[1]
    if isinstance(given, np.ndarray) and given.size == 1 and n.rank(1) <= x.rank and given.item() in (1, 2, 3):
        return (x, x * x, x * x * x)[int(given.item()) - 1]
    y = n.value(1)
    if x.dtype.is_int and y.dtype.is_int:
        return _whole_power(x, y)
    if x.dtype.is_int:
        return ops.pow(x.astype(f64), y.astype(f64)).astype(x.dtype)
    return ops.pow(x, y.astype(x.dtype))


def _whole_power(base: Value, y: Value) -> Value:
    """base ** y of integers, by squares; products wrap. A negative power is 0, but for bases of 1 and -1."""
    size, square, out = ops.abs(y), base, ops.broadcast_to(constant(1, base.dtype), dims=base.dims)
    for bit in range(y.dtype.bits - (y.dtype.kind == "i")):
        odd = ops.equal(ops.bitwise_and(ops.shift_right(size, bit), 1), 1)
        out, square = ops.where(odd, out * square, out), square * square
    if y.dtype.kind == "u":
        return out
    return ops.where(ops.logical_and(ops.less(y, 0), ops.not_equal(ops.abs(base), 1)), 0, out)


@handler("Clip", since=6)
def clip(n: Call) -> Value:
    """Bounds are attributes before opset 11; where the lower one is above the other, the result is the upper one."""
    x = n.value(0)
    for i, name, bound in ((1, "min", ops.maximum), (2, "max", ops.minimum)):
        limit = n.maybe(i) if n.opset >= 11 else n.attr(name, None)
        x = x if limit is None else bound(x, limit)
    return x


@handler("IsInf")
def is_inf(n: Call) -> Value:
    x, up, down = n.value(0), n.attr("detect_positive", 1), n.attr("detect_negative", 1)
    if not up and not down:
        return ops.not_equal(x, x) & ops.equal(x, x)
    return ops.equal(ops.abs(x) if up and down else x, math.inf if up else -math.inf)


# -- casts -------------------------------------------------------------------------------------------------------------


def dtype_of(n: Call, kind: int) -> DType:
    """The dtype of a TensorProto.DataType."""
    try:
        return as_dtype(onnx.helper.tensor_dtype_to_np_dtype(kind))
    except (DTypeError, KeyError):
        n.refuse(f"elements of type {onnx.TensorProto.DataType.Name(kind)} are not supported")


def cast_to(n: Call, x: Value, dtype: DType) -> Value:
    """A cast to 8-bit floats saturates unless the attribute `saturate` says no."""
    if dtype.is_float and dtype.bits == 8 and n.attr("saturate", 1) and x.dtype.kind != "b":
        greatest = 448.0 if dtype == f8e4m3 else 57344.0
        x = ops.clip(x.astype(x.dtype if x.dtype.is_float and x.dtype.bits > 16 else "f32"), low=-greatest, high=greatest)
    return x.astype(dtype)


def cast_code(n: Call, x: Value, code: int) -> Value:
    """A cast to an element type of ONNX; one that rlx does not have is kept in a wider dtype."""
    if code in narrow.KINDS:
        return n.typed(narrow.rounded(x, code, bool(n.attr("saturate", 1)), n.attr("round_mode", "up")), code)
    made = cast_to(n, x, dtype_of(n, code))
    return made * 1 if made is x and x in n.scope.importer.types else made  # a value has one element type


@handler("Cast", "CastLike")
def cast(n: Call) -> Value | np.ndarray:
    code = n.attr("to") if n.op == "Cast" else n.element_type(1)
    if code == onnx.TensorProto.STRING or is_text(n.inputs[0]):
        return text.cast(n, code)
    return cast_code(n, n.value(0), code)


@handler("BitCast")
def bit_cast(n: Call) -> Value:
    """A bool is a byte of 0 or 1."""
    x, dtype = n.value(0), dtype_of(n, n.attr("to"))
    x = x.astype(u8) if x.dtype == bool_ else x
    return ops.bitcast(x, dtype=u8).astype(bool_) if dtype == bool_ else ops.bitcast(x, dtype=dtype)
