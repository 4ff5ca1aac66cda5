"""Loops whose conditions divide their indices, as nests of boxes on the CPU: random concats and pads, alone and with other ops in
one kernel, against numpy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from kernel_runs import TARGETS, check, kernel_of

import rlx
from rlx.backends.cpu.boxes import in_boxes
from rlx.backends.cpu.render import render, spaces_of
from rlx.ir.dtype import DType, as_dtype
from rlx.ir.kernel import Loop

DTYPES = ("f32", "f64", "bf16", "f16", "u8", "i64", "f8e4m3")
every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS)


class Draw(random.Random):
    """Draws operands of awkward dims, and ops on them as (rlx value, numpy array)."""

    def dims(self, elements: int = 3000) -> tuple[int, ...]:
        rank, total = self.randint(1, 4), elements ** self.uniform(0.3, 1)
        parts = [self.random() ** 1.5 for _ in range(rank)]
        return tuple(max(1, round(total ** (p / sum(parts)))) for p in parts)

    def array(self, dims: Sequence[int], dtype: DType) -> np.ndarray:
        """Random bits, among them NaNs of all payloads."""
        count = int(np.prod(dims))
        return np.frombuffer(self.randbytes(count * dtype.itemsize), dtype.numpy).reshape(dims)

    def pad(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(tuple(self.choice((0, 0, 1, 2, 17)) for _ in range(rank)) for _ in range(2))  # type: ignore[return-value]


@every_target
@pytest.mark.parametrize("seed", range(28))
def test_concats(target, seed: int) -> None:
    draw = Draw(seed)
    dims, dtype = draw.dims(), as_dtype(draw.choice(DTYPES))
    axis = draw.randrange(len(dims))
    sizes = [draw.randint(0, 2 * dims[axis]) for _ in range(draw.randint(2, 5))]
    xs = [draw.array((*dims[:axis], n, *dims[axis + 1 :]), dtype) for n in (*sizes, 1)]
    check(lambda *v: rlx.concat(*v, axis=axis), np.concatenate(xs, axis), xs, target)


@every_target
@pytest.mark.parametrize("seed", range(28))
def test_pads(target, seed: int) -> None:
    draw = Draw(seed)
    dims, dtype = draw.dims(), as_dtype(draw.choice(DTYPES))
    (low, high), value = draw.pad(len(dims)), draw.choice((0.0, 1.0, 2.0))
    widths = tuple(zip(low, (*high[:-1], high[-1] + 1)))
    x = draw.array(dims, dtype)
    ends = tuple(n for _, n in widths)
    number = np.array(value).astype(dtype.numpy)
    check(lambda v: rlx.pad(v, low, ends, value), np.pad(x, widths, constant_values=number), [x], target)


@every_target
@pytest.mark.parametrize("seed", range(20))
def test_with_other_ops_in_the_kernel(target, seed: int) -> None:
    """Operands that are transposed or sliced backwards, and arithmetic before and behind; a row that is broadcast."""
    draw = Draw(seed)
    dims = draw.dims()
    axis, (low, high) = draw.randrange(len(dims)), draw.pad(len(dims))
    a, b = np.random.default_rng(seed).integers(-50, 50, (2, *dims)).astype(np.float32)
    row = np.arange(2 * dims[-1] if axis == len(dims) - 1 else dims[-1], dtype=np.float32)
    wanted = np.concatenate([a * 2, b], axis) + row

    def made(x: rlx.Value, t: rlx.Value, r: rlx.Value) -> rlx.Value:
        return rlx.concat(x * 2, rlx.transpose(t), axis=axis) + r

    turned = np.ascontiguousarray(b.T)
    check(made, wanted, [a, turned, row], target)
    widths = tuple(zip(low, (*high[:-1], high[-1] + 1)))
    wide = lambda x: rlx.pad(x, low, tuple(n for _, n in widths), 1.0) - 1  # noqa: E731
    check(wide, np.pad(a, widths, constant_values=1) - 1, [a], target)
    g = rlx.Graph("several kernels, for three threads")
    x, t, r = (g.input(name, v.shape, rlx.f32) for name, v in (("x", a), ("t", turned), ("r", row)))
    g.set_outputs([rlx.pad(made(x, t, r), low, high), rlx.concat(x, x[..., ::-1], axis=axis)])
    one, two = rlx.Session().compile(g, rlx.CompileOptions(threads=3)).run({"x": a, "t": turned, "r": row})
    np.testing.assert_array_equal(one, np.pad(wanted, tuple(zip(low, high))))
    np.testing.assert_array_equal(two, np.concatenate([a, a[..., ::-1]], axis))


@every_target
@pytest.mark.parametrize("seed", range(12))
def test_pads_that_are_transposed(target, seed: int) -> None:
    """The padding of images whose channels are put last: the box inside is tiled."""
    draw = Draw(seed)
    dims, dtype = [draw.randint(1, 2), *(draw.randint(1, 40) for _ in range(3))], as_dtype(draw.choice(DTYPES))
    x, (low, high) = draw.array(dims, dtype), draw.pad(4)
    wanted = np.pad(np.transpose(x, (0, 2, 3, 1)), tuple(zip(low, high)))
    check(lambda v: rlx.pad(rlx.transpose(v, axes=(0, 2, 3, 1)), low, high), wanted, [x], target)


@every_target
@pytest.mark.parametrize("dtype", ["f32", "i64"])
@pytest.mark.parametrize("width", range(2, 8))
def test_few_pixels_of_interleaved_channels(target, dtype: str, width: int) -> None:
    """As many of them as a vector has lanes, or fewer: in a transpose, of a part of an image, and padded."""
    turned = lambda v: rlx.transpose(v, axes=(0, 2, 3, 1))  # noqa: E731
    for channels in (2, 3, 4):
        x = np.arange(channels * 5 * width).reshape(1, channels, 5, width).astype(dtype.replace("f", "float").replace("i", "int"))
        part = x[..., : min(4, width - 1)]
        check(lambda v: rlx.copy(rlx.transpose(v, axes=(1, 0))), x[0, :, 0].T, [np.ascontiguousarray(x[0, :, 0])], target)
        check(lambda v, n=part.shape[3]: rlx.copy(turned(v[..., :n])), turned_array(part), [x], target)
        wanted = np.pad(turned_array(x), ((0, 0), (0, 0), (1, 1), (0, 0)))
        check(lambda v: rlx.pad(turned(v), (0, 0, 1, 0), (0, 0, 1, 0)), wanted, [x], target)


def turned_array(x: np.ndarray) -> np.ndarray:
    return np.transpose(x, (0, 2, 3, 1))


def test_many_boxes_that_are_transposed_are_tasks_of_several_threads() -> None:
    """As loops of their own each would be too small for a task."""
    parts = [np.zeros((16, 256, 40), np.float32)] * 40
    turned = lambda *v: rlx.concat(*(rlx.transpose(x, axes=(0, 2, 1)) for x in v), axis=1)  # noqa: E731
    threads = replace(TARGETS["host"], threads=2)
    kernel = kernel_of(turned, parts, threads)
    assert render(kernel, threads, "many").tasks > 1


def test_the_inner_box_of_a_transposed_pad_is_tiled() -> None:
    """Its lanes would gather channels else. On several threads, too."""
    turned = lambda v: rlx.pad(rlx.transpose(v, axes=(0, 2, 3, 1)), (0, 1, 1, 0), (0, 1, 1, 0))  # noqa: E731
    g = rlx.Graph("padded")
    g.set_outputs([turned(g.input("x", (2, 64, 30, 30), "f32"))])
    x = np.random.default_rng(0).standard_normal((2, 64, 30, 30), np.float32)
    for threads in (1, 3):
        made = rlx.Session().compile(g, rlx.CompileOptions(threads=threads))
        (out,) = made.run({"x": x})
        np.testing.assert_array_equal(out, np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))).transpose(0, 2, 3, 1))
    kernel = kernel_of(turned, [x], TARGETS["host"])
    assert any(x.tiled(kernel, TARGETS["host"]).crossing for x in spaces_of(kernel, TARGETS["host"]))


def test_rows_that_are_one_vector_are_not_divided() -> None:
    """A few channels are chosen in lanes, at least where the op behind them takes long; wider rows are copied part by part."""

    def divided(make, *dims: tuple[int, ...]) -> bool:
        kernel = kernel_of(make, [np.zeros(d, np.float32) for d in dims], TARGETS["host"])
        (loop,) = kernel.body
        assert isinstance(loop, Loop)
        return in_boxes([*kernel.grid, (loop.var, loop.extent)], loop.body, 64) is not None

    joined = lambda *v: rlx.concat(*v, axis=-1)  # noqa: E731
    assert divided(joined, (50, 33), (50, 40)) and divided(joined, (50, 1), (50, 1))
    assert not divided(joined, (50, 3), (50, 2), (50, 3))
    assert not divided(lambda *v: rlx.exp(joined(*v)), (50, 3), (50, 4))
    assert not divided(lambda x: x * 2, (50, 33))


@every_target
@pytest.mark.parametrize("seed", range(20))
def test_dims_that_are_contiguous_are_one_loop(target, seed: int) -> None:
    """Slices with steps, and transposes of outer dims, whose rows are whole blocks of memory."""
    draw = Draw(seed)
    dims, dtype = (*draw.dims(400), *draw.choice(((), (1,), (3,), (5, 1), (4, 7)))), as_dtype(draw.choice(DTYPES))
    x, axes = draw.array(dims, dtype), list(range(len(dims)))
    parts = tuple(slice(draw.randrange(n), None, draw.choice((1, 1, 2, 3))) for n in dims[: draw.randint(1, len(dims))])
    check(lambda v: rlx.copy(v[parts]), x[parts], [x], target)
    at = draw.randint(1, len(dims))
    axes[:at] = draw.sample(axes[:at], at)
    check(lambda v: rlx.copy(rlx.transpose(v, axes=tuple(axes))), np.transpose(x, axes), [x], target)
