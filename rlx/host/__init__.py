"""Machine code for this process: LLVM IR to code, native functions callable from Python, fast calls, the cache of code on disk.

The driver and the backends stand on this floor; it knows the kernel IR and neither of them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec


@cache
def available() -> bool:
    """Whether code can be generated here: llvmlite is installed. Loads nothing."""
    return find_spec("llvmlite") is not None


__all__ = ["available"]
