"""Collectives in graphs: every op on ranks that are threads or processes, against evaluate_ranks; programs, derivatives."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import ranks
from collective_graphs import HEAP, NAMES, all_cases, compiled_on, good, local, mlp, run_all, same, together
from devices import ASKED

import rlx
from rlx.backends import get
from rlx.compiler import lower
from rlx.compiler.check import program_faults
from rlx.driver.symmetric import LocalTransport, SymmetricBuffer
from rlx.errors import (
    AttributeValueError,
    CorruptFileError,
    DTypeError,
    HeapBoundsError,
    ShapeError,
    TransportError,
)
from rlx.host.disk import disk_cache
from rlx.ir import ops
from rlx.ir.cost import program_work
from rlx.ir.evaluate import evaluate, evaluate_ranks
from rlx.ir.graph import Graph, Value
from rlx.ir.op import OPS, Kind
from rlx.runtime import agreed, of_first, stored


def test_every_collective_is_tested() -> None:
    assert {name for name, d in OPS.items() if d.collective} == {*NAMES, "exchange"}
    assert {n for n, d in OPS.items() if d.kind is Kind.COLLECTIVE} == {"exchange"}


# -- what they mean ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_evaluator_says_what_numpy_says(ranks: int) -> None:
    rng = np.random.default_rng(ranks)
    xs = [rng.integers(-9, 9, (2, 3 * ranks)).astype(np.float64) for _ in range(ranks)]
    g = Graph("all")
    x = g.input("x", xs[0].shape, "f64")
    g.set_outputs([
        *(ops.all_reduce(x, kind=kind, ranks=ranks) for kind in ("sum", "mean", "max", "min")),
        ops.all_gather(x, axis=1, ranks=ranks), ops.reduce_scatter(x, axis=1, ranks=ranks),
        ops.broadcast_rank(x, root=ranks - 1, ranks=ranks), ops.all_to_all(x, split_axis=1, concat_axis=0, ranks=ranks),
        ops.rank_slice(x, axis=1, ranks=ranks),
    ])  # fmt: skip
    stacked = np.stack(xs)
    for r, (found, _) in enumerate(evaluate_ranks(g, [{"x": x} for x in xs])):
        part = np.s_[:, 3 * r : 3 * r + 3]
        want = [
            stacked.sum(0), stacked.mean(0), stacked.max(0), stacked.min(0), np.concatenate(xs, 1), stacked.sum(0)[part], xs[-1],
            np.concatenate([x[part] for x in xs]), xs[r][part],
        ]  # fmt: skip
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-15)


def test_a_mean_of_integers_is_truncated_and_sums_wrap() -> None:
    g = Graph("ints")
    x = g.input("x", (4,), "i8")
    g.set_outputs([ops.all_reduce(x, kind=kind, ranks=2) for kind in ("sum", "mean")])
    xs = [np.array([127, -128, -3, 3], np.int8), np.array([127, -128, 0, 0], np.int8)]
    (total, mean), _ = evaluate_ranks(g, [{"x": x} for x in xs])[1]
    assert total.tolist() == [-2, 0, -3, 3] and mean.tolist() == [127, -128, -1, 1]


def test_the_evaluator_refuses_other_numbers_of_ranks() -> None:
    g = Graph("three")
    g.set_outputs([ops.all_reduce(g.input("x", (2,), "f32"), ranks=3)])
    with pytest.raises(AttributeValueError, match="all_reduce is of 3 ranks, and 2 were given"):
        evaluate_ranks(g, [{"x": np.zeros(2, np.float32)}] * 2)
    with pytest.raises(AttributeValueError, match="one operand for a collective of 3 ranks"):
        evaluate(g, {"x": np.zeros(2, np.float32)})


@pytest.mark.parametrize("build, error, why", [
    (lambda x: ops.reduce_scatter(x, axis=1, ranks=2), ShapeError, "dim 1 is 5, which 2 ranks cannot share equally"),
    (lambda x: ops.all_gather(x, axis=2, ranks=2), AttributeValueError, "axis 2 does not exist"),
    (lambda x: ops.all_reduce(x, ranks=0), AttributeValueError, "ranks is at least 1, got 0"),
    (lambda x: ops.all_reduce(x, kind="prod", ranks=2), AttributeValueError, "kind of all_reduce takes .*'prod'"),
    (lambda x: ops.all_reduce(x < 0, ranks=2), DTypeError, "it takes floats, signed integers, unsigned integers"),
    (lambda x: ops.broadcast_rank(x, root=2, ranks=2), AttributeValueError, "root is one of ranks 0 to 1, got 2"),
    (lambda x: ops.exchange(x, what="all_to_all", ranks=2), ShapeError, "the first dim counts the ranks, 2"),
    (lambda x: ops.exchange(x < 0, what="all_reduce", ranks=2), DTypeError, "a reduction takes floats and integers"),
])  # fmt: skip
def test_what_has_no_meaning_is_refused(build: Any, error: type[Exception], why: str) -> None:
    with pytest.raises(error, match=why):
        build(Graph("bad").input("x", (4, 5), "f32"))


def test_named_dims_are_gathered_and_shared() -> None:
    x = Graph("named").input("x", ("s", 6), "f32")
    assert str(ops.all_gather(x, ranks=3).shape) == "f32[3*s,6]"
    assert str(ops.reduce_scatter(ops.all_gather(x, ranks=4), ranks=2).shape) == "f32[2*s,6]"
    with pytest.raises(ShapeError, match="dim 0 is s"):
        ops.reduce_scatter(x, ranks=2)


def test_text_keeps_them() -> None:
    for name in NAMES:
        text = str(all_cases(name, 2)[0])
        assert str(Graph.parse(text)) == text


# -- on devices ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device, ranks", [("ref", 2), ("ref", 3), ("cpu", 2), ("cpu", 3), ("cpu", 4), *((d, 4) for d in ASKED)])
@pytest.mark.parametrize("name", NAMES)
def test_every_collective(name: str, device: str, ranks: int) -> None:
    """All dtypes, odd and empty sizes, twice; the very bits, on every rank."""
    g, inputs, what = all_cases(name, ranks)
    transports = local(ranks)
    compiled = compiled_on(transports, g, device)
    for _ in range(2):
        if device != "ref":
            for c in compiled:
                c._executable.poison()
        found = good(run_all(transports, compiled, inputs))
        for rank, (want, _) in zip(found, evaluate_ranks(g, inputs), strict=True):
            for a, b, text in zip(rank, want, what, strict=True):
                same(a, b, f"{text} of {ranks} ranks on {device}")


def every_case_here(transport: Any) -> list[Any]:
    """In a process that is a rank: the outputs of every op, twice; and how the steps are carried out."""
    found: list[Any] = []
    for name in NAMES:
        g, inputs, _ = all_cases(name, transport.num_ranks)
        compiled = rlx.Session("cpu", threads=1, transport=transport).compile(g)
        compiled._executable.poison()  # type: ignore[attr-defined]
        compiled.run(inputs[transport.this_rank.index])
        found.append(compiled.run(inputs[transport.this_rank.index]))
    tables = compiled._executable._exchange.exchanges.tables.values()  # type: ignore[attr-defined]
    return [found, {type(t).__name__ for t in tables if t}]


def test_processes_over_shared_memory() -> None:
    """In machine code, the same bits."""
    count = 3
    want = [evaluate_ranks(*all_cases(name, count)[:2]) for name in NAMES]
    for r, (found, _) in enumerate(ranks.run(count, every_case_here, heap_size=HEAP)):
        for name, outputs, each in zip(NAMES, found, want, strict=True):
            for a, b, text in zip(outputs, each[r][0], all_cases(name, count)[2], strict=True):
                same(a, b, f"{text}, rank {r} of {count}")


def deep_here(transport: Any, ranks: int, dies: int | None) -> Any:
    """Many small steps, and one larger than a stage; the rank `dies` is killed before its last run."""
    g = Graph("deep")
    x, total = g.input("x", (1, 5000), "f32"), g.handle(rlx.BufferHandle("total", (1, 5000), rlx.f32))
    y = x
    for _ in range(6):
        y = ops.all_reduce(ops.tanh(y[:, :64]), ranks=ranks)
    g.assign(total, total + ops.all_reduce(x, ranks=ranks))
    g.set_outputs([y])
    compiled = rlx.Session("cpu", threads=1, transport=transport).compile(g)
    names = {type(t).__name__ for t in compiled._executable._exchange.exchanges.tables.values()}  # type: ignore[attr-defined]
    call = compiled.bound([np.ones((1, 5000), np.float32)])
    for _ in range(20):
        out = call()[0].copy()
    before = compiled.read_handle("total")
    assert before is not None and (before == 20 * ranks).all()
    if dies == transport.this_rank.index:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        call()
    except TransportError as e:
        after = compiled.read_handle("total")
        return out, names, str(e), bool((after == before).all())
    return out, names


def test_machine_code_steps() -> None:
    (a, names), (b, _) = ranks.run(2, deep_here, 2, None, heap_size=HEAP)
    same(a, b)
    assert names == {"Table"}
    y = np.ones((1, 5000))
    for _ in range(6):
        y = 2 * np.tanh(y[:, :64])
    np.testing.assert_allclose(a, y, rtol=1e-5)


def test_a_process_that_is_killed() -> None:
    found = ranks.start(3, deep_here, 3, 1, heap_size=HEAP).outcomes()
    for r in (0, 2):
        _, _, text, unchanged = found[r]
        assert "rank 1" in text and "nothing was committed" in text and unchanged


@pytest.mark.parametrize("device, fused", [("ref", True), ("cpu", True), ("cpu", False), *((d, True) for d in ASKED)])
def test_between_fused_neighbours(device: str, fused: bool) -> None:
    ranks, rng = 2, np.random.default_rng(0)
    g, transports = mlp(ranks), local(ranks)
    whole = {"w": (20, 24), "v": (24, 20), "bias": (20,), "scale": (20,)}
    whole = {n: rng.standard_normal(d).astype(np.float32) for n, d in whole.items()}
    shards = [
        {**whole, "w": whole["w"][:, 12 * r : 12 * r + 12], "v": whole["v"][12 * r : 12 * r + 12]} for r in range(ranks)
    ]
    x = {"x": rng.standard_normal((3, 20)).astype(np.float32)}
    compiled = compiled_on(transports, g, device, disable=() if fused else ("fuse",))
    for c, params in zip(compiled, shards):
        for name, array in params.items():
            c.set_param(name, array)
    found = good(run_all(transports, compiled, [x] * ranks))
    one = evaluate(mlp(1), x, whole)[0]
    for rank, (want, _) in zip(found, evaluate_ranks(g, [x] * ranks, shards), strict=True):
        for a, b in zip(rank, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
        np.testing.assert_allclose(rank[0], one[0], rtol=1e-4, atol=1e-4)  # the unsplit network
        np.testing.assert_array_equal(rank[0], found[0][0])


def test_one_rank_needs_no_transport() -> None:
    g = mlp(1)
    core = ops.exchange(g.outputs[0], what="all_gather", ranks=1)
    g.set_outputs([*g.outputs, core])
    rng = np.random.default_rng(0)
    arrays = {str(v.name): rng.standard_normal(v.shape.static).astype(np.float32) for v in (*g.inputs, *g.params)}
    params = {str(v.name): arrays.pop(str(v.name)) for v in g.params}
    for device in ("ref", "cpu"):
        compiled = rlx.Session(device).compile(g)
        for name, array in params.items():
            compiled.set_param(name, array)
        for a, b in zip(compiled.run(arrays), evaluate(g, arrays, params)[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
        assert [s.name for s in (s.kernel for s in compiled.program().steps)].count("all_gather") == 1  # the core op alone


def test_every_way_to_run() -> None:
    """run_slots, bound calls, queued runs, clones, checked mode: all of them have barriers."""
    ranks, g = 2, Graph("ways")
    x = g.input("x", (5,), "f32")
    g.set_outputs([ops.all_reduce(x * 2, ranks=ranks) + 1])
    transports = local(ranks)
    compiled, checked = compiled_on(transports, g), compiled_on(transports, g, checked=True)
    mine = [np.full(5, r + 1, np.float32) for r in range(ranks)]
    want = np.full(5, 7, np.float32)

    def ways(t: LocalTransport) -> None:
        c, a = compiled[t.this_rank.index], mine[t.this_rank.index]
        c.run_slots([a])
        same(np.asarray(c.outputs_view()[0]), want)
        call = c.bound([a])
        for _ in range(3):
            same(call()[0], want)
        for (out,) in c.run_pipelined([{"x": a}] * 3):
            same(out, want)
        twin = c.clone()
        same(twin.run({"x": a})[0], want)
        same(c.run({"x": a})[0], want)
        same(checked[t.this_rank.index].run({"x": a})[0], want)

    good(together(transports, ways))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_pool_of_workers_meets_too(threads: int) -> None:
    """Steps of many tasks around a collective, on ranks with workers of their own."""
    ranks, rng = 2, np.random.default_rng(0)
    g = Graph("wide")
    x, w = g.input("x", (64, 256), "f32"), g.param("w", (256, 256), "f32")
    g.set_outputs([ops.all_reduce(ops.tanh(x @ w), ranks=ranks) @ w])
    transports = local(ranks)
    compiled = good(together(transports, lambda t: rlx.Session("cpu", threads=threads, transport=t).compile(g)))
    weights = {"w": (rng.standard_normal((256, 256)) / 16).astype(np.float32)}
    inputs = [{"x": rng.standard_normal((64, 256)).astype(np.float32)} for _ in range(ranks)]
    for c in compiled:
        c.set_param("w", weights["w"])
    want = evaluate_ranks(g, inputs, [weights] * ranks)
    for _ in range(5):
        for (a,), ((b,), _) in zip(good(run_all(transports, compiled, inputs)), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_an_active_extent() -> None:
    """Rows past the extent are exchanged too, and never count."""
    ranks, upper = 2, 8
    g = Graph("rows")
    x = g.input("x", ("s", 6), "f32")
    y = ops.all_reduce(ops.softmax(x, axis=-1), ranks=ranks)
    g.set_outputs([ops.all_gather(y, axis=1, ranks=ranks), ops.sum(y, axis=0)])
    transports = local(ranks)
    options = rlx.CompileOptions().bind_extent("s", upper)
    compiled = good(together(transports, lambda t: rlx.Session("cpu", transport=t).compile(g, options)))
    rng = np.random.default_rng(0)
    for rows in (1, 5, 8):
        inputs = [{"x": rng.standard_normal((upper, 6)).astype(np.float32)} for _ in range(ranks)]
        for c in compiled:
            c.set_active_extent((rows, upper))
        found = good(run_all(transports, compiled, inputs))
        want = evaluate_ranks(g, [{"x": i["x"][:rows]} for i in inputs])
        for (a, b), ((c, d), _) in zip(found, want, strict=True):
            np.testing.assert_allclose(a[:rows], c, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(b, d, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("heap", [8, 100, 5000])
def test_what_ranks_agree_on_leaves_the_heaps_beginning_alone(heap: int) -> None:
    transports = local(3, heap)
    for t in transports:
        t.heap.bytes(SymmetricBuffer(t.this_rank, 0, heap))[:] = 7
    text = b"some words"[: min(heap, 10)]
    found = good(together(transports, lambda t: (agreed(t, 2**64 - 1 - t.this_rank.index, "x"), of_first(t, text))))
    assert found == [(2**64 - 1, text)] * 3
    if heap > 64:
        assert all((t.heap.bytes(SymmetricBuffer(t.this_rank, 0, 32)) == 7).all() for t in transports)


def test_an_agreement_takes_a_heap() -> None:
    for found in together(local(2, 7), lambda t: agreed(t, 1)):
        assert isinstance(found, HeapBoundsError) and "an agreement takes 8 bytes of each rank's heap, which has 7" in str(found)
    for found in together(local(2, 8), lambda t: of_first(t, bytes(9))):
        assert isinstance(found, HeapBoundsError) and "takes 9 bytes of each rank's heap, which has 8" in str(found)


# -- how they are compiled -----------------------------------------------------------------------------------------


def steps_of(g: Graph, **options: Any) -> list[str]:
    program = lower(g, get("cpu").target(0, threads=1), rlx.CompileOptions(**options))
    assert not any(s.kernel.collective for s in (*program.prepare, *program.commit))
    return [str(op.attrs) for op in program.collectives]


def test_they_keep_the_order_of_the_graph_and_are_never_done_twice() -> None:
    """Whatever fuses around them; of equal ones one is left, of those that nothing needs none."""
    g = Graph("order")
    x, w = g.input("x", (4, 8), "f32"), g.param("w", (8, 8), "f32")
    a, b = ops.all_reduce(x, kind="max", ranks=2), ops.all_reduce(x @ w, ranks=2)
    again, unused = ops.all_reduce(x, kind="max", ranks=2), ops.all_reduce(x, kind="min", ranks=2)
    c = ops.broadcast_rank(ops.exp(a) + b, ranks=2)
    g.set_outputs([ops.sum(c, axis=1), ops.exp(b) + again, ops.all_gather(a, ranks=2)])
    assert unused.node not in g.nodes()
    found = steps_of(g)
    want = ["all_gather", "all_reduce max", "all_reduce sum", "broadcast from 0"]
    assert sorted(found) == [f"{text}, 2 ranks" for text in want]
    assert found == steps_of(g, disable=("fuse",)) == steps_of(g, disable=("fuse", "inplace", "reuse"))


def test_they_are_neither_folded_nor_done_ahead_of_a_run() -> None:
    """A constant on every rank is no constant of all: ranks may have been compiled with others."""
    g = Graph("ahead")
    w = g.param("w", (4, 6), "f32")
    g.set_outputs([ops.all_reduce(ops.iota(dims=(4,)).astype("f32") * 0 + np.float32(2), ranks=2), ops.all_gather(w.T, ranks=2)])
    assert steps_of(g) == ["all_reduce sum, 2 ranks", "all_gather, 2 ranks"]
    transports = local(2)
    compiled = compiled_on(transports, g)
    for r, c in enumerate(compiled):
        c.set_param("w", np.full((4, 6), r, np.float32))
    for total, gathered in good(run_all(transports, compiled, [{}] * 2)):
        assert total.tolist() == [4.0] * 4 and gathered.shape == (12, 4) and gathered[:, 0].tolist() == [0.0] * 6 + [1.0] * 6


def test_reports_say_what_moves() -> None:
    program = lower(mlp(4), get("cpu").target(0, threads=1), rlx.CompileOptions())
    assert "all_reduce(" in str(program) and "# all_reduce sum, 4 ranks, 360 bytes to each" in str(program)
    work = program_work(program)
    assert work.received_bytes == 2 * 3 * 20 * 4 * 3 // 4 + 3 * 3 * 20 * 4
    assert f"; {work.received_bytes} bytes come from other ranks" in str(work) and "from ranks" in str(work)
    assert {n.how for n in rlx.Session("null").compile(mlp(4)).report().nodes if n.op == "exchange"} == {"collective"}


def test_the_null_device_records_them() -> None:
    compiled = rlx.Session("null").compile(mlp(2))
    for v in compiled.program().params:
        decl = compiled.program().buffers[v]
        compiled.set_param(decl.name, np.zeros(decl.shape.static, np.float32))
    compiled._executable.run()
    launched = [launch.kernel for launch in compiled._executable.launches]  # type: ignore[attr-defined]
    assert launched.count("all_reduce") == launched.count("all_gather") == 1


def test_the_judge_of_plans_knows_them() -> None:
    program = lower(mlp(2), get("cpu").target(0, threads=1), rlx.CompileOptions())
    at = next(i for i, s in enumerate(program.steps) if s.kernel.collective)
    step = program.steps[at]
    (op,) = step.kernel.body

    def faults(**changes: Any) -> str:
        kernel = replace(step.kernel, body=(replace(op, **changes),))  # type: ignore[type-var]
        steps = (*program.steps[:at], replace(step, kernel=kernel), *program.steps[at + 1 :])
        return "\n".join(program_faults(replace(program, steps=steps)))

    view = op.inputs[0]  # type: ignore[union-attr]
    assert not faults()
    part = replace(view, dims=(view.dims[0] - 1, *view.dims[1:]))
    for wrong in ({"inputs": (part,)}, {"inputs": (replace(view, strides=(1, 3)),)}, {"inputs": (replace(view, offset=1),)},
                  {"attrs": replace(op.attrs, what="all_gather")}):  # type: ignore[union-attr]  # fmt: skip
        assert "must read one whole buffer and write another" in faults(**wrong)
    one = replace(program, steps=(*program.steps[:at], replace(step, args=(step.args[0],) * 2), *program.steps[at + 1 :]))
    assert program_faults(one)


def test_all_ranks_share_one_entry_on_disk(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rank it is comes at load."""
    monkeypatch.setenv("RLX_CACHE", "1")
    monkeypatch.setenv("RLX_CACHE_DIR", str(tmp_path))
    ranks, g = 3, Graph("parts")
    x = g.input("x", (6, 4), "f32")
    g.set_outputs([ops.rank_slice(x * 2, ranks=ranks), ops.all_reduce(x, kind="mean", ranks=ranks)])
    arrays = [{"x": np.full((6, 4), r, np.float32) + np.arange(6, dtype=np.float32)[:, None]} for r in range(ranks)]
    states = []
    for _ in range(2):
        transports = local(ranks)
        compiled = compiled_on(transports, g)
        states.append({c.report().cache.state for c in compiled})
        for r, (a, b) in enumerate(good(run_all(transports, compiled, arrays))):
            same(a, 2 * arrays[r]["x"][2 * r : 2 * r + 2])
            same(b, arrays[1]["x"])
        assert compiled[0].report().work.received_bytes == 2 * 6 * 4 * 4 * 2 // 3
    disk, why = disk_cache()
    assert disk is not None, why
    assert states[1] == {"cached"} and len({c.report().cache.key for c in compiled}) == 1


def test_a_spoilt_entry_on_disk_is_refused() -> None:
    """None of what is read is believed: a collective that fits nothing is no program."""
    backend, g = get("cpu"), Graph("kept")
    g.set_outputs([ops.all_gather(g.input("x", (6, 4), "f32"), ranks=2)])
    program = lower(g, backend.target(0, threads=1), rlx.CompileOptions())
    _, text, *parts = stored.pack(backend.compile(program), backend, {})  # type: ignore[arg-type]

    def read(**changes: Any) -> Any:
        head = json.loads(text)
        (kernel,) = head["program"]["kernels"]
        kernel[3] = [changes.pop("op", kernel[3][0]), {**kernel[3][1], **changes}]
        made = json.dumps(head).encode()
        content = b"".join([len(made).to_bytes(4, "little"), made, *parts])
        return stored.unpack(content, backend, program.target)[1]  # type: ignore[arg-type]

    assert [str(op.attrs) for op in read().program.collectives] == ["all_gather, 2 ranks"]
    for wrong in ({"op": "all_gather"}, {"op": "abs"}, {"op": "none"}, {"what": "all_reduce"}, {"what": "x"}, {"ranks": 3},
                  {"ranks": 0}, {"ranks": "2"}, {"root": 2}, {"root": -1}, {"kind": 1}, {"more": 1}):  # fmt: skip
        with pytest.raises(CorruptFileError):
            read(**wrong)


# -- derivatives ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, attrs, dims", [
    ("all_reduce", {"kind": "sum"}, (2, 3)), ("all_reduce", {"kind": "mean"}, (2, 3)), ("all_reduce", {"kind": "max"}, (2, 3)),
    ("all_reduce", {"kind": "min"}, (5,)), ("all_gather", {"axis": 1}, (2, 3)), ("reduce_scatter", {"axis": 1}, (2, 6)),
    ("reduce_scatter", {"kind": "mean"}, (6,)), ("broadcast_rank", {"root": 1}, (4,)),
    ("all_to_all", {"split_axis": 0, "concat_axis": 1}, (6, 2)), ("rank_slice", {"axis": 1}, (2, 6)),
])  # fmt: skip
@pytest.mark.parametrize("ranks", [2, 3])
def test_derivatives_by_differences(name: str, attrs: dict[str, Any], dims: tuple[int, ...], ranks: int) -> None:
    """Of the sum over ranks of sum(c * result), by every element of every rank's operand."""
    rng, forward, backward = np.random.default_rng(3), Graph("forward"), Graph("backward")
    forward.set_outputs([getattr(ops, name)(forward.input("x", dims, "f64"), ranks=ranks, **attrs)])
    x = backward.input("x", dims, "f64")
    y = getattr(ops, name)(x, ranks=ranks, **attrs)
    gradient: Value = y.node.op.vjp(y.node, backward.input("c", y.dims, "f64"))
    assert gradient.shape == x.shape
    backward.set_outputs([gradient])
    xs = [rng.standard_normal(dims) for _ in range(ranks)]
    cs = [rng.standard_normal(y.dims) for _ in range(ranks)]

    def loss(arrays: list[np.ndarray]) -> float:
        return sum(float((c * out[0]).sum()) for c, (out, _) in zip(cs, evaluate_ranks(forward, [{"x": a} for a in arrays])))

    found = evaluate_ranks(backward, [{"x": a, "c": c} for a, c in zip(xs, cs)])
    for r in range(ranks):
        for at in np.ndindex(*dims):
            moved = []
            for step in (1e-6, -1e-6):
                arrays = [a.copy() for a in xs]
                arrays[r][at] += step
                moved.append(loss(arrays))
            np.testing.assert_allclose(found[r][0][0][at], (moved[0] - moved[1]) / 2e-6, rtol=1e-6, atol=1e-7)


def test_every_collective_has_a_derivative_or_says_why() -> None:
    assert all(OPS[name].vjp for name in NAMES)
    x = Graph("max").input("x", (4,), "f32")
    y = ops.reduce_scatter(x, kind="max", ranks=2)
    with pytest.raises(AttributeValueError, match="reduce_scatter of kind max has no derivative"):
        y.node.op.vjp(y.node, y)
