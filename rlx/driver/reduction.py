"""Reductions of collectives: how the arrays of all ranks combine to one, element by element in rank order, in numpy."""

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
    """A reduction of elements. `carried`: the first source is in the accumulating dtype; `carries`: so is the result. `ranks`:
    what a mean is divided by."""

    kind: ReduceKind
    dtype: DType
    ranks: int
    carried: bool = False
    carries: bool = False


Reduction = Callable[[np.ndarray, Sequence[np.ndarray]], None]  # (out, sources): bytes, contiguous


def accumulator(dtype: DType) -> DType:
    """What a reduction of `dtype` is carried in. CallMismatchError: there is none of bool and complex numbers."""
    if dtype.kind not in "fiu":
        raise CallMismatchError(f"a reduction takes floats and integers, not {dtype.name}; cast it first")
    return dtype.compute if dtype.is_float else i64 if dtype.kind == "i" else u64


def combine(form: Form, sources: Sequence[np.ndarray]) -> np.ndarray:
    """The sources, one of each rank in their order, as one array. Of two zeros MAX and MIN keep the first; NaN wins."""
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
