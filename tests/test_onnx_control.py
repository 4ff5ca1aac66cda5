"""If, Loop, Scan and sequences of ONNX models."""

from __future__ import annotations

import numpy as np
import pytest

from rlx.errors import Unsupported
from rlx.frontends.onnx import OnnxModel
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


def test_a_loop_without_trip_count_is_compiled_for_what_its_condition_depends_on():
    text = """agraph (bool c, float[k] x) => (float[k] last) {
      last = Loop (, c, x) <body = b (int64 i, bool going, float[k] s) => (bool more, float[k] t) {
        t = Add (s, s)  ten = Constant <value = float {10.0}> ()  sum = ReduceSum <keepdims = 0> (t)  more = Less (sum, ten) }>
    }"""
    model = OnnxModel(parsed(text))
    for start, last in ((1.0, 8.0), (3.0, 6.0)):
        np.testing.assert_array_equal(model(np.array(True), np.array([start, start], np.float32)), [last, last])
    assert model.reasons == ["first call", "x is float32[2] [3.0, 3.0], was float32[2] [1.0, 1.0]"]


def test_a_loop_of_too_many_steps_is_refused():
    with pytest.raises(Unsupported, match="more than 1024 steps"):
        OnnxModel(parsed(LOOP))(np.array(2000), np.array(True), X[0])


SCAN = """
agraph (float[m] h, float[m,n] x) => (float[m] last, float[m,n] rows) {
  last, rows = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [-1],
                     scan_output_directions = [DIRECTION],
                     body = b (float[m] s, float[m] x1) => (float[m] t, float[m] row) { t = Sub (x1, s)  row = Tanh (t) }> (h, x)
}"""


@pytest.mark.parametrize("direction", [0, 1])
def test_a_scan_has_axes_and_directions(direction):
    last, rows = OnnxModel(parsed(SCAN.replace("DIRECTION", str(direction))))(X[:, 0], X)
    state, expected = X[:, 0], []
    for i in (3, 2, 1, 0):
        state = X[:, i] - state
        expected.append(np.tanh(state))
    np.testing.assert_allclose(last, state, rtol=1e-6)
    np.testing.assert_allclose(rows, np.stack(expected[:: -1 if direction else 1], -1), rtol=1e-6)


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
