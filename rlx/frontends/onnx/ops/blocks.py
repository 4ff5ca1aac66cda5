"""Weights quantised in blocks: products that read packed weights, and rows of packed tables.

Packed weights have f16 scales, and integers around the middle of their range; other zero points add a small product. A weight
whose scales are no f16 numbers is decoded to f32 before the first run, unless the node allows products in f16 or less
(`accuracy_level` 2 and more): then its scales are rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from rlx.frontends.onnx import narrow, quantities
from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.shape import counted
from rlx.frontends.onnx.quantities import Quantity, dequantised, spread
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.blocks import FORMATS, Format
from rlx.ir.dtype import f32, i8, u8
from rlx.ir.node import Value, constant

MS = "com.microsoft"
FORMAT = {4: "q4_0", 8: "q8_0"}
GROUP = 32  # elements with one scale in these formats


class Weight(NamedTuple):
    """A weight [rows, columns]: (integers - zeros) * scales, with integers from 0 on, and f32 [rows, blocks] of `block` columns.
    `name`: of this weight in the graph."""

    name: str
    integers: Callable[[], np.ndarray]
    scales: np.ndarray
    zeros: np.ndarray
    bits: int
    columns: int
    block: int

    @property
    def format(self) -> Format | None:
        """That of packed weights."""
        form = FORMATS.get(FORMAT.get(self.bits, ""))
        return form if self.block % GROUP == 0 or self.block >= self.columns else None

    def fits(self, rounded: bool = False) -> bool:
        """Whether packed weights have the same values, or `rounded` scales."""
        half = self.scales.astype(np.float16).astype(np.float32)
        near = np.abs(half - self.scales) <= np.abs(self.scales) * (2**-10 if rounded else 0)
        return self.format is not None and bool(near.all())


def unpacked(raw: np.ndarray, bits: int) -> np.ndarray:
    """The integers of bytes, low bits first, along the last axis."""
    if bits == 8:
        return raw
    return np.stack([raw >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).reshape(*raw.shape[:-1], -1)


def of_bytes(raw: Value, bits: int) -> Value:
    """The same in the graph."""
    parts = [ops.bitwise_and(ops.shift_right(raw, shift), (1 << bits) - 1) for shift in range(0, 8, bits)]
    return raw if bits == 8 else functions.stack(parts, -1).reshape((*raw.dims[:-1], -1))


def named(n: Call, *operands: Value) -> str:
    """A name for a weight that is made of these, the same for other nodes that read them."""
    names = []
    for v in operands:
        while v.node.op.name in ("reshape", "transpose"):
            v = v.node.inputs[0]
        names.append(v.node.name or n.where)
    return "/".join(names)


def param(n: Call, name: str, make: Callable[[], np.ndarray]) -> Value:
    """A param, u8, whose contents are made once for a model."""
    graph, made = n.scope.importer.graph, n.scope.importer.made
    while name in graph.weights and graph.weights[name] is not made.get(name):
        name += "'"
    if name in graph.weights:
        return next(p for p in graph.params if p.name == name)
    if name not in made:
        made[name] = make()
    graph.weights[name] = made[name]
    return graph.param(name, made[name].shape, u8)


def packed(n: Call, w: Weight) -> Value:
    """Rows of blocks."""
    form, rows, groups = w.format, len(w.scales), -(-w.columns // GROUP)
    assert form is not None

    def make() -> np.ndarray:
        middle, blocks = 1 << w.bits - 1, np.zeros((rows * groups, form.nbytes), np.uint8)
        each = np.repeat(w.scales, -(-w.block // GROUP), axis=1)[:, :groups].astype("<f2")
        blocks[:, :2] = np.ascontiguousarray(each).reshape(-1, 1).view(np.uint8)
        whole = np.pad(w.integers(), ((0, 0), (0, groups * GROUP - w.columns)), constant_values=middle).reshape(-1, GROUP)
        form.q.write(blocks, whole if w.bits == 4 else whole ^ 128)
        return blocks.reshape(rows, -1)

    return param(n, f"{w.name}.{form.name}", make)


def product(n: Call, x: Value, w: Weight, exact: bool = True) -> Value:
    """x [..., columns] by a weight that is packed, in the dtype of the sums. Zero points add a product with the sums of x over
    blocks."""
    out = ops.dequant_matmul(x, packed(n, w), format=FORMAT[w.bits], exact=exact, wide=True)
    more = lean(w)
    return out if more is None else out + ops.matmul(block_sums(x, w), more.T.astype(out.dtype))


def lean(w: Weight) -> Value | None:
    """f32 [rows, blocks]: the part of each weight that packed weights lack, because its zero point is not the middle. None: it is
    0 for all."""
    more = (1 << w.bits - 1) - w.zeros
    return constant(w.scales.astype(np.float16) * more.astype(np.float32)) if more.any() else None


def decoded(raw: Value, scales: Value, w: Weight) -> Value:
    """The weight in f32, [rows, columns], decoded in the graph."""
    integers = of_bytes(raw, w.bits).reshape((len(w.scales), -1))[:, : w.columns]
    return dequantised(Quantity(integers, scales.reshape(w.scales.shape), constant(w.zeros), 1, w.block))


def block_sums(x: Value, w: Weight) -> Value:
    """x [..., columns] summed over the columns of each block, in the dtype of sums."""
    groups = w.scales.shape[1]
    x, short = x.astype(x.dtype.compute), groups * w.block - w.columns
    x = ops.pad(x, low=(0,) * x.rank, high=(0,) * (x.rank - 1) + (short,)) if short else x
    return ops.sum(x.reshape((*x.dims[:-1], groups, w.block)), axis=-1)


def matmul_of(n: Call, x: Value, y: Value, turned: bool) -> Value | None:
    """The product with a matrix of known integers of 4 or 8 bits that DequantizeLinear decoded, from packed weights of the same
    values; None: it is no such matrix. `turned`: y is to be transposed."""
    w = _dequantised(n, y, turned) if x.dtype.is_float else None
    return None if w is None or not w.fits() else product(n, x, w).astype(x.dtype)


def _dequantised(n: Call, y: Value, turned: bool) -> Weight | None:
    """The transpose of y, or with `turned` y, if it was dequantised with scales by its rows, or by blocks of its columns."""
    y, flipped = quantities.origin(n, y)
    rows_first, q = turned != flipped, n.scope.importer.quantities.get(y)
    if q is None or y.rank != 2:
        return None
    raw, scales, zeros = (None if v is None else n.scope.contents(v) for v in (q.integers, q.scale, q.zero))
    rows, columns = y.shape.static[:: 1 if rows_first else -1]
    if raw is None or scales is None or (q.zero is not None and zeros is None) or raw.dtype not in (np.int8, np.uint8):
        return None
    if q.axis != (rows_first if q.block else not rows_first) and (q.block or scales.size > 1):
        return None
    code = n.scope.importer.types.get(q.integers)
    bits, block = 4 if code in narrow.INTEGERS else 8, q.block or columns
    middle = 1 << bits - 1 if raw.dtype == np.int8 else 0

    def by_block(v: np.ndarray) -> np.ndarray:
        v = v.astype(np.float32)
        return (v if rows_first else v.T) if q.block else np.broadcast_to(v.reshape(-1, 1), (rows, 1))

    def integers() -> np.ndarray:
        return ((raw if rows_first else raw.T).astype(np.int16) + middle).astype(np.uint8)

    found = np.zeros_like(scales) if zeros is None else zeros
    name = named(n, q.integers, q.scale) + ("" if rows_first else ".T")
    w = Weight(name, integers, by_block(scales), by_block(found) + middle, bits, columns, block)
    if y.dtype != f32:  # its values were rounded
        values = (integers() - np.repeat(w.zeros, block, 1)[:, :columns]) * np.repeat(w.scales, block, 1)[:, :columns]
        return w if np.array_equal(values.astype(y.dtype.numpy).astype(np.float32), values) else None
    return w


@handler("MatMulNBits", domain=MS)
def matmul_nbits(n: Call) -> Value:
    """x [..., k] by a weight [n, blocks, bytes] with scales [n * blocks] and zero points, which are packed like the weight, or of
    the scales' dtype."""
    x, k, rows, block, bits = n.value(0), n.attr("K"), n.attr("N"), n.attr("block_size"), n.attr("bits", 4)
    if bits not in (2, 4, 8) or n.has(4):
        n.refuse(f"{bits} bits{', reordered by g_idx' if n.has(4) else ''}: 2, 4 or 8 bits in order are supported")
    scales = scales_of(n, 2, rows, blocks_of(n, k, block))
    zeros, raw, level = zeros_of(n, 3, scales, bits), n.value(1), n.attr("accuracy_level", 0)

    def integers() -> np.ndarray:
        found = n.known(1)
        if found.size % rows or found.size * 8 < rows * k * bits:
            n.refuse(f"operand 1 has dims {list(found.shape)}, and {rows} rows of {k} integers of {bits} bits are needed (N, K)")
        return unpacked(found.reshape(rows, -1), bits)[:, :k]

    w = Weight(named(n, raw, n.value(2)), integers, scales, zeros, bits, k, block)
    if w.fits(rounded=level >= 2):
        out = product(n, x, w, exact=level != 4)
    else:
        out = ops.matmul(x.astype(x.dtype.compute), decoded(raw, n.value(2), w).T.astype(x.dtype.compute))
    out = out.astype(x.dtype)
    return out + n.value(5).astype(x.dtype) if n.has(5) else out


def blocks_of(n: Call, columns: int, block: int) -> int:
    """The number of blocks of a row."""
    return -(-columns // block) if block > 0 else n.refuse(f"block_size {block} is no number of columns")


def scales_of(n: Call, i: int, *dims: int) -> np.ndarray:
    """The scales in operand i, f32 of these dims."""
    check_dims(n, i, "scales", dims)
    return n.known(i).reshape(dims).astype(np.float32)


def zeros_of(n: Call, i: int, scales: np.ndarray, bits: int) -> np.ndarray:
    """The zero points in operand i, f32 with the dims of the scales: numbers, or bytes in which each row begins anew. If they are
    left out, the middle."""
    if not n.has(i):
        return np.full(scales.shape, 1 << bits - 1, np.float32)
    found, in_bytes = n.known(i), n.element_type(i) == TensorProto.UINT8
    check_dims(n, i, "zero points", dims := in_whole_bytes(scales.shape, bits) if in_bytes else scales.shape)
    found = unpacked(found.reshape(dims), bits)[..., : scales.shape[-1]] if in_bytes else found.reshape(dims)
    return found.astype(np.float32)


def in_whole_bytes(dims: tuple[int, ...], bits: int) -> tuple[int, ...]:
    """The dims of rows of integers in bytes."""
    return *dims[:-1], -(-dims[-1] * bits // 8)


def check_dims(n: Call, i: int, what: str, dims: tuple[int, ...]) -> None:
    """Refuses operand i if it does not have as many elements."""
    if math.prod(n.sizes(i)) != math.prod(dims):
        n.refuse(f"operand {i} has {what} of dims {list(n.sizes(i))}, and {list(dims)} are needed")


@handler("GatherBlockQuantized", domain=MS)
def gather_block_quantized(n: Call) -> Value:
    """Rows of a quantised table, decoded. Without zero points, integers in bytes are around the middle of their range."""
    block, bits, width, in_bytes = n.attr("block_size", 128), n.attr("bits", 4), n.rank(0), n.element_type(0) == TensorProto.UINT8
    bits = bits if in_bytes else 4
    if n.axis(0, name="gather_axis") or n.axis(1, name="quantize_axis") != width - 1:
        n.refuse("rows are gathered along axis 0 of a table that is quantised along its last axis")
    if bits not in (2, 4, 8) or not (in_bytes or n.element_type(0) in (TensorProto.INT4, TensorProto.UINT4)):
        n.refuse(f"a table of {n.dtype(0)} in {bits} bits is not supported: integers of 2, 4 or 8 bits are")
    columns = n.sizes(0)[-1] * (8 // bits if in_bytes else 1)
    scales = scales_of(n, 2, *n.sizes(0)[:-1], blocks_of(n, columns, block))
    table, name = n.value(0), named(n, n.value(0), n.value(2))
    middle = 1 << bits - 1 if in_bytes or n.dtype(0) == i8 else 0  # that stands for 0
    ids = counted(n.value(1), n.sizes(0)[0])

    def integers() -> np.ndarray:
        return unpacked(n.known(0), bits) if in_bytes else (n.known(0).astype(np.int16) + middle).astype(np.uint8)

    w = Weight(name, integers, scales, np.full(scales.shape, middle, np.float32), bits, columns, block)
    if width == 2 and not n.has(3) and (rows := _rows(n, w, ids)) is not None:
        return rows.astype(n.dtype(2))
    if not in_bytes:
        table = param(n, f"{name}.bytes", lambda: _nibbles(integers()))
    q, scale = (ops.gather(v, ids) for v in (table, n.value(2).reshape(scales.shape)))
    q, zero = of_bytes(q, bits)[..., :columns].astype(f32), constant(middle, f32)
    if n.has(3):
        check_dims(n, 3, "zero points", dims := in_whole_bytes(scales.shape, bits) if in_bytes else scales.shape)
        least = ops.gather(n.value(3).reshape(dims), ids)
        zero = of_bytes(least, bits)[..., : scales.shape[-1]].astype(f32) if in_bytes else least.astype(f32) + middle
        zero = spread(zero, q, q.rank - 1, block)
    return ((q - zero) * spread(scale, q, q.rank - 1, block).astype(f32)).astype(n.dtype(2))


def _rows(n: Call, w: Weight, ids: Value) -> Value | None:
    """Rows of a packed weight, decoded in f32; None: packed weights do not have its values."""
    if not w.fits() or lean(w) is not None:
        return None
    return ops.dequantize(ops.gather(packed(n, w), ids), format=FORMAT[w.bits], columns=w.columns)


def rows_of(n: Call, table: Value, ids: Value) -> Value | None:
    """Rows of a table of known integers of 4 or 8 bits that DequantizeLinear decoded, from packed weights of the same values;
    None: it is no such table."""
    w = _dequantised(n, table, True)
    found = None if w is None else _rows(n, w, ids)
    return None if found is None else found.astype(table.dtype)


def _nibbles(q: np.ndarray) -> np.ndarray:
    """Integers of 4 bits, two in a byte."""
    q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, q.shape[-1] % 2)])
    return q[..., 0::2] | q[..., 1::2] << 4
