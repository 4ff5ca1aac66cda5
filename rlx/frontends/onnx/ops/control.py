"""If, Loop and Scan.

A branch or a short loop that is known at import is compiled as if it were written out. An If whose condition is known at run
time is rlx.cond, a Loop whose end is known at run time, or that is long, rlx.counted_loop, and a long Scan rlx.scan. Graphs
that cannot be sub-graphs (they draw random numbers, need the contents of a state, or have states that change their dims) are
written out: both branches and a choice, or the steps up to the trip count, where steps behind the end keep the state. Where
that cannot be (no trip count, sequences), the condition must be known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlx.frontends.onnx.call import UNROLLED, Call, NotKnown, Operand, is_text
from rlx.frontends.onnx.ops.shape import known_dim
from rlx.frontends.onnx.table import handler
from rlx.ir import functions, ops
from rlx.ir.dtype import i64
from rlx.ir.node import Value, constant

SHORT = 64  # nodes of a loop that is written out wherever it can be
MOST_ROWS = 1 << 24  # steps of a loop that has results of each step, if it may end before


def as_value(n: Call, x: Operand) -> Value:
    """A tensor as a Value."""
    if not isinstance(x, (Value, np.ndarray)):
        n.refuse("a sequence, or an absent optional, is where a tensor must be known")
    return x if isinstance(x, Value) else n.scope.importer.constant(x)


def _is_tensor(x: Operand) -> bool:
    """True if it can be in a graph."""
    return isinstance(x, (Value, np.ndarray)) and not is_text(x)


def _flag(n: Call, x: Operand) -> bool | Value:
    """A condition: a bool if it is known at import."""
    value = as_value(n, x)
    found = n.scope.contents(value)
    return value.reshape(()) if found is None else bool(np.asarray(found).reshape(-1)[0])


def _like(n: Call, made: Sequence[Value], given: Sequence[Operand]) -> list[Value]:
    """Values that stand for others, with ONNX's element types of those."""
    types = n.scope.importer.types
    types |= {v: types[x] for v, x in zip(made, given) if isinstance(x, Value) and x in types}
    return list(made)


@handler("If")
def if_(n: Call) -> tuple[Operand, ...]:
    """Branches whose results differ in dims or kind need the condition when the model is compiled."""
    chosen = _flag(n, n.inputs[0])
    if not isinstance(chosen, Value):
        return tuple(n.subgraph("then_branch" if chosen else "else_branch", []))
    found: list[list[Operand]] = []

    def branch(name: str) -> list[Value]:
        found.append(list(n.subgraph(name, [])))
        if not all(_alike(n, a, b) for a, b in zip(found[0], found[-1], strict=True)):
            raise NotKnown(chosen, f"{n.where} has branches of other dims or kinds, and needs its condition when it is compiled")
        return [as_value(n, x) for x in found[-1]]

    def traced() -> tuple[Value, ...]:
        made = functions.cond(chosen, lambda: branch("then_branch"), lambda: branch("else_branch"))
        n.scope.importer.flow(made[0], n.where)
        return made

    made = n.scope.importer.traced(n.where, traced) if n.outputs else ()
    if made is None:
        made = [ops.where(chosen, a, b) for a, b in zip(branch("then_branch"), branch("else_branch"))]
    return tuple(_like(n, made, found[0])) if made else ()


def _alike(n: Call, a: Operand, b: Operand) -> bool:
    """True if one of two tensors can be selected."""
    if not (_is_tensor(a) and _is_tensor(b)):
        return False
    x, y = as_value(n, a), as_value(n, b)
    types = n.scope.importer.types
    return x.shape == y.shape and types.get(x) == types.get(y) and not any(n.scope.importer.count(v) for v in (x, y))


# -- Loop ----------------------------------------------------------------------------------------------------------------


@handler("Loop")
def loop(n: Call) -> tuple[Operand, ...]:
    """Results: the states behind the last step, and each step's rows, stacked."""
    made = n.scope.importer.traced(n.where, lambda: _counted(n)) if _can_count(n) else None
    return _written(n) if made is None else made


def _trips(n: Call) -> int | None:
    """The trip count; None: there is none, or it is known at run time."""
    limit = n.scope.contents(n.value(0)) if n.has(0) else None
    return None if limit is None else int(np.asarray(limit).reshape(-1)[0])


def _can_count(n: Call) -> bool:
    """True if the loop becomes one of the graph: it is not short, its results have known dims, and the device has loops."""
    steps = _trips(n)
    nodes, rows = len(n.attr("body").node), len(n.attr("body").output) - len(n.inputs) + 1
    if (n.has(1) and _flag(n, n.inputs[1]) is False) or not all(map(_is_tensor, n.inputs[2:])):
        return False
    if steps is None:
        return not rows and n.scope.importer.control and (n.has(0) or n.has(1))
    return steps * nodes > SHORT and (steps <= UNROLLED or (n.scope.importer.control and not (rows and steps > MOST_ROWS)))


def _counted(n: Call) -> tuple[Value, ...]:
    """The loop as one of the graph. A trip count that is known at run time becomes a part of its test."""
    state = [as_value(n, x) for x in n.inputs[2:]]
    going: Any = _flag(n, n.inputs[1]) if n.has(1) else True
    steps = _trips(n)
    trips = n.value(0).reshape(()) if n.has(0) and steps is None else None

    def body(i: Value, go: Value, *now: Value) -> list[Value]:
        made = n.subgraph("body", [i, np.array(True), *_like(n, now, state)])
        ahead, *rest = (_whole(n, x) for x in made)
        ahead = ahead.reshape(()) if ahead.rank else ahead
        return [ahead if trips is None else ops.logical_and(ahead, ops.less(i + 1, trips)), *rest]

    if trips is not None:
        going = ops.less(0, trips) if going is True else ops.logical_and(going, ops.less(0, trips))
    carried, rows, count = functions.counted_loop(body, *(_whole(n, x) for x in state), limit=steps, go=going)
    n.scope.importer.flow(count, n.where)
    if count.node.attrs.tests:  # type: ignore[union-attr]
        rows = tuple(n.bounded(x, 0, count) for x in rows)
    return *_like(n, carried, state), *rows


def _whole(n: Call, x: Operand) -> Value:
    """A tensor that a loop can carry or stack."""
    value = as_value(n, x)
    if n.scope.importer.count(value):
        n.refuse("a state, or a result of each step, has a size that depends on data")
    return value


def _written(n: Call) -> tuple[Operand, ...]:
    """The steps one after the other."""
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
    rows = [functions.stack([_whole(n, x) for x in found], 0)[: len(steps)] for found in zip(*shown)]
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


# -- Scan ----------------------------------------------------------------------------------------------------------------


@handler("Scan", since=9)
def scan(n: Call) -> tuple[Operand, ...]:
    """Results: the states behind the last step, and each step's rows along an axis. Directions of 1 go from the back."""
    count = n.attr("num_scan_inputs")
    state, series = n.inputs[: len(n.inputs) - count], [n.value(i) for i in range(len(n.inputs) - count, len(n.inputs))]
    rows = len(n.attr("body").output) - len(state)
    facts = {"axis": n.attr("scan_input_axes", (0,) * count), "reverse": n.attr("scan_input_directions", (0,) * count)}
    facts |= {"out_axis": n.attr("scan_output_axes", (0,) * rows)}
    return tuple(_scanned(n, state, series, **facts, out_reverse=n.attr("scan_output_directions", (0,) * rows)))


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
    rows = (0,) * (len(n.attr("body").output) - first)
    facts = {"axis": (0,) * count, "reverse": (0,) * count, "out_axis": rows, "out_reverse": rows}
    each = [
        [as_value(n, x) for x in _scanned(n, [x[b] for x in given[:first]], [x[b] for x in given[first:]], **facts)]
        for b in range(known_dim(n, 1, 0))
    ]
    return tuple(functions.stack(list(found), 0) for found in zip(*each))


def _scanned(n: Call, state: Sequence[Operand], series: Sequence[Value], **facts: Sequence[int]) -> Sequence[Operand]:
    """The results on series along their axes, by the facts that rlx.scan takes."""
    lengths = {x.dims[a] for x, a in zip(series, facts["axis"], strict=True)}
    if len(lengths) != 1 or not isinstance(length := lengths.pop(), int):
        n.refuse(f"the scanned axes must have one known length, got {', '.join(str(x.shape) for x in series)}")
    long = length * len(n.attr("body").node) > SHORT and (length <= UNROLLED or n.scope.importer.control)
    traced = _traced_scan(n, state, series, length, facts)
    made = n.scope.importer.traced(n.where, traced) if long or not length else None
    return _written_scan(n, state, series, length, facts) if made is None else made


def _traced_scan(
    n: Call, state: Sequence[Operand], series: Sequence[Value], length: int, facts: dict[str, Sequence[int]]
) -> Callable[[], list[Value]]:
    start = [as_value(n, x) for x in state]

    def body(*now: Value) -> list[Value]:
        made = n.subgraph("body", [*_like(n, now[: len(state)], start), *_like(n, now[len(state) :], series)])
        return [_whole(n, x) for x in made]

    def traced() -> list[Value]:
        carried, rows = functions.scan(body, [_whole(n, x) for x in start], series, length, **facts)  # type: ignore[arg-type]
        made = [*_like(n, carried, start), *rows]
        n.scope.importer.flow(made[0], n.where)
        return made

    return traced


def _written_scan(
    n: Call, state: Sequence[Operand], series: Sequence[Value], length: int, facts: dict[str, Sequence[int]]
) -> Sequence[Operand]:
    if length > UNROLLED or length == 0:
        n.refuse(f"a scan of {length} steps: 1 to {UNROLLED} are written out")
    series = [functions.moveaxis(x, axis, 0) for x, axis in zip(series, facts["axis"])]
    series = [functions.flip(x, 0) if back else x for x, back in zip(series, facts["reverse"], strict=True)]
    steps: list[list[Value]] = []
    for i in range(length):
        made = n.subgraph("body", [*state, *(x[i] for x in series)])
        state = made[: len(state)]
        steps.append([_whole(n, x) for x in made[len(state) :]])
    rows = [list(x) for x in zip(*steps)]
    turned = [x[::-1] if back else x for x, back in zip(rows, facts["out_reverse"], strict=True)]
    return [*state, *(functions.stack(x, axis) for x, axis in zip(turned, facts["out_axis"], strict=True))]
