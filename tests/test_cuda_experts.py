"""Products of groups of rows with a matrix each on CUDA: their kernels, and layers of experts on a GPU."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import expert_graphs
import numpy as np
import pytest

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.contract import Tile
from rlx.backends.cuda.gemv import GemvLaunch
from rlx.backends.cuda.gemv_blocks import BlocksLaunch
from rlx.backends.cuda.gpu import refusal
from rlx.backends.cuda.scan import chosen
from rlx.backends.cuda.segments import in_tiles
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.backends.cuda.warps import WarpLaunch
from rlx.compiler import lower
from rlx.ir.blocks import FORMATS
from rlx.ir.dtype import index_
from rlx.ir.kernel import Buffer, Carry, Contract, Expr, Kernel, Load, Loop, Store, Var, k
from rlx.ir.ops.quant import random_weights

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")
on_gpu = pytest.mark.skipif(refusal() is not None, reason=f"no GPU: {refusal()}")


def product(
    rows: int, groups: int, k: int, n: int, dtype: str = "bf16", form: str = "", turned: bool = True, norm: bool = False,
    scaled: bool = False, paired: bool = False,
) -> rlx.Graph:  # fmt: skip
    """Groups of norm(x) times w, times z, or its halves times each other. `turned`: w is [groups, n, k]."""
    g = rlx.Graph("product")
    x, ends = g.input("x", (rows, k), dtype), g.input("ends", (groups,), "i32")
    x = rlx.rms_norm(x, g.param("s", (k,), dtype)) if norm else x
    if form:
        w = g.param("w", (groups, n, FORMATS[form].row_bytes(k)), "u8")
    else:
        w = g.param("w", (groups, n, k) if turned else (groups, k, n), dtype)
        w = w.transpose(0, 2, 1) if turned else w
    y = rlx.segment_matmul(x, w, ends, format=form)
    y = rlx.silu(y[:, : n // 2]) * y[:, n // 2 :] if paired else y
    g.set_outputs([y * g.input("z", (rows, n), dtype) if scaled else y])
    return g


def kernel(g: rlx.Graph, arch: str = "sm_90a") -> Kernel:
    found = [s.kernel for s in lower(g, target(arch), rlx.CompileOptions()).steps]
    return next(k for k in found if any(isinstance(s, Contract) and s.count is not None for s in k.body))


# -- without a GPU -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "arch", "kind", "rows"),
    [
        ((8, 64, 2048, 2048), "sm_90a", TensorLaunch, 64), ((128, 64, 2048, 2048), "sm_90a", TensorLaunch, 64),
        ((32768, 64, 2048, 2048), "sm_90a", TensorLaunch, 128), ((8, 64, 2048, 2048), "sm_80", GemvLaunch, 2),
        ((8, 64, 100, 30), "sm_90a", GemvLaunch, 2), ((128, 64, 512, 512), "sm_100", GemvLaunch, 4),
        ((8192, 64, 2048, 2048), "sm_80", WarpLaunch, 128), ((8, 64, 256, 512, "f32"), "sm_90a", GemvLaunch, 2),
        ((1000, 4, 256, 512, "f32"), "sm_90a", Tile, 64), ((8, 128, 2048, 1536, "bf16", "q4_k"), "sm_90a", BlocksLaunch, 1),
        ((128, 128, 2048, 1536, "bf16", "q4_k"), "sm_90a", BlocksLaunch, 4),
        ((1024, 128, 768, 2048, "f32", "q8_0"), "sm_80", BlocksLaunch, 16),
        ((8192, 64, 2048, 2048, "bf16", "q4_k"), "sm_90a", TensorLaunch, 128),
        ((8192, 64, 2048, 2048, "bf16", "q4_k"), "sm_80", BlocksLaunch, 32),
        ((8, 4, 14336, 512, "f32", "q4_k"), "sm_90a", BlocksLaunch, None),  # as many rows as fit into shared memory
    ],
)  # fmt: skip
def test_kernels_suit_the_rows_of_a_group(given: tuple[Any, ...], arch: str, kind: type, rows: int | None):
    found = launch_of(kernel(product(*given), arch), arch)
    assert type(found) is kind and found.segments and found.segments.rows == (rows or found.segments.rows)
    assert cubin(text_of(found, "kernel"), arch)


def test_a_grid_has_points_for_every_choice():
    """However rows are spread over groups, there are no more tiles than grid points."""
    rng = np.random.default_rng(0)
    for rows, groups, tall in ((1, 1, 64), (8, 64, 64), (1000, 7, 64), (1000, 7, 1), (64, 3, 8), (300, 300, 128), (5, 9, 2)):
        cut, segments = in_tiles(kernel(product(rows, groups, 32, 32, "f32")), tall)
        ((tile, most),) = cut.grid
        sizes = [np.bincount(rng.integers(0, rng.integers(1, groups + 1), rows), minlength=groups) for _ in range(50)]
        spread = np.full(groups, rows // groups) + (np.arange(groups) < rows % groups)
        tiles = [int(np.sum(-(-s // tall))) for s in [*sizes, spread, np.eye(groups, dtype=int)[0] * rows]]
        assert tile is segments.tile and max(tiles) <= most <= rows and 1 <= segments.expected <= most


def test_gate_and_up_meet_in_one_kernel():
    assert len(lower(product(64, 8, 256, 512, paired=True), target("sm_90a"), rlx.CompileOptions()).steps) == 1
    found = launch_of(kernel(product(64, 8, 256, 512, paired=True)))
    assert type(found) is TensorLaunch and found.contract.also is not None and cubin(text_of(found, "kernel"), "sm_90a")
    for few in (product(8, 4, 14336, 512, "f32", "q4_k", paired=True), product(100, 16, 512, 256, "bf16", "q8_0", paired=True)):
        (step,) = lower(few, target("sm_90a"), rlx.CompileOptions()).steps
        found = launch_of(step.kernel)
        assert type(found) is BlocksLaunch and found.contract.also is not None and cubin(text_of(found, "kernel"), "sm_90a")
    for other in (
        product(64, 8, 250, 512, paired=True), product(64, 8, 256, 512, "f32", paired=True),
        product(64, 8, 512, 96, "bf16", "q8_0", paired=True), product(900, 8, 512, 256, "bf16", "q8_0", paired=True),
    ):  # fmt: skip
        (step, _) = lower(other, target("sm_90a"), rlx.CompileOptions()).steps
        assert cubin(text_of(launch_of(step.kernel), "kernel"), "sm_90a")


def test_wrong_ends_are_clamped_in_front_of_every_access():
    """The number of rows and the first of them are between 0 and the rows of x, whatever memory holds."""
    for given in ((8, 64, 2048, 2048), (8, 64, 256, 512, "f32"), (8, 128, 2048, 1536, "bf16", "q4_k")):
        text = text_of(launch_of(kernel(product(*given))), "kernel")
        own = text[text.index('extern "C"') :]
        loads = own.count("b0[")
        assert loads >= 2 and own.count("rlx_max_index(((int64_t)x") == loads, "an end is used as it is"


def grouping(rows: int, groups: int) -> rlx.Graph:
    g = rlx.Graph("grouping")
    g.set_outputs([*rlx.group_rows(g.input("ids", (rows,), "i32"), groups=groups)])
    return g


@pytest.mark.parametrize(("rows", "team"), [(100, 32), (1000, 128), (32768, 1024)])
def test_a_team_places_many_rows_at_a_time(rows: int, team: int):
    (step,) = lower(grouping(rows, 64), target("sm_90a"), rlx.CompileOptions()).steps
    found = launch_of(step.kernel)
    text = text_of(found, "kernel")
    assert found.team == team and f"rlx_chosen_before<{team}>(" in text and cubin(text, "sm_90a")


def test_loops_that_store_otherwise_are_not_spread():
    """Two iterations may store at one place, or read what another one stores."""
    i, at = Var("i"), Var("at")
    ids, out = Buffer("ids", rlx.i32, 100), Buffer("out", rlx.i32, 100, writable=True)
    test = k.eq(k.cast(Load(ids, i), index_), k.const(3))
    store = Store(out, at, k.cast(i, rlx.i32), test)
    one = k.select(test, k.const(1), k.const(0))

    def loop(body: Store, step: Expr = one) -> Loop:
        return Loop(i, 100, (body,), carries=(Carry(at, k.const(0), k.add(at, step)),))

    assert chosen(loop(store)) is test
    for other in (
        loop(replace(store, guard=None)), loop(replace(store, index=k.const(5))), loop(replace(store, value=Load(out, i))),
        loop(store, k.select(test, k.const(0), k.const(1))), loop(store, k.const(1)),
    ):  # fmt: skip
        assert chosen(other) is None


# -- on a GPU ------------------------------------------------------------------------------------------------------

SPREADS = ("by chance", "one has all", "the last one has all", "the last one has the rest")


def ends_of(rng: np.random.Generator, rows: int, groups: int, how: str) -> np.ndarray:
    sizes = np.zeros(groups, np.int64)
    if how == "one has all":
        sizes[groups // 2] = rows
    elif how != "the last one has all":
        sizes = np.bincount(rng.integers(0, groups, rows if how == "by chance" else rows // 2), minlength=groups)
    return np.cumsum(sizes).astype(np.int32)


def grouped(x: np.ndarray, w: np.ndarray, ends: np.ndarray) -> np.ndarray:
    out, start = np.zeros((len(x), w.shape[2])), 0
    for group, end in enumerate([*map(int, ends[:-1]), len(x)]):
        out[start:end] = x[start:end] @ w[group]
        start = end
    return out


PRODUCTS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "a token": ((8, 64, 256, 256), {}), "a few": ((128, 16, 256, 192), {}), "many": ((5000, 33, 128, 64), {}),
    "tall tiles": ((9000, 7, 512, 320), {}), "odd columns": ((300, 128, 64, 1000), {"scaled": True}), "odd": ((9, 7, 33, 5), {}),
    "odd, many": ((200, 5, 33, 17, "f16"), {}), "rows of weights": ((500, 9, 64, 48), {"turned": False}),
    "halves": ((300, 9, 256, 512), {"paired": True}), "one group": ((70, 1, 64, 64), {}), "more groups": ((3, 300, 64, 64), {}),
    "f32": ((8, 64, 256, 256, "f32"), {}), "f32, odd": ((100, 5, 77, 33, "f32"), {"scaled": True}),
    "f32, rows of weights": ((50, 9, 64, 48, "f32"), {"turned": False}), "f32, many": ((900, 5, 77, 130, "f32"), {}),
    "norm": ((2, 5, 256, 64, "f32"), {"norm": True}), "q4_k": ((8, 16, 256, 96, "bf16", "q4_k"), {}),
    "q4_k, a few": ((100, 16, 512, 96, "bf16", "q4_k"), {}), "q4_k, many": ((2000, 16, 512, 100, "bf16", "q4_k"), {}),
    "q8_0": ((8, 16, 256, 96, "f32", "q8_0"), {}), "q6_k, many": ((1000, 6, 256, 64, "f32", "q6_k"), {}),
    "halves of q4_k": ((8, 16, 512, 256, "bf16", "q4_k"), {"paired": True}),
    "halves of q8_0, a few": ((100, 16, 512, 256, "f32", "q8_0"), {"paired": True}),
    "q5_k": ((60, 6, 256, 64, "f16", "q5_k"), {"scaled": True}), "one row of q4_k": ((1, 4, 256, 64, "f32", "q4_k"), {}),
}  # fmt: skip


def test_operands_of_an_epilogue_are_loaded_once_where_all_rows_have_the_same():
    """Rows of groups are counted by variables of their own."""

    def text(g: rlx.Graph) -> str:
        (step,) = lower(g, target("sm_90a"), rlx.CompileOptions()).steps
        return text_of(launch_of(step.kernel), "kernel")

    once = re.compile(r"q\d+\[1\]\[8\];")
    g = rlx.Graph("bias")
    x, w, b = g.input("x", (300, 64), "bf16"), g.param("w", (1000, 64), "bf16"), g.param("b", (1000,), "bf16")
    g.set_outputs([x @ rlx.transpose(w) + b])
    given, more = PRODUCTS["odd columns"]
    assert once.search(text(g)) and not once.search(text(product(*given, **more)))


@on_gpu
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_groups_are_right(name: str):
    given, more = PRODUCTS[name]
    rng, form = np.random.default_rng(len(name)), given[5] if len(given) > 5 else ""
    g = product(*given, **more)
    compiled = rlx.Session("cuda").compile(g)
    made = {v.node.name: rng.standard_normal(v.shape.static) for v in (*g.inputs, *g.params)}
    made["w"] /= np.sqrt(given[2])
    made = {v.node.name: made[v.node.name].astype(v.dtype.numpy) for v in (*g.inputs, *g.params)}
    if form:
        random_weights(FORMATS[form])(rng, [made["w"], made["w"]])
    for v in g.params:
        compiled.set_param(v.node.name, made[v.node.name])
    w = FORMATS[form].decode_rows(made["w"], given[2]) if form else made["w"]
    w = np.swapaxes(w, 1, 2) if form or more.get("turned", True) else w
    x = made["x"].astype(np.float64)
    if "s" in made:
        x = x / np.sqrt(np.mean(x**2, axis=1, keepdims=True) + 1e-6) * made["s"].astype(np.float64)
    for how in SPREADS:
        ends = ends_of(rng, *given[:2], how)
        (got,) = compiled.run({"x": made["x"], "ends": ends, **({"z": made["z"]} if "z" in made else {})})
        want = grouped(x, w.astype(np.float64), ends)
        if more.get("paired"):
            gate, up = np.split(want, 2, axis=1)
            want = gate / (1 + np.exp(-gate)) * up
        want = want * made["z"].astype(np.float64) if "z" in made else want
        least = 1e-5 if given[4:5] == ("f32",) and not form else 1.5e-2
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=least * np.abs(want).max(), err_msg=how)


@on_gpu
@pytest.mark.parametrize(("rows", "groups"), [(8, 64), (100, 3), (1000, 64), (5001, 7), (40000, 128)])
def test_rows_are_grouped_on_a_gpu(rows: int, groups: int):
    compiled, rng = rlx.Session("cuda").compile(grouping(rows, groups)), np.random.default_rng(rows)
    for ids in (rng.integers(0, groups, rows), np.where(rng.random(rows) < 0.3, 2**31 - 1, rng.integers(0, groups, rows))):
        order, place, ends = compiled.run({"ids": ids.astype(np.int32)})
        want = np.argsort(ids, kind="stable")
        np.testing.assert_array_equal(order, want)
        np.testing.assert_array_equal(np.asarray(order)[place], np.arange(rows))
        np.testing.assert_array_equal(ends, np.searchsorted(ids[want], np.arange(groups), side="right"))
    with pytest.raises(rlx.errors.IndexRangeError):
        compiled.run({"ids": np.full(rows, groups, np.int32)})


@on_gpu
@pytest.mark.parametrize("form", ["", "q4_k", "q8_0"])
@pytest.mark.parametrize("tokens", [1, 16, 100])
def test_layers_of_experts_are_right_on_a_gpu(tokens: int, form: str):
    g = expert_graphs.layers(tokens, 256, 256, 16, 4, "f32", form, count=1)
    params = expert_graphs.data(g)
    for value in params.values():
        if value.dtype == np.uint8:
            random_weights(FORMATS[form])(np.random.default_rng(2), [value, value])
    compiled = rlx.Session("cuda").compile(g)
    for name, value in params.items():
        compiled.set_param(name, value)
    x = np.random.default_rng(1).standard_normal((tokens, 256)).astype(np.float32)
    (got,) = compiled.run({"x": x})
    want = expert_graphs.expected(x, params, 256, 4, form, count=1)
    assert np.linalg.norm(np.asarray(got, np.float64) - want) < (2e-2 if form else 1e-5) * np.linalg.norm(want)


@on_gpu
@pytest.mark.parametrize("form", ["run", "run_slots", "bound", "call", "queued", "run_raw", "pipelined"])
def test_choices_of_routers_are_captured_from_replays(form: str):
    g = expert_graphs.layers(5, 64, 32, 16, 4, count=2)
    params, made = expert_graphs.data(g), {}
    for device in ("cuda", "cpu"):
        made[device] = rlx.Session(device).compile(g)
        made[device].set_params(params)
    first, second = np.random.default_rng(3).standard_normal((2, 5, 64)).astype(np.float32)
    made["cpu"].enable_moe_topk_capture(4)
    made["cpu"].run({"x": first})
    compiled, array = made["cuda"], first.copy()
    call = {
        "run": lambda: compiled.run({"x": array}), "run_slots": lambda: compiled.run_slots([array]),
        "bound": compiled.bound([array]), "call": lambda: compiled(array), "run_raw": lambda: compiled.run_raw({"x": array}),
        "queued": lambda: compiled.commit_no_wait({"x": array}), "pipelined": lambda: compiled.run_pipelined([{"x": array}]),
    }[form]  # fmt: skip
    array[...] = second
    call()
    compiled.sync_pending()
    array[...] = first
    compiled.enable_moe_topk_capture(3)
    call()
    compiled.sync_pending()
    array[...] = second
    call()
    compiled.sync_pending()
    for ours, theirs in zip(compiled.take_moe_topk_capture(), made["cpu"].take_moe_topk_capture(), strict=True):
        np.testing.assert_array_equal(ours, theirs[:, :3])


@on_gpu
def test_wrong_ends_touch_no_other_memory():
    """compute-sanitizer runs this, too."""
    for given in ((100, 16, 256, 256), (100, 16, 256, 64, "f32"), (40, 16, 256, 64, "bf16", "q4_k")):
        g = product(*given)
        compiled = rlx.Session("cuda").compile(g)
        compiled.set_param("w", np.zeros(g.params[0].shape.static, g.params[0].dtype.numpy))
        x = np.ones(given[:1] + given[2:3]).astype(g.inputs[0].dtype.numpy)
        for ends in (np.arange(16) * -1000, np.full(16, 2**31 - 1), np.arange(16)[::-1] * 50):
            (got,) = compiled.run({"x": x, "ends": ends.astype(np.int32)})
            assert got.shape == (given[0], given[3])
