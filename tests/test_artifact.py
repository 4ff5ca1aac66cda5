"""Artifacts: a loaded graph gives the same bits, without the compiler; a wrong file is refused with its reason."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.host import container
from rlx.runtime import BucketedCompileCache, CompileOptions, Session
from rlx.runtime.artifact import ArtifactFile
from tests.artifact_mutations import closed, damaged, flows, graphs, hostile, opened, outcome, rewritten

from rlx.errors import (  # isort: skip
    BindingError, CorruptFileError, DeviceUnavailableError, DuplicateNameError, FormatError, InputShapeError, MissingParamError,
    ModelError, OptionError, OutOfMemoryError, UnknownNameError, UntrustedFileError, Unsupported,
)  # fmt: skip

ROOT = Path(__file__).parent.parent
X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)
STEP = {"delta": np.arange(4, dtype=np.float32), "at": np.array(2), "which": np.array([3, 1])}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Path, list[rlx.CompiledGraph]]:
    """Two graphs, and a file of both."""
    path, both = tmp_path_factory.mktemp("artifact") / "both.rlx", graphs()
    rlx.save(path, both)
    return path, both


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b))


# -- what is loaded


def test_a_loaded_graph_gives_the_same_bits_by_every_way_to_run_it(made, tmp_path):
    layers = made[1][0]
    (want,) = layers.run({"x": X})
    assert layers.save(tmp_path / "one.rlx") == (tmp_path / "one.rlx").stat().st_size
    found = rlx.load(tmp_path / "one.rlx")
    assert isinstance(found, rlx.CompiledGraph) and same(found.run({"x": X}), [want]) and same(found.bound([X])(), [want])
    assert (found(X) == want).all() and found.run_typed({"x": (X.tobytes(), "f32")})[0][0] == want.tobytes()
    ((at, n),) = found.run_slots([X])
    assert (found.outputs_view()[0] == want).all() and n == 15 and at >= 0
    assert same(found.clone().run({"x": X}), [want])
    assert [str(d) for d in found.inputs + found.outputs] == [str(d) for d in layers.inputs + layers.outputs]
    assert [str(d) for d in found.params] == [str(d) for d in layers.params] and found.missing_params() == []
    ours, theirs = dict(found.memory_plan().regions), dict(layers.memory_plan().regions)
    assert ours == theirs and found.memory_plan().slots == layers.memory_plan().slots
    assert found.report().cache.state == "artifact" and str(tmp_path) in str(found.report())
    assert dict(found.report().texts) == dict(layers.report().texts) and str(found.report().work) == str(layers.report().work)


def test_a_loaded_graph_that_is_saved_again_gives_the_same_file(made, tmp_path):
    rlx.load(made[0])["counter"].save(tmp_path / "first.rlx")
    rlx.load(tmp_path / "first.rlx").save(tmp_path / "second.rlx")
    assert (tmp_path / "first.rlx").read_bytes() == (tmp_path / "second.rlx").read_bytes()


@pytest.mark.parametrize("precision", ["f32", "bf16", "f16", "int8"])
def test_precisions(precision, tmp_path):
    g = rlx.Graph("net")
    x, w = g.input("x", (5, 64), rlx.f32), g.param("w", (64, 96), rlx.f32)
    g.set_outputs([rlx.layer_norm(rlx.relu(x @ w), g.param("s", (96,), rlx.f32), g.param("t", (96,), rlx.f32))])
    rng = np.random.default_rng(3)
    made = Session(threads=2).compile(g, CompileOptions(precision=precision))
    made.set_params({d.name: rng.standard_normal(d.shape.static).astype(np.float32) for d in made.params})
    given = rng.standard_normal((5, 64)).astype(np.float32)
    made.save(tmp_path / "net.rlx")
    found = rlx.load(tmp_path / "net.rlx")
    assert same(found.run({"x": given}), made.run({"x": given}))
    assert found.options.precision == precision


def test_states_begin_anew_and_are_kept_between_runs(made):
    counter = made[1][1]
    counter.bind_handle("total", np.zeros(4, np.float32))
    counter.bind_handle("rows", np.zeros((6, 4), np.float32))
    want = [counter.run(STEP) for _ in range(3)]
    found = rlx.load(made[0])["counter"]
    assert [same(found.run(STEP), w) for w in want] == [True] * 3
    assert (found.read_handle("total") == 3 * STEP["delta"]).all() and found.options.handles == counter.options.handles
    with pytest.raises(rlx.errors.IndexRangeError, match="nothing was committed"):
        found.run(STEP | {"which": np.array([9, 1])})
    assert (found.read_handle("rows") == counter.read_handle("rows")).all()
    assert not rlx.load(made[0])["counter"].read_handle("total").any()


def test_weights_can_be_set_again_and_the_file_keeps_the_old_ones(made):
    path, (layers, _) = made
    before = path.read_bytes()
    found, (want,) = rlx.load(path)["layers"], layers.run({"x": X})
    other = Session(threads=2).compile(rlx.Graph.parse(str(_layers_graph())))
    rng = np.random.default_rng(5)
    kept = {d.name: rng.standard_normal(d.shape.static).astype(np.float32) for d in layers.params}
    kept["w"] = kept["w"][::-1].copy()
    other.set_params(kept)
    found.set_param("w", kept["w"])
    assert same(found.run({"x": X}), other.run({"x": X})) and not same(found.run({"x": X}), [want])
    assert path.read_bytes() == before and same(rlx.load(path)["layers"].run({"x": X}), [want])


def _layers_graph() -> rlx.Graph:
    g = rlx.Graph("layers")
    x, w = g.input("x", (3, 8), rlx.f32), g.param("w", (8, 40), rlx.f32)
    g.set_outputs([rlx.softmax(rlx.gelu(x @ w) @ g.param("v", (40, 5), rlx.f32))], ["p"])
    return g


def test_without_weights_they_are_set_after_the_load(made, tmp_path):
    layers = made[1][0]
    layers.save(tmp_path / "bare.rlx", weights=False)
    found = rlx.load(tmp_path / "bare.rlx")
    assert sorted(found.missing_params()) == ["v", "w"]
    with pytest.raises(MissingParamError, match="'w'"):
        found.run({"x": X})
    rng = np.random.default_rng(5)
    found.set_params({d.name: rng.standard_normal(d.shape.static).astype(np.float32) for d in layers.params})
    assert same(found.run({"x": X}), layers.run({"x": X}))
    unset = Session(threads=1).compile(_layers_graph())
    with pytest.raises(MissingParamError, match="'v', 'w' not set.*weights=False"):
        unset.save(tmp_path / "unset.rlx")
    assert not (tmp_path / "unset.rlx").exists()


def test_params_that_nothing_reads_and_those_without_elements_are_set_after_a_load(tmp_path):
    x = np.arange(3, dtype=np.float32)
    for dims, used in (((4,), False), ((0, 3), True)):
        g = rlx.Graph("few")
        p = g.param("p", dims, rlx.f32)
        g.set_outputs([g.input("x", (3,), rlx.f32) + 1.0, *[rlx.concat(p, p, axis=0)] * used])
        compiled = Session("cpu").compile(g)
        compiled.set_param("p", np.zeros(dims, np.float32))
        compiled.save(tmp_path / "few.rlx")
        again = rlx.load(tmp_path / "few.rlx")
        assert not again.missing_params() and (again.run({"x": x})[0] == x + 1).all()
        compiled.save(tmp_path / "bare.rlx", weights=False)
        assert rlx.load(tmp_path / "bare.rlx").missing_params() == ["p"]


def test_several_graphs_share_weights_and_states_as_before(made, tmp_path):
    found = rlx.load(made[0])
    assert isinstance(found, ArtifactFile) and list(found) == ["layers", "counter"] and len(found) == 2
    assert found["layers"] is found["layers"] and "ArtifactFile 'both.rlx' on CPU: graphs, layers, counter;" in repr(found)
    text = str(found)
    assert "layers on cpu, 2 threads: " in text and "counter on cpu, 1 thread: " in text and "weights/0: " in text
    with pytest.raises(UnknownNameError, match="no program 'x'; there are 'counter', 'layers'"):
        found["x"]
    for call in (found, found.run):
        with pytest.raises(BindingError, match=r"both.rlx holds the programs .*: call one of them, as file\['layers'\]"):
            call(X)
    g = rlx.Graph("twice")
    g.set_outputs([g.input("x", (2, 8), rlx.f32) @ g.param("w", (8, 40), rlx.f32)])
    small = Session(threads=1).compile(g, params=made[1][0].params)
    w = np.random.default_rng(6).standard_normal((8, 40)).astype(np.float32)
    for graph in (small, made[1][0]):  # each packs it in its own way
        graph.set_param("w", w)
    rlx.save(tmp_path / "shared.rlx", {"a": made[1][0], "b": small})
    both = rlx.load(tmp_path / "shared.rlx")
    assert both["a"].params.store is both["b"].params.store and both["a"].handles is not both["b"].handles
    assert same(both["b"].run({"x": X[:2]}), small.run({"x": X[:2]})) and same(both["a"].run({"x": X}), made[1][0].run({"x": X}))
    made[1][0].set_param("w", np.random.default_rng(5).standard_normal((8, 40)).astype(np.float32))  # as in the file of `made`


def test_buckets(tmp_path):
    g = rlx.Graph("attended")
    x = g.input("x", (1, 2, "seq", 8), rlx.f32)
    g.set_outputs([rlx.attention(x, x, x, mask="causal") * g.param("s", (8,), rlx.f32)])
    buckets = BucketedCompileCache(g, ladder=(4, 8, 16))
    buckets.set_param("s", np.arange(8, dtype=np.float32))
    buckets.save(tmp_path / "buckets.rlx", sizes=(4, 16))
    found = rlx.load(tmp_path / "buckets.rlx")
    rng = np.random.default_rng(0)
    for n in (1, 3, 4, 11, 16):
        given = {"x": rng.standard_normal((1, 2, n, 8)).astype(np.float32)}
        (y,) = found.run_padded(given)
        small = buckets if n <= 4 or n > 8 else found
        assert y.shape == (1, 2, n, 8) and same([y], small.run_padded(given))
    assert found.ladder == (4, 16) and "dim 'seq' of 4, 16" in repr(found)
    with pytest.raises(InputShapeError, match="from 1 to 16, got 17"):
        found.bucket(17)
    with pytest.raises(OptionError, match="ladder"):
        buckets.save(tmp_path / "other.rlx", sizes=(5,))


def test_a_graph_with_an_open_dim(tmp_path):
    g = rlx.Graph("rows")
    g.set_outputs([rlx.softmax(g.input("x", ("batch", 8), rlx.f32) @ g.param("w", (8, 5), rlx.f32))])
    made = rlx.compile(g, dims={"batch": "auto"})
    made.set_param("w", np.random.default_rng(1).standard_normal((8, 5)).astype(np.float32))
    want = made.run({"x": X})
    made.save(tmp_path / "rows.rlx")
    found = rlx.load(tmp_path / "rows.rlx")
    assert found.ladder == (1, 4) and same(found.run_padded({"x": X}), want)
    made.save(tmp_path / "rows.rlx", sizes=[2, 16])
    assert rlx.load(tmp_path / "rows.rlx").ladder == (2, 16)


def test_any_number_of_threads(made):
    (want,) = made[1][0].run({"x": X})
    for threads in (1, 2, 5):
        found = rlx.load(made[0], threads=threads)["layers"]
        assert same(found.run({"x": X}), [want]) and found.program().target.threads == threads


@pytest.mark.parametrize("threads", ["a", 0, 2.0])
def test_a_thread_count_without_meaning(made, threads):
    with pytest.raises(OptionError, match=f"threads is a whole number of at least 1, got {threads!r}"):
        rlx.load(made[0], threads=threads)


def test_it_loads_without_the_compiler_and_without_llvm(made):
    """In a process without a cache, in which llvmlite cannot be imported."""
    code = (
        "import sys; sys.modules['llvmlite'] = sys.modules['llvmlite.binding'] = None\n"
        "import json, numpy as np, rlx\n"
        f"found = rlx.load({str(made[0])!r})\n"
        "x = np.linspace(-2, 2, 24, dtype=np.float32).reshape(3, 8)\n"
        "(y,) = found['layers'].run({'x': x})\n"
        "assert (found['layers'].bound([x])()[0] == y).all(); found['layers'].run_slots([x])\n"
        "modules = sorted(m for m in sys.modules if m.startswith('rlx.'))\n"
        "print(json.dumps([y.tolist(), type(found['layers'].run).__name__, modules]))"
    )
    ran = subprocess.run([sys.executable, "-c", code], env={**os.environ, "RLX_CACHE": "0"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    y, kind, modules = json.loads(ran.stdout)
    assert (np.array(y, np.float32) == made[1][0].run({"x": X})[0]).all() and kind == "builtin_function_or_method"
    assert "rlx.compiler.check" in modules
    passes = {"assemble", "pipeline", "lowering", "fuse", "legalise", "memory", "canonicalise"}
    assert not passes & {m.split(".")[-1] for m in modules if m.startswith("rlx.compiler")}
    assert not {"rlx.host.emit", "rlx.backends.cpu.render", "rlx.frontends.language"} & set(modules)


def test_ways_that_need_the_graph_say_so(made):
    found = rlx.load(made[0])["layers"]
    g = _layers_graph()
    for call in (lambda: found.byte_offset(g.outputs[0]), lambda: found.has_buffer(g.outputs[0])):
        with pytest.raises(Unsupported, match="artifact, which has programs and no graph"):
            call()


def test_alternatives_for_several_processors(made, tmp_path):
    """Of graphs with one name, the first that this machine can run is taken."""
    path = tmp_path / "both.rlx"

    def better(manifest, sections):
        manifest["programs"].insert(0, {**manifest["programs"][0], "features": [*manifest["programs"][0]["features"], "avx1024"]})
        manifest["programs"].insert(1, {**manifest["programs"][0], "device": "cuda", "features": ["sm_90a"]})
        programs = [row for row in manifest["sections"] if row[0].startswith("programs/")]
        rows = [[f"programs/{i}", *row[1:]] for i, row in enumerate([programs[0], programs[0], *programs])]
        manifest["sections"] = rows + manifest["sections"][len(programs) :]
        sections[:] = [sections[0], sections[0], *sections]

    found = rlx.load(rewritten(made[0], path, better))
    assert same(found["layers"].run({"x": X}), made[1][0].run({"x": X}))


# -- what cannot be saved


def test_what_cannot_be_saved_is_said(made, tmp_path):
    layers, path = made[1][0], tmp_path / "x.rlx"
    for wrong in (None, [], "text", [layers, 3], {"a": None}):
        with pytest.raises(BindingError, match="save takes compiled graphs, got"):
            rlx.save(path, wrong)  # type: ignore[arg-type]
    with pytest.raises(DuplicateNameError, match="'layers' names two graphs"):
        rlx.save(path, [layers, layers])
    with pytest.raises(Unsupported, match="REF generates no code"):
        Session("ref").compile(_layers_graph()).save(path)
    with pytest.raises(OptionError, match="nowhere"):
        layers.save(tmp_path / "nowhere" / "x.rlx")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_the_old_file(made, tmp_path, monkeypatch):
    path = tmp_path / "x.rlx"
    made[1][0].save(path)
    before = path.read_bytes()

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(container.os, "fsync", full)
    with pytest.raises(OptionError, match="No space"):
        made[1][1].save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["x.rlx"]


def test_pipes_and_devices_stay_what_they_are(made, tmp_path):
    """Root's /dev/null became a file."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OptionError, match="pipe.*it is no file"):
        made[1][0].save(tmp_path / "pipe")
    assert (tmp_path / "pipe").is_fifo() and os.listdir(tmp_path) == ["pipe"]


# -- what is refused


def test_a_processor_that_lacks_an_instruction_set(made, tmp_path):
    def change(manifest, sections):
        for row in manifest["programs"]:
            row["features"] += ["avx1024", "amx-f64"]

    with pytest.raises(DeviceUnavailableError, match="'layers' needs avx1024, amx-f64, which CPU of this machine lacks"):
        rlx.load(rewritten(made[0], tmp_path / "x.rlx", change))


def test_another_architecture_and_another_device(made, tmp_path):
    def change(manifest, sections):
        for row in manifest["programs"]:
            row["features"] = ["triple=riscv64-unknown-linux-gnu", "cpu=generic"]

    with pytest.raises(DeviceUnavailableError, match="needs triple=riscv64-unknown-linux-gnu"):
        rlx.load(rewritten(made[0], tmp_path / "x.rlx", change))
    with pytest.raises(DeviceUnavailableError, match="no program for NULL; it has some for 'cpu'"):
        rlx.load(made[0], device="null")


def test_newer_formats(made, tmp_path, monkeypatch):
    def change(manifest, sections):
        manifest["programs"][0].update(format=99)
        manifest["rlx"] = "7.1"

    with pytest.raises(FormatError, match=r"'layers' has format 99, from rlx 7.1; this version reads \d+: save it again"):
        rlx.load(rewritten(made[0], tmp_path / "x.rlx", change))
    monkeypatch.setattr(container, "FORMAT", 2)
    made[1][0].save(tmp_path / "y.rlx")
    monkeypatch.setattr(container, "FORMAT", 1)
    with pytest.raises(FormatError, match="has format 2, this version reads up to 1: install a newer one"):
        rlx.load(tmp_path / "y.rlx")


def test_files_that_another_user_could_have_written(made, tmp_path):
    folder = tmp_path / "open"
    folder.mkdir()
    path = folder / "x.rlx"
    path.write_bytes(made[0].read_bytes())
    for mode, fine in ((0o600, True), (0o644, True), (0o664, False), (0o646, False)):
        path.chmod(mode)
        if fine:
            rlx.load(path)
        else:
            with pytest.raises(UntrustedFileError, match="holds machine code, and it can be written by other users.*trust=True"):
                rlx.load(path)
            assert same(rlx.load(path, trust=True)["layers"].run({"x": X}), made[1][0].run({"x": X}))
    path.chmod(0o600)
    for mode, fine in ((0o755, True), (0o775, False), (0o757, False), (0o1777, True)):
        folder.chmod(mode)
        (tmp_path / f"link{mode}").symlink_to(path)
        for name in (path, tmp_path / f"link{mode}"):
            if fine:
                rlx.load(name)
            else:
                with pytest.raises(UntrustedFileError, match=f"its folder {folder} can be written by other users"):
                    rlx.load(name)
    folder.chmod(0o700)


def test_files_of_other_users(made, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    if me == 0:
        rlx.load(made[0])  # root may write everything anyway
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    about = os.stat(made[0])
    other = os.stat_result((about.st_mode, *about[1:4], 1234, *about[5:]))
    with pytest.raises(UntrustedFileError, match="belongs to user 1234, not to 4321"):
        container.check_trusted(made[0], other)


def test_what_is_no_artifact(made, tmp_path):
    (tmp_path / "text").write_text("hello")
    with pytest.raises(ModelError, match="neither an artifact of rlx nor a GGUF file"):
        rlx.load(tmp_path / "text")
    with pytest.raises(ModelError, match="cannot be opened: No such file"):
        ArtifactFile(tmp_path / "missing.rlx")
    with pytest.raises(ModelError, match="is not a regular file"):
        ArtifactFile(tmp_path)
    with pytest.raises(ModelError, match="not an rlx artifact"):
        ArtifactFile(tmp_path / "text")


def test_damage_in_code_is_found_by_every_load_and_in_weights_on_request(made, tmp_path):
    manifest, sections = opened(made[0])
    names = [row[0] for row in manifest["sections"]]
    for name in names:
        changed = list(sections)
        at = names.index(name)
        changed[at] = changed[at][:100] + bytes([changed[at][100] ^ 4]) + changed[at][101:]
        (tmp_path / "x.rlx").write_bytes(closed(manifest, changed, sign=False))
        with pytest.raises(CorruptFileError, match=f"checksum of section '{name}' is wrong"):
            rlx.load(tmp_path / "x.rlx", verify=True)
        if name.startswith("programs/"):
            with pytest.raises(CorruptFileError, match=f"checksum of section '{name}' is wrong"):
                rlx.load(tmp_path / "x.rlx")[["layers", "counter"][at]]
    assert any(name.startswith("weights/") for name in names)


def test_damaged_files(made, tmp_path):
    raw = made[0].read_bytes()
    seen = {outcome(tmp_path / "x.rlx", damaged(raw, random.Random(i))) for i in range(150)}
    assert seen <= {"CorruptFileError", "FormatError", "ModelError"} and "CorruptFileError" in seen


def test_hostile_files_with_valid_checksums(made, tmp_path):
    rlx.save(tmp_path / "flows.rlx", flows())
    for path, count in ((made[0], 250), (tmp_path / "flows.rlx", 100)):
        seen = [outcome(tmp_path / "x.rlx", hostile(path, random.Random(i))) for i in range(count)]
        assert seen.count("CorruptFileError") > count / 2


HOSTILE: dict[str, tuple[Any, str]] = {
    "two sections of one name": (lambda m: m["sections"][1].__setitem__(0, "programs/0"), "or there are two"),
    "a path for a name": (lambda m: m["sections"][0].__setitem__(0, "../../etc/x"), "no name of a section"),
    "sections that overlap": (lambda m: m["sections"][1].__setitem__(1, 0), "'programs/0' is .* bytes from 0 to 0"),
    "a section of 2^60 bytes": (lambda m: m["sections"][0].__setitem__(2, 1 << 60), "'programs/0' is"),
    "a section past the end": (lambda m: m["sections"][-1].__setitem__(1, 1 << 40), "bytes from"),
    "no sections": (lambda m: m.update(sections=[]), "do not begin after the manifest|has no section"),
    "weights that overlap": (lambda m: m["weights"][0]["entries"][1].__setitem__(1, 0), "table of weights is wrong"),
    "weights past the end": (lambda m: m["weights"][0]["entries"][-1].__setitem__(2, 1 << 50), "table of weights is wrong"),
    "weights of another size": (lambda m: m["weights"][0]["entries"][-1].__setitem__(2, 64), "the program needs"),
    "weights left out": (lambda m: m["weights"][0]["entries"].pop(), "lacks the weights of"),
    "weights that are not there": (lambda m: m["programs"][0].update(weights=7), "names weights that are not there"),
    "a number of threads": (lambda m: m["programs"][0].update(threads=1 << 40), "manifest is incomplete"),
    "an option without meaning": (lambda m: m["programs"][0]["options"].update(precision="f128"), "options of program .* wrong"),
    "an extent of nothing": (lambda m: m["programs"][0]["options"].update(extent=["x", 9]), "extent that its options"),
    "a device without a name": (lambda m: m["programs"][0].update(device="a\0b"), "is for no device"),
    "no programs": (lambda m: m.update(programs=[]), "no programs"),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifests(what, made, tmp_path):
    change, message = HOSTILE[what]
    manifest, sections = opened(made[0])
    change(manifest)
    (tmp_path / "x.rlx").write_bytes(closed(manifest, sections, sign=False))
    with pytest.raises(CorruptFileError, match=message) as raised:
        found = rlx.load(tmp_path / "x.rlx")
        for name in found:
            found[name]
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("..", "code", "codes", 0, 1), 1 << 63, "are not whole numbers"), (("..", "code", "codes", 0, 2), 1 << 60, "no room"),
        (("..", "code", "codes", 0, 5), 9, "fetched a buffer ahead that it does not have"),
        (("plan", 0), 8, "outside the arena"), (("plan", 1), 3, "alignment"), (("plan", 0), 1 << 60, "no memory has room"),
        (("offsets", 0, 1), 1 << 40, "outside the arena"), (("phases", "steps", 0, 1, 0), 999, "does not exist"),
        (("buffers", 0, 1, 1), 1 << 60, "outside the arena"), (("kernels", 0, 2, 0, 2), 1 << 30, "is f32"),
        (("buffers", 3, 4, 1, 0, 1), 0, "ZeroDivisionError"),
    ],
)  # fmt: skip
def test_hostile_programs(place, value, message, made, tmp_path):
    def change(manifest, sections):
        size = int.from_bytes(sections[0][:4], "little")
        head, rest = json.loads(sections[0][4 : 4 + size]), sections[0][4 + size : manifest["sections"][0][2]]
        at, way = (head, place[1:-1]) if place[0] == ".." else (head["program"], place[:-1])
        for key in way:
            at = at[key]
        at[place[-1]] = value
        text = json.dumps(head).encode()
        raw = len(text).to_bytes(4, "little") + text + rest
        manifest["sections"][0][2] = len(raw)
        sections[0] = raw + bytes(-len(raw) % 64)

    with pytest.raises((CorruptFileError, OutOfMemoryError), match=message):
        rlx.load(rewritten(made[0], tmp_path / "x.rlx", change))["layers"]
