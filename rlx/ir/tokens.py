"""Tokens shared by the texts of graphs, kernels and programs: names, numbers, shapes, attributes and constants, printed and
parsed.

The text is untrusted: any error is a ParseError that names the line, nothing in the text is evaluated, and memory use is bounded
by its length.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any, NoReturn, TypeVar

import numpy as np

from rlx.errors import ParseError, ShapeError, known
from rlx.ir.dtype import DTYPES, DType, as_dtype, f32
from rlx.ir.op import Attrs, attribute_types
from rlx.ir.shape import Dim, DimLike, Shape

INLINE = 16  # constants of up to this many numbers are written out, larger ones as base64 of their little-endian bytes
_NESTING = 16  # maximum nesting of tuples in an attribute
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")


def name_text(name: Any) -> str:
    text = str(name)
    return text if _NAME.fullmatch(text) else json.dumps(text)


def attribute_texts(attrs: Attrs | None, declared: type[Attrs] | None = None) -> list[str]:
    """NAME=VALUE of every attribute; with `declared`, of the attributes it names, for any `attrs`."""
    names = attribute_types(declared or type(attrs)) if attrs is not None else ()
    return [f"{name}={attribute_text(getattr(attrs, name, None))}" for name in names]


def attribute_text(value: Any) -> str:
    if value is None or isinstance(value, (bool, np.bool_)):
        return {None: "none", True: "true", False: "false"}[value]
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return repr(float(value))
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(attribute_text, value)) + ("," if len(value) == 1 else "") + ")"
    if isinstance(value, Dim):
        return f"dim[{value}]"
    if isinstance(value, (DType, Shape)):
        return str(value)
    return f"<{type(value).__name__}>"  # display only: the verifier and the parser refuse it


def constant_text(data: np.ndarray, digest: bool) -> str:
    dtype = as_dtype(data.dtype)
    flat = data.reshape(-1)
    if dtype.kind == "c":  # real and imaginary parts, alternating
        flat, dtype = flat.view(np.float32), f32
    if flat.size <= INLINE:
        return ", ".join(number_text(x, dtype) for x in flat)
    raw = flat.tobytes()  # every host that rlx runs on is little-endian
    return f'sha256 "{hashlib.sha256(raw).hexdigest()}"' if digest else f'base64 "{base64.b64encode(raw).decode()}"'


def number_text(x: Any, dtype: DType) -> str:
    """The shortest decimal that reads back to the same bits; a NaN as its bits, since there are many NaNs."""
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
_TOKEN = rf"""\s*(?:(?P<string>{_STRING})
      | (?P<ref>%(?:[0-9]+(?:\.[0-9]+)?|[A-Za-z_][\w.]*|{_STRING}))
      | (?P<number>-?(?:0x[0-9a-fA-F]+|[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?)(?![\w.])|-inf(?![\w.]))
      | (?P<word>[A-Za-z_][\w.]*)
      | (?P<mark>[()\[\]{{}},:;=*<@|])
      | (?P<end>)(?:\#.*)?$)"""
_WORDS: dict[str, Any] = {"true": True, "false": False, "none": None, "inf": math.inf, "nan": math.nan, **DTYPES}
T = TypeVar("T")


@cache
def _token() -> re.Pattern[str]:
    """`_TOKEN`, compiled when a text is first read."""
    return re.compile(_TOKEN, re.VERBOSE)


class Tokens:
    """A text read line by line: the tokens of the current line, and the position in them."""

    def __init__(self, text: str, described: str) -> None:
        """`described`: the form of the text, for the ParseError if it is not a str."""
        if not isinstance(text, str):
            raise ParseError(f"{described}'s text is a str, got {type(text).__name__}")
        self.lines, self.number, self.at = text.split("\n"), 0, 0  # `number`: of the current line, from 1
        self.tokens: list[tuple[str, str]] = []  # (kind, text); the last is of kind "end" and empty
        self.advance()

    # -- lines

    def advance(self) -> None:
        """Expects the end of the line and moves to the next one."""
        if self.tokens:
            self.next("end", "the end of the line")
        self.number += 1
        self.tokens, self.at, at, kind = [], 0, 0, ""
        line = "" if self.ended else self.lines[self.number - 1]
        while kind != "end":
            found = _token().match(line, at)
            if found is None:
                self.error(f"no name, number or mark begins at column {at + 1}: {line[at : at + 20].strip()!r}")
            kind, at = str(found.lastgroup), found.end()
            self.tokens.append((kind, found[kind]))

    def statements(self) -> Iterator[None]:
        """Once for each line that is not empty or a comment, which must then be read to its end."""
        while not self.ended:
            if self.kind != "end":
                yield
            self.advance()

    @property
    def ended(self) -> bool:
        return self.number > len(self.lines)

    # -- tokens

    @property
    def kind(self) -> str:
        return self.tokens[self.at][0]

    @property
    def text(self) -> str:
        return self.tokens[self.at][1]

    @property
    def following(self) -> str:
        """The text of the token after this one."""
        return self.tokens[min(self.at + 1, len(self.tokens) - 1)][1]

    def error(self, message: str, cause: Exception | None = None) -> NoReturn:
        raise ParseError(f"line {min(self.number, len(self.lines))}: {message}") from cause

    def fail(self, expected: str) -> NoReturn:
        self.error(f"expected {expected}, found {repr(self.text[:60]) if self.text else 'the end of the line'}")

    def next(self, kind: str, expected: str) -> str:
        """The text of the next token, which must be of this kind."""
        if self.kind != kind:
            self.fail(expected)
        self.at += kind != "end"
        return self.tokens[self.at - 1][1]

    def choose(self, table: Mapping[str, T], expected: str) -> T:
        """The entry of `table` for the next word."""
        if self.kind != "word" or self.text not in table:
            self.fail(expected)
        return table[self.next("word", expected)]

    def accept(self, text: str) -> bool:
        here = self.text == text
        self.at += here and self.kind != "end"
        return here

    def expect(self, text: str, expected: str = "") -> None:
        if not self.accept(text):
            self.fail(expected or repr(text))

    def listed(self, item: Callable[[], T]) -> list[T]:
        """One item or more, separated by commas."""
        found = [item()]
        while self.accept(","):
            found.append(item())
        return found

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
            self.error(f"{self.tokens[self.at - 1][1][:60]} is not a JSON string: {e}")

    # -- parts of statements

    def integer(self, label: str) -> int:
        text = self.next("number", label)
        if not text.lstrip("-").isdigit() or len(text) > 40:
            self.error(f"{label} is an integer, found {text[:60]!r}")
        return int(text)

    def count(self, label: str) -> int:
        value = self.integer(label)
        if value < 0:
            self.error(f"{label} is at least 0, found {value}")
        return value

    def dim(self) -> DimLike:
        factor, names = 1, []
        while True:
            if self.kind == "word":
                names.append(self.text)
            elif re.fullmatch("-?[0-9]{1,19}", self.text):
                factor *= int(self.text)
            else:
                self.fail("a dim: an integer, a name, or a product of them")
            self.at += 1
            if not self.accept("*"):
                return Dim(names, factor) if names else factor

    def shape(self) -> Shape:
        dtype = self.choose(DTYPES, f"a dtype ({known(DTYPES)})")
        self.expect("[")
        dims = [self.dim() for _ in self.items("]")]
        try:
            return Shape(dims, dtype)
        except ShapeError as e:
            self.error(str(e), e)

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
        if self.kind == "word" and self.following == "[":
            if text != "dim":
                return self.shape()
            self.at += 2
            dim = self.dim()
            self.expect("]")
            return dim
        return self.choose(_WORDS, "an attribute's value")

    def named_attribute(self, given: dict[str, Any], expected: str = "an attribute's name") -> None:
        """NAME=VALUE, added to `given`."""
        name = self.next("word", expected)
        if name in given:
            self.error(f"attribute {name} is given twice")
        self.expect("=")
        given[name] = self.attribute()

    # -- constants

    def numbers(self) -> list[str] | bytes:
        """A constant's numbers, or its bytes; up to the closing parenthesis."""
        if not self.accept("base64"):
            return [self.number_text() for _ in self.items(")")]
        raw = base64.b64decode(self.name("base64 in a string"), validate=True)
        self.expect(")")
        return raw

    def number_text(self) -> str:
        return self.next("word" if self.kind == "word" else "number", "a number")

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
            self.error(f"{text[:60]} is not of dtype {dtype.name}")
