"""The null backend: accepts every program, records kernel launches, computes nothing.

For tests and tools that count kernels, bytes and transfers of whole models without running them. Reading a result
raises Unsupported, so that no missing result passes for a computed one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import numpy as np

from rlx.backends.shared.loaded import Loaded
from rlx.driver.backend import KernelTexts
from rlx.driver.device import Device
from rlx.driver.handles import HandleStore
from rlx.driver.memory import ALIGNMENT, Block
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.errors import DeviceUnavailableError, Unsupported
from rlx.ir.dtype import DTYPES
from rlx.ir.program import Program, Step
from rlx.ir.target import Target
from rlx.records import record


@record
class Launch:
    """One recorded kernel call. Bytes are those of the whole buffers that it reads or writes."""

    phase: str  # "prepare", "steps", "commit" or "feed"
    kernel: str  # for a feed: the name of the handle
    read_bytes: int
    written_bytes: int


class NullBackend:
    """Backend protocol (rlx.driver.backend)."""

    name = "null"

    def probe(self) -> dict[str, str | None]:
        return {"null:0": None}

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        if index:
            raise DeviceUnavailableError(f"there is no null:{index}; there is null:0")
        return Target(name="null", dtypes=frozenset(DTYPES), threads=threads or 1)

    def process_bytes(self) -> int:
        return 0

    def compile(self, program: Program) -> KernelTexts:
        return KernelTexts(program)

    def load(
        self, artifact: KernelTexts, params: ParamStore | None = None, index: int = 0, handles: HandleStore | None = None,
        transport: SymmetricTransport | None = None,
    ) -> NullExecutable:  # fmt: skip
        return NullExecutable(artifact.program, params or ParamStore(), handles or HandleStore())


@record(eq=False)
class NullBlock:
    """A size without bytes."""

    nbytes: int
    data: None = None

    @property
    def address(self) -> int:
        _nothing("an address")

    def part(self, offset: int, nbytes: int) -> NullBlock:
        return NullBlock(nbytes)


class NullMemory:
    """Memory protocol (rlx.driver.memory). It allocates nothing, and forgets every copy."""

    device, host_visible = Device("null"), False

    def allocate(self, nbytes: int, alignment: int = ALIGNMENT) -> NullBlock:
        return NullBlock(nbytes)

    def allocate_all(self, sizes: Sequence[int]) -> list[NullBlock]:
        return [NullBlock(nbytes) for nbytes in sizes]

    def copy_out(self, block: Block, into: np.ndarray) -> None:
        _nothing("the contents of a buffer")

    def copy_out_later(self, block: Block, into: np.ndarray) -> Callable[[], None]:
        _nothing("the contents of a buffer")

    def free(self, block: Block) -> None: ...
    def copy_in(self, block: Block, source: np.ndarray) -> None: ...
    def copy(self, goal: Block, source: Block) -> None: ...
    def fill(self, block: Block, byte: int) -> None: ...
    def freeze(self, blocks: Sequence[Block]) -> None: ...
    def assign(self, goal: Block, source: Block) -> None: ...


def _nothing(label: str) -> NoReturn:
    raise Unsupported(f"the null device computes nothing, so {label} cannot be had; compile for another device")


MEMORY = NullMemory()


class NullExecutable(Loaded):
    """Executable protocol (rlx.driver.backend). `launches`: every kernel call so far; `uploads`: bytes written by name."""

    def __init__(self, program: Program, params: ParamStore, handles: HandleStore) -> None:
        super().__init__(program, params, handles, MEMORY)
        self.launches: list[Launch] = []
        self.uploads: list[tuple[str, int]] = []
        for b in program.buffers:  # params are in the store from the start
            self.block(b.id)

    def write(self, buffer: int, array: np.ndarray) -> None:
        super().write(buffer, array)
        self.uploads.append((self.decls[buffer].name, array.nbytes))

    def copy(self, goal: int, source: int) -> None:
        self.launches.append(Launch("feed", self.decls[goal].name, self.decls[source].nbytes, self.decls[goal].nbytes))

    def prepare(self, steps: Sequence[int], given: Mapping[int, np.ndarray] | None = None, alone: bool = False) -> None:
        self.uploads += [(self.decls[b].name, array.nbytes) for b, array in (given or {}).items()]
        for i in steps:
            self._record("prepare", self.program.prepare[i])

    def run(self) -> None:
        self.run_steps()
        self.run_commit()

    def run_steps(self) -> None:
        for step in self.program.steps:
            self._record("steps", step)

    def run_commit(self) -> None:
        for step in self.program.commit:
            self._record("commit", step)

    def run_abort(self) -> None: ...  # there is no state to restore

    def run_refuse(self) -> None: ...  # there are no other ranks to notify

    def _record(self, phase: str, step: Step) -> None:
        read, written = (sum(self.decls[b].nbytes for b in ids) for ids in (step.reads, step.writes))
        self.launches.append(Launch(phase, step.kernel.name, read, written))

    def clone(self) -> NullExecutable:
        return NullExecutable(self.program, self.params, self.handles.copy())

    def memory(self) -> dict[str, int]:
        """Nothing is allocated."""
        return dict.fromkeys(("arena", "scratch", "params", "prepared", "constants", "handles", "code"), 0)
