"""Writes what follows from the op table: docs/ops.md, the page of all ops, and the stubs with their typed signatures. Run it
after a change of the table: python docs/ops.py"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import rlx.ir.ops as table
from rlx.errors import GraphError
from rlx.ir import functions
from rlx.ir.dtype import DTYPES, DType, bool_, i64
from rlx.ir.methods import ATTRIBUTES
from rlx.ir.node import Value
from rlx.ir.op import KINDS, Number, OpDef, attribute_types
from rlx.ir.ops import OWN
from rlx.ir.shape import DimLike, Shape

PAGE = Path(__file__).parent / "ops.md"
HEAD = """\
# The ops

Written by `python docs/ops.py` from the op table (`rlx/ir/ops`), a section for each of its files. An op is called as
`rlx.name(...)` or `g.name(...)`: operands first, then attributes, by position or by name. An operand in brackets may be left out;
an attribute without a default must be given. The dtypes are those of the first operand. The Kind (`rlx.ir.op.Kind`) says
how an op is computed; a composite is made of other ops, and runs on every backend.
"""
ROLES = {"i": "an index (integers)", "b": "a condition (bool)"}


def type_text(hint: Any) -> str:
    """An annotation as a reader would write it: `int | None`, `'sum' | 'mean'`."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return " | ".join(map(repr, args))
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, args))
    if origin is tuple:
        return f"tuple[{', '.join('...' if a is ... else type_text(a) for a in args)}]"
    return "None" if hint is NoneType else hint.__name__


def attribute_texts(op: OpDef) -> Iterator[str]:
    defaults = {f.name: f.default for f in fields(op.attrs)} if op.attrs else {}  # type: ignore[arg-type]
    for name, hint in attribute_types(op.attrs).items() if op.attrs else ():
        default = defaults[name]
        shown = default.name if isinstance(default, DType) else repr(default)
        yield f"{name}: {type_text(hint)}" + ("" if default is MISSING else f" = {shown}")


def operand_names(op: OpDef) -> list[str]:
    """Those that may be left out in brackets."""
    least, most = op.arity
    names = op.operand_names
    if most is None:
        return ["*operands"]
    return [f"[{name}]" if i >= least or name.startswith("*") else name for i, name in enumerate(names)]


def entry(op: OpDef) -> str:
    names = operand_names(op)
    facts = [op.kind.value]
    if names:
        facts.append(", ".join(KINDS[letter] for letter in op.dtypes))
        facts += [f"{name.strip('[]')}: {ROLES[role]}" for name, role in zip(names[1:], op.roles[1:]) if role in ROLES]
    text = "\n".join(textwrap.wrap(op.doc, 130, break_on_hyphens=False, break_long_words=False))
    return f"### {op.name}\n\n`{op.name}({', '.join([*names, *attribute_texts(op)])})`\n\n{text}\n\n*{'; '.join(facts)}*\n"


def families() -> Iterator[tuple[str, list[OpDef]]]:
    """(first line of its docstring, the ops that it declares) of every file of the table that declares one."""
    for found in iter_modules(table.__path__):
        module = import_module(f"rlx.ir.ops.{found.name}")
        tree = ast.parse(inspect.getsource(module))
        imported = {alias.asname or alias.name for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names}
        here = dict.fromkeys(value.op for name, value in vars(module).items() if hasattr(value, "op") and name not in imported)
        if ops := [op for op in here if op in OWN]:
            yield str(module.__doc__).split("\n\n")[0].replace("\n", " "), ops


def page() -> str:
    parts = [HEAD]
    for title, ops in families():
        parts += [f"## {title.rstrip('.')}\n", *map(entry, ops)]
    return "\n".join(parts)


# -- stubs ---------------------------------------------------------------------------------------------------------

STUB = """\
# Written by `python docs/ops.py` from the op table.
from collections.abc import Callable as Callable
from collections.abc import Sequence
from typing import Any, Literal

from rlx.ir.body import Body
from rlx.ir.dtype import DType
from rlx.ir.node import Operand, Value
from rlx.ir.op import OPS as OPS
from rlx.ir.op import OpDef as OpDef
from rlx.ir.shape import Dim

Dims = int | str | Dim | Sequence[int | str | Dim]
"""
GIVEN = {  # attribute types -> the looser ones that a call takes
    tuple[int, ...]: "int | Sequence[int]", tuple[DimLike, ...]: "Dims", DType: "DType | str", float: "float", Number: "float",
}  # fmt: skip


def given_text(hint: Any) -> str:
    if hint in GIVEN:
        return GIVEN[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, args))}]"
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(part for a in args for part in given_text(a).split(" | ")))
    return type_text(hint)


def result_text(op: OpDef) -> str:
    """From the results of the samples."""
    counts = set()
    for sample in op.samples:
        first = next(d for d in DTYPES.values() if d.kind == op.dtypes[0])
        roles = op.roles.ljust(len(sample.shapes), "x")
        names = sample.dtypes or ("",) * len(sample.shapes)
        dtypes = [DTYPES[n] if n else {"x": first, "i": i64, "b": bool_}[r] for n, r in zip(names, roles)]
        try:
            counts.add(len(op.result_shapes(op.make_attrs(sample.attrs or {}), tuple(map(Shape, sample.shapes, dtypes)))))
        except (GraphError, AttributeError):
            continue  # a sample whose operands are prepared by the tests
    if counts <= {1}:
        return "Value"
    return "tuple[Value, ...]" if len(counts) > 1 else f"tuple[{', '.join(['Value'] * counts.pop())}]"


def signature(op: OpDef, method: bool) -> str:
    """The parameters of its constructor: operands by position, then attributes."""
    operands = [f"{name}: Operand" for name in op.operand_names]
    open_ = any(name.startswith("*") for name in operands)
    if op.arity[1] is None:
        operands = ["self", *operands] if method else ["*operands: Operand | Sequence[Operand]"]
    elif method:
        operands[0] = "self"
    if not open_ and operands:
        operands.append("/")
    defaults = {f.name: f.default for f in fields(op.attrs)} if op.attrs else {}  # type: ignore[arg-type]
    attributes = []
    for name, hint in attribute_types(op.attrs).items() if op.attrs else ():
        default = defaults[name]
        plain = isinstance(default, (int, float, str, tuple, NoneType)) and repr(default) not in ("inf", "-inf")
        none = " | None" if default == () else ""  # OpDef.make_attrs takes it for ()
        attributes.append(
            f"{name}: {given_text(hint)}{none}" + ("" if default is MISSING else f" = {default!r}" if plain else " = ...")
        )
    star = [] if open_ else ["*"]
    return ", ".join([*operands, *attributes, *star, "shape: Any = None", "name: str | None = None"])


def stub_of(op: OpDef, indent: str = "") -> str:
    doc = textwrap.wrap(op.doc.replace("\\", "\\\\"), 120 - len(indent), break_on_hyphens=False, break_long_words=False)
    body = f"\n{indent}    ".join(doc)
    return f'{indent}def {op.name}({signature(op, bool(indent))}) -> {result_text(op)}:\n{indent}    """{body}"""\n'


def stubs() -> dict[Path, str]:
    """Path of each stub -> its text."""
    head, ops = STUB, [op for _, ops in families() for op in ops]
    functions = "".join(stub_of(op) for op in ops)
    aliases = "OWN: frozenset[OpDef]\nastype = cast\ntake = gather\n"
    names = "".join(f"    {name!r},\n".replace("'", '"') for name in table.__all__)
    methods = [
        ("    @property\n    def {0}(self) -> Value:\n" + '        """{1}"""\n').format(op.name, op.doc) if op.name in ATTRIBUTES
        else stub_of(op, "    ") for op in ops if op.arity[1] != 0 and op.name not in vars(Value)
    ]  # fmt: skip
    return {
        Path(table.__file__ or "").with_suffix(".pyi"): f"{head}\n{functions}\n{aliases}\n__all__ = [\n{names}]\n",
        Path(table.__file__ or "").parents[1] / "methods.pyi": f"{head}{METHODS}{''.join(methods)}{more_methods()}",
    }


METHODS = """
ATTRIBUTES: tuple[str, ...]
FUNCTIONS: dict[str, Callable[..., Any]]

def attach(value: type[Methods], name: str, function: Callable[..., Any]) -> None: ...

class Methods:
    __slots__ = ()
"""


def more_methods() -> str:
    """Those of rlx/ir/functions, with the signatures that stand there."""
    files = [import_module(f"rlx.ir.functions.{found.name}") for found in iter_modules(functions.__path__)]
    out = ""
    literals = {name: given_text(x) for file in files for name, x in vars(file).items() if get_origin(x) is Literal}
    for f in (f for file in files for f in ast.parse(inspect.getsource(file)).body):
        if isinstance(f, ast.FunctionDef) and f.name in functions.__all__ and f.args.args and f.args.args[0].arg == "x":
            f.args.args[0] = ast.arg("self")
            for name in (n for n in ast.walk(f.args) if isinstance(n, ast.Name)):
                name.id = literals.get(name.id, name.id)
            doc = ast.get_docstring(f)
            out += f"    def {f.name}({ast.unparse(f.args)}) -> {ast.unparse(f.returns or ast.Constant(None))}:"
            out += f' """{doc}"""\n' if doc and "\n" not in doc else " ...\n"
    return out


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")
