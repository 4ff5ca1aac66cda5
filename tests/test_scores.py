"""Attention written as products and a softmax: the forms that are recognised, and those that are not."""

import numpy as np
import pytest

import rlx
from rlx.backends import get
from rlx.compiler.compilation import Compilation
from rlx.compiler.options import CompileOptions
from rlx.compiler.scores import scores
from rlx.ir import OPS, Graph
from rlx.ir.evaluate import evaluate

rng = np.random.default_rng(0)
COMPILATION = Compilation(get("cpu").target(), CompileOptions())


def guarded(p):
    return rlx.where(rlx.is_nan(p), 0.0, p)


def graph_of(body, lead=(2, 3), dims=(17, 9, 8, 5)):
    """`body` of q, k transposed, v, and a bias per key of the first lead dim."""
    rows, keys, depth, width = dims
    g = Graph("attention")
    q, k = g.input("q", (*lead, rows, depth), "f32"), g.input("k", (*lead, depth, keys), "f32")
    v, bias = g.input("v", (*lead, keys, width), "f32"), g.input("bias", (lead[0], *(1 for _ in lead[1:]), 1, keys), "f32")
    made = body(q, k, v, bias)
    g.set_outputs(made if isinstance(made, list) else [made])
    return g


def found(graph):
    return [n for n in graph.nodes() if n.op is OPS["attention"]]


FORMS = {
    "plain": lambda q, k, v, bias: rlx.softmax(q @ k) @ v,
    "scaled": lambda q, k, v, bias: rlx.softmax((q @ k) * 0.3) @ v,
    "divided": lambda q, k, v, bias: rlx.softmax((q @ k) / 3.0, axis=-1) @ v,
    "both scaled": lambda q, k, v, bias: rlx.softmax((q * 0.5) @ (0.7 * k)) @ v,
    "biased": lambda q, k, v, bias: rlx.softmax((q @ k) * 0.3 + bias) @ v,
    "biased, guarded": lambda q, k, v, bias: guarded(rlx.softmax(bias + (q * 0.3) @ k)) @ v,
}


def test_the_scores_of_attention_may_be_attention_themselves():
    def twice(q, k, v, bias):
        return rlx.softmax(rlx.softmax(q @ k) @ v) @ k[..., :4, :]

    g = graph_of(twice, dims=(6, 8, 4, 4))
    passed = scores(g, COMPILATION)
    assert len(found(passed)) == 1
    feeds = {x.name: rng.normal(size=x.shape.static).astype(np.float32) for x in g.inputs}
    np.testing.assert_allclose(evaluate(passed, feeds)[0][0], evaluate(g, feeds)[0][0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("order", ["shared", "dealt"])
def test_heads_that_are_repeated_for_their_queries_are_read_once(flat, order):
    """As exporters write grouped heads; heads that are dealt out in turn stay repeated."""
    g = Graph("attention")
    q, k, v = (g.input(n, (2, heads, 9, 16), "f32") for n, heads in (("q", 6), ("k", 2), ("v", 2)))
    at = 2 if order == "shared" else 1
    dims = (2, 2, 3, 9, 16) if order == "shared" else (2, 3, 2, 9, 16)
    many = lambda x, *lead: rlx.broadcast_to(rlx.expand_dims(x, at), dims).reshape((*lead, 9, 16))  # noqa: E731
    turned = many(k, 12).transpose(0, 2, 1).reshape((2, 6, 16, 9)) if flat else many(k, 2, 6).transpose(0, 1, 3, 2)
    g.set_outputs([rlx.softmax((q @ turned) * 0.3) @ many(v, 2, 6)])
    passed = scores(g, COMPILATION)
    (node,) = found(passed)
    assert [x.dims[1] for x in node.inputs] == ([6, 2, 2] if order == "shared" else [6, 6, 6])
    feeds = {x.name: rng.normal(size=x.shape.static).astype(np.float32) for x in g.inputs}
    np.testing.assert_allclose(evaluate(passed, feeds)[0][0], evaluate(g, feeds)[0][0], rtol=1e-5, atol=1e-6)


def test_scores_divided_by_zero_are_left():
    assert not found(scores(graph_of(lambda q, k, v, bias: rlx.softmax((q @ k) / 0.0) @ v), COMPILATION))


@pytest.mark.parametrize("low", [-np.inf, float(np.finfo(np.float32).min)])
def test_a_bias_that_only_hides_keys_is_a_mask_and_the_usual_scale_is_the_ops_own(low):
    g = Graph("attention")
    q, k, v = (g.input(n, (2, 3, 9, 16), "f32") for n in "qkv")
    seen = g.input("seen", (2, 1, 1, 9), "bool")
    bias = rlx.where(rlx.broadcast_to(seen, (2, 1, 9, 9)), 0.0, low)
    g.set_outputs([rlx.softmax((q * 0.5) @ (k.transpose(0, 1, 3, 2) * 0.5) + bias) @ v])
    passed = scores(g, COMPILATION)
    (node,) = found(passed)
    assert (node.attrs.mask, node.attrs.scale) == ("custom", 0.0) and node.inputs[3] is passed.inputs[3]
    feeds = {name: rng.normal(size=(2, 3, 9, 16)).astype(np.float32) for name in "qkv"}
    feeds["seen"] = np.arange(9) < np.array([4, 9]).reshape(2, 1, 1, 1)
    np.testing.assert_allclose(evaluate(passed, feeds)[0][0], evaluate(g, feeds)[0][0], rtol=1e-5, atol=1e-6)


def test_a_bias_that_lowers_scores_stays_a_bias():
    g = Graph("attention")
    q, k, v = (g.input(n, (2, 3, 9, 16), "f32") for n in "qkv")
    bias = rlx.where(g.input("seen", (2, 1, 1, 9), "bool"), 0.0, -1e4)
    g.set_outputs([rlx.softmax((q * 0.5) @ k.transpose(0, 1, 3, 2) + bias) @ v])
    (node,) = found(scores(g, COMPILATION))
    assert (node.attrs.mask, node.attrs.scale) == ("bias", 0.5)


@pytest.mark.parametrize("lead", [(2, 3), (6,)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_products_around_a_softmax_are_attention(form, lead):
    graph = graph_of(FORMS[form], lead)
    passed = scores(graph, COMPILATION)
    assert len(found(passed)) == 1 and not any(n.op in (OPS["softmax"], OPS["matmul"]) for n in passed.nodes())
    feeds = {v.name: rng.normal(size=v.shape.static).astype(np.float32) for v in graph.inputs}
    if "guarded" in form:
        feeds["bias"][0] = -np.inf  # no key is left: zeros
    want = evaluate(graph, feeds)[0][0]
    np.testing.assert_allclose(evaluate(passed, feeds)[0][0], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(rlx.Session("cpu").compile(graph).run(feeds)[0], want, rtol=1e-5, atol=1e-6)


OTHERS = {
    "others read the weights": lambda q, k, v, bias: [p := rlx.softmax(q @ k), p @ v],
    "others read the scores": lambda q, k, v, bias: [s := q @ k, rlx.softmax(s) @ v],
    "another axis": lambda q, k, v, bias: rlx.softmax(q @ k, axis=-2) @ v,
    "scaled by a tensor": lambda q, k, v, bias: rlx.softmax((q @ k) * bias) @ v,
    "one matrix of values": lambda q, k, v, bias: rlx.softmax(q @ k) @ v[0, 0],
    "scaled by zero": lambda q, k, v, bias: rlx.softmax((q @ k) * 0.0) @ v,
    "no product": lambda q, k, v, bias: rlx.softmax(q[..., :1] + bias) @ v,
}


@pytest.mark.parametrize("form", OTHERS)
def test_others_stay(form):
    graph = graph_of(OTHERS[form])
    assert not found(scores(graph, COMPILATION))


def test_a_target_without_the_kernel_keeps_the_products():
    graph = graph_of(FORMS["plain"])
    assert not found(scores(graph, Compilation(get("ref").target(), CompileOptions())))
