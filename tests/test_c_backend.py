"""A backend outside the package, found by an entry point, held to all that devices are held to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from c_backend import CBackend, compiler
from device_conformance import checks, installed
from test_add_an_op_doc import program

import rlx
from rlx.compiler import lower
from rlx.driver.backend import Backend

pytestmark = pytest.mark.skipif(compiler() is None, reason="there is no C compiler (cc, gcc, clang) on the PATH")
ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "add_a_backend.md"
CHECKS = dict(checks("c"))


@pytest.fixture(scope="module", autouse=True)
def c_device() -> Iterator[None]:
    with installed("c", "c_backend:CBackend"):
        yield


@pytest.mark.parametrize("name", CHECKS)
def test_conformance(name: str) -> None:
    CHECKS[name]()


def test_it_is_found_by_name_and_fits_the_protocol() -> None:
    assert rlx.is_available("c") and not rlx.is_available("c:1")
    assert isinstance(CBackend(), Backend)
    source = (ROOT / "tests" / "c_backend.py").read_text()
    assert source.count("\n") <= 250, "the measure of the shared floor: a whole backend in 250 lines"


def test_its_code_is_c_to_be_read() -> None:
    g = rlx.Graph("scaled")
    x = g.input("x", (3, 5), rlx.f32)
    g.set_outputs([rlx.relu(x) * 2.0])
    backend = CBackend()
    artifact = backend.compile(lower(g, backend.target(), rlx.CompileOptions()))
    (text,) = artifact.texts().values()
    assert "for (int64_t" in text and "0x1.0000000000000p+1f" in text
    assert backend.compile(lower(g, backend.target(), rlx.CompileOptions())).codes == artifact.codes, "made once"
    compiled = rlx.Session("c").compile(g)
    (found,) = compiled.run({"x": np.full((3, 5), 4, np.float32)})
    assert (found == 8).all() and text in "".join(compiled.report().texts.values())


def test_the_page_runs() -> None:
    """docs/add_a_backend.md is a program: its Python blocks run in order, in a process of their own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    command = [sys.executable, "-c", program(PAGE.read_text())]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{PAGE.name}:\n{done.stderr[-3000:]}"


def test_the_command_checks_a_backend_that_is_not_installed() -> None:
    """A wrong one is refused check by check: the device `null` computes nothing."""
    command = [sys.executable, "-m", "tests.conformance", "--only", "layer_norm"]
    command += ["--device", "wrong=rlx.backends.null.backend:NullBackend"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "wrong: op layer_norm: " in done.stdout and "wrong: 0 of 1 checks pass" in done.stdout
