"""Contractions that compute their operands, and claimed ops with an epilogue: which nodes join, and the same bits as apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from devices import TWO

import rlx
from rlx.backends import get
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.kernels import computed
from rlx.backends.cpu.target import target_for
from rlx.compiler import lower
from rlx.compiler.check import check_program
from rlx.errors import IndexRangeError
from rlx.ir import kernel as K
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import bf16, f32
from rlx.ir.graph import Graph, Value
from rlx.ir.kernel import Computed, Contract
from rlx.ir.ops import dequant_matmul
from rlx.ir.overlap import may_overlap
from rlx.ir.target import Producer

OFF = ("operands",)
Build = Callable[[Graph], Value]


def norm(rows: tuple[int, ...], k: int, n: int, dtype: str = "f32", kind: str = "rms") -> Build:
    def build(g: Graph) -> Value:
        x, s, w = g.input("x", (*rows, k), dtype), g.param("s", (k,), dtype), g.param("w", (k, n), dtype)
        normed = rlx.rms_norm(x, s) if kind == "rms" else rlx.layer_norm(x, s, g.param("t", (k,), dtype))
        return normed @ w

    return build


def cast(m: int, k: int, n: int, to: str) -> Build:
    return lambda g: (g.input("x", (m, k), "f32").astype(to) @ g.param("w", (k, n), to)).astype("f32")


def picked(m: int, k: int, n: int) -> Build:
    def build(g: Graph) -> Value:
        return rlx.gather(g.param("t", (20, k), "f32"), g.input("i", (m,), "i32"), axis=0) @ g.param("w", (k, n), "f32")

    return build


def both_sides(batch: tuple[int, ...], m: int, k: int, n: int) -> Build:
    def build(g: Graph) -> Value:
        a, b = g.input("x", (*batch, m, k), "f32"), g.input("y", (*batch, k, n), "f32")
        return rlx.relu(a - 0.25) @ (b * g.input("z", (n,), "f32"))

    return build


def broadcast(g: Graph) -> Value:
    """One left operand for three right ones, and a bias of each row in its producer."""
    a = rlx.exp(g.input("x", (1, 5, 7), "f32") + g.input("z", (5, 1), "f32"))
    return rlx.gelu(a @ g.input("y", (3, 7, 9), "f32"))


def followed(g: Graph) -> Value:
    """Passes on both sides of the product: a norm before it, a bias and softmax behind it."""
    x, w = g.input("x", (2, 9, 33), "f32"), g.param("w", (33, 50), "f32")
    return rlx.softmax(rlx.layer_norm(x * 2.0) @ w + g.param("b", (50,), "f32"))


CASES: dict[str, Build] = {
    **{f"norm {d}": norm((5,), 33, 50, d) for d in ("f32", "f64", "bf16", "f16")},
    "layer norm of one row": norm((), 64, 49, kind="layer"),
    "layer norm of many": norm((2, 70), 40, 48, kind="layer"),
    **{f"cast to {to}": cast(7, k, 50, to) for to, k in (("bf16", 33), ("f16", 32))},
    "gather": picked(9, 33, 20),
    "both sides": both_sides((), 33, 21, 50),
    "both sides of a batch": both_sides((2, 3), 6, 5, 17),
    "two columns": both_sides((2,), 4, 9, 2),
    "broadcast": broadcast,
    "followed": followed,
    "reshaped": lambda g: rlx.rms_norm(g.input("x", (3, 4, 20), "f32")).reshape((12, 20)) @ g.param("w", (20, 30), "f32"),
}


def made(build: Build) -> Graph:
    g = Graph("g")
    g.set_outputs([build(g)])
    return g


def values(g: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    out = {}
    for leaf in (*g.inputs, *g.params):
        dims = leaf.shape.static
        number = rng.integers(0, 20, dims) if leaf.dtype.is_int else rng.standard_normal(dims)
        out[leaf.node.name] = number.astype(leaf.dtype.numpy)
    return out


def result(g: Graph, given: dict[str, np.ndarray], device: str = "cpu", **options) -> tuple[np.ndarray, list[K.Kernel]]:
    compiled = rlx.Session(rlx.Device(device, 0)).compile(g, rlx.CompileOptions(**options))
    for p in g.params:
        compiled.set_param(p.node.name, given[p.node.name])
    (out,) = compiled.run({i.node.name: given[i.node.name] for i in g.inputs})
    return out, [s.kernel for s in compiled.program().steps]


def computed_operands(kernels: list[K.Kernel]) -> int:
    return sum(isinstance(o, Computed) for x in kernels for c in x.body if isinstance(c, Contract) for o in (c.a, c.b))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_the_same_bits_as_apart(name, threads, monkeypatch):
    monkeypatch.setattr(computed, "computes", lambda target, producer: True)
    g = made(CASES[name])
    given = values(g)
    one, kernels = result(g, given, threads=threads)
    apart, others = result(g, given, threads=threads, disable=OFF)
    assert computed_operands(kernels) > 0 == computed_operands(others) and len(kernels) < len(others)
    np.testing.assert_array_equal(one, apart)
    if threads == 1:
        reference, steps = result(g, given, "ref")
        assert computed_operands(steps) == computed_operands(kernels)
        np.testing.assert_array_equal(reference, result(g, given, "ref", disable=OFF)[0])
        tolerance = {"bfloat16": 3e-2, "float16": 4e-3}.get(one.dtype.name, 1e-5 if "16" not in name else 1e-3)
        np.testing.assert_allclose(one.astype("f8"), reference.astype("f8"), rtol=tolerance, atol=10 * tolerance)


def test_rows_past_the_extent_are_not_computed(monkeypatch):
    """Ids of padding may be anything; those of data are checked."""
    monkeypatch.setattr(computed, "computes", lambda target, producer: True)
    g = Graph("g")
    table, ids, w = g.param("t", (20, 33), "f32"), g.input("i", ("n",), "i32"), g.param("w", (33, 40), "f32")
    g.set_outputs([rlx.gather(table, ids, axis=0) @ w])
    compiled = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions(extent=("n", 64)))
    assert computed_operands([s.kernel for s in compiled.program().steps]) == 1
    rng = np.random.default_rng(0)
    t, weights = rng.standard_normal((20, 33)).astype("f4"), rng.standard_normal((33, 40)).astype("f4")
    compiled.set_param("t", t)
    compiled.set_param("w", weights)
    given = np.full(64, -7, np.int32)
    given[:21] = np.arange(21) % 20
    compiled.set_active_extent((21, 64))
    (y,) = compiled.run({"i": given})
    np.testing.assert_allclose(y[:21], t[given[:21]] @ weights, atol=1e-4)
    compiled.set_active_extent((22, 64))
    with pytest.raises(IndexRangeError):
        compiled.run({"i": given})


@pytest.mark.parametrize("device", TWO)
def test_an_index_out_of_range_in_an_operand_is_an_error(device):
    g = made(picked(9, 33, 20))
    given = values(g)
    for bad in (-1, 20):
        given["i"][4] = bad
        with pytest.raises(IndexRangeError):
            result(g, given, device)


def kept_apart() -> dict[str, Build]:
    def read_twice(g: Graph) -> Value:
        y = rlx.rms_norm(g.input("x", (4, 8), "f32"))
        return y @ g.param("w", (8, 8), "f32") + y

    def by_itself(g: Graph) -> Value:
        y = rlx.exp(g.input("x", (8, 8), "f32"))
        return y @ y

    def transposed(g: Graph) -> Value:
        return rlx.transpose(rlx.exp(g.input("x", (4, 8), "f32")), (1, 0)) @ g.param("w", (4, 8), "f32")

    def strided(g: Graph) -> Value:
        return rlx.exp(rlx.transpose(g.input("x", (4, 8), "f32"), (1, 0))) @ g.param("w", (4, 8), "f32")

    def column_sums(g: Graph) -> Value:
        return rlx.sum(g.input("x", (3, 4, 8), "f32"), axis=0) @ g.param("w", (8, 8), "f32")

    def fixed(g: Graph) -> Value:
        return g.input("x", (4, 8), "f32") @ rlx.exp(g.param("w", (8, 8), "f32"))

    return {f.__name__: f for f in (read_twice, by_itself, transposed, strided, column_sums, fixed)}


@pytest.mark.parametrize("name", kept_apart())
def test_other_operands_are_written_to_memory(name):
    """Read by others, in another order than it lies in memory, reduced for each element, or known before the run."""
    g = made(kept_apart()[name])
    program = lower(g, get("ref").target(0), rlx.CompileOptions())
    assert computed_operands([s.kernel for s in (*program.prepare, *program.steps)]) == 0


@pytest.mark.parametrize("name", ["norm f32", "both sides of a batch", "followed"])
def test_a_plan_that_puts_the_result_over_what_an_operand_reads_is_refused(name):
    g = made(CASES[name])
    program = lower(g, get("ref").target(0), rlx.CompileOptions())
    step = program.steps[-1]
    (written,) = step.writes
    at, tried = {b.id: b for b in program.buffers}, 0
    for read in sorted(step.reads - {written}):
        if read not in program.plan.offsets or at[read].nbytes > at[written].nbytes:
            continue
        offsets = {**program.plan.offsets, written: program.plan.offsets[read]}
        with pytest.raises(rlx.errors.PlanError):
            check_program(replace(program, plan=replace(program.plan, offsets=offsets)))
        tried += 1
    assert tried


@pytest.mark.parametrize(("rows", "kernels"), [(1, 1), (64, 2)])
def test_long_rows_behind_a_claimed_product_have_a_kernel_of_their_own(rows, kernels):
    """The epilogue would touch two cache lines of each of many rows at a time."""
    target = with_natives(target_for("x86_64-unknown-linux-gnu", "x86-64-v4", ("avx512vnni",)))
    g = made(lambda g: quantised(g, rows, 256, 1024))
    assert len(lower(g, target, rlx.CompileOptions()).steps) == kernels


RULE = [  # m, n, k, operations per element, threads -> whether it is computed
    ((1, 4096, 1024, 6, 1), True), ((512, 4096, 1024, 6, 1), True), ((128, 4096, 4096, 6, 1), False),
    ((1, 4096, 4096, 6, 2), True), ((16, 1024, 1024, 6, 2), True), ((512, 1024, 1024, 6, 2), True),
    ((16, 1024, 4096, 30, 2), False), ((16, 1024, 4096, 30, 16), False), ((0, 8, 8, 1, 1), False),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "want"), RULE, ids=str)
def test_the_rule_of_the_cpu(shape, want):
    """Little work, or rows that no other task computes again; never where rows of it push the other rows out of a block."""
    m, n, k, work, threads = shape
    target = with_natives(target_for("x86_64-unknown-linux-gnu", "x86-64-v4", (), threads))
    assert target.computes(Producer(0, m, n, k, 1, 1, f32, work)) is want
    assert not target.computes(Producer(0, m, n, k, 64, 64, bf16, 100.0))  # computed again at each of 64 points


def quantised(g: Graph, rows: int = 5, k: int = 256, n: int = 70) -> Value:
    x, r, b = g.input("x", (rows, k), "f32"), g.input("r", (rows, n), "f32"), g.param("b", (n,), "f32")
    w = g.param("w", (n, FORMATS["q8_0"].row_bytes(k)), "u8")
    return rlx.silu(dequant_matmul(rlx.rms_norm(x), w, format="q8_0") + b) + r


@pytest.mark.parametrize("rows", [1, 5, 40])
def test_a_claimed_product_takes_what_follows_and_what_comes_before(rows):
    """On one thread all of it is one kernel; with any part left out the bits are the same."""
    g = made(lambda g: quantised(g, rows))
    given = values(g)
    given["w"] = (given["w"].astype("u1") % 20).astype("u1")  # scales are small numbers
    one, kernels = result(g, given, threads=1)
    assert len(kernels) == 1 == computed_operands(kernels)
    for threads, disable in ((1, OFF), (1, ("followers",)), (1, ("fuse",)), (2, ()), (2, ("operands", "followers"))):
        other, more = result(g, given, threads=threads, disable=disable)
        assert len(more) > 1 or not disable
        np.testing.assert_array_equal(one, other)


# -- what follows a claimed op -------------------------------------------------------------------------------------


def attention(g: Graph, rows: int = 5, keys: int = 5, heads: tuple[int, int] = (3, 3), size: int = 24) -> Value:
    q = g.input("q", (2, heads[0], rows, size), "f32")
    return rlx.attention(q, *(g.input(n, (2, heads[1], keys, size), "f32") for n in "kv"), mask="causal")


def side_by_side(y: Value) -> Value:
    batch, heads, rows, size = y.shape.static
    return y.transpose(0, 2, 1, 3).reshape((batch, rows, heads * size))


def gated(g: Graph, y: Value) -> Value:
    """The other factor is computed in a group of its own before it joins."""
    return y * rlx.sigmoid(g.input("r", y.shape.static, "f32") + g.param("s", y.shape.static[-1:], "f32"))


BEHIND: dict[str, Build] = {
    "at its own coordinates": lambda g: rlx.exp(attention(g)),
    "cast": lambda g: side_by_side(attention(g, 70, 70, size=20)).astype("bf16").astype("f32"),
    "residual": lambda g: (y := side_by_side(attention(g, 40, 41, size=7))) + g.input("r", y.shape.static, "f32"),
    "gate": lambda g: gated(g, side_by_side(attention(g, 33, 33))),
    "one token": lambda g: gated(g, side_by_side(attention(g, 1, 33, (4, 2), 16))),
    "a few tokens, wide heads": lambda g: gated(g, side_by_side(attention(g, 3, 33, (2, 1), 200))),
    "merged rows": lambda g: rlx.relu(attention(g).transpose(0, 2, 1, 3).reshape(10, 72)),
    "twice the same view": lambda g: (y := side_by_side(attention(g))) * 2.0 + rlx.exp(y),
}


def epilogues(kernels: list[K.Kernel]) -> int:
    return sum(isinstance(s, K.Native) and len(s.epilogue) > 0 for x in kernels for s in x.body)


@pytest.mark.parametrize("name", BEHIND)
def test_attention_and_what_follows_it_are_one_kernel_with_the_same_bits(name):
    g = made(BEHIND[name])
    given = values(g)
    reference, _ = result(g, given, "ref")
    for device, options in (("cpu", {"threads": 1}), ("cpu", {"threads": 3}), ("ref", {})):
        compiled = rlx.Session(rlx.Device(device, int(device == "ref")))
        found = []
        for off in ((), ("followers",)):
            out = compiled.compile(g, rlx.CompileOptions(disable=off, **options))
            for p in g.params:
                out.set_param(p.node.name, given[p.node.name])
            kernels = [s.kernel for s in out.program().steps]
            assert (len(kernels), epilogues(kernels)) == ((2, 0) if off else (1, 1))
            found.append(out.run({i.node.name: given[i.node.name] for i in g.inputs})[0])
        np.testing.assert_array_equal(found[0], found[1])
        np.testing.assert_allclose(found[0], reference, rtol=1e-2 if name == "cast" else 1e-5, atol=1e-5)


def behind_apart() -> dict[str, Build]:
    def split(g: Graph) -> Value:
        return rlx.exp(attention(g).reshape(2, 3, 5, 4, 6).transpose(0, 1, 3, 2, 4))

    def turned(g: Graph) -> Value:
        return rlx.exp(attention(g).transpose(0, 1, 3, 2))

    def two_views(g: Graph) -> Value:
        y = attention(g, heads=(5, 5))
        return y * y.transpose(0, 2, 1, 3)

    def reduced(g: Graph) -> Value:
        return rlx.sum(attention(g), axis=-1)

    def sliced(g: Graph) -> Value:
        return rlx.exp(attention(g)[:, 1:])

    return {f.__name__: f for f in (split, turned, two_views, reduced, sliced)}


@pytest.mark.parametrize("name", behind_apart())
def test_what_reads_attention_in_another_order_has_a_kernel_of_its_own(name):
    g = made(behind_apart()[name])
    given = values(g)
    found, kernels = result(g, given, threads=1)
    assert epilogues(kernels) == 0 and len(kernels) == 2
    np.testing.assert_allclose(found, result(g, given, "ref")[0], rtol=1e-5, atol=1e-5)


def test_a_view_and_the_plain_result_of_attention_are_not_mixed():
    """Both have the same dims, but not the same order."""
    g = Graph("g")
    y = attention(g, heads=(5, 5))
    g.set_outputs([rlx.exp(y.transpose(0, 2, 1, 3)), y * 2.0])
    given = values(g)
    for device in (rlx.Device.CPU, rlx.Device("ref", 1)):
        compiled = rlx.Session(device).compile(g)
        kernels = [s.kernel for s in compiled.program().steps]
        turned, plain = compiled.run(given)
        assert epilogues(kernels) == 1
        np.testing.assert_allclose(turned, np.exp(plain.transpose(0, 2, 1, 3) / 2), rtol=1e-5)


def test_the_result_of_an_epilogue_may_overwrite_what_it_adds_but_no_operand():
    g = Graph("g")
    q, r = (g.input(n, (1, 2, 5, 8), "f32") for n in "qr")
    g.set_outputs([rlx.attention(q, q, q) + r])
    program = lower(g, get("ref").target(1), rlx.CompileOptions())
    (step,) = program.steps
    added, out = (step.args.index(id) for id in (program.inputs[1], program.outputs[0].buffer))
    assert may_overlap(step.kernel) == {(added, out)}


def test_a_matrix_picked_per_batch_with_columns_left_over() -> None:
    """The address of the picked matrix is needed for whole panels of columns, and again for the rest."""
    g, rng = rlx.Graph("picked"), np.random.default_rng(0)
    x, w, ids = g.input("x", (6, 1, 128), "f32"), g.input("w", (8, 128, 192), "f32"), g.input("ids", (6,), "i32")
    g.set_outputs([x @ rlx.gather(w, ids)])
    given = {"x": rng.standard_normal((6, 1, 128), np.float32), "w": rng.standard_normal((8, 128, 192), np.float32)}
    picked = np.array([7, 0, 3, 3, 1, 5], np.int32)
    (found,) = rlx.Session("cpu").compile(g).run({**given, "ids": picked})
    np.testing.assert_allclose(found, given["x"].astype(np.float64) @ given["w"][picked], atol=1e-4)
