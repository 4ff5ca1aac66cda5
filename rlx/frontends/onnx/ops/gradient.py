"""Gradient, of a value by the leaves that it is computed from: reverse mode over the arithmetic of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.node import Value, postorder

# By op: the gradients of the operands, from the operands and the gradient of the result.
_RULES: dict[str, Callable[..., tuple[Value, ...]]] = {
    "add": lambda g, x, y: (g, g),
    "sub": lambda g, x, y: (g, -g),
    "mul": lambda g, x, y: (g * y, g * x),
    "div": lambda g, x, y: (g / y, -g * x / (y * y)),
    "neg": lambda g, x: (-g,),
    "exp": lambda g, x: (g * ops.exp(x),),
    "log": lambda g, x: (g / x,),
    "tanh": lambda g, x: (g * (1.0 - ops.tanh(x) * ops.tanh(x)),),
}


@handler("Gradient", domain="ai.onnx.preview.training")
def gradient(n: Call) -> tuple[Value, ...]:
    """The derivatives of `y` by each of `xs`, at the values that these have."""
    scope: Any = n.scope
    names, count = n.attr("xs"), len(n.attr("xs"))
    wanted = n.values()[:count]
    if any(scope[name] is not x for name, x in zip(names, n.inputs)):
        n.refuse("the derivative at other values than those of the graph is not supported")
    if not isinstance(y := scope[n.attr("y")], Value):
        n.refuse("the derivative of a value that is known when the model is imported is not supported")
    nodes, needed = postorder([y])[0], set(wanted)
    for node in nodes:
        if not needed.isdisjoint(node.inputs):
            needed.update(node.results)
    needed -= set(wanted)
    found = {y: functions.ones_like(y)}
    for value in (v for node in reversed(nodes) for v in node.results if v in needed and v in found):
        node = value.node
        if (rule := _RULES.get(node.op.name)) is None:
            n.refuse(f"the derivative of {node.op.name} is not supported; {', '.join(_RULES)} are")
        for x, g in zip(node.inputs, rule(found[value], *node.inputs), strict=True):
            g = _summed(g, x)
            found[x] = found[x] + g if x in found else g
    return tuple(found.get(x, functions.zeros_like(x)) for x in wanted)


def _summed(g: Value, x: Value) -> Value:
    """The gradient of an operand that was broadcast."""
    if g.dims == x.dims:
        return g
    g = ops.sum(g, axis=tuple(range(g.rank - x.rank))) if g.rank > x.rank else g
    axes = tuple(i for i, (a, b) in enumerate(zip(g.dims, x.dims)) if a != b)
    return ops.sum(g, axis=axes, keepdims=True) if axes else g
