"""Products of 8-bit floats and integers, and of f32 rounded to TF32, on the tensor cores of NVIDIA GPUs."""

from __future__ import annotations

import re
from itertools import product as pairs

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")

from test_cuda import on_gpu

import rlx
from rlx.backends.cuda import turned as turning
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.fma import FmaLaunch
from rlx.backends.cuda.gemv import GemvLaunch
from rlx.backends.cuda.gemv_ring import RingLaunch
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.backends.cuda.transpose import TileLaunch
from rlx.backends.cuda.warps import WarpLaunch
from rlx.compiler import lower
from rlx.ir.kernel import Contract, Kernel
from rlx.ir.kernel_parse import parse_kernel
from rlx.ir.kernel_text import print_kernel
from rlx.ir.program import Program

E4M3, E5M2 = "f8e4m3", "f8e5m2"
TF32 = rlx.CompileOptions(precision="tf32")
ARCHITECTURES = ("sm_80", "sm_89", "sm_90a", "sm_100")


def matmul(m: int, k: int, n: int, left: str, right: str, turned: tuple[bool, bool] = (False, True)) -> rlx.Graph:
    """x @ w, both inputs. `turned`: x is stored [k, m], w [n, k]."""
    g = rlx.Graph("product")
    x, w = g.input("x", (k, m) if turned[0] else (m, k), left), g.input("w", (n, k) if turned[1] else (k, n), right)
    multiply = rlx.int8_matmul if (left, right) == ("u8", "i8") else rlx.matmul
    g.set_outputs([multiply(x.T if turned[0] else x, w.T if turned[1] else w)])
    return g


def kernel(g: rlx.Graph, arch: str, options: rlx.CompileOptions = rlx.CompileOptions()) -> Kernel:  # noqa: B008  it is frozen
    (step,) = lower(g, target(arch), options).steps
    return step.kernel


def instructions(text: str) -> set[str]:
    """The products of a kernel, as PTX has them; of mma.sync those that its body calls."""
    body = text[text.index('extern "C"') :]
    named = dict(re.findall(r'RLX_PRODUCT\((\w+), \w+, "\w", "\w+\.row\.col\.(\S+)"\)', text))
    own = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n\d+(k\d+\.\S+) ", text)
    return {*own, *(named[name] for name in re.findall(r"rlx_product_(\w+)\(", body))}


PRODUCTS = {  # operands -> the products on sm_80, sm_89 and sm_100, sm_90a
    (E4M3, E4M3): ("f32.f16.f16.f32", "f32.e4m3.e4m3.f32", "k32.f32.e4m3.e4m3"),
    (E5M2, E4M3): ("f32.f16.f16.f32", "f32.e5m2.e4m3.f32", "k32.f32.e5m2.e4m3"),
    ("bf16", E4M3): ("f32.bf16.bf16.f32", "f32.bf16.bf16.f32", "k16.f32.bf16.bf16"),
    ("f16", E5M2): ("f32.f16.f16.f32", "f32.f16.f16.f32", "k16.f32.f16.f16"),
    ("u8", "i8"): ("s32.u8.s8.s32", "s32.u8.s8.s32", "k32.s32.u8.s8"),
    ("i8", "i8"): ("s32.s8.s8.s32", "s32.s8.s8.s32", "k32.s32.s8.s8"),
    ("f32", "f32"): ("f32.tf32.tf32.f32", "f32.tf32.tf32.f32", "k8.f32.tf32.tf32"),
}


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("dtypes", PRODUCTS, ids=" ".join)
def test_products_take_the_instruction_of_their_dtypes(dtypes, arch):
    """Each warp of a WarpLaunch loads either operand by code of its own, so that two of the four pairs of layouts have it all."""
    first, later, hopper = PRODUCTS[dtypes]
    wanted = {"sm_80": first, "sm_90a": hopper}.get(arch, later)
    for turned in pairs((False, True), repeat=2):
        found = launch_of(kernel(matmul(96, 176, 208, *dtypes, turned=turned), arch, TF32), arch)
        assert type(found) is (TensorLaunch if arch == "sm_90a" else WarpLaunch)
        text = text_of(found, "kernel")
        assert instructions(text) == {wanted}
        assert (arch != "sm_90a" and turned[0] == turned[1]) or cubin(text, arch)


def test_odd_strides_stay_on_tensor_cores():
    for dtypes in PRODUCTS:
        for arch in ("sm_80", "sm_90a"):
            found = launch_of(kernel(matmul(50, 101, 67, *dtypes), arch, TF32), arch)
            assert type(found) in (TensorLaunch, WarpLaunch) and cubin(text_of(found, "kernel"), arch)


def test_threads_make_tiles_of_weights_that_bulk_copies_bring():
    """8-bit floats to be widened, and f32 whose rows are contiguous. Other strides take loads of threads, or mma.sync."""
    for dtypes, turned in ((("bf16", E4M3), True), (("f16", E5M2), False), (("f32", "f32"), False)):
        found = launch_of(kernel(matmul(512, 1024, 512, *dtypes, turned=(False, turned)), "sm_90a", TF32))
        assert isinstance(found, TensorLaunch) and found.sides[1].raw and found.copying == 1 and len(found.maps) == 2
        assert found.tiling.raw == found.tiling.columns * (64 if dtypes[1] != "f32" else 128) and found.shared <= 227 << 10
        text = text_of(found, "kernel")
        assert "fetch_raw(turn + 3" in text and cubin(text, "sm_90a")
    plain = launch_of(kernel(matmul(512, 1024, 512, "f32", "f32"), "sm_90a", TF32))
    assert isinstance(plain, TensorLaunch) and not plain.sides[1].raw
    odd = launch_of(kernel(matmul(512, 1001, 512, "f32", "f32", turned=(False, False)), "sm_90a", TF32))
    assert isinstance(odd, TensorLaunch) and odd.sides[1].raw and not odd.sides[0].tensor
    assert type(launch_of(kernel(matmul(512, 1001, 512, "bf16", E4M3), "sm_90a"))) is WarpLaunch


def test_right_operands_are_turned_where_that_saves_time():
    """Where many rows read one: in each run, or before the first if it is known then. The copy has a place in the arena."""

    def lowered(m: int, param: bool, dtype: str = "f32", depth: int = 4096) -> Program:
        g = rlx.Graph("product")
        w = (g.param if param else g.input)("w", (depth, 4096), dtype)
        g.set_outputs([g.input("x", (m, depth), dtype) @ w])
        return lower(g, target("sm_90a"), TF32)

    for dtype in ("f32", E4M3):
        given, known, few = lowered(4096, False, dtype), lowered(4096, True, dtype), lowered(32, False, dtype)
        assert (len(given.steps), len(known.prepare), len(known.steps), len(few.steps)) == (2, 1, 1, 1)
        assert given.plan.size_bytes - known.plan.size_bytes >= 4096 * 4096 * rlx.as_dtype(dtype).itemsize
        for program in (given, known):
            last = launch_of(program.steps[-1].kernel)
            assert isinstance(last, TensorLaunch) and last.copying == 1 and not last.by_threads
        assert isinstance(launch_of(given.steps[0].kernel), TileLaunch)
    assert not lowered(4096, True, "bf16").prepare  # whose tensor cores take both
    assert len(lowered(1024, True, "f32", 4095).prepare) == 0  # neither order has rows that bulk copies take


def test_f32_is_rounded_only_where_it_is_asked_for():
    for arch in ARCHITECTURES:
        plain, asked = (kernel(matmul(96, 176, 208, "f32", "f32"), arch, o) for o in (rlx.CompileOptions(), TF32))
        assert type(launch_of(plain, arch)) is FmaLaunch and "tf32" not in print_kernel(plain)
        assert parse_kernel(print_kernel(asked)).body[0].tf32 and not parse_kernel(print_kernel(plain)).body[0].tf32
    for dtypes in (("bf16", "f32"), ("f64", "f64"), ("f16", "f16")):
        (c,) = kernel(matmul(96, 176, 208, *dtypes), "sm_90a", TF32).body
        assert isinstance(c, Contract) and not c.tf32


def test_the_cpu_has_the_same_bits_with_permission_to_round():
    g, rng = matmul(33, 65, 40, "f32", "f32"), np.random.default_rng(0)
    given = {"x": rng.standard_normal((33, 65), np.float32), "w": rng.standard_normal((40, 65), np.float32)}
    plain, asked = (rlx.Session("cpu").compile(g, o).run(given)[0] for o in (rlx.CompileOptions(), TF32))
    np.testing.assert_array_equal(plain, asked)


def test_sums_of_8_bit_floats_are_kept_outside_the_tensor_cores():
    """Those of 128 elements, which one stage has, at most. Tiles leave registers for both sums."""
    for arch in ("sm_89", "sm_90a"):
        found = launch_of(kernel(matmul(4096, 4096, 4096, E4M3, E4M3), arch), arch)
        text = text_of(found, "kernel")
        assert re.search(r"sum\[0\]\S*\[n\] \+= \S*part\[0\]", text)
    assert "part[0]" not in text_of(launch_of(kernel(matmul(4096, 4096, 4096, "i8", "i8"), "sm_90a"), "sm_90a"), "kernel")


# -- weights of 8 bits ---------------------------------------------------------------------------------------------


def scaled(rows: int, cast: str, left: str = "bf16", result: str = "bf16") -> rlx.Graph:
    """x @ convert(w).T * scale, as fp8 checkpoints are used."""
    g = rlx.Graph("scaled")
    w = g.param("w", (512, 1024), E4M3).astype(cast)
    g.set_outputs([(g.input("x", (rows, 1024), left) @ w.T) * g.param("scale", (512,), result)])
    return g


@pytest.mark.parametrize(("rows", "kind"), [(1, RingLaunch), (8, GemvLaunch), (64, TensorLaunch)])
def test_converted_weights_are_read_in_8_bits(rows, kind):
    program = lower(scaled(rows, "bf16"), target("sm_90a"), rlx.CompileOptions())
    assert not program.phases["prepare"], "no converted copy is kept"
    (step,) = program.steps
    (c,) = step.kernel.body
    assert c.b.dtype == rlx.f8e4m3 and len(step.kernel.origin) == 2 and type(launch_of(step.kernel)) is kind
    assert cubin(text_of(launch_of(step.kernel), "kernel"), "sm_90a")


def test_a_conversion_stays_where_the_product_would_change():
    for more in ((E5M2,), ("f16", "bf16", "f32"), ("f32", "f32", "f32")):  # not exact; an f32 result; two sizes of operands
        g = scaled(8, *more)
        assert lower(g, target("sm_90a"), rlx.CompileOptions()).phases["prepare"]
    off = rlx.CompileOptions(disable=("quantised",))
    assert lower(scaled(8, "bf16"), target("sm_90a"), off).phases["prepare"]


# -- on a GPU ------------------------------------------------------------------------------------------------------


def drawn(rng: np.random.Generator, dims: tuple[int, ...], dtype: str) -> np.ndarray:
    host = rlx.as_dtype(dtype).numpy
    if host.kind in "iu":
        return rng.integers(np.iinfo(host).min, np.iinfo(host).max + 1, dims, host)
    return rng.standard_normal(dims).astype(host)


def error(m: int, k: int, n: int, left: str, right: str, turned: tuple[bool, bool] = (False, True)) -> float:
    """The largest error of a result, as a part of the sum of the magnitudes of its products."""
    rng, g = np.random.default_rng(m + k + n), matmul(m, k, n, left, right, turned)
    given = {v.node.name: drawn(rng, v.shape.static, v.dtype.name) for v in g.inputs}
    x, w = (a.astype(np.float64).T if turn else a.astype(np.float64) for a, turn in zip(given.values(), turned))
    compiled = rlx.Session("cuda").compile(g, TF32)
    (found,), (again,) = compiled.run(given), compiled.run(given)
    assert found.tobytes() == again.tobytes()
    return float((np.abs(found.astype(np.float64) - x @ w) / (np.abs(x) @ np.abs(w))).max())


CASES = [  # sizes, and which operands are stored transposed
    ((300, 1008, 528), (False, True)), ((1000, 4096, 208), (False, False)), ((40, 528, 96), (True, True)),
    ((101, 333, 67), (True, False)),
]  # fmt: skip


@on_gpu
@pytest.mark.parametrize("dtypes", [(a, b) for a in (E4M3, E5M2) for b in (E4M3, E5M2)], ids=" ".join)
def test_products_of_8_bit_floats_are_within_their_bound(dtypes):
    for shape, turned in CASES:
        assert error(*shape, *dtypes, turned) < 2.0**-11


@on_gpu
@pytest.mark.parametrize("dtypes", [("bf16", E4M3), ("f16", E5M2), ("f32", E4M3)], ids=" ".join)
def test_products_with_8_bit_weights_are_rounded_once(dtypes):
    bits = {"bf16": 8, "f16": 11, "f32": 20}[dtypes[0]]
    few = [((1, 4096, 512), (False, True)), ((8, 4096, 512), (False, False)), ((3, 1001, 333), (False, True))]
    for shape, turned in [*CASES, *few]:
        assert error(*shape, *dtypes, turned) < 2.0**-bits


@on_gpu
def test_rounded_f32_is_within_its_bound():
    """Both operands of a product are off by 2^-11 at most."""
    for shape, turned in CASES:
        assert error(*shape, "f32", "f32", turned) < 2.0**-10


@on_gpu
@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), ("f32", "f32"), ("u8", "i8"), ("bf16", "bf16")], ids=" ".join)
def test_turned_operands_give_the_same(monkeypatch, dtypes):
    """Where it saves nothing, too, and of several matrices."""
    monkeypatch.setenv("RLX_CACHE", "0")
    monkeypatch.setattr(turning, "MANY", 0)
    for (m, depth, n), across in CASES:
        assert error(m, depth, n, *dtypes, (across[0], False)) < (2.0**-8 if dtypes[0] == "bf16" else 2.0**-10)
    rng, g = np.random.default_rng(0), rlx.Graph("several")
    x, w = g.input("x", (3, 40, 80), dtypes[0]), g.input("w", (3, 80, 47), dtypes[1])
    g.set_outputs([rlx.int8_matmul(x, w) if dtypes[0] == "u8" else (x @ w).astype("f32")])
    given = {v.node.name: drawn(rng, v.shape.static, v.dtype.name) for v in g.inputs}
    compiled = rlx.Session("cuda").compile(g, TF32)
    wide = [a.astype(np.float64) for a in given.values()]
    np.testing.assert_allclose(compiled.run(given)[0], wide[0] @ wide[1], rtol=0.01, atol=0.1)
    assert len(compiled._executable.program.steps) == 2


@on_gpu
@pytest.mark.parametrize("dtypes", [("u8", "i8"), ("i8", "i8"), ("u8", "u8")], ids=" ".join)
def test_products_of_bytes_are_exact(dtypes):
    for (m, k, n), turned in CASES:
        rng, g = np.random.default_rng(k), matmul(m, k, n, *dtypes, turned=turned)
        given = {v.node.name: drawn(rng, v.shape.static, v.dtype.name) for v in g.inputs}
        x, w = (a.astype(np.int32).T if turn else a.astype(np.int32) for a, turn in zip(given.values(), turned))
        (found,) = rlx.Session("cuda").compile(g).run(given)
        np.testing.assert_array_equal(found, (x @ w).astype(found.dtype))
