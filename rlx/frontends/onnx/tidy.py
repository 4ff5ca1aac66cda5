"""The graph of a model as rlx's own networks are written, so that it becomes the same kernels.

Exporters write the projections of queries, keys and values as three products of one operand: they become one product, and their
weights one param. A bias stands in front of or behind the product, by exporter: it goes behind. Positions that are computed
become constants.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.ir import ops
from rlx.ir.evaluate import evaluate_node
from rlx.ir.graph import CONSTANT, PARAM, Graph, keep
from rlx.ir.node import Node, Value, constant
from rlx.ir.op import OPS

SMALL = 1 << 16  # bytes of a constant that is computed here
COMMUTE = (OPS["add"], OPS["mul"])
ADD, GATHER, TRANSPOSE = OPS["add"], OPS["gather"], OPS["transpose"]
COLUMNS = {OPS["matmul"]: 1, OPS["dequant_matmul"]: 0}  # products with weights, and the axis of weights that becomes columns


def tidied(graph: Graph, made: dict[str, np.ndarray]) -> Graph:
    """The same graph, up to the order of operands of sums and products, and with joined products. `made`: weights in other
    layouts, kept between imports."""
    ahead: dict[Value, bool] = {}

    def known(value: Value) -> bool:
        """True if a value depends on params and constants alone."""
        if value not in ahead:
            node = value.node
            ahead[value] = node.op in (CONSTANT, PARAM) or (node.op.ahead and all(map(known, node.inputs)))
        return ahead[value]

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        if (made := _folded(node, inputs)) is not None:
            return (made,)
        if node.op is GATHER and (made := _in_order(node, *inputs)) is not None:
            return (made,)
        if node.op in COMMUTE and known(inputs[0]) and not known(inputs[1]):
            inputs = inputs[::-1]
        return keep(node, inputs)

    return _joined(graph.rebuild(new), known, made)


def _folded(node: Node, inputs: tuple[Value, ...]) -> Value | None:
    """A node on constants, and on iota, which is none by itself."""
    shape = node.shapes[0]
    if not inputs or len(node.shapes) > 1 or not node.op.ahead or not shape.is_static or shape.size_bytes > SMALL:
        return None
    data = []
    for x in inputs:
        alone = not x.node.inputs and x.node.op.ahead and x.shape.is_static and x.shape.size_bytes <= SMALL
        if x.node.op is not CONSTANT and not alone:
            return None
        data.append(evaluate_node(x.node, ())[0])
    with np.errstate(all="ignore"):
        return constant(evaluate_node(node, tuple(data))[0])


def _in_order(node: Node, x: Value, at: Value) -> Value | None:
    """A gather of every position in order, as exporters write masks with indices, is the operand with other dims."""
    if at.node.op is not CONSTANT or not x.shape.is_static:
        return None
    found, size = at.node.attrs.data, x.shape.static[node.attrs.axis % x.rank]  # type: ignore[union-attr]
    return x.reshape(node.shapes[0].dims) if found.size == size and (found.reshape(-1) == np.arange(size)).all() else None


def _joined(graph: Graph, known: Callable[[Value], bool], made: dict[str, np.ndarray]) -> Graph:
    """Products of one operand with several matrices of weights, packed ones too, as one product; with a bias of zeros for those
    that have none, if another has one."""
    users: dict[Value, list[Node]] = {}
    for node in graph.nodes():
        for v in dict.fromkeys(node.inputs):
            users.setdefault(v, []).append(node)
    read = set(graph.roots())
    replaced: dict[Value, Value] = {}
    for x, found in list(users.items()):
        parts = [n for n in found if n.op in COLUMNS and n.inputs[0] is x and _is_weight(n.inputs[1], known)]
        parts = [n for n in parts if _inside(n) == _inside(parts[0]) and n.results[0] not in read]
        if len(parts) < 2 or len({n.inputs[1] for n in parts}) < len(parts):
            continue
        biased, axis = [_biased(n, users, known) for n in parts], COLUMNS[parts[0].op]
        sizes = [n.inputs[1].shape.static[axis] for n in parts]
        (joint,) = keep(parts[0], (x, _beside(graph, made, [n.inputs[1] for n in parts], axis)))
        if any(biased):
            none = [constant(np.zeros(size, joint.dtype.numpy)) for size in sizes]
            joint = joint + ops.concat(*(b.inputs[1] if b else zero for b, zero in zip(biased, none)), axis=0)
        for part, bias, piece in zip(parts, biased, ops.split(joint, parts=tuple(sizes), axis=-1)):
            replaced[(bias or part).results[0]] = piece
    if not replaced:
        return graph
    return _replaced(graph, replaced)


def _beside(graph: Graph, made: dict[str, np.ndarray], weights: Sequence[Value], axis: int) -> Value:
    """Weights beside each other along the axis: of params, or of their transposes, a param, so that they are not stored apart."""
    turned = weights[0].node.op is TRANSPOSE
    leaves = [w.node.inputs[0] if turned and w.node.op is TRANSPOSE else w for w in weights]
    if any(v.node.op is not PARAM or (v is w) == turned for v, w in zip(leaves, weights)):
        return ops.concat(*weights, axis=axis)
    names = [str(v.name) for v in leaves]
    arrays, name = [graph.weights[n] for n in names], "+".join(names)
    if all(made.get(n) is a for n, a in zip(names, arrays)):  # parts of the whole, from now on
        whole = made[name] = made[name] if name in made else np.concatenate(arrays)
        made.update(zip(names, np.split(whole, np.cumsum([len(a) for a in arrays])[:-1])))
    else:
        whole = np.concatenate(arrays, axis=int(axis != turned))
    while name in graph.weights:
        name += "'"
    graph.weights[name] = whole
    joint = graph.param(name, whole.shape, leaves[0].dtype)
    return joint.T if turned else joint


def _inside(node: Node) -> tuple[Any, ...]:
    """The facts in which products that are joined agree."""
    return node.op, node.attrs, node.inputs[1].dims[1 - COLUMNS[node.op]]


def _is_weight(w: Value, known: Callable[[Value], bool]) -> bool:
    return w.rank == 2 and w.shape.is_static and w.node.op is not CONSTANT and known(w)


def _biased(node: Node, users: dict[Value, list[Node]], known: Callable[[Value], bool]) -> Node | None:
    """The sum of a product and a bias per column, if nothing else reads the product."""
    found = users.get(node.results[0], [])
    if len(found) != 1 or found[0].op is not ADD or found[0].inputs[0] is not node.results[0]:
        return None
    bias = found[0].inputs[1]
    return found[0] if bias.dims == node.shapes[0].dims[-1:] and known(bias) else None


def _replaced(graph: Graph, made: dict[Value, Value]) -> Graph:
    """`graph` with other values in place of some, which are computed from values of the graph."""
    done: dict[Value, Value] = {}

    def of(value: Value) -> Value:
        todo = [value]
        while todo:
            v = todo[-1]
            goal = made.get(v, v)
            if v in done:
                todo.pop()
            elif missing := [i for i in goal.node.inputs if i not in done]:
                todo += missing
            else:
                new = keep(goal.node, tuple(done[i] for i in goal.node.inputs))
                done[v] = new[goal.index]
                if goal is v:
                    done.update(zip(v.node.results, new))
        return done[value]

    out = graph.copy()
    out.outputs = [of(v) for v in graph.outputs]
    out.assigns = [(h, of(v)) for h, v in graph.assigns]
    return out


__all__ = ["tidied"]
