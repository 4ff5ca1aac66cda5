"""A container file: a manifest and named sections at aligned offsets, which can be mapped into memory. Format: docs/artifacts.md.

Every byte of the file is covered by a checksum. The header and the manifest are checked when the file is opened, a section when
its bytes are read; a section that is only mapped is not read, so it is checked on request. The file is untrusted: nothing is
allocated or addressed before its size is compared with the size of the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import stat
import struct
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.errors import CorruptFileError, FormatError, ModelError, OptionError, UntrustedFileError
from rlx.host.disk import foreign
from rlx.records import record

MAGIC, FORMAT = b"\x93rlxart\n", 1
HEADER = struct.Struct("<8sIIQQ32s")  # magic, format, 0, bytes of the manifest, bytes of the file, sha256 of these and manifest
PAGE = 4096  # bytes; alignment of the first section and of sections that are mapped
ALIGNMENT = 64  # bytes; alignment of the other sections
MAX_MANIFEST = 16 << 20  # bytes
CHUNK = 8 << 20  # bytes read at once
NAME = re.compile(r"[a-z][a-z0-9._-]*(/[a-z0-9][a-z0-9._-]*)*")


@record
class Section:
    """`offset` from the start of the file. `reach`: bytes up to the next section, padding included; the checksum covers them."""

    name: str
    offset: int
    nbytes: int
    reach: int
    digest: str


class Writer:
    """Writes a container under a temporary name, and renames it when it is complete. OptionError: it cannot be written there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._sections: list[tuple[str, list[memoryview], bool]] = []

    def add(self, name: str, parts: Iterable[bytes | np.ndarray], mapped: bool = False) -> None:
        """A section made of these parts. `mapped`: aligned to a page."""
        assert NAME.fullmatch(name) and all(name != n for n, _, _ in self._sections), name
        flat = [p.reshape(-1).view(np.uint8).data if isinstance(p, np.ndarray) else memoryview(p) for p in parts]
        self._sections.append((name, flat, mapped))

    def write(self, manifest: Mapping[str, Any]) -> int:
        """Write the file, readable and writable by its owner only. Returns its size."""
        starts, at = [], 0
        for _, parts, mapped in self._sections:
            at += -at % (PAGE if mapped else ALIGNMENT)
            starts.append(at)
            at += sum(p.nbytes for p in parts)
        ends = [*starts[1:], at]
        rows = []
        for (name, parts, _), start, end in zip(self._sections, starts, ends):
            nbytes, digest = sum(p.nbytes for p in parts), hashlib.sha256()
            for p in parts:
                digest.update(p)
            digest.update(bytes(end - start - nbytes))
            rows.append([name, start, nbytes, digest.hexdigest()])
        text = json.dumps({**manifest, "sections": rows}, separators=(",", ":")).encode()
        text += b" " * (-(HEADER.size + len(text)) % PAGE)
        if len(text) > MAX_MANIFEST:
            raise ModelError(f"{self.path}: the manifest takes {len(text)} bytes, at most {MAX_MANIFEST} are allowed")
        try:
            self._replace(text, starts, ends)
        except (OSError, ValueError) as e:  # ValueError: a path without a name
            raise OptionError(f"cannot write {str(self.path)!r}: {getattr(e, 'strerror', None) or e}") from e
        return HEADER.size + len(text) + at

    def _replace(self, text: bytes, starts: list[int], ends: list[int]) -> None:
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):  # such as /dev/null
            raise ValueError("it is no file, and a file would take its place")
        facts = MAGIC, FORMAT, 0, len(text), HEADER.size + len(text) + (ends[-1] if ends else 0)
        temporary = self.path.with_name(f".{self.path.name}.{os.urandom(6).hex()}")
        number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with open(number, "wb") as f:
                f.write(HEADER.pack(*facts, _digest(*facts, text)))
                f.write(text)
                for (_, parts, _), start, end in zip(self._sections, starts, ends):
                    f.writelines(parts)
                    f.write(bytes(end - start - sum(p.nbytes for p in parts)))
                f.flush()
                os.fsync(number)
            os.rename(temporary, self.path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


class Container:
    """An open container. `manifest`: its JSON object, without the table of sections."""

    def __init__(self, path: str | os.PathLike[str], trust: bool = False) -> None:
        """`trust`: accept a file that another user could have written.

        Raises ModelError: there is no such file, or it is no container; UntrustedFileError, FormatError, CorruptFileError."""
        self.path = Path(path)
        try:
            self._number = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as e:
            raise ModelError(f"{path} cannot be opened: {e.strerror}") from e
        weakref.finalize(self, os.close, self._number).atexit = False
        found = os.fstat(self._number)
        if not stat.S_ISREG(found.st_mode):
            raise ModelError(f"{path} is not a regular file")
        if not trust:
            check_trusted(self.path, found)
        self.nbytes = found.st_size
        self.manifest = self._manifest()
        self.sections = self._sections(self.manifest.pop("sections", None))

    def read(self, name: str) -> bytes:
        """The bytes of a section. CorruptFileError: there is none of that name, or its checksum is wrong."""
        section = self._section(name)
        raw = self._bytes(section.offset, section.reach, name)
        if hashlib.sha256(raw).hexdigest() != section.digest:
            raise self._damaged(name)
        return raw[: section.nbytes]

    def map(self, name: str) -> np.ndarray:
        """The section as uint8 over the file's pages. Writes stay in this process. Not checked: see `verify`."""
        section = self._section(name)
        if not section.nbytes:
            return np.zeros(0, np.uint8)
        before = section.offset % mmap.ALLOCATIONGRANULARITY
        access = {"flags": mmap.MAP_PRIVATE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
        whole = mmap.mmap(self._number, before + section.nbytes, offset=section.offset - before, **access)
        return np.frombuffer(whole, np.uint8)[before:]

    def place(self, name: str) -> tuple[int, int]:
        """The file's descriptor, and the offset of a section in it."""
        return self._number, self._section(name).offset

    def verify(self) -> None:
        """Compare the checksum of every section. CorruptFileError names the first that differs."""
        for section in self.sections.values():
            digest = hashlib.sha256()
            for at in range(0, section.reach, CHUNK):
                digest.update(self._bytes(section.offset + at, min(CHUNK, section.reach - at), section.name))
            if digest.hexdigest() != section.digest:
                raise self._damaged(section.name)

    def _damaged(self, name: str) -> CorruptFileError:
        return CorruptFileError(f"{self.path}: the checksum of section {name!r} is wrong: the file is damaged; save it again")

    def _section(self, name: str) -> Section:
        if name not in self.sections:
            raise CorruptFileError(f"{self.path} has no section {name!r}")
        return self.sections[name]

    def _bytes(self, offset: int, nbytes: int, what: str) -> bytes:
        parts, at = [], 0
        while at < nbytes:
            part = os.pread(self._number, min(CHUNK, nbytes - at), offset + at)
            if not part:
                raise CorruptFileError(f"{self.path}: {what} ends at byte {offset + at}, it needs {offset + nbytes}: truncated")
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def _manifest(self) -> dict[str, Any]:
        raw = os.pread(self._number, HEADER.size, 0)
        if raw[: len(MAGIC)] != MAGIC:
            raise ModelError(f"{self.path} is not an rlx artifact: it does not begin with its mark")
        if len(raw) < HEADER.size:
            raise CorruptFileError(f"{self.path}: {len(raw)} bytes are less than a header: the file is truncated")
        magic, format_, zero, nbytes, whole, digest = HEADER.unpack(raw)
        if format_ > FORMAT:
            raise FormatError(
                f"{self.path} has format {format_}, this version reads up to {FORMAT}: install a newer one, or save it again"
            )
        if whole != self.nbytes or nbytes > min(MAX_MANIFEST, whole - HEADER.size):
            says = f"its header says {whole}, with a manifest of {nbytes}: {'truncated' if self.nbytes < whole else 'damaged'}"
            raise CorruptFileError(f"{self.path}: the file has {self.nbytes} bytes, {says}; save it again")
        text = self._bytes(HEADER.size, nbytes, "the manifest")
        if _digest(magic, format_, zero, nbytes, whole, text) != digest or (HEADER.size + nbytes) % PAGE:
            raise CorruptFileError(f"{self.path}: the checksum of the manifest is wrong: the file is damaged; save it again")
        self._start = HEADER.size + nbytes
        try:
            manifest = json.loads(text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as e:
            raise CorruptFileError(f"{self.path}: the manifest is not valid JSON ({e})") from None
        if not isinstance(manifest, dict):
            raise CorruptFileError(f"{self.path}: the manifest is not an object")
        return manifest

    def _sections(self, rows: Any) -> dict[str, Section]:
        """The sections must follow each other without a gap, from the manifest to the end of the file."""
        sections: dict[str, Section] = {}
        try:
            ends = [start for _, start, _, _ in rows[1:]] + [self.nbytes - self._start]
            for (name, start, nbytes, digest), end in zip(rows, ends):
                numbers = type(start) is int and type(end) is int and type(nbytes) is int
                if not isinstance(name, str) or not NAME.fullmatch(name) or name in sections or not isinstance(digest, str):
                    raise ValueError(f"{str(name)[:40]!r} is no name of a section, or there are two")
                if not numbers or not 0 <= nbytes <= end - start < nbytes + PAGE or start % ALIGNMENT:
                    raise ValueError(f"section {name!r} is {str(nbytes)[:20]} bytes from {str(start)[:20]} to {str(end)[:20]}")
                sections[name] = Section(name, self._start + start, nbytes, end - start, digest)
            if (rows[0][1] if rows else self.nbytes - self._start) != 0:
                raise ValueError("the sections do not begin after the manifest")
        except (ValueError, TypeError, KeyError) as e:
            raise CorruptFileError(f"{self.path}: the table of sections is wrong: {e}") from None
        return sections


def check_trusted(path: Path, found: os.stat_result) -> None:
    """UntrustedFileError: another user than this one or root could have written the file, or replaced it."""
    why = foreign(found, root=True) and f"it {foreign(found, root=True)}"
    real = Path(os.path.realpath(path))
    for folder in () if why else real.parents:
        about = os.stat(folder)
        if not about.st_mode & stat.S_ISVTX and (reason := foreign(about, root=True)):  # sticky: others cannot replace files
            why = f"its folder {folder} {reason}"
            break
    if why:
        raise UntrustedFileError(
            f"{path} holds machine code, and {why}. If you know where it comes from, load it with trust=True; else make it again"
        )


def begins_with(path: Path, mark: bytes = MAGIC) -> bool:
    """Whether there is a file that begins with these bytes: by default, whether it is a container. OSError: it cannot be read."""
    if not path.is_file():
        return False
    with path.open("rb") as f:
        return f.read(len(mark)) == mark


def _digest(magic: bytes, format_: int, zero: int, nbytes: int, whole: int, text: bytes) -> bytes:
    return hashlib.sha256(struct.pack("<8sIIQQ", magic, format_, zero, nbytes, whole) + text).digest()


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name appears twice")
    return dict(pairs)


__all__ = ["Container", "Writer", "begins_with", "check_trusted"]
