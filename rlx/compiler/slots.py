"""Arena offsets of the values of a user's graph, computed on request: passes do not record which node became which.

The graph is lowered again with a tag as the name of each node. Passes keep names, and names change nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.compiler.options import CompileOptions
from rlx.ir.graph import CONSTANT, Graph, Node, Value
from rlx.ir.target import Target


def slots(graph: Graph, target: Target, options: CompileOptions) -> dict[Value, int]:
    """Byte offset of each value of `graph` that a run stores in the arena: row-major, in the dtype in which it is computed.
    Values that are fused, folded or merged with others, params and states have none."""
    from rlx.compiler.assemble import assembled

    tagged: dict[str, Node] = {}

    def tag(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if node.op is CONSTANT:
            return node.results
        tagged[name := f"@{len(tagged)}"] = node
        return Node(node.op, inputs, node.attrs, node.shapes, name, node.source).results

    program, facts, ids = assembled(graph.rebuild(tag), target, replace(options, dump=None, verbose=False))
    bound = options.binding
    offsets: dict[Value, int] = {}

    def find(own: Value, made: Value) -> None:
        """`own` became `made`."""
        if facts.places.base(made) not in ids or made in facts.places.tiles:
            return
        base, layout = facts.places.locate(made)
        start = program.plan.offsets.get(ids[base])
        if start is not None and layout.strides == row_major(made.shape.static):
            offsets[own] = start + layout.offset * made.dtype.itemsize

    for node in facts.graph.nodes():
        for own, made in zip(tagged[node.name].results, node.results) if node.name in tagged else ():
            if own.shape.bind(bound).static == made.shape.static:
                find(own, made)
    offsets |= {own: program.plan.offsets[id] for own, id in zip(graph.inputs, program.inputs)}
    return offsets | {own: program.plan.offsets[o.buffer] for own, o in zip(graph.outputs, program.outputs)}


def row_major(dims: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for n in reversed(dims[1:]):
        strides.append(strides[-1] * n)
    return tuple(reversed(strides[: len(dims)]))
