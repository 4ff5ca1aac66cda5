"""Rows past the active extent never count, or the compile is refused: every op of the table, every operand's axes as the active
dim, against the same op over what holds data alone. Padding is NaN, or numbers that are no index; outputs are poisoned."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
from op_cases import Case, assert_same, cases

import rlx
from rlx.errors import CompileError, GraphError, RlxError
from rlx.ir.graph import Graph, Value, apply
from rlx.ir.op import OPS, Kind
from rlx.ir.shape import Dim

N = Dim("n")
GARBAGE = {"f": np.nan, "i": -77, "u": 251, "b": True}
# What mixes rows in a way that no fill makes right; the rest of each op's axes go.
REFUSED = {
    "argsort", "sort", "top_k", "threshold",  # where a row ends up depends on every other
    "gather", "scatter_add", "take_rows", "update_rows", "embedding",  # rows looked up among those that hold no data
    "attention",  # positions that count from the last row
    "cumsum",  # from the end
    "reshape", "concat", "iota",  # rows taken apart, or put behind others
    "random_bits", "random_uniform", "gumbel",  # each number depends on how many there are
    "pack_panels", "pack_quant", "panel_rows", "quant_rows",  # for weights, which have one length
}  # fmt: skip


class Variant(NamedTuple):
    """A case with these (operand, axis) named n; `size`: what n is at most."""

    case: Case
    axes: frozenset[tuple[int, int]]
    size: int

    def graph(self) -> Graph:
        sample = self.case.sample
        g = Graph(f"{self.case!r}".replace("-", "_"))
        dims = [[N if (i, a) in self.axes else d for a, d in enumerate(s)] for i, s in enumerate(sample.shapes)]
        operands = [g.input(f"x{i}", d, t) for i, (d, t) in enumerate(zip(dims, self.case.dtypes))]
        attrs = dict(sample.attrs or {})
        if "dims" in attrs:
            attrs["dims"] = tuple(N * (d // self.size) if d > 0 and d % self.size == 0 else d for d in attrs["dims"])
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
SESSIONS = {name: rlx.Session(name, threads=1) for name in ("ref:0", "ref:1", "cpu")}


def run(device: str, variant: Variant, g: Graph, n: int) -> str | None:
    """Compare one length; the text of a refusal, or None."""
    inputs = variant.cut(n)
    try:
        plain = SESSIONS["ref:0"].compile(g, rlx.CompileOptions(dims={"n": n}))
        want = plain.run(inputs)
    except (RlxError, ValueError):
        want = None  # not even without padding
    try:
        compiled = SESSIONS[device].compile(g, rlx.CompileOptions().bind_extent("n", variant.size))
    except CompileError as e:
        assert "active extent of 'n'" in str(e) and "bind_dims(n=" in str(e), e
        return str(e)
    if want is None:
        return None
    compiled.set_active_extent((n, variant.size))
    if device == "cpu":
        compiled._executable.poison()
    found = compiled.run(variant.padded(n))
    for out, decl, a, b in zip(g.outputs, compiled.program().outputs, found, want, strict=True):
        assert {x.axis for x in decl.active} == {i for i, d in enumerate(out.dims) if not isinstance(d, int)}
        for active in decl.active:
            rows = np.arange(a.shape[active.axis]) // active.inner % active.upper < n
            a = a.compress(rows, active.axis)
        assert_same(a, b, max(variant.case.tolerance, 2e-6) * 4, f"{variant} at {n}")
    return None


@pytest.mark.parametrize("device", ["ref:0", "ref:1", "cpu"])
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
            for n in {1, half} if device == "ref:0" and case.op.kind is not Kind.COMPOSITE else {half}:
                text = run(device, variant, g, n)
                nothing = re.search(r"[\[,(]0[\],]", f"{text} {case.sample.attrs}")  # of nothing there are no rows
                refused += [text] if text and not nothing else []
                right += text is None
    assert not refused or name in REFUSED, refused[0]
    assert right or name in REFUSED or not any(s.shapes for s in OPS[name].samples), "nothing was compared"

