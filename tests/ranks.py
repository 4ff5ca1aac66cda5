"""Runs functions of test files on ranks that are processes over shared memory, cheaply: one server has imported everything and
has the compiled code; each rank is a fork of it.

    def both(transport, x): ...                 # in test_….py
    results = ranks.run(2, both, 3)             # by rank
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIMIT = 120.0  # seconds after which a test has hung
_numbers = itertools.count()


@dataclass(frozen=True)
class Ended:
    """The outcome of a rank that gave none: minus the number of the signal that ended it, or its exit code."""

    code: int


class Started:
    """Ranks at work."""

    def __init__(self, server: Server, pids: list[int]) -> None:
        self._server, self.pids = server, pids

    def outcomes(self, limit: float = LIMIT) -> list[Any]:
        """By rank what the function returned, or the exception that it raised, or Ended."""
        if not self._server.pipe.poll(limit):
            self._server.stop()
            raise AssertionError(f"ranks still ran after {limit} s")
        return self._server.pipe.recv()


class Server:
    def __init__(self) -> None:
        mine, its = socket.socketpair()
        paths = os.pathsep.join([str(HERE.parent), str(HERE), *sys.path])
        env = {**os.environ, "PYTHONPATH": paths}
        command = [sys.executable, __file__, str(its.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[its.fileno()], env=env, stdin=subprocess.DEVNULL, cwd=HERE)
        its.close()
        self.pipe = Connection(mine.detach())

    def stop(self) -> None:
        global _server
        _server = None
        self.pipe.close()
        self.process.kill()  # its children die with it
        self.process.wait()


_server: Server | None = None


def start(
    n: int, function: Callable[..., Any], *args: Any, heap_size: int = 1 << 20, timeout: float = 30.0, connect: bool = True,
    name: str = "",
) -> Started:  # fmt: skip
    """Call function(transport, *args) on n ranks; with connect=False function(name, rank, n, *args), which connects itself."""
    global _server
    if _server is None:
        _server = Server()
        atexit.register(_server.stop)
    name = name or fresh_name()
    _server.pipe.send((n, function.__module__, function.__qualname__, args, heap_size, timeout, connect, name))
    return Started(_server, _server.pipe.recv())


def run(n: int, function: Callable[..., Any], *args: Any, **how: Any) -> list[Any]:
    """The results of `function`, by rank. Raises the first rank's exception."""
    found = start(n, function, *args, **how).outcomes()
    for rank, outcome in enumerate(found):
        if isinstance(outcome, Exception):
            raise outcome
        assert not isinstance(outcome, BaseException), f"{outcome!r} {outcome.__notes__}"
        assert not isinstance(outcome, Ended), f"rank {rank} ended with {outcome.code}"
    return found


def fresh_name() -> str:
    """A name for ranks to find one another, which nobody else uses."""
    return f"test-{os.getpid()}-{next(_numbers)}"


def all_ready_but(t: Any, who: int) -> None:
    """On every rank but `who`: returns when all of them are here. It is no barrier: they look into each other's heaps."""
    from rlx.driver import Rank, SymmetricBuffer

    others = [Rank(r) for r in range(t.num_ranks) if r != who]
    flags = {r: t.heap.bytes(SymmetricBuffer(r, t.heap_size - 1, 1)) for r in others}
    flags[t.this_rank][...] = 1
    while not all(flag[0] for flag in flags.values()):
        time.sleep(0.001)


# -- the server


def serve(pipe: Connection) -> None:
    from rlx.driver.transports.shm_barrier import barrier_address

    barrier_address()  # compiles it
    while True:
        try:
            n, module, function, *rest = pipe.recv()
        except EOFError:
            return
        call = importlib.import_module(module)
        for part in function.split("."):
            call = getattr(call, part)
        pids, ends = [], []
        for rank in range(n):
            reading, writing = os.pipe()
            if not (pid := os.fork()):
                pipe.close()
                be_rank(writing, call, rank, n, *rest)
            os.close(writing)
            pids.append(pid)
            ends.append(reading)
        pipe.send(pids)
        pipe.send([outcome(pid, end) for pid, end in zip(pids, ends)])


def outcome(pid: int, reading: int) -> Any:
    with open(reading, "rb") as f:
        raw = f.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return pickle.loads(raw) if raw and code == 0 else Ended(code)


def be_rank(
    writing: int, call: Callable[..., Any], rank: int, n: int, args: Any, heap_size: int, timeout: float, connect: bool, name: str
) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    code = 1
    try:
        try:
            found = connected(call, rank, n, args, heap_size, timeout, name) if connect else call(name, rank, n, *args)
        except BaseException as e:  # noqa: BLE001  it goes to the test
            e.add_note(f"on rank {rank}:\n{traceback.format_exc()}")
            found = e
        try:
            raw = pickle.dumps(found)
        except (pickle.PicklingError, AttributeError, TypeError) as e:  # pytest's own, for one
            raw = pickle.dumps(AssertionError(f"{e}: {found!r} {getattr(found, '__notes__', '')}"))
        with open(writing, "wb") as f:
            f.write(raw)
        code = 0
    finally:
        os._exit(code)


def connected(call: Callable[..., Any], rank: int, n: int, args: Any, heap_size: int, timeout: float, name: str) -> Any:
    from rlx.driver import ShmTransport

    transport = ShmTransport(name, rank, n, heap_size, timeout)
    try:
        return call(transport, *args)
    finally:
        transport.close()


if __name__ == "__main__":
    importlib.import_module("ranks").serve(Connection(int(sys.argv[1])))  # so that classes are called the same in tests
