"""Windows of an image that products read where they lie, by bulk copies (tensor.py).

Positions of the image, in the order of memory, are rows of a matrix [positions, channels]. A window begins at one of them, and
its elements are some positions behind that, as many in all windows: so the box of a stage is that of the tile's rows, shifted.
Tiles cover the positions between windows, too, as those of the padding: sums that begin there are not stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rlx.ir.dtype import bf16, f16
from rlx.ir.graph import Node
from rlx.ir.kernel import Contract, Levels, Operand
from rlx.ir.layout import Layout
from rlx.ir.ops.contract import FlattenAttrs
from rlx.records import record

STEP = 64  # channels of a stage
COVERED = 1.4  # positions of each window, at most: with more, copies of the windows take less time
ROWS, COLUMNS = 1024, 16  # of a product, at least
Axes = Sequence[tuple[int, int]]  # (elements, stride), the innermost axis first


@record
class Windows:
    """`channels` of a position; `run`: adjacent elements of a window. `rows`, `terms`: (count, positions between two) of the axes
    of the product's rows, and of those of a window's other elements; innermost first."""

    channels: int
    run: int
    rows: tuple[tuple[int, int], ...]
    terms: tuple[tuple[int, int], ...]

    @property
    def covered(self) -> int:
        """Positions from the first window to the last one: rows of tiles."""
        return 1 + sum((count - 1) * apart for count, apart in self.rows)

    @property
    def positions(self) -> int:
        """Those that the windows have elements of."""
        return self.covered + (self.run - 1) // self.channels + sum((count - 1) * apart for count, apart in self.terms)


def windows(rows: Axes, terms: Axes, offset: int) -> Windows | None:
    """None: bulk copies would not bring whole stages, or too much between the windows."""
    rows, terms = _merged(rows), _merged(terms)
    if len(rows) < 2 or len(terms) < 2:
        return None
    (_, channels), (run, first) = rows[0], terms[0]
    others = [stride for axes in (rows, terms[1:]) for _, stride in axes]
    if first != 1 or channels <= 0 or channels % STEP or run % STEP or offset % channels or any(s % channels for s in others):
        return None
    found = Windows(
        channels, run, tuple((n, s // channels) for n, s in rows), tuple((n, s // channels) for n, s in terms[1:])
    )
    inside = 1
    for count, apart in found.rows:
        if apart < inside:
            return None  # windows of one line begin behind those of the next one
        inside = (count - 1) * apart + inside
    fits = run <= channels or run % channels == 0
    return found if fits and found.covered <= COVERED * math.prod(n for n, _ in rows) else None


def _merged(axes: Axes) -> list[tuple[int, int]]:
    """The axes of more than one element; those whose elements follow the ones of the axis inside them are one with it."""
    found = list[tuple[int, int]]()
    for count, stride in axes:
        if found and stride == math.prod(found[-1]):
            found[-1] = found[-1][0] * count, found[-1][1]
        elif count > 1:
            found.append((count, stride))
    return found


def of_contract(c: Contract, first: int | None) -> Windows | None:
    """`first`: the constant offset of the left operand."""
    o = c.a
    if not isinstance(o, Operand) or first is None or not (o.row_levels or o.col_levels):
        return None
    return windows([*_axes(c.m, o.row_stride, o.row_levels)], [*_axes(c.k, o.col_stride, o.col_levels)], first)


def _axes(size: int, stride: int, levels: Levels) -> Iterator[tuple[int, int]]:
    for count, outer in levels:
        yield count, stride
        size, stride = size // count, outer
    yield size, stride


def reads(arch: str, node: Node, layout: Layout) -> bool:
    """Target.windows. `layout`: of the left operand."""
    left, right = node.inputs[:2]
    if arch != "sm_90a" or not isinstance(node.attrs, FlattenAttrs) or node.attrs.batch:
        return False
    dims, columns = left.shape.static, right.shape.static[-1]
    axes, first = [*zip(dims, layout.strides)], left.rank - node.attrs.axes
    narrow = left.dtype in (f16, bf16) and right.dtype == left.dtype
    if not narrow or math.prod(dims[:first]) < ROWS or columns < COLUMNS or columns % 8:
        return False
    return windows(axes[first - 1 :: -1], axes[: first - 1 : -1], layout.offset) is not None


__all__ = ["Windows", "of_contract", "reads", "windows"]
