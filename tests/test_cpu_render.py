"""Loop kernels on the CPU against numpy: every statement of the kernel IR, every dtype, odd sizes, edge values."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import numpy as np
import pytest
from kernel_runs import TARGETS, apply, apply_all, pointwise, run

import rlx
from rlx.backends.cpu.render import render, task_count
from rlx.backends.cpu.target import host_target, target_for
from rlx.compiler import lower
from rlx.errors import CompileError
from rlx.host.jit import assembly, compile_object
from rlx.ir.dtype import DTYPES, DType, as_dtype, bf16, bool_, f8e4m3, f8e5m2, f16, f32, f64, i8, i32, i64, u8
from rlx.ir.kernel import (
    Buffer,
    Carry,
    Check,
    Contract,
    Expr,
    Kernel,
    Let,
    Load,
    Local,
    Loop,
    Operand,
    Reduce,
    Store,
    Var,
    const,
    k,
    linear,
)  # fmt: skip

SIZES = (1, 2, 7, 15, 16, 17, 33, 100)
INTS = [d for d in DTYPES.values() if d.is_int]
FLOATS = [f64, f32, f16, bf16]
EIGHT_BITS = [f8e4m3, f8e5m2]
STORED = [*INTS, *FLOATS, *EIGHT_BITS, bool_]
RNG = np.random.default_rng(7)
every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


def vector(var: Var, extent: int, *body, **facts) -> Loop:
    return Loop(var, extent, tuple(body), vector=True, **facts)


def flat(*terms: tuple[Expr, int]) -> Expr:
    return linear(terms)


def sample(dtype: DType, size: int) -> np.ndarray:
    """Edge values of a dtype, then random ones."""
    if dtype.kind == "b":
        return RNG.integers(0, 2, size).astype(bool)
    if dtype.is_int:
        info = np.iinfo(dtype.numpy)
        edges = [0, 1, 2, 3, 5, info.max, info.min, info.max - 1, info.min + 1, dtype.bits - 1, dtype.bits, dtype.bits + 1, 64]
        edges += [-1, -2, -3, -dtype.bits] if dtype.kind == "i" else []
        some = np.array([e for e in edges if info.min <= e <= info.max], dtype.numpy)
        return np.concatenate([some, RNG.integers(info.min, info.max, max(0, size - len(some)), dtype.numpy, True)])[:size]
    edges = np.array(
        [0, -0.0, 1, -1, 0.5, -2.5, 3.5, np.nan, np.inf, -np.inf, 1e-40, 300, -300, 6e4, 3e9, -3e9, 1e19, -1e19, 2e38]
    )
    with np.errstate(over="ignore"):
        return np.concatenate([edges, RNG.normal(0, 50, max(0, size - len(edges)))]).astype(dtype.numpy)[:size]


def same(got: np.ndarray, want: np.ndarray) -> None:
    """Equal bits, but for the payload of a NaN."""
    want = want.astype(got.dtype)
    wide = got.dtype.kind in "fV" and got.dtype != np.float64
    a, b = (x.astype(np.float32) if wide else x for x in (got, want))
    if a.dtype.kind != "f":
        np.testing.assert_array_equal(a, b)
        return
    np.testing.assert_array_equal(np.isnan(a), np.isnan(b))
    number = ~np.isnan(a)
    np.testing.assert_array_equal(a[number], b[number])
    np.testing.assert_array_equal(np.signbit(a[number]), np.signbit(b[number]))


# -- scalar operations ---------------------------------------------------------------------------------------------


def exact(dtype: DType, function, *arrays: np.ndarray) -> np.ndarray:
    """An integer function computed with Python's integers and wrapped."""
    wrapped = [function(*map(int, row)) % 2**dtype.bits for row in zip(*arrays)]
    return np.array([w - 2**dtype.bits if dtype.kind == "i" and w >> (dtype.bits - 1) else w for w in wrapped], dtype.numpy)


def truncated(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def shifted(bits: int, a: int, b: int) -> int:
    return a >> min(b % 2**bits, 4 * bits)


def power(a: int, b: int) -> int:
    if b < 0:
        return {1: 1, -1: -1 if b % 2 else 1}.get(a, 0)
    return pow(a, b, 2**64)


INT_OPS = {
    "add": lambda d: lambda a, b: a + b,
    "sub": lambda d: lambda a, b: a - b,
    "mul": lambda d: lambda a, b: a * b,
    "div": lambda d: truncated,
    "rem": lambda d: lambda a, b: a - b * truncated(a, b) if b else 0,
    "min": lambda d: min,
    "max": lambda d: max,
    "and": lambda d: lambda a, b: a & b,
    "or": lambda d: lambda a, b: a | b,
    "xor": lambda d: lambda a, b: a ^ b,
    "shl": lambda d: lambda a, b: a << (b % 2**d.bits) if b % 2**d.bits < d.bits else 0,
    "shr": lambda d: lambda a, b: shifted(d.bits, a, b),
    "pow": lambda d: power,
}


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_integer_operations_wrap_and_never_trap(dtype: DType) -> None:
    values = sample(dtype, 23)
    a, b = (np.array(x, dtype.numpy) for x in zip(*itertools.product(values, values)))
    got = apply_all([getattr(k, name) for name in INT_OPS], [dtype] * len(INT_OPS), a, b)
    for name, out in zip(INT_OPS, got):
        same(out, exact(dtype, INT_OPS[name](dtype), a, b))
    by = (0, 1, 2, 3, dtype.bits - 1, dtype.bits, -1 if dtype.kind == "i" else 7)
    cases = list(itertools.product(("div", "rem", "shl", "shr", "pow"), by))
    got = apply_all([lambda v, n=n, c=c: getattr(k, n)(v, const(c, dtype)) for n, c in cases], [dtype] * len(cases), values)
    for (name, c), out in zip(cases, got):
        same(out, exact(dtype, lambda x, name=name, c=c: INT_OPS[name](dtype)(x, c), values))
    negated, magnitude, inverted = apply_all([k.neg, k.abs, k.not_], [dtype] * 3, values)
    same(negated, exact(dtype, lambda x: -x, values))
    same(magnitude, exact(dtype, abs, values))
    same(inverted, exact(dtype, lambda x: ~x, values))
    same(apply(lambda x, y: k.fma(x, y, x), dtype, a, b), exact(dtype, lambda x, y: x * y + x, a, b))


@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_comparisons_and_select(dtype: DType) -> None:
    values = sample(dtype, 19)
    a, b = (np.array(x, dtype.numpy) for x in zip(*itertools.product(values, values)))
    less, most, equal, differ = apply_all([k.lt, k.le, k.eq, k.ne], [bool_] * 4, a, b)
    chosen, low, high = apply_all([lambda x, y: k.select(k.lt(x, y), x, y), k.min, k.max], [dtype] * 3, a, b)
    with np.errstate(invalid="ignore"):  # ml_dtypes warns of comparing NaN
        for got, ufunc in ((less, np.less), (most, np.less_equal), (equal, np.equal), (differ, np.not_equal)):
            same(got, ufunc(a, b))
        same(chosen, np.where(a < b, a, b))
        same(low[a != b], np.minimum(a, b)[a != b])
        same(high[a != b], np.maximum(a, b)[a != b])


@pytest.mark.parametrize("dtype", [f64, f32], ids=str)
def test_float_arithmetic_is_ieee(dtype: DType) -> None:
    values = sample(dtype, 40)
    a, b = (np.array(x, dtype.numpy) for x in zip(*itertools.product(values, values)))
    with np.errstate(all="ignore"):
        binary = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "rem": np.fmod}
        for ufunc, got in zip(binary.values(), apply_all([getattr(k, n) for n in binary], [dtype] * 5, a, b)):
            same(got, ufunc(a, b))
        unary = {"neg": np.negative, "abs": np.abs, "floor": np.floor, "ceil": np.ceil, "round": np.rint, "trunc": np.trunc}
        for ufunc, got in zip(unary.values(), apply_all([getattr(k, n) for n in unary], [dtype] * 6, values)):
            same(got, ufunc(values))


def test_one_rounding_in_fma() -> None:
    a = np.array([1 + 2.0**-12], np.float32)
    assert apply(lambda x: k.fma(x, x, const(-1, f32)), f32, a)[0] == np.float32((1 + 2.0**-12) ** 2 - 1)


@pytest.mark.parametrize("source", STORED, ids=str)
def test_casts(source: DType) -> None:
    values = sample(source, 64)
    results = apply_all([lambda v, to=to: k.cast(v, to) for to in STORED], STORED, values)
    for to, got in zip(STORED, results):
        with np.errstate(all="ignore"):
            if source.is_float and to.is_int:
                info = np.iinfo(to.numpy)
                wide = [float(v) for v in values]
                whole = [0 if v != v else info.max if v >= info.max else info.min if v <= info.min else int(v) for v in wide]
                want = np.array(whole, to.numpy)
            elif to.kind == "b":
                want = values != 0
            elif (source, to) == (i64, bf16) or (source == f64 and to in (bf16, *EIGHT_BITS)):
                continue  # ml_dtypes rounds these twice
            else:
                want = values.astype(to.numpy)
        same(got, want)


@pytest.mark.parametrize(
    "one, other",
    [
        ("f32", "i32"),
        ("f64", "u64"),
        ("f16", "i16"),
        ("bf16", "u16"),
        ("i8", "u8"),
        ("i32", "u32"),
        ("f8e4m3", "u8"),
        ("f8e5m2", "i8"),
    ],
)
def test_bitcasts(one: str, other: str) -> None:
    for source, to in ((one, other), (other, one)):
        values = sample(as_dtype(source), 50)
        narrow = lambda v, source=source, to=to: k.bitcast(k.cast(v, as_dtype(source)), dtype=as_dtype(to))  # noqa: E731
        got = apply(narrow, as_dtype(to), values)
        number = ~np.isnan(values.astype(np.float64)) & ~np.isnan(got.astype(np.float64))
        same(got[number], values.view(as_dtype(to).numpy)[number])


@pytest.mark.parametrize("dtype, host", [(d, d.numpy.type) for d in (bf16, f16, *EIGHT_BITS)], ids=str)
def test_arithmetic_in_narrow_floats_rounds_after_each_operation(dtype: DType, host: type) -> None:
    a, b = (RNG.normal(0, 1, 300).astype(host) for _ in range(2))
    got = apply(lambda x, y: k.mul(k.add(k.cast(x, dtype), k.cast(y, dtype)), const(1.1, dtype)), dtype, a, b)
    total = (a.astype(np.float32) + b.astype(np.float32)).astype(host).astype(np.float32)
    same(got, (total * np.float32(host(1.1))).astype(host))


def test_any_nonzero_byte_is_true() -> None:
    values = np.array([0, 1, 2, 128, 255] * 9, np.uint8)
    kernel = pointwise([lambda b: k.select(b, const(5, i32), const(-5, i32))], [i32], (bool_, len(values)))
    (got,), _ = run(kernel, [values.view(bool), None])
    same(got, np.where(values != 0, 5, -5))


def test_long_chains_need_no_recursion() -> None:
    def chain(v: Expr) -> Expr:
        for _ in range(3000):
            v = k.add(v, const(1, i32))
        return v

    same(apply(chain, i32, np.arange(20, dtype=np.int32)), np.arange(20) + 3000)


# -- loops ---------------------------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_every_size_and_dtype(dtype: DType, target) -> None:
    for size in (0, 1, 2, 15, 17, 33, 100):
        a, b = sample(dtype, size), sample(dtype, size)[::-1].copy()
        got = apply(lambda x, y: k.select(k.lt(x, y), y, x), dtype, a, b, target=target)
        with np.errstate(invalid="ignore"):  # ml_dtypes warns of comparing NaN
            same(got, np.where(a < b, b, a))


@every_target
@pytest.mark.parametrize("op, ufunc", [("add", np.add), ("mul", np.multiply), ("max", np.maximum), ("min", np.minimum)])
@pytest.mark.parametrize("dtype", [f64, f32, bf16, i64, i32, i8, u8], ids=str)
def test_reductions(op: str, ufunc: np.ufunc, dtype: DType, target) -> None:
    for size in (0, 1, 31, 515):
        x, y, i = Buffer("x", dtype, size), Buffer("y", dtype.compute, 2, True), Var("i")
        total, other = Var("total", dtype.compute), Var("other", dtype.compute)
        reduces = (Reduce(total, op, Load(x, i)), Reduce(other, "max", k.neg(Load(x, i))))
        loop = vector(i, size, reduces=reduces)
        kernel = Kernel("reduce", (x, y), (), (), (loop, Store(y, const(0), total), Store(y, const(1), other)))
        values = (sample(dtype, size) if dtype.is_int else 1 + RNG.normal(0, 0.02, size)).astype(dtype.numpy)
        (got,), _ = run(kernel, [values, None], target)
        wide = values.astype(dtype.compute.numpy)
        if size == 0 and op in ("max", "min"):
            limit = (np.iinfo if dtype.is_int else lambda d: np.array([-np.inf, np.inf], d))(dtype.compute.numpy)
            low, high = (limit.min, limit.max) if dtype.is_int else limit
            want = low if op == "max" else high
        else:
            want = ufunc.reduce(wide, dtype=wide.dtype)
        if dtype.is_float and op in ("add", "mul"):
            np.testing.assert_allclose(got[0], want, rtol=1e-5 if dtype != f64 else 1e-13)
        else:
            same(got[:1], np.array([want]))
        if size:
            same(got[1:], np.array([np.max(-wide)]))


@pytest.mark.parametrize("op", ["max", "min"])
@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_one_nan_anywhere_comes_through_max_and_min(op: str, dtype: DType) -> None:
    size = 100
    x, y, i, r = Buffer("x", dtype, size * size), Buffer("y", dtype, size, True), Var("i"), Var("r")
    result = Var("m", dtype)
    loop = vector(i, size, reduces=(Reduce(result, op, Load(x, flat((r, size), (i, 1)))),))
    values = RNG.normal(0, 1, (size, size)).astype(dtype.numpy)
    np.fill_diagonal(values, np.nan)
    (got,), _ = run(Kernel("nan", (x, y), (), ((r, size),), (loop, Store(y, r, result))), [values, None])
    assert np.isnan(got).all()


@pytest.mark.parametrize("op, ufunc", [("and", np.bitwise_and), ("or", np.bitwise_or)])
@pytest.mark.parametrize("dtype", [bool_, i32, u8], ids=str)
def test_bitwise_reductions(op: str, ufunc: np.ufunc, dtype: DType) -> None:
    for size, fill in itertools.product((0, 3, 40), (0, 1)):
        x, y, i, result = Buffer("x", dtype, size), Buffer("y", dtype, 1, True), Var("i"), Var("r", dtype)
        loop = vector(i, size, reduces=(Reduce(result, op, Load(x, i)),))
        values = np.full(size, fill, dtype.numpy)
        values[size // 2 :][:1] = 1 - fill
        (got,), _ = run(Kernel("bits", (x, y), (), (), (loop, Store(y, const(0), result))), [values, None])
        same(
            got,
            np.array(
                [ufunc.reduce(values) if size else (0 if op == "or" else -1 if dtype == i32 else 255 if dtype == u8 else 1)]
            ),
        )


@every_target
@pytest.mark.parametrize("rows, columns", [(1, 1), (3, 5), (17, 33), (40, 128)])
def test_rows_then_columns(rows: int, columns: int, target) -> None:
    """A softmax over rows (locals, Let, three vector loops per grid point), and sums over columns (a serial reduction in
    a vector loop: one lane per column)."""
    x, y, s = Buffer("x", f32, rows * columns), Buffer("y", f32, rows * columns, True), Buffer("s", f32, columns, True)
    r, i, j, held = Var("r"), Var("i"), Var("j"), Local("e", f32, columns)
    top, total, scale = Var("top", f32), Var("total", f32), Var("scale", f32)
    at = flat((r, columns), (j, 1))
    body = (
        vector(j, columns, reduces=(Reduce(top, "max", Load(x, at)),)),
        vector(j, columns, Store(held, j, k.exp(k.sub(Load(x, at), top))), reduces=(Reduce(total, "add", Load(held, j)),)),
        Let(scale, k.div(const(1, f32), total)),
        vector(j, columns, Store(y, at, k.mul(Load(held, j), scale))),
    )
    values = RNG.normal(0, 3, (rows, columns)).astype(np.float32)
    (got,), _ = run(Kernel("softmax", (x, y), (held,), ((r, rows),), body), [values, None], target)
    e = np.exp(values.astype(np.float64) - values.max(1, keepdims=True))
    np.testing.assert_allclose(got.reshape(rows, columns), e / e.sum(1, keepdims=True), rtol=2e-6)
    sums = Var("sums", f32)
    inner = Loop(i, rows, (), reduces=(Reduce(sums, "add", Load(x, flat((i, columns), (j, 1)))),))
    (got,), _ = run(Kernel("columns", (x, s), (), (), (vector(j, columns, inner, Store(s, j, sums)),)), [values, None], target)
    np.testing.assert_allclose(got, values.astype(np.float64).sum(0), rtol=1e-5, atol=1e-5)


def test_vector_loop_in_a_vector_loop_takes_the_contiguous_one() -> None:
    rows, columns = 20, 37
    x, y, i, j, total = Buffer("x", f32, rows * columns), Buffer("y", f32, rows, True), Var("i"), Var("j"), Var("t", f32)
    inner = vector(j, columns, reduces=(Reduce(total, "add", Load(x, flat((i, columns), (j, 1)))),))
    kernel = Kernel("rows", (x, y), (), (), (vector(i, rows, inner, Store(y, i, total)),))
    values = RNG.normal(0, 1, (rows, columns)).astype(np.float32)
    (got,), _ = run(kernel, [values, None])
    np.testing.assert_allclose(got, values.astype(np.float64).sum(1), rtol=1e-5, atol=1e-5)
    assert "gather" not in render(kernel, host_target(1), "f").text


@pytest.mark.parametrize("lanes", [False, True], ids=["serial", "in lanes"])
@pytest.mark.parametrize("steps", [0, 1, 3, 50])
def test_carried_values(lanes: bool, steps: int) -> None:
    """A running sum, and the position of the largest element, per column: alone and with columns side by side."""
    columns = 21
    x, sums, where = (
        Buffer(n, d, steps * columns if n != "at" else columns, n != "x") for n, d in (("x", i32), ("sum", i32), ("at", i64))
    )
    i, j, run_total, best, at = Var("i"), Var("j"), Var("s", i32), Var("best", i32), Var("at")
    here = Load(x, flat((i, columns), (j, 1)))
    after, better = k.add(run_total, here), k.lt(best, here)
    loop = Loop(
        i, steps, (Store(sums, flat((i, columns), (j, 1)), after),),
        carries=(
            Carry(run_total, const(100, i32), after),
            Carry(best, const(-(2**31), i32), k.select(better, here, best)),
            Carry(at, const(-1), k.select(better, i, at)),
        ),
    )  # fmt: skip
    body = (Loop(j, columns, (loop, Store(where, j, at)), vector=lanes),)
    values = RNG.integers(-1000, 1000, (steps, columns), np.int32)
    (got, positions), _ = run(Kernel("carry", (x, sums, where), (), (), body), [values, None, None])
    same(got, (100 + np.cumsum(values, 0, dtype=np.int32)).ravel())
    same(positions, values.argmax(0) if steps else np.full(columns, -1))


def test_a_carried_loop_is_never_run_in_lanes() -> None:
    x, y, i, state = Buffer("x", f32, 40), Buffer("y", f32, 40, True), Var("i"), Var("s", f32)
    after = k.add(k.mul(state, const(0.5, f32)), Load(x, i))
    loop = Loop(i, 40, (Store(y, i, after),), vector=True, carries=(Carry(state, const(0, f32), after),))
    values, want, s = RNG.normal(0, 1, 40).astype(np.float32), [], np.float32(0)
    for v in values:
        want.append(s := np.float32(s * np.float32(0.5) + v))
    (got,), _ = run(Kernel("scan", (x, y), (), (), (loop,)), [values, None])
    np.testing.assert_allclose(got, want, rtol=1e-6)


# -- memory --------------------------------------------------------------------------------------------------------


@every_target
@pytest.mark.parametrize("dtype", STORED, ids=str)
@pytest.mark.parametrize("stride, offset", [(-1, 36), (2, 0), (3, 11), (0, 4)])
def test_strides(dtype: DType, stride: int, offset: int, target) -> None:
    size, room = 37, 120
    x, y, i = Buffer("x", dtype, room), Buffer("y", dtype, room, True), Var("i")
    at = linear([(i, stride)], offset)
    kernel = Kernel("strided", (x, y), (), (), (vector(i, size, Store(y, at, Load(x, at))),))
    values, before = sample(dtype, room), sample(dtype, room)[::-1].copy()
    (got,), _ = run(kernel, [values, before], target)
    touched = offset + stride * np.arange(size)
    before[touched] = values[touched]
    same(got, before)


@every_target
@pytest.mark.parametrize("dtype", [u8, bf16, f32, i64], ids=str)
@pytest.mark.parametrize("stride", [2, 3, 5])
def test_guarded_lanes_that_are_apart_read_nothing_outside(dtype: DType, stride: int, target) -> None:
    """Elements between two lanes are read with them, but not beside a lane whose guard is false, all of memory here."""
    rows, size, front = 3, 37, 5
    width = (size - front - 3) * stride + 1
    x, y, on = Buffer("x", dtype, width), Buffer("y", dtype, rows * size, True), Buffer("on", bool_, rows)
    r, i = Var("r"), Var("i")
    inside = k.and_(Load(on, r), k.and_(k.le(const(front), i), k.lt(i, const(size - 2))))
    body = vector(i, size, Store(y, linear([(r, size), (i, 1)]), Load(x, linear([(i, stride)], -front * stride), inside)))
    values, wanted = sample(dtype, width), np.array([True, False, True])
    (got,), _ = run(Kernel("apart", (x, on, y), (), ((r, rows),), (body,)), [values, wanted, None], target)
    same(got.reshape(rows, size), np.where(wanted[:, None], np.pad(values[::stride], (front, 2)), np.zeros(1, dtype.numpy)))


@every_target
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_gather_scatter_and_checks(dtype: DType, target) -> None:
    """y[to[i]] = x[from[i]] where the index is good; a bad one is reported and touches no memory."""
    size, room = 45, 30
    x, y = Buffer("x", dtype, room), Buffer("y", dtype, size, True)
    source, to, i = Buffer("from", i64, size), Buffer("to", i32, size), Var("i")
    index = Load(source, i)
    ok = k.and_(k.le(const(0), index), k.lt(index, const(room)))
    loop = vector(i, size, Check(ok, 1), Store(y, k.cast(Load(to, i), i64), Load(x, index, ok)))
    kernel = Kernel("gather", (x, source, to, y), (), (), (loop,))
    values, indices, places = sample(dtype, room), RNG.integers(0, room, size), RNG.permutation(size).astype(np.int32)
    want = np.empty(size, dtype.numpy)
    want[places] = values[indices]
    (got,), status = run(kernel, [values, indices, places, None], target)
    same(got, want)
    assert status == 0
    for bad, at in ((-1, 0), (room, 17), (2**62, size - 1), (-(2**63), size - 2)):
        broken = indices.copy()
        broken[at] = bad
        (got,), status = run(kernel, [values, broken, places, None], target)
        want[places] = np.where(np.arange(size) == at, np.zeros(1, dtype.numpy), values[indices])
        same(got, want)
        assert status == 1


def test_a_check_does_not_see_lanes_past_the_end() -> None:
    i = Var("i")
    for size in SIZES:
        kernel = Kernel("check", (), (), (), (vector(i, size, Check(k.lt(i, const(size)), 1)),))
        assert run(kernel, [])[1] == 0
        assert run(Kernel("check", (), (), (), (vector(i, size, Check(k.lt(i, const(size - 1)), 1)),)), [])[1] == 1


@every_target
def test_guarded_loads_and_stores(target) -> None:
    """Zero padding on the left and right of rows; a store that keeps every third element as it was."""
    rows, columns, pad = 5, 19, 4
    wide = columns + 2 * pad
    x, y, r, j = Buffer("x", f32, rows * columns), Buffer("y", f32, rows * wide, True), Var("r"), Var("j")
    inside = k.and_(k.le(const(pad), j), k.lt(j, const(pad + columns)))
    value = Load(x, linear([(r, columns), (j, 1)], -pad), inside)
    third = k.ne(k.rem(j, const(3)), const(0))
    values = RNG.normal(0, 1, (rows, columns)).astype(np.float32)
    padded = np.pad(values, ((0, 0), (pad, pad)))
    before = np.full((rows, wide), 7, np.float32)
    for as_lanes in (True, False):
        body = (Loop(j, wide, (Store(y, flat((r, wide), (j, 1)), value, third),), vector=as_lanes),)
        (got,), _ = run(Kernel("pad", (x, y), (Local("unused", f32, 3),), ((r, rows),), body), [values, before], target)
        same(got.reshape(rows, wide), np.where(np.arange(wide) % 3, padded, before))


def test_guards_that_lanes_share_or_that_hold_for_no_lane() -> None:
    x, flag, y, i = Buffer("x", f32, 50), Buffer("flag", bool_, 1), Buffer("y", f32, 50, True), Var("i")
    shared = Load(flag, const(0))
    for uniform_index in (False, True):
        index = const(3) if uniform_index else i
        body = (vector(i, 50, Store(y, i, Load(x, index, shared), shared)),)
        values, before = RNG.normal(0, 1, 50).astype(np.float32), np.full(50, -1, np.float32)
        for on in (False, True):
            (got,), _ = run(Kernel("flag", (x, flag, y), (), (), body), [values, np.array([on]), before])
            same(got, (values[3] if uniform_index else values) * np.ones(50, np.float32) if on else before)
    never = k.lt(i, const(0))
    body = (vector(i, 50, Store(y, i, Load(x, const(10**9), never))),)
    (got,), _ = run(Kernel("never", (x, y), (), (), body), [values, None])
    same(got, np.zeros(50, np.float32))


def test_in_place() -> None:
    """Input and output in one memory, where every index is read before it is written."""
    for size in SIZES:
        x, y, z, i = Buffer("x", f32, size), Buffer("y", f32, size, True), Buffer("z", f32, size, True), Var("i")
        value = Load(x, i)
        body = (vector(i, size, Store(y, i, k.mul(value, value)), Store(z, i, k.add(Load(x, i), const(1, f32)))),)
        values = RNG.normal(0, 1, size).astype(np.float32)
        (got, other), _ = run(Kernel("in place", (x, y, z), (), (), body), [values, None, None], same=(1, 0))
        same(got, values * values)
        same(other, values + np.float32(1))


def test_a_store_is_seen_by_later_statements_and_not_by_hoisted_loads() -> None:
    state, y, i, j, t = Buffer("state", f32, 1, True), Buffer("y", f32, 12, True), Var("i"), Var("j"), Var("t", f32)
    inner = vector(j, 20, reduces=(Reduce(t, "add", Load(state, const(0))),))
    body = (Loop(i, 12, (inner, Store(y, i, t), Store(state, const(0), k.add(Load(state, const(0)), const(1, f32))))),)
    (final, got), _ = run(Kernel("state", (state, y), (Local("l", f32, 1),), (), body), [np.zeros(1, np.float32), None])
    same(got, 20 * np.arange(12, dtype=np.float32))
    same(final, np.full(1, 12, np.float32))


def test_locals_are_private_to_a_point() -> None:
    x, y, r, j = Buffer("x", i32, 300), Buffer("y", i32, 300, True), Var("r"), Var("j")
    a, b = Local("a", i8, 3), Local("b", i32, 10)
    body = (
        Store(a, const(1), k.cast(r, i8)),
        vector(j, 10, Store(b, j, k.add(Load(x, flat((r, 10), (j, 1))), k.cast(Load(a, const(1)), i32)))),
        vector(j, 10, Store(y, flat((r, 10), (j, 1)), Load(b, linear([(j, -1)], 9)))),
    )
    kernel = Kernel("locals", (x, y), (a, b), ((r, 30),), body)
    values = RNG.integers(0, 99, (30, 10), np.int32)
    (got,), _ = run(kernel, [values, None], host_target(4))
    same(got.reshape(30, 10), values[:, ::-1] + np.arange(30, dtype=np.int32)[:, None])
    assert render(kernel, host_target(1), "f").scratch_bytes == 128


# -- grid and tasks ------------------------------------------------------------------------------------------------

GRIDS = [(), (1,), (5,), (3, 7), (2, 3, 4), (64, 50), (7, 1000), (1, 70_001), (3, 40_000), (5000, 3), (2, 2, 2, 2, 9), (4, 0)]


@pytest.mark.parametrize("dims", GRIDS, ids=str)
@pytest.mark.parametrize("threads", [1, 3, 64])
def test_every_point_is_visited_once(dims: tuple[int, ...], threads: int) -> None:
    """Each point adds one to its own element; grid dims alone, and with the last one as a loop in the body."""
    size = int(np.prod(dims))
    variables = [Var(f"g{n}") for n in range(len(dims))]
    strides = [int(np.prod(dims[n + 1 :])) for n in range(len(dims))]
    y = Buffer("y", i64, size, True)
    at = linear(zip(variables, strides))
    heavy = k.cast(k.erf(k.erf(k.erf(k.cast(at, f32)))), i64)  # work enough to be split
    store = Store(y, at, k.add(k.add(Load(y, at), at), k.mul(heavy, const(0, i64)) if size < 10 else k.sub(heavy, heavy)))
    grid = tuple(zip(variables, dims))
    kernels = [Kernel("grid", (y,), (), grid, (store,))]
    if dims:
        kernels.append(Kernel("loop", (y,), (), grid[:-1], (vector(variables[-1], dims[-1], store),)))
    for kernel in kernels:
        (got,), _ = run(kernel, [np.full(size, 10)], host_target(threads))
        same(got, 10 + np.arange(size))


def test_tasks_are_worth_their_overhead() -> None:
    assert task_count(1e3, 16) == 1
    assert task_count(1e9, 1) == 1
    assert 4 * 16 <= task_count(1e9, 16) <= 8 * 16
    assert [task_count(ns, 2) for ns in (7e3, 8e3, 12e3)] == [1, 2, 2]
    assert [task_count(n * 6e3, 4) for n in range(7)] == [1, 1, 4, 4, 4, 8, 8]  # above the threads: as many for each
    assert [task_count(ns, 16) for ns in (8e3, 12e3, 18e3, 60e3)] == [5, 8, 12, 16]  # below: each thread has a small one
    kernel = pointwise([k.exp], [f32], (f32, 1 << 20))
    tasks = render(kernel, host_target(4), "f").tasks
    assert 16 <= tasks <= 32
    small = pointwise([k.exp], [f32], (f32, 1 << 10))
    assert render(small, host_target(4), "f").tasks == 1


def test_text_is_deterministic() -> None:
    one, two = (pointwise([lambda a, b: k.tanh(k.mul(a, b))], [f32], (f32, 1000), (f16, 1000)) for _ in range(2))
    assert render(one, host_target(2), "f") == render(two, host_target(2), "f")


def test_contractions_stand_alone() -> None:
    a, i, j, acc = Buffer("a", f32, 4), Var("i"), Var("j"), Var("acc", f32)
    y = Buffer("y", f32, 4, True)
    operand = Operand(a, const(0), 2, 1)
    contract = Contract(i, j, 2, 2, 2, operand, operand, acc, (Store(y, flat((i, 2), (j, 1)), acc),))
    with pytest.raises(CompileError, match="a Contract must be a kernel's only statement"):
        render(Kernel("nested", (a, y), (), (), (Loop(Var("n"), 5, (contract,)),)), host_target(1), "f")


# -- CPUs that are not here ------------------------------------------------------------------------------------------

ELSEWHERE = {
    "aarch64": target_for("aarch64-linux-gnu", "neoverse-n1", ("neon",)),
    "x86-64-v3": target_for("x86_64-unknown-linux-gnu", "x86-64-v3"),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_code_for_other_cpus(name: str) -> None:
    target = ELSEWHERE[name]
    x, y, i, total = Buffer("x", bf16, 101), Buffer("y", f16, 101, True), Var("i"), Var("t", f32)
    index = k.rem(i, const(7))
    body = (
        vector(i, 101, reduces=(Reduce(total, "max", Load(x, i)),)),
        vector(i, 101, Check(k.lt(index, const(7)), 1), Store(y, i, k.sin(k.pow(Load(x, index, k.lt(i, const(90))), total)))),
    )
    functions = pointwise([k.exp, k.log, k.erf, k.tanh], [f32] * 4, (f32, 77))
    for kernel in (Kernel("mixed", (x, y), (), (), body), functions):
        text = render(kernel, target, "f").text
        assert compile_object(text, target)[:4] == b"\x7fELF"
        code = assembly(text, target)
        assert "zmm" not in code
        assert ("ymm" in code) == (name == "x86-64-v3")


def rendered(value: Callable[[rlx.Value], rlx.Value], dims: tuple[int, ...]) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """The code of the only kernel of a graph of one f32 operand, for AVX-512, and the function that it computes here."""
    g = rlx.Graph("one")
    g.set_outputs([value(g.input("x", dims, "f32"))])
    target = target_for("x86_64-linux-gnu", "x86-64-v4")
    (step,) = lower(g, target, rlx.CompileOptions()).steps
    compiled = rlx.Session("cpu").compile(g)
    return render(step.kernel, target, "one").text, lambda x: compiled.run({"x": x})[0]


def test_rows_of_padding_are_not_read_by_masks() -> None:
    """Where no lane is on, masked loads from addresses that are not mapped take long: whole rows are skipped."""
    x = np.random.default_rng(0).standard_normal((5, 6, 48), np.float32)
    text, run = rendered(lambda v: rlx.pad(v, low=(1, 2, 0), high=(1, 1, 0)), x.shape)
    assert "masked.load" not in text
    np.testing.assert_array_equal(run(x), np.pad(x, ((1, 1), (2, 1), (0, 0))))
    x = x[..., :7].copy()  # a row that is one vector computes its padding in lanes, too
    text, run = rendered(lambda v: rlx.exp(rlx.pad(v, low=(1, 0, 3), high=(1, 0, 2))), x.shape)
    assert "masked.load" in text and re.search(r"select i1 %\w+, ptr", text)
    np.testing.assert_allclose(run(x), np.exp(np.pad(x, ((1, 1), (0, 0), (3, 2)))), rtol=1e-5)


def test_values_that_a_program_clamps_are_not_clamped_again() -> None:
    x = np.array([np.nan, np.inf, -np.inf, -3.5, 0, 17.9, 254.5, 255, 256, 1e30] * 4, np.float32)
    texts = []
    for high in (255.0, 300.0):
        text, run = rendered(lambda v, high=high: rlx.clip(v, low=0.0, high=high).astype("u8"), x.shape)
        np.testing.assert_array_equal(run(x), np.nan_to_num(np.clip(x, 0, 255), nan=0).astype(np.uint8))
        texts.append(text)
    few, more = (text.count("fcmp") for text in texts)
    assert few < more
