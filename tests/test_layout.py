"""Tiles: packing, unpacking, look-up and the kernels that pack, from one description, agree with a plain reading of it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import rlx
from rlx.ir import kernel as K
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph
from rlx.ir.kernel import k
from rlx.ir.layout import Layout, TiledLayout
from rlx.ir.ops.pack import pack, panels

CASES = [
    ((3, 17), panels(8)),
    ((5, 48), panels(48)),
    ((4, 17), panels(8, 2)),
    ((5, 9), panels(4, 4)),
    ((6,), ((0, 4), (0, 2), (0, 1))),
    ((2, 5, 7), ((0, 1), (2, 6), (1, 2), (2, 2), (1, 1), (2, 1))),
    ((1, 1), ((0, 1), (1, 1))),
]


def place(layout: TiledLayout, at: tuple[int, ...]) -> tuple[int, ...]:
    """Where the element lies, by the plainest reading of `parts`."""
    out, rest = [], list(at)
    for axis, step in layout.parts:
        out.append(rest[axis] // step)
        rest[axis] %= step
    return tuple(out)


@pytest.mark.parametrize(("shape", "parts"), CASES)
def test_packing_unpacking_and_look_up_agree(shape, parts) -> None:
    layout = TiledLayout(shape, parts)
    array = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
    memory = layout.pack(array)
    assert memory.shape == layout.dims and memory.size == layout.size and layout.fault() is None
    assert np.count_nonzero(memory) == array.size and (layout.unpack(memory) == array).all()
    for at in itertools.product(*map(range, shape)):
        assert memory[place(layout, at)] == array[at]
        assert tuple(e.value for e in layout.place([k.const(c) for c in at])) == place(layout, at)
    for at in itertools.product(*map(range, layout.dims)):
        coords, inside = layout.element([k.const(c) for c in at])
        here = tuple(e.value for e in coords)
        is_there = all(c < d for c, d in zip(here, shape))
        assert (memory[at] == array[here]) if is_there else memory[at] == 0
        assert (inside is None) == (math.prod(layout.dims) == math.prod(shape))


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        (((1, 8), (0, 1)), "steps of axis 1 are .8."),
        (((0, 1),), "steps of axis 1 are .."),
        (((0, 1), (1, 3), (1, 2), (1, 1)), "steps of axis 1 are .3, 2, 1."),
        (((0, 1), (1, 1), (2, 1)), "no axis 2"),
        (((0, 0), (1, 1)), "steps of axis 0 are .0."),
    ],
)
def test_parts_that_describe_no_memory_are_refused(parts, why: str) -> None:
    with pytest.raises(rlx.errors.AttributeValueError, match=why):
        pack(Graph().input("x", (3, 4), "f32"), layout=parts)


def test_a_view_that_permutes_axes_sees_tiles() -> None:
    layout = TiledLayout((5, 9), panels(4, 2))
    turned = layout.viewed(Layout((1, 9)), (9, 5))
    assert turned == TiledLayout((9, 5), ((0, 4), (1, 2), (0, 1), (1, 1)))
    array = np.arange(45).reshape(5, 9)
    assert (turned.pack(array.T) == layout.pack(array)).all()
    assert layout.viewed(Layout((9, 1)), (5, 9)) == layout
    assert layout.viewed(Layout((9, 1), 9), (4, 9)) is None  # a slice
    assert layout.viewed(Layout((1,)), (45,)) is None  # a reshape
    assert layout.viewed(Layout((9, 0)), (5, 9)) is None  # a broadcast
    ones = TiledLayout((1, 3, 1), ((1, 2), (0, 1), (2, 1), (1, 1)))
    seen = ones.viewed(Layout((1, 3, 3)), (3, 1, 1))
    assert seen is not None and seen.dims == ones.dims


@pytest.mark.parametrize("device", ["ref", "ref:1", "cpu"])
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_prepared_weights_lie_as_the_program_says(device: str, dtype: str) -> None:
    g = Graph("packed")
    w = g.param("w", (13, 70), dtype)
    g.set_outputs([g.input("x", (4, 13), dtype) @ w, rlx.gather(w, g.input("i", (3,), rlx.i32), axis=1)])
    compiled = rlx.Session(device).compile(g, rlx.CompileOptions(threads=1) if device == "cpu" else None)
    values = np.random.default_rng(0).integers(-9, 9, (13, 70)).astype(w.dtype.numpy)
    compiled.set_param("w", values)
    tiled = [b for b in compiled.program().buffers if b.layout is not None]
    assert [b.layout.shape for b in tiled if b.layout] == [(13, 70)] * len(tiled)
    for b in tiled:
        assert b.layout is not None and b.shape.static == b.layout.dims
        assert (compiled._executable.read(b.id).reshape(b.layout.dims) == b.layout.pack(values)).all()
    x, i = np.ones((4, 13), w.dtype.numpy), np.array([69, 0, 48], np.int32)
    _, columns = compiled.run({"x": x, "i": i})
    assert (columns == values[:, i]).all()
    assert compiled.program().kept == (frozenset() if tiled else {"w"})


def test_a_pack_of_the_user_is_the_value_itself() -> None:
    g = Graph("hint")
    x = g.input("x", (3, 17), rlx.f32)
    g.set_outputs([pack(x, layout=panels(8)) + 1.0])
    assert str(Graph.parse(str(g))) == str(g)
    given = {"x": np.arange(51, dtype=np.float32).reshape(3, 17)}
    compiled = rlx.Session("ref").compile(g)
    assert (compiled.run(given)[0] == given["x"] + 1).all() and (evaluate(g, given)[0][0] == given["x"] + 1).all()
    assert all(b.layout is None for b in compiled.program().buffers)


def test_a_missing_column_is_guarded_only_where_there_is_one() -> None:
    def guards(columns: int) -> int:
        g = Graph()
        g.set_outputs([g.input("x", (2, 3), rlx.f32) @ g.param("w", (3, columns), rlx.f32)])
        (step,) = rlx.Session("cpu").compile(g).program().prepare
        return sum(isinstance(e, K.Load) and e.guard is not None for e in K.walk(step.kernel.body))

    assert guards(96) == 0 and guards(97) == 1
