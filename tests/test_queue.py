"""Queued runs: the caller goes on, order holds, errors name their run, memory is bounded, threads end, forks and exits work."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import numpy as np
import pytest
from counting import check_allocates_nothing
from devices import TWO

import rlx
from rlx.driver.queue import DEPTH, RunQueue
from rlx.errors import DuplicateNameError, IndexRangeError, MissingInputError, MissingParamError, NumericsError

F = np.float32


def picker(handles: rlx.runtime.HandleStore | None = None, **options) -> rlx.CompiledGraph:
    """picks += 1 and total += table[i]; the row i is the output. Rows past 3 are an IndexRangeError."""
    g = rlx.Graph("picker")
    table, i = g.constant(np.arange(4, dtype=F) + 1), g.input("i", (), "i32")
    total, picks = g.handle(rlx.BufferHandle("total", (), "f32")), g.handle(rlx.BufferHandle("picks", (), "i32"))
    row = rlx.gather(table, i)
    g.assign(total, total + row)
    g.assign(picks, picks + 1)
    g.set_outputs([row, total + row])
    return rlx.Session("cpu").compile(g, rlx.CompileOptions(threads=1, **options), handles=handles)


def at(i: int) -> dict[str, np.ndarray]:
    return {"i": np.array(i, np.int32)}


def states(compiled: rlx.CompiledGraph) -> tuple[float, int]:
    return float(compiled.handles.entries["total"].array), int(compiled.handles.entries["picks"].array)


# -- the caller goes on --------------------------------------------------------------------------------------------


def test_the_callers_python_goes_on_while_a_run_is_under_way():
    """Seen from the caller: the first output of a run is there, its last one is not. A run that held the interpreter's lock,
    or that `commit_no_wait` waited for, would show both at once."""
    g = rlx.Graph("long")
    x = g.input("x", (512, 512), "f32")
    y = x
    for _ in range(48):  # long enough for a caller that gets a core only now and then
        y = y @ x
    g.set_outputs([x[0] + 1.0, y])
    compiled = rlx.Session("cpu").compile(g, rlx.CompileOptions(threads=1))
    early, late = compiled._output_views
    compiled.run({"x": np.zeros((512, 512), F)})
    between = 0
    for value in range(1, 201):  # on a busy machine the caller may come late to most runs
        last, level = np.array(late[-1, -1]), F((1 + value / 1000) / 512)
        compiled.commit_no_wait({"x": np.full((512, 512), level, F)})
        while early[0] != level + F(1):
            pass
        between += late[-1, -1] == last and not compiled.handles.queue.last.done()
        compiled.sync_pending()
        assert late[-1, -1] != last
        if between:
            break
    assert between


def test_every_sets_outputs_are_kept_in_order():
    compiled, rng = picker(), np.random.default_rng(0)
    picks = rng.integers(0, 4, 3 * DEPTH)
    found = compiled.run_pipelined(at(i) for i in picks)
    assert [float(run[0]) for run in found] == (picks + 1).tolist()
    assert [float(run[1]) for run in found] == np.cumsum(picks + 1).tolist() and states(compiled) == (sum(picks + 1), len(picks))
    assert len({id(a) for run in found for a in run}) == 2 * len(picks)
    assert compiled.run_pipelined([]) == []


def test_what_reads_waits_for_what_is_queued():
    compiled = picker()
    reads = {
        "read_handle": lambda: int(compiled.read_handle("picks")),
        "outputs_view": lambda: int(compiled.outputs_view()[1].numpy()) // 2,
        "read_output_row": lambda: int(compiled.read_output_row(1, 0, 1)[0]) // 2,
        "snapshot": lambda: int(compiled.snapshot_handles().states["picks"]), "clone": lambda: states(compiled.clone())[1],
        "fork": lambda: int(compiled.fork_handles(1)[0].entries["picks"].array),
        "run": lambda: int(compiled.run(at(1))[1]) // 2 - 1,
    }  # fmt: skip
    for name, read in reads.items():
        compiled.bind_handle("total", np.zeros((), F))
        compiled.bind_handle("picks", np.zeros((), np.int32))
        for _ in range(20):
            compiled.commit_no_wait(at(1))
        assert read() == 20, name


def on(handles: rlx.runtime.HandleStore | None = None) -> rlx.CompiledGraph:
    """total = 2 * total + x, a run that takes its time; the sum as it was is the output."""
    g = rlx.Graph("doubler")
    x, slow = g.input("x", (), "f32"), g.input("slow", (128, 128), "f32")
    total = g.handle(rlx.BufferHandle("total", (), "f32"))
    zero = (slow @ slow @ slow)[0, 0]
    g.assign(total, total * 2.0 + x + zero)
    g.set_outputs([total + zero])
    return rlx.Session("cpu").compile(g, rlx.CompileOptions(threads=1), handles=handles)


@pytest.mark.parametrize("mode", ["native", "python"])
def test_runs_of_two_executables_on_one_store_keep_their_order(mode: str) -> None:
    slow = np.zeros((128, 128), F)
    with rlx.knobs.override(RLX_CALLS=mode):
        a = on()
        b, c = on(a.handles), on()
        c.use_handles(a.handles)
        _ = a.run, b.run, c.run_slots
    own, expected = c.bound({"x": np.full((), 4, F), "slow": slow}), 0.0
    for turn in range(60):
        a.commit_no_wait({"x": np.full((), 1, F), "slow": slow})
        b.commit_no_wait({"x": np.full((), 2, F), "slow": slow})
        a.commit_no_wait({"x": np.full((), 3, F), "slow": slow})
        expected = ((expected * 2 + 1) * 2 + 2) * 2 + 3
        assert float(b.run({"x": np.full((), 4, F), "slow": slow})[0] if turn % 2 else own()[0]) == expected
        expected = expected * 2 + 4
        a.commit_no_wait({"x": np.full((), -expected * 2, F), "slow": slow})
        assert float(c.read_handle("total")) == 0
        expected = 0.0


def test_an_executable_that_goes_to_another_store_leaves_the_order_of_the_first() -> None:
    a = picker()
    b, other = picker(handles=a.handles), rlx.runtime.HandleStore()
    for i in (0, 9):
        a.commit_no_wait(at(i))
    with pytest.raises(IndexRangeError, match="queued run 1 of 2"):
        b.use_handles(other)
    b.use_handles(other)
    a.commit_no_wait(at(9))
    b.run(at(0))  # on states of its own, so nothing to wait for
    with pytest.raises(IndexRangeError, match="queued run 0 of 1"):
        a.sync_pending()


# -- errors --------------------------------------------------------------------------------------------------------


def test_a_run_that_fails_ends_the_queue():
    compiled = picker()
    for i in (0, 1, 9, 2, 9, 3):
        compiled.commit_no_wait(at(i))
    with pytest.raises(IndexRangeError, match=r"queued run 2 of 6: .*index out of range.*; the 3 behind it were not run"):
        compiled.sync_pending()
    assert states(compiled) == (3, 2)  # of the two before it
    compiled.sync_pending()  # once told, it is over
    assert [float(run[1]) for run in compiled.run_pipelined([at(0), at(3)])] == [4, 8]


def test_a_set_that_fails_is_named_by_its_place_among_the_sets():
    compiled = picker()
    compiled.commit_no_wait(at(0))
    with pytest.raises(IndexRangeError, match="queued run 1 of 3: .*the 1 behind it were not run"):
        compiled.run_pipelined([at(1), at(-1), at(2)])
    assert states(compiled) == (3, 2)
    with pytest.raises(MissingInputError):  # known before the first run
        compiled.run_pipelined([at(1), {}])
    assert states(compiled) == (3, 2)


def test_an_error_comes_from_the_next_call_that_waits():
    compiled = picker()
    for call in (
        lambda: compiled.run(at(0)), lambda: compiled.run_slots([np.array(0, np.int32)]), lambda: compiled.read_handle("total"),
        lambda: compiled.bind_handle("total", np.ones((), F)), lambda: compiled.run_pipelined([at(0)]),
    ):  # fmt: skip
        compiled.commit_no_wait(at(7))
        with pytest.raises(IndexRangeError, match="queued run 0 of 1"):
            call()
        assert states(compiled) == (0, 0)


def test_errors_of_other_kinds(monkeypatch):
    compiled = picker(checked=True)
    compiled.bind_handle("total", np.array(np.nan, F))
    with pytest.raises(NumericsError, match="queued run 0 of 2"):
        compiled.run_pipelined([at(0), at(1)])
    g = rlx.Graph("weights")
    g.set_outputs([g.input("x", (2,), "f32") + g.param("w", (2,), "f32")])
    lacking = rlx.Session("cpu").compile(g)
    lacking.commit_no_wait({"x": np.zeros(2, F)})
    with pytest.raises(MissingParamError, match="queued run 0 of 1: .*'w' not set"):
        lacking.sync_pending()

    def run() -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(lacking._executable, "run", run)
    lacking.set_param("w", np.zeros(2, F))
    lacking.commit_no_wait({"x": np.zeros(2, F)})
    with pytest.raises(MemoryError, match="no room") as caught:
        lacking.sync_pending()
    assert caught.value.__notes__ == ["queued run 0 of 1: no room"]


# -- bounds --------------------------------------------------------------------------------------------------------


def test_a_full_queue_makes_the_caller_wait():
    queue, go, done = RunQueue(), threading.Event(), []
    for i in range(DEPTH):  # the first one is under way, or will be
        queue.record("run", lambda i=i: (go.wait(), done.append(i)))
        queue.submit()
    one_more = threading.Thread(target=lambda: (queue.record("run", lambda: done.append(DEPTH)), queue.submit()))
    one_more.start()
    assert not queue._room.acquire(blocking=False) and one_more.is_alive() and not done
    go.set()
    one_more.join()
    queue.wait()
    assert done == list(range(DEPTH + 1)) and queue.last is None


def test_threads_end_with_their_graphs():
    compiled = picker()
    before = set(threading.enumerate())
    for _ in range(20):
        twin = compiled.clone()
        twin.commit_no_wait(at(1))
        twin.sync_pending()
    own = set(threading.enumerate()) - before
    assert own and all(t.name.startswith("rlx-queue") for t in own)
    del twin
    gc.collect()
    for thread in own:
        thread.join(timeout=60)
    assert not any(t.is_alive() for t in own)


SETUP = "import sys; sys.path[:0] = {path!r}\nimport os, numpy as np\nfrom test_queue import at, picker, states\n"
FORK = """
import warnings
warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # since Python 3.12
compiled = picker()
for _ in range(40): compiled.commit_no_wait(at(1))
if (child := os.fork()) == 0:
    assert states(compiled) == (80, 40)  # what was queued is done, and nothing is queued
    compiled.commit_no_wait(at(0))
    compiled.run_pipelined([at(0)] * 100)
    os._exit(0 if states(compiled) == (181, 141) else 1)
for _ in range(40): compiled.commit_no_wait(at(1))
compiled.sync_pending()
print(states(compiled), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
EXIT = """
compiled = picker()
for _ in range(60): compiled.commit_no_wait(at(1))
print("left")
"""


@pytest.mark.skipif(not hasattr(sys, "getswitchinterval") or sys.platform == "win32", reason="needs fork")
@pytest.mark.parametrize("code, said", [(FORK, "(160.0, 80) 0"), (EXIT, "left")], ids=["fork", "exit"])
def test_forks_and_exits_with_runs_in_the_queue(code, said):
    done = subprocess.run([sys.executable, "-c", SETUP.format(path=sys.path) + code], capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, said, "")


# -- feeds ---------------------------------------------------------------------------------------------------------


def fed(device: str = "cpu", **options) -> rlx.CompiledGraph:
    """h is fed with 2 h + x, or with x."""
    g = rlx.Graph("fed")
    h, x = g.handle(rlx.BufferHandle("h", (3, 700), "f32")), g.input("x", (3, 700), "f32")
    g.set_outputs([h * 2.0 + x, x])
    return rlx.Session(device).compile(g, rlx.CompileOptions(threads=1, **options))


def test_a_feed_allocates_nothing():
    compiled, x = fed(), [np.ones((3, 700), F)]
    compiled.set_gpu_handle_feed("h", 1)
    compiled.run_slots(x)
    compiled.run_slots(x)
    check_allocates_nothing(compiled, lambda: compiled.run_slots(x), 1000)
    assert (compiled.read_handle("h") == 1).all()


def test_a_feed_stays_on_the_device():
    """Nothing is read back or written again: on a device that records what it is asked for, one copy per run."""
    compiled = fed("null")
    executable = compiled._executable
    compiled.set_gpu_handle_feed("h", 0)
    compiled.run_slots([np.ones((3, 700), F)])
    assert executable.uploads == [("x", 8400)]
    assert [(n.phase, n.kernel) for n in executable.launches if n.phase == "feed"] == [("feed", "h")]


@pytest.mark.parametrize("device", TWO)
def test_feeds_of_queued_and_failing_runs(device):
    compiled, one = fed(device, checked=True), {"x": np.ones((3, 700), F)}
    compiled.set_gpu_handle_feed("h", 0)
    compiled.run_pipelined([one] * 4)
    assert (compiled.read_handle("h") == 15).all()
    compiled.commit_no_wait(one)
    compiled.set_gpu_handle_feed("h", None)  # what is queued still feeds
    compiled.run(one)
    assert (compiled.read_handle("h") == 31).all()
    assert (compiled.run_feed_gpu_handle(one, "h", 1) == 1).all() and (compiled.read_handle("h") == 1).all()
    compiled.set_gpu_handle_feed("h", 0)
    with pytest.raises(NumericsError):
        compiled.run({"x": np.full((3, 700), np.nan, F)})
    twin = compiled.clone()
    twin.run(one)
    assert (compiled.read_handle("h") == 1).all() and (twin.read_handle("h") == 3).all()


def test_a_state_written_in_place_takes_no_feed():
    g = rlx.Graph("rows")
    h, row = g.handle(rlx.BufferHandle("h", (4, 2), "f32")), g.input("row", (1, 2), "f32")
    g.assign(h, rlx.ir.ops.update_rows(h, row, g.constant(1, "i32"), axis=0), in_place=True)
    g.set_outputs([g.input("x", (4, 2), "f32") + 1.0])
    with pytest.raises(DuplicateNameError, match="assigned in the graph"):
        rlx.Session("cpu").compile(g).set_gpu_handle_feed("h", 0)
