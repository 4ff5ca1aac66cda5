"""Left operands of contractions whose sums run over several strides, as those of convolutions do, where the target reads them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.compiler.compilation import Compilation
from rlx.compiler.layout import Places
from rlx.compiler.packing import contraction, is_matrix
from rlx.ir.graph import Graph, NewNode, Node, Value, keep
from rlx.ir.layout import one_stride
from rlx.ir.op import OPS, Kind
from rlx.ir.ops import copy, pad, reshape, transpose
from rlx.ir.ops.view import transposed_axes
from rlx.ir.target import Target

FEW_CHANNELS = 4  # of an image: its pixels are runs too short to copy
TALL = 64  # rows with a common stride, from which on a product of them is not slower than a copy and one of all rows


def levels(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with a copy in front of each contraction whose left operand has no common stride along the axes that are summed, or
    only along a few rows, as an image of which a convolution takes every other pixel; unless the target reads such operands, or
    this one (Target.levels, in_place). If it reads all of them, the order of the image's axes in memory is free: padding of an
    image with few channels last comes before the view that puts them there, or is of its rows as single runs, so that whole rows
    are copied; and sums with weights known before a run are in the order of memory."""
    nodes = graph.nodes()
    if not any(n.op is OPS["pad"] or (n.op.kind is Kind.CONTRACT and len(contraction(n).a_sum) > 1) for n in nodes):
        return graph
    if not compilation.target.levels:
        return graph.rebuild(_copied(graph, compilation.target))
    padded = graph.rebuild(_rows_padded(graph))
    return padded.rebuild(_summed_in_order(padded, compilation))


def _copied(graph: Graph, target: Target) -> NewNode:
    places, copies = Places(graph), dict[Value, Value]()

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op.kind is not Kind.CONTRACT or len(axes := (facts := contraction(node)).a_sum) < 2:
            return keep(node, inputs)
        left, rows = node.inputs[0], facts.a_rows
        layout, dims = places.locate(left)[1], left.shape.static
        apart = next(n for n in range(len(rows) + 1) if one_stride(layout, dims, rows[n:]))
        tall = not is_matrix(facts) or not apart or math.prod(dims[axis] for axis in rows[apart:]) >= TALL
        if (tall and one_stride(layout, dims, axes)) or (graph.extent is None and target.in_place(node, layout)):
            return keep(node, inputs)
        copies.setdefault(left, copy(inputs[0]))  # type: ignore[arg-type]
        return keep(node, (copies[left], *inputs[1:]))

    return new


def _rows_padded(graph: Graph) -> NewNode:
    roots, places = set(graph.roots()), Places(graph)

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op is not OPS["pad"] or node.results[0] in roots or node.shapes[0].rank < 2:
            return keep(node, inputs)
        dims, attrs, seen = node.inputs[0].shape.static, node.attrs, inputs[0].node
        if node.shapes[0].static[-1] > FEW_CHANNELS:
            return keep(node, inputs)
        if seen.op is OPS["transpose"]:
            axes = transposed_axes(seen)
            before = [axes.index(axis) for axis in range(len(dims))]
            low, high = ([sides[a] for a in before] for sides in (attrs.low, attrs.high))  # type: ignore[union-attr]
            padded = pad(seen.inputs[0], low=low, high=high, value=attrs.value)  # type: ignore[union-attr]
            return (transpose(padded, axes=axes),)  # type: ignore[return-value]
        low, high = attrs.low, attrs.high  # type: ignore[union-attr]
        if low[-1] or high[-1] or not places.is_row_major(node.inputs[0]):
            return keep(node, inputs)
        flat = reshape(inputs[0], dims=(*dims[:-2], dims[-2] * dims[-1]))  # pixels of a row are one run
        low, high = ((*sides[:-2], sides[-2] * dims[-1]) for sides in (low, high))
        padded = pad(flat, low=low, high=high, value=attrs.value)  # type: ignore[union-attr]
        return (reshape(padded, dims=node.shapes[0].dims),)  # type: ignore[return-value]

    return new


def _summed_in_order(graph: Graph, compilation: Compilation) -> NewNode:
    places = Places(graph)

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        facts = contraction(node) if node.op.kind is Kind.CONTRACT else None
        if facts is None or len(facts.a_sum) < 2 or not is_matrix(facts) or not compilation.is_static(node.inputs[1].node):
            return keep(node, inputs)
        dims, strides = node.inputs[0].shape.static, places.locate(node.inputs[0])[1].strides
        order = sorted(facts.a_sum, key=lambda axis: -strides[axis] if dims[axis] != 1 else 0)
        if [a for a in order if dims[a] != 1] == [a for a in facts.a_sum if dims[a] != 1]:
            return keep(node, inputs)
        first = len(dims) - len(order)
        assert facts.a_sum[0] == first, f"{node.op.name} sums over other axes than the last ones"
        left = transpose(inputs[0], axes=(*range(first), *order))
        right = reshape(inputs[1], dims=(*dims[first:], -1))
        right = transpose(right, axes=(*(a - first for a in order), len(order)))
        return keep(node, (left, reshape(right, dims=inputs[1].dims), *inputs[2:]))  # type: ignore[arg-type]

    return new


__all__ = ["levels"]
