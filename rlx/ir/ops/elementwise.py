"""Elementwise core ops: out[c] = scalar(in0[c], in1[c], …) with numpy's broadcasting and one dtype for all operands."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.errors import DTypeError
from rlx.ir.contexts import Applied, Coords, Lowering, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.dtype import DType, as_dtype, bool_, f32
from rlx.ir.kernel import Builder, Expr, k
from rlx.ir.node import Node, Value
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.rules import again, comparison, halves, joined, pointwise, same, same_dtype
from rlx.ir.placement import Partial
from rlx.ir.shape import Shape, broadcast_dims

UNARY = (Sample(((3, 17),)), Sample(((33,),), low=-8.0, high=8.0), Sample(((),)), Sample(((1, 5),)))
POSITIVE = (Sample(((3, 17),), low=0.05, high=4.0), Sample(((33,),), low=1e-6, high=1e4), Sample(((),), low=0.5))
BINARY = (
    Sample(((3, 17), (3, 17))), Sample(((2, 3, 33), (33,))), Sample(((4, 1, 5), (3, 1))), Sample(((), (7,))),
    Sample(((1,), (1,)), low=-8.0, high=8.0),
)  # fmt: skip
BITS = BINARY[:3] + (Sample(((17,), (17,)), low=-100, high=100),)


def unary(name: str, reference: Any, scalar: Any, **facts: Any) -> Any:
    """`scalar`: (k, *Expr) -> Expr, or the name of the scalar operation that is the whole op. `facts`: of OpDef."""
    build = (lambda k, *x: getattr(k, scalar)(*x)) if isinstance(scalar, str) else scalar
    own = {"reference": lambda attrs, *x: reference(*x), "scalar": lambda k, attrs, *x: build(k, *x)}
    return op(name, **{"kind": Kind.POINTWISE, "infer": same, "dtypes": "f", "samples": UNARY, **own, **facts})


def binary(name: str, reference: Any, scalar: Any, **facts: Any) -> Any:
    return unary(name, reference, scalar, **{"infer": pointwise, "dtypes": "fiu", "samples": BINARY, "arity": (2, 2), **facts})


# -- unary ---------------------------------------------------------------------------------------------------------

_erf = np.vectorize(math.erf, otypes=[np.float64])


def erf_array(x: np.ndarray) -> np.ndarray:
    """erf of every element, computed in f64 by the C library."""
    return _erf(x) if x.size else x


def _neg(k: Builder, x: Expr) -> Expr:
    return k.sub(0, x) if x.dtype.kind == "u" else k.neg(x)


def _abs(k: Builder, x: Expr) -> Expr:
    return x if x.dtype.kind == "u" else k.abs(x)


def _sign(k: Builder, x: Expr) -> Expr:
    if x.dtype.kind == "u":
        return k.min(x, 1)
    return k.select(k.lt(k.const(0, x.dtype), x), k.const(1, x.dtype), k.select(k.lt(x, 0), k.const(-1, x.dtype), x))


def _modulus(node: Node, x: Value) -> Value:
    """large * sqrt(1 + (small / large)**2), without overflow; infinite if either part is, else NaN if either part is."""
    re, im = (abs(part) for part in halves(x))
    large, small = maximum(re, im), minimum(re, im)
    size = large * sqrt(1.0 + (ratio := small / large) * ratio)
    far = logical_or(equal(re, math.inf), equal(im, math.inf))
    return where(far, math.inf, where(equal(large, 0.0), large, size))


def _exp_parts(node: Node, x: Value) -> Value:
    re, im = halves(x)
    size, real = exp(re), equal(im, 0.0)  # exp of a real number is real, also where it is infinite
    return joined(where(real, size, size * cos(im)), where(real, im, size * sin(im)))


neg = unary("neg", np.negative, _neg, dtypes="fiuc", parts=again, doc="Negation; unsigned integers wrap.")
abs = unary(
    "abs", np.abs, _abs, dtypes="fiuc", infer=lambda attrs, x: x.with_dtype(f32) if x.dtype.kind == "c" else x, parts=_modulus,
    doc="Absolute value; the least signed integer is unchanged. For c64: the magnitude as f32, without intermediate overflow.",
)  # fmt: skip
sqrt = unary("sqrt", np.sqrt, "sqrt", samples=POSITIVE, doc="Square root; NaN for negative x.")
rsqrt = unary(
    "rsqrt", lambda x: 1 / np.sqrt(x), lambda k, x: k.div(1.0, k.sqrt(x)), samples=POSITIVE,
    doc="Reciprocal of the square root, 1 / sqrt(x).",
)  # fmt: skip
reciprocal = unary("reciprocal", lambda x: 1 / x, lambda k, x: k.div(1.0, x), samples=POSITIVE, doc="Reciprocal, 1 / x.")
exp = unary("exp", np.exp, "exp", dtypes="fc", parts=_exp_parts, doc="Exponential, e**x.")
log = unary("log", np.log, "log", samples=POSITIVE, doc="Natural logarithm; NaN for negative x, -inf at 0.")
sin = unary("sin", np.sin, "sin", doc="Sine; x is in radians.")
cos = unary("cos", np.cos, "cos", doc="Cosine; x is in radians.")
tanh = unary("tanh", np.tanh, "tanh", doc="Hyperbolic tangent.")
erf = unary("erf", erf_array, "erf", doc="Error function.")
floor = unary("floor", np.floor, "floor", doc="Rounds down to an integer.")
ceil = unary("ceil", np.ceil, "ceil", doc="Rounds up to an integer.")
round = unary("round", np.rint, "round", doc="Rounds to the nearest integer, ties to even.")
trunc = unary("trunc", np.trunc, "trunc", doc="Rounds toward zero to an integer.")
sign = unary(
    "sign", lambda x: np.where(x == 0, x, np.sign(x)), _sign, dtypes="fiu", doc="Sign of x: -1, 0 or 1; -0.0 and NaN are kept.",
)  # fmt: skip
is_nan = unary("is_nan", np.isnan, lambda k, x: k.ne(x, x), infer=comparison, doc="True where x is NaN.")
logical_not = unary("logical_not", np.logical_not, "not_", dtypes="b", doc="Logical NOT.")
bitwise_not = unary("bitwise_not", np.invert, "not_", dtypes="iu", doc="Bitwise NOT.")


# -- binary --------------------------------------------------------------------------------------------------------


def _is_float(x: np.ndarray) -> bool:
    return np.issubdtype(x.dtype, np.floating)


def divide_array(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """IEEE on floats; on integers truncates, x / 0 = 0, and the least integer / -1 wraps to itself."""
    if np.issubdtype(x.dtype, np.inexact):
        return np.divide(x, y)
    x, y = np.broadcast_arrays(x, y)
    return (x - remainder_array(x, y)) // np.where(y == 0, 1, y) * (y != 0)


def remainder_array(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """C's fmod: the sign of the dividend; x rem 0 is NaN on floats and 0 on integers."""
    if _is_float(x):
        return np.fmod(x, y)
    safe = np.where((y == 0) | (y == -1 if y.dtype.kind == "i" else False), 1, y).astype(y.dtype)
    return np.fmod(x, safe)


def _crosses(k: Builder, r: Expr, y: Expr) -> Expr:
    """True where the remainder is not zero and its sign differs from the divisor's."""
    return k.and_(k.ne(r, 0), k.xor(k.lt(r, 0), k.lt(y, 0)))


def _mod(k: Builder, x: Expr, y: Expr) -> Expr:
    """A remainder of zero has the sign of y, too."""
    r = k.rem(x, y)
    if x.dtype.kind == "u":
        return r
    between = k.select(_crosses(k, r, y), k.add(r, y), r)
    if x.dtype.kind == "i":
        return between
    return k.select(k.eq(r, 0), k.select(k.lt(y, 0), k.const(-0.0, x.dtype), k.const(0.0, x.dtype)), between)


def _floor_div(k: Builder, x: Expr, y: Expr) -> Expr:
    """As numpy: exact where x / y would round up to the next whole number (1.0 // 0.1 is 9); a zero has the sign of x / y."""
    if x.dtype.kind == "u":
        return k.div(x, y)
    r = k.rem(x, y)
    down = k.select(_crosses(k, r, y), k.const(1, x.dtype), k.const(0, x.dtype))
    if x.dtype.kind == "i":
        return k.sub(k.div(x, y), down)
    quotient = k.sub(k.div(k.sub(x, r), y), down)
    whole = k.floor(quotient)
    whole = k.select(k.lt(k.const(0.5, x.dtype), k.sub(quotient, whole)), k.add(whole, 1.0), whole)
    whole = k.select(k.eq(quotient, 0), k.mul(k.div(x, y), 0.0), whole)
    return k.select(k.eq(y, 0), k.div(x, y), whole)


def _shift(k: Builder, name: str, x: Expr, count: Expr) -> Expr:
    """A shift defined for every count: counts outside 0 … bits-1 shift every bit out."""
    bits = x.dtype.bits
    inside = k.lt(count, bits) if count.dtype.kind == "u" else k.and_(k.le(k.const(0, count.dtype), count), k.lt(count, bits))
    if name == "shr" and x.dtype.kind == "i":
        return k.shr(x, k.select(inside, count, k.const(bits - 1, count.dtype)))
    shifted = getattr(k, name)(x, k.select(inside, count, k.const(0, count.dtype)))
    return k.select(inside, shifted, k.const(0, x.dtype))


def _mul_parts(node: Node, x: Value, y: Value) -> Value:
    (a, b), (c, d) = halves(x), halves(y)
    return joined(a * c - b * d, a * d + b * c)


def _div_parts(node: Node, x: Value, y: Value) -> Value:
    """R. L. Smith's method, 1962: scale by the ratio of y's smaller part to its larger, so that no square overflows."""
    (a, b), (c, d) = halves(x), halves(y)
    first = less_equal(abs(d), abs(c))
    large, small = where(first, c, d), where(first, d, c)
    ratio = where(equal(large, 0.0), small, small / large)
    scale = large + small * ratio
    return joined(where(first, a + b * ratio, a * ratio + b) / scale, where(first, b - a * ratio, b * ratio - a) / scale)


def _equal_parts(node: Node, *operands: Value) -> Value:
    return logical_and(*halves(again(node, *operands)))


def _unequal_parts(node: Node, *operands: Value) -> Value:
    return logical_or(*halves(again(node, *operands)))


NON_ZERO = (
    Sample(((3, 17), (3, 17)), low=1, high=9), Sample(((2, 3, 5), (5,)), low=-6, high=7), Sample(((), (33,)), low=1, high=5),
)  # fmt: skip
add = binary("add", np.add, "add", dtypes="fiuc", parts=again, doc="x + y; integers wrap.")
sub = binary("sub", np.subtract, "sub", dtypes="fiuc", parts=again, doc="x - y; integers wrap.")
mul = binary("mul", np.multiply, "mul", dtypes="fiuc", parts=_mul_parts, doc="x * y; integers wrap.")
div = binary(
    "div", divide_array, "div", dtypes="fiuc", parts=_div_parts, samples=NON_ZERO,
    doc="Quotient x / y. Integer division truncates toward zero, and x / 0 is 0.",
)  # fmt: skip
rem = binary(
    "rem", remainder_array, "rem", samples=NON_ZERO, doc="Remainder with the sign of x, as C's fmod; for integers x rem 0 is 0.",
)  # fmt: skip
mod = binary("mod", np.mod, _mod, samples=NON_ZERO, doc="Remainder with the sign of y, as Python's %; for integers x mod 0 is 0.")
floor_div = binary("floor_div", np.floor_divide, _floor_div, samples=NON_ZERO, doc="floor(x / y); integers: x // 0 is 0.")
pow = binary(
    "pow", np.power, "pow", dtypes="f",
    samples=(Sample(((3, 17), (3, 17)), low=0.1, high=3.0), Sample(((2, 5), ()), low=-3.0, high=3.0)),
    doc="x**y, as C's pow: NaN for negative x and fractional y, 1 where y is 0 or x is 1.",
)  # fmt: skip
maximum = binary("maximum", np.maximum, "max", doc="Elementwise maximum; NaN if either operand is NaN. Of 0 and -0 either one.")
minimum = binary("minimum", np.minimum, "min", doc="Elementwise minimum; NaN if either operand is NaN. Of 0 and -0 either one.")
less = binary("less", np.less, "lt", infer=comparison, doc="x < y; False if either is NaN.")
less_equal = binary("less_equal", np.less_equal, "le", infer=comparison, doc="x <= y; False if either is NaN.")
equal = binary("equal", np.equal, "eq", dtypes="fiubc", infer=comparison, parts=_equal_parts, doc="x == y; False with a NaN.")
not_equal = binary(
    "not_equal", np.not_equal, "ne", dtypes="fiubc", infer=comparison, parts=_unequal_parts, doc="x != y; True if either is NaN.",
)  # fmt: skip
logical_and = binary("logical_and", np.logical_and, "and_", dtypes="b", doc="Logical AND.")
logical_or = binary("logical_or", np.logical_or, "or_", dtypes="b", doc="Logical OR.")
logical_xor = binary("logical_xor", np.logical_xor, "xor", dtypes="b", doc="Logical XOR.")
bitwise_and = binary("bitwise_and", np.bitwise_and, "and_", dtypes="iu", samples=BITS, doc="Bitwise AND.")
bitwise_or = binary("bitwise_or", np.bitwise_or, "or_", dtypes="iu", samples=BITS, doc="Bitwise OR.")
bitwise_xor = binary("bitwise_xor", np.bitwise_xor, "xor", dtypes="iu", samples=BITS, doc="Bitwise XOR.")
shift_left = binary(
    "shift_left", np.left_shift, lambda k, x, y: _shift(k, "shl", x, y), dtypes="iu", samples=BITS,
    doc="Left shift, x << y; a count outside 0 … bits-1 gives 0.",
)  # fmt: skip
shift_right = binary(
    "shift_right", np.right_shift, lambda k, x, y: _shift(k, "shr", x, y), dtypes="iu", samples=BITS,
    doc="Right shift, x >> y: arithmetic for signed x, else logical. A count outside 0 … bits-1 gives 0, or -1 where x < 0.",
)  # fmt: skip


# -- three operands, cast ------------------------------------------------------------------------------------------


multiply_add = unary(
    "multiply_add", lambda x, y, z: x * y + z, lambda k, x, y, z: k.add(k.mul(x, y), z), infer=pointwise, arity=(3, 3),
    samples=(Sample(((3, 17),) * 3), Sample(((3, 1), (17,), (3, 17))), Sample(((), (5,), (4, 1)))),
    doc="x * y + z, rounded twice. As a single op it is fused into the producer of z, even where x * y alone would not be.",
)  # fmt: skip


def _where_shape(attrs: object, condition: Shape, x: Shape, y: Shape) -> Shape:
    same_dtype(x, y)
    return Shape(broadcast_dims(condition.dims, x.dims, y.dims), x.dtype)


where = op(
    "where", kind=Kind.POINTWISE, infer=_where_shape, arity=(3, 3), dtypes="b", roles="bxx",
    reference=lambda attrs, condition, x, y: np.where(condition, x, y),
    scalar=lambda k, attrs, condition, x, y: k.select(condition, x, y),
    parts=lambda node, condition, x, y: again(node, condition[..., None], x, y),
    samples=tuple(
        Sample(shapes, dtypes=("bool", d, d))
        for d in ("f32", "f16", "bf16", "f64", "i32", "bool", "c64") for shapes in (((3, 17),) * 3, ((4, 1), (5,), ()))
    ),
    doc="Elements of x where the condition is True, else of y; the three operands broadcast together.",
)  # fmt: skip


class CastAttrs(Attrs):
    dtype: DType


def cast_array(x: np.ndarray, dtype: DType) -> np.ndarray:
    """Float to integer truncates and saturates, NaN gives 0; to bool is x != 0; integers wrap; 16-bit floats round from f32."""
    if dtype == bool_:
        return x != 0
    x = np.real(x) if x.dtype.kind == "c" and dtype.kind != "c" else x
    if not (_is_float(x) and dtype.is_int):
        return x.astype(dtype.compute.numpy)
    limits = np.iinfo(dtype.numpy)
    t = np.trunc(x.astype(np.float64))
    above, below = t >= float(limits.max), t <= float(limits.min)
    inside = np.where(above | below | np.isnan(t), 0.0, t).astype(dtype.numpy)
    return np.where(above, limits.max, np.where(below, limits.min, inside)).astype(dtype.numpy)


def _cast_scalar(k: Builder, attrs: CastAttrs, x: Expr) -> Expr:
    wide = k.cast(x, attrs.dtype.compute)
    if attrs.dtype == attrs.dtype.compute:
        return wide
    return k.cast(k.cast(wide, attrs.dtype), attrs.dtype.compute)  # rounds even where the result never reaches memory


def _cast_shape(attrs: CastAttrs, x: Shape) -> Shape:
    return x.with_dtype(attrs.dtype)


def _cast_parts(node: Applied[CastAttrs], x: Value) -> Value:
    """From c64: the real part (to bool: True if either part is not 0). To c64: the imaginary part is 0."""
    if node.shapes[0].dtype.kind == "c":
        return x if node.inputs[0].dtype.kind == "c" else joined(cast(x, dtype=f32), 0.0)
    re, im = halves(x)
    return logical_or(not_equal(re, 0.0), not_equal(im, 0.0)) if node.attrs.dtype == bool_ else cast(re, dtype=node.attrs.dtype)


def _cast_partitioned(p: Partitioning, attrs: CastAttrs, x: Value) -> Parted:
    """Partial sums may be cast before they are combined if the cast is exact."""
    home, to = p.home[x], attrs.dtype
    wider = to.is_float and x.dtype.is_float and to.bits > x.dtype.bits
    return [(cast(p.at(x, home), dtype=to), home)] if isinstance(home, Partial) and (wider or to == x.dtype) else None


cast = op(
    "cast", kind=Kind.POINTWISE, infer=_cast_shape, attrs=CastAttrs, dtypes="fiubc", parts=_cast_parts,
    reference=lambda attrs, x: cast_array(x, attrs.dtype), scalar=_cast_scalar, partitioned=_cast_partitioned,
    samples=tuple(
        Sample(((3, 17),), {"dtype": as_dtype(d)}, low=-300.0, high=300.0)
        for d in ("f32", "f64", "f16", "bf16", "f8e4m3", "f8e5m2", "i64", "i32", "i8", "u8", "u32", "bool", "c64")
    ),
    doc="Converts to another dtype. Float to integer truncates and saturates (NaN gives 0); to bool is x != 0; c64 to real drops "
    "the imaginary part.",
)  # fmt: skip


class BitcastAttrs(Attrs):
    dtype: DType


def _bitcast_shape(attrs: BitcastAttrs, x: Shape) -> Shape:
    if attrs.dtype.bits != x.dtype.bits or attrs.dtype.kind not in "fiu":
        raise DTypeError(f"{x.dtype} has {x.dtype.bits} bits; {attrs.dtype} is not a number of as many")
    return x.with_dtype(attrs.dtype)


def _bitcast_element(ctx: Lowering, node: Applied[BitcastAttrs], result: int, coords: Coords) -> Expr:
    """An INDEX op, since a POINTWISE one is not told which dtype its operand is stored in."""
    x, to = node.inputs[0], node.attrs.dtype
    return k.cast(k.bitcast(k.cast(ctx.element(x, coords), x.dtype), dtype=to), to.compute)


bitcast = op(
    "bitcast", kind=Kind.INDEX, infer=_bitcast_shape, attrs=BitcastAttrs, dtypes="fiu", as_stored=True,
    reference=lambda attrs, x: x.view(attrs.dtype.numpy), element=_bitcast_element, rows=lambda attrs, operand, axis, x: axis,
    samples=tuple(
        Sample(((3, 17),), {"dtype": as_dtype(to)}, low=-limit, high=limit, dtypes=(d,))
        for d, to, limit in (
            ("f32", "i32", 9e9), ("i32", "f32", 2e9), ("u32", "i32", 2e9), ("i64", "f64", 9e18), ("f16", "u16", 6e4),
            ("i16", "bf16", 3e4), ("u8", "i8", 255),
        )
    ),
    doc="The same bits as another dtype of equal size. A NaN of 16 or 8 bits may become another NaN.",
)  # fmt: skip
