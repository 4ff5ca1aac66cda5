"""Reductions, positions of the greatest, orders, and running totals."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.dtype import bool_, f64
from rlx.ir.node import Value

Reducer = Callable[..., Value]


def _mean(x: Value, axis: tuple[int, ...], keepdims: bool) -> Value:
    if x.dtype.is_float:
        return ops.mean(x, axis=axis, keepdims=keepdims)
    return ops.sum(x, axis=axis, keepdims=keepdims) / math.prod(x.shape.static[a] for a in axis)


def _in_floats(reduce: Reducer) -> Reducer:
    """The reduction of integers in f64, rounded towards zero."""

    def run(x: Value, axis: tuple[int, ...], keepdims: bool) -> Value:
        return reduce(x if x.dtype.is_float else x.astype(f64), axis=axis, keepdims=keepdims).astype(x.dtype)

    return run


def _log_sum_exp(x: Value, axis: tuple[int, ...], keepdims: bool) -> Value:
    top = ops.max(x, axis=axis, keepdims=True)
    top = ops.where(ops.less(ops.abs(top), math.inf), top, 0.0)
    total = ops.log(ops.sum(ops.exp(x - top), axis=axis, keepdims=True)) + top
    return total if keepdims else ops.squeeze(total, axes=axis)


def _of_bools(own: Reducer, of_bools: Reducer) -> Reducer:
    return lambda x, **where: (of_bools if x.dtype == bool_ else own)(x, **where)


_REDUCTIONS: dict[str, Reducer] = {
    "ReduceSum": ops.sum,
    "ReduceProd": ops.prod,
    "ReduceMean": _mean,
    "ReduceMax": _of_bools(ops.max, ops.any),
    "ReduceMin": _of_bools(ops.min, ops.all),
    "ReduceL1": lambda x, **where: ops.sum(ops.abs(x), **where),
    "ReduceL2": _in_floats(lambda x, **where: ops.sqrt(ops.sum(x * x, **where))),
    "ReduceSumSquare": lambda x, **where: ops.sum(x * x, **where),
    "ReduceLogSum": _in_floats(lambda x, **where: ops.log(ops.sum(x, **where))),
    "ReduceLogSumExp": _in_floats(_log_sum_exp),
}


@handler(*_REDUCTIONS)
def reduction(n: Call) -> Value:
    """Axes are an operand from opset 18 on (13 for ReduceSum). None, or an empty list: all, unless `noop_with_empty_axes`, which
    leaves what is done with each element."""
    x, axes = n.value(0), n.ints(1, "axes", ())
    if not axes and n.attr("noop_with_empty_axes", 0):
        return _REDUCTIONS[n.op](x.reshape((*x.dims, 1)), axis=(x.rank,), keepdims=False)
    axes = tuple(sorted(a % x.rank for a in axes)) or tuple(range(x.rank))
    return _REDUCTIONS[n.op](x, axis=axes, keepdims=bool(n.attr("keepdims", 1)))


@handler("ArgMax", "ArgMin")
def arg_reduction(n: Call) -> Value:
    x, axis = n.value(0), n.axis(0)
    find = ops.argmax if n.op == "ArgMax" else ops.argmin
    facts: dict[str, Any] = {"axis": axis, "keepdims": bool(n.attr("keepdims", 1))}
    if not n.attr("select_last_index", 0):
        return find(x, **facts)
    return known_dim(n, 0, axis) - 1 - find(functions.flip(x, axis), **facts)


@handler("TopK")
def top_k(n: Call) -> tuple[Value, Value]:
    """k is an operand from opset 10 on. The elements are sorted, also where that is not asked for."""
    x, axis = n.value(0), n.axis(-1)
    (k,) = n.ints(1) if n.has(1) else (n.attr("k"),)
    found = ops.top_k(functions.moveaxis(x, axis, -1), k=k, largest=bool(n.attr("largest", 1)))
    values, indices = (functions.moveaxis(v, -1, axis) for v in found)
    return values, indices


@handler("CumSum", "CumProd")
def running(n: Call) -> Value:
    x, (axis,) = n.value(0), n.ints(1)
    run = ops.cumsum if n.op == "CumSum" else ops.cumprod
    return run(x, axis=axis, exclusive=bool(n.attr("exclusive", 0)), reverse=bool(n.attr("reverse", 0)))
