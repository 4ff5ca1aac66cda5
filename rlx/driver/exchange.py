"""The collectives of one program in memory: its place in the heap, what all ranks must agree on, and its steps on arrays.

A program uses the end of each rank's heap while a step runs, and nothing between steps: programs on one transport use the same
bytes, one at a time. What a user puts into the heap belongs at its beginning.
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from rlx.driver.collective import ReduceKind, Table, collectives_of
from rlx.driver.schedule import What
from rlx.driver.symmetric import Call, SymmetricBuffer, SymmetricTransport
from rlx.errors import CompileError, HeapBoundsError
from rlx.ir.kernel import Native
from rlx.ir.program import Program

LOADED, RUNNING = 1001, 1002  # Call.what of the meetings when programs are loaded, and when runs begin
ALIGNMENT = 64


class Exchanges:
    """What the ranks that loaded a program do together. `steps`: its collectives in order; `runs`: those that ended well."""

    def __init__(self, program: Program, transport: SymmetricTransport | None) -> None:
        """Meets the other ranks, if there are collectives. CompileError: there is no transport, or one of other ranks.
        HeapBoundsError: the heap is too small. CallMismatchError: another rank has loaded other collectives."""
        self.name, self.transport, self.runs = program.name, transport, 0
        self.steps = tuple(s for s in program.collectives if s.attrs.ranks > 1)  # type: ignore[union-attr]
        self.tables: dict[Native, Table | None] = {}
        if not self.steps:
            return
        check_ranks(program.name, {s.attrs.ranks for s in self.steps}, transport)  # type: ignore[union-attr]
        assert transport is not None
        self.scratch = at_end(transport, max(_nbytes(s) for s in self.steps), f"{program.name}: its collectives need")
        text = repr([(str(s.attrs), s.inputs[0].buffer.dtype.name, s.inputs[0].buffer.size) for s in self.steps])
        self._agreed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        transport.barrier(Call(LOADED, self.scratch.offset, self.scratch.len, self._agreed))
        alike: dict[Any, Table | None] = {}
        for step in self.steps:
            key = step.attrs, step.inputs[0].buffer.dtype, step.inputs[0].buffer.size
            if key not in alike:
                alike[key] = self._table(step)
            self.tables[step] = alike[key]

    def begin(self) -> None:
        """Before the steps of a run. CallMismatchError: another rank begins another program's run, or has done more of these.
        TransportError."""
        if self.steps and self.transport:
            call = Call(RUNNING, self.scratch.offset, self.scratch.len, self._agreed + self.runs)
            self.runs += 1
            self.transport.barrier(call)

    def failed(self) -> None:
        """The run that began has not ended well: it does not count."""
        self.runs -= bool(self.steps)

    def perform(self, step: Native, source: np.ndarray, goal: np.ndarray) -> None:
        """One collective: row-major, flat arrays of the operand and of the result; both are one where it works in place."""
        a: Any = step.attrs
        if a.what == "rank_part" and self.transport:
            source = source.reshape(a.ranks, -1)[self.transport.this_rank.index]
        table = self.tables.get(step)
        if table is None or a.in_place:
            goal[:] = source
        if table is not None:
            table.run((goal if a.in_place else source).view(np.uint8), goal.view(np.uint8))

    def _table(self, step: Native) -> Table | None:
        """What carries a step out; None: nothing moves."""
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
    """That many bytes at the end of this rank's heap. HeapBoundsError, which begins with `why`: it has fewer."""
    offset = (transport.heap_size - nbytes) // ALIGNMENT * ALIGNMENT
    if offset < 0:
        raise HeapBoundsError(
            f"{why} {nbytes} bytes of each rank's heap, which has {transport.heap_size}; "
            f"make the transport with heap_size={nbytes} or more"
        )
    return SymmetricBuffer(transport.this_rank, offset, nbytes)


def check_ranks(name: str, ranks: set[int], transport: SymmetricTransport | None) -> None:
    """CompileError unless collectives of these numbers of ranks can be done over the transport."""
    wanted = ", ".join(map(str, sorted(ranks)))
    if transport is None:
        raise CompileError(f"graph {name!r} has collectives of {wanted} ranks: compile it with Session(device, transport=…)")
    if ranks != {transport.num_ranks}:
        raise CompileError(f"graph {name!r} has collectives of {wanted} ranks; the transport has {transport.num_ranks}")


def _nbytes(step: Native) -> int:
    (x,) = step.inputs
    return x.buffer.size * x.buffer.dtype.itemsize
