"""Channels last and folding: networks keep their results, with few transposes and without factors per channel."""

import numpy as np
import pytest

import rlx
from rlx.compiler.canonicalise import canonicalise
from rlx.compiler.channels_last import channels_last
from rlx.compiler.compilation import Compilation
from rlx.compiler.folding import folding
from rlx.compiler.options import CompileOptions
from rlx.compiler.pipeline import run_passes
from rlx.ir import DTYPES, OPS, Graph, Shape, Target, f32
from rlx.ir.evaluate import evaluate
from rlx.runtime.verifying import verify
from tests.op_cases import Case

TARGET = Target("any", frozenset(DTYPES), channels_last=True)
rng = np.random.default_rng(0)


def compilation(target=TARGET):
    return Compilation(target, CompileOptions())


def network(body, dims=(2, 3, 8, 10)):
    """A graph: `body` of an image and of a function that makes a convolution of it."""
    g = Graph("network")
    x, count = g.input("x", dims, "f32"), iter(range(99))

    def conv(x, out=6, window=3, low=1, bias=True, **attrs):
        n, spatial = next(count), x.rank - 2
        w = g.param(f"w{n}", (out, x.dims[1] // attrs.get("groups", 1), *(window,) * spatial), "f32")
        b = [g.param(f"b{n}", (out,), "f32")] if bias else []
        return rlx.conv(x, w, *b, low=low, high=low, **attrs)

    made = body(x, conv, lambda *dims: g.param(f"p{next(count)}", dims, "f32"))
    g.set_outputs(made if isinstance(made, (list, tuple)) else [made])
    return g


def feeds(leaves):
    return {v.name: rng.uniform(0.2, 1.2, v.shape.static).astype(v.dtype.numpy) for v in leaves}


def assert_same_results(graph, passed):
    inputs, params = feeds(graph.inputs), feeds(graph.params)
    for want, found in zip(evaluate(graph, inputs, params)[0], evaluate(passed, inputs, params)[0], strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=1e-5)


def moved(graph):
    """Transposes of values that a run computes: those that change the order of elements."""
    known = compilation()
    found = [n for n in graph.nodes() if n.op is OPS["transpose"] and not known.is_static(n)]
    return [n for n in found if sum(d > 1 for d in n.shapes[0].dims) > 1]


# -- ops on permuted operands --------------------------------------------------------------------------------------


def permuted_operands(case):
    """Numbers of the operands that are permuted with the result."""
    return [i for i, role in enumerate(case.op.roles.ljust(len(case.sample.shapes), "x")) if role == "x"]


def permutable(case):
    """True if these operands have the result's rank."""
    return all(len(case.sample.shapes[i]) == case.expected[0].ndim for i in permuted_operands(case))


CASES = [Case(op, i, f32) for op in OPS.values() if op.permuted is not None for i in range(len(op.samples))]
PERMUTED = [case for case in CASES if permutable(case)]


def turns(rank):
    """Permutations of so many dims: reversed, and rotated both ways."""
    order = tuple(range(rank))
    return {order[::-1], (*order[1:], *order[:1]), (*order[-1:], *order[:-1])}


@pytest.mark.parametrize("case", PERMUTED, ids=repr)
def test_an_op_with_the_attributes_for_permuted_operands_gives_the_permuted_result(case):
    op, arrays = case.op, list(case.inputs.values())
    attrs = op.make_attrs(dict(case.sample.attrs or {}))
    (want,) = case.expected
    operands = permuted_operands(case)
    for axes in turns(want.ndim):
        changed = op.permuted(attrs, axes, *(Shape(a.shape, d) for a, d in zip(arrays, case.dtypes)))
        moved = [a.transpose(axes) if i in operands else a for i, a in enumerate(arrays)]
        found = op.reference(op.make_attrs({**(vars(attrs) if attrs else {}), **changed}), *moved)
        np.testing.assert_array_equal(found, want.transpose(axes))


LAST = [Case(op, i, f32) for op in OPS.values() if op.last is not None for i in range(len(op.samples))]


@pytest.mark.parametrize("case", LAST, ids=repr)
def test_an_op_with_channels_last_gives_the_results_of_the_op_with_channels_first(case):
    graph = case.graph()
    passed = channels_last(graph, compilation())
    assert all(n.attrs.channels_last for n in passed.nodes() if n.op is case.op)
    for want, found in zip(case.expected, evaluate(passed, case.inputs)[0], strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


# -- transposes that move down -------------------------------------------------------------------------------------


def residual(x, conv, param):
    y = rlx.relu(conv(x))
    return rlx.relu(y + conv(rlx.clip(conv(y), 0.0, 6.0)))


def squeeze_excite(x, conv, param):
    y = rlx.silu(conv(x))
    gate = conv(rlx.relu(conv(rlx.mean(y, axis=(2, 3), keepdims=True), 4, 1, 0)), 6, 1, 0)
    return y * rlx.sigmoid(gate)


def normalised(x, conv, param):
    y = conv(x).transpose(0, 2, 3, 1)
    y = rlx.gelu(rlx.layer_norm(y, param(6), param(6)) @ param(6, 12)) @ param(12, 6)
    return x.mean() + conv(x) + y.transpose(0, 3, 1, 2)


def shuffled(x, conv, param):
    y = conv(x)
    return conv(y.reshape(2, 2, 3, 8, 10).transpose(0, 2, 1, 3, 4).reshape(2, 6, 8, 10))


def enlarged(x, conv, param):
    y = conv(x).reshape(2, 6, 8, 1, 10, 1).broadcast_to((2, 6, 8, 2, 10, 2)).reshape(2, 6, 16, 20)
    return conv(rlx.concat(y, y * 2.0, axis=1), groups=3)


def parts(x, conv, param):
    a, b = rlx.split(conv(x), (2, 4), axis=1)
    y = rlx.concat(a, rlx.softmax(b, axis=1), b[:, ::2, :, :].repeat(1, axis=1), axis=1)
    return conv(rlx.pad(y[:, :, 1:-1, ::2], low=(0, 0, 2, 0), high=(0, 0, 0, 1), value=0.5))


def picked(x, conv, param):
    return conv(rlx.gather(conv(x), np.array([0, 0, 3, 5, 7]), axis=2))


# body, and the transposes that stay: of the input, of the result, and of what no order of axes makes a view
BODIES = {
    "a residual": (residual, 2),
    "a mean": (lambda x, conv, param: rlx.relu(conv(x)).mean(axis=(2, 3)) @ param(6, 4), 1),
    "a mean and flat": (lambda x, conv, param: conv(x).mean(axis=(2, 3), keepdims=True).reshape(2, 6) @ param(6, 4), 1),
    "a gate": (squeeze_excite, 2),
    "a norm of channels": (normalised, 2),
    "patches": (lambda x, conv, param: conv(x, window=2, low=0, strides=2).reshape(2, 6, 20).transpose(0, 2, 1) @ param(6, 4), 1),
    "shuffled channels": (shuffled, 3),
    "enlarged": (enlarged, 2),
    "parts": (parts, 2),
    "picked lines": (picked, 2),
    "a factor per channel": (lambda x, conv, param: conv(conv(x) * param(6, 1, 1) + param(1, 6, 1, 1)), 2),
    "a norm of a batch": (lambda x, conv, param: conv(rlx.relu(rlx.batch_norm(conv(x), *(param(6) for _ in range(4))))), 2),
    "all reduced": (lambda x, conv, param: rlx.sum(conv(x)), 1),
    "an argmax": (lambda x, conv, param: rlx.argmax(conv(x), axis=1), 2),
    "two outputs": (lambda x, conv, param: [y := conv(x), rlx.exp(y).max(axis=1)], 2),
    "flat": (lambda x, conv, param: conv(x).reshape(2, 480) @ param(480, 3), 2),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_transposes_move_down_a_network_and_cancel(name):
    body, most = BODIES[name]
    graph = canonicalise(network(body), compilation())
    passed = canonicalise(channels_last(graph, compilation()), compilation())
    assert_same_results(graph, passed)
    assert len(moved(passed)) == most, str(passed)
    assert_same_results(graph, run_passes(graph, compilation()))


@pytest.mark.parametrize("dims", [(1, 3, 8, 10), (2, 3, 17), (1, 1, 9), (2, 3, 4, 5, 6), (2, 3, 1, 1), (1, 3, 1, 7)], ids=str)
def test_networks_of_any_rank_and_with_dims_of_1(dims):
    axes = tuple(range(2, len(dims)))

    def body(x, conv, param):
        y = rlx.relu(conv(conv(x), groups=2))
        z = y * rlx.sigmoid(conv(y.mean(axis=axes, keepdims=True), window=1, low=0)) + y
        return [z.reshape(dims[0], 6, -1).transpose(0, 2, 1) @ param(6, 4), z.max(axis=1), conv(z, 1)]

    graph = canonicalise(network(body, dims), compilation())
    passed = canonicalise(channels_last(graph, compilation()), compilation())
    assert_same_results(graph, passed)
    assert len(moved(passed)) <= 1


def test_a_transpose_stays_where_moving_it_moves_more_elements():
    graph = network(lambda x, conv, param: (conv(x[:, :, :1], 3) + x) * x)
    passed = canonicalise(channels_last(graph, compilation()), compilation())
    assert_same_results(graph, passed)
    assert all(n.results[0].size < graph.inputs[0].size for n in moved(passed))


def test_no_other_graph_changes():
    g = Graph("attention")
    q, k, v = (g.input(n, (2, 17, 4, 8), "f32").transpose(0, 2, 1, 3) for n in "qkv")
    g.set_outputs([rlx.attention(q, k, v).transpose(0, 3, 1, 2).mean(axis=1)])
    assert channels_last(g, compilation()) is g and folding(g, compilation()) is g
    conv = network(lambda x, conv, param: conv(x))
    assert channels_last(conv, compilation(Target("any", frozenset(DTYPES)))) is conv  # the target does not ask for it


# -- folding -------------------------------------------------------------------------------------------------------


def work(graph):
    """Names of the ops that a run computes, in order."""
    known = compilation()
    return [n.op.name for n in graph.nodes() if n.inputs and not known.is_static(n)]


FACTORS = {
    "x * s": lambda y, s: y * s,
    "s * x": lambda y, s: s * y,
    "x / s": lambda y, s: y / s,
    "x + s": lambda y, s: y + s,
    "s + x": lambda y, s: s + y,
    "x - s": lambda y, s: y - s,
    "s - x": lambda y, s: s - y,
    "two of them": lambda y, s: (s - y) * s,
    "a number": lambda y, s: y * (1 / 6) + 0.5,
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", FACTORS)
def test_factors_and_terms_per_channel_fold_into_a_convolution(name, last, bias):
    def body(x, conv, param):
        if not last:
            return FACTORS[name](conv(x, bias=bias, groups=3), param(6, 1, 1))
        w = [param(3, 2, 10, 7), *([param(7)] if bias else [])]
        return FACTORS[name](rlx.conv(x, *w, channels_last=True), param(7))

    graph = network(body)
    passed = folding(graph, compilation())
    assert_same_results(graph, passed)
    assert work(passed) == ["conv"]


def test_a_batch_norm_folds_and_so_do_zeros_around_the_operand():
    def body(x, conv, param):
        x = rlx.pad(x, low=(0, 0, 1, 0), high=(0, 0, 2, 3))
        return rlx.relu(rlx.batch_norm(conv(x, low=0, strides=2), *(param(6) for _ in range(4))))

    graph = network(body)
    passed = folding(graph, compilation())
    assert_same_results(graph, passed)
    assert work(passed) == ["conv", "relu"]


@pytest.mark.parametrize("what", ["divided by it", "two readers", "an input", "not per channel", "a value", "channels"])
def test_nothing_folds_that_would_cost_more_or_change_the_result(what):
    def body(x, conv, param):
        if what in ("a value", "channels"):
            low = (0, what == "channels", 1, 1)
            return conv(rlx.pad(x, low=tuple(map(int, low)), high=(0, 0, 0, 0), value=0.5 if what == "a value" else 0.0))
        y = conv(x)
        scaled = {"divided by it": lambda: param(6, 1, 1) / y, "an input": lambda: y * x[:1, :1, :1, :1]}
        scaled |= {"two readers": lambda: (y * 2.0) + rlx.exp(y), "not per channel": lambda: y * param(10)}
        return scaled[what]()

    graph = network(body)
    assert_same_results(graph, passed := folding(graph, compilation()))
    assert work(passed) == work(graph)


def test_factors_of_narrow_weights_stay_apart():
    g = Graph("narrow")
    y = rlx.conv(g.input("x", (2, 3, 8), "bf16"), g.param("w", (6, 3, 3), "bf16"))
    g.set_outputs([y * g.param("s", (6, 1), "bf16")])
    assert work(folding(g, compilation())) == ["conv", "mul"]


def test_both_passes_can_be_left_out():
    graph = network(lambda x, conv, param: conv(rlx.batch_norm(conv(x), *(param(6) for _ in range(4)))))
    given, params, found = feeds(graph.inputs), feeds(graph.params), []
    for disable in ((), ("folding",), ("channels_last",), ("folding", "channels_last")):
        compiled = rlx.Session("cpu").compile(graph, rlx.CompileOptions(threads=1, disable=disable))
        compiled.set_params(params)
        found.append(compiled.run(given)[0])
        np.testing.assert_allclose(found[-1], found[0], rtol=2e-5)


def square():
    """A residual network, and weights and inputs for it, in which a transposed value has the same dims."""
    g, rng = Graph("square"), np.random.default_rng(0)
    x = g.input("x", (1, 6, 6, 6), f32)
    for n in range(2):
        y = rlx.conv(x, g.param(f"w{n}", (6, 6, 3, 3), f32), low=1, high=1)
        x = y + x if n else rlx.relu(y)
    g.set_outputs([x.mean(axis=(2, 3))])
    weights = {f"w{n}": rng.standard_normal((6, 6, 3, 3), np.float32) for n in range(2)}
    return g, weights, {"x": rng.standard_normal((1, 6, 6, 6), np.float32)}


def test_values_are_where_the_executable_says_even_if_all_dims_are_equal():
    """Those that are stored transposed, too: relu, beside the output."""
    g, weights, inputs = square()
    found = verify(g, weights.__getitem__, inputs, session=rlx.Session("cpu"))
    assert found.difference is None, found.difference
    assert found.values == 2
    compiled = rlx.compile(g)
    relu = next(n for n in g.nodes() if n.op.name == "relu")
    assert compiled._origins().places[relu.results[0]].strides[1] == 1 and compiled.byte_offset(relu) is None


def test_a_difference_in_a_value_that_is_stored_transposed_is_found_where_the_user_has_it():
    g, weights, inputs = square()
    wrong: list[int] = []

    def given(name):
        """A bias toward one channel, once the executables have their weights."""
        found = weights[name].copy()
        if wrong and name == "w0":
            found[4] *= 3
        return found

    found = verify(g, given, inputs, session=rlx.Session("cpu"), progress=lambda done, total: wrong.append(done))
    assert found.values == 1 and found.difference is not None and found.difference.what.startswith("relu")
    assert found.difference.index[1] == 4


def test_values_that_are_computed_inside_of_a_padded_one_are_compared():
    g, rng = Graph("chain"), np.random.default_rng(0)
    x = g.input("x", (1, 16, 9, 9), f32)
    for n in range(3):
        x = rlx.relu(rlx.conv(x, g.param(f"w{n}", (16, 16, 3, 3), f32), low=1, high=1))
    g.set_outputs([x.mean(axis=(2, 3))])
    weights = {f"w{n}": rng.standard_normal((16, 16, 3, 3), np.float32) for n in range(3)}
    inputs = {"x": rng.standard_normal((1, 16, 9, 9), np.float32)}
    found = verify(g, weights.__getitem__, inputs, session=rlx.Session("cpu"))
    assert found.difference is None and found.values == 3, found
    places = rlx.compile(g)._origins().places
    relus = [n.results[0] for n in g.nodes() if n.op.name == "relu"]
    assert [places[v].strides[2] for v in relus if v in places] == [11 * 16] * 2  # the third is in the kernel of the mean
