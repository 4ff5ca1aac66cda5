"""Recurrent networks with the meaning of ONNX's LSTM, GRU and RNN, by `scan`. The products of the inputs with their weights are
one matmul outside of the loop; the loop has those of the hidden state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir import ops
from rlx.ir.functions import activations as more
from rlx.ir.functions.arrays import stack, zeros
from rlx.ir.functions.control import scan
from rlx.ir.functions.declare import function, known_dim
from rlx.ir.node import Value

Function = Callable[[Value], Value]
Step = Callable[..., tuple[Value, ...]]  # (projected input, *states) -> next states, the hidden one first

# name -> (function, default alpha, default beta); None: it has no such number
_ACTIVATIONS: dict[str, tuple[Callable[..., Value], float | None, float | None]] = {
    "relu": (ops.relu, None, None), "tanh": (ops.tanh, None, None), "sigmoid": (ops.sigmoid, None, None),
    "softsign": (more.softsign, None, None), "softplus": (ops.softplus, None, None),
    "leakyrelu": (lambda x, a: more.leaky_relu(x, a), 0.01, None), "elu": (lambda x, a: more.elu(x, a), 1.0, None),
    "thresholdedrelu": (lambda x, a: more.thresholded_relu(x, a), 1.0, None),
    "affine": (lambda x, a, b: x * a + b, 1.0, 0.0), "scaledtanh": (lambda x, a, b: ops.tanh(x * b) * a, 1.0, 1.0),
    "hardsigmoid": (lambda x, a, b: more.hard_sigmoid(x, a, b), 0.2, 0.5),
}  # fmt: skip


class Options(NamedTuple):
    """The options that all three have. `activations` and their numbers: for each direction in turn; numbers are used up by those
    functions that have them."""

    direction: str = "forward"
    activations: Sequence[str] | None = None
    alpha: Sequence[float] = ()
    beta: Sequence[float] = ()
    clip: float | None = None
    layout: int = 0

    @property
    def reversed(self) -> tuple[bool, ...]:
        """For each direction, whether it begins at the end."""
        found = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}.get(self.direction)
        if found is None:
            raise AttributeValueError(f"direction is forward, reverse or bidirectional, got {self.direction!r}")
        return found

    def functions(self, defaults: Sequence[str]) -> list[list[Function]]:
        """The activation functions of each direction. Their arguments are clipped."""
        count = len(self.reversed)
        names = [*defaults] * count if self.activations is None else [*self.activations]
        if len(names) != count * len(defaults):
            raise AttributeValueError(f"{self.direction} needs {count * len(defaults)} activations, got {names}")
        numbers, made = [iter(self.alpha), iter(self.beta)], []
        for name in names:
            if (found := _ACTIVATIONS.get(name.lower().replace("_", ""))) is None:
                raise AttributeValueError(f"no activation {name!r}; there are {', '.join(_ACTIVATIONS)}")
            f, *own = found
            made.append(partial(self.clipped, f, [next(given, n) for given, n in zip(numbers, own) if n is not None]))
        return [made[i : i + len(defaults)] for i in range(0, len(made), len(defaults))]

    def clipped(self, f: Callable[..., Value], numbers: Sequence[float], x: Value) -> Value:
        return f(x if self.clip is None else ops.clip(x, -self.clip, self.clip), *numbers)


def _check(name: str, x: Value | None, dims: tuple[int, ...]) -> None:
    if x is not None and x.dims != dims:
        raise ShapeError(f"{name} has dims {dims}, got {x.dims}")


def _run(
    x: Value, w: Value, r: Value, lens: Value | None, states: dict[str, Value | None], options: Options,
    step: Callable[[int], Step], bias: Callable[[int], Value | None],
) -> tuple[Value, ...]:  # fmt: skip
    """All directions: the hidden states [length, directions, batch, hidden], then the last value of each state. `step(d)` gives
    the cell of direction d, `bias(d)` is added to the products of the inputs."""
    swap = options.layout == 1
    x = ops.transpose(x, axes=(1, 0, 2)) if swap else x
    length, batch, _ = (known_dim(x, axis) for axis in range(3))
    hidden, count = known_dim(r, 2), len(options.reversed)
    _check("the weights of the state", r, (count, known_dim(w, 1), hidden))
    _check("the weights of the inputs", w, (count, known_dim(w, 1), known_dim(x, 2)))
    if lens is not None:
        _check("sequence_lens", lens, (batch,))
    given = {}
    for name, state in states.items():
        _check(name, state, (batch, count, hidden) if swap else (count, batch, hidden))
        state = zeros((batch, count, hidden) if swap else (count, batch, hidden), x.dtype) if state is None else state
        given[name] = ops.transpose(state, (1, 0, 2)) if swap else state
    rows, last = [], []
    for d, back in enumerate(options.reversed):
        made = ops.matmul(x, ops.transpose(w[d], (1, 0)))
        made = made if (added := bias(d)) is None else made + added
        cell, positions = step(d), ops.iota(dims=length)

        def one(*now: Value, cell: Step = cell) -> tuple[Value, ...]:
            *old, projected, at = now
            found = cell(projected, *old)
            if lens is None:
                return *found, found[0]
            inside = ops.less(at.astype(lens.dtype), lens)[:, None]
            kept = tuple(ops.where(inside, new, before) for new, before in zip(found, old))
            return *kept, ops.where(inside, found[0], 0.0)

        ends, (seen,) = scan(one, [s[d] for s in given.values()], [made, positions], reverse=back)
        rows.append(seen)
        last.append(ends)
    y, final = stack(rows, 2 if swap else 1), [stack(ends, 1 if swap else 0) for ends in zip(*last)]
    return ops.transpose(y, (1, 0, 2, 3)) if swap else y, *final


def _split(x: Value, parts: int) -> list[Value]:
    """The gates, along the last axis."""
    size = known_dim(x, -1) // parts
    return [x[..., i * size : (i + 1) * size] for i in range(parts)]


def _summed(b: Value | None, d: int) -> Value | None:
    """The bias of the inputs and that of the state, added."""
    return None if b is None else b[d, : known_dim(b, 1) // 2] + b[d, known_dim(b, 1) // 2 :]


def _product(h: Value, r: Value, d: int) -> Value:
    return ops.matmul(h, ops.transpose(r[d], (1, 0)))


@function
def lstm(
    x: Value, w: Value, r: Value, b: Value | None = None, sequence_lens: Value | None = None, initial_h: Value | None = None,
    initial_c: Value | None = None, p: Value | None = None, *, input_forget: bool = False,
    direction: Literal["forward", "reverse", "bidirectional"] = "forward", activations: Sequence[str] | None = None,
    alpha: Sequence[float] = (), beta: Sequence[float] = (), clip: float | None = None, layout: int = 0,
) -> tuple[Value, Value, Value]:  # fmt: skip
    """ONNX's LSTM: the hidden states [length, directions, batch, hidden], the last hidden states and the last cells. x [length,
    batch, input], w [directions, 4 * hidden, input] and r [directions, 4 * hidden, hidden] with the gates input, output, forget,
    cell; b [directions, 8 * hidden], p [directions, 3 * hidden]. `layout` 1: batch in front. `activations`: three for each
    direction (sigmoid, tanh, tanh). Behind `sequence_lens` a state stays, and the result is 0."""
    options = Options(direction, activations, alpha, beta, clip, layout)
    functions = options.functions(("sigmoid", "tanh", "tanh"))
    size = known_dim(r, 2)
    _check("the weights of the state", r, (known_dim(r, 0), 4 * size, size))
    _check("the biases", b, (known_dim(r, 0), 8 * size))
    _check("the peepholes", p, (known_dim(r, 0), 3 * size))

    def step(d: int) -> Step:
        f, g, out = functions[d]

        def cell(projected: Value, h: Value, c: Value) -> tuple[Value, ...]:
            i, o, forget, new = _split(projected + _product(h, r, d), 4)
            peep = [0.0] * 3 if p is None else _split(p[d], 3)
            seen = (lambda gate, at, c: gate) if p is None else (lambda gate, at, c: gate + peep[at] * c)
            i = f(seen(i, 0, c))
            forget = 1.0 - i if input_forget else f(seen(forget, 2, c))
            c = forget * c + i * g(new)
            return f(seen(o, 1, c)) * out(c), c

        return cell

    states = {"initial_h": initial_h, "initial_c": initial_c}
    y, h, c = _run(x, w, r, sequence_lens, states, options, step, partial(_summed, b))
    return y, h, c


@function
def gru(
    x: Value, w: Value, r: Value, b: Value | None = None, sequence_lens: Value | None = None, initial_h: Value | None = None,
    *, linear_before_reset: bool = False, direction: Literal["forward", "reverse", "bidirectional"] = "forward",
    activations: Sequence[str] | None = None, alpha: Sequence[float] = (), beta: Sequence[float] = (), clip: float | None = None,
    layout: int = 0,
) -> tuple[Value, Value]:  # fmt: skip
    """ONNX's GRU: the hidden states and the last ones, as in `lstm`. w [directions, 3 * hidden, input] with the gates update,
    reset, hidden; b [directions, 6 * hidden]. `linear_before_reset`: the reset gate is applied to the product of the hidden state
    (as torch does), not to the state. `activations`: two for each direction (sigmoid, tanh)."""
    options = Options(direction, activations, alpha, beta, clip, layout)
    functions = options.functions(("sigmoid", "tanh"))
    size = known_dim(r, 2)
    _check("the weights of the state", r, (known_dim(r, 0), 3 * size, size))
    _check("the biases", b, (known_dim(r, 0), 6 * size))

    def step(d: int) -> Step:
        f, g = functions[d]

        def cell(projected: Value, h: Value) -> tuple[Value, ...]:
            z, reset, new = _split(projected, 3)
            own = zeros((3 * size,), x.dtype) if b is None else b[d, 3 * size :]
            if linear_before_reset:
                hz, hr, hn = _split(_product(h, r, d), 3)
                z, reset = f(z + hz), f(reset + hr)
                new = g(new + reset * (hn + own[2 * size :]))
            else:
                z, reset = (f(a + part) for a, part in zip((z, reset), _split(_product(h, r[:, : 2 * size], d), 2)))
                new = g(new + _product(reset * h, r[:, 2 * size :], d))
            return ((1.0 - z) * new + z * h,)

        return cell

    def bias(d: int) -> Value | None:
        """Of both, but for that which the reset gate multiplies."""
        if b is None or not linear_before_reset:
            return _summed(b, d)
        own = b[d, 3 * size : 5 * size]
        return b[d, : 3 * size] + ops.concat([own, zeros((size,), x.dtype)], axis=0)

    y, h = _run(x, w, r, sequence_lens, {"initial_h": initial_h}, options, step, bias)
    return y, h


@function
def rnn(
    x: Value, w: Value, r: Value, b: Value | None = None, sequence_lens: Value | None = None, initial_h: Value | None = None,
    *, direction: Literal["forward", "reverse", "bidirectional"] = "forward", activations: Sequence[str] | None = None,
    alpha: Sequence[float] = (), beta: Sequence[float] = (), clip: float | None = None, layout: int = 0,
) -> tuple[Value, Value]:  # fmt: skip
    """ONNX's RNN: the hidden states and the last ones, as in `lstm`. w [directions, hidden, input], b [directions, 2 * hidden],
    one activation for each direction (tanh)."""
    options = Options(direction, activations, alpha, beta, clip, layout)
    functions, size = options.functions(("tanh",)), known_dim(r, 2)
    _check("the weights of the state", r, (known_dim(r, 0), size, size))
    _check("the biases", b, (known_dim(r, 0), 2 * size))

    def step(d: int) -> Step:
        return lambda projected, h: (functions[d][0](projected + _product(h, r, d)),)

    y, h = _run(x, w, r, sequence_lens, {"initial_h": initial_h}, options, step, partial(_summed, b))
    return y, h


__all__ = ["gru", "lstm", "rnn"]
