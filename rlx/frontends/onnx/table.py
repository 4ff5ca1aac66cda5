"""The table of ONNX operators: one function for each, registered by `handler`.

A handler takes the Call and returns the results: a Value, a numpy array (known at import), a list (a sequence), None (an absent
optional), or a tuple of these, one per output; trailing outputs may be left out if the node has no names for them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

Handler = Callable[..., Any]  # (Call) -> results
_FILES = (  # of rlx/frontends/onnx/ops
    "activation", "attention", "contract", "elementwise", "index", "norm", "random", "reduce", "shape", "training",
)  # fmt: skip
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
    for file in _FILES:
        import_module(f"rlx.frontends.onnx.ops.{file}")
    versions = _TABLE.get((domain, name), {})
    return versions.get(max((since for since in versions if since <= opset), default=0))
