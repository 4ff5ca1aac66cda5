"""ParamStore: parameter bytes on one device, shared by every executable that uses the same weights.

Entries are named: a param by its own name, a prepared buffer by the text that says how it was computed. Executables
compiled for other batch sizes ask for the same names and get the same memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any


@dataclass
class ParamEntry:
    """One buffer: what the backend allocated, and where it is."""

    memory: Any
    address: int
    nbytes: int


@dataclass
class ParamStore:
    """Params and prepared buffers by name, and how current they are.

    `versions`: times each param was set. `sources`: prepared buffer -> versions of the params it was computed from.
    `kept`: params whose own bytes are here too (others were only read, to prepare something). `changes`: a number that is
    another one after every param that is set; a C word, for calls in machine code.
    """

    entries: dict[str, ParamEntry] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)

    changes: ctypes.c_int64 = field(default_factory=ctypes.c_int64)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1), repr=False)

    @property
    def generation(self) -> int:
        """Another one with every param that is set."""
        return self.changes.value

    def changed(self, name: str) -> None:
        """A param was set."""
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
