"""Scalar operations of the kernel IR as LLVM instructions, on any number of lanes. Also conversions between memory and registers.

Each entry of OPS takes (emitter, dtype of the first operand, operands). In rlx.ir.kernel, integer division and shifts are defined
for all operands. In LLVM they are not, so they are guarded here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import zip_longest
from math import inf

from rlx.host import math
from rlx.host.emit import Emitter, V, computed, stored, vector
from rlx.ir.dtype import DType, bf16, f8e4m3, f8e5m2, f16
from rlx.ir.kernel import Alu, Const, Expr

Emit = Callable[..., V]


# -- memory <-> registers ------------------------------------------------------------------------------------------


def memory_type(dtype: DType) -> str:
    """The LLVM type of loads and stores: i16 for 16-bit floats, because every target can mask it; i8 for 8-bit floats."""
    return f"i{dtype.bits}" if dtype.is_narrow else stored(dtype)


def from_memory(e: Emitter, raw: V, dtype: DType) -> V:
    """Convert a loaded value to its compute type: f16, bf16 and f8 to float; a nonzero byte of a bool to true."""
    if dtype in (f8e4m3, f8e5m2):
        return math.f8_value(e, raw, dtype == f8e4m3)
    if dtype == bf16:
        return e.convert("bitcast", e.bin("shl", e.convert("zext", raw, "i32"), 16), "float")
    if dtype == f16:
        return math.f16_value(e, raw)
    return e.cmp("ne", raw, 0) if dtype.kind == "b" else raw


def to_memory(e: Emitter, value: V, dtype: DType) -> V:
    """Convert a value from its compute type to its type in memory: floats are rounded to nearest even, bool becomes 0 or 1."""
    if dtype in (f8e4m3, f8e5m2):
        return math.f8_bits(e, value, dtype == f8e4m3)
    if dtype == bf16 and {"neon", "bf16"} <= set(e.features):
        return e.convert("bitcast", e.convert("fptrunc", value, "bfloat"), "i16")
    if dtype == bf16:
        by_hardware = value.lanes in (8, 16, 32) and {"avx512bf16", "avx512vl"} <= set(e.features)
        return math.bf16_bits_by_hardware(e, value) if by_hardware else math.bf16_bits(e, value)
    if dtype == f16:
        return math.f16_bits(e, value)
    return e.convert("zext", value, "i8") if dtype.kind == "b" else value


def rounded(e: Emitter, value: V, dtype: DType) -> V:
    """A float rounded as by a store to and a load from `dtype`. Unchanged unless `dtype` is narrow."""
    return from_memory(e, to_memory(e, value, dtype), dtype) if dtype.is_narrow else value


def constant(e: Emitter, c: Const, lanes: int) -> V:
    """A constant of the IR. Constants of narrow float types are rounded to their type."""
    value = float(c.dtype.numpy.type(c.value)) if c.dtype.is_narrow else c.value
    return e.const(vector(computed(c.dtype), lanes), value)


# -- operations ----------------------------------------------------------------------------------------------------

# If the operands of these are representable in a narrow float type, so is the result.
EXACT = frozenset({"neg", "abs", "min", "max", "select", "floor", "ceil", "round", "trunc", "bitcast"})
# Integer operations whose second operand may need a guard. They take it as a Python int if it is constant.
GUARDED = frozenset({"div", "rem", "shl", "shr", "pow"})


def emit_alu(e: Emitter, node: Alu, args: list[V]) -> V:
    """Emit `node`. `args`: the values of its arguments (all scalar, or all with the same number of lanes)."""
    if node.op == "cast":
        return cast(e, args[0], node.args[0].dtype, node.dtype, _limits(node.args[0]))
    if node.op == "bitcast":
        return bitcast(e, args[0], node.args[0].dtype, node.dtype)
    operand = node.args[0].dtype
    if operand.is_int and node.op in GUARDED and isinstance(node.args[1], Const):
        out = OPS[node.op](e, operand, args[0], int(node.args[1].value))
    else:
        out = OPS[node.op](e, operand, *args)
    return out if node.op in EXACT or not node.dtype.is_float else rounded(e, out, node.dtype)


def _limits(x: Expr) -> tuple[float, float]:
    """The least and the greatest value of an expression, as far as constants limit it."""
    low, high = -inf, inf
    while isinstance(x, Alu) and x.op in ("min", "max") and isinstance(bound := x.args[1], Const):
        if x.op == "max":
            low = min(max(low, float(bound.value)), high)
        else:
            high = max(min(high, float(bound.value)), low)
        x = x.args[0]
    return low, high


def cast(e: Emitter, a: V, source: DType, to: DType, limits: tuple[float, float] = (-inf, inf)) -> V:
    """Convert between dtypes. Float to integer truncates and saturates, and gives 0 for NaN; to bool is x != 0. `limits`: between
    which `a` is known to be, if it is a number."""
    ty = computed(to)
    if to.kind == "b":
        return a if source.kind == "b" else e.cmp("une" if source.is_float else "ne", a, 0)
    if source.is_float and to.is_float:
        if a.scalar == "double" and to.is_narrow:
            a = _to_odd(e, a)
        elif a.scalar != ty:
            a = e.convert("fptrunc" if a.scalar == "double" else "fpext", a, ty)
        return rounded(e, a, to) if source != to else a
    if source.is_float and to.bits <= 32:
        return _to_integer(e, a, to, limits)
    if source.is_float:
        returns = vector(ty, a.lanes)
        return e.intrinsic("fptosi.sat" if to.kind == "i" else "fptoui.sat", a, suffix=(returns, a.ty), returns=returns)
    if to.is_float:
        return rounded(e, e.convert("sitofp" if source.kind == "i" else "uitofp", a, ty), to)
    if source.kind == "b" or source.bits < to.bits:
        return e.convert("sext" if source.kind == "i" else "zext", a, ty)
    return e.convert("trunc", a, ty) if source.bits > to.bits else a


def bitcast(e: Emitter, a: V, source: DType, to: DType) -> V:
    raw = to_memory(e, a, source)
    if raw.scalar != memory_type(to):
        raw = e.convert("bitcast", raw, memory_type(to))
    return from_memory(e, raw, to)


def _to_integer(e: Emitter, a: V, to: DType, limits: tuple[float, float]) -> V:
    """A saturating conversion: clamp in the float type, then convert. LLVM's own would be scalarised for vectors."""
    signed = to.kind == "i"
    span = 1 << (to.bits - signed)
    exact = a.scalar == "double" or to.bits < 32  # else the largest float below span is more than 1 away
    least, most = -span if signed else 0, span - 1 if exact else span - (span >> 24)
    inside = a
    if limits[0] < least:
        inside = e.select(e.cmp("ogt", a, low := e.const(a.ty, least)), a, low)
    if limits[1] > most:
        inside = e.select(e.cmp("olt", inside, high := e.const(a.ty, most)), inside, high)
    out = e.convert("fptosi" if signed or to.bits < 32 else "fptoui", inside, "i32")
    if not exact:
        out = e.select(e.cmp("oge", a, float(span)), e.const(out.ty, span - 1), out)
    out = e.select(e.cmp("uno", a, a), e.const(out.ty, 0), out)
    return out if to.bits == 32 else e.convert("trunc", out, computed(to))


def _to_odd(e: Emitter, a: V) -> V:
    """double to float, rounded to odd: inexact results get a last bit of 1. Then a second rounding to 16 bits is correct."""
    near = e.convert("fptrunc", a, "float")
    back = e.convert("fpext", near, "double")
    bits = e.convert("bitcast", near, "i32")
    above = e.cmp("ogt", e.intrinsic("fabs", back), e.intrinsic("fabs", a))
    toward_zero = e.bin("sub", bits, e.convert("zext", above, "i32"))
    odd = e.bin("or", toward_zero, e.convert("zext", e.cmp("one", back, a), "i32"))
    return e.convert("bitcast", odd, "float")


def _by_kind(*names: str, emit: Callable[[Emitter, str, V, V], V] = Emitter.bin) -> Emit:
    """An instruction selected by the operands' kind. `names`: for floats, signed integers, unsigned integers, bool; the last one
    also serves the remaining kinds."""
    table = dict(zip_longest("fiub", names, fillvalue=names[-1]))
    return lambda e, d, a, b: emit(e, table[d.kind], a, b)


def _extreme(*predicates: str) -> Emit:
    """min or max. For floats, NaN if either operand is NaN; x86's instruction returns the second operand if they are unordered.
    The first operand, which is the accumulator in a reduction, has the shorter dependency chain."""
    compare = _by_kind(*predicates, emit=Emitter.cmp)

    def emit(e: Emitter, d: DType, a: V, b: V) -> V:
        if d.is_float and _is_number(a):
            a, b = b, a
        better = e.select(compare(e, d, b, a), b, a)
        return e.select(e.cmp("uno", b, b), b, better) if d.is_float and not _is_number(b) else better

    return emit


def _is_number(v: V) -> bool:
    """Whether `v` is a finite constant, equal in all lanes."""
    digits = v.text.removeprefix(f"splat({v.scalar} ")
    if digits.startswith("0xH"):
        return int(digits[3:7], 16) & 0x7C00 != 0x7C00
    return digits.startswith("0x") and int(digits[2:5], 16) & 0x7FF != 0x7FF


def _rounding(intrinsic: str) -> Emit:
    """A rounding of floats. Integers are unchanged."""
    return lambda e, d, a: e.intrinsic(intrinsic, a) if d.is_float else a


def _nearest(e: Emitter, d: DType, a: V) -> V:
    """x86 converts so in one instruction, as the mode of its unit says."""
    if not any(f.startswith("triple=x86") for f in e.features):
        return e.convert("fptosi", e.intrinsic("roundeven", a), "i32")
    returns = vector("i32", a.lanes)
    return e.intrinsic("lrint", a, suffix=(returns, a.ty), returns=returns)


def _minus(e: Emitter, d: DType, a: V) -> V:
    return e.op(a.ty, f"fneg {a}") if d.is_float else e.bin("sub", e.const(a.ty, 0), a)


def _abs(e: Emitter, d: DType, a: V) -> V:
    if d.is_float:
        return e.intrinsic("fabs", a)
    return e.select(e.cmp("slt", a, 0), _minus(e, d, a), a) if d.kind == "i" else a


def _divide(of_floats: str, signed: str, unsigned: str, at_minus_one: Emit) -> Emit:
    """div or rem. Integers: 0 for a zero divisor; `at_minus_one(a)` for a signed divisor of -1 (LLVM's traps on INT_MIN)."""

    def emit(e: Emitter, d: DType, a: V, b: V | int) -> V:
        op = {"f": of_floats, "i": signed}.get(d.kind, unsigned)
        if d.is_float or (isinstance(b, int) and b not in (0, -1)):
            return e.bin(op, a, b)
        b, zero, one = e.const(a.ty, b), e.const(a.ty, 0), e.const(a.ty, 1)
        by_zero = e.cmp("eq", b, zero)
        if d.kind == "u":
            return e.select(by_zero, zero, e.bin(unsigned, a, e.select(by_zero, one, b)))
        negates = e.cmp("eq", b, -1)
        out = e.bin(signed, a, e.select(e.bin("or", by_zero, negates), one, b))
        return e.select(by_zero, zero, e.select(negates, at_minus_one(e, d, a), out))

    return emit


def _shift(signed: str, unsigned: str) -> Emit:
    """A shift. By the width or more it gives 0, or -1 for a negative number shifted right."""

    def emit(e: Emitter, d: DType, a: V, b: V | int) -> V:
        op = signed if d.kind == "i" else unsigned
        if isinstance(b, int) and 0 <= b < d.bits:
            return e.bin(op, a, b)
        b, last = e.const(a.ty, b), e.const(a.ty, d.bits - 1)
        inside = e.cmp("ule", b, last)
        out = e.bin(op, a, e.select(inside, b, last))
        return out if op == "ashr" else e.select(inside, out, e.const(a.ty, 0))

    return emit


def _integer_pow(e: Emitter, d: DType, a: V, b: V | int) -> V:
    """Exponentiation by squaring. A negative power gives the truncated reciprocal, which is 0 except for 1 and -1."""
    if isinstance(b, int) and 1 <= b <= 4:
        square = e.bin("mul", a, a) if b > 1 else a
        return square if b <= 2 else e.bin("mul", square, a if b == 3 else square)
    b, one, zero = e.const(a.ty, b), e.const(a.ty, 1), e.const(a.ty, 0)
    with e.loop(0, d.bits, carried=(one, a, _abs(e, d, b))) as loop:
        out, square, left = loop.carried
        odd = e.cmp("ne", e.bin("and", left, one), zero)
        loop.next = [e.select(odd, e.bin("mul", out, square), out), e.bin("mul", square, square), e.bin("lshr", left, one)]
    out = loop.results[0]
    if d.kind == "u":
        return out
    unit = e.bin("or", e.cmp("eq", a, one), e.cmp("eq", a, -1))
    return e.select(e.cmp("slt", b, zero), e.select(unit, out, zero), out)


def _function(name: str) -> Emit:
    """An elementary function: rlx.host.math for floats, libm for doubles."""
    own = getattr(math, name)
    return lambda e, d, *args: math.libm(e, name, *args) if args[0].scalar == "double" else own(e, *args)


OPS: dict[str, Emit] = {
    "add": _by_kind("fadd", "add", "add", "or"), "sub": _by_kind("fsub", "sub", "sub", "xor"),
    "mul": _by_kind("fmul", "mul", "mul", "and"),
    "div": _divide("fdiv", "sdiv", "udiv", _minus),
    "rem": _divide("frem", "srem", "urem", lambda e, d, a: e.const(a.ty, 0)),
    "min": _extreme("olt", "slt", "ult"), "max": _extreme("ogt", "sgt", "ugt"),
    "fma": lambda e, d, a, b, c: e.fma(a, b, c) if d.is_float else e.bin("add", e.bin("mul", a, b), c),
    "neg": _minus, "abs": _abs, "sqrt": _rounding("sqrt"),
    "floor": _rounding("floor"), "ceil": _rounding("ceil"), "round": _rounding("roundeven"), "trunc": _rounding("trunc"),
    "nearest": _nearest,
    "pow": lambda e, d, a, b: (_function("pow") if d.is_float else _integer_pow)(e, d, a, b),
    **{name: _function(name) for name in ("exp", "log", "sin", "cos", "tanh", "erf")},
    "lt": _by_kind("olt", "slt", "ult", emit=Emitter.cmp), "le": _by_kind("ole", "sle", "ule", emit=Emitter.cmp),
    "eq": _by_kind("oeq", "eq", emit=Emitter.cmp), "ne": _by_kind("une", "ne", emit=Emitter.cmp),
    "and": _by_kind("and"), "or": _by_kind("or"), "xor": _by_kind("xor"),
    "not": lambda e, d, a: e.bin("xor", a, True if d.kind == "b" else -1),
    "shl": _shift("shl", "shl"), "shr": _shift("ashr", "lshr"),
    "select": lambda e, d, c, a, b: e.select(c, a, b),
}  # fmt: skip


# -- reductions ----------------------------------------------------------------------------------------------------


def identity(e: Emitter, op: str, dtype: DType, lanes: int) -> V:
    """The identity element of the reduction `op`."""
    span = 1 << (dtype.bits - (dtype.kind == "i"))
    low, high = {"f": (-inf, inf), "i": (-span, span - 1), "u": (0, span - 1), "b": (False, True)}[dtype.kind]
    value = {"add": 0, "or": 0, "mul": 1, "and": -1, "max": low, "min": high}[op]
    return e.const(vector(computed(dtype), lanes), value)


def combine(e: Emitter, op: str, dtype: DType, a: V, b: V) -> V:
    """One step of a reduction, without rounding: f16 and bf16 values accumulate in f32."""
    return OPS[op](e, dtype, a, b)


def best_number(e: Emitter, op: str, a: V, b: V) -> V:
    """max or min of floats, where `a` is not NaN. If `b` is NaN, the result is `a`."""
    return e.select(e.cmp("ogt" if op == "max" else "olt", b, a), b, a)


def across(e: Emitter, op: str, dtype: DType, v: V, step: Callable[[V, V], V] | None = None) -> V:
    """Reduce the lanes of `v` to a scalar, by `step` (default: `combine`). A tree reduction of halves, in a fixed order."""
    step, lanes = step or partial(combine, e, op, dtype), v.lanes
    while lanes > 1:
        lanes //= 2
        v = step(e.shuffle(v, range(lanes)), e.shuffle(v, range(lanes, 2 * lanes)))
    return e.op(v.scalar, f"extractelement {v}, i64 0") if v.ty[0] == "<" else v


def prefixes(e: Emitter, op: str, dtype: DType, v: V) -> V:
    """Inclusive prefix reduction of the lanes, in log2(lanes) steps: each step combines the last lane of the lower half of every
    group with all lanes of its upper half (J. Sklansky, 1960). Other schemes shift all lanes, which x86 cannot do in one
    instruction."""
    neutral, step = identity(e, op, dtype, v.lanes), 1
    while step < v.lanes:
        lower = e.shuffle(neutral, [v.lanes + (i & -step) - 1 if i & step else i for i in range(v.lanes)], v)
        v, step = combine(e, op, dtype, lower, v), 2 * step
    return v
