"""Code of contractions and claimed ops, a module each, which is imported by the first program that has the op."""

from __future__ import annotations

from importlib import import_module
from typing import Any

CLAIMED = {"attention": "attention", "attention_parts": "attention", "dequant_matmul": "quant", "conv": "grouped"}  # op -> module


def writer(op: str) -> Any:
    """The module that writes the code of a claimed op."""
    return import_module(f"{__name__}.{CLAIMED[op]}")


__all__ = ["CLAIMED", "writer"]
