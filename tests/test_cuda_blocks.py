"""Products with quantised weights on CUDA: which kernel they get, the bits that lanes read, and results on a GPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.blocks import Turn, of_lane
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.gemv_blocks import BlocksLaunch
from rlx.backends.cuda.gpu import refusal
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.backends.shared.packed import PANEL, STEP, panel
from rlx.compiler import lower
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import as_dtype
from rlx.ir.kernel import Kernel
from rlx.ir.ops.quant import random_weights

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")
on_gpu = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")
TOLERANCE = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}  # of the largest element: the last rounding, of f32 sums otherwise


def product(form: str, m: int, n: int, k: int, dtype: str = "f32", norm: bool = False, exact: bool = False) -> rlx.Graph:
    """relu(norm(x) @ w.T) + z"""
    g = rlx.Graph("product")
    x, w = g.input("x", (m, k), dtype), g.param("w", (n, FORMATS[form].row_bytes(k)), "u8")
    y = rlx.rms_norm(x, g.param("s", (k,), dtype)) if norm else x
    g.set_outputs([rlx.relu(rlx.dequant_matmul(y, w, format=form, exact=exact)) + g.input("z", (m, n), dtype)])
    return g


def kernels(g: rlx.Graph, steps: str = "steps") -> list[Kernel]:
    return [s.kernel for s in getattr(lower(g, target("sm_90a"), rlx.CompileOptions()), steps)]


# -- without a GPU -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_is_one_kernel_with_norm_and_epilogue(form):
    (kernel,) = kernels(product(form, 2, 100, 512, "f32", norm=True))
    at = launch_of(kernel)
    assert type(at) is BlocksLaunch and at.columns == 6  # an f32 number is three of bf16
    assert cubin(text_of(at, "kernel"), "sm_90a")


@pytest.mark.parametrize("form", FORMATS)
def test_one_row_is_multiplied_as_digits_of_integers(form):
    for dtype, k_ in (("f32", FORMATS[form].block), ("bf16", 4096), ("f16", 3072)):
        (kernel,) = kernels(product(form, 1, 100, k_, dtype))
        at = launch_of(kernel)
        assert type(at) is BlocksLaunch and at.digits and at.columns == 3
        text = text_of(at, "kernel")
        assert "s32.u8.s8.s32" in text and cubin(text, "sm_90a")
        assert "__align__(128) unsigned char rlx_shared" in text and at.ring_at % 128 == at.slot % 128 == 0  # of bulk copies
        (kernel,) = kernels(product(form, 1, 100, k_, dtype, exact=True))
        at = launch_of(kernel)
        assert isinstance(at, BlocksLaunch) and not at.digits


def test_one_row_is_loaded_once_and_in_front_of_most_weights():
    (kernel,) = kernels(product("q4_k", 1, 8448, 4096, norm=True))
    at = launch_of(kernel)
    assert isinstance(at, BlocksLaunch) and at.digits and at.shares == 1 and at.slots > 1
    text = text_of(at, "kernel")
    body = text[text.rindex('extern "C"') :]
    paced, waits = body.index("if (!rlx_ring_paced(filled + ahead - 1, waited)) break;"), body.index("if (early) rlx_begin();")
    row, rest = body.rindex("rlx_fetch<8>("), body.index(f"ahead < {at.slots}; ahead++) fetch(begin + ahead);")
    assert paced < waits < body.index("*waited = 1;") < row < rest < body.index("rlx_reduce<")
    assert body.count("rlx_fetch<") == 2  # the row and the weights of its norm, once each
    (kernel,) = kernels(product("q4_k", 1, 1024, 4096, norm=True))
    at = launch_of(kernel)
    assert isinstance(at, BlocksLaunch) and at.shares > 1
    text = text_of(at, "kernel")  # a block loads its part of the row, but squares all of it
    assert "rlx_fetch<4>(" in text[text.rindex('extern "C"') :] and cubin(text, "sm_90a") and cubin(text, "sm_80")


def test_several_blocks_share_a_long_sum():
    (kernel,) = kernels(product("q4_k", 1, 1024, 14336, "bf16"))
    at = launch_of(kernel)
    assert isinstance(at, BlocksLaunch) and at.shares > 1 and at.shares * at.turns * STEP >= 14336
    assert at.counters == 2 * at.panels * at.shares * PANEL  # a word for each sum
    text = text_of(at, "kernel")
    assert f"rlx_hear<{at.shares - 1}>" in text and cubin(text, "sm_90a") and cubin(text_of(at, "kernel"), "sm_80")


@pytest.mark.parametrize("form", ["q8_0", "q4_k", "q6_k"])
def test_one_copy_brings_the_pieces_of_several_warps(form):
    """They lie behind each other, in whole blocks; a place of the ring is of one team of warps."""
    for m, k_ in ((1, 4096), (1, 14336), (8, 2816), (1, 256)):
        (kernel,) = kernels(product(form, m, 1000, k_))
        at = launch_of(kernel)
        assert isinstance(at, BlocksLaunch) and at.turns % at.inner == 0 and at.slots % at.teams == 0
        assert at.stage == at.whole // at.inner * at.panel.packed.nbytes and at.shared * at.resident <= 227 << 10
        assert cubin(text_of(at, "kernel"), "sm_90a") and cubin(text_of(at, "kernel"), "sm_80")


@pytest.mark.parametrize("form", FORMATS)
def test_many_rows_decode_in_the_copying_warps(form):
    dtype, step = {"q8_0": ("f16", 32), "q4_0": ("bf16", 32)}.get(form, ("f32", 256))
    (kernel,) = kernels(product(form, 200, 1000, 3 * step, dtype))
    at = launch_of(kernel)
    assert type(at) is TensorLaunch
    text = text_of(at, "kernel")
    assert f"rlx_decode_turn<{str(dtype == 'f16').lower()}>" in text and cubin(text, "sm_90a")


def test_exact_products_and_older_gpus_keep_f32():
    (exact,) = kernels(product("q8_0", 200, 1000, 512, exact=True))
    at = launch_of(exact)
    assert isinstance(at, BlocksLaunch) and at.passes > 1
    (plain,) = kernels(product("q8_0", 200, 1000, 512))
    old = launch_of(plain, "sm_80")
    assert isinstance(old, BlocksLaunch) and cubin(text_of(old, "kernel"), "sm_80")


def test_three_to_32_rows_of_f32_are_rounded_unless_exact():
    for m, columns in ((1, 3), (2, 6), (3, 3), (32, 32)):
        (kernel,) = kernels(product("q4_k", m, 1024, 1024))
        at = launch_of(kernel)
        assert isinstance(at, BlocksLaunch) and at.columns == columns and at.passes == 1
        (kernel,) = kernels(product("q4_k", m, 1024, 1024, exact=True))
        at = launch_of(kernel)
        assert isinstance(at, BlocksLaunch) and at.columns == 3 * at.rows


def plain(m: int, n: int, k: int, dtype: str = "bf16", weights: str = "") -> rlx.Graph:
    """relu(x @ w.T) + z"""
    g = rlx.Graph("product")
    w = rlx.transpose(g.param("w", (n, k), weights or dtype), (1, 0))
    g.set_outputs([rlx.relu(g.input("x", (m, k), dtype) @ w) + g.input("z", (m, n), dtype)])
    return g


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_some_rows_of_narrow_floats_pass_through_rings(dtype):
    for m, n, k_ in ((4, 1024, 1024), (8, 4096, 14336), (8, 28672, 4096), (5, 33, 64)):
        (kernel,) = kernels(plain(m, n, k_, dtype))
        at = launch_of(kernel)
        assert isinstance(at, BlocksLaunch) and at.plain and at.passes == 1 and at.slots >= 2
        assert at.blocks <= 132 * at.resident and at.shared * at.resident <= 227 << 10
        assert kernel.buffers[at.maps[0].argument].size == n * k_ == kernel.buffers[at.early].size
        assert cubin(text_of(at, "kernel"), "sm_90a")


def gated(form: str, m: int, n: int, k: int) -> rlx.Graph:
    """silu(x @ gate) * (x @ up), of one matrix that holds both; `form`: of quantised weights, or bf16."""
    g = rlx.Graph("gated")
    packed, dtype = form in FORMATS, "f32" if form in FORMATS else form
    columns = FORMATS[form].row_bytes(k) if packed else k
    x, w = g.input("x", (m, k), dtype), g.param("w", (2 * n, columns), "u8" if packed else form)
    both = rlx.dequant_matmul(x, w, format=form) if packed else x @ rlx.transpose(w, (1, 0))
    gate, up = both[:, :n].astype("f32"), both[:, n:].astype("f32")
    g.set_outputs([(gate / (1.0 + rlx.exp(-gate)) * up).astype(dtype)])
    return g


GATED = [
    ("q4_k", 1, 14336, 4096), ("q8_0", 1, 3072, 1024), ("q6_k", 1, 32, 512), ("q4_0", 3, 640, 1024), ("q4_k", 8, 1024, 2816),
    ("q4_k", 1, 1024, 14336), ("bf16", 4, 3072, 1024), ("bf16", 8, 96, 14336),
]  # fmt: skip


@pytest.mark.parametrize(("form", "m", "n", "k"), GATED)
def test_gate_and_up_are_panels_in_turns(form, m, n, k):
    (kernel,) = kernels(gated(form, m, n, k))
    at = launch_of(kernel)
    assert isinstance(at, BlocksLaunch) and at.both == 2 and at.panels == n // PANEL and at.shared * at.resident <= 227 << 10
    assert cubin(text_of(at, "kernel"), "sm_90a")


def test_panels_that_hold_both_halves_are_no_pairs():
    assert len(kernels(gated("q4_k", 1, 1000, 1024))) == len(kernels(gated("bf16", 4, 1000, 1024))) == 2
    assert len(kernels(gated("q4_k", 200, 1024, 1024))) == 2  # tiles of many rows take no pairs of quantised weights


def test_rings_are_refused_where_bulk_copies_cannot_fetch_the_rows():
    for m, n, k_, arch in (
        (1, 1024, 1024, "sm_90a"), (9, 1024, 1024, "sm_90a"), (8, 1024, 1000, "sm_90a"), (8, 31, 64, "sm_90a"),
        (8, 1024, 1024, "sm_80"),
    ):  # fmt: skip
        (kernel,) = kernels(plain(m, n, k_))
        assert type(launch_of(kernel, arch)) is not BlocksLaunch, (m, n, k_, arch)


def test_all_blocks_are_at_once_on_a_gpu():
    for m in (1, 8, 32):
        for n in (4096, 6144, 28672, 128256):
            (kernel,) = kernels(product("q4_k", m, n, 4096))
            at = launch_of(kernel)
            assert isinstance(at, BlocksLaunch) and at.blocks <= at.resident * 132


def test_weights_are_packed_ahead_of_runs():
    assert [k.origin for k in kernels(product("q8_0", 1, 64, 64), "prepare")] == [("pack_quant",)]


def test_what_no_claimed_kernel_takes_is_decoded():
    unaligned = product("q8_0", 1, 100, 40)
    assert not any(type(launch_of(k)) is BlocksLaunch for k in kernels(unaligned))
    g = rlx.Graph("computed")  # weights that are not known before runs
    g.set_outputs([rlx.dequant_matmul(g.input("x", (1, 32), "f32"), g.input("w", (8, 34), "u8"), format="q8_0")])
    assert not any(type(launch_of(k)) is BlocksLaunch for k in kernels(g))


@pytest.mark.parametrize("form", FORMATS)
def test_lanes_read_the_integers_of_their_rows(form):
    """The text of a lane's four integers, evaluated, against the format's own positions."""
    p, rng = panel(form), np.random.default_rng(0)
    raw = rng.integers(0, 256, p.packed.nbytes + 4 * PANEL, np.uint8)
    place = lambda text, t: eval(text.replace("/", "//"), {"t": t})  # noqa: E731
    turns = [Turn(p), *(Turn(p, part) for part in range(2 // Turn(p).groups))]  # also as units of digits
    for turn, row in ((turn, row) for turn in turns for row in (0, 1, 6, 31)):
        want = p.packed.q.read(raw[4 * row :][: p.packed.nbytes])
        for n, t, half in ((n, t, half) for n in range(p.plain.block // STEP) for t in range(4) for half in range(2)):
            first = p.turns_at + n * p.turn_bytes + p.dwords_at + 4 * row
            at = [first + place(of_lane(dwords), t) * 4 * PANEL for _, dwords in turn.loads]
            held = SimpleNamespace(q=[[int(raw[i : i + 4].view("<u4")[0])] for i in at])
            word = eval(turn.word(half).replace("u)", ")").replace("/", "//"), {"a": held, "t": t, "row": 0}) & 0xFFFFFFFF
            begin = n * STEP + 4 * turn.runs(half)[t]
            assert [word >> 8 * i & 255 for i in range(4)] == want[begin : begin + 4].tolist()


# -- on a GPU ------------------------------------------------------------------------------------------------------


def check(form: str, m: int, n: int, k: int, dtype: str = "f32", norm: bool = False, exact: bool = False, tolerance=None) -> None:
    rng = np.random.default_rng(m * n + k)
    compiled, numpy = rlx.Session("cuda").compile(product(form, m, n, k, dtype, norm, exact)), as_dtype(dtype).numpy
    w = np.zeros((n, FORMATS[form].row_bytes(k)), np.uint8)
    random_weights(FORMATS[form])(rng, [w, w])
    compiled.set_param("w", w)
    x, z = rng.standard_normal((m, k)).astype(numpy), rng.standard_normal((m, n)).astype(numpy)
    wide = x.astype(np.float64)
    if norm:
        scale = rng.standard_normal(k).astype(numpy)
        compiled.set_param("s", scale)
        wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * scale.astype(np.float64)
        wide = wide.astype(numpy).astype(np.float64)
    want = np.maximum(wide @ FORMATS[form].decode_rows(w, k).astype(np.float64).T, 0) + z.astype(np.float64)
    (found,) = compiled.run({"x": x, "z": z})
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=0, atol=(tolerance or TOLERANCE[dtype]) * np.abs(want).max())
    assert np.array_equal(found, compiled.run({"x": x, "z": z})[0])


@on_gpu
@pytest.mark.parametrize("form", FORMATS)
def test_few_rows_of_every_format(form):
    check(form, 1, 96, FORMATS[form].block)
    check(form, 3, 1003, 1024, "bf16", norm=True)
    check(form, 8, 33, 4096, "f16")
    check(form, 40, 65, 512, "f32", exact=True)
    check(form, 8, 100, 1024, "f32", norm=True, tolerance=6e-3)
    check(form, 20, 100, 1024, "f32", tolerance=6e-3)  # rows are rounded to bf16
    # of a norm's row, whose greatest element is ten times the usual one: digits are off by 2^-23 of that
    check(form, 1, 1003, 4096, "f32", norm=True, tolerance=4e-6)
    check(form, 1, 500 * PANEL, 1024, "bf16", norm=True)
    check(form, 1, 2000, 14336, "f16")


@on_gpu
@pytest.mark.parametrize("form", FORMATS)
def test_many_rows_of_every_format(form):
    step = FORMATS[form].block
    check(form, 130, 1003, 3 * step, "bf16", norm=True)
    check(form, 300, 257, 1024, "f16", tolerance=2e-3)
    check(form, 64, 4100, 512, "f32", tolerance=6e-3)  # both operands are rounded to bf16


@on_gpu
@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize(("m", "n", "k"), [(4, 1003, 1024), (8, 96, 14336), (5, 33, 64), (8, 4096, 1536), (7, 260, 192)])
def test_some_rows_of_narrow_floats(m, n, k, dtype):
    rng, numpy = np.random.default_rng(m * n + k), as_dtype(dtype).numpy
    compiled = rlx.Session("cuda").compile(plain(m, n, k, dtype))
    x, w, z = (rng.standard_normal(dims).astype(numpy) for dims in ((m, k), (n, k), (m, n)))
    compiled.set_param("w", w)
    want = np.maximum(x.astype(np.float64) @ w.astype(np.float64).T, 0) + z.astype(np.float64)
    (found,) = compiled.run({"x": x, "z": z})
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=0, atol=TOLERANCE[dtype] * np.abs(want).max())
    assert np.array_equal(found, compiled.run({"x": x, "z": z})[0])


@on_gpu
def test_infinities_and_nan_stay_in_their_rows():
    w = np.zeros((32, 34), np.uint8)
    random_weights(FORMATS["q8_0"])(np.random.default_rng(0), [w, w])
    compiled = rlx.Session("cuda").compile(product("q8_0", 3, 32, 32))
    compiled.set_param("w", w)
    x = np.ones((3, 32), np.float32)
    x[0, 3], x[1, 5] = np.inf, np.nan
    (found,) = compiled.run({"x": x, "z": np.zeros((3, 32), np.float32)})
    assert not np.isfinite(found[0]).all() and np.isnan(found[1]).all() and np.isfinite(found[2]).all()


@on_gpu
@pytest.mark.parametrize(("form", "m", "n", "k"), [*GATED, ("q4_k", 20, 640, 1024), ("q5_k", 1, 20 * PANEL, 4096)])
def test_gate_and_up_of_panels(form, m, n, k):
    rng, compiled = np.random.default_rng(m * n + k), rlx.Session("cuda").compile(gated(form, m, n, k))
    if form in FORMATS:
        w = np.zeros((2 * n, FORMATS[form].row_bytes(k)), np.uint8)
        random_weights(FORMATS[form])(rng, [w, w])
        x, wide = rng.standard_normal((m, k)).astype(np.float32), FORMATS[form].decode_rows(w, k).astype(np.float64)
    else:
        x, w = (rng.standard_normal(dims).astype(as_dtype(form).numpy) for dims in ((m, k), (2 * n, k)))
        wide = w.astype(np.float64)
    compiled.set_param("w", w)
    (found,), (again,) = compiled.run({"x": x}), compiled.run({"x": x})
    assert found.tobytes() == again.tobytes()
    sums, scale = x.astype(np.float64) @ wide.T, np.abs(x.astype(np.float64)) @ np.abs(wide.T)
    (gate, up), (_, most) = np.split(sums, 2, axis=1), np.split(scale, 2, axis=1)
    off = np.abs(found.astype(np.float64) - gate * (0.5 + 0.5 * np.tanh(gate / 2)) * up)
    assert (off / (1 + scale[:, :n] * most)).max() < (2.0**-7 if m > 2 or form == "bf16" else 1e-5)
