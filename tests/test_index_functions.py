"""Functions of indices, and those whose number of results is known only in a run, on the reference and on the CPU: against onnx's
own reference implementations and numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx.reference
import pytest
from onnx import TensorProto, helper

import rlx
from rlx.errors import AttributeValueError, DTypeError, IndexRangeError, ShapeError
from rlx.ir.evaluate import evaluate

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 4, 5)).astype(np.float32)


def by_onnx(op: str, *arrays: np.ndarray, outputs: int = 1, **attributes: Any) -> list[np.ndarray]:
    """The results of onnx's reference implementation of an op."""
    names, made = [f"x{i}" for i in range(len(arrays))], [f"y{i}" for i in range(outputs)]
    ins = [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape) for n, a in zip(names, arrays)]
    outs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in made]
    graph = helper.make_graph([helper.make_node(op, names, made, **attributes)], "g", ins, outs)
    return onnx.reference.ReferenceEvaluator(helper.make_model(graph)).run(None, dict(zip(names, arrays)))


def run(build: Callable[..., Any], *arrays: np.ndarray, atol: float = 1e-6) -> list[np.ndarray]:
    """The results on the CPU, which are the reference's."""
    g = rlx.Graph("g")
    made = build(*(g.input(f"x{i}", a.shape, rlx.as_dtype(a.dtype)) for i, a in enumerate(arrays)))
    g.set_outputs(made if isinstance(made, tuple) else [made])
    inputs = {f"x{i}": a for i, a in enumerate(arrays)}
    found = rlx.Session("cpu").compile(g).run(inputs)
    for one, want in zip(found, evaluate(g, inputs)[0], strict=True):
        np.testing.assert_allclose(one, want, rtol=1e-5, atol=atol)
    return found


def same(found: Sequence[np.ndarray], want: Sequence[np.ndarray]) -> None:
    for a, b in zip(found, want, strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dims, batch", [((2, 3), 0), ((2, 1), 0), ((3, 2), 1), ((3, 4, 1), 2), ((3, 4, 2, 1), 2), ((2,), 0)])
def test_slices_at_positions(dims: tuple[int, ...], batch: int) -> None:
    at = RNG.integers(0, 3, dims)
    same(run(lambda x, i: rlx.gather_nd(x, i, batch_dims=batch), X, at), by_onnx("GatherND", X, at, batch_dims=batch))


@pytest.mark.parametrize("mode", ["replace", "add", "mul", "max", "min"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_slices_are_written_at_positions_in_order(mode: Any, count: int) -> None:
    at = RNG.integers(0, 3, (7, count))
    updates = RNG.standard_normal((7, *X.shape[count:])).astype(np.float32)
    want = X.copy()
    for place, value in zip(at, updates):
        old = want[tuple(place)]
        want[tuple(place)] = {"add": np.add, "mul": np.multiply, "max": np.maximum, "min": np.minimum}.get(mode, lambda a, b: b)(
            old, value)  # fmt: skip
    same(run(lambda x, i, u: rlx.scatter_nd(x, i, u, mode=mode), X, at, updates), [want])


def test_a_position_outside_its_own_dim_is_an_error() -> None:
    """Also where it is an element of the next row."""
    g = rlx.Graph("g")
    x, i = g.input("x", (3, 4), rlx.f32), g.input("i", (1, 2), rlx.i64)
    g.set_outputs([rlx.gather_nd(x, i), rlx.scatter_nd(x, i, np.ones(1, np.float32))])
    compiled, rows = rlx.Session("cpu").compile(g), np.arange(12, dtype=np.float32).reshape(3, 4)
    assert compiled.run({"x": rows, "i": np.array([[1, 3]])})[0] == [7]
    for wrong in ([0, 4], [3, 0], [-1, 0]):
        with pytest.raises(IndexRangeError):
            compiled.run({"x": rows, "i": np.array([wrong])})


def test_one_hot_and_reversed_sequences() -> None:
    at, on_off = np.array([[1, 0], [3, 5]], np.int64), np.array([2, 7], np.float32)
    same(run(lambda x: rlx.one_hot(x, 4, axis=1, on=7.0, off=2.0), at), by_onnx("OneHot", at, np.array(4), on_off, axis=1))
    lengths = np.array([1, 4, 2], np.int64)
    want = by_onnx("ReverseSequence", X, lengths, batch_axis=0, time_axis=1)
    same(run(lambda x, n: rlx.reverse_sequence(x, n, axis=1, batch_axis=0), X, lengths), want)


SPARSE = np.array([[0, 2, 0, 1], [3, 0, 0, 0], [0, 0, 5, 6]], np.float32)


@pytest.mark.parametrize("x", [SPARSE, SPARSE > 1, SPARSE.astype(int)[:, :, None] * [0, 1], SPARSE * 0, SPARSE[:0]])
def test_nonzero_elements_and_their_number(x: np.ndarray) -> None:
    (want,) = by_onnx("NonZero", x)
    at, count = run(rlx.nonzero, x)
    assert at.shape == (x.ndim, x.size) and count == want.shape[1]
    same([at[:, :count], at[:, count:]], [want, np.zeros_like(at[:, count:])])


def test_what_has_no_room_is_left_out() -> None:
    at, count = run(lambda x: rlx.nonzero(x, size=3), SPARSE)
    assert at.tolist() == [[0, 0, 1], [1, 3, 0]] and count == 3
    values, first, _, counts, count = run(lambda x: rlx.unique(x, size=2), np.array([4, 1, 1, 3, 4], np.int32))
    assert (values.tolist(), first.tolist(), counts.tolist(), count) == ([1, 3], [1, 3], [2, 1], 2)


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_compressed_slices_and_their_number(axis: int | None) -> None:
    keep = np.array([False, True, True])
    (want,) = by_onnx("Compress", X, keep, **({} if axis is None else {"axis": axis}))
    rows, count = run(lambda x, c: rlx.compress(x, c, axis=axis), X, keep)
    whole = np.moveaxis(rows, axis or 0, 0)
    same([whole[:count]], [np.moveaxis(want, axis or 0, 0)])
    assert not whole[count:].any()


@pytest.mark.parametrize("sorted", [True, False])
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_different_elements(axis: int | None, sorted: bool) -> None:
    x = RNG.integers(0, 2 if axis is not None else 5, (6, 3)).astype(np.float32)
    whole, at, back, often = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    order = np.arange(len(at)) if sorted else np.argsort(at)
    want = [np.take(whole, order, axis=axis or 0), at[order], np.argsort(order)[back.reshape(-1)], often[order]]
    values, first, inverse, counts, count = run(lambda x: rlx.unique(x, axis=axis, sorted=sorted), x)
    found = np.moveaxis(np.moveaxis(values, axis or 0, 0)[:count], 0, axis or 0)
    same([found, first[:count], inverse, counts[:count]], want)


def test_no_numbers_are_one_number() -> None:
    x = np.array([np.nan, 1, np.nan, -0.0, 0.0], np.float32)
    values, first, inverse, counts, count = run(rlx.unique, x)
    np.testing.assert_array_equal(values[:3], [0, 1, np.nan])
    assert (first[:3].tolist(), inverse.tolist(), counts.tolist(), count) == ([3, 1, 0], [2, 1, 2, 0, 0], [2, 1, 2, 0, 0], 3)


@pytest.mark.parametrize("most", [2, 40])
def test_the_best_boxes_are_in_the_order_of_onnx(most: int) -> None:
    boxes, scores = (RNG.random((2, 40, 4)) * 9).astype(np.float32), RNG.random((2, 3, 40)).round(1).astype(np.float32)
    limits = np.array([most]), np.array([0.2], np.float32), np.array([0.35], np.float32)
    (want,) = by_onnx("NonMaxSuppression", boxes, scores, *limits)
    rows, count = run(lambda b, s: rlx.best_boxes(b, s, most=most, overlap=0.2, least=0.35), boxes, scores)
    assert rows.shape == (2 * 3 * most, 3) and not rows[count:].any()
    np.testing.assert_array_equal(rows[:count], want)


@pytest.mark.parametrize("order", ["dcr", "crd"])
def test_pixels_and_channels_change_places(order: Any) -> None:
    x = RNG.standard_normal((2, 12, 3, 2)).astype(np.float32)
    same(run(lambda x: rlx.depth_to_space(x, 2, order=order), x), by_onnx("DepthToSpace", x, blocksize=2, mode=order.upper()))
    same(run(lambda x: rlx.space_to_depth(rlx.depth_to_space(x, 2, order=order), 2, order=order), x), [x])


@pytest.mark.parametrize("dims", [(3, 4, 5), (1, 7, 5), (2, 1, 10), (6, 6, 2)])
def test_centres(dims: tuple[int, ...]) -> None:
    same(run(lambda x: rlx.center_crop_pad(x, dims), X), by_onnx("CenterCropPad", X, np.array(dims)))
    want = by_onnx("CenterCropPad", X, np.array(dims[:1]), axes=[-2])
    same(run(lambda x: rlx.center_crop_pad(x, dims[0], axes=-2), X), want)


WRONG = {
    "more positions than dims": (lambda x: rlx.gather_nd(x, np.zeros((2, 4), np.int64)), ShapeError, "dims of"),
    "batches that differ": (lambda x: rlx.gather_nd(x, np.zeros((2, 1), np.int64), batch_dims=1), ShapeError, "common"),
    "updates of other dims": (lambda x: rlx.scatter_nd(x, np.zeros((2, 1), np.int64), x), ShapeError, "updates"),
    "a mode that is none": (
        lambda x: rlx.scatter_elements(x, np.zeros(x.dims, np.int64), x, mode="xor"), AttributeValueError, "replace, add"),
    "indices for more lines": (
        lambda x: rlx.scatter_elements(x, np.zeros((4, 4, 5), np.int64), np.zeros((4, 4, 5), np.float32), axis=1), ShapeError,
        "all but dim 1"),
    "sums of bools": (
        lambda x: rlx.scatter_elements(x > 0, np.zeros(x.dims, np.int64), x > 0, mode="add"), DTypeError, "cast them"),
    "blocks that do not fit": (lambda x: rlx.space_to_depth(x[None], 2), AttributeValueError, "whole blocks"),
}  # fmt: skip


@pytest.mark.parametrize("ask, error, message", WRONG.values(), ids=WRONG)
def test_wrong_indices_are_errors(ask: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(rlx.Graph("g").input("x", X.shape, "f32"))
