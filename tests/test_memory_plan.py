"""The memory plan: in-place pairs proved against a point-by-point run, lifetimes, offsets, and the independent checker."""

import itertools
from dataclasses import replace

import known_programs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_programs import (
    COLUMNS,
    ROWS,
    TARGET,
    Maker,
    N,
    buffers,
    pointwise,
    product,
    row_sums,
    run,
    run_points,
    same,
    sample_program,
    shifted,
    transposed,
)

from rlx.compiler import CompileOptions, lower, memory
from rlx.compiler.check import _Facts, _overwrites_after_reading, check_program, program_faults
from rlx.compiler.memory import Lifetime, lifetimes, no_pairs, plan_arena
from rlx.errors import PlanError
from rlx.ir import BufferHandle, Graph, ops
from rlx.ir.dtype import f16, f32, i32
from rlx.ir.kernel import (
    Buffer,
    Computed,
    Contract,
    Kernel,
    Load,
    Local,
    Loop,
    Operand,
    Reduce,
    Store,
    Var,
    View,
    const,
    k,
    linear,
)
from rlx.ir.kernel import Native as NativeStmt
from rlx.ir.overlap import may_overlap, unaliased
from rlx.ir.program import BufferDecl, Region, Step
from rlx.ir.shape import Shape

# -- in place ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kernel, want",
    [
        (pointwise(2), {(0, 2), (1, 2)}),
        (pointwise(3), {(0, 3), (1, 3), (2, 3)}),
        (transposed(), set()),
        (shifted(1), set()),
        (shifted(-1), set()),
        (row_sums(), {(0, 1)}),
        (row_sums(before=True), set()),
        (row_sums(2), {(0, 2), (1, 2)}),
        (product(), {(2, 3)}),
        (product(residual=False), set()),
    ],
    ids=lambda x: x.name if isinstance(x, Kernel) else "",
)
def test_pairs_of_known_kernels(kernel, want):
    assert may_overlap(kernel) == want


def test_row_program_after_a_contraction_is_in_place_with_its_residual():
    """acc + residual goes to a row buffer, then each row is normalised: the residual's row is gone before it is written."""
    a, b = Buffer("a", f32, N), Buffer("b", f32, COLUMNS * COLUMNS)
    extra, out, row = Buffer("extra", f32, N), Buffer("out", f32, N, writable=True), Local("row", f32, COLUMNS, per_row=True)
    i, j, c, d, acc, total = Var("i"), Var("j"), Var("c"), Var("d"), Var("acc", f32), Var("total", f32)
    operands = Operand(a, const(0), COLUMNS, 1), Operand(b, const(0), COLUMNS, 1)
    epilogue = (Store(row, j, k.add(acc, Load(extra, linear([(i, COLUMNS), (j, 1)])))),)

    def at(v):
        return linear([(i, COLUMNS), (v, 1)])

    sums = Loop(c, COLUMNS, (), reduces=(Reduce(total, "add", Load(row, c)),))
    for late, want in ((False, {(2, 3)}), (True, {(2, 3)})):
        value = k.sub(Load(row, d), k.mul(total, Load(extra, at(d))) if late else total)
        rows = (sums, Loop(d, COLUMNS, (Store(out, at(d), value),)))
        kernel = Kernel(
            "rows", (a, b, extra, out), (row,), (), (Contract(i, j, ROWS, COLUMNS, COLUMNS, *operands, acc, epilogue, rows),)
        )
        assert may_overlap(kernel) == want
        assert_safe(kernel, want)


def test_a_computed_operand_may_be_read_again_after_the_epilogue_wrote():
    """Rows of `a` are made once per group of columns: what they read may not be overwritten by results of the same row."""
    x, b = Buffer("x", f32, N), Buffer("b", f32, COLUMNS * COLUMNS)
    extra, out = Buffer("extra", f32, N), Buffer("out", f32, N, writable=True)
    i, j, r, c, acc = Var("i"), Var("j"), Var("r"), Var("c"), Var("acc", f32)
    at = linear([(i, COLUMNS), (j, 1)])
    left = Computed(r, c, k.mul(Load(x, linear([(r, COLUMNS), (c, 1)])), 2.0), f32)
    store = Store(out, at, k.add(k.add(acc, Load(extra, at)), Load(x, at)))
    body = Contract(i, j, ROWS, COLUMNS, COLUMNS, left, Operand(b, const(0), COLUMNS, 1), acc, (store,))
    kernel = Kernel("norm_then_product", (x, b, extra, out), (), (), (body,))
    assert may_overlap(kernel) == {(2, 3)}
    assert [_overwrites_after_reading(_Facts(kernel), read, 3) for read in (0, 1, 2)] == [False, False, True]


def test_no_pair_without_proof():
    """Each kernel here has equal sizes and breaks one premise of the proof."""
    b, out = buffers(1)
    g, i, i2 = Var("g"), Var("i"), Var("i2")
    at = linear([(g, COLUMNS), (i, 1)])

    def one(*body, grid=((g, ROWS),), bs=(b, out)):
        return Kernel("k", bs, (), grid, body)

    same_place = Loop(i, COLUMNS, (Store(out, at, Load(b, at)),))
    assert may_overlap(one(same_place)) == {(0, 1)}
    not_injective = Loop(
        i, COLUMNS, (Store(out, linear([(g, COLUMNS - 1), (i, 1)]), Load(b, linear([(g, COLUMNS - 1), (i, 1)]))),)
    )
    assert may_overlap(one(not_injective)) == set()
    ignores_the_grid = Loop(i, COLUMNS, (Store(out, i, Load(b, i)),))
    assert may_overlap(one(ignores_the_grid)) == set()
    not_affine = Loop(i, COLUMNS, (Store(out, k.rem(at, 7), Load(b, k.rem(at, 7))),))
    assert may_overlap(one(not_affine)) == set()
    load_after_store = Loop(i, COLUMNS, (Store(out, at, k.const(1.0, f32)), Store(out, at, Load(b, at))))
    assert may_overlap(one(load_after_store)) == set()
    reads_back = Loop(i, COLUMNS, (Store(out, at, k.add(Load(b, at), Load(out, at))),))
    assert may_overlap(one(reads_back)) == set()
    two_loops = Loop(i, COLUMNS - 1, (), reduces=(Reduce(Var("t", f32), "add", Load(b, at)),))
    assert (
        may_overlap(one(two_loops, Loop(i2, COLUMNS, (Store(out, linear([(g, COLUMNS), (i2, 1)]), k.const(1.0, f32)),))))
        == set()
    )
    by_index = Loop(i, COLUMNS, (Store(out, at, Load(b, k.cast(Load(Buffer("n", i32, N), at), const(0).dtype))),))
    assert may_overlap(one(by_index)) == set()
    view = View(b, (N,), (1,))
    assert may_overlap(one(NativeStmt("relu", None, (view,), (View(out, (N,), (1,)),)))) == set()
    small = Buffer("small", f32, N - 1)
    assert may_overlap(one(Loop(i, COLUMNS, (Store(out, at, Load(small, at)),)), bs=(small, out))) == set()
    halves = Buffer("halves", f32, N), Buffer("out", f16, N, writable=True)
    assert may_overlap(one(Loop(i, COLUMNS, (Store(halves[1], at, Load(halves[0], at)),)), bs=halves)) == set()


def assert_safe(kernel, pairs):
    """Every pair gives, in one memory and with the grid points in any order, what separate memories give."""
    points = int(np.prod([n for _, n in kernel.grid]))
    rng = np.random.default_rng(0)
    start = [rng.integers(-9, 9, b.size).astype("f8") for b in kernel.buffers]
    for r, w in pairs:
        for order in (range(points), range(points)[::-1], rng.permutation(points)):
            apart = [a.copy() for a in start]
            run_points(kernel, apart, order)
            together = [a.copy() for a in start]
            untouched = set(range(together[w].size)) - written_elements(kernel, w)
            together[w] = together[r]
            run_points(kernel, together, order)
            want = apart[w].copy()
            for e in untouched:
                want[e] = together[w][e]
            np.testing.assert_array_equal(together[w], want)


def written_elements(kernel, w):
    marks = [np.zeros(b.size) for b in kernel.buffers]
    marks[w][:] = np.nan
    run_points(kernel, marks, range(int(np.prod([n for _, n in kernel.grid]))))
    return set(np.flatnonzero(~np.isnan(marks[w])))


@st.composite
def kernels(draw):
    """Kernels of two read buffers and a written one: a grid, up to two loops over it, affine and other indices."""
    grid = [(Var(f"g{i}"), draw(st.integers(1, 3))) for i in range(draw(st.integers(0, 2)))]
    bs = buffers(2, 200)
    names = [v for v, _ in grid]

    def index(loops):
        if loops and draw(st.integers(0, 9)) == 0:
            return k.rem(k.mul(loops[-1], 3), 4)
        coefficients = draw(st.lists(st.sampled_from((0, 1, 1, 2, 3, 4, 6, 12)), min_size=4, max_size=4))
        return linear(list(zip((*names, *loops), coefficients)), draw(st.integers(0, 2)))

    shared = {}  # the same index again, so that there is something to prove

    def again(loops):
        key = len(loops)
        if key not in shared or draw(st.integers(0, 3)) == 0:
            shared[key] = draw(st.lists(st.sampled_from((1, 2, 3, 4, 6, 12)), min_size=4, max_size=4)), draw(st.integers(0, 2))
        coefficients, offset = shared[key]
        return linear(list(zip((*names, *loops), coefficients)), offset)

    def load(loops):
        return Load(draw(st.sampled_from(bs[:2])), again(loops) if draw(st.booleans()) else index(loops))

    def body(depth, loops):
        out = []
        for _ in range(draw(st.integers(1, 2))):
            kind = draw(st.integers(0, 2)) if depth < 2 else 0
            if kind == 0:
                out.append(
                    Store(bs[2], again(loops) if draw(st.integers(0, 3)) else index(loops), k.add(load(loops), load(loops)))
                )
            else:
                v = Var(f"i{depth}")
                reduces = (Reduce(Var("t", f32), "add", load([*loops, v])),) if draw(st.booleans()) else ()
                inner = body(depth + 1, [*loops, v]) if draw(st.booleans()) or not reduces else ()
                out.append(Loop(v, draw(st.integers(1, 3)), inner, reduces=reduces))
        return tuple(out)

    return Kernel("random", bs, (), tuple(grid), body(0, []))


@settings(max_examples=300)
@given(kernels())
def test_every_proved_pair_is_safe_and_the_checker_can_prove_it_too(kernel):
    pairs = may_overlap(kernel)
    facts = _Facts(kernel)
    accepted = {(r, 2) for r in (0, 1) if _overwrites_after_reading(facts, r, 2)}
    assert pairs <= accepted
    assert_safe(kernel, accepted)


@pytest.mark.parametrize("kernel", [transposed(), shifted(1), shifted(-1)], ids=["transposed", "next", "previous"])
def test_the_point_by_point_run_shows_an_unsafe_pair(kernel):
    with pytest.raises(AssertionError):
        assert_safe(kernel, {(0, 1)})


# -- lifetimes and offsets -----------------------------------------------------------------------------------------


def test_lifetimes_of_every_region():
    m = sample_program()
    program = m.program()
    steps = program.steps + program.commit
    lives = lifetimes(program.buffers, steps, {o.buffer for o in program.outputs})
    end = len(steps)
    assert set(lives) == {b.id for b in program.buffers if b.region in (Region.ARENA, Region.INPUT, Region.OUTPUT)}
    assert all(lives[i] == Lifetime(-1, end) for i in program.inputs)
    by_name = {b.name: lives[b.id] for b in program.buffers if b.id in lives}
    assert by_name["v7"] == Lifetime(0, 1)  # first temporary: written by step 0, read by step 1
    assert by_name["v13"] == Lifetime(7, 9)  # the last: the commit reads it
    assert by_name["v14"] == Lifetime(4, end)  # an output lives on


def test_small_buffers_may_rest_before_their_memory_is_used_again():
    m = sample_program()
    program = m.program()
    steps, outputs = program.steps + program.commit, {o.buffer for o in program.outputs}
    size = {b.id: b.nbytes for b in program.buffers}
    least = min(size[i] for i in program.plan.offsets)
    before, after = (lifetimes(program.buffers, steps, outputs, rest_bytes=n) for n in (0, least))
    for i, life in before.items():
        rests = size[i] <= least and i not in program.inputs
        assert after[i] == Lifetime(life.first, min(len(steps), life.last + 4 * rests))
    assert after != before
    resting = replace(program, plan=plan_arena(program.buffers, steps, outputs, 64, rest_bytes=1 << 20))
    check_program(resting)
    assert resting.plan.size_bytes > program.plan.size_bytes


def test_in_place_and_reuse_save_memory_and_change_nothing():
    m = sample_program()
    plans = {
        name: m.program(**how) for name, how in {"none": {"reuse": False}, "reuse": {"pairs": no_pairs}, "inplace": {}}.items()
    }
    sizes = {name: p.plan.size_bytes for name, p in plans.items()}
    assert sizes["inplace"] < sizes["reuse"] < sizes["none"] == plans["none"].plan.unshared_bytes
    for program in plans.values():
        check_program(program)
    results = [run(p) for p in plans.values()]
    assert same(results[0], results[1]) and same(results[0], results[2])


def test_a_chain_of_pointwise_steps_takes_one_buffer():
    m = Maker()
    at = m.buffer(Region.INPUT)
    for _ in range(20):
        at, before = m.buffer(Region.ARENA), at
        m.step(pointwise(1), before, at)
    out = m.buffer(Region.OUTPUT)
    m.step(pointwise(1), at, out)
    m.output(out)
    program = m.program()
    check_program(program)
    assert program.plan.size_bytes == 2 * 128 and program.plan.lower_bound_bytes == 2 * 96
    assert program.plan.offsets[1] == program.plan.offsets[out]


def test_a_buffer_passed_twice_is_in_place_only_if_both_readings_allow_it():
    """residual = b[i] + b[i+1] style: one argument's index is the store's, the other's is not."""
    b0, b1, out = buffers(2)
    i = Var("i")
    mixed = Kernel("mixed", (b0, b1, out), (), ((i, N),), (Store(out, i, k.add(Load(b0, i), Load(b1, k.sub(N - 1, i)))),))
    assert may_overlap(mixed) == {(0, 2)}
    for twice in (True, False):
        m = Maker()
        x, t, u, out_id = m.buffer(Region.INPUT), m.buffer(Region.ARENA), m.buffer(Region.ARENA), m.buffer(Region.OUTPUT)
        m.step(pointwise(1), x, t)
        m.step(pointwise(1), x, u)
        m.step(mixed, t, t if twice else u, out_id)
        m.output(out_id)
        program = m.program()
        check_program(program)
        assert (program.plan.offsets[t] == program.plan.offsets[out_id]) is not twice


def test_the_order_of_first_use_is_kept_where_it_needs_less(monkeypatch):
    """By size, the two large ones get one place, which the first small one does not leave."""
    sizes, lives = (128, 256, 128, 256), ((0, 3), (4, 4), (3, 4), (0, 1))
    monkeypatch.setattr(memory, "lifetimes", lambda *_: {i: Lifetime(*life) for i, life in enumerate(lives)})
    decls = [BufferDecl(i, Region.ARENA, Shape((n // 4,), f32), f"%{i}") for i, n in enumerate(sizes)]
    steps = [Step(pointwise(), ())] * 5
    assert plan_arena(decls, steps, (), 64, reuse=False).size_bytes == 384


def test_dead_empty_and_unused_buffers():
    m = Maker()
    x, unused, dead = m.buffer(Region.INPUT), m.buffer(Region.ARENA), m.buffer(Region.ARENA)
    empty, out = m.buffer(Region.ARENA, 0), m.buffer(Region.OUTPUT, 0)
    m.step(pointwise(1), x, dead)
    m.output(out)
    program = m.program()
    check_program(program)
    assert program.plan.lower_bound_bytes == 2 * 96
    assert program.plan.offsets.keys() == {x, unused, empty, dead, out}
    assert plan_arena((), (), (), 64).size_bytes == 0


def test_the_same_program_gets_the_same_plan():
    assert sample_program().program().plan == sample_program().program().plan


@pytest.mark.parametrize("alignment", [64, 256, 4096])
def test_alignment(alignment):
    plan = sample_program().program(alignment=alignment).plan
    assert plan.alignment == alignment and plan.size_bytes % alignment == 0
    assert all(at % alignment == 0 for at in plan.offsets.values())


SIZES = (0, 4, 24, 24, 24, 60)


@st.composite
def step_graphs(draw):
    """Programs of random steps over random buffers of a few sizes; some read outputs back, some are never read."""
    m = Maker()
    live = {n: [] for n in set(SIZES)}
    for _ in range(draw(st.integers(1, 3))):
        n = draw(st.sampled_from(SIZES))
        live[n].append(m.buffer(Region.INPUT, n))
    for _ in range(draw(st.integers(1, 14))):
        n = draw(st.sampled_from([n for n in sorted(live) if live[n]] if draw(st.booleans()) else SIZES))
        reads = [draw(st.sampled_from(live[n])) for _ in range(draw(st.integers(1, 3)))] if live[n] else []
        if n == 24 and reads and draw(st.integers(0, 2)):
            kernel, reads = draw(st.sampled_from((transposed(), shifted(), row_sums()))), reads[:1]
        elif reads:
            kernel = pointwise(len(reads), n)
        else:
            kernel = filled(n)
        made = m.buffer(Region.OUTPUT if draw(st.integers(0, 4)) == 0 else Region.ARENA, n)
        if m.decls[made].region is Region.OUTPUT:
            m.output(made)
        m.step(kernel, *reads, made)
        live[n].append(made)
    return m


def filled(size):
    out, i = Buffer("out", f32, size, writable=True), Var("i")
    return Kernel("filled", (out,), (), (), (Loop(i, size, (Store(out, i, k.const(1.5, f32)),)),))


@settings(max_examples=150)
@given(step_graphs(), st.sampled_from((64, 128)))
def test_plans_of_random_step_graphs(m, alignment):
    program = m.program(alignment=alignment)
    plan = program.plan
    assert program_faults(program) == []
    assert plan.lower_bound_bytes <= plan.size_bytes <= plan.unshared_bytes
    brute_force(program)
    assert same(run(program, 1), run(m.program(reuse=False, pairs=no_pairs), 1))


def brute_force(program):
    """A map of who wrote each byte last: a read must find its own buffer in every byte."""
    owner = np.full(program.plan.size_bytes, -1)
    place = {b.id: slice(program.plan.offsets[b.id], program.plan.offsets[b.id] + b.nbytes) for b in program.buffers}
    for i in program.inputs:
        owner[place[i]] = i
    for s in program.steps:
        for r in s.reads:
            assert (owner[place[r]] == r).all()
        for w in s.writes:
            owner[place[w]] = w
    for kept in (*program.inputs, *(o.buffer for o in program.outputs)):
        assert (owner[place[kept]] == kept).all()


# -- programs compiled from graphs ---------------------------------------------------------------------------------


def encoder_block():
    g = Graph("block")
    x = g.input("x", (2, 5, 8), f32)
    weights = [g.param(f"w{i}", (8, 8), f32) for i in range(4)]
    total = g.handle(BufferHandle("total", (2, 5, 8), f32))

    def split(v):
        return v.reshape((2, 5, 2, 4)).transpose(0, 2, 1, 3)

    q, key, v = (split(x @ w) for w in weights[:3])
    mixed = ops.attention(q, key, v).transpose(0, 2, 1, 3).reshape((2, 5, 8)) @ weights[3]
    y = ops.layer_norm(x + mixed, g.param("scale", (8,), f32), g.param("shift", (8,), f32))
    z = y + ops.gelu(y)
    g.assign(total, total + z)
    g.set_outputs([z, ops.softmax(z @ weights[0])])
    return g


@pytest.mark.parametrize("disable", [(), ("inplace",), ("reuse",), ("fuse",), ("fuse", "inplace")])
def test_compiled_programs_pass_the_check_and_agree(disable):
    program = lower(encoder_block(), TARGET, CompileOptions(disable=disable))
    check_program(program)
    plain = lower(encoder_block(), TARGET, CompileOptions(disable=("reuse", "inplace", *("fuse",) * ("fuse" in disable))))
    assert same(run(program), run(plain))
    assert program.plan.lower_bound_bytes <= program.plan.size_bytes <= program.plan.unshared_bytes


def test_a_fault_is_a_plan_error_that_shows_the_program():
    m = Maker()
    x, t, out = m.buffer(Region.INPUT), m.buffer(Region.ARENA), m.buffer(Region.OUTPUT)
    m.step(pointwise(2), x, t, out)
    m.output(out)
    with pytest.raises(PlanError, match=r"(?s)'small' for ref has a bad plan:.*%1 is read before it is written.*program small"):
        check_program(m.program())


@pytest.mark.parametrize("name", ["small-encoder", "decoders", "extents", "ranks"])
def test_arguments_that_a_renderer_may_declare_unaliased_never_overlap(name):
    shared = 0
    for what, _, program in known_programs.programs(name):
        for step in (s for steps in program.phases.values() for s in steps):
            free = unaliased(step.kernel)
            for w, r in itertools.permutations(range(len(step.args)), 2):
                if step.kernel.buffers[w].writable and overlap(program, step.args[w], step.args[r]):
                    assert not free[w] and not free[r] and (r, w) in may_overlap(step.kernel), (what, step.kernel.name)
                    shared += 1
    assert shared or name == "ranks"


def overlap(program, a, b):
    """Whether two buffers of a program have bytes in common."""
    if a == b:
        return True
    if not {a, b} <= program.plan.offsets.keys():
        return False
    (low, size), (high, _) = sorted((program.plan.offsets[id], program.buffers[id].nbytes) for id in (a, b))
    return low + size > high
