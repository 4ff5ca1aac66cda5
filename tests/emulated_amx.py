"""AMX, the matrix unit of x86 processors, on processors without it: functions in C in place of its instructions.

    python -m tests.emulated --amx -m pytest -q tests/test_cpu_contract.py       # see emulated.py

The instructions of the unit are intrinsics in a module's text. There they become calls of amx_tiles.c before LLVM compiles it.
All else of a kernel runs as it is, for which the processor needs AVX-512 with bf16 and VNNI. What a kernel does wrong (a register
that is not configured, blocks that do not fit, a unit that is not released) fails the test that runs it.

A process with EVERYWHERE in its environment takes its processor for one with AMX, and its kernels prefetch as they do on those.
Tests of single kernels only replace `llvm.code` by `code`.
"""

from __future__ import annotations

import ctypes
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from rlx.host import llvm, processor

SOURCE = Path(__file__).with_name("amx_tiles.c")
NAMES = "ldtilecfg tilerelease tilezero tileloadd64 tileloaddt164 tilestored64 tdpbf16ps tdpbusd".split()
AROUND = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512bf16", "avx512vnni")  # what kernels use beside the unit
EVERYWHERE = "RLX_TESTS_AMX"
SAID = 4096  # bytes, as in amx_tiles.c
INTRINSIC = re.compile(rf"@llvm\.x86\.({'|'.join(NAMES)})\(")
_own_code = llvm.code


def lacking() -> str:
    """Why there is no emulation here; empty: there is."""
    here = processor._linux_x86()
    if here is None or (lacks := [f for f in AROUND if f not in here[1]]):
        return f"kernels around the matrix unit need {', '.join(lacks) if here else 'x86-64 Linux'}"
    return "" if _compiler() else "there is no C compiler (cc, gcc, clang) on the PATH"


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@cache
def library() -> ctypes.CDLL:
    """The functions in C. rlx's linker finds them as it finds those of libm."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "amx.so"
        how = "-O3", "-shared", "-fPIC", "-march=x86-64-v4", "-Wall", "-Werror"
        subprocess.run([str(_compiler()), *how, "-o", str(made), str(SOURCE)], check=True)
        return ctypes.CDLL(str(made), ctypes.RTLD_GLOBAL)


def code(text: str, machine: tuple[str, str, str], assembly: bool = False) -> bytes:
    """llvm.code, with calls for the unit's instructions. Assembly shows the instructions."""
    return _own_code(text if assembly else INTRINSIC.sub(r"@rlx_amx_\1(", text), machine, assembly)


class Counts(NamedTuple):
    """Products of blocks and configurations of this process; faults since `forget`; threads that have the unit now."""

    products: int
    configurations: int
    faults: int
    live: int
    said: str

    @staticmethod
    def read() -> Counts:
        numbers, said = (ctypes.c_int64 * 4)(), ctypes.create_string_buffer(SAID)
        library().rlx_amx_read(numbers, said)
        return Counts(*numbers, said.value.decode())

    def wrong(self) -> list[str]:
        """The forbidden uses: all or, if they are many, the first ones."""
        first = self.said.splitlines()
        return first + ["and others"] * (self.faults > len(first)) + ["a kernel ended without a release"] * (self.live > 0)


class Unit:
    """The uses of the unit by kernels of this process from now on. Read while none runs."""

    def __init__(self) -> None:
        library().rlx_amx_forget_faults()
        self._before = Counts.read()

    @property
    def products(self) -> int:
        return Counts.read().products - self._before.products

    @property
    def released(self) -> bool:
        """It was configured, and no thread has it."""
        now = Counts.read()
        return now.configurations > self._before.configurations and not now.live

    @property
    def faults(self) -> list[str]:
        return Counts.read().wrong()


def install() -> None:
    """From now on this process has AMX. Called before the parts of rlx that ask what a processor has are imported."""
    triple, has = processor._linux_x86() or ("", frozenset[str]())
    processor._linux_x86 = lambda *_: (triple, has | {*processor.AMX})
    processor._may_use_tiles = lambda: True
    processor.fetches_ahead = lambda features: not {"avx512fp16", "amx-tile"}.isdisjoint(features)
    processor.host_features.cache_clear()
    llvm.code = code
    library()


if everywhere := os.environ.get(EVERYWHERE) == "1":
    install()


@pytest.fixture(autouse=everywhere)
def amx_obeyed() -> Iterator[None]:
    unit = Unit()
    yield
    assert not unit.faults


def command(*args: str) -> list[str]:
    """Python with AMX everywhere; `args`: -m, a module, its arguments."""
    return [sys.executable, "-c", "import emulated_amx; emulated_amx.main()", *args]


def environment() -> dict[str, str]:
    """That of `command`: also the processes that it starts have AMX, if they are pytest's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST", "RLX_"))}
    plugin = f"-p {Path(__file__).stem} -W ignore::pytest.PytestAssertRewriteWarning"
    places = os.pathsep.join(map(str, (SOURCE.parents[1], SOURCE.parent)))
    return {**kept, EVERYWHERE: "1", "RLX_CACHE": "0", "PYTHONPATH": places, "PYTEST_ADDOPTS": plugin}


def main() -> None:
    """The process of `command`."""
    flag, module, *args = sys.argv[1:]
    assert flag == "-m", f"-m and a module are expected, not {flag}"
    sys.argv = [module, *args]
    status: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    found = Counts.read()
    account = f"AMX, emulated: {found.products} products of blocks, {found.configurations} configurations"
    print("\n".join([account, *found.wrong()]), file=sys.stderr)
    sys.exit(status or int(bool(found.wrong())))
