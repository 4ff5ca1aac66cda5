"""Sessions and compiled graphs. Also re-exports the public names of the driver, so that users need only this package."""

from importlib import import_module
from typing import TYPE_CHECKING

from rlx.backends import available, is_available
from rlx.compiler.options import CompileOptions
from rlx.driver import Buffer, BufferHandle, CommandStream, Device, DeviceArena, ParamStore, SyncStream
from rlx.driver.expert_source import ExpertSource
from rlx.driver.files import drop_pages, in_memory, map_file, map_of
from rlx.driver.handles import HandleStore, Snapshot

from rlx.errors import (  # isort: skip
    BindingError, CallMismatchError, CollectiveError, CompileError, CorruptFileError, DeviceError, DeviceUnavailableError,
    DuplicateNameError, FormatError, GraphError, HeapBoundsError, IndexRangeError, InputDTypeError, InputShapeError,
    MissingInputError, MissingParamError, ModelError, NumericsError, OptionError, OutOfMemoryError, PlanError, RlxError,
    StaleViewError, TransferError, TransportError, UnboundDimError, UnknownDeviceError, UnknownNameError, UnknownRankError,
    Unsupported, UntrustedFileError, VerifyError,
)  # fmt: skip
from rlx.runtime.cache import BucketedCompileCache, CompileCache, power_of_two_ladder
from rlx.runtime.compiled import CompiledGraph, OutputView
from rlx.runtime.report import Allocations, CompileReport, MemoryPlan
from rlx.runtime.session import Session

if TYPE_CHECKING:
    from rlx.compiler.partition import Partitioned, partition
    from rlx.explain.profile import Profile
    from rlx.runtime.agree import agreed, of_first
    from rlx.runtime.pool import ExpertPool

    from rlx.driver import (  # isort: skip
        LocalTransport, Rank, ReduceKind, ShmTransport, SymmetricBuffer, SymmetricHeap, SymmetricTransport, all_gather,
        all_reduce, all_to_all, broadcast, connect, reduce_scatter,
    )  # fmt: skip
    from rlx.driver.experts import ExpertTiers

_MODULES = ("agree", "experts", "pool")
_LATER = {
    "Profile": "rlx.explain.profile", "ExpertPool": "rlx.runtime.pool", "ExpertTiers": "rlx.driver.experts",
    **dict.fromkeys(("Partitioned", "partition"), "rlx.compiler.partition"),
    **dict.fromkeys(("agreed", "of_first"), "rlx.runtime.agree"),
}  # fmt: skip


def __getattr__(name: str) -> object:
    """Partitioning, profiles, pools of experts and modules for ranks are imported on first use."""
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER.get(name, "rlx.driver")), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


__all__ = [
    "Allocations", "BindingError", "BucketedCompileCache", "Buffer", "BufferHandle", "CallMismatchError", "CollectiveError",
    "CommandStream", "CompileCache", "CompileError", "CompileOptions", "CompileReport", "CompiledGraph", "CorruptFileError",
    "Device", "DeviceArena", "DeviceError", "DeviceUnavailableError", "DuplicateNameError",
    "ExpertPool", "ExpertSource", "ExpertTiers", "FormatError", "GraphError",
    "HandleStore", "HeapBoundsError", "IndexRangeError", "InputDTypeError", "InputShapeError", "LocalTransport",
    "MemoryPlan", "MissingInputError", "MissingParamError", "ModelError", "NumericsError", "OptionError",
    "OutOfMemoryError", "OutputView", "ParamStore", "Partitioned", "PlanError", "Profile", "Rank", "ReduceKind", "RlxError",
    "Session", "ShmTransport", "Snapshot", "StaleViewError", "SymmetricBuffer", "SymmetricHeap", "SymmetricTransport",
    "SyncStream", "TransferError", "TransportError", "UnboundDimError", "UnknownDeviceError", "UnknownNameError",
    "UnknownRankError", "Unsupported", "UntrustedFileError", "VerifyError", "agreed", "all_gather", "all_reduce",
    "all_to_all", "available", "broadcast", "connect", "drop_pages", "in_memory", "is_available", "map_file", "map_of",
    "of_first", "partition", "power_of_two_ladder", "reduce_scatter",
]  # fmt: skip
