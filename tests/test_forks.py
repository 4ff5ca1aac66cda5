"""Forks while other threads are at work: the child goes on, or is told why not; it never waits for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rlx.driver import LocalTransport
from rlx.errors import TransportError
from rlx.forks import Lock
from rlx.host import llvm

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="the system forks no processes"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of forking with threads about
    pytest.mark.usefixtures("own_compilers"),
]

FORKED = """
import os, sys, threading, time, warnings
import numpy as np
import rlx
from rlx.host.gate import Gate
from rlx.errors import BindingError
warnings.simplefilter("ignore", DeprecationWarning)  # Python dislikes forks of threaded processes; users do it
g = rlx.Graph("long")
x = y = g.input("x", (256, 256), "f32")
for _ in range(60): y = y @ x
total = rlx.BufferHandle("total", (), "f32")
if {stateful}:
    state = g.handle(total)
    g.assign(state, state + y[0, 0])
g.set_outputs([y])
made = rlx.Session("cpu").compile(g, rlx.CompileOptions(threads={threads}))
eye = np.eye(256, dtype=np.float32)
own, snapshot = made.bound([eye]), made.snapshot_handles() if {stateful} else None
calls = dict(run=lambda: made.run({{"x": eye}}), run_slots=lambda: made.run_slots([eye]), bound=lambda: own(),
             commit_no_wait=lambda: (made.commit_no_wait({{"x": eye}}), made.sync_pending()),
             clone=lambda: made.clone().run({{"x": eye}}))
for call in calls.values(): call()  # all modules are imported: a fork within an import hangs by Python's own lock
other = made.fork_handles(1)[0] if {stateful} else None
seen, freed = [], Gate.freed
Gate.freed = lambda gate: seen.append(freed(gate)) or seen[-1]
def child():
    if True not in seen:  # the run had just ended
        return None
    if not {stateful}:
        for call in calls.values(): call()
        return made.run({{"x": eye}})[0].trace() == 256
    for call in calls.values():
        try: call()
        except BindingError as e: assert "when this process was forked" in str(e) and "'total'" in str(e), e
        else: return False
    made.restore_handles(snapshot)
    for call in calls.values(): call()
    made.handles._torn.add("total"); made.handles._tell()
    made.use_handles(other)
    for call in calls.values(): call()
    return True
threading.Thread(target=lambda: [calls["{call}"]() for _ in iter(int, 1)], daemon=True).start()
caught = 0
while caught < 2:
    while not made._lock.locked(): time.sleep(0)
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = {{True: 0, False: 2, None: 3}}[child()]
        finally:
            os._exit(code)
    if (code := os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])) != 3:
        print(code, flush=True)
        caught += 1
os._exit(0)
"""


@pytest.mark.parametrize("mode", ["native", "python"])
@pytest.mark.parametrize("call", ["run", "bound"])
@pytest.mark.parametrize("stateful", [False, True])
def test_a_child_forked_while_another_thread_runs_goes_on_or_is_told_why_not(stateful: bool, call: str, mode: str) -> None:
    code = FORKED.format(stateful=stateful, call=call, threads=2 if call == "run" else 1)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env={**os.environ, "RLX_CALLS": mode}
    )
    assert done.stdout.split() == ["0"] * 2, done.stdout + done.stderr


def in_child(check: Callable[[], None]) -> int:
    """The exit code of a forked child that makes this check, within a minute."""
    if not (pid := os.fork()):
        threading.Timer(60, os._exit, (9,)).start()
        try:
            check()
        except BaseException:  # noqa: BLE001  reported by the code
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_lock_that_another_thread_holds_is_free_in_the_child() -> None:
    lock, held, done = Lock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    assert in_child(lambda: lock.__enter__()) == 0
    done.set()
    thread.join()
    with lock:  # held by the thread that forks, which goes on in the child
        assert in_child(lambda: lock.__exit__()) == 0


@pytest.mark.parametrize("inside", [False, True])
def test_barriers_of_threads_in_a_child(inside: bool) -> None:
    """Ranks that were at a barrier are not in the child; where nobody was, threads of the child can be the ranks."""
    ranks = LocalTransport.fan_out(2, 64)
    thread = threading.Thread(target=ranks[0].barrier)
    if inside:
        thread.start()
        while ranks[0]._barrier.calls[0] is None:
            pass

    def check() -> None:
        if inside:
            with pytest.raises(TransportError, match="forked while ranks"):
                ranks[1].barrier()
        else:
            other = threading.Thread(target=ranks[0].barrier)
            other.start()
            ranks[1].barrier()
            other.join()

    assert in_child(check) == 0
    if inside:
        ranks[1].barrier()
        thread.join()


def test_a_fork_that_is_interrupted_lets_no_more_threads_into_llvm() -> None:
    """The interrupt comes while the fork waits for a thread that is in LLVM."""
    machine, go, inside = ("a", "test", "machine"), threading.Event(), list[int]()
    entered, main = threading.Semaphore(0), threading.get_ident()

    def code(text: str, assembly: bool) -> bytes:
        inside.append(threading.get_ident())
        entered.release()
        go.wait(60)
        return b""

    def interrupt() -> None:
        while not any(f.f_code is llvm._pause.__code__ for f, _ in traceback.walk_stack(sys._current_frames()[main])):
            time.sleep(0.001)
        signal.pthread_kill(main, signal.SIGINT)

    threads = [threading.Thread(target=llvm.code, args=("", machine)) for _ in range(llvm.SLOTS + 8)]
    llvm._idle[machine] = [SimpleNamespace(code=code) for _ in threads]  # type: ignore[list-item]
    try:
        threads[0].start()
        entered.acquire()
        with pytest.raises(KeyboardInterrupt):
            threading.Thread(target=interrupt).start()
            llvm._pause()
        llvm._resume()
        for thread in threads[1:]:
            thread.start()
        for _ in range(llvm.SLOTS - 1):
            assert entered.acquire(timeout=60)
        assert not entered.acquire(timeout=0.2), "more threads are in LLVM than have room"
    finally:
        go.set()
        for thread in threads:
            if thread.ident:
                thread.join()
        del llvm._idle[machine]
    assert len(inside) == len(threads)
    llvm._pause()
    llvm._resume()
