"""Scales and shifts per channel behind a convolution become part of its weights and bias, and zeros around its operand part of
its padding.

x * s with one s per channel of the result is the convolution with each channel's weights and bias times s; so is a batch norm
with known statistics. Weights and factors are params or constants: their product is computed when they are set, not in a run.
Results are rounded at other places than without this, by no more than the convolution itself rounds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.compiler.compilation import Compilation
from rlx.compiler.legalise import expand
from rlx.ir.graph import Graph, Node, Value, apply, keep
from rlx.ir.op import OPS, Kind
from rlx.ir.ops.conv import ConvAttrs
from rlx.ir.ops.index import PadAttrs
from rlx.ir.ops.rules import again

CONV, PAD = OPS["conv"], OPS["pad"]
MUL, DIV, ADD, SUB = (OPS[name] for name in ("mul", "div", "add", "sub"))


def folding(graph: Graph, compilation: Compilation) -> Graph:
    """`graph` with factors, terms and padding folded into the convolutions beside which they alone stand."""
    return graph.rebuild(_Folding(graph, compilation).new) if any(n.op is CONV for n in graph.nodes()) else graph


class _Folding:
    """Rebuilds a graph, operands before users. `alone`: convolutions with one reader."""

    def __init__(self, graph: Graph, compilation: Compilation) -> None:
        self.is_static, self.decide = compilation.is_static, compilation.decide
        self.readers: dict[Value, int] = {}
        for value in (*graph.roots(), *(v for n in graph.nodes() for v in n.inputs)):
            self.readers[value] = self.readers.get(value, 0) + 1
        self.alone: set[Value] = set()

    def new(self, node: Node, inputs: tuple[Value, ...]) -> Sequence[Value]:
        results = keep(node, inputs)
        made = self.folded(results[0].node)
        if self.readers.get(node.results[0], 1) == 1:  # those inside a composite have one
            self.alone |= {v for v in made if v.node.op is CONV}
        else:
            self.alone -= {*made}
        return made

    def folded(self, node: Node) -> Sequence[Value]:
        """The node's results, as a convolution if possible."""
        inputs = node.inputs
        if node.op is CONV and inputs[0].node.op is PAD:
            return _padded(node) or node.results
        conv = next((v for v in inputs if v in self.alone), None)
        if conv is None or len(inputs) == 1 or node.shapes != conv.node.shapes or not self.in_full(conv):
            return node.results
        if not all(v is conv or self.is_static(v.node) for v in inputs):
            return node.results
        if node.op.kind is Kind.COMPOSITE and self.decide(node)[0] == "decomposed":
            return expand(node, self.new)
        return _scaled(node, conv) or node.results

    def in_full(self, conv: Value) -> bool:
        """True if the weights are known before a run, and have the dtype in which products are summed: factors lose no digits."""
        known = all(self.is_static(v.node) for v in conv.node.inputs[1:])
        return known and conv.dtype.is_float and conv.dtype.compute == conv.node.inputs[1].dtype == conv.dtype


def _padded(node: Node) -> Sequence[Value]:
    """A convolution of an operand padded with zeros, as one with more padding; (): other axes are padded too."""
    (x,), given, own = node.inputs[0].node.inputs, node.inputs[0].node.attrs, node.attrs
    assert isinstance(given, PadAttrs) and isinstance(own, ConvAttrs)
    spatial = slice(1, -1) if own.channels_last else slice(2, None)
    around = {name: getattr(given, name)[spatial] for name in ("low", "high")}
    if given.value != 0 or sum(map(sum, around.values())) != sum(given.low + given.high):
        return ()
    total = {name: tuple(a + b for a, b in zip(own.each(name, x.rank - 2), more)) for name, more in around.items()}
    return (again(node, x, *node.inputs[1:], **total),)


def _scaled(node: Node, conv: Value) -> Sequence[Value]:
    """A product, quotient, sum or difference of a convolution and one number per channel, as a convolution; (): it is none."""
    own, left = conv.node, node.inputs[0] is conv
    last: bool = own.attrs.channels_last  # type: ignore[union-attr]
    other, axis = node.inputs[1 if left else 0], conv.rank - 1 if last else 1
    dims = (1,) * (conv.rank - other.rank) + other.shape.static
    if node.op not in (MUL, DIV, ADD, SUB) or math.prod(dims) != dims[axis] or (node.op is DIV and not left):
        return ()
    factor = apply(OPS["broadcast_to"], (other.reshape(dims[axis]),), {"dims": conv.dims[axis : axis + 1]})
    assert isinstance(factor, Value)
    x, w, *bias = own.inputs
    bias = [b.astype(conv.dtype) for b in bias]
    if node.op in (MUL, DIV):
        factor = factor if node.op is MUL else 1.0 / factor
        w, bias = w * (factor if last else factor.reshape((-1, *(1 for _ in w.dims[1:])))), [b * factor for b in bias]
    elif node.op is ADD:
        bias = [sum(bias, factor)]
    else:
        w = w if left else -w
        bias = [sum(bias, -factor) if left else sum((-b for b in bias), factor)]
    return (again(own, x, w, *bias),)


__all__ = ["folding"]
