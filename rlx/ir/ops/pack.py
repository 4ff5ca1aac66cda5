"""Tiled layouts.

`pack` stores a tensor in tiles. Its value is that of the operand; only the memory layout changes.
"""

from __future__ import annotations

import numpy as np

from rlx.errors import AttributeValueError
from rlx.ir.contexts import Applied, Coords, Lowering
from rlx.ir.declare import op
from rlx.ir.kernel import Expr
from rlx.ir.layout import TiledLayout
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.rules import static_dim
from rlx.ir.shape import Shape


class PackAttrs(Attrs):
    """`layout`: (axis, step) of each part of the memory, outermost first (rlx.ir.layout.TiledLayout.parts)."""

    layout: tuple[tuple[int, int], ...]


def panels(columns: int, group: int = 1) -> tuple[tuple[int, int], ...]:
    """The tiled layout of the right operand [k, n] of a contraction: panels of columns, in each of which k is grouped."""
    inner = ((1, 1), (0, 1)) if group > 1 else ((1, 1),)
    return ((1, columns), (0, group), *inner)


def group_panels(columns: int, group: int = 1) -> tuple[tuple[int, int], ...]:
    """The same for one matrix after the other, [groups, k, n]."""
    return ((0, 1), *((axis + 1, step) for axis, step in panels(columns, group)))


def _tiled(attrs: PackAttrs, x: Shape) -> TiledLayout:
    return TiledLayout(tuple(static_dim(d, "packing") for d in x.dims), attrs.layout)


def _shape(attrs: PackAttrs, x: Shape) -> Shape:
    if fault := TiledLayout(tuple(1 for _ in x.dims), attrs.layout).fault():
        raise AttributeValueError(f"layout {attrs.layout} of {x}: {fault}")
    return x


def _element(ctx: Lowering, node: Applied[PackAttrs], result: int, place: Coords) -> Expr:
    """`place` is the location of the element in the tiled memory; padding is 0."""
    at, inside = _tiled(node.attrs, node.inputs[0].shape).element(place)
    return ctx.element(node.inputs[0], at, inside)


pack = op(
    "pack", kind=Kind.INDEX, infer=_shape, attrs=PackAttrs, dtypes="fiub", element=_element, tiled=_tiled,
    reference=lambda attrs, x: np.asarray(x), rows=lambda attrs, operand, axis, x: axis,
    samples=(
        Sample(((3, 17),), {"layout": panels(8)}), Sample(((5, 4),), {"layout": panels(2, 4)}),
        Sample(((2, 3, 5),), {"layout": ((0, 1), (2, 4), (1, 1), (2, 2), (2, 1))}),
        Sample(((3, 5, 7),), {"layout": group_panels(4, 2)}),
    ),
    doc="x stored in padded tiles. The compiler decides where to pack; in a graph from the user, pack(x) is the same as x.",
)  # fmt: skip

__all__ = ["PackAttrs", "group_panels", "pack", "panels"]
