"""The partitioned graph, run by all ranks together on their shares, against the whole graph run by one: every op of the table
with every axis of every operand split, and random graphs with random marks. Both sides are the reference evaluator, in f64
where the ops allow it, so that only the order of sums differs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import Case, assert_same, cases
from test_random_graphs import compare, graphs

import rlx
from rlx.compiler.partition import partition
from rlx.errors import CompileError, IndexRangeError, OptionError, UnboundDimError
from rlx.ir.evaluate import evaluate, evaluate_ranks
from rlx.ir.graph import Graph
from rlx.ir.placement import Partial, Split
from rlx.ir.verify import where

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
@settings(max_examples=150, derandomize=True)
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


# -- what is put in, and what is refused


def mlp(width: int = 8) -> Graph:
    g = Graph("mlp")
    x, w1, b1 = g.input("x", (4, 6), "f64"), g.param("w1", (6, width), "f64"), g.param("b1", (width,), "f64")
    w2, b2 = g.param("w2", (width, 6), "f64"), g.param("b2", (6,), "f64")
    g.set_outputs([rlx.rms_norm(x + rlx.gelu(x @ w1 + b1) @ w2 + b2)])
    return g


def test_one_all_reduce_for_two_matrices_and_the_bias_with_the_first() -> None:
    p = rlx.partition(mlp(), {"w1": 1, "w2": 0}, 2)
    assert [m.op for m in p.report.moves] == ["all_reduce"] and p.report.nbytes == 4 * 6 * 8
    assert p.report.inferred == {"b1": Split(0, (8,))} and set(p.splits) == {"w1", "w2", "b1"}
    assert {v.name: v.dims for v in p.graph.leaves()} == {"x": (4, 6), "w1": (6, 4), "b1": (4,), "w2": (4, 6), "b2": (6,)}
    text = str(p.report)
    assert "each sends 192 bytes per run" in text and "split(0), inferred from their readers: 'b1'" in text
    assert re.search(r"all_reduce of matmul f64\[4,6\] for add\(f64.4,6., f64.4,6.\) made at .*test_partition.py:\d+: 192", text)
    held = dict(p.report.placements)
    assert any(k.startswith("matmul") and v == (Partial("sum"),) for k, v in held.items())
    whole = np.arange(48.0).reshape(6, 8)
    np.testing.assert_array_equal(p.shard("w1", whole, 1), whole[:, 4:])
    assert p.shard("x", whole, 1) is whole


def test_a_split_batch_needs_nothing_but_its_outputs() -> None:
    p = rlx.partition(mlp(), {"x": 0}, 2)
    assert [(m.op, m.reader) for m in p.report.moves] == [("all_gather", "the output 'output0'")]
    assert not rlx.partition(mlp(), {"x": 0, "output0": 0}, 2).report.moves
    g = mlp()
    assert [n.op.name for n in p.graph.nodes()][:-1] == [n.op.name for n in g.nodes()]


def attend(heads: int, shared: int) -> Graph:
    """Attention over a cache, and what comes before and after it in a decoder."""
    g = Graph("attend")
    x, at = g.input("x", (3, 24), "f64"), g.input("at", (), "i32")
    w, o = g.param("w", (24, (heads + 2 * shared) * 6), "f64"), g.param("o", (heads * 6, 24), "f64")
    cache = [g.handle(rlx.BufferHandle(s, (1, shared, 16, 6), "f64")) for s in "kv"]
    parts = rlx.split(x @ w, parts=(heads * 6, shared * 6, shared * 6), axis=1)
    q, k, v = (t.reshape(1, 3, -1, 6).transpose(0, 2, 1, 3) for t in parts)
    q, k = (rlx.rope(t, at + rlx.iota((3,), dtype=rlx.as_dtype("i32"))) for t in (q, k))
    states = [rlx.update_rows(s, t, at, axis=2) for s, t in zip(cache, (k, v))]
    for s, t in zip(cache, states):
        g.assign(s, t, in_place=True)
    out = rlx.attention(q, *states, at, mask="causal", positioned=True)
    g.set_outputs([rlx.rms_norm(x + out.transpose(0, 2, 1, 3).reshape(3, heads * 6) @ o)])
    return g


@pytest.mark.parametrize(("heads", "shared", "ranks"), [(4, 4, 2), (4, 2, 2), (6, 3, 3), (8, 4, 4)])
def test_heads_are_split_and_attention_stays_one_node(heads: int, shared: int, ranks: int) -> None:
    g = attend(heads, shared)
    parts = Split(1, (heads * 6, shared * 6, shared * 6))
    rng = np.random.default_rng(0)
    given = [{str(v.name): rng.normal(size=v.shape.static) for v in group} for group in (g.inputs, g.params, g.handles)]
    given[0]["at"] = np.array(5, np.int32)
    want, following = evaluate(g, *given)
    found, states, p = run_ranks(g, {"w": parts, "o": 0, "k": 1, "v": 1}, ranks, *given)
    assert [m.op for m in p.report.moves] == ["all_reduce"] and p.graph.in_place == {"k", "v"}
    assert {"attention", "rope", "rms_norm"} <= {n.op.name for n in p.graph.nodes()}
    np.testing.assert_allclose(found[0], want[0], atol=1e-12)
    for name in "kv":
        np.testing.assert_allclose(states[name], following[name], atol=1e-12)


def test_refusals_name_the_node_and_the_reason() -> None:
    for marks, error, words in (
        ({"w1": 0, "z": 1}, OptionError, "no leaf or output 'z' to split; it has 'b1', 'b2', 'output0', 'w1', 'w2', 'x'"),
        ({"w1": 2}, OptionError, r"'w1' is f64\[6,9\]; it has no axis 2"),
        ({"w1": True}, OptionError, "an int, or a Split"),
        ({"w1": Split(0, (2, 2))}, OptionError, "do not add up to dim 0"),
        ({"nowhere": None}, OptionError, "no node called 'nowhere'"),
        ({"w1": 1}, CompileError, r"'w1' = param\(\).*is f64\[6,9\]; dim 1 is 9, which 2 ranks cannot share equally: 1 would"),
        ({"w1": Split(0, (3, 3))}, CompileError, "a part of dim 0 is 3, which 2 ranks"),
    ):
        with pytest.raises(error, match=words):
            partition(mlp(9), marks, 2)
    with pytest.raises(OptionError, match="ranks"):
        partition(mlp(), {}, 0)
    g = Graph("g")
    w = g.param("w", (4, 6), "f64")
    g.set_outputs([rlx.cumsum(w, axis=0) + g.input("x", (4, 6), "f64")])
    why = r"cumsum\(f64\[4,6\]\) made at .*: each element needs those before it, and 'w'.*split\(0\)"
    with pytest.raises(CompileError, match=why):
        partition(g, {"w": 0}, 2)
    g.set_outputs([w])
    with pytest.raises(CompileError, match="the output .*'w' .* is placed as split"):
        partition(g, {"w": 0}, 2)
    g = Graph("g")
    g.set_outputs([-g.input("x", ("n", 2), "f64")])
    with pytest.raises(UnboundDimError, match="named dims"):
        partition(g, {"x": 1}, 2)
    g = Graph("g")
    g.set_outputs([rlx.all_reduce(g.input("x", (2,), "f64"), ranks=2)])
    with pytest.raises(CompileError, match="a collective already"):
        partition(g, {}, 2)
    g = Graph("g")
    g.set_outputs([g.input("x", (6, 4), "f64").reshape(3, 8)])
    why = "2 ranks cannot share the dim of 3 in its result equally (1 left over)"
    assert partition(g, {"x": 0}, 2).report.gathered == (f"gathered for {where(g.outputs[0].node)}: {why}",)


def test_an_index_out_of_range_is_found_though_the_table_is_split() -> None:
    g = Graph("g")
    g.set_outputs([rlx.embedding(g.param("w", (4, 2), "f64"), g.input("i", (1,), "i64"))])
    for i in (-1, 4):
        with pytest.raises(IndexRangeError):
            run_ranks(g, {"w": 0}, 2, {"i": np.array([i])}, {"w": np.zeros((4, 2))}, {})


def test_one_rank_is_the_graph_itself() -> None:
    p = partition(mlp(), {"w1": 1, "x": 0}, 1)
    assert {n.op.name for n in p.graph.nodes()} == {n.op.name for n in mlp().nodes()} and not p.report.moves


@pytest.mark.parametrize("axis", [0, 1])
def test_contributions_wanted_split_are_scattered(axis: int) -> None:
    g = Graph("g")
    x, w = g.input("x", (4, 6), "f64"), g.param("w", (6, 8), "f64")
    g.set_outputs([x @ w], names=["y"])
    p = partition(g, {"x": 1, "w": 0, "y": axis}, 2)
    assert [m.op for m in p.report.moves] == ["reduce_scatter"] and p.report.nbytes == 4 * 8 * 8 // 2
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(4, 6)), rng.normal(size=(6, 8))
    both = evaluate_ranks(p.graph, [p.shards({"x": a}, r) for r in range(2)], [p.shards({"w": b}, r) for r in range(2)])
    np.testing.assert_allclose(np.concatenate([y for (y,), _ in both], axis), a @ b, atol=1e-12)


def test_a_split_changes_its_axis_without_the_whole() -> None:
    g = Graph("g")
    x, y = g.input("x", (4, 6), "f64"), g.input("y", (4, 6), "f64")
    g.set_outputs([x + y], names=["z"])
    p = partition(g, {"x": 0, "y": 1, "z": 0}, 2)
    assert [(m.op, m.nbytes) for m in p.report.moves] == [("all_to_all", 4 * 6 * 8 // 4)]
    a, b = np.arange(24.0).reshape(4, 6), np.ones((4, 6))
    both = evaluate_ranks(p.graph, [p.shards({"x": a, "y": b}, r) for r in range(2)])
    np.testing.assert_array_equal(np.concatenate([z for (z,), _ in both]), a + b)
