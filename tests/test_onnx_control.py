"""If, Loop, Scan and sequences of ONNX models."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import parser

from rlx.errors import Unsupported
from rlx.frontends.onnx import OnnxModel, importer
from rlx.frontends.onnx.importer import from_onnx
from rlx.runtime import CompileOptions
from tests.onnx_models import parsed

RNG = np.random.default_rng(3)
X = RNG.normal(size=(3, 4)).astype(np.float32)
BRANCHES = """
agraph (bool c, float[n,m] x) => (float[a,b] y) {{
  y = If (c) <then_branch = t () => (float[a,b] y1) {{ y1 = {then} (x) }},
              else_branch = e () => (float[a,b] y2) {{ y2 = {other} (x) }}>
}}"""


def test_a_condition_that_is_known_at_run_time_selects_between_both_branches():
    model = OnnxModel(parsed(BRANCHES.format(then="Exp", other="Neg")))
    for c in (True, False):
        np.testing.assert_allclose(model(np.array(c), X), np.exp(X) if c else -X, rtol=1e-6)
    assert model.reasons == ["first call"]
    compiled = model.executable({"c": np.array(True), "x": X})
    assert compiled is not None and len(compiled.program().bodies) == 2


def test_branches_of_other_dims_are_compiled_for_the_condition():
    model = OnnxModel(parsed(BRANCHES.format(then="Transpose", other="Neg")))
    for c in (True, False, True):
        np.testing.assert_array_equal(model(np.array(c), X), X.T if c else -X)
    assert model.reasons == ["first call", "c is bool[] [False], was bool[] [True]"]


LOOP = """
agraph (int64 m, bool c, float[k] x) => (float[k] last, float[t,k] rows) {
  last, rows = Loop (m, c, x) <body = b (int64 i, bool going, float[k] s) => (bool more, float[k] t, float[k] row) {
    one = Constant <value = float {1.5}> ()
    bound = Constant <value = float {20.0}> ()
    t = Mul (s, one)
    row = Add (t, x)
    all = ReduceSum <keepdims = 0> (t)
    more = Less (all, bound)
  }>
}"""


@pytest.mark.parametrize("steps,start", [(7, 1.0), (2, 1.0), (0, 1.0), (5, 100.0)])
def test_a_loop_ends_where_its_condition_says_so_within_its_trip_count(steps, start):
    x = np.array([start, 0.5, -0.25], np.float32)
    last, rows = OnnxModel(parsed(LOOP))(np.array(steps), np.array(True), x)
    expected, count = x, 0
    while count < steps and (count == 0 or expected.sum() < 20):
        expected, count = expected * 1.5, count + 1
    np.testing.assert_allclose(last, expected)
    assert rows.shape == (count, 3)


WHILE = """agraph (bool c, float[k] x) => (float[k] last) {
  last = Loop (, c, x) <body = b (int64 i, bool going, float[k] s) => (bool more, float[k] t) {
    t = Add (s, s)  ten = Constant <value = float {10.0}> ()  sum = ReduceSum <keepdims = 0> (t)  more = Less (sum, ten) }>
}"""


@pytest.mark.parametrize("control", [True, False])
def test_a_loop_without_trip_count_runs_on_and_without_control_flow_is_compiled_for_its_condition(control):
    model = OnnxModel(parsed(WHILE), options=CompileOptions(disable=() if control else ("control",)))
    for start, last in ((1.0, 8.0), (3.0, 6.0), (100.0, 200.0)):
        np.testing.assert_array_equal(model(np.array(True), np.array([start, start], np.float32)), [last, last])
    np.testing.assert_array_equal(model(np.array(False), np.array([7.0, 1.0], np.float32)), [7.0, 1.0])
    assert len(model.reasons) == (1 if control else 4)


def test_a_trip_count_that_is_known_at_run_time_needs_no_other_program():
    text = """agraph (int64 m, bool c, float[k] x) => (float[k] last, int64 n) {
      zero = Constant <value = int64 {0}> ()
      last, n = Loop (m, c, x, zero) <body = b (int64 i, bool going, float[k] s, int64 k0) => (bool more, float[k] t, int64 k1) {
        t = Add (s, x)  k1 = Identity (i)  lim = Constant <value = float {20.0}> ()  sum = ReduceSum <keepdims = 0> (t)
        more = Less (sum, lim) }>
    }"""
    model, x = OnnxModel(parsed(text)), np.ones(2, np.float32)
    for steps, start, ran in ((3, True, 3), (0, True, 0), (5, False, 0), (1 << 40, True, 9), (-3, True, 0)):
        last, n = model(np.array(steps), np.array(start), x)
        np.testing.assert_array_equal(last, x * (ran + 1))
        assert n == max(ran - 1, 0)
    assert model.reasons == ["first call"]


def test_a_long_loop_is_one_of_the_graph_and_its_rows_are_cut():
    model = OnnxModel(parsed(LOOP))
    last, rows = model(np.array(5000), np.array(True), np.array([1e-3, 0, 0], np.float32))
    assert rows.shape == (25, 3) and last.sum() >= 20 > rows[-2, 0]
    compiled = model.executable({"m": np.array(5000), "c": np.array(True), "x": X[0, :3]})
    assert compiled is not None and len(compiled.program().steps) < 10
    with pytest.raises(Unsupported, match="more than 1024 steps"):
        model(np.array(1 << 40), np.array(True), X[0])


@pytest.mark.parametrize("steps", [3, 90])
def test_a_weight_of_a_body_is_one_param_however_often_it_is_written_out(steps):
    text = """agraph (float[2] x) => (float[2] y) {
      m = Constant <value = int64 {STEPS}> ()
      y = Loop (m, , x) <body = b (int64 i, bool go, float[2] s) => (bool go, float[2] t) <float[2] w = {0.5, 2.0}>
        { t = Mul (s, w) }>
    }"""
    graph = from_onnx(parsed(text.replace("STEPS", str(steps))))
    assert [p.name for p in graph.params] == ["w"]


LONG = """
agraph (float[2,4] x, bool c, int64[1] p) => (float[2,4] y, float[2,4] z) {
  m = Constant <value = int64 {100}> ()  one = Constant <value = int64[1] {1}> ()  two = Constant <value = int64[2] {2, 4}> ()
  y, dims = Loop (m, , x, two) <body = b (int64 i, bool go, float[2,4] s, int64[2] d) => (bool go, float[2,4] t, int64[2] e) {
    f = If (c) <then_branch = yes () => (float[2,4] a) { a = Cos (s) }, else_branch = no () => (float[2,4] a2) {
      g = If (go) <then_branch = yy () => (float[2,4] b) { b = Mul (s, x) },
                   else_branch = nn () => (float[2,4] b2) { b2 = Neg (s) }>
      a2 = Sub (g, x) }>
    t = Add (f, x)  e = Identity (d) }>
  z = Reshape (y, dims)
}"""


@pytest.mark.parametrize("c", [True, False])
def test_branches_inside_a_loop_whose_state_is_a_shape(c):
    """The contents of a state are needed: the loop is written out, and its branches are not."""
    model = OnnxModel(parsed(LONG))
    x = np.linspace(-0.5, 0.5, 8, dtype=np.float32).reshape(2, 4)
    y, z = model(x, np.array(c), np.array([1]))
    want = x
    for _ in range(100):
        want = np.cos(want) + x if c else want * x
    np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(y, z)
    compiled = model.executable({"x": x, "c": np.array(c), "p": np.array([1])})
    assert compiled is not None and len(compiled.program().bodies) <= 200


def test_rows_of_a_size_that_depends_on_data_are_refused():
    text = """agraph (float[4] x) => (int64[r] y) {
      m = Constant <value = int64 {STEPS}> ()  c = Constant <value = bool {1}> ()
      r = Loop (m, c) <body = b (int64 i, bool go) => (bool go, int64[1, s] row)
        { f = Cast <to = 1> (i)  t = Add (x, f)  row = NonZero (t) }>
      shape = Constant <value = int64[1] {-1}> ()  y = Reshape (r, shape)
    }"""
    for steps in ("2", "90"):
        with pytest.raises(Unsupported, match="a state, or a result of each step, has a size that depends on data"):
            OnnxModel(parsed(text.replace("STEPS", steps)))(np.array([1, 0, 2, 0], np.float32))
    text = """agraph (float[4] x) => (int64[1, r] y) {
      n = NonZero (x)  s = SequenceConstruct (n, n)  y = ConcatFromSequence <axis = 1> (s)
    }"""
    with pytest.raises(Unsupported, match="depends on data"):
        OnnxModel(parsed(text))(np.array([1, 0, 2, 0], np.float32))


def test_random_numbers_of_a_loop_differ_in_each_step():
    text = """agraph (float[4] x) => (float[3, 4] y) {
      m = Constant <value = int64 {3}> ()  c = Constant <value = bool {1}> ()
      y = Loop (m, c) <body = b (int64 i, bool go) => (bool go, float[4] row) { r = RandomUniformLike (x)  row = Add (r, x) }>
    }"""
    rows = OnnxModel(parsed(text))(np.zeros(4, np.float32))
    assert len(set(rows.reshape(-1).tolist())) == 12
    text = text.replace("{3}", "{100}").replace("float[3,", "float[100,")
    rows = OnnxModel(parsed(text))(np.zeros(4, np.float32))
    assert len(set(rows.reshape(-1).tolist())) > 390


def test_a_branch_that_draws_random_numbers_is_written_out():
    text = """agraph (bool c, float[4] x) => (float[4] y) {
      y = If (c) <then_branch = a () => (float[4] r) { r = RandomUniformLike (x) },
                  else_branch = b () => (float[4] m) { m = Neg (x) }>
    }"""
    model, x = OnnxModel(parsed(text)), np.ones(4, np.float32)
    draws = [model(np.array(True), x) for _ in range(2)]
    assert (model(np.array(False), x) == -x).all() and (draws[0] != draws[1]).all() and (draws[0] < 1).all()


def test_functions_that_call_each_other_twice_end_soon(monkeypatch):
    """Sixty functions, each of which calls the next one twice, are 2**60 nodes when they are written out."""
    monkeypatch.setattr(importer, "MOST", 1000)
    head = '<opset_import: ["" : 21, "f" : 1], domain: "f"> '
    calls = [f"{head}f{i} (a) => (c) {{ b = f.f{i + 1} (a)  c = f.f{i + 1} (b) }}" for i in range(60)]
    last = '<opset_import: ["" : 21], domain: "f"> f60 (a) => (c) { c = Neg (a) }'
    text = '<ir_version: 10, opset_import: ["" : 21, "f" : 1]> net (float[2] x) => (float[2] y) { y = f.f0 (x) }'
    with pytest.raises(Unsupported, match="written out to more than"):
        OnnxModel(parser.parse_model(text + "\n".join([*calls, last])))(np.ones(2, np.float32))


SCAN = """
agraph (float[m] h, float[m,n] x) => (float[m] last, float[m,n] rows) {
  last, rows = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [-1],
                     scan_output_directions = [DIRECTION],
                     body = b (float[m] s, float[m] x1) => (float[m] t, float[m] row) { t = Sub (x1, s)  row = Tanh (t) }> (h, x)
}"""


@pytest.mark.parametrize("steps", [0, 4, 100])
@pytest.mark.parametrize("direction", [0, 1])
def test_a_scan_has_axes_and_directions(direction, steps):
    x = RNG.normal(size=(3, steps)).astype(np.float32)
    model = OnnxModel(parsed(SCAN.replace("DIRECTION", str(direction))))
    last, rows = model(X[:, 0], x)
    compiled = model.executable({"h": X[:, 0], "x": x})
    assert compiled is not None and len(compiled.program().bodies) == (steps == 100)
    state, expected = X[:, 0], []
    if not steps:
        assert rows.shape == (3, 0) and (last == state).all()
        return
    for i in reversed(range(steps)):
        state = x[:, i] - state
        expected.append(np.tanh(state))
    np.testing.assert_allclose(last, state, rtol=1e-6)
    np.testing.assert_allclose(rows, np.stack(expected[:: -1 if direction else 1], -1), rtol=1e-6)


def test_a_tensor_is_not_split_to_elements_without_number():
    text = "agraph (float[n] x) => (int64 y) { s = SplitToSequence (x)  y = SequenceLength (s) }"
    assert OnnxModel(parsed(text))(np.zeros(9, np.float32)) == 9
    with pytest.raises(Unsupported, match="it makes 1099511627776 parts, at most 16384"):
        from_onnx(parsed(text), dims={"n": 1 << 40})


SEQUENCES = """
agraph (float[3,4] x) => (float[4,6] joined, float[3,4] whole, float[2,3,4] stacked, int64 size) {
  two = Constant <value = int64 {2}> ()
  first = Constant <value = int64 {0}> ()
  parts = SplitToSequence <axis = 1> (x, two)
  t = SequenceInsert (parts, x, first)
  size = SequenceLength (t)
  whole = SequenceAt (t, first)
  rest = SequenceErase (t, first)
  joined1 = ConcatFromSequence <axis = 0> (rest)
  joined2 = ConcatFromSequence <axis = -2> (rest)
  joined3 = Concat <axis = 0> (joined1, joined2)
  shape = Constant <value = int64[2] {4, 6}> ()
  joined = Reshape (joined3, shape)
  pair = SequenceConstruct (x, whole)
  stacked = ConcatFromSequence <axis = 0, new_axis = 1> (pair)
}"""


def test_sequences_are_lists_of_known_length():
    joined, whole, stacked, size = OnnxModel(parsed(SEQUENCES)).run({"x": X}).values()
    halves = np.concatenate([X[:, :2], X[:, 2:]])
    np.testing.assert_array_equal(joined, np.concatenate([halves, halves]).reshape(4, 6))
    np.testing.assert_array_equal(whole, X)
    np.testing.assert_array_equal(stacked, np.stack([X, X]))
    assert size == 3
