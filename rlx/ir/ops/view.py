"""Views: out[c] = in[f(c)].

`strided` gives the Layout of the view if no copy is needed; `element` always works.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from operator import mul

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir.contexts import Applied, Coords, Lowering, Padded, PaddingPass, Parted, Partitioning
from rlx.ir.declare import op
from rlx.ir.kernel import Expr, k
from rlx.ir.layout import Layout
from rlx.ir.node import Node, Value, constant
from rlx.ir.op import Attrs, Kind, Sample
from rlx.ir.ops.index import gather
from rlx.ir.ops.rules import again, axis_of, divide, static_dim
from rlx.ir.ops.state import take_rows
from rlx.ir.shape import DimLike, Shape, broadcast_dims, contiguous_strides

END = 2**63 - 1  # a slice's stop: to the end of the dim
ANY = "fiubc"


# -- reshape -------------------------------------------------------------------------------------------------------


class ReshapeAttrs(Attrs):
    dims: tuple[DimLike, ...]  # one may be -1


def _reshape_shape(attrs: ReshapeAttrs, x: Shape) -> Shape:
    total, known = (math.prod(dims) for dims in (x.dims, [d for d in attrs.dims if d != -1]))  # type: ignore[arg-type]
    if attrs.dims.count(-1) > 1:
        raise AttributeValueError(f"dims {attrs.dims} leave more than one size open")
    rest = divide(total, known) if -1 in attrs.dims else 1
    if rest is None:
        raise ShapeError(f"{total} elements cannot be divided into dims of {known}")
    if -1 not in attrs.dims and total != known:
        raise ShapeError(f"dims {attrs.dims} hold {known} elements, the operand {total}")
    return x.with_dims(rest if d == -1 else d for d in attrs.dims)


def regroup(a: Sequence[int], b: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The finest groups of axes of `a` and of `b` with equal products, in order; dims of 1 are in none.

    reshape [2,3,4] -> [6,1,4] is ([0,1],[0]), ([2],[2]). Both must hold the same number of elements, not zero.
    """

    def axes(dims: Sequence[int], low: int, high: int) -> list[int]:
        return [i for i, size in enumerate(accumulate(dims, mul)) if low < size <= high and dims[i] != 1]

    cuts = sorted({1, *accumulate(a, mul)} & {1, *accumulate(b, mul)})
    return [(axes(a, low, high), axes(b, low, high)) for low, high in zip(cuts, cuts[1:])]


def _reshape_element(ctx: Lowering, node: Node, result: int, coords: Coords) -> Expr:
    source = node.inputs[0]
    dims, out = ctx.dims(source), ctx.dims(node.results[0])
    at: list[Expr] = [k.const(0)] * len(dims)
    for left, right in regroup(dims, out) if math.prod(dims) else ():
        position = k.const(0)  # row-major within the group
        for axis in right:
            position = k.add(k.mul(position, k.const(out[axis])), coords[axis])
        for axis in reversed(left[1:]):
            at[axis] = k.rem(position, k.const(dims[axis]))
            position = k.div(position, k.const(dims[axis]))
        at[left[0]] = position
    return ctx.element(source, tuple(at))


def _reshape_strided(attrs: object, dims: Sequence[int], out: Sequence[int], layout: Layout, result: int = 0) -> Layout | None:
    if not math.prod(dims):
        return Layout(contiguous_strides(tuple(out)), layout.offset)
    strides = [0] * len(out)
    for left, right in regroup(dims, out):
        if any(layout.strides[i] != layout.strides[j] * dims[j] for i, j in zip(left, left[1:])):
            return None
        step = layout.strides[left[-1]]
        for axis in reversed(right):
            strides[axis] = step
            step *= out[axis]
    return Layout(tuple(strides), layout.offset)


reshape = op(
    "reshape", kind=Kind.VIEW, infer=_reshape_shape, attrs=ReshapeAttrs, dtypes=ANY,
    reference=lambda a, x: x.reshape(_reshape_shape(a, Shape(x.shape, x.dtype)).static),
    element=_reshape_element, strided=_reshape_strided, parts=lambda node, x: again(node, x, dims=(*node.shapes[0].dims, 2)),
    samples=(
        Sample(((2, 3, 4),), {"dims": (6, 4)}), Sample(((6, 5),), {"dims": (2, 3, -1)}), Sample(((4, 6),), {"dims": (3, 8)}),
        Sample(((2, 17, 3, 1),), {"dims": (1, 2, 51)}), Sample(((5,),), {"dims": (1, 5, 1)}), Sample(((0, 3),), {"dims": (3, 0)}),
        Sample(((1, 1),), {"dims": ()}), Sample(((),), {"dims": (1, 1)}),
    ),
    doc="The same elements in row-major order with new dims; one of them may be -1 (inferred).",
)  # fmt: skip


# -- transpose, broadcast_to, slice --------------------------------------------------------------------------------


class TransposeAttrs(Attrs):
    axes: tuple[int, ...] = ()  # (): reversed


def _permutation(attrs: TransposeAttrs, rank: int) -> tuple[int, ...]:
    axes = tuple(axis_of(a, rank) for a in attrs.axes) or tuple(reversed(range(rank)))
    if sorted(axes) != list(range(rank)):
        raise AttributeValueError(f"axes {attrs.axes} are not a permutation of {rank} dims")
    return axes


def seen(x: Value) -> tuple[Value, Layout]:
    """The value that `x` is a view of if strides express all views, and where the elements of `x` lie in it."""
    if x.node.op.kind is Kind.VIEW and x.node.op.strided is not None and len(x.node.shapes) == 1:
        base, layout = seen(source := x.node.inputs[0])
        if (found := x.node.op.strided(x.node.attrs, source.shape.static, x.shape.static, layout)) is not None:
            return base, found
    return x, Layout(contiguous_strides(x.shape.static))


def transposed_axes(node: Node) -> tuple[int, ...]:
    """All axes of a transpose, from the front: result dim i is operand dim axes[i]."""
    assert isinstance(node.attrs, TransposeAttrs)
    return _permutation(node.attrs, node.inputs[0].rank)


def _transpose_element(ctx: Lowering, node: Applied[TransposeAttrs], result: int, coords: Coords) -> Expr:
    axes = _permutation(node.attrs, len(coords))
    return ctx.element(node.inputs[0], tuple(coords[axes.index(i)] for i in range(len(axes))))


transpose = op(
    "transpose", kind=Kind.VIEW, attrs=TransposeAttrs, dtypes=ANY,
    infer=lambda a, x: x.with_dims(x.dims[i] for i in _permutation(a, x.rank)),
    reference=lambda a, x: np.transpose(x, _permutation(a, x.ndim)),
    element=_transpose_element, parts=lambda node, x: again(node, x, axes=(*_permutation(node.attrs, x.rank - 1), x.rank - 1)),
    strided=lambda a, dims, out, lay, result=0: Layout(tuple(lay.strides[i] for i in _permutation(a, len(dims))), lay.offset),
    samples=(
        Sample(((3, 17),)), Sample(((2, 3, 4, 5),), {"axes": (0, 2, 1, 3)}), Sample(((2, 33, 4),), {"axes": (2, 0, -2)}),
        Sample(((),)), Sample(((0, 2),)),
    ),
    doc="Permutes the dims: result dim i is operand dim axes[i]. Without axes, reverses them.",
)  # fmt: skip


class BroadcastAttrs(Attrs):
    dims: tuple[DimLike, ...]


def _broadcast_shape(attrs: BroadcastAttrs, x: Shape) -> Shape:
    if broadcast_dims(x.dims, attrs.dims) != attrs.dims:
        raise ShapeError(f"{x} cannot be broadcast to dims {attrs.dims}")
    return x.with_dims(attrs.dims)


def _broadcast_element(ctx: Lowering, node: Node, result: int, coords: Coords) -> Expr:
    dims = ctx.dims(node.inputs[0])
    inner = coords[len(coords) - len(dims) :]
    return ctx.element(node.inputs[0], tuple(k.const(0) if d == 1 else c for d, c in zip(dims, inner)))


def _broadcast_strided(attrs: object, dims: Sequence[int], out: Sequence[int], layout: Layout, result: int = 0) -> Layout:
    kept = tuple(0 if d == 1 else s for d, s in zip(dims, layout.strides))
    return Layout((0,) * (len(out) - len(dims)) + kept, layout.offset)


broadcast_to = op(
    "broadcast_to", kind=Kind.VIEW, infer=_broadcast_shape, attrs=BroadcastAttrs, dtypes=ANY,
    reference=lambda a, x: np.broadcast_to(x, a.dims), element=_broadcast_element, strided=_broadcast_strided,
    permuted=lambda a, axes, x: {"dims": tuple(a.dims[i] for i in axes)},
    parts=lambda node, x: again(node, x, dims=(*node.attrs.dims, 2)),
    samples=(
        Sample(((17,),), {"dims": (3, 17)}), Sample(((2, 1, 5),), {"dims": (2, 3, 5)}), Sample(((),), {"dims": (4,)}),
        Sample(((1,),), {"dims": (0,)}),
    ),
    doc="Broadcasts to `dims`: repeats the operand along new leading dims and along its dims of size 1.",
)  # fmt: skip


class SliceAttrs(Attrs):
    """One start, stop and step per dim, as in Python's slices; stop END goes to the end."""

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    steps: tuple[int, ...] = ()  # (): 1 everywhere

    def __post_init__(self) -> None:
        if not self.steps:
            object.__setattr__(self, "steps", (1,) * len(self.starts))


def _ranges(attrs: SliceAttrs, dims: Sequence[DimLike]) -> list[tuple[int, DimLike, int]]:
    """(start, length, step) per dim."""
    if not len(attrs.starts) == len(attrs.stops) == len(attrs.steps) == len(dims):
        raise AttributeValueError(f"starts, stops and steps must have one entry for each of the {len(dims)} dims")
    out: list[tuple[int, DimLike, int]] = []
    for start, stop, step, dim in zip(attrs.starts, attrs.stops, attrs.steps, dims):
        if step == 0:
            raise AttributeValueError("a step of 0 goes nowhere")
        if isinstance(dim, int):
            span = range(*builtin_slice(start, stop, step).indices(dim))
            out.append((span.start, max(0, -((span.start - span.stop) // step)), step))  # len(span) takes 63 bits at most
        elif (start, stop, step) == (0, END, 1):
            out.append((0, dim, 1))
        elif step == 1 and stop == (start + 1 if start != -1 else END):
            out.append((start, 1, 1))  # one element, which exists for any size of the dim
        else:
            static_dim(dim, f"the slice {start}:{stop}:{step}")
    return out


def _slice_element(ctx: Lowering, node: Applied[SliceAttrs], result: int, coords: Coords) -> Expr:
    ranges = _ranges(node.attrs, ctx.dims(node.inputs[0]))
    at = tuple(k.add(k.mul(c, k.const(step)), k.const(start)) for c, (start, _, step) in zip(coords, ranges))
    return ctx.element(node.inputs[0], at)


def _slice_strided(attrs: SliceAttrs, dims: Sequence[int], out: Sequence[int], layout: Layout, result: int = 0) -> Layout | None:
    ranges = _ranges(attrs, dims)
    if any(step < 0 for _, _, step in ranges):
        return None  # kernels need non-negative strides
    if not math.prod(out):
        return Layout(contiguous_strides(tuple(out)), layout.offset)  # no element is read; a start may be past the end
    offset = sum(start * s for (start, _, _), s in zip(ranges, layout.strides))
    return Layout(tuple(step * s for (_, _, step), s in zip(ranges, layout.strides)), layout.offset + offset)


def _slice_padded(p: PaddingPass, attrs: SliceAttrs, x: Value) -> Padded:
    """The first row always holds data; the last is at extent - 1."""
    for axis, (start, stop, step) in enumerate(zip(attrs.starts, attrs.stops, attrs.steps)):
        actives = p.along(x, axis)
        if not actives or (start, stop, step) == (0, END, 1) or max(a.outer * a.inner for a in actives) > 1:
            continue
        if (start, stop, step) == (0, 1, 1):
            return p.final(slice(x, starts=attrs.starts, stops=attrs.stops, steps=attrs.steps))
        if (start, stop, step) == (-1, END, 1):
            last = p.final(take_rows(x, p.extent - 1, count=1, axis=axis))
            starts = tuple(0 if i == axis else a for i, a in enumerate(attrs.starts))
            return slice(last, starts=starts, stops=attrs.stops, steps=attrs.steps)
    for axis, span in enumerate(zip(attrs.starts, attrs.stops, attrs.steps)):
        if span[2] < 0 and not p.along(x, axis):  # backwards, it is no view whose rows can be followed
            turned = gather(x, constant(np.arange(x.shape.static[axis])[builtin_slice(*span)]), axis=axis)
            pick = lambda own, other: (*own[:axis], other, *own[axis + 1 :])  # noqa: B023, E731
            return slice(turned, starts=pick(attrs.starts, 0), stops=pick(attrs.stops, END), steps=pick(attrs.steps, 1))
    return None


def _slice_partitioned(p: Partitioning, attrs: SliceAttrs, x: Value) -> Parted:
    """A slice of the split axis is possible at the boundaries of its parts."""
    if (split := p.split_of(x)) is None:
        return None
    start, length, step = _ranges(attrs, x.dims)[split.axis]
    ends = [0, *accumulate(split.parts)]
    if (start, length, step) == (0, x.dims[split.axis], 1):
        return None
    if step != 1 or start not in ends or start + length not in ends or not length:  # type: ignore[operator]
        return f"it cuts through axis {split.axis} of {x.shape}"
    low, high = ends.index(start), ends.index(start + length)  # type: ignore[operator]
    pick = lambda own, other: (*own[: split.axis], other // p.ranks, *own[split.axis + 1 :])  # noqa: E731
    starts, stops = pick(attrs.starts, start), pick(attrs.stops, start + length)  # type: ignore[operator]
    part = slice(p.at(x, split), starts=starts, stops=stops, steps=attrs.steps)
    return [(part, replace(split, parts=split.parts[low:high]))]


def _slice_parts(node: Applied[SliceAttrs], x: Value) -> Value:
    a = node.attrs
    return again(node, x, starts=(*a.starts, 0), stops=(*a.stops, END), steps=(*a.steps, 1))


builtin_slice = slice
slice = op(
    "slice", kind=Kind.VIEW, attrs=SliceAttrs, dtypes=ANY,
    reference=lambda a, x: x[tuple(map(builtin_slice, a.starts, a.stops, a.steps))],
    infer=lambda a, x: x.with_dims(length for _, length, _ in _ranges(a, x.dims)),
    element=_slice_element, strided=_slice_strided, parts=_slice_parts, padded=_slice_padded, partitioned=_slice_partitioned,
    permuted=lambda a, axes, x: {n: tuple(getattr(a, n)[i] for i in axes) for n in ("starts", "stops", "steps")},
    samples=(
        Sample(((5, 17),), {"starts": (1, 0), "stops": (4, END)}),
        Sample(((5, 17),), {"starts": (0, 3), "stops": (5, -2), "steps": (2, 3)}),
        Sample(((6, 3),), {"starts": (5, 0), "stops": (-7, 3), "steps": (-1, 1)}),
        Sample(((3, 33),), {"starts": (-1, 1), "stops": (END, 99)}), Sample(((4,),), {"starts": (2,), "stops": (2,)}),
    ),
    doc="Slices every dim: start, stop and step as in Python's slices, negative values counted from the end.",
)  # fmt: skip


# -- compositions --------------------------------------------------------------------------------------------------


class SplitAttrs(Attrs):
    """`parts`: a number of equal parts, or the size of each."""

    parts: int | tuple[int, ...]
    axis: int = 0


def _part_sizes(attrs: SplitAttrs, dims: Sequence[DimLike]) -> tuple[int, tuple[DimLike, ...]]:
    axis = axis_of(attrs.axis, len(dims))
    dim = dims[axis]
    if isinstance(attrs.parts, int):
        size = divide(dim, attrs.parts) if attrs.parts > 0 else None
        if size is None:
            raise ShapeError(f"a dim of {dim} cannot be split into {attrs.parts} equal parts")
        return axis, (size,) * attrs.parts
    if not attrs.parts or min(attrs.parts) < 0 or sum(attrs.parts) != static_dim(dim, "a split by sizes"):
        raise ShapeError(f"parts {attrs.parts} do not add up to the dim of {dim}")
    return axis, attrs.parts


def _split_shapes(attrs: SplitAttrs, x: Shape) -> tuple[Shape, ...]:
    axis, sizes = _part_sizes(attrs, x.dims)
    return tuple(x.with_dims((*x.dims[:axis], size, *x.dims[axis + 1 :])) for size in sizes)


def _split(attrs: SplitAttrs, x: Value) -> tuple[Value, ...]:
    axis, sizes = _part_sizes(attrs, x.shape.static)
    bounds = [sum(sizes[:i]) for i in range(len(sizes) + 1)]  # type: ignore[arg-type]
    return tuple(slice_axis(x, axis, low, high) for low, high in zip(bounds, bounds[1:]))


def slice_axis(x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
    """Slices one axis only."""
    axis = axis_of(axis, x.rank)
    pick = lambda here, other: tuple(here if i == axis else other for i in range(x.rank))  # noqa: E731
    return slice(x, starts=pick(start, 0), stops=pick(stop, END), steps=pick(step, 1))


def _split_arrays(attrs: SplitAttrs, x: np.ndarray) -> tuple[np.ndarray, ...]:
    axis, sizes = _part_sizes(attrs, x.shape)
    return tuple(np.split(x, np.cumsum(np.array(sizes))[:-1], axis=axis))


split = op(
    "split", kind=Kind.COMPOSITE, infer=_split_shapes, attrs=SplitAttrs, dtypes=ANY, reference=_split_arrays, decompose=_split,
    samples=(
        Sample(((6, 5),), {"parts": 3}), Sample(((2, 17),), {"parts": (5, 1, 11), "axis": -1}),
        Sample(((4, 2),), {"parts": (0, 4)}), Sample(((3,),), {"parts": 1}),
    ),
    doc="Splits along `axis` into consecutive parts: `parts` equal ones, or parts of the given sizes.",
)  # fmt: skip


class AxesAttrs(Attrs):
    axes: tuple[int, ...]


def _squeezed(attrs: AxesAttrs, x: Shape) -> Shape:
    axes = {axis_of(a, x.rank) for a in attrs.axes}
    if wrong := [a for a in sorted(axes) if x.dims[a] != 1]:
        raise ShapeError(f"dim {wrong[0]} is {x.dims[wrong[0]]}, not 1")
    return x.with_dims(d for i, d in enumerate(x.dims) if i not in axes)


def _unsqueezed(attrs: AxesAttrs, x: Shape) -> Shape:
    rank = x.rank + len(attrs.axes)
    axes = {axis_of(a, rank) for a in attrs.axes}
    if len(axes) != len(attrs.axes):
        raise AttributeValueError(f"axes {attrs.axes} name one dim twice")
    rest = iter(x.dims)
    return x.with_dims(1 if i in axes else next(rest) for i in range(rank))


squeeze = op(
    "squeeze", kind=Kind.COMPOSITE, infer=_squeezed, attrs=AxesAttrs, dtypes=ANY,
    reference=lambda a, x: np.squeeze(x, a.axes), decompose=lambda a, x: reshape(x, dims=_squeezed(a, x.shape).dims),
    samples=(Sample(((3, 1, 5),), {"axes": (1,)}), Sample(((1, 17, 1),), {"axes": (0, -1)})),
    doc="Removes the dims `axes`, which must be of size 1.",
)  # fmt: skip
unsqueeze = op(
    "unsqueeze", kind=Kind.COMPOSITE, infer=_unsqueezed, attrs=AxesAttrs, dtypes=ANY,
    reference=lambda a, x: np.expand_dims(x, a.axes), decompose=lambda a, x: reshape(x, dims=_unsqueezed(a, x.shape).dims),
    samples=(Sample(((3, 5),), {"axes": (1,)}), Sample(((17,),), {"axes": (0, -1)}), Sample(((),), {"axes": (0,)})),
    doc="Inserts dims of size 1 at `axes` of the result.",
)  # fmt: skip
