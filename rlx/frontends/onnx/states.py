"""Past and present keys and values of a decoder, by their names: they become states, which stay on the device between runs.

A state holds the last rows of its past. Rows that are not filled stand first, and the attention mask hides them. The states of
GroupQueryAttention are written in place, from their first row on; that operator counts them by the attention mask.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.errors import GraphError
from rlx.frontends.onnx.proto import Source
from rlx.ir.graph import CONSTANT, Graph
from rlx.ir.node import Value
from rlx.ir.shape import Shape

MASK = "attention_mask"  # the input that hides rows of the past
MORE = 1009  # rows, to see the values that depend on their number: dims do not become others of the model by them
_NAMES = (("past_key_values", "present"), ("past", "present"), ("past_key_values", "present_key_values"))


def pairs(source: Source) -> dict[str, str]:
    """The input of each past, and the output of its present: past_key_values.0.key and present.0.key, or past_0 and present_0."""
    outputs = {o.name for o in source.model.graph.output}
    made = ((i.name, i.name.replace(past, present)) for i in source.inputs for past, present in _NAMES if past in i.name)
    return {name: present for name, present in made if present in outputs}


def in_place(source: Source, states: Mapping[str, str]) -> bool:
    """True if GroupQueryAttention reads these states."""
    nodes = (node for node in source.model.graph.node if node.op_type == "GroupQueryAttention")
    return any(name in states for node in nodes for name in node.input)


def following(name: str, past: Value, present: Value, added: Mapping[Value, int]) -> tuple[Value, int]:
    """The next state, and the rows that a run adds: the present, or its last rows if it is longer than the past. `added`: rows
    that were written in place."""
    longer = [a for a, (p, q) in enumerate(zip(past.dims, present.dims)) if p != q]
    if past.rank != present.rank or past.dtype != present.dtype or len(longer) > 1:
        raise GraphError(f"the present of {name!r} is {present.shape}, which is no longer form of the past {past.shape}")
    if not longer:
        return present, added.get(present, 0)
    was, now = past.shape.static[longer[0]], present.shape.static[longer[0]]
    if now < was:
        raise GraphError(f"the present of {name!r} is {present.shape}, shorter than the past {past.shape}")
    return present[(slice(None),) * longer[0] + (slice(now - was, now),)], now - was


def differing(graph: Graph, longer: Graph) -> Shape | None:
    """Of constants that are others if the states have room for more rows, and have the same dims: positions behind those rows,
    which are wrong where not all are filled. None: there are none."""
    mine, theirs = ({(n.shapes[0], n.attrs.data.tobytes()) for n in g.nodes() if n.op is CONSTANT} for g in (graph, longer))  # type: ignore[union-attr]
    alike = {shape for shape, _ in theirs - mine}
    return next((shape for shape, _ in mine - theirs if shape in alike), None)


__all__ = ["MASK", "MORE", "differing", "following", "in_place", "pairs"]
