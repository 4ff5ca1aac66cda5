"""Memory layouts: strided and tiled. Packing, unpacking and look-up are all derived from one description of the tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from rlx.ir.kernel import Expr, Levels, k
from rlx.ir.shape import contiguous_strides
from rlx.records import record

LINE, NEAR = 8, 4  # see is_line


@record
class Layout:
    """A strided layout: strides in elements per dim, and the offset of element 0."""

    strides: tuple[int, ...]
    offset: int = 0


def is_line(size: int, stride: int) -> bool:
    """Whether vectors along an axis are read as they lie in memory: it has LINE elements or more, at most NEAR apart."""
    return size >= LINE and 0 < stride <= NEAR


def one_stride(layout: Layout, dims: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """True if the elements along these axes, in row-major order, are one stride apart."""
    real = [a for a in axes if dims[a] != 1]
    return all(layout.strides[high] == layout.strides[low] * dims[low] for high, low in zip(real, real[1:]))


def in_levels(layout: Layout, dims: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, Levels]:
    """The stride of the innermost of these axes with more than one element, and the levels (Operand.row_levels) of those axes
    outside of it that it does not reach."""
    found: list[tuple[int, int]] = []  # (count, stride), innermost first
    for axis in reversed(axes):
        if found and layout.strides[axis] == found[-1][0] * found[-1][1]:
            found[-1] = found[-1][0] * dims[axis], found[-1][1]
        elif dims[axis] != 1:
            found.append((dims[axis], layout.strides[axis]))
    found = found if 0 not in (dims[a] for a in axes) else found[:1]
    return found[0][1] if found else 0, tuple((count, stride) for (count, _), (_, stride) in zip(found, found[1:]))


@record
class TiledLayout:
    """A tiled layout. `shape`: the dims of the tensor. `parts`: memory dims, outermost first, as (axis, step): the axis in steps
    of `step` elements, inside one step of the previous part of the same axis. If the largest step of an axis does not divide the
    dim, the last tile is padded.

    [k, n] in panels of 48 columns is ((1, 48), (0, 1), (1, 1)): for each panel all rows, and in a row its 48 columns. With groups
    of 2 rows interleaved: ((1, 48), (0, 2), (1, 1), (0, 1)).

    `cell`: memory elements per position of the last part, in an order defined by the packing op; an axis then need not come down
    to steps of 1.
    """

    shape: tuple[int, ...]
    parts: tuple[tuple[int, int], ...]
    cell: int = 1

    @cached_property
    def within(self) -> tuple[int, ...]:
        """For each part, the step of the part of the same axis that encloses it; 0 if there is none."""
        return tuple(next((s for b, s in reversed(self.parts[:i]) if b == a), 0) for i, (a, _) in enumerate(self.parts))

    @cached_property
    def dims(self) -> tuple[int, ...]:
        """Dims of the memory, one per part, row-major."""
        out = [w // s if w else -(-self.shape[a] // s) for (a, s), w in zip(self.parts, self.within)]
        return (*out[:-1], out[-1] * self.cell)

    @property
    def size(self) -> int:
        """Number of elements of the memory, padding included."""
        return math.prod(self.dims)

    @property
    def strides(self) -> tuple[int, ...]:
        return contiguous_strides(self.dims)

    def fault(self) -> str | None:
        """Why this layout is invalid, or None."""
        for axis in range(len(self.shape)):
            steps = [s for a, s in self.parts if a == axis]
            if not steps or steps[-1] != 1 or any(low < 1 or high % low for high, low in zip(steps, steps[1:])):
                return f"the steps of axis {axis} are {steps}: each must divide the one before, down to 1"
        wrong = [a for a, _ in self.parts if not 0 <= a < len(self.shape)]
        return f"there is no axis {wrong[0]} of {list(self.shape)}" if wrong else None

    def place(self, coords: Sequence[Expr]) -> list[Expr]:
        """Memory coordinates (one per part) of the element at `coords`."""
        out = []
        for (axis, step), within in zip(self.parts, self.within):
            c = k.rem(coords[axis], within) if within else coords[axis]
            out.append(k.div(c, step))
        return out

    def element(self, place: Sequence[Expr]) -> tuple[list[Expr], Expr | None]:
        """Coordinates of the element at a memory location, and the condition that it is not padding (None: always true)."""
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
        """The packed form of an array, of shape `dims`; padding is 0."""
        whole = [max(s for a, s in self.parts if a == axis) for axis in range(len(self.shape))]
        padded = np.pad(array, [(0, -d % w) for d, w in zip(array.shape, whole)])
        split = padded.reshape([d for _, d in self._by_axis()])
        return np.ascontiguousarray(split.transpose([[i for i, _ in self._by_axis()].index(p) for p in range(len(self.parts))]))

    def unpack(self, memory: np.ndarray) -> np.ndarray:
        """The array from its packed form of shape `dims`."""
        split = memory.reshape(self.dims).transpose([i for i, _ in self._by_axis()])
        whole = [math.prod(self.dims[i] for i, (a, _) in enumerate(self.parts) if a == axis) for axis in range(len(self.shape))]
        return split.reshape(whole)[tuple(slice(d) for d in self.shape)]

    def _by_axis(self) -> list[tuple[int, int]]:
        """(part, its dim), with the parts of each axis adjacent."""
        return [(i, self.dims[i]) for axis in range(len(self.shape)) for i, (a, _) in enumerate(self.parts) if a == axis]

    def viewed(self, layout: Layout, dims: tuple[int, ...]) -> TiledLayout | None:
        """The tiled layout of a view that only permutes axes: `layout` is that of the view (of `dims`) of a row-major tensor of
        `shape`. None: the view is not a permutation."""
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
