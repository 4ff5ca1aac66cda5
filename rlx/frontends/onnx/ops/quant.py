"""Quantisation: between floats and integers, and operators on quantised tensors (ONNX's, and ONNX Runtime's)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onnx import TensorProto

from rlx.frontends.onnx import narrow, quantities
from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.conv import windows
from rlx.frontends.onnx.ops.elementwise import cast_code, dtype_of
from rlx.frontends.onnx.quantities import Quantity, bounds, dequantised, quantised, requantised, spread
from rlx.frontends.onnx.table import handler
from rlx.ir import ops
from rlx.ir.dtype import f32
from rlx.ir.node import Value

MS = "com.microsoft"


@handler("QuantizeLinear", since=10)
@handler("QuantizeLinear", domain=MS)
def quantize_linear(n: Call) -> Value:
    """The type is that of the zero point, else `output_dtype`, else u8. Floats are divided in the scale's dtype, unless
    `precision` says otherwise."""
    x, axis, block = n.value(0), n.attr("axis", 1) % max(n.rank(0), 1), n.attr("block_size", 0)
    code = n.element_type(2) if n.has(2) else n.attr("output_dtype", 0) or TensorProto.UINT8
    precision = n.attr("precision", 0)
    scale = n.value(1)
    wide = dtype_of(n, precision) if precision else scale.dtype
    scaled = n.scope.importer.scaled.get(x) if wide == f32 else None
    x, scale = x.astype(wide), spread(scale.astype(wide), x, axis, block)
    zero = spread(n.value(2), x, axis, block) if n.has(2) else None
    if code in narrow.INTEGERS:
        low, high = narrow.INTEGERS[code]
        return n.typed(quantised(x, scale, zero, low, high, narrow.kept(code)), code)
    if code in narrow.KINDS or dtype_of(n, code).is_float:
        ratio = x / scale if zero is None or code not in narrow.KINDS else x / scale + zero.astype(wide)
        return cast_code(n, ratio, code)
    dtype = dtype_of(n, code)
    if scaled is not None and scale.rank == 0:
        return requantised(scaled[0], scaled[1] / scale, zero, dtype)
    return quantised(x, scale, zero, *bounds(dtype), dtype)


@handler("DequantizeLinear", since=10)
@handler("DequantizeLinear", domain=MS)
def dequantize_linear(n: Call) -> Value:
    scale, wanted = n.value(1), n.attr("output_dtype", 0)
    q = Quantity(n.value(0), scale, n.maybe(2), n.attr("axis", 1) % max(n.rank(0), 1), n.attr("block_size", 0))
    out = dequantised(q).astype(dtype_of(n, wanted) if wanted else scale.dtype)
    n.scope.importer.quantities[out] = q
    return out


# -- products of integers ------------------------------------------------------------------------------------------------


@handler("MatMulInteger", since=10)
def matmul_integer(n: Call) -> Value:
    a, b = n.value(0), n.value(1)
    return _product(n, a, b, _rows(n.maybe(2), a), n.maybe(3))


def _product(n: Call, a: Value, b: Value, a_zero: Value | None, b_zero: Value | None) -> Value:
    """The sums, i32; operands of one dim are a row or a column, as in numpy's matmul."""
    row, column = a.rank == 1, b.rank == 1
    a, b = ops.unsqueeze(a, axes=(0,)) if row else a, ops.unsqueeze(b, axes=(1,)) if column else b
    out = quantities.matmul(n, a, b, a_zero, b_zero)
    gone = ((-2,) if row else ()) + ((-1,) if column else ())
    return ops.squeeze(out, axes=gone) if gone else out


def _rows(v: Value | None, a: Value) -> Value | None:
    """A scale or zero point of a left operand: one for all, one per row, or with the dims of a."""
    return v if v is None or v.rank != 1 or a.rank < 2 else v.reshape((-1, 1)) if v.dims != (1,) else v.reshape(())


@handler("QLinearMatMul", since=10)
def qlinear_matmul(n: Call) -> Value:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = n.values()
    sums = _product(n, a, b, _rows(a_zero, a), b_zero)
    wide = (v.astype(f32) for v in (_rows(a_scale, a), b_scale, _rows(y_scale, a)))  # type: ignore[union-attr]
    left, right, result = wide
    return requantised(sums, left * right / result, _rows(y_zero, a))  # type: ignore[arg-type]


@handler("ConvInteger", since=10)
def conv_integer(n: Call) -> Value:
    return _conv(n, 1, n.maybe(2), n.maybe(3))


def _conv(n: Call, w: int, x_zero: Value | None, w_zero: Value | None, bias: Value | None = None) -> Value:
    """The sums of a convolution with operand `w`."""
    x_zero, w_zero = (v.reshape(()) if v is not None and v.dims == (1,) else v for v in (x_zero, w_zero))
    facts = windows(n, n.sizes(w)[2:]).facts
    return quantities.conv(n, n.value(0), n.value(w), x_zero, w_zero, n.attr("group", 1), facts, bias)


@handler("QLinearConv", since=10)
@handler("QLinearConv", domain=MS)
def qlinear_conv(n: Call) -> Value:
    """The bias has the scale of the sums."""
    sums = _conv(n, 3, n.value(2), n.value(5), n.maybe(8))
    channels = (-1,) + (1,) * (n.rank(0) - 2)
    x_scale, w_scale, y_scale = (n.value(i).astype(f32) for i in (1, 4, 6))
    factor = x_scale.reshape(()) * w_scale / y_scale.reshape(())
    return requantised(sums, factor.reshape(channels if factor.dims not in ((), (1,)) else ()), n.value(7).reshape(()))


# -- ONNX Runtime's ------------------------------------------------------------------------------------------------------


def _floats(n: Call, i: int) -> Value:
    """Operands i (integers), i + 1 (scale) and i + 2 (zero point) as floats."""
    return dequantised(Quantity(n.value(i), n.value(i + 1), n.maybe(i + 2)))


def _as_integers(n: Call, x: Value, i: int) -> Value:
    """x quantised by operands i (scale) and i + 1 (zero point), else in the dtype of operand 0."""
    zero = n.maybe(i + 1)
    dtype = n.dtype(0) if zero is None else zero.dtype
    return quantised(x, n.value(i).astype(f32).reshape(()), None if zero is None else zero.reshape(()), *bounds(dtype), dtype)


@handler("QLinearAdd", "QLinearMul", domain=MS)
def qlinear_two(n: Call) -> Value:
    join: Callable[..., Value] = ops.add if n.op == "QLinearAdd" else ops.mul
    return _as_integers(n, join(_floats(n, 0), _floats(n, 3)), 6)


@handler("QLinearSigmoid", "QLinearLeakyRelu", "QLinearSoftmax", "QLinearAveragePool", "QLinearGlobalAveragePool", domain=MS)
def qlinear_one(n: Call) -> Value:
    """The operator of that name on floats; pools may have channels last."""
    x, last, op = _floats(n, 0), n.attr("channels_last", 0), n.op.removeprefix("QLinear")
    given = n.others("channels_last", "opset")
    x = ops.transpose(x, axes=(0, x.rank - 1, *range(1, x.rank - 1))) if last else x
    made: Any = n.run(op, x, opset=n.attr("opset", None), **given)
    out = made if isinstance(made, Value) else n.scope.importer.constant(made)
    return _as_integers(n, ops.transpose(out, axes=(0, *range(2, out.rank), 1)) if last else out, 3)


@handler("QLinearConcat", domain=MS)
def qlinear_concat(n: Call) -> Value:
    """Scale and zero point of the result come first, then three operands for each part."""
    parts = [_floats(n, i) for i in range(2, len(n.inputs), 3)]
    x, scale, zero = ops.concat(*parts, axis=n.axis(rank=parts[0].rank)), n.value(0), n.value(1)
    return quantised(x, scale.reshape(()), zero.reshape(()), *bounds(zero.dtype), zero.dtype)


@handler("QGemm", domain=MS)
def qgemm(n: Call) -> Value:
    """Without a scale of the result it is in floats. The bias has the scale of the sums."""
    a, b = (v.T if n.attr(name, 0) else v for v, name in ((n.value(0), "transA"), (n.value(3), "transB")))
    zeros = (v if v is None or v.dims != (1,) else v.reshape(()) for v in (n.maybe(2), n.maybe(5)))
    sums = quantities.matmul(n, a, b, *zeros)
    sums = sums + n.value(6) if n.has(6) else sums
    factor = n.value(1) * n.value(4) * n.attr("alpha", 1.0)
    return requantised(sums, factor / n.value(7), n.value(8)) if n.has(7) else sums.astype(f32) * factor


@handler("MatMulIntegerToFloat", domain=MS)
def matmul_integer_to_float(n: Call) -> Value:
    """Operands: a, b, their scales, their zero points, a bias."""
    a = n.value(0)
    out = _product(n, a, n.value(1), _rows(n.maybe(4), a), n.maybe(5)).astype(f32) * (n.value(2) * n.value(3))
    return out + n.value(6) if n.has(6) else out


@handler("DynamicQuantizeMatMul", domain=MS)
def dynamic_quantize_matmul(n: Call) -> Value:
    """Operands: a in floats, b, its scale, its zero point, a bias. a is quantised to u8 over its whole range."""
    a, scale, zero = n.run("DynamicQuantizeLinear", n.value(0), outputs=3)
    a, scale, zero = (x if isinstance(x, Value) else n.scope.importer.constant(x) for x in (a, scale, zero))
    out = _product(n, a, n.value(1), zero, n.maybe(3)).astype(f32) * (scale * n.value(2))
    return out + n.value(4) if n.has(4) else out
