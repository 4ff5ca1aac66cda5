"""ONNX models as graphs: `from_onnx`. The package `onnx` (extra `onnx`) is imported here and nowhere else in rlx."""

from __future__ import annotations

from rlx.frontends.onnx.importer import from_onnx
from rlx.frontends.onnx.model import OnnxModel

__all__ = ["OnnxModel", "from_onnx"]
