"""Discrete Fourier transforms, windows and filters. Complex numbers are pairs in a last dim, as in view_as_real."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rlx.errors import AttributeValueError, ShapeError
from rlx.ir import ops
from rlx.ir.dtype import DType
from rlx.ir.functions.arrays import flip, moveaxis, stack, swapaxes
from rlx.ir.functions.declare import as_value, computed, function, known_dim, own_axis, widened
from rlx.ir.node import Operand, Value, constant

# -- Fourier transforms --------------------------------------------------------------------------------------------

DIRECT = 64  # so many points are one product with a matrix
PRIME = 512  # as are so many points whose number has no divisor up to DIRECT

Parts = tuple[Value, Value | None]  # real and imaginary; None: zeros


def _turns(number: np.ndarray, n: int, sign: int) -> np.ndarray:
    """e to the power of sign * 2πi number / n."""
    return np.exp(sign * 2j * math.pi * (number % n) / n)


def _times(x: Parts, factor: np.ndarray) -> tuple[Value, Value]:
    (re, im), (a, b) = x, (constant(part(factor), x[0].dtype) for part in (np.real, np.imag))
    return (re * a, re * b) if im is None else (re * a - im * b, re * b + im * a)


def _transformed(x: Parts, sign: int) -> tuple[Value, Value]:
    """The transform of the last dim, without a factor."""
    n = known_dim(x[0], -1)
    first = next((d for d in range(min(DIRECT, n), 1, -1) if n % d == 0), 1)
    if first == n or (first == 1 and n <= PRIME):
        return _direct(x, sign)
    return _chirp(x, sign) if first == 1 else _divided(x, first, sign)


def _direct(x: Parts, sign: int) -> tuple[Value, Value]:
    """One product with a real matrix, of real and imaginary parts side by side."""
    (re, im), n = x, known_dim(x[0], -1)
    turns = _turns(np.outer(np.arange(n), np.arange(n)), n, sign)
    matrix = np.concatenate([np.real(turns), np.imag(turns)], 1)
    if im is not None:
        matrix = np.concatenate([matrix, np.concatenate([-np.imag(turns), np.real(turns)], 1)])
        re = ops.concat([re, im], axis=-1)
    made = ops.matmul(re, constant(matrix, re.dtype)) if re.rank > 1 else ops.matmul(re[None], constant(matrix, re.dtype))[0]
    return made[..., :n], made[..., n:]


def _divided(x: Parts, first: int, sign: int) -> tuple[Value, Value]:
    """J. Cooley and J. Tukey: of n = first * second points, transforms of `first`, a turn of each result, those of `second`."""
    (re, im), n, outer = x, known_dim(x[0], -1), x[0].dims[:-1]
    second = n // first
    apart = lambda v: swapaxes(ops.reshape(v, dims=(*outer, first, second)), -1, -2)  # noqa: E731
    turns = _turns(np.outer(np.arange(second), np.arange(first)), n, sign)
    re, im = _times(_transformed((apart(re), None if im is None else apart(im)), sign), turns)
    re, im = _transformed((swapaxes(re, -1, -2), swapaxes(im, -1, -2)), sign)
    return ops.reshape(swapaxes(re, -1, -2), dims=(*outer, n)), ops.reshape(swapaxes(im, -1, -2), dims=(*outer, n))


def _chirp(x: Parts, sign: int) -> tuple[Value, Value]:
    """L. Bluestein: tk = (t² + k² - (k - t)²) / 2, so the transform is a convolution, by transforms of a power of two points."""
    n = known_dim(x[0], -1)
    size = 1 << (2 * n - 2).bit_length()
    chirp = _turns(np.arange(n) ** 2, 2 * n, sign)
    kernel = np.zeros(size, np.complex128)
    kernel[:n] = chirp.conj()
    kernel[size - n + 1 :] = chirp[:0:-1].conj()
    wide = [ops.pad(v, low=(0,) * v.rank, high=(*(0 for _ in v.dims[:-1]), size - n)) for v in _times(x, chirp)]
    re, im = _transformed(_times(_transformed((wide[0], wide[1]), -1), np.fft.fft(kernel) / size), 1)
    return _times((re[..., :n], im[..., :n]), chirp)


def _sized(x: Value, size: int) -> Value:
    """The last dim cut, or continued by zeros."""
    more = size - known_dim(x, -1)
    return x[..., :size] if more <= 0 else ops.pad(x, low=(0,) * x.rank, high=(*(0 for _ in x.dims[:-1]), more))


@function
@widened
def dft(x: Value, axis: int = -2, length: int | None = None, inverse: bool = False, onesided: bool = False) -> Value:
    """Discrete Fourier transform along `axis` of x [..., 1] (real) or [..., 2] (complex) to [..., 2]; x is cut to `length`, or
    continued by zeros. `inverse`: the other way, divided by the length. `onesided`: only the first length // 2 + 1 results, which
    for real x have all others as conjugates; with `inverse`, x has only these, and the result, [..., 1], is real."""
    at, parts = own_axis(x, axis), known_dim(x, -1)
    if parts not in (1, 2) or at == x.rank - 1:
        raise ShapeError(f"the last dim of {x!r} has 1 (real) or 2 (complex) parts, and is not transformed; got axis {axis}")
    n = length or (2 * (known_dim(x, at) - 1) if inverse and onesided else known_dim(x, at))
    if n < 1 or known_dim(x, at) < 1:
        raise AttributeValueError(f"a transform of {n} points along dim {axis} of {x!r}")
    computed(f"a transform of {n} points", 4 * n)
    given = n // 2 + 1 if inverse and onesided else n
    re, im = (_sized(moveaxis(x[..., i], at, -1), given) if i < parts else None for i in (0, 1))
    assert re is not None
    if inverse and onesided:  # the conjugates of all but the first, and of an even number the last
        others = n - given + 1
        re = ops.concat([re, flip(re[..., 1:others], -1)], axis=-1)
        im = None if im is None else ops.concat([im, -flip(im[..., 1:others], -1)], axis=-1)
    made = [v * (1 / n) if inverse else v for v in _transformed((re, im), 1 if inverse else -1)]
    made = [v[..., : n // 2 + 1] for v in made] if onesided and not inverse else made[:1] if onesided else made
    return stack([moveaxis(v, -1, at) for v in made], -1)


@function
@widened
def stft(x: Value, step: int, window: Operand | None = None, length: int | None = None, onesided: bool = True) -> Value:
    """Transforms [batch, frames, results, 2] of frames of x [batch, n], or [batch, n, 1] or [batch, n, 2], which begin `step`
    apart: of `length` elements (without it, of the window's), times the window, if there is one."""
    x = x if x.rank == 3 else ops.unsqueeze(x, axes=-1)
    shaped = None if window is None else as_value(window).astype(x.dtype)
    size = length or (known_dim(shaped, 0) if shaped is not None else 0)
    own = size if shaped is None else known_dim(shaped, 0)
    if x.rank != 3 or step < 1 or not 0 < own <= size:
        raise ShapeError(f"frames of {size} elements, {step} apart, of {x!r}, with a window of at most as many: got {window!r}")
    frames = ops.windows(x, window=(own,), axes=(1,), strides=(step,))  # [batch, frames, parts, own]
    frames = frames if shaped is None else frames * shaped
    return dft(moveaxis(frames, -1, 2), axis=2, length=size, onesided=onesided)


# -- windows and filters -------------------------------------------------------------------------------------------


@function
def cosine_window(size: int, coefficients: Sequence[float], periodic: bool = True, dtype: DType | str = "f32") -> Value:
    """a0 - a1 cos(t) + a2 cos(2t) …, t from 0 to 2π in `size` steps, or size - 1 if not `periodic`. Hann: (0.5, 0.5); Hamming:
    (25 / 46, 21 / 46); Blackman: (0.42, 0.5, 0.08)."""
    computed(f"a window of {size} elements", size)
    turn = np.arange(size) * (2 * math.pi / max(size if periodic else size - 1, 1))
    return constant(sum((-1) ** i * a * np.cos(i * turn) for i, a in enumerate(coefficients)), dtype)


@function
def mel_weights(bins: int, length: int, rate: float, low: float, high: float, dtype: DType | str = "f32") -> Value:
    """Weights [length // 2 + 1, bins] of the results of a one-sided transform: triangles at equal distances on the mel scale,
    from `low` to `high` hertz, with edges at whole results; `rate` samples a second."""
    computed(f"{bins} filters of {length} points", bins * length)
    first, last = (2595 * np.log10(1 + edge / 700) for edge in (low, high))
    hertz = 700 * (10 ** ((first + np.arange(bins + 2) * (last - first) / (bins + 2)) / 2595) - 1)
    edges = np.floor((length + 1) * hertz / rate)
    start, top, end = edges[:-2], edges[1:-1], edges[2:]
    at = np.arange(length // 2 + 1)[:, None]
    rising = np.where(top > start, (at - start) / np.maximum(top - start, 1), 1)
    falling = (end - at) / np.maximum(end - top, 1)
    inside = np.where(at < top, at >= start, (at < end) | (at == top))
    return constant(np.where(inside, np.where((at < top) | (end == top), rising, falling), 0), dtype)


__all__ = ["cosine_window", "dft", "mel_weights", "stft"]
