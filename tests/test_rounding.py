"""Rounding to bytes in fewer instructions: the bits of the plain kernel, on the CPU and by the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import kernel_runs
import numpy as np
import pytest

from rlx.backends.ref.interpret import run_kernel
from rlx.backends.shared.rounding import in_fewer
from rlx.ir.dtype import DType, f32, i8, i32, u8
from rlx.ir.kernel import Alu, Expr, Kernel, k, walk

RANGES = {u8: (0, 255), i8: (-128, 127)}
LIMITS = [(u8, None), (i8, None), (u8, (3, 200)), (i8, (-100, 90))]
Made = Callable[[Expr], Expr]


def byte(x: Expr, zero: int, dtype: DType, edges: tuple[int, int] | None = None) -> Expr:
    """round(x) + zero, as ONNX's QuantizeLinear."""
    low, high = edges or RANGES[dtype]
    return k.cast(k.min(k.max(k.add(k.round(x), float(zero)), float(low)), float(high)), dtype)


def number(x: Expr, scale: float, zero: int) -> Expr:
    return k.mul(k.sub(k.cast(x, f32), float(zero)), float(scale))


def scales(seed: int, count: int) -> list[float]:
    rng = np.random.default_rng(seed)
    return [float(np.float32(s)) for s in (*rng.uniform(0.004, 3, count), 1.0, 0.5, 1 / 3, 2.0**-70, 1.9999999)]


def numbers(scale: float) -> np.ndarray:
    """Near every middle of two integers, and all that is special."""
    middle = ((np.arange(-400, 400) + 0.5) * scale).astype(np.float32)
    near = (middle.view(np.int32)[:, None] + np.arange(-2, 3, dtype=np.int32)).view(np.float32).reshape(-1)
    some = np.random.default_rng(1).standard_normal(500).astype(np.float32) * np.float32(100 * scale)
    special = [0.0, -0.0, np.nan, np.inf, -np.inf, 3e38, -3e38, 1e-40, -1e-45]
    return np.concatenate([near, some, np.array(special, np.float32)]).astype(np.float32)


def same(kernel: Kernel, *values: np.ndarray | None) -> Kernel:
    """The kernel in fewer instructions, whose results have the bits of the plain one's."""
    less = in_fewer(kernel)
    want, found = interpreted(kernel, values), interpreted(less, values)
    assert want == found
    for target in kernel_runs.TARGETS.values():
        assert kernel_runs.run(kernel, values, target)[0][0].tobytes() == want
    return less


def interpreted(kernel: Kernel, values: tuple[np.ndarray | None, ...]) -> bytes:
    """The one result."""
    args = [np.zeros(b.size, b.dtype.numpy) if v is None else v for b, v in zip(kernel.buffers, values)]
    run_kernel(kernel, args)
    return args[-1].tobytes()


def steps(kernel: Kernel) -> list[str]:
    """The operations in f32, and from and to it."""
    alus = [x for x in walk(kernel.body) if isinstance(x, Alu)]
    return [x.op for x in alus if x.dtype == f32 or x.args[0].dtype == f32]


@pytest.mark.parametrize(("dtype", "edges"), LIMITS, ids=str)
@pytest.mark.parametrize("zero", [0, 17, -5])
def test_a_division_by_a_constant_is_multiplied(dtype, edges, zero):
    for scale in scales(zero + 9, 4):
        x = numbers(scale)
        kernel = kernel_runs.pointwise([lambda a: byte(k.div(a, scale), zero, dtype, edges)], [dtype], (f32, x.size))  # noqa: B023
        less = same(kernel, x, None)
        assert ("div" in steps(less)) == (scale < 1e-20)


@pytest.mark.parametrize(("dtype", "edges"), LIMITS, ids=str)
def test_a_byte_that_is_read_again_is_not_converted_back(dtype, edges):
    """Both the byte and its number are stored, and the number with another zero point."""
    x, scale = numbers(0.07), float(np.float32(0.07))
    made: list[Made] = [
        lambda a: byte(k.div(a, scale), 30, dtype, edges),
        lambda a: number(byte(k.div(a, scale), 30, dtype, edges), 0.3, 30),
        lambda a: number(byte(k.div(a, scale), 30, dtype, edges), 0.3, -7),
    ]
    for one in made:
        out = dtype if one is made[0] else f32
        less = same(kernel_runs.pointwise([one], [out], (f32, x.size)), x, None)
        assert steps(less).count("nearest") == 1 and steps(less).count("cast") == (one is not made[0])


ACTIVATIONS: dict[str, Made] = {
    "none": lambda x: x, "relu": lambda x: k.max(x, 0.0), "relu6": lambda x: k.min(k.max(x, 0.0), 6.0),
    "falling": lambda x: k.neg(x), "bent": lambda x: k.add(k.mul(k.max(x, 0.0), 3.0), 1.0),
}  # fmt: skip


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize(("first", "second"), [(u8, u8), (i8, i8), (u8, i8)], ids=str)
def test_a_function_of_a_byte_is_one_product_where_all_values_agree(name, first, second):
    rng = np.random.default_rng(len(name))
    for turn in range(6):
        one, two = (float(np.float32(s)) for s in rng.uniform(0.02, 0.2, 2))
        zeros = [int(rng.integers(*RANGES[d])) for d in (first, second)]
        zeros = [0, 0] if turn == 5 else zeros

        def made(a: Expr) -> Expr:
            inner = number(byte(a, zeros[0], first), one, zeros[0])  # noqa: B023
            return byte(k.div(ACTIVATIONS[name](inner), two), zeros[1], second)  # noqa: B023

        x = numbers(1.0)
        less = same(kernel_runs.pointwise([made], [second], (f32, x.size)), x, None)
        if name in ("none", "relu", "relu6"):
            assert steps(less).count("mul") == 1 and not {"div", "fma", "add", "sub"} & set(steps(less))


@pytest.mark.parametrize("dtype", [u8, i8], ids=str)
def test_a_function_of_every_byte(dtype):
    """Of stored bytes: those of a max pool, say."""
    x = np.arange(256).astype(np.uint8).view(dtype.numpy)
    for turn, (one, two) in enumerate(np.random.default_rng(5).uniform(0.01, 0.3, (20, 2)).astype(np.float32)):

        def made(a: Expr) -> Expr:
            return byte(k.div(k.max(number(a, float(one), turn), 0.0), float(two)), 3 * turn, u8)  # noqa: B023

        same(kernel_runs.pointwise([made], [u8], (dtype, 256)), x, None)


def test_sums_of_two_bytes_are_divided_with_all_digits():
    rng = np.random.default_rng(8)
    x, q = rng.integers(-40_000, 40_000, 4096).astype(np.int32), rng.integers(0, 256, 4096).astype(np.uint8)
    for turn in range(8):
        one, two, three = (float(np.float32(s)) for s in rng.uniform(0.02, 0.2, 3))

        def made(a: Expr, b: Expr) -> Expr:
            own = number(byte(k.mul(k.cast(a, f32), 0.004), 9 * turn, u8), one, 9 * turn)  # noqa: B023
            return byte(k.div(k.max(k.add(own, number(b, two, turn)), 0.0), three), 0, u8)  # noqa: B023

        less = same(kernel_runs.pointwise([made], [u8], (i32, x.size), (u8, q.size)), x, q, None)
        assert "div" not in steps(less) and steps(less).count("fma") == 1


def test_what_is_no_rounding_to_bytes_stays():
    x = numbers(1.0)
    made: list[Made] = [lambda a: k.cast(a, u8), lambda a: k.cast(k.floor(a), u8), lambda a: k.cast(k.max(k.round(a), 0.5), u8)]
    for one in made:
        kernel = kernel_runs.pointwise([one], [u8], (f32, x.size))
        assert steps(same(kernel, x, None)) == steps(kernel)
    plain = kernel_runs.pointwise([lambda a: k.div(a, 3.0)], [f32], (f32, x.size))
    assert in_fewer(plain) is plain
