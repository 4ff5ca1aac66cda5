"""The experts of one executable on a GPU: their buffers, and the log of its routers that the GPU writes after each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlx.backends.cuda.experts import CudaPart, CudaSlots, CudaTiers, Packer
from rlx.backends.cuda.memory import CudaMemory
from rlx.backends.cuda.regions import Region
from rlx.driver.foreign import DeviceArray
from rlx.driver.memory import bytes_of
from rlx.driver.slots import Choices, Router, Tally
from rlx.ir.program import BufferDecl, RouterDecl

Routed = Mapping[int, tuple[int, Choices]]  # by the buffer of a router's choices: their address

RUNS, LOGGED = 64, 4 << 20  # runs that wait in a log, at most, and bytes of it unless a single run has more


class LogRing:
    """A ring in pinned memory with the choices of some routers, by run; `told`: runs that are in it or were."""

    def __init__(self, tiers: CudaTiers, routers: Routed, room: int, inside: bool) -> None:
        memory, self.routers, self.choices = tiers.memory, routers, [choices for _, choices in routers.values()]
        entry = 4 * sum(c.size for c in self.choices)
        self.entries = memory.gpu.pinned(room * entry, clear=False).view(np.int32).reshape(room, -1)
        self.told = memory.gpu.pinned(64)[:8].view(np.int64)
        rows = []
        for address, c in routers.values():
            at = tiers.layers[c.layer]
            slots: Any = tiers.slots[at.name]
            table, wanted = (slots.table.address, slots.wanted.ctypes.data) if slots.table else (0, 0)
            rows.append((address, table, wanted * inside, c.tokens * c.shape[-1], c.size, at.experts))
        self._parts, self._turn = memory.allocate(48 * len(rows)), memory.allocate(16)
        memory.copy_in(self._parts, bytes_of(np.array(rows, np.int64)))
        ring, told = self.entries.ctypes.data, self.told.ctypes.data
        self.blocks, self.arguments = len(rows), [self._parts.address, self._turn.address, ring, entry, room, told]


class RouterLog:
    """The choices of an executable's routers, told together behind the run, or `inside` it, each behind its own launch.
    `queued`: runs that will log; `begun`: those that have been queued on the device. `taken`: records that are counted."""

    def __init__(self, tiers: CudaTiers, routers: Routed, inside: bool, before: RouterLog | None) -> None:
        """`before`: the log of earlier runs, whose counts go on."""
        self._tiers, self.inside = tiers, inside
        self.tally = before.tally if before else Tally(tiers)
        self.queued = self.begun = self.taken = 0
        self.room_of = max(2, min(RUNS, LOGGED // (4 * sum(choices.size for _, choices in routers.values()))))
        parts = [{buffer: r} for buffer, r in routers.items()] if inside else [routers]
        self.rings = [LogRing(tiers, part, self.room_of, inside) for part in parts]

    @property
    def runs(self) -> int:
        """The number of runs that are counted completely."""
        return self.taken // len(self.rings)

    def room(self) -> None:
        """A run is about to be queued: wait until the log has room for its choices."""
        self.queued = max(self.queued, self.runs) + 1
        while self.queued - self.runs > self.room_of:
            self._tiers.until(self.news)
            if not self.news():  # all that was queued has ended, and some of it was not started
                self.queued = self.runs + 1
            self._tiers.drain()

    def news(self) -> bool:
        run, ring = divmod(self.taken, len(self.rings))
        return bool(self.rings[ring].told[0] > run)

    def drain(self) -> None:
        """Count the logged choices. In one thread at a time."""
        while self.news():
            run, n = divmod(self.taken, len(self.rings))
            record = self.rings[n].entries[run % self.room_of].copy()
            late = n + 1 == len(self.rings) or self.rings[n + 1].told[0] > run
            self.taken += 1
            self.tally.add(record, self.rings[n].choices, bool(late))


class Experts:
    """`parts`: by buffer. `layers`: for each router of the program, its layer in the tiers; -1: its experts are not apart."""

    def __init__(self, own: Any, memory: CudaMemory) -> None:
        """`own`: the CudaExecutable."""
        self._own, self._memory, self.parts, self.layers = own, memory, dict[int, CudaPart](), list[int]()
        self._windows: list[Router] = []
        store = own.params
        with store.lock:
            store.experts = store.experts or CudaTiers(memory, store.versions)
        self.tiers: CudaTiers = store.experts
        for router in own.program.routers:
            self.layers.append(self._add(router))
        self._log: RouterLog | None = None
        self._epoch = 0  # of the log

    @property
    def log(self) -> RouterLog | None:
        """None: nothing needs to be counted, as all experts are resident."""
        if self._epoch != self.tiers.epoch and max(self.layers) >= 0:
            if self._log is not None:
                self.tiers.drain(wait=True)  # runs write to the log before
            found, own, inside = dict[int, tuple[int, Choices]](), self._own, False
            for r, layer in zip(own.program.routers, self.layers):
                if layer >= 0:
                    choices = Choices(layer, r.tokens, own.decls[r.buffer].shape.static)
                    found[r.buffer] = own.address(r.buffer), choices
                    inside |= self.tiers.eager and r.ahead > 0
            self._log = RouterLog(self.tiers, found, inside, self._log)
            self._epoch = self.tiers.epoch
            self.tiers.logs.add(self._log)
        return self._log

    @contextmanager
    def queueing(self, whole: bool) -> Iterator[None]:
        """A graph is chosen and queued; `whole`: of a whole run. No table is made meanwhile."""
        first = self.log if whole else None
        if first is not None:
            first.room()
        with self.tiers.lock:
            if (log := self.log if whole else None) is not None and log is not first:
                log.room()
            yield
            if log is not None:
                log.begun = log.queued
        if log is not None:
            self.tiers.queued()

    def _add(self, router: RouterDecl) -> int:
        params = frozenset(router.params)
        buffers = list(self._apart(params, router.experts))
        if not buffers or not self._own.gpu.facts["virtual"]:
            return -1
        name = min(params)
        slots: Any = self.tiers.slots_of(name, router.experts)
        known = {part.name: part for part in slots.parts}
        made = {b.id: known.get(b.name) or self._part(b, slots, param, at) for b, param, at in buffers}
        self.parts |= {id: part for id, part in made.items() if part is not None}
        parts = [part for part in made.values() if part is not None]
        if len(parts) < len(buffers):
            return -1
        window = Router(self._own.stale)
        self._windows.append(window)  # the tiers do not keep it
        return self.tiers.join(name, router.experts, router.shape.static[-1], parts, window)

    def _apart(self, params: frozenset[str], experts: int) -> Iterator[tuple[BufferDecl, BufferDecl, int | None]]:
        """The buffers of these params in which each expert lies apart, read only by products that look up where: with the param,
        and the step that packs them."""
        own, program = self._own, self._own.program
        found: list[tuple[BufferDecl, BufferDecl, int | None]] = []
        for i, code in own.artifact.sections.items():
            step = program.prepare[i]
            if program.sources[i] <= params and not {*code.more[0]} - {"status", "halt"}:
                found.append((own.decls[min(step.writes)], own.decls[min(step.reads)], i))
        for b in (own.decls[i] for i in program.params):
            if b.name in params & program.kept and b.shape.static[0] % experts == 0:
                found.append((b, b, None))
        for b, param, i in found:
            readers = [(code, step) for code, steps in own.run_launches() for _, step in steps if b.id in step.args]
            if readers and all(code.experts and step.args[code.experts[0]] == b.id for code, step in readers):
                yield b, param, i

    def _part(self, b: BufferDecl, slots: CudaSlots, param: BufferDecl, packing: int | None) -> CudaPart | None:
        """None: the buffer is in other memory already."""
        own, each = self._own, b.nbytes // len(slots.of)
        block = own.params.get(b.name, b.nbytes, lambda n: Region(own.gpu, n, each).block(n))
        if not isinstance(block.owner, Region):
            return None
        packer = None
        if packing is not None:
            code, step = own.artifact.sections[packing], own.program.prepare[packing]
            packer = Packer(self._memory, own.functions, code, step, each, param.nbytes // len(slots.of))
        return CudaPart(block.owner, b.name, param, slots, each, packer)

    # -- weights that are set as a whole

    def write(self, buffer: int, array: np.ndarray | DeviceArray) -> bool:
        """Set all experts of a buffer to its bytes. False: none has left, so the caller sets the buffer as a whole."""
        part = self.parts[buffer]
        if not self._is_apart(part):
            return False
        rows = self._rows_of(array, part.experts)
        for expert in range(part.experts):
            part.put(expert, bytes_of(rows(expert)))
        return True

    def _is_apart(self, part: CudaPart) -> bool:
        """Whether experts have left. If not, the whole buffer is memory from now on."""
        if part.store is None:
            part.region.hold(part.experts * part.nbytes)
        return part.store is not None

    def prepare(self, steps: Sequence[int], given: dict[int, Any]) -> tuple[list[int], dict[int, Any]]:
        """Perform the steps that pack experts of which some have left. Returns the others, and the arrays that they read: also
        params of which some experts have left."""
        program, left = self._own.program, []
        for i in steps:
            for b in (b for b in program.prepare[i].reads if b in self.parts and self.parts[b].store is not None):
                given.setdefault(b, self._own.read(b))
            part = next((self.parts[b] for b in program.prepare[i].writes if b in self.parts), None)
            if part is None or not self._is_apart(part):
                left.append(i)
                continue
            (source,) = program.prepare[i].reads
            rows = self._rows_of(given[source] if source in given else self._own.read(source), part.experts)
            for expert in range(part.experts):
                part.fill(expert, rows(expert))
        return left, given

    def _rows_of(self, array: np.ndarray | DeviceArray, experts: int) -> Callable[[int], np.ndarray]:
        each = array.shape[0] // experts
        dims, item = (each, *array.shape[1:]), array.nbytes // experts

        def rows(expert: int) -> np.ndarray:
            if not isinstance(array, DeviceArray):
                return array[expert * each : (expert + 1) * each]
            found = np.empty(dims, array.dtype)
            self._own.gpu.copy_out(bytes_of(found), array.address + expert * item)
            return found

        return rows


__all__ = ["Experts"]
