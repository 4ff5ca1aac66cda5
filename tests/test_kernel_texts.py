"""The kernels that the compiler makes of a fixed set of programs are those stored in tests/kernel_texts/."""

from __future__ import annotations

import known_programs
import pytest
from known_programs import ACCEPT, FOLDER, SETS


@pytest.mark.parametrize("name", SETS)
def test_programs_and_kernels_are_as_stored(name: str) -> None:
    if found := known_programs.difference(name):
        pytest.fail(f"{found}\n\nIf this is meant, run `{ACCEPT}` and say why in the commit message.", pytrace=False)


def test_every_stored_text_is_compared() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(SETS)


def test_a_changed_kernel_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = known_programs.stored("extents")
    monkeypatch.setattr(known_programs, "stored", lambda name: text.replace("limit ", "bound ", 1))
    found = known_programs.difference("extents")
    assert found.startswith("--- stored extents\n+++ compiled extents\n") and found.count("\n-  bound ") == 1
    assert found.count("\n+  limit ") == 1
