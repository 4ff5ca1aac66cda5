"""Weights quantised in blocks: products that read packed weights, and rows of packed tables.

Packed weights have f16 scales. Scales that are no f16 numbers are rounded to f16 where the node allows products in f16 or less
(`accuracy_level` 2 and more); else the weight is decoded to f32 before the first run.
"""

from __future__ import annotations

import numpy as np

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.quantities import Quantity, dequantised, spread
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import as_dtype, f32, u8
from rlx.ir.node import Value, constant

MS = "com.microsoft"
_FORMATS = {4: "q4_0", 8: "q8_0"}
GROUP = 32  # elements with one scale in these formats


def unpacked(raw: np.ndarray, bits: int) -> np.ndarray:
    """The integers of bytes, low bits first, along the last axis."""
    if bits == 8:
        return raw
    return np.stack([raw >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).reshape(*raw.shape[:-1], -1)


def is_half(scales: np.ndarray) -> bool:
    return bool(np.array_equal(scales.astype(np.float16).astype(scales.dtype), scales))


def packed(n: Call, i: int, columns: int, scales: np.ndarray, bits: int) -> Value:
    """Rows of blocks as a param, from the integers in operand i, of which the middle of their range stands for 0, and scales
    [rows, columns / a multiple of 32]. They are made once for a model."""
    form, rows = FORMATS[_FORMATS[bits]], scales.shape[0]
    graph, name = n.scope.importer.graph, n.value(i).node.name or f"{n.where} operand {i}"
    name = f"{name}.{form.name}"
    if name in graph.weights:
        return next(p for p in graph.params if p.name == name)
    found = n.scope.importer.made.get(name)
    if found is None:
        q = unpacked(n.known(i).reshape(rows, -1), bits)[:, :columns]
        groups = -(-columns // GROUP)
        blocks = np.zeros((rows * groups, form.nbytes), np.uint8)
        each = np.repeat(scales, -(-groups // scales.shape[1]), axis=1)[:, :groups].astype("<f2")
        blocks[:, :2] = np.ascontiguousarray(each).reshape(-1, 1).view(np.uint8)
        whole = np.pad(q, ((0, 0), (0, groups * GROUP - columns)), constant_values=1 << (bits - 1)).reshape(-1, GROUP)
        form.q.write(blocks, whole if bits == 4 else whole ^ 128)
        found = n.scope.importer.made[name] = blocks.reshape(rows, -1)
    graph.weights[name] = found
    return graph.param(name, found.shape, u8)


@handler("MatMulNBits", domain=MS)
def matmul_nbits(n: Call) -> Value:
    """x [..., k] by a weight [n, blocks, bytes] with scales [n * blocks] and zero points, which are packed like the weight, or of
    the scales' dtype. Zero points add a product with the sums of x over blocks."""
    x, k, rows, block, bits = n.value(0), n.attr("K"), n.attr("N"), n.attr("block_size"), n.attr("bits", 4)
    if bits not in _FORMATS or block % GROUP or n.has(4):
        order = ", reordered by g_idx" if n.has(4) else ""
        n.refuse(f"{bits} bits in blocks of {block}{order}: 4 or 8 bits in blocks of a multiple of 32 are supported")
    groups, middle = -(-k // block), 1 << (bits - 1)
    scales = n.known(2).reshape(rows, groups)
    zeros = np.full((rows, groups), middle, np.float32) if not n.has(3) else _zeros(n, rows, groups, bits)
    level = n.attr("accuracy_level", 0)
    if level < 2 and not is_half(scales):
        raw, wide = n.value(1), x.dtype.compute
        parts = [raw] if bits == 8 else [ops.bitwise_and(raw, 15), ops.shift_right(raw, 4)]
        integers = functions.stack(parts, -1).reshape((rows, -1))[:, :k]
        weight = dequantised(Quantity(integers, n.value(2).reshape((rows, groups)), constant(zeros), 1), block)
        out = ops.matmul(x.astype(wide), weight.T.astype(wide))
    else:
        out = ops.dequant_matmul(x, packed(n, 1, k, scales, bits), format=_FORMATS[bits], exact=level != 4, wide=True)
        if (zeros != middle).any():
            whole = ops.pad(x, low=0, high=(0,) * (x.rank - 1) + (groups * block - k,)) if k % block else x
            sums = ops.sum(whole.astype(out.dtype).reshape((*x.dims[:-1], groups, block)), axis=-1)
            half = scales.astype(np.float16).astype(np.float32)
            out = out + ops.matmul(sums, constant(np.ascontiguousarray((half * (middle - zeros)).T)).astype(out.dtype))
    out = out.astype(x.dtype)
    return out + n.value(5).astype(x.dtype) if n.has(5) else out


def _zeros(n: Call, rows: int, groups: int, bits: int) -> np.ndarray:
    zeros = n.known(3)
    if zeros.dtype != np.uint8:
        return zeros.reshape(rows, groups).astype(np.float32)
    return unpacked(zeros.reshape(rows, -1), bits)[:, :groups].astype(np.float32)


@handler("GatherBlockQuantized", domain=MS)
def gather_block_quantized(n: Call) -> Value:
    """Rows of a quantised table, decoded. Without zero points, integers in bytes are around the middle of their range."""
    block, bits, width = n.attr("block_size", 128), n.attr("bits", 4), n.rank(0)
    if n.attr("gather_axis", 0) or n.attr("quantize_axis", 1) % width != width - 1:
        n.refuse("rows are gathered along axis 0 of a table that is quantised along its last axis")
    in_bytes = n.known(0).dtype == np.uint8
    table = unpacked(n.known(0), bits) if in_bytes else n.known(0).astype(np.int8)
    zero = np.uint8(1 << (bits - 1)) if in_bytes else np.int8(0)
    zeros = n.known(3, np.full(n.sizes(2), zero))
    zeros = unpacked(zeros, bits)[..., : n.sizes(2)[-1]] if n.has(3) and in_bytes else zeros.astype(table.dtype)
    q, scale, least = (ops.gather(v, n.value(1), axis=0) for v in (constant(table), n.value(2), constant(zeros)))
    wide = (q.astype(f32) - spread(least, q, q.rank - 1, block).astype(f32)) * spread(scale, q, q.rank - 1, block).astype(f32)
    return wide.astype(as_dtype(n.dtype(2)))
