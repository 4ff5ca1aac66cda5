"""The two protocols a backend folder satisfies. No base class: what a backend cannot do is a fact of its Target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.driver.symmetric import SymmetricTransport
from rlx.ir.kernel import Kernel
from rlx.ir.kernel_text import print_kernel
from rlx.ir.program import Program
from rlx.ir.target import Target
from rlx.ir.tuning import Choice


@runtime_checkable
class Backend(Protocol):
    """One folder under rlx/backends, found by its name."""

    name: str

    def probe(self) -> dict[str, str | None]:
        """Devices by name ("cpu:0"): None where usable, else the reason it is not. Never raises."""
        ...

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        """Facts for the compiler; touches no device. `threads` None: as many as this process may use."""
        ...

    def process_bytes(self) -> int:
        """What this process takes beside the memory that executables count, the compiler included; 0: not known."""
        ...

    def compile(self, program: Program) -> Artifact:
        """Native code for a program; touches no device."""
        ...

    def load(
        self, artifact: Artifact, params: ParamStore | None = None, index: int = 0, handles: HandleStore | None = None,
        transport: SymmetricTransport | None = None,
    ) -> Executable:  # fmt: skip
        """Allocate the regions, resolve every argument. `params`, `handles`: stores to share; None makes a new one. `transport`:
        by which this rank meets the others; passed only where a session has one."""
        ...


@runtime_checkable
class Storable(Protocol):
    """A Backend whose artifacts can be kept as bytes, and loaded by another process without compiling."""

    def compiler(self) -> str:
        """What code depends on besides program and target: the compiler's name and version. Loads no native library."""
        ...

    def to_parts(self, artifact: Artifact) -> tuple[Any, list[bytes]]:
        """The artifact without its program: a description for JSON, and bytes."""
        ...

    def from_parts(self, program: Program, code: Any, parts: Sequence[bytes], texts: Callable[[], dict[str, str]]) -> Artifact:
        """What to_parts was given. Anything that does not fit together is a ValueError, TypeError, KeyError or IndexError;
        none of it may be believed. `texts`: Artifact.texts of then."""
        ...


@runtime_checkable
class Tunable(Protocol):
    """A Backend whose code for a kernel can be cut in several ways that compute the same bits."""

    def axes(self, kernel: Kernel, target: Target) -> Mapping[str, tuple[int, ...]]:
        """What a choice may say: name -> values, the usual one first. Empty: there is nothing to choose."""
        ...

    def machine(self) -> str:
        """What measured times depend on besides kernel and target: the models of the processor and of the compiler."""
        ...

    def compile(self, program: Program, choices: Mapping[str, Choice] | None = None) -> Artifact:
        """As Backend.compile. `choices`: by kernel_key, how to cut kernels that are not to be cut as usual."""
        ...


class Artifact(Protocol):
    """Compiled code of one program."""

    program: Program

    def texts(self) -> dict[str, str]:
        """Kernel name -> generated source, for people."""
        ...


@dataclass(frozen=True)
class KernelTexts:
    """Artifact of a backend that generates nothing: the kernels themselves are the code."""

    program: Program

    def texts(self) -> dict[str, str]:
        p = self.program
        return {s.kernel.name: print_kernel(s.kernel) for s in p.prepare + p.steps + p.commit}


class Executable(Protocol):
    """A program in memory, ready to run. Buffers are named by their Program ids."""

    program: Program
    params: ParamStore
    handles: HandleStore

    def use_handles(self, store: HandleStore) -> None:
        """Run on the states of `store` from now on; those it lacks are made, zeroed. No other allocation, no compilation.

        InputShapeError: it has one of another shape; then nothing changes."""
        ...

    def write(self, buffer: int, array: np.ndarray) -> None:
        """Copy a C-contiguous host array of the buffer's shape and dtype into it."""
        ...

    def read(self, buffer: int) -> np.ndarray:
        """A fresh host array with the buffer's contents."""
        ...

    def copy(self, goal: int, source: int) -> None:
        """Give a buffer what another one of its size holds, on the device."""
        ...

    def view(self, buffer: int) -> np.ndarray | None:
        """The buffer's own memory as a writable array, or None where the host cannot see it."""
        ...

    @property
    def arena_ptr(self) -> int:
        """Address of arena offset 0."""
        ...

    def address(self, buffer: int) -> int:
        """Address of the buffer in the device's address space."""
        ...

    def prepare(self, steps: Sequence[int], given: Mapping[int, np.ndarray] | None = None, alone: bool = False) -> None:
        """Run these steps of program.prepare, in this order. `given`: param buffers read from these C-contiguous host
        arrays (of the buffer's shape and dtype) instead of from the store. `alone`: in this thread; others may prepare what has
        nothing to do with it meanwhile."""
        ...

    def run(self) -> None:
        """All steps, then commit. With every state as it was: IndexRangeError, a Check failed; CollectiveError, a collective."""
        ...

    def run_steps(self) -> None:
        """The steps without the commit; raises as run does."""
        ...

    def run_commit(self) -> None:
        """Once run_steps has done well. CollectiveError, with every state as it was: it has not on another rank."""
        ...

    def run_abort(self) -> None:
        """Put back what run_steps changed in handles, where no commit shall follow. Other ranks then do not commit either."""
        ...

    def run_refuse(self) -> None:
        """This rank does not begin the run that the others begin: they get a CollectiveError. Nothing without collectives."""
        ...

    def clone(self) -> Executable:
        """Shares code, constants and params; owns arena and handles (copied as they stand)."""
        ...

    def allocations(self) -> dict[str, int]:
        """Allocations on the device by this process: `count` so far, `live_bytes` now, `total_bytes` so far."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by purpose: arena, scratch, params (raw and prepared), constants, handles, code."""
        ...
