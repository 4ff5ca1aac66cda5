"""The reference and null backends: kernel IR against numpy written out, broken kernels refused, programs in their arena."""

import math

import numpy as np
import pytest
from small_programs import convolution, convolved

from rlx.backends.null.backend import Launch, NullBackend
from rlx.backends.ref import interpret
from rlx.backends.ref.backend import RefBackend
from rlx.backends.ref.interpret import run_kernel
from rlx.backends.ref.scalar import compute
from rlx.backends.shared.contract_loops import without_contract
from rlx.driver.backend import Backend
from rlx.errors import IndexRangeError, Unsupported, VerifyError
from rlx.ir.dtype import as_dtype, bf16, bool_, f32, f64, i8, i32, i64, u8

from rlx.ir.kernel import (  # isort: skip
    Buffer, Carry, Check, Contract, Kernel, Let, Load, Local, Loop, Native, Operand, Reduce, Sort, Store, Var, View, const, k,
    linear,
)  # fmt: skip
from rlx.ir.op import OPS
from rlx.ir.overlap import may_overlap
from rlx.ir.program import ArenaPlan, BufferDecl, OutputDecl, Program, Region, Step
from rlx.ir.shape import Shape


def execute(kernel, *arrays):
    args = [np.ascontiguousarray(a).reshape(-1) for a in arrays]
    return run_kernel(kernel, args), args


def softmax_kernel(rows, columns, dtype=f32):
    """out[r, c] = softmax of x's row r, as three loops over a row."""
    x, out = Buffer("x", dtype, rows * columns), Buffer("out", dtype, rows * columns, writable=True)
    r, c, d, e = Var("r"), Var("c"), Var("d"), Var("e")
    top, total = Var("top", f32), Var("total", f32)
    at = lambda v: linear([(r, columns), (v, 1)])  # noqa: E731
    maximum = Loop(c, columns, (), vector=True, reduces=(Reduce(top, "max", Load(x, at(c))),))
    sums = Loop(d, columns, (), vector=True, reduces=(Reduce(total, "add", k.exp(k.sub(Load(x, at(d)), top))),))
    scale = Var("scale", f32)
    value = k.mul(k.exp(k.sub(Load(x, at(e)), top)), scale)
    body = (maximum, sums, Let(scale, k.div(1.0, total)), Loop(e, columns, (Store(out, at(e), value),), vector=True))
    return Kernel("softmax", (x, out), (), ((r, rows),), body)


@pytest.mark.parametrize("limit", [1 << 21, 4])
def test_row_softmax_whole_and_in_chunks(monkeypatch, limit):
    monkeypatch.setattr(interpret, "MAX_POINTS", limit)
    x = np.random.default_rng(0).normal(size=(5, 7)).astype(np.float32)
    status, (_, out) = execute(softmax_kernel(5, 7), x, np.full((5, 7), np.nan, np.float32))
    want = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    assert status == 0
    np.testing.assert_allclose(out.reshape(5, 7), want / want.sum(1, keepdims=True), rtol=1e-6)


def extremes_kernel(rows, columns):
    """argmax and argmin of each row of x, with its sum; then argmax over no element."""
    x, out, total = Buffer("x", f32, rows * columns), Buffer("out", i64, 3 * rows, True), Buffer("total", f32, rows, True)
    r, c, y = Var("r"), Var("c"), Var("y", f32)
    high, low, none, added = Var("high"), Var("low"), Var("none"), Var("added", f32)
    reduces = (Reduce(high, "argmax", y), Reduce(added, "add", y), Reduce(low, "argmin", k.abs(y)))
    loop = Loop(c, columns, (Let(y, Load(x, linear([(r, columns), (c, 1)]))),), reduces=reduces)
    empty = Loop(Var("e"), 0, (), vector=True, reduces=(Reduce(none, "argmax", Load(x, const(0))),))
    stores = [Store(out, linear([(r, 3)], n), k.cast(v, i64)) for n, v in enumerate((high, low, none))]
    return Kernel("extremes", (x, out, total), (), ((r, rows),), (loop, empty, *stores, Store(total, r, added)))


@pytest.mark.parametrize("limit", [1 << 21, 4])  # 4: one iteration at a time
def test_argmax_and_argmin_give_the_first_extreme_or_nan(monkeypatch, limit):
    monkeypatch.setattr(interpret, "MAX_POINTS", limit)
    x = np.random.default_rng(0).integers(-2, 3, (40, 9)).astype(np.float32)
    x[3:20, 4] = np.nan
    x[5, 2:] = np.nan
    status, (_, out, total) = execute(extremes_kernel(40, 9), x, np.full(120, -7), np.zeros(40, np.float32))
    assert status == 0
    np.testing.assert_array_equal(out.reshape(-1, 3), np.stack([x.argmax(1), np.abs(x).argmin(1), np.zeros(40, int)], 1))
    np.testing.assert_array_equal(total, x.sum(1))


def sort_kernel(rows, columns, descending, dtype=f32):
    """Each row of -x sorted in a loop over the rows, with positions."""
    x, out = Buffer("x", dtype, rows * columns), Buffer("out", dtype, rows * columns, True)
    places = Buffer("places", i64, rows * columns, True)
    r, i, rank, held, origin = Var("r"), Var("i"), Var("rank"), Var("held", dtype), Var("origin")
    at = lambda v: linear([(r, columns), (v, 1)])  # noqa: E731
    body = Store(out, at(rank), held), Store(places, at(rank), k.cast(origin, i64))
    sort = Sort(i, columns, columns, k.neg(Load(x, at(i))), descending, rank, held, origin, body)
    return Kernel("sorts", (x, out, places), (), (), (Loop(r, rows, (sort,)),))


@pytest.mark.parametrize("descending", [False, True])
@pytest.mark.parametrize("columns", [0, 1, 2, 8, 33])
def test_a_sort_is_stable_and_nan_is_the_greatest(columns, descending):
    x = np.random.default_rng(columns).integers(-2, 3, (6, columns)).astype(np.float32)
    x[1:, 1::3] = np.nan
    x[2, ::2] = -0.0
    kernel = sort_kernel(6, columns, descending)
    status, (_, out, places) = execute(kernel, x, np.zeros((6, columns), np.float32), np.zeros(6 * columns, np.int64))
    assert status == 0
    keys = np.where(np.isnan(x), 9, -x) * (-1 if descending else 1)
    order = np.array([sorted(range(columns), key=lambda n: row[n]) for row in keys], int).reshape(6, columns)
    np.testing.assert_array_equal(places.reshape(6, columns), order)
    np.testing.assert_array_equal(out.reshape(6, columns), np.take_along_axis(-x, order, 1))
    assert not may_overlap(kernel)  # every value may be read again after the first one is stored


@pytest.mark.parametrize("panel", [0, 3, 4])
@pytest.mark.parametrize("n", [1, 6, 7])
def test_contraction_with_epilogue_and_row_statements(panel, n):
    g, m, kk = 2, 3, 5
    rng = np.random.default_rng(panel + n)
    a, b, bias = rng.normal(size=(g, m, kk)), rng.normal(size=(g, kk, n)), rng.normal(size=n)
    columns = -(-n // panel) * panel if panel else n
    if panel:
        wide = np.zeros((g, kk, columns))
        wide[..., :n] = b
        packed = wide.reshape(g, kk, -1, panel).transpose(0, 2, 1, 3)
    else:
        packed = b
    A, B, C = Buffer("a", f64, a.size), Buffer("b", f64, packed.size), Buffer("bias", f64, n)
    out = Buffer("out", f64, g * m * n, writable=True)
    row = Local("row", f64, n, per_row=True)
    gv, i, j, jj, t = Var("g"), Var("i"), Var("j"), Var("jj"), Var("t")
    acc, total = Var("acc", f64), Var("total", f64)
    epilogue = (Store(row, j, k.add(acc, Load(C, j))),)
    rows = (
        Loop(t, n, (), vector=True, reduces=(Reduce(total, "add", Load(row, t)),)),
        Loop(jj, n, (Store(out, linear([(gv, m * n), (i, n), (jj, 1)]), k.sub(Load(row, jj), total)),), vector=True),
    )
    body = Contract(
        i, j, m, n, kk,
        Operand(A, linear([(gv, m * kk)]), kk, 1), Operand(B, linear([(gv, kk * columns)]), n, 1, panel), acc, epilogue, rows,
    )  # fmt: skip
    kernel = Kernel("c", (A, B, C, out), (row,), ((gv, g),), (body,))
    status, args = execute(kernel, a, packed, bias, np.full(g * m * n, np.nan))
    want = a @ b + bias
    assert status == 0
    np.testing.assert_allclose(args[3].reshape(g, m, n), want - want.sum(-1, keepdims=True), rtol=1e-12, atol=1e-12)


def test_a_contraction_reads_windows_where_they_lie():
    """A left operand in levels; the loops that renderers without tiles run read the same elements."""
    x, w = (np.arange(n) % 7 - 3.0 for n in (180, 48))
    for kernel in (made := convolution(f64, f64, f64), without_contract(made)):
        status, args = execute(kernel, x, w, np.full(64, np.nan))
        assert status == 0
        np.testing.assert_array_equal(args[2].reshape(16, 4), convolved(x, w))


def test_carries_run_in_order_and_stores_are_seen_by_later_iterations():
    x, out = Buffer("x", i64, 6), Buffer("out", i64, 6, writable=True)
    i, c = Var("i"), Var("c")
    scan = k.add(k.mul(c, 3), Load(x, i))
    body = (Loop(i, 6, (Store(out, i, scan),), carries=(Carry(c, const(1), scan),)),)
    _, (_, got) = execute(Kernel("scan", (x, out), (), (), body), np.arange(6), np.zeros(6, np.int64))
    want, carry = [], 1
    for v in range(6):
        carry = carry * 3 + v
        want.append(carry)
    assert got.tolist() == want
    counts = Buffer("counts", i32, 3, writable=True)
    at = Load(x, i)
    body = (Loop(i, 6, (Store(counts, at, k.add(Load(counts, at), 1)),)),)
    _, (_, got) = execute(Kernel("histogram", (x, counts), (), (), body), [2, 0, 2, 2, 1, 0], np.zeros(3, np.int32))
    assert got.tolist() == [2, 1, 3]


def test_guards_stop_accesses_and_unguarded_ones_are_refused():
    x, out = Buffer("x", f32, 4), Buffer("out", f32, 6, writable=True)
    i = Var("i")
    padded = Load(x, k.sub(i, 1), guard=k.and_(k.le(1, i), k.lt(i, 5)))
    body = (Loop(i, 6, (Store(out, i, padded),), vector=True),)
    data = np.arange(1, 5, dtype=np.float32)
    _, (_, got) = execute(Kernel("pad", (x, out), (), (), body), data, np.full(6, np.nan, np.float32))
    assert got.tolist() == [0, 1, 2, 3, 4, 0]
    zero = const(0.0, f32)
    for statement in (Store(out, i, Load(x, k.sub(i, 1))), Store(x, i, zero), Store(out, k.add(i, 1), zero)):
        with pytest.raises(VerifyError, match=r"reads x|writes x|writes out"):
            execute(Kernel("bad", (x, out), (), ((i, 6),), (statement,)), np.zeros(4, np.float32), np.zeros(6, np.float32))


def test_two_grid_points_must_not_meet():
    out, g = Buffer("out", f32, 4, writable=True), Var("g")
    with pytest.raises(VerifyError, match="two grid points"):
        execute(Kernel("race", (out,), (), ((g, 4),), (Store(out, k.rem(g, 2), const(1.0, f32)),)), np.zeros(4, np.float32))
    i = Var("i")
    body = (Store(out, g, const(1.0, f32)), Loop(i, 1, (Store(out, g, Load(out, k.sub(3, g))),)))
    with pytest.raises(VerifyError, match="another wrote"):
        execute(Kernel("race", (out,), (), ((g, 4),), body), np.zeros(4, np.float32))


def test_check_reports_its_code_after_the_kernel():
    x, g = Buffer("x", i64, 3), Var("g")
    kernel = Kernel("c", (x,), (), ((g, 3),), (Check(k.lt(Load(x, g), 5), 1),))
    assert execute(kernel, [1, 2, 3])[0] == 0
    assert execute(kernel, [1, 7, 3])[0] == 1


def test_sixteen_bit_floats_widen_on_load_and_round_on_store():
    x, out = Buffer("x", bf16, 3), Buffer("out", bf16, 3, writable=True)
    g = Var("g")
    kernel = Kernel("h", (x, out), (), ((g, 3),), (Store(out, g, k.div(Load(x, g), 3.0)),))
    values = np.array([1, 2, 300], np.float32).astype(bf16.numpy)
    _, (_, got) = execute(kernel, values, np.zeros(3, bf16.numpy))
    assert got.dtype == bf16.numpy and got.tolist() == (values.astype(np.float32) / 3).astype(bf16.numpy).tolist()


def test_empty_loops_give_identities():
    out, i = Buffer("out", f32, 2, writable=True), Var("i")
    top, total = Var("top", f32), Var("total", f32)
    for vector in (True, False):
        loop = Loop(i, 0, (), vector, (Reduce(top, "max", k.cast(i, f32)), Reduce(total, "add", k.cast(i, f32))))
        body = (loop, Store(out, const(0), top), Store(out, const(1), total))
        assert execute(Kernel("e", (out,), (), (), body), np.zeros(2, np.float32))[1][0].tolist() == [-math.inf, 0]


def trunc_div(a, b):
    return 0 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def scalar(op, *args, out=None):
    with np.errstate(all="ignore"):
        return compute(op, [(np.array([v], d.numpy), d) for v, d in args], out or args[0][1])[0]


@pytest.mark.parametrize("dtype", [i8, u8, i64])
def test_integer_division_is_total(dtype):
    low, high = np.iinfo(dtype.numpy).min, np.iinfo(dtype.numpy).max
    for a in {int(low), int(low) + 1, 0, 1, 7, int(high)}:
        for b in {0, 1, 2, 3, int(high), *((-1, -2, int(low)) if low else ())}:
            quotient = trunc_div(a, b)
            wrapped = np.array(quotient & (2**dtype.bits - 1), np.uint64).astype(dtype.numpy)
            assert scalar("div", (a, dtype), (b, dtype)) == wrapped, (a, b)
            assert scalar("rem", (a, dtype), (b, dtype)) == (a - b * quotient if b else 0), (a, b)


@pytest.mark.parametrize(
    ("value", "target", "want"),
    [
        (math.nan, "i32", 0), (math.inf, "i32", 2**31 - 1), (-math.inf, "i64", -(2**63)), (2.0**63, "i64", 2**63 - 1),
        (-1.9, "i8", -1), (300, "i8", 127), (-5, "u8", 0), (255.9, "u8", 255), (2.0**64, "u64", 2**64 - 1),
        (2.0**63, "u64", 2**63), (-128.5, "i8", -128), (math.nan, "bool", True), (0.0, "bool", False), (1e9, "f16", math.inf),
    ],
)  # fmt: skip
def test_casts_from_float_saturate(value, target, want):
    assert scalar("cast", (value, f64), out=as_dtype(target)) == want


def test_float_scalars():
    assert math.isnan(scalar("max", (1.0, f32), (math.nan, f32))) and math.isnan(scalar("min", (math.nan, f32), (1.0, f32)))
    assert scalar("rem", (-5.5, f32), (2.0, f32)) == math.fmod(-5.5, 2.0)
    assert scalar("round", (2.5, f32)) == 2 and scalar("round", (3.5, f32)) == 4
    assert scalar("erf", (0.5, f64)) == math.erf(0.5)
    assert scalar("bitcast", (1.0, f32), out=i32) == 0x3F800000
    assert scalar("bitcast", (0x3F80, as_dtype("u16")), out=bf16) == 1.0
    assert not scalar("lt", (math.nan, f32), (1.0, f32), out=bool_) and scalar("ne", (math.nan, f32), (math.nan, f32), out=bool_)


def test_native_runs_the_reference_on_strided_views(monkeypatch):
    class Twice:
        reference = staticmethod(lambda attrs, x: x * 2)

    monkeypatch.setitem(OPS, "twice", Twice)
    x, out = Buffer("x", f32, 6), Buffer("out", f32, 7, writable=True)
    native = Native("twice", None, (View(x, (3, 2), (1, 3)),), (View(out, (3, 2), (2, 1), 1),))
    _, (_, got) = execute(Kernel("n", (x, out), (), (), (native,)), np.arange(6, dtype=np.float32), np.full(7, -1, np.float32))
    assert got.tolist() == [-1, 0, 6, 2, 8, 4, 10]
    beyond = Native("twice", None, (View(x, (3, 2), (2, 3)),), (View(out, (3, 2), (2, 1), 1),))
    with pytest.raises(VerifyError, match="views x"):
        execute(Kernel("n", (x, out), (), (), (beyond,)), np.zeros(6, np.float32), np.zeros(7, np.float32))


# -- whole programs ------------------------------------------------------------------------------------------------


def pointwise(name, n, make, *dtypes):
    """out = make(loads…) over n elements, f32 out."""
    ins = tuple(Buffer(f"in{i}", d, n) for i, d in enumerate(dtypes))
    out, g = Buffer("out", f32, n, writable=True), Var("g")
    return Kernel(name, (*ins, out), (), ((g, n),), (Store(out, g, make(*(Load(b, g) for b in ins))),))


def counter_program(target, overlap=False):
    """y = (x + state) * 2·w, state' = x + state; 2·w is prepared. `overlap`: a wrong plan, the sum lies on the input."""
    s = Shape((4,), f32)
    names = [
        (Region.INPUT, "x"), (Region.PARAM, "w"), (Region.PREPARED, "w*2"), (Region.HANDLE, "state"), (Region.ARENA, "%4"),
        (Region.OUTPUT, "y"), (Region.CONSTANT, "two"),
    ]  # fmt: skip
    buffers = tuple(
        BufferDecl(i, region, s, name, np.full(4, 2, np.float32) if region is Region.CONSTANT else None)
        for i, (region, name) in enumerate(names)
    )
    mul, add = pointwise("mul", 4, k.mul, f32, f32), pointwise("add", 4, k.add, f32, f32)
    copy = pointwise("copy", 4, lambda a: a, f32)
    offsets = {0: 0, 4: 8 if overlap else 64, 5: 128}
    return Program(
        "counter", target, buffers,
        prepare=(Step(mul, (1, 6, 2)),), steps=(Step(add, (0, 3, 4)), Step(mul, (4, 2, 5))), commit=(Step(copy, (4, 3)),),
        inputs=(0,), params=(1,), handles=(3,), outputs=(OutputDecl("y", 5, s),), plan=ArenaPlan(offsets, 192, 64, 192, 192),
    )  # fmt: skip


def loaded(program, backend):
    assert isinstance(backend, Backend)
    exe = backend.load(backend.compile(program))
    exe.write(1, np.array([1, 2, 3, 4], np.float32))
    exe.prepare([0])
    return exe


def test_program_runs_in_its_arena_and_clones_own_their_state():
    backend = RefBackend()
    exe = loaded(counter_program(backend.target()), backend)
    exe.write(3, np.zeros(4, np.float32))
    exe.write(0, np.ones(4, np.float32))
    exe.run()
    exe.run()
    assert exe.read(5).tolist() == [4, 8, 12, 16] and exe.read(3).tolist() == [2] * 4
    other = exe.clone()
    other.run()
    assert other.read(3).tolist() == [3] * 4 and exe.read(3).tolist() == [2] * 4
    assert other.address(1) == exe.address(1) and other.address(0) != exe.address(0)
    exe.run_steps()
    assert exe.read(3).tolist() == [2] * 4
    exe.prepare([0], {1: np.zeros(4, np.float32)})
    assert exe.read(2).tolist() == [0] * 4 and exe.read(1).tolist() == [1, 2, 3, 4]
    assert exe.memory() == {"arena": 192, "scratch": 0, "params": 16, "prepared": 16, "constants": 16, "handles": 16, "code": 0}
    view = exe.view(0)
    view[:] = 5
    assert exe.read(0).tolist() == [5] * 4 and exe.address(0) == view.ctypes.data


def test_a_wrong_plan_gives_wrong_results():
    backend = RefBackend()
    exe = loaded(counter_program(backend.target(), overlap=True), backend)
    exe.write(3, np.zeros(4, np.float32))
    exe.write(0, np.ones(4, np.float32))
    exe.run()
    exe.run()
    assert exe.read(5).tolist() != [4, 8, 12, 16]


def test_failed_check_commits_nothing():
    backend = RefBackend()
    program = counter_program(backend.target())
    x, g = Buffer("x", f32, 4), Var("g")
    check = Kernel("check", (x,), (), ((g, 4),), (Check(k.lt(Load(x, g), 10.0), 1),))
    program = Program(**{**program.__dict__, "steps": (*program.steps, Step(check, (0,)))})
    exe = loaded(program, backend)
    exe.write(3, np.zeros(4, np.float32))
    exe.write(0, np.full(4, 11, np.float32))
    with pytest.raises(IndexRangeError, match="check"):
        exe.run()
    assert exe.read(3).tolist() == [0] * 4


def test_null_records_and_refuses_to_invent_results():
    backend = NullBackend()
    exe = loaded(counter_program(backend.target()), backend)
    exe.write(0, np.ones(4, np.float32))
    exe.run()
    names = [("prepare", "mul", 32), ("steps", "add", 32), ("steps", "mul", 32), ("commit", "copy", 16)]
    assert exe.launches == [Launch(phase, kernel, read, 16) for phase, kernel, read in names]
    assert exe.uploads == [("w", 16), ("x", 16)] and exe.view(5) is None
    for attempt in (exe.read, exe.address):
        with pytest.raises(Unsupported, match="computes nothing"):
            attempt(5)
