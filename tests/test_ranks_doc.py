"""docs/ranks.md is a program: its Python blocks run in order, alone and on two ranks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_add_an_op_doc import program

PAGE = Path(__file__).parent.parent / "docs" / "ranks.md"


@pytest.mark.parametrize("launcher", [[], ["-m", "rlx", "launch", "-n", "2"]], ids=["alone", "two"])
def test_page_runs(launcher: list[str], tmp_path: Path) -> None:
    script = tmp_path / "page.py"
    script.write_text(program(PAGE.read_text()))
    root = PAGE.parent.parent
    env = {**os.environ, "PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, *launcher, str(script)], cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks" in done.stdout
    if launcher:
        assert "all_reduce" in done.stdout
