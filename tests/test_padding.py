"""Rows past the active extent never count, or the compile is refused: every op of the table, every operand's axes as the active
dim, against the same op over what holds data alone. Padding is NaN, or numbers that are no index; outputs are poisoned."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
from devices import ASKED
from hypothesis import given, settings
from hypothesis import strategies as st
from op_cases import Case, assert_same, cases

import rlx
from rlx.errors import CompileError, GraphError, RlxError
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph, Value, apply
from rlx.ir.op import OPS, Kind
from rlx.ir.shape import Dim
from rlx.runtime.binding import filled_rows

N = Dim("n")
GARBAGE = {"f": np.nan, "i": -77, "u": 251, "b": True, "c": np.nan}
# Ops that mix rows in a way that no fill makes right; the rest of each op's axes go.
REFUSED = {
    "argsort", "sort", "top_k", "threshold",  # where a row ends up depends on every other
    "gather", "gather_elements", "scatter_add", "scatter_elements", "take_rows", "update_rows",
    "embedding",  # rows looked up among those that hold no data
    "attention", "attention_parts",  # positions that count from the last row
    "branch", "loop",  # their bodies are of one length
    "reshape", "concat", "iota",  # rows taken apart, or put behind others
    "random_bits", "random_uniform", "gumbel",  # each number depends on how many there are
    "quant_rows", "group_ends", "segment_matmul", "grouped_matmul",  # for weights, which have one length, and their groups
}  # fmt: skip


class Variant(NamedTuple):
    """A case with these (operand, axis) named n; `size`: what n is at most."""

    case: Case
    axes: frozenset[tuple[int, int]]
    size: int

    def graph(self, n: Dim | int = N) -> Graph:
        sample = self.case.sample
        g = Graph(f"{self.case!r}".replace("-", "_"))
        dims = [[n if (i, a) in self.axes else d for a, d in enumerate(s)] for i, s in enumerate(sample.shapes)]
        operands = [g.input(f"x{i}", d, t) for i, (d, t) in enumerate(zip(dims, self.case.dtypes))]
        attrs = dict(sample.attrs or {})
        if "dims" in attrs:
            attrs["dims"] = tuple(n * (d // self.size) if d > 0 and d % self.size == 0 else d for d in attrs["dims"])
        out = apply(self.case.op, operands, attrs)
        g.set_outputs([out] if isinstance(out, Value) else out)
        return g

    def cut(self, n: int) -> dict[str, np.ndarray]:
        return {f"x{i}": self.rows(i, array, n) for i, array in enumerate(self.case.inputs.values())}

    def rows(self, i: int, array: np.ndarray, n: int) -> np.ndarray:
        for operand, axis in self.axes:
            array = array.take(range(n), axis) if operand == i else array
        return array

    def padded(self, n: int) -> dict[str, np.ndarray]:
        out = {}
        for i, array in enumerate(self.case.inputs.values()):
            out[f"x{i}"] = np.full(array.shape, GARBAGE[self.case.dtypes[i].kind]).astype(array.dtype)
            self.rows_of(out[f"x{i}"], i, n)[...] = self.rows(i, array, n)
        return out

    def rows_of(self, array: np.ndarray, i: int, n: int) -> np.ndarray:
        return array[(*(slice(n if (i, a) in self.axes else None) for a in range(array.ndim)), ...)]


def variants(case: Case) -> Iterator[Variant]:
    """Each axis alone, and together with every other of its size."""
    every = [(i, a, d) for i, s in enumerate(case.sample.shapes) for a, d in enumerate(s)]
    sets = {frozenset({(i, a)}): d for i, a, d in every if d > 1}
    sets |= {frozenset((j, b) for j, b, e in every if e == d): d for _, _, d in every if d > 1}
    sets |= {frozenset((j, a) for j, b, e in every if (b, e) == (a, d)): d for _, a, d in every if d > 1}
    if not sets:
        yield from (Variant(case, frozenset(), d) for d in (case.sample.attrs or {}).get("dims", ()) if d > 1)
    for axes, size in sets.items():
        yield Variant(case, axes, size)


def chosen() -> dict[str, list[Case]]:
    """One dtype of each sample of each op; of the pointwise ops, whose rule is one, the first sample."""
    out: dict[str, list[Case]] = defaultdict(list)
    for case in cases(awkward=False):
        same = [c for c in out[case.op.name] if c.index == case.index]
        if not same and not (case.op.kind is Kind.POINTWISE and case.index):
            out[case.op.name].append(case)
    return out


CASES = chosen()
SESSIONS = {name: rlx.Session(name, threads=1) for name in ("ref:0", "ref:1", "cpu", *ASKED)}


@cache
def expected(variant: Variant, n: int) -> list[np.ndarray] | None:
    """The results of rows that hold data alone, by the op's reference; None: there are none even without padding."""
    try:
        with np.errstate(all="ignore"):
            return evaluate(variant.graph(n), variant.cut(n))[0]
    except (RlxError, ValueError):
        return None


def run(device: str, variant: Variant, g: Graph, lengths: set[int]) -> str | None:
    """Compare some lengths; the text of a refusal, or None."""
    try:
        compiled = SESSIONS[device].compile(g, rlx.CompileOptions().bind_extent("n", variant.size))
    except CompileError as e:
        assert "active extent of 'n'" in str(e) and "bind_dims(n=" in str(e), e
        return str(e)
    for n in lengths:
        if (want := expected(variant, n)) is None:
            continue
        compiled.set_active_extent((n, variant.size))
        if not device.startswith("ref"):
            compiled._executable.poison()  # type: ignore[attr-defined]
        found = compiled.run(variant.padded(n))
        for out, decl, a, b in zip(g.outputs, compiled.program().outputs, found, want, strict=True):
            assert {x.axis for x in decl.active} == {i for i, d in enumerate(out.dims) if not isinstance(d, int)}
            for active in decl.active:
                rows = np.arange(a.shape[active.axis]) // active.inner % active.upper < n
                a = a.compress(rows, active.axis)
            assert_same(a, b, max(variant.case.tolerance, 2e-6) * 4, f"{variant} at {n}")
    return None


@pytest.mark.parametrize("device", ["ref:0", "ref:1", "cpu", *ASKED])
@pytest.mark.parametrize("name", CASES)
def test_padding_never_counts_or_is_refused(name, device):
    refused, right = [], 0
    for case in CASES[name] if device == "ref:0" else CASES[name][:4]:
        for variant in variants(case):
            try:
                g = variant.graph()
            except GraphError:
                continue  # the op itself refuses a named dim there
            half = max(variant.size // 2, 1)
            lengths = {1, half} if device == "ref:0" and case.op.kind is not Kind.COMPOSITE else {half}
            text = run(device, variant, g, lengths)
            nothing = re.search(r"[\[,(]0[\],]", f"{text} {case.sample.attrs}")  # of nothing there are no rows
            refused += [text] if text and not nothing else []
            right += text is None
    assert not refused or name in REFUSED, refused[0]
    assert right or name in REFUSED or not any(s.shapes for s in OPS[name].samples), "nothing was compared"



# -- the run-time value --------------------------------------------------------------------------------------------

F = np.float32


def summed() -> Graph:
    g = Graph("summed")
    x = g.input("x", (2, N), "f32")
    g.set_outputs([rlx.sum(x, axis=1), x * 2.0])
    return g


@pytest.mark.parametrize("device", ["ref:0", "cpu", *ASKED])
def test_the_extent_is_set_between_runs(device):
    compiled = SESSIONS[device].compile(summed(), rlx.CompileOptions().bind_extent("n", 6))
    x = np.arange(12, dtype=F).reshape(2, 6)
    np.testing.assert_array_equal(compiled.run({"x": x})[0], x.sum(1))  # all rows, until someone says otherwise
    for n in (4, 1, 6, np.int64(3)):
        compiled.set_active_extent((n, 6))  # type: ignore[arg-type]
        np.testing.assert_array_equal(compiled.run({"x": x})[0], x[:, :n].sum(1))
    twin = compiled.clone()
    compiled.set_active_extent(None)
    np.testing.assert_array_equal(twin.run({"x": x})[0], x[:, :3].sum(1))
    np.testing.assert_array_equal(compiled.run({"x": x})[0], x.sum(1))
    assert [b.name for b in compiled._inputs] == ["x"]  # what the compiler added is no input of the caller's
    with pytest.raises(rlx.errors.UnknownNameError):
        compiled.input_view("%extent")


@pytest.mark.parametrize("device", ["cpu", *ASKED])
def test_queued_runs_keep_the_extent_they_were_queued_with(device):
    compiled = SESSIONS[device].compile(summed(), rlx.CompileOptions().bind_extent("n", 6))
    x = np.ones((2, 6), F)
    compiled.set_active_extent((2, 6))
    for _ in range(8):
        compiled.commit_no_wait({"x": x})
    compiled.set_active_extent((5, 6))
    np.testing.assert_array_equal(compiled.outputs_view()[0], [2, 2])
    compiled.commit_no_wait({"x": x})
    compiled.sync_pending()
    np.testing.assert_array_equal(compiled.outputs_view()[0], [5, 5])


@pytest.mark.parametrize("wrong", [(0, 6), (7, 6), (3, 5), (-1, 6), (3,), 3, (3.0, 6), "36"])
def test_a_wrong_extent_changes_nothing(wrong):
    compiled = SESSIONS["cpu"].compile(summed(), rlx.CompileOptions().bind_extent("n", 6))
    compiled.set_active_extent((2, 6))
    with pytest.raises(rlx.errors.InputShapeError, match=r"of dim 'n' is \(n, 6\) with n from 1 to 6, got"):
        compiled.set_active_extent(wrong)
    assert compiled.run({"x": np.ones((2, 6), F)})[0].tolist() == [2, 2]


def test_a_graph_without_an_active_dim_says_what_to_do():
    compiled = SESSIONS["cpu"].compile(summed(), rlx.CompileOptions().bind_dims(n=6))
    with pytest.raises(rlx.errors.OptionError, match=r"summed has no active dim: compile it with options.bind_extent"):
        compiled.set_active_extent((3, 6))
    compiled.set_active_extent(None)
    for wrong in (("n", 0), ("n", -1), ("n", "6"), ("1n", 6), "n", ("n",)):
        with pytest.raises(rlx.errors.OptionError):
            rlx.CompileOptions(extent=wrong)  # type: ignore[arg-type]
    with pytest.raises(rlx.errors.OptionError, match="dims bind 'n' to another value"):
        rlx.CompileOptions().bind_extent("n", 6).bind_dims(n=5)
    with pytest.raises(rlx.errors.OptionError, match="has no dim of that name"):
        SESSIONS["cpu"].compile(summed(), rlx.CompileOptions(dims={"n": 6}).bind_extent("m", 6))


def test_checked_runs_look_at_what_holds_data():
    compiled = SESSIONS["cpu"].compile(summed(), rlx.CompileOptions(checked=True).bind_extent("n", 6))
    x = np.full((2, 6), np.nan, F)
    x[:, :3] = 1
    compiled.set_active_extent((3, 6))
    assert compiled.run({"x": x})[0].tolist() == [3, 3]
    compiled.set_active_extent((4, 6))
    with pytest.raises(rlx.errors.NumericsError):
        compiled.run({"x": x})


# -- what is refused, and the words for it -------------------------------------------------------------------------


def refused(build) -> str:
    g = Graph("g")
    g.set_outputs([build(g)])
    with pytest.raises(CompileError) as caught:
        SESSIONS["ref:0"].compile(g, rlx.CompileOptions().bind_extent("n", 8))
    return str(caught.value)


def test_refusals_name_the_node_the_axis_and_the_way_out():
    text = refused(lambda g: rlx.sort(g.input("x", (3, N), "f32"))[0])
    assert re.fullmatch(
        r"graph 'g': sort\(f32\[3,8\]\) made at .*test_padding.py:\d+ cannot be compiled for an active extent of 'n' "
        r"\(at most 8\): it mixes rows along axis 1 of operand 0 \(f32\[3,8\]\)\. Bind the length itself, bind_dims\(n=…\), or "
        r"leave this out of the graph",
        text,
    )
    assert "params are set once, for every length" in refused(lambda g: g.param("w", (N,), "f32") * 2.0)
    assert "handles are set once" in refused(lambda g: g.handle(rlx.BufferHandle("h", (N,), "f32")) * 2.0)
    assert "its axis holds more than the rows" in refused(lambda g: g.input("x", (2 * N,), "f32") * 2.0)
    assert "lie differently" in refused(
        lambda g: g.input("x", (N, 4), "f32").reshape(4 * N) + g.input("y", (4, N), "f32").reshape(4 * N)
    )
    assert "cannot be followed" in refused(lambda g: rlx.iota(dims=(2, 3 * N), axis=1))
    assert "mixes rows along axis 0" in refused(lambda g: g.input("x", (N, 4), "f32")[2])
    assert "mask 'causal' puts the last query at the last key" in refused(
        lambda g: rlx.attention(*(g.input(n, (1, 1, N if n == "q" else 8, 4), "f32") for n in "qkv"), mask="causal")
    )


# -- graphs --------------------------------------------------------------------------------------------------------


def softmax_by_hand(x: Value) -> Value:
    e = rlx.exp(x - rlx.max(x, axis=-1, keepdims=True))
    return e / rlx.sum(e, axis=-1, keepdims=True)


GRAPHS = {
    "attention by hand": lambda x, y: softmax_by_hand(x @ y.transpose(0, 2, 1)) @ y,
    "gram": lambda x, y: x.transpose(0, 2, 1) @ y,
    "two active axes": lambda x, y: rlx.sum(rlx.tanh(x @ y.transpose(0, 2, 1)), axis=(1, 2)),
    "norm over rows": lambda x, y: rlx.layer_norm(x.transpose(0, 2, 1)) + rlx.mean(y, axis=1).reshape(2, 6, 1),
    "merged rows": lambda x, y: rlx.rms_norm((x + y).reshape(2 * N, 6)),
    "mean of merged": lambda x, y: rlx.mean((x * y).reshape(2 * 6 * N)),
    "variance with a correction": lambda x, y: rlx.variance(x, axis=(1, 2), correction=1),
    "greatest": lambda x, y: rlx.argmax(rlx.where(x < y, x, y), axis=1),
    "positions": lambda x, y: rlx.sum(x * rlx.iota(dims=(1, N, 1), axis=1, dtype=rlx.f32), axis=1),
    "running sum": lambda x, y: rlx.cumsum(x, axis=1) * y[:, :1],
    "last": lambda x, y: rlx.softplus(x[:, -1]) @ y[:, -1].transpose(1, 0),
    "sliding window": lambda x, y: rlx.attention(
        *(t.reshape(2, N, 3, 2).transpose(0, 2, 1, 3) for t in (x, y, x)), mask="sliding_window", window=3
    ),
    "cross attention": lambda x, y: rlx.attention(
        rlx.sum(x, axis=1).reshape(2, 3, 1, 2), *(t.reshape(2, N, 3, 2).transpose(0, 2, 1, 3) for t in (y, x)), mask="causal"
    ),
    "bias": lambda x, y: rlx.attention(
        *(t.reshape(2, N, 3, 2).transpose(0, 2, 1, 3) for t in (x, y, x)), rlx.sum(x, axis=-1).reshape(2, 1, N, 1), mask="bias"
    ),
    "normalised over groups": lambda x, y: rlx.group_norm(x.transpose(0, 2, 1), groups=3),
    "backwards along other axes": lambda x, y: rlx.sum(x[::-1, :, 4:0:-1] * y[:, :, 1:5], axis=1),
    "products of logs": lambda x, y: rlx.prod(rlx.log_softmax(x, axis=1) * y, axis=(0, 1)),
}


@pytest.mark.parametrize("how", ["f32", "bf16", "unfused"])
@pytest.mark.parametrize("name", GRAPHS)
def test_graphs_on_padding_are_the_graphs(name, how):
    g = Graph(name)
    x, y = g.input("x", (2, N, 6), "f32"), g.input("y", (2, N, 6), "f32")
    g.set_outputs([GRAPHS[name](x, y)])
    rng = np.random.default_rng(len(name))
    options = rlx.CompileOptions(disable=("fuse",)) if how == "unfused" else rlx.CompileOptions(precision=how)
    for device in SESSIONS if how == "f32" else ("ref:0", "cpu"):
        compiled = SESSIONS[device].compile(g, options.bind_extent("n", 9))
        for n in (1, 4, 9):
            a, b = rng.normal(size=(2, 2, n, 6)).astype(F)
            want = SESSIONS["ref:0"].compile(g, options.bind_dims(n=n)).run({"x": a, "y": b})[0]
            padded = np.full((2, 2, 9, 6), np.nan, F)
            padded[:, :, :n] = a, b
            compiled.set_active_extent((n, 9))
            if device == "cpu":
                compiled._executable.poison()  # type: ignore[attr-defined]
            (found,) = compiled.run({"x": padded[0], "y": padded[1]})
            found = filled_rows(found, compiled.program().outputs[0].active, n)
            assert_same(found, want, 2e-2 if how == "bf16" else 2e-5, f"{name} on {device} at {n}")


STEPS = (
    lambda a, b, i: rlx.tanh(a), lambda a, b, i: rlx.gelu(a * 0.5), lambda a, b, i: a + b, lambda a, b, i: rlx.tanh(a * b),
    lambda a, b, i: rlx.where(a < b, a, b * 0.5), lambda a, b, i: rlx.sum(a, axis=i % a.rank, keepdims=i > 3),
    lambda a, b, i: rlx.mean(a, axis=i % a.rank, keepdims=i > 3), lambda a, b, i: rlx.max(a, axis=i % a.rank, keepdims=i > 3),
    lambda a, b, i: rlx.variance(a, axis=i % a.rank), lambda a, b, i: rlx.softmax(a, axis=i % a.rank),
    lambda a, b, i: rlx.layer_norm(a), lambda a, b, i: rlx.cumsum(a, axis=i % a.rank) * 0.1,
    lambda a, b, i: a.transpose(*np.roll(range(a.rank), i)), lambda a, b, i: rlx.tanh(a @ b),
    lambda a, b, i: rlx.tanh(a @ b.transpose(*range(b.rank - 2), b.rank - 1, b.rank - 2)),
    lambda a, b, i: a.reshape(*a.dims[: i % a.rank], -1) if i % 2 else a.reshape(-1, *a.dims[i % a.rank + 1 :]),
    lambda a, b, i: rlx.slice(a, starts=(0,) * a.rank, stops=tuple(1 if k == i % a.rank else 2**63 - 1 for k in range(a.rank))),
    lambda a, b, i: a[(..., -1) if i % 2 else (slice(None), -1)],
)  # fmt: skip


@settings(max_examples=60, derandomize=True, database=None)
@given(st.lists(st.tuples(st.integers(0, len(STEPS) - 1), st.integers(0, 9), st.integers(0, 9), st.integers(0, 5)), min_size=2,
                max_size=9))  # fmt: skip
def test_random_graphs_on_padding_are_the_graphs(steps):
    g = Graph("random")
    values = [g.input("x", (2, N, 6), "f32"), g.input("y", (2, N, 6), "f32"), g.input("z", (N, 6), "f32")]
    for step, a, b, i in steps:
        try:
            values.append(STEPS[step](values[-1 - a % len(values)], values[-1 - b % len(values)], i))
        except (RlxError, ValueError, ArithmeticError):
            continue  # such shapes do not go together
    g.set_outputs(values[3:][-3:] or values[:1])
    rng = np.random.default_rng(len(steps))
    n, unfused = 4, len(steps) % 2 == 1
    arrays = {str(v.name): rng.normal(size=v.shape.bind({"n": n}).static).astype(F) for v in g.inputs}
    want = SESSIONS["ref:0"].compile(g, rlx.CompileOptions(dims={"n": n})).run(arrays)
    try:
        options = rlx.CompileOptions(disable=("fuse", "canonicalise", "tidy") if unfused else ()).bind_extent("n", 7)
        compiled = SESSIONS["ref:0" if unfused else "ref:1"].compile(g, options)
    except CompileError as e:
        assert "active extent of 'n'" in str(e)
        return
    compiled.set_active_extent((n, 7))
    padded = {str(v.name): np.full(v.shape.bind({"n": 7}).static, np.nan, F) for v in g.inputs}
    for v in g.inputs:
        padded[str(v.name)][(slice(None),) * v.dims.index(N) + (slice(n),)] = arrays[str(v.name)]
    for found, decl, w in zip(compiled.run(padded), compiled.program().outputs, want, strict=True):
        assert_same(filled_rows(found, decl.active, n), w, 1e-4, str(g))
