"""Every op × sample × dtype × awkward data on every device that computes, against the op's own reference.

All cases of an op share one graph, so that a device compiles once per op. Memory is poisoned before the run.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from op_cases import Case, assert_same, cases

import rlx
from rlx.backends import get
from rlx.ir.graph import Graph, Value, apply
from rlx.ir.op import OPS, Kind

DEVICES = ("ref", "ref:1", "cpu")
NAMES = sorted(n for n, d in OPS.items() if d.kind is not Kind.LEAF)


def all_cases(op: str, device: str) -> list[Case]:
    target = get(rlx.Device.parse(device).name).target(0)
    return [c for c in cases(dtypes=target.dtypes) if c.op.name == op]


def together(op: str, chosen: list[Case]) -> tuple[Graph, dict[str, np.ndarray], list[tuple[Case, int]]]:
    """One graph with every case's operands and results; (case, result number) of each output."""
    g = Graph(f"every_{op}")
    inputs: dict[str, np.ndarray] = {}
    outputs: list[Value] = []
    owners: list[tuple[Case, int]] = []
    for i, case in enumerate(chosen):
        operands = []
        for j, (dims, dtype) in enumerate(zip(case.sample.shapes, case.dtypes)):
            operands.append(g.input(f"c{i}_x{j}", dims, dtype))
            inputs[f"c{i}_x{j}"] = case.inputs[f"x{j}"]
        out = apply(case.op, operands, dict(case.sample.attrs or {}))
        for number, value in enumerate([out] if isinstance(out, Value) else out):
            outputs.append(value)
            owners.append((case, number))
    g.set_outputs(outputs)
    return g, inputs, owners


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", NAMES)
def test_op(op: str, device: str) -> None:
    chosen = all_cases(op, device)
    assert chosen, f"{op} has no case in a dtype of {device}"
    g, inputs, owners = together(op, chosen)
    compiled = rlx.Session(device).compile(g, rlx.CompileOptions(threads=2))
    if device == "cpu":
        compiled._executable.poison()  # type: ignore[attr-defined]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        found = compiled.run(inputs)
        for array, (case, number) in zip(found, owners, strict=True):
            assert_same(array, case.expected[number], case.tolerance, f"{case} result {number} on {device}")


def test_text_form_of_every_op() -> None:
    for case in cases(awkward=False):
        text = str(case.graph())
        assert str(Graph.parse(text)) == text, case
