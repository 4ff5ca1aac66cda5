"""Schedules by themselves: the kernel as lowered and the kernel as ordered compute the same. Decisions that follow a target's
facts: how finely work is divided."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx.backends import get
from rlx.backends.cpu import schedule
from rlx.backends.ref.interpret import run_kernel
from rlx.backends.shared import long_sums
from rlx.compiler import lower
from rlx.ir.dtype import DTYPES, f32, f64, i32
from rlx.ir.kernel import Buffer, Computed, Contract, Kernel, Limit, Load, Local, Loop, Reduce, Store, Var, const, k, linear, walk
from rlx.ir.kernel_parse import parse_kernel
from rlx.ir.kernel_text import kernel_key, print_kernel
from rlx.ir.keys import key_facts
from rlx.ir.nest import substitute
from rlx.ir.target import Target

PLAIN = Target("plain", frozenset(DTYPES))  # has no schedule
Make = Callable[..., rlx.Value]


def lowered(make: Make, *leaves: tuple[tuple[int, ...], str], target: Target = PLAIN) -> list[Kernel]:
    g = rlx.Graph("g")
    g.set_outputs([make(*(g.input(f"x{i}", dims, dtype) for i, (dims, dtype) in enumerate(leaves)))])
    return [step.kernel for step in lower(g, target, rlx.CompileOptions(threads=1)).steps]


def results(kernel: Kernel, seed: int = 0) -> list[np.ndarray]:
    """The buffers that the kernel writes, for data that depends on the seed and the buffers."""
    rng = np.random.default_rng(seed)
    made = []
    for b in kernel.buffers:
        data = rng.uniform(0.5, 1.5, b.size) if b.dtype.is_float else rng.integers(0, 2 if b.dtype.kind == "b" else 100, b.size)
        made.append(np.zeros(b.size, b.dtype.numpy) if b.writable else data.astype(b.dtype.numpy))
    assert run_kernel(kernel, made) == 0
    return [array for b, array in zip(kernel.buffers, made) if b.writable]


def assert_same(plain: Kernel, ordered: Kernel, rtol: float) -> None:
    assert ordered.buffers == plain.buffers and kernel_key(parse_kernel(print_kernel(ordered))) == kernel_key(ordered)
    for want, got in zip(results(plain), results(ordered), strict=True):
        np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol)


REDUCTIONS = {"sum": rlx.sum, "max": rlx.max, "min": rlx.min, "prod": rlx.prod}
BEFORE: dict[str, Make] = {
    "as it is": lambda x, s: x,
    "scaled": lambda x, s: x * s,
    "reversed": lambda x, s: x[:, ::-1],
    "with another": lambda x, s: rlx.concat([x, x * s], axis=1),
}
AFTER: dict[str, Make] = {"stored": lambda r: r, "squared": lambda r: r * r, "cast": lambda r: rlx.cast(r, "f32")}


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    dims=st.tuples(st.integers(1, 3), st.integers(2, 40), st.sampled_from([1, 30, 64, 65, 300, 4100, 4101, 4103, 9000])),
    names=st.lists(st.sampled_from(sorted(REDUCTIONS)), min_size=1, max_size=2, unique=True),
    before=st.sampled_from(sorted(BEFORE)), after=st.sampled_from(sorted(AFTER)),
    dtype=st.sampled_from(["f32", "f64", "bf16", "i32", "u8"]),
)  # fmt: skip
def test_column_walks_compute_the_same(dims: tuple[int, int, int], names: list[str], before: str, after: str, dtype: str) -> None:
    def make(x: rlx.Value, s: rlx.Value) -> rlx.Value:
        y = BEFORE[before](x, s)
        found = [REDUCTIONS[name](y, axis=1) for name in names]
        return AFTER[after](found[0] if len(found) == 1 else found[0] + found[1])

    rtol = {"f32": 1e-4, "f64": 1e-12, "bf16": 2**-7}.get(dtype, 0)
    for plain in lowered(make, (dims, dtype), ((dims[2],), dtype)):
        ordered = schedule.column_walks(plain, PLAIN.run_columns)
        rows = dims[1] * (1 + (before == "with another"))
        if any(isinstance(s, Loop) and s.reduces for s in walk(plain)):
            assert (ordered is not plain) == (dims[2] >= schedule.LEAST_COLUMNS and rows >= 2 * schedule.ROWS_AT_ONCE)
        assert_same(plain, ordered, rtol)


@pytest.mark.parametrize("dims, runs", [((1, 9, 4096), 0), ((1, 9, 8200), 4), ((1, 9, 4099), 0), ((2, 9, 6000), 2)])
def test_runs_of_columns_are_grid_points(dims: tuple[int, int, int], runs: int) -> None:
    (plain,) = lowered(lambda x: rlx.sum(x, axis=1), (dims, "f32"))
    ordered = schedule.schedule(plain, PLAIN)
    assert [n for _, n in ordered.grid] == [n for _, n in plain.grid] + [runs] * (runs > 0)
    (total,) = ordered.locals
    assert total.size == dims[2] // max(runs, 1)
    assert_same(plain, ordered, 1e-6)


def reduction(rows: int, columns: int, index: Callable[[Var, Var], object], op: str = "add", **changes: object) -> Kernel:
    """A plain reduction of columns: x[index(row, column)]."""
    x, out, r, c = Buffer("x", f32, 60_000), Buffer("out", f32, columns, writable=True), Var("r"), Var("c")
    total = Var("total", f32)
    inner = Loop(r, rows, (), reduces=(Reduce(total, op, Load(x, index(r, c))),))  # type: ignore[arg-type]
    loop = Loop(c, columns, (inner, Store(out, c, total)), vector=True)
    limits = (Limit(c, const(3)),) if changes.pop("limited", False) else ()
    return Kernel("k", (x, out), (), (), (loop,), limits=limits)


def test_only_reads_along_the_columns_are_walked_and_only_if_there_are_enough() -> None:
    def ordered(rows: int = 20, columns: int = 100, down: int = 0, along: int = 1, **changes: object) -> bool:
        plain = reduction(rows, columns, lambda r, c: linear([(r, down or columns), (c, along)]), **changes)
        made = schedule.column_walks(plain, PLAIN.run_columns)
        assert_same(plain, made, 1e-5)
        return made is not plain

    assert ordered() and ordered(op="max") and ordered(rows=8) and ordered(columns=64)
    assert not ordered(rows=7) and not ordered(columns=63), "too few"
    assert not ordered(down=1, along=20), "each column is contiguous"
    assert not ordered(limited=True), "the extent cuts the columns"


def test_a_reduction_that_needs_the_rest_of_its_iteration_stays() -> None:
    x, out, r, s, c = Buffer("x", f32, 4000), Buffer("out", f32, 100, writable=True), Var("r"), Var("s"), Var("c")
    mean, spread = Var("mean", f32), Var("spread", f32)
    at = linear([(r, 100), (c, 1)])
    first = Loop(r, 40, (), reduces=(Reduce(mean, "add", k.mul(Load(x, at), 0.025)),))
    off = k.sub(Load(x, substitute(at, {r: s})), mean)
    second = Loop(s, 40, (), reduces=(Reduce(spread, "add", k.mul(off, off)),))
    plain = Kernel("k", (x, out), (), (), (Loop(c, 100, (first, second, Store(out, c, spread)), vector=True),))
    ordered = schedule.column_walks(plain, PLAIN.run_columns)
    assert [local.size for local in ordered.locals] == [100], "the first is walked"
    assert_same(plain, ordered, 1e-4)


# -- long sums -----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    n=st.sampled_from([5, 8192, 8193, 10_240, 20_001]), rows=st.integers(1, 3),
    name=st.sampled_from(["softmax", "layer_norm", "sum", "max and sum", "columns"]),
    dtype=st.sampled_from(["f32", "f64", "i32"]),
)  # fmt: skip
def test_long_sums_in_blocks_compute_the_same(n: int, rows: int, name: str, dtype: str) -> None:
    makes: dict[str, Make] = {
        "softmax": rlx.softmax, "layer_norm": rlx.layer_norm, "sum": lambda x: rlx.sum(x, axis=-1),
        "max and sum": lambda x: rlx.max(x, axis=-1) + rlx.sum(x, axis=-1),
        "columns": lambda x: rlx.sum(rlx.transpose(x), axis=0),
    }  # fmt: skip
    if dtype == "i32" and name in ("softmax", "layer_norm"):
        return
    for plain in lowered(makes[name], ((rows, n), dtype)):
        ordered = long_sums.long_sums(plain)
        adds = any(isinstance(s, Reduce) and s.op == "add" for s in walk(plain))
        assert (ordered is not plain) == (adds and dtype == "f32" and n > long_sums.SHORT)
        assert_same(plain, ordered, {"f32": 2e-3, "f64": 1e-10}.get(dtype, 0))


def test_long_sums_of_a_computed_operand_are_in_blocks_too() -> None:
    target = replace(PLAIN, computes=lambda producer: True)
    leaves = ((2, 9001), "f32"), ((9001, 3), "f32")
    (plain,) = lowered(lambda x, w: rlx.layer_norm(x) @ w, *leaves, target=target)
    (product,) = plain.body
    assert isinstance(product, Contract) and isinstance(product.a, Computed)
    ordered = long_sums.long_sums(plain)
    assert f64 in {r.result.dtype for r in walk(ordered) if isinstance(r, Reduce)}
    assert_same(plain, ordered, 1e-2)


def test_sums_over_several_axes_are_one_long_sum() -> None:
    (plain,) = lowered(lambda x: rlx.sum(x, axis=(0, 2)), ((1000, 2, 9), "f32"))
    nest = [s for s in walk(plain) if isinstance(s, Loop) and s.reduces]
    assert len(nest) == 2 and all(s.extent <= long_sums.SHORT for s in nest)
    ordered = long_sums.long_sums(plain)
    assert {r.result.dtype for s in walk(ordered) if isinstance(s, Loop) for r in s.reduces} == {f64}
    assert_same(plain, ordered, 1e-4)
    (short,) = lowered(lambda x: rlx.sum(x, axis=(0, 2)), ((900, 2, 9), "f32"))
    assert long_sums.long_sums(short) is short


# -- targets -------------------------------------------------------------------------------------------------------


def test_a_target_without_a_schedule_gets_plain_kernels() -> None:
    dims = (3, 9000, 300)
    for target in (PLAIN, get("null").target()):
        (kernel,) = lowered(lambda x: rlx.sum(x, axis=1), (dims, "f32"), target=target)
        assert not kernel.locals and [n for _, n in kernel.grid] == [3]
        (loop,) = kernel.body
        assert isinstance(loop, Loop) and loop.vector and loop.extent == 300
        inner, _ = loop.body
        assert isinstance(inner, Loop) and (inner.extent, inner.body, inner.reduces[0].result.dtype) == (9000, (), f32)
    (kernel,) = lowered(lambda x: rlx.sum(x, axis=1), (dims, "f32"), target=get("ref").target())
    assert not kernel.locals and {r.result.dtype for r in walk(kernel) if isinstance(r, Reduce)} == {f64}, "the error bound only"
    (kernel,) = lowered(lambda x: rlx.sum(x, axis=1), (dims, "f32"), target=get("cpu").target(threads=1))
    assert [(local.size, local.dtype) for local in kernel.locals] == [(300, f64)]


TWO = replace(PLAIN, threads=2)
# 132 multiprocessors of 2048 threads, each with eight blocks that run a grid point
GPU = replace(PLAIN, threads=132 * 2048, points_per_thread=8 / 2048, point_elements=4096, cache_bytes=64 << 10, line_bytes=128)


@pytest.mark.parametrize("target, parts", [(PLAIN, 1), (TWO, 8), (replace(PLAIN, threads=64), 64), (GPU, 256)])
def test_a_reduction_is_divided_as_finely_as_the_target_needs_and_its_size_allows(target: Target, parts: int) -> None:
    """With 64 threads the size is the limit: 256 parts would keep them busy, and have too few elements each."""
    first, *_ = lowered(lambda x: rlx.sum(x), ((1 << 20,), "f32"), target=target)
    assert math.prod(n for _, n in first.grid) == parts


@pytest.mark.parametrize(
    "target, rows, columns, kernels",
    [
        (TWO, 16, 8192, 1), (TWO, 15, 8192, 2), (TWO, 16, 8193, 2),
        (replace(PLAIN, threads=GPU.threads), 4096, 128, 2), (GPU, 4096, 128, 1), (GPU, 2048, 128, 2),
    ],
)  # fmt: skip
def test_rows_of_a_product_are_reduced_in_its_kernel_if_there_are_enough_and_they_fit(
    target: Target, rows: int, columns: int, kernels: int
) -> None:
    leaves = ((rows, 4), "f32"), ((4, columns), "f32")
    assert len(lowered(lambda x, w: rlx.softmax(x @ w), *leaves, target=target)) == kernels


def test_steps_run_concurrently_if_they_are_short_for_the_target() -> None:
    def groups(**facts: float) -> list[int]:
        g = rlx.Graph("g")
        g.set_outputs([rlx.sum(rlx.exp(g.input(f"x{i}", (100, 8 + i), "f32"))) for i in range(12)])
        steps = lower(g, replace(TWO, **facts), rlx.CompileOptions()).steps
        starts = [i for i, step in enumerate(steps) if not step.concurrent]
        return [b - a for a, b in zip(starts, [*starts[1:], len(steps)])]

    assert max(groups()) == 8, "four steps for each thread"
    assert max(groups(points_per_thread=1)) == 2
    assert max(groups(sync_ns=1)) == 1 and max(groups(flops_per_ns=1e-4)) == 1 and max(groups(bytes_per_ns=1e-3)) == 1


def test_facts_that_change_code_are_in_cache_keys() -> None:
    facts = key_facts(PLAIN)
    for name in ("points_per_thread", "point_elements", "cache_bytes", "line_bytes", "tile_rows", "sync_ns"):
        assert key_facts(replace(PLAIN, **{name: 7}))[name] == "7" != facts[name]


# -- substitution --------------------------------------------------------------------------------------------------


def test_substitution_keeps_what_is_shared_and_what_does_not_change() -> None:
    a, b, at, store = Var("a"), Var("b"), Local("l", i32, 9), Buffer("o", i32, 9, writable=True)
    shared, other = k.mul(a, 3), k.add(b, 1)
    body = (Store(store, shared, Load(at, k.add(shared, other))), Store(store, other, const(1, i32)))
    made = substitute(body, {a: const(2)})
    first, second = made
    assert second is body[1] and isinstance(first, Store) and print_kernel(Kernel("k", (store,), (at,), ((b, 1),), made))
    assert (first.index.value, first.value.index.args[1]) == (6, other), "constants are folded"  # type: ignore[union-attr]
    assert substitute(body, {Var("c"): const(2)}) is body
    moved = substitute(body[0], {a: b})
    assert moved.index is moved.value.index.args[0] and moved.index is not shared  # type: ignore[union-attr]
