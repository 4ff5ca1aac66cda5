"""A program loaded on a GPU: its memory, its kernels, and a run as the replay of one CUDA graph.

Runs are asynchronous. A failed Check sets a flag of the HandleStore, and the kernels behind it that change a state, or what the
undoing needs, do nothing where the flag is set: neither those of the same run nor those of runs queued behind it. The host undoes
the run when it waits for it, and clears the flag.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np

from rlx.backends.cuda.arrays import Export, adopt
from rlx.backends.cuda.code import CudaCode
from rlx.backends.cuda.gpu import Functions
from rlx.backends.cuda.memory import CudaMemory
from rlx.backends.cuda.runs import CODE, FED, STATUS, Chains, CudaRun, Exchange, Launch, Numbered, Replay, Ring, Watch, guarded
from rlx.backends.cuda.schedule import ALONE, BESIDE, LARGEST, RESERVED
from rlx.backends.cuda.staging import SMALL
from rlx.backends.cuda.transfers import Download, Upload
from rlx.backends.shared.loaded import POISON, check_fits
from rlx.backends.shared.transacted import Transacted
from rlx.driver.backend import Timeline
from rlx.driver.experts import ResidencyStats, TierStats
from rlx.driver.foreign import DeviceArray
from rlx.driver.handles import HandleStore
from rlx.driver.memory import Block, bytes_of
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import IndexRangeError, PlanError
from rlx.host.gate import FastCall
from rlx.ir import kernel as kernel_ir
from rlx.ir.program import NEVER_WRITTEN, Program, Region, Step, kernel_labels
from rlx.ir.shape import Shape
from rlx.records import record

if TYPE_CHECKING:
    from rlx.backends.cuda.experts import CudaTiers
    from rlx.backends.cuda.routed import Experts

OF_STORE = ("_ring", "_fed", "_whole", "_steps", "_commits")  # what has addresses of a HandleStore
THREADS_EACH, SPREAD = 2048, 6  # resident threads of a multiprocessor; blocks of one, at most, that are made to spread
COPY_BYTES = 256 * 16  # bytes that a block of rlx_copy moves at once
COPY_BLOCKS = 1024  # at most


LAUNCHED = ("steps", "commit")  # phases whose steps share launches
Groups = tuple[tuple[int, ...], ...]  # the steps of each launch


def alone(steps: Sequence[Step]) -> Groups:
    return tuple((n,) for n in range(len(steps)))


@record
class CudaArtifact:
    """Artifact protocol (rlx.driver.backend). `coded`: by phase, the code of each step, or of each launch. `launches`: those of
    LAUNCHED, as numbers of steps. `support`: the machine code of support.h. `sections`: of steps that prepare weights of experts,
    the code for one expert. `apart`: why steps of a token are in no chain (chain.py)."""

    program: Program
    coded: Mapping[str, Sequence[CudaCode]]
    launches: Mapping[str, Groups]
    support: bytes
    sections: Mapping[int, CudaCode] = field(default_factory=dict)
    written: Callable[[], dict[str, str]] | None = None
    apart: Mapping[int, str] = field(default_factory=dict)

    @property
    def codes(self) -> list[CudaCode]:
        """Each once."""
        return list({c.name: c for codes in (*self.coded.values(), self.sections.values()) for c in codes}.values())

    def texts(self) -> dict[str, str]:
        if self.written is not None:
            return self.written()
        labels, texts = kernel_labels(self.program), {}
        for name, steps in self.program.phases.items():
            groups = self.launches[name] if name in LAUNCHED else alone(steps)
            for group, code in zip(groups, self.coded[name], strict=True):
                why = f"// not in a chain: {self.apart[group[-1]]}\n" if name == "steps" and group[-1] in self.apart else ""
                texts |= {labels[steps[n].kernel]: why + code.text for n in group}
        return {label: texts[label] for label in labels.values()}


def spaced(codes: Sequence[CudaCode], multiprocessors: int) -> Iterator[CudaCode]:
    """The launches of a run, with shared memory by which every multiprocessor gets one block of each product (gemv_ring.py). No
    two blocks ALONE (or LONG) fit, so they spread, whatever is there already. The next launch may have less where every
    multiprocessor has such a block: then one block fits beside each, and starts before the one in front ends. It only takes
    bandwidth from a LONG one; a LONG one would take it from the product in front, if it started beside attention already.
    Small blocks behind those that have a multiprocessor each (attention, products) have some by which they spread evenly (apart):
    they would all go to the multiprocessors that are free first. Beside those that such products have, there must be room."""
    full = alone = False
    least = 2 if any(code.shared in BESIDE for code in codes) else 1
    for code in codes:
        beside = full and code.shared in BESIDE
        full = not beside and code.shared == ALONE and code.blocks >= multiprocessors
        room = spread(code, multiprocessors, least) if alone else 0
        alone = 2 * code.shared > LARGEST
        yield replace(code, shared=BESIDE[code.shared] if beside else room or code.shared)


def spread(code: CudaCode, multiprocessors: int, least: int) -> int:
    """Bytes of shared memory by which no multiprocessor has room for more blocks than it must take; 0: none is asked for."""
    each = -(-code.blocks // multiprocessors)
    small = not code.shared and len(code.stages) <= 1 and least <= each <= SPREAD and each * code.threads <= THREADS_EACH
    return (LARGEST + RESERVED) // (each + 1) if small else 0


class CudaExecutable(Transacted):
    """Executable protocol (rlx.driver.backend) in the memory of a GPU. All work of a process goes to one stream of the GPU."""

    asynchronous = True

    def __init__(
        self, artifact: CudaArtifact, memory: CudaMemory, functions: Functions, params: ParamStore | None = None,
        handles: HandleStore | None = None, transport: SymmetricTransport | None = None,
        constants: Mapping[int, Block] | None = None,
    ) -> None:  # fmt: skip
        program, self.gpu, self._memory = artifact.program, memory.gpu, memory
        self._uploads: dict[int, Upload] = {}
        self._downloads: dict[tuple[int, ...], Download] = {}
        self._ring: Ring | None = None
        self._graphs: WeakKeyDictionary[HandleStore, dict[str, Any]] = WeakKeyDictionary()  # of stores that were used before
        self.starters: WeakSet[Any] = WeakSet()  # of machine code calls
        self.artifact, self.functions = artifact, functions
        order = [n for group in artifact.launches["steps"] for n in group]
        names = [more for code in artifact.coded["steps"] for more in code.more or [()]]
        self.checks = {n: i for i, n in enumerate(n for n, more in zip(order, names, strict=True) if "status" in more)}
        may_fail = [n in self.checks for n in range(len(order))]
        super().__init__(program, params, handles, memory, transport, may_fail, constants)
        sizes = [size for code in artifact.coded["steps"] for size in code.stages or (1,)]
        turns = [turn for turn, size in enumerate(sizes) for _ in range(size)]
        self._turn = dict(zip(order, turns, strict=True))  # step -> number of its stage
        self._scratch = memory.allocate(max((c.scratch * c.blocks for c in artifact.codes), default=0))
        self._counters = memory.allocate(4 * max((c.counters for c in artifact.codes), default=0))  # zero between kernels
        self._statuses = memory.allocate(16 * (len(self.checks) + 1))  # of `checks`; the last one is of prepare
        self._guarded, self.kept = guarded(program, self.decls)
        self._chains = Chains(memory, self.step_launches)
        self.experts = self._own_experts() if program.routers else None
        for b in program.buffers:  # params are in the store from the start
            self.address(b.id)
        self._watch()

    # -- buffers

    def use_handles(self, store: HandleStore) -> None:
        self._memory.watch(store, Watch)  # before anything changes: there may be no room for it
        left = self.handles
        super().use_handles(store)
        self.stale()
        self._graphs[left] = {name: vars(self).pop(name) for name in OF_STORE if name in vars(self)}
        vars(self).update({"_ring": None} | self._graphs.pop(store, {}))
        self._watch()

    def _watch(self) -> None:
        """Make the statuses of the steps point to the flag of this store."""
        self.watch: Watch = self._memory.watch(self.handles, Watch)
        rows = np.zeros((len(self.checks) + 1, 2), np.int64)
        rows[:-1, 1] = self.watch.halt
        rows[-1, 1] = self._ahead.address + 4  # no flag: the word beside the code
        self._memory.copy_in(self._statuses, bytes_of(rows))
        self._chains.write(self._operands)

    def poison(self) -> None:
        """Fill memory with undefined contents with a pattern that shows up in results."""
        undefined = [self.block(b.id) for b in self.program.buffers if b.region in (Region.ARENA, Region.OUTPUT)]
        for block in (self._scratch, *undefined):
            self.device_memory.fill(block, POISON)

    def clone(self) -> CudaExecutable:
        shared = self.exchanges.transport, self.constants
        self._flush()
        other = CudaExecutable(self.artifact, self._memory, self.functions, self.params, self.handles.copy(), *shared)
        self.device_memory.copy(other.arena.block, self.arena.block)
        return other

    def allocations(self) -> dict[str, int]:
        return dict(self.gpu.allocated)

    def memory(self) -> dict[str, int]:
        own = self._scratch.nbytes + self._counters.nbytes + self._statuses.nbytes + self._chains.block.nbytes
        own += sum(x.nbytes for x in (*self._uploads.values(), *self._downloads.values()))
        code = sum(len(c.cubin) for c in self.artifact.codes) + len(self.artifact.support)
        found = super().memory() | {"scratch": own, "code": code}
        if (tiers := self.tiers) is not None:
            for purpose, region in (("params", Region.PARAM), ("prepared", Region.PREPARED)):
                found[purpose] -= tiers.offloaded(b.name for b in self.program.buffers if b.region is region)
        return found

    # -- experts: Tiered protocol (rlx.driver.experts)

    def _own_experts(self) -> Experts:
        from rlx.backends.cuda.routed import Experts  # imported late: most programs have no experts

        return Experts(self, self._memory)

    @property
    def tiers(self) -> CudaTiers | None:
        return self.experts.tiers if self.experts and max(self.experts.layers) >= 0 else None

    @property
    def tier_layers(self) -> Sequence[int]:
        return self.experts.layers if self.experts else ()

    def take_tier_stats(self) -> ResidencyStats:
        assert self.experts is not None
        tiers, log = self.experts.tiers, self.experts.log
        tiers.drain(wait=True)
        return log.tally.take() if log else ResidencyStats(TierStats(), TierStats())

    def stale(self) -> None:
        """Machine code asks for the graph again."""
        for start in self.starters:
            start.stale()

    def _tier_arguments(self, code: CudaCode, step: Step) -> dict[str, int]:
        if not code.experts:
            return {}
        buffer = step.args[code.experts[0]]
        part = self.experts.parts.get(buffer) if self.experts else None
        if part is None or part.store is None or part.slots.table is None:
            return {"slots": 0, "far": self.address(buffer)}
        return {"slots": part.slots.table.address, "far": part.store.ctypes.data}

    @property
    def ring(self) -> Ring:
        """Of the small inputs, and those that must stay where a run has failed."""
        self._ring = self._ring or self._made_ring()
        return self._ring

    def _made_ring(self) -> Ring:
        fed, room = [], FED
        for id in self.program.inputs:
            small = self.decls[id].nbytes <= (SMALL if id in self.kept else room)
            if id != self.program.extent and small:
                fed.append(self.decls[id])
                room -= self.decls[id].nbytes
        return Ring(self, fed, self.kept)

    def adopt(self, array: object) -> DeviceArray | None:
        return adopt(self.gpu, array)

    def export(self, buffer: int, shape: Shape) -> Export:
        return Export(self.gpu, DeviceArray(self.address(buffer), shape.static, shape.dtype.numpy, self.block(buffer)))

    def write(self, buffer: int, array: np.ndarray | DeviceArray) -> None:
        check_fits(self.decls[buffer], array)
        if self.experts and buffer in self.experts.parts and self.experts.write(buffer, array):
            return
        if isinstance(array, DeviceArray):
            self.ring.written.discard(buffer)
            if buffer in self.kept or buffer not in self.program.inputs:
                self.move(self.address(buffer), array.address, array.nbytes)
            else:
                self.gpu.copy(self.address(buffer), array.address, array.nbytes)
            self.gpu.hold(array)
        elif buffer in self.ring.inputs:
            self.ring.write(buffer, array)
        elif buffer in self.program.inputs and array.nbytes > SMALL and (buffer in self.kept or not self.gpu.idle()):
            found = self._uploads[buffer] = self._uploads.get(buffer) or Upload(self, array.nbytes)
            found.write(buffer, bytes_of(array))
        else:
            self.device_memory.copy_in(self.block(buffer), bytes_of(array))

    def read(self, buffer: int, start: int = 0, count: int | None = None) -> np.ndarray:
        if self.decls[buffer].region is Region.INPUT:
            self._flush()
        part = self.experts.parts.get(buffer) if self.experts else None
        if part is not None and part.store is not None:
            found = part.store.view((shape := self.decls[buffer].shape).dtype.numpy)
            return found.reshape(shape.static).copy() if count is None else found[start : start + count].copy()
        return super().read(buffer, start, count)

    def read_later(self, buffers: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        wanted = tuple(buffers)
        found = self._downloads[wanted] = self._downloads.get(wanted) or Download(self, wanted)
        return found.begin()

    def _flush(self) -> None:
        if self.ring.written:
            self.ring.flush(self)

    def copy(self, goal: int, source: int) -> None:
        self.move(self.address(goal), self.address(source), self.block(goal).nbytes)

    def move(self, to: int, source: int, nbytes: int) -> None:
        """Copy on the device. Cancelled behind a run that fails."""
        blocks = min(-(-nbytes // COPY_BYTES), COPY_BLOCKS)
        if blocks:
            self.support("rlx_copy", blocks, [to, source, nbytes, self.watch.halt])

    @property
    def _ahead(self) -> Block:
        """The status of prepare steps."""
        return self._statuses.part(16 * len(self.checks), 16)

    # -- running

    def prepare(
        self, steps: Sequence[int], given: Mapping[int, np.ndarray | DeviceArray] | None = None, alone: bool = False
    ) -> None:
        if self.experts:
            steps, given = self.experts.prepare(steps, dict(given or {}))
        held: dict[int, Block] = {}
        there: dict[int, int] = {}
        for buffer, array in (given or {}).items():
            check_fits(self.decls[buffer], array)
            if isinstance(array, DeviceArray):
                there[buffer] = array.address
                continue
            held[buffer] = self.device_memory.allocate(array.nbytes)
            self.device_memory.copy_in(held[buffer], bytes_of(np.ascontiguousarray(array)))
        checked = False
        for i in steps:
            code, addresses = self.artifact.coded["prepare"][i], there | {buffer: block.address for buffer, block in held.items()}
            self.launch(code, [(None, self.program.prepare[i])], {"status": self._ahead.address}, given=addresses)
            checked |= "status" in code.more[0]
        self.gpu.hold(*(a for a in (given or {}).values() if isinstance(a, DeviceArray)))
        if checked:
            self._check_prepared()
        if held:
            self.gpu.wait()  # before their memory is freed

    def _check_prepared(self) -> None:
        found = np.zeros(2, np.int32)
        self.device_memory.copy_out(self._ahead.part(0, 8), bytes_of(found))
        if found[0]:
            self.device_memory.fill(self._ahead.part(0, 8), 0)
            raise IndexRangeError(f"{self.program.name}: {kernel_ir.STATUS[int(found[0])]} where weights are prepared")

    def run(self) -> CudaRun | None:
        """None also where a run cannot fail: what reads its results comes behind it."""
        if self.exchanges.steps or self.program.collectives:
            self._flush()
            super().run()
            return None
        if len(self.ring.written) < len(self.ring.inputs):  # some keep what they held
            self._flush()
            number = self._whole.queue()
        else:
            self.ring.turns.value += 1
            self.ring.written.clear()
            number = self.first_replay.queue()
        return None if number is None else CudaRun(self, number)

    def timed(self) -> tuple[Callable[[], Timeline], Callable[[], None]]:
        """Timed protocol (rlx.driver.backend)."""
        from rlx.backends.cuda.timing import timed  # not needed by most programs

        return timed(self)

    def started(self, number: int | None) -> None:
        """Keep account of run `number` of the Watch, whose caller does not wait for it."""
        if number is not None:
            self.handles.queue.at_once(lambda: CudaRun(self, number))

    def fast_call(self, wanted: FastCall) -> Callable[..., Any] | None:
        from rlx.backends.cuda.calls import fast_call  # imported late: it compiles code that most programs do not need

        return fast_call(self, wanted)

    @property
    def commit_launches(self) -> list[Launch]:
        launches = zip(self.artifact.coded["commit"], self.artifact.launches["commit"], strict=True)
        return [(code, [(None, self.program.commit[n]) for n in group]) for code, group in launches]

    @cached_property
    def step_launches(self) -> list[Launch]:
        codes = spaced(self.artifact.coded["steps"], self.gpu.facts["multiprocessors"])
        launches = zip(codes, self.artifact.launches["steps"], strict=True)
        return [(code, [(n, self.program.steps[n]) for n in group]) for code, group in launches]

    @cached_property
    def _whole(self) -> Replay:
        return Replay(self, self.run_launches())

    def run_launches(self) -> list[Launch]:
        return [*self.step_launches, *self.commit_launches]

    @property
    def first_replay(self) -> Replay:
        """Of a run whose inputs are all given."""
        return self._fed if self.ring.inputs else self._whole

    @cached_property
    def _fed(self) -> Replay:
        return Replay(self, self._whole.launches, fed=True)

    def execute(self) -> None:
        self._flush()
        for part in self._steps:
            self.done = part.first
            part.run()
        self.done = len(self.program.steps)

    @cached_property
    def _steps(self) -> list[Replay | Exchange]:
        """The launches between collectives as graphs, and the collectives."""
        parts: list[Replay | Exchange] = []
        for code, steps in self.step_launches:
            if steps[0][1].kernel.collective:
                parts.append(Exchange(self, steps[0][0] or 0, steps[0][1]))
            elif parts and isinstance(parts[-1], Replay):
                parts[-1].launches.append((code, steps))
            else:
                parts.append(Replay(self, [(code, steps)]))
        return parts

    def settle(self, watch: Watch, number: int) -> None:
        """Wait for run `number`. IndexRangeError: it failed; `done` then says where."""
        if not watch.ended(number):
            self.gpu.until(lambda: watch.ended(number))
        if not watch.failed(number):
            return
        self.done = list(self.checks)[int(watch.report[STATUS])]
        kernel, why = self.program.steps[self.done].kernel, kernel_ir.STATUS[int(watch.report[CODE])]
        watch.reset()
        where = f"{kernel.name} ({' '.join(kernel.origin)})"
        raise IndexRangeError(f"{self.program.name}: {why} in {where}; nothing was committed")

    @cached_property
    def _commits(self) -> Replay:
        return Replay(self, self.commit_launches)

    def commit(self) -> None:
        if self.program.commit:
            self._commits.queue()

    def undo(self, failed: int) -> None:
        """Undo the updates that were saved by stages before that of step `failed`."""
        for (at, step), code in zip(self.program.abort, self.artifact.coded["abort"], strict=True):
            if self._turn[at] < self._turn.get(failed, len(self._turn)):
                self.launch(code, [(None, step)], {"status": 0, "halt": 0})

    # -- kernels

    def launch(
        self, code: CudaCode, steps: Numbered, own: Mapping[str, int] = MappingProxyType({}),
        given: Mapping[int, int] = MappingProxyType({}), early: bool = False, written: Collection[int] | None = None,
    ) -> None:  # fmt: skip
        """Queue a launch of a run or, where its step has no number, of the commit: behind a failure it changes no state. `own`:
        arguments behind the buffers instead of those of a run. `given`: addresses of arguments that are not in their own memory.
        `early`: as in Gpu.launch. `written`: the buffers that the launches of the graph in front may write."""
        arguments = self._operands(code, steps, own, given, early, written)
        if code.table:
            arguments = [self._chains.place(steps).address, *(arguments[n] for n in code.direct)]
        if code.blocks:
            maps = [self.gpu.tensor_map(m, arguments[m.argument]) for m in code.maps]
            self.gpu.launch(self.functions[code.name], code.blocks, code.threads, code.shared, arguments, maps, early)

    def _operands(
        self, code: CudaCode, steps: Numbered, own: Mapping[str, int] = MappingProxyType({}),
        given: Mapping[int, int] = MappingProxyType({}), early: bool = False, written: Collection[int] | None = None,
    ) -> list[int]:  # fmt: skip
        """The buffers of the steps, and the arguments behind those of each."""
        arguments: list[int] = []
        for (number, step), names in zip(steps, code.more):
            known = "early" in names and all(self._unwritten(step.args[n], written) for n in code.early)
            more = {
                "scratch": self._scratch.address, "counters": self._counters.address, "early": int(known and early),
                "status": 0 if number not in self.checks else self._statuses.address + 16 * self.checks[number],
                "halt": self.watch.halt if number is None or number in self._guarded else 0, **own,
                **self._tier_arguments(code, step),
            }  # fmt: skip
            arguments += self._arguments(step, given, [more[name] for name in names])
        return arguments

    def _unwritten(self, buffer: int, written: Collection[int] | None) -> bool:
        """Whether launches in front that may still run leave the buffer as it is."""
        region = self.decls[buffer].region
        return region in NEVER_WRITTEN or (region is Region.HANDLE and written is not None and buffer not in written)

    def _arguments(self, step: Step, given: Mapping[int, int], more: Sequence[int]) -> list[int]:
        """The addresses that a step's kernel takes. PlanError: its arguments are larger than the buffers it is given."""
        sizes = [b.size * b.dtype.itemsize for b in step.kernel.buffers]
        if len(sizes) != len(step.args) or any(n > self.decls[a].nbytes for n, a in zip(sizes, step.args)):
            raise PlanError(f"{self.program.name}: the buffers of {step.kernel.name} are larger than its arguments {step.args}")
        return [*(given.get(a) or self.address(a) for a in step.args), *more]

    def support(self, name: str, blocks: int, arguments: Sequence[int], threads: int = 256, early: bool = False) -> None:
        """Queue a kernel of support.h."""
        self.gpu.launch(self.functions[name], blocks, threads, 0, arguments, early=early)

    def end_arguments(self) -> list[int]:
        return [self.watch.halt, self._statuses.address, len(self.checks), self.watch.report.ctypes.data]


__all__ = ["CudaArtifact", "CudaExecutable"]
