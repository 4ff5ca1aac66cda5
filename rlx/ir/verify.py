"""The graph verifier: structural rules, checked in every build. `faults` lists all violations, `verify` raises them.

It runs after every pass, so it must be cheap: one walk, one shape inference per node.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from rlx.errors import VerifyError
from rlx.ir.body import Body
from rlx.ir.building import Building, postorder, same_values
from rlx.ir.dtype import i64
from rlx.ir.node import CONSTANT, HANDLE, INPUT, PARAM, ConstantAttrs, Node, Value
from rlx.ir.op import OPS, Attrs, Kind, OpDef
from rlx.ir.shape import Shape
from rlx.ir.updates import update_faults


def verify(graph: Building) -> None:
    """Raise VerifyError with every fault of the graph."""
    if found := faults(graph):
        count = f"{len(found)} faults" if len(found) > 1 else "a fault"
        raise VerifyError(f"graph {graph.name!r} has {count}:\n  " + "\n  ".join(found))


class Sound:
    """Facts that one check leaves to the next: sound nodes, which are immutable; the leaves, roots, assignments and updates of a
    sound graph, with its nodes in order; for an op with these attributes (by id) and operands of these shapes the attributes,
    found to be sound, and the inferred shapes; and the same by ids alone, of sound nodes, which keep the objects: most nodes are
    copies of others with new operands of the same shapes."""

    def __init__(self) -> None:
        self.graph: tuple[list[tuple[Value | None, ...]], list[Node]] = [], []
        self.nodes: set[Node] = set()
        self.alike: set[tuple[OpDef | int, ...]] = set()
        self.inferred: dict[tuple[OpDef, int, tuple[Shape, ...]], tuple[Attrs | None, tuple[Shape, ...]]] = {}


def faults(graph: Building, sound: Sound | None = None) -> list[str]:
    """Every violated rule, one sentence each; empty for a sound graph. `sound`: of earlier checks, to be added to."""
    sound = sound or Sound()
    pairs, updates = chain.from_iterable(graph.assigns), chain.from_iterable(graph.updates)
    ends = [tuple(found) for found in (graph.inputs, graph.params, graph.handles, graph.roots(), pairs, updates)]
    if len(sound.graph[0]) == len(ends) and all(map(same_values, sound.graph[0], ends)):  # a pass that changed nothing
        graph.remember(sound.graph[1])
        return [*_result_faults(graph)] or [*_extent_faults(graph)]
    out = [*_leaf_faults(graph), *_result_faults(graph)]
    nodes, cycle = postorder([*graph.leaves(), *graph.roots()])
    if cycle is not None:
        out.append(f"{where(cycle)} depends on its own result")
    declared = {v.node for v in graph.leaves() if isinstance(v, Value)}
    for node in nodes:
        if node not in sound.nodes or (node.op.kind is Kind.LEAF and node.op is not CONSTANT and node not in declared):
            ids = (node.op, id(node.attrs), id(node.shapes), *[id(getattr(v, "shape", None)) for v in node.inputs])
            alike = node.inputs and ids in sound.alike
            found = [] if alike else [f"{where(node)}: {fault}" for fault in _node_faults(node, declared, sound)]
            out += found
            if not found:
                sound.nodes.add(node)
                sound.alike.add(ids)
    if not out:
        graph.remember(nodes)
        sound.graph = ends, nodes
    return out or [*update_faults(graph), *_extent_faults(graph)]


def where(node: Node) -> str:
    """The node, its op and operand shapes, and the user's line if known, for messages."""
    operands = ", ".join(str(v.shape) if _in_range(v) else repr(v) for v in node.inputs)
    label = f"{node.name!r} = " if node.name else ""
    return f"{label}{node.op.name}({operands})" + (f" made at {node.source}" if node.source else "")


def _in_range(v: Any) -> bool:
    return isinstance(v, Value) and 0 <= v.index < len(v.node.shapes)


def _leaf_faults(graph: Building) -> Iterator[str]:
    names: dict[Any, str] = {}
    for op, group in ((INPUT, graph.inputs), (PARAM, graph.params), (HANDLE, graph.handles)):
        for leaf in group:
            if not isinstance(leaf, Value) or leaf.node.op is not op or leaf.index != 0:
                yield f"{leaf!r} is listed with the {op.name}s but is not one"
                continue
            if not isinstance(leaf.name, str) or not leaf.name:
                yield f"an {op.name}'s name must be a non-empty string, found {leaf.name!r}"
            elif leaf.name in names:
                yield f"{names[leaf.name]} and {op.name} have the same name {leaf.name!r}"
            names.setdefault(leaf.name, op.name)


def _result_faults(graph: Building) -> Iterator[str]:
    if not graph.outputs and not graph.assigns:
        yield "no outputs and no assigned handle, so a run would do nothing: call set_outputs"
    if len(graph.outputs) != len(graph.output_names):
        yield f"{len(graph.outputs)} outputs have {len(graph.output_names)} names"
    names: set[object] = set()
    for i, name in enumerate(graph.output_names):
        if not isinstance(name, str) or not name:
            yield f"output {i}'s name must be a non-empty string, found {name!r}"
        if isinstance(name, str) and name in names:
            yield f"two outputs have the name {name!r}"
        names |= {name} if isinstance(name, str) else set()
    for i, out in enumerate(graph.outputs):
        if not _in_range(out):
            yield f"output {i} is not the result of a node: {out!r}"
    seen, handles = set[Value](), set(graph.handles)
    for handle, value in graph.assigns:
        if handle not in handles:
            yield f"assign to {handle!r}, which is not a declared handle"
        elif not _in_range(value):
            yield f"handle {handle.name!r} is assigned {value!r}, which is not the result of a node"
        elif value.shape != handle.shape:
            yield f"handle {handle.name!r} is {handle.shape}, its next value is {value.shape}"
        if handle in seen:
            yield f"handle {handle.name!r} is assigned twice"
        seen.add(handle)


def _extent_faults(graph: Building) -> Iterator[str]:
    """Broken rules of the active extent of a graph whose leaves and outputs are sound."""
    if (extent := graph.extent) is None:
        return
    if extent.leaf not in set(graph.inputs) or extent.leaf.shape != Shape((), i64):
        yield f"the extent {extent.leaf!r} is not an input i64[] of the graph"
    for value, axes in extent.axes.items():
        if not isinstance(axes, tuple) or not all(type(a) is int and 0 <= a < value.rank for a in axes):
            yield f"{value!r} has no axes {axes!r} to be active"
    for value, actives in (*extent.inputs.items(), *zip(graph.outputs, extent.outputs)):
        for a in actives:
            whole = all(type(n) is int and n >= 0 for n in a) and a.axis < value.rank
            if not whole or value.dims[a.axis] != a.outer * a.upper * a.inner:
                yield f"{value!r} has no active axis {tuple(a)}: (axis, outer, upper, inner), whose product is the dim"


def _body_faults(body: Body, sound: Sound) -> Iterator[str]:
    """Broken rules of a sub-graph."""
    label = f"sub-graph {body.name!r}"
    if wrong := [v for v in (*body.inputs, *body.outputs) if not _in_range(v)]:
        yield f"{label}: {wrong[0]!r} is not the result of a node"
        return
    nodes, cycle = postorder([*body.inputs, *body.outputs])
    if cycle is not None:
        yield f"{label}: {where(cycle)} depends on its own result"
        return
    declared = {v.node for v in body.inputs}
    yield from (f"{label}: {v!r} is listed with the inputs but is not one" for v in body.inputs if v.node.op is not INPUT)
    if len({v.name for v in body.inputs}) < len(body.inputs):
        yield f"{label}: two inputs have the same name"
    for node in nodes:
        if node.op.collective is not None or node.op.observed:
            yield f"{label}: {where(node)} cannot be in a sub-graph, which may run any number of times"
        yield from (f"{label}: {where(node)}: {fault}" for fault in _node_faults(node, declared, sound))


def _node_faults(node: Node, declared: set[Node], sound: Sound) -> Iterator[str]:
    op = node.op
    if OPS.get(op.name) is not op:
        yield "its op is not the op table's entry of that name"
        return
    if op.kind is Kind.LEAF and op is not CONSTANT and node not in declared:
        alike = any(other.op is op and other.name == node.name for other in declared)
        yield f"used, but the graph does not declare {op.name} {node.name!r}" + (
            f": it belongs to another graph that has {'an' if op is INPUT else 'a'} {op.name} of this name" if alike else ""
        )
    broken = [i for i, v in enumerate(node.inputs) if not _in_range(v)]
    for i in broken:
        yield f"operand {i} is not the result of a node: {node.inputs[i]!r}"
    shapes = () if broken else tuple([v.shape for v in node.inputs])
    key = op, id(node.attrs), shapes  # the value holds the attributes, so that no others get their id
    if not broken and key in sound.inferred and sound.inferred[key][1] == node.shapes:
        return
    wrong = op.attribute_faults(node.attrs)
    if isinstance(node.attrs, ConstantAttrs) and not wrong and not node.attrs.is_frozen:
        wrong = ["a constant's data is a read-only C-contiguous array"]
    if op.kind is Kind.CONTROL and not wrong:
        wrong = [fault for body in vars(node.attrs).values() if isinstance(body, Body) for fault in _body_faults(body, sound)]
    yield from wrong
    if broken or wrong:
        return
    try:
        inferred = op.result_shapes(node.attrs, shapes)
    except Exception as e:  # noqa: BLE001  a shape rule may raise anything for a broken node: the verifier reports it
        yield f"its shape rule fails: {e or type(e).__name__}"
        return
    sound.inferred[key] = node.attrs, inferred
    if inferred != node.shapes:
        yield f"is {', '.join(map(str, node.shapes))}, its shape rule gives {', '.join(map(str, inferred))}"
