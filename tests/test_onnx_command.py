"""The command `rlx` on ONNX models: run, save, inspect, verify, bench, explain."""

from __future__ import annotations

import json
import sys

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

import rlx
from rlx.cli.main import run
from rlx.frontends.onnx import OnnxModel, peer
from tests.test_onnx import RNG, info, linear, model


@pytest.fixture
def file(tmp_path):
    onnx.save(linear(width=40)[0], tmp_path / "net.onnx")
    return tmp_path / "net.onnx"


def says(capsys, *args, fails=False):
    """The output of a command; `fails`: its error."""
    try:
        run([str(a) for a in args])
    except SystemExit as e:
        assert bool(e.code) == fails, capsys.readouterr().err
    done = capsys.readouterr()
    return done.err if fails else done.out


def test_run_reads_arrays_and_writes_outputs(file, tmp_path, capsys):
    x = RNG.normal(size=(3, 40)).astype(np.float32)
    np.save(tmp_path / "x.npy", x)
    out = says(capsys, "run", file, "--input", f"x={tmp_path / 'x.npy'}", "--output", tmp_path / "out", "--threads", 1)
    assert "3x5" in out and "on CPU, 1 threads" in out
    np.testing.assert_allclose(np.load(tmp_path / "out" / "y.npy"), OnnxModel(file)(x), rtol=1e-6)


def test_run_takes_artifacts_of_graphs(file, tmp_path, capsys):
    assert "net.rlx" in says(capsys, "save", file, tmp_path / "net.rlx", "--dim", "n=2")
    assert "2x5" in says(capsys, "run", tmp_path / "net.rlx", "--random")
    g = rlx.Graph("other")
    g.set_outputs([g.input("a", (2,), rlx.f32) + 1.0])
    rlx.save(tmp_path / "two.rlx", [rlx.compile(g), OnnxModel(file).compile({"n": 2})])
    assert "choose one with --graph" in says(capsys, "run", tmp_path / "two.rlx", "--random", fails=True)
    assert "2x5" in says(capsys, "run", tmp_path / "two.rlx", "--random", "--graph", "net")


@pytest.mark.parametrize("args,message", [
    ((), "no value for input x f32[n,40]: --input name=file.npy for each, or --random"),
    (("--random",), "input 'x' is f32[n,40]: give the size of n, as --dim n=1"),
    (("--random", "--dim", "m=2"), "no input has a dim of this name; there are 'n'"),
    (("--random", "--dim", "n"), "--dim is name=size"),
    (("--input", "z=a.npy"), "there is no such input; there are 'x'"),
    (("--input", "x=none.npy"), "none.npy cannot be read as a .npy file"),
])  # fmt: skip
def test_wrong_arguments_of_run_are_named(args, message, file, capsys):
    assert message in says(capsys, "run", file, *args, fails=True)


def test_wrong_arrays_are_named(file, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((3, 40)))
    assert "'x' is of float32, got an array of float64" in says(capsys, "run", file, "--input", f"x={tmp_path}/x.npy", fails=True)
    np.save(tmp_path / "x.npy", np.zeros((3, 41), np.float32))
    assert "f32[n,40], got dims [3, 41]" in says(capsys, "run", file, "--input", f"x={tmp_path}/x.npy", fails=True)


def test_inspect_verify_bench_and_explain_take_onnx_models(file, tmp_path, capsys):
    out = says(capsys, "inspect", file)
    assert "opsets ai.onnx 21" in out and "inputs: x f32[n,40]" in out and "1 MatMul, 1 Add" in out and "--dim name=size" in out
    assert "what would be compiled" in says(capsys, "inspect", file, "--dim", "n=3")
    out = says(capsys, "verify", file, "--dim", "n=3")
    assert "the memory plan is sound" in out and "ONNX Runtime" in out
    facts = json.loads(says(capsys, "bench", file, "--dim", "n=3", "--seconds", "0", "--json"))
    assert facts["results"][0]["what"] == "run on x f32[3,40]" and facts["results"][0]["runs"] >= 5
    assert "1 step" in says(capsys, "explain", file, "--dim", "n=3", "--output", tmp_path / "page.html")
    assert "MatMul" not in (tmp_path / "page.html").read_text()[:100] and (tmp_path / "page.html").stat().st_size > 10_000


class Peer:
    """ONNX Runtime with a fault in the second node."""

    class SessionOptions: ...

    class GraphOptimizationLevel:
        ORT_DISABLE_ALL = 0

    class InferenceSession:
        def __init__(self, model, options, providers):
            self.model = onnx.ModelProto.FromString(model)

        def run(self, names, inputs):
            found = ReferenceEvaluator(self.model).run(names, inputs)
            return [x + (0.5 if i == 1 else 0) for i, x in enumerate(found)]


def test_verify_ends_at_the_first_node_that_differs_from_onnx_runtime(tmp_path, capsys, monkeypatch):
    chain = ("Exp", "x", "a"), ("Tanh", "a", "b"), ("Neg", "b", "c")
    nodes = [helper.make_node(op, [a], [b], name=f"n{b}") for op, a, b in chain]
    onnx.save(model(nodes, [info("x", [4])], [info("c", [4])]), tmp_path / "net.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", Peer)
    err = says(capsys, "verify", tmp_path / "net.onnx", fails=True)
    assert "node 1 Tanh 'nb', its output 'b': " in err and "100.0% of the elements differ" in err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert peer.compare(OnnxModel(tmp_path / "net.onnx"), {"x": np.zeros(4, np.float32)}) is None
