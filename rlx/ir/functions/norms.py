"""Normalisations and losses of networks that are made of other ops."""

from __future__ import annotations

from typing import Literal, get_args

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir import ops
from rlx.ir.dtype import i64
from rlx.ir.functions.declare import as_value, function, known_dim, widened
from rlx.ir.node import Operand, Value, constant

Reduction = Literal["none", "sum", "mean"]  # of the losses of all labels


@function
def instance_norm(x: Value, scale: Operand, bias: Operand, eps: float = 1e-5) -> Value:
    """Each channel of each sample of x [batch, channels, …], normalised on its own; scale and bias are per channel."""
    return ops.group_norm(x, scale, bias, groups=known_dim(x, 1), eps=eps)


@function
@widened
def lp_normalize(x: Value, p: int = 2, axis: int = -1) -> Value:
    """x divided by its norm along the axis: of absolute values (p = 1) or squares (p = 2). Lines of norm 0 stay zeros."""
    if p not in (1, 2):
        raise AttributeValueError(f"p is 1 or 2, got {p}")
    size = ops.sum(x * x if p == 2 else ops.abs(x), axis=axis, keepdims=True)
    size = ops.sqrt(size) if p == 2 else size
    return ops.where(ops.equal(size, 0.0), 0.0, x / size)


@function
@widened
def local_response_norm(x: Value, size: int, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0) -> Value:
    """x [batch, channels, …] divided by (k + alpha * m)**beta, with m the mean of the squares of `size` neighbouring channels;
    those that do not exist count as 0."""
    channels = known_dim(x, 1)
    low, high = ([amount if i == 1 else 0 for i in range(x.rank)] for amount in ((size - 1) // 2, size // 2))
    squares = ops.pad(x * x, low=low, high=high)
    total = squares[:, :channels]
    for i in range(1, size):
        total = total + squares[:, i : i + channels]
    return x / ops.pow(total * (alpha / size) + k, constant(beta, x.dtype))


@function
@widened
def nll_loss(
    x: Value, labels: Operand, weight: Operand | None = None, ignore: int | None = None, reduction: Reduction = "mean",
) -> Value:  # fmt: skip
    """Minus the log-likelihood x [batch, classes, …] of each label [batch, …], times the weight of its class. Labels that are
    `ignore`, or no class, count nothing; a mean is divided by the sum of the weights that count."""
    labels = as_value(labels)
    if x.rank < 2 or labels.dims != (x.dims[0], *x.dims[2:]):
        raise ShapeError(f"x is [batch, classes, …] with a label [batch, …] for each line of classes, got {x!r} and {labels!r}")
    if reduction not in get_args(Reduction):
        raise AttributeValueError(f"reduction is 'none', 'sum' or 'mean', got {reduction!r}")
    after, labels = (1,) * (x.rank - 2), ops.unsqueeze(labels.astype(i64), axes=1)
    hot = ops.equal(ops.iota(dims=(x.dims[1], *after)), labels)
    if ignore is not None:
        hot = ops.logical_and(hot, ops.not_equal(labels, ignore))
    each = constant(1, x.dtype) if weight is None else ops.reshape(as_value(weight), dims=(-1, *after))
    losses = ops.sum(ops.where(hot, x * -each, 0.0), axis=1)
    if reduction == "mean":
        return ops.sum(losses) / ops.sum(ops.where(hot, each, 0.0))
    return ops.sum(losses) if reduction == "sum" else losses


@function
@widened
def cross_entropy(
    x: Value, labels: Operand, weight: Operand | None = None, ignore: int | None = None, reduction: Reduction = "mean",
) -> Value:  # fmt: skip
    """nll_loss of log_softmax(x [batch, classes, …])."""
    return nll_loss(ops.log_softmax(x, axis=1), labels, weight, ignore, reduction)


__all__ = ["cross_entropy", "instance_norm", "local_response_norm", "lp_normalize", "nll_loss"]
