"""The table of ONNX operators: one function for each, registered by `handler`.

A handler takes the Call and returns the results: a Value, a numpy array (known at import), a list (a sequence), None (an absent
optional), or a tuple of these, one per output; trailing outputs may be left out if the node has no names for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from rlx.frontends.onnx import ops

Handler = Callable[..., Any]  # (Call) -> results
_TABLE: dict[tuple[str, str], dict[int, Handler]] = {}


def handler(*names: str, since: int = 1, domain: str = "") -> Callable[[Handler], Handler]:
    """Registers the function for these operators, from opset `since` of the domain on: that of the last change that it knows
    of. For an older opset the handler with the greatest `since` below it is used."""

    def register(function: Handler) -> Handler:
        for name in names:
            _TABLE.setdefault((domain, name), {})[since] = function
        return function

    return register


def find(domain: str, name: str, opset: int) -> Handler | None:
    """The handler of an operator as it is in this opset of its domain. None: there is none."""
    _read_files()
    versions = _TABLE.get((domain, name), {})
    return versions.get(max((since for since in versions if since <= opset), default=0))


def operators() -> list[tuple[str, str, int]]:
    """(domain, name, the first opset that is supported) of every operator with a handler."""
    _read_files()
    return sorted((domain, name, min(versions)) for (domain, name), versions in _TABLE.items())


@cache
def _read_files() -> None:
    """Every file of handlers registers them when it is imported."""
    for file in iter_modules(ops.__path__):
        import_module(f"{ops.__name__}.{file.name}")
