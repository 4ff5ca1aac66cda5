"""Whole networks on the CUDA backend: which kernels a layer becomes. Tests that run on a GPU are skipped without one."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import cubin, launch_of, launches_of, text_of
from rlx.backends.cuda.edges import cut_at_edges
from rlx.backends.cuda.flash import FlashLaunch
from rlx.backends.cuda.gpu import refusal
from rlx.backends.cuda.schedule import Launch
from rlx.backends.cuda.tensor import TILINGS, TensorLaunch, on_tensor_cores
from rlx.backends.cuda.vectors import steady
from rlx.backends.ref.interpret import run_kernel
from rlx.compiler import lower
from rlx.frontends.models import decoder
from rlx.frontends.models.families import config_of
from rlx.ir.graph import Graph, Value
from rlx.ir.kernel import Kernel, Load, Loop, Var, k, walk
from rlx.ir.program import Program

HOPPER = target("sm_90a")
on_gpu = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")


def prefill(family: str, layers: int, tokens: int = 256, **other) -> Graph:
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "intermediate_size": 1024}
    config = config_of({"model_type": family, "vocab_size": 512, "num_hidden_layers": layers, **sizes, **other})
    return decoder.build(config, 1, tokens, 2 * tokens, formats="bf16", cache="bf16")


def program_of(g: Graph) -> Program:
    return lower(g, HOPPER, rlx.CompileOptions())


@pytest.mark.parametrize("family, launches", [("qwen3", 8), ("llama", 8)])
def test_a_layer_of_a_prefill_is_a_few_launches(family: str, launches: int) -> None:
    """qkv, rotated q and k beside the new values, attention, output, norm, gated product, product, norm."""
    counts = []
    for layers in (2, 3):
        program = program_of(prefill(family, layers))
        counts.append(len(launches_of(program, "sm_90a")))
        kinds = Counter(type(launch_of(s.kernel)) for s in program.steps)
        # behind the last layer's keys and values all is of one row
        assert kinds[FlashLaunch] == layers - 1 and kinds[TensorLaunch] == 4 * (layers - 1) + 1, kinds
    assert counts[1] - counts[0] == launches


def gated(m: int, half: int, depth: int, dtype: str = "bf16", right: str = "transposed") -> Graph:
    g = Graph("gated")
    x, w = g.input("x", (m, depth), dtype), g.param("w", (2 * half, depth)[:: 1 if right == "transposed" else -1], dtype)
    y = x @ (w.T if right == "transposed" else w)
    g.set_outputs([rlx.silu(y[:, :half].astype("f32")) * y[:, half:].astype("f32")])
    return g


def only(g: Graph) -> Kernel:
    (step,) = program_of(g).steps
    return step.kernel


def test_gated_products_are_one_kernel_where_tensor_cores_take_them() -> None:
    found = launch_of(only(gated(256, 320, 128)))
    assert isinstance(found, TensorLaunch) and found.contract.also is not None and found.contract.n == 320
    few, odd = gated(12, 320, 128), gated(256, 320, 100)  # 12 rows: more than a ring takes, fewer than tiles
    for other in (few, gated(256, 320, 128, "f32"), gated(256, 320, 128, right="plain")):
        assert len(program_of(other).steps) == 2
    assert [s.kernel.origin[-1] for s in program_of(odd).steps[:2]] == ["pad", "matmul"] and len(program_of(odd).steps) == 3
    assert len(lower(gated(256, 320, 128), target("sm_80"), rlx.CompileOptions()).steps) == 2


def test_tilings_of_a_gated_product_compile() -> None:
    """Every second one that its sums allow."""
    kernel = only(gated(512, 1024, 512))
    some = [t for t in TILINGS if t.columns // t.parts % 64 == 0 and not t.swapped and t.rows < 256][::2]
    assert len(some) >= 4 and len({(t.turns, t.parts > 1) for t in some}) >= 3
    for t in some:
        found = on_tensor_cores(kernel, tiling=t)
        assert found and cubin(text_of(found, "kernel"), "sm_90a")


def test_conditions_that_hold_for_whole_vectors() -> None:
    i, g = Var("i"), Var("g")
    for ends in (k.lt(i, 64), k.le(64, i), k.and_(k.le(0, k.sub(i, 64)), k.lt(k.sub(i, 64), 64)), k.lt(g, 3), k.not_(k.lt(i, 8))):
        assert steady(ends, i, 8), ends
    for splits in (k.lt(i, 60), k.le(i, 64), k.lt(64, i), k.eq(i, 64), k.lt(k.mul(i, 2), 64), k.lt(i, g)):
        assert not steady(splits, i, 8), splits


def of_parts(g: Graph) -> Value:
    x, y = g.input("x", (6, 64), "f32"), g.input("y", (6, 96), "f32")
    return rlx.concat(x, y[:, :32], y[:, 64:], axis=1)


def of_halves(x: Value) -> Value:
    return rlx.concat(-x[:, 32:], x[:, :32], axis=1)


CUT = {
    "parts of rows": (of_parts, 3),
    "zeros around rows": (lambda g: rlx.pad(rlx.exp(g.input("x", (6, 64), "f32")), low=(0, 32), high=(0, 32), value=3.0), 3),
    "edges inside vectors": (lambda g: rlx.concat(g.input("x", (6, 60), "f32"), g.input("y", (6, 68), "f32"), axis=1), 1),
    "halves exchanged": (lambda g: of_halves(g.input("x", (6, 64), "f32")), 1),
    "rows joined": (lambda g: rlx.concat(g.input("x", (32, 64), "f32"), g.input("y", (32, 64), "f32"), axis=0), 1),
}


@pytest.mark.parametrize("name", CUT)
def test_loops_are_cut_where_conditions_change(name: str) -> None:
    build, loops = CUT[name]
    g, rng = Graph("g"), np.random.default_rng(0)
    g.set_outputs([build(g)])
    kernel = only(g)
    made = cut_at_edges(kernel)
    inside = [s for s in walk(made.body) if isinstance(s, Loop)]
    cut = made is not kernel
    assert len(inside) == loops and cut == (loops > 1 or name.startswith("halves")), made
    assert not cut or not any(isinstance(x, Load) and x.guard for x in walk(made.body))
    given = [rng.standard_normal(b.size).astype(b.dtype.numpy) for b in kernel.buffers]
    found = [[a.copy() for a in given] for _ in range(2)]
    for which, args in zip((kernel, made), found):
        run_kernel(which, args)
    for a, b in zip(*found):
        np.testing.assert_array_equal(a, b)


def test_rotated_rows_are_read_and_stored_as_vectors() -> None:
    g = Graph("g")
    x, cos, sin = g.input("x", (512, 8, 128), "bf16"), g.input("cos", (512, 1, 64), "f32"), g.input("sin", (512, 1, 64), "f32")
    normed = rlx.rms_norm(x.astype("f32"), g.input("s", (128,), "f32"))
    a, b = normed[..., :64], normed[..., 64:]
    g.set_outputs([rlx.concat(a * cos - b * sin, b * cos + a * sin, axis=-1).astype("bf16")])
    found = launch_of(only(g))
    text = text_of(found, "kernel")
    body = text[text.index('extern "C"') :]
    assert type(found) is Launch and found.team == 32
    assert body.count("rlx_fetch<2>") == 12 and body.count("rlx_put<2>") == 2 and "? " not in body, body


def with_residual(m: int, n: int, depth: int, dtype: str = "f32") -> Graph:
    g = Graph("residual")
    y = rlx.linear(g.input("x", (m, depth), "bf16"), g.param("w", (n, depth), "bf16").T, g.param("b", (n,), "bf16"))
    g.set_outputs([y.astype(dtype) + g.input("r", (m, n), dtype)])
    return g


def test_an_epilogue_starts_its_loads_together_and_before_the_products_where_registers_allow() -> None:
    small, large = (text_of(launch_of(only(with_residual(m, n, 512))), "kernel") for m, n in ((512, 1024), (8192, 4096)))
    for text, before in ((small, True), (large, False)):
        body = text[text.index('extern "C"') :]
        first, last = body.index("rlx_fetch<"), body.rindex("rlx_fetch<")
        assert body.count("rlx_fetch<") == 2 and last < body.index("rlx_staged(acc"), body
        assert (last < body.index("rlx_products_begin")) == before and (first < body.index("rlx_products_begin")) == before


@pytest.mark.parametrize("read", [True, False])
def test_squares_for_a_norm_are_stored_only_instead_of_what_they_are_made_of(read: bool) -> None:
    g = Graph("g")
    x, w, r = g.input("x", (256, 64), "bf16"), g.param("w", (64, 128), "bf16"), g.input("r", (256, 128), "f32")
    y = (x @ w).astype("f32") + r
    g.set_outputs([rlx.rms_norm(y, g.param("s", (128,), "f32")) if read else rlx.sum(y * y, axis=1)])
    product, norm = [s.kernel for s in program_of(g).steps]
    assert isinstance(launch_of(product), TensorLaunch) and [b.writable for b in product.buffers].count(True) == 1
    assert ("mul" in product.origin) is not read and norm.origin[0] == ("mul" if read else "sum")


# -- on a GPU -------------------------------------------------------------------------------------------------------


@on_gpu
@pytest.mark.parametrize("m, half, depth", [(128, 128, 64), (300, 200, 136), (17, 8, 8), (256, 320, 512), (512, 3072, 1024)])
def test_gated_products_agree_with_f64(m: int, half: int, depth: int) -> None:
    g, rng = gated(m, half, depth, "f16"), np.random.default_rng(0)
    x = rng.standard_normal((m, depth)).astype(np.float16)
    w = (rng.standard_normal((2 * half, depth)) * depth**-0.5).astype(np.float16)
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_param("w", w)
    y = x.astype(np.float64) @ w.T.astype(np.float64)
    want = y[:, :half] / (1 + np.exp(-y[:, :half])) * y[:, half:]
    np.testing.assert_allclose(np.asarray(compiled.run({"x": x})[0]), want, rtol=1e-4, atol=1e-3)


@on_gpu
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("m, n, depth", [(512, 1024, 3072), (100, 104, 72), (777, 392, 64), (4096, 4096, 64), (33, 100, 4096)])
def test_residuals_agree_with_f64(m: int, n: int, depth: int, dtype: str) -> None:
    g, rng = with_residual(m, n, depth, dtype), np.random.default_rng(0)
    made = {v.name: (rng.standard_normal(v.shape.static) * depth**-0.25).astype(v.dtype.numpy) for v in (*g.inputs, *g.params)}
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_params({p.name: made[p.name] for p in g.params})
    found = np.asarray(compiled.run({v.name: made[v.name] for v in g.inputs})[0]).astype(np.float64)
    x, w, b, r = (made[name].astype(np.float64) for name in "xwbr")
    want = x @ w.T + b + r
    np.testing.assert_allclose(found, want, rtol=1e-2, atol=2e-2)


@on_gpu
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_prefill_agrees_with_the_cpu(family: str) -> None:
    g, rng = prefill(family, 2, 64), np.random.default_rng(0)
    weights = {p.name: (rng.standard_normal(p.shape.static) * 0.05).astype(p.dtype.numpy) for p in g.params}
    given = {"tokens": rng.integers(0, 512, (1, 64)).astype(np.int32), "count": np.int32(50)}
    found = []
    for device in ("cpu", "cuda"):
        compiled = rlx.Session(device).compile(g)
        compiled.set_params(weights)
        found.append([*map(np.asarray, compiled.run(given)), *(np.float32(compiled.read_handle(f"{s}.1")) for s in "kv")])
    for want, have in zip(*found):
        np.testing.assert_allclose(have, want, atol=0.02 * np.abs(want).max())
