"""A decoding step's attention on CUDA, and the small kernels in front of it that its blocks run: which launches they become, and
on a GPU the results against float64 and against the same kernels apart."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cuda_kernels import assembled, reports
from test_cuda import HOPPER, kernels, launches_of, nvrtc, on_gpu

import rlx
from rlx.backends.cuda import code
from rlx.backends.cuda.attention import AttentionLaunch
from rlx.backends.cuda.backend import CudaBackend
from rlx.backends.cuda.code import launch_of, text_of
from rlx.backends.cuda.executable import spaced
from rlx.backends.cuda.fronts import Footprint
from rlx.compiler import lower
from rlx.frontends.models.decoder import build
from rlx.frontends.models.families import config_of
from rlx.ir.op import OPS
from rlx.ir.ops.attention import AttentionAttrs
from rlx.ir.program import Program
from rlx.ir.target import Target

assert nvrtc
CASES = {  # batch, heads, of keys, queries, keys; sizes of a key and a value; dtypes of q and the cache; facts
    "a key head for each": ((1, 4, 4, 1, 300), (128, 128), ("f32", "bf16"), {}),
    "eight queries of a key head": ((2, 16, 2, 1, 700), (64, 64), ("bf16", "bf16"), {}),
    "several positions": ((2, 4, 2, 3, 90), (128, 64), ("f32", "bf16"), {}),
    "a window": ((1, 8, 2, 1, 2000), (64, 64), ("f16", "f16"), {"mask": "sliding_window", "window": 77}),
    "a long head, a cap": ((1, 4, 2, 1, 260), (256, 256), ("f32", "bf16"), {"cap": 20.0}),
    "many key heads": ((9, 32, 16, 1, 150), (64, 128), ("f32", "bf16"), {}),
    "a long cache": ((1, 4, 1, 1, 5000), (128, 128), ("f32", "bf16"), {}),
}
QWEN = {
    "model_type": "qwen3", "vocab_size": 512, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "head_dim": 64, "num_key_value_heads": 2, "intermediate_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6,
    "rope_theta": 1e4, "tie_word_embeddings": True, "hidden_act": "silu",
}  # fmt: skip
LLAMA = QWEN | {"model_type": "llama"}


@pytest.fixture(autouse=True)
def no_chains(monkeypatch):
    """Attention in a launch of its own: test_cuda_chain.py has those in chains."""
    monkeypatch.setattr(code, "in_chains", lambda program, launches, *rest: launches)


def step(shape, sizes, dtypes, facts) -> rlx.Graph:
    (batch, heads, shared, queries, keys), (size, width), (of_q, of_cache) = shape, sizes, dtypes
    g = rlx.Graph("g")
    q = g.input("q", (batch, heads, queries, size), of_q)
    k, v = (g.input(name, (batch, shared, keys, n), of_cache) for name, n in (("k", size), ("v", width)))
    how = {"mask": "causal", "positioned": True} | facts
    g.set_outputs([rlx.attention(q, k, v, g.input("at", (batch,), "i32"), **how)])
    return g


def decoder(config, batch: int = 1, target: Target = HOPPER) -> Program:
    graph = build(config_of(config), batch, 1, 200, "bf16", cache="bf16", steps=())
    return lower(graph, target, rlx.CompileOptions())


def attentions(program: Program) -> list[list[list[str]]]:
    """The stages of each launch with an attention, as the names of their kernels."""
    found = [[[program.steps[n].kernel.name for n in stage] for stage in x] for x in launches_of(program, "sm_90a")]
    return [x for x in found if "attention" in x[-1][0]]


# -- which launches ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_few_queries_of_narrow_caches_take_tensor_cores_without_spills(name):
    (kernel,) = kernels(step(*CASES[name]))
    found = launch_of(kernel)
    assert isinstance(found, AttentionLaunch) and (found.parts > found.cluster) == (name == "a long cache")
    assert "0 bytes stack frame, 0 bytes spill stores" in assembled(text_of(found, "kernel"), "sm_90a")


@pytest.mark.parametrize(
    ("sizes", "dtypes", "arch"),
    [
        ((128, 128), ("f32", "f32"), "sm_90a"),
        ((128, 128), ("f32", "f16"), "sm_90a"),  # f16 has no room for the queries' exponents
        ((80, 80), ("bf16", "bf16"), "sm_90a"),
        ((128, 128), ("f32", "bf16"), "sm_80"),  # no clusters
    ],
)
def test_other_caches_and_older_gpus_take_another_kernel(sizes, dtypes, arch):
    (kernel,) = kernels(step((1, 4, 2, 1, 300), sizes, dtypes, {}))
    found = launch_of(kernel, arch)
    assert isinstance(found, AttentionLaunch) and not found.cluster


@pytest.mark.parametrize(
    ("batch", "shared", "keys", "cluster", "parts"),
    [
        (1, 8, 300, 8, 8), (1, 16, 300, 8, 8), (4, 8, 300, 4, 4), (8, 8, 300, 2, 2), (16, 8, 300, 2, 2), (20, 8, 300, 1, 1),
        (1, 8, 4096, 2, 16), (4, 8, 4096, 2, 4), (9, 8, 4096, 2, 2),  # long caches: pairs
    ],
)  # fmt: skip
def test_blocks_share_keys_as_far_as_they_run_at_once(batch, shared, keys, cluster, parts):
    """132 multiprocessors, two blocks on each; not all hold clusters of more than two."""
    (kernel,) = kernels(step((batch, 2 * shared, shared, 1, keys), (128, 128), ("f32", "bf16"), {}))
    found = launch_of(kernel)
    assert (found.cluster, found.parts) == (cluster, parts)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("config", [QWEN, LLAMA])
def test_rotations_and_updates_run_in_the_blocks_of_their_attention(config, batch):
    """Also norms of queries and keys. Cos and sin of the position, which all heads read, are computed in the first launch."""
    found = attentions(decoder(config, batch))
    assert [[len(stage) for stage in x] for x in found] == [[3, 1], [3, 1]]
    assert all(sum("update_rows" in name for stage in x for name in stage) >= 1 for x in found)
    assert not any("cos" in name for x in found for stage in x for name in stage)


def test_a_launch_does_not_write_what_its_other_blocks_still_read():
    """Without memory that rests, the attention's result takes the place of the queries' product."""
    packed = attentions(decoder(QWEN, target=replace(HOPPER, rest_bytes=0)))
    assert len(packed) == 2 and all(len(x) == 1 for x in packed)


def test_an_update_at_another_position_stays_apart():
    def program(same: bool) -> Program:
        g = rlx.Graph("g")
        cache = g.handle(rlx.BufferHandle("cache", (1, 2, 64, 64), "bf16"))
        at, other = g.input("at", (), "i32"), g.input("other", (), "i32")
        rows = g.input("rows", (1, 2, 1, 64), "f32") * 2.0
        new = rlx.update_rows(cache, rows.astype("bf16"), at if same else other, axis=2)
        out = rlx.attention(g.input("q", (1, 4, 1, 64), "f32"), new, new, at, mask="causal", positioned=True)
        g.set_outputs([out])
        g.assign(cache, new, in_place=True)
        return lower(g, HOPPER, rlx.CompileOptions())

    assert [len(x) for x in attentions(program(True))] == [2]
    assert [len(x) for x in attentions(program(False))] == [1]


def test_a_footprint_has_the_indices_of_every_point():
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (6, 40), "f32") * 2.0])
    (kernel,) = kernels(g)
    loads, stores = (index for _, _, index in Footprint(launch_of(kernel), 3, 0).found)
    assert loads.shape == (3, 80)
    for found in (loads, stores):
        np.testing.assert_array_equal(found.reshape(-1), np.arange(240))


def test_keys_are_loaded_early_where_no_launch_in_front_writes_them():
    artifact = CudaBackend().compile(decoder(QWEN))
    found = [(x, group) for x, group in zip(artifact.coded["steps"], artifact.launches["steps"]) if len(x.early) == 3]
    assert len(found) == 2
    for x, group in found:
        step = artifact.program.steps[group[-1]]
        names = [artifact.program.buffers[step.args[n]].name for n in x.early]
        assert [name[0] for name in names] == ["k", "v", "p"] and x.more[-1][-1] == "early"


def test_a_multiprocessor_has_room_for_attention_and_both_products_behind_it():
    """Else these start late where attention has blocks, and all others wait for them."""
    sizes = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072}
    artifact = CudaBackend().compile(decoder(QWEN | sizes))
    codes = list(spaced(artifact.coded["steps"], 132))
    origins = [artifact.program.steps[group[-1]].kernel.origin for group in artifact.launches["steps"]]
    places = [n for n, origin in enumerate(origins) if "attention" in origin]
    assert len(places) == 2
    for n in places:
        three, bytes_, registers = codes[n : n + 3], 0, 0
        for one in three:
            found = reports(one.text, "sm_90a")[one.name]
            bytes_ += one.shared + found.shared + (1 << 10)
            registers += one.threads * -(-found.registers // 8) * 8
        assert [one.blocks for one in three] == [64, 132, 132] and bytes_ <= 228 << 10 and registers <= 1 << 16


# -- on a GPU ------------------------------------------------------------------------------------------------------

MOST = {"f32": 1e-5, "f16": 1e-3, "bf16": 8e-3}  # relative to the norm, by the dtype of the result


@on_gpu
@pytest.mark.parametrize("name", CASES)
def test_results_agree_with_float64(name):
    """At the first position, inside the cache and at its end; rows past the last query are NaN."""
    (batch, heads, shared, queries, keys), (size, width), (of_q, of_cache), facts = CASES[name]
    compiled, rng = rlx.Session("cuda").compile(step(*CASES[name])), np.random.default_rng(0)
    numpy = [rlx.as_dtype(x).numpy for x in (of_q, of_cache, of_cache)]
    dims = (batch, heads, queries, size), (batch, shared, keys, size), (batch, shared, keys, width)
    for first in (0, 5, keys // 2, keys - queries):
        at = np.minimum(first + np.arange(batch), keys - queries).astype(np.int32)
        arrays = [rng.standard_normal(d).astype(t) for d, t in zip(dims, numpy)]
        for n, position in enumerate(at):
            for x in arrays[1:]:
                x[n, :, position + queries :] = np.nan
        attrs = AttentionAttrs(**({"mask": "causal", "positioned": True} | facts))
        want = OPS["attention"].reference(attrs, *(np.asarray(x, np.float64) for x in arrays), at)
        inputs = {"q": arrays[0], "k": arrays[1], "v": arrays[2], "at": at}
        (found,), (again,) = compiled.run(inputs), compiled.run(inputs)
        np.testing.assert_array_equal(found, again)
        off = np.linalg.norm(np.asarray(found, np.float64) - want) / np.linalg.norm(want)
        assert off <= MOST[of_q], (first, off)


@on_gpu
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("config", [QWEN, LLAMA])
def test_attention_with_its_kernels_in_front_has_the_bits_of_kernels_apart(config, batch, monkeypatch):
    graph = build(config_of(config), batch, 1, 200, "bf16", cache="bf16")
    rng = np.random.default_rng(0)
    params = {str(p.name): (rng.standard_normal(p.shape.static) * 0.3).astype(p.dtype.numpy) for p in graph.params}

    def run(together: bool) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        with monkeypatch.context() as patch:
            if not together:
                patch.setattr(code, "fronted", lambda program, launches, found: launches)
            compiled = rlx.Session("cuda").compile(graph)
        compiled.set_params(params)
        for h in graph.handles:
            compiled.bind_handle(str(h.name), np.zeros(h.shape.static, h.dtype.numpy))
        for n in range(150):
            inputs = {"tokens": np.full((batch, 1), n, np.int32), "count": np.int32(1)}
            found += [np.array(x) for x in compiled.run(inputs)]
        return found

    for a, b in zip(run(True), run(False), strict=True):
        np.testing.assert_array_equal(a, b)

