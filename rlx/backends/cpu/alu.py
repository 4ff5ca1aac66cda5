"""Scalar operations of the kernel IR as LLVM instructions, on any number of lanes; conversions between memory and registers.

Each row of OPS takes (emitter, dtype of the first operand, operands). Integer division and shifts are defined for every
operand, as rlx.ir.kernel states them; LLVM's are not, so they are guarded here.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from rlx.backends.cpu import math
from rlx.backends.cpu.emit import Emitter, V, computed, stored, vector
from rlx.ir.dtype import DType, bf16, f16
from rlx.ir.kernel import Alu, Const

Emit = Callable[..., V]
EmitBy = Callable[..., V | None]


# -- memory <-> registers ------------------------------------------------------------------------------------------


def memory_type(dtype: DType) -> str:
    """The LLVM type to load and store with: 16-bit floats travel as i16, which every target can mask."""
    return "i16" if dtype in (f16, bf16) else stored(dtype)


def from_memory(e: Emitter, raw: V, dtype: DType) -> V:
    """What was loaded, in its compute type: f16 and bf16 to float, any nonzero byte of a bool to true."""
    if dtype == bf16:
        return e.convert("bitcast", e.bin("shl", e.convert("zext", raw, "i32"), e.const(_like(raw, "i32"), 16)), "float")
    if dtype == f16:
        return e.convert("fpext", e.convert("bitcast", raw, "half"), "float")
    if dtype.kind == "b":
        return e.cmp("ne", raw, e.const(raw.ty, 0))
    return raw


def to_memory(e: Emitter, value: V, dtype: DType) -> V:
    """A value in its compute type as it is stored: rounded to nearest even; bool as 0 or 1."""
    if dtype == bf16:
        return math.bf16_bits(e, value)
    if dtype == f16:
        return e.convert("bitcast", e.convert("fptrunc", value, "half"), "i16")
    if dtype.kind == "b":
        return e.convert("zext", value, "i8")
    return value


def rounded(e: Emitter, value: V, dtype: DType) -> V:
    """A float as it would be after a store to and a load from `dtype`: the same unless that is f16 or bf16."""
    return from_memory(e, to_memory(e, value, dtype), dtype) if dtype in (f16, bf16) else value


def constant(e: Emitter, c: Const, lanes: int) -> V:
    """A constant of the IR; f16 and bf16 ones are rounded to their type."""
    value = float(c.dtype.numpy.type(c.value)) if c.dtype in (f16, bf16) else c.value
    return e.const(vector(computed(c.dtype), lanes), value)


# -- operations ----------------------------------------------------------------------------------------------------

# Results of these are representable in a 16-bit float type if their operands are.
EXACT = frozenset({"neg", "abs", "min", "max", "select", "floor", "ceil", "round", "trunc", "bitcast"})


def emit_alu(e: Emitter, node: Alu, args: list[V]) -> V:
    """The value of `node`, given those of its arguments (all scalar, or all of the same number of lanes)."""
    if node.op == "cast":
        return cast(e, args[0], node.args[0].dtype, node.dtype)
    if node.op == "bitcast":
        return bitcast(e, args[0], node.args[0].dtype, node.dtype)
    operand = node.args[0].dtype
    if operand.is_int and node.op in INT_CONSTANT and isinstance(node.args[1], Const):
        direct = INT_CONSTANT[node.op](e, operand, args[0], int(node.args[1].value))
        if direct is not None:
            return direct
    out = OPS[node.op](e, operand, *args)
    return out if node.op in EXACT or not node.dtype.is_float else rounded(e, out, node.dtype)


def cast(e: Emitter, a: V, source: DType, to: DType) -> V:
    """Value-preserving where it can be; float to integer truncates and saturates, NaN gives 0; to bool is x != 0."""
    ty = computed(to)
    if to.kind == "b":
        return a if source.kind == "b" else e.cmp("une" if source.is_float else "ne", a, e.const(a.ty, 0))
    if source.is_float and to.is_float:
        if a.scalar == "double" and to in (f16, bf16):
            a = _to_odd(e, a)
        elif a.scalar != ty:
            a = e.convert("fptrunc" if a.scalar == "double" else "fpext", a, ty)
        return rounded(e, a, to) if source != to else a
    if source.is_float:
        returns = _like(a, ty)
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


def _to_odd(e: Emitter, a: V) -> V:
    """double to float, rounded to odd, so that rounding once more to 16 bits is right: inexact results get a last bit of 1."""
    near = e.convert("fptrunc", a, "float")
    back = e.convert("fpext", near, "double")
    bits = e.convert("bitcast", near, "i32")
    above = e.cmp("ogt", e.intrinsic("fabs", back), e.intrinsic("fabs", a))
    toward_zero = e.bin("sub", bits, e.convert("zext", above, "i32"))
    odd = e.bin("or", toward_zero, e.convert("zext", e.cmp("one", back, a), "i32"))
    return e.convert("bitcast", odd, "float")


def _like(v: V, scalar: str) -> str:
    return vector(scalar, v.lanes)


def _pick(float_op: str, int_op: str, bool_op: str) -> Emit:
    return lambda e, d, a, b: e.bin({"f": float_op, "b": bool_op}.get(d.kind, int_op), a, b)


def _extreme(ordered: str, signed: str, unsigned: str) -> Emit:
    """min or max; of floats NaN if either is: x86's instruction gives the second operand for unordered ones."""

    def emit(e: Emitter, d: DType, a: V, b: V) -> V:
        if d.is_float:
            return e.select(e.cmp("uno", a, a), a, e.select(e.cmp(ordered, a, b), a, b))
        return e.select(e.cmp(signed if d.kind == "i" else unsigned, a, b), a, b)

    return emit


def _compare(float_op: str, signed: str, unsigned: str) -> Emit:
    return lambda e, d, a, b: e.cmp(float_op if d.is_float else signed if d.kind == "i" else unsigned, a, b)


def _unary(intrinsic: str) -> Emit:
    """Of floats; integers are already whole."""
    return lambda e, d, a: e.intrinsic(intrinsic, a) if d.is_float else a


def _abs(e: Emitter, d: DType, a: V) -> V:
    if d.is_float:
        return e.intrinsic("fabs", a)
    return e.select(e.cmp("slt", a, e.const(a.ty, 0)), e.bin("sub", e.const(a.ty, 0), a), a) if d.kind == "i" else a


def _divide(float_op: str, signed: str, unsigned: str, at_minus_one: Emit) -> Emit:
    """div or rem. Integers: 0 for a zero divisor, `at_minus_one(a)` for a signed -1 (LLVM's would trap on INT_MIN)."""

    def emit(e: Emitter, d: DType, a: V, b: V) -> V:
        if d.is_float:
            return e.bin(float_op, a, b) if float_op == "fdiv" else math.fmod(e, a, b)
        zero, one = e.const(a.ty, 0), e.const(a.ty, 1)
        by_zero = e.cmp("eq", b, zero)
        if d.kind == "u":
            return e.select(by_zero, zero, e.bin(unsigned, a, e.select(by_zero, one, b)))
        negates = e.cmp("eq", b, e.const(a.ty, -1))
        out = e.bin(signed, a, e.select(e.bin("or", by_zero, negates), one, b))
        return e.select(by_zero, zero, e.select(negates, at_minus_one(e, a), out))

    return emit


def _divide_by(signed: str, unsigned: str) -> EmitBy:
    return lambda e, d, a, by: None if by in (0, -1) else e.bin(signed if d.kind == "i" else unsigned, a, e.const(a.ty, by))


def _shift(op: Callable[[DType], str]) -> Emit:
    """By the width or more: all bits gone (a negative number shifted right: -1)."""

    def emit(e: Emitter, d: DType, a: V, b: V) -> V:
        last = e.const(a.ty, d.bits - 1)
        inside = e.cmp("ule", b, last)
        if op(d) == "ashr":
            return e.bin("ashr", a, e.select(inside, b, last))
        return e.select(inside, e.bin(op(d), a, e.select(inside, b, last)), e.const(a.ty, 0))

    return emit


def _shift_by(op: Callable[[DType], str]) -> EmitBy:
    return lambda e, d, a, by: e.bin(op(d), a, e.const(a.ty, by)) if 0 <= by < d.bits else None


def _left(d: DType) -> str:
    return "shl"


def _right(d: DType) -> str:
    return "ashr" if d.kind == "i" else "lshr"


def _pow(e: Emitter, d: DType, a: V, b: V) -> V:
    """Integers: by squaring; to a negative power the truncated reciprocal (0 but for 1 and -1)."""
    if d.is_float:
        return math.pow(e, a, b)
    one, zero = e.const(a.ty, 1), e.const(a.ty, 0)
    magnitude = _abs(e, d, b)
    with e.loop(0, d.bits, carried=(one, a, magnitude)) as loop:
        out, square, left = loop.carried
        odd = e.cmp("ne", e.bin("and", left, one), zero)
        loop.next = [e.select(odd, e.bin("mul", out, square), out), e.bin("mul", square, square), e.bin("lshr", left, one)]
    out = loop.results[0]
    if d.kind == "u":
        return out
    unit = e.bin("or", e.cmp("eq", a, one), e.cmp("eq", a, e.const(a.ty, -1)))
    return e.select(e.cmp("slt", b, zero), e.select(unit, out, zero), out)


def _pow_by(e: Emitter, d: DType, a: V, by: int) -> V | None:
    if not 1 <= by <= 4:
        return None
    square = e.bin("mul", a, a) if by > 1 else a
    return {1: a, 2: square}.get(by) or e.bin("mul", square, a if by == 3 else square)


def _minus(e: Emitter, a: V) -> V:
    return e.bin("sub", e.const(a.ty, 0), a)


def _not(e: Emitter, d: DType, a: V) -> V:
    return e.bin("xor", a, e.const(a.ty, True if d.kind == "b" else -1))


def _bits(op: str) -> Emit:
    return lambda e, d, a, b: e.bin(op, a, b)


def _function(of: Callable[[Emitter, V], V]) -> Emit:
    return lambda e, d, a: of(e, a)


OPS: dict[str, Emit] = {
    "add": _pick("fadd", "add", "or"), "sub": _pick("fsub", "sub", "xor"), "mul": _pick("fmul", "mul", "and"),
    "div": _divide("fdiv", "sdiv", "udiv", _minus),
    "rem": _divide("frem", "srem", "urem", lambda e, a: e.const(a.ty, 0)),
    "min": _extreme("olt", "slt", "ult"), "max": _extreme("ogt", "sgt", "ugt"),
    "pow": _pow, "fma": lambda e, d, a, b, c: e.fma(a, b, c) if d.is_float else e.bin("add", e.bin("mul", a, b), c),
    "neg": lambda e, d, a: e.op(a.ty, f"fneg {a}") if d.is_float else _minus(e, a), "abs": _abs,
    "sqrt": _unary("sqrt"),
    "floor": _unary("floor"), "ceil": _unary("ceil"), "round": _unary("roundeven"), "trunc": _unary("trunc"),
    "exp": _function(math.exp), "log": _function(math.log), "sin": _function(math.sin), "cos": _function(math.cos),
    "tanh": _function(math.tanh), "erf": _function(math.erf),
    "lt": _compare("olt", "slt", "ult"), "le": _compare("ole", "sle", "ule"),
    "eq": _compare("oeq", "eq", "eq"), "ne": _compare("une", "ne", "ne"),
    "and": _bits("and"), "or": _bits("or"), "xor": _bits("xor"), "not": _not, "shl": _shift(_left), "shr": _shift(_right),
    "select": lambda e, d, c, a, b: e.select(c, a, b),
}  # fmt: skip

# The same by a constant, where that needs no guard; None: it does.
INT_CONSTANT: dict[str, EmitBy] = {
    "div": _divide_by("sdiv", "udiv"), "rem": _divide_by("srem", "urem"),
    "shl": _shift_by(_left), "shr": _shift_by(_right), "pow": _pow_by,
}  # fmt: skip


# -- reductions ----------------------------------------------------------------------------------------------------


def identity(e: Emitter, op: str, dtype: DType, lanes: int) -> V:
    """What leaves any value as it is under the reduction `op`."""
    low, high = {
        "f": (-inf, inf),
        "i": (-(1 << (dtype.bits - 1)), (1 << (dtype.bits - 1)) - 1),
        "u": (0, (1 << dtype.bits) - 1),
        "b": (False, True),
    }[dtype.kind]
    value = {"add": 0, "or": 0, "mul": 1, "and": -1, "max": low, "min": high}[op]
    return e.const(vector(computed(dtype), lanes), value)


def combine(e: Emitter, op: str, dtype: DType, a: V, b: V) -> V:
    """One step of a reduction, unrounded: a sum of f16 or bf16 values is carried in f32."""
    return OPS[op](e, dtype, a, b)


def across(e: Emitter, op: str, dtype: DType, v: V) -> V:
    """The lanes of `v` reduced to a scalar: halves onto halves, always in the same order."""
    lanes = v.lanes
    while lanes > 1:
        lanes //= 2
        pick = lambda first: f"<{lanes} x i32> <" + ", ".join(f"i32 {first + i}" for i in range(lanes)) + ">"  # noqa: B023, E731
        low, high = (e.op(f"<{lanes} x {v.scalar}>", f"shufflevector {v}, {v.ty} poison, {pick(at)}") for at in (0, lanes))
        v = combine(e, op, dtype, low, high)
    return e.op(v.scalar, f"extractelement {v}, i64 0") if v.ty[0] == "<" else v
