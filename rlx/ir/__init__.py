"""The IRs: graphs with their ops, shapes and dtypes; kernels and programs, which the compiler hands to backends."""

# isort: off
from rlx.ir import first as first
from rlx.errors import (  # isort: skip
    AttributeValueError, DTypeError, DuplicateNameError, GraphError, IndexRangeError, InputDTypeError, InputShapeError,
    MissingInputError, NumericsError, OptionError, ParseError, RlxError, ShapeError, UnboundDimError, UnknownNameError,
    VerifyError,
)  # fmt: skip
from rlx.ir.dtype import (
    DTYPES, DType, as_dtype, bf16, bool_, c64, f8e4m3, f8e5m2, f16, f32, f64, i8, i16, i32, i64, u8, u16, u32, u64,
)  # fmt: skip
from rlx.ir.graph import Graph, Node, Value, constant, parse_graph
from rlx.ir.handle import BufferHandle
from rlx.ir.kernel import Kernel
from rlx.ir.op import OPS, Attrs, Kind, OpDef
from rlx.ir.program import Program
from rlx.ir.shape import Dim, Shape
from rlx.ir.target import Target
from rlx.ir.text import fingerprint, print_graph
from rlx.ir.verify import faults
from rlx.ir import ops  # fills OPS, whose declarations need all of the above
from rlx.ir import functions as functions, indexing as indexing  # made of ops

__all__ = [
    "AttributeValueError", "Attrs", "BufferHandle", "DTYPES", "DType", "DTypeError", "Dim", "DuplicateNameError", "Graph",
    "GraphError", "IndexRangeError", "InputDTypeError", "InputShapeError", "Kernel", "Kind", "MissingInputError", "Node",
    "NumericsError", "OPS", "OpDef", "OptionError", "ParseError", "Program", "RlxError", "Shape", "ShapeError", "Target",
    "UnboundDimError", "UnknownNameError", "Value", "VerifyError", "as_dtype", "bf16", "bool_", "c64", "constant", "f16",
    "f32", "f64", "f8e4m3", "f8e5m2", "faults", "fingerprint", "i16", "i32", "i64", "i8", "ops", "parse_graph", "print_graph",
    "u16", "u32", "u64", "u8",
]  # fmt: skip
