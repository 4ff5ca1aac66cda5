"""A table that is looked up in rows and multiplied by is kept once, packed: the same bits, whoever reads it, and set anew."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.compiler import lower
from rlx.compiler.options import CompileOptions
from rlx.errors import IndexRangeError
from rlx.ir import ops
from rlx.ir.blocks import FORMATS
from rlx.ir.graph import Graph
from rlx.ir.ops.quant import random_weights
from rlx.ir.program import Region
from rlx.runtime import Session

ROWS, COLUMNS = 70, 256  # rows: panels of 16, 32 and 48 are left with room in the last
FLOATS = ("f32", "bf16", "f16")
QUANTS = ("q8_0", "int8", "q4_0", "int4", "q4_k", "q5_k", "q6_k")
IDS = np.array([0, ROWS - 1, 47, 48, 33, 31, 32], np.int32)
RNG = np.random.default_rng(5)


def table(kind: str) -> np.ndarray:
    """Random weights as a param holds them."""
    w = RNG.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    if kind in FLOATS:
        return w.astype(rlx.as_dtype(kind).numpy)
    kind = {"q8_0": "int8", "q4_0": "int4"}.get(kind, kind)
    if FORMATS[kind].quantise:
        return FORMATS[kind].encode(w)
    packed = [np.zeros(0), np.zeros((ROWS, FORMATS[kind].row_bytes(COLUMNS)), np.uint8)]
    random_weights(FORMATS[kind])(RNG, packed)
    return packed[1]


def tied(kind: str, other: str = "") -> Graph:
    """Rows of a table, and its product with them. `other`: something else that reads it."""
    g = Graph("tied")
    ids = g.input("ids", IDS.shape, "i32")
    if kind in FLOATS:
        w = g.param("w", (ROWS, COLUMNS), kind)
        rows = ops.gather(w, ids, axis=0)
        out = [rows, ops.matmul(rows, w.T)]
    else:
        w = g.param("w", (ROWS, FORMATS[kind].row_bytes(COLUMNS)), "u8")
        rows = ops.dequantize(ops.gather(w, ids, axis=0), format=kind, columns=COLUMNS)
        out = [rows, ops.dequant_matmul(rows, w, format=kind)]
    if other == "sum":
        out.append(ops.sum(w, axis=0) if kind in FLOATS else ops.max(w, axis=0))
    elif other == "output":
        out.append(w)
    elif other == "columns":
        out.append(ops.gather(w, ops.rem(ids, 32), axis=1))
    g.set_outputs(out)
    return g


def kept(compiled: rlx.CompiledGraph) -> dict[str, int]:
    regions = compiled.memory_plan().regions
    return {name: regions[name] for name in ("params", "prepared")}


@pytest.mark.parametrize("kind", [*FLOATS, *QUANTS])
def test_a_tied_table_is_kept_once_and_read_bit_by_bit(kind):
    compiled = Session(threads=1).compile(tied(kind))
    for _ in range(2):  # setting it again reaches both readers
        w = table(kind)
        compiled.set_param("w", w)
        rows, product = compiled.run({"ids": IDS})
        plain = w[IDS] if kind in FLOATS else FORMATS[kind].decode_rows(w[IDS], COLUMNS)
        assert rows.tobytes() == plain.tobytes()
        wide = (w if kind in FLOATS else FORMATS[kind].decode_rows(w)).astype(np.float64)
        want = plain.astype(np.float64) @ wide.T
        assert np.abs(product - want).max() < {"f32": 1e-5, "f16": 1e-2}.get(kind, 5e-2) * np.abs(want).max()
    grown = 148 / 144 if kind in ("q4_k", "q5_k") else 1  # six-bit scales and mins become bytes
    assert kept(compiled)["params"] == 0 and kept(compiled)["prepared"] <= round(w.nbytes * grown * 96 / ROWS)
    with pytest.raises(IndexRangeError):
        compiled.run({"ids": IDS + ROWS})
    with pytest.raises(IndexRangeError):
        compiled.run({"ids": IDS - 1})


@pytest.mark.parametrize(("kind", "other"), [(k, o) for k in ("f32", "q8_0") for o in ("sum", "output")] + [("q8_0", "columns")])
def test_what_cannot_read_the_pack_keeps_the_table(kind, other):
    """And then the others read it too: nothing is gained by reading the pack."""
    compiled, w = Session(threads=1).compile(tied(kind, other)), table(kind)
    compiled.set_param("w", w)
    rows, _, third = compiled.run({"ids": IDS})
    assert kept(compiled)["params"] == w.nbytes
    program = compiled.program()
    rows_of = next(s for s in program.steps if {"gather", "quant_rows"} & set(s.kernel.origin))
    assert all(program.buffers[b].layout is None for b in rows_of.reads)
    assert rows.tobytes() == (w[IDS] if kind == "f32" else FORMATS[kind].decode_rows(w[IDS], COLUMNS)).tobytes()
    want = {"output": w, "columns": w[:, IDS % 32], "sum": w.sum(0) if kind == "f32" else w.max(0)}[other]
    np.testing.assert_allclose(third, want, rtol=1e-5, atol=1e-5)


def test_two_tables_and_two_products_with_one_pack_each():
    g = Graph("two")
    ids, a, b = g.input("ids", (3,), "i32"), g.param("a", (50, 20), "f32"), g.param("b", (40, 20), "f32")
    x, y = ops.gather(a, ids, axis=0), ops.gather(b, ids, axis=0)
    g.set_outputs([ops.matmul(x, b.T), ops.matmul(y, a.T), ops.matmul(x + y, a.T), ops.matmul(x - y, b.T)])
    compiled = Session(threads=1).compile(g)
    program = compiled.program()
    assert len(program.prepare) == 2 and sum(b.region is Region.PREPARED for b in program.buffers) == 2
    w = {"a": RNG.standard_normal((50, 20)).astype(np.float32), "b": RNG.standard_normal((40, 20)).astype(np.float32)}
    for name, array in w.items():
        compiled.set_param(name, array)
    found = compiled.run({"ids": np.array([3, 0, 39], np.int32)})
    x, y = w["a"][[3, 0, 39]], w["b"][[3, 0, 39]]
    for got, want in zip(found, (x @ w["b"].T, y @ w["a"].T, (x + y) @ w["a"].T, (x - y) @ w["b"].T), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    assert kept(compiled)["params"] == 0


def test_a_target_that_packs_nothing_reads_the_table():
    from rlx.backends.ref.backend import RefBackend

    target = RefBackend().target()
    program = lower(tied("f32"), target, CompileOptions())
    width, _ = target.panel("f32")
    (rows_of,) = [s for s in program.steps if "gather" in s.kernel.origin]
    assert any(program.buffers[b].layout for b in rows_of.reads) == bool(width)
