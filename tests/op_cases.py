"""Test cases from the op table: every op × its samples × dtypes × plain or awkward data. An op without samples fails here.

A Case makes its graph, its inputs (the same on every machine), what the reference says, and the tolerance at which a backend
must agree. Awkward data has NaN, infinities and -0.0 among its elements; of a composite only in the first operand, since what
an infinite scale or a NaN behind a mask gives depends on the order of steps that are equal for every number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

import rlx.ir.ops  # fills the table
from rlx.ir.dtype import DType, as_dtype, f32
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph, Value, apply
from rlx.ir.op import OPS, Kind, OpDef, Sample

assert rlx.ir.ops.__all__
EIGHT_BITS = ("f8e4m3", "f8e5m2")  # of each sample one, in turn
BY_KIND = {
    "f": ("f32", "f64", "f16", "bf16", *EIGHT_BITS), "i": ("i32", "i64", "i8"), "u": ("u8", "u32"), "b": ("bool",), "c": ("c64",)
}  # fmt: skip
AWKWARD = {"f": (np.nan, np.inf, -np.inf, -0.0, 0.0, 1.0)}
# rounding of one result, times a few operations; f16 and bf16 compute in f32 and round once (or, decomposed, a few times);
# of f8 results the neighbours of the right one are right too
TOLERANCE = {"f64": 1e-12, "f32": 1e-5, "f16": 2e-3, "bf16": 1.6e-2, "f8e4m3": 0.125, "f8e5m2": 0.25, "c64": 1e-5}


@dataclass(frozen=True)
class Case:
    """One op with one sample's operands, in one dtype."""

    op: OpDef
    index: int  # of the sample
    dtype: DType  # under test
    awkward: bool = False

    def __repr__(self) -> str:
        return f"{self.op.name}-{self.index}-{self.dtype}{'-awkward' if self.awkward else ''}"

    @property
    def sample(self) -> Sample:
        return self.op.samples[self.index]

    @property
    def dtypes(self) -> tuple[DType, ...]:
        given = self.sample.dtypes or ("",) * len(self.sample.shapes)
        return tuple(as_dtype(d) if d else self.dtype for d in given)

    def graph(self) -> Graph:
        """The op alone: inputs x0, x1 …, outputs its results."""
        g = Graph(f"{self!r}".replace("-", "_"))
        operands = [g.input(f"x{i}", dims, d) for i, (dims, d) in enumerate(zip(self.sample.shapes, self.dtypes))]
        out = apply(self.op, operands, dict(self.sample.attrs or {}))
        g.set_outputs([out] if isinstance(out, Value) else out)
        return g

    @cached_property
    def all_dtypes(self) -> frozenset[str]:
        """Names of the dtypes of operands and results."""
        return frozenset(v.dtype.name for n in self.graph().nodes() for v in n.results)

    @cached_property
    def inputs(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(abs(hash_text(repr(self))))
        s = self.sample
        arrays = [draw(rng, dims, d, s.low, s.high) for dims, d in zip(s.shapes, self.dtypes)]
        if s.settle:
            s.settle(rng, arrays)
        if self.awkward:
            count = 1 if self.op.kind is Kind.COMPOSITE else len(arrays)
            for a, d in zip(arrays[:count], self.dtypes):
                spoil(rng, a, d)
        return {f"x{i}": a for i, a in enumerate(arrays)}

    @cached_property
    def expected(self) -> list[np.ndarray]:
        return evaluate(self.graph(), self.inputs)[0]

    @property
    def tolerance(self) -> float:
        """Of results in the dtype under test; of a product of two dtypes, which the sample names, in the product's."""
        mixed = self.op.kind is Kind.CONTRACT and self.sample.dtypes is not None
        return TOLERANCE.get(self.graph().outputs[0].dtype.name if mixed else self.dtype.name, 0.0)


def hash_text(text: str) -> int:
    """A number from text, equal in every process."""
    return sum(ord(c) * 131**i for i, c in enumerate(text)) % 2**32


def draw(rng: np.random.Generator, dims: tuple[int, ...], dtype: DType, low: float, high: float) -> np.ndarray:
    """Values in [low, high), whole ones for integers (unsigned ones from 0)."""
    if dtype.kind == "b":
        return np.asarray(rng.random(dims) < 0.6)
    if dtype.kind == "c":
        return draw(rng, (*dims, 2), f32, low, high).view(dtype.numpy).reshape(dims)
    if dtype.is_int:
        limits = np.iinfo(dtype.numpy)
        least, most = max(int(np.floor(low)), limits.min), min(int(np.ceil(high)), limits.max + 1)
        return np.asarray(rng.integers(least, max(most, least + 1), dims)).astype(dtype.numpy)
    return np.asarray(rng.uniform(low, high, dims)).astype(dtype.numpy)


def spoil(rng: np.random.Generator, array: np.ndarray, dtype: DType) -> None:
    """Put awkward floats at random places of `array`; indices and conditions stay as they are."""
    flat = array.reshape(-1)
    for value in AWKWARD.get(dtype.kind, ()):
        if flat.size:
            flat[rng.integers(flat.size)] = value


@cache
def cases(*, awkward: bool = True, dtypes: frozenset[str] | None = None) -> list[Case]:
    """Every case of every op, leaves excepted; `dtypes`: only cases whose operands and results have these (names)."""
    if dtypes is not None:
        return [c for c in cases(awkward=awkward) if c.all_dtypes <= dtypes]
    found: list[Case] = []
    for op in OPS.values():
        if op.kind is Kind.LEAF:
            continue
        assert op.samples, f"op {op.name!r} has no samples: nothing would test it"
        for index, sample in enumerate(op.samples):
            fixed = sample.dtypes is not None and "" not in sample.dtypes
            names = [d for letter in op.dtypes for d in BY_KIND.get(letter, ())] if sample.shapes and not fixed else ["f32"]
            for name in names:
                if name in EIGHT_BITS and name != EIGHT_BITS[index % 2]:
                    continue
                found.append(Case(op, index, as_dtype(name)))
                if awkward and any(d.is_float for d in found[-1].dtypes):
                    found.append(Case(op, index, as_dtype(name), awkward=True))
    return found


def assert_same(found: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    """Equal dtype and shape; equal values within rtol = atol = tolerance, NaN where NaN is wanted."""
    assert (found.dtype, found.shape) == (want.dtype, want.shape), what
    if want.dtype.kind in "iub":
        np.testing.assert_array_equal(found, want, err_msg=what)
    else:
        wide = [a.astype(np.complex128 if want.dtype.kind == "c" else np.float64) for a in (found, want)]
        np.testing.assert_allclose(*wide, rtol=tolerance, atol=tolerance, err_msg=what)
