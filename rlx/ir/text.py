"""The text form of a graph: printing, parsing, and the fingerprint made of it.

    graph counter
      input delta : f32[4]
      handle total : f32[4]
      %0 = constant(0.5) : f32[]
      %1 = mul(%delta, %0) : f32[4]
      %2 = add(%total, %1) : f32[4] "next"
      %3 = top_k(%2, k=2) : f32[2], i64[2]
      assign total = %2
      return best = %3.0, where = %3.1

One line per node, operands before users. `%x` is the leaf x, `%1` a node, `%3.1` the second result of a node that has
several. Names that are not words are JSON strings. `#` starts a comment. Text is untrusted: whatever is wrong with it
is a ParseError that names the line, nothing in it is evaluated, and no more memory is taken than the text is long.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

import numpy as np

from rlx.errors import ParseError, known
from rlx.ir.dtype import DTYPES, DType, as_dtype, f32
from rlx.ir.graph import CONSTANT, ConstantAttrs, Graph, Node, Value
from rlx.ir.handle import BufferHandle
from rlx.ir.op import OPS, Kind, attribute_types
from rlx.ir.shape import Dim, DimLike, Shape
from rlx.ir.updates import Update

INLINE = 16  # constants of up to this many numbers are written out, larger ones as base64 of their little-endian bytes
_NESTING = 16  # tuples within tuples in an attribute
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def print_graph(graph: Graph) -> str:
    """Text that `parse_graph` reads back to an equal graph. Nodes that nothing needs are not in it."""
    return "\n".join(_graph_lines(graph, digest=False))


def fingerprint(graph: Graph) -> str:
    """sha256 (hex) of the text without node names: equal for equal graphs on every machine. Leaf and output names count."""
    return hashlib.sha256("\n".join(digest_lines(graph)).encode()).hexdigest()


def digest_lines(graph: Graph) -> list[str]:
    """What the fingerprint is made of, line by line."""
    return _graph_lines(graph, digest=True)


# -- printing


def _graph_lines(graph: Graph, digest: bool) -> list[str]:
    """The lines of a graph. `digest`: node names left out, large constants as their sha256."""
    lines = [f"graph {_name(graph.name)}"]
    refs: dict[Node, str] = {}
    for leaf in graph.leaves():
        refs[leaf.node] = "%" + _name(leaf.name)
        lines.append(f"  {leaf.node.op.name} {_name(leaf.name)} : {leaf.shape}")

    def ref(v: Any) -> str:
        if not isinstance(v, Value):
            return "%?"  # for people, as below
        return refs.get(v.node, "%?") + (f".{v.index}" if len(v.node.shapes) > 1 else "")

    for node in graph.nodes():
        if node in refs:
            continue
        refs[node] = f"%{len(refs) - len(graph.leaves())}"
        if isinstance(node.attrs, ConstantAttrs):
            arguments = [_constant_text(node.attrs.data, digest)]
        else:
            names = attribute_types(node.op.attrs) if node.op.attrs and node.attrs else ()
            arguments = [ref(v) for v in node.inputs] + [f"{n}={_attribute_text(getattr(node.attrs, n, None))}" for n in names]
        label = f" {json.dumps(node.name)}" if node.name is not None and not digest else ""
        shapes = ", ".join(map(str, node.shapes))
        lines.append(f"  {refs[node]} = {node.op.name}({', '.join(arguments)}) : {shapes}{label}")
    for handle, value in graph.assigns:
        lines.append(f"  assign {_name(handle.name)} = {ref(value)}{' in place' if handle.name in graph.in_place else ''}")
    for u in graph.updates:
        lines.append(f"  update {_name(u.handle.name)} = {ref(u.result)} saved {ref(u.saved)} undo {ref(u.undo)}")
    results = ", ".join(f"{_name(name)} = {ref(v)}" for name, v in zip(graph.output_names, graph.outputs))
    lines.append(f"  return {results}".rstrip())
    return lines


def _name(name: Any) -> str:
    text = str(name)
    return text if _NAME.fullmatch(text) else json.dumps(text)


def _attribute_text(value: Any) -> str:
    if value is None or isinstance(value, (bool, np.bool_)):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(_attribute_text, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, Dim):
        return f"dim[{value}]"
    if isinstance(value, (DType, Shape)):
        return str(value)
    return f"<{type(value).__name__}>"  # for people: the verifier refuses it, and so does the parser


def _constant_text(data: np.ndarray, digest: bool) -> str:
    dtype = as_dtype(data.dtype)
    flat = data.reshape(-1)
    if dtype.kind == "c":  # real and imaginary parts, alternating
        flat, dtype = flat.view(np.float32), f32
    if flat.size <= INLINE:
        return ", ".join(_number_text(x, dtype) for x in flat)
    raw = flat.tobytes()  # every host that rlx runs on is little-endian
    return f'sha256 "{hashlib.sha256(raw).hexdigest()}"' if digest else f'base64 "{base64.b64encode(raw).decode()}"'


def _number_text(x: Any, dtype: DType) -> str:
    """The shortest decimal that reads back to the same bits; NaN by its bits, since it has many."""
    if dtype.kind == "b":
        return "true" if x else "false"
    if dtype.kind != "f":
        return str(int(x))
    if math.isnan(x):
        return f"0x{int(x.view(f'u{dtype.itemsize}')):0{dtype.bits // 4}x}"
    short = str(x) if dtype == f32 else repr(float(x))
    return short if dtype.numpy.type(float(short)) == x else repr(float(x))


# -- parsing

_STRING = r'"[^"\\]*(?:\\.[^"\\]*)*"'
_TOKEN = re.compile(
    rf"""\s*(?:(?P<string>{_STRING})
      | (?P<ref>%(?:[0-9]+(?:\.[0-9]+)?|[A-Za-z_][\w.]*|{_STRING}))
      | (?P<number>-?(?:0x[0-9a-fA-F]+|[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)(?![\w.])|-inf(?![\w.]))
      | (?P<word>[A-Za-z_][\w.]*)
      | (?P<mark>[()\[\],:=*])
      | (?P<end>)(?:\#.*)?$)""",
    re.VERBOSE,
)
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan, **DTYPES}
T = TypeVar("T")


def parse_graph(text: str) -> Graph:
    """The graph that `print_graph` printed. ParseError, naming the line, for any other text."""
    if not isinstance(text, str):
        raise ParseError(f"a graph's text is a str, got {type(text).__name__}")
    return _Parser().parse(text)


class _Parser:
    """The graph so far, what each reference means, and the tokens of the line being read."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.values: dict[str, Value] = {}  # by reference: %x, %1, %3.0
        self.finished = False
        self.number, self.at = 1, 0
        self.tokens: list[tuple[str, str]] = []  # (kind, text); the last is of kind "end" and empty

    def parse(self, text: str) -> Graph:
        for self.number, line in enumerate(text.split("\n"), 1):
            self.tokenise(line)
            try:
                if len(self.tokens) > 1:
                    self.statement()
                    self.next("end", "the end of the line")
            except ParseError:
                raise
            except Exception as e:  # noqa: BLE001  attributes meet the ops' rules: what those raise is the text's fault
                self.error(str(e) or type(e).__name__, e)
        if self.graph is None or not self.finished:
            self.error(f"expected {'return' if self.graph else 'graph NAME'}, found the end of the text")
        return self.graph

    # -- tokens

    def tokenise(self, line: str) -> None:
        self.tokens, self.at, place, kind = [], 0, 0, ""
        while kind != "end":
            found = _TOKEN.match(line, place)
            if found is None:
                self.error(f"no name, number or mark begins at column {place + 1}: {line[place : place + 20].strip()!r}")
            kind, place = str(found.lastgroup), found.end()
            self.tokens.append((kind, found[kind]))

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def text(self) -> str:
        return self.tokens[self.at][1]

    def error(self, message: str, cause: Exception | None = None) -> NoReturn:
        raise ParseError(f"line {self.number}: {message}") from cause

    def fail(self, expected: str) -> NoReturn:
        self.error(f"expected {expected}, found {repr(self.text[:60]) if self.text else 'the end of the line'}")

    def next(self, kind: str, expected: str) -> str:
        """The next token's text, which must be of this kind."""
        if self.kind != kind:
            self.fail(expected)
        self.at += kind != "end"
        return self.tokens[self.at - 1][1]

    def choose(self, table: Mapping[str, T], expected: str) -> T:
        """What the next word means in `table`."""
        if self.kind != "word" or self.text not in table:
            self.fail(expected)
        return table[self.next("word", expected)]

    def accept(self, text: str) -> bool:
        here = self.text == text
        self.at += here and self.kind != "end"
        return here

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            self.fail(repr(mark))

    def items(self, close: str) -> Iterator[None]:
        """Once for each comma-separated item before the mark `close` ("": before the end of the line)."""
        while not self.accept(close):
            yield
            if not self.accept(","):
                return None if self.accept(close) else self.fail(repr(close or ","))

    def name(self, expected: str) -> str:
        if self.kind != "string":
            return self.next("word", expected)
        try:
            return json.loads(self.next("string", expected))
        except ValueError as e:
            self.error(f"{self.tokens[self.at - 1][1][:60]} is no JSON string: {e}")

    # -- what stands inside a statement

    def dim(self) -> DimLike:
        factor, names = 1, []
        while True:
            if self.kind == "word":
                names.append(self.text)
            elif re.fullmatch("-?[0-9]{1,18}", self.text):
                factor *= int(self.text)
            else:
                self.fail("a dim: an integer, a name, or a product of them")
            self.at += 1
            if not self.accept("*"):
                return Dim(names, factor) if names else factor

    def shape(self) -> Shape:
        dtype = self.choose(DTYPES, f"a dtype ({known(DTYPES)})")
        self.expect("[")
        return Shape([self.dim() for _ in self.items("]")], dtype)

    def attribute(self, depth: int = 0) -> Any:
        """An attribute's value: number, string, true, false, none, dtype, shape, dim[…], or a tuple of them."""
        text = self.text
        if self.kind == "string":
            return self.name("a string")
        if self.kind == "number":
            self.at += 1
            return int(text) if re.fullmatch("-?[0-9]{1,40}", text) else float(text)
        if self.accept("("):
            if depth == _NESTING:
                self.fail(f"at most {_NESTING} tuples within each other")
            return tuple(self.attribute(depth + 1) for _ in self.items(")"))
        if self.kind == "word" and self.tokens[self.at + 1][1] == "[":
            if text != "dim":
                return self.shape()
            self.at += 2
            dim = self.dim()
            self.expect("]")
            return dim
        return self.choose(_WORDS, "an attribute's value")

    def undeclared(self, what: str, name: str) -> NoReturn:
        declared = known(v.name for v in self.graph.leaves()) if self.graph else "none"
        self.error(f"no {what} {name!r} is declared above; declared: {declared}")

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
            self.choose({"graph": None}, "graph NAME")
            self.graph = Graph(self.name("the graph's name"))
        elif self.kind == "ref":
            self.node()
        else:
            words = {"input": self.leaf, "param": self.leaf, "handle": self.leaf, "assign": self.assign}
            words |= {"update": self.update, "return": self.results}
            word = self.text
            self.choose(words, "input, param, handle, %N, assign, update or return")(self.graph, word)

    def leaf(self, graph: Graph, kind: str) -> None:
        name = self.name("the leaf's name")
        self.expect(":")
        shape = self.shape()
        declare = {"input": graph.input, "param": graph.param, "handle": lambda *given: graph.handle(BufferHandle(*given))}
        self.values["%" + _name(name)] = declare[kind](name, shape.dims, shape.dtype)

    def handle(self) -> Value:
        name = self.name("a handle's name")
        handle = self.values.get("%" + _name(name))
        return self.undeclared("handle", name) if handle is None else handle

    def assign(self, graph: Graph, word: str) -> None:
        handle = self.handle()
        self.expect("=")
        value = self.value()
        if in_place := self.accept("in"):
            self.expect("place")
        graph.assign(handle, value, in_place)

    def update(self, graph: Graph, word: str) -> None:
        handle, parts = self.handle(), []
        for mark in ("=", "saved", "undo"):
            self.expect(mark)
            parts.append(self.value())
        graph.updates.append(Update(handle, *parts))

    def results(self, graph: Graph, word: str) -> None:
        names: list[str] = []
        values: list[Value] = []
        for _ in self.items(""):
            names.append(self.name("an output's name"))
            self.expect("=")
            values.append(self.value())
        graph.set_outputs(values, names)
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
        shapes = [self.shape()]
        while self.accept(","):
            shapes.append(self.shape())
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
                continue
            name = self.next("word", "a value or an attribute's name")
            if name in given:
                self.error(f"attribute {name} stands twice")
            self.expect("=")
            given[name] = self.attribute()
        return given

    def numbers(self) -> list[str] | bytes:
        """A constant's numbers, or its bytes; up to the closing parenthesis."""
        if not self.accept("base64"):
            return [self.next("word" if self.kind == "word" else "number", "a number") for _ in self.items(")")]
        raw = base64.b64decode(self.name("base64 in a string"), validate=True)
        self.expect(")")
        return raw

    def constant(self, given: list[str] | bytes, shape: Shape) -> np.ndarray:
        """The array that `_constant_text` printed; refused unless sizes agree and every number fits the dtype."""
        dtype = f32 if shape.dtype.kind == "c" else shape.dtype
        raw = given if isinstance(given, bytes) else b"".join(self.number_bytes(text, dtype) for text in given)
        if len(raw) != shape.size_bytes:
            self.error(f"{shape} takes {shape.size_bytes} bytes, the text has {len(raw)}")
        if dtype.kind == "b" and raw and max(raw) > 1:
            self.error(f"a bool's byte is 0 or 1, found {max(raw)}")
        return np.frombuffer(raw, shape.dtype.numpy).reshape(shape.static)  # read-only, as `raw` is

    def number_bytes(self, text: str, dtype: DType) -> bytes:
        value_of = {"b": {"true": True, "false": False}.__getitem__, "f": float}.get(dtype.kind, int)
        try:
            if dtype.kind == "f" and text.startswith("0x"):
                return int(text, 16).to_bytes(dtype.itemsize, "little")
            with np.errstate(over="ignore"):
                number = dtype.numpy.type(value_of(text))
            if dtype.kind == "f" and math.isinf(number) and "inf" not in text:
                raise OverflowError
            return number.tobytes()
        except (KeyError, ValueError, OverflowError):
            self.error(f"{text[:60]} is no {dtype.name}")
