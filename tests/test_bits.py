"""Kernels of the CPU that only move 16-bit and 8-bit floats move their bits."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_runs import TARGETS, check, kernel_of, run

import rlx
from rlx.ir.dtype import as_dtype


@pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)
@pytest.mark.parametrize("dtype", ["bf16", "f16", "f8e4m3", "f8e5m2"])
def test_moves_keep_all_bits(target, dtype: str) -> None:
    """Of every value of the dtype: NaNs keep their payload, and no number is rounded."""
    narrow = as_dtype(dtype)
    x = np.arange(1 << narrow.bits, dtype=f"u{narrow.itemsize}").view(narrow.numpy).reshape(-1, 16)
    order = np.random.default_rng(1).permutation(len(x))
    check(lambda v: rlx.transpose(v), x.T, [x], target)
    check(lambda v: v[::-1, 2:9:3], x[::-1, 2:9:3], [x], target)
    check(lambda v, i: rlx.gather(v, i, axis=0), x[order], [x, order], target)
    half, some = narrow.numpy.type(1.5), order[:, None] > 5
    check(lambda v, c: rlx.where(c, v, 1.5), np.where(some, x, half), [x, some], target)
    check(lambda *v: rlx.concat(*v, axis=1), np.concatenate([x, x[:, :3]], 1), [x, x[:, :3].copy()], target)
    check(lambda v: rlx.pad(v, (3, 1), (0, 2), 1.5), np.pad(x, ((3, 0), (1, 2)), constant_values=half), [x], target)


def test_what_is_computed_is_not_bits() -> None:
    """An element that is also an operand or a condition is a number."""
    x = np.array([[1.0, -2.0, np.nan, 0.5]] * 9, rlx.bf16.numpy)
    number = x.astype(np.float32)
    for make, wanted in (
        (lambda v: rlx.where(v > 0, v, -v), np.where(number > 0, number, -number)),
        (lambda v: rlx.where(v > 0, v, 0.0), np.where(number > 0, number, 0)),
        (lambda v: v * 1.5, number * 1.5),
        (lambda v: v.astype("f32"), number),
    ):
        (got,), _ = run(kernel_of(make, [x], TARGETS["host"]), [x, None][::-1])
        np.testing.assert_array_equal(got.astype(np.float32).reshape(x.shape), wanted)
