"""Graphs as C libraries: built, called from a C program and through ctypes, and compared with runs in Python bit for bit."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import expert_graphs
import numpy as np
import pytest

import rlx
from rlx import knobs
from rlx.backends import get
from rlx.errors import BindingError, CompileError, DeviceUnavailableError, MissingParamError, OptionError, Unsupported
from rlx.runtime import CompileOptions, Session
from tests import small_models
from tests.artifact_mutations import graphs

ROOT = Path(__file__).parent.parent
COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")
X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)
STEP = {"delta": np.arange(4, dtype=np.float32), "at": np.array(2), "which": np.array([3, 1])}


@pytest.fixture(autouse=True)
def strict(tmp_path_factory) -> Iterator[None]:
    """Warnings of the C compiler are errors."""
    script = tmp_path_factory.mktemp("cc") / "cc"
    script.write_text(f'#!/bin/sh\nexec {COMPILER} -Wall -Wextra -Werror "$@"\n')
    script.chmod(0o755)
    with knobs.override(RLX_CC=str(script)):
        yield


class Tensor(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p), ("dtype", ctypes.c_char_p), ("rank", ctypes.c_size_t),
        ("dims", ctypes.POINTER(ctypes.c_int64)), ("bytes", ctypes.c_size_t),
    ]  # fmt: skip


class Model:
    """A model of a library, called through ctypes."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        lib = self.lib = ctypes.CDLL(str(path))
        for name in ("rlx_open", "rlx_input_data", "rlx_output_data", "rlx_state_data"):
            getattr(lib, name).restype = ctypes.c_void_p
        for role in ("input", "output", "state"):
            getattr(lib, f"rlx_{role}").restype = ctypes.POINTER(Tensor)
            getattr(lib, f"rlx_{role}_count").restype = ctypes.c_size_t
        lib.rlx_error.restype = ctypes.c_char_p
        lib.rlx_model_bytes.restype = lib.rlx_weight_bytes.restype = ctypes.c_size_t
        error = ctypes.create_string_buffer(300)
        self.model = ctypes.c_void_p(lib.rlx_open(threads, error, 300))
        self.why = error.value.decode()

    def shapes(self, role: str) -> list[tuple[str, str, tuple[int, ...]]]:
        found = []
        for i in range(getattr(self.lib, f"rlx_{role}_count")(self.model)):
            t = getattr(self.lib, f"rlx_{role}")(self.model, ctypes.c_size_t(i)).contents
            found.append((t.name.decode(), t.dtype.decode(), tuple(t.dims[: t.rank])))
        assert not getattr(self.lib, f"rlx_{role}")(self.model, ctypes.c_size_t(len(found)))
        return found

    def bytes(self, role: str) -> list[bytes]:
        count = len(self.shapes(role))
        sizes = [getattr(self.lib, f"rlx_{role}")(self.model, ctypes.c_size_t(i)).contents.bytes for i in range(count)]
        places = [getattr(self.lib, f"rlx_{role}_data")(self.model, ctypes.c_size_t(i)) for i in range(count)]
        return [ctypes.string_at(p, n) for p, n in zip(places, sizes)]

    def run(self, inputs: Mapping[str, Any], rows: int | None = None) -> list[bytes]:
        arrays = [np.ascontiguousarray(inputs[name]) for name, _, _ in self.shapes("input")]
        for i, a in enumerate(arrays):
            assert self.lib.rlx_set_input(self.model, ctypes.c_size_t(i), ctypes.c_void_p(a.ctypes.data)) == 0
        if rows is not None and self.lib.rlx_set_rows(self.model, ctypes.c_int64(rows)):
            raise ValueError(self.lib.rlx_error(self.model).decode())
        if self.lib.rlx_run(self.model):
            raise IndexError(self.lib.rlx_error(self.model).decode())
        return self.bytes("output")

    def close(self) -> None:
        self.lib.rlx_close(self.model)


def described(decls: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(d.name, d.dtype.name, d.shape.static) for d in decls]


def test_a_network_with_weights_on_any_number_of_threads(tmp_path):
    layers, _ = graphs()
    path = layers.export_c(tmp_path)
    assert path == tmp_path / "liblayers.so" and sorted(os.listdir(tmp_path)) == ["liblayers.so", "rlx.h"]
    (want,) = layers.run({"x": X})
    for threads in (0, 1, 2, 5):
        model = Model(path, threads)
        assert model.shapes("input") == described(layers.inputs) and model.shapes("output") == described(layers.outputs)
        assert [model.run({"x": X}) for _ in range(3)] == [[want.tobytes()]] * 3
        assert model.lib.rlx_weight_bytes() >= 4 * (8 * 40 + 40 * 5) and model.lib.rlx_model_bytes(model.model) > 0
        model.close()


def test_threads_keep_a_row_that_they_computed_in_front_of_a_product(tmp_path):
    g, x = rlx.Graph("row"), np.random.default_rng(1).standard_normal((1, 512)).astype(np.float32)
    g.set_outputs([rlx.exp(g.input("x", x.shape, "f32") * 0.5) @ g.param("w", (512, 4096), "f32")])
    made = Session(threads=2).compile(g)
    made.set_param("w", np.ones((512, 4096), np.float32))
    ((_, code),) = made._executable._code.artifact.coded["steps"]  # type: ignore[attr-defined]
    path = made.export_c(tmp_path)
    assert code.keeps and np.array([code.tasks, 0, code.keeps], np.int64).tobytes() in path.read_bytes(), "its row of the table"
    model = Model(path, 2)
    for n in range(20):
        assert model.run({"x": x * n}) == [made.run({"x": x * n})[0].tobytes()]
    model.close()


def test_states_and_a_run_that_fails(tmp_path):
    _, counter = graphs()
    model = Model(counter.export_c(tmp_path))
    assert model.shapes("state") == [("total", "f32", (4,)), ("rows", "f32", (6, 4))]
    for _ in range(3):
        assert model.run(STEP) == [a.tobytes() for a in counter.run(STEP)]
    before = model.bytes("state")
    assert before == [counter.read_handle(name).tobytes() for name in ("total", "rows")]  # type: ignore[union-attr]
    with pytest.raises(IndexError, match="counter: index out of range in gather.*; no state has changed"):
        model.run(STEP | {"which": np.array([9, 1])})
    assert model.bytes("state") == before
    assert model.run(STEP) == [a.tobytes() for a in counter.run(STEP)]
    assert model.lib.rlx_set_input(model.model, ctypes.c_size_t(9), None) == -1
    assert model.lib.rlx_error(model.model) == b"counter: there is no input 9"
    with pytest.raises(ValueError, match="compiled without an active dim"):
        model.run(STEP, rows=2)
    model.close()


@pytest.mark.parametrize("precision", ["bf16", "int8"])
def test_narrow_precisions_and_outputs_of_other_dtypes(precision, tmp_path):
    g = rlx.Graph('odd "name"\n?')
    x, w = g.input("x", (5, 64), rlx.f32), g.param("w", (64, 96), rlx.f32)
    y = rlx.relu(x @ w)
    g.set_outputs([y, rlx.argmax(y, axis=-1), y.astype("bf16"), x, y > 1.0], ["y", "best", "narrow", "x", "over"])
    made = Session(threads=2).compile(g, CompileOptions(precision=precision))
    made.set_param("w", np.random.default_rng(3).standard_normal((64, 96)).astype(np.float32))
    given = np.random.default_rng(4).standard_normal((5, 64)).astype(np.float32)
    model = Model(made.export_c(tmp_path))
    assert model.run({"x": given}) == [a.tobytes() for a in made.run({"x": given})]
    assert model.shapes("output") == described(made.outputs)
    model.close()


def test_an_active_dim(tmp_path):
    g = rlx.Graph("attended")
    x = g.input("x", (1, 2, "seq", 8), rlx.f32)
    g.set_outputs([rlx.attention(x, x, x)])
    made = Session(threads=1).compile(g, CompileOptions().bind_extent("seq", 16))
    given = np.random.default_rng(4).standard_normal((1, 2, 16, 8)).astype(np.float32)
    model = Model(made.export_c(tmp_path))
    for rows in (16, 5, 1, None, 0):
        made.set_active_extent((rows, 16) if rows else made._extent if rows is None else None)
        (want,) = made.run({"x": given})
        (got,) = model.run({"x": given}, rows)
        n = rows or (1 if rows is None else 16)
        assert (np.frombuffer(got, np.float32).reshape(want.shape)[:, :, :n] == want[:, :, :n]).all()
    with pytest.raises(ValueError, match="a negative number of rows: -5"):
        model.run({"x": given}, -5)
    with pytest.raises(ValueError, match="more rows than it was compiled for: 17"):
        model.run({"x": given}, 17)
    model.close()


def test_a_full_disk_leaves_no_part_of_a_library(tmp_path, monkeypatch):
    def full(source, goal, **how):
        Path(goal).touch()
        raise OSError(28, "No space left on device", str(goal))

    layers, _ = graphs()
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(OptionError, match=r"cannot write .*lib\w+.so.: No space left on device"):
        layers.export_c(tmp_path)
    assert not list(tmp_path.glob("*.so")) and not list(tmp_path.glob(".*"))


def test_models_run_at_once_on_threads_of_their_own(tmp_path):
    layers, _ = graphs()
    path, (want,) = layers.export_c(tmp_path), layers.run({"x": X})
    found: list[list[bytes]] = []

    def work() -> None:
        model = Model(path, 2)
        found.append([model.run({"x": X})[0] for _ in range(50)])
        model.close()

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert found == [[want.tobytes()] * 50] * 3


def built(library: Path, folder: Path) -> Path:
    """The example program, linked with a library."""
    program = folder / "run_model"
    command = [
        str(knobs.CC.get()), str(ROOT / "docs" / "run_model.c"), "-I", str(folder), str(library), f"-Wl,-rpath,{folder}", "-o",
        str(program),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return program


def test_the_example_program_decodes_as_python_does(tmp_path):
    """One token at a time through a language model with bf16 weights: logits, and the states after the last run."""
    pytest.importorskip("transformers")
    small_models.make("qwen3", tmp_path / "qwen3")
    model = rlx.load(tmp_path / "qwen3", capacity=32, weights="bf16")
    step = model.executable(1)
    program = built(step.export_c(tmp_path), tmp_path)
    given = {"tokens": np.array([[7]], np.int32), "count": np.array(1, np.int32)}
    for _ in range(5):
        want = step.run(given)
    raw = b"".join(given[d.name].tobytes() for d in step.inputs)
    done = subprocess.run([str(program), "5", "2"], input=raw, capture_output=True, check=True)
    states = [step.read_handle(step.program().buffers[i].name) for i in step.program().handles]
    assert done.stdout == b"".join(a.tobytes() for a in [*want, *states])
    said = done.stderr.decode()
    assert "input tokens i32[1,1] 4 bytes" in said and "state position i32[] 4 bytes" in said and "VmRSS" in said
    short = subprocess.run([str(program)], input=b"", capture_output=True, check=False)
    assert short.returncode == 1 and b"standard input ends before" in short.stderr


def test_the_library_has_no_python_in_it_and_shows_only_its_interface(tmp_path):
    layers, _ = graphs()
    path = layers.export_c(tmp_path)
    content = path.read_bytes()
    assert b"PyLong" not in content and b"libpython" not in content and b"PyEval" not in content
    lib, header = ctypes.CDLL(str(path)), (tmp_path / "rlx.h").read_text()
    from rlx.backends.cpu.export import EXPORTED

    assert len(EXPORTED) > 15 and all(hasattr(lib, name) and f"{name}(" in header for name in EXPORTED)
    assert not any(hasattr(lib, name) for name in ("executor_run", "rlx_data", layers.artifact.codes[0].symbol))  # type: ignore[attr-defined]
    check = f'#include "{tmp_path}/rlx.h"\nint main(void) {{ return 0; }}'
    for language in ("c", "c++"):
        if language == "c" or shutil.which("c++"):
            flags = ["-x", language, "-fsyntax-only", "-pedantic", "-Wall", "-Werror", "-"]
            subprocess.run([str(COMPILER), *flags], input=check.encode(), check=True)


def test_a_processor_that_lacks_an_instruction_set(tmp_path, monkeypatch):
    from rlx.backends.cpu import export

    layers, _ = graphs()
    features = [f for f in layers.program().target.features if f in export.PROBES]
    if not features:
        pytest.skip("code for this processor needs no instruction set beyond its architecture")
    monkeypatch.setitem(export.PROBES, features[-1], (1, 0, 2, 16, 0))  # a bit that no processor sets
    model = Model(layers.export_c(tmp_path))
    assert not model.model.value and model.why == f"layers needs a processor with {features[-1]}"
    model.close()
    monkeypatch.undo()
    many = Model(layers.export_c(tmp_path / "."), 100_000)
    assert not many.model.value


def test_a_loaded_artifact_can_be_exported(tmp_path):
    layers, _ = graphs()
    layers.save(tmp_path / "layers.rlx")
    model = Model(rlx.load(tmp_path / "layers.rlx").export_c(tmp_path))
    assert model.run({"x": X}) == [layers.run({"x": X})[0].tobytes()]
    model.close()


def test_experts_that_are_not_resident_are_in_the_library(tmp_path):
    compiled = rlx.Session("cpu", threads=2).compile(expert_graphs.layers(3, 64, 96, 8, 2, count=2))
    compiled.set_params(expert_graphs.data(expert_graphs.layers(3, 64, 96, 8, 2, count=2)))
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    (want,) = compiled.run({"x": x})
    compiled.set_moe_resident_experts([False] * 8)
    model = Model(compiled.export_c(tmp_path))
    assert model.run({"x": x}) == [want.tobytes()] and compiled.memory_plan().offloaded
    model.close()


def test_what_cannot_be_exported_is_said(tmp_path, monkeypatch):
    layers, _ = graphs()
    g = rlx.Graph("net")
    g.set_outputs([g.input("x", (2, 3), rlx.f32) @ g.param("w", (3, 3), rlx.f32)])
    with pytest.raises(MissingParamError, match="'w' not set; a C library holds the weights"):
        Session(threads=1).compile(g).export_c(tmp_path)
    with pytest.raises(Unsupported, match="C libraries are for programs of the CPU; this one is for REF"):
        Session("ref").compile(g).export_c(tmp_path)
    with pytest.raises(Unsupported, match="checked=True"):
        Session(threads=1).compile(g, checked=True).export_c(tmp_path)
    with pytest.raises(BindingError, match="takes a folder that exists"):
        layers.export_c(tmp_path / "nowhere")
    with knobs.override(RLX_CC="no-such-compiler"), pytest.raises(CompileError, match="no C compiler 'no-such-compiler'.*RLX_CC"):
        layers.export_c(tmp_path)
    with knobs.override(RLX_CC=sys.executable), pytest.raises(CompileError, match="cannot make liblayers.so: "):
        layers.export_c(tmp_path)
    from rlx.backends.cpu import export

    monkeypatch.setattr(export, "LARGEST", 100)
    with pytest.raises(Unsupported, match=r"has \d+ bytes of weights; a library holds 100 at most: use rlx.load"):
        layers.export_c(tmp_path)
    monkeypatch.setattr(export, "missing_features", lambda _: ("triple=riscv64-linux-gnu",))
    with pytest.raises(DeviceUnavailableError, match="is for riscv64-linux-gnu: export it on such a machine"):
        layers.export_c(tmp_path)
    assert os.listdir(tmp_path) == [] and get("cpu")


def test_products_of_other_sizes_with_the_same_functions(tmp_path):
    """A library and an artifact file have the code that the products share once, beside that of the kernels."""
    g, rng = rlx.Graph("shared"), np.random.default_rng(0)
    x, one, other = g.input("x", (24, 512), rlx.f32), g.param("one", (512, 96), rlx.f32), g.param("other", (512, 144), rlx.f32)
    g.set_outputs([rlx.relu(x @ one), rlx.relu(x @ other)])
    compiled = rlx.compile(g)
    compiled.set_params({p.name: rng.standard_normal(p.shape.static).astype(np.float32) for p in g.params})
    artifact = compiled.artifact
    products = [code for code in artifact.codes if "fmuladd" in code.text]
    assert len(products) == 2 and len(artifact.objects) - len(artifact.codes) in (2, 3)  # a tile, and what finishes its rows
    given = {"x": rng.standard_normal((24, 512)).astype(np.float32)}
    want = [out.tobytes() for out in compiled.run(given)]
    model = Model(compiled.export_c(tmp_path))
    assert model.run(given) == want
    model.close()
    compiled.save(tmp_path / "shared.rlx")
    assert [out.tobytes() for out in rlx.load(tmp_path / "shared.rlx").run(given)] == want
