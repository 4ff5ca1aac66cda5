"""ONNX models: reading files, the structure of models, what is compiled in, and running."""

from __future__ import annotations

import os
import re
import sys

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import rlx
from rlx.driver.files import mapping
from rlx.errors import (
    BindingError,
    CorruptFileError,
    InputDTypeError,
    InputShapeError,
    MissingInputError,
    ModelError,
    OptionError,
    OutOfMemoryError,
    UnknownNameError,
    Unsupported,
)
from rlx.frontends.onnx import OnnxModel
from rlx.frontends.onnx.proto import Source

F32, I64 = TensorProto.FLOAT, TensorProto.INT64
RNG = np.random.default_rng(15)


def info(name, dims=None, dtype=F32):
    return helper.make_tensor_value_info(name, dtype, dims)


def model(nodes, inputs, outputs, initialisers=(), opset=21, **more):
    tensors = [numpy_helper.from_array(a, n) for n, a in dict(initialisers).items()]
    graph = helper.make_graph(nodes, "net", inputs, outputs, tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **more)


def linear(rows="n", width=300):
    """x @ w + b, with a weight that is mapped."""
    w, b = RNG.normal(size=(width, 5)).astype(np.float32), RNG.normal(size=5).astype(np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"], name="last")]
    return model(nodes, [info("x", [rows, width])], [info("y", [rows, 5])], {"w": w, "b": b}), w, b


# -- files


@pytest.mark.parametrize("give", [lambda m, p: m, lambda m, p: m.SerializeToString(), lambda m, p: p, lambda m, p: str(p)])
def test_a_model_comes_from_a_path_from_bytes_or_as_a_proto(give, tmp_path):
    proto, w, b = linear()
    onnx.save(proto, tmp_path / "net.onnx")
    x = RNG.normal(size=(3, 300)).astype(np.float32)
    graph = rlx.from_onnx(give(proto, tmp_path / "net.onnx"), dims={"n": 3})
    np.testing.assert_allclose(rlx.compile(graph)(x), x @ w + b, rtol=1e-4, atol=1e-5)
    assert sorted(graph.weights) == ["b", "w"] and [p.name for p in graph.params] == ["w", "b"]


def test_large_initialisers_of_a_file_are_mapped_and_not_copied(tmp_path):
    proto, w, _ = linear()
    onnx.save(proto, tmp_path / "net.onnx")
    found = rlx.from_onnx(tmp_path / "net.onnx").weights["w"]
    place = mapping(found)
    assert place is not None and place[0].path == tmp_path / "net.onnx" and np.array_equal(found, w)
    source = Source(tmp_path / "net.onnx")
    assert source.model.ByteSize() < 400 < w.nbytes and source.model.graph.initializer[0].dims == [300, 5]


def resident(path):
    """Bytes of a mapped file that are in this process's memory."""
    with open("/proc/self/smaps") as f:
        maps = re.split(r"^(?=[0-9a-f]+-)", f.read(), flags=re.M)
    return sum(int(found[1]) << 10 for m in maps if str(path) in m and (found := re.search(r"^Rss: +(\d+)", m, re.M)))


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the system does not say which pages are in memory")
def test_a_model_that_runs_holds_its_weights_once(tmp_path):
    """Packed: the pages of the file are given back, also those of weights too large to be copied before they are packed."""
    w = np.ones((1 << 16, 33), np.float32)  # 8.7 MB
    net = model([helper.make_node("MatMul", ["x", "w"], ["y"])], [info("x", [1, 1 << 16])], [info("y", [1, 33])], {"w": w})
    onnx.save(net, tmp_path / "large.onnx")
    net = OnnxModel(tmp_path / "large.onnx")
    assert resident(tmp_path / "large.onnx") == 0
    x = np.ones((1, 1 << 16), np.float32)
    assert net(x).tolist() == [[65536] * 33]
    assert net.executable({"x": x}).memory_plan().regions["params"] == 0 and resident(tmp_path / "large.onnx") == 0


def test_a_truncated_file_is_named_and_its_damage_placed(tmp_path):
    data = linear()[0].SerializeToString()
    for cut in (0, 1, 20, len(data) // 2, len(data) - 1):
        (tmp_path / "cut.onnx").write_bytes(data[:cut])
        with pytest.raises(ModelError, match=r"cut\.onnx"):
            rlx.from_onnx(tmp_path / "cut.onnx")
    (tmp_path / "text.onnx").write_text("no model at all, only words\n" * 50)
    with pytest.raises(CorruptFileError, match="byte"):
        rlx.from_onnx(tmp_path / "text.onnx")
    with pytest.raises(ModelError, match="is missing"):
        rlx.from_onnx(tmp_path / "absent.onnx")
    with pytest.raises(ModelError, match="is a folder"):
        rlx.from_onnx(tmp_path)


def stored_outside(folder, location="w.bin", **changes):
    """A model with its weight in another file; `changes` to the entries that say where it is."""
    proto, w, b = linear()
    onnx.save(proto, folder / "net.onnx", save_as_external_data=True, location="w.bin", size_threshold=1000)
    kept = onnx.load(folder / "net.onnx", load_external_data=False)
    (tensor,) = (t for t in kept.graph.initializer if t.data_location == TensorProto.EXTERNAL)
    for entry in tensor.external_data:
        entry.value = str({"location": location, **changes}.get(entry.key, entry.value))
    onnx.save(kept, folder / "net.onnx")
    return folder / "net.onnx", w, b


def test_external_data_is_mapped_from_the_folder_of_the_model(tmp_path):
    path, w, b = stored_outside(tmp_path)
    graph = rlx.from_onnx(path, dims={"n": 2})
    assert mapping(graph.weights["w"])[0].path == tmp_path / "w.bin"
    x = np.ones((2, 300), np.float32)
    np.testing.assert_allclose(rlx.compile(graph)(x), x @ w + b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ModelError, match="give the model's path"):
        rlx.from_onnx(path.read_bytes())


@pytest.mark.parametrize("changes,message", [
    ({"location": "../w.bin"}, "no path inside"), ({"location": "/etc/passwd"}, "no path inside"),
    ({"location": ""}, "no path inside"), ({"location": "gone.bin"}, r"gone\.bin is missing; .*net\.onnx: tensor 'w' is in it"),
    ({"location": "link.bin"}, "a link to outside"), ({"offset": 8000}, "which has 6000"), ({"offset": -4}, "-4 on"),
    ({"offset": "many"}, "many on"), ({"length": 10}, "takes 6000 bytes, and is given as 10"),
])  # fmt: skip
def test_external_data_stays_inside_the_folder_and_the_file(changes, message, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.bin").write_bytes(bytes(6000))
    os.symlink(tmp_path / "outside.bin", folder / "link.bin")
    path, *_ = stored_outside(folder, **changes)
    with pytest.raises(ModelError, match=message):
        rlx.from_onnx(path)


def test_links_of_a_cache_are_followed_where_model_and_data_lie_together(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir(), snapshot.mkdir()
    stored_outside(blobs)
    for name in ("net.onnx", "w.bin"):
        os.symlink(blobs / name, snapshot / name)
    assert rlx.from_onnx(snapshot / "net.onnx").weights["w"].shape == (300, 5)


def test_sizes_of_tensors_are_compared_with_their_bytes():
    proto, *_ = linear()
    proto.graph.initializer[0].dims[:] = [300, 1 << 40]
    with pytest.raises(CorruptFileError, match=r"'w' of float32\[300, 1099511627776\] takes \d+ bytes, and the file has 6000"):
        rlx.from_onnx(proto)
    proto.graph.initializer[0].CopyFrom(helper.make_tensor("w", F32, [300, 5], np.zeros(1500)))
    proto.graph.initializer[0].dims[:] = [300, 6]
    with pytest.raises(CorruptFileError, match="needs 1800 numbers in float_data, and has 1500"):
        rlx.from_onnx(proto)


@pytest.mark.parametrize("op,initialisers,inputs", [
    ("Relu", {}, ["x"]), ("Expand", {"s": np.array([1 << 40, 4])}, ["x", "s"]), ("Tile", {"s": np.array([1 << 40])}, ["x", "s"]),
    ("Pad", {"s": np.array([0, 1 << 40])}, ["x", "s"]),
    ("Range", {"a": np.array(0.0, np.float32), "b": np.array(1e12, np.float32), "c": np.array(1.0, np.float32)}, ["a", "b", "c"]),
])  # fmt: skip
def test_sizes_that_no_memory_holds_are_refused_before_any_is_taken(op, initialisers, inputs):
    dims = [1 << 40, 8] if op == "Relu" else [4]
    node = helper.make_node(op, inputs, ["y"])
    net = OnnxModel(model([node], [info("x", dims)], [info("y", None)], initialisers))
    with pytest.raises((OutOfMemoryError, Unsupported), match=r"has no room for graph|elements would be computed"):
        net.compile()


def test_a_range_of_step_zero_is_refused():
    ends = {name: np.array(value) for name, value in (("a", 0), ("b", 5), ("c", 0))}
    net = OnnxModel(model([helper.make_node("Range", ["a", "b", "c"], ["y"])], [info("x", [4])], [info("y", None)], ends))
    with pytest.raises(Unsupported, match="node 0 Range: its step is 0"):
        net.compile()


# -- structure


def test_every_fault_of_a_model_is_listed_at_once():
    nodes = [
        helper.make_node("Add", ["x", "late"], ["a"], name="first"), helper.make_node("Relu", ["a", "a"], ["late"]),
        helper.make_node("Concat", ["x", "gone"], ["c"]), helper.make_node("Relu", ["x"], ["c"], slope=2),
    ]  # fmt: skip
    with pytest.raises(ModelError) as found:
        rlx.from_onnx(model(nodes, [info("x", [2])], [info("c", [2]), info("none", [2])]))
    for part in (
        "node 0 Add 'first' reads 'late', which node 1 makes, which is not before it",
        "node 1 Relu has 2 operands, and the operator 1", "node 2 Concat reads 'gone', which no node and no input makes",
        "node 2 Concat: the attribute 'axis' is missing", "node 3 Relu has an attribute 'slope'",
        "node 3 Relu makes 'c', which is made already", "the output 'none' is made by no node",
    ):  # fmt: skip
        assert part in str(found.value)


def test_every_refused_node_is_listed_at_once():
    nodes = [
        helper.make_node("Frob", ["x"], ["a"], domain="my.domain", name="mine"), helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("ImageDecoder", ["x"], ["c"], name="image"), helper.make_node("Frobs", ["b"], ["d"], domain="my.domain"),
    ]  # fmt: skip
    with pytest.raises(Unsupported) as found:
        rlx.from_onnx(model(nodes, [info("x", [2])], [info("b", [2]), info("c", [2])]))
    assert "3 nodes are refused: node 0 Frob 'mine': operator my.domain.Frob is neither of ONNX" in str(found.value)
    assert "node 2 ImageDecoder 'image': operator ImageDecoder of opset 21 is not supported" in str(found.value)
    assert "node 3 Frobs: operator my.domain.Frobs is neither" in str(found.value)  # it reads results of a refused one


def test_versions_that_onnx_does_not_know_are_refused():
    proto = linear()[0]
    proto.opset_import[0].version, proto.ir_version = 9999, 9999
    with pytest.raises(ModelError, match="IR version 9999 is newer.*opset 9999 is newer than .*update onnx"):
        rlx.from_onnx(proto)
    with pytest.raises(ModelError, match="it has no graph"):
        rlx.from_onnx(onnx.ModelProto())
    wide = model([helper.make_node("Identity", ["x"], ["y"])], [info("x", [2], TensorProto.COMPLEX128)], [info("y", None)])
    with pytest.raises(Unsupported, match="elements of type COMPLEX128, which rlx does not have"):
        rlx.from_onnx(wide)


def test_operators_of_later_versions_in_an_old_opset_are_no_reason_for_onnx_to_crash():
    node = helper.make_node("TfIdfVectorizer", ["x"], ["y"], mode="TF", min_gram_length=1, max_gram_length=1, max_skip_count=0)
    proto = model([node], [info("x", [2])], [info("y", [2])], opset=3)  # without ngram_indexes, which onnx's converter reads
    with pytest.raises(ModelError, match="node 0 TfIdfVectorizer is no operator of opset 3"):
        rlx.from_onnx(proto)


def test_opsets_before_7_are_converted():
    node = helper.make_node("Add", ["x", "b"], ["y"], broadcast=1, axis=0)
    net = OnnxModel(model([node], [info("x", [2, 3])], [info("y", [2, 3])], {"b": np.float32([10, 20])}, opset=6))
    assert net(np.zeros((2, 3), np.float32)).tolist() == [[10] * 3, [20] * 3]


# -- running


def test_a_model_is_compiled_once_for_each_signature_and_says_why():
    proto, w, b = linear()
    net = OnnxModel(proto)
    for rows in (2, 3, 2):
        x = RNG.normal(size=(rows, 300)).astype(np.float32)
        np.testing.assert_allclose(net.run({"x": x})["y"], x @ w + b, rtol=1e-4, atol=1e-5)
    assert net.reasons == ["first call", "x is float32[3,300], was float32[2,300]"]


def test_inputs_that_hold_axes_are_compiled_in_and_compiled_again_when_they_change():
    nodes = [helper.make_node("Reshape", ["x", "to"], ["h"]), helper.make_node("Neg", ["h"], ["y"])]
    proto = model(nodes, [info("x", [2, 6]), info("to", [2], I64)], [info("y", None)])
    net, x = OnnxModel(proto), np.arange(12, dtype=np.float32).reshape(2, 6)
    for to in ([3, 4], [4, 3], [3, 4]):
        assert np.array_equal(net(x, np.array(to)), -x.reshape(to))
    assert net.reasons == ["first call", "to is int64[2] [4, 3], was int64[2] [3, 4]"]
    with pytest.raises(Unsupported, match="node 0 Reshape needs the contents of operand 1.*input 'to': give values="):
        rlx.from_onnx(proto)
    assert rlx.from_onnx(proto, values={"to": [12, 1]}).outputs[0].shape == (12, 1)
    with pytest.raises(Unsupported, match="input 'to': its contents 'ab' are no array of int64"):
        rlx.from_onnx(proto, values={"to": "ab"})
    with pytest.raises(Unsupported, match=r"hold 2 elements.* \(compiled for the contents of inputs: 'to' = \[2, 1\]\)"):
        net(x, np.array([2, 1]))


def test_arguments_are_checked():
    net = OnnxModel(linear()[0])
    x = np.zeros((1, 300), np.float32)
    for given, error, message in (
        ({"z": x}, UnknownNameError, "no input 'z'; it has 'x'"), ({}, MissingInputError, "no value for input 'x'"),
        ({"x": x.astype(np.float64)}, InputDTypeError, "'x' is of float32, got an array of float64"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            net.run(given)
    with pytest.raises(BindingError, match="1 inputs"):
        net(x, x)
    with pytest.raises(BindingError, match="'x' is given by position and by name"):
        net(x, x=x)
    with pytest.raises(BindingError, match="or a list of arrays by position; got ndarray"):
        net.run(x)
    with pytest.raises(BindingError, match="lists of different lengths"):
        net([[1.0], [1.0, 2.0]])
    assert net([[1] * 300]).shape == (1, 5)  # numbers in lists have no dtype yet


def test_numbers_in_lists_must_fit_the_dtype_of_the_input():
    net = OnnxModel(model([helper.make_node("Neg", ["x"], ["y"])], [info("x", [2], I64)], [info("y", [2], I64)]))
    assert net([1, 2]).tolist() == [-1, -2] and net([1.0, 2.0]).tolist() == [-1, -2]
    with pytest.raises(InputDTypeError, match="int64, which does not hold all of the numbers"):
        net([0.5, 2])


def test_sizes_and_contents_that_are_none_are_refused():
    proto = linear()[0]
    with pytest.raises(UnknownNameError, match="no input has a dim called 'rows'; there are 'n'"):
        rlx.from_onnx(proto, dims={"rows": 2})
    for dims in ({"n": "2"}, {"n": -1}, [2]):
        with pytest.raises(OptionError, match="dims are {name: size}"):
            rlx.from_onnx(proto, dims=dims)
    with pytest.raises(OptionError, match="rows of past keys and values, is a whole number of at least 1, got 0"):
        OnnxModel(proto, states=0)
    with pytest.raises(ModelError, match=r"no past… inputs with present… outputs"):
        OnnxModel(proto, states=8)


def test_weights_that_came_with_a_graph_are_set_by_every_way_to_compile():
    proto, w, b = linear()
    graph = rlx.from_onnx(proto)
    x = RNG.normal(size=(3, 300)).astype(np.float32)
    for compiled in (
        rlx.Session("cpu").compile(graph, dims={"n": 3}), rlx.compile(graph, dims={"n": "auto"}),
        rlx.runtime.CompileCache().compile(rlx.Session("cpu"), graph, dims={"n": 3}),
    ):  # fmt: skip
        np.testing.assert_allclose(compiled.run({"x": x})[0], x @ w + b, rtol=1e-4, atol=1e-5)


def test_functions_of_a_model_are_used_with_their_attributes():
    body = [helper.make_node("Selu", ["a"], ["b"]), helper.make_node("Add", ["b", "a"], ["c"])]
    body[0].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="strength", type=onnx.AttributeProto.FLOAT))
    f = helper.make_function("mine", "Twice", ["a"], ["c"], body, [helper.make_opsetid("", 21)], ["strength"])
    proto = model([helper.make_node("Twice", ["x"], ["y"], domain="mine", strength=3.0)], [info("x", [2])], [info("y", [2])])
    proto.opset_import.append(helper.make_opsetid("mine", 1))
    proto.functions.append(f)
    x = np.float32([-1, 2])
    np.testing.assert_allclose(OnnxModel(proto)(x), x + 1.0507009873554805 * np.where(x > 0, x, 3 * np.expm1(x)), rtol=1e-6)


def test_without_the_package_the_message_names_it(tmp_path, monkeypatch):
    for name in [m for m in sys.modules if m == "rlx.frontends.onnx"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.setattr("rlx.frontends.load.import_module", _absent)
    with pytest.raises(Unsupported, match=r"net\.onnx is read with the package onnx, which is not installed: pip install"):
        rlx.load(tmp_path / "net.onnx")


def _absent(name):
    raise ModuleNotFoundError("No module named 'onnx'", name="onnx")


# -- graphs as rlx's own networks are written


def test_products_of_one_operand_become_one_and_biases_go_behind():
    make, rng, dims = helper.make_node, np.random.default_rng(5), {"a": 8, "b": 8, "c": 12}
    nodes, weights = [], {}
    for name, width in dims.items():
        weights[f"w{name}"] = rng.normal(size=(6, width)).astype(np.float32)
        weights[f"b{name}"] = rng.normal(size=width).astype(np.float32)
        nodes += [make("MatMul", ["x", f"w{name}"], [f"m{name}"]), make("Add", [f"b{name}", f"m{name}"], [name])]
    graph = rlx.from_onnx(model(nodes, [info("x", [2, 6])], [info(n, None) for n in dims], weights))
    assert [n.op.name for n in graph.nodes()].count("matmul") == 1
    x = rng.normal(size=(2, 6)).astype(np.float32)
    for name, found in zip(dims, rlx.compile(graph).run({"x": x})):
        np.testing.assert_allclose(found, x @ weights[f"w{name}"] + weights[f"b{name}"], rtol=1e-5, atol=1e-6)


def test_products_whose_results_are_read_otherwise_stay():
    nodes = [helper.make_node("MatMul", ["x", w], [y]) for w, y in (("w", "a"), ("v", "b"))]
    weights = {n: np.ones((6, 3), np.float32) for n in "wv"}
    graph = rlx.from_onnx(model(nodes, [info("x", [2, 6])], [info("a", None), info("b", None)], weights))
    assert [n.op.name for n in graph.nodes()].count("matmul") == 2  # they are outputs: each has its own memory anyway


# -- states


def decoder(width=4, vocab=11):
    """One layer of attention over past and new keys, masked: ids, mask, past -> logits, present."""
    make, rng = helper.make_node, np.random.default_rng(3)
    nodes = [
        make("Gather", ["table", "input_ids"], ["x"]), make("MatMul", ["x", "wk"], ["k"]), make("MatMul", ["x", "wv"], ["v"]),
        make("Concat", ["past_key_values.0.key", "k"], ["present.0.key"], axis=1),
        make("Concat", ["past_key_values.0.value", "v"], ["present.0.value"], axis=1),
        make("Transpose", ["present.0.key"], ["kt"], perm=[0, 2, 1]), make("MatMul", ["x", "kt"], ["s"]),
        make("Cast", ["attention_mask"], ["seen"], to=TensorProto.BOOL), make("Unsqueeze", ["seen", "one"], ["seen3"]),
        make("Where", ["seen3", "s", "low"], ["m"]), make("Softmax", ["m"], ["p"], axis=-1),
        make("MatMul", ["p", "present.0.value"], ["y"]), make("MatMul", ["y", "head"], ["logits"]),
    ]  # fmt: skip
    past = ["batch", "past_sequence_length", width]
    inputs = [info("input_ids", ["batch", "sequence"], I64), info("attention_mask", ["batch", "total"], I64)]
    inputs += [info(f"past_key_values.0.{n}", past) for n in ("key", "value")]
    outputs = [info("logits", None), *(info(f"present.0.{n}", None) for n in ("key", "value"))]
    dims = {"wk": (width, width), "wv": (width, width), "table": (vocab, width), "head": (width, vocab)}
    weights = {n: rng.normal(size=d).astype(np.float32) for n, d in dims.items()}
    return model(nodes, inputs, outputs, {**weights, "one": np.array([1]), "low": np.float32(-1e9)})


def test_past_and_present_become_states_that_stay_on_the_device():
    plain, net = OnnxModel(decoder()), OnnxModel(decoder(), states=12)
    assert [i.name for i in net.inputs] == ["input_ids", "attention_mask"] and [o.name for o in net.outputs] == ["logits"]
    for _ in range(2):
        past, seen = {f"past_key_values.0.{n}": np.zeros((2, 0, 4), np.float32) for n in ("key", "value")}, 0
        for ids in ([[1, 2, 3], [4, 5, 6]], [[7], [8]], [[9], [10]], [[0], [1]]):
            ids = np.array(ids)
            seen += ids.shape[1]
            given = {"input_ids": ids, "attention_mask": np.ones((2, seen), np.int64)}
            want = plain.run({**given, **past})
            past = {f"past_key_values.0.{n}": want[f"present.0.{n}"] for n in ("key", "value")}
            np.testing.assert_allclose(net.run(given)["logits"], want["logits"], rtol=1e-5, atol=1e-6)
        assert net.filled == 6 and len(net.reasons) == 2
        net.reset()


def test_states_without_a_mask_are_refused():
    past, made = [1, "rows", 4], [1, "all", 4]
    make = helper.make_node
    nodes = [make("Concat", ["past_0", "x"], ["present_0"], axis=1), make("ReduceMean", ["present_0"], ["y"])]
    proto = model(nodes, [info("x", [1, "new", 4]), info("past_0", past)], [info("y", None), info("present_0", made)])
    with pytest.raises(ModelError, match="has no input 'attention_mask', which would hide the rows .* leave states= out"):
        OnnxModel(proto, states=8)  # a mean over rows of zeros, which are not filled, would be another


def test_states_that_are_full_are_named():
    net = OnnxModel(decoder(), states=3)
    given = {"input_ids": np.zeros((1, 2), np.int64), "attention_mask": np.ones((1, 2), np.int64)}
    net.run(given)
    with pytest.raises(InputShapeError, match="the states hold 3 rows, 2 are filled, and 2 more come"):
        net.run({**given, "attention_mask": np.ones((1, 4), np.int64)})
    net.run({"input_ids": np.zeros((1, 1), np.int64), "attention_mask": np.ones((1, 3), np.int64)})


def test_an_executable_is_compiled_for_named_dims_and_saved_with_its_weights(tmp_path):
    proto, w, b = linear()
    net, x = OnnxModel(proto), RNG.normal(size=(4, 300)).astype(np.float32)
    np.testing.assert_allclose(net.compile({"n": 4})(x), x @ w + b, rtol=1e-4, atol=1e-5)
    assert net.executable({"x": x}) is net.executable({"x": x}) and net.reasons == ["first call"]
    net.save(tmp_path / "net.rlx", {"x": x})
    np.testing.assert_allclose(rlx.load(tmp_path / "net.rlx")(x), x @ w + b, rtol=1e-4, atol=1e-5)


def test_dims_of_arrays_are_compared_with_those_that_the_model_declares():
    net = OnnxModel(decoder())
    past = {f"past_key_values.0.{n}": np.zeros((1, 0, 4), np.float32) for n in ("key", "value")}
    said = r"'attention_mask' is i64\[batch,total\], got .*3\], and batch is 1 in input 'input_ids'"
    with pytest.raises(InputShapeError, match=said):
        net.run({"input_ids": np.zeros((1, 3), np.int64), "attention_mask": np.ones((2, 3), np.int64), **past})
    with pytest.raises(InputShapeError, match=r"got dims \[3\]"):
        net.run({"input_ids": np.zeros(3, np.int64), "attention_mask": np.ones((2, 3), np.int64), **past})


# -- sizes that depend on data


def positives(n):
    """A handler for the tests: the indices of positive elements of a vector, with their count."""
    x = n.value(0)
    keep = x > 0.0
    order, _ = rlx.sort(rlx.where(keep, rlx.arange(x.dims[0], dtype=rlx.i64), x.dims[0] - 1))
    return n.bounded(order, 0, keep.astype(rlx.i64).sum())


@pytest.fixture
def counting(monkeypatch):
    from rlx.frontends.onnx import table

    table.find("", "Relu", 21)
    monkeypatch.setitem(table._TABLE, ("tests", "Positives"), {1: positives})


def counted(nodes, outputs):
    proto = model([helper.make_node("Positives", ["x"], ["i"], domain="tests"), *nodes], [info("x", [6])], outputs)
    proto.opset_import.append(helper.make_opsetid("tests", 1))
    return proto


def test_a_size_that_depends_on_data_passes_through_ops_that_keep_rows_apart_and_outputs_are_cut(counting):
    nodes = [
        helper.make_node("Gather", ["x", "i"], ["found"]), helper.make_node("Exp", ["found"], ["grown"]),
        helper.make_node("Unsqueeze", ["grown", "one"], ["column"]),
    ]  # fmt: skip
    proto = counted(nodes, [info("i", None, I64), info("column", None)])
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    net = OnnxModel(proto)
    for x in ([1, -1, 2, -3, 0, 5], [-1] * 6, [1, 2, 3, 4, 5, 6]):
        x = np.float32(x)
        indices, column = net(x)
        assert indices.tolist() == np.flatnonzero(x > 0).tolist()
        np.testing.assert_allclose(column, np.exp(x[x > 0])[:, None], rtol=1e-6)
    assert net.reasons == ["first call"]


def test_a_node_that_mixes_data_with_undefined_rows_is_refused(counting):
    nodes = [helper.make_node("Gather", ["x", "i"], ["found"]), helper.make_node("ReduceSum", ["found"], ["s"], name="all")]
    with pytest.raises(Unsupported, match="2 ReduceSum .all.: sum mixes elements along axis 0 .* depends on data: at most 6"):
        OnnxModel(counted(nodes, [info("s", None)]))(np.zeros(6, np.float32))
    with pytest.raises(Unsupported, match="node 1 Shape: the size of operand 0 depends on data"):
        OnnxModel(counted([helper.make_node("Shape", ["i"], ["s"])], [info("s", None, I64)]))(np.zeros(6, np.float32))
