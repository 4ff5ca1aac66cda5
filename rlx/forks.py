"""Treatment, in a forked child, of the objects that it has from its parent, and locks that are free in it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakSet

T = TypeVar("T")


def each_in_child(do: Callable[[T], None]) -> WeakSet[T]:
    """A set, for whose members a forked child calls `do`. Sets that were made first come first."""
    members: WeakSet[T] = WeakSet()

    def do_all() -> None:
        for member in list(members):
            do(member)

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=do_all)
    return members


class Lock:
    """A reentrant lock for `with`. If another thread of the parent held it during a fork, it is free in the child: that thread
    does not exist there and would never release it."""

    __slots__ = ("__weakref__", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        _locks.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def _in_child(self) -> None:
        if self._lock.acquire(blocking=False):  # it was free, or the forking thread holds it, which continues in the child
            self._lock.release()
        else:
            self._lock = threading.RLock()


_locks = each_in_child(Lock._in_child)

__all__ = ["Lock", "each_in_child"]
