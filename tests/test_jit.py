"""rlx.jit: traced once for each signature, any nesting of arguments and results, machine code for plain calls."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections import defaultdict, namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
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


def test_containers_without_an_end_are_refused() -> None:
    def same(x: Any) -> Any:
        return x

    around: list[Any] = []
    around.append({"again": around})
    deep: Any = A
    for _ in range(1000):
        deep = (deep,)
    for given in (around, deep):
        with pytest.raises(OptionError, match="containers of arrays have at most 100 levels; this .* contains itself, or more"):
            rlx.jit(same)(given)
    with pytest.raises(OptionError, match="at most 100 levels"):
        rlx.jit(lambda x: around)(A)


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


def test_named_dims_may_count_from_the_end() -> None:
    f = rlx.jit(lambda x: x.sum(axis=0), dims={"x": {-2: "rows"}})
    assert [f(np.ones((n, 2), np.float32))[0] for n in (2, 3)] == [2, 3]


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
    with pytest.raises(BindingError, match="arguments disagree on dim 'batch': 2 in 'x', 3 in 'y'"):
        f(np.ones((2, 4), np.float32), np.ones((3, 4), np.float32))


def test_numbers_adopt_the_dtype_of_arrays() -> None:
    f = rlx.jit(lambda x, n: x * (n + 1) - n)
    for dtype in ("f32", "f16", "f64", "bf16", "i32", "u8"):
        x = np.array([3, 4], rlx.as_dtype(dtype).numpy)
        assert f(x, 2).dtype == x.dtype and f(x, 2).tolist() == [7, 10]
    assert f(np.float16([3]), 0.5).tolist() == [4] and f(np.float32([3]), 2).tolist() == [7]
    assert rlx.jit(lambda n, r: (n * 2.5, n / 2, r**n, n + n, -n))(3, 0.5) == (7.5, 1, 0.125, 6, -3)
    assert rlx.jit(lambda x, n: x[n] + n)(np.float32([1, 2]), 1) == 3
    with pytest.raises(rlx.errors.DTypeError, match=r"cast .*; 'x' is i32\[2\]; 'n' is f32\[\]"):
        rlx.jit(lambda x, n: x * n)(np.array([1, 2], np.int32), 0.5)
    g = rlx.jit(lambda x, n: x * n)
    assert g(np.float32([1]), 2) == 2
    with pytest.raises(rlx.errors.DTypeError, match=r"'n' is i64\[\]"):  # a number of numpy has a dtype
        g(np.float32([1]), np.int64(2))
    h = rlx.jit(lambda n: n + 1)
    assert h(2) == h(np.int64(2)) == 3 and h(2.0) == 3
    assert h.reasons[1:] == ["n is i64[], was i64[], a number", "n is f32[], a number, was i64[], a number"]
    with pytest.raises(rlx.errors.DTypeError, match="cast"):  # and so has what a function asks for
        rlx.jit(lambda x, n: x * n.astype("i64"))(np.float32([1]), 2)


def test_a_function_or_a_graph_is_compiled_at_once() -> None:
    made = rlx.compile(lambda x, n: x * n.astype("f32"), rlx.Shape((2, 3), "f32"), 3, threads=1)
    assert [d.shape for d in made.inputs] == [(2, 3), ()] and made.options.threads == 1
    np.testing.assert_array_equal(made(np.ones((2, 3), np.float32), 4), np.full((2, 3), 4, np.float32))
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (2,), rlx.f32) * 2.0])
    assert rlx.compile(g, device=rlx.Session("cpu"), checked=True)([1, 2]).tolist() == [2, 4]
    nothing = lambda: rlx.compile(None)  # type: ignore[call-overload]  # noqa: E731
    for wrong in (nothing, lambda: rlx.compile(3), lambda: rlx.compile(g, A), lambda: rlx.jit(made)(rlx.Shape((2,), "f32"))):
        with pytest.raises((OptionError, BindingError)):
            wrong()
    with pytest.raises(BindingError, match=r"compile of <lambda>\(x\): missing .* 'x'; give arrays .*; or rlx.jit"):
        rlx.compile(lambda x: x)
    for method in (rlx.Session("cpu").compile, rlx.Session("cpu").plan):
        with pytest.raises(OptionError, match=r"takes a Graph, got function; of a function: rlx.jit\(f\), or rlx.compile"):
            method(lambda x: x)  # type: ignore[arg-type]


def test_threads_call_one_function() -> None:
    f = rlx.jit(lambda x, y: x + y)
    f(A, B)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda i: f(A + np.float32(i), B)[0], range(400)))
    assert results == [i + 2.0 for i in range(400)]


def test_static_values_that_python_takes_as_equal_are_told_apart() -> None:
    f = rlx.jit(lambda x, by: x * by if by is True else x / by, static="by")
    given = True, 1, 1.0, 0.0, -0.0
    assert [f(A + 1, by)[1] for by in given] == [2, 2, 2, np.inf, -np.inf]
    assert f.reasons == ["first call", "by is 1, was True", "by is 1.0, was True", "by is 0.0, was True", "by is -0.0, was True"]


def test_static_values_inside_of_others_are_told_apart() -> None:
    whole = lambda by: isinstance(next(iter(by)) if isinstance(by, frozenset) else by.scale, int)  # noqa: E731
    f = rlx.jit(lambda x, by: x + float(whole(by)), static="by")
    given = frozenset({2}), frozenset({2.0}), Scaling(2), Scaling(2.0), Scaling(2, "other")
    assert [f(A * 0, by)[1] for by in given] == [1, 0, 1, 0, 1]
    assert len(f.reasons) == 4, "what is not compared makes no difference"


@dataclass(frozen=True)
class Scaling:
    scale: float
    label: str = field(default="one", compare=False)


@rlx.jit
def scaled(x: Any, how: str = "twice", by: float = 3.0) -> Any:
    return x * 2.0 if how == "twice" else x * by


def test_a_default_that_is_no_array_is_static() -> None:
    np.testing.assert_array_equal(scaled(A), A * 2)
    np.testing.assert_array_equal(scaled(A, by=4.0), A * 2)
    with pytest.raises(BindingError, match="make it static"):
        scaled(A, "thrice")


def test_a_default_that_has_no_hash_is_static() -> None:
    def f(x: Any, names: Any = ["a", "b"], times: Any = 1) -> Any:  # noqa: B006
        return x * float(len(names) * times)

    made = rlx.jit(f, static="times")
    assert made(A)[1] == 2 and made(A)[1] == 2 and made.reasons == ["first call"]
    assert made(A, [], 2)[1] == 0 and made.reasons[1] == "times is 2, was 1; arguments of another structure: names"


def test_functions_are_copied_and_pickled_by_name() -> None:
    """So that processes and copies of objects that hold them use them."""
    scaled(A)
    assert pickle.loads(pickle.dumps(scaled)) is scaled
    assert copy.deepcopy([scaled]) == [scaled]


def test_an_array_whose_elements_share_memory_is_not_donated() -> None:
    f = rlx.jit(lambda x: x + np.arange(3, dtype=np.float32), donate="x")
    once = np.ones(1, np.float32)
    assert f(np.lib.stride_tricks.as_strided(once, (3,), (0,))).tolist() == [1, 2, 3]
    assert once[0] == 1


def test_dicts_whose_keys_have_no_order_and_dicts_that_are_not_made_of_pairs() -> None:
    kinds = Enum("kinds", "a b")
    made = rlx.jit(lambda d: d[kinds.a] - d[kinds.b])({kinds.b: A, kinds.a: A + 1})
    assert made[0] == 1
    assert rlx.jit(lambda d: d["a"] + 1.0)(defaultdict(list, a=A))[1] == 2


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
    "dtypes": (lambda f: f(A, np.int64(2)), rlx.errors.DTypeError, r"cast one of them: .*; 'x' is f32\[16\]; 'y' is i64\[\]"),
    "no such parameter": (lambda f: rlx.jit(f.function, static="z"), OptionError, "'x', 'y'"),
    "no such option": (lambda f: rlx.jit(f.function, treads=2), OptionError, "treads"),
    "no function": (lambda f: rlx.jit(3), OptionError, "int"),
    "unhashable": (lambda f: rlx.jit(f.function, static="y")(A, [1]), BindingError, "hashable"),
    "large": (lambda f: f(A, 2**70), BindingError, "is no i64"),
    "dims are no mapping": (lambda f: rlx.jit(f.function, dims={"x": ["n"]}), OptionError, "axis: name"),
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
