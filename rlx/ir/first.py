"""Imports numpy, before the modules that need it.

Amid nested imports it would take 10 ms longer: CPython's stack would be at the end of a piece, and each call there would map and
unmap the next one. Threads of its OpenBLAS would spin for 25 ms whenever they have nothing to do, first during our own imports.
Now they sleep sooner, unless the environment says how long they spin: products in a row still find them awake.
"""

from __future__ import annotations

from rlx import knobs

BLAS_SPIN = "OPENBLAS_THREAD_TIMEOUT", "22"  # a power of two of cycles: 1 to 2 ms

with knobs.unless_set(*BLAS_SPIN):  # OpenBLAS reads it once
    import numpy as numpy

__all__ = ["BLAS_SPIN"]
