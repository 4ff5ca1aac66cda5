"""The emulated matrix unit against numpy, what it refuses, and a few tests of others with it in place of the processor's."""

from __future__ import annotations

import ctypes
import re
import subprocess
import threading
from typing import Any

import emulated_amx
import ml_dtypes
import numpy as np
import pytest
from emulated_amx import Unit

pytestmark = pytest.mark.skipif(bool(why := emulated_amx.lacking()), reason=why)

SUMS, A, B = 0, 4, 6  # registers
SAMPLE = {"cpu_attention": "cache_filled_in_part and 700 and bf16", "int8": "any_thread_count or within_the_bound"}


def do(name: str, *args: int | np.ndarray) -> None:
    """An instruction; numbers are registers, of memory the bytes between rows follow."""
    types = [ctypes.c_uint8, ctypes.c_void_p, ctypes.c_int64]
    given: list[Any] = []
    for x in args:
        given += [types[0](x)] if isinstance(x, int) else [types[1](x.ctypes.data)]
        given += [types[2](x.strides[0])] if not isinstance(x, int) and x.ndim == 2 else []
    getattr(emulated_amx.library(), f"rlx_amx_{name}")(*given)


def table(sizes: dict[int, tuple[int, int]]) -> np.ndarray:
    """The configuration of registers with (rows, bytes of a row)."""
    made = np.zeros(64, np.uint8)
    made[0] = 1
    for tile, (rows, width) in sizes.items():
        made[48 + tile] = rows
        made[16 + 2 * tile : 18 + 2 * tile] = np.array([width], np.uint16).view(np.uint8)
    return made


@pytest.mark.parametrize(("m", "k", "n"), [(16, 16, 16), (1, 6, 16), (9, 16, 3), (16, 1, 1)])
@pytest.mark.parametrize("kind", ["tdpbf16ps", "tdpbusd"])
def test_products_of_blocks(kind: str, m: int, k: int, n: int) -> None:
    """Rows of memory are further apart than those of a register; what lies between them stays."""
    unit, rng, group = Unit(), np.random.default_rng(m * k * n), 2 if kind == "tdpbf16ps" else 4
    a, b = rng.integers(0, 256, (m, k * group)), rng.integers(-128, 128, (k, n * group))
    types = (ml_dtypes.bfloat16,) * 2 if group == 2 else (np.uint8, np.int8)
    left, right = (np.full((len(x), x.shape[1] + 5), 77).astype(t) for x, t in zip((a, b), types))
    left[:, : k * group], right[:, : n * group] = a, b
    before = rng.integers(-9, 9, (m, n + 2)).astype(np.float32 if group == 2 else np.int32)
    sums = before.copy()
    do("ldtilecfg", table({SUMS: (m, 4 * n), A: (m, 4 * k), B: (k, 4 * n)}))
    do("tilezero", SUMS)
    for name, tile, memory in (("tileloadd64", SUMS, sums), ("tileloaddt164", A, left), ("tileloadd64", B, right)):
        do(name, tile, memory)
    do(kind, SUMS, A, B)
    do("tilestored64", SUMS, sums)
    do("tilerelease")
    whole = b.reshape(k, n, group).transpose(0, 2, 1).reshape(k * group, n)
    assert (sums[:, :n] == before[:, :n] + a @ whole).all() and (sums[:, n:] == before[:, n:]).all()
    assert not unit.faults and unit.products == 1 and unit.released


def test_numbers_that_are_no_sums_of_integers() -> None:
    """Denormals are zero; infinite and NaN stay so; a register that was just configured is zero."""
    bits = np.zeros((4, 4), np.uint16)
    bits[:, 0] = 0x0001, 0x3F80, 0x7F80, 0x7FC0
    one, got = np.full((2, 2), 0x3F80, np.uint16), np.full((4, 1), 7, np.float32)
    do("ldtilecfg", table({SUMS: (4, 4), A: (4, 8), B: (2, 4)}))
    do("tileloadd64", A, bits)
    do("tileloadd64", B, one)
    do("tdpbf16ps", SUMS, A, B)
    do("tilestored64", SUMS, got)
    do("tilerelease")
    np.testing.assert_array_equal(got[:, 0], np.array([0, 1, np.inf, np.nan], np.float32))


@pytest.mark.parametrize(
    ("sizes", "names", "fault"),
    [
        ({0: (17, 64)}, [], "a malformed table"), ({0: (16, 0)}, [], "a malformed table"),
        ({0: (16, 64)}, [("tilezero", 1)], "tilezero of register 1: not configured"),
        ({0: (8, 64), 4: (8, 64), 6: (8, 64)}, [("tdpbf16ps", 0, 4, 6)], "8 x 64 bytes += 8 x 64 * 8 x 64"),
        ({0: (8, 64), 4: (9, 64), 6: (16, 64)}, [("tdpbusd", 0, 4, 6)], "8 x 64 bytes += 9 x 64 * 16 x 64"),
        ({0: (16, 64), 4: (16, 64)}, [("tdpbf16ps", 0, 4, 4)], "one is named twice"),
        ({0: (1, 4)}, [("tilerelease",), ("tilezero", 0)], "the unit is released"),
        ({0: (1, 4)}, [("ldtilecfg", table({0: (1, 4)}))], "the unit was not released"),
    ],
)  # fmt: skip
def test_what_the_manual_forbids(sizes: dict[int, tuple[int, int]], names: list[tuple[Any, ...]], fault: str) -> None:
    unit = Unit()
    do("ldtilecfg", table(sizes))
    for name, *args in names:
        do(name, *args)
    do("tilerelease")
    (found,) = unit.faults
    assert fault in found and not unit.products and unit.released == (fault != "a malformed table")
    assert not Unit().faults


def test_each_thread_has_a_unit() -> None:
    def other() -> None:
        do("ldtilecfg", table({0: (1, 4)}))
        do("tilezero", 0)
        do("tilerelease")

    unit = Unit()
    do("ldtilecfg", table({0: (1, 4)}))
    do("tileloadd64", 0, np.full((1, 1), 5, np.float32))
    (thread := threading.Thread(target=other)).start()
    thread.join()
    do("tilestored64", 0, got := np.zeros((1, 1), np.float32))
    assert got[0, 0] == 5 and not unit.released and unit.faults == ["a kernel ended without a release"]
    do("tilerelease")
    assert unit.released and not unit.faults


def test_a_sample_of_other_tests() -> None:
    """Programs of several threads, and kernels; all of their files by hand: python -m tests.emulated --amx -m pytest FILE."""
    tests = [str(emulated_amx.SOURCE.with_name(f"test_{name}.py")) for name in SAMPLE]
    wanted = " or ".join(f"({name} and {test})" for name, test in SAMPLE.items())
    run = emulated_amx.command("-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", *tests, "-k", wanted)
    done = subprocess.run(run, env=emulated_amx.environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0 and re.search(r"^\d+ passed, \d+ deselected", done.stdout, re.M), done.stdout + done.stderr
    used = re.search(r"^AMX, emulated: (\d+) products", done.stderr, re.M)
    assert used and int(used[1]) > 8_000
