"""Params from mapped files: read, not touched through the mapping; set at once in threads, with the bits of one by one."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import rlx
from rlx.driver import files
from rlx.errors import CorruptFileError, InputShapeError, RlxError, UnknownNameError
from rlx.frontends.weights import read_file

F = np.float32
WIDE = 640  # square matrices of 1.6 MB: together enough for threads


def graph() -> rlx.Graph:
    """Params of every kind: read by runs, packed alone, packed together, and prepared from two others."""
    g = rlx.Graph("params")
    ids, x = g.input("ids", (3,), "i32"), g.input("x", (3, WIDE), "f32")
    table, shift = g.param("table", (50, WIDE), "f32"), g.param("shift", (50, WIDE), "f32")
    q, k, alone = (g.param(n, (WIDE, WIDE), "f32") for n in ("q", "k", "alone"))
    both = rlx.concat(q, k, axis=0)
    y = x @ both.T
    g.set_outputs([rlx.embedding(table, ids) + y[:, :WIDE] * y[:, WIDE:], (x @ alone) * (table + shift)[:3]])
    return g


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    sizes = {"table": 50, "shift": 50, "q": WIDE, "k": WIDE, "alone": WIDE}
    return {name: rng.standard_normal((rows, WIDE)).astype(F) for name, rows in sizes.items()}


@pytest.fixture
def path(tmp_path, arrays):
    save_file(arrays, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def outputs(compiled) -> list[bytes]:
    x = np.random.default_rng(1).standard_normal((3, WIDE)).astype(F)
    return [o.tobytes() for o in compiled.run({"ids": np.array([4, 0, 49], np.int32), "x": x})]


def one_by_one(arrays, device="cpu") -> list[bytes]:
    compiled = rlx.Session(device).compile(graph())
    for name, array in arrays.items():
        compiled.set_param(name, array)
    return outputs(compiled)


@pytest.mark.parametrize("device, threads", [("cpu", 1), ("cpu", 2), ("cpu", 5), ("ref", 2)])
def test_all_at_once_from_a_file_is_as_one_by_one_from_memory(device, threads, path, arrays):
    want = one_by_one(arrays, device)
    compiled = rlx.Session(device, threads=threads).compile(graph())
    compiled.set_params(read_file(path))
    assert compiled.missing_params() == [] and outputs(compiled) == want
    compiled.set_params({name: np.zeros_like(a) for name, a in arrays.items()})
    assert outputs(compiled) != want
    mapped = read_file(path)
    for name in mapped:  # each reaches all that is made of it
        compiled.set_param(name, mapped[name])
    assert outputs(compiled) == want


@pytest.mark.parametrize("names", [("q",), ("shift", "alone"), ("table", "k")])
def test_some_are_set_again_and_the_rest_stays(names, path, arrays):
    compiled = rlx.Session(threads=2).compile(graph())
    compiled.set_params(read_file(path))
    new = {name: arrays[name][::-1] for name in names}  # rows backwards: not as they lie in memory
    compiled.set_params(new)
    assert outputs(compiled) == one_by_one({**arrays, **new})


def test_what_is_wrong_changes_nothing(path, arrays):
    compiled = rlx.Session(threads=2).compile(graph())
    compiled.set_params(arrays)
    want = outputs(compiled)
    with pytest.raises(UnknownNameError, match="no param is called 'z'"):
        compiled.set_params({"q": arrays["k"], "z": arrays["q"]})
    with pytest.raises(InputShapeError, match="param 'k'"):
        compiled.set_params({"q": arrays["k"], "k": arrays["k"][:3]})
    with pytest.raises(RlxError, match="set_params takes"):
        compiled.set_params([("q", arrays["k"])])
    assert outputs(compiled) == want


def test_a_file_cut_off_while_it_is_mapped(path, arrays):
    compiled = rlx.Session(threads=2).compile(graph())
    compiled.set_params(arrays)
    want, mapped = outputs(compiled), read_file(path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])  # the same file, shorter: touching its end is SIGBUS
    with pytest.raises(CorruptFileError, match="truncated after it was opened"):
        compiled.set_params(mapped)
    cut = next(name for name in reversed(mapped))
    with pytest.raises(CorruptFileError, match="model.safetensors"):
        compiled.set_param(cut, mapped[cut])
    assert compiled.missing_params() == [] and outputs(compiled) == want


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("small", [files.SMALL, 100_000])
def test_a_file_cut_off_under_a_view(early, small, path, arrays, monkeypatch):
    """Of any size: a view is copied, so no byte of the mapping need be touched. Before it is looked at, or after that."""
    compiled = rlx.Session(threads=2).compile(graph())
    compiled.set_params(arrays)
    want, mapped = outputs(compiled), read_file(path)
    monkeypatch.setattr(files, "SMALL", small)
    os.truncate(path, 5000)
    if not early:
        monkeypatch.setattr(files, "check", lambda array: None)
    for view in (mapped["q"].T, mapped["q"][::-1], mapped["q"].reshape(-1)[::-1].reshape(WIDE, WIDE)):
        with pytest.raises(CorruptFileError, match="model.safetensors"):
            compiled.set_param("q", view)
    assert compiled.missing_params() == [] and outputs(compiled) == want


@pytest.mark.parametrize("threads", [1, 2])
def test_a_file_cut_off_while_it_is_read(threads, path, arrays, monkeypatch):
    compiled = rlx.Session(threads=threads).compile(graph())
    compiled.set_params(arrays)
    want, mapped = outputs(compiled), read_file(path)
    os.truncate(path, path.stat().st_size // 2)
    with monkeypatch.context() as m:
        m.setattr(files, "check", lambda array: None)  # it was whole when looked at
        with pytest.raises(CorruptFileError):
            compiled.set_params(mapped)
    missing = compiled.missing_params()
    assert missing
    with pytest.raises(RlxError, match="not set"):
        outputs(compiled)
    compiled.set_params({name: arrays[name] for name in missing})
    assert outputs(compiled) == want


def resident(path) -> int:
    """Bytes of a file's mappings that are in this process's memory."""
    blocks = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.M)
    ours = [block for block in blocks if str(path) in block]
    assert ours
    return sum(int(re.findall(r"^Rss: +(\d+) kB", block, re.M)[0]) for block in ours) << 10


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="the system does not say")
def test_no_page_of_the_file_becomes_resident_and_it_is_closed(path):
    compiled = rlx.Session(threads=2).compile(graph())
    mapped = read_file(path)
    compiled.set_params(mapped)
    assert resident(path) == 0
    mapped["q"].sum()
    assert resident(path) >= mapped["q"].nbytes
    del mapped
    gc.collect()
    opened = [p.resolve() for p in Path("/proc/self/fd").iterdir()]
    assert path not in opened and str(path) not in Path("/proc/self/maps").read_text()


VIEWS = {
    "all": lambda a: a, "rows": lambda a: a[3:7], "every other": lambda a: a[::2], "column": lambda a: a[:, 1],
    "none": lambda a: a[0:0], "turned": lambda a: a.T, "backwards": lambda a: a[::-1, 5:1:-2], "one": lambda a: a[2, 3, ...],
    "blocks": lambda a: a.reshape(50, 20, 32).transpose(2, 0, 1),
    "repeated": lambda a: np.broadcast_to(a[:, None, 7:9], (50, 3, 2)),
}  # fmt: skip


def test_copies_of_views_and_parts(path, arrays, monkeypatch):
    mapped = read_file(path)
    for small in (files.SMALL, 10_000, 16):
        monkeypatch.setattr(files, "SMALL", small)
        for name, view in VIEWS.items():
            source = view(mapped["shift"])
            goal = np.full(source.shape, np.nan, F)
            files.copy(goal, source)
            np.testing.assert_array_equal(goal, view(arrays["shift"]), name)
            np.testing.assert_array_equal(files.in_memory(source), goal)
            goal = np.full((*source.shape, 2), np.nan, F)[..., 0]  # that does not lie row after row either
            files.copy(goal, source)
            np.testing.assert_array_equal(goal, view(arrays["shift"]), name)
    monkeypatch.undo()
    np.testing.assert_array_equal(files.in_memory(mapped["k"]), arrays["k"])
    monkeypatch.setattr(files, "SMALL", arrays["k"].nbytes - 1)
    assert files.in_memory(mapped["k"]) is mapped["k"]
    assert files.in_memory(arrays["k"]) is arrays["k"]
