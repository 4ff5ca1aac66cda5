"""Search by meaning: the text files of a folder in passages, their vectors, and the file that keeps these (docs/search.md).

The index file is untrusted when it is read: it is a safetensors file, whose reader checks every size; its checksum, its lists and
its numbers are checked here. It holds no text. Only files that a walk of the folder has found are opened, none that it names.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

from rlx.errors import CorruptFileError, ModelError, OptionError, as_path, called, items, reading, utf8, whole, writing
from rlx.frontends.weights import read_file
from rlx.ir.shown import Shown, counted

INDEX = ".rlx-search"  # the file's name, in the folder
VERSION = 1  # of its format, and of how files are divided
LARGEST = 4 << 20  # bytes of a file; larger ones are no text that someone has written
TOKEN_BYTES, MOST_BYTES = 3, 1200  # bytes of a token, at the least; of a passage, at the most
AT_ONCE = 256  # passages of several files that are embedded together, at the least
PROBES = ("The quick brown fox jumps over the lazy dog.", "Wie hoch ist der Berg?")  # their vectors tell models apart
SAME = 0.999  # cosine of a probe's vectors by the same model, on any device


class Embedder(Protocol):
    """EmbeddingModel, for example."""

    @property
    def max_length(self) -> int: ...
    def embed(self, texts: Sequence[str], *, progress: Callable[[int, int], None] | None = None) -> np.ndarray: ...


class Found(NamedTuple):
    """A passage. `path`: within the folder, with "/". `line`: its first, from 1. `score`: cosine with the query."""

    path: str
    line: int
    score: float
    text: str


class Stat(NamedTuple):
    size: int
    mtime_ns: int


@dataclass
class _File:
    """The passages of a file: i64 [n, 3] (first line, first byte, end), and their unit vectors, f16 [n, dim]."""

    stat: Stat
    spans: np.ndarray
    vectors: np.ndarray


class _Text(NamedTuple):
    """A file that has been read."""

    stat: Stat
    spans: np.ndarray
    passages: list[str]


@dataclass
class Changes:
    """The result of an update, in files. `skipped`: path -> reason. `why`: the reason why all had to be embedded, if they had."""

    new: int = 0
    changed: int = 0
    removed: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    why: str = ""


def checked_folder(folder: str | Path) -> Path:
    """ModelError: it is not a folder."""
    if not (found := Path(as_path(folder, "the folder to search"))).is_dir():
        raise ModelError(f"{folder} is not a folder; search takes a folder of text files")
    return found


def checked_query(query: str) -> str:
    """OptionError: it is no text, or has nothing to search for."""
    if not utf8("a query is text", query, OptionError).strip():
        raise OptionError("an empty query finds nothing: say what to search for")
    return query


class TextIndex(Shown):
    """The passages of a folder's text files, and their vectors. `update` compares it with the files; `search` finds passages."""

    @reading()
    def __init__(self, folder: str | Path, model: Embedder) -> None:
        """Reads the index file of an earlier update, if there is one for this model. ModelError: not a folder."""
        self.folder, self.model = checked_folder(folder), model
        self.path = self.folder / INDEX
        if not hasattr(model, "embed"):
            raise OptionError(f"passages are embedded by an EmbeddingModel, got {type(model).__name__}")
        self._probes = _unit(model.embed(PROBES))
        self._files: dict[str, _File] = {}
        self.why = ""  # the reason why nothing was read
        try:
            self._files = _read(self.path, self._probes)
        except (CorruptFileError, OSError) as e:
            self.why = f"a new index is made: {e}" if self.path.exists() else ""

    def _line(self) -> str:
        return f"of {str(self.folder)!r}: {counted(len(self._files), 'file')}, {counted(len(self), 'passage')}"

    def __len__(self) -> int:
        return sum(len(f.spans) for f in self._files.values())

    def update(self, patterns: Iterable[str] = (), progress: Callable[[int, int], None] | None = None) -> Changes:
        """Embed new and changed files, forget removed ones, and write the index file. `patterns` (such as "*.md", of names or
        paths): only files that match one are looked at. `progress(done, total)` counts bytes of files.

        An update that is interrupted keeps what it has finished. OptionError: the index file cannot be written."""
        patterns, say = _patterns(patterns), called("progress", progress, "(done, total)") or (lambda done, total: None)
        present, skipped = _walk(self.folder)
        changes = Changes(skipped=skipped, why=self.why)
        gone = self._files.keys() - present.keys()
        changes.removed = len(gone)
        for path in gone:
            del self._files[path]
        todo = [p for p in present if _matches(p, patterns) and (p not in self._files or self._files[p].stat != present[p])]
        total, done = sum(size for p in todo if (size := present[p].size) <= LARGEST), 0
        try:
            group: dict[str, _Text] = {}
            for path in todo:
                say(done, total)
                if (text := self._text(path, changes)) is not None:
                    group[path] = text
                if sum(len(t.passages) for t in group.values()) >= AT_ONCE or path == todo[-1]:
                    self._embed(group, changes, lambda n, begun=done: say(min(begun + n, total), total))
                    done, group = done + sum(t.stat.size for t in group.values()), {}
            say(total, total)
        finally:
            if changes.new or changes.changed or changes.removed:
                with writing(self.path):
                    _write(self.path, self._files, self._probes)
        return changes

    def _embed(self, texts: Mapping[str, _Text], changes: Changes, say: Callable[[int], None]) -> None:
        """The files with these texts. `say(bytes)`: how much of them is done."""
        every, size = [p for t in texts.values() for p in t.passages], sum(t.stat.size for t in texts.values())
        vectors = np.zeros((0, self._probes.shape[1]), np.float16)
        if every:
            made = self.model.embed(every, progress=lambda n, of: say(size * n // of))
            vectors = _unit(made).astype(np.float16)
        at = 0
        for path, text in texts.items():
            changes.changed, changes.new = changes.changed + (path in self._files), changes.new + (path not in self._files)
            self._files[path] = _File(text.stat, text.spans, vectors[at : at + len(text.spans)])
            at += len(text.spans)

    def search(self, query: str, top: int = 5, patterns: Iterable[str] = ()) -> list[Found]:
        """The passages that are closest to the query, best first."""
        patterns = _patterns(patterns)
        whole("top", top, 1)
        query_vector = _unit(self.model.embed([checked_query(query)]))[0]
        files = [(path, f) for path, f in sorted(self._files.items()) if len(f.spans) and _matches(path, patterns)]
        scores = [f.vectors.astype(np.float32) @ query_vector for _, f in files]
        every = np.concatenate([np.zeros(0, np.float32), *scores])
        owners = np.repeat(np.arange(len(files)), [len(s) for s in scores])
        starts = np.cumsum([0, *(len(s) for s in scores)])
        found = []
        for at in np.argsort(-every, kind="stable"):
            path, file = files[owners[at]]
            line, begin, end = map(int, file.spans[at - starts[owners[at]]])
            text = self._passage(path, begin, end)
            found += [] if text is None else [Found(path, line, float(every[at]), text)]
            if len(found) == top:
                break
        return found

    def _passage(self, path: str, begin: int, end: int) -> str | None:
        """None: the file has been removed since."""
        with suppress(OSError), (self.folder / path).open("rb") as f:
            f.seek(begin)
            return f.read(end - begin).decode("utf-8", "replace")
        return None

    def _text(self, path: str, changes: Changes) -> _Text | None:
        """None: the file is no text."""
        try:
            with (self.folder / path).open("rb") as f:
                stat = _stat(os.fstat(f.fileno()))
                data = f.read(LARGEST + 1)
        except OSError as e:
            changes.skipped[path] = e.strerror or type(e).__name__
            return None
        reason = f"larger than {LARGEST >> 20} MB" if len(data) > LARGEST else "binary" if b"\0" in data else ""
        try:
            data.decode("utf-8")
        except UnicodeDecodeError:
            reason = reason or "not UTF-8 text"
        if reason:
            changes.skipped[path] = reason
            changes.removed += self._files.pop(path, None) is not None  # it was text once
            return None
        spans = passages(data, min(TOKEN_BYTES * self.model.max_length, MOST_BYTES))
        found = [data[b:e].decode("utf-8", "replace") for _, b, e in spans]
        return _Text(stat, np.array(spans, np.int64).reshape(-1, 3), found)


def passages(data: bytes, most: int) -> list[tuple[int, int, int]]:
    """(first line, first byte, end) of each passage of a text: whole lines of at most `most` bytes together, that end at a blank
    line if they are at least a third of that; a longer line is divided at spaces."""
    out: list[tuple[int, int, int]] = []
    line, at, begin, first = 1, 0, 0, 1

    def close(end: int) -> None:
        if text := data[begin:end].rstrip():
            out.append((first, begin, begin + len(text)))

    for row in data.split(b"\n"):
        end = at + len(row)
        blank = not row.strip()
        if (blank and at - begin >= most // 3) or (begin < at and end - begin > most):
            close(at)
            begin, first = at, line
        if not data[begin:at].strip() and not blank:  # begin at a line with text
            begin, first = at, line
        while end - begin > most:
            cut = data.rfind(b" ", begin + most // 2, begin + most) + 1 or begin + most
            while data[cut] & 0xC0 == 0x80:  # inside a character
                cut -= 1
            close(cut)
            begin, first = cut, line
        line, at = line + 1, end + 1
    close(len(data))
    return out


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)


def _patterns(given: Iterable[str]) -> list[str]:
    found = items("patterns are a list of texts, as ['*.md']", given, OptionError)
    return [utf8("a pattern is text, as '*.md'", p, OptionError) for p in found]


def _matches(path: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch(path, p) or fnmatch(path.rpartition("/")[2], p) for p in patterns)


def _stat(found: os.stat_result) -> Stat:
    return Stat(found.st_size, found.st_mtime_ns)


def _walk(folder: Path) -> tuple[dict[str, Stat], dict[str, str]]:
    """(the files by path within the folder, folders that cannot be read). Hidden ones are left out; links are not followed."""
    found: dict[str, Stat] = {}
    skipped: dict[str, str] = {}

    def refused(e: OSError) -> None:
        skipped[os.path.relpath(e.filename, folder)] = e.strerror or type(e).__name__

    for place, folders, files in os.walk(folder, onerror=refused):
        folders[:] = sorted(n for n in folders if not n.startswith("."))
        for name in sorted(files):
            path = Path(place, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                with suppress(OSError):  # it was removed just now
                    found[path.relative_to(folder).as_posix()] = _stat(path.stat())
    return found, skipped


# -- the index file --------------------------------------------------------------------------------------------------


def _digest(arrays: dict[str, np.ndarray]) -> np.ndarray:
    sha = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        sha.update(f"{name} {array.dtype} {array.shape}\n".encode())
        sha.update(np.ascontiguousarray(array).data)
    return np.frombuffer(sha.digest(), np.uint8)


def _write(path: Path, files: dict[str, _File], probes: np.ndarray) -> None:
    """Replace the index file by renaming a complete one."""
    rows = [[name, *f.stat, len(f.spans)] for name, f in files.items()]
    arrays = {
        "files": np.frombuffer(json.dumps({"version": VERSION, "files": rows}).encode("ascii"), np.uint8),
        "passages": np.concatenate([np.zeros((0, 3), np.int64), *(f.spans for f in files.values())]),
        "probes": probes.astype(np.float32),
        "vectors": np.concatenate([np.zeros((0, probes.shape[1]), np.float16), *(f.vectors for f in files.values())]),
    }
    arrays["digest"] = _digest(arrays)
    header, at = {}, 0
    for name, array in arrays.items():
        kind = {"f": "F", "i": "I", "u": "U"}[array.dtype.kind] + str(8 * array.itemsize)
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [at, at := at + array.nbytes]}
    text = json.dumps(header).encode("ascii")
    handle, temporary = tempfile.mkstemp(prefix=f"{INDEX}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for array in arrays.values():
                f.write(np.ascontiguousarray(array).data)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _read(path: Path, probes: np.ndarray) -> dict[str, _File]:
    """The files of the index. CorruptFileError: it is damaged, of another version, or of another model."""
    try:
        arrays = {name: np.array(array) for name, array in read_file(path).items()}
        digest = arrays.pop("digest")
        if not np.array_equal(digest, _digest(arrays)):
            raise CorruptFileError(f"{path}: the checksum is wrong")
        head = json.loads(arrays["files"].tobytes())
        if head["version"] != VERSION:
            raise CorruptFileError(f"{path} is of version {head['version']!r}, this is {VERSION}")
        spans, vectors, known = arrays["passages"], arrays["vectors"], arrays["probes"]
        shapes = spans.shape[1:] == (3,) and vectors.shape == (len(spans), probes.shape[1])
        if known.shape != probes.shape or not (np.sum(known * probes, axis=1) > SAME).all():
            raise CorruptFileError(f"{path} was made by another model")
        types = (spans.dtype, vectors.dtype) == (np.int64, np.float16)
        sound = (spans[:, 0] > 0) & (spans[:, 1] >= 0) & (spans[:, 1] < spans[:, 2]) & (spans[:, 2] <= LARGEST)
        if not shapes or not types or not sound.all() or not (np.abs(vectors) <= 2).all():
            raise ValueError("passages and vectors contradict each other")
        out, at = {}, 0
        for row in head["files"]:
            name, size, mtime, count = row
            if not isinstance(name, str) or any(type(n) is not int or n < 0 for n in (size, count)) or type(mtime) is not int:
                raise ValueError("a file is no (name, size, time, passages)")
            out[name] = _File(Stat(size, mtime), spans[at : at + count], vectors[at : at + count])
            at += count
        if at != len(spans) or len(out) != len(head["files"]):
            raise ValueError("the files do not have all passages")
        return out
    except (CorruptFileError, OSError):
        raise
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as e:
        raise CorruptFileError(f"{path}: {e}") from None


__all__ = ["INDEX", "Changes", "Found", "TextIndex", "checked_folder", "passages"]
