"""The collectives of a loaded program: its scratch in the heap, the checks that all ranks run the same program, and its steps.

A run succeeds or fails on all ranks alike. If a step fails on one rank, that rank announces GAVE_UP at the next barrier, and the
run fails on the others too. Therefore, if a step after the last collective may fail, one more barrier precedes the commit.

A program uses the end of each rank's heap while a step runs, and nothing between steps. Programs on one transport share these
bytes, one at a time. User data belongs at the beginning of the heap.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from rlx.driver.barrier import ENDING, GAVE_UP, LOADED, RUNNING, Call
from rlx.driver.collective import Plan, Table, collectives_of
from rlx.driver.reduction import ReduceKind
from rlx.driver.schedule import BARRIER, Job, What
from rlx.driver.symmetric import SymmetricBuffer, SymmetricTransport
from rlx.errors import CallMismatchError, CollectiveError, CompileError, HeapBoundsError
from rlx.ir.dtype import u8
from rlx.ir.kernel import Native
from rlx.ir.program import Program

ALIGNMENT = 64


class Exchanges:
    """The common operations of the ranks that loaded a program. `steps`: its collectives in order. `agreement`: the barrier
    before the commit, if every run has one; it takes no arrays."""

    def __init__(self, program: Program, transport: SymmetricTransport | None, may_fail: Sequence[bool]) -> None:
        """Waits at a barrier for the other ranks, if there are collectives. `may_fail`: whether each step of a run has a Check.

        CompileError: there is no transport, or its number of ranks is wrong. HeapBoundsError: the heap is too small.
        CallMismatchError: another rank has loaded other collectives."""
        self.name, self.transport = program.name, transport
        self.steps = tuple(s for s in program.collectives if s.attrs.ranks > 1)  # type: ignore[union-attr]
        self.tables: dict[Native, Table | None] = {}
        self.agreement: Table | None = None
        if not self.steps:
            return
        check_ranks(program.name, {s.attrs.ranks for s in self.steps}, transport)  # type: ignore[union-attr]
        assert transport is not None
        self.scratch = at_end(transport, max(_nbytes(s) for s in self.steps), f"{program.name}: its collectives need")
        text = repr([(str(s.attrs), s.inputs[0].buffer.dtype.name, s.inputs[0].buffer.size) for s in self.steps])
        agreed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        transport.barrier(Call(LOADED, self.scratch.offset, self.scratch.len, agreed))
        known = collectives_of(transport)
        known.loaded += 1  # on every rank: tells runs of a program from runs of its clone
        calls = [Call(what, self.scratch.offset, self.scratch.len, agreed + known.loaded) for what in (RUNNING, ENDING)]
        self._running, self._ending = calls
        alike: dict[Any, Table | None] = {}
        for step in self.steps:
            key = step.attrs, step.inputs[0].buffer.dtype, step.inputs[0].buffer.size
            if key not in alike:
                alike[key] = self._table(step)
            self.tables[step] = alike[key]
        if self._on_any(self._fails_late(program, may_fail)):
            job = Job(What.BROADCAST, transport.num_ranks, transport.this_rank.index, 0, 1, 1)
            self.agreement = known.table(Plan(self._ending, [BARRIER], u8, None, job))

    def begin(self) -> None:
        """Start a run, which ends with `release`. CallMismatchError: another rank starts a run of another program.
        CollectiveError: another thread is using the transport. TransportError."""
        if self.steps and self.transport:
            collectives_of(self.transport).claim(id(self))
            self.transport.barrier(self._running)

    def release(self) -> None:
        """End a run: other threads may use the transport."""
        if self.steps and self.transport:
            collectives_of(self.transport).release(id(self))

    def agree(self) -> None:
        """The barrier after the steps and before the commit. CollectiveError: a rank has given up. TransportError."""
        if self.steps and self.transport:
            self.transport.barrier(self._ending)

    def give_up(self) -> None:
        """Tell the other ranks that a step failed on this rank, or that its results were rejected."""
        if self.steps and self.transport:
            with suppress(CollectiveError):  # expected: the others announce another call. If they died, the next call says so
                self.transport.barrier(GAVE_UP)

    def refuse(self) -> None:
        """Tell the other ranks that this rank does not start the run. Does nothing if another thread of this rank is using the
        transport, because the others are then in that thread's run."""
        if self.steps and self.transport:
            with suppress(CollectiveError):
                collectives_of(self.transport).claim(id(self))
                self.give_up()
                self.release()

    def _fails_late(self, program: Program, may_fail: Sequence[bool]) -> bool:
        """Whether a step after the last collective may fail."""
        done = [step.kernel.collective for step in program.steps]
        last = max((i for i, found in enumerate(done) if found and self.tables.get(found)), default=-1)
        return any(fails and not found for fails, found in list(zip(may_fail, done, strict=True))[last + 1 :])

    def _on_any(self, own: bool) -> bool:
        """Whether `own` is true on any rank. A mismatch at the barrier means that it differs between ranks."""
        assert self.transport is not None
        try:
            self.transport.barrier(Call(LOADED, detail=own))
        except CallMismatchError:
            return True
        return own

    def perform(self, step: Native, source: np.ndarray, goal: np.ndarray) -> None:
        """Execute one collective. `source`, `goal`: operand and result, row-major and flat; one array if it works in place."""
        a: Any = step.attrs
        if a.what == "rank_part" and self.transport:
            source = source.reshape(a.ranks, -1)[self.transport.this_rank.index]
        table = self.tables.get(step)
        if table is None or a.in_place:
            goal[:] = source
        if table is not None:
            table.run((goal if a.in_place else source).view(np.uint8), goal.view(np.uint8))

    def _table(self, step: Native) -> Table | None:
        """The table that executes a step. None: no data moves."""
        a: Any = step.attrs
        buffer = step.inputs[0].buffer
        if a.what == "rank_part" or not buffer.size:
            return None
        scratch = SymmetricBuffer(self.scratch.rank, self.scratch.offset, _nbytes(step))
        kind = ReduceKind[a.kind.upper()] if "reduce" in a.what else None
        operand = np.broadcast_to(np.zeros((), buffer.dtype.numpy), buffer.size)
        what, known = What[a.what.upper()], collectives_of(self.transport)
        return known.prepare(what, scratch, operand, buffer.dtype, kind, a.root, None, False)


def at_end(transport: SymmetricTransport, nbytes: int, why: str) -> SymmetricBuffer:
    """`nbytes` bytes at the end of this rank's heap. HeapBoundsError, which begins with `why`: the heap is smaller."""
    offset = (transport.heap_size - nbytes) // ALIGNMENT * ALIGNMENT
    if offset < 0:
        raise HeapBoundsError(
            f"{why} {nbytes} bytes of each rank's heap, which has {transport.heap_size}; "
            f"make the transport with heap_size={nbytes} or more"
        )
    return SymmetricBuffer(transport.this_rank, offset, nbytes)


def check_ranks(name: str, ranks: set[int], transport: SymmetricTransport | None) -> None:
    """CompileError unless the transport has as many ranks as each collective. `ranks`: the numbers that collectives ask for."""
    wanted = ", ".join(map(str, sorted(ranks)))
    if transport is None:
        raise CompileError(f"graph {name!r} has collectives of {wanted} ranks: compile it with Session(device, transport=…)")
    if ranks != {transport.num_ranks}:
        raise CompileError(f"graph {name!r} has collectives of {wanted} ranks; the transport has {transport.num_ranks}")


def _nbytes(step: Native) -> int:
    (x,) = step.inputs
    return x.buffer.size * x.buffer.dtype.itemsize
