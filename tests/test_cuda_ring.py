"""Products of a few rows whose weights pass through a ring on CUDA: which kernel they get, and results on a GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import CudaCode, cubin, launch_of, text_of
from rlx.backends.cuda.executable import spaced
from rlx.backends.cuda.fragments import FragmentLaunch
from rlx.backends.cuda.gemv import GemvLaunch
from rlx.backends.cuda.gemv_ring import THREADS, RingLaunch
from rlx.backends.cuda.gpu import refusal
from rlx.backends.cuda.schedule import ALONE, BESIDE, LONG
from rlx.compiler import lower
from rlx.ir.kernel import Kernel

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")
on_gpu = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")
SIZES = [
    (1024, 1024), (4096, 1024), (1024, 3072), (2048, 8192), (4096, 14336), (28672, 4096), (151936, 1024), (1001, 64), (7, 640),
]  # fmt: skip
OTHERS = [(34001, 1024), (40001, 64), (7, 640), (1, 64), (300, 200), (133, 11008)]


def product(
    m: int, n: int, k: int, weights: str = "bf16", left: str = "", norm: bool = False, added: bool = False, param: bool = True,
    wide: int = 0, batch: int = 0,
) -> rlx.Graph:  # fmt: skip
    """norm(x) @ w.T + z. `wide`: elements of a row of w behind those that are used."""
    g, left, many = rlx.Graph("product"), left or weights, (batch,) * (batch > 0)
    w = (g.param if param else g.input)("w", (*many, n, k + wide), weights)
    x = g.input("x", (*many, m, k), left)
    x = rlx.rms_norm(x, g.param("s", (k,), left)) if norm else x
    if wide:
        w = rlx.slice(w, (0,) * len(w.shape.static), (*many, n, k))
    w = w.astype(left) if weights != left else w
    y = x @ rlx.transpose(w, (*range(len(many)), -1, -2))
    g.set_outputs([y + g.input("z", (*many, m, n), left) if added else y])
    return g


def gated(m: int, n: int, k: int, weights: str = "bf16", norm: bool = False) -> rlx.Graph:
    """silu(x @ gate) * (x @ up), of one matrix that holds both."""
    g = product(m, 2 * n, k, weights, norm=norm)
    (both,) = g.outputs
    gate, up = both[:, :n].astype("f32"), both[:, n:].astype("f32")
    g.set_outputs([(gate / (1.0 + rlx.exp(-gate)) * up).astype(weights)])
    return g


def kernel(g: rlx.Graph, arch: str = "sm_90a") -> Kernel:
    return next(s.kernel for s in lower(g, target(arch), rlx.CompileOptions()).steps if "matmul" in s.kernel.origin)


# -- without a GPU -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "k"), SIZES)
def test_two_blocks_are_on_a_multiprocessor(n, k):
    """The block of the next product, with its first weights, beside that of the one in front."""
    found = launch_of(kernel(product(1, n, k)))
    assert type(found) is RingLaunch and found.blocks == min(n, 132) and found.threads == THREADS
    assert found.shared == (ALONE if k * -(-n // 132) <= 1 << 16 else LONG) and found.slots >= found.window
    assert found.slots * found.piece + found.sums + 16 * found.slots < BESIDE[found.shared]
    assert found.kernel.buffers[found.early].size == n * k
    text = text_of(found, "kernel")
    assert f"__launch_bounds__({THREADS}, 2)" in text and cubin(text, "sm_90a")
    assert "__align__(128) unsigned char rlx_shared" in text, "bulk copies to other places take longer"
    assert "rlx_begin();" not in text[text.index("extern") : text.index("if (rlx_ring_copies<")]


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_norms_and_residuals_are_part_of_the_product(dtype):
    found = launch_of(kernel(product(2, 1000, 2048, dtype, norm=True, added=True)))
    text = text_of(found, "kernel")
    assert type(found) is RingLaunch and found.row and cubin(text, "sm_90a")
    own = text[text.index("extern") :]
    assert own.index("early0 = x") < own.index("rlx_ring_sums<"), "the residual is loaded before the products"


@pytest.mark.parametrize(("n", "k", "wide"), [(151936, 896, 0), (30522, 384, 0), (20000, 128, 8)])
def test_each_column_of_a_piece_has_a_lane_that_copies_it(n, k, wide):
    found = launch_of(kernel(product(1, n, k, wide=wide)))
    assert type(found) is RingLaunch and found.warps == 1 and found.wide == 32


GATED = [
    (1, 3072, 1024, True), (1, 14336, 4096, True), (2, 1001, 512, False), (3, 40, 384, False), (1, 20000, 64, False),
    (2, 9000, 896, True),
]  # fmt: skip


@pytest.mark.parametrize(("m", "n", "k", "norm"), GATED)
def test_gate_and_up_meet_in_the_store(m, n, k, norm):
    (step,) = lower(gated(m, n, k, norm=norm), target("sm_90a"), rlx.CompileOptions()).steps
    found = launch_of(step.kernel)
    assert type(found) is RingLaunch and found.both == 2 and found.span % found.wide == found.wide % 2 == 0
    assert cubin(text_of(found, "kernel"), "sm_90a")


def test_rows_that_threads_cannot_keep_are_no_pairs():
    assert len(lower(gated(2, 512, 14336), target("sm_90a"), rlx.CompileOptions()).steps) == 2


def test_converted_weights_pass_in_8_bits():
    found = launch_of(kernel(product(1, 4096, 4096, "f8e4m3", "bf16")))
    assert type(found) is RingLaunch and found.size == 16 and found.item == 1


def test_blocks_are_launched_so_that_they_spread():
    """Beside a block on every multiprocessor one more has room; after anything else, two of them on one would have."""
    ring, part = (CudaCode("ring", "", b"", n, THREADS, ALONE, 0, 0, ()) for n in (132, 131))
    long = replace(ring, shared=LONG)
    other = CudaCode("other", "", b"", 12, 256, 0, 0, 0, ())
    codes = [ring, ring, ring, other, ring, long, other, part, ring, long, long, ring]
    short, late = BESIDE[ALONE], BESIDE[LONG]
    shared = [ALONE, short, ALONE, 0, ALONE, late, 0, ALONE, ALONE, late, LONG, ALONE]
    assert [c.shared for c in spaced(codes, 132)] == shared
    product, few = replace(other, blocks=128, shared=200 << 10), replace(other, blocks=128)  # small blocks spread, too
    many, more = replace(other, blocks=512), replace(other, blocks=132 * 6 + 1)
    codes = [few, product, few, product, many, many, product, more]
    asked = [0, 200 << 10, 114 << 10, 200 << 10, (228 << 10) // 5, 0, 200 << 10, 0]
    assert [c.shared for c in spaced(codes, 132)] == asked
    assert [c.shared for c in spaced([product, few, ring], 132)] == [200 << 10, 0, ALONE]
    each, whole = 1 << 10, 228 << 10  # of every block, for the system; of a multiprocessor
    assert 2 * (ALONE + each) > whole >= LONG + late + 2 * each


@pytest.mark.parametrize(
    ("shape", "how", "found"),
    [((1, 4096, 1024), {}, True), ((1, 1001, 2048), {"weights": "f16"}, True), ((1, 1024, 3072), {"added": True}, True),
     ((2, 4096, 1024), {}, False), ((1, 4096, 1024), {"left": "f32"}, False), ((1, 4096, 1024), {"weights": "f32"}, False),
     ((1, 4096, 1032), {}, False), ((1, 4096, 14336), {}, False), ((1, 7, 640), {}, False)],
)  # fmt: skip
def test_tensor_cores_multiply_one_row_in_the_dtype_of_the_weights(shape, how, found):
    at = launch_of(kernel(product(*shape, **how)))
    assert isinstance(at, RingLaunch) and at.tensor == found
    called = text_of(at, "k").rpartition('extern "C"')[2]
    assert ("rlx_ring_tensor<" in called, "rlx_ring_sums<" in called) == (found, not found)


def test_a_smaller_gpu_gets_as_many_blocks_as_it_runs_at_once():
    assert launch_of(kernel(product(1, 4096, 1024)), "sm_90a", 114).blocks == 114


@pytest.mark.parametrize(("rows", "dtype"), [(1, "bf16"), (33, "f32")])
def test_a_batch_of_no_products_has_a_launch(rows, dtype):
    """Segments of no rows are one, and the compile divided by its number of products."""
    g = rlx.Graph("empty")
    x, w = g.input("x", (0, rows, 1024), dtype), g.param("w", (0, 512, 1024), dtype)
    g.set_outputs([x @ rlx.transpose(w, (0, 2, 1))])
    assert launch_of(kernel(g)).blocks == 0


def test_other_shapes_have_no_ring():
    for g in (
        product(1, 512, 1001),  # rows that do not start at multiples of 16 bytes
        product(1, 512, 1024, wide=4),
        product(1, 64, 32768),  # more of the left operand than a thread keeps
        product(2, 64, 14336),
    ):
        assert type(launch_of(kernel(g))) in (GemvLaunch, FragmentLaunch)
    assert type(launch_of(kernel(product(1, 512, 1024), "sm_80"), "sm_80")) in (GemvLaunch, FragmentLaunch)


# -- on a GPU ------------------------------------------------------------------------------------------------------


def drawn(g: rlx.Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    return {
        v.node.name: (rng.standard_normal(v.shape.static) * (0.1 if v.node.name == "w" else 1)).astype(v.dtype.numpy)
        for v in (*g.inputs, *g.params)
    }


CASES = {
    **{f"{n} by {k}": (1, n, k, {}) for n, k in [*SIZES[:-3], *OTHERS]},
    "two rows": (2, 1001, 1024, {"norm": True, "added": True}),
    "three rows of f16": (3, 515, 2048, {"weights": "f16", "added": True}),
    "f16": (1, 515, 2048, {"weights": "f16", "norm": True, "added": True}),
    "three runs of a row": (1, 1001, 3072, {"added": True}),
    "four runs of a row": (1, 1001, 8192, {"norm": True}),
    "f32": (1, 1001, 1028, {"weights": "f32", "norm": True}),
    "f32, many": (2, 40000, 256, {"weights": "f32", "added": True}),
    "f8e4m3": (1, 1001, 4096, {"weights": "f8e4m3", "left": "bf16", "added": True}),
    "f8e5m2": (2, 1001, 912, {"weights": "f8e5m2", "left": "f16"}),
    "norm": (1, 6144, 1024, {"norm": True}),
    "norm, warps apart": (1, 640, 384, {"norm": True, "added": True}),
    "pairs": (1, 999, 14336, {"weights": "f16", "added": True}),
    "rows apart": (1, 1001, 1024, {"wide": 8, "added": True}),
    "batch": (2, 77, 512, {"batch": 5}),
    "columns in turns": (1, 34000, 896, {}),
    "columns in turns, rows apart": (1, 20000, 128, {"wide": 8}),
    "weights of the run": (1, 1001, 2048, {"param": False}),
}


@on_gpu
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_f64(case):
    m, n, k, how = CASES[case]
    g = product(m, n, k, **how)
    given = drawn(g)
    compiled = rlx.Session("cuda").compile(g)
    params = [p.node.name for p in g.params]
    compiled.set_params({name: given[name] for name in params})
    inputs = {name: a for name, a in given.items() if name not in params}
    (found,), (again,) = compiled.run(inputs), compiled.run(inputs)
    assert found.tobytes() == again.tobytes()
    x, w, z, s = (given[name].astype(np.float64) if name in given else None for name in "xwzs")
    if s is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * s
    w = np.swapaxes(w[..., :k], -1, -2)
    exact, scale = x @ w, np.abs(x) @ np.abs(w)
    if z is not None:
        exact, scale = exact + z, scale + np.abs(z)
    bits = {"bf16": 8, "f16": 11, "f32": 20}[how.get("left", how.get("weights", "bf16"))]
    rounded = (s is not None) + (z is not None) + 1  # times
    assert (np.abs(found.astype(np.float64) - exact) / scale).max() < rounded * 2.0**-bits


@on_gpu
@pytest.mark.parametrize(("m", "n", "k", "norm"), GATED)
def test_gate_and_up_are_those_of_f64(m, n, k, norm):
    g = gated(m, n, k, norm=norm)
    given = drawn(g)
    compiled = rlx.Session("cuda").compile(g)
    compiled.set_params({p.node.name: given[p.node.name] for p in g.params})
    (found,), (again,) = compiled.run({"x": given["x"]}), compiled.run({"x": given["x"]})
    assert found.tobytes() == again.tobytes()
    x, w = given["x"].astype(np.float64), given["w"].astype(np.float64)
    if norm:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * given["s"].astype(np.float64)
    gate, up = np.split(x @ w.T, 2, axis=1)
    off = np.abs(found.astype(np.float64) - gate / (1 + np.exp(-gate)) * up)
    scale = np.split(np.abs(x) @ np.abs(w.T), 2, axis=1)
    assert (off / (1 + scale[0] * scale[1])).max() < 2.0**-7
