"""Packed quantised weights.

`pack_quant` interleaves rows of quantised blocks (the byte formats of model files) for kernels that stream weights. A panel has
PANEL rows. Each block of a panel starts with its f16 numbers: each number is stored for all rows, contiguously. Then come the
elements, STEP at a time (a turn): their scales and mins, one byte per row; then dwords, one per row, each with the bits of four
(8 bits each), eight (4 bits), or more consecutive elements of that row. So one vector load gives every lane of a dot
instruction, or of a conversion, its own row, and a kernel reads memory sequentially. No bit of a number is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from types import SimpleNamespace
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.contexts import Applied, Lowering
from rlx.ir.declare import op
from rlx.ir.dtype import u8
from rlx.ir.kernel import Expr, Loop, Loops, Var, const, k
from rlx.ir.layout import TiledLayout
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.rules import static_dim
from rlx.ir.shape import Shape

PANEL = 32  # rows: two 64-byte vectors of dwords
STEP = 32  # elements per iteration ("turn") of a kernel's innermost loop; block sizes are multiples of it


@dataclass(frozen=True)
class Bits:
    """Location of `bits` bits of element e of a block: byte base + e // outer * stride + e % inner, from bit
    (e % outer) // inner * step."""

    base: int
    outer: int
    stride: int
    inner: int
    step: int
    bits: int

    def at(self, e: Any, on: Any) -> tuple[Any, Any]:
        """(byte, shift) of element e: an expression with `on` the builder of expressions, an array with _ARRAYS."""
        over, within = on.div(e, self.outer), on.rem(e, self.outer)
        byte = on.add(on.add(on.mul(over, self.stride), on.rem(e, self.inner)), self.base)
        return byte, on.mul(on.div(within, self.inner), self.step)


_ARRAYS = SimpleNamespace(add=np.add, mul=np.multiply, div=np.floor_divide, rem=np.mod)
Pieces = tuple[tuple[int, int, int, int], ...]  # ((byte >> right) & mask) << left, joined by or


@dataclass(frozen=True)
class Packing:
    """Layout of a format's blocks, of `block` elements in `nbytes`, and of the same blocks in a panel.

    An element is `scale * (q - zero) - least`; q has `low` bits, with `high` bits above them; the packed q is xored with `flip`.
    `numbers`: byte offsets of the f16 numbers: the scale, then the factor of the mins. `scales`: if a block has more than one
    scale, a byte (`signed`: i8) per `group` elements that multiplies the scale; `mins`: a byte per STEP elements.
    """

    block: int
    nbytes: int
    zero: int
    low: Bits
    high: Bits | None = None
    flip: int = 0
    numbers: tuple[int, ...] = (0,)
    scales: tuple[Pieces, ...] = ()
    mins: tuple[Pieces, ...] = ()
    signed: bool = False
    group: int = STEP

    @property
    def turns_at(self) -> int:
        """Offset of the first turn in a block of a panel: STEP elements of all rows with their scales, mins and dwords."""
        return 2 * PANEL * len(self.numbers)

    @property
    def dwords_at(self) -> int:
        """Offset of the dwords in a turn."""
        return PANEL * (len(self.scales) + len(self.mins)) * STEP // self.block

    @property
    def turn_bytes(self) -> int:
        bits = self.low.bits + (self.high.bits if self.high else 0)
        return self.dwords_at + PANEL * STEP * bits // 8

    @property
    def panel_bytes(self) -> int:
        """Size of one block of a panel."""
        return self.turns_at + self.turn_bytes * (self.block // STEP)

    def of_turn(self, turn: int) -> tuple[Pieces, ...]:
        """The scales and mins of the elements of a turn."""
        count = len(self.scales) * STEP // self.block
        return self.scales[turn * count : (turn + 1) * count] + self.mins[turn : turn + 1]

    def dwords(self) -> list[tuple[Bits, int]]:
        """The dwords of a turn in order, as (plane, first element in the turn). High bits precede the low bits of the same
        elements, so that a kernel reads sequentially."""
        planes = [x for x in (self.high, self.low) if x]
        found = [(plane, at) for plane in planes for at in range(0, STEP, 32 // plane.bits)]
        return sorted(found, key=lambda x: (x[1], x[0] is self.low))


def _k_scales(start: int) -> tuple[tuple[Pieces, ...], tuple[Pieces, ...]]:
    """Eight 6-bit scales and eight 6-bit mins in twelve bytes: the first four of each whole, the others split in 4 + 2 bits."""
    low = range(4)
    scales = [((start + j, 0, 63, 0),) for j in low] + [((start + 8 + j, 0, 15, 0), (start + j, 6, 3, 4)) for j in low]
    mins = [((start + 4 + j, 0, 63, 0),) for j in low] + [((start + 8 + j, 4, 15, 0), (start + 4 + j, 6, 3, 4)) for j in low]
    return tuple(scales), tuple(mins)


_SCALES, _MINS = _k_scales(4)
PACKINGS: dict[str, Packing] = {
    "q8_0": Packing(32, 34, 128, Bits(2, 32, 32, 32, 0, 8), flip=128),
    "q4_0": Packing(32, 18, 8, Bits(2, 32, 16, 16, 4, 4)),
    "q4_k": Packing(256, 144, 0, Bits(16, 64, 32, 32, 4, 4), numbers=(0, 2), scales=_SCALES, mins=_MINS),
    "q5_k": Packing(
        256, 176, 0, Bits(48, 64, 32, 32, 4, 4), Bits(16, 256, 32, 32, 1, 1), numbers=(0, 2), scales=_SCALES, mins=_MINS
    ),
    "q6_k": Packing(
        256, 210, 32, Bits(0, 128, 64, 64, 4, 4), Bits(128, 128, 32, 32, 2, 2), numbers=(208,),
        scales=tuple(((192 + j, 0, 255, 0),) for j in range(16)), signed=True, group=16,
    ),
}  # fmt: skip
PACKINGS |= {"int8": PACKINGS["q8_0"], "int4": PACKINGS["q4_0"]}


class PackAttrs(Attrs):
    format: str


def packing(attrs: PackAttrs) -> Packing:
    if attrs.format not in PACKINGS:
        raise AttributeValueError(f"no packed form of {attrs.format!r}; there is one of {', '.join(PACKINGS)}")
    return PACKINGS[attrs.format]


def _shape(attrs: PackAttrs, w: Shape) -> Shape:
    p = packing(attrs)
    nbytes = static_dim(w.dims[1], "packing") if w.rank == 2 else -1
    if w.dtype != u8 or nbytes < 0 or nbytes % p.nbytes:
        raise ShapeError(f"{attrs.format} weights are u8[rows, multiple of {p.nbytes}], got {w}")
    return w


def _tiled(attrs: PackAttrs, w: Shape) -> TiledLayout:
    """Panels of rows; within a panel the blocks follow each other, each with all rows of the panel."""
    p, (rows, nbytes) = packing(attrs), w.static
    return TiledLayout((rows, nbytes // p.nbytes), ((0, PANEL), (1, 1)), p.panel_bytes)


def packed(format: str, w: np.ndarray) -> np.ndarray:
    """The packed form of w: u8 [panels, panel bytes]."""
    p = PACKINGS[format]
    panels, blocks, turns = -(-w.shape[0] // PANEL), w.shape[1] // p.nbytes, p.block // STEP
    padded = np.zeros((panels * PANEL, w.shape[1]), np.uint8)
    padded[: w.shape[0]] = w
    block = padded.reshape(panels, PANEL, blocks, p.nbytes).swapaxes(1, 2)  # [panel, block, row, byte]
    parts: list[np.ndarray] = [block[..., at : at + 2] for at in p.numbers]
    for turn in range(turns):
        for pieces in p.of_turn(turn):
            parts.append(reduce(or_, (((block[..., b] >> r) & m) << s for b, r, m, s in pieces)))
        for plane, first in p.dwords():
            elements = turn * STEP + first + np.arange(32 // plane.bits)
            at, shift = plane.at(elements, _ARRAYS)
            q = (block[..., at] >> shift.astype(np.uint8)) & ((1 << plane.bits) - 1) ^ (p.flip if plane is p.low else 0)
            parts.append(reduce(or_, (q[..., 4 * i : 4 * i + 4] << (i * plane.bits) for i in range(8 // plane.bits))))
    return np.concatenate([x.reshape(panels, blocks, -1) for x in parts], axis=2).reshape(panels, -1).astype(np.uint8)


def _kernel(ctx: Lowering, node: Applied[PackAttrs]) -> Loops:
    """One grid point per block of a panel."""
    w, p = node.inputs[0], packing(node.attrs)
    rows, nbytes = ctx.dims(w)
    panel, block, turn = Var("panel"), Var("block"), Var("turn")
    grid = ((panel, -(-rows // PANEL)), (block, nbytes // p.nbytes))

    def byte(row: Expr, at: Expr) -> Expr:
        row = k.add(k.mul(panel, PANEL), row)
        return ctx.element(w, (row, k.add(k.mul(block, p.nbytes), at)), k.lt(row, rows) if rows % PANEL else None)

    def copied(count: int, at: Expr | int, value: Callable[[Expr], Expr]) -> Loop:
        """Writes `count` bytes from offset `at` of this block of the panel; value(t) is byte t of them."""
        t = Var("t")
        store = ctx.store(0, (panel, k.add(k.add(k.mul(block, p.panel_bytes), at), t)), value(t))
        return Loop(t, count, (store,), vector=True)

    def joined(pieces: Pieces) -> Callable[[Expr], Expr]:
        return lambda row: reduce(
            k.or_, (k.shl(k.and_(k.shr(byte(row, const(at)), right), mask), left) for at, right, mask, left in pieces)
        )

    def dword(plane: Bits, first: int) -> Callable[[Expr], Expr]:
        def value(t: Expr) -> Expr:
            parts = []
            for i in range(8 // plane.bits):
                at, shift = plane.at(k.add(k.add(k.mul(turn, STEP), k.rem(t, 4)), first + 4 * i), k)
                q = k.and_(k.shr(byte(k.div(t, 4), at), k.cast(shift, u8)), (1 << plane.bits) - 1)
                parts.append(k.shl(k.xor(q, p.flip) if plane is p.low else q, i * plane.bits))
            return reduce(k.or_, parts)

        return value

    body = [copied(2 * PANEL, 2 * PANEL * n, lambda t, at=at: byte(k.div(t, 2), k.add(k.rem(t, 2), at)))
            for n, at in enumerate(p.numbers)]  # fmt: skip
    for n in range(p.block // STEP):
        for i, pieces in enumerate(p.of_turn(n)):
            body.append(copied(PANEL, const(p.turns_at + n * p.turn_bytes + PANEL * i), joined(pieces)))
    start = k.add(k.mul(turn, p.turn_bytes), p.turns_at + p.dwords_at)
    dwords = [copied(4 * PANEL, k.add(start, 4 * PANEL * n), dword(*x)) for n, x in enumerate(p.dwords())]
    return grid, (*body, Loop(turn, p.block // STEP, tuple(dwords)))


pack_quant = op(
    "pack_quant", kind=Kind.KERNEL, infer=_shape, attrs=PackAttrs, dtypes="u", kernel=_kernel, tiled=_tiled,
    reference=lambda attrs, w: np.asarray(w), rows=lambda attrs, operand, axis, w: axis,
    samples=tuple(
        Sample(((rows, blocks * PACKINGS[name].nbytes),), {"format": name}, low=0, high=256, dtypes=("u8",))
        for name, rows, blocks in (("q8_0", 5, 2), ("q4_0", 33, 2), ("q4_k", 32, 1), ("q5_k", 3, 1), ("q6_k", 2, 2))
    ),
    doc="Rows of quantised blocks u8[rows, row bytes] stored as panels u8[ceil(rows / 32), panel bytes] in the order in which "
    "dequant_matmul reads them (see the module); missing rows are zeros. In a graph from the user it is the same as w.",
)  # fmt: skip
