"""Products with quantised weights on the CPU: packing against the table of formats, kernels against float64 numpy.

With integer dot products x is rounded: the error is bounded by what rounding each run of 32 elements of x can do.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_runs import TARGETS, run
from op_oracles import packed_blocks

import rlx
from rlx.backends.cpu.abi import KEPT
from rlx.backends.cpu.dots import dot_of
from rlx.backends.cpu.kernels import product as products
from rlx.backends.cpu.kernels import quant
from rlx.backends.cpu.render import render
from rlx.errors import AttributeValueError
from rlx.ir.blocks import FORMATS, Bits, Format, Integers, Panel
from rlx.ir.dtype import as_dtype, bf16, f32, i64, u8
from rlx.ir.graph import Graph
from rlx.ir.kernel import Buffer, Computed, Contract, Expr, Kernel, Load, Local, Loop, Operand, Reduce, Store, Var, const, linear
from rlx.ir.kernel import k as kx
from rlx.ir.kernel_parse import parse_kernel
from rlx.ir.kernel_text import print_kernel
from rlx.ir.ops.quant import dequant_matmul, dequantize
from rlx.ir.ops.quant_pack import pack_quant
from rlx.ir.target import Target

PANEL = quant.PANEL
FORMAT_NAMES = tuple(FORMATS)


def packed_of(name: str, w: np.ndarray) -> np.ndarray:
    """The memory of pack_quant: each field of the format is read from the blocks, and written where the panel has it."""
    panel = quant.panel(name)
    f, p, height = panel.plain, panel.packed, panel.rows
    rows = np.pad(w, ((0, -len(w) % height), (0, 0))).reshape(-1, height, w.shape[1] // f.nbytes, f.nbytes).swapaxes(1, 2)
    out = np.zeros((*rows.shape[:2], p.nbytes), np.uint8)

    def lanes(unit: int) -> np.ndarray:
        """[panel, block, row, byte] of the fields that have this many bytes for each row."""
        shape = (*rows.shape[:3], p.nbytes - unit * (height - 1))
        return np.lib.stride_tricks.as_strided(out, shape, (*out.strides[:2], unit, 1))

    for at, to in zip(f.numbers, p.numbers):
        lanes(2)[..., to : to + 2] = rows[..., at : at + 2]
    for unit, source, to in ((1, f.scales, p.scales), (1, f.mins, p.mins), (4, f.q, p.q)):
        if source and to:
            to.write(lanes(unit), source.read(rows).view(np.uint8) ^ (panel.flip if source is f.q else 0))
    return out.reshape(len(rows), -1)


def weights(name: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random blocks of a format: any bits, f16 numbers of moderate size."""
    rng = np.random.default_rng(seed)
    form = FORMATS[name]
    packed = rng.integers(0, 256, (rows, columns // form.block, form.nbytes), np.uint8)
    for at in form.numbers:
        scale = rng.uniform(-1, 1, packed.shape[:2]).astype(np.float16)
        packed[..., at : at + 2] = scale[..., None].view(np.uint8)
    return packed.reshape(rows, -1)


def product(
    name: str, x: np.ndarray, w: np.ndarray, target: Target, dims: tuple[int, ...] = (), turned: bool = False, exact: bool = False
) -> np.ndarray:
    """The kernel's result, [m, n]. `dims`: leading dims of x and y. `turned`: both lie columns first."""
    (m, k), n = x.shape, w.shape[0]
    dims, panels, dtype = dims or (m,), packed_of(name, w), as_dtype(x.dtype)
    strides = [int(np.prod(dims[d + 1 :])) for d in range(len(dims))]
    place = lambda columns: (*strides, m) if turned else (*(s * columns for s in strides), 1)  # noqa: E731
    buffers = Buffer("x", dtype, m * k), Buffer("w", u8, panels.size), Buffer("y", dtype, m * n, True)
    i, j, acc, grid = Var("i"), Var("j"), Var("acc", f32), tuple((Var("g"), extent) for extent in dims[:-1])

    def at(columns: int, *inner: Var) -> Expr:
        return linear(zip((*(v for v, _ in grid), *inner), place(columns)))

    left = Operand(buffers[0], at(k), place(k)[-2], place(k)[-1])
    store = Store(buffers[2], at(n, i, j), kx.cast(acc, dtype))
    body = Contract(i, j, dims[-1], n, k, left, Operand(buffers[1], const(0), blocks=name, exact=exact), acc, (store,))
    kernel = Kernel("quantised", buffers, (), grid, (body,))
    (out,), status = run(kernel, [x.T.copy() if turned else x, panels, None], target)
    assert status == 0
    return out.reshape(n, m).T if turned else out.reshape(m, n)


def rounding_bound(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """How far rounding x to int8 in runs of 32 can move x @ w.T: half a step of each run, times its |w|."""
    half_steps = np.abs(x.reshape(len(x), -1, 32)).max(2) / 254
    return half_steps @ np.abs(w.reshape(len(w), -1, 32)).sum(2).T


def check(name: str, x: np.ndarray, w: np.ndarray, target: Target, keeps_x: bool = False, **places) -> None:
    got = product(name, x, w, target, exact=keeps_x, **places).astype(np.float64)
    exact = FORMATS[name].decode_rows(w).astype(np.float64)
    wide = x.astype(np.float64)
    bound = 2e-6 * np.abs(wide) @ np.abs(exact).T + {"float32": 0, "bfloat16": 4e-3, "float16": 5e-4}[x.dtype.name] * np.abs(got)
    if target.vector_bytes == 64 and "avx512vnni" in target.features and not keeps_x:
        bound = 1.001 * rounding_bound(wide, exact) + bound
    assert (np.abs(got - wide @ exact.T) <= bound + 1e-30).all()


def activations(m: int, k: int, seed: int = 1, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((m, k), np.float32).astype(dtype)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_products_are_within_the_bound(name, target, exact):
    """Odd sizes; one tile and several, panels in place and unpacked; a fence on either side of each buffer."""
    for m, n, blocks in ((1, 33, 2), (3, 64, 1), (5, 31, 2), (19, 70, 1)):
        check(name, activations(m, blocks * FORMATS[name].block), weights(name, n, blocks * FORMATS[name].block), target, exact)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_chunks_and_blocks_of_rows(target, exact):
    """More columns than a chunk, more rows than scratch holds of them."""
    check("q8_0", activations(130, 2080), weights("q8_0", 40, 2080), target, exact)
    check("q4_k", activations(2, 1280), weights("q4_k", 40, 1280), target, exact)


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_places_and_dtypes_of_x(dtype, target):
    x, w = activations(6, 64, dtype=dtype), weights("q4_0", 37, 64)
    for places in ({"dims": (2, 3)}, {"dims": (3, 1, 2), "turned": True}, {"turned": True}):
        check("q4_0", x, w, target, **places)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_row_is_the_same_among_others(name):
    """Whatever the rows beside it and the number of threads: decoding agrees with prefill to the bit."""
    k = 2 * FORMATS[name].block
    x, w = activations(23, k), weights(name, 70, k)
    alone = np.concatenate([product(name, x[i : i + 1], w, TARGETS["host"]) for i in (0, 7, 22)])
    for threads in (1, 2, 7):
        together = product(name, x, w, replace(TARGETS["host"], threads=threads))
        assert together[[0, 7, 22]].tobytes() == alone.tobytes()


def test_extreme_activations():
    """NaN and infinities reach their row and no other; zeros and the smallest numbers give zeros."""
    x, w = activations(6, 64), weights("q8_0", 33, 64)
    x[0, 5], x[1, 40], x[2], x[3] = np.nan, np.inf, 0, 1e-44
    x[4] *= 1e34
    got = product("q8_0", x, w, TARGETS["host"])
    assert np.isnan(got[0]).all() and not np.isfinite(got[1]).any()
    assert not np.abs(got[2:4]).max() > 1e-40
    assert np.isfinite(got[4:]).all() and np.abs(got[4]).max() > 1e33


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_packing_loops_agree_with_numpy(name):
    """The op's loops, and what numpy says of them; blocks of random bits, an odd number of rows."""
    k = 2 * FORMATS[name].block
    w = weights(name, PANEL + 5, k, seed=3)
    g = Graph("pack")
    g.set_outputs([dequant_matmul(g.input("x", (1, k), as_dtype("f32")), g.param("w", w.shape, u8), format=name)])
    compiled = rlx.Session(rlx.Device.CPU).compile(g)
    compiled.set_param("w", w)
    (prepared,) = [b for b in compiled.program().buffers if b.layout is not None]
    assert (compiled._executable.read(prepared.id).reshape(prepared.shape.static) == packed_of(name, w)).all()
    assert prepared.shape.static == packed_of(name, w).shape
    kind = {"int8": "q8_0", "int4": "q4_0"}.get(name, name)
    assert (packed_blocks(kind, w).ravel() == packed_of(name, w).ravel()).all()


@pytest.mark.parametrize("name", sorted(set(FORMAT_NAMES) - {"q8_0", "int8"}))
def test_packing_moves_bits(name):
    """None is lost or set; only six-bit scales grow, to a byte each. (q8_0 turns signed numbers into unsigned ones.)"""
    w = weights(name, PANEL, FORMATS[name].block)
    packed = packed_of(name, w)
    assert np.unpackbits(packed).sum() == np.unpackbits(w).sum()
    assert packed.size - w.size == (4 * PANEL if FORMATS[name].mins else 0)


def test_weights_of_a_graph_are_packed_once_and_set_again():
    """Two products share one packed copy; the param's own bytes are not kept; new bytes reach it."""
    form, x = FORMATS["q4_k"], activations(3, 512)
    g = Graph("two")
    w = g.param("w", (40, form.row_bytes(512)), u8)
    a = g.input("x", x.shape, as_dtype("f32"))
    g.set_outputs([dequant_matmul(a, w, format="q4_k"), dequant_matmul(a * 2, w, format="q4_k")])
    compiled = rlx.Session(rlx.Device.CPU).compile(g)
    for seed in (0, 1):
        packed = weights("q4_k", 40, 512, seed)
        compiled.set_param("w", packed)
        one, two = compiled.run({"x": x})
        exact = form.decode_rows(packed).astype(np.float64)
        assert (np.abs(one - x @ exact.T) <= 1.01 * rounding_bound(x, exact)).all()
        assert (two == 2 * one).all()
    text = str(compiled.program())
    assert text.count("pack_quant(out") == 1 and text.count("dequant_matmul(") == 2
    assert compiled._executable.memory()["params"] == 0


@pytest.mark.parametrize("rows", [1, 9])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_a_product_with_decoded_weights_keeps_no_decoded_weights(name, rows):
    """Their blocks are decoded in the product's kernel, with its epilogue; x is not rounded, whatever the processor."""
    form, columns = FORMATS[name], 2 * FORMATS[name].block
    x, packed, g = activations(rows, columns), weights(name, 70, columns), Graph("decoded")
    w = g.param("w", (70, form.row_bytes(columns)), u8)
    y = g.input("x", x.shape, f32) @ rlx.dequantize(w, format=name, columns=columns).T
    g.set_outputs([rlx.relu(y)])
    compiled = rlx.Session(rlx.Device.CPU).compile(g)
    compiled.set_param("w", packed)
    program, exact = compiled.program(), form.decode_rows(packed).astype(np.float64)
    bound = 2e-6 * np.abs(x) @ np.abs(exact).T
    assert (np.abs(compiled.run({"x": x})[0] - np.maximum(x @ exact.T, 0)) <= bound).all()
    assert [s.kernel.origin for s in program.prepare] == [("pack_quant",)]
    (step,) = program.steps
    (contract,) = step.kernel.body
    assert isinstance(contract, Contract) and isinstance(contract.b, Operand) and contract.b.exact
    assert print_kernel(parse_kernel(print_kernel(step.kernel))) == print_kernel(step.kernel)


def test_other_products_with_decoded_weights_stay():
    """Weights decoded along the columns of the product, x of another dtype, and weights that are no params."""

    def origins(build) -> list[tuple[str, ...]]:
        g = Graph("g")
        g.set_outputs([build(g)])
        return [s.kernel.origin for s in rlx.Session(rlx.Device.CPU).compile(g).program().steps]

    def decoded(w):
        return rlx.dequantize(w, format="q8_0", columns=64)

    row_bytes = FORMATS["q8_0"].row_bytes(64)
    plain = origins(lambda g: g.input("x", (3, 64), f32) @ decoded(g.param("w", (64, row_bytes), u8)))
    narrow = origins(lambda g: g.input("x", (3, 64), bf16) @ decoded(g.param("w", (9, row_bytes), u8)).T)
    given = origins(lambda g: g.input("x", (3, 64), f32) @ decoded(g.input("w", (9, row_bytes), u8)).T)
    assert not any("dequant_matmul" in origin for origin in plain + narrow + given)


def test_small_weights_lie_together():
    """So that they get huge pages: each alone is smaller than one."""
    form, g = FORMATS["q8_0"], Graph("several")
    x = g.input("x", (1, 1024), as_dtype("f32"))
    params = [g.param(f"w{i}", (1000, form.row_bytes(1024)), u8) for i in range(3)]
    g.set_outputs([dequant_matmul(x, w, format="q8_0") for w in params])
    compiled = rlx.Session(rlx.Device.CPU).compile(g)
    prepared = [b for b in compiled.program().buffers if b.region.value == "prepared"]
    places = sorted((compiled._executable.address(b.id), b.nbytes) for b in prepared)
    assert len(places) == 3 and places[0][0] % (2 << 20) == 0 and places[0][1] < 2 << 20
    assert all(start + nbytes == after for (start, nbytes), (after, _) in pairwise(places))


@pytest.mark.parametrize(("threads", "tasks"), [(1, 1), (2, 6), (4, 16), (16, 27)])
def test_every_thread_has_a_part_of_the_weights(threads, tasks):
    """1.8 MB; of smaller weights 16 threads do not all get a task, since one has 64 KB at least."""
    target = replace(TARGETS["host"], threads=threads)
    made = {}
    for columns in (3072, 320):
        x, w, y = Buffer("x", f32, 1024), Buffer("w", u8, columns // PANEL * PANEL * 4 * 144), Buffer("y", f32, columns, True)
        i, j, acc = Var("i"), Var("j"), Var("acc", f32)
        right = Operand(w, const(0), blocks="q4_k")
        body = Contract(i, j, 1, columns, 1024, Operand(x, const(0), 0, 1), right, acc, (Store(y, linear([(j, 1)]), acc),))
        made[columns] = render(Kernel("few", (x, w, y), (), (), (body,)), target, "few").tasks
    assert made[3072] == tasks and made[320] == (2 if threads > 2 else 1)


def test_claims():
    def claimed(x: tuple[int, ...], dtype: str, name: str, columns: int, known: bool = True) -> str | None:
        g = Graph("claim")
        shape = (5, FORMATS[name].row_bytes(columns))
        w = g.param("w", shape, u8) if known else g.input("w", shape, u8)
        return quant.claim(dequant_matmul(g.input("x", x, as_dtype(dtype)), w, format=name).node)

    assert claimed((3, 64), "f32", "q4_0", 64) is None and claimed((64,), "bf16", "int8", 64) is None
    assert "blocks of 256" in (claimed((3, 200), "f32", "q4_k", 200) or "")
    assert "f64" in (claimed((3, 64), "f64", "q4_0", 64) or "")
    assert "params" in (claimed((3, 64), "f32", "q4_0", 64, known=False) or "")
    assert "nothing" in (claimed((0, 64), "f32", "q4_0", 64) or "")


@pytest.mark.parametrize("name", ["q8_0", "q4_k", "q6_k"])
@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
def test_operand_epilogue_and_rows_are_part_of_the_product(name, target):
    check_operand_epilogue_and_rows(name, target, (1, 5, 23))


def check_operand_epilogue_and_rows(name: str, target: Target, rows_of_x: tuple[int, ...]) -> None:
    """(max(y) of each row, y = 2x @ w.T + r) in one kernel, for any tasks: the bits of the product alone, and then numpy."""
    k, n = 2 * FORMATS[name].block, 70
    w = weights(name, n, k)
    for m in rows_of_x:
        x, r = activations(m, k), activations(m, n, seed=2)
        want = product(name, 2 * x, w, target) + r
        for threads in (1, 3):
            buffers = [Buffer(b, f32, size) for b, size in (("x", m * k), ("r", m * n))]
            panels = packed_of(name, w)
            buffers += [Buffer("w", u8, panels.size), Buffer("y", f32, m * n, True), Buffer("most", f32, m, True)]
            i, j, q, row, c, acc, most = (Var(v, t) for v, t in zip("ijqrcam", (*[i64] * 5, f32, f32)))
            left = Computed(row, q, kx.mul(Load(buffers[0], linear([(row, k), (q, 1)])), 2.0), f32)
            line, at = Local("line", f32, n, per_row=True), linear([(i, n), (j, 1)])
            summed = kx.add(acc, Load(buffers[1], at))
            epilogue = Store(buffers[3], at, summed), Store(line, j, summed)
            rows = (
                Loop(c, n, (), vector=True, reduces=(Reduce(most, "max", Load(line, c)),)),
                Store(buffers[4], i, most),
            )
            right = Operand(buffers[2], const(0), blocks=name)
            kernel = Kernel("one", tuple(buffers), (line,), (), (Contract(i, j, m, n, k, left, right, acc, epilogue, rows),))
            (y, largest), status = run(kernel, [x, r, panels, None, None], replace(target, threads=threads))
            assert status == 0
            np.testing.assert_array_equal(y.reshape(m, n), want)
            np.testing.assert_array_equal(largest, want.max(1))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_is_rounded_once_by_a_thread_that_fetches_weights_meanwhile(ahead, monkeypatch):
    """`run` adds KEPT for one of its two orders of tasks."""
    monkeypatch.setattr(products, "fetches_ahead", lambda features: ahead)
    name, n, k = "q4_k", 4096, 256
    w, x = packed_of(name, weights(name, n, k)), activations(1, k)
    buffers = Buffer("x", f32, k), Buffer("w", u8, w.size), Buffer("y", f32, n, True)
    i, j, r, q, acc = (Var(v, t) for v, t in zip("ijrqc", (*[i64] * 4, f32)))
    plain, doubled = Operand(buffers[0], const(0), k, 1), Computed(r, q, kx.mul(Load(buffers[0], q), 2.0), f32)
    for left in (plain, doubled):
        right, found = Operand(buffers[1], const(0), blocks=name), []
        kernel = Kernel("one", buffers, (), (), (Contract(i, j, 1, n, k, left, right, acc, (Store(buffers[2], j, acc),)),))
        for threads in (1, 4):
            target = replace(TARGETS["host"], threads=threads)
            rendered = render(kernel, target, "kernel")
            integers = dot_of(target, "u8 i8", side=1) is not None
            assert rendered.tasks > threads or threads == 1
            assert rendered.keeps == (KEPT if threads > 1 and (left is doubled or integers) else 0)
            assert rendered.streamed == (2 if ahead else 0)
            found.append(run(kernel, [x, w, None], target, spoiled=[0] if rendered.keeps else [])[0][0].tobytes())
        assert found[0] == found[1]


def made_up(group: int) -> Format:
    """5-bit integers in pairs of nibbles with their high bits in order, and nibbles of a scale and a min for each group."""
    groups = 64 // group
    return Format(
        "made_up", 64, 44 + groups, Integers((Bits(4, 16, ((32, 8), (2, 4))), Bits(1, 272, ((8, 8), (8, 1))))), 5,
        (42 + groups, 0), Integers((Bits(4, 336, ((groups, 8),)),)), Integers((Bits(4, 340, ((groups, 8),)),)),
    )  # fmt: skip


def by_hand(block: np.ndarray, group: int) -> list[float]:
    data = block.tobytes()
    factor, scale = (np.frombuffer(data, np.float16, 1, at)[0].astype(np.float32) for at in (0, 42 + 64 // group))
    out = []
    for e in range(64):
        q = (data[2 + e // 2] >> e % 2 * 4 & 15) | (data[34 + e // 8] >> e % 8 & 1) << 4
        both = data[42 + e // group]
        out.append(scale * np.float32(both & 15) * np.float32(q - 5) - factor * np.float32(both >> 4))
    return out


@pytest.mark.parametrize("group", [32, 64])
def test_a_new_format_is_one_entry(group, monkeypatch):
    """Arrays, elements, packing, products and look-ups follow from it. No panel has groups of 64 elements: then it is decoded."""
    form = made_up(group)
    monkeypatch.setitem(FORMATS, "made_up", form)
    w = weights("made_up", 40, 128)
    exact = form.decode_rows(w)
    assert exact.tolist() == [[*by_hand(a, group), *by_hand(b, group)] for a, b in w.reshape(40, 2, -1)]
    g, x, ids = Graph("made up"), activations(3, 128), np.array([39, 0, 7], np.int32)
    a, table = g.input("x", x.shape, f32), g.param("w", w.shape, u8)
    rows = dequantize(rlx.gather(table, g.input("ids", ids.shape, "i32"), axis=0), format="made_up", columns=128)
    product_of = dequant_matmul(a, table, format="made_up")
    g.set_outputs([rows, product_of])
    claim = quant.claim(product_of.node)
    assert claim is None if group == 32 else "groups of [64, 64]" in (claim or "")
    for device in ("cpu", "ref"):
        compiled = rlx.Session(device).compile(g)
        assert ("pack_quant(out" in str(compiled.program())) == (group == 32 and device == "cpu")
        compiled.set_param("w", w)
        found, y = compiled.run({"x": x, "ids": ids})
        np.testing.assert_array_equal(found, exact[ids])
        bound = 1.01 * rounding_bound(x, exact) + 2e-6 * np.abs(x) @ np.abs(exact).T
        assert (np.abs(y - x @ exact.T.astype(np.float64)) <= bound).all()


def test_panels_of_other_sizes():
    """A backend says how many rows a panel has and how many elements a step; no bit is lost whatever it says."""
    for rows, step in ((1, 32), (8, 64), (16, 256)):
        panel = Panel(FORMATS["q5_k"], rows, step)
        assert panel.fault() is None and panel.packed.nbytes == rows * (FORMATS["q5_k"].nbytes + 4)
    for step, word in ((48, "steps of 48"), (16, "steps of 16"), (0, "steps of 0")):
        with pytest.raises(AttributeValueError, match=word):
            pack_quant(Graph("bad").param("w", (2, 144), u8), format="q4_k", rows=32, step=step)
    with pytest.raises(AttributeValueError, match="at least one row, not 0"):
        pack_quant(Graph("bad").param("w", (2, 144), u8), format="q4_k", rows=0, step=32)
