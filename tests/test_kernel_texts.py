"""The kernels that the compiler makes of a fixed set of programs are those stored in tests/kernel_texts/, and their texts are
read back (tests/test_program_parse.py has the rest of that): the programs are lowered once for both."""

from __future__ import annotations

import known_programs
import pytest
from known_programs import ACCEPT, FOLDER, SETS
from test_kernel_parse import same
from test_program_parse import constants

from rlx.ir.kernel_parse import parse_kernel
from rlx.ir.kernel_text import print_kernel
from rlx.ir.program import print_program
from rlx.ir.program_parse import parse_program


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


@pytest.mark.parametrize("name", SETS)
def test_every_known_program_and_kernel_reads_back(name: str) -> None:
    for what, _, program in known_programs.programs(name):
        again = parse_program(text := print_program(program), program.target, constants(program))
        assert print_program(again) == text and str(again) == str(program), what
        assert (again.buffers, again.outputs, again.plan) == (program.buffers, program.outputs, program.plan), what
        assert [b.data is None for b in again.buffers] == [b.data is None for b in program.buffers], what
        assert (again.inputs, again.extent) == (program.inputs, program.extent), what
        for kernel in {id(s.kernel): s.kernel for steps in program.phases.values() for s in steps}.values():
            alone = parse_kernel(text := print_kernel(kernel))
            assert print_kernel(alone) == text, what
            assert same(kernel, alone), f"{what}\n{text}"


def test_kernels_read_back_give_the_same_code() -> None:
    for what, _, program in known_programs.programs("extents"):
        for kernel in {s.kernel for steps in program.phases.values() for s in steps}:
            again = parse_kernel(print_kernel(kernel))
            assert known_programs.code_of(again, program.target) == known_programs.code_of(kernel, program.target), what
