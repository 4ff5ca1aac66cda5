"""The table of steps that the executor runs (rlx.backends.cpu.executor), and its rows while it is made."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import numpy as np

from rlx.backends.cpu import pool
from rlx.backends.cpu.abi import JUMP, LINE, Reading, Rendered
from rlx.backends.cpu.memory import Region as HostRegion
from rlx.errors import IndexRangeError, PlanError
from rlx.ir.kernel import STATUS, Kernel
from rlx.ir.program import Step

if TYPE_CHECKING:
    from rlx.backends.cpu.exchange import ExchangeCalls
    from rlx.backends.cpu.experts import ExpertSteps

Surroundings: TypeAlias = "tuple[HostRegion, int, pool.Pool | None]"  # scratch, its bytes per thread, the threads
SHARED_NS = 20_000  # groups of single tasks with this much estimated work are shared by threads: waking one costs time
WAKING_NS = 12_000  # until a thread that sleeps has begun a task
AHEAD_BYTES = 1 << 19  # most that a thread fetches ahead: a quarter of the L2 cache of processors that do
BEGINNING, AGREEING = "the barrier before the first step", "the barrier after the last step"


class Place(NamedTuple):
    """Where a buffer lies. `moving`: the program's buffer, if it is a handle, whose address may change."""

    address: int
    moving: int | None = None


class Stream(NamedTuple):
    """Weights that the tasks of a step read in order, each an equal share (Rendered.streamed)."""

    address: int
    nbytes: int


class Rows:
    """The rows of a table while it is made. `steps`: (function, index of its first argument in `addresses`, tasks, whether the
    row is in the group of the previous one). `kernels`: None for rows that are no steps of the program. `places`: the step of the
    program at which, or in front of which, a row stands; -1: before the first. `streams`: the weights that a row reads. `again`,
    `quiet`: see rlx.backends.cpu.abi.Step. `moving`: (index in `addresses`, buffer) of each argument that is a handle. `targets`:
    (index in `addresses`, row) of arguments that are addresses of rows, those behind the row in front."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int, bool]] = []
        self.addresses: list[int] = []
        self.kernels: list[Kernel | None] = []
        self.places: list[int] = []
        self.streams: list[Stream | None] = []
        self.again: list[int] = []
        self.quiet: list[bool] = []
        self.moving: list[tuple[int, int]] = []
        self.targets: list[tuple[int, int]] = []
        self.jumps: list[int] = []
        self.kept: list[np.ndarray] = []  # memory that arguments point to

    def add(
        self, place: int, function: int, *addresses: int, kernel: Kernel | None = None, tasks: int = 1, joined: bool = False,
        stream: Stream | None = None, again: int = 0, quiet: bool = False,
    ) -> None:  # fmt: skip
        self.steps.append((function, len(self.addresses), tasks, joined))
        self.addresses += addresses
        self.kernels.append(kernel)
        self.places.append(place)
        self.streams.append(stream)
        self.again.append(again)
        self.quiet.append(quiet)

    def add_all(self, place: int, rows: Iterable[Sequence[int] | Literal[False] | None]) -> None:
        for row in rows:
            if row:
                self.add(place, *row)


class Table:
    """The table of steps that the executor runs.

    `call()` runs all of them and returns 0, or a status for `settle`. A table keeps the scratch alive, but no buffer."""

    def __init__(self, program: str, rows: Rows, surroundings: Surroundings, exchange: ExchangeCalls | None = None) -> None:
        """`exchange`: keeps the functions of collectives alive."""
        self._exchange = exchange
        self.experts: ExpertSteps | None = None  # those of the rows, if any
        self._program, (self._scratch, stride, self._pool) = program, surroundings
        self._kernels, self._places, self.moving, self._kept = rows.kernels, rows.places, rows.moving, rows.kept
        self._addresses = np.array([*rows.addresses, 0], np.int64)  # the executor reads one argument of each row
        self._steps = np.zeros((len(rows.steps), 7), np.int64)  # pool.Step
        self._steps[:, :4] = np.array(rows.steps, np.int64).reshape(-1, 4)
        self._steps[:, 5], self._steps[:, 6] = rows.again, rows.quiet
        self._steps[:, 3] = tasks_after([tasks for _, _, tasks, _ in rows.steps], [joined for *_, joined in rows.steps])
        self._steps[rows.jumps, 3] = JUMP
        for at, row in rows.targets:
            self._addresses[at] = self._steps.ctypes.data + self._steps.strides[0] * (row - 1)
        if self._pool and not rows.jumps:  # else the next row is not the next step
            self._readings, self._steps[:, 4] = readings(rows.streams, self._pool.threads)
        most = self._steps[:, 2:4].sum(axis=1).max(initial=0)
        if most > pool.MAX_TASKS:
            raise PlanError(f"{program}: a group of {most} tasks; the executor counts up to {pool.MAX_TASKS}")
        self._steps[:, 1] = self._addresses.ctypes.data + 8 * self._steps[:, 1]
        first, control = self._steps.ctypes.data, self._pool.address if self._pool and most > 1 else None
        self._run = pool.Run(first, first + self._steps.nbytes, self._scratch.address, stride, control)
        self.call = pool.callable_of(self._run)

    def move(self, addresses: Mapping[int, int]) -> None:
        """Replace the addresses of the handles among the arguments."""
        for at, buffer in self.moving:
            self._addresses[at] = addresses[buffer]

    def __call__(self) -> None:
        status = self.call()
        if status:
            self.settle(status)

    @property
    def address(self) -> int:
        """The address of the Run."""
        return ctypes.addressof(self._run)

    @property
    def failed(self) -> int:
        """The step at which, or in front of which, the last failed run stopped; -1: before the first."""
        return self._places[self._row]

    @property
    def _row(self) -> int:
        return (self._run.failed - self._run.first) // ctypes.sizeof(pool.Step)

    def settle(self, status: int) -> None:
        """Act on the status of a run. IndexRangeError: a Check failed. CollectiveError: a collective failed."""
        if status == pool.ATTEND and self._pool:
            return self._pool.attend()
        try:
            self._explain(status)
        finally:
            if self._exchange:
                self._exchange.exchanges.release()

    def _explain(self, status: int) -> None:
        if self.experts and status == self.experts.FAILED:
            if self._exchange:
                self._exchange.exchanges.give_up()
            raise self.experts.error()
        kernel = self._kernels[self._row]
        name = kernel.name if kernel else BEGINNING if self.failed < 0 else AGREEING
        if self._exchange and status == self._exchange.FAILED:
            raise self._exchange.error(f"{self._program}: {name}")
        if self._exchange:
            self._exchange.exchanges.give_up()
        origin = f" ({' '.join(kernel.origin)})" if kernel and kernel.origin else ""
        raise IndexRangeError(f"{self._program}: {STATUS[status]} in {name}{origin}; nothing was committed")


def readings(streams: Sequence[Stream | None], threads: int) -> tuple[np.ndarray, np.ndarray]:
    """Readings of `threads` threads for each row with a stream, int64 [rows with a stream, threads, 4], and for every row the
    address of those of the next such row; 0: there is none. A thread's first line may be read by the one before it, too."""
    known = [(at, stream) for at, stream in enumerate(streams) if stream]
    found = np.zeros((len(known), threads, ctypes.sizeof(Reading) // 8), np.int64)
    for here, reading in enumerate(found):
        left = np.full(threads, AHEAD_BYTES)
        for n, (_, stream) in enumerate(known[here : here + 2]):
            ends = (stream.address + np.arange(threads + 1) * stream.nbytes // threads) // LINE * LINE
            have = np.minimum(left, np.diff(ends))
            reading[:, 2 * n], reading[:, 2 * n + 1], left = ends[:-1], have, left - have
    following = np.searchsorted([at for at, _ in known], np.arange(len(streams)), side="right")
    first, each = found.ctypes.data, threads * ctypes.sizeof(Reading)
    return found, np.where(following < len(known), first + following * each, 0)


def joins(coded: Sequence[tuple[Step, Rendered]]) -> list[bool]:
    """For each step, whether it joins the group of the previous step: the compiler's groups, where threads pay off."""
    groups: list[list[Rendered]] = []
    for step, code in coded:
        groups = [*groups[:-1], [*groups[-1], code]] if step.concurrent and groups else [*groups, [code]]
    worth = [any(c.tasks > 1 for c in group) or sum(c.work_ns for c in group) > SHARED_NS for group in groups]
    return [i > 0 and found for group, found in zip(groups, worth) for i in range(len(group))]


def quiet(coded: Sequence[tuple[Step, Rendered]], joined: Sequence[bool]) -> list[bool]:
    """For each step, whether the rest of its group, from it on, takes less time than waking a thread (pool.Step)."""
    found, work = list[bool](), 0
    for (_, code), joins_previous in zip(reversed(coded), reversed(joined)):
        found.append(work + code.work_ns < WAKING_NS)
        work = work + code.work_ns if joins_previous else 0
    return found[::-1]


def tasks_after(tasks: Sequence[int], joined: Sequence[bool]) -> list[int]:
    """For each step, the tasks of the later steps in its group (pool.Step)."""
    found, after = [], 0
    for count, joins_previous in zip(reversed(tasks), reversed(joined)):
        found.append(after)
        after = count + after if joins_previous else 0
    return found[::-1]
