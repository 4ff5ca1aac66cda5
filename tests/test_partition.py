"""The partitioned graph, run by all ranks together on their shares, against the whole graph run by one: every op of the table
with every axis of every operand split, and random graphs with random marks. Both sides are the reference evaluator, in f64
where the ops allow it, so that only the order of sums differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import Case, assert_same, cases
from test_random_graphs import compare, graphs

from rlx.compile.partition import partition
from rlx.errors import CompileError
from rlx.ir.evaluate import evaluate, evaluate_ranks
from rlx.ir.graph import Graph
from rlx.ir.placement import Split

GROUPS = ("inputs", "params", "handles")


def run_ranks(g: Graph, marks: dict[str, Any], ranks: int, *given: dict[str, np.ndarray]) -> tuple[list[np.ndarray], dict, Any]:
    """Outputs and next states of the whole, put together from those of the ranks, all of which must agree."""
    p = partition(g, marks, ranks)
    p.graph.verify()
    with np.errstate(all="ignore"):
        found = evaluate_ranks(p.graph, *([p.shards(arrays, r) for r in range(ranks)] for arrays in given))
    for outputs, _ in found[1:]:
        for a, b in zip(outputs, found[0][0], strict=True):
            np.testing.assert_array_equal(a, b)
    states = {}
    for name in found[0][1]:
        (whole,) = (h.shape for h in g.handles if h.name == name)
        states[name] = np.full(whole.static, 77).astype(whole.dtype.numpy)
        for r, (_, own) in enumerate(found):
            if (split := p.splits.get(name)) is None:
                states[name] = own[name]
            else:
                at = 0
                for low, high in split.ranges(ranks, r):
                    lead = (slice(None),) * split.axis
                    states[name][(*lead, slice(low, high))] = own[name][(*lead, slice(at, at + high - low))]
                    at += high - low
    return found[0][0], states, p


# -- every op of the table


def factor(n: int) -> int:
    """The least prime factor."""
    return next(f for f in range(2, n + 1) if n % f == 0)


def one_each() -> list[Case]:
    """A case of each sample of each op: in f64 where it is taken."""
    best: dict[Any, Case] = {}
    for case in cases(awkward=False):
        key = case.op.name, case.index
        if key not in best or case.dtype.name == "f64":
            best[key] = case
    return [c for c in best.values() if c.op.collective is None]


def marks_of(case: Case) -> Iterator[tuple[dict[str, int], int]]:
    """Each axis alone, and together with one of its size in every other operand."""
    shapes = case.sample.shapes
    for i, dims in enumerate(shapes):
        for axis, d in enumerate(dims):
            if d < 2:
                continue
            yield {f"x{i}": axis}, factor(d)
            back = axis - len(dims)
            yield {f"x{j}": back + len(s) for j, s in enumerate(shapes) if len(s) >= -back and s[back] == d}, factor(d)
            yield {f"x{j}": s.index(d) for j, s in enumerate(shapes) if d in s}, factor(d)


@pytest.mark.parametrize("op", sorted({c.op.name for c in one_each()}))
def test_every_op_with_every_axis_split(op: str) -> None:
    seen = set()
    for case in one_each():
        if case.op.name != op:
            continue
        for marks, ranks in marks_of(case):
            key = (case.index, tuple(sorted(marks.items())), ranks)
            if key not in seen:
                seen.add(key)
                found, _, p = run_ranks(case.graph(), marks, ranks, case.inputs)
                for array, want in zip(found, case.expected, strict=True):
                    assert_same(array, want, max(10 * case.tolerance, 1e-11), f"{case!r} {marks} {ranks}\n{p.graph}")


# -- random graphs


@st.composite
def marked(draw) -> tuple[Graph, dict[str, Any], int]:
    """A random graph, and for some of its leaves an axis that the ranks can share: as one, or in parts of a few sizes."""
    g = draw(graphs())
    ranks = draw(st.sampled_from(sorted({factor(d) for leaf in g.leaves() for d in leaf.shape.static if d > 1} or {2})))
    marks: dict[str, Any] = {}
    for leaf in g.leaves():
        axes = [a for a, d in enumerate(leaf.shape.static) if d % ranks == 0]
        if axes and (not marks or draw(st.booleans())):
            axis = draw(st.sampled_from(axes))
            units = leaf.shape.static[axis] // ranks
            cut = draw(st.integers(0, units))
            parts = tuple(ranks * n for n in (cut, units - cut) if n)
            marks[str(leaf.name)] = Split(axis, parts) if draw(st.booleans()) else axis
    return g, marks, ranks


@given(marked(), st.integers(0, 2**31))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_random_graphs_and_marks(case: tuple[Graph, dict[str, Any], int], seed: int) -> None:
    g, marks, ranks = case
    rng = np.random.default_rng(seed)
    draw = lambda v: rng.uniform(-2.5, 2.5, v.shape.static).astype(v.dtype.numpy)  # noqa: E731
    given_ = [{str(v.name): draw(v) for v in leaves} for leaves in (g.inputs, g.params, g.handles)]
    text = str(g)
    with np.errstate(all="ignore"):
        want, following = evaluate(g, *given_)
    try:
        found, states, p = run_ranks(g, marks, ranks, *given_)
    except CompileError as e:
        assert "gathered" in str(e), e
        return
    assert str(g) == text
    for array, expected in zip([*found, *states.values()], [*want, *following.values()], strict=True):
        compare(array, expected, f"{marks} {ranks}\n{g}\n{p.graph}")
