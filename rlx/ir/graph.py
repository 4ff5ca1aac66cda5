"""Graphs: named tensor programs. The names of rlx/ir/node.py and rlx/ir/building.py can be imported from here too."""

from __future__ import annotations

from rlx.ir.building import EXTENT, Active, Building, Extent, NewNode, between, bound, keep, postorder
from rlx.ir.node import CONSTANT, HANDLE, INPUT, PARAM, ConstantAttrs, LeafAttrs, Node, Value, apply, constant, same_values
from rlx.ir.shown import Shown, counted, some
from rlx.ir.text import fingerprint, parse_into, print_graph
from rlx.ir.verify import verify


class Graph(Shown, Building):
    """A named tensor program: leaves in declaration order, outputs, and the next value of each assigned handle.

    Ops can be written as operators on Values, as functions (`rlx.gelu(x)`), or as methods (`g.gelu(x)`).
    """

    def verify(self) -> None:
        """Raise VerifyError listing every structural fault."""
        verify(self)

    def fingerprint(self) -> str:
        """sha256 of the text form with node names and source lines left out: equal across processes and machines."""
        return fingerprint(self)

    def __str__(self) -> str:
        return print_graph(self)

    def _line(self) -> str:
        outputs = some(f"{name} {v.shape}" for name, v in zip(self.output_names, self.outputs))
        counts = (counted(len(found), label) for found, label in ((self.params, "param"), (self.handles, "handle")) if found)
        return "; ".join([f"{self.name!r}: {some(f'{v.name} {v.shape}' for v in self.inputs)} -> {outputs}", *counts])

    @staticmethod
    def parse(text: str) -> Graph:
        """The graph that `str` printed."""
        return parse_into(Graph, text)


def parse_graph(text: str) -> Graph:
    """The graph that `print_graph` printed. ParseError, naming the line, for any other text."""
    return Graph.parse(text)


__all__ = [
    "CONSTANT", "EXTENT", "HANDLE", "INPUT", "PARAM", "Active", "Building", "ConstantAttrs", "Extent", "Graph", "LeafAttrs",
    "NewNode", "Node", "Value", "apply", "between", "bound", "constant", "keep", "parse_graph", "postorder", "same_values",
]  # fmt: skip
