"""Vector math of the CPU backend against numpy and scipy in float64, in units in the last place, over the whole range."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import kernel_runs
import ml_dtypes
import numpy as np
import pytest
from kernel_runs import TARGETS, TRIPLE, apply
from scipy import special

import rlx
from rlx.backends.cpu.abi import Rendered
from rlx.backends.cpu.render import render
from rlx.backends.cpu.target import target_for
from rlx.host import jit
from rlx.host.processor import missing_features
from rlx.ir.dtype import bf16, f16, f32, f64
from rlx.ir.kernel import Expr, Kernel, k
from rlx.ir.target import Target
from rlx.ir.tuning import Tiling

UNARY = {
    "exp": (np.exp, 1.0), "log": (np.log, 1.0), "sin": (np.sin, 2.0), "cos": (np.cos, 2.0),
    "tanh": (np.tanh, 2.5), "erf": (special.erf, 2.5), "sqrt": (np.sqrt, 0.5),
}  # fmt: skip
EDGES = np.array(
    [0x00000000, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000,
     0xFFC00000, 0x7F800001, 0x42B17218, 0x42B17217, 0xC2CFF1B5, 0xC2AEAC50, 0x3F800000, 0x53800000, 0x49742400, 0x411A0000],
    np.uint32,
)  # fmt: skip


def floats() -> np.ndarray:
    """Every 2003rd bit pattern, the edges, and the ranges where the functions bend."""
    patterns = np.arange(0, 2**32, 2003, dtype=np.uint64).astype(np.uint32)
    rng = np.random.default_rng(0)
    near = [rng.uniform(-r, r, 150_000).astype(np.float32) for r in (1e-3, 1, 10, 105)]
    halves = (np.arange(-100_000, 100_000) * (np.pi / 2)).astype(np.float32)
    with np.errstate(invalid="ignore"):
        return np.concatenate([patterns.view(np.float32), EDGES.view(np.float32), *near, halves])


def ulps(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """|got - want| in units in the last place of `got`'s type; 0 for two NaNs or equal infinities, inf if only one is."""
    narrow = want.astype(got.dtype)
    unit = np.maximum(np.spacing(np.abs(narrow)), np.finfo(got.dtype).smallest_subnormal).astype(np.float64)
    unit = np.where(np.isfinite(unit), unit, 2.0**104)
    error = np.abs(got.astype(np.float64) - want) / unit
    same = (np.isnan(got) & np.isnan(want)) | (got == narrow)
    return np.where(same, 0.0, np.where(np.isfinite(error), error, np.inf))


def check(got: np.ndarray, want: np.ndarray, bound: float, *operands: np.ndarray) -> None:
    error = ulps(got, want)
    worst = int(np.argmax(error))
    where = f"{[o[worst] for o in operands]}: got {got[worst]!r}, want {want[worst]!r}"
    assert error[worst] <= bound, f"{error[worst]} ulp at {where}"
    zero = (got == 0) & (want == 0)
    assert (np.signbit(got[zero]) == np.signbit(want[zero])).all(), "sign of zero"


@pytest.mark.parametrize(("name", "function"), [("asin", np.arcsin), ("acos", np.arccos), ("atan", np.arctan)])
def test_angles_in_f32(name: str, function: np.ufunc) -> None:
    """Made of roots and polynomials, over the whole range: subnormal numbers, zeros of both signs, and NaN beyond 1."""
    x = floats()
    g = rlx.Graph(name)
    g.set_outputs([getattr(rlx, name)(g.input("x", x.shape, "f32"))])
    with np.errstate(all="ignore"):
        check(rlx.compile(g).run({"x": x})[0], function(x.astype(np.float64)), 3.0, x)


@pytest.mark.parametrize("name", UNARY)
def test_unary_f32(name: str) -> None:
    function, bound = UNARY[name]
    x = floats()
    with np.errstate(all="ignore"):
        check(apply(getattr(k, name), f32, x), function(x.astype(np.float64)), bound, x)


@pytest.mark.parametrize("name", UNARY)
@pytest.mark.parametrize("target", [t for t in TARGETS if t != "host"])
def test_unary_f32_on_narrower_cpus(name: str, target: str) -> None:
    x = floats()[::29]
    with np.errstate(all="ignore"):
        check(apply(getattr(k, name), f32, x, target=TARGETS[target]), UNARY[name][0](x.astype(np.float64)), UNARY[name][1], x)


@pytest.mark.parametrize("target", TARGETS)
def test_functions_reach_their_limits_exactly(target: str) -> None:
    """1 + erf(x) is 0 far below 0, so that gelu is, and times infinity it is NaN, as in the reference; exp(-large) is 0."""
    x = np.array([4, 5.5, 14, 104.5, 1e4, 1e30, 3.4e38, np.inf], np.float32)

    def of(function: Callable[..., Expr], x: np.ndarray) -> list[float]:
        return apply(function, f32, x.astype(np.float32), target=TARGETS[target]).tolist()

    for name, far in (("erf", x), ("tanh", x[2:])):
        assert of(getattr(k, name), far) == [1] * len(far) and of(getattr(k, name), -far) == [-1] * len(far)
    assert of(k.exp, -x[3:]) == [0] * 5 and of(k.exp, x[3:]) == [np.inf] * 5
    gelu = lambda v: k.mul(k.mul(v, 0.5), k.add(k.erf(k.mul(v, 0.5**0.5)), 1.0))  # noqa: E731
    assert of(gelu, np.array([-14, -1e30, 1e30, np.inf])) == [0, 0, np.float32(1e30), np.inf]
    assert np.isnan(of(gelu, np.array([-np.inf, np.nan]))).all()


@pytest.mark.parametrize("name", UNARY)
def test_a_function_has_the_same_bits_in_any_number_of_lanes(name: str) -> None:
    x = np.concatenate([EDGES.view(np.float32), np.random.default_rng(4).uniform(-9, 9, 43).astype(np.float32)])
    whole = apply(getattr(k, name), f32, x)
    for lanes in (1, 2, 4, 8):
        parts = [apply(getattr(k, name), f32, x[n : n + lanes]) for n in range(0, len(x), lanes)]
        np.testing.assert_array_equal(np.concatenate(parts), whole)  # NaN equals NaN here


@pytest.mark.parametrize("name", UNARY)
def test_unary_f64(name: str) -> None:
    with np.errstate(all="ignore"):
        edges = EDGES.view(np.float32).astype(np.float64)
        x = np.concatenate([edges, np.random.default_rng(1).uniform(-700, 700, 997), [5e-324, 1e300]])
        check(apply(getattr(k, name), f64, x), UNARY[name][0](x), 2.0, x)


@pytest.mark.parametrize("name, function, bound", [("pow", np.power, 0.501), ("rem", np.fmod, 0.0)])
def test_binary_f32(name: str, function: np.ufunc, bound: float) -> None:
    special_values = np.array(
        [0, -0.0, 1, -1, 2, -2, 0.5, -0.5, 3, -3, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38, -3e38, 2.5, -1.5, 16777217, 4e7],
        np.float32,
    )
    a, b = (grid.ravel() for grid in np.meshgrid(special_values, special_values))
    rng = np.random.default_rng(2)
    size = 40_000
    with np.errstate(all="ignore"):
        patterns = rng.integers(0, 2**32, (2, size), np.uint32).view(np.float32)
        x = [a, np.exp(rng.uniform(-80, 80, size)), patterns[0], rng.uniform(-30, 30, size), 1 + rng.uniform(-1e-3, 1e-3, size)]
        y = [b, rng.uniform(-10, 10, size), patterns[1], rng.integers(-30, 30, size), rng.uniform(-6e4, 6e4, size)]
        left, right = (np.concatenate(parts).astype(np.float32) for parts in (x, y))
        got = apply(getattr(k, name), f32, left, right)
        check(got, function(left.astype(np.float64), right.astype(np.float64)), bound, left, right)


WITHOUT_F16C = target_for(TRIPLE, "generic", ("avx2", "fma")) if TRIPLE.startswith("x86_64") else None


@pytest.mark.parametrize("dtype, host, target", [
    (bf16, ml_dtypes.bfloat16, None), (f16, np.float16, None), (f16, np.float16, WITHOUT_F16C),
    (f16, np.float16, target_for(TRIPLE, "generic")),
])  # fmt: skip
def test_narrow_floats_round_to_nearest_even(dtype, host, target) -> None:
    """Every 16-bit value survives; values around each, and half way to the next, go where ml_dtypes or numpy put them."""
    if target is not None and missing_features(target.features):
        pytest.skip("this machine has no AVX2")
    every = np.arange(2**16, dtype=np.uint16).view(host)
    back = apply(lambda v: v, dtype, every, target=target)
    finite = ~np.isnan(every.astype(np.float32))
    assert (back.view(np.uint16)[finite] == every.view(np.uint16)[finite]).all()
    assert np.isnan(back[~finite].astype(np.float32)).all()
    steps = np.array([0, 1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001], np.uint32)
    bits = every.astype(np.float32).view(np.uint32)[:, None] + steps
    with np.errstate(all="ignore"):
        x = np.concatenate([bits.ravel().view(np.float32), EDGES.view(np.float32)])
        want, got = x.astype(host), apply(lambda v: v, dtype, x, target=target)
    number = ~np.isnan(want.astype(np.float32))
    assert (got.view(np.uint16)[number] == want.view(np.uint16)[number]).all()
    assert np.isnan(got[~number].astype(np.float32)).all()


# This processor as if it had AVX512-FP16: functions may use the instructions that it has, not others.
HALF = replace(TARGETS["host"], features=tuple(dict.fromkeys((*TARGETS["host"].features, "avx512fp16"))))
HALVES = {
    "add": k.add, "sub": k.sub, "mul": k.mul, "div": k.div, "max": k.max, "min": k.min,
    "sqrt": lambda a, b: k.sqrt(a), "neg": lambda a, b: k.neg(a), "relu of a sum": lambda a, b: k.max(k.add(a, b), 0.0),
    "chosen product": lambda a, b: k.select(k.lt(a, b), k.mul(a, b), k.abs(b)), "times a constant": lambda a, b: k.mul(a, 0.75),
    "rounded in between": lambda a, b: k.add(k.cast(k.cast(k.mul(a, b), f16), f32), a),
}  # fmt: skip
NOT_HALVES = {
    "two operations": lambda a, b: k.add(k.mul(a, b), a), "relu of a product": lambda a, b: k.max(k.mul(a, b), 0.0),
    "a constant that f16 has not": lambda a, b: k.mul(a, 0.1),
    "comparison of a sum": lambda a, b: k.select(k.lt(k.add(a, b), a), a, b),
    "exp": lambda a, b: k.exp(a), "fma": lambda a, b: k.fma(a, b, a), "a constant too large": lambda a, b: k.min(a, 1e6),
}  # fmt: skip


@pytest.mark.parametrize("name", [*HALVES, *NOT_HALVES])
def test_arithmetic_of_f16_has_the_bits_of_f32_rounded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for AVX512-FP16, whose operations on f16 LLVM writes with those of f32 where the processor has none."""
    function = {**HALVES, **NOT_HALVES}[name]
    edges = [0x8000, 1, 0x3FF, 0x400, 0x7BFF, 0x7C00, 0xFC00, 0x7E00]
    patterns = np.concatenate([np.arange(0, 2**16, 397), edges]).astype(np.uint16)
    a, b = (grid.ravel().view(np.float16) for grid in np.meshgrid(patterns, patterns))
    want = apply(function, f16, a, b)
    texts: list[str] = []

    def rendered(kernel: Kernel, target: Target, symbol: str, tiling: Tiling) -> Rendered:
        made = render(kernel, HALF, symbol, tiling)
        texts.append(made.text)
        return made

    monkeypatch.setattr(kernel_runs, "render", rendered)
    monkeypatch.setattr(jit, "faults", lambda text, features: [])
    got = apply(function, f16, a, b)
    number = ~np.isnan(want)
    assert (got.view(np.uint16)[number] == want.view(np.uint16)[number]).all() and np.isnan(got[~number]).all()
    assert ("fptrunc" not in texts[0]) == (name in HALVES)


def test_doubles_round_once_to_f16() -> None:
    """f64 to f16 through f32 would round 1 + 2^-11 + 2^-40 down; to nearest it goes up."""
    rng = np.random.default_rng(3)
    exact = rng.integers(0, 0x7C00, 4000).astype(np.uint16)
    middle = (exact.view(np.float16).astype(np.float64) + (exact + 1).astype(np.uint16).view(np.float16).astype(np.float64)) / 2
    nudges = np.array([-(2.0**-45), 0, 2.0**-45])
    x = np.concatenate([(middle[:, None] * (1 + nudges)).ravel(), [1e5, -1e5, 1e-9, np.inf, np.nan, 65519.999999, 65520.0]])
    x = np.concatenate([x, -x])
    with np.errstate(over="ignore"):
        want = x.astype(np.float16)
    got = apply(lambda v: k.cast(v, f16), f16, x)
    assert ((got.view(np.uint16) == want.view(np.uint16)) | np.isnan(want)).all()
    assert np.isnan(got[np.isnan(want)]).all()
