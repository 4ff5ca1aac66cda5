"""The logical side: sessions, compiled graphs, and the driver's public names, so that nobody has to know the layers."""

from rlx.backends import available, is_available
from rlx.compile.options import CompileOptions
from rlx.driver import Buffer, BufferHandle, CommandStream, Device, DeviceArena, HostArena, ParamStore, SyncStream
from rlx.driver.handles import HandleStore, Snapshot
from rlx.runtime.cache import BucketedCompileCache, CompileCache, power_of_two_ladder
from rlx.runtime.compiled import CompiledGraph, OutputView
from rlx.runtime.report import Allocations, CompileReport, MemoryPlan
from rlx.runtime.session import Session

__all__ = [
    "Allocations", "BucketedCompileCache", "Buffer", "BufferHandle", "CommandStream", "CompileCache", "CompileOptions",
    "CompileReport", "CompiledGraph", "Device", "DeviceArena", "HandleStore", "HostArena", "MemoryPlan", "OutputView",
    "ParamStore", "Session", "Snapshot", "SyncStream", "available", "is_available", "power_of_two_ladder",
]  # fmt: skip
