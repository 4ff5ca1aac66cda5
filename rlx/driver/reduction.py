"""Kinds and forms of the reductions in collectives: the arrays of all ranks combined element by element, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from rlx.errors import CallMismatchError
from rlx.ir.dtype import DType, i64, u64


class ReduceKind(Enum):
    SUM, MEAN, MAX, MIN = 1, 2, 3, 4


class Form(NamedTuple):
    """A reduction. `carried`: the first source is in the accumulator's dtype. `carries`: the result is. `ranks`: the divisor of a
    mean."""

    kind: ReduceKind
    dtype: DType
    ranks: int
    carried: bool = False
    carries: bool = False


Reduction = Callable[[np.ndarray, Sequence[np.ndarray]], None]  # (out, sources): bytes, contiguous


def accumulator(dtype: DType) -> DType:
    """The accumulator's dtype in a reduction of `dtype`. CallMismatchError: bool and complex numbers have none."""
    if dtype.kind not in "fiu":
        raise CallMismatchError(f"a reduction takes floats and integers, not {dtype.name}; cast it first")
    return dtype.compute if dtype.is_float else i64 if dtype.kind == "i" else u64
