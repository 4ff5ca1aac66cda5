"""Arithmetic in f16, on processors that have it (AVX512-FP16, aarch64's fullfp16), where the bits of the result are the same.

Kernels compute f16 values in f32 and round what they store. The sum, difference, product, quotient or square root of f16 numbers,
rounded to f32 and then to f16, is the exact one rounded to f16: f32 has 24 digits, and 2 * 11 + 2 are enough. So one such
operation may as well be done in f16, without conversions. A second one on its result may not, since f32 keeps digits that f16
loses, unless the graph rounds in between. Negation, selection and extremes commute with rounding. Sums of contractions and
reductions stay in f32, since instructions of f16 would round each step.
"""

from __future__ import annotations

import struct

from rlx.backends.cpu.scope import Scope, access
from rlx.host import alu
from rlx.host.emit import V, vector
from rlx.ir.dtype import bool_, f16, f32
from rlx.ir.kernel import Alu, Const, Expr, Load
from rlx.ir.nest import postorder

FEATURES = frozenset({"avx512fp16", "fullfp16"})
# A value in f16 is that in f32 exactly, or rounded; TINY: rounded, and maybe to 0 what is a small number of either sign in f32.
EXACT, ROUNDED, TINY = range(3)
STEPS = {"add": ROUNDED, "sub": ROUNDED, "sqrt": ROUNDED, "mul": TINY, "div": TINY}
COMPARISONS, LOGIC = frozenset({"lt", "le", "eq", "ne"}), frozenset({"and", "or", "xor", "not"})


def in_half(value: Expr, scope: Scope) -> V | None:
    """The bits (i16) of an expression to store as f16, computed in f16. None: it has to be computed in f32."""
    if not FEATURES.intersection(scope.e.features) or not isinstance(value, Alu) or value.dtype not in (f16, f32):
        return None
    known: dict[int, int | None] = {}
    for node in postorder(value, known, _args):
        known[id(node)] = _known(node, [known[id(x)] for x in _args(node)])
    return None if known[id(value)] is None else scope.e.convert("bitcast", _value(value, scope), "i16")


def _args(node: Expr) -> tuple[Expr, ...]:
    return node.args if isinstance(node, Alu) else ()


def _known(node: Expr, args: list[int | None]) -> int | None:
    if isinstance(node, Load):
        return EXACT if node.buffer.dtype == f16 else None
    if isinstance(node, Const):
        return EXACT if node.dtype in (f16, f32) and _fits(float(node.value)) else None
    if not isinstance(node, Alu) or None in args:
        return None
    worst = max(x for x in args if x is not None)
    if node.op in COMPARISONS or node.op in LOGIC:
        return EXACT if worst == EXACT and (node.op in COMPARISONS or node.dtype == bool_) else None
    if node.dtype not in (f16, f32) or (node.op == "cast" and node.args[0].dtype not in (f16, f32)):
        return None
    if node.op == "cast":
        return EXACT if node.dtype == f16 else worst
    if node.op in STEPS:
        return STEPS[node.op] if worst == EXACT else None
    if node.op in ("min", "max"):  # of zeros, the one with the other sign might be taken
        return worst if worst != TINY else None
    return worst if node.op in ("neg", "abs") or (node.op == "select" and args[0] == EXACT) else None


def _fits(value: float) -> bool:
    try:
        return struct.unpack("<e", struct.pack("<e", value))[0] == value
    except OverflowError:
        return False


def _value(root: Expr, scope: Scope) -> V:
    """The value in f16, or an i1."""
    memo: dict[int, V] = {}
    for node in postorder(root, memo, lambda x: () if scope.spreads(x) else _args(x)):
        memo[id(node)] = _step(node, scope, memo)
    return memo[id(root)]


def _step(node: Expr, scope: Scope, memo: dict[int, V]) -> V:
    e = scope.e
    if isinstance(node, Const):
        return e.const(vector("half", scope.lanes), float(node.value))
    if scope.spreads(node):
        return e.splat(_value(node, scope.scalar), scope.lanes)
    if isinstance(node, Load):
        return e.convert("bitcast", access(node, scope), "half")
    assert isinstance(node, Alu)
    args = [memo[id(x)] for x in node.args]
    return args[0] if node.op == "cast" else alu.OPS[node.op](e, node.args[0].dtype, *args)
