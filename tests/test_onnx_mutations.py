"""A sample of damaged ONNX models; more: python -m tests.onnx_mutations."""

from __future__ import annotations

import onnx
import pytest

from tests.onnx_mutations import mutants, outcome, run, seeds


def test_damaged_models_are_refused_or_right():
    counts, faults = run(240, seed=7)
    assert not faults, "\n".join(faults)
    assert counts["refused"] > 100 and counts["right"] > 10 and sum(counts.values()) == 240


def test_whole_models_are_right():
    found = {m.graph.node[0].op_type: outcome(m.SerializeToString()) for m in seeds()}
    assert found.pop("f") == "ran"  # ONNX's evaluator does not take the function's attribute
    assert len(found) == len(seeds()) - 1 and set(found.values()) == {"right"}


def test_a_wrong_result_a_crash_and_a_bare_error_are_found(monkeypatch):
    for fault, message in ((lambda *_: _raise(), "KeyError"), (lambda *_: __import__("os")._exit(7), "ends the process")):
        monkeypatch.setattr("tests.onnx_mutations.outcome", fault)
        counts, faults = run(3)
        assert counts["fault"] == 3 and len(faults) == 3 and message in faults[0]
    proto = seeds()[0]
    monkeypatch.undo()
    monkeypatch.setattr("tests.onnx_mutations.OnnxModel.run", lambda self, x: {"y": next(iter(x.values()))[:, :1] + 1.0})
    with pytest.raises(AssertionError, match="is wrong"):
        outcome(proto.SerializeToString())
    assert len(set(mutants(12, 0))) == 12 and onnx.ModelProto is type(proto)


def _raise():
    raise KeyError("x")
