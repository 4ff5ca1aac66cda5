"""Values: operators compare elements, identity tells values apart, graphs can be copied and pickled, and
what has no elements yet says so."""

# ruff: noqa: SIM300  numbers and arrays stand on the left to try that side

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import rlx
import rlx.ir.ops as o
from rlx.errors import GraphError, Unsupported
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph, constant
from rlx.ir.op import OPS

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


A = np.random.default_rng(0).standard_normal((4, 5, 6)).astype(np.float32)
B = np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)
IDS = np.array([[0, -1, 2], [3, -4, 1]])
MASK = np.arange(30).reshape(5, 6) % 3 == 0
AS_NUMPY: dict[str, Callable[..., Any]] = {
    "x[list]": lambda x, y, i: x[[0, -1]], "x[:, list, list]": lambda x, y, i: x[:, [1, -2], [3, 4]],
    "x[list, :, list]": lambda x, y, i: x[[0, 1], :, [3, 4]], "x[i]": lambda x, y, i: x[i],
    "x[i, :, i]": lambda x, y, i: x[i, :, i],
    "x[..., i]": lambda x, y, i: x[..., i], "x[1:3, i, None]": lambda x, y, i: x[1:3, i, None],
    "x[0, list]": lambda x, y, i: x[0, [1, 2]],
    "x[:, mask]": lambda x, y, i: x[:, MASK], "x[mask of rows]": lambda x, y, i: x[np.array([True, False, True, False])],
    "x[1, i, 2:4]": lambda x, y, i: x[1, i, 2:4], "x[i, i % 5]": lambda x, y, i: x[i, i % 5, ::2],
    "einsum": lambda x, y, i: np.einsum("abc,cb->a", x, y), "einsum ...": lambda x, y, i: np.einsum("...bc,cb", x, y),
    "einsum diagonal": lambda x, y, i: np.einsum("aba,cb->ba", x[:, :, :4], y), "einsum trace": lambda x, y, i: np.einsum(
        "ii", y[:5]), "einsum of three equal": lambda x, y, i: np.einsum("iii,ij->ij", x[:4, :4, :4], y[:4]),
    "einsum of one": lambda x, y, i: np.einsum("abc->cb", x),
    "einsum of three": lambda x, y, i: np.einsum("abc,cd,d->ba", x, y, y[0]),
    "tensordot": lambda x, y, i: np.tensordot(x, y, ([1], [1])), "dot": lambda x, y, i: np.dot(x, y),
    "outer": lambda x, y, i: np.outer(y, y),
    "stack": lambda x, y, i: np.stack([x, x], 1), "concatenate": lambda x, y, i: np.concatenate([x, x], axis=-1),
    "concatenate by position": lambda x, y, i: np.concatenate((x, x), 1),
    "transpose by a tuple": lambda x, y, i: x.transpose((2, 0, 1)), "by a list": lambda x, y, i: x.transpose([1, 0, 2]),
    "tile": lambda x, y, i: np.tile(x, (2, 1)), "tile more": lambda x, y, i: np.tile(y, (2, 3, 1)),
    "repeat": lambda x, y, i: np.repeat(x, 3, 1),
    "roll": lambda x, y, i: np.roll(x, 2, (0, 2)), "roll all": lambda x, y, i: np.roll(x, 7),
    "flip": lambda x, y, i: np.flip(x, 1),
    "tril": lambda x, y, i: np.tril(x, 1), "triu": lambda x, y, i: np.triu(x, -1),
    "moveaxis": lambda x, y, i: np.moveaxis(x, 0, -1),
    "swapaxes": lambda x, y, i: np.swapaxes(x, 0, -1), "expand_dims": lambda x, y, i: np.expand_dims(x, (0, 2)),
    "squeeze": lambda x, y, i: np.squeeze(x[:, :1]), "take": lambda x, y, i: np.take(x, i, axis=1),
    "where": lambda x, y, i: np.where(x > 0, x, 0.0),
    "var": lambda x, y, i: np.var(x, axis=(0, 2), ddof=1), "std": lambda x, y, i: x.std(axis=1, keepdims=True),
    "sum": lambda x, y, i: np.sum(x, axis=1, keepdims=True), "max": lambda x, y, i: x.max(axis=1),
    "mean": lambda x, y, i: x.mean(),
    "var of all": lambda x, y, i: (x.var if isinstance(x, np.ndarray) else x.variance)(axis=None),
    "sum of all": lambda x, y, i: x.sum(axis=None), "max of all": lambda x, y, i: np.max(x, axis=None, keepdims=True),
    "sum over no axis": lambda x, y, i: np.sum(x, axis=()), "argmax of all": lambda x, y, i: np.argmax(x),
    "argmin of all": lambda x, y, i: np.argmin(x, keepdims=True), "argmax": lambda x, y, i: np.argmax(x, 1, keepdims=True),
    "cumsum of all": lambda x, y, i: np.cumsum(x), "cumprod": lambda x, y, i: np.cumprod(y, axis=0),
    "transpose": lambda x, y, i: np.transpose(x, axes=None), "pad": lambda x, y, i: np.pad(x, 2),
    "pad each": lambda x, y, i: np.pad(y, ((1, 0), (0, 3)), constant_values=2.5), "pad ends": lambda x, y, i: np.pad(y, (1, 2)),
    "sort": lambda x, y, i: np.sort(x, axis=0), "clip": lambda x, y, i: np.clip(x, -0.5, 0.5), "exp": lambda x, y, i: np.exp(x),
    "logaddexp": lambda x, y, i: np.logaddexp(x, 1.0), "isfinite": lambda x, y, i: np.isfinite(x * np.float32(np.inf)),
    "zeros_like": lambda x, y, i: np.zeros_like(i),
    "x % y": lambda x, y, i: x % 0.7, "x // y": lambda x, y, i: x // 0.3, "1 // x": lambda x, y, i: 1 // x,
    "i ** 3": lambda x, y, i: i**3 % 5,
    "bits": lambda x, y, i: (i & 3) | (~i ^ 1), "bools": lambda x, y, i: (x > 0) & ~(x < 1) | (x == 0) ^ True,
    "shifts": lambda x, y, i: (1 << abs(i)) + (i >> 1),
}  # fmt: skip


@pytest.mark.parametrize("f", AS_NUMPY.values(), ids=AS_NUMPY)
def test_values_do_as_arrays_do(f: Callable[..., Any]) -> None:
    want = np.asarray(f(A, B, IDS))
    g = Graph("g")
    g.set_outputs([f(g.input("x", A.shape, "f32"), g.input("y", B.shape, "f32"), g.input("i", IDS.shape, "i64"))])
    (found,), _ = evaluate(g, {"x": A, "y": B, "i": IDS})
    assert found.shape == want.shape and found.dtype == want.dtype
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("f", [np.nonzero, np.unique, lambda x: np.compress(x, x), lambda x: np.resize(x, (2, 2)),
                               lambda x: np.pad(x, 1, mode="edge")])  # fmt: skip
def test_functions_of_numpy_that_rlx_has_otherwise_are_refused(f: Callable[..., Any]) -> None:
    with pytest.raises(GraphError, match="np.* of a Value"):
        f(Graph("g").input("x", (4, 4), "f32"))


def test_arguments_that_only_numpy_has_are_refused() -> None:
    x = Graph("g").input("x", (4, 4), "f32")
    for f in (lambda: np.argsort(x, kind="stable"), lambda: np.take(x, 5, mode="wrap"), lambda: np.concatenate([x], dtype="f8")):
        with pytest.raises(GraphError, match=r"np\.\w+ of .* got an unexpected keyword argument '(kind|mode|dtype)'; use"):
            f()


OF_ARRAYS = {
    "flip": lambda x: rlx.flip(x, 0), "tril": rlx.tril, "roll": lambda x: rlx.roll(x, 1), "std": rlx.std,
    "one_hot": lambda x: rlx.one_hot(x, 4), "tile": lambda x: rlx.tile(x=x, repeats=2),
    "rnn": lambda x: rlx.rnn(np.ones((3, 4, 3), "f4"), x[None], w := np.ones((1, 4, 4), "f4"), b=w.reshape(1, 16)[:, :8])[0],
}  # fmt: skip


@pytest.mark.parametrize("f", OF_ARRAYS.values(), ids=OF_ARRAYS)
def test_functions_take_arrays_for_values(f: Callable[..., Any]) -> None:
    x = np.arange(12, dtype="f4").reshape(4, 3)
    g = Graph("g")
    g.set_outputs([f(x), f(g.input("x", x.shape, "f32"))])
    (one, other), _ = evaluate(g, {"x": x})
    np.testing.assert_array_equal(one, other)


MADE = {
    "zeros": (lambda: rlx.zeros((2, 3)), np.zeros((2, 3), "f4")), "ones": (lambda: rlx.ones(3, "i32"), np.ones(3, "i4")),
    "full": (lambda: rlx.full((2,), 2.5), np.full(2, 2.5, "f4")), "arange": (lambda: rlx.arange(5), np.arange(5)),
    "steps": (lambda: rlx.arange(5, 1, -2), np.arange(5, 1, -2)),
    "halves": (lambda: rlx.arange(0, 2, 0.5), np.arange(0, 2, 0.5, "f4")),
    "linspace": (lambda: rlx.linspace(0, 1, 5), np.linspace(0, 1, 5, dtype="f4")),
    "eye": (lambda: rlx.eye(3, 4, 1), np.eye(3, 4, 1, "f4")),
}  # fmt: skip


@pytest.mark.parametrize("make, want", MADE.values(), ids=MADE)
def test_functions_that_make_values(make: Callable[[], Any], want: np.ndarray) -> None:
    g = Graph("g")
    g.set_outputs([make()])
    (found,), _ = evaluate(g, {})
    assert found.dtype == want.dtype
    np.testing.assert_array_equal(found, want)


WRONG_INDEX = {
    "a mask of another shape": (lambda x: x[np.ones(3, bool)], rlx.errors.ShapeError, "mask"),
    "past the end": (lambda x: x[[0, 4]], rlx.errors.IndexRangeError, "index 4"),
    "before the start": (lambda x: x[[-5]], rlx.errors.IndexRangeError, "-5"),
    "too many": (lambda x: x[[0], 0, 0, 0], rlx.errors.ShapeError, "4 keys"),
    "halves": (lambda x: x[[0.5]], rlx.errors.DTypeError, "integers"),
    "einsum twice": (lambda x: rlx.einsum("aab->b", x), rlx.errors.ShapeError, "4 and 5 in one operand"),
    "einsum names": (lambda x: rlx.einsum("ab->b", x), rlx.errors.AttributeValueError, "each of 3 dims"),
    "einsum sizes": (lambda x: rlx.einsum("abc,abd->cd", x, x[:2]), rlx.errors.ShapeError, "'a'"),
    "einsum result": (lambda x: rlx.einsum("abc->z", x), rlx.errors.AttributeValueError, "z"),
}  # fmt: skip


@pytest.mark.parametrize("ask, error, message", WRONG_INDEX.values(), ids=WRONG_INDEX)
def test_wrong_indices_are_errors(ask: Callable[..., Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(Graph("g").input("x", (4, 5, 6), "f32"))


def test_an_index_of_a_value_is_checked_by_the_run_in_each_dim() -> None:
    """Also where two indices become one: a row too far is not an element of the next one."""
    g = rlx.Graph("g")
    x, i = g.input("x", (4, 6), rlx.f32), g.input("i", (2,), rlx.i64)
    g.set_outputs([x[i, [0, 1]]])
    compiled, rows = rlx.Session("cpu").compile(g), np.arange(24, dtype=np.float32).reshape(4, 6)
    assert compiled.run({"x": rows, "i": np.array([-1, 2])})[0].tolist() == [18, 13]
    with pytest.raises(rlx.errors.IndexRangeError):
        compiled.run({"x": rows, "i": np.array([0, 4])})


def test_the_name_of_a_graph_is_text() -> None:
    with pytest.raises(GraphError, match="the name of a graph is text, got 3"):
        Graph(3)  # type: ignore[arg-type]


def test_sizes_that_no_constant_has_are_refused() -> None:
    nan: Any = float("nan")
    for ask in (
        lambda: rlx.arange(0, 9, 0), lambda: rlx.arange(nan), lambda: rlx.arange(0, 9, nan), lambda: rlx.arange(None),  # type: ignore[arg-type]
        lambda: rlx.linspace(0, 1, -1), lambda: rlx.linspace(0, 1, nan), lambda: rlx.linspace(0, "1", 3),  # type: ignore[arg-type]
        lambda: rlx.eye(-1), lambda: rlx.eye(2.5), lambda: rlx.eye(2, "3"), lambda: rlx.eye(2, 3, nan),  # type: ignore[arg-type]
    ):  # fmt: skip
        with pytest.raises(rlx.errors.AttributeValueError, match="got"):
            ask()
    for ask in (lambda: rlx.arange(0, 1e12, 0.5), lambda: rlx.linspace(0, 1, 1 << 40), lambda: rlx.eye(1 << 20)):
        with pytest.raises(rlx.errors.ShapeError, match="check the sizes"):
            ask()


def test_a_shape_is_read_as_a_tuple() -> None:
    x = Graph("g").input("x", (2, 3), "f32")
    assert x.shape[0] == 2 and x.shape[-2:] == (2, 3) == x.shape and len(x.shape) == x.ndim == 2 and x.shape != (2, 4)
    assert list(x.shape) == [2, 3] and len(x) == 2 and x.size == 6 and rlx.zeros(()).shape
    with pytest.raises(rlx.errors.IndexRangeError, match="dim 2"):
        x.shape[2]


NO_ELEMENTS = {
    "bool": (lambda x, y: bool(x == y), "no truth value"), "in": (lambda x, y: x in [y], "`is`"),
    "index": (lambda x, y: [y].index(x), "`is`"), "None": (lambda x, y: x == None, "got NoneType"),  # noqa: E711
    "text": (lambda x, y: x != "x", "got str"), "node": (lambda x, y: x == y.node, "node.results"),
    "np.cbrt": (lambda x, y: np.cbrt(x), "functions of rlx"),
    "np.add.reduce": (lambda x, y: np.add.reduce(x), "no elements before"),
    "np.median": (lambda x, y: np.median(x), "functions of rlx"), "assignment": (lambda x, y: x.__setitem__(0, 1), "update_rows"),
    "mask": (lambda x, y: x[y > 0.0], "rlx.where"), "text index": (lambda x, y: x[["a"]], "integers"),
    "in place": (lambda x, y: np.add(ODD, x, out=ODD), "no elements before a run"),
    "asarray": (lambda x, y: np.asarray(x), "numpy array"), "array": (lambda x, y: np.array([x, y]), "numpy array"),
    "constant": (lambda x, y: constant([x, y]), "numpy array"),
    "float": (lambda x, y: float(x[0]), "no number"), "int": (lambda x, y: int(x[0]), "no number"),
    "a number in": (lambda x, y: 3.0 in x, "cannot be iterated"), "for": (lambda x, y: [*x], "rlx.scan"),
    "range": (lambda x, y: range(x), "a static argument of rlx.jit"), "item": (lambda x, y: x.item(), "no number"),
    "list index": (lambda x, y: [1, 2][x], "no number"), "tolist": (lambda x, y: x.tolist(), "no number"),
    "trunc": (lambda x, y: math.trunc(x), "no number"), "format": (lambda x, y: f"{x:.2f}", "no number"),
    "sizes": (lambda x, y: rlx.zeros((2, x)), "no number"), "slice": (lambda x, y: y[:x], "no number"),
}  # fmt: skip


@pytest.mark.parametrize("ask, message", NO_ELEMENTS.values(), ids=NO_ELEMENTS)
def test_elements_that_are_not_there_yet_are_a_graph_error(ask: Callable[..., Any], message: str) -> None:
    g = Graph("g")
    with pytest.raises(GraphError, match=message):
        ask(g.input("x", (4,), "f32"), g.input("y", (4,), "f32"))


def test_quotient_and_remainder_at_once() -> None:
    x = np.array([-7, 7, 3], np.int32)
    found = rlx.jit(lambda x: (*divmod(x, 2), *divmod(50, x)))(x)
    np.testing.assert_array_equal(found, [*np.divmod(x, 2), *np.divmod(50, x)])
    halves = np.array([-7.5, 7.5], np.float32)
    np.testing.assert_array_equal(rlx.jit(lambda x: divmod(x, 2.0))(halves), np.divmod(halves, np.float32(2)))


def test_where_a_value_is_zero() -> None:
    """Compiled: the comparison is an op of the graph."""
    g = rlx.Graph("g")
    x = g.input("x", (4,), rlx.f32)
    g.set_outputs([rlx.where(x == 0.0, 1.0, x), x != 2.0])
    given = np.array([0, 2, -0.0, 5], np.float32)
    whole, unlike = rlx.Session("ref").compile(g).run({"x": given})
    assert whole.tolist() == [1, 2, 1, 5] and unlike.tolist() == [True, False, True, True]


def with_everything() -> rlx.Graph:
    """Leaves of each kind, a state, a constant, attributes, a node of two results, and a chain too deep to walk by recursion."""
    g = rlx.Graph("g")
    x, w = g.input("x", (4,), "f32"), g.param("w", (4,), "f32")
    total = g.handle(rlx.BufferHandle("total", (4,), "f32"))
    y = x * w + rlx.constant([1, 2, 3, 4], "f32") + total
    for _ in range(3000):
        y = y + 0.5
    g.assign(total, y)
    best, where = rlx.top_k(y, k=2)
    g.set_outputs([where, rlx.clip(y, low=-1.0), best, x], ["where", "clipped", "best", "x"])
    return g


def run_with_everything(g: rlx.Graph) -> list[np.ndarray]:
    """The outputs that `with_everything` gave the graph."""
    compiled = rlx.Session("ref").compile(g, rlx.CompileOptions().bind_handle(rlx.BufferHandle("total", (4,), "f32")))
    compiled.set_param("w", np.full(4, 2, np.float32))
    return compiled.run({"x": np.ones(4, np.float32)})[:4]


@pytest.fixture(scope="module")
def ran_with_everything() -> list[np.ndarray]:
    return run_with_everything(with_everything())


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "pickle by the oldest protocol": lambda x: pickle.loads(pickle.dumps(x, 0)),
}  # fmt: skip


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_copy_of_a_graph_compiles_and_grows(copied: Callable[[Any], Any], ran_with_everything: list[np.ndarray]) -> None:
    g = with_everything()
    wanted = [g, g.inputs[0], g.outputs[2]]
    again, x, best = map(copy.copy, wanted) if copied is copy.copy else copied(wanted)
    assert again is not g and str(again) == str(g) and again.fingerprint() == g.fingerprint()
    again.verify()
    assert again.inputs[0] is x and again.outputs[2] is best and again.outputs[0].node is best.node
    if copied is not copy.copy:
        again.set_outputs([*again.outputs, rlx.exp(x)])
        assert len(g.outputs) == 4, "the copy shares its lists"
    for a, b in zip(run_with_everything(again), ran_with_everything, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_value_alone_is_pickled_with_what_it_needs() -> None:
    value = with_everything().outputs[2]
    again = pickle.loads(pickle.dumps(value))
    assert again is not value and again.shape == value.shape and again.node.op is value.node.op
    assert copy.deepcopy(value) is value, "it never changes"


def test_a_pickled_constant_cannot_be_written_to() -> None:
    data = pickle.loads(pickle.dumps(rlx.constant(np.arange(3), "bf16"))).node.attrs.data
    assert not data.flags.writeable and data.tolist() == [0, 1, 2]


def test_a_pickle_with_an_op_that_is_not_there_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    written = pickle.dumps(rlx.exp(rlx.constant(1.0)))
    monkeypatch.delitem(OPS, "exp")
    with pytest.raises(GraphError, match="the op 'exp'"):
        pickle.loads(written)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_compiled_graph_refuses_to_be_copied(copied: Callable[[Any], Any]) -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (4,), "f32") + 1.0])
    with pytest.raises(Unsupported, match=r"clone\(\) makes another"):
        copied(rlx.Session("ref").compile(g))


def test_a_mask_is_padded_with_true() -> None:
    mask = np.array([False, True])
    f = rlx.jit(lambda m: rlx.pad(m, low=(1,), high=(2,), value=True), device="ref")
    assert f(mask).tolist() == [True, False, True, True, True]
