"""Dialects of the C family: the syntax of each language for the kernel IR. c_style renders with one of these tables.

Templates take operands as {0}, {1} …: names, literals or parenthesised expressions. In the entries of `ops`, {t} is the type
of the result, {n} the name of the operands' dtype, {s} the suffix of single-precision functions. Each result is assigned to a
variable of its own type at once, so that integers narrower than `int` wrap.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from rlx.ir.dtype import DTYPES, DType, f32, f64
from rlx.ir.kernel import Buffer, Local
from rlx.records import record

Rows = Mapping[str, Mapping[str, str]]  # scalar op -> kinds of the first operand ("f", "iu", …) -> template
Named = Sequence[tuple[str, Buffer]]
Extents = Sequence[tuple[str, str]]  # grid variables and their extents: a literal or a name


@record
class Dialect:
    """One language. `types`: dtype name -> type of values and variables; `elements`: type in memory, where it
    differs. `loads`, `stores`: dtype name -> template of (buffer, index[, value]), where it is not a plain access.
    `rounded`: dtype name -> template that rounds a value to it, for floats narrower than their arithmetic.

    `local(element type, name, local)`: its declaration. `vary`, `fix`: declarations of a variable and of a constant:
    (type, name, value). `function(name, buffers)`, `points(grid)`: the opening lines of the function and of the grid loops, and
    how many braces they open; None where a backend's own Writer maps the grid."""

    name: str
    prelude: str
    types: Mapping[str, str]
    elements: Mapping[str, str]
    ops: Rows
    loads: Mapping[str, str]
    stores: Mapping[str, str]
    rounded: Mapping[str, str]
    literal: Callable[[int | float, DType], str]
    cast: Callable[[str, DType, DType], str]
    bitcast: Callable[[str, DType, DType], str]
    local: Callable[[str, str, Local], str]
    function: Callable[[str, Named], list[str]] | None = None
    points: Callable[[Extents], tuple[list[str], int]] | None = None
    vary: str = "{0} {1} = {2};"
    fix: str = "const {0} {1} = {2};"
    loop: str = "for ({0} {1} = 0; {1} < {2}; {1}++) {{"
    check: str = "if (!{0}) *status = {1};"

    def apply(self, op: str, args: Sequence[str], operand: DType, result: DType) -> str:
        """The text of a scalar operation on operands of dtype `operand` (for a select: `result`)."""
        kinds = self.ops[op]
        template = next(row for letters, row in kinds.items() if operand.kind in letters)
        suffix = "f" if operand.compute == f32 else ""
        return template.format(*args, t=self.types[result.compute.name], n=operand.compute.name, s=suffix)

    def element(self, dtype: DType) -> str:
        return self.elements.get(dtype.name) or self.types[dtype.name]


# -- the scalar operations of C, C++ and CUDA ----------------------------------------------------------------------

_HELPER = {op: f"rlx_{op}_{{n}}({{0}}, {{1}})" for op in ("div", "rem", "min", "max", "shl", "shr", "pow")}


def _function(name: str) -> dict[str, str]:
    return {"f": f"{name}{{s}}({{0}})"}


OPS: Rows = {
    "add": {"fiu": "{0} + {1}", "b": "{0} | {1}"},
    "sub": {"fiu": "{0} - {1}", "b": "{0} ^ {1}"},
    "mul": {"fiu": "{0} * {1}", "b": "{0} & {1}"},
    "div": {"f": "{0} / {1}", "iu": _HELPER["div"]},
    "rem": {"f": "fmod{s}({0}, {1})", "iu": _HELPER["rem"]},
    "min": {"fiu": _HELPER["min"], "b": "{0} & {1}"},
    "max": {"fiu": _HELPER["max"], "b": "{0} | {1}"},
    "pow": {"f": "pow{s}({0}, {1})", "iu": _HELPER["pow"]},
    "fma": {"f": "fma{s}({0}, {1}, {2})", "iu": "({t}){0} * {1} + {2}"},
    "neg": {"fiu": "-{0}"},
    "abs": {"f": "fabs{s}({0})", "iu": "rlx_abs_{n}({0})"},
    **{op: _function(op) for op in ("sqrt", "exp", "log", "sin", "cos", "tanh", "erf")},
    **{op: _function(op) | {"iu": "{0}"} for op in ("floor", "ceil", "trunc")},
    "round": {"f": "rint{s}({0})", "iu": "{0}"},  # to nearest even, as the environment rounds
    "nearest": {"f": "(int32_t)rint{s}({0})"},
    "lt": {"fiub": "{0} < {1}"}, "le": {"fiub": "{0} <= {1}"}, "eq": {"fiub": "{0} == {1}"}, "ne": {"fiub": "{0} != {1}"},
    "and": {"iub": "{0} & {1}"}, "or": {"iub": "{0} | {1}"}, "xor": {"iub": "{0} ^ {1}"},
    "not": {"iu": "~{0}", "b": "!{0}"},
    "shl": {"iu": _HELPER["shl"]}, "shr": {"iu": _HELPER["shr"]},
    "select": {"fiub": "{0} ? {1} : {2}"},
}  # fmt: skip
NARROW = tuple(d.name for d in DTYPES.values() if d.is_float and d.bits < 32)
TYPES = {
    "f64": "double", "f32": "float", **dict.fromkeys(NARROW, "float"), "bool": "bool",
    **{name: f"{'u' * (d.kind == 'u')}int{d.bits}_t" for name, d in DTYPES.items() if d.is_int},
    "index": "int64_t",
}  # fmt: skip
ELEMENTS = {**{name: f"uint{DTYPES[name].bits}_t" for name in NARROW}, "bool": "uint8_t"}
LOADS = {**{name: f"rlx_of_bits_{name}({{0}}[{{1}}])" for name in NARROW}, "bool": "{0}[{1}] != 0"}
STORES = {name: f"{{0}}[{{1}}] = rlx_bits_{name}({{2}});" for name in NARROW}
ROUNDED = {name: f"rlx_of_bits_{name}(rlx_bits_{name}({{0}}))" for name in NARROW}


def literal(value: int | float, dtype: DType) -> str:
    """A constant: floats in hexadecimal, which is exact; the least integer as a difference, since its digits alone do not fit."""
    if dtype.kind == "b":
        return "true" if value else "false"
    if dtype.is_float:
        with np.errstate(over="ignore"):
            number = float(dtype.numpy.type(value))
        if math.isnan(number):
            return "NAN"
        text = "INFINITY" if math.isinf(number) else abs(number).hex() + ("f" if dtype.compute == f32 else "")
        return f"(-{text})" if math.copysign(1, number) < 0 else text
    suffix = ("u" if dtype.kind == "u" else "") + (
        "ll" if dtype.bits == 64 and (dtype.kind == "u" or abs(value) >= 1 << 31) else ""
    )
    if value == -(1 << 63) or value == -(1 << 31):
        return f"(-{-value - 1}{suffix} - 1)"
    return f"(-{-value}{suffix})" if value < 0 else f"{value}{suffix}"


def cast(a: str, source: DType, to: DType) -> str:
    """Convert a value from dtype `source` to `to`. Both are held in their compute dtypes; narrow floats are rounded."""
    if to.kind == "b":
        return f"{a} != 0"
    if source.is_float and to.is_int:
        return f"rlx_to_{to.name}({a})"
    if to.name in ROUNDED:
        single = f"rlx_odd({a})" if source == f64 else f"(float){a}"
        return a if source == to else ROUNDED[to.name].format(single)
    return a if source.compute == to else f"({TYPES[to.name]}){a}"


def bitcast(a: str, source: DType, to: DType) -> str:
    bits = f"rlx_bits_{source.name}({a})" if source.is_float else f"(uint{source.bits}_t){a}"
    return f"rlx_of_bits_{to.name}({bits})" if to.is_float else f"{bits} != 0" if to.kind == "b" else f"({TYPES[to.name]}){bits}"


def prelude(*own: str) -> str:
    """The dialect's own lines, then the helper functions that the tables above use."""
    return "\n".join([*own, (Path(__file__).parent / "c_prelude.h").read_text()])


# -- C -------------------------------------------------------------------------------------------------------------

STACK_BYTES = 1 << 16  # largest local on the stack; larger ones are thread-local


def _c_function(name: str, buffers: Named) -> list[str]:
    lines = [f"void {name}(void *const *args, int32_t *status) {{", "  (void)args, (void)status;"]
    for at, (argument, b) in enumerate(buffers):
        element = ELEMENTS.get(b.dtype.name) or TYPES[b.dtype.name]
        lines.append(f"  {'' if b.writable else 'const '}{element} *{argument} = args[{at}];")
    return lines


def _c_points(grid: Extents) -> tuple[list[str], int]:
    return [C.loop.format(TYPES["index"], var, extent) for var, extent in grid], len(grid)


def _c_local(element: str, name: str, local: Local) -> str:
    where = "static _Thread_local " if local.size * local.dtype.itemsize > STACK_BYTES else ""
    return f"{where}{element} {name}[{max(1, local.size)}];"


# The grid becomes nested loops; one function call runs a kernel. FLAGS pin down what C leaves to the compiler, as the IR defines
# it: signed integers wrap, products and sums are rounded separately, buffers may overlap, and functions do not set errno.
FLAGS = ("-std=gnu11", "-fwrapv", "-ffp-contract=off", "-fno-strict-aliasing", "-fno-math-errno")
C = Dialect(
    "c", prelude(*(f"#include <{h}.h>" for h in ("math", "stdbool", "stdint", "string")), "#define RLX_FN static inline",
                 "typedef int64_t rlx_index;", "typedef uint64_t rlx_uindex;"),
    TYPES, ELEMENTS, OPS, LOADS, STORES, ROUNDED, literal, cast, bitcast, _c_local, _c_function, _c_points,
)  # fmt: skip
