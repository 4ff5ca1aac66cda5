"""Devices, buffers, arenas, command streams, collectives, and the interface that a backend implements. Modules for ranks are
imported on first use."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx.driver.arena import Arena, DeviceArena, bf16_to_f32, convert, f16_to_f32, f32_to_bf16, f32_to_f16
from rlx.driver.backend import Artifact, Backend, Executable
from rlx.driver.buffer import Buffer
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore, Snapshot
from rlx.driver.memory import Block, HostMemory, Memory, memory_of
from rlx.driver.params import ParamStore
from rlx.driver.stream import CommandStream, Launch, Pending, SyncStream, recording

from rlx.errors import (  # isort: skip
    BindingError, CallMismatchError, CollectiveError, CompileError, CorruptFileError, DeviceError, DeviceUnavailableError,
    HeapBoundsError, IndexRangeError, InputDTypeError, InputShapeError, OptionError, OutOfMemoryError, PlanError, RlxError,
    TransferError, TransportError, UnknownDeviceError, UnknownNameError, UnknownRankError, Unsupported,
)  # fmt: skip
from rlx.ir.handle import BufferHandle

if TYPE_CHECKING:
    from rlx.driver.collective import ReduceKind, all_gather, all_reduce, all_to_all, broadcast, reduce_scatter
    from rlx.driver.launch import connect
    from rlx.driver.symmetric import LocalTransport, Rank, SymmetricBuffer, SymmetricHeap, SymmetricTransport
    from rlx.driver.transports.shm import ShmTransport

_MODULES = ("collective", "experts", "launch", "symmetric", "transports")
_LATER: dict[str, str] = {"ShmTransport": "transports.shm", "connect": "launch"}
_LATER |= dict.fromkeys(("LocalTransport", "Rank", "SymmetricBuffer", "SymmetricHeap", "SymmetricTransport"), "symmetric")
_LATER |= dict.fromkeys(("ReduceKind", "all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"), "collective")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


__all__ = [
    "Arena", "Artifact", "Backend", "BindingError", "Block", "Buffer", "BufferHandle", "CallMismatchError", "CollectiveError",
    "CommandStream", "CompileError", "CorruptFileError", "Device", "DeviceArena", "DeviceError", "DeviceUnavailableError",
    "Executable", "HandleStore", "HeapBoundsError", "HostMemory", "IndexRangeError", "InputDTypeError", "InputShapeError",
    "Launch", "LocalTransport", "Memory", "OptionError", "OutOfMemoryError", "ParamStore", "Pending", "PlanError", "Rank",
    "ReduceKind", "RlxError", "ShmTransport", "Snapshot", "SymmetricBuffer", "SymmetricHeap", "SymmetricTransport",
    "SyncStream", "TransferError", "TransportError", "UnknownDeviceError", "UnknownNameError", "UnknownRankError", "Unsupported",
    "all_gather", "all_reduce", "all_to_all", "bf16_to_f32", "broadcast", "connect", "convert", "f16_to_f32", "f32_to_bf16",
    "f32_to_f16", "memory_of", "recording", "reduce_scatter",
]  # fmt: skip
