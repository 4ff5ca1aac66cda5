"""Random graphs, compiled for every device that computes, against the reference evaluator; with and without fusion."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx.errors import GraphError
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph, Value
from rlx.ir.op import OPS, Kind

UNARY = sorted(
    n for n, d in OPS.items() if d.kind is Kind.POINTWISE and d.arity == (1, 1) and d.attrs is None and "f" in d.dtypes
)  # by fact, so that a new op takes part
BINARY = ("add", "sub", "mul", "maximum", "minimum")
DIMS = st.lists(st.sampled_from([1, 2, 3, 5, 17]), min_size=1, max_size=3).map(tuple)


def grow(draw, g: Graph, pool: list[Value]) -> Value | None:
    """One more value made from values of the pool; None where the drawn op does not fit the drawn operands."""
    pick = lambda: draw(st.sampled_from(pool))  # noqa: E731
    a = pick()
    what = draw(st.sampled_from(("unary", "binary", "reduce", "softmax", "transpose", "reshape", "matmul", "slice", "concat")))
    try:
        if what == "unary":
            out = getattr(rlx, draw(st.sampled_from(UNARY)))(a)
            return out if out.dtype == rlx.f32 else rlx.where(out, a, 0.5)
        if what == "binary":
            return getattr(rlx, draw(st.sampled_from(BINARY)))(a, pick())
        if what == "reduce" and a.rank:
            axis = draw(st.integers(0, a.rank - 1))
            return draw(st.sampled_from((rlx.sum, rlx.max, rlx.mean)))(a, axis=axis, keepdims=draw(st.booleans()))
        if what == "softmax" and a.rank:
            return rlx.softmax(a)
        if what == "transpose":
            return a.transpose(*draw(st.permutations(range(a.rank))))
        if what == "reshape":
            return a.reshape(-1) if draw(st.booleans()) else rlx.unsqueeze(a, axes=(0,))
        if what == "matmul" and a.rank and isinstance(a.dims[-1], int):
            w = g.param(f"w{len(g.params)}", (a.dims[-1], draw(st.sampled_from([1, 4, 7]))), rlx.f32)
            return (a @ w) * 0.25
        if what == "slice" and a.rank:
            return rlx.slice(a, starts=(0,) * a.rank, stops=tuple(max(1, d // 2) for d in a.dims))
        if what == "concat" and a.rank:
            return rlx.concat(a, a, axis=0)
    except GraphError:
        return None
    return None


@st.composite
def graphs(draw) -> Graph:
    g = Graph("random")
    pool = [g.input(f"x{i}", draw(DIMS), rlx.f32) for i in range(draw(st.integers(1, 2)))]
    for _ in range(draw(st.integers(1, 9))):
        made = grow(draw, g, pool)
        if made is not None and made.shape.num_elements <= 20000:
            pool.append(made)
    outputs = draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3))
    g.set_outputs([*outputs, pool[-1]])
    return g


@given(graphs(), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_device_agrees_with_the_reference(g: Graph, seed: int) -> None:
    rng = np.random.default_rng(seed)
    draw = lambda v: rng.uniform(-2, 2, v.shape.static).astype(np.float32)  # noqa: E731
    inputs, params = {v.name: draw(v) for v in g.inputs}, {v.name: draw(v) for v in g.params}
    with np.errstate(all="ignore"):
        want, _ = evaluate(g, inputs, params, {})
        parsed = Graph.parse(str(g))
        assert str(parsed) == str(g) and parsed.fingerprint() == g.fingerprint()
        for device, options in (
            ("ref", rlx.CompileOptions()),
            ("ref:1", rlx.CompileOptions(disable=("canonicalise", "tidy"))),
            ("cpu", rlx.CompileOptions()),
            ("cpu", rlx.CompileOptions(disable=("fuse",), threads=1)),
        ):
            compiled = rlx.Session(device).compile(parsed, options)
            for name, value in params.items():
                compiled.set_param(name, value)
            for found, expected in zip(compiled.run(inputs), want, strict=True):
                compare(found, expected, f"{device} {options}\n{g}\n{compiled.program()}")


def compare(found: np.ndarray, want: np.ndarray, where: str) -> None:
    """Equal up to rounding; where values are steep or cancel (tan of a large angle, 1/x near 0), up to their own size."""
    scale = np.maximum(1.0, np.nanmax(np.abs(want[np.isfinite(want)]), initial=0.0))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(want), err_msg=where)
    np.testing.assert_allclose(found, want, rtol=1e-3, atol=1e-4 * scale, err_msg=where)
