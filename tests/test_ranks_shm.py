"""Ranks that are processes over shared memory: copies and barriers; and whatever goes wrong ends, on every rank, in an error that
names who is at fault, and leaves nothing behind.

pytest tests/test_ranks_shm.py --kills 200      a rank is killed 200 times, at random moments
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import sys
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import ranks
from ranks import Ended, all_ready_but

from rlx.driver import LocalTransport, Rank, ReduceKind, ShmTransport, SymmetricBuffer, all_reduce, connect
from rlx.driver.barrier import Call
from rlx.driver.collective import collectives_of
from rlx.driver.symmetric import SharedMemory, SymmetricTransport
from rlx.driver.transports import shm, shm_words
from rlx.errors import CallMismatchError, HeapBoundsError, OptionError, TransportError, UnknownRankError

LONG = 600.0  # seconds; a wait that lasts so long has not noticed what went wrong


def names() -> list[str]:
    """Files of this process's tests in /dev/shm."""
    return [name for name in os.listdir(shm.FOLDER) if f"-test-{os.getpid()}-" in name]


@pytest.fixture(autouse=True)
def nothing_stays():
    yield
    assert names() == []


# -- copies and barriers


def passed_on(t: ShmTransport, rounds: int) -> None:
    """In each round every rank writes to the next one's heap, and all look at all heaps."""
    me, n = t.this_rank.index, t.num_ranks
    for i in range(rounds):
        nbytes = [0, 1, 7, 64, 4097, t.heap_size - 3][i % 6]
        what = lambda rank: np.random.default_rng([rank, i]).integers(0, 256, nbytes, np.uint8)  # noqa: B023, E731
        t.put(SymmetricBuffer(Rank((me + 1) % n), 3, nbytes), what(me))
        t.barrier(Call(1, 3, nbytes, i))
        for rank in range(n):
            found = np.full(nbytes, 77, np.uint8)
            t.get(SymmetricBuffer(Rank(rank), 3, nbytes), found)
            np.testing.assert_array_equal(found, what((rank - 1) % n))
        t.barrier()


@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_ranks_write_to_each_other(n):
    ranks.run(n, passed_on, 12, heap_size=100_001)


def shared_views(t: ShmTransport) -> None:
    me, n = t.this_rank.index, t.num_ranks
    for dtype in (np.float64, ml_dtypes.bfloat16, np.int8, np.complex64):
        mine = t.heap.view(SymmetricBuffer(t.this_rank, 640, 6 * np.dtype(dtype).itemsize), dtype, (2, 3))
        assert not mine.flags.owndata and mine.ctypes.data % 64 == 0
        mine[...] = np.arange(6).reshape(2, 3) + 10 * me
        t.barrier()
        theirs = t.heap.view(SymmetricBuffer(Rank((me + 1) % n), 640, mine.nbytes), dtype)
        np.testing.assert_array_equal(theirs.astype(np.float64), np.arange(6) + 10 * ((me + 1) % n))
        t.barrier()
    with pytest.raises(CallMismatchError, match="no array of float64"):
        t.heap.view(SymmetricBuffer(t.this_rank, 0, 12), np.float64)
    kept = t.heap.bytes(SymmetricBuffer(t.this_rank, 0, 8))
    t.close()
    kept[...] = 1  # still there


def test_heaps_are_arrays_without_a_copy():
    ranks.run(2, shared_views, heap_size=1000)


def many_barriers(t: ShmTransport) -> tuple[int, int]:
    """Each rank counts in its heap; nobody is ever more than one barrier ahead."""
    counts = [t.heap.view(SymmetricBuffer(Rank(r), 0, 8), np.int64) for r in range(t.num_ranks)]
    low = high = 0
    for i in range(1500):
        counts[t.this_rank.index][0] = i
        t.barrier(Call(5, i))
        found = [int(c[0]) - i for c in counts]
        low, high = min(low, *found), max(high, *found)
    return low, high


@pytest.mark.parametrize("n", [2, 4])
def test_nobody_passes_a_barrier_that_another_has_not_come_to(n):
    assert all(low == 0 and high <= 1 for low, high in ranks.run(n, many_barriers, timeout=LONG))


def protocols(t: ShmTransport) -> tuple[bool, ...]:
    first = t.state.number
    return isinstance(t, SymmetricTransport), isinstance(t, SharedMemory), t.this_rank == Rank(0), t.num_ranks == 1, first == 1


def test_it_is_a_transport():
    assert ranks.run(1, protocols) == [(True,) * 5]


def refusals(t: ShmTransport) -> None:
    here = Rank(0)
    for buffer, size, error in [
        (SymmetricBuffer(here, 900, 101), 101, HeapBoundsError),
        (SymmetricBuffer(here, -1, 1), 1, HeapBoundsError),
        (SymmetricBuffer(here, 2**62, 2**62), 1, HeapBoundsError),
        (SymmetricBuffer(Rank(2), 0, 1), 1, UnknownRankError),
        (SymmetricBuffer(Rank(-1), 0, 1), 1, UnknownRankError),
        (SymmetricBuffer(here, 0, 4), 5, CallMismatchError),
    ]:
        for copy in (t.put, t.get):
            with pytest.raises(error):
                copy(buffer, np.zeros(size, np.uint8))
    with pytest.raises(CallMismatchError, match="contiguous"):
        t.put(SymmetricBuffer(here, 0, 4), np.zeros(8, np.uint8)[::2])
    t.barrier()
    wanted = "rank 0: Call(99, 1, 2, 0); rank 1: Call(99, 1, 2, 1)"
    with pytest.raises(CallMismatchError) as caught:
        t.barrier(Call(99, 1, 2, t.this_rank.index))
    assert wanted in str(caught.value)
    t.barrier()  # it goes on: all know of it


def test_what_is_refused_leaves_the_transport_as_it_was():
    ranks.run(2, refusals, heap_size=1000)


# -- ranks that fail


def fails(t: ShmTransport, who: int, how: str) -> list[str]:
    """The errors on this rank, again and again, after `who` has failed."""
    t.barrier()
    if t.this_rank.index == who:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        if how == "raise":
            raise ZeroDivisionError
        if how == "hang":
            while not all(line.fault for rank, line in enumerate(t._lines) if rank != who):  # else it completes their barrier
                time.sleep(0.001)
        if how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if how in ("hang", "stop"):
            t.barrier()  # all others had come to it
        if how == "close":
            t.close()
    elif how in ("hang", "stop"):
        while how == "stop" and shm.process(t._lines[who].pid)[0] != "T":
            time.sleep(0.001)
        all_ready_but(t, who)
        t.timeout = 1.0
    told = []
    assert not t.state.shut or how == "close"
    for call in (t.barrier, lambda: t.put(SymmetricBuffer(Rank(0), 0, 1), np.zeros(1, np.uint8)), t.barrier):
        with pytest.raises(TransportError) as caught:
            call()
        told.append(str(caught.value))
        assert t.state.shut  # compiled code begins nothing, either
    return told


@pytest.mark.parametrize("who", range(3))
@pytest.mark.parametrize("how,said", [
    ("kill", "died"), ("exit", "died"), ("raise", "left"), ("close", "left"), ("hang", "in time"), ("stop", "stopped"),
])  # fmt: skip
def test_every_other_rank_learns_who_failed(who, how, said):
    started = ranks.start(3, fails, who, how, timeout=LONG)
    if how == "stop":
        pid, *others = sorted(started.pids, key=lambda pid: pid != started.pids[who])
        while not all(shm.process(other)[0] in ("", "Z") for other in others):  # until they have been told
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
    found = started.outcomes()
    for rank, told in enumerate(found):
        if rank != who:
            assert isinstance(told, list), told
            assert all(text.startswith(f"rank {who} (process {started.pids[who]}") and said in text for text in told), told
            assert len(set(told)) == 1
    own = found[who]
    if how in ("kill", "exit"):
        assert own == Ended({"kill": -signal.SIGKILL, "exit": 3}[how])
    elif how == "raise":
        assert isinstance(own, ZeroDivisionError)
    elif how == "close":
        assert own == [f"rank {who} left"] * 3
    else:  # who comes too late learns it at the next barrier
        assert all(f"rank {who} (process" in text and "as rank" in text for text in own), own


def interrupted(t: ShmTransport) -> str:
    if t.this_rank.index == 0:
        with pytest.raises(KeyboardInterrupt):
            t.barrier()
        with pytest.raises(TransportError, match="interrupted"):
            t.barrier()
        time.sleep(0.2)
        return "interrupted"
    while not t._lines[0].epoch > t.state.number:  # it waits
        time.sleep(0.001)
    if t.this_rank.index == 1:
        os.kill(t._lines[0].pid, signal.SIGINT)
    while not t._lines[0].fault:
        time.sleep(0.001)
    if t.this_rank.index == 1:
        return "asked"
    with pytest.raises(TransportError) as caught:
        t.barrier()
    return str(caught.value)


def test_ctrl_c_ends_a_wait():
    first, _, third = ranks.run(3, interrupted, timeout=LONG)
    assert first == "interrupted" and "rank 0" in third


def interrupted_in_a_call(t: ShmTransport, count: int, known: bool) -> list[str]:
    """Rank 0 is interrupted while it waits, mostly in machine code, and goes on as if nothing had happened."""
    x, scratch = np.ones(count, np.float32), SymmetricBuffer(t.this_rank, 0, 4 * count)
    for _ in range(3 if known else 0):
        all_reduce(t, scratch, x)
    t.barrier()
    first = t.state.number
    if t.this_rank.index == 0:
        with pytest.raises(KeyboardInterrupt):
            all_reduce(t, scratch, x)
        assert t.state.shut and "rank 0" in t.broken and "interrupted" in t.broken
    else:
        while not t._lines[0].epoch > first:  # it waits
            time.sleep(0.0001)
        os.kill(t._lines[0].pid, signal.SIGINT)
        while not t._lines[0].fault:
            time.sleep(0.001)
    told = []
    for value in (2, 50, 50):
        x[:] = value + 100 * t.this_rank.index
        try:
            all_reduce(t, scratch, x)
            told.append(str(set(x.tolist())))
        except TransportError as e:
            told.append(str(e))
    return told


@pytest.mark.parametrize("count,known", [(4, True), (40_000, True), (4, False), (40_000, False)])
def test_a_call_that_is_interrupted_never_counts_as_done(count, known):
    for _ in range(2):
        first, second = ranks.run(2, interrupted_in_a_call, count, known, timeout=LONG)
        assert all("interrupted" in text for text in first), first
        assert all("interrupted" in text and "rank 0" in text for text in second[1:]), second
        assert count == 4 or "interrupted" in second[0]  # what is small was all there: rank 0's numbers of the first call


def left_between(t: ShmTransport) -> str:
    """Rank 0 is interrupted after machine code has returned that it waits, and before anything asks why."""
    x, scratch = np.ones(4, np.float32), SymmetricBuffer(t.this_rank, 0, 16)
    waits, told = (t.heap.bytes(SymmetricBuffer(Rank(0), 64 + i, 1)) for i in range(2))
    all_reduce(t, scratch, x)
    t.barrier()
    if t.this_rank.index == 1:
        while not waits[0]:
            time.sleep(0.001)
        with pytest.raises(TransportError, match="interrupted"):
            for _ in range(2):
                all_reduce(t, scratch, x)
        told[0] = 1
        return ""
    table: Any = next(iter(collectives_of(t).plans.values()))
    assert table._begin(table.address, x.ctypes.data, x.ctypes.data) >= shm.WAITING
    assert not t.broken and t.state.shut == shm.PENDING
    waits[0] = 1
    with pytest.raises(TransportError) as caught:
        all_reduce(t, scratch, x)
    while not told[0]:
        time.sleep(0.001)
    return str(caught.value)


def test_what_was_left_without_a_word_is_found_by_the_next_call():
    assert "rank 0" in ranks.run(2, left_between, timeout=LONG)[0]


def forks(t: ShmTransport) -> None:
    if t.this_rank.index == 0:
        if not (pid := os.fork()):
            t.close()
            os._exit(0)
        os.waitpid(pid, 0)
    t.barrier()


def test_a_forked_child_does_not_leave_for_its_parent():
    ranks.run(2, forks)


def forked_child_calls(t: ShmTransport) -> tuple[float, str]:
    x, scratch = np.full(64, t.this_rank.index + 1, np.float32), SymmetricBuffer(t.this_rank, 0, 256)
    for _ in range(3):
        all_reduce(t, scratch, x, ReduceKind.MAX)  # known to machine code
    told, (reading, writing) = [], os.pipe()
    if t.this_rank.index == 0 and not os.fork():
        try:
            for call in (lambda: all_reduce(t, scratch, x, ReduceKind.MAX), t.barrier, lambda: t.put(scratch, x)):
                with pytest.raises(TransportError, match="forked") as caught:
                    call()
                told.append(str(caught.value))
            t.close()
            os.write(writing, told[0].encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading) as f:
        child = f.read()
    x[:] = t.this_rank.index + 1
    all_reduce(t, scratch, x)
    return float(x[0]), child


def test_a_forked_child_has_no_part_in_what_its_parent_does():
    (first, child), (second, _) = ranks.run(2, forked_child_calls, timeout=LONG)
    assert first == second == 3 and "rank 0 is the parent" in child


# -- coming together


def joins(name: str, rank: int, n: int, sizes: list[tuple[int, int]], timeout: float) -> str:
    """The error of joining with sizes of one's own, by rank: number of ranks, heap."""
    try:
        ShmTransport(name, rank, *sizes[rank], timeout=timeout).close()
    except (CallMismatchError, TransportError, UnknownRankError) as e:
        return f"{type(e).__name__}: {e}"
    return "joined"


@pytest.mark.parametrize("sizes", [[(2, 100), (2, 200)], [(3, 100), (3, 100), (3, 96)], [(2, 100), (3, 100)]])
def test_ranks_that_disagree_on_sizes_all_learn_both(sizes):
    found = ranks.run(len(sizes), joins, sizes, LONG, connect=False)
    assert len(set(found)) == 1, found
    for num_ranks, heap in sizes:
        assert f"num_ranks {num_ranks} and heap_size {heap}" in found[0]
    assert found[0].startswith("CallMismatchError: rank")


def joins_late(name: str, rank: int, n: int, sizes: list[tuple[int, int]], timeout: float) -> str:
    if rank == 1:
        time.sleep(0.5)
    return joins(name, rank, n, sizes, timeout)


def joins_in_turn(name: str, rank: int, n: int, sizes: list[tuple[int, int]], timeout: float) -> str:
    time.sleep(0.5 * (n - 1 - rank))
    return joins(name, rank, n, sizes, timeout)


@pytest.mark.parametrize("sizes", [[(2, 100), (3, 100)], [(3, 100), (2, 100)], [(2, 100), (2, 200)]])
def test_ranks_learn_that_sizes_differ_whoever_comes_first(sizes):
    found = ranks.run(2, joins_in_turn, sizes, 60, connect=False)
    assert len(set(found)) == 1 and found[0].startswith("CallMismatchError: rank 0"), found


def test_a_rank_that_comes_after_others_have_disagreed_learns_it_too():
    found = ranks.run(3, joins_late, [(3, 100), (3, 100), (3, 96)], LONG, connect=False)
    assert len(set(found)) == 1 and found[0].startswith("CallMismatchError: rank"), found


def test_a_rank_that_never_comes_is_named():
    found = ranks.run(2, joins, [(4, 64)] * 2, 0.3, connect=False)
    assert all("rank 2 (which has not joined)" in text and "TransportError" in text for text in found), found
    assert any("nor did rank 3" in text for text in found)


def test_ranks_have_a_place_each(monkeypatch):
    name = ranks.fresh_name()
    with contextlib.closing(ShmTransport(name, 0, 1, 64)):
        pass
    with contextlib.closing(ShmTransport(name, 0, 1, 64)):  # the name is free again
        assert names() == []
    with pytest.raises(UnknownRankError, match="rank 2 of 2"):
        ShmTransport(name, 2, 2, 64)
    with pytest.raises(OptionError, match="timeout"):
        ShmTransport(name, 0, 2, 64, timeout=0)
    for bad in ("", "../x", "a/b", "x" * 101, "ä"):
        with pytest.raises(OptionError, match="name"):
            ShmTransport(bad, 0, 1, 64)
    for size in (1 << 46, 1 << 61, 1 << 63):
        with pytest.raises(TransportError, match=r"bytes free.*--shm-size"):
            ShmTransport(name, 0, 2, size)
    monkeypatch.setattr(shm, "FOLDER", "/dev/shm/no-such-folder")
    with pytest.raises(TransportError, match="there is no"):
        ShmTransport(name, 0, 1, 64)


def takes(name: str, rank: int, n: int) -> str:
    """Rank 1 comes as rank 0, too."""
    try:
        ShmTransport(name, 0, n, 64, timeout=1.0)
    except TransportError as e:
        return str(e)
    return ""


def test_a_place_is_taken_once():
    assert sorted("taken already" in text for text in ranks.run(2, takes, connect=False)) == [False, True]


def killed_while_others_come(name: str, rank: int, n: int) -> None:
    with contextlib.suppress(TransportError):
        ShmTransport(name, rank, n + 1, 4096, LONG)


@pytest.mark.parametrize("same_name", [True, False])
def test_what_killed_ranks_left_is_removed_by_the_next(same_name):
    started = ranks.start(2, killed_while_others_come, connect=False, name=(name := ranks.fresh_name()))
    path = shm.path_of(name)
    while not (os.path.exists(path) and os.path.getsize(path)):
        time.sleep(0.01)
    time.sleep(0.1)
    for pid in started.pids:
        os.kill(pid, signal.SIGKILL)
    assert started.outcomes() == [Ended(-9)] * 2 and len(names()) == 1
    ranks.run(3, passed_on, 6, name=name if same_name else "")
    assert names() == []


def leave_behind(name: str, content: bytes) -> str:
    with open(path := shm.path_of(name), "wb") as f:
        os.fchmod(f.fileno(), 0o600)
        f.write(content)
    return path


@pytest.mark.parametrize("size", [0, 1, 8, 40, 48, 4096, 5000, 100_000])
def test_a_file_of_nonsense_is_made_anew(size):
    for fill in (b"\0", b"\xff", b"\x7f", b"\x01"):
        name = ranks.fresh_name()
        leave_behind(name, fill * size)
        ShmTransport(name, 0, 1, 64).close()
        assert names() == []


def live_header(**fields: int) -> bytes:
    """A file's header and the line of this process."""
    header = shm.Header(**{"magic": shm.MAGIC, "num_ranks": 2, "heap_size": 64, **fields})
    line = shm.Line(pid=os.getpid(), started=shm.process(os.getpid())[1])
    return bytes(header).ljust(shm.HEADER_BYTES, b"\0") + bytes(line)


@pytest.mark.parametrize("content,said", [
    (live_header(magic=5), "another version"), (live_header(), "damaged"), (live_header(num_ranks=1 << 62), "passed num_ranks 2"),
])  # fmt: skip
def test_a_file_in_use_is_not_touched(content, said):
    path = leave_behind(name := ranks.fresh_name(), content)
    with pytest.raises((TransportError, CallMismatchError), match=said):
        ShmTransport(name, 1, 2, 64)
    assert os.path.getsize(path) == len(content)
    os.unlink(path)


def test_a_file_of_others_is_refused(tmp_path):
    path = leave_behind(name := ranks.fresh_name(), b"")
    os.chmod(path, 0o666)
    with pytest.raises(TransportError, match="not of this user alone"):
        ShmTransport(name, 0, 1, 64)
    os.unlink(path)
    os.symlink(tmp_path / "elsewhere", path)
    with pytest.raises(TransportError, match="cannot be opened"):
        ShmTransport(name, 0, 1, 64)
    os.unlink(path)
    assert not (tmp_path / "elsewhere").exists()


def test_native_words_are_where_others_expect_them():
    assert ctypes.sizeof(shm.Line) == shm.LINE_BYTES and shm.Line.pid.offset == 128 and shm.Line.calls.offset % 8 == 0
    assert shm.Line.gap2.offset - shm.Line.calls.offset == 2 * shm_words.CALL_BYTES
    assert ctypes.sizeof(shm.Header) <= shm.HEADER_BYTES


# -- killed at random moments


def until_an_error(name: str, rank: int, n: int, collectives: bool) -> str:
    try:
        t = ShmTransport(name, rank, n, 1 << 16, timeout=6.0)  # which passes if a rank was killed before it joined
        small, large = np.ones(16, np.float32), np.ones(1 << 14, np.float32)
        for i in range(1 << 30):
            for x in (small, large) if collectives else ():
                all_reduce(t, SymmetricBuffer(t.this_rank, 0, x.nbytes), x, ReduceKind.MAX)
            t.put(SymmetricBuffer(Rank((rank + 1) % n), i % 4096, 4096), np.full(4096, i % 256, np.uint8))
            t.barrier(Call(1, i))
    except TransportError as e:
        return str(e)
    return ""


def test_killed_at_random_moments(pytestconfig):
    """The survivors name who was killed, nothing stays, the next run works."""
    chance = random.Random(5)
    for i in range(pytestconfig.getoption("--kills")):
        n = chance.choice((2, 3, 4))
        name, who = ranks.fresh_name(), i % n
        started = ranks.start(n, until_an_error, bool(i % 2), connect=False, name=name)
        time.sleep(chance.choice((0.0, 0.005, 0.02, 0.05)) * chance.random())
        os.kill(started.pids[who], signal.SIGKILL)
        found = started.outcomes()
        assert found.pop(who) == Ended(-signal.SIGKILL)
        assert all(isinstance(text, str) and text.startswith(f"rank {who} (") for text in found), (i, who, found)
        assert not any(os.path.exists(f"/proc/{pid}") for pid in started.pids)
        assert names() == []
        ranks.run(n, passed_on, 2, name=name)


# -- who started this process


def test_alone_there_is_one_rank(monkeypatch):
    for variable in list(os.environ):
        if variable.startswith(("OMPI_", "PMI", "SLURM_", "RLX_RANK", "RLX_JOB")):
            monkeypatch.delenv(variable)
    t = connect(1000)
    assert isinstance(t, LocalTransport) and (t.num_ranks, t.this_rank, t.heap_size) == (1, Rank(0), 1000)
    monkeypatch.setenv("SLURM_NTASKS", "4")  # of a batch script, which is one process
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert connect(1000).num_ranks == 1
    monkeypatch.setenv("RLX_RANKS", "2")
    with pytest.raises(OptionError, match="RLX_JOB is not set"):
        connect(1000)


def test_rlx_launch_means_shared_memory(monkeypatch):
    for variable, value in {"RLX_JOB": ranks.fresh_name(), "RLX_RANK": "0", "RLX_RANKS": "1", "PMI_SIZE": "7"}.items():
        monkeypatch.setenv(variable, value)
    with contextlib.closing(connect(1000, timeout=5.0)) as t:
        assert isinstance(t, ShmTransport) and (t.num_ranks, t.timeout) == (1, 5.0)


@pytest.mark.parametrize("variable", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_RANK"])
def test_an_mpi_launcher_means_mpi(monkeypatch, variable):
    from types import SimpleNamespace

    made = []

    def transport(heap_size: int, timeout: float) -> SimpleNamespace:
        made.append(SimpleNamespace(num_ranks=4, size=(heap_size, timeout), close=lambda: made.append("closed")))
        return made[-1]

    monkeypatch.setitem(sys.modules, "rlx.driver.transports.mpi", SimpleNamespace(MpiTransport=transport))
    monkeypatch.setenv(variable, "4")
    assert connect(1000, 2.0) is made[0] and made[0].size == (1000, 2.0)
    if variable != "PMIX_RANK":
        monkeypatch.setenv(variable, "3")
        with pytest.raises(TransportError, match="there are 3 ranks, MPI knows of 4"):
            connect(1000)
        assert made[2] == "closed"
