"""A compiled program as an artifact, and loaded: its regions, argument tables, and a run that is one call into machine code.

Every address is fixed when a program is loaded. `run` hands one table of {function, arguments, tasks} to the worker
pool (rlx.backends.cpu.pool): the steps, then the commit, which is reached only if no Check failed. A run allocates nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np

from rlx.backends.cpu import memory, pool
from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.copying import LEAST_BYTES, LEAST_THREADS, Copies
from rlx.backends.cpu.table import AGREEING, Place, Rows, Stream, Surroundings, Table, joins, quiet
from rlx.backends.shared.loaded import Loaded, check_fits, constants_of
from rlx.driver.backend import Timeline
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.errors import PlanError
from rlx.host.gate import FastCall
from rlx.host.jit import load
from rlx.ir.program import BufferDecl, Program, Region, Step, kernel_labels
from rlx.records import record

if TYPE_CHECKING:
    from rlx.backends.cpu.exchange import ExchangeCalls
    from rlx.backends.cpu.experts import ExpertSteps
    from rlx.backends.cpu.timing import Spans
    from rlx.driver.experts import ExpertTiers, ResidencyStats
    from rlx.driver.symmetric import SymmetricTransport

SCRATCH_ALIGNMENT = 128  # bytes; threads then share no cache line, nor a pair of lines that is prefetched together


@record
class CpuArtifact:
    """Machine code of one program: `codes`, each distinct kernel once, with its object code at the same index of `objects`, whose
    rest are functions that kernels share. `coded`: the steps of a phase, each with its code. `sections`: of steps that prepare
    the weights of experts, the code for one expert (rlx.ir.sections), where there is one. `written`: reads the texts of an
    artifact from the cache, whose codes have none."""

    program: Program
    codes: tuple[Rendered, ...]
    objects: tuple[bytes, ...]
    coded: dict[str, list[tuple[Step, Rendered]]]
    sections: dict[int, Rendered] = field(default_factory=dict)
    written: Callable[[], dict[str, str]] | None = None

    def texts(self) -> dict[str, str]:
        """Label of a kernel -> its LLVM IR. Kernels that share code each appear, with the same text."""
        if self.written is not None:
            return self.written()
        labels = kernel_labels(self.program)
        return {labels[step.kernel]: code.text for steps in self.coded.values() for step, code in steps}


class CpuCode:
    """State that an executable shares with its clones: loaded machine code, and constants."""

    def __init__(self, artifact: CpuArtifact) -> None:
        self.artifact = artifact
        symbols = [c.symbol for image, c in zip(artifact.objects, artifact.codes) if image]  # collectives have no code
        objects = [image for image in artifact.objects if image]
        self.library = load(objects, symbols, artifact.program.target, stored=artifact.written is not None)
        scratch = max((c.scratch_bytes for c in artifact.codes), default=0)
        self.scratch_stride = -(-scratch // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        self.constants = constants_of(artifact.program, memory.MEMORY)


class CpuExecutable(Loaded):
    """Executable protocol (rlx.driver.backend) in host memory. One thread at a time may run it; clones run at once.

    Memory goes back when the last reference to it goes: this object's, a clone's, or that of a view."""

    def __init__(
        self, code: CpuCode, params: ParamStore, handles: HandleStore, transport: SymmetricTransport | None = None
    ) -> None:
        program = code.artifact.program
        super().__init__(program, params, handles, memory.MEMORY, code.constants)
        self._code, self._transport = code, transport
        if program.extent is not None:  # masked reads of padding that was never written are slow on unmapped pages
            memory.MEMORY.fill(self.arena.block, 0)
        self._tables: WeakSet[Table] = WeakSet()  # tables that outlive a call
        shared = any(c.tasks > 1 for c in code.artifact.codes) or any(joins(code.artifact.coded["steps"]))
        threads = program.target.threads if shared else 1
        self._pool = pool.pool(threads) if threads > 1 else None
        self._scratch = memory.allocate(code.scratch_stride * threads, SCRATCH_ALIGNMENT)
        self._lay_out_params()
        self._exchange = _exchange_calls(code.artifact, transport) if program.collectives else None
        self._experts = self._expert_steps() if program.routers else None
        self._whole = self._lasting("steps", "commit")

    # -- buffers

    def use_handles(self, store: HandleStore) -> None:
        """Run on the states in `store` from now on; missing ones are created. Nothing else is allocated or compiled.

        InputShapeError: a state in the store has another shape; then nothing changes."""
        if store is not self.handles:
            super().use_handles(store)
            for table in self._tables:
                table.move({id: e.block.address for id, e in self.entries.items()})

    def read(self, buffer: int, start: int = 0, count: int | None = None) -> np.ndarray:
        decl = self.decls[buffer]
        if self._pool is None or self._pool.threads < LEAST_THREADS or count is not None or decl.nbytes < LEAST_BYTES:
            return super().read(buffer, start, count)
        out = np.empty(decl.shape.static, decl.shape.dtype.numpy)
        self._copies.copy(out, self.address(buffer))
        return out

    @cached_property
    def _copies(self) -> Copies:
        return Copies(self.program.name, (self._scratch, self._code.scratch_stride, self._pool))

    def poison(self) -> None:
        """Fill scratch, and the arena except for inputs, with NaN: it shows up if a run reads memory that it did not write."""
        inputs = {i: self.read(i) for i in self.program.inputs}
        for block in (self.arena.block, self._scratch):
            memory.MEMORY.fill(block, memory.POISON)
        for i, array in inputs.items():
            self.write(i, array)

    def allocations(self) -> dict[str, int]:
        return memory.allocations()

    def memory(self) -> dict[str, int]:
        """Bytes by purpose. `params` and `prepared` are shared with every executable on the same store."""
        code = sum(map(len, self._code.artifact.objects))
        found = super().memory() | {"scratch": self._scratch.nbytes, "code": code}
        if (tiers := self.tiers) is not None:
            for purpose, region in (("params", Region.PARAM), ("prepared", Region.PREPARED)):
                found[purpose] -= tiers.offloaded(b.name for b in self.program.buffers if b.region is region)
        return found

    # -- experts: Tiered protocol (rlx.driver.experts)

    @property
    def tiers(self) -> ExpertTiers | None:
        return self._experts.tiers if self._experts else None

    @property
    def tier_layers(self) -> Sequence[int]:
        return self._experts.layers if self._experts else ()

    def take_tier_stats(self) -> ResidencyStats:
        assert self._experts is not None
        return self._experts.take_stats()

    def _expert_steps(self) -> ExpertSteps:
        from rlx.backends.cpu.experts import ExpertSteps, group_starts  # imported late: most programs have no experts

        artifact = self._code.artifact
        packers = {i: (self._code.library, code) for i, code in artifact.sections.items()}
        return ExpertSteps(self, packers, group_starts(joins(artifact.coded["steps"])))

    # -- running

    def run(self) -> None:
        """All steps, then commit. IndexRangeError: a Check failed. CollectiveError: a collective failed. Both leave all states
        unchanged."""
        status = self._whole.call()
        if status:
            self._settle(self._whole, status)

    def run_steps(self) -> None:
        """The steps without the commit; raises as run does."""
        status = self._steps.call()
        if status:
            self._settle(self._steps, status)

    def run_abort(self) -> None:
        """Restore the handles that the steps changed, and notify the other ranks."""
        if self._exchange:
            self._exchange.exchanges.give_up()
        self._undo(len(self.program.steps))

    def run_refuse(self) -> None:
        if self._exchange:
            self._exchange.exchanges.refuse()

    def _undo(self, failed: int) -> None:
        """Undo the in-place updates of handles by the steps before `failed`."""
        coded = self._code.artifact.coded["abort"]
        undo = [c for c, (saved, _) in zip(coded, self.program.abort) if saved < failed]
        if undo:
            self._table(undo)()

    def _settle(self, table: Table, status: int) -> None:
        try:
            table.settle(status)
        except BaseException:
            if status != pool.ATTEND:
                if self._experts:
                    self._experts.failed()
                self._undo(table.failed)
            raise

    def fast_call(self, wanted: FastCall) -> Callable[..., Any] | None:
        """FastCalls protocol (rlx.host.gate). Bound arrays are read without a copy if kernels can."""
        from rlx.host import calls  # imported late: it compiles code that most programs do not need

        if calls.refusal() is not None:
            return None
        decls = [self.decls[i] for i in self.program.inputs if i != self.program.extent]
        bound = wanted.arrays if wanted.form == "none" else [None] * len(decls)
        here = {b.id: a.ctypes.data for b, a in zip(decls, bound) if a is not None and self._reads_in_place(b, a)}
        table = self._lasting("steps", "commit", given=here) if here else self._whole
        slots = [
            calls.Slot(b.name, b.shape.static, b.shape.dtype.numpy, here.get(b.id) or self.address(b.id), a, b.id in here)
            for b, a in zip(decls, bound)
        ]
        codes = [code for _, code in self._coded("steps", "commit")]
        python = self._experts is not None  # a step may call Python, on any thread
        alone = python or any(c.may_fail for c in codes)
        long = python or sum(c.work_ns for c in codes) > calls.GIL_NS
        taken = self.arena_ptr, self.arena_ptr + self.arena.size_bytes
        return calls.make(wanted, slots, taken, table.address, partial(self._settle, table), alone, long, pool.run_address())

    def _reads_in_place(self, b: BufferDecl, array: np.ndarray) -> bool:
        """Whether steps can read the bound array without a copy: it is laid out as the slot is, and its memory is not one of our
        regions. Not if steps write the input, if it is also an output, or if undoing after a failure reads it from the slot."""
        steps = self.program.steps + self.program.commit
        elsewhere = any(b.id in s.writes for s in steps) or any(b.id in s.args for _, s in self.program.abort)
        plain = type(array) is np.ndarray and array.flags.c_contiguous and array.flags.aligned and array.nbytes > 0
        output = any(o.buffer == b.id for o in self.program.outputs)
        return plain and not (elsewhere or output or memory.holds(array.ctypes.data, array.nbytes))

    def timed(self) -> tuple[Callable[[], Timeline], Callable[[], object]]:
        """Timed protocol (rlx.driver.backend)."""
        from rlx.backends.cpu.timing import Spans  # imported late: it compiles code that most programs do not need

        coded, threads = self._coded("steps", "commit"), self._pool.threads if self._pool else 1
        stride = max(self._code.scratch_stride, SCRATCH_ALIGNMENT)  # not 0: the address of its scratch tells the thread
        scratch = memory.allocate(stride * threads, SCRATCH_ALIGNMENT)
        spans = Spans([code.tasks for _, code in coded], scratch.address, stride)
        table = self._table(coded, surroundings=(scratch, stride, self._pool), commits=True, spans=spans)
        self._tables.add(table)

        def run() -> Timeline:
            begin = time.perf_counter_ns()
            status = table.call()
            end = time.perf_counter_ns()
            if status:
                self._settle(table, status)
            return Timeline(begin, end, spans.rows())

        return run, self.run

    def run_commit(self) -> None:
        if self._exchange:
            try:
                self._exchange.exchanges.agree()
            except BaseException as e:  # noqa: BLE001  it is raised
                self._undo(len(self.program.steps))
                raise self._exchange.error(f"{self.program.name}: {AGREEING}", e)  # noqa: B904  it has its cause
        self._commit()

    def prepare(self, steps: Sequence[int], given: Mapping[int, np.ndarray] | None = None, alone: bool = False) -> None:
        """Run these steps of program.prepare, in this order. `given`: arrays to read instead of those buffers. `alone`: on this
        thread only, so that other threads can do the same concurrently."""
        arrays = {i: _aligned(self.decls[i], array) for i, array in (given or {}).items()}
        coded = [self._code.artifact.coded["prepare"][i] for i in steps]
        own = (memory.allocate(max(c.scratch_bytes for _, c in coded), SCRATCH_ALIGNMENT), 0, None) if alone else None
        self._table(coded, {i: array.ctypes.data for i, array in arrays.items()}, own)()

    def clone(self) -> CpuExecutable:
        """Shares code, constants and params; owns arena and handles (copied with their current contents)."""
        other = CpuExecutable(self._code, self.params, self.handles.copy(), self._transport)
        memory.MEMORY.copy(other.arena.block, self.arena.block)
        return other

    # -- addresses and tables

    def _lay_out_params(self) -> None:
        """Allocate the params that are kept and missing in the store as one region, in order of use. The region gets huge pages,
        which small params would not get separately (on 4 KB pages, weights stream a third slower)."""
        used = dict.fromkeys(a for phase in ("steps", "commit") for s in self.program.phases[phase] for a in s.args)
        used |= dict.fromkeys(id for id in self.program.params if self.decls[id].name in self.program.kept)
        new = [b for b in map(self.decls.__getitem__, used) if b.region in (Region.PARAM, Region.PREPARED)]
        new = [b for b in new if b.name not in self.params.entries]
        starts = [0, *accumulate(-(-b.nbytes // memory.ALIGNMENT) * memory.ALIGNMENT for b in new)]
        if starts[-1] < memory.HUGE_PAGE:
            return
        whole = memory.allocate(starts[-1])
        for b, at in zip(new, starts):
            self.params.get(b.name, b.nbytes, partial(whole.part, at))

    @cached_property
    def _steps(self) -> Table:
        return self._lasting("steps")

    @cached_property
    def _commit(self) -> Table:
        return self._lasting("commit")

    def _coded(self, *phases: str) -> list[tuple[Step, Rendered]]:
        return [c for phase in phases for c in self._code.artifact.coded[phase]]

    def _lasting(self, *phases: str, given: Mapping[int, int] | None = None) -> Table:
        """A table of these phases that use_handles keeps current."""
        table = self._table(self._coded(*phases), given, commits="commit" in phases)
        self._tables.add(table)
        return table

    def _table(
        self, coded: Sequence[tuple[Step, Rendered]], given: Mapping[int, int] | None = None,
        surroundings: Surroundings | None = None, commits: bool = False, spans: Spans | None = None,
    ) -> Table:  # fmt: skip
        """These steps, ready to run. `given`: addresses to use instead, for some buffers. `surroundings`: scratch and threads
        other than those of runs. `commits`: the steps of a run are followed by those of its commit. `spans`: measure each task.

        PlanError: a kernel's arguments are larger than the buffers it is given. Machine code cannot check: it sees no sizes."""
        rows, ends = Rows(), len(self.program.steps)
        exchange = self._exchange if any(step.kernel.collective for step, _ in coded) else None
        runs = bool(coded) and bool(ends) and coded[0][0] is self.program.steps[0]
        experts = self._experts.around if self._experts and runs else {}
        if exchange:
            rows.add(-1, *exchange.begin())
        for at, ((step, code), concurrent, short) in enumerate(zip(coded, joined := joins(coded), quiet(coded, joined))):
            if exchange and at == ends:
                rows.add_all(at, (commits and exchange.agreement(), exchange.release()))
            before, behind = experts.get(at, ((), ()))
            rows.add_all(at, before)
            name, sizes = step.kernel.name, [b.size * b.dtype.itemsize for b in step.kernel.buffers]
            if len(sizes) != len(step.args) or any(n > self.decls[a].nbytes for n, a in zip(sizes, step.args)):
                raise PlanError(f"{self.program.name}: the buffers of {name} are larger than its arguments {step.args}")
            if step.kernel.flow is not None:
                args = [Place((given or {}).get(a) or self.address(a), a if a in self.entries else None) for a in step.args]
                self._add_flow(rows, at, step, args, spans)
                continue
            together = exchange and step.kernel.collective
            function, *more = exchange.step(together) if together else [self._code.library.address(code.symbol)]  # type: ignore[union-attr]
            head = [function, spans.address(at)] if spans else []
            rows.moving += [(at, a) for at, a in enumerate(step.args, len(rows.addresses) + len(head)) if a in self.entries]
            given_or_own = [(given or {}).get(a) or self.address(a) for a in step.args]
            row = (spans.function if spans else function, *head, *given_or_own, *more)
            which = code.streamed - 1
            stream = Stream(given_or_own[which], self.decls[step.args[which]].nbytes) if code.streamed else None
            rows.add(
                at, *row, kernel=step.kernel, tasks=code.tasks, joined=concurrent, stream=stream, again=code.keeps, quiet=short
            )
            rows.add_all(at + 1, behind)
        if exchange and len(coded) <= ends:
            rows.add_all(len(coded), (commits and exchange.agreement(), exchange.release()))
        table = Table(self.program.name, rows, surroundings or (self._scratch, self._code.scratch_stride, self._pool), exchange)
        table.experts = self._experts if experts else None
        return table

    def _add_flow(self, rows: Rows, at: int, step: Step, args: Sequence[Place], spans: Spans | None) -> None:
        """The rows of a step that runs sub-programs; a measured one has its span around them."""
        from rlx.backends.cpu.flow import FlowRows  # imported late: it generates code that most programs do not need

        made = FlowRows(rows, at, self._code.artifact.coded, self._code.library.address)
        if spans:
            rows.add(at, spans.around[0], spans.address(at), kernel=step.kernel)
        made.add(self.program, "", step, args)
        if spans:
            rows.add(at, spans.around[1], spans.address(at), kernel=step.kernel)


def _exchange_calls(artifact: CpuArtifact, transport: SymmetricTransport | None) -> ExchangeCalls:
    from rlx.backends.cpu.exchange import ExchangeCalls  # imported late: it generates code that most programs do not need
    from rlx.driver.exchange import Exchanges

    return ExchangeCalls(Exchanges(artifact.program, transport, [code.may_fail > 0 for _, code in artifact.coded["steps"]]))


def _aligned(decl: BufferDecl, array: np.ndarray) -> np.ndarray:
    """The array itself if machine code can read it where it is (kernels load params by elements), else an aligned copy."""
    check_fits(decl, array)
    if array.flags.c_contiguous and array.ctypes.data % max(array.itemsize, 1) == 0:
        return array
    copy = memory.allocate(array.nbytes).data.view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy
