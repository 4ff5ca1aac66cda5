"""Compile time grows in proportion to the graph: counted in calls of functions, which are the same on every machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

import rlx
from benchmarks.compile_time import chain, random_graph
from rlx.backends import get
from rlx.compiler import layout, lower


def calls(g: rlx.Graph) -> int:
    """Python functions called while the graph is compiled to a checked program."""
    count, target = 0, get("cpu").target(threads=2)

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        lower(g, target, rlx.CompileOptions(threads=2))
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize("build", [chain, random_graph], ids=lambda build: build.__name__)
def test_compile_time_is_linear_in_the_nodes(build: Callable[[int], rlx.Graph]) -> None:
    few, many = 300, 1500
    assert calls(build(many)) < 1.5 * many / few * calls(build(few))


def test_views_of_other_values_are_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reshape that another order of its producer makes free concerns the views of that producer alone."""
    seen, view = [0], layout.seen_through

    def counted(*args: Any) -> Any:
        seen[0] += 1
        return view(*args)

    def looked_at(layers: int) -> int:
        g = rlx.Graph("layers")
        x = g.input("x", (6, 8), "f32")
        for _ in range(layers):
            q = x.reshape(1, 6, 2, 4).transpose(0, 2, 1, 3)
            x = rlx.exp(q).transpose(0, 2, 1, 3).reshape(6, 8)
        g.set_outputs([x + 1.0])
        seen[0] = 0
        places = layout.Places(g)
        assert len(places.orders) == layers and not places.computed
        return seen[0]

    monkeypatch.setattr(layout, "seen_through", counted)
    assert looked_at(80) < 1.2 * 8 * looked_at(10)


def test_equal_kernels_of_layers_are_one_object() -> None:
    """So what looks at kernels after lowering looks once at what all layers compute."""

    def kernels(layers: int) -> int:
        g = rlx.Graph("layers")
        x = g.input("x", (6, 8), "f32")
        for n in range(layers):
            x = rlx.softmax(rlx.gelu(x @ g.param(f"w{n}", (8, 8), "f32")))
        g.set_outputs([x])
        program = lower(g, get("cpu").target(threads=2), rlx.CompileOptions(threads=2))
        assert len(program.steps) >= layers
        return len({step.kernel for steps in program.phases.values() for step in steps})

    assert kernels(9) == kernels(3)
