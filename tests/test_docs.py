"""The documents that are programs run, and print every stage."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_the_walk_shows_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(DOCS / "walk.py"), run_name="__main__")
    text = capsys.readouterr().out
    for stage in ("1. the graph", "after the pass 'legalise'", "a step of 'prepare'", "contract ", "erf(", "define "):
        assert stage in text
    assert ".text" in text.split("machine code")[1] and "runs = [2]" in text
