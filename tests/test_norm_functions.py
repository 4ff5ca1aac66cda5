"""Normalisations and losses made of ops, and determinants, on the CPU and on the reference, against torch in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_index_functions import run

import rlx
from rlx.errors import AttributeValueError, ShapeError

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 5, 2, 4)).astype(np.float32)
T = torch.from_numpy(X).double()


def same(found: list[np.ndarray], want: torch.Tensor) -> None:
    assert found[0].shape == want.shape
    np.testing.assert_allclose(found[0], want.numpy(), rtol=1e-5, atol=1e-6)


def test_norms() -> None:
    scale, bias = RNG.standard_normal((2, 5)).astype(np.float32)
    want = F.instance_norm(T, weight=torch.from_numpy(scale).double(), bias=torch.from_numpy(bias).double())
    same(run(rlx.instance_norm, X, scale, bias), want)
    for size in (1, 3, 5):
        want = F.local_response_norm(T, size, alpha=0.7, beta=0.6, k=2.0)
        same(run(lambda x: rlx.local_response_norm(x, size, alpha=0.7, beta=0.6, k=2.0), X), want)  # noqa: B023
    for p in (1, 2):
        same(run(lambda x: rlx.lp_normalize(x, p=p, axis=1), X), F.normalize(T, p=p, dim=1))  # noqa: B023
    assert not run(rlx.lp_normalize, np.zeros((2, 3), np.float32))[0].any()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("ignore", [None, 2, -1])
@pytest.mark.parametrize("weighted", [False, True])
def test_losses(weighted: bool, ignore: int | None, reduction: Any) -> None:
    labels, weight = RNG.integers(0, 5, (3, 2, 4)), (RNG.random(5) + 0.5).astype(np.float32)
    labels[0, 0, :2] = 2 if ignore is None else ignore
    operands = [X, labels, *([weight] if weighted else [])]
    theirs = {"weight": torch.from_numpy(weight).double() if weighted else None, "reduction": reduction}
    theirs["ignore_index"] = -100 if ignore is None else ignore
    same(run(lambda *o: rlx.cross_entropy(*o, ignore=ignore, reduction=reduction), *operands),
         F.cross_entropy(T, torch.from_numpy(labels), **theirs))  # fmt: skip
    logs = torch.log_softmax(T, 1)
    same(run(lambda *o: rlx.nll_loss(*o, ignore=ignore, reduction=reduction), logs.float().numpy(), *operands[1:]),
         F.nll_loss(logs, torch.from_numpy(labels), **theirs))  # fmt: skip


@pytest.mark.parametrize("n", [0, 1, 2, 3, 9])
def test_determinants(n: int) -> None:
    x = RNG.standard_normal((2, 3, n, n)).astype(np.float32)
    if n > 1:
        x[0, 0, 0, 0], x[0, 1, 1] = 0, x[0, 1, 0]  # a pivot that is not the first; a matrix of less than full rank
    same(run(rlx.det, x), torch.linalg.det(torch.from_numpy(x).double()))


def test_wrong_operands_are_errors() -> None:
    x = rlx.Graph("g").input("x", (3, 5, 2), "f32")
    for ask, error, message in (
        (lambda: rlx.cross_entropy(x, np.zeros((3, 5), np.int64)), ShapeError, "a label"),
        (lambda: rlx.nll_loss(x, np.zeros((3, 2), np.int64), reduction="max"), AttributeValueError, "'mean'"),
        (lambda: rlx.lp_normalize(x, p=3), AttributeValueError, "1 or 2"), (lambda: rlx.det(x), ShapeError, "square"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            ask()
