"""The worker pool: every task once, steps in order, whatever the threads do; fork, exit, sleep, two callers at once."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from rlx.backends.cpu import pool as pools
from rlx.backends.cpu.abi import GENERATION, KEPT, LINE, Control
from rlx.backends.cpu.executor import LINES_BESIDE, RENEWED, module_text
from rlx.backends.cpu.table import AHEAD_BYTES, Stream, readings
from rlx.backends.cpu.target import host_target, target_for
from rlx.errors import OptionError
from rlx.host.jit import Library, compile_object

ROOT = Path(__file__).resolve().parents[1]

# Kernels of the pool's ABI, void (args, task, scratch, status).
#   count(mine, before, n): mine[task] += 1; status 7 unless before[0..n) all equal the new value: the step before is done
#   fail(x): status 5.   hold(flags): flags[1] = 1, then waits for flags[0]
#   meet(x): x[1 + task] = address of its scratch; x[0] += 1 and waits until that is 2: two threads are in at once
#   crowd(x): x[0] threads are in now, x[1] the most that were at once
#   last(x, n): x[0] += 1 and x[1 + that] = task; task 0 waits until x[0] is n
#   again(x): x[task] = address of its scratch, which is even, + 1 if the number has KEPT added
#   relay(flags): task 0 waits for flags[1], which task 1 sets before it waits for flags[0]
KERNELS = """
define void @count(ptr %args, i64 %task, ptr %scratch, ptr %status) {
entry:
  %mine = load ptr, ptr %args
  %before.p = getelementptr ptr, ptr %args, i64 1
  %before = load ptr, ptr %before.p
  %n.p = getelementptr i64, ptr %args, i64 2
  %n = load i64, ptr %n.p
  %p = getelementptr i64, ptr %mine, i64 %task
  %old = load i64, ptr %p
  %new = add i64 %old, 1
  store i64 %new, ptr %p
  br label %look
look:
  %i = phi i64 [0, %entry], [%i.next, %next]
  %more = icmp slt i64 %i, %n
  br i1 %more, label %next, label %out
next:
  %b.p = getelementptr i64, ptr %before, i64 %i
  %b = load i64, ptr %b.p
  %i.next = add i64 %i, 1
  %good = icmp eq i64 %b, %new
  br i1 %good, label %look, label %bad
bad:
  store i32 7, ptr %status
  ret void
out:
  ret void
}
define void @fail(ptr %args, i64 %task, ptr %scratch, ptr %status) {
  store i32 5, ptr %status
  ret void
}
define void @meet(ptr %args, i64 %task, ptr %scratch, ptr %status) {
entry:
  %p = load ptr, ptr %args
  %own = add i64 %task, 1
  %own.p = getelementptr ptr, ptr %p, i64 %own
  store ptr %scratch, ptr %own.p
  %x = atomicrmw add ptr %p, i64 1 seq_cst
  br label %wait
wait:
  %i = phi i64 [0, %entry], [%i.next, %again]
  %v = load atomic i64, ptr %p seq_cst, align 8
  %both = icmp sge i64 %v, 2
  br i1 %both, label %out, label %again
again:
  %i.next = add i64 %i, 1
  %more = icmp slt i64 %i.next, 10000000000
  br i1 %more, label %wait, label %alone
alone:
  store i32 9, ptr %status
  br label %out
out:
  ret void
}
define void @hold(ptr %args, i64 %task, ptr %scratch, ptr %status) {
entry:
  %p = load ptr, ptr %args
  %q = getelementptr i64, ptr %p, i64 1
  store atomic i64 1, ptr %q seq_cst, align 8
  br label %wait
wait:
  %v = load atomic i64, ptr %p seq_cst, align 8
  %free = icmp ne i64 %v, 0
  br i1 %free, label %out, label %wait
out:
  ret void
}
define void @crowd(ptr %args, i64 %task, ptr %scratch, ptr %status) {
entry:
  %p = load ptr, ptr %args
  %most = getelementptr i64, ptr %p, i64 1
  %old = atomicrmw add ptr %p, i64 1 seq_cst
  %now = add i64 %old, 1
  %x = atomicrmw max ptr %most, i64 %now seq_cst
  br label %stay
stay:
  %i = phi i64 [0, %entry], [%i.next, %stay]
  %i.next = add i64 %i, 1
  %v = load atomic i64, ptr %p seq_cst, align 8
  %more = icmp slt i64 %i.next, 3000
  br i1 %more, label %stay, label %out
out:
  %y = atomicrmw sub ptr %p, i64 1 seq_cst
  ret void
}
define void @last(ptr %args, i64 %task, ptr %scratch, ptr %status) {
entry:
  %p = load ptr, ptr %args
  %n.p = getelementptr i64, ptr %args, i64 1
  %n = load i64, ptr %n.p
  %old = atomicrmw add ptr %p, i64 1 seq_cst
  %place = add i64 %old, 1
  %q = getelementptr i64, ptr %p, i64 %place
  store i64 %task, ptr %q
  %waits = icmp eq i64 %task, 0
  br i1 %waits, label %wait, label %out
wait:
  %v = load atomic i64, ptr %p seq_cst, align 8
  %more = icmp slt i64 %v, %n
  br i1 %more, label %wait, label %out
out:
  ret void
}
define void @again(ptr %args, i64 %task, ptr %scratch, ptr %status) {
  %p = load ptr, ptr %args
  %kept = lshr i64 %task, 40
  %number = and i64 %task, 1099511627775
  %q = getelementptr i64, ptr %p, i64 %number
  %own = ptrtoint ptr %scratch to i64
  %both = add i64 %own, %kept
  store i64 %both, ptr %q
  ret void
}
define void @relay(ptr %args, i64 %task, ptr %scratch, ptr %status) {
entry:
  %p = load ptr, ptr %args
  %q = getelementptr i64, ptr %p, i64 1
  %first = icmp eq i64 %task, 0
  br i1 %first, label %wait, label %second
second:
  store atomic i64 1, ptr %q seq_cst, align 8
  br label %wait
wait:
  %flag = select i1 %first, ptr %q, ptr %p
  %v = load atomic i64, ptr %flag seq_cst, align 8
  %free = icmp ne i64 %v, 0
  br i1 %free, label %out, label %wait
out:
  ret void
}
"""


@cache
def library() -> Library:
    names = "again", "count", "crowd", "fail", "meet", "hold", "last", "relay"
    return Library([compile_object(KERNELS, host_target(1))], names)


class Table:
    """Steps (kernel name, tasks, arguments) as the pool walks them; arguments are arrays or ints. `after`, `ahead`, `again`,
    `quiet`: of each, see Step."""

    def __init__(self, steps, threads: int, after=(), ahead=(), again=(), quiet=()) -> None:
        self.pool = pools.pool(threads) if threads > 1 else None
        self.keep = [np.array([a.ctypes.data if isinstance(a, np.ndarray) else a for a in args], np.int64) for *_, args in steps]
        self.arrays = [a for *_, args in steps for a in args]
        more = zip(self.keep, *(given or [0] * len(steps) for given in (after, ahead, again, quiet)))
        rows = [pools.Step(library().address(n), a.ctypes.data, t, *rest) for (n, t, _), (a, *rest) in zip(steps, more)]
        self.steps = (pools.Step * len(rows))(*rows)
        base = ctypes.addressof(self.steps)
        self.scratch = np.zeros(64 * threads, np.uint8)
        control = self.pool.address if self.pool else None
        self.state = pools.Run(base, base + ctypes.sizeof(self.steps), self.scratch.ctypes.data, 64, control, None, 0)
        self.call = pools.callable_of(self.state)

    def run(self) -> int:
        status = self.call()
        if status == pools.ATTEND:
            assert self.pool
            self.pool.attend()
            return 0
        return status

    @property
    def failed(self) -> int:
        return (self.state.failed - ctypes.addressof(self.steps)) // ctypes.sizeof(pools.Step)


def chain(widths, threads: int) -> tuple[Table, list[np.ndarray]]:
    """Counting steps, each of which checks that all of the one before is done."""
    counts = [np.zeros(max(w, 1), np.int64) for w in widths]
    steps, before, n = [], counts[0], 0
    for width, mine in zip(widths, counts):
        steps.append(("count", width, (mine, before, n)))
        if width:
            before, n = mine, width
    return Table(steps, threads), counts


@pytest.mark.parametrize(("threads", "runs"), [(1, 20_000), (2, 50_000), (3, 10_000), (4, 20_000), (9, 2_000)])
def test_every_task_runs_once_and_steps_are_in_order(threads, runs):
    rng = np.random.default_rng(threads)
    for _ in range(10):
        widths = rng.choice([0, 1, 1, 2, 3, 4, 7, 16], size=rng.integers(1, 9)).tolist()
        table, counts = chain(widths, threads)
        for _ in range(runs // 10):
            assert table.run() == 0
        for width, count in zip(widths, counts):
            assert (count[:width] == runs // 10).all() and not count[width:].any()


def grouped(groups, threads: int) -> tuple[Table, list[np.ndarray]]:
    """Groups of counting steps (their tasks), each of which checks that all of the group before is done."""
    counts = [np.zeros(max(sum(widths), 1), np.int64) for widths in groups]
    steps, after, before, n = [], [], counts[0], 0
    for widths, mine in zip(groups, counts):
        for i, width in enumerate(widths):
            steps.append(("count", width, (mine[sum(widths[:i]) :], before, n)))
            after.append(sum(widths[i + 1 :]))
        if sum(widths):
            before, n = mine, sum(widths)
    return Table(steps, threads, after), counts


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_groups_do_every_task_once_and_are_in_order(threads):
    rng = np.random.default_rng(threads)
    for _ in range(20):
        groups = [rng.choice([0, 1, 1, 2, 5], size=rng.integers(1, 5)).tolist() for _ in range(rng.integers(1, 6))]
        table, counts = grouped(groups, threads)
        for _ in range(1000):
            assert table.run() == 0
        for widths, count in zip(groups, counts):
            assert (count[: sum(widths)] == 1000).all() and not count[sum(widths) :].any()


def test_steps_of_a_group_run_at_once():
    met = np.zeros(3, np.int64)
    table = Table([("meet", 1, (met,)), ("meet", 1, (met,))], 2, after=[1, 0])  # each waits until two are in
    for _ in range(20):
        met[0] = 0
        assert table.run() == 0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_failure_in_a_group_ends_the_run_after_it(threads):
    first, last = np.zeros(4, np.int64), np.zeros(4, np.int64)
    steps = [("fail", 1, (first,)), ("count", 4, (first, first, 0)), ("count", 4, (last, last, 0))]
    table = Table(steps, threads, after=[4, 0, 0])
    assert table.run() == 5 and not last.any()
    assert table.failed == (0 if threads == 1 else 1)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_run_without_steps_or_tasks(threads):
    assert Table([], threads).run() == 0
    table, counts = chain([0, 0], threads)
    assert table.run() == 0 and not counts[0].any()


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("tasks", [1, 6])
def test_a_status_ends_the_run_and_names_the_step(threads, tasks):
    first, last = np.zeros(4, np.int64), np.zeros(4, np.int64)
    steps = [("count", 4, (first, first, 0)), ("fail", tasks, (first,)), ("count", 4, (last, last, 0))]
    table = Table(steps, threads)
    for i in range(1, 200):
        assert table.run() == 5
        assert table.failed == 1
        assert (first == i).all() and not last.any()
    good, counts = chain([4, 4], threads)  # and the pool is as good as before
    assert good.run() == 0 and (counts[1] == 1).all()


def test_sleeping_workers_wake():
    met = np.zeros(3, np.int64)
    table = Table([("meet", 2, (met,))], 2)
    chained, counts = chain([2, 1, 5, 2], 2)
    for i in range(1, 11):
        time.sleep(0.005)  # far longer than a worker spins
        met[0] = 0
        assert table.run() == 0, "no second thread took part"
        assert chained.run() == 0 and (counts[3] == i).all()


def test_no_worker_is_woken_for_a_quiet_group():
    pool, loud, seen = pools.pool(2), np.zeros(3, np.int64), np.zeros(2, np.int64)
    small, large = Table([("count", 2, (seen, seen, 0))], 2, quiet=[1]), Table([("meet", 2, (loud,))], 2)
    for i in range(1, 6):
        while not pool._control.sleepers:
            time.sleep(0.001)
        assert small.run() == 0 and (seen == i).all() and pool._control.sleepers == 1
        loud[0] = 0
        assert large.run() == 0, "no second thread took part"


def test_threads_have_scratch_of_their_own():
    met = np.zeros(3, np.int64)
    table = Table([("meet", 2, (met,))], 2)
    for _ in range(20):
        met[0] = 0
        assert table.run() == 0
        assert set((met[1:] - table.scratch.ctypes.data).tolist()) == {0, 64}


def test_a_thread_takes_the_same_part_of_the_tasks_in_every_step():
    met = [np.zeros(3, np.int64) for _ in range(20)]
    table = Table([("meet", 2, (x,)) for x in met], 2)
    for _ in range(20):
        for x in met:
            x[0] = 0
        assert table.run() == 0
        assert [(x[1:] - table.scratch.ctypes.data).tolist() for x in met] == [[0, 64]] * 20


@pytest.mark.parametrize(("tasks", "order"), [(2, [1]), (3, [1, 2]), (8, [4, 5, 6, 7, 3, 2, 1]), (9, [4, 5, 6, 7, 8, 3, 2, 1])])
def test_a_thread_takes_the_last_tasks_of_another_part_when_its_own_is_done(tasks, order):
    seen = np.zeros(1 + tasks, np.int64)
    table = Table([("last", tasks, (seen, tasks))], 2)  # the caller waits in task 0 for all others
    for _ in range(20):
        seen[0] = 0
        assert table.run() == 0
        assert [t for t in seen[1:].tolist() if t] == order


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("grouped", [False, True])
def test_a_task_is_told_that_its_thread_ran_another_one_of_the_step(threads, grouped):
    """The first one of each thread in each step is not: others may have used the scratch in between."""
    found = [np.zeros(n, np.int64) for n in (4, 4, 4, 1)]
    steps = [("again", len(x), (x,)) for x in found]
    table = Table(steps, threads, after=[8, 4, 0, 0] if grouped else [0] * 4, again=[KEPT, 0, KEPT, KEPT])
    for _ in range(200):
        assert table.run() == 0
        first, other, third, last = ([sorted(x[x // 2 == own] % 2) for own in set(x // 2)] for x in found)
        for of_thread in (*first, *third, *last):
            assert of_thread[0] == 0 and (grouped or sum(of_thread) == len(of_thread) - 1)
        assert not any(map(sum, other))


def test_a_group_of_more_tasks_than_a_word_counts():
    table, counts = chain([3, 300_001, 2], 2)
    assert table.run() == 0 and table.run() == 0
    assert all((count == 2).all() for count in counts)


def test_words_of_parts_that_are_rarely_used_do_not_look_like_later_ones():
    """The words of parts are compared with the ticket as numbers that wrap around, so none may become too old."""
    table, counts = chain([4, 2, 8], 2)
    assert table.run() == 0 and table.pool
    control = Control.from_address(table.pool.address)
    control.ticket = 96 * RENEWED - GENERATION  # as after three quarters of all generations, in which nobody used a part
    done = threading.Thread(target=table.run, daemon=True)
    done.start()
    done.join(60)
    assert not done.is_alive() and all((count == 2).all() for count in counts)


def test_threads_know_what_they_read_in_the_next_two_steps():
    line, most, count = 64, AHEAD_BYTES, 3
    streams = [None, Stream(1 << 30, 3 * 1000 * line), None, Stream(1 << 31, 100), Stream(1 << 32, count * most), None]
    found, at = readings(streams, count)
    assert found.shape == (3, count, 4)
    near, near_bytes, later, later_bytes = found.transpose(2, 0, 1)
    assert (near[0] == [(1 << 30) + t * 1000 * line for t in range(count)]).all() and (near_bytes[0] == 1000 * line).all()
    assert (later[0] == near[1]).all() and later_bytes.tolist()[0] == [0, line, 0] and (later_bytes[2] == 0).all()
    assert (near_bytes[2] == most).all() and (later_bytes[1] == [most, most - line, most]).all(), "no more in all"
    first = found.ctypes.data
    assert at.tolist() == [first, first + found[0].nbytes, first + found[0].nbytes, first + 2 * found[0].nbytes, 0, 0]
    assert not readings([None] * 3, 2)[1].any()


def fetching(table: Table, thread: int) -> list[int]:
    """The rest of a Reading, which a thread still has to fetch."""
    assert table.pool
    words = Control.from_address(table.pool.address).fetching
    return words[thread * LINE // 8 + 1 :][:4]


def test_a_thread_that_waits_fetches_what_it_reads_next():
    met, again, flags, weights = np.zeros(3, np.int64), np.zeros(3, np.int64), np.zeros(2, np.int64), np.zeros(1 << 17, np.int64)
    reading, at = readings([None, None, Stream(weights.ctypes.data, weights.nbytes)], 2)
    steps = [("meet", 2, (met,)), ("hold", 1, (flags,)), ("meet", 2, (again,))]  # one thread is in `hold`, the other one waits
    table = Table(steps, 2, ahead=at.tolist())
    run = threading.Thread(target=table.run, daemon=True)
    run.start()
    while not flags[1] or all(fetching(table, t)[1] for t in range(2)):
        time.sleep(0.001)
    waiting = next(t for t in range(2) if not fetching(table, t)[1])
    for thread, (near, nbytes, *_) in enumerate(reading[0].tolist()):
        taken = nbytes if thread == waiting else LINES_BESIDE * 64
        assert fetching(table, thread)[:2] == [near + taken, nbytes - taken]
    flags[0] = 1
    run.join(60)
    assert again[0] == 2 and [fetching(table, t)[1::2] for t in range(2)] == [[0, 0]] * 2, "nothing is read after the last step"


def test_a_caller_that_waits_long_sleeps_and_is_woken():
    flags, used = np.zeros(2, np.int64), []
    table = Table([("relay", 2, (flags,))], 2)

    def caller():
        start = time.thread_time()
        assert table.run() == 0
        used.append(time.thread_time() - start)

    thread = threading.Thread(target=caller, daemon=True)
    thread.start()
    while not flags[1]:
        time.sleep(0.001)
    time.sleep(0.5)  # a worker is in task 1, the caller is done with task 0
    flags[0] = 1
    thread.join(60)
    assert used, "the caller was not woken at the end"
    assert used[0] < 0.25  # seconds of CPU; spinning would take all of 0.5


@pytest.mark.parametrize("threads", [2, 4])
def test_workers_do_not_spin_when_idle(threads):
    table, _ = chain([4, 4], threads)
    assert table.run() == 0
    time.sleep(0.02)
    start = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - start < 0.1  # a spinning worker would burn what it gets of 0.3 s


def test_a_busy_pool_leaves_the_second_caller_alone():
    flags = np.zeros(2, np.int64)
    held = Table([("hold", 2, (flags,))], 2)
    other, counts = chain([3, 1, 8], 2)
    first = threading.Thread(target=held.run)
    first.start()
    while not flags[1]:
        time.sleep(0.001)
    for _ in range(100):
        assert other.run() == 0
    flags[0] = 1
    first.join()
    assert (counts[2] == 100).all()


def test_two_python_threads_run_at_once():
    results = {}

    def work(name):
        table, counts = chain([2, 5, 1, 3], 2)
        statuses = {table.run() for _ in range(5000)}
        results[name] = statuses, [int(c.min()) for c in counts], [int(c.max()) for c in counts]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert results == {i: ({0}, [5000] * 4, [5000] * 4) for i in range(3)}


@pytest.mark.parametrize("callers", [1, 2, 4])
def test_several_runs_at_once_share_the_workers(callers):
    """However many threads run tables of their own, what helps them is one worker: never a team for each."""
    seen, statuses = np.zeros(2, np.int64), []

    def work():
        table = Table([("crowd", 8, (seen,)), ("crowd", 1, (seen,)), ("crowd", 5, (seen,))], 2)
        statuses.extend(table.run() for _ in range(100))

    threads = [threading.Thread(target=work) for _ in range(callers)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert statuses == [0] * 100 * callers and seen[0] == 0
    assert 1 <= seen[1] <= callers + 1, "threads in kernels at once: the callers' and one worker's"
    assert len(pools.pool(2).workers) == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin threads")
def test_workers_are_pinned_and_the_caller_is_not():
    before = os.sched_getaffinity(0)
    assert chain([4], 2)[0].run() == 0
    assert os.sched_getaffinity(0) == before
    (worker,) = pools.pool(2).workers
    assert worker.daemon
    pinned = os.sched_getaffinity(worker.native_id or 0)
    assert pinned <= before and len(pinned) == (1 if len(before) > 1 else len(before))
    for count in range(1, len(before)):
        cpus = pools.worker_cpus(count)
        assert len(set(cpus)) == count and set(cpus) < before
    assert list(pools.worker_cpus(len(before))) == [None] * len(before)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not pin threads")
def test_the_caller_leaves_the_cpu_of_a_worker():
    table, _ = chain([4], 2)
    (worker,) = table.pool.workers if table.pool else ()
    allowed, theirs = os.sched_getaffinity(0), os.sched_getaffinity(worker.native_id or 0)
    if len(allowed) == 1:
        pytest.skip("one CPU: nowhere to go")
    os.sched_setaffinity(0, theirs)
    os.sched_setaffinity(0, allowed)
    table.run()
    assert os.sched_getaffinity(0) == allowed
    os.sched_setaffinity(0, theirs)  # a caller that may be nowhere else frees the workers instead
    try:
        assert table.call() == pools.ATTEND
        assert table.pool
        table.pool.attend()
        assert os.sched_getaffinity(worker.native_id or 0) >= theirs
        assert table.call() == 0
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize("threads", [0, -1, 5000])
def test_a_thread_count_without_meaning(threads):
    with pytest.raises(OptionError, match=f"threads must be from 1 to 1024, got {threads}"):
        pools.Pool(threads)


def test_a_pool_that_was_closed_still_runs():
    own = pools.Pool(2)
    own.start()
    table, counts = chain([4, 4], 2)
    table.pool, table.state.control = own, own.address
    assert table.run() == 0 and len(own.workers) == 1
    own.close()
    assert own.workers == ()
    assert table.run() == 0 and table.run() == 0
    assert (counts[1] == 3).all()


@pytest.mark.parametrize("futex", [0, 98])
def test_the_walker_compiles_for_another_processor(futex):
    target = target_for("aarch64-linux-gnu", "generic", ("neon",))
    code = compile_object(module_text("aarch64", futex), target)
    assert code[:4] == b"\x7fELF" and code[18:20] == b"\xb7\x00"  # e_machine: AArch64


# -- processes -----------------------------------------------------------------------------------------------------


def script(body: str, expect: int = 0) -> subprocess.CompletedProcess:
    """Run `body` in a fresh interpreter, with this file's helpers at hand."""
    setup = "import os, sys, threading, time, warnings\nimport numpy as np\nfrom test_cpu_pool import *\n"
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", setup + body],
        env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def test_threads_that_come_together_get_one_walker():
    body = """
barrier, found = threading.Barrier(8), []
def first():
    barrier.wait()
    found.append(pools._walker())
threads = [threading.Thread(target=first) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(found) == 8 and len({id(library) for library, _ in found}) == len({id(method) for _, method in found}) == 1
"""
    script(body)


FORK = """
warnings.simplefilter("ignore", DeprecationWarning)  # Python dislikes forks of threaded processes; users do it
table, counts = chain([4, 1, 6], 2)
stop = []
other = threading.Thread(target=lambda: [chain([3, 5], 2)[0].run() for _ in iter(lambda: bool(stop), True)])
other.start()
for _ in range(10):
    assert table.run() == 0
    child = os.fork()
    if child == 0:
        met = np.zeros(3, np.int64)
        assert table.pool.workers == ()
        assert [table.run() for _ in range(100)] == [0] * 100
        assert len(table.pool.workers) == 1  # of its own
        assert Table([("meet", 2, (met,))], 2).run() == 0
        assert (counts[2] == counts[0][0]).all()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.append(True)
other.join()
assert (counts[2] == 10).all()
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_workers_of_its_own():
    assert script(FORK).stdout == "done\n"


@pytest.mark.parametrize(
    ("end", "code"), [("", 0), ("sys.exit(3)", 3), ("raise ValueError('boom')", 1), ("os._exit(4)", 4)], ids=lambda x: str(x)[:5]
)
def test_the_interpreter_exits_cleanly(end, code):
    body = """
import atexit
atexit.register(lambda: print(threading.active_count()))  # runs after the pool has closed
table, _ = chain([4, 4], 4)
assert table.run() == 0
"""
    done = script(body + end, code)
    assert ("boom" in done.stderr) if "boom" in end else done.stderr == ""
    assert done.stdout == ("" if "_exit" in end else "1\n")


def test_exit_while_a_daemon_thread_runs():
    body = """
table, _ = chain([4, 2, 8], 2)
def forever():
    while True:
        table.run()
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.05)
"""
    assert script(body).stderr == ""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system does not pin threads")
def test_one_cpu_for_many_threads():
    body = """
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
table, counts = chain([4, 2, 8], 4)
assert [table.run() for _ in range(300)] == [0] * 300
met = np.zeros(3, np.int64)
assert Table([("meet", 2, (met,))], 4).run() == 0
assert all(os.sched_getaffinity(w.native_id) == os.sched_getaffinity(0) for w in pools.pool(4).workers)
"""
    script(body)


def test_without_futex_workers_nap():
    body = """
pools.futex_call = lambda: 0
table, counts = chain([4, 2, 8], 2)
met = np.zeros(3, np.int64)
other = Table([("meet", 2, (met,))], 2)
for _ in range(10):
    met[0] = 0
    time.sleep(0.005)
    assert table.run() == 0 and other.run() == 0
assert (counts[2] == 10).all()
"""
    script(body)
