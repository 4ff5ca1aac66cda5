"""Fusion: how many kernels a graph becomes, and that each value is computed once, in the right kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import rlx
from rlx.backends import get
from rlx.backends.cpu.target import target_for
from rlx.compiler import lower
from rlx.compiler.fuse import MAX_NODES
from rlx.ir import kernel as K
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph, Value
from rlx.ir.kernel_text import kernel_key, print_kernel
from rlx.ir.program import Program


def compiled(build: Callable[[Graph], list[Value]], device: str = "ref", index: int = 1, **options) -> tuple[Graph, Program]:
    g = Graph("g")
    g.set_outputs(build(g))
    return g, lower(g, replace(get(device).target(index), threads=2), rlx.CompileOptions(**options))


def x(g: Graph, *dims: int, name: str = "x") -> Value:
    return g.input(name, dims, rlx.f32)


def param(g: Graph, name: str, *dims: int) -> Value:
    return g.param(name, dims, rlx.f32)


CASES: dict[str, tuple[Callable[[Graph], list[Value]], int]] = {
    "a chain of pointwise ops": (lambda g: [rlx.exp(x(g, 4, 5) * 2.0) + 1.0], 1),
    "two branches that meet": (lambda g: [rlx.exp(x(g, 4, 5)) * rlx.tanh(x(g, 4, 5, name="y"))], 1),
    "softmax": (lambda g: [rlx.softmax(x(g, 4, 5) * 0.5)], 1),
    "layer_norm of a sum": (lambda g: [rlx.layer_norm(x(g, 4, 5) + x(g, 4, 5, name="y"), param(g, "s", 5), param(g, "b", 5))], 1),
    "two norms in a row": (lambda g: [rlx.rms_norm(rlx.softmax(x(g, 4, 5)), param(g, "s", 5))], 1),
    "contraction with bias and gelu": (lambda g: [rlx.gelu(x(g, 4, 5) @ param(g, "w", 5, 6) + param(g, "b", 6))], 1),
    "contraction, residual and norm": (
        lambda g: [rlx.layer_norm(x(g, 32, 6) @ param(g, "w", 6, 6) + x(g, 32, 6, name="r"), param(g, "s", 6), param(g, "b", 6))],
        1,
    ),
    "few rows keep the norm apart": (lambda g: [rlx.softmax(x(g, 2, 6) @ param(g, "w", 6, 6))], 2),
    "mean over the middle, then a norm": (
        lambda g: [rlx.rms_norm(rlx.sum(x(g, 2, 7, 5) * x(g, 2, 7, 1, name="m"), axis=1), param(g, "s", 5))],
        1,
    ),
    "heads are split and merged without a copy": (
        lambda g: [
            rlx.matmul(
                rlx.attention(*(x(g, 7, 24, name=n).reshape(1, 7, 4, 6).transpose(0, 2, 1, 3) for n in "qkv"))
                .transpose(0, 2, 1, 3)
                .reshape(7, 24),
                param(g, "w", 24, 3),
            )
        ],
        2,
    ),
    "a value read under a transpose is written first": (lambda g: (lambda y: [y + y.T])(rlx.exp(x(g, 4, 4))), 2),
    "views alone cost nothing": (lambda g: [x(g, 6, 4).reshape(2, 3, 4).transpose(1, 0, 2) + 1.0], 1),
    "a norm of rows that are rotated": (lambda g: [rotated(g, rlx.rms_norm(x(g, 2, 3, 8), param(g, "s", 8)))], 1),
    "a norm of rows rotated from one to the next": (
        lambda g: (lambda y: [rlx.concat(y[:, ::-1], y, axis=-1)])(rlx.rms_norm(x(g, 3, 8), param(g, "s", 8))),
        2,
    ),
    "a norm of rows that are joined by columns of others": (
        lambda g: (lambda y: [rlx.concat(y[::-1, :4], y[:, 4:], axis=-1)])(rlx.rms_norm(x(g, 3, 8), param(g, "s", 8))),
        2,
    ),
    "a norm of rows that are columns of others": (
        lambda g: (lambda y: [rlx.concat((y * 2.0).T[:, :2], (y * 3.0).T[:, 2:], axis=-1)])(
            rlx.rms_norm(x(g, 4, 4), param(g, "s", 4))
        ),
        2,
    ),
    "gather feeds a norm": (
        lambda g: [rlx.rms_norm(rlx.embedding(param(g, "t", 9, 5), g.input("i", (3,), rlx.i32)), param(g, "s", 5))],
        1,
    ),
}


def rotated(g: Graph, y: Value) -> Value:
    half = y.dims[-1] // 2
    a, b, cos, sin = y[..., :half], y[..., half:], x(g, half, name="cos"), x(g, half, name="sin")
    return rlx.concat(a * cos - b * sin, b * cos + a * sin, axis=-1)


@pytest.mark.parametrize("name", CASES)
def test_kernel_count_and_value(name: str) -> None:
    build, kernels = CASES[name]
    g, program = compiled(build)
    assert len(program.steps) == kernels, str(program)
    run_and_compare(g)


def run_and_compare(g: Graph, devices: tuple[str, ...] = ("ref", "ref:1", "cpu")) -> None:
    rng = np.random.default_rng(0)
    make = lambda v: (  # noqa: E731
        rng.integers(0, 3, v.dims).astype(np.int32) if v.dtype == rlx.i32 else rng.standard_normal(v.dims).astype(np.float32)
    )
    inputs, params = {v.name: make(v) for v in g.inputs}, {v.name: make(v) for v in g.params}
    want, _ = evaluate(g, inputs, params, {})
    for device in devices:
        for options in (rlx.CompileOptions(), rlx.CompileOptions(disable=("fuse", "inplace", "reuse"))):
            run = rlx.Session(device).compile(g, options)
            for n, value in params.items():
                run.set_param(n, value)
            for found, expected in zip(run.run(inputs), want, strict=True):
                np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5, err_msg=f"{device} {options}")


def shares_of_two_axes(g: Graph) -> list[Value]:
    y = rlx.exp(x(g, 7, 5))
    return [y / rlx.sum(y, axis=0, keepdims=True) + y / rlx.sum(y, axis=1, keepdims=True)]


def scaled_columns(g: Graph) -> list[Value]:
    y = x(g, 2, 7, 5) * param(g, "s", 5) + x(g, 7, 1, name="m")
    root = rlx.rsqrt(rlx.mean(y * y, axis=1, keepdims=True) + 1e-3)
    return [y * root * param(g, "t", 7, 5), root]


COLUMNS: dict[str, tuple[Callable[[Graph], list[Value]], int]] = {
    "softmax down columns": (lambda g: [rlx.softmax(x(g, 7, 5) * 0.5, axis=0)], 1),
    "softmax between axes": (lambda g: [rlx.softmax(x(g, 2, 7, 3, 5), axis=1)], 1),
    "columns without their mean": (lambda g: (lambda y: [rlx.relu(y - rlx.mean(y, axis=0, keepdims=True))])(x(g, 7, 5)), 1),
    "columns divided by their size": (scaled_columns, 1),
    "softmax along one axis, then the other": (lambda g: [rlx.softmax(rlx.softmax(x(g, 7, 5), axis=0))], 2),
    "parts of the sums along two axes": (shares_of_two_axes, 2),
    "a product of them": (lambda g: [rlx.softmax(x(g, 7, 5), axis=0) @ param(g, "w", 5, 6)], 2),
    "one column": (lambda g: [rlx.softmax(x(g, 7, 1), axis=0)], 1),
    "columns too long": (lambda g: [rlx.softmax(x(g, 3000, 2), axis=0)], 4),
}


def gated(g: Graph, rows: int) -> list[Value]:
    y = x(g, rows, 16)
    y = y * rlx.rsqrt(rlx.mean(y * y, axis=1, keepdims=True) + 1e-3) * param(g, "s", 16)
    both = y @ rlx.transpose(x(g, 24, 16, name="w"), (1, 0))
    gate, up = both[:, :12], both[:, 12:]
    return [gate / (1.0 + rlx.exp(-gate)) * up]


def test_halves_of_a_product_meet_in_the_kernel_that_computes_its_left_operand(monkeypatch: pytest.MonkeyPatch) -> None:
    ref, plain = get("ref"), get("ref").target
    how = {"pairs": lambda node: True, "computes": lambda producer: producer.side == 0}
    monkeypatch.setattr(ref, "target", lambda *a, **k: replace(plain(*a, **k), **how))
    for rows in (1, 3):
        g, program = compiled(lambda g, rows=rows: gated(g, rows))
        (step,) = program.steps
        (contract,) = step.kernel.body
        assert isinstance(contract, K.Contract) and isinstance(contract.a, K.Computed)
        assert contract.also and (contract.n, contract.width) == (12, 24)
        run_and_compare(g, ("ref", "ref:1"))


@pytest.mark.parametrize(("size", "index", "kernels"), [(1, 1, 1), (4, 1, 1), (5, 1, 2), (1, 0, 2)])
def test_a_few_elements_are_computed_where_they_are_read(size: int, index: int, kernels: int) -> None:
    """On devices where a kernel costs more than that. Sums are not: every reader would add them up."""
    for op, of, count in ((lambda v: v * 2.0 + 1.0, 1, kernels), (lambda v: rlx.sum(v, axis=1, keepdims=True) * 2.0, 2, 2)):
        g, program = compiled(lambda g, op=op, of=of: [op(x(g, size, of, name="few")) * x(g, size, 64)], index=index)
        assert len(program.steps) == count, str(program)
        run_and_compare(g, ("ref", "ref:1"))


@pytest.mark.parametrize("name", COLUMNS)
def test_columns_that_a_kernel_may_read_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ref, plain = get("ref"), get("ref").target
    monkeypatch.setattr(ref, "target", lambda *a, **k: replace(plain(*a, **k), column_bytes=8192))
    build, kernels = COLUMNS[name]
    g, program = compiled(build)
    assert len(program.steps) == kernels, str(program)
    run_and_compare(g, ("ref", "ref:1"))


def gathered(g: Graph, table: Value, count: int) -> Value:
    return rlx.gather(table, g.input("i", (count,), rlx.i32))


def merged_after_a_reduction(g: Graph) -> list[Value]:
    y = rlx.exp(x(g, 4, 4))
    return [rlx.tanh(x(g, 4, 4, name="a")) + rlx.sum(y, axis=-1), y]


def kept_row_read_transposed(g: Graph) -> list[Value]:
    y = rlx.exp(x(g, 4, 4))
    return [y.T + 1.0 + y / rlx.sum(y, axis=-1, keepdims=True)]


def norm_read_at_its_own_place_and_gathered(g: Graph) -> list[Value]:
    y = rlx.softmax(x(g, 5, 4))
    return [gathered(g, y, 5) + y]


def two_projections_that_meet(g: Graph) -> list[Value]:
    a = x(g, 32, 6)
    q = a @ param(g, "v", 6, 6)
    return [rlx.silu(a @ param(g, "w", 6, 6)) * q, rlx.softmax(q)]


def chosen_rows(g: Graph) -> list[Value]:
    y = rlx.softmax(x(g, 5, 4))
    best = rlx.argmax(y)
    return [best, rlx.gather(y, best)]


def both_results_of_top_k(g: Graph) -> list[Value]:
    values, places = rlx.top_k(rlx.exp(x(g, 3, 7)), k=4)
    return [values + places.astype(rlx.f32), rlx.softmax(values)]


# what a kernel may not mix up: elements at hand and elements elsewhere, reads within a guard, coordinates of dims of 1
HARD: dict[str, Callable[[Graph], list[Value]]] = {
    "a reduced row read along columns, square": merged_after_a_reduction,
    "a kept row read transposed": kept_row_read_transposed,
    "a norm gathered and read in step": norm_read_at_its_own_place_and_gathered,
    "two projections that meet": two_projections_that_meet,
    "rows chosen by argmax": chosen_rows,
    "both results of top_k": both_results_of_top_k,
    "a gather within a concat": lambda g: [rlx.concat(gathered(g, x(g, 9, 4), 5), x(g, 3, 4, name="y"), axis=0)],
    "a gather within a pad": lambda g: [rlx.pad(gathered(g, x(g, 9, 4), 5), low=(1, 2), high=(2, 1), value=3.0)],
    "a concat within a pad": lambda g: [rlx.pad(rlx.concat(x(g, 3, 4), x(g, 2, 4, name="y"), axis=0), low=(1, 2), high=(2, 1))],
    "a reversal within a concat": lambda g: [rlx.concat(rlx.exp(x(g, 9, 4))[::-1], x(g, 3, 4, name="y"), axis=0)],
    "a product over nothing within a pad": lambda g: [rlx.pad(rlx.prod(x(g, 0, 4), axis=0), low=(1,), high=(1,))],
    "a long gather, in chunks": lambda g: [gathered(g, x(g, 50), 9700) * 2.0],
    "a long concat, in chunks": lambda g: [rlx.concat(rlx.exp(x(g, 9000)), x(g, 333, name="y"), axis=0)],
    "a long sum over rows, in chunks": lambda g: [rlx.sum(rlx.exp(x(g, 2, 9001)), axis=0)],
    "a sum of sums in an epilogue": lambda g: [
        rlx.softmax(x(g, 32, 6) @ param(g, "w", 6, 6) + rlx.exp(rlx.sum(x(g, 3, 32, 6, name="y"), axis=0)))
    ],
    "a gather in an epilogue": lambda g: [rlx.relu(x(g, 32, 6) @ param(g, "w", 6, 6) + gathered(g, x(g, 5, 6, name="t"), 32))],
    "a vector on the right": lambda g: [rlx.softmax(rlx.relu(x(g, 32, 6) @ param(g, "w", 6)))],
    "heads split in two orders": lambda g: (
        lambda y: [rlx.softmax(y.reshape(3, 4, 2).transpose(1, 0, 2).reshape(4, 6)), y.T.reshape(2, 12) + 1.0]
    )(rlx.exp(x(g, 3, 8))),
    "a view as an output, twice": lambda g: (lambda y: [y.T, y.reshape(20), y, y.T])(rlx.exp(x(g, 4, 5))),
    "an input, a param and a constant as outputs": lambda g: [x(g, 2, 3), param(g, "w", 2).T, rlx.constant([1.0, 2.0])],
}


@pytest.mark.parametrize("name", HARD)
def test_hard_cases_have_the_reference_values(name: str) -> None:
    g = Graph("g")
    g.set_outputs(HARD[name](g))
    run_and_compare(g)


def test_a_value_used_twice_is_one_expression_whatever_its_dims() -> None:
    """Each of 40 steps reads the last twice: without sharing there would be 2 to the 40th expressions."""

    def build(g: Graph) -> list[Value]:
        v = x(g, 1, 5)
        for _ in range(40):
            v = v * v * 0.1 + v * 0.5
        return [v]

    g, _ = compiled(build)
    run_and_compare(g)


DEEP = {"gelu": rlx.gelu, "softplus": rlx.softplus, "erf": rlx.erf, "softmax": lambda v: rlx.softmax(v) + 0.1}


@pytest.mark.parametrize("op", DEEP.values(), ids=DEEP)
def test_long_chains_are_cut_into_kernels_of_bounded_size(op: Callable[[Value], Value]) -> None:
    def build(g: Graph) -> list[Value]:
        v = x(g, 2, 3)
        for _ in range(60):
            v = rlx.tanh(op(v))
        return [v]

    g, program = compiled(build)
    assert 2 <= len(program.steps) < 60
    assert max(len(s.kernel.origin) for s in program.steps) <= MAX_NODES
    run_and_compare(g, devices=("ref",))


TWICE: dict[str, Callable[[Value], Value]] = {
    "rotated": lambda v: rlx.concat(v[1:], v[:1], axis=0),
    "rotated, and scaled": lambda v: rlx.concat(v[1:], v[:1], axis=0) * 0.5,
    "joined with itself reversed": lambda v: rlx.concat(v[::-1], v, axis=0)[3:9],
    "gathered": lambda v: rlx.concat(rlx.gather(v, rlx.constant([1, 2, 3]), axis=0), v[:3], axis=0),
}


@pytest.mark.parametrize("op", TWICE.values(), ids=TWICE)
def test_a_value_read_at_several_coordinates_does_not_multiply_what_is_computed(op: Callable[[Value], Value]) -> None:
    """Each link of a chain reads the one before twice, so that what is computed in its reader is computed twice."""

    def expressions(links: int) -> int:
        def build(g: Graph) -> list[Value]:
            v = x(g, 6)
            for _ in range(links):
                v = op(v)
            return [v]

        g, program = compiled(build)
        run_and_compare(g, devices=("ref",))
        sizes = [sum(1 for _ in K.walk(s.kernel.body)) for s in program.steps]
        assert max(sizes) < 1000
        return sum(sizes)

    few = expressions(10)
    assert expressions(40) < 5 * few


def test_a_claimed_contraction_takes_no_epilogue() -> None:
    g = Graph("g")
    g.set_outputs([rlx.relu(x(g, 4, 5) @ param(g, "w", 5, 6))])
    program = lower(g, replace(get("ref").target(1), natives={"matmul": lambda node: None}), rlx.CompileOptions())
    assert [s.kernel.origin for s in program.steps] == [("matmul",), ("maximum",)]


def test_reports_name_each_node_once_with_its_kernel() -> None:
    g = Graph("g")
    q = x(g, 1, 2, 3, 4)
    g.set_outputs([rlx.exp(rlx.attention(q, q, q)).reshape(6, 4) @ param(g, "w", 4, 2)])
    nodes = lower(g, get("ref").target(1), rlx.CompileOptions()).nodes
    assert sorted((n.op, n.how) for n in nodes) == [
        ("attention", "native"), ("exp", "lowered"), ("matmul", "lowered"), ("pack", "prepared"), ("reshape", "view"),
    ]  # fmt: skip
    assert all(bool(n.kernel) is (n.how != "view") for n in nodes)


def test_fusion_can_be_switched_off() -> None:
    _, program = compiled(lambda g: [rlx.softmax(x(g, 4, 5) * 0.5)], disable=("fuse",))
    assert len(program.steps) == 7  # mul, max, sub, exp, sum, div of a row, mul


def test_weights_are_packed_once_and_ahead_of_runs() -> None:
    def build(g: Graph) -> list[Value]:
        w = param(g, "w", 6, 5)
        return [x(g, 4, 6) @ w, x(g, 3, 6, name="y") @ w]

    _, program = compiled(build)
    assert [len(program.prepare), len(program.steps)] == [1, 2]
    assert "pack" in program.prepare[0].kernel.origin
    for step in program.steps:
        (body,) = step.kernel.body
        assert isinstance(body, K.Contract) and body.b.panel == 3


def test_a_joined_weight_is_packed_without_being_written_in_between() -> None:
    def build(g: Graph) -> list[Value]:
        return [x(g, 4, 6) @ rlx.concat(param(g, "a", 5, 6), param(g, "b", 5, 6), axis=0).T]

    g, program = compiled(build)
    assert len(program.prepare) == 1 and {"concat", "pack"} <= set(program.prepare[0].kernel.origin)
    run_and_compare(g)


def test_rows_kept_between_passes_are_only_those_worth_it() -> None:
    _, program = compiled(lambda g: [rlx.softmax(x(g, 4, 5))])
    assert [local.size for local in program.steps[0].kernel.locals] == [5]  # exp is kept, x is read again
    _, program = compiled(lambda g: [x(g, 4, 5) - rlx.mean(x(g, 4, 5, name="y"), axis=1, keepdims=True)])
    assert program.steps[0].kernel.locals == ()


@pytest.mark.parametrize(("rows", "depth", "steps"), [(128, 384, 1), (128, 3072, 2), (512, 3072, 1)])
def test_threads_with_few_rows_do_not_each_read_large_weights(rows: int, depth: int, steps: int) -> None:
    """A product with the norm of its rows gives each of 16 threads whole rows, and so all of the weights."""
    g = Graph("g")
    made = x(g, rows, depth) @ param(g, "w", depth, 768)
    g.set_outputs([rlx.layer_norm(made, param(g, "s", 768), param(g, "b", 768))])
    assert len(lower(g, replace(get("ref").target(0), threads=16), rlx.CompileOptions()).steps) == steps


@pytest.mark.parametrize(
    ("cpu", "precision", "threads", "depth", "whole"),
    [
        ("sapphirerapids", "bf16", 16, 1536, False),
        ("sapphirerapids", "bf16", 16, 384, True),
        ("sapphirerapids", "bf16", 4, 1536, True),
        ("sapphirerapids", "bf16", 2, 8192, False),  # 64 rows of a thread
        ("sapphirerapids", "f32", 2, 8192, True),  # the same rows, which are multiplied more slowly
        ("sapphirerapids", "f32", 16, 1536, False),
        ("znver4", "bf16", 16, 1536, True),
        ("znver4", "f32", 16, 1536, True),
    ],
)
def test_slow_shared_caches_keep_norms_apart(cpu: str, precision: str, threads: int, depth: int, whole: bool) -> None:
    """128 rows. `whole`: a thread has whole rows of the product, of which it computes the norm, and so it reads all weights."""
    g = Graph("g")
    made = x(g, 128, depth) @ param(g, "w", depth, 384)
    g.set_outputs([rlx.layer_norm(made, param(g, "s", 384), param(g, "b", 384))])
    target = target_for("x86_64-unknown-linux-gnu", cpu, threads=threads)
    steps = lower(g, target, rlx.CompileOptions(precision=precision)).steps
    (product,) = (c for s in steps for c in s.kernel.body if isinstance(c, K.Contract))
    assert bool(product.rows) == whole


def test_equal_layers_share_their_kernels() -> None:
    def build(g: Graph) -> list[Value]:
        h = x(g, 16, 8)
        for i in range(4):
            h = rlx.gelu(h @ param(g, f"w{i}", 8, 8) + param(g, f"b{i}", 8))
        return [h]

    _, program = compiled(build)
    assert len(program.steps) == 4 and len({kernel_key(s.kernel) for s in program.steps}) == 1


def test_a_long_loop_cut_into_chunks_reads_nothing_past_its_end() -> None:
    g = Graph("chunks")
    table, ids = param(g, "t", 7), g.input("i", (9001,), rlx.i32)
    wide = x(g, 9001)
    g.set_outputs([rlx.gather(table, ids) + rlx.pad(wide, low=(3,), high=(0,))[3:] + rlx.concat(wide[:1], wide[1:])])
    run_and_compare(g)


DIMS = [(1, 9001), (1, 1, 9001), (9001, 1), (1, 9001, 1), (2, 9001), (1, 3, 1, 9001), (1, 40), (1, 8, 1, 5)]


@pytest.mark.parametrize("dims", DIMS)
def test_walking_in_order_takes_no_remainders(dims: tuple[int, ...]) -> None:
    """Axes of size 1, and axes that one stride walks, are no reason to take positions apart."""

    def build(g: Graph) -> list[Value]:
        a, b = x(g, *dims), x(g, *dims, name="b")
        return [rlx.where(a < 0.0, a * 3.0, a / 3.0) + b, rlx.max(a * b, axis=-1)]

    g, program = compiled(build)
    ops = {e.op for s in program.steps for e in K.walk(s.kernel.body) if isinstance(e, K.Alu) and e.dtype.name == "i64"}
    assert ops <= {"add", "mul"}, [print_kernel(s.kernel) for s in program.steps]
    run_and_compare(g)


@pytest.mark.parametrize("rows", [(1,), (1, 4), (3, 1)])
def test_contractions_walk_rows_in_order(rows: tuple[int, ...]) -> None:
    g, program = compiled(lambda g: [x(g, *rows, 6) @ param(g, "w", 6, 5) + x(g, *rows, 5, name="r")])
    assert not any(e.op in ("rem", "div") for s in program.steps for e in K.walk(s.kernel.body) if isinstance(e, K.Alu))
    run_and_compare(g)


def test_long_loops_read_without_asking_where_they_end() -> None:
    """A guarded read is a masked one in lanes, and of one place a gather."""
    g, program = compiled(lambda g: [x(g, 9001) * x(g, 1, name="s")])
    loads = [e for s in program.steps for e in K.walk(s.kernel.body) if isinstance(e, K.Load)]
    assert {(isinstance(e.index, K.Const), e.guard is None) for e in loads} == {(True, True), (False, True)}
    run_and_compare(g)


def test_a_scalar_beside_a_concat_of_parts_of_rows_joins_no_rows() -> None:
    def build(g: Graph) -> list[Value]:
        a = x(g, 9)
        return [rlx.roll(rlx.clip(a - a.mean(), -1.0, 1.0), 1) - x(g, 9, name="y") * 0.1]

    g, _ = compiled(build)
    run_and_compare(g)
