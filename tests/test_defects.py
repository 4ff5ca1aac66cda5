"""Defects that systems like this have shipped with, each looked for by name; and what a hostile caller might pass.

Those with a home elsewhere are there: rebound weights, stale views, swapped states in test_compiled; native against
decomposed in test_ops; slots of packed weights in test_memory_plan; masks past their rows in test_cpu_attention;
damaged files in test_weights; fork, exit and affinity in test_cpu_pool; allocation and resident memory in test_allocation.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from devices import DEVICES

import rlx
from rlx.errors import (
    BindingError,
    CompileError,
    DTypeError,
    GraphError,
    IndexRangeError,
    InputDTypeError,
    InputShapeError,
    OptionError,
    OutOfMemoryError,
    ShapeError,
    TransferError,
)

F = np.float32


@pytest.fixture(params=DEVICES)
def session(request: pytest.FixtureRequest) -> rlx.Session:
    return rlx.Session(request.param)


def _any(x: Any) -> Any:
    """`x`, of which the type checker then knows nothing."""
    return x


def two_inputs() -> rlx.Graph:
    g = rlx.Graph("two")
    x, y = g.input("x", (100,), "f32"), g.input("y", (100,), "f32")
    g.set_outputs([x + y, x - y, x, y])
    return g


def plus_one(dims: tuple[int | str, ...], name: str = "plus_one") -> rlx.Graph:
    g = rlx.Graph(name)
    g.set_outputs([g.input("x", dims, "f32") + 1.0])
    return g


# -- what is prepared from params and constants --------------------------------------------------------------------


def test_what_a_param_is_prepared_with_is_there_before_it(session: rlx.Session) -> None:
    """Positions known at compile are made once; the rows looked up with them when the table is set, which comes first."""
    g = rlx.Graph("positions")
    x, table = g.input("x", (4, 8), "f32"), g.param("table", (9, 8), "f32")
    g.set_outputs([x + rlx.embedding(table, rlx.ir.ops.iota(dims=(4,), axis=0, dtype="i32"))])
    compiled = session.compile(g)
    rows = np.arange(72, dtype=F).reshape(9, 8)
    compiled.set_param("table", rows)
    (got,) = compiled.run({"x": np.zeros((4, 8), F)})
    assert (got == rows[:4]).all()


# -- arrays that are the executable's own memory -------------------------------------------------------------------


@pytest.mark.parametrize("how", ["run", "run_slots", "run_pipelined"])
def test_an_input_may_be_the_slot_of_another(session, how):
    compiled = session.compile(two_inputs())
    x, y = np.random.default_rng(0).standard_normal((2, 100)).astype(F)
    vx, vy = compiled.input_view("x"), compiled.input_view("y")
    vx[...], vy[...] = x, y
    if how == "run":
        total, difference, *_ = compiled.run({"x": vy, "y": vx[::-1]})
    elif how == "run_slots":
        compiled.run_slots([vy, vx[::-1]])
        total, difference, *_ = map(np.array, compiled.outputs_view())
    else:
        ((total, difference, *_),) = compiled.run_pipelined([{"x": vy, "y": vx[::-1]}])
    assert (total == y + x[::-1]).all() and (difference == y - x[::-1]).all()


def test_outputs_may_be_fed_back(session):
    compiled = session.compile(two_inputs())
    x, y = np.random.default_rng(1).standard_normal((2, 100)).astype(F)
    for _ in range(3):
        compiled.run_slots([x, y])
        total, difference, same_x, same_y = map(np.asarray, compiled.outputs_view())
        want = np.array(difference) + np.array(total), np.array(difference) - np.array(total)
        got = compiled.run({"x": difference, "y": total})
        assert (got[0] == want[0]).all() and (got[1] == want[1]).all()
        compiled.run_slots([x, y])
        got = compiled.run({"x": same_y, "y": same_x})  # outputs that are inputs have memory of their own
        assert (got[1] == y - x).all()


# -- queued runs are in the order of the calls ---------------------------------------------------------------------


def test_queued_runs_see_state_and_weights_as_they_were(session):
    g = rlx.Graph("queued")
    x, w = g.input("x", (8, 8), "f32"), g.param("w", (8, 8), "f32")
    state = g.handle(rlx.BufferHandle("sum", (8, 8), "f32"))
    g.assign(state, state + x @ w)
    g.set_outputs([x @ w])
    compiled = session.compile(g)
    eye, ones = np.eye(8, dtype=F), np.ones((8, 8), F)
    compiled.set_param("w", eye)
    for _ in range(5):
        compiled.commit_no_wait({"x": ones})
    compiled.set_param("w", 2 * eye)
    assert (compiled.read_handle("sum") == 5).all()
    for _ in range(5):
        compiled.commit_no_wait({"x": ones})
    compiled.bind_handle("sum", 100 * ones)
    assert (compiled.read_handle("sum") == 100).all()
    compiled.run({"x": ones})
    assert (compiled.read_handle("sum") == 102).all()


# -- what a run must not depend on ---------------------------------------------------------------------------------


def block(rows: int, heads: int) -> rlx.Graph:
    """Odd sizes of everything that has tails: contraction, softmax, norm, masked attention, reductions of both axes."""
    g = rlx.Graph("block")
    x = g.input("x", (rows, heads * 5), "f32")
    mask = g.input("mask", (1, 1, 1, rows), "bool")
    w = g.param("w", (heads * 5, heads * 5), "f32")
    y = rlx.gelu(x @ w)
    q = y.reshape(1, rows, heads, 5).transpose(0, 2, 1, 3)
    attended = rlx.attention(q, q, q, mask, mask="custom").transpose(0, 2, 1, 3).reshape(rows, heads * 5)
    normed = rlx.layer_norm(attended + x, g.constant(np.ones(heads * 5, F)), g.constant(np.zeros(heads * 5, F)))
    g.set_outputs([normed, rlx.softmax(normed @ w.T), rlx.sum(y, axis=0), rlx.max(y, axis=1)])
    return g


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("rows", "heads"), [(7, 3), (19, 5), (1, 1)])
def test_what_lay_in_the_arena_before_changes_no_bit(rows, heads, threads):
    rng = np.random.default_rng(rows)
    compiled = rlx.Session("cpu").compile(block(rows, heads), rlx.CompileOptions(threads=threads))
    compiled.set_param("w", rng.standard_normal((heads * 5, heads * 5)).astype(F) / 4)
    inputs = {"x": rng.standard_normal((rows, heads * 5)).astype(F), "mask": np.arange(rows).reshape(1, 1, 1, -1) % 3 != 1}
    results = []
    for poison in (0x00, 0xFF, 0x7F):  # zeros, NaN, large numbers
        ctypes.memset(compiled.arena_ptr(), poison, compiled.memory_plan().arena_bytes)
        results.append(b"".join(a.tobytes() for a in compiled.run(inputs)))
    assert results[0] == results[1] == results[2]
    assert np.isfinite(np.frombuffer(results[0], F)).all()


def test_results_are_the_callers_own(session):
    compiled = session.compile(two_inputs())
    x, y = np.random.default_rng(2).standard_normal((2, 100)).astype(F)
    first = compiled.run({"x": x, "y": y})
    kept = [a.copy() for a in first]
    compiled.run({"x": 2 * y, "y": 3 * x})
    compiled.input_view("x")[...] = 0
    assert all((a == b).all() for a, b in zip(first, kept))


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "i64", "i32", "i8", "u8", "bool"])
def test_weights_are_copied_whole(session, dtype):
    g = rlx.Graph("weights")
    w = g.param("w", (3, 5), dtype)
    g.set_outputs([w.T, w, rlx.concat(w, w, axis=0)])
    compiled = session.compile(g)
    values = np.random.default_rng(3).integers(0, 2, (2, 3, 5)).astype(w.dtype.numpy)
    for whole, by_bytes in zip(values, (False, True)):
        mine = np.asfortranarray(whole)
        if by_bytes:
            compiled.set_param_typed("w", whole.tobytes(), dtype)
        else:
            compiled.set_param("w", mine)
        mine[...] = 1  # the caller's array is its own again
        turned, same, twice = compiled.run()
        assert (turned == whole.T).all() and (same == whole).all() and (twice == np.concatenate([whole, whole])).all()
    with pytest.raises(InputShapeError):
        compiled.set_param_typed("w", values[0].tobytes()[:-1], dtype)
    assert (compiled.run()[1] == values[1]).all()


@pytest.mark.parametrize("batch", [1, 3])
def test_rows_are_appended_to_every_sequence_of_a_batch(session, batch):
    g = rlx.Graph("append")
    cache = g.handle(rlx.BufferHandle("keys", (batch, 4, 5), "f32"))
    after = rlx.update_rows(cache, g.input("new", (batch, 1, 5), "f32"), g.input("at", (), "i32"), axis=1)
    g.assign(cache, after, in_place=True)
    g.set_outputs([rlx.sum(after, axis=1)])
    compiled = session.compile(g)
    want = np.zeros((batch, 4, 5), F)
    for at, new in enumerate(np.random.default_rng(4).standard_normal((4, batch, 1, 5)).astype(F)):
        want[:, at] = new[:, 0]
        (total,) = compiled.run({"new": new, "at": np.int32(at)})
        assert (compiled.read_handle("keys") == want).all()
        np.testing.assert_allclose(total, want.sum(1, dtype=np.float64), atol=1e-6)
    for at in (-1, 4):
        with pytest.raises(IndexRangeError):
            compiled.run({"new": want[:, :1] + 1, "at": np.int32(at)})
    assert (compiled.read_handle("keys") == want).all()


# -- what does not fit is refused by an error of ours --------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda c, x: c.run({"x": [[1.0], [2.0, 3.0]]}), InputDTypeError),
        (lambda c, x: c.run({"x": None}), InputDTypeError),
        (lambda c, x: c.run({"x": x.astype(">f4")}), InputDTypeError),
        (lambda c, x: c.run([x]), BindingError),
        (lambda c, x: c.run_slots(None), BindingError),
        (lambda c, x: c.run_slots({"x": x}), BindingError),
        (lambda c, x: c.run_slots(a for a in [x]), BindingError),
        (lambda c, x: c.run_slots("x"), BindingError),
        (lambda c, x: c.run_slots([[1.0, 2.0]]), InputDTypeError),
        (lambda c, x: c.run_typed(None), BindingError),
        (lambda c, x: c.run_typed({"x": x}), BindingError),
        (lambda c, x: c.run_typed({"x": ("text", "f32")}), InputDTypeError),
        (lambda c, x: c.run_typed({"x": (16, "f32")}), InputDTypeError),
        (lambda c, x: c.read_output_row(0, 0.5, 2), InputShapeError),
        (lambda c, x: c.read_output_row(0, "0", 2), InputShapeError),
    ],
)
def test_calls_of_the_wrong_kind(session, call, error):
    compiled = session.compile(plus_one((4,)))
    x = np.arange(4, dtype=F)
    (before,) = compiled.run({"x": x})
    with pytest.raises(error):
        call(compiled, x)
    assert (compiled.read_output_row(0, 0, 4) == before).all() and compiled.outputs_view()[0].shape == (4,)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda g, x: g.set_outputs(x), GraphError),
        (lambda g, x: g.set_outputs(5), GraphError),
        (lambda g, x: g.assign(g.handle(rlx.BufferHandle("h", (4,), "f32")), 3), GraphError),
        (lambda g, x: g.constant([[1], [1, 2]]), DTypeError),
        (lambda g, x: x.astype("i32") + 2**40, DTypeError),
        (lambda g, x: rlx.CompileOptions(handles=_any(5)), OptionError),
        (lambda g, x: rlx.Session("ref").compile(plus_one((4,)), _any({"threads": 1})), OptionError),
        (lambda g, x: rlx.driver.Buffer.from_dlpack(5), TransferError),
    ],
)
def test_graphs_and_options_of_the_wrong_kind(call, error):
    g = rlx.Graph("wrong")
    with pytest.raises(error):
        call(g, g.input("x", (4,), "f32"))


def test_arrays_of_any_layout(session):
    compiled = session.compile(plus_one((4,)))
    x = np.arange(4, dtype=F)
    unaligned = np.zeros(17, np.uint8)[1:].view(F)
    unaligned[:] = x
    fixed = x.copy()
    fixed.flags.writeable = False
    for array in (unaligned, fixed, x[::-1][::-1], np.repeat(x, 3)[::3]):
        compiled.run_slots([array])
        assert (compiled.run({"x": array})[0] == x + 1).all() and (np.asarray(compiled.outputs_view()[0]) == x + 1).all()
    assert (compiled.run({"x": np.broadcast_to(F(2), (4,))})[0] == 3).all()


# -- absurd sizes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(2**62,), (2**31, 2**31), (2**64,), (10**30,), (2**62, 0), (0, 2**40, 2**40)], ids=str)
def test_sizes_past_any_memory_are_refused_at_compile(session, dims):
    with pytest.raises(CompileError, match="bytes, more than any memory"):
        session.compile(plus_one(dims))


def test_bound_dims_past_any_memory():
    with pytest.raises(CompileError, match=r"f32\[1099511627776,1099511627776\] spans 4835703278458516698824704 bytes"):
        rlx.Session("cpu").compile(plus_one(("n", "m")), rlx.CompileOptions(dims={"n": 2**40, "m": 2**40}))


@pytest.mark.parametrize("dims", [(2**44,), (2**57,)], ids=str)
def test_memory_that_is_not_there_is_refused_with_its_bytes(session, dims):
    with pytest.raises(OutOfMemoryError, match=rf"graph 'plus_one' \(bytes: arena {2 * 4 * dims[0]}"):
        session.compile(plus_one(dims))
    with pytest.raises(OutOfMemoryError, match=f"{2 * 4 * dims[0]} bytes"):  # some systems promise half of it
        rlx.driver.Buffer.empty((2, *dims), "f32")


def test_rank_has_a_limit(session):
    assert session.compile(plus_one((2,) + (1,) * 63)).run({"x": np.ones((2,) + (1,) * 63, F)})[0].sum() == 4
    with pytest.raises(ShapeError, match="at most 64 dims"):
        plus_one((1,) * 65)


def test_nothing_of_nothing(session):
    """Zero elements through every way in and out."""
    g = rlx.Graph("empty")
    x, w = g.input("x", (0, 4), "f32"), g.param("w", (4, 3), "f32")
    state = g.handle(rlx.BufferHandle("state", (0, 3), "f32"))
    g.assign(state, state + x @ w)
    g.set_outputs([x @ w, rlx.sum(x, axis=0), rlx.softmax(x), rlx.concat(x, x, axis=0), x.T])
    compiled = session.compile(g)
    compiled.set_param("w", np.ones((4, 3), F))
    x = np.zeros((0, 4), F)
    shapes = [(0, 3), (4,), (0, 4), (0, 4), (4, 0)]
    assert [a.shape for a in compiled.run({"x": x})] == shapes and not compiled.run({"x": x})[1].any()
    assert [n for _, n in compiled.run_slots([x])] == [0, 4, 0, 0, 0]
    assert [n for _, n in compiled.run_raw({"x": x})] == [0, 4, 0, 0, 0]
    assert [np.asarray(v).shape for v in compiled.outputs_view()] == shapes
    assert [[a.shape for a in run] for run in compiled.run_pipelined([{"x": x}] * 2)] == [shapes] * 2
    assert [len(data) for data, _ in compiled.run_typed({"x": (b"", "f32")})] == [0, 16, 0, 0, 0]
    compiled.restore_handles(compiled.snapshot_handles())
    assert compiled.clone().read_handle("state").shape == (0, 3)


# -- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../out", "/a/b", 'a "quoted"\nname', "n" * 400, "..", "é\x00"], ids=range(6))
def test_a_dump_stays_in_its_folder(tmp_path, name):
    rlx.Session("ref").compile(plus_one((4,), name), rlx.CompileOptions(dump=tmp_path / "in" / "here"))
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert files and {p.parent for p in files} == {tmp_path / "in" / "here"}


def test_a_dump_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="cannot write there"):
        rlx.Session("ref").compile(plus_one((4,)), rlx.CompileOptions(dump=tmp_path / "file"))
