"""Collectives in graphs when something goes wrong: runs that fail on some ranks, states, ranks that die, interrupts, threads."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import ranks
from collective_graphs import HEAP, compiled_on, good, local, mlp, run_all, together

import rlx
from rlx.driver.barrier import PLAIN
from rlx.driver.symmetric import LocalTransport, Rank, SymmetricBuffer
from rlx.errors import (
    CallMismatchError,
    CollectiveError,
    CompileError,
    HeapBoundsError,
    IndexRangeError,
    NumericsError,
    OptionError,
    TransportError,
)
from rlx.ir import ops
from rlx.ir.graph import Graph

# -- runs that fail on some ranks ------------------------------------------------------------------------------------


def failing(where: str, ranks: int, in_place: bool) -> Graph:
    """A state, and a gather that may fail before, between or after the collectives."""
    g = Graph("may_fail")
    x, i = g.input("x", (1, 8), "f32"), g.input("i", (2,), "i64")
    h = g.handle(rlx.BufferHandle("h", (2, 8), rlx.f32))
    if where == "before":
        x = x + ops.sum(ops.gather(ops.reshape(x, (8,)), i)) * 0
    y = ops.all_reduce(x, ranks=ranks)
    if where == "between":
        y = ops.all_reduce(y + ops.sum(ops.gather(ops.reshape(y, (8,)), i)) * 0, ranks=ranks) * np.float32(1 / ranks)
    new = ops.update_rows(h, h[:1] + y, np.int64(0)) if in_place else h + y
    g.assign(h, new, in_place=in_place)
    g.set_outputs([new[:1] * 1, *([ops.gather(ops.reshape(new, (16,)), i)] if where == "after" else [])])
    return g


def fail_here(transport: Any, where: str, in_place: bool, device: str, fail: tuple[int, ...], checked: bool = False) -> list[Any]:
    """The results or errors of four runs on one rank, of which the second fails on ranks `fail`; and the state after each."""
    g = failing(where, transport.num_ranks, in_place)
    c = rlx.Session(device, threads=1, transport=transport).compile(g, rlx.CompileOptions(checked=checked))
    x, found = np.ones((1, 8), np.float32), []
    for run in range(4):
        fails = run == 1 and transport.this_rank.index in fail
        i = np.array([0, 99 if fails else 1])
        try:
            out: Any = float(c.run({"x": x, "i": i})[0][0, 0])
        except (IndexRangeError, CollectiveError) as e:
            out = type(e).__name__, str(e)
        state = c.read_handle("h")
        assert state is not None
        found.append((out, float(state[0, 0])))
    return found


def check_failures(found: list[list[Any]], fail: tuple[int, ...]) -> None:
    n = len(found)
    for r, runs in enumerate(found):
        assert [runs[0], *runs[2:]] == [(n, n), (2 * n, 2 * n), (3 * n, 3 * n)], (r, runs)
        (kind, text), state = runs[1]
        assert state == n
        assert kind == ("IndexRangeError" if r in fail else "CollectiveError")
        assert r in fail or f"rank {', '.join(map(str, fail))} failed" in text


@pytest.mark.parametrize("fail", [(0,), (2,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("where", ["before", "between", "after"])
def test_a_run_that_fails_on_some_ranks_fails_on_all(where: str, device: str, in_place: bool, fail: tuple[int, ...]) -> None:
    """None commits, whoever failed says why, the others say who it was; the next run works."""
    check_failures(good(together(local(3), lambda t: fail_here(t, where, in_place, device, fail))), fail)


@pytest.mark.parametrize("device", ["ref", "cpu"])
@pytest.mark.parametrize("where", ["between", "after"])
def test_so_in_checked_mode(where: str, device: str) -> None:
    check_failures(good(together(local(2), lambda t: fail_here(t, where, True, device, (1,), checked=True))), (1,))


@pytest.mark.parametrize("where", ["before", "after"])
def test_so_over_shared_memory(where: str) -> None:
    check_failures(ranks.run(2, fail_here, where, True, "cpu", (0,), heap_size=HEAP), (0,))


BAD: dict[str, Callable[[rlx.CompiledGraph, dict[str, Any]], Any]] = {
    "run": lambda c, x: c.run({"x": x["x"]}),
    "run_slots": lambda c, x: c.run_slots([x["x"], x["x"]]),
    "run_raw": lambda c, x: c.run_raw(x | {"z": x["x"]}),
    "run_read_outputs": lambda c, x: c.run_read_outputs(x, [7]),
    "run_typed": lambda c, x: c.run_typed({"x": (b"", "f32")}),
    "run_feed_gpu_handle": lambda c, x: c.run_feed_gpu_handle(x, "none", 0),
    "run_pipelined": lambda c, x: c.run_pipelined([x, {}]),
    "commit_no_wait": lambda c, x: c.commit_no_wait({}),
}


def bad_here(transport: Any, device: str) -> list[str]:
    """Rank 0 begins each run with a bad input, the others with good ones; then all do; then rank 0 lacks a weight."""
    n, me = transport.num_ranks, transport.this_rank.index
    g = Graph("given")
    x, i, w = g.input("x", (1, 8), "f32"), g.input("i", (2,), "i64"), g.param("w", (8,), "f32")
    g.set_outputs([ops.all_reduce(ops.gather(x + w, i, axis=1), ranks=n)])
    c, lacks = (rlx.Session(device, threads=1, transport=transport).compile(g) for _ in range(2))
    c.set_param("w", np.zeros(8, np.float32))
    inputs, said = {"x": np.ones((1, 8), np.float32), "i": np.array([0, 1])}, []
    if me:
        lacks.set_param("w", np.zeros(8, np.float32))

    def outcome(act: Callable[[], Any]) -> None:
        try:
            act()
            said.append("fine")
        except rlx.RlxError as e:
            said.append(f"{type(e).__name__} {e}")

    for bad in BAD.values():
        outcome(lambda bad=bad: bad(c, inputs) if me == 0 else c.run(inputs))
        outcome(lambda: c.run(inputs))
    outcome(lambda: lacks.run(inputs))
    outcome(lambda: c.run(inputs))
    outcome(lambda: c.run({}))  # bad on all of them
    outcome(lambda: c.run(inputs))
    return said


@pytest.mark.parametrize("device,processes", [("ref", False), ("cpu", False), ("cpu", True)])
def test_a_run_that_is_refused_on_one_rank_fails_on_all_at_once(device: str, processes: bool) -> None:
    """Within far less than the timeout, which would break the transport for good."""
    bad = partial(bad_here, device=device)
    found = ranks.run(2, bad_here, device, heap_size=HEAP) if processes else good(together(local(2), bad))
    for at, name in enumerate(BAD):
        assert re.match("(Binding|UnknownName|MissingInput|InputShape|InputDType)Error", found[0][2 * at]), (name, found[0])
        assert found[1][2 * at].startswith("CollectiveError") and "rank 0 failed" in found[1][2 * at], (name, found[1])
        assert found[0][2 * at + 1] == found[1][2 * at + 1] == "fine"
    assert found[0][-4].startswith("MissingParamError") and "rank 0 failed" in found[1][-4]
    assert all(f[-2].startswith("MissingInputError") and f[-1] == f[-3] == "fine" for f in found)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("device", ["ref", "cpu"])
def test_a_nan_on_one_rank_is_committed_nowhere(device: str, in_place: bool) -> None:
    g = Graph("nan")
    x, z, h = g.input("x", (4,), "f32"), g.input("z", (1, 4), "f32"), g.handle(rlx.BufferHandle("h", (2, 4), rlx.f32))
    y = ops.all_reduce(z, ranks=2)
    g.assign(h, ops.update_rows(h, h[:1] + y, np.int64(0)) if in_place else h + y, in_place=in_place)
    g.set_outputs([x + 1])
    transports = local(2)
    compiled = compiled_on(transports, g, device, checked=True)
    fine, states = {"x": np.ones(4, np.float32), "z": np.ones((1, 4), np.float32)}, []
    for inputs in (fine, {**fine, "x": np.full(4, np.nan, np.float32)}, fine):
        found = run_all(transports, compiled, [fine, inputs])
        states.append([float(c.read_handle("h")[0, 0]) for c in compiled])
        if inputs is fine:
            good(found)
        else:
            assert isinstance(found[1], NumericsError)
            assert type(found[0]) is CollectiveError and "rank 1 failed" in str(found[0])
    assert states == [[2, 2], [2, 2], [4, 4]]


def queued_here(transport: Any) -> list[Any]:
    """Queued runs of two graphs and plain collectives on one transport; then one that fails on rank 0."""
    n, me = transport.num_ranks, transport.this_rank.index
    x = np.full(64, me + 1, np.float32)
    graphs = []
    for name, deep in (("a", 3), ("b", 5)):
        g = Graph(name)
        y, total = g.input("x", (64,), "f32"), g.handle(rlx.BufferHandle(name, (64,), rlx.f32))
        for _ in range(deep):
            y = ops.all_reduce(y, ranks=n) * np.float32(1 / n)
        g.assign(total, total + y)
        i = g.input("i", (2,), "i64")
        g.set_outputs([ops.gather(total + y, i)])
        graphs.append(rlx.Session("cpu", threads=1, transport=transport).compile(g))
    fine, mine = np.array([0, 1]), np.ones(8, np.float32)
    for _ in range(50):
        for c in graphs:
            c.commit_no_wait({"x": x, "i": fine})
        mine[:] = 1
        rlx.driver.all_reduce(transport, SymmetricBuffer(transport.this_rank, 0, 32), mine)
        assert (mine == n).all()
    for c in graphs:
        c.sync_pending()
    a = graphs[0]
    for i in (fine, np.array([0, 99 if me == 0 else 1]), fine):
        a.commit_no_wait({"x": x, "i": i})
    try:
        a.sync_pending()
        said = ""
    except (IndexRangeError, CollectiveError) as e:
        said = f"{type(e).__name__} {e}"
    a.run_pipelined([{"x": x, "i": fine}] * 2)
    states = [c.read_handle(name) for name, c in zip("ab", graphs)]
    return [said, *(float(s[0]) for s in states if s is not None)]


@pytest.mark.parametrize("processes", [False, True])
def test_queued_runs_of_several_graphs_keep_the_order(processes: bool) -> None:
    found = ranks.run(2, queued_here, heap_size=HEAP) if processes else good(together(local(2), queued_here))
    for rank, (said, a, b) in enumerate(found):
        assert said.startswith(("IndexRangeError", "CollectiveError")[rank])
        assert "queued run 1 of 3" in said and "the 1 behind it were not run" in said
        assert (a, b) == (53 * 1.5, 50 * 1.5)


def second_thread_here(transport: Any) -> list[str]:
    """The errors in another thread of rank 0 while the first is in a run, or in a collective, that waits for rank 1."""
    n, me = transport.num_ranks, transport.this_rank.index
    compiled = [rlx.Session("cpu", threads=1, transport=transport).compile(mlp(n, rows)) for rows in (3, 4)]
    for c in compiled:
        for v in mlp(n).params:
            c.set_param(str(v.name), np.zeros(v.shape.static, np.float32))
    x, mine = [np.ones((rows, 20), np.float32) for rows in (3, 4)], [np.ones(8, np.float32) for _ in range(2)]
    scratch = [SymmetricBuffer(transport.this_rank, 32 * i, 32) for i in range(2)]

    def act(what: int, at: int) -> None:
        compiled[at].run({"x": x[at]}) if what == 0 else rlx.driver.all_reduce(transport, scratch[at], mine[at])

    for what in (0, 1, 1, 1):  # the last in machine code
        act(what, 0)
        act(what, 1)
    said, flag = [], transport.heap.bytes(SymmetricBuffer(Rank(0), 512, 1))  # rank 1 waits until it changes
    for done, (first, second) in enumerate(((0, 0), (0, 1), (1, 0), (1, 1))):
        if me == 0:
            thread = threading.Thread(target=act, args=(first, 0))
            thread.start()
            while not transport.collectives.busy.value:
                time.sleep(0.001)
            try:
                act(second, 1)
            except CollectiveError as e:
                said.append(str(e))
            flag[:] += 1
            thread.join(60)
        else:
            while flag[0] == done:
                time.sleep(0.001)
            act(first, 0)
        act(second, 1)  # all is well
    return said


@pytest.mark.parametrize("processes", [False, True])
def test_a_second_thread_is_refused(processes: bool) -> None:
    found = ranks.run(2, second_thread_here, heap_size=HEAP) if processes else good(together(local(2), second_thread_here))
    assert len(found[0]) == 4 and not found[1]
    assert all("another thread is using this transport" in text for text in found[0])


def test_a_clone_on_one_rank_is_not_its_original_on_another() -> None:
    transports = local(2)
    twins = [compiled_on(transports, failing("before", 2, False))]
    twins.append(good(together(transports, lambda t: twins[0][t.this_rank.index].clone())))
    x = {"x": np.ones((1, 8), np.float32), "i": np.array([0, 1])}
    found = run_all(transports, [twins[0][0], twins[1][1]], [x] * 2)
    assert all(isinstance(e, CallMismatchError) for e in found)
    for compiled in twins:
        good(run_all(transports, compiled, [x] * 2))


def test_only_runs_that_may_fail_late_have_one_more_barrier() -> None:
    def barriers(where: str) -> list[int]:
        transports = local(2)
        compiled = compiled_on(transports, failing(where, 2, False))
        came = [0, 0]
        for r, t in enumerate(transports):

            def barrier(call: Any = PLAIN, r: int = r, meet: Any = t.barrier) -> None:
                came[r] += 1
                meet(call)

            t.barrier = barrier  # type: ignore[method-assign]
        good(run_all(transports, compiled, [{"x": np.ones((1, 8), np.float32), "i": np.array([0, 1])}] * 2))
        return came

    assert barriers("before") == [1 + 2] * 2  # the beginning, and a collective's two
    assert barriers("after") == [1 + 2 + 1] * 2




# -- states and errors ---------------------------------------------------------------------------------------------


def counter(ranks: int, dims: int = 4) -> Graph:
    """total += sum of all ranks' x[at]; and row 1 of a state that is written in place before the barrier."""
    g = Graph("counter")
    total, rows = g.handle(rlx.BufferHandle("total", (dims,), rlx.f32)), g.handle(rlx.BufferHandle("rows", (3, dims), rlx.f32))
    x, at = g.input("x", (5, dims), "f32"), g.input("at", (), "i64")
    picked = ops.gather(x, at, axis=0)
    written = ops.update_rows(rows, ops.reshape(picked, dims=(1, dims)), np.int64(1), axis=0)
    g.assign(rows, written, in_place=True)
    summed = ops.all_reduce(ops.sum(written, axis=0), ranks=ranks)  # behind the update
    g.assign(total, total + summed)
    g.set_outputs([ops.all_gather(total + picked, ranks=ranks)])
    return g


def asked(at: int, value: float) -> dict[str, np.ndarray]:
    return {"x": np.full((5, 4), value, np.float32), "at": np.array(at)}


@pytest.mark.parametrize("device", ["ref", "cpu"])
def test_states_move_together(device: str) -> None:
    transports = local(2)
    compiled = compiled_on(transports, counter(2), device)
    for n in range(1, 4):
        good(run_all(transports, compiled, [asked(0, 1), asked(1, 2)]))
        assert all(c.read_handle("total").tolist() == [3.0 * n] * 4 for c in compiled)
    before = [c.snapshot_handles() for c in compiled]
    stores = [c.fork_handles(1)[0] for c in compiled]
    for c, store in zip(compiled, stores):
        c.use_handles(store)
    good(run_all(transports, compiled, [asked(0, 5), asked(1, 5)]))
    assert compiled[0].read_handle("total")[0] == 19 and (compiled[0].read_handle("rows")[1] == 5).all()
    good(together(transports, lambda t: compiled[t.this_rank.index].restore_handles(before[t.this_rank.index])))
    twins = good(together(transports, lambda t: compiled[t.this_rank.index].clone()))
    good(run_all(transports, twins, [asked(0, 1), asked(1, 2)]))
    assert twins[0].read_handle("total")[0] == 12 and compiled[0].read_handle("total")[0] == 9


@pytest.mark.parametrize("device", ["ref", "cpu"])
def test_a_rank_that_dies_in_a_run(device: str) -> None:
    """The others get an error that names it and the step; no state has changed."""
    transports = local(3)
    compiled = compiled_on(transports, counter(3), device)
    good(run_all(transports, compiled, [asked(0, 1)] * 3))

    def act(t: LocalTransport) -> None:
        if t.this_rank.index == 1:
            t.close()
        else:
            compiled[t.this_rank.index].run(asked(0, 1))

    for r, e in enumerate(together(transports, act)):
        if r != 1:
            assert isinstance(e, TransportError) and "rank 1 left" in str(e)
            assert compiled[r].read_handle("total").tolist() == [3.0] * 4
            assert device != "cpu" or "nothing was committed" in str(e)
    assert all(isinstance(e, TransportError) for e in run_all(transports, compiled, [asked(0, 1)] * 3))


def test_a_rank_that_dies_within_a_collective() -> None:
    """Between two barriers of one run; the step is named."""
    transports = local(2)
    compiled = compiled_on(transports, counter(2))
    meet, count = transports[1].barrier, [0]

    def barrier(call: Any = None) -> None:
        count[0] += 1
        if count[0] == 2:
            transports[1].close()
        meet(call)

    transports[1].barrier = barrier  # type: ignore[method-assign]
    found = run_all(transports, compiled, [asked(0, 1)] * 2)
    assert all(isinstance(e, TransportError) for e in found)
    assert re.search(r"counter: all_(reduce|gather): .*; nothing was committed", str(found[0]))
    assert all(c.read_handle("total").tolist() == [0.0] * 4 for c in compiled)


def interrupted_here(transport: Any, at: str, in_code: bool, error: type[BaseException]) -> Any:
    """Rank 0 is interrupted while its run waits for rank 1: at the barrier before the first step, or in the first collective."""
    plain = transport if in_code else PutAndGet(transport)
    compiled = rlx.Session("cpu", threads=1, transport=plain).compile(counter(2))
    compiled.run(asked(0, 1))
    first, number = transport.state.number, transport.state.number + 1 + (at == "step")
    transport.barrier()
    if transport.this_rank.index == 0:
        swallowed: list[Any] = []
        sys.unraisablehook = swallowed.append

        def interrupt(*_: Any) -> None:
            raise error

        signal.signal(signal.SIGUSR1, interrupt)
        with pytest.raises(error):
            compiled.run(asked(0, 1))
        assert not swallowed and transport.broken
    else:
        exchanges = compiled._executable._exchange.exchanges  # type: ignore[attr-defined]
        if at == "step":
            exchanges.begin()
        while not transport._lines[0].epoch > number:  # it waits
            assert transport._lines[0].epoch > first
            time.sleep(0.0001)
        os.kill(transport._lines[0].pid, signal.SIGUSR1)
        while not (transport._lines[0].fault or transport._lines[0].left):
            time.sleep(0.001)
    before = compiled.read_handle("total")
    with pytest.raises(CollectiveError):  # rank 1 may find that rank 0 had come to something else
        compiled.run(asked(0, 1))
    with pytest.raises(TransportError) as caught:
        compiled.run(asked(0, 1))
    after = compiled.read_handle("total")
    assert before is not None and after is not None and before.tolist() == after.tolist() == [2.0] * 4
    return str(caught.value)


class PutAndGet:
    """A transport whose steps are done in Python."""

    def __init__(self, inner: Any) -> None:
        self.num_ranks, self.this_rank, self.heap_size, self.timeout = inner.num_ranks, inner.this_rank, inner.heap_size, 30.0
        self.put, self.get, self.barrier, self.close = inner.put, inner.get, inner.barrier, inner.close


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("at,in_code", [("begin", True), ("step", True), ("step", False)])
def test_what_interrupts_a_run_comes_out_of_it_and_the_others_hear_of_it(at: str, in_code: bool, error: type[Exception]) -> None:
    for _ in range(2):
        found = ranks.run(2, interrupted_here, at, in_code, error, heap_size=HEAP)
        assert all("rank 0" in text and ("interrupted" in text or "left" in text) for text in found), found


def test_python_that_does_not_answer_has_failed() -> None:
    """However it is called: machine code waits for a word, and takes none for a failure."""
    transports = local(2)
    compiled = compiled_on(transports, counter(2), "cpu")

    def act(t: LocalTransport) -> None:
        calls = compiled[t.this_rank.index]._executable._exchange
        if t.this_rank.index == 0:
            for _, _, (_, answer, _) in calls._made.values():
                inside = gc.get_referents(answer)
                next(x for r in inside for x in (r, *gc.get_referents(r)) if hasattr(x, "__self__")).__self__.close()
        compiled[t.this_rank.index].run(asked(0, 1))

    sys_hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        found: list[Any] = [None, None]

        def rank(i: int) -> None:
            try:
                act(transports[i])
            except BaseException as e:  # noqa: BLE001
                found[i] = e
                transports[i].close()

        threads = [threading.Thread(target=rank, args=(i,)) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    finally:
        sys.unraisablehook = sys_hook
    assert isinstance(found[0], KeyboardInterrupt) and isinstance(found[1], TransportError), found


def test_a_check_that_fails_on_all_ranks_alike() -> None:
    transports = local(2)
    compiled = compiled_on(transports, counter(2))
    for at in (9, 0, 9, 0):
        found = run_all(transports, compiled, [asked(at, 1)] * 2)
        assert all(isinstance(f, IndexRangeError if at else list) for f in found), found
    assert all(c.read_handle("total").tolist() == [4.0] * 4 for c in compiled)


def test_without_the_right_transport() -> None:
    g = mlp(2)
    for device in ("ref", "cpu"):
        with pytest.raises(CompileError, match=r"collectives of 2 ranks: compile it with Session\(device, transport=…\)"):
            rlx.Session(device).compile(g)
        with pytest.raises(CompileError, match="all_reduce.* is of 2 ranks, the session's transport has 3"):
            rlx.Session(device, transport=local(3)[0]).compile(g)
    with pytest.raises(OptionError, match="transport is a SymmetricTransport, got list"):
        rlx.Session("cpu", transport=local(2))  # type: ignore[arg-type]


def test_the_heap_must_hold_the_largest_operand() -> None:
    transports = local(2, heap=239)
    for e in together(transports, lambda t: rlx.Session("cpu", transport=t).compile(mlp(2))):
        assert isinstance(e, HeapBoundsError)
        assert "need 240 bytes of each rank's heap, which has 239; make the transport with heap_size=240" in str(e)
    compiled_on(local(2, heap=240), mlp(2))


def test_ranks_that_loaded_different_collectives() -> None:
    transports = local(2)
    found = together(transports, lambda t: rlx.Session("cpu", transport=t).compile(mlp(2, rows=3 + t.this_rank.index)))
    assert all(isinstance(e, CallMismatchError) for e in found)


def test_ranks_that_run_different_programs() -> None:
    transports = local(2)
    both = [compiled_on(transports, mlp(2, rows)) for rows in (3, 4)]
    for compiled in both:
        for c in compiled:
            for v in mlp(2).params:
                c.set_param(v.name, np.zeros(v.shape.static, np.float32))
    x = [np.zeros((3 + r, 20), np.float32) for r in range(2)]
    found = together(transports, lambda t: both[t.this_rank.index][t.this_rank.index].run({"x": x[t.this_rank.index]}))
    assert all(isinstance(e, CallMismatchError) and "the barrier before the first step" in str(e) for e in found)


def test_nothing_keeps_an_executable() -> None:
    transports = local(2)
    compiled = compiled_on(transports, mlp(2))
    dead = [weakref.ref(c._executable) for c in compiled]
    gc.disable()
    try:
        compiled.clear()
        assert [d() for d in dead] == [None, None]
    finally:
        gc.enable()
