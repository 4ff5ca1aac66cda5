"""The compiler: graph in, checked program out. Knows targets as plain facts, and no backend."""

from rlx.compile.assemble import lower
from rlx.compile.options import CompileOptions

__all__ = ["CompileOptions", "lower"]
