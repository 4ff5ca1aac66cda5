"""One compile: its target and options, and the facts about nodes that several passes ask for, each found once.

A fact depends on the node and its operands alone. Nodes are immutable, and passes keep those that do not change, so a fact stays
true until lowering and the reports.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import field

from rlx.compiler.options import CompileOptions
from rlx.errors import known
from rlx.ir.graph import CONSTANT, PARAM, Node, Value
from rlx.ir.op import Kind
from rlx.ir.target import Target
from rlx.records import record

# (op, attributes, operands) -> values in place of the operands, and the results computed of them (rlx.compiler.legalise.expand)
Decompositions = dict[Hashable, tuple[tuple[Value, ...], Value | tuple[Value, ...]]]


@record(eq=False)
class Compilation:
    """Handed to every pass, then (in Facts) to fusion, lowering and the reports. It keeps answers, and changes none."""

    target: Target
    options: CompileOptions
    nested: bool = False  # of a sub-graph: its states are values that a loop carries, and nothing restores them
    decompositions: Decompositions = field(default_factory=dict, init=False, repr=False)
    _decisions: dict[Node, tuple[str, str]] = field(default_factory=dict, init=False, repr=False)
    _static: dict[Node, bool] = field(default_factory=dict, init=False, repr=False)

    def decide(self, node: Node) -> tuple[str, str]:
        """(how, why) of one node: "native", "kept" (core), "decomposed", or "refused". The target is asked once about a node."""
        if (found := self._decisions.get(node)) is None:
            found = self._decisions[node] = _decide(node, self.target, "control" not in self.options.disable)
        return found

    def is_native(self, node: Node) -> bool:
        """True if the backend has its own kernel for the node."""
        return node.op.name in self.target.natives and self.decide(node)[0] == "native"

    def is_static(self, node: Node) -> bool:
        """True if the node depends only on params and constants: computed when params are set, not at every run."""
        todo = [] if node in self._static else [node]
        while todo:  # no recursion: chains may be long
            operands = [v.node for v in todo[-1].inputs]
            if missing := [n for n in operands if n not in self._static]:
                todo += missing
            else:
                made = todo.pop()
                self._static[made] = made.op in (PARAM, CONSTANT) or (made.op.ahead and all(self._static[n] for n in operands))
        return self._static[node]


def _decide(node: Node, target: Target, control: bool) -> tuple[str, str]:
    """`control`: control flow may stay."""
    control = control and target.control
    for shape in (*[v.shape for v in node.inputs], *node.shapes):
        if shape.dtype.name not in target.dtypes:
            return "refused", f"no {shape.dtype.name} on this target; it has {known(target.dtypes)}"
    claim = target.natives.get(node.op.name)
    reason = claim(node) if claim is not None else ""
    if reason is None:
        return "native", ""
    if node.op.kind is Kind.CONTROL and (getattr(node.attrs, "plain", False) or not control):
        why = getattr(node.attrs, "why_not_unrolled", "")
        return "refused" if why else "decomposed", why
    if node.op.kind is not Kind.COMPOSITE:
        return "kept", reason
    if node.op.decompose is None:
        return "refused", reason or "it is neither native there nor made of smaller ops"
    return "decomposed", reason


__all__ = ["Compilation"]
