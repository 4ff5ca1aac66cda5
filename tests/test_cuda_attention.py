"""Attention of the CUDA backend: which kernel a shape takes, what they compile to, and on a GPU the results against float64."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_kernels import assembled
from test_cuda import graph, kernels, nvrtc, on_gpu

import rlx
from rlx.backends.cuda import flash, splits
from rlx.backends.cuda.attention import FEW_ROWS, AttentionLaunch
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.flash import FlashLaunch
from rlx.backends.cuda.fragments import FragmentLaunch
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Node
from rlx.ir.kernel import Contract
from rlx.ir.op import OPS
from rlx.ir.ops.attention import AttentionAttrs

assert nvrtc


def build(q, kv, dtype, mask="none", operand=None, after=None, positioned=False, **facts):
    """A graph of one attention; q and kv are shapes. `operand`: dims of its mask. `after`: what follows it."""

    def made(g: rlx.Graph):
        operands = [g.input("mask", operand, "bool" if mask == "custom" else dtype)] if operand else []
        operands += [g.input("start", (q[0],), "i32")] if positioned else []
        out = rlx.attention(
            g.input("q", q, dtype), *(g.input(n, kv, dtype) for n in "kv"), *operands, mask=mask, positioned=positioned, **facts
        )
        return after(out) if after else out

    return graph(made)


def launch(*shape, arch="sm_90a", **facts):
    (kernel,) = kernels(build(*shape, **facts))
    return launch_of(kernel, arch)


def side_by_side(x):
    batch, heads, rows, size = x.shape.static
    return rlx.reshape(rlx.transpose(x, (0, 2, 1, 3)), (batch, rows, heads * size))


# -- which kernel --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [16, 24, 32, 40, 64, 96, 128, 256])
def test_many_queries_of_narrow_floats_take_warp_groups(size):
    found = launch((2, 8, 200, size), (2, 4, 300, size), "bf16", mask="causal")
    assert isinstance(found, FlashLaunch) and len(found.maps) == 3 and found.shared <= flash.SHARED
    assert found.tiles == 2 * 8 * -(-200 // found.tall)


def test_some_queries_take_warp_groups_where_no_other_tensor_cores_have_their_heads():
    assert isinstance(launch((3, 8, 32, 40), (3, 8, 768, 40), "f16"), FlashLaunch)
    assert type(launch((3, 8, 32, 48), (3, 8, 100, 48), "f16")) is AttentionLaunch


@pytest.mark.parametrize(
    "queries, keys, heads, want",
    [
        (16, 8192, (32, 8), (1, 4, 8, 64)),  # groups, heads of a tile, blocks of a cluster, blocks
        (64, 8192, (32, 8), (2, 4, 6, 96)),
        (256, 8192, (32, 8), (2, 4, 2, 128)),
        (200, 8192, (8, 8), (2, 1, 6, 96)),
        (64, 512, (32, 8), (1, 1, 1, 32)),  # to add up sums would take longer than the keys
        (16, 256, (32, 8), (1, 4, 1, 8)),
        (512, 8192, (32, 8), (2, 1, 1, 128)),  # the tiles fill the GPU
    ],
)
def test_clusters_share_the_keys_of_few_queries(queries, keys, heads, want):
    found = launch((1, heads[0], queries, 128), (1, heads[1], keys, 128), "bf16", mask="causal")
    assert isinstance(found, FlashLaunch)
    assert (found.shape.groups, found.shape.pack, found.shape.parts, found.blocks) == want


@pytest.mark.parametrize(
    "batch, heads, keys, size, want",
    [
        (1, (32, 8), 300, 128, None),  # decode.h
        (1, (32, 8), 4096, 128, (4, 8, 1)),  # heads of a tile, blocks of a cluster, blocks of a multiprocessor
        (16, (32, 8), 300, 128, (4, 1, 2)),
        (16, (32, 8), 4096, 128, None),
        (20, (32, 8), 4096, 128, (4, 1, 2)),  # blocks of decode.h do not fill the GPU
        (64, (32, 8), 4096, 128, None),
        (10, (16, 8), 2048, 256, (2, 1, 1)),
        (64, (12, 12), 197, 64, (1, 1, 2)),
    ],
)
def test_one_query_takes_warp_groups_where_they_are_faster(batch, heads, keys, size, want):
    found = launch((batch, heads[0], 1, size), (batch, heads[1], keys, size), "bf16")
    at = found.shape if isinstance(found, FlashLaunch) else None
    assert (at and (at.pack, at.parts, at.resident)) == want


def test_blocks_draw_tiles_that_differ_in_their_keys():
    """Each has one otherwise, or takes turns."""
    for heads, mask, counters in (16, "causal", 1), (16, "sliding_window", 1), (16, "none", 0), (2, "causal", 0):
        window = 300 if mask == "sliding_window" else 0
        found = launch((4, heads, 2000, 128), (4, heads, 2000, 128), "f16", mask=mask, window=window)
        assert isinstance(found, FlashLaunch) and found.counters == counters


def test_pairs_have_the_shorter_tiles_of_a_causal_mask_in_a_second_round():
    for mask, blocks in ("causal", 256), ("none", 128):
        found = launch((1, 8, 2048, 256), (1, 4, 2048, 256), "bf16", mask=mask)
        assert isinstance(found, FlashLaunch) and found.blocks == blocks


def test_heads_with_masks_of_their_own_are_no_rows_of_one_tile():
    found = launch((1, 8, 64, 64), (1, 2, 8192, 64), "f16", mask="bias", operand=(8, 64, 8192))
    assert isinstance(found, FlashLaunch) and (found.shape.pack, found.shape.parts) == (1, 8)


@pytest.mark.parametrize(
    "q, kv, dtype, arch",
    [
        ((1, 8, 200, 64), (1, 8, 200, 64), "bf16", "sm_80"),  # an older GPU
        ((1, 8, 200, 64), (1, 8, 200, 64), "f32", "sm_90a"),
        ((1, 8, 200, 44), (1, 8, 200, 44), "bf16", "sm_90a"),  # no multiple of 8
        ((1, 32, 8, 64), (1, 8, 100, 64), "bf16", "sm_90a"),  # one block of keys
        ((1, 8, 20, 64), (1, 8, 200, 64), "bf16", "sm_90a"),  # a tile of 64 queries would be mostly empty
    ],
)
def test_other_shapes_take_other_kernels(q, kv, dtype, arch):
    assert type(launch(q, kv, dtype, arch=arch)) is AttentionLaunch


def test_tiles_are_smaller_where_the_longest_ones_would_take_longest():
    """128 tiles of 128 queries are one for each multiprocessor, and some have all keys."""
    for mask, tall in ("causal", 64), ("none", 128):
        found = launch((1, 8, 2048, 256), (1, 4, 2048, 256), "f32", mask=mask)
        assert type(found) is AttentionLaunch and found.tall == tall


# -- their code ----------------------------------------------------------------------------------------------------

SHAPES = {
    "whole": ((2, 4, 300, 128), (2, 4, 300, 128), "bf16", {}),
    "causal": ((1, 4, 2048, 64), (1, 2, 2048, 64), "f16", {"mask": "causal"}),
    "a long head": ((1, 2, 128, 256), (1, 2, 400, 256), "bf16", {"mask": "causal"}),
    "a cache": ((1, 4, 100, 96), (1, 2, 700, 96), "bf16", {"mask": "sliding_window", "window": 50, "positioned": True}),
    "a bias and a cap": ((1, 4, 64, 64), (1, 2, 100, 64), "f16", {"mask": "bias", "operand": (4, 64, 100), "cap": 5.0}),
    "padded keys": ((2, 4, 128, 32), (2, 4, 128, 32), "bf16", {"mask": "custom", "operand": (2, 1, 1, 128)}),
    "heads in a tile": ((3, 8, 16, 64), (3, 2, 200, 64), "f16", {"mask": "causal"}),
    "clusters": ((1, 8, 40, 128), (1, 2, 3001, 128), "bf16", {"mask": "causal"}),
    "clusters over a cache": ((2, 10, 37, 40), (2, 2, 3001, 40), "f16", {"mask": "causal", "positioned": True}),
    "clusters, long heads": ((1, 16, 23, 256), (1, 2, 5000, 256), "bf16", {"mask": "sliding_window", "window": 1100}),
    "clusters, a bias": ((1, 4, 70, 96), (1, 2, 2500, 96), "bf16", {"mask": "bias", "operand": (4, 70, 2500), "cap": 5.0}),
    "drawn tiles": ((3, 50, 300, 64), (3, 50, 300, 64), "f16", {"mask": "causal"}),
    "drawn tiles over a cache": ((2, 40, 270, 256), (2, 10, 400, 256), "bf16", {"mask": "causal", "positioned": True}),
    "pairs in two rounds": ((1, 2, 4000, 64), (1, 1, 4000, 64), "f16", {"mask": "causal"}),
    "one query": ((25, 32, 1, 128), (25, 8, 301, 128), "bf16", {}),
    "one query and clusters": ((1, 32, 1, 128), (1, 8, 4000, 128), "f16", {}),
    "one query in a cache": ((70, 8, 1, 128), (70, 8, 900, 128), "bf16", {"mask": "causal", "positioned": True}),
    "two blocks of a multiprocessor": ((70, 4, 60, 64), (70, 4, 200, 64), "f16", {"mask": "causal"}),
    "clusters, a mask": ((2, 3, 9, 64), (2, 3, 3000, 64), "f16", {"mask": "custom", "operand": (2, 1, 1, 3000)}),
}


# without tensor cores: rows of a tile, and threads of a row
PLAIN = {
    "f32, padded keys": ((2, 4, 128, 64), (2, 4, 128, 64), "f32", {"mask": "custom", "operand": (2, 1, 1, 128)}, (64, 16)),
    "f32, a mask": ((2, 4, 70, 40), (2, 4, 90, 40), "f32", {"mask": "custom", "operand": (2, 1, 70, 90)}, (64, 16)),
    "f32, a bias": ((8, 8, 512, 64), (8, 8, 512, 64), "f32", {"mask": "bias", "operand": (8, 512, 512)}, (128, 8)),
    "f32, many keys": ((2, 12, 700, 32), (2, 12, 700, 32), "f32", {}, (64, 16)),
    "f32, 128 columns": ((1, 16, 1024, 128), (1, 8, 1024, 128), "f32", {}, (128, 16)),
    "f32, 80 columns": ((2, 2, 130, 80), (2, 1, 200, 80), "f32", {"mask": "causal"}, (64, 16)),
    "f32, keys of each head": ((2, 4, 40, 64), (2, 2, 90, 64), "f32", {"mask": "custom", "operand": (2, 4, 1, 90)}, (64, 16)),
    "f32, keys of all heads": ((2, 4, 40, 64), (2, 2, 90, 64), "f32", {"mask": "custom", "operand": (2, 1, 1, 90)}, (64, 16)),
    "f32, a bias of keys": ((2, 3, 50, 12), (2, 3, 77, 12), "f32", {"mask": "bias", "operand": (77,)}, (64, 16)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_warp_groups_keep_everything_in_registers(name):
    *shape, facts = SHAPES[name]
    found = launch(*shape, **facts)
    assert isinstance(found, FlashLaunch)
    log = assembled(text_of(found, "kernel"), "sm_90a")
    assert "0 bytes stack frame, 0 bytes spill stores" in log and "serialized" not in log


@pytest.mark.parametrize("dtype, size", [("f32", 8), ("f32", 64), ("f32", 128), ("f32", 256), ("bf16", 44), ("f32", 30)])
def test_kernels_without_tensor_cores_compile(dtype, size):
    found = launch((1, 4, 200, size), (1, 2, 300, size), dtype, mask="causal")
    assert type(found) is AttentionLaunch and found.block and not found.tensor and found.shared <= flash.SHARED
    assert cubin(text_of(found, "kernel"), "sm_80")


@pytest.mark.parametrize("name", PLAIN)
def test_kernels_without_tensor_cores_keep_everything_in_registers(name):
    """A mask is loaded without branches, for whose elements threads would wait one by one."""
    *shape, facts, tile = PLAIN[name]
    found = launch(*shape, **facts)
    assert type(found) is AttentionLaunch and (found.tall, found.across) == tile
    assert "0 bytes stack frame, 0 bytes spill stores" in assembled(text_of(found, "kernel"), "sm_90a")


@pytest.mark.parametrize("size, width", [(16, 256), (4, 200), (16, 128), (32, 96)])
def test_blocks_with_wide_values_share_a_multiprocessor_as_registers_allow(size, width):
    dims = {"q": size, "k": size, "v": width}
    g = graph(lambda g: rlx.attention(*(g.input(n, (2, 8, 512, d), "f32") for n, d in dims.items())))
    found = launch_of(next(iter(kernels(g))), "sm_90a")
    assert "0 bytes stack frame, 0 bytes spill stores" in assembled(text_of(found, "kernel"), "sm_90a")


@pytest.mark.parametrize("rows, dtype", [(1, "bf16"), (40, "bf16"), (200, "bf16"), (200, "f32")])
def test_a_cast_of_heads_side_by_side_needs_no_other_kernel(rows, dtype):
    to = "f32" if dtype == "bf16" else "bf16"
    shape = (2, 4, rows, 64)
    (kernel,) = kernels(build(shape, shape, dtype, after=lambda x: side_by_side(x).astype(to)))
    assert cubin(text_of(launch_of(kernel, "sm_90a"), "kernel"), "sm_90a")


def test_heads_are_written_where_the_next_product_reads_them():
    weights = lambda g: g.input("w", (256, 64), "bf16")  # noqa: E731
    g = rlx.Graph("g")
    q, k, v = (g.input(n, (2, 4, 100, 64), "bf16") for n in "qkv")
    g.set_outputs([side_by_side(rlx.attention(q, k, v)) @ weights(g)])
    assert [kernel.name for kernel in kernels(g)] == ["attention", "matmul"]


# -- on a GPU ------------------------------------------------------------------------------------------------------

CASES = {
    **SHAPES,
    **{name: case[:4] for name, case in PLAIN.items()},
    "a window": ((1, 4, 300, 128), (1, 2, 300, 128), "f16", {"mask": "sliding_window", "window": 100}),
    "f32": ((2, 4, 200, 64), (2, 2, 300, 64), "f32", {"mask": "causal"}),
    "f32, whole tiles": ((2, 6, 256, 64), (2, 2, 300, 64), "f32", {"mask": "causal"}),
    "f32, tiles of 128": ((1, 32, 1024, 128), (1, 8, 1024, 128), "f32", {"mask": "causal"}),
    "f32, a window": ((2, 4, 300, 256), (2, 2, 300, 256), "f32", {"mask": "sliding_window", "window": 100}),
    "some queries": ((2, 8, 40, 64), (2, 2, 90, 64), "bf16", {"mask": "causal"}),
    "f32 in a cache": ((2, 4, 70, 100), (2, 2, 300, 100), "f32", {"mask": "sliding_window", "window": 50, "positioned": True}),
    "f32, a long head": ((1, 2, 100, 256), (1, 2, 100, 256), "f32", {"mask": "bias", "operand": (2, 100, 100), "cap": 3.0}),
    "few queries": ((2, 4, 20, 80), (2, 4, 90, 80), "bf16", {"mask": "causal", "positioned": True}),
}
MOST = {"f32": 2e-6, "f16": 1e-3, "bf16": 8e-3}  # relative to the norm: rounding of weights and results


@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_results_agree_with_float64(name):
    """Rows of a cache past the last query are NaN; batch 0 of a bool mask sees no key."""
    *shape, facts = CASES[name]
    q, kv, dtype = shape
    compiled = rlx.Session("cuda").compile(build(*shape, **facts))
    rng, numpy = np.random.default_rng(0), rlx.as_dtype(dtype).numpy
    inputs = {n: rng.standard_normal(q if n == "q" else kv).astype(numpy) for n in "qkv"}
    if facts.get("operand"):
        inputs["mask"] = rng.standard_normal(facts["operand"]).astype(numpy)
        if facts["mask"] == "custom":
            inputs["mask"] = rng.random(facts["operand"]) > 0.3
            inputs["mask"][0] = False
    if facts.get("positioned"):
        inputs["start"] = np.arange(3, 3 + q[0], dtype=np.int32)
        for n, first in enumerate(inputs["start"]):
            for x in "kv":
                inputs[x][n, :, first + q[2] :] = np.nan
    attrs = AttentionAttrs(**{n: v for n, v in facts.items() if n in AttentionAttrs.__annotations__})
    exact = [a if a.dtype.kind in "bi" else np.asarray(a, np.float64) for a in inputs.values()]
    want = OPS["attention"].reference(attrs, *exact)
    (found,), (again,) = compiled.run(inputs), compiled.run(inputs)
    np.testing.assert_array_equal(found, again)
    found = np.asarray(found, np.float64)
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - want) <= MOST[dtype] * np.linalg.norm(want)


# -- heads of more elements than kernels take ----------------------------------------------------------------------

LARGE = {  # q, k, elements of values; dtypes of q and of keys and values; rows of a tensor core product; the mask and others
    "latents, one query": ((2, 6, 1, 320), (2, 1, 70, 320), 264, "f32", "bf16", 12, {"mask": "causal", "positioned": True}),
    "latents, a prompt": ((1, 6, 9, 320), (1, 1, 70, 320), 264, "f32", "f16", 54, {"mask": "causal", "positioned": True}),
    "one head of an image": ((1, 1, 130, 512), (1, 1, 130, 512), 512, "bf16", "bf16", 130, {}),
    "grouped": ((2, 8, 7, 272), (2, 4, 33, 272), 272, "f32", "bf16", 28, {"mask": "sliding_window", "window": 5, "cap": 9.0}),
    "a bias": ((1, 4, 20, 288), (1, 4, 48, 288), 40, "f16", "f16", 20, {"mask": "bias"}),
}


def large(name):
    q, k, width, dtype, narrow, _, facts = LARGE[name]

    def made(g: rlx.Graph):
        keys = g.input("k", k, narrow)
        operands = [g.input("mask", (q[1], q[2], k[2]), dtype)] if "bias" in name else []
        operands += [g.input("start", (q[0],), "i32")] if facts.get("positioned") else []
        return rlx.attention(g.input("q", q, dtype), keys, keys[..., :width], *operands, **facts)

    return graph(made)


def drawn(g: rlx.Graph, last: int):
    """Operands of attention; keys behind the last query are not numbers."""
    rng = np.random.default_rng(0)
    given = {v.node.name: rng.standard_normal(v.dims).astype(v.dtype.numpy) for v in g.inputs if v.node.name != "start"}
    for v in g.inputs:
        if v.node.name == "start":
            given["start"] = np.full(v.dims, last, np.int32)
            given["k"][:, :, last + given["q"].shape[2] :] = np.nan
    return given


@pytest.mark.parametrize("name", LARGE)
def test_large_heads_are_products_that_read_narrow_keys(name):
    _, k, width, _, _, rows, _ = LARGE[name]
    launched = [(kernel, launch_of(kernel, "sm_90a")) for kernel in kernels(large(name))]
    products = [(kernel.body[0], at) for kernel, at in launched if isinstance(kernel.body[0], Contract)]
    assert [c.m for c, _ in products] == [rows] * 2 and all(isinstance(at, TensorLaunch | FragmentLaunch) for _, at in products)
    assert all(cubin(text_of(at, "kernel"), "sm_90a") for _, at in products)
    wide = {b.size for kernel, _ in launched for b in kernel.buffers if b.dtype == rlx.f32}
    assert wide.isdisjoint((np.prod(k), np.prod(k[:3]) * width))  # no copies of keys or values


@pytest.mark.parametrize("name", LARGE)
def test_products_are_the_attention_of_large_heads(name):
    """In the reference: the products that the target asks for, and the op in float64."""
    made = large(name)
    given, (node,) = drawn(made, 40), [n for n in made.nodes() if n.op.name == "attention"]
    other = rlx.Graph("other")
    values = {v.node.name: other.input(v.node.name, v.dims, v.dtype) for v in made.inputs}
    operands = [values[v.node.name] for v in node.inputs if v.node.op.name == "input"]
    keys = values["k"]
    inputs = (operands[0], keys, keys[..., : node.inputs[2].dims[3]], *operands[2:])
    other.set_outputs([splits.large_heads(Node(node.op, inputs, node.attrs, node.shapes))])
    close(*evaluate(other, given)[0], *evaluate(made, given)[0], 2e-2)  # it rounds sums, too


def close(found, wanted, bound):
    np.testing.assert_allclose(np.float64(found), np.float64(wanted), rtol=bound, atol=bound * np.abs(np.float64(wanted)).max())


@on_gpu
@pytest.mark.parametrize("name", LARGE)
def test_large_heads_agree_with_float64(name):
    made = large(name)
    given = drawn(made, 40)
    (_, heads, queries, _), (_, shared, *_), _, dtype, narrow, *_ = LARGE[name]
    exact = dtype == "f32" and heads // shared * queries <= FEW_ROWS  # then each number is the sum of two narrow ones
    bound = 1e-4 if exact else 2e-2 if narrow == "bf16" else 3e-3
    close(*rlx.Session("cuda").compile(made).run(given), *evaluate(made, given)[0], bound)
