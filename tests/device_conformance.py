"""The duties of every device that computes, as plain functions of its name: the tests of a new backend.

    python -m tests.conformance --device ref --device cpu
    python -m tests.conformance --device c=tests.c_backend:CBackend     # not installed: NAME=MODULE:CLASS

Ops come from the op table (samples x dtypes x awkward data); leftovers of a run, states, lengths and ranks from the graphs
below. The references of the ops give the expected results. Nothing here knows a backend.
"""

from __future__ import annotations

import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import collective_graphs as collectives
import numpy as np
from op_cases import AWKWARD, TOLERANCE, Case, assert_same, cases

import rlx
from rlx.backends import get
from rlx.driver import device as known_devices
from rlx.driver.symmetric import LocalTransport
from rlx.errors import IndexRangeError
from rlx.ir.dtype import DType, as_dtype
from rlx.ir.evaluate import evaluate, evaluate_ranks
from rlx.ir.graph import Graph, Value, apply
from rlx.ir.op import OPS, Kind

F = np.float32
EITHER = ("maximum", "minimum")  # of two zeros, either one
NAMES = sorted(n for n, d in OPS.items() if d.kind is not Kind.LEAF)


@contextmanager
def installed(name: str, backend: str) -> Iterator[None]:
    """A backend class ("module:Class") as the package of `name` would bring it: by an entry point."""
    with tempfile.TemporaryDirectory() as folder:
        info = Path(folder) / f"rlx_{name}-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rlx-{name}\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[{known_devices.ENTRY_POINTS}]\n{name} = {backend}\n")
        sys.path.insert(0, folder)
        _forget()
        try:
            yield
        finally:
            sys.path.remove(folder)
            _forget()


def _forget() -> None:
    """Installed packages and their backends are looked for again."""
    known_devices.extensions.cache_clear()
    get.cache_clear()


# -- ops -----------------------------------------------------------------------------------------------------------


def cases_of(op: str, device: str) -> list[Case]:
    """All cases of an op, or, of a composite that the device has no kernel for, as in_turn says."""
    target = get(rlx.Device.parse(device).name).target(0)
    found = [c for c in cases(dtypes=target.dtypes) if c.op.name == op]
    return found if OPS[op].kind is not Kind.COMPOSITE or op in target.natives else in_turn(found)


def in_turn(found: list[Case]) -> list[Case]:
    """A composite's parts depend on the sample alone, and how they compute on the dtype alone, of which those parts have
    cases of their own. So each sample has two dtypes, the first and another in turn, and each dtype has a sample."""
    kept: dict[tuple[int, DType], None] = {}
    for index, same in groupby(found, key=lambda c: c.index):
        first, *others = dict.fromkeys(c.dtype for c in same)
        kept |= dict.fromkeys((index, d) for d in (first, *others[index % max(1, len(others)) :][:1]))
    for case in found:
        if case.dtype not in {dtype for _, dtype in kept}:
            kept[case.index, case.dtype] = None
    return [c for c in found if (c.index, c.dtype) in kept]


def together(op: str, chosen: list[Case]) -> tuple[Graph, list[tuple[int, int]]]:
    """One graph with every case's operands and results, so that a device compiles once; of each output the place of its case
    and the number among its results."""
    g = Graph(f"every_{op}")
    outputs: list[Value] = []
    owners: list[tuple[int, int]] = []
    for i, case in enumerate(chosen):
        shapes = zip(case.sample.shapes, case.dtypes)
        operands = [g.input(f"c{i}_x{j}", dims, dtype) for j, (dims, dtype) in enumerate(shapes)]
        out = apply(case.op, operands, dict(case.sample.attrs or {}))
        for number, value in enumerate([out] if isinstance(out, Value) else out):
            outputs.append(value)
            owners.append((i, number))
    g.set_outputs(outputs)
    return g, owners


def poison(compiled: Any) -> None:
    """Memory whose contents are undefined holds NaN, where the device can do it."""
    if act := getattr(compiled._executable, "poison", None):
        act()


def check_op(device: str, op: str) -> None:
    """All cases of an op: those with awkward data are runs of the same graph."""
    chosen = cases_of(op, device)
    assert chosen, f"{op} has no case in a dtype of {device}"
    plain = [c for c in chosen if not c.awkward]
    awkward = {(c.index, c.dtype): c for c in chosen if c.awkward}
    g, owners = together(op, plain)
    compiled = rlx.Session(device).compile(g, rlx.CompileOptions(threads=2))
    for data in (plain, [awkward.get((c.index, c.dtype), c) for c in plain])[: 2 if awkward else 1]:
        poison(compiled)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore", RuntimeWarning)
            found = compiled.run({f"c{i}_{name}": array for i, case in enumerate(data) for name, array in case.inputs.items()})
            for array, (i, number) in zip(found, owners, strict=True):
                assert_same(array, data[i].expected[number], data[i].tolerance, f"{data[i]} result {number} on {device}")


def check_edges(device: str) -> None:
    """Pointwise ops of every pair of edges of f32 and f64."""
    for dtype in sorted({"f32", "f64"} & get(rlx.Device.parse(device).name).target(0).dtypes):
        edges = [*AWKWARD["f"], -1.0, 0.5, -0.5, 2.5, -2.5, 1e-38, -1e-38, 1e-45, 3e38, -3e38]
        x, y = (a.reshape(-1) for a in np.meshgrid(*[np.array(edges, as_dtype(dtype).numpy)] * 2))
        check_pairs(device, x, y)


def check_pairs(device: str, x: np.ndarray, y: np.ndarray) -> None:
    """Zeros have the sign that numpy gives them, too: mod's is that of y, floor_div's that of x / y."""
    g = Graph("edges")
    operands = [g.input(name, x.shape, as_dtype(x.dtype)) for name in "xy"]
    named = {n: d for n, d in OPS.items() if d.kind is Kind.POINTWISE and "f" in d.dtypes and not d.attrs}
    named = {n: d for n, d in named.items() if d.arity in ((1, 1), (2, 2)) and n not in EITHER}
    assert {"mod", "floor_div", "rem", "pow", "sign", "round"} <= set(named)
    g.set_outputs([apply(d, operands[: d.arity[0]], {}) for d in named.values()])
    inputs = {"x": x, "y": y}
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        for name, found, want in zip(named, rlx.Session(device).compile(g).run(inputs), evaluate(g, inputs)[0], strict=True):
            assert_same(found, want, TOLERANCE[str(operands[0].dtype)], f"{name} on {device}")
            wrong = (want == 0) & (np.signbit(found) != np.signbit(want)) if want.dtype == x.dtype else np.zeros(1, bool)
            assert not wrong.any(), f"{name} on {device}: {[*zip(x[wrong], y[wrong], found[wrong], want[wrong])][:3]}"


# -- what a run reads and leaves -----------------------------------------------------------------------------------


def close(found: np.ndarray, want: np.ndarray, what: str) -> None:
    assert_same(found, want, 2e-5, what)


def normal(seed: int, *dims: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(dims).astype(F)


def check_weights(device: str) -> None:
    """Params are prepared when they are set, kept, shared with a clone and with other sizes, and can be set again."""

    def graph(rows: int) -> Graph:
        g = Graph("weights")
        x, w, b = g.input("x", (rows, 37), rlx.f32), g.param("w", (21, 37), rlx.f32), g.param("b", (21,), rlx.f32)
        g.set_outputs([rlx.softmax(rlx.gelu(x @ w.T + b)), rlx.layer_norm(x @ w.T, b, b)])
        return g

    first = rlx.Session(device).compile(graph(5))
    params = {"w": normal(0, 21, 37), "b": normal(1, 21)}
    for name, array in params.items():
        first.set_param(name, array)
    other = rlx.Session(device).compile(graph(1), params=first.params)
    for change in (False, True):
        if change:
            params["w"] = normal(2, 21, 37)
            first.set_param("w", params["w"])
        for compiled, rows in ((first, 5), (first.clone(), 5), (other, 1)):
            x = normal(3, rows, 37)
            for found, want in zip(compiled.run({"x": x}), evaluate(graph(rows), {"x": x}, params)[0], strict=True):
                close(found, want, f"{rows} rows, set again: {change}")


def log_graph(tokens: int) -> Graph:
    """Writes rows in place at `length`, looks one of them up, and counts."""
    g = Graph(f"log_{tokens}")
    rows = g.handle(rlx.BufferHandle("rows", (2, 9, 5), rlx.f32))
    length = g.handle(rlx.BufferHandle("length", (), rlx.i32))
    new, pick = g.input("new", (2, tokens, 5), rlx.f32), g.input("pick", (3,), rlx.i32)
    grown = rlx.update_rows(rows, new, length, axis=1)
    g.assign(rows, grown, in_place=True)
    g.assign(length, length + tokens)
    g.set_outputs([rlx.sum(grown * grown, axis=1), rlx.gather(grown, pick, axis=1), rlx.sum(rows)])
    return g


def check_states(device: str) -> None:
    """States outlive runs and are shared by executables on one store; clones and snapshots have their own; a run that fails
    leaves every state as it was, also those it had begun to write in place."""
    two, one = (rlx.Session(device).compile(log_graph(n)) for n in (2, 1))
    one.use_handles(two.handles)
    states: dict[str, np.ndarray] = {}

    def step(compiled: Any, tokens: int, seed: int) -> None:
        nonlocal states
        inputs = {"new": normal(seed, 2, tokens, 5), "pick": np.array([0, 8, 1], np.int32)}
        outputs, states = evaluate(log_graph(tokens), inputs, {}, states)
        for found, want in zip(compiled.run(inputs), outputs, strict=True):
            close(found, want, f"run {seed}")
        same_states(compiled)

    def same_states(compiled: Any) -> None:
        for name, want in states.items():
            np.testing.assert_array_equal(compiled.read_handle(name), want, name)

    step(two, 2, 0)
    step(one, 1, 1)
    snapshot, copy, kept = one.snapshot_handles(), two.clone(), states
    step(two, 2, 2)
    for bad in (np.array([0, 9, 0], np.int32), np.array([-10, 0, 0], np.int32)):
        try:
            one.run({"new": np.full((2, 1, 5), np.nan, F), "pick": bad})
        except IndexRangeError:
            same_states(one)
        else:
            raise AssertionError(f"index {bad} of 9 rows was not refused")
    states = kept
    same_states(copy)
    step(copy, 2, 3)
    one.restore_handles(snapshot)
    states = kept
    step(one, 1, 4)


def check_feeds(device: str) -> None:
    g = Graph("feed")
    h = g.handle(rlx.BufferHandle("h", (3,), rlx.f32))
    g.set_outputs([h + g.input("x", (3,), rlx.f32)])
    compiled = rlx.Session(device).compile(g)
    compiled.set_gpu_handle_feed("h", 0)
    for _ in range(3):
        compiled.run({"x": np.ones(3, F)})
    np.testing.assert_array_equal(compiled.read_handle("h"), [3, 3, 3])


def check_queue(device: str) -> None:
    """Queued runs keep their order and their outputs. One that fails cancels those behind it, on every executable of the store;
    the error says which one it was, where a result is first needed, and the states are as the run before it left them."""
    two, one = (rlx.Session(device).compile(log_graph(n)) for n in (2, 1))
    one.use_handles(two.handles)

    def inputs(tokens: int, seed: int, pick: int = 0) -> dict[str, np.ndarray]:
        return {"new": normal(seed, 2, tokens, 5), "pick": np.array([0, pick, 1], np.int32)}

    states: dict[str, np.ndarray] = {}
    for found, seed in zip(two.run_pipelined([inputs(2, seed) for seed in (0, 1)]), (0, 1), strict=True):
        outputs, states = evaluate(log_graph(2), inputs(2, seed), {}, states)
        for a, b in zip(found, outputs, strict=True):
            close(a, b, f"queued run {seed}")
    outputs, states = evaluate(log_graph(1), inputs(1, 2), {}, states)
    one.commit_no_wait(inputs(1, 2))
    close(one.read_output_row(1, 3, 5), outputs[1].reshape(-1, 5)[3], "a row of an output")
    (total,) = one.run_read_outputs(inputs(1, 3), [2])
    outputs, states = evaluate(log_graph(1), inputs(1, 3), {}, states)
    close(total, outputs[2], "one of the outputs")
    for compiled, given in ((one, inputs(1, 4)), (two, inputs(2, 5, pick=9)), (one, inputs(1, 6))):
        compiled.commit_no_wait(given)
    _, states = evaluate(log_graph(1), inputs(1, 4), {}, states)
    try:
        one.sync_pending()
    except IndexRangeError as e:
        assert "queued run 1 of 3" in str(e) and "the 1 behind it were not run" in str(e), e
    else:
        raise AssertionError("index 9 of 9 rows was not refused")
    for name, want in states.items():
        np.testing.assert_array_equal(two.read_handle(name), want, name)


# -- lengths -------------------------------------------------------------------------------------------------------


def lengths_graph(build: Callable[[Graph, Value], Value]) -> Graph:
    g = Graph("lengths")
    g.set_outputs([build(g, g.input("x", (1, 2, "n", 8), rlx.f32))])
    return g


def _mlp(g: Graph, x: Value) -> Value:
    w, b = g.param("w", (8, 8), rlx.f32), g.param("b", (8,), rlx.f32)
    return rlx.layer_norm(rlx.gelu(x @ w + b) @ w.T + x, b, b)


LENGTHS: dict[str, Callable[[Graph, Value], Value]] = {
    "rows": lambda g, x: rlx.silu(x * 2.0 + 1.0),
    "mlp": _mlp,
    "attention": lambda g, x: rlx.attention(x, x, x),
    "attention, causal": lambda g, x: rlx.attention(x, x, x, mask="causal"),
    "softmax over rows": lambda g, x: rlx.softmax(x, axis=2),
    "mean over rows": lambda g, x: rlx.mean(x, axis=2),
    "greatest row": lambda g, x: rlx.max(x, axis=2),
    "running sum": lambda g, x: rlx.cumsum(x, axis=2),
}


def check_length(device: str, name: str) -> None:
    """A graph compiled for at most 13 rows, of which some hold data and the others NaN, gives what those rows alone give; in
    any order of lengths, and through buckets as well."""
    g, upper = lengths_graph(LENGTHS[name]), 13
    params = {v.name or "": normal(i, *v.shape.static) for i, v in enumerate(g.params)}
    compiled = rlx.Session(device).compile(g, rlx.CompileOptions().bind_extent("n", upper))
    buckets = rlx.BucketedCompileCache(g, dim="n", ladder=rlx.power_of_two_ladder(4, 16), session=rlx.Session(device))
    for key, array in params.items():
        compiled.set_param(key, array)
        buckets.set_param(key, array)
    for n in (5, 1, 13, 12, 5):
        x = normal(n, 1, 2, n, 8)
        (want,), _ = evaluate(g, {"x": x}, params)
        compiled.set_active_extent((n, upper))
        padded = np.pad(x, ((0, 0), (0, 0), (0, upper - n), (0, 0)), constant_values=np.nan)
        (found,) = compiled.run({"x": padded})
        close(found[:, :, :n] if found.ndim == 4 else found, want, f"{name}, {n} of {upper} rows")
        (found,) = buckets.run_padded({"x": x})
        close(found, want, f"{name}, {n} rows in a bucket")


# -- ranks ---------------------------------------------------------------------------------------------------------


def check_collective(device: str, name: str, ranks: int = 3) -> None:
    """Every case of a collective, on ranks that are threads; twice, since memory is used again."""
    g, inputs, what = collectives.all_cases(name, ranks)
    transports: list[LocalTransport] = collectives.local(ranks)
    compiled = collectives.compiled_on(transports, g, device)
    for _ in range(2):
        for c in compiled:
            poison(c)
        found = collectives.good(collectives.run_all(transports, compiled, inputs))
        for rank, (want, _) in zip(found, evaluate_ranks(g, inputs), strict=True):
            for a, b, text in zip(rank, want, what, strict=True):
                collectives.same(a, b, f"{text} of {ranks} ranks on {device}")


OTHER_CHECKS = (check_edges, check_weights, check_states, check_feeds, check_queue)


# -- all of it -----------------------------------------------------------------------------------------------------


def checks(device: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every check, by a name to report."""
    yield from ((f"op {name}", lambda name=name: check_op(device, name)) for name in NAMES)
    yield from ((what.__name__[6:], lambda what=what: what(device)) for what in OTHER_CHECKS)
    yield from ((f"length, {name}", lambda name=name: check_length(device, name)) for name in LENGTHS)
    yield from ((f"ranks, {name}", lambda name=name: check_collective(device, name)) for name in collectives.NAMES)


def conform(device: str, only: Sequence[str] = ("",)) -> None:
    """All checks whose name has one of `only`, with a line for each that fails; SystemExit(1) if any does, or there is none."""
    start, failed = time.perf_counter(), 0
    chosen = [(name, check) for name, check in checks(device) if any(part in name for part in only)]
    for name, check in chosen:
        try:
            check()
        except Exception as e:  # noqa: BLE001  it is reported
            failed += 1
            print(f"{device}: {name}: {type(e).__name__}: {str(e).strip()[:2000]}", flush=True)
    print(f"{device}: {len(chosen) - failed} of {len(chosen)} checks pass, in {time.perf_counter() - start:.0f} s")
    if failed or not chosen:
        raise SystemExit(1)
