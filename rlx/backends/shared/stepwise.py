"""An executable that runs the steps of a program in order, for backends whose purpose is checking.

Memory with undefined contents (the arena except for inputs, and the outputs) is filled with poison before a run, so that a wrong
plan or a read before a write gives wrong results. A backend supplies one function, which runs a kernel on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns
from types import MappingProxyType
from typing import Self

import numpy as np

from rlx.backends.shared.flow import run_flow
from rlx.backends.shared.loaded import POISON, check_fits
from rlx.backends.shared.transacted import Transacted
from rlx.driver.backend import Timeline
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore
from rlx.driver.memory import Block, HostMemory, Memory, bytes_of
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import IndexRangeError
from rlx.ir.kernel import STATUS, Check, Kernel, walk
from rlx.ir.program import Program, Region, Step

HOST = HostMemory(Device.CPU)
# a kernel and flat, aligned arrays, one per buffer -> 0, or the code of a failed Check
RunKernel = Callable[[Kernel, Sequence[np.ndarray]], int]


class StepwiseExecutable(Transacted):
    """Executable protocol (rlx.driver.backend) over `run_kernel`. `code_bytes`: size of its machine code, for memory()."""

    def __init__(
        self, program: Program, run_kernel: RunKernel, params: ParamStore | None, handles: HandleStore | None,
        transport: SymmetricTransport | None = None, code_bytes: int = 0, memory: Memory = HOST,
    ) -> None:  # fmt: skip
        may_fail = [bool(s.kernel.flow) or any(isinstance(x, Check) for x in walk(s.kernel.body)) for s in program.steps]
        super().__init__(program, params, handles, memory, transport, may_fail)
        memory.fill(self.arena.block, POISON)
        self.code_bytes, self._run_kernel = code_bytes, run_kernel
        self._spans: list[tuple[int, int, int, int]] | None = None  # of the run that is measured
        for b in program.buffers:  # params are in the store from the start
            self.block(b.id)

    def allocate_param(self, nbytes: int) -> Block:
        block = super().allocate_param(nbytes)
        self.device_memory.fill(block, POISON)
        return block

    def clone(self) -> Self:
        handles, transport = self.handles.copy(), self.exchanges.transport
        other = type(self)(self.program, self._run_kernel, self.params, handles, transport, self.code_bytes, self.device_memory)
        self.device_memory.copy(other.arena.block, self.arena.block)
        return other

    def memory(self) -> dict[str, int]:
        return super().memory() | {"code": self.code_bytes}

    # -- running

    def prepare(self, steps: Sequence[int], given: Mapping[int, np.ndarray] | None = None, alone: bool = False) -> None:
        for buffer, array in (given or {}).items():
            check_fits(self.decls[buffer], array)
        arrays = {buffer: np.require(array, requirements=["C", "A"]) for buffer, array in (given or {}).items()}
        for i in steps:
            self.launch(self.program.prepare[i], arrays)

    def execute(self) -> None:
        for b in self.program.buffers:
            if b.region in (Region.ARENA, Region.OUTPUT):
                self.device_memory.fill(self.block(b.id), POISON)
        for step in self.program.steps:
            self.launch(step)
            self.done += 1

    def commit(self) -> None:
        for step in self.program.commit:
            self.launch(step)

    def undo(self, failed: int) -> None:
        for at, step in self.program.abort:
            if at < failed:
                self.launch(step)

    def timed(self) -> tuple[Callable[[], Timeline], Callable[[], object]]:
        """Timed protocol (rlx.driver.backend). One thread runs all steps."""

        def run() -> Timeline:
            self._spans, begin = [], perf_counter_ns()
            try:
                self.run()
                return Timeline(begin, perf_counter_ns(), np.array(self._spans, np.int64).reshape(-1, 4))
            finally:
                self._spans = None

        return run, self.run

    def launch(self, step: Step, given: Mapping[int, np.ndarray] = MappingProxyType({})) -> None:
        arrays = [bytes_of(given[a]) if a in given else self.data(a) for a in step.args]
        arrays = [a.view(b.dtype.numpy) for a, b in zip(arrays, step.kernel.buffers, strict=True)]
        begin = perf_counter_ns()
        if step.kernel.collective:
            self.exchanges.perform(step.kernel.collective, *arrays)
        else:
            flow = step.kernel.flow
            if flow is not None:
                failed = run_flow(self.program, flow, arrays, self._run_kernel)
            else:
                failed = (status, step.kernel) if (status := self._run_kernel(step.kernel, arrays)) else None
            if failed:
                where = f"{failed[1].name} ({' '.join(failed[1].origin)})"
                raise IndexRangeError(f"{STATUS[failed[0]]} in {where}; nothing was committed")
        if self._spans is not None:
            self._spans.append((len(self._spans), 0, begin, perf_counter_ns()))

    def data(self, buffer: int) -> np.ndarray:
        """The buffer's bytes, flat, for `run_kernel`."""
        data = self.block(buffer).data
        assert data is not None
        return data
