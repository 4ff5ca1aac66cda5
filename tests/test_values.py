"""Values: operators compare elements, identity tells values apart, and what has no elements yet says so."""

# ruff: noqa: SIM300  numbers and arrays stand on the left to try that side

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.ir.ops as o
from rlx.errors import GraphError
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph, constant

COMPARED = {
    "x == y": lambda x, y: x == y, "x != y": lambda x, y: x != y, "x == x": lambda x, y: x == x,
    "x == 0": lambda x, y: x == 0.0, "0 != x": lambda x, y: 0.0 != x,
    "array == x": lambda x, y: ODD == x, "x != array": lambda x, y: x != ODD, "x == list": lambda x, y: x == [0.0, 1.0, 2.0, 3.0],
    "array < x": lambda x, y: ODD < x, "array >= x": lambda x, y: ODD >= x, "array + x": lambda x, y: ODD + x,
    "2 ** x": lambda x, y: np.float32(2) ** x,
}  # fmt: skip
ODD = np.array([0, 1, np.nan, -0.0], np.float32)


@pytest.mark.parametrize("compare", COMPARED.values(), ids=COMPARED)
def test_operators_compare_elements_as_numpy_does(compare: Callable[..., Any]) -> None:
    arrays = np.array([0, 1, 2, 4], np.float32), np.array([-0.0, 3, np.nan, 4], np.float32)
    want = np.asarray(compare(*arrays))
    g = Graph("g")
    g.set_outputs([compare(g.input("x", (4,), "f32"), g.input("y", (4,), "f32"))])
    (found,), _ = evaluate(g, {"x": arrays[0], "y": arrays[1]})
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found, want)


def test_values_are_told_apart_by_identity() -> None:
    """There is one object per result, whoever asks; sets and dicts of values never ask for elements."""
    g = Graph("g")
    x, y = g.input("x", (4,), "f32"), g.input("y", (4,), "f32")
    best, where = o.top_k(x, k=2)
    assert best is best.node.results[0] and where is best.node.results[1] and best is not where
    assert x is g.inputs[0] and hash(x) == hash(x.node.results[0])
    assert {x, y, best, where, *best.node.results} == {x, y, where, best} and {x: 1, y: 2}[y.node.results[0]] == 2
    assert x in [x, y] and y not in {x: 1}


def test_values_ask_threads_for_one_object() -> None:
    g = Graph("g")
    x = g.input("x", (4,), "f32")
    nodes = [(x * float(i)).node for i in range(300)]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: [n.results[0] for n in nodes], range(16)))
    assert all(a is b for values in found for a, b in zip(values, found[0]))


NO_ELEMENTS = {
    "bool": (lambda x, y: bool(x == y), "no truth value"), "in": (lambda x, y: x in [y], "`is`"),
    "index": (lambda x, y: [y].index(x), "`is`"), "None": (lambda x, y: x == None, "got NoneType"),  # noqa: E711
    "text": (lambda x, y: x != "x", "got str"), "node": (lambda x, y: x == y.node, "node.results"),
    "np.exp": (lambda x, y: np.exp(x), "use rlx.exp"), "np.sum": (lambda x, y: np.add.reduce(x), "no elements before a run"),
    "in place": (lambda x, y: np.add(ODD, x, out=ODD), "no elements before a run"),
    "asarray": (lambda x, y: np.asarray(x), "numpy array"), "array": (lambda x, y: np.array([x, y]), "numpy array"),
    "constant": (lambda x, y: constant([x, y]), "numpy array"),
    "a number in": (lambda x, y: 3.0 in x, "cannot be iterated"),
}  # fmt: skip


@pytest.mark.parametrize("ask, message", NO_ELEMENTS.values(), ids=NO_ELEMENTS)
def test_elements_that_are_not_there_yet_are_a_graph_error(ask: Callable[..., Any], message: str) -> None:
    g = Graph("g")
    with pytest.raises(GraphError, match=message):
        ask(g.input("x", (4,), "f32"), g.input("y", (4,), "f32"))


def test_where_a_value_is_zero() -> None:
    """Compiled: the comparison is an op of the graph."""
    g = rlx.Graph("g")
    x = g.input("x", (4,), rlx.f32)
    g.set_outputs([rlx.where(x == 0.0, 1.0, x), x != 2.0])
    given = np.array([0, 2, -0.0, 5], np.float32)
    whole, unlike = rlx.Session("ref").compile(g).run({"x": given})
    assert whole.tolist() == [1, 2, 1, 5] and unlike.tolist() == [True, False, True, True]
