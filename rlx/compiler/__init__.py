"""The compiler: graph in, checked program out. Knows targets as plain facts, and no backend."""

from rlx.compiler.options import CompileOptions, Foresee

from rlx.errors import (  # isort: skip
    CompileError, GraphError, IndexRangeError, OptionError, PlanError, RlxError, UnboundDimError, UnknownRankError,
    Unsupported, VerifyError,
)  # fmt: skip
from rlx.ir.graph import Graph
from rlx.ir.program import Program
from rlx.ir.target import Target


def lower(graph: Graph, target: Target, options: CompileOptions, foresee: Foresee | None = None) -> Program:
    """The checked program of `graph` for `target`. Raises CompileError, Unsupported, VerifyError or OptionError. `foresee` is
    called with each kernel of the program as soon as it is known, and whether params alone decide what it computes."""
    from rlx.compiler.assemble import assembled  # on first use: a process whose programs come from the disk cache needs no passes

    return assembled(graph, target, options, foresee=foresee).program


__all__ = [
    "CompileError", "CompileOptions", "GraphError", "IndexRangeError", "OptionError", "PlanError", "RlxError",
    "UnboundDimError", "UnknownRankError", "Unsupported", "VerifyError", "lower",
]  # fmt: skip
