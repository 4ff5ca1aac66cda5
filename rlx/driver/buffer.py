"""Buffer: memory with a shape, dtype and device. Every transfer is explicit (`to_device`, `to_host`, `write`).

Numpy, the buffer protocol and DLPack share the memory of host buffers without a copy. For other buffers they raise, because this
class never makes an implicit copy.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np

from rlx.driver.device import Device
from rlx.driver.foreign import DLPACK_CODES, DLPACK_CPU, dtype_code, of_dlpack
from rlx.driver.memory import Block, HostBlock, Memory, bytes_of, memory_of
from rlx.driver.stream import note
from rlx.errors import InputDTypeError, InputShapeError, OutOfMemoryError, TransferError, unmasked
from rlx.ir.dtype import DType, as_dtype
from rlx.ir.shape import Shape


class Buffer:
    """One tensor's memory, C-contiguous. Made by `empty`, `from_numpy`, `from_dlpack` and `to_device`.

    Compared by identity. `release` frees discrete memory at once; otherwise it is freed with the last reference.
    """

    __slots__ = ("__weakref__", "_block", "_finalizer", "_memory", "device", "dims", "dtype", "is_host", "nbytes", "shape")

    def __init__(self, shape: Shape, memory: Memory, block: Block) -> None:
        self.shape, self.dims, self.dtype, self.nbytes = shape, shape.static, shape.dtype, shape.size_bytes
        self.device, self.is_host = memory.device, memory.host_visible  # is_host: the host can address these bytes
        self._memory: Memory = memory
        self._block: Block | None = block
        self._finalizer = weakref.finalize(self, memory.free, block)
        self._finalizer.atexit = False  # the device may be closed by then, and memory is freed with the process anyway

    # -- making

    @staticmethod
    def empty(dims: Any, dtype: DType | str, device: Device | str = Device.CPU) -> Buffer:
        """A buffer with undefined contents."""
        return _allocate(Shape(dims, dtype), memory_of(device))

    @staticmethod
    def from_numpy(array: np.ndarray, device: Device | str = Device.CPU) -> Buffer:
        """A buffer with the array's shape and dtype. On a host device it shares the array's memory (and is read-only if
        the array is), so the array must be C-contiguous: TransferError if not. Elsewhere the contents are copied."""
        array = np.asarray(unmasked("the buffer", array))
        shape, memory = Shape(array.shape, as_dtype(array.dtype)), memory_of(device)
        if memory.host_visible:
            if not array.flags.c_contiguous:
                found = f"{shape} with byte strides {array.strides}"
                raise TransferError(f"{found} is not C-contiguous and cannot be shared; pass np.ascontiguousarray(array)")
            return Buffer(shape, memory, HostBlock(bytes_of(array)))
        return _allocate(shape, memory, np.ascontiguousarray(array))

    @staticmethod
    def from_dlpack(producer: Any) -> Buffer:
        """A host buffer over the memory of anything with `__dlpack__` (numpy, torch, jax …), without a copy."""
        try:
            place = tuple(producer.__dlpack_device__())
            array = of_dlpack(producer) if place[0] == DLPACK_CPU[0] else None
        except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as e:
            raise TransferError(f"from_dlpack takes an object with __dlpack__, got {type(producer).__name__}: {e}") from e
        if array is None:
            raise TransferError(f"the tensor is on DLPack device {place}, not in host memory; copy it to the host first")
        return Buffer.from_numpy(array)

    # -- facts

    @property
    def released(self) -> bool:
        return not self._finalizer.alive

    def __repr__(self) -> str:
        return f"Buffer({self.shape}, {self.device}{', released' if self.released else ''})"

    # -- moving

    def to_device(self, device: Device | str) -> Buffer:
        """The contents on `device`: this same buffer if it is there already, else a copy (via the host, if the host can see
        neither device's memory)."""
        block, device = self._live(), Device.parse(device)
        if device == self.device:
            return self
        return _allocate(self.shape, memory_of(device), block.data if self.is_host else self.to_host())

    def to_host(self) -> np.ndarray:
        """A fresh, writable array with the contents. It is always a copy, on every device (`numpy` shares memory)."""
        block = self._live()
        out = np.empty(self.dims, self.dtype.numpy)
        self._memory.copy_out(block, bytes_of(out))
        if not self.is_host:
            note("copy_out", str(self.device), self.nbytes)
        return out

    def write(self, array: np.ndarray) -> None:
        """Overwrite the contents. InputShapeError, InputDTypeError and TransferError (read-only) are raised before any change."""
        array = np.asarray(unmasked("the buffer", array))
        if as_dtype(array.dtype) != self.dtype:
            raise InputDTypeError(f"the buffer holds {self.dtype}, the array {array.dtype}; convert it first")
        if array.shape != self.dims:
            raise InputShapeError(f"the buffer is {self.shape}, the array has shape {array.shape}")
        self._copy_in(np.ascontiguousarray(array))

    def _copy_in(self, array: np.ndarray) -> None:
        block = self._live()
        if block.data is not None and not block.data.flags.writeable:
            raise TransferError(f"{self!r} shares a read-only array and cannot be written")
        self._memory.copy_in(block, bytes_of(array))
        if not self.is_host:
            note("copy_in", str(self.device), self.nbytes)

    def release(self) -> None:
        """Free the memory now. Any later use of the contents raises TransferError."""
        self._finalizer()
        self._block = None

    def _live(self) -> Block:
        if self.released or self._block is None:
            raise TransferError(f"{self!r} was released; its bytes are gone")
        return self._block

    # -- seeing host bytes without a copy

    def numpy(self) -> np.ndarray:
        """The contents as an array that shares the memory. TransferError if the host cannot see it (`to_host` copies)."""
        block = self._live()
        if block.data is None:
            raise TransferError(f"{self!r} is not in host memory; call to_host() for a copy")
        return block.data.view(self.dtype.numpy).reshape(self.dims)

    def memoryview(self) -> memoryview:
        """The contents via the buffer protocol, shared. It has no format letter for bf16 and f8: these appear as unsigned
        integers."""
        return self._plain().data

    def __buffer__(self, flags: int) -> memoryview:
        """Called by memoryview() from Python 3.12 on. Refuses bf16 and f8, so that numpy asks `__array__` for their dtype."""
        if self.dtype.name in DLPACK_CODES:
            raise BufferError(f"the buffer protocol has no format letter for {self.dtype}; Buffer.memoryview() gives its bits")
        return self.memoryview()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self.numpy()  # refuses device memory
        if copy is False and dtype is not None and np.dtype(dtype) != array.dtype:
            raise ValueError(f"a {array.dtype} buffer cannot be converted to {np.dtype(dtype)} without a copy")
        return np.array(array, dtype, copy=copy)

    def __dlpack_device__(self) -> tuple[int, int]:
        self.numpy()
        return DLPACK_CPU

    def __dlpack__(self, **request: Any) -> Any:
        """A DLPack capsule over the same memory. Keywords as in the array API standard."""
        capsule = self._plain().__dlpack__(**request)
        if self.dtype.name in DLPACK_CODES:
            dtype_code(capsule).value = DLPACK_CODES[self.dtype.name]
        return capsule

    def _plain(self) -> np.ndarray:
        array = self.numpy()
        return array.view(f"u{self.dtype.itemsize}") if self.dtype.name in DLPACK_CODES else array


def _granted(shape: Shape, memory: Memory) -> Block:
    try:
        return memory.allocate(shape.size_bytes)
    except (MemoryError, ValueError) as e:  # numpy's ValueError: more than can be addressed
        raise OutOfMemoryError(f"{memory.device} has no room for {shape}, {shape.size_bytes} bytes") from e


def _allocate(shape: Shape, memory: Memory, contents: np.ndarray | None = None) -> Buffer:
    out = Buffer(shape, memory, _granted(shape, memory))
    if contents is not None:
        out._copy_in(contents)
    return out
