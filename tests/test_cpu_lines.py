"""Convolutions with few results on the CPU: lines of the image are summed, of a copy where it is padded or its planes would share
sets of the cache."""

from __future__ import annotations

import math

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.kernels import thin
from rlx.backends.cpu.target import host_target
from rlx.compiler import lower
from rlx.ir.evaluate import evaluate
from rlx.ir.program import Region

SLACK = {"f32": 2e-5, "bf16": 1e-2, "f16": 2e-3}

CASES = {  # dims of the image and the weights, dtype, other attributes; whether the windows are read from a copy
    "padded": ((1, 48, 17, 33), (1, 48, 3, 3), "f32", {"low": 1, "high": 1}, True),
    "padded before alone": ((2, 40, 9, 24), (2, 40, 3, 2), "f32", {"low": (2, 1)}, True),
    "apart": ((1, 64, 20, 21), (1, 64, 7, 7), "bf16", {"low": 3, "high": 3, "dilation": 2}, True),
    "planes of pages": ((1, 64, 32, 32), (3, 64, 3, 3), "f32", {}, True),
    "planes of pages, padded to": ((1, 64, 30, 30), (1, 64, 3, 3), "f32", {"low": 1, "high": 1}, True),
    "planes of pages, in f16": ((2, 128, 32, 64), (2, 128, 3, 3), "f16", {}, True),
    "few planes of pages": ((1, 8, 32, 32), (1, 8, 3, 3), "f32", {}, False),
    "planes apart": ((1, 64, 33, 33), (1, 64, 3, 3), "bf16", {}, False),
    "lines of pages": ((1, 64, 2048), (1, 64, 5), "f32", {}, True),
    "three dims": ((1, 32, 8, 8, 16), (1, 32, 3, 3, 3), "f32", {"low": 1, "high": 1}, True),
}


def graph(name: str) -> rlx.Graph:
    image, weights, dtype, attrs, _ = CASES[name]
    g = rlx.Graph("few results")
    x = g.input("x", image, dtype) * 0.5  # a value of the graph
    bias = g.param("b", weights[:1], dtype)
    g.set_outputs([rlx.relu(rlx.conv(x, g.param("w", weights, dtype), bias, **attrs))])
    return g


@pytest.mark.parametrize("name", CASES)
def test_lines_are_summed_where_results_are_few(name: str) -> None:
    image, weights, dtype, _, copied = CASES[name]
    g, rng = graph(name), np.random.default_rng(0)
    x, w, b = ((rng.normal(size=dims) / 8).astype(rlx.as_dtype(dtype).numpy) for dims in (image, weights, weights[:1]))
    compiled = rlx.Session("cpu").compile(g)
    compiled.set_params({"w": w, "b": b})
    got, wanted = compiled.run({"x": x})[0], evaluate(g, {"x": x}, {"w": w, "b": b})[0][0]
    np.testing.assert_allclose(got.astype(np.float64), wanted.astype(np.float64), atol=SLACK[dtype] * np.abs(wanted).max())


@pytest.mark.parametrize("name", CASES)
def test_no_windows_are_stored(name: str) -> None:
    image, _, _, attrs, copied = CASES[name]
    program = lower(graph(name), with_natives(host_target(1)), rlx.CompileOptions(threads=1))
    stored = [math.prod(b.shape.static) for b in program.buffers if b.region is Region.ARENA]
    whole, padding = math.prod(image), attrs.get("low", 0) != 0
    assert max(stored) < whole * (2.5 if padding else 1.6), "that is more than a copy of the image"
    copies = [s for s in program.steps if "pad" in s.kernel.origin]
    assert bool(copies) == copied


VIEWS = {  # of an input: dims of it, the view, dims of the weights; elements of the image that is copied
    "axes that strides do not merge": ((32, 64, 32), lambda x: x.transpose(1, 0, 2).reshape(1, 64, 1024), (1, 64, 5), 1 << 16),
    "an image made larger": (
        (1, 32, 16, 16),
        lambda x: rlx.broadcast_to(x.reshape(1, 32, 16, 1, 16, 1), (1, 32, 16, 2, 16, 2)).reshape(1, 32, 32, 32),
        (3, 32, 3, 3), 1 << 15,
    ),
    "one of many images": ((64, 32, 32, 32), lambda x: x[5:6], (1, 32, 3, 3), 0),
    "some channels of many": ((1, 512, 32, 32), lambda x: x[:, 32:64], (1, 32, 3, 3), 0),
    "lines of one row": ((1, 64, 1, 1024), lambda x: x, (1, 64, 1, 5), 1 << 16),
    "two rows of pages": ((1, 64, 2, 1024), lambda x: x, (1, 64, 2, 5), 1 << 17),
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_images_are_copied_no_further_than_they_are_read(name: str) -> None:
    dims, view, weights, image = VIEWS[name]
    g, rng = rlx.Graph("view"), np.random.default_rng(0)
    g.set_outputs([rlx.conv(view(g.input("x", dims, "f32") * 0.5), g.param("w", weights, "f32"))])
    x, w = (rng.normal(size=d).astype(np.float32) for d in (dims, weights))
    compiled = rlx.Session("cpu").compile(g)
    compiled.set_param("w", w)
    wanted = evaluate(g, {"x": x}, {"w": w})[0][0]
    np.testing.assert_allclose(compiled.run({"x": x})[0], wanted, atol=2e-5 * np.abs(wanted).max())
    program = lower(g, with_natives(host_target(1)), rlx.CompileOptions(threads=1))
    copied = [program.buffers[a].shape.num_elements for s in program.steps if "pad" in s.kernel.origin for a in s.writes]
    assert image <= sum(copied) <= 1.1 * image


def test_planes_share_sets_of_the_cache_a_quarter_of_a_page_apart() -> None:
    assert [thin._meet(n) for n in (4096, 12288, 1024, 9216, 4096 + 256, 17424, 512)] == [True] * 4 + [False] * 3
