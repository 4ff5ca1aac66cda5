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
from rlx.errors import OptionError
from rlx.frontends.onnx import OnnxModel, peer
from tests.onnx_models import parsed
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


def test_run_reads_and_writes_text(tmp_path, capsys):
    text = 'agraph (string[n] x) => (string[m] y) { y = StringNormalizer <stopwords = ["a"]> (x) }'
    onnx.save(parsed(text), tmp_path / "t.onnx")
    np.save(tmp_path / "x.npy", np.array(["a", "bé"]))
    says(capsys, "run", tmp_path / "t.onnx", "--input", f"x={tmp_path / 'x.npy'}", "--output", tmp_path / "out")
    assert np.load(tmp_path / "out" / "y.npy").tolist() == ["bé"]
    assert "'x' is text, or has no declared dims: give it" in says(capsys, "run", tmp_path / "t.onnx", "--random", fails=True)


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
    (("--input", "x"), "--input is name=file.npy; got 'x'"), (("--input", "x="), "--input is name=file.npy; got 'x='"),
    (("--input", "x=a.npy", "--input", "x=b.npy"), "--input x is given twice: a.npy and b.npy"),
    (("--random", "--dim", "n=2", "--dim", "n=3"), "--dim n is given twice: 2 and 3"),
    (("--random", "--dim", "n=1", "--graph", "net"), "--graph is for artifact files"),
    (("--random", f"--dim=n={10**14}"), "input 'x' is f32[n,40]: there is no room for random numbers of dims [1000000"),
    (("--random", f"--dim=n={10**30}"), "there is no room for random numbers"),
    (("--random", "--dim", "n=1", "--output", f"{__file__}/out"), "test_onnx_command.py is no folder"),
])  # fmt: skip
def test_wrong_arguments_of_run_are_named(args, message, file, capsys):
    assert message in says(capsys, "run", file, *args, fails=True)


def test_wrong_arrays_are_named(file, tmp_path, capsys):
    np.save(tmp_path / "x.npy", np.zeros((3, 40)))
    assert "'x' is of float32, got an array of float64" in says(capsys, "run", file, "--input", f"x={tmp_path}/x.npy", fails=True)
    np.save(tmp_path / "x.npy", np.zeros((3, 41), np.float32))
    assert "f32[n,40], got dims [3, 41]" in says(capsys, "run", file, "--input", f"x={tmp_path}/x.npy", fails=True)


def test_files_that_are_no_array_and_arrays_of_another_size_are_named(file, tmp_path, capsys):
    np.savez(tmp_path / "several.npz", np.zeros(3))
    (tmp_path / "empty.npy").write_bytes(b"")
    for name in ("several.npz", "empty.npy"):
        said = says(capsys, "run", file, "--input", f"x={tmp_path / name}", fails=True)
        assert f"{name} cannot be read as a .npy file: it does not begin as one" in said
    np.save(tmp_path / "x.npy", np.zeros((3, 40), np.float32))
    said = says(capsys, "run", file, "--input", f"x={tmp_path}/x.npy", "--dim", "n=2", fails=True)
    assert "input 'x' is f32[n,40], got dims [3, 40], and n is 2 in --dim" in said


def test_inputs_without_dims_are_given_and_sequences_are_for_python(tmp_path, capsys):
    onnx.save(model([helper.make_node("Neg", ["x"], ["y"])], [info("x")], [info("y")]), tmp_path / "open.onnx")
    said = says(capsys, "run", tmp_path / "open.onnx", "--random", fails=True)
    assert "'x' is text, or has no declared dims: give it, --input x=file.npy" in said
    np.save(tmp_path / "x.npy", np.ones((2, 3), np.float32))
    assert "2x3" in says(capsys, "run", tmp_path / "open.onnx", "--input", f"x={tmp_path}/x.npy")
    lists = helper.make_tensor_sequence_value_info("x", 1, [2])
    net = model([helper.make_node("SequenceLength", ["x"], ["y"])], [lists], [info("y", [], 7)])
    onnx.save(net, tmp_path / "lists.onnx")
    assert "input 'x' is a sequence, and a .npy file holds one array" in says(capsys, "run", tmp_path / "lists.onnx", fails=True)
    assert "inputs: x sequence" in says(capsys, "inspect", tmp_path / "lists.onnx", "--files")


def test_every_output_has_a_file_of_its_own_and_bf16_reads_back(tmp_path, capsys):
    nodes = [helper.make_node("Neg", ["x"], [name]) for name in ("a/b", "a_b")]
    outs = [info(n, [2], onnx.TensorProto.BFLOAT16) for n in ("a/b", "a_b")]
    onnx.save(model(nodes, [info("x", [2], onnx.TensorProto.BFLOAT16)], outs), tmp_path / "net.onnx")
    says(capsys, "run", tmp_path / "net.onnx", "--random", "--output", tmp_path / "out")
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["a_b.1.npy", "a_b.npy"]
    assert "bfloat16" in says(capsys, "run", tmp_path / "net.onnx", "--input", f"x={tmp_path}/out/a_b.npy")


def test_options_that_a_model_does_not_have_are_refused(file, tmp_path, capsys):
    saved = "save", file, tmp_path / "net.rlx", "--dim", "n=2"
    assert f"--capacity: {file} is no model of text" in says(capsys, *saved, "--capacity", 9, fails=True)
    assert "--cache: " in says(capsys, *saved, "--cache", "bf16", fails=True)
    with pytest.raises(OptionError, match="is a file of the model"):
        rlx.load(file).save(file, {"x": np.ones((2, 4), np.float32)})
    for command in ("bench", "explain"):
        assert "--cache: " in says(capsys, command, file, "--dim", "n=2", "--cache", "bf16", fails=True)
    for command in ("bench", "verify", "explain"):
        said = says(capsys, command, file, "--dim", "n=2", "--batch", 8, "--length", 9, fails=True)
        assert f"--batch, --length: {file} is no model of text; its sizes are given by --dim" in said
    assert "no input has a dim of this name" in says(capsys, "inspect", file, "--dim", "m=2", fails=True)
    assert "w" in says(capsys, "inspect", file, "--params").partition("tensors")[2]
    assert "which has no tokenizer: `rlx run`" in says(capsys, "generate", file, "hello", fails=True)
    says(capsys, *saved, "--no-weights")
    assert "was saved without its weights ('b', 'w')" in says(capsys, "run", tmp_path / "net.rlx", "--random", fails=True)


def test_an_artifact_of_a_model_with_text_outputs_is_refused(tmp_path, capsys):
    text = onnx.TensorProto.STRING
    nodes = [helper.make_node("StringNormalizer", ["s"], ["t"]), helper.make_node("Neg", ["x"], ["y"])]
    net = model(nodes, [info("s", [1], text), info("x", [2])], [info("t", [1], text), info("y", [2])])
    onnx.save(net, tmp_path / "net.onnx")
    np.save(tmp_path / "s.npy", np.array(["a"]))
    said = says(capsys, "save", tmp_path / "net.onnx", tmp_path / "net.rlx", "--input", f"s={tmp_path}/s.npy", fails=True)
    assert "output 't' is text, which an artifact does not hold" in said and not (tmp_path / "net.rlx").exists()


def test_bench_times_artifacts_of_graphs(file, tmp_path, capsys):
    says(capsys, "save", file, tmp_path / "net.rlx", "--dim", "n=2")
    facts = json.loads(says(capsys, "bench", tmp_path / "net.rlx", "--seconds", "0", "--json"))
    assert facts["results"][0]["what"] == "run on x f32[2,40]"
    assert "runs/s" in says(capsys, "bench", tmp_path / "net.rlx", "--seconds", "0")
    said = says(capsys, "bench", tmp_path / "net.rlx", "--batch", 8, fails=True)
    assert "--batch: " in said and "its sizes are those that it was saved with" in said
    for command in ("bench", "run"):
        assert "--tune is for compiles" in says(capsys, command, tmp_path / "net.rlx", "--tune", 1, fails=True)


def test_inspect_shows_initialisers_that_are_text(tmp_path, capsys):
    made = helper.make_tensor("stops", onnx.TensorProto.STRING, [2], ["a", "bé"])
    net = parsed("agraph (string[n] x) => (string[n] y) { y = StringConcat(x, stops) }")
    net.graph.initializer.append(made)
    onnx.save(net, tmp_path / "t.onnx")
    out = says(capsys, "inspect", tmp_path / "t.onnx", "--params")
    (row,) = (line.split() for line in out.partition("tensors")[2].splitlines() if "stops" in line)
    assert [cell for cell in row if cell != "│"] == ["stops", "text", "text", "2", "4", "bytes"]


def test_inspect_verify_bench_and_explain_take_onnx_models(file, tmp_path, capsys):
    out = says(capsys, "inspect", file)
    assert "opsets ai.onnx 21" in out and "inputs: x f32[n,40]" in out and "1 MatMul, 1 Add" in out and "as --dim n=1" in out
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


def test_values_of_weights_that_the_graph_needs_no_more_are_compared_with_onnx_runtime(tmp_path, capsys, monkeypatch):
    """A product of dequantised weights is computed on the bytes, and zero points of 0 are left out: the weights in f32 are values
    of the model alone."""
    node, rng = helper.make_node, np.random.default_rng(0)
    nodes = [
        node("QuantizeLinear", ["x", "s", "z"], ["xq"]), node("DequantizeLinear", ["xq", "s", "z"], ["xd"]),
        node("DequantizeLinear", ["w", "t", "zeros"], ["wd"], axis=1), node("MatMul", ["xd", "wd"], ["h"]),
        node("Add", ["h", "b"], ["y"]),
    ]  # fmt: skip
    arrays = {"s": np.float32(0.05), "z": np.uint8(128), "t": np.full(72, 0.02, np.float32), "b": np.ones(72, np.float32)}
    arrays |= {"w": rng.integers(-127, 127, (16, 72), np.int8), "zeros": np.zeros(72, np.int8)}
    onnx.save(model(nodes, [info("x", [2, 16])], [info("y", [2, 72])], arrays), tmp_path / "net.onnx")

    class Right(Peer):
        class InferenceSession(Peer.InferenceSession):
            def run(self, names, inputs):
                return ReferenceEvaluator(self.model).run(names, inputs)

    monkeypatch.setitem(sys.modules, "onnxruntime", Right)
    assert "values of nodes are those of ONNX Runtime" in says(capsys, "verify", tmp_path / "net.onnx")


def test_verify_ends_at_the_first_node_that_differs_from_onnx_runtime(tmp_path, capsys, monkeypatch):
    chain = ("Exp", "x", "a"), ("Tanh", "a", "b"), ("Neg", "b", "c")
    nodes = [helper.make_node(op, [a], [b], name=f"n{b}") for op, a, b in chain]
    onnx.save(model(nodes, [info("x", [4])], [info("c", [4])]), tmp_path / "net.onnx")
    monkeypatch.setitem(sys.modules, "onnxruntime", Peer)
    err = says(capsys, "verify", tmp_path / "net.onnx", fails=True)
    assert "node 1 Tanh 'nb', its output 'b': " in err and "100.0% of the elements differ" in err
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert peer.compare(OnnxModel(tmp_path / "net.onnx"), {"x": np.zeros(4, np.float32)}) is None
