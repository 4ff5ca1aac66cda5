"""Mixture of experts: groups of rows times a matrix each, on every device, against numpy in float64 and torch; routers, alone
and in programs."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from devices import DEVICES
from expert_graphs import data, expected, layers
from kernel_runs import TARGETS, run

import rlx
from rlx.backends import get
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.kernels import contract, tiles
from rlx.backends.cpu.render import axes, render
from rlx.backends.cpu.target import target_for
from rlx.backends.shared import c_style
from rlx.backends.shared.c_dialect import C
from rlx.compiler import lower
from rlx.compiler.check import program_faults
from rlx.errors import CompileError, GraphError, IndexRangeError
from rlx.ir import kernel as K
from rlx.ir.blocks import FORMATS
from rlx.ir.cost import program_work
from rlx.ir.dtype import as_dtype, i32
from rlx.ir.evaluate import evaluate, evaluate_ranks
from rlx.ir.graph import Graph
from rlx.ir.kernel_parse import parse_kernel
from rlx.ir.kernel_text import print_kernel
from rlx.ir.ops.quant import random_weights
from rlx.ir.placement import Split
from rlx.ir.program import Program, Region, print_program
from rlx.ir.program_parse import parse_program

SESSIONS = {device: rlx.Session(device) for device in DEVICES}
TOLERANCE = {"f64": 1e-12, "f32": 2e-5, "f16": 4e-3, "bf16": 4e-2, "f8e4m3": 0.15}
# rows of each group: some empty, one with all of them, fewer rows than groups, one group, none at all, more than a block of rows
SIZES = ([3, 0, 5, 1], [0, 0, 9, 0], [1, 0, 0, 1, 0, 0], [7], [0, 0], [150, 2, 0, 40])


def product(sizes: list[int], k: int, n: int, dtypes: tuple[str, str], known: bool) -> Graph:
    g = Graph("product")
    g.set_outputs([grouped(g, "", sizes, k, n, dtypes, known)])
    return g


def grouped(g: Graph, number: str, sizes: list[int], k: int, n: int, dtypes: tuple[str, str], known: bool) -> rlx.Value:
    """A product in a graph; its operands have this number."""
    x = g.input(f"x{number}", (sum(sizes), k), dtypes[0])
    w = (g.param if known else g.input)(f"w{number}", (len(sizes), k, n), dtypes[1])
    return rlx.grouped_matmul(x, w, g.input(f"sizes{number}", (len(sizes),), "i32"))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["f32", "f64", "f16", "bf16", "f8e4m3", "f32 bf16", "bf16 f8e4m3"])
def test_groups_of_rows_times_a_matrix_each(device: str, dtype: str) -> None:
    """In one graph, which is compiled once."""
    left, right = (dtype.split() * 2)[:2]
    g, inputs, params, wanted = Graph("products"), dict[str, np.ndarray](), dict[str, np.ndarray](), list[torch.Tensor]()
    cases = list(itertools.product(SIZES, ((17, 5), (64, 96)), (False, True)))
    g.set_outputs([grouped(g, str(i), sizes, k, n, (left, right), known) for i, (sizes, (k, n), known) in enumerate(cases)])
    for i, (sizes, (k, n), known) in enumerate(cases):
        rng = np.random.default_rng(i)
        inputs[f"x{i}"] = x = rng.standard_normal((sum(sizes), k)).astype(as_dtype(left).numpy)
        w = rng.standard_normal((len(sizes), k, n)).astype(as_dtype(right).numpy)
        (params if known else inputs)[f"w{i}"] = w
        inputs[f"sizes{i}"] = np.array(sizes, np.int32)
        want = torch.zeros(sum(sizes), n, dtype=torch.float64)
        for e, (start, stop) in enumerate(itertools.pairwise(np.cumsum([0, *sizes]))):
            want[start:stop] = torch.from_numpy(x[start:stop].astype(np.float64)) @ torch.from_numpy(w[e].astype(np.float64))
        wanted.append(want)
    compiled = SESSIONS[device].compile(g)
    for name, w in params.items():
        compiled.set_param(name, w)
    for found, want, case in zip(compiled.run(inputs), wanted, cases, strict=True):
        most = max(1.0, float(want.abs().max()) if want.numel() else 1.0)
        name = "f32" if dtype == "f32 bf16" else left
        np.testing.assert_allclose(found.astype(np.float64), want.numpy(), atol=TOLERANCE[name] * most, err_msg=str(case))


@pytest.mark.parametrize("columns", [tiles.SCRATCH // 4, tiles.SCRATCH // 4 + 1])
def test_a_row_that_alone_fills_the_scratch_of_a_task(columns: int) -> None:
    """f16 rows are converted to f32 in scratch, as many as fit, and at least one."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(dims).astype(np.float16) for dims in ((3, columns), (3, columns, 1)))
    compiled = rlx.Session("cpu").compile(product([0, 1, 2], columns, 1, ("f16", "f16"), known=False))
    (found,) = compiled.run({"x": x, "w": w, "sizes": np.array([0, 1, 2], np.int32)})
    want = [float(row.astype(np.float64) @ w[e, :, 0].astype(np.float64)) for row, e in zip(x, (1, 2, 2))]
    np.testing.assert_allclose(found[:, 0].astype(np.float64), want, atol=4e-3 * max(map(abs, want)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sizes", [[3, -1, 7], [3, 3, 4], [3, 3, 2]])
def test_sizes_that_do_not_sum_to_the_rows_are_an_error(device: str, sizes: list[int]) -> None:
    compiled = SESSIONS[device].compile(product([3, 3, 3], 4, 4, ("f32", "f32"), known=False))
    given = {"x": np.zeros((9, 4), np.float32), "w": np.zeros((3, 4, 4), np.float32), "sizes": np.array(sizes, np.int32)}
    with pytest.raises(IndexRangeError):
        compiled.run(given)


@pytest.mark.parametrize("device", DEVICES)
def test_ends_out_of_range_leave_no_buffer(device: str) -> None:
    """Their results are undefined; the rest of memory stays as it is."""
    g = Graph("wild")
    x, w, ends = g.input("x", (9, 4), "f32"), g.input("w", (3, 4, 8), "f32"), g.input("ends", (3,), "i32")
    g.set_outputs([rlx.segment_matmul(x, w, ends), x + 1.0])
    compiled = SESSIONS[device].compile(g)
    for wrong in ([-5, 2**31 - 1, -(2**31)], [100, 100, 100], [-1, -1, -1]):
        given = {"x": np.ones((9, 4), np.float32), "w": np.ones((3, 4, 8), np.float32), "ends": np.array(wrong, np.int32)}
        assert np.all(compiled.run(given)[1] == 2)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ids", [[0, 4], [-1, 0]])
def test_ids_of_no_group_are_an_error(device: str, ids: list[int]) -> None:
    g = Graph("ids")
    g.set_outputs(rlx.group_rows(g.input("ids", (2,), "i32"), groups=4))
    with pytest.raises(IndexRangeError):
        SESSIONS[device].compile(g).run({"ids": np.array(ids, np.int32)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16"])
def test_a_layer_of_experts(device: str, dtype: str) -> None:
    for tokens, (width, ffn, experts, k) in itertools.product((1, 5, 40), ((48, 40, 8, 2), (33, 16, 3, 3))):
        g = layers(tokens, width, ffn, experts, k, dtype)
        params = data(g)
        compiled = SESSIONS[device].compile(g)
        for name, value in params.items():
            compiled.set_param(name, value)
        x = np.random.default_rng(1).standard_normal((tokens, width)).astype(as_dtype(dtype).numpy)
        (found,) = compiled.run({"x": x})
        np.testing.assert_allclose(found.astype(np.float64), expected(x, params, ffn, k), atol=3 * TOLERANCE[dtype])


@pytest.mark.parametrize("form", ["q8_0", "q4_0", "q4_k", "q5_k", "q6_k"])
def test_a_layer_of_packed_experts(form: str) -> None:
    for tokens in (1, 9, 70):
        g = layers(tokens, 256, 256, 6, 2, "f32", form)
        params = data(g)
        compiled = SESSIONS["cpu"].compile(g)
        for name, value in params.items():
            compiled.set_param(name, value)
        x = 20 * np.random.default_rng(1).standard_normal((tokens, 256)).astype(np.float32)
        (found,) = compiled.run({"x": x})
        want = expected(x, params, 256, 2, form)
        np.testing.assert_allclose(found - x, want - x, atol=0.03 * float(np.abs(want - x).max()))


# -- kernels and programs ------------------------------------------------------------------------------------------


def program(tokens: int = 4, device: str = "cpu", options: rlx.CompileOptions | None = None) -> Program:
    return lower(layers(tokens, 48, 40, 8, 2, count=2), get(device).target(0), options or rlx.CompileOptions())


def test_an_exact_number_of_rows_reads_back() -> None:
    kernels = [s.kernel for s in program().steps]
    ragged = [x for x in kernels for s in x.body if isinstance(s, K.Contract) and s.count is not None]
    assert len(ragged) == 4
    for kernel in ragged:
        text = print_kernel(kernel)
        assert " exact " in text and print_kernel(parse_kernel(text)) == text


def test_the_cost_of_a_program_counts_the_experts_that_its_tokens_may_use() -> None:
    """Of 8 experts, one token uses two: their weights are read, not all."""
    one = {w.kernel: w for w in program_work(program(1)).kernels if "segment_matmul" in w.kernel}
    many = {w.kernel: w for w in program_work(program(64)).kernels if "segment_matmul" in w.kernel}
    width, ffn = 48, 40
    assert all(w.read_bytes >= 8 * width * ffn * 4 for w in many.values())
    assert all(2 * width * ffn * 4 <= w.read_bytes <= 4 * 2 * width * ffn * 4 for w in one.values())
    assert max(w.flops or 0 for w in one.values()) == pytest.approx(2 * 2 * width * 2 * ffn, rel=0.1)


def test_the_tokens_of_a_group_are_gathered_in_the_product() -> None:
    """A layer: scores, top k, weights, groups, gather and gate and up, activation and down, sum of weighted rows."""
    names = [" ".join(s.kernel.origin) for s in program().steps]
    assert sum("segment_matmul" in name for name in names) == 4
    assert all("gather" in name or "exp" in name for name in names if "segment_matmul" in name), names


def test_low_tiles_fetch_ahead_where_that_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits, and nothing read past the last weights."""
    target, found, sizes = with_natives(TARGETS["host"]), [], [1, 0, 2, 3, 5, 20]
    steps = lower(product(sizes, 64, 112, ("f32", "f32"), known=True), target, rlx.CompileOptions()).steps
    kernel = next(s.kernel for s in steps if isinstance(s.kernel.body[0], K.Contract))
    rng = np.random.default_rng(0)
    known = {(i32, 6): np.cumsum(sizes).astype(np.int32)}
    values = [known.get((b.dtype, b.size), rng.standard_normal(b.size).astype(b.dtype.numpy)) for b in kernel.buffers]
    for ahead in (False, True):
        monkeypatch.setattr(contract, "fetches_ahead", lambda features, ahead=ahead: ahead)
        functions = render(kernel, target, "kernel").text.split("define ")
        low = [text for text in functions if re.match(r"internal void @tile_[123]x", text)]
        assert len(low) >= 3 and all(("llvm.prefetch" in text) == ahead for text in low)
        (out,), status = run(kernel, [None if b.writable else v for b, v in zip(kernel.buffers, values)], target)
        assert status == 0
        found.append(out.tobytes())
    assert found[0] == found[1]


def test_a_narrow_panel_fetches_only_its_columns() -> None:
    """64 columns are a panel of 48 and one of 16, of which a step of k reads one line of the three that it has. With one vector,
    8 rows have sums of their own for two steps."""
    target = with_natives(target_for("x86_64-unknown-linux-gnu", "sapphirerapids"))
    steps = lower(product([9, 2], 64, 64, ("f32", "f32"), known=True), target, rlx.CompileOptions()).steps
    kernel = next(s.kernel for s in steps if isinstance(s.kernel.body[0], K.Contract))
    functions = render(kernel, target, "kernel").text.split("define ")
    lines = {m[1]: text.count("call void @llvm.prefetch") for text in functions if (m := re.search(r"@(tile_\w+)\(", text))}
    assert lines["tile_8x1_0"] == 2 and lines["tile_8x3_0_192_sized"] == 3 and lines["tile_8x3_0_96_sized"] == 2


def test_the_defaults_of_tuning_parameters_are_those_of_the_code() -> None:
    target = with_natives(replace(TARGETS["host"], threads=4))
    for form in ("", "q8_0"):
        steps = lower(layers(40, 256, 256, 8, 2, "f32", form), target, rlx.CompileOptions()).steps
        kernels = [s.kernel for s in steps if isinstance(s.kernel.body[0], K.Contract) and s.kernel.body[0].count is not None]
        assert len(kernels) == 2
        for kernel in kernels:
            found = axes(kernel, target)
            assert found and all(len(values) > 1 for values in found.values())
            usual = render(kernel, target, "kernel")
            assert render(kernel, target, "kernel", {name: values[0] for name, values in found.items()}) == usual
            assert all(render(kernel, target, "kernel", {name: values[-1]}) != usual for name, values in found.items())


def test_a_program_lists_its_routers_in_forward_order() -> None:
    found = program()
    assert [(r.shape.static, r.experts, r.params) for r in found.routers] == [
        ((4, 2), 8, (f"layer{n}.up", f"layer{n}.down")) for n in range(2)
    ]
    assert all(found.buffers[r.buffer].region is Region.OUTPUT and r.shape.dtype == i32 for r in found.routers)
    text = print_program(found)
    constants = {}
    assert parse_program(text, found.target, constants).routers == found.routers


def test_a_router_that_is_not_kept_is_a_fault() -> None:
    found = program()
    first, *others = found.routers
    for wrong in (
        {"buffer": found.inputs[0]}, {"buffer": 10**6}, {"params": ("nothing",)}, {"shape": first.shape.with_dims((8, 1))},
        {"ahead": 4},
    ):  # fmt: skip
        bad = Program(**{**found.__dict__, "routers": (type(first)(**{**first.__dict__, **wrong}), *others)})
        assert any("router" in fault for fault in program_faults(bad)), wrong


def guessing(biased: bool) -> Graph:
    """Two layers; the first guesses what the second will choose, from its own input."""
    g = Graph("guessing")
    x = h = g.input("x", (5, 16), "f32")
    gates = [g.param(f"gate{i}", (16, 8), "f32") for i in range(2)]
    for i, gate in enumerate(gates):
        more = [g.param(f"bias{i}", (8,), "f32")] if biased else []
        if i == 0:
            more += [rlx.top_k(h @ gates[1], k=2)[1].astype("i32")]
        ids, weights = rlx.route(h @ gate, *more, k=2)
        order, place, ends = rlx.group_rows(ids.reshape((10,)), groups=8)
        w = g.param(f"w{i}", (8, 16, 16), "f32")
        y = rlx.gather(rlx.segment_matmul(rlx.gather(x, order // 2), w, ends), place).reshape((5, 2, 16))
        h = h + rlx.sum(y * weights.reshape((5, 2, 1)), axis=1)
    g.set_outputs([h, rlx.top_k(x @ gates[1], k=2)[1]])
    return g


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_a_guess_of_the_next_choice_is_kept_beside_the_choice(device: str, biased: bool) -> None:
    compiled = SESSIONS[device].compile(guessing(biased))
    rng = np.random.default_rng(0)
    for p in compiled.params:
        compiled.set_param(p.name, rng.standard_normal(p.shape.static, np.float32))
    _, expected = compiled.run({"x": rng.standard_normal((5, 16), np.float32)})
    found = compiled.program()
    first, second = found.routers
    assert [(r.shape.static, r.tokens, r.ahead) for r in (first, second)] == [((10, 2), 5, 5), ((5, 2), 5, 0)]
    constants = {}
    assert parse_program(print_program(found), found.target, constants).routers == found.routers
    with compiled.settled() as executable:
        kept = executable.read(first.buffer).reshape(10, 2)
    assert device == "null" or np.array_equal(kept[5:], expected)
    with pytest.raises(GraphError, match="after the scores come a bias"):
        rlx.route(Graph("g").input("x", (3, 8), "f32"), np.zeros((3, 3), np.int32), k=2)


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_a_bucket_that_hold_no_data_are_in_no_group(device: str) -> None:
    g = layers("n", 48, 40, 8, 2, count=2)
    compiled = SESSIONS[device].compile(g, rlx.CompileOptions().bind_extent("n", 12))
    params = data(g)
    for name, value in params.items():
        compiled.set_param(name, value)
    x = np.random.default_rng(3).standard_normal((12, 48)).astype(np.float32)
    for rows in (1, 5, 12):
        x[rows:] = np.nan
        compiled.set_active_extent((rows, 12))
        (found,) = compiled.run({"x": x})
        np.testing.assert_allclose(found[:rows], expected(x[:rows], params, 40, 2, count=2), atol=1e-4)
        x = np.nan_to_num(x, nan=1.0)


# -- routing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3"])
def test_routing_is_that_of_transformers(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    module = __import__(f"transformers.models.{family}.modeling_{family}", fromlist=["x"])
    made = {
        "mixtral": lambda: (
            module.MixtralTopKRouter(transformers.MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2)),
            {"k": 2, "scoring": "top_k_softmax"},
        ),
        "qwen3_moe": lambda: (
            module.Qwen3MoeTopKRouter(
                transformers.Qwen3MoeConfig(hidden_size=16, num_experts=12, num_experts_per_tok=3, norm_topk_prob=True)
            ),
            {"k": 3, "renormalise": True},
        ),
        "deepseek_v2": lambda: (
            module.DeepseekV2TopkRouter(
                transformers.DeepseekV2Config(
                    hidden_size=16, num_attention_heads=4, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
                    topk_method="group_limited_greedy", routed_scaling_factor=16.0, norm_topk_prob=False,
                )
            ),
            {"k": 4, "groups": 4, "top_groups": 2, "scale": 16.0},
        ),
        "deepseek_v3": lambda: (
            module.DeepseekV3TopkRouter(
                transformers.DeepseekV3Config(
                    hidden_size=16, num_attention_heads=4, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2,
                    routed_scaling_factor=2.5, norm_topk_prob=True,
                )
            ),
            {"k": 4, "scoring": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "renormalise": True},
        ),
    }  # fmt: skip
    torch.manual_seed(0)
    router, attrs = made[family]()
    torch.nn.init.normal_(router.weight)
    x, bias = torch.randn(50, 16), None
    if family == "deepseek_v3":
        router.e_score_correction_bias.copy_(torch.randn(16) * 0.3)
        bias = router.e_score_correction_bias.numpy()
    with torch.no_grad():
        _, weights, ids = router(x)
    g = Graph("route")
    operands = [g.input("x", (50, 16), "f32") @ g.param("w", tuple(router.weight.shape), "f32").T]
    operands += [rlx.constant(bias)] if bias is not None else []
    g.set_outputs(rlx.route(*operands, **attrs), ["ids", "weights"])
    for device in DEVICES:
        compiled = SESSIONS[device].compile(g)
        compiled.set_param("w", router.weight.detach().numpy())
        chosen, mine_of = compiled.run({"x": x.numpy()})
        mine, its = (np.zeros((50, router.weight.shape[0])) for _ in range(2))
        np.put_along_axis(mine, chosen.astype(np.int64), mine_of, 1)
        np.put_along_axis(its, ids.numpy(), weights.numpy(), 1)
        np.testing.assert_allclose(mine, its, atol=1e-5 * attrs.get("scale", 1.0))


@pytest.mark.parametrize(
    "attrs, says",
    [
        ({"k": 9}, "cannot be chosen"), ({"k": 0}, "at least one"), ({"k": 2, "groups": 3}, "equal groups"),
        ({"k": 2, "groups": 2, "top_groups": 3}, "from 1 to 2"), ({"k": 2, "scoring": "best"}, "scoring"),
        ({"k": 5, "groups": 2}, "cannot be chosen"),
    ],
)  # fmt: skip
def test_impossible_choices_are_errors(attrs: dict, says: str) -> None:
    g = Graph("route")
    with pytest.raises(GraphError, match=says):
        rlx.route(g.input("x", (3, 8), "f32"), **attrs)


def test_weights_that_anything_else_reads_are_not_experts_of_a_router() -> None:
    g = layers(4, 48, 40, 8, 2)
    up = next(v for v in g.params if v.node.name == "layer0.up")
    g.set_outputs([*g.outputs, rlx.sum(rlx.exp(up)) + g.inputs[0]])
    assert [r.params for r in lower(g, get("cpu").target(0), rlx.CompileOptions()).routers] == [("layer0.down",)]


def test_a_narrow_precision_narrows_rows_and_weights_of_experts() -> None:
    found = program(4, options=rlx.CompileOptions(precision="bf16"))
    products = [s for step in found.steps for s in step.kernel.body if isinstance(s, K.Contract) and s.count is not None]
    assert [(s.a.dtype.name, s.b.dtype.name) for s in products] == [("bf16", "bf16")] * 4


@pytest.mark.parametrize("form", ["", "q8_0"])
def test_ranks_share_the_columns_of_experts_and_what_the_others_sum(form: str) -> None:
    """As a dense network's: gate and up by columns, down by rows, one all_reduce. The products stay whole ops."""
    width, ffn, experts, rng = 64, 128, 4, np.random.default_rng(0)
    g, rows = Graph("experts"), FORMATS[form].row_bytes if form else None
    x, ends = g.input("x", (9, width), "f32"), g.input("ends", (experts,), "i32")
    if rows:
        up, down = (experts, 2 * ffn, rows(width)), (experts, width, rows(ffn))
    else:
        up, down = (experts, width, 2 * ffn), (experts, ffn, width)
    hidden = rlx.segment_matmul(x, g.param("up", up, "u8" if form else "f32"), ends, format=form)
    hidden = rlx.silu(hidden[:, :ffn]) * hidden[:, ffn:]
    g.set_outputs([rlx.segment_matmul(hidden, g.param("down", down, "u8" if form else "f32"), ends, format=form)])
    columns, summed = (1, 2) if form else (2, 1)
    marks = {"up": Split(columns, (ffn, ffn)), "down": summed}
    p = rlx.partition(g, marks, 2)
    names = [n.op.name for n in p.graph.nodes()]
    assert names.count("segment_matmul") == 2 and names.count("all_reduce") == 1 and "gather" not in names
    params = {v.node.name: rng.standard_normal(v.shape.static).astype(v.dtype.numpy) for v in g.params}
    if form:
        params = {name: np.zeros_like(a) for name, a in params.items()}
        for a in params.values():
            random_weights(FORMATS[form])(rng, [a, a])
    given = {"x": 30 * rng.standard_normal((9, width)).astype(np.float32), "ends": np.array([2, 2, 7, 9], np.int32)}
    want = evaluate(g, given, params)[0][0]
    for (found,), _ in evaluate_ranks(p.graph, *([p.shards(a, r) for r in range(2)] for a in (given, params, {}))):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5 * float(np.abs(want).max()))
    with pytest.raises(CompileError, match="each rank needs all experts"):
        rlx.partition(g, {"up": 0}, 2)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "f64", *FORMATS])
def test_kernels_of_groups_stay_in_their_buffers(target: str, dtype: str) -> None:
    """Code for this processor and for a narrower one, between unreadable pages, with gathered rows and an activation behind. Deep
    panels are taken in parts."""
    form, n = dtype if dtype in FORMATS else "", 80
    kind, rng = as_dtype("f32" if form else dtype), np.random.default_rng(1)
    for sizes, k in (([3, 0, 5, 1], 907), ([1], 72), ([0, 40, 0], 72), ([150, 2], 907)):
        k = 256 if form else k
        g, rows, w_dims = Graph("groups"), sum(sizes), (len(sizes), *((n, FORMATS[form].row_bytes(k)) if form else (k, n)))
        x, order = g.input("x", (rows, k), kind), g.input("order", (rows,), "i32")
        w, ends = g.param("w", w_dims, "u8" if form else kind), g.input("ends", (len(sizes),), "i32")
        g.set_outputs([rlx.relu(rlx.segment_matmul(rlx.gather(x, order), w, ends, format=form))])
        given = {"x": rng.standard_normal((rows, k)), "order": rng.permutation(rows), "ends": np.cumsum(sizes)}
        given = {v.node.name: given[v.node.name].astype(v.dtype.numpy) for v in g.inputs}
        weights = np.zeros(w_dims, np.uint8) if form else (rng.standard_normal(w_dims) / 8).astype(kind.numpy)
        if form:
            random_weights(FORMATS[form])(rng, [weights, weights])
        found = lower(g, with_natives(TARGETS[target]), rlx.CompileOptions())
        memory = {b.id: np.zeros(b.shape.num_elements, b.shape.dtype.numpy) for b in found.buffers}
        for id, value in (*zip(found.inputs, given.values()), (found.params[0], weights)):
            memory[id] = value.reshape(-1)
        for step in (*found.prepare, *found.steps):
            values = [None if b.writable else memory[a] for a, b in zip(step.args, step.kernel.buffers)]
            made, status = run(step.kernel, values, with_natives(TARGETS[target]))
            assert not status
            memory |= zip([a for a, b in zip(step.args, step.kernel.buffers) if b.writable], made)
        want = evaluate(g, given, {"w": weights})[0][0].astype(np.float64)
        got = memory[found.outputs[0].buffer].reshape(want.shape).astype(np.float64)
        most = {"f64": 1e-12, "f32": 1e-5, "bf16": 2e-2, "f16": 3e-3}.get(dtype, 0.02)  # x may be rounded to 8 bits
        np.testing.assert_allclose(got, want, atol=most * float(np.abs(want).max()), err_msg=f"{sizes}")


def test_a_renderer_without_groups_of_rows_says_so() -> None:
    products = [s.kernel for s in program().steps if isinstance(s.kernel.body[0], K.Contract)]
    ragged = next(kernel for kernel in products if kernel.body[0].count is not None)
    with pytest.raises(CompileError, match="claims segment_matmul"):
        c_style.render(ragged, C, "kernel")
