"""ONNX models written as text, and ONNX Runtime as their judge where it is installed."""

from __future__ import annotations

import importlib.util

import numpy as np
import onnx

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'


def parsed(text: str, opset: int = 21) -> onnx.ModelProto:
    """A model from its graph in ONNX's text form."""
    return onnx.parser.parse_model(HEAD.format(opset=opset) + text)


def runtime(model: onnx.ModelProto, inputs: dict[str, np.ndarray]) -> list[np.ndarray] | None:
    """The outputs of ONNX Runtime; None: it is not installed, and tests have formulas alone."""
    if importlib.util.find_spec("onnxruntime") is None:
        return None
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)
