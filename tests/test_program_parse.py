"""Programs as text: what was printed is read back to an equal program, and any other text is an error that names the line."""

from __future__ import annotations

import random
import re
from dataclasses import replace

import numpy as np
import pytest

import rlx
from rlx.backends import get
from rlx.compiler import lower
from rlx.compiler.check import program_faults
from rlx.errors import ParseError
from rlx.ir.program import Program, print_program
from rlx.ir.program_parse import digest_of, parse_program
from rlx.ir.target import Target


def constants(program: Program) -> dict[str, np.ndarray]:
    return {digest_of(b.data): b.data for b in program.buffers if b.data is not None}


OPTIONS = rlx.CompileOptions(disable=("canonicalise",)).bind_extent("n", 16)


def counter() -> rlx.Graph:
    """A graph whose program has every phase, region and kind of constant, two kernels of one name, an output of active rows."""
    g = rlx.Graph("a counter")
    x = g.input("x", ("n", 4), rlx.f32)
    w, b = g.param("w", (4, 4), rlx.f32), g.param("b", (4,), rlx.f32)
    total = g.handle(rlx.BufferHandle("total sum", (4,), rlx.f32))
    rows = g.handle(rlx.BufferHandle("rows", (8, 4), rlx.f32))
    many = rlx.constant(np.arange(32, dtype=np.float32).reshape(8, 4))
    few = rlx.constant(np.array([0.5, -np.inf, np.nan, 1e-45], np.float32))
    y = rlx.gelu(x @ rlx.transpose(rlx.exp(w)) + b)
    g.assign(total, total + rlx.sum(y, axis=0))
    g.assign(rows, rlx.update_rows(rows, rlx.reshape(total, (1, 4)), rlx.constant(np.int32(3))))
    g.set_outputs([y, rlx.cumsum(few, axis=0), rlx.cumsum(many, axis=1), rlx.cumsum(many, axis=0)], ["y", "few", "many", "down"])
    return g


def counted() -> Program:
    return lower(counter(), get("ref").target(0), OPTIONS)


def test_a_program_read_back_runs_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    program = counted()
    text = print_program(program)
    whole = ("constant", " = sha256", "inf, 0x", "prepared", "handle rows", '"total sum"', "active (0, 1, 16, 1)", "after ")
    for part in whole:
        assert part in text, part

    def read_back(graph: rlx.Graph, target: Target, options: rlx.CompileOptions, foresee: object = None) -> Program:
        made = lower(graph, target, options)
        return parse_program(print_program(made), target, constants(made))

    def results() -> list[np.ndarray]:
        compiled = rlx.Session("ref").compile(counter(), OPTIONS)
        compiled.set_param("w", np.eye(4, dtype=np.float32))
        compiled.set_param("b", np.ones(4, np.float32))
        outputs = [y for _ in range(2) for y in compiled.run({"x": np.linspace(-1, 1, 64, dtype=np.float32).reshape(16, 4)})]
        return [*outputs, compiled.read_handle("rows"), compiled.read_handle("total sum")]

    want = results()
    monkeypatch.setattr("rlx.runtime.session.lower", read_back)
    for found, expected in zip(results(), want, strict=True):
        np.testing.assert_array_equal(found, expected)
    assert want[-1].any() and program_faults(read_back(counter(), program.target, OPTIONS)) == []


BAD = [
    ("for ref", "for cuda", "line 1: the program is for cuda, the target is ref"),
    ("program", "programme", "line 1: expected program NAME"),
    ("%1 ", "%2 ", "buffers are numbered in order; expected %1"),
    ("f32[16,4]", "f32[n,4]", "the dims of f32[n,4] are integers in a program"),
    ("inputs %0", "inputs %99", "there is no buffer %99"),
    ("arena ", "arena -", "the arena's size is at least 0"),
    ("active (0, 1, 16, 1)", "active (0, 1)", "active rows are (axis, outer, upper, inner), found 2 numbers"),
    ("  copy(", "  copies(", "no kernel is called copies; there are"),
    ("copy@2(out ", "copy@2(", "argument 0 of copy is written: write out before it"),
    ("copy@2(", "copy@7(", "no kernel is called copy@7"),
    ("prepare:", "prepared:", "expected prepare:"),
    ("after 5", "after 70", "a step of abort is after step 70 of"),
    ("cast(", "cats(", "no scalar op is called 'cats'"),
]


@pytest.mark.parametrize("old,new,expected", BAD, ids=[new for _, new, _ in BAD])
def test_malformed_text_is_a_parse_error_with_its_line(old: str, new: str, expected: str) -> None:
    program = counted()
    text = print_program(program)
    assert old in text
    with pytest.raises(ParseError, match=r"^line \d+: .*" + re.escape(expected.removeprefix("line 1: "))):
        parse_program(text.replace(old, new, 1), program.target, constants(program))


def test_constants_of_many_numbers_are_given_by_digest() -> None:
    program = counted()
    text, given = print_program(program), constants(program)
    with pytest.raises(ParseError, match=r"line \d+: the constant of digest [0-9a-f]{16}… is not given"):
        parse_program(text, program.target)
    wrong = {digest: data + 1 for digest, data in given.items()}
    with pytest.raises(ParseError, match=r"line \d+: the constant given for digest .* differs from the f32\[8,4\]"):
        parse_program(text, program.target, wrong)
    with pytest.raises(ParseError, match="is a str, got NoneType"):
        parse_program(None, program.target)  # type: ignore[arg-type]
    other = replace(program.target, name="other")
    with pytest.raises(ParseError, match="the program is for ref, the target is other"):
        parse_program(text, other, given)


def test_any_damage_is_a_parse_error_or_another_program() -> None:
    program, draw = counted(), random.Random(3)
    text, given = print_program(program), constants(program)
    for _ in range(600):
        at, size = draw.randrange(len(text)), draw.choice((0, 1, 1, 2, 10, 100))
        new = draw.choice(["", "0", "-", "(", ")", "[", "]", "%1", "@", "\n", "  ", '"', "\\", "9" * 30, "f32", "out "])
        try:
            parse_program(text[:at] + new + text[at + size :], program.target, given)
        except ParseError as e:
            assert re.match(r"line \d+: ", str(e))
