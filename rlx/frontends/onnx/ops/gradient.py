"""Gradient, of a value by the leaves that it is computed from: reverse mode over the arithmetic of the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.node import Value

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
    y = scope[n.attr("y")]
    leaves = set(wanted)
    found = {y: functions.ones_like(y)}
    for value in reversed(_between(y, leaves)):
        if value in leaves or value not in found:
            continue
        node = value.node
        if (rule := _RULES.get(node.op.name)) is None:
            n.refuse(f"the derivative of {node.op.name} is not supported; {', '.join(_RULES)} are")
        for x, g in zip(node.inputs, rule(found[value], *node.inputs), strict=True):
            g = _summed(g, x)
            found[x] = found[x] + g if x in found else g
    return tuple(found.get(x, functions.zeros_like(x)) for x in wanted)


def _between(y: Value, leaves: set[Value]) -> list[Value]:
    """The values from `leaves` to y, operands before results."""
    order: list[Value] = []
    done, todo = set[Value](), [(y, False)]
    while todo:
        value, ready = todo.pop()
        if ready:
            order.append(value)
        elif value not in done:
            done.add(value)
            todo.append((value, True))
            todo += [] if value in leaves else [(x, False) for x in value.node.inputs]
    needed = set(leaves)
    for value in order:
        if not needed.isdisjoint(value.node.inputs):
            needed.add(value)
    return [v for v in order if v in needed]


def _summed(g: Value, x: Value) -> Value:
    """The gradient of an operand that was broadcast."""
    if g.dims == x.dims:
        return g
    g = ops.sum(g, axis=tuple(range(g.rank - x.rank))) if g.rank > x.rank else g
    axes = tuple(i for i, (a, b) in enumerate(zip(g.dims, x.dims)) if a != b)
    return ops.sum(g, axis=axes, keepdims=True) if axes else g
