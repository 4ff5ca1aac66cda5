"""Recurrent networks."""

from __future__ import annotations

from typing import Any

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.table import handler
from rlx.ir import functions

_OPERANDS = ("b", "sequence_lens", "initial_h", "initial_c", "p")  # behind x, w and r


@handler("RNN", "GRU", "LSTM", since=7)
def recurrent(n: Call) -> Any:
    given: dict[str, Any] = {name: n.maybe(i) for i, name in enumerate(_OPERANDS, 3) if n.has(i)}
    given |= {"direction": n.attr("direction", "forward"), "clip": n.attr("clip", None), "layout": n.attr("layout", 0)}
    given |= {"activations": n.attr("activations", None)}
    given |= {name: n.attr(f"activation_{name}", ()) for name in ("alpha", "beta")}
    if n.op == "LSTM":
        given["input_forget"] = bool(n.attr("input_forget", 0))
    if n.op == "GRU":
        given["linear_before_reset"] = bool(n.attr("linear_before_reset", 0))
    function: Any = {"RNN": functions.rnn, "GRU": functions.gru, "LSTM": functions.lstm}[n.op]
    return function(n.value(0), n.value(1), n.value(2), **given)
