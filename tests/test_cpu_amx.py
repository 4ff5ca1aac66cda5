"""Contractions on the matrix unit: on machines with AVX-512 by an emulator in place of its instructions, and as assembly."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import emulated_amx
import kernel_runs
import ml_dtypes
import numpy as np
import pytest
import test_cpu_attention as attention
import test_cpu_contract as plain
import test_cpu_conv as windows
import test_cpu_quant as packed
import test_rounding as rounding
from emulated_amx import Unit
from kernel_runs import TARGETS, TRIPLE

import rlx
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.kernels import amx, contract, tiles
from rlx.backends.cpu.target import target_for
from rlx.backends.ref.interpret import run_kernel
from rlx.backends.shared.rounding import in_fewer
from rlx.compiler import lower
from rlx.host import jit, llvm
from rlx.host.processor import machine_of
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import DType, bf16, f32, i8, i32, u8
from rlx.ir.evaluate import evaluate
from rlx.ir.kernel import Buffer, Kernel, Load, Local, Loop, Operand, Store, Var, k, linear
from rlx.ir.target import Target

HOST = [f for f in machine_of(TARGETS["host"])[2].replace("+", "").split(",") if "amx" not in f]
AMX = ("amx-tile", "amx-bf16", "amx-int8")
SHAPES = [
    (8, 32, 64), (16, 31, 64), (17, 97, 128), (32, 16, 64), (33, 40, 192), (150, 64, 64), (50, 40, 1664), (50, 260, 1088),
]  # fmt: skip
KINDS = {"bf16": (bf16, bf16, f32), "u8 i8": (u8, i8, i32)}

pytestmark = pytest.mark.skipif(bool(why := emulated_amx.lacking()), reason=why)


def with_amx(threads: int = 1) -> Target:
    return target_for(TRIPLE, "x86-64-v4", [*HOST, *AMX], threads)


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Unit]:
    """Code with the unit's instructions runs here."""
    compiled = plain._compiled, attention.compiled, kernel_runs._function
    for kept in compiled:  # on a machine with the unit: without the emulator
        kept.cache_clear()
    monkeypatch.setattr(llvm, "code", emulated_amx.code)
    monkeypatch.setattr(jit, "missing_features", lambda features: ())
    yield (made := Unit())
    for kept in compiled:
        kept.cache_clear()
    assert not made.faults


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("a", ["rows", "padded", "columns"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("threads", "least"), [(1, 0), (2, 99)], ids=["the epilogue beside products", "after them"])
def test_emulated(
    emulator: Unit, shape: tuple[int, int, int], a: str, kind: str, threads: int, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlx.backends.cpu.kernels.product.HEAVY", least)
    target = with_amx(threads)
    panel, group = target.panel(kind)
    assert panel == 32
    plain.check_product(plain.product(*shape, a=a, dtypes=KINDS[kind], panel=panel, group=group), target)
    assert emulator.products and emulator.released


@pytest.mark.parametrize(
    ("kind", "depth", "threads", "by_rows"),
    [("u8 i8", 384, 2, True), ("u8 i8", 384, 4, False), ("bf16", 384, 2, False), ("bf16", 192, 2, True)],
)
def test_threads_share_rows_if_results_are_more_bytes_than_weights(
    emulator: Unit, kind: str, depth: int, threads: int, by_rows: bool
) -> None:
    target = with_amx(threads)
    panel, group = target.panel(kind)
    kernel = plain.product(128, 96, depth, dtypes=KINDS[kind], panel=panel, group=group)
    made = tiles.plan(kernel, kernel.body[0], target)
    assert made.groups == (1 if by_rows else 3) and (made.blocks == threads or not by_rows)
    plain.check_product(kernel, target)
    assert emulator.products and emulator.released


def of_rows(m: int, n: int, depth: int, target: Target) -> Kernel:
    """A product of bytes whose results are stored when rows are complete."""
    panel, group = target.panel("u8 i8")
    plainly = plain.product(m, n, depth, dtypes=KINDS["u8 i8"], panel=panel, group=group)
    (c,), out, line, at = plainly.body, plainly.buffers[-1], Local("line", i32, n, per_row=True), Var("at")
    rows = Loop(at, n, (Store(out, linear([(c.i, n), (at, 1)]), Load(line, at)),), vector=True)
    return replace(plainly, locals=(line,), body=(replace(c, epilogue=(Store(line, c.j, c.acc),), rows=(rows,)),))


@pytest.mark.parametrize(("threads", "rows", "tasks"), [(2, 32, 2), (4, 32, 4), (8, 16, 8), (16, 16, 8)])
def test_tiles_are_lower_where_threads_would_have_no_rows(emulator: Unit, threads: int, rows: int, tasks: int) -> None:
    target = with_amx(threads)
    kernel = of_rows(128, 96, 192, target)
    made = tiles.plan(kernel, kernel.body[0], target)
    assert (made.rows, made.tasks) == (rows, tasks)
    assert made.ahead  # also by the only tile of a panel: each thread reads all panels
    plain.check_product(kernel, target)
    assert emulator.products and emulator.released


@pytest.mark.parametrize(("n", "blocks"), [(96, 8), (32, 6)], ids=["four tasks of a tile", "two tasks"])
def test_blocks_have_one_height_if_six_threads_end_sooner(emulator: Unit, n: int, blocks: int) -> None:
    """Eight tiles of rows. In six blocks, two of which have two tiles, a thread may have three tasks of two tiles, or one."""
    target = with_amx(6)
    panel, group = target.panel("bf16")
    kernel = plain.product(128, n, 192, dtypes=KINDS["bf16"], panel=panel, group=group)
    made = tiles.plan(kernel, kernel.body[0], target)
    assert (made.row_tiles, made.blocks) == (8, blocks)
    plain.check_product(kernel, target)
    assert emulator.products and emulator.released


@pytest.mark.parametrize(("m", "depth", "rows"), [(128, 3072, 16), (128, 3104, 32), (160, 1536, 16), (160, 3072, 32)])
def test_deep_products_of_few_rows_have_low_tiles(m: int, depth: int, rows: int) -> None:
    panel, group = with_amx(4).panel("bf16")
    kernel = plain.product(m, 64, depth, dtypes=KINDS["bf16"], panel=panel, group=group)
    assert tiles.plan(kernel, kernel.body[0], with_amx(4)).rows == rows


@pytest.mark.parametrize(("cache", "blocks"), [(190_000, 2), (220_000, 1), (300_000, 2)], ids=["no room", "far", "near"])
def test_one_thread_reads_far_weights_once_if_all_rows_fit_the_cache(emulator: Unit, cache: int, blocks: int) -> None:
    """262,144 bytes of weights, 163,840 of rows."""
    target = replace(with_amx(), core_cache_bytes=cache)
    kernel = of_rows(64, 512, 512, target)
    assert tiles.plan(kernel, kernel.body[0], target).blocks == blocks
    plain.check_product(kernel, target)
    assert emulator.products and emulator.released


@pytest.mark.parametrize("least", [0, 99], ids=["the epilogue beside products", "after them"])
def test_bytes_are_rounded_and_read_again(emulator: Unit, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The epilogue of a Q/DQ network: two roundings and an activation between them, beside a byte of a residual."""
    monkeypatch.setattr("rlx.backends.cpu.kernels.product.HEAVY", least)
    target = with_amx()
    panel, group = target.panel("u8 i8")
    plainly = plain.product(50, 40, 128, dtypes=KINDS["u8 i8"], panel=panel, group=group)
    (c,) = plainly.body
    out, rest = Buffer("c", u8, 50 * 40, True), Buffer("r", u8, 50 * 40)
    at = c.epilogue[0].index
    inner = rounding.number(rounding.byte(k.mul(k.cast(c.acc, f32), 3e-4), 117, u8), 0.03, 117)
    sums = k.max(k.add(inner, rounding.number(Load(rest, at), 0.05, 3)), 0.0)
    body = replace(c, epilogue=(Store(out, at, rounding.byte(k.div(sums, 0.04), 0, u8)),))
    kernel = replace(plainly, buffers=(*plainly.buffers[:2], rest, out), body=(body,))
    given = {b.name: plain.numbers(b.size, b.dtype, n) for n, b in enumerate(kernel.buffers[:3])}
    found = plain.run(in_fewer(kernel), target, given)["c"]
    want = np.zeros(out.size, np.uint8)
    run_kernel(kernel, [*given.values(), want])
    assert (found == want).all() and len(set(want.tolist())) > 100
    assert emulator.products


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("a", ["rows", "padded", "columns", "every other"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(8, 32, 31), (17, 97, 65), (33, 300, 770), (100, 50, 385), (50, 40, 1678), (40, 70, 77)])
def test_any_depth(emulator: Unit, shape: tuple[int, int, int], threads: int, a: str, kind: str) -> None:
    """One block of sums and several; k in parts; a last step of one group, of whole ones, and with a part of a group."""
    target = with_amx(threads)
    panel, group = target.panel(kind)
    plain.check_product(plain.product(*shape, a=a, dtypes=KINDS[kind], panel=panel, group=group), target)
    assert emulator.products and emulator.released


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("b", ["rows", "columns", "padded"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [(8, 16, 31), (17, 97, 64), (33, 70, 385), (150, 50, 770), (50, 40, 1664), (20, 300, 76)])
def test_a_right_operand_made_in_the_run(
    emulator: Unit, shape: tuple[int, int, int], threads: int, b: str, kind: str
) -> None:
    target = with_amx(threads)
    plain.check_product(plain.product(*shape, b=b, dtypes=KINDS[kind]), target)
    assert emulator.products and emulator.released


@pytest.mark.parametrize("a", ["rows", "padded"])
@pytest.mark.parametrize("shape", [(33, 70, 385), (33, 70, 386), (40, 300, 770), (16, 40, 41)], ids=str)
def test_what_lies_behind_a_row_does_not_come_in(emulator: Unit, shape: tuple[int, int, int], a: str) -> None:
    """Rows of NaN beside others, NaN between rows, and a first row of every panel but the first that is infinite."""
    m, n, depth, target = *shape, with_amx()
    panel, group = target.panel("bf16")
    kernel = plain.product(*shape, a=a, dtypes=KINDS["bf16"], panel=panel, group=group)
    (c,) = kernel.body
    assert isinstance(c.a, Operand) and isinstance(c.b, Operand)
    left = np.full(c.a.buffer.size, np.nan, bf16.numpy)
    inside = np.add.outer(c.a.row_stride * np.arange(0, m, 2), np.arange(depth))
    left[inside] = plain.numbers(inside.shape, bf16, 0)
    right = plain.numbers(c.b.buffer.size, bf16, 1).reshape(-1, -(-depth // group), panel, group)
    right[1:, 0], right[:, depth // group :, :, depth % group :] = np.inf, 0
    got = plain.run(kernel, target, {"a": left, "b": right.reshape(-1)})["c"].reshape(m, n)
    assert np.isfinite(got[::2, :panel]).all() and np.isnan(got[1::2]).all() and not np.isfinite(got[:, panel:]).any()
    assert emulator.products


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 40, 64), (1, 40, 65), (20, 40, 9), (20, 40, 0)], ids=str)
def test_one_row_and_small_depths_go_without(emulator: Unit, shape: tuple[int, int, int], kind: str) -> None:
    target = with_amx()
    panel, group = target.panel(kind)
    plain.check_product(plain.product(*shape, dtypes=KINDS[kind], panel=panel, group=group), target)
    assert not emulator.products


@pytest.mark.parametrize("kind, rows", [("bf16", 2), ("u8 i8", 4)])
@pytest.mark.parametrize("n, depth", [(40, 64), (40, 65), (70, 333), (64, 1024)])
def test_few_rows(emulator: Unit, kind: str, rows: int, n: int, depth: int) -> None:
    """Vectors multiply fewer; an undefined row at the end of a tile is dropped."""
    target = with_amx()
    panel, group = target.panel(kind)
    for m in range(rows - 1, 8):
        before = emulator.products
        plain.check_product(plain.product(m, n, depth, dtypes=KINDS[kind], panel=panel, group=group), target)
        assert (emulator.products > before) == (m >= rows)


@pytest.mark.parametrize("shape", [(1, 2, 1, 40, 70, 32), (1, 1, 1, 12, 300, 48, 20), (1, 1, 1, 33, 270, 96)], ids=str)
@pytest.mark.parametrize("how", [{}, {"mask": "causal"}, {"mask": "sliding_window", "window": 9}, {"cap": 2.0}], ids=str)
def test_emulated_attention(emulator: Unit, shape: tuple[int, ...], how: dict[str, object]) -> None:
    q, k, v = attention.operands(*shape, dtype=attention.BF16)
    attention.check(attention.attend(q, k, v, target=with_amx(2), **how), attention.expected(q, k, v, **how), 2e-2)
    assert emulator.products and emulator.released


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 7, 7, 64, 70, 3, 3), (2, 5, 9, 32, 33, 1, 2, 2), (1, 4, 12, 16, 64, 2, 2, 1, 2)], ids=str)
def test_windows_of_an_image(emulator: Unit, shape: tuple[int, ...], kind: str) -> None:
    """Rows and columns in levels are copied as tiles, whatever rows of the image they come from."""
    plain.check_product(windows.convolution(windows.Shape(*shape), with_amx(), KINDS[kind]), with_amx())
    assert emulator.products and emulator.released


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 7, 7, 9, 70, 3, 3), (2, 5, 9, 33, 33, 1, 2, 2), (1, 4, 12, 19, 64, 2, 2, 1, 2)], ids=str)
def test_windows_of_any_number_of_channels(emulator: Unit, shape: tuple[int, ...], kind: str) -> None:
    plain.check_product(windows.convolution(windows.Shape(*shape), with_amx(), KINDS[kind]), with_amx())
    assert emulator.products and emulator.released


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "shape", [(2, 3, 14, 64, 70, 3, 3), (1, 2, 57, 64, 33, 2, 3, 2), (1, 3, 37, 128, 30, 3, 3, 1, 2), (1, 2, 9, 64, 300, 3, 3)],
    ids=str,
)
def test_windows_are_read_where_they_lie(emulator: Unit, shape: tuple[int, ...], kind: str) -> None:
    """A tile has rows of one row of the image; of two tiles in it, the second may begin with the last row of the first."""
    target = with_amx()
    kernel = windows.convolution(windows.Shape(*shape), target, KINDS[kind])
    made = windows.plan_of(kernel, target)
    assert made.matrix == amx.SIDE and not made.stage_a and made.segment == shape[2]
    plain.check_product(kernel, target)
    assert emulator.products and emulator.released


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("shape", "step"),
    [
        ((1, 2, 17, 24, 40, 3, 1), 12), ((2, 3, 14, 16, 33, 3, 3, 2), 12), ((1, 9, 30, 40, 24, 1, 1), 10),
        ((1, 9, 40, 4, 40, 3, 3), 6),
    ],
)  # fmt: skip
def test_steps_are_as_long_as_divides_the_depth(emulator: Unit, shape: tuple[int, ...], step: int, kind: str) -> None:
    """From six groups on: also runs of elements of windows are whole steps."""
    target, channels = with_amx(), shape[3] * (2 if kind == "u8 i8" else 1)
    kernel = windows.convolution(windows.Shape(*shape[:3], channels, *shape[4:]), target, KINDS[kind])
    assert windows.plan_of(kernel, target).matrix == step
    plain.check_product(kernel, target)
    assert emulator.products and emulator.released


@pytest.mark.parametrize(("kind", "instruction"), [("bf16", "tdpbf16ps"), ("u8 i8", "tdpbusd")])
def test_assembly(kind: str, instruction: str) -> None:
    """Of full tiles: four products for four loads, and the unit is given back before the kernel returns."""
    target = with_amx()
    panel, group = target.panel(kind)
    kernel = plain.product(256, 64, 512, dtypes=KINDS[kind], panel=panel, group=group)
    text = jit.assembly(contract.render(kernel, target, "mm").text, target)
    names = instruction, "tileloadd", "tileloaddt1", "tilestored", "tilezero"
    assert [text.count(f"\t{name}\t") for name in names] == [4, 2, 2, 4, 4]
    assert text.count("\tldtilecfg\t") == text.count("\ttilerelease\n") == 1


def test_the_knob_leaves_the_unit_alone() -> None:
    """Whether this machine has one or not; panels are then as wide as other tiles want them."""
    code = "from rlx.backends import get; t = get('cpu').target(0, 1); "
    code += "print([f for f in t.features if 'amx' in f], *t.panel('f32'))"
    environment = {**os.environ, "RLX_AMX": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.split() in (["[]", "48", "1"], ["[]", "16", "1"])


@pytest.mark.parametrize("sizes", [[5, 9, 16, 0, 17, 33, 1], [0, 70], [140, 12]], ids=str)
@pytest.mark.parametrize("depth", [64, 70, 83])
@pytest.mark.parametrize("least", [0, 99], ids=["the epilogue beside products", "after them"])
def test_groups_of_rows(emulator: Unit, sizes: list[int], depth: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a group are one block or two high, with undefined rows at the end."""
    monkeypatch.setattr("rlx.backends.cpu.kernels.product.HEAVY", least)
    target, rng, rows = with_natives(with_amx(2)), np.random.default_rng(0), sum(sizes)
    g = rlx.Graph("groups")
    x, order, ends = g.input("x", (rows, depth), bf16), g.input("order", (rows,), i32), g.input("ends", (len(sizes),), i32)
    w = g.param("w", (len(sizes), depth, 72), bf16)
    g.set_outputs([rlx.segment_matmul(rlx.gather(x, order), w, ends).astype(f32)])
    given = {"x": rng.standard_normal((rows, depth)), "order": rng.permutation(rows), "ends": np.cumsum(sizes)}
    given = {v.node.name: given[v.node.name].astype(v.dtype.numpy) for v in g.inputs}
    weights = rng.standard_normal(w.shape.static).astype(bf16.numpy)
    found = lower(g, target, rlx.CompileOptions())
    memory = {b.id: np.zeros(b.shape.num_elements, b.shape.dtype.numpy) for b in found.buffers}
    memory |= {id: a.reshape(-1) for id, a in zip((*found.inputs, *found.params), (*given.values(), weights))}
    for step in found.prepare:
        run_kernel(step.kernel, [memory[a] for a in step.args])
    (step,) = found.steps
    out = {b.name for b in step.kernel.buffers if b.writable}
    named = {b.name: memory[a] for a, b in zip(step.args, step.kernel.buffers) if b.name not in out}
    (got,) = (a for name, a in plain.run(step.kernel, target, named).items() if name in out)
    want = evaluate(g, given, {"w": weights})[0][0]
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=2e-2 * float(np.abs(want).max()))
    assert emulator.products and emulator.released


def check_quantised(name: str, x: np.ndarray, n: int, **places) -> None:
    """x and the weights are rounded to bf16: each of a product's factors is off by at most 2**-8 of its magnitude."""
    w = packed.weights(name, n, x.shape[1])
    got, exact = packed.product(name, x, w, with_amx(2), **places).astype(np.float64), FORMATS[name].decode_rows(w)
    wide, exact = x.astype(np.float64), exact.astype(np.float64)
    stored = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11}[x.dtype.name] * np.abs(got)
    assert (np.abs(got - wide @ exact.T) <= 2.01 * 2**-8 * np.abs(wide) @ np.abs(exact).T + stored).all()


@pytest.mark.parametrize("name", FORMATS)
def test_quantised_weights(emulator: Unit, name: str) -> None:
    """One chunk of a panel and several, with and without a shorter last one; tiles of equal height, and of two."""
    block = FORMATS[name].block
    for m, n, blocks in ((32, 33, 2), (70, 64, 608 // block), (49, 8, 256 // block)):
        check_quantised(name, packed.activations(m, blocks * block), n)
    assert emulator.products and emulator.released


@pytest.mark.parametrize("bits", [0x7E00, 0x7FFF, 0xFFFF], ids=hex)
@pytest.mark.parametrize("name", ["q4_0", "q4_k"])
def test_a_scale_that_is_nan_makes_its_column_nan(emulator: Unit, name: str, bits: int) -> None:
    """Whatever its other bits are: rounding to bf16 adds to them."""
    w = packed.weights(name, 20, 256)
    at = FORMATS[name].numbers[0]
    w[3, at : at + 2] = np.array([bits], np.uint16).view(np.uint8)
    got = packed.product(name, packed.activations(32, 256), w, with_amx(1))
    assert np.isnan(got[:, 3]).all() and np.isfinite(np.delete(got, 3, axis=1)).all()
    assert emulator.products


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_quantised_weights_and_places_of_x(emulator: Unit, dtype: Any) -> None:
    x = packed.activations(40, 288, dtype=dtype)
    check_quantised("q4_0", x, 37)
    check_quantised("q4_0", x, 37, turned=True)
    check_quantised("q4_0", packed.activations(3 * 33, 288, dtype=dtype), 37, dims=(3, 33))
    assert emulator.products


@pytest.mark.parametrize(("m", "exact"), [(31, False), (64, True)])
def test_few_rows_and_exact_ones_are_not_rounded_to_bf16(emulator: Unit, m: int, exact: bool) -> None:
    x, w = packed.activations(m, 64), packed.weights("q8_0", 40, 64)
    packed.product("q8_0", x, w, with_amx(), exact=exact)
    assert not emulator.products


def test_quantised_weights_with_operand_epilogue_and_rows(emulator: Unit) -> None:
    packed.check_operand_epilogue_and_rows("q4_0", with_amx(), (40,))
    assert emulator.products


@pytest.mark.parametrize("sizes", [[140, 12], [0, 33, 90]], ids=str)
def test_quantised_groups_of_rows(emulator: Unit, sizes: list[int]) -> None:
    """Groups of any size, each with quantised weights of its own."""
    target, rng, rows, form = with_natives(with_amx(2)), np.random.default_rng(0), sum(sizes), FORMATS["q8_0"]
    g = rlx.Graph("groups")
    x, ends = g.input("x", (rows, 320), f32), g.input("ends", (len(sizes),), i32)
    w = g.param("w", (len(sizes), 72, form.row_bytes(320)), u8)
    g.set_outputs([rlx.segment_matmul(x, w, ends, format="q8_0")])
    rounded = rng.standard_normal((rows, 320)).astype(bf16.numpy).astype(np.float32)
    given = {"x": rounded, "ends": np.cumsum(sizes).astype(np.int32)}
    blocks = packed.weights("q8_0", len(sizes) * 72, 320).reshape(w.shape.static)
    panels = np.stack([packed.packed_of("q8_0", part) for part in blocks])
    (step,) = lower(g, target, rlx.CompileOptions()).steps
    by_dtype = {"f32": rounded, "i32": given["ends"], "u8": panels}
    values = [None if b.writable else by_dtype[b.dtype.name] for b in step.kernel.buffers]
    (got,), status = kernel_runs.run(step.kernel, values, target)
    want = evaluate(g, given, {"w": blocks})[0][0]
    assert status == 0 and emulator.products
    np.testing.assert_allclose(got.reshape(want.shape), want, atol=4e-3 * float(np.abs(want).max()))


@pytest.mark.parametrize(("rows", "dtype"), [(64, bf16), (31, f32)])
def test_x_is_stored_as_the_unit_reads_it(rows: int, dtype: DType) -> None:
    """The kernel that computes x for two products rounds it to bf16 once, where their kernels would; their results stay f32."""
    g = rlx.Graph("two")
    x = g.input("x", (rows, 64), f32)
    h = x * x.max(axis=-1, keepdims=True)
    ys = [rlx.dequant_matmul(h, g.param(f"w{n}", (40, 68), u8), format="q8_0") for n in range(2)]
    g.set_outputs(ys)
    found = lower(g, with_natives(with_amx(2)), rlx.CompileOptions())
    first, *products = (s.kernel for s in found.steps)
    assert [b.dtype for b in first.buffers if b.writable] == [dtype] and len(products) == 2
    assert all({b.dtype for b in k.buffers} == {dtype, u8, f32} for k in products)


@pytest.mark.parametrize("shape", [(20, 40, 64), (50, 260, 576), (20, 40, 71), (50, 260, 602)], ids=str)
def test_a_computed_left_operand_is_computed_as_tiles(emulator: Unit, shape: tuple[int, int, int]) -> None:
    plain.check_computed(*shape, with_amx(2), KINDS["bf16"], batch=2)
    assert emulator.products


@pytest.mark.parametrize("least", [0, 99], ids=["the epilogue beside products", "after them"])
@pytest.mark.parametrize("k", [64, 71])
def test_rows_past_the_limit_are_spared(emulator: Unit, k: int, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before it are as in a full run; tiles past it are not computed."""
    monkeypatch.setattr("rlx.backends.cpu.kernels.product.HEAVY", least)
    m, n, target = 75, 40, with_amx(2)
    x, t = np.random.default_rng(0).standard_normal((m, k)).astype("f4"), np.zeros(k, "f4")
    w = plain.numbers(64 * (k + k % 2), bf16, 1)
    given = {"x": x, "at": np.arange(m, dtype=np.int32), "t": t, "w": w, "u": np.zeros(n, "f4")}
    kernel = plain.computed_kernel(m, n, k, KINDS["bf16"], panel=32, group=2, limit=True)
    results = {}
    for rows in (0, 1, 26, 60, m):
        results[rows] = got = plain.run(kernel, target, {**given, "count": np.array([rows])})["c"].reshape(m, n)
        assert np.isfinite(got[:rows]).all()
        assert np.isnan(got[rows + 31 :]).all(), "rows of other tiles were written"
    for rows, got in results.items():
        assert got[:rows].tobytes() == results[m][:rows].tobytes()
