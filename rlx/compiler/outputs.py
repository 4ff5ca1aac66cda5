"""Gives every output and next state its own row-major memory, with a copy where needed."""

from __future__ import annotations

from rlx.compiler.compilation import Compilation
from rlx.compiler.layout import Places
from rlx.compiler.pairs import FROM_PAIRS
from rlx.ir.graph import Graph, Value
from rlx.ir.op import Kind
from rlx.ir.ops import copy, view_as_complex


def outputs(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with a copy of each output and next state that is a leaf, is known before the run, or is a view of another value.
    An output that is a state updated in place is copied too: the next run changes the state."""
    places, in_place = Places(graph), {u.result for u in graph.updates}
    copies: dict[Value, Value] = {}

    def own(value: Value, is_output: bool) -> Value:
        if value.node.op is FROM_PAIRS:
            return view_as_complex(own(value.node.inputs[0], is_output))
        base = places.base(value)
        shared = base.node.op.kind is Kind.LEAF or compilation.is_static(base.node) or (is_output and base in in_place)
        if not shared and places.is_row_major(value):
            return value
        if value not in copies:
            copies[value] = copy(value)  # type: ignore[assignment]
        return copies[value]

    out = graph.copy()
    out.outputs = [own(v, True) for v in graph.outputs]
    out.assigns = [(h, own(v, False)) for h, v in graph.assigns]
    return out


__all__ = ["outputs"]
