"""ONNX models as graphs: `from_onnx`. The package `onnx` (extra `onnx`) is imported here and nowhere else in rlx."""

from __future__ import annotations

from rlx.frontends.onnx.importer import from_onnx

__all__ = ["from_onnx"]
