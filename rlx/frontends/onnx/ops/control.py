"""If, Loop and Scan.

A branch or a trip count that is known at import is compiled as if it were written out. An If whose condition is known at run time
computes both branches, and selects: graphs have no effects. A Loop whose condition is known at run time is written out up to its
trip count; steps behind the end keep the state. Where that cannot be (no trip count, sequences), the condition must be known.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.frontends.onnx.call import Call, NotKnown, Operand
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.dtype import i64
from rlx.ir.node import Value, constant

UNROLLED = 1024  # steps of a loop that is written out


def as_value(n: Call, x: Operand) -> Value:
    """A tensor as a Value."""
    if not isinstance(x, (Value, np.ndarray)):
        n.refuse("a sequence, or an absent optional, is where a tensor must be known")
    return x if isinstance(x, Value) else n.scope.importer.constant(x)


def _flag(n: Call, x: Operand) -> bool | Value:
    """A condition: a bool if it is known at import."""
    value = as_value(n, x)
    found = n.scope.contents(value)
    return value.reshape(()) if found is None else bool(np.asarray(found).reshape(-1)[0])


@handler("If")
def if_(n: Call) -> tuple[Operand, ...]:
    """Branches whose results differ in dims or kind need the condition when the model is compiled."""
    chosen = _flag(n, n.inputs[0])
    if isinstance(chosen, Value):
        there, here = ([*n.subgraph(name, [])] for name in ("then_branch", "else_branch"))
        if all(_alike(n, a, b) for a, b in zip(there, here, strict=True)):
            return tuple(ops.where(chosen, as_value(n, a), as_value(n, b)) for a, b in zip(there, here))
        chosen = bool(np.asarray(n.known(0)).reshape(-1)[0])
    return tuple(n.subgraph("then_branch" if chosen else "else_branch", []))


def _alike(n: Call, a: Operand, b: Operand) -> bool:
    """True if one of two tensors can be selected."""
    if not all(isinstance(x, (Value, np.ndarray)) for x in (a, b)):
        return False
    x, y = as_value(n, a), as_value(n, b)
    types = n.scope.importer.types
    return x.shape == y.shape and types.get(x) == types.get(y) and not any(n.scope.importer.count(v) for v in (x, y))


@handler("Loop")
def loop(n: Call) -> tuple[Operand, ...]:
    """Results: the states behind the last step, and each step's rows, stacked."""
    limit = int(np.asarray(n.known(0)).reshape(-1)[0]) if n.has(0) else None
    going = _flag(n, n.inputs[1]) if n.has(1) else True
    state, steps, active = n.inputs[2:], [], []
    while going is not False and (limit is None or len(steps) < limit):
        if limit is None and isinstance(going, Value):
            raise NotKnown(going, f"{n.where} has no trip count, and needs its condition when it is compiled")
        if len(steps) == UNROLLED:
            n.refuse(f"the loop has more than {UNROLLED} steps")
        made = n.subgraph("body", [np.array(len(steps)), np.array(True), *state])
        fresh = made[1 : 1 + len(state)]
        if isinstance(going, Value):
            fresh = [_kept(n, going, a, b) for a, b in zip(fresh, state)]
        active.append(going)
        state, ahead = fresh, _flag(n, made[0])
        going = ops.logical_and(going, ahead) if isinstance(going, Value) and isinstance(ahead, Value) else (
            going if ahead is True else ahead)  # fmt: skip
        steps.append(made[1 + len(state) :])
    shown = steps or [n.subgraph("body", [np.array(0), np.array(True), *state])[1 + len(state) :]]
    rows = [functions.stack([as_value(n, x) for x in found], 0)[: len(steps)] for found in zip(*shown)]
    if any(isinstance(x, Value) for x in active) and rows:
        known = [x if isinstance(x, Value) else constant(True) for x in active]
        count = ops.sum(functions.stack(known, 0).astype(i64))
        rows = [n.bounded(x, 0, count) for x in rows]
    return *state, *rows


def _kept(n: Call, going: Value, fresh: Operand, old: Operand) -> Operand:
    """The state behind a step that may be past the end of the loop."""
    if fresh is old:
        return old
    if not _alike(n, fresh, old):
        raise NotKnown(going, f"{n.where} has a state that changes its dims, and needs its condition when it is compiled")
    return ops.where(going, as_value(n, fresh), as_value(n, old))


@handler("Scan", since=9)
def scan(n: Call) -> tuple[Operand, ...]:
    """Results: the states behind the last step, and each step's rows along an axis. Directions of 1 go from the back."""
    count = n.attr("num_scan_inputs")
    state, series = n.inputs[: len(n.inputs) - count], [n.value(i) for i in range(len(n.inputs) - count, len(n.inputs))]
    axes = n.attr("scan_input_axes", (0,) * count)
    series = [functions.moveaxis(x, axis, 0) for x, axis in zip(series, axes, strict=True)]
    back = n.attr("scan_input_directions", (0,) * count)
    state, rows = _scanned(n, state, [functions.flip(x, 0) if b else x for x, b in zip(series, back, strict=True)])
    axes, back = (n.attr(name, (0,) * len(rows)) for name in ("scan_output_axes", "scan_output_directions"))
    rows = [functions.stack(x[::-1] if b else x, axis) for x, axis, b in zip(rows, axes, back, strict=True)]
    return *state, *rows


@handler("Scan")
def scan_batch(n: Call) -> tuple[Operand, ...]:
    """Before opset 9: operands have a batch axis in front, and a step of each sequence."""
    count = n.attr("num_scan_inputs")
    if n.has(0):
        n.refuse("sequences of several lengths (sequence_lens) are not supported")
    if any(n.attr("directions", (0,))):
        n.refuse("scans from the back are not supported in opset 8")
    given = [n.value(i) for i in range(1, len(n.inputs))]
    first = len(given) - count
    each: list[list[Value]] = []
    for b in range(known_dim(n, 1, 0)):
        state, rows = _scanned(n, [x[b] for x in given[:first]], [x[b] for x in given[first:]])
        each.append([*(as_value(n, x) for x in state), *(functions.stack(x, 0) for x in rows)])
    return tuple(functions.stack(list(found), 0) for found in zip(*each))


def _scanned(n: Call, state: Sequence[Operand], series: Sequence[Value]) -> tuple[list[Operand], list[list[Value]]]:
    """The states behind the last step, and each step's rows, from series with the steps in front."""
    lengths = {x.dims[0] for x in series}
    if len(lengths) != 1 or not isinstance(length := lengths.pop(), int):
        n.refuse(f"the scanned axes must have one known length, got {', '.join(str(x.dims[0]) for x in series)}")
    if length > UNROLLED or length == 0:
        n.refuse(f"a scan of {length} steps: 1 to {UNROLLED} are written out")
    rows: list[list[Value]] = []
    for i in range(length):
        made = n.subgraph("body", [*state, *(x[i] for x in series)])
        state = made[: len(state)]
        rows.append([as_value(n, x) for x in made[len(state) :]])
    return list(state), [list(x) for x in zip(*rows)]
