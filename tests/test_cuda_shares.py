"""Products of a few rows by few columns on a GPU: blocks share long sums."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")

from test_cuda import graph, kernels, on_gpu

import rlx
from rlx.backends.cuda.code import launch_of, text_of
from rlx.backends.cuda.gemv import GemvLaunch
from rlx.ir.evaluate import evaluate
from rlx.ir.graph import Graph
from tests.cuda_kernels import reports

SHARED = {  # dims, whether the right operand is transposed, dtype; blocks, and those that share the summed axis
    "a row": ((1, 8192), (8192, 64), False, "bf16", (32, 16)),
    "a few rows, odd": ((4, 14_567), (14_567, 32), False, "f16", (16, 8)),
    "very long": ((3, 100_000), (100_000, 5), False, "f32", (64, 64)),
    "several tiles": ((8, 4096), (4096, 512), False, "bf16", (128, 8)),
    "columns of weights, odd": ((7, 4681), (152, 4681), True, "f16", (114, 6)),
    "more rows": ((9, 3001), (40, 3001), True, "bf16", (95, 19)),
    "zeros behind the last part": ((2, 1101), (5, 1101), True, "f32", (7, 7)),
    "batches": ((3, 2, 700), (3, 700, 100), False, "f32", (60, 5)),
}


def product(name: str) -> tuple[Graph, tuple[int, int]]:
    left, right, turned, dtype, wanted = SHARED[name]
    axes = (*range(len(right) - 2), len(right) - 1, len(right) - 2)

    def build(g: Graph) -> rlx.Value:
        w = g.input("w", right, dtype)
        return g.input("x", left, dtype) @ (rlx.transpose(w, axes) if turned else w)

    return graph(build), wanted


@pytest.mark.parametrize("name", SHARED)
def test_blocks_share_long_sums_of_few_columns(name: str) -> None:
    made, wanted = product(name)
    (found,) = (launch_of(kernel, "sm_90a") for kernel in kernels(made))
    assert isinstance(found, GemvLaunch) and (found.blocks, found.shares) == wanted
    assert found.span * (found.shares - 1) < found.contract.k <= found.span * found.shares
    (report,) = reports(text_of(found, "kernel"), "sm_90a").values()
    assert not report.stack and not report.spilled


@pytest.mark.parametrize("dims", [((1, 200), (200, 64)), ((8, 4096), (4096, 8192)), ((1, 1_000_000), (1_000_000, 1))])
def test_one_block_has_a_sum_where_that_is_as_fast(dims: tuple[tuple[int, int], tuple[int, int]]) -> None:
    left, right = dims
    (kernel,) = kernels(graph(lambda g: g.input("x", left, "f32") @ g.input("w", right, "f32")))
    assert getattr(launch_of(kernel, "sm_90a"), "shares", 1) == 1


@on_gpu
@pytest.mark.parametrize("name", SHARED)
def test_long_sums_of_few_columns_are_right(name: str) -> None:
    made, _ = product(name)
    rng = np.random.default_rng(0)
    given = {str(v.name): rng.integers(-1, 2, v.shape.static).astype(v.dtype.numpy) for v in made.inputs}
    compiled = rlx.Session("cuda").compile(made)
    for _ in range(3):  # the words by which blocks tell each other sums are zero again
        np.testing.assert_array_equal(compiled.run(given)[0], evaluate(made, given)[0][0])
