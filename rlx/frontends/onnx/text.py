"""Tensors of text: arrays of str (dtype object), which are known when a model is compiled, and never in a graph.

Operators that only move or compare elements need no code for text: they are applied to positions in a table of the texts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlx.frontends.onnx.call import Call, NotKnown, flat, is_text
from rlx.ir.node import Value

_ALL = range(1 << 62)
_MOVES = dict.fromkeys(  # operator -> its results that are text, if operands are
    ("Identity", "Reshape", "Squeeze", "Unsqueeze", "Flatten", "Transpose", "Gather", "GatherND", "GatherElements", "Concat",
     "Slice", "Split", "SplitToSequence", "ConcatFromSequence", "Expand", "Tile", "Where", "Compress", "DepthToSpace",
     "SpaceToDepth", "Scatter", "ScatterElements", "ScatterND", "ReverseSequence"), _ALL,
) | {"Unique": range(1), "Equal": range(0)}  # fmt: skip


_DATA = {"Where": (1, 2), "Scatter": (0, 2), "ScatterElements": (0, 2), "ScatterND": (0, 2)}  # operands of one type, if not 0
_ALIKE = ("Equal", "Concat")  # all operands are of one type


def moves(call: Call) -> bool:
    """True if the operator moves or compares elements that are text."""
    return call.op in _MOVES and not call.domain and any(is_text(x) for _, x in flat("", call.inputs))


def moved(call: Call, handle: Callable[[Call], Any], folded: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The results of such an operator. `folded`: a value as an array, if it is known."""
    def numbered(x: Any) -> Any:
        if isinstance(x, list):
            return [numbered(e) for e in x]
        return np.array([number[e] for e in x.reshape(-1)], np.int64).reshape(x.shape) if is_text(x) else x

    def back(x: Any) -> Any:
        if isinstance(x, list):
            return [back(e) for e in x]
        if isinstance(x, Value):
            if not any(isinstance(v, Value) and call.scope.contents(v) is None for _, v in flat("", call.inputs)):
                call.refuse(f"text of dims {list(x.dims)} is too large to be computed when the model is imported")
            raise NotKnown(x, f"{call.where} gives text, which must be known when it is compiled")
        return table[x] if isinstance(x, np.ndarray) else x

    data = call.inputs if call.op in _ALIKE else [call.inputs[i] for i in _DATA.get(call.op, (0,))]
    if not all(is_text(x) for _, x in flat("", data)):
        call.refuse("text stands beside numbers, or where numbers are needed")
    texts = (x for x in flat("", call.inputs) if is_text(x[1]))
    table = np.array(sorted({e for _, x in texts for e in x.reshape(-1)}) or [""], object)
    number = {text: i for i, text in enumerate(table)}
    call.inputs = numbered(call.inputs)
    made = folded(list(found) if isinstance(found := handle(call), tuple) else [found])
    return tuple(back(x) if i in _MOVES[call.op] else x for i, x in enumerate(made))


__all__ = ["moved", "moves"]
