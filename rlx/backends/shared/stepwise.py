"""An executable that runs the steps of a program in order, for backends whose purpose is checking.

Memory with undefined contents (the arena except for inputs, and the outputs) is filled with poison before a run, so that a wrong
plan or a read before a write gives wrong results. A backend supplies one function, which runs a kernel on arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

import numpy as np

from rlx.backends.shared.loaded import POISON, Loaded, check_fits
from rlx.driver.device import Device
from rlx.driver.exchange import Exchanges
from rlx.driver.handles import HandleStore
from rlx.driver.memory import Block, HostMemory, Memory, bytes_of
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import CollectiveError, IndexRangeError
from rlx.ir.kernel import STATUS, Check, Kernel, walk
from rlx.ir.program import Program, Region, Step

HOST = HostMemory(Device.CPU)
# a kernel and flat, aligned arrays, one per buffer -> 0, or the code of a failed Check
RunKernel = Callable[[Kernel, Sequence[np.ndarray]], int]


class StepwiseExecutable(Loaded):
    """Executable protocol (rlx.driver.backend) over `run_kernel`. `code_bytes`: size of its machine code, for memory()."""

    def __init__(
        self, program: Program, run_kernel: RunKernel, params: ParamStore | None, handles: HandleStore | None,
        transport: SymmetricTransport | None = None, code_bytes: int = 0, memory: Memory = HOST,
    ) -> None:  # fmt: skip
        super().__init__(program, params or ParamStore(), handles or HandleStore(), memory)
        memory.fill(self.arena.block, POISON)
        self.code_bytes, self._run_kernel = code_bytes, run_kernel
        may_fail = [any(isinstance(s, Check) for s in walk(step.kernel.body)) for step in program.steps]
        self.exchanges = Exchanges(program, transport, may_fail)
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
            self._run(self.program.prepare[i], arrays)

    def run(self) -> None:
        self.run_steps()
        if self.exchanges.agreement:
            self._agree()
        self._commit()

    def run_steps(self) -> None:
        for b in self.program.buffers:
            if b.region in (Region.ARENA, Region.OUTPUT):
                self.device_memory.fill(self.block(b.id), POISON)
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
                self._run(step)

    def _commit(self) -> None:
        for step in self.program.commit:
            self._run(step)

    def _run(self, step: Step, given: Mapping[int, np.ndarray] = MappingProxyType({})) -> None:
        arrays = [bytes_of(given[a]) if a in given else self.data(a) for a in step.args]
        arrays = [a.view(b.dtype.numpy) for a, b in zip(arrays, step.kernel.buffers, strict=True)]
        if step.kernel.collective:
            self.exchanges.perform(step.kernel.collective, *arrays)
        elif status := self._run_kernel(step.kernel, arrays):
            where = f"{step.kernel.name} ({' '.join(step.kernel.origin)})"
            raise IndexRangeError(f"{STATUS[status]} in {where}; nothing was committed")

    def data(self, buffer: int) -> np.ndarray:
        """The buffer's bytes, flat, for `run_kernel`."""
        data = self.block(buffer).data
        assert data is not None
        return data
