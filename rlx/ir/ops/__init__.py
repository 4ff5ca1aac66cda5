"""The op table, by family. Importing this package fills OPS; the constructors here are what users call."""
# ruff: noqa: I001 (one line per family reads as a table)

from rlx.ir.ops.activation import clip, expm1, gelu, log1p, relu, sigmoid, silu, softplus
from rlx.ir.ops.attention import attention, attention_parts, rope
from rlx.ir.ops.boxes import non_max_suppression
from rlx.ir.ops.collective import all_gather, all_reduce, all_to_all, broadcast_rank, exchange, rank_slice, reduce_scatter
from rlx.ir.ops.complex import complex, conj, imag, real, view_as_complex, view_as_real
from rlx.ir.ops.control import branch, loop
from rlx.ir.ops.contract import flatten_matmul, int8_matmul, linear, matmul
from rlx.ir.ops.conv import conv
from rlx.ir.ops.conv_transpose import conv_transpose
from rlx.ir.ops.elementwise import (
    abs, add, bitcast, bitwise_and, bitwise_not, bitwise_or, bitwise_xor, cast, ceil, cos, div, equal, erf, exp, floor, floor_div,
    is_nan, less, less_equal, log, logical_and, logical_not, logical_or, logical_xor, maximum, minimum, mod, mul, multiply_add,
    neg, not_equal, pow, reciprocal, rem, round, rsqrt, shift_left, shift_right, sign, sin, sqrt, sub, tanh, trunc, where,
)  # fmt: skip
from rlx.ir.ops.experts import group_ends, group_rows, grouped_matmul, route, router, segment_matmul
from rlx.ir.ops.index import concat, copy, embedding, gather, iota, pad
from rlx.ir.ops.norm import batch_norm, group_norm, layer_norm, rms_norm
from rlx.ir.ops.order import argmax, argmin, argsort, cumprod, cumsum, sort, top_few, top_k
from rlx.ir.ops.pool import avg_pool, lp_pool, max_pool, max_pool_indices
from rlx.ir.ops.quant import dequant_matmul, dequantize
from rlx.ir.ops.quant_pack import pack_quant
from rlx.ir.ops.pack import pack
from rlx.ir.ops.packed_rows import quant_rows
from rlx.ir.ops.random import gumbel, random_bits, random_uniform, threshold
from rlx.ir.ops.reduce import all, any, log_softmax, max, mean, min, prod, softmax, sum, variance
from rlx.ir.ops.scatter import gather_elements, scatter_add, scatter_elements
from rlx.ir.ops.state import take_rows, update_rows, valid_rows
from rlx.ir.ops.trigonometry import acos, acosh, asin, asinh, atan, atanh, cosh, sinh, tan
from rlx.ir.ops.view import broadcast_to, reshape, slice, split, squeeze, transpose, unsqueeze
from rlx.ir.ops.windows import windows
from rlx.ir.op import OPS

OWN = frozenset(OPS.values())  # ops declared in this package: its sources define them completely
astype, take = cast, gather  # numpy's names for the same constructors

__all__ = [
    "abs", "acos", "acosh", "add", "all", "all_gather", "all_reduce", "all_to_all", "any", "argmax", "argmin", "argsort",
    "asin", "asinh", "astype", "atan", "atanh", "attention", "attention_parts", "avg_pool", "batch_norm", "bitcast",
    "bitwise_and", "bitwise_not", "bitwise_or", "bitwise_xor", "branch", "broadcast_rank", "broadcast_to", "cast", "ceil",
    "clip", "complex", "concat", "conj", "conv", "conv_transpose", "copy", "cos", "cosh", "cumprod", "cumsum",
    "dequant_matmul", "dequantize", "div", "embedding", "equal", "erf", "exchange", "exp", "expm1", "flatten_matmul", "floor",
    "floor_div", "gather", "gather_elements", "gelu", "group_ends", "group_norm", "group_rows", "grouped_matmul", "gumbel",
    "imag", "int8_matmul", "iota", "is_nan", "layer_norm", "less", "less_equal", "linear", "log", "log1p", "log_softmax",
    "logical_and", "logical_not", "logical_or", "logical_xor", "loop", "lp_pool", "matmul", "max", "max_pool",
    "max_pool_indices", "maximum", "mean", "min", "minimum", "mod", "mul", "multiply_add", "neg", "non_max_suppression",
    "not_equal", "pack", "pack_quant", "pad", "pow", "prod", "quant_rows", "random_bits", "random_uniform", "rank_slice",
    "real", "reciprocal", "reduce_scatter", "relu", "rem", "reshape", "rms_norm", "rope", "round", "route", "router", "rsqrt",
    "scatter_add", "scatter_elements", "segment_matmul", "shift_left", "shift_right", "sigmoid", "sign", "silu", "sin",
    "sinh", "slice", "softmax", "softplus", "sort", "split", "sqrt", "squeeze", "sub", "sum", "take", "take_rows", "tan",
    "tanh", "threshold", "top_few", "top_k", "transpose", "trunc", "unsqueeze", "update_rows", "valid_rows", "variance",
    "view_as_complex", "view_as_real", "where", "windows",
]  # fmt: skip
