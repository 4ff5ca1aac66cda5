"""Graph passes: every rewrite rule is exact, constants fold to the reference, policies cast what they should and no more."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.backends import get
from rlx.compiler import CompileOptions, lower
from rlx.compiler.canonicalise import FOLD_BYTES, RULES, canonicalise, share_equal
from rlx.compiler.compilation import Compilation
from rlx.compiler.legalise import bind_dims, legalise
from rlx.compiler.pipeline import PIPELINE, run_passes
from rlx.compiler.precision import precision
from rlx.errors import CompileError, GraphError, OptionError, UnboundDimError, VerifyError
from rlx.ir import DTYPES, OPS, Graph, Kind, Target, ops
from rlx.ir.dtype import holds
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import CONSTANT, Node, Value, constant, same_values
from rlx.ir.rewrite import Var, pattern, rewrite, rule

TARGET = Target("any", frozenset(DTYPES))
FLOATS, INTS = ("f64", "f32", "f16", "bf16"), ("i64", "i32", "i8", "u8")


def under(target=TARGET, **options):
    """A compile for this target with these options."""
    return Compilation(target, CompileOptions(**options))


# -- text in, pass, text out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "passes").glob("*.rlx")), ids=lambda p: p.stem)
def test_pass_texts(path):
    head, want = path.read_text().split("# gives:\n")
    says = dict(line[2:].split(": ", 1) for line in head.splitlines() if line.startswith("# ") and ": " in line)
    options = {}
    if "options" in says:
        name, _, value = says["options"].partition("=")
        pairs = {k: int(v) for k, v in (p.split(":") for p in value.split(","))} if ":" in value else value
        options[name] = pairs
    graph = Graph.parse(head)
    found = dict(PIPELINE)[says["pass"]](graph, under(**options))
    assert str(found).splitlines() == [line.removeprefix("# ") for line in want.splitlines()]
    assert str(graph) == str(Graph.parse(head)), "the pass changed its input"


# -- rewrite rules -------------------------------------------------------------------------------------------------


def special(dims, dtype, seed=0):
    """Values of every kind the dtype has: zeros of both signs, infinities, NaN, extremes, ordinary ones."""
    rng = np.random.default_rng(seed)
    d = DTYPES[dtype]
    size = int(np.prod(dims))
    if d.is_float:
        edge = [0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 1e-7, -3e4, 448.0, 2.0**-14, 1.5]
        with np.errstate(all="ignore"):
            values = np.where(rng.random(size) < 0.6, rng.choice(edge, size), rng.normal(size=size) * 100).astype(d.numpy)
    elif d.kind == "b":
        values = rng.random(size) < 0.5
    else:
        info = np.iinfo(d.numpy)
        values = rng.choice(np.array([0, 1, 2, 3, 100, info.min, info.max, info.max - 1], d.numpy), size)
    return values.reshape(dims)


def same_bits(a, b):
    """Equal to the bit, but for which NaN a NaN is."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    if np.issubdtype(a.dtype, np.integer) or a.dtype == bool:
        return bool((a == b).all())
    nan = np.isnan(a)
    x, y = (np.where(nan, 0, v).astype(a.dtype).tobytes() for v in (a, b))
    return bool((nan == np.isnan(b)).all()) and x == y


def graph_of(build, dims, *dtypes):
    g = Graph("case")
    g.set_outputs([build(*(g.input(f"x{i}", dims, d) for i, d in enumerate(dtypes)))])
    return g


def assert_exact(graph, fired=None):
    """Canonicalising changes no bit of any output."""
    found = rewrite(graph, RULES, fired)
    for seed in range(3):
        given_ = {x.name: special(x.shape.static, x.dtype.name, seed) for x in graph.inputs}
        for a, b in zip(evaluate(graph, given_)[0], evaluate(found, given_)[0], strict=True):
            assert same_bits(a, b), f"{graph}\n{found}\n{given_}\n{a}\n{b}"
    return found


def nothing_left(graph):
    return graph.outputs[0].node.op.kind is Kind.LEAF


BYTES = (np.arange(2000).reshape(1, 1, 2000) * 7).astype(np.uint8)  # more than are folded to f32
# (rule, builder of a graph it applies to, dtypes to try): each must fire and leave an input or a constant
APPLIES = [
    ("multiply_by_one", lambda x: x * 1, (*FLOATS, *INTS)),
    ("multiply_by_one", lambda x: 1 * x, (*FLOATS, *INTS)),
    ("multiply_by_one", lambda x: x / 1, (*FLOATS, *INTS)),
    ("multiply_by_one", lambda x: x * np.ones((1, 1), x.dtype.numpy), FLOATS),
    ("add_negative_zero", lambda x: x + -0.0, FLOATS),
    ("add_negative_zero", lambda x: -0.0 + x, FLOATS),
    ("add_negative_zero", lambda x: x - 0.0, FLOATS),
    ("add_negative_zero", lambda x: x - 0, INTS),
    ("add_integer_zero", lambda x: x + 0, INTS),
    ("add_integer_zero", lambda x: 0 + x, INTS),
    ("undo_twice", lambda x: ops.neg(ops.neg(x)), (*FLOATS, *INTS)),
    ("undo_twice", lambda x: ~~x, ("bool",)),
    ("take_first", lambda x: ops.where(constant(True), x, x + 7), (*FLOATS, *INTS)),
    ("take_first", lambda x: ops.where(ops.less(x, x + 1), x, x), (*FLOATS, *INTS)),
    ("take_second", lambda x: ops.where(constant(np.zeros((3, 1), bool)), x + 7, x), (*FLOATS, *INTS)),
    ("merge_transposes", lambda x: x.transpose(1, 2, 0).transpose(2, 0, 1), FLOATS),
    ("merge_transposes", lambda x: x.T.transpose(-1, 1, 0), ("f32",)),
    ("keep_outer_dims", lambda x: x.reshape(-1).reshape(x.dims), (*FLOATS, "bool")),
    ("drop_view", lambda x: x.transpose(0, 1, 2), FLOATS),
    ("drop_view", lambda x: x.reshape(x.dims), FLOATS),
    ("drop_view", lambda x: ops.broadcast_to(x, x.dims), FLOATS),
    ("drop_view", lambda x: ops.slice(x, starts=(0, 0, 0), stops=(2, 9, 4)), FLOATS),
    ("drop_cast", lambda x: ops.cast(x, x.dtype), (*FLOATS, *INTS, "bool")),
    ("merge_casts", lambda x: x.astype("f64").astype(x.dtype), FLOATS[1:]),
    ("merge_casts", lambda x: x.astype("i64").astype(x.dtype), ("i32", "i8", "u8", "bool")),
    (
        "merge_casts_around_views",
        lambda x: x.astype("f64").transpose(1, 2, 0).astype(x.dtype).transpose(2, 0, 1),
        FLOATS[1:],
    ),
    ("take_known_rows", lambda x: ops.take_rows(x, constant(0), count=2), FLOATS),
    ("fold_constants", lambda x: constant(np.arange(3.0)) * 2.0 + 1.0, ("f32",)),
    ("take_known_rows", lambda x: ops.take_rows(constant(np.arange(6.0).reshape(3, 2)), 1, count=2), ("f32",)),
    ("drop_neutral", lambda x: ops.logical_and(constant(np.ones((3, 1), bool)), x), ("bool",)),
    ("drop_neutral", lambda x: ops.logical_or(x, constant(False)), ("bool",)),
    ("split_again", lambda x: x.reshape(1, 2, 3, 4).transpose(0, 1, 3, 2).reshape(2, 4, 3).transpose(0, 2, 1), ("f32",)),
    ("pool_narrow", lambda x: ops.max_pool(ops.cast(constant(BYTES), "f32") * 0.5 - 3.0, window=900, strides=900), ("f32",)),
    ("slice_known_rows", lambda x: ops.gather(constant(np.arange(6.0).reshape(3, 2)), 1), ("f32",)),
    ("slice_known_rows", lambda x: ops.gather(constant(np.arange(20.0).reshape(2, 10)), [1, 4, 7], axis=1), ("f32",)),
    ("join_by_parts", lambda x: ops.concat(*[constant(np.arange(3.0))] * 200), ("f32",)),
    ("choose_the_only_one", lambda x: ops.argmax(x.reshape(2, 3, 1, 4), axis=2), (*FLOATS, *INTS)),
    ("choose_the_only_one", lambda x: ops.argmin(x.reshape(2, 3, 4, 1), keepdims=True), ("f32",)),
]


@pytest.mark.parametrize("at", [-1, 3, [0, 1, 3], [2, 1], [0, 1, 2], [[0, 1]]], ids=str)
def test_a_gather_of_other_positions_stays(at):
    g = Graph("gather")
    g.set_outputs([ops.gather(g.input("x", (3, 4), "f32"), at)])
    assert rewrite(g, RULES).outputs[0].node.op is OPS["gather"]


def test_every_rule_has_a_case():
    assert {name for name, _, _ in APPLIES} == {r.name for r in RULES}
    assert all(r.why for r in RULES)


@pytest.mark.parametrize("case", range(len(APPLIES)), ids=[f"{name}-{i}" for i, (name, _, _) in enumerate(APPLIES)])
def test_rules_fire_and_are_exact(case):
    name, build, dtypes = APPLIES[case]
    for dtype in dtypes:
        fired = []
        found = assert_exact(graph_of(build, (2, 3, 4), dtype), fired)
        assert name in fired and nothing_left(found), f"{dtype}: {fired}\n{found}"


@pytest.mark.parametrize(
    "build, dtypes",
    [
        (lambda x: x + 0.0, FLOATS),
        (lambda x: x - -0.0, FLOATS),
        (lambda x: x * 0, (*FLOATS, *INTS)),
        (lambda x: x - x, (*FLOATS, *INTS)),
        (lambda x: x * np.array([1, 1, 1, 2], x.dtype.numpy), FLOATS),
        (lambda x: x * np.ones((5, 1, 1, 1), x.dtype.numpy), FLOATS),
        (lambda x: ops.where(constant(np.array([True, False, True, True])), x, x * 2), FLOATS),
        (lambda x: ops.where(constant(np.ones((5, 1, 1, 1), bool)), x, x * 2), FLOATS),
        (lambda x: x.transpose(0, 2, 1).reshape((2, 3, 4)), FLOATS),
        (lambda x: ops.slice(x, starts=(1, 2, 3), stops=(-3, -4, -5), steps=(-1, -1, -1)), FLOATS),
        (lambda x: x.astype("f16").astype(x.dtype), ("f64", "f32", "bf16", "i32")),
        (lambda x: x.astype("f32").astype("u8"), ("i8",)),
        (lambda x: x.astype("u8").astype("i64"), ("i8",)),
        (lambda x: x.astype("i32").astype("f64"), FLOATS),
        (lambda x: x.astype("bool").astype("f32"), (*FLOATS, *INTS)),
    ],
)
def test_what_is_not_exact_stays(build, dtypes):
    for dtype in dtypes:
        assert not nothing_left(assert_exact(graph_of(build, (2, 3, 4), dtype)))


def test_lossless_casts_by_enumeration():
    """holds(wide, narrow) for every pair of small dtypes, against a round trip of every value."""
    with np.errstate(all="ignore"):
        for narrow in ("f16", "bf16", "f8e4m3", "f8e5m2", "i8", "u8", "i16", "u16", "bool"):
            d = DTYPES[narrow]
            every = np.arange(2**d.bits, dtype=f"u{d.itemsize}").view(d.numpy) if d.kind != "b" else np.array([False, True])
            for wide in DTYPES.values():
                if wide.kind == "c" or not holds(wide, d):
                    continue
                back = every.astype(wide.numpy).astype(d.numpy)
                assert same_bits(np.asarray(every, "f4"), np.asarray(back, "f4")), (wide, d)
    assert holds(DTYPES["f32"], DTYPES["bf16"]) and not holds(DTYPES["f16"], DTYPES["bf16"])
    assert holds(DTYPES["i16"], DTYPES["u8"]) and not holds(DTYPES["i8"], DTYPES["u8"]) and not holds(DTYPES["u8"], DTYPES["i8"])


UNARY = (lambda x: -x, lambda x: x * 1, lambda x: 1 * x, lambda x: x + 0, lambda x: x - 0, lambda x: x / 1, lambda x: x + x)
FLOAT = (lambda x: x + -0.0, lambda x: x + 0.0, abs, lambda x: x * 0.5, lambda x: x - -0.0)
MOVES = (
    lambda x: x.transpose(), lambda x: x.reshape(-1).reshape(x.dims), lambda x: x.reshape(x.dims[::-1]),
    lambda x: ops.broadcast_to(x, x.dims), lambda x: ops.slice(x, starts=(0, 0), stops=x.dims),
)  # fmt: skip


@st.composite
def graphs(draw):
    """Chains and joins of exact ops over special values, with constants 0, -0, 1 and masks mixed in."""
    g = Graph("random")
    values = [g.input("a", (2, 3), draw(st.sampled_from(FLOATS))), g.input("n", (2, 3), draw(st.sampled_from(INTS)))]
    for _ in range(draw(st.integers(1, 12))):
        x = draw(st.sampled_from(values))
        kind = draw(st.integers(0, 5))
        if kind == 0:
            values.append(draw(st.sampled_from(UNARY))(x))
        elif kind == 1:
            values.append(draw(st.sampled_from(FLOAT if x.dtype.is_float else UNARY))(x))
        elif kind == 2:
            values.append(draw(st.sampled_from(MOVES))(x))
        elif kind == 3:
            values.append(x.astype(draw(st.sampled_from((*FLOATS, *INTS)))))
        elif kind == 4:
            number = draw(st.sampled_from((0.0, -0.0, 1.0, 2.0)))
            made = constant(np.full(draw(st.sampled_from([(), (1,), x.dims])), number).astype(x.dtype.numpy))
            values.append(draw(st.sampled_from((ops.add, ops.mul, ops.sub)))(*draw(st.permutations([x, made]))))
        else:
            alike = [v for v in values if v.shape == x.shape]
            other = draw(st.sampled_from(alike))
            mask = draw(st.sampled_from([constant(True), constant(False), ops.less(x, other), ops.equal(x, x)]))
            values.append(ops.where(mask, x, other))
    g.set_outputs(draw(st.lists(st.sampled_from(values), min_size=1, max_size=4)))
    return g


@settings(max_examples=150)
@given(graphs())
def test_canonicalise_changes_no_bit_of_random_graphs(graph):
    before = str(graph)
    found = canonicalise(graph, under())
    found.verify()
    assert str(graph) == before
    given_ = {x.name: special(x.shape.static, x.dtype.name) for x in graph.inputs}
    with np.errstate(all="ignore"):
        for a, b in zip(evaluate(graph, given_)[0], evaluate(found, given_)[0], strict=True):
            assert same_bits(a, b), f"{graph}\n{found}\n{given_}\n{a}\n{b}"
    assert str(canonicalise(found, under())) == str(found), "a second time changes nothing"


# -- the engine ----------------------------------------------------------------------------------------------------


def test_a_replacement_of_another_shape_is_not_made():
    @rule(pattern(ops.add, Var("x"), Var("y")))
    def first(node: Node, x: Value, y: Value) -> Value:
        "Wrong where y is larger, to see that the engine refuses."
        return x

    g = Graph("g")
    x, y = g.input("x", (3,), "f32"), g.input("y", (2, 3), "f32")
    g.set_outputs([x + y, x + x])
    fired: list[str] = []
    found = rewrite(g, [first], fired)
    assert fired == ["first"] and found.outputs[1] is x and found.outputs[0].node.op is ops.add.op


def test_one_variable_matches_one_value():
    @rule(pattern(ops.sub, Var("x"), Var("x")))
    def nothing(node: Node, x: Value) -> Value:
        "For integers."
        return constant(np.zeros(x.shape.static, x.dtype.numpy))

    g = Graph("g")
    x, y = g.input("x", (3,), "i32"), g.input("y", (3,), "i32")
    g.set_outputs([x - y, x - x])
    fired: list[str] = []
    assert [v.node.op.name for v in rewrite(g, [nothing], fired).outputs] == ["sub", "constant"] and fired == ["nothing"]


def test_rules_that_go_in_circles_are_our_fault_and_end():
    @rule(pattern(ops.add, Var("x"), Var("y")))
    def swap(node: Node, x: Value, y: Value) -> Value:
        "x + y is y + x."
        return y + x

    g = Graph("g")
    x, y = g.input("x", (3,), "f32"), g.input("y", (3,), "f32")
    g.set_outputs([x + y])
    with pytest.raises(AssertionError, match="circles.*swap"):
        rewrite(g, [swap])


def test_a_new_node_has_the_name_and_line_of_the_old_one():
    g = Graph("g")
    x = g.input("x", (2, 3, 4), "f32")
    y = ops.transpose(x.transpose(1, 2, 0), axes=(1, 0, 2), name="turned")
    g.set_outputs([y])
    found = rewrite(g, RULES).outputs[0].node
    assert (found.name, found.source) == ("turned", y.node.source) and __file__ in str(found.source)


# -- folding and sharing -------------------------------------------------------------------------------------------


def test_folding_makes_no_large_constant():
    g = Graph("g")
    small = constant(np.float32(3.0))
    big = constant(np.ones((300, 4), np.float32))
    g.set_outputs(
        [ops.broadcast_to(small, (300,)), big.T * 2.0, ops.iota(dims=(4,), axis=0), ops.broadcast_to(small, (4,)) + 1.0]
    )
    found = canonicalise(g, under())
    assert [v.node.op.name for v in found.outputs] == ["broadcast_to", "constant", "iota", "constant"]
    limit = max(FOLD_BYTES, 300 * 4 * 4 + 4)
    assert all(v.shape.size_bytes <= limit for n in found.nodes() if n.op is CONSTANT for v in n.results)


def test_folding_leaves_errors_to_the_run():
    g = Graph("g")
    g.set_outputs([ops.gather(constant(np.arange(3.0)), constant(np.array([7])), axis=0)])
    assert canonicalise(g, under()).outputs[0].node.op.kind is not Kind.LEAF


def test_folding_is_the_reference():
    g = Graph("g")
    x = constant(np.linspace(-3, 3, 7), "bf16")
    g.set_outputs([ops.gelu(x), ops.sum(x), ops.softmax(x), ops.argmax(x)])
    found = canonicalise(g, under())
    for before, after in zip(evaluate(g, {})[0], found.outputs):
        assert after.node.op is CONSTANT and same_bits(before, after.node.attrs.data)  # type: ignore[union-attr]


def test_equal_nodes_are_shared_and_unlike_ones_are_not():
    g = Graph("g")
    x = g.input("x", (2, 2), "f32")
    same = [ops.exp(x), ops.exp(x), x * 2.0, x * np.float32(2.0), x.transpose(1, 0), x.transpose(1, 0)]
    zeros = [x + 0.0, x + -0.0]
    axes = [ops.sum(x, axis=0), ops.sum(x, axis=1), ops.sum(x, axis=0, keepdims=True)]
    g.set_outputs([*same, *zeros, *axes])
    out = share_equal(g).outputs
    assert out[0] is out[1] and out[2] is out[3] and out[4] is out[5]
    assert len(set(out[6:])) == 5


def test_results_of_several_and_leaves_survive():
    g = Graph("g")
    x, unused = g.input("x", (4,), "f32"), g.input("unused", (2,), "f32")
    best, where_ = ops.top_k(x * 1.0, k=2)
    best2, _ = ops.top_k(x, k=2)
    g.set_outputs([best, where_, best2, x])
    found = canonicalise(g, under())
    assert same_values(found.inputs, [x, unused]) and found.outputs[0] is found.outputs[2] and found.outputs[3] is x
    assert found.outputs[1] is found.outputs[0].node.results[1]


# -- named dims ----------------------------------------------------------------------------------------------------


def dims_graph():
    g = Graph("dims")
    x = g.input("x", ("b", "n", 4), "f32")
    g.set_outputs([x.reshape(("b", -1)), ops.broadcast_to(g.input("y", (1,), "f32"), ("m",))])
    return g


def test_dims_are_bound_everywhere():
    found = bind_dims(dims_graph(), under(dims={"b": 2, "n": 3, "m": 5}))
    assert [v.shape.static for v in found.outputs] == [(2, 12), (5,)]
    assert [v.shape.static for v in found.inputs] == [(2, 3, 4), (1,)]
    found.verify()
    x, y = np.arange(24, dtype="f4").reshape(2, 3, 4), np.ones(1, "f4")
    assert (evaluate(found, {"x": x, "y": y})[0][0] == x.reshape(2, 12)).all()


def test_unbound_and_unknown_dims_are_named():
    with pytest.raises(UnboundDimError, match=r"no value for 'n' in .*x.*f32\[b,n,4\]; 'm' in .*CompileOptions\(dims={'n': …}\)"):
        bind_dims(dims_graph(), under(dims={"b": 2}))
    with pytest.raises(OptionError, match=r"dims=\['k'\]: graph 'dims' has no dim of that name; it has 'b', 'm', 'n'"):
        bind_dims(dims_graph(), under(dims={"b": 2, "n": 3, "m": 5, "k": 1}))


def test_sizes_that_an_op_cannot_have_name_the_op():
    g = Graph("g")
    q, k, v = g.input("q", (1, 1, "n", 4), "f32"), g.input("k", (1, 1, "m", 4), "f32"), g.input("v", (1, 1, "m", 4), "f32")
    g.set_outputs([ops.attention(q, k, v, mask="causal")])
    with pytest.raises(GraphError, match=r"attention\(f32\[1,1,5,4\].*3 keys are fewer than 5 queries"):
        bind_dims(g, under(dims={"n": 5, "m": 3}))
    assert bind_dims(g, under(dims={"n": 2, "m": 3})).outputs[0].shape.static == (1, 1, 2, 4)


# -- legalise ------------------------------------------------------------------------------------------------------


def composite_samples():
    return [(op, i) for op in OPS.values() if op.kind is Kind.COMPOSITE for i in range(len(op.samples))]


@pytest.mark.parametrize("op, i", composite_samples(), ids=lambda x: getattr(x, "name", str(x)))
def test_every_composite_becomes_core_ops_of_the_same_shapes(op, i):
    sample = op.samples[i]
    dtypes = sample.dtypes or ("",) * len(sample.shapes)
    g = Graph("g")
    first = "f32" if "f" in op.dtypes else {"b": "bool", "c": "c64"}.get(op.dtypes, "i32")
    xs = [g.input(f"x{j}", s, d or first) for j, (s, d) in enumerate(zip(sample.shapes, dtypes))]
    made = g.__getattr__(op.name)(*xs, name="whole", **(sample.attrs or {}))
    g.set_outputs(made if isinstance(made, tuple) else [made])
    found = legalise(g, under())
    found.verify()
    assert all(n.op.kind is not Kind.COMPOSITE for n in found.nodes())
    assert [v.shape for v in found.outputs] == [v.shape for v in g.outputs]
    source = g.outputs[0].node.source
    assert all(n.source == source for n in found.nodes() if n.op.kind is not Kind.LEAF)


def close(found, graph):
    """Both compute the same up to rounding."""
    rng = np.random.default_rng(0)
    arrays = {v.name: rng.standard_normal(v.shape.static, np.float32) for v in graph.inputs}
    for a, b in zip(evaluate(found, arrays)[0], evaluate(graph, arrays)[0], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_layers_that_are_alike_are_decomposed_once(monkeypatch):
    g, calls, plain = Graph("layers"), [], OPS["rms_norm"].decompose
    x = g.input("x", (4, 6), "f32")
    for eps in (1e-5, 1e-5, 1e-6, 1e-5):
        x = ops.rms_norm(x, g.input(f"scale{len(g.inputs)}", (6,), "f32"), eps=eps)
    g.set_outputs([x, ops.rms_norm(x.reshape((6, 4)), g.input("other", (4,), "f32"), eps=1e-5)])
    monkeypatch.setitem(vars(OPS["rms_norm"]), "decompose", lambda attrs, *values: calls.append(values) or plain(attrs, *values))
    found = legalise(g, under())
    assert len(calls) == 3, "with another eps, and with other dims"
    assert {v.node for values in calls for v in values}.isdisjoint(found.nodes())
    close(found, g)


def test_constants_may_decide_how_an_op_is_decomposed():
    """With groups that are known to be equal there is one product for each; else one for each row."""
    g = Graph("groups")
    x, w = g.input("x", (6, 4), "f32"), g.input("w", (2, 4, 5), "f32")
    g.set_outputs([ops.segment_matmul(x, w, constant(np.array(ends, np.int32))) for ends in ((3, 6), (2, 6), (3, 6))])
    found = legalise(g, under())
    assert sum(n.op is OPS["gather"] for n in found.nodes()) == 1
    close(found, g)


def test_claims_are_kept_whole_and_their_reasons_reported():
    def claim(node):
        return None if node.shapes[0].dims[-1] == 4 else "only rows of 4"

    target = replace(TARGET, natives={"softmax": claim})
    g = Graph("g")
    x, y = g.input("x", (2, 4), "f32"), g.input("y", (2, 5), "f32")
    g.set_outputs([ops.softmax(x), ops.softmax(y), ops.exp(x)])
    names = {n.op.name for n in legalise(g, under(target)).nodes()}
    assert "softmax" in names and "div" in names
    assert [under(target).decide(v.node) for v in g.outputs] == [("native", ""), ("decomposed", "only rows of 4"), ("kept", "")]


@pytest.mark.parametrize("policy", ["f32", "bf16", "int8"])
def test_the_target_is_asked_about_each_node_once_in_a_compile(policy):
    """From the passes to the reports."""
    asked: list[Node] = []

    def counted(why):
        return lambda node: asked.append(node) or why

    claims = {"attention": None, "softmax": "not here", "dequant_matmul": "not here", "matmul": "not here", "exp": None}
    target = replace(get("ref").target(1), natives={name: counted(why) for name, why in claims.items()})
    g = layer()
    blocks = g.param("blocks", (8, 34), "u8")
    decoded = ops.dequantize(blocks, format="q8_0", columns=32).T  # the pass `quantised` asks whether its product is claimed
    g.set_outputs([*g.outputs, ops.exp(ops.softmax(g.outputs[0])), g.input("y", (2, 32), "f32") @ decoded])
    program = lower(g, target, CompileOptions(precision=policy))
    assert {r.op for r in program.nodes if r.how in ("native", "decomposed")} >= {"attention", "exp", "softmax"}
    assert ("dequant_matmul" in {node.op.name for node in asked}) == (policy == "f32")  # elsewhere the weight is cast first
    assert len(asked) == len(set(asked)), [n for n in set(asked) if asked.count(n) > 1]


def test_a_dtype_the_target_lacks_is_refused_with_node_op_shapes_and_reason():
    target = Target("small", frozenset({"f32", "i32"}))
    g = Graph("g")
    x = g.input("x", (2, 3), "f32")
    g.set_outputs([ops.exp(ops.cast(x, "f64"), name="wide")])
    with pytest.raises(CompileError, match=r"'g': cast\(f32\[2,3\]\).*for small: no f64 on this target; it has 'f32', 'i32'"):
        legalise(g, under(target))
    wide = g.outputs[0].node
    assert [under(target).decide(n)[0] for n in (wide, wide.inputs[0].node)] == ["refused", "refused"]
    g = Graph("leaf")
    g.input("unused", (2,), "f16")
    g.set_outputs([g.input("x", (2,), "f32")])
    with pytest.raises(CompileError, match="'unused'.*no f16"):
        legalise(g, under(target))


# -- precision -----------------------------------------------------------------------------------------------------


def layer():
    g = Graph("layer")
    x, w, b = g.input("x", (2, 4, 8), "f32"), g.param("w", (8, 8), "f32"), g.param("b", (8,), "f32")
    h = ops.gelu(ops.linear(x, w, b))
    heads = h.reshape((2, 4, 2, 4)).transpose(0, 2, 1, 3)
    a = ops.attention(heads, heads, heads, mask="causal").transpose(0, 2, 1, 3).reshape((2, 4, 8))
    g.set_outputs([ops.rms_norm(a + x, b)])
    return g


def contractions(graph):
    return [n for n in graph.nodes() if n.op.kind is Kind.CONTRACT]


@pytest.mark.parametrize("policy", ["f16", "bf16"])
def test_contractions_alone_are_narrow(policy):
    g = layer()
    found = run_passes(g, under(precision=policy))
    assert len(contractions(found)) == 3
    for n in contractions(found):
        assert {v.dtype.name for v in (*n.inputs, *n.results)} == {policy}
    allowed = {Kind.CONTRACT, Kind.VIEW}
    for n in found.nodes():
        narrow = [v for v in n.results if v.dtype.name == policy]
        assert not narrow or n.op.kind in allowed or n.op is ops.cast.op, n
        assert n.op.kind is not Kind.REDUCE or all(v.dtype.name == "f32" for v in n.results)
    assert [v.shape for v in (*found.inputs, *found.params, *found.outputs)] == [
        v.shape for v in (*g.inputs, *g.params, *g.outputs)
    ]
    rng = np.random.default_rng(0)
    args = {"x": rng.normal(size=(2, 4, 8)).astype("f4")}, {"w": rng.normal(size=(8, 8)).astype("f4"), "b": np.ones(8, "f4")}
    exact, rounded = evaluate(g, *args)[0][0], evaluate(found, *args)[0][0]
    worst = np.abs(exact - rounded).max()
    assert 0 < worst < (0.1 if policy == "bf16" else 0.02)  # three roundings each of 2^-9 and 2^-12 on values of a few units


def test_f32_and_auto_without_fast_bf16_change_nothing():
    g = layer()
    assert precision(g, under()) is g
    assert precision(g, under(precision="auto")) is g
    assert precision(g, under(replace(TARGET, dtypes=frozenset({"f32"}), features=("avx512bf16",)), precision="auto")) is g


def test_auto_is_bf16_where_the_target_is_fast_at_it():
    for fast in (replace(TARGET, features=("avx512bf16",)), replace(TARGET, quick=frozenset({"bf16"}))):
        assert {n.shapes[0].dtype.name for n in contractions(precision(layer(), under(fast, precision="auto")))} == {"bf16"}


def test_a_claimed_composite_is_narrowed_whole_or_kept():
    asked = []

    def in_any(node):
        asked.append(node.inputs[0].dtype.name)
        return None

    found = precision(layer(), under(replace(TARGET, natives={"attention": in_any}), precision="bf16"))
    assert [n.shapes[0].dtype.name for n in found.nodes() if n.op.name == "attention"] == ["bf16"] and asked == ["bf16"]
    only_f32 = replace(TARGET, natives={"attention": lambda n: None if n.inputs[0].dtype.name == "f32" else "only f32"})
    notes = []
    found = precision(layer(), under(only_f32, precision="bf16"), notes)
    assert [n.shapes[0].dtype.name for n in found.nodes() if n.op.name == "attention"] == ["f32"]
    report = {(r.op, r.how, r.why) for r in notes}
    assert ("attention", "kept", "native in f32, not in bf16") in report
    assert ("matmul", "narrowed", "bf16 operands and result, f32 accumulation") in report


def test_a_policy_the_target_cannot_follow_is_refused():
    with pytest.raises(CompileError, match="precision='f16': no f16 on small; it has 'f32'"):
        precision(layer(), under(Target("small", frozenset({"f32"})), precision="f16"))


# -- the pipeline --------------------------------------------------------------------------------------------------


def test_stages_are_kept_only_when_asked_for_and_the_input_is_untouched(tmp_path):
    g = layer()
    before = str(g)
    trace: dict[str, str] = {}
    found = run_passes(g, under(dump=tmp_path / "deep" / "er"), trace)
    assert list(trace) == ["graph", *(name for name, _ in PIPELINE)]
    assert trace["graph"] == str(g) == before and trace["tidy"] == str(found)
    files = sorted(tmp_path.glob("deep/er/*"))
    assert [f.name for f in files] == [f"layer.{i:02}.{name}.rlx" for i, name in enumerate(trace)]
    assert all(str(Graph.parse(f.read_text())) == text for f, text in zip(files, trace.values()))


def test_no_text_is_made_for_nobody(monkeypatch):
    monkeypatch.setattr(Graph, "__str__", lambda self: pytest.fail("printed"))
    run_passes(layer(), under())


def test_disabled_passes_do_not_run():
    g = Graph("g")
    x = g.input("x", (2,), "f32")
    g.set_outputs([x * 1.0])
    trace: dict[str, str] = {}
    run_passes(g, under(disable=("canonicalise", "tidy")), trace)
    assert list(trace) == ["graph", *(n for n, _ in PIPELINE if n not in ("canonicalise", "tidy"))] and "mul" in trace["legalise"]
    assert "mul" not in str(run_passes(g, under()))


def test_a_pass_that_breaks_the_graph_is_named_with_both_texts():
    def break_it(graph, compilation):
        return graph.rebuild(lambda n, ins: Node(n.op, ins, n.attrs, (n.shapes[0].with_dims((7,)),)).results)

    g = Graph("g")
    g.set_outputs([ops.exp(g.input("x", (2,), "f32"))])
    with pytest.raises(
        VerifyError, match=r"(?s)pass 'odd' broke the graph.*shape rule gives.*before:.*f32\[2\]\n  return.*after:.*f32\[7\]"
    ):
        run_passes(g, under(), passes=(("odd", break_it),))


def test_a_broken_input_graph_is_not_blamed_on_a_pass():
    with pytest.raises(VerifyError, match="empty: the graph is not well formed:\n  no outputs"):
        run_passes(Graph("empty"), under())
