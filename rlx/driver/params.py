"""ParamStore: parameter bytes on one device, shared by every executable that uses the same weights.

Entries are named: a param by its own name, a prepared buffer by the text that says how it was computed. Executables
compiled for other batch sizes ask for the same names and get the same memory.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakSet


@dataclass
class ParamEntry:
    """One buffer: what the backend allocated, and where it is."""

    memory: Any
    address: int
    nbytes: int


@dataclass(eq=False)
class ParamStore:
    """Params and prepared buffers by name, and how current they are.

    `versions`: times each param was set. `sources`: prepared buffer -> versions of the params it was computed from.
    `kept`: params whose own bytes are here too (others were only read, to prepare something). `changes`: a number that is
    another one from the moment that any param is being set; a C word, for calls in machine code. `lock`: held by whoever sets
    params or prepares what is made of them.
    """

    entries: dict[str, ParamEntry] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)

    changes: ctypes.c_int64 = field(default_factory=ctypes.c_int64)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1), repr=False)

    def __post_init__(self) -> None:
        _stores.add(self)

    @property
    def generation(self) -> int:
        """Another one with every param that is set."""
        return self.changes.value

    def changed(self, name: str) -> None:
        """A param is about to be set."""
        self.versions[name] = self.versions.get(name, 0) + 1
        self.changes.value = next(self._numbers)

    def get(self, name: str, nbytes: int, allocate: Callable[[int], tuple[Any, int]]) -> ParamEntry:
        """The entry `name`, made by `allocate(nbytes) -> (memory, address)` if it is not there yet."""
        entry = self.entries.get(name)
        if entry is None:
            memory, address = allocate(nbytes)
            entry = self.entries[name] = ParamEntry(memory, address, nbytes)
        return entry

    def nbytes(self) -> int:
        return sum(e.nbytes for e in self.entries.values())


_stores: WeakSet[ParamStore] = WeakSet()


def _in_child() -> None:
    """Nobody is left here to go on with what another thread was setting: it is missing."""
    for store in list(_stores):
        store.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
