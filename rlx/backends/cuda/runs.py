"""How runs are put on a GPU: CUDA graphs of their kernels, inputs through a ring in pinned memory, the account of failures."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import numpy as np

from rlx.backends.cuda.chain_writer import ARGUMENT, WORDS
from rlx.backends.cuda.code import CudaCode
from rlx.backends.cuda.gpu import Functions, Gpu
from rlx.backends.cuda.memory import CudaMemory
from rlx.driver.exchange import Exchanges
from rlx.driver.foreign import DeviceArray
from rlx.driver.handles import HandleStore
from rlx.driver.memory import Block, Memory, bytes_of
from rlx.driver.params import ParamStore
from rlx.errors import IndexRangeError, RlxError
from rlx.ir.program import BufferDecl, Program, Step

if TYPE_CHECKING:
    from rlx.backends.cuda.routed import Experts, RouterLog

Numbered = Sequence[tuple[int | None, Step]]  # steps of one launch, with their numbers; None: of the commit
Launch = tuple[CudaCode, Numbered]
NOWHERE: Mapping[int, int] = MappingProxyType({})
SLOTS = 64  # runs whose inputs may wait in a ring: a power of two
FED = 64 << 10  # bytes of inputs that a kernel reads from pinned memory; larger ones are copied by the copy engine
REMEMBERED = 16  # failures of a store, for runs that were cancelled by them and are waited for later
FAILED, STATUS, CODE, ENDED = range(4)  # words of Watch.report


class Owner(Protocol):
    """The parts of a CudaExecutable that the classes below use."""

    program: Program
    params: ParamStore
    handles: HandleStore
    exchanges: Exchanges
    decls: dict[int, BufferDecl]
    device_memory: Memory
    gpu: Gpu
    functions: Functions
    watch: Watch
    checks: dict[int, int]
    kept: set[int]
    done: int

    experts: Experts | None
    starters: WeakSet[Any]

    @property
    def ring(self) -> Ring: ...
    @property
    def first_replay(self) -> Replay: ...
    def block(self, buffer: int) -> Block: ...
    def address(self, buffer: int) -> int: ...
    def write(self, buffer: int, array: np.ndarray | DeviceArray) -> None: ...
    def adopt(self, array: object) -> DeviceArray | None: ...
    def move(self, to: int, source: int, nbytes: int) -> None: ...
    def run_launches(self) -> list[Launch]: ...
    def started(self, number: int | None) -> None: ...
    def settle(self, watch: Watch, number: int) -> None: ...
    def undo(self, failed: int) -> None: ...
    def launch(
        self, code: CudaCode, steps: Numbered, *, given: Mapping[int, int], early: bool, written: Collection[int]
    ) -> None: ...
    def support(self, name: str, blocks: int, arguments: Sequence[int], threads: int = 256, early: bool = False) -> None: ...
    def end_arguments(self) -> list[int]: ...


class Watch:
    """The failures of the runs on one HandleStore (rlx_watch and rlx_report in support.h). Runs that may fail are numbered from 1
    on; `started`: how many were queued."""

    def __init__(self, memory: CudaMemory) -> None:
        self._memory, self.gpu = memory, memory.gpu
        self.block = memory.allocate(16)
        self.report = self.gpu.pinned(32).view(np.int64)
        self.started = 0
        self._cancelled: list[tuple[int, int]] = []  # (the run that failed, the last one that it cancelled)

    @property
    def halt(self) -> int:
        """Address of the flag that stops what changes states."""
        return self.block.address

    def ended(self, number: int) -> bool:
        return bool(self.report[ENDED] >= number)

    def failed(self, number: int) -> bool:
        """Whether run `number`, which has ended, failed. RlxError: an earlier one did, and cancelled it."""
        first = int(self.report[FAILED])
        if first == number:
            return True
        if 0 < first < number or any(low < number <= high for low, high in self._cancelled):
            raise RlxError("a run queued before this one on the same states failed, so this one changed no state")
        return False

    def reset(self) -> None:
        """The host has been told of the failure: runs queued from now on are performed."""
        self._cancelled = [*self._cancelled[-REMEMBERED:], (int(self.report[FAILED]), self.started)]
        self.report[FAILED] = 0
        self._memory.fill(self.block.part(0, 4), 0)


class CudaRun:
    """Pending protocol (rlx.driver.stream): run `number` of a Watch."""

    def __init__(self, owner: Owner, number: int) -> None:
        self._owner, self._watch, self._number = owner, owner.watch, number

    def done(self) -> bool:
        return self._watch.ended(self._number)

    def wait(self) -> None:
        try:
            self._owner.settle(self._watch, self._number)
        except IndexRangeError:
            self._owner.undo(self._owner.done)
            raise


class Ring:
    """Inputs on their way to the arena. The host fills a slot of pinned memory; the first kernel of the run copies it (rlx_feed)
    and counts the slots it has taken."""

    def __init__(self, owner: Owner, inputs: Sequence[BufferDecl], kept: set[int]) -> None:
        """`kept`: inputs that stay as they are where a run has failed, since the undoing reads them."""
        self._gpu, memory = owner.gpu, owner.device_memory
        self.inputs, offset, rows = dict[int, int](), 0, []  # their places in a slot
        for b in inputs:
            rows.append((owner.address(b.id), offset, b.nbytes, b.id in kept))
            self.inputs[b.id] = offset
            offset += -(-max(b.nbytes, 1) // 16) * 16
        self.slot_bytes = offset
        self.memory = self._gpu.pinned(SLOTS * offset + 64)
        self.taken = self.memory[SLOTS * offset :][:8].view(np.int64)
        self.turns = ctypes.c_int64()  # slots given to runs
        self.written: set[int] = set()  # inputs that lie in the current slot
        self.table = memory.allocate(32 * len(rows) + 16)
        memory.copy_in(self.table.part(16, 32 * len(rows)), bytes_of(np.array(rows, np.int64)))
        ring = self.memory.ctypes.data
        self.arguments = [
            self.table.address + 16, len(rows), self.table.address, ring, offset, SLOTS, ring + SLOTS * offset, owner.watch.halt
        ]  # fmt: skip

    def slot(self, buffer: int, nbytes: int) -> np.ndarray:
        """The bytes of an input in the current slot. Waits until the run that used it has read it."""
        self.room()
        return self.memory[self.turns.value % SLOTS * self.slot_bytes + self.inputs[buffer] :][:nbytes]

    def room(self) -> None:
        turn = self.turns.value
        if turn - int(self.taken[0]) >= SLOTS:
            self._gpu.until(lambda: turn - int(self.taken[0]) < SLOTS)
            if turn - int(self.taken[0]) >= SLOTS:  # all that was queued has ended
                self.taken[0] = turn

    def write(self, buffer: int, array: np.ndarray) -> None:
        np.copyto(self.slot(buffer, array.nbytes), bytes_of(array))
        self.written.add(buffer)

    def flush(self, owner: Owner) -> None:
        """Copy inputs that were written without a run to the arena now."""
        for buffer in sorted(self.written):
            block = owner.block(buffer)
            owner.device_memory.copy_in(block, self.slot(buffer, block.nbytes).copy())  # pageable: read at once
        self.written.clear()


class Chains:
    """The memory of a run's chains (chain.py): the words of each, zero at first, and behind them the table of its operands."""

    def __init__(self, memory: CudaMemory, launches: Sequence[Launch]) -> None:
        self._memory = memory
        self._launches = [(code, steps) for code, steps in launches if code.table]
        self.block = memory.allocate(sum(code.held for code, _ in self._launches))
        self._places: dict[int | None, Block] = {}  # by their first step
        at = 0
        for code, steps in self._launches:
            self._places[steps[0][0]] = self.block.part(at, code.held)
            at += code.held
        memory.fill(self.block, 0)

    def place(self, steps: Numbered) -> Block:
        return self._places[steps[0][0]]

    def write(self, operands: Callable[[CudaCode, Numbered], Sequence[int]]) -> None:
        """The tables, of addresses that are those of the steps' `operands`."""
        for code, steps in self._launches:
            arguments, place = operands(code, steps), self.place(steps)
            entries = [arguments[n] if kind == ARGUMENT else n + place.address * (kind == WORDS) for kind, n in code.table]
            rows = np.array(entries, np.int64)
            self._memory.copy_in(place.part(code.words, rows.nbytes), bytes_of(rows))


class Replay:
    """Launches as one CUDA graph, made at the first run. `fed`: the graph begins with the kernel that takes the inputs from the
    ring. `given`: addresses of arguments that are not in their own memory."""

    def __init__(self, owner: Owner, launches: Sequence[Launch], fed: bool = False, given: Mapping[int, int] = NOWHERE) -> None:
        self.owner, self.launches, self.fed, self._given = owner, list(launches), fed, given
        self.first = (self.launches[0][1][0][0] or 0) if launches else 0
        self._graph: Any = None
        self._watched, self._epoch = False, 0  # known with the graph
        numbers = {n for _, steps in self.launches for n, _ in steps}
        self._whole = len(numbers - {None}) == len(owner.program.steps)  # if so, it logs what routers choose
        self._log: RouterLog | None = None

    def run(self) -> None:
        number = self.queue()
        if number is not None:
            self.owner.settle(self.owner.watch, number)

    def queue(self) -> int | None:
        """Start it. The number of the run in the Watch; None: it cannot fail."""
        gpu, experts = self.owner.gpu, self.owner.experts
        if experts is None:
            gpu.replay(self._graph if self._graph is not None else self.graph())
        else:
            with experts.queueing(self._whole):
                gpu.replay(self.graph())
        if not self._watched:
            return None
        self.owner.watch.started += 1
        return self.owner.watch.started

    @property
    def watched(self) -> bool:
        return any(n in self.owner.checks for _, steps in self.launches for n, _ in steps)

    def graph(self) -> Any:
        experts = self.owner.experts
        if self._graph is None or (experts and self._epoch != experts.tiers.epoch):
            gpu = self.owner.gpu
            if experts:
                self._epoch, self._log = experts.tiers.epoch, experts.log if self._whole else None  # before anything is recorded
            self._watched = self.watched
            self._graph = gpu.recorded(self._launch)
            weakref.finalize(self, _destroy, gpu, self._graph, self.owner.functions).atexit = False
        return self._graph

    def _launch(self) -> None:
        own = self.owner
        if self.fed:
            own.support("rlx_feed", 1, own.ring.arguments)
        written: set[int] = set()
        rings = self._log.rings if self._log is not None else []
        behind = [self._chosen(ring.routers) for ring in rings]
        for n, (code, steps) in enumerate(self.launches):
            early = (n > 0 or self.fed) and not code.waiting  # there may be no room for all beside the kernel in front
            own.launch(code, steps, given=self._given, early=early, written=written)
            written.update(*(step.writes for _, step in steps))
            for ring in (ring for ring, at in zip(rings, behind) if at == n):
                own.support("rlx_log", ring.blocks, [*ring.arguments, own.watch.halt], early=True)
        if self._watched:
            own.support("rlx_end", 1, own.end_arguments(), threads=1, early=True)

    def _chosen(self, routers: Collection[int]) -> int:
        """The launch behind which these routers have chosen, where they tell within the run; else the last."""
        assert self._log is not None
        if not self._log.inside:
            return len(self.launches) - 1
        return max(n for n, (_, steps) in enumerate(self.launches) for _, step in steps if {*step.writes} & {*routers})


def _destroy(gpu: Gpu, graph: Any, functions: Functions) -> None:
    """`functions`: loaded until now, since the graph launches them."""
    gpu.driver.cuGraphExecDestroy(graph)


class Exchange:
    """Step `first`, a collective, which the driver performs on host arrays."""

    def __init__(self, owner: Owner, first: int, step: Step) -> None:
        self.owner, self.first, self.step = owner, first, step

    def run(self) -> None:
        own, kernel = self.owner, self.step.kernel
        arrays = [np.empty(b.size, b.dtype.numpy) for b in kernel.buffers]
        blocks = [own.block(a) for a in self.step.args]
        for array, block in zip(arrays, blocks):
            own.device_memory.copy_out(block.part(0, array.nbytes), bytes_of(array))
        assert kernel.collective
        own.exchanges.perform(kernel.collective, *arrays)
        for array, block, b in zip(arrays, blocks, kernel.buffers):
            if b.writable:
                own.device_memory.copy_in(block.part(0, array.nbytes), bytes_of(array))


def guarded(program: Program, decls: Mapping[int, BufferDecl]) -> tuple[set[int], set[int]]:
    """The steps that must not run behind a failed one, and the inputs that must stay: they write states, or bytes that the
    undoing of the failed run reads."""
    states = set(program.handles)
    offsets = program.plan.offsets
    read = {a for _, step in program.abort for a in step.reads if a not in states}
    kept = [(offsets[a], offsets[a] + decls[a].nbytes) for a in read if a in offsets]

    def stays(buffer: int) -> bool:
        if buffer in states:
            return True
        at = offsets.get(buffer)
        return at is not None and any(at < high and low < at + decls[buffer].nbytes for low, high in kept)

    steps = {n for n, step in enumerate(program.steps) if any(map(stays, step.writes))}
    return steps, {b for b in program.inputs if stays(b)}


__all__ = ["FED", "Chains", "CudaRun", "Exchange", "Replay", "Ring", "Watch", "guarded"]
