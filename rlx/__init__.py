"""rlx: an ML compiler and runtime. Build a tensor graph, compile it once for a device, run it many times.

    g = rlx.Graph("double"); x = g.input("x", (4,), rlx.f32); g.set_outputs([x + x])
    compiled = rlx.Session(rlx.Device.CPU).compile(g)
    (y,) = compiled.run({"x": np.ones(4, np.float32)})

Every op of the table is here as a function (`rlx.gelu(x)`), every dtype as a name (`rlx.f32`). Importing this opens no
device, reads no file and loads no native library but numpy's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rlx import errors
from rlx.backends import is_available
from rlx.driver import Buffer, BufferHandle, Device
from rlx.errors import RlxError
from rlx.ir import ops
from rlx.ir.dtype import (
    DTYPES,
    DType,
    as_dtype,
    bf16,
    bool_,
    c64,
    f8e4m3,
    f8e5m2,
    f16,
    f32,
    f64,
    i8,
    i16,
    i32,
    i64,
    u8,
    u16,
    u32,
    u64,
)
from rlx.ir.graph import Graph, Node, Value, constant
from rlx.ir.op import OPS
from rlx.ir.ops import *  # noqa: F403  the op functions; a few have names of builtins, so this file uses none of those
from rlx.ir.placement import Split
from rlx.ir.shape import Dim, Shape
from rlx.runtime import (
    BucketedCompileCache,
    CompileCache,
    CompiledGraph,
    CompileOptions,
    Partitioned,
    Session,
    partition,
    power_of_two_ladder,
)

if TYPE_CHECKING:
    from rlx import models

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "models":  # what reads files and texts waits until it is asked for
        return import_module("rlx.models")
    raise AttributeError(f"module 'rlx' has no attribute {name!r}")


__all__ = [
    "DTYPES", "OPS", "BucketedCompileCache", "Buffer", "BufferHandle", "CompileCache", "CompileOptions", "CompiledGraph",
    "DType", "Device", "Dim", "Graph", "Node", "Partitioned", "RlxError", "Session", "Shape", "Split", "Value", "as_dtype",
    "bf16", "bool_", "c64", "constant", "errors", "f16", "f32", "f64", "f8e4m3", "f8e5m2", "i16", "i32", "i64", "i8",
    "is_available", "models", "ops", "partition", "power_of_two_ladder", "u16", "u32", "u64", "u8",
]  # fmt: skip
