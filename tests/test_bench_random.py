"""The benchmark of random ops: both forms of a case are the same op, wrong results are said, and rows are those asked for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from benchmarks import random_cases, random_ops  # noqa: E402


def drawn(count: int, *only: str) -> list[random_cases.Case]:
    return list(itertools.islice(random_cases.cases(7, 1 << 14, 1e5, list(only)), count))


def test_both_forms_of_a_case_have_the_same_dims_and_dtype():
    found = drawn(2 * len(random_cases.KINDS))
    assert {case.name.partition(".")[0] for case in found} == set(random_cases.KINDS)
    for case in found:
        shape = random_ops.graph(case).outputs[0].shape
        theirs = case.theirs(*(random_ops.operand(leaf, "cpu") for leaf in case.leaves))
        assert (shape.dims, random_ops.DTYPES[str(shape.dtype)]) == (tuple(theirs.shape), theirs.dtype), case.label
    assert drawn(1, "norm.1")[0].label == next(case.label for case in found if case.name == "norm.1")


def test_rows_are_of_the_named_cases(capsys):
    threads = torch.get_num_threads()
    random_ops.main(["--only", "order.0", "chain.3", "--count", "2", "--seed", "7"])
    torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[4:6]} == {"order.0", "chain.3"}
    assert lines[-1].startswith("2 cases: ") and ", 0 wrong; " in lines[-1]
    with pytest.raises(SystemExit, match="there is no kind orders; there are pointwise, "):
        random_ops.main(["--only", "orders"])


def test_a_wrong_result_is_said():
    (case,) = drawn(1, "chain.3")
    operands = [random_ops.operand(leaf, "cpu") for leaf in case.leaves]
    right = case.theirs(*operands)
    assert random_ops.fault(case, right, operands) == ""
    assert "is off by " in random_ops.fault(case, right + 1, operands)
    assert "has dims " in random_ops.fault(case, right[:0], operands)
    rough = replace(case, theirs=lambda *x: case.theirs(*x) * (1 if x[0].dtype == torch.float64 else 1.001))  # of f32
    assert random_ops.fault(rough, right * 1.0015, operands) == "" != random_ops.fault(rough, right * 1.004, operands)
    best = next(case for case in drawn(99, "along") if case.picked is not None and case.leaves[0].dims[case.picked] > 1)
    best = replace(best, leaves=[replace(best.leaves[0], dtype="f32")])
    operands = [random_ops.operand(leaf, "cpu") for leaf in best.leaves]
    index = best.theirs(*operands)
    assert random_ops.fault(best, index, operands) == "" != random_ops.fault(best, index - index, operands)
    x = torch.randn(1 << 17).half()
    flat = replace(case, op="softmax", theirs=lambda x: torch.softmax(x, 0))
    rounded = torch.softmax(x.double(), 0).half()  # to a few digits, so small are they
    assert random_ops.fault(flat, rounded, [x]) == "" != random_ops.fault(flat, rounded * 2, [x])
