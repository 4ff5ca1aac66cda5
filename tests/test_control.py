"""Control flow: sub-graphs traced from functions, their text and rules, and what devices compute, beside loops in numpy."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, GraphError, ParseError, ShapeError, VerifyError
from rlx.ir.body import Body
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph
from rlx.ir.node import Node

RNG = np.random.default_rng(7)


def nested() -> tuple[Graph, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A scan, a conditional in a conditional, a while and a counted loop, with values from outside."""
    g = Graph("nested")
    x, go, w = g.input("x", (5, 3), rlx.f32), g.input("go", (), rlx.bool_), g.param("w", (3, 3), rlx.f32)

    def step(h: rlx.Value, row: rlx.Value) -> tuple[rlx.Value, ...]:
        h = rlx.tanh(h @ w + row)
        return h, h * 2.0

    (h,), (rows,) = rlx.scan(step, rlx.zeros((3,)), x, reverse=True)
    (a,) = rlx.cond(go, lambda v: v + x[0], lambda v: v * rlx.cond(go, lambda: x[1], lambda: x[2])[0], h)
    n, b = rlx.while_loop(lambda n, v: (v * v).sum() < 100.0, lambda n, v: (n + 1, v * 2.0), rlx.constant(0), a)
    (c,), (seen,), count = rlx.counted_loop(lambda i, go, v: (i < 3, v + 1.0, v), b, limit=6)
    g.set_outputs([h, rows, a, n, b, c, seen, count])
    given = {"x": RNG.normal(size=(5, 3)).astype(np.float32), "go": np.array(False)}
    return g, given, {"w": RNG.normal(size=(3, 3)).astype(np.float32)}


def in_numpy(x: np.ndarray, go: bool, w: np.ndarray) -> list[np.ndarray]:
    h, rows = np.zeros(3, np.float32), np.zeros((5, 3), np.float32)
    for i in reversed(range(5)):
        h = np.tanh(h @ w + x[i])
        rows[i] = h * 2
    a = h + x[0] if go else h * x[2]
    n, b = 0, a
    while (b * b).sum() < 100:
        n, b = n + 1, b * 2
    seen = np.concatenate([[b + i for i in range(4)], np.zeros((2, 3), np.float32)])
    return [h, rows, a, np.int64(n), b, b + 4, seen, np.int64(4)]


@pytest.mark.parametrize("go", [False, True])
def test_references_are_loops_in_numpy(go: bool) -> None:
    g, given, params = nested()
    found, _ = evaluate(g, given | {"go": np.array(go)}, params)
    for have, want in zip(found, in_numpy(given["x"], go, params["w"]), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5)


def test_a_graph_with_sub_graphs_reads_back_unchanged() -> None:
    g, given, params = nested()
    g.verify()
    text = str(g)
    again = Graph.parse(text)
    assert str(again) == text and again.fingerprint() == g.fingerprint()
    copied = pickle.loads(pickle.dumps(g))
    assert str(copied) == text
    assert text.count("graph @") == 7 and "  graph @2 else\n    input x0 : f32[3]" in text
    for have, want in zip(evaluate(again, given, params)[0], evaluate(g, given, params)[0]):
        np.testing.assert_array_equal(have, want)


def test_a_change_in_a_body_changes_the_fingerprint() -> None:
    def made(factor: float) -> Graph:
        g = Graph("g")
        g.set_outputs(rlx.cond(g.input("p", (), "bool"), lambda v: v * factor, lambda v: v, g.input("x", (3,), rlx.f32)))
        return g

    assert made(2.0).fingerprint() == made(2.0).fingerprint() != made(3.0).fingerprint()
    one, two, other = (made(f).outputs[0].node.attrs for f in (2.0, 2.0, 3.0))
    assert one == two != other and hash(one) == hash(two) and repr(one) != repr(other)


@pytest.mark.parametrize(
    "text, message",
    [
        ("graph g\n  graph @0 b\n    param w : f32[]\n    return r0 = %w\n  return", "inputs and results only"),
        ("graph g\n  input p : bool[]\n  %0 = branch(%p, then_body=@0, else_body=@1) : f32[]", "no sub-graph @0 stands above"),
        ("graph g\n  graph @0 b\n    return\n  graph @0 b\n    return\n  return", "two sub-graphs @0"),
        ("graph g\n" + "graph @0 b\n" * 20, "16 deep at most"),
        ("graph g\n  input x : f32[]\n  graph @0 b\n    return r0 = %x", "no leaf 'x' is declared above"),
        ("graph g\n  graph @0 b\n    return", "expected return"),
    ],
)
def test_bad_texts_of_sub_graphs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ParseError, match=message):
        Graph.parse(text)


def test_carried_values_keep_shape_and_dtype() -> None:
    g = Graph("g")
    x = g.input("x", (4,), rlx.f32)
    with pytest.raises(ShapeError, match=r"carried value x0 is f32\[4\], its next value is f32\[2\]"):
        rlx.scan(lambda h: h[:2], x, length=3)
    with pytest.raises(DTypeError, match=r"carried value x0 is f32\[4\], its next value is f64\[4\]"):
        rlx.while_loop(lambda h: h.sum() < 1.0, lambda h: h.astype("f64"), x)
    with pytest.raises(ShapeError, match="gives 2 values"):
        rlx.while_loop(lambda h: h.sum() < 1.0, lambda h: (h, h), x)
    with pytest.raises(ShapeError, match=r"gives a bool \(\), got bool\[4\]"):
        rlx.while_loop(lambda h: h < 1.0, lambda h: h, x)
    with pytest.raises(ShapeError, match="the branches give different results"):
        rlx.cond(g.input("p", (), "bool"), lambda: x, lambda: x[:2])
    with pytest.raises(ShapeError, match="scan needs one length"):
        rlx.scan(lambda h, a, b: h, x, [x, x[:2]])


def test_a_body_assigns_no_state_and_has_no_collective() -> None:
    g = Graph("g")
    x, h = g.input("x", (4,), rlx.f32), g.handle(rlx.BufferHandle("h", (4,), rlx.f32))

    def assigning(v: rlx.Value) -> rlx.Value:
        g.assign(h, v)
        return v

    with pytest.raises(GraphError, match="in the body of control flow.*Carry the value"):
        rlx.scan(assigning, x, length=2)
    assert not g.assigns
    with pytest.raises(GraphError, match="all_reduce cannot be in a sub-graph"):
        rlx.cond(g.input("p", (), "bool"), lambda: rlx.all_reduce(x, ranks=2), lambda: x)
    (out,), _ = rlx.scan(lambda v: v + h, x, length=2)  # a state may be read
    g.assign(h, out)
    g.set_outputs([out])
    g.verify()


def test_a_value_of_another_body_is_refused() -> None:
    g = Graph("g")
    x, kept = g.input("x", (4,), rlx.f32), []
    rlx.scan(lambda v: kept.append(v) or v, x, length=2)
    g.set_outputs([x + kept[0]])
    with pytest.raises(VerifyError, match="the graph does not declare input 'x0'"):
        g.verify()


def test_verify_looks_into_sub_graphs() -> None:
    g = Graph("g")
    x = g.input("x", (4,), rlx.f32)
    (y,), _ = rlx.scan(lambda v: v * 2.0, x, length=2)
    loop = y.node
    body = loop.attrs.body
    mul = body.outputs[0].node
    broken = Node(mul.op, mul.inputs, mul.attrs, (rlx.Shape((5,), rlx.f32),), mul.name)
    attrs = type(loop.attrs)(Body(body.name, body.inputs, broken.results), 1, 2)
    g.set_outputs([Node(loop.op, loop.inputs, attrs, loop.shapes).results[1]])
    with pytest.raises(VerifyError, match=r"sub-graph 'scan': mul.*is f32\[5\], its shape rule gives f32\[4\]"):
        g.verify()
