"""Products, attention and quantised products against numpy on two threads: on this processor, and on emulated aarch64 processors.

Under the emulator (tests/emulated.py) the compiler, the linker, the pool of threads and the kernels are those of an aarch64
machine: one with every instruction that kernels use, one with dot products alone, and one with neither. Only LLVM's part of the
compiler runs on the host (tests/host_llvm.py): it writes the same code, and would take most of the time.
"""

from __future__ import annotations

import re
import subprocess

import host_llvm
import numpy as np
import pytest
from emulated import Unavailable, emulated

import rlx
from rlx.host.llvm import compiler_version
from rlx.host.processor import host_features
from rlx.ir.blocks import FORMATS

PROCESSORS = {"max": "neon fullfp16 dotprod fp16fml i8mm bf16", "cortex-a76": "neon fullfp16 dotprod", "cortex-a57": "neon"}
ROWS = (1, 21)
F = np.float32


def normal(*dims: int) -> np.ndarray:
    return np.random.default_rng(sum(dims)).standard_normal(dims).astype(F)


def ran(g: rlx.Graph, inputs: dict[str, np.ndarray], params: dict[str, np.ndarray]) -> list[np.ndarray]:
    compiled = rlx.Session("cpu").compile(g, rlx.CompileOptions(threads=2))
    for name, array in params.items():
        compiled.set_param(name, array)
    return [np.asarray(x, F) for x in compiled.run(inputs)]


def test_products_of_floats() -> None:
    """Both dtypes hold the same numbers, so that one product in float64 says what is right."""
    g, w = rlx.Graph("floats"), normal(70, 300).astype(rlx.bf16.numpy)
    xs = {rows: normal(rows, 70).astype(rlx.bf16.numpy) for rows in ROWS}
    inputs, params, outputs = {}, {}, []
    for dtype in (rlx.f32, rlx.bf16):
        params[f"w_{dtype}"] = w.astype(dtype.numpy)
        right = g.param(f"w_{dtype}", w.shape, dtype)
        for rows, x in xs.items():
            inputs[f"x{rows}_{dtype}"] = x.astype(dtype.numpy)
            outputs.append(rlx.cast(g.input(f"x{rows}_{dtype}", x.shape, dtype) @ right, rlx.f32))
    g.set_outputs(outputs)
    for found, (name, x) in zip(ran(g, inputs, params), inputs.items(), strict=True):
        sums, magnitude = x.astype(float) @ w.astype(float), np.abs(x.astype(float)) @ np.abs(w.astype(float))
        np.testing.assert_array_less(np.abs(found - sums), magnitude * (2e-6 if name.endswith("f32") else 2**-8), name)


def test_products_of_integers() -> None:
    random = np.random.default_rng(1)
    w = random.integers(-128, 128, (91, 75), np.int8)
    g, inputs = rlx.Graph("integers"), {f"x{rows}": random.integers(0, 256, (rows, 91), np.uint8) for rows in ROWS}
    right = g.param("w", w.shape, "i8")
    g.set_outputs([rlx.int8_matmul(g.input(name, x.shape, "u8"), right) for name, x in inputs.items()])
    for found, x in zip(ran(g, inputs, {"w": w}), inputs.values(), strict=True):
        np.testing.assert_array_equal(found, x.astype(int) @ w.astype(int))


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_convolutions(groups: int) -> None:
    """Of windows read where they lie, and in groups of 4 channels and of one; numbers are small and whole, and sums exact."""
    random, g, inputs, params = np.random.default_rng(groups), rlx.Graph("convolutions"), {}, {}
    x, w = random.integers(0, 9, (2, 9, 13, 16)), random.integers(-8, 9, (3, 3, 16 // groups, 16))
    for dtypes in (("f32", "f32"), ("bf16", "bf16"), ("u8", "i8")):
        (inputs[f"x_{dtypes[0]}"], params[f"w_{dtypes[0]}"]) = (a.astype(rlx.as_dtype(d).numpy) for a, d in zip((x, w), dtypes))
    made = []
    for (name, a), (weights, b) in zip(inputs.items(), params.items()):
        left, right = g.input(name, a.shape, rlx.as_dtype(a.dtype)), g.param(weights, b.shape, rlx.as_dtype(b.dtype))
        made.append(rlx.conv(left, right, strides=2, low=1, high=1, groups=groups, channels_last=True).astype(rlx.f32))
    g.set_outputs(made)
    seen = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))), (3, 3), (1, 2))[:, ::2, ::2]
    seen = seen.reshape(*seen.shape[:3], groups, -1, 3, 3)
    want = np.einsum("nhwgcij,ijcgo->nhwgo", seen, w.reshape(3, 3, -1, groups, 16 // groups)).reshape(*seen.shape[:3], 16)
    for found, name in zip(ran(g, inputs, params), inputs, strict=True):
        np.testing.assert_allclose(found, want, rtol=2**-8 if name == "x_bf16" else 0, err_msg=name)


@pytest.mark.parametrize("form", ["int8", "q4_k"])
def test_quantised_products(form: str) -> None:
    """The bound is that of an x rounded to 127 steps; kernels without integer instructions stay far below it."""
    blocks, columns = FORMATS[form], 512
    packed = np.random.default_rng(2).integers(0, 256, (70, columns // blocks.block * blocks.nbytes), np.uint8)
    for at in blocks.numbers:  # f16 scales: small ones
        packed.reshape(-1, blocks.nbytes)[:, at : at + 2] = np.frombuffer(F(0.01).astype(np.float16).tobytes(), np.uint8)
    w = blocks.decode_rows(packed).astype(float)
    g, inputs = rlx.Graph("quantised"), {f"x{rows}": normal(rows, columns) for rows in ROWS}
    right = g.param("w", packed.shape, "u8")
    g.set_outputs([rlx.dequant_matmul(g.input(name, x.shape, "f32"), right, format=form) for name, x in inputs.items()])
    for found, x in zip(ran(g, inputs, {"w": packed}), inputs.values(), strict=True):
        bound = np.abs(x).max(axis=1, keepdims=True) / 254 * np.abs(w).sum(axis=1) + 1e-3
        np.testing.assert_array_less(np.abs(found - x.astype(float) @ w.T), bound)


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_attention(dtype: str) -> None:
    """A causal prompt, and one row of queries over as many keys."""
    g, kind = rlx.Graph("attention"), np.dtype(F) if dtype == "f32" else rlx.bf16.numpy
    q, k, v = (normal(1, heads, 40, 32).astype(kind) for heads in (4, 2, 2))
    values = [g.input(name, x.shape, dtype) for name, x in zip("qkv", (q, k, v))]
    last = g.input("last", (1, 4, 1, 32), dtype)
    g.set_outputs([rlx.cast(rlx.attention(x, *values[1:], mask="causal"), rlx.f32) for x in (values[0], last)])
    prompt, one = ran(g, {"q": q, "k": k, "v": v, "last": q[:, :, -1:]}, {})
    wide = [np.repeat(x.astype(float), n, axis=1) for x, n in ((q, 1), (k, 2), (v, 2))]
    scores = wide[0] @ wide[1].swapaxes(2, 3) / 32**0.5 + np.triu(np.full((40, 40), -np.inf), 1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    want = weights / weights.sum(axis=-1, keepdims=True) @ wide[2]
    np.testing.assert_allclose(prompt, want, rtol=0, atol=1e-5 if dtype == "f32" else 2e-2)
    np.testing.assert_allclose(one, want[:, :, -1:], rtol=0, atol=1e-5 if dtype == "f32" else 2e-2)


def test_rounding_to_bf16() -> None:
    """To nearest even, subnormals kept, NaN quiet: any bits, among them ties and the ends of the range."""
    ends = [0, 1, 0x7FFF, 0x8000, 0x18000, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FFFFFFF, 0x807FFFFF]
    bits = np.array([*ends, *np.random.default_rng(3).integers(0, 1 << 32, 10_000)], np.uint32)
    x, wide = bits.view(F), bits.astype(np.uint64)
    want = np.where(np.isnan(x), (wide | 0x400000) >> 16, (wide + 0x7FFF + (wide >> 16 & 1)) >> 16)
    g = rlx.Graph("rounded")
    g.set_outputs([rlx.cast(g.input("x", x.shape, "f32"), rlx.bf16)])
    (found,) = rlx.Session("cpu").compile(g).run({"x": x})
    np.testing.assert_array_equal(found.view(np.uint16), want)


def test_rounding_of_f16() -> None:
    """One operation on any two numbers is the exact result, rounded, whether the processor computes in f16 or not."""
    x, y = np.random.default_rng(4).integers(0, 1 << 16, (2, 10_000), np.uint16).view(np.float16)
    g = rlx.Graph("halves")
    a, b = (g.input(name, x.shape, "f16") for name in "xy")
    g.set_outputs([a + b, a - b, a * b, a / b, rlx.sqrt(a)])
    found = rlx.Session("cpu").compile(g).run({"x": x, "y": y})
    with np.errstate(all="ignore"):
        wide, other = x.astype(F), y.astype(F)
        results = wide + other, wide - other, wide * other, wide / other, np.sqrt(wide)
        for made, want in zip(found, results, strict=True):
            np.testing.assert_array_equal(made, want.astype(np.float16))


@pytest.mark.skipif(host_features()[0].startswith("triple=aarch64"), reason="this is such a processor")
@pytest.mark.parametrize("processor", PROCESSORS)
def test_emulated(processor: str) -> None:
    """The tests above in the emulated Python. With the widest processor all of them, else products and one convolution."""
    try:
        here = emulated()
    except Unavailable as why:
        pytest.skip(f"no emulated aarch64: {why}")
    wanted = "products or convolutions or attention or rounding" if processor == "max" else "products or convolutions and 4"
    says = "import sys, host_llvm, pytest; from rlx.host.processor import host_features; print(*host_features()[2:])"
    # Without plugins and the conftest: emulated, what they import takes longer than these tests, which use none of it
    tests = ["-q", "-p", "no:cacheprovider", "--noconftest", "-o", "addopts=", __file__, "-k", f"({wanted}) and not emulated"]
    with host_llvm.serving() as address:
        run = f"{says}; host_llvm.use({address!r}, {compiler_version()!r}); sys.exit(pytest.main(sys.argv[1:]))"
        command = here.command("-c", run, *tests, cpu=processor)
        env = {**here.environment(), "RLX_CACHE": "0", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    for found in (f"^{PROCESSORS[processor]}$", r"^\d+ passed, \d+ deselected"):
        assert done.returncode == 0 and re.search(found, done.stdout, re.M), done.stdout[-3000:] + done.stderr[-3000:]
