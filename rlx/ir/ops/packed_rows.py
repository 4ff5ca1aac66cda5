"""Rows of a table out of the packed form that a contraction streams: a table with two uses (tied embeddings) is kept once.

Each op declares by `unpacks` which readers of a param it can stand in for; rlx/compile/packing.py asks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.dtype import f32, u8
from rlx.ir.graph import Node, Value
from rlx.ir.kernel import k
from rlx.ir.op import Attrs, Kind, Sample, op
from rlx.ir.ops.contract import pack_panels
from rlx.ir.ops.index import check_range, gather, picked
from rlx.ir.ops.quant import Block, dequantize
from rlx.ir.ops.quant_pack import PACKINGS, PANEL, STEP, PackAttrs, Packing, pack_quant, packing
from rlx.ir.ops.rules import axis_of, integer, static_dim
from rlx.ir.ops.view import transpose
from rlx.ir.shape import Shape


class EntriesAttrs(Attrs):
    """`entries`: rows of the table; the last panel may have room for more."""

    entries: int

    def __post_init__(self) -> None:
        if self.entries < 1:
            raise AttributeValueError(f"a table has at least one row, got {self.entries}")


def _check_panels(entries: int, packed: Shape, width: int) -> None:
    if packed.dims[0] != -(-entries // width):
        raise ShapeError(f"{entries} rows in panels of {width} are not {packed}")


def _along_ids(attrs: Any, operand: int, axis: int, packed: Shape, ids: Shape) -> int | None:
    return axis if operand == 1 else ids.rank if axis == 1 and packed.rank == 3 else None


def _table_of(rows: Node) -> Value | None:
    """The table of which a node gathers rows."""
    is_rows = rows.op is gather.op and rows.inputs[0].rank == 2 and axis_of(rows.attrs.axis, 2) == 0  # type: ignore[attr-defined, union-attr]
    return rows.inputs[0] if is_rows and rows.inputs[0].dims[0] else None


# -- panels of numbers ---------------------------------------------------------------------------------------------


def _panel_rows_shape(attrs: EntriesAttrs, packed: Shape, ids: Shape) -> Shape:
    integer("the ids", ids)
    if packed.rank not in (3, 4):
        raise ShapeError(f"panels are as pack_panels makes them of a matrix, got {packed}")
    _check_panels(attrs.entries, packed, static_dim(packed.dims[2], "panels"))
    return packed.with_dims((*ids.dims, math.prod((packed.dims[1], *packed.dims[3:]))))


def _panel_rows_array(attrs: EntriesAttrs, packed: np.ndarray, ids: np.ndarray) -> np.ndarray:
    check_range(ids, attrs.entries, "panel_rows")
    rows = packed[ids // packed.shape[2], :, ids % packed.shape[2]]
    return rows.reshape(*ids.shape, -1)


def _panel_rows_element(ctx: Any, node: Any, result: int, coords: Sequence[Any]) -> Any:
    packed, ids = node.inputs
    row, (_, _, width, *group) = picked(ctx, ids, coords[:-1], node.attrs.entries), ctx.dims(packed)
    panel, lane, column = k.div(row, width), k.rem(row, width), coords[-1]
    if not group:
        return ctx.element(packed, (panel, column, lane))
    return ctx.element(packed, (panel, k.div(column, group[0]), lane, k.rem(column, group[0])))


def _panel_rows_for(reader: Node, pack: Node) -> Value | None:
    """For rows of w where w.T is packed."""
    turned = pack.inputs[0].node
    if pack.op is not pack_panels.op or turned.op is not transpose.op or (table := _table_of(reader)) is None:  # type: ignore[attr-defined]
        return None
    if turned.inputs[0] != table or tuple(a % 2 for a in turned.attrs.axes) not in ((), (1, 0)):  # type: ignore[union-attr]
        return None
    if static_dim(table.dims[1], "panels") % pack.attrs.group:  # type: ignore[union-attr]
        return None
    return panel_rows(pack.results[0], reader.inputs[1], entries=table.dims[0])


panel_rows = op(
    "panel_rows", kind=Kind.INDEX, infer=_panel_rows_shape, attrs=EntriesAttrs, arity=(2, 2), dtypes="fiu", roles="xi",
    reference=_panel_rows_array, element=_panel_rows_element, unpacks=_panel_rows_for, rows=_along_ids,
    samples=(
        Sample(((3, 17, 8), (4,)), {"entries": 21}, low=0, high=21, dtypes=("", "i64")),
        Sample(((1, 33, 48), (2, 3)), {"entries": 5}, low=0, high=5, dtypes=("", "i32")),
        Sample(((3, 9, 8, 2), (4,)), {"entries": 21}, low=0, high=21, dtypes=("", "i32")),
    ),
    doc="Rows of a table w [entries, k], one per id, out of pack_panels(w.T): [panels, k, panel], or [panels, k / group, panel, "
    "group] -> [ids…, k].",
)  # fmt: skip


# -- panels of quantised blocks ------------------------------------------------------------------------------------


class QuantRowsAttrs(PackAttrs, EntriesAttrs):
    """`columns`: elements of a row; its last block may have more."""

    columns: int


def _quant_rows_shape(attrs: QuantRowsAttrs, packed: Shape, ids: Shape) -> Shape:
    integer("the ids", ids)
    p = packing(attrs)
    if packed.dtype != u8 or packed.rank != 2 or packed.dims[1] != -(-attrs.columns // p.block) * p.panel_bytes:
        raise ShapeError(f"{attrs.columns} columns of {attrs.format} in panels are not {packed}")
    _check_panels(attrs.entries, packed, PANEL)
    return Shape((*ids.dims, attrs.columns), f32)


def _quant_rows_array(attrs: QuantRowsAttrs, packed: np.ndarray, ids: np.ndarray) -> np.ndarray:
    check_range(ids, attrs.entries, "quant_rows")
    p, ids = packing(attrs), ids.astype(np.int64)
    block = packed.astype(np.uint8)[ids // PANEL].reshape(*ids.shape, -1, p.panel_bytes)
    lane = (ids % PANEL)[..., None]
    numbers = [_lane(block[..., 2 * PANEL * n :], lane, 2).view("<f2").astype(np.float32) for n in range(len(p.numbers))]
    out = []
    for turn in range(p.block // STEP):
        line = block[..., p.turns_at + turn * p.turn_bytes :]
        q = np.zeros((*block.shape[:-1], STEP), np.int32)
        for n, (plane, first) in enumerate(p.dwords()):
            bits = _lane(line[..., p.dwords_at + 4 * PANEL * n :], lane, 4).astype(np.int32)
            for i in range(8 // plane.bits):
                part = bits >> i * plane.bits & (1 << plane.bits) - 1
                q[..., first + 4 * i : first + 4 * i + 4] |= part << (p.low.bits if plane is p.high else 0)
        extra = [_lane(line[..., PANEL * n :], lane, 1) for n in range(len(p.of_turn(turn)))]
        scales, mins = extra[: STEP // p.group * bool(p.scales)], extra[-1:] if p.mins else []
        scale = np.concatenate([numbers[0] * (s.view(np.int8) if p.signed else s) for s in scales] or numbers[:1], -1)
        value = np.repeat(scale, STEP // scale.shape[-1], -1) * (q - p.zero).astype(np.float32)
        out.append(value - numbers[1] * mins[0] if mins else value)
    return np.concatenate(out, -1).reshape(*ids.shape, -1)[..., : attrs.columns]


def _lane(runs: np.ndarray, lane: np.ndarray, size: int) -> np.ndarray:
    """Of PANEL runs of `size` bytes, u8 [..., blocks, PANEL * size and more], each row's own: [..., blocks, size]."""
    runs = runs[..., : PANEL * size].reshape(*runs.shape[:-1], PANEL, size)
    return np.ascontiguousarray(np.take_along_axis(runs, lane[..., None, None], -2)[..., 0, :])


def _quant_rows_element(ctx: Any, node: Any, result: int, coords: Sequence[Any]) -> Any:
    packed, ids = node.inputs
    p, column = packing(node.attrs), coords[-1]
    row = picked(ctx, ids, coords[:-1], node.attrs.entries)
    lane, start = k.rem(row, PANEL), k.mul(k.div(column, p.block), p.panel_bytes)
    b = Block(lambda at: ctx.element(packed, (k.div(row, PANEL), k.add(start, at))))
    turn, e = k.div(k.rem(column, p.block), STEP), k.rem(column, STEP)
    at = k.add(k.mul(turn, p.turn_bytes), p.turns_at)  # of the turn
    q = _bits(p, b, k.add(at, p.dwords_at), lane, e)
    scale = b.half(k.mul(lane, 2))
    if p.scales:
        place = k.add(k.add(at, k.mul(k.div(e, p.group), PANEL)), lane)
        scale = k.mul(scale, b.signed(place) if p.signed else k.cast(b.bits(place), f32))
    value = k.mul(scale, k.cast(k.sub(q, p.zero), f32))
    if not p.mins:
        return value
    least = b.bits(k.add(k.add(at, PANEL * (STEP // p.group)), lane))
    return k.sub(value, k.mul(b.half(k.add(k.mul(lane, 2), 2 * PANEL)), k.cast(least, f32)))


def _bits(p: Packing, b: Block, start: Any, lane: Any, e: Any) -> Any:
    """The integer of element e of a turn whose dwords begin at `start`, as i32."""
    out: Any = None
    for plane, other in ((p.low, p.high), (p.high, p.low)):
        if plane is None:
            continue
        each = 32 // plane.bits  # elements of a dword
        dword = k.div(e, each)
        if other is not None:  # those of the other plane that stand before it: high bits come first
            before = 32 // other.bits
            dword = k.add(dword, k.add(k.div(e, before), 1) if plane is p.low else k.div(k.mul(dword, each), before))
        place = k.add(k.add(k.mul(dword, 4 * PANEL), k.mul(lane, 4)), k.rem(e, 4))
        q = b.bits(k.add(start, place), k.mul(k.div(k.rem(e, each), 4), plane.bits), (1 << plane.bits) - 1)
        out = q if plane is p.low else k.or_(out, k.shl(q, p.low.bits))
    return out


def _quant_rows_for(reader: Node, pack: Node) -> Value | None:
    """For decoded rows of w where w is packed."""
    if reader.op is not dequantize.op or pack.op is not pack_quant.op or pack.attrs.format != reader.attrs.format:  # type: ignore[attr-defined, union-attr]
        return None
    rows, table = reader.inputs[0].node, _table_of(reader.inputs[0].node)
    if table is None or table != pack.inputs[0]:
        return None
    how = {"format": reader.attrs.format, "entries": table.dims[0], "columns": reader.attrs.columns}  # type: ignore[union-attr]
    return quant_rows(pack.results[0], rows.inputs[1], **how)


def packed_sample(operands: list[np.ndarray], format: str, entries: int) -> np.ndarray:
    """Random blocks u8 [entries, row bytes], the same every time, whose packed form becomes the first operand."""
    p = PACKINGS[format]
    blocks = operands[0].shape[1] // p.panel_bytes
    w = np.random.default_rng(entries).integers(0, 256, (entries, blocks * p.nbytes), dtype=np.uint8)
    for at in p.numbers:  # f16 numbers between 2**-13 and 2**-12
        w[:, at + 1 :: p.nbytes] = w[:, at + 1 :: p.nbytes] & 0x83 | 0x08
    operands[0][:] = pack_quant.op.reference(PackAttrs(format), w)  # type: ignore[attr-defined]
    return w


def _sample(format: str, entries: int, blocks: int, ids: tuple[int, ...], cut: int = 0) -> Sample:
    p = PACKINGS[format]
    shape = (-(-entries // PANEL), blocks * p.panel_bytes)
    attrs = {"format": format, "entries": entries, "columns": blocks * p.block - cut}

    def settle(rng: np.random.Generator, operands: list[np.ndarray]) -> None:
        packed_sample(operands, format, entries)

    return Sample((shape, ids), attrs, low=0, high=entries, dtypes=("u8", "i32"), settle=settle)


quant_rows = op(
    "quant_rows", kind=Kind.INDEX, infer=_quant_rows_shape, attrs=QuantRowsAttrs, arity=(2, 2), dtypes="u", roles="xi",
    reference=_quant_rows_array, element=_quant_rows_element, unpacks=_quant_rows_for,
    rows=lambda attrs, operand, axis, packed, ids: axis if operand == 1 else None,
    samples=(
        _sample("q8_0", 33, 2, (5,)), _sample("q4_0", 70, 2, (2, 3), 5), _sample("q4_k", 32, 1, (4,)),
        _sample("q5_k", 3, 2, (3,), 100), _sample("q6_k", 40, 1, (6,)),
    ),
    doc="Decoded rows of a table of quantised blocks, one per id, out of pack_quant(w): u8 [panels, panel bytes] -> f32 "
    "[ids…, columns]; the very numbers that dequantize gives.",
)  # fmt: skip
