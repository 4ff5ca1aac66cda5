"""How a value of the whole graph lies on the ranks: whole on each, in parts, or in contributions that must be combined.

The words are those of GSPMD (Xu et al. 2021) and of PyTorch's DTensor. The compiler finds them (rlx.compile.partition).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np


@dataclass(frozen=True)
class Replicated:
    """Every rank has all of it."""

    def __str__(self) -> str:
        return "replicated"


@dataclass(frozen=True)
class Split:
    """The ranks share `axis`: equally, in rank order, each of its consecutive `parts` (their sizes; (): one, all of it).

    More than one part is what projections side by side in one matrix have: each rank holds its share of each."""

    axis: int
    parts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"split({self.axis}{', ' + '+'.join(map(str, self.parts)) if len(self.parts) > 1 else ''})"

    def local(self, dims: Sequence[int], ranks: int) -> tuple[int, ...]:
        """The dims of one rank's share."""
        return (*dims[: self.axis], dims[self.axis] // ranks, *dims[self.axis + 1 :])

    def ranges(self, ranks: int, rank: int) -> list[tuple[int, int]]:
        """(start, stop) along the axis of each piece that a rank holds, in order."""
        return [(end - size + rank * (size // ranks), end - size + (rank + 1) * (size // ranks))
                for size, end in zip(self.parts, accumulate(self.parts))]  # fmt: skip

    def share(self, array: np.ndarray, ranks: int, rank: int) -> np.ndarray:
        """What one rank holds of `array`; a view where it is one piece."""
        lead = (slice(None),) * self.axis
        pieces = [array[(*lead, slice(*r))] for r in self.ranges(ranks, rank)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, self.axis)


@dataclass(frozen=True)
class Partial:
    """Every rank has an array of its own; element by element they combine, by "sum", "max" or "min", to the value."""

    kind: str = "sum"

    def __str__(self) -> str:
        return f"partial({self.kind})"


Placement = Replicated | Split | Partial
REPLICATED = Replicated()
