"""rlx.jit: traced once for each signature, any nesting of arguments and results, machine code for plain calls."""

from __future__ import annotations

import gc
import weakref
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from devices import DEVICES

import rlx
from rlx.errors import BindingError, OptionError

A, B = np.arange(16, dtype=np.float32), np.full(16, 2, np.float32)
Point = namedtuple("Point", "x y")


@dataclass
class Layer:
    w: Any
    b: Any = None


@pytest.mark.parametrize("device", DEVICES)
def test_a_function_of_arrays(device: str) -> None:
    f = rlx.jit(lambda x, y: x * y + 1.0, device=device)
    for _ in range(3):
        np.testing.assert_array_equal(f(A, B), A * B + 1)
    assert f.reasons == ["first call"]


def test_results_are_fresh_and_arguments_are_read_at_each_call() -> None:
    f = rlx.jit(lambda x, y: x + y)
    x = A.copy()
    first, second = f(x, B), f(x, B)
    x[0] = 100
    third = f(x, B)
    assert first is not second and first[0] == second[0] == 2 and third[0] == 102
    assert f(y=B, x=x)[0] == 102 and f(x[::-1], B)[0] == 17


def test_trees_of_arguments_and_results() -> None:
    def f(layers: list[Layer], p: Point, **more: Any) -> Any:
        for layer in layers:
            p = p._replace(x=p.x @ layer.w if layer.b is None else p.x @ layer.w + layer.b)
        return {"p": p, "more": [more["k"] * 2.0, None, 3.0], "none": None}

    layers = [Layer(np.eye(16, dtype="f4") * 3), Layer(np.eye(16, dtype="f4"), B)]
    made = rlx.jit(f)(layers, Point(A[None], B), k=A)
    assert type(made["p"]) is Point and made["none"] is None and made["more"][1] is None and made["more"][2] == 3
    np.testing.assert_array_equal(made["p"].x[0], A * 3 + 2)
    np.testing.assert_array_equal(made["more"][0], A * 2)


def test_it_is_traced_again_for_another_signature_only_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    traced = []

    @rlx.jit(static="mode")
    def f(x: Any, scale: float = 2.0, mode: str = "a") -> Any:
        traced.append(mode)
        return x * scale if mode == "a" else x

    with rlx.knobs.override(RLX_DEBUG=1):
        for x in (A, A, A[:4], A[:4], A):
            f(x)
            f(x, 3.0)
        f(A, mode="b")
        f(A.astype(np.float64), np.float64(1))
    assert f(A, 3.0)[1] == 3
    assert traced == ["a", "a", "b", "a"]
    assert f.reasons[:3] == ["first call", "x is f32[4], was f32[16]", "mode is 'b', was 'a'"]
    assert "scale is f64[], was f32[]" in f.reasons[3]
    assert "rlx.jit: f compiled, x is f32[4], was f32[16]" in capsys.readouterr().err


def test_one_function_inside_another_is_one_graph() -> None:
    inner = rlx.jit(lambda x: x + 1.0)
    outer = rlx.jit(lambda x: inner(x) * inner(x + x))
    np.testing.assert_array_equal(outer(A), (A + 1) * (2 * A + 1))
    assert inner.reasons == []


def test_donated_arrays_hold_the_results() -> None:
    @rlx.jit(donate="state")
    def step(state: dict[str, Any], x: Any) -> Any:
        return {"w": state["w"] + x, "n": state["n"] + 1}, state["w"] * x

    state = {"w": np.zeros(16, np.float32), "n": np.zeros((), np.int64)}
    own = state["w"]
    for _ in range(3):
        state, product = step(state, B)
    assert state["w"] is own and own[0] == 6 and state["n"] == 3 and product[0] == 8


def test_an_array_donated_twice_holds_one_result() -> None:
    both, x = rlx.jit(lambda a, b: (a + 1.0, b * 5.0), donate=("a", "b")), np.ones(4, np.float32)
    for a, b in ((x.copy(), x.copy()), (y := x.copy(), y), (z := np.ones(6, np.float32)[:4], z.base[2:])):
        one, five = both(a, b)
        assert one is a and one.tolist() == [2] * 4 and five.tolist() == [5] * 4
    x.flags.writeable = False
    assert both(x, x)[0].tolist() == [2] * 4 and x.tolist() == [1] * 4


def test_arrays_of_other_libraries() -> None:
    torch = pytest.importorskip("torch")
    f = rlx.jit(lambda x, y: x + y)
    weight = torch.nn.Parameter(torch.from_numpy(A))
    np.testing.assert_array_equal(f(weight, torch.from_numpy(B)), A + B)
    narrow = f(weight.detach().bfloat16(), torch.from_numpy(B).bfloat16())  # numpy has no such dtype of its own
    np.testing.assert_allclose(narrow.astype(np.float32), A + B, rtol=2e-2)
    with pytest.raises(BindingError, match="the Tensor does not share its memory"):
        f(torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]))
    np.testing.assert_array_equal(f(1.0, np.float32(2)), 3)


def test_the_compiled_graph_of_a_call() -> None:
    f = rlx.jit(lambda x, w: (x @ w["a"], x), threads=1)
    compiled = f.compiled(A[None], {"a": np.eye(16, dtype="f4")})
    assert [(d.name, d.shape, d.dtype) for d in compiled.inputs] == [("x", (1, 16), rlx.f32), ("w.a", (16, 16), rlx.f32)]
    assert [d.shape for d in compiled.outputs] == [(1, 16), (1, 16)] and compiled.options.threads == 1


def test_named_dims_are_compiled_for_each_size_and_traced_once() -> None:
    traced = []

    @rlx.jit(dims={"x": {0: "batch"}, "y": {0: "batch"}})
    def f(x: Any, y: Any) -> Any:
        traced.append(x.dims)
        return (x * y).sum(axis=1)

    for n in (2, 3, 2, 5):
        rows = np.arange(n * 4, dtype=np.float32).reshape(n, 4)
        np.testing.assert_array_equal(f(rows, rows), (rows * rows).sum(axis=1))
    assert [str(d) for d in traced[0]] == ["batch", "4"] and len(traced) == 1
    assert f.reasons == ["first call", "batch is 3, was 2", "batch is 5, was 2"]
    with pytest.raises(BindingError, match="batch.* is 2 .* 3"):
        f(np.ones((2, 4), np.float32), np.ones((3, 4), np.float32))


def test_a_function_or_a_graph_is_compiled_at_once() -> None:
    made = rlx.compile(lambda x, n: x * n.astype("f32"), rlx.Shape((2, 3), "f32"), 3, threads=1)
    assert [d.shape for d in made.inputs] == [(2, 3), ()] and made.options.threads == 1
    np.testing.assert_array_equal(made(np.ones((2, 3), np.float32), 4), np.full((2, 3), 4, np.float32))
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (2,), rlx.f32) * 2.0])
    assert rlx.compile(g, device=rlx.Session("cpu"), checked=True)([1, 2]).tolist() == [2, 4]
    for wrong in (lambda: rlx.compile(3), lambda: rlx.compile(g, A), lambda: rlx.jit(made)(rlx.Shape((2,), "f32"))):
        with pytest.raises((OptionError, BindingError)):
            wrong()


def test_threads_call_one_function() -> None:
    f = rlx.jit(lambda x, y: x + y)
    f(A, B)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: f(A + np.float32(i), B)[0], range(400)))
    assert results == [i + 2.0 for i in range(400)]


def test_a_function_that_nobody_holds_frees_its_memory() -> None:
    f = rlx.jit(lambda x, y: x + y)
    f(A, B), f(A, B)
    compiled = weakref.ref(f.compiled(A, B))
    del f
    gc.collect()
    assert compiled() is None


WRONG = {
    "text": (lambda f: f("a", A), BindingError, "make it static"), "too few": (lambda f: f(A), BindingError, "'y'"),
    "dims": (lambda f: f(A, B[:3]), rlx.errors.ShapeError, "cannot broadcast"),
    "dtypes": (lambda f: f(A, 2), rlx.errors.DTypeError, "cast"),
    "no such parameter": (lambda f: rlx.jit(f.function, static="z"), OptionError, "'x', 'y'"),
    "no such option": (lambda f: rlx.jit(f.function, treads=2), OptionError, "treads"),
    "no function": (lambda f: rlx.jit(3), OptionError, "int"),
    "unhashable": (lambda f: rlx.jit(f.function, static="y")(A, [1]), BindingError, "hashable"),
    "nothing": (lambda f: rlx.jit(lambda x: {"none": None})(A), BindingError, "returns no value"),
    "no value": (lambda f: rlx.jit(lambda x: "text")(A), BindingError, "returns a str"),
}  # fmt: skip


@pytest.mark.parametrize("ask, error, message", WRONG.values(), ids=WRONG)
def test_wrong_calls_say_so_and_change_nothing(ask: Any, error: type[Exception], message: str) -> None:
    f = rlx.jit(lambda x, y: x + y)
    f(A, B)
    with pytest.raises(error, match=message):
        ask(f)
    assert f(A, B)[0] == 2 and f.reasons == ["first call"]
