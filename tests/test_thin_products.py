"""Products of few rows or columns, from graphs to results: as sums, with operands changed over, or of nothing."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.backends.cpu.backend import with_natives
from rlx.backends.cpu.target import host_target
from rlx.compiler import lower
from rlx.ir.dtype import DType, bf16, f32, i8, u8
from rlx.ir.ops import int8_matmul

HOST = host_target(1)


@pytest.mark.parametrize(
    "left, right",
    [((0, 5, 100), (100, 3)), ((0, 5, 100), (0, 100, 3)), ((2, 1, 5, 100), (3, 100, 2)), ((4, 0, 100), (100, 2))],
)
def test_few_columns_of_batches(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    g, rng = rlx.Graph("batches"), np.random.default_rng(0)
    g.set_outputs([g.input("a", left, bf16) @ g.input("b", right, bf16)])
    a, b = (rng.integers(-4, 5, dims).astype(bf16.numpy) for dims in (left, right))
    want = a.astype(np.float32) @ b.astype(np.float32)
    np.testing.assert_allclose(np.asarray(rlx.compile(g).run({"a": a, "b": b})[0], np.float32), want, rtol=2**-8)


def test_no_columns_by_a_transposed_left_operand() -> None:
    g = rlx.Graph("none")
    g.set_outputs([rlx.transpose(g.input("a", (100, 70), f32), (1, 0)) @ g.input("b", (100, 0), f32)])
    assert rlx.compile(g).run({"a": np.ones((100, 70), np.float32), "b": np.ones((100, 0), np.float32)})[0].shape == (70, 0)


THIN = {  # m, n, k, the operand that is transposed; the kernels of floats
    "column": ((70, 1, 33), "", ["mul_sum"]), "depth of 1": ((70, 9, 1), "", ["mul"]), "row": ((1, 70, 33), "b", ["mul_sum"]),
    "few columns": ((70, 3, 100), "b", ["mul_sum"]), "few columns apart": ((70, 3, 100), "", ["copy", "mul_sum"]),
    "rows apart": ((70, 5, 33), "a", ["matmul", "copy"]), "dot product": ((1, 1, 33), "", ["mul_sum"]),
    "two rows": ((2, 70, 300), "b", ["mul_sum"]), "two rows, many columns": ((2, 9000, 300), "b", ["matmul"]),
    "two short rows": ((2, 70, 100), "b", ["matmul"]),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [f32, bf16, u8], ids=str)
@pytest.mark.parametrize("case", THIN)
def test_thin_products(case: str, dtype: DType) -> None:
    """As sums of products, or with the operands changed over, in f32; others give the same numbers."""
    (m, n, k), turned, kernels = THIN[case]
    g, rng, given, operands = rlx.Graph("thin"), np.random.default_rng(m + n + k), dict[str, np.ndarray](), list[rlx.Value]()
    for name, dims, of in (("a", (m, k), dtype), ("b", (k, n), i8 if dtype == u8 else dtype)):
        given[name] = rng.integers(0, 9, dims[::-1] if name == turned else dims).astype(of.numpy)
        x = g.input(name, given[name].shape, of)
        operands.append(x.T if name == turned else x)
    g.set_outputs([int8_matmul(*operands) if dtype == u8 else operands[0] @ operands[1]])
    if dtype == f32:
        assert [step.kernel.name for step in lower(g, with_natives(HOST), rlx.CompileOptions()).steps] == kernels
    if dtype == bf16 and case == "few columns":  # its rows are converted where they are read
        found = lower(g, with_natives(HOST), rlx.CompileOptions()).buffers
        assert max(b.shape.num_elements for b in found if b.shape.dtype == f32) < m * k
    a, b = (x.T if name == turned else x for name, x in given.items())
    got, want = rlx.compile(g).run(given)[0], a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8 if dtype == bf16 else 0)
