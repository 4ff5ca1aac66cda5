"""The protocols that a backend folder implements. There is no base class: the Target says which features a backend lacks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from rlx.driver.foreign import DeviceArray
from rlx.driver.handles import HandleStore
from rlx.driver.params import ParamStore
from rlx.driver.stream import Pending
from rlx.ir.cost import Roofline
from rlx.ir.kernel import Kernel
from rlx.ir.kernel_text import print_kernel
from rlx.ir.program import Program, kernel_labels
from rlx.ir.shape import Shape
from rlx.ir.target import Target
from rlx.ir.tuning import Tiling
from rlx.records import record

if TYPE_CHECKING:
    from pathlib import Path

    from rlx.driver.symmetric import SymmetricTransport


@runtime_checkable
class Backend(Protocol):
    """One folder under rlx/backends, found by its name."""

    name: str

    def probe(self) -> dict[str, str | None]:
        """Devices by name ("cpu:0"): None where usable, else the reason it is not. Never raises."""
        ...

    def target(self, index: int = 0, threads: int | None = None) -> Target:
        """Facts for the compiler. Touches no device. `threads` None: as many as this process may use."""
        ...

    def process_bytes(self) -> int:
        """Bytes that this process holds besides the memory counted by executables, the compiler included. 0: unknown."""
        ...

    def compile(self, program: Program) -> Artifact:
        """Compile a program to code for the device. Touches no device."""
        ...

    def load(
        self, artifact: Artifact, params: ParamStore | None = None, index: int = 0, handles: HandleStore | None = None,
        transport: SymmetricTransport | None = None,
    ) -> Executable:  # fmt: skip
        """Allocate the regions and resolve every argument. `params`, `handles`: stores to share; None makes a new one.
        `transport`: connects this rank to the others; passed only if the session has one."""
        ...


@runtime_checkable
class Storable(Protocol):
    """A Backend whose artifacts can be kept as bytes, and loaded by another process without compiling."""

    def compiler(self) -> str:
        """The compiler's name and version, on which code depends besides program and target. Loads no shared library."""
        ...

    def to_parts(self, artifact: Artifact) -> tuple[Any, list[bytes]]:
        """The artifact without its program: a description for JSON, and bytes."""
        ...

    def from_parts(self, program: Program, code: Any, parts: Sequence[bytes], texts: Callable[[], dict[str, str]]) -> Artifact:
        """Rebuild the artifact from the results of to_parts. The data is untrusted: if it is inconsistent, raise ValueError,
        TypeError, KeyError or IndexError. `texts`: Artifact.texts of the stored artifact."""
        ...

    def missing(self, features: Sequence[str], index: int = 0) -> Sequence[str]:
        """The features (Target.features) that code was compiled for and the device lacks. Empty: the code runs on it."""
        ...


@runtime_checkable
class Counting(Protocol):
    """A Backend that compiles kernel by kernel, and says how many are done."""

    counts_kernels: bool

    def compile(self, program: Program, *, progress: Callable[[int, int], None] | None = None) -> Artifact:
        """As Backend.compile. `progress(done, total)` is called before the first kernel, and after each."""
        ...


@runtime_checkable
class Exporting(Protocol):
    """A Backend whose programs can be made into libraries with a C interface."""

    def export(self, artifact: Any, weights: Mapping[int, np.ndarray], extent: tuple[str, int] | None, folder: Path) -> Path:
        """Write a header and a shared library to a folder, and return the path of the library. `weights`: contents of params and
        prepared buffers, by id. `extent`: name and bound of the active dim. Unsupported: it needs something that C has not."""
        ...


@runtime_checkable
class Opening(Protocol):
    """A Backend whose devices take long to open."""

    def begin(self, index: int) -> None:
        """Begin to open a device in another thread, since it will be used. Its errors are those of the first use."""
        ...


@runtime_checkable
class Warming(Protocol):
    """A Backend whose compiler takes long."""

    def warm(self, target: Target) -> Callable[[Kernel, bool], None]:
        """Begin to load the compiler in another thread, since a compile will need it. Returns a function that begins to make the
        code of a kernel, without a tiling, for a program that is not known yet; True: it runs only when params are set. Errors
        of both are those of the compile."""
        ...


@runtime_checkable
class Tunable(Protocol):
    """A Backend that has several tilings for a kernel. All of them compute the same bits."""

    def axes(self, kernel: Kernel, target: Target) -> Mapping[str, tuple[int, ...]]:
        """The tuning axes of a kernel: name -> values, the default first. Empty: there is nothing to tune."""
        ...

    def machine(self) -> str:
        """The models of the processor and of the compiler: measured times depend on these besides kernel and target."""
        ...

    def compile(self, program: Program, tilings: Mapping[str, Tiling] | None = None) -> Artifact:
        """As Backend.compile. `tilings`: by kernel_key, the tiling of each kernel that does not use the default one."""
        ...


@runtime_checkable
class Assembling(Protocol):
    """A Backend that shows machine code as text."""

    def assembly(self, text: str, target: Target) -> str:
        """The assembly text of a kernel's code (one of Artifact.texts). Touches no device."""
        ...


class Timeline(NamedTuple):
    """The times of one run, in nanoseconds of time.perf_counter_ns. `spans`: int64 [n, 4], one row for each uninterrupted piece
    of a step on a thread: (step, thread, begin, end). Steps are numbered over those of the run and of its commit."""

    begin: int
    end: int
    spans: np.ndarray


@runtime_checkable
class Timed(Protocol):
    """An Executable that can measure the steps of a run."""

    def timed(self) -> tuple[Callable[[], Timeline], Callable[[], object]]:
        """Two functions that run once, as Executable.run does, and have finished when they return: the first is measured.
        Programs with collectives are not."""
        ...


@runtime_checkable
class Roofed(Protocol):
    """A Backend that knows what its devices do at most."""

    def roofline(self, target: Target) -> Roofline:
        """Measured once on each machine and kept; takes up to a second then."""
        ...


class Artifact(Protocol):
    """Compiled code of one program."""

    program: Program

    def texts(self) -> dict[str, str]:
        """Label of a kernel (rlx.ir.program.kernel_labels) -> generated source, for human readers."""
        ...


@record
class KernelTexts:
    """Artifact of a backend that generates no code and interprets the kernels."""

    program: Program

    def texts(self) -> dict[str, str]:
        return {label: print_kernel(kernel) for kernel, label in kernel_labels(self.program).items()}


class Executable(Protocol):
    """A program in memory, ready to run. Buffers are named by their Program ids."""

    program: Program
    params: ParamStore
    handles: HandleStore
    asynchronous: bool  # whether `run` may return before the run is finished

    def use_handles(self, store: HandleStore) -> None:
        """Run on the states of `store` from now on. States that it lacks are allocated, zeroed. Allocates nothing else and
        compiles nothing.

        InputShapeError: the store has a state of another shape; nothing has changed then."""
        ...

    def adopt(self, array: object) -> DeviceArray | None:
        """An array of another library in this device's memory, for `write` and `prepare`; later commands come after what that
        library has queued. None: it is none. TransferError: it cannot be used in place."""
        ...

    def export(self, buffer: int, shape: Shape) -> object | None:
        """The buffer, as `shape`, for other libraries on this device (DLPack). None: they use `view`."""
        ...

    def write(self, buffer: int, array: np.ndarray | DeviceArray) -> None:
        """Copy a C-contiguous host array of the buffer's shape and dtype, or an adopted one, into it. A host array may change
        once this has returned."""
        ...

    def read(self, buffer: int, start: int = 0, count: int | None = None) -> np.ndarray:
        """A fresh host array with the buffer's contents. With `count`: only that many elements, from element `start` on, flat."""
        ...

    def read_later(self, buffers: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        """Begin to copy these buffers to the host, as they are after the runs so far. The function waits for the copies and
        returns fresh arrays."""
        ...

    def copy(self, goal: int, source: int) -> None:
        """Copy buffer `source` to buffer `goal`, of the same size, on the device. Cancelled behind a run that fails."""
        ...

    def view(self, buffer: int) -> np.ndarray | None:
        """The buffer's own memory as a writable array. None, for every buffer, if the host cannot see the device's memory."""
        ...

    @property
    def arena_ptr(self) -> int:
        """Address of arena offset 0."""
        ...

    def address(self, buffer: int) -> int:
        """Address of the buffer in the device's address space."""
        ...

    def prepare(self, steps: Sequence[int], given: Mapping[int, np.ndarray] | None = None, alone: bool = False) -> None:
        """Run these steps of program.prepare, in this order. `given`: read these param buffers from C-contiguous host arrays (of
        the buffer's shape and dtype) or adopted ones instead of from the store. `alone`: use only this thread; other threads may
        run unrelated prepare steps at the same time."""
        ...

    def run(self) -> Pending | None:
        """All steps, then commit. IndexRangeError: a Check failed. CollectiveError: a collective failed. After either error every
        state is as it was before the run.

        None: the run is finished. If the executable is `asynchronous`, the run may be under way: the Pending raises its error.
        Later commands are executed in order. Runs on the same states that begin behind a run that fails, before `wait` has raised
        its error, are cancelled: they change no state, and their `wait` raises as well."""
        ...

    def run_steps(self) -> None:
        """The steps without the commit, finished when it returns; raises as run does."""
        ...

    def run_commit(self) -> None:
        """Commit, after run_steps has succeeded. CollectiveError: run_steps failed on another rank; every state is then as it was
        before the run."""
        ...

    def run_abort(self) -> None:
        """Instead of run_commit: undo the changes of run_steps to handles. Other ranks then do not commit either."""
        ...

    def run_refuse(self) -> None:
        """Tell the other ranks that this rank does not start the run: they get a CollectiveError. Without collectives this does
        nothing."""
        ...

    def clone(self) -> Executable:
        """An executable that shares code, constants and params, and has its own arena and its own copy of the handles."""
        ...

    def allocations(self) -> dict[str, int]:
        """Allocations of this process on the device: `count` so far, `live_bytes` now, `total_bytes` so far."""
        ...

    def memory(self) -> dict[str, int]:
        """Bytes by purpose: arena, scratch, params (raw and prepared), constants, handles, code."""
        ...
