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

    As a context, to be entered by whoever holds the executable's lock: meanwhile such calls keep away."""

    _fields_ = [
        ("generation", ctypes.c_int64),  # runs begun
        ("shut", ctypes.c_int64),  # not 0: no call may begin
        ("barred", ctypes.c_int64),  # what `shut` is when nobody is inside; written inside
        ("queued", ctypes.c_int64),  # not 0: runs are queued, or their error waits
        ("seen", ctypes.c_int64),  # *changes when all that runs read was last current
        ("changes", ctypes.c_void_p),  # an i64 of the param store: another one with each param that is set
    ]

    def __enter__(self) -> None:
        self.shut = 1

    def __exit__(self, *_: object) -> None:
        self.shut = self.barred


@dataclass(frozen=True)
class FastCall:
    """A function to be made: it takes what `form` says (the arrays in order, or by name; "none": they are `arrays`), copies
    them in, runs, and returns `result`, or with `makes` what that then returns.

    Whatever is not the plain case (another type, dims, a strided array, `gate` shut, `lock` held) goes to `slow`."""

    name: str
    doc: str
    form: Literal["list", "dict", "none"]
    slow: Callable[..., Any]
    result: Any
    gate: Gate
    lock: threading.Lock
    makes: bool = False
    arrays: Sequence[np.ndarray] = ()


@runtime_checkable
class FastCalls(Protocol):
    """An executable that can make its calls in machine code."""

    def fast_call(self, wanted: FastCall) -> Callable[..., Any] | None:
        """The function, which keeps this executable; None: not in this process (another Python, or a knob)."""
        ...
