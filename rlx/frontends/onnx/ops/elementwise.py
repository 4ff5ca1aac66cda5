"""Operators on elements."""

from __future__ import annotations

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.table import handler
from rlx.ir import ops
from rlx.ir.node import Value

_SAME = {
    "Abs": ops.abs, "Neg": ops.neg, "Exp": ops.exp, "Log": ops.log, "Sqrt": ops.sqrt, "Sin": ops.sin, "Cos": ops.cos,
    "Tanh": ops.tanh, "Erf": ops.erf, "Relu": ops.relu, "Sigmoid": ops.sigmoid, "Floor": ops.floor, "Ceil": ops.ceil,
}  # fmt: skip
_PAIRS = {"Add": ops.add, "Sub": ops.sub, "Mul": ops.mul}


@handler(*_SAME)
def one_operand(n: Call) -> Value:
    return _SAME[n.op](n.value(0))


@handler(*_PAIRS, since=7)
def two_operands(n: Call) -> Value:
    return _PAIRS[n.op](n.value(0), n.value(1))
