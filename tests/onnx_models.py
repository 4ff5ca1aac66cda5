"""ONNX models written as text, run by rlx and judged by onnx's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from rlx.frontends.onnx import OnnxModel

HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>\n'


def parsed(text: str, opset: int = 21) -> onnx.ModelProto:
    """A model from its graph in ONNX's text form."""
    return onnx.parser.parse_model(HEAD.format(opset=opset) + text)


def both(text: str, opset: int = 21, **inputs: Any) -> tuple[list[Any], list[Any]]:
    """The outputs of rlx and of onnx's evaluator."""
    model = parsed(text, opset)
    return list(OnnxModel(model).run(inputs).values()), ReferenceEvaluator(model).run(None, inputs)


def same(text: str, opset: int = 21, rtol: float = 1e-5, atol: float = 1e-6, **inputs: Any) -> list[Any]:
    """The outputs of rlx, which are those of onnx's evaluator."""
    found, expected = both(text, opset, **inputs)
    for got, want in zip(found, expected, strict=True):
        pairs = zip(got, want, strict=True) if isinstance(want, list) else [(got, want)]
        for a, b in pairs:
            assert a.dtype == np.asarray(b).dtype and a.shape == np.asarray(b).shape
            np.testing.assert_allclose(a, b, rtol=rtol, atol=atol)
    return found
