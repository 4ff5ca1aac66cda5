"""ParamStore: parameter bytes on one device, shared by every executable that uses the same weights.

A param's entry is named by the param, a prepared buffer's entry by the text of its computation. Executables compiled for other
batch sizes use the same names and so share the memory.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import TYPE_CHECKING

from rlx.driver.memory import Block
from rlx.forks import each_in_child
from rlx.host.gate import new_lock
from rlx.records import field, record

if TYPE_CHECKING:
    from rlx.driver.experts import ExpertTiers


@record(eq=False, frozen=False)
class ParamStore:
    """Params and prepared buffers by name, with versions.

    `versions`: how often each param was set. `sources`: prepared buffer -> versions of the params it was computed from.
    `kept`: params whose own bytes are stored too (others were only read to compute prepared buffers). `changes`: a number that
    changes as soon as the setting of any param begins; a C word that machine code can read. `lock`: held while params are set or
    prepared buffers are computed. `experts`: the tiers of experts among the params; None: no executable has any.
    """

    entries: dict[str, Block] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    sources: dict[str, tuple[int, ...]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)
    experts: ExpertTiers | None = None

    changes: ctypes.c_int64 = field(default_factory=ctypes.c_int64)
    lock: threading.Lock = field(default_factory=new_lock, repr=False)
    _numbers: Iterator[int] = field(default_factory=lambda: count(1), repr=False)

    def __post_init__(self) -> None:
        _stores.add(self)

    @property
    def generation(self) -> int:
        """A number that changes with every param that is set."""
        return self.changes.value

    def changed(self, name: str) -> None:
        """Record that a param is about to be set."""
        self.versions[name] = self.versions.get(name, 0) + 1
        self.changes.value = next(self._numbers)

    def get(self, name: str, nbytes: int, allocate: Callable[[int], Block]) -> Block:
        """The block `name`. If it is missing, it is made by `allocate(nbytes)`."""
        if name not in self.entries:
            self.entries[name] = allocate(nbytes)
        return self.entries[name]

    def nbytes(self) -> int:
        return sum(e.nbytes for e in self.entries.values())


def _in_child(store: ParamStore) -> None:
    """A param that another thread of the parent was setting stays incomplete, so it counts as missing."""
    store.lock = new_lock()


_stores = each_in_child(_in_child)
