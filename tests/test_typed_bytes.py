"""Bytes of another float dtype: rounded once to the declared one, as a table of its values says."""

from __future__ import annotations

import numpy as np
import pytest

import rlx
from rlx.errors import InputDTypeError, InputShapeError
from rlx.ir.dtype import DTYPES, DType
from rlx.runtime.binding import rounded

FLOATS = [d for d in DTYPES.values() if d.is_float]
NARROW = [d for d in FLOATS if d.bits <= 16]


def values_of(dtype: DType) -> np.ndarray:
    """All finite values of a narrow float, ascending, as f64."""
    bits = np.arange(1 << dtype.bits, dtype=np.uint32).astype(f"u{dtype.itemsize}")
    with np.errstate(invalid="ignore"):
        every = bits.view(dtype.numpy).astype(np.float64)
    return np.unique(every[np.isfinite(every)])


@pytest.mark.parametrize("dtype", NARROW, ids=lambda d: d.name)
def test_f64_is_rounded_once(dtype: DType) -> None:
    """Between every two neighbours: the middle goes to the even one, and the least more or less than it to the nearer one."""
    known = values_of(dtype)
    low, high = known[:-1], known[1:]
    middle = (low + high) / 2
    code = lambda x: np.abs(x).astype(dtype.numpy).view(f"u{dtype.itemsize}")  # noqa: E731
    even = np.where(code(low) % 2 == 0, low, high)
    for given, want in (
        (middle, even), (np.nextafter(middle, -np.inf), low), (np.nextafter(middle, np.inf), high), (low, low), (high, high),
    ):  # fmt: skip
        np.testing.assert_array_equal(rounded(given, dtype).astype(np.float64), want)


@pytest.mark.parametrize("given", FLOATS, ids=lambda d: d.name)
@pytest.mark.parametrize("declared", FLOATS, ids=lambda d: d.name)
def test_bytes_of_every_float_are_taken_for_every_float(given: DType, declared: DType) -> None:
    g = rlx.Graph("g")
    g.set_outputs([rlx.copy(g.input("x", (5,), declared)), rlx.copy(g.param("w", (5,), declared))])
    compiled = rlx.Session("cpu").compile(g)
    x = np.array([0.5, -1.0625, 240, np.nan, -0.0]).astype(given.numpy)
    compiled.set_param_typed("w", x.tobytes(), given)
    for data, dtype in compiled.run_typed({"x": (x.tobytes(), given.name)}):
        found = np.frombuffer(data, declared.numpy)
        want = rounded(x.astype(np.float64), declared)
        assert dtype == declared
        np.testing.assert_array_equal(found.astype(np.float64), want.astype(np.float64))


def test_infinities_stay_and_what_is_too_large_becomes_one() -> None:
    wide = np.array([np.inf, -np.inf, 1e300, -1e300, 3.4028235e38, 1e-300])
    assert rounded(wide, rlx.bf16).astype(float).tolist() == [np.inf, -np.inf, np.inf, -np.inf, np.inf, 0]


def test_bytes_with_gaps_are_taken_in_order() -> None:
    g = rlx.Graph("g")
    g.set_outputs([rlx.copy(g.param("w", (3,), rlx.f32))])
    compiled = rlx.Session("cpu").compile(g)
    compiled.set_param_typed("w", memoryview(np.arange(6, dtype=np.float32))[::2], "f32")
    assert compiled.run({})[0].tolist() == [0, 2, 4]


def test_integers_and_floats_are_never_mixed() -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.param("w", (2,), rlx.f32) * g.param("n", (2,), rlx.i32).astype("f32")])
    compiled = rlx.Session("cpu").compile(g)
    for name, dtype in (("w", "i32"), ("n", "f32"), ("n", "i64"), ("w", "bool")):
        with pytest.raises(InputDTypeError, match=name):
            compiled.set_param_typed(name, b"\0" * 16, dtype)
    with pytest.raises(InputShapeError, match="16 bytes of f64"):
        compiled.set_param_typed("w", b"\0" * 8, "f64")
