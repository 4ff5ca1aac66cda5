"""Activations made of ops, against torch in float64, in each float dtype and where exp overflows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import rlx
from rlx.ir.evaluate import evaluate

SLOPES = np.array([0.25, -0.5, 1.5, 0.0], np.float32)
TORCH = {
    "leaky_relu": ({"slope": 0.2}, lambda x: F.leaky_relu(x, 0.2)), "prelu": ({"slope": SLOPES}, lambda x: F.prelu(
        x.reshape(-1, 4), torch.from_numpy(SLOPES).double()).reshape(x.shape)),
    "elu": ({"alpha": 1.5}, lambda x: F.elu(x, 1.5)), "selu": ({}, F.selu), "celu": ({"alpha": 0.7}, lambda x: F.celu(x, 0.7)),
    "hard_sigmoid": ({}, F.hardsigmoid), "hard_swish": ({}, F.hardswish), "mish": ({}, F.mish), "softsign": ({}, F.softsign),
    "swish": ({"alpha": 1.702}, lambda x: x * torch.sigmoid(1.702 * x)),
    "thresholded_relu": ({"threshold": 0.5}, lambda x: F.threshold(x, 0.5, 0.0)),
    "hard shrink": ({"threshold": 0.8}, lambda x: F.hardshrink(x, 0.8)),
    "soft shrink": ({"threshold": 0.8, "bias": 0.8}, lambda x: F.softshrink(x, 0.8)),
}  # fmt: skip
UNITS = {"f64": 1e-14, "f32": 2e-6, "f16": 2.0**-10, "bf16": 2.0**-7}  # of one rounding


@pytest.mark.parametrize("dtype", UNITS)
@pytest.mark.parametrize("name", TORCH)
def test_activations_are_those_of_torch(name: str, dtype: str) -> None:
    attributes, outside = TORCH[name]
    x = np.concatenate([np.linspace(-6, 6, 57), [-200.0, 200.0, 1e-3]]).reshape(15, 4).astype(rlx.as_dtype(dtype).numpy)
    g = rlx.Graph("g")
    if name == "prelu":
        attributes = {"slope": rlx.constant(SLOPES, dtype)}
    g.set_outputs([getattr(rlx, name.replace("hard shrink", "shrink").replace("soft shrink", "shrink"))(
        g.input("x", x.shape, dtype), **attributes)])  # fmt: skip
    (found,), _ = evaluate(g, {"x": x})
    assert found.dtype == x.dtype
    want = outside(torch.from_numpy(x.astype(np.float64))).numpy()
    np.testing.assert_allclose(found.astype(np.float64), want, rtol=UNITS[dtype], atol=UNITS[dtype] / 100)


def test_infinities_of_one_sign() -> None:
    x = np.array([1, np.inf, -np.inf, np.nan], np.float32)
    g = rlx.Graph("g")
    v = g.input("x", x.shape, "f32")
    ways = [(True, True), (False, True), (True, False), (False, False)]
    g.set_outputs([rlx.isinf(v, negative=n, positive=p) for n, p in ways])
    found, _ = evaluate(g, {"x": x})
    assert [a.tolist() for a in found] == [[False, p, n, False] for n, p in ways]
