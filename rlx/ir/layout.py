"""How tensors lie in buffers: by strides, or in tiles. From one description of tiles follow packing, unpacking and look-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from rlx.ir.kernel import Expr, k
from rlx.ir.shape import contiguous_strides


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in a buffer: strides in elements per dim, and the offset of element 0."""

    strides: tuple[int, ...]
    offset: int = 0


@dataclass(frozen=True)
class TiledLayout:
    """A tensor in tiles. `shape`: its dims. `parts`, (axis, step) from the outermost of the memory to the innermost: the axis in
    steps of so many, within those of the part of the same axis before it. Where the largest step of an axis does not divide the
    dim, the last tile is filled up.

    [k, n] in panels of 48 columns is ((1, 48), (0, 1), (1, 1)): of 48 columns each, the rows, and in a row the columns. With
    groups of 2 rows interleaved: ((1, 48), (0, 2), (1, 1), (0, 1)).

    `cell`: elements of memory for each position of the last part, arranged by whoever packs; an axis then need not come down to
    steps of 1.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    cell: int = 1

    @cached_property
    def within(self) -> tuple[int, ...]:
        """Of each part: the step of the part that it divides; 0 where there is none."""
        return tuple(next((s for b, s in reversed(self.parts[:i]) if b == a), 0) for i, (a, _) in enumerate(self.parts))

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Dims of the memory: one for each part, row-major."""
        out = [w // s if w else -(-self.shape[a] // s) for (a, s), w in zip(self.parts, self.within)]
        return (*out[:-1], out[-1] * self.cell)

    @property
    def size(self) -> int:
        """Elements of memory."""
        return math.prod(self.dims)

    @property
    def strides(self) -> tuple[int, ...]:
        return contiguous_strides(self.dims)

    def fault(self) -> str | None:
        """Why this describes no memory, or None."""
        for axis in range(len(self.shape)):
            steps = [s for a, s in self.parts if a == axis]
            if not steps or steps[-1] != 1 or any(low < 1 or high % low for high, low in zip(steps, steps[1:])):
                return f"the steps of axis {axis} are {steps}: each must divide the one before, down to 1"
        wrong = [a for a, _ in self.parts if not 0 <= a < len(self.shape)]
        return f"there is no axis {wrong[0]} of {list(self.shape)}" if wrong else None

    def place(self, coords: Sequence[Expr]) -> list[Expr]:
        """Where in the memory (a coordinate for each part) the element at `coords` lies."""
        out = []
        for (axis, step), within in zip(self.parts, self.within):
            c = k.rem(coords[axis], within) if within else coords[axis]
            out.append(k.div(c, step))
        return out

    def element(self, place: Sequence[Expr]) -> tuple[list[Expr], Expr | None]:
        """Coordinates of the element at a place in memory, and the condition that it was not filled in (None: none is)."""
        at: list[Expr | None] = [None] * len(self.shape)
        for (axis, step), c in zip(self.parts, place):
            here, before = k.mul(c, step), at[axis]
            at[axis] = here if before is None else k.add(before, here)
        inside = None
        for axis in reversed(range(len(self.shape))):
            if self.shape[axis] % max(s for a, s in self.parts if a == axis):
                test = k.lt(at[axis], self.shape[axis])
                inside = test if inside is None else k.and_(inside, test)
        return at, inside  # type: ignore[return-value]

    def pack(self, array: np.ndarray) -> np.ndarray:
        """The memory, of `dims`, of an array; what is filled in is 0."""
        whole = [max(s for a, s in self.parts if a == axis) for axis in range(len(self.shape))]
        padded = np.pad(array, [(0, -d % w) for d, w in zip(array.shape, whole)])
        split = padded.reshape([d for _, d in self._by_axis()])
        return np.ascontiguousarray(split.transpose([[i for i, _ in self._by_axis()].index(p) for p in range(len(self.parts))]))

    def unpack(self, memory: np.ndarray) -> np.ndarray:
        """The array of a memory of `dims`."""
        split = memory.reshape(self.dims).transpose([i for i, _ in self._by_axis()])
        whole = [math.prod(self.dims[i] for i, (a, _) in enumerate(self.parts) if a == axis) for axis in range(len(self.shape))]
        return split.reshape(whole)[tuple(slice(d) for d in self.shape)]

    def _by_axis(self) -> list[tuple[int, int]]:
        """(part, its dim), the parts of each axis together."""
        return [(i, self.dims[i]) for axis in range(len(self.shape)) for i, (a, _) in enumerate(self.parts) if a == axis]

    def viewed(self, layout: Layout, dims: tuple[int, ...]) -> TiledLayout | None:
        """The tiles seen by a view that only permutes axes: `layout` is that of the view (of `dims`) of a row-major tensor of
        `shape`. None: it does something else."""
        plain = contiguous_strides(self.shape)
        if layout.offset or len(dims) != len(self.shape) or 0 in dims:
            return None
        free = [a for a, d in enumerate(self.shape) if d == 1]
        axes: list[int] = []  # of `shape`, for each axis of the view
        for d, stride in zip(dims, layout.strides):
            here = [a for a, s in enumerate(plain) if s == stride and self.shape[a] == d != 1] if d != 1 else free[:1]
            if not here or here[0] in axes:
                return None
            axes.append(here[0])
            free = [a for a in free if a != here[0]]
        return TiledLayout(tuple(dims), tuple((axes.index(a), s) for a, s in self.parts), self.cell)

    def __str__(self) -> str:
        cell = f", {self.cell} each" if self.cell > 1 else ""
        return f"tiles {self.parts}{cell} of [{','.join(map(str, self.shape))}]"


__all__ = ["Layout", "TiledLayout"]
