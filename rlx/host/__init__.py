"""Machine code for this process: compiling LLVM IR, generated functions callable from Python, fast calls, the disk cache of code.

The driver and the backends depend on this package. It depends on the kernel IR, but on neither of them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def available() -> bool:
    """Whether code can be generated here, that is, whether llvmlite is installed. Imports nothing."""
    return find_spec("llvmlite") is not None


__all__ = ["available"]
