"""Results of the matrix unit that are stored as whole lines, large ones past the caches: with the same bits."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

import emulated_amx
import numpy as np
import pytest
import test_cpu_contract as plain
import test_cpu_conv as windows
from emulated_amx import Unit
from test_cpu_amx import KINDS, with_amx
from test_cpu_amx import emulator as emulator

import rlx
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.kernels import contract, tiles
from rlx.backends.cpu.kernels import product as modules
from rlx.backends.cpu.render import render
from rlx.backends.cpu.target import target_for
from rlx.compiler import lower
from rlx.host import jit
from rlx.ir.dtype import DType, bf16, f16, f32
from rlx.ir.kernel import Buffer, Expr, Kernel, Load, Store, k
from rlx.ir.target import Target

FAR, NEAR = 0, 1 << 30  # as tiles.KEPT_CACHES: caches keep no result, or all
SHAPES = [(64, 64, 1088), (50, 96, 640), (150, 128, 512), (33, 32, 1678), (96, 352, 64), (75, 64, 834), (64, 288, 1088)]
MM = "x86_64-unknown-linux-gnu", "sapphirerapids"

pytestmark = pytest.mark.skipif(bool(why := emulated_amx.lacking()), reason=why)


def product(m: int, n: int, depth: int, kind: str, dtype: DType | None, epilogue: str, target: Target) -> Kernel:
    """A product whose results are of this dtype, behind an epilogue."""
    panel, group = target.panel(kind)
    made = plain.product(m, n, depth, dtypes=KINDS[kind], panel=panel, group=group)
    (c,), out, at = made.body, made.buffers[-1], made.body[0].epilogue[0].index
    value: Expr = c.acc
    rest, bias = Buffer("r", f32, m * n), Buffer("t", f32, n)
    if epilogue == "residual":
        value = k.add(value, Load(rest, at))
    if epilogue == "gelu":
        value = k.add(value, Load(bias, c.j))
        value = k.mul(k.mul(value, 0.5), k.add(k.erf(k.mul(value, 0.7071)), 1.0))
    if dtype:
        out, value = Buffer("c", dtype, m * n, True), k.cast(value, dtype)
    body = (replace(c, epilogue=(Store(out, at, value),)),)
    return replace(made, buffers=(*made.buffers[:2], rest, bias, out), body=body)


def results(kernel: Kernel, target: Target) -> np.ndarray:
    given = {b.name: plain.numbers(b.size, b.dtype, n) for n, b in enumerate(kernel.buffers[:-1])}
    return plain.run(kernel, target, given)["c"]


def check_same(kernel: Kernel, target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits are those of ordinary stores, and of stores that are no whole lines."""
    found = []
    for caches in (NEAR, FAR):
        monkeypatch.setattr(tiles, "KEPT_CACHES", caches)
        text = contract.render(kernel, target, "mm").text
        assert ("nontemporal" in text) == ("sfence" in text) == (caches == FAR)
        found.append(results(kernel, target).tobytes())
    with monkeypatch.context() as patch:
        patch.setattr(modules, "results_in_lines", lambda *args: frozenset())
        found.append(results(kernel, target).tobytes())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [None, bf16, f16], ids=str)
@pytest.mark.parametrize("epilogue, threads", [("", 1), ("", 2), ("gelu", 1), ("residual", 2)])
def test_floats(
    emulator: Unit, shape: tuple[int, int, int], epilogue: str, dtype: DType | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tiles of equal height and of two heights, one tile, panels in one stretch of steps and in two, with a part of a step."""
    target = with_amx(threads)
    check_same(product(*shape, "bf16", dtype, epilogue, target), target, monkeypatch)
    assert emulator.products and emulator.released


@pytest.mark.parametrize("shape", [(64, 64, 2176), (50, 96, 1280), (33, 32, 78)], ids=str)
def test_integers(emulator: Unit, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    target = with_amx()
    check_same(product(*shape, "u8 i8", None, "", target), target, monkeypatch)
    plain.check_product(plain.product(*shape, dtypes=KINDS["u8 i8"], panel=32, group=4), target)
    assert emulator.products and emulator.released


@pytest.mark.parametrize("kind", KINDS)
def test_windows_of_an_image(emulator: Unit, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "KEPT_CACHES", FAR)
    target = with_amx()
    kernel = windows.convolution(windows.Shape(2, 3, 14, 64, 64, 3, 3), target, KINDS[kind])
    assert "nontemporal" in contract.render(kernel, target, "mm").text
    plain.check_product(kernel, target)
    assert emulator.products and emulator.released


def test_subnormal_results(emulator: Unit, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two vectors are rounded by one instruction, which would flush them."""
    monkeypatch.setattr(tiles, "KEPT_CACHES", FAR)
    target = with_amx()
    kernel = product(64, 64, 64, "bf16", bf16, "residual", target)
    rest = np.random.default_rng(0).integers(0, 1 << 23, 64 * 64, np.uint32).view(np.float32)
    given = {b.name: np.zeros(b.size, b.dtype.numpy) for b in kernel.buffers[:-1]}
    for where in (slice(None), slice(0, None, 7), slice(16, 32)):
        given["r"] = np.zeros_like(rest)
        given["r"][where] = rest[where]
        got = plain.run(kernel, target, given)["c"]
        assert got.tobytes() == given["r"].astype(bf16.numpy).tobytes()


def test_which_results_go_past_the_caches() -> None:
    """Those of which a thread's share is more than two caches, whose rows are whole lines, and that are not read again."""

    def streams(m: int, n: int, threads: int, dtype: DType | None = bf16, changes: Mapping[str, object] | None = None) -> bool:
        target = replace(with_amx(threads), core_cache_bytes=2 << 20)
        kernel = replace(product(m, n, 128, "bf16", dtype, "", target), **(changes or {}))
        return any(tiles.past_caches(b, target) for b in tiles.results_in_lines(kernel, kernel.body[0], 32))

    assert streams(4096, 1024, 1) and not streams(2048, 1024, 1) and streams(2048, 1024, 1, None)
    assert not streams(4096, 1024, 2) and streams(8192, 1024, 2)
    assert not streams(8192, 1000, 1) and streams(8192, 1008, 1, None)
    kernel = product(1024, 1024, 128, "bf16", None, "residual", with_amx())
    (c,), out = kernel.body, kernel.buffers[-1]
    again = replace(c, epilogue=(Store(out, at := c.epilogue[0].index, k.add(c.acc, Load(out, at))),))
    assert not tiles.results_in_lines(replace(kernel, body=(again,)), again, 32)


def assembly(m: int, n: int, depth: int, kind: str, act: str) -> str:
    """Of the product of a graph, on a processor with a cache of 2 MB."""
    target = with_natives(replace(target_for(*MM), core_cache_bytes=2 << 20))
    g = rlx.Graph("product")
    if kind == "bf16":
        y = g.input("x", (m, depth), bf16) @ g.param("w", (depth, n), bf16)
        y = rlx.gelu(y) if act == "gelu" else y + g.input("r", (m, n), bf16) if act == "residual" else y
    else:
        y = rlx.ir.ops.int8_matmul(g.input("x", (m, depth), "u8"), g.param("w", (depth, n), "i8"))
    g.set_outputs([y])
    (step,) = lower(g, target, rlx.CompileOptions()).steps
    return jit.assembly(render(step.kernel, target, "mm").text, target)


@pytest.mark.parametrize(
    ("shape", "kind", "act", "how"),
    [
        ((1024, 3072, 768), "bf16", "", "past"), ((1024, 3072, 768), "bf16", "gelu", "past"),
        ((1024, 3072, 768), "bf16", "residual", "past"), ((2048, 1024, 1024), "u8 i8", "", "past"),
        ((512, 3072, 768), "bf16", "", "lines"), ((128, 384, 1536), "bf16", "", "lines"),
        ((512, 3072, 768), "bf16", "gelu", ""), ((512, 3072, 768), "bf16", "residual", ""), ((2048, 1000, 1024), "bf16", "", ""),
    ],
)  # fmt: skip
def test_assembly(shape: tuple[int, int, int], kind: str, act: str, how: str) -> None:
    """LLVM keeps the stores as they are meant. Of the loop's two stretches, the second leaves nothing in the L1 cache."""
    text = assembly(*shape, kind, act)
    stores, past = re.findall(r"\tvmovnt(?:ps|dq|pd)\t%zmm", text), how == "past"
    assert bool(stores) == past and text.count("\tsfence\n") == past
    if kind == "bf16":
        assert ("vcvtne2ps2bf16" in text) == bool(how) and ("vcvtneps2bf16" in text) != bool(how)
        assert shape[1] % 32 or [text.count(f"\t{x}\t") for x in ("tdpbf16ps", "tileloadd")] == ([8, 2] if how else [4, 6])
    between = re.search(r"tdpbf16ps\t%tmm7, %tmm5, %tmm3(.*?)\ttilestored", text, re.DOTALL)
    if kind == "bf16" and act == "":
        assert between and ("vcvtne2ps2bf16" in between[1]) == bool(how), "results are written between products"
