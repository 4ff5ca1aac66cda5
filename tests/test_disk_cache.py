"""The cache on disk: what comes back is what was kept, or it is made again; whatever is wrong with the disk, runs go on."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx import knobs
from rlx.backends import get
from rlx.errors import CorruptFileError, IndexRangeError
from rlx.host import disk
from rlx.host.disk import DAMAGED, FRESH, HEADER, STALE, DiskCache, disk_cache
from rlx.ir.declare import op
from rlx.ir.op import Kind
from rlx.ir.ops import OWN
from rlx.ir.ops.rules import same
from rlx.runtime import CompileOptions, Session, stored
from rlx.runtime.stored import pack, unpack

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path):
    """An empty cache in a folder of its own."""
    with knobs.override(RLX_CACHE=1, RLX_CACHE_DIR=str(tmp_path / "kept")):
        disk._opened.cache_clear()
        disk._warned.clear()
        get("cpu")  # what is compiled in this process is remembered there
        from rlx.backends.cpu import backend

        backend._compiled.cache_clear()
        yield tmp_path / "kept"
    disk._opened.cache_clear()


def two_layers(width: int = 8) -> rlx.Graph:
    g = rlx.Graph("layers")
    x, w = g.input("x", (3, width), rlx.f32), g.param("w", (width, 5), rlx.f32)
    hidden = rlx.gelu(x @ w)
    g.set_outputs([rlx.softmax(hidden @ rlx.constant(np.linspace(-1, 1, 50, dtype=np.float32).reshape(5, 10)))], ["p"])
    return g


def counter() -> rlx.Graph:
    """State replaced by the commit, and state written in place, which an index out of range undoes."""
    g = rlx.Graph("counter")
    total, rows = g.handle(rlx.BufferHandle("total", (4,), rlx.f32)), g.handle(rlx.BufferHandle("rows", (6, 4), rlx.f32))
    delta, at, which = g.input("delta", (4,), rlx.f32), g.input("at", (), rlx.i64), g.input("which", (2,), rlx.i64)
    g.assign(total, total + delta)
    g.assign(rows, rlx.update_rows(rows, rlx.reshape(delta, (1, 4)), at, axis=0), in_place=True)
    g.set_outputs([total * 2.0, rlx.gather(delta, which, axis=0)], ["twice", "picked"])
    return g


def attended() -> rlx.Graph:
    g = rlx.Graph("attended")
    x = g.input("x", (1, 2, "seq", 8), rlx.f32)
    g.set_outputs([rlx.attention(x, x, x)])
    return g


def compiled(graph: rlx.Graph, threads: int = 1, **options) -> rlx.CompiledGraph:
    made = Session(threads=threads).compile(graph, CompileOptions(**options))
    rng = np.random.default_rng(5)
    for name in made.missing_params():
        decl = next(b for b in made.program().buffers if b.name == name)
        made.set_param(name, rng.standard_normal(decl.shape.static).astype(np.float32))
    return made


def note(graph: rlx.Graph, threads: int = 1, **options) -> tuple[str, str]:
    found = compiled(graph, threads, **options).report().cache
    return found.state, found.why


X = {"x": np.linspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)}


# -- what comes back -----------------------------------------------------------------------------------------------


def test_a_second_compile_comes_from_disk(folder):
    first, second = compiled(two_layers()), compiled(two_layers())
    was, now = first.report(), second.report()
    assert (was.cache.state, was.cache.why) == ("compiled", FRESH) and now.cache.state == "cached"
    assert was.cache.key == now.cache.key and Path(now.cache.path).parent == folder and Path(now.cache.path).is_file()
    assert set(now.seconds) == {"look up", "load"} or set(now.seconds) == {"look up"}
    assert "cache: cached" in str(now) and f"cache: compiled ({FRESH})" in str(was)
    assert str(first.program()) == str(second.program()) and first.memory_plan() == second.memory_plan()
    assert dict(was.texts) == dict(now.texts) and was.nodes == now.nodes and (was.kernels, was.steps) == (now.kernels, now.steps)
    assert was.work == now.work and now.work.flops > 300 and str(was.work) == str(now.work)
    np.testing.assert_array_equal(first.run(X)[0], second.run(X)[0])
    second.set_param("w", np.zeros((8, 5), np.float32))  # constants and prepared weights are there
    np.testing.assert_allclose(second.run(X)[0], second.run(X)[0][:1].repeat(3, 0))


def test_states_errors_and_undoing_are_the_same_from_disk(folder):
    before, after = compiled(counter()), compiled(counter())
    assert after.report().cache.state == "cached" and after.program().abort
    good = {"delta": np.arange(4, dtype=np.float32), "at": np.array(2), "which": np.array([0, 3])}
    for exe in (before, after):
        exe.run(good)
        exe.run({**good, "at": np.array(4)})
        with pytest.raises(IndexRangeError, match="counter: index out of range in .*nothing was committed"):
            exe.run({**good, "at": np.array(0), "which": np.array([0, 9])})
    for name in ("total", "rows"):
        np.testing.assert_array_equal(before.read_handle(name), after.read_handle(name))
    assert after.read_handle("total").tolist() == [0, 2, 4, 6] and after.read_handle("rows")[:, 3].tolist() == [0, 0, 3, 0, 3, 0]


def test_an_extent_from_disk(folder):
    options = {"extent": ("seq", 16)}
    x = np.random.default_rng(1).standard_normal((1, 2, 16, 8)).astype(np.float32)
    before, after = (compiled(attended(), **options) for _ in range(2))
    assert after.report().cache.state == "cached"
    for exe in (before, after):
        exe.set_active_extent((5, 16))
    np.testing.assert_array_equal(before.run({"x": x})[0][:, :, :5], after.run({"x": x})[0][:, :, :5])


def test_checked_mode_and_threads_from_disk(folder):
    for _ in range(2):
        exe = compiled(two_layers(), threads=2, checked=True)
        with pytest.raises(rlx.errors.NumericsError, match="output 'p' has 30 NaN"):
            exe.run({"x": np.full((3, 8), np.nan, np.float32)})
    assert exe.report().cache.state == "cached" and exe.program().target.threads == 2


# -- keys and reasons ----------------------------------------------------------------------------------------------


def test_what_gives_another_key_and_how_a_miss_is_explained(folder, monkeypatch):
    assert note(two_layers()) == ("compiled", FRESH)
    assert note(two_layers()) == ("cached", "")
    assert note(two_layers(16)) == ("compiled", FRESH)
    assert note(two_layers(), threads=2) == ("compiled", "target threads differs: 1 -> 2")
    assert note(two_layers(), precision="bf16") == ("compiled", "option precision differs: 'f32' -> 'bf16'")
    assert note(two_layers(), disable=["fuse"]) == ("compiled", "option disable differs: () -> ('fuse',)")
    from rlx.host import llvm, processor

    here = processor.host_features()
    monkeypatch.setattr(processor, "host_features", lambda: here[:-1])
    state, why = note(two_layers())
    assert state == "compiled" and why.startswith("target features differs: ('triple=")
    monkeypatch.setattr(processor, "host_features", lambda: here)
    monkeypatch.setattr(llvm, "compiler_version", lambda: "llvmlite-99")
    assert note(two_layers()) == ("compiled", "compiler differs: llvmlite-0.50.0 -> llvmlite-99".replace("llvmlite-0.50.0", REAL))
    assert note(two_layers(), debug=True) == ("cached", "")  # changes no code


REAL = rlx.backends.get("cpu").compiler()  # type: ignore[attr-defined]


def test_two_versions_side_by_side(folder, monkeypatch):
    for expected in ("compiled", "cached"):
        for version in ("old", "new"):
            monkeypatch.setattr(stored, "source_digest", lambda version=version: version)
            assert note(two_layers())[0] == expected
    assert len({e.name for e in DiskCache(str(folder), 1).entries() if e.name.startswith("program")}) == 2


@pytest.fixture
def declare():
    """Declares ops as a user does, and takes them out of the table again."""
    yield lambda name, scale: op(
        name, kind=Kind.COMPOSITE, infer=same, reference=lambda attrs, x: x * scale, decompose=lambda attrs, x: x * scale
    )
    for name in [name for name, declared in rlx.OPS.items() if declared not in OWN]:
        del rlx.OPS[name]


def test_what_is_declared_elsewhere_may_change_and_is_not_kept(folder, declare):
    """Not by its source either: the value that it closes over does not stand there."""
    for scale in (2.0, 3.0):
        g = rlx.Graph("theirs")
        g.set_outputs([declare("scaled_by", scale)(g.input("x", (4,), rlx.f32))])
        made = compiled(g)
        np.testing.assert_array_equal(made.run({"x": np.ones(4, np.float32)})[0], np.full(4, scale, np.float32))
        found = made.report().cache
        assert (found.state, found.path) == ("off", "") and "'scaled_by' is declared outside" in found.why
        del rlx.OPS["scaled_by"]
    assert [e for e in disk_cache()[0].entries() if e.name.startswith("program")] == []
    declare("unused", 4.0)  # says nothing about graphs without it
    assert note(two_layers()) == ("compiled", FRESH) and note(two_layers()) == ("cached", "")


@pytest.mark.parametrize("device", ["cpu", "ref"])
def test_every_kernel_has_a_text_though_names_repeat(folder, device):
    g = rlx.Graph("twice")
    x = g.input("x", (3, 40), rlx.f32)
    g.set_outputs([rlx.cumsum(x, axis=1), rlx.cumsum(x, axis=0), rlx.cumsum(x, axis=1)])
    for state in ("compiled", "cached"):
        report = Session(device).compile(g, rlx.CompileOptions(disable=["canonicalise"])).report()
        assert report.cache.state == state or device == "ref"
        assert list(report.texts) == ["cumsum", "cumsum@2"] and report.texts["cumsum"] != report.texts["cumsum@2"]
        assert "2 different kernels" in str(report)


def test_an_op_in_place_of_one_of_the_packages_is_not_kept(folder, monkeypatch):
    assert note(two_layers()) == ("compiled", FRESH)
    monkeypatch.setitem(rlx.OPS, "gelu", replace(rlx.OPS["gelu"], decompose=lambda attrs, x: x * 2.0))
    g = rlx.Graph("layers")
    g.set_outputs([g.gelu(g.input("x", (3, 8), rlx.f32))])
    state, why = note(g)
    assert state == "off" and why.startswith("'gelu' is declared outside")


def test_when_nothing_is_kept(folder, tmp_path):
    assert Session("ref").compile(two_layers()).report().cache.why == "the device ref generates no code to store"
    assert Session("null").compile(two_layers()).report().cache.state == "off"
    verbose = Session().compile(two_layers(), CompileOptions(dump=tmp_path / "dump"))
    assert verbose.report().stages and verbose.report().cache.state == "off"
    with knobs.override(RLX_CACHE=0):
        assert note(two_layers()) == ("off", "RLX_CACHE=0")
    assert [e for e in disk_cache()[0].entries() if e.name.startswith("program")] == []
    with knobs.override(RLX_CACHE_MB=0):
        assert note(two_layers()) == note(two_layers()) == ("compiled", FRESH)


def test_a_start_from_disk_loads_neither_the_compiler_nor_what_writes_code(folder):
    script = (
        "import sys, numpy as np, rlx\nfrom tests.test_disk_cache import *\n"
        "from rlx.host import llvm; llvm._functions.clear()\n"
        "exe = compiled(two_layers(), threads=2); exe.run(X)\n"
        "writers = {m.rpartition('.')[2] for m in sys.modules} & {'emit', 'executor', 'call_code', 'render'}\n"
        "print(exe.report().cache.state, llvm.loaded(), len(writers))"
    )
    env = {**os.environ, "RLX_CACHE": "1", "RLX_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    run = {"env": env, "capture_output": True, "text": True, "check": True}
    said = [subprocess.run([sys.executable, "-c", script], **run).stdout for _ in range(2)]
    assert said == ["compiled True 4\n", "cached False 0\n"]


# -- damage --------------------------------------------------------------------------------------------------------


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """Bits flipped, bytes overwritten, cut, added or moved."""
    out, at = bytearray(raw), rng.randrange(len(raw))
    kind = rng.randrange(6)
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        out[at : at + rng.randrange(1, 64)] = rng.randbytes(rng.randrange(1, 64))
    elif kind == 2:
        del out[at:]
    elif kind == 3:
        out += rng.randbytes(rng.randrange(1, 100))
    elif kind == 4:
        out[at : at + 16] = bytes(16)
    else:
        out = out[at:] + out[:at]
    return bytes(out)


def test_a_thousand_damaged_entries_are_refused(folder):
    rng = random.Random(1)
    compiled(two_layers())
    cache = disk_cache()[0]
    names = [e.name for e in cache.entries()]
    contents = {name: Path(cache.path(name)).read_bytes() for name in names}
    assert any(n.startswith("program") for n in names) and any(n.startswith("object") for n in names)
    refused = 0
    for _ in range(1000):
        name = rng.choice(names)
        changed = damaged(contents[name], rng)
        Path(cache.path(name)).write_bytes(changed)
        content, why = cache.get(name)
        assert content == contents[name][HEADER.size :] if changed == contents[name] else (content, why) == (None, DAMAGED)
        refused += content is None
        Path(cache.path(name)).write_bytes(contents[name])
    assert refused > 900
    Path(cache.path(names[0])).write_bytes(contents[names[-1]])  # whole, but another's
    assert cache.get(names[0]) == (None, DAMAGED)


def test_a_damaged_entry_is_made_again(folder):
    want = compiled(two_layers()).run(X)[0]
    entry = Path(compiled(two_layers()).report().cache.path)
    whole, rng = entry.read_bytes(), random.Random(2)
    changes = (x for x in iter(lambda: damaged(whole, rng), None) if x != whole)  # some damage puts back what was there
    for changed in islice(changes, 12):
        entry.write_bytes(changed)
        made = compiled(two_layers())
        assert (made.report().cache.state, made.report().cache.why) == ("compiled", DAMAGED)
        np.testing.assert_array_equal(made.run(X)[0], want)
        assert note(two_layers()) == ("cached", "")


def test_what_a_sound_entry_says_is_checked_too(folder):
    """Checksums are those of the damaged content: nothing but the checks of what is said stands between it and memory."""
    cpu, artifact = get("cpu"), compiled(counter())._executable._code.artifact
    parts = pack(artifact, cpu, {"a": "b"})
    content, rng = b"".join(parts), random.Random(3)
    assert unpack(content, cpu, artifact.program.target)[0] == {"a": "b"}
    refused = 0
    for _ in range(1000):
        head = damaged(parts[1], rng)
        changed = len(head).to_bytes(4, "little") + head + b"".join(parts[2:])
        try:
            _, again, *_ = unpack(changed, cpu, artifact.program.target)
        except CorruptFileError:
            refused += 1
        else:
            assert again.program.name is not None and len(again.objects) == len(artifact.objects)
    assert refused > 700
    for wrong in (b"", b"\xff\xff\xff\xff", content[:-1], content + b"x", b"\x02\0\0\0{}", b"\x02\0\0\0[]", b"[" * 100_000):
        with pytest.raises(CorruptFileError):
            unpack(wrong, cpu, artifact.program.target)


@pytest.mark.parametrize(
    ("find", "put"),
    [
        (b'"offsets":[[0,', b'"offsets":[[0,99999999'),  # outside the arena
        (b'"prepare":[', b'"prepare":[[0,[0]],'),  # too few arguments
        (b'"inputs":[0', b'"inputs":[-1'),
        (b'"coded":{"prepare":[', b'"coded":{"prepare":[0,'),
        (b'"saved":[', b'"saved":[99'),
        (b'"buffers":[["input",["f32",4]', b'"buffers":[["input",["f32",4000]'),
        (b'"buffers":[["input",["f32",4]', b'"buffers":[["input",["f32",4000000000000000000]'),
    ],
)
def test_numbers_that_do_not_fit_together(folder, find, put):
    cpu, artifact = get("cpu"), compiled(counter())._executable._code.artifact
    parts = pack(artifact, cpu, {})
    assert find in parts[1], parts[1][:3000]
    head = parts[1].replace(find, put, 1)
    with pytest.raises(CorruptFileError):
        unpack(len(head).to_bytes(4, "little") + head + b"".join(parts[2:]), cpu, artifact.program.target)


# -- the folder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("own", "xdg", "home", "where"),
    [("/own", "/x", "/h", "/own"), ("", "/x", "/h", "/x/rlx"), ("", "", "/h", "/h/.cache/rlx"), ("", "x", "/h", "/h/.cache/rlx")],
)
def test_where_it_is(monkeypatch, own, xdg, home, where):
    for name, value in (("RLX_CACHE_DIR", own), ("XDG_CACHE_HOME", xdg), ("HOME", home)):
        monkeypatch.setenv(name, value)
    assert knobs.cache_folder() == where
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert knobs.cache_folder() == ("" if "h/" in where else where)


def test_files_are_this_users_alone(folder):
    compiled(two_layers())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in folder.iterdir()} == {0o600}


def test_what_others_could_have_written_is_not_read(folder, monkeypatch):
    cache = disk_cache()[0]
    cache.put("program-ab", [b"x"])
    assert cache.get("program-ab") == (b"x", "")
    os.chmod(cache.path("program-ab"), 0o666)
    assert cache.get("program-ab")[0] is None and "can be written by other users" in cache.get("program-ab")[1]
    os.chmod(cache.path("program-ab"), 0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "belongs to user" in cache.get("program-ab")[1]
    monkeypatch.undo()
    (folder / "program-cd").symlink_to(folder / "program-ab")
    os.mkfifo(folder / "program-ef")
    (folder / "program-aa").mkdir()
    for name in ("cd", "ef", "aa"):
        assert cache.get(f"program-{name}")[0] is None


@pytest.mark.parametrize("what", ["open to all", "another user's", "no folder"])
def test_a_folder_that_cannot_be_used_is_said_once(folder, monkeypatch, what):
    folder.mkdir(mode=0o777)
    path = folder
    if what == "open to all":
        folder.chmod(0o777)
    elif what == "another user's":
        real = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: real + 1)
    else:
        path = folder / "file" / "inner"
        (folder / "file").touch()
    with knobs.override(RLX_CACHE_DIR=str(path)):
        with pytest.warns(RuntimeWarning, match="compiled code is not kept: the folder .*RLX_CACHE_DIR") as said:
            first = note(two_layers())
        assert len(said) == 1 and first == note(two_layers()) and first[0] == "off" and "the folder" in first[1]


def test_a_full_disk_is_said_once_and_leaves_nothing(folder, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "rename", full)
    with pytest.warns(RuntimeWarning, match="not kept: .*No space left") as said:
        assert note(two_layers())[0] == "compiled"
        assert note(two_layers())[0] == "compiled"
    assert len(said) == 1 and [p for p in folder.iterdir() if not p.name.startswith("object-")] == []


def test_a_folder_that_may_only_be_read_or_not_be_listed_is_used(folder, monkeypatch):
    def refused(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")

    assert note(two_layers())[0] == "compiled"
    monkeypatch.setattr(os, "utime", refused)
    assert note(two_layers())[0] == "cached"
    monkeypatch.setattr(os, "scandir", refused)
    assert note(two_layers(16)) == ("compiled", FRESH)


def test_the_least_recently_used_go_first(folder):
    cache = DiskCache(str(folder), 1000)
    folder.mkdir(mode=0o700)
    for i in range(8):
        cache.put(f"object-{i}0", [bytes(100 - HEADER.size)])
        os.utime(cache.path(f"object-{i}0"), (i, i))
    assert cache.get("object-00")[0] is not None  # now the one used last
    cache.put("program-aa", [bytes(500 - HEADER.size)])
    kept = [e.name for e in cache.entries()]
    assert kept[0] == "object-40" and {"object-00", "program-aa"} <= set(kept) and len(kept) == 6
    assert sum(e.nbytes for e in cache.entries()) <= 1000
    cache.put("program-bb", [bytes(2000)])  # larger than all of it
    assert [e.name for e in cache.entries()] == kept
    assert cache.clear() == 6 and cache.entries() == []


def test_files_left_half_written_go(folder):
    cache = disk_cache()[0]
    for name, age in (("writing.1", 0), ("writing.2", STALE + 9)):
        (folder / name).write_bytes(b"half")
        os.utime(folder / name, (time.time() - age,) * 2)
    (folder / "someone's file").touch()
    cache.put("object-ab", [b"x"])
    assert sorted(p.name for p in folder.iterdir()) == ["object-ab", "someone's file", "writing.1"]
    assert cache.clear() == 1 and [p.name for p in folder.iterdir()] == ["someone's file"]


# -- several at once -----------------------------------------------------------------------------------------------

WORKER = """
import os, sys, itertools
import numpy as np, rlx
from tests.test_disk_cache import two_layers, compiled
from rlx.host.disk import disk_cache
for child in range(8):
    if os.fork() == 0:
        for turn in itertools.count() if child < 4 else range(6):  # the first four end by a signal only
            width = 4 + (turn + child) % 3 if child % 2 else 8
            exe = compiled(two_layers(width))
            got = exe.run({"x": np.ones((3, width), np.float32)})[0]
            assert got.shape == (3, 10) and abs(got.sum() - 3) < 1e-4
            disk_cache()[0].put(f"object-{turn % 7:02x}", [bytes([turn % 7]) * 200_000])
            os.write(1, f"{os.getpid()} {exe.report().cache.why}\\n".encode())
        os._exit(0)
codes = [os.waitpid(-1, 0)[1] for _ in range(8)]
os.write(1, f"codes {sorted(codes)}\\n".encode())
"""


def test_eight_processes_and_four_killed(folder):
    env = {**os.environ, "RLX_CACHE": "1", "RLX_CACHE_DIR": str(folder), "PYTHONPATH": str(ROOT)}
    job = subprocess.Popen([sys.executable, "-c", WORKER], env=env, stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    counts: dict[int, int] = {}
    killed, rng, lines = [], random.Random(4), []
    for line in job.stdout:
        if line.startswith("codes"):
            break
        pid = int(line.split()[0])
        lines.append(line)
        counts[pid] = counts.get(pid, 0) + 1
        if counts[pid] > 6 + rng.randrange(9) and pid not in killed:  # only the four go on for so long
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    job.stdout.close()
    assert job.wait() == 0 and line == f"codes {[0] * 4 + [int(signal.SIGKILL)] * 4}\n", lines
    assert not any(DAMAGED in said for said in lines)
    cache = disk_cache()[0]
    entries = cache.entries()
    assert len([e for e in entries if e.name.startswith("program")]) == 4 and len(entries) > 12
    assert [(e, why) for e in entries if (why := cache.get(e.name)[1])] == []
    for left in folder.glob("writing.*"):
        os.utime(left, (1, 1))
    cache.put("object-ff", [b""])
    assert not list(folder.glob("writing.*"))


def test_reading_while_others_evict_and_replace(folder):
    """Every read gives the whole entry or none."""
    folder.mkdir(mode=0o700)
    writer = (
        "import sys; from rlx.host.disk import DiskCache\n"
        "cache = DiskCache(sys.argv[1], 2_000_000)\n"
        "for n in range(400): cache.put(f'object-{n % 40:02x}', [bytes([n % 40]) * 100_000])\n"
    )
    job = subprocess.Popen([sys.executable, "-c", writer, str(folder)], env={**os.environ, "PYTHONPATH": str(ROOT)})
    cache, found, gone = DiskCache(str(folder), 2_000_000), 0, 0
    while job.poll() is None:
        for n in range(40):
            content, why = cache.get(f"object-{n:02x}")
            assert content == bytes([n]) * 100_000 if content is not None else why == FRESH
            found, gone = found + (content is not None), gone + (content is None)
    assert job.returncode == 0 and found and gone
    assert sum(e.nbytes for e in cache.entries()) < 2_000_000 * 1.2
