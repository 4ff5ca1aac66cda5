"""The buffers of one program in host memory: regions allocated, every argument resolved to an address."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rlx.driver import files
from rlx.driver.handles import HandleEntry, HandleStore
from rlx.driver.memory import ALIGNMENT, Memory
from rlx.driver.params import ParamStore
from rlx.errors import InputShapeError, PlanError
from rlx.ir.program import BufferDecl, Program, Region

POISON = 0xCB  # byte that fills memory whose contents are undefined
IN_ARENA = (Region.ARENA, Region.INPUT, Region.OUTPUT)
PURPOSES = {Region.PARAM: "params", Region.PREPARED: "prepared", Region.CONSTANT: "constants", Region.HANDLE: "handles"}

Allocate = Callable[[int, int], Any]  # (bytes, alignment) -> memory with `data` (its bytes, flat uint8) and `address`


class Loaded:
    """The part of an Executable (rlx.driver.backend) that holds memory, indexed by the program's buffer ids. This object owns the
    arena and the handles; constants and params may be shared with other executables. `states` is the memory of handles;
    `allocate` gives the memory of everything else."""

    def __init__(
        self, program: Program, params: ParamStore, handles: HandleStore, states: Memory, allocate: Allocate,
        constants: Mapping[int, Any] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.params, self.handles = program, params, handles
        self.decls = {b.id: b for b in program.buffers}
        self.arena = allocate(program.plan.size_bytes, max(program.plan.alignment, ALIGNMENT))
        self.constants = constants_of(program, allocate) if constants is None else constants
        self._state_memory, self._allocate = states, allocate
        self._states = {b.id: (b.name, b.shape) for b in program.buffers if b.region is Region.HANDLE}
        self.entries = self._entries_in(handles)
        self._views: dict[int, np.ndarray] = {}

    def use_handles(self, store: HandleStore) -> None:
        """Use the states in `store` from now on; missing ones are created. InputShapeError: a state in the store has another
        shape; then nothing changes."""
        self.entries, self.handles = self._entries_in(store), store

    def _entries_in(self, store: HandleStore) -> dict[int, HandleEntry]:
        return dict(zip(self._states, store.require(self._states.values(), self._state_memory)))

    def place(self, buffer: int) -> tuple[Any, int]:
        """The memory that holds the buffer, and the buffer's byte offset in it."""
        b = self.decls[buffer]
        if b.region in IN_ARENA:
            offset = self.program.plan.offsets.get(b.id, -1)
            if offset < 0 or offset % b.shape.dtype.itemsize or offset + b.nbytes > self.program.plan.size_bytes:
                raise PlanError(f"{self.program.name}: buffer {b.name!r} of {b.nbytes} bytes at {offset} is not in the arena")
            return self.arena, offset
        if b.id in self.entries:
            return self.entries[b.id].memory, 0
        if b.id in self.constants:
            return self.constants[b.id], 0
        entry = self.params.get(b.name, b.nbytes, self._allocate_param)
        if entry.nbytes != b.nbytes:
            raise InputShapeError(
                f"{self.program.name}: {b.name!r} is {b.shape} ({b.nbytes} bytes), but the params to share hold {entry.nbytes} "
                "bytes under that name; give this graph a store of its own"
            )
        return entry.memory, 0

    def _allocate_param(self, nbytes: int) -> tuple[Any, int]:
        made = self._allocate(nbytes, ALIGNMENT)
        return made, made.address

    @property
    def arena_ptr(self) -> int:
        """The base address to which the plan's offsets are added."""
        return self.arena.address

    def address(self, buffer: int) -> int:
        memory, offset = self.place(buffer)
        return memory.address + offset

    def view(self, buffer: int) -> np.ndarray:
        """The buffer's memory as an array of its shape (constants: read-only). A view keeps the memory alive."""
        if buffer in self.entries:
            return self.entries[buffer].array
        if buffer not in self._views:
            decl, (memory, offset) = self.decls[buffer], self.place(buffer)
            found = memory.data[offset : offset + decl.nbytes].view(decl.shape.dtype.numpy).reshape(decl.shape.static)
            found.flags.writeable = decl.region is not Region.CONSTANT
            self._views[buffer] = found
        return self._views[buffer]

    def write(self, buffer: int, array: np.ndarray) -> None:
        """Copy an array of the buffer's shape and dtype into it. InputShapeError: the shape or dtype differs."""
        check_fits(self.decls[buffer], array)
        files.copy(self.view(buffer), array)

    def read(self, buffer: int) -> np.ndarray:
        return self.view(buffer).copy()

    def copy(self, goal: int, source: int) -> None:
        ctypes.memmove(self.address(goal), self.address(source), self.decls[goal].nbytes)

    def memory(self) -> dict[str, int]:
        """Bytes by purpose. `params` and `prepared` may be shared with other executables."""
        total: dict[str, int] = dict.fromkeys(("arena", "scratch", "params", "prepared", "constants", "handles", "code"), 0)
        total["arena"] = self.program.plan.size_bytes
        for b in self.program.buffers:
            if b.region in PURPOSES and (b.region in (Region.HANDLE, Region.CONSTANT) or b.name in self.params.entries):
                total[PURPOSES[b.region]] += b.nbytes
        return total


def constants_of(program: Program, allocate: Allocate) -> dict[int, Any]:
    """The constants of a program, in memory. PlanError: a constant has no bytes, or the wrong number."""
    held = {}
    for b in program.buffers:
        if b.region is Region.CONSTANT:
            if b.data is None or b.data.nbytes != b.nbytes:
                raise PlanError(f"constant {b.name!r} of {b.nbytes} bytes has {'no' if b.data is None else b.data.nbytes}")
            held[b.id] = made = allocate(b.nbytes, ALIGNMENT)
            made.data[...] = np.ascontiguousarray(b.data).reshape(-1).view(np.uint8)
    return held


def check_fits(decl: BufferDecl, array: np.ndarray) -> None:
    """InputShapeError unless the array has the buffer's shape and dtype."""
    if array.shape != decl.shape.static or array.dtype != decl.shape.dtype.numpy:
        raise InputShapeError(f"{decl.name!r} is {decl.shape}, got an array {array.dtype}[{','.join(map(str, array.shape))}]")
