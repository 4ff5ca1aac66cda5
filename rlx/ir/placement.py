"""Placement of a value on the ranks: replicated on each, split along an axis, or partial results that must be reduced.

The terms are those of GSPMD (Xu et al. 2021) and PyTorch's DTensor. rlx.compiler.partition infers the placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Literal

import numpy as np

from rlx.errors import OptionError, items, whole
from rlx.records import record

ReduceName = Literal["sum", "mean", "max", "min"]


@record
class Replicated:
    """Every rank has all of it."""

    def __str__(self) -> str:
        return "replicated"


@record
class Split:
    """`axis` is split between the ranks: each of its consecutive `parts` (sizes; (): one part, the whole axis) equally and in
    rank order.

    A matrix that concatenates several projections has several parts: each rank holds its share of each projection."""

    axis: int
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        parts = items("the parts of a split are sizes", self.parts, OptionError)
        vars(self).update(axis=whole("the axis of a split", self.axis), parts=tuple(whole("a part", n, 0) for n in parts))

    def __str__(self) -> str:
        return f"split({self.axis}{', ' + '+'.join(map(str, self.parts)) if len(self.parts) > 1 else ''})"

    def local(self, dims: Sequence[int], ranks: int) -> tuple[int, ...]:
        """The dims of one rank's shard."""
        return (*dims[: self.axis], dims[self.axis] // ranks, *dims[self.axis + 1 :])

    def ranges(self, ranks: int, rank: int) -> list[tuple[int, int]]:
        """(start, stop) along the axis of each piece that a rank holds, in order."""
        return [(end - size + rank * (size // ranks), end - size + (rank + 1) * (size // ranks))
                for size, end in zip(self.parts, accumulate(self.parts))]  # fmt: skip

    def share(self, array: np.ndarray, ranks: int, rank: int) -> np.ndarray:
        """One rank's shard of `array`; a view if it is one piece."""
        lead = (slice(None),) * self.axis
        pieces = [array[(*lead, slice(*r))] for r in self.ranges(ranks, rank)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, self.axis)


@record
class Partial:
    """Every rank has its own array; their elementwise "sum", "max" or "min" is the value."""

    kind: ReduceName = "sum"

    def __str__(self) -> str:
        return f"partial({self.kind})"


Placement = Replicated | Split | Partial
REPLICATED = Replicated()
