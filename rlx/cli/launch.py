"""`rlx launch -n 4 script.py`: starts the ranks of one machine, each a process that runs the same script.

Environment variables tell the ranks how to connect (rlx.driver.connect reads them). If one rank fails, the others get some time
to end by themselves and are then killed. A separate guard process removes the names of shared memory when the launcher has ended,
for whatever reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import IO, Annotated, Any

import typer

from rlx import knobs
from rlx.errors import RlxError

FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
ENDING = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}  # ranks are expected to end after these
PR_SET_PDEATHSIG = 1


def launch(
    command: Annotated[list[str], typer.Argument(help="Python script, and its arguments.", metavar="SCRIPT [ARG]...")],
    ranks: Annotated[int, typer.Option("-n", "--ranks", min=1, max=1024, help="Processes to start.", show_default=False)],
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is a module, as in python -m.")] = False,
    prefix: Annotated[bool, typer.Option(help="Prefix each line of output with its rank.")] = True,
    timeout: Annotated[float, typer.Option(min=0, help="Seconds that other ranks get to end after one has failed.")] = 10.0,
) -> None:
    """Start a script as several ranks on this machine that work together (rlx.driver.connect).

    Examples:

        rlx launch -n 4 train.py --steps 100

        rlx launch -n 2 -m rlx generate path/to/folder "Once upon a time"
    """
    script, *args = command
    if module and PathFinder.find_spec(script.partition(".")[0], [os.getcwd(), *sys.path]) is None:
        raise RlxError(f"there is no module {script}")
    if not module and not Path(script).exists():
        raise RlxError(f"there is no script {script}")
    program = [sys.executable, *(["-m"] if module else []), script, *args]
    with guard(job := f"{os.getpid()}-{secrets.token_hex(4)}"):
        raise typer.Exit(Launched(program, ranks, job, prefix).wait(timeout))


class Launched:
    """The running ranks. Must be made by the main thread before other threads start, because it forks."""

    def __init__(self, program: list[str], ranks: int, job: str, prefix: bool) -> None:
        self.ended: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()  # (rank, exit code) in order of exit
        self._job = job
        self.deadline: float | None = None  # when ranks that still run are killed
        self._asked = False  # they have been sent SIGTERM
        self._writing = threading.Lock()
        self._pipes: list[_Copier] = []
        shares = cpus_of(ranks)
        prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank, cpus in enumerate(shares):
                self.processes.append(_start(program, rank, ranks, job, cpus, prefix, prctl))
        except BaseException:
            self.end(signal.SIGKILL)
            raise
        for rank, process in enumerate(self.processes):
            threading.Thread(target=self._await, args=(rank, process), daemon=True).start()
            for source, sink in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
                if source is not None:
                    self._pipes.append(_Copier(rank, source, sink, self._writing))
                    self._pipes[-1].start()

    def wait(self, timeout: float) -> int:
        """Wait until all ranks have ended. Returns the exit code of the first that failed, else 0."""
        failed = 0
        with forwarding(lambda number: self._pass_on(number, timeout)):
            for _ in self.processes:
                rank, code = self._next(timeout)
                self._tell(rank)
                if code and not failed:
                    failed = code if code > 0 else 128 - code
                    how = f"exit code {code}" if code > 0 else f"{signal.Signals(-code).name}"
                    line = f"rlx: rank {rank} (process {self.processes[rank].pid}) ended with {how}"
                    with self._writing:  # print writes the end of a line apart
                        print(line, file=sys.stderr, flush=True)
                    self.deadline = self.deadline or time.monotonic() + timeout
        until = time.monotonic() + 1.0
        for pipe in self._pipes:
            pipe.finish(until)
        return failed

    def end(self, number: int) -> None:
        """Signal the process groups of ranks that still run."""
        for process in self.processes:
            if process.returncode is None:  # not waited for: its pid cannot have been reused
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def _next(self, timeout: float) -> tuple[int, int]:
        """The next rank that ends. After a failure, the others are sent SIGTERM at half of the timeout and SIGKILL at its end."""
        while True:
            left = 3600.0 if self.deadline is None else self.deadline - time.monotonic() - (0 if self._asked else timeout / 2)
            try:
                return self.ended.get(timeout=max(left, 0.01))
            except queue.Empty:
                if self.deadline is not None:
                    self.end(signal.SIGKILL if self._asked else signal.SIGTERM)
                    self._asked = True

    def _tell(self, rank: int) -> None:
        """Tell the ranks that wait for this one to connect that it has ended."""
        from rlx.driver.transports.shm import list_ended

        with contextlib.suppress(RlxError, OSError):  # without shared memory no rank waits
            list_ended(self._job, rank)

    def _pass_on(self, number: int, timeout: float) -> None:
        self.end(number)
        if number in ENDING:
            self.deadline = self.deadline or time.monotonic() + timeout

    def _await(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        self.ended.put((rank, process.wait()))


class _Copier(threading.Thread):
    """Copies a rank's output in whole lines. `lock`: held while it writes, so that lines of different ranks do not mix."""

    def __init__(self, rank: int, source: IO[bytes], sink: IO[bytes], lock: threading.Lock) -> None:
        super().__init__(daemon=True)
        self._begins, self._source, self._sink, self._lock = b"[%d] " % rank, source, sink, lock
        self._rest: list[bytes] = []  # pieces of an incomplete line
        self._holds = False  # it has read, or is about to read, bytes that are not written yet

    def run(self) -> None:
        read = self._source.read1  # pyright: ignore[reportAttributeAccessIssue]
        while self._coming_within(None):
            self._holds = True
            if not (piece := read(1 << 16)):
                break
            whole, end, rest = piece.rpartition(b"\n")
            if end:
                self._write([*self._rest, whole])
                self._rest.clear()
            self._rest += [rest] if rest else []
            self._holds = False

    def finish(self, until: float) -> None:
        """After the rank has ended: wait until all of its output is written, however slow the reader is. Processes that the rank
        started may live on and keep the output open: wait while they write, but without output only till `until`
        (time.monotonic)."""
        while self.is_alive() and (self._coming_within(0) or self._holds or time.monotonic() < until):
            self.join(0.05)
        if self._rest:
            self._write(self._rest)

    def _coming_within(self, milliseconds: int | None) -> bool:
        poll = select.poll()  # one per call: two threads must not poll one object concurrently
        poll.register(self._source, select.POLLIN)
        return bool(poll.poll(milliseconds))

    def _write(self, lines: Sequence[bytes]) -> None:
        text = b"".join(self._begins + line + b"\n" for line in b"".join(lines).split(b"\n"))
        with self._lock, contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe: the ranks go on
            self._sink.write(text)
            self._sink.flush()


def _start(
    program: list[str], rank: int, ranks: int, job: str, cpus: Sequence[int], prefix: bool, prctl: Any
) -> subprocess.Popen[bytes]:
    parent = os.getpid()

    def before() -> None:
        if prctl is not None:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the rank is killed when the launcher ends
        if os.getppid() != parent:
            os._exit(1)
        if len(cpus) > 1:  # rlx pins threads to CPUs: two ranks must not pin to the same ones
            os.sched_setaffinity(0, cpus)

    known = {
        knobs.JOB.env: job, knobs.RANK.env: rank, knobs.RANKS.env: ranks, "RANK": rank, "WORLD_SIZE": ranks, "LOCAL_RANK": rank,
        "LOCAL_WORLD_SIZE": ranks, knobs.THREADS.env: knobs.THREADS.get() or max(len(cpus), 1),
    }  # fmt: skip
    if prefix:
        known["PYTHONUNBUFFERED"] = 1  # lines come when they are printed
    stream = subprocess.PIPE if prefix else None
    # Groups of processes in the background may not read a terminal.
    reads = rank == 0 and sys.stdin is not None and not sys.stdin.isatty()
    return subprocess.Popen(
        program, env=knobs.environment(**known), stdin=None if reads else subprocess.DEVNULL, stdout=stream, stderr=stream,
        process_group=0, preexec_fn=before,
    )  # fmt: skip


def cpus_of(ranks: int) -> list[list[int]]:
    """The CPUs that this process may use, split evenly over the ranks. Neighbours, and the hardware threads of a core, go to the
    same rank. Empty lists if there are fewer CPUs than ranks."""
    if not hasattr(os, "sched_getaffinity"):
        return [[]] * ranks

    def place(cpu: int) -> tuple[int, int, int]:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        where = [topology / name for name in ("physical_package_id", "core_id")]
        package, core = (int(f.read_text()) if f.exists() else cpu for f in where)
        return package, core, cpu

    cpus = sorted(os.sched_getaffinity(0), key=place)
    share = len(cpus) // ranks
    return [cpus[rank * share : (rank + 1) * share] for rank in range(ranks)]


@contextlib.contextmanager
def forwarding(send: Any) -> Iterator[None]:
    """Within the block, pass signals to this process to `send`."""
    numbers = [getattr(signal, name) for name in FORWARDED if hasattr(signal, name)]
    before = {number: signal.signal(number, lambda number, _: send(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def guard(job: str) -> Iterator[None]:
    """When the block ends, or this process does, a separate process removes the job's shared memory."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.close(writing)
            _outlive(reading, job)
        finally:
            os._exit(0)
    os.close(reading)
    try:
        yield
    finally:
        os.close(writing)
        os.waitpid(pid, 0)


def _outlive(reading: int, job: str) -> None:
    from rlx.driver.transports.shm import remove

    os.setsid()  # Ctrl-C must not end this process
    quiet = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(quiet, stream)
    os.read(reading, 1)  # returns when the launcher has ended
    for _ in range(2):  # twice, because a rank may be killed a moment later
        remove(job)
        time.sleep(0.05)


__all__ = ["launch"]
