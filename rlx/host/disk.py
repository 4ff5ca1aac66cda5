"""A cache on disk for later processes: bytes by key, in a folder of this user. The contents are opaque to this module.

An entry is written under a temporary name and then renamed: readers see all of it or nothing, even if the writer is killed.
Entries are checked when read; a damaged one counts as missing. Because compiled code is executed, files that another user could
have written are not read. Above `max_bytes`, the least recently used entries are evicted. Disk errors are not raised: a warning
is issued once, and the process compiles without the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
import struct
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache

from rlx import knobs
from rlx.records import record

MAGIC, FORMAT = b"rlxcache", 1
HEADER = struct.Struct("<8sIIQ32s")  # magic, format, 0, bytes of content, sha256 of the entry's name and content
STALE = 3600  # seconds after which a half-written file counts as abandoned
LOOK = 16  # the folder is scanned each time that this process has written 1/16 of `max_bytes`
FRESH, DAMAGED = "first seen", "damaged entry rebuilt"
_NAME = re.compile(r"[a-z]+-[0-9a-f]+(-[0-9a-f]+)?")
_PART = "writing."


@record
class Entry:
    name: str
    nbytes: int
    used: float  # seconds since the epoch


class DiskCache:
    """The entries in one folder. Any number of threads and processes may use it at once."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._unseen = -1  # bytes left to write before the next scan of the folder; below 0: scan

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def get(self, name: str, use: bool = True) -> tuple[bytes | None, str]:
        """An entry's content; or None, and the reason of the miss. `use`: mark the entry as recently used."""
        try:
            number = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None, FRESH
        except OSError as e:
            return None, f"cannot be read: {e.strerror}"
        try:
            found = os.fstat(number)
            why = foreign(found) if stat.S_ISREG(found.st_mode) else "is not a regular file"
            if why:
                return None, f"not trusted: {self.path(name)} {why}"
            with open(number, "rb", closefd=False) as f:
                raw = f.read()
            if use:
                with contextlib.suppress(OSError):  # of a folder that is mounted read-only
                    os.utime(number)
        except OSError:
            return None, DAMAGED
        finally:
            os.close(number)
        content = memoryview(raw)[HEADER.size :]
        return (bytes(content), "") if raw[: HEADER.size] == _header(name, [content]) else (None, DAMAGED)

    def put(self, name: str, parts: Sequence[bytes]) -> None:
        """Store an entry, replacing one of that name. If that fails, a warning is issued, once per folder. It is not flushed to
        the disk, which takes 6 ms on a busy one: a power failure may leave a truncated entry, which is detected when read."""
        assert _NAME.fullmatch(name), f"an entry is called kind-hex, not {name!r}"
        temporary = self.path(_PART + os.urandom(12).hex())
        size = HEADER.size + sum(map(len, parts))
        if size > self.max_bytes:
            return
        try:
            number = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                with open(number, "wb") as f:
                    f.writelines([_header(name, parts), *parts])
                os.rename(temporary, self.path(name))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as e:
            _warn(self.folder, f"compiled code is not kept: {e}; RLX_CACHE_DIR names another folder, RLX_CACHE=0 keeps none")
            return
        self._unseen -= size
        if self._unseen < 0:
            self._unseen = self._trim()

    def entries(self) -> list[Entry]:
        """All entries, least recently used first."""
        return sorted((e for e in self._files() if _NAME.fullmatch(e.name)), key=lambda e: e.used)

    def clear(self) -> int:
        """Remove all entries and temporary files. Returns the number of entries. OSError: no permission."""
        found = list(self._files())
        for e in found:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path(e.name))
        return sum(not e.name.startswith(_PART) for e in found)

    def _files(self) -> Iterator[Entry]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.folder) as listed:
            for item in listed:
                if _NAME.fullmatch(item.name) or item.name.startswith(_PART):
                    with contextlib.suppress(FileNotFoundError):  # another process removed or renamed it
                        found = item.stat(follow_symlinks=False)
                        yield Entry(item.name, found.st_size, found.st_mtime)

    def _trim(self) -> int:
        """Evict entries above `max_bytes` and remove abandoned temporary files. Returns the bytes until the next scan."""
        with contextlib.suppress(OSError):
            kept = sorted(self._files(), key=lambda e: e.used)
            total, now = sum(e.nbytes for e in kept), time.time()
            for e in kept:
                left = e.name.startswith(_PART)
                if (left and now - e.used > STALE) or (not left and total > self.max_bytes):
                    with contextlib.suppress(OSError):
                        os.unlink(self.path(e.name))
                        total -= e.nbytes
        return self.max_bytes // LOOK


def _header(name: str, parts: Sequence[bytes | memoryview]) -> bytes:
    digest = hashlib.sha256(name.encode())
    for part in parts:
        digest.update(part)
    return HEADER.pack(MAGIC, FORMAT, 0, sum(map(len, parts)), digest.digest())


def foreign(found: os.stat_result, root: bool = False) -> str:
    """Why another user may have written the file or folder; "" if none can. `root`: it may belong to root."""
    if found.st_uid != os.geteuid() and not (root and found.st_uid == 0):
        return f"belongs to user {found.st_uid}, not to {os.geteuid()}"
    return "can be written by other users" if found.st_mode & 0o022 else ""


def disk_cache() -> tuple[DiskCache | None, str]:
    """The cache configured by the knobs; or None, and the reason."""
    if not knobs.CACHE.get():
        return None, "RLX_CACHE=0"
    if not (folder := knobs.cache_folder()):
        return None, "there is no home folder, and RLX_CACHE_DIR is not set"
    return _opened(os.path.abspath(folder), max(knobs.CACHE_MB.get(), 0) << 20)


@lru_cache(8)
def _opened(folder: str, max_bytes: int) -> tuple[DiskCache | None, str]:
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        why = foreign(os.stat(folder))
    except OSError as e:
        why = f"cannot be made: {e.strerror}"
    if why:
        why = f"the folder {folder} {why}"
        _warn(folder, f"compiled code is not kept: {why}; RLX_CACHE_DIR names another folder, RLX_CACHE=0 keeps none")
        return None, f"{why}"
    return DiskCache(folder, max_bytes), ""


@cache
def source_digest() -> str:
    """sha256 of the package's sources that take part in compiling graphs. Part of the keys, so that code of other versions is not
    used."""
    digest, folders = hashlib.sha256(), [(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")]
    for folder, inside in folders:
        for name in sorted(os.listdir(folder)):
            path = f"{folder}/{name}"
            if name.endswith((".py", ".h")):
                number = os.open(path, os.O_RDONLY)
                content = os.read(number, os.fstat(number).st_size + 1)
                os.close(number)
                digest.update(b"%s%s %d\n%s" % (inside.encode(), name.encode(), len(content), content))
            elif name not in ("frontends", "cli", "__pycache__") and os.path.isdir(path):
                folders.append((path, f"{inside}{name}/"))
    return digest.hexdigest()[:32]


_warned: set[str] = set()


def _warn(folder: str, message: str) -> None:
    if folder not in _warned:
        _warned.add(folder)
        warnings.warn(message, RuntimeWarning, stacklevel=2)
