"""Values computed inside the results of pads and concats: nothing is copied there, and results stay the same bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.target import target_for
from rlx.backends.cuda.backend import target as cuda_target
from rlx.compiler import lower
from rlx.compiler.canonicalise import MOST_JOINED
from rlx.ir.graph import Graph, Value, constant
from rlx.ir.kernel import loaded_buffers
from rlx.ir.ops import avg_pool, concat, conv_transpose, max_pool, pad
from rlx.runtime.verifying import verify

DIMS = (2, 6, 8, 5)


def conv(x: Value, out: int = 7, window: int = 3, low: int = 1) -> Value:
    """relu(conv(x) + b)."""
    rng = np.random.default_rng(out + window)
    w, b = rng.standard_normal((window, window, x.shape.static[-1], out), np.float32), rng.standard_normal(out, np.float32)
    return rlx.relu(rlx.conv(x, constant(w), constant(b), low=low, high=low, channels_last=True))


def beside(x: Value) -> list[Value]:
    """The two ends of a U-Net: x is read by a pool and by a concat, whose other part is computed from the pool."""
    first = conv(x, 16)
    small = conv(max_pool(first, window=2, strides=2, channels_last=True), 32)
    w = np.random.default_rng(1).standard_normal((2, 2, 32, 16), np.float32)
    return [conv(concat(first, conv_transpose(small, constant(w), strides=2, channels_last=True), axis=3))]


def dense(x: Value) -> list[Value]:
    """A part of the concat is computed from the other part."""
    first = conv(x)
    return [conv(concat(first, conv(first), axis=3))]


def twice(x: Value) -> list[Value]:
    first = conv(x)
    return [conv(concat(first, first, axis=3))]


def returned(x: Value) -> list[Value]:
    """A value inside, and the result around it, that are outputs."""
    first = conv(x)
    around = pad(conv(x, 4), low=(0, 2, 0, 1), high=(1, 0, 3, 0), value=3.5)
    return [first, conv(first), around]


def product(x: Value) -> list[Value]:
    """A reader that shares rows among tiles."""
    first = conv(x)
    return [conv(first), conv(first, 5, window=1, low=0)]


def pooled(x: Value) -> list[Value]:
    how = {"window": 3, "strides": 2, "low": 1, "high": 1, "channels_last": True}
    return [max_pool(conv(x), **how), avg_pool(conv(x, 9), **how)]


def made(build: Callable[[Value], list[Value]], device: str, **options: Any):
    g = Graph(build.__name__)
    g.set_outputs(build(g.input("x", DIMS, "f32")))
    compiled = rlx.Session(device).compile(g, rlx.CompileOptions(**options))
    return compiled, compiled.run({"x": np.random.default_rng(2).standard_normal(DIMS, np.float32)})


def copies(compiled) -> int:
    """Steps that pad or concatenate what they read, without the one that pads the input."""
    return sum(bool(loaded_buffers(s.kernel)) and s.kernel.origin[-1] in ("pad", "concat") for s in compiled.program().steps) - 1


CASES = {beside: (0, 2), dense: (1, 2), twice: (1, 1), returned: (1, 2), product: (1, 1), pooled: (0, 2)}


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_parts_are_computed_in_place_with_the_same_bits(build) -> None:
    (placed, found), (apart, expected) = made(build, "ref:1"), made(build, "ref:1", disable=("within",))
    assert (copies(placed), copies(apart)) == CASES[build]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, expected, strict=True))
    for threads in (1, 2):
        (placed, found), (_, bits) = made(build, "cpu", threads=threads), made(build, "cpu", threads=threads, disable=("within",))
        assert not any("reshape" in s.kernel.origin for s in placed.program().steps), "phases are stored by the product"
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, bits, strict=True))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_a_pad_around_a_value_that_is_not_copied_writes_only_its_border() -> None:
    placed, _ = made(pooled, "ref:1")
    (fill, *_) = [s.kernel for s in placed.program().steps if s.kernel.origin == ("pad",) and not loaded_buffers(s.kernel)]
    stored = sum(int(np.prod([n for _, n in fill.grid])) * loop_size(s) for s in fill.body)
    assert stored == 2 * (8 * 10 - 6 * 8) * 7 and all(s.kernel.name != "reshape" for s in placed.program().steps)


def loop_size(loop) -> int:
    return loop.extent * (sum(map(loop_size, loop.body)) if hasattr(loop.body[0], "extent") else 1)


def test_a_product_that_is_stored_in_parts_is_at_no_place_of_its_own() -> None:
    """Its rows and columns have no strides there: verify would read elements of others, or beyond the memory."""
    rng, g = np.random.default_rng(0), Graph("phases")
    given = {"x": rng.standard_normal((80, 8), np.float32), "y": rng.standard_normal((1, 4, 80, 8), np.float32)}
    product = g.input("x", (80, 8), "f32") @ constant(rng.standard_normal((8, 64), np.float32))
    phases = product.reshape((1, 2, 40, 2, 2, 16)).transpose(0, 1, 3, 2, 4, 5).reshape((1, 4, 80, 16))
    g.set_outputs([conv(concat(phases, conv(g.input("y", (1, 4, 80, 8), "f32"), 16), axis=3))])
    session = rlx.Session("cpu")
    compiled = session.compile(g)
    assert not any("reshape" in s.kernel.origin for s in compiled.program().steps), "the product is stored in parts"
    assert product not in compiled._origins_of().places
    assert verify(g, lambda name: np.empty(0), given, session=session).difference is None


MANY = 3 * MOST_JOINED + 1
READ: dict[str, Callable[[Value], Value]] = {"as it is": lambda y: y, "by a pointwise op": lambda y: y * 2.0 + 1.0}


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_many_operands_are_joined_by_kernels_of_few(read: Callable[[Value], Value], axis: int) -> None:
    """One kernel would ask for each of them where an element is. Those of a result that is not read on the way write to it."""
    g, dims = Graph("many"), [tuple(1 + i % 3 if a == axis else n for a, n in enumerate((3, 2, 5))) for i in range(MANY)]
    g.set_outputs([read(concat(*(g.input(f"x{i}", d, "f32") for i, d in enumerate(dims)), axis=axis))])
    arrays = [np.random.default_rng(i).standard_normal(d, np.float32) for i, d in enumerate(dims)]
    for target in (target_for("x86_64-linux-gnu", "x86-64-v3"), cuda_target("sm_90a")):
        kernels = [s.kernel for s in lower(g, target, rlx.CompileOptions()).steps]
        assert len(kernels) == 4 + (read is not READ["as it is"])
        assert max(len(loaded_buffers(k)) for k in kernels) <= MOST_JOINED
    wanted = np.concatenate(arrays, axis)
    for device in ("ref:1", "cpu"):
        (found,) = rlx.Session(device).compile(g).run({f"x{i}": a for i, a in enumerate(arrays)})
        np.testing.assert_array_equal(found, wanted if read is READ["as it is"] else wanted * np.float32(2) + np.float32(1))


def test_equal_parts_of_a_join_of_many_and_joins_of_joins() -> None:
    """The two halves are one value, which has one place; a concat of concats is no kernel of more operands than either."""
    g = Graph("equal")
    x, y = g.input("x", (2, 3), "f32"), g.input("y", (2, 3), "f32")
    rows = [concat(*[v for _ in range(MOST_JOINED // 2 + 1)], axis=1) for v in (x, y)]
    g.set_outputs([concat(*[x] * 2 * MOST_JOINED, axis=0), concat(*rows, axis=0)])
    a, b = np.random.default_rng(4).standard_normal((2, 2, 3), np.float32)
    for device in ("ref:1", "cpu"):
        many, both = rlx.Session(device).compile(g).run({"x": a, "y": b})
        np.testing.assert_array_equal(many, np.concatenate([a] * 2 * MOST_JOINED))
        width = MOST_JOINED // 2 + 1
        np.testing.assert_array_equal(both, np.concatenate([np.tile(a, width), np.tile(b, width)]))


def test_a_part_that_reads_nodes_of_its_group_through_a_view_takes_them_along() -> None:
    """The part and what it reads became two groups, and nothing computed the second."""
    g = Graph("viewed")
    x = g.input("x", (4, 8), "f32")
    first, updated = rlx.relu(x), rlx.update_rows(x, (x * 2)[:2], constant(1, "i32"))
    g.set_outputs([concat(first, updated), concat(first, x)])
    array = np.random.default_rng(3).standard_normal((4, 8), np.float32)
    compiled = rlx.Session("cpu").compile(g)
    assert compiled.program().steps[-1].kernel.origin == ("concat",), "the first concat is written by the kernels of its parts"
    positive, rows = np.maximum(array, 0), np.concatenate([array[:1], array[:2] * 2, array[3:]])
    for found, wanted in zip(compiled.run({"x": array}), ([positive, rows], [positive, array])):
        assert (found == np.concatenate(wanted)).all()


def test_an_error_of_many_operands_lists_those_that_differ() -> None:
    g = Graph("many")
    values = [g.input(f"x{i}", (2, 3), "f32") for i in range(100)]
    with pytest.raises(rlx.errors.ShapeError) as found:
        concat(*values, g.input("other", (2, 4), "f32"), axis=0)
    assert str(found.value) == (
        "concat(100 x f32[2,3], f32[2,4], AxisAttrs(axis=0)): f32[2,4] and f32[2,3] differ in more than dim 0; "
        "'x0' is f32[2,3]; 'other' is f32[2,4]"
    )
