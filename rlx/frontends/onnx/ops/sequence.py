"""Sequences, which are lists whose length is known at import, and optionals."""

from __future__ import annotations

import numpy as np

from rlx.frontends.onnx.call import Call, Operand
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.node import Value

LONGEST = 1 << 14  # elements that a tensor is split to


@handler("SequenceConstruct")
def construct(n: Call) -> list[Operand]:
    return list(n.inputs)


@handler("SequenceEmpty")
def empty(n: Call) -> list[Operand]:
    return []


@handler("SequenceLength")
def length(n: Call) -> np.ndarray:
    return np.array(len(n.sequence(0)), np.int64)


@handler("SequenceAt")
def at(n: Call) -> Operand:
    found = n.sequence(0)
    return found[_position(n, 1, len(found), len(found) - 1)]


@handler("SequenceErase")
def erase(n: Call) -> list[Operand]:
    found = n.sequence(0)
    gone = _position(n, 1, len(found), len(found) - 1) if n.has(1) else len(found) - 1
    return found[:gone] + found[gone + 1 :]


@handler("SequenceInsert")
def insert(n: Call) -> list[Operand]:
    found = n.sequence(0)
    place = _position(n, 2, len(found), len(found)) if n.has(2) else len(found)
    return [*found[:place], n.inputs[1], *found[place:]]


def _position(n: Call, i: int, size: int, last: int) -> int:
    """The position in operand i, counted from the front of `size` elements."""
    place = int(np.asarray(n.known(i)).reshape(-1)[0])
    if not -size <= place <= last:
        n.refuse(f"position {place} is out of range for a sequence of {size}")
    return place + size if place < 0 else place


@handler("SplitToSequence")
def split(n: Call) -> list[Value]:
    """Parts of given sizes, or of one size, of which the last may be smaller; by default of 1, without that dim unless
    `keepdims`."""
    axis = n.axis(0)
    size = known_dim(n, 0, axis)
    given = np.asarray(n.known(1, np.array(1)))
    each = int(given) if given.ndim == 0 else 0
    if given.ndim == 0 and each < 1:
        n.refuse(f"parts of {each} elements")
    if each and size // each > LONGEST:
        n.refuse(f"it makes {size // each} parts, at most {LONGEST} are supported")
    parts = tuple(min(each, size - start) for start in range(0, size, each)) if given.ndim == 0 else n.ints(1)
    made: list[Value] = [*ops.split(n.value(0), parts=parts, axis=axis)] if parts else []
    return made if n.has(1) or n.attr("keepdims", 1) else [ops.squeeze(x, axes=(axis,)) for x in made]


@handler("ConcatFromSequence")
def concat(n: Call) -> Value:
    found = [x if isinstance(x, Value) else n.scope.importer.constant(x) for x in n.sequence(0)]
    if not found:
        n.refuse("the sequence is empty")
    if n.attr("new_axis", 0):
        return functions.stack(found, n.attr("axis"))
    return ops.concat(*found, axis=n.axis(rank=found[0].rank))


@handler("Optional")
def optional(n: Call) -> Operand:
    return n.inputs[0] if n.inputs else None


@handler("OptionalGetElement")
def optional_element(n: Call) -> Operand:
    if not n.inputs or n.inputs[0] is None:
        n.refuse("the optional is absent")
    return n.inputs[0]


@handler("OptionalHasElement")
def optional_given(n: Call) -> np.ndarray:
    return np.array(bool(n.inputs) and n.inputs[0] is not None)
