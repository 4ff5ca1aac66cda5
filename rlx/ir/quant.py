"""Table of block formats of quantised weights. A row is a sequence of blocks; a block stores a fixed number of elements in a
fixed number of bytes, as small integers with f16 scales.

`q8_0`, `q4_0`, `q4_k`, `q5_k` and `q6_k` have the layouts of GGUF files. `int8` and `int4` are the formats to which this package
quantises weights: the layouts of q8_0 and q4_0 (groups of 32 with one f16 scale), so that the same kernels serve them.
All numbers are little-endian. `decode` gives the same f32 numbers, to the bit, as the format's own implementation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rlx.errors import NumericsError, ShapeError

_CHUNK = 1 << 18  # elements encoded at a time: bounds the size of temporaries


@dataclass(frozen=True)
class QuantFormat:
    """A block: `block` elements in `nbytes` bytes, with f16 scales at byte offsets `scales`."""

    name: str
    block: int
    nbytes: int
    scales: tuple[int, ...]
    values: Callable[[np.ndarray], np.ndarray]  # u8 [..., nbytes] -> f32 [..., block]
    quantise: Callable[[np.ndarray], np.ndarray] | None = None  # f32 [..., block] -> u8 [..., nbytes]

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of this many elements; the last block may be partly used."""
        return -(-columns // self.block) * self.nbytes

    def decode(self, blocks: np.ndarray) -> np.ndarray:
        """u8 [..., blocks, nbytes] -> f32 [..., blocks * block]."""
        with np.errstate(all="ignore"):  # scales may be infinite or NaN
            return self.values(blocks).reshape(*blocks.shape[:-2], blocks.shape[-2] * self.block)

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
        out = np.empty((len(rows), self.row_bytes(columns)), np.uint8)
        step = max(1, _CHUNK // max(1, columns))
        for start in range(0, len(rows), step):
            chunk = np.asarray(rows[start : start + step], np.float32)
            if not np.abs(chunk).max(initial=0) < 4e5:  # 8 * the largest f16, so that scales stay finite
                raise NumericsError(f"{self.name}: a weight from row {start} on is not finite, or beyond 4e5")
            chunk = np.pad(chunk, ((0, 0), (0, -columns % self.block))).reshape(-1, self.block)
            out[start : start + step] = self.quantise(chunk).reshape(out[start : start + step].shape)
        return out.reshape(*lead, out.shape[1])


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """The f16 at a byte offset, as f32 [..., 1]."""
    return np.ascontiguousarray(blocks[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """u8 [..., n] -> [..., 2, n]: the low halves, then the high ones."""
    return np.stack((packed & 15, packed >> 4), axis=-2)


def _q8_0(b: np.ndarray) -> np.ndarray:
    """f16 scale, 32 signed bytes."""
    return _half(b, 0) * b[..., 2:].view(np.int8)


def _q4_0(b: np.ndarray) -> np.ndarray:
    """f16 scale, 16 bytes: elements 0–15 in the low halves, 16–31 in the high ones, each 8 too large."""
    q = _nibbles(b[..., 2:]).reshape(*b.shape[:-1], 32)
    return _half(b, 0) * (q.astype(np.float32) - 8)


def _six_bit_pairs(s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """12 bytes -> 8 scales and 8 minima of 6 bits: 0–3 in the low bits of bytes 0–3 and 4–7; the low four bits of 4–7 in the
    halves of bytes 8–11, their high two bits on top of bytes 0–3 and 4–7."""
    first, second, rest = s[..., 0:4], s[..., 4:8], s[..., 8:12]
    scales = np.concatenate((first & 63, rest & 15 | first >> 6 << 4), axis=-1)
    return scales, np.concatenate((second & 63, rest >> 4 | second >> 6 << 4), axis=-1)


def _k_values(b: np.ndarray, q: np.ndarray) -> np.ndarray:
    """scale * q - minimum, in eight groups of 32; both are six bits times an f16."""
    scales, minima = _six_bit_pairs(b[..., 4:16])
    return ((_half(b, 0) * scales)[..., None] * q - (_half(b, 2) * minima)[..., None]).reshape(*b.shape[:-1], 256)


def _q4_k(b: np.ndarray) -> np.ndarray:
    """f16 scale of scales, f16 scale of minima, 8 pairs of 6 bits, 128 bytes: groups 2i and 2i+1 are the halves of 32 bytes."""
    return _k_values(b, _nibbles(b[..., 16:].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32))


def _q5_k(b: np.ndarray) -> np.ndarray:
    """As q4_k, with a fifth bit: bit g of byte i of the 32 before the 128 is that of element i of group g."""
    low = _nibbles(b[..., 48:].reshape(*b.shape[:-1], 4, 32)).reshape(*b.shape[:-1], 8, 32)
    high = b[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return _k_values(b, low | high << 4)


def _q6_k(b: np.ndarray) -> np.ndarray:
    """Two halves of 128 elements, each four groups of 32: 64 bytes of low bits (groups 0 and 1 below 2 and 3), 32 bytes of
    high bits (two per group); then 16 signed scales, one per 16 elements, and their f16 scale. Elements are 32 too large."""
    lead = b.shape[:-1]
    low = _nibbles(b[..., :128].reshape(*lead, 2, 64)).reshape(*lead, 2, 4, 32)
    high = b[..., 128:192].reshape(*lead, 2, 1, 32) >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    q = (low | high << 4).reshape(*lead, 16, 16).astype(np.float32) - 32
    return ((_half(b, 208) * b[..., 192:208].view(np.int8))[..., None] * q).reshape(*lead, 256)


def _with_scale(scale: np.ndarray, rest: np.ndarray) -> np.ndarray:
    return np.concatenate((scale.astype("<f2").view(np.uint8), rest), axis=-1)


def _to_int8(x: np.ndarray) -> np.ndarray:
    """The largest magnitude of each group becomes 127."""
    scale = (np.abs(x).max(axis=-1, keepdims=True) / 127).astype(np.float16)
    q = np.clip(np.rint(x / np.where(scale == 0, 1, scale).astype(np.float32)), -127, 127)
    return _with_scale(scale, q.astype(np.int8).view(np.uint8))


def _to_int4(x: np.ndarray) -> np.ndarray:
    """The element of largest magnitude becomes -8; then the scale that, for these integers, leaves the least squared error."""
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=-1)[..., None], axis=-1)
    q = np.clip(np.rint(x / np.where(peak == 0, 1, peak / -8)), -8, 7)
    scale = (x * q).sum(axis=-1, keepdims=True) / np.maximum((q * q).sum(axis=-1, keepdims=True), 1)
    q = (q + 8).astype(np.uint8)
    return _with_scale(scale, q[..., :16] | q[..., 16:] << 4)


_Q8_0 = QuantFormat("q8_0", 32, 34, (0,), _q8_0)
_Q4_0 = QuantFormat("q4_0", 32, 18, (0,), _q4_0)

FORMATS: dict[str, QuantFormat] = {
    f.name: f
    for f in (
        _Q8_0,
        _Q4_0,
        QuantFormat("q4_k", 256, 144, (0, 2), _q4_k),
        QuantFormat("q5_k", 256, 176, (0, 2), _q5_k),
        QuantFormat("q6_k", 256, 210, (208,), _q6_k),
        replace(_Q8_0, name="int8", quantise=_to_int8),
        replace(_Q4_0, name="int4", quantise=_to_int4),
    )
}
