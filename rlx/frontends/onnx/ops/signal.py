"""Fourier transforms, and the filters in front of and behind them. Windows are made by the bodies of their schemas."""

from __future__ import annotations

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.elementwise import dtype_of
from rlx.frontends.onnx.table import handler
from rlx.ir import functions
from rlx.ir.node import Value


@handler("DFT", since=17)
def dft(n: Call) -> Value:
    axis = n.attr("axis", 1) if n.opset < 20 else n.ints(2, default=(-2,))[0]
    inverse, onesided = bool(n.attr("inverse", 0)), bool(n.attr("onesided", 0))
    return functions.dft(n.value(0), axis=axis, length=n.ints(1, default=(None,))[0], inverse=inverse, onesided=onesided)


@handler("STFT", since=17)
def stft(n: Call) -> Value:
    step, length = n.ints(1)[0], n.ints(3, default=(None,))[0]
    return functions.stft(n.value(0), step, n.maybe(2), length=length, onesided=bool(n.attr("onesided", 1)))


@handler("MelWeightMatrix", since=17)
def mel_weight_matrix(n: Call) -> Value:
    bins, length, rate, low, high = (n.known(i).item() for i in range(5))
    return functions.mel_weights(bins, length, rate, low, high, dtype_of(n, n.attr("output_datatype", 1)))
