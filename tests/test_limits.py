"""Kernels of a graph with an active extent skip what lies past it: results equal those of a graph compiled for the length, and
poison past the extent, rounded up to what a kernel takes at once, is still there, in outputs and in every other buffer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
from devices import ASKED
from kernel_runs import TARGETS
from kernel_runs import run as run_kernel_on_cpu

import rlx
from rlx.backends.cpu.kernels.quant import on_matrix
from rlx.backends.cpu.kernels.tiles import plan
from rlx.backends.cpu.target import host_target
from rlx.backends.ref.interpret import run_kernel
from rlx.compiler.check import program_faults
from rlx.frontends.models import bert
from rlx.ir import kernel as K
from rlx.ir import ops
from rlx.ir.dtype import f32, i64
from rlx.ir.graph import Graph, Value
from rlx.ir.kernel import Buffer, Contract, Kernel, Limit, Load, Loop, Operand, Store, Var, k
from rlx.ir.kernel_text import kernel_key, print_kernel
from rlx.ir.program import Program
from rlx.ir.shape import Dim
from rlx.runtime.compiled import CompiledGraph

N = Dim("n")
POISON = {"cpu": 0xFF, "ref": 0xCB}
TILE = 8  # rows that a contraction takes at once, at most
MATRIX_TILE = 32  # on a matrix unit


class Model(NamedTuple):
    """`build(g)` gives the output of a graph over the named dim n, at most `upper`. `skips`: whether its kernels can."""

    build: Callable[[Graph], Value]
    upper: int
    skips: bool = True


def mlp(g: Graph, x: Value, width: int) -> Value:
    """A contraction with bias, gelu, residual and norm: its rows are finished one by one."""
    inner = x.shape.dims[-1]
    w, b, back = g.param("w", (inner, width), "f32"), g.param("b", (width,), "f32"), g.param("back", (width, inner), "f32")
    scale = g.param("scale", (inner,), "f32")
    return ops.layer_norm(ops.matmul(ops.gelu(ops.matmul(x, w) + b), back) + x, scale, scale)


def attend(g: Graph, dims: tuple, keys: int = 0) -> Value:
    q = g.input("q", dims, "f32")
    k, v = (g.input(name, (*dims[:2], keys, dims[3]) if keys else dims, "f32") for name in "kv")
    return ops.attention(q, k, v)


def joined(g: Graph, dims) -> Value:
    """The heads side by side, and a gate on them."""
    batch, heads, rows, size = dims
    whole = (batch, rows, heads * size)
    return attend(g, dims).transpose(0, 2, 1, 3).reshape(whole) * ops.sigmoid(g.input("gate", whole, "f32"))


def encoder(g: Graph, batch, length) -> Value:
    config = bert.BertConfig(50, 32, 1, 2, 64, 64)
    made = bert.build(config, batch, length)
    g.inputs, g.params = made.inputs, made.params
    return made.outputs[0]


def quantised(g: Graph, name: str) -> Value:
    form = rlx.ir.blocks.FORMATS[name]
    packed = g.param("packed", (70, 64 // form.block * form.nbytes), "u8")
    return ops.dequant_matmul(g.input("x", (N, 64), "f32"), packed, format=name)


MODELS = {
    "chain": Model(lambda g: ops.gelu(g.input("x", (N, 40), "f32") * 2.0 + 1.0), 37),
    "chunks": Model(lambda g: ops.exp(g.input("x", (N, 500), "f32")) * 3.0, 90),
    "inside": Model(lambda g: ops.tanh(g.input("x", (3, N, 24), "f32")), 50),
    "inside, too short": Model(lambda g: ops.tanh(g.input("x", (300, N, 3), "f32")), 5, skips=False),
    "split axis": Model(lambda g: ops.tanh(g.input("x", (2, N, 24), "f32").reshape(2 * N, 24)).reshape(2, N, 24), 50),
    "vector": Model(lambda g: g.input("x", (N,), "f32") + 1.0, 20000),
    "half": Model(lambda g: ops.exp(g.input("x", (N, 300), "bf16")), 64),
    "softmax": Model(lambda g: ops.softmax(g.input("x", (2, N, 33), "f32"), axis=-1), 21),
    "norm": Model(lambda g: ops.layer_norm(g.input("x", (N, 48), "f32"), *(g.param(n, (48,), "f32") for n in "sb")), 37),
    "turned": Model(lambda g: ops.exp(g.input("x", (N, 4, 8), "f32")).transpose(1, 0, 2), 37),
    "embedding": Model(lambda g: ops.embedding(g.param("w", (11, 20), "f32"), g.input("ids", (2, N), "i32")), 37),
    "mlp": Model(lambda g: mlp(g, g.input("x", (N, 70), "f32"), 50), 37),
    "mlp, batch": Model(lambda g: mlp(g, g.input("x", (3, N, 70), "f32"), 50), 37),
    "mlp, flat batch": Model(lambda g: mlp(g, g.input("x", (3, N, 70), "f32").reshape(3 * N, 70), 50).reshape(3, N, 70), 37),
    "bf16": Model(lambda g: ops.matmul(g.input("x", (N, 64), "bf16"), g.param("w", (64, 33), "bf16")), 37),
    "batched": Model(lambda g: ops.matmul(g.input("a", (N, 9, 16), "f32"), g.input("b", (N, 16, 7), "f32")), 10),
    "heads": Model(lambda g: ops.matmul(g.input("a", (2, N, 9, 16), "f32"), g.input("b", (2, N, 16, 7), "f32")), 10),
    "argmax": Model(lambda g: ops.argmax(g.input("x", (2, N, 33), "f32"), axis=-1), 21),
    "top k": Model(lambda g: ops.top_k(g.input("x", (N, 33), "f32"), k=4)[0], 21),
    "cumsum": Model(lambda g: ops.cumsum(g.input("x", (5, N), "f32"), axis=0), 70),
    "argmax, columns": Model(lambda g: ops.argmax(g.input("x", (5, N), "f32"), axis=0), 70),
    "attention": Model(lambda g: attend(g, (2, 4, N, 16)), 70),
    "attention, few rows": Model(lambda g: attend(g, (2, 4, N, 16)), 6),
    "attention, other keys": Model(lambda g: attend(g, (1, 2, N, 16), 45), 70),
    "attention, batch": Model(lambda g: attend(g, (N, 2, 20, 16)), 9),
    "attention, followed": Model(lambda g: joined(g, (2, 4, N, 16)), 70),
    "attention, batch, followed": Model(lambda g: joined(g, (N, 2, 20, 16)), 9),
    "int8": Model(lambda g: quantised(g, "int8"), 37),
    "q8_0": Model(lambda g: quantised(g, "q8_0"), 37),
    "encoder": Model(lambda g: encoder(g, 1, N), 64),
    "encoder, batch of 3": Model(lambda g: encoder(g, 3, N), 64),
    "encoder, by batch": Model(lambda g: encoder(g, N, 16), 8),
}
DEVICES = [("cpu", 1), ("cpu", 2), ("ref:0", 1), ("ref:1", 1), *((device, 1) for device in ASKED)]


def graph(name: str) -> Graph:
    g = Graph(name.replace(" ", "_").replace(",", ""))
    g.set_outputs([MODELS[name].build(g)])
    return g


def inputs(g: Graph, n: int, upper: int, garbage: bool = False) -> dict[str, np.ndarray]:
    """The same numbers in the first n rows; past them garbage, or nothing."""
    out = {}
    for i, value in enumerate(g.inputs):
        rng, dims, kind = np.random.default_rng(i), [upper if isinstance(d, Dim) else d for d in value.dims], value.dtype.kind
        array = {"i": rng.integers(0, 11, dims), "b": np.ones(dims, bool), "f": rng.standard_normal(dims)}[kind]
        array = array.astype(value.dtype.numpy)
        for at in (a for a, d in enumerate(value.dims) if isinstance(d, Dim)):
            if garbage:
                array[(*(slice(None),) * at, slice(n, None))] = {"f": np.nan, "b": True, "i": -9}[kind]
            else:
                array = np.delete(array, range(n, upper), at)
        out[value.node.name] = np.ascontiguousarray(array)
    return out


def fill(compiled: CompiledGraph) -> CompiledGraph:
    rng = np.random.default_rng(7)
    program = compiled.program()
    for b in (program.buffers[i] for i in program.params):
        if b.shape.dtype.name == "u8":  # f16 scales among them: small ones
            array = rng.integers(0, 48, b.shape.static)
        else:
            array = rng.standard_normal(b.shape.static) * 0.2
        compiled.set_param(b.name, array.astype(b.shape.dtype.numpy))
    return compiled


@cache
def compiled(name: str, device: str, threads: int, n: int = 0) -> CompiledGraph:
    """With an active extent, every buffer in memory of its own; or for n alone."""
    options = rlx.CompileOptions(threads=threads, disable=("inplace", "reuse"))
    g, upper = graph(name), MODELS[name].upper
    options = options.bind_dims(n=n) if n else options.bind_extent("n", upper)
    return fill(rlx.Session(device).compile(g, options))


def _any(x: Any) -> Any:
    """`x`, of which the type checker then knows nothing."""
    return x


def touched(c: CompiledGraph, buffer: int, poison: int) -> np.ndarray:
    """Which elements of a buffer were written."""
    array = _any(c)._executable.view(buffer)
    raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8).reshape(array.size, -1)
    return (raw != poison).any(1).reshape(array.shape)


def limited(program: Program) -> set[int]:
    """Buffers whose kernels have limits."""
    return {id for s in program.steps if s.kernel.limits for id in s.writes}


@pytest.mark.parametrize("device, threads", DEVICES)
@pytest.mark.parametrize("name", MODELS)
def test_rows_past_the_extent_are_skipped(name, device, threads):
    model, g = MODELS[name], graph(name)
    upper, c, kind = model.upper, compiled(name, device, threads), device[:3]
    (out,) = c.program().outputs
    for n in sorted({1, upper // 3 + 1, upper - 1, upper}):
        c.set_active_extent((n, upper))
        if kind != "ref":
            _any(c)._executable.poison()
        (found,) = c.run(inputs(g, n, upper, garbage=True))
        (want,) = compiled(name, device, 1, n).run(inputs(g, n, upper))  # one for every number of threads
        rows = np.arange(upper) < n
        for axis, outer, _, inner in out.active:
            found = found.compress(np.repeat(np.tile(rows, outer), inner), axis)
        found, want = (np.asarray(x, np.float64) for x in (found, want))
        # GPUs and AMX round x to 16 bits where many rows are multiplied by packed weights, and not where few are
        rounds = name in ("int8", "q8_0") and (kind not in POISON or (kind == "cpu" and on_matrix(host_target(1))))
        most = 1e-2 * np.abs(want).max() if rounds else 1e-5
        np.testing.assert_allclose(found, want, rtol=2e-2 if name in ("half", "bf16") else 1e-5, atol=most)
        for id in limited(c.program()) if kind in POISON else ():  # elsewhere tiles are of many sizes
            unit = kind == "cpu" and (rounds or on_matrix_unit(c.program(), id))
            check_skipped(c, id, n, upper, POISON[kind], MATRIX_TILE if unit else TILE if kind == "cpu" else 1)
    assert bool(limited(c.program())) == model.skips


def on_matrix_unit(program: Program, id: int) -> bool:
    """Whether the buffer is written by a contraction on the processor's matrix unit, which few processors have."""
    (step,) = (s for s in program.steps if id in s.writes)
    return any(isinstance(x, Contract) and plan(step.kernel, x, program.target).matrix for x in step.kernel.body)


def check_skipped(c: CompiledGraph, id: int, n: int, upper: int, poison: int, tile: int) -> None:
    """All elements of the rows asked for were written, and no more; kernels with tiles of `tile` rows do whole ones."""
    marks = touched(c, id, poison)
    each = marks.size // upper
    most = min(upper, n + tile - 1) * each
    assert n * each <= marks.sum() <= most, f"{marks.sum()} of {marks.size} elements written for {n} of {upper} rows"


@pytest.mark.parametrize("name", ["encoder", "encoder, batch of 3", "encoder, by batch"])
def test_an_encoder_computes_in_proportion_to_its_extent(name):
    """All that is written, of all that a full run writes; what is written whole is a mask or a sum over rows."""
    c, g, upper = compiled(name, "cpu", 1), graph(name), MODELS[name].upper
    ids = [b for s in c.program().steps for b in s.writes]
    whole = sum(c.program().buffers[b].nbytes for b in set(ids) - limited(c.program()))
    everything = sum(c.program().buffers[b].nbytes for b in set(ids))
    assert whole < 0.2 * everything
    for n in (TILE // 2, upper // 2) if "by batch" in name else (TILE, upper // 2):  # whole tiles, all of them f32
        c.set_active_extent((n, upper))
        _any(c)._executable.poison()
        c.run(inputs(g, n, upper, garbage=True))
        written = sum(touched(c, b, POISON["cpu"]).mean() * c.program().buffers[b].nbytes for b in limited(c.program()))
        assert written == pytest.approx((everything - whole) * n / upper, rel=0.02)


def test_a_limit_is_a_read_that_the_checker_sees():
    """The extent's buffer is an argument of every kernel with limits; `null` takes such programs and computes nothing."""
    program = compiled("mlp", "ref:0", 1).program()
    assert program.extent is not None and all(program.extent in s.reads for s in program.steps if s.kernel.limits)
    first = next(i for i, s in enumerate(program.steps) if s.kernel.limits)
    step, strange = program.steps[first], Limit(Var("g"), Load(Buffer("stranger", i64, 1), k.const(0)))
    broken = replace(step, kernel=replace(step.kernel, limits=(strange,)))
    steps = (*program.steps[:first], broken, *program.steps[first + 1 :])
    assert any("stranger" in fault for fault in program_faults(replace(program, steps=steps)))
    assert "limit" in print_kernel(step.kernel) and kernel_key(step.kernel) != kernel_key(replace(step.kernel, limits=()))
    rlx.Session("null").compile(graph("mlp"), rlx.CompileOptions().bind_extent("n", 37))


# -- kernels written by hand ---------------------------------------------------------------------------------------


def grid_kernel(dims: tuple[int, int, int], axis: int) -> Kernel:
    """out = 2 * in over `dims`, one of them limited."""
    a, b, c = variables = [Var(x) for x in "abc"]
    size = math.prod(dims)
    source, out, count = Buffer("in", f32, size), Buffer("out", f32, size, True), Buffer("count", i64, 1)
    at = K.linear([(a, dims[1] * dims[2]), (b, dims[2]), (c, 1)])
    store = Store(out, at, k.mul(Load(source, at), k.const(2.0, f32)))
    limit = Limit(variables[axis], Load(count, k.const(0)))
    body, grid = Loop(c, dims[2], (store,), vector=True), ((a, dims[0]), (b, dims[1]))
    return Kernel("grid", (source, count, out), (), grid, (body,), limits=(limit,))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dims", [(3, 5, 40), (4, 60, 1000), (1, 2, 300_000)], ids=str)
@pytest.mark.parametrize("axis", range(3))
def test_loops_end_at_any_limit(target, dims, axis):
    """Also where a task has several rows, and where a row has several tasks."""
    kernel = grid_kernel(dims, axis)
    x = np.random.default_rng(0).standard_normal(math.prod(dims)).astype(np.float32)
    for count in (-3, 0, 1, 2, 17, dims[axis] - 1, 10**12):
        (got,), _ = run_kernel_on_cpu(kernel, [x, np.array([count]), None], TARGETS[target])
        want = np.full(x.nbytes, 0xCB, np.uint8).view(np.float32)
        run_kernel(kernel, [x, np.array([count]), want])
        assert got.tobytes() == want.tobytes()
        done = (want.reshape(dims) == 2 * x.reshape(dims)).all(tuple({0, 1, 2} - {axis}))
        assert done.sum() == min(max(count, 0), len(done)) and done[: done.sum()].all()


def contraction(m: int, limit: K.Expr | None, buffers: tuple[Buffer, ...]) -> Kernel:
    """A row pass after it: out = a @ b over 2 grid points, sums[row] = its first element."""
    g, i, j, acc = Var("g"), Var("i"), Var("j"), Var("acc", f32)
    a, b, _, out, sums = buffers
    at = K.linear([(g, m * 19), (i, 19), (j, 1)])
    row = k.add(k.mul(g, m), i)
    first = Store(sums, row, Load(out, k.mul(row, 19)))
    operands = Operand(a, k.mul(g, m * 23), 23, 1), Operand(b, k.const(0), 19, 1)
    body = Contract(i, j, m, 19, 23, *operands, acc, (Store(out, at, acc),), (first,))
    limits = (Limit(i, limit),) if limit else ()
    return Kernel("contract", buffers, (), ((g, 2),), (body,), limits=limits)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("m", [1, 7, 21, 64, 300])
def test_contractions_end_at_the_tile_of_the_limit(target, m):
    buffers = Buffer("a", f32, 2 * m * 23), Buffer("b", f32, 23 * 19), Buffer("count", i64, 1)
    buffers = (*buffers, Buffer("out", f32, 2 * m * 19, True), Buffer("first", f32, 2 * m, True))
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(x.size).astype(np.float32) for x in buffers[:2])
    (whole, _), _ = run_kernel_on_cpu(contraction(m, None, buffers), [a, b, np.array([m]), None, None], TARGETS[target])
    limit = Load(buffers[2], k.const(0))
    for count in sorted({-1, 0, 1, 2, m // 2, m - 1, m, m + 9}):
        kernel = contraction(m, limit, buffers)
        (got, first), _ = run_kernel_on_cpu(kernel, [a, b, np.array([count]), None, None], TARGETS[target])
        done = (got.reshape(2, m, 19).view(np.uint32) != 0xCBCBCBCB).all((0, 2))
        count = min(max(count, 0), m)
        assert count <= done.sum() < count + TILE and done[: done.sum()].all() and (count > 0 or not done.any())
        rows = got.reshape(2, m, 19)[:, done]
        assert rows.tobytes() == whole.reshape(2, m, 19)[:, done].tobytes()  # the bits of a run without limit
        assert (first.reshape(2, m)[:, done] == rows[:, :, 0]).all()
