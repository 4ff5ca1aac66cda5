"""State updated in place: the rows alone are written, every read sees what it should, and a failed run leaves no trace."""

from __future__ import annotations

import numpy as np
import pytest
from devices import DEVICES

import rlx
from rlx.backends import get
from rlx.compiler import lower
from rlx.compiler.compilation import Compilation
from rlx.compiler.state import state as state_pass
from rlx.errors import CompileError, IndexRangeError, NumericsError
from rlx.ir.building import Update
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Node
from rlx.ir.verify import faults

F = np.float32


def cache(capacity: int = 8, in_place: bool = True) -> rlx.Graph:
    """Appends a row at `at`, and gives the running sum over all rows, old and new."""
    g = rlx.Graph("cache")
    rows = g.handle(rlx.BufferHandle("rows", (2, capacity, 4), rlx.f32))
    length = g.handle(rlx.BufferHandle("length", (), rlx.i32))
    new = g.input("new", (2, 1, 4), rlx.f32)
    grown = rlx.update_rows(rows, new, length, axis=1)
    g.assign(rows, grown, in_place=in_place)
    g.assign(length, length + 1)
    g.set_outputs([rlx.sum(grown, axis=1), rlx.sum(rows, axis=1)], names=["after", "before"])
    return g


def state_of(compiled: rlx.runtime.CompiledGraph, name: str) -> np.ndarray:
    found = compiled.read_handle(name)
    assert found is not None
    return found


@pytest.fixture(params=DEVICES)
def session(request: pytest.FixtureRequest) -> rlx.Session:
    return rlx.Session(request.param)


def test_only_the_new_rows_are_written() -> None:
    program = lower(cache(), get("cpu").target(threads=2), rlx.CompileOptions())
    rows = next(b.id for b in program.buffers if b.name == "rows")
    (update,) = [s for s in program.steps if rows in s.writes]
    assert update.kernel.grid and np.prod([n for _, n in update.kernel.grid]) == 2  # 2 x 1 rows of 4, not 2 x 8
    assert not any(rows in s.writes for s in program.commit) and len(program.abort) == 1
    assert program.plan.size_bytes < 8 * 64


@pytest.mark.parametrize("own, kernels", [(False, 2), (True, 3)])
def test_new_rows_are_computed_where_they_are_stored_unless_they_come_from_the_old_state(own: bool, kernels: int) -> None:
    g = rlx.Graph("g")
    state, at = g.handle(rlx.BufferHandle("s", (8, 4), rlx.f32)), g.input("at", (), rlx.i32)
    x = g.input("x", (2, 4), rlx.f32)
    g.assign(state, rlx.update_rows(state, rlx.exp(state[:2] if own else x.reshape(4, 2).T.reshape(2, 4)), at), in_place=True)
    g.set_outputs([x + 1.0])
    program = lower(g, get("ref").target(1), rlx.CompileOptions())
    assert len(program.steps) == kernels + 1, str(program)  # one is of the output
    compiled, old = rlx.Session("ref:1").compile(g), np.linspace(0, 1, 32, dtype=F).reshape(8, 4)
    compiled.bind_handle("s", old)
    given = np.arange(8, dtype=F).reshape(2, 4)
    compiled.run({"x": given, "at": np.int32(1)})
    want = old.copy()
    want[1:3] = np.exp(old[:2] if own else given.reshape(4, 2).T.reshape(2, 4))
    np.testing.assert_allclose(state_of(compiled, "s"), want, rtol=1e-6)


@pytest.mark.parametrize("read, kernels", [(False, 2), (True, 3)])
def test_normalised_rows_are_computed_where_they_are_stored_unless_they_are_read_elsewhere(read: bool, kernels: int) -> None:
    """Also where a view puts the rows in another order, as heads of keys are in a cache."""
    g = rlx.Graph("g")
    state, at = g.handle(rlx.BufferHandle("s", (1, 2, 8, 4), rlx.bf16)), g.input("at", (), rlx.i32)
    x = g.input("x", (3, 8), rlx.f32)
    heads = rlx.rms_norm(x.reshape(3, 2, 4), g.constant(np.arange(4, dtype=F))).astype(rlx.bf16)
    rows = heads.reshape(1, 3, 2, 4).transpose(0, 2, 1, 3)
    g.assign(state, rlx.update_rows(state, rows, at, axis=2), in_place=True)
    g.set_outputs([heads if read else x + 1.0])
    program = lower(g, get("ref").target(1), rlx.CompileOptions())
    assert len(program.steps) == kernels + (not read), str(program)  # one is of the other output
    compiled, rng = rlx.Session("ref:1").compile(g), np.random.default_rng(0)
    given, old = rng.standard_normal((3, 8)).astype(F), rng.standard_normal((1, 2, 8, 4)).astype(rlx.bf16.numpy)
    compiled.bind_handle("s", old)
    compiled.run({"x": given, "at": np.int32(5)})
    split, want = given.reshape(3, 2, 4), old.astype(F)
    normed = split / np.sqrt((split**2).mean(-1, keepdims=True) + 1e-5) * np.arange(4)
    want[0, :, 5:] = normed.transpose(1, 0, 2)
    np.testing.assert_allclose(state_of(compiled, "s").astype(F), want, rtol=1e-2)
    with pytest.raises(IndexRangeError):
        compiled.run({"x": given, "at": np.int32(6)})
    np.testing.assert_allclose(state_of(compiled, "s").astype(F), want, rtol=1e-2)


def test_reads_see_the_old_or_the_new_state(session: rlx.Session) -> None:
    compiled = session.compile(cache())
    rng = np.random.default_rng(0)
    total = np.zeros((2, 4))
    for i in range(8):
        new = rng.standard_normal((2, 1, 4)).astype(F)
        after, before = compiled.run({"new": new})
        np.testing.assert_allclose(before, total, atol=1e-5)
        total = total + new[:, 0]
        np.testing.assert_allclose(after, total, atol=1e-5)
        assert int(state_of(compiled, "length")) == i + 1
    state = state_of(compiled, "rows")
    with pytest.raises(IndexRangeError):
        compiled.run({"new": new})
    np.testing.assert_array_equal(state_of(compiled, "rows"), state)
    assert int(state_of(compiled, "length")) == 8


def test_a_failed_run_puts_back_what_it_overwrote(session: rlx.Session) -> None:
    g = rlx.Graph("failing")
    a, b = (g.handle(rlx.BufferHandle(n, (4, 3), rlx.f32)) for n in "ab")
    row, at, pick = g.input("row", (2, 3), rlx.f32), g.input("at", (), rlx.i32), g.input("pick", (1,), rlx.i32)
    new_a = rlx.update_rows(a, row, at)
    g.assign(a, new_a, in_place=True)
    looked = rlx.gather(new_a, pick)  # fails, after `a` has been changed, for a bad pick
    g.assign(b, rlx.update_rows(b, rlx.concat(looked, looked), at), in_place=True)
    g.set_outputs([looked])
    compiled = session.compile(g)
    start = {n: np.random.default_rng(i).standard_normal((4, 3)).astype(F) for i, n in enumerate("ab")}
    for n, v in start.items():
        compiled.bind_handle(n, v)
    inputs = {"row": np.ones((2, 3), F), "at": np.int32(1).reshape(()), "pick": np.array([9], np.int32)}
    for bad in ({"pick": np.array([9], np.int32)}, {"at": np.array(3, np.int32), "pick": np.array([0], np.int32)}):
        with pytest.raises(IndexRangeError):
            compiled.run(inputs | bad)
        for n, v in start.items():
            np.testing.assert_array_equal(state_of(compiled, n), v)
    compiled.run(inputs | {"pick": np.array([1], np.int32)})
    np.testing.assert_array_equal(state_of(compiled, "a")[1:3], np.ones((2, 3)))
    np.testing.assert_array_equal(state_of(compiled, "b")[1:3], np.ones((2, 3)))
    np.testing.assert_array_equal(state_of(compiled, "b")[[0, 3]], start["b"][[0, 3]])


def test_checked_mode_undoes_updates_in_place(session: rlx.Session) -> None:
    compiled = session.compile(cache(), rlx.CompileOptions(checked=True))
    compiled.run({"new": np.ones((2, 1, 4), F)})
    state = state_of(compiled, "rows")
    with pytest.raises(NumericsError):
        compiled.run({"new": np.full((2, 1, 4), np.nan, F)})
    np.testing.assert_array_equal(state_of(compiled, "rows"), state)


def refused(build) -> rlx.Graph:
    g = rlx.Graph("refused")
    state = g.handle(rlx.BufferHandle("state", (4, 3), rlx.f32))
    row, at = g.input("row", (2, 3), rlx.f32), g.input("at", (), rlx.i32)
    value = build(g, state, row, at)
    g.assign(state, value, in_place=True)
    g.set_outputs([rlx.sum(value)])
    return g


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda g, s, r, a: s + 1.0, "not from an op that updates a part"),
        (lambda g, s, r, a: rlx.update_rows(s * 2.0, r, a), "not the handle"),
        (lambda g, s, r, a: rlx.update_rows(s, s[:2], a), "from the old state"),
    ],
)
def test_what_cannot_be_done_in_place_says_why(build, reason: str) -> None:
    with pytest.raises(CompileError, match=reason):
        rlx.Session("ref").compile(refused(build))


def test_a_reader_that_needs_the_new_state_too_is_a_reason() -> None:
    g = rlx.Graph("late")
    state = g.handle(rlx.BufferHandle("state", (4, 3), rlx.f32))
    row, at = g.input("row", (1, 3), rlx.f32), g.input("at", (), rlx.i32)
    new = rlx.update_rows(state, row, at)
    g.assign(state, new, in_place=True)
    g.set_outputs([new - state])
    with pytest.raises(CompileError, match="reads the old state, but depends on the new state"):
        rlx.Session("ref").compile(g)
    again = rlx.Graph.parse(str(g).replace(" in place", ""))
    compiled = rlx.Session("cpu").compile(again)  # a copy makes it right
    out = compiled.run({"row": np.ones((1, 3), F), "at": np.array(2, np.int32)})[0]
    np.testing.assert_array_equal(out, [[0] * 3, [0] * 3, [1] * 3, [0] * 3])
    assert " in place" in str(g) and str(rlx.Graph.parse(str(g))) == str(g)


def test_an_output_that_is_the_new_state_has_memory_of_its_own(session: rlx.Session) -> None:
    g = rlx.Graph("out")
    state = g.handle(rlx.BufferHandle("state", (3, 2), rlx.f32))
    new = rlx.update_rows(state, g.input("row", (1, 2), rlx.f32), g.input("at", (), rlx.i32))
    g.assign(state, new, in_place=True)
    g.set_outputs([new, new.T])
    compiled = session.compile(g)
    compiled.run_slots([np.ones((1, 2), F), np.array(0, np.int32)])
    view = compiled.outputs_view()[0]
    compiled.bind_handle("state", np.full((3, 2), 5, F))
    np.testing.assert_array_equal(view, [[1, 1], [0, 0], [0, 0]])


@pytest.mark.parametrize("names", [("new", "old"), ("old", "new")])
def test_an_output_that_is_the_old_state_is_copied_before_the_update(session: rlx.Session, names) -> None:
    g = rlx.Graph("both")
    state = g.handle(rlx.BufferHandle("state", (3, 2), rlx.f32))
    new = rlx.update_rows(state, g.input("row", (1, 2), rlx.f32), g.input("at", (), rlx.i32))
    g.assign(state, new, in_place=True)
    values = {"new": new, "old": state}
    g.set_outputs([values[n] for n in names], names=names)
    out = session.compile(g).run({"row": np.ones((1, 2), F), "at": np.array(1, np.int32)})
    want = {"new": [[0, 0], [1, 1], [0, 0]], "old": np.zeros((3, 2))}
    for name, found in zip(names, out, strict=True):
        np.testing.assert_array_equal(found, want[name])


def crossed() -> rlx.Graph:
    """Each of two sums reads one old state and the other's new one."""
    g = rlx.Graph("crossed")
    a, b = (g.handle(rlx.BufferHandle(name, (3, 2), rlx.f32)) for name in "ab")
    row, at = g.input("row", (1, 2), rlx.f32), g.input("at", (), rlx.i32)
    new_a, new_b = rlx.update_rows(a, row, at), rlx.update_rows(b, row * 2.0, at)
    g.assign(a, new_a)
    g.assign(b, new_b)
    g.set_outputs([a + new_b, b + new_a])
    return g


def test_of_two_updates_that_wait_for_each_other_one_is_a_copy(session: rlx.Session) -> None:
    compiled = session.compile(crossed())
    for expected in ([[0, 0], [2, 2], [0, 0]], [[0, 0], [3, 3], [0, 0]]):
        x, _ = compiled.run({"row": np.ones((1, 2), F), "at": np.array(1, np.int32)})
        np.testing.assert_array_equal(x, expected)
    np.testing.assert_array_equal(state_of(compiled, "b"), [[0, 0], [2, 2], [0, 0]])
    steps = compiled.program().phases
    assert len(steps["abort"]) == 1 and len(steps["commit"]) == 1


def with_updates() -> rlx.Graph:
    return state_pass(cache(), Compilation(get("ref").target(), rlx.CompileOptions()))


@pytest.mark.parametrize("capacity", [2, 100])
def test_a_row_taken_modulo_one_is_row_zero(session: rlx.Session, capacity: int) -> None:
    """The part that is the same for all rows holds comparisons of constants then, and a search for the row of a change failed."""
    g = rlx.Graph("ring")
    old, new, i = (g.input(name, dims, "i64") for name, dims in (("old", (capacity,)), ("new", (capacity,)), ("i", ())))
    g.set_outputs([rlx.update_rows(old, new, i % 1)])
    rows = np.arange(capacity)
    assert (session.compile(g).run({"old": -rows, "new": rows, "i": np.array(5)})[0] == rows).all()


def test_updates_are_printed_parsed_and_evaluated() -> None:
    g, plain = with_updates(), cache()
    assert "  update rows = %" in str(g) and str(rlx.Graph.parse(str(g))) == str(g)
    assert g.fingerprint() == rlx.Graph.parse(str(g)).fingerprint() != plain.fingerprint()
    rows = np.random.default_rng(0).standard_normal((2, 8, 4)).astype(F)
    given = {"new": np.ones((2, 1, 4), F)}, {}, {"rows": rows, "length": np.array(3, np.int32)}
    for found, want in zip(evaluate(g, *given)[0], evaluate(plain, *given)[0], strict=True):
        np.testing.assert_array_equal(found, want)
    again = g.rebuild(lambda node, inputs: Node(node.op, inputs, node.attrs, node.shapes, node.name, node.source).results)
    assert str(again) == str(g) and again.updates[0].result is not g.updates[0].result


def test_the_verifier_names_a_wrong_update() -> None:
    def broken(**changed: rlx.Value) -> str:
        g = with_updates()
        g.updates = [g.updates[0]._replace(**{name: pick(g.updates[0]) for name, pick in changed.items()})]
        return "; ".join(faults(g))

    assert not faults(with_updates())
    assert "is not the assigned value of the handle" in broken(result=lambda u: u.undo)
    assert "does not restore" in broken(undo=lambda u: u.result)
    g = with_updates()
    g.updates *= 2
    assert "updated twice" in "; ".join(faults(g))
    g = crossed()
    one = state_pass(g, Compilation(get("ref").target(), rlx.CompileOptions()))
    a, b = g.handles
    (rows, at) = next(v.node.inputs[1:] for h, v in g.assigns if h is b)
    saved = rlx.take_rows(b, at, count=1)
    new_b = dict(one.assigns)[b]
    one.updates.append(Update(b, new_b, saved, rlx.update_rows(new_b, saved, at)))
    assert "but depends on the new state" in "; ".join(faults(one))
