"""HandleStore: the states of one device by name, apart from the executables that run on them.

Executables on one store (prefill and decode) see each other's states at once; one executable runs on many stores in turn
(CompiledGraph.use_handles). A fork shares the bytes of its parent until either writes, where the device's memory can.
One executable at a time may run on a store; runs on different stores may go on at once. Runs that are queued on a store
(CompiledGraph.commit_no_wait) come before later runs of any executable on it; the store's own methods do not wait for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakSet

import numpy as np

from rlx.driver.queue import RunQueue
from rlx.errors import BindingError, InputShapeError, known
from rlx.host.gate import Gate
from rlx.ir.shape import Shape


class StateMemory(Protocol):
    """What a backend gives a store: an object, or a module, with these functions."""

    def allocate(self, nbytes: int, /) -> Any:
        """Zeroed memory, at one `address` for life; `data`: its bytes in the host's sight, uint8 and flat."""
        ...

    def freeze(self, regions: Sequence[Any], /) -> None:
        """Prepare these to be assigned from without a copy. What they hold, and where, stays."""
        ...

    def assign(self, goal: Any, source: Any, /) -> None:
        """Give `goal` the bytes that `source` has now, of the same size."""
        ...


@dataclass(frozen=True)
class PlainBytes:
    data: np.ndarray

    @property
    def address(self) -> int:
        return self.data.ctypes.data


class PlainMemory:
    """StateMemory in numpy arrays: forks are copies."""

    def allocate(self, nbytes: int) -> PlainBytes:
        return PlainBytes(np.zeros(nbytes, np.uint8))

    def freeze(self, regions: Sequence[PlainBytes]) -> None:
        """Nothing is shared, so nothing needs to be prepared."""

    def assign(self, goal: PlainBytes, source: PlainBytes) -> None:
        np.copyto(goal.data, source.data)


@dataclass(frozen=True, eq=False)
class HandleEntry:
    """One state: its shape, its memory, and that as an array (writable)."""

    shape: Shape
    memory: Any
    array: np.ndarray


class HandleStore:
    """States by name, made when an executable first asks for them, and zero until something is written."""

    def __init__(self) -> None:
        self.entries: dict[str, HandleEntry] = {}
        self._memory: StateMemory | None = None
        self._last: Snapshot | None = None
        self.queue = RunQueue()  # of runs on these states
        self._torn: set[str] = set()  # states that another thread was writing when this process was forked
        _stores.add(self)

    def require(self, wanted: Iterable[tuple[str, Shape]], memory: StateMemory) -> list[HandleEntry]:
        """The entries of these names, in order; those not there yet are made, zeroed, in `memory`.

        InputShapeError: one is there with another shape. BindingError: the store lies in another memory. Nothing is made then.
        """
        wanted = list(wanted)
        for name, shape in wanted:
            if name in self.entries and self.entries[name].shape != shape:
                found = self.entries[name].shape
                raise InputShapeError(f"handle {name!r} is {shape}, but the store has {name!r} as {found}; use another store")
        if self._memory is not None and self._memory is not memory:
            raise BindingError("the handle store belongs to another kind of device; use a store per device")
        self._memory = memory
        for name, shape in wanted:
            if name not in self.entries:
                made = memory.allocate(shape.size_bytes)
                self.entries[name] = HandleEntry(shape, made, made.data.view(shape.dtype.numpy).reshape(shape.static))
        return [self.entries[name] for name, _ in wanted]

    def _in_child(self) -> None:
        """After a fork: a run that another thread was in does not go on here, and what it did to the states is undefined. The
        arena is not: each run writes it anew."""
        if [gate for gate in self.queue.gates if gate.freed()]:
            self._torn.update(self.entries)
            self._tell()

    def mend(self, names: Iterable[str]) -> None:
        """These states have been written as a whole."""
        if self._torn:
            self._torn.difference_update(names)
            self._tell()

    def join(self, gate: Gate) -> None:
        """An executable runs on these states from now on."""
        self.queue.gates.add(gate)
        self._tell()

    def leave(self, gate: Gate) -> None:
        """It runs on others from now on."""
        self.queue.gates.discard(gate)

    def _tell(self) -> None:
        """Calls in machine code do not look at states: they leave the run to Python where there is something to say."""
        self.queue.tell(bool(self._torn) or self.queue.last is not None)

    def check(self) -> None:
        """BindingError: the contents of a state are undefined."""
        if self._torn:
            raise BindingError(
                f"handle {known(self._torn)} may be half written: another thread was at work on it when this process was forked. "
                "Set it (bind_handle, restore_handles), or run on another store (use_handles)"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all states; for a fork, what it takes at most."""
        return sum(e.shape.size_bytes for e in self.entries.values())

    def fork(self, k: int = 1) -> list[HandleStore]:
        """`k` stores with the states as they are now. Each goes its own way; pages are copied when they are first written.

        The first fork copies what was written so far once (to where it can be shared), later ones what was written since.
        MemoryError: the system refuses the memory; this store keeps its states even so."""
        if not isinstance(k, int) or k < 0:
            raise BindingError(f"a number of forks is 0 or more, got {k!r}")
        self.check()
        if self._memory is not None and k:
            self._memory.freeze([e.memory for e in self.entries.values()])
        return [self.copy() for _ in range(k)]

    def copy(self) -> HandleStore:
        """A store with the states as they are now. What a fork has frozen is shared until written, the rest copied."""
        self.check()
        other = HandleStore()
        if self._memory is not None:
            other.require(((name, e.shape) for name, e in self.entries.items()), self._memory)
            other._take(self)
        return other

    def snapshot(self) -> Snapshot:
        """The states as they are now, to restore; as cheap as a fork. The store keeps the last one, for rollback."""
        self._last = Snapshot(self.fork(1)[0])
        return self._last

    def restore(self, snapshot: Snapshot) -> None:
        """Put every state back, for every executable on this store. InputShapeError: the names or shapes are not the store's;
        then nothing changes."""
        if not isinstance(snapshot, Snapshot):
            raise BindingError(f"states are restored from what snapshot_handles gave, got {type(snapshot).__name__}")
        ours, theirs = ({name: e.shape for name, e in store.entries.items()} for store in (self, snapshot.store))
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                found = theirs.get(name, "no such handle")
                raise InputShapeError(f"handle {name!r} is {ours.get(name, 'not in the store')}; the snapshot has {found}")
        if snapshot.store._memory is not self._memory:
            raise BindingError("the snapshot was taken on another kind of device")
        self._take(snapshot.store)

    def rollback(self) -> None:
        """Restore the last snapshot. BindingError: none was taken of this store."""
        if self._last is None:
            raise BindingError("there is no snapshot to go back to; take one with snapshot_handles")
        self.restore(self._last)

    def _take(self, source: HandleStore) -> None:
        if self._memory is not None:
            for name, entry in source.entries.items():
                self._memory.assign(self.entries[name].memory, entry.memory)
        self.mend(source.entries)

    def __repr__(self) -> str:
        return f"HandleStore({self.nbytes} bytes: {known(self.entries)})"


_stores: WeakSet[HandleStore] = WeakSet()


def _after_fork() -> None:
    for store in list(_stores):
        store._in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """States of one moment, in a store that nobody runs on."""

    store: HandleStore

    @property
    def states(self) -> Mapping[str, np.ndarray]:
        """By handle name, read-only."""
        views = {name: entry.array.view() for name, entry in self.store.entries.items()}
        for view in views.values():
            view.flags.writeable = False
        return views
