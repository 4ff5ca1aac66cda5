"""Numbers at the edges of their dtypes: functions over their whole range, integer attributes to the last bit, empty and
scalar operands. On the evaluator and on every backend that computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from devices import TWO as DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st

import rlx
from rlx.errors import AttributeValueError, CompileError, DTypeError, IndexRangeError, ShapeError
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Value


def everywhere(make: Callable[..., Value], *arrays: np.ndarray) -> list[np.ndarray]:
    """make(inputs) by the evaluator and on every device."""
    g = rlx.Graph("g")
    g.set_outputs([make(*(g.input(f"x{i}", a.shape, rlx.ir.as_dtype(a.dtype)) for i, a in enumerate(arrays)))])
    inputs = {f"x{i}": a for i, a in enumerate(arrays)}
    assert str(rlx.Graph.parse(str(g))) == str(g)
    return [evaluate(g, inputs)[0][0], *(rlx.Session(d).compile(g).run(inputs)[0] for d in DEVICES)]


def ulps(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest distance in units of the last place of what is right, where that is finite; elsewhere both must agree."""
    with np.errstate(over="ignore"):
        want = exact.astype(found.dtype)
    finite = np.isfinite(want)
    np.testing.assert_array_equal(found[~finite], want[~finite])
    return float(np.max(np.abs(found[finite].astype(np.longdouble) - want[finite]) / np.spacing(np.abs(want[finite]))))


RANGES = {np.float32: (-110.0, 92.0), np.float64: (-750.0, 712.0)}  # exp underflows at one end and overflows at the other
FUNCTIONS: dict[str, tuple[Callable[[Value], Value], Callable[[np.ndarray], np.ndarray]]] = {
    "expm1": (rlx.expm1, np.expm1),
    "softplus": (rlx.softplus, lambda x: np.logaddexp(x, 0)),
    "log1p": (rlx.log1p, np.log1p),
}


@pytest.mark.parametrize("dtype", RANGES)
@pytest.mark.parametrize("fn, exact", FUNCTIONS.values(), ids=FUNCTIONS)
def test_exponentials_are_right_over_their_whole_range(fn: Any, exact: Any, dtype: Any) -> None:
    """expm1(84.3) in f32 and expm1(703) in f64 were infinite."""
    low, high = RANGES[dtype]
    tiny = np.geomspace(1e-30, 1, 300)
    x = np.concatenate([np.linspace(low, high, 4001), tiny, -tiny, [0.0, 84.3, 88.7, 703.0, 709.7, np.inf]]).astype(dtype)
    for found in everywhere(fn, x):
        with np.errstate(invalid="ignore", divide="ignore"):
            assert ulps(found, exact(x.astype(np.longdouble))) <= 8


def test_integer_values_of_pad_and_bounds_of_clip_keep_every_bit() -> None:
    odd = 2**53 + 1
    for found in everywhere(lambda x: rlx.pad(x, (1,), (1,), odd), np.array([1], np.int64)):
        assert found.tolist() == [odd, 1, odd]
    for found in everywhere(lambda x: rlx.clip(x, low=odd, high=2**62 + 1), np.array([1, 2**63 - 1], np.int64)):
        assert found.tolist() == [odd, 2**62 + 1]
    for found in everywhere(lambda x: rlx.pad(x, (1,), (0,), 2**64 - 1), np.array([1], np.uint64)):
        assert found.tolist() == [2**64 - 1, 1]
    for found in everywhere(lambda x: rlx.pad(x, (1,), (0,), -0.0), np.array([1], np.float32)):
        assert np.signbit(found).tolist() == [True, False]


@given(st.sampled_from(["i8", "u8", "i32", "i64", "u64"]), st.integers(-(2**65), 2**65), st.booleans())
@settings(max_examples=60, deadline=None)
def test_an_integer_attribute_is_held_exactly_or_refused(name: str, number: int, small: bool) -> None:
    number = number % 400 - 200 if small else number
    dtype = rlx.ir.as_dtype(name)
    g = rlx.Graph("g")
    x = g.input("x", (1,), dtype)
    limits = np.iinfo(dtype.numpy)
    makers = [lambda: rlx.pad(x, (1,), (0,), number)]
    makers += [lambda: rlx.clip(x, low=number, high=number)] if dtype.kind == "i" else []
    if not limits.min <= number <= limits.max:
        for make in makers:
            with pytest.raises(DTypeError, match=f"{name}"):
                make()
        return
    g.set_outputs([make() for make in makers])
    padded, *clipped = evaluate(rlx.Graph.parse(str(g)), {"x": np.ones(1, dtype.numpy)})[0]
    assert padded.tolist() == [number, 1] and all(c.tolist() == [number] for c in clipped)


@pytest.mark.parametrize("bound", [300, 0.5, float("nan"), 10**400])
def test_bounds_that_the_dtype_does_not_hold_are_refused(bound: float) -> None:
    x = rlx.Graph("g").input("x", (2,), "i8")
    for make in (lambda: rlx.clip(x, low=bound), lambda: rlx.clip(x, high=bound), lambda: rlx.pad(x, (1,), (0,), bound)):
        with pytest.raises(DTypeError, match="does not fit i8"):
            make()


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_float_beyond_the_range_is_infinity_without_a_warning(dtype: str) -> None:  # warnings are errors here
    x = np.ones(2, rlx.as_dtype(dtype).numpy)
    f = rlx.jit(lambda x: (x + 1e300, rlx.where(x > 0, [-1e300, 2], x), rlx.constant([1e300]), rlx.full((2,), 1e300)))
    assert [r.tolist() for r in f(x)] == [[np.inf] * 2, [-np.inf, 2], [np.inf], [np.inf] * 2]
    assert rlx.jit(lambda x: x)(-1e300) == -np.inf
    compiled = rlx.compile(lambda x: x, x)
    assert compiled([1e300, 2]).tolist() == [np.inf, 2]


@pytest.mark.parametrize("name", ["sum", "mean", "max", "prod"])
def test_a_leaf_without_dims_is_reduced_to_itself(name: str) -> None:
    for found in everywhere(getattr(rlx, name), np.full((), 3, np.float32)):
        assert found.shape == () and found == 3
    for found in everywhere(lambda x: getattr(rlx, name)(x, keepdims=True), np.full((), 3, np.float32)):
        assert found.shape == () and found == 3


def test_many_operands_are_joined() -> None:
    arrays = [np.full(2, i, np.float32) for i in range(400)]
    for found in everywhere(lambda *x: rlx.concat(x) * 2.0, *arrays):
        np.testing.assert_array_equal(found, 2 * np.concatenate(arrays))


def test_the_top_of_one_element_is_folded() -> None:
    """The cast behind top_k goes, and the rules come upon a node of two results."""
    g = rlx.Graph("g")
    g.set_outputs(rlx.top_k(rlx.constant(np.ones((3, 1)), "bf16"), k=1))
    for device in DEVICES:
        values, places = rlx.Session(device).compile(g).run({})
        assert values.tolist() == [[1]] * 3 and places.tolist() == [[0]] * 3


READ: dict[str, Callable[[Value, Value], Value]] = {
    "as it is": lambda x, i: rlx.gather(x, i, axis=0), "times 0": lambda x, i: rlx.gather(x, i, axis=0) * 0.0,
    "summed": lambda x, i: rlx.sum(rlx.gather(x, i, axis=0)), "its row alone": lambda x, i: rlx.gather(x, i, axis=0)[4],
    "joined": lambda x, i: rlx.concat([rlx.gather(x, i, axis=0), x], axis=0),
    "in a softmax": lambda x, i: rlx.softmax(rlx.embedding(x, i)),
    "in a product": lambda x, i: rlx.gather(x, i, axis=0) @ x.T,
    "chosen against": lambda x, i: rlx.where(rlx.unsqueeze(i, (1,)) < 4, rlx.gather(x, i, axis=0), 0.0),
    "scattered": lambda x, i: rlx.scatter_add(x, i, rlx.broadcast_to(rlx.constant(1.0), (5, 3)), axis=0),
}  # fmt: skip


@pytest.mark.parametrize("disable", [(), ("fuse",)])
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_an_index_out_of_range_that_a_result_depends_on_is_an_error(read: Any, disable: tuple[str, ...]) -> None:
    """Whatever is done with the row, whatever is fused, on every backend. Without it the results are right."""
    g = rlx.Graph("g")
    x, i = g.input("x", (4, 3), "f32"), g.input("i", (5,), "i64")
    g.set_outputs([read(x, i)])
    x_array = np.arange(12, dtype=np.float32).reshape(4, 3)
    for device in DEVICES:
        compiled = rlx.Session(device).compile(g, rlx.CompileOptions(disable=disable))
        for bad in (4, -1, 2**62):
            with pytest.raises(IndexRangeError):
                compiled.run({"x": x_array, "i": np.array([0, 1, 2, 3, bad])})
        good = {"x": x_array, "i": np.array([0, 1, 2, 3, 0])}
        np.testing.assert_allclose(compiled.run(good)[0], evaluate(g, good)[0][0], rtol=1e-5)


@pytest.mark.parametrize("disable", [(), ("fuse",)])
def test_an_index_out_of_range_that_no_result_depends_on_leaves_results_right(disable: tuple[str, ...]) -> None:
    """It is an error or it is not, by how the graph was fused; a run that ends well has the right results."""
    g = rlx.Graph("g")
    x, i = g.input("x", (4, 3), "f32"), g.input("i", (5,), "i64")
    g.set_outputs([rlx.gather(x, i, axis=0)[:4]])
    x_array = np.arange(12, dtype=np.float32).reshape(4, 3)
    for device in DEVICES:
        compiled = rlx.Session(device).compile(g, rlx.CompileOptions(disable=disable))
        try:
            (found,) = compiled.run({"x": x_array, "i": np.array([3, 2, 1, 0, 99])})
        except IndexRangeError:
            continue
        np.testing.assert_array_equal(found, x_array[::-1])


def test_shapes_say_what_dims_are() -> None:
    g = rlx.Graph("g")
    for make in (lambda: rlx.Shape(None, "f32"), lambda: rlx.BufferHandle("a", None, "f32"), lambda: g.input("x", 2.5, "f32")):
        with pytest.raises(ShapeError, match="dims are ints and names"):
            make()
    with pytest.raises(DTypeError, match="None is not a dtype"):
        rlx.Shape((1,), None)  # type: ignore[arg-type]
    with pytest.raises(AttributeValueError, match="dims are ints and names"):
        rlx.broadcast_to(rlx.constant(1.0), None)


def test_an_empty_tensor_takes_no_memory_however_long_its_other_dims() -> None:
    long = 2**62
    for found in everywhere(lambda x: x + x, np.zeros((0, long), np.int8)):
        assert found.shape == (0, long)
    for device in DEVICES:  # numpy has no such array of f32
        g = rlx.Graph("g")
        x = g.input("x", (0, 1), "f32")
        g.set_outputs([rlx.sum(rlx.exp(rlx.broadcast_to(x, (0, long))), axis=1)])
        assert rlx.Session(device).compile(g).run({"x": np.zeros((0, 1), np.float32)})[0].shape == (0,)
    for dims in ((long,), (0, long, long)):  # the second: its strides do not fit 64 bits
        g = rlx.Graph("g")
        g.set_outputs([g.input("x", dims, "f32") + 1.0])
        with pytest.raises(CompileError, match="more than any memory"):
            rlx.Session("ref").compile(g)
