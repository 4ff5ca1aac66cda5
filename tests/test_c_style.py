"""The C-style renderer: kernels written by hand, compiled as C, against the interpreter; scalars on awkward data, bit for bit."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from c_backend import Code, compile_kernels, compiler
from test_ref_backend import extremes_kernel, sort_kernel

from rlx.backends.ref.interpret import run_kernel
from rlx.backends.shared.c_dialect import C
from rlx.backends.shared.c_style import render
from rlx.backends.shared.contract_loops import without_contract
from rlx.errors import CompileError
from rlx.ir.dtype import DTYPES, DType, as_dtype, bf16, bool_, f16, f32, f64, i8, i32, i64, index_, u8

from rlx.ir.kernel import (  # isort: skip
    Alu, Buffer, Carry, Check, Computed, Contract, Kernel, Let, Limit, Load, Local, Loop, Native, Operand, Reduce, SCALAR_OPS,
    Store, Var, View, const, k, linear,
)  # fmt: skip
from rlx.ir.kernel_text import kernel_key

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler (cc, gcc, clang) on the PATH")
HELD = [d for d in DTYPES.values() if d.kind != "c"]
FLOATS, INTS = [d for d in HELD if d.is_float], [d for d in HELD if d.is_int]


_codes: dict[str, Code] = {}  # by kernel_key


def in_one_file(*kernels: Kernel) -> None:
    """Compile all of them: starting the compiler takes longer than most kernels."""
    if missing := {key: kernel for kernel in kernels if (key := kernel_key(kernel)) not in _codes}:
        _codes.update(zip(missing, compile_kernels(list(missing.items()))))


def run_c(kernel: Kernel, *arrays: np.ndarray) -> int:
    """The kernel as C on these arrays, which it changes; the status."""
    in_one_file(kernel)
    status = ctypes.c_int32(0)
    _codes[kernel_key(kernel)].function((ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays)), ctypes.byref(status))
    return status.value


def check(kernel: Kernel, *arrays: Any, want: Sequence[np.ndarray] | None = None) -> list[np.ndarray]:
    """The kernel as C gives what the interpreter gives, or `want`; buffers are filled alike before. Returns all buffers."""
    made = [np.array(a, b.dtype.numpy).reshape(-1) for a, b in zip(arrays, kernel.buffers, strict=True)]
    other = [a.copy() for a in made]
    assert run_c(kernel, *made) == run_kernel(kernel, other)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        for found, expected, b in zip(made, other if want is None else want, kernel.buffers):
            wide = [x.astype(np.float64) if b.dtype.is_float else x for x in (found, expected)]
            np.testing.assert_array_equal(*wide, err_msg=b.name)
    return made


# -- scalars -------------------------------------------------------------------------------------------------------


def awkward(dtype: DType) -> np.ndarray:
    """Every pattern of 8 and 16 bits; of wider types the ends, zero, powers of two and their neighbours, and random ones."""
    raw = np.dtype(f"u{dtype.itemsize}")
    if dtype.kind == "b":
        return np.array([False, True])
    if dtype.bits <= 16:
        return np.arange(1 << dtype.bits, dtype=raw).view(dtype.numpy)
    rng = np.random.default_rng(dtype.bits)
    if not dtype.is_float:
        ends = [n for s in range(dtype.bits) for n in (1 << s, (1 << s) - 1, -1 << s)]
        values = [*ends, *range(70), *(int(x) for x in rng.integers(0, 1 << 62, 50))]
        return np.array([x % (1 << dtype.bits) for x in values], raw).view(dtype.numpy)
    finite = rng.standard_normal(200) * 10.0 ** rng.integers(-30, 30, 200)
    halves = np.arange(-40, 40) / 4
    edges = [
        2.0**e * s for e in (7, 8, 15, 16, 31, 32, 63, 64, -14, -24, -126, -133) for s in (1, -1, 1 + 2.0**-20, 1 - 2.0**-20)
    ]
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 65504, 65520, 448, 464, 3e38, 1e-40, 1 + 2.0**-11 + 2.0**-30]
    with np.errstate(over="ignore"):
        return np.concatenate([finite, halves, edges, special]).astype(dtype.numpy)


def pairs(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Each of a few against each; floats without a NaN whose order `min` might ask for."""
    few = awkward(dtype)
    few = few[:: max(1, few.size // 60)]
    a, b = np.meshgrid(few, few)
    return a.reshape(-1).copy(), b.reshape(-1).copy()


def pointwise(functions: Sequence[Callable[..., Any]], results: Sequence[DType], dtypes: Sequence[DType], size: int) -> Kernel:
    i = Var("i")
    ins = [Buffer(f"in{n}", d, size) for n, d in enumerate(dtypes)]
    outs = [Buffer(f"out{n}", d, size, True) for n, d in enumerate(results)]
    stores = tuple(Store(out, i, f(*(Load(b, i) for b in ins))) for f, out in zip(functions, outs, strict=True))
    return Kernel("pointwise", (*ins, *outs), (), ((i, size),), stores)


BINARY = {
    "f": ("add", "sub", "mul", "div", "rem", "min", "max", "lt", "le", "eq", "ne"),
    "i": ("add", "sub", "mul", "div", "rem", "min", "max", "pow", "and", "or", "xor", "lt", "le", "eq", "ne"),
    "b": ("and", "or", "xor", "min", "max", "eq", "ne", "lt", "le"),
}  # fmt: skip
EXACT = {
    "f": ("neg", "abs", "sqrt", "floor", "ceil", "round", "trunc"),
    "i": ("neg", "abs", "not", "floor", "round"),
    "b": ("not",),
}
INEXACT = ("exp", "log", "sin", "cos", "tanh", "erf")


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_exact_operations(dtype):
    kind = "i" if dtype.is_int else dtype.kind
    a, b = pairs(dtype)
    if dtype.is_float:  # of 0 and -0 either may be the least
        a, b = np.where(a == 0, np.abs(a), a), np.where(b == 0, np.abs(b), b)
    compare = {"lt", "le", "eq", "ne"}
    ops = [(lambda x, y, op=op: getattr(k, op + "_" * (op in ("and", "or")))(x, y)) for op in BINARY[kind]]
    ops += [(lambda x, y, op=op: getattr(k, op + "_" * (op == "not"))(x)) for op in EXACT[kind]]
    ops.append(lambda x, y: k.select(k.eq(x, y), x, y))
    results = [bool_ if op in compare else dtype for op in BINARY[kind]] + [dtype] * (len(EXACT[kind]) + 1)
    kernel = pointwise(ops, results, (dtype, dtype), a.size)
    check(kernel, a, b, *(np.zeros(a.size, d.numpy) for d in results))


@pytest.mark.parametrize("dtype", INTS, ids=str)
def test_shifts_by_any_number(dtype):
    a, _ = pairs(dtype)
    numbers = (0, 1, dtype.bits - 1, dtype.bits, dtype.bits + 1, 100, -1)
    values = [const(by if dtype.kind == "i" else by % (1 << dtype.bits), dtype) for by in numbers]
    shifts = [lambda x, value=value, shift=shift: shift(x, value) for value in values for shift in (k.shl, k.shr)]
    found = [np.zeros(a.size, dtype.numpy) for _ in shifts]
    run_c(pointwise(shifts, [dtype] * len(shifts), (dtype,), a.size), a, *found)
    wide = [int(x) for x in a]
    for by, *both in zip(numbers, found[::2], found[1::2], strict=True):
        gone = not 0 <= by < dtype.bits
        left = [0 if gone else x << by for x in wide]
        right = [(-1 if x < 0 else 0) if gone else x >> by for x in wide]
        for got, expected in zip(both, (left, right)):
            raw = np.array([x % (1 << dtype.bits) for x in expected], f"u{dtype.itemsize}")
            np.testing.assert_array_equal(got, raw.view(dtype.numpy), err_msg=f"by {by}")


@pytest.mark.parametrize("source", HELD, ids=str)
def test_casts_between_all_dtypes(source):
    a = awkward(source)
    targets = [d for d in HELD if d != source]
    kernel = pointwise([lambda x, d=d: k.cast(x, d) for d in targets], targets, (source,), a.size)
    check(kernel, a, *(np.zeros(a.size, d.numpy) for d in targets))


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_bits_are_kept_by_bitcast(dtype):
    a = awkward(dtype)
    if dtype.is_float:
        with np.errstate(invalid="ignore"):
            a = a[~np.isnan(a)]  # any NaN is as good as another
    to = as_dtype(f"u{dtype.bits}")
    there = pointwise([lambda x: k.bitcast(k.cast(x, dtype), dtype=to)], [to], (dtype,), a.size)
    back = pointwise([lambda x: k.bitcast(x, dtype=dtype)], [dtype], (to,), a.size)
    in_one_file(there, back)
    raw = check(there, a, np.zeros(a.size, to.numpy))[1]
    assert dtype.kind == "b" or raw.tobytes() == a.tobytes()
    check(back, raw, np.zeros(a.size, dtype.numpy), want=[raw, a])


@pytest.mark.parametrize("dtype", [f32, f64], ids=str)
def test_functions_are_within_four_units(dtype):
    a = awkward(dtype)
    a = a[(np.abs(a) < 1e5) | ~np.isfinite(a)]
    kernel = pointwise([lambda x, op=op: getattr(k, op)(x) for op in INEXACT], [dtype] * len(INEXACT), (dtype,), a.size)
    found = [a, *(np.zeros_like(a) for _ in INEXACT)]
    other = [x.copy() for x in found]
    run_c(kernel, *found)
    run_kernel(kernel, other)
    for op, one, two in zip(INEXACT, found[1:], other[1:]):
        np.testing.assert_allclose(
            one, two, rtol=4 * np.finfo(dtype.numpy).eps, atol=1e-300 if dtype == f64 else 1e-44, err_msg=op
        )


@pytest.mark.parametrize("dtype", HELD, ids=str)
def test_constants_are_exact(dtype):
    values = {x.tobytes(): x for x in awkward(dtype)[:: 1 if dtype.bits > 16 else 97]}
    numbers = list(values.values())
    out, names = Buffer("out", dtype, len(numbers), True), [x.item() if dtype.kind in "iub" else float(x) for x in numbers]
    kernel = Kernel("constants", (out,), (), (), tuple(Store(out, const(i), const(x, dtype)) for i, x in enumerate(names)))
    found = np.zeros(len(numbers), dtype.numpy)
    run_c(kernel, found)
    same = [x.tobytes() == y.tobytes() or x != x for x, y in zip(found, np.array(numbers, dtype.numpy))]
    assert all(same), [n for n, s in zip(names, same) if not s]


def test_the_table_has_every_scalar_operation():
    assert set(C.ops) | {"cast", "bitcast"} == set(SCALAR_OPS)


# -- statements ----------------------------------------------------------------------------------------------------


def test_neighbouring_stores_are_written_after_all_their_values():
    """Buffers of different names may be one memory where their indices agree."""
    x, out, twice, g = Buffer("x", f32, 4), Buffer("out", f32, 4, True), Buffer("twice", f32, 4, True), Var("g")
    body = (Store(out, g, k.add(Load(x, g), 1.0)), Store(twice, g, k.mul(Load(x, g), 2.0)))
    kernel = Kernel("two", (x, out, twice), (), ((g, 4),), body)
    memory, doubled = np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    run_c(kernel, memory, memory, doubled)  # out lies on x
    assert memory.tolist() == [1, 2, 3, 4] and doubled.tolist() == [0, 2, 4, 6]
    i, total = Var("i"), Var("total", f32)
    loop = Loop(i, 4, (Store(out, i, const(0.0, f32)),), reduces=(Reduce(total, "add", Load(x, i)),))
    kernel = Kernel("sum", (x, out, twice), (), (), (loop, Store(twice, const(0), total)))
    run_c(kernel, memory, memory, doubled)
    assert memory.tolist() == [0] * 4 and doubled[0] == 10


def test_a_store_is_seen_by_the_statement_that_loads_it():
    x, out, g = Buffer("x", f32, 4), Buffer("out", f32, 8, True), Var("g")
    again = Store(out, k.add(g, 4), k.mul(Load(out, g), 3.0))
    check(Kernel("chain", (x, out), (), ((g, 4),), (Store(out, g, Load(x, g)), again)), np.arange(4), np.zeros(8))


def test_carried_values_change_at_once_and_after_the_totals():
    a, b, total, i = Var("a", i64), Var("b", i64), Var("total", i64), Var("i")
    out = Buffer("out", i64, 4, True)
    loop = Loop(
        i, 10, (Store(out, const(3), a),), reduces=(Reduce(total, "add", a),),
        carries=(Carry(a, const(0, i64), b), Carry(b, const(1, i64), Alu("add", (a, b), i64))),
    )  # fmt: skip
    stores = tuple(Store(out, const(n), v) for n, v in enumerate((a, b, total)))
    assert check(Kernel("fibonacci", (out,), (), (), (loop, *stores)), np.zeros(4))[0].tolist() == [55, 89, 88, 34]


def reduction(dtype: DType, op: str, extent: int) -> Kernel:
    """Five reductions of so many numbers each."""
    x, out, g, i, r = Buffer("x", dtype, 15), Buffer("out", dtype, 5, True), Var("g"), Var("i"), Var("r", dtype.compute)
    loop = Loop(i, extent, (), vector=True, reduces=(Reduce(r, op, Load(x, linear([(g, 3), (i, 1)]))),))
    return Kernel("reduce", (x, out), (), ((g, 5),), (loop, Store(out, g, r)))


REDUCED = [
    (dtype, op)
    for dtype in (f32, f64, f16, i8, i64, u8, bool_)
    for op in ("add", "mul", "max", "min", "and", "or")
    if not (op in ("and", "or") and dtype.is_float)
]


@pytest.mark.parametrize(("dtype", "op"), REDUCED, ids=str)
def test_reductions_start_from_their_identity(dtype, op):
    in_one_file(*(reduction(*each, extent) for each in REDUCED for extent in (0, 3)))
    values = np.random.default_rng(0).integers(0, 3, 15)
    for extent in (0, 3):
        check(reduction(dtype, op, extent), values, np.zeros(5))


def test_guards_checks_locals_and_lets():
    x, out, private = Buffer("x", bf16, 6), Buffer("out", f32, 12, True), Local("row", f16, 3)
    g, i, j, v = Var("g"), Var("i"), Var("j"), Var("v", f32)
    at = k.sub(k.add(k.mul(g, 3), i), 1)
    padded = Load(x, at, guard=k.and_(k.le(0, at), k.lt(at, 6)))
    fill = Loop(i, 3, (Store(private, i, k.div(padded, 3.0)),))
    body = (
        Let(v, k.cast(g, f32)), fill, Check(k.lt(g, 3), 1),
        Loop(j, 3, (Store(out, linear([(g, 3), (j, 1)]), k.add(Load(private, j), v), guard=k.ne(j, 1)),)),
    )  # fmt: skip
    kernel = Kernel("mixed", (x, out), (private,), ((g, 4),), body)
    assert run_c(kernel, np.arange(6).astype(bf16.numpy), np.zeros(12, np.float32)) == 1
    check(replace(kernel, grid=((g, 2),)), np.arange(6), np.full(12, 7))


@pytest.mark.parametrize("columns", [1, 8, 33])
def test_extremes_and_sorts_become_loops(columns: int) -> None:
    x = np.random.default_rng(columns).integers(-2, 3, (6, columns)).astype(np.float32)
    x[1:, 1::3] = np.nan
    check(extremes_kernel(6, columns), x, np.full(18, -7), np.zeros(6))
    for descending in (False, True):
        check(sort_kernel(6, columns, descending), x, np.zeros(x.size), np.zeros(x.size))


def test_large_locals_do_not_take_the_stack():
    x, out, private, i, j = Buffer("x", f32, 1), Buffer("out", f32, 1, True), Local("l", f32, 5_000_000), Var("i"), Var("j")
    fill, total = Loop(i, private.size, (Store(private, i, k.cast(k.rem(i, 2), f32)),)), Var("total", f32)
    read = Loop(j, private.size, (), reduces=(Reduce(total, "add", Load(private, j)),))
    kernel = Kernel("large", (x, out), (private,), (), (fill, read, Store(out, const(0), total)))
    found = np.zeros(1, np.float32)
    run_c(kernel, found, found)
    assert found[0] == 2_500_000


def test_limits_end_grids_and_loops():
    count, out, g, i = Buffer("count", i64, 1), Buffer("out", f32, 12, True), Var("g"), Var("i")
    store = Store(out, linear([(g, 4), (i, 1)]), const(1.0, f32))
    for var, most in ((g, 3), (i, 4)):
        least = k.cast(Load(count, const(0)), index_)
        limits = (Limit(var, k.add(least, 1)), Limit(var, least))
        kernel = Kernel("limited", (count, out), (), ((g, 3),), (Loop(i, 4, (store,), vector=True),), limits=limits)
        for n in (-2, 0, 1, most, 99):
            check(kernel, [n], np.zeros(12))


def test_claimed_ops_are_refused_by_name():
    x, out = Buffer("x", f32, 4), Buffer("out", f32, 4, True)
    native = Native("attention", None, (View(x, (4,), (1,)),), (View(out, (4,), (1,)),))
    with pytest.raises(CompileError, match="attention"):
        render(Kernel("claimed", (x, out), (), (), (native,)), C, "f")


# -- contractions --------------------------------------------------------------------------------------------------


def contraction(m: int, n: int, depth: int, dtypes: tuple[DType, DType, DType], panel: int, rows: bool) -> Kernel:
    """Batched: bias in the epilogue, and, with `rows`, the sum of a finished row taken off it."""
    group, count = (2 if panel else 1), Buffer("count", i64, 1)
    deep, wide = -(-depth // group) * group, -(-n // panel) * panel if panel else n
    a, b, bias = Buffer("a", dtypes[0], 2 * m * depth), Buffer("b", dtypes[1], deep * wide), Buffer("bias", dtypes[2], n)
    out, row, acc = Buffer("out", dtypes[2], 2 * m * n, True), Local("row", dtypes[2], n, per_row=True), Var("acc", dtypes[2])
    g, i, j, t, u, total = Var("g"), Var("i"), Var("j"), Var("t"), Var("u"), Var("total", dtypes[2])
    at = lambda v: linear([(g, m * n), (i, n), (v, 1)])  # noqa: E731
    element = k.add(acc, Load(bias, j))
    finish = (
        Loop(t, n, (), vector=True, reduces=(Reduce(total, "add", Load(row, t)),)),
        Loop(u, n, (Store(out, at(u), k.sub(Load(row, u), total)),), vector=True),
    )
    left = Operand(a, linear([(g, m * depth)]), depth, 1)
    right = Operand(b, const(0), panel=panel, group=group) if panel else Operand(b, const(0), n, 1)
    body = Contract(
        i,
        j,
        m,
        n,
        depth,
        left,
        right,
        acc,
        (Store(row, j, element) if rows else Store(out, at(j), element),),
        finish if rows else (),
    )
    limits = (Limit(i, k.cast(Load(count, const(0)), index_)),)
    return Kernel("c", (a, b, bias, count, out), (row,) if rows else (), ((g, 2),), (body,), limits=limits)


PRODUCTS = [(f32, f32, f32), (bf16, bf16, f32), (u8, i8, i32), (f64, f64, f64)]


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("panel", [0, 3])
@pytest.mark.parametrize("dtypes", PRODUCTS, ids=str)
def test_contractions_become_loops(dtypes, panel, rows):
    """Whole numbers, whose sums are exact in any order."""
    sizes = (3, 7, 5), (4, 1, 2), (2, 3, 0), (1, 6, 1)
    in_one_file(*(contraction(*size, *how) for size in sizes for how in product(PRODUCTS, (0, 3), (False, True))))
    for (m, n, depth), count in zip(sizes, (3, 2, 9, 0), strict=True):
        kernel = contraction(m, n, depth, dtypes, panel, rows)
        rng = np.random.default_rng(m)
        values = [rng.integers(0, 9, b.size) for b in kernel.buffers]
        check(kernel, *values[:3], [count], np.zeros(kernel.buffers[4].size))


@pytest.mark.parametrize("rows", [False, True])
def test_computed_operands_are_evaluated_in_the_loops(rows):
    """A norm in front of a product: the greatest element of a row taken off it, in a dtype narrower than the sum; and weights
    computed from two factors."""
    m, n, depth = 3, 4, 5
    x, w, u, out = Buffer("x", f32, m * depth), Buffer("w", i8, depth * n), Buffer("u", f32, n), Buffer("out", f32, m * n, True)
    kept, top, acc = Local("kept", f32, depth, per_row=True), Var("top", f32), Var("acc", f32)
    i, j, r, q, s, r2, q2, scaled = Var("i"), Var("j"), Var("r"), Var("q"), Var("s"), Var("r2"), Var("q2"), Var("scaled", f32)
    load = Load(x, linear([(r, depth), (s, 1)]))
    before = (Loop(s, depth, (Store(kept, s, load),), reduces=(Reduce(top, "max", load),)),) if rows else ()
    value = k.sub(Load(kept, q), top) if rows else k.div(Load(x, linear([(r, depth), (q, 1)])), 3.0)
    left = Computed(r, q, value, bf16, before)
    body = (Let(scaled, k.cast(Load(w, linear([(r2, n), (q2, 1)])), f32)),)
    right = Computed(r2, q2, k.mul(scaled, Load(u, q2)), f32, (), body)
    contract = Contract(i, j, m, n, depth, left, right, acc, (Store(out, linear([(i, n), (j, 1)]), k.mul(acc, 4.0)),))
    kernel = Kernel("computed", (x, w, u, out), (kept,) if rows else (), (), (contract,))
    rng = np.random.default_rng(0)
    numbers = rng.integers(-9, 9, m * depth), rng.integers(-9, 9, depth * n), 2 ** rng.integers(0, 3, n)
    found = check(kernel, *numbers, np.zeros(m * n))[3].reshape(m, n)
    a = numbers[0].reshape(m, depth).astype(np.float32)
    a = (a - a.max(1, keepdims=True) if rows else a / np.float32(3)).astype(bf16.numpy).astype(np.float32)
    np.testing.assert_array_equal(found, 4 * a @ (numbers[1].reshape(depth, n) * numbers[2]).astype(np.float32))
    assert len(without_contract(kernel).grid) == (1 if rows else 2)
