"""Handlers of ONNX operators, by theme."""
