"""A device whose memory the host does not see, and whose runs end later: it conforms, reads and copies no more than is asked for,
and reports an error where a result is first needed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import device_conformance as conformance
import late_device
import numpy as np
import pytest
import small_models

import rlx
from rlx.driver.queue import DEPTH
from rlx.driver.stream import Pending
from rlx.errors import IndexRangeError, NumericsError
from rlx.frontends import decoding
from rlx.frontends.generate import Generator, prepare
from rlx.frontends.language import LanguageModel

F = np.float32


@pytest.fixture(autouse=True, scope="module")
def device() -> Iterator[None]:
    with conformance.installed("late", "late_device:LateBackend"):
        yield


@pytest.mark.parametrize("name,check", [
    (name, check) for name, check in conformance.checks("late")
    if not name.startswith(("op ", "ranks")) or name in ("op layer_norm", "op matmul", "op sort", "op top_k")
], ids=lambda x: x if isinstance(x, str) else "")  # fmt: skip
def test_it_conforms(name: str, check) -> None:
    """But for ranks: its one queue would wait for itself if several threads used it."""
    check()


def two_outputs(dims: tuple[int, ...] = (3, 5)) -> rlx.CompiledGraph:
    """x + y and x * y; `done` counts runs."""
    g = rlx.Graph("two")
    x, y = g.input("x", dims, rlx.f32), g.input("y", dims, rlx.f32)
    done = g.handle(rlx.BufferHandle("done", (), rlx.i32))
    g.assign(done, done + 1)
    g.set_outputs([x + y, rlx.sum(x * y, axis=0)])
    return rlx.Session("late").compile(g)


def picker(store: rlx.runtime.HandleStore | None = None) -> rlx.CompiledGraph:
    """total += table[i]. Rows past 3 are an IndexRangeError."""
    g = rlx.Graph("picker")
    table, i = g.constant(np.arange(4, dtype=F) + 1), g.input("i", (), "i32")
    total = g.handle(rlx.BufferHandle("total", (), "f32"))
    row = rlx.gather(table, i)
    g.assign(total, total + row)
    g.set_outputs([total + row])
    return rlx.Session("late").compile(g, handles=store)


def at(i: int) -> np.ndarray:
    return np.array(i, np.int32)


def copied(act) -> tuple[int, int]:
    """Bytes copied to and from the device by `act`."""
    memory = late_device.MEMORY
    memory.settle()
    before = memory.copied_in, memory.copied_out
    act()
    memory.settle()
    return memory.copied_in - before[0], memory.copied_out - before[1]


X, Y = np.arange(15, dtype=F).reshape(3, 5), np.full((3, 5), 2, F)


def test_only_what_is_asked_for_is_read() -> None:
    compiled = two_outputs()
    inputs = {"x": X, "y": Y}
    assert copied(lambda: compiled.run(inputs)) == (120, 80)
    assert copied(lambda: compiled.run_read_outputs(inputs, [1])) == (120, 20)
    assert copied(lambda: compiled.run_read_outputs(inputs, [])) == (120, 0)
    assert copied(lambda: compiled.run_slots([X, Y])) == (120, 0)
    assert copied(lambda: compiled.run_raw(inputs)) == (120, 0)
    assert copied(lambda: compiled.commit_no_wait(inputs)) == (120, 0)
    assert copied(lambda: compiled.read_output_row(0, 1, 5)) == (0, 20)
    np.testing.assert_array_equal(compiled.read_output_row(0, 1, 5), X[1] + 2)
    views: list = []
    assert copied(lambda: views.extend(compiled.outputs_view())) == (0, 0)
    assert (views[0].shape, views[0].dtype) == ((3, 5), F)
    assert copied(lambda: views[1][0]) == (0, 20)
    assert copied(lambda: views[1].numpy()) == (0, 0)  # it has been read
    np.testing.assert_array_equal(views[0], X + Y)
    call = compiled.bound([X, Y])
    assert copied(call) == (120, 0)
    assert copied(lambda: compiled.read_handle("done")) == (0, 4) and compiled.read_handle("done") == 7


def test_inputs_are_written_once_from_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, seen = two_outputs(), []
    write = late_device.LateExecutable.write
    monkeypatch.setattr(late_device.LateExecutable, "write", lambda self, b, a: (seen.append(a), write(self, b, a)))
    compiled.run_slots([X, Y])
    assert [a is b for a, b in zip(seen, (X, Y), strict=True)] == [True, True]
    view = compiled.input_view("x")
    assert view is compiled.input_view("x") and not compiled._staging.keys() - {"x"}
    view[...] = 7
    compiled.run_slots([view, Y.T.copy().T])
    assert seen[2] is view and seen[3].flags.c_contiguous
    np.testing.assert_array_equal(compiled.outputs_view()[0], np.full((3, 5), 9, F))


def test_runs_are_only_waited_for_where_a_result_is_needed() -> None:
    compiled = two_outputs()
    compiled.handles.write("done", np.array(0, np.int32))
    done = compiled.handles.entries["done"].block.hidden.view(np.int32)
    call = compiled.bound([X, Y])
    for act in (lambda: compiled.run_slots([X, Y]), lambda: compiled.commit_no_wait({"x": X, "y": Y}), call):
        for _ in range(3):
            act()
    assert done[0] == 0
    assert call()[1].numpy().tolist() == (X * Y).sum(0).tolist() and done[0] == 10
    later = compiled._executable.run()
    assert isinstance(later, Pending) and not later.done() and done[0] == 10
    later.wait()
    assert later.done() and done[0] == 11


def test_at_most_so_many_runs_are_under_way() -> None:
    compiled = two_outputs()
    done = compiled.handles.entries["done"].block.hidden.view(np.int32)
    for _ in range(DEPTH):
        compiled.run_slots([X, Y])
    assert done[0] == 0
    compiled.run_slots([X, Y])
    assert done[0] >= 1


def test_every_run_of_a_pipeline_keeps_its_outputs() -> None:
    compiled = two_outputs()
    found = compiled.run_pipelined({"x": X + i, "y": Y} for i in range(5))
    for i, (total, product) in enumerate(found):
        np.testing.assert_array_equal(total, X + i + Y)
        np.testing.assert_array_equal(product, ((X + i) * Y).sum(0))


@pytest.mark.parametrize("begin", ["commit_no_wait", "run_slots"])
def test_an_error_is_raised_where_a_result_is_first_needed_and_cancels_later_runs(begin: str) -> None:
    compiled = picker()
    other = picker(compiled.handles)
    needs = {
        "sync_pending": compiled.sync_pending,
        "read_handle": lambda: compiled.read_handle("total"),
        "a row": lambda: compiled.read_output_row(0, 0, 1),
        "a view": lambda: np.asarray(compiled.outputs_view()[0]),
        "run": lambda: compiled.run({"i": at(0)}),
        "another executable": lambda: other.run({"i": at(0)}),
        "fork": lambda: compiled.fork_handles(1),
        "clone": compiled.clone,
    }
    for name, need in needs.items():
        compiled.bind_handle("total", np.zeros((), F))
        for graph, i in ((compiled, 0), (other, 1), (compiled, 9), (other, 2), (compiled, 9)):
            graph.commit_no_wait({"i": at(i)}) if begin == "commit_no_wait" else graph.run_slots([at(i)])
        with pytest.raises(IndexRangeError, match="queued run 2 of 5.*; the 2 behind it were not run"):
            need()
        assert compiled.read_handle("total") == 3, name  # as the last good run left it
        assert compiled.run({"i": at(3)})[0] == 7, name


def test_a_run_alone_raises_its_own_error_and_changes_nothing() -> None:
    compiled = picker()
    with pytest.raises(IndexRangeError, match="^(?!queued)"):
        compiled.run({"i": at(4)})
    assert compiled.read_handle("total") == 0
    with pytest.raises(IndexRangeError, match="queued run 1 of 3"):
        compiled.run_pipelined([{"i": at(i)} for i in (0, 9, 1)])
    assert compiled.read_handle("total") == 1


def test_a_feed_behind_a_failed_run_is_cancelled() -> None:
    g = rlx.Graph("fed")
    last, i = g.handle(rlx.BufferHandle("last", (), rlx.f32)), g.input("i", (), rlx.i32)
    g.set_outputs([rlx.gather(g.constant(np.arange(4, dtype=F) + 1), i) + last])
    compiled = rlx.Session("late").compile(g)
    compiled.set_gpu_handle_feed("last", 0)
    for i in (1, 5, 2):
        compiled.run_slots([at(i)])
    with pytest.raises(IndexRangeError, match="queued run 1 of 3"):
        compiled.sync_pending()
    assert compiled.read_handle("last") == 2


def decoders(folder: Path) -> tuple[LanguageModel, LanguageModel]:
    """A model on the reference device and on this one."""
    small_models.talker(folder)
    models = tuple(LanguageModel(folder, capacity=40, session=rlx.Session(name)) for name in ("ref", "late"))
    for model in models:
        prepare(Generator(model, [3, 4, 5], ends=()))
    return models  # type: ignore[return-value]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[LanguageModel, LanguageModel]:
    pytest.importorskip("transformers")
    return decoders(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("how", [{}, {"temperature": 2.0, "top_k": 50}, {"repetition_penalty": 1.3}], ids=str)
def test_a_token_is_queued_before_the_last_one_is_read(pair, how) -> None:
    """The tokens are those of a device that waits. A token that ends an answer early leaves nothing behind in the state."""
    found = []
    for model in pair:
        prepare(Generator(model, [3, 4, 5], ends=(), **how))
        answer = Generator(model, [3, 4, 5], ends=(), seed=5, max_new_tokens=12, **how)
        tokens = answer.run().tokens
        again = Generator(model, [3, 4, 5], ends=tokens[6:7], seed=5, max_new_tokens=12, **how).run()
        assert again.finish == "end" and model.position == 3 + len(again.tokens)
        found.append((tokens, again.tokens, model.handles.read("token").tolist(), model.step([7]).argmax()))
    assert found[0] == found[1] and len(set(found[0][0])) > 3


@pytest.mark.parametrize("how", [{}, {"temperature": 2.0}], ids=str)
def test_a_token_queued_ahead_is_taken_back_where_the_state_is_seen(pair, how) -> None:
    """Between the tokens of an answer the states are those of a device that waits, and the answer goes on."""
    seen = []
    for model in pair:
        answer, own = Generator(model, [3, 4, 5], ends=(), seed=5, max_new_tokens=9, **how), []
        while answer.step() is not None:
            if len(answer.tokens) % 3:
                names = ["token", *(["random.counter"] if how else [])]
                own.append((model.position, *(model.handles.read(name).tolist() for name in names)))
        seen.append((answer.tokens, own))
    assert seen[0] == seen[1] and seen[0][1][0][:1] == (3,)


@pytest.mark.parametrize("how", [{}, {"temperature": 2.0}, {"repetition_penalty": 1.3}], ids=str)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seen", [False, True])
def test_an_answer_goes_on_after_an_interrupt(pair, monkeypatch, how, late, seen) -> None:
    """Ctrl-C most often comes while the host waits for a token: none is lost, whether or not the state is looked at then."""
    model, own = pair[late], {"ends": (), "seed": 5, "max_new_tokens": 9, **how}
    want, checked = Generator(model, [3, 4, 5], **own).run().tokens, decoding.checked_tokens
    calls = iter(range(100))

    def interrupted(tokens: np.ndarray, vocab: int) -> np.ndarray:
        if next(calls) in (0, 3, 4, 9):
            raise KeyboardInterrupt
        return checked(tokens, vocab)

    monkeypatch.setattr(decoding, "checked_tokens", interrupted)
    answer, interrupts = Generator(model, [3, 4, 5], **own), 0
    while answer.finish is None:
        try:
            answer.step()
        except KeyboardInterrupt:
            interrupts += 1
            assert not seen or model.position in (3 + len(answer.tokens) - k for k in (0, 1))
    assert answer.tokens == want and interrupts == 4


def test_logits_of_nan_leave_no_error_behind(tmp_path) -> None:
    """The run that is queued behind them fails, too; only the first error is raised, and once."""
    pytest.importorskip("transformers")
    for model in decoders(tmp_path):
        answer = Generator(model, [3, 4, 5], ends=())
        answer.step()
        one = model.executable(1, ())
        norm = next(p for p in one.params if p.name == "norm.weight" or p.name.endswith(".norm.weight"))
        one.set_param(norm.name, np.full(norm.shape.static, np.nan, norm.dtype.numpy))
        for _ in range(3):
            with pytest.raises(NumericsError, match="hold NaN"):
                answer.run()
        one.set_param(norm.name, np.ones(norm.shape.static, norm.dtype.numpy))
        assert len(Generator(model, [3, 4, 5], ends=(), max_new_tokens=3).run().tokens) == 3


def test_a_token_ahead_stays_within_the_capacity(pair) -> None:
    found = [Generator(model, list(range(3, 30)), ends=()).run().tokens for model in pair]
    assert found[0] == found[1] and len(found[0]) == 14


def test_a_token_ahead_is_queued(pair, monkeypatch) -> None:
    """When a step returns, the run of the next token is under way; not behind the last."""
    model = pair[1]
    answer = Generator(model, [3, 4, 5], ends=(), max_new_tokens=3)
    ahead = []
    while answer.step() is not None:
        ahead.append(answer._decoding._ahead is not None)  # type: ignore[attr-defined]
    assert ahead == [True, True, False]


def test_memory_goes_back_with_the_executable() -> None:
    import gc

    gc.collect()
    live = len(late_device.MEMORY.live)
    compiled = two_outputs()
    compiled.run_slots([X, Y])
    assert len(late_device.MEMORY.live) > live
    compiled.sync_pending()
    del compiled
    gc.collect()
    assert len(late_device.MEMORY.live) == live
