"""The compiler: graph in, checked program out. Knows targets as plain facts, and no backend."""

from rlx.compile.assemble import lower
from rlx.compile.options import CompileOptions

from rlx.errors import (  # isort: skip
    CompileError, GraphError, IndexRangeError, OptionError, PlanError, RlxError, UnboundDimError, UnknownRankError,
    VerifyError,
)  # fmt: skip

__all__ = [
    "CompileError", "CompileOptions", "GraphError", "IndexRangeError", "OptionError", "PlanError", "RlxError",
    "UnboundDimError", "UnknownRankError", "VerifyError", "lower",
]  # fmt: skip
