"""Calls in machine code, which an Executable may offer besides its protocol (rlx.driver.backend): what they are asked for, and
the words they share with the runtime."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np


class Gate(ctypes.Structure):
    """What the runtime and calls in machine code tell each other about one executable. Guarded by the GIL.

    `lock`: held by whoever runs or changes the executable. As a context, to be entered with the lock held: meanwhile such calls
    keep away."""

    _fields_ = [
        ("generation", ctypes.c_int64),  # runs begun
        ("shut", ctypes.c_int64),  # not 0: no call may begin
        ("barred", ctypes.c_int64),  # what `shut` is when nobody is inside; written inside
        ("queued", ctypes.c_int64),  # not 0: runs are queued, or their error waits
        ("seen", ctypes.c_int64),  # *changes when all that runs read was last current
        ("changes", ctypes.c_void_p),  # an i64 of the param store: another one with each param that is set
        ("owner", ctypes.c_int64),  # the thread inside this context; 0: none
    ]

    __hash__ = object.__hash__  # by identity, for sets

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def freed(self) -> bool:
        """In a forked child: whether another thread held the lock, which is not here; then it is free again."""
        if not self.lock.locked() or self.owner == threading.get_ident():
            return False
        self.lock.release()  # and not another one: calls in machine code have this one
        self.shut, self.owner = self.barred, 0
        return True

    def __enter__(self) -> None:
        self.shut, self.owner = 1, threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self.shut, self.owner = self.barred, 0


@dataclass(frozen=True)
class FastCall:
    """A function to be made: it takes what `form` says (the arrays in order, or by name; "none": they are `arrays`), copies
    them in, runs, and returns `result`, or with `makes` what that then returns.

    Whatever is not the plain case (another type, dims, a strided array, `gate` shut, its lock held) goes to `slow`."""

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
    """An executable that can make its calls in machine code."""

    def fast_call(self, wanted: FastCall) -> Callable[..., Any] | None:
        """The function, which keeps this executable; None: not in this process (another Python, or a knob)."""
        ...
