"""Joins of many parts on a GPU: blocks compute elements of one part each, and parts of one shape share a function."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("cuda.bindings.nvrtc", reason="NVRTC is not installed: pip install rlx[cuda]")

from test_cuda import on_gpu

import rlx
from rlx.backends.cuda.backend import target
from rlx.backends.cuda.code import launch_of, text_of
from rlx.backends.cuda.joins import FEW, JoinLaunch, Part
from rlx.backends.cuda.schedule import Launch
from rlx.backends.ref.interpret import run_kernel
from rlx.compiler import lower
from rlx.ir.kernel import Store, walk

Dims = tuple[int, ...]
CASES: dict[str, tuple[list[Dims], int, str]] = {  # the dims of parts, the axis, the dtype
    "equal parts": ([(64, 32)] * 20, 0, "f32"), "of columns": ([(300, 16)] * 9, 1, "f32"),
    "between vectors": ([(11, 63)] * 40, 0, "bf16"), "unequal": ([(16 * (1 + i % 3), 40) for i in range(24)], 0, "f16"),
    "of an axis between": ([(4, 1 + i % 5, 6, 8) for i in range(50)], 1, "f64"), "of rows": ([(700,)] * 30, 0, "i8"),
    "unequal columns": ([(64, 8 * (1 + i % 4)) for i in range(16)], 1, "i32"),
}  # fmt: skip
COMPUTED = ("nothing", "parts", "whole")


def doubled(x, i: int, computed: str):
    return x + x if computed == "parts" and i % 3 == 1 else x


def joined(name: str, computed: str = "nothing") -> rlx.Graph:
    """The concat, of which "parts" are computed where it reads them, or the "whole" after it."""
    dims, axis, dtype = CASES[name]
    g = rlx.Graph("joined")
    whole = rlx.concat([doubled(g.input(f"x{i}", d, dtype), i, computed) for i, d in enumerate(dims)], axis=axis)
    g.set_outputs([whole + whole if computed == "whole" else whole])
    return g


def drawn(name: str) -> list[np.ndarray]:
    rng, (dims, _, dtype) = np.random.default_rng(0), CASES[name]
    return [rng.integers(-60, 60, d).astype(rlx.ir.as_dtype(dtype).numpy) for d in dims]


def expected(name: str, computed: str) -> np.ndarray:
    whole = np.concatenate([doubled(x, i, computed) for i, x in enumerate(drawn(name))], CASES[name][1])
    return whole + whole if computed == "whole" else whole


def launch(g: rlx.Graph) -> Launch:
    (step,) = lower(g, target("sm_90a"), rlx.CompileOptions()).steps
    return launch_of(step.kernel)


def interpreted(found: Launch, given: list[np.ndarray], wanted: np.ndarray) -> np.ndarray:
    """What the kernels of all parts, or of the whole, store: as many elements as are wanted, and no others."""
    out, parts = np.zeros(2 * wanted.size, wanted.dtype), getattr(found, "members", (Part(found, 0),))
    for part in parts:
        result, *read = part.launch.kernel.buffers
        assert result.writable and not part.first * result.dtype.itemsize % 16
        inputs = [given[found.kernel.buffers.index(b) - 1].reshape(-1) for b in read]
        run_kernel(part.launch.kernel, [out[part.first :], *inputs])
    assert not out[wanted.size :].any()
    return out[: wanted.size].reshape(wanted.shape)


@pytest.mark.parametrize("computed", COMPUTED)
@pytest.mark.parametrize("name", CASES)
def test_parts_have_all_elements(name: str, computed: str) -> None:
    found, wanted = launch(joined(name, computed)), expected(name, computed)
    assert isinstance(found, JoinLaunch) and found.blocks == sum(p.launch.blocks for p in found.members)
    np.testing.assert_array_equal(interpreted(found, drawn(name), wanted), wanted)


@pytest.mark.parametrize("count, kind", [(2, Launch), (8, JoinLaunch)])
@pytest.mark.parametrize("dtype", ["f32", "i8"])
def test_numbers_are_no_positions(count: int, kind: type, dtype: str) -> None:
    """x + 1.5 - 0.75 rounds twice, and is not x + (1 - 0), as sums of positions are."""
    g, (a, b) = rlx.Graph("numbers"), (1.5, 0.75) if dtype == "f32" else (100, 7)
    values = [g.input(f"x{i}", (64, 64), dtype) for i in range(count)]
    g.set_outputs([rlx.concat([x + a - b for x in values], axis=1)])
    rng, of = np.random.default_rng(0), rlx.ir.as_dtype(dtype).numpy
    arrays = [(100 * rng.standard_normal((64, 64))).clip(-127, 127).astype(of) for _ in values]
    wanted, found = np.concatenate([x + of.type(a) - of.type(b) for x in arrays], axis=1), launch(g)
    assert type(found) is kind
    np.testing.assert_array_equal(interpreted(found, arrays, wanted), wanted)


def test_parts_of_one_shape_are_one_function() -> None:
    for name, functions in (("equal parts", 1), ("of columns", 1), ("unequal", 3), ("unequal columns", 4)):
        assert text_of(launch(joined(name)), "kernel").count("RLX_FN void\nkernel_") == functions
    (first, *_) = launch(joined("equal parts")).members  # type: ignore[attr-defined]
    assert first.launch.vector > 1 and not any(s.guard for s in walk(first.launch.kernel.body) if isinstance(s, Store))


@pytest.mark.parametrize(
    "dims, axis",
    [([(2000, 64)] * 4, 0), ([(4, 16)] * 40, 0), ([(1000, 3)] * 40, 1), ([(3000, 1)] * 10, 1)],
    ids=["few parts", "few elements", "short runs", "single elements"],
)
def test_what_is_one_function_of_all_parts(dims: list[Dims], axis: int) -> None:
    g = rlx.Graph("joined")
    g.set_outputs([rlx.concat([g.input(f"x{i}", d, "f32") for i, d in enumerate(dims)], axis=axis)])
    assert type(launch(g)) is Launch and (sum(map(math.prod, dims)) >= FEW or len(dims) == 40)


@on_gpu
@pytest.mark.parametrize("computed", COMPUTED)
@pytest.mark.parametrize("name", CASES)
def test_joins_are_those_of_numpy(name: str, computed: str) -> None:
    compiled = rlx.Session("cuda").compile(joined(name, computed))
    (found,) = compiled.run({f"x{i}": x for i, x in enumerate(drawn(name))})
    np.testing.assert_array_equal(found, expected(name, computed))


@on_gpu
def test_a_join_of_more_operands_than_a_kernel_has() -> None:
    g, arrays = rlx.Graph("many"), [np.full((40, 50), i, np.float32) for i in range(150)]
    parts = [g.input(f"x{i}", x.shape, "f32") for i, x in enumerate(arrays)]
    g.set_outputs([rlx.concat(parts, axis=axis) for axis in (0, 1)])
    found = rlx.Session("cuda").compile(g).run({f"x{i}": x for i, x in enumerate(arrays)})
    for axis in (0, 1):
        np.testing.assert_array_equal(found[axis], np.concatenate(arrays, axis))
