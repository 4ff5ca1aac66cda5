"""Kernels of the CUDA backend compile for every architecture, without spills; products take the tensor cores that there are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")

import cuda_kernels

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import cubin, launch_of, ptx, text_of
from rlx.backends.cuda.contract import Tile
from rlx.backends.cuda.fma import FmaLaunch
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.backends.cuda.warps import Source, WarpLaunch
from rlx.compiler import lower
from rlx.ir.kernel import Kernel


def test_the_page_s_example_shows_the_code_of_every_kernel(capsys):
    page = (Path(__file__).parent.parent / "docs" / "cuda.md").read_text("utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(example, "docs/cuda.md", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.count('extern "C" __global__') == 2 and "rlx_reduce<32>" in shown and "rlx_product" in shown


def product(arch: str, m: int, k: int, n: int, dtype: str = "bf16", turned: tuple[bool, bool] = (False, False)) -> Kernel:
    g = rlx.Graph("product")
    x, y = g.input("x", (k, m) if turned[0] else (m, k), dtype), g.input("y", (n, k) if turned[1] else (k, n), dtype)
    g.set_outputs([rlx.gelu((x.T if turned[0] else x) @ (y.T if turned[1] else y))])
    (step,) = lower(g, target(arch), rlx.CompileOptions()).steps
    return step.kernel


@pytest.mark.parametrize(
    ("arch", "only", "least"), [("sm_90a", "", 500), ("sm_80", "model bert", 20), ("sm_100", "model bert", 20)]
)
def test_a_sample_of_kernels_compiles_without_spills(arch, only, least):
    built = cuda_kernels.kernels(arch, only, sample=True)
    assert len(built) >= least
    assert not cuda_kernels.faults(built, arch)


def test_a_kernel_that_spills_is_found():
    """So is one that keeps an array in local memory, or does not compile."""
    kernel = replace(launch_of(product("sm_80", 64, 64, 64), "sm_80"), threads=1024)
    hold = 'asm volatile("ld.global.f32 %0, [%1];" : "=f"(v[n]) : "l"(p + n));'
    give = 'asm volatile("st.global.f32 [%1], %0;" :: "f"(v[n]), "l"(p - n));'
    all_of = "#pragma unroll\nfor (int n = 0; n < 100; n++) "
    loop = "#pragma unroll 1\nfor (int n = 0; n < 64; n++) "
    bodies = {
        "spills": f"float v[100];\n{all_of}{hold}\n__syncthreads();\n{all_of}{give}",
        "local memory": f"float v[64];\n{loop}v[n] = p[n];\n{loop}v[(int)p[n] & 63] += 1;\n{loop}p[n] = v[n];",
        "NVRTC rejects it": "p[0] = nothing;",
    }
    for word, body in bodies.items():
        text = f'extern "C" __global__ void __launch_bounds__(1024) kernel(float* p) {{\n{body}\n}}\n'
        fine = cuda_kernels.Built("there", "fine", kernel, text_of(kernel, "fine"))  # in the same translation unit
        found = cuda_kernels.faults([cuda_kernels.Built("here", "kernel", kernel, text), fine], "sm_80")
        assert any(word in fault for fault in found) and all(fault.startswith("here") for fault in found), (word, found)


def test_code_is_shown_as_ptx():
    from rlx.backends import get

    text = text_of(launch_of(product("sm_90a", 256, 512, 384), "sm_90a"), "kernel")
    shown = ptx(text, "sm_90a")
    assert ".target sm_90a" in shown and ".visible .entry kernel(" in shown and "wgmma.mma_async" in shown
    backend = get("cuda")
    assert shown == backend.assembly(text, target("sm_90a")) and backend.assembly("// a collective", target("sm_90a")) == ""
    with pytest.raises(rlx.errors.CompileError, match="no PTX for sm_90a"):
        ptx("nothing", "sm_90a")


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_100", "sm_120"])
def test_products_of_other_architectures_take_their_tensor_cores(arch):
    for turned in ((False, False), (True, True)):
        for m, k, n in ((256, 512, 384), (101, 103, 105), (8, 64, 8)):
            found = launch_of(product(arch, m, k, n, turned=turned), arch)
            if m > 8 or not turned[0]:
                assert isinstance(found, WarpLaunch) == (m > 8), (m, turned)
            text = text_of(found, "kernel")
            assert "wgmma" not in text and cubin(text, arch)


def test_only_strides_of_whole_chunks_are_copied_asynchronously():
    def sources(m: int, k: int, n: int, **more) -> tuple[Source, ...]:
        found = launch_of(product("sm_80", m, k, n, **more), "sm_80")
        assert isinstance(found, WarpLaunch)
        return found.sources

    assert sources(64, 64, 64) == (Source(True, True), Source(False, True))
    assert sources(64, 64, 64, turned=(True, True)) == (Source(False, True), Source(True, True))
    assert sources(64, 60, 64) == (Source(True, False), Source(False, True))
    assert sources(64, 64, 63) == (Source(True, True), Source(False, False))


@pytest.mark.parametrize(("arch", "most"), [("sm_80", 163 << 10), ("sm_89", 99 << 10)])
def test_blocks_fit_into_the_shared_memory_of_their_architecture(arch, most):
    g = rlx.Graph("both")
    q = g.input("q", (1, 8, 200, 128), "f32")
    wide = [g.input(f"w{n}", (1, 2, 24, 256), "bf16") for n in range(3)]
    x, w = g.input("x", (8, 4096), "f32"), g.param("w", (512, 4096), "i8")
    weights = rlx.dequantize(g.param("p", (512, 4096 // 32 * 34), "u8"), format="q8_0", columns=4096)
    y = g.input("y", (2048, 4096), "bf16")
    g.set_outputs([rlx.attention(q, q, q), rlx.attention(*wide), x @ weights.T, x @ rlx.cast(w, "f32").T, y @ y.T])
    kernels = {s.kernel for steps in lower(g, target(arch), rlx.CompileOptions()).phases.values() for s in steps}
    held = [launch_of(kernel, arch).shared for kernel in kernels]
    assert max(held) <= most and max(launch_of(kernel, "sm_90a").shared for kernel in kernels) > most


def test_other_products_keep_their_kernels():
    assert type(launch_of(product("sm_90a", 64, 64, 64), "sm_90a")) is TensorLaunch
    assert type(launch_of(product("sm_80", 64, 64, 64, "f32"), "sm_80")) is FmaLaunch
    assert type(launch_of(product("sm_80", 64, 4, 64), "sm_80")) is Tile  # too few products for a tile of 32
