"""Copies of the operands of products: boxes of bulk copies, and weights that are stored so that more bytes are copied at once.

A barrier waits for as many bytes as the boxes of a stage bring: one less or more, and the kernel never ends. The kernels' texts
are read, for every tile, since no driver without a GPU runs them.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

import expert_graphs
import pytest
from test_cuda_networks import gated

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import cubin, launch_of, text_of
from rlx.backends.cuda.fma import FmaLaunch
from rlx.backends.cuda.tensor import TensorLaunch, Tiling, on_tensor_cores
from rlx.compiler import lower
from rlx.ir.dtype import as_dtype
from rlx.ir.kernel import Contract, Kernel, Operand

HOPPER = target("sm_90a")
LOAD = re.compile(r"^\s*(?:if \((.*?)\) )?rlx_load_box\(to \+ \d+, (?:boxes_|&?map_)(\w+), full", re.M)


def launches(g: rlx.Graph) -> list[TensorLaunch]:
    phases = lower(g, HOPPER, rlx.CompileOptions()).phases.values()
    found = (launch_of(s.kernel, "sm_90a") for steps in phases for s in steps)
    return [x for x in found if isinstance(x, TensorLaunch) and x.maps and not x.tiling.raw]


def value(text: str, names: dict[str, int | bool]) -> int:
    """Of a C expression of this text."""
    text = re.sub(r"\((last_\w) \? (\d+) : (\d+)\)", r"(\2 if \1 else \3)", text).replace(" / ", " // ")
    return eval(text, {"min": min, **names})


def stages(launch: TensorLaunch) -> list[tuple[int, int]]:
    """Of a stage of every tile: bytes that its barrier waits for, and bytes of its boxes."""
    text, c, t, found = text_of(launch, "kernel"), launch.contract, launch.tiling, []
    if not (declared := re.search(r"const int copied = (.*);", text)):
        return []
    loads = LOAD.findall(text[text.rindex("rlx_await(empty + s") :])
    sides = dict(zip("ab", launch.sides)) | {"weights": launch.sides[1]}
    for row in range(0, c.m, t.rows):
        for column in range(0, c.width, t.columns):
            last = {"a": row > c.m - t.rows, "b": column > c.width - t.columns, "weights": False}
            names = {"row0": row, "column0": column, **{f"last_{name}": is_last for name, is_last in last.items()}}
            brought = 0
            for condition, name in loads:
                box = (last[name] and sides[name].last) or sides[name].tensor
                assert box is not None
                if not condition or value(condition, names):
                    brought += math.prod(box.box) * as_dtype(box.dtype).itemsize
            found.append((value(declared[1], names), brought))
    return found


def plain(m: int, n: int, depth: int, turned: bool) -> rlx.Graph:
    g = rlx.Graph("plain")
    x, y = g.input("x", (m, depth), "bf16"), g.input("y", (n, depth) if turned else (depth, n), "bf16")
    g.set_outputs([x @ (y.T if turned else y)])
    return g


GRAPHS = {
    "plain": lambda m: [plain(m, n, 128, turned) for n in (64, 100, 136, 1000) for turned in (False, True)],
    "gated": lambda m: [gated(m, half, depth) for half in (32, 64, 100, 320) for depth in (64, 256)],
    "experts": lambda m: [expert_graphs.layers(m, d, ffn, 16, 4, "bf16", "", count=1) for d, ffn in ((64, 32), (256, 128))],
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_a_barrier_waits_for_the_bytes_that_boxes_bring(kind: str) -> None:
    seen = 0
    for m in (5, 20, 40, 65, 130, 200):
        for launch in (x for g in GRAPHS[kind](m) for x in launches(g)):
            for waited, brought in stages(launch):
                assert waited == brought, (kind, m, launch.tiling)
                seen += 1
    assert seen > 10


def only(g: rlx.Graph) -> Kernel:
    (step,) = lower(g, HOPPER, rlx.CompileOptions()).steps
    return step.kernel


SWAPPED = (Tiling(64, 88, turns=True), Tiling(128, 80), Tiling(256, 136), Tiling(128, 32, parts=4))


@pytest.mark.parametrize("turned", [False, True])
def test_swapped_tiles_wait_for_their_bytes(turned: bool) -> None:
    for m in (20, 130, 264):
        for t in SWAPPED:
            found = on_tensor_cores(only(plain(m, 1000, 1040, turned)), tiling=replace(t, swapped=True))
            assert found and found.contract.m == 1000 and found.maps[0].argument == 1, "rows of a tile are columns of the product"
            assert found.early == 1, "the weights are still what is copied before the kernel in front ends"
            assert all(waited == brought for waited, brought in stages(found)), (m, t)


def test_tiles_are_swapped_where_rows_would_be_idle() -> None:
    few, third = (on_tensor_cores(only(plain(m, n, depth, True))) for m, n, depth in ((20, 2560, 9728), (260, 5120, 5120)))
    assert few and few.tiling.swapped and few.tiling.columns == 32 and few.tiling.stages == 10
    assert third and third.tiling.swapped and third.tiling.columns == 88 and third.blocks == 120
    short = on_tensor_cores(only(plain(260, 5120, 512, True)))
    assert short and not short.tiling.swapped


def test_no_box_lies_outside_a_matrix():
    """But for the rows that fill up one of 8: others would take a bulk copy longer than rows of the matrix."""
    found = on_tensor_cores(only(plain(300, 400, 1024, True)), tiling=Tiling(128, 144))
    assert found and [m.box for m in found.maps] == [(64, 128), (64, 48), (64, 144), (64, 112)]
    text = text_of(found, "kernel")
    assert "last_a ? 6144 : 16384" in text and "last_b ? 14336 : 18432" in text and cubin(text, "sm_90a")
    few = on_tensor_cores(only(plain(17, 4096, 4096, True)))
    assert few and few.maps[0].box == (64, 24) and few.copied(0) == 24 * 128
    found = on_tensor_cores(only(plain(300, 336, 1024, False)), tiling=Tiling(128, 256))
    text = text_of(found, "kernel") if found else ""
    # boxes of 64 columns: of the last tile, 80 are left
    assert "if (column0 + 128 < 336) rlx_load_box" in text and "min(32768, (336 - column0 + 63) / 64 * 8192)" in text


@pytest.mark.parametrize(
    "rows, precision, state", [(1024, "f32", False), (1023, "f32", False), (1024, "tf32", False), (1024, "f32", True)]
)
def test_weights_of_many_rows_of_f32_are_stored_with_adjacent_columns(rows, precision, state):
    """Not where programs of fewer rows, which read rows of a weight, share it: those of a state have several sizes."""
    g = rlx.Graph("g")
    weights = [g.param(name, (96, 128), "f32") for name in "uv"]
    x = g.input("x", (4, rows // 4, 128), "f32") if rows % 4 == 0 else g.input("x", (rows, 128), "f32")
    if state:
        g.assign(total := g.handle(rlx.BufferHandle("total", (4,), rlx.f32)), total + 1)
    g.set_outputs([x @ rlx.transpose(rlx.concat(*weights, axis=0), (1, 0))])
    program = lower(g, HOPPER, rlx.CompileOptions(precision=precision))
    kernel = next(s.kernel for s in program.steps if "matmul" in s.kernel.origin)
    found, stored = launch_of(kernel, "sm_90a"), (rows, precision, state) == (1024, "f32", False)
    c = next(s for s in found.kernel.body if isinstance(s, Contract))
    assert isinstance(c.b, Operand) and (c.b.row_stride, c.b.col_stride) == ((192, 1) if stored else (1, 128))
    assert isinstance(found, FmaLaunch) == (precision == "f32") and ("pack" in program.prepare[0].kernel.origin) == stored
    text = text_of(found, "kernel")
    assert (", 192, 1, 192, 128, true> b(" in text) == stored and cubin(text, "sm_90a")
