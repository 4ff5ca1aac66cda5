"""Contractions: sums of products, and the packed form of their right operand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir.dtype import i8, i32, u8
from rlx.ir.kernel import k
from rlx.ir.op import Attrs, Contraction, Kind, Sample, op
from rlx.ir.ops.rules import same_dtype, static_dim
from rlx.ir.shape import Shape, broadcast_dims


def _contraction(attrs: Any, a: Shape, b: Shape) -> Contraction:
    """numpy's matmul: a 1-D operand has no rows (columns); without batch dims in b, all leading dims of a are rows."""
    a_sum, b_sum = a.rank - 1, max(b.rank - 2, 0)
    columns = (b.rank - 1,) if b.rank > 1 else ()
    batch = max(a.rank - 2, b.rank - 2) if b.rank > 2 else 0
    a_rows = tuple(range(a.rank - 1)) if not batch else (a.rank - 2,) if a.rank > 1 else ()

    def batch_axes(rank: int) -> tuple[int, ...]:
        own = max(rank - 2, 0)
        return tuple(i - (batch - own) if i >= batch - own else -1 for i in range(batch))

    return Contraction(
        a_batch=batch_axes(a.rank), a_rows=a_rows, a_sum=(a_sum,), b_batch=batch_axes(b.rank), b_sum=(b_sum,), b_columns=columns
    )


def _matmul_shape(attrs: Any, a: Shape, b: Shape) -> Shape:
    same_dtype(a, b)
    if not a.rank or not b.rank:
        raise ShapeError("an operand without dims has nothing to sum over; use mul")
    c = _contraction(attrs, a, b)
    inner = (a.dims[c.a_sum[0]], b.dims[c.b_sum[0]])
    if inner[0] != inner[1]:
        raise ShapeError(f"the last dim of {a} is {inner[0]}, dim {c.b_sum[0]} of {b} is {inner[1]}")
    batch = broadcast_dims(tuple(a.dims[i] for i in c.a_batch if i >= 0), tuple(b.dims[i] for i in c.b_batch if i >= 0))
    return a.with_dims((*batch, *(a.dims[i] for i in c.a_rows), *(b.dims[i] for i in c.b_columns)))


matmul = op(
    "matmul", kind=Kind.CONTRACT, infer=_matmul_shape, arity=(2, 2), dtypes="fiu",
    reference=lambda attrs, a, b: np.matmul(a, b), contract=_contraction,
    samples=(
        Sample(((3, 17), (17, 5))), Sample(((2, 3, 4), (4, 33))), Sample(((2, 3, 5, 4), (2, 3, 4, 7))),
        Sample(((2, 1, 5, 4), (3, 4, 2))), Sample(((5, 4), (3, 4, 2))), Sample(((17,), (17, 3))), Sample(((3, 17), (17,))),
        Sample(((5,), (5,))), Sample(((4,), (2, 4, 3))), Sample(((2, 3, 4), (4,))), Sample(((1, 33), (33, 49))),
        Sample(((0, 3), (3, 2))), Sample(((2, 0), (0, 3))),
    ),
    doc="numpy's matmul: [..., m, k] @ [..., k, n], batch dims broadcast; 16-bit floats accumulate in f32, integers wrap.",
)  # fmt: skip


def _int8_shape(attrs: Any, a: Shape, b: Shape) -> Shape:
    if (a.dtype, b.dtype) != (u8, i8):
        raise DTypeError(f"the operands are u8 and i8, got {a} and {b}")
    return Shape(_matmul_shape(attrs, a, Shape(b.dims, u8)).dims, i32)


int8_matmul = op(
    "int8_matmul", kind=Kind.CONTRACT, infer=_int8_shape, arity=(2, 2), dtypes="u", contract=_contraction,
    reference=lambda attrs, a, b: np.matmul(a.astype(np.int32), b.astype(np.int32)),
    samples=tuple(
        Sample(dims, dtypes=("u8", "i8"), low=0, high=127)
        for dims in (((3, 17), (17, 5)), ((2, 3, 8), (8, 33)), ((17,), (17, 3)), ((2, 5, 4), (2, 4, 7)), ((2, 0), (0, 3)))
    ),
    doc="matmul of u8 by i8 with i32 sums, which wrap: exact to a depth of 65,000.",
)  # fmt: skip


def _linear_shape(attrs: Any, x: Shape, w: Shape, b: Shape | None = None) -> Shape:
    if w.rank != 2:
        raise ShapeError(f"the weights are [in, out], got {w}")
    out = _matmul_shape(attrs, x, w)
    if b is not None:
        same_dtype(x, b)
        if b.dims != w.dims[1:]:
            raise ShapeError(f"the bias must be [{w.dims[1]}], got {b}")
    return out


linear = op(
    "linear", kind=Kind.COMPOSITE, infer=_linear_shape, arity=(2, 3),
    reference=lambda attrs, x, w, b=None: np.matmul(x, w) if b is None else np.matmul(x, w) + b,
    decompose=lambda attrs, x, w, b=None: matmul(x, w) if b is None else matmul(x, w) + b,
    samples=(Sample(((3, 17), (17, 5), (5,))), Sample(((2, 3, 33), (33, 4))), Sample(((17,), (17, 3), (3,)))),
    doc="x @ w + b with w [in, out] and b [out], which may be left out.",
)  # fmt: skip


class PanelAttrs(Attrs):
    panel: int
    group: int = 1

    def __post_init__(self) -> None:
        if self.panel < 1 or self.group < 1:
            raise AttributeValueError(f"a panel has at least one column, a group one row, got {self.panel} and {self.group}")


def _panels_shape(attrs: PanelAttrs, w: Shape) -> Shape:
    if w.rank < 2:
        raise ShapeError(f"the operand is [..., k, n], got {w}")
    columns = static_dim(w.dims[-1], "packing")
    dims = (*w.dims[:-2], -(-columns // attrs.panel), w.dims[-2], attrs.panel)
    if attrs.group == 1:
        return w.with_dims(dims)
    rows = static_dim(w.dims[-2], "packing")
    return w.with_dims((*dims[:-2], -(-rows // attrs.group), attrs.panel, attrs.group))


def _panels_array(attrs: PanelAttrs, w: np.ndarray) -> np.ndarray:
    count = -(-w.shape[-1] // attrs.panel)
    padded = np.zeros((*w.shape[:-2], -(-w.shape[-2] // attrs.group) * attrs.group, count * attrs.panel), w.dtype)
    padded[..., : w.shape[-2], : w.shape[-1]] = w
    panels = np.moveaxis(padded.reshape(*padded.shape[:-1], count, attrs.panel), -2, -3)
    if attrs.group == 1:
        return panels
    return np.swapaxes(panels.reshape(*panels.shape[:-2], -1, attrs.group, attrs.panel), -1, -2)


def _panels_element(ctx: Any, node: Any, result: int, coords: Sequence[Any]) -> Any:
    if (group := node.attrs.group) > 1:
        *coords, inner = coords
        coords[-2] = k.add(k.mul(coords[-2], k.const(group)), inner)
    *batch, panel, row, lane = coords
    width, (rows, columns) = node.attrs.panel, ctx.dims(node.inputs[0])[-2:]
    column = k.add(k.mul(panel, k.const(width)), lane)
    guard = None if columns % width == 0 else k.lt(column, k.const(columns))
    if rows % group:
        inside = k.lt(row, k.const(rows))
        guard = inside if guard is None else k.and_(guard, inside)
    return ctx.element(node.inputs[0], (*batch, row, column), guard)


pack_panels = op(
    "pack_panels", kind=Kind.INDEX, infer=_panels_shape, attrs=PanelAttrs, dtypes="fiu",
    reference=_panels_array, element=_panels_element, rows=lambda a, i, axis, w: axis if axis < w.rank - 2 else None,
    samples=(
        Sample(((3, 17),), {"panel": 8}), Sample(((5, 48),), {"panel": 48}), Sample(((2, 4, 33),), {"panel": 16}),
        Sample(((3, 2),), {"panel": 4}), Sample(((4, 17),), {"panel": 8, "group": 2}),
        Sample(((2, 6, 5),), {"panel": 4, "group": 3}), Sample(((2, 5, 9),), {"panel": 4, "group": 4}),
    ),
    doc="[..., k, n] as panels of columns [..., ceil(n / panel), k, panel], zeros in the last one's missing columns: the form "
    "in which a contraction streams its right operand. With `group` rows interleaved, the last ones filled up with zeros: "
    "[..., ceil(k / group), panel, group].",
)  # fmt: skip
