"""Table of block formats of quantised weights (FORMATS), and everything that is derived from it.

A row is a sequence of blocks. A block stores a fixed number of elements in a fixed number of bytes, as small integers with f16
numbers. A `Format` says where the bits are; from that follow decoding and encoding of arrays, the expression of one element for
kernels, and the panels in which a backend's kernels read the blocks of several rows. A new format is one entry.

Formats named q… have the layouts of GGUF files. `int8` and `int4` are the formats to which this package quantises weights: the
layouts of q8_0 and q4_0 (groups of 32 with one f16 scale), so that the same kernels serve them.
All numbers are little-endian. `decode` gives the same f32 numbers, to the bit, as the format's own implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, reduce
from operator import or_

import numpy as np
from numpy.lib.stride_tricks import as_strided

from rlx.errors import NumericsError, ShapeError
from rlx.ir.dtype import DType, f16, f32, i8, i32, u16
from rlx.ir.kernel import Const, Expr, k
from rlx.records import record

_CHUNK = 1 << 18  # elements encoded at a time: bounds the size of temporaries


@record
class Bits:
    """The position of `bits` bits of each of a block's integers. The number of an integer has one digit per (count, stride) of
    `digits`, outermost first; its bits begin at bit `first` + the sum of digit * stride of the block, and lie within one byte."""

    bits: int
    first: int
    digits: tuple[tuple[int, int], ...]

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def count(self) -> int:
        return math.prod(count for count, _ in self.digits)

    def load(self, byte: Callable[[Expr], Expr], number: Expr, dtype: DType, turn: Expr | None = None, step: int = 0) -> Expr:
        """The bits of one integer; byte(offset) loads a byte of the block. `turn`: the integer is turn * step + number, with
        number < step, so that digits of whole turns do not depend on `number`."""
        at, shift, inner, step = k.const(0), k.const(self.first % 8), self.count, step or self.count
        for count, stride in self.digits:
            outer, inner = inner, inner // count
            source, unit, bound = number, 1, step
            if turn is not None and inner % step == 0:
                source, unit, bound = turn, step, self.count // step
            elif turn is not None and step % outer:
                source, bound = k.add(k.mul(turn, step), number), self.count
            digit = k.div(source if outer // unit == bound else k.rem(source, outer // unit), inner // unit)
            at, shift = k.add(at, k.mul(digit, stride // 8)), k.add(shift, k.mul(digit, stride % 8))
        raw = k.cast(byte(k.add(at, self.first // 8)), dtype)
        if isinstance(shift, Const):
            raw = k.shr(raw, shift.value) if shift.value else raw
            return raw if shift.value + self.bits == 8 else k.and_(raw, self.mask)
        return k.and_(k.shr(raw, k.cast(shift, dtype)), self.mask)

    def _bytes(self, blocks: np.ndarray) -> np.ndarray:
        """A view of `blocks`, u8 [..., nbytes]: the byte of each integer, [..., *counts]."""
        *strides, step = blocks.strides
        shape = (*blocks.shape[:-1], *(count for count, _ in self.digits))
        return as_strided(blocks[..., self.first // 8 :], shape, (*strides, *(s // 8 * step for _, s in self.digits)))

    @cached_property
    def _shifts(self) -> np.ndarray:
        """The bit of its byte at which each integer begins; broadcasts to [*counts]."""
        digits = (np.arange(count if stride % 8 else 1) * (stride % 8) for count, stride in self.digits)
        return reduce(np.add.outer, digits, np.array(self.first % 8)).astype(np.uint8)

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """u8 [..., nbytes] -> u8 [..., integers]"""
        out = self._bytes(blocks)
        if self.bits < 8:
            out = out >> self._shifts
            out &= self.mask
        return out.reshape(*blocks.shape[:-1], self.count)

    def write(self, blocks: np.ndarray, integers: np.ndarray) -> None:
        """Store u8 [..., integers] in u8 [..., nbytes], where these bits are 0."""
        to = self._bytes(blocks)
        raw = integers.reshape(to.shape)
        raw = raw if self.bits == 8 else (raw & self.mask) << self._shifts
        for at in np.ndindex(*(1 if stride >= 8 else count for count, stride in self.digits)):  # one integer to a byte at a time
            one = (..., *(slice(None) if stride >= 8 else i for i, (_, stride) in zip(at, self.digits)))
            to[one] |= raw[one]


@record
class Integers:
    """Integers of a block, one per group of its elements. `parts`: their bits, the low ones first. `signed`: of i8."""

    parts: tuple[Bits, ...]
    signed: bool = False

    @property
    def count(self) -> int:
        return self.parts[0].count

    @property
    def dtype(self) -> DType:
        """In which kernels compute."""
        return i8 if self.signed else i32

    @cached_property
    def shifts(self) -> tuple[int, ...]:
        """For each part, the number of bits below it."""
        return tuple(sum(p.bits for p in self.parts[:i]) for i in range(len(self.parts)))

    def load(self, byte: Callable[[Expr], Expr], number: Expr, dtype: DType) -> Expr:
        """One integer, in `dtype`."""
        parts = [p.load(byte, number, dtype) for p in self.parts]
        return reduce(k.or_, (k.shl(x, shift) if shift else x for x, shift in zip(parts, self.shifts)))

    def read(self, blocks: np.ndarray) -> np.ndarray:
        """u8 [..., nbytes] -> u8 or i8 [..., integers]"""
        low, *more = (p.read(blocks) << shift if shift else p.read(blocks) for p, shift in zip(self.parts, self.shifts))
        out = reduce(or_, more, low)
        return out.view(np.int8) if self.signed else out

    def write(self, blocks: np.ndarray, integers: np.ndarray) -> None:
        for p, shift in zip(self.parts, self.shifts):
            p.write(blocks, integers >> shift if shift else integers)


@record
class Format:
    """A block: `block` elements in `nbytes` bytes. An element is scale * (q - zero), or scale * (q - zero) - least.

    `q`: an integer per element. `numbers`: byte offsets of f16 numbers: the scale, then the factor of the mins. `scales`, if a
    block has more than one scale: integers that multiply the scale. `mins`: integers that multiply the factor, which gives least.
    `quantise`: f32 [..., block] -> (scale f16 [..., 1], q [..., block]), if this package encodes weights in the format.
    `gguf`: the number of the type in GGUF files.
    """

    name: str
    block: int
    nbytes: int
    q: Integers
    zero: int = 0
    numbers: tuple[int, ...] = (0,)
    scales: Integers | None = None
    mins: Integers | None = None
    quantise: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]] | None = None
    gguf: int | None = None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of this many elements; the last block may be partly used."""
        return -(-columns // self.block) * self.nbytes

    # -- arrays

    def decode(self, blocks: np.ndarray) -> np.ndarray:
        """u8 [..., blocks, nbytes] -> f32 [..., blocks * block]."""
        with np.errstate(all="ignore"):  # scales may be infinite or NaN
            scale, *factor = (_half(blocks, at) for at in self.numbers)
            scale = scale * self.scales.read(blocks) if self.scales else scale
            q = self.q.read(blocks)
            if self.zero:
                q = q.astype(np.float32)
                q -= self.zero
            values = np.multiply(scale[..., None], _grouped(q, scale), out=_grouped(q, scale) if self.zero else None)
            if self.mins:
                least = factor[0] * self.mins.read(blocks)
                values = _grouped(values.reshape(q.shape), least)
                values -= least[..., None]
        return values.reshape(*blocks.shape[:-2], blocks.shape[-2] * self.block)

    def decode_rows(self, packed: np.ndarray, columns: int | None = None) -> np.ndarray:
        """u8 [..., row bytes] -> f32 [..., columns] (None: every element of the blocks)."""
        if packed.shape[-1] % self.nbytes:
            raise ShapeError(f"rows of {packed.shape[-1]} bytes are no whole number of {self.name} blocks of {self.nbytes}")
        blocks = packed.reshape(*packed.shape[:-1], packed.shape[-1] // self.nbytes, self.nbytes)
        return self.decode(blocks)[..., :columns]

    def encode(self, weights: np.ndarray) -> np.ndarray:
        """Floats [..., columns] -> u8 [..., row bytes]; the last block is padded with zeros. NumericsError: a weight is not
        finite, or too large for an f16 scale."""
        assert self.quantise is not None, f"{self.name} is read only"
        *lead, columns = weights.shape
        rows = weights.reshape(math.prod(lead), columns)
        out = np.zeros((len(rows), self.row_bytes(columns)), np.uint8)
        step = max(1, _CHUNK // max(1, columns))
        for start in range(0, len(rows), step):
            chunk = np.asarray(rows[start : start + step], np.float32)
            if not np.abs(chunk).max(initial=0) < 4e5:  # 8 * the largest f16, so that scales stay finite
                raise NumericsError(f"{self.name}: a weight from row {start} on is not finite, or beyond 4e5")
            scale, q = self.quantise(np.pad(chunk, ((0, 0), (0, -columns % self.block))).reshape(-1, self.block))
            blocks = out[start : start + step].reshape(-1, self.nbytes)
            blocks[:, self.numbers[0] : self.numbers[0] + 2] = scale.astype("<f2").view(np.uint8)
            self.q.write(blocks, q.astype(np.int8).view(np.uint8) + np.uint8(self.zero))
        return out.reshape(*lead, out.shape[1])

    # -- kernels

    def element(self, column: Expr, byte: Callable[[Expr], Expr], row: Expr | None = None) -> Expr:
        """Element `column` of a row of blocks, as f32; byte(offset) loads a byte. `row`: among those of a panel."""
        start, e = k.mul(k.div(column, self.block), self.nbytes), k.rem(column, self.block)

        def bytes_of(unit: int) -> Callable[[Expr], Expr]:
            """Loads bytes of fields that have `unit` bytes for each row of a panel."""
            here = start if row is None else k.add(start, k.mul(row, unit))
            return lambda at: byte(k.add(here, at))

        def number(at: int) -> Expr:
            low, high = (k.cast(bytes_of(2)(k.const(at + i)), u16) for i in (0, 1))
            return k.cast(k.bitcast(k.or_(low, k.shl(high, 8)), dtype=f16), f32)

        def small(integers: Integers) -> Expr:
            return k.cast(integers.load(bytes_of(1), k.div(e, self.block // integers.count), integers.dtype), f32)

        q, scale = self.q.load(bytes_of(4), e, self.q.dtype), number(self.numbers[0])
        scale = k.mul(scale, small(self.scales)) if self.scales else scale
        value = k.mul(scale, k.cast(k.sub(q, self.zero) if self.zero else q, f32))
        return k.sub(value, k.mul(number(self.numbers[1]), small(self.mins))) if self.mins else value


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at a byte offset, as f32 [..., 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _grouped(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    """A view [..., groups, *] of the elements of blocks, [..., *], for numbers [..., groups]."""
    return values.reshape(*by.shape, values.shape[-1] // by.shape[-1])


# -- panels --------------------------------------------------------------------------------------------------------


@record
class Panel:
    """Blocks of `rows` rows interleaved for kernels that stream weights. No bit of a number is changed.

    A block of a panel starts with its f16 numbers: each number is stored for all rows, contiguously. Then come the elements,
    `step` at a time (a turn): their scales and mins, one byte per row; then dwords, one per row, each with the bits of four (8
    bits each), eight (4 bits), or more consecutive elements of that row. So one vector load gives every lane of a dot
    instruction, or of a conversion, its own row, and a kernel reads memory sequentially.
    """

    plain: Format
    rows: int
    step: int

    def fault(self) -> str | None:
        """Why there is no such panel, or None."""
        f, bits = self.plain, [p.bits for p in self.plain.q.parts]
        groups = [f.block // x.count for x in (f.scales, f.mins) if x]
        if any(self.step % n for n in groups) or self.step < 1 or f.block % self.step or any(self.step * n % 32 for n in bits):
            return f"blocks of {f.block} elements in groups of {groups} do not split into steps of {self.step}"
        if any(8 % n for n in bits) or bits != sorted(bits, reverse=True):
            return f"integers in parts of {bits} bits do not fill dwords"
        return None if self.rows > 0 else f"a panel has at least one row, not {self.rows}"

    @cached_property
    def turns_at(self) -> int:
        """Offset of the first turn in a block of a panel."""
        return 2 * self.rows * len(self.plain.numbers)

    def each(self, integers: Integers | None) -> int:
        """Number of scales or mins of a turn."""
        return integers.count * self.step // self.plain.block if integers else 0

    @cached_property
    def dwords_at(self) -> int:
        """Offset of the dwords in a turn."""
        return self.rows * (self.each(self.plain.scales) + self.each(self.plain.mins))

    @cached_property
    def turn_bytes(self) -> int:
        return self.dwords_at + self.rows * self.step * sum(p.bits for p in self.plain.q.parts) // 8

    @cached_property
    def dwords(self) -> list[tuple[int, int]]:
        """The dwords of a turn in order, as (part of q, first element in the turn). High bits precede the low bits of the same
        elements, so that a kernel reads sequentially."""
        found = [(i, at) for i, p in enumerate(self.plain.q.parts) for at in range(0, self.step, 32 // p.bits)]
        return sorted(found, key=lambda x: (x[1], -x[0]))

    @cached_property
    def packed(self) -> Format:
        """The positions in a block of a panel, for its row 0: numbers of row r lie 2r bytes further, scales and mins r, q 4r."""
        f, rows, turn = self.plain, self.rows, (self.plain.block // self.step, 8 * self.turn_bytes)

        def small(integers: Integers | None, before: int) -> Integers | None:
            bits = Bits(8, 8 * (self.turns_at + rows * before), (turn, (self.each(integers), 8 * rows)))
            return replace(integers, parts=(bits,)) if integers else None

        parts, outer, digits = [], self.step, (turn,)
        for i, p in reversed(tuple(enumerate(f.q.parts))):  # a dword of high bits, then those of the same elements' other bits
            each = 32 // p.bits
            digits = (*digits, (outer // each, each * (f.q.shifts[i] + p.bits) * rows))
            first = 8 * (self.turns_at + self.dwords_at) + 32 * rows * len(parts)
            parts.insert(0, Bits(p.bits, first, (*digits, (8 // p.bits, p.bits), (4, 8))))
            outer = each
        return replace(
            f, nbytes=self.turns_at + turn[0] * self.turn_bytes, numbers=tuple(2 * rows * n for n in range(len(f.numbers))),
            q=Integers(tuple(parts)), zero=f.zero + self.flip, scales=small(f.scales, 0), mins=small(f.mins, self.each(f.scales)),
        )  # fmt: skip

    @property
    def flip(self) -> int:
        """Signed integers are stored with their sign bit inverted, as unsigned ones."""
        return 128 if self.plain.q.signed else 0


# -- the formats ---------------------------------------------------------------------------------------------------


def _to_int8(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitude of each group becomes 127."""
    scale = (np.abs(x).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    q = x / np.where(scale == 0, 1, scale).astype(np.float32)
    return scale, np.clip(np.rint(q, out=q), -127, 127, out=q)


def _to_int4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The element of largest magnitude becomes -8; then the scale that, for these integers, leaves the least squared error."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)
    q = x / np.where(peak == 0, 1, peak / -8)
    np.clip(np.rint(q, out=q), -8, 7, out=q)
    return (x * q).sum(axis=-1, keepdims=True) / np.maximum((q * q).sum(axis=-1, keepdims=True), 1), q


# Four bits: groups 2i and 2i+1 are the halves of 32 bytes. Scales and mins have six bits: 0–3 in the low bits of bytes 0–3 and
# 4–7; the low four bits of 4–7 in the halves of bytes 8–11, their high two bits on top of bytes 0–3 and 4–7.
_HALVES = (4, 256), (2, 4), (32, 8)
_SCALES = Integers((Bits(4, 32, ((2, 64), (4, 8))), Bits(2, 36, ((2, 2), (4, 8)))))
_MINS = Integers((Bits(4, 64, ((2, 36), (4, 8))), Bits(2, 68, ((2, 2), (4, 8)))))
_Q8_0 = Format("q8_0", 32, 34, Integers((Bits(8, 16, ((32, 8),)),), signed=True), gguf=8)
_Q4_0 = Format("q4_0", 32, 18, Integers((Bits(4, 16, ((2, 4), (16, 8))),)), zero=8, gguf=2)
_Q5_0 = Format("q5_0", 32, 22, Integers((Bits(4, 48, ((2, 4), (16, 8))), Bits(1, 16, ((4, 8), (8, 1))))), zero=16, gguf=6)
_Q4_K = Format("q4_k", 256, 144, Integers((Bits(4, 128, _HALVES),)), 0, (0, 2), _SCALES, _MINS, gguf=12)
_Q5_K = Format(
    "q5_k", 256, 176, Integers((Bits(4, 384, _HALVES), Bits(1, 128, ((8, 1), (32, 8))))), 0, (0, 2), _SCALES, _MINS, gguf=13
)
_Q6_K = Format(
    "q6_k", 256, 210, Integers((Bits(4, 0, ((2, 512), (2, 4), (64, 8))), Bits(2, 1024, ((2, 256), (4, 2), (32, 8))))), 32, (208,),
    Integers((Bits(8, 1536, ((16, 8),)),), signed=True), gguf=14,
)  # fmt: skip

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _Q8_0, _Q4_0, _Q5_0, _Q4_K, _Q5_K, _Q6_K,
        replace(_Q8_0, name="int8", quantise=_to_int8, gguf=None), replace(_Q4_0, name="int4", quantise=_to_int4, gguf=None),
    )
}  # fmt: skip
