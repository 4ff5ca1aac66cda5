"""Random numbers, and dropout.

Numbers come from rlx's generator: its key is made of the attribute `seed` (of the node's place in the model, if it has none), and
its counter is state of the graph, which each run increases. So runs differ from each other, and a program repeats its runs.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.frontends.onnx.call import Call
from rlx.frontends.onnx.ops.elementwise import dtype_of
from rlx.frontends.onnx.table import handler
from rlx.ir import ops
from rlx.ir.dtype import DType, bool_, f32, u32
from rlx.ir.handle import BufferHandle
from rlx.ir.node import TRACING, Value, constant
from rlx.ir.shape import DimLike

COUNTER = "onnx.random"  # the handle of the runs that were made


def _source(n: Call) -> tuple[np.ndarray, Value]:
    """Key and counter of a node."""
    if TRACING.made:
        n.refuse("random numbers in a sub-graph would be the same each time that it runs")  # it is written out instead
    graph, draws = n.scope.importer.graph, n.scope.importer.draws
    counter = next((h for h in graph.handles if h.name == COUNTER), None)
    if counter is None:
        counter = graph.handle(BufferHandle(COUNTER, (), u32))
        graph.assign(counter, counter + 1)
    seed = n.attr("seed", None)
    key = (0, zlib.crc32(n.where.encode())) if seed is None else (1, int(np.float32(seed).view(np.uint32)))
    times = draws[n.where]  # that it was written out before: a loop draws other numbers in each step
    draws[n.where] += 1
    return np.array((key[0] + 2 * times, key[1]), np.uint32), counter


def uniform(n: Call, dims: Sequence[DimLike]) -> Value:
    """f32 in [0, 1)."""
    return ops.random_uniform(*_source(n), dims=tuple(dims))


@handler("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike")
def random_numbers(n: Call) -> Value:
    like = n.op.endswith("Like")
    dims = n.dims(0) if like else n.attr("shape")
    dtype: DType = n.dtype(0) if like and "dtype" not in n.attrs else dtype_of(n, n.attr("dtype", 1))
    if "Uniform" in n.op:
        low, high = n.attr("low", 0.0), n.attr("high", 1.0)
        return (uniform(n, dims) * (high - low) + low).astype(dtype)
    pairs = uniform(n, (2, *dims))
    normal = ops.sqrt(ops.log(1.0 - pairs[0]) * -2.0) * ops.cos(pairs[1] * (2 * math.pi))  # by Box and Muller
    return (normal * n.attr("scale", 1.0) + n.attr("mean", 0.0)).astype(dtype)


@handler("Bernoulli", since=15)
def bernoulli(n: Call) -> Value:
    dtype = dtype_of(n, n.attr("dtype")) if "dtype" in n.attrs else n.dtype(0)
    return ops.less(uniform(n, n.dims(0)), n.value(0).astype(f32)).astype(dtype)


@handler("Multinomial", since=7)
def multinomial(n: Call) -> Value:
    """Classes by their logarithmic, unnormalised probabilities [batch, classes]."""
    (batch, classes), count = n.dims(0), n.attr("sample_size", 1)
    noise = ops.gumbel(*_source(n), dims=(batch, count, classes))
    chosen = ops.argmax(ops.unsqueeze(n.value(0).astype(f32), axes=(1,)) + noise, axis=-1)
    return chosen.astype(dtype_of(n, n.attr("dtype", 6)))


@handler("Dropout", since=7)
def dropout(n: Call) -> Any:
    """Before opset 12, of inference alone; later, of training if operand 2 says so."""
    x, ratio = n.value(0), float(np.asarray(n.known(1, 0.5)).reshape(())) if n.opset >= 12 else n.attr("ratio", 0.5)
    training = n.opset >= 12 and bool(np.asarray(n.known(2, False)).reshape(()))
    if not training or ratio == 0:
        return x, ops.broadcast_to(constant(True), dims=x.dims).astype(bool_ if n.opset >= 10 else x.dtype)
    kept = ops.less_equal(ratio, uniform(n, x.dims))
    return ops.where(kept, x / (1 - ratio), constant(0, x.dtype)), kept
