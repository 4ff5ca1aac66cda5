"""A program loaded on a GPU: its memory, its kernels, and a run as the replay of one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from rlx.backends.cuda.code import CudaCode, key_of
from rlx.backends.cuda.gpu import CudaMemory, check
from rlx.backends.cuda.render import may_fail
from rlx.backends.shared.loaded import POISON, Loaded, check_fits
from rlx.driver.exchange import Exchanges
from rlx.driver.handles import HandleStore
from rlx.driver.memory import Block, bytes_of
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import CollectiveError, IndexRangeError, PlanError
from rlx.ir.kernel import STATUS
from rlx.ir.program import Program, Region, Step, kernel_labels

Numbered = Sequence[tuple[int, Step]]  # steps of one launch, with their numbers
NEVER_WRITTEN = (Region.PARAM, Region.PREPARED, Region.CONSTANT)  # by the kernels of a run


@dataclass(frozen=True)
class CudaArtifact:
    """Artifact protocol (rlx.driver.backend): the code of each launch by the key_of its kernels. `launches`: those of a run, as
    numbers of steps."""

    program: Program
    codes: Mapping[str, CudaCode]
    launches: tuple[tuple[int, ...], ...]
    written: Callable[[], dict[str, str]] | None = None

    def texts(self) -> dict[str, str]:
        if self.written is not None:
            return self.written()
        phases, labels = self.program.phases, kernel_labels(self.program)
        launches = [[self.program.steps[n].kernel for n in group] for group in self.launches]
        launches += [[s.kernel] for phase in ("prepare", "commit", "abort") for s in phases[phase]]
        return {labels[k]: self.codes[key_of(kernels)].text for kernels in reversed(launches) for k in kernels}


class CudaExecutable(Loaded):
    """Executable protocol (rlx.driver.backend) in the memory of a GPU. All work of a process goes to one stream of the GPU."""

    def __init__(
        self, artifact: CudaArtifact, memory: CudaMemory, functions: Mapping[str, Any], params: ParamStore | None = None,
        handles: HandleStore | None = None, transport: SymmetricTransport | None = None,
        constants: Mapping[int, Block] | None = None,
    ) -> None:  # fmt: skip
        program, self.gpu, self._memory = artifact.program, memory.gpu, memory
        self.artifact, self.functions = artifact, functions
        super().__init__(program, params or ParamStore(), handles or HandleStore(), memory, constants)
        codes = artifact.codes.values()
        self._scratch = memory.allocate(max((c.scratch * c.blocks for c in codes), default=0))
        self._counters = memory.allocate(4 * max((c.counters for c in codes), default=0))  # zero between kernels
        self._status = memory.allocate(4 * max(1, len(program.steps)))
        self._may_fail = [may_fail(s.kernel) for s in program.steps]
        self.exchanges = Exchanges(program, transport, self._may_fail)
        for b in program.buffers:  # params are in the store from the start
            self.address(b.id)

    # -- buffers

    def use_handles(self, store: HandleStore) -> None:
        super().use_handles(store)
        self.__dict__.pop("_steps", None)
        self.__dict__.pop("_commit", None)

    def poison(self) -> None:
        """Fill memory with undefined contents with a pattern that shows up in results."""
        undefined = [self.block(b.id) for b in self.program.buffers if b.region in (Region.ARENA, Region.OUTPUT)]
        for block in (self._scratch, *undefined):
            self.device_memory.fill(block, POISON)

    def clone(self) -> CudaExecutable:
        shared = self.exchanges.transport, self.constants
        other = CudaExecutable(self.artifact, self._memory, self.functions, self.params, self.handles.copy(), *shared)
        self.device_memory.copy(other.arena.block, self.arena.block)
        return other

    def allocations(self) -> dict[str, int]:
        return dict(self.gpu.allocated)

    def memory(self) -> dict[str, int]:
        code = sum(len(c.cubin) for c in self.artifact.codes.values())
        return super().memory() | {"scratch": self._scratch.nbytes + self._counters.nbytes + self._status.nbytes, "code": code}

    # -- running

    def prepare(self, steps: Sequence[int], given: Mapping[int, np.ndarray] | None = None, alone: bool = False) -> None:
        held: dict[int, Block] = {}
        for buffer, array in (given or {}).items():
            check_fits(self.decls[buffer], array)
            held[buffer] = self.device_memory.allocate(array.nbytes)
            self.device_memory.copy_in(held[buffer], bytes_of(np.ascontiguousarray(array)))
        for i in steps:
            self._launch([(0, self.program.prepare[i])], {buffer: block.address for buffer, block in held.items()})
        if held:
            self.gpu.wait()  # before their memory is freed

    def run(self) -> None:
        self.run_steps()
        if self.exchanges.agreement:
            self._agree()
        self._commit()

    def run_steps(self) -> None:
        done = -1
        try:
            self.exchanges.begin()
            for part in self._steps:
                done = part.first
                part.run()
            self._check_status()
        except (IndexRangeError, CollectiveError) as e:
            if isinstance(e, IndexRangeError):
                self.exchanges.give_up()
            self._undo(len(self.program.steps) if isinstance(e, IndexRangeError) else done)
            raise
        finally:
            self.exchanges.release()

    def run_commit(self) -> None:
        self._agree()
        self._commit()

    def run_abort(self) -> None:
        self.exchanges.give_up()
        self._undo(len(self.program.steps))

    def run_refuse(self) -> None:
        self.exchanges.refuse()

    def _agree(self) -> None:
        try:
            self.exchanges.agree()
        except CollectiveError:
            self._undo(len(self.program.steps))
            raise

    def _undo(self, failed: int) -> None:
        """Undo the in-place updates made by the steps before `failed`."""
        for at, step in self.program.abort:
            if at < failed:
                self._launch([(0, step)])

    def _check_status(self) -> None:
        """IndexRangeError: a Check of a step failed."""
        if not any(self._may_fail):
            return
        found = np.zeros(max(1, len(self.program.steps)), np.int32)
        self.device_memory.copy_out(self._status, bytes_of(found))
        if found.any():
            self.device_memory.fill(self._status, 0)
            at = int(np.flatnonzero(found)[0])
            kernel, why = self.program.steps[at].kernel, STATUS[int(found[at])]
            where = f"{kernel.name} ({' '.join(kernel.origin)})"
            raise IndexRangeError(f"{self.program.name}: {why} in {where}; nothing was committed")

    @cached_property
    def _steps(self) -> list[Replay | Exchange]:
        """The steps between collectives as graphs, and the collectives."""
        parts: list[Replay | Exchange] = []
        for group in self.artifact.launches:
            steps = [(n, self.program.steps[n]) for n in group]
            if steps[0][1].kernel.collective:
                parts.append(Exchange(self, *steps[0]))
            elif parts and isinstance(parts[-1], Replay):
                parts[-1].launches.append(steps)
            else:
                parts.append(Replay(self, group[0], [steps]))
        return parts

    @cached_property
    def _commit_part(self) -> Replay:
        return Replay(self, -1, [[(0, step)] for step in self.program.commit])

    def _commit(self) -> None:
        if self.program.commit:
            self._commit_part.run()

    def arguments(self, step: Step, given: Mapping[int, int], more: Sequence[int]) -> list[int]:
        """The addresses that a step's kernel takes. PlanError: its arguments are larger than the buffers it is given."""
        sizes = [b.size * b.dtype.itemsize for b in step.kernel.buffers]
        if len(sizes) != len(step.args) or any(n > self.decls[a].nbytes for n, a in zip(sizes, step.args)):
            raise PlanError(f"{self.program.name}: the buffers of {step.kernel.name} are larger than its arguments {step.args}")
        return [*(given.get(a) or self.address(a) for a in step.args), *more]

    def _launch(self, steps: Numbered, given: Mapping[int, int] | None = None, early: bool = False) -> None:
        code = self.artifact.codes[key_of([step.kernel for _, step in steps])]
        if code.blocks:
            arguments: list[int] = []
            for (number, step), names in zip(steps, code.more):
                known = code.early is not None and self.decls[step.args[code.early]].region in NEVER_WRITTEN
                more = {
                    "scratch": self._scratch.address, "counters": self._counters.address,
                    "status": self._status.address + 4 * number, "early": int(known),
                }  # fmt: skip
                arguments += self.arguments(step, given or {}, [more[name] for name in names])
            maps = [self.gpu.tensor_map(m, arguments[m.argument]) for m in code.maps]
            self.gpu.launch(self.functions[code.name], code.blocks, code.threads, code.shared, arguments, maps, early)


class Exchange:
    """Step `first`, a collective, which the driver performs on host arrays."""

    def __init__(self, owner: CudaExecutable, first: int, step: Step) -> None:
        self.owner, self.first, self.step = owner, first, step

    def run(self) -> None:
        own, kernel = self.owner, self.step.kernel
        own._check_status()
        arrays = [np.empty(b.size, b.dtype.numpy) for b in kernel.buffers]
        blocks = [own.block(a) for a in self.step.args]
        for array, block in zip(arrays, blocks):
            own.device_memory.copy_out(block.part(0, array.nbytes), bytes_of(array))
        assert kernel.collective
        own.exchanges.perform(kernel.collective, *arrays)
        for array, block, b in zip(arrays, blocks, kernel.buffers):
            if b.writable:
                own.device_memory.copy_in(block.part(0, array.nbytes), bytes_of(array))


class Replay:
    """The kernels of the steps from number `first` on as one CUDA graph, made at the first run."""

    def __init__(self, owner: CudaExecutable, first: int, launches: list[Numbered]) -> None:
        self.owner, self.first, self.launches = owner, first, launches
        self._graph: Any = None

    def run(self) -> None:
        gpu = self.owner.gpu
        stream = gpu.use()
        if self._graph is None:
            self._graph = self._captured(stream)
        check(gpu.driver.cuGraphLaunch(self._graph, stream), "replaying a run")

    def _captured(self, stream: Any) -> Any:
        gpu = self.owner.gpu
        check(
            gpu.driver.cuStreamBeginCapture(stream, gpu.driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED),
            "recording a run",
        )
        try:
            for n, steps in enumerate(self.launches):
                self.owner._launch(steps, early=n > 0)
        finally:
            graph = check(gpu.driver.cuStreamEndCapture(stream), "recording a run")
        made = check(gpu.driver.cuGraphInstantiate(graph, 0), "recording a run")
        check(gpu.driver.cuGraphDestroy(graph), "recording a run")
        return made

    def __del__(self) -> None:
        if self._graph is not None:
            self.owner.gpu.driver.cuGraphExecDestroy(self._graph)


__all__ = ["CudaArtifact", "CudaExecutable"]
