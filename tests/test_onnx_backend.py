"""A sample of ONNX's own backend tests; all of them: python -m tests.onnx_cases --jobs 2."""

from __future__ import annotations

import warnings

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.backend.test.runner import Runner

import rlx
from rlx.frontends.onnx import backend
from tests.onnx_cases import KINDS, cases, judged, run
from tests.onnx_excluded import EXCLUDED, excluded

STRIDE = {"node": 23, "simple": 4, "real": 5, "pytorch-converted": 9, "pytorch-operator": 6}  # one of so many cases


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_of_the_cases_of_onnx_passes(kind):
    """Each that is not excluded passes, each that is excluded does not."""
    found = sorted(cases([kind]), key=lambda pair: pair[1].name)[:: STRIDE[kind]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        faults = [fault for pair in found if (fault := judged(run(*pair)))]
    assert len(found) > 1 and not faults, "\n".join(faults)


def test_every_exclusion_names_cases_and_a_reason():
    names = [case.name for _, case in cases()]
    assert all(len(why) > 20 and any(excluded(n) == why for n in names) for why in EXCLUDED.values())
    assert excluded("test_abs") is None


def test_the_backend_runs_models_and_nodes_by_position_and_by_name():
    node = helper.make_node("Add", ["a", "b"], ["c"])
    a, b = np.float32([1, 2]), np.float32([[3], [4]])
    assert backend.run_node(node, [a, b])[0].tolist() == [[4, 5], [5, 6]]
    assert backend.run_node(node, {"a": a, "b": b}, outputs_info=[(np.float32, (2, 2))])[0].dtype == np.float32
    info = helper.make_tensor_value_info
    graph = helper.make_graph([node], "net", [info(n, 1, None) for n in "ab"], [info("c", 1, None)])
    prepared = backend.prepare(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    assert prepared.run([a, b])[0].shape == prepared.run({"a": a, "b": b})[0].shape == (2, 2)
    with pytest.raises(rlx.errors.BindingError, match="2 inputs"):
        prepared.run([a, b, a])
    with pytest.raises(rlx.errors.BindingError, match="node Add has 2 operands .*, got 3 by position"):
        backend.run_node(node, [a, b, a])


def test_devices_of_the_backend():
    assert backend.supports_device("CPU") and not backend.supports_device("NPU") and not backend.supports_device(None)
    assert backend.supports_device("CUDA") == rlx.is_available("cuda")


def test_the_backend_is_what_onnx_tests_take():
    """onnx.backend.test.runner finds it through the interface, and runs a case with it."""
    assert issubclass(backend.RlxBackend, onnx.backend.base.Backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the casts that make expected data
        tests = Runner(backend.RlxBackend, __name__).include("^test_relu_cpu$").test_cases["OnnxBackendNodeModelTest"]
    tests("test_relu_cpu").debug()
