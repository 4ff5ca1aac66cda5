"""Compiled code that the driver is handed: backends offer it by name, and it is made when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

_offers: dict[str, Callable[[], Any]] = {}


def offer(name: str, make: Callable[[], Any]) -> None:
    """`make` gives what `native(name)` then returns."""
    _offers[name] = make


@cache
def native(name: str) -> Any:
    """What a backend offers by that name; None where nobody does, or its compiler is not installed: then numpy must do."""
    try:
        return _offers[name]() if name in _offers else None
    except ModuleNotFoundError:
        return None


__all__ = ["native", "offer"]
