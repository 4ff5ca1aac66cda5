"""Reductions of collectives in numpy: they combine the arrays of all ranks element by element, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np

from rlx.driver.arena import convert
from rlx.errors import CallMismatchError
from rlx.ir.dtype import DType, i64, u64
from rlx.ir.ops.elementwise import divide_array


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


def combine(form: Form, sources: Sequence[np.ndarray]) -> np.ndarray:
    """Combine the sources, one per rank in rank order. MAX and MIN keep the first of two zeros, and propagate NaN."""
    wide = accumulator(form.dtype)
    with np.errstate(all="ignore"):
        total = sources[0] if form.carried else convert(sources[0], wide)
        for source in sources[1:]:
            x = convert(source, wide)
            if form.kind in (ReduceKind.SUM, ReduceKind.MEAN):
                total = total + x
            else:
                better = x > total if form.kind == ReduceKind.MAX else x < total
                total = np.where(better | (x != x), x, total)
        if form.carries:
            return total
        if form.kind == ReduceKind.MEAN:
            total = divide_array(total, np.asarray(form.ranks, wide.numpy))
        return convert(total, form.dtype)


def numpy_reduction(form: Form) -> Reduction:
    narrow, wide = form.dtype.numpy, accumulator(form.dtype).numpy

    def run(out: np.ndarray, sources: Sequence[np.ndarray]) -> None:
        typed = [s.view(wide if form.carried and i == 0 else narrow) for i, s in enumerate(sources)]
        out.view(wide if form.carries else narrow)[...] = combine(form, typed)

    return run
