"""The buffers of one program in the memory of a device: regions allocated, every argument resolved to a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.driver.arena import Arena
from rlx.driver.foreign import DeviceArray
from rlx.driver.handles import HandleEntry, HandleStore
from rlx.driver.memory import ALIGNMENT, Block, Memory, bytes_of
from rlx.driver.params import ParamStore
from rlx.errors import InputShapeError, PlanError
from rlx.ir.program import BufferDecl, Program, Region
from rlx.ir.shape import Shape

POISON = 0xCB  # byte that fills memory whose contents are undefined
IN_ARENA = (Region.ARENA, Region.INPUT, Region.OUTPUT)
PURPOSES = {Region.PARAM: "params", Region.PREPARED: "prepared", Region.CONSTANT: "constants", Region.HANDLE: "handles"}


class Loaded:
    """The part of an Executable (rlx.driver.backend) that holds memory, indexed by the program's buffer ids. This object owns the
    arena and the handles; constants and params may be shared with other executables."""

    asynchronous = False

    def __init__(
        self, program: Program, params: ParamStore, handles: HandleStore, memory: Memory,
        constants: Mapping[int, Block] | None = None,
    ) -> None:  # fmt: skip
        self.program, self.params, self.handles, self.device_memory = program, params, handles, memory
        self.decls = {b.id: b for b in program.buffers}
        self.arena = Arena(memory, slots_of(program), program.plan.size_bytes, max(program.plan.alignment, ALIGNMENT))
        self.constants = constants_of(program, memory) if constants is None else constants
        self._states = {b.id: (b.name, b.shape) for b in program.buffers if b.region is Region.HANDLE}
        self.entries = self._entries_in(handles)
        self._blocks: dict[int, Block] = {}  # all but those of handles

    def use_handles(self, store: HandleStore) -> None:
        """Use the states in `store` from now on; missing ones are created. InputShapeError: a state in the store has another
        shape; then nothing changes."""
        self.entries, self.handles = self._entries_in(store), store

    def _entries_in(self, store: HandleStore) -> dict[int, HandleEntry]:
        return dict(zip(self._states, store.require(self._states.values(), self.device_memory)))

    def block(self, buffer: int) -> Block:
        """The buffer's memory. Params and prepared buffers are allocated here, if the store lacks them."""
        if buffer in self.entries:
            return self.entries[buffer].block
        if buffer not in self._blocks:
            b = self.decls[buffer]
            in_arena = self.arena.has_buffer(buffer)
            self._blocks[buffer] = self.arena.slot(buffer) if in_arena else self.constants.get(buffer) or self._param(b)
        return self._blocks[buffer]

    def _param(self, b: BufferDecl) -> Block:
        found = self.params.get(b.name, b.nbytes, self.allocate_param)
        if found.nbytes != b.nbytes:
            raise InputShapeError(
                f"{self.program.name}: {b.name!r} is {b.shape} ({b.nbytes} bytes), but the params to share hold {found.nbytes} "
                "bytes under that name; give this graph a store of its own"
            )
        return found

    def allocate_param(self, nbytes: int) -> Block:
        return self.device_memory.allocate(nbytes)

    @property
    def arena_ptr(self) -> int:
        """The base address to which the plan's offsets are added."""
        return self.arena.block.address

    def address(self, buffer: int) -> int:
        return self.block(buffer).address

    def view(self, buffer: int) -> np.ndarray | None:
        """The buffer's memory as an array of its shape (constants: read-only); None: the host does not see it."""
        decl, data = self.decls[buffer], self.block(buffer).data
        if data is None:
            return None
        found = data.view(decl.shape.dtype.numpy).reshape(decl.shape.static)
        found.flags.writeable = decl.region is not Region.CONSTANT
        return found

    def adopt(self, array: object) -> DeviceArray | None:
        """None: the memory of this device is that of the host, or no other library knows it."""
        return None

    def export(self, buffer: int, shape: Shape) -> object | None:
        return None

    def write(self, buffer: int, array: np.ndarray) -> None:
        """Copy an array of the buffer's shape and dtype into it. InputShapeError: the shape or dtype differs."""
        check_fits(self.decls[buffer], array)
        self.device_memory.copy_in(self.block(buffer), bytes_of(array))

    def read(self, buffer: int, start: int = 0, count: int | None = None) -> np.ndarray:
        decl, block = self.decls[buffer], self.block(buffer)
        out = np.empty(decl.shape.static if count is None else count, decl.shape.dtype.numpy)
        part = block if count is None else block.part(start * out.itemsize, out.nbytes)
        self.device_memory.copy_out(part, bytes_of(out))
        return out

    def read_later(self, buffers: Sequence[int]) -> Callable[[], list[np.ndarray]]:
        arrays = [self.read(b) for b in buffers]
        return lambda: arrays

    def copy(self, goal: int, source: int) -> None:
        self.device_memory.copy(self.block(goal), self.block(source))

    def allocations(self) -> dict[str, int]:
        """Zeros, for memory that Python itself counts."""
        return {"count": 0, "live_bytes": 0, "total_bytes": 0}

    def memory(self) -> dict[str, int]:
        """Bytes by purpose. `params` and `prepared` may be shared with other executables."""
        total: dict[str, int] = dict.fromkeys(("arena", "scratch", "params", "prepared", "constants", "handles", "code"), 0)
        total["arena"] = self.program.plan.size_bytes
        for b in self.program.buffers:
            if b.region in PURPOSES and (b.region in (Region.HANDLE, Region.CONSTANT) or b.name in self.params.entries):
                total[PURPOSES[b.region]] += b.nbytes
        return total


def slots_of(program: Program) -> dict[int, tuple[int, int]]:
    """Buffer -> (byte offset in the arena, bytes). PlanError: a buffer is not in the arena, or is misaligned."""
    slots, plan = {}, program.plan
    for b in program.buffers:
        if b.region in IN_ARENA:
            offset = plan.offsets.get(b.id, -1)
            if offset < 0 or offset % b.shape.dtype.itemsize or offset + b.nbytes > plan.size_bytes:
                raise PlanError(f"{program.name}: buffer {b.name!r} of {b.nbytes} bytes at {offset} is not in the arena")
            slots[b.id] = offset, b.nbytes
    return slots


def constants_of(program: Program, memory: Memory) -> dict[int, Block]:
    """The constants of a program, in memory. PlanError: a constant has no bytes, or the wrong number."""
    held = {}
    for b in program.buffers:
        if b.region is Region.CONSTANT:
            if b.data is None or b.data.nbytes != b.nbytes:
                raise PlanError(f"constant {b.name!r} of {b.nbytes} bytes has {'no' if b.data is None else b.data.nbytes}")
            held[b.id] = memory.allocate(b.nbytes)
            memory.copy_in(held[b.id], bytes_of(np.ascontiguousarray(b.data)))
    return held


def check_fits(decl: BufferDecl, array: np.ndarray | DeviceArray) -> None:
    """InputShapeError unless the array has the buffer's shape and dtype."""
    if array.shape != decl.shape.static or array.dtype != decl.shape.dtype.numpy:
        raise InputShapeError(f"{decl.name!r} is {decl.shape}, got an array {array.dtype}[{','.join(map(str, array.shape))}]")
