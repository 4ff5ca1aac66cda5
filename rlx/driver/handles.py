"""HandleStore: the states of one device by name, separate from the executables that use them.

Executables on one store (prefill and decode) share its states. One executable can switch between many stores
(CompiledGraph.use_handles). A fork is copy-on-write if the device's memory supports it. Only one executable at a time may run on
a store; runs on different stores may be concurrent. Runs queued on a store (CompiledGraph.commit_no_wait) precede later runs of
any executable on it. The store's own methods do not wait for queued runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import NoReturn

import numpy as np

from rlx.driver.memory import Block, Memory, bytes_of
from rlx.driver.queue import RunQueue
from rlx.errors import BindingError, InputShapeError, TransferError, UnknownNameError, Unsupported, known, whole
from rlx.forks import each_in_child
from rlx.host.gate import Gate
from rlx.ir.shape import Shape
from rlx.records import record


@record(eq=False)
class HandleEntry:
    """One state: its shape, and its block of the device's memory."""

    shape: Shape
    block: Block
    name: str

    @cached_property
    def array(self) -> np.ndarray:
        """The block as a writable array. TransferError: the host does not see it (HandleStore.read and write copy)."""
        if self.block.data is None:
            raise TransferError(f"state {self.name!r} lies in memory that the host does not see; read or write copies it")
        return self.block.data.view(self.shape.dtype.numpy).reshape(self.shape.static)


class HandleStore:
    """States by name. A state is allocated when an executable first needs it, and is zero until it is written."""

    def __init__(self) -> None:
        self.entries: dict[str, HandleEntry] = {}
        self._memory: Memory | None = None
        self._last: Snapshot | None = None
        self.queue = RunQueue()  # of runs on these states
        self._torn: set[str] = set()  # states that another thread was writing when this process was forked
        _stores.add(self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        how = "A fork or a snapshot is a copy, and snapshot.states has arrays, for bind_handle"
        raise Unsupported(f"states are memory of this process; they cannot be copied or pickled. {how}")

    def require(self, wanted: Iterable[tuple[str, Shape]], memory: Memory) -> list[HandleEntry]:
        """The entries of these names, in order. Missing ones are allocated in `memory`, zeroed.

        InputShapeError: an entry has another shape. BindingError: the store is in another memory. Nothing is allocated then.
        """
        wanted = list(wanted)
        for name, shape in wanted:
            if name in self.entries and self.entries[name].shape != shape:
                found = self.entries[name].shape
                raise InputShapeError(f"handle {name!r} is {shape}, but the store has {name!r} as {found}; use another store")
        if self._memory is not None and self._memory is not memory:
            raise BindingError("the handle store belongs to another kind of device; use a store per device")
        self._memory = memory
        missing = {name: shape for name, shape in wanted if name not in self.entries}
        for (name, shape), block in zip(missing.items(), memory.allocate_all([s.size_bytes for s in missing.values()])):
            self.entries[name] = HandleEntry(shape, block, name)
        return [self.entries[name] for name, _ in wanted]

    def read(self, name: str) -> np.ndarray:
        """A fresh array of what the state holds."""
        entry, memory = self._entry(name)
        out = np.empty(entry.shape.static, entry.shape.dtype.numpy)
        memory.copy_out(entry.block, bytes_of(out))
        return out

    def read_later(self, name: str) -> Callable[[], np.ndarray]:
        """The function, to be called once, returns a fresh array of what the state holds after the runs queued so far. On an
        asynchronous device it does not wait for runs queued since, so the next run need not wait for the host."""
        entry, memory = self._entry(name)
        out = np.empty(entry.shape.static, entry.shape.dtype.numpy)
        finish = memory.copy_out_later(entry.block, bytes_of(out))

        def wait() -> np.ndarray:
            finish()
            return out

        return wait

    def write(self, name: str, array: np.ndarray) -> None:
        """Give a state these contents. InputShapeError: the array has another shape or dtype."""
        entry, memory = self._entry(name)
        if array.shape != entry.shape.static or array.dtype != entry.shape.dtype.numpy:
            raise InputShapeError(f"handle {name!r} is {entry.shape}, got an array {array.dtype}{list(array.shape)}")
        memory.copy_in(entry.block, bytes_of(np.ascontiguousarray(array)))
        self.mend([name])

    def _entry(self, name: str) -> tuple[HandleEntry, Memory]:
        if self._memory is None or name not in self.entries:
            raise UnknownNameError(f"no state is called {name!r}; there are {known(self.entries)}")
        return self.entries[name], self._memory

    def _in_child(self) -> None:
        """After a fork. Runs of the parent's other threads do not continue in the child, so the states that they were writing are
        undefined. The arena needs no care: each run overwrites it."""
        if [gate for gate in self.queue.gates if gate.freed()]:
            self._torn.update(self.entries)
            self._tell()

    def mend(self, names: Iterable[str]) -> None:
        """These states have been completely overwritten: they are defined again."""
        if self._torn:
            self._torn.difference_update(names)
            self._tell()

    def join(self, gate: Gate) -> None:
        """Register an executable that runs on these states from now on."""
        self.queue.gates.add(gate)
        self._tell()

    def leave(self, gate: Gate) -> None:
        """Remove an executable that runs on other states from now on."""
        self.queue.gates.discard(gate)

    def _tell(self) -> None:
        """Generated functions do not check states. They fall back to Python if states are undefined or runs are queued."""
        self.queue.tell(bool(self._torn) or self.queue.busy)

    def check(self) -> None:
        """BindingError: the contents of a state are undefined."""
        if self._torn:
            raise BindingError(
                f"handle {known(self._torn)} may be half written: another thread was writing it when this process was forked. "
                "Set it (bind_handle, restore_handles), or run on another store (use_handles)"
            )

    @property
    def nbytes(self) -> int:
        """Bytes of all states. A fork takes at most this much."""
        return sum(e.shape.size_bytes for e in self.entries.values())

    def fork(self, k: int = 1) -> list[HandleStore]:
        """`k` independent stores with the current states. Pages are copied when they are first written.

        The first fork copies all pages written so far, once, to shareable memory; later forks copy the pages written since.
        MemoryError: the system refuses the memory; this store keeps its states."""
        k = whole("the number of forks", k, 0)
        self.check()
        if self._memory is not None and k:
            self._memory.freeze([e.block for e in self.entries.values()])
        return [self.copy() for _ in range(k)]

    def copy(self) -> HandleStore:
        """A store with the current states. Pages that a fork has frozen are shared until written; the rest is copied."""
        self.check()
        other = HandleStore()
        if self._memory is not None:
            other.require(((name, e.shape) for name, e in self.entries.items()), self._memory)
            other._take(self)
        return other

    def snapshot(self) -> Snapshot:
        """A snapshot of the current states, for restore. It costs as much as a fork. The store keeps the last for rollback."""
        self._last = Snapshot(self.fork(1)[0])
        return self._last

    def restore(self, snapshot: Snapshot) -> None:
        """Restore every state, for every executable on this store. InputShapeError: the snapshot's names or shapes are not those
        of the store; nothing has changed then."""
        if not isinstance(snapshot, Snapshot):
            raise BindingError(f"restore takes a Snapshot, as returned by snapshot_handles; got {type(snapshot).__name__}")
        ours, theirs = ({name: e.shape for name, e in store.entries.items()} for store in (self, snapshot.store))
        for name in ours | theirs:
            if ours.get(name) != theirs.get(name):
                found = theirs.get(name, "no such handle")
                raise InputShapeError(f"handle {name!r} is {ours.get(name, 'not in the store')}; the snapshot has {found}")
        if snapshot.store._memory is not self._memory:
            raise BindingError("the snapshot was taken on another kind of device")
        self._take(snapshot.store)

    def rollback(self) -> None:
        """Restore the last snapshot. BindingError: no snapshot of this store was taken."""
        if self._last is None:
            raise BindingError("there is no snapshot to restore; take one with snapshot_handles")
        self.restore(self._last)

    def _take(self, source: HandleStore) -> None:
        if self._memory is not None:
            for name, entry in source.entries.items():
                self._memory.assign(self.entries[name].block, entry.block)
        self.mend(source.entries)

    def __repr__(self) -> str:
        return f"HandleStore({self.nbytes} bytes: {known(self.entries)})"


_stores = each_in_child(HandleStore._in_child)


@record(eq=False)
class Snapshot:
    """A copy of the states at one moment, in a store that no executable uses."""

    store: HandleStore

    @property
    def states(self) -> Mapping[str, np.ndarray]:
        """By handle name, read-only; copies where the host does not see the device's memory."""
        entries = self.store.entries
        views = {name: self.store.read(name) if e.block.data is None else e.array.view() for name, e in entries.items()}
        for view in views.values():
            view.flags.writeable = False
        return views
