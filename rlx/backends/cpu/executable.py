"""A compiled program, and the same in memory: regions, argument tables, and a run that is one call into machine code.

Every address is fixed when a program is loaded. `run` hands one table of {function, arguments, tasks} to the worker
pool (rlx.backends.cpu.pool): the steps, then the commit, which is reached only if no Check failed. It allocates nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rlx.backends.cpu import memory, pool
from rlx.backends.cpu.emit import Rendered
from rlx.backends.cpu.jit import Library, load
from rlx.backends.cpu.memory import Region as Memory
from rlx.driver.params import ParamStore
from rlx.errors import IndexRangeError, InputShapeError, PlanError
from rlx.ir.kernel import STATUS, Kernel
from rlx.ir.program import BufferDecl, Program, Region, Step

SCRATCH_ALIGNMENT = 128  # bytes between the scratch of two threads: no shared line, nor a prefetched neighbour
IN_ARENA = (Region.ARENA, Region.INPUT, Region.OUTPUT)


@dataclass(frozen=True)
class CpuArtifact:
    """Machine code of one program: `codes`, each distinct kernel once, with `objects` beside it. `uses[phase][i]` is the
    code of that phase's step i. `timings`: milliseconds of the compile by what took them."""

    program: Program
    codes: tuple[Rendered, ...]
    objects: tuple[bytes, ...]
    uses: dict[str, tuple[int, ...]]
    timings: dict[str, float] = field(default_factory=dict, compare=False)

    def texts(self) -> dict[str, str]:
        """Kernel name -> its LLVM IR. Kernels with one code appear once each, with the same text."""
        steps = ((s, i) for phase, used in self.uses.items() for s, i in zip(getattr(self.program, phase), used))
        return {s.kernel.name: self.codes[i].text for s, i in steps}


class CpuCode:
    """What an executable shares with its clones: machine code in memory, and constants."""

    def __init__(self, artifact: CpuArtifact) -> None:
        self.artifact = artifact
        symbols = [c.symbol for c in artifact.codes]
        self.library: Library | None = load(artifact.objects, symbols, artifact.program.target) if symbols else None
        self.functions = [self.library.address(s) for s in symbols] if self.library else []
        self.scratch_bytes = max((c.scratch_bytes for c in artifact.codes), default=0)
        self.constants: dict[int, Memory] = {}
        for b in artifact.program.buffers:
            if b.region is Region.CONSTANT:
                if b.data is None or b.data.nbytes != b.nbytes:
                    raise PlanError(f"constant {b.name!r} of {b.nbytes} bytes has {'no' if b.data is None else b.data.nbytes}")
                held = self.constants[b.id] = memory.allocate(b.nbytes)
                held.data[...] = np.ascontiguousarray(b.data).reshape(-1).view(np.uint8)


class CpuExecutable:
    """Executable protocol (rlx.driver.backend) in host memory. One thread at a time may run it; clones run at once.

    Memory goes back when the last reference to it goes: this object's, a clone's, or that of a view."""

    def __init__(self, code: CpuCode, params: ParamStore) -> None:
        program = code.artifact.program
        self.program, self.params, self._code = program, params, code
        self._decls = {b.id: b for b in program.buffers}
        self._views: dict[int, np.ndarray] = {}
        self._arena = memory.allocate(program.plan.size_bytes, max(program.plan.alignment, memory.ALIGNMENT))
        self._held = dict(code.constants)  # buffers whose addresses the run's table names; all but the arena's
        hot = {a for s in program.steps + program.commit for a in s.args}
        for b in program.buffers:
            if b.region is Region.HANDLE:
                self._held[b.id] = memory.allocate(b.nbytes)
            elif b.region in (Region.PARAM, Region.PREPARED) and b.id in hot:
                self._held[b.id] = self._entry(b)
        many = any(c.tasks > 1 for c in code.artifact.codes) and program.target.threads > 1
        self._pool = pool.pool(program.target.threads) if many else None
        self._stride = -(-code.scratch_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        self._scratch = memory.allocate(self._stride * (program.target.threads if many else 1), SCRATCH_ALIGNMENT)
        self._table = self._calls([*self._used("steps"), *self._used("commit")], {})
        middle, end = len(program.steps), len(program.steps) + len(program.commit)
        spans = ((0, end), (0, middle), (middle, end))
        self._runs = [pool.Run(*self._table.bounds(*span), *self._surroundings()) for span in spans]
        self._whole, self._steps, self._commit = map(pool.callable_of, self._runs)

    # -- buffers

    def write(self, buffer: int, array: np.ndarray) -> None:
        """Copy an array of the buffer's shape and dtype into it. InputShapeError: it has another."""
        _fits(self._decls[buffer], array)
        np.copyto(self.view(buffer), array)

    def read(self, buffer: int) -> np.ndarray:
        return self.view(buffer).copy()

    def view(self, buffer: int) -> np.ndarray:
        """The buffer's memory (constants: read-only). It stays valid memory even when this executable is gone."""
        found = self._views.get(buffer)
        if found is None:
            decl = self._decls[buffer]
            place, offset = self._place(decl)
            found = place.view(offset, decl.shape.static, decl.shape.dtype.numpy)
            found.flags.writeable = decl.region is not Region.CONSTANT
            if decl.region in IN_ARENA or buffer in self._held:
                self._views[buffer] = found
        return found

    def address(self, buffer: int) -> int:
        place, offset = self._place(self._decls[buffer])
        return place.address + offset

    @property
    def arena_ptr(self) -> int:
        """Address that the plan's offsets count from."""
        return self._arena.address

    @property
    def arena(self) -> np.ndarray:
        """The arena's bytes, uint8[plan.size_bytes]."""
        return self._arena.data

    def poison(self) -> None:
        """Fill scratch, and the arena but for its inputs, with NaN: a run that forgets to write is seen."""
        inputs = {i: self.read(i) for i in self.program.inputs}
        self._arena.data[...] = memory.POISON
        self._scratch.data[...] = memory.POISON
        for i, array in inputs.items():
            np.copyto(self.view(i), array)

    def allocations(self) -> dict[str, int]:
        return memory.allocations()

    def memory(self) -> dict[str, int]:
        """Bytes by purpose. `params` and `prepared` are shared with every executable on the same store."""
        total: dict[str, int] = dict.fromkeys(("arena", "scratch", "params", "prepared", "constants", "handles", "code"), 0)
        names = {Region.PARAM: "params", Region.PREPARED: "prepared", Region.CONSTANT: "constants", Region.HANDLE: "handles"}
        for b in self.program.buffers:
            if b.region in names and (b.id in self._held or b.name in self.params.entries):
                total[names[b.region]] += b.nbytes
        code = sum(map(len, self._code.artifact.objects))
        return total | {"arena": self._arena.nbytes, "scratch": self._scratch.nbytes, "code": code}

    # -- running

    def run(self) -> None:
        """All steps, then commit. Raises IndexRangeError (nothing committed) if a Check failed."""
        status = self._whole()
        if status:
            self._after(status, self._runs[0], self._table)

    def run_steps(self) -> None:
        """The steps without the commit; raises as run does."""
        status = self._steps()
        if status:
            self._after(status, self._runs[1], self._table)

    def run_commit(self) -> None:
        status = self._commit()
        if status:
            self._after(status, self._runs[2], self._table)

    def prepare(self, steps: Sequence[int], given: Mapping[int, np.ndarray] | None = None) -> None:
        """Run these steps of program.prepare, in this order. `given`: arrays to read in place of those buffers."""
        arrays = {i: _aligned(self._decls[i], array) for i, array in (given or {}).items()}
        used = self._used("prepare")
        table = self._calls([used[i] for i in steps], {i: array.ctypes.data for i, array in arrays.items()})
        run = pool.Run(*table.bounds(0, len(steps)), *self._surroundings())
        status = pool.callable_of(run)()
        if status:
            self._after(status, run, table)

    def clone(self) -> CpuExecutable:
        """Shares code, constants and params; owns arena and handles (copied as they stand)."""
        other = CpuExecutable(self._code, self.params)
        np.copyto(other._arena.data, self._arena.data)
        for b in self.program.buffers:
            if b.region is Region.HANDLE:
                np.copyto(other._held[b.id].data, self._held[b.id].data)
        return other

    # -- addresses and tables, made when loading

    def _entry(self, b: BufferDecl) -> Memory:
        entry = self.params.get(b.name, b.nbytes, _allocate)
        if entry.nbytes != b.nbytes:
            raise InputShapeError(
                f"{self.program.name}: {b.name!r} is {b.shape} ({b.nbytes} bytes), but the params to share hold {entry.nbytes} "
                "bytes under that name; give this graph a store of its own"
            )
        return entry.memory

    def _place(self, b: BufferDecl) -> tuple[Memory, int]:
        if b.region in IN_ARENA:
            offset = self.program.plan.offsets.get(b.id, -1)
            if offset < 0 or offset % b.shape.dtype.itemsize or offset + b.nbytes > self._arena.nbytes:
                raise PlanError(f"{self.program.name}: buffer {b.name!r} of {b.nbytes} bytes at {offset} is not in the arena")
            return self._arena, offset
        return self._held.get(b.id) or self._entry(b), 0

    def _used(self, phase: str) -> list[tuple[Step, int]]:
        return list(zip(getattr(self.program, phase), self._code.artifact.uses[phase]))

    def _calls(self, used: list[tuple[Step, int]], given: Mapping[int, int]) -> _Table:
        """The table of these steps, each with the index of its code. `given`: addresses of buffers that lie elsewhere."""
        rows = []
        for step, i in used:
            self._check(step)
            addresses = [given.get(a) or self.address(a) for a in step.args]
            rows.append((self._code.functions[i], self._code.artifact.codes[i].tasks, addresses))
        return _Table([s.kernel for s, _ in used], rows)

    def _check(self, step: Step) -> None:
        """No kernel may reach beyond the buffers it is given: the last test before addresses lose their sizes."""
        kernel = step.kernel
        fits = len(step.args) == len(kernel.buffers) and all(
            b.size * b.dtype.itemsize <= self._decls[a].nbytes for a, b in zip(step.args, kernel.buffers)
        )
        if not fits:
            raise PlanError(f"{self.program.name}: the buffers of {kernel.name} are larger than its arguments {step.args}")

    def _surroundings(self) -> tuple[int, int, int | None]:
        return self._scratch.address, self._stride, self._pool.address if self._pool else None

    def _after(self, status: int, run: pool.Run, table: _Table) -> None:
        """What a run's status asks for."""
        if status == pool.ATTEND:
            if self._pool:
                self._pool.attend()
            return
        kernel = table.kernels[table.index(run.failed)]
        origin = f" ({' '.join(kernel.origin)})" if kernel.origin else ""
        raise IndexRangeError(f"{self.program.name}: {STATUS[status]} in {kernel.name}{origin}; nothing was committed")


class _Table:
    """Steps as machine code walks them: rows of (function, tasks, argument addresses)."""

    def __init__(self, kernels: Sequence[Kernel], rows: Sequence[tuple[int, int, Sequence[int]]]) -> None:
        self.kernels = kernels
        self.arguments = (ctypes.c_uint64 * sum(len(a) for _, _, a in rows))(*(x for _, _, a in rows for x in a))
        self.steps = (pool.Step * len(rows))()
        at = ctypes.addressof(self.arguments)
        for step, (function, tasks, addresses) in zip(self.steps, rows):
            if tasks > pool.MAX_TASKS:
                raise PlanError(f"a step of {tasks} tasks; the walker counts to {pool.MAX_TASKS}")
            step.fn, step.args, step.tasks = function, at, tasks
            at += 8 * len(addresses)

    def bounds(self, first: int, end: int) -> tuple[int, int]:
        base, size = ctypes.addressof(self.steps), ctypes.sizeof(pool.Step)
        return base + first * size, base + end * size

    def index(self, address: int) -> int:
        return (address - ctypes.addressof(self.steps)) // ctypes.sizeof(pool.Step)


def _allocate(nbytes: int) -> tuple[Memory, int]:
    made = memory.allocate(nbytes)
    return made, made.address


def _fits(decl: BufferDecl, array: np.ndarray) -> None:
    if array.shape != decl.shape.static or array.dtype != decl.shape.dtype.numpy:
        raise InputShapeError(f"{decl.name!r} is {decl.shape}, got an array {array.dtype}[{','.join(map(str, array.shape))}]")


def _aligned(decl: BufferDecl, array: np.ndarray) -> np.ndarray:
    """The array itself if machine code can read it where it is, else a copy at an aligned address."""
    _fits(decl, array)
    if array.flags.c_contiguous and array.ctypes.data % memory.ALIGNMENT == 0:
        return array
    copy = memory.allocate(array.nbytes).view(0, array.shape, array.dtype)
    np.copyto(copy, array)
    return copy
