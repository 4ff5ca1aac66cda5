"""rlx: an ML compiler and runtime. Build a tensor graph, compile it once for a device, run it many times.

    g = rlx.Graph("double"); x = g.input("x", (4,), rlx.f32); g.set_outputs([x + x])
    compiled = rlx.Session(rlx.Device.CPU).compile(g)
    (y,) = compiled.run({"x": np.ones(4, np.float32)})

Every op is available as a function (`rlx.gelu(x)`), every dtype as a name (`rlx.f32`). `import rlx` imports nothing else, not
even numpy: each name and each subpackage is imported on first use.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlx import backends as backends
    from rlx import driver as driver
    from rlx import errors as errors
    from rlx import ir as ir
    from rlx import knobs as knobs
    from rlx import models as models
    from rlx import runtime as runtime
    from rlx.backends import is_available
    from rlx.driver import Buffer, BufferHandle, Device
    from rlx.errors import RlxError
    from rlx.frontends.load import from_onnx, load
    from rlx.ir import functions as _functions
    from rlx.ir import ops
    from rlx.ir.functions import *  # noqa: F403  numpy's functions made of ops
    from rlx.ir.dtype import (  # isort: skip
        DTYPES, DType, as_dtype, bf16, bool_, c64, f8e4m3, f8e5m2, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64,
    )  # fmt: skip
    from rlx.ir.graph import Graph, Node, Value, constant
    from rlx.ir.op import OPS
    from rlx.ir.ops import *  # noqa: F403  the op functions
    from rlx.ir.placement import Split
    from rlx.ir.shape import Dim, Shape
    from rlx.runtime import (
        BucketedCompileCache,
        CompileCache,
        CompiledGraph,
        CompileOptions,
        ExpertPool,
        Partitioned,
        Session,
        partition,
        power_of_two_ladder,
    )
    from rlx.runtime.jit import compile, jit
    from rlx.runtime.saving import save

    __all__ = [
        "DTYPES", "OPS", "BucketedCompileCache", "Buffer", "BufferHandle", "CompileCache", "CompileOptions", "CompiledGraph",
        "DType", "Device", "Dim", "ExpertPool", "Graph", "Node", "Partitioned", "RlxError", "Session", "Shape", "Split",
        "Value", "as_dtype", "bf16", "bool_", "c64", "compile", "constant", "errors", "f16", "f32", "f64", "f8e4m3", "f8e5m2",
        "from_onnx", "i16", "i32", "i64", "i8", "is_available", "jit", "load", "models", "ops", "partition",
        "power_of_two_ladder", "save", "u16", "u32", "u64", "u8",
    ]  # fmt: skip
    __all__ += ops.__all__
    __all__ += _functions.__all__

__version__ = "0.1.0"

_PACKAGES = frozenset("backends cli compiler driver errors forks frontends host ir knobs models runtime".split())
_TABLES = "rlx.ir.ops", "rlx.ir.functions"  # all public names of which are names here
_HOMES = {  # module -> the other names that it provides
    "rlx.backends": "is_available",
    "rlx.driver": "Buffer BufferHandle Device",
    "rlx.errors": "RlxError",
    "rlx.frontends.load": "from_onnx load",
    "rlx.ir": "DTYPES DType Dim Graph Node OPS Shape Value as_dtype bf16 bool_ c64 constant f16 f32 f64 f8e4m3 f8e5m2 "
    "i16 i32 i64 i8 ops u16 u32 u64 u8",
    "rlx.ir.placement": "Split",
    "rlx.runtime": "BucketedCompileCache CompileCache CompileOptions CompiledGraph ExpertPool Partitioned Session partition "
    "power_of_two_ladder",
    "rlx.runtime.jit": "compile jit",
    "rlx.runtime.saving": "save",
}
_HOME = {name: module for module, names in _HOMES.items() for name in names.split()}
_WITHOUT_NUMPY = frozenset("rlx.cli rlx.errors rlx.forks rlx.frontends rlx.host rlx.knobs".split())


def _imported(module: str) -> Any:
    """Import a module without collecting garbage, which would take a seventh of the time: an import makes hardly any.
    One that is there makes none, and Uncollected need not ask whether objects are frozen, which looks at each of them."""
    from rlx.garbage import Uncollected

    with Uncollected(stays=module not in sys.modules):
        if module not in _WITHOUT_NUMPY:
            import_module("rlx.ir")  # imports numpy, amid fewer calls than `module` would
        return import_module(module)


if not TYPE_CHECKING:  # to type checkers, a name that is not imported above is an error

    def __getattr__(name: str) -> Any:
        if name in _PACKAGES:
            return _imported(f"rlx.{name}")
        if name == "__all__":  # computed when `from rlx import *` asks for it: it needs the op table
            return __dir__()
        tables = () if name.startswith("_") else _TABLES  # which Python's own questions, such as __path__, need not import
        homes = [_HOME[name]] if name in _HOME else [t for t in tables if name in _imported(t).__all__]
        found = getattr(_imported(homes[0]), name, None) if homes else None
        if found is None:
            raise AttributeError(f"module 'rlx' has no attribute {name!r}")
        globals()[name] = found  # later look-ups do not come here
        return found


def __dir__() -> list[str]:
    return sorted({*_HOME, "errors", "models", *(name for table in _TABLES for name in import_module(table).__all__)})
