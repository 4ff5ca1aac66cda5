"""The reference backend: a Program executed step by step with numpy, in memory laid out as the plan says.

It is the oracle of the compiler. It uses the plan's offsets in one real arena, which it poisons before each run, so a
wrong plan or a read before a write gives wrong results here too. "ref:0" packs nothing and claims nothing; "ref:1"
packs contraction operands into panels of three columns and runs claimed ops whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from rlx.backends.ref.interpret import POISON, run_kernel
from rlx.driver import files
from rlx.driver.backend import KernelTexts
from rlx.driver.exchange import Exchanges
from rlx.driver.handles import HandleStore, PlainMemory
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import CollectiveError, DeviceUnavailableError, IndexRangeError
from rlx.ir.dtype import DTYPES
from rlx.ir.kernel import STATUS, Check, walk
from rlx.ir.program import BufferDecl, Program, Region, Step
from rlx.ir.target import Target

ALIGNMENT = 64
PANELS = ((0, 1), (3, 2))  # columns per packed panel and rows interleaved, by device index
STATES = PlainMemory()
NATIVES = {"attention": lambda node: None}  # of every device but the first


class RefBackend:
    """Backend protocol (rlx.driver.backend)."""

    name = "ref"

    def probe(self) -> dict[str, str | None]:
        return {f"ref:{i}": None for i in range(len(PANELS))}

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        if not 0 <= index < len(PANELS):
            raise DeviceUnavailableError(f"there is no ref:{index}; there are ref:0 to ref:{len(PANELS) - 1}")
        panel = PANELS[index]
        return Target(
            name="ref",
            dtypes=frozenset(DTYPES),
            features=(f"panel={panel}",),
            alignment=ALIGNMENT,
            natives=NATIVES if index else {},
            computes=lambda producer: True,
            panel=lambda dtype: panel,
        )

    def process_bytes(self) -> int:
        return 0

    def compile(self, program: Program) -> KernelTexts:
        return KernelTexts(program)

    def load(
        self, artifact: KernelTexts, params: ParamStore | None = None, index: int = 0, handles: HandleStore | None = None,
        transport: SymmetricTransport | None = None,
    ) -> RefExecutable:  # fmt: skip
        return RefExecutable(artifact.program, params or ParamStore(), handles or HandleStore(), transport)


class RefExecutable:
    """Executable protocol (rlx.driver.backend) over host memory."""

    def __init__(
        self, program: Program, params: ParamStore, handles: HandleStore, transport: SymmetricTransport | None = None
    ) -> None:
        self.program, self.params = program, params
        may_fail = [any(isinstance(s, Check) for s in walk(step.kernel.body)) for step in program.steps]
        self.exchanges = Exchanges(program, transport, may_fail)
        self.decls = {b.id: b for b in program.buffers}
        self.arena = allocate(program.plan.size_bytes)
        self.memory_of = {b.id: self._place(b) for b in program.buffers if b.region is not Region.HANDLE}  # raw bytes
        self.use_handles(handles)

    def use_handles(self, store: HandleStore) -> None:
        states = {b.id: (b.name, b.shape) for b in self.program.buffers if b.region is Region.HANDLE}
        found = store.require(states.values(), STATES)
        self.memory_of |= {id: entry.memory.data for id, entry in zip(states, found)}
        self.handles = store

    def _place(self, b: BufferDecl) -> np.ndarray:
        if b.region in (Region.ARENA, Region.INPUT, Region.OUTPUT):
            start = self.program.plan.offsets[b.id]
            assert start + b.nbytes <= self.arena.size, f"{b} lies outside the arena of {self.arena.size} bytes"
            return self.arena[start : start + b.nbytes]
        if b.region in (Region.PARAM, Region.PREPARED):
            return self.params.get(b.name, b.nbytes, _allocate_entry).memory
        memory = allocate(b.nbytes)
        memory[:] = 0 if b.data is None else np.ascontiguousarray(b.data).reshape(-1).view(np.uint8)
        memory.flags.writeable = b.region is not Region.CONSTANT
        return memory

    def array(self, buffer: int) -> np.ndarray:
        """The buffer's memory as a flat array of its dtype."""
        return self.memory_of[buffer].view(self.decls[buffer].shape.dtype.numpy)

    def write(self, buffer: int, array: np.ndarray) -> None:
        decl = self.decls[buffer]
        assert array.shape == decl.shape.static and array.dtype == decl.shape.dtype.numpy, (decl, array.shape, array.dtype)
        files.copy(self.array(buffer), array.reshape(-1))

    def read(self, buffer: int) -> np.ndarray:
        return self.view(buffer).copy()

    def copy(self, goal: int, source: int) -> None:
        self.memory_of[goal][:] = self.memory_of[source]

    def view(self, buffer: int) -> np.ndarray:
        return self.array(buffer).reshape(self.decls[buffer].shape.static)

    def address(self, buffer: int) -> int:
        return self.memory_of[buffer].ctypes.data

    @property
    def arena_ptr(self) -> int:
        return self.arena.ctypes.data

    def prepare(self, steps: Sequence[int], given: Mapping[int, np.ndarray] | None = None, alone: bool = False) -> None:
        for i in steps:
            self._run(self.program.prepare[i], given or {})

    def run(self) -> None:
        self.run_steps()
        if self.exchanges.agreement:
            self._agree()
        self._commit()

    def run_steps(self) -> None:
        for b in self.program.buffers:
            if b.region in (Region.ARENA, Region.OUTPUT):
                self.memory_of[b.id][:] = POISON
        done = 0
        try:
            self.exchanges.begin()
            for step in self.program.steps:
                self._run(step)
                done += 1
        except (IndexRangeError, CollectiveError) as e:
            if isinstance(e, IndexRangeError):
                self.exchanges.give_up()
            self._undo(done)
            raise
        finally:
            self.exchanges.release()

    def run_abort(self) -> None:
        self.exchanges.give_up()
        self._undo(len(self.program.steps))

    def run_refuse(self) -> None:
        self.exchanges.refuse()

    def _undo(self, failed: int) -> None:
        for at, step in self.program.abort:
            if at < failed:
                self._run(step)

    def run_commit(self) -> None:
        self._agree()
        self._commit()

    def _agree(self) -> None:
        try:
            self.exchanges.agree()
        except CollectiveError:
            self._undo(len(self.program.steps))
            raise

    def _commit(self) -> None:
        for step in self.program.commit:
            self._run(step)

    def _run(self, step: Step, given: Mapping[int, np.ndarray] = MappingProxyType({})) -> None:
        arrays = [given[a].reshape(-1) if a in given else self.array(a) for a in step.args]
        if step.kernel.collective:
            self.exchanges.perform(step.kernel.collective, *arrays)
        elif status := run_kernel(step.kernel, arrays):
            where = f"{step.kernel.name} ({' '.join(step.kernel.origin)})"
            raise IndexRangeError(f"{STATUS[status]} in {where}; nothing was committed")

    def clone(self) -> RefExecutable:
        other = RefExecutable(self.program, self.params, self.handles.copy(), self.exchanges.transport)
        other.arena[:] = self.arena
        return other

    def allocations(self) -> dict[str, int]:
        """Zeros: numpy's memory is Python's, and counted there."""
        return {"count": 0, "live_bytes": 0, "total_bytes": 0}

    def memory(self) -> dict[str, int]:
        total: dict[str, int] = dict.fromkeys(("arena", "scratch", "params", "prepared", "constants", "handles", "code"), 0)
        total["arena"] = self.program.plan.size_bytes
        names = {Region.PARAM: "params", Region.PREPARED: "prepared", Region.CONSTANT: "constants", Region.HANDLE: "handles"}
        for b in self.program.buffers:
            if b.region in names:
                total[names[b.region]] += b.nbytes
        return total


def allocate(nbytes: int) -> np.ndarray:
    """`nbytes` poisoned bytes, aligned."""
    base = np.full(nbytes + ALIGNMENT, POISON, np.uint8)
    start = -base.ctypes.data % ALIGNMENT
    return base[start : start + nbytes]


def _allocate_entry(nbytes: int) -> tuple[np.ndarray, int]:
    memory = allocate(nbytes)
    return memory, memory.ctypes.data
