"""The text form of a graph: printer, parser and fingerprint.

    graph counter
      input delta : f32[4]
      handle total : f32[4]
      %0 = constant(0.5) : f32[]
      %1 = mul(%delta, %0) : f32[4]
      %2 = add(%total, %1) : f32[4] "next"
      %3 = top_k(%2, k=2) : f32[2], i64[2]
      assign total = %2
      return best = %3.0, where = %3.1

A graph with an active extent (rlx.ir.building.Extent) has a line `extent %n`, the axes with that name (`axes %x (1,)`) or the
active axes of its inputs (`active %x ((1, 1, 48, 1),)`), and `active` with those of an output after the output.

A sub-graph (rlx.ir.body) stands in front of the node that has it, with a number in place of its name:

      graph @0 body
        input n : i64[]
        ...
        return r0 = %0
      %4 = loop(%x, body=@0, carried=1, limit=8, tests=false) : i64[], f32[4]

One line per node, operands before users. `%x` is the leaf x, `%1` a node, `%3.1` the second result of a node that has
several. Names that are not words are JSON strings. `#` starts a comment. The text is untrusted: any error is a ParseError that
names the line, nothing in the text is evaluated, and memory use is bounded by its length.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from rlx.errors import ParseError, known
from rlx.ir.body import Body
from rlx.ir.building import Active, Building, Extent, Update
from rlx.ir.handle import BufferHandle
from rlx.ir.node import CONSTANT, ConstantAttrs, Node, Value
from rlx.ir.op import OPS, Kind
from rlx.ir.tokens import Tokens, attribute_text, attribute_texts, constant_text, name_text

G = TypeVar("G", bound=Building)
NESTING = 16  # sub-graphs in each other


def print_graph(graph: Building) -> str:
    """Text that `rlx.ir.graph.parse_graph` reads back to an equal graph. Unused nodes are left out."""
    return "\n".join(_graph_lines(graph, digest=False))


def fingerprint(graph: Building) -> str:
    """sha256 (hex) of the text without node names: equal for equal graphs on every machine. Leaf and output names count."""
    return hashlib.sha256("\n".join(digest_lines(graph)).encode()).hexdigest()


def digest_lines(graph: Building) -> list[str]:
    """The lines that the fingerprint hashes."""
    return _graph_lines(graph, digest=True)


# -- printing


def references(graph: Building) -> dict[Node, str]:
    """The reference of each node in the text: %name for a leaf, %N for other nodes."""
    refs = {leaf.node: "%" + name_text(leaf.name) for leaf in graph.leaves()}
    named = len(refs)
    for node in graph.nodes():
        if node not in refs:
            refs[node] = f"%{len(refs) - named}"
    return refs


def _graph_lines(graph: Building, digest: bool) -> list[str]:
    """The lines of a graph. `digest`: node names left out, large constants as their sha256."""
    lines, refs, nodes = [f"graph {name_text(graph.name)}"], references(graph), graph.nodes()
    bodies: dict[Body, int] = {}

    def attributes(node: Node) -> list[str]:
        """Those of the node; sub-graphs that are new come first, as lines of their own."""
        texts = attribute_texts(node.attrs, node.op.attrs)
        for i, body in enumerate(getattr(node.attrs, "__dict__", {}).values()):  # of a broken node, any object
            if isinstance(body, Body):
                if body not in bodies:
                    bodies[body] = len(bodies)
                    first, *inner = _graph_lines(body.building(), digest)
                    lines.append(f"  {first.replace('graph', f'graph @{bodies[body]}', 1)}")
                    lines.extend(f"  {line}" for line in inner)
                texts[i] = f"{texts[i].partition('=')[0]}=@{bodies[body]}"
        return texts

    leaves = {leaf.node for leaf in graph.leaves()}
    for leaf in graph.leaves():
        lines.append(f"  {leaf.node.op.name} {name_text(leaf.name)} : {leaf.shape}")

    def ref(v: Any) -> str:
        if not isinstance(v, Value):
            return "%?"  # display only, as below
        return refs.get(v.node, "%?") + (f".{v.index}" if len(v.node.shapes) > 1 else "")

    for node in (n for n in nodes if n not in leaves):
        if isinstance(node.attrs, ConstantAttrs):
            arguments = [constant_text(node.attrs.data, digest)]
        else:
            arguments = [ref(v) for v in node.inputs]
            arguments += attributes(node) if node.op.attrs else []
        label = f" {json.dumps(node.name)}" if node.name is not None and not digest else ""
        shapes = ", ".join(map(str, node.shapes))
        lines.append(f"  {refs[node]} = {node.op.name}({', '.join(arguments)}) : {shapes}{label}")
    for handle, value in graph.assigns:
        lines.append(f"  assign {name_text(handle.name)} = {ref(value)}{' in place' if handle.name in graph.in_place else ''}")
    for u in graph.updates:
        lines.append(f"  update {name_text(u.handle.name)} = {ref(u.result)} saved {ref(u.saved)} undo {ref(u.undo)}")
    if graph.extent is not None:
        lines.append(f"  extent {ref(graph.extent.leaf)}")
        for word, given in (("axes", graph.extent.axes), ("active", graph.extent.inputs)):
            lines += [f"  {word} {ref(v)} {attribute_text(axes)}" for v, axes in given.items()]
    ends = [f" active {attribute_text(active)}" if active else "" for active in graph.output_actives]
    results = [f"{name_text(name)} = {ref(v)}{end}" for name, v, end in zip(graph.output_names, graph.outputs, ends)]
    lines.append(f"  return {', '.join(results)}".rstrip())
    return lines


# -- parsing


def parse_into(make: Callable[[str], G], text: str) -> G:
    """The graph, made by `make` from its name, that `print_graph` printed. ParseError, naming the line, for any other text."""
    return _Parser(make, text).parse()


class _Parser(Tokens, Generic[G]):
    """The graph parsed so far, and the value of each reference."""

    def __init__(self, make: Callable[[str], G], text: str) -> None:
        super().__init__(text, "a graph")
        self.make = make
        self.graph: G | None = None
        self.values: dict[str, Value] = {}  # by reference: %x, %1, %3.0
        self.bodies: dict[int, Body] = {}  # by number
        self.outside: list[tuple[int, G | None, dict[str, Value], dict[int, Body]]] = []  # the graphs around a sub-graph
        self.finished = False

    def parse(self) -> G:
        for _ in self.statements():
            try:
                self.statement()
            except ParseError:
                raise
            except Exception as e:  # noqa: BLE001  attributes meet the ops' rules: what those raise is the text's fault
                self.error(str(e) or type(e).__name__, e)
        if self.graph is None or not self.finished:
            self.error(f"expected {'return' if self.graph else 'graph NAME'}, found the end of the text")
        return self.graph

    def undeclared(self, label: str, name: str) -> NoReturn:
        declared = known(v.name for v in self.graph.leaves()) if self.graph else "none"
        self.error(f"no {label} {name!r} is declared above; declared: {declared}")

    def value(self) -> Value:
        text = self.next("ref", "a value (%name, %N or %N.I)")
        if text in self.values:
            return self.values[text]
        if not text[1].isdigit():
            self.undeclared("leaf", text[1:])
        number = text.split(".")[0]
        results = [name for name in self.values if name.split(".")[0] == number]
        if not results:
            self.error(f"{number} is not defined above")
        op = self.values[results[0]].node.op
        self.error(f"{text}: the results of this {op.name} are written {' to '.join(sorted({results[0], results[-1]}))}")

    # -- statements

    def statement(self) -> None:
        if self.finished:
            self.fail("nothing after return")
        if self.graph is None:
            self.expect("graph", "graph NAME")
            self.graph = self.make(self.name("the graph's name"))
        elif self.kind == "ref":
            self.node()
        elif self.accept("graph"):
            self.sub_graph()
        else:
            words = {"input": self.leaf, "param": self.leaf, "handle": self.leaf, "assign": self.assign}
            words |= {"update": self.update, "return": self.results}
            words |= {"axes": self.axes, "active": self.axes} if self.graph.extent else {"extent": self.extent}
            word = self.text
            self.choose(words, "input, param, handle, %N, assign, update or return")(self.graph, word)

    def sub_graph(self) -> None:
        """graph @N NAME, which ends with its return."""
        self.expect("@", "the number of a sub-graph: @N")
        number = self.count("the number of a sub-graph")
        if number in self.bodies:
            self.error(f"there are two sub-graphs @{number}")
        if len(self.outside) == NESTING:
            self.error(f"sub-graphs are in each other {NESTING} deep at most")
        self.outside.append((number, self.graph, self.values, self.bodies))
        self.graph, self.values, self.bodies = self.make(self.name("the sub-graph's name")), {}, {}

    def attribute(self, depth: int = 0) -> Any:
        if not self.accept("@"):
            return super().attribute(depth)
        number = self.count("the number of a sub-graph")
        return self.bodies[number] if number in self.bodies else self.error(f"no sub-graph @{number} stands above")

    def leaf(self, graph: Building, kind: str) -> None:
        name = self.name("the leaf's name")
        self.expect(":")
        shape = self.shape()
        declare = {"input": graph.input, "param": graph.param, "handle": lambda *given: graph.handle(BufferHandle(*given))}
        self.values["%" + name_text(name)] = declare[kind](name, shape.dims, shape.dtype)

    def handle(self) -> Value:
        name = self.name("a handle's name")
        handle = self.values.get("%" + name_text(name))
        return self.undeclared("handle", name) if handle is None else handle

    def assign(self, graph: Building, word: str) -> None:
        handle = self.handle()
        self.expect("=")
        value = self.value()
        if in_place := self.accept("in"):
            self.expect("place")
        graph.assign(handle, value, in_place)

    def update(self, graph: Building, word: str) -> None:
        handle, parts = self.handle(), []
        for mark in ("=", "saved", "undo"):
            self.expect(mark)
            parts.append(self.value())
        graph.updates.append(Update(handle, *parts))

    def extent(self, graph: Building, word: str) -> None:
        graph.extent = Extent(self.value(), {}, {}, ())

    def axes(self, graph: Building, word: str) -> None:
        assert graph.extent is not None
        value = self.value()
        if word == "axes":
            graph.extent.axes[value] = self.attribute()
        else:
            graph.extent.inputs[value] = self.actives()

    def actives(self) -> tuple[Active, ...]:
        found = self.attribute()
        if not isinstance(found, tuple) or not all(isinstance(a, tuple) and len(a) == len(Active._fields) for a in found):
            self.error(f"active axes are tuples ({', '.join(Active._fields)}), found {found!r}")
        return tuple(Active(*a) for a in found)

    def results(self, graph: Building, word: str) -> None:
        names: list[str] = []
        values: list[Value] = []
        actives: list[tuple[Active, ...]] = []
        for _ in self.items(""):
            names.append(self.name("an output's name"))
            self.expect("=")
            values.append(self.value())
            actives.append(self.actives() if graph.extent and self.accept("active") else ())
        graph.set_outputs(values, names)
        if graph.extent is not None:
            graph.extent = graph.extent._replace(outputs=tuple(actives))
        if self.outside:
            number, self.graph, self.values, self.bodies = self.outside.pop()
            self.bodies[number] = Body.of(graph)
        else:
            self.finished = True

    def node(self) -> None:
        ref = self.text
        if not ref[1:].isdigit() or ref in self.values or f"{ref}.0" in self.values:
            self.fail("a node number not used yet")
        self.at += 1
        self.expect("=")
        ops = {name: op for name, op in OPS.items() if op.kind is not Kind.LEAF or op is CONSTANT}
        op = self.choose(ops, "an op (a leaf is declared as: input NAME : SHAPE)")
        self.expect("(")
        inputs: list[Value] = []
        given = self.numbers() if op is CONSTANT else self.arguments(inputs)
        self.expect(":")
        shapes = self.listed(self.shape)
        attrs = op.make_attrs(given) if isinstance(given, dict) else ConstantAttrs(self.constant(given, shapes[0]))
        inferred = op.result_shapes(attrs, tuple(v.shape for v in inputs))
        if inferred != tuple(shapes):
            want, found = (", ".join(map(str, s)) for s in (inferred, shapes))
            self.error(f"the shape rule of {op.name} gives {want}, the text says {found}")
        label = self.name("a name") if self.kind == "string" else None
        results = Node(op, tuple(inputs), attrs, inferred, label, f"<text>:{self.number}").results
        self.values.update({f"{ref}.{v.index}" if len(results) > 1 else ref: v for v in results})

    def arguments(self, inputs: list[Value]) -> dict[str, Any]:
        """Operands, appended to `inputs`, then attributes by name; up to the closing parenthesis."""
        given: dict[str, Any] = {}
        for _ in self.items(")"):
            if self.kind == "ref" and not given:
                inputs.append(self.value())
            else:
                self.named_attribute(given, "a value or an attribute's name")
        return given
