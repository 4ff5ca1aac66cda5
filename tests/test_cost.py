"""Bytes and FLOPs that a report states, against numbers counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.backends.cuda.backend import target
from rlx.compiler import lower
from rlx.ir.cost import ProgramWork, flops


def work(make, *dims: tuple[int, ...], param: tuple[int, ...] = (), **options) -> ProgramWork:
    g = rlx.Graph("w")
    xs = [g.input(f"x{i}", d, rlx.f32) for i, d in enumerate(dims)]
    xs += [g.param("w", param, rlx.f32)] if param else []
    g.set_outputs([make(*xs)])
    compiled = rlx.Session().compile(g, rlx.CompileOptions(threads=1, **options))
    report = compiled.report()
    assert str(report.work) in str(report)
    return report.work


def test_a_chain_moves_what_it_must() -> None:
    w = work(lambda x, y, row: rlx.relu(x * y + row), (6, 50), (6, 50), (50,))
    (kernel,) = w.kernels
    assert (kernel.read_bytes, kernel.written_bytes, kernel.flops) == (4 * (300 + 300 + 50), 4 * 300, 3 * 300)
    assert kernel.least_bytes == w.least_bytes == w.moved_bytes == 4 * 950 and w.flops == 900


def test_what_is_not_fused_is_moved_again() -> None:
    w = work(lambda x, y: x * y + x, (100,), (100,), disable=("fuse",))
    assert [k.flops for k in w.kernels] == [100, 100] and w.least_bytes == 1200
    assert [(k.read_bytes, k.written_bytes) for k in w.kernels] == [(800, 400), (800, 400)] and w.moved_bytes == 2400
    assert "2400 bytes moved, 2.00 times that of the least possible, 1200" in str(w)


def test_softmax_reads_its_rows_twice() -> None:
    """The maximum; then x - max, exp and the sum, kept in cache; then the scaling: 1 + 3 + 1 operations an element, and
    one division to a row."""
    w = work(lambda x: rlx.softmax(x), (8, 40))
    (kernel,) = w.kernels
    assert (kernel.read_bytes, kernel.written_bytes, kernel.least_bytes) == (2 * 1280, 1280, 2560)
    assert kernel.flops == 320 * 5 + 8 and w.moved_bytes == 3840 and w.least_bytes == 2560


def test_a_product_counts_its_packed_weights() -> None:
    w = work(lambda x, w: x @ w, (5, 7), param=(7, 96))
    (kernel,) = w.kernels
    assert kernel.flops == 2 * 5 * 7 * 96
    assert (kernel.read_bytes, kernel.written_bytes) == (4 * (35 + 7 * 96), 4 * 5 * 96)
    assert w.least_bytes == 4 * (35 + 7 * 96 + 480)


def test_a_reduction_over_the_first_axis_reads_once() -> None:
    w = work(lambda x: rlx.sum(x, axis=(0,)), (67, 128))
    (kernel,) = w.kernels
    assert (kernel.read_bytes, kernel.written_bytes, kernel.flops) == (4 * 67 * 128, 4 * 128, 66 * 128)


def test_a_gather_reads_rows_not_the_table() -> None:
    g = rlx.Graph("w")
    table, ids = g.param("table", (1000, 16), rlx.f32), g.input("ids", (3,), rlx.i64)
    g.set_outputs([rlx.gather(table, ids)])
    w = rlx.Session().compile(g, rlx.CompileOptions(threads=1)).report().work
    assert w.least_bytes == 4 * 48 + 8 * 3 + 4 * 48


def test_states_are_read_and_written() -> None:
    g = rlx.Graph("w")
    handle = rlx.BufferHandle("s", (64,), rlx.f32)
    state, x = g.handle(handle), g.input("x", (64,), rlx.f32)
    g.assign(state, state + x)
    g.set_outputs([x * 2.0])
    w = rlx.Session().compile(g, rlx.CompileOptions(threads=1).bind_handle(handle)).report().work
    assert w.least_bytes == 256 * 4 and w.flops == 128


def test_native_attention_states_its_operations() -> None:
    q, kv = (1, 2, 8, 16), (1, 2, 12, 16)
    g = rlx.Graph("w")
    g.set_outputs([rlx.attention(*(g.input(n, d, rlx.f32) for n, d in (("q", q), ("k", kv), ("v", kv))))])
    compiled = rlx.Session().compile(g, rlx.CompileOptions(threads=1))
    (kernel,) = compiled.report().work.kernels
    assert kernel.flops == 2 * (2 * 8 * 12) * 32
    assert kernel.least_bytes == kernel.read_bytes + kernel.written_bytes == 4 * (2 * np.prod(q) + 2 * np.prod(kv))


@pytest.mark.parametrize("last", [False, True])
def test_native_convolutions_state_their_operations(last: bool) -> None:
    """Of each channel alone, and of few results: the multiply-adds of the windows, wherever the channels are."""
    for channels, out, groups in ((40, 40, 40), (40, 3, 1)):
        g, window = rlx.Graph("w"), (channels // groups, 3, 5)
        x = g.input("x", (2, 9, 12, channels) if last else (2, channels, 9, 12), rlx.f32)
        w = g.param("w", (*window[1:], window[0], out) if last else (out, *window), rlx.f32)
        g.set_outputs([rlx.conv(x, w, low=(1, 2), high=(1, 2), groups=groups, channels_last=last)])
        (step,) = lower(g, target("sm_90a"), rlx.CompileOptions()).steps
        assert flops(step.kernel) == 2 * (2 * 9 * 12 * out) * (15 * channels // groups)


def test_quantised_products_state_their_operations() -> None:
    g = rlx.Graph("w")
    x, w = g.input("x", (3, 64), rlx.f32), g.param("w", (40, 68), rlx.u8)
    g.set_outputs([rlx.dequant_matmul(x, w, format="q8_0")])
    (kernel,) = rlx.Session().compile(g, rlx.CompileOptions(threads=1)).report().work.kernels
    assert kernel.flops == 2 * 3 * 40 * 64
