"""Ops and functions as methods of values: `x.relu()` is `rlx.relu(x)`. Each one is attached where it is declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

FUNCTIONS: dict[str, Callable[..., Any]] = {}  # constructors of ops, and functions made of them (functions.py), by name
ATTRIBUTES = ("real", "imag")  # of an array in numpy, so of a value


class Methods:
    """Base of Value. The stub beside this file has the signatures, written from the op table."""

    __slots__ = ()


def attach(value: type[Methods], name: str, function: Callable[..., Any]) -> None:
    """Makes `function(x, ...)` a method of values, unless Value defines that name itself."""
    if not hasattr(value, name):
        setattr(Methods, name, property(function) if name in ATTRIBUTES else function)


__all__ = ["ATTRIBUTES", "FUNCTIONS", "Methods", "attach"]
