"""Writes docs/ops.md, the page of all ops, from the op table. Run it after a change of the table: python docs/ops.py"""

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
from rlx.ir.dtype import DType
from rlx.ir.op import KINDS, OpDef, attribute_types
from rlx.ir.ops import OWN

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
    """As its functions name them; x, y, z where they do not."""
    least, most = op.arity
    if most is None:
        return ["*operands"]
    for function, before in ((op.scalar, 2), (op.infer, 1), (op.decompose, 1)):
        found = list(inspect.signature(function).parameters.values())[before:] if function is not None else []
        last = len(found) - 1
        starred = [p.name for p in found[last:] if p.kind is p.VAR_POSITIONAL]
        if (last == least < most and starred) or (last + 1 == most and not starred):
            return [*(f"[{p.name}]" if i >= least else p.name for i, p in enumerate(found) if p.name not in starred),
                    *(f"[*{name}]" for name in starred)]  # fmt: skip
    return [name if i < least else f"[{name}]" for i, name in enumerate("xyz"[:most])]


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


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
