"""Verification of what is compiled: sound programs pass, each kind of fault that is put in is found and named; `rlx verify`."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import small_models

import rlx
from rlx.cli.main import run
from rlx.compiler import assemble, check
from rlx.errors import PlanError
from rlx.ir.op import OPS
from rlx.runtime import Session
from rlx.runtime.verifying import Verified, verify

X = np.random.default_rng(0).standard_normal((6, 40)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((40, 40)).astype(np.float32)


def network(dtype: rlx.DType = rlx.f32) -> rlx.Graph:
    """Products, rows, an integer result and a state; each product is a kernel of its own."""
    g = rlx.Graph("net")
    x, w = g.input("x", (6, 40), rlx.f32), g.param("w", (40, 40), dtype)
    total = g.handle(rlx.BufferHandle("total", (6, 40), rlx.f32))
    first = rlx.tanh(x.astype(dtype) @ w, name="first").astype("f32")
    second = rlx.softmax(first.astype(dtype) @ w, name="second").astype("f32")
    g.assign(total, total + second)
    g.set_outputs([second @ first.T, rlx.argmax(second, axis=1), total])
    return g


def checked(graph: rlx.Graph, device: str = "cpu", **options) -> Verified:
    weight = W.astype(graph.params[0].dtype.numpy)
    session, given = Session(device, threads=2), rlx.CompileOptions(**options)
    return verify(graph, lambda name: weight, {"x": X}, session=session, options=given, states={"total": X})


@pytest.mark.parametrize("device", ["cpu", "ref"])
@pytest.mark.parametrize("dtype", [rlx.f32, rlx.bf16, rlx.f16], ids=str)
def test_sound_programs_pass(device, dtype):
    found = checked(network(dtype), device)
    assert found.difference is None and found.values >= 5 and 0 < found.worst < 0.6, found


@pytest.fixture
def wrong(monkeypatch):
    """Makes the kernels of an op wrong by a factor."""
    changed = []

    def change(name: str, factor: float) -> None:
        op, scalar = OPS[name], OPS[name].scalar
        changed.append((op, scalar))
        object.__setattr__(op, "scalar", lambda k, *args: k.mul(scalar(k, *args), rlx.ir.kernel.const(factor, rlx.f32)))

    yield change
    for op, scalar in changed:
        object.__setattr__(op, "scalar", scalar)


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_a_wrong_kernel_is_found_and_named(wrong, device):
    g = network()
    wrong("tanh", 1.0003)
    found = checked(g, device)
    assert found.difference is not None
    text, line = str(found.difference), network.__code__.co_firstlineno + 5
    assert text.startswith("'first' = tanh at ") and f"test_verifying.py:{line} in " in text
    assert "the reference says" in text and found.difference.kernel and found.difference.share > 0.5
    assert found.values < checked(g, device, disable=("fuse",)).nodes  # nothing after it was compared


def test_one_wrong_element_is_found(monkeypatch):
    g = network()
    compiled = Session.compile

    def spoiled(session, *args, **how):
        made = compiled(session, *args, **how)
        run_once = made.run

        def run_and_spoil(inputs):
            out = run_once(inputs)
            view = made._executable.view(made.program().outputs[0].buffer)
            view.reshape(-1)[7] *= np.float32(1.001)
            return out

        object.__setattr__(made, "run", run_and_spoil)
        return made

    monkeypatch.setattr(Session, "compile", spoiled)
    found = checked(g)
    assert found.difference and found.difference.index == (1, 1) and "matmul" in found.difference.what


def plan_of_one_place(monkeypatch) -> None:
    """Every intermediate buffer at the same place, if memory may be shared."""
    plan = assemble.plan_arena

    def wrong(buffers, *args, reuse=True, **how):
        made = plan(buffers, *args, reuse=reuse, **how)
        inner = [b.id for b in buffers if b.region.value == "arena"]
        first = made.offsets[inner[0]]
        return dataclasses.replace(made, offsets={**made.offsets, **dict.fromkeys(inner, first)}) if reuse else made

    monkeypatch.setattr(assemble, "plan_arena", wrong)
    monkeypatch.setattr(assemble, "check_program", lambda program, nested: None)  # that of the compile


def test_a_wrong_memory_plan_is_found_by_the_checker(monkeypatch):
    plan_of_one_place(monkeypatch)
    with pytest.raises(PlanError, match="bad plan"):
        checked(network(), disable=("fuse",))


def test_a_wrong_memory_plan_is_found_by_its_bits(monkeypatch):
    plan_of_one_place(monkeypatch)
    monkeypatch.setattr(check, "check_program", lambda program: None)
    found = checked(network(), disable=("fuse",))
    assert found.difference and "shared memory (a wrong memory plan)" in str(found.difference)


def test_a_state_that_is_not_what_was_assigned_is_found(monkeypatch):
    from rlx.runtime import CompiledGraph

    read = CompiledGraph.read_handle

    def spoiled(compiled, name):
        array = read(compiled, name)
        array[2, 3] += np.float32(1e-6)
        return array

    g = rlx.Graph("counter")
    x, total = g.input("x", (6, 40), rlx.f32), g.handle(rlx.BufferHandle("total", (6, 40), rlx.f32))
    g.param("w", (40, 40), rlx.f32)
    after = rlx.tanh(total + x, name="after")
    g.assign(total, after)
    g.set_outputs([after])
    assert checked(g).difference is None
    monkeypatch.setattr(CompiledGraph, "read_handle", spoiled)
    found = checked(g).difference
    assert found is not None and found.what.startswith("'after' = tanh") and found.index == (2, 3)


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in ("gemma2", "qwen3"):
        small_models.make(name, folder / name)
    packed = small_models.make("llama", folder / "wide", hidden_size=256, intermediate_size=256, head_dim=64)
    small_models.write_gguf(packed, "llama", folder / "packed.gguf", {"": "Q4_K"})
    return folder


def exit_code(*args: str) -> int:
    try:
        run(["verify", *args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("name", ["gemma2", "packed.gguf", "encoder"])
def test_models_are_verified(models, name, capsys):
    path = rlx.models.default_folder() if name == "encoder" else models / name
    assert exit_code(str(path), "--length", "9", "--threads", "1") == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == (1 if name == "encoder" else 2)  # a chunk, and a step of decoding
    assert all("the memory plan is sound" in line and "of its tolerance" in line for line in lines)


def test_a_text_instead_of_random_tokens(tmp_path, capsys):
    small_models.talker(tmp_path)
    assert exit_code(str(tmp_path), "--text", "Hello world") == 0
    assert "qwen3_1x11 on CPU" in capsys.readouterr().out  # a token for each byte
    assert exit_code(str(rlx.models.default_folder()), "--text", "Hello world") == 0
    assert "bert_2x4 on CPU" in capsys.readouterr().out
    assert exit_code(str(tmp_path), "--text", "") == 1 and "--text '' has no tokens" in capsys.readouterr().err


def test_a_wrong_model_ends_with_code_1(models, wrong, capsys):
    wrong("exp", 1.01)
    assert exit_code(str(models / "qwen3")) == 1
    shown = capsys.readouterr()
    assert shown.out == "" and "decoder.py:" in shown.err and shown.err.count("\n") == 1


def test_in_a_process_of_its_own(models):
    command = [sys.executable, "-m", "rlx", "verify", str(models / "qwen3"), "--length", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    assert done.returncode == 0 and done.stderr == "" and done.stdout.count("sound") == 2, done


def test_artifact_files(tmp_path, capsys):
    compiled = rlx.compile(network())
    compiled.set_param("w", W)
    compiled.save(tmp_path / "net.rlx")
    assert exit_code(str(tmp_path / "net.rlx")) == 0
    assert "all checksums are right; 1 memory plan" in capsys.readouterr().out
    raw = bytearray((tmp_path / "net.rlx").read_bytes())
    raw[raw.index(W.tobytes()[:64]) if W.tobytes()[:64] in raw else -200] ^= 1
    (tmp_path / "net.rlx").write_bytes(raw)
    assert exit_code(str(tmp_path / "net.rlx")) == 1 and "checksum" in capsys.readouterr().err


@pytest.mark.parametrize(
    "args, code, said",
    [
        (["no-such-model"], 1, "no-such-model"), (["EMPTY"], 1, "has no config.json"), (["qwen3", "--length", "255"], 1, "255"),
        (["qwen3", "--length", "0"], 2, "length"), ([], 2, "MODEL"),
    ],
)  # fmt: skip
def test_errors(models, tmp_path, capsys, args, code, said):
    names = {"EMPTY": tmp_path, "qwen3": models / "qwen3"}
    assert exit_code(*(str(names.get(a, a)) for a in args)) == code
    assert said in " ".join(capsys.readouterr().err.split())
