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
import sys
from dataclasses import fields
from numbers import Integral, Real
from typing import Any, NoReturn

import numpy as np

from rlx.errors import ParseError, known
from rlx.ir.dtype import DTYPES, DType, as_dtype, f32
from rlx.ir.graph import CONSTANT, ConstantAttrs, Graph, Node, Value
from rlx.ir.handle import BufferHandle
from rlx.ir.op import OPS, Attrs, Kind
from rlx.ir.shape import Dim, DimLike, Shape
from rlx.ir.verify import attribute_faults

INLINE = 16  # constants of up to this many numbers are written out, larger ones as base64 of their little-endian bytes
_NESTING = 16  # tuples within tuples in an attribute
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def print_graph(graph: Graph) -> str:
    """Text that `parse_graph` reads back to an equal graph. Nodes that nothing needs are not in it."""
    return "\n".join(_graph_lines(graph, digest=False))


def fingerprint(graph: Graph) -> str:
    """sha256 (hex) of the text without node names: equal for equal graphs on every machine. Leaf and output names count."""
    return hashlib.sha256("\n".join(_graph_lines(graph, digest=True)).encode()).hexdigest()


# -- printing


def _graph_lines(graph: Graph, digest: bool) -> list[str]:
    """The lines of a graph. `digest`: node names left out, large constants as their sha256."""
    lines = [f"graph {_name(graph.name)}"]
    refs: dict[Node, str] = {}
    for leaf in graph.leaves():
        refs[leaf.node] = "%" + _name(leaf.name)
        lines.append(f"  {leaf.node.op.name} {_name(leaf.name)} : {leaf.shape}")

    def ref(v: Value) -> str:
        return refs.get(v.node, "%?") + (f".{v.index}" if len(v.node.shapes) > 1 else "")

    for node in graph.nodes():
        if node in refs:
            continue
        refs[node] = f"%{len(refs) - len(graph.leaves())}"
        if isinstance(node.attrs, ConstantAttrs):
            arguments = [_constant_text(node.attrs.data, digest)]
        else:
            arguments = [ref(v) for v in node.inputs] + _attribute_texts(node.attrs)
        label = f" {json.dumps(node.name)}" if node.name is not None and not digest else ""
        shapes = ", ".join(map(str, node.shapes))
        lines.append(f"  {refs[node]} = {node.op.name}({', '.join(arguments)}) : {shapes}{label}")
    lines.extend(f"  assign {_name(handle.name)} = {ref(value)}" for handle, value in graph.assigns)
    results = ", ".join(f"{_name(name)} = {ref(v)}" for name, v in zip(graph.output_names, graph.outputs))
    lines.append(f"  return {results}".rstrip())
    return lines


def _name(name: Any) -> str:
    text = str(name)
    return text if _NAME.fullmatch(text) else json.dumps(text)


def _attribute_texts(attrs: Attrs | None) -> list[str]:
    return [] if attrs is None else [f"{f.name}={_attribute_text(getattr(attrs, f.name))}" for f in fields(attrs)]


def _attribute_text(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, (bool, np.bool_)):
        return "true" if value else "false"
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
    raw = _little_endian(flat).tobytes()
    return f'sha256 "{hashlib.sha256(raw).hexdigest()}"' if digest else f'base64 "{base64.b64encode(raw).decode()}"'


def _number_text(x: Any, dtype: DType) -> str:
    """The shortest decimal that reads back to the same bits; NaN by its bits, since it has many."""
    if dtype.kind == "b":
        return "true" if x else "false"
    if dtype.kind != "f":
        return str(int(x))
    exact = float(x)
    if math.isnan(exact):
        return f"0x{int(x.view(_bits(dtype))):0{dtype.bits // 4}x}"
    if dtype == f32 and math.isfinite(exact):
        short = float(np.format_float_scientific(x, unique=True))
        exact = short if np.float32(short) == x else exact
    return repr(exact)


def _bits(dtype: DType) -> np.dtype:
    """The unsigned integer as wide as `dtype`."""
    return np.dtype(f"u{dtype.itemsize}")


def _little_endian(array: np.ndarray) -> np.ndarray:
    return array if sys.byteorder == "little" else array.view(_bits(as_dtype(array.dtype))).byteswap()


# -- parsing

_TOKEN = re.compile(
    r"""(?P<string>"[^"\\]*(?:\\.[^"\\]*)*")
      | (?P<ref>%(?:[0-9]+(?:\.[0-9]+)?|[A-Za-z_][\w.]*|"[^"\\]*(?:\\.[^"\\]*)*"))
      | (?P<number>-?(?:0x[0-9a-fA-F]+|[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)(?![\w.])|-inf(?![\w.]))
      | (?P<word>[A-Za-z_][\w.]*)
      | (?P<mark>[()\[\],:=*])""",
    re.VERBOSE,
)
_BLANK = re.compile(r"\s*(?:\#.*)?")  # before a token, and a comment up to the end


class _Line:
    """The tokens of one line, read from left to right; `fail` is how every complaint is made."""

    def __init__(self, number: int, text: str) -> None:
        self.number, self.at = number, 0
        self.tokens: list[tuple[str, str]] = []
        place = _skip(text, 0)
        while place < len(text):
            found = _TOKEN.match(text, place)
            if found is None:
                raise ParseError(f"line {number}: {text[place : place + 20]!r} at column {place + 1} is no name, number or mark")
            self.tokens.append((str(found.lastgroup), found.group()))
            place = _skip(text, found.end())

    def fail(self, expected: str) -> NoReturn:
        found = repr(self.tokens[self.at][1][:60]) if self.at < len(self.tokens) else "the end of the line"
        raise ParseError(f"line {self.number}: expected {expected}, found {found}")

    def peek(self, kind: str, text: str | None = None) -> bool:
        if self.at >= len(self.tokens) or self.tokens[self.at][0] != kind:
            return False
        return text is None or self.tokens[self.at][1] == text

    def take(self, kind: str, expected: str) -> str:
        if not self.peek(kind):
            self.fail(expected)
        self.at += 1
        return self.tokens[self.at - 1][1]

    def accept(self, mark: str) -> bool:
        if self.peek("mark", mark):
            self.at += 1
            return True
        return False

    def expect(self, mark: str) -> None:
        if not self.accept(mark):
            self.fail(repr(mark))

    def end(self) -> None:
        if self.at < len(self.tokens):
            self.fail("the end of the line")

    def string(self, expected: str = "a string") -> str:
        return self.decoded(self.take("string", expected))

    def decoded(self, text: str) -> str:
        try:
            return json.loads(text)
        except ValueError as e:
            raise ParseError(f"line {self.number}: {text[:60]} is no JSON string: {e}") from None

    def name(self, expected: str) -> str:
        return self.string() if self.peek("string") else self.take("word", expected)

    def integer(self, expected: str) -> int:
        text = self.take("number", expected)
        if not re.fullmatch(r"-?[0-9]{1,40}", text):
            self.at -= 1
            self.fail(expected)
        return int(text)

    def dim(self) -> DimLike:
        factor, names = 1, []
        while True:
            if self.peek("word"):
                names.append(self.take("word", "a dim"))
            else:
                factor *= self.integer("a dim: an integer, a name, or a product of them")
            if not self.accept("*"):
                return Dim(names, factor) if names else factor

    def shape(self) -> Shape:
        dtype = self.take("word", "a dtype")
        if dtype not in DTYPES:
            self.at -= 1
            self.fail(f"a dtype ({known(DTYPES)})")
        self.expect("[")
        dims: list[DimLike] = []
        while not self.accept("]"):
            if dims:
                self.expect(",")
            dims.append(self.dim())
        return Shape(dims, dtype)

    def attribute(self, depth: int = 0) -> Any:
        """An attribute's value: number, string, true, false, none, dtype, shape, dim[…], or a tuple of them."""
        if self.peek("string"):
            return self.string()
        if self.peek("number"):
            text = self.tokens[self.at][1]
            if re.fullmatch(r"-?[0-9]+", text):
                return self.integer("an integer of at most 40 digits")
            self.at += 1
            return float(text)
        if self.accept("("):
            if depth == _NESTING:
                self.fail(f"at most {_NESTING} tuples within each other")
            items = []
            while not self.accept(")"):
                items.append(self.attribute(depth + 1))
                if not self.accept(",") and not self.peek("mark", ")"):
                    self.fail("',' or ')'")
            return tuple(items)
        return self.word_attribute()

    def word_attribute(self) -> Any:
        word = self.take("word", "an attribute's value")
        if word in _WORDS:
            return _WORDS[word]
        if word == "dim":
            self.expect("[")
            dim = self.dim()
            self.expect("]")
            return dim
        self.at -= 1
        if word not in DTYPES:
            self.fail("an attribute's value")
        if self.at + 1 < len(self.tokens) and self.tokens[self.at + 1][1] == "[":
            return self.shape()
        self.at += 1
        return DTYPES[word]


def _skip(text: str, place: int) -> int:
    blank = _BLANK.match(text, place)
    return blank.end() if blank else place


_WORDS = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan}


def parse_graph(text: str) -> Graph:
    """The graph that `print_graph` printed. ParseError, naming the line, for any other text."""
    if not isinstance(text, str):
        raise ParseError(f"a graph's text is a str, got {type(text).__name__}")
    return _Parser().parse(text)


class _Parser:
    """State between lines: the graph so far, and what each reference means."""

    def __init__(self) -> None:
        self.graph: Graph | None = None
        self.nodes: dict[str, Node] = {}  # "%3" -> node
        self.leaves: dict[str, Value] = {}  # name -> leaf
        self.finished = False

    def parse(self, text: str) -> Graph:
        number = 0
        for number, raw in enumerate(text.split("\n"), 1):
            line = _Line(number, raw)
            if not line.tokens:
                continue
            try:
                self.statement(line)
                line.end()
            except ParseError:
                raise
            except Exception as e:  # untrusted attributes meet the ops' own rules: what those raise is the text's fault
                raise ParseError(f"line {number}: {e or type(e).__name__}") from e
        if self.graph is None or not self.finished:
            raise ParseError(f"line {number}: expected {'return' if self.graph else 'graph NAME'}, found the end of the text")
        return self.graph

    def statement(self, line: _Line) -> None:
        if self.finished:
            line.fail("nothing after return")
        if self.graph is None:
            if not line.peek("word", "graph"):
                line.fail("graph NAME")
            line.at += 1
            self.graph = Graph(line.name("the graph's name"))
        elif line.peek("ref"):
            self.node(line)
        else:
            word = line.take("word", "input, param, handle, %N, assign or return")
            if word in ("input", "param", "handle"):
                self.leaf(word, line, self.graph)
            elif word == "assign":
                self.assign(line, self.graph)
            elif word == "return":
                self.results(line, self.graph)
            else:
                line.at -= 1
                line.fail("input, param, handle, %N, assign or return")

    def leaf(self, kind: str, line: _Line, graph: Graph) -> None:
        name = line.name(f"the {kind}'s name")
        line.expect(":")
        shape = line.shape()
        if kind == "handle":
            value = graph.handle(BufferHandle(name, shape.dims, shape.dtype))
        else:
            value = (graph.input if kind == "input" else graph.param)(name, shape.dims, shape.dtype)
        self.leaves[name] = value

    def value(self, line: _Line) -> Value:
        text = line.take("ref", "a value (%name, %N or %N.I)")[1:]
        if not text[0].isdigit():
            name = line.decoded(text) if text[0] == '"' else text
            if name not in self.leaves:
                raise ParseError(f"line {line.number}: no leaf {name!r} is declared above; declared: {known(self.leaves)}")
            return self.leaves[name]
        number, _, index = text.partition(".")
        node = self.nodes.get(number)
        if node is None:
            raise ParseError(f"line {line.number}: %{number} is not defined above")
        count = len(node.shapes)
        if (count > 1) != bool(index) or int(index or 0) >= count:
            raise ParseError(f"line {line.number}: %{text}: {node.op.name} has {count} result{'s' * (count > 1)}, write "
                             + (f"%{number}.0 to %{number}.{count - 1}" if count > 1 else f"%{number}"))  # fmt: skip
        return node.results[int(index or 0)]

    def node(self, line: _Line) -> None:
        number = line.take("ref", "%N")[1:]
        if not number.isdigit() or number in self.nodes:
            line.at -= 1
            line.fail("a node number not used yet")
        line.expect("=")
        name = line.take("word", "an op's name")
        op = OPS.get(name)
        if op is None or (op.kind is Kind.LEAF and op is not CONSTANT):
            line.at -= 1
            line.fail("an op" if op is None else f"an op; a leaf is declared as: {name} NAME : SHAPE")
        line.expect("(")
        inputs: list[Value] = []
        if op is CONSTANT:
            pieces = self.constant_pieces(line)
            shapes = self.shapes(line)
            attrs: Attrs | None = ConstantAttrs(_constant_data(line, pieces, shapes[0]))
        else:
            given = self.arguments(line, inputs)
            shapes = self.shapes(line)
            attrs = op.make_attrs(given)
            if wrong := attribute_faults(op, attrs):
                raise ParseError(f"line {line.number}: {'; '.join(wrong)}")
        inferred = op.result_shapes(attrs, tuple(v.shape for v in inputs))
        if inferred != shapes:
            want, found = (", ".join(map(str, s)) for s in (inferred, shapes))
            raise ParseError(f"line {line.number}: the shape rule of {name} gives {want}, the text says {found}")
        label = line.string() if line.peek("string") else None
        self.nodes[number] = Node(op, tuple(inputs), attrs, shapes, label, f"<text>:{line.number}")

    def shapes(self, line: _Line) -> tuple[Shape, ...]:
        line.expect(":")
        shapes = [line.shape()]
        while line.accept(","):
            shapes.append(line.shape())
        return tuple(shapes)

    def arguments(self, line: _Line, inputs: list[Value]) -> dict[str, Any]:
        """Operands, appended to `inputs`, then attributes by name; up to the closing parenthesis."""
        given: dict[str, Any] = {}
        while not line.accept(")"):
            if inputs or given:
                line.expect(",")
            if line.peek("ref") and not given:
                inputs.append(self.value(line))
                continue
            name = line.take("word", "a value or an attribute's name")
            if name in given:
                line.at -= 1
                line.fail("each attribute once")
            line.expect("=")
            given[name] = line.attribute()
        return given

    def constant_pieces(self, line: _Line) -> list[str] | bytes:
        if line.peek("word", "base64"):
            line.at += 1
            text = line.string("base64 in a string")
            line.expect(")")
            return base64.b64decode(text, validate=True)
        pieces: list[str] = []
        while not line.accept(")"):
            if pieces:
                line.expect(",")
            pieces.append(line.take("word" if line.peek("word") else "number", "a number"))
        return pieces

    def assign(self, line: _Line, graph: Graph) -> None:
        name = line.name("a handle's name")
        if name not in self.leaves:
            raise ParseError(f"line {line.number}: no handle {name!r} is declared above; declared: {known(self.leaves)}")
        line.expect("=")
        graph.assign(self.leaves[name], self.value(line))

    def results(self, line: _Line, graph: Graph) -> None:
        names: list[str] = []
        values: list[Value] = []
        while line.at < len(line.tokens):
            if names:
                line.expect(",")
            names.append(line.name("an output's name"))
            line.expect("=")
            values.append(self.value(line))
        graph.set_outputs(values, names)
        self.finished = True


def _constant_data(line: _Line, pieces: list[str] | bytes, shape: Shape) -> np.ndarray:
    """The array that `_constant_text` printed; refused unless sizes agree and every number fits the dtype."""
    dtype, parts = shape.dtype, 2 if shape.dtype.kind == "c" else 1
    want = shape.num_elements * parts
    if isinstance(pieces, bytes):
        if len(pieces) != shape.size_bytes:
            raise ParseError(f"line {line.number}: {shape} takes {shape.size_bytes} bytes, the text has {len(pieces)}")
        data = _little_endian(np.frombuffer(pieces, dtype.numpy) if pieces else np.empty(0, dtype.numpy)).view(dtype.numpy)
        if dtype.kind == "b" and len(pieces) and max(pieces) > 1:
            raise ParseError(f"line {line.number}: a bool's byte is 0 or 1, found {max(pieces)}")
    else:
        if len(pieces) != want:
            raise ParseError(f"line {line.number}: {shape} takes {want} numbers, the text has {len(pieces)}")
        data = np.empty(want, (f32 if parts == 2 else dtype).numpy)
        for i, text in enumerate(pieces):
            _set_number(line, data, i, text)
        data = data.view(dtype.numpy)
    data = data.reshape(shape.static)
    data.flags.writeable = False
    return data


def _set_number(line: _Line, data: np.ndarray, i: int, text: str) -> None:
    dtype = as_dtype(data.dtype)

    def refuse() -> NoReturn:
        raise ParseError(f"line {line.number}: {text[:60]} is no {dtype.name}")

    if dtype.kind == "b":
        if text not in ("true", "false"):
            refuse()
        data[i] = text == "true"
    elif dtype.kind == "f" and text.startswith("0x"):
        if len(text) - 2 > dtype.bits // 4:
            refuse()
        data.view(_bits(dtype))[i] = int(text, 16)
    elif dtype.kind == "f":
        if text[0].isalpha() and text != "inf":
            refuse()
        value = float(text)
        with np.errstate(over="ignore"):
            data[i] = value
        if math.isfinite(value) and not np.isfinite(data[i].astype(np.float64)):
            refuse()
    else:
        info = np.iinfo(dtype.numpy)
        if not re.fullmatch(r"-?[0-9]{1,20}", text) or not info.min <= int(text) <= info.max:
            refuse()
        data[i] = int(text)
