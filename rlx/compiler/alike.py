"""Groups that lower to one kernel on different values, as those of a network's layers do: it is lowered once.

The description of a group has everything that lowering asks about its nodes and about the values that they read and store, with
numbers in place of the values. Groups with equal descriptions have the same kernel.
"""

from __future__ import annotations

from collections.abc import Hashable

from rlx.compiler.facts import Facts
from rlx.compiler.groups import Group
from rlx.compiler.lowering import Lowered, lower_group
from rlx.ir.graph import CONSTANT, Node, Value
from rlx.ir.kernel import Kernel
from rlx.ir.op import Kind


class Alike:
    """Lowers the groups of one graph."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._known: dict[Hashable, tuple[Kernel, tuple[int, ...]]] = {}  # description -> kernel, numbers of its arguments
        self._texts: dict[Node, str] = {}

    def lowered(self, group: Group) -> Lowered:
        """As lower_group."""
        if any(v in self._facts.fills or v.node.op.kind is Kind.COLLECTIVE for v in group.stores):
            return lower_group(group, self._facts)
        described = _Description(group, self._facts, self._texts)
        key, values = described.key(), list(described.memory)
        if (found := self._known.get(key)) is not None:
            kernel, numbers = found
            return Lowered(kernel, tuple(values[n] for n in numbers))
        made = lower_group(group, self._facts)
        assert described.memory.keys() >= set(made.args), f"the kernel {made.kernel.name} has arguments that no node of it names"
        self._known[key] = made.kernel, tuple(described.memory[v] for v in made.args)  # type: ignore[index]
        return made


class _Description:
    """`memory`: the values that have the memory which the group touches, numbered as they are met."""

    def __init__(self, group: Group, facts: Facts, texts: dict[Node, str]) -> None:
        self.group, self.facts, self.places, self._texts = group, facts, facts.places, texts
        members = [node for g in (group, *group.operands.values()) for node in g.forms]
        self.members = {node: i for i, node in enumerate(members)}
        self.memory: dict[Value, int] = {}
        self.values: dict[Value, int] = {}
        self.parts: list[Hashable] = []

    def key(self) -> Hashable:
        extent = self.facts.graph.extent
        if extent is not None:
            self.value(extent.leaf)
        self.describe(self.group)
        for number, operand in self.group.operands.items():
            self.parts.append(number)
            self.describe(operand)
        return tuple(self.parts)

    def describe(self, group: Group) -> None:
        anchor = None if group.anchor is None else (self.members[group.anchor], self.facts.compilation.is_native(group.anchor))
        self.parts.append((group.dims, group.static, anchor))
        for node, form in group.forms.items():
            values = tuple([self.value(v) for v in (*node.inputs, *node.results)])
            self.parts.append((form, node in group.absorbed, values))
        self.parts.append(tuple([self.value(v) for v in group.stores]))

    def value(self, value: Value) -> int:
        """The number of a value; it is described at first sight."""
        if (number := self.values.get(value)) is not None:
            return number
        number = self.values[value] = len(self.values)
        node, tiles, facts = value.node, self.places.tiles.get(value), self.facts
        base, layout = self.places.locate(value) if tiles is None else (self.places.base(value), None)
        memory = facts.memory(base)
        place = self.memory.setdefault(memory, len(self.memory))
        about = [value.index, value.dims, value.dtype, tiles, layout and (layout.strides, layout.offset), place, memory is value]
        about += [base.dims, base.dtype, memory.dims, memory.dtype, self.places.memory(memory), self.text(node)]
        # finer: the layout has strides of these dims
        about += [facts.active.get(value), self.places.is_alias(node), self.members.get(node), self.places.finer.get(value)]
        if node not in self.members and node.op.kind is Kind.VIEW:  # its elements may be computed on the way
            about += [self.value(v) for v in node.inputs]
        self.parts.append((number, *about))
        return number

    def text(self, node: Node) -> str:
        """The op, and its attributes; unlike ==, the text distinguishes -0.0 from 0.0 and 1 from True."""
        if node not in self._texts:
            attrs = node.attrs
            if node.op is CONSTANT:
                few = node.shapes[0].num_elements == 1
                attrs = attrs.data.tobytes() if few else None  # type: ignore[union-attr]
            self._texts[node] = f"{node.op.name} {attrs!r}"
        return self._texts[node]
