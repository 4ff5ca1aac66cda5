"""Search by meaning: passages, updates of the index, hostile index files, and the command."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.cli.main import run
from rlx.errors import ModelError, OptionError, RlxError
from rlx.frontends import search as module
from rlx.frontends.search import INDEX, TextIndex, passages
from rlx.frontends.weights import read_file

WORDS = ("apple", "bread", "cheese", "dog", "engine", "forest", "glass", "house")


class Words:
    """An embedder that counts WORDS. `seen`: the texts that it was given, without probes and queries."""

    max_length = 128

    def __init__(self, shift: int = 0) -> None:
        self.seen: list[str] = []
        self.shift = shift
        self.calls: list[int] = []

    def embed(self, texts, *, progress=None) -> np.ndarray:
        self.calls.append(len(texts))
        for n in range(len(texts) + 1) if progress else ():
            progress(n, len(texts))
        self.seen += [t for t in texts if t not in module.PROBES]
        counts = [[t.lower().count(w) for w in WORDS] + [1e-3, *(len(t) % n / n for n in (7, 11))] for t in texts]
        return np.roll(np.array(counts, np.float32), self.shift, axis=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "a.txt").write_text("An apple.\n\nAnother line.\n" + "filler " * 50 + "\n\nThe dog and the dog.\n")
    (tmp_path / "deep" / "b.md").write_text("cheese\r\n" * 3)
    (tmp_path / "deep" / "er" / "c.py").write_text("engine = forest\n")
    return tmp_path


def updated(folder: Path, *patterns: str, model: Words | None = None) -> tuple[TextIndex, Words, module.Changes]:
    model = model or Words()
    index = TextIndex(folder, model)
    return index, model, index.update(patterns)


# -- passages ------------------------------------------------------------------------------------------------------

LINES = ("", " ", "word", "two words", "é" * 9, "日本語", "x" * 40, "a b c " * 9, "\r", "\t")
TEXTS = st.lists(st.sampled_from(LINES), max_size=30)


@given(TEXTS, st.integers(9, 100))
def test_passages_cover_every_line_of_a_text_once(lines, most):
    data = "\n".join(lines).encode()
    found, covered = passages(data, most), bytearray(data)
    for (line, begin, end), after in zip(found, [*found[1:], None]):
        assert 0 <= begin < end <= len(data) and end - begin <= most and (after is None or end <= after[1])
        assert data[begin:end].strip() and data[begin:end].decode()
        assert line == 1 + data[:begin].count(b"\n")
        covered[begin:end] = b" " * (end - begin)
    assert not covered.strip()


def test_passages_end_at_blank_lines():
    text = b"\n\none one one\none\n\ntwo two two\n\nthree\n"
    assert [(line, text[b:e].strip()) for line, b, e in passages(text, 30)] == [
        (3, b"one one one\none"), (6, b"two two two"), (8, b"three"),
    ]  # fmt: skip
    assert passages(b"", 30) == passages(b" \n\n", 30) == []


# -- the index -----------------------------------------------------------------------------------------------------


def test_the_best_passages(folder):
    index, _, changes = updated(folder)
    assert (changes.new, changes.changed, changes.removed, changes.skipped) == (3, 0, 0, {})
    best, *_ = index.search("dog", top=2)
    assert (best.path, best.line, best.text.strip()) == ("a.txt", 6, "The dog and the dog.") and best.score > 0.9
    assert index.search("forest")[0].path == "deep/er/c.py" and len(index.search("cheese", top=100)) == len(index)
    scores = [f.score for f in index.search("engine", top=100)]
    assert scores == sorted(scores, reverse=True)
    assert [f.path for f in index.search("dog", patterns=iter(["*.md"]))] == ["deep/b.md"]
    (folder / "new.txt").write_text("dog")
    assert index.update(iter(["*.md"])).new == 0 and index.update(iter(["*.txt", "*.none"])).new == 1
    with pytest.raises(OptionError, match="empty query"):
        index.search(" ")
    with pytest.raises(OptionError, match="top"):
        index.search("dog", top=0)


ODD = [None, 0.5, b"x", "\ud800", {"a": 1}, [5], np.zeros(3), np.array(None), slice(1, 2)]


@pytest.mark.parametrize("call", [
    lambda index, x: TextIndex(x, Words()), lambda index, x: TextIndex(index.folder, x), lambda index, x: index.search(x),
    lambda index, x: index.search("dog", x), lambda index, x: index.search("dog", patterns=x),
    lambda index, x: index.update(x), lambda index, x: index.update(progress=0 if x is None else x),
])  # fmt: skip
def test_arguments_of_wrong_type_are_refused(folder, call):
    index, _, _ = updated(folder)
    for odd in ODD:
        with pytest.raises(RlxError):
            call(index, odd)


def test_only_what_changed_is_embedded(folder):
    updated(folder)
    index, model, changes = updated(folder)
    assert (model.seen, changes) == ([], module.Changes())
    before = (folder / INDEX).stat()
    (folder / "a.txt").write_text("glass")
    (folder / "deep" / "er" / "c.py").unlink()
    (folder / "new.txt").write_text("house")
    index, model, changes = updated(folder)
    assert (changes.new, changes.changed, changes.removed) == (1, 1, 1) and sorted(model.seen) == ["glass", "house"]
    assert (folder / INDEX).stat().st_ino != before.st_ino and not list(folder.glob(f"{INDEX}-*"))
    assert {f.path for f in index.search("engine", top=9)} == {"a.txt", "new.txt", "deep/b.md"}
    os.utime(folder / "new.txt", ns=(1, 1))  # its contents may have changed too
    assert updated(folder)[1].seen == ["house"]


def test_small_files_are_embedded_together_and_progress_rises(folder):
    for n in range(300):
        (folder / f"{n}.txt").write_text(f"apple {n}" if n % 3 else "")
    model, seen = Words(), []
    index = TextIndex(folder, model)
    index.update(progress=lambda done, total: seen.append((done, total)))
    assert model.calls == [2, len(index)] and len(index) > 200  # the probes, and all files
    done, totals = zip(*seen)
    assert list(done) == sorted(done) and set(totals) == {done[-1]} and len(set(done)) > 100
    found = {f.path for f in index.search("apple", top=999) if f.score > 0.5}
    assert {f"{n}.txt" for n in range(300) if n % 3} <= found


def test_the_same_results_from_the_file(folder):
    made, kept = updated(folder)[0], updated(folder)[0]
    assert made.search("dog", 10) == kept.search("dog", 10)


def test_patterns_leave_other_files_in_the_index(folder):
    index, model, changes = updated(folder, "*.md", "deep/er/*")
    assert changes.new == 2 and len(model.seen) == 2
    assert updated(folder, "*.txt")[2].new == 1
    assert updated(folder)[1].seen == []


def test_what_is_no_text_is_skipped_by_name(folder, monkeypatch):
    monkeypatch.setattr(module, "LARGEST", 1000)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / "latin.txt").write_bytes("Käse".encode("latin-1"))
    (folder / "big.log").write_text("x" * 1001)
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_text("dog")
    (folder / ".git").mkdir()
    (folder / ".git" / "x.txt").write_text("dog")
    (folder / "link.txt").symlink_to(folder / "a.txt")
    os.mkfifo(folder / "pipe")
    index, _, changes = updated(folder)
    assert changes.skipped == {"picture.png": "binary", "latin.txt": "not UTF-8 text", "big.log": "larger than 0 MB"}
    assert {f.path for f in index.search("dog", 99)} == {"a.txt", "deep/b.md", "deep/er/c.py"} and changes.new == 4
    (folder / "a.txt").write_bytes(b"\0dog")
    assert updated(folder)[2].removed == 1 and "a.txt" not in {f.path for f in updated(folder)[0].search("dog", 99)}


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_what_cannot_be_read_is_skipped(folder):
    (folder / "a.txt").chmod(0)
    assert updated(folder)[2].skipped == {"a.txt": "Permission denied"}


def test_an_interrupted_update_keeps_what_it_finished(folder, monkeypatch):
    model = Words()
    embed, index = model.embed, TextIndex(folder, model)

    def interrupted(texts, **how):
        if "engine" in texts[0]:
            raise KeyboardInterrupt
        return embed(texts, **how)

    monkeypatch.setattr(module, "AT_ONCE", 1)  # files one by one
    model.embed = interrupted
    with pytest.raises(KeyboardInterrupt):
        index.update()
    assert updated(folder)[1].seen == ["engine = forest"]


def test_another_model_makes_another_index(folder):
    updated(folder)
    _, model, changes = updated(folder, model=Words(shift=1))
    assert "made by another model" in changes.why and len(model.seen) > 2 and changes.new == 3


def test_any_reader_of_safetensors_reads_the_index(folder):
    numpy = pytest.importorskip("safetensors.numpy")
    index = updated(folder)[0]
    arrays = numpy.load_file(folder / INDEX)
    head = json.loads(arrays["files"].tobytes())
    assert head["version"] == 1 and sum(row[3] for row in head["files"]) == len(arrays["vectors"]) == len(index)
    np.testing.assert_allclose(np.linalg.norm(arrays["vectors"].astype("f4"), axis=1), 1, atol=1e-3)


# -- hostile index files -------------------------------------------------------------------------------------------


def forge(folder: Path, **changed: np.ndarray) -> None:
    """Write an index with these tensors instead, and a right checksum."""
    numpy = pytest.importorskip("safetensors.numpy")
    arrays = {n: np.array(a) for n, a in read_file(folder / INDEX).items() if n != "digest"} | changed
    arrays["digest"] = module._digest(arrays)
    numpy.save_file(arrays, folder / INDEX)


def text(value: object) -> np.ndarray:
    return np.frombuffer(json.dumps(value).encode(), np.uint8)


def test_a_forged_index_is_made_again_and_never_names_a_file(folder, tmp_path_factory):
    secret = tmp_path_factory.mktemp("elsewhere") / "secret.txt"
    secret.write_text("dog dog dog")
    updated(folder)
    arrays = {n: np.array(a) for n, a in read_file(folder / INDEX).items()}
    head, n = json.loads(arrays["files"].tobytes()), len(arrays["vectors"])
    size, mtime = secret.stat().st_size, secret.stat().st_mtime_ns
    outside = {"version": 1, "files": [[str(secret), size, mtime, n]]}
    forge(folder, files=text(outside))
    index, model, changes = updated(folder)
    assert changes.removed == 1 and changes.new == 3 and "dog dog dog" not in str(index.search("dog", 99))
    wrong = [
        {"files": text({"version": 2, "files": []})}, {"files": text([])}, {"files": text({"version": 1})},
        {"files": text({"version": 1, "files": [["a.txt", 1, 1, n + 1]]})}, {"files": text({"version": 1, "files": [["a.txt"]]})},
        {"files": text({"version": 1, "files": [["a.txt", 1, 1, -1], *head["files"]]})},
        {"files": text({"version": 1, "files": [["a.txt", 1, 1, n], ["a.txt", 1, 1, 0]]})},
        {"files": np.frombuffer(b"[" * 100_000, np.uint8)}, {"files": np.frombuffer(b"\xff", np.uint8)},
        {"vectors": np.full_like(arrays["vectors"], np.nan)}, {"vectors": arrays["vectors"][:-1]},
        {"vectors": arrays["vectors"].astype("f4")}, {"vectors": arrays["vectors"][:, :-1]},
        {"passages": arrays["passages"] - 10_000}, {"passages": arrays["passages"] + (1 << 40)},
        {"passages": arrays["passages"].ravel()}, {"passages": arrays["passages"].astype("f8")},
        {"probes": arrays["probes"][:1]}, {"probes": np.full_like(arrays["probes"], np.nan)},
    ]  # fmt: skip
    for changed in wrong:
        updated(folder)
        forge(folder, **changed)
        _, model, changes = updated(folder)
        assert changes.why.startswith("a new index is made: ") and changes.new == 3, changed


def test_a_damaged_index_is_made_again(folder):
    updated(folder)
    whole, rng = (folder / INDEX).read_bytes(), np.random.default_rng(0)
    for trial in range(150):
        raw = bytearray(whole)
        at = int(rng.integers(len(raw)))
        raw = raw[:at] if trial % 3 == 0 else raw[:at] + bytes([raw[at] ^ (1 << int(rng.integers(8)))]) + raw[at + 1 :]
        (folder / INDEX).write_bytes(raw)
        _, _, changes = updated(folder)
        assert changes.why and changes.new == 3
        assert hashlib.sha256((folder / INDEX).read_bytes()).digest()  # written anew
    assert updated(folder)[1].seen == []


# -- the command ---------------------------------------------------------------------------------------------------


def exit_code(*args: str) -> int:
    try:
        run(["search", *args])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture(scope="module")
def notes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("notes")
    (folder / "food.md").write_text("# Food\n\nBread is baked from flour and water.\n")
    (folder / "sky.txt").write_text("The sky is blue because air scatters \x1b[31mblue light.\n")
    (folder / "data.bin").write_bytes(b"\0" * 10)
    return folder


def test_the_command_prints_file_line_score_and_text(notes, capsys):
    assert exit_code(str(notes), "Why is the sky blue?", "--threads", "1", "--top", "1") == 0
    shown = capsys.readouterr()
    head, text = shown.out.splitlines()
    assert head.startswith(f"{notes}/sky.txt:1  0.") and text == "    The sky is blue because air scatters  [31mblue light."
    assert shown.err == "rlx: skipped, binary: data.bin\n"
    assert exit_code(str(notes), "How do I make bread?", "--glob", "*.md") == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{notes}/food.md:1  0.") and "sky" not in shown.out


def test_in_a_process_of_its_own(notes):
    command = [sys.executable, "-m", "rlx", "search", str(notes), "baking"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{notes}/food.md:") and done.stderr == "rlx: skipped, binary: data.bin\n"


@pytest.mark.parametrize(
    "args, code, said",
    [
        (["no-such-folder", "x"], 1, "no-such-folder is not a folder"),
        (["FOLDER", " ", "--model", "no-such-model"], 2, "an empty query"),  # before the model is opened
        (["FOLDER", "x", "--glob", "*.none"], 1, "has no text to search in files that match"),
        (["FOLDER", "x", "--top", "0"], 2, "top"),
        (["FOLDER", "x", "--model", "no-such-model"], 1, "no-such-model is not a folder"),
        (["FOLDER"], 2, "QUERY"),
    ],
)
def test_errors(notes, capsys, args, code, said):
    assert exit_code(*(str(notes) if a == "FOLDER" else a for a in args)) == code
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_index_that_cannot_be_written_is_said(tmp_path, monkeypatch, capsys):
    (tmp_path / "a.txt").write_text("text")

    def refused(*args, **how):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(module.tempfile, "mkstemp", refused)
    assert exit_code(str(tmp_path), "x") == 1
    assert capsys.readouterr().err == f"rlx: cannot write '{tmp_path / INDEX}': Permission denied\n"


def test_what_is_no_folder():
    with pytest.raises(ModelError, match="not a folder"):
        TextIndex("no-such-folder", Words())
