"""The first test to run: from one add to a small transformer step, in a few seconds."""

from __future__ import annotations

import math

import numpy as np
import pytest

import rlx


def compile_(graph: rlx.Graph, **params: np.ndarray) -> rlx.CompiledGraph:
    compiled = rlx.Session(rlx.Device.CPU).compile(graph)
    for name, array in params.items():
        compiled.set_param(name, array)
    return compiled


def test_add():
    g = rlx.Graph("add")
    x, y = g.input("x", (5,), rlx.f32), g.input("y", (5,), rlx.f32)
    g.set_outputs([x + y])
    (out,) = compile_(g).run({"x": np.arange(5, dtype=np.float32), "y": np.full(5, 0.5, np.float32)})
    np.testing.assert_array_equal(out, np.arange(5) + 0.5)


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.erf(x / math.sqrt(2)))


def test_matmul_bias_gelu_of_the_first_page():
    g = rlx.Graph("matmul_bias_gelu")
    x = g.input("x", (2, 4), rlx.f32)
    w, b = g.param("w", (4, 3), rlx.f32), g.param("b", (3,), rlx.f32)
    g.set_outputs([rlx.gelu(x @ w + b)])
    bias = np.array([0.5, -0.5, 0.0], np.float32)
    compiled = compile_(g, w=np.eye(4, 3, dtype=np.float32), b=bias)
    (out,) = compiled.run({"x": np.array([[1, 0, 0, 0], [0, 1, 0, 0]], np.float32)})
    want = [[gelu(v) for v in row] for row in ((1.5, -0.5, 0.0), (0.5, 0.5, 0.0))]
    np.testing.assert_allclose(out, want, atol=1e-6, rtol=0)
    (out,) = compiled.run({"x": np.zeros((2, 4), np.float32)})
    np.testing.assert_allclose(out, [[gelu(float(v)) for v in bias]] * 2, atol=1e-6, rtol=0)


def test_counter_keeps_its_state():
    g = rlx.Graph("counter")
    total = rlx.BufferHandle("total", (4,), rlx.f32)
    state, delta = g.handle(total), g.input("delta", (4,), rlx.f32)
    g.assign(state, state + delta)
    g.set_outputs([state + delta])
    counter = rlx.Session(rlx.Device.CPU).compile(g, rlx.CompileOptions().bind_handle(total))
    assert counter.bind_handle("total", np.zeros(4, np.float32))
    for _ in range(5):
        counter.run({"delta": np.ones(4, np.float32)})
    np.testing.assert_array_equal(counter.read_handle("total"), [5, 5, 5, 5])


def test_wrong_name():
    g = rlx.Graph("add")
    g.set_outputs([g.input("x", (5,), rlx.f32) + 1.0])
    with pytest.raises(rlx.errors.UnknownNameError, match=r"'X'.*'x'"):
        compile_(g).run({"X": np.zeros(5, np.float32)})


def test_one_transformer_step():
    """A pre-norm block with causal attention, against numpy in f64."""
    length, hidden, heads = 7, 12, 3
    rng = np.random.default_rng(0)
    shapes = {"qkv": (hidden, 3 * hidden), "out": (hidden, hidden), "up": (hidden, 4 * hidden), "down": (4 * hidden, hidden)}
    weights = {name: (rng.standard_normal(s) * 0.3).astype(np.float32) for name, s in shapes.items()}
    ones, zeros = np.ones(hidden, np.float32), np.zeros(hidden, np.float32)

    g = rlx.Graph("block")
    x = g.input("x", (length, hidden), rlx.f32)
    w = {name: g.param(name, s, rlx.f32) for name, s in shapes.items()}
    h = rlx.layer_norm(x, ones, zeros)
    q, k, v = (p.reshape(1, length, heads, -1).transpose(0, 2, 1, 3) for p in rlx.split(h @ w["qkv"], parts=3, axis=1))
    seen = rlx.attention(q, k, v, mask="causal").transpose(0, 2, 1, 3).reshape(length, hidden)
    y = x + seen @ w["out"]
    g.set_outputs([y + rlx.silu(rlx.layer_norm(y, ones, zeros) @ w["up"]) @ w["down"]])

    data = rng.standard_normal((length, hidden)).astype(np.float32)
    (found,) = compile_(g, **weights).run({"x": data})
    np.testing.assert_allclose(found, _block(data.astype(np.float64), weights, heads), atol=2e-5, rtol=1e-5)


def _block(x: np.ndarray, w: dict[str, np.ndarray], heads: int) -> np.ndarray:
    def norm(a: np.ndarray) -> np.ndarray:
        return (a - a.mean(-1, keepdims=True)) / np.sqrt(a.var(-1, keepdims=True) + 1e-5)

    def split(a: np.ndarray) -> np.ndarray:
        return a.reshape(len(a), heads, -1).transpose(1, 0, 2)

    q, k, v = (split(p) for p in np.split(norm(x) @ w["qkv"], 3, axis=1))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(q.shape[-1])
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    y = x + ((share / share.sum(-1, keepdims=True)) @ v).transpose(1, 0, 2).reshape(x.shape) @ w["out"]
    up = norm(y) @ w["up"]
    return y + (up / (1 + np.exp(-up))) @ w["down"]
