"""Locks that are free in a forked child."""

from __future__ import annotations

import os
import threading
from weakref import WeakSet


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


_locks: WeakSet[Lock] = WeakSet()


def _after_fork() -> None:
    for lock in list(_locks):
        lock._in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)

__all__ = ["Lock"]
