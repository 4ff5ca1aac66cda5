"""CUDA C++ as a dialect of the shared C-style renderer: types without headers, conversions by PTX, wrapping signed arithmetic."""

from __future__ import annotations

from pathlib import Path

from rlx.backends.shared import c_dialect
from rlx.backends.shared.c_dialect import ELEMENTS, OPS, TYPES, Dialect, Rows, literal
from rlx.ir.dtype import DType, f32, index_
from rlx.ir.kernel import Alu, Expr, Local, Store
from rlx.records import record

NARROW = ("f16", "bf16")  # converted by one instruction; f8 by the helpers of c_prelude.h
WRAPPING = ("add", "sub", "mul")
SHORT = {"div": "rlx_short_quotient", "rem": "rlx_short_remainder"}  # of integers of 8 and 16 bits

_OWN: Rows = {
    **{op: {**OPS[op], "i": f"rlx_{op}_{{n}}({{0}}, {{1}})"} for op in WRAPPING},
    **{op: {**OPS[op], "f": f"rlx_{op}({{0}}, {{1}})"} for op in ("min", "max")},
    "neg": {"f": "-{0}", "u": "-{0}", "i": "rlx_sub_{n}(0, {0})"},
    "fma": {"f": "fma{s}({0}, {1}, {2})", "iu": "rlx_fma_{n}({0}, {1}, {2})"},
}
_ROWS: Rows = {**OPS, **{op: dict(sorted(rows.items(), key=lambda row: len(row[0]))) for op, rows in _OWN.items()}}


@record
class CudaDialect(Dialect):
    def apply(self, op: str, args: list[str] | tuple[str, ...], operand: DType, result: DType) -> str:  # type: ignore[override]
        """Positions never overflow, so they use the plain operators, which the compiler optimises better."""
        if operand == index_ and op in WRAPPING:
            return OPS[op]["fiu"].format(*args)
        if op in SHORT and operand.is_int and operand.itemsize <= 2:
            return f"({TYPES[operand.name]}){SHORT[op]}({args[0]}, {args[1]})"
        return super().apply(op, args, operand, result)


def _cast(a: str, source: DType, to: DType) -> str:
    if to.name in NARROW and source != to:
        single = f"rlx_odd({a})" if source.name == "f64" else f"(float){a}"
        return f"rlx_round_{to.name}({single})"
    if to == index_ and source.name in ("u32", "i64", "u64"):
        return f"rlx_position({a})"
    return c_dialect.cast(a, source, to)


def _local(element: str, name: str, local: Local) -> str:
    return f"{element} {name}[{max(1, local.size)}];"


def unrounded(s: Store) -> Expr:
    """The stored value before casts that round it just as the store does."""
    x, same = s.value, (s.buffer.dtype, f32) if s.buffer.dtype.is_float else ()
    while isinstance(x, Alu) and x.op == "cast" and x.dtype in same and x.args[0].dtype in same:
        x = x.args[0]
    return x


def prelude() -> str:
    """Helper functions; `RLX_INDEX` (int or long long) is defined before."""
    own = (Path(__file__).parent / "prelude.h").read_text()
    return c_dialect.prelude(own) + (Path(__file__).parent / "teams.h").read_text()


CUDA = CudaDialect(
    "cuda", "", {**TYPES, "index": "rlx_index"}, ELEMENTS, _ROWS,
    {**c_dialect.LOADS, **{n: f"rlx_wide_{n}({{0}}[{{1}}])" for n in NARROW}},
    {**c_dialect.STORES, **{n: f"{{0}}[{{1}}] = rlx_near_{n}({{2}});" for n in NARROW}},
    {**c_dialect.ROUNDED, **{n: f"rlx_round_{n}({{0}})" for n in NARROW}},
    literal, _cast, c_dialect.bitcast, _local, check="if (!{0}) rlx_fail(status, {1});",
)  # fmt: skip

__all__ = ["CUDA", "prelude", "unrounded"]
