"""Steps of optimizers: ai.onnx.preview.training."""

from __future__ import annotations

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.table import handler
from rlx.ir import ops
from rlx.ir.dtype import f32
from rlx.ir.node import Value

DOMAIN = "ai.onnx.preview.training"


def _groups(n: Call, width: int) -> tuple[Value, Value, list[list[Value]]]:
    """The rate, the step, and for each tensor its operands: itself, its gradient, and its state."""
    given = [n.value(i) for i in range(2, len(n.inputs))]
    count = len(given) // width
    return n.value(0).reshape(()), n.value(1).reshape(()), [given[i::count] for i in range(count)]


def _results(made: list[tuple[Value, ...]]) -> tuple[Value, ...]:
    """All tensors, then all of their first state, and so on."""
    return tuple(v for part in zip(*made) for v in part)


@handler("Adagrad", domain=DOMAIN)
def adagrad(n: Call) -> tuple[Value, ...]:
    rate, step, groups = _groups(n, 3)
    rate = rate / (step.astype(rate.dtype) * n.attr("decay_factor", 0.0) + 1.0)
    made = []
    for x, gradient, squares in groups:
        gradient = gradient + x * n.attr("norm_coefficient", 0.0)
        squares = squares + gradient * gradient
        made.append((x - rate * gradient / (ops.sqrt(squares) + n.attr("epsilon", 1e-6)), squares))
    return _results(made)


@handler("Adam", domain=DOMAIN)
def adam(n: Call) -> tuple[Value, ...]:
    rate, step, groups = _groups(n, 4)
    alpha, beta, time = n.attr("alpha", 0.9), n.attr("beta", 0.999), step.astype(f32)
    corrected = rate * ops.sqrt(1.0 - ops.pow(beta * (time * 0.0 + 1.0), time)) / (1.0 - ops.pow(time * 0.0 + alpha, time))
    rate = ops.where(ops.less(0, step), corrected.astype(rate.dtype), rate)
    made = []
    for x, gradient, mean, square in groups:
        gradient = gradient + x * n.attr("norm_coefficient", 0.0)
        mean = mean * alpha + gradient * (1 - alpha)
        square = square * beta + gradient * gradient * (1 - beta)
        moved = x - rate * mean / (ops.sqrt(square) + n.attr("epsilon", 1e-6))
        made.append((moved * (1 - n.attr("norm_coefficient_post", 0.0)), mean, square))
    return _results(made)


@handler("Momentum", domain=DOMAIN)
def momentum(n: Call) -> tuple[Value, ...]:
    """The first step takes the gradient as it is, whatever `beta` says."""
    rate, step, groups = _groups(n, 3)
    alpha, made = n.attr("alpha"), []
    beta = ops.where(ops.less(0, step), n.attr("beta"), 1.0)
    for x, gradient, velocity in groups:
        gradient = gradient + x * n.attr("norm_coefficient")
        velocity = velocity * alpha + gradient * beta.astype(x.dtype)
        ahead = gradient + velocity * alpha if n.attr("mode") == "nesterov" else velocity
        made.append((x - rate * ahead, velocity))
    return _results(made)
