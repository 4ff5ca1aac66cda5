"""Bulk copies of tensor-core products: a barrier waits for as many bytes as the boxes of a stage bring. One less or more, and the
kernel never ends. The kernels' texts are read, for every tile, since no driver without a GPU runs them."""

from __future__ import annotations

import math
import re

import expert_graphs
import pytest
from test_cuda_networks import gated

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import launch_of, text_of
from rlx.backends.cuda.tensor import TensorLaunch
from rlx.compiler import lower
from rlx.ir.dtype import as_dtype

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
