"""Machine code calls, an optional interface of an Executable (rlx.driver.backend): the request for one, and the state that they
share with the runtime."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from rlx.records import record


class InterruptSafeLock:
    """A threading.Lock that an exception of a signal's handler never leaves held: since Python 3.14 such an exception may come
    when `__enter__` has returned, but before the body of `with` begins."""

    __slots__ = ("__exit__", "acquire", "locked", "release")  # of the lock itself: nothing comes between its release and the end

    def __init__(self) -> None:
        lock = threading.Lock()
        self.acquire, self.locked, self.release, self.__exit__ = lock.acquire, lock.locked, lock.release, lock.__exit__

    def __enter__(self) -> None:
        held: list[bool] = []
        try:
            held.extend(map(self.acquire, (True,)))  # one call of C code: either all of it is done or nothing
        except BaseException:
            if held:
                self.release()
            raise


new_lock = InterruptSafeLock if sys.version_info >= (3, 14) else threading.Lock


class Gate(ctypes.Structure):
    """State of one executable that the runtime shares with machine code calls. Guarded by the GIL.

    `lock`: held while the executable is run or changed. As a context manager, entered with the lock held: no machine code call
    starts in the meantime."""

    _fields_ = [
        ("generation", ctypes.c_int64),  # number of runs started
        ("shut", ctypes.c_int64),  # not 0: no machine code call may start
        ("barred", ctypes.c_int64),  # value of `shut` outside of the context; written inside it
        ("queued", ctypes.c_int64),  # not 0: runs are queued, or their error is pending
        ("seen", ctypes.c_int64),  # value of *changes when prepared buffers were last up to date
        ("changes", ctypes.c_void_p),  # an i64 of the param store, which changes with each param that is set
        ("owner", ctypes.c_int64),  # id of the thread inside the context; 0: none
    ]

    __hash__ = object.__hash__  # by identity, for sets

    def __init__(self) -> None:
        super().__init__()
        self.lock = new_lock()

    def freed(self) -> bool:
        """In a forked child: release the lock if another thread of the parent held it. Returns whether one did."""
        if not self.lock.locked() or self.owner == threading.get_ident():
            return False
        self.lock.release()  # not replaced: generated functions hold this one
        self.shut, self.owner = self.barred, 0
        return True

    def __enter__(self) -> None:
        self.shut, self.owner = 1, threading.get_ident()

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.shut, self.owner = self.barred, 0


@record
class FastCall:
    """A request for a generated function. It takes arrays (`form`: "list", in order; "dict", by name; "none", it uses `arrays`),
    copies them in, runs, and returns `result`, or result() if `makes`.

    It handles the common case only. Other types or dims, strided arrays, a shut `gate` or a held lock go to `slow`."""

    name: str
    doc: str
    form: Literal["list", "dict", "none"]
    slow: Callable[..., Any]
    result: Any
    gate: Gate
    makes: bool = False
    arrays: Sequence[np.ndarray] = ()


@runtime_checkable
class FastCalls(Protocol):
    """An executable that can generate machine code calls."""

    def fast_call(self, wanted: FastCall) -> Callable[..., Any] | None:
        """The function, which keeps this executable alive. None: not supported in this process (another Python, or a knob)."""
        ...
