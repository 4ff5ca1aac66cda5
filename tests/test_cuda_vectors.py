"""Rows that are moved or computed by elements, by short vectors, and by several of them in a thread."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")

from test_cuda import on_gpu, one

import rlx
from rlx.backends.cuda.code import cubin, launch_of, text_of


@pytest.mark.parametrize("columns, team, parts", [(301, 32, 1), (2001, 256, 1), (20_001, 256, 10)])
def test_a_row_that_no_vector_fits_is_looked_for_once(columns, team, parts):
    rows = one(lambda g: rlx.gather(g.input("x", (300, columns), "bf16"), g.input("i", (9000,), "i64")))
    found = launch_of(rows, "sm_90a")
    body = text_of(found, "kernel").split("kernel(")[1]
    assert (found.team, found.parts, found.blocks * found.threads) == (team, parts, 9000 * team * parts)
    assert body.count("b1[") == 1 and body.index("b1[") < body.index("for (") and cubin(text_of(found, "kernel"), "sm_90a")


def test_threads_copy_two_vectors_where_a_load_waits_for_another():
    build = lambda rows: lambda g: rlx.gather(g.input("x", (512, 1024), "f32"), g.input("i", (rows,), "i64"))  # noqa: E731
    for rows, repeats, blocks in ((1024, 2, 512), (1025, 2, 513), (300, 1, 300)):
        found = launch_of(one(build(rows)), "sm_90a")
        text = text_of(found, "kernel").split("kernel(")[1]
        assert (found.vector, found.repeats, found.blocks) == (4, repeats, blocks)
        assert text.index("rlx_put<4>(b0") < text.index("rlx_fail(status") or repeats == 1
        assert ("break;" in text) == (rows == 1025)  # else each thread has as many
        assert cubin(text_of(found, "kernel"), "sm_90a")


APART = {  # expression, dims of its operands; vector, and vectors of a thread
    "rows of 8 bytes": (lambda x, row: x * row + row, [(6000, 1500), (1500,)], (4, 2)),
    "of 4": (lambda x, row: x * row + row, [(6000, 1502), (1502,)], (2, 4)),
    "joined": (lambda x, y: rlx.concat([x, y], axis=0), [(6001, 1500), (5000, 1500)], (4, 2)),
    "of 16": (lambda x, row: x * row + row, [(6000, 1504), (1504,)], (8, 1)),
    "few": (lambda x, row: x * row + row, [(300, 1500), (1500,)], (4, 1)),
    "many operands": (lambda *xs: sum(xs[1:], xs[0]) + xs[0][:1], [(9000, 1500)] * 40, (4, 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_threads_load_several_short_vectors_before_they_use_one(name):
    op, dims, wanted = APART[name]
    found = launch_of(one(lambda g: op(*(g.input(f"x{n}", d, "bf16") for n, d in enumerate(dims)))), "sm_90a")
    text = text_of(found, "kernel").split("kernel(")[1]
    assert (found.vector, found.repeats) == wanted and cubin(text_of(found, "kernel"), "sm_90a")
    assert found.repeats == 1 or text.rindex("rlx_fetch<") < text.index("rlx_put<")


@on_gpu
@pytest.mark.parametrize("name", APART)
def test_several_short_vectors_of_a_thread_agree_with_numpy(name):
    op, dims, _ = APART[name]
    given = {f"x{n}": np.random.default_rng(n).normal(size=d).astype(rlx.as_dtype("bf16").numpy) for n, d in enumerate(dims)}
    g = rlx.Graph("g")
    g.set_outputs([op(*(g.input(name, x.shape, "bf16") for name, x in given.items()))])
    (found,) = rlx.Session("cuda").compile(g).run(given)
    wanted = np.float64(np.concatenate([*given.values()]) if name == "joined" else op(*map(np.float64, given.values())))
    # A kernel rounds its result alone: half of the last of bf16's 8 bits, and f32's errors where terms cancel.
    np.testing.assert_allclose(np.float64(found), wanted, rtol=2.0**-8, atol=1e-5)
