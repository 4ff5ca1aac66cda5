"""Control flow from Python functions on values. A function is traced once, to a sub-graph; values from outside that it uses are
read there. A body assigns no state, and has no collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlx.errors import AttributeValueError, DTypeError, ShapeError
from rlx.ir import ops
from rlx.ir.body import Body, Traced, called, leaf
from rlx.ir.dtype import DType, bool_, i64
from rlx.ir.functions.arrays import flip, moveaxis, zeros
from rlx.ir.functions.declare import as_value, function, known_dim, own_axis
from rlx.ir.node import CONSTANT, Operand, Value, constant
from rlx.ir.shape import Shape

INDEX = Shape((), i64)


def _results(made: Value | tuple[Value, ...]) -> tuple[Value, ...]:
    return made if isinstance(made, tuple) else (made,)


@function
def cond(
    pred: Operand, then_branch: Callable[..., object], else_branch: Callable[..., object], *operands: Operand
) -> tuple[Value, ...]:
    """The results of then_branch(*operands) where `pred`, a bool (), holds, else those of else_branch(*operands): a tuple. Only
    one of them runs. Both give values of the same shapes and dtypes."""
    given = [as_value(x) for x in operands]
    traces = [Traced(name, {f"x{i}": x.shape for i, x in enumerate(given)}) for name in ("then", "else")]
    functions = then_branch, else_branch
    bodies = [trace.body(trace.call(f, *trace.inputs)) for trace, f in zip(traces, functions)]
    every = list(dict.fromkeys(v for trace in traces for v in trace.captured))
    one, other = (_with_inputs(trace, body, every) for trace, body in zip(traces, bodies))
    return _results(ops.branch(as_value(pred), *given, *every, then_body=one, else_body=other))


def _with_inputs(trace: Traced, body: Body, every: Sequence[Value]) -> Body:
    """The body with an input for each of the values from outside, also for those that it does not use."""
    own = len(trace.inputs)
    found = dict(zip(trace.captured, body.inputs[own:]))
    rest = (found[v] if v in found else leaf(f"unused{i}", v.shape) for i, v in enumerate(every))
    return replace(body, inputs=(*body.inputs[:own], *rest))


@function
def while_loop(
    test: Callable[..., object], body: Callable[..., object], *carried: Operand, limit: int | None = None
) -> tuple[Value, ...]:
    """Repeats carried = body(*carried) while test(*carried), a bool (), holds; with `limit`, so many times at most. Gives the
    last carried values, a tuple. They keep their shapes and dtypes."""
    given = [as_value(x) for x in carried]
    trace = _trace("while", bool_, given)
    found = trace.call(body, *trace.inputs[2:])
    _check_count(found, len(given), exactly=True)
    first, then = (call(test, *values) for call, values in ((called, given), (trace.call, found)))
    for value in (*first, *then):
        if value.shape != Shape((), bool_) or len(then) != 1:
            error = DTypeError if value.dtype != bool_ else ShapeError
            raise error(f"the test of while_loop gives a bool (), got {', '.join(str(v.shape) for v in then)}")
    made = trace.body((*then, *found))
    made_of = first[0], *given, *trace.captured
    return _results(ops.loop(*made_of, body=made, carried=1 + len(given), tests=True, limit=_limit(limit)))[2:]


@function
def counted_loop(
    body: Callable[..., object], *carried: Operand, limit: int | None, go: Operand = True
) -> tuple[tuple[Value, ...], tuple[Value, ...], Value]:
    """Repeats go, *carried, *rows = body(i, go, *carried) while `go` holds, at most `limit` times (None: no limit, and no rows).
    Gives the carried values, the rows stacked as [limit, ...] (zeros behind the last iteration), and the number of iterations,
    i64 (). i is i64 (), and the `go` that the body gets is True. Where that is also its result, nothing is tested."""
    given, start = [as_value(x) for x in carried], as_value(go)
    trace = _trace("loop", bool_, given)
    outputs = trace.call(body, trace.inputs[0], constant(True), *trace.inputs[2:])
    _check_count(outputs, 1 + len(given))
    flags = [start]
    if _holds(start) and _holds(outputs[0]):
        outputs, flags = outputs[1:], []
        del trace.inputs[1]
    made = trace.body(outputs)
    values = *flags, *given, *trace.captured
    found = ops.loop(*values, body=made, carried=len(flags) + len(given), tests=bool(flags), limit=_limit(limit))
    count, *rest = _results(found)
    rest = rest[len(flags) :]
    return tuple(rest[: len(carried)]), tuple(rest[len(carried) :]), count


def _holds(flag: Value) -> bool:
    """True if a test is known to hold."""
    return flag.node.op is CONSTANT and flag.shape == Shape((), bool_) and bool(flag.node.attrs.data)  # type: ignore[union-attr]


def _trace(name: str, go: DType | None, given: Sequence[Value]) -> Traced:
    """A loop's: its inputs are the number of the iteration, the test if there is one, and the carried values."""
    flag = {} if go is None else {"go": Shape((), go)}
    return Traced(name, {"iteration": INDEX} | flag | {f"x{i}": x.shape for i, x in enumerate(given)})


def _limit(limit: int | None) -> int:
    if limit is not None and (type(limit) is not int or limit < 0):
        raise AttributeValueError(f"limit is the greatest number of iterations, at least 0, got {limit!r}")
    return -1 if limit is None else limit


def _check_count(found: Sequence[Value], wanted: int, exactly: bool = False) -> None:
    if len(found) < wanted or (exactly and len(found) > wanted):
        raise ShapeError(f"the body gives {len(found)} values, a loop that carries so many needs {wanted}")


def _several(given: Operand | Sequence[Operand]) -> list[Value]:
    return [as_value(x) for x in (given if isinstance(given, (tuple, list)) else (given,))]  # type: ignore[arg-type]


def _per_input(given: int | Sequence[int], count: int, name: str) -> list[int]:
    found = [given] * count if isinstance(given, int) else list(given)
    if len(found) != count:
        raise AttributeValueError(f"{name}: {len(found)} values for {count}")
    return found


@function
def scan(
    body: Callable[..., object], carried: Operand | Sequence[Operand], inputs: Operand | Sequence[Operand] = (),
    length: int | None = None, axis: int | Sequence[int] = 0, reverse: bool | Sequence[bool] = False,
    out_axis: int | Sequence[int] = 0, out_reverse: bool | Sequence[bool] | None = None,
) -> tuple[tuple[Value, ...], tuple[Value, ...]]:  # fmt: skip
    """*carried, *rows = body(*carried, *slices) for each position along `axis` of the inputs, from the last one with `reverse`.
    Gives the last carried values, and the rows stacked along `out_axis`: each at the position of the inputs it came of
    (`out_reverse` as `reverse`, if left out). `length`: where there are no inputs. `axis` and `reverse` may be one for each."""
    state, read = _several(carried), _several(inputs)
    axes = [own_axis(x, a) for x, a in zip(read, _per_input(axis, len(read), "axis"))]
    backward = _per_input(reverse, len(read), "reverse")
    sizes = {known_dim(x, a) for x, a in zip(read, axes)} | ({length} if length is not None else set())
    if len(sizes) != 1:
        raise ShapeError(f"scan needs one length, got {sorted(sizes) or 'none'}: of the inputs along their axes, and `length`")
    (steps,) = sizes
    trace = _trace("scan", None, state)
    number, *now = trace.inputs

    def part(x: Value, axis: int, back: int) -> Value:
        """The slice of an input that this iteration reads."""
        if not steps:  # there is none, but the body is traced
            return zeros((*x.dims[:axis], *x.dims[axis + 1 :]), x.dtype)
        return ops.squeeze(ops.take_rows(x, steps - 1 - number if back else number, count=1, axis=axis), (axis,))

    def step(*now: Value) -> object:
        return body(*now, *map(part, read, axes, backward))

    outputs = trace.call(step, *now)
    _check_count(outputs, len(state))
    made = trace.body(outputs)
    found = _results(ops.loop(*state, *trace.captured, body=made, carried=len(state), limit=steps))[1:]
    rows, stacked = len(outputs) - len(state), []
    flipped = (reverse if isinstance(reverse, bool) else False) if out_reverse is None else out_reverse
    own = zip(found[len(state) :], _per_input(out_axis, rows, "out_axis"), _per_input(flipped, rows, "out_reverse"))
    for x, a, back in own:
        x = flip(x, 0) if back else x
        stacked.append(moveaxis(x, 0, own_axis(x, a)) if a else x)
    return found[: len(state)], tuple(stacked)


__all__ = ["cond", "counted_loop", "scan", "while_loop"]
