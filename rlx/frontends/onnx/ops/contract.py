"""Products of matrices and tensors, and determinants."""

from __future__ import annotations

from rlx.frontends.onnx import quantities
from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops import blocks
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.node import Value

_UNROLLED = 64  # rows of a matrix whose determinant is unrolled


@handler("MatMul")
def matmul(n: Call) -> Value:
    """numpy's matmul: an operand of one dim is a row or a column, whose dim the result lacks."""
    return joint(n, n.value(0), n.value(1))


def joint(n: Call, x: Value, y: Value, turned: tuple[bool, bool] = (False, False)) -> Value:
    """The product, on integers or packed weights where operands were dequantised. `turned`: matrices to be transposed."""
    out = quantities.matmul_of(n, x, y, turned)
    out = blocks.matmul_of(n, x, y, turned[1]) if out is None and not turned[0] else out
    return product(x.T if turned[0] else x, y.T if turned[1] else y) if out is None else out


def product(x: Value, y: Value) -> Value:
    row, column = x.rank == 1, y.rank == 1
    out = ops.matmul(ops.unsqueeze(x, axes=(0,)) if row else x, ops.unsqueeze(y, axes=(1,)) if column else y)
    gone = ((-2,) if row else ()) + ((-1,) if column else ())
    return ops.squeeze(out, axes=gone) if gone else out


@handler("Gemm", since=7)
def gemm(n: Call) -> Value:
    out = joint(n, n.value(0), n.value(1), (bool(n.attr("transA", 0)), bool(n.attr("transB", 0))))
    out = _scaled(out, n.attr("alpha", 1.0))
    return out + _scaled(n.value(2), n.attr("beta", 1.0)) if n.has(2) else out


def _scaled(x: Value, factor: float) -> Value:
    """Integers are scaled in f64, and rounded towards zero."""
    if factor == 1:
        return x
    return x * factor if x.dtype.is_float else (x.astype("f64") * factor).astype(x.dtype)


@handler("Einsum")
def einsum(n: Call) -> Value:
    return functions.einsum(n.attr("equation"), *n.values())


@handler("Det")
def determinant(n: Call) -> Value:
    if max(n.sizes(0)[-2:]) > _UNROLLED:
        n.refuse(f"the determinant of {n.sizes(0)[-2]} rows is not supported: of at most {_UNROLLED} it is")
    return functions.det(n.value(0))
