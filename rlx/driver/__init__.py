"""The physical side: which device, which buffer, which arena slot, which command stream; and what a backend must offer."""

from rlx.driver.arena import DeviceArena, HostArena, Slot, bf16_to_f32, convert, f16_to_f32, f32_to_bf16, f32_to_f16
from rlx.driver.backend import Artifact, Backend, Executable
from rlx.driver.buffer import Buffer, HostMemory, Memory, memory_of
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore, Snapshot
from rlx.driver.params import ParamEntry, ParamStore
from rlx.driver.stream import CommandStream, Launch, SyncStream, recording
from rlx.driver.symmetric import LocalTransport, Rank, SymmetricBuffer, SymmetricHeap, SymmetricTransport
from rlx.ir.handle import BufferHandle

__all__ = [
    "Artifact", "Backend", "Buffer", "BufferHandle", "CommandStream", "Device", "DeviceArena", "Executable",
    "HandleStore", "HostArena", "HostMemory", "Launch", "LocalTransport", "Memory", "ParamEntry", "ParamStore", "Rank", "Slot",
    "Snapshot", "SymmetricBuffer", "SymmetricHeap", "SymmetricTransport", "SyncStream",
    "bf16_to_f32", "convert", "f16_to_f32", "f32_to_bf16", "f32_to_f16", "memory_of", "recording",
]  # fmt: skip
