"""Fourier transforms, windows and filters, on the CPU and on the reference, against numpy's in float64 and onnx's own reference
implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_index_functions import by_onnx
from test_index_functions import run as run_on_both

import rlx
from rlx.errors import AttributeValueError, ShapeError

RNG = np.random.default_rng(0)


def pairs(x: np.ndarray) -> np.ndarray:
    return np.stack([x.real, x.imag], -1)


def run(build: Callable[..., Any], *arrays: np.ndarray) -> list[np.ndarray]:
    return run_on_both(build, *arrays, atol=1e-3)  # a sum of many: `near` is exact


def near(found: np.ndarray, want: np.ndarray) -> None:
    """Within the rounding of f32 of the largest result."""
    assert found.shape == want.shape
    assert np.abs(found - want).max() < 2e-6 * np.abs(want).max() + 1e-6


# within a matrix; products of small numbers; primes, by a matrix and by a convolution; a power of two; a prime times a few
@pytest.mark.parametrize("n", [1, 2, 7, 64, 65, 400, 127, 521, 1024, 1046, 4096])
@pytest.mark.parametrize("parts", [1, 2])
def test_transforms_of_any_length(n: int, parts: int) -> None:
    x = RNG.standard_normal((3, n, parts)).astype(np.float32)
    whole = x[..., 0] + 1j * (x[..., 1] if parts == 2 else 0)
    found = run(lambda x: (rlx.dft(x), rlx.dft(x, inverse=True), rlx.dft(x, onesided=True)), x)
    near(found[0], pairs(np.fft.fft(whole)))
    near(found[1], pairs(np.fft.ifft(whole)))
    near(found[2], pairs(np.fft.fft(whole))[:, : n // 2 + 1])


@pytest.mark.parametrize("n", [2, 5, 8, 70])
def test_real_results_of_half_the_numbers(n: int) -> None:
    x = RNG.standard_normal((2, n // 2 + 1, 3, 2)).astype(np.float32)
    found = run(lambda x: rlx.dft(x, axis=1, length=n, inverse=True, onesided=True), x)
    near(found[0], np.fft.irfft(x[..., 0] + 1j * x[..., 1], n, axis=1)[..., None])


@pytest.mark.parametrize("length", [None, 6, 20])
@pytest.mark.parametrize("axis", [0, 1, -2])
def test_transforms_are_those_of_onnx(axis: int, length: int | None) -> None:
    x = RNG.standard_normal((9, 10, 8, 2)).astype(np.float32)
    operands = [x, np.array(length or x.shape[axis]), np.array(axis)]
    for flags in ({}, {"inverse": 1}, {"onesided": 1}):
        found = run(lambda x: rlx.dft(x, axis=axis, length=length, **dict.fromkeys(flags, True)), x)  # noqa: B023
        near(found[0], by_onnx("DFT", *operands, **flags)[0])


def test_f64_and_f16_keep_their_accuracy() -> None:
    x = RNG.standard_normal((400, 1))
    g = rlx.Graph("g")
    g.set_outputs([rlx.dft(g.input("x", x.shape, "f64")), rlx.dft(g.input("y", x.shape, "f16"))])
    found = rlx.Session("cpu").compile(g).run({"x": x, "y": x.astype(np.float16)})
    want = pairs(np.fft.fft(x[:, 0]))
    np.testing.assert_allclose(found[0], want, atol=1e-11)
    np.testing.assert_allclose(found[1], pairs(np.fft.fft(x[:, 0].astype(np.float16))), rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("window", [None, "hann"])
def test_short_transforms_are_those_of_torch(window: Any) -> None:
    x, weights = RNG.standard_normal((2, 1000)).astype(np.float32), torch.hann_window(400) if window else torch.ones(400)
    want = torch.stft(torch.from_numpy(x), 400, 160, window=weights, center=False, return_complex=True)
    found = run(lambda x: rlx.stft(x, 160, weights.numpy() if window else None, length=400), x)
    near(found[0], pairs(want.numpy().transpose(0, 2, 1)))
    both, few = RNG.standard_normal((2, 128, 2)).astype(np.float32), weights.numpy()[:16]
    (want,) = by_onnx("STFT", both, np.array(8), few, np.array(16), onesided=0)
    near(run(lambda x: rlx.stft(x, 8, few if window else None, length=16, onesided=False), both)[0], want)


@pytest.mark.parametrize("periodic", [True, False])
def test_windows(periodic: bool) -> None:
    from scipy.signal import windows  # a second, which each process that collects this file would take

    for coefficients in ((0.5, 0.5), (0.42, 0.5, 0.08)):
        (found,) = run(lambda: rlx.cosine_window(17, coefficients, periodic=periodic, dtype="f64"))  # noqa: B023
        np.testing.assert_allclose(found, windows.general_cosine(17, coefficients, sym=not periodic), atol=1e-15)


def test_mel_filters() -> None:
    for bins, length, rate, low, high in ((8, 16, 8192, 0.0, 4096.0), (20, 400, 16000, 20.0, 8000.0)):
        operands = [np.array(v) for v in (bins, length, rate, np.float32(low), np.float32(high))]
        (found,) = run(lambda: rlx.mel_weights(bins, length, rate, low, high))  # noqa: B023
        np.testing.assert_allclose(found, by_onnx("MelWeightMatrix", *operands)[0], atol=1e-6)


def test_wrong_transforms_are_errors() -> None:
    x = rlx.Graph("g").input("x", (3, 8, 3), "f32")
    with pytest.raises(ShapeError, match="1 .real. or 2"):
        rlx.dft(x)
    with pytest.raises(ShapeError, match="not transformed"):
        rlx.dft(x[..., :2], axis=-1)
    for ask in (lambda: rlx.dft(x[..., :2], axis=1, length=2**40), lambda: rlx.cosine_window(2**40, (0.5, 0.5)),
                lambda: rlx.mel_weights(2**20, 2**20, 16000, 0, 8000)):  # fmt: skip
        with pytest.raises(ShapeError, match="check the sizes"):
            ask()
    with pytest.raises(AttributeValueError, match="0 points"):
        rlx.dft(x[:, :1, :2], inverse=True, onesided=True)
    with pytest.raises(ShapeError, match="window"):
        rlx.stft(x[..., 0], 2, np.ones(9, np.float32), length=8)
