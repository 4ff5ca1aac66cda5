"""Every op × sample × dtype × awkward data on every device that computes, against the op's own reference.

All cases of an op share one graph, so that a device compiles once per op. Memory is poisoned before the run.
"""

from __future__ import annotations

import pytest
from device_conformance import NAMES, check_edges, check_op
from devices import DEVICES
from op_cases import cases

from rlx.ir.graph import Graph


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", NAMES)
def test_op(op: str, device: str) -> None:
    check_op(device, op)


@pytest.mark.parametrize("device", DEVICES)
def test_edges(device: str) -> None:
    check_edges(device)


def test_text_form_of_every_op() -> None:
    for case in cases(awkward=False):
        text = str(case.graph())
        assert str(Graph.parse(text)) == text, case
