"""Fusion groups: the nodes that share a kernel, and their text, which names nodes as the text of the graph does.

    groups walk
      prepared group (4, 3)
        full %0 stores %0
      group (2, 3) from %2
        absorbed %1
        full %2
        full %3 stores %3
        operand 0 (2, 4)
          full %1 stores %1
      group (2,) "not joined: ..."
        row %4 stores %4

Nodes after `operand` belong to a group that computes an operand of the anchor in its kernel. The text is complete:
`parse_groups` reads it back to groups that lower to the same kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.op import Kind
from rlx.ir.text import references
from rlx.ir.tokens import Tokens, attribute_text, name_text
from rlx.records import field, record

FORMS = ("full", "row", "dropped", "viewed")


@record(eq=False, frozen=False)
class Group:
    """Nodes of one kernel. `forms`: how each node's result maps to the space `dims`: "full", "row" (the dim of `axis` is 1),
    "dropped" (it is gone); "viewed" for a claimed op if the space is that of a view of its result, which is among the nodes
    then. `absorbed` nodes are recomputed at whatever coordinates they are read. `static`: it runs when
    params are set. `why`: why its first node is not in the kernel that computes an operand of it."""

    dims: tuple[int, ...]
    static: bool
    anchor: Node | None = None  # the contraction, native op or whole-op kernel it grew from
    forms: dict[Node, str] = field(default_factory=dict)  # in topological order
    absorbed: set[Node] = field(default_factory=set)
    reads: set[Group] = field(default_factory=set)  # during fusion: groups it depends on, and groups that depend on it
    read_by: set[Group] = field(default_factory=set)
    stores: dict[Value, None] = field(default_factory=dict)  # results written to memory, in order
    operands: dict[int, Group] = field(default_factory=dict)  # of the anchor, by number: absorbed groups that compute them
    why: str = ""
    number: int = 0  # in order of creation

    @property
    def nodes(self) -> list[Node]:
        return list(self.forms)

    def row_reductions(self) -> list[Node]:
        return [n for n in self.forms if n.op.kind is Kind.REDUCE and self.forms[n] != "full"]

    @property
    def axis(self) -> int:
        """The axis along which rows run: that which the row reductions reduce, else the last one."""
        for n in self.row_reductions():
            return n.op.reduce(n.attrs, n.inputs[0].shape).axes[0]  # type: ignore[misc]
        return len(self.dims) - 1

    @property
    def lines(self) -> tuple[int, ...]:
        """The dims without that of the rows."""
        return self.dims[: self.axis] + self.dims[self.axis + 1 :]

    def read_on_the_way(self, values: Sequence[Value]) -> list[Value]:
        """The values that absorbed pointwise nodes read to compute these, and that this group does not compute."""
        found, todo, done = list[Value](), list(values), set[Node]()
        while todo:
            node = todo.pop(0).node
            if node in self.absorbed and node.op.kind is Kind.POINTWISE and node not in done:
                done.add(node)
                found += [x for x in node.inputs if x.node not in self.forms]
                todo += node.inputs
        return found


def print_groups(groups: Sequence[Group], graph: Graph) -> str:
    """Text that `parse_groups` reads back."""
    refs, lines = references(graph), [f"groups {name_text(graph.name)}"]
    for group in groups:
        head = f"  {'prepared ' * group.static}group {attribute_text(group.dims)}"
        head += f" from {refs[group.anchor]}" if group.anchor is not None else ""
        lines.append(head + (f" {json.dumps(group.why)}" if group.why else ""))
        lines += _members(group, refs, "    ")
        for number, operand in group.operands.items():
            lines.append(f"    operand {number} {attribute_text(operand.dims)}")
            lines += _members(operand, refs, "      ")
    return "\n".join(lines)


def _members(group: Group, refs: Mapping[Node, str], indent: str) -> Iterator[str]:
    for node, form in group.forms.items():
        numbered = len(node.shapes) > 1
        stored = [f"{refs[node]}.{v.index}" if numbered else refs[node] for v in group.stores if v.node is node]
        form = "absorbed" if node in group.absorbed else form
        yield f"{indent}{form} {refs[node]}" + (f" stores {', '.join(stored)}" if stored else "")


def parse_groups(text: str, graph: Graph) -> list[Group]:
    """The groups of `graph` that `print_groups` printed. ParseError, naming the line, for any other text."""
    return _Parser(text, graph).parse()


class _Parser(Tokens):
    """The groups parsed so far, and the node of each reference."""

    def __init__(self, text: str, graph: Graph) -> None:
        super().__init__(text, "a group")
        self.nodes = {ref: node for node, ref in references(graph).items()}
        self.groups: list[Group] = []
        self.inner: Group | None = None  # the group or operand whose nodes are being read

    def parse(self) -> list[Group]:
        started = False
        for _ in self.statements():
            if started:
                self.statement()
            else:
                self.expect("groups", "groups NAME")
                self.name("the graph's name")
                started = True
        return self.groups if started else self.fail("groups NAME")

    def statement(self) -> None:
        word = self.next("word", "prepared, group, or a form")
        if word in ("prepared", "group"):
            if word == "prepared":
                self.expect("group")
            dims, anchor = self.dims(), self.node() if self.accept("from") else None
            self.inner = Group(dims, word == "prepared", anchor, why=self.name("why") if self.kind == "string" else "")
            self.groups.append(self.inner)
        elif word == "operand" and self.groups:
            number = self.attribute()
            if type(number) is not int:
                self.error(f"expected the number of an operand, found {number!r}")
            self.inner = self.groups[-1].operands[number] = Group(self.dims(), self.groups[-1].static)
        elif word in ("absorbed", *FORMS) and self.inner is not None:
            self.member(self.inner, word)
        else:
            self.error(f"expected prepared, group, or one of operand, absorbed, {', '.join(FORMS)} in a group, found {word!r}")

    def dims(self) -> tuple[int, ...]:
        dims = self.attribute()
        if not isinstance(dims, tuple) or not all(type(d) is int for d in dims):
            self.error(f"the dims of a group are a tuple of integers, found {dims!r}")
        return dims

    def member(self, group: Group, form: str) -> None:
        node = self.node()
        if node in group.forms:
            self.error(f"{node!r} is twice in its group")
        group.forms[node] = "full" if form == "absorbed" else form
        if form == "absorbed":
            group.absorbed.add(node)
        if self.accept("stores"):
            for _ in self.items(""):
                ref, _, index = self.next("ref", "a result of the node").partition(".")
                if self.nodes.get(ref) is not node or int(index or 0) >= len(node.shapes):
                    self.error(f"{ref} is not a result of {node!r}")
                group.stores[Value(node, int(index or 0))] = None

    def node(self) -> Node:
        ref = self.next("ref", "a node (%N)")
        if ref not in self.nodes:
            self.error(f"the graph has no node {ref}")
        return self.nodes[ref]


__all__ = ["Group", "parse_groups", "print_groups"]
