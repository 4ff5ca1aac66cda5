"""A compiled program as an artifact, and loaded: its regions, argument tables, and a run that is one call into machine code.

Every address is fixed when a program is loaded. `run` hands one table of {function, arguments, tasks} to the worker
pool (rlx.backends.cpu.pool): the steps, then the commit, which is reached only if no Check failed. A run allocates nothing.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property, partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, TypeAlias
from weakref import WeakSet

import numpy as np

from rlx.backends.cpu import memory, pool
from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.memory import Region as HostRegion
from rlx.backends.shared.loaded import Loaded, check_fits, constants_of
from rlx.driver.backend import Timeline
from rlx.driver.exchange import Exchanges
from rlx.driver.experts import ExpertTiers, ResidencyStats
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import IndexRangeError, PlanError
from rlx.host.gate import FastCall
from rlx.host.jit import load
from rlx.ir.kernel import STATUS, Kernel
from rlx.ir.program import BufferDecl, Program, Region, Step, kernel_labels
from rlx.records import record

if TYPE_CHECKING:
    from rlx.backends.cpu.exchange import ExchangeCalls
    from rlx.backends.cpu.experts import ExpertSteps
    from rlx.backends.cpu.timing import Spans

Surroundings: TypeAlias = "tuple[HostRegion, int, pool.Pool | None]"  # scratch, its bytes per thread, the threads
SCRATCH_ALIGNMENT = 128  # bytes; threads then share no cache line, nor a pair of lines that is prefetched together
SHARED_NS = 20_000  # groups of single tasks with this much estimated work are shared by threads: waking one costs time
BEGINNING, AGREEING = "the barrier before the first step", "the barrier after the last step"


@record
class CpuArtifact:
    """Machine code of one program: `codes`, each distinct kernel once, with its object code at the same index of `objects`.
    `coded`: the steps of a phase, each with its code. `sections`: of steps that prepare the weights of experts, the code for one
    expert (rlx.ir.sections), where there is one. `written`: reads the texts of an artifact from the cache, whose codes have
    none."""

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
        made = [(image, c.symbol) for image, c in zip(artifact.objects, artifact.codes) if image]  # collectives have no code
        objects, symbols = [image for image, _ in made], [symbol for _, symbol in made]
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
        self._tables: WeakSet[_Table] = WeakSet()  # tables that outlive a call
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

    def _settle(self, table: _Table, status: int) -> None:
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
    def _steps(self) -> _Table:
        return self._lasting("steps")

    @cached_property
    def _commit(self) -> _Table:
        return self._lasting("commit")

    def _coded(self, *phases: str) -> list[tuple[Step, Rendered]]:
        return [c for phase in phases for c in self._code.artifact.coded[phase]]

    def _lasting(self, *phases: str, given: Mapping[int, int] | None = None) -> _Table:
        """A table of these phases that use_handles keeps current."""
        table = self._table(self._coded(*phases), given, commits="commit" in phases)
        self._tables.add(table)
        return table

    def _table(
        self, coded: Sequence[tuple[Step, Rendered]], given: Mapping[int, int] | None = None,
        surroundings: Surroundings | None = None, commits: bool = False, spans: Spans | None = None,
    ) -> _Table:  # fmt: skip
        """These steps, ready to run. `given`: addresses to use instead, for some buffers. `surroundings`: scratch and threads
        other than those of runs. `commits`: the steps of a run are followed by those of its commit. `spans`: measure each task.

        PlanError: a kernel's arguments are larger than the buffers it is given. Machine code cannot check: it sees no sizes."""
        rows, moving, ends = _Rows(), list[tuple[int, int]](), len(self.program.steps)
        exchange = self._exchange if any(step.kernel.collective for step, _ in coded) else None
        runs = bool(coded) and bool(ends) and coded[0][0] is self.program.steps[0]
        experts = self._experts.around if self._experts and runs else {}
        if exchange:
            rows.add(-1, *exchange.begin())
        for at, ((step, code), concurrent) in enumerate(zip(coded, joins(coded))):
            if exchange and at == ends:
                rows.add_all(at, (commits and exchange.agreement(), exchange.release()))
            before, behind = experts.get(at, ((), ()))
            rows.add_all(at, before)
            name, sizes = step.kernel.name, [b.size * b.dtype.itemsize for b in step.kernel.buffers]
            if len(sizes) != len(step.args) or any(n > self.decls[a].nbytes for n, a in zip(sizes, step.args)):
                raise PlanError(f"{self.program.name}: the buffers of {name} are larger than its arguments {step.args}")
            together = exchange and step.kernel.collective
            function, *more = exchange.step(together) if together else [self._code.library.address(code.symbol)]  # type: ignore[union-attr]
            head = [function, spans.address(at)] if spans else []
            moving += [(place, a) for place, a in enumerate(step.args, len(rows.addresses) + len(head)) if a in self.entries]
            given_or_own = ((given or {}).get(a) or self.address(a) for a in step.args)
            row = (spans.function if spans else function, *head, *given_or_own, *more)
            rows.add(at, *row, kernel=step.kernel, tasks=code.tasks, joined=concurrent)
            rows.add_all(at + 1, behind)
        if exchange and len(coded) <= ends:
            rows.add_all(len(coded), (commits and exchange.agreement(), exchange.release()))
        table = _Table(self.program.name, rows, surroundings or (self._scratch, self._code.scratch_stride, self._pool), exchange)
        table.experts, table.moving = self._experts if experts else None, moving
        return table


class _Rows:
    """The rows of a table while it is made. `steps`: (function, index of its first argument in `addresses`, tasks, whether the
    row is in the group of the previous one). `kernels`: None for rows that are no steps of the program. `places`: the step of the
    program at which, or in front of which, a row stands; -1: before the first."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, int, bool]] = []
        self.addresses: list[int] = []
        self.kernels: list[Kernel | None] = []
        self.places: list[int] = []

    def add(
        self, place: int, function: int, *addresses: int, kernel: Kernel | None = None, tasks: int = 1, joined: bool = False
    ) -> None:
        self.steps.append((function, len(self.addresses), tasks, joined))
        self.addresses += addresses
        self.kernels.append(kernel)
        self.places.append(place)

    def add_all(self, place: int, rows: Iterable[Sequence[int] | Literal[False] | None]) -> None:
        for row in rows:
            if row:
                self.add(place, *row)


class _Table:
    """The table of steps that the executor runs.

    `call()` runs all of them and returns 0, or a status for `settle`. A table keeps the scratch alive, but no buffer."""

    def __init__(self, program: str, rows: _Rows, surroundings: Surroundings, exchange: ExchangeCalls | None = None) -> None:
        """`exchange`: keeps the functions of collectives alive."""
        self._exchange = exchange
        self.experts: ExpertSteps | None = None  # those of the rows, if any
        self._program, (self._scratch, stride, self._pool) = program, surroundings
        self._kernels, self._places = rows.kernels, rows.places
        self.moving: list[tuple[int, int]] = []  # (index in `addresses`, buffer) of each argument that is a handle
        self._addresses = np.array(rows.addresses, np.int64)
        self._steps = np.array(rows.steps, np.int64).reshape(-1, 4)  # pool.Step
        self._steps[:, 3] = tasks_after([tasks for _, _, tasks, _ in rows.steps], [joined for *_, joined in rows.steps])
        most = self._steps[:, 2:].sum(axis=1).max(initial=0)
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


def joins(coded: Sequence[tuple[Step, Rendered]]) -> list[bool]:
    """For each step, whether it joins the group of the previous step: the compiler's groups, where threads pay off."""
    groups: list[list[Rendered]] = []
    for step, code in coded:
        groups = [*groups[:-1], [*groups[-1], code]] if step.concurrent and groups else [*groups, [code]]
    worth = [any(c.tasks > 1 for c in group) or sum(c.work_ns for c in group) > SHARED_NS for group in groups]
    return [i > 0 and found for group, found in zip(groups, worth) for i in range(len(group))]


def tasks_after(tasks: Sequence[int], joined: Sequence[bool]) -> list[int]:
    """For each step, the tasks of the later steps in its group (pool.Step)."""
    found, after = [], 0
    for count, joins_previous in zip(reversed(tasks), reversed(joined)):
        found.append(after)
        after = count + after if joins_previous else 0
    return found[::-1]


def _exchange_calls(artifact: CpuArtifact, transport: SymmetricTransport | None) -> ExchangeCalls:
    from rlx.backends.cpu.exchange import ExchangeCalls  # imported late: it generates code that most programs do not need

    return ExchangeCalls(Exchanges(artifact.program, transport, [code.may_fail > 0 for _, code in artifact.coded["steps"]]))


def _aligned(decl: BufferDecl, array: np.ndarray) -> np.ndarray:
    """The array itself if machine code can read it where it is (kernels load params by elements), else an aligned copy."""
    check_fits(decl, array)
    if array.flags.c_contiguous and array.ctypes.data % max(array.itemsize, 1) == 0:
        return array
    copy = memory.allocate(array.nbytes).data.view(array.dtype).reshape(array.shape)
    np.copyto(copy, array)
    return copy
