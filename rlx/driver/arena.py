"""The arena: one slab that holds the buffers of a run at offsets fixed by the compiler. Also conversions between dtypes.

The interface uses offsets, not views, so that it fits host, unified and discrete memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rlx.errors import TransferError, UnknownNameError
from rlx.ir.dtype import DType, as_dtype, bf16, f32
from rlx.ir.ops.elementwise import cast_array


@runtime_checkable
class DeviceArena(Protocol):
    """The interface of every backend's arena. A node is any key that the arena was planned with."""

    @property
    def size_bytes(self) -> int: ...

    def byte_offset(self, node: Hashable) -> int | None:
        """The byte offset of the node's slot. None: it has none, because it was fused away."""
        ...

    def has_buffer(self, node: Hashable) -> bool: ...

    def write_input_f32(self, node: Hashable, dtype: DType, data: Any) -> int:
        """Cast f32 `data` to the slot's dtype and write it from the slot's start. Elements beyond the slot's end are dropped.
        Returns the number of elements written. UnknownNameError if the node has no slot."""
        ...

    def read_output_f32(self, node: Hashable, dtype: DType, n_elements: int) -> np.ndarray:
        """The slot's first `n_elements` as a fresh f32 array. TransferError if the slot has fewer."""
        ...


class Slot(NamedTuple):
    """A node's location in the arena, in bytes."""

    offset: int
    nbytes: int


class HostArena:
    """The arena of a device that computes in host memory.

    `slots`: node -> (byte offset, bytes). `memory`: a writable uint8 array to use instead of fresh zeros.
    """

    def __init__(self, slots: Mapping[Any, tuple[int, int]], size_bytes: int, memory: np.ndarray | None = None) -> None:
        self._slots = {node: Slot(*place) for node, place in slots.items()}
        for node, (offset, nbytes) in self._slots.items():
            if offset < 0 or nbytes < 0 or offset + nbytes > size_bytes:
                raise TransferError(f"slot {node!r}, bytes {offset} to {offset + nbytes}, exceeds the {size_bytes}-byte arena")
        memory = aligned_bytes(size_bytes) if memory is None else memory
        if memory.dtype != np.uint8 or memory.ndim != 1 or memory.size < size_bytes or not memory.flags.writeable:
            raise TransferError(f"an arena of {size_bytes} bytes takes a writable uint8 array, got {memory.dtype} {memory.shape}")
        self.memory = memory[:size_bytes]

    @property
    def size_bytes(self) -> int:
        return self.memory.size

    def byte_offset(self, node: Hashable) -> int | None:
        slot = self._slots.get(node)
        return None if slot is None else slot.offset

    def has_buffer(self, node: Hashable) -> bool:
        return node in self._slots

    def _slot_bytes(self, node: Hashable) -> np.ndarray:
        slot = self._slots.get(node)
        if slot is None:
            raise UnknownNameError(f"{node!r} has no slot in the arena: it was fused away or belongs to another graph")
        return self.memory[slot.offset : slot.offset + slot.nbytes]

    def write_input_f32(self, node: Hashable, dtype: DType, data: Any) -> int:
        slot = self._slot_bytes(node)
        count = min(np.size(data), slot.size // dtype.itemsize)
        values = np.asarray(data).reshape(-1)[:count].astype(np.float32, copy=False)
        slot[: count * dtype.itemsize] = convert(values, dtype).view(np.uint8)
        return count

    def read_output_f32(self, node: Hashable, dtype: DType, n_elements: int) -> np.ndarray:
        slot = self._slot_bytes(node)
        nbytes = n_elements * dtype.itemsize
        if n_elements < 0 or nbytes > slot.size:
            raise TransferError(f"cannot read {n_elements} {dtype.name} of {node!r}: its slot has {slot.size // dtype.itemsize}")
        raw = slot[:nbytes].copy()  # slots need not be aligned to their elements
        return bf16_to_f32(raw.view(np.uint16)) if dtype.name == "bf16" else convert(raw.view(dtype.numpy), f32)


def aligned_bytes(nbytes: int, alignment: int = 64) -> np.ndarray:
    """Zeroed uint8 array. The address of its first byte is a multiple of `alignment`."""
    raw = np.zeros(nbytes + alignment, np.uint8)
    start = -raw.ctypes.data % alignment
    return raw[start : start + nbytes]


# -- elements: the same conversions as the kernel IR's cast, for data on its way between host and arena


def f32_to_bf16(x: np.ndarray) -> np.ndarray:
    """bf16 bits (uint16) of f32 values: nearest, ties to even; NaN stays NaN (made quiet), infinities stay."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    top = bits >> 16
    rounded = (bits + (0x7FFF + (top & 1))) >> 16
    nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, top | 0x40, rounded).astype(np.uint16)


def bf16_to_f32(bits: np.ndarray) -> np.ndarray:
    """f32 values of bf16 bits (uint16): exact, NaN payloads kept."""
    return (np.ascontiguousarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def f32_to_f16(x: np.ndarray) -> np.ndarray:
    """f16 bits (uint16) of f32 values: nearest, ties to even; NaN stays NaN; too large becomes infinity."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.ascontiguousarray(x, np.float32).astype(np.float16).view(np.uint16)


def f16_to_f32(bits: np.ndarray) -> np.ndarray:
    """f32 values of f16 bits (uint16): exact."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return np.ascontiguousarray(bits, np.uint16).view(np.float16).astype(np.float32)


def convert(x: np.ndarray, dtype: DType) -> np.ndarray:
    """`x` in the host form of `dtype`. Float to integer truncates, saturates, and gives 0 for NaN; to bool is x != 0;
    complex to real drops the imaginary part."""
    source = as_dtype(x.dtype)
    if source == dtype:
        return np.ascontiguousarray(x)
    with np.errstate(all="ignore"):  # infinities and NaN are legal values here
        if source.kind == "c" and dtype.kind != "b":
            x, source = np.real(x), f32
        if dtype.kind == "b" or (dtype.is_int and source.is_float):
            return np.ascontiguousarray(cast_array(x.astype(source.compute.numpy, copy=False), dtype))
        return f32_to_bf16(x).view(dtype.numpy) if (source, dtype) == (f32, bf16) else np.ascontiguousarray(x.astype(dtype.numpy))
