"""The arena: one block of memory with the buffers of a run at offsets fixed by the compiler. Also conversions between dtypes.

The interface uses offsets, not views, so that it fits host, unified and discrete memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.driver.memory import ALIGNMENT, Block, Memory, bytes_of
from rlx.errors import PlanError, TransferError, UnknownNameError
from rlx.ir.dtype import DType, as_dtype, bf16, f32
from rlx.ir.ops.elementwise import cast_array


@runtime_checkable
class DeviceArena(Protocol):
    """The interface of every backend's arena. A node is any key that the arena was planned with."""

    size_bytes: int

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


class Arena:
    """The DeviceArena of any memory: one block of it. `slots`: node -> (byte offset, bytes).

    PlanError: a slot exceeds the arena."""

    def __init__(self, memory: Memory, slots: Mapping[Any, tuple[int, int]], size_bytes: int, alignment: int = ALIGNMENT) -> None:
        for node, (offset, nbytes) in slots.items():
            if offset < 0 or nbytes < 0 or offset + nbytes > size_bytes:
                raise PlanError(f"slot {node!r}, bytes {offset} to {offset + nbytes}, exceeds the {size_bytes}-byte arena")
        self._memory, self._slots, self.size_bytes = memory, dict(slots), size_bytes
        self.block = memory.allocate(size_bytes, alignment)

    def byte_offset(self, node: Hashable) -> int | None:
        return self._slots[node][0] if node in self._slots else None

    def has_buffer(self, node: Hashable) -> bool:
        return node in self._slots

    def slot(self, node: Hashable) -> Block:
        """The node's slot. UnknownNameError: it has none."""
        if node not in self._slots:
            raise UnknownNameError(f"{node!r} has no slot in the arena: it was fused away or belongs to another graph")
        return self.block.part(*self._slots[node])

    def write_input_f32(self, node: Hashable, dtype: DType, data: Any) -> int:
        slot = self.slot(node)
        count = min(np.size(data), slot.nbytes // dtype.itemsize)
        values = np.asarray(data).reshape(-1)[:count].astype(np.float32, copy=False)
        self._memory.copy_in(slot.part(0, count * dtype.itemsize), bytes_of(convert(values, dtype)))
        return count

    def read_output_f32(self, node: Hashable, dtype: DType, n_elements: int) -> np.ndarray:
        slot = self.slot(node)
        room = slot.nbytes // dtype.itemsize
        if not 0 <= n_elements <= room:
            raise TransferError(f"cannot read {n_elements} {dtype.name} of {node!r}: its slot has {room}")
        raw = np.empty(n_elements, dtype.numpy)
        self._memory.copy_out(slot.part(0, raw.nbytes), bytes_of(raw))
        return bf16_to_f32(raw.view(np.uint16)) if dtype.name == "bf16" else convert(raw, f32)


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
