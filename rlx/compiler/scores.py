"""Attention that a model writes as two products around a softmax, as the op `attention`, where the target has a kernel for it.

softmax(q @ kᵀ * scale + bias) @ v then keeps its scores out of memory. The result is the same up to rounding, apart from rows in
which the bias leaves no key: these are zeros, as in the op, where a softmax alone gives NaN. Exporters of models replace such NaN
by zeros themselves, which is recognised too. A bias that is 0 or, by a mask, -inf or so low that no score shows beside it, is the
mask itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlx.compiler.compilation import Compilation
from rlx.errors import GraphError
from rlx.ir import ops
from rlx.ir.graph import CONSTANT, Graph, Node, Value, apply, keep
from rlx.ir.op import OPS
from rlx.ir.ops.rules import axis_of
from rlx.ir.ops.view import transposed_axes
from rlx.ir.rewrite import Pattern, Var, match, pattern

A, B, C = Var("a"), Var("b"), Var("c")
LOW = -1e30  # a bias below it hides its key
MATMUL, SOFTMAX, RESHAPE = OPS["matmul"], OPS["softmax"], OPS["reshape"]
GUARDED = pattern(ops.where, pattern(ops.is_nan, A), 0.0, A)
MASKED = pattern(ops.where, A, 0.0, B)
PRODUCT, QUOTIENT, SUM = pattern(ops.mul, A, B), pattern(ops.div, A, B), pattern(ops.add, A, B)


def scores(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with such products as attention, where the target claims it."""
    if graph.extent is not None or not any(node.op is SOFTMAX for node in graph.nodes()):
        return graph
    read: dict[Value, int] = {}  # how often; of the new graph's values too
    for value in (*graph.roots(), *(v for n in graph.nodes() for v in n.inputs)):
        read[value] = read.get(value, 0) + 1

    def new(node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        results = keep(node, inputs)
        made = _attention(results[0].node, read) if node.op is MATMUL else None
        if made is not None and compilation.is_native(made.node):
            results = (made.reshape(node.shapes[0].dims),)
        read.update({new: read.get(old, 0) for old, new in zip(node.results, results)})
        return results

    return graph.rebuild(new)


def _attention(node: Node, read: Mapping[Value, int]) -> Value | None:
    """A product of a softmax and values, as attention; None: it is none, or others read the scores."""
    weights, v = node.inputs
    chain = [weights]
    if (found := _matched(GUARDED, weights)) is not None:
        weights = found["a"]
    if weights.node.op is not SOFTMAX or axis_of(weights.node.attrs.axis, weights.rank) != weights.rank - 1:  # type: ignore[union-attr]
        return None
    (x,), bias = weights.node.inputs, None
    chain.append(x)
    if (found := _matched(SUM, x)) is not None:
        x, bias = (found["a"], found["b"]) if _is_product(found["a"]) else (found["b"], found["a"])
        chain.append(x)
    product, scale = _unscaled(x)
    alone = all(read[c] == 1 for c in (*chain, product)) and read[weights] == (1 if weights is chain[0] else 2)
    if not alone or product.node.op is not MATMUL:
        return None
    (q, first), (keys, second) = map(_unscaled, product.node.inputs)
    scale *= first * second
    if not scale:  # which would ask for the usual one
        return None
    k = _turned(keys) if keys.rank > 1 else keys
    groups = _unrepeated(k), _unrepeated(v)
    if groups[0] is not None and groups[1] is not None:
        k, v = groups[0], groups[1]
    ranked = [t.reshape((1, *t.dims)) if t.rank == 3 else t for t in (q, k, v)]
    usual = isinstance(depth := q.dims[-1], int) and depth > 0 and abs(scale * depth**0.5 - 1) < 1e-6
    given: dict[str, object] = {"scale": 0.0 if usual else scale, "mask": "none" if bias is None else "bias"}
    if bias is not None and (mask := _mask(bias)) is not None:
        bias, given["mask"] = mask, "custom"
    try:
        return apply(OPS["attention"], (*ranked, *(() if bias is None else (bias,))), given, name=node.name)  # type: ignore[return-value]
    except GraphError:  # operands that are broadcast, of another rank or of several dtypes
        return None


def _turned(x: Value) -> Value:
    """Matrices transposed; of those that are transposed already, perhaps with other batch dims, the operand."""
    y = x.node.inputs[0] if x.node.op is RESHAPE and x.node.inputs[0].dims[-2:] == x.dims[-2:] else x
    axes = (*range(y.rank - 2), y.rank - 1, y.rank - 2)
    if y.node.op is OPS["transpose"] and transposed_axes(y.node) == axes:
        return y.node.inputs[0].reshape((*x.dims[:-2], x.dims[-1], x.dims[-2]))
    return ops.transpose(x, axes=(*range(x.rank - 2), x.rank - 1, x.rank - 2))


def _unrepeated(x: Value) -> Value | None:
    """Heads [batch, groups, rows, size] of which x has each several times, for the queries that share them; None: it has not."""
    wide = x
    while wide.node.op is RESHAPE:
        (wide,) = wide.node.inputs
    if wide.node.op is not OPS["broadcast_to"] or wide.rank != 5 or x.rank != 4:
        return None
    batch, groups, one, rows, size = small = (1,) * (5 - wide.node.inputs[0].rank) + wide.node.inputs[0].dims
    if one != 1 or wide.dims != (*small[:2], wide.dims[2], *small[3:]) or x.dims != (batch, groups * wide.dims[2], rows, size):
        return None
    return wide.node.inputs[0].reshape((batch, groups, rows, size))


def _mask(bias: Value) -> Value | None:
    """The keys that a bias leaves, if it hides the others and does nothing else."""
    found = _matched(MASKED, bias)
    if found is None or found["b"].node.op is not CONSTANT or not (found["b"].node.attrs.data <= LOW).all():  # type: ignore[union-attr]
        return None
    mask = found["a"]
    while mask.node.op is OPS["broadcast_to"] and mask.node.inputs[0].rank == mask.rank:  # the op broadcasts it itself
        (mask,) = mask.node.inputs
    return mask if mask.rank == bias.rank else None


def _is_product(x: Value) -> bool:
    return _unscaled(x)[0].node.op is MATMUL


def _unscaled(x: Value) -> tuple[Value, float]:
    """(y, number): x is y times the number."""
    for form, power in ((PRODUCT, 1), (QUOTIENT, -1)):
        if (found := _matched(form, x)) is not None:
            y, number = found["a"], found["b"]
            if power == 1 and number.node.op is not CONSTANT:
                y, number = number, y
            if number.node.op is CONSTANT and number.shape.num_elements == 1 and y.shape == x.shape:
                factor = float(np.asarray(number.node.attrs.data).reshape(()))  # type: ignore[union-attr]
                return (y, factor**power) if factor or power == 1 else (x, 1.0)
    return x, 1.0


def _matched(form: Pattern, x: Value) -> dict[str, Value] | None:
    found: dict[str, Value] = {}
    return found if match(form, x, found) else None


__all__ = ["scores"]
